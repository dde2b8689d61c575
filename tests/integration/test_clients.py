"""AsyncClient and Client against a complete stack."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import aclosing
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from carpool import AsyncClient, Client
from carpool.client import transport
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnimplementedError,
)
from carpool.keys import Keys
from conftest import SERVERS
from support.models.hashing import digest
from support.stack import RESULT_S, Stack
from support.waiting import EVENTUALLY_S, wait_until
from support.wire import count_requests

LATENESS_MAX_S: Final = 0.6
MODELS: Final = (
    "square",
    "plain.py:Echo",
    "plain.py:Counts",
    "plain.py:Single",
    "plain.py:Few",
    "plain.py:Noop",
    "plain.py:Lengths",
    "plain.py:Relay",
    "faulty.py:Faulty",
    "faulty.py:Unsteady",
    "hashing.py:Hashing",
)


@pytest.fixture
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module."""
    stack = stacks(SERVERS[0])
    stack.serve(*MODELS)
    return stack


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(stack.url, timeout=RESULT_S) as client:
        yield client


@pytest.fixture
def blocking(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, timeout=RESULT_S) as client:
        yield client


async def wait_in_thread(predicate: Callable[[], object], description: str) -> None:
    """`wait_until` without blocking the event loop, which the client needs."""
    await asyncio.to_thread(wait_until, predicate, description=description)


def blocking_body(gate: Path) -> dict[str, str]:
    """A body that keeps its worker busy until the gate exists."""
    return {"gate": str(gate)}


# --- one request -------------------------------------------------------------------------------------------


async def test_infer_returns_the_value(client: AsyncClient) -> None:
    assert await client.infer("square", 7) == 49
    assert await client.infer("Echo", {"a": [1, None, "ü"]}) == {"a": [1, None, "ü"]}
    assert await client.infer("Echo", b"\x00\xff") == b"\x00\xff"
    assert await client.infer("Echo", 1.5, content_type="application/json") == 1.5


async def test_model_that_calls_another_model_through_a_client(client: AsyncClient) -> None:
    """Without a URL: its worker gives it the address. Several requests, in batches of both models."""
    assert await asyncio.gather(*[client.infer("Relay", number) for number in range(5)]) == [0, 1, 4, 9, 16]
    with pytest.raises(InvalidArgumentError, match="must be a number"):  # of the other one
        await client.infer("Relay", "text")


async def test_names_in_maps_of_a_result_are_what_the_model_returned(client: AsyncClient) -> None:
    assert await client.infer("Counts", [7, 7, -1]) == {7: 2, -1: 1}
    assert await client.infer("Counts", [7, 7], content_type="application/json") == {"7": 2}


async def test_arrays_are_sent_and_returned(client: AsyncClient) -> None:
    array = np.linspace(0, 1, 128, dtype=np.float32)
    result = await client.infer("Noop", array)
    assert (result.dtype, result.shape) == (np.float32, (128,))
    np.testing.assert_array_equal(result, array)


async def test_request_returns_batch_size_and_times(client: AsyncClient) -> None:
    reply = await client.request("square", 3, correlation_id="mine-1")
    assert (reply.value, reply.correlation_id, reply.batch_size) == (9, "mine-1", 1)
    assert reply.queue_us >= 0
    assert reply.compute_us > 0


async def test_submit_sends_at_once_and_requests_sent_together_share_a_batch(
    client: AsyncClient, stack: Stack
) -> None:
    await client.infer("Echo", 0)  # opens the channel of the model
    replies = await asyncio.gather(*(client.request("Echo", number) for number in range(16)))
    assert [reply.value for reply in replies] == list(range(16))
    assert {reply.batch_size for reply in replies} == {16}
    future = client.submit("Echo", "now")
    assert await future == "now"


async def test_options_reach_the_model(client: AsyncClient) -> None:
    seen = await client.infer("Echo", "about", lane="de", fields={"tenant": "acme"}, correlation_id="mine-2")
    assert seen == ["mine-2", "de", {"tenant": "acme"}]
    seen = await client.infer("Echo", "about", tenant="acme", correlation_id="mine-9")
    assert seen == ["mine-9", "", {"tenant": "acme"}]


