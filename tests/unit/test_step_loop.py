"""A stepping model's loop, over a real socket pair in a thread, and in a real model process."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from carpool.model_settings import ModelKind
from carpool_worker.model_process import frames
from carpool_worker.model_process.configuration import CONFIGURATION, Configuration
from carpool_worker.model_process.frames import MessageReader, Ready, pack_values, unpack_values
from carpool_worker.model_process.loaded import description_of
from carpool_worker.model_process.model import SteppingModel, load_model
from carpool_worker.model_process.raised import RaisedLog
from carpool_worker.model_process.stepping.frames import Admit, Drop, Resume, Step
from carpool_worker.model_process.stepping.loop import StepLoop
from carpool_worker.model_process.stepping.requests import StepRequest
from support.executions import receive_load_result
from support.waiting import wait_until

TIMEOUT_S = 30


class Gated:
    """Emits "a" for each request in each step, which the test permits; ends none. Its calls are recorded."""

    max_batch_size = 2

    def __init__(self) -> None:
        self.permits: queue.Queue[bool] = queue.Queue()
        self.calls: queue.Queue[tuple[str, list[str]]] = queue.Queue()

    def begin(self, requests: Sequence[StepRequest]) -> None:
        self.calls.put(("begin", [request.body for request in requests]))

    def step(self, requests: Sequence[StepRequest]) -> None:
        self.calls.put(("step", [request.body for request in requests]))
        self.permits.get(timeout=TIMEOUT_S)
        for request in requests:
            request.emit("a")

    def end(self, request: StepRequest) -> None:
        self.calls.put(("end", [request.body]))

    def next_call(self) -> tuple[str, list[str]]:
        return self.calls.get(timeout=TIMEOUT_S)


class Worker:
    """The worker's end of the connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(TIMEOUT_S)
        self.sock = sock
        self.reader = MessageReader(sock)
        self.raised: list[frames.Raised] = []

    def admit(self, key: int, body: Any, *, is_alone: bool = False) -> None:
        admit = Admit(key, (), (f"id{key}", "", {}), 1, True, (), is_alone)
        frames.send_message(self.sock, admit.message(), pack_values([body]))

    def send(self, message: Drop | Resume) -> None:
        frames.send_message(self.sock, message.message())

    def step(self) -> Step:
        fields, payload = self.reader.receive()
        assert not payload
        while (raised := frames.Raised.read(fields)) is not None:
            self.raised.append(raised)
            fields, _ = self.reader.receive()
        return Step.read(fields)

    def output(self, key: int) -> Any:
        """The output of this request, once it has ended."""
        while True:
            for advance in self.step().advances:
                if advance.key == key and advance.has_ended:
                    assert advance.output is not None
                    return unpack_values(advance.output)[0]


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.fixture
def gated(pair: tuple[socket.socket, socket.socket]) -> Iterator[tuple[Worker, Gated]]:
    """A worker, and the model whose loop runs in a thread."""
    ours, theirs = pair
    model = Gated()
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, SteppingModel)
    thread = threading.Thread(target=StepLoop(theirs, loaded, RaisedLog(lambda _: None)).run)
    thread.start()
    try:
        yield Worker(ours), model
    finally:
        ours.close()
        model.permits.put(True)
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_requests_that_arrive_during_a_step_are_begun_together_before_the_next(
    gated: tuple[Worker, Gated],
) -> None:
    worker, model = gated
    worker.admit(1, "x")
    assert [model.next_call(), model.next_call()] == [("begin", ["x"]), ("step", ["x"])]
    worker.send(Drop([1]))
    worker.admit(2, "y")
    worker.admit(3, "z")
    worker.admit(4, "waits for a slot")
    model.permits.put(True)
    assert [advance.key for advance in worker.step().advances] == [1]
    calls = [model.next_call() for _ in range(3)]
    assert calls == [("end", ["x"]), ("begin", ["y", "z"]), ("step", ["y", "z"])]


def test_chunks_of_a_step_are_one_message(gated: tuple[Worker, Gated]) -> None:
    worker, model = gated
    worker.admit(1, "x")
    assert model.next_call() == ("begin", ["x"])
    worker.admit(2, "y")
    model.permits.put(True)
    model.permits.put(True)
    first, second = worker.step(), worker.step()
    assert [advance.key for advance in second.advances] == [1, 2]
    assert [advance.chunk for advance in second.advances] == [pack_values(["a"])] * 2
    assert (first.running, second.running, second.size) == (1, 2, 2)


def test_process_waits_while_nothing_is_to_be_generated(gated: tuple[Worker, Gated]) -> None:
    worker, model = gated
    worker.admit(1, "x", is_alone=True)
    model.permits.put(True)
    assert [advance.key for advance in worker.step().advances] == [1]
    worker.admit(2, "y", is_alone=True)
    model.permits.put(True)
    assert [advance.key for advance in worker.step().advances] == [2]
    worker.send(Resume())
    model.permits.put(True)
    assert [advance.key for advance in worker.step().advances] == [1, 2]
    worker.send(Drop([1, 2]))
    model.permits.put(True)  # of the step that may have begun before the drop came
    worker.admit(3, "z")
    while model.next_call() != ("begin", ["z"]):
        pass


