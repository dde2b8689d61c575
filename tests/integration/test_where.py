"""`carpool where` on a real stack: each state in which a request can be, and its races."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool import Client
from carpool.keys import Keys
from carpool.store import whereabouts
from carpool.store.connection import Link
from carpool.store.detail import read_detail, watch
from carpool.store.whereabouts import find, find_in_each
from carpool.wire.detail import ModelDetail
from carpool.wire.whereabouts import Whereabouts
from support.command import Done, carpool
from support.stack import Stack
from support.waiting import wait_until

MODEL: Final = "Metered"  # one process, batches of 8, of which 16 may wait
KEYS: Final = Keys(MODEL)
NAMES: Final = itertools.count()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack for all tests that do not end a part of it."""
    with Stack(tmp_path_factory.mktemp("stack")) as started:
        started.serve("metered.py:Metered")
        yield started


@pytest.fixture(scope="module")
def link(stack: Stack) -> Iterator[Link]:
    opened = Link(stack.url, name="asks")
    yield opened
    opened.close()


@pytest.fixture
def busy(stack: Stack, gate: Path) -> Iterator[Path]:
    """The model's process executes a batch, and a full one is ahead, until this file exists."""
    stack.wait_until_idle(MODEL)
    stack.send(MODEL, body=json.dumps({"gate": str(gate)}), lane="held")
    wait_until(lambda: stack.redis.xlen(KEYS.batches) == 1, description="a batch is in flight")
    stack.send_packed(MODEL, [{"correlation_id": name(), "body": "0"} for _ in range(8)], lane="held")
    wait_until(lambda: stack.redis.xlen(KEYS.batches) == 2, description="a full batch is dispatched ahead")
    yield gate
    gate.touch()
    stack.wait_until_idle(MODEL)


def name() -> str:
    return f"asked-{next(NAMES)}"


def where(stack: Stack, *arguments: str) -> Done:
    return carpool(stack.url, "where", *arguments)


def wait_for_state(link: Link, keys: Keys, correlation_id: str, state: str) -> Whereabouts:
    """Wait until the request is in this state, and return where it is."""
    found: list[Whereabouts] = []

    def is_there() -> bool:
        found[:] = [find(link, keys, correlation_id)]
        return found[0].state == state

    wait_until(is_there, description=f"{correlation_id} is {state}")
    return found[0]


# --- waiting -----------------------------------------------------------------------------------------------


def test_waiting_while_all_processes_are_busy(stack: Stack, link: Link, busy: Path) -> None:
    others = [name() for _ in range(3)]
    asked = name()
    for one in (*others, asked):
        stack.send(MODEL, body="1", correlation_id=one, tenant="acme", lane="wide", expiration=600_000)
    found = wait_for_state(link, KEYS, asked, "waiting")
    assert found.batcher == "answered"
    (waiting,) = found.waiting
    assert (waiting.lane, waiting.tenant, waiting.priority, waiting.before) == ("wide", "acme", 4, 3)
    assert waiting.deadline_us is not None
    assert waiting.deadline_us - waiting.arrived_us == 600_000_000
    assert "model processes are busy" in waiting.why
    assert not waiting.before_is_least
    printed = where(stack, MODEL, asked)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith(f"{asked} of {MODEL}: waiting\nwaits in lane 'wide', tenant 'acme'")
    assert "requests that go before it in this lane: 3\nwhy: all" in printed.stdout


def test_waiting_behind_another_lane(stack: Stack, link: Link, busy: Path) -> None:
    asked = name()
    stack.send(MODEL, body="1", correlation_id=asked, lane="slow", priority=1)
    stack.send(MODEL, body="1", correlation_id=name(), lane="fast", priority=8)
    wait_for_state(link, KEYS, asked, "waiting")
    wait_until(
        lambda: (
            "lane 'fast' comes first: it has requests of priority 8" in find(link, KEYS, asked).waiting[0].why
        ),
        description="the other lane is known",
    )


def test_delayed(stack: Stack, link: Link) -> None:
    asked = name()
    entry = stack.send(MODEL, body="1", correlation_id=asked, not_before=600_000)
    (waiting,) = wait_for_state(link, KEYS, asked, "waiting").waiting
    assert waiting.why == "its producer delayed it (not_before)"
    assert waiting.until_us == int(entry.partition("-")[0]) * 1000 + 600_000_000
    assert waiting.before is None
    stack.redis.xdel(KEYS.requests, entry)


