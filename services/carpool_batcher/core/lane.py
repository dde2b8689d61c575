"""The waiting requests of one lane: ten priorities, tenants in fair turns within each, first in first out.

Turns are start-time fair queueing (Goyal, Vin and Cheng, 1996): a tenant's next request begins when its last
one ended, or now if it had none waiting, and lasts its cost divided by the tenant's weight; who begins first
is next. So a flood delays nobody but its own producer, and a tenant alone has everything.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, count
from types import MappingProxyType
from typing import Final, NamedTuple

from carpool.messages import PRIORITY_LEVELS, Request

NO_WEIGHTS: Final[Mapping[str, float]] = MappingProxyType({})
NEVER: Final = 1 << 62
LATE: Final = 0  # the level of what has expired and is to be served all the same: behind all priorities


REMEMBERED: Final = 16  # beside twice those who wait


class Turn(NamedTuple):
    """When a tenant's next request begins, in virtual time; among equals who was told so first is first."""

    begins: float
    number: int
    tenant: str


class Level:
    """The requests of one priority. O(1) for one tenant; O(log tenants that wait) for more."""

    __slots__ = ("_next", "_now", "_number", "_queues", "_turns")

    def __init__(self) -> None:
        # An OrderedDict and not a deque: expired and withdrawn requests leave from the middle.
        self._queues: dict[str, OrderedDict[Request, None]] = {}
        self._next: dict[str, Turn] = {}  # when each tenant's next request begins
        self._turns: list[Turn] = []  # a heap of these; one that is not true any more is skipped
        self._number = count()
        self._now = 0.0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, request: Request) -> bool:
        queue = self._queues.get(request.tenant)
        return queue is not None and request in queue

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self._queues.values())

    def add(self, request: Request) -> None:
        """Append, or insert by arrival where the request was put back under a later entry ID."""
        queue = self._queues.get(request.tenant)
        if queue is None:
            queue = self._queues[request.tenant] = OrderedDict()
            turn = self._next.get(request.tenant)
            self._begin(request.tenant, self._now if turn is None else max(self._now, turn.begins))
        if queue and next(reversed(queue)).arrival_us > request.arrival_us:
            later = [one for one in queue if one.arrival_us > request.arrival_us]
            queue[request] = None
            for one in later:
                queue.move_to_end(one)
        else:
            queue[request] = None

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it stands."""
        queue = self._queues[request.tenant]
        del queue[request]
        if not queue:
            self._close(request.tenant)

    def first(self) -> Request:
        """Whose turn it is. There must be somebody."""
        return next(iter(self._queues[self._turn()]))

    def pop(self, weights: Mapping[str, float]) -> Request:
        """Take out whose turn it is."""
        tenant = self._turn()
        queue = self._queues[tenant]
        request, _ = queue.popitem(last=False)
        if len(self._next) > 1:
            begins = self._next[tenant].begins
            self._now = max(self._now, begins)
            self._begin(tenant, begins + _share(request, weights))
        if not queue:
            self._close(tenant)
        return request

    def in_order(self, weights: Mapping[str, float]) -> Iterator[Request]:
        """Everybody, in the order of their turns."""
        if len(self._queues) < 2:
            yield from self
            return
        numbers = count()
        turns = [turn._replace(number=next(numbers)) for turn in sorted(self._waiting_turns())]
        queues = {name: iter(queue) for name, queue in self._queues.items()}
        while turns:  # sorted, and so a heap
            begins, _, name = turns[0]
            request = next(queues[name], None)
            if request is None:
                heapq.heappop(turns)
            else:
                heapq.heapreplace(turns, Turn(begins + _share(request, weights), next(numbers), name))
                yield request

    def oldest_us(self) -> int:
        """When the one who waits longest arrived. There must be somebody. O(tenants that wait)."""
        return min(next(iter(queue)).arrival_us for queue in self._queues.values())

    def _turn(self) -> str:
        if len(self._queues) == 1:
            return next(iter(self._queues))
        turns = self._turns
        while turns[0].tenant not in self._queues or turns[0] is not self._next[turns[0].tenant]:
            heapq.heappop(turns)
        return turns[0].tenant

    def _waiting_turns(self) -> list[Turn]:
        return [self._next[name] for name in self._queues]

    def _begin(self, tenant: str, begins: float) -> None:
        turn = self._next[tenant] = Turn(begins, next(self._number), tenant)
        if len(self._turns) > 2 * len(self._queues) + REMEMBERED:
            self._turns = sorted(self._waiting_turns())
        else:
            heapq.heappush(self._turns, turn)

    def _close(self, tenant: str) -> None:
        """Nobody of a tenant waits. What it had beyond its share is remembered while others wait."""
        del self._queues[tenant]
        if not self._queues:
            self._next.clear()
            self._turns.clear()
            self._now = 0.0
        elif len(self._next) > 2 * len(self._queues) + REMEMBERED:
            self._forget_some()

    def _forget_some(self) -> None:
        """Producers may make up a new name for each request. Half of the names of which nobody waits are
        forgotten, and nobody new begins before them: new names without end would starve who waits."""
        gone = sorted(turn for name, turn in self._next.items() if name not in self._queues)
        gone = gone[: 1 + len(gone) // 2]
        for turn in gone:
            del self._next[turn.tenant]
        self._now = max(self._now, gone[-1].begins)


def _share(request: Request, weights: Mapping[str, float]) -> float:
    """How long a request's turn lasts, in virtual time."""
    return max(request.cost, 1) / weights.get(request.tenant, 1.0)


