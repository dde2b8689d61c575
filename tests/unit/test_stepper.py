"""The stepper: admission by slots and costs, and each request gets its own output or its own failure.

`tests/simulation/test_stepper_machine.py` checks all of it under random events; here are the single rules.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from carpool.errors import NotFoundError
from carpool.plugins import UnusableError
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.frames import RequestFields, pack_values, too_large, unpack_values
from carpool_worker.model_process.model import SteppingModel, load_model
from carpool_worker.model_process.stepping.frames import Admit, Advance, Configure, Step
from carpool_worker.model_process.stepping.generation import CHUNK_OVERHEAD_BYTES
from carpool_worker.model_process.stepping.requests import StepRequest
from carpool_worker.model_process.stepping.stepper import SILENT_STEPS_MAX, Stepper

Requests = Sequence[StepRequest]


class Counter:
    """Counts from 0 to the body, one number in each step, as texts. Its calls are recorded.

    It raises `error` where the call and a body are in `raises`, after it did all that it had to do for the
    requests before that one.
    """

    max_batch_size = 4

    def __init__(
        self, *raises: tuple[str, int], error: Callable[[], BaseException] = lambda: ValueError("bad")
    ) -> None:
        self.raises = set(raises)
        self.error = error
        self.calls: list[tuple[str, list[int]]] = []

    def begin(self, requests: Requests) -> None:
        self.calls.append(("begin", [request.body for request in requests]))
        for request in requests:
            self._raise("begin", request)
            request.state = len(request.chunks)

    def step(self, requests: Requests) -> None:
        self.calls.append(("step", [request.body for request in requests]))
        for request in requests:
            self._raise("step", request)
            self._raise("step together", request, len(requests) > 1)
            if request.state == request.body:
                request.finish()
            else:
                request.emit(str(request.state))
                request.state += 1

    def end(self, request: StepRequest) -> None:
        self.calls.append(("end", [request.body]))
        self._raise("end", request)

    def _raise(self, call: str, request: StepRequest, applies: bool = True) -> None:
        if applies and (call, request.body) in self.raises:
            raise self.error()

    def taken_calls(self) -> list[tuple[str, list[int]]]:
        calls, self.calls = self.calls, []
        return calls


class Bench:
    """A stepper, and what it sent of each request, by body."""

    def __init__(self, model: Any, **settings: Any) -> None:
        for name, value in settings.items():
            setattr(model, name, value)
        self.model = model
        loaded = load_model(model, "cpu")
        assert isinstance(loaded, SteppingModel)
        self.stepper = Stepper(loaded)
        self.ended: dict[Any, Any] = {}  # output, or failure as a tuple
        self.chunks: dict[Any, list[Any]] = {}
        self.bodies: list[Any] = []

    def admit(
        self,
        body: Any,
        *,
        cost: int = 1,
        sent: Sequence[Any] = (),
        is_streamed: bool = True,
        is_alone: bool = False,
    ) -> int:
        key = len(self.bodies)
        self.bodies.append(body)
        self.chunks[body] = list(sent)
        chunks = [pack_values([value]) for value in sent]
        admit = Admit(key, (), (f"id{key}", "", {}), cost, is_streamed, chunks, is_alone)
        self.stepper.admit(admit, pack_values([body]))
        return key

    def advance(self) -> Step | None:
        step = self.stepper.advance()
        for advance in step.advances if step else ():
            body = self.bodies[advance.key]
            if advance.chunk:
                self.chunks[body] += unpack_values(advance.chunk)
            if advance.output is not None:
                (self.ended[body],) = unpack_values(advance.output)
            elif advance.failure is not None:
                self.ended[body] = advance.failure
        return step

    def finish(self) -> dict[Any, Any]:
        while self.stepper.has_next:
            self.advance()
        return self.ended


def bench(*raises: tuple[str, int], **settings: Any) -> Bench:
    return Bench(Counter(*raises), **settings)


BAD = ("INTERNAL", "the model failed on this request: bad")


# --- admission ---------------------------------------------------------------------------------------------


def test_requests_are_begun_together_and_step_together_until_they_end() -> None:
    b = bench()
    for body in (1, 2, 3):
        b.admit(body)
    assert b.finish() == {1: "0", 2: "01", 3: "012"}
    assert b.chunks == {1: ["0"], 2: ["0", "1"], 3: ["0", "1", "2"]}
    assert b.model.calls == [
        ("begin", [1, 2, 3]),
        ("step", [1, 2, 3]),
        ("step", [1, 2, 3]),
        ("end", [1]),
        ("step", [2, 3]),
        ("end", [2]),
        ("step", [3]),
        ("end", [3]),
    ]
    assert not b.stepper.has_next


def test_step_says_what_changed() -> None:
    b = bench()
    b.admit(1)
    b.admit(2, is_streamed=False)
    step = b.advance()
    assert step is not None
    assert (step.size, step.running) == (2, 2)
    assert step.advances == [Advance(0, pack_values(["0"]), 1)]
    step = b.advance()
    assert step is not None
    assert step.advances == [Advance(0, b"", 1, pack_values(["0"]))]
    assert (step.size, step.running, step.begin_us) == (2, 1, 0)
    assert b.advance().advances[0].emitted == 2  # type: ignore[union-attr]


def test_nothing_is_said_of_a_step_that_changed_nothing() -> None:
    class Slow(Counter):
        def step(self, requests: Requests) -> None:
            self.calls.append(("step", []))

    b = Bench(Slow())
    b.admit(1)
    first = b.advance()
    assert first is not None
    assert (first.advances, first.running) == ([], 1)  # a slot is taken
    assert b.advance() is None
    assert b.stepper.has_next


def test_times_of_begin_and_step() -> None:
    loaded = load_model(Counter(), "cpu")
    assert isinstance(loaded, SteppingModel)
    times_ns = iter([0, 5_000_000, 5_000_000, 7_000_000, 11_000_000, 14_000_000])
    stepper = Stepper(loaded, lambda: next(times_ns))
    stepper.admit(Admit(0, (), ("a", "", {}), 1, True), pack_values([5]))
    steps = [stepper.advance(), stepper.advance()]
    assert [(step.begin_us, step.step_us) for step in steps if step] == [(5000, 2000), (0, 3000)]


def test_free_slots_are_filled_in_order_between_two_steps() -> None:
    b = bench(max_batch_size=2)
    for body in (1, 3, 2, 4):
        b.admit(body)
    assert b.finish() == {1: "0", 3: "012", 2: "01", 4: "0123"}
    begun = [bodies for call, bodies in b.model.calls if call == "begin"]
    assert begun == [[1, 3], [2], [4]]
    assert max(len(bodies) for call, bodies in b.model.calls if call == "step") == 2


def test_prefill_cost_limits_how_many_are_begun_between_two_steps() -> None:
    b = bench(max_prefill_cost=5)
    for body, cost in ((11, 9), (12, 3), (13, 2), (14, 1)):
        b.admit(body, cost=cost)
    for _ in range(3):
        b.advance()
    assert b.model.calls == [
        ("begin", [11]),
        ("step", [11]),
        ("begin", [12, 13]),
        ("step", [11, 12, 13]),
        ("begin", [14]),
        ("step", [11, 12, 13, 14]),
    ]


def test_prefill_is_limited_by_the_cost_that_the_model_tells_if_that_is_larger() -> None:
    class Telling(Counter):
        def cost(self, body: int) -> int:
            return body

        def begin(self, requests: Requests) -> None:
            super().begin(requests)
            costs.extend(request.cost for request in requests)

    costs: list[int] = []
    b = Bench(Telling(), max_prefill_cost=5)
    for body, cost in ((3, 1), (2, 1), (1, 6), (4, 1)):
        b.admit(body, cost=cost)
    b.finish()
    assert [bodies for call, bodies in b.model.calls if call == "begin"] == [[3, 2], [1], [4]]
    assert costs == [3, 2, 6, 4]


def test_request_whose_cost_cannot_be_told_fails_alone_and_a_rejected_body_as_such() -> None:
    class Telling(Counter):
        def validate(self, body: int) -> None:
            if body == 13:
                raise ValueError("no thirteen")

        def cost(self, body: int) -> int:
            if body > 10:
                raise KeyError(body)
            return -body if body == 2 else body

    b = Bench(Telling())
    for body in (1, 2, 12, 13):
        b.admit(body)
    ended = b.finish()
    assert ended[1] == "0"
    assert ended[2] == (
        "INTERNAL",
        "the model's cost(body) returned -2: it must be a number from 0 to 1099511627776",
    )
    assert ended[12] == ("INTERNAL", "the model failed on this request: KeyError: 12")
    assert ended[13] == ("INVALID_ARGUMENT", "the model rejected this body: no thirteen")
    assert [bodies for call, bodies in b.model.calls if call == "begin"] == [[1]]


@pytest.mark.parametrize("changes_cost", [False, True])
def test_sum_of_costs_in_slots_is_limited(changes_cost: bool) -> None:
    class Costly(Counter):
        def begin(self, requests: Requests) -> None:
            super().begin(requests)
            for request in requests if changes_cost else ():
                request.cost = 1000  # which is nobody else's

    b = Bench(Costly(), max_batch_cost=5)
    for body, cost in ((3, 3), (2, 2), (1, 1), (4, 9), (5, 0)):
        b.admit(body, cost=cost)
    b.finish()
    stepped = [bodies for call, bodies in b.model.calls if call == "step"]
    # 1 does not overtake: it joins 3 when 2 has ended. 4 costs more than may be, so it is generated alone.
    assert stepped == [*[[3, 2]] * 3, [3, 1], [1], *[[4]] * 5, *[[5]] * 6]


def test_body_of_tensors_is_an_array_or_several_by_name() -> None:
    seen: list[Any] = []

    class Alone(Counter):
        inputs: Sequence[TensorSpec] = (TensorSpec("x", "FP32", (2,)),)

        def begin(self, requests: Requests) -> None:
            seen.extend(request.body for request in requests)

    class Several(Alone):
        inputs = (TensorSpec("x", "FP32", (2,)), TensorSpec("name", "BYTES", (1,), optional=True))

    data = np.array([1, 2], "<f4").tobytes()
    x, name = ("x", "FP32", (2,)), ("name", "BYTES", (1,))
    for model, layouts, payload in (
        (Alone, [x], data),
        (Several, [x, name], data + pack_values(["a"])),
        (Several, [x], data),
    ):
        loaded = load_model(model, "cpu")
        assert isinstance(loaded, SteppingModel)
        stepper = Stepper(loaded)
        info: RequestFields = ("id", "", {})
        stepper.admit(Admit(0, layouts, info, 1, True), payload)
        stepper.advance()
    assert seen[0].tolist() == [1, 2]
    found = [{name: array.tolist() for name, array in body.items()} for body in seen[1:]]
    assert found == [{"x": [1, 2], "name": ["a"]}, {"x": [1, 2]}], "what is optional may be missing"


@pytest.mark.parametrize(
    ("inputs", "outputs", "why"),
    [
        ([TensorSpec("x", "FP32", (1,), optional=True)], [], "all inputs are optional"),
        ([], [TensorSpec("y", "FP32", (1,), optional=True)], "'y' is optional"),
    ],
)
def test_what_cannot_be_optional_is_refused(inputs: Any, outputs: Any, why: str) -> None:
    declaring = type("Declaring", (Counter,), {"inputs": inputs, "outputs": outputs})
    with pytest.raises(UnusableError, match=why):
        load_model(declaring, "cpu")


# --- continuing --------------------------------------------------------------------------------------------


def test_request_that_was_begun_elsewhere_goes_on_from_its_chunks() -> None:
    b = bench()
    b.admit(4, sent=["0", "1"])
    assert b.finish() == {4: "0123"}
    assert b.chunks == {4: ["0", "1", "2", "3"]}


def test_model_that_cannot_continue_aborts_what_was_sent_and_begins_the_rest() -> None:
    b = bench(continues=False)
    b.admit(4, sent=["0", "1"])
    b.admit(2)
    assert b.finish() == {
        4: ("ABORTED", "the model cannot continue what it had begun to send: send the request again"),
        2: "01",
    }
    assert ("begin", [2]) in b.model.calls
    assert ("end", [4]) not in b.model.calls  # it was not begun here


# --- the model raises --------------------------------------------------------------------------------------


def test_rejected_body_fails_alone_and_is_not_begun() -> None:
    class Picky(Counter):
        def validate(self, body: int) -> None:
            if body == 2:
                raise ValueError("no twos")
            if body == 3:
                raise NotFoundError("three")
            if body == 4:
                raise SystemExit

    b = Bench(Picky())
    for body in (1, 2, 3, 4):
        b.admit(body)
    assert b.finish() == {
        1: "0",
        2: ("INVALID_ARGUMENT", "the model rejected this body: no twos"),
        3: ("NOT_FOUND", "three"),
        4: ("INVALID_ARGUMENT", "the model rejected this body: SystemExit, without a message"),
    }
    assert [bodies for call, bodies in b.model.calls if call in ("begin", "end")] == [[1], [1]]


def test_begin_that_raises_fails_only_the_request_on_which_it_raises_alone() -> None:
    b = bench(("begin", 2))
    for body in (1, 2, 3):
        b.admit(body)
    b.advance()
    assert b.ended == {2: BAD}
    assert b.model.taken_calls() == [
        ("begin", [1, 2, 3]),
        ("end", [1]),
        ("end", [2]),
        ("end", [3]),
        ("begin", [1]),
        ("begin", [2]),
        ("begin", [3]),
        ("end", [2]),
    ]
    b.advance()
    assert b.model.taken_calls() == [("step", [1, 3])]
    assert b.finish() == {1: "0", 2: BAD, 3: "012"}


def test_step_that_raises_fails_only_the_request_on_which_it_raises_alone() -> None:
    b = bench(("step", 8))
    for body in (9, 7):
        b.admit(body)
    b.advance()
    b.admit(8)
    b.admit(6, is_streamed=False)
    b.model.calls.clear()
    step = b.advance()
    assert step is not None
    assert (step.size, step.running) == (4, 3)
    assert b.ended == {8: BAD}
    assert b.model.taken_calls() == [
        ("begin", [8, 6]),
        ("step", [9, 7, 8, 6]),
        *[("end", [body]) for body in (9, 7, 8, 6)],
        *[(call, [body]) for body in (9, 7, 8, 6) for call in ("begin", "step")],
        ("end", [8]),
    ]
    # 9 and 7 had emitted a value when it raised, which stays, and each one more when it took the step singly.
    assert b.chunks == {9: ["0", "1", "2"], 7: ["0", "1", "2"], 8: [], 6: []}
    assert b.finish() == {9: "012345678", 7: "0123456", 8: BAD, 6: "012345"}


def test_request_that_finished_before_the_model_raised_is_finished() -> None:
    b = bench(("step", 2))
    b.admit(0)
    b.admit(2)
    b.advance()
    assert b.ended == {0: None, 2: BAD}
    assert b.model.calls.count(("begin", [0])) == 0
    assert b.model.calls.count(("end", [0])) == 1


def test_if_the_model_raises_on_none_alone_all_go_on() -> None:
    b = bench(("step together", 5))
    for body in (5, 3):
        b.admit(body)
    assert b.finish() == {5: "01234", 3: "012"}
    assert b.chunks == {5: list("01234"), 3: list("012")}


@pytest.mark.parametrize("call", ["begin", "step"])
def test_model_that_cannot_continue_aborts_what_it_had_sent(call: str) -> None:
    b = bench((call, 8), continues=False)
    b.admit(9)
    b.admit(5, is_streamed=False)
    b.advance()
    b.admit(8)
    b.admit(7)
    b.model.calls.clear()
    b.advance()
    aborted = ("ABORTED", "the model cannot continue what it had begun to send: send the request again")
    assert b.ended == ({8: BAD} if call == "begin" else {9: aborted, 8: BAD})
    b.finish()
    assert b.ended[5] == "01234"  # begun at the start: nothing of it was sent
    assert b.ended[7] == "0123456"
    assert b.chunks[7] == list("0123456")


@pytest.mark.parametrize("call", ["begin", "step"])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, BaseException])
def test_model_that_wants_to_exit_fails_its_request(call: str, error: type[BaseException]) -> None:
    b = Bench(Counter((call, 2), error=error))
    b.admit(1)
    b.admit(2)
    detail = f"the model failed on this request: {error.__name__}, without a message"
    assert b.finish() == {1: "0", 2: ("INTERNAL", detail)}


def test_end_that_raises_is_ignored() -> None:
    b = Bench(Counter(("end", 1), error=SystemExit))
    b.admit(1)
    b.admit(2)
    assert b.finish() == {1: "0", 2: "01"}
    assert b.model.calls.count(("end", [1])) == 1


@pytest.mark.parametrize("is_streamed", [True, False])
def test_forgotten_finish_is_reported_once(is_streamed: bool) -> None:
    """Given a request that emits twice and is never finished, expect a line after many steps, and no other
    for a second one."""

    class Forgets(Counter):
        def step(self, requests: Requests) -> None:
            for request in requests:
                if request.body == "no" and request.emitted < 2:
                    request.emit("a")

    b = Bench(Forgets())
    with capture_logs() as lines:
        b.admit("no", is_streamed=is_streamed)
        for _ in range(SILENT_STEPS_MAX + 1):
            b.advance()
        assert lines == []
        b.admit("never")
        b.advance()
        assert [(line["correlation_id"], line["steps"]) for line in lines] == [("id0", SILENT_STEPS_MAX)]
        assert "finish()" in lines[0]["event"]
        for _ in range(2 * SILENT_STEPS_MAX):
            b.advance()
    assert len(lines) == 1


def test_value_that_cannot_be_sent_fails_its_request() -> None:
    class Emits(Counter):
        def step(self, requests: Requests) -> None:
            for request in requests:
                request.emit(object() if request.body == 2 else "a")
                if request.emitted == 2:
                    request.finish(object() if request.body == 3 else "whole")

    b = Bench(Emits())
    for body in (1, 2, 3):
        b.admit(body)
    b.finish()
    assert b.ended[1] == "whole"
    for body in (2, 3):
        status, detail = b.ended[body]
        assert (status, detail[:55]) == (
            "INTERNAL",
            "the model's result cannot be sent: its type is object: ",
        )


def test_endless_request_fails_alone_and_its_generator_is_closed() -> None:
    closed: list[str] = []

    def generate(body: str) -> Iterator[str]:
        try:
            while body == "endless":
                yield body
            yield from "other"
        finally:
            closed.append(body)

    b = Bench(generate)
    b.stepper.configure(Configure(4, None, None, 1000))
    b.admit("endless")
    b.admit("other", is_streamed=False)
    steps = [b.advance() for _ in range(20) if b.stepper.has_next]
    assert b.ended == {"endless": too_large(1000), "other": "other"}
    chunks = (1000 - 8) // (CHUNK_OVERHEAD_BYTES + 8) + 1  # of the last one only the value counts
    assert b.chunks["endless"] == ["endless"] * chunks
    assert closed == ["other", "endless"]
    errors = [step.errors for step in steps if step and step.errors]
    assert errors == [{too_large(1000)[1]: [0]}]


def test_lower_limit_holds_for_requests_that_have_a_slot() -> None:
    b = bench()
    b.admit(50)
    b.advance()
    b.stepper.configure(Configure(4, None, None, 8))
    b.advance()
    assert b.ended == {50: too_large(8)}
    assert b.model.taken_calls()[-1] == ("end", [50])


def test_model_may_change_the_list_that_it_gets() -> None:
    class Pops(Counter):
        def step(self, requests: Requests) -> None:
            while requests:
                super().step([requests.pop()])  # type: ignore[attr-defined]

    b = Bench(Pops())
    b.admit(1)
    b.admit(2)
    assert b.finish() == {1: "0", 2: "01"}


def test_begin_may_emit_and_end_requests() -> None:
    class Eager(Counter):
        def begin(self, requests: Requests) -> None:
            for request in requests:
                request.state = request.body
                request.emit("first")
                if request.body == 1:
                    request.finish()
                elif request.body == 2:
                    request.fail("two")

    b = Bench(Eager())
    for body in (1, 2, 3):
        b.admit(body)
    b.finish()
    assert b.ended == {1: "first", 2: ("INTERNAL", "two"), 3: "first"}
    assert b.model.calls == [("end", [1]), ("end", [2]), ("step", [3]), ("end", [3])]


class EmitsInBegin(Counter):
    """Its `begin` emits the first number."""

    def begin(self, requests: Requests) -> None:
        super().begin(requests)
        for request in requests:
            request.emit(str(request.state))
            request.state += 1


def test_what_begin_emits_is_sent_before_the_step_that_follows() -> None:
    b = Bench(EmitsInBegin())
    b.admit(3)
    step = b.advance()
    assert step is not None and not step.has_stepped and (step.size, step.running) == (1, 1)
    assert b.chunks == {3: ["0"]}
    assert b.model.taken_calls() == [("begin", [3])]
    step = b.advance()
    assert step is not None and step.has_stepped
    assert b.chunks == {3: ["0", "1"]}
    assert b.model.taken_calls() == [("step", [3])]


def test_between_begin_and_the_step_that_follows_no_other_request_begins() -> None:
    """Else they would begin without end, and none would take a step."""
    b = Bench(EmitsInBegin())
    b.admit(2)
    b.advance()
    b.admit(3)
    b.advance()
    b.advance()
    assert b.model.taken_calls() == [("begin", [2]), ("step", [2]), ("begin", [3])]
    assert b.finish() == {2: "01", 3: "012"}


def test_request_that_is_dropped_after_its_begin_takes_no_step() -> None:
    b = Bench(EmitsInBegin())
    keys = [b.admit(body) for body in (2, 3)]
    b.advance()
    b.stepper.drop(keys[:1])
    b.advance()
    assert b.model.taken_calls() == [("begin", [2, 3]), ("end", [2]), ("step", [3])]


def test_request_without_readers_begins_and_steps_in_one_turn() -> None:
    b = Bench(EmitsInBegin())
    b.admit(2, is_streamed=False)
    b.advance()
    assert b.model.taken_calls() == [("begin", [2]), ("step", [2])]


def test_request_that_is_alone_begins_and_steps_in_one_turn() -> None:
    """Its worker counts the steps that it took."""
    b = Bench(EmitsInBegin())
    b.admit(2, is_alone=True)
    b.advance()
    assert b.model.taken_calls() == [("begin", [2]), ("step", [2])]
    assert b.chunks == {2: ["0", "1"]}


def test_what_a_failed_step_held_is_freed_before_the_next_attempt() -> None:
    class Activation:
        pass

    held: list[weakref.ref[Activation]] = []

    class Hungry(Counter):
        def step(self, requests: Requests) -> None:
            assert all(reference() is None for reference in held), "still held"
            activation = Activation()
            held.append(weakref.ref(activation))
            if len(requests) > 1:
                raise MemoryError
            super().step(requests)

    b = Bench(Hungry())
    gc.disable()
    try:
        for body in (1, 2):
            b.admit(body)
        assert b.finish() == {1: "0", 2: "01"}
    finally:
        gc.enable()


# --- drops, and the end ------------------------------------------------------------------------------------


def test_dropped_request_is_ended_and_its_slot_is_free() -> None:
    b = bench(max_batch_size=2)
    keys = [b.admit(body) for body in (9, 8, 7)]
    b.advance()
    b.stepper.drop([keys[0], 99])
    assert b.model.taken_calls()[-1] == ("end", [9])
    b.advance()
    assert b.model.taken_calls() == [("begin", [7]), ("step", [8, 7])]
    b.stepper.drop([keys[0], keys[1], keys[2]])
    assert b.model.taken_calls() == [("end", [8]), ("end", [7])]
    assert not b.stepper.has_next


def test_dropped_request_that_waits_is_never_begun() -> None:
    b = bench(max_batch_size=1)
    b.admit(1)
    b.stepper.drop([b.admit(2), b.admit(3, is_alone=True)])
    b.stepper.resume()
    assert b.finish() == {1: "0"}
    assert all(bodies == [1] for _, bodies in b.model.calls)


def test_all_begun_requests_are_ended_at_the_end() -> None:
    b = bench(("end", 9), max_batch_size=2)
    for body in (9, 8, 7):
        b.admit(body)
    b.advance()
    b.model.calls.clear()
    b.stepper.close()
    assert b.model.calls == [("end", [9]), ("end", [8])]


def test_model_without_end() -> None:
    class Endless(Counter):
        end = None  # type: ignore[assignment]

    b = Bench(Endless())
    b.admit(1)
    assert b.finish() == {1: "0"}
    b.stepper.drop([b.admit(3)])
    b.stepper.close()


# --- alone -------------------------------------------------------------------------------------------------


def test_request_that_is_alone_takes_one_step_while_all_others_pause() -> None:
    b = bench()
    b.admit(9)
    b.advance()
    b.admit(8, is_alone=True)
    b.admit(7)
    b.admit(6, is_alone=True)
    b.model.calls.clear()
    for body in (8, 6):
        step = b.advance()
        assert step is not None
        assert [b.bodies[advance.key] for advance in step.advances] == [body]
        assert b.model.taken_calls() == [("begin", [body]), ("step", [body])]
    assert not b.stepper.has_next
    b.admit(5)
    assert not b.stepper.has_next
    b.admit(4, is_alone=True)
    b.advance()
    assert b.model.taken_calls() == [("begin", [4]), ("step", [4])]
    b.stepper.resume()
    b.advance()
    assert b.model.taken_calls() == [("step", [9, 8, 6, 4])]  # 7 and 5 wait for a slot
    assert b.finish() == {body: "".join(map(str, range(body))) for body in (9, 8, 7, 6, 5, 4)}


def test_alone_ones_are_done_first_if_the_worker_resumed_meanwhile() -> None:
    b = bench()
    b.admit(9)
    b.admit(8, is_alone=True)
    b.stepper.resume()
    b.advance()
    b.advance()
    assert b.model.calls == [("begin", [8]), ("step", [8]), ("begin", [9]), ("step", [8, 9])]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_step_alone_is_told_also_if_it_emitted_nothing(is_streamed: bool) -> None:
    class Slow(Counter):
        def step(self, requests: Requests) -> None: ...

    b = Bench(Slow())
    key = b.admit(5, sent=["0"] * is_streamed, is_streamed=is_streamed, is_alone=True)
    step = b.advance()
    assert step is not None
    assert step.advances == [Advance(key, b"", int(is_streamed))]


def test_failure_of_one_that_is_alone_is_told() -> None:
    b = bench(("begin", 1), ("step", 2))
    for body in (1, 2):
        b.admit(body, is_alone=True)
        b.advance()
        assert b.ended[body] == BAD
    assert not b.stepper.has_next


def test_others_give_up_their_slots_for_one_that_is_alone() -> None:
    b = bench(max_batch_size=3, max_batch_cost=6)
    for body in (9, 8, 7, 6):
        b.admit(body, cost=2)
    b.advance()
    b.model.calls.clear()
    b.admit(5, is_alone=True, cost=4)
    b.advance()
    assert b.model.taken_calls() == [("end", [7]), ("end", [8]), ("begin", [5]), ("step", [5])]
    b.stepper.resume()
    b.advance()
    assert b.model.taken_calls() == [("step", [9, 5])]
    assert b.finish() == {body: "".join(map(str, range(body))) for body in (9, 8, 7, 6, 5)}
    begun = [bodies for call, bodies in b.model.calls if call == "begin"]
    assert begun == [[8, 7], [6]]  # as they were put back, before the one that waited
    assert b.chunks[8] == list("01234567")


def test_request_that_could_not_be_begun_anew_keeps_its_slot() -> None:
    b = bench(max_batch_size=2, continues=False)
    b.admit(9)
    b.admit(8, is_streamed=False)
    b.advance()
    b.model.calls.clear()
    for body in (7, 6):
        b.admit(body, is_alone=True)
        b.advance()
    assert b.model.taken_calls() == [
        *[("end", [8]), ("begin", [7]), ("step", [7])],
        *[("begin", [6]), ("step", [6])],
    ]
    b.stepper.resume()
    assert b.finish() == {body: "".join(map(str, range(body))) for body in (9, 8, 7, 6)}
