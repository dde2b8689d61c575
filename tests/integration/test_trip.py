"""A request's trip, as a producer sees it that knows nothing but Redis and PROTOCOL.md."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from carpool.keys import Keys
from conftest import SERVERS
from support.stack import Stack, fixed_keys
from support.waiting import wait_until

EXPIRATIONS_MS: Final = range(300, 560, 32)


ON_EVERY_SERVER: Final = ("square", "plain.py:Echo", "plain.py:Single", "plain.py:Few", "plain.py:Noop")
ON_ONE: Final = (*ON_EVERY_SERVER, "plain.py:Priced", "plain.py:Ragged", "faulty.py:Faulty")


@pytest.fixture
def shared(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module, on the preferred server."""
    stack = stacks(SERVERS[0])
    stack.serve(*ON_ONE)
    return stack


@pytest.fixture
def core(server: Path, stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module, on every server in turn."""
    stack = stacks(server)
    stack.serve(*(ON_ONE if server == SERVERS[0] else ON_EVERY_SERVER))
    return stack


@pytest.fixture
def here(request: pytest.FixtureRequest) -> str:
    """What this test's correlation IDs begin with."""
    return f"t{abs(hash(request.node.nodeid)):x}"


@contextmanager
def held_up(stack: Stack, spec: str, gate: Path) -> Iterator[str]:
    """Inside the block the model's one worker is busy, and what is sent waits."""
    model = stack.serve(spec)
    stack.wait_until_idle(model)
    batches = Keys(model).batches
    stack.send(model, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.redis.xlen(batches) == 1, description=f"{model} is held up")
    # A busy worker may be given a second batch: with a full one ahead of it, nothing else leaves.
    size, cost = stack.redis.hmget(Keys(model).registration, "max_batch_size", "max_batch_cost")
    if cost != b"none":
        stack.send(model, body="0", cost=int(cost))
    else:
        stack.send_packed(model, [{"correlation_id": f"plug{at}", "body": b"0"} for at in range(int(size))])
    wait_until(lambda: stack.redis.xlen(batches) == 2, description="a batch waits ahead")
    try:
        yield model
    finally:
        gate.touch()


@contextmanager
def no_worker(stack: Stack, spec: str) -> Iterator[str]:
    """Inside the block the model is registered and has a batcher, but no worker."""
    model = stack.serve(spec)
    assert stack.served_by(model).terminate() == 0
    wait_until(lambda: not stack.live_workers(model), description=f"no worker of {model} is left")
    yield model
    stack.serve(spec)


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """Opens what is held up, once it exists."""
    return tmp_path / "gate"


# --- Bodies and where their results are


def test_a_body_and_a_blocking_pop(core: Stack) -> None:
    model = "square"

    entry_id = core.redis.execute_command("XADD", "carpool:{square}:requests", "*", "body", "7").decode()
    key, data = core.redis.execute_command("BLPOP", f"carpool:{{square}}:result:{entry_id}", "5")

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
    core.wait_until_idle(model)


def test_a_msgpack_body_gets_a_msgpack_envelope(core: Stack, here: str) -> None:
    model = "Echo"
    value = {"numbers": [1, 2.5, None], "text": "zwölf", "bytes": b"\x00\xff"}

    core.send(model, correlation_id=here, content_type="application/msgpack", body=msgpack.packb(value))
    result = core.result(model, here)

    assert (result["status"], result["content_type"]) == ("OK", "application/msgpack")
    assert isinstance(result["body"], bytes)
    assert msgpack.unpackb(result["body"]) == value


def test_raw_bytes_come_back_as_raw_bytes(core: Stack, here: str) -> None:
    model = "Echo"
    body = bytes(range(256))

    core.send(model, correlation_id=here, content_type="application/octet-stream", body=body)
    result = core.result(model, here)

    assert (result["content_type"], result["body"]) == ("application/octet-stream", body)


def test_a_result_can_be_left_to_be_read_again_and_expires(shared: Stack, here: str) -> None:
    model = "Echo"
    key = Keys(model).result(here)

    shared.send(model, correlation_id=here, body='"again"')
    first = shared.redis.execute_command("BLMOVE", key, key, "LEFT", "LEFT", "5")

    assert shared.redis.lrange(key, 0, -1) == [first]
    assert 0 < shared.redis.pttl(key) <= 60_000


def test_results_of_one_reply_stream_share_entries(core: Stack, here: str) -> None:
    model = "Echo"
    requests = [{"correlation_id": f"{here}-{number}", "body": b"%d" % number} for number in range(12)]

    core.send_packed(model, requests, reply_to=here)
    wait_until(lambda: len(core.replies(model, here)) == 12, description="12 results are on the stream")

    results = core.replies(model, here)
    assert {one["correlation_id"]: one["body"] for one in results} == {
        one["correlation_id"]: one["body"] for one in requests
    }
    stream = Keys(model).replies(here)
    assert core.redis.xlen(stream) == 1
    assert 0 < core.redis.pttl(stream) <= 60_000


def test_what_carpool_does_not_know_reaches_the_model_and_the_id_is_the_producers(
    shared: Stack, here: str
) -> None:
    name = f"{here}:A.b_c-9"
    shared.send("Echo", correlation_id=name, body='"about"', lane="fr", tenant="acme", traceparent="00-4b")
    assert shared.result("Echo", name)["body"] == [name, "fr", {"tenant": "acme", "traceparent": "00-4b"}]


def test_the_same_correlation_id_twice_is_two_requests(shared: Stack, here: str) -> None:
    model = "Echo"
    for body in ("1", "2"):
        shared.send(model, correlation_id=here, body=body)
    assert sorted(shared.result(model, here)["body"] for _ in range(2)) == [1, 2]


# --- Batches


def test_a_packed_entry_larger_than_a_batch_leaves_in_parts_and_keeps_its_arrival(
    core: Stack, gate: Path, here: str
) -> None:
    """Given room for a batch of 16 and a full one ahead, of 40 requests in one entry 8 are put back."""
    model, stream = "Echo", Keys("Echo").requests
    bodies = [json.dumps({"gate": str(gate)}), *map(str, range(1, 40))]
    names = [f"{here}-{number}" for number in range(40)]

    entry_id = core.send_packed(
        model, [{"correlation_id": name, "body": body} for name, body in zip(names, bodies, strict=True)]
    )
    wait_until(lambda: core.redis.xlen(Keys(model).batches) == 2, description="two batches left")

    ((new_id, fields),) = core.redis.xrange(stream)
    assert new_id.decode() != entry_id
    assert fields[b"arrival"].decode() == entry_id.partition("-")[0]
    assert len(msgpack.unpackb(fields[b"requests"])) == 8
    gate.touch()
    results = [core.result(model, name) for name in names]
    assert [one["body"] for one in results[1:]] == list(range(1, 40))
    assert [one["batch_size"] for one in results] == [16] * 32 + [8] * 8
    core.wait_until_idle(model)


def test_lanes_never_share_a_batch(shared: Stack, gate: Path, here: str) -> None:
    with held_up(shared, "plain.py:Echo", gate) as model:
        lanes = ["a", "b", "a", "", "b", "a", "a", "", "b", "b", "b"]
        for number, lane in enumerate(lanes):
            fields = {"lane": lane} if lane else {}
            shared.send(model, correlation_id=f"{here}-{number}", body="0", **fields)
    sizes = [shared.result(model, f"{here}-{number}")["batch_size"] for number in range(len(lanes))]
    assert dict(zip(lanes, sizes, strict=True)) == {"a": 4, "b": 5, "": 2}
    assert sizes == [lanes.count(lane) for lane in lanes]


def test_higher_priorities_leave_first_and_equals_in_order_of_arrival(
    shared: Stack, gate: Path, here: str
) -> None:
    with held_up(shared, "plain.py:Single", gate) as model:
        for number, priority in enumerate((0, 4, None, 9, 0, 9)):
            fields = {} if priority is None else {"priority": priority}
            shared.send(model, correlation_id=f"{here}-{number}", body="0", reply_to=here, **fields)
    wait_until(lambda: len(shared.replies(model, here)) == 6, description="6 results are on the stream")
    order = [one["correlation_id"].removeprefix(f"{here}-") for one in shared.replies(model, here)]
    assert order == ["3", "5", "1", "2", "0", "4"]


def test_a_batch_keeps_within_its_cost(shared: Stack, gate: Path, here: str) -> None:
    with held_up(shared, "plain.py:Priced", gate) as model:
        for number, cost in enumerate((6, 6, 4, 10, 11)):
            shared.send(model, correlation_id=f"{here}-{number}", body="0", cost=cost)
    results = [shared.result(model, f"{here}-{number}") for number in range(5)]
    assert [one["batch_size"] for one in results] == [1, 2, 2, 1, 0]
    assert results[4]["status"] == "INVALID_ARGUMENT"
    assert "max_batch_cost 10" in results[4]["detail"]


def test_settings_change_while_running(shared: Stack, gate: Path, here: str) -> None:
    """Given a served model, when its registration gets a default expiration, what comes next goes by it."""
    key = Keys("Single").registration

    def changed(value: str | None) -> bool:
        changes = [one for one in shared.events("settings changed") if one["model"] == "Single"]
        return bool(changes) and changes[-1].get("default_expiration_ms") == value

    with held_up(shared, "plain.py:Single", gate) as model:
        shared.send(model, correlation_id=f"{here}-before", body="0")
        shared.redis.hset(key, "default_expiration_ms", 100)
        wait_until(lambda: changed("100"), description="the batcher knows of the change")
        shared.send(model, correlation_id=f"{here}-after", body="0")
        assert shared.result(model, f"{here}-after")["status"] == "DEADLINE_EXCEEDED"
    assert shared.result(model, f"{here}-before")["status"] == "OK"
    shared.redis.hdel(key, "default_expiration_ms")
    wait_until(lambda: changed(None), description="the batcher knows of the change back")


# --- Withdrawing


def test_an_entry_that_is_deleted_while_it_waits_is_never_executed(
    core: Stack, gate: Path, here: str
) -> None:
    with held_up(core, "plain.py:Echo", gate) as model:
        entry_id = core.send(model, correlation_id=f"{here}-gone", body='"gone"')
        core.send(model, correlation_id=f"{here}-stays", body='"stays"')
        assert core.redis.xdel(Keys(model).requests, entry_id) == 1
    assert core.result(model, f"{here}-stays")["batch_size"] == 1
    core.wait_until_idle(model)
    assert not core.redis.exists(Keys(model).result(f"{here}-gone"))


def test_requests_are_withdrawn_by_name_one_out_of_a_packed_entry_too(
    core: Stack, gate: Path, here: str
) -> None:
    with held_up(core, "plain.py:Echo", gate) as model:
        names = [f"{here}-{number}" for number in range(3)]
        core.send_packed(model, [{"correlation_id": name, "body": b"0"} for name in names])
        core.send(model, correlation_id=f"{here}-alone", body="0")
        core.send(model, withdraw=f"{names[1]} {here}-alone no-such-request")
        for name in (names[1], f"{here}-alone"):
            result = core.result(model, name)
            assert (result["status"], result["final"], "body" in result) == ("CANCELLED", True, False)
        assert core.redis.xlen(Keys(model).requests) == 1  # the other two; the withdrawal has gone too
    assert [core.result(model, name)["status"] for name in (names[0], names[2])] == ["OK", "OK"]
    core.wait_until_idle(model)


# --- Deadlines


def test_requests_expire_while_they_wait_each_at_its_deadline_and_not_when_a_batch_forms(
    core: Stack, here: str
) -> None:
    with no_worker(core, "plain.py:Echo") as model:
        sent = [
            (core.send(model, body="0", reply_to=here, expiration=expiration_ms), expiration_ms)
            for expiration_ms in EXPIRATIONS_MS
        ]
        wait_until(lambda: len(core.replies(model, here)) == len(sent), description="all are answered")
        for one in core.replies(model, here):
            assert (one["status"], "waiting" in one["detail"]) == ("DEADLINE_EXCEEDED", True)
        assert_in_time(core, model, here, sent)
        core.wait_until_idle(model)


def test_requests_expire_in_flight_while_the_model_computes_and_get_no_second_result(
    core: Stack, gate: Path, here: str
) -> None:
    model = "Echo"
    core.wait_until_idle(model)
    packed = [
        {"correlation_id": f"{here}-{expiration_ms}", "body": b"0", "expiration": expiration_ms}
        for expiration_ms in EXPIRATIONS_MS
    ]
    packed.append({"correlation_id": f"{here}-gate", "body": json.dumps({"gate": str(gate)})})

    entry_id = core.send_packed(model, packed, reply_to=here)
    wait_until(lambda: len(core.replies(model, here)) == len(EXPIRATIONS_MS), description="all are answered")

    assert {one["status"] for one in core.replies(model, here)} == {"DEADLINE_EXCEEDED"}
    assert core.redis.xlen(Keys(model).batches) == 1, "the model still computes"
    assert_in_time(core, model, here, [(entry_id, expiration_ms) for expiration_ms in EXPIRATIONS_MS])
    gate.touch()
    core.wait_until_idle(model)
    results = core.replies(model, here)[len(EXPIRATIONS_MS) :]
    assert [one["correlation_id"] for one in results] == [f"{here}-gate"], "a second result was written"
    assert core.keys_without_ttl() <= set().union(*map(fixed_keys, core.models()))


def assert_in_time(stack: Stack, model: str, reply_to: str, sent: list[tuple[str, int]]) -> None:
    """By Redis's clock none was answered before its deadline, and most right at it.

    The deadlines are spread over the quarter of a second in which a batcher looks around in any case.
    """
    deadlines_ms = sorted(int(entry_id.partition("-")[0]) + expiration_ms for entry_id, expiration_ms in sent)
    answered_ms: list[int] = []
    for entry_id, fields in stack.redis.xrange(Keys(model).replies(reply_to)):
        answered_ms += [int(entry_id.partition(b"-")[0])] * len(msgpack.unpackb(fields[b"results"]))
    late_ms = [at - due for at, due in zip(answered_ms, deadlines_ms, strict=True)]
    assert min(late_ms) >= 0
    assert statistics.median(late_ms) < 50, late_ms


def test_what_expires_behind_a_long_batch_is_answered_at_its_deadline(
    shared: Stack, gate: Path, here: str
) -> None:
    """Given one batch under way, one dispatched ahead and one that waits, the last two expire at once."""
    model = "Single"
    shared.wait_until_idle(model)
    shared.send(model, correlation_id=f"{here}-long", body=json.dumps({"gate": str(gate)}))
    for number in range(2):
        shared.send(model, correlation_id=f"{here}-{number}", body="0", expiration=300)
    keys = Keys(model)
    wait_until(lambda: shared.redis.xlen(keys.batches) == 2, description="one batch is dispatched ahead")

    assert [shared.result(model, f"{here}-{number}")["status"] for number in range(2)] == [
        "DEADLINE_EXCEEDED"
    ] * 2
    assert shared.redis.xlen(keys.requests) == 0
    assert shared.redis.xlen(keys.batches) == 2, "the long batch is still under way"
    gate.touch()
    assert shared.result(model, f"{here}-long")["status"] == "OK"
    shared.wait_until_idle(model)
    assert not shared.redis.exists(keys.result(f"{here}-0")), "a second result was written by the commit"


# --- Refusals


def test_a_full_queue_refuses_the_newest_and_keeps_the_oldest(core: Stack, gate: Path, here: str) -> None:
    with held_up(core, "plain.py:Few", gate) as model:
        for number in range(5):
            core.send(model, correlation_id=f"{here}-{number}", body=str(number))
        refused = [core.result(model, f"{here}-{number}") for number in (2, 3, 4)]
        assert {one["status"] for one in refused} == {"RESOURCE_EXHAUSTED"}
        assert "max_queue_size" in refused[0]["detail"]
        assert core.redis.xlen(Keys(model).requests) == 2
    assert [core.result(model, f"{here}-{number}")["body"] for number in (0, 1)] == [0, 1]


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"body": "1", "content_type": "text/plain"}, "INVALID_ARGUMENT", "content_type"),
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
def test_what_cannot_be_understood_is_answered_and_the_field_named(
    shared: Stack, here: str, fields: dict[str, Any], status: str, named: str
) -> None:
    model = "Echo"
    shared.send(model, correlation_id=here, **fields)
    result = shared.result(model, here)
    assert (result["correlation_id"], result["status"], result["final"]) == (here, status, True)
    assert result["detail"].startswith(named)


