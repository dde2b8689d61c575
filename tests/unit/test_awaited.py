"""Results of a reply stream go to the requests that await them, whatever else is in the stream."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from carpool.client import sinks
from carpool.client.awaited import AwaitedRequests
from carpool.client.entries import Channel, OutgoingEntry
from carpool.client.envelopes import EnvelopeSink, EnvelopeStreamSink
from carpool.client.options import NO_FIELDS
from carpool.client.reading import ResultReader
from carpool.client.sinks import COLUMN_KEPT_BYTES_MAX, FutureSink, Reply, ReplySink, Sink, Window
from carpool.client.streams import AsyncStream, StreamTarget
from carpool.errors import InternalError
from carpool.keys import Keys
from carpool.messages.requests import JSON, MSGPACK
from carpool.messages.results import Chunk, Result, ResultColumns
from carpool.rows import Rows
from carpool.wire.results import encode_columns_map
from carpool.wire.tensors import WIDTHS, tensor_head

SERVED = {"final": True, "batch_size": 1, "queue_us": 1, "compute_us": 1}


def envelope(correlation_id: str, **other: Any) -> dict[str, Any]:
    ok = {"correlation_id": correlation_id, "status": "OK", "content_type": JSON, "body": b"7", **SERVED}
    return {name: value for name, value in {**ok, **other}.items() if value is not None}


def awaiting(*correlation_ids: str) -> tuple[AwaitedRequests, dict[str, asyncio.Future[Any]]]:
    def withdraw(correlation_id: str, target: object) -> None:
        awaited.remove(correlation_id, target)

    awaited, loop = AwaitedRequests(withdraw), asyncio.get_running_loop()
    futures = {}
    for correlation_id in correlation_ids:
        futures[correlation_id] = loop.create_future()
        add(awaited, FutureSink(ResultReader()), correlation_id, futures[correlation_id])
    return awaited, futures


def add(awaited: AwaitedRequests, sink: Sink, correlation_id: str, target: object) -> None:
    """Add a request in an entry of its own."""
    entry = OutgoingEntry(Channel(Keys("m"), b"replies", 100), JSON, None, sink)
    entry.add(correlation_id, target, NO_FIELDS, b"", b"1")
    awaited.entries[correlation_id] = entry


@pytest.mark.parametrize(
    "malformed",
    [
        None,
        7,
        {},
        {"correlation_id": 7},
        envelope("x", final=None),
        envelope("x", status=None),
        envelope("x", batch_size="1"),
        envelope("x", body=None),
        envelope("x", body=[1]),
        envelope("x", content_type=None),
        envelope("x", status="INTERNAL", detail=None),
        envelope("x", final=False),
    ],
)
async def test_a_malformed_result_concerns_only_itself(malformed: Any) -> None:
    awaited, futures = awaiting("a", "b")
    packed = msgpack.packb([envelope("a"), malformed, envelope("b")])
    assert awaited.on_results([b"results", packed]) is False
    assert (await futures["a"], await futures["b"]) == (7, 7)
    assert awaited.malformed_results == 1


@pytest.mark.parametrize("packed", [b"", b"\xc1", msgpack.packb({"a": 1}), msgpack.packb([1])[:1]])
async def test_a_field_that_is_no_array_concerns_only_itself(packed: bytes) -> None:
    awaited, futures = awaiting("a")
    good = msgpack.packb([envelope("a")])
    awaited.on_results([b"results", packed, b"columns", packed, b"other", b"", b"results", good])
    assert await futures["a"] == 7
    assert awaited.malformed_results == 2


async def test_malformed_columns_concern_only_themselves() -> None:
    awaited, futures = awaiting("a", "b")
    columns = encode_columns_map(ResultColumns(["a", "b"], JSON, Rows(b"", b"78", 1), 2, 1, 1))
    packed = b"\x92" + msgpack.packb({"correlation_ids": "a b", "rows": b"123"}) + columns
    awaited.on_results([b"columns", packed])
    assert (await futures["a"], await futures["b"]) == (7, 8)
    assert awaited.malformed_results == 1


@pytest.mark.parametrize("columns_kept_bytes", [COLUMN_KEPT_BYTES_MAX, 8])
@pytest.mark.parametrize("datatype", ["FP32", "BF16"])
@pytest.mark.parametrize("sink", [FutureSink(ResultReader()), ReplySink(ResultReader()), None])
async def test_results_may_be_written_to_alone_and_of_a_batch(
    sink: Any, datatype: str, columns_kept_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "COLUMN_KEPT_BYTES_MAX", columns_kept_bytes)
    for sizes in ([1], [3], [1, 1, 1], [2, 1]):  # of the entries that are in one batch
        awaited, loop = AwaitedRequests(lambda *_: None), asyncio.get_running_loop()
        targets: dict[str, Any] = {}
        windows: list[Window] = []
        for number, size in enumerate(sizes):
            windows.append(Window(ResultReader(), loop))
            of_entry = sink or windows[-1]
            entry = OutgoingEntry(Channel(Keys("m"), b"replies", 100), MSGPACK, None, of_entry)
            for name in (f"{number}-{at}" for at in range(size)):
                targets[name] = loop.create_future() if sink else windows[-1].reserve(1)[0]
                entry.add(name, targets[name], NO_FIELDS, b"", b"1")
                awaited.entries[name] = entry
        head, width = tensor_head(datatype, [2], 2 * WIDTHS[datatype]), 2 * WIDTHS[datatype]
        rows = Rows(head, bytes(width * len(targets)), width)
        columns = encode_columns_map(ResultColumns(list(targets), MSGPACK, rows, 2, 1, 1))
        alone = [envelope(name, content_type=MSGPACK, body=head + bytes(width)) for name in targets]
        packed = [b"results", msgpack.packb(alone)] if sizes == [1] else [b"columns", b"\x91" + columns]
        awaited.on_results(packed)
        if sink:
            found = [await target for target in targets.values()]
        else:
            found = [await window.take() for window in windows for _ in range(len(window))]
        arrays = [value.value if isinstance(value, Reply) else value for value in found]
        for number, array in enumerate(arrays):
            array[:] += number + 1
        assert [array.tolist() for array in arrays] == [[n + 1, n + 1] for n in range(len(targets))]


async def test_a_request_whose_result_is_malformed_fails_at_once() -> None:
    awaited, futures = awaiting("a", "b")
    awaited.on_results([b"results", msgpack.packb([envelope("a", compute_us=None), envelope("b")])])
    with pytest.raises(InternalError, match="its result is malformed: compute_us: must be int") as caught:
        await futures["a"]
    assert caught.value.correlation_id == "a"
    assert await futures["b"] == 7
    assert list(awaited.entries) == []


async def test_envelopes_reach_a_front_end_as_they_came() -> None:
    awaited, sink = AwaitedRequests(lambda *_: None), EnvelopeSink()
    futures = {name: asyncio.get_running_loop().create_future() for name in "abcd"}
    for name, future in futures.items():
        add(awaited, sink, name, future)
    refused = envelope("b", status="INVALID_ARGUMENT", detail="why", content_type=None, body=None)
    odd = envelope("a", content_type="text/odd", body=b" \xff", warnings=["odd"])
    columns = encode_columns_map(ResultColumns(["c", "x", "d"], JSON, Rows(b"[", b"7]8]9]", 2), 3, 4, 5))
    awaited.on_results([b"results", msgpack.packb([odd, refused]), b"columns", b"\x91" + columns])
    assert [await future for future in futures.values()] == [
        Result("a", "OK", "text/odd", b" \xff", None, 1, 1, 1, warnings=["odd"]),
        Result("b", "INVALID_ARGUMENT", JSON, None, "why", 1, 1, 1),
        Result("c", "OK", JSON, b"[7]", None, 3, 4, 5),
        Result("d", "OK", JSON, b"[9]", None, 3, 4, 5),
    ]
    assert (awaited.late_results, list(awaited.entries)) == (1, [])


def chunk(correlation_id: str, index: int, **other: Any) -> dict[str, Any]:
    chunk = {"correlation_id": correlation_id, "status": "OK", "content_type": JSON, "body": b"7"}
    return {**chunk, "final": False, "index": index, **other}


async def test_chunks_reach_a_front_end_as_they_came() -> None:
    unusable: list[str] = []
    awaited, sink = AwaitedRequests(lambda name, _: unusable.append(name)), EnvelopeStreamSink()
    targets = {name: StreamTarget(asyncio.Queue()) for name in "abc"}
    for name, target in targets.items():
        add(awaited, sink, name, target)
    failed = envelope("b", status="INTERNAL", detail="why", content_type=None, body=None)
    sent = [chunk("a", 0), chunk("a", 0), chunk("a", 1, chunks=3), chunk("a", 2, values=2), chunk("b", 0)]
    sent += [envelope("a", index=3, first_us=8), failed, chunk("c", 1)]
    assert awaited.on_results([b"results", msgpack.packb(sent)]) is True
    loop = asyncio.get_running_loop()
    streams = {name: AsyncStream(target, lambda _: None, loop) for name, target in targets.items()}
    assert [item async for item in streams["a"]] == [
        Chunk("a", JSON, b"7", 0),
        Chunk("a", JSON, b"7", 1, 3),
        Chunk("a", JSON, b"7", 2, 2, True),
    ]
    assert streams["a"].reply == Reply(Result("a", "OK", JSON, b"7", None, 1, 1, 1, 3, 8), "a", 1, 1, 1, 8)
    assert await anext(streams["b"]) == Chunk("b", JSON, b"7", 0)
    with pytest.raises(InternalError, match="INTERNAL: why"):
        await anext(streams["b"])
    with pytest.raises(InternalError, match="chunks 0 to 0 were not in the reply stream"):
        await anext(streams["c"])
    assert unusable == ["c"]
