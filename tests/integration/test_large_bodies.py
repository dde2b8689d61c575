"""Large bodies beside the stream, with real processes: served, verified, and deleted in the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from carpool import AsyncClient, Client
from carpool.errors import DeadlineExceededError, ResourceExhaustedError
from carpool.keys import Keys
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.rows import BODY_TTL_MS, LARGE_BODY_BYTES
from carpool.wire.bodies import encode_body
from support.stack import Stack, fixed_keys
from support.transport import transport_of
from support.waiting import EVENTUALLY_S, growing_s, wait_until

LARGE: Final = LARGE_BODY_BYTES * 10


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("large"), append_only=False) as stack:
        stack.serve("plain.py:Echo", "plain.py:Single", "plain.py:Ragged", "faulty.py:Faulty")
        yield stack


def bodies_left(stack: Stack, model: str) -> list[bytes]:
    return list(stack.redis.scan_iter(match=Keys(model).body("*"), count=1000))


def wait_until_deleted(stack: Stack, model: str) -> None:
    wait_until(lambda: not bodies_left(stack, model), description=f"no body of {model} is left")


def store(stack: Stack, model: str, name: str, body: bytes | str, **fields: Any) -> str:
    """Store a body and send its request, as PROTOCOL.md says; return the entry's ID."""
    pipeline = stack.redis.pipeline(transaction=True)
    pipeline.set(Keys(model).body(name), body, px=600_000)
    size_bytes = len(body) if isinstance(body, bytes) else len(body.encode())
    pipeline.xadd(Keys(model).requests, {"body_key": name, "body_bytes": size_bytes, **fields})
    entry_id: bytes = pipeline.execute()[-1]
    return entry_id.decode()


def large_text(letter: str) -> str:
    return json.dumps(letter * LARGE)


def block(stack: Stack, gate: Path, model: str) -> None:
    """Occupy the model's one worker until the gate opens: nearly all requests that are sent now wait.

    Where a batch has one request, it is full, so another one is dispatched ahead, and then all wait.
    """
    batches_of_one = stack.redis.hget(Keys(model).registration, "max_batch_size") == b"1"
    for number in (1, 2) if batches_of_one else (1,):
        stack.send(model, body=json.dumps({"gate": str(gate)}))

        def is_dispatched(number: int = number) -> bool:
            return int(stack.redis.xlen(Keys(model).batches)) == number

        wait_until(is_dispatched, description=f"the worker has {number} batches")


