"""preserve_ordering: results are delivered in the order in which requests arrived, in all circumstances."""

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
class Expected:
    """What must be true of one request."""

    ticket: str
    done: bool = False  # it has a result, delivered or withheld
    lost: bool = False  # its entry was deleted: it gets no result
    freed: bool = False  # and its ticket was freed: no result is withheld for it any more


class OrderedResults(RuleBasedStateMachine):
    """The operations of batcher and worker on a real Redis, in any order, against a simple model.

    At any time exactly those results are delivered whose request is done, as are all requests before it.
    """

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.redis: Any = Redis.from_url(self.url, protocol=2)
        self.redis.flushall()
        self.keys = Keys("m")
        self.link = Link(self.url, name="batcher")
        self.batcher = BatcherStore(self.link, self.keys)
        self.worker = WorkerStore(Link(self.url, name="worker"), self.keys)
        self.worker.register({"max_batch_size": "4"})
        self.requests: dict[str, Expected] = {}  # by correlation ID, in order of arrival
        self.entries = EntryTable()  # what the batcher has read
        self.fetched: list[Batch] = []
        self.read_until = "0-0"
        self.number = 0

    def teardown(self) -> None:
        if not self.url:
            return
        self.read()
        while self.waiting():
            self.dispatch_and_fetch(self.waiting()[:4])
        while self.fetched:
            self.commit(0)
        self.batcher.release()
        delivered = self.delivered()
        assert delivered == [name for name, request in self.requests.items() if not request.lost]
        assert not self.redis.exists(self.keys.order, self.keys.held), "no ticket is left"
        self.link.close()
        self.redis.close()

    # --- rules ---------------------------------------------------------------------------------------------

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
        for position, request in enumerate(requests):
            self.requests[str(request["correlation_id"])] = Expected(ticket_of(entry_id, position))

    @rule()
    def read(self) -> None:
        """The batcher reads what arrived, and admits it."""
        entries = self.redis.xrange(self.keys.requests, f"({self.read_until}", "+")
        self.admit([(name.decode(), fields) for name, fields in entries if name.decode() not in self.entries])

    @rule()
    def take_over(self) -> None:
        """Another batcher takes over, and reads everything again."""
        self.entries.clear()
        self.read_until = "0-0"
        self.read()

    def admit(self, entries: Iterable[tuple[str, dict[bytes, bytes]]]) -> None:
        read = []
        for entry_id, fields in entries:
            self.read_until = entry_id
            flat = [part for pair in fields.items() for part in pair]
            entry, requests = decode_entry(entry_id.encode(), flat, ModelSettings())
            for position, request in enumerate(requests):
                assert type(request) is Request
                request.ticket = request.ticket or ticket_of(entry.id, position)
                assert request.ticket == self.requests[request.correlation_id].ticket
            self.entries[entry.id] = entry
            read.append(entry)
        self.batcher.admit(read)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def dispatch(self, data: st.DataObject) -> None:
        """Some waiting requests are dispatched, in any order."""
        chosen = st.lists(st.sampled_from(self.waiting()), min_size=1, max_size=4, unique_by=id)
        self.dispatch_and_fetch(data.draw(chosen))

    def dispatch_and_fetch(self, requests: list[Request]) -> None:
        outcome = self.batcher.dispatch([Dispatch(requests, "full", "")], TTL_MS)
        self.entries.update_from(outcome.entries)
        if (batch := self.worker.fetch("w", None)) is not None:
            self.fetched.append(batch)

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9))
    def commit(self, index: int) -> None:
        """Any batch is committed."""
        batch = self.fetched.pop(index % len(self.fetched))
        results = all_done(batch, b"1")
        self.worker.commit("w", batch, results, [], 1)
        for request in batch.requests:
            self.requests[request.correlation_id].done = True

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9), position=st.integers(0, 9))
    def expire_in_flight(self, index: int, position: int) -> None:
        """The batcher answers a request of a batch in flight."""
        batch = self.fetched[index % len(self.fetched)]
        position %= len(batch.requests)
        request = batch.requests[position]
        result = Result(request.correlation_id, DEADLINE_EXCEEDED)
        answer = Answer(position, Address.of(request), result)
        self.batcher.expire_in_flight(batch.id, [answer], TTL_MS)
        self.requests[request.correlation_id].done = True

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9))
    def redeliver(self, index: int) -> None:
        """A worker died: another reclaims the oldest batch, and answers one request ahead."""
        reclaimed = self.worker.reclaim("w", 0)
        assert reclaimed is not None
        batch, answered, _ = reclaimed
        (place,) = [place for place, fetched in enumerate(self.fetched) if fetched.id == batch.id]
        self.fetched[place] = batch
        unanswered = [position for position in range(len(batch.requests)) if position not in answered]
        if unanswered:
            position = unanswered[index % len(unanswered)]
            request = batch.requests[position]
            result = Result(request.correlation_id, INTERNAL, detail="x")
            self.worker.answer("w", batch, [Answer(position, Address.of(request), result)], None)
            self.requests[request.correlation_id].done = True

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Some requests are answered while they wait."""
        refused = data.draw(st.lists(st.sampled_from(self.waiting()), min_size=1, max_size=3, unique_by=id))
        refusals = [
            Refusal(
                request.entry, request.correlation_id, request.reply_to, request.content_type, CANCELLED,
                "x", "x", request,
            )
            for request in refused
        ]  # fmt: skip
        changes = self.batcher.refuse(refusals, [], TTL_MS)
        self.entries.update_from(changes)
        for request in refused:
            self.requests[request.correlation_id].done |= request.entry not in changes.missing

    @precondition(lambda self: self.entries)
    @rule(index=st.integers(0, 9))
    def delete(self, index: int) -> None:
        """A producer withdraws an entry by XDEL."""
        entry = list(self.entries.values())[index % len(self.entries)]
        if self.redis.xdel(self.keys.requests, entry.id):
            for request in entry.requests:
                self.requests[request.correlation_id].lost = True

    @rule()
    def release(self) -> None:
        """The batcher frees lost tickets."""
        self.batcher.release()
        for request in self.requests.values():
            request.freed = request.lost
            if not (request.done or request.freed):
                break

    # --- what must hold ------------------------------------------------------------------------------------

    def waiting(self) -> list[Request]:
        return [request for entry in self.entries.values() for request in entry.requests]

    def delivered(self) -> list[str]:
        """Correlation IDs of all delivered results, in order of arrival. Each stream must be in order."""
        found: list[str] = []
        for name in filter(None, REPLIES):
            of_stream = ids_on_stream(self.redis, self.keys.replies(name))
            assert of_stream == sorted(of_stream, key=_number), name
            found += of_stream
        for key in self.redis.keys(self.keys.result("*")):
            found += [json.loads(result)["correlation_id"] for result in self.redis.lrange(key, 0, -1)]
        return sorted(found, key=_number)

    @invariant()
    def delivered_are_those_done_without_an_unfinished_one_before(self) -> None:
        expected: list[str] = []
        for name, request in self.requests.items():
            if not (request.done or request.freed):
                break
            expected += [name] if request.done else []
        assert self.delivered() == expected


def all_done(batch: Batch, body: bytes) -> dict[int, tuple[Address, Result]]:
    """A result for each request of a batch, as a worker commits them."""
    return {
        position: (Address.of(request), Result(request.correlation_id, body=body))
        for position, request in enumerate(batch.requests)
    }


def ids_on_stream(redis: Any, key: str) -> list[str]:
    """The correlation IDs of the results on a reply stream."""
    entries = redis.xrange(key)
    return [result["correlation_id"] for _, raw in entries for result in msgpack.unpackb(raw[b"results"])]


def _number(correlation_id: str) -> int:
    return int(correlation_id[1:])


OrderedResults.TestCase.settings = hypothesis_settings(
    max_examples=200, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_operations_in_any_order_keep_the_order_of_results(server: Path) -> None:
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        OrderedResults.url = embedded.url
        case: Any = OrderedResults.TestCase
        case().runTest()


def test_results_withheld_behind_one_are_delivered_by_several_scripts(server: Path) -> None:
    """One script delivers a thousand at most."""
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        redis: Any = Redis.from_url(embedded.url, protocol=2)
        keys = Keys("m")
        batcher = BatcherStore(Link(embedded.url, name="batcher"), keys)
        worker = WorkerStore(Link(embedded.url, name="worker"), keys)
        worker.register({"max_batch_size": "4096"})
        packed = [{"correlation_id": f"r{number}", "body": b"", "reply_to": "all"} for number in range(2501)]
        entry_id = redis.xadd(keys.requests, {"requests": msgpack.packb(packed)})
        (_, flat), *_ = redis.xrange(keys.requests)
        flat = [part for pair in flat.items() for part in pair]
        entry, requests = decode_entry(entry_id, flat, ModelSettings())
        for position, request in enumerate(entry.requests):
            request.ticket = ticket_of(entry.id, position)
        assert batcher.admit([entry]) == len(requests)
        first, rest = entry.requests[:1], entry.requests[1:]
        batcher.dispatch([Dispatch(first, "full", ""), Dispatch(rest, "full", "")], TTL_MS)
        early, late = worker.fetch("w", None), worker.fetch("w", None)
        assert early is not None and late is not None
        for batch, delivered in ((late, 0), (early, 2501)):
            results = all_done(batch, b"")
            worker.commit("w", batch, results, [], 1)
            assert ids_on_stream(redis, keys.replies("all")) == [f"r{number}" for number in range(delivered)]
        assert not redis.exists(keys.order, keys.held)
        redis.close()


def test_one_script_delivers_a_few_megabytes_at_most(server: Path) -> None:
    """Redis serves nothing else meanwhile; the next script delivers the rest."""
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        redis: Any = Redis.from_url(embedded.url, protocol=2)
        keys = Keys("m")
        batcher = BatcherStore(Link(embedded.url, name="batcher"), keys)
        worker = WorkerStore(Link(embedded.url, name="worker"), keys)
        worker.register({"max_batch_size": "32"})
        packed = [{"correlation_id": f"r{number}", "body": b"", "reply_to": "all"} for number in range(25)]
        entry_id = redis.xadd(keys.requests, {"requests": msgpack.packb(packed)})
        flat = [b"requests", msgpack.packb(packed)]
        entry, _ = decode_entry(entry_id, flat, ModelSettings())
        for position, request in enumerate(entry.requests):
            request.ticket = ticket_of(entry.id, position)
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
        assert ids_on_stream(redis, keys.replies("all")) == [f"r{number}" for number in range(25)]
        redis.close()


# --- on a running stack ------------------------------------------------------------------------------------

MODEL: Final = "InOrder"


def replied(stack: Stack, model: str) -> list[str]:
    """The correlation IDs on the reply stream, in order."""
    return [result["correlation_id"] for result in stack.replies(model, "all")]


def wait_for_results(
    stack: Stack, names: Sequence[str], timeout_s: float = 30.0, model: str = MODEL
) -> list[str]:
    """The correlation IDs on the reply stream, once there are as many as `names`."""
    wait_until(
        lambda: len(stack.replies(model, "all")) >= len(names),
        description=f"{len(names)} results",
        timeout_s=timeout_s,
    )
    return replied(stack, model)


def test_order_holds_through_expiry_withdrawal_and_deaths(stack: Stack) -> None:
    """Also through lanes, priorities, packed entries, and batches of any execution time."""
    batchers = [stack.batcher(), stack.batcher()]
    workers = [stack.worker("timed.py:InOrder", "--lease-ms", "900") for _ in range(3)]
    stack.wait_for_model(MODEL, workers=3)
    chance = random.Random(7)
    names: list[str] = []
    withdrawn: set[str] = set()
    for round_ in range(60):
        requests = []
        for number in range(chance.choice((1, 1, 3, 9))):
            request: dict[str, Any] = {
                "correlation_id": f"n{round_}.{number}",
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
        sent = [str(request["correlation_id"]) for request in requests]
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
    answered = wait_for_results(stack, expected)
    if len(answered) > len(expected):  # some of a deleted entry's requests had been dispatched before
        answered = [name for name in answered if name not in withdrawn]
    assert answered == expected
    assert sum(batcher.alive for batcher in batchers) == 1
    stack.wait_until_idle(MODEL)
    assert not stack.redis.exists(Keys(MODEL).order, Keys(MODEL).held)


def test_ordering_can_be_turned_on_and_off_while_requests_wait(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"

    def send(name: str, body: Any) -> None:
        stack.send(model, correlation_id=name, body=json.dumps(body), reply_to="all")

    def names() -> list[str]:
        return replied(stack, model)

    stack.configure(model, preserve_ordering="true")
    send("slow", {"gate": str(gate)})
    send("fast", 7)
    wait_until(
        lambda: withheld(stack, keys) == 1,
        description="the second result is withheld",
    )
    assert names() == []
    stack.configure(model, preserve_ordering="false")
    send("later", 7)
    wait_until(lambda: names() == ["later"], description="a new result is delivered at once")
    gate.touch()
    wait_until(
        lambda: names() == ["later", "slow", "fast"], description="requests with tickets keep their order"
    )
    assert not stack.redis.exists(keys.order, keys.held), "no ticket is left"


def test_withheld_results_count_as_waiting(stack: Stack) -> None:
    """Otherwise they would fill Redis's memory behind one slow request."""
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
            description="only the slow request is not done",
        )
    refused = stack.result(model, sent[-1])
    assert refused["status"] == "RESOURCE_EXHAUSTED"
    assert "results are withheld until earlier ones are done" in refused["detail"]
    wait_until(
        lambda: json.loads(stack.redis.get(keys.report))["gauges"]["held"] == len(sent) - 1,
        description="the batcher reports how many are withheld",
    )
    gate.touch()
    assert [stack.result(model, entry_id)["status"] for entry_id in sent[:-1]] == ["OK"] * (len(sent) - 1)


