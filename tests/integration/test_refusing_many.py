"""Refusing very many requests: Redis serves others meanwhile, and it comes to an end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from carpool.errors import DEADLINE_EXCEEDED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from carpool.keys import CORRELATION_ID_CHARS_MAX, Keys
from carpool.messages.batches import Dispatch
from carpool.messages.requests import JSON, MSGPACK, Entry, Run
from carpool.messages.results import Refusal, Result
from carpool.store.batcher import ANSWERS_MAX, STATED_RANGES_MAX, BatcherStore
from carpool.store.connection import Argument, Link, Script
from carpool.store.results import Address, Answer
from carpool.tickets import TicketRange, Tickets
from carpool.wire.results import encode_result
from support.collisions import colliding
from support.pings import Pings
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "Counting"
KEYS: Final = Keys(MODEL)
IN_ENTRY: Final = 4096
DETAIL: Final = "priority: must be a whole number from 0 to 9"
TTL_MS: Final = 60_000
PING_S: Final = 1.0  # of CPU time: a script without bounds takes 4 s; with them they take 0.1 s
ALL_S: Final = 240  # this many refusals take 15 s on a quiet machine


def serve(stack: Stack) -> None:
    """Start a batcher that has read a small entry, and so reads many at a time."""
    stack.batcher()
    stack.worker("counting.py:Counting")
    stack.wait_for_model(MODEL)
    stack.configure(MODEL, result_ttl_ms=str(2000 * ALL_S))  # the first result is there when the last one is
    stack.result(MODEL, stack.send(MODEL, body='"x"'))


def send_together(stack: Stack, ids: Sequence[str], **shared: str) -> None:
    """Packed entries, which a batcher reads at once."""
    pipeline = stack.redis.pipeline(transaction=True)
    for start in range(0, len(ids), IN_ENTRY):
        requests = [{"correlation_id": name, "body": b"1"} for name in ids[start : start + IN_ENTRY]]
        pipeline.xadd(KEYS.requests, {"requests": msgpack.packb(requests), **shared})
    pipeline.execute()


def envelope_of(correlation_id: str) -> bytes:
    return encode_result(Result(correlation_id, INVALID_ARGUMENT, detail=DETAIL))


def test_colliding_correlation_ids_do_not_stop_redis(server: Path, tmp_path: Path) -> None:
    with Stack(tmp_path, binary=server, append_only=False) as stack:
        serve(stack)
        ids = colliding(16 * IN_ENTRY, 128, [KEYS.result, envelope_of, str])
        with Pings(stack.url, stack.server.pid) as pings:
            send_together(stack, ids, priority="11")
            wait_until(
                lambda: stack.redis.xlen(KEYS.requests) == 0, description="all are refused", timeout_s=ALL_S
            )
        assert stack.redis.exists(*map(KEYS.result, ids)) == len(ids)
        assert pings.slowest_s < PING_S
        assert not stack.events("batcher failed, starting over")


def test_many_refusals_of_a_full_queue(server: Path, tmp_path: Path) -> None:
    with Stack(tmp_path, binary=server, append_only=False) as stack:
        serve(stack)
        stack.configure(MODEL, max_queue_size="1")
        for worker in stack.services[1:]:
            worker.kill()
        wait_until(lambda: not stack.live_workers(MODEL), description="no worker is left")
        ids = [f"r{number}" for number in range(16 * IN_ENTRY)]
        with Pings(stack.url, stack.server.pid) as pings:
            send_together(stack, ids)
            wait_until(
                lambda: stack.redis.xlen(KEYS.requests) <= 1, description="all are refused", timeout_s=ALL_S
            )
        refused = stack.redis.exists(*map(KEYS.result, ids))
        assert len(ids) - 2 <= refused < len(ids)  # one waits, and one may have been dispatched
        assert stack.result(MODEL, ids[-1])["status"] == RESOURCE_EXHAUSTED
        assert pings.slowest_s < PING_S
        assert not stack.events("batcher failed, starting over")


# --- the other scripts of a batcher ------------------------------------------------------------------------


class ObservedLink(Link):
    """A connection that notes how many keys and arguments each script had."""

    def __init__(self, url: str) -> None:
        super().__init__(url, name="observed")
        self.scripts: list[tuple[str, int, int]] = []

    def run(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        self.scripts.append((script.name, len(keys), len(args)))
        return super().run(script, keys, args)


@pytest.fixture
def link(stack: Stack) -> Iterator[ObservedLink]:
    link = ObservedLink(stack.url)
    yield link
    link.close()


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_alike_results_are_written_by_a_script_that_is_told_each_id_once(
    stack: Stack, link: ObservedLink, content_type: str
) -> None:
    """Given IDs at the limits of the heads that msgpack has for texts, expect the encoder's envelopes."""
    ids = [*("a" * chars for chars in (1, 31, 32, CORRELATION_ID_CHARS_MAX)), *map(str, range(100))]
    entry = Entry(stack.send(MODEL, body="1"), 0)
    refused = Refusal(entry, ids, None, content_type, INVALID_ARGUMENT, "input", DETAIL, warnings=("w",))
    store = BatcherStore(link, KEYS)
    store.refuse(store.prepare_refusal([refused], [], TTL_MS))
    _, _, arguments = link.scripts[-1]
    assert arguments < 20  # the IDs are in the keys
    for name in ids:
        expected = Result(name, INVALID_ARGUMENT, content_type, detail=DETAIL, warnings=("w",))
        assert stack.redis.lrange(KEYS.result(name), 0, -1) == [encode_result(expected)]
        assert 0 < stack.redis.pttl(KEYS.result(name)) <= TTL_MS


def test_a_batch_that_expires_is_answered_by_several_scripts(stack: Stack, link: ObservedLink) -> None:
    store = BatcherStore(link, KEYS)
    count = 2 * ANSWERS_MAX + 1
    run = Run(Entry(stack.send(MODEL, body="1"), 0), [f"r{at}" for at in range(count)], [b"1"] * count)
    run.entry.runs.append(run)
    outcome = store.dispatch([Dispatch([run], "full", "")], TTL_MS)
    assert outcome.batches[0] is not None
    answers = [
        Answer(at, Address(None, None), Result(name, DEADLINE_EXCEEDED, detail="late"))
        for at, name in enumerate(run.correlation_ids)
    ]
    link.scripts.clear()
    assert store.answer_in_flight(outcome.batches[0].batch_id, answers, TTL_MS) == set(range(count))
    assert [keys - 5 for _, keys, _ in link.scripts] == [ANSWERS_MAX, ANSWERS_MAX, 1]
    assert stack.redis.exists(*map(KEYS.result, run.correlation_ids)) == count
    stack.redis.xtrim(KEYS.batches, 0)
    assert store.answer_in_flight(outcome.batches[0].batch_id, answers, TTL_MS) is None


def test_many_tickets_that_are_stated_are_verified_by_several_scripts(
    stack: Stack, link: ObservedLink
) -> None:
    store = BatcherStore(link, KEYS)
    count = STATED_RANGES_MAX // 2 + 1
    put_back = [Entry(f"{at}-0", 0) for at in range(1, 4)]
    for entry in put_back:
        entry.stated_tickets = Tickets(tuple(TicketRange("1-1", at, 1) for at in range(count)))
    admission = store.admit([TicketRange("9-0", 0, 3)], put_back)
    assert (admission.tickets, admission.forged) == (3, put_back)
    assert [args // count for _, _, args in link.scripts] == [1, 1, 1]
    assert stack.redis.llen(KEYS.order) == 1
