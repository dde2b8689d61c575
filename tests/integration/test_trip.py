"""Requests from end to end, sent by a producer that uses only Redis commands and PROTOCOL.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from carpool.keys import Keys
from conftest import SERVERS
from support.stack import Stack, fixed_keys
from support.waiting import growing_s, wait_until
from support.wire import count_requests, envelopes

STEP_MS: Final = 140
EXPIRATIONS_MS: Final = range(300, 2400, STEP_MS)  # as many as a batch has, less one
WAKE_UP_MS: Final = 250  # a batcher does so in any case
ATTEMPTS: Final = 20


ON_EVERY_SERVER: Final = ("square", "plain.py:Echo", "plain.py:Single", "plain.py:Few", "plain.py:Noop")
ON_PREFERRED_SERVER: Final = (*ON_EVERY_SERVER, "plain.py:Priced", "plain.py:Ragged", "faulty.py:Faulty")


@pytest.fixture
def shared(stacks: Callable[[Path], Stack]) -> Stack:
    """The stack shared by this module, on the preferred server."""
    stack = stacks(SERVERS[0])
    stack.serve(*ON_PREFERRED_SERVER)
    return stack


@pytest.fixture
def shared_on(server: Path, stacks: Callable[[Path], Stack]) -> Stack:
    """The stack shared by this module, on each server in turn."""
    stack = stacks(server)
    stack.serve(*(ON_PREFERRED_SERVER if server == SERVERS[0] else ON_EVERY_SERVER))
    return stack


@pytest.fixture
def prefix(request: pytest.FixtureRequest) -> str:
    """The prefix of this test's correlation IDs."""
    return f"t{abs(hash(request.node.nodeid)):x}"


@contextmanager
def busy_worker(stack: Stack, spec: str, gate: Path) -> Iterator[str]:
    """Inside the block the model's only worker is busy, so that requests wait. After it, they are dispatched
    when the batcher has read all of them."""
    model = stack.serve(spec)
    stack.wait_until_idle(model)
    batches = Keys(model).batches
    stack.send(model, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.redis.xlen(batches) == 1, description=f"the worker of {model} waits at the gate")
    # A busy worker may get a second batch. It is full, so that nothing else is dispatched.
    size, cost = stack.redis.hmget(Keys(model).registration, "max_batch_size", "max_batch_cost")
    if cost != b"none":
        stack.send(model, body="0", cost=int(cost))
    else:
        stack.send_packed(
            model, [{"correlation_id": f"blocking{number}", "body": b"0"} for number in range(int(size))]
        )
    wait_until(lambda: stack.redis.xlen(batches) == 2, description="a second batch is in flight")
    try:
        yield model
        wait_until_read(stack, model)
    finally:
        gate.touch()


def wait_until_read(stack: Stack, model: str) -> None:
    """Wait until the batcher has read all requests so far, while the model's worker is busy."""
    stack.result(model, stack.send(model, body="0", expiration=1))  # it is read after them


@contextmanager
def no_worker(stack: Stack, spec: str) -> Iterator[str]:
    """Inside the block the model is registered and has a batcher, but no worker."""
    model = stack.serve(spec)
    assert stack.served_by(model).terminate() == 0
    wait_until(lambda: not stack.live_workers(model), description=f"{model} has no worker")
    yield model
    stack.serve(spec)


# --- bodies and results


def test_xadd_and_blpop_are_enough(shared_on: Stack) -> None:
    model = "square"

    entry_id = shared_on.redis.execute_command("XADD", "carpool:{square}:requests", "*", "body", "7").decode()
    key, data = shared_on.redis.execute_command("BLPOP", f"carpool:{{square}}:result:{entry_id}", "5")

    assert key.decode() == f"carpool:{{square}}:result:{entry_id}"
    result = json.loads(data)
    assert result["queue_us"] >= 0
    assert result["compute_us"] > 0
    del result["queue_us"], result["compute_us"]
    assert result == {
        "correlation_id": entry_id,
        "status": "OK",
        "content_type": "application/json",
        "body": 49,
        "final": True,
        "batch_size": 1,
    }
    shared_on.wait_until_idle(model)


