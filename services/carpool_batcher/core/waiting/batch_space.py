"""How many bytes requests count as, and how many of them fit into a batch: by run, not request by request."""

from __future__ import annotations

from itertools import accumulate

from carpool.messages.requests import Run
from carpool.rows import Body, Rows, StoredBody
from carpool_batcher.core.applied_settings import NO_LIMIT, BatchLimits


def bytes_of(run: Run, start: int = 0, stop: int = NO_LIMIT) -> int:
    """The bytes that requests of a run, from `start` to before `stop`, count as: their bodies, and for each
    the fields for the model. O(1) for Rows."""
    bodies = run.bodies
    if type(bodies) is Rows:
        count = min(stop, len(run.correlation_ids)) - start
        return count * (len(bodies.head) + bodies.width + _extra_bytes(run))
    assert type(bodies) is list
    if len(bodies) == 1 and start < 1 <= stop:
        return _body_bytes(bodies[0]) + _extra_bytes(run)
    return sum(sizes_bytes(run, start, stop))


def sizes_bytes(run: Run, start: int = 0, stop: int = NO_LIMIT) -> list[int]:
    """The bytes that each of these requests counts as."""
    extra_bytes = _extra_bytes(run)
    bodies = run.bodies
    if type(bodies) is Rows:
        count = min(stop, len(run.correlation_ids)) - start
        return [len(bodies.head) + bodies.width + extra_bytes] * count
    assert type(bodies) is list
    return [_body_bytes(body) + extra_bytes for body in bodies[start:stop]]


def _extra_bytes(run: Run) -> int:
    extra = run.extra
    return 0 if extra is None else sum(len(name) + len(value) for name, value in extra.items())


def _body_bytes(body: Body) -> int:
    return body.size_bytes if type(body) is StoredBody else len(body)


class BatchSpace:
    """What still fits into a batch that is being formed. Its first request fits in any case.

    `size`, `cost` and `bytes` are what is left; the latter two are negative if the first request has more.
    """

    __slots__ = ("_limits", "bytes", "cost", "size")

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self.size, self.cost, self.bytes = limits

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self.size == self._limits.size

    def add(self, run: Run, start: int, count: int) -> int:
        """Add those of the `count` requests of a run, from `start`, that fit. Returns how many: 0 means that
        the batch is complete. O(1) for Rows, otherwise O(count)."""
        count = min(count, self.size)
        size_bytes = bytes_of(run, start, start + count)
        if count * run.cost > self.cost or size_bytes > self.bytes or not count:
            count = self._fitting(run, start, count)
            if not count:
                if self.size < self._limits.size:
                    return 0
                count = 1
            size_bytes = bytes_of(run, start, start + count)
        self.size -= count
        self.cost -= count * run.cost
        self.bytes -= size_bytes
        return count

    def _fitting(self, run: Run, start: int, count: int) -> int:
        """How many of these fit, given that not all do."""
        if self.cost < 0 or self.bytes < 0:
            return 0
        if run.cost * count > self.cost:
            count = self.cost // run.cost
        totals_bytes = accumulate(sizes_bytes(run, start, start + count))
        return sum(total_bytes <= self.bytes for total_bytes in totals_bytes)
