"""Sequences bound to a process, under faults: an answer shows all that its slot has heard, or is ABORTED."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT, OK
from carpool.keys import Keys
from support.models.bound import digest
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

pytestmark = pytest.mark.chaos

MODEL: Final = "Hearing"
KEYS: Final = Keys(MODEL)
SLOTS: Final = 4
# So long that no worker is taken for dead because this machine is busy. Where a test waits until a worker
# learns of a lost lease, or takes the batches of another one, it is shorter: a worker looks few times in it.
LEASE: Final = ("--lease-ms", "5000")
LONG_LEASE: Final = ("--lease-ms", "30000")


class Speaker:
    """A sequence, and what it has said since its start."""

    def __init__(self, stack: Stack, name: str) -> None:
        self.name = name
        self._stack = stack
        self._said: list[Any] = []
        self._sent = 0
        self._starts = True

    def send(self, body: Any, *, ends: bool = False, **fields: Any) -> str:
        """Send the next request, whose correlation ID is returned."""
        self._sent += 1
        if self._starts:
            fields["sequence_start"] = 1
            self._starts = False
            self._said = []
        if ends:
            fields["sequence_end"] = 1
        self._said.append(body)
        correlation_id = f"{self.name}-{self._sent}"
        self._stack.send(
            MODEL, correlation_id=correlation_id, sequence_id=self.name, body=json.dumps(body), **fields
        )
        return correlation_id

    def start_again(self) -> None:
        self._starts = True

    def status(self, correlation_id: str) -> str:
        """The status; an OK must be the digest of all that was said since the start, up to this request."""
        envelope = self._stack.result(MODEL, correlation_id)
        status: str = envelope["status"]
        if status == ABORTED:
            assert "begin it again with sequence_start" in envelope["detail"]
        if status == OK:
            count = int(correlation_id.rpartition("-")[2]) - (self._sent - len(self._said))
            assert envelope["body"][0] == digest(self.name, self._said[:count]), correlation_id
        return status

    def say(self, body: Any, **options: Any) -> str:
        return self.status(self.send(body, **options))

    @property
    def process(self) -> str:
        """The process that has its state, as Redis says."""
        state = self._stack.redis.hget(KEYS.sequence(self.name), "state")
        assert state is not None
        name: str = state.decode()
        return name

    @property
    def is_broken(self) -> bool:
        """Whether it is, as Redis says."""
        return bool(self._stack.redis.hget(KEYS.sequence(self.name), "broken"))


class Hooks:
    """What the models were told of starts and ends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def lines(self) -> list[str]:
        return self._path.read_text().split("\n")[:-1]

    def wait_for_end(self, name: str) -> None:
        wait_until(lambda: f"end {name}" in self.lines(), description=f"the model heard that {name} ended")


@pytest.fixture
def hooks(tmp_path: Path) -> Hooks:
    return Hooks(tmp_path / "hooks")


@pytest.fixture
def stack(tmp_path: Path, hooks: Hooks) -> Iterator[Stack]:
    with Stack(tmp_path, environment={"worker": {"CARPOOL_TEST_HOOKS": str(hooks._path)}}) as stack:
        yield stack


def serve(stack: Stack, workers: int = 1, lease: tuple[str, ...] = LONG_LEASE, *flags: str) -> list[Service]:
    stack.batcher()
    services = [stack.worker(f"bound.py:{MODEL}", *lease, *flags, ready=False) for _ in range(workers)]
    for service in services:
        service.wait_for("worker ready")
    stack.wait_for_model(MODEL, workers)
    return services


def speakers(stack: Stack, count: int) -> list[Speaker]:
    """This many sequences, which have begun."""
    begun = [Speaker(stack, f"s{number}") for number in range(count)]
    sent = [speaker.send(0) for speaker in begun]
    assert [speaker.status(name) for speaker, name in zip(begun, sent, strict=True)] == [OK] * count
    return begun


def of_worker(worker: Service, among: list[Speaker]) -> list[Speaker]:
    name = worker.wait_for("worker ready")["worker"]
    return [speaker for speaker in among if speaker.process.startswith(name)]


def assert_settled(stack: Stack) -> None:
    stack.wait_until_idle(MODEL)
    assert stack.pending(MODEL) == 0
    assert stack.redis.xlen(KEYS.dead) == 0


