"""The Redis floor: the commands of Carpool, without Carpool.

A proxy between Carpool's processes and Redis records the commands and replies of one burst of requests: as
many as will be in flight. Then these processes are killed, and `floor.c` replays the commands over one
connection, over and over. What it reaches is what Redis and one client, which does nothing else, can do with
these commands.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import hiredis

from carpool.client.aio import AsyncClient
from carpool.keys import Keys
from carpool.store.connection import Link
from grid.catalog import carpool_services
from grid.environments import compiled
from grid.load import Sent
from grid.models import MODELS, Array
from grid.setup import HOST, Setup

_RECORDINGS: Final = 12  # the shortest is used: it has no heartbeats in it
_SETTLE_S: Final = 0.05  # until the batcher has read what was settled
_OPTIONS_MAX: Final = 8  # arguments before the streams of a read
_FIRST_KEY: Final = 3  # of EVALSHA: the name, the digest and the number of keys are before it
_ENTRY_ID: Final = re.compile(rb"(?<!\d)\d{13}-\d+")
_NAMES: Final = frozenset(
    {
        b"XADD",
        b"XREAD",
        b"XREADGROUP",
        b"EVALSHA",
        b"SET",
        b"MULTI",
        b"EXEC",
        b"GETRANGE",
        b"UNLINK",
        b"DEL",
        b"XDEL",
        b"XACK",
    }
)
_LITERAL, _ID_OF_REPLY, _LAST_OF_STREAM = range(3)  # as in floor.c


# --- recording ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Recorded:
    """A command and its reply, as bytes. `sent` and `replied` number all events in their order.

    All commands of a transaction are `replied` when EXEC is, so that none of another connection, as XADD of
    a request without a large body, gets between them.
    """

    arguments: list[bytes]
    sent: int
    reply: bytes = b""
    replied: int = 0

    @property
    def name(self) -> bytes:
        return self.arguments[0].upper()

    @property
    def reads(self) -> bool:
        return self.name in (b"XREAD", b"XREADGROUP")

    def without_block(self) -> list[bytes]:
        """The arguments; in a replay there is nothing to wait for."""
        if not self.reads or b"BLOCK" not in self.arguments[:_OPTIONS_MAX]:
            return self.arguments
        at = self.arguments.index(b"BLOCK")
        return self.arguments[:at] + self.arguments[at + 2 :]


class Proxy:
    """Passes bytes between clients and Redis, and records both directions."""

    def __init__(self, port: int) -> None:
        self._redis_port = port
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self.recorded: list[Recorded] = []

    async def start(self) -> int:
        """Listen; returns the port."""
        self._server = await asyncio.start_server(self._accept, HOST, 0, limit=1 << 26)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Close all connections."""
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        redis_reader, redis_writer = await asyncio.open_connection(HOST, self._redis_port)
        unanswered: list[Recorded] = []
        transaction: list[Recorded] = []  # MULTI, and what is queued behind it
        commands, replies = hiredis.Reader(notEnoughData=Proxy), _Splitter()

        def on_commands(data: bytes) -> None:
            commands.feed(data)
            while (command := commands.gets()) is not Proxy:
                unanswered.append(Recorded(command, next(self._numbers)))

        def on_replies(data: bytes) -> None:
            for reply in replies.feed(data):
                recorded = unanswered.pop(0)
                recorded.reply, recorded.replied = reply, next(self._numbers)
                self.recorded.append(recorded)
                if recorded.name == b"MULTI" or reply == b"+QUEUED\r\n":
                    transaction.append(recorded)
                elif recorded.name == b"EXEC":
                    for queued in transaction:
                        queued.replied = recorded.replied
                    transaction.clear()

        for source, target, on_data in (
            (reader, redis_writer, on_commands),
            (redis_reader, writer, on_replies),
        ):
            task = asyncio.create_task(_pass_on(source, target, on_data))
            self._tasks.add(task)


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_data: Callable[[bytes], None]
) -> None:
    try:
        while data := await reader.read(1 << 20):
            on_data(data)
            writer.write(data)
    except ConnectionError:
        pass  # a service was killed
    finally:
        writer.close()


