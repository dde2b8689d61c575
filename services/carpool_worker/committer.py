"""Committing for one replica: the results of an execution, all or nothing.

Results of suspect or very large executions are answered ahead.

Why: docs/decisions/0073.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import structlog

from carpool.errors import UnavailableError
from carpool.messages.results import Result
from carpool.messages.settled import Executed, Failures
from carpool.store.connection import CommandError
from carpool.store.results import Address, Answer, FencedError, Start, addresses_of
from carpool.store.worker import WorkerStore
from carpool_worker.batch_log import BatchLog
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.spans import FENCED

COMMIT_BYTES_MAX: Final = 256 * 1024 * 1024  # a commit is one command, which Redis limits to 1 GB


class Committer:
    """Each method may be repeated after it raised. FencedError: another worker has the batch."""

    def __init__(
        self, member: Member, store: WorkerStore, metrics: WorkerMetrics, batch_log: BatchLog
    ) -> None:
        self._member = member  # to which the executions belong
        self._metrics = metrics
        self._batch_log = batch_log
        self._store = store
        self._log = structlog.get_logger()

    def commit(self, execution: Execution) -> None:
        """Commit an execution in which each request has a result."""
        started_ns = time.monotonic_ns()
        try:
            if execution.result_bytes > COMMIT_BYTES_MAX:
                self._answer_large_results(execution)
            while lost := self._commit(execution):
                execution.drop(lost)  # a batcher answered them when their deadlines passed
        except CommandError as error:
            raise _fenced_if_emptied(execution, error) from error
        output_us = (time.monotonic_ns() - started_ns) // 1000
        counts, now_us = execution.counts(), self._store.clock.now_us()
        self._metrics.committed(execution, counts, output_us, now_us)
        self._batch_log.committed(
            self._member.name,
            execution.batch,
            counts.statuses,
            execution.compute_us,
            len(execution.dead_letters),
            execution.error,
            execution.waited_us,
            execution.logged_trace,
        )
        if self._metrics.spans is not None:
            self._metrics.spans.ended(execution, now_us)
        if execution.dead_letters:
            self.trim_dead_letters()

    def trim_dead_letters(self) -> None:
        """Some were written: drop those that are too many now."""
        trim_dead_letters(self._store, self._metrics)

    def _commit(self, execution: Execution) -> set[int]:
        """Empty if the batch is committed; else positions that were answered elsewhere: leave them out."""
        batch = execution.batch
        singles: dict[int, tuple[Address, Result]] = {}
        if execution.results:
            addresses = addresses_of(batch)
            for position, result in execution.results.items():
                if position not in execution.answered_ahead:
                    singles[position] = (addresses[position], result)
        return self._store.commit(
            self._member.name,
            batch,
            singles,
            execution.dead_letters,
            Executed(
                execution.compute_us,
                execution.executed_together,
                execution.waited_us,
                execution.overhead_us,
                Failures(execution.failed(), execution.error),
                execution.executed_by_producer(),
                execution.input_us,
                execution.output_us,
                execution.counted_us,
                execution.cost,
            ),
            execution.run_results,
            execution.changes(),
        )

    def _answer_large_results(self, execution: Execution) -> None:
        """Answer ahead, in several commands: the results are too large for one commit."""
        execution.separate()
        positions: list[int] = []
        size_bytes = 0
        for position in execution.not_answered:
            positions.append(position)
            size_bytes += len(execution.results[position].body or b"")
            size_bytes += len(execution.states.get(position, b""))
            if size_bytes > COMMIT_BYTES_MAX // 2:
                self._answer(execution, positions, None)
                positions, size_bytes = [], 0
        self._answer(execution, positions, None)

    def answered_ahead(self, executions: Sequence[Execution]) -> list[set[int]]:
        """The positions in each of these that a batcher has answered: their results are not wanted any
        more."""
        return self._store.answered([execution.batch for execution in executions])

    def record_start(self, execution: Execution, position: int) -> None:
        """Before a request is executed alone: store the results so far, and that this request is started.

        Should this worker die, the next one executes only the rest, and knows which request was being
        executed.
        """
        execution.separate()
        start = Start(position, execution.start_counts.get(position, 0) + 1)
        try:
            self._answer(execution, list(execution.not_answered), start)
        except CommandError as error:
            raise _fenced_if_emptied(execution, error) from error
        execution.start_counts[position] = start.number

    def _answer(self, execution: Execution, positions: list[int], starting: Start | None) -> None:
        addresses = addresses_of(execution.batch)
        now_us = self._store.clock.now_us()
        answers = [
            Answer(
                position,
                addresses[position],
                execution.results[position],
                execution.change(position),
                max(0, now_us - execution.batch.run_of(position).arrival_us),
            )
            for position in positions
        ]
        executed = Executed(execution.compute_us - execution.counted_us, output_us=execution.output_us)
        written = self._store.answer(self._member.name, execution.batch, answers, starting, executed)
        if written:
            execution.counted_us = execution.compute_us
        execution.drop(set(positions) - written)  # a batcher answered them when their deadlines passed
        execution.answered_ahead |= written

    def discard(self, execution: Execution) -> None:
        """Another worker has the batch: nothing of it is written here."""
        self._metrics.fenced()
        self._log.warning(
            "commit discarded, another worker has the batch",
            model=self._store.keys.model,
            batch=execution.batch.id,
            epoch=execution.batch.epoch,
            **execution.logged_trace,
        )
        if self._metrics.spans is not None:
            self._metrics.spans.ended(execution, self._store.clock.now_us(), FENCED)


def trim_dead_letters(store: WorkerStore, metrics: WorkerMetrics) -> None:
    """Drop those over the model's settings; count and log them. If that fails, it is done a minute later."""
    log = structlog.get_logger()
    try:
        dropped = store.trim_dead_letters()
    except (UnavailableError, CommandError) as error:
        log.warning("dead letters are not trimmed", model=store.keys.model, reason=str(error))
        return
    if dropped:
        metrics.dead_letters_dropped(dropped)
        log.warning("dead letters dropped", model=store.keys.model, **dropped)


def _fenced_if_emptied(execution: Execution, error: CommandError) -> Exception:
    """What to raise: if Redis was emptied, the batch no longer exists, and nothing can be written for it."""
    return FencedError(execution.batch.id) if error.code == "NOGROUP" else error
