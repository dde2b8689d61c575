"""The `carpool` command as real processes: output, exit status, signals, and processes that remain.

Commands and what they start run in new interpreters where their start is tested, and in forked ones else (see
`support.command`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import pytest

from carpool.client import Client
from carpool.keys import Keys
from carpool_cli.commands import listed
from carpool_cli.demo import listening
from carpool_cli.local import embedded, supervisor
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_cli.local.supervisor import StackPlan, Supervisor
from support.child_forking import STARTER
from support.command import Done, carpool, clean_environment, running
from support.forking import ForkedProcess, ForkServer, forked_children
from support.http import call
from support.redis_client import redis_at
from support.repository import make_repository
from support.rpc import Rpc
from support.stack import process_name
from support.waiting import wait_until

ECHO: Final = f"{Path(__file__).parent.parent / 'support' / 'models' / 'plain.py'}:Echo"
UNREACHABLE: Final = "redis://127.0.0.1:1/0"  # no server listens on port 1
IS_UP: Final = "Press Ctrl-C to stop everything."
BROKEN: Final = """
class Broken:
    def load(self, device):
        raise OSError("no weights")
    def predict(self, batch):
        return batch
"""
MISSPELLED: Final = """
class Misspelled:
    priority_policies = {0: {"max_queue_sise": 100}}
    def predict(self, batch):
        return batch
"""
SLOW: Final = """
import time
class Slow:
    def load(self, device):
        time.sleep(600)
    def predict(self, batch):
        return batch
"""
CONFIGURED: Final = """
class Told:
    max_batch_size = 3
    def __init__(self, *, text: str, token: str = ""):
        self.found = [text, len(token), self.max_batch_size]
    def predict(self, batch):
        return [self.found for _ in batch]
"""
MODELS_FILE: Final = """
[models.a]
object = "models.py:Told"
replicas = 2
parameters = { text = "of the file" }
[models.b]
object = "models:Told"
parameters = { text = "of the file" }
settings = { max_batch_size = 4 }
"""
START_S: Final = 280.0  # below the limit of a test, so that a command that hangs shows what it printed
STOP_S: Final = 30.0


def start(*arguments: str, stdin: bytes = b"", **more: str) -> Done:
    """Run a command in a new interpreter until it ends. `more` are variables."""
    command = [sys.executable, "-m", "carpool_cli", *arguments]
    variables = {**clean_environment(), **more}
    done = subprocess.run(
        command, input=stdin, capture_output=True, env=variables, timeout=START_S, check=False
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Up:
    """A running `carpool up`, with its output in a file and its data in `home`. It and its services are
    forked, or with `fresh` new interpreters."""

    def __init__(
        self, home: Path, *arguments: str, more: Mapping[str, str] = {}, fresh: bool = False
    ) -> None:
        self.output = home / "up.log"
        environment = {**clean_environment(), "TMPDIR": str(home), **more}
        self.process: ForkedProcess | subprocess.Popen[bytes]
        with self.output.open("wb") as output:
            if not fresh:
                server = ForkServer.of_this_process()
                self.process = server.start(
                    "carpool_cli", ["up", *arguments], home, environment, output, output, has_session=True
                )
                return
            self.process = subprocess.Popen(
                [sys.executable, "-m", "carpool_cli", "up", *arguments],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, expected: str) -> None:
        """Wait until it has printed this. Fails if it ends before."""
        wait_until(
            lambda: expected in self.text() or self.process.poll() is not None,
            description=f"`carpool up` prints {expected!r}",
            timeout_s=START_S,
        )
        assert expected in self.text(), f"it ended with {self.process.returncode}:\n{self.text()}"

    @property
    def url(self) -> str:
        found = re.search(r"Serving at (\S+)\.", self.text())
        assert found is not None
        return found[1]

    def child(self, name: str) -> int:
        """The pid of the child that runs this: its name says so, or its command line if it is not forked."""
        (pid,) = [
            pid for pid in children(self.process.pid) if name in f"{process_name(pid)} {command_line(pid)}"
        ]
        return pid

    def descendants(self) -> set[int]:
        """The pids of children and grandchildren: Redis, the batcher, workers and model processes."""
        direct = children(self.process.pid)
        return {*direct, *(pid for child in direct for pid in children(child))}

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        found = [int(child) for task in tasks for child in (task / "children").read_text().split()]
        return [child for child in found if process_name(child) != STARTER]
    return []


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def have_ended(pids: set[int]) -> bool:
    """Whether none of these processes runs. A zombie has no command line, and counts as ended."""
    return not any(command_line(pid) for pid in pids)


@contextlib.contextmanager
def up(home: Path, *arguments: str, more: Mapping[str, str] = {}, fresh: bool = False) -> Iterator[Up]:
    """A stack that is up, with its own Redis unless one is given. It is killed at the end of the block."""
    port = [] if "--redis-url" in arguments or more else ["--redis-port", str(embedded.free_port())]
    with Up(home, *arguments, *port, more=more, fresh=fresh) as started:
        started.wait_for(IS_UP)
        yield started


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack for all tests that do not change it."""
    with up(tmp_path_factory.mktemp("up"), "square", ECHO, "--grpc-port", "0") as started:
        yield started


