"""Bodies into frames and outcomes into results: each request gets its own result, in its own content type."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import hypothesis.strategies as st
import msgpack
import numpy as np
import pytest
from hypothesis import given, settings

from carpool.messages.batches import Batch, BatchedRequest, BatchedRun
from carpool.messages.requests import CONTENT_TYPES, JSON, MSGPACK, RAW
from carpool.rows import Rows
from carpool.wire.bodies import decode_body, decode_result, encode_body
from carpool.wire.content_types import ACCEPT
from carpool.wire.tensors import TensorSpec, tensor_head
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from carpool_worker.model_process import frames
from carpool_worker.model_process.frames import OutcomeHeader
from carpool_worker.model_process.model import RequestInfo
from support.executions import (
    NOW_US,
    codec_of,
    echo,
    executed,
    execution_of,
    finish,
    positions,
    prepared,
    request_of,
)

X = TensorSpec("x", "FP32", (2,))
ANY = TensorSpec("x", "FP32", (-1,))


def served(codec: Codec, predict: Callable[..., Any], *requests: BatchedRequest) -> list[Any]:
    """What each producer gets: a decoded value, or the status and detail."""
    results = finish(codec, prepared(codec, *requests), predict)
    for request, result in zip(requests, results, strict=True):
        assert result.correlation_id == request.correlation_id
        assert result.content_type in {request.content_type, JSON}
    return [
        f"{result.status}: {result.detail}"
        if result.body is None
        else decode_body(result.content_type, result.body)
        for result in results
    ]


# --- models that take anything -----------------------------------------------------------------------------


def test_content_types_share_a_batch_and_each_result_has_its_requests_own() -> None:
    seen: list[Any] = []

    def predict(batch: list[Any]) -> list[Any]:
        seen.extend(batch)
        return [[body] for body in batch[:2]] + [b"raw result"]

    requests = [request_of({"a": [1, "é"]}), request_of([1.5, b"\xff"], MSGPACK), request_of(b"\x00raw", RAW)]
    codec = codec_of()
    execution = prepared(codec, *requests)
    assert positions(execution) == [[0, 1, 2]]
    results = finish(codec, execution, predict)
    assert seen == [{"a": [1, "é"]}, [1.5, b"\xff"], b"\x00raw"]
    assert json.loads(results[0].body or b"") == [{"a": [1, "é"]}]
    assert msgpack.unpackb(results[1].body or b"") == [[1.5, b"\xff"]]
    assert results[2].body == b"raw result"


def test_model_without_declared_tensors_gets_tensors_as_arrays() -> None:
    def predict(batch: list[Any]) -> list[Any]:
        return [{"sum": float(body["x"].sum()), "same": body["x"]} for body in batch]

    array = np.arange(4, dtype=np.float32).reshape(2, 2)
    for got in served(
        codec_of(), predict, request_of({"x": array}, MSGPACK), request_of({"x": array.astype("i1")})
    ):
        assert got["sum"] == 6
        np.testing.assert_array_equal(got["same"], array)


def test_result_contains_batch_size_queue_and_compute_time() -> None:
    codec = codec_of()
    execution = prepared(codec, request_of(1), request_of(2))
    header, payload = executed(codec, execution.frames[0], echo)
    codec.give_results(execution, execution.frames[0], header._replace(compute_us=1234), payload)
    assert execution.compute_us == 1234
    for result in execution.results.values():
        assert (result.status, result.detail) == ("OK", None)
        assert (result.batch_size, result.queue_us, result.compute_us) == (2, 3000, 1234)


def test_waiting_for_a_model_process_is_waiting() -> None:
    codec = codec_of()
    execution = prepared(codec, request_of(1))
    execution.ready_us = NOW_US
    execution.start_at(NOW_US + 500)
    finish(codec, execution, echo)
    assert execution.results[0].queue_us == 3500


def test_compute_time_accumulates_over_the_frames_of_an_execution() -> None:
    codec = codec_of(ANY)
    execution = prepared(codec, request_of([1]), request_of([1, 2]))
    for frame in execution.frames:
        header, payload = executed(codec, frame, echo)
        codec.give_results(execution, frame, header._replace(compute_us=100), payload)
    execution.separate()
    assert [execution.results[position].compute_us for position in (0, 1)] == [100, 200]


@pytest.mark.parametrize(("of_frames", "together"), [((1, 1), 2), ((1, 0), 0), ((0, 0), 0)])
def test_requests_were_executed_together_if_each_frame_was_executed_normally(
    of_frames: tuple[int, int], together: int
) -> None:
    codec = codec_of(ANY)
    execution = prepared(codec, request_of([1]), request_of([1, 2]))
    for frame, number in zip(execution.frames, of_frames, strict=True):
        header, payload = executed(codec, frame, echo)
        codec.give_results(execution, frame, header._replace(executed_together=number), payload)
    assert execution.executed_together == together
    execution.deaths[0] = 1  # from now on its requests are executed one at a time
    assert execution.executed_together == 0


def test_failed_request_gets_the_models_error_and_others_their_results() -> None:
    def predict(batch: list[int]) -> list[Any]:
        return [ValueError("odd") if number % 2 else number * 10 for number in batch]

    got = served(codec_of(), predict, *(request_of(number) for number in (2, 3, 4, 5)))
    odd = "INTERNAL: the model failed on this request: odd"
    assert got == [20, odd, 40, odd]


def test_undecodable_body_fails_its_request_alone() -> None:
    got = served(
        codec_of(),
        echo,
        request_of(b"{"),
        request_of(1),
        request_of(b"\xc1", MSGPACK),
        request_of(b'"\\ud800"'),
        request_of(b"1" * 30),
        request_of(2),
    )
    assert (got[1], got[5]) == (1, 2)
    details = {
        0: "body: not JSON",
        2: "body: not msgpack",
        3: "body: has a text with a lone surrogate",
        4: "body: contains an integer of more than 64 bits",
    }
    for position, detail in details.items():
        assert got[position].startswith("INVALID_ARGUMENT: ") and detail in got[position]


def test_batch_without_a_valid_request_has_no_frames() -> None:
    execution = prepared(codec_of(), request_of(b"{"), request_of(b"["))
    assert execution.frames == [] and execution.results.keys() == {0, 1}


# --- results that cannot be written ------------------------------------------------------------------------


def test_nan_in_a_json_result_fails_its_request_alone() -> None:
    nan = float("nan")
    got = served(codec_of(), lambda _: [1.5, nan, nan, {"x": [nan]}], *_of_types(JSON, JSON, MSGPACK, JSON))
    assert got[0] == 1.5 and np.isnan(got[2])
    for error in (got[1], got[3]):
        assert error.startswith("INTERNAL: the value cannot be written as application/json")


def test_nan_in_a_row_of_a_stacked_result_fails_its_request_alone() -> None:
    rows = np.array([[1, 2], [np.nan, 2], [np.inf, 0], [np.nan, 1]], np.float32)
    got = served(codec_of(outputs=[X]), lambda _: rows, *_of_types(JSON, JSON, JSON, MSGPACK))
    assert got[0].tolist() == [1, 2]
    assert got[1].startswith("INTERNAL: ") and got[2].startswith("INTERNAL: ")
    np.testing.assert_array_equal(got[3], [np.nan, 1])


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (object(), "the model's result cannot be sent: its type is object"),
        (2**64, "the model's result cannot be sent: it contains an integer of more than 64 bits"),
        ("\ud800", "surrogates not allowed"),
        (b"bytes", "JSON cannot hold bytes"),
        ({(1, 2): 3}, "the model's result cannot be encoded: a key in a dict is a tuple: use text"),
        (np.array([1j]), "dtype complex128 cannot be sent"),
    ],
)
def test_result_that_cannot_be_sent_fails_its_request_alone(value: Any, detail: str) -> None:
    got = served(codec_of(), lambda _: [1, value, [2, np.float32(0.5)]], *_of_types(JSON, JSON, JSON))
    assert (got[0], got[2]) == (1, [2, 0.5])
    assert got[1].startswith("INTERNAL: ") and detail in got[1]


@pytest.mark.parametrize("content_type", [RAW, "image/png", "text/plain"])
def test_only_bytes_have_a_type_of_bytes(content_type: str) -> None:
    """A text is a value, and so is an array, alone or stacked with others: its bytes have no shape."""
    results = [b"bytes", "cat", 3, ["x"], {"label": "cat"}, np.array([1, 2], "<i2")]
    got = served(codec_of(), lambda _: results, *_of_types(*[content_type] * 6))
    assert got[:5] == results[:5]
    assert got[5].tolist() == [1, 2]
    stacked = np.array([[1, 2, 5], [3, 4, 6]], "<i2")
    got = served(codec_of(), lambda _: stacked, *_of_types(content_type, content_type))
    assert [row.tolist() for row in got] == stacked.tolist()
    got = served(codec_of(), lambda _: np.array([7, 8]), *_of_types(content_type, content_type))
    assert got == [7, 8]


def test_arrays_are_bytes_where_octet_stream_is_the_bytes_of_tensors() -> None:
    codec = codec_of(TensorSpec("x", "INT16", (2,)))
    requests = [request_of(b"\1\0\2\0", RAW)] * 2
    assert served(codec, lambda batch: batch + 1, *requests) == [b"\2\0\3\0"] * 2
    assert served(codec, lambda batch: [batch[0], "odd"], *requests) == [b"\1\0\2\0", "odd"]


@pytest.mark.parametrize(
    ("accept", "value", "body"),
    [
        (RAW, np.array([1, 2], "<i2"), b"\1\0\2\0"),
        ("image/png", b"png", b"png"),
        ("text/plain", "é", "é".encode()),
        ("TEXT/csv; charset=utf-8", "a,b", b"a,b"),
        ("image/png", "cat", "INVALID_ARGUMENT: accept: image/png is bytes, but"),
        (RAW, "cat", "INVALID_ARGUMENT: accept: application/octet-stream is bytes, but"),
        ("image/png", np.array([1, 2], "<i2"), "INVALID_ARGUMENT: accept: image/png is bytes, but"),
    ],
)
def test_accepted_type_of_bytes_takes_what_has_such_bytes(accept: str, value: Any, body: Any) -> None:
    request = request_of(b"1", JSON, extra={ACCEPT: accept.encode()})
    (result,) = finish(codec_of(), prepared(codec_of(), request), lambda _: [value])
    got = result.body if result.body is not None else f"{result.status}: {result.detail}"
    assert got.startswith(body)


def _of_types(*content_types: str) -> list[BatchedRequest]:
    return [
        request_of(b"\x01" if content_type == MSGPACK else b"1", content_type)
        for content_type in content_types
    ]


@pytest.mark.parametrize("size_max", [1, 2, 3, 4, 5, None])
def test_no_frame_is_larger_than_the_model_takes(size_max: int | None) -> None:
    """Each request still gets its own result."""
    for codec in (codec_of(), codec_of(TensorSpec("x", "INT64", (-1,)))):
        bodies = [[7], [1, 2], [3], [5, 6], [9], [4]]  # of two shapes
        execution = execution_of(*map(request_of, bodies))
        codec.batch_size_max = size_max
        codec.prepare(execution, NOW_US)
        sizes = [len(frame.positions) for frame in execution.frames]
        assert max(sizes) <= (size_max or 6) and sum(sizes) == 6
        results = finish(codec, execution, lambda batch: [int(np.sum(body)) for body in batch])
        assert [json.loads(result.body or b"") for result in results] == [7, 3, 3, 11, 9, 4]


def test_rows_are_divided_as_single_requests_are() -> None:
    codec = codec_of(X)
    data = np.arange(10, dtype=np.float32)
    run = BatchedRun("1-0", list("abcde"), Rows(b"", data.tobytes(), 8), RAW, "me", NOW_US, None, None)
    execution = Execution(Batch("7-0", 1, [run], "full", NOW_US, ""))
    codec.batch_size_max = 2
    codec.prepare(execution, NOW_US)
    assert [len(frame.positions) for frame in execution.frames] == [2, 2, 1]
    results = finish(codec, execution, lambda batch: batch)
    assert b"".join(result.body or b"" for result in results) == data.tobytes()


# --- declared tensors --------------------------------------------------------------------------------------


def test_declared_tensor_in_any_encoding_is_stacked() -> None:
    row = np.array([1, 2], np.float32)
    requests = [
        request_of([1, 2]),
        request_of({"x": [1.0, 2.0]}),
        request_of(row),
        request_of({"datatype": "FP32", "shape": [2], "data": [1, 2]}),
        request_of(row, MSGPACK),
        request_of({"x": row}, MSGPACK),
        request_of([1, 2], MSGPACK),
        request_of(row.tobytes(), RAW),
    ]
    seen: list[Any] = []

    def predict(batch: Any) -> Any:
        seen.append(batch)
        return batch * 2

    codec = codec_of(X, outputs=[TensorSpec("y", "FP32", (2,))])
    results = finish(codec, prepared(codec, *requests), predict)
    (batch,) = seen
    assert batch.dtype == np.float32 and batch.tolist() == [[1, 2]] * 8
    # Each result has its request's content type: a tensor map in JSON or msgpack, or bytes
    doubled = row * 2
    assert json.loads(results[0].body or b"") == {"datatype": "FP32", "shape": [2], "data": [2, 4]}
    assert results[4].body == tensor_head("FP32", (2,), 8) + doubled.tobytes()
    assert results[4].body == encode_body(MSGPACK, doubled)
    assert results[7].body == doubled.tobytes()


def test_several_declared_tensors_are_each_stacked_and_passed_by_name() -> None:
    a, b = TensorSpec("a", "INT64", (2, 2)), TensorSpec("b", "FP16", ())
    rows = [np.arange(4).reshape(2, 2) + 10 * row for row in range(3)]
    requests = [
        request_of({"a": rows[0], "b": np.float16(0.5)}, MSGPACK),
        request_of({"b": 1.5, "a": rows[1].tolist()}),
        request_of({"a": rows[2], "b": np.array(2.5, np.float16)}, MSGPACK),
    ]
    seen: list[Any] = []

    def predict(batch: dict[str, Any]) -> Any:
        seen.append(batch)
        return {"sum": batch["a"].sum(axis=(1, 2)) + batch["b"], "a": batch["a"]}

    got = served(codec_of(a, b), predict, *requests)
    (batch,) = seen
    np.testing.assert_array_equal(batch["a"], rows)
    assert batch["a"].dtype == np.int64 and batch["b"].dtype == np.float16
    assert batch["b"].tolist() == [0.5, 1.5, 2.5]
    assert [result["sum"] for result in got] == [6.5, 47.5, 88.5]
    np.testing.assert_array_equal(got[2]["a"], rows[2])


def test_each_shape_gets_its_own_frame_and_each_request_its_own_result() -> None:
    lengths = [2, 3, 2, 1, 3, 2]
    requests = [
        request_of(np.full(length, at, np.float32), MSGPACK if at % 2 else JSON)
        for at, length in enumerate(lengths)
    ]
    codec = codec_of(ANY)
    execution = prepared(codec, *requests)
    assert positions(execution) == [[0, 2, 5], [1, 4], [3]]
    results = finish(codec, execution, lambda batch: batch * 10)
    for at, (length, result) in enumerate(zip(lengths, results, strict=True)):
        assert decode_body(result.content_type, result.body or b"").tolist() == [at * 10] * length


BOOLS = TensorSpec("x", "BOOL", (2,))
BOOL_HEAD = tensor_head("BOOL", [2], 2)
NO_BOOL = "INVALID_ARGUMENT: body.data: has a byte that is not BOOL: neither 0 nor 1"


def test_byte_that_is_no_bool_fails_its_request_alone() -> None:
    """Also where the first body of a batch is valid, and its head is remembered."""
    bodies = [request_of(BOOL_HEAD + data, MSGPACK) for data in (b"\0\1", b"\1\2", b"\1\1")]
    first, second, third = served(codec_of(BOOLS), echo, *bodies)
    assert (first.tolist(), second, third.tolist()) == ([False, True], NO_BOOL, [True, True])
    bodies = [request_of(data, RAW) for data in (b"\0\1", b"\xff\1")]
    assert served(codec_of(BOOLS), echo, *bodies) == [b"\0\1", NO_BOOL]


def test_byte_that_is_no_bool_in_a_model_that_takes_anything() -> None:
    (got,) = served(codec_of(), echo, request_of(BOOL_HEAD + b"\1\xff", MSGPACK))
    assert got == NO_BOOL


def test_frame_has_the_deadlines_of_its_requests() -> None:
    """For the model process, which takes it when it is idle, and executes the halves of a batch on which the
    model raised."""
    dated = [request_of([1])._replace(deadline_us=NOW_US + number) for number in (1, 2)]
    undated, alone = request_of([1]), request_of([1, 2])._replace(deadline_us=NOW_US + 3)
    execution = prepared(codec_of(ANY), dated[0], alone, undated, dated[1])
    deadlines = [(frame.positions, frame.header.deadlines) for frame in execution.frames]
    assert deadlines == [([0, 2, 3], [(1, NOW_US + 1), (1, None), (1, NOW_US + 2)]), ([1], [(1, NOW_US + 3)])]
    (frame,) = prepared(codec_of(ANY), undated, undated).frames
    assert frame.header.deadlines == ()


def test_failure_in_a_frame_is_mapped_to_its_position_in_the_batch() -> None:
    def predict(batch: Any) -> Any:
        return [ValueError("bad") if (row == 9).any() else len(row) for row in batch]

    bodies = [[1], [1, 2], [9], [1, 9], [3], [3, 4]]
    got = served(codec_of(ANY), predict, *map(request_of, bodies))
    bad = "INTERNAL: the model failed on this request: bad"
    assert got == [1, 2, bad, bad, 1, 2]


def test_empty_tensor_is_accepted() -> None:
    got = served(codec_of(ANY), echo, request_of([]), request_of(np.zeros(0, np.float32), MSGPACK))
    assert [tensor.shape for tensor in got] == [(0,), (0,)]


@pytest.mark.parametrize("datatype", ["FP64", "INT8", "BOOL", "UINT64", "BF16"])
def test_datatype_is_preserved_to_the_model_and_back(datatype: str) -> None:
    spec = TensorSpec("x", datatype, (2,))
    numbers = [True, False] if datatype == "BOOL" else [1, 0]
    got = served(codec_of(spec, outputs=[spec]), echo, request_of(numbers), request_of(numbers, MSGPACK))
    assert [tensor.tolist() for tensor in got] == [numbers, numbers]


@pytest.mark.parametrize(
    ("body", "content_type", "detail"),
    [
        ([1, 2, 3], JSON, "body.x.shape: [3], but this model takes [2]"),
        ([[1, 2]], JSON, "body.x.shape: [1, 2], but this model takes [2]"),
        (np.zeros(3, np.float32), MSGPACK, "body.x.shape: [3], but this model takes [2]"),
        (np.full(2, 1e39), MSGPACK, "body.x.data: a number is outside FP32's range"),
        ({"x": np.zeros(2, np.bool_)}, MSGPACK, "body.x.datatype: BOOL, but this model takes FP32"),
        (
            {"dtype": "FP32", "shape": [2], "data": [1, 2]},
            JSON,
            "body.x: must be a tensor, which is a map of datatype, shape and data, or a list; it is a map of "
            "data, dtype, shape",
        ),
        ([1, "two"], JSON, "body.x.data: "),
        ([[1], [2, 3]], JSON, "body.x.data: "),
        ([1, None], JSON, "body.x.data: "),
        ({"y": [1, 2]}, JSON, "body.x: must be a tensor"),
        ({}, MSGPACK, "body"),
        (None, MSGPACK, "body"),
        ({"datatype": "FP32", "shape": [3], "data": [1, 2]}, JSON, "body.data: "),
        ({"datatype": "FP31", "shape": [2], "data": [1, 2]}, JSON, "body.datatype: "),
        ({"datatype": "FP32", "shape": "2", "data": b""}, MSGPACK, "body.shape: "),
        ({"datatype": "FP32", "shape": [2], "data": b"1234567"}, MSGPACK, "body.data: 7 bytes"),
        (b"1234567", RAW, "body: 7 bytes, but the tensor 'x' takes 8"),
        (b"", JSON, "body: not JSON"),
    ],
)
def test_undeclared_tensor_is_rejected_alone_with_the_field_named(
    body: Any, content_type: str, detail: str
) -> None:
    got = served(codec_of(X), echo, request_of([1, 2]), request_of(body, content_type), request_of([3, 4]))
    assert [tensor.tolist() for tensor in (got[0], got[2])] == [[1, 2], [3, 4]]
    assert got[1].startswith(f"INVALID_ARGUMENT: {detail}")


@pytest.mark.parametrize("body", [{"a": 1}, {"a": 1, "b": 2, "c": 3}, {}, [1, 2], 1, None])
def test_several_declared_tensors_must_all_be_named(body: Any) -> None:
    codec = codec_of(TensorSpec("a", "INT8", ()), TensorSpec("b", "INT8", ()))
    got = served(codec, lambda batch: batch["a"], request_of(body), request_of({"a": 1, "b": 2}))
    given = f"a map of {', '.join(body) or 'nothing'}" if isinstance(body, dict) else "no map"
    assert got == [f"INVALID_ARGUMENT: body: must be a map with exactly the tensors a, b; it is {given}", 1]


@pytest.mark.parametrize(
    ("declared", "dtype", "numbers"),
    [
        ("FP32", np.float64, [0.1, -2.5]),
        ("FP32", np.float16, [0.5, -2.5]),
        ("FP32", np.int64, [7, -(2**40)]),
        ("FP64", np.float32, [0.5, 1.5]),
        ("BF16", np.float64, [0.5, 1.5]),
        ("INT32", np.int64, [7, -7]),
        ("UINT8", np.int64, [0, 255]),
    ],
)
def test_array_is_converted_where_a_list_is(declared: str, dtype: Any, numbers: list[Any]) -> None:
    spec = TensorSpec("x", declared, (2,))
    as_list, as_array = served(
        codec_of(spec), echo, request_of(numbers, MSGPACK), request_of(np.array(numbers, dtype), MSGPACK)
    )
    assert as_array.dtype == as_list.dtype
    assert as_array.tolist() == as_list.tolist()


@pytest.mark.parametrize(
    ("declared", "dtype", "number"),
    [
        ("INT32", np.float64, 1.0),
        ("INT32", np.int64, 2**31),
        ("UINT8", np.int64, -1),
        ("FP16", np.int64, 1 << 40),
    ],
)
def test_array_is_refused_where_a_list_is(declared: str, dtype: Any, number: Any) -> None:
    spec = TensorSpec("x", declared, (1,))
    refused = served(
        codec_of(spec), echo, request_of([number], MSGPACK), request_of(np.array([number], dtype), MSGPACK)
    )
    assert all(of.startswith("INVALID_ARGUMENT: body.x.data") for of in refused[:1]), refused
    assert refused[1].startswith("INVALID_ARGUMENT: body.x.dat"), refused


@pytest.mark.parametrize("specs", [[ANY], [X, TensorSpec("y", "FP32", (2,))]])
def test_octet_stream_is_rejected_without_one_tensor_of_fixed_shape(specs: list[TensorSpec]) -> None:
    (result,) = prepared(codec_of(*specs), request_of(b"12345678", RAW)).results.values()
    assert (result.status, result.detail) == (
        "INVALID_ARGUMENT",
        "content_type: this model's tensors need application/msgpack or application/json",
    )


def test_body_recognised_by_its_head_is_decoded_like_any_other() -> None:
    rng = np.random.default_rng(7)
    bodies = [
        request_of(rng.random(length).astype(dtype), MSGPACK)
        for length in (2, 2, 300, 2, 300, 70_000, 2)
        for dtype in (np.float32, np.float64, np.bool_)  # as declared, converted, and refused
    ]
    unordered = {"data": np.ones(2, np.float32).tobytes(), "shape": [2], "datatype": "FP32"}
    bodies += [request_of(unordered, MSGPACK), bodies[0], request_of(unordered, MSGPACK)]
    together = prepared(codec_of(ANY), *bodies)
    for position, body in enumerate(bodies):
        alone = prepared(codec_of(ANY), body)
        if alone.frames:
            (frame,) = (frame for frame in together.frames if position in frame.positions)
            row = frames.unstack(
                frame.header.layouts, len(frame.positions), bytearray(b"".join(frame.payload))
            )
            assert type(body.body) is bytes
            np.testing.assert_array_equal(
                row["x"][frame.positions.index(position)],
                decode_body(MSGPACK, body.body).astype(np.float32),
            )
        else:
            assert together.results[position].detail == alone.results[0].detail


def test_stacked_scalar_is_a_tensor_in_msgpack_and_a_number_in_json() -> None:
    codec = codec_of(outputs=[TensorSpec("score", "FP32", ())])
    scores = np.array([0.5, 0.25, 1.5], np.float64)
    results = finish(codec, prepared(codec, *_of_types(JSON, MSGPACK, RAW)), lambda _: scores)
    assert results[0].body == b"0.5"
    assert results[1].body == encode_body(MSGPACK, np.array(0.25, np.float32))
    assert results[2].body == np.float32(1.5).tobytes()


def test_result_has_the_same_form_whether_or_not_another_request_failed() -> None:
    codec = codec_of(X, outputs=[TensorSpec("score", "FP32", ())])

    def predict(batch: Any) -> Any:
        if (batch < 0).any():
            raise ValueError("negative")
        return batch.sum(axis=1, dtype=np.float64)

    good = [request_of(np.array([1, number], np.float32), MSGPACK) for number in range(4)]
    bad = request_of(np.array([-1, 0], np.float32), MSGPACK)
    alone = finish(codec, prepared(codec, *good), predict)
    mixed = finish(codec, prepared(codec, *good[:1], bad, *good[1:]), predict)
    assert mixed.pop(1).status == "INTERNAL"
    assert [result.body for result in mixed] == [result.body for result in alone]


def test_several_stacked_outputs_in_every_content_type() -> None:
    outputs = {"y": np.array([[1, 2], [3, 4], [5, 6]], np.int32), "n": np.array([7, 8, 9])}
    got = served(codec_of(), lambda _: outputs, *_of_types(JSON, MSGPACK, RAW))
    for at in (0, 1):
        assert got[at]["y"].dtype == np.int32
        assert (got[at]["y"].tolist(), got[at]["n"]) == (outputs["y"][at].tolist(), 7 + at)
    assert (got[2]["y"].tolist(), got[2]["n"]) == ([5, 6], 9)


def test_failed_row_of_a_stacked_batch_and_results_of_the_others() -> None:
    def predict(batch: Any) -> Any:
        if (batch == 3).any():
            raise ValueError("three")
        return batch * 2

    got = served(codec_of(X), predict, *(request_of([number, 0]) for number in range(5)))
    assert got.pop(3) == "INTERNAL: the model failed on this request: three"
    assert [tensor.tolist() for tensor in got] == [[0, 0], [2, 0], [4, 0], [8, 0]]


# --- string tensors ----------------------------------------------------------------------------------------


def seen_strings(spec: TensorSpec, *requests: BatchedRequest) -> list[Any]:
    seen: list[Any] = []

    def predict(batch: Any) -> list[Any]:
        assert batch.dtype == object
        seen.extend(batch.tolist())
        return [None] * len(batch)

    codec = codec_of(spec)
    finish(codec, prepared(codec, *requests), predict)
    return seen


def test_declared_strings_are_stacked_as_objects() -> None:
    strings = ["a\0", "é" * 500]
    as_map = {"datatype": "BYTES", "shape": [2], "data": strings}
    for content_type in (JSON, MSGPACK):
        requests = [request_of(body, content_type) for body in (strings, {"x": strings}, as_map)]
        assert seen_strings(TensorSpec("x", "BYTES", (2,), text=True), *requests) == [strings] * 3


def test_declared_strings_of_any_shape() -> None:
    assert seen_strings(
        TensorSpec("x", "BYTES", (), text=True), request_of("cat"), request_of(np.array("dog"))
    ) == [
        "cat",
        "dog",
    ]
    no_rows = np.empty((0, 3), "U1")
    assert seen_strings(TensorSpec("x", "BYTES", (-1, 3), text=True), request_of(no_rows, MSGPACK)) == [[]]
    assert seen_strings(
        TensorSpec("x", "BYTES", (1,), text=True), request_of(np.array(["é".encode()]), MSGPACK)
    ) == [["é"]]
    flat = {"datatype": "BYTES", "shape": [2, 2], "data": ["a", "b", "c", "d"]}
    nested = [["a", "b"], ["c", "d"]]
    for shape in ((2, 2), (-1, 2), (2, -1)):
        assert (
            seen_strings(TensorSpec("x", "BYTES", shape, text=True), request_of(flat), request_of(nested))
            == [nested] * 2
        )
    assert seen_strings(TensorSpec("x", "BYTES", (-1, -1), text=True), request_of(nested)) == [nested]


@pytest.mark.parametrize("datatype", ["BYTES", "FP32"])
@pytest.mark.parametrize(
    ("sent", "declared"),
    [((3,), (2, 2)), ((4,), (2, 2)), ((4,), (-1, 2)), ((3,), (-1, -1)), ((3,), (-1, 0)), ((1,), ()),
     ((2, 3), (3, 2)), ((1, 6, 1), (3, 2)), ((2, 2), (4,)), ((2, 2), (-1,)), ((), (1,)), ((0, 3), (0, 2))],
)  # fmt: skip
def test_another_shape_than_the_declared_one_is_refused(
    datatype: str, sent: tuple[int, ...], declared: tuple[int, ...]
) -> None:
    """Given as many elements as declared in another shape, as a list, as the map of a tensor and as an array,
    expect none of them to be rearranged."""
    size = math.prod(sent)
    elements: list[Any] = [str(number) if datatype == "BYTES" else float(number) for number in range(size)]
    array = np.array(elements, object if datatype == "BYTES" else np.float32).reshape(sent)
    bodies = [request_of(array, MSGPACK)]
    bodies.append(request_of({"datatype": datatype, "shape": list(sent), "data": elements}))
    if size:
        bodies.append(request_of(array.tolist()))
    results = prepared(codec_of(TensorSpec("x", datatype, declared)), *bodies).results
    wanted = f"body.x.shape: {list(sent)}, but this model takes {list(declared)}"
    assert {result.detail for result in results.values()} == {wanted} and len(results) == len(bodies)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (["a", "b", "c"], "body.x.shape: [3], but this model takes [2, -1]"),
        ([["a", "b", "c"]], "body.x.shape: [1, 3], but this model takes [2, -1]"),
        ([["a"], ["b", "c"]], "body.x.data: BYTES takes strings only"),
        ([["a"], [1]], "body.x.data: BYTES takes strings only"),
        ([["a"], [None]], "body.x.data: BYTES takes strings only"),
        (np.ones((2, 1)), "body.x.data: BYTES takes strings only"),
        ("ab", "body.x.shape: [], but this model takes [2, -1]"),
        ([["\ud800"], ["a"]], "body: has a text with a lone surrogate"),
        ({"datatype": "BYTES", "shape": [3], "data": ["a", "b"]}, "body.data: 2 strings, but shape is [3]"),
    ],
)
def test_invalid_strings_are_rejected_alone(body: Any, detail: str) -> None:
    codec = codec_of(TensorSpec("x", "BYTES", (2, -1), text=True))
    raw = json.dumps(body).encode() if isinstance(body, list) else body
    execution = prepared(codec, request_of(raw), request_of([["a"], ["b"]]), request_of(b"ab", RAW))
    assert positions(execution) == [[1]]
    assert execution.results[0].status == "INVALID_ARGUMENT" and detail in (execution.results[0].detail or "")
    assert "application/msgpack" in (execution.results[2].detail or "")


def test_bytes_that_are_no_text_are_refused_where_texts_are_declared() -> None:
    body = request_of(np.array([b"\xff"]), MSGPACK)
    (result,) = prepared(codec_of(TensorSpec("x", "BYTES", (1,), text=True)), body).results.values()
    assert result.detail == "body.x.data: BYTES takes strings only: the bytes b'\\xff' are no text in UTF-8"


ANY_BYTES: Final = [bytes(range(256)), b"", b"a\0", "é".encode()]


def test_elements_of_bytes_reach_a_model_as_bytes() -> None:
    """Given bytes of any value, and texts in JSON and msgpack, expect bytes objects of all of them."""
    spec = TensorSpec("x", "BYTES", (4,))
    as_map = {"datatype": "BYTES", "shape": [4], "data": ANY_BYTES}
    texts = ["", "a", "é", "\0"]
    requests = [request_of(body, MSGPACK) for body in (ANY_BYTES, as_map, np.array(ANY_BYTES, object))]
    requests += [
        request_of(texts),
        request_of(texts, MSGPACK),
        request_of({"x": ["a", b"\xff", "", b""]}, MSGPACK),
    ]
    in_utf_8 = [text.encode() for text in texts]
    assert seen_strings(spec, *requests) == [*[ANY_BYTES] * 3, in_utf_8, in_utf_8, [b"a", b"\xff", b"", b""]]
    (result,) = prepared(codec_of(spec), request_of([["a", 1, "b", "c"]], MSGPACK)).results.values()
    assert result.detail == "body.x.data: BYTES takes strings and bytes only: int is neither text nor bytes"


@pytest.mark.parametrize("content_type", [RAW, "image/png"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_body_of_bytes_is_the_only_element(shape: tuple[int, ...], content_type: str) -> None:
    element: Any = ANY_BYTES[0]
    for _ in shape:
        element = [element]
    spec = TensorSpec("x", "BYTES", shape)
    assert seen_strings(spec, request_of(ANY_BYTES[0], content_type)) == [element]
    for other in (TensorSpec("x", "BYTES", (2,)), TensorSpec("x", "BYTES", (-1,))):
        (result,) = prepared(codec_of(other), request_of(b"ab", content_type)).results.values()
        assert "application/msgpack" in (result.detail or "")


@pytest.mark.parametrize("shape", [(), (2,)])
def test_bytes_that_a_model_returns_are_texts_in_json_alone(shape: tuple[int, ...]) -> None:
    rows = [b"cat", b"\xff"] if not shape else [[b"cat", b""], [b"\xff", b"x"]]
    codec = codec_of(outputs=[TensorSpec("y", "BYTES", shape)])
    results = finish(codec, prepared(codec, *_of_types(MSGPACK, MSGPACK)), lambda _: rows)
    got = [decode_result(MSGPACK, result.body or b"") for result in results]
    assert got == rows
    in_json, wrong = finish(codec, prepared(codec, *_of_types(JSON, JSON)), lambda _: rows)
    text = json.loads(in_json.body or b"")
    assert text == ({"datatype": "BYTES", "shape": [2], "data": ["cat", ""]} if shape else "cat")
    assert wrong.status == "INTERNAL" and "ask for application/msgpack" in (wrong.detail or "")


def test_strings_beside_numbers_in_frames_of_each_shape() -> None:
    codec = codec_of(TensorSpec("text", "BYTES", (-1,), text=True), TensorSpec("weight", "FP32", ()))
    requests = [
        request_of({"text": ["a", "b"], "weight": 1}),
        request_of({"text": ["c"], "weight": 2}),
        request_of({"text": ["d", "e"], "weight": 3}, MSGPACK),
    ]
    execution = prepared(codec, *requests)
    assert positions(execution) == [[0, 2], [1]]

    def predict(batch: dict[str, Any]) -> list[Any]:
        return [
            " ".join(texts) + f" {weight:g}"
            for texts, weight in zip(batch["text"], batch["weight"], strict=True)
        ]

    bodies = [
        decode_body(result.content_type, result.body or b"") for result in finish(codec, execution, predict)
    ]
    assert bodies == ["a b 1", "c 2", "d e 3"]


@pytest.mark.parametrize("dtype", ["<U5", object])
def test_string_outputs_in_every_content_type(dtype: Any) -> None:
    labels = np.array([["cat", "dog"], ["x", ""], ["y", "z"]]).astype(dtype)
    codec = codec_of(outputs=[TensorSpec("label", "BYTES", (2,))])
    results = finish(codec, prepared(codec, *_of_types(JSON, MSGPACK, RAW)), lambda _: labels)
    expected = {"datatype": "BYTES", "shape": [2], "data": ["cat", "dog"]}
    assert json.loads(results[0].body or b"") == expected
    assert msgpack.unpackb(results[1].body or b"") == expected | {"data": ["x", ""]}
    assert (results[2].status, results[2].content_type) == ("OK", JSON)


def test_strings_among_several_outputs() -> None:
    outputs = [TensorSpec("label", "BYTES", ()), TensorSpec("score", "FP32", (2,))]

    def predict(_: Any) -> Any:
        return {"label": np.array(["cat", "dog"]), "score": np.array([[0.5, 0], [1, 0]], np.float32)}

    got = served(codec_of(outputs=outputs), predict, *_of_types(JSON, MSGPACK))
    assert [(result["label"], result["score"].tolist()) for result in got] == [
        ("cat", [0.5, 0]),
        ("dog", [1, 0]),
    ]


# --- models that ask for request fields --------------------------------------------------------------------


def test_model_that_asks_gets_the_fields_of_each_request() -> None:
    codec = codec_of(ANY, wants_requests=True)
    requests = [
        request_of([1], extra={"trace": b"\x00t"}),
        request_of([1, 2]),
        request_of([3], extra={"user": b"u"}),
    ]
    seen: dict[float, RequestInfo] = {}

    def predict(batch: Any, infos: Sequence[RequestInfo]) -> Any:
        seen.update(zip((float(row[0]) * 10 + len(row) for row in batch), infos, strict=True))
        return batch

    finish(codec, prepared(codec, *requests), predict)
    ids, arrival_s = [request.correlation_id for request in requests], requests[0].arrival_us / 1e6
    assert seen == {
        11: RequestInfo(ids[0], "lane", {"trace": b"\x00t"}, arrival_s=arrival_s),
        12: RequestInfo(ids[1], "lane", {}, arrival_s=arrival_s),
        31: RequestInfo(ids[2], "lane", {"user": b"u"}, arrival_s=arrival_s),
    }


def test_no_request_has_arrived_in_the_future() -> None:
    """Given a worker that takes Redis's time for 5 ms less than it is, expect that a request which arrived
    just now did not arrive later than now."""
    codec = codec_of(ANY, wants_requests=True)
    execution = prepared(codec, request_of([1]))
    ahead_us = time.time_ns() // 1000 - (execution.batch.runs[0].arrival_us - 5000)
    arrival_s = RequestInfo(*codec.request_fields(execution, 0, ahead_us)).arrival_s
    assert time.time() - 60 < arrival_s <= time.time()


def test_model_that_does_not_ask_gets_no_request_fields() -> None:
    (frame,) = prepared(codec_of(), request_of(1, extra={"trace": b"t"})).frames
    assert frame.header.requests == []


# --- requests that are not executed ------------------------------------------------------------------------


def test_expired_request_is_not_executed() -> None:
    execution = prepared(
        codec_of(),
        request_of(0, deadline_us=NOW_US),
        request_of(1, deadline_us=NOW_US + 1),
        request_of(2),
        request_of(b"{", deadline_us=NOW_US - 1),
    )
    assert positions(execution) == [[1, 2]]
    for position in (0, 3):
        assert execution.results[position].status == "DEADLINE_EXCEEDED"
        assert (
            execution.results[position].detail
            == "expired: its deadline passed before a worker had decoded it"
        )
    assert (execution.results[0].batch_size, execution.results[0].queue_us) == (0, 3000)


def test_request_answered_before_is_not_executed_again() -> None:
    execution = prepared(
        codec_of(), request_of(b"{"), request_of(1), request_of(2), answered_before=frozenset({0, 2}), epoch=2
    )
    assert positions(execution) == [[1]] and not execution.results


def test_redelivered_batch_is_executed_one_request_at_a_time() -> None:
    execution = prepared(codec_of(), *(request_of(number) for number in range(3)), epoch=2)
    assert execution.is_suspect
    assert positions(execution) == [[0], [1], [2]]
    assert [result.body for result in finish(codec_of(), execution, echo)] == [b"0", b"1", b"2"]


def test_first_delivery_is_not_suspect() -> None:
    assert not prepared(codec_of(), request_of(1)).is_suspect


# --- invalid outcomes --------------------------------------------------------------------------------------


def test_outcome_of_another_frame_is_an_error() -> None:
    codec = codec_of(ANY)
    execution = prepared(codec, request_of([1]), request_of([1, 2]))
    outcome = executed(codec, execution.frames[1], echo)
    with pytest.raises(RuntimeError, match="another frame"):
        codec.give_results(execution, execution.frames[0], *outcome)
    assert not execution.results


def test_outcome_with_a_wrong_number_of_results_is_an_error() -> None:
    codec = codec_of()
    execution = prepared(codec, request_of(1), request_of(2))
    header = OutcomeHeader(first=0, size=2, number=1, compute_us=0, failures={})
    with pytest.raises(RuntimeError, match="1 results for 2 requests"):
        codec.give_results(execution, execution.frames[0], header, bytearray(frames.pack_values([1])))


# --- the limit of a result ---------------------------------------------------------------------------------


def limited(
    codec: Codec, bytes_max: int, predict: Callable[..., Any], *requests: BatchedRequest
) -> list[str]:
    """The status of each result, and the sentence with the limit where there is one."""
    execution = execution_of(*requests)
    execution.batch.max_result_bytes = bytes_max
    codec.prepare(execution, NOW_US)
    results = finish(codec, execution, predict)
    over = frames.too_large(bytes_max)
    assert (execution.error == over[1]) == any(result.status != "OK" for result in results)
    return ["too large" if (result.status, result.detail) == over else result.status for result in results]


def test_result_over_the_limit_fails_alone() -> None:
    """Packed, a short text has a byte more."""
    requests = [request_of(size, MSGPACK) for size in (7, 8, 6, 1000)]
    results = limited(codec_of(), 8, lambda batch: [size * "x" for size in batch], *requests)
    assert results == ["OK", "too large", "OK", "too large"]


def test_results_that_are_too_large_only_together_are_results() -> None:
    requests = [request_of(size, MSGPACK) for size in (7, 6, 5)]
    assert limited(codec_of(), 8, lambda batch: [size * "x" for size in batch], *requests) == ["OK"] * 3


def test_result_larger_in_its_content_type_fails_alone() -> None:
    """Packed it has 4 bytes; as JSON each character has 6."""
    requests = [request_of("\0\0\0"), request_of("\0\0\0", MSGPACK), request_of("abc")]
    assert limited(codec_of(), 8, lambda batch: batch, *requests) == ["too large", "OK", "OK"]


@pytest.mark.parametrize(
    ("content_type", "bytes_max", "expected"),
    [
        (RAW, 800, "OK"),
        (RAW, 799, "too large"),
        (MSGPACK, 800, "too large"),  # with its head
        (MSGPACK, 900, "OK"),
        (JSON, 800, "too large"),
        (JSON, 1100, "OK"),
    ],
)
def test_rows_over_the_limit_fail(content_type: str, bytes_max: int, expected: str) -> None:
    body = np.zeros(2, np.float32)
    requests = [request_of(body.tobytes() if content_type == RAW else body, content_type) for _ in range(2)]
    results = limited(
        codec_of(X), bytes_max, lambda batch: np.zeros((len(batch), 200), np.float32), *requests
    )
    assert results == [expected] * 2


def test_model_process_does_not_send_what_is_too_large() -> None:
    execution = execution_of(request_of(1), request_of(1000))
    execution.batch.max_result_bytes = 8
    codec = codec_of()
    codec.prepare(execution, NOW_US)
    header, payload = executed(codec, execution.frames[0], lambda batch: [size * "x" for size in batch])
    assert {index: tuple(failure) for index, failure in header.failures.items()} == {1: frames.too_large(8)}
    assert ([*header.errors], bytes(payload)) == ([frames.too_large(8)[1]], frames.pack_values(["x"]))


def test_rows_over_the_limit_fail_beside_one_that_fails_for_another_reason() -> None:
    """In the model process, which sends none of them. The other's failure is its own."""

    def predict(batch: Any) -> Any:
        if batch.any():
            raise ValueError("unlucky")
        return np.zeros((len(batch), 200), np.float32)

    requests = [request_of(np.full(2, value, np.float32), MSGPACK) for value in (0, 1, 0)]
    execution = execution_of(*requests)
    execution.batch.max_result_bytes = 799
    codec = codec_of(X)
    codec.prepare(execution, NOW_US)
    header, payload = executed(codec, execution.frames[0], predict)
    assert [tuple(header.failures[index]) for index in (0, 2)] == [frames.too_large(799)] * 2
    assert header.failures[1][0] == "INTERNAL" and "unlucky" in header.failures[1][1]
    assert len(payload) < 10


