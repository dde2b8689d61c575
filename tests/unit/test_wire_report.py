"""Reports of batchers: decoded as they were encoded, and ignored where they are not understood."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.wire.report import BatcherReport, Gauges, SequencesReport, SteppingReport

counts = st.integers(0, 1 << 53)
seconds = st.floats(0, 1e9)
quantiles = st.none() | st.tuples(counts, counts)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
reports = st.builds(
    BatcherReport,
    batcher=texts,
    began_us=counts,
    at_us=counts,
    gauges=st.builds(Gauges, counts, counts, seconds, counts, counts, counts, counts),
    batches=st.dictionaries(texts, counts, max_size=3),
    requests=counts,
    fill_percent=counts,
    refused=st.dictionaries(texts, counts, max_size=3),
    learned=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
    quantiles_us=quantiles,
    rejected_settings=texts,
    policies=st.lists(texts, max_size=2).map(tuple),
    policy=texts,
    missed=st.dictionaries(texts, counts, max_size=3),
    stepping=st.none() | st.builds(SteppingReport, counts, counts, quantiles, quantiles),
    sequences=st.none() | st.builds(SequencesReport, counts, counts, counts, counts, counts),
)
REPORT = BatcherReport(
    "b", 1, 2, Gauges(3, 4, 0.5, 1, 2, 1), {"full": 9}, 90, 900, {"INTERNAL/x": 1}, ((1, 15), (8, 25)), (7, 8)
)


@settings(deadline=None)
@given(reports)
def test_report_is_decoded_as_it_was_encoded(report: BatcherReport) -> None:
    assert BatcherReport.decode(report.encode().encode()) == report


def test_report_names_its_gauges() -> None:
    assert json.loads(REPORT.encode())["gauges"] == {
        "waiting": 3,
        "waiting_bytes": 4,
        "oldest_s": 0.5,
        "batches_in_flight": 1,
        "requests_in_flight": 2,
        "model_processes": 1,
        "withheld": 0,
        "delayed": 0,
    }


def test_report_names_what_it_says_of_steps() -> None:
    report = replace(REPORT, stepping=SteppingReport(16, 900, (5, 6), None))
    assert json.loads(report.encode())["stepping"] == {
        "slots": 16,
        "chunks": 900,
        "first_us": [5, 6],
        "gap_us": None,
    }


def test_report_names_what_it_says_of_sequences() -> None:
    report = replace(REPORT, sequences=SequencesReport(100, 3, 170, 60, 10))
    assert json.loads(report.encode())["sequences"] == {
        "kept": 100,
        "waiting_to_start": 3,
        "started": 170,
        "ended": 60,
        "broken": 10,
        "slots": None,
    }


def test_fields_added_later_have_defaults_and_unknown_ones_are_ignored() -> None:
    fields = json.loads(REPORT.encode()) | {"of a later version": 1}
    for name in ("rejected_settings", "policies", "policy", "missed", "stepping", "sequences"):
        del fields[name]
    del fields["gauges"]["withheld"]
    assert BatcherReport.decode(json.dumps(fields).encode()) == REPORT


@pytest.mark.parametrize(
    "change",
    [
        {"gauges": None},
        {"gauges": {"waiting": 1}},
        {"batches": [1]},
        {"requests": "many"},
        {"learned": [1]},
        {"quantiles_us": [1, 2, 3]},
        {"missed": 7},
        {"stepping": {"slots": 8}},
        {"sequences": {"kept": 8}},
        {"at_us": 1.5},
    ],
)
def test_report_with_another_type_of_field_is_not_understood(change: dict[str, Any]) -> None:
    fields = json.loads(REPORT.encode()) | change
    assert BatcherReport.decode(json.dumps(fields).encode()) is None


@pytest.mark.parametrize("report", [b"", b"{", b"null", b"7", b"[]", b"{}", b"\xff", b"[" * 100_000])
def test_anything_else_is_not_understood(report: bytes) -> None:
    assert BatcherReport.decode(report) is None
