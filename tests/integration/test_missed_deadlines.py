"""Requests that miss their deadlines on a real stack: each cause on purpose, as `carpool top` shows it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool import Client
from carpool.errors import DeadlineExceededError
from carpool.figures import figures, take_sample
from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.store.directory import Directory
from support.command import carpool
from support.stack import Stack, frozen
from support.waiting import wait_until

SINGLE: Final = "Single"  # executes one request at a time; some wait at a gate
SLEEPER: Final = "Sleeper"  # sleeps for as long as the body says
EXPIRATION_MS: Final = 1000
SLEEP_S: Final = 1.5  # longer than the expiration


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that has learned l(1) of both models."""
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Single", "timed.py:Sleeper")
        for model, body in ((SINGLE, 0), (SINGLE, 0), (SINGLE, 0), (SLEEPER, SLEEP_S), (SLEEPER, SLEEP_S)):
            assert stack.result(model, stack.send(model, body=json.dumps(body)))["status"] == "OK"
        yield stack


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that lets the model continue. It exists after the test."""
    gate = tmp_path / "gate"
    yield gate
    gate.touch()


def send_to_gate(stack: Stack, gate: Path, **fields: int) -> str:
    return stack.send(SINGLE, body=json.dumps({"gate": str(gate)}), **fields)


def expect_expired(stack: Stack, model: str, entry_id: str) -> None:
    assert stack.result(model, entry_id)["status"] == "DEADLINE_EXCEEDED"


def missed(stack: Stack, model: str) -> dict[str, int]:
    """The number of missed deadlines by cause, in the data of `carpool top`."""
    directory = Directory(Link(stack.url, name="test"), "carpool")
    sample = take_sample(directory, model)[model]
    directory.close()
    return {cause: number.total for cause, number in figures(model, None, sample).missed.items()}


def expect_missed(stack: Stack, model: str, before: dict[str, int], **causes: int) -> None:
    """Wait until exactly these causes were added. Reports are published about once a second."""
    expected = {cause: before.get(cause, 0) + causes.get(cause, 0) for cause in {*before, *causes}}
    stack.wait_until_idle(model)
    wait_until(
        lambda: sum(missed(stack, model).values()) >= sum(expected.values()),
        description=f"{causes} are reported; {missed(stack, model)}",
    )
    assert missed(stack, model) == expected


def passed_ms(stack: Stack, entry_id: str) -> int:
    """How long ago a request arrived, by Redis's clock."""
    seconds, microseconds = stack.redis.time()
    return int(seconds * 1000 + microseconds // 1000 - int(entry_id.partition("-")[0]))


def test_refused_early(stack: Stack) -> None:
    """Given the policy deferred, and l(1) above the expiration: one is tried, the next one refused."""
    stack.configure(SLEEPER, policy="deferred")
    before = missed(stack, SLEEPER)
    for _ in range(2):
        expect_expired(stack, SLEEPER, stack.send(SLEEPER, body=f"{SLEEP_S}", expiration=EXPIRATION_MS))
        stack.wait_until_idle(SLEEPER)
    expect_missed(stack, SLEEPER, before, computed_long=1, early=1)
    page = carpool(stack.url, "top", "--once", "--model", SLEEPER, check=True).stdout
    assert re.search(r"^  missed deadlines +1 computed long.* 1 early", page, re.MULTILINE), page


def test_expired_while_waiting(stack: Stack, gate: Path) -> None:
    """Given a process that has a batch and another one ahead, and a request behind these."""
    before = missed(stack, SINGLE)
    others = [send_to_gate(stack, gate) for _ in range(2)]
    wait_until(lambda: stack.redis.xlen(Keys(SINGLE).batches) == 2, description="both are in flight")
    expect_expired(stack, SINGLE, stack.send(SINGLE, body="0", expiration=300))
    gate.touch()
    assert [stack.result(SINGLE, other)["status"] for other in others] == ["OK", "OK"]
    expect_missed(stack, SINGLE, before, waiting=1)


def test_dispatched_late(stack: Stack, gate: Path) -> None:
    """Given a request that is dispatched ahead, to a process that is busy until after its deadline."""
    before = missed(stack, SINGLE)
    other = send_to_gate(stack, gate)
    wait_until(lambda: stack.redis.xlen(Keys(SINGLE).batches) == 1, description="it is in flight")
    late = stack.send(SINGLE, body="0", expiration=EXPIRATION_MS)
    wait_until(lambda: stack.redis.xlen(Keys(SINGLE).batches) == 2, description="one is dispatched ahead")
    expect_expired(stack, SINGLE, late)
    gate.touch()
    assert stack.result(SINGLE, other)["status"] == "OK"
    expect_missed(stack, SINGLE, before, dispatched_late=1)


def test_computed_long(stack: Stack, gate: Path) -> None:
    """Given an idle process, and a request that it executes for twice the time that there was."""
    before = missed(stack, SINGLE)
    long = send_to_gate(stack, gate, expiration=EXPIRATION_MS)
    expect_expired(stack, SINGLE, long)
    assert missed(stack, SINGLE) == before, "its cause is not known before its batch settles"
    wait_until(lambda: passed_ms(stack, long) > 2 * EXPIRATION_MS, description="that time has passed")
    gate.touch()
    expect_missed(stack, SINGLE, before, computed_long=1)


def test_delivered_late(stack: Stack) -> None:
    """Given a worker that is paused until after the deadline."""
    before = missed(stack, SINGLE)
    worker = stack.served_by(SINGLE)
    worker.freeze()
    try:
        expect_expired(stack, SINGLE, stack.send(SINGLE, body="0", expiration=EXPIRATION_MS))
    finally:
        worker.thaw()
    expect_missed(stack, SINGLE, before, delivered_late=1)


def test_client_counts_what_no_service_sees(stack: Stack, tmp_path: Path) -> None:
    """Given a paused batcher, which expires nothing: expect a timeout of the client, and a late result.

    The batcher finds out later that this result was late.
    """
    for timeout_s in (1, 5, 25):
        before, gate = missed(stack, SINGLE), tmp_path / f"gate-{timeout_s}"
        try:
            is_in_time = times_out_while_no_batcher_runs(stack, timeout_s, gate)
        finally:
            gate.touch()
        if is_in_time:
            expect_missed(stack, SINGLE, before, computed_long=1)
            return
        wait_until(lambda: missed(stack, SINGLE) != before, description="it is reported")  # noqa: B023
    pytest.fail("this process was held up for longer than each timeout")


def times_out_while_no_batcher_runs(stack: Stack, timeout_s: int, gate: Path) -> bool:
    """Whether the batcher was paused before this timeout had passed. If so, the client has counted it, and
    the result, which came twice as late."""
    batcher = stack.active_batcher(SINGLE)
    with Client(stack.url) as client:
        client.infer(SINGLE, 0)
        late = client.submit(SINGLE, {"gate": str(gate)}, timeout=timeout_s)
        wait_until(lambda: stack.redis.xlen(Keys(SINGLE).batches) == 1, description="it is dispatched")
        ((batch_id, _),) = stack.redis.xrange(Keys(SINGLE).batches)
        with frozen(batcher):
            is_in_time = passed_ms(stack, batch_id.decode()) < 900 * timeout_s
            with pytest.raises(DeadlineExceededError) as raised:
                late.result()
            counted = client.timed_out, client.late_results
            wait_until(
                lambda: passed_ms(stack, batch_id.decode()) > 2000 * timeout_s,
                description="twice that time has passed",
            )
            gate.touch()
            if is_in_time:
                assert f"no result within {timeout_s} s" in str(raised.value)
                assert counted == (1, 0)
                wait_until(lambda: client.late_results, description="the result came late")
                assert (client.timed_out, client.late_results) == (1, 1)
    stack.wait_until_idle(SINGLE)
    return is_in_time
