"""Producers that try to hold up others, in the production batcher on a real redis-server without workers."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any, Final

import msgpack
import pytest

from carpool.keys import Keys
from carpool.messages.requests import Run
from carpool.model_settings import ModelSettings
from carpool.store.worker import WorkerStore
from carpool_batcher.core.applied_settings import EQUAL_SHARES
from carpool_batcher.core.waiting import withdrawals
from carpool_batcher.core.waiting.queue import Queue
from carpool_batcher.session import Session
from carpool_cli.local.embedded import EmbeddedRedis
from support.batcher_loop import BatcherLoop
from support.wire import flat_of

WAITING: Final = 20_000


class Served(BatcherLoop):
    """A model without workers, and a batcher, which runs when a test waits for something."""

    def __init__(self, url: str, **settings: Any) -> None:
        super().__init__(url)
        self.keys = Keys("m")
        self.link.call("FLUSHALL")
        model = ModelSettings(**{"max_batch_size": 8, "max_queue_size": 10 * WAITING, **settings})
        WorkerStore(self.link, self.keys).register(model.as_text())

    def send(self, **fields: Any) -> str:
        return str(self.link.call("XADD", self.keys.requests, "*", *flat_of(fields)).decode())

    def send_many(self, count: int) -> None:
        """This many requests, in entries of a thousand."""
        for start in range(0, count, 1000):
            ids = range(start, min(count, start + 1000))
            packed = [
                {"correlation_id": f"other-{number}", "body": b"1", "priority": number % 7} for number in ids
            ]
            self.send(requests=msgpack.packb(packed))

    def wait_until_waiting(self, count: int) -> None:
        """Run the batcher until it knows of this many waiting requests."""
        self.run_until(lambda: self.waiting() == count, f"{count} requests wait")

    def waiting_ids(self) -> list[str]:
        """The correlation IDs of the requests that the batcher knows to wait, in the order of its lanes."""
        return [name for run in self.runs() for name in run.correlation_ids]

    def runs(self) -> list[Run]:
        session = self.session()
        return [] if session is None else list(session.scheduler.queue.runs())

    def calls(self, command: str) -> int:
        """How often Redis has run this command, also in scripts."""
        stats = self.link.call("INFO", "commandstats").decode()
        found = re.search(rf"cmdstat_{command}:calls=(\d+)", stats)
        return int(found[1]) if found else 0

    def answered(self, name: str) -> bool:
        return bool(self.link.call("EXISTS", self.keys.result(name)))

    def status(self, name: str) -> str:
        return str(json.loads(self.link.call("LPOP", self.keys.result(name)))["status"])


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


@pytest.fixture
def served(server: EmbeddedRedis) -> Iterator[Served]:
    served = Served(server.url)
    yield served
    served.close()


# --- withdrawals -----------------------------------------------------------------------------------------


def test_withdrawals_that_name_nobody_seldom_look_at_all_that_waits(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.send_many(WAITING)
    served.wait_until_waiting(WAITING)
    looks, look = 0, Queue.runs

    def counted(queue: Queue) -> Iterator[Run]:
        nonlocal looks
        looks += 1
        return look(queue)

    monkeypatch.setattr(Queue, "runs", counted)
    entries = served.link.call("XLEN", served.keys.requests)
    began_s = time.monotonic()
    for number in range(500):
        served.send(withdraw=f"nobody-{number}")
    served.run_until(lambda: served.link.call("XLEN", served.keys.requests) == entries, "all are carried out")
    took_us = (time.monotonic() - began_s) * 1e6
    assert looks <= 2 + took_us / (withdrawals.PAUSE_US * WAITING)


def test_withdrawal_that_was_put_off_is_carried_out_by_the_next_batcher(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a batcher that looks only once, and is killed, expect nothing to be lost."""
    monkeypatch.setattr(withdrawals, "PAUSE_US", 1_000_000_000)
    served.send_many(2000)
    served.wait_until_waiting(2000)
    first = served.send(withdraw="nobody")
    served.run_until(
        lambda: not served.link.call("XRANGE", served.keys.requests, first, first), "it is carried out"
    )
    second = served.send(withdraw="other-7")
    served.run_until(lambda: second in served.session().entries, "it is read")
    assert not served.answered("other-7")
    served.take_over()
    served.run_until(lambda: served.answered("other-7"), "it is carried out")
    assert served.status("other-7") == "CANCELLED"
    assert not served.link.call("XRANGE", served.keys.requests, second, second)


