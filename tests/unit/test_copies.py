"""Which waiting requests repeat another, and what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from carpool.messages.batches import Dispatch
from carpool.messages.requests import JSON, Entry, Run, Withdrawal
from carpool.messages.results import UNANSWERED, Refusal
from carpool.model_settings import ModelSettings
from carpool.rows import StoredBody
from carpool_batcher.core.waiting.copies_index import WaitingIds, separate
from support.scheduler_harness import SchedulerHarness, run


def known(ids: WaitingIds, names: str, reply_to: str | None = None) -> str:
    """Those of these requests that wait."""
    return "".join(name for name in names if (reply_to, name) in ids)


def test_request_waits_as_long_as_one_of_its_copies() -> None:
    ids = WaitingIds()
    first, second, third = run("a b", 0, "1-0"), run("c", 0, "2-0"), run("b c d", 0, "3-0")
    for one in (first, second, third):
        ids.add(one)
    assert ids.all_later() == {third: {"b", "c"}}
    ids.remove([first])
    assert known(ids, "abcd") == "bcd" and ids.is_repeated_popped
    assert ids.later_copies([first]) == {third: {"b"}}  # to be removed now that the first one is in flight
    assert ids.all_later() == {third: {"c"}}  # of b it is the only one
    ids.remove([third.cut(1)])
    assert known(ids, "abcd") == "cd"
    ids.remove([third])
    assert known(ids, "abcd") == "c"
    ids.remove([second])
    assert known(ids, "abcd") == "" and not ids.repeated


def test_requests_with_other_addresses_are_others() -> None:
    ids = WaitingIds()
    ids.add(run("a", 0, "1-0"))
    ids.add(run("a", 0, "2-0", reply_to="me"))
    assert not ids.repeated
    assert (known(ids, "a"), known(ids, "a", "me"), known(ids, "a", "you")) == ("a", "a", "")


def test_addresses_are_not_kept_for_ever() -> None:
    ids = WaitingIds()
    runs = [run("a", 0, f"{number}-0", reply_to=f"r{number}") for number in range(1000)]
    for one in runs:
        ids.add(one)
    ids.remove(runs)
    assert len(ids._ids) <= 64


def test_repeats_within_a_run_do_not_wait() -> None:
    harness = SchedulerHarness(processes=0)
    one = run("a b a a", 0, "1-0")
    (refused,) = harness.offer_runs([one], 0)
    assert (refused.status, refused.correlation_ids) == (UNANSWERED, ["a", "a"])
    assert (one.correlation_ids, harness.scheduler.queue.count) == (["a", "b"], 2)


# --- a copy is not answered while the first waits ----------------------------------------------------------


def statuses(refusals: Iterable[Refusal]) -> list[str]:
    return [f"{one.status or 'removed'} {' '.join(one.correlation_ids)}" for one in refusals]


@pytest.mark.parametrize(
    "limit",
    [{"max_queue_size": 2}, {"max_queue_bytes": 2}, {"priority_policies": {4: {"max_queue_size": 2}}}],
    ids=lambda limit: next(iter(limit)),
)
def test_copy_that_does_not_fit_is_removed_without_an_answer(limit: Any) -> None:
    harness = SchedulerHarness(processes=0, **limit)
    assert harness.offer("a b") == []
    assert statuses(harness.offer("b")) == ["removed b"]
    assert statuses(harness.offer("c a")) == ["removed a", "RESOURCE_EXHAUSTED c"]
    assert statuses(harness.offer("a", reply_to="me")) == ["RESOURCE_EXHAUSTED a"]  # another request
    assert harness.scheduler.queue.count == 2


def test_copies_give_their_places_to_other_requests() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=4)
    for names in ("a b", "b", "a"):
        assert harness.offer(names) == []
    assert sorted(statuses(harness.offer("c"))) == ["removed a", "removed b"]
    assert harness.offer("d") == []
    assert statuses(harness.offer("e")) == ["RESOURCE_EXHAUSTED e"]
    harness.scheduler.model_processes = 1
    assert harness.poll() == ["idle: a b c d"]


def test_copy_over_a_lowered_limit_is_removed_without_an_answer() -> None:
    harness = SchedulerHarness(processes=0)
    harness.offer("a", cost=5)
    harness.scheduler.settings = ModelSettings(max_batch_cost=4)
    assert statuses(harness.offer("a b", cost=5)) == ["removed a", "INVALID_ARGUMENT b"]


def test_copy_of_a_request_in_flight_is_not_refused() -> None:
    harness = SchedulerHarness(processes=2, max_queue_size=2, max_batch_size=2)
    scheduler = harness.scheduler
    for names in ("a b", "c d"):
        harness.offer(names)
        assert harness.poll() == [f"full: {names}"]
    harness.offer("x y")
    assert statuses(harness.offer("a")) == ["removed a"]
    assert statuses(harness.offer("c q")) == ["removed c", "RESOURCE_EXHAUSTED q"]
    harness.settle(1)
    assert statuses(harness.offer("a")) == ["RESOURCE_EXHAUSTED a"]
    scheduler.in_flight.answered([run("c")])  # it expired, and its producer knows
    assert statuses(harness.offer("c")) == ["RESOURCE_EXHAUSTED c"]
    assert statuses(harness.offer("d")) == ["removed d"]
    harness.settle(2)
    assert not scheduler.in_flight.ids._batches and not scheduler.in_flight.ids._indexed


def malformed(name: str, reply_to: str | None = None, **fields: Any) -> Refusal:
    entry = Entry("9-0", 0)
    refused = Refusal(entry, [name], reply_to, JSON, "INVALID_ARGUMENT", "input", "body: too large")
    return refused._replace(**fields)


def test_malformed_copy_is_removed_without_an_answer() -> None:
    """As one whose body is over a limit that was lowered meanwhile."""
    harness = SchedulerHarness()
    scheduler = harness.scheduler
    for at in range(2):
        harness.offer("in-flight")
        assert bool(harness.poll(at)) == (not at)
    assert statuses(scheduler.refuse_malformed(malformed("in-flight"))) == ["removed in-flight"]
    for one in (malformed("other"), malformed("in-flight", "me")):
        assert list(scheduler.refuse_malformed(one)) == [one]
    columns = malformed("a")._replace(correlation_ids=["a", "in-flight", "b", "a"], body_names=["x"])
    answered = list(scheduler.refuse_malformed(columns))
    assert statuses(answered) == ["removed in-flight a", "INVALID_ARGUMENT a b"]


def test_request_that_is_being_withdrawn_is_no_first_copy() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=1)
    scheduler = harness.scheduler
    harness.offer("a")
    scheduler.withdraw(Withdrawal(Entry("9-0", 0), frozenset({"a"})))
    assert statuses(harness.offer("a")) == ["RESOURCE_EXHAUSTED a"]
    assert statuses(scheduler.carry_out_withdrawals(0).refusals) == ["CANCELLED a"]


def test_copies_that_are_withdrawn_get_one_answer() -> None:
    harness = SchedulerHarness(processes=0)
    for names in ("a b", "b a"):
        harness.offer(names)
    harness.offer("a", reply_to="me")
    assert statuses(harness.withdraw("a b")) == ["CANCELLED a b", "removed b a", "CANCELLED a"]
    assert harness.scheduler.queue.count == 0


def test_only_the_last_of_the_copies_expires_with_an_answer() -> None:
    harness = SchedulerHarness(processes=0)
    for expiration in (20, 10, 20):
        harness.offer("a b", expiration=expiration)
    assert harness.poll(10) == [": a b"]
    assert sorted(harness.poll(20)) == [": a b", "DEADLINE_EXCEEDED: a b"]
    assert not harness.scheduler.queue.ids.repeated


def test_copy_does_not_expire_while_the_first_is_in_flight() -> None:
    harness = SchedulerHarness()
    harness.offer("a", expiration=50)
    assert harness.poll() == ["idle: a"]
    harness.scheduler.model_processes = 0
    harness.offer("a", expiration=10)
    assert harness.poll(10) == [": a"]


def test_many_copies_of_one_request_are_removed_in_linear_time() -> None:
    """As of a producer that gives all requests the same ID. Each step is a look at a run."""
    looks = 0

    class Name(str):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return super().__eq__(other)

        __hash__ = str.__hash__

    harness = SchedulerHarness(max_queue_size=2000)
    waiting = [run(Name("a"), 0, f"{number}-0") for number in range(2000)]
    for one in waiting:
        one.correlation_ids = [Name("a")]
    harness.offer_runs(waiting, 0)
    decisions = [one for one in harness.scheduler.poll(0) if isinstance(one, Dispatch)]
    remaining = harness.scheduler.carry_out(decisions, 0)
    (dispatch,) = remaining.dispatches
    assert len(dispatch.runs) == 1
    remaining.launched("1", dispatch)
    refusals = remaining.finish()
    assert len(refusals) == 1999 and harness.scheduler.queue.count == 0
    assert looks < 20 * 2000


# --- stored bodies ---------------------------------------------------------------------------------------


def stored(name: str, body: str, entry_id: str = "1-0", **fields: Any) -> Run:
    one = run(name, 0, entry_id, **fields)
    one.bodies = [StoredBody(body, 1)]
    return one


def test_body_is_in_use_until_the_last_request_with_it_is_settled() -> None:
    harness = SchedulerHarness()
    scheduler = harness.scheduler
    harness.offer_runs([stored("a", "x"), stored("b", "x", reply_to="me", expiration=5), stored("c", "y")], 0)
    scheduler.model_processes = 0
    assert harness.poll(5) == ["DEADLINE_EXCEEDED: b"]
    assert scheduler.is_body_in_use("x")  # of a
    harness.withdraw("c")
    assert not scheduler.is_body_in_use("y")
    scheduler.model_processes = 1
    (dispatch,) = scheduler.poll(6)
    assert isinstance(dispatch, Dispatch)
    assert scheduler.is_body_in_use("x")  # it is dispatched after what is refused in this turn
    scheduler.in_flight.launch("1", dispatch, 6)
    scheduler.poll(7)
    assert scheduler.is_body_in_use("x")
    harness.settle(1)
    assert not scheduler.is_body_in_use("x")
    bodies = scheduler.queue.bodies
    assert not (bodies.waiting or bodies._popped or bodies._in_flight or bodies._by_batch)


def test_next_batcher_knows_bodies_in_flight() -> None:
    harness = SchedulerHarness()
    harness.scheduler.in_flight.adopt("1", Dispatch([stored("a", "x")], "idle", ""), 0)
    assert harness.scheduler.is_body_in_use("x")
    harness.scheduler.in_flight.forget("1", 0)
    assert not harness.scheduler.is_body_in_use("x")


# --- removal when the first is in flight -------------------------------------------------------------------


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
    harness = SchedulerHarness()
    scheduler = harness.scheduler
    first = run("a b", 0, "1-0", reply_to="me")
    again = run("b a x", 0, "2-0", reply_to="me", lane="later")
    other = run("a", 0, "3-0", reply_to="you", lane="later")
    harness.offer_runs([first, again, other], 0)
    (dispatch,) = (decision for decision in scheduler.poll(0) if isinstance(decision, Dispatch))
    assert dispatch.runs == [first]
    remaining = scheduler.carry_out([dispatch], 0)
    remaining.launched("1", dispatch)
    refusals = remaining.finish()
    assert sorted(name for refused in refusals for name in refused.correlation_ids) == ["a", "b"]
    assert {refused.status for refused in refusals} == {UNANSWERED}
    assert (again.correlation_ids, other.correlation_ids, scheduler.queue.count) == (["x"], ["a"], 2)


def test_copy_waits_again_if_the_first_was_gone() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    scheduler = harness.scheduler
    harness.offer("a")
    harness.offer("a")
    (dispatch,) = (decision for decision in scheduler.poll(0) if isinstance(decision, Dispatch))
    remaining = scheduler.carry_out([dispatch], 0)
    (dispatch,) = remaining.dispatches
    assert dispatch.size == 1 and scheduler.queue.count == 0
    remaining.gone(dispatch)  # Redis had none of what was dispatched
    assert remaining.finish() == []
    assert scheduler.queue.count == 1
