"""A replica of an async model: its process executes several batches at a time, up to
`max_concurrent_batches`.

Each is sent when it is fetched, and committed when its outcome has come, in any order. Frames of one batch
are sent one after the other.

When the process dies, each of the batches may be the cause: the requests of all of them are executed again
one at a time, while nothing else is sent. So no other request can be the cause of the next death.

A process that grows old gets no more frames once another is ready, and leaves when those that it has are
executed (`succession`).

Now and then it is looked whether requests were answered ahead, because their deadlines passed or their
producers withdrew them: then what the model asked of others for them is withdrawn, too.

Why: docs/decisions/0100.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final

from carpool.clock import RedisClock
from carpool.parts import Buffer
from carpool_worker.batch_replica import BatchReplica
from carpool_worker.batch_sources import Fetcher
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import OutcomeHeader, WithdrawCalls
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.replica_loop import WAIT_S
from carpool_worker.serial_replica import SerialReplica

ANSWERED_INTERVAL_S: Final = 0.25  # how often it is looked which requests were answered ahead


class ConcurrentReplica(SerialReplica):
    """A serial replica that has up to `batches_max` executions sent at a time, with outcomes in any order."""

    def __init__(
        self,
        member: Member,
        process: ProcessHandle,
        codec: Codec,
        source: Fetcher,
        committer: Committer,
        clock: RedisClock,
        metrics: WorkerMetrics,
        *,
        batches_max: int,
        calls_others: bool,
    ) -> None:
        """`batches_max`: how many the process executes at a time. `calls_others`: whether its model does."""
        super().__init__(member, process, codec, source, committer, clock, metrics)
        self._fetcher = source
        self._batches_max = batches_max
        self._calls_others = calls_others
        self._sent: dict[int, Execution] = {}  # by the number of the frame: what is executed, oldest first
        self._handled: Execution | None = None  # the one whose outcome is being handled
        self._looked_at_s = 0.0
        self._cancelled: dict[int, set[int]] = {}  # by frame: the positions of which the process was told

    # --- the loop ------------------------------------------------------------------------------------------

    def _do_due(self) -> bool:
        goes_on = super()._do_due()
        if self._calls_others and self._sent:
            self._look_for_answered()
        return goes_on

    def _timeout_s(self) -> float:
        return ANSWERED_INTERVAL_S if self._calls_others and self._sent else WAIT_S

    def _fetch_at_s(self) -> float:
        is_full = len(self._executions) >= self._batches_max or self.succession.stops_fetching
        if is_full or not self.process.ready or self._first_suspect() is not None:
            return float("inf")
        return 0.0

    def _fetch(self) -> bool:
        """Ask for as many as the process can take; not more than a share, because others may be idle."""
        space = self._batches_max - len(self._executions)
        reclaimed = self._fetcher.start(-(-space // max(1, self.member.model_processes)))
        for execution in reclaimed:
            self.add_batch(execution)
        return bool(reclaimed)

    def _first_suspect(self) -> Execution | None:
        return next((one for one in self._executions if one.is_suspect and not one.is_finished), None)

    def _first_unfinished(self) -> Execution | None:
        """None waits for another one."""
        return None

    def _commit_finished(self) -> None:
        for execution in self._executions:
            if execution.is_finished:
                self._committer.commit(execution)
                self._remove(execution)

    def _executing(self) -> tuple[Hashable, int | None]:
        """The oldest frame: only its time is watched."""
        if self.retirement.tried is not None:
            return super()._executing()
        for number, execution in self._sent.items():
            return number, execution.batch.max_execution_ms
        return None, None

    # --- the model process ---------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        """A frame may be in its hands although another worker has the batch."""
        if self._sent or not super()._is_idle():
            return False
        return not self.succession.leaves_first or all(one.is_finished for one in self._executions)

    def _send_due(self) -> None:
        if not self.process.ready or self.retirement.tried is not None or self.succession.holds_back:
            return
        suspect, example = self._first_suspect(), self.retirement.due_example
        if suspect is not None or example is not None:
            if self._sent:
                return
            if example is not None:
                self._send_example(example)
            elif suspect is not None:
                self._send_suspect(suspect)
            return
        for execution in self._executions:
            if len(self._sent) >= self._batches_max:
                return  # a fetch may bring more: as many of its version as of any
            if execution.frames and not execution.frames_sent:
                self._send_next(execution)

    def _send_next(self, execution: Execution) -> None:
        frame = execution.frames[0]
        header = frame.header
        if header.deadlines:
            header = header._replace(redis_ahead_us=self._clock.ahead_us)
        execution.frames_sent = 1
        self._sent[self.process.send(header, *frame.payload)] = execution

    def _execution_of(self, outcome: OutcomeHeader) -> Execution | None:
        self._cancelled.pop(outcome.number, None)
        execution = self._sent.pop(outcome.number)
        return execution if execution in self._executions else None

    def _handle_outcome(self, execution: Execution, outcome: OutcomeHeader, payload: Buffer) -> None:
        self._handled = execution
        BatchReplica._handle_outcome(self, execution, outcome, payload)
        self._handled = None

    def _log_raised(self, errors: Mapping[str, Sequence[int]]) -> None:
        """With an outcome only what it says was raised: the rest is of frames that are still executed."""
        if self._handled is None:
            super()._log_raised(errors)
            return
        told = self.process.raised
        self.process.raised = [raised for raised in told if raised.error in errors]
        super()._log_raised(errors)
        self.process.raised = [raised for raised in told if raised.error not in errors]

    def _executed(self) -> Execution | None:
        return self._handled or super()._executed()

    def _suspect(self, cause: str) -> dict[str, Any]:
        """The requests of all frames that were executed are to be executed again one at a time."""
        if not self._sent:
            return self._shown() or {"when": "while idle"}
        executed = list(self._sent.values())
        shown = self._shown()
        for execution in executed:
            execution.split(execution.frames[0], cause)
        sizes = ", ".join(str(execution.batch.size) for execution in executed)
        return {"when": f"while executing batches of {sizes}", **shown}

    def _let_go_of_process(self) -> None:
        super()._let_go_of_process()
        self._sent.clear()
        self._cancelled.clear()

    # --- requests that are answered ahead ------------------------------------------------------------------

    def _look_for_answered(self) -> None:
        """Tell the process for which of its requests nobody waits any more, if it is time to look."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s < ANSWERED_INTERVAL_S:
            return
        self._looked_at_s = now_s
        found = self._committer.answered_ahead(list(self._sent.values()))
        for (number, execution), answered in zip(list(self._sent.items()), found, strict=True):
            told = self._cancelled.setdefault(number, set())
            if answered - told:
                self._cancel(number, execution.frames[0].positions, answered - told)
                told |= answered

    def _cancel(self, number: int, positions: Sequence[int], answered: set[int]) -> None:
        indexes = [index for index, position in enumerate(positions) if position in answered]
        if indexes:
            self.process.send_message(WithdrawCalls(number, indexes).message())
