"""How many workers are wanted, by what is asked of a model and how it serves."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages.requests import Entry, Run
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.scheduler import Dispatch, Scheduler
from carpool_batcher.core.wanted_workers import (
    CORRECTION_MAX,
    UTILISATION_MAX,
    ArrivalRate,
    Bounds,
    Constant,
    Demand,
    Owed,
    Plan,
    Service,
    SlidingMaximum,
    WantedWorkers,
    servers_for,
)

SECOND_US = 1_000_000
LOOK_US = 250_000
SOON = Bounds(down_us=10 * SECOND_US, idle_us=20 * SECOND_US)


class Line:
    """l(n) = intercept + slope n."""

    def __init__(self, intercept_us: int, slope_us: int) -> None:
        self.intercept_us, self.slope_us = intercept_us, slope_us

    def of(self, size: int) -> int:
        return self.intercept_us + self.slope_us * size

    def at_most(self, size: int) -> int:
        return self.of(size)


SLOW = Service(
    1, 32, Line(80_000, 10_000), 20_000
)  # 32 requests take 400 ms, so a process serves 80 a second


class Watched:
    """A model that is looked at four times a second, with a worker of one process for each that is wanted."""

    def __init__(self, service: Service = SLOW, owed: Owed | None = None, bounds: Bounds = SOON) -> None:
        self.wanted, self.service, self.bounds = WantedWorkers(), service, bounds
        self.owed = owed or Owed(SECOND_US, None)
        self.now_us, self.arrived, self.there = 0, 0.0, 1

    def look(self, seconds: float, per_s: float = 0.0, there: int | None = None, **more: Any) -> int:
        """Look for some seconds, in which requests arrive at a rate. Returns how many workers are wanted."""
        for _ in range(round(seconds * SECOND_US / LOOK_US)):
            self.now_us += LOOK_US
            self.arrived += per_s * LOOK_US / SECOND_US
            number = self.there if there is None else there
            demand = Demand(self.now_us, number, number, int(self.arrived))._replace(**more)
            self.wanted.observe(demand, self.service, self.owed, self.bounds)
        if there is None:
            self.there = self.wanted.now.workers
        return self.wanted.now.workers


def test_a_clock_that_is_set_back_is_no_flood() -> None:
    """Another server of Redis may show an earlier time. The rate is the same, so as many are wanted."""
    watched = Watched()
    before = watched.look(120, per_s=200)
    watched.now_us -= 3600 * SECOND_US
    assert watched.look(600, per_s=200) <= before + 1
    assert watched.look(120, per_s=10) < before, "what was wanted before is not held for an hour"


# --- what arrives ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_s", "settled_ms", "expected"),
    [
        (1, None, 1),
        (60, None, 1),  # a process serves 80/s in full batches, of which four fifths are planned
        (70, None, 2),
        (600, None, 10),
        # In time within 500 ms: with one process a batch waits for the one before, so it has 16 at most (240
        # ms), and serves 66/s. With many nearly 32 are in time.
        (50, 500, 1),
        (60, 500, 2),
        (600, 500, 10),
        (10, 120, 5),  # only a batch of one is in time, 90 ms, and only if it hardly waits
    ],
)
def test_workers_for_a_rate_are_enough_for_its_deadlines(
    per_s: float, settled_ms: int | None, expected: int
) -> None:
    owed = Owed(SECOND_US, None if settled_ms is None else settled_ms * 1000)
    assert Watched(owed=owed).look(10, per_s) == expected


def test_length_of_the_queue_says_nothing_if_what_waits_is_done_soon() -> None:
    """Given 5,000 waiting requests of which a batch of 1,000 takes 100 ms, expect one worker."""
    fast = Service(1, 1000, Line(100_000, 0))
    assert Watched(fast).look(5, 100, waiting=5000) == 1


def test_what_waits_for_too_long_needs_more_unless_it_waits_for_a_moment() -> None:
    """Given 8,000 requests, 100 s of work for a process, expect so many that it takes as long as a worker
    needs to start. Given them at one look only, expect none more."""
    watched = Watched()
    watched.look(5, 10)
    assert watched.look(0.25, 10, waiting=8000) == 1
    watched.look(0.25, 10)
    assert watched.look(1, 10, waiting=8000) == 4


def test_rate_that_was_read_from_a_backlog_is_none() -> None:
    watched = Watched()
    watched.look(1, 100_000, is_reading=True)
    assert watched.look(10, 10) == 1


def test_impossible_deadline_wants_what_the_rate_needs() -> None:
    watched = Watched(owed=Owed(SECOND_US, 50_000))
    assert watched.look(60, 60, missed=10_000) == Watched().look(10, 60) == 1


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 100_000), st.integers(0, 20_000), st.integers(1, 64), st.integers(1, 3_000),
    st.integers(100_000, 3_000_000), st.integers(1, 4),
)  # fmt: skip
def test_processes_for_a_rate_serve_it_in_time_and_one_less_do_not(
    intercept_us: int, slope_us: int, size: int, per_s: int, wait_us: int, batches: int
) -> None:
    """Of batches: those that are in time have enough requests. More requests never need fewer processes."""
    service = Service(batches, size, Line(intercept_us, slope_us))
    plan = Plan(service, Owed(wait_us, None), 1)
    number = plan.processes_for(per_s / 1e6)
    assert 1 <= number <= plan.processes_for(1.5 * per_s / 1e6)
    load = per_s / 1e6 * service.times.of(1)
    alone = load * 1.25 <= batches * number

    def in_batches(processes: int) -> bool:
        sizes = (one for one in range(1, size + 1) if service.times.of(one) <= processes * batches * wait_us)
        best = max((one / service.times.of(one) for one in sizes), default=0.0)
        return UTILISATION_MAX * processes * batches * best >= per_s / 1e6 * (1 - 1e-9)

    assert alone or in_batches(number)
    if number > 1:
        assert not in_batches(number - 1) or size == 1


def test_servers_are_enough_for_all_but_one_in_a_hundred() -> None:
    """Compare with tables of Erlang's formula C: a load of 10 that must not wait needs 18 or more."""
    assert servers_for(10.0, 1, 0.0) == 19
    assert servers_for(10.0, 1, 1.0) == 14
    assert servers_for(0.005, 1, 0.0) == 1
    assert servers_for(0.05, 1, 0.0) == 2


