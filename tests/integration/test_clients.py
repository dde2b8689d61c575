"""AsyncClient and Client against a whole stack."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from carpool import AsyncClient, Client
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from carpool.keys import Keys
from conftest import SERVERS
from support.models.hashing import digest
from support.stack import Stack
from support.waiting import wait_until

LATE_S: Final = 0.6
MODELS: Final = (
    "square",
    "plain.py:Echo",
    "plain.py:Single",
    "plain.py:Few",
    "plain.py:Noop",
    "faulty.py:Faulty",
    "hashing.py:Hashing",
)


@pytest.fixture
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module."""
    one = stacks(SERVERS[0])
    one.serve(*MODELS)
    return one


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.url, timeout=15) as one:
        yield one


@pytest.fixture
def blocking(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, timeout=15) as one:
        yield one


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """Holds up Echo, Single and Few; opened at the latest when the test ends."""
    path = tmp_path / "gate"
    yield path
    path.touch()


async def until(predicate: Callable[[], object], description: str) -> None:
    """`wait_until` for a test whose client needs the event loop meanwhile."""
    await asyncio.to_thread(wait_until, predicate, description=description)


def holding(gate: Path) -> dict[str, str]:
    """A body that keeps its worker busy until the gate is opened."""
    return {"gate": str(gate)}


# --- One request


