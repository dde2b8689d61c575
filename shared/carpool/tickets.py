"""Tickets: places in the order of results (`preserve_ordering`), as ranges."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class TicketRange(NamedTuple):
    """Consecutive places in the order of results, as an argument of scripts: `ENTRY:FIRST+COUNT`.

    They belong to the requests from position `first` on of the entry in which these arrived.
    """

    entry_id: str
    first: int
    size: int

    def __str__(self) -> str:
        return f"{self.entry_id}:{self.first}+{self.size}"


class Tickets(NamedTuple):
    """The places of a run's requests in the order of results, in the order of the requests.

    Usually one range; several after requests were taken out of the middle. No two ranges that follow each
    other could be one.
    """

    ranges: tuple[TicketRange, ...]

    @classmethod
    def of(cls, entry_id: str, first: int, size: int) -> Tickets:
        """Those of the `size` requests from position `first` on of the entry."""
        return cls((TicketRange(entry_id, first, size),))

    @classmethod
    def join(cls, ranges: Iterable[TicketRange]) -> Tickets:
        """These ranges, one after the other."""
        joined: list[TicketRange] = []
        for entry_id, first, size in ranges:
            if joined:
                last = joined[-1]
                if last.entry_id == entry_id and last.first + last.size == first:
                    joined[-1] = TicketRange(entry_id, last.first, last.size + size)
                    continue
            joined.append(TicketRange(entry_id, first, size))
        return cls(tuple(joined))

    @property
    def size(self) -> int:
        """The number of tickets."""
        return sum(of_range.size for of_range in self.ranges)

    def slice(self, start: int, stop: int) -> Tickets:
        """Those of the requests from index `start` to before `stop`."""
        if len(self.ranges) == 1:
            entry_id, first, _ = self.ranges[0]
            return Tickets((TicketRange(entry_id, first + start, stop - start),))
        found: list[TicketRange] = []
        for entry_id, first, size in self.ranges:
            if start < size and stop > 0:
                skipped = max(0, start)
                found.append(TicketRange(entry_id, first + skipped, min(size, stop) - skipped))
            start, stop = start - size, stop - size
        return Tickets(tuple(found))

    def select(self, indexes: Iterable[int]) -> Tickets:
        """Those of the requests at these ascending indexes."""
        singles = self.singles()
        return Tickets.join([singles[at] for at in indexes])

    def singles(self) -> list[TicketRange]:
        """A range of one for each request."""
        if self.ranges[0].size == 1 and len(self.ranges) == 1:
            return [self.ranges[0]]
        return [
            TicketRange(entry_id, position, 1)
            for entry_id, first, size in self.ranges
            for position in range(first, first + size)
        ]
