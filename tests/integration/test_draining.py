"""A worker that was told to stop: it keeps what it has in hand, and is no room for more."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import wait_until


def test_a_draining_worker_renews_what_it_holds_and_takes_no_more(stack: Stack, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    stack.batcher()
    draining = stack.worker("plain.py:Echo", "--lease-ms", "600")
    stack.wait_for_model("Echo")
    held = stack.send("Echo", body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: _idle_ms(stack), description="its worker has the batch in hand")

    draining.signal(signal.SIGTERM)
    wait_until(lambda: not stack.live_workers("Echo"), description="it says that it takes no more")
    for _ in range(2):
        wait_until(lambda: _idle_ms(stack) > 100, description="a beat is due")
        wait_until(lambda: _idle_ms(stack) < 100, description="it renews the batch")
        assert not stack.live_workers("Echo"), "and says again that it takes no more"

    late = stack.send("Echo", body="1")
    another = stack.worker("plain.py:Echo")
    assert stack.result("Echo", late)["body"] == 1, "the one that stays has it, however busy the other is"
    gate.touch()
    result = stack.result("Echo", held)
    assert (result["status"], result["body"]) == ("OK", {"gate": str(gate)})
    assert draining.process.wait(15) == 0
    assert another.alive


def _idle_ms(stack: Stack) -> int:
    """How long ago the one batch in flight was delivered or renewed; 0 if there is none."""
    found: list[dict[str, Any]] = stack.redis.xpending_range(Keys("Echo").batches, "workers", "-", "+", 1)
    return int(found[0]["time_since_delivered"]) if found else 0
