"""A replica: one model process and the executions in its hands.

It has at most two executions: one is executed, while the other waits in the pipe or is being committed.
Two loops meet here. The fetcher adds executions; the committer takes them finished, in order. When the
committer's thread sees that the model process died, it starts another, which executes again what was not
finished. The frame it died on is split into one frame for each request, because one of them may be the
cause. The execution of that frame, like each that was reclaimed, is suspect: it has one frame for each
request, and these are not sent ahead, but one at a time.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from carpool.clock import RedisClock
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution, Frame
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import ProcessGoneError
from carpool_worker.process_handle import ProcessHandle

EXECUTIONS_MAX: Final = 2
# A busy replica fetches its next batch this long before it expects to be idle: early enough to hide the round
# trip to Redis, too late to take a batch that an idle replica would have started sooner.
PREFETCH_LEAD_S: Final = 0.002
EARLY_FINISH_RATIO: Final = 0.8  # of the usual execution time: a batch may finish that early
SMOOTHING: Final = 0.2  # the weight of the latest batch in the usual execution time

RecordStart = Callable[[Execution, int], None]


class Replica:
    """See the module. `consumer` is this replica's name in the consumer group of workers."""

    def __init__(
        self, consumer: str, process: ProcessHandle, clock: RedisClock, metrics: WorkerMetrics
    ) -> None:
        self.consumer = consumer
        self._metrics = metrics
        self.process = process
        self.codec: Codec | None = None  # known once the model is loaded
        self._clock = clock
        self._executions: deque[Execution] = deque()
        self._changed = threading.Condition()  # an execution was removed
        self._added: queue.SimpleQueue[Execution] = queue.SimpleQueue()  # from the fetcher to the committer
        self._oldest: Execution | None = None  # what the committer works on
        self._pipe = threading.Lock()  # for sending, and for `sent`; held while a full pipe blocks the sender
        self._busy_since_s = 0.0
        self._usual_s: float | None = None  # usual execution time of a batch; unknown before the first
        self._closing = False
        self._log = structlog.get_logger()

    # --- for the fetcher -----------------------------------------------------------------------------------

    def wait_for_capacity(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until the next batch should be fetched. Returns whether it should."""
        until_s = time.monotonic() + timeout_s
        with self._changed:
            while True:
                now_s = time.monotonic()
                fetch_at_s = self._fetch_at_s()
                if fetch_at_s <= now_s:
                    return True
                if now_s >= until_s:
                    return False
                self._changed.wait(min(fetch_at_s, until_s) - now_s)

    def _fetch_at_s(self) -> float:
        if not self._executions:
            return 0.0
        if len(self._executions) >= EXECUTIONS_MAX or self._usual_s is None:
            return float("inf")
        return self._busy_since_s + EARLY_FINISH_RATIO * self._usual_s - PREFETCH_LEAD_S

    def add(self, execution: Execution) -> None:
        """Take an execution, and send its frames ahead if everything before it was sent.

        It is added before it is sent. Sending blocks while the pipe is full; meanwhile the heartbeat must
        renew the batch and the committer must receive outcomes, or both processes would wait to send.
        """
        with self._pipe:
            execution.sent = not execution.is_suspect and all(earlier.sent for earlier in self.executions())
            with self._changed:
                if not self._executions:
                    self._busy_since_s = time.monotonic()
                self._executions.append(execution)
            self._added.put(execution)
            if execution.sent:
                self._send(execution)

    def _send(self, execution: Execution) -> None:
        """Send all frames of an execution. The caller holds the pipe."""
        with contextlib.suppress(ProcessGoneError):  # the committer handles it when it waits for the outcome
            for frame in tuple(execution.frames):  # a copy: the committer removes executed frames
                self.process.send(frame.header, frame.payload)

    # --- for the committer ---------------------------------------------------------------------------------

    def finish_next(self, record_start: RecordStart, timeout_s: float) -> Execution | None:
        """The oldest execution, once each of its requests has a result.

        None if there is none within `timeout_s`. `record_start(execution, position)` is called before a
        request of a suspect execution is executed. What it raises is passed on, and the execution remains:
        call `remove`.
        """
        execution = self._oldest
        if execution is None:
            try:
                execution = self._oldest = self._added.get(timeout=timeout_s)
            except queue.Empty:
                if not self.process.alive and not self._closing:
                    self._replace_process("while idle")
                return None
        while execution.frames:
            frame = execution.frames[0]
            if execution.is_suspect:
                record_start(execution, frame.positions[0])
            self._execute(execution, frame)
        return execution

    def _execute(self, execution: Execution, frame: Frame) -> None:
        assert self.codec is not None
        try:
            if not execution.sent:  # none of its frames is in the pipe, and the process is idle: send one
                with self._pipe:
                    self.process.send(frame.header, frame.payload)
                    execution.sent = not execution.is_suspect and frame is execution.frames[-1]
            header, payload = self.process.receive()
        except ProcessGoneError:
            if self._closing:
                raise  # this worker closed the connection: no request is the cause
            batch = execution.batch
            self._replace_process(f"while executing a batch of {len(batch.requests)}", batch=batch.id)
            execution.split(frame, self.codec, self._clock.now_us())
            return
        try:
            self.codec.take_outcome(execution, frame, header, payload)
        except Exception as error:  # an unforeseen case: the outcome is not sent again
            self._log.exception(
                "results of the model process unreadable", worker=self.consumer, batch=execution.batch.id
            )
            execution.fail_frame(frame, f"the model's results cannot be read: {error}")
        del execution.frames[0]

    def _replace_process(self, when: str, **context: str) -> None:
        """The model process died: start another, to which everything is to be sent again."""
        cause = self.process.exit_cause()
        self._metrics.process_died()
        self._log.error("model process died", worker=self.consumer, how=cause, when=when, **context)
        with self._pipe:
            for execution in self.executions():
                execution.sent = False
            self.process.spawn()
        self.process.wait_ready()
        self._log.info("model process replaced", worker=self.consumer, pid=self.process.pid)

    def remove(self, execution: Execution) -> None:
        """The execution is committed, or lost to another worker."""
        self._oldest = None
        with self._changed:
            self._executions.remove(execution)
            now_s = time.monotonic()
            latest_s = execution.compute_us / 1e6
            if self._usual_s is None:
                self._usual_s = latest_s
            else:
                self._usual_s += SMOOTHING * (latest_s - self._usual_s)
            self._busy_since_s = now_s
            self._changed.notify_all()

    # --- for all -------------------------------------------------------------------------------------------

    def executions(self) -> list[Execution]:
        """The executions in hand, oldest first."""
        with self._changed:
            return list(self._executions)

    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""
        return [(execution.batch.id, execution.batch.epoch) for execution in self.executions()]

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Whether everything in hand was committed within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._executions, timeout_s)

    def close(self, wait_s: float) -> None:
        """Stop the model process for good; it has `wait_s` to unload its model."""
        self._closing = True
        self.process.close(wait_s)
