"""Processes killed, frozen and asked to leave under load: nothing is lost, doubled or given to another."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any, Final

import pytest

import carpool
from carpool.keys import Keys
from support.checker import Checker, Report
from support.load import Load, settled
from support.stack import START_S, Service, Stack, fixed_keys, frozen
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

BUSY: Final = "Busy"
LEASE: Final = ("--lease-ms", "600")
TAKE_OVER_S: Final = 3.0  # a killed batcher's lease ends after 2 s, and others look four times a second


def worker(stack: Stack) -> Service:
    return stack.worker("hashing.py:Busy", *LEASE)


def wait_until_served(stack: Stack, model: str = BUSY) -> None:
    """A request that is sent now gets its result."""
    asker = stack.send(model, body='"are you there?"')
    assert stack.result(model, asker)["status"] == "OK"


def recovery_s(stack: Stack, model: str = BUSY) -> float:
    """How long it takes from now until a new request is served."""
    started_s = time.monotonic()
    wait_until_served(stack, model)
    return time.monotonic() - started_s


def assert_delivered(stack: Stack, report: Report, given_up_max: int = 0) -> None:
    """Everything accepted has its own result, once; and nothing is left behind.

    Who kills workers at random may kill three while they execute the same request alone: then that one is
    taken for poison, and given up with a dead letter.
    """
    given_up = report.statuses.get("ABORTED", 0)
    assert report.faultless, report
    assert report.ok + given_up == report.accepted, report
    assert given_up <= given_up_max
    assert stack.redis.xlen(Keys(BUSY).dead) == given_up
    assert stack.pending(BUSY) == 0
    assert stack.keys_without_ttl() <= set().union(*map(fixed_keys, stack.models()))


def executed(stack: Stack) -> int:
    """How many requests were committed, by the workers' logs."""
    return sum(batch["size"] for batch in stack.events("batch"))


def assert_executed_once(stack: Stack, report: Report, besides: int = 0) -> None:
    """No batch was delivered twice, no request dispatched twice. `besides`: requests of the test's own."""
    wait_until(lambda: executed(stack) >= report.ok + besides, description="the logs tell of every request")
    assert executed(stack) == report.ok + besides
    assert {batch["epoch"] for batch in stack.events("batch")} == {1}
    assert not stack.events("batch reclaimed")
    assert not stack.events("commit fenced")


# --- SIGKILL


def test_workers_are_killed_again_and_again(stack: Stack) -> None:
    stack.batcher()
    victim = worker(stack)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        for _ in range(4):
            load.wait_for_more(random.randint(1, 60))
            victim.kill()
            victim = worker(stack)
        print(f"recovered {recovery_s(stack):.2f} s after the last worker was replaced")

    assert_delivered(stack, settled(stack, BUSY, checker), given_up_max=1)
    assert stack.events("batch reclaimed"), "no worker was killed in mid-batch: this test showed nothing"


def test_batchers_are_killed_while_another_stands_by(stack: Stack) -> None:
    """Given two batchers, when the active one is killed, expect the model to move within three seconds."""
    batchers = [stack.batcher(), stack.batcher()]
    worker(stack)
    stack.wait_for_model(BUSY)
    checker, moves_s = Checker(), []
    with Load(stack, BUSY, checker) as load:
        for _ in range(2):
            load.wait_for_more(random.randint(1, 60))
            victim = stack.active_batcher(BUSY)
            victim.kill()
            moves_s.append(recovery_s(stack))
            assert stack.active_batcher(BUSY) is not victim
            batchers.append(stack.batcher())

    report = settled(stack, BUSY, checker)
    print(
        f"a new request was served {moves_s[0]:.2f} and {moves_s[1]:.2f} s after the active batcher's death"
    )
    assert_delivered(stack, report)
    assert_executed_once(stack, report, besides=2)
    assert max(moves_s) < TAKE_OVER_S


