"""Sequences under faults: each request sees the state of those before it, whatever is killed or frozen."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import msgpack
import pytest

import carpool
import carpool_batcher
from carpool.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, OK
from carpool.keys import Keys
from support.sequence_checker import SentRequest, SequenceChecker
from support.sequence_load import SequenceLoad, sequences_in_flight
from support.stack import Service, Stack, frozen, frozen_with_batch
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

MODEL: Final = "Keeping"
SPEC: Final = "keeping.py:Keeping"
KEYS: Final = Keys(MODEL)
LEASE: Final = ("--lease-ms", "600")
# Of workers that nothing happens to: none may lose its batch because this machine stands still for a second.
LONG_LEASE: Final = ("--lease-ms", "30000")


# --- stacks, which tests share: each replaces what another one ended


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Stack]]:
    """Returns the stack of this module; after a failure another one, so that only this test fails."""
    started: list[Stack] = []

    def unspoiled() -> Stack:
        if started and started[-1].is_spoiled:
            started.pop().stop()
        if not started:
            started.append(Stack(tmp_path_factory.mktemp("sequences")))
        return started[-1]

    yield unspoiled
    for stack in started:
        stack.stop()


@pytest.fixture
def pair(shared: Callable[[], Stack]) -> Stack:
    """Two batchers, of which one is active, and two workers."""
    return serve(shared(), batchers=2, workers=2)


@pytest.fixture
def single(shared: Callable[[], Stack]) -> Stack:
    """A batcher and a worker."""
    return serve(shared(), batchers=1, workers=1)


def living(stack: Stack, role: str) -> list[Service]:
    return [service for service in stack.services if service.alive and service.name.startswith(role)]


def serve(stack: Stack, batchers: int, workers: int, lease: tuple[str, ...] = LEASE) -> Stack:
    """Start or stop as many services as it takes."""
    for role, count in (("batcher", batchers), ("worker", workers)):
        for service in living(stack, role)[count:]:
            assert service.terminate() == 0
    for _ in range(batchers - len(living(stack, "batcher"))):
        stack.batcher(ready=False)
    started = [stack.worker(SPEC, *lease, ready=False) for _ in range(workers - len(living(stack, "worker")))]
    for service in started:
        service.wait_for("worker ready")
    for service in living(stack, "batcher"):
        service.wait_for("batcher started")
    stack.wait_for_model(MODEL, workers)
    wait_until(lambda: len(stack.live_workers(MODEL)) == workers, description="no other worker is live")
    stack.active_batcher(MODEL)
    return stack


def assert_nothing_left(stack: Stack, *, of_sequences: bool = True) -> None:
    """Nothing waits or is in flight, and, if `of_sequences`, no sequence is kept."""
    stack.wait_until_idle(MODEL)
    assert stack.pending(MODEL) == 0
    assert list(stack.redis.scan_iter(match=KEYS.progress("*"))) == []
    if of_sequences:
        assert list(stack.redis.scan_iter(match=KEYS.sequence("*"))) == []
        assert not stack.redis.exists(KEYS.sequences)


def assert_served(stack: Stack, checker: SequenceChecker) -> None:
    """All were answered as if nothing had happened, and several at a time."""
    assert checker.faults() == {}, checker.story()
    assert set(checker.statuses()) == {OK, INVALID_ARGUMENT}
    assert checker.most_in_flight > 1
    assert_nothing_left(stack)
    assert stack.redis.xlen(KEYS.dead) == 0


# --- single requests


class Producer:
    """Sends single requests of sequences, and checks their answers.

    `send` returns the correlation ID: the sequence's, a number, and what tests do not share.
    """

    def __init__(self, stack: Stack, checker: SequenceChecker | None = None) -> None:
        self._stack = stack
        self.checker = checker or SequenceChecker()
        self._elements: list[dict[str, Any]] | None = None  # of one entry
        self._entries: Any = None  # of one transaction
        self._suffix = secrets.token_hex(4)

    def send(
        self,
        sequence_id: str,
        *,
        starts: bool = False,
        ends: bool = False,
        may_end: str = "",
        fields: dict[str, Any] | None = None,
        **body: Any,
    ) -> str:
        name = f"{sequence_id}.{len(self.checker.requests)}.{self._suffix}"
        self.checker.sent(
            SentRequest(name, sequence_id, name, starts, ends, None, [may_end] if may_end else ())
        )
        element: dict[str, Any] = {"correlation_id": name, "sequence_id": sequence_id, **(fields or {})}
        if starts:
            element["sequence_start"] = 1
        if ends:
            element["sequence_end"] = 1
        element["body"] = json.dumps({"text": name, **body}).encode()
        if self._elements is None:
            self._add_entry(element)
        else:
            self._elements.append(element)
        return name

    def _add_entry(self, fields: dict[str, Any]) -> None:
        target = self._stack.redis if self._entries is None else self._entries
        target.xadd(KEYS.requests, fields)

    @contextlib.contextmanager
    def packed(self) -> Iterator[None]:
        """What is sent inside the block is one entry."""
        self._elements = []
        yield
        elements, self._elements = self._elements, None
        self._add_entry({"requests": msgpack.packb(elements)})

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """A batcher reads together what is sent inside the block."""
        self._entries = self._stack.redis.pipeline(transaction=True)
        yield
        entries, self._entries = self._entries, None
        entries.execute()

    def read(self, *correlation_ids: str) -> list[str]:
        """Wait for the answers to these requests, or to all; return their statuses."""
        names = correlation_ids or tuple(self.checker.unanswered())
        for name in names:
            self.checker.read(name, self._stack.result(MODEL, name), is_in_order=False)
        return [self.checker.answers[name][0]["status"] for name in names]

    def detail(self, correlation_id: str) -> str:
        text: str = self.checker.answers[correlation_id][0].get("detail", "")
        return text

    def assert_faultless(self) -> None:
        """What was sent was answered, once."""
        self.read()
        self._stack.wait_until_idle(MODEL)
        for name in self.checker.requests:
            assert not self._stack.redis.exists(KEYS.result(name)), f"{name} was answered twice"
        assert self.checker.faults() == {}, self.checker.story()


def wait_until_in_flight(stack: Stack, *sequence_ids: str) -> None:
    wait_until(
        lambda: {*sequence_ids} <= {*sequences_in_flight(stack.redis, KEYS)},
        description=f"requests of {sequence_ids} are in flight",
    )


def let_pass(stack: Stack, milliseconds: int) -> None:
    """Wait for this time, by the batcher's clock, behind a batch in flight: until a request expires."""
    name = f"timer-{secrets.token_hex(4)}"
    stack.send(MODEL, correlation_id=name, sequence_id="timer", sequence_start=1, body="0",
               expiration=milliseconds)  # fmt: skip
    assert stack.result(MODEL, name)["status"] == DEADLINE_EXCEEDED


