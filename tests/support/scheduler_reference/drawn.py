"""What histories of the scheduler are drawn from: requests, their traits, and settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import hypothesis.strategies as st

from carpool.messages.requests import Entry, Request, Run
from carpool.model_settings import ModelSettings

MAX_BATCH_BYTES = 40  # small, so that batches reach it
START_US = 1_000_000
LANES = ("", "a", "b")
TENANTS = ("", "gold", "silver")
MAX_COST = 5
CUSTOM_SIZE = 2


@dataclass(frozen=True)
class Traits:
    """The fields of a run. `ago_us` is the time since its arrival; negative if clocks differ. `sizes_bytes`
    is of the body of each request; as rows, all have the first size, and one byte more."""

    lane: str
    tenant: str
    priority: int
    cost: int
    sizes_bytes: list[int]
    rows: bool
    extra_bytes: int
    expiration_us: int | None
    ago_us: int


@dataclass(eq=False)
class Item:
    """One request as the reference has it. Of the copies of an entry only one is in Redis."""

    entry: Entry
    name: str
    bytes: int
    arrival_us: int
    deadline_us: int | None
    priority: int
    lane: str
    tenant: str
    cost: int
    is_doubtful: bool = False  # the model is not expected to execute it

    def __hash__(self) -> int:
        """Not of its address: when Hypothesis repeats a history, sets of items must have the same order."""
        return hash(self.name)


class CustomLimit:
    """A custom policy: at most CUSTOM_SIZE requests, and it raises for some."""

    def initialise(self) -> list[Request]:
        return []

    def include(self, batch: list[Request], request: Request) -> bool:
        if raises(request.correlation_id):
            raise ValueError
        batch.append(request)
        return len(batch) <= CUSTOM_SIZE


def raises(name: str) -> bool:
    return name.endswith("3")


def names_of(runs: Iterable[Run]) -> list[str]:
    return [name for run in runs for name in run.correlation_ids]


sizes_bytes = st.sampled_from((0, 1, 1, 1, 15, 50))
traits = st.builds(
    Traits,
    lane=st.sampled_from(LANES),
    tenant=st.sampled_from(TENANTS),
    priority=st.sampled_from((0, 4, 4, 4, 9)),
    cost=st.sampled_from((0, 1, 1, 1, 2, MAX_COST)),
    sizes_bytes=st.one_of(
        st.lists(sizes_bytes, min_size=1, max_size=2),
        st.lists(sizes_bytes, min_size=1, max_size=9),
        st.builds(lambda size, number: [size] * number, st.sampled_from((0, 1)), st.integers(2, 20)),
    ),
    rows=st.booleans(),
    extra_bytes=st.sampled_from((0, 0, 0, 20)),
    expiration_us=st.sampled_from((None, None, 1, 1_000, 4_000, 5_000, 20_000, 900_000)),
    ago_us=st.sampled_from((0, 0, 0, 3_000, -500)),
)
model_settings = st.builds(
    ModelSettings,
    max_batch_size=st.sampled_from((1, 2, 3, 8)),
    max_batch_cost=st.sampled_from((None, None, 1, 4)),
    max_queue_delay_ms=st.sampled_from((0, 0, 0.5, 3, 10)),
    max_queue_size=st.sampled_from((1, 5, 100, 100)),
    max_queue_bytes=st.sampled_from((30, 1000, 1000)),
    preferred_batch_sizes=st.sampled_from(((), (), (2,), (2, 4, 6), (16,))),
    expiration_action=st.sampled_from(("reject", "reject", "delay")),
    priority_policies=st.sampled_from(
        ({}, {}, {0: {"max_queue_size": 2, "expiration_action": "delay"}, 9: {"expiration_action": "reject"}})
    ),
    tenant_weights=st.sampled_from(({}, {"gold": 4}, {"gold": 2, "silver": 0.5})),
    policy=st.sampled_from(("eager", "eager", "deferred")),
    target_latency_ms=st.sampled_from((None, None, 8)),
)
numbers_of_processes = st.integers(0, 3)
numbers = st.integers(0, 1000)
