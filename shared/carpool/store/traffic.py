"""The shares of a model's traffic by version, in Redis: what operators set, and others look up."""

from __future__ import annotations

from typing import Any

from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.store.directory import SETTLED_ENTRIES_MAX, no_errors, texts
from carpool.wire.traffic import (
    Shares,
    promoted,
    read_shares,
    read_shares_command,
    rolled_back,
    set_shares_commands,
)


class Traffic:
    """The shares of one model. All of it raises LinkError and CommandError."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def shares(self) -> dict[str, int]:
        """Per cents by version; empty if none has a share."""
        return read_shares(texts(self._link.call(*read_shares_command(self._keys))))

    def set(self, shares: Shares) -> None:
        """Replace all shares. Batchers learn of it at once. Raises ValueError."""
        commands = set_shares_commands(self._keys, shares, SETTLED_ENTRIES_MAX)
        *_, executed = no_errors(self._link.call_many(*commands))
        replies: list[Any] = executed
        no_errors(replies)

    def promote(self, version: str | None = None) -> dict[str, int]:
        """Give all traffic to a version: by default the only one with a share. Returns the shares. Raises
        ValueError."""
        shares = promoted(self.shares(), version)
        self.set(shares)
        return shares

    def roll_back(self, version: str | None = None) -> dict[str, int]:
        """Give no traffic to a version: by default the only one with a share. Returns the shares. Raises
        ValueError."""
        shares = rolled_back(self.shares(), version)
        self.set(shares)
        return shares
