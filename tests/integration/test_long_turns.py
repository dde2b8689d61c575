"""What a producer sends is decided in pieces of bounded work, and in linear time, however it is shaped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from types import FrameType
from typing import Any, Final

import msgpack
import pytest

from carpool.keys import Keys
from carpool.messages.requests import SequencePart
from carpool.model_settings import ModelSettings
from carpool.store.reader import ENTRIES_MAX
from carpool.store.worker import WorkerStore
from carpool_batcher import entries as entries_module
from carpool_batcher import service as service_module
from carpool_batcher.session import Session
from carpool_cli.local.embedded import EmbeddedRedis
from support.batcher_loop import BatcherLoop
from support.hostile import OF_SEQUENCES, PLAIN, Sent
from support.wire import flat_of

IN_ENTRY: Final = 4096  # as many as an entry may have
PIECE_CALLS_MAX: Final = 24 * IN_ENTRY  # of functions, in one piece of a turn: 6 to 9 ms
CALLS_MAX: Final = 600  # for each request in all; eight misspelt names take most of them
PIECES_BEFORE_OTHERS_MAX: Final = 3  # of one that goes on when a request arrives: it is read after the next
KEYS: Final = Keys("m")
OTHER: Final = Keys("other")


class CountedLoop(BatcherLoop):
    """A batcher of two models without workers. It counts the calls of functions in each piece of turns of the
    first one."""

    def __init__(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(url)
        self.calls_of_pieces: list[int] = []
        turn = Session.turn

        def counted(session: Session) -> Generator[None]:
            pieces = turn(session)
            while True:
                with_counts = session.subscription.requests.name == KEYS.requests
                if with_counts:
                    self._begin()
                try:
                    next(pieces)
                except StopIteration:
                    return
                finally:
                    if with_counts:
                        self.calls_of_pieces.append(self._end())
                yield

        monkeypatch.setattr(Session, "turn", counted)
        self._calls = 0

    def _begin(self) -> None:
        self._calls = 0

        def count(frame: FrameType, event: str, argument: Any) -> None:
            if event in ("call", "c_call"):
                self._calls += 1

        sys.setprofile(count)

    def _end(self) -> int:
        sys.setprofile(None)
        return self._calls

    def serve(self, *, has_sequences: bool) -> None:
        self.link.call("FLUSHALL")
        for keys in (KEYS, OTHER):
            registered = ModelSettings(max_batch_size=8, max_queue_size=100_000).as_text()
            if has_sequences:
                registered |= {"stateful": "true"}
            WorkerStore(self.link, keys).register(registered)
        self.run_until(lambda: self.session() and self.session("other"), "both are served")

    def send(self, sent: Sent) -> None:
        for fields in sent:
            self.link.call("XADD", KEYS.requests, "*", *flat_of(fields))

    def is_done(self) -> bool:
        """Whether all that was sent was decided about."""
        session, last = self.session(), self.link.call("XREVRANGE", KEYS.requests, "+", "-", "COUNT", 1)
        is_read = session is not None and (not last or last[0][0] <= session.subscription.requests.after)
        return bool(is_read and not session.backlog and not self.service._long_turns)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedLoop]:
    server = EmbeddedRedis(append_only=False)
    loop = CountedLoop(server.url, monkeypatch)
    yield loop
    loop.close()
    server.stop()


@pytest.mark.parametrize("shape", [*PLAIN, *OF_SEQUENCES], ids=lambda shape: shape.__name__)
def test_each_piece_is_bounded_and_the_work_is_linear(
    bench: CountedLoop, shape: Callable[[int], Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "SLICE_S", 0.0)  # each piece by itself
    bench.serve(has_sequences=shape in OF_SEQUENCES)
    bench.send(shape(IN_ENTRY))
    bench.run_until(bench.is_done, "all is decided")
    assert max(bench.calls_of_pieces) < PIECE_CALLS_MAX
    assert sum(bench.calls_of_pieces) < CALLS_MAX * IN_ENTRY


@pytest.mark.parametrize("end", ["ended by force", "idle"])
def test_all_requests_of_one_sequence_are_refused_in_pieces(bench: CountedLoop, end: str) -> None:
    """Given one sequence for which very many requests wait, and which ends, expect pieces as for an entry."""
    bench.serve(has_sequences=True)
    entries = 3
    for at in range(entries):
        indexes = range(at * IN_ENTRY + 1, (at + 1) * IN_ENTRY + 1)
        requests = [
            {"correlation_id": f"r{index}", "body": b"1", "sequence_index": index} for index in indexes
        ]
        bench.send([{"requests": msgpack.packb(requests), "sequence_id": "s", "reply_to": "them"}])
    bench.run_until(lambda: bench.waiting() == entries * IN_ENTRY, "all wait")
    bench.calls_of_pieces.clear()
    if end == "ended by force":
        bench.send([{"end_sequences": "s"}])
    else:
        bench.session().scheduler.sequences.idle_us = 1
    bench.run_until(lambda: not bench.waiting() and bench.is_done(), "all are refused")
    assert bench.link.call("XLEN", KEYS.requests) == 0
    assert len(bench.calls_of_pieces) > entries
    assert max(bench.calls_of_pieces) < 32 * IN_ENTRY  # those that prepare a script, for one entry
    assert sum(bench.calls_of_pieces) < 200 * entries * IN_ENTRY


@pytest.mark.parametrize("shape", PLAIN, ids=lambda shape: shape.__name__)
def test_a_flood_delays_a_request_to_another_model_by_a_few_pieces(
    bench: CountedLoop, shape: Callable[[int], Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a long turn of one model that was begun, expect the other to know its request soon after."""
    monkeypatch.setattr(service_module, "SLICE_S", 0.0)
    bench.serve(has_sequences=False)
    for _ in range(4):
        bench.send(shape(IN_ENTRY))
    bench.run_until(lambda: bench.service._long_turns, "a turn is long")
    bench.link.call("XADD", OTHER.requests, "*", "body", "1")
    bench.calls_of_pieces.clear()
    bench.run_until(lambda: bench.waiting("other"), "the other request waits")
    assert len(bench.calls_of_pieces) <= PIECES_BEFORE_OTHERS_MAX
    assert not bench.is_done()


