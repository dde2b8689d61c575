"""What all replicas have in common: a loop for one model process, and how it is drained and closed.

One thread waits for the reply to a fetch, for the model process and for the time, whichever is first.

Why: docs/decisions/0043.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import structlog

from carpool.descriptor_wait import wait_until_ready
from carpool.messages.batches import Batch
from carpool.shown import shortened
from carpool_worker.batch_sources import Source
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from carpool_worker.execution_watch import Due, ExecutionWatch
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import Failure, ProcessGoneError
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.retirement import Retirement
from carpool_worker.succession import Succession

WAIT_S: Final = 0.5  # a drain is noticed after this time
IDS_SHOWN_MAX: Final = 16  # in a line of the log
ID_CHARS_MAX: Final = 200  # of each of them
ENDED_POLL_S: Final = 0.02  # how often it is looked whether a process that is to be replaced has ended
Item = TypeVar("Item")


class ReplicaLoop(ABC, Generic[Item]):
    """Its loop calls `run_once`. The heartbeat's thread and the main thread use `member`, call `batches`,
    `may_leave`, `drain`, `wait_until_drained`, `close`, `begin_drain`, `end_drain`, and read how many slots
    there are.
    """

    def __init__(
        self,
        member: Member,
        process: ProcessHandle,
        codec: Codec,
        source: Source[Item, Any],
        metrics: WorkerMetrics,
    ) -> None:
        self.member = member
        self.process = process
        self._codec = codec
        self._source: Source[Item, Any] = source
        self._draining = False
        self._is_set_aside = False  # it drains, which may be undone
        self._fetches_last = False  # although it drains
        self._last_until_ms = 0  # as `fetch_last` was told
        self._drained = threading.Event()
        self._closing = False
        self._closed = threading.Event()
        self._metrics = metrics
        self._watch = ExecutionWatch()
        self.retirement = Retirement()
        self.succession = Succession(process, metrics.process_replaced)
        self._log = structlog.get_logger()

    @property
    def name(self) -> str:
        """Under which it is a member of its model's consumers, for the log, too."""
        return self.member.name

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
            self.succession.process_started()
            self.process.spawn()
        self.process.check_loading()
        self._watch_execution()
        if self.succession.run_once(self.name, is_idle=self._is_idle, may_begin=not self._draining):
            self.retirement.process_started()
            self._let_go_of_process()
        if self._do_due():
            self._wait()

    def _watch_execution(self) -> None:
        """End a model process that takes too long. One without a limit is reported."""
        executed, limit_ms = self._executing() if self.process.ready else (None, None)
        now_s = time.monotonic()
        due = self._watch.observe(executed, limit_ms, now_s)
        if due is Due.END:
            self.process.kill(f"it took longer than max_execution_ms, {limit_ms} ms")
            self._watch.observe(None, None, now_s)
        elif due is Due.REPORT:
            passed_s = round(self._watch.passed_s(now_s))
            self._log.warning("model process still executes", replica=self.name, seconds=passed_s)

    def _wait(self) -> None:
        """Wait for the model process, for the reply to a fetch, or until something is due; take what came."""
        process, source = self.process, self._source
        process_fd = process.descriptor
        source_fd = source.descriptor if source.waiting else None
        is_received = process_fd is not None and self._is_receiving()
        readers = [process_fd] if process_fd is not None and is_received else []
        readers += [] if source_fd is None else [source_fd]
        writers = [process_fd] if process_fd is not None and process.has_unsent else []
        successor = self.succession.loading
        if successor is not None and successor.descriptor is not None:
            readers.append(successor.descriptor)
            writers += [successor.descriptor] if successor.has_unsent else []
        has_outcome = is_received and process.has_buffered
        is_due = has_outcome or (source.waiting and source_fd is None)
        try:
            timeout_s = 0.0 if is_due else min(self._timeout_s(), self._until_over_s())
            if process_fd is None:  # it is ending
                timeout_s = min(timeout_s, ENDED_POLL_S)
            readable, writable = wait_until_ready(readers, writers, timeout_s)
        except OSError:
            if self._closing:  # `close` closed the connection before the wait began
                return
            raise
        if writable:
            process.flush()
        # Another process that it started may hold its connection open.
        has_ended = process_fd is not None and not (readable or writable or process.alive)
        if has_outcome or has_ended or (process_fd is not None and process_fd in readable):
            self._receive()
        if source.waiting and (source_fd is None or source_fd in readable):
            self._add_fetched(source.finish())
        elif source.waiting:
            source.check_overdue()

    def _until_over_s(self) -> float:
        """How long until the model process has taken too long."""
        over_at_s = self._watch.over_at_s
        return over_at_s if over_at_s == float("inf") else max(0.0, over_at_s - time.monotonic())

    def _receive(self) -> None:
        """Receive what the model process sent, or that a new one is ready, or that it died."""
        try:
            if self.process.ready:
                self._receive_message()
            elif self.process.receive_ready() is not None:
                self._log.info("model process replaced", replica=self.name, pid=self.process.pid)
        except ProcessGoneError:
            if not self._closing:  # else this worker closed the connection: no request is the cause
                self._replace_process()

    def _replace_process(self) -> None:
        """The model process died: another one takes its place once it has ended."""
        cause = self.process.exit_cause()
        self._metrics.process_died()
        self._log_raised({})
        self._log.error("model process died", replica=self.name, how=cause, **self._suspect(cause))
        self._let_go_of_process()
        self.process.hang_up()

    def _retire_process(self) -> None:
        """Replace a process because all that it executes fails. What is in hand is not suspect."""
        self._log.error(
            "model process retired, all that it executes fails",
            replica=self.name,
            pid=self.process.pid,
            batches=self.retirement.failed_batches,
        )
        self._metrics.process_died()
        self.retirement.retired(time.monotonic())
        self._let_go_of_process()
        self.process.hang_up()

    def _remember_example(self, execution: Execution, position: int, now_s: float) -> None:
        """A request of this execution has succeeded: it may be what a process is tried with later."""
        last = self.retirement.last_success
        if last.wants_example(now_s):
            last.take_example(self._codec.example_of(execution, position), now_s)

    def _observe_example(self, failures: Mapping[int, Failure]) -> None:
        """Retire the process if the model has raised on the example, too."""
        if self.retirement.observe_example(failures, time.monotonic()):
            self._retire_process()

    def _log_raised(self, errors: Mapping[str, Sequence[int]]) -> None:
        """Log what the model raised, with the requests concerned; as a warning if a body is to blame.
        `errors`: which these are, by name, as in an outcome."""
        told, self.process.raised = self.process.raised, []
        for raised in told:
            concerned = errors.get(raised.error)
            fields = {
                "replica": self.name,
                "error": raised.error,
                **(self._shown(concerned) if concerned else self._shown()),
                **({"left_out": raised.left_out} if raised.left_out else {}),
                "exception": raised.trace,
            }
            if raised.of_body:
                self._log.warning("model raised", **fields)
            else:
                self._log.error("model raised", **fields)

    @abstractmethod
    def _is_idle(self) -> bool:
        """Whether the model process has nothing in hand, so that another one may take its place; one that is
        to leave first also nothing that was fetched for it."""

    @abstractmethod
    def _do_due(self) -> bool:
        """Do everything that is due. Whether to wait then."""

    @abstractmethod
    def _executing(self) -> tuple[Hashable, int | None]:
        """What the model process executes, which is another thing as soon as it has done this; None if it is
        idle. And how long it may take (ms); None without a limit."""

    def _timeout_s(self) -> float:
        """How long to wait at most."""
        return WAIT_S

    def _is_receiving(self) -> bool:
        """Whether to receive what the model process sends; it waits meanwhile."""
        return True

    @abstractmethod
    def _receive_message(self) -> None:
        """Take the next message of the model process, if it has arrived. Raises ProcessGoneError."""

    @abstractmethod
    def _add_fetched(self, items: Sequence[Item]) -> None:
        """Take what the source has brought."""

    @abstractmethod
    def _suspect(self, cause: str) -> dict[str, Any]:
        """The model process died: mark what may be the cause. What the log shows of that."""

    @abstractmethod
    def _let_go_of_process(self) -> None:
        """The process is replaced: what it had is to be sent to the next one, or is lost with it."""

    @abstractmethod
    def _shown(self, indexes: Sequence[int] | None = None) -> dict[str, Any]:
        """What the log shows of the requests with these indexes or keys, or of all that the model process
        executes."""

    # --- for other threads ---------------------------------------------------------------------------------

    @abstractmethod
    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""

    @property
    def may_leave(self) -> bool:
        """Whether it is not needed any more, once it drains."""
        return not self.batches()

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

    @property
    def _takes_no_more(self) -> bool:
        """Whether it fetches nothing more, at least for now."""
        return self._draining or self._is_set_aside

    def begin_drain(self) -> None:
        """An operator drains it, or its worker is about to stop: fetch nothing more, until `end_drain`."""
        self._is_set_aside = True

    def end_drain(self) -> None:
        """The operator has undone that."""
        self._fetches_last, self._last_until_ms = False, 0
        self._source.hurry(is_hurried=False)
        self._is_set_aside = False

    def hand_over_to_others(self) -> None:
        """An operator drains it, and other processes serve its model: they may go on with what it has."""

    @property
    def marks_its_drain(self) -> bool:
        """Whether it tells the batcher itself that it drains."""
        return False

    def fetch_last(self, until_ms: int) -> None:
        """Although it drains, fetch until there is nothing more, or until a batch comes that was dispatched
        after this time of Redis's clock. That is for another process, which has come meanwhile."""
        self._last_until_ms = until_ms
        self._source.hurry()
        self._fetches_last = True

    def wait_until_drained(self, timeout_s: float) -> bool:
        """Whether the last fetch has ended and nothing is in hand any more, within `timeout_s`."""
        return self._drained.wait(timeout_s)

    def close(self, wait_s: float) -> None:
        """Stop the model process for good; it has `wait_s` to unload its model."""
        self._closing = True
        self.succession.close(0)
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
    shown = {"batch": batches[0]} if len(batches) == 1 else {"batches": batches}
    return {**shown, "requests": count or len(requests), "correlation_ids": ids}
