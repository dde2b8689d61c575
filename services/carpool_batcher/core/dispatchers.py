"""The dispatchers of a model: one for all lanes, or one for each version while versions are told apart.

Versions are told apart while several of them have processes, and requests asked for one, or they have shares
of the traffic. Then no batch of one version waits for a process of another. A lane that any version may
execute is with the dispatcher that knows the capacity of all. A lane of a version that has no process is with
none.

Why: docs/decisions/0112.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from carpool_batcher.core.applied_settings import AppliedSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.decisions import Decision
from carpool_batcher.core.dispatching import Dispatcher, Outlook
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.core.sequences.processes import Processes
from carpool_batcher.core.version_capacity import ModelCapacity
from carpool_batcher.core.waiting.lane import Lane
from carpool_batcher.core.waiting.queue import Queue

_Served = tuple[frozenset[str], frozenset[str] | None]  # versions that are told apart; all that are served


class Dispatchers:
    """As a Dispatcher, for whichever there are. `of_any` has the lanes that any version may execute, and all
    others while versions are not told apart. Of a bound model there is only that."""

    def __init__(
        self,
        applied: AppliedSettings,
        queue: Queue,
        capacity: Capacity,
        learned: Learned,
        processes: Processes,
    ) -> None:
        self._applied = applied
        self._queue = queue
        self._capacity = capacity
        self._learned = learned
        self._processes = processes
        self._custom: CustomPolicy | None = None
        self._served: _Served = frozenset(), None
        self.of_any = self._new(capacity, None)
        self._of_versions: dict[str, Dispatcher] = {}

    def _new(self, capacity: Capacity, versions: Collection[str] | None) -> Dispatcher:
        """For the lanes of these versions; None: for all lanes."""
        dispatcher = Dispatcher(
            self._applied,
            self._queue,
            capacity,
            self._learned,
            self._processes,
            reserve=self._capacity.reserve,
            versions=versions,
        )
        dispatcher.settings_changed(self._custom)
        return dispatcher

    @property
    def _all(self) -> list[Dispatcher]:
        return [self.of_any, *self._of_versions.values()]

    # --- which there are -----------------------------------------------------------------------------------

    def settings_changed(self, custom: CustomPolicy | None) -> None:
        """The settings or the custom policy changed."""
        self._custom = custom
        for dispatcher in self._all:
            dispatcher.settings_changed(custom)

    def serve(self, processes: Mapping[str, int], *, are_used: bool) -> None:
        """Versions have this number of processes each. `are_used`: requests ask for versions, or these have
        shares. Not between a decision to dispatch and what becomes of it."""
        capacity = self._capacity
        if not isinstance(capacity, ModelCapacity):
            return
        told_apart = processes if are_used and len(processes) > 1 else {}
        capacity.tell_apart(told_apart)
        served: _Served = frozenset(told_apart), frozenset(processes) if are_used else None
        if served == self._served:
            return
        self._served = served
        self._of_versions = {
            version: self._new(capacity.by_version[version], {version}) for version in told_apart if version
        }
        if told_apart:
            self.of_any = self._new(capacity.of_any, {""})
        else:
            self.of_any = self._new(capacity, {"", *processes} if are_used else None)

    # --- as a Dispatcher -----------------------------------------------------------------------------------

    def dispatch(self, now_us: int) -> list[Decision]:
        """As `Dispatcher.dispatch`: first the version whose next batch comes first."""
        if not self._of_versions:
            return self.of_any.dispatch(now_us)
        in_order = sorted(self._all, key=lambda one: one.first(now_us))
        return [decision for dispatcher in in_order for decision in dispatcher.dispatch(now_us)]

    def wake_at_us(self, now_us: int) -> int | None:
        """As `Dispatcher.wake_at_us`."""
        if not self._of_versions:
            return self.of_any.wake_at_us(now_us)
        times_us = [one.wake_at_us(now_us) for one in self._all]
        return min((at_us for at_us in times_us if at_us is not None), default=None)

    def earliest_dispatch_us(self, now_us: int) -> int:
        """As `Dispatcher.earliest_dispatch_us`."""
        return min([one.earliest_dispatch_us(now_us) for one in self._all])

    def outlook(self, lane: Lane, now_us: int) -> Outlook | None:
        """As `Dispatcher.outlook`; None for a lane of a version that has no process."""
        dispatcher = self._of_versions.get(lane.version, self.of_any)
        return dispatcher.outlook(lane, now_us) if dispatcher.serves(lane) else None

    def oldest_arrival_us(self, now_us: int) -> int | None:
        """As `Dispatcher.oldest_arrival_us`, of the lanes that some dispatcher has."""
        times_us = [one.oldest_arrival_us(now_us) for one in self._all]
        return min((at_us for at_us in times_us if at_us is not None), default=None)