def test_waiting_for_a_version_that_no_worker_has(stack: Stack, link: Link) -> None:
    """It is asked at once: after 5 s the request is answered NOT_FOUND, and then that is told."""
    asked = name()
    stack.send(MODEL, body="1", correlation_id=asked, version="9")
    (waiting,) = wait_for_state(link, KEYS, asked, "waiting").waiting
    assert "no worker has version 9, for which it asks" in waiting.why
    assert waiting.version == "9"
    assert stack.result(MODEL, asked)["status"] == "NOT_FOUND"
    (refused,) = find(link, KEYS, asked).refused
    assert (refused.status, refused.reason) == ("NOT_FOUND", "version")


def test_packed_requests_and_copies(stack: Stack, link: Link, busy: Path) -> None:
    """Of an entry with several requests one is asked for; and of two with one ID, and different addresses,
    both are found."""
    asked = name()
    stack.send_packed(
        MODEL,
        [{"correlation_id": name(), "body": "1"}, {"correlation_id": asked, "body": "2"}],
        lane="packed",
    )
    stack.send(MODEL, body="3", correlation_id=asked, lane="packed", reply_to=name())
    wait_until(lambda: len(find(link, KEYS, asked).waiting) == 2, description="both are found")
    first, second = sorted(find(link, KEYS, asked).waiting, key=lambda one: one.before or 0)
    assert (first.before, second.before) == (1, 2)
    assert not first.reply_to
    assert second.reply_to


# --- in flight, answered -----------------------------------------------------------------------------------


def test_in_flight_and_then_unread_and_then_unknown(stack: Stack, link: Link, gate: Path) -> None:
    asked = name()
    stack.send(MODEL, body=json.dumps({"gate": str(gate)}), correlation_id=asked, expiration=600_000)
    wait_for_state(link, KEYS, asked, "in flight")
    wait_until(lambda: find(link, KEYS, asked).in_flight[0].process, description="a worker has fetched it")
    (one,) = find(link, KEYS, asked).in_flight
    assert one.batch == stack.redis.xrange(KEYS.batches)[0][0].decode()
    assert one.process in stack.live_workers(MODEL)
    assert (one.position, one.size, one.deliveries, one.is_suspect) == (0, 1, 1, False)
    assert one.deadline_us is not None
    assert one.dispatched_us > 0
    printed = where(stack, MODEL, asked, "--json")
    (shown,) = json.loads(printed.stdout)
    assert (shown["state"], shown["in_flight"][0]["process"]) == ("in flight", one.process)

    gate.touch()
    found = wait_for_state(link, KEYS, asked, "answered")
    (result,) = found.results
    assert result.kind == "list"
    assert result.until_us is not None
    assert result.until_us > found.at_us
    assert whereabouts._in_flight(link, KEYS, [one]) == [], "it settled after the batcher had answered"
    assert stack.result(MODEL, asked)["status"] == "OK"

    printed = where(stack, asked)  # of no model: all of them are asked
    assert printed.returncode == 3
    assert "it was answered, and its result was read, or has expired" in printed.stdout


def test_kept_result(stack: Stack) -> None:
    with Client(stack.url) as client:
        enqueued = client.enqueue(MODEL, 1)
        client.result(enqueued)
        printed = where(stack, str(enqueued))  # MODEL/ID
        assert printed.returncode == 0, printed.stdout
        assert "its result (done) is read by ID, and kept until it expires, in" in printed.stdout


def test_withdrawn_and_refused(stack: Stack, link: Link, busy: Path) -> None:
    asked = name()
    stack.send(MODEL, body="1", correlation_id=asked)
    wait_for_state(link, KEYS, asked, "waiting")
    stack.send(MODEL, withdraw=asked)
    assert stack.result(MODEL, asked)["status"] == "CANCELLED"
    assert find(link, KEYS, asked).state == "withdrawn"

    refused = name()
    stack.send(MODEL, body="1", correlation_id=refused, priority="many")
    assert stack.result(MODEL, refused)["status"] == "INVALID_ARGUMENT"
    found = find(link, KEYS, refused)
    assert found.state == "refused"
    assert found.refused[0].detail.startswith("priority")


def test_all_models_are_asked_at_the_same_time(stack: Stack, link: Link) -> None:
    """Also those that nobody serves."""
    unserved = [Keys(f"unserved-{number}") for number in range(3)]
    asked = name()
    stack.send("unserved-1", body="1")
    stack.send(MODEL, body="1", correlation_id=asked)
    wait_for_state(link, KEYS, asked, "answered")
    found = find_in_each(link, [*unserved, KEYS], asked)
    assert [one.state for one in found] == ["unknown", "unknown", "unknown", "answered"]
    assert [one.batcher for one in found] == ["none", "none", "none", "answered"]
    stack.redis.delete(unserved[1].requests)


def test_unknown(stack: Stack, link: Link) -> None:
    found = find(link, KEYS, "nobody-sent-this")
    assert (found.state, found.batcher, found.not_seen) == ("unknown", "answered", [])
    assert "it was never sent to this model" in found.readings()
    assert where(stack, MODEL, "nobody-sent-this").returncode == 3


