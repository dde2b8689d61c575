"""The `carpool` command as a person meets it: real processes, their output, their exit status, their end."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple, Self

import pytest

from carpool_cli.local import embedded
from carpool_cli.local.embedded import EmbeddedRedis
from support.waiting import wait_until

ECHO: Final = f"{Path(__file__).parent.parent / 'support' / 'models' / 'plain.py'}:Echo"
NOBODY: Final = "redis://127.0.0.1:1/0"  # nothing listens on port 1
CAME_UP: Final = "Ctrl-C stops."
BROKEN: Final = """
class Broken:
    def load(self, device):
        raise OSError("no weights")
    def predict(self, batch):
        return batch
"""
UNSETTLED: Final = """
class Unsettled:
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
START_S: Final = 120.0  # a cold interpreter or three on a machine that is busy with something else
STOP_S: Final = 30.0


def environment(**more: str) -> dict[str, str]:
    """Ours, without settings of Carpool's but these."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    return {**ours, **more}


class Done(NamedTuple):
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str


def carpool(*words: str, url: str | None = None, stdin: bytes = b"", **more: str) -> Done:
    """Run a command to its end; `url` is for its environment."""
    if url is not None:
        more["CARPOOL_REDIS_URL"] = url
    command = [sys.executable, "-m", "carpool_cli", *words]
    done = subprocess.run(
        command, input=stdin, capture_output=True, env=environment(**more), timeout=START_S, check=False
    )
    stdout, stderr = (output.decode(errors="replace") for output in (done.stdout, done.stderr))
    return Done(done.returncode, stdout, stderr)


class Up:
    """A `carpool up` that runs, with its output in a file and its data in `home`."""

    def __init__(self, home: Path, *words: str, more: Mapping[str, str] = {}) -> None:
        self.output = home / "up.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "carpool_cli", "up", *words],
                cwd=home,
                env=environment(TMPDIR=str(home), **more),
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

    def said(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, words: str, times: int = 1) -> None:
        """Until it has said this so often. Fails if it ends before."""
        wait_until(
            lambda: self.said().count(words) >= times or self.process.poll() is not None,
            description=f"`carpool up` says {words!r}",
            timeout_s=START_S,
        )
        assert self.said().count(words) >= times, f"it ended with {self.process.returncode}:\n{self.said()}"

    @property
    def url(self) -> str:
        found = re.search(r"Serving at (\S+)\.", self.said())
        assert found is not None
        return found[1]

    def child(self, words: str) -> int:
        """The pid of the child with these words in its command line."""
        (pid,) = [pid for pid in children(self.process.pid) if words in command_line(pid)]
        return pid

    def family(self) -> set[int]:
        """The pids of children and grandchildren: Redis, the batcher, workers and model processes."""
        own = children(self.process.pid)
        return {*own, *(pid for one in own for pid in children(one))}

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").iterdir()
        return [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return []


def command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def gone(pids: set[int]) -> bool:
    """Whether none of these processes runs; one that nobody has waited for yet is but a name."""
    return not any(command_line(pid) for pid in pids)


@contextlib.contextmanager
def up(home: Path, *words: str, more: Mapping[str, str] = {}) -> Iterator[Up]:
    """A stack that has come up, on a Redis port of its own unless told of a Redis. It ends with the block."""
    given = [] if "--redis-url" in words or more else ["--redis-port", str(embedded._free_port())]
    with Up(home, *words, *given, more=more) as started:
        started.wait_for(CAME_UP)
        yield started


@pytest.fixture(scope="module")
def square(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A stack for the tests that leave it as it is."""
    with up(tmp_path_factory.mktemp("up"), "square", ECHO) as started:
        yield started


# --- Help, and what is wrong with a command line