def test_all_begun_requests_are_ended_when_the_worker_closes_the_connection(
    gated: tuple[Worker, Gated],
) -> None:
    worker, model = gated
    worker.admit(1, "x")
    assert [model.next_call(), model.next_call()] == [("begin", ["x"]), ("step", ["x"])]
    worker.sock.shutdown(socket.SHUT_RDWR)
    model.permits.put(True)
    assert model.next_call() == ("end", ["x"])


def test_model_pauses_while_the_worker_does_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    """And what it emitted meanwhile comes in order, complete, once the worker reads."""
    ours, theirs = pair
    steps = 0

    def endless(body: str) -> Iterator[str]:
        nonlocal steps
        while True:
            steps += 1
            yield f"{steps} {body}"

    loaded = load_model(endless, "cpu")
    assert isinstance(loaded, SteppingModel)
    thread = threading.Thread(target=StepLoop(theirs, loaded, RaisedLog(lambda _: None)).run)
    thread.start()
    worker = Worker(ours)
    worker.admit(1, "x" * 10_000)
    seen = 0

    def has_stopped() -> bool:
        nonlocal seen
        before, seen = seen, steps
        return seen > 0 and before == seen

    wait_until(has_stopped, description="the model pauses")
    for number in range(1, seen + 10):
        (advance,) = worker.step().advances
        assert unpack_values(advance.chunk)[0].split()[0] == str(number)
    ours.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


MODEL = """
class Echo:
    max_batch_size = 2

    def begin(self, requests):
        for request in requests:
            request.state = iter(request.body)

    def step(self, requests):
        for request in requests:
            letter = next(request.state, None)
            if letter == "!":
                raise SystemExit(f"{request.correlation_id} exits")
            request.finish() if letter is None else request.emit(letter)

    def end(self, request):
        print("end of", request.correlation_id)

    def unload(self):
        print("unloaded")

def letters(body):
    yield from body

class Both(Echo):
    def predict(self, batch): ...
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "stepping_models.py"
    path.write_text(MODEL)
    return path


def started(ours: socket.socket, theirs: socket.socket, location: str) -> subprocess.Popen[str]:
    """A model process on the second of these sockets, which was told what to load."""
    arguments = [str(os.getpid()), str(theirs.fileno()), location, "cpu", "w"]
    command = [sys.executable, "-m", "carpool_worker.model_process.main", *arguments]
    process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE, text=True)
    theirs.close()
    frames.send_message(ours, (CONFIGURATION,), Configuration().encode())
    return process


def test_model_process_generates_until_the_connection_is_closed(
    pair: tuple[socket.socket, socket.socket], model_file: Path
) -> None:
    ours, theirs = pair
    process = started(ours, theirs, f"{model_file}:Echo")
    worker = Worker(ours)
    ready = receive_load_result(worker.reader)
    assert isinstance(ready, Ready)
    assert (ready.kind, ready.wants_requests, ready.settings["max_batch_size"]) == (
        ModelKind.STEPPING,
        True,
        "2",
    )
    worker.admit(1, "Once")
    assert worker.output(1) == "Once"
    worker.admit(2, "exits!")
    while not (step := worker.step()).advances[-1].has_ended:
        pass
    (advance,) = step.advances
    assert advance.failure is not None
    (raised,) = worker.raised
    assert step.error_of(2) == raised.error and raised.error.startswith("SystemExit at stepping_models.py:")
    assert tuple(advance.failure) == ("INTERNAL", "the model failed on this request: id2 exits")
    worker.admit(3, "x" * 1_000_000)
    assert worker.step().running == 1
    ours.shutdown(socket.SHUT_RDWR)
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0
    printed = [line for line in log.splitlines() if not line.startswith("{")]
    assert printed == ["end of id1", "end of id2", "end of id3", "unloaded"]
    assert "SystemExit" not in log, "the worker logs it"


def test_generator_function_in_a_model_process(
    pair: tuple[socket.socket, socket.socket], model_file: Path
) -> None:
    ours, theirs = pair
    process = started(ours, theirs, f"{model_file}:letters")
    worker = Worker(ours)
    ready = receive_load_result(worker.reader)
    assert isinstance(ready, Ready)
    assert ready.kind is ModelKind.STEPPING
    worker.admit(1, [1, 2])
    assert worker.output(1) == [1, 2]
    ours.shutdown(socket.SHUT_RDWR)
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0


def test_unusable_stepping_model_is_refused(
    pair: tuple[socket.socket, socket.socket], model_file: Path
) -> None:
    ours, theirs = pair
    process = started(ours, theirs, f"{model_file}:Both")
    result = receive_load_result(MessageReader(ours))
    assert isinstance(result, frames.LoadFailed)
    assert "one or the other" in result.reason
    assert not result.trace
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1


def test_model_that_executes_batches_is_not_stepping() -> None:
    assert description_of(load_model(len, "cpu")).kind is ModelKind.PLAIN
