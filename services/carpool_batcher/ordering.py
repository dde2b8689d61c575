"""The batcher's part in `preserve_ordering`: it issues tickets, and estimates how many results are withheld.

Results are withheld and delivered by the scripts that write them: see `carpool/store/lua/ordering/README.md`.
A few times a second the batcher delivers what they left over, and frees the tickets of lost requests.
Withheld results count as waiting (`max_queue_size`), because they use Redis's memory as waiting requests do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.messages import Entry, Refusal, Run, TicketRange, Tickets, Withdrawal
from carpool.store.batcher import BatcherStore
from carpool.store.directory import ModelSnapshot
from carpool.store.results import FirstTicket
from carpool.wire.requests import Decoded
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.entries import EntryTable


class ResultOrder:
    """The order of one model's results, as its active batcher sees it."""

    def __init__(self, store: BatcherStore, scheduler: Scheduler, unread_entries: int) -> None:
        """`unread_entries`: entries that waited when this batcher took over, and that it has not read yet."""
        self._store = store
        self._scheduler = scheduler
        self._unread_entries = unread_entries
        self._in_flight: dict[str, list[TicketRange]] = {}  # by batch; those of settled ones are removed late

    def before_admission(self) -> None:
        """Count withheld results anew if the queue may be full: some may have been delivered since."""
        scheduler = self._scheduler
        counted = scheduler.waiting + scheduler.withheld
        if scheduler.withheld and 2 * counted > scheduler.settings.max_queue_size:
            self._count_withheld(self._store.admit(()).tickets)

    def admit(self, entries: Sequence[Entry]) -> None:
        """These entries were read. Their requests enter the order with their tickets, if it is preserved.

        Requests that were put back are in the order already, and keep their places. Entries that only say so
        lose their tickets.
        """
        self._unread_entries = max(0, self._unread_entries - len(entries))
        if not self._scheduler.settings.preserve_ordering:
            entries = [entry for entry in entries if entry.claimed_tickets is not None]
        if not entries:
            return
        tickets, forged = self._store.admit(entries)
        for entry in forged:
            for run in entry.runs:
                run.tickets = None
        self._count_withheld(tickets)

    def launched(self, batch_id: str, runs: Iterable[Run]) -> None:
        """These runs are in flight in this batch."""
        ranges = [of_range for run in runs if run.tickets is not None for of_range in run.tickets.ranges]
        if ranges:
            self._in_flight[batch_id] = ranges

    def refresh(self, snapshot: ModelSnapshot, entries: EntryTable) -> None:
        """Count withheld results, and release those that only wait for a ticket whose request was lost.

        The tickets are there also after an operator turned `preserve_ordering` off.
        """
        if snapshot.waiting_entries <= len(entries):
            self._unread_entries = 0  # some of them were withdrawn before they were read
        in_flight = self._scheduler.in_flight()
        self._in_flight = {name: ranges for name, ranges in self._in_flight.items() if name in in_flight}

        def is_known(first: FirstTicket) -> bool:
            return first.waiting_in in entries or any(
                of_range.entry_id == first.entry_id and 0 <= first.position - of_range.first < of_range.size
                for ranges in self._in_flight.values()
                for of_range in ranges
            )

        self._count_withheld(self._store.release(is_known) if snapshot.entries_in_order else 0)

    def _count_withheld(self, tickets: int) -> None:
        """Tickets that belong neither to waiting requests nor to requests in flight have withheld results.

        While there are entries that a previous batcher read and this one did not, their tickets cannot be
        told from those of withheld results: then assume that none are withheld.
        """
        scheduler = self._scheduler
        in_flight = sum(batch.size for batch in scheduler.in_flight().values())
        withheld = max(0, tickets - scheduler.waiting - in_flight)
        scheduler.set_withheld(0 if self._unread_entries else withheld)


def issue_tickets(decoded: Iterable[Decoded]) -> None:
    """Give the runs of an entry their tickets, unless they were put back with them."""
    position = 0
    for item in decoded:
        if type(item) is Withdrawal:
            continue
        if type(item) is Run and item.tickets is None:
            item.tickets = Tickets.of(item.entry.id, position, len(item))
        position += len(item.correlation_ids)


def withdraw_tickets(refusals: Iterable[Refusal]) -> None:
    """Requests that are refused on arrival need no tickets; those that were put back have places already."""
    for refusal in refusals:
        if refusal.run is not None and refusal.entry.claimed_tickets is None:
            refusal.run.tickets = None
