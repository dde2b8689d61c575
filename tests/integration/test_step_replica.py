"""The loop of a stepping replica on a real Redis, where any call may fail, before or after its effect.

Two replicas share the requests. Their model processes are in this one: the production code of a model process
without the process. Batchers are played by the test. Whatever happens, in any order, each reader gets what
the oracle says, each chunk once, and one result.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final
from unittest import mock

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from carpool.clock import RedisClock
from carpool.errors import ABORTED, CANCELLED
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import Result
from carpool.model_settings import ModelKind, ModelSettings
from carpool.parts import Buffer
from carpool.store import steps
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link, LinkError, Script
from carpool.store.results import Address, Answer
from carpool.store.steps import StepStore
from carpool.store.worker import WorkerStore
from carpool.wire.requests import decode_entry
from carpool_cli.local.embedded import EmbeddedRedis
from carpool_worker.batch_sources import Fetcher
from carpool_worker.committer import Committer
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import ProcessGoneError, Raised
from carpool_worker.model_process.model import SteppingModel, load_model
from carpool_worker.model_process.stepping.frames import Admit, Configure, Drop, Step, read_worker_message
from carpool_worker.model_process.stepping.stepper import Stepper
from carpool_worker.stepping import replica as step_replica
from carpool_worker.stepping import writer as step_writer
from carpool_worker.stepping.log import StepLog
from carpool_worker.stepping.replica import StepReplica
from support.executions import codec_of, execution_of, run_of_sequence
from support.flaky_link import FlakyLink
from support.models.stepping import Chain
from support.planting import Fault, Faults, Patch, of_machine
from support.redis_client import redis_at
from support.stream_load import StreamChecker
from support.wire import flat_of

KEYS: Final = Keys("m")
LEASE_MS: Final = 600_000  # it never runs out by itself
SETTINGS: Final = ModelSettings(max_batch_size=3, stream_buffer=3, reader_idle_ms=3_600_000)


class ProcessInside:
    """A model process without the process, as `ProcessHandle` shows it. `advance` takes a step."""

    def __init__(self, model: SteppingModel) -> None:
        self._model = model
        self._ours, self._theirs = socket.socketpair()
        self.descriptor: int | None = self._ours.fileno()
        self.has_unsent = False
        self.pid = 1
        self.alive = True  # its connection says when it has ended
        self.is_dead = False
        self.raised: list[Raised] = []
        self.spawn()
        self.ready = True

    def hang_up(self) -> None:
        """The next one is there at once."""
        self.spawn()

    def has_ended(self) -> bool:
        return True

    def spawn(self) -> None:
        self.ready = self.is_dead = False
        self._stepper = Stepper(self._model)
        self._steps: deque[Step] = deque()

    def receive_ready(self) -> object:
        self.ready = True
        return self

    def check_loading(self) -> None:
        pass

    def advance(self) -> None:
        if self.ready and not self.is_dead and self._stepper.has_next:
            step = self._stepper.advance()
            if step is not None:
                self._steps.append(step)

    @property
    def has_buffered(self) -> bool:
        return bool(self._steps) or self.is_dead or not self.ready

    def receive_message(self, read: Callable[[Any], Any]) -> tuple[Any, Buffer]:
        if not self._steps:
            raise ProcessGoneError("killed")
        return read(msgpack.unpackb(msgpack.packb(self._steps.popleft()), use_list=True)), b""

    def send_message(self, header: object, *payload: Buffer) -> None:
        self.put_message(header, *payload)

    def put_message(self, header: object, *payload: Buffer) -> None:
        if self.is_dead:
            return
        assert self.ready
        message = read_worker_message(msgpack.unpackb(msgpack.packb(header)))
        if isinstance(message, Admit):
            self._stepper.admit(message, b"".join(payload))
        elif isinstance(message, Drop):
            self._stepper.drop(message.keys)
        elif isinstance(message, Configure):
            self._stepper.configure(message)
        else:
            self._stepper.resume()

    @property
    def running(self) -> int:
        return self._stepper._slots.occupied

    def kill(self) -> None:
        """Steps that are in the pipe are still received."""
        self.is_dead = True

    def flush(self) -> None:
        pass

    def exit_cause(self) -> str:
        return "SIGKILL"

    def close(self, wait_s: float = 0.0) -> None:
        self._ours.close()
        self._theirs.close()


class Worker:
    """A replica, its connections and its process."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self.links = [FlakyLink(url, name=role) for role in ("fetch", "commit")]
        self.metrics = WorkerMetrics("m")
        fetch, commit = (WorkerStore(link, KEYS) for link in self.links)
        clock = RedisClock()
        model = load_model(Chain, "cpu")
        assert isinstance(model, SteppingModel)
        self.process = ProcessInside(model)
        member = Member(name)
        self.replica = StepReplica(
            member,
            self.process,  # type: ignore[arg-type]
            codec_of(),
            Fetcher(member, fetch, LEASE_MS, lambda _: None, self.metrics, block_ms=1),
            self.metrics,
            store=StepStore(self.links[1], KEYS, clock),
            committer=Committer(member, commit, self.metrics, None),  # type: ignore[arg-type]
            settings=SETTINGS,
            log=StepLog("m", name, self.metrics, lambda: 0),
        )

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.process.advance()
            try:
                self.replica.run_once()
            except LinkError:  # as the loop does, which reports it
                continue

    def heal(self) -> None:
        for link in self.links:
            link.fails_in = None

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.process.close()


