"""The bounds that policies are compared with: the offline optimum is what exhaustive search finds."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations

import numpy as np
import pytest
from deadlines import virtual
from deadlines.bounds import u1, u1_per_s, u3
from deadlines.points import SQUARE, STEPS, Point, world_of
from deadlines.virtual import measure, policies, trace_of

from carpool_cli.tuning.simulator import World


def exhaustive_search(times_us: list[int], world: World, deadline_us: int, max_batch: int) -> int:
    """Exhaustive search: any batch of the remaining requests may be next."""

    @cache
    def best_after(free_us: float, remaining: frozenset[int]) -> int:
        best = 0
        for size in range(1, min(max_batch, len(remaining)) + 1):
            for batch in combinations(sorted(remaining), size):
                starts_us = max(free_us, times_us[batch[-1]] + world.out_us)
                done_us = starts_us + world.execution_us(size)
                if done_us + world.back_us <= times_us[batch[0]] + deadline_us:
                    best = max(best, size + best_after(done_us, remaining - set(batch)))
        return best

    return best_after(0, frozenset(range(len(times_us))))


@pytest.mark.parametrize("seed", range(12))
def test_u3_is_what_exhaustive_search_finds(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(15):
        world = World(1, chance.choice([50, 200]), chance.choice([10, 60]), out_us=5, back_us=3)
        times_us = sorted(chance.randrange(400) for _ in range(chance.randrange(1, 8)))
        deadline_us, max_batch = chance.randrange(100, 700), chance.choice([1, 2, 3, 8])
        found = u3(np.array(times_us, float), world, deadline_us, max_batch)
        assert found == exhaustive_search(times_us, world, deadline_us, max_batch)


def test_u1_rate_is_that_of_the_largest_feasible_batch() -> None:
    world = World(4, 1000, 100, out_us=200, back_us=300)
    # Of 20 ms, 19.5 remain after the round trip: a batch of 185 takes 1 ms + 185 * 100 us. Four workers.
    assert u1_per_s(world, 20_000) == pytest.approx(4 * 185 / 0.0195)
    assert u1_per_s(world, 1500) == 0.0


def test_policies_and_bound_count_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual, "TRACE_DEADLINES_MIN", 5)
    point = Point("5 + 0.05 b", 1, 50, "Poisson", 0.9)
    trace = trace_of(point, 1000.0, 500)
    assert len(trace.counted_us) == 500
    assert [arrival.at_us for arrival in trace.arrivals[-500:]] == list(trace.counted_us)
    figures = measure(point, 300)
    assert all(good <= figures.bound for good in figures.good.values())
    assert figures.good["deferred"] > 0.9 * figures.bound


@pytest.mark.parametrize("seed", range(20))
def test_u3_never_exceeds_u1(seed: int) -> None:
    """U1 holds for any number of workers, and even for a policy that knows all arrivals in advance."""
    chance = random.Random(seed)
    world = World(1, chance.choice([50, 200]), chance.choice([10, 60]), out_us=5, back_us=3)
    deadline_us = chance.choice([300, 900])
    times_us = np.array(sorted(chance.randrange(6000) for _ in range(chance.randrange(1, 120))), float)
    assert u3(times_us, world, deadline_us, 16) <= u1(times_us, world, deadline_us)


def test_u1_holds_for_every_interval() -> None:
    """10 us for each request in any batch, and a deadline of 100 us: ten requests of a burst can be in time,
    and all requests that arrive evenly."""
    world = World(1, 0.0, 10.0, out_us=0, back_us=0)
    burst = np.zeros(50)
    even = np.arange(50) * 10.0
    assert u1(burst, world, 100) == 10
    assert u1(even, world, 100) == 50
    assert u1(np.concatenate([burst, burst + 1000.0]), world, 100) == 20


def test_every_model_takes_what_its_name_says() -> None:
    def l_us(name: str, *sizes: int) -> list[float]:
        world = world_of(Point(name, 1, 50, "Poisson", 0.9))
        return [round(world.execution_us(size), 3) for size in sizes]

    assert l_us("5 + 0.05 b", 1, 100, 256) == [5050, 10_000, 17_800]
    assert l_us("2 + 1 b", 1, 100) == [3000, 102_000]
    assert l_us(SQUARE.name, 1, 64) == [793.147, 4274.387]
    assert l_us(STEPS.name, 1, 8, 9, 16, 17, 32) == [6000, 6000, 8000, 8000, 12_000, 12_000]


def test_deferred_learns_a_model_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a line through the steps it serves a fifth of what is possible."""
    monkeypatch.setattr(virtual, "policies", lambda *of: {"deferred": policies(*of)["deferred"]})
    point = Point(STEPS.name, 1, 15, "Poisson", 0.9)
    figures = measure(point, 1500)
    assert 0.9 * figures.bound < figures.good["deferred"] <= figures.bound
