"""The connections of producers on a real Redis: callers that share one, large results, servers that cannot be
used for a while, and servers whose clocks are behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
from redis import Redis
from redis.exceptions import RedisError

from carpool import AsyncClient, Client
from carpool.client import options, packing, reply_reads, transport
from carpool.client.options import RequestOptions
from carpool.errors import InvalidArgumentError
from carpool.keys import Keys
from carpool.store.connection import Link, LinkError
from carpool_cli.local.embedded import EmbeddedRedis
from support.echo import EchoService, read_entry
from support.redis_client import redis_at
from support.transport import transport_of
from support.waiting import wait_until

MODEL: Final = "Echo"
KEYS: Final = Keys(MODEL)
BAD_OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "lane": {"lane": "\ud800"},
    "value": {"fields": {"a": "\ud800"}},
    "cost": {"cost": 2**70},
    "digits": {"fields": {"a": 10**5000}},
    "none": {"fields": {"a": None}},
    "name": {"fields": {1: "x"}},
    "end_sequences": {"fields": {"end_sequences": "x"}},
    "withdraw": {"fields": {"withdraw": "x"}},
    "correlation_id": {"correlation_id": "\ud800"},
}


class Server:
    """A Redis with a model whose requests the test answers itself."""

    def __init__(self, binary: Path) -> None:
        self.embedded = EmbeddedRedis(append_only=False, binary=binary)
        self.url = self.embedded.url
        self.redis = redis_at(self.url, protocol=2)
        self.register()

    def register(self, model: str = MODEL) -> None:
        self.redis.hset(Keys(model).registration, "max_batch_size", 64)
        self.redis.sadd("carpool:models", model)

    def requests(self, model: str = MODEL) -> list[tuple[str, str]]:
        """Correlation ID and reply stream of each waiting request."""
        entries = [fields for _, fields in self.redis.xrange(Keys(model).requests)]
        return [(one.correlation_id, one.reply_to) for fields in entries for one in read_entry(fields)]

    def wait_for(self, count: int, model: str = MODEL) -> list[tuple[str, str]]:
        wait_until(lambda: len(self.requests(model)) >= count, description=f"{count} requests")
        found = self.requests(model)
        self.redis.delete(Keys(model).requests)
        return found

    def answer(
        self, request: tuple[str, str], body: bytes, entry_id: str = "*", model: str = MODEL, **other: Any
    ) -> None:
        """Write a result, in an entry of its own."""
        correlation_id, reply_to = request
        envelope = {"correlation_id": correlation_id, "status": "OK", "body": body, "final": True}
        envelope |= {
            "content_type": "application/octet-stream",
            "batch_size": 1,
            "queue_us": 1,
            "compute_us": 1,
        }
        packed = msgpack.packb([{**envelope, **other}])
        self.redis.xadd(Keys(model).replies(reply_to), {"results": packed}, id=entry_id)

    def stop(self) -> None:
        self.redis.close()
        self.embedded.stop()


@pytest.fixture
def server(server: Path) -> Iterator[Server]:
    started = Server(server)
    yield started
    started.stop()


async def wait_in_thread(predicate: Callable[[], object], description: str) -> Any:
    return await asyncio.to_thread(wait_until, predicate, description=description)


# --- callers that share a connection -----------------------------------------------------------------------


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=list(BAD_OPTIONS))
async def test_option_that_cannot_be_sent_fails_only_its_caller(
    server: Server, options: dict[str, Any]
) -> None:
    """In each call, beside other requests, alone, and as the first request to a model."""
    with EchoService(server.url, MODEL):
        async with AsyncClient(server.url, timeout=20) as client:
            for _ in range(2):
                with pytest.raises(InvalidArgumentError):
                    await client.infer(MODEL, 1, **options)
            calls: list[Callable[[], Any]] = [
                lambda: client.infer(MODEL, 1, **options),
                lambda: client.request(MODEL, 1, **options),
                lambda: client.submit(MODEL, 1, **options),
                lambda: client.infer(MODEL, 1, retries=3, **options),
                lambda: client.infer_many(MODEL, [1, 2], **options),
                lambda: anext(client.map(MODEL, [1, 2], **options)),
                lambda: anext(client.stream(MODEL, 1, **options)),
            ]
            async with client.sequence(MODEL) as sequence:
                calls.append(lambda: sequence.infer(1, **options))
                for call in calls:
                    others = [client.submit(MODEL, number) for number in range(5)]
                    with pytest.raises(InvalidArgumentError):
                        await call()
                    assert await asyncio.gather(*others) == [0, 1, 2, 3, 4]
            assert await client.models() == [MODEL]
            assert client._packer.transport.losses == 0


def test_option_that_cannot_be_sent_fails_only_its_thread(server: Server) -> None:
    with EchoService(server.url, MODEL), Client(server.url, timeout=20) as client:
        assert client.infer(MODEL, 7) == 7
        anything: list[Any] = [*BAD_OPTIONS.values()]
        for options in anything:
            futures = [client.submit(MODEL, n, **(options if n == 2 else {})) for n in range(5)]
            with pytest.raises(InvalidArgumentError):
                futures.pop(2).result()
            assert [future.result() for future in futures] == [0, 1, 3, 4]
            for call in (client.infer, client.request, lambda *a, **o: next(client.stream(*a, **o))):
                with pytest.raises(InvalidArgumentError):
                    call(MODEL, 1, **options)
            with pytest.raises(InvalidArgumentError):
                client.infer_many(MODEL, [1, 2], **options)
            with pytest.raises(InvalidArgumentError):
                next(iter(client.map(MODEL, [1, 2], **options)))
        unhashable: Any = [MODEL]
        odd, other = client.submit(unhashable, 1), client.submit(MODEL, 2)
        with pytest.raises(TypeError):
            odd.result()
        assert other.result() == 2


def unchecked(options: RequestOptions, timeout_s: float | None) -> dict[str, Any]:
    """In place of the check of options: one that lets everything through."""
    given: Any = options
    fields = {**(given.get("fields") or {}), **given}
    return {name: value for name, value in fields.items() if name in ("lane", "cost", "a")}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", ["lane", "value", "cost", "digits"])
async def test_what_no_check_found_fails_with_its_entry(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, alone: bool
) -> None:
    monkeypatch.setattr(options, "optional_fields", unchecked)
    with EchoService(server.url, MODEL):
        async with AsyncClient(server.url, timeout=20) as client:
            assert await client.infer(MODEL, 7) == 7
            for _ in range(3):
                bad = client.submit(MODEL, 1, **BAD_OPTIONS[name])
                shares = [] if alone else [client.submit(MODEL, 2)]
                others = [client.submit(MODEL, number, timeout=19) for number in range(5)]
                models = asyncio.ensure_future(client.models())
                for failed in (bad, *shares):
                    with pytest.raises(InvalidArgumentError, match="cannot be encoded"):
                        await failed
                assert await asyncio.gather(*others) == [0, 1, 2, 3, 4]
                assert await models == [MODEL]
            await client.flush()


async def test_body_that_redis_cannot_take_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis would close the connection, again and again."""
    monkeypatch.setattr(packing, "STRING_BYTES_MAX", 1_000_000)
    with EchoService(server.url, MODEL):
        async with AsyncClient(server.url, timeout=20) as client:
            other = client.submit(MODEL, b"x" * 1_000_000)
            with pytest.raises(InvalidArgumentError, match="body: 1000001 bytes; at most 1000000"):
                await client.infer(MODEL, b"x" * 1_000_001)
            assert len(await other) == 1_000_000
            assert client._packer.transport.losses == 0