class Replicas(RuleBasedStateMachine):
    """See the module. `checker` has the history of all readers."""

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.redis = redis_at(self.url, protocol=2)
        self.redis.flushall()
        self.link = Link(self.url, name="batcher")
        self.batcher = BatcherStore(self.link, KEYS)
        self.batcher.kind = ModelKind.STEPPING
        WorkerStore(self.link, KEYS).register({"max_batch_size": 3})
        self.names = 0
        self.workers = [self.new_worker(), self.new_worker()]
        self.checker = StreamChecker()
        self.batches: dict[str, str] = {}  # by correlation ID
        self.is_harmed = False  # a request may be given up
        self.has_lost_fetches = False  # replies to fetches were lost: a worker may own batches unknowingly

    def new_worker(self) -> Worker:
        self.names += 1
        return Worker(self.url, f"w{self.names}")

    @rule(
        lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
        is_streamed=st.sampled_from((True, True, False)),
    )
    def dispatch(self, lengths: list[int], is_streamed: bool) -> None:
        for length in lengths:
            name = f"r{len(self.batches)}"
            body = {"length": length}
            fields = {"correlation_id": name, "body": json.dumps(body), "stream": int(is_streamed)}
            entry_id = self.redis.xadd(KEYS.requests, fields)
            _, (run,) = decode_entry(entry_id, flat_of(fields), SETTINGS)
            assert isinstance(run, Run)
            dispatched = self.batcher.dispatch(
                [Dispatch([run], "full", "")], 3_600_000, (), SETTINGS.for_workers(ModelKind.STEPPING)
            )
            (batch,) = dispatched.batches
            assert batch is not None
            self.batches[name] = batch.batch_id
            self.checker.sent(name, body, is_streamed=is_streamed)

    @rule(which=st.integers(0, 1), turns=st.integers(1, 8))
    def run(self, which: int, turns: int) -> None:
        self.workers[which].run(turns)

    @rule(turns=st.integers(1, 5))
    def run_both(self, turns: int) -> None:
        for _ in range(turns):
            self.run(0, 1)
            self.run(1, 1)

    @rule(
        which=st.integers(0, 1),
        role=st.integers(0, 1),
        fails_in=st.integers(0, 4),
        is_carried_out=st.booleans(),
        turns=st.integers(2, 6),
    )
    def cut(self, which: int, role: int, fails_in: int, is_carried_out: bool, turns: int) -> None:
        """A connection breaks at one of the next calls, before it is sent or after it was carried out."""
        link = self.workers[which].links[role]
        link.fails_in, link.is_carried_out = fails_in, is_carried_out
        self.run(which, turns)
        if role == 0:
            self.has_lost_fetches = True
            self.expire_leases_of_lost_fetches(which)

    def expire_leases_of_lost_fetches(self, which: int) -> None:
        """Batches whose reply was lost are nobody's until their lease runs out."""
        worker = self.workers[which]
        held = {batch_id for batch_id, _ in worker.replica.batches()}
        self.expire_leases(worker.name, lambda batch_id: batch_id not in held)

    @rule(which=st.integers(0, 1))
    def lose_lease(self, which: int) -> None:
        """As if this worker had stood still for longer: what it has may be reclaimed."""
        self.is_harmed = True
        self.expire_leases(self.workers[which].name, lambda _: True)

    def expire_leases(self, consumer: str, is_lost: Callable[[str], bool]) -> None:
        pending = self.redis.xpending_range(KEYS.batches, "workers", "-", "+", 1000, consumername=consumer)
        for entry in pending:
            batch_id = entry["message_id"].decode()
            if is_lost(batch_id):
                self.redis.xclaim(
                    KEYS.batches, "workers", consumer, 0, [batch_id], idle=2 * LEASE_MS, justid=True
                )

    @rule(which=st.integers(0, 1))
    def kill_process(self, which: int) -> None:
        self.is_harmed = True
        self.workers[which].process.kill()

    @rule(which=st.integers(0, 1), fails_in=st.sampled_from((None, 0, 1)), is_carried_out=st.booleans())
    def stop_worker(self, which: int, fails_in: int | None, is_carried_out: bool) -> None:
        """It drains, although its connection may break, and another one takes its place."""
        worker = self.workers[which]
        link = worker.links[1]
        link.fails_in, link.is_carried_out = fails_in, is_carried_out
        worker.replica.drain()
        for _ in range(200):
            if worker.replica.wait_until_drained(0):
                break
            worker.run(1)
        is_drained = worker.replica.wait_until_drained(0)
        left = self.redis.xpending_range(KEYS.batches, "workers", "-", "+", 1000, consumername=worker.name)
        self.expire_leases(worker.name, lambda _: True)
        worker.close()
        self.workers[which] = self.new_worker()
        assert is_drained
        assert not left or self.has_lost_fetches

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.batches)))
        cancelled = Result(name, CANCELLED, detail="withdrawn")
        answer = Answer(0, Address(None, None), cancelled)
        self.batcher.answer_in_flight(self.batches[name], [answer], 3_600_000)

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), count=st.integers(1, 6))
    def read(self, data: st.DataObject, count: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.batches)))
        self._read(name, count)

    def _read(self, name: str, count: int) -> None:
        for data in self.redis.lpop(KEYS.result(name), count) or ():
            self.checker.read(name, json.loads(data))

    @rule()
    def flush_scripts(self) -> None:
        self.redis.script_flush()

    def teardown(self) -> None:
        try:
            self._end()
        finally:
            for worker in self.workers:
                worker.close()
            self.link.close()
            self.redis.close()

    def _end(self) -> None:
        """Everything ends, now that nothing fails any more."""
        for worker in self.workers:
            worker.heal()
        for turn in range(300):
            if not self.redis.xlen(KEYS.batches):
                break
            # Again later: Redis may carry out a fetch a while after its connection broke.
            if turn == 0 or (turn == 150 and self.has_lost_fetches):
                for which in range(len(self.workers)):
                    self.expire_leases_of_lost_fetches(which)
            self.run_both(2)
            for name in self.batches:
                self._read(name, 3)
        for name in self.batches:
            self._read(name, 1000)
        left = {worker.name: worker.replica.batches() for worker in self.workers}
        assert not self.redis.xlen(KEYS.batches), f"not answered; in hand: {left}"
        self.run_both(3)
        assert self.checker.faults() == {}
        allowed = {"OK", CANCELLED, ABORTED} if self.is_harmed else {"OK", CANCELLED}
        assert set(self.checker.statuses()) <= allowed
        for worker in self.workers:
            assert worker.replica.batches() == []
            assert worker.process.running == 0, "a slot is in use although no request is generated"
        assert list(self.redis.scan_iter(match=KEYS.progress("*"))) == []


