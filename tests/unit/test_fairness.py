"""Fair turns between the tenants of a lane: by cost and weight, without starvation, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from carpool.messages import Entry, Run
from carpool_batcher.core.fairness import NO_WEIGHTS, FairQueue
from carpool_batcher.core.lane import Lane

NO_LIMIT = 1 << 60


def request(name: str, tenant: str, cost: int = 1) -> Run:
    return Run(Entry("1-0", 0), name, b"x", cost=cost, tenant=tenant)


def lane_of(*requests: Run) -> Lane:
    lane = Lane("")
    for r in requests:
        lane.insert(r)
    return lane


def names(lane: Lane) -> str:
    return " ".join(r.correlation_id for r in lane.pop_batch(100, None, NO_LIMIT))


def requests_of(tenant: str, number: int, cost: int = 1) -> list[Run]:
    return [request(f"{tenant}{at}", tenant, cost) for at in range(number)]


def tenants(lane: Lane, number: int, weights: Mapping[str, float] = NO_WEIGHTS) -> str:
    """The tenants of the next `number` requests."""
    return "".join(r.tenant for r in lane.pop_batch(number, None, NO_LIMIT, weights))


def test_flood_delays_only_its_own_tenant() -> None:
    lane = lane_of(*requests_of("f", 1000))
    assert tenants(lane, 100) == "f" * 100
    for r in requests_of("t", 3):
        lane.insert(r)
    assert tenants(lane, 8).count("t") == 3


def test_turns_follow_the_weights() -> None:
    lane = lane_of(*requests_of("g", 100), *requests_of("s", 100))
    served = tenants(lane, 50, {"g": 4.0})
    assert (served.count("g"), served.count("s")) == (40, 10)
    assert all(served[at : at + 6].count("s") >= 1 for at in range(45))  # evenly spread


def test_turns_are_by_cost_and_not_by_number() -> None:
    lane = lane_of(*requests_of("big", 20, cost=9), *requests_of("x", 90))
    served = [r.tenant for r in lane.pop_batch(40, None, NO_LIMIT)]
    assert (served.count("big"), served.count("x")) == (4, 36)


def test_requests_without_cost_do_not_get_every_turn() -> None:
    assert tenants(lane_of(*requests_of("f", 100, cost=0), *requests_of("t", 4)), 8).count("t") == 4


def test_returning_tenant_has_no_credit_for_its_absence() -> None:
    lane = lane_of(*requests_of("a", 200), *requests_of("b", 1))
    assert tenants(lane, 100).count("b") == 1
    for r in requests_of("b", 100):
        lane.insert(r)
    assert tenants(lane, 20).count("b") == 10


def test_tenant_that_comes_and_goes_gets_no_more_than_its_share() -> None:
    lane = lane_of(*requests_of("a", 200))
    served = ""
    for at in range(100):
        if "b" not in [r.tenant for r in lane]:
            lane.insert(request(f"b{at}", "b"))
        served += tenants(lane, 1)
    assert served.count("b") == 50


def test_removed_request_costs_its_tenant_no_turn() -> None:
    a, b = requests_of("a", 6), requests_of("b", 6)
    lane = lane_of(*a, *b)
    for r in (a[0], a[2], b[1], b[3], b[4]):
        lane.remove(r)
    assert names(lane) == "a1 b0 a3 b2 a4 b5 a5"


def test_tenant_without_waiting_requests_is_skipped() -> None:
    a, b, c = requests_of("a", 2), requests_of("b", 2), requests_of("c", 2)
    lane = lane_of(*a, *b, *c)
    for r in b:
        lane.remove(r)
    assert names(lane) == "a0 c0 a1 c1"


@pytest.mark.parametrize("removal", ["served", "withdrawn"])
def test_number_of_remembered_tenants_is_bounded(removal: str) -> None:
    queue = FairQueue()
    for r in requests_of("waits", 3):
        queue.insert(r)
    for at in range(2000):
        r = request("x", f"new {at}" if at % 2 else "again")
        queue.insert(r)
        if removal == "withdrawn":
            queue.remove(r)
        elif queue.pop(NO_WEIGHTS).tenant == "waits":
            queue.pop(NO_WEIGHTS)
            queue.insert(request("y", "waits"))
    assert len(queue._next_turn) < 60
    assert len(queue._turns) < 60


def test_endless_new_tenants_do_not_starve_those_that_wait() -> None:
    lane = lane_of(*requests_of("waits", 10))
    served: list[str] = []
    for at in range(600):
        lane.insert(request("x", f"new {at}"))
        lane.insert(request("x", f"newer {at}"))
        served += [r.tenant for r in lane.pop_batch(2, None, NO_LIMIT)]
    assert served.count("waits") == 10