# --- help and wrong command lines


def test_help_lists_the_commands_and_imports_no_library() -> None:
    script = (
        "import sys; from carpool_cli.__main__ import main; main([]); "
        "print({'numpy', 'pydantic', 'redis', 'rich', 'structlog'} & set(sys.modules))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout.decode()
    assert listed(indent=2) in printed
    assert printed.endswith("set()\n")


def test_unknown_command_is_answered_with_one_line() -> None:
    done = start("modles")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "carpool: no command 'modles'; did you mean models?\n"


# --- requests from a shell


def test_the_address_of_grpc_is_printed(square: Up) -> None:
    found = re.search(r"gRPC, for clients of Triton and KServe: (\S+)", square.text())
    assert found is not None
    with Rpc(found[1]) as rpc:
        assert rpc.call("ModelReady", name="square").ready


def test_infer_prints_the_result(square: Up) -> None:
    done = start("infer", "square", "7", "--redis-url", square.url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "49\n", "")


@pytest.mark.parametrize(
    ("body", "result"),
    [
        ('{"a": [1, null]}', '{"a":[1,null]}'),
        ("null", "null"),
        ("a text, no JSON", '"a text, no JSON"'),
        ('"a text"', '"a text"'),
        ("-5", "-5"),
    ],
)
def test_body_is_json_or_else_text(square: Up, body: str, result: str) -> None:
    done = carpool(square.url, "infer", "Echo", body)
    assert (done.returncode, done.stdout) == (0, f"{result}\n")


def test_body_comes_from_a_file_or_standard_input(square: Up, tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text("[1, 2]")
    assert carpool(square.url, "infer", "Echo", f"@{file}").stdout == "[1,2]\n"
    infer = ("infer", "Echo", "-", "--redis-url", square.url)  # new interpreters, for their standard input
    assert start(*infer, stdin=b"[3]").stdout == "[3]\n"
    assert start(*infer, "--raw", stdin="\r\nü".encode()).stdout == "\r\nü"
    missing = carpool(square.url, "infer", "Echo", f"@{tmp_path / 'nothing'}")
    assert (missing.returncode, "nothing" in missing.stderr) == (1, True)


def test_error_is_printed_on_one_line(square: Up) -> None:
    refused = carpool(square.url, "infer", "square", "seven")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert refused.stderr == "carpool infer: INVALID_ARGUMENT: body: must be a number\n"
    unknown = carpool(square.url, "infer", "cube", "7")
    assert unknown.returncode == 1
    assert "'cube'; registered: Echo, square" in unknown.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "printed"),
    [
        (["models"], 0, "square"),
        (["config", "square"], 0, "max_batch_size"),
        (["dead", "list"], 0, "dead letters"),
        (["forget", "square"], 1, "is not removed"),
        (["simulate", "--model", "cube", "--rate", "9"], 2, "'cube' is not registered"),
        (["tune", "cube", "--latency-ms", "9"], 2, "'cube' is not registered"),
    ],
)
def test_commands_start(square: Up, arguments: list[str], status: int, printed: str) -> None:
    """All other tests fork these commands; those of `infer`, `top`, `up` and `demo` start them, too."""
    done = start(*arguments, "--redis-url", square.url)
    assert done.returncode == status, done.stderr
    assert printed in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [["infer", "square", "7"], ["models"], ["up", "square"]])
