"""Processes that die with their parent, loops that do not die at all, and signals that ask for a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from carpool.lifecycle import Loop

# Every process of these tests holds the test's end of a pipe as its stdout: the pipe's end of file says that
# all of them are gone, which no check of a pid says as surely.
PYTHON = [sys.executable, "-c"]
TIMEOUT_S = 10.0

BLOCK = "import threading; print('ready', flush=True); threading.Event().wait()"
CHILD_OF_OURS = f"import sys; from carpool import lifecycle; %s; {BLOCK}"
FOREIGN_PROGRAM = ["sh", "-c", "echo ready; exec sleep 1000"]
PORTABLY = "lifecycle._ON_LINUX = False"  # takes the way of the systems that have no PR_SET_PDEATHSIG


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*PYTHON, code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill_and_wait_for_all(parent: subprocess.Popen[str]) -> None:
    """Fails with TimeoutExpired where a descendant outlives `parent` and so holds the pipe open."""
    parent.kill()
    parent.wait(TIMEOUT_S)
    parent.communicate(timeout=TIMEOUT_S)


# --- die_with_parent, command_that_dies_with_parent


@pytest.mark.parametrize("preparation", ["pass", PORTABLY])
def test_a_child_dies_with_its_killed_parent(preparation: str) -> None:
    child = CHILD_OF_OURS % f"{preparation}; lifecycle.die_with_parent(int(sys.argv[1]))"
    parent = f"import os, subprocess; subprocess.run({[*PYTHON, child]!r} + [str(os.getpid())])"
    with python(parent) as process:
        assert line_of(process) == "ready"
        kill_and_wait_for_all(process)


@pytest.mark.parametrize("preparation", ["pass", PORTABLY])
def test_a_child_whose_parent_is_already_gone_ends_at_once(preparation: str) -> None:
    somebody_else = os.getppid()
    with python(CHILD_OF_OURS % f"{preparation}; lifecycle.die_with_parent({somebody_else})") as process:
        assert line_of(process) == ""
        assert process.wait(TIMEOUT_S) == 1


@pytest.mark.parametrize("preparation", ["pass", PORTABLY])
def test_a_foreign_program_dies_with_its_killed_parent(preparation: str) -> None:
    command = f"lifecycle.command_that_dies_with_parent({FOREIGN_PROGRAM!r})"
    parent = f"import subprocess; from carpool import lifecycle; {preparation}; subprocess.run({command})"
    with python(parent) as process:
        assert line_of(process) == "ready"
        kill_and_wait_for_all(process)


@pytest.mark.parametrize("preparation", ["pass", PORTABLY])
def test_a_foreign_program_keeps_its_pid_its_arguments_and_its_exit_status(preparation: str) -> None:
    program = ["sh", "-c", 'echo "$$ $1"; exit 7', "sh", "two words"]
    launch = f"subprocess.Popen(lifecycle.command_that_dies_with_parent({program!r}))"
    parent = (
        f"import subprocess; from carpool import lifecycle; {preparation}\n"
        f"child = {launch}; print(child.wait(), child.pid)"
    )
    with python(parent) as process:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    (pid, *words), (status, expected_pid) = (line.split() for line in output.splitlines())
    assert (pid, words, status) == (expected_pid, ["two", "words"], "7")


# --- stop_on_signals

WAIT_FOR_STOP = """
from carpool.lifecycle import stop_on_signals
stop = stop_on_signals()
print("ready", flush=True)
stop.wait()
print("stopping", flush=True)
"""
STOP_SLOWLY = WAIT_FOR_STOP + "import threading; threading.Event().wait()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_event(number: signal.Signals) -> None:
    with python(WAIT_FOR_STOP) as process:
        assert line_of(process) == "ready"
        process.send_signal(number)
        assert line_of(process) == "stopping"
        assert process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_while_stopping_exits_at_once(first: signal.Signals) -> None:
    with python(STOP_SLOWLY) as process:
        assert line_of(process) == "ready"
        process.send_signal(first)
        assert line_of(process) == "stopping"
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


def test_the_supervisors_sigterm_after_ctrl_c_leaves_time_to_finish() -> None:
    finish_when_told = WAIT_FOR_STOP + "input(); print('finished')"
    with subprocess.Popen(
        [*PYTHON, finish_when_told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert line_of(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "stopping"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate("now\n", timeout=TIMEOUT_S)
    assert (output.strip(), process.returncode) == ("finished", 0)


# --- Loop


class BoomError(Exception):
    pass


def no_error_expected(error: Exception) -> None:
    pytest.fail(f"run_once raised {error!r}")


@contextmanager
def running(
    run_once: Callable[[], None], on_error: Callable[[Exception], None] = no_error_expected
) -> Iterator[Loop]:
    loop = Loop("loop-under-test", run_once, on_error)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()
        assert loop.join(TIMEOUT_S)


def test_a_loop_runs_again_and_again_until_stopped() -> None:
    turns: SimpleQueue[str] = SimpleQueue()
    with running(lambda: turns.put(threading.current_thread().name)) as loop:
        assert [turns.get(timeout=TIMEOUT_S) for _ in range(3)] == ["loop-under-test"] * 3
        assert loop.alive
    assert not loop.alive


def test_join_says_whether_the_loop_has_ended() -> None:
    entered, leave = threading.Event(), threading.Event()

    def run_once() -> None:
        entered.set()
        leave.wait(TIMEOUT_S)

    with running(run_once) as loop:
        assert entered.wait(TIMEOUT_S)
        loop.stop()
        assert not loop.join(0.0)
        leave.set()
        assert loop.join(TIMEOUT_S)


def test_stopping_before_the_start_and_twice_is_fine() -> None:
    loop = Loop("loop-under-test", lambda: pytest.fail("it was stopped before it started"), no_error_expected)
    loop.stop()
    loop.stop()
    assert loop.join()
    loop.start()
    assert loop.join(TIMEOUT_S)


def test_a_loop_survives_errors_and_reports_each() -> None:
    errors: SimpleQueue[Exception] = SimpleQueue()
    outcomes = iter([BoomError("first"), SystemExit(3), None, BoomError("last")])
    over = threading.Event()

    def run_once() -> None:
        outcome = next(outcomes, over)
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is over:
            over.set()

    with running(run_once, errors.put):
        assert over.wait(TIMEOUT_S)
    reported = [str(errors.get_nowait()) for _ in range(errors.qsize())]
    assert reported == ["first", "sys.exit(3) was called in the thread loop-under-test", "last"]


def test_a_loop_survives_its_own_error_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: SimpleQueue[type[BaseException]] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.put(args.exc_type))

    def fail(*_: Any) -> None:
        raise BoomError

    with running(fail, fail):
        assert [printed.get(timeout=TIMEOUT_S) for _ in range(2)] == [BoomError, BoomError]


def test_pauses_double_while_errors_go_on_and_vanish_after_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([BoomError()] * 8 + [None] + [BoomError()] * 2)
    loop = Loop("loop-under-test", lambda: fail_as_told(next(outcomes)), lambda error: None)
    pauses: list[float] = []

    def note_pause(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) == 12

    monkeypatch.setattr(loop._stop, "wait", note_pause)
    loop.start()
    assert loop.join(TIMEOUT_S)
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.0, 0.05, 0.1]


def fail_as_told(outcome: Exception | None) -> None:
    if outcome:
        raise outcome


def test_a_stop_interrupts_the_pause() -> None:
    failed = threading.Event()

    def run_once() -> None:
        raise BoomError

    loop = Loop("loop-under-test", run_once, lambda error: failed.set())
    loop._FIRST_PAUSE_S = loop._LONGEST_PAUSE_S = 1_000.0  # type: ignore[misc]
    loop.start()
    assert failed.wait(TIMEOUT_S)
    loop.stop()
    assert loop.join(TIMEOUT_S)
