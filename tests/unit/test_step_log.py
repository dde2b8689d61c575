"""The log of a stepping model: what its worker did in a second, and each request at debug."""

from __future__ import annotations

import logging
from typing import Final

import pytest
import structlog

from carpool.errors import INTERNAL, OK
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import JSON
from carpool.messages.results import Result
from carpool.messages.settled import Streamed
from carpool.store.steps import StepWrite
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics
from carpool_worker.stepping.execution import StepExecution
from carpool_worker.stepping.log import StepLog

RUN: Final = BatchedRun("1-0", ["a"], [b"1"], JSON, None, 996_000, None, None)
BATCH: Final = Batch("9-0", 1, [RUN], "full", 1_000_000, "", stream=True)
REQUEST: Final = StepExecution(Execution(BATCH), 0, 0.0)


def ended(log: StepLog, status: str, streamed: Streamed | None = None) -> None:
    """A request gets its final result."""
    result = Result("a", status, JSON, b"1")
    log.ended("w/0", REQUEST, StepWrite(BATCH, 0, result=result, compute_us=70_000, streamed=streamed))


def lines_at(level: str) -> structlog.testing.LogCapture:
    captured = structlog.testing.LogCapture()
    wrapper = structlog.make_filtering_bound_logger(logging.getLevelName(level))
    structlog.configure(processors=[captured], wrapper_class=wrapper)
    return captured


@pytest.fixture(autouse=True)
def _default_logs() -> object:
    yield
    structlog.reset_defaults()


def test_summary_tells_of_steps_chunks_ends_and_slots() -> None:
    captured, metrics, slots = lines_at("INFO"), WorkerMetrics("m"), [3]
    log = StepLog("m", "w", metrics, lambda: slots[0])
    log.summarize()  # nothing was done
    for step_us in (10_000, 30_000):
        metrics.stepped(step_us)
    for status in (OK, OK, INTERNAL):
        ended(log, status)
    log.dropped([REQUEST])
    log.summarize()
    log.summarize()
    metrics.stepped(5_000)
    log.summarize()
    first, second = captured.entries
    assert first == {
        "event": "steps",
        "log_level": "info",
        "model": "m",
        "worker": "w",
        "steps": 2,
        "step_ms_mean": 20.0,
        "chunks": 0,
        "ended": {OK: 2, INTERNAL: 1},
        "expired_or_withdrawn": 1,
        "slots_in_use": 3,
    }
    assert (second["steps"], second["step_ms_mean"], second["ended"]) == (1, 5.0, {})


def test_summary_is_logged_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    captured, now_s = lines_at("INFO"), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    log = StepLog("m", "w", WorkerMetrics("m"), lambda: 0)
    for now_s in (100.0, 100.9, 101.0, 101.9, 102.5, 110.0):
        if now_s < 110.0:
            ended(log, OK)
        log.summarize_if_due()
    assert [line["ended"] for line in captured.entries] == [{OK: 3}, {OK: 2}]


def test_each_request_is_logged_only_at_debug() -> None:
    captured = lines_at("DEBUG")
    log = StepLog("m", "w", WorkerMetrics("m"), lambda: 0)
    ended(log, OK, Streamed(5, 40_000, 20_000))
    ended(log, OK, Streamed(1, 40_000, 0))
    ended(log, INTERNAL)
    first, second, third = captured.entries
    assert first == {
        "event": "batch",
        "log_level": "debug",
        "model": "m",
        "replica": "w/0",
        "batch": "9-0",
        "reason": "full",
        "size": 1,
        OK: 1,
        "queue_ms": 4.0,
        "compute_ms": 70.0,
        "epoch": 1,
        "dead": 0,
        "chunks": 5,
        "first_ms": 40.0,
        "gap_ms_mean": 5.0,
    }
    assert second["gap_ms_mean"] is None
    assert "chunks" not in third
