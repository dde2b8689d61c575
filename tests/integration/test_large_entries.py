"""Entries of any size: a batcher's memory stays bounded, and each is answered."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

from carpool.errors import INVALID_ARGUMENT
from carpool.keys import Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import Entry, Run
from carpool.store import batcher as batcher_module
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Argument, Link
from support.stack import Service, Stack

MODEL: Final = "Counting"
KEYS: Final = Keys(MODEL)
MIB: Final = 1024 * 1024
ADDED_MIB_MAX: Final = 230  # of a batcher that has served small requests


def peak_mib(service: Service) -> float:
    """The most memory that a process has had."""
    status = Path(f"/proc/{service.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found is not None, status
    return int(found[1]) / 1024


@pytest.mark.parametrize("sizes", [(50 * MIB,) * 6, (300 * MIB,)], ids=["several", "one"])
def test_large_entries_take_bounded_memory(sizes: tuple[int, ...], tmp_path: Path) -> None:
    with Stack(tmp_path, append_only=False) as stack:
        batcher = stack.batcher()
        stack.worker("counting.py:Counting")
        stack.wait_for_model(MODEL)
        stack.result(MODEL, stack.send(MODEL, body='"x"'))
        before_mib = peak_mib(batcher)
        pipeline = stack.redis.pipeline(transaction=True)
        for number, size in enumerate(sizes):
            pipeline.xadd(KEYS.requests, {"correlation_id": f"r{number}", "body": bytes(size)})
        pipeline.execute()
        results = [stack.result(MODEL, f"r{number}") for number in range(len(sizes))]
        assert {result["status"] for result in results} == {INVALID_ARGUMENT}
        assert all(result["detail"].startswith("body: ") for result in results)
        assert peak_mib(batcher) - before_mib < ADDED_MIB_MAX
        assert stack.result(MODEL, stack.send(MODEL, body='"x"'))["status"] == "OK"
        failed = [event["reason"] for event in stack.events("batcher failed, starting over")]
        # On a busy machine Redis may take longer to read an entry than a batcher waits for it.
        assert all(reason.endswith("no answer in time") for reason in failed), failed


def test_oversized_entry_that_waits_is_refused_by_the_next_batcher(tmp_path: Path) -> None:
    """A stateful model's batcher looks at the last entry when it takes over."""
    with Stack(tmp_path, append_only=False) as stack:
        stack.worker("stateful.py:Folding")
        stack.redis.xadd(
            Keys("Folding").requests, {"correlation_id": "r", "sequence_id": "s", "body": bytes(200 * MIB)}
        )
        batcher = stack.batcher()
        assert stack.result("Folding", "r")["status"] == INVALID_ARGUMENT
        assert peak_mib(batcher) < 200


class ObservedLink(Link):
    """A connection that notes the XRANGEs."""

    def __init__(self, url: str) -> None:
        super().__init__(url, name="observed")
        self.counts: list[Argument] = []

    def call(self, *command: Argument) -> object:
        if command[0] == "XRANGE":
            self.counts.append(command[-1])
        return super().call(*command)


def test_batches_in_flight_are_read_a_few_at_a_time(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher_module, "IN_FLIGHT_BYTES", 4000)
    link = ObservedLink(stack.url)
    store = BatcherStore(link, KEYS)
    dispatched = []
    for number in range(7):
        run = Run(Entry(stack.send(MODEL, body="1"), 0), [f"r{number}"], [bytes(1000)])
        run.entry.runs.append(run)
        (batch,) = store.dispatch([Dispatch([run], "full", "")], 1000).batches
        assert batch is not None
        dispatched.append(batch.batch_id)
    assert [batch.id for batch in store.batches_in_flight()] == dispatched
    assert link.counts == [1, 3, 3, 3]
    link.close()
