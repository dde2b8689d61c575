"""Withdrawals: which requests they find, and how often the batcher looks for them."""

from __future__ import annotations

import itertools

import pytest

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Entry, Withdrawal
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.core.waiting.queue import Queue
from carpool_batcher.core.waiting.withdrawals import PAUSE_US, Withdrawn
from support.scheduler_harness import run, settle

WAITING = 1000
MANY = ModelSettings(max_queue_size=10 * WAITING)

entry_ids = (f"{number}-0" for number in itertools.count(1))


def scheduler_with(waiting: int, *names: str) -> Scheduler:
    """A scheduler without model processes in which this many others wait, and these."""
    scheduler = Scheduler(MANY)
    for name in [*(f"other-{number}" for number in range(waiting)), *names]:
        assert scheduler.offer(run(name), 0) == []
    return scheduler


def withdraw(scheduler: Scheduler, *names: str) -> Entry:
    """A withdrawal is read. Returns its entry."""
    entry = Entry(next(entry_ids), 0)
    scheduler.withdraw(Withdrawal(entry, frozenset(names)))
    return entry


def names_of(withdrawn: Withdrawn) -> list[str]:
    return [name for refusal in withdrawn.refusals for name in refusal.correlation_ids]


def test_flood_of_withdrawals_that_name_nobody_looks_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given many waiting requests, and a withdrawal each 100 us for a second, expect few looks at all."""
    scheduler, looks = scheduler_with(WAITING), 0
    look = Queue.withdraw

    def counted(queue: Queue, *args: object) -> object:
        nonlocal looks
        looks += 1
        return look(queue, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Queue, "withdraw", counted)
    entries: list[Entry] = []
    removed: list[Entry] = []
    for now_us in range(0, 1_000_000, 100):
        entries.append(withdraw(scheduler, f"nobody-{now_us}"))
        removed += scheduler.carry_out_withdrawals(now_us).entries
    assert looks <= 1 + 1_000_000 // (PAUSE_US * WAITING)
    assert removed == entries[: len(removed)] and len(removed) > len(entries) - WAITING


def test_lone_withdrawal_is_carried_out_at_once() -> None:
    scheduler = scheduler_with(WAITING, "a")
    entry = withdraw(scheduler, "a")
    withdrawn = scheduler.carry_out_withdrawals(0)
    assert (names_of(withdrawn), withdrawn.entries) == (["a"], [entry])
    assert scheduler.wake_at_us() is None


def test_withdrawal_during_the_pause_is_carried_out_when_it_ends() -> None:
    """Expect its entry to be kept until then: another batcher must find it, should this one end."""
    scheduler = scheduler_with(WAITING, "a")
    withdraw(scheduler, "nobody")
    scheduler.carry_out_withdrawals(0)
    entry = withdraw(scheduler, "a")
    assert scheduler.carry_out_withdrawals(1) == ((), [], ())
    pause_ends_us = scheduler.wake_at_us()
    assert pause_ends_us == PAUSE_US * (WAITING + 1)
    withdrawn = scheduler.carry_out_withdrawals(pause_ends_us)
    assert (names_of(withdrawn), withdrawn.entries) == (["a"], [entry])


def test_pause_ends_when_as_many_are_withdrawn_as_wait() -> None:
    """So that few IDs are kept, and no withdrawal is held up by a long queue that is gone."""
    scheduler = scheduler_with(WAITING)
    withdraw(scheduler, "nobody")
    scheduler.carry_out_withdrawals(0)
    withdraw(scheduler, *(f"other-{number}" for number in range(WAITING - 2)))
    assert scheduler.carry_out_withdrawals(1).entries == ()
    withdraw(scheduler, f"other-{WAITING - 1}")
    assert len(names_of(scheduler.carry_out_withdrawals(1))) == WAITING - 1


def test_request_that_arrives_after_its_withdrawal_waits() -> None:
    """Given a pause, and a request sent again after it was withdrawn, expect only the first to be found."""
    scheduler = scheduler_with(WAITING)
    first, second = run("a b"), run("b a")
    withdraw(scheduler, "nobody")
    scheduler.carry_out_withdrawals(0)
    scheduler.offer(first, 1)
    withdraw(scheduler, "a")
    scheduler.offer(second, 1)
    withdrawn = scheduler.carry_out_withdrawals(1_000_000)
    assert [(one.entry, one.correlation_ids) for one in withdrawn.refusals] == [(first.entry, ["a"])]
    assert (first.correlation_ids, second.correlation_ids) == (["b"], ["b", "a"])
    # When it is withdrawn again, it is found.
    withdraw(scheduler, "a")
    assert names_of(scheduler.carry_out_withdrawals(2_000_000)) == ["a"]
    assert second.correlation_ids == ["b"]


def test_last_of_several_withdrawals_of_one_id_counts() -> None:
    scheduler = scheduler_with(WAITING)
    withdraw(scheduler, "nobody")
    scheduler.carry_out_withdrawals(0)
    withdraw(scheduler, "a")
    scheduler.offer(run("a"), 1)
    withdraw(scheduler, "a")
    later = run("a")
    scheduler.offer(later, 1)
    assert names_of(scheduler.carry_out_withdrawals(1_000_000)) == ["a"]
    assert scheduler.queue.count == WAITING + 1
    assert later.correlation_ids == ["a"]


# --- in flight -------------------------------------------------------------------------------------------


def stepping_with_in_flight(*names: str) -> Scheduler:
    """A scheduler of a stepping model with a stream in flight for each name."""
    scheduler = Scheduler(ModelSettings(max_batch_size=8), model_processes=1, kind=ModelKind.STEPPING)
    for number, name in enumerate(names, 1):
        scheduler.in_flight.adopt(str(number), Dispatch([run(name)], "full", ""), 0)
    return scheduler


def cancelled(scheduler: Scheduler, now_us: int = 0) -> list[tuple[str, str]]:
    found = scheduler.carry_out_withdrawals(now_us).cancelled
    return [(one.batch_id, one.run.correlation_ids[0]) for one in found]


def test_stream_in_flight_is_cancelled_once() -> None:
    """A flood of withdrawals of one stream costs one answer."""
    scheduler = stepping_with_in_flight("a", "b", "a")
    withdraw(scheduler, "a", "nobody")
    assert cancelled(scheduler) == [("1", "a"), ("3", "a")]
    withdraw(scheduler, "a")
    assert cancelled(scheduler) == []
    settle(scheduler, "1", 0, 0)
    withdraw(scheduler, "b")
    assert cancelled(scheduler) == [("2", "b")]


def test_settled_stream_is_not_cancelled_and_not_remembered() -> None:
    scheduler = stepping_with_in_flight("a", "b")
    settle(scheduler, "1", 0, 0)
    scheduler.in_flight.forget("2", 0)
    withdraw(scheduler, "a", "b")
    assert cancelled(scheduler) == []
    assert not scheduler.in_flight._cancellable._by_id


def test_stream_dispatched_during_the_pause_is_cancelled() -> None:
    """Given a withdrawal that found nothing in flight, and a pause, expect what was dispatched meanwhile."""
    scheduler = stepping_with_in_flight()
    for number in range(20):
        scheduler.offer(run(f"other-{number}"), 0)
    withdraw(scheduler, "nobody")
    scheduler.carry_out_withdrawals(0)
    withdraw(scheduler, "other-0")
    assert cancelled(scheduler, 1) == []
    (first, *others) = [one for one in scheduler.poll(1) if isinstance(one, Dispatch)]
    scheduler.in_flight.launch("first", first, 1)
    for number, dispatch in enumerate(others):
        scheduler.in_flight.launch(str(number), dispatch, 1)
    assert cancelled(scheduler, 1_000_000) == [("first", "other-0")]


def test_withdrawal_reaches_what_an_async_model_executes() -> None:
    """Given a batch of two runs, expect that one request of each is cancelled, at its position, and once."""
    scheduler = Scheduler(ModelSettings(max_concurrent_batches=2), 1)
    for names in ("a b c", "d e"):
        assert scheduler.offer(run(names), 0) == []
    (dispatch,) = [decision for decision in scheduler.poll(0) if isinstance(decision, Dispatch)]
    scheduler.in_flight.launch("1", dispatch, 0)
    for expected in ({("1", 1, "b"), ("1", 3, "d")}, set()):
        withdraw(scheduler, "b", "d", "nobody")
        cancelled = scheduler.carry_out_withdrawals(0).cancelled
        assert {(one.batch_id, one.position, *one.run.correlation_ids) for one in cancelled} == expected
    settle(scheduler, "1", 1, 1)
    withdraw(scheduler, "a")
    assert scheduler.carry_out_withdrawals(0).cancelled == []


def test_withdrawal_does_not_reach_what_another_model_executes() -> None:
    scheduler = Scheduler(ModelSettings(), 1)
    scheduler.offer(run("a"), 0)
    (dispatch,) = [decision for decision in scheduler.poll(0) if isinstance(decision, Dispatch)]
    scheduler.in_flight.launch("1", dispatch, 0)
    withdraw(scheduler, "a")
    assert scheduler.carry_out_withdrawals(0).cancelled == []
