"""AsyncClient.sequence and Client.sequence, against a service driven by the test on a real redis-server."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, Final

import msgpack
import numpy as np
import pytest

from carpool import AsyncClient, Client
from carpool.client import AsyncSequence, BlockingSequence
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from carpool.store.connection import LinkError
from carpool_cli.local.embedded import EmbeddedRedis
from support.echo import Echo
from support.streaming import StreamingService, failure, final
from support.transport import transport_of
from support.waiting import EVENTUALLY_S

MODEL: Final = "Vad"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def service(server: EmbeddedRedis) -> Iterator[StreamingService]:
    service = StreamingService(server.url, MODEL)
    yield service
    service.close()


@pytest.fixture
async def client(server: EmbeddedRedis, service: StreamingService) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, timeout=EVENTUALLY_S) as client:
        yield client


@pytest.fixture
def blocking(server: EmbeddedRedis, service: StreamingService) -> Iterator[Client]:
    with Client(server.url, timeout=EVENTUALLY_S) as client:
        yield client


async def take(service: StreamingService, count: int = 1) -> list[Echo]:
    """The next requests. Waits in a thread: the client needs the event loop."""
    return await asyncio.to_thread(service.take, count)


def answer(service: StreamingService, *requests: Echo) -> None:
    """Each with its own body."""
    for request in requests:
        service.write(request, final(request, request.body))


def sequence_fields(request: Echo) -> dict[str, str]:
    return {name: value for name, value in request.fields.items() if name.startswith("sequence_")}


def numbers(requests: list[Echo]) -> list[str]:
    """The index of each, with `start` and `end`."""
    words = []
    for request in requests:
        fields = sequence_fields(request)
        words.append(
            fields["sequence_index"]
            + (" start" if fields.get("sequence_start") else "")
            + (" end" if fields.get("sequence_end") else "")
        )
    return words


# --- what is sent ------------------------------------------------------------------------------------------


async def test_requests_carry_start_index_and_end(client: AsyncClient, service: StreamingService) -> None:
    async with client.sequence(MODEL, "mic7") as sequence:
        assert sequence.sequence_id == "mic7"
        for body, is_last in (("a", False), ("b", False), ("c", True)):
            result = asyncio.ensure_future(sequence.infer(body, end=is_last, priority=7))
            (request,) = await take(service)
            assert request.fields.pop("priority") == "7"
            request.fields.pop("expiration")
            expected = {"sequence_id": "mic7", "sequence_index": str("abc".index(body))}
            expected |= {"sequence_start": "1"} if body == "a" else {}
            expected |= {"sequence_end": "1"} if is_last else {}
            assert request.fields == expected
            answer(service, request)
            assert await result == body
    await client.models()  # what was sent before this is in Redis
    assert (service.read(), service.ended, service.withdrawn) == ([], [], [])


async def test_one_request_may_be_first_and_last(client: AsyncClient, service: StreamingService) -> None:
    async with client.sequence(MODEL) as sequence:
        future = sequence.submit("a", end=True)
        (request,) = await take(service)
        assert numbers([request]) == ["0 start end"]
        answer(service, request)
        assert await future == "a"
    await client.models()
    assert service.read() == [] and service.ended == []


async def test_names_are_generated(client: AsyncClient) -> None:
    names = {client.sequence(MODEL).sequence_id for _ in range(3)}
    assert len(names) == 3
    assert all(re.fullmatch("py-[0-9a-f]{16}", name) for name in names)


async def test_several_in_flight_are_sent_in_order_of_the_calls(
    client: AsyncClient, service: StreamingService
) -> None:
    """Of several sequences at once, together with other requests, and whatever their content types."""
    async with client.sequence(MODEL, "x") as one, client.sequence(MODEL, "y") as other:
        futures = [
            [
                sequence.submit(at, content_type="application/json" if at % 3 else None, end=at == 9)
                for sequence in (one, other)
            ]
            for at in range(10)
        ]
        plain = client.submit(MODEL, "plain")
        requests = await take(service, 21)
        of_each = {
            name: [request for request in requests if request.fields.get("sequence_id") == name]
            for name in ("x", "y", None)
        }
        assert sequence_fields(of_each[None][0]) == {}
        for name in ("x", "y"):
            in_order = sorted(numbers(of_each[name]), key=lambda words: int(words.split()[0]))
            assert in_order == ["0 start", *map(str, range(1, 9)), "9 end"]
        answer(service, *requests)
        assert await asyncio.gather(*(future for pair in futures for future in pair)) == [
            at for at in range(10) for _ in range(2)
        ]
        assert await plain == "plain"
    assert service.read() == [] and service.ended == []


async def test_infer_keeps_the_order_of_tasks(client: AsyncClient, service: StreamingService) -> None:
    async with client.sequence(MODEL) as sequence:
        tasks = [asyncio.ensure_future(sequence.infer(at)) for at in range(5)]
        requests = await take(service, 5)
        assert [(request.body, *numbers([request])) for request in requests] == [
            (msgpack.packb(at), f"{at} start" if at == 0 else str(at)) for at in range(5)
        ]
        answer(service, *requests)
        assert await asyncio.gather(*tasks) == list(range(5))


# --- the end of a block ------------------------------------------------------------------------------------


async def test_end_of_the_block_waits_for_results_and_ends_the_sequence(
    client: AsyncClient, service: StreamingService
) -> None:
    async def use() -> list[Any]:
        async with client.sequence(MODEL, "mic7") as sequence:
            futures = [sequence.submit(at) for at in range(3)]
        return [future.result() for future in futures]  # they are done

    using = asyncio.ensure_future(use())
    requests = await take(service, 3)
    assert service.ended == []
    answer(service, *requests)
    assert await using == [0, 1, 2]
    assert await asyncio.to_thread(service.wait_for_end) == ["mic7"]


async def test_sequence_without_requests_is_not_ended(client: AsyncClient, service: StreamingService) -> None:
    async with client.sequence(MODEL):
        pass
    await client.models()
    assert service.read() == [] and service.ended == []


async def test_exception_ends_the_sequence_without_waiting(
    client: AsyncClient, service: StreamingService
) -> None:
    """The services answer what still waits."""
    with pytest.raises(ZeroDivisionError):
        async with client.sequence(MODEL, "mic7") as sequence:
            future = sequence.submit("a")
            raise ZeroDivisionError
    assert await asyncio.to_thread(service.wait_for_end) == ["mic7"]
    (request,) = await take(service)
    service.write(request, failure(request, "CANCELLED", "it was ended"))
    with pytest.raises(CancelledRequestError):
        await future


async def test_sequences_that_end_together_share_an_entry(
    client: AsyncClient, service: StreamingService
) -> None:
    sequences = [client.sequence(MODEL, f"mic{at}") for at in range(5)]
    for sequence in sequences:
        await sequence.__aenter__()
    futures = [sequence.submit("a") for sequence in sequences]
    answer(service, *await take(service, 5))
    await asyncio.gather(*futures)
    for sequence in sequences:
        await sequence.__aexit__(None, None, None)
    assert await asyncio.to_thread(service.wait_for_end) == [f"mic{at}" for at in range(5)]
    await client.models()
    assert service.read() == [] and service.ended == []


async def test_end_stands_between_the_requests_before_and_after_it(
    client: AsyncClient, service: StreamingService
) -> None:
    """A sequence of the same name may begin in the same iteration of the event loop."""
    with pytest.raises(ZeroDivisionError):
        async with client.sequence(MODEL, "mic7") as first:
            first.submit("a")
            raise ZeroDivisionError
    second = client.sequence(MODEL, "mic7")
    await second.__aenter__()
    second.submit("b")
    entries = await asyncio.to_thread(entries_of, service, 3)
    assert [next(iter(fields.keys() & {b"body", b"end_sequences"})) for fields in entries] == [
        b"body",
        b"end_sequences",
        b"body",
    ]
    assert [fields.get(b"sequence_start") for fields in entries] == [b"1", None, b"1"]


def entries_of(service: StreamingService, count: int) -> list[dict[bytes, bytes]]:
    from support.waiting import wait_until

    key = service.keys.requests
    wait_until(lambda: service._redis.xlen(key) >= count, description="entries are there")
    return [fields for _, fields in service._redis.xrange(key)]


async def test_end_is_sent_before_the_client_is_closed(
    server: EmbeddedRedis, service: StreamingService
) -> None:
    async with AsyncClient(server.url) as client, client.sequence(MODEL, "mic7") as sequence:
        future = sequence.submit("a")
        answer(service, *await take(service))
        await future
    assert service.wait_for_end() == ["mic7"]


# --- errors ------------------------------------------------------------------------------------------------


async def test_no_request_follows_on_one_that_failed(client: AsyncClient, service: StreamingService) -> None:
    async with client.sequence(MODEL, "mic7") as sequence:
        first, failing, following = (sequence.submit(at) for at in range(3))
        requests = await take(service, 3)
        answer(service, requests[0])
        service.write(requests[1], failure(requests[1], "INTERNAL", "it raised"))
        assert await first == 0
        with pytest.raises(InternalError, match="it raised"):
            await failing
        with pytest.raises(AbortedError, match=r"mic7: its request 1 failed \(INTERNAL: it raised\)"):
            await sequence.infer("more")
        service.write(requests[2], failure(requests[2], "ABORTED", "begin it again"))
        with pytest.raises(AbortedError, match="begin it again"):
            await following
        with pytest.raises(AbortedError, match="its request 1 failed"):  # the first error
            sequence.submit("more")
        assert service.read() == []

        sequence.restart()
        again = sequence.submit("again")
        (request,) = await take(service)
        assert service.ended == [["mic7"]]
        assert numbers([request]) == ["0 start"]
        answer(service, request)
        assert await again == "again"


async def test_it_begins_again_only_when_all_requests_have_results(
    client: AsyncClient, service: StreamingService
) -> None:
    """Otherwise the index of an earlier request could be taken for that of a later one."""
    async with client.sequence(MODEL) as sequence:
        future = sequence.submit("a")
        with pytest.raises(RuntimeError, match="1 of its requests have no result yet"):
            sequence.restart()
        (request,) = await take(service)
        answer(service, request)
        await future
        sequence.restart()


async def test_cancelled_request_is_withdrawn_and_none_follows(
    client: AsyncClient, service: StreamingService
) -> None:
    async with client.sequence(MODEL) as sequence:
        task = asyncio.ensure_future(sequence.infer("a"))
        (request,) = await take(service)
        task.cancel()
        await asyncio.to_thread(service.wait_for_withdrawal, request.correlation_id)
        with pytest.raises(AbortedError, match=r"its request 0 failed .*by its caller"):
            sequence.submit("b")


async def test_nothing_follows_on_the_end(client: AsyncClient, service: StreamingService) -> None:
    async with client.sequence(MODEL, "mic7") as sequence:
        last = sequence.submit("a", end=True)
        with pytest.raises(AbortedError, match=r"mic7: it has ended; restart\(\) begins it again"):
            sequence.submit("b")
        answer(service, *await take(service))
        assert await last == "a"
        sequence.restart()
        again = sequence.submit("b", end=True)
        (request,) = await take(service)
        assert numbers([request]) == ["0 start end"]
        answer(service, request)
        assert await again == "b"
    await client.models()
    assert service.read() == [] and service.ended == []


async def test_sequence_is_used_within_its_block(client: AsyncClient, service: StreamingService) -> None:
    sequence = client.sequence(MODEL)
    with pytest.raises(AbortedError, match="its block was not entered"):
        sequence.submit("a")
    async with sequence:
        pass
    with pytest.raises(AbortedError, match="its block was left"):
        sequence.submit("a")
    async with sequence:  # once more
        future = sequence.submit("a", end=True)
        answer(service, *await take(service))
        assert await future == "a"
    with pytest.raises(NotFoundError):
        async with client.sequence("Nobody"):
            pass


async def test_request_that_cannot_be_sent_takes_no_index(
    client: AsyncClient, service: StreamingService
) -> None:
    async with client.sequence(MODEL) as sequence:
        with pytest.raises(InvalidArgumentError, match="timeout"):
            sequence.submit("a", timeout="soon")  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="no such option"):
            sequence.submit("a", prio=3)  # type: ignore[call-arg]
        with pytest.raises(InvalidArgumentError):
            sequence.submit({1, 2})
        future = sequence.submit("b", end=True)
        (request,) = await take(service)
        assert numbers([request]) == ["0 start end"]
        answer(service, request)
        assert await future == "b"


@pytest.mark.parametrize(
    "options",
    [{"sequence_id": "x"}, {"sequence_start": True}, {"sequence_end": True}, {"sequence_index": 0}],
    ids=lambda options: next(iter(options)),
)
async def test_options_of_the_sequence_are_its_own(
    client: AsyncClient, service: StreamingService, options: dict[str, Any]
) -> None:
    (name,) = options
    async with client.sequence(MODEL) as sequence:
        with pytest.raises(InvalidArgumentError, match=f"{name}: the sequence sets this option itself"):
            sequence.submit("a", **options)
        with pytest.raises(InvalidArgumentError, match=f"{name}: is an option of its own"):
            sequence.submit("a", fields={name: "1"})
    with pytest.raises(InvalidArgumentError, match=f"{name}: is an option of its own"):
        await client.infer(MODEL, "a", fields={name: "1"})
    with pytest.raises(InvalidArgumentError, match=f"{name}: is no option of infer_many"):
        await client.infer_many(MODEL, ["a"], **options)
    with pytest.raises(InvalidArgumentError, match=f"{name}: is no option of map"):
        await anext(client.map(MODEL, ["a"], **options))
    with pytest.raises(InvalidArgumentError, match=f"{name}: is no option of stream"):
        await anext(client.stream(MODEL, "a", **options))
    await client.models()
    assert service.read() == []


# --- options of single requests ----------------------------------------------------------------------------


async def test_single_request_may_name_its_sequence(client: AsyncClient, service: StreamingService) -> None:
    first = asyncio.ensure_future(client.infer(MODEL, "a", sequence_id="mic7", sequence_start=True))
    (request,) = await take(service)
    assert sequence_fields(request) == {"sequence_id": "mic7", "sequence_start": "1"}
    answer(service, request)
    assert await first == "a"
    last = client.submit(
        MODEL, "b", sequence_id="mic7", sequence_start=False, sequence_end=True, sequence_index=1
    )
    (request,) = await take(service)
    assert sequence_fields(request) == {"sequence_id": "mic7", "sequence_end": "1", "sequence_index": "1"}
    answer(service, request)
    assert await last == "b"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"sequence_id": "a b"}, "sequence_id: 'a b' must have 1 to 128 characters"),
        ({"sequence_id": 7}, "sequence_id: 7 must have"),
        ({"sequence_start": True}, "sequence_start: only together with sequence_id"),
        ({"sequence_end": True, "sequence_index": 2}, "sequence_end, sequence_index: only together with"),
        ({"sequence_end": True, "sequence_index": 0}, "sequence_index: must be 0 with"),
        ({"sequence_id": "a", "sequence_index": -1}, "sequence_index: -1 must be a whole number"),
        ({"sequence_id": "a", "sequence_index": True}, "sequence_index: True must be"),
        ({"sequence_id": "a", "sequence_start": "yes"}, "sequence_start: 'yes' must be True or False"),
        ({"sequence_id": "a", "sequence_end": 2}, "sequence_end: 2 must be True or False"),
        ({"sequence_id": "a", "sequence_start": True, "sequence_index": 1}, "must be 0 with sequence_start"),
        ({"sequence_id": "a", "sequence_index": 0}, "must be 0 with sequence_start, and only there"),
    ],
)
async def test_invalid_options_are_not_sent(
    client: AsyncClient, service: StreamingService, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=sentence):
        await client.infer(MODEL, "a", **options)
    assert service.read() == []


def test_invalid_name_of_a_sequence_is_rejected_at_once(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgumentError, match="sequence_id"):
        client.sequence(MODEL, "a b")


# --- lost connections --------------------------------------------------------------------------------------


async def test_requests_are_sent_again_with_their_ids_and_indexes(
    client: AsyncClient, service: StreamingService
) -> None:
    async with client.sequence(MODEL, "mic7") as sequence:
        futures = [sequence.submit(at) for at in range(3)]
        await asyncio.sleep(0)
        transport_of(client)._on_connection_lost(LinkError("lost"))  # before Redis has replied
        requests = await take(service, 6)
        first, second = requests[:3], requests[3:]
        assert [request.correlation_id for request in first] == [request.correlation_id for request in second]
        assert numbers(first) == numbers(second) == ["0 start", "1", "2"]
        answer(service, *first)
        assert await asyncio.gather(*futures) == [0, 1, 2]


async def test_sequence_that_ended_is_ended_by_force_after_a_lost_connection(
    client: AsyncClient, service: StreamingService
) -> None:
    """A second copy of its last requests would wait for a sequence of the same name to begin."""
    async with client.sequence(MODEL, "mic7") as sequence:
        first = sequence.submit("a")
        answer(service, *await take(service))
        await first
        last = sequence.submit("b", end=True)
        await asyncio.sleep(0)
        transport_of(client)._on_connection_lost(LinkError("lost"))
        answer(service, (await take(service, 2))[0])
        assert await last == "b"
    assert await asyncio.to_thread(service.wait_for_end) == ["mic7"]


async def test_end_by_force_is_sent_once(client: AsyncClient, service: StreamingService) -> None:
    """Sent again, it could end the sequence of the same name that began after it."""
    async with client.sequence(MODEL, "mic7") as sequence:
        first = sequence.submit("a")
        answer(service, *await take(service))
        await first
    await asyncio.sleep(0)
    transport_of(client)._on_connection_lost(LinkError("lost"))
    await client.models()
    service.read()
    assert service.ended == [["mic7"]]


async def test_request_without_an_index_is_not_sent_again(
    client: AsyncClient, service: StreamingService
) -> None:
    await client._producer.open_channel(MODEL, None)
    sent = [
        client.submit(MODEL, "a", sequence_id="mic7"),
        client.submit(MODEL, "b", sequence_id="mic8", sequence_index=4),
        client.submit(MODEL, "c"),
    ]
    await asyncio.sleep(0)
    transport_of(client)._on_connection_lost(LinkError("lost"))
    with pytest.raises(UnavailableError, match="before Redis confirmed the request"):
        await sent[0]
    requests = await take(service, 5)
    assert [request.body for request in requests] == [msgpack.packb(body) for body in "abcbc"]
    answer(service, *requests[:3])
    assert await asyncio.gather(*sent[1:]) == ["b", "c"]


# --- in threads --------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_thread_sends_the_requests_of_a_sequence(
    blocking: Client, service: StreamingService, pool: ThreadPoolExecutor
) -> None:
    def use() -> list[Any]:
        with blocking.sequence(MODEL, "mic7") as sequence:
            assert sequence.sequence_id == "mic7"
            first = sequence.infer("a", priority=3)
            futures = [sequence.submit(at) for at in range(3)]
        return [first, *(future.result(0) for future in futures)]

    using = pool.submit(use)
    (request,) = service.take()
    assert (request.fields["priority"], *numbers([request])) == ("3", "0 start")
    answer(service, request)
    requests = service.take(3)
    assert numbers(requests) == ["1", "2", "3"]
    assert service.ended == []
    answer(service, *requests)
    assert using.result(EVENTUALLY_S) == ["a", 0, 1, 2]
    assert service.wait_for_end() == ["mic7"]


def test_threads_share_a_sequence(
    blocking: Client, service: StreamingService, pool: ThreadPoolExecutor
) -> None:
    with blocking.sequence(MODEL) as sequence:
        futures = list(pool.map(sequence.submit, range(40)))
        requests = service.take(40)
        assert sorted(int(words.split()[0]) for words in numbers(requests)) == list(range(40))
        assert all(int(one.split()[0]) < int(two.split()[0]) for one, two in pairwise(numbers(requests)))
        answer(service, *requests)
        assert [future.result(EVENTUALLY_S) for future in futures] == list(range(40))


def test_errors_reach_the_thread(blocking: Client, service: StreamingService) -> None:
    with blocking.sequence(MODEL, "mic7") as sequence:
        failing = sequence.submit("a")
        with pytest.raises(RuntimeError, match="no result yet"):
            sequence.restart()
        (request,) = service.take()
        service.write(request, failure(request, "INTERNAL", "it raised"))
        with pytest.raises(InternalError):
            failing.result(EVENTUALLY_S)
        with pytest.raises(AbortedError, match="its request 0 failed"):
            sequence.infer("b")
        with pytest.raises(InvalidArgumentError, match="sequence_end: the sequence sets"):
            sequence.infer("b", sequence_end=True)
        sequence.restart()
        again = sequence.submit("c", end=True)
        (request,) = service.take()
        assert numbers([request]) == ["0 start end"]
        answer(service, request)
        assert again.result(EVENTUALLY_S) == "c"
    with pytest.raises(AbortedError, match="its block was left"):
        sequence.infer("d")
    with pytest.raises(NotFoundError), blocking.sequence("Nobody"):
        pass


def test_future_that_a_thread_cancels_is_withdrawn(blocking: Client, service: StreamingService) -> None:
    with blocking.sequence(MODEL, "mic7") as sequence:
        future = sequence.submit("a")
        (request,) = service.take()
        assert future.cancel()
        service.wait_for_withdrawal(request.correlation_id)
        with pytest.raises(AbortedError, match="its request 0 failed"):
            sequence.infer("b")
    assert service.wait_for_end() == ["mic7"]


def test_exception_in_a_thread_ends_the_sequence(blocking: Client, service: StreamingService) -> None:
    with pytest.raises(ZeroDivisionError), blocking.sequence(MODEL, "mic7") as sequence:
        sequence.submit("a")
        raise ZeroDivisionError
    assert service.wait_for_end() == ["mic7"]


def test_sequence_classes_are_alike() -> None:
    def public(kind: type) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert public(AsyncSequence) == public(BlockingSequence)


def test_a_body_of_a_sequence_is_sent_as_it_is_at_the_call(
    blocking: Client, service: StreamingService
) -> None:
    buffer = np.zeros(2)
    with blocking.sequence(MODEL) as sequence:
        futures = []
        for number in range(5):
            buffer[:] = number
            futures.append(sequence.submit(buffer))
        answer(service, *service.take(5))
        assert [future.result(EVENTUALLY_S)[0] for future in futures] == [0, 1, 2, 3, 4]
