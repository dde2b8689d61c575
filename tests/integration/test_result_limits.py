"""`max_result_bytes` on real services: a stream without an end, and a plain result that is too large."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool_worker.model_process.frames import pack_values, too_large
from carpool_worker.model_process.stepping.generation import CHUNK_OVERHEAD_BYTES
from conftest import SERVERS
from support.stack import Stack, envelope
from support.waiting import wait_until

ENDLESS: Final = "endless"
KEYS: Final = Keys(ENDLESS)
LIMIT: Final = 64 * 1024
OVER: Final = too_large(LIMIT)
TEXT: Final = "x" * 1000


@pytest.fixture
def stack(stacks: Callable[[Path], Stack]) -> Stack:
    """A stack shared by this module. The stepping model has one slot."""
    stack = stacks(SERVERS[0])
    stack.serve(f"stepping.py:{ENDLESS}", "plain.py:Echo")
    for model, settings in ((ENDLESS, {"max_batch_size": "1", "stream_buffer": "4"}), ("Echo", {})):
        wanted = {**settings, "max_result_bytes": str(LIMIT)}
        if stack.redis.hgetall(Keys(model).overrides) != {k.encode(): v.encode() for k, v in wanted.items()}:
            stack.configure(model, **wanted)
    return stack


def read_all(stack: Stack, correlation_id: str) -> list[dict[str, Any]]:
    """The envelopes of a stream, until the final one."""
    envelopes = [stack.result(ENDLESS, correlation_id)]
    while not envelopes[-1]["final"]:
        envelopes.append(stack.result(ENDLESS, correlation_id))
    return envelopes


def check_ended(stack: Stack, envelopes: list[dict[str, Any]], closed: Path) -> None:
    """The stream failed as too large, with nearly as much as is allowed before; nothing is left of it, its
    generator was closed, and its slot is free."""
    *chunks, final = envelopes
    assert (final["status"], final["detail"]) == OVER
    assert LIMIT * 3 // 4 < sum(len(json.dumps(chunk["body"])) for chunk in chunks) <= LIMIT
    assert {chunk["status"] for chunk in chunks} == {"OK"}
    assert set("".join(chunk["body"] for chunk in chunks)) == {"x"}
    stack.wait_until_idle(ENDLESS)
    assert list(stack.redis.scan_iter(KEYS.progress("*"))) == []
    wait_until(closed.exists, description="the generator was closed")
    short = stack.send(ENDLESS, body=json.dumps({"text": "a", "count": 2}))
    assert stack.result(ENDLESS, short)["body"] == "aa"


@pytest.mark.parametrize("is_read", [True, False])
def test_endless_stream_ends_read_or_not(stack: Stack, tmp_path: Path, is_read: bool) -> None:
    closed = tmp_path / "closed"
    request = stack.send(ENDLESS, stream=1, body=json.dumps({"text": TEXT, "closed": str(closed)}))
    if not is_read:
        stack.wait_until_idle(ENDLESS)
        unread = stack.redis.lrange(KEYS.result(request), 0, -1)
        assert sum(map(len, unread)) <= LIMIT + 1000 * len(unread)
        assert [envelope(chunk)["final"] for chunk in unread] == [False] * (len(unread) - 1) + [True]
    check_ended(stack, read_all(stack, request), closed)


def test_request_without_a_stream_has_the_same_limit(stack: Stack, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    request = stack.send(ENDLESS, body=json.dumps({"text": TEXT, "closed": str(closed)}))
    result = stack.result(ENDLESS, request)
    assert (result["status"], result["detail"]) == OVER
    wait_until(closed.exists, description="the generator was closed")


def test_stream_that_is_larger_as_json_ends(stack: Stack, tmp_path: Path) -> None:
    """Each character has six bytes there. The worker sees that, and has the model process end the request."""
    closed = tmp_path / "closed"
    body = {"text": "\0" * 1000, "count": 40, "closed": str(closed)}
    *chunks, final = read_all(stack, stack.send(ENDLESS, stream=1, body=json.dumps(body)))
    assert (final["status"], final["detail"]) == OVER
    assert sum(len(json.dumps(chunk["body"])) for chunk in chunks) <= LIMIT
    stack.wait_until_idle(ENDLESS)
    wait_until(closed.exists, description="the generator was closed")


def test_plain_result_over_the_limit_fails_alone(stack: Stack) -> None:
    """Its batch mates have their results. The last one is too large only as JSON."""
    bodies = {"a": "x" * 10, "large": "x" * LIMIT, "b": "x" * (LIMIT - 10), "escaped": "\0" * (LIMIT // 5)}
    packed = [{"correlation_id": name, "body": json.dumps(body)} for name, body in bodies.items()]
    stack.send_packed("Echo", packed)
    results = {name: stack.result("Echo", name) for name in bodies}
    assert {result["batch_size"] for result in results.values()} == {4}
    for name in ("a", "b"):
        assert (results[name]["status"], results[name]["body"]) == ("OK", bodies[name])
    for name in ("large", "escaped"):
        assert (results[name]["status"], results[name]["detail"]) == OVER


def test_chunk_takes_no_more_memory_than_it_counts(server: Path, tmp_path: Path) -> None:
    """A field of the progress, also while Redis makes the hash larger: so memory of Redis is bounded."""
    count, kept = 140_000, pack_values([2**40])  # after 131,072 the hash has twice as many buckets
    with Stack(tmp_path, binary=server) as stack:
        for start in range(0, count, 10_000):
            fields = {f"chunk:{at}": kept for at in range(start, start + 10_000)}
            stack.redis.hset(KEYS.progress("1-0"), mapping=fields)
        taken = stack.redis.memory_usage(KEYS.progress("1-0"), samples=0)
        assert taken is not None and taken <= count * (CHUNK_OVERHEAD_BYTES + len(kept))