def test_batchers_and_workers_are_killed(stack: Stack) -> None:
    for _ in range(2):
        stack.batcher()
    workers = [worker(stack), worker(stack)]
    stack.wait_for_model(BUSY, workers=2)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        for _ in range(2):
            load.wait_for_more(random.randint(1, 40))
            workers.pop(0).kill()
            stack.active_batcher(BUSY).kill()
            stack.batcher()
            workers.append(worker(stack))
            print(f"recovered {recovery_s(stack):.2f} s after both were replaced")

    assert_delivered(stack, settled(stack, BUSY, checker))


# --- SIGSTOP


def test_a_worker_that_stood_still_past_its_lease_is_fenced(stack: Stack) -> None:
    """Given a batch in a frozen worker's hand, when another has taken it over, expect one result for each."""
    stack.batcher()
    sleeper = worker(stack)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        other = worker(stack)
        with frozen(sleeper):
            other.wait_for("batch reclaimed")
            load.wait_for_more(50)
        sleeper.wait_for("commit fenced")
        load.wait_for_more(50)

    assert_delivered(stack, settled(stack, BUSY, checker))
    lost = {event["batch"] for event in sleeper.events("commit fenced")}
    assert lost <= {event["batch"] for event in other.events("batch reclaimed")}
    assert sleeper.alive


def test_a_batcher_that_stood_still_past_its_lease_dispatches_nothing_twice(
    stack: Stack, tmp_path: Path
) -> None:
    """Given a batcher that is frozen with requests at hand, when another has dispatched and answered them,
    expect what it does when it wakes to be void: it hears of room, and sees a deadline that passed.
    """
    gate, keys = tmp_path / "gate", Keys("Echo")
    sleeper = stack.batcher()
    services = [stack.worker(spec, *LEASE, ready=False) for spec in ("hashing.py:Busy", "plain.py:Echo")]
    for service in services:
        service.wait_for("worker ready")
    for model in (BUSY, "Echo"):
        stack.wait_for_model(model)
    other = stack.batcher()
    plug = stack.send("Echo", body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="Echo is held up")
    names = [stack.send("Echo", body=str(number)) for number in range(5)]
    late = stack.send("Echo", body="0", expiration=1000)
    last = stack.send("Echo", body="0", expiration=1)
    stack.result("Echo", last)  # so the batcher has read those before it

    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        with frozen(sleeper):
            gate.touch()
            print(f"the other batcher served after {recovery_s(stack):.2f} s")
            wait_until(lambda: len(other.events("batcher active")) == 2, description="it serves both")
            assert [stack.result("Echo", name)["body"] for name in names] == list(range(5))
            assert stack.result("Echo", late)["status"] == "DEADLINE_EXCEEDED"
            load.wait_for_more(50)
        wait_until(
            lambda: {event["model"] for event in sleeper.events("lease lost")} == {BUSY, "Echo"},
            description="the sleeper learns that neither model is its own",
        )
        load.wait_for_more(50)

    report = settled(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report, besides=1 + len(names) + 1)
    assert stack.result("Echo", plug)["status"] == "OK"
    assert list(stack.redis.scan_iter(match=keys.result("*"))) == [], "somebody got a second result"


# --- Several at once


def test_three_batchers_that_take_the_lease_from_each_other_dispatch_nothing_twice(stack: Stack) -> None:
    """Given three batchers, when the lease is deleted again and again, several are active at once."""
    batchers = [stack.batcher() for _ in range(3)]
    worker(stack)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        for _ in range(12):
            stack.redis.delete(Keys(BUSY).batcher)
            load.wait_for_more(40)

    report = settled(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report)
    active = [len(batcher.events("batcher active")) for batcher in batchers]
    assert sum(1 for times in active if times) > 1, f"only one was ever active: {active}"


# --- Poison


def send_with_poison(stack: Stack, poison: str) -> list[str]:
    """One entry: 63 good requests, and a bad one in the middle; their correlation IDs, the bad one's last."""
    bodies = [f"good {number}" for number in range(63)]
    bodies.insert(30, poison)
    names = [f"r{number}" for number in range(64)]
    requests = [
        {"correlation_id": name, "body": json.dumps(body)} for name, body in zip(names, bodies, strict=True)
    ]
    stack.send_packed("Faulty", requests)
    return [*names[:30], *names[31:], names[30]]


