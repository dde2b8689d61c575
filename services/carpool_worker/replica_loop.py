"""What all replicas have in common: a loop for one model process, and how it is drained and closed.

One thread waits for the reply to a fetch, for the model process and for the time, whichever is first.

Why: docs/decisions/0043.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import structlog

from carpool.messages.batches import Batch
from carpool.readiness import wait_until_ready
from carpool.shown import shortened
from carpool_worker.codec import Codec
from carpool_worker.execution import Example, Execution, Frame
from carpool_worker.execution_watch import Due, ExecutionWatch
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import Failure, OutcomeHeader
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.retirement import Retirement

WAIT_S: Final = 0.5  # a drain is noticed after this time
IDS_SHOWN_MAX: Final = 16  # in a line of the log
ID_CHARS_MAX: Final = 200  # of each of them
ENDED_POLL_S: Final = 0.02  # how often it is looked whether a process that is to be replaced has ended
Fetched = TypeVar("Fetched")
Fetched_co = TypeVar("Fetched_co", covariant=True)


class Fetches(Protocol[Fetched_co]):
    """What brings work: once it is `waiting`, `finish` takes what was asked for. It waits until `descriptor`
    is readable, or not at all if that is None."""

    waiting: bool
    descriptor: int | None

    def finish(self) -> Sequence[Fetched_co]:
        """What was asked for; nothing if there was none in time."""

    def check_overdue(self) -> None:
        """Raises LinkError if there should have been an answer by now, and waits for it no more."""


class ReplicaLoop(ABC, Generic[Fetched]):
    """`consumer` is the replica's name in the consumer group of workers, and `is_member` whether the worker
    is to renew its lease there.

    Its loop calls `run_once`. The heartbeat's thread and the main thread call `batches`, `may_leave`,
    `on_lease_lost`, `drain`, `wait_until_drained`, `close`, and read how many slots there are.
    """

    def __init__(
        self,
        consumer: str,
        process: ProcessHandle,
        codec: Codec,
        fetcher: Fetches[Fetched],
        metrics: WorkerMetrics,
    ) -> None:
        self.consumer = consumer
        self.can_be_revived = True  # under this name, after its lease ran out
        self.is_member = True
        # Live ones of this model, in all workers, as of the last heartbeat; 0 before it.
        self.model_processes = 0
        self.process = process
        self._codec = codec
        self._fetcher: Fetches[Fetched] = fetcher
        self._draining = False
        self._drained = threading.Event()
        self._closing = False
        self._closed = threading.Event()
        self._metrics = metrics
        self._watch = ExecutionWatch()
        self.retirement = Retirement()
        self._log = structlog.get_logger()

    @property
    def batch_size_max(self) -> int | None:
        """How many requests the model takes at a time, as it declares or an operator says; None: any."""
        return self._codec.batch_size_max

    @batch_size_max.setter
    def batch_size_max(self, size_max: int) -> None:
        self._codec.batch_size_max = size_max

    # --- the loop ------------------------------------------------------------------------------------------

    def run_once(self) -> None:
        """Do everything that is due, then wait for the next event, up to half a second."""
        if self._closing or self._drained.is_set():
            # A process ends with the thread that started it (see lifecycle): stay until it has unloaded its
            # model.
            self._closed.wait()
            return
        if self.process.descriptor is None and self.process.has_ended() and not self._closing:
            self.retirement.process_started()
            self.process.spawn()
        self.process.check_loading()
        self._watch_execution()
        if self._do_due():
            self._wait()

    def _watch_execution(self) -> None:
        """End a model process that takes too long. One without a limit is reported."""
        executed, limit_ms = self._executing() if self.process.ready else (None, None)
        now_s = time.monotonic()
        due = self._watch.follow(executed, limit_ms, now_s)
        if due is Due.END:
            self.process.kill(f"it took longer than max_execution_ms, {limit_ms} ms")
            self._watch.follow(None, None, now_s)
        elif due is Due.REPORT:
            passed_s = round(self._watch.passed_s(now_s))
            self._log.warning("model process still executes", worker=self.consumer, seconds=passed_s)

    def _wait(self) -> None:
        """Wait for the model process, for the reply to a fetch, or until something is due; take what came."""
        process, fetcher = self.process, self._fetcher
        of_process = process.descriptor
        of_fetch = fetcher.descriptor if fetcher.waiting else None
        is_received = of_process is not None and self._is_receiving()
        readers = [of_process] if of_process is not None and is_received else []
        readers += [] if of_fetch is None else [of_fetch]
        writers = [of_process] if of_process is not None and process.has_backlog else []
        has_outcome = is_received and process.has_buffered
        is_due = has_outcome or (fetcher.waiting and of_fetch is None)
        try:
            timeout_s = 0.0 if is_due else min(self._timeout_s(), self._until_over_s())
            if of_process is None:  # it is ending
                timeout_s = min(timeout_s, ENDED_POLL_S)
            readable, writable = wait_until_ready(readers, writers, timeout_s)
        except OSError:
            if self._closing:  # `close` closed the connection before the wait began
                return
            raise
        if writable:
            process.flush()
        # Another process that it started may hold its connection open.
        has_ended = of_process is not None and not (readable or writable or process.alive)
        if has_outcome or has_ended or (of_process is not None and of_process in readable):
            self._receive()
        if fetcher.waiting and (of_fetch is None or of_fetch in readable):
            self._take_fetched(fetcher.finish())
        elif fetcher.waiting:
            fetcher.check_overdue()

    def _until_over_s(self) -> float:
        """How long until the model process has taken too long."""
        over_at_s = self._watch.over_at_s
        return over_at_s if over_at_s == float("inf") else max(0.0, over_at_s - time.monotonic())

    def _retire_process(self) -> None:
        """Replace a process because all that it executes fails. What is in hand is not suspect."""
        self._log.error(
            "model process retired, all that it executes fails",
            worker=self.consumer,
            pid=self.process.pid,
            batches=self.retirement.failed_batches,
        )
        self._metrics.process_died()
        self.retirement.retired(time.monotonic())
        self._let_go_of_process()
        self.process.hang_up()

    def _remember_example(self, execution: Execution, position: int | None, now_s: float) -> None:
        """A request of this execution has succeeded: it may be what a process is tried with later."""
        of_worker = self.retirement.of_worker
        if position is not None and of_worker.wants_example(now_s):
            of_worker.take_example(self._codec.example_of(execution, position), now_s)

    def _observe_outcome(self, outcome: OutcomeHeader, execution: Execution, frame: Frame) -> None:
        """Follow whether what the process executes succeeds."""
        now_s = time.monotonic()
        self.retirement.observe_outcome(outcome, execution.batch.id, now_s)
        failures = outcome.failures
        if len(failures) < outcome.size:
            index = 0 if not failures else next(at for at in range(outcome.size) if at not in failures)
            self._remember_example(execution, frame.positions[index], now_s)

    def _send_example(self, example: Example) -> None:
        """Send the process, which is idle, what it should be able to execute."""
        self.retirement.example_sent(example)
        self.process.send(example.header, example.payload)

    def _observe_example(self, failures: Mapping[int, Failure]) -> None:
        """Retire the process if the model has raised on the example, too."""
        if self.retirement.observe_example(failures, time.monotonic()):
            self._retire_process()

    def _log_raised(self, errors: Mapping[str, Sequence[int]], shown: Callable[..., dict[str, Any]]) -> None:
        """Log what the model raised, with the requests concerned. `errors`: which these are, by name, as in
        an outcome; `shown`: what the log shows of them, or of all in question without an argument."""
        told, self.process.raised = self.process.raised, []
        for raised in told:
            concerned = errors.get(raised.error)
            more = {"left_out": raised.left_out} if raised.left_out else {}
            self._log.error(
                "model raised",
                worker=self.consumer,
                error=raised.error,
                **(shown(concerned) if concerned else shown()),
                **more,
                exception=raised.trace,
            )

    @abstractmethod
    def _let_go_of_process(self) -> None:
        """The process is replaced: what it had is to be sent to the next one, or is lost with it."""

    @abstractmethod
    def _do_due(self) -> bool:
        """Do everything that is due. Whether to wait then."""

    @abstractmethod
    def _executing(self) -> tuple[Hashable, int | None]:
        """What the model process executes, which is another thing as soon as it has done this; None if it is
        idle. And how long it may take (ms); None without a limit."""

    @abstractmethod
    def _timeout_s(self) -> float:
        """How long to wait at most."""

    @abstractmethod
    def _receive(self) -> None:
        """Receive what the model process sent, or that it died or was replaced."""

    @abstractmethod
    def _take_fetched(self, fetched: Sequence[Fetched]) -> None:
        """Take what a fetch has brought."""

    def _is_receiving(self) -> bool:
        """Whether to receive what the model process sends; it waits meanwhile."""
        return True

    # --- for other threads ---------------------------------------------------------------------------------

    @abstractmethod
    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""

    @property
    def may_leave(self) -> bool:
        """Whether it is not needed any more, once it drains."""
        return not self.batches()

    def on_lease_lost(self, consumer: str) -> None:
        """Its lease under this name had run out: others take it for dead."""

    @property
    def slots(self) -> int:
        """How many requests or sequences may have a slot; 0 if there are no slots."""
        return 0

    @property
    def slots_in_use(self) -> int:
        """How many have one."""
        return 0

    def drain(self) -> None:
        """Fetch nothing more."""
        self._draining = True

    def wait_until_drained(self, timeout_s: float) -> bool:
        """Whether the last fetch has ended and nothing is in hand any more, within `timeout_s`."""
        return self._drained.wait(timeout_s)

    def close(self, wait_s: float) -> None:
        """Stop the model process for good; it has `wait_s` to unload its model."""
        self._closing = True
        self.process.close(wait_s)
        self._closed.set()


AnyReplica = ReplicaLoop[Any]


def shown_requests(requests: Sequence[tuple[Batch, str]], count: int = 0) -> dict[str, Any]:
    """What a line of the log shows of requests: their batch and correlation IDs. `count`: how many they are
    if these are only the first of them."""
    if not requests:
        return {"requests": 0}
    ids = [shortened(correlation_id, ID_CHARS_MAX) for _, correlation_id in requests[:IDS_SHOWN_MAX]]
    batches = list(dict.fromkeys(batch.id for batch, _ in requests[:IDS_SHOWN_MAX]))
    of_batches = {"batch": batches[0]} if len(batches) == 1 else {"batches": batches}
    return {**of_batches, "requests": count or len(requests), "correlation_ids": ids}


def shown_as_example() -> dict[str, Any]:
    """The same of the example that a process is tried with."""
    return {"when": "while executing an example"}


def shown_of_frame(
    execution: Execution, frame: Frame, indexes: Sequence[int] | None = None
) -> dict[str, Any]:
    """The same of the requests of a frame that have these indexes in it, or of all."""
    positions = frame.positions if indexes is None else [frame.positions[index] for index in indexes]
    located = [execution.locate(position) for position in positions[:IDS_SHOWN_MAX]]
    requests = [(execution.batch, run.correlation_ids[index]) for run, index in located]
    return shown_requests(requests, len(positions))
