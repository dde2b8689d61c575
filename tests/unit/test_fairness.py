"""Fair turns between tenants, over all lanes: by cost and weight, without starvation, in bounded memory."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import pytest

from carpool.messages.requests import Entry, Run
from carpool.model_settings import ModelSettings
from carpool_batcher.core.applied_settings import (
    EQUAL_SHARES,
    NO_WEIGHTS,
    AppliedSettings,
    BatchLimits,
    Shares,
)
from carpool_batcher.core.waiting.batch_space import BatchSpace, bytes_of
from carpool_batcher.core.waiting.fairness import FairQueue
from carpool_batcher.core.waiting.lane import Lane
from carpool_batcher.core.waiting.lane_index import Gate
from support.scheduler_harness import SchedulerHarness, settle


def run(names: str, tenant: str, cost: int = 1) -> Run:
    ids = names.split()
    one = Run(Entry("1-0", 0), ids, [b"x"] * len(ids), cost=cost, tenant=tenant)
    one.entry.runs.append(one)
    return one


def insert(lane: Lane, *runs: Run) -> Lane:
    for one in runs:
        lane.insert(one, bytes_of(one))
    return lane


def lane_of(*runs: Run) -> Lane:
    return insert(Lane(""), *runs)


def served(lane: Lane, size: int, weights: Mapping[str, float] = NO_WEIGHTS) -> list[tuple[str, str]]:
    """The names and tenants of the next requests."""
    runs = lane.pop_batch(BatchLimits(size), Shares(weights)).runs
    return [(name, one.tenant) for one in runs for name in one.correlation_ids]


def pop(queue: FairQueue) -> Run:
    one = queue.pop(BatchSpace(BatchLimits(1)), EQUAL_SHARES)
    assert one is not None
    return one


def names(lane: Lane) -> str:
    return " ".join(name for name, _ in served(lane, 100))


def requests_of(tenant: str, number: int, cost: int = 1) -> list[Run]:
    return [run(f"{tenant}{at}", tenant, cost) for at in range(number)]


def run_of(tenant: str, number: int, cost: int = 1) -> Run:
    return run(" ".join(f"{tenant}{at}" for at in range(number)), tenant, cost)


def tenants(lane: Lane, number: int, weights: Mapping[str, float] = NO_WEIGHTS) -> str:
    """The tenants of the next `number` requests."""
    return "".join(tenant for _, tenant in served(lane, number, weights))


def test_flood_delays_only_its_own_tenant() -> None:
    lane = lane_of(*requests_of("f", 1000))
    assert tenants(lane, 100) == "f" * 100
    for r in requests_of("t", 3):
        insert(lane, r)
    assert tenants(lane, 8).count("t") == 3


def test_turns_follow_the_weights() -> None:
    lane = lane_of(*requests_of("g", 100), *requests_of("s", 100))
    turns = tenants(lane, 50, {"g": 4.0})
    assert (turns.count("g"), turns.count("s")) == (40, 10)
    assert all(turns[at : at + 6].count("s") >= 1 for at in range(45))  # evenly spread


def test_run_is_cut_at_the_turns_of_other_tenants() -> None:
    lane = lane_of(run_of("g", 9), run_of("s", 4), run_of("t", 1))
    assert tenants(lane, 14, {"g": 4.0}) == "gstgggsggggsgs"


def test_turns_are_by_cost_and_not_by_number() -> None:
    lane = lane_of(*requests_of("big", 20, cost=9), *requests_of("x", 90))
    turns = [tenant for _, tenant in served(lane, 40)]
    assert (turns.count("big"), turns.count("x")) == (4, 36)


def test_requests_without_cost_do_not_get_every_turn() -> None:
    assert tenants(lane_of(*requests_of("f", 100, cost=0), *requests_of("t", 4)), 8).count("t") == 4


def test_returning_tenant_has_no_credit_for_its_absence() -> None:
    lane = lane_of(*requests_of("a", 200), *requests_of("b", 1))
    assert tenants(lane, 100).count("b") == 1
    for r in requests_of("b", 100):
        insert(lane, r)
    assert tenants(lane, 20).count("b") == 10


def test_tenant_that_comes_and_goes_gets_no_more_than_its_share() -> None:
    lane = lane_of(*requests_of("a", 200))
    turns = ""
    for at in range(100):
        if "b" not in [r.tenant for r in lane]:
            insert(lane, run(f"b{at}", "b"))
        turns += tenants(lane, 1)
    assert turns.count("b") == 50


def test_removed_request_costs_its_tenant_no_turn() -> None:
    a, b = requests_of("a", 6), requests_of("b", 6)
    lane = lane_of(*a, *b)
    for r in (a[0], a[2], b[1], b[3], b[4]):
        lane.remove(r, 1)
    assert names(lane) == "a1 b0 a3 b2 a4 b5 a5"


def test_tenant_without_waiting_requests_is_skipped() -> None:
    a, b, c = requests_of("a", 2), requests_of("b", 2), requests_of("c", 2)
    lane = lane_of(*a, *b, *c)
    for r in b:
        lane.remove(r, 1)
    assert names(lane) == "a0 c0 a1 c1"


@pytest.mark.parametrize("removal", ["served", "withdrawn"])
def test_number_of_remembered_tenants_is_bounded(removal: str) -> None:
    queue = FairQueue()
    for r in requests_of("waits", 3):
        queue.insert(r)
    for at in range(2000):
        r = run("x", f"new {at}" if at % 2 else "again")
        queue.insert(r)
        if removal == "withdrawn":
            queue.remove(r)
        elif pop(queue).tenant == "waits":
            pop(queue)
            queue.insert(run("y", "waits"))
    assert len(queue._turns.of) < 60
    assert len(queue._turns._idle) < 60
    assert len(queue._turns_here) < 60
    assert len(queue._oldest) < 60


def test_endless_new_tenants_do_not_starve_those_that_wait() -> None:
    lane = lane_of(*requests_of("waits", 10))
    turns: list[str] = []
    for at in range(600):
        insert(lane, run("x", f"new {at}"))
        insert(lane, run("x", f"newer {at}"))
        turns += [tenant for _, tenant in served(lane, 2)]
    assert turns.count("waits") == 10


# --- what a request counts as ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cost", "max_batch_cost", "counted"),
    [(0, None, 1), (3, None, 3), (1 << 40, None, 8), (0, 100, 12), (50, 100, 50), (100, 100, 100)],
)
def test_request_counts_as_what_it_takes_of_a_batch(
    cost: int, max_batch_cost: int | None, counted: int
) -> None:
    """Given batches of 8 requests, expect this many requests of another tenant, each a unit, for one."""
    shares = AppliedSettings(ModelSettings(max_batch_size=8, max_batch_cost=max_batch_cost)).shares
    assert min(max(cost, shares.cost_min), shares.cost_max) == counted


def test_requests_for_slots_count_by_their_cost() -> None:
    shares = AppliedSettings(ModelSettings(max_batch_size=1, max_batch_cost=100)).shares
    assert (shares.cost_min, shares.cost_max) == (1, 100)


# --- turns over all lanes ----------------------------------------------------------------------------------


class Served:
    """A scheduler with one process, whose batches settle one after the other. Batches are lists of names."""

    def __init__(self, **settings: Any) -> None:
        self.harness = SchedulerHarness(max_queue_size=100_000, **settings)
        self.batches: list[list[str]] = []
        self._settled = 0
        self._now = 0.0

    def offer(self, names: str, **fields: Any) -> None:
        """Each arrives later than the one before."""
        self._now += 0.01
        self.harness.offer(names, at=self._now, **fields)

    def serve(self) -> None:
        """The oldest batch in flight settles, and what can be is dispatched."""
        self._now += 1
        if self._settled < len(self.batches):
            self._settled += 1
            self.harness.settle(self._settled, at=self._now)
        self.batches += [one.partition(": ")[2].split() for one in self.harness.poll(self._now)]

    def batches_until(self, name: str, limit: int = 100) -> int:
        """How many batches are dispatched until that of this request."""
        before = len(self.batches)
        for _ in range(limit):
            self.serve()
            if any(name in batch for batch in self.batches[before:]):
                return next(at for at, batch in enumerate(self.batches[before:], 1) if name in batch)
        raise AssertionError(f"{name} waits for more than {limit} batches")


def tenants_of(batches: Sequence[Sequence[str]]) -> str:
    """The first letters of all names."""
    return "".join(name[0] for batch in batches for name in batch)


@pytest.mark.parametrize("lane", ["", "f0", "v"])
@pytest.mark.parametrize(("size", "lanes"), [(1, 1000), (4, 1000), (4, 100), (4, 1)])
def test_flood_in_many_lanes_delays_only_its_own_tenant(size: int, lanes: int, lane: str) -> None:
    """Given more requests than batches in each lane, or a few in each, expect one after a few batches: those
    that were dispatched before, and one that it has to wait for."""
    served = Served(max_batch_size=size)
    for at in range(1000):
        served.offer(f"f{at}", tenant="f", lane=f"f{at % lanes}")
    for _ in range(5):
        served.serve()
    for at in range(3):
        served.offer(f"v{at}", tenant="v", lane=lane)
        assert served.batches_until(f"v{at}") <= 4


def test_tenants_share_alike_in_however_many_lanes_they_wait() -> None:
    served = Served(max_batch_size=1)
    for at in range(100):
        served.offer(f"f{at}", tenant="f", lane=f"f{at}")
    for at in range(100):
        served.offer(f"v{at}", tenant="v", lane="v")
    for _ in range(100):
        served.serve()
    turns = tenants_of(served.batches)
    assert abs(turns.count("f") - turns.count("v")) <= 1
    assert "fff" not in turns and "vvv" not in turns


def test_weights_count_over_all_lanes() -> None:
    served = Served(max_batch_size=1, tenant_weights={"v": 4})
    for at in range(200):
        served.offer(f"f{at}", tenant="f", lane=f"f{at}")
        served.offer(f"v{at}", tenant="v", lane="v")
    for _ in range(98):
        served.serve()
    assert tenants_of(served.batches[:100]).count("v") in range(79, 82)


def test_priority_comes_before_turns() -> None:
    served = Served(max_batch_size=1)
    for at in range(20):
        served.offer(f"f{at}", tenant="f", lane=f"f{at}", priority=5)
        served.offer(f"v{at}", tenant="v", lane="v")
    for _ in range(19):
        served.serve()
    assert set(tenants_of(served.batches[:20])) == {"f"}


def test_lanes_of_one_tenant_are_served_in_order_of_arrival_also_beside_others() -> None:
    served = Served(max_batch_size=1)
    for at in range(50):
        served.offer(f"f{at}", tenant="f", lane=f"lane {at % 7}")
        served.offer(f"v{at}", tenant="v", lane=f"lane {at % 5}")
    for _ in range(50):
        served.serve()
    assert [batch[0] for batch in served.batches if batch[0][0] == "f"][:20] == [f"f{at}" for at in range(20)]


@pytest.mark.parametrize("cost", [0, 1, 1 << 40])
@pytest.mark.parametrize("lane", ["", "new"])
def test_endless_new_names_get_no_more_than_a_turn_each(cost: int, lane: str) -> None:
    """Given a request of a new name whenever the one before was dispatched, expect a tenant that waits
    to be served alternately with them."""
    served = Served(max_batch_size=1)
    for at in range(200):
        served.offer(f"v{at}", tenant="v")
    names = 0
    while len(served.batches) < 150:
        if names == tenants_of(served.batches).count("n"):
            served.offer(f"n{names}", tenant=f"new {names}", cost=cost, lane=lane and f"{lane} {names}")
            names += 1
        served.serve()
    turns = tenants_of(served.batches)
    assert turns.count("v") >= 50
    assert "nnnn" not in turns


@pytest.mark.parametrize("max_batch_cost", [None, 100])
def test_enormous_cost_does_not_give_an_accomplice_credit(max_batch_cost: int | None) -> None:
    """Given requests of a high cost of some tenants, and a flood of another one, expect a new tenant to wait
    for a batch or two, and not until the flood has had as much."""
    served = Served(max_batch_size=8, max_batch_cost=max_batch_cost)
    for at in range(1000):
        served.offer(f"f{at}", tenant="f", lane=f"f{at}")
    for at in range(20):
        cost = 1 << 40 if max_batch_cost is None else max_batch_cost
        served.offer(f"a{at} b{at}", tenant=f"accomplice {at}", lane="a", cost=cost)
        served.serve()
        served.offer(f"v{at}", tenant=f"v{at}", lane="v")
        assert served.batches_until(f"v{at}") <= 24  # a batch of one counts as an eighth of a whole one


def test_tenant_whose_lane_is_chosen_pays_for_the_batch() -> None:
    """Given a tenant with one request in each of many lanes, which are full of another one's, and a third one
    with full batches, expect the latter to get a third of all batches."""
    served = Served(max_batch_size=8)
    for at in range(300):
        served.offer(f"w{at}", tenant="w", lane=f"shared {at}")
        served.offer(" ".join(f"f{at}.{one}" for one in range(7)), tenant="f", lane=f"shared {at}")
        served.offer(" ".join(f"v{at}.{one}" for one in range(8)), tenant="v", lane="v")
    for _ in range(120):
        served.serve()
    assert sum("v" in tenants_of([batch]) for batch in served.batches[:120]) >= 36


def test_tenant_whose_lane_was_not_ready_gets_no_credit_for_it() -> None:
    served = Served(max_batch_size=2, max_queue_delay_ms=500)
    served.offer("p", tenant="parked", lane="parked")
    for at in range(400):
        served.offer(f"f{at}", tenant="f", lane="f")
    for _ in range(150):
        served.serve()
    for at in range(50):
        served.offer(f"p{at} q{at}", tenant="parked", lane=f"parked {at}")
    served.serve()
    before = len(served.batches)
    for _ in range(20):
        served.serve()
    assert tenants_of(served.batches[before:]).count("f") >= 16


@pytest.mark.parametrize("policy", ["eager", "deferred"])
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("is_learned", [True, False])
def test_full_batches_overtake_a_lane_that_comes_first_only_once_for_each_process(
    policy: str, processes: int, is_learned: bool
) -> None:
    """Given full batches, one of which is ahead of each process all the time, a request of another lane."""
    harness = SchedulerHarness(processes, max_batch_size=4, max_queue_size=10_000, policy=policy)
    if is_learned:
        harness.learn()
    for at in range(100):
        harness.offer(f"a{at} b{at} c{at} d{at}", tenant="f")
    done = harness.poll()
    harness.offer("v", at=1, lane="v", tenant="v", priority=9)
    for at in range(14, 14 * 20, 14):
        batch_id, batch = next(iter(harness.scheduler.in_flight.batches.items()))
        waited_us = max(0, at * 1000 - batch.dispatched_us - 14_000)
        settle(harness.scheduler, batch_id, 14_000, at * 1000, waited_us=waited_us)
        for later in (0, 5, 10, 13.9):
            done += harness.poll(at + later)
        if "v" in done[-1] or "idle: v" in done:
            break
    assert "idle: v" in done
    assert done.index("idle: v") <= 4 * processes


def test_long_row_of_new_tenants_and_lanes_leaves_nothing_behind() -> None:
    served = Served(max_batch_size=1)
    for at in range(1000):
        served.offer(f"n{at}", tenant=f"t{at}", lane=f"l{at}")
        if at % 3:
            served.serve()
    while served.harness.scheduler.queue.count:
        served.serve()
    queue, index = served.harness.scheduler.queue, served.harness.scheduler._dispatchers.of_any._index
    assert list(queue.lanes) == [""]
    assert all(len(turns.of) <= 1 and not turns.queues and not turns._idle for turns in queue.turns.values())
    assert index.first(list(Gate), 0) is None and not index._lanes
    assert sum(len(by_rank) for by_rank in index._ready) == 0


# --- cost of an event --------------------------------------------------------------------------------------


def lines_of_events(waiting: int, tenants: int, lanes: int, policy: str, *, is_late: bool) -> int:
    """How many lines of the core run for 30 requests that arrive and the batches that settle meanwhile, while
    `waiting` requests of so many tenants wait in so many lanes. `is_late`: all are past their target."""
    settings: dict[str, Any] = {"policy": policy, "target_latency_ms": 1 if is_late else None}
    harness = SchedulerHarness(1, max_queue_size=1_000_000, max_batch_size=4, **settings).learn()
    harness.scheduler.model_processes = 0

    def offer(number: int) -> None:
        tenant, lane = f"t{number * 7 % tenants}", f"l{number % lanes}"
        expiration = None if is_late else 100_000 + number % 50
        harness.offer(f"r{number}", tenant=tenant, lane=lane, expiration=expiration)

    for number in range(waiting):
        offer(number)
    harness.scheduler.model_processes = 1
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if "carpool_batcher" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    def events(first: int) -> None:
        for number in range(first, first + 30):
            offer(number)
            harness.poll(1 + number / 1000)
            for batch_id in list(harness.scheduler.in_flight.batches):
                settle(harness.scheduler, batch_id, 5000, 6000)
            harness.scheduler.wake_at_us()
            harness.scheduler.oldest_arrival_us()

    events(waiting)  # what is paid once
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        events(waiting + 30)
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize(("policy", "is_late"), [("eager", False), ("deferred", False), ("deferred", True)])
@pytest.mark.parametrize(
    ("tenants", "lanes"), [(1 << 20, 1), (1, 1 << 20), (1 << 20, 1 << 20), (1 << 20, 16), (16, 1 << 20)]
)
def test_cost_of_an_event_does_not_grow_with_tenants_or_lanes(
    tenants: int, lanes: int, policy: str, *, is_late: bool
) -> None:
    few = lines_of_events(350, tenants, lanes, policy, is_late=is_late)
    many = lines_of_events(2800, tenants, lanes, policy, is_late=is_late)
    assert many <= 1.5 * few, f"{few} lines with 350 waiting requests, {many} with 2800"
