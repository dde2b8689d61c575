"""Two workers of one model: which of them takes a batch, and whose settings apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from carpool.keys import Keys
from support.command import carpool
from support.stack import Stack
from support.waiting import wait_until

LEASE = ("--lease-ms", "6000")  # settings count as long; they are compared three times as often


def test_batch_goes_to_the_idle_worker_while_the_other_executes_its_first(
    stack: Stack, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    stack.batcher()
    stack.worker("plain.py:Echo")
    stack.wait_for_model("Echo")
    held = stack.send("Echo", body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.pending("Echo") == 1, description="the first worker has a batch in hand")
    stack.worker("plain.py:Echo")
    stack.wait_for_model("Echo", workers=2)

    for number in range(3):
        assert stack.result("Echo", stack.send("Echo", body=str(number)))["body"] == number

    gate.touch()
    assert stack.result("Echo", held)["status"] == "OK"


VERSIONS = """
class V1:
    max_batch_size = 4
    def predict(self, batch):
        return [len(batch)] * len(batch)
class V2(V1):
    max_batch_size = 64
"""


def test_during_an_update_and_after_a_rollback_batches_suit_the_workers_that_live(
    stack: Stack, tmp_path: Path
) -> None:
    def size() -> Any:
        return stack.redis.hget(Keys("clf").registration, "max_batch_size")

    (tmp_path / "versions.py").write_text(VERSIONS)
    stack.batcher()
    stack.worker(f"clf={tmp_path / 'versions.py'}:V1", *LEASE)
    new = stack.worker(f"clf={tmp_path / 'versions.py'}:V2", *LEASE)
    assert size() == b"4"
    wait_until(
        lambda: len(stack.events("workers declare different settings, the tightest apply")) == 2,
        description="both warn",
    )
    differing = "max_batch_size: 4 (1 worker), 64 (1 worker)"
    for command in (["models"], ["config", "clf"]):
        assert differing in " ".join(carpool(stack.url, *command, check=True).stdout.split())
    new.terminate()
    wait_until(
        lambda: bool(stack.events("workers declare the same settings again")), description="it is noticed"
    )
    assert size() == b"4"
    assert "different settings" not in carpool(stack.url, "models", check=True).stdout

    # As a batcher does for a moment, when a worker that takes less joins others.
    stack.redis.hset(Keys("clf").registration, "max_batch_size", 64)
    wait_until(
        lambda: any(event.get("max_batch_size") == "64" for event in stack.events("settings changed")),
        description="the batcher dispatches larger batches",
    )
    ids = [f"r{number}" for number in range(10)]
    stack.send_packed("clf", [{"correlation_id": name, "body": b"1"} for name in ids])
    results = [stack.result("clf", name) for name in ids]
    assert {result["batch_size"] for result in results} == {10}
    assert sorted(result["body"] for result in results) == [2, 2] + [4] * 8
