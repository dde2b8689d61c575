"""The real model process, and the replica that replaces it when it dies, without Redis."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.clock import RedisClock
from carpool.messages import JSON, MSGPACK, Batch, BatchedRequest
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import TensorSpec
from carpool_worker import process_handle
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import FrameHeader, ProcessGoneError, pack_values, unpack_values
from carpool_worker.process_handle import ModelLoadError, ProcessHandle
from carpool_worker.replica import Replica
from support.waiting import wait_until

MODELS = '''
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from carpool.wire.tensors import TensorSpec

print("imported")

class Commanded:
    """Executes the command in each body, logs each batch, and returns the commands in capitals."""

    max_batch_size = 5
    max_queue_delay_ms = 1.5

    def load(self, device):
        print("loaded on", device)
        self.log = Path(__file__).with_name("log").open("a", buffering=1)

    def predict(self, batch):
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
        elif verb == "print":
            print("printed by the model")
            sys.stderr.write("written to stderr\\n")
            os.write(1, b"\\x00\\xff written to descriptor 1\\n")
        return verb.upper()

    def unload(self):
        self.log.write("unloaded\\n")

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


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "process_models.py"
    file.write_text(MODELS)
    return file


@pytest.fixture
def process_of(models: Path) -> Iterator[Start]:
    """Make handles, and close them after the test."""
    handles: list[ProcessHandle] = []

    def make(name: str) -> ProcessHandle:
        handles.append(ProcessHandle(f"{models}:{name}", "cpu"))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close(wait_s=0)


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], list[str]]:
    """What the model logged: a line for each batch."""
    return lambda: (tmp_path / "log").read_text().splitlines()


def execute(process: ProcessHandle, *bodies: Any) -> Any:
    """Execute one frame. Returns its results."""
    process.send(FrameHeader(first=0, size=len(bodies)), pack_values(bodies))
    header, payload = process.receive()
    assert header.failures == {}
    return unpack_values(payload)


# --- the process -------------------------------------------------------------------------------------------


def test_process_describes_its_model(process_of: Start) -> None:
    process = process_of("Commanded")
    assert not process.alive and process.pid is None
    ready = process.start()
    assert ready.settings["max_batch_size"] == "5"
    assert ready.settings["max_queue_delay_ms"] == "1.5"
    assert (ready.inputs, ready.outputs, ready.wants_requests) == ((), (), False)
    assert process.alive and process.pid != os.getpid()

    ready = process_of("Doubling").start()
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
        header, payload = process.receive()
        assert (header.size, header.first, header.failures) == (1, number, {})
        assert header.compute_us >= 0
        assert unpack_values(payload) == [f"WORD{number}"]


def test_output_of_a_model_goes_to_stderr_and_does_not_disturb_the_connection(
    process_of: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = process_of("Commanded")
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


def test_process_ignores_sigint(process_of: Start) -> None:
    process = process_of("Commanded")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert execute(process, "still", "running") == ["STILL", "RUNNING"]


def test_close_lets_the_model_unload(process_of: Start, log: Callable[[], list[str]]) -> None:
    process = process_of("Commanded")
    process.start()
    execute(process, "a")
    process.close()
    assert log() == ["a", "unloaded"]
    assert not process.alive
    process.close()  # twice is fine
    for call in (process.receive, lambda: process.send(FrameHeader(0, 0), b"")):
        with pytest.raises(ProcessGoneError, match="not started"):
            call()


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


def test_killed_process_is_reported_and_can_be_started_again(process_of: Start) -> None:
    process = process_of("Commanded")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessGoneError):
        process.receive()
    assert process.exit_cause() == "SIGKILL"
    assert not process.alive
    with pytest.raises(ProcessGoneError):
        process.send(FrameHeader(0, 0), b"")
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
    process_of: Start, name: str, cause: str
) -> None:
    with pytest.raises(
        ModelLoadError, match=rf"the model process ended \({cause}\) while it loaded the model"
    ):
        process_of(name).start()


def test_syntax_error_in_a_models_file_is_reported(models: Path, process_of: Start) -> None:
    models.write_text("class Model\n")
    with pytest.raises(ModelLoadError, match="SyntaxError") as caught:
        process_of("Model").start()
    assert models.name in str(caught.value)


# --- the replica -------------------------------------------------------------------------------------------


class Bench:
    """A replica without its two loops. `started` lists the recorded starts: batch ID and position."""

    def __init__(self, process: ProcessHandle) -> None:
        self.replica = Replica("worker/0", process, RedisClock(), WorkerMetrics("m"))
        self.replica.codec = Codec(process.start())
        self.ids = itertools.count(1)
        self.started: list[tuple[str, int]] = []

    def take(self, *bodies: Any, content_type: str = JSON, epoch: int = 1) -> Execution:
        """Add an execution with these bodies to the replica."""
        batch_id = f"{next(self.ids)}-0"
        requests = [
            BatchedRequest(
                "0-0", f"{batch_id}:{at}", content_type, None, 0, None, encode_body(content_type, body), None
            )
            for at, body in enumerate(bodies)
        ]
        execution = Execution(Batch(batch_id, epoch, requests, "full", 0, ""))
        assert self.replica.codec is not None
        self.replica.codec.prepare(execution, 0)
        self.replica.add(execution)
        return execution

    def record_start(self, execution: Execution, position: int) -> None:
        self.started.append((execution.batch.id, position))

    def finish(self, execution: Execution) -> list[Any]:
        """Finish the oldest execution, which must be this one. Returns each result, or its status."""
        assert self.replica.finish_next(self.record_start, 10.0) is execution
        self.replica.remove(execution)
        results = [execution.results[position] for position in range(len(execution.batch.requests))]
        return [
            result.status if result.body is None else decode_body(result.content_type, result.body)
            for result in results
        ]


@pytest.fixture
def bench(process_of: Start) -> Bench:
    return Bench(process_of("Commanded"))


def test_batches_finish_in_order_and_the_next_is_sent_ahead(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    go = tmp_path / "go"
    first = bench.take(f"wait {go}", "a")
    second = bench.take("b")
    # Given that the second waits in the pipe while the first is executed
    assert first.sent and second.sent
    assert bench.replica.batches() == [("1-0", 1), ("2-0", 1)]
    go.touch()
    assert bench.finish(first) == ["WAIT", "A"]
    assert bench.replica.batches() == [("2-0", 1)]
    assert bench.finish(second) == ["B"]
    assert bench.replica.executions() == [] and bench.started == []
    assert log() == [f"wait {go} a", "b"]


def test_model_that_holds_the_gil_does_not_block_the_worker(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = bench.take(f"hold {go}")
    wait_until((tmp_path / "go.started").exists, description="the model is executing")
    # Then another batch is taken meanwhile, and both can be renewed
    second = bench.take("b")
    assert bench.replica.batches() == [("1-0", 1), ("2-0", 1)]
    assert not bench.replica.wait_for_capacity(0)
    go.touch()
    assert bench.finish(first) == ["HOLD"]
    assert bench.finish(second) == ["B"]


def test_capacity_is_one_batch_beside_the_one_in_execution(bench: Bench) -> None:
    assert bench.replica.wait_for_capacity(0)
    first, second = bench.take("a"), bench.take("b")
    assert not bench.replica.wait_for_capacity(0)
    assert not bench.replica.wait_until_empty(0)
    bench.finish(first)
    bench.finish(second)
    assert bench.replica.wait_for_capacity(0) and bench.replica.wait_until_empty(0)


def test_waiting_for_capacity_ends_when_a_batch_is_finished(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    wait = bench.replica._changed.wait

    def announce(timeout_s: float | None) -> bool:
        waits.set()  # the lock is held: no notification can come before the wait
        return wait(timeout_s)

    monkeypatch.setattr(bench.replica._changed, "wait", announce)
    first, second = bench.take("a"), bench.take("b")
    found: list[bool] = []
    fetcher = threading.Thread(
        target=lambda: found.append(bench.replica.wait_for_capacity(60.0)), daemon=True
    )
    fetcher.start()
    assert waits.wait(10.0)
    bench.finish(first)
    bench.finish(second)
    fetcher.join(10.0)
    assert found == [True]


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


def test_death_that_does_not_repeat_dead_letters_nothing(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    execution = bench.take("a", f"die-once {tmp_path / 'died'}", "b")
    assert bench.finish(execution) == ["A", "DIE-ONCE", "B"]
    assert execution.dead_letters == [] and len(log()) == 4


def test_process_killed_during_a_batch_is_replaced(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first, second = bench.take(f"wait {go}"), bench.take("b")
    wait_until((tmp_path / "go.started").exists, description="the batch is executed")
    assert bench.replica.process.pid is not None
    os.kill(bench.replica.process.pid, signal.SIGKILL)
    go.touch()
    assert bench.finish(first) == ["WAIT"]
    assert bench.finish(second) == ["B"]


def test_process_that_dies_while_idle_is_replaced(bench: Bench) -> None:
    process = bench.replica.process
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.alive, description="the process is gone")
    assert bench.replica.finish_next(bench.record_start, 0) is None
    assert process.alive and process.pid != pid
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
    assert not redelivered.sent and not following.sent
    assert bench.finish(redelivered) == ["A", "B"]
    assert bench.started == [("1-0", 0), ("1-0", 1)]
    assert bench.finish(following) == ["C", "D"]
    assert log() == ["a", "b", "c d"]


def test_error_while_recording_a_start_is_raised_and_the_execution_can_be_removed(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    class LostError(Exception):
        pass

    def record_start(execution: Execution, position: int) -> None:
        bench.record_start(execution, position)
        if position == 1:
            raise LostError

    lost, following = bench.take("a", "b", epoch=2), bench.take("c")
    with pytest.raises(LostError):
        bench.replica.finish_next(record_start, 10.0)
    assert bench.replica.batches() == [("1-0", 2), ("2-0", 1)]
    bench.replica.remove(lost)
    assert bench.finish(following) == ["C"]
    assert log() == ["a", "c"]


def test_failure_to_load_the_model_again_is_an_error(process_of: Start) -> None:
    bench = Bench(process_of("LoadsOnce"))
    bench.take("die")
    with pytest.raises(ModelLoadError, match="FileExistsError"):
        bench.replica.finish_next(bench.record_start, 10.0)


def test_unreadable_outcome_fails_its_batch_and_not_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> None:
        raise KeyError("unforeseen")

    first, second = bench.take("a", "b"), bench.take("c")
    with monkeypatch.context() as patch:
        patch.setattr(Codec, "take_outcome", raises)
        assert bench.finish(first) == ["INTERNAL", "INTERNAL"]
    assert bench.finish(second) == ["C"]


def test_closed_replica_does_not_replace_its_process_and_counts_no_deaths(
    bench: Bench, tmp_path: Path
) -> None:
    execution = bench.take(f"wait {tmp_path / 'never'}")
    raised: list[BaseException] = []

    def finish() -> None:
        try:
            bench.replica.finish_next(bench.record_start, 10.0)
        except ProcessGoneError as error:
            raised.append(error)

    committer = threading.Thread(target=finish)
    committer.start()
    wait_until((tmp_path / "never.started").exists, description="the batch is executed")
    bench.replica.close(wait_s=0)
    committer.join(10.0)
    assert not committer.is_alive() and len(raised) == 1
    assert not bench.replica.process.alive
    assert not execution.deaths and bench.replica.batches() == [("1-0", 1)]


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


@pytest.mark.parametrize("ahead", [True, False], ids=["sent ahead", "sent when due"])
def test_frames_and_outcomes_larger_than_the_pipe(
    process_of: Start, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    # Given a pipe much smaller than a frame, in both directions
    monkeypatch.setattr(process_handle, "_SOCKET_BYTES", 4096)
    bench = Bench(process_of("Doubling"))
    arrays = [np.arange(100_000 + length, dtype=np.float32) for length in range(4)]
    executions: list[Execution] = []

    def take() -> None:
        executions.extend(bench.take(*arrays, content_type=MSGPACK) for _ in range(3))

    with killed_if_hanging(bench.replica.process):
        if not ahead:
            executions.append(bench.take(arrays[0], content_type=MSGPACK, epoch=2))
            take()
            assert not any(execution.sent for execution in executions)
            np.testing.assert_array_equal(bench.finish(executions.pop(0))[0], arrays[0] * 2)
        fetcher = threading.Thread(target=take if ahead else lambda: None)
        fetcher.start()
        for _ in range(3):
            wait_until(bench.replica.executions, description="the next execution is in hand")
            execution = bench.replica.executions()[0]
            for got, array in zip(bench.finish(execution), arrays, strict=True):
                np.testing.assert_array_equal(got, array * 2)
            assert not execution.deaths
        fetcher.join(10.0)
    assert not fetcher.is_alive() and len(executions) == 3