def results_with_poison(stack: Stack, names: list[str]) -> dict[str, Any]:
    """63 results that are right, and the bad one's, which is returned. None of them twice."""
    *good, bad = [stack.result("Faulty", name) for name in names]
    assert {(one["status"], one["body"]) for one in good} == {
        ("OK", f"good {number}") for number in range(63)
    }
    stack.wait_until_idle("Faulty")
    assert list(stack.redis.scan_iter(match=Keys("Faulty").result("*"))) == []
    assert stack.pending("Faulty") == 0
    return bad


def dead_letters(stack: Stack) -> list[dict[str, str]]:
    return [
        {name.decode(): value.decode() for name, value in fields.items()}
        for _, fields in stack.redis.xrange(Keys("Faulty").dead)
    ]


def test_a_request_on_which_the_model_raises_fails_alone(stack: Stack) -> None:
    stack.serve("faulty.py:Faulty")
    bad = results_with_poison(stack, send_with_poison(stack, "raise"))
    assert (bad["status"], "this one is spoilt" in bad["detail"]) == ("INTERNAL", True)
    assert dead_letters(stack) == []


def test_a_request_that_kills_its_model_process_is_given_up_alone(stack: Stack) -> None:
    stack.serve("faulty.py:Faulty")

    bad = results_with_poison(stack, send_with_poison(stack, "kill"))

    assert (bad["status"], bad["final"]) == ("ABORTED", True)
    (letter,) = dead_letters(stack)
    assert (letter["correlation_id"], letter["body"]) == (bad["correlation_id"], '"kill"')
    assert (letter["attempts"], "ended 2 times" in letter["reason"]) == ("2", True)
    assert len(stack.events("model process died")) == 2
    wait_until_served(stack, "Faulty")


def test_a_request_that_kills_its_whole_worker_is_given_up_alone(stack: Stack) -> None:
    """Given somebody who restarts the worker, it dies four times: once on the batch, three times on the one.

    (The first time alone may have been chance; `attempts` counts those that were not.)
    """
    stack.batcher()
    workers = [stack.worker("faulty.py:Faulty", *LEASE)]
    stack.wait_for_model("Faulty")

    names = send_with_poison(stack, "kill worker")
    for _ in range(4):
        wait_until(
            lambda: not workers[-1].alive, description="the worker dies of the poison", timeout_s=START_S
        )
        workers.append(stack.worker("faulty.py:Faulty", *LEASE, ready=False))  # it may die before it says so
    workers[-1].wait_for("worker ready")

    bad = results_with_poison(stack, names)
    assert bad["status"] == "ABORTED"
    (letter,) = dead_letters(stack)
    assert (letter["attempts"], letter["body"]) == ("2", '"kill worker"')
    assert workers[-1].alive


# --- Long work


def test_a_model_that_computes_past_the_lease_is_not_taken_from(stack: Stack) -> None:
    """Given idle workers beside it, when a model holds the GIL or sleeps for 2.5 leases, nobody helps."""
    specs = ("timed.py:GilHolder", "timed.py:Sleeper")
    stack.batcher()
    services = [stack.worker(spec, *LEASE, ready=False) for spec in specs for _ in range(2)]
    for service in services:
        service.wait_for("worker ready")
    models = [spec.rpartition(":")[2] for spec in specs]
    for model in models:
        stack.wait_for_model(model, workers=2)
    for model in models:
        stack.send(model, correlation_id="long", body="1.5")
    for model in models:
        result = stack.result(model, "long")
        assert (result["status"], result["body"]) == ("OK", 1.5)
        assert result["compute_us"] > 1_400_000
        stack.wait_until_idle(model)
    wait_until(lambda: len(stack.events("batch")) == 2, description="both batches are in the logs")
    assert [batch["epoch"] for batch in stack.events("batch")] == [1, 1]
    for sign in ("batch reclaimed", "batch lost", "commit fenced"):
        assert not stack.events(sign)


# --- SIGTERM