def test_alone_it_shows_its_commands_and_loads_nothing_heavy() -> None:
    script = (
        "import sys; from carpool_cli.__main__ import main; main([]); "
        "print({'numpy', 'pydantic', 'redis', 'structlog'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout.decode()
    for command in ("up", "infer", "models", "top", "demo", "worker", "batcher", "version"):
        assert f"carpool {command}" in said
    assert said.endswith("set()\n")


def test_a_command_line_that_makes_no_sense_is_answered_in_a_line() -> None:
    done = carpool("modles")
    assert (done.status, done.stdout) == (2, "")
    assert done.stderr == "carpool: no command 'modles'; did you mean models?\n"


# --- Requests from a shell


def test_infer_prints_the_result(square: Up) -> None:
    done = carpool("infer", "square", "7", "--redis-url", square.url)
    assert (done.status, done.stdout, done.stderr) == (0, "49\n", "")


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
def test_a_body_is_json_or_else_a_text(square: Up, body: str, result: str) -> None:
    done = carpool("infer", "Echo", body, url=square.url)
    assert (done.status, done.stdout) == (0, f"{result}\n")


def test_a_body_comes_from_a_file_or_from_standard_input(square: Up, tmp_path: Path) -> None:
    file = tmp_path / "body.json"
    file.write_text("[1, 2]")
    assert carpool("infer", "Echo", f"@{file}", url=square.url).stdout == "[1,2]\n"
    assert carpool("infer", "Echo", "-", stdin=b"[3]", url=square.url).stdout == "[3]\n"
    assert carpool("infer", "Echo", "-", "--raw", stdin="\r\nü".encode(), url=square.url).stdout == "\r\nü"
    missing = carpool("infer", "Echo", f"@{tmp_path / 'nothing'}", url=square.url)
    assert (missing.status, "nothing" in missing.stderr) == (1, True)


def test_an_error_is_a_line(square: Up) -> None:
    refused = carpool("infer", "square", "seven", url=square.url)
    assert (refused.status, refused.stdout) == (1, "")
    assert refused.stderr == "carpool infer: INVALID_ARGUMENT: body: must be a number\n"
    unknown = carpool("infer", "cube", "7", url=square.url)
    assert unknown.status == 1
    assert "'cube'; registered: Echo, square" in unknown.stderr


@pytest.mark.parametrize("words", [["infer", "square", "7"], ["models"], ["up", "square"]])
def test_without_redis_the_url_and_the_remedy_are_named(words: list[str]) -> None:
    done = carpool(*words, "--redis-url", NOBODY)
    assert done.status == 1
    assert NOBODY in done.stderr
    assert "Redis of our own" in done.stderr or "carpool up" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed_for_a_person_and_for_a_program(square: Up) -> None:
    head, *rows = carpool("models", url=square.url).stdout.splitlines()
    assert head.split()[:2] == ["model", "waiting"]
    assert [row.split() for row in rows] == [
        ["Echo", "0", "-", "0", "1", "yes", "0", "up", "to", "16"],
        ["square", "0", "-", "0", "1", "yes", "0", "up", "to", "200"],
    ]
    listed = json.loads(carpool("models", "--json", url=square.url).stdout)
    assert [(one["model"], one["workers"], one["oldest_ms"]) for one in listed] == [
        ("Echo", 1, None),
        ("square", 1, None),
    ]


def test_models_tell_what_waits(tmp_path: Path) -> None:
    with EmbeddedRedis() as server:
        assert "no model is registered" in carpool("models", url=server.url).stdout
        with up(tmp_path, "square", more={"CARPOOL_REDIS_URL": server.url}) as started:
            assert started.end() == 0
        abandoned = carpool("infer", "square", "7", "--timeout", "0.2", url=server.url)
        assert (abandoned.status, "carpool models" in abandoned.stderr) == (1, True)
        (row,) = json.loads(carpool("models", "--json", url=server.url).stdout)
        assert (row["waiting_entries"], row["workers"], row["batcher"]) == (1, 0, False)
        assert row["oldest_ms"] >= 200


def test_the_lines_to_paste_work(square: Up) -> None:
    said = [line.strip() for line in square.said().splitlines() if line.startswith("  ")]
    for_carpool, for_redis_cli, for_python = [
        line for line in said if "square" in line and " is served " not in line
    ]
    assert _shell(for_carpool) == _shell(for_python) == "49\n"
    if shutil.which("redis-cli"):
        assert '"body":49' in _shell(for_redis_cli)


TENSORS: Final = """
from carpool.wire.tensors import TensorSpec
class Few:
    max_batch_sise = 4
    inputs = [
        TensorSpec("ids", "INT64", (3, -1)), TensorSpec("text", "BYTES", (1,)), TensorSpec("on", "BOOL", ())
    ]
    outputs = [TensorSpec("ids", "INT64", (3, -1))]
    def predict(self, batch):
        assert batch["text"].tolist() == [["hello"]]
        return {"ids": batch["ids"] + 1}
class Many:
    inputs = [TensorSpec("pixels", "FP16", (3, 224, 224))]
    outputs = [TensorSpec("label", "INT64", ())]
    def predict(self, batch):
        return batch[:, 0, 0, 0].astype("int64") + batch[0].size
"""


def test_the_lines_to_paste_fit_a_model_with_tensors(tmp_path: Path) -> None:
    (tmp_path / "tensors.py").write_text(TENSORS)
    with up(tmp_path, "tensors.py:Few", "tensors.py:Many") as started:
        said = [line.strip() for line in started.said().splitlines() if line.startswith("  ")]
        few, many = (
            [line for line in said if name in line and " is served " not in line] for name in ("Few", "Many")
        )
        assert "max_batch_sise is no setting; did you mean max_batch_size?" in started.said()
        for_carpool, for_redis_cli, for_python = few
        assert _shell(for_carpool) == '{"datatype":"INT64","shape":[3,2],"data":[1,1,1,1,1,1]}\n'
        assert _shell(for_python) == "[[1 1]\n [1 1]\n [1 1]]\n"
        if shutil.which("redis-cli"):
            assert '"data":[1,1,1,1,1,1]' in _shell(for_redis_cli)
        for_carpool, for_redis_cli, for_python = many
        assert _shell(for_carpool) == _shell(for_python) == "150528\n"
        if shutil.which("redis-cli"):
            assert '"body":150528' in _shell(for_redis_cli)


def _shell(line: str) -> str:
    done = subprocess.run(
        ["/bin/sh", "-c", line], env=environment(), capture_output=True, timeout=START_S, check=True
    )
    return done.stdout.decode()


# --- The supervisor


@pytest.mark.parametrize("who", ["carpool_worker", "carpool_batcher", "redis-server"])
def test_what_dies_is_started_again(tmp_path: Path, who: str) -> None:
    with up(tmp_path, "square") as started:
        victim = started.child(who)
        os.kill(victim, signal.SIGKILL)
        started.wait_for("died, starts again")
        started.wait_for("started again")
        if who == "carpool_worker":
            started.wait_for("serves again")

        assert carpool("infer", "square", "7", "--redis-url", started.url).stdout == "49\n"
        assert started.child(who) != victim
        assert started.end() == 0


def test_no_child_outlives_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with up(tmp_path, "square") as started:
        family = started.family()
        assert len(family) == 4, "Redis, a batcher, a worker and its model process"
        started.process.kill()
        wait_until(lambda: gone(family), description="every child and grandchild is gone")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_the_workers_finish_and_leaves_nothing_behind(
    tmp_path: Path, number: signal.Signals
) -> None:
    gate = tmp_path / "gate"
    with up(tmp_path, ECHO) as started:
        family = started.family()
        asking = subprocess.Popen(
            [sys.executable, "-m", "carpool_cli", "infer", "Echo", json.dumps({"gate": str(gate)})],
            env=environment(CARPOOL_REDIS_URL=started.url),
            stdout=subprocess.PIPE,
        )
        wait_until(lambda: _in_flight(started.url) == 1, description="the request is in flight")
        os.killpg(started.process.pid, number)  # as a terminal does for Ctrl-C: to the whole process group
        started.wait_for("Stopping")
        assert _in_flight(started.url) == 1, "Redis is there, for the worker to commit to"
        gate.touch()

        answer, _ = asking.communicate(timeout=STOP_S)
        assert (asking.returncode, json.loads(answer)) == (0, {"gate": str(gate)})
        assert started.process.wait(STOP_S) == 0
        assert started.said().rstrip().endswith("Stopped.")
        assert gone(family)
        assert list(tmp_path.glob("carpool-*/*")) == []


def _in_flight(url: str) -> int:
    (row,) = json.loads(carpool("models", "--json", url=url).stdout)
    batches: int = row["batches_in_flight"]
    return batches


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    with Up(tmp_path, "square", "broken.py:Broken", "--redis-port", str(embedded._free_port())) as started:
        assert started.process.wait(START_S) == 1
        assert "no weights" in started.said()
        assert "the worker of Broken ended with exit status 1" in started.said().splitlines()[-1]
        assert list(tmp_path.glob("carpool-*/*")) == []


def test_a_setting_that_makes_no_sense_ends_it_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "unsettled.py").write_text(UNSETTLED)
    with Up(tmp_path, "unsettled.py:Unsettled", "--redis-port", str(embedded._free_port())) as started:
        assert started.process.wait(START_S) == 1
        assert "max_queue_sise is not one of max_queue_size, " in started.said()
        assert "Traceback" not in started.said()


