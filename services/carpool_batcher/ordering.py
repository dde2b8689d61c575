"""The batcher's part in `preserve_ordering`: it issues tickets, and estimates how many results are withheld.

Results are withheld and delivered by the scripts that write them: see `carpool/store/lua/ordering/README.md`.
A few times a second the batcher delivers what they left over, and frees the tickets of lost requests.
Withheld results count as waiting (`max_queue_size`), because they use Redis's memory as waiting requests do.

Why: docs/decisions/0024.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.messages.requests import Entry, Run
from carpool.store.batcher import BatcherStore
from carpool.store.directory import ModelSnapshot
from carpool.store.results import FirstTicket
from carpool.tickets import TicketRange, Tickets
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.entries import EntryTable


class ResultOrder:
    """The order of one model's results, as its active batcher sees it."""

    def __init__(self, store: BatcherStore, scheduler: Scheduler, unread_entries: int) -> None:
        """`unread_entries`: entries that waited when this batcher took over, and that it has not read yet."""
        self._store = store
        self._scheduler = scheduler
        self._unread_entries = unread_entries
        self._arrivals: list[TicketRange] = []  # issued, and not in the order yet
        self._in_flight: dict[str, list[TicketRange]] = {}  # by batch; those of settled ones are removed late

    def before_admission(self) -> None:
        """Count withheld results anew if the queue may be full: some may have been delivered since."""
        scheduler = self._scheduler
        counted = scheduler.queue.count + scheduler.queue.withheld
        if scheduler.queue.withheld and 2 * counted > scheduler.settings.max_queue_size:
            self.admit()

    def verify(self, entries: Sequence[Entry]) -> None:
        """These entries were read. Those that were put back keep their tickets; those that only say so have
        none. Before any request of them is refused, dispatched or put back."""
        self._unread_entries = max(0, self._unread_entries - len(entries))
        put_back = [entry for entry in entries if entry.stated_tickets is not None]
        if put_back:
            for entry in self.admit(put_back):
                for run in entry.runs:
                    run.tickets = None

    def issue(self, arrived: Sequence[Run]) -> None:
        """These runs arrived, and those of them that are refused on arrival are no longer in their entries.
        The others get tickets, if order is preserved. These enter the order with the next dispatch, or by
        `admit`, which must be called before any of the requests is refused."""
        if self._scheduler.settings.preserve_ordering:
            for entry in dict.fromkeys(run.entry for run in arrived):
                if issue_tickets(entry):
                    self._arrivals.append(TicketRange(entry.id, 0, sum(map(len, entry.runs))))

    def admit(self, put_back: Sequence[Entry] = ()) -> list[Entry]:
        """Put tickets into the order that are not there yet, and count withheld results.

        Returns those of the entries that were `put_back` whose tickets are not theirs.
        """
        tickets, forged = self._store.admit(self.take_arrivals(), put_back)
        self._count_withheld(tickets)
        return forged

    def admit_if_any(self) -> None:
        """Put tickets into the order, if some are not there yet."""
        if self._arrivals:
            self.admit()

    def take_arrivals(self) -> list[TicketRange]:
        """The tickets that are not in the order yet: the caller puts them there."""
        arrivals, self._arrivals = self._arrivals, []
        return arrivals

    def dispatched(self, tickets: int | None) -> None:
        """A dispatch put tickets into the order; there are as many, None if it put none there."""
        if tickets is not None:
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
        has_tickets = snapshot.entries_in_order or self._arrivals
        self.admit_if_any()
        if snapshot.waiting_entries <= len(entries):
            self._unread_entries = 0  # some of them were withdrawn before they were read
        in_flight = self._scheduler.in_flight.batches
        self._in_flight = {name: ranges for name, ranges in self._in_flight.items() if name in in_flight}

        def is_known(first: FirstTicket) -> bool:
            return first.waiting_in in entries or any(
                of_range.entry_id == first.entry_id and 0 <= first.position - of_range.first < of_range.size
                for ranges in self._in_flight.values()
                for of_range in ranges
            )

        self._count_withheld(self._store.release(is_known) if has_tickets else 0)

    def _count_withheld(self, tickets: int) -> None:
        """Tickets that belong neither to waiting requests nor to requests in flight have withheld results.

        While there are entries that a previous batcher read and this one did not, their tickets cannot be
        told from those of withheld results: then assume that none are withheld.
        """
        scheduler = self._scheduler
        in_flight = sum(batch.size for batch in scheduler.in_flight.batches.values())
        withheld = max(0, tickets - scheduler.queue.count - in_flight)
        scheduler.queue.withheld = 0 if self._unread_entries else withheld


def issue_tickets(entry: Entry) -> bool:
    """Give the runs of an entry their tickets. Returns False if it has none, or was put back with them."""
    if entry.stated_tickets is not None:
        return False
    first = 0
    for run in entry.runs:
        run.tickets = Tickets.of(entry.id, first, len(run))
        first += len(run)
    return first > 0