@contextlib.contextmanager
def idle_ms(stack: Stack, milliseconds: int) -> Iterator[None]:
    """Inside the block, sequences are ended after this time."""
    stack.configure(MODEL, max_sequence_idle_ms=str(milliseconds))
    yield
    stack.configure(MODEL, max_sequence_idle_ms="60000")


def faulty_package(home: Path, package: ModuleType, pattern: str, replacement: str, *files: str) -> Path:
    """Make a directory with a copy of a package in which one part of each of these files is replaced."""
    (source,) = package.__path__
    copied = home / package.__name__
    shutil.copytree(source, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for file in files:
        text, count = re.subn(pattern, replacement, (copied / file).read_text())
        assert count == 1
        (copied / file).write_text(text)
    return home


# --- workers


def test_worker_is_killed_in_mid_batch(pair: Stack) -> None:
    checker, before = SequenceChecker(), len(pair.events("batch reclaimed"))
    with SequenceLoad(pair, MODEL, checker, name="worker-killed") as load:
        victim = living(pair, "worker")[0]
        with frozen_with_batch(pair, MODEL, victim):
            victim.kill()
        load.wait_for_more(80)
    assert_served(pair, checker)
    assert len(pair.events("batch reclaimed")) > before, "no worker had a batch when it was killed"


def test_model_process_is_killed(pair: Stack) -> None:
    victim = living(pair, "worker")[0]
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="process-killed") as load:
        for deaths in (1, 2):
            before = len(victim.events("model process replaced"))
            with frozen_with_batch(pair, MODEL, victim):
                os.kill(victim.children()[0], signal.SIGKILL)
            wait_until(
                lambda before=before: len(victim.events("model process replaced")) > before,  # type: ignore[misc]
                description=f"the model process is replaced, {deaths}",
            )
            held = pair.batches_of(MODEL, victim)  # also one that arrived while the worker was frozen
            wait_until(  # or the next death may be one more of the same request, which is given up then
                lambda held=held: not held & pair.batches_of(MODEL, victim),  # type: ignore[misc]
                description="what it executed is executed again",
            )
            load.wait_for_more(40)
    assert_served(pair, checker)


