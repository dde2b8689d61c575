"""Which requests arrive when, and how many tokens each wants. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random
from typing import Final, NamedTuple

from stepping.models import LENGTH_MAX, PROMPT_TOKENS, SLOTS, Body

LENGTH_MEAN: Final = 32  # of the geometric distribution, before LENGTH_MAX cuts it
BURST_REQUESTS: Final = 32
BURST_LENGTH: Final = 8
WARM_UP: Final = 0.2  # of a run
GRACE: Final = 0.5  # of a run, after it: for the first tokens of those that arrived last


class Ask(NamedTuple):
    """A request: when it arrives, after the start, and how many tokens it wants."""

    due_s: float
    length: int

    @property
    def body(self) -> Body:
        """What is sent. The prompts differ, though nothing depends on them."""
        first = round(self.due_s * 1e6) % 50_000
        return {"prompt": [first, *range(1, PROMPT_TOKENS)], "length": self.length}


class Window(NamedTuple):
    """Tokens count from `warm_s` to `span_s`, and first tokens of requests that arrived then, which are
    waited for until `until_s`. All after the start."""

    warm_s: float
    span_s: float
    until_s: float


class Workload(NamedTuple):
    """A way in which requests arrive. `load`: the share of the capacity, of Poisson arrivals."""

    name: str
    description: str
    load: float | None = None

    @property
    def is_burst(self) -> bool:
        """Whether all requests arrive at once, and it ends when all are answered."""
        return self.load is None

    def window(self, seconds: float) -> Window | None:
        """When a run of `seconds` counts; None: until all are answered."""
        if self.is_burst:
            return None
        return Window(WARM_UP * seconds, seconds, seconds * (1.0 if self.is_overload else 1 + GRACE))

    @property
    def is_overload(self) -> bool:
        """Whether requests wait from the start to the end, so that only tokens/s says something."""
        return self.load is not None and self.load > 1


BURST: Final = Workload("burst", f"{BURST_REQUESTS} requests of {BURST_LENGTH} tokens at once")
FULL: Final = Workload("full", "more requests than can be served: all slots are always in use", 2.0)
POISSON: Final = tuple(
    Workload(f"{load:.0%}", f"Poisson arrivals at {load:.0%} of the capacity", load)
    for load in (0.5, 0.8, 0.95)
)
WORKLOADS: Final = {workload.name: workload for workload in (BURST, *POISSON, FULL)}


def mean_length() -> float:
    """The mean of geometric lengths that are cut at LENGTH_MAX."""
    stays = 1 - 1 / LENGTH_MEAN
    return (1 - stays**LENGTH_MAX) / (1 - stays)


def geometric_length(random: Random) -> int:
    """A length of at least 1."""
    return min(LENGTH_MAX, 1 + int(math.log(1 - random.random()) / math.log(1 - 1 / LENGTH_MEAN)))


def asks(workload: Workload, capacity_per_s: float, seconds: float, seed: int) -> list[Ask]:
    """The requests of a run of `seconds`; `capacity_per_s` are the tokens/s that one process reaches."""
    if workload.load is None:
        return [Ask(0.0, BURST_LENGTH)] * BURST_REQUESTS
    random = Random(seed)  # noqa: S311
    if workload.is_overload:
        number = SLOTS + math.ceil(workload.load * capacity_per_s * seconds / mean_length())
        return [Ask(0.0, geometric_length(random)) for _ in range(number)]
    per_s = workload.load * capacity_per_s / mean_length()
    return list(_poisson(per_s, seconds, random))


def _poisson(per_s: float, seconds: float, random: Random) -> Iterator[Ask]:
    due_s = 0.0
    while (due_s := due_s + random.expovariate(per_s)) < seconds:
        yield Ask(due_s, geometric_length(random))
