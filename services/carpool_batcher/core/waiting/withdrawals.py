"""Withdrawals of requests: which were read and not carried out yet, and when to look for their requests.

To find the waiting requests that a withdrawal names, all that wait must be looked at: an index of them would
cost every request more than the rare look does (docs/decisions/0006). So that producers who withdraw often do
not hold up the others, the IDs are collected and looked for together, and after each look there is a pause.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool.messages.requests import Entry, Run, Withdrawal
from carpool.messages.results import Refusal
from carpool_batcher.core.decisions import Cancel

ArrivedLater = dict[str, set[Run] | None]

PAUSE_US: Final = 2  # after a look, for each request that waits: about 20 times what the look took


class Withdrawn(NamedTuple):
    """What becomes of withdrawals: answers to waiting requests and to those in flight, and the entries of the
    withdrawals that were carried out."""

    refusals: Sequence[Refusal]
    cancelled: Sequence[Cancel]
    entries: Sequence[Entry]


class PendingWithdrawals:
    """Withdrawals that were read and not carried out.

    `arrived_later`: for each ID that was withdrawn, the runs with it that arrived after its last withdrawal,
    if there are any. These are not withdrawn.
    """

    def __init__(self) -> None:
        self.arrived_later: ArrivedLater = {}
        self._entries: list[Entry] = []
        self._pause_ends_us = 0

    def add(self, withdrawal: Withdrawal) -> None:
        """This withdrawal was read."""
        self.arrived_later.update(dict.fromkeys(withdrawal.correlation_ids))
        self._entries.append(withdrawal.entry)

    def arrive(self, run: Run) -> None:
        """This run was read after all of these withdrawals."""
        for name in self.arrived_later.keys() & run.correlation_ids:
            runs = self.arrived_later[name]
            if runs is None:
                self.arrived_later[name] = {run}
            else:
                runs.add(run)

    def due_us(self, waiting: int) -> int | None:
        """When to look for their requests, of which `waiting` wait; None if there is none.

        At once where as many IDs are withdrawn as requests wait: so few IDs are kept, and the look costs
        little for each of them.
        """
        if not self._entries:
            return None
        return 0 if len(self.arrived_later) + len(self._entries) >= waiting else self._pause_ends_us

    def pop_all(self, waiting: int, now_us: int) -> tuple[ArrivedLater, list[Entry]]:
        """All IDs, with the runs that are not withdrawn, and the entries. They are looked for now."""
        taken = self.arrived_later, self._entries
        self.arrived_later, self._entries = {}, []
        self._pause_ends_us = now_us + PAUSE_US * waiting
        return taken
