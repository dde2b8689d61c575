"""The real model process, and the slot that keeps one alive: what a model does to its process stays there."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from carpool.clock import RedisClock
from carpool.messages import JSON, MSGPACK, Batch, BatchedRequest
from carpool.wire.bodies import decode_body, encode_body
from carpool_worker import process_handle as process_module
from carpool_worker.codec import Codec, Job
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import ProcessGoneError, pack_values, unpack_values
from carpool_worker.process_handle import ModelLoadError, ModelProcess, devices
from carpool_worker.replica import Slot
from support.waiting import wait_until

MODELS = '''
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np
from carpool.wire.tensors import TensorSpec

print("imported")

class Obedient:
    """Does what each body says, writes down that it did, and answers in capitals."""

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
            Path(where + ".begun").touch()
            while not Path(where).exists():
                time.sleep(0.001)
        elif verb == "hold":
            Path(where + ".begun").touch()
            sys.setswitchinterval(60)
            while not Path(where).exists():
                sum(range(300_000))
        elif verb == "print":
            print("a word from the model")
            sys.stderr.write("and another\\n")
            os.write(1, b"\\x00\\xff straight into its stdout\\n")
        return verb.upper()

    def unload(self):
        self.log.write("unloaded\\n")

class Doubling:
    max_batch_sise = 4
    inputs = [TensorSpec("x", "FP32", (-1,))]
    outputs = [TensorSpec("y", "FP32", (-1,))]

    def predict(self, batch, requests):
        return batch * 2

class Stuck(Obedient):
    def unload(self):
        threading.Event().wait()

class Unloadable:
    def load(self, device):
        raise RuntimeError(f"no weights for {device}")
    def predict(self, batch):
        return batch

class LeavesWhileLoading(Unloadable):
    def load(self, device):
        os._exit(3)

class KilledWhileLoading(Unloadable):
    def load(self, device):
        os.kill(os.getpid(), signal.SIGKILL)

class Misdeclared:
    inputs = ["x"]
    predict = len

class Unsettled:
    max_batch_size = "many"
    predict = len

class Undecided:
    predict = len
    @property
    def max_batch_size(self):
        raise ValueError("sizes are up to the weather")

class OnlyOnce(Obedient):
    """Loads once, and not again."""
    def load(self, device):
        Path(__file__).with_name("loaded").touch(exist_ok=False)
        super().load(device)
'''

Start = Callable[[str], ModelProcess]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    file = tmp_path / "process_models.py"
    file.write_text(MODELS)
    return file


@pytest.fixture
def process_of(models: Path) -> Iterator[Start]:
    """Make processes, and close them."""
    made: list[ModelProcess] = []

    def make(name: str) -> ModelProcess:
        made.append(ModelProcess(f"{models}:{name}", "cpu"))
        return made[-1]

    yield make
    for one in made:
        one.close(wait_s=0)


@pytest.fixture
def log(tmp_path: Path) -> Callable[[], list[str]]:
    """What the model wrote down, a line for each batch."""
    return lambda: (tmp_path / "log").read_text().splitlines()


def execute(process: ModelProcess, *bodies: Any) -> Any:
    """One batch through the process; its results."""
    process.send({"count": len(bodies), "first": 0}, pack_values(bodies))
    header, payload = process.receive()
    assert header["failures"] == {}
    return unpack_values(payload)


# --- the process -------------------------------------------------------------------------------------------


def test_it_says_what_its_model_is(process_of: Start) -> None:
    process = process_of("Obedient")
    assert not process.alive and process.pid is None
    ready = process.start()
    assert ready["settings"]["max_batch_size"] == "5"
    assert ready["settings"]["max_queue_delay_ms"] == "1.5"
    assert (ready["inputs"], ready["outputs"], ready["wants_requests"]) == ([], [], False)
    assert process.alive and process.pid != os.getpid()

    ready = process_of("Doubling").start()
    assert (ready["inputs"], ready["outputs"]) == ([["x", "FP32", [-1]]], [["y", "FP32", [-1]]])
    assert ready["wants_requests"]
    assert ready["misspelt"] == {"max_batch_sise": "max_batch_size"}


def test_it_executes_frames_in_order(process_of: Start) -> None:
    process = process_of("Obedient")
    process.start()
    for number in range(3):
        process.send({"count": 1, "first": number}, pack_values([f"word{number}"]))
    for number in range(3):
        header, payload = process.receive()
        assert (header["count"], header["first"], header["failures"]) == (1, number, {})
        assert header["compute_us"] >= 0
        assert unpack_values(payload) == [f"WORD{number}"]


def test_what_a_model_prints_goes_with_the_logs_and_garbles_nothing(
    process_of: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    process = process_of("Obedient")
    process.start()
    assert execute(process, "print", "a", "print") == ["PRINT", "A", "PRINT"]
    process.close()  # which writes out what it holds back
    out, err = capfd.readouterr()
    assert out == ""
    for words in (
        "imported",
        "loaded on cpu",
        "a word from the model",
        "and another",
        "straight into its stdout",
    ):
        assert words in err


def test_control_c_is_its_workers_to_act_on(process_of: Start) -> None:
    process = process_of("Obedient")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    assert execute(process, "still", "here") == ["STILL", "HERE"]


def test_close_lets_the_model_unload(process_of: Start, log: Callable[[], list[str]]) -> None:
    process = process_of("Obedient")
    process.start()
    execute(process, "a")
    process.close()
    assert log() == ["a", "unloaded"]
    assert not process.alive
    process.close()  # twice is fine
    for talk in (process.receive, lambda: process.send({}, b"")):
        with pytest.raises(ProcessGoneError, match="not started"):
            talk()


def test_close_waits_for_what_is_executed(
    process_of: Start, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    process = process_of("Obedient")
    process.start()
    go = tmp_path / "go"
    process.send({"count": 1, "first": 0}, pack_values([f"wait {go}"]))
    wait_until((tmp_path / "go.begun").exists, description="the batch is executed")
    go.touch()
    process.close()
    assert log()[-1] == "unloaded"


def test_close_kills_what_does_not_leave(process_of: Start) -> None:
    process = process_of("Stuck")
    process.start()
    pid = process.pid
    process.close(wait_s=0.05)
    assert pid is not None and not Path(f"/proc/{pid}").exists()


def test_a_kill_is_a_process_gone_and_it_may_be_started_again(process_of: Start) -> None:
    process = process_of("Obedient")
    process.start()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ProcessGoneError):
        process.receive()
    assert process.why_gone() == "SIGKILL"
    assert not process.alive
    with pytest.raises(ProcessGoneError):
        process.send({}, b"")
    process.start()
    assert execute(process, "a") == ["A"]


# --- loading fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said", "where"),
    [
        ("Unloadable", "RuntimeError: no weights for cpu", "in load"),
        ("Undecided", "ValueError: sizes are up to the weather", "in max_batch_size"),
    ],
)
def test_a_model_whose_code_raises_says_why_and_where(
    process_of: Start, name: str, said: str, where: str
) -> None:
    process = process_of(name)
    with pytest.raises(ModelLoadError) as caught:
        process.start()
    assert str(caught.value) == said
    assert where in caught.value.trace
    assert not process.alive


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Misdeclared", "the model's 'inputs' must be a list of TensorSpec, not ['x']"),
        ("Unsettled", "max_batch_size: 'many' must be a whole number, 1 or more"),
        ("Missing", "has no 'Missing'"),
    ],
)
def test_of_a_wrong_declaration_a_sentence_is_all_that_is_said(
    process_of: Start, name: str, said: str
) -> None:
    process = process_of(name)
    with pytest.raises(ModelLoadError) as caught:
        process.start()
    assert str(caught.value).endswith(said)
    assert caught.value.trace == ""
    assert not process.alive


@pytest.mark.parametrize(
    ("name", "how"), [("LeavesWhileLoading", "exit code 3"), ("KilledWhileLoading", "SIGKILL")]
)
def test_a_process_that_ends_while_loading_says_how(process_of: Start, name: str, how: str) -> None:
    with pytest.raises(ModelLoadError, match=f"its process ended with {how} while loading"):
        process_of(name).start()


def test_a_file_that_is_not_python(models: Path, process_of: Start) -> None:
    models.write_text("class Model\n")
    with pytest.raises(ModelLoadError, match="SyntaxError") as caught:
        process_of("Model").start()
    assert models.name in str(caught.value)


# --- the slot ----------------------------------------------------------------------------------------------


class Bench:
    """A slot with its two loops' moves in one place. `notes` is who was announced to be executed alone."""

    def __init__(self, process: ModelProcess) -> None:
        self.slot = Slot("worker/0", process, RedisClock(), WorkerMetrics("m"))
        self.slot.codec = Codec(process.start())
        self.ids = itertools.count(1)
        self.notes: list[tuple[str, int]] = []

    def take(self, *bodies: Any, content_type: str = JSON, epoch: int = 1) -> Job:
        """Bring a batch of these into the slot."""
        batch_id = f"{next(self.ids)}-0"
        requests = [
            BatchedRequest(
                "0-0", f"{batch_id}:{at}", content_type, None, 0, None, encode_body(content_type, body), None
            )
            for at, body in enumerate(bodies)
        ]
        job = Job(Batch(batch_id, epoch, requests, "full", 0, ""))
        assert self.slot.codec is not None
        self.slot.codec.prepare(job, 0)
        self.slot.take(job)
        return job

    def note(self, job: Job, position: int) -> None:
        self.notes.append((job.batch.id, position))

    def finish(self, job: Job) -> list[Any]:
        """The next finished job, which must be this one: each result, or its status."""
        assert self.slot.finish_next(self.note, 10.0) is job
        self.slot.drop(job)
        results = [job.results[position] for position in range(len(job.batch.requests))]
        return [
            one.status if one.body is None else decode_body(one.content_type, one.body) for one in results
        ]