# --- other kinds of models ---------------------------------------------------------------------------------


def test_stepping_model_needs_slots_for_as_long_as_requests_take_them() -> None:
    """Given 4 requests/s of 10 s each, and 8 slots in a process, expect 50 slots and a few that are free."""
    watched = Watched()
    for _ in range(100):
        watched.wanted.observe_duration(10 * SECOND_US)
    watched.service = Service(8, 1, watched.wanted.duration)
    assert watched.look(70, 4) == math.ceil(40 / UTILISATION_MAX / 8) == 7


def test_stepping_model_of_unknown_duration_gets_slots_for_what_is_there() -> None:
    watched = Watched(Service(8, 1, Constant(0)))
    assert watched.look(1, there=1, waiting=10, in_flight=9) == 3
    assert watched.look(1, there=1, waiting=100_000, in_flight=9) == 3, "not more than about twice as many"


def test_sequences_of_a_bound_model_have_slots() -> None:
    watched = Watched(SLOW._replace(sequences=10))
    assert watched.look(1, sequences=40) == 5


# --- if that is not enough ---------------------------------------------------------------------------------


def test_requests_that_are_late_all_the_same_need_more_until_they_are_not() -> None:
    watched = Watched(bounds=SOON._replace(down_us=0))
    assert watched.look(10, 130) == 3
    for expected in (4, 5, 6):  # the interval in which they begin does not count
        assert watched.look(10.25, 130, waiting=40, oldest_us=2 * SECOND_US) == expected
        assert watched.wanted.now.reason == "late"
    assert watched.look(60, 130) <= 6
    assert watched.look(600, 130) == 3, "it is forgotten"


def test_requests_that_are_late_while_workers_start_need_no_more() -> None:
    watched = Watched()
    assert watched.look(60, 130, there=1, waiting=100, oldest_us=2 * SECOND_US) == 3


def test_missed_deadlines_need_more_up_to_a_limit() -> None:
    watched = Watched(owed=Owed(None, 2 * SECOND_US))
    for missed in range(100):
        watched.look(5.25, 130, there=20, missed=100 * missed)
    assert watched.wanted.now.processes == 3 * CORRECTION_MAX


# --- up at once, down slowly -------------------------------------------------------------------------------


def test_fewer_are_wanted_only_when_fewer_were_enough_for_long() -> None:
    watched = Watched(bounds=SOON._replace(down_us=60 * SECOND_US))
    assert watched.look(5, 600) == 10, "within seconds"
    assert watched.look(55, 100) == 10
    assert watched.wanted.now.reason == "held"
    assert watched.look(20, 100) == 2
    assert watched.wanted.now.reason == "arrivals"
    assert watched.look(200) == 1
    assert watched.wanted.now.reason == "minimum"


def test_batcher_that_takes_over_wants_what_there_is_at_first() -> None:
    watched = Watched()
    assert watched.look(9, there=7) == 7
    assert watched.look(5, there=7) == 1


def test_none_are_wanted_after_a_while_without_requests_and_one_when_one_waits() -> None:
    watched = Watched(bounds=SOON._replace(workers_min=0))
    assert watched.look(10, 10) == 1
    assert watched.look(19) == 1
    assert watched.look(2) == 0
    assert watched.look(0.25, waiting=1) == 1
    watched.look(30, in_flight=1)
    assert watched.wanted.now.workers == 1, "a batch that takes long is work"
    watched.bounds = SOON
    assert watched.look(100) == 1, "min_workers is 1"


