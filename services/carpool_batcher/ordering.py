"""The batcher's part in `preserve_ordering`: it issues tickets, and estimates how many results are withheld.

Results are withheld and delivered by the scripts that write them: see `carpool/store/lua/ordering/README.md`.
A few times a second the batcher delivers what they left over, and frees the tickets of lost requests.
Withheld results count as waiting (`max_queue_size`), because they use Redis's memory as waiting requests do.
"""

from __future__ import annotations

from collections.abc import Sequence

from carpool.messages import Entry, Run
from carpool.store.batcher import BatcherStore
from carpool.store.directory import ModelSnapshot
from carpool.wire.requests import ticket_of
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.entries import EntryTable


class ResultOrder:
    """The order of one model's results, as its active batcher sees it."""

    def __init__(self, store: BatcherStore, scheduler: Scheduler, unread_entries: int) -> None:
        """`unread_entries`: entries that waited when this batcher took over, and that it has not read yet."""
        self._store = store
        self._scheduler = scheduler
        self._unread_entries = unread_entries

    def before_admission(self) -> None:
        """Count withheld results anew if the queue may be full: some may have been delivered since."""
        scheduler = self._scheduler
        counted = scheduler.waiting + scheduler.withheld
        if scheduler.withheld and 2 * counted > scheduler.settings.max_queue_size:
            self._count_withheld(self._store.admit(()))

    def admit(self, entries: Sequence[Entry]) -> None:
        """These entries were read. Their requests enter the order with their tickets, if it is preserved.

        A request that was put back is in the order already, and keeps its place.
        """
        self._unread_entries = max(0, self._unread_entries - len(entries))
        if self._scheduler.settings.preserve_ordering:
            self._count_withheld(self._store.admit(entries))

    def refresh(self, snapshot: ModelSnapshot, entries: EntryTable) -> None:
        """Count withheld results, and release those that only wait for a ticket whose request was lost.

        The tickets are there also after an operator turned `preserve_ordering` off.
        """
        if snapshot.waiting_entries <= len(entries):
            self._unread_entries = 0  # some of them were withdrawn before they were read
        self._count_withheld(snapshot.tickets)
        if snapshot.tickets:
            self._store.release(entries, self._scheduler.in_flight())

    def _count_withheld(self, tickets: int) -> None:
        """Tickets that belong neither to waiting requests nor to requests in flight have withheld results.

        While there are entries that a previous batcher read and this one did not, their tickets cannot be
        told from those of withheld results: then assume that none are withheld.
        """
        scheduler = self._scheduler
        in_flight = sum(batch.size for batch in scheduler.in_flight().values())
        withheld = max(0, tickets - scheduler.waiting - in_flight)
        scheduler.set_withheld(0 if self._unread_entries else withheld)


def issue_tickets(run: Run, position: int) -> None:
    """Give a run its tickets, unless it was put back with them. `position`: of its first request."""
    if run.tickets is None:
        run.tickets = [ticket_of(run.entry.id, position + at) for at in range(len(run))]
