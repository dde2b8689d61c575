"""Workers that an operator drains: they take no more batches, and stay; undone, they take them again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool import Client
from carpool.keys import Keys
from support.command import carpool
from support.models.stepping import text_of
from support.stack import Service, Stack
from support.status import get
from support.waiting import EVENTUALLY_S, wait_until

# A worker looks three times in a lease whether it is drained, and keeps it if it is held up for seconds.
LEASE: Final = ("--lease-ms", "4500")
ECHO: Final = "Echo"


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path) as started:
        started.batcher()
        yield started


def run(stack: Stack, *arguments: str) -> str:
    done = carpool(stack.url, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def workers(stack: Stack, *arguments: str) -> dict[str, dict[str, Any]]:
    """What `carpool workers` lists, by name."""
    return {one["name"]: one for one in json.loads(run(stack, "workers", *arguments, "--json"))}


def processes_in_use(stack: Stack) -> int:
    """How many model processes the batcher counts."""
    (figures,) = json.loads(run(stack, "top", "--once", "--json"))["models"]
    return int(figures["model_processes"])


def name_of(worker: Service) -> str:
    return str(worker.wait_for("worker ready")["worker"])


def drain(stack: Stack, worker: Service) -> str:
    """Drain a worker; return what the command printed, once the worker knows."""
    before = len(worker.events("worker drained by an operator"))
    printed = run(stack, "drain", name_of(worker))
    wait_until(
        lambda: len(worker.events("worker drained by an operator")) > before, description="the worker knows"
    )
    return printed


def undo(stack: Stack, worker: Service) -> str:
    before = len(worker.events("worker serves again"))
    printed = run(stack, "drain", name_of(worker), "--undo")
    wait_until(lambda: len(worker.events("worker serves again")) > before, description="the worker knows")
    return printed


def test_worker_takes_nothing_until_the_drain_is_undone(stack: Stack, gate: Path) -> None:
    """Given a worker with a batch in hand, when it is drained, expect that it finishes that one, that all
    others go to another worker, and that requests wait when that is drained, too."""
    one = stack.worker(f"plain.py:{ECHO}", *LEASE, "--replicas", "2", "--http-port", "0")
    stack.wait_for_model(ECHO, workers=2)
    held = stack.send(ECHO, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.pending(ECHO) == 1, description="its batch is in hand")
    other = stack.worker(f"plain.py:{ECHO}", *LEASE)
    stack.wait_for_model(ECHO, workers=3)
    assert drain(stack, one) == f"{name_of(one)} of Echo drains: 2 processes\n"
    listed = workers(stack, ECHO)[name_of(one)]
    assert listed["state"] == "draining" and listed["order"]["who"] and listed["host"]
    assert [process["in_hand"] for process in listed["processes"]].count(1) == 1
    assert workers(stack)[name_of(other)]["state"] == "serving"
    for number in range(8):
        assert stack.result(ECHO, stack.send(ECHO, body=str(number)))["body"] == number
    assert stack.pending(ECHO) == 1, "the batch in hand alone"
    gate.touch()
    assert stack.result(ECHO, held)["status"] == "OK"

    printed = drain(stack, other)
    assert "no other process serves Echo: its requests wait" in printed
    # What is dispatched before the batcher knows is taken all the same.
    wait_until(lambda: processes_in_use(stack) == 0, description="the batcher knows")
    waiting = stack.send(ECHO, body="8")
    shown = run(stack, "workers")
    assert shown.count("draining") >= 2 and "drained since" in shown
    shown = run(stack, "models")
    assert "3, 3 draining" in shown and f"{name_of(one)} of Echo is drained since" in shown
    assert stack.redis.xlen(Keys(ECHO).requests) == 1 and len(stack.live_workers(ECHO)) == 3
    code, why = get(one, "/readyz")
    assert code == 503 and f"drain {name_of(one)} --undo" in why

    assert undo(stack, one).startswith(f"{name_of(one)} of Echo takes batches again; it was drained since ")
    assert stack.result(ECHO, waiting)["body"] == 8
    assert workers(stack)[name_of(one)]["state"] == "serving"
    actions = [(action["action"], action["details"]["worker"]) for action in audit(stack, ECHO)]
    assert actions == [("drain undone", name_of(one)), ("drain", name_of(other)), ("drain", name_of(one))]


def audit(stack: Stack, *arguments: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(run(stack, "audit", *arguments, "--json"))
    return found


def test_drain_ends_with_its_worker(stack: Stack) -> None:
    """Given a drained worker that is killed, expect that the one which takes its place serves, because it has
    another name; and that the order is forgotten, also when a drained worker stops."""
    killed = stack.worker(f"plain.py:{ECHO}", *LEASE)
    stack.wait_for_model(ECHO)
    drain(stack, killed)
    killed.kill()
    long_ago = dict.fromkeys(stack.live_workers(ECHO), 1)
    stack.redis.zadd(Keys(ECHO).workers, long_ago)  # as if its lease had run out ten leases ago
    started = stack.worker(f"plain.py:{ECHO}", *LEASE)
    assert stack.result(ECHO, stack.send(ECHO, body="7"))["body"] == 7
    wait_until(lambda: list(workers(stack)) == [name_of(started)], description="the lease is over")
    drain(stack, started)
    orders = Keys(ECHO).drained
    assert [name.decode() for name in stack.redis.hkeys(orders)] == [name_of(started)]
    assert started.terminate() == 0
    assert not stack.redis.exists(orders)
    done = carpool(stack.url, "drain", name_of(started))
    assert done.returncode == 1 and "no worker" in done.stderr


def test_streams_go_on_in_another_worker(stack: Stack, gate: Path, tmp_path: Path) -> None:
    """Given streams of a stepping model, when its worker is drained, expect that another one goes on with
    them, and that the drained one steps them no more; without another one, that it finishes them."""
    one = stack.worker("stepping.py:Chain", *LEASE)
    stack.wait_for_model("Chain")
    with Client(stack.url, timeout=EVENTUALLY_S) as client:
        stream = client.stream("Chain", {"length": 20, "gate": str(gate), "gate_at": 1})
        first = next(stream)
        drain(stack, one)
        gate.touch()
        assert "".join([first, *stream]) == text_of(str(stream.correlation_id), 20)
        assert not one.events("requests handed over")
        undo(stack, one)

        handed_over = tmp_path / "handed over"
        stream = client.stream("Chain", {"length": 20, "gate": str(handed_over), "gate_at": 1})
        first = next(stream)
        stack.worker("stepping.py:Chain", *LEASE)
        stack.wait_for_model("Chain", workers=2)
        drain(stack, one)
        one.wait_for("requests handed over")
        (process,) = workers(stack)[name_of(one)]["processes"]
        assert process["in_hand"] == 0 and process["is_draining"]
        handed_over.touch()
        assert "".join([first, *stream]) == text_of(str(stream.correlation_id), 20)
        undo(stack, one)
        again = client.stream("Chain", {"length": 3})
        assert "".join(again) == text_of(str(again.correlation_id), 3)


def test_sequences_stay_and_no_others_begin(stack: Stack) -> None:
    """Given a sequence in a process that binds it, when its worker is drained, expect that it goes on there,
    and that others begin elsewhere."""
    one = stack.worker("bound.py:Hearing", *LEASE)
    stack.wait_for_model("Hearing")
    with Client(stack.url, timeout=EVENTUALLY_S) as client, client.sequence("Hearing") as kept:
        kept.infer(1)
        drain(stack, one)
        draining = Keys("Hearing").draining
        wait_until(lambda: stack.redis.scard(draining) == 1, description="the batcher is told")
        kept.infer(2)
        with client.sequence("Hearing") as later:
            begins = later.submit(1)
            wait_until(lambda: stack.redis.xlen(Keys("Hearing").requests) == 1, description="it waits")
            undo(stack, one)
            begins.result()
        kept.infer(3)
    assert not stack.redis.scard(Keys("Hearing").draining)