class Earliest:
    """The earliest of what requests aim at, while they come and go. Who aims at nothing is not kept, and who
    has left is skipped.

    Most aim at no less than who came before, and leave in that order: they are a row that rises, O(1) for
    each. The others are a heap, O(log of those).
    """

    __slots__ = ("_others", "_rising", "objective")

    def __init__(self, objective: Callable[[Request], int], requests: Iterable[Request]) -> None:
        self.objective = objective
        self._rising: deque[tuple[int, Request]] = deque()
        self._others: list[tuple[int, int, Request]] = []
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self._rising) + len(self._others)

    def add(self, request: Request) -> None:
        """A request waits."""
        at_us = self.objective(request)
        if at_us == NEVER:
            return
        if not self._rising or at_us >= self._rising[-1][0]:
            self._rising.append((at_us, request))
        else:
            heapq.heappush(self._others, (at_us, id(request), request))

    def first_us(self, waits: Callable[[Request], bool]) -> int:
        """The earliest of those that wait; NEVER if there is none."""
        rising, others = self._rising, self._others
        while rising and not waits(rising[0][1]):
            rising.popleft()
        while others and not waits(others[0][2]):
            heapq.heappop(others)
        return min(rising[0][0] if rising else NEVER, others[0][0] if others else NEVER)


