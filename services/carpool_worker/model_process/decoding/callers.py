"""What a thread of the pool calls for one request: the model's method here, or in a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import structlog

from carpool.errors import Unhealthy
from carpool.parts import Buffer
from carpool_worker.model_process.decoding.exchange import (
    SharedMemory,
    read,
    write,
    write_packed,
    write_returned,
)
from carpool_worker.model_process.decoding.process import DecoderLoadError, DecoderProcess
from carpool_worker.model_process.frames import DEATHS_MAX, Measured, ProcessGoneError
from carpool_worker.model_process.loaded import Beside, RequestInfo

Keep = Callable[[Any], Any]  # takes what `decode` returned to where it is kept


class GivenUpError(Exception):
    """The request ended so many processes that it is not tried again. The text says how."""


class Body(Protocol):
    """A body of a frame, as it was sent; each call makes another one."""

    def value(self) -> Any:
        """For this process."""

    def packed(self) -> Buffer:
        """For another one."""


class Caller(ABC):
    """One for each thread of the pool."""

    @abstractmethod
    def decode(self, body: Body, request: Sequence[Any] | None, keep: Keep | None) -> Any:
        """What `keep` returns for what the model's `decode` returned, or that itself.

        Raises what the model raises, HookRaisedError in place of that, and GivenUpError.
        """

    @abstractmethod
    def encode(self, value: Any, request: Sequence[Any] | None) -> Any:
        """What the model's `encode` returns. Raises as `decode` does."""

    @abstractmethod
    def interrupt(self, reason: str) -> None:
        """End the current call, whose result is not needed. For another thread. Raises Unhealthy if this
        process has to end for that."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more is called."""


def called(beside: Beside, hook: str, value: Any, info: RequestInfo | None) -> Any:
    """What a method of the model returns for one request."""
    method = beside.decode if hook == "decode" else beside.encode
    assert method is not None  # else it is not called
    return method(value, request=info) if hook in beside.take_request else method(value)


class ThreadCaller(Caller):
    """Calls the model's methods in this process."""

    def __init__(self, beside: Beside) -> None:
        self._beside = beside

    def decode(self, body: Body, request: Sequence[Any] | None, keep: Keep | None) -> Any:
        value = called(self._beside, "decode", body.value(), _info(request))
        return value if keep is None else keep(value)

    def encode(self, value: Any, request: Sequence[Any] | None) -> Any:
        return called(self._beside, "encode", value, _info(request))

    def interrupt(self, reason: str) -> None:
        raise Unhealthy(reason)  # a thread cannot be ended

    def close(self) -> None:
        return None


class ExchangingCaller(ThreadCaller):
    """The same, and what they get and return is passed on as between processes: for trying a model out."""

    def __init__(self, beside: Beside) -> None:
        super().__init__(beside)
        self._memory = SharedMemory.create()

    def decode(self, body: Body, request: Sequence[Any] | None, keep: Keep | None) -> Any:
        value = self._passed_on("decode", super().decode(body, request, None))
        return value if keep is None else keep(value)

    def encode(self, value: Any, request: Sequence[Any] | None) -> Any:
        given = read(self._memory, write(self._memory, value), copy=True)
        return self._passed_on("encode", super().encode(given, request))

    def _passed_on(self, hook: str, value: Any) -> Any:
        return read(self._memory, write_returned(self._memory, hook, value), copy=True)

    def close(self) -> None:
        self._memory.close()


def _info(request: Sequence[Any] | None) -> RequestInfo | None:
    if request is None:
        return None
    correlation_id, lane, fields, *more = request
    return RequestInfo(correlation_id, lane, dict(fields), *more)


class ProcessCaller(Caller):
    """Has a process of its own call them. One that ends is replaced.

    It executes one request at a time, so that is the cause. The request is tried again, and given up if it
    ends a process again.
    """

    def __init__(
        self, location: str, replica: str, configuration: bytes, on_measured: Callable[[Measured], object]
    ) -> None:
        """Starts the process. Raises DecoderLoadError."""
        self._process = DecoderProcess(location, replica, configuration, on_measured)
        self._log = structlog.get_logger()
        self._is_interrupted = False
        self._process.start()

    def decode(self, body: Body, request: Sequence[Any] | None, keep: Keep | None) -> Any:
        written = self._call("decode", lambda memory: write_packed(memory, body.packed()), request)
        value = read(self._process.memory, written, copy=keep is None)
        return value if keep is None else keep(value)

    def encode(self, value: Any, request: Sequence[Any] | None) -> Any:
        written = self._call("encode", partial(write, value=value), request)
        return read(self._process.memory, written, copy=True)

    def _call(self, hook: str, put: Any, request: Sequence[Any] | None) -> Any:
        cause = ""
        self._is_interrupted = False
        for _ in range(DEATHS_MAX):
            if not self._process.alive:  # it ended while it had nothing to do
                self._replace(hook, "while idle")
            try:
                return self._process.call(hook, put, request)
            except ProcessGoneError:
                cause = self._replace(hook, f"in {hook} of one request")
                if self._is_interrupted:
                    raise GivenUpError(cause) from None
        raise GivenUpError(f"its decoder process died {DEATHS_MAX} times in {hook}; the last time: {cause}")

    def _replace(self, hook: str, when: str) -> str:
        """Start another process. How the one before it ended. Raises Unhealthy if that is impossible."""
        cause = self._process.exit_cause()
        self._log.error("decoder process died", how=cause, when=when)
        try:
            self._process.start()
        except DecoderLoadError as error:
            raise Unhealthy(f"a decoder process cannot be started again: {error}") from None
        return cause

    def interrupt(self, reason: str) -> None:
        self._is_interrupted = True
        self._process.kill(reason)

    def close(self) -> None:
        self._process.close()