def test_msgpack_body_gets_msgpack_envelope(shared_on: Stack, prefix: str) -> None:
    model = "Echo"
    value = {"numbers": [1, 2.5, None], "text": "zwölf", "bytes": b"\x00\xff"}

    shared_on.send(
        model, correlation_id=prefix, content_type="application/msgpack", body=msgpack.packb(value)
    )
    result = shared_on.result(model, prefix)

    assert (result["status"], result["content_type"]) == ("OK", "application/msgpack")
    assert isinstance(result["body"], bytes)
    assert msgpack.unpackb(result["body"]) == value


def test_raw_body_gets_raw_result(shared_on: Stack, prefix: str) -> None:
    model = "Echo"
    body = bytes(range(256))

    shared_on.send(model, correlation_id=prefix, content_type="application/octet-stream", body=body)
    result = shared_on.result(model, prefix)

    assert (result["content_type"], result["body"]) == ("application/octet-stream", body)


def test_result_can_be_read_repeatedly_and_expires(shared: Stack, prefix: str) -> None:
    model = "Echo"
    key = Keys(model).result(prefix)

    shared.send(model, correlation_id=prefix, body='"again"')
    first = shared.redis.execute_command("BLMOVE", key, key, "LEFT", "LEFT", "5")

    assert shared.redis.lrange(key, 0, -1) == [first]
    assert 0 < shared.redis.pttl(key) <= 60_000


def test_results_in_one_reply_stream_share_entries(shared_on: Stack, prefix: str) -> None:
    model = "Echo"
    requests = [{"correlation_id": f"{prefix}-{number}", "body": b"%d" % number} for number in range(12)]

    shared_on.send_packed(model, requests, reply_to=prefix)
    wait_until(
        lambda: len(shared_on.replies(model, prefix)) == 12, description="12 results are on the stream"
    )

    results = shared_on.replies(model, prefix)
    assert {result["correlation_id"]: result["body"] for result in results} == {
        request["correlation_id"]: request["body"] for request in requests
    }
    stream = Keys(model).replies(prefix)
    assert shared_on.redis.xlen(stream) == 1
    assert 0 < shared_on.redis.pttl(stream) <= 60_000


def test_unknown_fields_and_correlation_id_reach_the_model(shared: Stack, prefix: str) -> None:
    name = f"{prefix}:A.b_c-9"
    shared.send("Echo", correlation_id=name, body='"about"', lane="fr", tenant="acme", traceparent="00-4b")
    assert shared.result("Echo", name)["body"] == [name, "fr", {"tenant": "acme", "traceparent": "00-4b"}]


# --- batches


def test_packed_entry_larger_than_a_batch_is_split_and_keeps_its_arrival(
    shared_on: Stack, gate: Path, prefix: str
) -> None:
    """Given capacity for two batches of 16, 8 of the 40 requests in one entry are put back."""
    model, stream = "Echo", Keys("Echo").requests
    bodies = [json.dumps({"gate": str(gate)}), *map(str, range(1, 40))]
    names = [f"{prefix}-{number}" for number in range(40)]

    entry_id = shared_on.send_packed(
        model, [{"correlation_id": name, "body": body} for name, body in zip(names, bodies, strict=True)]
    )
    wait_until(
        lambda: shared_on.redis.xlen(Keys(model).batches) == 2, description="two batches are dispatched"
    )

    ((new_id, fields),) = shared_on.redis.xrange(stream)
    assert new_id.decode() != entry_id
    assert fields[b"arrival"].decode() == entry_id.partition("-")[0]
    assert count_requests(fields) == 8
    gate.touch()
    results = [shared_on.result(model, name) for name in names]
    assert [result["body"] for result in results[1:]] == list(range(1, 40))
    assert [result["batch_size"] for result in results] == [16] * 32 + [8] * 8
    shared_on.wait_until_idle(model)