async def test_infer_returns_the_value(client: AsyncClient) -> None:
    assert await client.infer("square", 7) == 49
    assert await client.infer("Echo", {"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
    assert await client.infer("Echo", b"\x00\xff") == b"\x00\xff"
    assert await client.infer("Echo", 1.5, content_type="application/json") == 1.5


async def test_arrays_go_in_and_come_out(client: AsyncClient) -> None:
    array = np.linspace(0, 1, 128, dtype=np.float32)
    result = await client.infer("Noop", array)
    assert (result.dtype, result.shape) == (np.float32, (128,))
    np.testing.assert_array_equal(result, array)


async def test_request_tells_how_it_was_served(client: AsyncClient) -> None:
    reply = await client.request("square", 3, correlation_id="mine-1")
    assert (reply.value, reply.correlation_id, reply.batch_size) == (9, "mine-1", 1)
    assert reply.queue_us >= 0
    assert reply.compute_us > 0


async def test_submit_begins_at_once_and_whatever_is_sent_together_shares_a_batch(
    client: AsyncClient, stack: Stack
) -> None:
    await client.infer("Echo", 0)  # from now on the client knows the model
    replies = await asyncio.gather(*(client.request("Echo", number) for number in range(16)))
    assert [reply.value for reply in replies] == list(range(16))
    assert {reply.batch_size for reply in replies} == {16}
    future = client.submit("Echo", "now")
    assert await future == "now"


async def test_options_travel_with_the_request(client: AsyncClient) -> None:
    told = await client.infer("Echo", "about", lane="de", fields={"tenant": "acme"}, correlation_id="mine-2")
    assert told == ["mine-2", "de", {"tenant": "acme"}]
    told = await client.infer("Echo", "about", tenant="acme", correlation_id="mine-9")
    assert told == ["mine-9", "", {"tenant": "acme"}]


async def test_two_requests_in_flight_may_not_share_a_correlation_id(client: AsyncClient, gate: Path) -> None:
    await client.infer("Echo", 0)
    first = client.submit("Echo", holding(gate), correlation_id="mine-3")
    with pytest.raises(InvalidArgumentError, match="in flight already"):
        await client.infer("Echo", 1, correlation_id="mine-3")
    gate.touch()
    await first


async def test_a_second_model_is_heard_of_as_soon_as_the_first(client: AsyncClient) -> None:
    """A client that waits for results of one model need not wait out a block when it asks another."""
    await client.infer("square", 1)
    started_s = time.monotonic()
    for model in ("Echo", "Hashing", "Faulty", "Single"):
        await client.infer(model, "x")
    assert time.monotonic() - started_s < 1.5


# --- Many requests


async def test_map_yields_in_order_and_keeps_no_more_in_flight_than_it_was_told(client: AsyncClient) -> None:
    pulled = 0
    most = 0

    def bodies() -> Iterator[int]:
        nonlocal pulled
        for number in range(500):
            pulled += 1
            yield number

    results: list[int] = []
    async for result in client.map("square", bodies(), in_flight=8):
        most = max(most, pulled - len(results))
        results.append(result)
    assert results == [number * number for number in range(500)]
    assert most == 8


async def test_map_is_bounded_where_nothing_comes_back(client: AsyncClient, stack: Stack, gate: Path) -> None:
    """Of a million bodies for a model that is held up, only `in_flight` are pulled and sent."""
    pulled: list[object] = []

    def bodies() -> Iterator[Any]:
        for number in range(1_000_000):
            pulled.append(number)
            yield holding(gate) if number == 0 else number

    results = client.map("Single", bodies(), in_flight=20)
    first = asyncio.ensure_future(anext(results))
    keys = Keys("Single")
    await until(lambda: stack.redis.xlen(keys.batches) == 2, "a batch is under way and one ahead")
    sent = sum(len(fields) for _, fields in stack.redis.xrange(keys.requests))
    assert sent > 0
    assert len(pulled) == 20
    first.cancel()  # leaving early withdraws the rest
    await until(lambda: stack.redis.xlen(keys.requests) == 0, "what waits is withdrawn")
    assert stack.redis.xlen(keys.batches) == 2


async def test_map_takes_an_async_iterable_and_returns_errors_in_their_places(client: AsyncClient) -> None:
    async def bodies() -> AsyncIterator[object]:
        for number in range(20):
            yield "not a number" if number == 7 else number

    results = [one async for one in client.map("square", bodies(), return_exceptions=True)]
    assert isinstance(results[7], InvalidArgumentError)
    assert [*results[:7], *results[8:]] == [number * number for number in range(20) if number != 7]
    with pytest.raises(InvalidArgumentError, match="must be a number"):
        async for _ in client.map("square", [1, "not a number", 3]):
            pass


async def test_thousands_of_results_each_to_its_own_request(client: AsyncClient) -> None:
    replies = await asyncio.gather(*(client.request("Hashing", f"body {number}") for number in range(3000)))
    assert [reply.value for reply in replies] == [
        digest(reply.correlation_id, f"body {number}") for number, reply in enumerate(replies)
    ]
    assert max(reply.batch_size for reply in replies) == 32


# --- Time


async def test_a_timeout_fails_the_call_in_time_and_takes_the_request_back(
    client: AsyncClient, stack: Stack, gate: Path
) -> None:
    await client.infer("Single", 0)
    plugs = [client.submit("Single", holding(gate)) for _ in range(2)]
    await until(lambda: stack.redis.xlen(Keys("Single").batches) == 2, "Single is held up")

    started_s = time.monotonic()
    with pytest.raises(DeadlineExceededError) as caught:
        await client.infer("Single", 1, timeout=0.3)
    took_s = time.monotonic() - started_s

    assert isinstance(caught.value, TimeoutError)
    assert 0.29 < took_s < 0.3 + LATE_S
    await until(lambda: stack.redis.xlen(Keys("Single").requests) == 0, "the request does not wait any more")
    gate.touch()
    await asyncio.gather(*plugs)


async def test_cancelling_withdraws_what_waits_and_spares_the_others(
    client: AsyncClient, stack: Stack, gate: Path
) -> None:
    keys = Keys("Single")
    await client.infer("Single", 0)
    plugs = [client.submit("Single", holding(gate)) for _ in range(2)]
    await until(lambda: stack.redis.xlen(keys.batches) == 2, "Single is held up")
    kept = client.submit("Single", "kept")
    task = asyncio.ensure_future(client.infer("Single", "cancelled"))
    future = client.submit("Single", "cancelled, too")
    await until(lambda: stack.redis.xlen(keys.requests) >= 1, "they wait")

    task.cancel()
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await until(lambda: waiting(stack, "Single") == 1, "one request is left")
    gate.touch()
    assert await kept == "kept"
    await asyncio.gather(*plugs)
    await until(lambda: stack.redis.xlen(keys.batches) == 0, "nothing is in flight")


def waiting(stack: Stack, model: str) -> int:
    """How many requests wait, packed or not."""
    entries = stack.redis.xrange(Keys(model).requests)
    return sum(
        len(msgpack.unpackb(fields[b"requests"])) if b"requests" in fields else 1 for _, fields in entries
    )


# --- Errors


async def test_an_unknown_model_is_not_found_and_the_error_names_those_there_are(client: AsyncClient) -> None:
    with pytest.raises(NotFoundError, match=r"'sqare'.*Echo.*square"):
        await client.infer("sqare", 7)
    with pytest.raises(NotFoundError, match="must be 1 to 128"):
        await client.infer("no spaces", 7)
    assert await client.models() == sorted(spec.rpartition(":")[2] for spec in MODELS)


@pytest.mark.parametrize(
    ("model", "body", "options", "kind", "said"),
    [
        ("square", "x", {}, InvalidArgumentError, "must be a number"),
        ("Faulty", "refuse", {}, InvalidArgumentError, "spoilt already"),
        ("Faulty", "raise", {}, InternalError, "this one is spoilt"),
        ("Faulty", "kill", {}, AbortedError, "ended 2 times"),
        ("square", 1, {"priority": 11}, InvalidArgumentError, "priority"),
        ("square", 1, {"content_type": "text/html"}, InvalidArgumentError, "content_type"),
        ("square", 1, {"correlation_id": "no spaces"}, InvalidArgumentError, "correlation_id"),
        ("square", 1, {"fields": {"reply_to": "elsewhere"}}, InvalidArgumentError, "reply_to"),
        ("square", 1, {"fields": {"tenant": None}}, InvalidArgumentError, "tenant"),
        ("square", 1, {"fields": {"sequence_id": "s"}}, UnimplementedError, "sequence_id"),
        ("square", object(), {}, InvalidArgumentError, "cannot be"),
    ],
)
async def test_each_status_is_an_exception_of_its_own(
    client: AsyncClient,
    model: str,
    body: object,
    options: dict[str, Any],
    kind: type[CarpoolError],
    said: str,
) -> None:
    with pytest.raises(kind, match=said) as caught:
        await client.infer(model, body, timeout=5, **options)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(kind.status)


async def test_a_full_queue_is_resource_exhausted_and_a_withdrawal_is_cancelled(
    client: AsyncClient, stack: Stack, gate: Path
) -> None:
    await client.infer("Few", 0)
    plugs = [client.submit("Few", holding(gate)) for _ in range(2)]
    await until(lambda: stack.redis.xlen(Keys("Few").batches) == 2, "Few is held up")
    waiting = [client.submit("Few", number, correlation_id=f"few-{number}") for number in range(2)]
    await until(lambda: stack.redis.xlen(Keys("Few").requests) >= 1, "two wait")
    with pytest.raises(ResourceExhaustedError, match="max_queue_size"):
        await client.infer("Few", 2)
    stack.send("Few", withdraw="few-1")
    with pytest.raises(CancelledRequestError, match="withdrawn"):
        await waiting[1]
    gate.touch()
    assert await waiting[0] == 0
    await asyncio.gather(*plugs)


async def test_a_closed_client_is_unavailable_and_so_is_a_redis_that_is_not_there(
    stack: Stack, gate: Path
) -> None:
    client = AsyncClient(stack.url)
    await client.connect()
    await client.infer("Echo", 1)
    pending = client.submit("Echo", holding(gate))
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    with pytest.raises(UnavailableError, match="closed"):
        await pending
    with pytest.raises(UnavailableError, match="closed"):
        await client.infer("Echo", 1)
    nobody = AsyncClient("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await nobody.connect()
    await nobody.close()


# --- Without an event loop


def test_the_blocking_client_does_all_of_it(blocking: Client) -> None:
    assert blocking.infer("square", 7) == 49
    assert blocking.request("square", 8).value == 64
    assert [future.result(10) for future in [blocking.submit("square", n) for n in range(50)]] == [
        n * n for n in range(50)
    ]
    assert list(blocking.map("square", range(300), in_flight=16)) == [n * n for n in range(300)]
    assert "square" in blocking.models()
    with pytest.raises(NotFoundError):
        blocking.infer("nothing", 1)
    with pytest.raises(InvalidArgumentError):
        blocking.infer("square", "x")


def test_the_blocking_map_is_bounded_and_leaving_early_withdraws(
    blocking: Client, stack: Stack, gate: Path
) -> None:
    pulled: list[int] = []

    def bodies() -> Iterator[Any]:
        for number in range(1_000_000):
            pulled.append(number)
            yield holding(gate) if number == 3 else number

    results = blocking.map("Single", bodies(), in_flight=10)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(pulled) <= 13
    keys = Keys("Single")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 2, description="Single is held up")
    results.close()  # type: ignore[attr-defined]
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="the rest is withdrawn")
    assert stack.redis.xlen(keys.batches) == 2


def test_a_blocking_client_is_shared_by_threads(blocking: Client) -> None:
    wrong: list[object] = []

    def work(thread: int) -> None:
        for number in range(30):
            reply = blocking.request("Hashing", f"{thread}/{number}")
            if reply.value != digest(reply.correlation_id, f"{thread}/{number}"):
                wrong.append((thread, number))

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_future_of_the_blocking_client_can_be_cancelled_and_times_out(
    blocking: Client, stack: Stack, gate: Path
) -> None:
    plugs = [blocking.submit("Single", holding(gate)) for _ in range(2)]
    keys = Keys("Single")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 2, description="Single is held up")
    future = blocking.submit("Single", "cancelled")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 1, description="it waits")
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(1)
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="it is withdrawn")
    with pytest.raises(DeadlineExceededError):
        blocking.infer("Single", 1, timeout=0.1)
    gate.touch()
    for plug in plugs:
        plug.result(10)


def test_a_closed_blocking_client_says_so(stack: Stack) -> None:
    with Client(stack.url) as client:
        pending = client.submit("square", 2)
        assert pending.result(10) == 4
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.infer("square", 1)


def test_what_was_sent_is_json_where_json_was_asked_for(blocking: Client, stack: Stack, gate: Path) -> None:
    plugs = [blocking.submit("Single", holding(gate)) for _ in range(2)]
    keys = Keys("Single")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 2, description="Single is held up")
    future = blocking.submit("Single", {"a": 1}, content_type="application/json")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 1, description="it waits")
    ((_, fields),) = stack.redis.xrange(keys.requests)
    assert (fields[b"content_type"], json.loads(fields[b"body"])) == (b"application/json", {"a": 1})
    gate.touch()
    assert [one.result(10) for one in (*plugs, future)][2] == {"a": 1}