async def test_misspelt_field_is_warned_of_in_the_result(
    client: AsyncClient, stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    warning = "'prioritty' is not a field that Carpool knows: did you mean 'priority'?"
    for body, status in (("7", "OK"), ('"x"', "INVALID_ARGUMENT")):
        entry_id = stack.send("square", body=body, prioritty=9)
        result = stack.result("square", entry_id)
        assert (result["status"], result["warnings"]) == (status, [warning])
    assert "warnings" not in stack.result("square", stack.send("square", body="7", tenant="a", user="b"))
    assert stack.result("square", stack.send("square", Body="7"))["warnings"] == [
        "'Body' is not a field that Carpool knows: did you mean 'body'?"
    ]
    for number in (7, 8):
        assert await client.infer("square", number, fields={"prioritty": "9"}) == number * number
    assert [record.getMessage() for record in caplog.records if "prioritty" in record.getMessage()] == [
        f"a request was sent with a mistake: {warning}"
    ]
    rows = np.zeros((8, 128), np.float32)  # whose results would come as columns
    np.testing.assert_array_equal(await client.infer_many("Noop", rows, fields={"Lane": "b"}), rows)
    assert "'Lane' is not a field" in caplog.records[-1].getMessage()
    result = stack.result("square", stack.send("square", withdraw="t4,t5"))
    assert result["detail"].startswith("withdraw: 't4,t5' is no correlation ID")


async def test_model_may_refuse_unknown_fields(client: AsyncClient, stack: Stack) -> None:
    stack.configure("Lengths", unknown_fields="refuse")
    with pytest.raises(InvalidArgumentError, match=r"'prioritty': .*did you mean 'priority'"):
        await client.infer("Lengths", "abc", fields={"prioritty": "9"})
    assert await client.infer("Lengths", "abc", tenant="a") == 3


async def test_float64_is_taken_where_float32_is_declared(client: AsyncClient) -> None:
    numbers = np.linspace(0, 1, 128)
    result = await client.infer("Noop", numbers)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, await client.infer("Noop", numbers.tolist()))
    many = await client.infer_many("Noop", np.tile(numbers, (10, 1)))
    np.testing.assert_array_equal(many, np.tile(result, (10, 1)))


async def test_correlation_id_in_flight_is_rejected(client: AsyncClient, gate: Path) -> None:
    await client.infer("Echo", 0)
    first = client.submit("Echo", blocking_body(gate), correlation_id="mine-3")
    with pytest.raises(InvalidArgumentError, match="is already in flight"):
        await client.infer("Echo", 1, correlation_id="mine-3")
    gate.touch()
    await first