def test_many_sequences_in_any_order_are_heard_each_in_its_slot(stack: Stack, hooks: Hooks) -> None:
    """Given more sequences than slots, of random lengths, all sent at once, expect all answers right."""
    serve(stack, 2)
    chance = random.Random(7)
    everyone = [Speaker(stack, f"m{number}") for number in range(40)]
    left = {speaker: chance.randint(1, 8) for speaker in everyone}
    sent: list[tuple[Speaker, str]] = []
    while left:
        speaker = chance.choice(list(left))
        left[speaker] -= 1
        sent.append((speaker, speaker.send(chance.randint(0, 9), ends=not left[speaker])))
        if not left[speaker]:
            del left[speaker]
    assert {speaker.status(name) for speaker, name in sent} == {OK}
    assert_settled(stack)
    for speaker in everyone:
        hooks.wait_for_end(speaker.name)
    assert sorted(hooks.lines()) == sorted(f"{hook} m{at}" for hook in ("start", "end") for at in range(40))


def test_sequences_are_spread_and_further_ones_wait_for_a_slot(stack: Stack) -> None:
    workers = serve(stack, 2)
    begun = speakers(stack, 2 * SLOTS)
    assert [len(of_worker(worker, begun)) for worker in workers] == [SLOTS, SLOTS]
    first, second = Speaker(stack, "first"), Speaker(stack, "second")
    waiting = [first.send(1), second.send(1)]
    assert [speaker.say(1) for speaker in begun] == [OK] * len(begun)  # those that have a slot go on
    assert not any(stack.redis.exists(KEYS.result(name)) for name in waiting)
    freed = begun[3].process
    assert begun[3].say(2, ends=True) == OK
    assert first.status(waiting[0]) == OK
    assert first.process == freed
    assert not stack.redis.exists(KEYS.result(waiting[1]))
    assert begun[5].say(2, ends=True) == OK
    assert second.status(waiting[1]) == OK
    assert_settled(stack)


@pytest.mark.parametrize(
    ("body", "fields", "status"),
    [
        ("raise", {}, INTERNAL),
        ("return", {}, INTERNAL),
        ("refuse", {}, INVALID_ARGUMENT),
        (1, {"content_type": "html"}, INVALID_ARGUMENT),
        (1, {"expiration": 1}, DEADLINE_EXCEEDED),
    ],
)
def test_end_is_heard_when_a_request_fails(
    stack: Stack, hooks: Hooks, tmp_path: Path, body: Any, fields: dict[str, Any], status: str
) -> None:
    """Whether the model, the worker or the batcher refuses it; the others go on, and the slot is free."""
    serve(stack)
    one, *others = speakers(stack, SLOTS)
    gate = tmp_path / "gate"
    held = others[0].send(f"wait {gate}")  # the process is busy: a request may expire meanwhile
    wait_until((tmp_path / "gate.started").exists, description="the process is busy")
    failing, following = one.send(body, **fields), one.send(2)
    if "expiration" in fields:
        assert one.status(failing) == status
    gate.touch()
    if "expiration" not in fields:
        assert one.status(failing) == status
    assert others[0].status(held) == OK
    assert one.status(following) == ABORTED
    hooks.wait_for_end(one.name)
    assert [other.say(3) for other in others] == [OK] * len(others)
    assert Speaker(stack, "next").say(4) == OK
    one.start_again()
    waiting = one.send(5)  # all slots are in use again
    assert others[0].say(6, ends=True) == OK
    assert one.status(waiting) == OK
    assert_settled(stack)


def test_end_by_force_is_heard(stack: Stack, hooks: Hooks) -> None:
    serve(stack)
    begun = speakers(stack, SLOTS)
    stack.send(MODEL, end_sequences=f"{begun[0].name} {begun[2].name}")
    hooks.wait_for_end(begun[0].name)
    hooks.wait_for_end(begun[2].name)
    assert begun[0].say(1) == ABORTED
    assert [Speaker(stack, name).say(1) for name in ("x", "y")] == [OK, OK]
    assert [begun[1].say(1), begun[3].say(1)] == [OK, OK]
    assert_settled(stack)


def test_end_of_an_idle_sequence_is_heard(stack: Stack, hooks: Hooks) -> None:
    serve(stack)
    stack.configure(MODEL, max_sequence_idle_ms="300")
    (one,) = speakers(stack, 1)
    hooks.wait_for_end(one.name)
    assert one.say(1) == INVALID_ARGUMENT
    assert_settled(stack)


