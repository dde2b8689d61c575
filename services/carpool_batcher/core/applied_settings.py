"""What the parts of the core need of a model's settings and kind, compiled once for each change of these."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from carpool.messages.requests import PRIORITY_LEVELS
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.pause import Pause

NO_LIMIT: Final = 1 << 62
NO_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({})
MAX_BATCH_BYTES: Final = 64 * 1024 * 1024  # Redis takes 512 MiB in one string, and copies it a few times


class BatchLimits(NamedTuple):
    """What a batch has at most."""

    size: int = NO_LIMIT
    cost: int = NO_LIMIT
    bytes: int = NO_LIMIT


class Shares(NamedTuple):
    """By what turns are counted: the weights of tenants, and what a request counts as at least and at most,
    whatever its cost."""

    weights: Mapping[str, float] = NO_WEIGHTS
    cost_min: int = 1
    cost_max: int = NO_LIMIT


EQUAL_SHARES: Final = Shares()


class AppliedSettings:
    """The settings of one model as the core applies them. The Scheduler alone changes them; the parts below
    it have this object, and read it whenever they decide. Times are in microseconds.

    `batch`: the limits of a batch, of which a stepping model's has one request. `usual_size`: how many
    requests usually cost what a batch may, if that was learned (`learned.request_costs`). `*_of_priority`:
    only of priorities that have a limit of their own. `delayed_*`: the share of delayed requests.
    `served_late`: by priority, whether requests are served even after their deadline. `cancels_in_flight`:
    requests that are withdrawn in flight are answered at once: those of a stepping model, which has their
    slots free then, and of one that executes several batches at a time, because it mostly waits. `pause`: an
    operator's; None without one.
    """

    def __init__(self, settings: ModelSettings, kind: ModelKind = ModelKind.PLAIN) -> None:
        self.usual_size = NO_LIMIT
        self.pause: Pause | None = None
        self.update(settings, kind)

    def update(self, settings: ModelSettings, kind: ModelKind) -> None:
        """These are the settings and the kind from now on."""
        self.kind = kind
        self.has_sequences = kind.has_sequences
        is_concurrent = kind is ModelKind.PLAIN and settings.max_concurrent_batches > 1
        self.cancels_in_flight = kind is ModelKind.STEPPING or is_concurrent
        size = 1 if kind is ModelKind.STEPPING else min(settings.max_batch_size, self.usual_size)
        cost = NO_LIMIT if settings.max_batch_cost is None else settings.max_batch_cost
        self.batch = BatchLimits(size, cost, MAX_BATCH_BYTES)
        self.has_batch_cost = settings.max_batch_cost is not None
        self.shares = _shares(settings, size)
        self.policy = settings.policy
        self.preferred_sizes = settings.preferred_batch_sizes
        self.queue_delay_us = int(settings.max_queue_delay_ms * 1000)
        self.has_queue_delay = settings.max_queue_delay_ms > 0
        target_ms = settings.target_latency_ms
        self.target_us = None if target_ms is None else int(target_ms * 1000)
        priorities = range(PRIORITY_LEVELS)
        self.served_late = [settings.delays_expired(priority) for priority in priorities]
        sizes = {priority: settings.queue_size_of(priority) for priority in priorities}
        self.queue_size = settings.max_queue_size
        self.queue_size_of_priority = {one: size for one, size in sizes.items() if size is not None}
        self.queue_bytes = settings.max_queue_bytes
        self.delayed_share = share = settings.max_delayed_share
        self.delayed_size = _share_of(self.queue_size, share)
        self.delayed_size_of_priority = {
            one: _share_of(size, share) for one, size in self.queue_size_of_priority.items()
        }
        self.delayed_bytes = int(self.queue_bytes * share)


def _shares(settings: ModelSettings, size: int) -> Shares:
    """A request counts as what it takes of a batch: its cost, at least the cost of one of `max_batch_size`
    equal ones, and at most that of a whole batch. Without `max_batch_cost` a whole batch is one of
    `max_batch_size` requests of cost 1: a cost that nothing limits must not move virtual time far."""
    cost_max = size if settings.max_batch_cost is None else settings.max_batch_cost
    # A batch of one request says nothing of how many a process takes: those of stepping models take slots.
    cost_min = cost_max // size if size > 1 else 1
    return Shares(settings.tenant_weights, max(1, cost_min), max(1, cost_max))


def _share_of(requests: int, share: float) -> int:
    """A share of a number of requests; of a small number one, unless the share is 0."""
    return max(int(requests * share), 1 if share else 0)
