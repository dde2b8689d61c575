"""A draining worker: it finishes what it has in hand, and its capacity is not counted for anything else."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.store.batcher import BatcherStore, ProcessLeftError
from carpool.store.connection import Link
from carpool.store.worker import WorkerStore
from carpool.wire.requests import decode_entry
from carpool_cli.local.embedded import EmbeddedRedis
from support.http import call
from support.proxy import Proxy
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until
from support.wire import DEFAULTS

LEASE: tuple[str, str] = ("--lease-ms", "5000")


def test_batch_in_hand_of_a_draining_worker_does_not_keep_another_idle(stack: Stack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stack.batcher()
    draining = stack.worker("plain.py:Echo", *LEASE)
    held = hold(stack, gate)
    draining.signal(signal.SIGTERM)
    wait_until(lambda: not is_fetching(stack, draining), description="its last fetch has ended")
    staying = stack.worker("plain.py:Echo", *LEASE)

    for number in range(3):
        late = stack.send("Echo", body=str(number))
        assert stack.result("Echo", late)["body"] == number
        wait_for_beat(stack)

    gate.touch()
    assert stack.result("Echo", held)["status"] == "OK"
    assert draining.process.wait(EVENTUALLY_S) == 0
    assert staying.alive


def test_replica_of_a_draining_worker_is_deregistered_when_it_has_no_batch(
    stack: Stack, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    stack.batcher()
    draining = stack.worker("plain.py:Echo", *LEASE, "--replicas", "2")
    stack.wait_for_model("Echo", workers=2)
    held = hold(stack, gate)
    draining.signal(signal.SIGTERM)

    wait_until(lambda: len(stack.live_workers("Echo")) == 1, description="the idle replica is deregistered")
    for _ in range(3):
        wait_for_beat(stack)
        assert len(stack.live_workers("Echo")) == 1

    gate.touch()
    assert stack.result("Echo", held)["status"] == "OK"
    assert draining.process.wait(EVENTUALLY_S) == 0
    assert stack.live_workers("Echo") == []


def test_drain_goes_on_while_redis_refuses_writes(stack: Stack, tmp_path: Path) -> None:
    """Given a draining worker, when Redis accepts no writes for a while, expect that it still finishes."""
    gate = tmp_path / "gate"
    stack.batcher()
    draining = stack.worker("plain.py:Echo", *LEASE, "--replicas", "2")
    stack.wait_for_model("Echo", workers=2)
    held = hold(stack, gate)
    stack.redis.config_set("min-replicas-to-write", 1)
    draining.signal(signal.SIGTERM)
    wait_until(lambda: not is_fetching(stack, draining), description="the last fetches have ended")
    failures = len(draining.events("loop failed, retrying"))
    gate.touch()
    wait_until(
        lambda: len(draining.events("loop failed, retrying")) > failures + 3 or not draining.alive,
        description="writes are refused",
    )

    stack.redis.config_set("min-replicas-to-write", 0)

    assert stack.result("Echo", held)["status"] == "OK"
    assert draining.process.wait(EVENTUALLY_S) == 0


def test_last_worker_takes_what_was_dispatched_before_it_could_tell_that_it_drains(
    tmp_path: Path, gate: Path
) -> None:
    """Given a worker that has nothing in hand any more before Redis knows that it drains, expect that it does
    not end before the batch that was dispatched ahead of it, which would wait for the next worker."""
    server = EmbeddedRedis()
    with Proxy(server.port) as proxy:
        environment = {"worker": {"CARPOOL_REDIS_URL": proxy.url}}
        with Stack(tmp_path / "stack", server=server, environment=environment) as stack:
            stack.batcher()
            worker = stack.worker("plain.py:Echo", "--http-port", "0")
            held = hold(stack, gate)
            ahead = [f"ahead-{number}" for number in range(16)]  # a full batch
            stack.send_packed("Echo", [{"correlation_id": name, "body": b"1"} for name in ahead])
            wait_until(
                lambda: stack.redis.xlen(Keys("Echo").batches) == 2, description="another is dispatched ahead"
            )
            assert proxy.silence(stack.redis, lambda name: name.endswith(":control")) == 1
            worker.signal(signal.SIGTERM)
            wait_until(lambda: call(worker.status_url, "GET", "/readyz").code == 503, description="it drains")
            gate.touch()
            assert stack.result("Echo", held)["status"] == "OK"
            proxy.resume()

            assert worker.process.wait(EVENTUALLY_S) == 0
            assert [stack.result("Echo", name)["body"] for name in ahead] == [1] * 16


def test_nothing_is_dispatched_while_all_processes_drain(stack: Stack) -> None:
    """A batcher that does not know yet that the last process drains adds no batch, which nobody would fetch;
    it does when a drain is undone, or a process comes that does not drain."""
    link = Link(stack.url, name="test")
    batcher, worker = BatcherStore(link, Keys("m")), WorkerStore(link, Keys("m"))

    def dispatch(body: str) -> bool:
        """Whether a batch with a new request is dispatched; else the request must still wait."""
        entry_id = link.call("XADD", batcher.keys.requests, "*", "body", body)
        entry, *_ = decode_entry(entry_id, [b"body", body.encode()], DEFAULTS)
        try:
            (batch,) = batcher.dispatch([Dispatch(entry.runs, "idle", "")], 60_000).batches
        except ProcessLeftError:
            assert link.call("XRANGE", batcher.keys.requests, entry_id, entry_id)
            return False
        return batch is not None

    worker.register({"max_batch_size": "1"})
    for process in "pq":
        worker.join(process, 60_000)
    assert worker.drain("p") == 1 and dispatch("q takes it")
    assert worker.drain("q") == 0 and not dispatch("nobody would")
    worker.undrain("p")
    assert dispatch("p takes it again")
    worker.drain("p")
    for process in "pq":
        worker.leave(process)
    assert not dispatch("both have left")
    worker.join("r", 60_000)
    assert dispatch("r takes it")
    link.close()


def hold(stack: Stack, gate: Path) -> str:
    """Send a request whose batch is in hand until the gate opens. Returns its correlation ID."""
    stack.wait_for_model("Echo")
    held = stack.send("Echo", body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.pending("Echo") == 1, description="its batch is in hand")
    return held


def is_fetching(stack: Stack, worker: Service) -> bool:
    """Whether one of the worker's fetchers is blocked in Redis, waiting for a batch."""
    return any(
        f"-{worker.pid}-" in client["name"] and client["name"].endswith(":fetch") and "b" in client["flags"]
        for client in stack.redis.client_list()
    )


def wait_for_beat(stack: Stack) -> None:
    """Wait until the batch in hand has been renewed."""
    seen_ms = [idle_ms(stack)]

    def is_renewed() -> bool:
        seen_ms.append(idle_ms(stack))
        return seen_ms[-1] < seen_ms[-2]

    wait_until(is_renewed, description="the batch is renewed")


def idle_ms(stack: Stack) -> int:
    """The time since the batch in hand was delivered or renewed."""
    oldest: list[dict[str, Any]] = stack.redis.xpending_range(Keys("Echo").batches, "workers", "-", "+", 1)
    return int(oldest[0]["time_since_delivered"])