def test_start_of_a_sequence_that_is_begun_begins_anew(stack: Stack, hooks: Hooks) -> None:
    serve(stack)
    (one,) = speakers(stack, 1)
    process = one.process
    assert one.say(1) == OK
    one.start_again()
    assert one.say(2) == OK
    assert one.process == process
    assert hooks.lines() == ["start s0", "end s0", "start s0"]


@pytest.mark.parametrize("victim", ["worker", "model process"])
def test_sequences_of_a_process_that_is_killed_are_aborted_and_others_go_on(
    stack: Stack, victim: str, tmp_path: Path
) -> None:
    """Given requests in flight and waiting, expect ABORTED for those of the one that died, and no other."""
    killed, _ = workers = serve(stack, 2, LEASE)
    everyone = speakers(stack, 2 * SLOTS)
    lost, unharmed = (of_worker(worker, everyone) for worker in workers)
    assert len(lost) == len(unharmed) == SLOTS
    in_flight = lost[0].send(f"wait {tmp_path / 'never'}")
    wait_until((tmp_path / "never.started").exists, description="a batch is in flight")
    waiting = [speaker.send(1) for speaker in lost]
    if victim == "worker":
        killed.kill()
        stack.expire_lease(MODEL, killed)
    else:
        (child,) = killed.children()
        os.kill(child, signal.SIGKILL)
    assert [speaker.say(1) for speaker in unharmed] == [OK] * SLOTS
    assert lost[0].status(in_flight) == ABORTED
    assert [speaker.status(name) for speaker, name in zip(lost, waiting, strict=True)] == [ABORTED] * SLOTS
    assert [speaker.say(2) for speaker in lost] == [ABORTED] * SLOTS  # until it begins again
    if victim == "model process":
        stack.wait_for_model(MODEL, 2)
        for speaker in lost:
            speaker.start_again()
        assert [speaker.say(3) for speaker in lost] == [OK] * SLOTS
        assert {speaker.process for speaker in lost}.isdisjoint({speaker.process for speaker in unharmed})
    else:
        lost[0].start_again()
        name = lost[0].send(3)  # the other process is full
        assert unharmed[0].say(4, ends=True) == OK
        assert lost[0].status(name) == OK
    assert [speaker.say(5) for speaker in unharmed[1:]] == [OK] * (SLOTS - 1)
    assert_settled(stack)


def test_sequence_that_is_begun_again_at_once_is_served_by_the_process_that_replaces_its_own(
    stack: Stack,
) -> None:
    """Given a start as soon as the death of the process is answered, expect it not to meet that one."""
    serve(stack)
    speaker = Speaker(stack, "speaker")
    for _ in range(3):
        assert speaker.say(1) == OK
        assert speaker.say("die") == ABORTED
        speaker.start_again()
    assert speaker.say(2, ends=True) == OK
    assert_settled(stack)


def test_process_that_was_paused_past_its_lease_serves_none_of_its_sequences(
    stack: Stack, hooks: Hooks
) -> None:
    """Given a worker that goes on after it was taken for dead, expect its slots to be free."""
    (worker,) = serve(stack, 1, LEASE)
    everyone = speakers(stack, SLOTS)
    worker.freeze()
    stack.expire_lease(MODEL, worker)
    wait_until(lambda: all(speaker.is_broken for speaker in everyone), description="its lease ran out")
    assert [speaker.say(1) for speaker in everyone] == [ABORTED] * SLOTS
    worker.thaw()
    for speaker in everyone:
        hooks.wait_for_end(speaker.name)
        speaker.start_again()
    assert [speaker.say(2) for speaker in everyone] == [OK] * SLOTS
    assert_settled(stack)


