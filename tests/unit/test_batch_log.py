"""Log summaries: one line a second, however many batches are committed or requests refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog

from carpool.errors import DEADLINE_EXCEEDED
from carpool.messages.batches import Batch, BatchedRun
from carpool_batcher.accounting import AnswerLog
from carpool_worker.batch_log import BatchLog

Lines = list[MutableMapping[str, Any]]


@pytest.fixture(params=["info", "debug"])
def level(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def lines(level: str) -> Iterator[Lines]:
    """The lines that are logged."""
    captured = structlog.testing.LogCapture()
    structlog.configure(
        processors=[captured],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
    )
    yield captured.entries
    structlog.reset_defaults()


def batch(number: int, size: int, reason: str, queue_us: int) -> Batch:
    arrivals_us = [1_000_000 - queue_us, *[999_999] * (size - 1)]
    runs = [
        BatchedRun("1-0", [f"r{number}"], [b"1"], "application/json", None, arrival_us, None, None)
        for arrival_us in arrivals_us
    ]
    return Batch(f"{number}-0", 1, runs, reason, 1_000_000, "")


def commit_two(log: BatchLog) -> None:
    log.committed("w/0", batch(1, 3, "full", 4000), {"OK": 2, "INTERNAL": 1}, 1500, 0)
    log.committed("w/1", batch(2, 1, "idle", 1500), {"OK": 1}, 500, 1, waited_us=500)


def test_summary_has_the_totals_since_the_last(lines: Lines) -> None:
    log = BatchLog("m", "w")
    commit_two(log)
    log.summarize()
    log.summarize()  # nothing was committed since
    log.committed("w/0", batch(3, 1, "idle", 1000), {"OK": 1}, 700, 0)
    log.summarize()
    first, second = [line for line in lines if line["event"] == "batches"]
    assert first == {
        "event": "batches",
        "log_level": "info",
        "model": "m",
        "worker": "w",
        "batches": 2,
        "requests": 4,
        "size_mean": 2.0,
        "statuses": {"OK": 3, "INTERNAL": 1},
        "reasons": {"full": 1, "idle": 1},
        "queue_ms_mean": 3.0,
        "queue_ms_max": 4.0,
        "compute_ms_mean": 1.0,
        "compute_ms_max": 1.5,
        "dead": 1,
    }
    assert (second["batches"], second["queue_ms_max"], second["dead"]) == (1, 1.0, 0)


def test_summary_is_logged_once_a_second(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    log = BatchLog("m", "w")
    answers = AnswerLog(structlog.get_logger())
    for now_s in (100.0, 100.5, 100.9, 101.0, 101.9, 102.5, 110.0):
        if now_s < 110.0:
            log.committed("w/0", batch(1, 1, "idle", 0), {"OK": 1}, 0, 0)
            answers.refused({"RESOURCE_EXHAUSTED": 2})
            answers.answered_in_flight(DEADLINE_EXCEEDED, 3)
            answers.missed({"waiting": 2, "computed_long": 3})
        log.summarize_if_due()
        answers.summarize_if_due()
    assert [line["batches"] for line in lines if line["event"] == "batches"] == [4, 2]
    refused = [line["RESOURCE_EXHAUSTED"] for line in lines if line["event"] == "requests refused"]
    assert refused == [8, 4]
    expired = [line for line in lines if line["event"] == "requests expired in flight"]
    assert [(line["requests"], line["batches"]) for line in expired] == [(12, 4), (6, 2)]
    missed = [line for line in lines if line["event"] == "deadlines missed"]
    assert [(line["waiting"], line["computed_long"]) for line in missed] == [(8, 12), (4, 6)]


def test_each_batch_is_logged_only_at_debug(lines: Lines, level: str) -> None:
    commit_two(BatchLog("m", "w"))
    if level == "info":
        assert lines == []
        return
    assert [line["batch"] for line in lines] == ["1-0", "2-0"]
    assert lines[0] == {
        "event": "batch",
        "log_level": "debug",
        "model": "m",
        "replica": "w/0",
        "batch": "1-0",
        "epoch": 1,
        "reason": "full",
        "size": 3,
        "OK": 2,
        "INTERNAL": 1,
        "queue_ms": 4.0,
        "compute_ms": 1.5,
        "dead": 0,
    }
