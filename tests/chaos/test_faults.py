"""Services are killed, frozen and terminated under load: no result is lost, duplicated or misrouted."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any, Final

import pytest

import carpool
from carpool.keys import Keys
from support.checker import Checker, Report
from support.load import Load, final_report
from support.stack import START_S, Service, Stack, fixed_keys, frozen, frozen_with_batch
from support.waiting import Stopwatch, wait_until

pytestmark = pytest.mark.chaos

BUSY: Final = "Busy"
LEASE: Final = ("--lease-ms", "600")
# Of workers that nothing happens to: none may lose its batch because this machine stands still for a second.
LONG_LEASE: Final = ("--lease-ms", "30000")
LEASE_OF_BATCHER_MS: Final = 2000
TAKE_OVER_S_MAX: Final = 3.0  # the lease of a killed batcher ends after 2 s; others try twice a second


def worker(stack: Stack, lease: tuple[str, ...] = LEASE) -> Service:
    return stack.worker("hashing.py:Busy", *lease)


def wait_until_served(stack: Stack, model: str = BUSY) -> None:
    """Send a request, and wait for its result."""
    entry_id = stack.send(model, body='"ping"')
    assert stack.result(model, entry_id)["status"] == "OK"


def recovery_s(stack: Stack, model: str = BUSY) -> float:
    """Seconds from now until a new request is served."""
    stopwatch = Stopwatch()
    wait_until_served(stack, model)
    return stopwatch.passed_s


def take_over_s(stack: Stack, killed: Service) -> float:
    """Seconds from now until another batcher is active. What has arrived meanwhile is served after that."""
    stopwatch = Stopwatch()
    wait_until(
        lambda: stack.active_batcher(BUSY) is not killed,
        description="another batcher is active",
    )
    return stopwatch.passed_s


def assert_delivered(stack: Stack, report: Report, dead_lettered_max: int = 0) -> None:
    """Each accepted request has exactly one result of its own, and no keys or pending entries remain.

    Workers killed at random may be killed three times while they execute the same request alone: then that
    request is taken for the cause, and dead-lettered.
    """
    dead_lettered = report.statuses.get("ABORTED", 0)
    assert report.faultless, report
    assert report.ok + dead_lettered == report.accepted, report
    assert dead_lettered <= dead_lettered_max
    assert stack.redis.xlen(Keys(BUSY).dead) == dead_lettered
    assert stack.pending(BUSY) == 0
    assert stack.keys_without_ttl() <= set().union(*map(fixed_keys, stack.models()))


def executed(stack: Stack) -> int:
    """The number of committed requests, according to the workers' logs."""
    return sum(batch["size"] for batch in stack.events("batch"))


def assert_executed_once(stack: Stack, report: Report, extra: int = 0) -> None:
    """No batch was delivered twice, and no request dispatched twice. `extra` counts unrecorded requests."""
    wait_until(lambda: executed(stack) >= report.ok + extra, description="all requests are in the logs")
    assert executed(stack) == report.ok + extra
    assert {batch["epoch"] for batch in stack.events("batch")} == {1}
    assert not stack.events("batch reclaimed")
    assert not stack.events("commit discarded, another worker has the batch")


# --- SIGKILL


def test_workers_are_killed_repeatedly(stack: Stack) -> None:
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

    assert_delivered(stack, final_report(stack, BUSY, checker), dead_lettered_max=1)
    assert stack.events("batch reclaimed"), (
        "no worker was killed during an execution, so this test has shown nothing"
    )


def test_active_batcher_is_killed_while_another_stands_by(stack: Stack) -> None:
    """Given two batchers, when the active one is killed, expect the other to take over within 3 s."""
    batchers = [stack.batcher(), stack.batcher()]
    worker(stack, LONG_LEASE)
    stack.wait_for_model(BUSY)
    checker, take_overs_s = Checker(), []
    with Load(stack, BUSY, checker) as load:
        for _ in range(2):
            load.wait_for_more(random.randint(1, 60))
            victim = stack.active_batcher(BUSY)
            victim.kill()
            assert stack.redis.pttl(Keys(BUSY).batcher) <= LEASE_OF_BATCHER_MS
            take_overs_s.append(take_over_s(stack, victim))
            wait_until_served(stack)
            batchers.append(stack.batcher())

    report = final_report(stack, BUSY, checker)
    print(
        f"another batcher was active {take_overs_s[0]:.2f} and {take_overs_s[1]:.2f} s after the active one "
        "was killed"
    )
    assert_delivered(stack, report)
    assert_executed_once(stack, report, extra=2)
    assert min(take_overs_s) < TAKE_OVER_S_MAX, "one time this machine may have been held up"


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

    assert_delivered(stack, final_report(stack, BUSY, checker))


