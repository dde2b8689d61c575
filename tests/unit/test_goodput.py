"""The offline optimum that policies are compared with: what trying everything finds."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from carpool_cli.tuning.simulator import World

BENCH = Path(__file__).parents[2] / "ops" / "bench"


@pytest.fixture(scope="module")
def goodput() -> Iterator[ModuleType]:
    """The benchmark, which is a program and no package."""
    sys.path.insert(0, str(BENCH))
    try:
        spec = importlib.util.spec_from_file_location("goodput", BENCH / "goodput.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCH))
        sys.modules.pop("rivals", None)


def most_in_time(times_us: list[int], world: World, deadline_us: int, max_batch: int) -> int:
    """Every batch of any of those left, at any time, one after another."""

    @cache
    def after(free_us: float, left: frozenset[int]) -> int:
        best = 0
        for size in range(1, min(max_batch, len(left)) + 1):
            for batch in combinations(sorted(left), size):
                starts_us = max(free_us, times_us[batch[-1]] + world.out_us)
                done_us = starts_us + world.takes_us(size)
                if done_us + world.back_us <= times_us[batch[0]] + deadline_us:
                    best = max(best, size + after(done_us, left - set(batch)))
        return best

    return after(0, frozenset(range(len(times_us))))


@pytest.mark.parametrize("seed", range(12))
def test_the_optimum_is_what_trying_everything_finds(goodput: ModuleType, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(15):
        world = World(1, chance.choice([50, 200]), chance.choice([10, 60]), out_us=5, back_us=3)
        times_us = sorted(chance.randrange(400) for _ in range(chance.randrange(1, 8)))
        deadline_us, max_batch = chance.randrange(100, 700), chance.choice([1, 2, 3, 8])
        found = goodput.u3(np.array(times_us, float), world, deadline_us, max_batch)
        assert found == most_in_time(times_us, world, deadline_us, max_batch)


def test_the_bound_of_rates_is_that_of_the_largest_batch_in_time(goodput: ModuleType) -> None:
    world = World(4, 1000, 100, out_us=200, back_us=300)
    # 20 ms - 0.5 ms for the way leave room for 185 at 100 us and 1 ms: 185 in 19.5 ms, four times.
    assert goodput.u1_per_s(world, 20_000) == pytest.approx(4 * 185 / 0.0195)
    assert goodput.u1_per_s(world, 1500) == 0.0


def test_policies_and_the_bound_are_judged_on_the_same_requests(goodput: ModuleType) -> None:
    point = goodput.Point((5000.0, 50.0), 1, 50, "Poisson", 0.9)
    trace = goodput.trace_of(point, 1000.0, 500)
    assert len(trace.judged_us) == 500
    assert [one.at_us for one in trace.arrivals[-500:]] == list(trace.judged_us)
    figures = goodput.measure(point, 300)
    assert all(good <= figures.bound for good in figures.good.values())
    assert figures.good["deferred"] > 0.9 * figures.bound


@pytest.mark.parametrize("seed", range(20))
def test_no_policy_passes_the_bound_for_any_number_of_workers(goodput: ModuleType, seed: int) -> None:
    """Not even one that knows all arrivals beforehand."""
    chance = random.Random(seed)
    world = World(1, chance.choice([50, 200]), chance.choice([10, 60]), out_us=5, back_us=3)
    deadline_us = chance.choice([300, 900])
    times_us = np.array(sorted(chance.randrange(6000) for _ in range(chance.randrange(1, 120))), float)
    assert goodput.u3(times_us, world, deadline_us, 16) <= goodput.u1(times_us, world, deadline_us)


def test_the_bound_is_one_for_every_stretch_of_time(goodput: ModuleType) -> None:
    """10 us for each request, whatever the batch, and 100 us: of a burst ten can be in time, and of a slow
    trickle all."""
    world = World(1, 0.0, 10.0, out_us=0, back_us=0)
    burst = np.zeros(50)
    trickle = np.arange(50) * 10.0
    assert goodput.u1(burst, world, 100) == 10
    assert goodput.u1(trickle, world, 100) == 50
    assert goodput.u1(np.concatenate([burst, burst + 1000.0]), world, 100) == 20
