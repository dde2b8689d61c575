"""What replicas that execute batches have in common: the executions in their hands, oldest first.

A batch is in hand from the time at which it is taken until it is committed, or another worker has it. Its
frames are sent to the model process, which executes them in order, and their outcomes become its results.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from carpool.clock import RedisClock
from carpool.parts import Buffer
from carpool.shown import trace_of
from carpool_worker.batch_sources import Source
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import Example, Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import OutcomeHeader
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.replica_loop import IDS_SHOWN_MAX, Item, ReplicaLoop, shown_requests
from carpool_worker.succession import Limits


class BatchReplica(ReplicaLoop[Item]):
    """A replica loop with executions in hand: adds batches, and makes results of outcomes. When batches are
    fetched, sent and committed is its subclasses' to decide."""

    def __init__(
        self,
        member: Member,
        process: ProcessHandle,
        codec: Codec,
        source: Source[Item, Any],
        committer: Committer,
        clock: RedisClock,
        metrics: WorkerMetrics,
    ) -> None:
        super().__init__(member, process, codec, source, metrics)
        self._committer = committer
        self._clock = clock
        self._executions: tuple[Execution, ...] = ()  # replaced, never changed: other threads read it

    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""
        return [(execution.batch.id, execution.batch.epoch) for execution in self._executions]

    # --- batches -------------------------------------------------------------------------------------------

    def add_batch(self, execution: Execution) -> None:
        """Take a batch that was fetched or reclaimed, and decode it."""
        self._executions = (*self._executions, execution)  # renewed from now on: decoding may take long
        batch = execution.batch
        self.succession.limits = Limits(batch.max_requests_per_process, batch.max_process_memory)
        started_ns = time.monotonic_ns()
        try:
            self._prepare(execution)
        except BaseException:
            self._remove(execution)  # it lacks frames or results: once its lease runs out, it is suspect
            raise
        execution.input_us = (time.monotonic_ns() - started_ns) // 1000
        execution.ready_us = self._clock.now_us()

    def _fetch(self) -> bool:
        """Ask for more. Whether a batch was taken at once, from a dead worker or process."""
        reclaimed = self._source.start()
        for execution in reclaimed:
            self.add_batch(execution)
        return bool(reclaimed)

    @abstractmethod
    def _prepare(self, execution: Execution) -> None:
        """Decode a batch. What cannot be executed gets its result."""

    def _executed(self) -> Execution | None:
        """The execution whose frame the model process executes; None if it is idle."""
        return next((one for one in self._executions if one.frames_sent), None)

    def _first_unfinished(self) -> Execution | None:
        """The execution that the model process executes, or is to execute next; None if there is none."""
        return next((one for one in self._executions if not one.is_finished), None)

    def _discard(self, execution: Execution) -> None:
        """Another worker has the batch."""
        self._committer.discard(execution)
        self._remove(execution)

    def _remove(self, execution: Execution) -> None:
        """The execution is committed, or lost to another worker."""
        self._executions = tuple([other for other in self._executions if other is not execution])

    # --- the model process ---------------------------------------------------------------------------------

    def _is_idle(self) -> bool:
        if self._executed() is not None or self.retirement.tried is not None or self.process.has_unsent:
            return False
        return not self.succession.leaves_first or self._first_unfinished() is None

    def _executing(self) -> tuple[Hashable, int | None]:
        example = self.retirement.tried
        if example is not None:
            return "example", example.max_execution_ms
        executed = self._executed()
        if executed is None:
            return None, None
        return (executed.batch.id, len(executed.frames)), executed.batch.max_execution_ms

    def _send_example(self, example: Example) -> None:
        """Send the process, which is idle, what it should be able to execute."""
        self.retirement.example_sent(example)
        self.process.send(example.header, example.payload)

    def _receive_message(self) -> None:
        received = self.process.receive()
        if received is None:
            return
        outcome, payload = received
        if self.retirement.tried is not None:
            self._log_raised({})
            failures = {} if outcome.executed_together else outcome.failures  # it may return exceptions
            self._observe_example(failures)
            return
        execution = self._execution_of(outcome)
        if execution is not None:
            self._handle_outcome(execution, outcome, payload)

    def _execution_of(self, outcome: OutcomeHeader) -> Execution | None:
        """The execution whose frame has this outcome; None if it is not in hand any more."""
        execution = self._executed()
        assert execution is not None  # the process handle compares the numbers of frames and outcomes
        return execution

    def _handle_outcome(self, execution: Execution, outcome: OutcomeHeader, payload: Buffer) -> None:
        """The process has executed the first frame of this execution."""
        frame = execution.frames[0]
        self.succession.executed(outcome.size)
        execution.executed_ns = time.monotonic_ns()
        try:
            self._log_raised(outcome.errors)
            self._codec.give_results(execution, frame, outcome, payload)
        except Exception as error:  # an unforeseen case: the outcome is not sent again
            self._log.error(
                "results of the model process unreadable",
                replica=self.name,
                **self._shown(),
                exception=trace_of(error),
            )
            execution.fail_frame(frame, f"the model's results cannot be read: {error}")
        del execution.frames[0]
        execution.frames_sent -= 1
        following = self._first_unfinished()
        if execution.is_finished and following is not None:
            following.start_at(self._clock.now_us())
        now_s, failures = time.monotonic(), outcome.failures
        self.retirement.observe_outcome(outcome, execution.batch.id, now_s)
        succeeded = next((at for at in range(outcome.size) if at not in failures), None)
        if succeeded is not None:
            self._remember_example(execution, frame.positions[succeeded], now_s)

    def _shown(self, indexes: Sequence[int] | None = None) -> dict[str, Any]:
        """Of the frame that the model process executes, or the example."""
        if self.retirement.tried is not None:
            return {"when": "while executing an example"}
        execution = self._executed()
        if execution is None:
            return {}
        positions = execution.frames[0].positions
        if indexes is not None:
            positions = [positions[index] for index in indexes]
        located = [execution.locate(position) for position in positions[:IDS_SHOWN_MAX]]
        requests = [(execution.batch, run.correlation_ids[index]) for run, index in located]
        return shown_requests(requests, len(positions)) | execution.logged_trace