def test_without_redis_the_url_and_the_remedy_are_named(arguments: list[str]) -> None:
    done = carpool(None, *arguments, "--redis-url", UNREACHABLE)
    assert done.returncode == 1
    assert UNREACHABLE in done.stderr
    assert "to have one started" in done.stderr or "carpool up" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed_as_a_table_and_as_json(square: Up) -> None:
    wait_until(
        lambda: carpool(square.url, "models").stdout.count("eager") == 2, description="policies are reported"
    )
    head, *rows = carpool(square.url, "models").stdout.splitlines()
    assert head.split()[:2] == ["model", "waiting"]
    assert [row.split() for row in rows[:2]] == [
        ["Echo", "0", "-", "0", "1", "yes", "eager", "0", "up", "to", "16"],
        ["square", "0", "-", "0", "1", "yes", "eager", "0", "up", "to", "200"],
    ]
    listed = json.loads(carpool(square.url, "models", "--json").stdout)
    assert [(one["model"], one["workers"], one["oldest_ms"]) for one in listed] == [
        ("Echo", 1, None),
        ("square", 1, None),
    ]


def test_models_shows_waiting_requests(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        assert "no model is registered" in carpool(server.url, "models").stdout
        with up(tmp_path, "square", more={"CARPOOL_REDIS_URL": server.url}) as started:
            assert started.end() == 0

        def state() -> Any:
            (row,) = json.loads(carpool(server.url, "models", "--json").stdout)
            return row

        def abandon() -> Done | None:
            """A request that times out; None if it did before it was sent."""
            done = carpool(server.url, "infer", "square", "7", "--timeout", "0.2")
            return done if state()["waiting_entries"] else None

        abandoned = wait_until(abandon, description="a request is sent before its time is over")
        assert abandoned is not None
        assert (abandoned.returncode, "carpool models" in abandoned.stderr) == (1, True)
        row = state()
        assert (row["waiting_entries"], row["workers"], row["batcher"]) == (1, 0, False)
        wait_until(lambda: state()["oldest_ms"] >= 200, description="it has waited for as long")


def test_printed_commands_work(square: Up) -> None:
    lines = [line.strip() for line in square.text().splitlines() if line.startswith("  ")]
    for_carpool, for_curl, for_redis_cli, for_python = [
        line
        for line in lines
        if "square" in line and " is served " not in line and "still loading" not in line
    ]
    assert _shell(for_carpool) == _shell(for_python) == "49\n"
    if shutil.which("curl"):
        assert _shell(for_curl) == "49"
    if shutil.which("redis-cli"):
        assert '"body":49' in _shell(for_redis_cli)


def test_a_gateway_starts_elsewhere_if_its_port_is_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        forked_children(supervisor),
        EmbeddedRedis() as server,
        socket.create_server(("127.0.0.1", 0)) as taken,
    ):
        monkeypatch.setattr(supervisor, "GATEWAY_PORT", taken.getsockname()[1])
        monkeypatch.setattr(supervisor, "is_free", lambda _: True)
        stack = Supervisor(StackPlan(["square"], server.url, gateway_port=0, logs=tmp_path))
        try:
            stack.start()
            wait_until(lambda: stack.run_once() or stack.serving, description="all is served")
            wait_until(lambda: stack.run_once() or stack.serving, description="the gateway, too")
            assert stack.gateway is not None
            assert stack.gateway.port != taken.getsockname()[1]
            assert call(stack.gateway.url, "POST", "/carpool/v1/models/square/infer", b"7").body == b"49"
        finally:
            assert stack.stop()
    assert "address already in use" in (tmp_path / "gateway.log").read_text()


def test_a_stack_without_a_gateway_and_an_operators_page(tmp_path: Path) -> None:
    with up(tmp_path, "square", "--no-gateway", "--no-console") as started:
        assert "curl" not in started.text()
        assert "Operators' page" not in started.text()
        assert len(started.descendants()) == 4


