"""The committer of one replica: wait for outcomes -> results -> commit, all or nothing.

It works while the model process executes the next batch. Its thread also runs `Replica.finish_next`, which
replaces a model process that died. Results of suspect or very large executions are answered ahead.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Final

import structlog

from carpool.store.connection import CommandError
from carpool.store.results import Address, Answer, FencedError
from carpool.store.worker import WorkerStore
from carpool_worker.batch_log import BatchLog
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics
from carpool_worker.replica import Replica

WAIT_S: Final = 0.5
COMMIT_BYTES_MAX: Final = 256 * 1024 * 1024  # a commit is one command, which Redis limits to 1 GB


class Committer:
    """`run_once` finishes and commits at most one execution. A failed commit is repeated by the next call."""

    def __init__(
        self, replica: Replica, store: WorkerStore, metrics: WorkerMetrics, batch_log: BatchLog
    ) -> None:
        self._replica = replica
        self._metrics = metrics
        self._batch_log = batch_log
        self._store = store
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """Wait for a finished execution and commit it; return after half a second without any in hand."""
        try:
            execution = self._replica.finish_next(self._record_start, WAIT_S)
            if execution is None:
                return
            started_ns = time.monotonic_ns()
            for position in self._commit(execution):  # answered by a batcher when its deadline passed
                del execution.results[position]
        except FencedError as fenced:
            self._metrics.fenced()
            lost = next(held for held in self._replica.executions() if held.batch.id == str(fenced))
            self._log.warning(
                "commit discarded, another worker has the batch",
                model=self._store.keys.model,
                batch=lost.batch.id,
                epoch=lost.batch.epoch,
            )
            self._replica.remove(lost)
            return
        self._replica.remove(execution)
        output_us = (time.monotonic_ns() - started_ns) // 1000
        self._metrics.committed(execution, output_us, self._store.clock.now_us())
        self._batch_log.committed(
            self._replica.consumer,
            execution.batch,
            Counter(result.status for result in execution.results.values()),
            execution.compute_us,
            len(execution.dead_letters),
        )

    def _commit(self, execution: Execution) -> set[int]:
        """Commit an execution. Returns the positions that were answered elsewhere meanwhile."""
        self._answer_large_results(execution)
        requests = execution.batch.requests
        results = {
            position: (Address.of(requests[position]), result)
            for position, result in execution.results.items()
            if position not in execution.answered_ahead
        }
        try:
            return self._store.commit(
                self._replica.consumer,
                execution.batch,
                results,
                execution.dead_letters,
                execution.compute_us,
            )
        except CommandError as error:
            if error.code != "NOGROUP":
                raise
            raise FencedError(execution.batch.id) from error  # Redis was emptied: there is nothing to commit

    def _answer_large_results(self, execution: Execution) -> None:
        """Answer ahead, in several commands, if the results are too large for one commit."""
        total_bytes = sum(len(result.body or b"") for result in execution.results.values())
        if total_bytes <= COMMIT_BYTES_MAX:
            return
        positions: list[int] = []
        size_bytes = 0
        for position in execution.results.keys() - execution.answered_ahead:
            positions.append(position)
            size_bytes += len(execution.results[position].body or b"")
            if size_bytes > COMMIT_BYTES_MAX // 2:
                self._answer(execution, positions, None)
                positions, size_bytes = [], 0
        self._answer(execution, positions, None)

    def _record_start(self, execution: Execution, position: int) -> None:
        """Before a request is executed alone: store the results so far, and that this request is started.

        Should this worker die, the next one executes only the rest, and knows which request was being
        executed.
        """
        self._answer(execution, list(execution.results.keys() - execution.answered_ahead), position)

    def _answer(self, execution: Execution, positions: list[int], starting: int | None) -> None:
        requests = execution.batch.requests
        answers = [
            Answer(position, Address.of(requests[position]), execution.results[position])
            for position in positions
        ]
        written = self._store.answer(self._replica.consumer, execution.batch, answers, starting)
        for position in set(positions) - written:  # answered by a batcher when its deadline passed
            del execution.results[position]
        execution.answered_ahead |= written
