"""Which requests of a stepping model wait, which have a slot, and which take part in the next step. Pure.

The rules:
 1. Requests get slots in the order in which they were added. At most `size` have one.
 2. Together they cost at most `cost_max`, and those that get one between two steps at most
    `prefill_cost_max`. The first one always gets a slot: the costs never stop everything.
 3. A request that is to be alone gets a slot at once and takes some steps alone. If it does not fit, others
    are to be put back first: they get slots again before all that wait. After its steps, nothing takes one
    until `resume`, except further requests that are to be alone.
 4. A request has a slot until `end`, `drop` or `put_back`.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, Protocol, TypeVar


class Slotted(Protocol):
    """What slots know of a request. `key` identifies it, `cost` is at least 0."""

    @property
    def key(self) -> int: ...
    @property
    def cost(self) -> int: ...


T = TypeVar("T", bound=Slotted)


class Round(NamedTuple, Generic[T]):
    """What comes next: begin these, then step those. The ones that are begun take part in the step."""

    begun: list[T]
    stepped: list[T]
    is_alone: bool


class Slots(Generic[T]):
    """The requests of one model process."""

    def __init__(self, size: int, cost_max: int | None = None, prefill_cost_max: int | None = None) -> None:
        self.set_limits(size, cost_max, prefill_cost_max)
        self._waiting: dict[int, T] = {}  # by key, as all of these; in order
        self._waiting_alone: dict[int, T] = {}
        self._steps_alone: dict[int, int] = {}  # that are left to those that are to be alone, or are
        self._running: dict[int, T] = {}  # those that have a slot
        self._costs: dict[int, int] = {}  # of those, when they got it: a model may change what it sees
        self._cost = 0  # their sum
        self._is_paused = False

    @property
    def running(self) -> list[T]:
        """The requests that have a slot, in the order in which they got it."""
        return list(self._running.values())

    @property
    def occupied(self) -> int:
        """How many requests have a slot."""
        return len(self._running)

    @property
    def has_next(self) -> bool:
        """Whether the next round has anything to do."""
        if self._steps_alone:
            return True
        return not self._is_paused and bool(self._running or self._waiting)

    def set_limits(self, size: int, cost_max: int | None, prefill_cost_max: int | None) -> None:
        """From now on these hold for requests that get a slot (1, 2)."""
        self._size = size
        self._cost_max = cost_max
        self._prefill_cost_max = prefill_cost_max

    def add(self, request: T) -> None:
        """A request to be generated."""
        self._waiting[request.key] = request

    def add_alone(self, request: T, steps: int = 1) -> None:
        """A request to be begun at once, which takes `steps` steps alone; then everything pauses."""
        self._waiting_alone[request.key] = request
        self._steps_alone[request.key] = steps
        self._is_paused = True

    def resume(self) -> None:
        """All go on, after those that are still to be alone."""
        self._is_paused = False

    @property
    def lacks_space(self) -> bool:
        """Whether the request that is to be alone next does not fit beside those that have slots."""
        alone = self._waiting_alone.get(next(iter(self._steps_alone), -1))
        if alone is None or not self._running:
            return False
        return len(self._running) >= self._size or _is_over(self._cost + alone.cost, self._cost_max)

    def put_back(self, key: int) -> None:
        """The request of this key gives its slot up, and waits before all others."""
        request = self._running[key]
        self.end(key)
        self._waiting = {key: request} | self._waiting

    def next_round(self, *, admits: bool = True) -> Round[T]:
        """Give slots to the requests whose turn it is. Without `admits`, only to one that is to be alone:
        those that have slots have begun, and have not taken a step since."""
        if self._steps_alone:
            return self._next_alone(next(iter(self._steps_alone)))
        if self._is_paused:
            return Round([], [], False)
        return Round(self._admit() if admits else [], self.running, False)

    def end(self, key: int) -> None:
        """The request of this key ended: its slot is free."""
        del self._running[key]
        self._cost -= self._costs.pop(key)
        self._steps_alone.pop(key, None)

    def drop(self, key: int) -> T | None:
        """Forget the request of this key, if it is known. Returns it if it had a slot."""
        request = self._running.get(key)
        if request is not None:
            self.end(key)
        else:
            self._waiting.pop(key, None)
            self._waiting_alone.pop(key, None)
            self._steps_alone.pop(key, None)
        return request

    def _next_alone(self, key: int) -> Round[T]:
        begun: list[T] = []
        if key in self._waiting_alone:
            begun.append(self._waiting_alone.pop(key))
            self._occupy(begun[0])
        self._steps_alone[key] -= 1
        if not self._steps_alone[key]:
            del self._steps_alone[key]
        return Round(begun, [self._running[key]], True)

    def _admit(self) -> list[T]:
        admitted: list[T] = []
        prefill_cost = 0
        while self._waiting and len(self._running) < self._size:
            request = next(iter(self._waiting.values()))
            prefill_cost += request.cost
            if self._running and _is_over(self._cost + request.cost, self._cost_max):
                break
            if admitted and _is_over(prefill_cost, self._prefill_cost_max):
                break
            del self._waiting[request.key]
            self._occupy(request)
            admitted.append(request)
        return admitted

    def _occupy(self, request: T) -> None:
        self._running[request.key] = request
        self._costs[request.key] = request.cost
        self._cost += request.cost


def _is_over(cost: int, cost_max: int | None) -> bool:
    return cost_max is not None and cost > cost_max
