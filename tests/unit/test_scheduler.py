"""The rules by which batches leave, one at a time. `tests/simulation` has them all at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from carpool.messages import Entry, Refusal, Request
from carpool.model_settings import ModelSettings
from carpool_batcher.core.queue import MAX_BATCH_BYTES
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler

MS = 1000


class Desk:
    """A scheduler that is spoken to in milliseconds, and of which only names are asked.

    A request is its correlation ID. `poll` carries out what it is told: "full: a b" is a batch that left,
    "DEADLINE_EXCEEDED: a" a refusal, and "expired: a" a request in flight that is answered.
    """

    def __init__(self, workers: int = 1, **settings: Any) -> None:
        self.scheduler = Scheduler(ModelSettings(**settings), workers)
        self.entry_ids = itertools.count(1)
        self.batch_ids = itertools.count(1)

    def offer(self, names: str, at: float = 0, **traits: Any) -> list[Refusal]:
        """One entry with these requests arrives; returns those that may not wait."""
        return self.offer_requests(requests(names, at, f"{next(self.entry_ids)}-0", **traits), at)

    def offer_requests(self, offered: Iterable[Request], at: float) -> list[Refusal]:
        refusals = [self.scheduler.offer(one, int(at * MS)) for one in offered]
        return [one for one in refusals if one is not None]

    def poll(self, at: float = 0) -> list[str]:
        """What is due by now, with every batch departed: the first is "1", the next "2"."""
        said: list[str] = []
        for one in self.scheduler.poll(int(at * MS)):
            if isinstance(one, Dispatch):
                self.scheduler.launch(str(next(self.batch_ids)), one, int(at * MS))
                said.append(f"{one.reason}: {names_of(one.requests)}")
            elif isinstance(one, Expire):
                said.append(f"expired: {one.request.correlation_id}")
            else:
                said.append(f"{one.status}: {one.correlation_id}")
        return said

    def settle(self, batch: int, at: float = 0) -> None:
        self.scheduler.settle(str(batch), 0, int(at * MS))

    def wake_at_ms(self) -> float | None:
        wake_us = self.scheduler.wake_at_us()
        return None if wake_us is None else wake_us / MS


def requests(
    names: str, at: float = 0, entry_id: str = "1-0", *, expiration: float | None = None, **traits: Any
) -> list[Request]:
    """One entry's requests, which arrived at `at`."""
    entry = Entry(entry_id, int(at * MS))
    deadline_us = None if expiration is None else int((at + expiration) * MS)
    traits.setdefault("body", b"x")
    entry.requests = [
        Request(entry, name, arrival_us=entry.arrival_us, deadline_us=deadline_us, **traits)
        for name in names.split()
    ]
    return entry.requests


def names_of(some: Sequence[Request]) -> str:
    return " ".join(one.correlation_id for one in some)


# --- why a batch leaves ------------------------------------------------------------------------------------


def test_nothing_waits_nothing_leaves() -> None:
    desk = Desk()
    assert desk.poll(5) == []
    assert desk.wake_at_ms() is None


def test_idle_a_free_worker_gets_what_there_is() -> None:
    desk = Desk(max_batch_size=4)
    desk.offer("a")
    desk.offer("b")
    assert desk.poll() == ["idle: a b"]


def test_delay_the_oldest_waits_for_company_so_long_and_no_longer() -> None:
    desk = Desk(max_batch_size=4, max_queue_delay_ms=2.5)
    desk.offer("a", at=10)
    desk.offer("b", at=11)
    # It counts from the first arrival, and the loop is told when to come back.
    assert desk.wake_at_ms() == 12.5
    assert desk.poll(12.499) == []
    assert desk.poll(12.5) == ["delay: a b"]


def test_full_the_delay_does_not_matter() -> None:
    desk = Desk(max_batch_size=2, max_queue_delay_ms=1000)
    desk.offer("a b c")
    assert desk.poll() == ["full: a b"]


def test_full_by_cost() -> None:
    desk = Desk(max_batch_cost=10, max_queue_delay_ms=1000)
    desk.offer("a", cost=4)
    desk.offer("b", cost=5)
    assert desk.poll() == []
    desk.offer("c", cost=1)
    assert desk.poll() == ["full: a b c"]


def test_full_by_cost_the_first_that_would_pass_the_limit_stays() -> None:
    desk = Desk(workers=2, max_batch_cost=10)
    desk.offer("a", cost=6)
    desk.offer("b", cost=6)
    desk.offer("c", cost=3)
    # c would still fit beside a, but it would overtake b.
    assert desk.poll() == ["full: a", "idle: b c"]


