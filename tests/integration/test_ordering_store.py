"""preserve_ordering in Redis: what the scripts deliver and withhold, whatever batcher and worker do."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import hypothesis.strategies as st
import msgpack
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED, INTERNAL
from carpool.keys import Keys
from carpool.messages.batches import Batch, Dispatch
from carpool.messages.requests import RAW, Entry, Run
from carpool.messages.results import Refusal, Result, RunResults
from carpool.messages.settled import Executed
from carpool.model_settings import ModelSettings
from carpool.rows import Rows
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link
from carpool.store.results import RELEASE, Address, Answer, FencedError, addresses_of
from carpool.store.worker import WorkerStore
from carpool.tickets import TicketRange
from carpool.wire.requests import decode_entry
from carpool.wire.results import decode_columns
from carpool_batcher.entries import EntryTable
from carpool_batcher.ordering import issue_tickets
from carpool_cli.local.embedded import EmbeddedRedis
from support.redis_client import redis_at

TTL_MS: Final = 60_000
REPLIES: Final = (None, "near", "far")  # a list of its own, or one of two reply streams


@dataclass
class Expected:
    """What must be true of one request."""

    entry_id: str  # in which it arrived
    done: bool = False  # it has a result, delivered or withheld
    lost: bool = False  # its entry or batch was deleted
    freed: bool = False  # and its ticket was freed: no result is withheld for it any more
    at_once: bool = False  # it had no ticket, or a freed one, when its result was written


class OrderedResults(RuleBasedStateMachine):
    """The operations of batcher and worker on a real Redis, in any order, against a simple model.

    At any time exactly those results are delivered whose request is done, as are all requests before it.
    """

    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.redis = redis_at(self.url, protocol=2)
        self.redis.flushall()
        self.keys = Keys("m")
        self.batcher = BatcherStore(Link(self.url, name="batcher"), self.keys)
        self.worker = WorkerStore(Link(self.url, name="worker"), self.keys)
        self.worker.register({"max_batch_size": "4"})
        self.requests: dict[str, Expected] = {}  # by correlation ID
        self.reply_to: dict[str, str | None] = {}
        self.order: list[str] = []  # those that have tickets
        self.admitted: set[str] = set()  # entries
        self.arrivals: dict[str, list[str]] = {}  # entries that are not admitted yet: correlation IDs
        self.entries = EntryTable()  # what the batcher has read
        self.fetched: list[Batch] = []
        self.answered: dict[str, set[int]] = {}  # positions answered ahead, by batch
        self.deleted: set[str] = set()  # batches
        self.read_until = "0-0"
        self.number = 0

    def teardown(self) -> None:
        if not self.url:
            return
        self.read_all()
        while self.waiting():
            self.dispatch_and_fetch(self.waiting()[:4])
        while self.fetched:
            self.commit_one(0, as_columns=True)
        self.release()
        self.delivered_are_those_done_without_an_unfinished_one_before()
        unfinished = [name for name, request in self.requests.items() if not (request.done or request.lost)]
        assert not unfinished
        assert not self.redis.exists(self.keys.order, self.keys.tickets), "no ticket is left"
        self.redis.close()

    # --- rules ---------------------------------------------------------------------------------------------

    @rule(
        runs=st.lists(st.tuples(st.sampled_from(REPLIES), st.integers(1, 6)), min_size=1, max_size=3),
        packed=st.booleans(),
    )
    def arrive(self, runs: list[tuple[str | None, int]], packed: bool) -> None:
        """An entry with one request, or with several in one run or more."""
        elements: list[dict[str, Any]] = []
        for reply_to, count in runs if packed else [(runs[0][0], 1)]:
            names = [f"r{self.number + at}" for at in range(1, count + 1)]
            self.number += count
            bodies = {"correlation_ids": " ".join(names), "rows": b"1" * count}
            single = {"correlation_id": names[0], "body": b"1"}
            elements.append(bodies if packed else single)
            if reply_to is not None:
                elements[-1] |= {"reply_to": reply_to, "reply_columns": 1, "content_type": RAW}
        self.send({"requests": msgpack.packb(elements)} if packed else elements[0])

    def send(self, fields: dict[str, Any]) -> None:
        entry_id = self.redis.xadd(self.keys.requests, fields).decode()
        flat = [part for pair in fields.items() for part in (pair[0].encode(), _bytes(pair[1]))]
        entry, _ = decode_entry(entry_id.encode(), flat, ModelSettings())
        for run in entry.runs:
            self.requests |= {name: Expected(entry_id, at_once=True) for name in run.correlation_ids}
            self.reply_to |= dict.fromkeys(run.correlation_ids, run.reply_to)

    @precondition(lambda self: self.order)
    @rule(data=st.data())
    def forge(self, data: st.DataObject) -> None:
        """A producer sends an entry as if it was put back, with others' tickets."""
        victim = self.requests[data.draw(st.sampled_from(self.order))].entry_id
        first, count = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
        names = [f"r{self.number + at}" for at in range(1, count + 1)]
        self.number += count
        element = {"correlation_ids": " ".join(names), "rows": b"1" * count, "reply_to": "near"}
        tickets = f"{victim}:{first}+{count}"
        self.send({"requests": msgpack.packb([element]), "arrival": "1", "tickets": tickets})

    @rule(data=st.data(), is_lost=st.booleans())
    def read(self, data: st.DataObject, is_lost: bool) -> None:
        """The batcher reads what arrived, refuses some of it, and admits the rest; or ends before that."""

        def refused(run: Run) -> Collection[int]:
            indexes = st.sets(st.integers(0, len(run) - 1))
            return data.draw(st.just(set()) | indexes)

        self.read_and_admit(refused, is_lost)
        if is_lost:
            self.take_over()

    def read_all(self) -> None:
        self.read_and_admit(lambda run: ())

    def read_and_admit(self, refused: Callable[[Run], Collection[int]], is_ended: bool = False) -> None:
        """What the batcher does: verify what was put back, refuse some of the others, then admit the rest."""
        read: list[Entry] = []
        raw = self.redis.xrange(self.keys.requests, f"({self.read_until}", "+")
        for entry_id, fields in raw:
            if self.entries.was_put_back(entry_id):
                continue
            flat = [part for pair in fields.items() for part in pair]
            entry, _ = decode_entry(entry_id, flat, ModelSettings())
            self.entries[entry.id] = entry
            read.append(entry)
        if raw:
            self.read_until = raw[-1][0].decode()
        self.verify(read)
        refusals: list[Run] = []
        for run in [run for entry in read for run in entry.runs]:
            indexes = sorted(refused(run))
            if indexes:
                refusals.append(run.take(indexes) if len(indexes) < len(run) else run)
        runs = [run for entry in read for run in entry.runs]
        self.refuse_runs(refusals)
        if not is_ended:
            self.admit([entry for entry in dict.fromkeys(run.entry for run in runs) if issue_tickets(entry)])

    def verify(self, read: list[Entry]) -> None:
        put_back = [entry for entry in read if entry.stated_tickets is not None]
        _, forged = self.batcher.admit(self.take_arrivals(), put_back)
        for entry in put_back:
            genuine = all(not self.requests[name].at_once for name in names_of(entry.runs))
            assert (entry in forged) == (not genuine)
        for entry in forged:
            for run in entry.runs:
                run.tickets = None

    def admit(self, entries: list[Entry]) -> None:
        """Entries have tickets; these enter the order later."""
        self.arrivals |= {entry.id: names_of(entry.runs) for entry in entries}

    def enter(self) -> None:
        """Admit what arrived; twice, as after a lost reply, which changes nothing."""
        arrivals = self.take_arrivals()
        assert self.batcher.admit(arrivals) == self.batcher.admit(arrivals)

    def take_arrivals(self) -> list[TicketRange]:
        arrivals, self.arrivals = self.arrivals, {}
        for entry_id, names in arrivals.items():
            if entry_id not in self.admitted:
                self.admitted.add(entry_id)
                self.order += names
                for name in names:
                    self.requests[name] = Expected(entry_id, lost=self.requests[name].lost)
        return [TicketRange(entry_id, 0, len(names)) for entry_id, names in arrivals.items()]

    @rule()
    def take_over(self) -> None:
        """Another batcher takes over, and reads everything again."""
        self.entries = EntryTable()
        self.arrivals = {}
        self.read_until = "0-0"
        self.read_all()

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), is_lost=st.booleans())
    def dispatch(self, data: st.DataObject, is_lost: bool) -> None:
        """Some waiting requests are dispatched, in any order; perhaps the reply is lost."""
        self.dispatch_and_fetch(self.choose(data), is_lost)

    def choose(self, data: st.DataObject) -> list[Run]:
        """Whole runs, the first requests of others, and some from the middle of others."""
        chosen: list[Run] = []
        waiting = self.waiting()
        places = st.lists(st.integers(0, len(waiting) - 1), min_size=1, max_size=3, unique=True)
        for run in [waiting[place] for place in data.draw(places)]:
            indexes = sorted(data.draw(st.sets(st.integers(0, len(run) - 1), min_size=1)))
            if len(indexes) == len(run):
                chosen.append(run)
            elif indexes[-1] == len(indexes) - 1:
                chosen.append(run.cut(len(indexes)))
            else:
                chosen.append(run.take(indexes))
        return chosen

    def dispatch_and_fetch(self, runs: list[Run], is_lost: bool = False) -> None:
        half = len(runs) // 2
        parts = [Dispatch(part, "full", "") for part in (runs[:half], runs[half:]) if part]
        outcome = self.batcher.dispatch(parts, TTL_MS, self.take_arrivals())
        if is_lost:
            self.take_over()
        else:
            self.entries.update_from(outcome.entries)
        for _ in filter(None, outcome.batches):
            self.fetched.append(fetch(self.worker))

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9), as_columns=st.booleans())
    def commit(self, index: int, as_columns: bool) -> None:
        """Any batch is committed."""
        self.commit_one(index % len(self.fetched), as_columns)

    def commit_one(self, index: int, as_columns: bool) -> None:
        batch = self.fetched.pop(index)
        answered: set[int] = set()
        with suppress(FencedError):  # its entry was deleted, and a worker found out
            while more := commit_all(self.worker, batch, answered, as_columns):
                answered |= more
            assert answered == self.answered.pop(batch.id, set())
            self.done(set(range(batch.size)) - answered, batch)

    def done(self, positions: Collection[int], batch: Batch) -> None:
        for position in positions:
            request = self.requests[batch.requests[position].correlation_id]
            request.done, request.at_once = True, request.at_once or request.freed

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9), position=st.integers(0, 99))
    def expire_in_flight(self, index: int, position: int) -> None:
        """The batcher answers a request of a batch in flight, perhaps again."""
        batch = self.fetched[index % len(self.fetched)]
        position %= batch.size
        request = batch.requests[position]
        answer = Answer(position, Address.of(request), Result(request.correlation_id, DEADLINE_EXCEEDED))
        if self.batcher.answer_in_flight(batch.id, [answer], TTL_MS):
            assert batch.id not in self.deleted
            self.answered.setdefault(batch.id, set()).add(position)
            self.done([position], batch)

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9))
    def redeliver(self, index: int) -> None:
        """A worker died: another reclaims the oldest batch, and answers one request ahead."""
        reclaimed = self.worker.reclaim("w", 0)
        if reclaimed is None:
            assert self.deleted
            return
        batch, answered = reclaimed.batch, reclaimed.progress.answered
        (place,) = [place for place, fetched in enumerate(self.fetched) if fetched.id == batch.id]
        self.fetched[place] = batch
        assert answered == self.answered.get(batch.id, set())
        unanswered = sorted(set(range(batch.size)) - answered)
        if unanswered:
            position = unanswered[index % len(unanswered)]
            request = batch.requests[position]
            result = Result(request.correlation_id, INTERNAL, detail="x")
            self.worker.answer("w", batch, [Answer(position, Address.of(request), result)], None)
            self.answered.setdefault(batch.id, set()).add(position)
            self.done([position], batch)

    @precondition(lambda self: self.waiting())
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Some requests are answered while they wait."""
        self.refuse_runs(self.choose(data))

    def refuse_runs(self, refused: list[Run]) -> None:
        self.enter()
        changes = self.batcher.refuse(
            self.batcher.prepare_refusal([refusal_of(run, CANCELLED) for run in refused], [], TTL_MS)
        )
        for run in refused:
            if run.entry not in changes.missing:
                for name in run.correlation_ids:
                    self.requests[name].done = True
        self.entries.update_from(changes)

    @precondition(lambda self: self.entries)
    @rule(index=st.integers(0, 9))
    def delete(self, index: int) -> None:
        """A producer withdraws an entry by XDEL."""
        entry = list(self.entries.values())[index % len(self.entries)]
        if self.redis.xdel(self.keys.requests, entry.id):
            self.lose(names_of(entry.runs))

    @precondition(lambda self: self.fetched)
    @rule(index=st.integers(0, 9))
    def delete_batch(self, index: int) -> None:
        """A batch is deleted by hand, while a worker executes it: its results may come all the same."""
        batch = self.fetched[index % len(self.fetched)]
        if self.redis.xdel(self.keys.batches, batch.id):
            self.deleted.add(batch.id)
            answered = self.answered.get(batch.id, set())
            requests = enumerate(batch.requests)
            self.lose([request.correlation_id for at, request in requests if at not in answered])

    def lose(self, names: Sequence[str]) -> None:
        for name in names:
            self.requests[name].lost = True

    @rule()
    def release(self) -> None:
        """The batcher frees lost tickets."""
        self.enter()
        tickets = self.batcher.release()
        for name in self.order:
            request = self.requests[name]
            request.freed |= request.lost and not request.done
            if not (request.done or request.freed):
                break
        requests = [self.requests[name] for name in self.order]
        passed = next((at for at, one in enumerate(requests) if not (one.done or one.freed)), len(requests))
        assert tickets == len(requests) - passed

    # --- what must hold ------------------------------------------------------------------------------------

    def waiting(self) -> list[Run]:
        return [run for entry in self.entries.values() for run in entry.runs]

    def delivered(self) -> list[str]:
        """Correlation IDs of all delivered results. Those with tickets must be in order on each stream."""
        places = {name: place for place, name in enumerate(self.order)}
        found: list[str] = []
        for stream in filter(None, REPLIES):
            of_stream = ids_on_stream(self.redis, self.keys.replies(stream))
            in_order = [name for name in of_stream if not self.requests[name].at_once]
            assert in_order == sorted(in_order, key=places.__getitem__), stream
            assert all(self.reply_to[name] == stream for name in of_stream)
            found += of_stream
        for key in self.redis.keys(self.keys.result("*")):
            found += [json.loads(result)["correlation_id"] for result in self.redis.lrange(key, 0, -1)]
        return sorted(found)

    @invariant()
    def delivered_are_those_done_without_an_unfinished_one_before(self) -> None:
        expected = [name for name, request in self.requests.items() if request.done and request.at_once]
        for name in self.order:
            request = self.requests[name]
            if not (request.done or request.freed):
                break
            expected += [name] if request.done and not request.at_once else []
        assert self.delivered() == sorted(expected)


def names_of(runs: Sequence[Run]) -> list[str]:
    return [name for run in runs for name in run.correlation_ids]


def refusal_of(run: Run, status: str) -> Refusal:
    return Refusal(
        run.entry, run.correlation_ids, run.reply_to, run.content_type, status, "x", "x", run
    )  # fmt: skip


def fetch(worker: WorkerStore) -> Batch:
    """The next batch, which was dispatched."""
    worker.start_fetch("w", 1)
    (batch,) = worker.finish_fetch()
    return batch


def commit_all(
    worker: WorkerStore,
    batch: Batch,
    answered: Collection[int] = (),
    as_columns: bool = True,
    body: bytes = b"1",
) -> set[int]:
    """Commit a result for each request of a batch that is not answered; columns where they are allowed."""
    of_runs: list[RunResults] = []
    results: dict[int, tuple[Address, Result]] = {}
    addresses, start = addresses_of(batch), 0
    for run in batch.runs:
        ids = run.correlation_ids
        indexes = [at for at in range(len(ids)) if start + at not in answered]
        if as_columns and run.reply_columns and indexes:
            rows = Rows(b"", body * len(indexes), len(body))
            tickets = None if run.tickets is None else run.tickets.select(indexes)
            positions, selected = [start + at for at in indexes], [ids[at] for at in indexes]
            of_runs.append(RunResults(run, positions, selected, rows, tickets, batch.size, 1, 1))
        else:
            results |= {start + at: (addresses[start + at], Result(ids[at], body=body)) for at in indexes}
        start += len(ids)
    return worker.commit("w", batch, results, [], Executed(1), of_runs)


def ids_on_stream(redis: Any, key: str) -> list[str]:
    """The correlation IDs of the results on a reply stream."""
    ids: list[str] = []
    for _, raw in redis.xrange(key):
        ids += [result["correlation_id"] for result in msgpack.unpackb(raw.get(b"results", b"\x90"))]
        for columns in decode_columns(raw.get(b"columns", b"\x90")):
            ids += columns.correlation_ids
    return ids


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


OrderedResults.TestCase.settings = hypothesis_settings(
    max_examples=30, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_operations_in_any_order_keep_the_order_of_results(server: Path) -> None:
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        OrderedResults.url = embedded.url
        case: Any = OrderedResults.TestCase
        case().runTest()


class Stores(NamedTuple):
    """A real Redis, and what a batcher and a worker do in it."""

    url: str
    redis: Any
    keys: Keys
    batcher: BatcherStore
    worker: WorkerStore

    def admit(self, requests: Sequence[dict[str, Any]], **shared: Any) -> Entry:
        """An entry with these requests arrived, and has tickets."""
        fields = {"requests": msgpack.packb(list(requests)), **shared}
        entry_id = self.redis.xadd(self.keys.requests, fields)
        flat = [part for name, value in fields.items() for part in (name.encode(), _bytes(value))]
        entry, _ = decode_entry(entry_id, flat, ModelSettings(max_batch_size=4096))
        assert issue_tickets(entry)
        self.batcher.admit([TicketRange(entry.id, 0, len(requests))])
        return entry

    def dispatch(self, *batches: list[Run]) -> list[Batch]:
        """These batches are dispatched and fetched."""
        outcome = self.batcher.dispatch([Dispatch(runs, "full", "") for runs in batches], TTL_MS)
        return [fetch(self.worker) for _ in filter(None, outcome.batches)]

    def replied(self, stream: str = "all") -> list[str]:
        return ids_on_stream(self.redis, self.keys.replies(stream))

    def free_some(self) -> None:
        """One script frees lost tickets, and its caller ends before it runs the next one."""
        keys = self.keys
        link = Link(self.url, name="x")
        link.run(RELEASE, [keys.order, keys.tickets, keys.requests, keys.batches], [])
        link.close()

    def no_ticket_is_left(self) -> bool:
        return not self.redis.exists(self.keys.order, self.keys.tickets)


@pytest.fixture
def stores(server: Path) -> Iterator[Stores]:
    with EmbeddedRedis(binary=server, append_only=False) as embedded:
        redis = redis_at(embedded.url, protocol=2)
        keys = Keys("m")
        links = [Link(embedded.url, name=name) for name in ("batcher", "worker")]
        worker = WorkerStore(links[1], keys)
        worker.register({"max_batch_size": "4096"})
        yield Stores(embedded.url, redis, keys, BatcherStore(links[0], keys), worker)
        for connection in (redis, *links):
            connection.close()


def numbered(count: int, **fields: Any) -> list[dict[str, Any]]:
    """Requests `r0`, `r1`, ... whose results go to the stream `all`."""
    return [
        {"correlation_id": f"r{number}", "body": b"1", "reply_to": "all", **fields} for number in range(count)
    ]


def one_slow_request(stores: Stores, count: int) -> list[Batch]:
    """`count` requests of one entry are in flight: the first in a batch of its own."""
    entry = stores.admit(numbered(count, body=b""))
    first = entry.runs[0].cut(1)
    return stores.dispatch([first], entry.runs[1:])


def test_results_withheld_behind_one_are_delivered_by_several_scripts(stores: Stores) -> None:
    """One script delivers a thousand at most."""
    early, late = one_slow_request(stores, 2501)
    for batch, delivered in ((late, 0), (early, 2501)):
        commit_all(stores.worker, batch, body=b"")
        assert stores.replied() == [f"r{number}" for number in range(delivered)]
    assert stores.no_ticket_is_left()


def test_ranges_that_were_put_back_apart_and_dispatched_together_leave_nothing(stores: Stores) -> None:
    """Their results share one payload, which begins where only the first of them was put back."""
    entry = stores.admit(numbered(20))
    runs = [*(entry.runs[-1].cut(1) for _ in range(19)), entry.runs[-1]]
    entries = EntryTable()
    for dispatched in (runs[:1], runs[1:]):
        outcome = stores.batcher.dispatch([Dispatch(dispatched, "full", "")], TTL_MS)
        entries.update_from(outcome.entries)
    for _ in range(2):
        commit_all(stores.worker, fetch(stores.worker))
    assert stores.replied() == [f"r{number}" for number in range(20)]
    assert stores.no_ticket_is_left()


def test_one_script_delivers_a_few_megabytes_at_most(stores: Stores) -> None:
    """Redis serves nothing else meanwhile; the next script delivers the rest."""
    early, late = one_slow_request(stores, 25)
    commit_all(stores.worker, late, body=b"x" * (1 << 20))
    slow = early.requests[0]
    expired = Answer(0, Address("all", slow.ticket), Result(slow.correlation_id, DEADLINE_EXCEEDED))
    stores.batcher.answer_in_flight(early.id, [expired], TTL_MS)
    assert 0 < len(stores.replied()) < 24
    stores.batcher.release()
    assert stores.replied() == [f"r{number}" for number in range(25)]
    assert stores.no_ticket_is_left()


def test_each_withheld_result_is_delivered_to_its_own_stream(stores: Stores) -> None:
    """Successive results for one stream become one entry, as far as they may."""
    streams = ["near", "near", "far", "near", "near"]
    requests = [{**one, "reply_to": stream} for one, stream in zip(numbered(5), streams, strict=True)]
    entry = stores.admit(requests)
    early, late = stores.dispatch(entry.runs[:1], entry.runs[1:])
    commit_all(stores.worker, late)
    assert not stores.replied("near") + stores.replied("far")
    commit_all(stores.worker, early)
    assert stores.replied("near") == ["r0", "r1", "r3", "r4"]
    assert stores.replied("far") == ["r2"]
    assert stores.redis.xlen(stores.keys.replies("near")) == 2
    assert stores.no_ticket_is_left()


def test_results_of_a_batch_whose_order_differs_are_delivered_in_the_order_of_arrival(stores: Stores) -> None:
    """Their payload is divided although all of it is delivered together."""
    first, second = stores.admit(numbered(1)), stores.admit([{**numbered(1)[0], "correlation_id": "later"}])
    (batch,) = stores.dispatch([*second.runs, *first.runs])
    commit_all(stores.worker, batch)
    assert stores.replied() == ["r0", "later"]
    assert stores.no_ticket_is_left()


def test_only_those_results_of_a_batch_are_withheld_that_an_unfinished_one_precedes(stores: Stores) -> None:
    """They share a payload with others, which are delivered."""
    entry = stores.admit(numbered(4))
    first, slow, last = entry.runs[-1].cut(1), entry.runs[-1].cut(1), entry.runs[-1]
    late, early = stores.dispatch([slow], [first, last])
    commit_all(stores.worker, early)
    assert stores.replied() == ["r0"]
    commit_all(stores.worker, late)
    assert stores.replied() == ["r0", "r1", "r2", "r3"]
    assert stores.no_ticket_is_left()


def test_result_of_a_run_whose_first_tickets_were_freed_is_not_withheld(stores: Stores) -> None:
    """Its batch was deleted by hand, and one script frees a thousand tickets at most."""
    entry = stores.admit(numbered(1500), reply_columns=1, content_type=RAW)
    (batch,) = stores.dispatch(entry.runs)
    stores.redis.xdel(stores.keys.batches, batch.id)
    stores.free_some()
    assert stores.batcher.admit(()).tickets == 500
    commit_all(stores.worker, batch)
    assert stores.replied() == [f"r{number}" for number in range(1500)]
    assert stores.batcher.release() == 0
    assert stores.no_ticket_is_left()


def test_ticket_of_an_entry_missing_at_dispatch_is_freed_while_the_batch_is_in_flight(stores: Stores) -> None:
    """The batch has its ticket, but names the entry as `gone`."""
    gone, there = stores.admit(numbered(1)), stores.admit([{**numbered(1)[0], "correlation_id": "there"}])
    stores.redis.xdel(stores.keys.requests, gone.id)
    (batch,) = stores.dispatch([*gone.runs, *there.runs])
    assert stores.batcher.release() == 1
    commit_all(stores.worker, batch)
    assert stores.replied() == ["there"]
    assert stores.no_ticket_is_left()


def test_results_are_delivered_at_once_if_their_order_was_deleted(stores: Stores) -> None:
    """None of them is withheld, because nothing would deliver it; nor is anything put back in the order."""
    entry = stores.admit(numbered(6))
    part, rest = entry.runs[0].cut(2), entry.runs[-1]
    stores.redis.delete(stores.keys.order, stores.keys.tickets)
    outcome = stores.batcher.dispatch([Dispatch([part], "full", "")], TTL_MS)
    EntryTable().update_from(outcome.entries)
    assert stores.no_ticket_is_left()
    batches = [fetch(stores.worker), *stores.dispatch([rest])]
    for batch in reversed(batches):
        commit_all(stores.worker, batch)
    assert stores.replied() == ["r2", "r3", "r4", "r5", "r0", "r1"]
    assert stores.no_ticket_is_left()