def test_what_cannot_be_asked(stack: Stack) -> None:
    unknown = where(stack, "no-such-model", "a")
    assert unknown.returncode == 1
    assert "is not registered" in unknown.stderr
    assert where(stack, MODEL, "two words").returncode == 2
    assert where(stack, MODEL, "a", "b").returncode == 2


def test_many_ask_at_once_while_requests_are_served(stack: Stack) -> None:
    """Each gets the answer to its own question, and requests are answered as ever."""
    found: dict[str, Whereabouts] = {}

    def ask(asked: str) -> None:
        own = Link(stack.url, name=asked)
        found[asked] = find(own, KEYS, asked)
        own.close()

    asked = [name() for _ in range(20)]
    threads = [threading.Thread(target=ask, args=(one,)) for one in asked]
    sent = [stack.send(MODEL, body="1", correlation_id=one) for one in asked[:10]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sent) == 10
    for one in asked[:10]:
        assert stack.result(MODEL, one)["status"] == "OK"
        assert found[one].state in ("waiting", "in flight", "answered", "unknown")
    assert {found[one].state for one in asked[10:]} == {"unknown"}
    assert {one.batcher for one in found.values()} == {"answered"}
    assert all(stack.redis.pttl(key) > 0 for key in stack.redis.scan_iter(KEYS.answer("*")))


def test_a_full_redis(stack: Stack, link: Link) -> None:
    """The batcher cannot be asked: that is told, and what is answered is found all the same."""
    asked = name()
    stack.send(MODEL, body="1", correlation_id=asked)
    wait_for_state(link, KEYS, asked, "answered")
    stack.redis.config_set("maxmemory", 1)
    try:
        found = find(link, KEYS, asked)
    finally:
        stack.redis.config_set("maxmemory", 0)
    assert (found.state, found.batcher) == ("answered", "silent")
    assert "Redis is full" in found.not_seen[0]


# --- other kinds of models ---------------------------------------------------------------------------------


def test_behind_a_request_of_its_sequence(stack: Stack, link: Link, tmp_path: Path) -> None:
    """The first request of a sequence is in flight at a worker that is frozen; the second waits for it."""
    keys = Keys("Folding")
    stack.serve("stateful.py:Folding")
    worker = stack.served_by("Folding")
    worker.freeze()
    try:
        first, second = name(), name()
        stack.send("Folding", body="1", correlation_id=first, sequence_id="s", sequence_start="1")
        stack.send("Folding", body="2", correlation_id=second, sequence_id="s")
        wait_for_state(link, keys, first, "in flight")
        (waiting,) = wait_for_state(link, keys, second, "waiting").waiting
        assert waiting.why == f"it waits for an earlier request of its sequence, {first}"
        assert waiting.sequence == "s"
    finally:
        worker.thaw()
    assert stack.result("Folding", second)["status"] == "OK"


def test_streaming(stack: Stack, link: Link) -> None:
    keys, asked = Keys("Chain"), name()
    stack.serve("stepping.py:Chain")
    stack.send(
        "Chain",
        body=json.dumps({"length": 100_000, "step_s": 0.002}),
        correlation_id=asked,
        stream=1,
        reply_to=asked,
    )
    found = wait_for_state(link, keys, asked, "streaming")
    assert found.in_flight[0].chunks
    stack.send("Chain", withdraw=asked)
    wait_for_state(link, keys, asked, "unknown")  # its results are on a reply stream


def test_suspect_and_then_dead(stack: Stack, link: Link, tmp_path: Path) -> None:
    """A request that ends its process each time is given up."""
    keys, asked = Keys("Curable"), name()
    stack.serve("faulty.py:Curable")
    cause = tmp_path / "cause"
    cause.touch()
    stack.send("Curable", body=json.dumps({"cause": str(cause)}), correlation_id=asked)
    found = wait_for_state(link, keys, asked, "dead")
    (letter,) = found.dead
    assert letter.id == stack.redis.xrange(keys.dead)[0][0].decode()
    assert letter.attempts >= 2
    assert find(link, keys, asked, with_dead=False).state == "answered"  # ABORTED, which nobody has read
    cause.unlink()
    assert carpool(stack.url, "dead", "replay", "Curable", letter.id).returncode == 0
    assert stack.result("Curable", asked)["status"] == "OK"
    assert find(link, keys, asked).state == "unknown"


# --- the detail --------------------------------------------------------------------------------------------