# --- arbitrary bodies --------------------------------------------------------------------------------------

wide_integers = st.integers(-(2**63), 2**64 - 1)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(("x", "y", "datatype", "shape", "data")), inner, max_size=3)
    ),
    max_leaves=12,
)
tensor_maps = st.fixed_dictionaries(
    {
        "datatype": st.sampled_from(("FP32", "INT8", "BYTES", "BF16", "FP31", None)),
        "shape": st.lists(st.integers(-1, 3), max_size=3) | st.none(),
        "data": st.binary(max_size=16) | st.lists(wide_integers | st.floats() | st.text(), max_size=4),
    }
)
any_bodies = st.one_of(
    st.tuples(st.binary(max_size=30), st.sampled_from(CONTENT_TYPES)),
    st.tuples(json_values.map(lambda value: json.dumps(value).encode()), st.just(JSON)),
    st.tuples(
        (tensor_maps | st.fixed_dictionaries({"x": tensor_maps, "y": tensor_maps})).map(msgpack.packb),
        st.just(MSGPACK),
    ),
)


@given(
    specs=st.sampled_from(
        (
            (),
            (X,),
            (ANY,),
            (TensorSpec("x", "BYTES", (-1,)),),
            (TensorSpec("x", "INT8", (-1, 2)), TensorSpec("y", "BYTES", ())),
        )
    ),
    bodies=st.lists(any_bodies, min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_any_body_is_either_rejected_or_executed(
    specs: tuple[TensorSpec, ...], bodies: list[tuple[bytes, str]]
) -> None:
    codec = codec_of(*specs)
    execution = prepared(codec, *(request_of(body, content_type) for body, content_type in bodies))
    rejected = sorted(execution.results)
    assert {execution.results[position].status for position in rejected} <= {"INVALID_ARGUMENT"}
    sent = [position for frame in execution.frames for position in frame.positions]
    assert sorted(sent + rejected) == list(range(len(bodies)))
    counted: list[int] = []

    def predict(batch: Any) -> list[Any]:
        items = next(iter(batch.values())) if isinstance(batch, dict) else batch
        counted.append(len(items))
        return ["done"] * len(items)

    finish(codec, execution, predict)
    assert sum(counted) == len(sent)
    assert all(execution.results[position].body is not None for position in sent)