def test_lanes_never_share_a_batch(shared: Stack, gate: Path, prefix: str) -> None:
    with busy_worker(shared, "plain.py:Echo", gate) as model:
        lanes = ["a", "b", "a", "", "b", "a", "a", "", "b", "b", "b"]
        for number, lane in enumerate(lanes):
            fields = {"lane": lane} if lane else {}
            shared.send(model, correlation_id=f"{prefix}-{number}", body="0", **fields)
    sizes = [shared.result(model, f"{prefix}-{number}")["batch_size"] for number in range(len(lanes))]
    assert dict(zip(lanes, sizes, strict=True)) == {"a": 4, "b": 5, "": 2}
    assert sizes == [lanes.count(lane) for lane in lanes]


def test_dispatch_is_in_order_of_priority_and_arrival(shared: Stack, gate: Path, prefix: str) -> None:
    with busy_worker(shared, "plain.py:Single", gate) as model:
        for number, priority in enumerate((0, 4, None, 9, 0, 9)):
            fields = {} if priority is None else {"priority": priority}
            shared.send(model, correlation_id=f"{prefix}-{number}", body="0", reply_to=prefix, **fields)
    wait_until(lambda: len(shared.replies(model, prefix)) == 6, description="6 results are on the stream")
    order = [reply["correlation_id"].removeprefix(f"{prefix}-") for reply in shared.replies(model, prefix)]
    assert order == ["3", "5", "1", "2", "0", "4"]


def test_batch_does_not_exceed_its_cost_limit(shared: Stack, gate: Path, prefix: str) -> None:
    with busy_worker(shared, "plain.py:Priced", gate) as model:
        for number, cost in enumerate((6, 6, 4, 10, 11)):
            shared.send(model, correlation_id=f"{prefix}-{number}", body="0", cost=cost)
    results = [shared.result(model, f"{prefix}-{number}") for number in range(5)]
    assert [result["batch_size"] for result in results] == [1, 2, 2, 1, 0]
    assert results[4]["status"] == "INVALID_ARGUMENT"
    assert "max_batch_cost 10" in results[4]["detail"]


def test_changed_registration_takes_effect_while_running(shared: Stack, gate: Path, prefix: str) -> None:
    """Given a served model, when its registration gets a default expiration, it applies to later requests."""
    key = Keys("Single").registration

    def is_changed_to(value: str) -> bool:
        changes = [event for event in shared.events("settings changed") if event["model"] == "Single"]
        return bool(changes) and changes[-1].get("default_expiration_ms") == value

    try:
        with busy_worker(shared, "plain.py:Single", gate) as model:
            shared.send(model, correlation_id=f"{prefix}-before", body="0")
            wait_until_read(shared, model)
            shared.redis.hset(key, "default_expiration_ms", 100)
            wait_until(lambda: is_changed_to("100"), description="the batcher has read the change")
            shared.send(model, correlation_id=f"{prefix}-after", body="0")
            assert shared.result(model, f"{prefix}-after")["status"] == "DEADLINE_EXCEEDED"
        assert shared.result(model, f"{prefix}-before")["status"] == "OK"
    finally:
        shared.redis.hdel(key, "default_expiration_ms")
    wait_until(lambda: is_changed_to("none"), description="the batcher has read that the change was undone")


# --- withdrawal


def test_entry_deleted_while_it_waits_is_never_executed(shared_on: Stack, gate: Path, prefix: str) -> None:
    with busy_worker(shared_on, "plain.py:Echo", gate) as model:
        entry_id = shared_on.send(model, correlation_id=f"{prefix}-deleted", body='"deleted"')
        shared_on.send(model, correlation_id=f"{prefix}-kept", body='"kept"')
        assert shared_on.redis.xdel(Keys(model).requests, entry_id) == 1
    assert shared_on.result(model, f"{prefix}-kept")["batch_size"] == 1
    shared_on.wait_until_idle(model)
    assert not shared_on.redis.exists(Keys(model).result(f"{prefix}-deleted"))


