"""When a model process is replaced although it works, and how: between two frames, by one that is ready.

A process is replaced when it has executed `max_requests_per_process`, or comes near `max_process_memory`.
Another one loads the model beside it. When that is ready, nothing more is sent to the old one, and as soon as
it has nothing in hand the two change places. Of all processes of a worker one is replaced at a time. One that
reaches `max_process_memory` before the next is ready executes nothing more until then.

Where there is not enough memory for two, the old one leaves first: no more is fetched for it, it executes
what is in hand, and ends; then the new one is started in its place.

Why: docs/decisions/0103.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

import structlog

from carpool_worker import memory
from carpool_worker.model_process.frames import MEASURED_INTERVAL_S, ProcessGoneError, read_answer
from carpool_worker.process_handle import ModelLoadError, ProcessHandle

LOOK_INTERVAL_S: Final = 0.02  # between two looks at the memory of a process
NEAR_RATIO: Final = 0.8  # of what it may take beyond what it took at first: then the next one is started
BESIDE_RATIO: Final = 1.25  # how much must be free for another process, of what this one takes
LINGER_S: Final = 2 * MEASURED_INTERVAL_S
PAUSE_S: Final = 60.0  # after a model could not be loaded again
Reason = Literal["requests", "memory"]


class Limits(NamedTuple):
    """Of one process; None: without a limit."""

    requests: int | None = None
    memory_bytes: int | None = None


_NO_LIMITS: Final = Limits()


def why_too_old(
    limits: Limits, requests: int, resident_bytes: int | None, loaded_bytes: int
) -> Reason | None:
    """Why a process that has executed these requests is to be replaced; None if it is not.

    `loaded_bytes`: what it took before the first of them. If that is over the limit, so would be another one.
    """
    if limits.requests is not None and requests >= limits.requests:
        return "requests"
    limit_bytes = limits.memory_bytes
    if limit_bytes is None or resident_bytes is None or loaded_bytes >= limit_bytes:
        return None
    near_bytes = loaded_bytes + NEAR_RATIO * (limit_bytes - loaded_bytes)
    return "memory" if resident_bytes >= near_bytes else None


def has_space_beside(
    device: str, resident_bytes: int | None, available_bytes: int | None, gpu: memory.GpuUse | None
) -> bool:
    """Whether there is enough memory for another process beside one that takes so much. What is unknown is
    taken for too little."""
    if resident_bytes is None or available_bytes is None or available_bytes < BESIDE_RATIO * resident_bytes:
        return False
    return device == "cpu" or (gpu is not None and gpu.free_bytes >= BESIDE_RATIO * gpu.used_bytes)


class Phase(Enum):
    """Where the replacement of a process stands."""

    NONE = auto()  # it is not replaced
    LOADING = auto()  # the next one loads the model beside it, or is ready
    SEEING_OFF = auto()  # the next one has its place, and it unloads its model
    # Of one that ends before the next one is started:
    FINISHING = auto()  # it executes what is in hand
    LINGERING = auto()  # it may only tell what its model has measured
    LEFT = auto()  # it is ending, or the next one is loading


class Succession:
    """The age of the process that one replica has, and the one that takes its place. For the replica's
    thread; `close` is for any.

    `turn`: held while a process is replaced; the worker has one for all of its replicas. `on_replaced` is
    called with the reason.
    """

    def __init__(self, process: ProcessHandle, on_replaced: Callable[[Reason], None]) -> None:
        self.turn = threading.Lock()
        self._limits = _NO_LIMITS
        self._is_limited = False
        self._process = process
        self._memory = memory.FamilyMemory()
        self._on_replaced = on_replaced
        self._phase = Phase.NONE
        self._has_turn = False
        self._reason: Reason = "requests"
        self._is_full = False  # the process takes as much memory as it may
        self._successor: ProcessHandle | None = None  # LOADING
        self._successor_bytes: int | None = None  # what it took when it was ready
        self._leaving: ProcessHandle | None = None  # SEEING_OFF
        self._hang_up_at_s = 0.0  # SEEING_OFF and LINGERING
        self._log = structlog.get_logger()
        self._look_at_s = 0.0
        self._paused_until_s = 0.0
        self._warned_of_bytes = 0  # the limit that is too low
        self._start_over()

    def _start_over(self, loaded_bytes: int | None = None) -> None:
        self._requests = 0
        self._loaded_bytes = loaded_bytes  # what it took before it executed anything; None: not seen yet

    @property
    def limits(self) -> Limits:
        """Those that the model has now."""
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits, self._is_limited = limits, limits != _NO_LIMITS

    @property
    def holds_back(self) -> bool:
        """Whether nothing more is to be sent to the process: another one is ready to take its place, or will
        be, and this one takes as much memory as it may."""
        return (
            self._is_full
            or self._phase is Phase.LINGERING
            or (self._successor is not None and self._successor.ready)
        )

    @property
    def leaves_first(self) -> bool:
        """Whether the process ends as soon as nothing is in hand, before another one is started."""
        return self._phase in (Phase.FINISHING, Phase.LINGERING)

    @property
    def stops_fetching(self) -> bool:
        """Whether nothing more is to be fetched for the process."""
        return self.leaves_first or self.holds_back

    @property
    def loading(self) -> ProcessHandle | None:
        """Another process that loads the model: what to wait for as well."""
        successor = self._successor
        return None if successor is None or successor.ready else successor

    def executed(self, requests: int) -> None:
        """The process has executed so many more."""
        self._requests += requests

    def process_started(self) -> None:
        """The process died or was retired, and another one is started in its place, which is as new."""
        self._start_over()
        if self._phase is not Phase.LEFT:
            self._abandon()

    def run_once(self, name: str, *, is_idle: Callable[[], bool], may_begin: bool) -> bool:
        """Do what is due. Whether the process was replaced, or is ending, so that nothing of it is valid.

        `is_idle`: it has nothing in hand. `may_begin`: the worker does not drain.
        """
        if self._has_turn:
            return self._go_on(name, is_idle)
        if self._is_limited and may_begin and self._process.ready:
            self._begin_if_due(name)
        return False

    # --- whether -------------------------------------------------------------------------------------------

    def _begin_if_due(self, name: str) -> None:
        resident_bytes = None
        if self._loaded_bytes is None:
            self._loaded_bytes = self._memory.resident_bytes(self._process.pid) or 0
            self._warn_of_limit(name)
        if self._is_look_due():
            resident_bytes = self._memory.resident_bytes(self._process.pid)
        reason = why_too_old(self.limits, self._requests, resident_bytes, self._loaded_bytes)
        if reason is not None and time.monotonic() >= self._paused_until_s:
            self._begin_if_in_turn(name, reason)

    def _is_look_due(self) -> bool:
        """Whether to look at the memory of the process now."""
        now_s = time.monotonic()
        if self.limits.memory_bytes is None or now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + LOOK_INTERVAL_S
        return True

    def _warn_of_limit(self, name: str) -> None:
        limit_bytes, loaded_bytes = self.limits.memory_bytes, self._loaded_bytes or 0
        if limit_bytes is not None and loaded_bytes >= limit_bytes != self._warned_of_bytes:
            self._warned_of_bytes = limit_bytes
            self._log.warning(
                "max_process_memory has no effect, the model takes as much as soon as it is loaded",
                replica=name,
                max_process_memory=limit_bytes,
                resident_bytes=loaded_bytes,
            )

    def _begin_if_in_turn(self, name: str, reason: Reason) -> None:
        if not self.turn.acquire(blocking=False):
            return
        self._has_turn, self._reason = True, reason
        resident = self._memory.resident_bytes(self._process.pid)
        device = self._process.device
        use = None if device == "cpu" else memory.gpu_use(self._process.pid)
        has_space = has_space_beside(device, resident, memory.available_bytes(), use)
        self._log.info(
            "model process has reached a limit, another takes its place",
            replica=name,
            pid=self._process.pid,
            reason=reason,
            requests=self._requests,
            resident_bytes=resident,
            loads="beside it" if has_space else "afterwards",
        )
        self._phase = Phase.LOADING if has_space else Phase.FINISHING
        if has_space:
            self._successor = self._process.new_like()
            self._successor.spawn()

    # --- how -----------------------------------------------------------------------------------------------

    def _go_on(self, name: str, is_idle: Callable[[], bool]) -> bool:
        self._look_whether_full()
        match self._phase:
            case Phase.LOADING:
                return self._change_places(name, is_idle)
            case Phase.SEEING_OFF:
                self._see_off()
            case Phase.FINISHING | Phase.LINGERING:
                return self._leave_first(is_idle)
            case Phase.LEFT:
                if self._process.ready:  # that is the next one
                    self._end()
        return False

    def _change_places(self, name: str, is_idle: Callable[[], bool]) -> bool:
        """Let the next process take the place, once it is ready and the old one has nothing in hand."""
        successor = self._successor
        assert successor is not None
        if not (successor.ready or self._has_loaded(successor, name)) or not is_idle():
            return False
        self._process.exchange(successor)
        self._successor, self._leaving = None, successor
        self._phase = Phase.SEEING_OFF
        self._hang_up_at_s = time.monotonic() + LINGER_S
        self._replaced(name)
        return True

    def _see_off(self) -> None:
        """A process that was replaced has a moment to tell what its model has measured, and then ends."""
        leaving = self._leaving
        assert leaving is not None
        if leaving.descriptor is not None:
            with contextlib.suppress(ProcessGoneError):
                leaving.receive_message(read_answer)
                while leaving.has_buffered:
                    leaving.receive_message(read_answer)
            if time.monotonic() >= self._hang_up_at_s:
                leaving.hang_up()
        elif leaving.has_ended():
            leaving.close(0)
            self._leaving = None
            self._end()

    def _look_whether_full(self) -> None:
        limit_bytes = self.limits.memory_bytes
        if limit_bytes is not None and self._phase in (Phase.LOADING, Phase.SEEING_OFF):
            # At each turn of the loop, because it is near the limit.
            self._is_full = (self._memory.resident_bytes(self._process.pid) or 0) >= limit_bytes

    def _has_loaded(self, successor: ProcessHandle, name: str) -> bool:
        try:
            successor.flush()
            successor.check_loading()
            if successor.receive_ready() is None:
                return False
        except ModelLoadError as error:
            self._log.error(
                "model cannot be loaded again, keeping the old process",
                replica=name,
                reason=str(error),
                **error.logged_trace(),
            )
            self._paused_until_s = time.monotonic() + PAUSE_S
            self._abandon()
            return False
        self._successor_bytes = self._memory.resident_bytes(successor.pid)
        return True

    def _leave_first(self, is_idle: Callable[[], bool]) -> bool:
        """End the process once it has nothing in hand, so that there is space for the next one."""
        if self._phase is Phase.FINISHING:
            if not is_idle():
                return False
            if self._process.has_measured:
                self._phase = Phase.LINGERING
                self._hang_up_at_s = time.monotonic() + LINGER_S
        if self._phase is Phase.LINGERING and time.monotonic() < self._hang_up_at_s:
            return False
        self._phase = Phase.LEFT
        self._process.hang_up()
        self._on_replaced(self._reason)
        return True

    def _replaced(self, name: str) -> None:
        self._start_over(self._successor_bytes)
        self._is_full = False
        self._on_replaced(self._reason)
        self._log.info("model process replaced", replica=name, pid=self._process.pid)

    def _abandon(self) -> None:
        """The process stays, or another one takes its place in another way."""
        successor, self._successor = self._successor, None
        if successor is not None:
            successor.close(0)
        if self._phase is not Phase.SEEING_OFF:
            self._end()

    def _end(self) -> None:
        self._phase = Phase.NONE
        self._is_full = False
        if self._has_turn:
            self._has_turn = False
            self.turn.release()

    def close(self, wait_s: float) -> None:
        """End the processes beside the replica's own."""
        for process in (self._successor, self._leaving):
            if process is not None:
                process.close(wait_s)