def test_worker_frozen_past_its_lease_overwrites_no_state(pair: Stack) -> None:
    victim, other = living(pair, "worker")
    checker, before = SequenceChecker(), len(other.events("batch reclaimed"))
    with SequenceLoad(pair, MODEL, checker, name="worker-frozen") as load:
        with frozen_with_batch(pair, MODEL, victim):
            wait_until(
                lambda: len(other.events("batch reclaimed")) > before, description="its batch is reclaimed"
            )
            load.wait_for_more(40)
        victim.wait_for("commit discarded, another worker has the batch")
        load.wait_for_more(40)
    assert_served(pair, checker)
    assert victim.alive


def test_terminated_worker_breaks_nothing(pair: Stack) -> None:
    victim = living(pair, "worker")[0]
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="terminated") as load:
        assert victim.terminate() == 0
        load.wait_for_more(40)
    assert_served(pair, checker)
    assert victim.events("worker stopped")[0]["clean"] is True


def test_replies_to_commits_and_answers_are_lost(pair: Stack, tmp_path: Path) -> None:
    """Each is repeated although it was carried out, as after a lost reply, which changes nothing."""
    faulty = faulty_package(
        tmp_path / "faulty",
        carpool,
        r"( +)(outcome, \*positions = .*link\.run\(_(?:COMMIT|ANSWER), .*\n)",
        r"\1\2\1\2",
        "store/worker.py",
        "store/results.py",
    )
    repeating = pair.worker(SPEC, *LEASE, faulty_package=faulty)
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="repeated") as load:
        with frozen_with_batch(pair, MODEL, repeating):  # then it answers ahead
            os.kill(repeating.children()[0], signal.SIGKILL)
        repeating.wait_for("model process replaced")
        load.wait_for_more(60)
    assert_served(pair, checker)
    assert repeating.events("commit discarded, another worker has the batch")


# --- batchers


def test_active_batcher_is_killed(pair: Stack) -> None:
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="batcher-killed") as load:
        victim = pair.active_batcher(MODEL)
        victim.kill()
        load.wait_for_more(100)
        assert pair.active_batcher(MODEL) is not victim
    assert_served(pair, checker)


def test_batcher_frozen_past_its_lease_dispatches_and_refuses_nothing(pair: Stack) -> None:
    """Given a frozen batcher, when another has served what it knew of, expect it to step back."""
    victim = pair.active_batcher(MODEL)
    (other,) = [batcher for batcher in living(pair, "batcher") if batcher is not victim]
    steps_back = "batcher no longer active, lease lost"
    before, others = len(victim.events(steps_back)), len(other.events(steps_back))
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="batcher-frozen") as load:
        with frozen(victim):
            wait_until(lambda: pair.active_batcher(MODEL) is other, description="the other one is active")
            load.wait_for_more(40)
        load.wait_for_more(40)
        wait_until(
            lambda: len(victim.events(steps_back)) > before,
            description="the frozen batcher steps back",
        )
        load.wait_for_more(40)
    assert_served(pair, checker)
    assert pair.active_batcher(MODEL) is other or len(other.events(steps_back)) > others


def take_turns(stack: Stack, load: SequenceLoad, times: int) -> None:
    """Delete the lease until another batcher has it, while the first one still dispatches; several times."""

    def has_another(former: bytes) -> bool:
        holder: bytes | None = stack.redis.get(KEYS.batcher)
        if holder == former:
            stack.redis.delete(KEYS.batcher)
        return holder not in (None, former)

    for _ in range(times):
        former = stack.redis.get(KEYS.batcher)
        wait_until(lambda former=former: has_another(former), description="another batcher is active")  # type: ignore[misc]
        load.wait_for_more(20)


def test_two_batchers_never_have_two_requests_of_a_sequence_in_flight(pair: Stack) -> None:
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="two-batchers") as load:
        take_turns(pair, load, 4)
    assert_served(pair, checker)


