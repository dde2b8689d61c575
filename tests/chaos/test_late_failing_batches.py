"""A batch on which the model raises after all of its requests expired: it is not executed in halves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import Stopwatch, ample_ms, wait_until

pytestmark = pytest.mark.chaos

SIZE: Final = 8


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    with Stack(tmp_path / "stack") as stack:
        stack.batcher()
        yield stack


def expiration_ms_of(stack: Stack, model: str, home: Path) -> int:
    """After which time what is executed at once expires on this machine, while it is executed."""
    stopwatch, gate = Stopwatch(), home / "open"
    gate.touch()
    body = json.dumps({"calls": str(home / "measured"), "gate": str(gate)})
    assert stack.result(model, stack.send(model, body=body))["status"] == "INTERNAL"
    return ample_ms(stopwatch, 1000)


@pytest.mark.parametrize(("settings", "calls"), [({}, 1), ({"expiration_action": "delay"}, 2 * SIZE - 1)])
def test_failing_batch_is_halved_only_while_its_requests_are_awaited(
    stack: Stack, tmp_path: Path, settings: dict[str, str], calls: int
) -> None:
    """With `delay` they are awaited also after their deadlines."""
    model = stack.serve("faulty.py:Gated")
    if settings:
        stack.configure(model, **settings)
    called, gate = tmp_path / "calls", tmp_path / "gate"
    body = json.dumps({"calls": str(called), "gate": str(gate)})
    expiration_ms = expiration_ms_of(stack, model, tmp_path)

    def execute(attempt: int) -> list[str]:
        """The names of requests that are executed; none if they expired before."""
        names = [f"r{attempt}.{number}" for number in range(SIZE)]
        stack.send_packed(
            model, [{"correlation_id": name, "body": body} for name in names], expiration=expiration_ms
        )
        first = Keys(model).result(names[0])
        wait_until(
            lambda: called.exists() or stack.redis.exists(first), description="the batch is executed, or late"
        )
        return names if called.exists() else []

    names = next(filter(None, map(execute, count())))
    began_s, _ = stack.redis.time()
    wait_until(
        lambda: stack.redis.time()[0] > began_s + expiration_ms / 1000 + 1,
        description="their deadlines passed",
    )
    gate.touch()
    statuses = {stack.result(model, name)["status"] for name in names}
    assert statuses == {"INTERNAL" if settings else "DEADLINE_EXCEEDED"}
    wait_until(lambda: stack.redis.xlen(Keys(model).batches) == 0, description="the batch is settled")
    assert len(called.read_text().split()) == calls
