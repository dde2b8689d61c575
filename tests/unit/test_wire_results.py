"""Envelopes: what a producer reads is what a worker or a batcher wrote."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import INVALID_ARGUMENT, OK, InvalidArgumentError
from carpool.messages.requests import CONTENT_TYPES, JSON, MSGPACK, RAW
from carpool.messages.results import Chunk, Result, ResultColumns
from carpool.rows import Rows
from carpool.wire.results import (
    MAX_DETAIL_CHARS,
    decode_columns,
    decode_results,
    encode_chunk,
    encode_chunk_envelope,
    encode_columns,
    encode_envelope,
    encode_result,
    encode_results,
)
from support.wire_strategies import names

fast = settings(deadline=None)

versions = st.sampled_from(["", "2", "2025-03-01", "1.2:a_b+gpu"])
optional_numbers = st.none() | st.integers(0, 2**40)
successes = st.builds(
    Result,
    names,
    st.just(OK),
    st.sampled_from([MSGPACK, RAW]),
    st.binary(max_size=20),
    st.none(),
    *[st.integers(0, 2**40)] * 3,
    *[optional_numbers] * 2,
    st.lists(st.text(max_size=5), max_size=2),
    versions,
)
failures = st.builds(
    Result,
    names,
    st.sampled_from([INVALID_ARGUMENT, "INTERNAL", "ABORTED"]),
    st.sampled_from(CONTENT_TYPES),
    st.none(),
    st.none() | st.text(st.characters(), max_size=20),  # lone surrogates included
    *[st.just(0)] * 3,
    *[st.none()] * 2,
    st.lists(st.text(max_size=5), max_size=2),
    versions,
)


def expected_envelope(result: Result) -> dict[str, Any]:
    body: dict[str, Any] = {"content_type": result.content_type, "body": result.body}
    detail = {"detail": (result.detail or "").encode("utf-8", "replace").decode()}
    of_stream = {name: getattr(result, name) for name in ("index", "first_us")}
    body |= {name: value for name, value in of_stream.items() if value is not None}
    return {
        "correlation_id": result.correlation_id,
        "status": result.status,
        "final": True,
        **(body if result.status == OK else detail),
        **{name: getattr(result, name) for name in ("batch_size", "queue_us", "compute_us")},
        **({"warnings": result.warnings} if result.warnings else {}),
        **({"version": result.version} if result.version else {}),
    }


@fast
@given(successes | failures.filter(lambda result: result.content_type != JSON))
def test_msgpack_envelope_is_complete(result: Result) -> None:
    assert msgpack.unpackb(encode_result(result)) == expected_envelope(result)
    assert encode_envelope(result) == encode_result(result)


@fast
@given(st.lists(successes | failures, max_size=5))
@example([Result("a", "INTERNAL", JSON, detail="\ud800")])
def test_reply_streams_are_msgpack_whatever_the_content_type(results: list[Result]) -> None:
    assert decode_results(encode_results(results)) == list(map(expected_envelope, results))


@fast
@given(
    failures.map(lambda result: result._replace(content_type=JSON))
    | st.builds(
        lambda result, value: result._replace(content_type=JSON, body=json.dumps(value).encode()),
        successes,
        st.none() | st.integers() | st.text() | st.lists(st.integers()) | st.just({"body": None}),
    )
)
def test_json_envelope_is_complete(result: Result) -> None:
    expected = expected_envelope(result)
    if result.body is not None:
        expected["body"] = json.loads(result.body)
    assert json.loads(encode_result(result)) == expected


def test_detail_is_cut_at_its_limit() -> None:
    for content_type in (JSON, MSGPACK):
        result = Result("a", "INTERNAL", content_type, detail="ä" * 5000)
        (envelope,) = decode_results(encode_results([result]))
        assert envelope["detail"] == "ä" * MAX_DETAIL_CHARS


@pytest.mark.parametrize("value", [{}, None, 7, "a"])
def test_results_field_must_be_an_array(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="results: "):
        decode_results(msgpack.packb(value))


chunks = st.builds(
    Chunk,
    names,
    st.sampled_from([MSGPACK, RAW]),
    st.binary(max_size=20),
    st.integers(0, 2**40),
    st.integers(1, 9),
    st.booleans(),
)


def expected_chunk(chunk: Chunk) -> dict[str, Any]:
    return {
        "correlation_id": chunk.correlation_id,
        "status": OK,
        "content_type": chunk.content_type,
        "body": chunk.body,
        "final": False,
        "index": chunk.index,
        **({"values" if chunk.is_list else "chunks": chunk.merged} if chunk.merged > 1 else {}),
    }


@fast
@given(chunks)
def test_msgpack_envelope_of_a_chunk_is_complete(chunk: Chunk) -> None:
    assert msgpack.unpackb(encode_chunk(chunk)) == expected_chunk(chunk)
    in_json = chunk._replace(content_type=JSON, body=b"[7]")
    assert msgpack.unpackb(encode_chunk_envelope(in_json)) == expected_chunk(in_json)


@fast
@given(chunks, st.none() | st.text() | st.lists(st.integers()) | st.just({"body": None, "final": True}))
def test_json_envelope_of_a_chunk_is_complete(chunk: Chunk, value: Any) -> None:
    chunk = chunk._replace(content_type=JSON, body=json.dumps(value).encode())
    assert json.loads(encode_chunk(chunk)) == expected_chunk(chunk) | {"body": value}


# --- columns -----------------------------------------------------------------------------------------------

result_columns = st.integers(1, 4).flatmap(
    lambda count: st.builds(
        ResultColumns,
        st.lists(st.text("ab1.:", min_size=1, max_size=3), min_size=count, max_size=count),
        st.sampled_from(CONTENT_TYPES),
        st.builds(
            lambda head, rows: Rows(head, b"".join(rows), 2),
            st.binary(max_size=3),
            st.lists(st.binary(min_size=2, max_size=2), min_size=count, max_size=count),
        ),
        *[st.integers(0, 2**40)] * 3,
    )
)


@fast
@given(st.lists(result_columns, max_size=4))
def test_columns_are_read_as_they_were_written(columns: list[ResultColumns]) -> None:
    assert decode_columns(encode_columns(columns)) == columns


def test_columns_are_the_same_results_as_envelopes() -> None:
    columns = ResultColumns(["a", "b"], RAW, Rows(b"h", b"12", 1), 3, 1500, 70000)
    assert columns.results() == [
        Result("a", OK, RAW, b"h1", None, 3, 1500, 70000),
        Result("b", OK, RAW, b"h2", None, 3, 1500, 70000),
    ]


def test_rows_may_be_a_part_of_others() -> None:
    """A worker takes rows out of an array without copying them."""
    part = ResultColumns(["a"], RAW, Rows(b"", b"0123456789", 2).slice(1, 2), 1, 0, 0)
    (read,) = decode_columns(encode_columns([part]))
    assert read.results() == [Result("a", OK, RAW, b"23", None, 1, 0, 0)]


valid = {
    "correlation_ids": "a b", "status": OK, "content_type": RAW, "row_head": b"", "rows": b"12",
    "final": True, "batch_size": 1, "queue_us": 0, "compute_us": 0,
}  # fmt: skip
any_value = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3), st.binary(max_size=3),
    st.lists(st.integers(0, 5), max_size=2), st.dictionaries(st.text(max_size=2), st.none(), max_size=2),
)  # fmt: skip


@settings(deadline=None, max_examples=250)
@given(st.sampled_from(list(valid)), any_value, st.booleans())
def test_malformed_columns_are_an_error_that_is_expected(name: str, value: Any, is_missing: bool) -> None:
    raw = {key: item for key, item in valid.items() if key != name} | ({} if is_missing else {name: value})
    try:
        (columns,) = decode_columns(msgpack.packb([raw]))
    except InvalidArgumentError:
        return
    assert len(columns.rows) == len(columns.correlation_ids)
    assert all(type(result.body) is bytes for result in columns.results())
    assert columns.content_type in CONTENT_TYPES or name == "content_type"


@pytest.mark.parametrize(
    "packed", [b"", b"\xc1", b"\x80", b"\x91\x07", b"\x91\xc0", b"\x91\x80", b"\x91" * 5000]
)
def test_columns_field_must_be_an_array_of_maps(packed: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="columns: "):
        decode_columns(packed)
