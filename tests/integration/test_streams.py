"""AsyncClient.stream and Client.stream, against a service driven by the test on a real redis-server."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, Final

import msgpack
import numpy as np
import pytest
import uvloop

from carpool import AsyncClient, Client
from carpool.client import AsyncStream
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    UnavailableError,
)
from carpool.rows import LARGE_BODY_BYTES
from carpool.store.connection import LinkError
from carpool_cli.local.embedded import EmbeddedRedis
from support.echo import Echo
from support.streaming import StreamingService, chunk, failure, final
from support.transport import transport_of
from support.waiting import EVENTUALLY_S, Stopwatch, wait_until

MODEL: Final = "Writer"
UNREACHABLE: Final = "redis://127.0.0.1:1/0"


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
    """A client that has looked up the model, so that requests are sent at once."""
    async with AsyncClient(server.url, timeout=EVENTUALLY_S) as client:
        first = client.submit(MODEL, "first", content_type="application/json")
        (request,) = await take(service)
        service.write(request, final(request, b"0"))
        assert await first == 0
        yield client


@pytest.fixture
def blocking(server: EmbeddedRedis, service: StreamingService) -> Iterator[Client]:
    with Client(server.url, timeout=EVENTUALLY_S) as client:
        yield client


async def take(service: StreamingService, count: int = 1) -> list[Echo]:
    """The next requests. Waits in a thread: the client needs the event loop."""
    return await asyncio.to_thread(service.take, count)


async def wait_in_thread(predicate: Callable[[], object], description: str) -> None:
    await asyncio.to_thread(wait_until, predicate, description=description)


async def collect(stream: AsyncStream) -> list[Any]:
    return [value async for value in stream]


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


# --- chunks ------------------------------------------------------------------------------------------------


async def test_chunks_are_yielded_as_they_come_and_then_the_whole(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "Once")
    (request,) = await take(service)
    assert (request.body, request.fields["stream"]) == (pack("Once"), "1")
    for index, text in enumerate(["Once", " upon", " a time"]):
        service.write(request, chunk(request, index, pack(text)))
        assert await anext(stream) == text
        assert stream.reply is None
    service.write(request, final(request, pack("Once upon a time"), index=3, first_us=4120))
    assert [value async for value in stream] == []
    assert stream.reply is not None
    assert stream.reply == ("Once upon a time", request.correlation_id, 1, 5, 70, 4120, "")
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_other_requests_never_ask_for_chunks(client: AsyncClient, service: StreamingService) -> None:
    answers = [
        client.submit(MODEL, "whole"),
        asyncio.ensure_future(client.request(MODEL, "whole")),
        asyncio.ensure_future(client.infer_many(MODEL, ["whole"])),
    ]
    requests = await take(service, 3)
    assert all("stream" not in request.fields for request in requests)
    for request in requests:
        service.write(request, final(request, request.body))
    whole, reply, many = await asyncio.gather(*answers)
    assert (whole, reply.value, reply.first_us, many) == ("whole", "whole", None, ["whole"])


@pytest.mark.parametrize(
    ("content_type", "encode", "values"),
    [
        ("application/json", lambda value: json.dumps(value).encode(), ["a", {"ö": [1, None]}, 2**70, None]),
        ("application/msgpack", pack, ["a", {"ö": [1, None]}, b"\x00\xff", None]),
        ("application/octet-stream", bytes, [b"", b"\x00\xff", b"text"]),
    ],
)
async def test_bodies_of_chunks_have_the_content_type_of_the_request(
    client: AsyncClient,
    service: StreamingService,
    content_type: str,
    encode: Callable[[Any], bytes],
    values: list[Any],
) -> None:
    stream = client.stream(MODEL, b"x" if encode is bytes else "x", content_type=content_type)
    (request,) = await take(service)
    assert request.content_type == content_type
    service.write(request, *(chunk(request, index, encode(value)) for index, value in enumerate(values)))
    service.write(request, final(request, encode(values[0]), index=len(values)))
    assert await collect(stream) == values
    assert stream.reply is not None and stream.reply.value == values[0]


async def test_chunks_may_be_arrays(client: AsyncClient, service: StreamingService) -> None:
    def tensor(*numbers: float) -> bytes:
        data = np.array(numbers, "<f4").tobytes()
        return pack({"datatype": "FP32", "shape": [len(numbers)], "data": data})

    stream = client.stream(MODEL, np.arange(3, dtype=np.float32))
    (request,) = await take(service)
    service.write(request, chunk(request, 0, tensor(1, 2)), chunk(request, 1, tensor(3, 4, 5), merged=2))
    service.write(request, final(request, tensor(1, 2, 3, 4, 5), index=2))
    values = await collect(stream)
    assert [(value.dtype, value.tolist()) for value in values] == [
        (np.float32, [1, 2]),
        (np.float32, [3, 4, 5]),
    ]
    assert stream.reply is not None and stream.reply.value.tolist() == [1, 2, 3, 4, 5]


async def test_merged_values_that_cannot_be_concatenated_are_chunks_of_their_own(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack(3)))
    service.write(request, chunk(request, 1, pack([2, [1], None])) | {"values": 3})
    service.write(
        request, chunk(request, 2, pack([0])), final(request, pack([3, 2, [1], None, [0]]), index=3)
    )
    assert await collect(stream) == [3, 2, [1], None, [0]]


async def test_merged_chunks_are_one_value(client: AsyncClient, service: StreamingService) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")), chunk(request, 1, pack("bcd"), merged=3))
    service.write(request, final(request, pack("abcd"), index=2))
    assert await collect(stream) == ["a", "bcd"]


async def test_interleaved_streams_each_get_their_own_chunks(
    client: AsyncClient, service: StreamingService
) -> None:
    """They were sent in one entry, and each step's chunks come in one entry."""
    streams = [client.stream(MODEL, name) for name in ("a", "b", "c")]
    requests = await take(service, 3)
    for index in range(50):
        service.write(
            requests[0], *(chunk(request, index, pack([index, request.body])) for request in requests)
        )
    service.write(requests[0], *(final(request, request.body, index=50) for request in requests[::-1]))
    for name, stream in zip("abc", streams, strict=True):
        assert await collect(stream) == [[index, pack(name)] for index in range(50)]
        assert stream.reply is not None and stream.reply.value == name