async def test_results_of_another_model_are_read_without_delay(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An XREAD that blocks for one model ends when the client begins to use another."""
    for name in ("READ_BLOCK_MS", "SILENCE_MAX_S"):
        monkeypatch.setattr(transport, name, 10_000_000)  # longer than this test has
    await client.infer("square", 1)
    for model in ("Echo", "Hashing", "Faulty", "Single"):
        await client.infer(model, "x")


# --- many requests -----------------------------------------------------------------------------------------


async def test_map_yields_in_order_and_limits_requests_in_flight(client: AsyncClient) -> None:
    pulled = 0
    in_flight_max = 0

    def bodies() -> Iterator[int]:
        nonlocal pulled
        for number in range(500):
            pulled += 1
            yield number

    results: list[int] = []
    async for result in client.map("square", bodies(), in_flight=8):
        in_flight_max = max(in_flight_max, pulled - len(results))
        results.append(result)
    assert results == [number * number for number in range(500)]
    assert in_flight_max == 8


async def test_map_is_bounded_while_no_results_arrive(client: AsyncClient, stack: Stack, gate: Path) -> None:
    """Of a million bodies for a model that is blocked, only `in_flight` are pulled and sent."""
    pulled: list[object] = []

    def bodies() -> Iterator[Any]:
        for number in range(1_000_000):
            pulled.append(number)
            yield blocking_body(gate) if number == 0 else number

    results = client.map("Single", bodies(), in_flight=20)
    first = asyncio.ensure_future(anext(results))
    keys = Keys("Single")
    await wait_in_thread(
        lambda: stack.redis.xlen(keys.batches) == 2, "one batch is executed and one is fetched ahead"
    )
    sent = sum(len(fields) for _, fields in stack.redis.xrange(keys.requests))
    assert sent > 0
    assert len(pulled) == 20
    first.cancel()  # which withdraws the rest
    await wait_in_thread(lambda: stack.redis.xlen(keys.requests) == 0, "waiting requests are withdrawn")
    assert stack.redis.xlen(keys.batches) == 2


async def test_map_accepts_an_async_iterable_and_yields_errors_in_order(client: AsyncClient) -> None:
    async def bodies() -> AsyncIterator[object]:
        for number in range(20):
            yield "not a number" if number == 7 else number

    results = [result async for result in client.map("square", bodies(), return_exceptions=True)]
    assert isinstance(results[7], InvalidArgumentError)
    assert [*results[:7], *results[8:]] == [number * number for number in range(20) if number != 7]
    with pytest.raises(InvalidArgumentError, match="must be a number"):
        async for _ in client.map("square", [1, "not a number", 3]):
            pass


async def test_thousands_of_results_reach_their_own_requests(client: AsyncClient) -> None:
    replies = await asyncio.gather(*(client.request("Hashing", f"body {number}") for number in range(3000)))
    assert [reply.value for reply in replies] == [
        digest(reply.correlation_id, f"body {number}") for number, reply in enumerate(replies)
    ]
    assert max(reply.batch_size for reply in replies) == 32


# --- timeouts and cancellation -----------------------------------------------------------------------------


async def test_timeout_fails_the_call_in_time_and_withdraws_the_request(
    client: AsyncClient, stack: Stack, gate: Path
) -> None:
    await client.infer("Single", 0)
    blockers = [client.submit("Single", blocking_body(gate)) for _ in range(2)]
    await wait_in_thread(lambda: stack.redis.xlen(Keys("Single").batches) == 2, "Single is blocked")

    started_s, ended_s = time.monotonic(), list[float]()
    late = asyncio.ensure_future(client.infer("Single", 1, timeout=0.3))
    late.add_done_callback(lambda _: ended_s.append(time.monotonic()))
    await asyncio.sleep(0.3 + LATENESS_MAX_S)  # on the same event loop: if that is held up, this ends later
    for _ in range(10):  # iterations: until a task goes on whose timer has ended
        await asyncio.sleep(0)
    assert late.done()
    with pytest.raises(DeadlineExceededError) as caught:
        await late

    assert isinstance(caught.value, TimeoutError)
    assert ended_s[0] - started_s > 0.29
    await wait_in_thread(
        lambda: stack.redis.xlen(Keys("Single").requests) == 0, "the request no longer waits"
    )
    gate.touch()
    await asyncio.gather(*blockers)


@pytest.mark.parametrize("timeout", [0, -1, -0.5, float("nan"), float("-inf"), "soon", 1e9])
async def test_timeout_in_which_there_can_be_no_result_is_refused(
    client: AsyncClient, stack: Stack, timeout: Any
) -> None:
    await client.infer("square", 1)
    sent = stack.redis.xinfo_stream(Keys("square").requests)["last-generated-id"]
    for call in (client.infer, client.infer_many):
        with pytest.raises(InvalidArgumentError, match=r"^INVALID_ARGUMENT: timeout: .*or None for no limit"):
            await call("square", [1], timeout=timeout)
    with pytest.raises(InvalidArgumentError, match="timeout: "):
        AsyncClient(stack.url, timeout=timeout)
    assert stack.redis.xinfo_stream(Keys("square").requests)["last-generated-id"] == sent


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost", "redis://localhost:port"])
def test_url_that_cannot_be_one_of_redis_is_refused(url: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgumentError, match=r"^INVALID_ARGUMENT: url: .*redis://127.0.0.1:6379/0"):
            kind(url)


async def test_cancelling_withdraws_only_the_cancelled_requests(
    client: AsyncClient, stack: Stack, gate: Path
) -> None:
    keys = Keys("Single")
    await client.infer("Single", 0)
    blockers = [client.submit("Single", blocking_body(gate)) for _ in range(2)]
    await wait_in_thread(lambda: stack.redis.xlen(keys.batches) == 2, "Single is blocked")
    kept = client.submit("Single", "kept")
    task = asyncio.ensure_future(client.infer("Single", "cancelled"))
    future = client.submit("Single", "cancelled, too")
    await wait_in_thread(lambda: stack.redis.xlen(keys.requests) >= 1, "they wait")

    task.cancel()
    future.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    await wait_in_thread(lambda: waiting(stack, "Single") == 1, "one request still waits")
    gate.touch()
    assert await kept == "kept"
    await asyncio.gather(*blockers)
    await wait_in_thread(lambda: stack.redis.xlen(keys.batches) == 0, "nothing is in flight")


def waiting(stack: Stack, model: str) -> int:
    """The number of waiting requests, packed or not."""
    entries = stack.redis.xrange(Keys(model).requests)
    return sum(count_requests(fields) for _, fields in entries)


# --- errors ------------------------------------------------------------------------------------------------


async def test_unknown_model_is_not_found_and_the_error_names_the_others(client: AsyncClient) -> None:
    with pytest.raises(NotFoundError, match=r"'sqare'.*Echo.*square"):
        await client.infer("sqare", 7)
    with pytest.raises(NotFoundError, match="must have 1 to 128 characters"):
        await client.infer("no spaces", 7)
    assert await client.models() == sorted(spec.rpartition(":")[2] for spec in MODELS)


@pytest.mark.parametrize(
    ("model", "body", "options", "kind", "detail"),
    [
        ("square", "x", {}, InvalidArgumentError, "must be a number"),
        ("Faulty", "refuse", {}, InvalidArgumentError, "spoilt already"),
        ("Faulty", "raise", {}, InternalError, "this one is spoilt"),
        ("Faulty", "kill", {}, AbortedError, "died 2 times"),
        ("square", 1, {"priority": 11}, InvalidArgumentError, "priority"),
        ("square", b"1", {"content_type": "html"}, InvalidArgumentError, "content_type"),
        ("square", 1, {"correlation_id": "no spaces"}, InvalidArgumentError, "correlation_id"),
        ("square", 1, {"fields": {"reply_to": "elsewhere"}}, InvalidArgumentError, "reply_to"),
        ("square", 1, {"fields": {"tenant": None}}, InvalidArgumentError, "tenant"),
        ("square", 1, {"fields": {"sequence_id": "s"}}, InvalidArgumentError, "is an option of its own"),
        ("square", 1, {"sequence_id": "s", "sequence_start": True}, UnimplementedError, "sequence_id"),
        ("square", object(), {}, InvalidArgumentError, "cannot be"),
    ],
)
async def test_each_status_has_its_own_exception(
    client: AsyncClient,
    model: str,
    body: object,
    options: dict[str, Any],
    kind: type[CarpoolError],
    detail: str,
) -> None:
    with pytest.raises(kind, match=detail) as caught:
        await client.infer(model, body, **options)
    assert type(caught.value) is kind
    assert str(caught.value).startswith(kind.status)


async def test_full_queue_is_resource_exhausted_and_withdrawal_is_cancelled(
    client: AsyncClient, stack: Stack, gate: Path
) -> None:
    await client.infer("Few", 0)
    blockers = [client.submit("Few", blocking_body(gate)) for _ in range(2)]
    await wait_in_thread(lambda: stack.redis.xlen(Keys("Few").batches) == 2, "Few is blocked")
    waiting = [client.submit("Few", number, correlation_id=f"few-{number}") for number in range(2)]
    await wait_in_thread(lambda: stack.redis.xlen(Keys("Few").requests) >= 1, "two wait")
    with pytest.raises(ResourceExhaustedError, match="max_queue_size"):
        await client.infer("Few", 2)
    stack.send("Few", withdraw="few-1")
    with pytest.raises(CancelledRequestError, match="withdrawn"):
        await waiting[1]
    gate.touch()
    assert await waiting[0] == 0
    await asyncio.gather(*blockers)


async def test_request_is_sent_again_until_it_succeeds(
    client: AsyncClient, stack: Stack, gate: Path, tmp_path: Path
) -> None:
    assert await client.infer("Unsteady", [str(tmp_path / "a"), 2], retries=2) == 3
    assert (await client.request("Unsteady", [str(tmp_path / "b"), 1], retries=5)).value == 2
    assert await client.submit("Unsteady", [str(tmp_path / "c"), 1], retries=1) == 2
    with pytest.raises(InternalError, match="call 2 fails"):
        await client.infer("Unsteady", [str(tmp_path / "d"), 2], retries=1)
    with pytest.raises(InvalidArgumentError, match="must be a number"):
        await client.infer("square", "x", retries=5)
    assert (tmp_path / "d").stat().st_size == 2

    blockers = [client.submit("Few", blocking_body(gate)) for _ in range(2)]
    await wait_in_thread(lambda: stack.redis.xlen(Keys("Few").batches) == 2, "Few is blocked")
    blockers += [client.submit("Few", number) for number in range(2)]
    await wait_in_thread(lambda: stack.redis.xlen(Keys("Few").requests) >= 1, "its queue is full")
    patient = client.submit("Few", "patient", retries=50)
    with pytest.raises(ResourceExhaustedError):
        await client.infer("Few", "not patient", retries=0)
    gate.touch()
    assert await patient == "patient"
    await asyncio.gather(*blockers)


async def test_map_sends_again(client: AsyncClient, stack: Stack, gate: Path, tmp_path: Path) -> None:
    bodies = [[str(tmp_path / str(failures)), failures] for failures in (0, 2, 1, 3)]
    kept = client.map("Unsteady", bodies, in_flight=3, retries=2, return_exceptions=True)
    *results, last = [result async for result in kept]
    assert results == [1, 3, 2]
    assert isinstance(last, InternalError)
    with pytest.raises(InternalError, match="call 2 fails"):
        await anext(client.map("Unsteady", [[str(tmp_path / "x"), 2]], retries=1))

    some = [0, blocking_body(gate), 1, 2]
    async with aclosing(client.map("Single", some, in_flight=3, retries=1)) as mapping:
        assert await anext(mapping) == 0
    gate.touch()
    await wait_in_thread(lambda: stack.redis.xlen(Keys("Single").requests) == 0, "the others are withdrawn")


def test_blocking_client_sends_again(blocking: Client, tmp_path: Path) -> None:
    assert blocking.infer("Unsteady", [str(tmp_path / "a"), 1], retries=1) == 2
    assert blocking.submit("Unsteady", [str(tmp_path / "b"), 1], retries=1).result(EVENTUALLY_S) == 2
    bodies = [[str(tmp_path / name), 1] for name in "cde"]
    assert list(blocking.map("Unsteady", bodies, in_flight=2, retries=1)) == [2, 2, 2]
    for call in (blocking.infer_many, blocking.stream):
        with pytest.raises(InvalidArgumentError, match="retries: is an option of infer"):
            list(call("square", [1], retries=1))


async def test_closed_client_and_unreachable_redis_are_unavailable(stack: Stack, gate: Path) -> None:
    client = AsyncClient(stack.url)
    await client.connect()
    await client.infer("Echo", 1)
    pending = client.submit("Echo", blocking_body(gate))
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    with pytest.raises(UnavailableError, match="closed"):
        await pending
    with pytest.raises(UnavailableError, match="closed"):
        await client.infer("Echo", 1)
    unreachable = AsyncClient("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        await unreachable.connect()
    await unreachable.close()
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        async with AsyncClient("redis://127.0.0.1:1/0"):
            pass
    gc.collect()  # without a warning


async def test_user_who_may_not_read_results_is_told_so(stack: Stack) -> None:
    """Not only after the timeout. The request itself was accepted."""
    stack.redis.execute_command("ACL", "SETUSER", "writer", "on", ">x", "~*", "&*", "+@all", "-xread")
    async with AsyncClient(stack.url.replace("://", "://writer:x@"), timeout=RESULT_S) as client:
        for _ in range(2):
            with pytest.raises(PermissionDeniedError, match=r"results cannot be read.*xread"):
                await client.infer("square", 7)


# --- Client ------------------------------------------------------------------------------------------------


def test_blocking_client_has_all_calls(blocking: Client) -> None:
    assert blocking.infer("square", 7) == 49
    assert blocking.request("square", 8).value == 64
    assert [future.result(EVENTUALLY_S) for future in [blocking.submit("square", n) for n in range(50)]] == [
        n * n for n in range(50)
    ]
    assert list(blocking.map("square", range(300), in_flight=16)) == [n * n for n in range(300)]
    assert "square" in blocking.models()
    with pytest.raises(NotFoundError):
        blocking.infer("nothing", 1)
    with pytest.raises(InvalidArgumentError):
        blocking.infer("square", "x")


def reused(numbers: range = range(20)) -> Iterator[Any]:
    """Bodies of a program that fills one array, and one dict with it, again and again."""
    body = {"values": np.zeros(2)}
    for number in numbers:
        body["values"][:] = number
        yield body


def numbers_of(results: Any) -> list[float]:
    return [result["values"][0] for result in results]


def test_a_body_is_sent_as_it_is_at_the_call(blocking: Client) -> None:
    expected = list(range(20))
    for retries in ({}, {"retries": 1}):
        futures = [blocking.submit("Echo", body, **retries) for body in reused()]  # type: ignore[arg-type]
        assert numbers_of(future.result(EVENTUALLY_S) for future in futures) == expected
    assert numbers_of(blocking.map("Echo", reused())) == expected
    assert numbers_of(blocking.infer_many("Echo", reused())) == expected
    streams = [blocking.stream("Echo", body) for body in reused()]
    assert numbers_of(value for stream in streams for value in stream) == expected


async def test_a_body_is_sent_as_it_was_before_its_model_was_looked_up(client: AsyncClient) -> None:
    expected = list(range(20))
    futures = [client.submit("Echo", body) for body in reused()]
    streams = [client.stream("Echo", body) for body in reused()]
    assert numbers_of(await asyncio.gather(*futures)) == expected
    assert numbers_of([value for stream in streams async for value in stream]) == expected


async def test_one_body_is_not_sent_as_many(client: AsyncClient, blocking: Client) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: blocking.infer_many("Echo", "one"),
        lambda: list(blocking.map("Echo", {"a": 1})),
    ]
    for call in calls:
        with pytest.raises(InvalidArgumentError, match="is one body: use infer"):
            await asyncio.to_thread(call)
    with pytest.raises(InvalidArgumentError, match="is one body: use infer"):
        await client.infer_many("Echo", b"one")
    with pytest.raises(InvalidArgumentError, match="is one body: use infer"):
        _ = [result async for result in client.map("Echo", "one")]


def test_blocking_map_is_bounded_and_closing_it_withdraws(blocking: Client, stack: Stack, gate: Path) -> None:
    pulled: list[int] = []

    def bodies() -> Iterator[Any]:
        for number in range(1_000_000):
            pulled.append(number)
            yield blocking_body(gate) if number == 3 else number

    results = blocking.map("Single", bodies(), in_flight=10)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    assert len(pulled) <= 13
    keys = Keys("Single")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 2, description="Single is blocked")
    results.close()  # type: ignore[attr-defined]
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="the other requests are withdrawn")
    assert stack.redis.xlen(keys.batches) == 2


def test_blocking_client_may_be_shared_by_threads(blocking: Client) -> None:
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
        thread.join(EVENTUALLY_S)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_future_of_the_blocking_client_can_be_cancelled_and_times_out(
    blocking: Client, stack: Stack, gate: Path
) -> None:
    blockers = [blocking.submit("Single", blocking_body(gate)) for _ in range(2)]
    keys = Keys("Single")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 2, description="Single is blocked")
    future = blocking.submit("Single", "cancelled")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 1, description="it waits")
    assert future.cancel()
    with pytest.raises(CancelledError):
        future.result(1)
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="it is withdrawn")
    with pytest.raises(DeadlineExceededError):
        blocking.infer("Single", 1, timeout=0.1)
    gate.touch()
    for blocker in blockers:
        blocker.result(EVENTUALLY_S)


def test_async_client_says_that_its_event_loop_is_another(stack: Stack) -> None:
    client = AsyncClient(stack.url, timeout=RESULT_S)

    async def square(number: int) -> Any:
        return await client.infer("square", number)

    async def squares() -> Any:
        return await client.infer_many("square", np.arange(3.0))

    async def first_chunk() -> Any:
        return await anext(aiter(client.stream("square", 2)))

    with asyncio.Runner() as runner:
        assert runner.run(square(7)) == 49
        for call in (square(8), squares(), first_chunk(), client.models(), client.connect(), client.close()):
            with pytest.raises(RuntimeError, match="is connected in another event loop"):
                asyncio.run(call)
        assert runner.run(square(9)) == 81
        runner.run(client.close())


def test_client_says_that_it_cannot_be_pickled(blocking: Client) -> None:
    spawn = multiprocessing.get_context("spawn")
    for client in (blocking, AsyncClient()):
        process = spawn.Process(target=print, args=(client,))
        with pytest.raises(TypeError, match="cannot be pickled into another process: make one in each"):
            process.start()


def test_a_client_that_was_made_before_a_fork_serves_parent_and_child(blocking: Client, gate: Path) -> None:
    """As with gunicorn --preload, Celery and multiprocessing. A thread does not survive a fork."""
    parents = blocking.submit("Single", blocking_body(gate))
    stream, sequence = blocking.stream("Single", "streamed"), blocking.sequence("Single")

    def work() -> list[Any]:
        waits = (
            parents.result,
            lambda: parents.result(EVENTUALLY_S),
            parents.exception,
            lambda: next(stream),
        )
        uses = (sequence.__enter__, lambda: sequence.infer(1), sequence.restart)
        errors = [*map(raised_by, waits), *map(raised_by, uses)]
        stream.close()
        parents.cancel()
        numbers = [blocking.infer("square", number) for number in range(3)]
        blocking.close()
        return [numbers, errors]

    forked, unconfirmed = "this process was forked from the one that", "UnconfirmedError UNAVAILABLE: "
    numbers, errors = in_children(work)[0]
    assert numbers == [0, 1, 4]
    assert [error.partition(" sent the request")[0] for error in errors[:4]] == [unconfirmed + forked] * 4
    assert errors[4].startswith("RuntimeError this client was connected before a fork")
    assert all(error.startswith("RuntimeError sequence py-") and forked in error for error in errors[5:])
    # And the parent's request is served, and so is the next
    gate.touch()
    assert parents.result(EVENTUALLY_S) == blocking_body(gate)
    assert list(stream) == ["streamed"]
    assert blocking.infer("square", 7) == 49


def in_children(work: Callable[[], Any], count: int = 1) -> list[Any]:
    """What `work` returns in each of `count` forked children, all at the same time."""
    fork = multiprocessing.get_context("fork")
    results = [fork.SimpleQueue() for _ in range(count)]
    children = [fork.Process(target=lambda queue=queue: queue.put(work())) for queue in results]
    for child in children:
        child.start()
    for child in children:
        child.join(EVENTUALLY_S)
    assert [child.exitcode for child in children] == [0] * count
    return [queue.get() for queue in results]


def raised_by(use: Callable[[], object]) -> str:
    try:
        return f"returned {use()!r}"
    except Exception as error:
        return f"{type(error).__name__} {error}"


def test_an_async_client_that_connects_after_forks_serves_each_process(stack: Stack) -> None:
    """As with gunicorn --preload: each child connects with its first request."""
    client = AsyncClient(stack.url, timeout=RESULT_S)
    refused = AsyncClient("redis://127.0.0.1:1/0")
    with pytest.raises(UnavailableError):
        asyncio.run(refused.connect())

    async def work() -> tuple[str, bool]:
        with pytest.raises(UnavailableError):  # as before: it has no connection
            await refused.connect()
        own = [f"{os.getpid()} {number}" for number in range(40)]
        async with client:
            sequence_id = client.sequence("Echo").sequence_id
            return sequence_id, await asyncio.gather(*(client.infer("Echo", body) for body in own)) == own

    found = in_children(lambda: asyncio.run(work()), 3)
    assert [is_own for _, is_own in found] == [True] * 3
    assert len({sequence_id for sequence_id, _ in found}) == 3
    assert asyncio.run(work())[1]


def test_an_async_client_that_was_connected_before_a_fork_is_the_parents(stack: Stack, gate: Path) -> None:
    """Also if the child goes on with the parent's event loop, whose poll both have."""
    client = AsyncClient(stack.url, timeout=RESULT_S)

    async def connect() -> list[asyncio.Future[Any]]:
        assert await client.infer("Single", "before") == "before"
        return [client.submit("Single", blocking_body(gate)), client.submit("Single", "after it")]

    async def wait_for(parents: list[asyncio.Future[Any]]) -> list[Any]:
        return await asyncio.gather(*parents)

    with asyncio.Runner() as runner:
        parents = runner.run(connect())
        sequence = client.sequence("Single")
        batches = Keys("Single").batches
        wait_until(lambda: stack.redis.xlen(batches) == 2, description="one is executed, and one is next")

        async def work() -> list[str]:
            calls: list[Any] = [client.infer("Single", 1), client.infer("square", 1)]
            calls += [client.connect(), client.flush()]
            calls += [client.models(), anext(client.stream("Single", 1)), sequence.__aenter__(), *parents]
            errors = await asyncio.gather(*calls, return_exceptions=True)
            gate.touch()
            wait_until(lambda: stack.redis.xlen(batches) == 0, description="the parent's results are there")
            for _ in range(10):
                await asyncio.sleep(0)  # polls
            await client.close()
            return [f"{type(error).__name__} {error}" for error in errors]

        (errors,) = in_children(lambda: runner.run(work()))
        inherited = "RuntimeError this client was connected before a fork"
        assert [error.startswith(inherited) for error in errors[:7]] == [True] * 7
        forked = "UnconfirmedError UNAVAILABLE: this process was forked from the one that sent the request"
        assert [error.startswith(forked) for error in errors[7:]] == [True] * 2
        # And the parent has its results, over the same connections
        assert runner.run(wait_for(parents)) == [blocking_body(gate), "after it"]
        assert client._packer.transport.losses == 0
        runner.run(client.close())


def test_closed_blocking_client_is_unavailable(stack: Stack) -> None:
    with Client(stack.url) as client:
        pending = client.submit("square", 2)
        assert pending.result(EVENTUALLY_S) == 4
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        client.infer("square", 1)


# --- clients that nobody closes ----------------------------------------------------------------------------


def producers(stack: Stack) -> int:
    """The connections of clients, without those of services."""
    return sum(each["name"].startswith("py-") for each in stack.redis.client_list())


def wait_until_disconnected(stack: Stack, before: int) -> None:
    wait_until(lambda: producers(stack) == before, description="its connections are closed")


def test_client_that_nobody_has_is_closed_once_its_requests_have_results(stack: Stack, gate: Path) -> None:
    gc.collect()
    before = producers(stack)
    with pytest.warns(ResourceWarning, match="unclosed Client of redis://"):
        assert Client(stack.url).infer("square", 7) == 49
    wait_until_disconnected(stack, before)
    with pytest.warns(ResourceWarning, match="unclosed Client of redis://"):
        future = Client(stack.url).submit("Echo", blocking_body(gate))
    with pytest.warns(ResourceWarning, match="unclosed Client of redis://"):
        stream = Client(stack.url).stream("Echo", "streamed")
    gate.touch()
    assert (future.result(), list(stream)) == (blocking_body(gate), ["streamed"])
    wait_until_disconnected(stack, before)
    wait_until(lambda: not clients_threads(), description="the threads have ended")


def clients_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "carpool client"]


