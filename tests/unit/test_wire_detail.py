"""Details of models: decoded as they were encoded, and bounded, whatever producers name their lanes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.wire.detail import (
    DETAIL_BYTES_MAX,
    BatchDetail,
    ErrorDetail,
    LaneDetail,
    LearnedPoint,
    ModelDetail,
    PriorityDetail,
    ProcessDetail,
    TenantDetail,
    clipped,
)
from carpool.wire.report import SequencesReport

counts = st.integers(0, 1 << 53)
seconds = st.none() | st.floats(0, 1e9)
quantiles = st.none() | st.tuples(counts, counts)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
details = st.builds(
    ModelDetail,
    batcher=texts,
    at_us=counts,
    over_us=counts,
    arrivals_over_us=counts,
    arrived=counts,
    lanes=st.lists(
        st.builds(LaneDetail, texts, texts, counts, seconds, counts, counts, quantiles, quantiles), max_size=2
    ).map(tuple),
    tenants=st.lists(
        st.builds(TenantDetail, texts, counts, seconds, counts, st.floats(0, 1)), max_size=2
    ).map(tuple),
    priorities=st.lists(st.builds(PriorityDetail, counts, counts, seconds), max_size=2).map(tuple),
    batches=st.lists(
        st.builds(
            BatchDetail, texts, texts, counts, st.floats(0, 1), texts, texts, texts, *[counts] * 5,
            st.dictionaries(texts, counts, max_size=2), texts,
        ),
        max_size=2,
    ).map(tuple),
    errors=st.lists(
        st.builds(ErrorDetail, texts, texts, texts, texts, counts, texts, counts, texts), max_size=2
    ).map(tuple),
    learned=st.lists(st.builds(LearnedPoint, counts, counts, counts), max_size=2).map(tuple),
    sequences=st.none() | st.builds(SequencesReport, counts, counts, counts, counts, counts),
    processes=st.lists(st.builds(ProcessDetail, texts, counts, counts, st.booleans()), max_size=2).map(tuple),
    is_partial=st.booleans(),
)  # fmt: skip


@settings(deadline=None)
@given(details)
def test_detail_is_decoded_as_it_was_encoded(detail: ModelDetail) -> None:
    assert ModelDetail.decode(detail.encode().encode()) == detail


@pytest.mark.parametrize("text", [b"", b"[]", b"{}", b'{"batcher": 1}', b"\xff"])
def test_what_is_not_understood_is_none(text: bytes) -> None:
    assert ModelDetail.decode(text) is None


@pytest.mark.parametrize("letter", ["x", "\x00", "\x1b", "\U0001f6a7"])
def test_detail_is_bounded_and_what_is_most_stays(letter: str) -> None:
    """A thousand lanes, tenants and batches with the longest names, each letter of which is six bytes or
    twelve in JSON."""
    name = clipped(letter * 1000)
    lanes = tuple(LaneDetail(name, "", 1000 - at, 1.0, 1, 1, (1, 2), (1, 2)) for at in range(1000))
    tenants = tuple(TenantDetail(name, 1000 - at, 1.0, 5, 0.5) for at in range(1000))
    batch = BatchDetail("5-0", "full", 8, 1.0, name, "", "w/0", 1, 2, 3, 4, 5, {"INTERNAL": 3}, "")
    error = ErrorDetail("model", "INTERNAL", "", name, 3, name, 5, name)
    detail = ModelDetail(
        "b", 1, 2, 3, 4, lanes=lanes, lanes_number=1000, tenants=tenants, tenants_number=1000,
        batches=(batch,) * 1000, errors=(error,) * 1000,
    )  # fmt: skip
    text = detail.encode()
    assert len(text.encode()) <= DETAIL_BYTES_MAX
    assert text.isascii()
    decoded = ModelDetail.decode(text.encode())
    assert decoded is not None
    assert decoded.is_partial
    assert decoded.lanes_number == 1000
    assert decoded.lanes[0].waiting == 1000
    assert len(decoded.lanes) >= 5
    assert len(decoded.tenants) >= 5
    assert len(decoded.batches) >= 5


def test_a_lone_surrogate_is_replaced() -> None:
    """JSON with one is not valid, and the detail of the whole model would be lost."""
    lane = LaneDetail(clipped("a\udc80"), "", 1, None, 0, 0, None, None)
    decoded = ModelDetail.decode(ModelDetail("b", 1, 2, 3, 4, lanes=(lane,)).encode().encode())
    assert decoded is not None
    assert decoded.lanes[0].lane == "a?"


def test_detail_names_its_parts() -> None:
    lane = LaneDetail("de", "2", 5, 0.5, 3, 20, (1, 2), None)
    assert json.loads(ModelDetail("b", 1, 2, 3, 4, lanes=(lane,)).encode())["lanes"] == [
        {
            "lane": "de",
            "version": "2",
            "waiting": 5,
            "oldest_s": 0.5,
            "batches": 3,
            "requests": 20,
            "latency_us": [1, 2],
            "execution_us": None,
        }
    ]
