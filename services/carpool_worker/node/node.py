"""A node, turn by turn: hold the seats, decide, start and stop processes.

A turn tells Redis what became of the node's own processes, which also renews its lease, and carries out
what `decisions` makes of the reply. It waits for no process. If Redis does not answer, the processes go on,
and the next turn tells what this one could not.

The seat of a process that ends by itself is given back, so that another node may have it; this one tries
again after pauses that grow. A generation that has not served in full is given up if its model cannot be
loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

import structlog

from carpool.store.seats import SeatStore, SeatUpdate
from carpool.wire.nodes import NodeReport, SeatName, SeatState, Snapshot, Wanted
from carpool_worker.node.decisions import Plan, make_plan
from carpool_worker.node.seat_process import SeatProcess

STARTS_MAX: Final = 3  # of a process that ends while it loads; then its generation is given up
PAUSE_S: Final = 1.0  # after a process ended by itself; doubled each time ...
PAUSE_S_MAX: Final = 60.0  # ... up to this ...
STEADY_S: Final = 30.0  # ... and reset after one that served for so long
REASONS_KEPT_S: Final = 600.0  # of what is not wanted any more
LOADING_STOP_S: Final = 1.0  # a process that does not serve has nothing to finish


class _Local:
    """A process that this node has started. `slot`: its number among them, from 0."""

    def __init__(self, wanted: Wanted, process: SeatProcess, slot: int) -> None:
        self.wanted = wanted
        self.process = process
        self.slot = slot
        self.served_at_s: float | None = None
        self.kill_at_s: float | None = None  # it drains, until then

    @property
    def state(self) -> SeatState:
        if self.kill_at_s is not None:
            return SeatState.DRAINING
        return SeatState.LOADING if self.served_at_s is None else SeatState.SERVING


class _Trouble(NamedTuple):
    """What became of the last tries to run a generation here."""

    tries: int
    pause_s: float
    until_s: float


class Node:
    """The processes of one node. `start` starts one for a seat, with the number of its slot.

    `read` returns the versions of each entry that the repository has at the moment, and how many replicas
    entries declare that do not declare one.
    """

    def __init__(
        self,
        store: SeatStore,
        name: str,
        room: int,
        read: Callable[[], tuple[Mapping[str, list[str]], Mapping[str, int]]],
        start: Callable[[Wanted, int], SeatProcess],
        *,
        drain_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self._store = store
        self._room = room
        self._read = read
        self._start = start
        self._drain_s = drain_s
        self._now_s = now_s
        self._seats: dict[SeatName, _Local] = {}
        self._outgoing: list[_Local] = []  # whose seats other nodes have
        self._free: set[SeatName] = set()  # to be given back with the next turn
        self._failed: list[tuple[Wanted, str]] = []  # to be told with the next turn
        self._troubles: dict[int, _Trouble] = {}
        self._reasons: dict[str, tuple[str, float]] = {}
        self._log = structlog.get_logger()

    @property
    def processes(self) -> list[SeatProcess]:
        """All that run, or that nobody has polled since they ended."""
        return [local.process for local in self._locals()]

    def _locals(self) -> list[_Local]:
        return [*self._seats.values(), *self._outgoing]

    # --- a turn --------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """One turn. Whether it changed anything, so that more may follow at once. Raises LinkError or
        CommandError."""
        self._look()
        updates: dict[SeatName, SeatUpdate] = dict.fromkeys(self._free, "FREE")
        updates |= {name: local.state for name, local in self._seats.items()}
        refused, snapshot = self._store.hold(self._report(), updates)
        self._free.clear()
        for name in refused & self._seats.keys():
            self._lose(name)
        while self._failed:
            if self._store.fail(*self._failed[0]):
                snapshot = self._store.snapshot()
            self._failed.pop(0)
        plan = make_plan(snapshot, self.name, occupied=len(self._outgoing), paused=self._paused())
        self._carry_out(plan)
        self._forget(snapshot)
        return any(plan) or bool(self._free)

    def _report(self) -> str:
        reasons = {title: reason for title, (reason, _) in self._reasons.items()}
        serves = {str(name): (one.wanted.model, one.wanted.version) for name, one in self._seats.items()}
        entries, replicas = self._read()
        drained = [str(name) for name, one in self._seats.items() if one.process.is_drained]
        return NodeReport(
            self.name, self._room, dict(entries), reasons, [], serves, dict(replicas), drained
        ).encode()

    def _carry_out(self, plan: Plan) -> None:
        for name in plan.stop:
            self._stop(name)
        self._free.update(plan.sweep)
        for wanted in plan.settle:
            if self._store.settle(wanted):
                self._log.info("version serves", model=wanted.model, version=wanted.version)
        if plan.give_up is not None:
            wanted, name = plan.give_up
            if self._store.yield_seat(wanted, name.number):
                self._log.info("seat given up for another version", model=wanted.model, seat=str(name))
        if plan.claim:
            self._claim(plan.claim)

    def _claim(self, names: Iterable[SeatName]) -> None:
        claims: dict[SeatName, SeatUpdate] = dict.fromkeys(names, SeatState.LOADING)
        refused, snapshot = self._store.hold(self._report(), claims)
        for name in claims.keys() - refused:
            wanted = snapshot.generation(name.generation)
            if wanted is None or (wanted.is_leaving and not wanted.is_settled):
                self._free.add(name)  # it was unloaded in the meantime
                continue
            slot = min(
                set(range(self._room + len(self._locals()) + 1)) - {one.slot for one in self._locals()}
            )
            self._log.info(
                "starting a model", model=wanted.model, version=wanted.version, seat=str(name), slot=slot
            )
            self._seats[name] = _Local(wanted, self._start(wanted, slot), slot)

    # --- processes -----------------------------------------------------------------------------------------

    def _look(self) -> None:
        """See what became of all processes."""
        now_s = self._now_s()
        for name, local in list(self._seats.items()):
            self._look_at(local, now_s)
            if local.process.ended:
                del self._seats[name]
                self._free.add(name)
                if local.kill_at_s is None:
                    self._suffer(local, now_s)
        for local in self._outgoing:
            self._look_at(local, now_s)
        self._outgoing = [local for local in self._outgoing if not local.process.ended]

    def _look_at(self, local: _Local, now_s: float) -> None:
        local.process.poll()
        if local.process.serves and local.served_at_s is None:
            local.served_at_s = now_s
            self._reasons.pop(local.wanted.title, None)
        if local.kill_at_s is not None and now_s > local.kill_at_s:
            local.process.kill()

    def _suffer(self, local: _Local, now_s: float) -> None:
        """A process ended by itself."""
        wanted, reason = local.wanted, local.process.ended
        before = self._troubles.get(wanted.generation)
        if before is None or (local.served_at_s is not None and now_s - local.served_at_s > STEADY_S):
            before = _Trouble(0, PAUSE_S / 2, 0.0)
        pause_s = min(2 * before.pause_s, PAUSE_S_MAX)
        self._troubles[wanted.generation] = _Trouble(before.tries + 1, pause_s, now_s + pause_s)
        self._reasons[wanted.title] = (reason, now_s)
        self._log.warning(
            "model ended by itself",
            model=wanted.model,
            version=wanted.version,
            reason=reason,
            pause_s=pause_s,
        )
        if local.process.cannot_load or before.tries + 1 >= STARTS_MAX:
            self._failed.append((wanted, reason))

    def _paused(self) -> set[int]:
        now_s = self._now_s()
        return {number for number, trouble in self._troubles.items() if now_s < trouble.until_s}

    def _forget(self, snapshot: Snapshot) -> None:
        """Forget what is known of generations that are not wanted any more."""
        numbers = {wanted.generation for wanted in snapshot.wanted}
        titles = {wanted.title for wanted in snapshot.wanted}
        self._troubles = {key: value for key, value in self._troubles.items() if key in numbers}
        kept_from_s = self._now_s() - REASONS_KEPT_S
        self._reasons = {
            title: (reason, at_s)
            for title, (reason, at_s) in self._reasons.items()
            if title in titles or at_s > kept_from_s
        }

    def _stop(self, name: SeatName) -> None:
        local = self._seats.get(name)
        if local is None:
            self._free.add(name)
        else:
            self._drain(local)

    def _lose(self, name: SeatName) -> None:
        """Another node has the seat, because this one's lease had run out."""
        local = self._seats.pop(name)
        self._log.warning("seat taken by another node", model=local.wanted.model, seat=str(name))
        self._drain(local)
        self._outgoing.append(local)

    def _drain(self, local: _Local) -> None:
        if local.kill_at_s is None:
            within_s = LOADING_STOP_S if local.served_at_s is None else self._drain_s + LOADING_STOP_S
            local.kill_at_s = self._now_s() + within_s
            local.process.drain()

    # --- stopping ------------------------------------------------------------------------------------------

    def stop(self) -> bool:
        """Drain all processes, and wait for them. Whether all ended in time. `leave` before."""
        for local in self._locals():
            self._drain(local)
        is_clean = True
        for local in self._locals():
            assert local.kill_at_s is not None
            is_clean &= local.process.wait(max(0.1, local.kill_at_s - self._now_s()))
        return is_clean
