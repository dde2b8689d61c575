"""Processes that end with their parent, signals that stop a service, and loops that survive errors."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from carpool import lifecycle
from carpool.backoff import Backoff
from carpool.lifecycle import Loop
from support.waiting import EVENTUALLY_S

# All processes of a test share a pipe as their stdout. Its end of file proves that all of them have ended; a
# check of pids could not, since pids are reused.
PYTHON = [sys.executable, "-c"]

BLOCK = "import threading; print('ready', flush=True); threading.Event().wait()"
CARPOOL_CHILD = f"import sys; from carpool import lifecycle; %s; {BLOCK}"
PROGRAM = ["sh", "-c", "echo ready; exec sleep 1000"]
WITHOUT_PDEATHSIG = "lifecycle._ON_LINUX = False"  # runs the code for systems without PR_SET_PDEATHSIG


@contextmanager
def python(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*PYTHON, code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def kill_and_wait_for_all(parent: subprocess.Popen[str]) -> None:
    """Kill `parent`. Raises TimeoutExpired if a descendant outlives it, and so keeps the pipe open."""
    parent.kill()
    parent.wait(EVENTUALLY_S)
    parent.communicate(timeout=EVENTUALLY_S)


# --- die_with_parent, command_that_dies_with_parent ---------------------------------------------------------


@pytest.mark.parametrize("preparation", ["pass", WITHOUT_PDEATHSIG])
def test_child_ends_when_its_parent_is_killed(preparation: str) -> None:
    child = CARPOOL_CHILD % f"{preparation}; lifecycle.die_with_parent(int(sys.argv[1]))"
    parent = f"import os, subprocess; subprocess.run({[*PYTHON, child]!r} + [str(os.getpid())])"
    with python(parent) as process:
        assert read_line(process) == "ready"
        kill_and_wait_for_all(process)


@pytest.mark.parametrize("preparation", ["pass", WITHOUT_PDEATHSIG])
def test_child_whose_parent_has_ended_already_ends_at_once(preparation: str) -> None:
    other_pid = os.getppid()
    with python(CARPOOL_CHILD % f"{preparation}; lifecycle.die_with_parent({other_pid})") as process:
        assert read_line(process) == ""
        assert process.wait(EVENTUALLY_S) == 1


# A program is launched by Python; by a shell, if the machine has `setpriv`; without it; or on another system.
LAUNCHES = [
    ("pass", ""),
    ("pass", ", reads_environment=False"),
    ("lifecycle._setpriv = list", ", reads_environment=False"),
    (WITHOUT_PDEATHSIG, ", reads_environment=False"),
]


@pytest.mark.parametrize(("preparation", "option"), LAUNCHES)
def test_program_ends_when_its_parent_is_killed(preparation: str, option: str) -> None:
    command = f"lifecycle.command_that_dies_with_parent({PROGRAM!r}{option})"
    parent = f"import subprocess; from carpool import lifecycle; {preparation}; subprocess.run({command})"
    with python(parent) as process:
        assert read_line(process) == "ready"
        kill_and_wait_for_all(process)


@pytest.mark.parametrize(("preparation", "option"), LAUNCHES)
def test_program_keeps_pid_arguments_and_exit_status(preparation: str, option: str) -> None:
    program = ["sh", "-c", 'echo "$$ $1"; exit 7', "sh", "two parts"]
    launch = f"subprocess.Popen(lifecycle.command_that_dies_with_parent({program!r}{option}))"
    parent = (
        f"import subprocess; from carpool import lifecycle; {preparation}\n"
        f"child = {launch}; print(child.wait(), child.pid)"
    )
    with python(parent) as process:
        output, _ = process.communicate(timeout=EVENTUALLY_S)
    (pid, *arguments), (status, expected_pid) = (line.split() for line in output.splitlines())
    assert (pid, arguments, status) == (expected_pid, ["two", "parts"], "7")


@pytest.mark.parametrize("option", ["", ", reads_environment=False"])
def test_program_whose_parent_has_ended_already_does_not_start(option: str) -> None:
    launch = f"lifecycle.command_that_dies_with_parent(['echo', 'started']{option})"
    of_another = f"os.getpid = os.getppid; subprocess.run({launch})"
    with python(f"import os, subprocess; from carpool import lifecycle; {of_another}") as process:
        output, _ = process.communicate(timeout=EVENTUALLY_S)
    assert output == ""


@pytest.mark.parametrize("script", ["exit 1", "exit 0"])
def test_setpriv_that_knows_no_such_option_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr(lifecycle, "_ON_LINUX", True)
    other = tmp_path / "setpriv"
    other.write_text(f"#!/bin/sh\n{script}\n")
    other.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    command = lifecycle._setpriv.__wrapped__()
    assert command == ([] if script == "exit 1" else [str(other), "--pdeathsig", "KILL"])


# --- stop_on_signals ---------------------------------------------------------------------------------------

WAIT_FOR_STOP = """
import signal
from carpool.lifecycle import stop_on_signals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, if the tests run under nohup
stop = stop_on_signals()
print("ready", flush=True)
stop.wait()
print("stopping", flush=True)
"""
STOP_SLOWLY = WAIT_FOR_STOP + "import threading; threading.Event().wait()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_sets_the_event(number: signal.Signals) -> None:
    with python(WAIT_FOR_STOP) as process:
        assert read_line(process) == "ready"
        process.send_signal(number)
        assert read_line(process) == "stopping"
        assert process.wait(EVENTUALLY_S) == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_while_stopping_exits_at_once(first: signal.Signals) -> None:
    with python(STOP_SLOWLY) as process:
        assert read_line(process) == "ready"
        process.send_signal(first)
        assert read_line(process) == "stopping"
        process.send_signal(signal.SIGINT)
        assert process.wait(EVENTUALLY_S) == 130


def test_sigterm_after_ctrl_c_does_not_interrupt_stopping() -> None:
    finish_on_input = WAIT_FOR_STOP + "input(); print('finished')"
    with subprocess.Popen(
        [*PYTHON, finish_on_input], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert read_line(process) == "ready"
        process.send_signal(signal.SIGINT)
        assert read_line(process) == "stopping"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate("now\n", timeout=EVENTUALLY_S)
    assert (output.strip(), process.returncode) == ("finished", 0)


# --- Loop --------------------------------------------------------------------------------------------------


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
        assert loop.join(EVENTUALLY_S)


def test_loop_runs_until_stopped() -> None:
    calls: SimpleQueue[str] = SimpleQueue()
    with running(lambda: calls.put(threading.current_thread().name)) as loop:
        assert [calls.get(timeout=EVENTUALLY_S) for _ in range(3)] == ["loop-under-test"] * 3
        assert loop.alive
    assert not loop.alive


def test_join_returns_whether_the_loop_has_ended() -> None:
    entered, proceed = threading.Event(), threading.Event()

    def run_once() -> None:
        entered.set()
        proceed.wait(EVENTUALLY_S)

    with running(run_once) as loop:
        assert entered.wait(EVENTUALLY_S)
        loop.stop()
        assert not loop.join(0.0)
        proceed.set()
        assert loop.join(EVENTUALLY_S)


def test_loop_may_be_stopped_twice_and_before_it_starts() -> None:
    loop = Loop("loop-under-test", lambda: pytest.fail("run_once was called after stop"), no_error_expected)
    loop.stop()
    loop.stop()
    assert loop.join()
    loop.start()
    assert loop.join(EVENTUALLY_S)


def test_loop_survives_errors_and_reports_each() -> None:
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
        assert over.wait(EVENTUALLY_S)
    reported = [str(errors.get_nowait()) for _ in range(errors.qsize())]
    assert reported == ["first", "sys.exit(3) was called in the thread loop-under-test", "last"]


def test_loop_survives_errors_of_its_error_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: SimpleQueue[type[BaseException]] = SimpleQueue()
    monkeypatch.setattr(threading, "excepthook", lambda args: printed.put(args.exc_type))

    def fail(*_: Any) -> None:
        raise BoomError

    with running(fail, fail):
        assert [printed.get(timeout=EVENTUALLY_S) for _ in range(2)] == [BoomError, BoomError]


def test_pause_doubles_with_each_error_and_ends_after_success(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([BoomError()] * 8 + [None] + [BoomError()] * 2)
    loop = Loop("loop-under-test", lambda: raise_if_error(next(outcomes)), lambda error: None)
    pauses: list[float] = []

    def record_pause(pause_s: float) -> bool:
        pauses.append(pause_s)
        return len(pauses) == 10

    monkeypatch.setattr(loop._stop, "wait", record_pause)
    loop.start()
    assert loop.join(EVENTUALLY_S)
    longest_s = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 0.05, 0.1]
    assert all(one / 2 <= pause_s <= one for pause_s, one in zip(pauses, longest_s, strict=True))


def raise_if_error(outcome: Exception | None) -> None:
    if outcome:
        raise outcome


def test_stop_interrupts_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    def run_once() -> None:
        raise BoomError

    loop = Loop("loop-under-test", run_once, lambda error: failed.set())
    monkeypatch.setattr(Backoff, "_PAUSE_MIN_S", 1_000.0)
    monkeypatch.setattr(Backoff, "_PAUSE_MAX_S", 1_000.0)
    loop.start()
    assert failed.wait(EVENTUALLY_S)
    loop.stop()
    assert loop.join(EVENTUALLY_S)


# --- keep_freed_memory --------------------------------------------------------------------------------------

# Prints the page faults of 50 batches of 64 images, each allocated and freed as a whole.
FREE_IMAGES = """
import resource
from carpool import lifecycle
%s
def batch():
    return [b"x" * 150_000 for _ in range(64)]
batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(preparation: str, **environment: str) -> int:
    code = FREE_IMAGES % preparation
    run = subprocess.run(
        [*PYTHON, code],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        timeout=EVENTUALLY_S,
    )
    return int(run.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert page_faults("lifecycle.keep_freed_memory()") < 1000
    assert page_faults("pass") > 10_000


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="not glibc")
def test_thresholds_in_the_environment_take_precedence() -> None:
    assert page_faults("lifecycle.keep_freed_memory()", MALLOC_TRIM_THRESHOLD_="131072") > 10_000
