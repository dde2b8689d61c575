"""Sounds for microphones: voices made of vowels, over noise. Always the same for the same seed.

A vowel is a tone with all its harmonics, whose loudness follows three resonances, the formants. Speech moves
from vowel to vowel in syllables, and its pitch rises and falls.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SAMPLES_PER_S: Final = 16_000

VOWELS: Final = np.array(
    [  # the first three formants, in hertz
        (730, 1090, 2440),  # as in father
        (530, 1840, 2480),  # bed
        (270, 2290, 3010),  # see
        (570, 840, 2410),  # law
        (300, 870, 2240),  # too
    ]
)
_BANDWIDTHS: Final = (80.0, 100.0, 140.0)
_SYLLABLE_S: Final = 0.16
_PITCHES: Final = (95.0, 230.0)
_HARMONICS_HZ_MAX: Final = 4000.0
_CONTROL_SAMPLES: Final = 80  # the loudness of the harmonics changes every 5 ms
_NOISE: Final = 0.003
_LOUDNESS: Final = 0.4


def silence(seconds: float, seed: int) -> Floats:
    """Quiet noise."""
    noise = np.random.default_rng([seed, 1]).standard_normal(round(seconds * SAMPLES_PER_S))
    return (noise * _NOISE).astype(np.float32)


def speech(seconds: float, seed: int) -> Floats:
    """A voice that speaks, from -1 to 1."""
    numbers = np.random.default_rng([seed, 2])
    times = np.arange(round(seconds * SAMPLES_PER_S)) / SAMPLES_PER_S
    melody = 1 + 0.12 * np.sin(2 * np.pi * (1.7 * times + numbers.random()))
    pitch = numbers.uniform(*_PITCHES) * melody
    cycles = np.cumsum(pitch) / SAMPLES_PER_S

    at = slice(None, None, _CONTROL_SAMPLES)
    order = numbers.integers(len(VOWELS), size=int(seconds / _SYLLABLE_S) + 2)
    moments = np.arange(len(order)) * _SYLLABLE_S
    formants = np.stack([np.interp(times[at], moments, VOWELS[order, number]) for number in range(3)])
    harmonics = np.arange(1, int(_HARMONICS_HZ_MAX / pitch.min()) + 1)[:, np.newaxis]
    loudness = _resonance(harmonics * pitch[at], formants).repeat(_CONTROL_SAMPLES, axis=1)[:, : len(times)]
    tones = np.sin(2 * np.pi * (harmonics * cycles % 1).astype(np.float32))
    syllables = 0.55 - 0.45 * np.cos(2 * np.pi * times / _SYLLABLE_S)
    voice: Floats = (loudness * tones).sum(axis=0) * syllables
    voice *= _LOUDNESS / np.abs(voice).max()
    return voice.astype(np.float32) + silence(seconds, seed)


def _resonance(hertz: NDArray[np.float64], formants: NDArray[np.float64]) -> Floats:
    """How loud each harmonic (rows) is at each moment (columns) behind the three formants."""
    loudness = np.ones_like(hertz)
    for formant, bandwidth in zip(formants, _BANDWIDTHS, strict=True):
        ratio = hertz / formant
        loudness /= np.hypot(1 - ratio**2, ratio * bandwidth / formant)
    return np.asarray(loudness, np.float32)