# --- Redis


def test_connections_are_cut_and_scripts_are_forgotten(pair: Stack) -> None:
    """A commit or a dispatch may have been carried out, although its reply is lost."""
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="cut") as load:
        for number in range(12):
            load.wait_for_more(8)
            pair.redis.script_flush()
            ending = (":commit", ":moves", ":fetch")[number % 3]
            for connection in pair.redis.client_list():
                if connection["name"].endswith(ending):
                    pair.redis.client_kill_filter(_id=connection["id"])
    assert_served(pair, checker)


def test_redis_is_full_and_emptied_again(pair: Stack) -> None:
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="full") as load:
        for _ in range(2):
            pair.redis.config_set("maxmemory", 1)
            wait_until(
                lambda: load.unaccepted and not load.accepted_unanswered(),
                description="what was accepted is served, although Redis is full",
            )
            pair.redis.config_set("maxmemory", 0)
            load.wait_for_more(40)
    assert load.refused
    assert_served(pair, checker)


# --- requests that do not succeed


def test_requests_fail_while_services_are_killed(pair: Stack) -> None:
    """What follows a request that did not succeed is aborted, and nothing else."""
    checker = SequenceChecker()
    with SequenceLoad(pair, MODEL, checker, name="failing", fails=True) as load:
        take_turns(pair, load, 2)
        living(pair, "worker")[0].kill()
        load.wait_for_more(40)
        pair.active_batcher(MODEL).kill()
        load.wait_for_more(100)
    assert checker.faults() == {}, checker.story()
    assert {OK, ABORTED, CANCELLED, DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT} == {*checker.statuses()}
    assert_nothing_left(pair)


def test_request_that_raises_breaks_its_sequence_only(single: Stack, gate: Path) -> None:
    producer = Producer(single)
    for name in ("a", "b", "c"):
        producer.send(name, starts=True)
    producer.read()
    blocking = producer.send("d", starts=True, ends=True, gate=str(gate))
    wait_until_in_flight(single, "d")
    for name in ("a", "b", "c"):
        producer.send(name, may_end=INTERNAL if name == "b" else "", raises=name == "b")
    for name in ("a", "b", "c"):
        producer.send(name, ends=True)
    gate.touch()
    producer.read(blocking)
    producer.assert_faultless()
    assert producer.checker.statuses() == {OK: 8, INTERNAL: 1, ABORTED: 1}
    aborted = [name for name in producer.checker.requests if "begin it again" in producer.detail(name)]
    assert len(aborted) == 1
    producer.send("b", starts=True)
    producer.send("b", ends=True)
    producer.assert_faultless()
    assert_nothing_left(single)


def test_request_that_kills_its_process_breaks_its_sequence_only(single: Stack, gate: Path) -> None:
    """It dies with the batch, and again with this request alone; the others keep their states."""
    producer = Producer(single)
    names = [f"s{number}" for number in range(4)]
    for name in names:
        producer.send(name, starts=True)
    producer.read()
    producer.send("blocking", starts=True, ends=True, gate=str(gate))
    wait_until_in_flight(single, "blocking")
    sent = [
        producer.send(name, may_end=ABORTED if name == "s2" else "", kills=name == "s2") for name in names
    ]
    for name in names:
        producer.send(name, ends=True)
    gate.touch()
    producer.assert_faultless()
    assert producer.checker.statuses() == {OK: 4 + 1 + 3 + 3, ABORTED: 2}
    ((letter_id, letter),) = single.redis.xrange(KEYS.dead)
    assert (letter[b"correlation_id"].decode(), letter[b"attempts"]) == (sent[2], b"2")
    single.redis.xdel(KEYS.dead, letter_id)
    producer.send("s2", starts=True, ends=True)
    producer.assert_faultless()
    assert_nothing_left(single)