def array_of(number: int, size: int = LARGE // 4) -> np.ndarray[Any, Any]:
    return np.full(size + number, number, np.float32)


# --- served ------------------------------------------------------------------------------------------------


async def test_each_gets_its_own_large_result(shared: Stack) -> None:
    """Large and small, of several shapes and content types, from several producers at once."""
    bodies: list[Any] = []
    for number in range(24):
        bodies += [{"n": number, "image": array_of(number % 5)}, {"n": number, "image": array_of(number, 3)}]
        bodies += [bytes([number]) * LARGE, "ü" * LARGE + str(number), number]

    async def produce(client: AsyncClient) -> list[Any]:
        calls = [
            client.infer("Echo", body, content_type=JSON if isinstance(body, str) else None)
            for body in bodies
        ]
        return await asyncio.gather(*calls)

    async with (
        AsyncClient(shared.url, timeout=EVENTUALLY_S) as one,
        AsyncClient(shared.url, timeout=EVENTUALLY_S) as other,
    ):
        for results in await asyncio.gather(produce(one), produce(other)):
            for body, result in zip(bodies, results, strict=True):
                if isinstance(body, dict):
                    assert result["n"] == body["n"]
                    np.testing.assert_array_equal(result["image"], body["image"])
                else:
                    assert result == body
    wait_until_deleted(shared, "Echo")


async def test_infer_many_and_map_of_images(shared: Stack) -> None:
    """Rows of an array, strided and big-endian ones too; the model's tensor is sent to it in pieces."""
    images = np.arange(40, dtype=np.float32)[:, None] + np.zeros(LARGE // 4, np.float32)
    async with AsyncClient(shared.url, timeout=EVENTUALLY_S) as client:
        for array in (images, images[:, ::2], images.astype(">f4"), np.asfortranarray(images)):
            results = await client.infer_many("Ragged", array, in_flight=16)
            np.testing.assert_array_equal(results, array)
        mapped = [result async for result in client.map("Ragged", iter(images), in_flight=8)]
        np.testing.assert_array_equal(mapped, images)
    with Client(shared.url, timeout=EVENTUALLY_S) as blocking:
        np.testing.assert_array_equal(blocking.infer_many("Ragged", images), images)
    wait_until_deleted(shared, "Ragged")


async def test_a_request_without_deadline_and_one_with_the_same_correlation_id(shared: Stack) -> None:
    """A body belongs to one request, also if two requests have one correlation ID."""
    body = "x" * LARGE
    async with (
        AsyncClient(shared.url, timeout=None) as one,
        AsyncClient(shared.url, timeout=EVENTUALLY_S) as other,
    ):
        results = await asyncio.gather(
            *[client.infer("Echo", body, correlation_id="order-17") for client in (one, other)]
        )
        assert results == [body, body]
    wait_until_deleted(shared, "Echo")


def test_entries_with_all_forms_of_a_stored_body(shared: Stack) -> None:
    keys, packed = Keys("Echo"), encode_body(MSGPACK, "packed")
    shared.redis.set(keys.body("p1"), packed, px=60_000)
    shared.redis.set(keys.body("p2"), packed, px=60_000)
    elements: list[dict[str, Any]] = [
        {"correlation_id": "one", "body_key": "p1", "body_bytes": len(packed)},
        {
            "correlation_ids": "two three",
            "bodies": [{"body_key": "p2", "body_bytes": len(packed)}, encode_body(MSGPACK, "beside")],
        },
    ]
    shared.send_packed("Echo", elements, content_type=MSGPACK)
    single = store(shared, "Echo", "s1", b"raw", content_type=RAW)
    answers = [shared.result("Echo", name)["body"] for name in ("one", "two", "three", single)]
    assert [msgpack.unpackb(answer) for answer in answers[:3]] == ["packed", "packed", "beside"]
    assert answers[3] == b"raw"
    wait_until_deleted(shared, "Echo")


# --- wrong -------------------------------------------------------------------------------------------------


def test_wrong_bodies_fail_alone(shared: Stack, gate: Path) -> None:
    """All in one batch with good ones."""
    keys = Keys("Echo")
    block(shared, gate, "Echo")
    good = large_text("g")
    # Before their requests: a worker may fetch a batch ahead, and load its bodies.
    shared.redis.rpush(keys.body("list"), "x")
    shared.redis.set(keys.body("expired"), good, px=1)
    wait_until(lambda: not shared.redis.exists(keys.body("expired")), description="it expired")
    ids = {
        "good": store(shared, "Echo", "good", good),
        "missing": shared.send("Echo", body_key="missing", body_bytes=LARGE),
        "short": store(shared, "Echo", "short", good, body_bytes=len(good) + 1),
        "long": store(shared, "Echo", "long", good, body_bytes=len(good) - 1),
        "much longer": store(shared, "Echo", "longer", good, body_bytes=LARGE_BODY_BYTES),
        "small and short": store(shared, "Echo", "small", "7", body_bytes=3),
        "a list": shared.send("Echo", body_key="list", body_bytes=LARGE),
        "expired": shared.send("Echo", body_key="expired", body_bytes=LARGE),
        "good too": store(shared, "Echo", "good-too", good),
    }
    gate.touch()
    answers = {name: shared.result("Echo", entry_id) for name, entry_id in ids.items()}
    assert answers["good"]["body"] == answers["good too"]["body"] == json.loads(good)
    failed = {name: answer["detail"] for name, answer in answers.items() if not name.startswith("good")}
    assert {answers[name]["status"] for name in failed} == {"INVALID_ARGUMENT"}
    assert all(detail.startswith("body_key: ") for detail in failed.values()), failed
    assert {"expired", "missing"} == {name for name, detail in failed.items() if "no body" in detail}
    assert str(len(good)) in failed["short"]
    wait_until_deleted(shared, "Echo")


@pytest.mark.parametrize(
    "fields",
    [{"priority": "11"}, {"body_bytes": "many"}, {"correlation_id": "no/name"}, {"body_bytes": 1 << 40}],
    ids=str,
)
def test_refused_on_arrival(shared: Stack, fields: dict[str, Any]) -> None:
    entry_id = store(shared, "Echo", "refused", "7", **fields)
    assert shared.result("Echo", entry_id)["status"] == "INVALID_ARGUMENT"
    wait_until_deleted(shared, "Echo")


# --- answered without being executed -----------------------------------------------------------------------


async def test_withdrawn_expired_and_refused_requests_leave_no_body(shared: Stack, gate: Path) -> None:
    images = [bytes([number]) * LARGE for number in range(3)]
    async with AsyncClient(shared.url, timeout=EVENTUALLY_S) as client:
        await asyncio.to_thread(block, shared, gate, "Single")
        await asyncio.to_thread(shared.configure, "Single", max_queue_bytes=str(3 * LARGE))
        withdrawn = [client.submit("Single", image) for image in images[:2]]
        await asyncio.to_thread(
            wait_until, lambda: len(bodies_left(shared, "Single")) == 2, description="two bodies wait"
        )
        with pytest.raises(ResourceExhaustedError, match="max_queue_bytes"):
            await client.infer("Single", bytes(2 * LARGE))
        assert len(bodies_left(shared, "Single")) == 2
        withdrawn[0].cancel()
        await asyncio.to_thread(
            wait_until, lambda: len(bodies_left(shared, "Single")) == 1, description="one body waits"
        )
        with pytest.raises(DeadlineExceededError):
            await client.infer("Single", images[0], timeout=0.5)
        await asyncio.to_thread(
            wait_until, lambda: len(bodies_left(shared, "Single")) == 1, description="the other one waits"
        )
        withdrawn[1].cancel()
        await asyncio.to_thread(wait_until_deleted, shared, "Single")
        gate.touch()
        assert await client.infer("Single", images[2]) == images[2]
    shared.redis.delete(Keys("Single").overrides)
    wait_until_deleted(shared, "Single")


async def test_expired_in_flight(shared: Stack, gate: Path) -> None:
    """The batcher answers ahead of the commit, which deletes the body."""
    async with AsyncClient(shared.url) as client:
        body, keys = {"gate": str(gate), "image": array_of(1)}, Keys("Echo")
        for timeout_s in growing_s(0.5):
            with pytest.raises(DeadlineExceededError):
                await client.infer("Echo", body, timeout=timeout_s)
            await asyncio.to_thread(
                wait_until, lambda: not shared.redis.xlen(keys.requests), description="it does not wait"
            )
            if shared.redis.xlen(keys.batches):  # else it expired before it was dispatched
                break
        assert len(bodies_left(shared, "Echo")) == 1
        gate.touch()
        await asyncio.to_thread(wait_until_deleted, shared, "Echo")


def test_a_dead_letter_keeps_its_body(shared: Stack) -> None:
    """It is in the entry itself, so that nothing else has to be kept."""
    text = '"kill"' + " " * LARGE
    entry_id = store(shared, "Faulty", "deadly", text)
    assert shared.result("Faulty", entry_id)["status"] == "ABORTED"
    ((_, letter),) = shared.redis.xrange(Keys("Faulty").dead)
    assert letter[b"body"] == text.encode()
    wait_until_deleted(shared, "Faulty")


# --- failures ----------------------------------------------------------------------------------------------


async def test_reclaimed_batch_loads_its_bodies_again(stack: Stack, gate: Path) -> None:
    stack.batcher()
    first = stack.worker("plain.py:Echo", "--lease-ms", "600")
    stack.wait_for_model("Echo")
    images = [array_of(number) for number in range(6)]
    async with AsyncClient(stack.url, timeout=EVENTUALLY_S) as client:
        blocked = client.submit("Echo", {"gate": str(gate), "image": images[0]})
        await asyncio.to_thread(
            wait_until, lambda: stack.pending("Echo") == 1, description="the first batch is in flight"
        )
        others = [client.submit("Echo", {"image": image}) for image in images]
        await asyncio.to_thread(
            wait_until, lambda: len(bodies_left(stack, "Echo")) == 7, description="all are stored"
        )
        first.kill()
        gate.touch()
        stack.worker("plain.py:Echo", "--lease-ms", "600")
        np.testing.assert_array_equal((await blocked)["image"], images[0])
        for image, result in zip(images, await asyncio.gather(*others), strict=True):
            np.testing.assert_array_equal(result["image"], image)
    wait_until_deleted(stack, "Echo")
    assert stack.events("batch reclaimed")


def test_bodies_are_kept_while_their_requests_wait(stack: Stack) -> None:
    """A batcher renews them. This entry says that it has waited since 1970."""
    stack.batcher()
    worker = stack.worker("plain.py:Echo", "--lease-ms", "600")
    stack.wait_for_model("Echo")
    assert worker.terminate() == 0
    keys = Keys("Echo")

    def knows_of_none() -> bool:
        report = stack.redis.get(keys.report)
        return report is not None and json.loads(report)["gauges"]["model_processes"] == 0

    wait_until(knows_of_none, description="the batcher knows that the worker has gone")
    stack.redis.set(keys.body("old"), large_text("o"), px=600_000)
    stack.redis.xadd(keys.requests, {"body_key": "old", "body_bytes": len(large_text("o"))}, id="1-1")
    store(stack, "Echo", "young", large_text("y"))
    wait_until(
        lambda: stack.redis.pttl(keys.body("old")) > BODY_TTL_MS - 60_000,
        description="the body of the waiting request is renewed",
    )
    assert 0 < stack.redis.pttl(keys.body("young")) <= 600_000
    stack.worker("plain.py:Echo")
    assert stack.result("Echo", "1-1")["status"] == "OK"
    wait_until_deleted(stack, "Echo")
    assert stack.keys_without_ttl() <= fixed_keys("Echo")


async def test_lost_connection_sends_the_body_again(stack: Stack) -> None:
    stack.batcher()
    stack.worker("plain.py:Ragged")
    stack.wait_for_model("Ragged")
    images = np.arange(60, dtype=np.float32)[:, None] + np.zeros(LARGE // 4, np.float32)
    async with AsyncClient(stack.url, timeout=EVENTUALLY_S) as client:
        await client.infer("Ragged", images[0])
        task = asyncio.ensure_future(client.infer_many("Ragged", images, in_flight=60))
        for _ in range(3):
            await asyncio.to_thread(
                wait_until, lambda: transport_of(client)._connected, description="it is connected"
            )
            await asyncio.sleep(0)  # it writes
            transport_of(client)._writer._transport.abort()
            await asyncio.sleep(0)  # it notices
        np.testing.assert_array_equal(await task, images)
    wait_until_deleted(stack, "Ragged")


async def test_rejection_in_a_transaction_reaches_the_caller(stack: Stack) -> None:
    stack.batcher()
    stack.worker("plain.py:Echo")
    stack.wait_for_model("Echo")
    keys = Keys("Echo")
    async with AsyncClient(stack.url, timeout=EVENTUALLY_S) as client:
        assert await client.infer("Echo", 1) == 1
        stack.redis.config_set("maxmemory", "1")
        with pytest.raises(ResourceExhaustedError, match="out of memory"):
            await client.infer("Echo", "x" * LARGE)
        stack.redis.config_set("maxmemory", "0")
        assert await client.infer("Echo", "x" * LARGE) == "x" * LARGE
        stack.wait_until_idle("Echo")
    assert not bodies_left(stack, "Echo")
    assert stack.redis.xlen(keys.requests) == 0
