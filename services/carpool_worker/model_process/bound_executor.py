"""Runs a model that binds sequences, on rows that are its slots. Pure: no Redis, no processes, no clock.

A sequence has a slot from its start until the worker says that it has ended. A row of the batch is a slot; it
is *ready* if there is a request of its sequence.

Nothing is executed twice: if the model raises, the states of all rows that were ready are unknown, so all of
their requests fail. A request that is rejected by `validate`, whose `start` raises, or in place of whose
result the model returns an exception, fails alone. The worker then ends the sequences of those that failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, Final

import structlog

from carpool.errors import INTERNAL, AbortedError
from carpool.shown import name_of, trace_of
from carpool_worker.model_process.executor import Items, Outcome, validate
from carpool_worker.model_process.failures import Observe, OutputError, failure_of, not_observed
from carpool_worker.model_process.loaded import BoundModel, BoundSequence, RequestInfo
from carpool_worker.model_process.outputs import Results, Returned, results_of

_UNKNOWN: Final = "sequence_id: its model process does not have {}; begin it again with sequence_start"
_NO_SLOT: Final = "sequence_id: no slot is free for {}; begin it again with sequence_start"


class BoundExecutor:
    """One model and its slots."""

    def __init__(self, model: BoundModel, observe: Observe = not_observed) -> None:
        """`observe` is called for whatever the model raises on requests."""
        self.model = model
        self._observe = observe
        self._sequences: dict[str, BoundSequence] = {}  # that have a slot, by ID
        self._free = list(range(model.slots))  # a heap: the lowest slot is taken first
        self._log = structlog.get_logger()

    def execute(self, items: Items, requests: Sequence[RequestInfo]) -> Outcome:
        """Give slots to the sequences that start, and run the model on all slots, if any is ready."""
        failures = validate(self.model, items)
        indexes: dict[int, int] = {}  # of the items, by slot
        slot_requests: list[RequestInfo | None] = [None] * self.model.slots
        for index, request in enumerate(requests):
            if index in failures:
                continue
            try:
                slot = self._slot_of(request)
            except BaseException as error:  # of the model's `start`, as of `validate`
                self._observe(error, (index,))
                failures[index] = failure_of(error, INTERNAL)
            else:
                indexes[slot], slot_requests[slot] = index, request._replace(slot=slot)
        if not indexes:
            return Outcome(failures, [])
        try:
            outputs = self.model.run(items.spread(indexes, self.model.slots), slot_requests)
            returned = results_of(self.model, outputs, self.model.slots)
        except BaseException as error:
            if not isinstance(error, OutputError):
                self._observe(error, list(indexes.values()))
            return Outcome(failures | dict.fromkeys(indexes.values(), failure_of(error, INTERNAL)), [])
        return Outcome(failures, _of_ready(returned, indexes, failures), len(indexes))

    def end(self, sequence_ids: Iterable[str]) -> None:
        """These sequences have ended. Those that have no slot are ignored."""
        for sequence_id in sequence_ids:
            sequence = self._sequences.pop(sequence_id, None)
            if sequence is not None:
                self._call_end(sequence)
                heappush(self._free, sequence.slot)

    def close(self) -> None:
        """End all sequences."""
        self.end(list(self._sequences))

    def _slot_of(self, request: RequestInfo) -> int:
        """The slot of a request's sequence. Raises AbortedError, and what the model's `start` raises."""
        sequence_id = request.sequence_id
        assert sequence_id is not None  # of such a model, each request is a part of one
        known = self._sequences.get(sequence_id)
        if not request.sequence_start:
            if known is None:
                raise AbortedError(_UNKNOWN.format(sequence_id))
            return known.slot
        if known is not None:
            self._call_end(known)
        elif not self._free:  # never: the batcher counts them
            raise AbortedError(_NO_SLOT.format(sequence_id))
        sequence = known or BoundSequence(sequence_id, heappop(self._free))
        self._sequences[sequence_id] = sequence
        if self.model.start is not None:
            self.model.start(sequence)
        return sequence.slot

    def _call_end(self, sequence: BoundSequence) -> None:
        if self.model.end is None:
            return
        try:
            self.model.end(sequence)
        except BaseException as error:
            failure_of(error, INTERNAL)  # raises Unhealthy
            self._log.error(
                "the model's end raised",
                sequence_id=sequence.sequence_id,
                error=name_of(error),
                exception=trace_of(error),
            )


def _of_ready(returned: Returned, indexes: dict[int, int], failures: dict[int, Any]) -> Results:
    """The results of the rows that were ready, in the order of their items. Those of them that are wrong are
    added to `failures`."""
    results, wrong = returned
    failures.update({indexes[row]: failure_of(wrong[row], INTERNAL) for row in indexes if row in wrong})
    right = [row for row in range(len(wrong) + _count(results)) if row not in wrong]
    places = {row: at for at, row in enumerate(right)}
    ready = [places[row] for row in indexes if row not in wrong]  # the items are in their order
    if isinstance(results, dict):
        return {name: array[ready] for name, array in results.items()}
    return [results[at] for at in ready]


def _count(results: Results) -> int:
    return len(next(iter(results.values()))) if isinstance(results, dict) else len(results)
