"""What became of a model's latest batches and refused requests: kept all the time, for later questions.

A batch costs about 0.3 µs, a refusal 0.5. Figures are computed from them when somebody looks (`detail`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from carpool.error_groups import group_of
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled, Failures
from carpool.wire.detail import TEXT_CHARS_MAX, ErrorDetail, clipped
from carpool.wire.whereabouts import FOUND_MAX, Refused
from carpool_batcher.core.in_flight_batch import InFlightBatch

BATCHES_MAX: Final = 256
WATCHED_BATCHES_MAX: Final = 2048  # while somebody looks
REFUSED_MAX: Final = 2000  # requests
ERRORS_MAX: Final = 64  # kinds of errors

_Arrival = tuple[int, int]  # us, and how many requests
_NO_ARRIVALS: Final[Sequence[_Arrival]] = ((0, 0),)


class RecentBatch(NamedTuple):
    """A batch that settled. `arrivals`: when its first requests, those in the middle and its last ones
    arrived, in the order of the batch, each with their number: a sample that costs the same for each
    batch."""

    event: BatchSettled
    dispatched_us: int
    reason: str
    lane: str
    version: str
    arrivals: tuple[_Arrival, _Arrival, _Arrival]


# The same as a tuple: to make a named one costs as much again as all the rest.
RawBatch = tuple[BatchSettled, int, str, str, str, tuple[_Arrival, _Arrival, _Arrival]]


class _Remembered(NamedTuple):
    at_us: int
    correlation_ids: Sequence[str]
    status: str
    reason: str
    detail: str


class _Kind:
    """Errors of one kind."""

    __slots__ = ("count", "last", "last_id", "last_us")

    def __init__(self) -> None:
        self.count = 0
        self.last = ""
        self.last_us = 0
        self.last_id = ""

    def add(self, count: int, last: str, last_us: int, last_id: str) -> None:
        self.count += count
        self.last, self.last_us, self.last_id = last, last_us, last_id


class Recent:
    """Of one model, since its batcher took over. `batches`: the latest ones last, as RecentBatch has them.
    `began_us`: since when all batches are known, except for those that are not kept any more."""

    def __init__(self, began_us: int = 0) -> None:
        self.began_us = began_us
        self.batches: deque[RawBatch] = deque(maxlen=BATCHES_MAX)
        self._refused: deque[_Remembered] = deque()
        self._refused_requests = 0
        self._of_models: dict[tuple[str, str], _Kind] = {}  # by status and group
        self._of_refusals: dict[tuple[str, str], _Kind] = {}  # by status and reason, which are few words

    def watch(self, *, is_watched: bool) -> None:
        """From now on somebody looks, or nobody: more batches are kept, or fewer."""
        maximum = WATCHED_BATCHES_MAX if is_watched else BATCHES_MAX
        if self.batches.maxlen != maximum:
            self.began_us = self.since_us()  # there is space for more, but those before are lost
            self.batches = deque(self.batches, maximum)

    def since_us(self) -> int:
        """From when on all batches are here."""
        if self.batches and len(self.batches) == self.batches.maxlen:
            return self.batches[0][0].settled_us
        return self.began_us

    def settled(self, event: BatchSettled, batch: InFlightBatch) -> None:
        """A batch settled."""
        arrivals = batch.arrivals or _NO_ARRIVALS
        sample = (arrivals[0], arrivals[len(arrivals) // 2], arrivals[-1])
        self.batches.append((event, batch.dispatched_us, batch.reason, batch.lane, batch.version, sample))
        if event.failures is not None:
            self._failed(event.failures, event)

    def _failed(self, failures: Failures, event: BatchSettled) -> None:
        group = group_of(failures.error)
        for status, number in failures.statuses.items():
            kind = self._of_models.pop((status, group), None)
            if kind is None:
                kind = _Kind()
                if len(self._of_models) >= ERRORS_MAX:
                    del self._of_models[next(iter(self._of_models))]  # the one that was seen last longest ago
            self._of_models[status, group] = kind
            kind.add(number, failures.error, event.settled_us, event.batch_id)

    def refused(self, refusals: Iterable[Refusal], now_us: int) -> None:
        """Requests were answered without being dispatched."""
        for one in refusals:
            names = one.correlation_ids
            kind = self._of_refusals.get((one.status, one.reason))
            if kind is None:
                kind = self._of_refusals[one.status, one.reason] = _Kind()
            kind.add(len(names), one.detail, now_us, names[0])
            if len(names) <= REFUSED_MAX:
                self._refused.append(_Remembered(now_us, names, one.status, one.reason, one.detail))
                self._refused_requests += len(names)
        while self._refused_requests > REFUSED_MAX:
            self._refused_requests -= len(self._refused.popleft().correlation_ids)

    def find_refused(self, correlation_id: str) -> tuple[Refused, ...]:
        """How requests with this ID were answered lately, the latest last. O(REFUSED_MAX)."""
        found = [one for one in self._refused if correlation_id in one.correlation_ids][-FOUND_MAX:]
        return tuple([Refused(one.at_us, one.status, one.reason, one.detail) for one in found])

    def errors(self) -> list[ErrorDetail]:
        """The errors, in groups, the latest first."""
        kinds = [("model", status, "", kind) for (status, _), kind in self._of_models.items()]
        kinds += [("batcher", status, reason, kind) for (status, reason), kind in self._of_refusals.items()]
        errors = [
            ErrorDetail(
                source, status, reason, clipped(group_of(kind.last)), kind.count,
                clipped(kind.last, TEXT_CHARS_MAX), kind.last_us, clipped(kind.last_id),
            )
            for source, status, reason, kind in kinds
        ]  # fmt: skip
        return sorted(errors, key=lambda error: error.last_us, reverse=True)