class _Splitter:
    """Splits a stream of replies."""

    def __init__(self) -> None:
        self._data = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The replies that are complete."""
        self._data += data
        replies, start = [], 0
        while end := self._end_of(start):
            replies.append(self._data[start:end])
            start = end
        self._data = self._data[start:]
        return replies

    def _end_of(self, start: int) -> int:
        """The end of the value that begins at `start`, or 0."""
        line_end = self._data.find(b"\r\n", start)
        if line_end < 0:
            return 0
        kind, text, end = self._data[start : start + 1], self._data[start + 1 : line_end], line_end + 2
        if kind == b"$" and int(text) >= 0:
            end += int(text) + 2
        elif kind == b"*":
            for _ in range(int(text)):
                end = self._end_of(end)
                if not end:
                    return 0
        return end if end <= len(self._data) else 0


# --- from a recording to a trace ---------------------------------------------------------------------------


def in_order(recorded: Sequence[Recorded]) -> list[Recorded]:
    """The commands of the requests, in an order in which each finds what it found.

    The reply to a read may be seen before that to the command which added what it found, on another
    connection. So a read of batches comes after the commands that dispatched them: no later, because its
    batches must be fetched before they are committed. Another read comes after all commands that were sent
    before its reply: nothing depends on it, and what it adds is not always in the replies.
    """
    commands = [
        command
        for command in recorded
        if command.name in _NAMES
        and command.reply[:3] not in (b"*-1", b"$-1")
        and not command.reply.startswith(b"-")
    ]
    others = [command for command in commands if not command.reads]
    dispatched = {
        batch_id: command.replied
        for command in others
        if command.name == b"EVALSHA"
        for batch_id in _ENTRY_ID.findall(command.reply)
    }

    def position(command: Recorded) -> tuple[int, int]:
        if not command.reads:
            return command.replied, 0
        if command.name == b"XREADGROUP":
            causes = [dispatched.get(batch_id, 0) for batch_id in _batch_ids(command.reply)]
        else:
            causes = [cause.replied for cause in others if cause.sent < command.replied]
        return max([command.replied, *causes]), 1

    return sorted(commands, key=position)


def _batch_ids(reply: bytes) -> list[bytes]:
    """The IDs of the entries that XREADGROUP returned, not those in the batches."""
    reader = hiredis.Reader()
    reader.feed(reply)
    return [batch_id for _, entries in reader.gets() for batch_id, _ in entries]


def trace(commands: Sequence[Recorded]) -> bytes:
    """The file that floor.c reads.

    An ID is known by the stream that it is of: a request and a batch of the same millisecond may have the
    same. Scripts whose first key is the request stream name requests, and return batches. All others name
    batches.
    """
    added: dict[tuple[bool, bytes], tuple[int, int]] = {}  # (is a batch, ID) -> a reply, and the index in it
    streams: dict[bytes, bytes] = {}  # a stream that is read -> the ID after which the first read reads
    read_by: dict[bytes, int] = {}  # a stream -> replies after which its last ID is known
    parts = bytearray()
    for number, command in enumerate(commands):
        arguments, reads = command.without_block(), command.name == b"XREAD"
        positions = _positions(arguments) if reads else {}
        parts += struct.pack("<II", reads, len(arguments))
        for index, argument in enumerate(arguments):
            if index in positions:
                name = positions[index]
                streams.setdefault(name, argument)
                stream = list(streams).index(name)
                parts += struct.pack("<IIII", 1, _LAST_OF_STREAM, stream, read_by.get(name, 0))
            else:
                names_batches = command.name == b"EVALSHA" and not arguments[_FIRST_KEY].endswith(
                    b":requests"
                )
                parts += _argument(argument, names_batches, added)
        if not command.reads:
            is_batch = command.name == b"EVALSHA"
            for index, match in enumerate(_ENTRY_ID.finditer(command.reply)):
                added[is_batch, match[0]] = number, index
        for name in positions.values():
            read_by[name] = number + 1
    head = bytearray(struct.pack("<I", len(streams)))
    for name, first in streams.items():
        head += struct.pack("<I", len(name)) + name + struct.pack("<I", len(first)) + first
    return bytes(head + struct.pack("<I", len(commands)) + parts)


def _positions(arguments: Sequence[bytes]) -> dict[int, bytes]:
    """Of XREAD: the indexes of the arguments that are IDs, and the stream of each."""
    start = [argument.upper() for argument in arguments].index(b"STREAMS") + 1
    count = (len(arguments) - start) // 2
    return {start + count + number: arguments[start + number] for number in range(count)}


def _argument(argument: bytes, is_batch: bool, added: dict[tuple[bool, bytes], tuple[int, int]]) -> bytes:
    """An argument: bytes, and references to IDs in earlier replies."""
    pieces, end = [], 0
    for match in _ENTRY_ID.finditer(argument):
        known = added.get((is_batch, match[0]))
        if known is not None:
            pieces += [
                _literal(argument[end : match.start()]),
                struct.pack("<III", _ID_OF_REPLY, *known),
            ]
            end = match.end()
    pieces.append(_literal(argument[end:]))
    return struct.pack("<I", len(pieces)) + b"".join(pieces)


def _literal(data: bytes) -> bytes:
    return struct.pack("<II", _LITERAL, len(data)) + data


# --- the client --------------------------------------------------------------------------------------------


class FloorClient:
    """Records traces when they are first needed, and replays them."""

    def __init__(self, setup: Setup, program: Path) -> None:
        self._setup, self._program = setup, program
        self._redis_port = urlsplit(setup.redis_url).port or 6379
        self._traces: dict[int, Path] = {}
        self._directory = tempfile.TemporaryDirectory()

    async def call(self, body: Array) -> Any:
        """Not for the floor."""
        raise NotImplementedError

    async def record(self, sizes: Sequence[int]) -> None:
        """Record a trace for each number of requests in flight."""
        proxy = Proxy(self._redis_port)
        url = f"redis://{HOST}:{await proxy.start()}/0"
        body = MODELS[self._setup.model].body(0)
        async with _services(replace(self._setup, redis_url=url)), AsyncClient(url) as client:
            await _until_served(client, self._setup.model, body)
            for size in sizes:
                recordings = []
                for _ in range(_RECORDINGS):
                    await asyncio.sleep(_SETTLE_S)
                    proxy.recorded.clear()
                    await asyncio.gather(*[client.infer(self._setup.model, body) for _ in range(size)])
                    await asyncio.sleep(_SETTLE_S)
                    recordings.append(in_order(proxy.recorded))
                path = Path(self._directory.name) / str(size)
                path.write_bytes(trace(min(recordings, key=len)))
                self._traces[size] = path
        await proxy.stop()

    async def closed_loop(self, _: Array, in_flight: int, seconds: float) -> Sent:
        """Replay the burst of this many requests."""
        process = await asyncio.create_subprocess_exec(
            *(self._program, HOST, str(self._redis_port), self._traces[in_flight], str(seconds)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        output, errors = await process.communicate()
        if process.returncode != 0:
            raise RuntimeError(errors.decode().strip())
        self._check_nothing_is_left()
        figures = json.loads(output)
        p50_ms, p99_ms = figures["p50_us"] / 1e3, figures["p99_us"] / 1e3
        latencies_ms = [p50_ms] * 98 + [p99_ms] * 2  # with these percentiles
        return Sent(figures["cycles"] * in_flight, figures["seconds"], latencies_ms if in_flight == 1 else ())

    def _check_nothing_is_left(self) -> None:
        """Each cycle must end as Carpool's burst did: nothing waits, and nothing is in flight."""
        keys, link = Keys(self._setup.model), Link(self._setup.redis_url, name="floor")
        try:
            left = {key: link.call("XLEN", key) for key in (keys.requests, keys.batches)}
        finally:
            link.close()
        if any(left.values()):
            raise RuntimeError(f"the replayed commands left entries behind: {left}")

    async def close(self) -> None:
        """Remove the traces."""
        self._directory.cleanup()


@asynccontextmanager
async def _services(setup: Setup) -> AsyncIterator[None]:
    """Carpool's services, which are killed at the end of the block: stopping would send commands."""
    environment = {**os.environ, **setup.environment(), "CARPOOL_REDIS_URL": setup.redis_url}
    services = [
        subprocess.Popen([sys.executable, *arguments], env=environment, start_new_session=True)
        for _, *arguments in carpool_services(setup.model).values()
    ]
    try:
        yield
    finally:
        for service in services:
            os.killpg(service.pid, signal.SIGKILL)
            service.wait()


async def _until_served(client: AsyncClient, model: str, body: Array) -> None:
    while model not in await client.models():
        await asyncio.sleep(0.05)
    await client.infer(model, body)


async def connect(setup: Setup) -> FloorClient:
    """Record. Raises UnavailableError without a C compiler."""
    client = FloorClient(setup, compiled(Path(__file__).with_suffix(".c")))
    await client.record((32,) if setup.model == "image" else (1, 64, 1024))
    return client