def test_no_more_is_read_of_a_model_than_it_can_decide_about(bench: CountedLoop) -> None:
    """Given very many entries, expect that those in memory are the ones of one or two replies."""
    bench.serve(has_sequences=False)
    entries = 40 * ENTRIES_MAX
    bench.link.call_many(*[("XADD", KEYS.requests, "*", "priority", "x")] * entries)
    most = 0

    def is_done() -> bool:
        nonlocal most
        session = bench.session()
        most = max(most, len(session.backlog.requests))
        return bench.is_done()

    bench.run_until(is_done, "all are refused")
    assert 0 < most <= 2 * ENTRIES_MAX


@pytest.mark.parametrize("held_back_max", [0, 5, 1000])
def test_a_batcher_that_takes_over_holds_few_refusals(
    bench: CountedLoop, held_back_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given malformed requests of sequences, then a request that follows a start, and then
    this start, which was put back. Expect each to be answered once, and the request to wait for the start."""
    monkeypatch.setattr(entries_module, "HELD_BACK_MAX", held_back_max)
    bench.serve(has_sequences=True)
    bench.take_over("m")
    malformed = [f"bad-{at}" for at in range(20)]
    first_id = b""
    for name in malformed:
        sent = {
            "correlation_id": name,
            "sequence_id": name,
            "sequence_start": 1,
            "priority": "x",
            "body": "1",
        }
        added = bench.link.call("XADD", KEYS.requests, "*", *flat_of(sent))
        first_id = first_id or added
    following = {"correlation_id": "following", "sequence_id": "a", "body": "1"}
    bench.link.call("XADD", KEYS.requests, "*", *flat_of(following))
    place = SequencePart.place_of(first_id.decode(), 0)
    start = {
        "correlation_id": "start",
        "body": b"1",
        "sequence_id": "a",
        "sequence_start": 1,
        "sequence_place": place,
    }
    put_back = {"arrival": first_id.partition(b"-")[0], "requests": msgpack.packb([start]), "tickets": ""}
    bench.link.call("XADD", KEYS.requests, "*", *flat_of(put_back))
    bench.run_until(
        lambda: bench.waiting() == 2 and bench.link.call("XLEN", KEYS.requests) == 2,
        "two wait, and the others are refused",
    )
    were_left = bench.session().unread.resumes_after is not None
    assert were_left == (held_back_max < len(malformed))
    assert [bench.link.call("LLEN", KEYS.result(name)) for name in malformed] == [1] * len(malformed)
    scheduler = bench.session().scheduler
    assert [run.correlation_ids for lane in scheduler.queue.lanes.values() for run in lane] == [["start"]]