def test_an_invalid_correlation_id_is_answered_at_the_entrys_own(shared: Stack) -> None:
    model = "Echo"
    entry_id = shared.send(model, correlation_id="no spaces", body="1")
    result = shared.result(model, entry_id)
    assert (result["correlation_id"], result["status"]) == (entry_id, "INVALID_ARGUMENT")
    assert result["detail"].startswith("correlation_id")


# --- Models that fail


@pytest.mark.parametrize(
    ("poison", "status", "detail"),
    [
        ("raise", "INTERNAL", "this one is spoilt"),
        ("refuse", "INVALID_ARGUMENT", "spoilt already"),
        ("kill", "ABORTED", "ended 2 times"),
        ("quit", "ABORTED", "ended 2 times"),
        ("odd keys", "INTERNAL", "the model's result"),
        ("nan", "INTERNAL", "cannot be written"),
    ],
)
def test_one_poison_request_fails_alone(
    shared: Stack, here: str, poison: str, status: str, detail: str
) -> None:
    bodies = ["good"] * 5 + [poison] + ["good"] * 5
    names = [f"{here}-{number}" for number in range(len(bodies))]

    shared.send_packed(
        "Faulty",
        [
            {"correlation_id": name, "body": json.dumps(body)}
            for name, body in zip(names, bodies, strict=True)
        ],
    )
    results = [shared.result("Faulty", name) for name in names]

    assert [one["status"] for one in results] == ["OK"] * 5 + [status] + ["OK"] * 5
    assert detail in results[5]["detail"]
    assert "Error" not in results[5]["detail"], "an exception's class is nobody's business"
    shared.wait_until_idle("Faulty")