def test_the_operators_page_is_beside_the_stack(square: Up) -> None:
    """With its address, and a password that the command prints once, and its services do not."""
    found = re.search(r"Operators' page: (\S+) \(sign in as (\w+) with (\S+)\)", square.text())
    assert found is not None
    url, name, password = found.groups()
    form = f"name={name}&password={password}&next=/".encode()
    kind = "application/x-www-form-urlencoded"
    answer = call(url, "POST", "/sign-in", form, Content_Type=kind, Origin="http://localhost")
    assert (answer.code, answer.headers["location"]) == (303, "/")
    assert square.text().count(password) == 1


TENSORS: Final = """
from carpool.wire.tensors import TensorSpec
class Few:
    max_batch_sise = 4
    inputs = [
        TensorSpec("ids", "INT64", (3, -1)), TensorSpec("text", "BYTES", (1,)), TensorSpec("on", "BOOL", ())
    ]
    outputs = [TensorSpec("ids", "INT64", (3, -1))]
    def predict(self, batch):
        assert batch["text"].tolist() == [[b"hello"]]
        return {"ids": batch["ids"] + 1}
class Many:
    inputs = [TensorSpec("pixels", "FP16", (3, 224, 224))]
    outputs = [TensorSpec("label", "INT64", ())]
    def predict(self, batch):
        return batch[:, 0, 0, 0].astype("int64") + batch[0].size
"""


def test_printed_commands_fit_a_model_with_tensors(tmp_path: Path) -> None:
    (tmp_path / "tensors.py").write_text(TENSORS)
    with up(tmp_path, "tensors.py:Few", "tensors.py:Many") as started:
        lines = [line.strip() for line in started.text().splitlines() if line.startswith("  ")]
        few, many = (
            [line for line in lines if name in line and " is served " not in line] for name in ("Few", "Many")
        )
        assert "max_batch_sise is not a setting; did you mean max_batch_size?" in started.text()
        for_carpool, for_curl, for_redis_cli, for_python = few
        assert _shell(for_carpool) == '{"datatype":"INT64","shape":[3,2],"data":[1,1,1,1,1,1]}\n'
        assert _shell(for_python) == "[[1 1]\n [1 1]\n [1 1]]\n"
        if shutil.which("redis-cli"):
            assert '"data":[1,1,1,1,1,1]' in _shell(for_redis_cli)
        if shutil.which("curl"):
            assert json.loads(_shell(for_curl))["data"] == [1, 1, 1, 1, 1, 1]
        for_carpool, for_curl, for_redis_cli, for_python = many
        assert _shell(for_carpool) == _shell(for_python) == "150528\n"
        if shutil.which("curl"):
            assert _shell(for_curl) == "150528"
        if shutil.which("redis-cli"):
            assert '"body":150528' in _shell(for_redis_cli)


def _shell(line: str) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", line], env=clean_environment(), capture_output=True, timeout=START_S, check=True
    )
    return done.stdout.decode()


# --- the supervisor


@pytest.mark.parametrize("name", ["carpool_worker", "carpool_batcher", "carpool_gateway", "redis-server"])
def test_killed_process_is_restarted(tmp_path: Path, name: str) -> None:
    with up(tmp_path, "square") as started:
        killed = started.child(name)
        os.kill(killed, signal.SIGKILL)
        started.wait_for("child process ended, restarting it")
        started.wait_for("child process restarted")
        if name == "carpool_worker":
            started.wait_for("model served again")

        assert carpool(started.url, "infer", "square", "7").stdout == "49\n"
        assert started.child(name) != killed
        assert started.end() == 0


def test_no_child_survives_a_killed_supervisor(tmp_path: Path) -> None:
    with up(tmp_path, "square", "--grpc-port", "0", fresh=True) as started:
        assert carpool(started.url, "infer", "square", "7").stdout == "49\n"
        pids = started.descendants()
        assert len(pids) == 6, "Redis, a batcher, a worker and its model process, a gateway, a console"
        started.process.kill()
        wait_until(lambda: have_ended(pids), description="every child and grandchild has ended")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stop_lets_the_workers_finish_and_removes_everything(tmp_path: Path, number: signal.Signals) -> None:
    gate = tmp_path / "gate"
    body = json.dumps({"gate": str(gate)})
    with (
        up(tmp_path, ECHO, fresh=number == signal.SIGINT) as started,
        running(started.url, "infer", "Echo", body) as infer,
    ):
        pids = started.descendants()
        wait_until(lambda: _in_flight(started.url) == 1, description="the request is in flight")
        os.killpg(started.process.pid, number)  # as a terminal does for Ctrl-C: to the whole process group
        started.wait_for("Stopping")
        assert _in_flight(started.url) == 1, "Redis still runs, so that the worker can commit"
        gate.touch()

        done = infer.end(STOP_S)
        assert (done.returncode, json.loads(done.stdout)) == (0, {"gate": str(gate)})
        assert started.process.wait(STOP_S) == 0
        assert started.text().rstrip().endswith("Stopped.")
        assert have_ended(pids)
        assert list(tmp_path.glob("carpool-*/*")) == []


