"""What a model raises: its name, its traceback for the log, the requests concerned; and its bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
from structlog.testing import capture_logs

from carpool.errors import ResourceExhaustedError, Unhealthy
from carpool.logs import configure_logs
from carpool.shown import TEXT_CHARS_MAX
from carpool_worker.model_process import broken_devices
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.executor import ListItems
from carpool_worker.model_process.frame_execution import execute_frame
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader, Raised, pack_values
from carpool_worker.model_process.model import (
    BoundModel,
    LoadedModel,
    RequestInfo,
    SteppingModel,
    adapt,
    load_model,
)
from carpool_worker.model_process.raised import (
    NAME_CHARS_MAX,
    NAMES_MAX,
    TRACE_INTERVAL_S,
    TRACES_MAX,
    RaisedLog,
    name_of,
)
from carpool_worker.model_process.stepping.frames import Admit
from carpool_worker.model_process.stepping.stepper import Stepper

MODEL: Final = """
def lacks_key(batch):
    return [body["speed"] for body in batch]

def asserts(batch):
    assert False

class Steps:
    def begin(self, requests):
        raise ValueError("begin")
    def step(self, requests):
        pass

def generates(body):
    yield 1 / body

class Fails:
    def begin(self, requests):
        requests[0].fail(self.error())
    def error(self):
        try:
            raise ValueError("on purpose")
        except ValueError as error:
            return error
    def step(self, requests):
        pass
