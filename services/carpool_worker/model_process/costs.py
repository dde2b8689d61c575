"""What bodies cost, as the model tells, and which requests are executed together for it. Pure.

A model that has `cost` is never called with requests that cost more than `max_batch_cost` together, except
with one that does alone. The cost of a request is the larger of two: what the model tells of its body, and
what its producer sent. So no producer can get around the limit, and one that knows more than the body shows,
such as how much output it wants, may say so.

Why: docs/decisions/0096.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from carpool_worker.model_process.failures import WrongCostError

COST_MAX: Final = 1 << 40  # as of a producer's


def cost_of(tell: Callable[[Any], Any], body: Any, of_producer: int = 1) -> int:
    """The cost of a request. Raises WrongCostError, and whatever the model's `cost` raises."""
    told = tell(body)
    try:
        cost = math.ceil(told) if isinstance(told, float) else operator.index(told)
    except (TypeError, ValueError, OverflowError):  # no number; NaN; infinite
        cost = -1
    if isinstance(told, bool) or not 0 <= cost <= COST_MAX:
        raise WrongCostError(
            f"the model's cost(body) returned {told!r:.80}: it must be a number from 0 to {COST_MAX}"
        )
    return max(cost, of_producer)


def of_producers(costs: Iterable[tuple[int, int]], size: int) -> Sequence[int]:
    """What the producers of `size` requests sent: `costs` has a number of requests, in order, and their cost;
    if it is empty, all have 1."""
    return [cost for number, cost in costs for _ in range(number)] or [1] * size


def parts_of(indexes: Sequence[int], costs: Mapping[int, int], cost_max: int | None) -> list[Sequence[int]]:
    """These requests in parts that cost at most `cost_max` (None: any), each as long as the order allows. One
    that costs more is alone."""
    if cost_max is None or not indexes:
        return [indexes] if indexes else []
    parts: list[Sequence[int]] = []
    part: list[int] = []
    left = cost_max
    for index in indexes:
        if part and costs[index] > left:
            parts.append(part)
            part, left = [], cost_max
        part.append(index)
        left -= costs[index]
    return [*parts, part]