def test_detail_is_published_only_while_somebody_looks(stack: Stack, link: Link, busy: Path) -> None:
    """It has what waits by lane, tenant and priority, batches, and errors; and expires when nobody looks."""
    wait_until(lambda: read_detail(link, KEYS) is None, description="nobody looks, as in tests before")
    for number in range(4):
        stack.send(
            MODEL, body="1", correlation_id=name(), lane="wide", tenant=f"t{number % 2}", priority=number
        )
    stack.send(MODEL, body="1", correlation_id=name(), priority="none")

    def detail() -> ModelDetail | None:
        watch(link, KEYS)
        found = read_detail(link, KEYS)
        has_all = found is not None and sum(one.waiting for one in found.priorities) == 4 and found.errors
        return found if has_all else None

    found = wait_until(detail, description="the detail of all of them is published")
    assert found is not None
    (wide,) = [lane for lane in found.lanes if lane.lane == "wide"]
    assert wide.waiting == 4
    assert {(tenant.tenant, tenant.waiting) for tenant in found.tenants if tenant.tenant} == {
        ("t0", 2),
        ("t1", 2),
    }
    assert [(one.priority, one.waiting) for one in found.priorities] == [(3, 1), (2, 1), (1, 1), (0, 1)]
    assert found.errors[0].source == "batcher"
    assert found.errors[0].status == "INVALID_ARGUMENT"
    assert not found.is_partial

    busy.touch()
    stack.wait_until_idle(MODEL)

    def after() -> ModelDetail | None:
        found = detail_of(link)
        return found if found is not None and any(one.lane == "wide" for one in found.batches) else None

    found = wait_until(after, description="the batches are in the detail")
    assert found is not None
    batch = next(one for one in found.batches if one.lane == "wide")
    assert batch.worker in stack.live_workers(MODEL)
    assert batch.settled_us >= batch.dispatched_us
    assert batch.reason
    assert found.learned
    stack.redis.delete(KEYS.watched)
    wait_until(lambda: read_detail(link, KEYS) is None, description="nobody looks, and it expires")


def detail_of(link: Link) -> ModelDetail | None:
    watch(link, KEYS)
    return read_detail(link, KEYS)


# --- without a batcher; without a worker -------------------------------------------------------------------


def test_without_a_worker_and_then_without_a_batcher(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        batcher = stack.batcher()
        worker = stack.worker("plain.py:Echo")
        stack.wait_for_model("Echo")
        keys, own = Keys("Echo"), Link(stack.url, name="asks")
        worker.terminate()
        waiting = name()
        stack.send("Echo", body="1", correlation_id=waiting)
        by_entry = stack.send("Echo", body="2")

        def why() -> str:
            found = find(own, keys, waiting)
            return found.waiting[0].why if found.waiting else ""

        wait_until(lambda: "no model process takes batches" in why(), description="the reason is known")
        batcher.terminate()
        found = find(own, keys, waiting)
        assert (found.state, found.batcher) == ("unknown", "none")
        assert "no batcher is active" in found.not_seen[0]
        assert "it waits" in found.readings()
        assert find(own, keys, by_entry).state == "waiting"
        assert "no batcher is active" in where(stack, "Echo", waiting).stdout
        own.close()


def test_in_flight_without_a_batcher(tmp_path: Path, gate: Path) -> None:
    """The batches in flight are read; and so is, once it is there, the result."""
    with Stack(tmp_path) as stack:
        batcher = stack.batcher()
        stack.worker("plain.py:Echo")
        stack.wait_for_model("Echo")
        keys, own, asked = Keys("Echo"), Link(stack.url, name="asks"), name()
        other = {"correlation_id": name(), "body": json.dumps({"gate": str(gate)})}
        stack.send_packed("Echo", [other, {"correlation_id": asked, "body": "1"}])
        wait_until(lambda: stack.pending("Echo"), description="a worker has the batch")
        batcher.terminate()
        found = find(own, keys, asked)
        assert (found.state, found.batcher) == ("in flight", "none")
        (one,) = found.in_flight
        assert (one.position, one.size, one.deliveries) == (1, 2, 1)
        assert one.process in stack.live_workers("Echo")
        gate.touch()
        assert wait_for_state(own, keys, asked, "answered").results[0].kind == "list"
        own.close()


def test_a_batcher_that_does_not_answer(stack: Stack, link: Link) -> None:
    """It hangs: that is told, and results and dead letters are looked at all the same."""
    asked = name()
    stack.send(MODEL, body="1", correlation_id=asked)
    wait_for_state(link, KEYS, asked, "answered")
    batcher = stack.active_batcher(MODEL)
    stack.redis.persist(KEYS.batcher)  # it keeps the lease
    batcher.freeze()
    try:
        found = find(link, KEYS, asked, timeout_s=0.05)
        assert (found.state, found.batcher) == ("answered", "silent")
        assert "did not answer within 0.05 s" in found.not_seen[0]
    finally:
        batcher.thaw()