# --- large results -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [1, 3])
async def test_producer_that_fell_behind_reads_results_larger_than_its_connection(
    server: Server, models: int
) -> None:
    """Given a program that stood still, and a Redis that sends no more than 2 MB at once, expect all results.

    The last result is small, so nothing but the losses tells how large the others are.
    """
    names = [f"{MODEL}{number}" for number in range(models)]
    server.redis.config_set("client-output-buffer-limit", "normal 2mb 0 0")
    for name in names:
        server.register(name)
    async with AsyncClient(server.url, timeout=60) as client:
        for name in names:
            first = client.submit(name, b"1")
            (request,) = await asyncio.to_thread(server.wait_for, 1, name)
            server.answer(request, b"1", model=name)
            assert await first == b"1"
        waiting = [client.submit(name, b"1") for name in names for _ in range(20)]
        await client.flush()
        for name in names:  # on the event loop's thread, so that the client cannot read meanwhile
            for request in server.wait_for(20, name):
                server.answer(request, bytes(1_500_000), model=name)
        assert {len(result) for result in await asyncio.gather(*waiting)} == {1_500_000}
        later = client.submit(names[0], b"1")
        (request,) = await asyncio.to_thread(server.wait_for, 1, names[0])
        server.answer(request, b"2", model=names[0])
        assert await later == b"2"
        assert 0 < client._packer.transport.losses < 10


