"""A replica: one model process, the executions in its hands, and the loop that moves them on.

    Redis ──fetch──▶ prepare ──send──▶ model process ──outcome──▶ results ──commit──▶ Redis

One thread waits for the reply to a fetch, for the model process and for the time, whichever is first.
There are at most two executions: one is executed, while the other waits in the pipe or is being committed.
Only scripts, such as a commit, are waited for, and stored bodies and states.

When the model process dies, another is started, which executes again what was not finished. The requests of
the frame it died on are then executed one at a time, because one of them may be the cause. The execution of
that frame, like each that was reclaimed, is suspect: before a request of it is decoded and sent, Redis knows
that it is its turn. So if this worker dies of it, the next one knows, too.

Why: docs/decisions/0026.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Final

from carpool.clock import RedisClock
from carpool.errors import ABORTED
from carpool.shown import trace_of
from carpool.store.results import FencedError
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import Execution
from carpool_worker.fetcher import Fetcher
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import ProcessGoneError
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.replica_loop import WAIT_S, ReplicaLoop, shown_as_example, shown_of_frame

EXECUTIONS_MAX: Final = 2
# A busy replica fetches its next batch this long before it expects to be idle: early enough to hide the round
# trip to Redis, too late to take a batch that an idle replica would have started sooner.
PREFETCH_LEAD_S: Final = 0.002
EARLY_FINISH_RATIO: Final = 0.8  # of the expected execution time: a batch may finish that early


class Replica(ReplicaLoop[Execution]):
    """See the module."""

    _fetcher: Fetcher

    def __init__(
        self,
        consumer: str,
        process: ProcessHandle,
        codec: Codec,
        fetcher: Fetcher,
        committer: Committer,
        clock: RedisClock,
        metrics: WorkerMetrics,
    ) -> None:
        super().__init__(consumer, process, codec, fetcher, metrics)
        self._committer = committer
        self._clock = clock
        self._executions: tuple[Execution, ...] = ()  # oldest first; replaced, never changed
        self._busy_since_s = 0.0  # since when the first unfinished execution is executed
        self._occupied_since_s = 0.0  # since when the frame that the process has is its own

    # --- the loop ------------------------------------------------------------------------------------------

    def _do_due(self) -> bool:
        try:
            self._send_due()
            if self._fetch_if_due():  # before a commit, whose reply is waited for: it comes meanwhile
                return False
            self._commit_finished()
        except FencedError as fenced:
            self._discard(str(fenced))
        if self._fetch_if_due():
            return False
        if self._draining and not self._executions and not self._fetcher.waiting:
            self._drained.set()
            return False
        return True

    def _executing(self) -> tuple[Hashable, int | None]:
        example = self.retirement.tried
        if example is not None:
            return "example", example.max_execution_ms
        executed = self._executed()
        if executed is None:
            return None, None
        return (executed.batch.id, len(executed.frames)), executed.batch.max_execution_ms

    def _timeout_s(self) -> float:
        if self._fetcher.waiting or self._draining:
            return WAIT_S
        return min(WAIT_S, max(0.0, self._fetch_at_s() - time.monotonic()))

    # --- fetching ------------------------------------------------------------------------------------------

    def _fetch_if_due(self) -> bool:
        """Ask for the next batch if that is due. Whether one was taken at once, from a dead worker."""
        if self._fetcher.waiting or self._draining or self._fetch_at_s() > time.monotonic():
            return False
        executions = self._fetcher.start()
        self._take_fetched(executions)
        return bool(executions)

    def _take_fetched(self, executions: Sequence[Execution]) -> None:
        for execution in executions:
            self.take(execution)

    def _fetch_at_s(self) -> float:
        if not self.process.ready or len(self._executions) >= EXECUTIONS_MAX:
            return float("inf")
        first = self._first_unfinished()
        if first is None:
            return 0.0
        expected_s = first.batch.expected_us / 1e6
        if not expected_s:
            return float("inf")
        return self._busy_since_s + EARLY_FINISH_RATIO * expected_s - PREFETCH_LEAD_S

    def take(self, execution: Execution) -> None:
        """Take a batch that was fetched or reclaimed, and decode it."""
        is_next = self._first_unfinished() is None
        self._executions = (*self._executions, execution)  # renewed from now on: decoding may take long
        started_ns = time.monotonic_ns()
        if execution.chunks:  # a stepping model had this name
            execution.fail(
                0, ABORTED, "the model that had begun to send it was replaced: send the request again"
            )
        else:
            self._prepare(execution)
        execution.input_us = (time.monotonic_ns() - started_ns) // 1000
        execution.ready_us = self._clock.now_us()
        if is_next:
            self._busy_since_s = time.monotonic()

    def _prepare(self, execution: Execution) -> None:
        try:
            self._codec.prepare(execution, self._clock.now_us())
        except BaseException:
            self._remove(execution)  # it lacks frames or results: once its lease runs out, it is suspect
            raise

    # --- the model process ---------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """Send all frames ahead, in order; those of a suspect execution one at a time, when all is idle.

        If the process may not work any more, first only the example that shows whether it does.
        """
        if not self.process.ready or self.retirement.tried is not None:
            return
        example = self.retirement.due_example
        if example is not None:
            if self._executed() is None:
                self._send_example(example)
            return
        for execution in self._executions:
            if execution.is_suspect and not execution.is_finished:
                if self._executed() is None:
                    self._send_suspect(execution)
                return
            while execution.frames_sent < len(execution.frames):
                self._send_next(execution)

    def _send_suspect(self, execution: Execution) -> None:
        """Decode and send the next request that can be executed."""
        while execution.undecoded:
            position = execution.undecoded[0]
            if not execution.is_given_up(position):
                self._committer.record_start(execution, position)
            if self._codec.prepare_next(execution, self._clock.now_us()):
                self._send_next(execution)
                return
        if execution.frames:  # other frames of an execution that was split
            self._committer.record_start(execution, execution.frames[0].positions[0])
            self._send_next(execution)

    def _send_next(self, execution: Execution) -> None:
        if self._executed() is None:
            self._occupied_since_s = time.monotonic()
        frame = execution.frames[execution.frames_sent]
        header = frame.header
        execution.frames_sent += 1
        if header.deadlines:
            header = header._replace(redis_ahead_us=self._clock.ahead_us)
        self.process.send(header, *frame.payload)

    def _executed(self) -> Execution | None:
        """The execution whose frame the model process executes; None if it is idle."""
        for execution in self._executions:
            if execution.frames_sent:
                return execution
        return None

    def _first_unfinished(self) -> Execution | None:
        """The execution that the model process executes, or is to execute next; None if there is none."""
        for execution in self._executions:
            if not execution.is_finished:
                return execution
        return None

    def _receive(self) -> None:
        """Receive an outcome, or that a new model process is ready, or that the process died."""
        try:
            if not self.process.ready:
                if self.process.receive_ready() is not None:
                    self._log.info("model process replaced", worker=self.consumer, pid=self.process.pid)
                return
            received = self.process.receive()
        except ProcessGoneError:
            if not self._closing:  # else this worker closed the connection: no request is the cause
                self._replace_process()
            return
        if received is None:
            return
        header, payload = received
        if self.retirement.tried is not None:
            self._log_raised({}, shown_as_example)
            self._observe_example({} if header.executed else header.failures)  # it may return exceptions
            return
        execution = self._executed()
        assert execution is not None  # the process handle compares the numbers of frames and outcomes
        frame = execution.frames[0]
        now_s = time.monotonic()
        occupied_us, self._occupied_since_s = int((now_s - self._occupied_since_s) * 1e6), now_s
        execution.overhead_us += max(0, occupied_us - header.compute_us)
        try:
            if self.process.raised:
                self._log_raised(header.errors, partial(shown_of_frame, execution, frame))
            self._codec.take_outcome(execution, frame, header, payload)
        except Exception as error:  # an unforeseen case: the outcome is not sent again
            self._log.error(
                "results of the model process unreadable",
                worker=self.consumer,
                **shown_of_frame(execution, frame),
                exception=trace_of(error),
            )
            execution.fail_frame(frame, f"the model's results cannot be read: {error}")
        del execution.frames[0]
        execution.frames_sent -= 1
        following = self._first_unfinished()
        if execution.is_finished and following is not None:
            following.start_at(self._clock.now_us())
            self._busy_since_s = time.monotonic()
        self._observe_outcome(header, execution, frame)

    def _replace_process(self) -> None:
        """The model process died: start another, to which everything is to be sent again."""
        cause = self.process.exit_cause()
        self._metrics.process_died()
        executed = self._executed()
        self._let_go_of_process()
        if executed is None:
            self._log_raised({}, shown_as_example if self.retirement.tried else dict)
            self._log.error("model process died", worker=self.consumer, how=cause, when="while idle")
        else:
            shown = partial(shown_of_frame, executed, executed.frames[0])
            self._log_raised({}, shown)
            when = f"while executing a batch of {executed.batch.size}"
            self._log.error("model process died", worker=self.consumer, how=cause, when=when, **shown())
            executed.split(executed.frames[0], cause)
        self.process.hang_up()

    def _let_go_of_process(self) -> None:
        for execution in self._executions:
            execution.frames_sent = 0

    # --- committing ----------------------------------------------------------------------------------------

    def _commit_finished(self) -> None:
        """Commit the executions that are finished, in order."""
        while self._executions and self._executions[0].is_finished:
            execution = self._executions[0]
            self._committer.commit(execution)
            self._remove(execution)

    def _discard(self, batch_id: str) -> None:
        execution = next(held for held in self._executions if held.batch.id == batch_id)
        self._committer.discard(execution)
        self._remove(execution)

    def _remove(self, execution: Execution) -> None:
        """The execution is committed, or lost to another worker."""
        self._executions = tuple([held for held in self._executions if held is not execution])

    # --- for other threads ---------------------------------------------------------------------------------

    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""
        return [(execution.batch.id, execution.batch.epoch) for execution in self._executions]
