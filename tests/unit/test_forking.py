"""A forked service is what a new interpreter would be: its environment, its streams, its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import carpool
from carpool.lifecycle import command_that_dies_with_parent
from support.forking import ForkedProcess, ForkServer, Template, forked_children
from support.waiting import EVENTUALLY_S, wait_until

# A service that tells what it was given, then does what its first argument says.
PROGRAM: Final = textwrap.dedent(
    """
    import atexit, ctypes, json, os, signal, subprocess, sys, threading
    from support.child_forking import Starting, fork_children
    def ended_by_parent():
        number = ctypes.c_int()
        ctypes.CDLL(None).prctl(2, ctypes.byref(number))  # PR_GET_PDEATHSIG
        return number.value
    def main(argv):
        if argv[0] == "start":
            program = fork_children(Starting(["probe.__main__"], None, 1))
            if program is not None:
                return program()
            for ending in ("0", "1", "2"):
                child = subprocess.Popen([sys.executable, "-P", "-m", "probe", "end", ending])
                assert child.wait() == int(ending)
            return 0
        print(json.dumps({
            "argv": argv,
            "sys_argv": sys.argv[1:],
            "path": os.getcwd() in sys.path,
            "folder": os.getcwd(),
            "pid": os.getpid(),
            "environment": dict(os.environ),
            "descriptors": len(os.listdir("/proc/self/fd")) - 1,
            "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "parent": os.getppid(),
            "ended_by_parent": ended_by_parent(),
            "sigterm": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
            "session": os.getsid(0),
            "stdin": sys.stdin.read(),
        }), flush=True)
        if argv[0] == "wait":
            threading.Event().wait()
        if argv[0] == "raise":
            raise ValueError("an error of the service")
        if argv[0] == "end later":
            threading.Thread(target=lambda: print("a thread that is waited for")).start()
            atexit.register(print, "at exit")
        return int(argv[1])
    """
)
Start = Callable[..., ForkedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the program with these arguments; its output is in `output`."""
    package = tmp_path / "probe"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM)
    server = ForkServer.of_this_process()
    started: list[ForkedProcess] = []

    def run(*argv: str, **environment: str) -> ForkedProcess:
        with (tmp_path / "output").open("wb") as output:
            started.append(server.start("probe", argv, tmp_path, environment, output, output))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait(EVENTUALLY_S)


def told(tmp_path: Path) -> dict[str, Any]:
    """What the service has told about itself."""
    output = tmp_path / "output"
    wait_until(lambda: "\n" in output.read_text(), description="the service tells what it was given")
    found: dict[str, Any] = json.loads(output.read_text().splitlines()[0])
    return found


def test_a_service_gets_what_a_new_interpreter_would(start: Start, tmp_path: Path) -> None:
    process = start("end", "0", SOME="value")
    assert process.wait(EVENTUALLY_S) == 0
    assert told(tmp_path) == {
        "argv": ["end", "0"],
        "sys_argv": ["end", "0"],
        "path": False,
        "folder": str(tmp_path),
        "pid": process.pid,
        "environment": {"SOME": "value"},
        "descriptors": 3,
        "sigint": True,
        "parent": ForkServer.of_this_process().pid,
        "ended_by_parent": signal.SIGKILL,
        "sigterm": True,
        "session": os.getsid(0),
        "stdin": "",
    }


def test_packages_of_carpool_may_be_replaced(tmp_path: Path) -> None:
    """Also where other modules of Carpool, which the fork server has imported, use what is replaced. What an
    interpreter imports first may be there, too."""
    copied = tmp_path / "packages" / "carpool"
    shutil.copytree(Path(carpool.__file__).parent, copied)
    with (copied / "lifecycle.py").open("a") as file:
        file.write('def stop_on_signals(): raise RuntimeError("replaced")\n')
    (copied.parent / "sitecustomize.py").write_text('print("customized", flush=True)')
    output = tmp_path / "output"
    with output.open("wb") as written:
        server = ForkServer.of_this_process()
        environment = {"CARPOOL_REDIS_URL": "redis://127.0.0.1:1"}
        process = server.start(
            "carpool_batcher", [], tmp_path, environment, written, written, packages=copied.parent
        )
        assert process.wait(EVENTUALLY_S) == 1
    assert "customized" in output.read_text()
    assert "RuntimeError: replaced" in output.read_text()