# --- servers that cannot be used for a while ---------------------------------------------------------------


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses before reconnections, each shortened to a tenth."""
    passed: list[float] = []

    def shorten(pause_s: float) -> float:
        passed.append(pause_s)
        return pause_s / 10

    monkeypatch.setattr(transport, "with_jitter", shorten)
    return passed


def have_grown(last: list[float]) -> bool:
    """Whether these nine pauses grew up to the longest one. A connection that was found useless so late that
    it seemed to be a good one, because this process was held up, has them begin anew."""
    return len(last) == 9 and last == sorted(last) and last[-2:] == [1.0, 1.0]


async def test_requests_wait_while_redis_is_a_replica(server: Server, pauses: list[float]) -> None:
    """Expect pauses that grow, and each result once requests are accepted."""
    async with AsyncClient(server.url, timeout=60) as client:
        await client.models()
        with EchoService(server.url, MODEL):
            assert await client.infer(MODEL, 7) == 7
        server.redis.replicaof("127.0.0.1", 1)  # of a server that does not exist
        waiting = [client.submit(MODEL, number) for number in range(3)]
        waiting.append(client.submit(MODEL, b"x" * 100_000))
        await wait_in_thread(lambda: have_grown(pauses[-9:]), "it connects again and again")
        assert not any(future.done() for future in waiting)
        server.redis.replicaof("NO", "ONE")
        for request in await asyncio.to_thread(server.wait_for, 4):
            server.answer(request, b"2")
        assert await asyncio.gather(*waiting) == [b"2"] * 4


async def test_requests_wait_while_redis_runs_a_long_script(server: Server, pauses: list[float]) -> None:
    server.redis.config_set("lua-time-limit", 20)
    hanging: Any = Redis.from_url(server.url, protocol=2, socket_timeout=None)

    def hang() -> None:
        with contextlib.suppress(RedisError):
            hanging.eval("while true do end", 0)

    async with AsyncClient(server.url, timeout=60) as client:
        with EchoService(server.url, MODEL) as service:
            assert await client.infer(MODEL, 7) == 7
            service.paused.set()
        script = threading.Thread(target=hang)
        script.start()
        try:
            await wait_in_thread(lambda: is_busy(server), "the script runs")
            waiting = client.submit(MODEL, b"1")
            await wait_in_thread(lambda: len(pauses) >= 3, "it connects again and again")
            assert not waiting.done()
            with pytest.raises(LinkError, match="BUSY"):  # a service starts over, and pauses likewise
                Link(server.url, name="service").call("XLEN", KEYS.requests)
        finally:
            server.redis.execute_command("SCRIPT", "KILL")
            script.join()
            hanging.close()
        (request,) = await asyncio.to_thread(server.wait_for, 1)
        server.answer(request, b"2")
        assert await waiting == b"2"


def is_busy(server: Server) -> bool:
    try:
        server.redis.ping()
    except RedisError as error:
        return "BUSY" in str(error)
    return False


# --- servers whose clocks are behind -----------------------------------------------------------------------

AHEAD: Final = "99999999999999"  # ms: an ID of a server whose clock is ahead


@pytest.mark.parametrize("trimmed", [False, True])
async def test_results_of_a_server_whose_clock_is_behind_are_read(
    server: Server, trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given results that were read, when another server writes with lower IDs, expect these results, too."""
    if not trimmed:
        monkeypatch.setattr(transport, "SILENCE_CHECK_S", 3600.0)  # which trims, too
    async with AsyncClient(server.url, timeout=60) as client:
        first = client.submit(MODEL, b"1")
        (request,) = await asyncio.to_thread(server.wait_for, 1)
        replies = KEYS.replies(request[1])
        server.answer(request, b"1", f"{AHEAD}-0")
        assert await first == b"1"
        if trimmed:
            await wait_in_thread(lambda: not server.redis.xlen(replies), "what was read is trimmed")
        waiting = [client.submit(MODEL, b"1") for _ in range(3)]
        await client.flush()
        await asyncio.to_thread(server.embedded.restart)  # without its data
        await asyncio.to_thread(wait_until, server.requests, description="they are sent again")
        server.register()
        later = client.submit(MODEL, b"1")
        for number, request in enumerate(await asyncio.to_thread(server.wait_for, 4)):
            server.answer(request, b"2", f"7-{number}")
        assert await asyncio.gather(*waiting, later) == [b"2"] * 4


