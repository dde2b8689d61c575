"""Streams from real services, as the Python client and `carpool infer` read them."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest

from carpool import AsyncClient, Client
from carpool.client import AsyncStream
from carpool.errors import DeadlineExceededError, InternalError
from conftest import SERVERS
from support.command import carpool
from support.models.stepping import SLOTS, chunk_after, text_of
from support.stack import Stack
from support.waiting import wait_until

MODELS: Final = ("stepping.py:Chain", "square")
README: Final = Path(__file__).parents[2] / "README.md"
ENDLESS: Final = {"length": 10**9, "step_s": 0.01}


@pytest.fixture
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module. Its `countdown` is the program of the README."""
    stack = stacks(SERVERS[0])
    example = stack.home / "count.py"
    example.write_text(dedent(streaming_example()[0]), encoding="utf-8")
    stack.serve(*MODELS, f"{example}:countdown")
    return stack


def streaming_example() -> tuple[str, list[str]]:
    """The program `count.py` of the README, and the commands below it."""
    text = README.read_text(encoding="utf-8")
    (found,) = re.findall(r"\n((?:    # count\.py\n)(?:    .*\n|\n)+)", text)
    program, *commands = re.split(r"^    \$ \.venv/bin/carpool ", found, flags=re.MULTILINE)
    return program, [command.strip() for command in commands]


def test_streaming_example_of_the_readme_runs_as_it_stands(stack: Stack) -> None:
    up, infer = streaming_example()[1]
    assert up == "up count.py:countdown"
    done = carpool(stack.url, *infer.split())
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n2\n1\n", "")


async def test_streaming_line_of_the_readmes_producer_runs_as_it_stands(stack: Stack) -> None:
    (line,) = re.findall(r"^ +(async for chunk in client\.stream\(.*?\):)", README.read_text(), re.MULTILINE)
    program = f"async def read(client):\n chunks = []\n {line}\n  chunks.append(chunk)\n return chunks"
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    async with AsyncClient(stack.url) as client:
        assert await names["read"](client) == [3, 2, 1]


async def collect(stream: AsyncStream) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_streams_side_by_side_are_those_of_the_oracle(stack: Stack) -> None:
    """More of them than slots. Each chunk depends on all before it."""
    async with AsyncClient(stack.url) as client:
        lengths = [index % 7 * 5 for index in range(3 * SLOTS)]
        streams = [client.stream("Chain", {"length": length, "seed": length}) for length in lengths]
        texts = await asyncio.gather(*map(collect, streams))
        for length, stream, chunks in zip(lengths, streams, texts, strict=True):
            assert stream.correlation_id is not None and stream.reply is not None
            expected = text_of(stream.correlation_id, length, length)
            assert "".join(chunks) == (stream.reply.value or "") == expected
            assert (stream.reply.first_us is None) == (length == 0)


async def test_whole_output_is_returned_without_a_stream(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        assert await client.infer("countdown", 3) == [3, 2, 1]
        reply = await client.request("Chain", {"length": 4}, correlation_id="whole-1")
        assert (reply.value, reply.first_us) == (text_of("whole-1", 4), None)
        assert await collect(client.stream("square", 7)) == [49]


async def test_left_and_expired_streams_free_their_slots(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        for _ in range(2):
            for stream in [client.stream("Chain", ENDLESS) for _ in range(SLOTS)]:
                async with stream:
                    await anext(stream)
        late = client.stream("Chain", ENDLESS, timeout=0.5)
        with pytest.raises(DeadlineExceededError):
            await collect(late)
        await asyncio.to_thread(stack.wait_until_idle, "Chain")


async def test_model_that_raises_in_mid_stream(stack: Stack) -> None:
    async with AsyncClient(stack.url) as client:
        stream = client.stream("Chain", {"length": 5, "raises_at": 1}, correlation_id="raises-1")
        assert await anext(stream) == chunk_after("raises-1", None, "")
        with pytest.raises(InternalError, match="chunk 1 is not possible"):
            await anext(stream)


def test_threads_read_streams(stack: Stack) -> None:
    with Client(stack.url) as client:
        assert list(client.stream("countdown", 4)) == [4, 3, 2, 1]
        for _ in client.stream("countdown", 10**9):  # merged chunks: it is faster than any reader
            break
    wait_until(lambda: stack.redis.xlen("carpool:{countdown}:batches") == 0, description="it was withdrawn")


@pytest.mark.parametrize(
    ("model", "body", "printed"),
    [("countdown", "3", "3\n2\n1\n"), ("square", "7", "49\n"), ("Chain", json.dumps({"length": 0}), "")],
)
def test_infer_prints_a_stream(stack: Stack, model: str, body: str, printed: str) -> None:
    done = carpool(stack.url, "infer", model, body, "--stream")
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")