async def test_async_client_that_nobody_has_is_closed(stack: Stack) -> None:
    """While its event loop goes on, with the timers of its requests."""
    gc.collect()
    before = producers(stack)
    with pytest.warns(ResourceWarning, match="unclosed AsyncClient of redis://"):
        assert await AsyncClient(stack.url).infer("square", 7) == 49
    await asyncio.to_thread(wait_until_disconnected, stack, before)
    client = AsyncClient(stack.url)
    await client.infer("Echo", 1)
    future = client.submit("Echo", 2)
    with pytest.warns(ResourceWarning, match="unclosed AsyncClient of redis://"):
        del client
        assert await future == 2
        del future
        await asyncio.sleep(0)
    await asyncio.to_thread(wait_until_disconnected, stack, before)


def test_program_that_closes_no_client_ends_at_once_and_silently(stack: Stack) -> None:
    code = (
        "from carpool import Client\n"
        f"client = Client({stack.url!r}); print(client.infer('square', 7))\n"
        f"Client({stack.url!r}).infer('square', 8)\n"
        "future = client.submit('square', 9)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "49\n", "")


def test_body_is_sent_as_json_if_the_content_type_says_so(blocking: Client, stack: Stack, gate: Path) -> None:
    blockers = [blocking.submit("Single", blocking_body(gate)) for _ in range(2)]
    keys = Keys("Single")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 2, description="Single is blocked")
    future = blocking.submit("Single", {"a": 1}, content_type="application/json")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 1, description="it waits")
    ((_, fields),) = stack.redis.xrange(keys.requests)
    assert (fields[b"content_type"], json.loads(fields[b"body"])) == (b"application/json", {"a": 1})
    gate.touch()
    assert [submitted.result(EVENTUALLY_S) for submitted in (*blockers, future)][2] == {"a": 1}
