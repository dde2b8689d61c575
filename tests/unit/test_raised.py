"""What a model raises: its name, its traceback in the log, and that a flood of it is one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import structlog
from structlog.testing import capture_logs

from carpool.errors import ResourceExhaustedError, Unhealthy
from carpool.logs import configure_logs
from carpool_worker.model_process.frames import OutcomeHeader, pack_values
from carpool_worker.model_process.model import SteppingModel, adapt, load_model
from carpool_worker.model_process.raised import NAMES_MAX, TRACE_INTERVAL_S, RaisedLog, followed, name_of
from carpool_worker.model_process.step_frames import Admit
from carpool_worker.model_process.stepper import Stepper

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


def raised_by(model: Any, raised: RaisedLog, body: Any = None) -> None:
    loaded = followed(adapt(model, "cpu"), raised.observe)
    with pytest.raises(BaseException):  # noqa: B017
        loaded.run([body or {}], ())


def test_traceback_is_logged_without_the_lines_of_the_worker(model_of: Callable[[str], Any]) -> None:
    with capture_logs() as logs:
        raised_by(model_of("lacks_key"), RaisedLog())
    (line,) = logs
    assert (line["event"], line["log_level"], line["error"]) == (
        "model raised", "error", "KeyError at model.py:3",
    )  # fmt: skip
    assert 'body["speed"]' in line["exception"]
    assert "carpool_worker" not in line["exception"]


@pytest.mark.parametrize(("level", "has_text"), [("info", False), ("debug", True)])
def test_the_text_may_quote_a_body_and_is_logged_at_debug_only(
    capsys: pytest.CaptureFixture[str], level: str, has_text: bool
) -> None:
    configure_logs(level, "model")

    def model(batch: Any) -> Any:
        try:
            return [float(body) for body in batch]
        except ValueError as error:
            raise RuntimeError(f"no number: {batch}") from error

    raised = RaisedLog()
    raised_by(model, raised, "4111 1111")
    assert ("4111 1111" in capsys.readouterr().err) is has_text
    assert "4111" not in raised.named(OUTCOME).error


@pytest.mark.parametrize("hook", ["begin", "step", "end"])
def test_a_stepping_model_that_raises_logs_no_body(hook: str) -> None:
    def fail(requests: Any) -> None:
        raise ValueError("4111 1111")

    def finish(requests: Any) -> None:
        for request in requests:
            request.finish()

    hooks: dict[str, Any] = {"begin": lambda _: None, "step": finish, "end": lambda _: None, hook: fail}
    model = load_model(type("Steps", (), {name: staticmethod(call) for name, call in hooks.items()}), "cpu")
    assert isinstance(model, SteppingModel)
    with capture_logs() as logs:
        stepper = Stepper(model)
        for key in range(2):
            stepper.admit(Admit(key, (), ("a", "", {}), 1, False), pack_values(["4111 1111"]))
        while stepper.has_next:
            stepper.advance()
    assert logs and "4111" not in str(logs)


def test_flood_is_one_line_and_then_a_number(model_of: Callable[[str], Any]) -> None:
    now_s = 0.0
    raised = RaisedLog(lambda: now_s)
    with capture_logs() as logs:
        for _ in range(100):
            raised_by(model_of("lacks_key"), raised)
        raised_by(model_of("asserts"), raised)
        now_s = TRACE_INTERVAL_S
        raised_by(model_of("lacks_key"), raised)
    assert [(line["error"], line.get("left_out")) for line in logs] == [
        ("KeyError at model.py:3", None),
        ("AssertionError at model.py:6", None),
        ("KeyError at model.py:3", 99),
    ]


def test_outcome_has_the_name_of_the_last_error_once(model_of: Callable[[str], Any]) -> None:
    raised = RaisedLog()
    assert raised.named(OUTCOME) is OUTCOME
    with capture_logs():
        raised_by(model_of("lacks_key"), raised)
        raised_by(model_of("asserts"), raised)
    assert raised.named(OUTCOME).error == "AssertionError at model.py:6"
    assert not raised.named(OUTCOME).error


@pytest.mark.parametrize("error", [ResourceExhaustedError("busy"), Unhealthy("gone")])
def test_what_is_raised_on_purpose_is_not_logged(error: BaseException) -> None:
    raised = RaisedLog()

    def model(batch: Any) -> Any:
        raise error

    with capture_logs() as logs:
        raised_by(model, raised)
    assert logs == []
    assert not raised.named(OUTCOME).error


def test_names_are_bounded() -> None:
    raised = RaisedLog(lambda: 0.0)
    with capture_logs() as logs:
        for number in range(3 * NAMES_MAX):
            raised.observe(type(f"Error{number}", (Exception,), {})())
    assert len(logs) == 3 * NAMES_MAX
    assert len(raised._logged_at_s) <= NAMES_MAX


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
    model, seen = load_model(model_of(name), "cpu"), list[str]()
    assert isinstance(model, SteppingModel)
    stepper = Stepper(model, observe=lambda error: seen.append(name_of(error)))
    stepper.admit(Admit(1, (), ("id", "", {}), 1, is_streamed=False), pack_values([0]))
    while stepper.has_next:
        stepper.advance()
    assert seen == raised


def test_error_without_a_line_has_its_class() -> None:
    assert name_of(MemoryError()) == "MemoryError"
