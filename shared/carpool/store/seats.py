"""What a node does in Redis: it keeps its lease, and claims, holds and gives back seats.

Why: docs/decisions/0111.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from carpool.keys import DEFAULT_PREFIX, NodesKeys
from carpool.store.connection import Link, Script
from carpool.store.directory import no_errors
from carpool.store.nodes import FAIL
from carpool.wire.nodes import SeatName, SeatState, Snapshot, Wanted, decode_snapshot, snapshot_commands

FORGOTTEN_MS: Final = 600_000  # after which a node that is gone is not in Redis any more
FREE: Final = "FREE"
SeatUpdate = SeatState | Literal["FREE"]

_RECORDS: Final = ("nodes/generations",)
HOLD: Final = Script("nodes/hold")
SETTLE: Final = Script("nodes/settle", after=_RECORDS)
YIELD: Final = Script("nodes/yield", after=_RECORDS)


class SeatStore:
    """The seats of one node. `link` must lead to the node of a cluster that has `NodesKeys.wanted`.

    All of it raises LinkError and CommandError.
    """

    def __init__(self, link: Link, node: str, lease_ms: int, prefix: str = DEFAULT_PREFIX) -> None:
        self._link = link
        self._node = node
        self._lease_ms = lease_ms
        self._keys = NodesKeys(prefix)
        self._reported = ""

    def hold(self, report: str, seats: Mapping[SeatName, SeatUpdate]) -> tuple[frozenset[SeatName], Snapshot]:
        """Renew the lease, report, and say what becomes of these seats. Claims are LOADING; FREE gives a seat
        back, also one of a node that is gone.

        Returns those that other nodes have, or that are not to be claimed, and how all is after that.
        """
        updates = [part for name, state in seats.items() for part in (str(name), str(state))]
        refused = self._hold("" if report == self._reported else report, updates)
        snapshot = self.snapshot()
        if not any(one.name == self._node and one.room for one in snapshot.nodes):
            self._hold(report, [])  # Redis was emptied, or the node had been forgotten
            snapshot = self.snapshot()
        self._reported = report
        names = [SeatName.parse(name.decode()) for name in refused]
        return frozenset(name for name in names if name is not None), snapshot

    def _hold(self, report: str, updates: Sequence[str]) -> list[bytes]:
        keys = self._keys
        args = [self._node, str(self._lease_ms), report, str(FORGOTTEN_MS), *updates]
        refused: list[bytes] = self._link.run(HOLD, [keys.leases, keys.reports, keys.seats], args)
        return refused

    def snapshot(self) -> Snapshot:
        """What is wanted, the seats, and the living nodes."""
        return decode_snapshot(no_errors(self._link.call_many(*snapshot_commands(self._keys))))

    def leave(self) -> None:
        """Give all seats back, and be no node any more."""
        keys = self._keys
        self._reported = ""
        args = [self._node, "0", "", str(FORGOTTEN_MS)]
        self._link.run(HOLD, [keys.leases, keys.reports, keys.seats], args)

    def settle(self, wanted: Wanted) -> bool:
        """If all of this generation serves, what it replaces goes. Whether it does."""
        args = [wanted.model, str(wanted.generation)]
        return bool(self._link.run(SETTLE, self._lua_keys(with_leases=True), args))

    def yield_seat(self, wanted: Wanted, number: int) -> bool:
        """Give up a seat of a generation that leaves. Whether enough others serve for that."""
        args = [wanted.model, str(wanted.generation), str(number)]
        return bool(self._link.run(YIELD, self._lua_keys(with_leases=True), args))

    def fail(self, wanted: Wanted, reason: str) -> bool:
        """This generation cannot be loaded. False if it served in full before, or is not wanted."""
        args = [wanted.model, str(wanted.generation), reason]
        return bool(self._link.run(FAIL, self._lua_keys(with_leases=False), args))

    def _lua_keys(self, *, with_leases: bool) -> list[str]:
        keys = self._keys
        return [keys.wanted, keys.seats, keys.outcomes, *([keys.leases] if with_leases else [])]