def test_requests_are_withdrawn_by_correlation_id_also_from_a_packed_entry(
    shared_on: Stack, gate: Path, prefix: str
) -> None:
    with busy_worker(shared_on, "plain.py:Echo", gate) as model:
        names = [f"{prefix}-{number}" for number in range(3)]
        shared_on.send_packed(model, [{"correlation_id": name, "body": b"0"} for name in names])
        shared_on.send(model, correlation_id=f"{prefix}-alone", body="0")
        shared_on.send(model, withdraw=f"{names[1]} {prefix}-alone no-such-request")
        for name in (names[1], f"{prefix}-alone"):
            result = shared_on.result(model, name)
            assert (result["status"], result["final"], "body" in result) == ("CANCELLED", True, False)
        assert (
            shared_on.redis.xlen(Keys(model).requests) == 1
        )  # the other two requests; the entry with `withdraw` is deleted
    assert [shared_on.result(model, name)["status"] for name in (names[0], names[2])] == ["OK", "OK"]
    shared_on.wait_until_idle(model)


# --- deadlines


def test_waiting_requests_expire_each_at_its_deadline(shared_on: Stack, prefix: str) -> None:
    with no_worker(shared_on, "plain.py:Echo") as model:

        def is_in_time(reply_to: str) -> bool:
            sent = [
                (shared_on.send(model, body="0", reply_to=reply_to, expiration=expiration_ms), expiration_ms)
                for expiration_ms in EXPIRATIONS_MS
            ]
            wait_until(
                lambda: len(shared_on.replies(model, reply_to)) == len(sent), description="all are answered"
            )
            for reply in shared_on.replies(model, reply_to):
                assert (reply["status"], "waiting" in reply["detail"]) == ("DEADLINE_EXCEEDED", True)
            shared_on.wait_until_idle(model)
            return shows_a_timer(shared_on, model, reply_to, sent)

        assert any(is_in_time(f"{prefix}-{attempt}") for attempt in range(ATTEMPTS))


def test_requests_expire_in_flight_and_get_no_second_result(
    shared_on: Stack, tmp_path: Path, prefix: str
) -> None:
    model = "Echo"
    shared_on.wait_until_idle(model)

    def is_in_time(reply_to: str) -> bool:
        gate = tmp_path / reply_to
        packed = [
            {"correlation_id": f"{reply_to}-{expiration_ms}", "body": b"0", "expiration": expiration_ms}
            for expiration_ms in EXPIRATIONS_MS
        ]
        packed.append({"correlation_id": f"{reply_to}-gate", "body": json.dumps({"gate": str(gate)})})
        entry_id = shared_on.send_packed(model, packed, reply_to=reply_to)
        try:
            wait_until(
                lambda: len(shared_on.replies(model, reply_to)) == len(EXPIRATIONS_MS),
                description="all are answered",
            )
            assert {reply["status"] for reply in shared_on.replies(model, reply_to)} == {"DEADLINE_EXCEEDED"}
            assert shared_on.redis.xlen(Keys(model).batches) == 1, "the batch must still be in flight"
        finally:
            gate.touch()
        shared_on.wait_until_idle(model)
        *in_flight, last = shared_on.replies(model, reply_to)
        assert (len(in_flight), last["correlation_id"]) == (len(EXPIRATIONS_MS), f"{reply_to}-gate"), (
            "a second result was written"
        )
        sent = [(entry_id, expiration_ms) for expiration_ms in EXPIRATIONS_MS]
        return shows_a_timer(shared_on, model, reply_to, sent)

    assert any(is_in_time(f"{prefix}-{attempt}") for attempt in range(ATTEMPTS))
    assert shared_on.keys_without_ttl() <= set().union(*map(fixed_keys, shared_on.models()))


def shows_a_timer(stack: Stack, model: str, reply_to: str, sent: list[tuple[str, int]]) -> bool:
    """Whether requests were answered not only at regular wake-ups. By Redis's clock, none was before its
    deadline.

    How soon after it depends on how busy this machine is. That there is a timer shows in at how many times
    the batcher answered. One that is held up for a second answers what was due meanwhile together, so there
    are several attempts; without a timer each of them fails.
    """
    deadlines_ms = sorted(int(entry_id.partition("-")[0]) + expiration_ms for entry_id, expiration_ms in sent)
    answered_ms: list[int] = []
    for entry_id, fields in stack.redis.xrange(Keys(model).replies(reply_to)):
        expired = [reply for reply in envelopes(fields) if reply["status"] == "DEADLINE_EXCEEDED"]
        answered_ms += [int(entry_id.partition(b"-")[0])] * len(expired)
    late_ms = [at - deadline for at, deadline in zip(answered_ms, deadlines_ms, strict=True)]
    assert min(late_ms) >= 0
    times = 1 + sum(later - earlier > STEP_MS / 2 for earlier, later in pairwise(answered_ms))
    wake_ups = (answered_ms[-1] - answered_ms[0]) // WAKE_UP_MS + 2
    return times > wake_ups