# --- SIGSTOP


def test_worker_frozen_past_its_lease_is_fenced(stack: Stack) -> None:
    """Given a frozen worker with a batch, when another reclaims the batch, expect one result per request."""
    stack.batcher()
    frozen_worker = worker(stack)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        other = worker(stack)
        with frozen_with_batch(stack, BUSY, frozen_worker):
            other.wait_for("batch reclaimed")
            load.wait_for_more(50)
        frozen_worker.wait_for("commit discarded, another worker has the batch")
        load.wait_for_more(50)

    assert_delivered(stack, final_report(stack, BUSY, checker))
    lost = {
        event["batch"] for event in frozen_worker.events("commit discarded, another worker has the batch")
    }
    assert lost <= {event["batch"] for event in other.events("batch reclaimed")}
    assert frozen_worker.alive


def test_batcher_frozen_past_its_lease_dispatches_nothing_twice(stack: Stack, tmp_path: Path) -> None:
    """Given a frozen batcher with waiting requests, when another has dispatched and answered them, expect the
    first to have no effect after it continues, though it sees capacity and an expired request.
    """
    gate, keys = tmp_path / "gate", Keys("Echo")
    frozen_batcher = stack.batcher()
    services = [stack.worker(spec, *LONG_LEASE, ready=False) for spec in ("hashing.py:Busy", "plain.py:Echo")]
    for service in services:
        service.wait_for("worker ready")
    for model in (BUSY, "Echo"):
        stack.wait_for_model(model)
    other = stack.batcher()
    blocking = stack.send("Echo", body=json.dumps({"gate": str(gate)}))
    wait_until(
        lambda: stack.redis.xlen(keys.batches) == 1, description="the worker of Echo waits at the gate"
    )
    names = [stack.send("Echo", body=str(number)) for number in range(5)]
    expiring = stack.send("Echo", body="0", expiration=1000)
    last = stack.send("Echo", body="0", expiration=1)
    stack.result("Echo", last)  # then the batcher has read the requests before it

    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        with frozen(frozen_batcher):
            gate.touch()
            print(f"the other batcher took over after {recovery_s(stack):.2f} s")
            wait_until(
                lambda: len(other.events("batcher active")) == 2,
                description="the other batcher is active for both models",
            )
            assert [stack.result("Echo", name)["body"] for name in names] == list(range(5))
            assert stack.result("Echo", expiring)["status"] == "DEADLINE_EXCEEDED"
            load.wait_for_more(50)
        wait_until(
            lambda: (
                {event["model"] for event in frozen_batcher.events("batcher no longer active, lease lost")}
                == {BUSY, "Echo"}
            ),
            description="the first batcher has lost both leases",
        )
        load.wait_for_more(50)

    report = final_report(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report, extra=1 + len(names) + 1)
    assert stack.result("Echo", blocking)["status"] == "OK"
    assert list(stack.redis.scan_iter(match=keys.result("*"))) == [], "a request got a second result"


# --- several active batchers


def test_concurrently_active_batchers_dispatch_nothing_twice(stack: Stack) -> None:
    """Given three batchers, when the lease is deleted repeatedly, several are active at once."""
    batchers = [stack.batcher() for _ in range(3)]
    worker(stack, LONG_LEASE)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:

        def were_several_active() -> bool:
            stack.redis.delete(Keys(BUSY).batcher)
            load.wait_for_more(40)
            return sum(1 for batcher in batchers if batcher.events("batcher active")) > 1

        wait_until(were_several_active, description="a second batcher was active")
        for _ in range(12):
            were_several_active()

    report = final_report(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report)


# --- requests that make a model fail


