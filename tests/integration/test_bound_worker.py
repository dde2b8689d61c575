"""A worker of a bound model and a batcher that the test plays, on a real Redis."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.errors import ABORTED, DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, OK
from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import Result
from carpool.messages.sequences import SlotFreed
from carpool.model_settings import ModelSettings
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link
from carpool.store.results import Address, Answer, answer_ahead
from carpool.wire.requests import decode_entry
from support.models.bound import digest
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until
from support.wire import flat_of

MODEL: Final = "Hearing"
KEYS: Final = Keys(MODEL)
LEASE_MS: Final = 6000  # longer than a process is held up on a busy machine
LOST: Final = "sequence_id: its model process ended; begin it again with sequence_start"


class Played:
    """A worker, and what a batcher does for it, step by step."""

    def __init__(self, home: Path) -> None:
        self.hooks = home / "hooks"
        self.stack = Stack(home, environment={"worker": {"CARPOOL_TEST_HOOKS": str(self.hooks)}})
        self.redis = self.stack.redis
        self.link = Link(self.stack.url, name="test")
        self.batcher = BatcherStore(self.link, KEYS)

    def worker(self) -> Service:
        worker = self.stack.worker(f"bound.py:{MODEL}", "--lease-ms", str(LEASE_MS))
        name = worker.wait_for("worker ready")["worker"]
        wait_until(lambda: self.processes(name), description="its process has joined")
        return worker

    def processes(self, worker: str = "") -> list[str]:
        return [name for name in self.stack.live_workers(MODEL) if name.startswith(worker)]

    def process(self, but: str = "") -> str:
        """The one process, waiting until it is another than `but`."""
        found: list[str] = []

        def is_another() -> bool:
            found[:] = self.processes()
            return len(found) == 1 and found != [but]

        wait_until(is_another, description="there is one process, under another name")
        return found[0]

    def dispatch(self, process: str, *requests: tuple[str, Any]) -> list[str]:
        """Requests as one batch: the ID of a sequence, which starts it if in capitals, and ends it with a
        dot, and the body. Returns the correlation IDs."""
        runs = []
        for name, body in requests:
            fields: dict[str, Any] = {"body": body, "sequence_id": name.rstrip(".").lower()}
            fields |= {"content_type": "application/json"}
            fields |= {"sequence_start": 1} if name[0].isupper() else {}
            fields |= {"sequence_end": 1} if name.endswith(".") else {}
            entry_id = self.redis.xadd(KEYS.requests, fields)
            _, (run,) = decode_entry(entry_id, flat_of(fields), ModelSettings())
            assert isinstance(run, Run)
            runs.append(run)
        self.batcher.dispatch([Dispatch(runs, "full", "", process=process)], 60_000)
        return [run.correlation_ids[0] for run in runs]

    def answers(self, ids: list[str]) -> list[Any]:
        """The status of each, or its result."""
        envelopes = [self.stack.result(MODEL, one) for one in ids]
        return [of_one["body"] if of_one["status"] == OK else of_one["status"] for of_one in envelopes]

    def heard(self, process: str, *requests: tuple[str, Any]) -> list[Any]:
        return self.answers(self.dispatch(process, *requests))

    def told_end(self, process: str, sequence_id: str) -> None:
        self.batcher.refuse(
            self.batcher.prepare_refusal((), (), 60_000, freed=[SlotFreed(process, sequence_id)])
        )

    def wait_for_hook(self, line: str) -> None:
        wait_until(lambda: line in self.hooks.read_text().split("\n"), description=f"the model saw {line!r}")

    def kept_by(self, sequence_id: str) -> str | None:
        state = self.redis.hget(KEYS.sequence(sequence_id), "state")
        return None if state is None else state.decode()


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    played = Played(tmp_path)
    with played.stack:
        yield played
        played.link.close()


def test_sequence_stays_in_its_slot_and_redis_has_the_name_of_its_process(played: Played) -> None:
    played.worker()
    process = played.process()
    assert played.heard(process, ("A", "1"), ("B", "2")) == [[digest("a", [1]), 0], [digest("b", [2]), 1]]
    assert played.heard(process, ("b", "3")) == [[digest("b", [2, 3]), 1]]
    assert played.heard(process, ("a.", "4"), ("b", "5")) == [
        [digest("a", [1, 4]), 0],
        [digest("b", [2, 3, 5]), 1],
    ]
    assert (played.kept_by("a"), played.kept_by("b")) == (None, process)
    played.wait_for_hook("end a")
    assert played.heard(process, ("C", "6")) == [[digest("c", [6]), 0]]


def test_end_is_heard_before_what_comes_after_it(played: Played) -> None:
    """Given full slots, one that is told to end, and a start behind it, expect the start to have its slot."""
    played.worker()
    process = played.process()
    played.heard(process, ("A", "1"), ("B", "2"), ("C", "3"), ("D", "4"))
    played.told_end(process, "c")
    assert played.heard(process, ("E", "5")) == [[digest("e", [5]), 2]]
    played.wait_for_hook("end c")


@pytest.mark.parametrize(
    ("body", "status"), [('"raise"', INTERNAL), ('"return"', INTERNAL), ('"refuse"', INVALID_ARGUMENT)]
)
def test_slot_of_a_request_that_failed_is_free(played: Played, body: str, status: str) -> None:
    worker = played.worker()
    process = played.process()
    played.heard(process, ("A", "1"), ("B", "2"))
    ids = played.dispatch(process, ("a", body))
    assert played.answers(ids) == [status]
    logged = [(line["replica"], line["correlation_ids"]) for line in worker.events("model raised")]
    assert logged == ([(process, ids)] if body == '"raise"' else [])
    played.wait_for_hook("end a")
    assert played.heard(process, ("C", "3"), ("b", "4")) == [[digest("c", [3]), 0], [digest("b", [2, 4]), 1]]
    assert played.redis.hget(KEYS.sequence("a"), "broken") is not None


def test_slot_of_a_request_that_a_batcher_answered_is_free(played: Played, tmp_path: Path) -> None:
    """Given a deadline that passes while it is executed, expect the model to hear of the end."""
    played.worker()
    process = played.process()
    gate = tmp_path / "gate"
    (name,) = played.dispatch(process, ("A", f'"wait {gate}"'))
    wait_until((tmp_path / "gate.started").exists, description="it is executed")
    (batch_id,) = [entry_id.decode() for entry_id, _ in played.redis.xrange(KEYS.batches)]
    answer = Answer(0, Address(None, None), Result(name, DEADLINE_EXCEEDED, detail="late"))
    assert answer_ahead(played.link, KEYS, None, batch_id, [answer], None, 60_000) == {0}
    gate.touch()
    played.wait_for_hook("end a")
    assert played.answers([name]) == [DEADLINE_EXCEEDED]
    assert played.heard(process, ("B", "1")) == [[digest("b", [1]), 0]]


def test_model_process_dies_and_joins_under_another_name(played: Played, tmp_path: Path) -> None:
    """Given what it executes, and what waits in its inbox, expect ABORTED for both."""
    worker = played.worker()
    process = played.process()
    played.heard(process, ("A", "1"))
    executed = played.dispatch(process, ("a", f'"wait {tmp_path / "never"}"'))
    wait_until((tmp_path / "never.started").exists, description="it is executed")
    waiting = played.dispatch(process, ("B", "2"))
    (child,) = worker.children()
    os.kill(child, signal.SIGKILL)
    for name in (*executed, *waiting):
        answer = played.stack.result(MODEL, name)
        assert (answer["status"], answer["detail"]) == (ABORTED, LOST)
    other = played.process(but=process)
    assert other == f"{process}.2"
    assert played.heard(other, ("a", "3")) == [ABORTED]  # it does not have it
    (died,) = worker.events("model process died")
    assert (died["model"], died["replica"], died["correlation_ids"]) == (MODEL, process, executed)
    assert played.heard(other, ("A", "4")) == [[digest("a", [4]), 0]]
    assert played.stack.pending(MODEL) == 0


def test_process_that_was_taken_for_dead_has_no_sequences(played: Played) -> None:
    """Given a pause past the lease, expect its sequences to be ended, and another name."""
    worker = played.worker()
    process = played.process()
    played.heard(process, ("A", "1"), ("B", "2"))
    worker.freeze()
    played.stack.expire_lease(MODEL, worker)
    assert not played.processes()
    waiting = played.dispatch(process, ("a", "3"))
    worker.thaw()
    other = played.process(but=process)
    assert other == f"{process}.2"
    assert played.answers(waiting) in ([ABORTED], [[digest("a", [1, 3]), 0]])
    played.wait_for_hook("end a")
    played.wait_for_hook("end b")
    assert played.heard(other, ("C", "4")) == [[digest("c", [4]), 0]]


def test_start_whose_batch_another_worker_has_leaves_no_slot_in_use(played: Played, tmp_path: Path) -> None:
    """Given a commit that is fenced, expect the process to be believed dead, and to end what it began."""
    played.worker()
    process = played.process()
    gate = tmp_path / "gate"
    played.dispatch(process, ("A", f'"wait {gate}"'))
    wait_until((tmp_path / "gate.started").exists, description="it is executed")
    ((batch_id, _),) = played.redis.xrange(KEYS.batches)
    played.redis.xclaim(KEYS.batches, "workers", "another", 0, [batch_id])
    gate.touch()
    other = played.process(but=process)
    played.wait_for_hook("end a")
    assert played.heard(other, ("B", "1")) == [[digest("b", [1]), 0]]


def test_batch_of_a_dead_worker_is_aborted_by_another_one(played: Played, tmp_path: Path) -> None:
    first = played.worker()
    process = played.process()
    played.heard(process, ("A", "1"))
    (name,) = played.dispatch(process, ("a", f'"wait {tmp_path / "never"}"'))
    wait_until((tmp_path / "never.started").exists, description="it is executed")
    first.kill()
    played.stack.expire_lease(MODEL, first)
    played.worker()
    answer = played.stack.result(MODEL, name)
    assert (answer["status"], answer["detail"]) == (ABORTED, LOST)
    assert played.heard(played.process(but=process), ("A", "2")) == [[digest("a", [2]), 0]]


def test_drain_finishes_sequences_and_then_leaves(played: Played) -> None:
    """Given one that goes on during the drain, expect it to be served to its end, and no pending batch."""
    worker = played.worker()
    process = played.process()
    played.heard(process, ("A", "1"), ("B", "2"))
    worker.signal(signal.SIGTERM)
    wait_until(lambda: played.redis.sismember(KEYS.draining, process), description="it is marked")
    assert played.heard(process, ("a", "3")) == [[digest("a", [1, 3]), 0]]
    assert played.heard(process, ("a.", "4"), ("b", "5")) == [
        [digest("a", [1, 3, 4]), 0],
        [digest("b", [2, 5]), 1],
    ]
    assert worker.alive and played.processes() == [process]
    played.told_end(process, "b")
    assert worker.process.wait(EVENTUALLY_S) == 0
    assert worker.wait_for("worker stopped")["clean"]
    assert not played.processes()
    assert played.hooks.read_text().split("\n")[2:-1] == ["end a", "end b"]


def test_redis_is_emptied_and_the_process_joins_again(played: Played) -> None:
    played.worker()
    process = played.process()
    played.heard(process, ("A", "1"))
    played.redis.flushall()
    other = played.process(but=process)
    played.wait_for_hook("end a")
    assert played.heard(other, ("B", "2")) == [[digest("b", [2]), 0]]