def _in_flight(url: str) -> int:
    (row,) = json.loads(carpool(url, "models", "--json").stdout)
    batches: int = row["batches_in_flight"]
    return batches


def test_up_exits_with_the_reason_if_a_model_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with Up(tmp_path, "square", "broken.py:Broken", "--redis-port", str(embedded.free_port())) as started:
        assert started.process.wait(START_S) == 1
        (line,) = [line for line in started.text().splitlines() if "no weights" in line]
        event = json.loads(line)  # the traceback is a part of it
        assert event["event"] == "model cannot be loaded"
        assert (event["model"], event["location"]) == ("Broken", "broken.py:Broken")
        assert "in load" in event["exception"]
        assert event["exception"].strip().endswith("OSError: no weights")
        assert "the worker of Broken ended with exit status 1" in started.text().splitlines()[-1]
        assert list(tmp_path.glob("carpool-*/*")) == []


def test_up_serves_a_file_of_models_with_what_the_command_line_replaces(tmp_path: Path) -> None:
    """Also after the worker of a model was restarted."""
    (tmp_path / "models.py").write_text(CONFIGURED)
    (tmp_path / "carpool.toml").write_text(MODELS_FILE)
    (tmp_path / "token").write_text("s3cret-of-up\n")
    flags = ["--param", "a.text=from a flag", "--param-file", "a.token=token", "--set", "b.max_batch_size=5"]
    with up(tmp_path, "carpool.toml", *flags) as started:
        assert re.search("a is served after .*: 2 processes, batches of up to 3", started.text())
        assert re.search("b is served after .*: 1 process, batches of up to 5", started.text())
        assert carpool(started.url, "infer", "a", "1").stdout == '["from a flag",12,3]\n'
        assert carpool(started.url, "infer", "b", "1").stdout == '["of the file",0,5]\n'
        for model, source in (("a", "model"), ("b", "--set")):
            row = carpool(started.url, "config", model, "max_batch_size").stdout.splitlines()[1]
            assert row.split()[2] == source
        with redis_at(started.url) as client:
            (worker,) = client.zrange("carpool:{b}:workers", 0, -1)
        os.kill(int(worker.decode().rsplit("-", 2)[1]), signal.SIGKILL)  # HOST-PID-NUMBER/REPLICA
        started.wait_for("model served again")
        assert carpool(started.url, "infer", "b", "1").stdout == '["of the file",0,5]\n'
        for pid in started.descendants():
            assert "s3cret" not in command_line(pid)
        assert started.end() == 0
        assert "s3cret" not in started.text()


def test_up_serves_models_of_a_repository_and_more_when_they_are_loaded(tmp_path: Path) -> None:
    make_repository(tmp_path / "models", entries=("echo", "other"), versions=2)
    with up(tmp_path, "models", "--load", "echo", "--replicas", "2", "--no-gateway") as started:
        assert re.search("echo is served after .*: 2 processes, batches of up to 64", started.text())
        assert carpool(started.url, "infer", "echo", '"a"').stdout == '"2:a"\n'
        os.kill(started.child("carpool_worker"), signal.SIGKILL)  # the node, which is started again
        carpool(started.url, "load", "echo", "--version", "1", check=True)
        assert carpool(started.url, "infer", "echo", '"a"').stdout == '"1:a"\n'
        pids = started.descendants()
        assert started.end() == 0
    assert have_ended(pids)


