"""The waiting requests of one lane: ten priorities, first in first out within each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from carpool.messages import PRIORITY_LEVELS, Request


class Lane:
    """Requests that may share a batch. Every operation is O(1) but `add` of a request that came back late."""

    __slots__ = ("_head", "bytes", "cost", "count", "levels", "name", "urgent")

    def __init__(self, name: str) -> None:
        self.name = name
        # An OrderedDict and not a deque: expired and withdrawn requests leave from the middle.
        self.levels: list[OrderedDict[Request, None]] = [OrderedDict() for _ in range(PRIORITY_LEVELS)]
        self.count = 0
        self.cost = 0
        self.bytes = 0
        self.urgent: set[Request] = set()
        self._head: tuple[int, int] | None = None  # kept, since a producer may make a lane of each request

    def __contains__(self, request: Request) -> bool:
        return request in self.levels[request.priority]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.levels)

    def add(self, request: Request) -> None:
        """Append, or insert by arrival where the request was put back under a later entry ID."""
        level = self.levels[request.priority]
        if level and next(reversed(level)).arrival_us > request.arrival_us:
            later = [one for one in level if one.arrival_us > request.arrival_us]
            level[request] = None
            for one in later:
                level.move_to_end(one)
        else:
            level[request] = None
        head = self._head
        if not self.count:
            self._head = request.priority, request.arrival_us
        elif head is not None and (request.priority > head[0] or request.arrival_us < head[1]):
            self._head = max(head[0], request.priority), min(head[1], request.arrival_us)
        self.count += 1
        self.cost += request.cost
        self.bytes += bytes_of(request)

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it stands."""
        del self.levels[request.priority][request]
        self.count -= 1
        self.cost -= request.cost
        self.bytes -= bytes_of(request)
        self.urgent.discard(request)
        self._head = None

    def head(self) -> tuple[int, int]:
        """The highest priority that waits, and the arrival of who waits longest. There must be somebody."""
        if self._head is None:
            heads = [(at, next(iter(level)).arrival_us) for at, level in enumerate(self.levels) if level]
            self._head = heads[-1][0], min(arrival_us for _, arrival_us in heads)
        return self._head

    def take(self, max_size: int, max_cost: int | None, max_bytes: int) -> list[Request]:
        """Remove and return the next batch: highest priority first, in order, stopping at the first that
        would pass a limit. At least one request."""
        taken: list[Request] = []
        cost = size_bytes = 0
        for level in reversed(self.levels):
            while level:
                request = next(iter(level))
                next_cost, next_bytes = cost + request.cost, size_bytes + bytes_of(request)
                over = (max_cost is not None and next_cost > max_cost) or next_bytes > max_bytes
                if taken and (over or len(taken) == max_size):
                    break
                level.popitem(last=False)
                taken.append(request)
                cost, size_bytes = next_cost, next_bytes
            if level:
                break
        self.count -= len(taken)
        self.cost -= cost
        self.bytes -= size_bytes
        if self.urgent:
            self.urgent.difference_update(taken)
        self._head = None
        return taken


def bytes_of(request: Request) -> int:
    """What a request brings along: its body, and the fields that are the model's to read."""
    if request.extra is None:
        return len(request.body)
    return len(request.body) + sum(len(name) + len(value) for name, value in request.extra.items())