def test_a_worker_that_is_asked_to_leave_finishes_and_nothing_is_delivered_again(stack: Stack) -> None:
    stack.batcher()
    leavers = [worker(stack) for _ in range(2)]
    stack.wait_for_model(BUSY, workers=2)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        for leaver in leavers:
            load.wait_for_more(30)
            successor = worker(stack)
            started_s = time.monotonic()
            assert leaver.terminate() == 0
            print(f"left after {time.monotonic() - started_s:.2f} s")
            assert leaver.events("worker stopped")[0]["clean"] is True
            assert successor.alive

    report = settled(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report)
    assert len(stack.live_workers(BUSY)) == 2


def test_a_batcher_that_is_asked_to_leave_hands_over_at_once(stack: Stack) -> None:
    for _ in range(2):
        stack.batcher()
    worker(stack)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        load.wait_for_more(30)
        leaver = stack.active_batcher(BUSY)
        assert leaver.terminate() == 0
        handed_over_s = recovery_s(stack)
        print(f"a new request was served {handed_over_s:.2f} s after the batcher left")
        load.wait_for_more(30)

    report = settled(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report, besides=1)
    assert handed_over_s < 1.5, "the lease was not given back"


# --- Does it show? Planted faults, in a copy of the package that only these workers use


def planted(home: Path, find: str, replace: str) -> Path:
    """A directory with a package `carpool` in whose commit this text stands for that."""
    shutil.copytree(
        Path(carpool.__file__).parent, home / "carpool", ignore=shutil.ignore_patterns("__pycache__")
    )
    script = home / "carpool" / "store" / "lua" / "commit.lua"
    source = script.read_text()
    assert source.count(find) == 1
    script.write_text(source.replace(find, replace))
    return home


DELIVER: Final = "  deliver_in_order(KEYS[6], slot, key, kind, payload, ARGV[4])"
FENCE: Final = "then return 'FENCED' end"


def test_acknowledging_without_results_doubling_them_and_shuffling_rows_turn_the_checker_red(
    stack: Stack, tmp_path: Path
) -> None:
    """Given a worker that loses a result of each batch, one that writes all twice, a model that mixes up."""
    lossy = planted(tmp_path / "lossy", DELIVER, f"  if left_out.one then {DELIVER} end left_out.one = true")
    twofold = planted(tmp_path / "twofold", DELIVER, f"  {DELIVER} {DELIVER}")
    stack.batcher()
    services = [
        stack.worker("lossy=hashing.py:Hashing", planted=lossy, ready=False),
        stack.worker("twofold=hashing.py:Hashing", planted=twofold, ready=False),
        stack.worker("mixed=hashing.py:Shuffled", ready=False),
        stack.worker("sound=hashing.py:Hashing", ready=False),
    ]
    for service in services:
        service.wait_for("worker ready")
    faults = {}
    for model in ("lossy", "twofold", "mixed", "sound"):
        stack.wait_for_model(model)
        checker = Checker()
        with Load(stack, model, checker):
            pass
        report = settled(stack, model, checker)
        counts = {
            name: len(getattr(report, name)) for name in ("lost", "duplicated", "misrouted", "unexpected")
        }
        faults[model] = {name for name, count in counts.items() if count}
    assert faults == {"lossy": {"lost"}, "twofold": {"duplicated"}, "mixed": {"misrouted"}, "sound": set()}


def test_a_commit_without_its_fence_turns_the_checker_red(stack: Stack, tmp_path: Path) -> None:
    """As where a worker stood still past its lease, but it does not look whose the batch is."""
    unfenced = planted(tmp_path / "unfenced", FENCE, "then owner = nil end")
    stack.batcher()
    sleeper = stack.worker("hashing.py:Busy", *LEASE, planted=unfenced)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        other = worker(stack)
        with frozen(sleeper):
            taken = other.wait_for("batch reclaimed")["batch"]
            wait_until(lambda: taken in settled_by(other), description="the other worker settles the batch")
        wait_until(lambda: taken in settled_by(sleeper), description="the sleeper commits it once more")
        load.wait_for_more(10)
    report = settled(stack, BUSY, checker)
    assert report.duplicated, report


def settled_by(service: Service) -> set[str]:
    return {batch["batch"] for batch in service.events("batch")}