def test_up_says_what_is_wrong_with_a_repository(tmp_path: Path) -> None:
    empty = carpool(None, "up", str(tmp_path))
    assert empty.returncode == 2 and "has no models" in empty.stderr
    make_repository(tmp_path, versions=1)
    for flags, error in (
        (("--load", "nothing"), "there is no model 'nothing'"),
        (("--param", "a=1"), "--param: not with a repository"),
        (("square",), "give it alone"),
    ):
        refused = carpool(None, "up", str(tmp_path), *flags)
        assert refused.returncode == 2 and error in refused.stderr
    assert "--load" in carpool(None, "up", "square", "--load", "a").stderr


def test_up_exits_with_one_line_if_a_setting_is_invalid(tmp_path: Path) -> None:
    (tmp_path / "misspelled.py").write_text(MISSPELLED)
    with Up(tmp_path, "misspelled.py:Misspelled", "--redis-port", str(embedded.free_port())) as started:
        assert started.process.wait(START_S) == 1
        assert "max_queue_sise is not one of max_queue_size, " in started.text()
        assert "Traceback" not in started.text()


POLICIES: Final = """
class Pairs:
    def include(self, batch, request):
        return True
class Without:
    pass
class Raising(Pairs):
    def __init__(self):
        raise LookupError("no table")
def choose(batch, request):
    return True
class Declaring:
    policy = "mine.py:Pairs"
    def predict(self, batch):
        return batch
"""


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("mine.py:Missing", "'mine.py:Missing': mine.py has no 'Missing'"),
        ("theirs.py:Pairs", "file 'theirs.py' does not exist (working directory: "),
        ("mine.py:Without", "'mine.py:Without' has no method 'include': write include(self, batch, request)"),
        (
            "mine.py:choose",
            "'mine.py:choose' is a function: name a class with a method include(self, batch, ",
        ),
        (
            "mine.py:Raising",
            "'mine.py:Raising' cannot be created: its constructor, which gets no arguments, raised "
            "LookupError: no table",
        ),
    ],
)
def test_up_refuses_a_policy_that_cannot_be_used(tmp_path: Path, policy: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(POLICIES)
    with Up(tmp_path, "square", "--policies", policy) as started:
        assert started.process.wait(START_S) == 2
        assert started.text().startswith(f"carpool up: --policies: {message}")
        assert len(started.text().splitlines()) == 1


def test_up_refuses_a_model_that_declares_a_policy_which_the_batcher_does_not_have(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICIES)
    with Up(tmp_path, "mine.py:Declaring", "--redis-port", str(embedded.free_port())) as started:
        assert started.process.wait(START_S) == 1
        assert started.text().splitlines()[-1] == (
            "carpool up: the model Declaring declares the policy 'mine.py:Pairs', which the batcher does not "
            "have; add --policies mine.py:Pairs, or remove the declaration"
        )
    with up(tmp_path, "mine.py:Declaring", "--policies", "mine.py:Pairs") as started:
        assert "WARNING" not in started.text()


def test_up_warns_of_an_override_that_the_batcher_rejects(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(POLICIES)
    with EmbeddedRedis() as server, redis_at(server.url) as redis:
        redis.hset(Keys("Declaring").overrides, "policy", "theirs.py:Pairs")
        with up(tmp_path, "mine.py:Declaring", more={"CARPOOL_REDIS_URL": server.url}) as started:
            assert (
                "  WARNING: the overrides of Declaring are not in force, because the batcher does not have "
                "their policy theirs.py:Pairs.\n"
                "  Start again with --policies theirs.py:Pairs, or remove it: "
                "carpool config Declaring policy=\n"
            ) in started.text()
            assert '(In place of "hello", send what Declaring takes.)' in started.text()


def test_stop_does_not_wait_for_a_loading_model(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with Up(tmp_path, "slow.py:Slow", "--redis-port", str(embedded.free_port())) as started:
        # Redis, the batcher, the worker, its model process, the gateway and the operators' page.
        wait_until(lambda: len(started.descendants()) == 6, description="the model loads", timeout_s=START_S)
        pids = started.descendants()
        assert started.end() == 0
        wait_until(lambda: have_ended(pids), description="its model process has ended too")


@pytest.mark.parametrize("source", ["--redis-url", "CARPOOL_REDIS_URL"])
def test_given_redis_is_used_and_not_stopped(tmp_path: Path, source: str) -> None:
    with EmbeddedRedis() as server:
        arguments = ["square", source, server.url] if source.startswith("--") else ["square"]
        more = {} if source.startswith("--") else {source: server.url}
        with up(tmp_path, *arguments, more=more) as started:
            assert f"Using Redis at {server.url}, from {source}." in started.text()
            assert "In place of" not in started.text()
            assert not [pid for pid in children(started.process.pid) if "redis-server" in command_line(pid)]
            assert carpool(server.url, "infer", "square", "7").stdout == "49\n"
            assert started.end() == 0
        assert server.alive


def test_given_data_directory_is_kept(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, "square", "--data-dir", str(data)) as started:
        second = carpool(None, "up", "square", "--data-dir", str(data))
        assert second.returncode == 1
        assert f"{data} is in use by the Redis of process {started.process.pid}" in second.stderr
        assert started.end() == 0
    with EmbeddedRedis(data_dir=data) as server:
        (row,) = json.loads(carpool(server.url, "models", "--json").stdout)
        assert (row["model"], row["workers"]) == ("square", 0)


# --- the demo


FRAMES: Final = (listening.MICROPHONES + listening.ALONE) * listening.FRAMES


def test_small_demo_succeeds(tmp_path: Path) -> None:
    done = start("demo", "--queries", "300", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for expected in (
        "300 queries, each a request of its own",
        "zipfile.ZipFile.read",
        "requests/s  mean batch",
        "full",
        "880 squares",
        "Return the ",
        "in steps, sent as they are written",
        "the batch reached max_batch_size",
        "50 of 50 sampled results equal those of direct calls, every square is",
        "correct, the chunks of every text make up its output,",
        "and microphones are heard as by direct calls.",
    ):
        assert expected in done.stdout
    # What is sent one at a time ends after ten seconds, which a busy machine may reach.
    at_once, one_at_a_time = (
        int(sent) for sent in re.findall(r"^  (\d+) in .*requests/s", done.stdout, re.M)[:2]
    )
    assert 0 < one_at_a_time <= at_once == 300
    sent = at_once + one_at_a_time + 8 + 2 * 880 + 2 * 51 + FRAMES
    assert f"{sent:,} requests, each with a result, in " in done.stdout
    assert "\r" not in done.stdout
    assert "\x1b" not in done.stdout
    assert list(tmp_path.glob("carpool-demo-*")) == list(tmp_path.glob("carpool-*/*")) == []


# --- loading a changed file again


def test_reload_serves_changed_files_and_keeps_the_old_model_after_an_error(tmp_path: Path) -> None:
    """Given a model and the TOML file that declares it."""
    model, declared = tmp_path / "model.py", tmp_path / "answer.toml"
    program = (
        "class Answer:\n"
        "    def load(self, device, *, value: int):\n"
        "        self.value = value\n"
        "    def predict(self, batch):\n"
        "        return [self.value for _ in batch]\n"
    )
    declaration = 'object = "model.py:Answer"\n[parameters]\nvalue = '
    model.write_text(program)
    declared.write_text(f"{declaration}1\n")
    with up(tmp_path, "answer.toml", "--reload", "--no-gateway") as stack, Client(stack.url) as client:
        assert client.infer("answer", 0) == 1
        model.write_text("def answer(batch):\n    return [2 for _ in\n")
        stack.wait_for("answer is not loaded again: ")
        assert "model.py, line 2" in stack.text() and client.infer("answer", 0) == 1
        model.write_text("raise OSError('no weights')\n")
        stack.wait_for("answer cannot be loaded again")
        assert "no weights" in stack.text() and client.infer("answer", 0) == 1
        declared.write_text(declaration)
        stack.wait_for("answer.toml is not a TOML file")
        futures = [client.submit("answer", 0) for _ in range(100)]
        model.write_text(program)
        declared.write_text(f"{declaration}33\n")
        stack.wait_for("answer is served from the changed file")
        wait_until(lambda: client.infer("answer", 0) == 33, description="the old worker has left")
        assert {future.result() for future in futures} <= {1, 33}
        before = stack.descendants()
        assert stack.end() == 0
    assert have_ended(before)
