"""What bodies cost, as models tell, and what is executed together for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.plugins import UnusableError
from carpool_worker.model_process.costs import cost_of, of_producers, parts_of
from carpool_worker.model_process.executor import ListItems, Outcome
from carpool_worker.model_process.failures import WrongCostError
from carpool_worker.model_process.loaded import LoadedModel, RequestInfo
from carpool_worker.model_process.model import adapt, load_model
from support.executing import execute

COSTS = st.lists(st.integers(0, 50), max_size=30)


@given(COSTS, st.integers(1, 60))
def test_parts_are_all_requests_in_order_and_within_the_limit(costs: list[int], cost_max: int) -> None:
    indexes = range(3, 3 + len(costs))
    by_index = dict(zip(indexes, costs, strict=True))
    parts = parts_of(indexes, by_index, cost_max)
    assert [index for part in parts for index in part] == list(indexes)
    sums = [sum(by_index[index] for index in part) for part in parts]
    assert all(total <= cost_max or len(part) == 1 for part, total in zip(parts, sums, strict=True))
    firsts = [by_index[part[0]] for part in parts[1:]]
    assert all(
        total + first > cost_max for total, first in zip(sums, firsts, strict=False)
    )  # as few as can be


def test_without_a_limit_there_is_one_part() -> None:
    assert parts_of([0, 1], {0: 1 << 40, 1: 1}, None) == [[0, 1]]
    assert parts_of([], {}, None) == parts_of([], {}, 5) == []


@pytest.mark.parametrize(
    ("told", "of_producer", "cost"),
    [
        (7, 1, 7),
        (7, 9, 9),
        (0, 0, 0),
        (2.1, 1, 3),
        (np.int64(4), 1, 4),
        (np.float64(4), 1, 4),
        (1 << 40, 1, 1 << 40),
    ],
)
def test_cost_is_a_whole_number_and_the_larger_of_two(told: Any, of_producer: int, cost: int) -> None:
    assert cost_of(lambda _: told, None, of_producer) == cost


@pytest.mark.parametrize(
    "told", [-1, None, "3", True, float("nan"), float("inf"), -0.5 - 1, (1 << 40) + 1, [1]]
)
def test_what_is_no_cost_is_an_error_that_shows_it(told: Any) -> None:
    with pytest.raises(WrongCostError, match="must be a number from 0 to"):
        cost_of(lambda _: told, None)


def test_costs_of_producers_are_of_each_request() -> None:
    assert of_producers([(2, 5), (1, 1)], 3) == [5, 5, 1]
    assert of_producers((), 3) == [1, 1, 1]


# --- batches -----------------------------------------------------------------------------------------------


class Called:
    """A model that costs as much as a body says, and raises on 13. `calls`: what it was called with."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def predict(self, batch: list[int]) -> list[int]:
        self.calls.append(batch)
        if 13 in batch:
            raise ValueError("bad")
        return [-number for number in batch]

    def cost(self, body: int) -> int:
        return body


def run(bodies: list[Any], cost_max: int | None = 10, **more: Any) -> tuple[Outcome, list[list[int]]]:
    model = Called()
    loaded = LoadedModel(lambda batch, _: model.predict(batch), cost=model.cost)
    return execute(loaded, ListItems(bodies), (), cost_max=cost_max, **more), model.calls


def test_results_of_parts_are_in_the_order_of_the_items() -> None:
    outcome, calls = run([4, 6, 5, 20, 1])
    assert calls == [[4, 6], [5], [20], [1]]
    assert outcome == Outcome({}, [-4, -6, -5, -20, -1], executed_together=5, cost=36, parts=4)
    assert run([4, 6, 5], None) == (Outcome({}, [-4, -6, -5], executed_together=3, cost=15), [[4, 6, 5]])


def test_part_that_raises_is_halved_and_the_others_are_not() -> None:
    outcome, calls = run([4, 6, 13, 1, 2], 15)
    assert calls == [[4, 6], [13, 1], [13], [1], [2]]
    assert outcome.failures.keys() == {2}
    assert (outcome.results, outcome.executed_together, outcome.raised) == ([-4, -6, -1, -2], 0, (2,))


def test_request_that_expires_while_earlier_parts_are_executed_is_not_executed() -> None:
    model = Called()
    loaded = LoadedModel(lambda batch, _: model.predict(batch), cost=model.cost)
    outcome = execute(
        loaded, ListItems([9, 8, 1]), (), is_late=lambda index: bool(model.calls) and index == 1, cost_max=10
    )
    assert (model.calls, outcome.results) == ([[9], [1]], [-9, -1])
    status, detail = outcome.failures[1]
    assert status == "DEADLINE_EXCEEDED" and "other parts of its batch" in detail


def test_model_is_told_the_cost_that_counts() -> None:
    def predict(batch: list[int], requests: Sequence[RequestInfo]) -> list[int]:
        return [request.cost for request in requests]

    model = LoadedModel(predict, wants_requests=True, cost=lambda body: body)
    told = [RequestInfo(name, "", {}, cost=cost) for name, cost in (("a", 5), ("b", 1))]
    outcome = execute(model, ListItems([3, 4]), told, cost_max=100, producer_costs=[(1, 5), (1, 1)])
    assert (outcome.results, outcome.cost) == ([5, 4], 9)


# --- declarations ------------------------------------------------------------------------------------------


class Declared:
    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


async def coroutine(_body: Any) -> int:
    await asyncio.sleep(0)
    return 1


@pytest.mark.parametrize(
    ("cost", "reason"),
    [
        (3, "must be a method cost"),
        (lambda: 3, "must take one argument"),
        (lambda body, other: 3, "must take one argument"),
        (coroutine, "is a coroutine function"),
    ],
)
def test_cost_that_cannot_be_called_is_refused_when_the_model_is_loaded(cost: Any, reason: str) -> None:
    model = Declared()
    model.cost = cost  # type: ignore[attr-defined]
    with pytest.raises(UnusableError, match=reason):
        adapt(model, "cpu")


def test_model_that_binds_sequences_has_no_cost() -> None:
    class Bound(Declared):
        binds_sequences = True

        def cost(self, body: Any) -> int:
            return 1

    with pytest.raises(UnusableError, match="executes all slots together"):
        load_model(Bound, "cpu")


@pytest.mark.parametrize("version", [2, "", "a b", "1/2", "x" * 129, b"1", ("1",)])
def test_version_that_cannot_be_shown_is_refused(version: Any) -> None:
    model = Declared()
    model.version = version  # type: ignore[attr-defined]
    with pytest.raises(UnusableError, match=r"'version' is .*: it must be text of 1 to 128"):
        adapt(model, "cpu")


@pytest.mark.parametrize("version", ["2", "2025-03-01", "1.2.0+gpu", "sha256:" + "0" * 64])
def test_version(version: str) -> None:
    model = Declared()
    assert adapt(model, "cpu").version == ""
    model.version = version  # type: ignore[attr-defined]
    assert adapt(model, "cpu").version == version