def test_requests_behind_a_long_batch_expire_at_their_deadline(
    shared: Stack, gate: Path, prefix: str
) -> None:
    """Given one request executing, one dispatched ahead and one waiting, the last two expire at once."""
    model = "Single"
    shared.wait_until_idle(model)
    keys = Keys(model)
    shared.send(model, correlation_id=f"{prefix}-long", body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: shared.redis.xlen(keys.batches) == 1, description="the long batch is in flight")
    for expiration_s in growing_s(0.3):
        for number in range(2):
            name = f"{prefix}-{number}"
            shared.send(model, correlation_id=name, body="0", expiration=int(1000 * expiration_s))
        assert [shared.result(model, f"{prefix}-{number}")["status"] for number in range(2)] == [
            "DEADLINE_EXCEEDED"
        ] * 2
        assert shared.redis.xlen(keys.requests) == 0
        if shared.redis.xlen(keys.batches) == 2:  # else both expired before one was dispatched ahead
            break
    gate.touch()
    assert shared.result(model, f"{prefix}-long")["status"] == "OK"
    shared.wait_until_idle(model)
    assert not shared.redis.exists(keys.result(f"{prefix}-0")), "a second result was written by the commit"


# --- refusals


def test_full_queue_refuses_the_newest_requests(shared_on: Stack, gate: Path, prefix: str) -> None:
    with busy_worker(shared_on, "plain.py:Few", gate) as model:
        for number in range(5):
            shared_on.send(model, correlation_id=f"{prefix}-{number}", body=str(number))
        refused = [shared_on.result(model, f"{prefix}-{number}") for number in (2, 3, 4)]
        assert {result["status"] for result in refused} == {"RESOURCE_EXHAUSTED"}
        assert "max_queue_size" in refused[0]["detail"]
        assert shared_on.redis.xlen(Keys(model).requests) == 2
    assert [shared_on.result(model, f"{prefix}-{number}")["body"] for number in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "status", "field"),
    [
        ({"body": "1", "content_type": "plain"}, "INVALID_ARGUMENT", "content_type"),
        ({"content_type": "application/json"}, "INVALID_ARGUMENT", "body"),
        ({"body": "{"}, "INVALID_ARGUMENT", "body"),
        ({"body": "1", "priority": "10"}, "INVALID_ARGUMENT", "priority"),
        ({"body": "1", "expiration": "soon"}, "INVALID_ARGUMENT", "expiration"),
        ({"body": "1", "cost": "-1"}, "INVALID_ARGUMENT", "cost"),
        ({"body": "1", "reply_to": "no spaces"}, "INVALID_ARGUMENT", "reply_to"),
        ({"body": "1", "sequence_id": "s"}, "UNIMPLEMENTED", "sequence_id"),
        ({"requests": "not msgpack"}, "INVALID_ARGUMENT", "requests"),
    ],
)
def test_invalid_request_is_answered_with_the_name_of_the_field(
    shared: Stack, prefix: str, fields: dict[str, Any], status: str, field: str
) -> None:
    model = "Echo"
    shared.send(model, correlation_id=prefix, **fields)
    result = shared.result(model, prefix)
    assert (result["correlation_id"], result["status"], result["final"]) == (prefix, status, True)
    assert result["detail"].startswith(field)


def test_request_with_invalid_correlation_id_is_answered_at_its_entry_id(shared: Stack) -> None:
    model = "Echo"
    entry_id = shared.send(model, correlation_id="no spaces", body="1")
    result = shared.result(model, entry_id)
    assert (result["correlation_id"], result["status"]) == (entry_id, "INVALID_ARGUMENT")
    assert result["detail"].startswith("correlation_id")


# --- models that fail