def test_what_this_process_starts_is_forked_as_its_child(start: Start, tmp_path: Path) -> None:
    command = command_that_dies_with_parent([sys.executable, "-P", "-m", "probe", "wait", "0"])
    with forked_children(sys.modules[__name__]), (tmp_path / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=tmp_path, env={"A": "b"}, stdout=output, stderr=output, start_new_session=True
        )
    found = told(tmp_path)
    assert found["pid"] == found["session"] == process.pid
    assert found["parent"] == os.getpid()
    assert (found["argv"], found["environment"], found["descriptors"]) == (["wait", "0"], {"A": "b"}, 3)
    assert process.poll() is None
    process.terminate()
    assert process.wait(EVENTUALLY_S) == -signal.SIGTERM


@pytest.mark.parametrize(("argv", "status"), [(("end", "0"), 0), (("end", "7"), 7), (("raise", "0"), 1)])
def test_the_exit_status_is_that_of_the_service(
    start: Start, tmp_path: Path, argv: tuple[str, ...], status: int
) -> None:
    process = start(*argv)
    assert process.wait(EVENTUALLY_S) == status == process.poll() == process.returncode
    assert ("ValueError: an error of the service" in (tmp_path / "output").read_text()) == (status == 1)


def test_threads_and_exit_functions_are_waited_for(start: Start, tmp_path: Path) -> None:
    assert start("end later", "0").wait(EVENTUALLY_S) == 0
    assert (tmp_path / "output").read_text().splitlines()[1:] == ["a thread that is waited for", "at exit"]


def test_signals_reach_it_and_are_its_status(start: Start, tmp_path: Path) -> None:
    process = start("wait", "0")
    told(tmp_path)
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.terminate()
    assert process.wait(EVENTUALLY_S) == -signal.SIGTERM


def test_a_pid_is_not_given_to_another_before_the_status_was_read(start: Start) -> None:
    process = start("end", "3")
    wait_until(lambda: _state(process.pid) == "Z", description="the process has ended")
    assert process.wait(EVENTUALLY_S) == process.poll() == 3
    wait_until(lambda: _state(process.pid) is None, description="its pid is given up")
    process.kill()  # is no longer sent


def test_what_a_service_starts_is_forked_as_its_child(start: Start, tmp_path: Path) -> None:
    """By the process that waits for what is started first, then by the starter."""
    process = start("start", A="b")
    assert process.wait(EVENTUALLY_S) == 0, (tmp_path / "output").read_text()
    children = [json.loads(line) for line in (tmp_path / "output").read_text().splitlines()]
    assert [child["argv"] for child in children] == [["end", ending] for ending in "012"]
    assert len({process.pid, *(child["pid"] for child in children)}) == 4
    for child in children:
        assert (child["parent"], child["environment"], child["folder"]) == (
            process.pid,
            {"A": "b"},
            str(tmp_path),
        )
        assert (child["ended_by_parent"], child["sigint"], child["sigterm"]) == (0, True, True)
        assert (child["descriptors"], child["stdin"]) == (3, "")


def test_services_end_with_the_process_of_tests(tmp_path: Path) -> None:
    """The process that starts them may be killed at any moment; others of the same test run go on."""
    (tmp_path / "probe").mkdir()
    (tmp_path / "probe" / "__main__.py").write_text(PROGRAM)
    starter = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from support.forking import ForkServer, Template
        Template.use({Template.of_this_run()!r})
        folder = Path({str(tmp_path)!r})
        with open(folder / "output", "wb") as output:
            server = ForkServer.of_this_process()
            process = server.start("probe", ["wait"], folder, {{}}, output, output)
        print(process.pid, flush=True)
        time.sleep(60)
        """
    )
    server = ForkServer.of_this_process()
    command = [sys.executable, "-c", starter]
    folder = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        told(tmp_path)
        process.kill()
    wait_until(lambda: _state(pid) in (None, "Z"), description="the service ends with its starter")
    assert ForkServer.of_this_process() is server and server.is_alive


def test_the_template_ends_with_the_test_run() -> None:
    starter = textwrap.dedent(
        """
        import time
        from support.forking import Template
        Template.of_this_run()
        time.sleep(60)
        """
    )
    command = [sys.executable, "-c", starter]
    with subprocess.Popen(command, cwd=Path(__file__).parents[1]) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(children.read_text, description="it is started")
        pid = int(children.read_text())
        wait_until(lambda: "template" in _command_line(pid), description="it runs")
        process.kill()
    wait_until(lambda: _state(pid) in (None, "Z"), description="it ends with the process that started it")


def _command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None
