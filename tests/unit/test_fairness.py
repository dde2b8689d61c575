"""Fair turns between the tenants of a lane: by cost and weight, without starvation, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from carpool.messages import Entry, Run
from carpool_batcher.core.batch_space import BatchLimits, BatchSpace, bytes_of
from carpool_batcher.core.fairness import EQUAL_SHARES, NO_WEIGHTS, FairQueue, Shares
from carpool_batcher.core.lane import Lane


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
    assert len(queue._turns) < 60
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
