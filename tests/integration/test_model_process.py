"""The real model process, and the replica that replaces it when it dies, without Redis.

Processes are forked (see `support.forking`), but for those of the tests of starting: `fresh_process_of`.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, cast
from unittest import mock

import numpy as np
import pytest
from structlog.testing import capture_logs

from carpool.clock import RedisClock
from carpool.descriptor_wait import wait_until_ready
from carpool.lifecycle import Loop
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import JSON, MSGPACK
from carpool.parts import Buffer
from carpool.rows import Body
from carpool.store.results import FencedError
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import TensorSpec
from carpool_worker import process_handle, retirement, serial_replica
from carpool_worker.batch_sources import Fetcher
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import (
    Again,
    FrameHeader,
    OutcomeHeader,
    ProcessGoneError,
    message_parts,
    pack_values,
    unpack_values,
)
from carpool_worker.process_handle import ModelLoadError, ProcessHandle
from carpool_worker.serial_replica import SerialReplica
from support.forking import forked_children
from support.stack import RESULT_S
from support.waiting import Stopwatch, wait_until

MODELS = '''
import contextlib, ctypes, mmap, os, signal, socket, stat, sys, threading, time
from pathlib import Path
import numpy as np
from carpool import Unhealthy
from carpool.wire.tensors import TensorSpec

print("imported")

def to_worker():
    """The connection to the worker, which a model has no business with."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                return socket.socket(fileno=os.dup(int(name)))

class AcceleratorError(RuntimeError):
    """As torch raises it."""

AcceleratorError.__module__ = "torch"

class Commanded:
    """Executes the command in each body, logs each batch, and returns the commands in capitals."""

    max_batch_size = 5
    max_queue_delay_ms = 1.5

    def load(self, device):
        print("loaded on", device)
        self.log = Path(__file__).with_name("log").open("a", buffering=1)

    broken = None

    def predict(self, batch):
        if batch[0] in ("break", "hang"):
            self.broken = batch[0]
        elif self.broken == "hang" and batch[0] != 7:
            threading.Event().wait()
        if self.broken:
            raise RuntimeError("nothing works any more")
        self.log.write(" ".join(batch) + "\\n")
        return [self.do(*body.split()) for body in batch]

    def do(self, verb, where=None):
        if verb == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "die-once" and not Path(where).exists():
            Path(where).touch()
            os._exit(7)
        elif verb == "wait":
            Path(where + ".started").touch()
            while not Path(where).exists():
                time.sleep(0.001)
        elif verb == "hold":
            Path(where + ".started").touch()
            sys.setswitchinterval(60)
            while not Path(where).exists():
                sum(range(300_000))
        elif verb == "hang-up":  # as a process does that ends in an orderly way
            to_worker().shutdown(socket.SHUT_RDWR)
        elif verb == "unhealthy" and not Path(where).exists():
            Path(where).touch()
            raise Unhealthy("the sensor is gone")
        elif verb == "raise":
            raise ValueError(where)
        elif verb == "raise-then-die":
            if Path(where).exists():
                os._exit(7)
            Path(where).touch()
            raise RuntimeError("too many")
        elif verb == "assert":
            driver = Path(__file__).with_name("libcuda.so.1")  # by its name that of an accelerator
            driver.write_bytes(b"driver")
            with driver.open("rb") as file:
                self.driver = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            raise AcceleratorError("CUDA error: device-side assert triggered")
        elif verb == "variables":
            return [name for name in os.environ if name.startswith(where)]
        elif verb == "write":
            to_worker().sendall(bytes.fromhex(where))
        elif verb == "write-and-wait":
            to_worker().sendall(bytes.fromhex(where))
            threading.Event().wait()
        elif verb == "write-later":  # from another thread, once a file is there
            def write(connection):
                while not Path(where).exists():
                    time.sleep(0.001)
                connection.sendall(b"a line of a log\\n")
            threading.Thread(target=write, args=(to_worker(),), daemon=True).start()
        elif verb == "fork-and-die":  # as a library does it, of which Python knows nothing
            libc = ctypes.CDLL(None)
            if libc.fork() == 0:
                libc.alarm(int(where))
                libc.pause()
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "print":
            print("printed by the model")
            sys.stderr.write("written to stderr\\n")
            os.write(1, b"\\x00\\xff written to descriptor 1\\n")
        return verb.upper()

    def unload(self):
        self.log.write("unloaded\\n")

class UnloadsSlowly(Commanded):
    """Unloads once the file "unload" is there."""
    def load(self, device):
        super().load(device)
        self.log.write("loaded\\n")
    def unload(self):
        Path(__file__).with_name("unloading").touch()
        while not Path(__file__).with_name("unload").exists():
            time.sleep(0.001)
        super().unload()

class InPlace:
    """Doubles its batch in place, and raises on a batch with a 6."""
    inputs = [TensorSpec("x", "FP32", (-1,))]
    outputs = [TensorSpec("y", "FP32", (-1,))]
    def predict(self, batch):
        has_six = (batch == 6).any()
        batch *= 2
        if has_six:
            raise RuntimeError("six")
        return batch

class Doubling:
    max_batch_sise = 4
    inputs = [TensorSpec("x", "FP32", (-1,))]
    outputs = [TensorSpec("y", "FP32", (-1,))]

    def predict(self, batch, requests):
        return batch * 2

class Stuck(Commanded):
    def unload(self):
        threading.Event().wait()

class Unloadable:
    def load(self, device):
        raise RuntimeError(f"no weights for {device}")
    def predict(self, batch):
        return batch

class ExitsWhileLoading(Unloadable):
    def load(self, device):
        os._exit(3)

class HangsWhileLoading(Unloadable):
    def load(self, device):
        threading.Event().wait()

class WritesWhileLoading(Unloadable):
    def load(self, device):
        to_worker().sendall(b"loading ...")
        threading.Event().wait()

