"""The stepper and its slots under random events, compared with a plain reference.

The model is an oracle: value i of a request is known, whichever process or call emits it, so that a lost or
doubled value is seen. It raises where it is told to, and counts each `begin` and `end`. The reference knows
which requests wait and run, as lists, and what should come next by the rules at the top of `slots.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import hypothesis.strategies as st
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.errors import ABORTED, INTERNAL, INVALID_ARGUMENT
from carpool.model_settings import ModelSettings
from carpool_worker.model_process.frames import pack_values, unpack_values
from carpool_worker.model_process.model import SteppingModel
from carpool_worker.model_process.stepping.chunks import join
from carpool_worker.model_process.stepping.frames import Admit, Advance, Configure, Step
from carpool_worker.model_process.stepping.requests import StepRequest
from carpool_worker.model_process.stepping.stepper import Stepper

MAX_COST = 4


@dataclass(frozen=True)
class Traits:
    """A request. It emits `length` values, `emits` in each step, and ends in the step after that; with
    `emits` 0, one at most, and ends at once.

    `sent` of them were sent by another process. The model raises when it is to emit value number `raises_at`,
    and in `begin` if `begin_raises`. If `begin_emits`, it emits the first value there.
    """

    cost: int
    length: int
    emits: int
    sent: int
    raises_at: int | None
    begin_raises: bool
    begin_emits: bool
    is_invalid: bool
    is_streamed: bool

    @property
    def begins_with_value(self) -> bool:
        """Whether `begin` emits the first value, and the model does not raise on that."""
        return self.begin_emits and self.emits > 0 and self.length > 0 and self.raises_at != 0


traits = st.builds(
    Traits,
    cost=st.integers(0, MAX_COST),
    length=st.sampled_from((0, 1, 2, 3, 6, 20)),
    emits=st.sampled_from((0, 1, 1, 1, 3)),
    sent=st.sampled_from((0, 0, 0, 1, 2)),
    raises_at=st.sampled_from((*[None] * 7, 0, 1, 3)),
    begin_raises=st.sampled_from((*[False] * 9, True)),
    begin_emits=st.booleans(),
    is_invalid=st.sampled_from((*[False] * 9, True)),
    is_streamed=st.sampled_from((True, True, False)),
)
model_settings = st.builds(
    ModelSettings,
    max_batch_size=st.sampled_from((1, 2, 3, 5)),
    max_batch_cost=st.sampled_from((None, 2, 6)),
    max_prefill_cost=st.sampled_from((None, None, 1, 3)),
)


def value(key: int, index: int) -> list[str]:
    """What the request emits as its value number `index`."""
    return [f"{key}.{index}"]


class Oracle:
    """The model. A request's body is its key."""

    def __init__(self, machine: StepperMachine) -> None:
        self.machine = machine
        self.begins: Counter[int] = Counter()
        self.ends: Counter[int] = Counter()
        self.begin_calls: list[list[int]] = []
        self.step_calls: list[list[int]] = []
        self.is_tired = False  # it raises on any two requests
        self.raised = False
        self.violations: list[str] = []

    def traits(self, request: StepRequest) -> Traits:
        return self.machine.traits[request.body]

    def validate(self, body: int) -> None:
        if self.machine.traits[body].is_invalid:
            raise ValueError("invalid")

    def begin(self, requests: Sequence[StepRequest]) -> None:
        self.begin_calls.append([request.body for request in requests])
        for request in requests:
            self.check(self.begins[request.body] == self.ends[request.body], "begun twice")
            self.begins[request.body] += 1
            self.check(request.state is None, "has a state")
        for request in requests:
            if self.traits(request).begin_raises:
                self.fail("in begin")
            request.state = len(request.chunks)
            chunks = [value(request.body, index) for index in range(request.state)]
            self.check(request.chunks == chunks, "other chunks")
            if self.traits(request).begins_with_value and not request.state:
                request.emit(value(request.body, 0))
                request.state = 1

    def step(self, requests: Sequence[StepRequest]) -> None:
        self.step_calls.append([request.body for request in requests])
        for request in requests:
            self.check(self.begins[request.body] == self.ends[request.body] + 1, "steps without a begin")
        for request in requests:
            traits = self.traits(request)
            if request.state >= traits.length:
                request.finish()
                continue
            for _ in range(min(traits.emits or 1, traits.length - request.state)):
                if request.state == traits.raises_at:
                    self.fail("in step")
                request.emit(value(request.body, request.state))
                request.state += 1
            if traits.emits == 0:
                request.finish()
        if self.is_tired and len(requests) > 1:
            self.fail("of all together")

    def end(self, request: StepRequest) -> None:
        self.ends[request.body] += 1
        self.check(self.begins[request.body] == self.ends[request.body], "ended twice")
        if request.body % 5 == 0:
            raise RuntimeError("in end")

    def check(self, is_right: bool, violation: str) -> None:
        """An assertion here would be taken for an error of the model."""
        if not is_right:
            self.violations.append(violation)

    def fail(self, where: str) -> None:
        self.raised = True
        raise RuntimeError(where)