def test_withdrawn_and_expired_ones_break_what_stands_after_them(single: Stack, gate: Path) -> None:
    """What stands before them is still served, also after another batcher has taken over."""
    producer = Producer(single)
    with producer.packed():
        for name in ("a", "b"):
            producer.send(name, starts=True, gate=str(gate))
    wait_until_in_flight(single, "a", "b")
    producer.send("a")
    withdrawn = producer.send("a", may_end=CANCELLED)
    producer.send("b")
    expired = producer.send("b", may_end=DEADLINE_EXCEEDED, fields={"expiration": 1})
    after = [producer.send("a"), producer.send("b", ends=True)]
    single.send(MODEL, withdraw=withdrawn)
    assert producer.read(withdrawn, expired, *after) == [CANCELLED, DEADLINE_EXCEEDED, ABORTED, ABORTED]
    producer.send("a", starts=True)
    single.active_batcher(MODEL).kill()
    single.batcher()
    later = [producer.send("a"), producer.send("b")]
    gate.touch()
    assert producer.read(*later) == [OK, ABORTED]
    for name in ("a", "b"):
        producer.send(name, starts=True, ends=True)
    producer.assert_faultless()
    assert_nothing_left(single)


# --- starts, ends, and what does not come


def test_start_of_a_begun_sequence_waits_for_earlier_requests(single: Stack, gate: Path) -> None:
    producer = Producer(single)
    producer.send("a", starts=True, gate=str(gate))
    wait_until_in_flight(single, "a")
    producer.send("a")
    producer.send("a", starts=True)
    producer.send("a")
    producer.send("a", starts=True, ends=True)
    gate.touch()
    producer.assert_faultless()
    assert producer.checker.statuses() == {OK: 5}
    assert_nothing_left(single)


def test_sequence_without_an_end_is_ended_when_idle(single: Stack) -> None:
    producer = Producer(single)
    with idle_ms(single, 400):
        with producer.together():  # or the first could be idle until the second comes
            producer.send("a", starts=True)
            producer.send("a")
        producer.read()
        wait_until(lambda: not single.redis.exists(KEYS.sequence("a")), description="the state is gone")
        producer.checker.idle("a")
        late = producer.send("a")
        producer.assert_faultless()
    assert producer.checker.answers[late][0]["status"] == INVALID_ARGUMENT
    assert "has ended" in producer.detail(late)
    assert_nothing_left(single)


def test_sequence_that_waits_is_not_ended(single: Stack, gate: Path) -> None:
    """Given a sequence whose request waits for longer than `max_sequence_idle_ms`, also at a batcher that has
    just taken over, expect that it is served."""
    producer = Producer(single)
    producer.send("a", starts=True)
    producer.read()
    producer.send("blocking", starts=True, ends=True, gate=str(gate))
    wait_until_in_flight(single, "blocking")
    producer.send("a")
    producer.send("a", ends=True)
    let_pass(single, 1)  # the batcher has read both
    with idle_ms(single, 300):
        let_pass(single, 700)
        single.active_batcher(MODEL).kill()
        single.batcher()
        let_pass(single, 700)
        gate.touch()
        producer.assert_faultless()
        wait_until(lambda: not single.redis.exists(KEYS.sequences), description="the timer's is forgotten")
    assert producer.checker.statuses() == {OK: 4}
    assert_nothing_left(single)


# --- put back


def interleave_and_kill_the_batcher(stack: Stack, gate: Path) -> Producer:
    """Requests of several sequences in one entry, of which some are put back behind others that came later;
    then their batcher is killed. Returns when another one is there."""
    producer = Producer(stack)

    names = ("a", "b", "c")
    with producer.together():
        with producer.packed():
            for at in range(8):
                for name in names:
                    producer.send(name, starts=at == 0, gate=str(gate))
        for _ in range(2):
            for name in names:
                producer.send(name)
    wait_until_in_flight(stack, "a", "b", "c")
    first, *_, last = stack.redis.xrange(KEYS.requests)
    assert b"requests" not in first[1] and b"requests" in last[1], "what was put back does not stand last"
    stack.active_batcher(MODEL).kill()
    gate.touch()
    for name in names:
        producer.send(name, ends=True)
    return producer


def test_order_is_kept_where_a_batcher_dies_after_it_has_put_back(single: Stack, gate: Path) -> None:
    producer = interleave_and_kill_the_batcher(single, gate)
    single.batcher()
    producer.assert_faultless()
    assert producer.checker.statuses() == {OK: 33}
    assert_nothing_left(single)


# --- planted faults, to show that the checker detects them


