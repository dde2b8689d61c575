"""Executes bodies with a model as a worker does, but in this process, without Redis: to try a model out.

Bodies are decoded, executed in one batch, and the results encoded, by the code that serves requests.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from carpool.errors import CarpoolError
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import SequencePart
from carpool.messages.results import Result
from carpool.model_settings import ModelKind
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from carpool_worker.model_process.calls import Calls
from carpool_worker.model_process.decoding.loop import execute_alone
from carpool_worker.model_process.executor import run_now
from carpool_worker.model_process.frame_execution import execute_frame_async
from carpool_worker.model_process.loaded import description_of, kind_of
from carpool_worker.model_process.model import LoadedModel, SteppingModel
from carpool_worker.model_process.raised import name_of, whole_trace_of
from carpool_worker.model_process.stepping.frames import Admit, Step
from carpool_worker.model_process.stepping.stepper import Stepper
from carpool_worker.stepping.execution import StepExecution

STEPS_MAX: Final = 1000
UNFINISHED: Final = "UNFINISHED"  # the status of a request that was still being generated after these
_ENTRY: Final = "1-0"
_ADDRESS: Final = re.compile(r"\b0x[0-9a-f]+")  # in the text of an exception: another one each time
Validate = Callable[[Any], object]


class Tried(NamedTuple):
    """What became of a batch: the result of each body, in order, and the time in the model. `steps`: how many
    a stepping model took. `datatype`: of the one array that the results are rows of; empty without one."""

    results: list[Result]
    compute_us: int
    steps: int = 0
    datatype: str = ""


class Streamed(NamedTuple):
    """A generation whose reader sees it as it is made: the chunks, packed, each with what one step emitted,
    and the result with the whole output. If it was resumed, the chunks are those after."""

    chunks: list[bytes]
    result: Result


class DryRun:
    """A loaded model and the worker's code around it. Models that bind sequences are not supported.

    `has_changed_inputs`: whether the model wrote into an array that it was given.
    """

    def __init__(self, model: LoadedModel | SteppingModel, name: str = "model") -> None:
        """`name`: of the model, in the errors of those that it calls."""
        self.kind = kind_of(model)
        if self.kind is ModelKind.BOUND:
            raise ValueError("it binds sequences: each of their requests depends on those before it")
        self._traces: dict[tuple[str, str], str] = {}  # by the name of the error and its traceback
        self.has_changed_inputs = False
        self._codec = Codec(description_of(model))
        self._run: Callable[..., Any] = run_now
        self._runner: asyncio.Runner | None = None
        self._calls: Calls | None = None
        if not isinstance(model, SteppingModel):
            if model.is_async:
                self._runner = asyncio.Runner()
                self._run = self._runner.run
            if model.wants_clients:
                self._calls = Calls(name, is_async=model.is_async)
        self._model = model
        if not isinstance(model, SteppingModel):
            self._model = replace(model, validate=self._observed(model.validate))

    def close(self) -> None:
        """Disconnect from Redis, and end the event loop, if the model needed them."""
        if self._calls is not None:
            self._run(self._calls.close())
            self._calls.close_now()
        if self._runner is not None:
            self._runner.close()

    @property
    def calls_others(self) -> bool:
        """Whether the model asks others, which is sent to Redis."""
        return self._calls is not None

    @property
    def traces(self) -> list[str]:
        """The tracebacks of what the model raised so far: one for each error, however many batches had it."""
        return list(self._traces.values())

    @property
    def continues(self) -> bool:
        """Whether the model generates step by step, and can go on from chunks."""
        return isinstance(self._model, SteppingModel) and self._model.continues

    def execute(
        self, bodies: Sequence[bytes], content_type: str, extra: Mapping[str, bytes] | None = None
    ) -> Tried:
        """Execute these in one batch; of a model that keeps states, each as the start of its own sequence.
        `extra`: the fields for the model, and `accept`.

        Raises Unhealthy, if the model does.
        """
        keeps_states = self.kind is ModelKind.STATEFUL
        now_us = time.time_ns() // 1000
        template = BatchedRun(_ENTRY, [], [], content_type, None, now_us, None, extra or None)
        runs = [_run_of(template, number, body, keeps_states) for number, body in enumerate(bodies)]
        limits = self._model.settings
        batch = Batch(
            _ENTRY, 1, runs, "full", 0, "",
            max_result_bytes=limits.max_result_bytes, max_batch_cost=limits.max_batch_cost,
        )  # fmt: skip
        if isinstance(self._model, SteppingModel):
            return self._generate(self._model, batch)
        execution = Execution(batch)
        self._codec.prepare(execution, 0)
        datatypes: set[str] = set()
        for frame in execution.frames:
            sent = partial(bytearray().join, frame.payload)
            given = sent()
            if self._model.beside is None:
                calls = None if self._calls is None else self._calls.of_frame(frame.header)
                executing = execute_frame_async(self._model, frame.header, given, sent, self._keep, calls)
                header, payload = self._run(executing)
            else:
                header, payload = execute_alone(self._model, frame.header, given, self._keep)
            self.has_changed_inputs = self.has_changed_inputs or given != sent()
            self._codec.give_results(execution, frame, header, b"".join(payload))
            datatypes.add(header.layouts[0][1] if len(header.layouts) == 1 else "")
        execution.separate()
        datatypes = {spec.datatype for spec in self._model.outputs} or datatypes
        datatype = datatypes.pop() if len(datatypes) == 1 else ""
        return Tried(_in_order(execution), execution.compute_us, datatype=datatype)

    def stream(
        self,
        body: bytes,
        content_type: str,
        extra: Mapping[str, bytes] | None = None,
        chunks: Sequence[bytes] = (),
    ) -> Streamed:
        """Generate for one body, as for a reader of a stream, with a stepping model. `chunks`: packed, those
        that another process emitted before it died."""
        assert isinstance(self._model, SteppingModel)  # as `continues` says
        run = BatchedRun(_ENTRY, ["0"], [body], content_type, None, 0, None, extra or None)
        batch = Batch(_ENTRY, 1, [run], "full", 0, "", max_result_bytes=self._model.settings.max_result_bytes)
        generated = _Generated()
        (request,) = self._step_all(self._model, batch, generated, chunks=chunks, is_streamed=True)
        assert request.result is not None  # it has ended
        return Streamed(generated.chunks, request.result)

    def _generate(self, model: SteppingModel, batch: Batch) -> Tried:
        """Step requests until all have ended, each in a batch of its own."""
        generated = _Generated()
        requests = self._step_all(model, batch, generated)
        results = [one.result for one in requests if one.result is not None]
        return Tried(results, generated.compute_us, generated.steps)

    def _step_all(
        self,
        model: SteppingModel,
        batch: Batch,
        generated: _Generated,
        *,
        chunks: Sequence[bytes] = (),
        is_streamed: bool = False,
    ) -> list[StepExecution]:
        """The requests, ended. `generated` gets what was emitted, and what it took."""
        stepper = Stepper(model, observe=self._keep)
        requests: list[StepExecution] = []
        for key, run in enumerate(batch.runs):
            execution = Execution(replace(batch, runs=[run]))
            body = self._codec.body_of(execution, 0, 0)
            request = StepExecution(
                execution, key, 0.0, batch.max_result_bytes, has_tensors=self._codec.has_tensors
            )
            requests.append(request)
            if body is not None:
                fields = self._codec.request_fields(execution, 0)
                admit = Admit(key, body.layouts, fields, 1, is_streamed, chunks)
                stepper.admit(admit, bytearray().join(body.payload))
        while stepper.has_next and generated.steps < STEPS_MAX:
            step = stepper.advance()
            generated.add(step)
            if step is not None:
                for advance in step.advances:
                    requests[advance.key].apply(advance, step.size, 0)
        stepper.close()
        for request in requests:
            if request.result is None:
                detail = f"it is still being generated after {STEPS_MAX:,} steps, which end this attempt"
                request.end(UNFINISHED, detail)
        return requests

    def _observed(self, validate: Validate | None) -> Validate | None:
        """`validate`, so that what it raises is kept, unless that is how it refuses a body."""
        if validate is None:
            return None

        def call(body: Any) -> object:
            try:
                return validate(body)
            except BaseException as error:
                if not isinstance(error, CarpoolError | ValueError | AssertionError):
                    self._keep(error)
                raise

        return call

    def _keep(self, error: BaseException, concerned: Sequence[int] = ()) -> None:
        if isinstance(error, CarpoolError):  # raised on purpose, and its text says all
            return
        name, trace = name_of(error), whole_trace_of(error)
        if len(concerned) > 1 and any(name == known for known, _ in self._traces):
            return  # a batch with a body on which the model also raises alone
        self._traces.setdefault((name, _ADDRESS.sub("", trace)), trace)


class _Generated:
    """What steps did: the chunks that they emitted, their number, and the time in the model (us)."""

    def __init__(self) -> None:
        self.chunks: list[bytes] = []
        self.steps = 0
        self.compute_us = 0

    def add(self, step: Step | None) -> None:
        """A step. None: it changed nothing."""
        self.steps += step is None or step.has_stepped
        if step is not None:
            self.compute_us += step.step_us + step.begin_us
            self.chunks += [advance.chunk for advance in step.advances if advance.chunk]


def _run_of(template: BatchedRun, number: int, body: bytes, keeps_states: bool) -> BatchedRun:
    part = None
    if keeps_states:
        part = SequencePart(str(number), True, False, None, SequencePart.place_of(_ENTRY, number))
    return template._replace(correlation_ids=[str(number)], bodies=[body], sequence=part)


def _in_order(execution: Execution) -> list[Result]:
    return [execution.results[position] for position in execution.unanswered]