class StepperMachine(RuleBasedStateMachine):
    """The reference is `waiting`, `running` (keys in order), `alone` (steps left by key, those that have not
    begun included), `received` (values by key), `owes_step` (the last call of `advance` only began)."""

    def __init__(self) -> None:
        super().__init__()
        self.traits: dict[int, Traits] = {}
        self.waiting: list[int] = []
        self.alone: dict[int, int] = {}
        self.running: list[int] = []
        self.is_paused = False
        self.owes_step = False
        self.received: dict[int, list[Any]] = {}
        self.was_sent: dict[int, bool] = {}
        self.is_closed = False

    @initialize(settings=model_settings, continues=st.sampled_from((True, True, False)))
    def start(self, settings: ModelSettings, continues: bool) -> None:
        self.settings = settings
        self.continues = continues
        self.model = Oracle(self)
        self.stepper = Stepper(
            SteppingModel(
                begin=self.model.begin,
                step=self.model.step,
                end=self.model.end,
                continues=continues,
                validate=self.model.validate,
                settings=settings,
            )
        )
        self.stepper._log = mock.Mock()

    def _admit(self, traits: Traits, steps_alone: int) -> int:
        key = len(self.traits)
        self.traits[key] = traits
        sent = [value(key, index) for index in range(min(traits.sent, traits.length))] * traits.is_streamed
        self.received[key] = sent
        self.was_sent[key] = bool(sent)
        chunks = [pack_values([part]) for part in sent[:1]] + ([pack_values(sent[1:])] if sent[1:] else [])
        admit = Admit(key, (), (str(key), "", {}), traits.cost, traits.is_streamed, chunks, steps_alone)
        self.stepper.admit(admit, pack_values([key]))
        return key

    @rule(traits=traits)
    def add(self, traits: Traits) -> None:
        self.waiting.append(self._admit(traits, steps_alone=0))

    @rule(traits=st.lists(traits, min_size=2, max_size=6))
    def add_several(self, traits: list[Traits]) -> None:
        for each in traits:
            self.add(each)

    @rule(
        traits=traits, steps=st.sampled_from((1, 1, 2, 5)), is_followed=st.sampled_from((False, False, True))
    )
    def add_alone(self, traits: Traits, steps: int, is_followed: bool) -> None:
        self.alone[self._admit(traits, steps)] = steps
        self.is_paused = True
        if not is_followed:
            self.resume()

    @rule()
    def resume(self) -> None:
        self.stepper.resume()
        self.is_paused = False

    @precondition(lambda self: self.traits)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        """Also one that has ended, and one that never was."""
        self._drop(data.draw(st.lists(st.integers(0, len(self.traits)), min_size=1, max_size=3)))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def drop_one_that_runs(self, data: st.DataObject) -> None:
        self._drop([data.draw(st.sampled_from(self.running))])

    def _drop(self, keys: Sequence[int]) -> None:
        self.stepper.drop(keys)
        for key in keys:
            self.alone.pop(key, None)
            for place in (self.waiting, self.running):
                if key in place:
                    place.remove(key)

    @rule(settings=model_settings)
    def configure(self, settings: ModelSettings) -> None:
        self.settings = settings
        limits = (settings.max_batch_size, settings.max_batch_cost, settings.max_prefill_cost)
        self.stepper.configure(Configure(*limits, settings.max_result_bytes))

    @rule(is_tired=st.booleans())
    def tire(self, is_tired: bool) -> None:
        self.model.is_tired = is_tired

    @rule()
    def advance(self) -> None:
        assert self.stepper.has_next == bool(
            self.alone or (not self.is_paused and (self.waiting or self.running))
        )
        if not self.stepper.has_next:
            return
        admitted, stepping, is_alone = self._next_round()
        begun = [key for key in admitted if self._can_begin(key)]
        has_news = any(self._emits_or_ends_in_begin(key) for key in admitted)
        self.model.begin_calls.clear()
        self.model.step_calls.clear()
        self.model.raised = False
        self.owes_step = False
        step = self.stepper.advance()
        if begun:
            assert self.model.begin_calls[:1] == [begun]
        else:
            assert self.model.raised or not self.model.begin_calls
        others = [key for key in stepping if key not in admitted]
        if has_news and not is_alone:
            assert not self.model.step_calls, "a step before what begin emitted was sent"
            assert step is not None
            self._check_step(step, admitted)
            self.owes_step = bool(self.running)
            return
        if self.model.step_calls:
            first = self.model.step_calls[0]
            assert first == [key for key in stepping if key in first], "order, or not its turn"
            assert set(first) >= set(others)
        else:
            assert not others
        self._check(step, stepping, is_alone)

    @precondition(lambda self: self.traits)
    @rule(rounds=st.integers(1, 8))
    def advance_often(self, rounds: int) -> None:
        for _ in range(rounds):
            self.advance()

    def _next_round(self) -> tuple[list[int], list[int], bool]:
        """What is to be begun, what is to take a step, and whether that is alone."""
        if self.alone:
            key = next(iter(self.alone))
            self.alone[key] -= 1
            if not self.alone[key]:
                del self.alone[key]
            begun = [] if key in self.running else [key]
            if begun:
                self._put_back_for(key)
            self.running += begun
            return begun, [key], True
        if self.is_paused:
            return [], [], False
        admitted: list[int] = []
        while not self.owes_step and self.waiting and len(self.running) < self.settings.max_batch_size:
            key = self.waiting[0]
            if self.running and self._cost([*self.running, key]) > (self.settings.max_batch_cost or 1e9):
                break
            if admitted and self._cost([*admitted, key]) > (self.settings.max_prefill_cost or 1e9):
                break
            admitted.append(self.waiting.pop(0))
            self.running.append(key)
        return admitted, list(self.running), False

    def _put_back_for(self, alone: int) -> None:
        """The last ones give up their slots, if they can be begun anew, until this one fits."""
        for key in reversed(list(self.running)):
            fits = self._cost([*self.running, alone]) <= (self.settings.max_batch_cost or 1e9)
            fits = fits and len(self.running) < self.settings.max_batch_size
            if not fits and (self.continues or not self.was_sent[key]):
                self.running.remove(key)
                self.waiting.insert(0, key)

    def _cost(self, keys: Sequence[int]) -> int:
        return sum(self.traits[key].cost for key in keys)

    def _can_begin(self, key: int) -> bool:
        return not self.traits[key].is_invalid and (self.continues or not self.was_sent[key])

    def _emits_or_ends_in_begin(self, key: int) -> bool:
        traits = self.traits[key]
        emits = traits.is_streamed and traits.begins_with_value and not self.received[key]
        return emits or traits.begin_raises or not self._can_begin(key)

    def _check_step(self, step: Step, keys: Sequence[int]) -> None:
        for advance in step.advances:
            assert advance.key in keys
            self._check_advance(Advance(*advance))
        assert step.running == len(self.running)
        assert step.size <= len(keys)

    def _check(self, step: Step | None, stepping: Sequence[int], is_alone: bool) -> None:
        if is_alone:
            assert step is not None
            assert [advance.key for advance in step.advances] == list(stepping)
        if step is not None:
            self._check_step(step, stepping)
        for key in stepping:
            if self.continues and key in self.running:
                made_progress = self.model.step_calls and any(key in call for call in self.model.step_calls)
                assert made_progress, "has a slot, and did not step"

    def _check_advance(self, advance: Advance) -> None:
        key, traits = advance.key, self.traits[advance.key]
        if advance.chunk:
            assert traits.is_streamed
            self.received[key] += unpack_values(advance.chunk)
            self.was_sent[key] = True
        expected = [value(key, index) for index in range(advance.emitted)]
        if traits.is_streamed:
            assert self.received[key] == expected
        if not advance.has_ended:
            return
        self.running.remove(key)
        self.alone.pop(key, None)
        if advance.failure is None:
            assert advance.output is not None
            sent = traits.sent if traits.is_streamed else 0
            assert advance.emitted == (traits.length if traits.emits else min(traits.length, sent + 1))
            assert unpack_values(advance.output) == [join(expected)]
        else:
            assert advance.output is None
            self._check_failure(key, *advance.failure)

    def _check_failure(self, key: int, status: str, detail: str) -> None:
        traits = self.traits[key]
        if status == ABORTED:
            assert not self.continues
            assert self.was_sent[key]
        elif status == INVALID_ARGUMENT:
            assert traits.is_invalid
        else:
            assert status == INTERNAL
            assert self.model.raised
            assert "together" not in detail
            assert traits.begin_raises if "in begin" in detail else traits.raises_at is not None

    @invariant()
    def requests_with_a_slot_are_begun_and_all_others_are_ended(self) -> None:
        for key in self.traits:
            is_open = self.model.begins[key] - self.model.ends[key]
            assert is_open == (key in self.running and not self.is_closed), key
        if self.traits:
            assert not self.model.violations

    def teardown(self) -> None:
        if not hasattr(self, "stepper"):
            return
        self.is_closed = True
        self.stepper.close()
        self.requests_with_a_slot_are_begun_and_all_others_are_ended()


TestStepper = StepperMachine.TestCase
TestStepper.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # that depends on the machine
)
