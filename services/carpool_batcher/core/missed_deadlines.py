"""Why requests missed their deadlines.

    early            refused, because it was not expected to be in time any more
    waiting          its deadline passed before it was dispatched
    dispatched_late  when its batch could begin, less than l(n) was left until the deadline
    computed_long    its batch began in time, and the model took longer than was left
    delivered_late   its batch began in time and was executed in time; transit took too long

A batch can begin when it is dispatched, or, if its process is busy then, when that has settled the batch
before it. Transit is the time to the worker and back to the producer. A batch whose worker died, or was
paused, is delivered late, too.

The first two causes are the reasons of refusals, and known at once. The others are known when the batch
settles.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple, get_args

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.learned import Learned

Cause = Literal["early", "waiting", "dispatched_late", "computed_long", "delivered_late"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)

_CAUSES_OF_REFUSALS: Final[Mapping[str, Cause]] = {"early": "early", "waiting": "waiting"}  # by reason
_NONE: Final[Mapping[Cause, int]] = {}


class Times(NamedTuple):
    """The times of a dispatched request in microseconds, on one clock."""

    arrived_us: int
    deadline_us: int
    ready_us: int  # when its batch could begin
    expected_us: int  # l(n); 0 if nothing is known
    compute_us: int  # what the model took; 0 if the batch was not executed
    delivered_us: int  # when its producer has the result, or learns that there is none


def cause_of(times: Times) -> Cause | None:
    """Why a dispatched request missed its deadline; None if it did not.

    It was not dispatched too late if l(n) is longer than all of the time that it had: then the execution is
    what takes too long.
    """
    arrived_us, deadline_us, ready_us, expected_us, compute_us, delivered_us = times
    if delivered_us <= deadline_us:
        return None
    could_be_in_time = arrived_us + expected_us <= deadline_us
    if ready_us >= deadline_us or (could_be_in_time and ready_us + expected_us > deadline_us):
        return "dispatched_late"
    return "computed_long" if ready_us + compute_us > deadline_us else "delivered_late"


def causes_of_refusals(refusals: Iterable[Refusal]) -> Mapping[Cause, int]:
    """Count by cause the refused requests that missed their deadlines."""
    causes: Counter[Cause] = Counter()
    for refusal in refusals:
        cause = _CAUSES_OF_REFUSALS.get(refusal.reason)
        if cause is not None:
            causes[cause] += len(refusal.correlation_ids)
    return causes


class MissedDeadlines:
    """Finds the causes of one model's dispatched requests that miss their deadlines."""

    def __init__(self, learned: Learned, in_flight: Mapping[str, InFlightBatch]) -> None:
        self._learned = learned
        self._in_flight = in_flight
        # Of batches in flight: runs whose deadline passed, each with its number of unanswered requests.
        self._expired: dict[str, list[tuple[Run, int]]] = {}
        self._settled_us: dict[str, int] = {}  # when each model process last settled a batch

    def expired(
        self, batch_id: str, runs: Sequence[tuple[int, Run]], answered: Collection[int] | None
    ) -> None:
        """The deadlines of these runs passed in flight; each has the position of its first request.

        `answered`: the positions that were answered DEADLINE_EXCEEDED. The others have their results, ahead
        of the commit. None: the batch has settled, which was not read yet.
        """
        for first, run in runs:
            number = len(run)
            if answered is not None:
                number = len(set(range(first, first + number)).intersection(answered))
            if number:
                self._expired.setdefault(batch_id, []).append((run, number))

    def settled(self, event: BatchSettled, batch: InFlightBatch) -> Mapping[Cause, int]:
        """Count by cause the requests of a settled batch that missed their deadlines.

        It must be known what was expected of the batch: this comes before its times are learned. What
        delivery takes is not known; it counts as the median of what it took to this batcher.
        """
        settled_us, before_us = event.settled_us, self._settled_us.get(event.worker, 0)
        self._settled_us[event.worker] = settled_us
        expired = self._expired.pop(event.batch_id, None)
        if not batch.expiring and expired is None:
            return _NONE
        delivered_us = settled_us + self._learned.delivery_us
        late = [run for run in batch.expiring.values() if (run.deadline_us or 0) < delivered_us]
        if not late and expired is None:
            return _NONE
        # The process had the batch before this one's start at the latest; its commit may be later.
        ready_us = max(batch.dispatched_us, min(before_us, settled_us - event.compute_us))
        expected_us = self._learned.expected_us(batch.lane, batch.executable)
        causes: Counter[Cause] = Counter()
        for run, number in [(run, len(run)) for run in late] + (expired or []):
            cause = cause_of(
                Times(
                    run.arrival_us,
                    run.deadline_us or 0,
                    ready_us,
                    expected_us,
                    event.compute_us,
                    delivered_us,
                )
            )
            if cause is not None:
                causes[cause] += number
        return causes

    def forget_missing(self, model_processes: Collection[str]) -> None:
        """Forget batches that are in flight no more, and processes that are not among these."""
        for batch_id in self._expired.keys() - self._in_flight.keys():
            del self._expired[batch_id]
        alive = set(model_processes)
        self._settled_us = {name: at_us for name, at_us in self._settled_us.items() if name in alive}
