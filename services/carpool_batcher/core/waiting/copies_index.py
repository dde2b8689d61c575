"""Copies of requests: which requests wait, which wait more than once, which are in flight, and whose bodies
are stored under one key.

Two requests are the same if they have the same correlation ID and the same address (`reply_to`). A later copy
waits as any other request, because the first one may still vanish: only when that is dispatched, or when the
queue is full, the copy is removed. Sequences know their copies themselves.

Why: docs/decisions/0075.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.rows import stored_names

_Request = tuple[str | None, str]  # where its result goes, and its correlation ID

_ADDRESSES_KEPT: Final = 64  # whose requests do not wait any more


class _WaitingCopies:
    """Of a request that waits more than once: how many of it wait, and the runs that have the later ones. A
    run that was cut may be among them although it does not have the request any more."""

    __slots__ = ("later", "waiting")

    def __init__(self) -> None:
        self.later: dict[Run, None] = {}
        self.waiting = 1


class WaitingIds:
    """The waiting requests, by address and correlation ID, and the runs that arrived with one of these.

    The requests of a run must be different ones. Costs a request 0.25 µs, or 0.07 to 0.2 µs in columns, and
    the memory of a place in a set.
    """

    def __init__(self) -> None:
        self.repeated: dict[str | None, dict[str, _WaitingCopies]] = {}
        self.is_repeated_popped = False  # a run with one of these does not wait any more
        self._ids: dict[str | None, set[str]] = {}

    def __contains__(self, request: _Request) -> bool:
        reply_to, name = request
        return name in self._ids.get(reply_to, ())

    def count_of_name(self, name: str) -> int:
        """How many requests with this correlation ID wait, whatever their addresses. O(addresses)."""
        count = 0
        for reply_to, waiting in self._ids.items():
            if name in waiting:
                copies = self.repeated.get(reply_to, {}).get(name)
                count += 1 if copies is None else copies.waiting
        return count

    def are_new(self, reply_to: str | None, names: set[str]) -> bool:
        """Whether none of these requests waits. O(1) if none of this address does, else O(names)."""
        waiting = self._ids.get(reply_to)
        return not waiting or waiting.isdisjoint(names)

    def add(self, run: Run) -> None:
        """A run waits from now on."""
        names, waiting = run.correlation_ids, self._ids.get(run.reply_to)
        if waiting is None:
            self._ids[run.reply_to] = set(names)
            return
        if len(names) == 1 and names[0] not in waiting:
            waiting.add(names[0])
            return
        if not waiting.isdisjoint(names):
            self._add_later(run, waiting.intersection(names))
        waiting.update(names)

    def _add_later(self, run: Run, names: Iterable[str]) -> None:
        repeated = self.repeated.setdefault(run.reply_to, {})
        for name in names:
            copies = repeated.get(name)
            if copies is None:
                copies = repeated[name] = _WaitingCopies()
            copies.later[run] = None
            copies.waiting += 1

    def remove(self, runs: Iterable[Run]) -> None:
        """These do not wait any more. Each is a run that waited, or a part that was taken out of one."""
        ids = self._ids
        for run in runs:
            waiting = ids.get(run.reply_to)
            if not waiting:
                continue
            repeated = self.repeated and self.repeated.get(run.reply_to)
            if not repeated or repeated.keys().isdisjoint(run.correlation_ids):
                waiting.difference_update(run.correlation_ids)
            else:
                self._remove_repeated(run, repeated, waiting)
            if not waiting and len(ids) > _ADDRESSES_KEPT:
                del ids[run.reply_to]

    def _remove_repeated(self, run: Run, repeated: dict[str, _WaitingCopies], waiting: set[str]) -> None:
        self.is_repeated_popped = True
        for name in run.correlation_ids:
            copies = repeated.get(name)
            if copies is None:
                waiting.discard(name)
                continue
            copies.later.pop(run, None)
            copies.waiting -= 1
            if not copies.waiting:
                waiting.discard(name)
                del repeated[name]
        if not repeated:
            del self.repeated[run.reply_to]

    def later_copies(self, dispatched: Iterable[Run]) -> dict[Run, set[str]]:
        """The waiting runs that have later copies of these requests, which are in flight now, and which."""
        found: dict[Run, set[str]] = {}
        for run in dispatched:
            repeated = self.repeated.get(run.reply_to)
            if repeated:
                for name in repeated.keys() & run.correlation_ids:
                    for other in repeated[name].later:
                        found.setdefault(other, set()).add(name)
        return found

    def all_later(self) -> dict[Run, set[str]]:
        """The waiting runs with requests that also wait elsewhere, and which of them: all but the first that
        is left of each. The caller removes these, and calls `forget_later`."""
        found: dict[Run, set[str]] = {}
        for repeated in self.repeated.values():
            for name, copies in repeated.items():
                later = [run for run in copies.later if name in run.correlation_ids]
                for run in later[len(later) - copies.waiting + 1 :]:
                    found.setdefault(run, set()).add(name)
        return found

    def forget_later(self) -> None:
        """No request waits more than once. Not between a dispatch and `later_copies` of it."""
        self.repeated = {}


class IdsInFlight:
    """The requests in flight that were not answered yet, by address and correlation ID.

    They are indexed only when somebody asks: O(1) for a batch of which nobody does, else O(requests).
    """

    def __init__(self) -> None:
        self._named: dict[str, Sequence[Run]] = {}  # by batch; not indexed
        self._indexed: dict[str, list[_Request]] = {}  # by batch
        self._batches: dict[str | None, dict[str, str]] = {}  # by address, then by correlation ID

    def __contains__(self, request: _Request) -> bool:
        if self._named:
            self._index()
        reply_to, name = request
        return name in self._batches.get(reply_to, ())

    def are_new(self, reply_to: str | None, names: set[str]) -> bool:
        """Whether none of these requests is in flight."""
        if self._named:
            self._index()
        of_address = self._batches.get(reply_to)
        return of_address is None or of_address.keys().isdisjoint(names)

    def find(self, name: str) -> Iterator[tuple[str, int]]:
        """The requests with this correlation ID: the batch of each, and its position there."""
        if self._named:
            self._index()
        for reply_to, of_address in self._batches.items():
            batch_id = of_address.get(name)
            if batch_id is not None:
                yield batch_id, self._indexed[batch_id].index((reply_to, name))

    def _index(self) -> None:
        for batch_id, runs in self._named.items():
            self._indexed[batch_id] = [(run.reply_to, name) for run in runs for name in run.correlation_ids]
            for run in runs:
                of_address = self._batches.setdefault(run.reply_to, {})
                of_address.update(dict.fromkeys(run.correlation_ids, batch_id))
        self._named.clear()

    def launch(self, batch_id: str, runs: Sequence[Run]) -> None:
        """These are in flight from now on."""
        self._named[batch_id] = runs

    def answered(self, runs: Iterable[Run]) -> None:
        """These are in flight, and were answered: what is sent again now is another request."""
        for run in runs:
            if self._named:
                self._index()
            for name in run.correlation_ids:
                self._forget(run.reply_to, name, None)

    def end(self, batch_id: str) -> None:
        """A batch is not in flight any more."""
        if self._named.pop(batch_id, None) is None:
            for reply_to, name in self._indexed.pop(batch_id, ()):
                self._forget(reply_to, name, batch_id)

    def _forget(self, reply_to: str | None, name: str, batch_id: str | None) -> None:
        """A request is not in flight any more: in this batch, or in any if that is None."""
        of_address = self._batches.get(reply_to)
        if of_address is not None and batch_id in (None, of_address.get(name)):
            of_address.pop(name, None)
            if not of_address:
                del self._batches[reply_to]


class BodiesInUse:
    """The names of the stored bodies of requests that wait, or are in flight. Almost always there are none.

    `are_popped`: some are of requests that were popped since `begin_poll`, and are not in flight yet.
    `waiting`: how many waiting requests have each of them.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self._popped: set[str] = set()
        self._in_flight: dict[str, int] = {}
        self._by_batch: dict[str, list[str]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self.waiting or name in self._in_flight or name in self._popped

    @property
    def are_popped(self) -> bool:
        return bool(self._popped)

    def begin_poll(self) -> None:
        """What was popped before is in flight by now, or gone."""
        if self._popped:
            self._popped.clear()

    def add(self, run: Run) -> None:
        """A run waits from now on."""
        _count(self.waiting, stored_names(run.bodies))

    def remove(self, run: Run, *, is_popped: bool = False) -> None:
        """It does not wait any more."""
        names = stored_names(run.bodies)
        _count_down(self.waiting, names)
        if is_popped:
            self._popped.update(names)

    def launch(self, batch_id: str, runs: Iterable[Run]) -> None:
        """These are in flight from now on."""
        names = [name for run in runs for name in stored_names(run.bodies)]
        if names:
            self._by_batch[batch_id] = names
            _count(self._in_flight, names)

    def end(self, batch_id: str) -> None:
        """A batch is not in flight any more."""
        if self._by_batch:
            _count_down(self._in_flight, self._by_batch.pop(batch_id, ()))


def _count(numbers: dict[str, int], names: Iterable[str]) -> None:
    for name in names:
        numbers[name] = numbers.get(name, 0) + 1


def _count_down(numbers: dict[str, int], names: Iterable[str]) -> None:
    for name in names:
        if numbers[name] > 1:
            numbers[name] -= 1
        else:
            del numbers[name]


class Separated(NamedTuple):
    """Dispatches in which no request is twice, and the second copies, which wait in Redis."""

    dispatches: Sequence[Dispatch]
    copies: Sequence[Run]


def separate(dispatches: Sequence[Dispatch]) -> Separated:
    """Take second copies out of these dispatches. Some may have no runs then. O(requests)."""
    seen: set[_Request] = set()
    copies: list[Run] = []
    separated: list[Dispatch] = []
    for dispatch in dispatches:
        runs: list[Run] = []
        for run in dispatch.runs:
            again = repeated_in(run, seen)
            if len(again) < len(run):
                runs.append(run)
            if again:
                copies.append(run if len(again) == len(run) else run.take(again))
        separated.append(dispatch._replace(runs=runs))
    return Separated(separated, copies)


def repeated_in(run: Run, seen: set[_Request]) -> list[int]:
    """The indexes of the requests that were seen before; the others are seen now."""
    again: list[int] = []
    for at, name in enumerate(run.correlation_ids):
        if (run.reply_to, name) in seen:
            again.append(at)
        seen.add((run.reply_to, name))
    return again
