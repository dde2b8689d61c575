"""A serial replica: a model process that executes one batch after the other.

    Redis
      │  Fetcher.start, Fetcher.finish     fetch the next batch, or reclaim one
      │  SerialReplica.add_batch           it is in hand from here on
      │  Codec.prepare                     bodies -> frames
      │  SerialReplica._send_next          one frame, by ProcessHandle.send
      ▼
    model process
      │  BatchReplica._receive_message     the outcome of the oldest frame
      │  SerialReplica._handle_outcome     and BatchReplica's, which it extends
      │  Codec.give_results                outcome -> results
      │  SerialReplica._commit_finished    by Committer.commit
      ▼
    Redis

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
from collections.abc import Sequence
from typing import Any, Final

from carpool.errors import ABORTED
from carpool.parts import Buffer
from carpool.store.results import FencedError
from carpool_worker.batch_replica import BatchReplica
from carpool_worker.execution import Execution
from carpool_worker.model_process.frames import OutcomeHeader
from carpool_worker.replica_loop import WAIT_S

EXECUTIONS_MAX: Final = 2
# A busy replica fetches its next batch this long before it expects to be idle: early enough to hide the round
# trip to Redis, too late to take a batch that an idle replica would have started sooner.
PREFETCH_LEAD_S: Final = 0.002
DECODE_DECAY: Final = 0.9  # of the time to decode a batch, with each that took less
EARLY_FINISH_RATIO: Final = 0.8  # of the expected execution time: a batch may finish that early


class SerialReplica(BatchReplica[Execution]):
    """A batch replica with at most two executions, whose frames are executed in order. It fetches the next
    batch shortly before it expects to be idle, and commits each when it is finished."""

    _busy_since_s = 0.0  # since when the first unfinished execution is executed
    _occupied_since_s = 0.0  # since when the frame that the process has is its own
    _decode_s = 0.0  # how long the model process takes to decode a batch, of late; 0 if it does not

    # --- the loop ------------------------------------------------------------------------------------------

    def _do_due(self) -> bool:
        try:
            self._send_due()
            if self._fetch_if_due():  # before a commit, whose reply is waited for: it comes meanwhile
                return False
            self._commit_finished()
        except FencedError as fenced:
            self._discard(next(held for held in self._executions if held.batch.id == str(fenced)))
        if self._fetch_if_due():
            return False
        if self._draining and not (self._executions or self._source.waiting or self._is_to_fetch_last()):
            self._drained.set()
            return False
        return True

    def _timeout_s(self) -> float:
        if self._source.waiting or self._takes_no_more:
            return WAIT_S
        return min(WAIT_S, max(0.0, self._fetch_at_s() - time.monotonic()))

    # --- fetching ------------------------------------------------------------------------------------------

    def _fetch_if_due(self) -> bool:
        """Ask for the next batch if that is due. Whether one was taken at once, from a dead worker."""
        if self._source.waiting or self._fetch_at_s() > time.monotonic():
            return False
        if not self._takes_no_more:
            return self._fetch()
        if not self._is_to_fetch_last():
            return False
        self._fetches_last = taken = self._fetch()
        return taken

    def _is_to_fetch_last(self) -> bool:
        return self._fetches_last and self.process.ready

    def _add_fetched(self, items: Sequence[Execution]) -> None:
        for execution in items:
            self.add_batch(execution)
        if self._last_until_ms and items:
            self._fetches_last = all(one.batch.dispatched_us // 1000 <= self._last_until_ms for one in items)

    def _fetch_at_s(self) -> float:
        if (
            not self.process.ready
            or len(self._executions) >= EXECUTIONS_MAX
            or self.succession.stops_fetching
        ):
            return float("inf")
        first = self._first_unfinished()
        if first is None:
            return 0.0
        expected_s = first.batch.expected_us / 1e6
        if not expected_s:
            return 0.0 if self._decode_s else float("inf")
        return self._busy_since_s + EARLY_FINISH_RATIO * expected_s - PREFETCH_LEAD_S - self._decode_s

    def add_batch(self, execution: Execution) -> None:
        """Take a batch that was fetched or reclaimed, and decode it."""
        is_next = self._first_unfinished() is None
        super().add_batch(execution)
        if is_next:
            self._busy_since_s = time.monotonic()

    def _prepare(self, execution: Execution) -> None:
        if execution.chunks:  # a stepping model had this name
            execution.fail(
                0, ABORTED, "the model that had begun to send it was replaced: send the request again"
            )
        else:
            self._codec.prepare(execution, self._clock.now_us(), self._clock.wall_ahead_us)

    # --- the model process ---------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """Send all frames ahead, in order; those of a suspect execution one at a time, when all is idle.

        If the process may not work any more, first only the example that shows whether it does.
        """
        if not self.process.ready or self.retirement.tried is not None or self.succession.holds_back:
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

    def _handle_outcome(self, execution: Execution, outcome: OutcomeHeader, payload: Buffer) -> None:
        now_s = time.monotonic()
        occupied_us, self._occupied_since_s = int((now_s - self._occupied_since_s) * 1e6), now_s
        # While bodies are decoded the process is not occupied: that is a part of the way to it.
        execution.overhead_us += max(0, occupied_us - outcome.compute_us - outcome.waited_us)
        if outcome.decode_us:
            self._decode_s = max(outcome.decode_us / 1e6, DECODE_DECAY * self._decode_s)
        super()._handle_outcome(execution, outcome, payload)
        if execution.is_finished:
            self._busy_since_s = time.monotonic()

    def _suspect(self, cause: str) -> dict[str, Any]:
        """The requests of the frame that was executed are to be executed again one at a time."""
        executed, shown = self._executed(), self._shown()
        if executed is None:
            return shown or {"when": "while idle"}
        executed.split(executed.frames[0], cause)
        return {"when": f"while executing a batch of {executed.batch.size}", **shown}

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
