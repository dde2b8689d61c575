"""The capacity of each version's processes, while versions of a model are told apart.

Until a request asks for a version, or versions have shares, any process takes any batch, and one Capacity
counts them all. From then on each batch is for the processes of one version: that of its lane, or, if any may
execute it, the one that is free first. So what is in flight at the processes of a version is known, and of
the others nothing has to be known to dispatch to it.

A batch that was dispatched before, for any version, counts for the version with the least in flight.

Why: docs/decisions/0112.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from carpool_batcher.core.applied_settings import NO_LIMIT
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.learned import Learned


class ModelCapacity(Capacity):
    """The capacity of all processes of a model. `by_version`: that of each version's, while they are told
    apart; else empty. `of_any`: that of all of these together, for batches that any version may execute."""

    def __init__(self, learned: Learned, processes: int) -> None:
        super().__init__(learned, processes)
        self.by_version: dict[str, Capacity] = {}
        self.of_any = AnyVersion(self)
        self._versions: dict[str, Capacity] = {}  # of batches in flight: where each counts
        self._slots: tuple[int | None, int | None] = (None, None)

    # --- versions ------------------------------------------------------------------------------------------

    def tell_apart(self, processes: Mapping[str, int]) -> None:
        """Each version has this number of processes; none: they are not told apart. O(batches in flight). Not
        between a reservation and what becomes of it."""
        if processes.keys() == self.by_version.keys():
            for version, number in processes.items():
                self.by_version[version].resize(number)
            return
        self.by_version = {version: Capacity(self._learned, number) for version, number in processes.items()}
        self._versions.clear()
        for of_version in self.by_version.values():
            of_version.set_slots(*self._slots)
        if self.by_version:
            for batch_id, batch in self.in_flight.items():
                if batch_id not in self._apart:
                    self._adopt_by_version(batch_id, batch)

    def _adopt_by_version(self, batch_id: str, batch: InFlightBatch) -> None:
        of_version = self.by_version.get(batch.version)
        if of_version is None:
            of_version = self.by_version[self.of_any.next_version()]
        of_version.adopt(batch_id, batch)
        self._versions[batch_id] = of_version

    # --- events --------------------------------------------------------------------------------------------

    def set_slots(self, slots: int | None, cost_max: int | None) -> None:
        super().set_slots(slots, cost_max)
        self._slots = slots, cost_max
        for of_version in self.by_version.values():
            of_version.set_slots(slots, cost_max)

    def reserve(self, cost: int = 0, version: str = "") -> None:
        super().reserve(cost)
        if self.by_version:
            self.by_version[version].reserve(cost)

    def unreserve(self, version: str = "") -> None:
        super().unreserve()
        if self.by_version:
            self.by_version[version].unreserve()

    def launch(self, batch_id: str, batch: InFlightBatch) -> None:
        super().launch(batch_id, batch)
        if self.by_version:
            of_version = self._versions[batch_id] = self.by_version[batch.version]
            of_version.launch(batch_id, batch)

    def adopt_earlier(self, batch_id: str, batch: InFlightBatch) -> None:
        super().adopt_earlier(batch_id, batch)
        if self.by_version:
            self._adopt_by_version(batch_id, batch)

    def end(self, batch_id: str, now_us: int) -> None:
        super().end(batch_id, now_us)
        if self._versions:
            of_version = self._versions.pop(batch_id, None)
            if of_version is not None:
                of_version.end(batch_id, now_us)

    def set_apart(self, batch_ids: Collection[str]) -> list[str]:
        again = super().set_apart(batch_ids)
        for batch_id in self._versions.keys() & batch_ids:
            self._versions.pop(batch_id).end(batch_id, 0)
        for batch_id in again if self.by_version else ():
            self._adopt_by_version(batch_id, self.in_flight[batch_id])
        return again


class AnyVersion(Capacity):
    """The capacity of the processes of all versions, each of which has batches of its own. It only reads."""

    def __init__(self, whole: ModelCapacity) -> None:
        self._whole = whole
        self.in_flight = whole.in_flight

    @property
    def _each(self) -> Collection[Capacity]:
        return self._whole.by_version.values()

    @property
    def processes(self) -> int:  # type: ignore[override]
        """The number of processes of all versions."""
        return self._whole.processes

    def next_version(self) -> str:
        """The version whose processes have the least in flight, for their number."""
        by_version = self._whole.by_version
        return min(by_version, key=lambda version: by_version[version].load())

    def has_capacity(self) -> bool:
        return any(one.has_capacity() for one in self._each)

    def left(self) -> tuple[int, int]:
        each = [(max(0, batches), max(0, cost)) for batches, cost in (one.left() for one in self._each)]
        return sum(batches for batches, _ in each), min(NO_LIMIT, sum(cost for _, cost in each))

    def idle_processes(self, now_us: int) -> int:
        return sum(one.idle_processes(now_us) for one in self._each)

    def free_at_us(self, now_us: int, *, is_full: bool = False) -> int | None:
        each = [one.free_at_us(now_us, is_full=is_full) for one in self._each if one.processes]
        return min((at_us for at_us in each if at_us is not None), default=None)

    def starts_us(self, now_us: int) -> int:
        return min((one.starts_us(now_us) for one in self._each if one.processes), default=now_us)

    def free_times_us(self, now_us: int) -> list[int]:
        return [at_us for one in self._each for at_us in one.free_times_us(now_us)]

    def spacing_ends_us(self) -> int:
        return self._whole.spacing_ends_us()