# --- missing entries -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "body_bytes", "looked_up_max"), [(1400, 1, 500), (40, 300_000, 4)])
def test_one_missing_entry_makes_no_long_script(
    served: Served, monkeypatch: pytest.MonkeyPatch, count: int, body_bytes: int, looked_up_max: int
) -> None:
    """Given an entry that was deleted, expect it to be forgotten, and never many to be read at once."""
    entry_ids = [served.send(body="1" * body_bytes) for _ in range(count)]
    served.wait_until_waiting(count)
    looked_up: list[int] = []
    compare = Session.compare

    def counted(session: Session, snapshot: Any) -> None:
        before = served.calls("xrange")
        compare(session, snapshot)
        looked_up.append(served.calls("xrange") - before)

    monkeypatch.setattr(Session, "compare", counted)
    assert served.link.call("XDEL", served.keys.requests, entry_ids[-1]) == 1
    served.wait_until_waiting(count - 1)
    assert entry_ids[-1] not in served.waiting_ids()
    assert 0 < max(looked_up) <= looked_up_max
    assert sum(looked_up) == count, "each is looked up once"


# --- a batcher that was paused ---------------------------------------------------------------------------


def test_batcher_that_lost_its_lease_refuses_nothing_by_its_old_copy(server: EmbeddedRedis) -> None:
    """Given a copy by which the queue is full, and another batcher, expect no answer from this one."""
    served = Served(server.url, max_queue_size=1)
    served.send(correlation_id="first", body="1")
    served.wait_until_waiting(1)
    served.link.call("SET", served.keys.batcher, "another")
    served.service._leases_at_s = time.monotonic() + 60  # it does not notice before it reads
    served.send(correlation_id="second", body="1")
    served.run_until(lambda: served.session() is None, "it notices")
    assert not served.answered("second")
    assert served.link.call("XLEN", served.keys.requests) == 2
    served.close()


# --- arrivals --------------------------------------------------------------------------------------------


def send_as_if_put_back(served: Served, name: str, **fields: Any) -> str:
    """A request in an entry that looks like one that a batcher put back, and arrived a minute ago."""
    seconds, _ = served.link.call("TIME")
    packed = msgpack.packb([{"correlation_id": name, "body": b"1", **fields}])
    return served.send(requests=packed, arrival=(int(seconds) - 60) * 1000)


def served_order(served: Served) -> list[str]:
    """The correlation IDs of the waiting requests in the order in which they would be dispatched."""
    lane = served.session().scheduler.queue.lanes[""]
    return [name for run, _, _ in lane.in_order(EQUAL_SHARES) for name in run.correlation_ids]


def test_arrival_that_a_producer_writes_does_not_put_its_request_ahead(served: Served) -> None:
    served.send(correlation_id="first", body="1")
    served.wait_until_waiting(1)
    send_as_if_put_back(served, "forged")
    served.wait_until_waiting(2)
    assert served_order(served) == ["first", "forged"]
    oldest_us = served.session().scheduler.oldest_arrival_us()
    assert oldest_us == min(run.arrival_us for run in served.runs() if run.correlation_ids == ["first"])


def test_deadline_counts_from_the_arrival_that_an_entry_names(served: Served) -> None:
    """Another batcher, which was paused, may have put it back. Earlier deadlines are no gain."""
    served.send(correlation_id="first", body="1")
    served.wait_until_waiting(1)
    send_as_if_put_back(served, "late", expiration=59_000)
    served.run_until(lambda: served.answered("late"), "it is refused")
    assert served.status("late") == "DEADLINE_EXCEEDED"
    assert served.waiting_ids() == ["first"]


def test_what_was_put_back_keeps_its_arrival_when_another_batcher_takes_over(served: Served) -> None:
    """The new batcher cannot tell what the old one put back from what a producer wrote in the same form."""
    served.send(correlation_id="first", body="1")
    send_as_if_put_back(served, "put-back")
    served.wait_until_waiting(2)
    served.take_over()
    served.wait_until_waiting(2)
    assert served_order(served) == ["put-back", "first"]
    send_as_if_put_back(served, "forged")
    served.wait_until_waiting(3)
    assert served_order(served) == ["put-back", "first", "forged"]
