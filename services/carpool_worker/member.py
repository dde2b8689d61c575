"""A replica as a member of its model's group of consumers, in which each batch has an owner."""

from __future__ import annotations

from typing import Final

BEATS_PER_LEASE: Final = 3  # how often a lease is renewed while it lasts


class Member:
    """One for all parts of a replica, and for the heartbeat, which renews its lease while it `is_joined`.

    `name` owns what the replica has in hand. `can_be_revived`: under this name, after its lease ran out. If
    not, `is_over` says that the replica has to go on under another name.
    """

    def __init__(self, name: str, *, is_joined: bool = True, can_be_revived: bool = True) -> None:
        self.name = name
        self.is_joined = is_joined
        self.can_be_revived = can_be_revived
        self.is_over = False
        self.lost_leases = 0  # how often its lease had run out
        self.model_processes = 0  # live ones of this model, in all workers, at the last heartbeat; 0 before

    def lost_lease(self, name: str) -> None:
        """The lease under this name had run out: others take its owner for dead."""
        self.lost_leases += 1
        if name == self.name and not self.can_be_revived:
            self.is_over = True
