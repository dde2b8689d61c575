"""Which waiting requests repeat another, and what becomes of them."""

from __future__ import annotations

from carpool.messages import UNANSWERED, Dispatch
from carpool_batcher.core.duplicates import WaitingIds, separate
from support.scheduler_harness import SchedulerHarness, run


def test_only_repeated_ids_are_remembered() -> None:
    ids = WaitingIds()
    first, second, third = run("a b", 0, "1-0"), run("c", 0, "2-0"), run("b c d", 0, "3-0")
    for one in (first, second, third):
        ids.add(one)
    assert ids.repeated == {"b": [third], "c": [third]}
    ids.remove([first])
    assert ids.repeated == {"b": [third], "c": [third]}  # to be removed when the first ones are in flight
    ids.remove([third.cut(1)])
    assert ids.repeated == {"c": [third]} and ids.is_repeated_popped
    ids.remove([third, second])
    assert ids.repeated == {} and ids._ids == set()


def test_run_may_repeat_itself() -> None:
    ids = WaitingIds()
    one = run("a b a", 0, "1-0")
    ids.add(one)
    assert "a" in ids.repeated
    ids.remove([one])
    assert ids.repeated == {} and ids._ids == set()


def test_dispatches_are_separated_by_address() -> None:
    first, again = run("a b", 0, "1-0", reply_to="me"), run("b c", 0, "2-0", reply_to="me")
    other, last = run("a", 0, "3-0"), run("c", 0, "4-0", reply_to="me")
    dispatches, copies = separate([Dispatch([first, again], "idle", ""), Dispatch([other, last], "idle", "")])
    assert [[one.correlation_ids for one in dispatch.runs] for dispatch in dispatches] == [
        [["a", "b"], ["c"]],
        [["a"]],
    ]
    assert [one.correlation_ids for one in copies] == [["b"], ["c"]]


def test_duplicates_are_taken_after_the_dispatch_of_the_first() -> None:
    harness = SchedulerHarness(processes=0)
    scheduler = harness.scheduler
    first = run("a b", 0, "1-0", reply_to="me")
    again, other = run("b a x", 0, "2-0", reply_to="me"), run("a", 0, "3-0", reply_to="you")
    harness.offer_runs([first, again, other], 0)
    scheduler.forget([first])  # as if it had been dispatched
    refusals = scheduler.take_duplicates([first], (), 0)
    assert sorted(name for refused in refusals for name in refused.correlation_ids) == ["a", "b"]
    assert {refused.status for refused in refusals} == {UNANSWERED}
    assert (again.correlation_ids, other.correlation_ids, scheduler.waiting) == (["x"], ["a"], 2)


def test_copy_waits_again_if_the_first_was_gone() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    scheduler = harness.scheduler
    harness.offer("a")
    harness.offer("a")
    (dispatch,) = (decision for decision in scheduler.poll(0) if isinstance(decision, Dispatch))
    (dispatch,), copies = scheduler.separate([dispatch])
    assert dispatch.size == 1 and len(copies) == 1
    assert scheduler.take_duplicates((), copies, 0) == []  # Redis had none of what was dispatched
    assert scheduler.waiting == 1