def send_with_poison(stack: Stack, poison: str) -> list[str]:
    """Send 63 good requests and a bad one in one entry; return their correlation IDs, the bad one last."""
    bodies = [f"good {number}" for number in range(63)]
    bodies.insert(30, poison)
    names = [f"r{number}" for number in range(64)]
    requests = [
        {"correlation_id": name, "body": json.dumps(body)} for name, body in zip(names, bodies, strict=True)
    ]
    stack.send_packed("Faulty", requests)
    return [*names[:30], *names[31:], names[30]]


def results_with_poison(stack: Stack, names: list[str]) -> dict[str, Any]:
    """Check that all good requests have the right result, once; return the result of the bad one."""
    *good, bad = [stack.result("Faulty", name) for name in names]
    assert {(result["status"], result["body"]) for result in good} == {
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


def test_request_on_which_the_model_raises_fails_alone(stack: Stack) -> None:
    stack.serve("faulty.py:Faulty")
    bad = results_with_poison(stack, send_with_poison(stack, "raise"))
    assert (bad["status"], "this one is spoilt" in bad["detail"]) == ("INTERNAL", True)
    assert dead_letters(stack) == []


def test_request_that_kills_its_model_process_is_dead_lettered_alone(stack: Stack) -> None:
    stack.serve("faulty.py:Faulty")

    bad = results_with_poison(stack, send_with_poison(stack, "kill"))

    assert (bad["status"], bad["final"]) == ("ABORTED", True)
    (letter,) = dead_letters(stack)
    assert (letter["correlation_id"], letter["body"]) == (bad["correlation_id"], '"kill"')
    assert (letter["attempts"], "died 2 times" in letter["reason"]) == ("2", True)
    assert len(stack.events("model process died")) == 2
    wait_until_served(stack, "Faulty")


def test_request_that_kills_its_worker_is_dead_lettered_alone(stack: Stack) -> None:
    """A worker that is restarted dies four times: once with the batch, three times with the request alone.

    `attempts` is 2, because the first death with the request alone may have been a coincidence.
    """
    stack.batcher()
    workers = [stack.worker("faulty.py:Faulty", *LEASE)]
    stack.wait_for_model("Faulty")

    names = send_with_poison(stack, "kill worker")
    for _ in range(4):
        wait_until(
            lambda: not workers[-1].alive, description="the worker dies of the bad request", timeout_s=START_S
        )
        workers.append(stack.worker("faulty.py:Faulty", *LEASE, ready=False))  # it may die before it is ready
    workers[-1].wait_for("worker ready")

    bad = results_with_poison(stack, names)
    assert bad["status"] == "ABORTED"
    (letter,) = dead_letters(stack)
    assert (letter["attempts"], letter["body"]) == ("2", '"kill worker"')
    assert workers[-1].alive


# --- long executions


def test_execution_longer_than_the_lease_is_not_reclaimed(stack: Stack) -> None:
    """Given idle workers, when a model holds the GIL or sleeps for 2.5 leases, expect no reclaim."""
    specs = ("timed.py:GilHolder", "timed.py:Sleeper")
    stack.batcher()
    services = [stack.worker(spec, "--lease-ms", "2000", ready=False) for spec in specs for _ in range(2)]
    for service in services:
        service.wait_for("worker ready")
    models = [spec.rpartition(":")[2] for spec in specs]
    for model in models:
        stack.wait_for_model(model, workers=2)
    for model in models:
        stack.send(model, correlation_id="long", body="5")
    for model in models:
        result = stack.result(model, "long")
        assert (result["status"], result["body"]) == ("OK", 5)
        assert result["compute_us"] > 4_900_000
        stack.wait_until_idle(model)
    wait_until(lambda: len(stack.events("batch")) == 2, description="both batches are in the logs")
    assert [batch["epoch"] for batch in stack.events("batch")] == [1, 1]
    for event in (
        "batch reclaimed",
        "batch taken over by another worker",
        "commit discarded, another worker has the batch",
    ):
        assert not stack.events(event)


# --- SIGTERM


def test_terminated_worker_drains_and_nothing_is_redelivered(stack: Stack) -> None:
    stack.batcher()
    terminated = [worker(stack, LONG_LEASE) for _ in range(2)]
    stack.wait_for_model(BUSY, workers=2)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        for old in terminated:
            load.wait_for_more(30)
            new = worker(stack, LONG_LEASE)
            stopwatch = Stopwatch()
            assert old.terminate() == 0
            print(f"stopped after {stopwatch.passed_s:.2f} s")
            assert old.events("worker stopped")[0]["clean"] is True
            assert new.alive

    report = final_report(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report)
    assert len(stack.live_workers(BUSY)) == 2


def test_terminated_batcher_releases_its_lease(stack: Stack) -> None:
    for _ in range(2):
        stack.batcher()
    worker(stack, LONG_LEASE)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        load.wait_for_more(30)
        terminated = stack.active_batcher(BUSY)
        assert terminated.terminate() == 0
        holder = stack.redis.get(Keys(BUSY).batcher) or b""
        assert f"-{terminated.pid}-" not in holder.decode(), "the lease was not released"
        print(f"a new request was served {recovery_s(stack):.2f} s after the batcher stopped")
        load.wait_for_more(30)

    report = final_report(stack, BUSY, checker)
    assert_delivered(stack, report)
    assert_executed_once(stack, report, extra=1)


# --- planted faults, to show that the checker detects them


DELIVER: Final = re.compile(r"^ *take_result\(.*\)$", re.MULTILINE)
RETURN_IF_FENCED: Final = re.compile(r"\breturn (\{ )?'FENCED'( \})? end$", re.MULTILINE)


def faulty_package(home: Path, pattern: re.Pattern[str], replacement: str, header: str = "") -> Path:
    """Make a directory with a copy of the package `carpool` in which one line of commit.lua is replaced."""
    shutil.copytree(
        Path(carpool.__file__).parent, home / "carpool", ignore=shutil.ignore_patterns("__pycache__")
    )
    script = home / "carpool" / "store" / "lua" / "commit.lua"
    source, count = pattern.subn(replacement, script.read_text())
    assert count == 1
    script.write_text(header + source)
    return home


def test_checker_detects_lost_duplicated_and_misrouted_results(stack: Stack, tmp_path: Path) -> None:
    """Given a worker that loses results, one that writes each twice, and a model that mixes them up."""
    skip_first = r"if skipped then \g<0> end skipped = true"
    lossy = faulty_package(tmp_path / "lossy", DELIVER, skip_first, header="local skipped = false\n")
    doubling = faulty_package(tmp_path / "doubling", DELIVER, r"\g<0> \g<0>")
    stack.batcher()
    services = [
        stack.worker("lossy=hashing.py:Hashing", faulty_package=lossy, ready=False),
        stack.worker("doubling=hashing.py:Hashing", faulty_package=doubling, ready=False),
        stack.worker("misrouting=hashing.py:Shuffled", ready=False),
        stack.worker("correct=hashing.py:Hashing", ready=False),
    ]
    for service in services:
        service.wait_for("worker ready")
    faults = {}
    for model in ("lossy", "doubling", "misrouting", "correct"):
        stack.wait_for_model(model)
        checker = Checker()
        with Load(stack, model, checker):
            pass
        report = final_report(stack, model, checker)
        counts = {
            name: len(getattr(report, name)) for name in ("lost", "duplicated", "misrouted", "unexpected")
        }
        faults[model] = {name for name, count in counts.items() if count}
    assert faults == {
        "lossy": {"lost"},
        "doubling": {"duplicated"},
        "misrouting": {"misrouted"},
        "correct": set(),
    }


def test_checker_detects_a_missing_fence(stack: Stack, tmp_path: Path) -> None:
    """A worker is frozen past its lease, and its commit does not check which worker owns the batch."""
    unfenced = faulty_package(tmp_path / "unfenced", RETURN_IF_FENCED, "end")
    stack.batcher()
    frozen_worker = stack.worker("hashing.py:Busy", *LEASE, faulty_package=unfenced)
    stack.wait_for_model(BUSY)
    checker = Checker()
    with Load(stack, BUSY, checker) as load:
        other = worker(stack)
        with frozen_with_batch(stack, BUSY, frozen_worker):
            batch = other.wait_for("batch reclaimed")["batch"]
            wait_until(lambda: batch in committed_by(other), description="the other worker commits the batch")
        wait_until(
            lambda: batch in committed_by(frozen_worker), description="the frozen worker commits it again"
        )
        load.wait_for_more(10)
    report = final_report(stack, BUSY, checker)
    assert report.duplicated, report


def committed_by(service: Service) -> set[str]:
    return {batch["batch"] for batch in service.events("batch")}