def test_full_by_bytes() -> None:
    half = bytes(MAX_BATCH_BYTES // 2)
    desk = Desk(workers=2, max_queue_bytes=4 * MAX_BATCH_BYTES, max_queue_delay_ms=1000)
    desk.offer("a b", body=half)
    desk.offer("c")
    assert desk.poll() == ["full: a b"]


def test_fields_that_the_model_reads_count_as_bytes() -> None:
    extra = {"image": bytes(MAX_BATCH_BYTES // 2)}
    desk = Desk(workers=3, max_queue_bytes=2 * MAX_BATCH_BYTES)
    assert desk.offer("a b c", extra=extra) == []
    assert [one.correlation_id for one in desk.offer("d", extra=extra)] == ["d"]
    assert desk.poll() == ["full: a", "full: b", "idle: c"]
    assert desk.scheduler.waiting_bytes == 0


def test_deadline_it_leaves_before_the_delay_ends() -> None:
    desk = Desk(max_batch_size=4, max_queue_delay_ms=1000)
    desk.offer("a")
    desk.offer("b", at=1, expiration=50)
    # Two milliseconds are kept for the ride, of which nothing is known yet.
    assert desk.wake_at_ms() == 49
    assert desk.poll(48) == []
    assert desk.poll(49) == ["deadline: a b"]


def test_deadline_what_a_ride_takes_is_learned() -> None:
    desk = Desk(max_queue_delay_ms=1000)
    # Given a batch that took 20 ms from dispatch to settled
    desk.offer("a", expiration=10)
    assert desk.poll(8) == ["deadline: a"]
    desk.settle(1, at=28)
    assert desk.poll(28) == []
    # Then the next leaves one and a half rides, and 2 ms, before its deadline
    desk.offer("b", at=100, expiration=100)
    assert desk.wake_at_ms() == 200 - 30 - 2


def test_deadline_a_longer_ride_is_believed_at_once_and_a_shorter_one_by_and_by() -> None:
    desk = Desk(max_queue_delay_ms=10_000)
    leads: list[float] = []
    for number, took in enumerate((10, 20, 10, 10), 1):
        start = 1000 * number
        desk.offer("a", at=start, expiration=0.5)
        assert desk.poll(start) == ["deadline: a"]
        desk.settle(number, at=start + took)
        desk.poll(start + took)
        desk.offer("b", at=start + 100, expiration=800)
        leads.append(start + 900 - (desk.wake_at_ms() or 0))
        desk.scheduler.withdraw(frozenset("b"))
        desk.poll(start + 900)
    assert leads == [pytest.approx(1.5 * ride + 2, abs=0.01) for ride in (10, 20, 19, 18.1)]


def test_a_deadline_that_cannot_wait_leaves_at_once() -> None:
    desk = Desk(max_queue_delay_ms=1000)
    desk.offer("a", at=5, expiration=1)
    assert desk.poll(5) == ["deadline: a"]


def test_settings_change_who_waits_for_company_from_now_on_still_leaves_in_time() -> None:
    desk = Desk()
    desk.offer("a")
    assert desk.poll() == ["idle: a"]
    # Given one that waits for the worker, not for company
    desk.offer("b", expiration=100)
    assert desk.poll(1) == []
    # When the model is told to wait for company, and the worker is free
    desk.settle(1, at=2)
    desk.scheduler.settings = ModelSettings(max_queue_delay_ms=1000)
    assert desk.poll(2) == []
    # Then it does not wait until its deadline
    assert desk.wake_at_ms() == 100 - 1.5 * 2 - 2
    assert desk.poll(95) == ["deadline: b"]


def test_settings_change_smaller_batches_and_no_delay_hold_for_whoever_waits() -> None:
    desk = Desk(workers=1, max_batch_size=8, max_queue_delay_ms=1000)
    desk.offer("a b c")
    assert desk.poll() == []
    desk.scheduler.settings = ModelSettings(max_batch_size=2)
    assert desk.poll() == ["full: a b"]
    desk.settle(1)
    assert desk.poll() == ["idle: c"]


# --- whereto -----------------------------------------------------------------------------------------------


def test_without_workers_nothing_leaves() -> None:
    desk = Desk(workers=0, max_batch_size=1)
    desk.offer("a")
    assert desk.poll(100) == []
    assert desk.wake_at_ms() is None  # a worker that comes is an event, not a time
    desk.scheduler.model_processes = 1
    assert desk.poll(100) == ["full: a"]


def test_a_busy_worker_gets_no_second_batch_until_it_settles() -> None:
    desk = Desk(max_batch_size=4)
    desk.offer("a")
    assert desk.poll() == ["idle: a"]
    desk.offer("b")
    desk.offer("c")
    assert desk.poll(50) == []
    assert desk.wake_at_ms() is None
    desk.settle(1)
    assert desk.poll(51) == ["idle: b c"]


def test_a_busy_worker_gets_one_more_if_it_is_full_and_never_two() -> None:
    desk = Desk(max_batch_size=2)
    desk.offer("a b c d e f")
    assert desk.poll() == ["full: a b", "full: c d"]
    desk.settle(1)
    assert desk.poll() == ["full: e f"]


def test_a_full_batch_goes_ahead_of_a_lane_that_comes_first_but_has_to_wait() -> None:
    desk = Desk(max_batch_size=2)
    desk.offer("a")
    assert desk.poll() == ["idle: a"]
    # Given a busy worker, an urgent request alone in its lane, and a full batch of others
    desk.offer("b", lane="urgent", priority=9)
    desk.offer("c d")
    assert desk.poll() == ["full: c d"]


def test_room_is_for_each_model_process() -> None:
    desk = Desk(workers=2, max_batch_size=8)
    desk.offer("a")
    assert desk.poll() == ["idle: a"]
    desk.offer("b")
    assert desk.poll() == ["idle: b"]
    desk.offer("c")
    assert desk.poll() == []


def test_a_batch_of_which_nobody_was_left_takes_no_room() -> None:
    desk = Desk()
    desk.offer("a")
    (dispatch,) = desk.scheduler.poll(0)
    assert isinstance(dispatch, Dispatch)
    desk.offer("b")
    assert desk.poll() == []
    desk.scheduler.cancel()
    assert desk.poll() == ["idle: b"]


def test_what_is_not_known_to_ride_settles_nothing() -> None:
    desk = Desk()
    desk.offer("a b")
    assert desk.poll() == ["idle: a b"]
    desk.offer("c")
    desk.settle(7)
    assert desk.poll() == []
    desk.settle(1)
    desk.settle(1)  # a word that comes twice makes room once
    assert desk.poll() == ["idle: c"]
    desk.offer("d")
    assert desk.poll() == []


def test_batches_found_in_flight_by_a_batcher_that_takes_over_take_room() -> None:
    desk = Desk()
    desk.scheduler.adopt("found", Dispatch(requests("a"), "idle", ""), dispatched_us=-5 * MS)
    desk.offer("b")
    assert desk.poll() == []
    desk.scheduler.forget_batch("found", 10 * MS)
    assert desk.poll(10) == ["idle: b"]


# --- who leaves --------------------------------------------------------------------------------------------


def test_first_in_first_out() -> None:
    desk = Desk(max_batch_size=2)
    for at, name in enumerate("abc"):
        desk.offer(name, at=at)
    assert desk.poll(3) == ["full: a b"]


def test_higher_priority_first_then_arrival() -> None:
    desk = Desk(max_batch_size=4)
    desk.offer("low", priority=0)
    desk.offer("a")
    desk.offer("high", priority=9)
    desk.offer("b")
    desk.offer("c")
    assert desk.poll() == ["full: high a b c"]


def test_requests_put_back_keep_their_place() -> None:
    desk = Desk(max_batch_size=8, max_queue_delay_ms=10)
    desk.offer("b c", at=20)
    desk.offer("d", at=21)
    assert desk.wake_at_ms() == 30
    # When the rest of an entry, of which another batcher took some, comes back under a later ID
    desk.offer_requests(requests("a1 a2", at=19, entry_id="9-0"), at=22)
    # Then they are waited for from their own arrival, and leave in its order
    assert desk.wake_at_ms() == 29
    assert desk.poll(29) == ["delay: a1 a2 b c d"]


def test_lanes_never_mix() -> None:
    desk = Desk(workers=3, max_batch_size=8)
    desk.offer("a", lane="cats")
    desk.offer("b")
    desk.offer("c", lane="cats")
    assert desk.poll() == ["idle: b", "idle: a c"]


def test_alternating_lanes_do_not_close_each_others_batches() -> None:
    desk = Desk(workers=2, max_batch_size=3, max_queue_delay_ms=1000)
    for at in range(3):
        desk.offer(f"a{at}", at=at, lane="a")
        desk.offer(f"b{at}", at=at, lane="b")
    assert desk.poll(3) == ["full: a0 a1 a2", "full: b0 b1 b2"]


def test_lanes_share_the_room_by_priority_then_by_age() -> None:
    desk = Desk(max_batch_size=8)
    desk.offer("new", at=2, lane="new")
    desk.offer("old", at=1, lane="old")
    desk.offer("urgent", at=3, lane="urgent", priority=5)
    order = []
    for batch in range(1, 4):
        order += desk.poll(3)
        desk.settle(batch, at=3)
    assert order == ["idle: urgent", "idle: old", "idle: new"]


def test_a_lane_that_was_emptied_is_forgotten() -> None:
    desk = Desk(workers=2000, max_batch_size=2)
    for number in range(1000):
        desk.offer("a", lane=f"dispatched {number}")
        desk.offer("b", lane=f"withdrawn {number}", expiration=1)
    desk.scheduler.withdraw(frozenset("b"))
    desk.poll()
    assert len(desk.scheduler._queue.lanes) == 1


# --- deadlines ---------------------------------------------------------------------------------------------


def test_who_still_waits_at_the_deadline_is_answered_then() -> None:
    desk = Desk(workers=0)
    desk.offer("a", at=10, expiration=30)
    desk.offer("b", at=10, expiration=60)
    desk.offer("c", at=10)
    assert desk.wake_at_ms() == 40
    assert desk.poll(39.999) == []
    (refusal,) = desk.scheduler.poll(40 * MS)
    assert isinstance(refusal, Refusal)
    assert refusal.status == "DEADLINE_EXCEEDED"
    assert refusal.detail == "expired: still waiting 30 ms after its arrival"
    assert desk.wake_at_ms() == 70
    # And it leaves with nobody afterwards
    desk.scheduler.model_processes = 1
    assert desk.poll(50) == ["idle: b c"]


def test_a_deadline_is_looked_at_before_anybody_leaves() -> None:
    desk = Desk(workers=0, max_batch_size=2)
    desk.offer("a", expiration=10)
    desk.offer("b c")
    desk.scheduler.model_processes = 1
    # When the batcher was busy elsewhere for longer than that
    assert desk.poll(25) == ["DEADLINE_EXCEEDED: a", "full: b c"]


def test_a_deadline_that_passed_before_the_request_was_read() -> None:
    for delay in (0, 50):
        desk = Desk(max_queue_delay_ms=delay)
        desk.offer("a", at=10, expiration=5)
        assert desk.poll(20) == ["DEADLINE_EXCEEDED: a"]


def test_who_is_in_flight_at_the_deadline_is_answered_once_and_the_batch_goes_on() -> None:
    desk = Desk()
    desk.offer("a", expiration=30)
    desk.offer("b")
    desk.offer("c", expiration=10)
    assert desk.poll() == ["idle: a b c"]
    # The first deadline of the batch is looked at, then the next
    assert desk.wake_at_ms() == 10
    (expire,) = desk.scheduler.poll(10 * MS)
    assert isinstance(expire, Expire)
    assert (expire.batch_id, expire.position, expire.request.correlation_id) == ("1", 2, "c")
    assert desk.poll(11) == []
    assert desk.wake_at_ms() == 30
    assert desk.poll(30) == ["expired: a"]
    assert desk.poll(31) == []
    # It still has its room, until it settles
    desk.offer("d")
    assert desk.poll(32) == []
    desk.settle(1, at=33)
    assert desk.poll(33) == ["idle: d"]


def test_who_settled_does_not_expire() -> None:
    desk = Desk()
    desk.offer("a", expiration=30)
    assert desk.poll() == ["idle: a"]
    desk.settle(1, at=5)
    assert desk.poll(30) == []
    assert desk.wake_at_ms() is None


def test_deadlines_of_a_batch_found_in_flight_are_kept() -> None:
    desk = Desk()
    riders = [*requests("a"), *requests("b", expiration=20), *requests("c", expiration=-5)]
    desk.scheduler.adopt("found", Dispatch(riders, "idle", ""), dispatched_us=-10 * MS)
    assert desk.poll(0) == ["expired: c"]
    assert desk.wake_at_ms() == 20
    assert desk.poll(20) == ["expired: b"]


# --- who may not wait --------------------------------------------------------------------------------------


def test_results_that_are_held_take_up_the_queue() -> None:
    desk = Desk(workers=0, max_queue_size=3)
    desk.scheduler.set_withheld(2)
    assert desk.offer("a") == []
    (refusal,) = desk.offer("b")
    assert refusal.detail == (
        "the queue is full: 1 requests wait, 2 results are held until those before them are done "
        "(max_queue_size); try again later"
    )
    desk.scheduler.set_withheld(1)
    assert desk.offer("c") == []


def test_the_queue_is_full_the_newest_is_refused() -> None:
    desk = Desk(workers=0, max_queue_size=2)
    assert desk.offer("a b") == []
    (refusal,) = desk.offer("c", reply_to="me", content_type="application/msgpack")
    assert refusal.status == "RESOURCE_EXHAUSTED"
    assert refusal.detail == "the queue is full: 2 requests wait (max_queue_size); try again later"
    # It is answered where it asked to be
    assert (refusal.correlation_id, refusal.reply_to, refusal.content_type) == (
        "c",
        "me",
        "application/msgpack",
    )
    assert refusal.request is not None and refusal.entry is refusal.request.entry
    # Queue requests of all lanes and priorities count, and who leaves makes room
    desk.scheduler.model_processes = 1
    assert desk.poll() == ["idle: a b"]
    assert desk.offer("d") == []


def test_the_queue_is_full_by_bytes() -> None:
    desk = Desk(workers=0, max_queue_bytes=10)
    assert desk.offer("a b", body=b"12345") == []
    assert desk.scheduler.waiting_bytes == 10
    (refusal,) = desk.offer("c", body=b"1")
    assert refusal.status == "RESOURCE_EXHAUSTED"
    assert refusal.detail == "the queue is full: 10 bytes wait (max_queue_bytes); try again later"
    assert desk.offer("d", body=b"") == []


def test_what_fits_in_no_batch_is_refused() -> None:
    desk = Desk(max_batch_cost=10)
    (refusal,) = desk.offer("a", cost=11)
    assert refusal.status == "INVALID_ARGUMENT"
    assert refusal.detail == "cost: 11 is over this model's max_batch_cost 10"
    assert desk.offer("b", cost=10) == []


def test_who_was_refused_is_nowhere() -> None:
    desk = Desk(workers=1, max_queue_size=1)
    desk.offer("a b")
    assert desk.scheduler.waiting == 1
    assert desk.poll() == ["idle: a"]
    desk.settle(1)
    assert desk.poll() == []


# --- who leaves otherwise ----------------------------------------------------------------------------------


def test_who_waits_may_be_withdrawn_and_who_rides_rides_on() -> None:
    desk = Desk(max_batch_size=2)
    desk.offer("a b")
    assert desk.poll() == ["full: a b"]
    desk.offer("c d", lane="x", expiration=50)
    refusals = desk.scheduler.withdraw(frozenset({"a", "c", "nobody"}))
    assert [(one.correlation_id, one.status) for one in refusals] == [("c", "CANCELLED")]
    assert refusals[0].detail == "withdrawn by its producer"
    desk.settle(1)
    assert desk.poll() == ["idle: d"]


def test_who_is_gone_from_redis_is_forgotten_without_a_word() -> None:
    desk = Desk(workers=0)
    mine = requests("a b c", expiration=10)
    desk.offer_requests(mine, at=0)
    desk.scheduler.forget([mine[0], mine[2]])
    desk.scheduler.forget(mine[:1])  # twice is fine
    assert (desk.scheduler.waiting, desk.scheduler.waiting_bytes) == (1, 1)
    assert desk.poll(10) == ["DEADLINE_EXCEEDED: b"]


def test_a_forgotten_request_hurries_nobody() -> None:
    desk = Desk(workers=0, max_queue_delay_ms=1000)
    desk.offer("a", expiration=100)
    desk.offer("b")
    assert desk.poll(98) == []  # a is in a hurry now
    desk.scheduler.withdraw(frozenset("a"))
    desk.scheduler.model_processes = 1
    assert desk.poll(99) == []
    assert desk.poll(1000) == ["delay: b"]


# --- what a model may say of it ----------------------------------------------------------------------------


def known(desk: Desk, *, intercept: float = 10, slope: float = 1, lane: str = "", until: float = 0) -> Desk:
    """l(n) of a lane was learned until then: so many milliseconds; there is no way to speak of."""
    for at, size in enumerate((1, 11, 1, 11)):
        compute_us, settled_us = int((intercept + slope * size) * MS), int(until * MS)
        riders = requests("x " * size, lane=lane)
        before = Dispatch(riders, "idle", lane)
        desk.scheduler.adopt(f"before {at}", before, dispatched_us=settled_us - compute_us)
        desk.scheduler.settle(f"before {at}", compute_us, settled_us)
    return desk


def test_preferred_the_largest_size_that_can_be_filled() -> None:
    desk = Desk(workers=3, max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay_ms=10)
    desk.offer("a")
    assert desk.poll() == []
    desk.offer("b c d e f g")
    assert desk.poll() == ["preferred: a b c d", "preferred: e f"]
    # Past the delay what there is goes
    assert desk.wake_at_ms() == 10
    assert desk.poll(10) == ["delay: g"]


def test_preferred_sizes_over_the_largest_are_never_reached() -> None:
    desk = Desk(workers=3, max_batch_size=2, preferred_batch_sizes=(4,), max_queue_delay_ms=10)
    desk.offer("a b c d e")
    assert desk.poll() == ["full: a b", "full: c d"]
    assert desk.poll(10) == ["delay: e"]


def test_preferred_waits_for_an_idle_process_or_one_that_soon_is() -> None:
    desk = known(Desk(preferred_batch_sizes=(2,), max_queue_delay_ms=1000), slope=0)
    desk.offer("a b")
    assert desk.poll() == ["preferred: a b"]
    desk.offer("c d")
    assert desk.poll(1) == []
    assert desk.wake_at_ms() == 10  # and not only when the delay of c ends
    assert desk.poll(10) == ["preferred: c d"]


def test_a_busy_worker_gets_its_next_batch_just_before_it_is_free() -> None:
    desk = known(Desk())
    desk.offer("a b c d")
    assert desk.poll() == ["idle: a b c d"]
    desk.offer("e", at=1)
    assert desk.wake_at_ms() == pytest.approx(14, abs=0.01)
    assert desk.poll(13.9) == []
    desk.offer("f", at=13.9)
    assert desk.poll(14.1) == ["idle: e f"]


def test_a_priority_may_have_a_smaller_queue() -> None:
    desk = Desk(workers=0, max_queue_size=4, priority_policies={0: {"max_queue_size": 1}})
    assert desk.offer("a", priority=0) == []
    (refusal,) = desk.offer("b", priority=0)
    assert (refusal.status, refusal.reason) == ("RESOURCE_EXHAUSTED", "queue_size")
    assert refusal.detail == "the queue is full for priority 0 (priority_policies); try again later"
    # Others have what the model allows, and those of that priority again when there is room
    assert [one.correlation_id for one in desk.offer("c d e f", priority=4)] == ["f"]
    desk.scheduler.withdraw(frozenset("ac"))
    assert desk.offer("g", priority=0) == []


def test_delay_who_has_expired_goes_behind_all_others_and_is_never_answered_by_the_clock() -> None:
    desk = Desk(workers=0, max_batch_size=2, expiration_action="delay")
    desk.offer("late", expiration=10, priority=9)
    assert desk.poll(10) == []
    desk.offer("a b", at=11, expiration=10, priority=0)
    desk.scheduler.model_processes = 1
    assert desk.poll(12) == ["full: a b"]
    assert desk.poll(50) == []
    desk.settle(1, at=60)
    assert desk.poll(60) == ["idle: late"]
    assert desk.poll(1000) == []
    assert desk.wake_at_ms() is None


def test_delay_who_is_late_already_stays_so_when_settings_change() -> None:
    desk = Desk(workers=0, expiration_action="delay")
    desk.offer("late", expiration=10)
    assert desk.poll(10) == []
    desk.scheduler.settings = ModelSettings(expiration_action="reject", max_queue_delay_ms=5)
    desk.scheduler.model_processes = 1
    assert desk.poll(20) == ["delay: late"]
    assert desk.poll(30) == []


def test_delay_who_is_late_already_is_not_given_up_when_settings_change() -> None:
    desk = known(Desk(workers=0, expiration_action="delay", policy="deferred"))
    desk.offer("late", expiration=10)
    assert desk.poll(10) == []
    desk.offer("a", at=15, expiration=100)
    desk.scheduler.settings = ModelSettings(expiration_action="reject", policy="deferred")
    desk.scheduler.model_processes = 1
    assert desk.poll(102) == ["deadline: a late"]


def test_deferred_a_batch_leaves_as_late_as_its_deadlines_allow() -> None:
    desk = known(Desk(max_batch_size=100, policy="deferred"))
    desk.offer("a", expiration=50)
    assert desk.wake_at_ms() == pytest.approx(50 - 12, abs=0.01)  # when two would just be in time
    desk.offer("b", at=20, expiration=50)
    assert desk.wake_at_ms() == pytest.approx(50 - 13, abs=0.01)
    assert desk.poll(30) == []
    assert desk.poll(37.1) == ["deadline: a b"]


def test_deferred_who_cannot_be_met_is_told_before_anything_is_computed() -> None:
    desk = known(Desk(workers=0, max_batch_size=8, policy="deferred"))
    desk.offer("hopeless", expiration=19)
    desk.offer("a", expiration=25)
    desk.scheduler.model_processes = 1
    (refused, dispatched) = desk.scheduler.poll(13 * MS)
    assert isinstance(refused, Refusal)
    assert (refused.correlation_id, refused.status, refused.reason) == (
        "hopeless",
        "DEADLINE_EXCEEDED",
        "early",
    )
    assert refused.detail == "expired: it could not have been computed in the 6 ms that were left"
    assert isinstance(dispatched, Dispatch)
    assert names_of(dispatched.requests) == "a"


def test_deferred_more_hopeless_ones_than_are_looked_at_are_all_told() -> None:
    desk = known(Desk(workers=0, max_batch_size=2, policy="deferred"))
    desk.offer(" ".join(f"h{number}" for number in range(30)), expiration=19)
    desk.scheduler.model_processes = 1
    assert desk.poll(13) == [f"DEADLINE_EXCEEDED: h{number}" for number in range(30)]


def fast_and_slow(workers: int = 1, **settings: Any) -> Desk:
    """10 + n ms in one lane, ten times as much in the other."""
    desk = Desk(workers=workers, policy="deferred", **settings)
    known(desk, lane="fast")
    return known(desk, intercept=100, slope=10, lane="slow")


def test_lanes_leave_each_as_late_as_its_own_pace_allows() -> None:
    desk = fast_and_slow(workers=2, max_batch_size=100)
    desk.offer("f", expiration=500, lane="fast")
    assert desk.wake_at_ms() == pytest.approx(500 - 12, abs=0.01)
    desk.offer("s", expiration=500, lane="slow")
    assert desk.wake_at_ms() == pytest.approx(500 - 120, abs=0.01)
    assert desk.poll(380.1) == ["deadline: s"]
    assert desk.poll(488.1) == ["deadline: f"]


def test_lanes_nobody_is_given_up_for_the_pace_of_another() -> None:
    desk = fast_and_slow(workers=0, max_batch_size=8)
    desk.offer("f", expiration=20, lane="fast")
    desk.offer("s", expiration=100, lane="slow")
    desk.scheduler.model_processes = 2
    assert desk.poll(8) == ["deadline: f", "DEADLINE_EXCEEDED: s"]


def test_lanes_are_efficient_each_at_its_own_size() -> None:
    desk = known(Desk(policy="deferred", max_batch_size=8), intercept=0, slope=10, lane="alike")
    known(desk, intercept=100, slope=0, lane="together")
    desk.offer("a", expiration=900, lane="alike")
    desk.offer("b", expiration=900, lane="together")
    assert desk.poll(1) == ["efficient: a"]


def test_lanes_a_process_is_free_by_the_pace_of_what_it_rides() -> None:
    desk = fast_and_slow()
    desk.scheduler.settings = ModelSettings()
    desk.offer("f", lane="fast")
    assert desk.poll() == ["idle: f"]
    desk.offer("s", lane="slow")
    assert desk.wake_at_ms() == pytest.approx(11, abs=0.01)
    assert desk.poll(11.1) == ["idle: s"]  # ahead: it is begun when the first is heard of
    desk.settle(1, at=11)
    desk.offer("g", lane="fast")
    assert desk.wake_at_ms() == pytest.approx(11 + 110, abs=0.01)


def test_lanes_hurry_each_by_its_own_pace() -> None:
    desk = fast_and_slow(workers=0)
    desk.scheduler.settings = ModelSettings(max_queue_delay_ms=1000)
    desk.offer("f", expiration=500, lane="fast")
    assert desk.wake_at_ms() == pytest.approx(500 - 1.5 * 21 - 2, abs=5)
    desk.offer("s", expiration=500, lane="slow")
    assert desk.wake_at_ms() == pytest.approx(500 - 1.5 * 210 - 2, abs=20)


def test_a_lane_of_which_little_is_known_goes_by_the_model() -> None:
    desk = known(Desk(policy="deferred", max_batch_size=100))
    desk.offer("new", expiration=50, lane="new")
    assert desk.wake_at_ms() == pytest.approx(50 - 12, abs=0.01)


def test_trial_who_cannot_be_met_by_what_is_known_of_others_finds_out() -> None:
    desk = known(Desk(policy="deferred", max_batch_size=2), intercept=100, slope=10, lane="slow")
    for number in range(4):
        # Given that the model is known to take longer than they have, they are tried
        desk.offer(f"a{number} b{number}", at=40 * number, expiration=20, lane="fast")
        assert desk.poll(40 * number) == [f"full: a{number} b{number}"]
        # But only one batch at a time, ...
        desk.offer(f"c{number}", at=40 * number, expiration=20, lane="fast")
        desk.scheduler.model_processes = 2
        assert desk.poll(40 * number) == [f"DEADLINE_EXCEEDED: c{number}"]
        desk.scheduler.model_processes = 1
        # ... and not again at once
        desk.scheduler.settle(str(number + 1), 5 * MS, (40 * number + 5) * MS)
        if number < 3:
            desk.offer(f"d{number}", at=40 * number + 29, expiration=20, lane="fast")
            assert desk.poll(40 * number + 29) == [f"DEADLINE_EXCEEDED: d{number}"]
    # Then its own pace is known
    desk.offer("e", at=126, expiration=20, lane="fast")
    assert desk.poll(146 - 6) == []
    assert desk.poll(146 - 5) == ["deadline: e"]


def test_trial_what_was_seen_of_late_is_believed_and_then_found_out() -> None:
    desk = known(Desk(policy="deferred", max_batch_size=8), intercept=100)
    desk.offer("a", at=99, expiration=50)
    assert desk.poll(99) == ["DEADLINE_EXCEEDED: a"]
    desk.offer("b", at=100, expiration=50)
    assert desk.poll(100) == ["deadline: b"]


def test_deferred_what_is_only_aimed_at_or_delayed_is_no_reason_to_be_given_up() -> None:
    desk = known(Desk(workers=0, max_batch_size=8, policy="deferred", target_latency_ms=5))
    desk.offer("aims")
    desk.scheduler.model_processes = 1
    assert desk.poll(13) == ["deadline: aims"]
    desk = known(Desk(workers=0, max_batch_size=8, policy="deferred", expiration_action="delay"))
    desk.offer("served", expiration=19)
    desk.scheduler.model_processes = 1
    assert desk.poll(13) == ["deadline: served"]
    assert desk.poll(30) == []


# --- memory ------------------------------------------------------------------------------------------------


def test_alarms_of_requests_that_have_long_left_do_not_pile_up() -> None:
    desk = Desk(max_batch_size=1)
    for number in range(5000):
        desk.offer("a", at=number, expiration=3_600_000)
        assert desk.poll(number) == ["full: a"]
        desk.settle(number + 1, at=number)
    assert len(desk.scheduler._deadlines._heap) <= 1010
    # And the one that still waits is not forgotten among them
    desk.scheduler.model_processes = 0
    desk.offer("b", at=5000, expiration=10)
    assert desk.poll(5010) == ["DEADLINE_EXCEEDED: b"]


def test_alarms_do_not_keep_the_bodies_of_requests_that_have_long_left() -> None:
    desk = Desk(max_batch_size=4000, max_queue_bytes=1 << 40)
    body = bytes(1 << 20)
    for number in range(300):
        desk.offer("a b c d", at=number, expiration=3_600_000, body=body)
        assert desk.poll(number) == ["idle: a b c d"]
        desk.settle(number + 1, at=number)
    held = sum(len(one.body) for _, _, alarm in desk.scheduler._deadlines._heap for one in alarm.requests)
    assert held <= MAX_BATCH_BYTES + 4 * len(body)


def test_a_tidy_heap_of_alarms_still_takes_the_next_of_an_entry() -> None:
    desk = Desk(max_batch_size=1, workers=1)
    desk.offer("a", expiration=50)
    assert desk.poll() == ["full: a"]
    # Given that the alarms were tidied while nobody of the last one still waited
    desk.scheduler._deadlines._tidy()
    desk.settle(1)
    desk.scheduler.model_processes = 0
    # Then one with the same deadline is watched as well as any
    desk.offer("b", expiration=50)
    assert desk.poll(50) == ["DEADLINE_EXCEEDED: b"]


@pytest.mark.parametrize("lanes", [1, 2000])
def test_a_lane_of_each_request_is_dispatched_in_order_of_arrival(lanes: int) -> None:
    desk = Desk(workers=1, max_batch_size=1)
    for number in range(2000):
        desk.offer(str(number), at=number, lane=str(number % lanes))
    order = []
    for batch in range(1, 51):
        order += desk.poll(2000)
        desk.settle(batch, at=2000)
    assert order == [f"full: {number}" for number in range(len(order))]