def test_a_stop_does_not_wait_for_a_model_that_loads_for_ever(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with Up(tmp_path, "slow.py:Slow", "--redis-port", str(embedded._free_port())) as started:
        wait_until(lambda: len(started.family()) == 4, description="the model loads", timeout_s=START_S)
        family = started.family()
        assert started.end() == 0
        wait_until(lambda: gone(family), description="its model process is gone as well")


@pytest.mark.parametrize("by", ["--redis-url", "CARPOOL_REDIS_URL"])
def test_a_redis_that_is_given_is_used_and_left_alone(tmp_path: Path, by: str) -> None:
    with EmbeddedRedis() as server:
        words = ["square", by, server.url] if by.startswith("--") else ["square"]
        more = {} if by.startswith("--") else {by: server.url}
        with up(tmp_path, *words, more=more) as started:
            assert f"as {by} says" in started.said()
            assert not [pid for pid in children(started.process.pid) if "redis-server" in command_line(pid)]
            assert carpool("infer", "square", "7", "--redis-url", server.url).stdout == "49\n"
            assert started.end() == 0
        assert server.alive


def test_data_that_are_to_stay_do(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with up(tmp_path, "square", "--data-dir", str(data)) as started:
        assert started.end() == 0
    with EmbeddedRedis(data_dir=data) as server:
        (row,) = json.loads(carpool("models", "--json", url=server.url).stdout)
        assert (row["model"], row["workers"]) == ("square", 0)


# --- The demo


def test_a_small_demo_finds_nothing_wrong(tmp_path: Path) -> None:
    done = carpool("demo", "--queries", "300", TMPDIR=str(tmp_path))
    assert done.status == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for words in (
        "300 queries, each a request of its own",
        "zipfile.ZipFile.read",
        "requests/s  mean batch",
        "full",
        "880 squares",
        "nothing wrong",
        "50 of 50 queries and every square are equal",
    ):
        assert words in done.stdout
    assert "\r" not in done.stdout
    assert list(tmp_path.glob("carpool-demo-*")) == list(tmp_path.glob("carpool-*/*")) == []
