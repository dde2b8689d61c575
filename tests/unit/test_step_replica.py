"""The loop of a stepping model's replica: when it sends requests to its process, and what it writes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final
from unittest.mock import Mock

import pytest

from carpool.clock import RedisClock
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import JSON
from carpool.model_settings import ModelKind, ModelSettings, prefetched_slots
from carpool.store.steps import StepReply, StepWrite
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.model_process.frames import Raised, Ready, pack_values
from carpool_worker.model_process.stepping.frames import Admit, Advance, Step, read_worker_message
from carpool_worker.stepping import replica as step_replica
from carpool_worker.stepping import writer as step_writer
from carpool_worker.stepping.replica import StepReplica

SLOTS: Final = 32
ASKED: Final = prefetched_slots(SLOTS)


def execution_of(name: str) -> Execution:
    run = BatchedRun("1-0", [name], [b"1"], JSON, None, 0, None, None)
    return Execution(Batch(f"1-{name}", 1, [run], "full", 0, "", stream=True))


class Process:
    """A model process. `sent`: the messages of each flush that sent any; `steps` are received, in order."""

    def __init__(self) -> None:
        self.ready = self.alive = True
        self.has_unsent = False
        self.sent: list[list[Any]] = []
        self.steps: list[Step] = []
        self.raised: list[Raised] = []
        self._unsent: list[Any] = []
        self._socket, self._other = socket.socketpair()
        self.descriptor = self._socket.fileno()

    def check_loading(self) -> None:
        """Its model is loaded."""

    @property
    def has_buffered(self) -> bool:
        return bool(self.steps)

    def put_message(self, header: Any, *payload: Any) -> None:
        self._unsent.append(read_worker_message(header))

    def send_message(self, header: Any, *payload: Any) -> None:
        self.put_message(header)
        self.flush()

    def flush(self) -> None:
        if self._unsent:
            self.sent.append(self._unsent)
            self._unsent = []

    def receive_message(self, read: Callable[[Any], Any]) -> tuple[Any, bytes]:
        return read(self.steps.pop(0)), b""

    def close(self) -> None:
        self._socket.close()
        self._other.close()


class Fetcher:
    """Returns `parts`, one for each fetch. Then fetches find nothing, and wait if they may."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.asked: list[int] = []
        self.waiting = self._waits = False
        self._fetched = 0
        self._nothing, self._other = socket.socketpair()

    @property
    def descriptor(self) -> int | None:
        return self._nothing.fileno() if self._waits and not self.parts else None

    def start(self, count: int, *, wait: bool = True) -> list[Execution]:
        assert not self.waiting
        self.asked.append(count)
        self.waiting = True
        self._waits = wait
        return []

    def finish(self) -> list[Execution]:
        self.waiting = False
        size = self.parts.pop(0) if self.parts else 0
        self._fetched += size
        return [execution_of(str(number)) for number in range(self._fetched - size, self._fetched)]

    def check_overdue(self) -> None:
        """It may still come."""

    def close(self) -> None:
        self._nothing.close()
        self._other.close()


class Store:
    """Writes everything."""

    def __init__(self) -> None:
        self.clock = RedisClock()
        self.writes: list[list[StepWrite]] = []

    def write(self, consumer: str, writes: Sequence[StepWrite]) -> list[StepReply]:
        self.writes.append(list(writes))
        return [StepReply("WRITTEN", 0) for _ in writes]