async def test_results_in_a_stream_that_begins_anew_are_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a reply stream that has expired, when the clock was set back, expect the next results."""
    monkeypatch.setattr(transport, "READ_BLOCK_MS", 50)
    monkeypatch.setattr(transport, "SILENCE_CHECK_S", 0.02)
    async with AsyncClient(server.url, timeout=60) as client:
        for number in range(3, 0, -1):
            waiting = client.submit(MODEL, b"1")
            (request,) = await asyncio.to_thread(server.wait_for, 1)
            server.answer(request, b"%d" % number, f"{number}000-0")
            assert await waiting == b"%d" % number
            replies = KEYS.replies(request[1])
            channel = client._channels[MODEL]
            await wait_in_thread(
                lambda: channel.last_id == reply_reads.FROM_THE_START,  # noqa: B023
                "what was read is trimmed",
            )
            assert not server.redis.xlen(replies)
            server.redis.delete(replies)
        assert client._packer.transport.losses == 0


async def test_what_is_read_again_reaches_nobody_twice(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given results and chunks that were read, when they are read again from another server, expect each
    once, and the rest of the stream."""
    monkeypatch.setattr(transport, "SILENCE_CHECK_S", 3600.0)
    async with AsyncClient(server.url, timeout=60) as client:
        one = client.submit(MODEL, b"1")
        (request,) = await asyncio.to_thread(server.wait_for, 1)
        server.answer(request, b"1", "5000-0")
        assert await one == b"1"
        stream = client.stream(MODEL, b"1")
        (begun,) = await asyncio.to_thread(server.wait_for, 1)
        for index in range(2):
            server.answer(begun, b"%d" % index, f"6000-{index}", final=False, index=index)
        assert [await anext(stream), await anext(stream)] == [b"0", b"1"]

        await asyncio.to_thread(server.embedded.restart)
        server.answer(request, b"1", "50-0")  # what a replica had
        for index in range(2):
            server.answer(begun, b"%d" % index, f"50-{index + 1}", final=False, index=index)
        server.answer(begun, b"2", "50-7", final=False, index=2)
        server.answer(begun, b"012", "50-8", index=3)
        assert [chunk async for chunk in stream] == [b"2"]
        assert stream.reply is not None and stream.reply.value == b"012"
        assert transport_of(client).losses == 1
