"""While no process can take a batch, the batcher reads requests together, and not each when it arrives."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Final

import pytest

from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.store.worker import WorkerStore
from carpool_batcher import session as session_module
from carpool_batcher.session import Session
from carpool_cli.local.embedded import EmbeddedRedis
from support.batcher_loop import BatcherLoop
from support.redis_client import redis_at

KEYS: Final = Keys("m")
ARRIVED: Final = 5
NEVER_US: Final = 600_000_000


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis(append_only=False) as server:
        yield server


class Served(BatcherLoop):
    """A batcher whose loop the test runs, and its model, of which no process is alive: one request waits."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.redis = redis_at(url, protocol=2)
        self.redis.flushall()
        WorkerStore(self.link, KEYS).register(ModelSettings(max_batch_size=16).as_text())
        self.send()
        self.run_until_waiting(1)

    def send(self) -> None:
        self.redis.xadd(KEYS.requests, {"body": "1"})

    def run_until_waiting(self, count: int) -> None:
        self.run_until(lambda: self.waiting() == count, f"{count} requests wait")

    def run_until_left_unread(self) -> None:
        """Until nothing of the connection for requests waits in Redis."""
        reader = self.service._reader
        self.run_until(lambda: not reader._busy.is_waiting, "no read waits")

    def close(self) -> None:
        super().close()
        self.redis.close()


@pytest.fixture
def served(server: EmbeddedRedis) -> Iterator[Served]:
    served = Served(server.url)
    yield served
    served.close()


@pytest.fixture
def left_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What arrives is not read now and then, but only if there is a reason."""
    monkeypatch.setattr(session_module, "READ_INTERVAL_US_MAX", NEVER_US)


@pytest.mark.usefixtures("left_unread")
def test_requests_do_not_wake_the_batcher_while_no_process_can_take_a_batch(served: Served) -> None:
    served.run_until_left_unread()
    for _ in range(ARRIVED):
        served.send()
        served.service.run_once()
    assert served.waiting() == 1
    # What arrived is read with the next entry of the stream of what settled
    reading = served.service._models["m"].meter._reading
    times_us = list(reading._times_us)
    served.redis.xadd(KEYS.settled, {"workers": ""})
    served.run_until_waiting(1 + ARRIVED)
    assert list(reading._times_us) == times_us, "what it left unread counts as the time that reading takes"


@pytest.mark.usefixtures("left_unread")
def test_requests_are_all_read_when_a_process_can_take_a_batch(served: Served) -> None:
    """Expect them in the first batch."""
    served.run_until_left_unread()
    for _ in range(ARRIVED):
        served.send()
    served.service.run_once()
    assert served.waiting() == 1
    WorkerStore(served.link, KEYS).join("worker", 600_000)
    served.run_until_waiting(0)
    ((_, fields),) = served.redis.xrange(KEYS.batches)
    assert fields[b"size"] == b"%d" % (1 + ARRIVED)


def test_requests_are_read_now_and_then_although_timers_are_due_all_the_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given turns without anything that arrived, of which each is much sooner than the next read."""
    turn = Session.turn

    def turn_again_soon(session: Session) -> Generator[None]:
        yield from turn(session)
        session.wake_at_us = session._clock.now_us() + 200

    monkeypatch.setattr(session_module, "READ_INTERVAL_US_MAX", 100_000)
    monkeypatch.setattr(Session, "turn", turn_again_soon)
    served.send()
    served.run_until_waiting(2)
    for _ in range(ARRIVED):
        served.send()
    served.run_until_waiting(2 + ARRIVED)


def test_entries_that_do_not_fit_into_one_reply_are_read_at_once(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a long queue, expect that the batcher does not pause while it reads that."""
    turn = Session.turn
    reads_at_us: list[int] = []  # after each turn of which it is known that there is more

    def noted_turn(session: Session) -> Generator[None]:
        yield from turn(session)
        if session.subscription.has_more:
            reads_at_us.append(session.reads_at_us)

    monkeypatch.setattr(Session, "turn", noted_turn)
    waiting = 1000
    for _ in range(waiting):
        served.send()
    served.run_until_waiting(1 + waiting)
    assert set(reads_at_us) == {0}