class Bench:
    """A replica between these."""

    def __init__(self) -> None:
        self.process, self.fetcher, self.store = Process(), Fetcher(), Store()
        parts: dict[str, Any] = {"process": self.process, "source": self.fetcher, "store": self.store}
        settings, self.metrics = ModelSettings(max_batch_size=SLOTS), Mock()
        self.replica = StepReplica(
            Member("w"),
            codec=Codec(Ready({}, (), (), False, {})),
            settings=settings,
            committer=Mock(),
            metrics=self.metrics,
            log=Mock(),
            **parts,
        )

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.replica.run_once()

    def admitted(self) -> list[int]:
        """How many requests each flush sent."""
        return [sum(isinstance(message, Admit) for message in messages) for messages in self.process.sent]

    def step(self, keys: Sequence[int], emitted: int = 1) -> None:
        """The process took a step for these."""
        advances = [Advance(key, pack_values(["x"]), emitted) for key in keys]
        self.process.steps.append(Step(1000, 0, len(keys), len(keys), advances))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A replica that never waits for long, and takes any time to be short."""
    monkeypatch.setattr(step_replica, "WAIT_S", 0.0)
    monkeypatch.setattr(step_writer, "CHECK_INTERVAL_S", 60.0)
    bench = Bench()
    yield bench
    bench.process.close()
    bench.fetcher.close()


def test_requests_that_come_together_are_begun_together(bench: Bench) -> None:
    """Given four processes, expect that this one asks for a share of what it has space for, as long as there
    are as many."""
    bench.replica.member.model_processes = 4
    bench.fetcher.parts = [9, 7, 1]
    bench.run(3)
    assert bench.admitted() == []
    bench.run(1)
    assert bench.admitted() == [17]
    assert bench.fetcher.asked == [9, 7, 5, 5], "of 36, 27, 20 and 19 places"


def test_the_only_process_asks_for_all(bench: Bench) -> None:
    bench.replica.member.model_processes = 1
    bench.fetcher.parts = [SLOTS + ASKED]
    bench.run(2)
    assert bench.admitted() == [SLOTS + ASKED]
    assert bench.fetcher.asked == [SLOTS + ASKED]


@pytest.mark.parametrize("model_processes", [100, pytest.param(0, id="unknown")])
def test_one_of_many_asks_for_a_few(bench: Bench, model_processes: int) -> None:
    bench.replica.member.model_processes = model_processes
    bench.run(1)
    assert bench.fetcher.asked == [ASKED]


def test_process_that_has_requests_is_not_made_to_wait(bench: Bench) -> None:
    bench.fetcher.parts = [1, ASKED, ASKED]
    bench.run(4)
    assert bench.admitted() == [1, ASKED, ASKED]


def test_what_is_not_there_is_not_waited_for(bench: Bench) -> None:
    bench.fetcher.parts = [ASKED]
    bench.run(3)
    assert bench.admitted() == [ASKED]


def test_process_has_no_more_slots_than_its_worker_declares(bench: Bench) -> None:
    """Given a batch that was dispatched for workers with more, until an operator says so."""
    bench.replica.batch_size_max = 4
    assert bench.replica.slots == 4
    settings = ModelSettings(max_batch_size=64).for_workers(ModelKind.STEPPING)
    bench.replica._in_hand._use_settings(Batch("2-0", 1, [], "full", 0, "", settings=settings))
    bench.run(1)
    bench.replica.batch_size_max = 64
    bench.run(1)
    configured = [message for messages in bench.process.sent for message in messages]
    assert [message.max_batch_size for message in configured] == [4, 64]
    assert bench.replica.slots == 64


def test_a_step_writes_only_requests_with_news(bench: Bench) -> None:
    bench.fetcher.parts = [3]
    bench.run(3)
    bench.store.writes.clear()
    bench.step([0, 2])
    bench.run(2)
    (writes,) = bench.store.writes
    assert [write.batch.id for write in writes] == ["1-0", "1-2"]


def test_requests_that_began_took_no_step(bench: Bench) -> None:
    bench.fetcher.parts = [3]
    bench.run(3)
    bench.process.steps.append(Step(0, 7_000, 3, 3, [Advance(0, pack_values(["x"]), 1)]))
    bench.step([0, 1, 2])
    bench.run(3)
    bench.metrics.stepped.assert_called_once_with(1000)


def test_all_are_asked_about_from_time_to_time(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_writer, "CHECK_INTERVAL_S", 0.0)
    bench.fetcher.parts = [3]
    bench.run(2)
    bench.store.writes.clear()
    bench.run(1)
    assert [len(writes) for writes in bench.store.writes] == [3]


def test_requests_that_have_just_come_are_not_asked_about(bench: Bench) -> None:
    bench.fetcher.parts = [3]
    bench.run(2)
    assert bench.admitted() == [3]
    assert bench.store.writes == []


def test_what_is_kept_is_renewed_with_the_first_chunk_and_then_rarely(bench: Bench) -> None:
    bench.fetcher.parts = [1]
    bench.run(2)
    for number in range(1, 4):
        bench.step([0], number)
        bench.run(2)
    renewed = [write.is_renewed for writes in bench.store.writes for write in writes if write.chunks]
    assert renewed == [True, False, False]
