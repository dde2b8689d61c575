"""Steps a model: begins requests, steps those that have a slot, and isolates the failures. Without I/O.

If `begin` raises on several requests, each is begun anew, singly. If `step` does, each is begun anew from
what it has emitted so far, and takes the step singly. The one on which the model raises alone fails, and the
others have taken the step. If the model raises on none of them alone, all go on together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import structlog

from carpool.errors import INTERNAL, INVALID_ARGUMENT
from carpool.parts import Buffer
from carpool.shown import name_of, trace_of
from carpool_worker.model_process import frames
from carpool_worker.model_process.costs import cost_of
from carpool_worker.model_process.executor import FIXED_TYPES, StackedItems
from carpool_worker.model_process.failures import Observe, OutputError, failure_of, not_observed
from carpool_worker.model_process.loaded import SteppingModel
from carpool_worker.model_process.stepping.frames import Admit, Advance, Configure, Step
from carpool_worker.model_process.stepping.generation import Generation
from carpool_worker.model_process.stepping.requests import ResultLimit
from carpool_worker.model_process.stepping.slots import Round, Slots

Requests = Sequence[Generation]
Errors = dict[str, list[int]]  # as in `Step`

SILENT_STEPS_MAX: Final = 1000  # in a row: more are reported, once
_EMIT_INSTEAD = "emit values with request.emit(value), and end with request.finish()"


class Stepper:
    """The requests of a model process, and the model that generates them."""

    def __init__(
        self,
        model: SteppingModel,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        observe: Observe = not_observed,
    ) -> None:
        """`observe` is called for whatever the model raises, or fails a request with."""
        self._model = model
        self._observe = observe
        self._now_ns = now_ns
        settings = model.settings
        self._slots: Slots[Generation] = Slots(
            settings.max_batch_size, settings.max_batch_cost, settings.max_prefill_cost
        )
        self._limit = ResultLimit(settings.max_result_bytes)
        self._owes_step = False  # what `begin` emitted was returned, and the step after it was not taken
        self._running_reported = 0
        self._is_silence_reported = False
        self._log = structlog.get_logger()

    @property
    def has_next(self) -> bool:
        """Whether `advance` has anything to do."""
        return self._slots.has_next

    def admit(self, admit: Admit, payload: Buffer) -> None:
        """Take a request. `payload` is its body, as `Admit` says."""
        model = self._model
        is_map = len(model.inputs) > 1
        body = _decode(admit, payload, is_map=is_map)
        generation = Generation(admit, body, self._observe, self._limit, model.outputs)
        if type(body) not in FIXED_TYPES:
            generation.keep_body(partial(_decode, admit, payload, is_map=is_map))
        if self._model.cost is not None:
            self._find_cost(self._model.cost, generation)
        if admit.steps_alone:
            self._slots.add_alone(generation, admit.steps_alone)
        else:
            self._slots.add(generation)

    def _find_cost(self, tell: Callable[[Any], Any], generation: Generation) -> None:
        """Have the model tell what a request costs. If that fails, the request does, once it is validated."""
        try:
            generation.set_cost(cost_of(tell, generation.body, generation.cost))
        except BaseException as error:  # a library's panic, SystemExit: none may end this process
            if not isinstance(error, OutputError):
                self._observe(error, [generation.key])
            generation.cost_failure = failure_of(error, INTERNAL)
        generation.renew_body()

    def drop(self, keys: Sequence[int]) -> None:
        """End requests that are no longer wanted; unknown keys are ignored."""
        for key in keys:
            generation = self._slots.drop(key)
            if generation is not None:
                self._end(generation)

    def resume(self) -> None:
        """No request that is to be alone follows."""
        self._slots.resume()

    def configure(self, limits: Configure) -> None:
        """Other limits apply to the requests that get a slot from now on, and that of results to all."""
        self._slots.set_limits(limits.max_batch_size, limits.max_batch_cost, limits.max_prefill_cost)
        self._limit.bytes_max = limits.max_result_bytes

    def advance(self, *, must_report: bool = False) -> Step | None:
        """Begin the requests whose turn it is, and take a step. None if nothing changed, unless it must be
        reported nevertheless.

        What `begin` emitted or ended is returned at once, because its readers need not wait for the step:
        the next call takes that, and begins none. A request that is alone takes its step with its `begin`:
        its worker counts the steps that it is told of.
        """
        if self._slots.lacks_space:
            self._make_space()
        planned = self._slots.next_round(admits=not self._owes_step)
        self._owes_step = False
        begin_us = self._begin_valid(planned.begun) if planned.begun else 0
        if planned.begun and not planned.is_alone:
            advances, errors = self._pop_advances(planned.begun)
            if advances:
                self._owes_step = bool(self._slots.occupied)
                self._running_reported = self._slots.occupied
                return Step(0, begin_us, len(planned.begun), self._running_reported, advances, errors)
        stepping = [generation for generation in planned.stepped if not generation.has_ended]
        step_us = self._step_timed(stepping) if stepping else 0
        report = self._report(planned, step_us, begin_us, len(stepping))
        if report is None and must_report:
            return Step(step_us, begin_us, len(stepping), self._running_reported, ())
        return report

    def close(self) -> None:
        """End all requests that were begun."""
        self.drop([generation.key for generation in self._slots.running])

    def _make_space(self) -> None:
        """Put requests back, the last ones first, for one that is to be alone. They are begun anew later.

        Those that could not be are kept: then more are begun than there are slots, until one ends.
        """
        for generation in reversed(self._slots.running):
            if self._slots.lacks_space and (self._model.continues or not generation.was_sent):
                self._end(generation)
                generation.restart(continues=self._model.continues)
                self._slots.put_back(generation.key)

    def _begin_valid(self, admitted: Requests) -> int:
        """Begin those that can be begun. Returns how long that took (us)."""
        started_ns = self._now_ns()
        valid = [generation for generation in admitted if self._can_begin(generation)]
        if valid:
            self._begin(valid)
        return (self._now_ns() - started_ns) // 1000

    def _can_begin(self, generation: Generation) -> bool:
        if generation.was_sent and not self._model.continues:
            generation.abort()
        elif self._model.validate is not None:
            try:
                self._model.validate(generation.body)
            except BaseException as error:  # a library's panic, SystemExit: none may end this process
                generation.reject(failure_of(error, INVALID_ARGUMENT))
            else:
                generation.renew_body()
        if generation.cost_failure is not None:
            generation.reject(generation.cost_failure)
        return not generation.has_ended

    def _begin(self, generations: Requests) -> None:
        for generation in generations:
            generation.is_begun = True
        if not self._attempt(self._model.begin, generations):
            for generation in self._restarted(generations):
                self._begin([generation])

    def _step_timed(self, generations: Requests) -> int:
        """Take a step with these. Returns how long that took (us)."""
        started_ns = self._now_ns()
        self._step(generations)
        return (self._now_ns() - started_ns) // 1000

    def _step(self, generations: Requests) -> None:
        if not self._attempt(self._model.step, generations):
            for generation in self._restarted(generations):
                self._begin([generation])
                if not generation.has_ended:
                    self._step([generation])

    def _attempt(self, call: Callable[[list[Any]], object], generations: Requests) -> bool:
        """Call `begin` or `step`. If it raises on a single request, that one fails; if it returns something,
        which is easily mistaken for emitting it, all fail.

        Returns False if it raised on several. The exception is freed then, with all that the model held: the
        next attempts may need the memory.
        """
        try:
            returned = call(list(generations))
        except BaseException as error:
            self._observe(error, [generation.key for generation in generations])
            if len(generations) > 1:
                failure_of(error, INTERNAL)  # raises Unhealthy
                self._log.warning(
                    "model raised on several requests: they are begun anew singly",
                    requests=len(generations),
                    error=name_of(error),
                )
                return False
            generations[0].reject(failure_of(error, INTERNAL))
        else:
            if returned is not None:
                kind = type(returned).__name__
                for generation in generations:
                    generation.reject(
                        (INTERNAL, f"the model's begin or step returned a {kind}: {_EMIT_INSTEAD}")
                    )
        return True

    def _restarted(self, generations: Requests) -> Requests:
        """End all, and prepare those that can be begun anew."""
        open_ones = [generation for generation in generations if not generation.has_ended]
        for generation in open_ones:
            self._end(generation)
            generation.restart(continues=self._model.continues)
        return [generation for generation in open_ones if not generation.has_ended]

    def _end(self, generation: Generation) -> None:
        """Call the model's `end`, once after each `begin`."""
        if not generation.is_begun:
            return
        generation.is_begun = False
        if self._model.end is None:
            return
        try:
            self._model.end(generation)
        except BaseException as error:
            failure_of(error, INTERNAL)  # raises Unhealthy
            self._log.error(
                "the model's end raised",
                correlation_id=generation.correlation_id,
                error=name_of(error),
                exception=trace_of(error),
            )

    def _report(self, planned: Round[Generation], step_us: int, begin_us: int, size: int) -> Step | None:
        advances, errors = self._pop_advances(planned.stepped, has_stepped=True)
        if planned.is_alone and not advances:  # the worker waits for it
            (generation,) = planned.stepped
            advances = [Advance(generation.key, b"", generation.emitted)]
        running = self._slots.occupied
        if not advances and running == self._running_reported:
            return None
        self._running_reported = running
        return Step(step_us, begin_us, size, running, advances, errors)

    def _pop_advances(
        self, generations: Requests, *, has_stepped: bool = False
    ) -> tuple[list[Advance], Errors]:
        """What these have emitted and not sent, and why results are too large, if any are. Ends those that
        have ended."""
        advances: list[Advance] = []
        errors: Errors = {}
        for generation in generations:
            advance = generation.pop_advance()
            if advance is None:
                if has_stepped and generation.count_silent_steps() == SILENT_STEPS_MAX:
                    self._report_silence(generation)
                continue
            advances.append(advance)
            if generation.has_ended:
                if generation.is_too_large and advance.failure:
                    errors.setdefault(advance.failure[1], []).append(generation.key)
                self._end(generation)
                self._slots.end(generation.key)
        return advances, errors

    def _report_silence(self, generation: Generation) -> None:
        """Most likely the model forgot to finish it. The first such request is enough to say so."""
        if not self._is_silence_reported:
            self._is_silence_reported = True
            self._log.warning(
                "request keeps its slot, but the model neither emits nor finishes: does step call finish()?",
                correlation_id=generation.correlation_id,
                steps=SILENT_STEPS_MAX,
            )


def _decode(admit: Admit, payload: Buffer, *, is_map: bool) -> Any:
    """The body, as passed to `validate`. `is_map`: the model declares several inputs."""
    if admit.layouts:
        item = StackedItems(frames.unstack(admit.layouts, 1, payload)).item(0)
        return {admit.layouts[0][0]: item} if is_map and len(admit.layouts) == 1 else item
    (body,) = frames.unpack_bodies(payload)
    return body