MACHINE: Final = hypothesis_settings(
    max_examples=30,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@contextmanager
def on_a_server() -> Iterator[None]:
    """The machine has a Redis, and no time passes in waits."""
    with (
        EmbeddedRedis(append_only=False) as server,
        mock.patch.object(Replicas, "url", server.url),
        mock.patch.object(step_writer, "CHECK_INTERVAL_S", 0.0),
        mock.patch.object(step_replica, "WAIT_S", 0.002),
    ):
        yield


def test_no_failing_call_loses_or_doubles_anything() -> None:
    with on_a_server():
        run_state_machine_as_test(Replicas, settings=MACHINE)


def test_settings_are_those_of_the_batch_that_was_dispatched_last() -> None:
    """Not of one that is reclaimed later, nor of one for a model that does not step."""
    worker = Worker("redis://127.0.0.1:1", "w")
    followed: list[int] = []
    for batch_id, slots in (("9-1", 5), ("8-7", 2), ("9-0", 3), ("9-2", None), ("10-0", 4)):
        text = (
            "" if slots is None else replace(SETTINGS, max_batch_size=slots).for_workers(ModelKind.STEPPING)
        )
        worker.replica._in_hand._use_settings(Batch(batch_id, 1, [], "full", 0, "", settings=text))
        followed.append(worker.replica.slots)
    worker.close()
    assert followed == [5, 5, 5, 5, 4]


def test_request_of_a_sequence_is_rejected() -> None:
    """It was dispatched when a model that keeps states had this name."""
    worker = Worker("redis://127.0.0.1:1", "w")
    execution = execution_of(run_of_sequence("a", 1, starts=True))
    worker.replica._add_requests([execution])
    worker.close()
    assert execution.results[0].status == ABORTED
    assert [change.outcome for change in execution.changes()] == ["broken"]
    assert worker.replica.batches() == []


# --- planted faults, which the machine must find ------------------------------------------------------------

FAULTS: Final = Faults(of_machine(Replicas, steps=40), on_a_server)


def replace_in_script(patch: Patch, name: str, pattern: str, replacement: str) -> None:
    """Run another `step.lua` or `hand_over.lua`."""
    script = getattr(steps, name)
    source, count = re.subn(pattern, replacement, script.source)
    assert count == 1
    faulty = Script.__new__(Script)
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    vars(faulty).update(name=script.name, source=source, sha=sha)
    patch.setattr(steps, name, faulty)


@FAULTS.found(examples=69, first_seed=12000)
def write_without_the_count_of_chunks(patch: Patch) -> None:
    replace_in_script(patch, "_STEP", r"if chunks == written then", "if true then")


@FAULTS.found(examples=24, first_seed=6000)
def write_without_being_the_owner(patch: Patch) -> None:
    is_owner = r"if epochs\[stream_of\(id\)\]\[entry_of\(id\)\] ~= epoch then return 'FENCED' end"
    replace_in_script(patch, "_STEP", is_owner, "")


@FAULTS.found(examples=19, first_seed=0)
def write_although_it_was_answered(patch: Patch) -> None:
    replace_in_script(patch, "_STEP", r"if progress\[1\] then return 'ANSWERED' end", "")


@FAULTS.found(examples=8, first_seed=0)
def write_a_result_without_its_last_chunks(patch: Patch) -> None:
    replace_in_script(patch, "_STEP", r"for _, envelope in ipairs\(request\[ENVELOPES\]\) do .* end", "")


@FAULTS.found(examples=243, first_seed=51000)
def keep_slots_of_what_is_dropped(patch: Patch) -> None:
    patch.setattr(StepReplica, "_free_slots", lambda replica, requests: None)


@FAULTS.found(examples=75, first_seed=48000)
def leave_fetched_batches_behind(patch: Patch) -> None:
    def hand_over(store: StepStore, consumer: str, batches: Any) -> int:
        return original(store, consumer, list(batches)[1:])

    original = StepStore.hand_over
    patch.setattr(StepStore, "hand_over", hand_over)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
