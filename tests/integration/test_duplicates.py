"""A request that is sent again while it waits, or when it has its result, is executed once, and not lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "Echo"
KEYS: Final = Keys(MODEL)
BATCH: Final = 16


class Held:
    """A model whose process waits at a gate: what is sent waits in the batcher, until `open`."""

    def __init__(self, stack: Stack, gate: Path) -> None:
        self.stack = stack
        self.redis: Any = stack.redis
        self._gate = gate
        self._held = 0
        self._send_held([{"correlation_id": "held", "body": json.dumps({"gate": str(gate)})}])
        fillers = [{"correlation_id": f"filler-{at}", "body": b"0"} for at in range(BATCH)]
        while self.redis.xlen(KEYS.requests) == 0:  # until there is capacity for no more
            self._send_held(fillers)
        self.settled_before: str = self.redis.xinfo_stream(KEYS.settled)["last-generated-id"].decode()

    def _send_held(self, requests: list[dict[str, Any]]) -> None:
        before = self.redis.xlen(KEYS.batches)
        self.stack.send_packed(MODEL, requests, reply_to="nobody")
        self._held += len(requests)
        wait_until(
            lambda: self.redis.xlen(KEYS.batches) > before or before >= 2, description="they are in flight"
        )

    def open(self) -> int:
        """Let everything be executed. Returns how many requests were."""
        self._gate.touch()
        self.stack.wait_until_idle(MODEL)
        settled = self.redis.xrange(KEYS.settled, f"({self.settled_before}")
        return sum(int(fields[b"size"]) for _, fields in settled) - self._held


@pytest.fixture
def hold(tmp_path_factory: pytest.TempPathFactory, gate: Path) -> Iterator[Callable[..., Held]]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo")

        def held(**settings: str) -> Held:
            if settings:
                stack.configure(MODEL, **settings)
            return Held(stack, gate)

        yield held


def test_duplicates_that_wait_are_executed_once(hold: Callable[..., Held]) -> None:
    held = hold()
    for _ in range(3):
        held.stack.send(MODEL, correlation_id="twice", body="7")
    held.stack.send(MODEL, correlation_id="twice", body="8", reply_to="another")  # not the same request
    for _ in range(2):
        held.stack.send(MODEL, correlation_ids="a b c", rows=b"123", reply_to="columns")
    held.stack.send(MODEL, correlation_ids="b x", rows=b"24", reply_to="columns")
    assert held.open() == 6
    assert held.stack.result(MODEL, "twice")["body"] == 7
    assert not held.redis.exists(KEYS.result("twice"))
    assert [reply["body"] for reply in held.stack.replies(MODEL, "another")] == [b"8"]
    replies = held.stack.replies(MODEL, "columns")
    assert sorted(reply["correlation_id"] for reply in replies) == ["a", "b", "c", "x"]


def test_duplicates_do_not_meet_in_later_batches_either(hold: Callable[..., Held]) -> None:
    """More than a batch, sent twice: the second copies stand several batches behind the first."""
    held = hold()
    names = [f"n{at}" for at in range(5 * BATCH)]
    for _ in range(2):
        for name in names:
            held.stack.send(MODEL, correlation_id=name, body="1", reply_to="me")
    assert held.open() == len(names)
    assert sorted(reply["correlation_id"] for reply in held.stack.replies(MODEL, "me")) == sorted(names)


@pytest.mark.parametrize("withdrawn", ["first", "second"])
def test_duplicate_of_a_withdrawn_request_is_executed(hold: Callable[..., Held], withdrawn: str) -> None:
    held = hold()
    first = held.stack.send(MODEL, correlation_id="again", body="1")
    second = held.stack.send(MODEL, correlation_id="again", body="2")
    held.redis.xdel(KEYS.requests, first if withdrawn == "first" else second)
    assert held.open() == 1
    assert held.stack.result(MODEL, "again")["body"] == (2 if withdrawn == "first" else 1)


def test_duplicate_may_name_the_same_stored_body(hold: Callable[..., Held]) -> None:
    held = hold()
    held.redis.set(KEYS.body("large"), b"17")
    for _ in range(2):
        held.stack.send(MODEL, correlation_id="large", body_key="large", body_bytes=2)
    assert held.open() == 1
    assert held.stack.result(MODEL, "large")["body"] == 17


def test_request_sent_again_to_a_full_queue_keeps_its_place_and_its_body(hold: Callable[..., Held]) -> None:
    """Given a limit that was lowered besides, which the body exceeds now, and which would delete it."""
    held = hold()
    stack, body = held.stack, b"17000"
    held.redis.set(KEYS.body("large"), body)
    large: dict[str, Any] = {"correlation_id": "large", "body_key": "large", "body_bytes": len(body)}
    stack.send(MODEL, **large)
    stack.send(MODEL, correlation_id="other", body="1")
    stack.configure(MODEL, max_queue_size="2")
    stack.send(MODEL, **large)
    stack.send(MODEL, correlation_id="refused", body_key="large", body_bytes=len(body))
    assert stack.result(MODEL, "refused")["status"] == "RESOURCE_EXHAUSTED"  # so the queue is full
    stack.configure(MODEL, max_body_bytes="4")
    stack.send(MODEL, **large)
    stack.send(MODEL, correlation_id="malformed", body_key="large", body_bytes=len(body))
    assert stack.result(MODEL, "malformed")["status"] == "INVALID_ARGUMENT"
    assert held.redis.get(KEYS.body("large")) == body
    assert held.open() == 2
    assert stack.result(MODEL, "large")["body"] == 17000
    assert not held.redis.exists(KEYS.result("large"))
    assert not held.redis.exists(KEYS.body("large"))


def test_body_in_flight_is_not_deleted_by_requests_that_are_refused(tmp_path: Path, gate: Path) -> None:
    """Also not by the next batcher, which learns from Redis what is in flight."""
    with Stack(tmp_path / "stack") as stack:
        stack.serve("plain.py:Echo")
        redis: Any = stack.redis
        large: dict[str, Any] = {"body_key": "large", "body_bytes": 5}
        redis.set(KEYS.body("large"), b"17000")
        stack.send(MODEL, correlation_id="held", body=json.dumps({"gate": str(gate)}))
        wait_until(lambda: redis.xlen(KEYS.batches) == 1, description="it is executed")
        others = [{"correlation_id": f"filler-{at}", "body": b"2"} for at in range(1, BATCH)]
        stack.send_packed(MODEL, [{"correlation_id": "large", **large}, *others])  # full: it does not wait
        wait_until(lambda: redis.xlen(KEYS.batches) == 2, description="it is in flight")
        stack.configure(MODEL, max_queue_size="1")
        stack.send(MODEL, correlation_id="waiting", body="1")
        for refused in ("by the first", "by the second"):
            name = refused.replace(" ", "-")
            stack.send(MODEL, correlation_id="large", **large)  # removed
            stack.send(MODEL, correlation_id=name, **large)
            assert stack.result(MODEL, name)["status"] == "RESOURCE_EXHAUSTED"
            assert redis.get(KEYS.body("large")) == b"17000"
            assert not redis.exists(KEYS.result("large"))
            if refused == "by the first":
                stack.active_batcher(MODEL).kill()
                stack.batcher()
        gate.touch()
        stack.wait_until_idle(MODEL)
        assert stack.result(MODEL, "large")["body"] == 17000
        assert not redis.exists(KEYS.result("large"), KEYS.body("large"))


def test_duplicates_keep_the_order_of_results(hold: Callable[..., Held]) -> None:
    held = hold(preserve_ordering="true")
    for name in ("a", "a", "b", "a", "c"):
        held.stack.send(MODEL, correlation_id=name, body="1", reply_to="ordered")
    assert held.open() == 3
    wait_until(lambda: len(held.stack.replies(MODEL, "ordered")) == 3, description="no result is withheld")
    assert [reply["correlation_id"] for reply in held.stack.replies(MODEL, "ordered")] == ["a", "b", "c"]


def test_request_whose_first_copy_is_in_flight_is_executed_again(tmp_path: Path, gate: Path) -> None:
    def is_in_flight(batches: int) -> None:
        wait_until(lambda: stack.redis.xlen(KEYS.batches) == batches, description="it is in flight")

    with Stack(tmp_path / "stack") as stack:
        stack.serve("plain.py:Echo")
        stack.send(MODEL, correlation_id="again", body=json.dumps({"gate": str(gate)}))
        is_in_flight(1)
        names = ["again", *(f"filler-{at}" for at in range(1, BATCH))]  # a full batch does not wait
        stack.send_packed(MODEL, [{"correlation_id": name, "body": b"2"} for name in names])
        is_in_flight(2)
        gate.touch()
        assert stack.result(MODEL, "again")["body"] == {"gate": str(gate)}
        assert stack.result(MODEL, "again")["body"] == 2


# --- after the first copy has its result -------------------------------------------------------------------


@pytest.fixture
def numbering(tmp_path: Path) -> Iterator[Stack]:
    """A model that says how many requests it has executed."""
    with Stack(tmp_path / "stack") as stack:
        stack.serve("numbering.py:Numbering")
        yield stack


def test_request_that_has_its_result_is_not_executed_again(numbering: Stack) -> None:
    keys = Keys("Numbering")
    numbering.send("Numbering", correlation_id="first", body="1")
    numbering.wait_until_idle("Numbering")
    numbering.send_packed(
        "Numbering",
        [{"correlation_id": name, "body": b"1"} for name in ("first", "second")],
    )
    numbering.send("Numbering", correlation_ids="first third", rows=b"12")
    assert numbering.result("Numbering", "third")["body"] == 3
    numbering.wait_until_idle("Numbering")
    assert [numbering.redis.llen(keys.result(name)) for name in ("first", "second")] == [1, 1]
    assert numbering.result("Numbering", "first")["body"] == 1
    numbering.send("Numbering", correlation_id="first", body="1")  # its result was read: a new request
    assert numbering.result("Numbering", "first")["body"] == 4
    assert numbering.pending("Numbering") == 0


@pytest.mark.parametrize("kind", ["error", "string", "garbage"])
def test_what_is_no_good_result_is_no_reason(numbering: Stack, kind: str) -> None:
    key = Keys("Numbering").result("again")
    if kind == "error":
        numbering.send("Numbering", correlation_id="again", body='"raise"')
        numbering.wait_until_idle("Numbering")
        assert numbering.redis.llen(key) == 1
    elif kind == "string":
        numbering.redis.set(key, "no list")
    else:
        numbering.redis.rpush(key, b"\xc1")
    numbering.send("Numbering", correlation_id="again", body="1")
    numbering.send("Numbering", correlation_id="last", body="1")
    numbering.wait_until_idle("Numbering")
    assert numbering.result("Numbering", "last")["body"] == (3 if kind == "error" else 2)
    assert kind == "string" or numbering.redis.llen(key) == 2


def test_large_results_are_not_all_read(numbering: Stack) -> None:
    """Redis copies what it reads: from 16 MiB on, what was sent again is executed again."""
    keys = Keys("Numbering")
    envelope = b'{"correlation_id":"x","status":"OK","body":"%s"}' % (b"x" * (9 << 20))
    for name in "abc":
        numbering.redis.rpush(keys.result(name), envelope)
    numbering.send_packed("Numbering", [{"correlation_id": name, "body": b"1"} for name in "abc"])
    numbering.wait_until_idle("Numbering")
    assert [numbering.redis.llen(keys.result(name)) for name in "abc"] == [1, 1, 2]


@pytest.mark.parametrize("content_type", ["application/json", "application/msgpack", "image/png"])
def test_results_of_any_content_type_are_known(numbering: Stack, content_type: str) -> None:
    keys, body = Keys("Numbering"), b"\x01" if content_type.endswith("msgpack") else b"1"
    for _ in range(2):
        numbering.send("Numbering", correlation_id="again", content_type=content_type, body=body)
        numbering.wait_until_idle("Numbering")
    assert numbering.redis.llen(keys.result("again")) == 1