class Lane:
    """Requests that may share a batch. Every operation is O(1) but `add` of a request that came back late."""

    __slots__ = (
        "_earliest",
        "_head",
        "bytes",
        "cost",
        "count",
        "late",
        "levels",
        "name",
        "urgent",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.levels = [Level() for _ in range(1 + PRIORITY_LEVELS)]  # LATE, then by priority
        self.count = 0
        self.cost = 0
        self.bytes = 0
        self.urgent: set[Request] = set()
        self.late: set[Request] = set()
        self._earliest: Earliest | None = None  # until somebody asks for it
        self._head: tuple[int, int] | None = None  # kept, since a producer may make a lane of each request

    def __contains__(self, request: Request) -> bool:
        return request in self.levels[self._rank(request)]

    def __iter__(self) -> Iterator[Request]:
        return chain.from_iterable(self.levels)

    def _rank(self, request: Request) -> int:
        return LATE if request in self.late else 1 + request.priority

    def add(self, request: Request) -> None:
        """A request waits."""
        rank = self._rank(request)
        self.levels[rank].add(request)
        if self._earliest is not None:
            self._earliest.add(request)
            if len(self._earliest) > 2 * self.count + 64:
                self._earliest = None  # most have left, and perhaps nobody asks any more
        head = self._head
        if not self.count:
            self._head = rank, request.arrival_us
        elif head is not None and LATE in (rank, head[0]):
            self._head = None
        elif head is not None and (rank > head[0] or request.arrival_us < head[1]):
            self._head = max(head[0], rank), min(head[1], request.arrival_us)
        self.count += 1
        self.cost += request.cost
        self.bytes += bytes_of(request)

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it stands."""
        self.levels[self._rank(request)].remove(request)
        self.count -= 1
        self.cost -= request.cost
        self.bytes -= bytes_of(request)
        self.urgent.discard(request)
        self.late.discard(request)
        self._head = None

    def put_behind(self, request: Request) -> None:
        """A request has expired, and is to be served when nobody else waits."""
        self.remove(request)
        self.late.add(request)
        self.add(request)

    def in_order(self, weights: Mapping[str, float]) -> Iterator[Request]:
        """Everybody, in the order in which `take` would."""
        return chain.from_iterable(level.in_order(weights) for level in reversed(self.levels))

    def fitting(
        self, max_size: int, max_cost: int | None, max_bytes: int, weights: Mapping[str, float]
    ) -> list[Request]:
        """Whom `take` would take, left where they are."""
        fitting: list[Request] = []
        cost = size_bytes = 0
        for request in self.in_order(weights):
            cost, size_bytes = cost + request.cost, size_bytes + bytes_of(request)
            over = (max_cost is not None and cost > max_cost) or size_bytes > max_bytes
            if fitting and (over or len(fitting) == max_size):
                break
            fitting.append(request)
        return fitting

    def earliest_us(self, objective: Callable[[Request], int]) -> int:
        """The earliest of what `objective` says of each that is not late; NEVER if there is none.

        O(1) where later arrivals aim at later times; O(n) when it is asked for the first time, or for another
        objective.
        """
        if self._earliest is None or self._earliest.objective is not objective:
            self._earliest = Earliest(objective, self)
        return self._earliest.first_us(self._is_in_time)

    def _is_in_time(self, request: Request) -> bool:
        return request in self and request not in self.late

    def head(self) -> tuple[int, int]:
        """The highest rank that waits, and the arrival of who waits longest: of those who are not late, or of
        the late where nobody else waits. There must be somebody."""
        if self._head is None:
            ranks = [rank for rank, level in enumerate(self.levels) if level]
            in_time = [rank for rank in ranks if rank != LATE] or ranks
            self._head = ranks[-1], min(self.levels[rank].oldest_us() for rank in in_time)
        return self._head

    def take(
        self,
        max_size: int,
        max_cost: int | None,
        max_bytes: int,
        weights: Mapping[str, float] = NO_WEIGHTS,
    ) -> list[Request]:
        """Remove and return the next batch: highest priority first, in order, stopping at the first that
        would pass a limit. At least one request."""
        taken: list[Request] = []
        cost = size_bytes = 0
        for level in reversed(self.levels):
            while level:
                request = level.first()
                next_cost, next_bytes = cost + request.cost, size_bytes + bytes_of(request)
                over = (max_cost is not None and next_cost > max_cost) or next_bytes > max_bytes
                if taken and (over or len(taken) == max_size):
                    break
                taken.append(level.pop(weights))
                cost, size_bytes = next_cost, next_bytes
            if level:
                break
        self.count -= len(taken)
        self.cost -= cost
        self.bytes -= size_bytes
        if self.urgent:
            self.urgent.difference_update(taken)
        if self.late:
            self.late.difference_update(taken)
        self._head = None
        return taken


def bytes_of(request: Request) -> int:
    """What a request brings along: its body, and the fields that are the model's to read."""
    if request.extra is None:
        return len(request.body)
    return len(request.body) + sum(len(name) + len(value) for name, value in request.extra.items())