def withheld(stack: Stack, keys: Keys) -> int:
    """How many results are withheld."""
    return sum(value.startswith(b"r") for value in stack.redis.hvals(keys.held))


def test_delivered_results_no_longer_count_as_waiting(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="5")
    sent = [stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")]
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="the slow request is in flight")
    while withheld(stack, keys) < 3:
        sent.append(stack.send(model, body="7", reply_to="all"))
        wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="no request waits")
        wait_until(lambda: withheld(stack, keys) >= len(sent) - 2, description="all but the last are done")
    wait_until(
        lambda: json.loads(stack.redis.get(keys.report))["gauges"]["held"] >= 3,
        description="the batcher has counted them",
    )
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == len(sent), description="all are delivered")
    stack.send_packed(model, [{"correlation_id": f"r{number}", "body": b"7"} for number in range(5)])
    assert [stack.result(model, f"r{number}")["status"] for number in range(5)] == ["OK"] * 5


def test_batcher_that_takes_over_a_full_queue_refuses_none_of_it(stack: Stack) -> None:
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_queue_size="20")
    sent = [stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")]
    while not stack.replies(model, "all"):
        sent.append(stack.send(model, body="7", reply_to="all"))
        wait_until(
            lambda: stack.redis.llen(keys.order) == len(sent) or stack.replies(model, "all"),
            description="the request has a ticket, or was refused",
        )
    stack.active_batcher(model).kill()
    second = stack.batcher()
    second.wait_for("batcher active")
    gate.touch()
    assert wait_for_results(stack, sent, model=model) == [sent[-1], *sent[:-1]]
    statuses = [result["status"] for result in stack.replies(model, "all")]
    assert statuses == ["RESOURCE_EXHAUSTED", *["OK"] * (len(sent) - 1)]


def test_withheld_results_are_delivered_although_redis_is_full(stack: Stack) -> None:
    """Several scripts deliver them, and each must begin with a write that Redis allows then."""
    model = stack.serve("plain.py:Echo")
    stack.worker("plain.py:Echo")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true", max_batch_size="1")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="the slow request is in flight")
    stack.configure(model, max_batch_size="500")
    names = [f"n{number}" for number in range(2500)]
    body = json.dumps("x" * 2000).encode()
    stack.send_packed(
        model, [{"correlation_id": name, "body": body} for name in names], reply_to="all"
    )  # in batches behind it, or on the other worker
    wait_until(lambda: withheld(stack, keys) >= 2000, description="most are withheld")
    stack.redis.config_set("maxmemory", stack.redis.info("memory")["used_memory"] // 2)
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == 2501, description="all are delivered")
    assert replied(stack, model) == ["slow", *names]
    assert not stack.events("batcher failed, starting over")
    assert not stack.redis.exists(keys.order, keys.held)


@pytest.mark.parametrize("name", ["order", "held"])
@pytest.mark.parametrize("in_order", ["true", "false"])
def test_key_of_another_type_costs_the_order_but_no_result(stack: Stack, name: str, in_order: str) -> None:
    model = stack.serve("plain.py:Single")
    keys = Keys(model)
    stack.configure(model, preserve_ordering=in_order, max_queue_size="3")
    stack.redis.set(getattr(keys, name), "x")
    stack.redis.delete(keys.report)
    wait_until(lambda: stack.redis.exists(keys.report), description="the batcher has taken a snapshot since")
    for _ in range(5):
        assert stack.result(model, stack.send(model, body="7"))["status"] == "OK"
    assert not stack.events("batcher failed, starting over")


def test_forged_ticket_costs_no_result(stack: Stack) -> None:
    """A producer may send an entry as if it was put back, with the ticket of another's withheld result."""
    model = stack.serve("plain.py:Single")
    stack.worker("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all", correlation_id="slow")
    wait_until(lambda: stack.redis.xlen(keys.batches) == 1, description="the slow request is in flight")
    behind = stack.send(model, body="7", reply_to="all", correlation_id="behind")
    wait_until(lambda: withheld(stack, keys) == 1, description="the result of the one behind it is withheld")
    forged = [{"correlation_id": "forged", "body": b"7", "reply_to": "all"}]
    stack.send_packed(model, forged, arrival=1, slots=f"{behind}:0")
    wait_until(lambda: stack.redis.xlen(keys.requests) == 0, description="the forged one is dispatched")
    gate.touch()
    wait_until(lambda: len(stack.replies(model, "all")) == 3, description="all results are delivered")
    names = replied(stack, model)
    assert sorted(names) == ["behind", "forged", "slow"]
    assert names.index("slow") < names.index("behind")
    assert not stack.redis.exists(keys.order, keys.held)


def test_entries_and_batches_known_to_be_in_redis_are_not_looked_up(stack: Stack) -> None:
    """A lookup costs Redis the bytes of a batch, a few times a second."""
    model = stack.serve("plain.py:Single")
    keys, gate = Keys(model), stack.home / "gate"
    stack.configure(model, preserve_ordering="true")
    stack.send(model, body=json.dumps({"gate": str(gate)}), reply_to="all")
    waiting = [stack.send(model, body="7", reply_to="all") for _ in range(3)]
    wait_until(lambda: stack.redis.llen(keys.order) == 4, description="all have tickets")
    stack.redis.config_resetstat()
    stack.redis.delete(keys.report)
    wait_until(lambda: stack.redis.exists(keys.report), description="the batcher has taken a snapshot since")
    assert "cmdstat_xrange" not in stack.redis.info("commandstats")
    stack.redis.xdel(keys.requests, waiting[-1])
    gate.touch()
    wait_until(lambda: not stack.redis.exists(keys.order), description="the lost ticket is freed, too")
    assert len(stack.replies(model, "all")) == 3
