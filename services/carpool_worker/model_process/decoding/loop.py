"""The loop of a process whose model decodes bodies, or encodes results, beside its batches.

The intake receives frames ahead and has them decoded. The main thread takes them in order, and runs the
model. The finisher has the results encoded, and sends the outcomes in order; without `encode` the main thread
sends them itself.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from carpool.errors import ABORTED, INTERNAL, INVALID_ARGUMENT, CarpoolError
from carpool.messages.results import GIVEN_UP
from carpool.parts import Buffer
from carpool_worker.model_process import frames
from carpool_worker.model_process.decoding.callers import Caller, ExchangingCaller, GivenUpError, ThreadCaller
from carpool_worker.model_process.decoding.pool import Inline, Jobs, Pool
from carpool_worker.model_process.decoding.process import HookRaisedError
from carpool_worker.model_process.decoding.work import Bodies, DecodedItems, Decoding, Observed
from carpool_worker.model_process.executor import Items, Outcome, decode_items, run_now
from carpool_worker.model_process.failures import Observe, failure_of
from carpool_worker.model_process.frame_execution import execution_of, outcome_of, timed
from carpool_worker.model_process.frames import Failure, FrameHeader, MessageSender, OutcomeHeader, Raised
from carpool_worker.model_process.loaded import LoadedModel
from carpool_worker.model_process.measured import MeasuredSender
from carpool_worker.model_process.outputs import rows_of
from carpool_worker.model_process.padding import TrueSizes
from carpool_worker.model_process.raised import RaisedLog
from carpool_worker.model_process.states import States

_Work = tuple[FrameHeader, Buffer, States | None, Decoding | None]


class Executed(NamedTuple):
    """A frame that the model has executed. `errors`: what it raised, as in an OutcomeHeader."""

    frame: FrameHeader
    outcome: Outcome
    compute_us: int
    states: States | None
    sizes: TrueSizes | None = None
    given_up: Mapping[int, str] = {}
    decode_us: int = 0
    waited_us: int = 0
    errors: Mapping[str, Sequence[int]] = {}

    def message(self, model: LoadedModel) -> tuple[OutcomeHeader, list[Buffer]]:
        """The header of the outcome and its payload, in parts."""
        header, data = outcome_of(model, self.frame, self.outcome, self.compute_us, self.sizes)
        header = header._replace(
            given_up=self.given_up,
            decode_us=self.decode_us,
            waited_us=self.waited_us,
            errors={**header.errors, **self.errors},
        )
        return header, [data] if self.states is None else [data, self.states.without(header.failures)]


class DecodingLoop:
    """Has bodies decoded ahead, executes frames in order, and has results encoded behind."""

    def __init__(
        self, sock: socket.socket, sender: MessageSender, model: LoadedModel, raised: RaisedLog, pool: Pool
    ) -> None:
        """`pool` is started."""
        assert model.beside is not None
        self._reader = frames.MessageReader(sock)
        self._sender = sender
        self._model = model
        self._raised = raised
        self._pool = pool
        self._encodes = model.beside.encode is not None
        self._measured = MeasuredSender(sock, sender)
        self._ready: queue.SimpleQueue[_Work | BaseException | None] = queue.SimpleQueue()
        self._again: queue.SimpleQueue[Buffer] = queue.SimpleQueue()
        self._finishing: queue.SimpleQueue[Executed | None] = queue.SimpleQueue()
        self._abandoned: list[Decoding] = []  # executed, while late bodies of them were still decoded
        self._threads = [threading.Thread(target=self._take_in, name="intake", daemon=True)]
        if self._encodes:
            self._threads.append(threading.Thread(target=self._finish, name="finisher", daemon=True))
        pool.watch(self._ready.put)

    def run(self) -> None:
        """Serve until the worker closes the connection. Raises Unhealthy."""
        for thread in self._threads:
            thread.start()
        with contextlib.suppress(frames.ProcessGoneError):
            while True:
                self.run_once()
        self._finishing.put(None)
        self._pool.close()

    def run_once(self) -> None:
        """Execute the next frame. Raises ProcessGoneError, and what ends this process."""
        frame, payload, states, decoding = self._next()
        if decoding is None:
            again = partial(self._sent_again, frame, states)
            items = decode_items(frame, payload, again, self._model.inputs)
            executed = _run(self._model, frame, items, states, self._raised.observe)
        else:
            executed = run_decoded(self._model, decoding, states, self._pool, self._raised)
            if decoding.is_running:
                self._abandoned.append(decoding)
        executed = executed._replace(errors=self._raised.take())
        if self._encodes:
            self._finishing.put(executed._replace(outcome=_kept(executed.outcome)))
        else:
            header, data = executed.message(self._model)
            self._measured.send_if_due()
            self._sender.send(header, *data)

    def _next(self) -> _Work:
        """The next frame. While there is none, what the model has measured is sent."""
        while True:
            try:
                work = self._ready.get(timeout=self._measured.send_if_due())
            except queue.Empty:
                continue
            if isinstance(work, BaseException):
                raise work
            if work is not None:
                return work

    # --- the intake ----------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        try:
            last = 0
            while True:
                fields, payload = self._reader.receive()
                frame = FrameHeader(*fields)
                if frame.number <= last:
                    self._again.put(payload)
                else:
                    last = frame.number
                    self._end_overdue()
                    self._ready.put(begin(self._model, frame, payload, self._pool))
        except BaseException as error:  # the main thread raises it
            self._ready.put(error)

    def _end_overdue(self) -> None:
        """Before a frame takes a place in the pool: see Decoding.end_overdue. Raises Unhealthy."""
        for decoding in tuple(self._abandoned):
            decoding.end_overdue()
            if not decoding.is_running:
                self._abandoned.remove(decoding)

    def _sent_again(self, frame: FrameHeader, states: States | None) -> Buffer:
        """The payload of a frame whose outcome was not sent yet, once more, without states."""
        self._sender.send(frames.Again(frame.number).message())
        payload = self._again.get()
        return payload if states is None else _divided(self._model, frame, payload)[0]

    # --- the finisher --------------------------------------------------------------------------------------

    def _finish(self) -> None:
        raised = RaisedLog(self._tell)
        try:
            while (executed := self._finishing.get()) is not None:
                executed = encoded(self._model, executed, self._pool, raised)
                header, data = executed.message(self._model)
                self._sender.send(header, *data)
                if self._measured.has_news:
                    self._ready.put(None)  # the main thread sends it
        except BaseException as error:  # the main thread raises it
            self._ready.put(error)

    def _tell(self, raised: Raised) -> None:
        with contextlib.suppress(frames.ProcessGoneError):
            self._sender.send(raised.message())


def execute_alone(
    model: LoadedModel, frame: FrameHeader, payload: Buffer, observe: Observe
) -> tuple[OutcomeHeader, list[Buffer]]:
    """Execute a frame in this thread, without a pool. `observe` is told what the model raises. Raises
    Unhealthy."""
    assert model.beside is not None
    caller = (ExchangingCaller if model.beside.in_processes else ThreadCaller)(model.beside)
    try:
        return _execute_inline(model, frame, payload, _Observing(observe), Inline(caller))
    finally:
        caller.close()


def _execute_inline(
    model: LoadedModel, frame: FrameHeader, payload: Buffer, raised: RaisedLog, jobs: Jobs
) -> tuple[OutcomeHeader, list[Buffer]]:
    assert model.beside is not None
    frame, payload, states, decoding = begin(model, frame, payload, jobs)
    if decoding is None:
        sent = bytes(payload)
        items = decode_items(frame, payload, lambda: bytearray(sent), model.inputs)
        executed = _run(model, frame, items, states, raised.observe)
    else:
        executed = run_decoded(model, decoding, states, jobs, raised)
    if model.beside.encode is not None:
        executed = encoded(model, executed._replace(outcome=_kept(executed.outcome)), jobs, raised)
    return executed.message(model)


class _Observing(RaisedLog):
    """Tells what the model raises instead of making a log of it."""

    def __init__(self, observe: Observe) -> None:
        super().__init__(lambda _: None)
        self._observe = observe

    def observe(self, error: BaseException, concerned: Sequence[int], *, of_body: bool = False) -> None:
        """See RaisedLog."""
        self._observe(error, concerned)


# --- the stages of a frame ---------------------------------------------------------------------------------


def begin(model: LoadedModel, frame: FrameHeader, payload: Buffer, jobs: Jobs) -> _Work:
    """Have the bodies of a frame decoded, if the model does that."""
    assert model.beside is not None
    states = None
    if model.states:
        payload, rows = _divided(model, frame, payload)
        states = States(model.states, rows, frame.size)
    if model.beside.decode is None:
        return frame, payload, states, None
    decoding = Decoding(model, frame, Bodies(frame, payload))
    decoding.start(jobs)
    return frame, payload, states, decoding


def _divided(model: LoadedModel, frame: FrameHeader, payload: Buffer) -> tuple[Buffer, Buffer]:
    return frames.divide_payload(payload, frame.size * len(model.initial_state))


def run_decoded(
    model: LoadedModel, decoding: Decoding, states: States | None, jobs: Jobs, raised: RaisedLog
) -> Executed:
    """Run the model on what is decoded, once it is. Raises Unhealthy."""
    began_ns = time.monotonic_ns()
    batch = decoding.wait()
    waited_us = (time.monotonic_ns() - began_ns) // 1000
    _observe_all(raised, decoding.raised, decoding.rejected)
    items = DecodedItems(decoding, batch, jobs)
    executed = _run(model, decoding.frame, items, states, raised.observe)
    return executed._replace(
        sizes=batch.sizes,
        given_up=decoding.given_up,
        decode_us=max(1, decoding.took_us),
        waited_us=waited_us,
    )


def _run(
    model: LoadedModel,
    frame: FrameHeader,
    items: Items,
    states: States | None,
    observe: Observe,
) -> Executed:
    run = partial(run_now, execution_of(model, frame, items, states, observe))
    return Executed(frame, *timed(run), states)


def _observe_all(raised: RaisedLog, observed: Sequence[Observed], failures: Mapping[int, Failure]) -> None:
    for index, error, name, trace in observed:
        of_body = failures[index][0] == INVALID_ARGUMENT
        if error is not None:
            raised.observe(error, [index], of_body=of_body)
        else:
            raised.observe_named(name, partial(str, trace), [index], of_body=of_body)


def encoded(model: LoadedModel, executed: Executed, jobs: Jobs, raised: RaisedLog) -> Executed:
    """The same with its results encoded, each by itself; one that cannot be fails its request."""
    outcome, frame = executed.outcome, executed.frame
    indexes = [index for index in range(frame.size) if index not in outcome.failures]
    encoding = _Encoding(model, frame, indexes, rows_of(outcome.results))
    results = encoding.run(jobs)
    _observe_all(raised, encoding.raised, encoding.failures)
    failures = outcome.failures | encoding.failures
    return executed._replace(
        outcome=outcome._replace(failures=failures, results=results),
        given_up={**executed.given_up, **encoding.given_up},
        errors={**executed.errors, **raised.take()},
    )


class _Encoding:
    """The results of a frame, which are encoded one by one."""

    def __init__(
        self, model: LoadedModel, frame: FrameHeader, indexes: Sequence[int], rows: Sequence[Any]
    ) -> None:
        assert model.beside is not None
        self._frame = frame
        self._takes_request = "encode" in model.beside.take_request
        self._rows = dict(zip(indexes, rows, strict=True))
        self._results: dict[int, Any] = {}
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self.failures: dict[int, Failure] = {}
        self.given_up: dict[int, str] = {}
        self.raised: list[Observed] = []

    def run(self, jobs: Jobs) -> list[Any]:
        """The results of those that did not fail. Raises Unhealthy."""
        for index in self._rows:
            jobs.put(self._frame.number, partial(self._encode, index))
        for _ in self._rows:
            error = self._done.get()
            if error is not None:
                raise error
        return [self._results[index] for index in self._rows if index in self._results]

    def _encode(self, index: int, caller: Caller) -> None:
        """In a thread of the pool."""
        request = self._frame.requests[index] if self._takes_request else None
        broken: BaseException | None = None
        try:
            self._results[index] = caller.encode(self._rows[index], request)
        except HookRaisedError as error:
            self.failures[index] = error.failure
            if error.name:
                self.raised.append(Observed(index, None, error.name, error.trace))
        except GivenUpError as error:
            self.given_up[index] = str(error)
            self.failures[index] = (ABORTED, f"{GIVEN_UP}: {error}")
        except BaseException as error:  # a library's panic, SystemExit: none may end this process
            try:
                self.failures[index] = failure_of(error, INTERNAL)
            except BaseException as unhealthy:
                broken = unhealthy
            if not isinstance(error, CarpoolError):
                self.raised.append(Observed(index, error))
        self._done.put(broken)


def _kept(outcome: Outcome) -> Outcome:
    """An outcome whose arrays are its own: the model may fill the same ones anew, for the next batch."""
    results = outcome.results
    if isinstance(results, dict):
        return outcome._replace(results={name: array.copy() for name, array in results.items()})
    return outcome._replace(results=[_own(value) for value in results])


def _own(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    if type(value) in (list, tuple):
        return type(value)([_own(item) for item in value])
    if type(value) is dict:
        return {name: _own(item) for name, item in value.items()}
    return value