def test_a_wrong_number_of_results_fails_the_batch_and_the_next_is_served(shared: Stack, here: str) -> None:
    """Nobody can know whose is missing, so nobody may get his neighbour's."""
    bodies = {f"{here}-0": '"good"', f"{here}-1": '"too few"', f"{here}-2": '"good"'}
    shared.send_packed("Faulty", [{"correlation_id": name, "body": body} for name, body in bodies.items()])
    for name in bodies:
        result = shared.result("Faulty", name)
        assert (result["status"], "2 results for 3 requests" in result["detail"]) == ("INTERNAL", True)

    shared.send("Faulty", correlation_id=f"{here}-3", body='"good"')
    assert shared.result("Faulty", f"{here}-3")["body"] == "good"


def test_msgpack_can_hold_what_json_cannot(shared: Stack, here: str) -> None:
    body = msgpack.packb("nan")
    shared.send("Faulty", correlation_id=here, content_type="application/msgpack", body=body)
    assert math.isnan(msgpack.unpackb(shared.result("Faulty", here)["body"]))


# --- Tensors


def test_large_tensors_of_many_shapes_in_one_batch_do_not_block_the_pipe(shared: Stack, here: str) -> None:
    """Given requests that do not stack, each several times what the pipe to the model process holds."""
    model = "Ragged"
    lengths = [700_000 + number for number in range(7)]
    requests = [
        {"correlation_id": f"{here}-{length}", "body": tensor(b"\1\2\3\4" * length)} for length in lengths
    ]
    shared.send_packed(model, requests, content_type="application/msgpack")
    for length, request in zip(lengths, requests, strict=True):
        result = shared.result(model, f"{here}-{length}")
        assert (result["status"], result["body"] == request["body"]) == ("OK", True)


def test_tensors_travel_in_msgpack_json_and_raw(core: Stack, here: str) -> None:
    model = "Noop"
    raw = bytes(range(4)) * 128
    numbers = [0.5] * 128
    core.send(model, correlation_id=f"{here}-msgpack", content_type="application/msgpack", body=tensor(raw))
    core.send(model, correlation_id=f"{here}-raw", content_type="application/octet-stream", body=raw)
    core.send(
        model,
        correlation_id=f"{here}-json",
        body=json.dumps({"datatype": "FP32", "shape": [128], "data": numbers}),
    )
    core.send(model, correlation_id=f"{here}-list", body=json.dumps(numbers))
    assert core.result(model, f"{here}-msgpack")["body"] == tensor(raw)
    assert core.result(model, f"{here}-raw")["body"] == raw
    for name in ("json", "list"):
        body = core.result(model, f"{here}-{name}")["body"]
        assert body == {"datatype": "FP32", "shape": [128], "data": numbers}


def tensor(data: bytes) -> bytes:
    return bytes(msgpack.packb({"datatype": "FP32", "shape": [len(data) // 4], "data": data}))