def test_settings_bound_what_is_wanted_and_a_paused_model_wants_what_it_has() -> None:
    watched = Watched(bounds=SOON._replace(workers_min=2, workers_max=4))
    assert watched.look(5, 1) == 2
    assert watched.look(5, 1000) == 4
    assert watched.look(5, 1000, there=3, is_paused=True) == 3
    assert watched.look(5, 0, there=0, is_paused=True) == 0


def test_step_up_is_larger_than_what_kubernetes_ignores() -> None:
    """The HPA ignores a change within a tenth."""
    watched = Watched()
    for there in range(1, 60):
        watched.bounds = SOON._replace(workers_min=there + 1)
        watched.look(0.25, 63 * (there + 1), there=there)
    many = Watched()
    many.look(20, 700, there=10)
    assert many.wanted.now.workers == 12
    assert many.look(20, 700, there=12) == 11, "and what there is, is not too much"


def test_workers_have_the_processes_that_those_before_had() -> None:
    wanted = WantedWorkers()
    for at in range(40):
        demand = Demand(at * LOOK_US, 4, 2, at * 75)
        wanted.observe(demand, SLOW, Owed(SECOND_US, None), SOON._replace(workers_min=0))
    assert wanted.now == (3, 6, "arrivals")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 20_000), st.integers(0, 50)), max_size=60))
def test_whatever_happens_the_bounds_hold(looks: list[tuple[int, int, int]]) -> None:
    watched = Watched(bounds=Bounds(0, 20, 2 * SECOND_US, 3 * SECOND_US))
    for arrived, waiting, there in looks:
        number = watched.look(0.5, arrived, there=there, waiting=waiting, in_flight=there)
        assert 0 <= number <= 20
        assert number or not (waiting or there), "a request that waits has a worker"


# --- parts -------------------------------------------------------------------------------------------------


def test_rate_of_a_burst_is_seen_at_once_and_of_few_requests_over_a_minute() -> None:
    rate = ArrivalRate()
    for second in range(61):
        found = rate.observe(second * SECOND_US, second // 10)
    assert found == pytest.approx(0.1e-6, rel=0.2)
    for second in range(61, 66):
        found = rate.observe(second * SECOND_US, 6 + 10 * (second - 60))
    assert 7e-6 < found < 10e-6
    for second in range(66, 90):
        found = rate.observe(second * SECOND_US, 56)
    assert found < 1e-6, "nor is the end of one overlooked"


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9))), st.integers(0, 12))
def test_sliding_maximum_is_that_of_the_window(added: list[tuple[int, int]], window: int) -> None:
    maximum, seen, now = SlidingMaximum(), [(0, 0)], 0
    for later, number in added:
        now += later
        seen.append((now, number))
        in_window = [one for at, one in seen[:-1] if at > now - window]
        assert maximum.add(now, number, now - window) == max([number, *in_window])


# --- in a scheduler ----------------------------------------------------------------------------------------


def test_scheduler_knows_what_is_asked_of_it() -> None:
    """Given requests with deadlines of 500 ms, executed alone in 100 ms each, expect as many workers as for
    requests that are executed alone in that time."""
    scheduler = Scheduler(ModelSettings(max_batch_size=1), 4)
    for at in range(400):  # 20/s
        now_us = at * 50_000
        run = Run(Entry("", now_us), [str(at)], [b""], arrival_us=now_us, deadline_us=now_us + 500_000)
        assert not scheduler.offer(run, now_us)
        for decision in scheduler.poll(now_us):
            assert type(decision) is Dispatch
            scheduler.in_flight.launch(str(at), decision, now_us)
            scheduler.in_flight.settle(BatchSettled(str(at), "", 1, 100_000, now_us + 100_000, 1))
        wanted = scheduler.observe_demand(now_us, 4, 2, 0)
    assert wanted == (2, 4, "arrivals")
    assert scheduler.wanted.budget(now_us) == 500_000


def test_requests_that_are_put_off_are_not_waiting() -> None:
    scheduler = Scheduler(ModelSettings(min_workers=0, scale_idle_ms=0), 0)
    later_us = 60 * SECOND_US
    run = Run(Entry("", 0), ["a"], [b""], arrival_us=later_us, not_before_ms=60_000)
    scheduler.offer(run, 0)
    assert scheduler.observe_demand(2 * SECOND_US, 0, 0, 0).workers == 0
    scheduler.poll(later_us)
    assert scheduler.observe_demand(later_us, 0, 0, 0).workers == 1


@pytest.mark.parametrize("kind", ModelKind)
def test_each_kind_of_model_wants_a_worker(kind: ModelKind) -> None:
    scheduler = Scheduler(ModelSettings(), 1, kind)
    assert scheduler.observe_demand(0, 1, 1, 0).workers == 1
