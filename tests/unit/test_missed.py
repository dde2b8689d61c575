"""Why requests missed their deadlines: from planted times, and from batches that settle."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from carpool.errors import DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED
from carpool.messages.requests import JSON, Entry, Run
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.missed_deadlines import Cause, MissedDeadlines, Times, cause_of, causes_of_refusals
from support.scheduler_harness import LearningCapacity

MS = 1000
# Arrived at 0, deadline at 50 ms, executed from 20 to 30 ms as was expected, delivered at 32 ms.
IN_TIME = Times(0, 50 * MS, 20 * MS, 10 * MS, 10 * MS, 32 * MS)


# --- one request -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({}, None),
        ({"delivered_us": 50 * MS}, None),
        # It was ready with less than l(n) left: late however fast the model was, and whether it ran at all.
        ({"ready_us": 41 * MS, "delivered_us": 53 * MS}, "dispatched_late"),
        ({"ready_us": 41 * MS, "compute_us": 1 * MS, "delivered_us": 51 * MS}, "dispatched_late"),
        ({"ready_us": 41 * MS, "compute_us": 90 * MS, "delivered_us": 140 * MS}, "dispatched_late"),
        ({"ready_us": 41 * MS, "compute_us": 0, "delivered_us": 51 * MS}, "dispatched_late"),
        (
            {"ready_us": 60 * MS, "expected_us": 0, "compute_us": 0, "delivered_us": 61 * MS},
            "dispatched_late",
        ),
        # It was ready in time by a hair.
        ({"ready_us": 40 * MS, "delivered_us": 51 * MS}, "delivered_late"),
        ({"compute_us": 31 * MS, "delivered_us": 53 * MS}, "computed_long"),
        ({"compute_us": 30 * MS, "delivered_us": 53 * MS}, "delivered_late"),
        ({"expected_us": 0, "compute_us": 31 * MS, "delivered_us": 53 * MS}, "computed_long"),
        # l(n) is longer than its deadline allows: no dispatch could be in time.
        ({"expected_us": 60 * MS, "compute_us": 60 * MS, "delivered_us": 81 * MS}, "computed_long"),
        ({"expected_us": 60 * MS, "ready_us": 50 * MS, "delivered_us": 81 * MS}, "dispatched_late"),
        # The worker was paused, and found it expired.
        ({"compute_us": 0, "delivered_us": 900 * MS}, "delivered_late"),
    ],
)
def test_cause_follows_from_the_times(changes: Mapping[str, int], cause: Cause | None) -> None:
    assert cause_of(IN_TIME._replace(**changes)) == cause


def test_only_refusals_for_a_deadline_have_a_cause() -> None:
    refusals = [
        Refusal(Entry("1-1", 0), ["c"] * number, None, JSON, status, reason, "")
        for number, status, reason in (
            (2, DEADLINE_EXCEEDED, "early"),
            (1, DEADLINE_EXCEEDED, "waiting"),
            (5, DEADLINE_EXCEEDED, "waiting"),
            (7, RESOURCE_EXHAUSTED, "queue_size"),
        )
    ]
    assert causes_of_refusals(refusals) == {"early": 2, "waiting": 6}


# --- batches that settle -----------------------------------------------------------------------------------


class Batches:
    """Batches in flight of a model for which l(n) = 10 ms was learned. Times are in ms."""

    def __init__(self) -> None:
        self.capacity = LearningCapacity(1)
        for number in range(8):
            self.capacity.adopt(f"{number}", InFlightBatch(0, 1 + number, "", {}))
            self.capacity.settle(f"{number}", 10 * MS, 12 * MS)
        assert self.capacity.learned.latency.of(4) == 10 * MS
        self.missed = MissedDeadlines(self.capacity.learned, self.capacity.in_flight)

    def launch(self, batch_id: str, at: int, *runs: Run) -> InFlightBatch:
        expiring: dict[int, Run] = {}
        size = 0
        for run in runs:
            if run.deadline_us is not None:
                expiring[size] = run
            size += len(run)
        batch = InFlightBatch(at * MS, size, "", expiring)
        self.capacity.adopt(batch_id, batch)
        return batch

    def expire(self, batch_id: str, *positions: int, answered: set[int] | None) -> None:
        expiring = self.capacity.in_flight[batch_id].expiring
        self.missed.expired(batch_id, [(at, expiring.pop(at)) for at in positions], answered)

    def settle(self, batch_id: str, at: int, compute: int, worker: str = "w/0") -> Mapping[Cause, int]:
        batch = self.capacity.in_flight[batch_id]
        event = BatchSettled(batch_id, worker, batch.size, compute * MS, at * MS, batch.size)
        causes = self.missed.settled(event, batch)
        self.capacity.settle(batch_id, compute * MS, at * MS)
        return causes


def run(deadline: int | None, requests: int = 1, arrival: int = 0) -> Run:
    """Requests that arrived at a time, and expire at a time (ms)."""
    deadline_us = None if deadline is None else deadline * MS
    ids = [str(at) for at in range(requests)]
    return Run(Entry("1-1", 0), ids, [], arrival_us=arrival * MS, deadline_us=deadline_us)


def test_batch_in_time_has_no_causes() -> None:
    batches = Batches()
    batches.launch("a", 20, run(50), run(None), run(40))
    assert batches.settle("a", at=40, compute=10) == {}


def test_each_request_of_a_batch_has_its_own_cause() -> None:
    """Given deadlines at 25, 35 and 60 ms in a batch that takes 30 ms from 20 ms on."""
    batches = Batches()
    batches.launch("a", 20, run(25, 3), run(35, 2), run(60), run(None))
    batches.expire("a", 0, answered={0, 1, 2})
    assert batches.settle("a", at=52, compute=30) == {"dispatched_late": 3, "computed_long": 2}


def test_batch_behind_a_busy_process_was_dispatched_late_though_that_was_early() -> None:
    """Given a batch dispatched ahead at 5 ms, whose process is busy until 45 ms, only 5 ms are left of 10."""
    batches = Batches()
    batches.launch("a", 0, run(None))
    batches.launch("b", 5, run(50))
    assert batches.settle("a", at=45, compute=40) == {}
    assert batches.settle("b", at=56, compute=10) == {"dispatched_late": 1}


def test_batch_of_another_process_could_begin_at_once() -> None:
    batches = Batches()
    batches.launch("a", 0, run(None))
    batches.launch("b", 5, run(50))
    assert batches.settle("a", at=45, compute=40) == {}
    assert batches.settle("b", at=56, compute=10, worker="w/1") == {"delivered_late": 1}


def test_batch_began_no_later_than_it_must_have() -> None:
    """Given a commit of the batch before at 45 ms, while this one was executed from 30 to 52 ms."""
    batches = Batches()
    batches.launch("a", 0, run(None))
    batches.launch("b", 5, run(50))
    assert batches.settle("a", at=45, compute=30) == {}
    assert batches.settle("b", at=52, compute=22) == {"computed_long": 1}


def test_unexpired_request_whose_result_is_late_counts() -> None:
    """Given a batcher that reads that a batch settled after a deadline, before it expires the request."""
    batches = Batches()
    batches.launch("a", 20, run(50))
    assert batches.settle("a", at=51, compute=10) == {"delivered_late": 1}


def test_result_that_is_on_its_way_at_the_deadline_is_delivered_late() -> None:
    batches = Batches()
    for delivery in (*[3] * 8, 900):
        batches.capacity.learned.observe_delivery(delivery * MS)
    batches.launch("a", 20, run(50), run(49), run(52), run(53))
    assert batches.settle("a", at=50, compute=10) == {"delivered_late": 3}


def test_request_answered_by_its_worker_was_in_time() -> None:
    """Given a run of four of which the worker answered two ahead, expect only the two that expired."""
    batches = Batches()
    batches.launch("a", 20, run(50, 4), run(50))
    batches.expire("a", 0, 4, answered={1, 2})
    assert batches.settle("a", at=90, compute=60) == {"computed_long": 2}


def test_batch_that_had_settled_at_the_deadline_was_in_time_or_not_by_its_own_time() -> None:
    """Given requests to expire in a batch that has settled, which the batcher reads only then."""
    batches = Batches()
    batches.launch("a", 20, run(50, 2), run(54))
    batches.expire("a", 0, answered=None)
    assert batches.settle("a", at=49, compute=10) == {}
    batches.launch("b", 20, run(50, 2))
    batches.expire("b", 0, answered=None)
    assert batches.settle("b", at=51, compute=10, worker="w/1") == {"delivered_late": 2}


def test_what_was_learned_of_a_batch_itself_is_no_expectation() -> None:
    """Given a model that becomes slow, expect its first slow batches to be named so."""
    batches = Batches()
    batches.launch("a", 20, run(50))
    assert batches.settle("a", at=120, compute=98) == {"computed_long": 1}


def test_batches_and_processes_that_are_gone_are_forgotten() -> None:
    batches = Batches()
    batches.launch("a", 0, run(None))
    batches.settle("a", at=45, compute=40)
    batches.launch("b", 5, run(30))
    batches.expire("b", 0, answered={0})
    batches.missed.forget_missing(["w/0"])
    batches.capacity.end("b", 60 * MS)
    batches.missed.forget_missing(["w/1"])
    batches.launch("b", 5, run(50))
    assert batches.settle("b", at=56, compute=10) == {"delivered_late": 1}, "of its own, at once, by w/0"


def test_batch_that_is_still_in_flight_is_not_forgotten() -> None:
    batches = Batches()
    batches.launch("b", 5, run(30))
    batches.expire("b", 0, answered={0})
    batches.missed.forget_missing([])
    assert batches.settle("b", at=56, compute=40) == {"computed_long": 1}