@pytest.fixture
def bench(process_of: Start) -> Bench:
    return Bench(process_of("Obedient"))


def test_batches_are_finished_in_order_and_the_next_is_sent_ahead(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    go = tmp_path / "go"
    first = bench.take(f"wait {go}", "a")
    second = bench.take("b")
    # Given that the second waits in the process's pipe while the first is executed
    assert first.sent and second.sent
    assert bench.slot.held() == [("1-0", 1), ("2-0", 1)]
    go.touch()
    assert bench.finish(first) == ["WAIT", "A"]
    assert bench.slot.held() == [("2-0", 1)]
    assert bench.finish(second) == ["B"]
    assert bench.slot.jobs() == [] and bench.notes == []
    assert log() == [f"wait {go} a", "b"]


def test_a_model_that_holds_the_gil_holds_nobody_else(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first = bench.take(f"hold {go}")
    wait_until((tmp_path / "go.begun").exists, description="the model computes")
    # Then, meanwhile, another batch is taken, and both can be renewed
    second = bench.take("b")
    assert bench.slot.held() == [("1-0", 1), ("2-0", 1)]
    assert not bench.slot.wait_for_room(0)
    go.touch()
    assert bench.finish(first) == ["HOLD"]
    assert bench.finish(second) == ["B"]


def test_room_is_for_one_batch_beside_the_one_that_is_executed(bench: Bench) -> None:
    assert bench.slot.wait_for_room(0)
    first, second = bench.take("a"), bench.take("b")
    assert not bench.slot.wait_for_room(0)
    assert not bench.slot.wait_until_empty(0)
    bench.finish(first)
    bench.finish(second)
    assert bench.slot.wait_for_room(0) and bench.slot.wait_until_empty(0)


def test_whoever_waits_for_room_is_told_when_there_is_some(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    wait = bench.slot._changed.wait

    def announce(timeout_s: float | None) -> bool:
        waits.set()  # the lock is held: nobody can tell us anything before we wait
        return wait(timeout_s)

    monkeypatch.setattr(bench.slot._changed, "wait", announce)
    first, second = bench.take("a"), bench.take("b")
    found: list[bool] = []
    intake = threading.Thread(target=lambda: found.append(bench.slot.wait_for_room(60.0)), daemon=True)
    intake.start()
    assert waits.wait(10.0)
    bench.finish(first)
    bench.finish(second)
    intake.join(10.0)
    assert found == [True]


def test_who_kills_the_process_is_buried_at_the_second_death_and_all_others_are_served(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    pid = bench.slot.process.pid
    poisoned = bench.take("a", "die", "b")
    behind, last = bench.take("c", "d"), bench.take("e")
    # When the process dies of the batch, and then of one of its requests alone
    assert bench.finish(poisoned) == ["A", "ABORTED", "B"]
    # Then each was announced before it was executed alone
    assert bench.notes == [("1-0", 0), ("1-0", 1), ("1-0", 2)]
    (letter,) = poisoned.dead
    assert letter.request is poisoned.batch.requests[1]
    assert letter.attempts == 2 and "ended 2 times" in letter.reason
    # And what stood behind is executed afterwards, in order, at once and as a whole
    assert bench.finish(behind) == ["C", "D"]
    assert bench.finish(last) == ["E"]
    assert not behind.dead and not behind.deaths
    assert log() == ["a die b", "a", "die", "b", "c d", "e"]
    assert bench.slot.process.pid != pid


def test_a_death_that_no_request_is_guilty_of_buries_nobody(
    bench: Bench, tmp_path: Path, log: Callable[[], list[str]]
) -> None:
    job = bench.take("a", f"die-once {tmp_path / 'died'}", "b")
    assert bench.finish(job) == ["A", "DIE-ONCE", "B"]
    assert job.dead == [] and len(log()) == 4


def test_a_process_that_is_killed_in_the_middle_of_a_batch_is_replaced(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    first, second = bench.take(f"wait {go}"), bench.take("b")
    wait_until((tmp_path / "go.begun").exists, description="the batch is executed")
    assert bench.slot.process.pid is not None
    os.kill(bench.slot.process.pid, signal.SIGKILL)
    go.touch()
    assert bench.finish(first) == ["WAIT"]
    assert bench.finish(second) == ["B"]


def test_a_process_that_dies_while_nothing_is_in_hand_is_replaced(bench: Bench) -> None:
    process = bench.slot.process
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not process.alive, description="the process is gone")
    assert bench.slot.finish_next(bench.note, 0) is None
    assert process.alive and process.pid != pid
    assert bench.finish(bench.take("a")) == ["A"]


def test_a_batch_taken_while_the_process_is_dead_is_served(bench: Bench) -> None:
    process = bench.slot.process
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not process.alive, description="the process is gone")
    assert bench.finish(bench.take("a", "b")) == ["A", "B"]


def test_a_redelivered_batch_is_executed_one_at_a_time_and_nothing_is_sent_ahead_of_it(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    again = bench.take("a", "b", epoch=2)
    behind = bench.take("c", "d")
    assert not again.sent and not behind.sent
    assert bench.finish(again) == ["A", "B"]
    assert bench.notes == [("1-0", 0), ("1-0", 1)]
    assert bench.finish(behind) == ["C", "D"]
    assert log() == ["a", "b", "c d"]


def test_what_the_note_raises_goes_through_and_the_batch_may_be_dropped(
    bench: Bench, log: Callable[[], list[str]]
) -> None:
    class LostError(Exception):
        pass

    def note(job: Job, position: int) -> None:
        bench.note(job, position)
        if position == 1:
            raise LostError

    lost, next_one = bench.take("a", "b", epoch=2), bench.take("c")
    with pytest.raises(LostError):
        bench.slot.finish_next(note, 10.0)
    assert bench.slot.held() == [("1-0", 2), ("2-0", 1)]
    bench.slot.drop(lost)
    assert bench.finish(next_one) == ["C"]
    assert log() == ["a", "c"]


def test_a_model_that_cannot_be_loaded_again_is_an_error(process_of: Start) -> None:
    bench = Bench(process_of("OnlyOnce"))
    bench.take("die")
    with pytest.raises(ModelLoadError, match="FileExistsError"):
        bench.slot.finish_next(bench.note, 10.0)


def test_an_outcome_that_nobody_understands_fails_its_batch_and_not_the_next(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(*_: Any) -> None:
        raise KeyError("surprise")

    first, second = bench.take("a", "b"), bench.take("c")
    with monkeypatch.context() as patch:
        patch.setattr(Codec, "take_outcome", raises)
        assert bench.finish(first) == ["INTERNAL", "INTERNAL"]
    assert bench.finish(second) == ["C"]


def test_a_slot_that_closes_replaces_nothing_and_blames_nobody(bench: Bench, tmp_path: Path) -> None:
    job = bench.take(f"wait {tmp_path / 'never'}")
    raised: list[BaseException] = []

    def finish() -> None:
        try:
            bench.slot.finish_next(bench.note, 10.0)
        except ProcessGoneError as error:
            raised.append(error)

    committer = threading.Thread(target=finish)
    committer.start()
    wait_until((tmp_path / "never.begun").exists, description="the batch is executed")
    bench.slot.close(wait_s=0)
    committer.join(10.0)
    assert not committer.is_alive() and len(raised) == 1
    assert not bench.slot.process.alive
    assert not job.deaths and bench.slot.held() == [("1-0", 1)]


# --- more than fits in the pipe ----------------------------------------------------------------------------


@contextmanager
def killed_if_stuck(process: ModelProcess) -> Iterator[None]:
    """A test that would hang for ever fails instead: its process dies, and deaths are counted."""

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


@pytest.mark.parametrize("ahead", [True, False], ids=["sent ahead", "sent when it is due"])
def test_large_tensors_of_several_shapes_both_ways(
    process_of: Start, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    # Given a pipe that takes far less than a frame, in either direction
    monkeypatch.setattr(process_module, "_SOCKET_BYTES", 4096)
    bench = Bench(process_of("Doubling"))
    arrays = [np.arange(100_000 + length, dtype=np.float32) for length in range(4)]
    jobs: list[Job] = []

    def take() -> None:
        jobs.extend(bench.take(*arrays, content_type=MSGPACK) for _ in range(3))

    with killed_if_stuck(bench.slot.process):
        if not ahead:
            jobs.append(bench.take(arrays[0], content_type=MSGPACK, epoch=2))
            take()
            assert not any(job.sent for job in jobs)
            np.testing.assert_array_equal(bench.finish(jobs.pop(0))[0], arrays[0] * 2)
        intake = threading.Thread(target=take if ahead else lambda: None)
        intake.start()
        for _ in range(3):
            wait_until(bench.slot.jobs, description="the next job is in hand")
            job = bench.slot.jobs()[0]
            for got, array in zip(bench.finish(job), arrays, strict=True):
                np.testing.assert_array_equal(got, array * 2)
            assert not job.deaths
        intake.join(10.0)
    assert not intake.is_alive() and len(jobs) == 3


# --- devices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "replicas", "named"),
    [
        ("cpu", 3, ["cpu", "cpu", "cpu"]),
        ("cuda:0,cuda:1", 3, ["cuda:0", "cuda:1", "cuda:0"]),
        (" cuda:2 , cpu", 1, ["cuda:2"]),
        ("", 1, ["cpu"]),
        ("cuda:0,cuda:1", "auto", ["cuda:0", "cuda:1"]),
        ("", "auto", ["cpu"]),
    ],
)
def test_each_process_gets_a_device_in_turn(
    wanted: str, replicas: int | Literal["auto"], named: Sequence[str]
) -> None:
    assert devices(wanted, replicas) == named