async def test_repeated_chunks_are_skipped(client: AsyncClient, service: StreamingService) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    for index in (0, 1, 0, 1, 2, 2):
        service.write(request, chunk(request, index, pack(index)))
    service.write(request, final(request, pack(0), index=3))
    assert await collect(stream) == [0, 1, 2]


async def test_whole_output_is_not_a_chunk_where_there_were_others(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")), final(request, pack("ab")))
    assert await collect(stream) == ["a"]
    assert stream.reply is not None and stream.reply.value == "ab"


async def test_every_task_that_waits_for_a_chunk_sees_the_end(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    readers = [asyncio.ensure_future(collect(stream)) for _ in range(3)]
    await asyncio.sleep(0)
    service.write(request, chunk(request, 0, pack("a")), final(request, pack("a"), index=1))
    assert sorted(await asyncio.wait_for(asyncio.gather(*readers), 15)) == [[], [], ["a"]]


@pytest.mark.parametrize("answer", ["envelope", "columns", "array in columns"])
async def test_result_of_a_model_that_does_not_step_is_the_only_chunk(
    client: AsyncClient, service: StreamingService, answer: str
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    value: Any = 49
    if answer == "envelope":
        service.write(request, final(request, pack(49)))
    elif answer == "columns":
        service.write_rows(request, pack(49))
    else:
        value = [1, 2]
        data = np.array([1, 2], "<i8").tobytes()
        service.write_rows(request, pack({"datatype": "INT64", "shape": [2], "data": data}))
    (only,) = await collect(stream)
    assert (only.tolist() if isinstance(only, np.ndarray) else only) == value
    assert stream.reply is not None and stream.reply[1:] == (request.correlation_id, 1, 5, 70, None, "")


async def test_stream_without_chunks_ends(client: AsyncClient, service: StreamingService) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, final(request, pack(None), index=0))
    assert await collect(stream) == []
    assert stream.reply is not None and stream.reply.value is None


async def test_chunks_are_removed_from_the_reply_stream_when_they_were_read(
    client: AsyncClient, service: StreamingService
) -> None:
    """At once, and not with what is sent next: workers merge the chunks of a stream that is not read."""
    timer = transport_of(client)._silence_timer
    assert timer is not None
    timer.cancel()
    async with client.stream(MODEL, "x") as stream:
        (request,) = await take(service)
        for index in range(3):
            service.write(request, chunk(request, index, pack(index)))
            assert await anext(stream) == index
            await wait_in_thread(lambda: service.unread(request) == 0, "the chunk is removed")


async def test_large_body_of_a_stream_is_stored_beside_it(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, b"x" * 100_000)
    (request,) = await take(service)
    assert (len(request.body), request.fields["stream"]) == (100_000, "1")
    service.write(request, final(request, b"", index=0))
    assert await collect(stream) == []


async def test_first_stream_of_a_model_looks_it_up(server: EmbeddedRedis, service: StreamingService) -> None:
    async with AsyncClient(server.url, timeout=EVENTUALLY_S) as client:
        stream = client.stream(MODEL, "x")
        assert stream.correlation_id is None
        (request,) = await take(service)
        assert stream.correlation_id == request.correlation_id
        service.write(request, chunk(request, 0, pack(7)), final(request, pack(7), index=1))
        assert await collect(stream) == [7]


# --- errors ------------------------------------------------------------------------------------------------


async def test_error_in_mid_stream_comes_after_the_chunks(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")), failure(request, "ABORTED", "it cannot go on"))
    assert await anext(stream) == "a"
    with pytest.raises(AbortedError, match="it cannot go on") as raised:
        await anext(stream)
    assert raised.value.correlation_id == request.correlation_id
    assert stream.reply is None
    assert await collect(stream) == []


async def test_timeout_is_for_the_whole_answer(client: AsyncClient, service: StreamingService) -> None:
    for late in range(6):  # streams whose first chunk came late: this process was held up
        timeout_ms = 300 * 4**late
        stopwatch = Stopwatch()
        stream = client.stream(MODEL, "x", timeout=timeout_ms / 1000)
        (request,) = await take(service)
        spent_ms = timeout_ms - int(request.fields["expiration"])  # before it was written
        assert 0 <= spent_ms <= 1000 * stopwatch.elapsed_s
        service.write(request, chunk(request, 0, pack("a")))
        with suppress(DeadlineExceededError):
            assert await anext(stream) == "a"
            break
    with pytest.raises(DeadlineExceededError) as raised:
        await anext(stream)
    assert f"no result within {timeout_ms / 1000:g} s" in str(raised.value)
    assert client.timed_out == late + 1
    service.write(request, chunk(request, 1, pack("b")))
    service.write(request, final(request, pack("ab"), index=2))
    await wait_in_thread(lambda: client.late_results, "the result came late")
    assert client.late_results == 1  # chunks do not count
    assert service.read() == [] and service.withdrawn == []


@pytest.mark.parametrize("written", ["a chunk", "the result"])
async def test_missing_chunk_is_an_error(
    client: AsyncClient, service: StreamingService, written: str
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")))
    if written == "a chunk":
        service.write(request, chunk(request, 3, pack("d")))
    else:
        service.write(request, final(request, pack("abc"), index=3))
    assert await anext(stream) == "a"
    with pytest.raises(InternalError, match="chunks 1 to 2 were not in the reply stream"):
        await anext(stream)
    if written == "a chunk":
        await asyncio.to_thread(service.wait_for_withdrawal, request.correlation_id)
    else:
        assert stream.reply is not None and stream.reply.value == "abc"


async def test_chunk_that_cannot_be_decoded_fails_its_stream_only(
    client: AsyncClient, service: StreamingService
) -> None:
    broken, other = client.stream(MODEL, "x"), client.stream(MODEL, "y")
    first, second = await take(service, 2)
    service.write(first, chunk(first, 0, b"\xc1"), chunk(second, 0, pack("b")))
    service.write(first, final(second, pack("b"), index=1))
    with pytest.raises(InvalidArgumentError, match="body: not msgpack"):
        await anext(broken)
    assert await collect(other) == ["b"]
    await asyncio.to_thread(service.wait_for_withdrawal, first.correlation_id)
    assert service.withdrawn == [first.correlation_id]


async def test_errors_before_the_request_is_sent_come_from_the_iterator(
    client: AsyncClient, service: StreamingService
) -> None:
    with pytest.raises(NotFoundError, match="no worker has registered a model 'Poet'"):
        await anext(client.stream("Poet", "x"))
    with pytest.raises(InvalidArgumentError, match="body"):
        await anext(client.stream(MODEL, object()))
    with pytest.raises(InvalidArgumentError, match="'stream': the client sets this field itself"):
        await anext(client.stream(MODEL, "x", fields={"stream": "1"}))
    with pytest.raises(TypeError, match="no such option: prio"):
        await anext(client.stream(MODEL, "x", prio=3))  # type: ignore[call-arg]
    unreachable = AsyncClient(UNREACHABLE)
    with pytest.raises(UnavailableError):
        await anext(unreachable.stream(MODEL, "x"))
    await unreachable.close()
    assert service.read() == []


async def test_closing_the_client_ends_its_streams(server: EmbeddedRedis, service: StreamingService) -> None:
    client = AsyncClient(server.url, timeout=EVENTUALLY_S)
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")))
    assert await anext(stream) == "a"
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(UnavailableError, match="client was closed"):
        await waiting
    with pytest.raises(UnavailableError, match="this client is closed"):
        await anext(client.stream(MODEL, "x"))


# --- leaving early -----------------------------------------------------------------------------------------


async def close(stream: AsyncStream) -> None:
    assert await anext(stream) == "a"
    await stream.aclose()
    assert await collect(stream) == []


async def leave_context(stream: AsyncStream) -> None:
    async with stream:
        assert await anext(stream) == "a"


async def cancel_reader(stream: AsyncStream) -> None:
    assert await anext(stream) == "a"
    reader = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert await collect(stream) == []


@pytest.mark.parametrize("leave", [close, leave_context, cancel_reader])
async def test_leaving_a_stream_withdraws_its_request(
    client: AsyncClient, service: StreamingService, leave: Callable[[AsyncStream], Any]
) -> None:
    stream, other = client.stream(MODEL, "x"), client.stream(MODEL, "y")
    request, second = await take(service, 2)
    service.write(request, chunk(request, 0, pack("a")), chunk(second, 0, pack("a")))
    await leave(stream)
    await asyncio.to_thread(service.wait_for_withdrawal, request.correlation_id)
    service.write(request, chunk(request, 1, pack("b")), failure(request, "CANCELLED", "withdrawn"))
    service.write(second, final(second, pack("a"), index=1))
    assert await collect(other) == ["a"]
    assert service.withdrawn == [request.correlation_id]
    assert client.late_results == 0


async def test_leaving_async_for_withdraws_the_request(
    client: AsyncClient, service: StreamingService
) -> None:
    async def read_one() -> None:
        async for text in client.stream(MODEL, "x"):
            assert text == "a"
            break

    reader = asyncio.ensure_future(read_one())
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")))
    await reader
    gc.collect()
    await asyncio.to_thread(service.wait_for_withdrawal, request.correlation_id)


async def test_leaving_async_for_withdraws_also_if_a_variable_holds_the_stream(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")))
    async for text in stream:
        assert text == "a"
        break
    await asyncio.to_thread(service.wait_for_withdrawal, request.correlation_id)
    for read_on in (lambda: collect(stream), lambda: anext(stream)):
        with pytest.raises(CancelledRequestError, match="a loop over this stream was left before its end"):
            await read_on()


async def test_stream_is_read_in_a_loop_after_some_chunks_and_by_several_loops(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    service.write(request, chunk(request, 0, pack("a")), chunk(request, 1, pack("b")))
    assert await anext(stream) == "a"
    other = aiter(stream)
    async for text in stream:
        assert text == "b"
        break  # the other loop goes on
    service.write(request, chunk(request, 2, pack("c")), final(request, pack("abc"), index=3))
    assert [text async for text in other] == ["c"]
    assert stream.reply is not None and stream.reply.value == "abc"
    assert service.withdrawn == []


async def test_stream_that_has_ended_is_not_withdrawn(client: AsyncClient, service: StreamingService) -> None:
    stream, other = client.stream(MODEL, "x"), client.stream(MODEL, "y")
    first, second = await take(service, 2)
    service.write(first, chunk(first, 0, pack("a")), final(first, pack("a"), index=1))
    service.write(first, chunk(second, 0, pack("a")))
    assert await anext(other) == "a"  # so the result before it was read
    await stream.aclose()
    await other.aclose()
    await asyncio.to_thread(service.wait_for_withdrawal, second.correlation_id)
    assert service.withdrawn == [second.correlation_id]


async def test_stream_closed_before_it_is_sent_never_is(
    client: AsyncClient, server: EmbeddedRedis, service: StreamingService
) -> None:
    """Closed in the same iteration of the event loop; and closed while its model is looked up."""
    await client.stream(MODEL, "never").aclose()
    async with AsyncClient(server.url, timeout=EVENTUALLY_S) as another:
        await another.stream(MODEL, "never").aclose()
        last = [client.stream(MODEL, "last"), another.stream(MODEL, "last")]
        requests = await take(service, 2)
        assert [request.body for request in requests] == [pack("last")] * 2
        assert service.read() == [] and service.withdrawn == []
        for request, stream in zip(requests, last, strict=True):
            assert request.correlation_id in {each.correlation_id for each in last}
            await stream.aclose()


async def test_chunks_of_an_earlier_stream_do_not_reach_other_requests(
    client: AsyncClient, service: StreamingService
) -> None:
    """A request of the same correlation ID that wants no chunks."""
    stream = client.stream(MODEL, "x", correlation_id="mine")
    (request,) = await take(service)
    await stream.aclose()
    whole = client.submit(MODEL, "x", correlation_id="mine")
    await take(service)
    service.write(request, chunk(request, 0, pack("a")), final(request, pack("ab")))
    assert await whole == "ab"


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_withdrawal_is_sent_before_the_client_is_closed(
    server: EmbeddedRedis, service: StreamingService, factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def leave_early() -> str:
        async with AsyncClient(server.url) as client, client.stream(MODEL, "x") as stream:
            (request,) = await take(service)
            service.write(request, chunk(request, 0, pack("a")))
            assert await anext(stream) == "a"
        return request.correlation_id

    with asyncio.Runner(loop_factory=factory) as runner:
        service.wait_for_withdrawal(runner.run(leave_early()))


# --- lost connections --------------------------------------------------------------------------------------


async def test_stream_continues_after_a_lost_connection(
    client: AsyncClient, service: StreamingService
) -> None:
    """Chunks are written while the client is connected, while it is not, and afterwards."""
    stream = client.stream(MODEL, "x")
    (request,) = await take(service)
    values: list[int] = []
    numbers = count()
    for roles in (("r",), ("w",), ("r", "w")):
        for _ in range(10):
            index = next(numbers)
            service.write(request, chunk(request, index, pack(index)))
        values.append(await anext(stream))
        service.disconnect(*roles)
        for _ in range(10):
            index = next(numbers)
            service.write(request, chunk(request, index, pack(index)))
    service.write(request, final(request, pack(None), index=next(numbers)))
    values += await collect(stream)
    assert values == list(range(60))
    assert service.read() == [] and service.withdrawn == []


async def send_and_lose_the_reply(client: AsyncClient, service: StreamingService, sent: int) -> list[Echo]:
    """Requests that reach Redis over a connection that is lost before the client reads Redis's reply.

    The event loop is kept from reading it.
    """
    await asyncio.sleep(0)
    requests = service.take(sent)
    transport_of(client)._on_connection_lost(LinkError("lost"))
    return requests


@pytest.mark.parametrize("size", [1, 100_000])
async def test_unconfirmed_stream_begins_anew(
    client: AsyncClient, service: StreamingService, size: int
) -> None:
    """Under another ID: both may be executed, and chunks of two executions need not fit together."""
    stream = client.stream(MODEL, b"x" * size)
    (lost,) = await send_and_lose_the_reply(client, service, 1)
    (request,) = await take(service)
    await asyncio.to_thread(service.wait_for_withdrawal, lost.correlation_id)
    assert request.correlation_id != lost.correlation_id
    assert (request.correlation_id, request.body) == (stream.correlation_id, lost.body)
    assert len(service.stored_bodies()) == (2 if size > LARGE_BODY_BYTES else 0)  # the first may be deleted
    for index in range(3):
        service.write(lost, chunk(lost, index, b"lost"), chunk(request, index, b"%d" % index))
    service.write(lost, failure(lost, "CANCELLED", "withdrawn"), final(request, b"012", index=3))
    assert await collect(stream) == [b"0", b"1", b"2"]
    assert service.withdrawn == [lost.correlation_id]


async def test_unconfirmed_stream_with_chunks_continues(
    client: AsyncClient, service: StreamingService
) -> None:
    """Its chunk shows that Redis accepted it. Another of the same entry has none, and begins anew."""
    first, second = client.stream(MODEL, "x"), client.stream(MODEL, "y")
    await asyncio.sleep(0)
    accepted, lost = service.take(2)
    envelope = chunk(accepted, 0, pack("a"))
    client._packer.awaited.on_results(
        [b"results", pack([envelope])]
    )  # over the other connection, before the reply
    transport_of(client)._on_connection_lost(LinkError("lost"))
    (request,) = await take(service)
    assert request.body == pack("y")
    service.write(accepted, envelope, final(accepted, pack("a"), index=1))
    service.write(lost, chunk(request, 0, pack("b")), final(request, pack("b"), index=1))
    assert (await collect(first), await collect(second)) == (["a"], ["b"])
    await asyncio.to_thread(service.wait_for_withdrawal, lost.correlation_id)
    assert service.withdrawn == [lost.correlation_id]


async def test_unconfirmed_stream_with_an_id_of_its_own_fails(
    client: AsyncClient, service: StreamingService
) -> None:
    stream = client.stream(MODEL, "x", correlation_id="mine")
    await send_and_lose_the_reply(client, service, 1)
    with pytest.raises(UnavailableError, match="before Redis confirmed the request"):
        await anext(stream)
    await asyncio.to_thread(service.wait_for_withdrawal, "mine")
    assert service.read() == []


# --- in threads --------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_threads_iterate_over_chunks(blocking: Client, service: StreamingService) -> None:
    stream = blocking.stream(MODEL, "Once")
    (request,) = service.take()
    for index, text in enumerate(["Once", " upon"]):
        service.write(request, chunk(request, index, pack(text)))
        assert next(stream) == text
    service.write(request, final(request, pack("Once upon"), index=2, first_us=400))
    assert list(stream) == []
    assert stream.reply == ("Once upon", stream.correlation_id, 1, 5, 70, 400, "")


def test_each_thread_has_its_own_stream(
    blocking: Client, service: StreamingService, pool: ThreadPoolExecutor
) -> None:
    readers = [pool.submit(lambda name: list(blocking.stream(MODEL, name)), str(at)) for at in range(8)]
    requests = service.take(8)
    for index in range(20):
        service.write(requests[0], *(chunk(request, index, request.body) for request in requests))
    service.write(requests[0], *(final(request, request.body, index=20) for request in requests))
    assert [reader.result(EVENTUALLY_S) for reader in readers] == [[str(at)] * 20 for at in range(8)]


def test_error_in_mid_stream_reaches_the_thread(blocking: Client, service: StreamingService) -> None:
    stream = blocking.stream(MODEL, "x")
    (request,) = service.take()
    service.write(request, chunk(request, 0, pack("a")), failure(request, "INTERNAL", "it raised"))
    assert next(stream) == "a"
    with pytest.raises(InternalError, match="it raised"):
        next(stream)
    with pytest.raises(NotFoundError):
        next(blocking.stream("Poet", "x"))
    with pytest.raises(TypeError, match="no such option"):
        next(blocking.stream(MODEL, "x", prio=3))  # type: ignore[call-arg]


def test_leaving_a_loop_withdraws_the_request(
    blocking: Client, service: StreamingService, pool: ThreadPoolExecutor
) -> None:
    def read_one() -> None:
        for text in blocking.stream(MODEL, "x"):
            assert text == "a"
            break

    reader = pool.submit(read_one)
    (request,) = service.take()
    service.write(request, chunk(request, 0, pack("a")))
    reader.result(EVENTUALLY_S)
    service.wait_for_withdrawal(request.correlation_id)


def test_leaving_a_loop_withdraws_also_if_a_variable_holds_the_stream(
    blocking: Client, service: StreamingService
) -> None:
    stream = blocking.stream(MODEL, "x")
    (request,) = service.take()
    service.write(request, chunk(request, 0, pack("a")))
    for text in stream:
        assert text == "a"
        break
    service.wait_for_withdrawal(request.correlation_id)
    with pytest.raises(CancelledRequestError, match="a loop over this stream was left before its end"):
        next(stream)


def test_closing_a_stream_ends_it_for_a_thread_that_waits(
    blocking: Client, service: StreamingService, pool: ThreadPoolExecutor
) -> None:
    with blocking.stream(MODEL, "x") as stream:
        (request,) = service.take()
        readers = [pool.submit(list, stream) for _ in range(2)]
        service.write(request, chunk(request, 0, pack("a")))
    assert sorted(reader.result(EVENTUALLY_S) for reader in readers) in ([[], ["a"]], [[], []])
    service.wait_for_withdrawal(request.correlation_id)


def test_withdrawal_by_a_thread_is_sent_before_the_client_is_closed(
    server: EmbeddedRedis, service: StreamingService
) -> None:
    with Client(server.url) as client, client.stream(MODEL, "x") as stream:
        (request,) = service.take()
        service.write(request, chunk(request, 0, pack("a")))
        assert next(stream) == "a"
    service.wait_for_withdrawal(request.correlation_id)


def test_closing_the_client_ends_the_streams_of_threads(
    server: EmbeddedRedis, service: StreamingService, pool: ThreadPoolExecutor
) -> None:
    client = Client(server.url, timeout=EVENTUALLY_S)
    stream, dropped = client.stream(MODEL, "x"), client.stream(MODEL, "y")
    request, _ = service.take(2)
    service.write(request, chunk(request, 0, pack("a")))
    assert next(stream) == "a"
    reader = pool.submit(list, stream)
    client.close()
    with pytest.raises(UnavailableError, match="client was closed"):
        reader.result(EVENTUALLY_S)
    del dropped  # its event loop is closed
    with pytest.raises(UnavailableError, match="this client is closed"):
        client.stream(MODEL, "x")
