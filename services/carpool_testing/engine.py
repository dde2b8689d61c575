"""One model as a stack would serve it, in this process: the scheduler of a batcher, and the codec and the
executor of a worker, joined by function calls.

    entry ──decode──▶ scheduler ──Dispatch──▶ batch ──frames──▶ model ──outcomes──▶ results

What crosses a connection in a stack is encoded and decoded here, too, by the same functions. There is one
model process, which is this one. Of most models it executes one batch at a time, and a batch is settled when
it is executed; `waiting_engine` has the others.

Why: docs/decisions/0102.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Final

from carpool.errors import ABORTED, INVALID_ARGUMENT, CarpoolError, Unhealthy
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import Run, SequencesEnd, Withdrawal
from carpool.messages.results import UNANSWERED, Refusal, Result, ResultColumns, RunResults
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelKind
from carpool.parts import Buffer
from carpool.rows import NO_STORED_BODY, Rows, StoredBody
from carpool.store.steps import StepReply, StepWrite
from carpool.wire.batches import decode_batch, encode_batch
from carpool.wire.content_types import answer_type
from carpool.wire.requests import decode_entry
from carpool.wire.results import encode_array_head, encode_chunk_envelope, encode_columns, encode_envelope
from carpool_batcher.core.decisions import EXPIRED, WITHDRAWN, Cancel, Decision, Expire
from carpool_batcher.core.scheduler import Scheduler, earlier
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution, Frame
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.decoding.loop import execute_alone
from carpool_worker.model_process.frame_execution import execute_bound_frame, execute_frame
from carpool_worker.model_process.frames import OutcomeHeader
from carpool_worker.model_process.loaded import BoundModel, LoadedModel, SteppingModel, description_of
from carpool_worker.model_process.stepping.frames import Admit
from carpool_worker.model_process.stepping.stepper import Stepper
from carpool_worker.stepping.execution import StepExecution
from carpool_worker.stepping.in_hand import InHand

PROCESS: Final = "local"  # the name of the model process
_UNHEALTHY: Final = "the model says that nothing works any more in its process: {}"
_LOG: Final = logging.getLogger("carpool.testing")

Executed = tuple[OutcomeHeader, Sequence[Buffer]]  # the outcome of a frame
Deliver = Callable[[Sequence[bytes]], object]  # takes the fields of an entry of a reply stream


def now_us() -> int:
    """The clock of all models: model processes compare deadlines with the monotonic one."""
    return time.monotonic_ns() // 1000


def wall_ahead_us() -> int:
    """What the wall clock shows, less `now_us`: models are told times by it."""
    return time.time_ns() // 1000 - now_us()


def show(error: BaseException, _concerned: Sequence[int] = ()) -> None:
    """The model raised: its traceback is for the author of the test."""
    if isinstance(error, KeyboardInterrupt):
        raise error
    if not isinstance(error, CarpoolError):
        _LOG.error("the model raised", exc_info=error)


class Engine(ABC):
    """Give it entries with `receive`, and call `turn` when it is due.

    `deliver` is called with results. `bodies`: what producers stored, by key.
    """

    def __init__(
        self, model: LoadedModel | SteppingModel, keys: Keys, deliver: Deliver, bodies: Mapping[str, bytes]
    ) -> None:
        ready = description_of(model)
        self.settings = model.settings
        self._kind = ready.kind
        self._keys = keys
        self._deliver = deliver
        self._bodies = bodies
        self._codec = Codec(ready)
        self._scheduler = Scheduler(model.settings, kind=ready.kind)
        self._scheduler.set_processes([PROCESS], (), {PROCESS: ready.version})
        self._scheduler.versions.be_final()
        self._scheduler.sequences.complete()  # there is nothing to read that another batcher left
        self._numbers = count(1)
        self._refused: list[Refusal] = []  # on arrival; answered in the next turn
        self._has_arrived = False
        self._batches: deque[Batch] = deque()  # in flight, and not executed
        self._expired: dict[str, set[int]] = {}  # positions that were answered in flight, by batch
        self._unload = model.unload

    # --- used by the transport -----------------------------------------------------------------------------

    def receive(self, flat: Sequence[bytes]) -> None:
        """Take an entry of the request stream: field, value, field, value."""
        self._has_arrived = True
        entry_id = f"{now_us() // 1000}-{next(self._numbers)}".encode()
        scheduler = self._scheduler
        _, decoded = decode_entry(entry_id, flat, scheduler.settings, now_us())
        for item in decoded:
            if isinstance(item, Run):
                self._refused += scheduler.offer(item, now_us())
            elif isinstance(item, Refusal):
                self._refused += scheduler.refuse_malformed(item)
            elif isinstance(item, Withdrawal):
                scheduler.withdraw(item)
            elif isinstance(item, SequencesEnd):
                self._refused += scheduler.end_sequences(item.sequence_ids, item.place)

    @property
    def due_at_us(self) -> int | None:
        """When the next turn is due, by `now_us`; None: not before something arrives."""
        if self._has_arrived or self._can_execute:
            return 0
        return earlier(self._scheduler.wake_at_us(), None)

    def turn(self) -> None:
        """Decide, and execute one batch or take one step, if there is one."""
        self._has_arrived = False
        withdrawn = self._scheduler.carry_out_withdrawals(now_us())
        refusals, self._refused = [*self._refused, *withdrawn.refusals], []
        for cancel in withdrawn.cancelled:
            self._answer(cancel, *WITHDRAWN)
        self._apply(self._scheduler.poll(now_us()), refusals)
        self._advance()

    def cancel(self) -> Sequence[asyncio.Task[None]]:
        """Execute nothing more. What is to be waited for before `close`, if that is possible."""
        return ()

    def close(self) -> None:
        """Unload the model."""
        if self._unload is not None:
            self._unload()

    # --- decisions -----------------------------------------------------------------------------------------

    def _apply(self, decisions: Sequence[Decision], refusals: list[Refusal]) -> None:
        for decision in decisions:
            if isinstance(decision, Refusal):
                refusals.append(decision)
            elif isinstance(decision, Expire):
                self._answer(decision, *EXPIRED)
                self._scheduler.in_flight.answered([decision.run])
                positions = range(decision.position, decision.position + len(decision.run))
                self._expired.setdefault(decision.batch_id, set()).update(positions)
            elif isinstance(decision, SequenceChange):
                self._change(decision)
            elif isinstance(decision, SlotFreed):
                self._free_slots([decision.sequence_id])
        dispatches = [decision for decision in decisions if isinstance(decision, Dispatch)]
        if dispatches:
            refusals += self._dispatch(dispatches)
        self._put_results(result for refusal in refusals for result in _results_of(refusal))

    def _dispatch(self, dispatches: Sequence[Dispatch]) -> list[Refusal]:
        remaining = self._scheduler.carry_out(dispatches, now_us())
        for dispatch in remaining.dispatches:
            batch = self._batch_of(dispatch)
            remaining.launched(batch.id, dispatch)
            self._batches.append(batch)
        return remaining.finish()

    def _batch_of(self, dispatch: Dispatch) -> Batch:
        """What a worker would fetch."""
        settings = self._scheduler.settings.for_workers(self._kind)
        fields = {
            "runs": encode_batch(dispatch),
            "reason": dispatch.reason,
            "dispatched_us": now_us(),
            "lane": dispatch.lane,
            "expected_us": dispatch.expected_us,
            "settings": settings,
            "process": dispatch.process,
        }
        if self._kind is ModelKind.STEPPING:
            (run,) = dispatch.runs
            fields |= {"cost": run.cost, "stream": int(run.stream)}
        flat = [as_bytes(part) for pair in fields.items() for part in pair]
        return decode_batch(f"{now_us() // 1000}-{next(self._numbers)}".encode(), flat, 1)

    def _execution_of(self, batch: Batch) -> Execution:
        """A batch in hand, with the bodies that its producers stored."""
        execution = Execution(batch, batch.answered)
        position = 0
        for run in batch.runs:
            bodies = [] if isinstance(run.bodies, Rows) else run.bodies
            for at, body in enumerate(bodies):
                if isinstance(body, StoredBody):
                    stored = self._bodies.get(self._keys.body(body.name))
                    if stored is None:
                        execution.fail(position + at, INVALID_ARGUMENT, NO_STORED_BODY)
                    else:
                        bodies[at] = stored
            position += len(run.correlation_ids)
        return execution

    def _settled(self, execution: Execution, broken: Sequence[str] = ()) -> None:
        batch = execution.batch
        self._expired.pop(batch.id, None)
        self._scheduler.in_flight.settle(
            BatchSettled(
                batch.id,
                PROCESS,
                batch.size,
                execution.compute_us,
                now_us(),
                execution.executed_together,
                broken=broken,
                of_producers=execution.executed_by_producer(),
                cost=execution.cost,
            )
        )
        executed = execution.executed_together
        if executed and (execution.cost or self._scheduler.learned.costs):
            self._scheduler.observe_cost(batch.lane, executed, execution.cost)
        self._has_arrived = True  # capacity is free

    def _answer(self, answered: Expire | Cancel, status: str, detail: str) -> None:
        """Answer requests in flight; what a model returns for them is dropped."""
        self._put_results(_alike(answered.run, status, detail))

    # --- results -------------------------------------------------------------------------------------------

    def _put_results(self, results: Iterable[Result]) -> None:
        envelopes = [encode_envelope(result) for result in results]
        if envelopes:
            self._put_envelopes(envelopes)

    def _put_envelopes(self, envelopes: Sequence[bytes]) -> None:
        self._deliver([b"results", b"".join([encode_array_head(len(envelopes)), *envelopes])])

    def _put_columns(self, groups: Iterable[RunResults]) -> None:
        columns = [
            ResultColumns(group.correlation_ids, group.content_type, group.bodies, *group[5:8], group.version)
            for group in groups
            if isinstance(group.bodies, Rows)
        ]
        if columns:
            self._deliver([b"columns", encode_columns(columns)])

    # --- of the kinds of models ----------------------------------------------------------------------------

    @property
    def _can_execute(self) -> bool:
        """Whether `_advance` has anything to do."""
        return bool(self._batches)

    @abstractmethod
    def _advance(self) -> None:
        """Execute the next batch, or take a step."""

    @abstractmethod
    def _change(self, change: SequenceChange) -> None:
        """What is kept of a sequence changes."""

    @abstractmethod
    def _free_slots(self, sequence_ids: Sequence[str]) -> None:
        """These sequences of a bound model have ended."""


class BatchEngine(Engine):
    """Of a model that executes batches."""

    def __init__(self, model: LoadedModel, keys: Keys, deliver: Deliver, bodies: Mapping[str, bytes]) -> None:
        super().__init__(model, keys, deliver, bodies)
        self._model = model
        self._bound = BoundExecutor(model, show) if isinstance(model, BoundModel) else None
        self._states: dict[str, bytes] = {}  # by sequence

    def close(self) -> None:
        """End all sequences, and unload the model."""
        if self._bound is not None:
            self._bound.close()
        super().close()

    def _advance(self) -> None:
        if not self._batches:
            return
        execution = self._prepared(self._batches.popleft())
        for frame in execution.frames:
            try:
                outcome = self._execute(frame)
            except Unhealthy as error:
                self._fail(execution, frame, error)
            else:
                self._give_results(execution, frame, outcome)
        self._finish(execution)

    def _prepared(self, batch: Batch) -> Execution:
        """A batch that is decoded."""
        execution = self._execution_of(batch)
        self._load_states(execution)
        self._codec.prepare(execution, now_us(), wall_ahead_us())
        return execution

    def _execute(self, frame: Frame) -> Executed:
        sent = partial(bytearray().join, frame.payload)
        if self._bound is not None:
            return execute_bound_frame(self._bound, frame.header, sent())
        if self._model.beside is not None:  # in processes of their own in a stack: here it is this one
            return execute_alone(self._model, frame.header, sent(), show)
        return execute_frame(self._model, frame.header, sent(), sent, show)

    def _give_results(self, execution: Execution, frame: Frame, outcome: Executed) -> None:
        header, payload = outcome
        self._codec.give_results(execution, frame, header, b"".join(payload))

    def _fail(self, execution: Execution, frame: Frame, error: Unhealthy) -> None:
        """The model says that nothing works any more."""
        for position in frame.positions:
            execution.fail(position, ABORTED, _UNHEALTHY.format(error))

    def _finish(self, execution: Execution) -> None:
        """All frames are executed. Deadlines may have passed meanwhile."""
        self._apply(self._scheduler.poll(now_us()), [])
        execution.drop(self._expired.get(execution.batch.id, ()))
        self._commit(execution)

    def _load_states(self, execution: Execution) -> None:
        for position, run in enumerate(execution.batch.runs):  # each run of a sequence is one request
            if run.sequence is not None and not run.sequence.starts:
                state = self._states.get(run.sequence.sequence_id)
                if state is not None:
                    execution.states[position] = state

    def _commit(self, execution: Execution) -> None:
        if self._bound is not None:
            for group in execution.run_results:
                execution.states |= dict.fromkeys(group.positions, PROCESS.encode())
        changes = execution.changes()
        for change in changes:
            self._change(change)
        whole = [group for group in execution.run_results if group.are_columns]
        single = [group for group in execution.run_results if not group.are_columns]
        self._settled(execution, [one.part.sequence_id for one in changes if one.outcome == "broken"])
        self._put_columns(whole)
        self._put_results(
            [*(result for group in single for result in group.results()), *execution.results.values()]
        )

    def _change(self, change: SequenceChange) -> None:
        sequence_id = change.part.sequence_id
        if change.outcome == "kept" and isinstance(change.content, bytes):
            self._states[sequence_id] = change.content
            return
        self._states.pop(sequence_id, None)
        self._free_slots([sequence_id])

    def _free_slots(self, sequence_ids: Sequence[str]) -> None:
        if self._bound is not None:
            self._bound.end(sequence_ids)


class StepEngine(Engine):
    """Of a model that steps."""

    def __init__(
        self, model: SteppingModel, keys: Keys, deliver: Deliver, bodies: Mapping[str, bytes]
    ) -> None:
        super().__init__(model, keys, deliver, bodies)
        self._stepper = Stepper(model, observe=show)
        self._in_hand = InHand(model.settings, has_tensors=self._codec.has_tensors)

    def close(self) -> None:
        """End all requests, and unload the model."""
        self._stepper.close()
        super().close()

    @property
    def _can_execute(self) -> bool:
        return super()._can_execute or self._stepper.has_next

    def _advance(self) -> None:
        while self._batches:
            self._admit(self._batches.popleft())
        if self._stepper.has_next:
            self._step()
        self._write()

    def _admit(self, batch: Batch) -> None:
        request = self._in_hand.add(self._execution_of(batch), time.monotonic())
        if request.has_ended:
            return
        body = self._codec.body_of(request.execution, 0, now_us())
        if body is None:
            request.result = request.execution.results[0]
            return
        fields = self._codec.request_fields(request.execution, 0, wall_ahead_us())
        admit = Admit(request.key, body.layouts, fields, batch.cost, request.is_streamed)
        self._stepper.admit(admit, bytearray().join(body.payload))
        request.sent(now_us())

    def _step(self) -> None:
        try:
            step = self._stepper.advance()
        except Unhealthy as error:
            for request in self._in_hand:
                self._end(request, ABORTED, _UNHEALTHY.format(error))
            return
        for advance in step.advances if step is not None else ():
            advanced = self._in_hand.get(advance.key)
            if advanced is not None and step is not None:
                advanced.apply(advance, step.size, now_us())

    def _end(self, request: StepExecution, status: str, detail: str) -> None:
        if request.is_sent:
            self._stepper.drop([request.key])
        request.end(status, detail)

    def _answer(self, answered: Expire | Cancel, status: str, detail: str) -> None:
        for request in self._in_hand:
            if request.execution.batch.id == answered.batch_id:
                self._end(request, status, detail)
                return
        waiting = [batch for batch in self._batches if batch.id == answered.batch_id]
        for batch in waiting:
            self._batches.remove(batch)
            self._settled(Execution(batch))
        super()._answer(answered, status, detail)

    def _write(self) -> None:
        """Deliver what was emitted, each value as a chunk: readers in this process are never slow."""
        unlimited = 1 << 30
        for request in self._in_hand:
            if not request.has_news(unlimited):
                continue
            write = request.next_write(unlimited, now_us())
            self._put_step(write)
            request.wrote(write, StepReply("WRITTEN", 0), unlimited, time.monotonic(), now_us())
            if write.result is not None:
                self._in_hand.remove([request])
                self._settled(request.execution)

    def _put_step(self, write: StepWrite) -> None:
        envelopes = [encode_chunk_envelope(chunk) for chunk, _ in write.chunks]
        if write.result is not None:
            envelopes.append(encode_envelope(write.result))
        if envelopes:
            self._put_envelopes(envelopes)

    def _change(self, change: SequenceChange) -> None:
        """A stepping model has no sequences."""

    def _free_slots(self, sequence_ids: Sequence[str]) -> None:
        """A stepping model has no sequences."""


def _results_of(refusal: Refusal) -> list[Result]:
    """The answers to requests that are not dispatched; none to what was sent twice."""
    if refusal.status == UNANSWERED:
        return []
    return [
        Result(name, refusal.status, refusal.content_type, detail=refusal.detail, warnings=refusal.warnings)
        for name in refusal.correlation_ids
    ]


def _alike(run: Run, status: str, detail: str) -> list[Result]:
    content_type = answer_type(run.content_type, run.extra)
    return [Result(name, status, content_type, detail=detail) for name in run.correlation_ids]


def as_bytes(value: Any) -> bytes:
    """An argument of a command as Redis gets it."""
    return value if isinstance(value, bytes) else str(value).encode()