@pytest.mark.parametrize(
    ("poison", "status", "detail"),
    [
        ("raise", "INTERNAL", "this one is spoilt"),
        ("refuse", "INVALID_ARGUMENT", "spoilt already"),
        ("kill", "ABORTED", "died 2 times"),
        ("quit", "ABORTED", "died 2 times"),
        ("odd keys", "INTERNAL", "the model's result"),
        ("nan", "INTERNAL", "cannot be written"),
    ],
)
def test_poison_request_fails_alone(
    shared: Stack, prefix: str, poison: str, status: str, detail: str
) -> None:
    bodies = ["good"] * 5 + [poison] + ["good"] * 5
    names = [f"{prefix}-{number}" for number in range(len(bodies))]

    shared.send_packed(
        "Faulty",
        [
            {"correlation_id": name, "body": json.dumps(body)}
            for name, body in zip(names, bodies, strict=True)
        ],
    )
    results = [shared.result("Faulty", name) for name in names]

    assert [result["status"] for result in results] == ["OK"] * 5 + [status] + ["OK"] * 5
    assert detail in results[5]["detail"]
    assert "Error" not in results[5]["detail"], "the class of an exception must not be exposed"
    shared.wait_until_idle("Faulty")


def test_wrong_number_of_results_fails_only_that_batch(shared: Stack, prefix: str) -> None:
    """It is not known which result is missing, so no request may get any of them."""
    bodies = {f"{prefix}-0": '"good"', f"{prefix}-1": '"too few"', f"{prefix}-2": '"good"'}
    shared.send_packed("Faulty", [{"correlation_id": name, "body": body} for name, body in bodies.items()])
    for name in bodies:
        result = shared.result("Faulty", name)
        assert (result["status"], "2 results for 3 requests" in result["detail"]) == ("INTERNAL", True)

    shared.send("Faulty", correlation_id=f"{prefix}-3", body='"good"')
    assert shared.result("Faulty", f"{prefix}-3")["body"] == "good"


def test_nan_is_returned_in_msgpack(shared: Stack, prefix: str) -> None:
    body = msgpack.packb("nan")
    shared.send("Faulty", correlation_id=prefix, content_type="application/msgpack", body=body)
    assert math.isnan(msgpack.unpackb(shared.result("Faulty", prefix)["body"]))


# --- tensors


def test_large_tensors_of_many_shapes_do_not_block_the_pipe(shared: Stack, prefix: str) -> None:
    """Given tensors that cannot be stacked, each several times as large as the buffer of a pipe."""
    model = "Ragged"
    lengths = [700_000 + number for number in range(7)]
    requests = [
        {"correlation_id": f"{prefix}-{length}", "body": tensor(b"\1\2\3\4" * length)} for length in lengths
    ]
    shared.send_packed(model, requests, content_type="application/msgpack")
    for length, request in zip(lengths, requests, strict=True):
        result = shared.result(model, f"{prefix}-{length}")
        assert (result["status"], result["body"] == request["body"]) == ("OK", True)


def test_tensors_are_accepted_in_msgpack_json_and_raw(shared_on: Stack, prefix: str) -> None:
    model = "Noop"
    raw = bytes(range(4)) * 128
    numbers = [0.5] * 128
    shared_on.send(
        model, correlation_id=f"{prefix}-msgpack", content_type="application/msgpack", body=tensor(raw)
    )
    shared_on.send(model, correlation_id=f"{prefix}-raw", content_type="application/octet-stream", body=raw)
    shared_on.send(
        model,
        correlation_id=f"{prefix}-json",
        body=json.dumps({"datatype": "FP32", "shape": [128], "data": numbers}),
    )
    shared_on.send(model, correlation_id=f"{prefix}-list", body=json.dumps(numbers))
    assert shared_on.result(model, f"{prefix}-msgpack")["body"] == tensor(raw)
    assert shared_on.result(model, f"{prefix}-raw")["body"] == raw
    for name in ("json", "list"):
        body = shared_on.result(model, f"{prefix}-{name}")["body"]
        assert body == {"datatype": "FP32", "shape": [128], "data": numbers}


def tensor(data: bytes) -> bytes:
    return bytes(msgpack.packb({"datatype": "FP32", "shape": [len(data) // 4], "data": data}))
