"""Two workers of one model: which of them takes a batch."""

from __future__ import annotations

import json
from pathlib import Path

from support.stack import Stack
from support.waiting import wait_until


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
