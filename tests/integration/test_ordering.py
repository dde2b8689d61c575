"""preserve_ordering: results come in the order in which requests arrived, whatever happens on their way."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from redis import Redis

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED, INTERNAL
from carpool.keys import Keys
from carpool.messages import Batch, Dispatch, Refusal, Request, Result
from carpool.model_settings import ModelSettings
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link
from carpool.store.results import Address, Answer
from carpool.store.worker import WorkerStore
from carpool.wire.requests import decode_entry, ticket_of
from carpool_batcher.entries import EntryTable
from carpool_cli.local.embedded import EmbeddedRedis
from support.stack import Stack
from support.waiting import wait_until

TTL_MS: Final = 60_000
REPLIES: Final = (None, "near", "far")  # a list of its own, or one of two reply streams


@dataclass
class Known:
    """What the account knows of one request."""

    ticket: str
    done: bool = False
    lost: bool = False  # its entry was deleted: nobody answers it
    freed: bool = False  # and nobody waits for it any more


class InOrder(RuleBasedStateMachine):
    """The moves of batcher and worker on a real Redis, in any order, against a plain account.

    What is delivered is always just the requests that are done and have only such before them.
    """

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.redis: Any = Redis.from_url(self.url, protocol=2)
        self.redis.flushall()
        self.keys = Keys("m")
        self.batcher = BatcherStore(Link(self.url, name="batcher"), self.keys)
        self.worker = WorkerStore(Link(self.url, name="worker"), self.keys)
        self.worker.register({"max_batch_size": "4"})
        self.account: dict[str, Known] = {}  # by correlation ID, in order of arrival
        self.entries = EntryTable()  # what the batcher has read
        self.in_hand: list[Batch] = []
        self.read_until = "0-0"
        self.number = 0

    def teardown(self) -> None:
        if not self.url:
            return
        self.read()
        while self.waiting():
            self.send_off(self.waiting()[:4])
        while self.in_hand:
            self.commit(0)
        self.batcher.release()
        seen, answered = self.delivered(), [name for name, one in self.account.items() if not one.lost]
        assert seen == answered, f"{seen} for {answered}"
        assert not self.redis.exists(self.keys.order, self.keys.held), "nothing stays behind"
        self.batcher.close()
        self.redis.close()

    # --- what happens --------------------------------------------------------------------------------------

    @rule(replies=st.lists(st.sampled_from(REPLIES), min_size=1, max_size=5), packed=st.booleans())
    def arrive(self, replies: list[str | None], packed: bool) -> None:
        """An entry with one request, or several."""
        requests = []
        for reply_to in replies if packed else replies[:1]:
            self.number += 1
            request = {"correlation_id": f"r{self.number}", "body": b"1"}
            requests.append(request if reply_to is None else {**request, "reply_to": reply_to})
        fields = {"requests": msgpack.packb(requests)} if packed else requests[0]
        entry_id = self.redis.xadd(self.keys.requests, fields).decode()
        for at, one in enumerate(requests):
            name = str(one["correlation_id"])
            self.account[name] = Known(ticket_of(entry_id, at))

    @rule()
    def read(self) -> None:
        """The batcher reads on, and those who arrived take their tickets."""
        entries = self.redis.xrange(self.keys.requests, f"({self.read_until}", "+")
        self.admit([(name.decode(), fields) for name, fields in entries if name.decode() not in self.entries])

    @rule()
    def take_over(self) -> None:
        """Another batcher begins anew."""
        self.entries.clear()
        self.read_until = "0-0"
        self.read()

    def admit(self, entries: Iterable[tuple[str, dict[bytes, bytes]]]) -> None:
        read = []
        for entry_id, fields in entries:
            self.read_until = entry_id
            flat = [part for pair in fields.items() for part in pair]
            entry, requests = decode_entry(entry_id.encode(), flat, ModelSettings())
            for at, request in enumerate(requests):
                assert type(request) is Request
                request.ticket = request.ticket or ticket_of(entry.id, at)
                assert request.ticket == self.account[request.correlation_id].ticket
            self.entries[entry.id] = entry
            read.append(entry)
        self.batcher.admit(read)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        """Some leave, in an order of the scheduler's choice."""
        some = st.lists(st.sampled_from(self.waiting()), min_size=1, max_size=4, unique_by=id)
        self.send_off(data.draw(some))

    def send_off(self, requests: list[Request]) -> None:
        outcome = self.batcher.dispatch([Dispatch(requests, "full", "")], TTL_MS)
        self.entries.update_from(outcome.entries)
        if (batch := self.worker.fetch("w", None)) is not None:
            self.in_hand.append(batch)

    @precondition(lambda self: self.in_hand)
    @rule(which=st.integers(0, 9))
    def commit(self, which: int) -> None:
        """A batch is done, in whatever order."""
        batch = self.in_hand.pop(which % len(self.in_hand))
        results = all_done(batch, b"1")
        self.worker.commit("w", batch, results, [], 1)
        for one in batch.requests:
            self.account[one.correlation_id].done = True

    @precondition(lambda self: self.in_hand)
    @rule(which=st.integers(0, 9), at=st.integers(0, 9))
    def expire_in_flight(self, which: int, at: int) -> None:
        """A batcher answers one of a batch in flight."""
        batch = self.in_hand[which % len(self.in_hand)]
        position = at % len(batch.requests)
        one = batch.requests[position]
        result = Result(one.correlation_id, DEADLINE_EXCEEDED)
        answer = Answer(position, Address.of(one), result)
        self.batcher.expire_in_flight(batch.id, [answer], TTL_MS)
        self.account[one.correlation_id].done = True

    @precondition(lambda self: self.in_hand)
    @rule(which=st.integers(0, 9))
    def redeliver(self, which: int) -> None:
        """Its worker died: another takes the oldest batch over, and makes one result durable."""
        reclaimed = self.worker.reclaim("w", 0)
        assert reclaimed is not None
        batch, answered, _ = reclaimed
        (at,) = [at for at, one in enumerate(self.in_hand) if one.id == batch.id]
        self.in_hand[at] = batch
        left = [position for position in range(len(batch.requests)) if position not in answered]
        if left:
            position = left[which % len(left)]
            one = batch.requests[position]
            result = Result(one.correlation_id, INTERNAL, detail="x")
            self.worker.answer("w", batch, [Answer(position, Address.of(one), result)], None)
            self.account[one.correlation_id].done = True

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Some are answered while they wait."""
        some = data.draw(st.lists(st.sampled_from(self.waiting()), min_size=1, max_size=3, unique_by=id))
        refusals = [
            Refusal(one.entry, one.correlation_id, one.reply_to, one.content_type, CANCELLED, "x", "x", one)
            for one in some
        ]
        changes = self.batcher.refuse(refusals, [], TTL_MS)
        self.entries.update_from(changes)
        for one in some:
            self.account[one.correlation_id].done |= one.entry not in changes.gone

    @precondition(lambda self: self.entries)
    @rule(which=st.integers(0, 9))
    def delete(self, which: int) -> None:
        """A producer takes an entry back, without a word."""
        entry = list(self.entries.values())[which % len(self.entries)]
        if self.redis.xdel(self.keys.requests, entry.id):
            for request in entry.requests:
                self.account[request.correlation_id].lost = True

    @rule()
    def release(self) -> None:
        """Now and then the batcher frees what was lost."""
        self.batcher.release()
        for known in self.account.values():
            known.freed = known.lost
            if not (known.done or known.freed):
                break

    # --- the account ---------------------------------------------------------------------------------------

    def waiting(self) -> list[Request]:
        return [request for entry in self.entries.values() for request in entry.requests]

    def delivered(self) -> list[str]:
        """All that was delivered, in order of arrival; each stream must be so by itself."""
        found: list[str] = []
        for name in filter(None, REPLIES):
            entries = self.redis.xrange(self.keys.replies(name))
            of_stream = [
                one["correlation_id"] for _, raw in entries for one in msgpack.unpackb(raw[b"results"])
            ]
            assert of_stream == sorted(of_stream, key=_number), name
            found += of_stream
        for key in self.redis.keys(self.keys.result("*")):
            found += [json.loads(one)["correlation_id"] for one in self.redis.lrange(key, 0, -1)]
        return sorted(found, key=_number)

    @invariant()
    def what_is_delivered_is_what_may_be(self) -> None:
        may: list[str] = []
        for name, known in self.account.items():
            if not (known.done or known.freed):
                break
            may += [name] if known.done else []
        assert self.delivered() == may


def all_done(batch: Batch, body: bytes) -> dict[int, tuple[Address, Result]]:
    """A result for each request of a batch, as a worker commits them."""
    return {
        at: (Address.of(one), Result(one.correlation_id, body=body)) for at, one in enumerate(batch.requests)
    }


def _number(correlation_id: str) -> int:
    return int(correlation_id[1:])


InOrder.TestCase.settings = hypothesis_settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_what_is_delivered_is_what_may_be(server: Path) -> None:
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        InOrder.url = embedded.url
        case: Any = InOrder.TestCase
        case().runTest()


def test_more_than_one_script_delivers(server: Path) -> None:
    """All that was held behind one is delivered when that is done, a thousand at a time."""
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        redis: Any = Redis.from_url(embedded.url, protocol=2)
        keys = Keys("m")
        batcher = BatcherStore(Link(embedded.url, name="batcher"), keys)
        worker = WorkerStore(Link(embedded.url, name="worker"), keys)
        worker.register({"max_batch_size": "4096"})
        packed = [{"correlation_id": f"r{at}", "body": b"", "reply_to": "all"} for at in range(2501)]
        entry_id = redis.xadd(keys.requests, {"requests": msgpack.packb(packed)})
        (_, flat), *_ = redis.xrange(keys.requests)
        flat = [part for pair in flat.items() for part in pair]
        entry, requests = decode_entry(entry_id, flat, ModelSettings())
        for at, one in enumerate(entry.requests):
            one.ticket = ticket_of(entry.id, at)
        assert batcher.admit([entry]) == len(requests)
        first, rest = entry.requests[:1], entry.requests[1:]
        batcher.dispatch([Dispatch(first, "full", ""), Dispatch(rest, "full", "")], TTL_MS)
        early, late = worker.fetch("w", None), worker.fetch("w", None)
        assert early is not None and late is not None
        for batch, delivered in ((late, 0), (early, 2501)):
            results = all_done(batch, b"")
            worker.commit("w", batch, results, [], 1)
            entries = redis.xrange(keys.replies("all"))
            names = [one["correlation_id"] for _, raw in entries for one in msgpack.unpackb(raw[b"results"])]
            assert names == [f"r{at}" for at in range(delivered)]
        assert not redis.exists(keys.order, keys.held)
        redis.close()


def test_one_script_delivers_a_few_megabytes(server: Path) -> None:
    """Redis serves nobody else meanwhile: what is left goes with the next."""
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        redis: Any = Redis.from_url(embedded.url, protocol=2)
        keys = Keys("m")
        batcher = BatcherStore(Link(embedded.url, name="batcher"), keys)
        worker = WorkerStore(Link(embedded.url, name="worker"), keys)
        worker.register({"max_batch_size": "32"})
        packed = [{"correlation_id": f"r{at}", "body": b"", "reply_to": "all"} for at in range(25)]
        entry_id = redis.xadd(keys.requests, {"requests": msgpack.packb(packed)})
        flat = [b"requests", msgpack.packb(packed)]
        entry, _ = decode_entry(entry_id, flat, ModelSettings())
        for at, one in enumerate(entry.requests):
            one.ticket = ticket_of(entry.id, at)
        batcher.admit([entry])
        first, rest = entry.requests[:1], entry.requests[1:]
        batcher.dispatch([Dispatch(first, "full", ""), Dispatch(rest, "full", "")], TTL_MS)
        early, late = worker.fetch("w", None), worker.fetch("w", None)
        assert early is not None and late is not None
        megabyte = b"x" * (1 << 20)
        results = all_done(late, megabyte)
        worker.commit("w", late, results, [], 1)
        slow = early.requests[0]
        expired = Answer(0, Address("all", slow.ticket), Result(slow.correlation_id, DEADLINE_EXCEEDED))
        batcher.expire_in_flight(early.id, [expired], TTL_MS)
        assert 0 < redis.hlen(keys.held) < 24
        batcher.release()
        entries = redis.xrange(keys.replies("all"))
        names = [one["correlation_id"] for _, raw in entries for one in msgpack.unpackb(raw[b"results"])]
        assert names == [f"r{at}" for at in range(25)]
        redis.close()


# --- on a running stack ------------------------------------------------------------------------------------

MODEL: Final = "InOrder"


def sent_and_answered(
    stack: Stack, names: Sequence[str], timeout_s: float = 30.0, model: str = MODEL
) -> list[str]:
    """The names on the reply stream, once there are as many."""
    wait_until(
        lambda: len(stack.replies(model, "all")) >= len(names),
        description=f"{len(names)} results",
        timeout_s=timeout_s,
    )
    return [one["correlation_id"] for one in stack.replies(model, "all")]


def test_whatever_happens_on_the_way(stack: Stack) -> None:
    """Lanes, priorities, packed entries, batches of any length, deadlines, withdrawals, deaths."""
    batchers = [stack.batcher(), stack.batcher()]
    workers = [stack.worker("timed.py:InOrder", "--lease-ms", "900") for _ in range(3)]
    stack.wait_for_model(MODEL, workers=3)
    chance = random.Random(7)
    names: list[str] = []
    withdrawn: set[str] = set()
    for round_ in range(60):
        requests = []
        for at in range(chance.choice((1, 1, 3, 9))):
            request: dict[str, Any] = {
                "correlation_id": f"n{round_}.{at}",
                "body": str(chance.choice((0, 0.001, 0.005, 0.03))).encode(),
                "reply_to": "all",
                "priority": chance.randrange(10),
                "lane": chance.choice(("", "a", "b")),
            }
            if chance.random() < 0.1:
                request["expiration"] = chance.choice((1, 40))
            requests.append(request)
        entry_id = (
            stack.send_packed(MODEL, requests) if len(requests) > 1 else stack.send(MODEL, **requests[0])
        )
        sent = [str(one["correlation_id"]) for one in requests]
        names += sent
        if round_ % 20 == 7:
            stack.send(MODEL, withdraw=sent[0])
        if round_ % 20 == 11 and stack.redis.xdel(Keys(MODEL).requests, entry_id):
            withdrawn |= set(sent)
        if round_ == 20:
            workers[0].kill()
        if round_ == 40:
            stack.active_batcher(MODEL).kill()
    expected = [name for name in names if name not in withdrawn]
    answered = sent_and_answered(stack, expected)
    if len(answered) > len(expected):  # parts of an entry that was deleted had left by then
        answered = [name for name in answered if name not in withdrawn]
    assert answered == expected
    assert sum(batcher.alive for batcher in batchers) == 1
    stack.wait_until_idle(MODEL)
    assert not stack.redis.exists(Keys(MODEL).order, Keys(MODEL).held)


def test_an_operator_may_turn_it_on_and_off(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"

    def send(name: str, body: Any) -> None:
        stack.send(model, correlation_id=name, body=json.dumps(body), reply_to="all")

    def names() -> list[str]:
        return [one["correlation_id"] for one in stack.replies(model, "all")]

    stack.configure(model, preserve_ordering="true")
    send("slow", {"gate": str(gate)})
    send("fast", 7)
    wait_until(
        lambda: any(one.startswith(b"r") for one in stack.redis.hvals(keys.held)),
        description="the second is done, and held",
    )
    assert names() == []
    stack.configure(model, preserve_ordering="false")
    send("later", 7)
    wait_until(lambda: names() == ["later"], description="what comes now need not wait")
    gate.touch()
    wait_until(lambda: names() == ["later", "slow", "fast"], description="what had tickets keeps its order")
    assert not stack.redis.exists(keys.order, keys.held), "nothing stays behind"


def test_results_that_are_held_count_as_waiting(stack: Stack) -> None:
    """Or memory would fill up behind one slow request."""
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="5")
    stack.send(model, body=json.dumps({"gate": str(gate)}))
    sent: list[str] = []
    while not (sent and stack.redis.exists(keys.result(sent[-1]))):
        sent.append(stack.send(model, body="7"))
        wait_until(
            lambda: stack.redis.xlen(keys.requests) == 0 and stack.redis.xlen(keys.batches) == 1,
            description="only the slow one is not done",
        )
    refused = stack.result(model, sent[-1])
    assert refused["status"] == "RESOURCE_EXHAUSTED"
    assert "results are held until those before them are done" in refused["detail"]
    wait_until(
        lambda: json.loads(stack.redis.get(keys.report))["gauges"]["held"] == len(sent) - 1,
        description="the batcher says how many are held",
    )
    gate.touch()
    assert [stack.result(model, one)["status"] for one in sent[:-1]] == ["OK"] * (len(sent) - 1)


def held(stack: Stack, keys: Keys) -> int:
    """How many results are held."""
    return sum(one.startswith(b"r") for one in stack.redis.hvals(keys.held))


def test_results_that_came_out_make_room_at_once(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="5")
    sent = [stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")]
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="it is in flight")
    while held(stack, keys) < 3:
        sent.append(stack.send(model, body="7", reply_to="all"))
        wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="nobody waits")
        wait_until(lambda: held(stack, keys) >= len(sent) - 2, description="all but one behind it are done")
    wait_until(
        lambda: json.loads(stack.redis.get(keys.report))["gauges"]["held"] >= 3,
        description="the batcher knows that they are held",
    )
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == len(sent), description="all are out")
    stack.send_packed(model, [{"correlation_id": f"r{at}", "body": b"7"} for at in range(5)])
    assert [stack.result(model, f"r{at}")["status"] for at in range(5)] == ["OK"] * 5


def test_who_takes_over_a_full_queue_refuses_nobody_in_it(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="20")
    sent = [stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")]
    while not stack.replies(model, "all"):
        sent.append(stack.send(model, body="7", reply_to="all"))
        wait_until(
            lambda: stack.redis.llen(keys.order) == len(sent) or stack.replies(model, "all"),
            description="it has a ticket, or the queue is full",
        )
    stack.active_batcher(model).kill()
    second = stack.batcher()
    second.wait_for("batcher active")
    gate.touch()
    assert sent_and_answered(stack, sent, model=model) == [sent[-1], *sent[:-1]]
    statuses = [one["status"] for one in stack.replies(model, "all")]
    assert statuses == ["RESOURCE_EXHAUSTED", *["OK"] * (len(sent) - 1)]


def test_a_full_redis_gets_rid_of_what_is_held(stack: Stack) -> None:
    """More than one script delivers: each must begin with what Redis allows then."""
    model = stack.serve("plain.py:Echo")
    stack.worker("plain.py:Echo")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_batch_size="1")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="it is in flight")
    stack.configure(model, max_batch_size="500")
    names = [f"n{at}" for at in range(2500)]
    body = json.dumps("x" * 2000).encode()
    stack.send_packed(
        model, [{"correlation_id": name, "body": body} for name in names], reply_to="all"
    )  # they ride behind it, or on the other worker
    wait_until(lambda: held(stack, keys) >= 2000, description="most are held")
    stack.redis.config_set("maxmemory", stack.redis.info("memory")["used_memory"] // 2)
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == 2501, description="all are out")
    assert [one["correlation_id"] for one in stack.replies(model, "all")] == ["slow", *names]
    assert not stack.events("batcher starts over")
    assert not stack.redis.exists(keys.order, keys.held)


@pytest.mark.parametrize("name", ["order", "held"])
@pytest.mark.parametrize("in_order", ["true", "false"])
def test_a_key_of_another_type_costs_the_order(stack: Stack, name: str, in_order: str) -> None:
    model = stack.serve("plain.py:Single")
    keys = Keys(model)
    stack.configure(model, preserve_ordering=in_order, max_queue_size="3")
    stack.redis.set(getattr(keys, name), "x")
    stack.redis.delete(keys.report)
    wait_until(lambda: stack.redis.exists(keys.report), description="the batcher has looked around since")
    for _ in range(5):
        assert stack.result(model, stack.send(model, body="7"))["status"] == "OK"
    assert not stack.events("batcher starts over")


def test_a_forged_slot_costs_nobody_a_result(stack: Stack) -> None:
    """An entry may say that it was put back, and name the ticket of another's result that is held."""
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="it is in flight")
    behind = stack.send(model, body="7", reply_to="all", correlation_id="behind")
    wait_until(lambda: held(stack, keys) == 1, description="the one behind it is done, and held")
    forged = [{"correlation_id": "forged", "body": b"7", "reply_to": "all"}]
    stack.send_packed(model, forged, arrival=1, slots=f"{behind}:0")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="it has left")
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == 3, description="all have their results")
    names = [one["correlation_id"] for one in stack.replies(model, "all")]
    assert sorted(names) == ["behind", "forged", "slow"]
    assert names.index("slow") < names.index("behind")
    assert not stack.redis.exists(keys.order, keys.held)


def test_what_is_known_to_be_there_is_not_looked_for(stack: Stack) -> None:
    """To look costs Redis the bytes of a batch, a few times a second."""
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")
    waiting = [stack.send(model, body="7", reply_to="all") for _ in range(3)]
    wait_until(lambda: stack.redis.llen(keys.order) == 4, description="all have slots")
    stack.redis.config_resetstat()
    stack.redis.delete(keys.report)
    wait_until(lambda: stack.redis.exists(keys.report), description="the batcher has looked around since")
    assert "cmdstat_xrange" not in stack.redis.info("commandstats")
    stack.redis.xdel(keys.requests, waiting[-1])
    gate.touch()
    wait_until(
        lambda: not stack.redis.exists(keys.order), description="the lost ticket is freed all the same"
    )
    assert len(stack.replies(model, "all")) == 3
