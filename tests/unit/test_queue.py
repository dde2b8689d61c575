"""The waiting queue: limits on what is admitted, withdrawal, and totals."""

from __future__ import annotations

from carpool.rows import Rows, StoredBody
from support.scheduler_harness import SchedulerHarness, run

# --- limits ----------------------------------------------------------------------------------------------


def test_newest_request_is_refused_when_the_queue_is_full() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=2)
    assert harness.offer("a b") == []
    (refusal,) = harness.offer("c", reply_to="me", content_type="application/msgpack")
    assert refusal.status == "RESOURCE_EXHAUSTED"
    assert refusal.detail == "the queue is full (max_queue_size): 2 requests wait; try again later"
    # The refusal has the address and the format of the request.
    assert (refusal.correlation_ids, refusal.reply_to, refusal.content_type) == (
        ["c"],
        "me",
        "application/msgpack",
    )
    assert refusal.run is not None and refusal.entry is refusal.run.entry
    # After a dispatch there is space again.
    harness.scheduler.model_processes = 1
    assert harness.poll() == ["idle: a b"]
    assert harness.offer("d") == []


def test_queue_is_full_by_bytes() -> None:
    harness = SchedulerHarness(processes=0, max_queue_bytes=10)
    assert harness.offer("a b", body=b"12345") == []
    assert harness.scheduler.queue.bytes == 10
    (refusal,) = harness.offer("c", body=b"1")
    assert refusal.status == "RESOURCE_EXHAUSTED"
    assert (
        refusal.detail
        == "the queue is full (max_queue_bytes): 10 bytes wait, and this request has 1; try again later"
    )
    assert harness.offer("d", body=b"") == []


def test_priority_may_have_a_smaller_queue() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=4, priority_policies={0: {"max_queue_size": 1}})
    assert harness.offer("a", priority=0) == []
    (refusal,) = harness.offer("b", priority=0)
    assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "queue_size")
    assert refusal.detail == "the queue is full for priority 0 (priority_policies); try again later"
    # Other priorities have the queue of the model; this one is served again when there is space.
    assert [one.correlation_ids for one in harness.offer("c d e f", priority=4)] == [["f"]]
    harness.withdraw("a c")
    assert harness.offer("g", priority=0) == []


def test_part_of_a_run_that_fits_is_admitted() -> None:
    """As if each request was offered by itself: also a small one behind a large one that does not fit."""
    harness = SchedulerHarness(processes=0, max_queue_size=3, max_queue_bytes=10)
    mixed = run("a b c d e f")
    mixed.bodies = [b"1234", b"1234567", b"123456", b"", b"", StoredBody("large", 1)]
    by_bytes, by_count = harness.offer_runs([mixed], at=0)
    assert (by_bytes.correlation_ids, by_bytes.reason) == (["b"], "queue_bytes")
    assert by_bytes.detail.startswith(
        "the queue is full (max_queue_bytes): 10 bytes wait, and this request has 7;"
    )
    assert (by_count.correlation_ids, by_count.reason) == (["e", "f"], "queue_size")
    assert mixed.correlation_ids == ["a", "c", "d"]
    # What was refused stays in the entry until a script has refused it.
    assert mixed.entry.runs == [by_count.run, by_bytes.run, mixed]
    assert (harness.scheduler.queue.count, harness.scheduler.queue.bytes) == (3, 10)


def test_part_of_the_rows_that_fits_is_admitted() -> None:
    harness = SchedulerHarness(processes=0, max_queue_bytes=10)
    rows = run("a b c d", body=b"123", rows=True)
    (refusal,) = harness.offer_runs([rows], at=0)
    assert (refusal.correlation_ids, rows.correlation_ids) == (["d"], ["a", "b", "c"])
    assert harness.scheduler.queue.bytes == 9
    assert isinstance(rows.bodies, Rows) and bytes(rows.bodies.data) == b"123" * 3


def test_requests_in_the_middle_of_a_run_are_withdrawn() -> None:
    harness = SchedulerHarness(processes=0)
    harness.offer("a b c d e", expiration=10)
    (refusal,) = harness.withdraw("b d x")
    assert refusal.correlation_ids == ["b", "d"]
    assert (harness.scheduler.queue.count, harness.scheduler.queue.bytes) == (3, 3)
    assert harness.poll(10) == ["DEADLINE_EXCEEDED: a c e"]


def test_withheld_results_count_against_the_queue_size() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=3)
    harness.scheduler.queue.withheld = 2
    assert harness.offer("a") == []
    (refusal,) = harness.offer("b")
    assert refusal.detail == (
        "the queue is full (max_queue_size): 1 requests wait, 2 results are withheld until earlier ones are "
        "done; try again later"
    )
    harness.scheduler.queue.withheld = 1
    assert harness.offer("c") == []


def test_request_that_fits_into_no_batch_is_refused() -> None:
    harness = SchedulerHarness(max_batch_cost=10)
    (refusal,) = harness.offer("a", cost=11)
    assert refusal.status == "INVALID_ARGUMENT"
    assert refusal.detail == "cost: 11 is over this model's max_batch_cost 10"
    assert harness.offer("b", cost=10) == []


def test_refused_request_does_not_wait() -> None:
    harness = SchedulerHarness(processes=1, max_queue_size=1)
    harness.offer("a b")
    assert harness.scheduler.queue.count == 1
    assert harness.poll() == ["idle: a"]
    harness.settle(1)
    assert harness.poll() == []


# --- removal ---------------------------------------------------------------------------------------------


def test_waiting_requests_are_withdrawn_and_those_in_flight_are_not() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    harness.offer("a b")
    assert harness.poll() == ["full: a b"]
    harness.offer("c d", lane="x", expiration=50)
    refusals = harness.withdraw("a c unknown")
    assert [(one.correlation_ids, one.status) for one in refusals] == [(["c"], "CANCELLED")]
    assert refusals[0].detail == "it was withdrawn"
    harness.settle(1)
    assert harness.poll() == ["idle: d"]


def test_forgotten_requests_are_removed_without_an_answer() -> None:
    harness = SchedulerHarness(processes=0)
    waiting = [run(name, expiration=10) for name in "abc"]
    harness.offer_runs(waiting, at=0)
    harness.scheduler.forget([waiting[0], waiting[2]])
    harness.scheduler.forget(waiting[:1])  # again
    assert (harness.scheduler.queue.count, harness.scheduler.queue.bytes) == (1, 1)
    assert harness.poll(10) == ["DEADLINE_EXCEEDED: b"]


def test_empty_lanes_are_dropped() -> None:
    harness = SchedulerHarness(processes=2000, max_batch_size=2)
    for number in range(1000):
        harness.offer("a", lane=f"dispatched {number}")
        harness.offer("b", lane=f"withdrawn {number}", expiration=1)
    harness.withdraw("b")
    harness.poll()
    assert len(harness.scheduler.queue.lanes) == 1