class StopsWhileItTells(Unloadable):
    """A part of a message is sent, and no more."""
    def load(self, device):
        to_worker().sendall(bytes.fromhex("HALF"))
        threading.Event().wait()

class KilledWhileLoading(Unloadable):
    def load(self, device):
        os.kill(os.getpid(), signal.SIGKILL)

class Misdeclared:
    inputs = ["x"]
    predict = len

class WrongSetting:
    max_batch_size = "many"
    predict = len

class RaisingSetting:
    predict = len
    @property
    def max_batch_size(self):
        raise ValueError("no batch size today")

class LoadsOnce(Commanded):
    """Can be loaded only once."""
    def load(self, device):
        Path(__file__).with_name("loaded").touch(exist_ok=False)
        super().load(device)
'''

Start = Callable[[str], ProcessHandle]
MESSAGE: Final = b"".join(message_parts(OutcomeHeader(0, 1, 1, 1, {}), pack_values(["forged"])))
STEPS_S_MAX: Final = 200.0  # below the limit of a test
LIMIT_MS: Final = 600_000  # of an execution: longer than a test
WROTE: Final = "model wrote into the connection to its worker, ending its process"


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "process_models.py"
    file.write_text(MODELS.replace("HALF", MESSAGE[:-1].hex()))
    return file


@pytest.fixture
def forked() -> Iterator[None]:
    """Model processes are forked."""
    with forked_children(process_handle):
        yield


@pytest.fixture
def process_of(forked: None, models: Path) -> Iterator[Start]:
    """Make handles, and close them after the test."""
    with handles(models) as make:
        yield make


@pytest.fixture
def fresh_process_of(models: Path) -> Iterator[Start]:
    """The same, of new interpreters."""
    with handles(models) as make:
        yield make


@contextmanager
def handles(models: Path) -> Iterator[Start]:
    made: list[ProcessHandle] = []

    def make(name: str) -> ProcessHandle:
        made.append(ProcessHandle(f"{models}:{name}", "cpu", replica="worker/0"))
        return made[-1]

    yield make
    for handle in made:
        handle.close(wait_s=0)


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], list[str]]:
    """What the model logged: a line for each batch."""
    return lambda: (tmp_path / "log").read_text().splitlines()


def execute(process: ProcessHandle, *bodies: Any) -> Any:
    """Execute one frame. Returns its results."""
    process.send(FrameHeader(first=0, size=len(bodies)), pack_values(bodies))
    header, payload = received(process)
    assert header.failures == {}
    return unpack_values(payload)


def received(process: ProcessHandle) -> tuple[OutcomeHeader, Buffer]:
    """The next outcome, once it is there. Raises ProcessGoneError."""
    while (outcome := process.receive()) is None:
        assert process.descriptor is not None
        assert wait_until_ready([process.descriptor], [], RESULT_S)[0], "no outcome"
    return outcome


# --- the process -------------------------------------------------------------------------------------------


def test_process_describes_its_model(fresh_process_of: Start) -> None:
    process = fresh_process_of("Commanded")
    assert not process.alive and process.pid is None
    ready = process.start()
    assert ready.settings["max_batch_size"] == "5"
    assert ready.settings["max_queue_delay_ms"] == "1.5"
    assert (ready.inputs, ready.outputs, ready.wants_requests) == ((), (), False)
    assert process.alive and process.pid != os.getpid()

    ready = fresh_process_of("Doubling").start()
    assert (ready.inputs, ready.outputs) == (
        (TensorSpec("x", "FP32", (-1,)),),
        (TensorSpec("y", "FP32", (-1,)),),
    )
    assert ready.wants_requests
    assert ready.misspelt == {"max_batch_sise": "max_batch_size"}


def test_frames_are_executed_in_order(process_of: Start) -> None:
    process = process_of("Commanded")
    process.start()
    for number in range(3):
        process.send(FrameHeader(first=number, size=1), pack_values([f"word{number}"]))
    for number in range(3):
        header, payload = received(process)
        assert (header.size, header.first, header.failures) == (1, number, {})
        assert header.compute_us >= 0
        assert unpack_values(payload) == [f"WORD{number}"]


def test_output_of_a_model_goes_to_stderr_and_does_not_disturb_the_connection(
    fresh_process_of: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = fresh_process_of("Commanded")
    process.start()
    assert execute(process, "print", "a", "print") == ["PRINT", "A", "PRINT"]
    process.close()  # which flushes its output
    out, err = capfd.readouterr()
    assert out == ""
    for text in (
        "imported",
        "loaded on cpu",
        "printed by the model",
        "written to stderr",
        "written to descriptor 1",
    ):
        assert text in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_process_leaves_signals_of_its_group_to_the_worker(
    fresh_process_of: Start, number: signal.Signals
) -> None:
    process = fresh_process_of("Commanded")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, number)
    assert execute(process, "still", "running") == ["STILL", "RUNNING"]


def test_a_model_does_not_get_the_workers_credentials(
    fresh_process_of: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CARPOOL_REDIS_URL", "CARPOOL_REDIS_PASSWORD_FILE", "CARPOOL_OTHER"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("CARPOOL_MODEL_REDIS_URL", "")
    process = fresh_process_of("Commanded")
    process.start()
    (names,) = execute(process, "variables CARPOOL_")
    assert {"CARPOOL_OTHER", "CARPOOL_MODEL_PROCESS"} <= {*names}
    assert [name for name in names if name.startswith("CARPOOL_REDIS_")] == []


def test_close_lets_the_model_unload(process_of: Start, log: Callable[[], list[str]]) -> None:
    process = process_of("Commanded")
    process.start()
    execute(process, "a")
    process.close()
    assert log() == ["a", "unloaded"]
    assert not process.alive
    process.close()  # twice is fine
    process.send(FrameHeader(0, 0), b"")  # is lost
    with pytest.raises(ProcessGoneError, match="not started"):
        process.receive()


def test_close_waits_for_the_frame_in_execution(
    process_of: Start, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    process = process_of("Commanded")
    process.start()
    go = tmp_path / "go"
    process.send(FrameHeader(first=0, size=1), pack_values([f"wait {go}"]))
    wait_until((tmp_path / "go.started").exists, description="the batch is executed")
    go.touch()
    process.close()
    assert log()[-1] == "unloaded"


def test_close_kills_a_process_that_does_not_end(process_of: Start) -> None:
    process = process_of("Stuck")
    process.start()
    pid = process.pid
    process.close(wait_s=0.05)
    assert pid is not None and not Path(f"/proc/{pid}").exists()


def test_killed_process_is_reported_and_can_be_started_again(fresh_process_of: Start) -> None:
    process = fresh_process_of("Commanded")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessGoneError):
        received(process)
    assert process.exit_cause() == "SIGKILL"
    assert not process.alive
    process.send(FrameHeader(0, 0), b"")  # is lost
    process.start()
    assert execute(process, "a") == ["A"]


# --- loading fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "error", "location"),
    [
        ("Unloadable", "RuntimeError: no weights for cpu", "in load"),
        ("RaisingSetting", "ValueError: no batch size today", "in max_batch_size"),
    ],
)
def test_error_in_a_models_code_has_its_message_and_traceback(
    process_of: Start, name: str, error: str, location: str
) -> None:
    process = process_of(name)
    with pytest.raises(ModelLoadError) as caught:
        process.start()
    assert str(caught.value) == error
    assert location in caught.value.trace
    assert not process.alive


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("Misdeclared", "the model's 'inputs' must be a list of TensorSpec, not ['x']"),
        ("WrongSetting", "max_batch_size is 'many': must be a whole number of at least 1"),
        ("Missing", "has no 'Missing'"),
    ],
)
def test_wrong_declaration_is_an_error_without_a_traceback(process_of: Start, name: str, error: str) -> None:
    process = process_of(name)
    with pytest.raises(ModelLoadError) as caught:
        process.start()
    assert str(caught.value).endswith(error)
    assert caught.value.trace == ""
    assert not process.alive


@pytest.mark.parametrize(
    ("name", "cause"), [("ExitsWhileLoading", "exit code 3"), ("KilledWhileLoading", "SIGKILL")]
)
def test_process_that_ends_while_loading_is_reported_with_the_cause(
    fresh_process_of: Start, name: str, cause: str
) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"the model process ended \({cause}\) while it loaded the model"
    ):
        fresh_process_of(name).start()


def test_a_model_that_writes_into_the_connection_while_it_loads_is_reported(
    process_of: Start,
) -> None:
    with capture_logs() as logs, pytest.raises(ModelLoadError, match="its model wrote into the connection"):
        process_of("WritesWhileLoading").start()
    assert [line["replica"] for line in logs if line["event"] == WROTE] == ["worker/0"]


@pytest.mark.usefixtures("forked")
def test_loading_that_stops_within_its_message_is_given_up(models: Path) -> None:
    process = ProcessHandle(f"{models}:StopsWhileItTells", "cpu", load_s_max=1.5)
    with pytest.raises(ModelLoadError, match=r"not loaded within 1\.5 s"):
        process.start()
    process.spawn()
    assert process.descriptor is not None
    assert wait_until_ready([process.descriptor], [], RESULT_S)[0]
    assert process.receive_ready() is None  # it does not wait for the rest
    assert not wait_until_ready([process.descriptor], [], 0)[0]
    process.close(wait_s=0)


def test_syntax_error_in_a_models_file_is_reported(models: Path, process_of: Start) -> None:
    models.write_text("class Model\n")
    with pytest.raises(ModelLoadError, match="SyntaxError") as caught:
        process_of("Model").start()
    assert models.name in str(caught.value)


# --- the replica -------------------------------------------------------------------------------------------


class FakeFetcher:
    """Fetches what a test has put here. `starts` counts the fetches that were started."""

    def __init__(self) -> None:
        self.waiting = False
        self.starts = 0
        self._executions: list[Execution] = []
        self._ours, self._theirs = socket.socketpair()

    @property
    def descriptor(self) -> int | None:
        return self._ours.fileno()

    def start(self) -> list[Execution]:
        self.starts += 1
        self.waiting = True
        return []

    def finish(self) -> list[Execution]:
        self._ours.recv(1)
        self.waiting = False
        return [self._executions.pop(0)] if self._executions else []

    def check_overdue(self) -> None:
        """It may still come."""

    def put(self, *executions: Execution) -> None:
        """The reply to a fetch arrives: an execution, or that there is none."""
        self._executions += executions
        self._theirs.send(b"1")

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


class FakeCommitter:
    """Keeps what is committed. `started` lists the recorded starts: batch ID and position."""

    def __init__(self) -> None:
        self.committed: list[Execution] = []
        self.discarded: list[Execution] = []
        self.started: list[tuple[str, int]] = []
        self.fails_on: Callable[[Execution, int | None], object] = lambda *_: None

    def commit(self, execution: Execution) -> None:
        if isinstance(error := self.fails_on(execution, None), Exception):
            raise error
        self.committed.append(execution)

    def record_start(self, execution: Execution, position: int) -> None:
        self.started.append((execution.batch.id, position))
        if isinstance(error := self.fails_on(execution, position), Exception):
            raise error

    def discard(self, execution: Execution) -> None:
        self.discarded.append(execution)


class Bench:
    """A replica without Redis, whose loop runs step by step."""

    def __init__(self, process: ProcessHandle) -> None:
        self.codec = Codec(process.start())
        self.fetcher, self.committer = FakeFetcher(), FakeCommitter()
        self.replica = SerialReplica(
            Member("worker/0"),
            process,
            self.codec,
            cast(Fetcher, self.fetcher),
            cast(Committer, self.committer),
            RedisClock(),
            WorkerMetrics("m"),
        )
        self.ids = itertools.count(1)

    @property
    def started(self) -> list[tuple[str, int]]:
        return self.committer.started

    def execution_of(
        self,
        *bodies: Any,
        content_type: str = JSON,
        epoch: int = 1,
        expected_us: int = 0,
        max_execution_ms: int | None = None,
    ) -> Execution:
        batch_id = f"{next(self.ids)}-0"
        encoded: list[Body] = [encode_body(content_type, body) for body in bodies]
        ids = [f"{batch_id}:{at}" for at in range(len(bodies))]
        run = BatchedRun("0-0", ids, encoded, content_type, None, 0, None, None)
        batch = Batch(batch_id, epoch, [run], "full", 0, "", expected_us=expected_us)
        batch.max_execution_ms = max_execution_ms
        return Execution(batch)

    def take(self, *bodies: Any, **more: Any) -> Execution:
        """Give the replica an execution with these bodies, whether it asked for it or not."""
        execution = self.execution_of(*bodies, **more)
        self.replica.add_batch(execution)
        return execution

    def has_fetched(self, times: int) -> bool:
        return self.fetcher.starts == times

    def step_until(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + STEPS_S_MAX
        while not condition():
            assert time.monotonic() < until_s
            self.replica.run_once()

    def let_time_pass(self) -> None:
        """As if what the process executes had been executed for LIMIT_MS."""
        self.replica.run_once()  # it has seen what that is
        self.replica._watch._since_s -= LIMIT_MS / 1000

    def finish(self, execution: Execution) -> list[Any]:
        """Finish the oldest execution, which must be this one. Returns each result, or its status."""
        committed = self.committer.committed
        number = len(committed)
        self.step_until(lambda: len(committed) > number)
        assert committed[number] is execution
        execution.separate()
        results = [execution.results[position] for position in range(execution.batch.size)]
        return [
            result.status if result.body is None else decode_body(result.content_type, result.body)
            for result in results
        ]


@pytest.fixture
def bench_of(process_of: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Bench]]:
    monkeypatch.setattr(serial_replica, "WAIT_S", 0.01)
    benches: list[Bench] = []

    def make(name: str) -> Bench:
        benches.append(Bench(process_of(name)))
        return benches[-1]

    yield make
    for bench in benches:
        bench.fetcher.close()


@pytest.fixture
def bench(bench_of: Callable[[str], Bench]) -> Bench:
    return bench_of("Commanded")


def test_batches_finish_in_order_and_the_next_is_sent_ahead(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    go = tmp_path / "go"
    first = bench.take(f"wait {go}", "a")
    second = bench.take("b")
    # Given that the second waits in the pipe while the first is executed
    bench.replica.run_once()
    assert first.frames_sent == second.frames_sent == 1
    assert bench.replica.batches() == [("1-0", 1), ("2-0", 1)]
    go.touch()
    assert bench.finish(first) == ["WAIT", "A"]
    assert bench.finish(second) == ["B"]
    assert bench.replica.batches() == [] and bench.started == []
    assert log() == [f"wait {go} a", "b"]


def test_model_that_holds_the_gil_does_not_block_the_worker(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = bench.take(f"hold {go}")
    bench.step_until((tmp_path / "go.started").exists)
    # Then another batch is taken meanwhile, and both can be renewed
    second = bench.take("b")
    bench.replica.run_once()
    assert bench.replica.batches() == [("1-0", 1), ("2-0", 1)]
    go.touch()
    assert bench.finish(first) == ["HOLD"]
    assert bench.finish(second) == ["B"]


def test_idle_replica_fetches_and_executes_what_arrives(bench: Bench) -> None:
    bench.replica.run_once()
    assert bench.fetcher.starts == 1
    for starts in (2, 3):  # nothing within the time that Redis waits: ask again
        bench.fetcher.put()
        bench.step_until(partial(bench.has_fetched, starts))
    execution = bench.execution_of("a", "b")
    bench.fetcher.put(execution)
    assert bench.finish(execution) == ["A", "B"]


def test_nothing_is_fetched_beside_two_batches_or_before_an_execution_time_is_known(
    bench: Bench, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    first = bench.take(f"wait {go}")
    for _ in range(3):
        bench.replica.run_once()
    assert bench.fetcher.starts == 0
    second = bench.take("b")
    go.touch()
    bench.finish(first)
    bench.finish(second)
    bench.replica.run_once()
    assert bench.fetcher.starts >= 1


def test_busy_replica_fetches_shortly_before_it_expects_to_be_idle(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    began_s = time.monotonic()
    first = bench.take(f"wait {go}", expected_us=100_000)
    taken_s = time.monotonic()
    turns_s: list[float] = []  # when each began

    def has_fetched() -> bool:
        turns_s.append(time.monotonic())
        return bench.fetcher.starts > 0

    bench.step_until(has_fetched)
    *before_s, _, fetched_s = turns_s
    assert fetched_s - began_s >= 0.078
    assert all(turn_s - taken_s < 0.1 for turn_s in before_s), "the first turn after that time fetches"
    # And that the next batch arrives while the first is executed
    second = bench.execution_of("b")
    bench.fetcher.put(second)
    bench.step_until(lambda: second.frames_sent)
    assert bench.replica.batches() == [("1-0", 1), ("2-0", 1)]
    go.touch()
    assert bench.finish(first) == ["WAIT"]
    assert bench.finish(second) == ["B"]


def test_next_fetch_is_sent_before_the_commit(bench: Bench) -> None:
    starts_at_commit: list[int] = []
    bench.committer.fails_on = lambda execution, position: starts_at_commit.append(bench.fetcher.starts)
    first = bench.take("a")
    bench.finish(first)
    assert starts_at_commit == [1]


def test_drain_waits_for_the_last_fetch_and_for_what_it_brings(bench: Bench) -> None:
    bench.replica.run_once()
    bench.replica.drain()
    for _ in range(3):
        bench.replica.run_once()
    assert bench.fetcher.waiting and not bench.replica.wait_until_drained(0)
    execution = bench.execution_of("a")
    bench.fetcher.put(execution)
    assert bench.finish(execution) == ["A"]
    assert bench.replica.wait_until_drained(0) and bench.fetcher.starts == 1


def test_a_batch_is_in_hand_while_it_is_decoded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """So its lease is renewed: decoding may take longer than that."""
    seen: list[list[tuple[str, int]]] = []
    prepare = bench.codec.prepare

    def watched(execution: Execution, *clock: int) -> None:
        seen.append(bench.replica.batches())
        prepare(execution, *clock)

    monkeypatch.setattr(bench.codec, "prepare", watched)
    assert bench.finish(bench.take("a")) == ["A"]
    assert seen == [[("1-0", 1)]]


def test_a_batch_that_could_not_be_prepared_is_not_committed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lacks results. Its lease runs out, and it is delivered again."""

    def fail(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(bench.codec, "prepare", fail)
        with pytest.raises(MemoryError):
            bench.take("a")
    assert bench.replica.batches() == []
    assert bench.finish(bench.take("b")) == ["B"]


def test_each_start_in_a_reclaimed_batch_is_recorded_before_the_request_is_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding may be what killed its worker."""
    started_before: list[list[int]] = []
    prepare_next = bench.codec.prepare_next

    def watched(execution: Execution, now_us: int) -> bool:
        started_before.append([position for _, position in bench.started])
        return prepare_next(execution, now_us)

    monkeypatch.setattr(bench.codec, "prepare_next", watched)
    assert bench.finish(bench.take("a", "b", "c", epoch=2)) == ["A", "B", "C"]
    assert started_before == [[0], [0, 1], [0, 1, 2]]


def test_request_that_kills_two_processes_is_dead_lettered_and_others_are_served(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    pid = bench.replica.process.pid
    poison = bench.take("a", "die", "b")
    following, last = bench.take("c", "d"), bench.take("e")
    # When the process dies on the batch, and then on one of its requests alone
    assert bench.finish(poison) == ["A", "ABORTED", "B"]
    # Then each start was recorded before the request was executed alone
    assert bench.started == [("1-0", 0), ("1-0", 1), ("1-0", 2)]
    (letter,) = poison.dead_letters
    assert letter.request is poison.batch.requests[1]
    assert letter.attempts == 2 and "died 2 times" in letter.reason
    # And the next batches are executed afterwards, in order, each in one frame
    assert bench.finish(following) == ["C", "D"]
    assert bench.finish(last) == ["E"]
    assert not following.dead_letters and not following.deaths
    assert log() == ["a die b", "a", "die", "b", "c d", "e"]
    assert bench.replica.process.pid != pid


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(bytes(64), id="zeros"),
        pytest.param(b"\xff" * 64, id="ones"),
        pytest.param(b"warning: something happened\n", id="text"),
        pytest.param(b"!", id="a byte"),
        pytest.param(b"x" * 200_000, id="more than a buffer"),
        pytest.param(MESSAGE[:3], id="the begin of a mark"),
        pytest.param(MESSAGE[:30], id="half a message"),
        pytest.param(b"".join(message_parts([], b"")), id="a message of nothing"),
        pytest.param(b"".join(message_parts({"a": 1}, b"")), id="a message of another shape"),
        pytest.param(b"".join(message_parts(7, b"")), id="a message of a number"),
        pytest.param(b"".join(message_parts((0, 1, "1", 1, {}, [], 1, [], {}, []))), id="a wrong type"),
        pytest.param(b"".join(message_parts(("raised", 1))), id="what was raised, of another shape"),
    ],
)
def test_a_model_that_writes_into_its_connection_ends_its_process_and_no_other_request(
    bench: Bench, written: bytes
) -> None:
    with capture_logs() as logs:
        writing = bench.take("a", f"write {written.hex()}", "b", max_execution_ms=60_000)
        following = bench.take("c")
        # The process dies on the batch, and then on one of its requests alone
        assert bench.finish(writing) == ["A", "ABORTED", "B"]
        assert bench.finish(following) == ["C"]
    (letter,) = writing.dead_letters
    assert letter.attempts == 2 and letter.reason.endswith(
        "its model wrote into the connection to its worker"
    )
    assert [line["replica"] for line in logs if line["event"] == WROTE] == ["worker/0"] * 2


def test_a_thread_of_a_model_that_writes_while_nothing_is_executed_ends_the_process(
    bench: Bench, tmp_path: Path
) -> None:
    pid = bench.replica.process.pid
    assert bench.finish(bench.take(f"write-later {tmp_path / 'now'}")) == ["WRITE-LATER"]
    with capture_logs() as logs:
        (tmp_path / "now").touch()
        bench.step_until(lambda: bench.replica.process.ready and bench.replica.process.pid != pid)
    assert WROTE in [line["event"] for line in logs]
    assert bench.finish(bench.take("a")) == ["A"]


@pytest.mark.parametrize("bytes_sent", [1, 20, len(MESSAGE) - 1])
def test_a_process_that_stops_within_a_message_has_no_more_than_its_time(
    bench: Bench, bytes_sent: int
) -> None:
    stopping = bench.take(f"write-and-wait {MESSAGE[:bytes_sent].hex()}", max_execution_ms=200)
    assert bench.finish(stopping) == ["ABORTED"]
    (letter,) = stopping.dead_letters
    assert letter.reason.endswith("it took longer than max_execution_ms, 200 ms")


def test_a_process_whose_child_holds_its_connection_open_is_found_dead(bench: Bench) -> None:
    assert bench.finish(bench.take("fork-and-die 30")) == ["ABORTED"]
    assert bench.finish(bench.take("a")) == ["A"]


def test_a_request_that_hangs_is_given_up_and_others_are_served(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    never, started = tmp_path / "never", tmp_path / "never.started"
    pid = bench.replica.process.pid
    hanging = bench.take("a", f"hold {never}", "b", max_execution_ms=LIMIT_MS)  # it holds the GIL, too
    following = bench.take("c")
    for _ in range(2):  # in its batch, and alone
        bench.step_until(started.exists)
        started.unlink()
        bench.let_time_pass()
    assert bench.finish(hanging) == ["A", "ABORTED", "B"]
    (letter,) = hanging.dead_letters
    assert letter.request is hanging.batch.requests[1]
    assert letter.reason == (
        "its model process or worker died 2 times while executing it; the last time: it took longer than "
        f"max_execution_ms, {LIMIT_MS} ms"
    )
    assert bench.finish(following) == ["C"]
    assert bench.replica.process.pid != pid


def test_each_batch_has_all_of_its_time(bench: Bench, tmp_path: Path) -> None:
    """One that waits behind another in the pipe is not executed yet."""
    go = tmp_path / "go"
    first = bench.take(f"wait {go}")
    second = bench.take("b", max_execution_ms=1)
    stopwatch = Stopwatch()
    bench.step_until(lambda: stopwatch.elapsed_s > 0.3)
    go.touch()
    assert bench.finish(first) == ["WAIT"]
    assert bench.finish(second) in (["B"], ["ABORTED"])  # a millisecond may be too short for it
    assert first.deaths == {}


@pytest.mark.usefixtures("forked")
def test_a_model_that_does_not_load_in_time_is_given_up(models: Path) -> None:
    process = ProcessHandle(f"{models}:HangsWhileLoading", "cpu", load_s_max=0.5)
    with pytest.raises(ModelLoadError, match=r"not loaded within 0\.5 s \(--load-s-max\)"):
        process.start()
    assert not process.alive
    # And likewise when a process is replaced, while its replica does other things
    stopwatch = Stopwatch()
    process.spawn()
    with pytest.raises(ModelLoadError, match=r"not loaded within 0\.5 s"):
        while stopwatch.passed_s < 10:
            process.check_loading()
    assert stopwatch.elapsed_s >= 0.5
    assert not process.alive


def test_death_that_does_not_repeat_dead_letters_nothing(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    execution = bench.take("a", f"die-once {tmp_path / 'died'}", "b")
    assert bench.finish(execution) == ["A", "DIE-ONCE", "B"]
    assert execution.dead_letters == [] and len(log()) == 4


def test_process_killed_during_a_batch_is_replaced(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first, second = bench.take(f"wait {go}"), bench.take("b")
    bench.step_until((tmp_path / "go.started").exists)
    assert bench.replica.process.pid is not None
    os.kill(bench.replica.process.pid, signal.SIGKILL)
    go.touch()
    assert bench.finish(first) == ["WAIT"]
    assert bench.finish(second) == ["B"]


def test_process_that_dies_while_idle_is_replaced_and_nothing_is_fetched_meanwhile(bench: Bench) -> None:
    process = bench.replica.process
    pid = process.pid
    assert pid is not None
    bench.replica.run_once()
    os.kill(pid, signal.SIGKILL)
    with mock.patch.object(process_handle, "subprocess", subprocess):  # a forked one could be ready at once
        bench.step_until(lambda: process.pid != pid)
    assert not process.ready
    bench.fetcher.put()
    bench.step_until(lambda: not bench.fetcher.waiting or process.ready)
    assert bench.fetcher.starts == 1 or process.ready
    bench.step_until(lambda: process.ready)
    assert bench.finish(bench.take("a")) == ["A"]


def test_batch_taken_while_the_process_is_dead_is_served(bench: Bench) -> None:
    process = bench.replica.process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.alive, description="the process is gone")
    assert bench.finish(bench.take("a", "b")) == ["A", "B"]


def test_redelivered_batch_is_executed_one_at_a_time_and_the_next_is_not_sent_ahead(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    redelivered = bench.take("a", "b", epoch=2)
    following = bench.take("c", "d")
    sent_ahead: list[int] = []
    bench.committer.fails_on = lambda *_: sent_ahead.append(following.frames_sent)
    assert bench.finish(redelivered) == ["A", "B"]
    assert sent_ahead == [0, 0, 1], "at two starts, and at the commit"
    assert bench.started == [("1-0", 0), ("1-0", 1)]
    assert bench.finish(following) == ["C", "D"]
    assert log() == ["a", "b", "c d"]


def test_batch_lost_while_a_start_is_recorded_is_discarded(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    lost, following = bench.take("a", "b", epoch=2), bench.take("c")
    bench.committer.fails_on = lambda execution, position: (
        FencedError(execution.batch.id) if position == 1 else None
    )
    assert bench.finish(following) == ["C"]
    assert bench.committer.discarded == [lost]
    assert log() == ["a", "c"]


def test_commit_that_fails_is_repeated(bench: Bench) -> None:
    execution = bench.take("a")
    bench.committer.fails_on = lambda *_: ConnectionError("no Redis")
    with pytest.raises(ConnectionError):
        bench.finish(execution)
    assert bench.replica.batches() == [("1-0", 1)]
    bench.committer.fails_on = lambda *_: None
    assert bench.finish(execution) == ["A"]


def test_failure_to_load_the_model_again_is_an_error_and_is_repeated(
    bench_of: Callable[[str], Bench], tmp_path: Path
) -> None:
    bench = bench_of("LoadsOnce")
    execution = bench.take("die-once " + str(tmp_path / "died"))
    for _ in range(2):
        with pytest.raises(ModelLoadError, match="FileExistsError"):
            bench.finish(execution)
    (tmp_path / "loaded").unlink()
    assert bench.finish(execution) == ["DIE-ONCE"]
    assert execution.deaths == {0: 1}, "a process that could not load the model died of no request"


def test_unreadable_outcome_fails_its_batch_and_not_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = bench.take("a", "b"), bench.take("c")
    give_results = bench.codec.give_results

    def raises(execution: Execution, *outcome: Any) -> None:
        if execution is first:
            raise KeyError("unforeseen")
        give_results(execution, *outcome)

    monkeypatch.setattr(bench.codec, "give_results", raises)
    assert bench.finish(first) == ["INTERNAL", "INTERNAL"]
    assert bench.finish(second) == ["C"]


def test_closed_replica_does_not_replace_its_process_and_counts_no_deaths(
    bench: Bench, tmp_path: Path
) -> None:
    execution = bench.take(f"wait {tmp_path / 'never'}")
    errors: list[Exception] = []
    loop = Loop("replica", bench.replica.run_once, errors.append)
    loop.start()
    wait_until((tmp_path / "never.started").exists, description="the batch is executed")
    bench.replica.close(wait_s=0)
    loop.stop()
    assert loop.join(10.0) and not errors
    assert not bench.replica.process.alive
    assert not execution.deaths and bench.replica.batches() == [("1-0", 1)]


# --- processes that end by themselves -----------------------------------------------------------------------


def test_an_unhealthy_process_is_replaced_and_its_requests_are_executed_again(
    bench_of: Callable[[str], Bench],
    tmp_path: Path,
    log: Callable[[], list[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    bench = bench_of("Commanded")
    pid = bench.replica.process.pid
    once = f"unhealthy {tmp_path / 'was'}"
    execution, following = bench.take("a", once, "b"), bench.take("c")
    with capture_logs() as logs:
        assert bench.finish(execution) == ["A", "UNHEALTHY", "B"]
        assert bench.finish(following) == ["C"]
    assert bench.replica.process.pid != pid
    # As after a death: one at a time, and each start is recorded
    assert bench.started == [("1-0", 0), ("1-0", 1), ("1-0", 2)]
    assert execution.deaths == {0: 1, 1: 1, 2: 1} and not execution.dead_letters
    # And the model was not unloaded, which would fail or hang
    assert log() == [f"a {once} b", "a", once, "b", "c"]
    assert capfd.readouterr().err.count("in do") == 0, "the worker logs it"
    (raised,) = [line for line in logs if line["event"] == "model raised"]
    assert raised["error"].startswith("Unhealthy at process_models.py:") and "in do\n" in raised["exception"]
    assert raised["correlation_ids"] == ["1-0:0", "1-0:1", "1-0:2"]


def test_line_with_a_traceback_names_the_batch_and_the_requests_on_which_the_model_raised(
    bench: Bench,
) -> None:
    with capture_logs() as logs:
        assert bench.finish(bench.take("a", "raise 4111-1111", "b")) == ["A", "INTERNAL", "B"]
    (line,) = [line for line in logs if line["event"] == "model raised"]
    assert line.pop("exception").endswith("ValueError\n")
    assert line.pop("error").startswith("ValueError at process_models.py:")
    assert line == {
        "event": "model raised",
        "log_level": "error",
        "replica": "worker/0",
        "batch": "1-0",
        "requests": 1,
        "correlation_ids": ["1-0:1"],
    }


def test_what_a_model_raised_before_it_died_of_the_same_batch_is_in_the_log(
    bench: Bench, tmp_path: Path
) -> None:
    with capture_logs() as logs:
        poison = f"raise-then-die {tmp_path / 'was'}"
        assert bench.finish(bench.take("a", poison, "b")) == ["A", "ABORTED", "B"]
    of_batch = {"batch": "1-0", "requests": 3, "correlation_ids": ["1-0:0", "1-0:1", "1-0:2"]}
    of_one = {"batch": "1-0", "requests": 1, "correlation_ids": ["1-0:1"]}
    lines = [line for line in logs if line["event"] in ("model raised", "model process died")]
    assert [(line["event"], {name: line[name] for name in of_batch}) for line in lines] == [
        ("model raised", of_batch),
        ("model process died", of_batch),
        ("model process died", of_one),
    ]
    assert lines[0]["error"].startswith("RuntimeError at process_models.py:")


def test_a_request_that_breaks_two_accelerators_is_given_up_and_others_are_served(bench: Bench) -> None:
    poison, following = bench.take("a", "assert", "b"), bench.take("c")
    assert bench.finish(poison) == ["A", "ABORTED", "B"]
    (letter,) = poison.dead_letters
    assert letter.request is poison.batch.requests[1]
    assert letter.reason == (
        "its model process or worker died 2 times while executing it; the last time: unhealthy, the "
        "accelerator is broken: device-side assert triggered"
    )
    assert bench.finish(following) == ["C"]


def test_a_process_that_ends_in_an_orderly_way_may_unload_before_the_next_one_starts(
    bench_of: Callable[[str], Bench], tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    """It may hold memory that the next one needs. Meanwhile the replica takes what it had asked for."""
    bench = bench_of("UnloadsSlowly")
    process = bench.replica.process
    bench.replica.run_once()
    execution = bench.execution_of("a", "hang-up")
    bench.fetcher.put(execution)
    bench.step_until((tmp_path / "unloading").exists)
    bench.step_until(lambda: process.descriptor is None)
    pid, stopwatch = process.pid, Stopwatch()
    for _ in range(20):
        bench.replica.run_once()
    assert stopwatch.passed_s < 5.0, "a turn takes no longer than a poll"
    assert (process.pid, process.ready) == (pid, False)
    (tmp_path / "unload").touch()
    assert bench.finish(execution) == ["A", "ABORTED"]
    assert log()[:4] == ["loaded", "a hang-up", "unloaded", "loaded"]


def test_a_process_that_does_not_end_in_time_is_killed(process_of: Start) -> None:
    process = process_of("Stuck")
    process.start()
    stopwatch = Stopwatch()
    process.hang_up(within_s=0.2)
    assert not process.has_ended()
    wait_until(process.has_ended, description="it is killed")
    assert stopwatch.elapsed_s >= 0.2
    assert stopwatch.passed_s < 5.0
    process.start()
    assert execute(process, "a") == ["A"]


@pytest.mark.usefixtures("forked")
def test_a_process_that_unloads_longer_than_it_may_load_is_replaced(models: Path) -> None:
    """`--load-s-max` begins when the next one is started."""
    process = ProcessHandle(f"{models}:Stuck", "cpu", load_s_max=10.0)
    process.start()
    process._spawned_s -= 10.0
    process.hang_up()
    process.check_loading()
    process.close(wait_s=0)


def test_a_process_over_its_time_is_killed_at_once(
    bench_of: Callable[[str], Bench], tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    bench = bench_of("UnloadsSlowly")
    execution = bench.take(f"wait {tmp_path / 'never'}", max_execution_ms=100)
    assert bench.finish(execution) == ["ABORTED"]
    assert "unloaded" not in log() and not (tmp_path / "unloading").exists()


@pytest.fixture
def suspects_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is suspected as soon as enough batches have failed."""
    monkeypatch.setattr(retirement, "FAILING_S_MIN", 0.0)


def test_a_process_of_which_all_fails_is_retired_once_and_nothing_is_blamed(
    bench: Bench, log: Callable[[], list[str]], suspects_soon: None
) -> None:
    pid = bench.replica.process.pid
    assert bench.finish(bench.take("a", "b")) == ["A", "B"]
    assert bench.finish(bench.take("break")) == ["INTERNAL"]
    for _ in range(retirement.BATCHES_MIN - 1):
        assert bench.finish(bench.take("c")) == ["INTERNAL"]
    # The example fails, too; what comes meanwhile waits for another process
    following = bench.take("e", "f")
    assert bench.finish(following) == ["E", "F"]
    assert bench.replica.process.pid != pid
    assert not following.deaths and not bench.started
    assert log().count("unloaded") == 1 and log()[-2:] == ["unloaded", "e f"]


def test_bad_bodies_of_any_producer_retire_no_process(
    bench: Bench, log: Callable[[], list[str]], suspects_soon: None
) -> None:
    """It executes an earlier request again, once for each BATCHES_MIN failed batches."""
    pid = bench.replica.process.pid
    assert bench.finish(bench.take("a", "b")) == ["A", "B"]
    for _ in range(3 * retirement.BATCHES_MIN):
        assert bench.finish(bench.take(7)) == ["INTERNAL"]
    assert bench.finish(bench.take("c")) == ["C"]
    assert bench.replica.process.pid == pid
    assert log() == ["a b", "a", "a", "a", "c"]


def test_a_process_that_hangs_on_the_example_is_replaced_and_nothing_is_blamed(
    bench: Bench, tmp_path: Path, suspects_soon: None
) -> None:
    pid = bench.replica.process.pid
    assert bench.finish(bench.take("a", max_execution_ms=LIMIT_MS)) == ["A"]
    assert bench.finish(bench.take("hang")) == ["INTERNAL"]
    for _ in range(retirement.BATCHES_MIN - 1):
        assert bench.finish(bench.take(7)) == ["INTERNAL"]
    following = bench.take("b")
    bench.step_until(lambda: bench.replica.retirement.tried)
    bench.let_time_pass()
    assert bench.finish(following) == ["B"]
    assert bench.replica.process.pid != pid
    assert not following.deaths


# --- frames larger than the pipe ---------------------------------------------------------------------------


@contextmanager
def killed_if_hanging(process: ProcessHandle) -> Iterator[None]:
    """Kill the process after 20 s, so that a test that hangs fails: it asserts that there were no deaths."""

    def kill() -> None:
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)

    timer = threading.Timer(20.0, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@pytest.mark.parametrize("length", [2, 100_000], ids=["small", "larger than the pipe"])
def test_halves_of_a_batch_that_the_model_changed_start_from_what_was_sent(
    bench_of: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """The process asks for the frame again. Frames that were sent ahead arrive before it."""
    monkeypatch.setattr(process_handle, "_SOCKET_BYTES", 4096)
    bench = bench_of("InPlace")
    rows = [np.full(length, number, np.float32) for number in (1, 6, 3, 5)]
    with killed_if_hanging(bench.replica.process):
        executions = [bench.take(*rows, content_type=MSGPACK) for _ in range(3)]
        for execution in executions:
            results = bench.finish(execution)
            assert results.pop(1) == "INTERNAL"
            assert [(len(row), set(row.tolist())) for row in results] == [
                (length, {2 * n}) for n in (1, 3, 5)
            ]
            assert not execution.deaths


def test_frame_that_is_asked_for_out_of_order_ends_the_process(process_of: Start) -> None:
    process = process_of("Commanded")
    process.start()
    forged = b"".join(message_parts(Again(7).message())).hex()
    process.send(FrameHeader(first=0, size=1), pack_values([f"write-and-wait {forged}"]))
    with pytest.raises(ProcessGoneError, match="asked for a frame out of order"):
        received(process)


@pytest.mark.parametrize("ahead", [True, False], ids=["sent ahead", "sent when due"])
def test_frames_and_outcomes_larger_than_the_pipe(
    bench_of: Callable[[str], Bench], monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    # Given a pipe much smaller than a frame, in both directions
    monkeypatch.setattr(process_handle, "_SOCKET_BYTES", 4096)
    bench = bench_of("Doubling")
    arrays = [np.arange(100_000 + length, dtype=np.float32) for length in range(4)]
    with killed_if_hanging(bench.replica.process):
        if not ahead:
            suspect = bench.take(arrays[0], content_type=MSGPACK, epoch=2)
        executions = [bench.take(*arrays, content_type=MSGPACK) for _ in range(3)]
        if not ahead:
            bench.replica.run_once()
            assert not any(execution.frames_sent for execution in executions)
            np.testing.assert_array_equal(bench.finish(suspect)[0], arrays[0] * 2)
        for execution in executions:
            for got, array in zip(bench.finish(execution), arrays, strict=True):
                np.testing.assert_array_equal(got, array * 2)
            assert not execution.deaths
        assert not bench.replica.process.has_unsent