def freeze_and_go_on(stack: Stack, package: Path, gate: Path) -> Producer:
    """A worker is frozen while it executes a request of a sequence; another one goes on with it; then the
    first one finishes."""
    stack.batcher(ready=False)
    victim = stack.worker(SPEC, *LEASE, faulty_package=package)
    stack.wait_for_model(MODEL)
    producer = Producer(stack)
    producer.send("a", starts=True)
    producer.read()
    producer.send("a", gate=str(gate))
    wait_until(lambda: stack.has_batch(MODEL, victim), description="the worker has the request")
    with frozen(victim):
        gate.touch()
        stack.worker(SPEC, *LEASE)
        producer.read()
        producer.send("a")
        producer.read()
    victim.wait_for("commit discarded, another worker has the batch")
    victim.terminate()
    return producer


def test_checker_detects_a_state_that_is_written_outside_the_script(
    stack: Stack, tmp_path: Path, gate: Path
) -> None:
    faulty = faulty_package(
        tmp_path / "faulty",
        carpool,
        r"( +)(keys = self\.keys\n +stream = batch_stream\(keys, batch\.id\))",
        r"""\1for change in changes:
\1    if change.outcome == "kept":
\1        self._link.call("HSET", self.keys.sequence(change.part.sequence_id), "state", change.content)
\1\2""",
        "store/worker.py",
    )
    producer = freeze_and_go_on(stack, faulty, gate)
    last = producer.send("a", ends=True)
    producer.read()
    assert producer.checker.faults() == {"wrong answer": [last]}


def test_checker_detects_a_dispatch_without_a_look_at_the_lease(stack: Stack, tmp_path: Path) -> None:
    faulty = faulty_package(
        tmp_path / "faulty",
        carpool,
        r"if ARGV\[2\] ~= '' and .* then return 'NOT_ACTIVE' end",
        "",
        "store/lua/dispatch.lua",
        "store/lua/refuse.lua",
    )
    # A batcher that lost its lease steps back when it next looks, which may be too soon for it to dispatch
    # anything. So from a moment on each is told that it has the lease.
    lease, everybody = faulty / "carpool" / "store" / "lua" / "lease.lua", f"{KEYS.batcher}:everybody"
    refused = "if holder and holder ~= ARGV[1] then return 0 end"
    assert lease.read_text().count(refused) == 1
    told = f"if holder and holder ~= ARGV[1] then return redis.call('EXISTS', '{everybody}') end"
    lease.write_text(lease.read_text().replace(refused, told))
    for _ in range(2):
        stack.batcher(faulty_package=faulty, ready=False)
    stack.worker(SPEC, *LONG_LEASE)
    stack.wait_for_model(MODEL)
    checker = SequenceChecker()
    with SequenceLoad(stack, MODEL, checker, answered_s=1):
        stack.redis.set(everybody, 1)
        wait_until(lambda: "two in flight" in checker.faults(), description="two requests are in flight")


def test_checker_detects_that_places_are_not_kept(stack: Stack, tmp_path: Path, gate: Path) -> None:
    """The batcher that takes over serves requests in the order in which they stand in the request stream."""
    faulty = faulty_package(
        tmp_path / "faulty",
        carpool,
        r"is_earlier = was_put_back and .*",
        "is_earlier = False",
        "wire/sequence_fields.py",
    )
    stack.batcher(ready=False)
    stack.worker(SPEC, *LONG_LEASE)
    stack.wait_for_model(MODEL)
    producer = interleave_and_kill_the_batcher(stack, gate)
    stack.batcher(faulty_package=faulty)
    producer.read()
    faults = producer.checker.faults()
    assert "wrong answer" in faults and "out of order" not in faults


def test_checker_detects_a_follower_beside_its_head(stack: Stack, tmp_path: Path) -> None:
    faulty = faulty_package(
        tmp_path / "faulty",
        carpool_batcher,
        r"if not sequence\.is_busy:",
        "if True:",
        "core/sequences/heads.py",
    )
    stack.batcher(faulty_package=faulty, ready=False)
    stack.worker(SPEC, *LONG_LEASE)
    stack.wait_for_model(MODEL)
    checker, sought = SequenceChecker(), {"two in flight", "wrong answer"}
    for name in ("a", "b", "c", "d", "e"):  # on a busy machine one load may be too slow to show both
        with SequenceLoad(stack, MODEL, checker, name=name, answered_s=1):
            pass
        if sought <= checker.faults().keys():
            break
    assert sought <= checker.faults().keys()