def test_worker_that_stops_finishes_its_sequences(stack: Stack, hooks: Hooks) -> None:
    """Given SIGTERM, expect its sequences to go on to their ends, and further ones to begin elsewhere."""
    workers = serve(stack, 2)
    everyone = speakers(stack, 4)
    stopped, other = sorted(workers, key=lambda worker: not of_worker(worker, everyone))  # one may have all
    of_stopped, of_other = (of_worker(worker, everyone) for worker in (stopped, other))
    stopped.signal(signal.SIGTERM)
    (process,) = {speaker.process for speaker in of_stopped}
    wait_until(lambda: stack.redis.sismember(KEYS.draining, process), description="it drains")
    further = [Speaker(stack, name) for name in ("x", "y")]
    wait_until(lambda: bool(stack.live_workers(MODEL)), description="one is alive")
    assert [speaker.say(1) for speaker in (*everyone, *further)] == [OK] * 6
    assert of_worker(other, further) == further
    assert stopped.alive
    assert [speaker.say(2, ends=True) for speaker in of_stopped] == [OK] * len(of_stopped)
    assert stopped.process.wait(EVENTUALLY_S) == 0
    assert stopped.wait_for("worker stopped")["clean"]
    assert {speaker.say(3) for speaker in (*of_other, *further)} == {OK}
    assert_settled(stack)


def test_drain_that_takes_too_long_aborts_what_is_left(stack: Stack) -> None:
    (worker,) = serve(stack, 1, LONG_LEASE, "--drain-s", "1")
    everyone = speakers(stack, 2)
    worker.signal(signal.SIGTERM)
    assert worker.process.wait(EVENTUALLY_S) == 1
    assert [speaker.say(1) for speaker in everyone] == [ABORTED, ABORTED]
    stack.worker(f"bound.py:{MODEL}", *LONG_LEASE)
    for speaker in everyone:
        speaker.start_again()
    assert [speaker.say(2) for speaker in everyone] == [OK, OK]
    assert_settled(stack)


def test_sequences_go_on_with_another_batcher(stack: Stack, hooks: Hooks, tmp_path: Path) -> None:
    """Given a batcher that is killed while requests are in flight and waiting, expect all answers."""
    serve(stack, 2)
    everyone = speakers(stack, SLOTS + 2)
    processes = {speaker.name: speaker.process for speaker in everyone}
    gate = tmp_path / "gate"
    sent = [(everyone[0], everyone[0].send(f"wait {gate}"))]
    wait_until((tmp_path / "gate.started").exists, description="a batch is in flight")
    sent += [(speaker, speaker.send(1)) for speaker in everyone]
    stack.active_batcher(MODEL).kill()
    sent += [(speaker, speaker.send(2)) for speaker in everyone]
    stack.batcher()
    gate.touch()
    assert {speaker.status(name) for speaker, name in sent} == {OK}
    assert {speaker.name: speaker.process for speaker in everyone} == processes
    further = [Speaker(stack, f"f{number}") for number in range(SLOTS - 2)]  # as many slots are free
    assert [speaker.say(1) for speaker in further] == [OK] * len(further)
    waiting = Speaker(stack, "waiting")
    name = waiting.send(1)
    assert everyone[0].say(3, ends=True) == OK
    assert waiting.status(name) == OK
    assert_settled(stack)


def test_process_that_dies_while_no_batcher_runs_has_its_sequences_aborted(stack: Stack) -> None:
    (worker,) = serve(stack, 1)
    everyone = speakers(stack, 2)
    stack.active_batcher(MODEL).kill()
    (child,) = worker.children()
    before = stack.live_workers(MODEL)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: stack.live_workers(MODEL) not in ([], before), description="it joined again")
    sent = [speaker.send(1) for speaker in everyone]
    stack.batcher()
    assert [speaker.status(name) for speaker, name in zip(everyone, sent, strict=True)] == [ABORTED, ABORTED]
    for speaker in everyone:
        speaker.start_again()
    assert [speaker.say(2) for speaker in everyone] == [OK, OK]
    assert_settled(stack)


def test_withdrawn_follower_breaks_its_sequence(stack: Stack, hooks: Hooks, tmp_path: Path) -> None:
    """Given one in flight, a follower that is withdrawn, and one after it: the first is still OK."""
    serve(stack)
    one, other = speakers(stack, 2)
    gate = tmp_path / "gate"
    first = one.send(f"wait {gate}")
    wait_until((tmp_path / "gate.started").exists, description="it is in flight")
    second, third = one.send(1), one.send(2)
    stack.send(MODEL, withdraw=second)
    assert one.status(second) == CANCELLED
    gate.touch()
    assert [one.status(first), one.status(third)] == [OK, ABORTED]
    hooks.wait_for_end(one.name)
    assert other.say(1) == OK
    assert_settled(stack)
