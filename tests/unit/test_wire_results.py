"""Envelopes: what a producer reads is what a worker or a batcher wrote."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import INVALID_ARGUMENT, OK, InvalidArgumentError
from carpool.messages import CONTENT_TYPES, JSON, MSGPACK, RAW, Result
from carpool.wire.results import (
    MAX_DETAIL_CHARS,
    decode_results,
    encode_envelope,
    encode_result,
    encode_results,
)
from support.wire import names

fast = settings(deadline=None)

successes = st.builds(
    Result,
    names,
    st.just(OK),
    st.sampled_from([MSGPACK, RAW]),
    st.binary(max_size=20),
    st.none(),
    *[st.integers(0, 2**40)] * 3,
)
failures = st.builds(
    Result,
    names,
    st.sampled_from([INVALID_ARGUMENT, "INTERNAL", "ABORTED"]),
    st.sampled_from(CONTENT_TYPES),
    st.none(),
    st.none() | st.text(st.characters(), max_size=20),  # lone surrogates included
    *[st.just(0)] * 3,
)


def expected_envelope(result: Result) -> dict[str, Any]:
    body = {"content_type": result.content_type, "body": result.body}
    detail = {"detail": (result.detail or "").encode("utf-8", "replace").decode()}
    return {
        "correlation_id": result.correlation_id,
        "status": result.status,
        "final": True,
        **(body if result.status == OK else detail),
        **{name: getattr(result, name) for name in ("batch_size", "queue_us", "compute_us")},
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