"""
BODY: Final = "4111 1111"
OUTCOME: Final = OutcomeHeader(0, 1, 1, 5, {})


@pytest.fixture(autouse=True)
def _configured_logs() -> Iterator[None]:
    yield
    structlog.reset_defaults()


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[[str], Any]:
    """A function of MODEL, from a file, so that its lines have numbers."""
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    names: dict[str, Any] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)  # noqa: S102
    return lambda name: names[name]


class Told(list[Raised]):
    """What a worker was told, and the log of the model that told it."""

    def __init__(self, now_s: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__()
        self.raised = RaisedLog(self.append, now_s)

    def execute(self, model: Any, *bodies: Any) -> OutcomeHeader:
        """The outcome of a frame of these."""
        loaded = adapt(model, "cpu")
        assert isinstance(loaded, LoadedModel)
        frame = FrameHeader(0, len(bodies))
        sent = pack_values(list(bodies))
        header, _ = execute_frame(loaded, frame, sent, lambda: sent, self.raised.observe)
        return self.raised.named(header)

    @property
    def names(self) -> list[tuple[str, int]]:
        """What was told, and how many were left out before it."""
        return [(told.error, told.left_out) for told in self]


def test_worker_is_told_the_traceback_without_the_lines_of_carpool(model_of: Callable[[str], Any]) -> None:
    told = Told()
    told.execute(model_of("lacks_key"), {})
    ((error, trace, left_out, _),) = told
    assert (error, left_out) == ("KeyError at model.py:3", 0)
    assert 'body["speed"]' in trace
    assert "carpool_worker" not in trace


@pytest.mark.parametrize(("level", "has_text"), [("info", False), ("debug", True)])
def test_the_text_may_quote_a_body_and_is_told_at_debug_only(level: str, has_text: bool) -> None:
    configure_logs(level, "model")

    def model(batch: Any) -> Any:
        try:
            return [float(body) for body in batch]
        except ValueError as error:
            raise RuntimeError(f"no number: {batch}") from error

    told = Told()
    outcome = told.execute(model, "4111 1111")
    assert ("4111 1111" in str(told)) is has_text
    assert outcome.errors and "4111" not in str(outcome.errors)


def test_a_batch_that_is_executed_again_because_its_results_are_unclear_is_not_told() -> None:
    """Given two values for each of two requests, which may be columns, expect no traceback."""
    told = Told()
    outcome = told.execute(lambda batch: [[body, body] for body in batch], 1, 2)
    assert not outcome.failures
    assert not outcome.errors
    assert not told


@pytest.mark.parametrize("hook", ["begin", "step", "end"])
def test_a_stepping_model_that_raises_logs_no_body(hook: str) -> None:
    def fail(requests: Any) -> None:
        raise ValueError(BODY)

    def finish(requests: Any) -> None:
        for request in requests:
            request.finish()

    hooks: dict[str, Any] = {"begin": lambda _: None, "step": finish, "end": lambda _: None, hook: fail}
    model = load_model(type("Steps", (), {name: staticmethod(call) for name, call in hooks.items()}), "cpu")
    assert isinstance(model, SteppingModel)
    with capture_logs() as logs:
        stepper = Stepper(model)
        for key in range(2):
            stepper.admit(Admit(key, (), ("a", "", {}), 1, False), pack_values([BODY]))
        while stepper.has_next:
            stepper.advance()
    assert logs and "4111" not in str(logs)


def test_flood_is_one_line_and_then_a_number(model_of: Callable[[str], Any]) -> None:
    now_s = 0.0
    told = Told(lambda: now_s)
    for _ in range(100):
        told.execute(model_of("lacks_key"), {})
    told.execute(model_of("asserts"), {})
    now_s = TRACE_INTERVAL_S
    told.execute(model_of("lacks_key"), {})
    assert told.names == [
        ("KeyError at model.py:3", 0),
        ("AssertionError at model.py:6", 0),
        ("KeyError at model.py:3", 99),
    ]


def picky(batch: Any) -> Any:
    """Raises on two kinds of bodies, and on every batch of more than four."""
    if len(batch) > 4:
        raise MemoryError
    return [{"a": 1}[body] if isinstance(body, str) else 1 / body for body in batch]


def test_outcome_names_what_was_raised_and_on_which_requests() -> None:
    told = Told()
    errors = told.execute(picky, 1, 0, "a", "b", 1, 0, 1, 1).errors
    by_kind = {name.split()[0]: [*concerned] for name, concerned in errors.items()}
    assert by_kind == {"MemoryError": [*range(8)], "KeyError": [3], "ZeroDivisionError": [1, 5]}
    assert [*by_kind][-1] == "ZeroDivisionError", "it was raised last"
    assert {name for name, _ in told.names} == {*errors}
    assert told.execute(picky, 1).errors == {}


def test_it_is_told_before_the_rest_of_the_batch_is_executed() -> None:
    """Else it would be lost if the process dies of that."""
    told, seen = Told(), list[int]()

    def model(batch: Any) -> Any:
        seen.append(len(told))
        if len(batch) > 1:
            raise RuntimeError
        return batch

    told.execute(model, 1, 2)
    assert seen == [0, 1, 1]


def test_number_of_results_is_no_error_of_a_line() -> None:
    told = Told()
    assert told.execute(lambda batch: [*batch, 1], 1, 2).errors == {}
    assert not told


def test_what_is_raised_on_purpose_is_not_told() -> None:
    def model(batch: Any) -> Any:
        raise ResourceExhaustedError("busy")

    told = Told()
    assert told.execute(model, 1).errors == {}
    assert not told


class AcceleratorError(RuntimeError):
    """As torch has it."""

    __module__ = "torch"


@pytest.mark.parametrize(
    "error", [Unhealthy("gone"), AcceleratorError("CUDA error: device-side assert triggered")]
)
def test_what_ends_the_process_is_told_once(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broken_devices, "is_driver_loaded", lambda: True)

    def model(batch: Any) -> Any:
        raise error

    told = Told()
    with pytest.raises(Unhealthy) as caught:
        told.execute(model, 1)
    told.raised.observe_end(caught.value)
    ((name, _),) = told.names
    assert name.startswith(f"{type(error).__name__} at test_raised.py:")


def test_what_ends_the_process_is_told_if_nobody_saw_it_raised() -> None:
    told = Told()
    try:
        raise Unhealthy("gone")
    except Unhealthy as error:
        told.raised.observe_end(error)
    assert len(told) == 1


def test_names_and_traces_are_bounded() -> None:
    now_s = 0.0
    told = Told(lambda: now_s)
    for number in range(3 * NAMES_MAX):
        told.raised.observe(type(f"E{number}" + "x" * 10_000, (Exception,), {})(), (0,))
        if number % 2:
            errors = told.raised.named(OUTCOME).errors
            assert max(map(len, errors)) <= NAME_CHARS_MAX
    assert len(told) == 3 * NAMES_MAX
    assert len(told.raised._told_at_s) <= NAMES_MAX
    for number in range(2 * TRACES_MAX):
        told.raised.observe(type(f"F{number}", (Exception,), {})(), (0,))
    assert len(told) == 3 * NAMES_MAX + TRACES_MAX, "for one outcome"


def test_long_traceback_is_told_without_its_middle() -> None:
    configure_logs("info", "model")

    def model(batch: Any) -> Any:
        return odd(len(batch))

    def odd(depth: int) -> Any:
        return even(depth + 1)

    def even(depth: int) -> Any:
        return odd(depth + 1)

    told = Told()
    told.execute(model, 1)
    (raised,) = told
    assert len(raised.trace) < TEXT_CHARS_MAX + 100
    assert raised.trace.startswith("Traceback") and raised.trace.endswith("RecursionError\n")


class Sums:
    """Binds sequences. Raises on a row of -1; a sequence "odd" cannot start."""

    binds_sequences = True
    max_batch_size = 4

    def start(self, sequence: Any) -> None:
        if sequence.sequence_id == "odd":
            raise KeyError("start")

    def predict(self, batch: Any) -> Any:
        if -1 in batch:
            raise ValueError("predict")
        return batch


def test_what_a_bound_model_raises_concerns_all_rows_but_start_concerns_one() -> None:
    model = load_model(Sums(), "cpu")
    assert isinstance(model, BoundModel)
    told = Told()
    executor = BoundExecutor(model, told.raised.observe)

    def raised_on(**bodies: int) -> dict[str, list[int]]:
        requests = [RequestInfo(name, "", {}, name, sequence_start=True) for name in bodies]
        executor.execute(ListItems(list(bodies.values())), requests)
        errors = told.raised.named(OUTCOME).errors
        return {name.split()[0]: [*concerned] for name, concerned in errors.items()}

    assert raised_on(a=1, b=2) == {}
    assert raised_on(a=1, odd=2) == {"KeyError": [1]}
    assert raised_on(a=1, b=-1) == {"ValueError": [0, 1]}
    assert [name.split()[0] for name, _ in told.names] == ["KeyError", "ValueError"]


@pytest.mark.parametrize(
    ("name", "raised"),
    [
        ("Steps", ["ValueError at model.py:10"]),
        ("generates", ["ZeroDivisionError at model.py:15"]),
        ("Fails", ["ValueError at model.py:22"]),
    ],
)
def test_what_a_stepping_model_raises_is_observed(
    model_of: Callable[[str], Any], name: str, raised: list[str]
) -> None:
    model, seen = load_model(model_of(name), "cpu"), list[tuple[str, list[int]]]()
    assert isinstance(model, SteppingModel)
    stepper = Stepper(model, observe=lambda error, keys: seen.append((name_of(error), [*keys])))
    stepper.admit(Admit(1, (), ("id", "", {}), 1, is_streamed=False), pack_values([0]))
    while stepper.has_next:
        stepper.advance()
    assert seen == [(name, [1]) for name in raised]


def test_error_without_a_line_has_its_class() -> None:
    assert name_of(MemoryError()) == "MemoryError"
