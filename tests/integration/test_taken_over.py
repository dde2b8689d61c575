"""What a batcher knows that took over, or reads late what an operator does: its loop is run by the test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import pytest
from structlog.testing import capture_logs

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.model_settings import ModelSettings
from carpool.store.operations import Operations
from carpool.store.reader import ENTRIES_MAX
from carpool.store.worker import WorkerStore
from carpool.wire.audit import Actor
from carpool.wire.whereabouts import BatcherAnswer, question_fields
from carpool_cli.local.embedded import EmbeddedRedis
from support.batcher_loop import BatcherLoop
from support.redis_client import redis_at

KEYS: Final = Keys("m")


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


class Served(BatcherLoop):
    """A batcher whose loop the test runs, and its model, of which a process is alive that fetches nothing."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.redis = redis_at(url, protocol=2)
        self.redis.flushall()
        self.worker = WorkerStore(self.link, KEYS)
        self.worker.register(ModelSettings(max_batch_size=4).as_text())
        self.operations = Operations(self.link, DEFAULT_PREFIX, Actor("ann@host", "command"))
        self.run_until(self.session, "it serves the model")

    def send(self, **fields: str) -> str:
        return str(self.redis.xadd(KEYS.requests, {"body": "1", **fields}).decode())

    def in_flight(self) -> list[Any]:
        return list(self.session().scheduler.in_flight.batches.values())

    def close(self) -> None:
        super().close()
        self.redis.close()


@pytest.fixture
def served(server: EmbeddedRedis) -> Iterator[Served]:
    served = Served(server.url)
    yield served
    served.close()


def test_requests_in_flight_are_known_as_they_were_sent(served: Served) -> None:
    """Given a request in flight with all that a producer may set, when another batcher takes over, expect
    that it knows the same of it: what it answers for it, and whose it is, depends on that."""
    served.worker.join("p", 60_000)
    served.send(
        correlation_id="a", tenant="acme", lane="wide", priority="7", accept="application/msgpack",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", mine="kept",
        expiration="60000",
    )  # fmt: skip

    def known() -> Any:
        if served.session() is None or not served.in_flight():
            return None
        (batch,) = served.in_flight()
        (run,) = batch.expiring.values()
        return run.extra, run.tenant, run.lane, run.priority, run.reply_to, run.deadline_us, batch.lane

    before = served.run_until(known, "a request is in flight")
    assert before[0] is not None and before[0]["mine"] == b"kept" and before[1:4] == ("acme", "wide", 7)
    served.take_over()
    assert served.run_until(known, "a request is in flight") == before


def test_batcher_that_is_still_reading_says_so(served: Served) -> None:
    """Given more requests than are read at once, when another batcher takes over and is asked for the last
    one before it has read that, expect that it says so; and that it knows it then."""

    def asked(answer: str) -> BatcherAnswer:
        fields = question_fields("last", answer)
        served.redis.xadd(KEYS.settled, dict(zip(fields[::2], fields[1::2], strict=True)))
        text = served.run_until(lambda: served.redis.get(KEYS.answer(answer)), "it answers")
        found = BatcherAnswer.decode(text)
        assert found is not None
        return found

    with served.redis.pipeline(transaction=False) as pipeline:
        for number in range(ENTRIES_MAX):
            pipeline.xadd(KEYS.requests, {"body": "1", "correlation_id": f"r{number}"})
        pipeline.execute()
    served.send(correlation_id="last")
    served.take_over()
    served.run_until(served.session, "another batcher has the model")
    first = asked("a")
    assert first.is_reading and not first.waiting
    served.run_until(lambda: served.waiting() == ENTRIES_MAX + 1, "all are read")
    second = asked("b")
    assert second.waiting and not second.is_reading


def test_nothing_is_dispatched_once_a_pause_has_returned(served: Served) -> None:
    """Given a batcher that has not read that its model is paused, when a request arrives, expect that it is
    not dispatched, and that the batcher starts over once; resumed, it is."""
    served.worker.join("p", 60_000)
    served.run_until(lambda: served.session().scheduler.model_processes == 1, "there is capacity")
    before = served.session()
    served.operations.pause("m", refuses=False, reason="")
    served.redis.delete(KEYS.settled)  # which tells it to look at once
    served.service._compare_at_s = served.service._leases_at_s = time.monotonic() + 3600  # nor by itself
    served.send(correlation_id="late")
    with capture_logs() as logged:
        served.run_until(lambda: served.waiting() == 1 and served.session() is not before, "it waits")
        for _ in range(3):
            served.service.run_once()
    assert not served.redis.xlen(KEYS.batches) and not served.in_flight()
    assert [one["event"] for one in logged].count("model was paused, starting over") == 1
    served.operations.resume("m")
    served.run_until(lambda: served.session() is not None and served.in_flight(), "it is dispatched")
