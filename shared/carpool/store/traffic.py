"""The shares of a model's traffic by version, in Redis: what operators set, and others look up."""

from __future__ import annotations

from carpool.keys import Keys
from carpool.store.connection import Argument, Link
from carpool.store.directory import CHANGE, change_arguments, texts
from carpool.wire.audit import Actor
from carpool.wire.traffic import (
    Shares,
    check_shares,
    promoted,
    read_shares,
    read_shares_command,
    rolled_back,
)


def change_shares(
    keys: Keys, shares: Shares, *, actor: Actor, action: str = "share"
) -> tuple[list[str], list[Argument]]:
    """Keys and arguments of the script CHANGE that replaces all shares, and has the batcher look at once.
    Raises ValueError."""
    check_shares(shares)
    values = {version: str(share) for version, share in shares.items()}
    args = change_arguments("shares", actor, action, values, removes_others=True)
    return [keys.shares, keys.settled, keys.audit], args


class Traffic:
    """The shares of one model. All of it raises LinkError and CommandError."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def shares(self) -> dict[str, int]:
        """Per cents by version; empty if none has a share."""
        return read_shares(texts(self._link.call(*read_shares_command(self._keys))))

    def set(self, shares: Shares, *, actor: Actor, action: str = "share") -> None:
        """Replace all shares. Batchers learn of it at once. Raises ValueError."""
        self._link.run(CHANGE, *change_shares(self._keys, shares, actor=actor, action=action))

    def promote(self, version: str | None = None, *, actor: Actor) -> dict[str, int]:
        """Give all traffic to a version: by default the only one with a share. Returns the shares. Raises
        ValueError."""
        shares = promoted(self.shares(), version)
        self.set(shares, actor=actor, action="promote")
        return shares

    def roll_back(self, version: str | None = None, *, actor: Actor) -> dict[str, int]:
        """Give no traffic to a version: by default the only one with a share. Returns the shares. Raises
        ValueError."""
        shares = rolled_back(self.shares(), version)
        self.set(shares, actor=actor, action="rollback")
        return shares
