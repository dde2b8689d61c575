"""Questions where a request is: found whatever waits, in pieces, and not all the time."""

from __future__ import annotations

from typing import Any, Final, cast

import pytest
import structlog

from carpool.messages.requests import SequencePart
from carpool.messages.settled import WhereAsked
from carpool.model_settings import ModelKind, ModelSettings
from carpool.store.connection import CommandError
from carpool.wire.whereabouts import FOUND_MAX, BatcherAnswer
from carpool_batcher.core.scheduler import BEFORE_PARTS_MAX, BEFORE_PARTS_OF_PIECE, Scheduler
from carpool_batcher.questions import (
    COUNT_US_MAX,
    PAUSE_RATIO,
    PAUSE_US_MAX,
    PIECE_RUNS,
    QUESTIONS_MAX,
    Questions,
)
from carpool_batcher.recent import Recent
from support.scheduler_harness import MS, SchedulerHarness, run


class Clock:
    """Redis's, which goes on by `step_us` whenever it is read."""

    def __init__(self) -> None:
        self.at_us, self.step_us = 1000 * MS, 0

    def now_us(self) -> int:
        self.at_us += self.step_us
        return self.at_us


class Answers:
    """Where a batcher writes answers: a store without Redis."""

    name: Final = "b"

    def __init__(self) -> None:
        self.written: dict[str, BatcherAnswer] = {}
        self.is_full = False

    def publish_answer(self, name: str, answer: str, ttl_ms: int) -> None:
        if self.is_full:
            raise CommandError("OOM", "command not allowed")
        decoded = BatcherAnswer.decode(answer.encode())
        assert decoded is not None
        assert ttl_ms > 0
        self.written[name] = decoded


class Asked:
    """Questions about the requests of a scheduler, and their answers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.clock, self.store, self.recent = Clock(), Answers(), Recent()
        self.is_reading = False
        self.questions = Questions(
            cast(Any, self.store),
            scheduler,
            self.recent,
            cast(Any, self.clock),
            structlog.get_logger(),
            lambda: self.is_reading,
        )

    def ask(self, name: str) -> BatcherAnswer:
        self.questions.add(WhereAsked(name, "n"))
        list(self.questions.answer())
        return self.store.written.pop("n")


@pytest.fixture
def harness() -> SchedulerHarness:
    return SchedulerHarness(processes=1, max_batch_size=4, max_queue_size=100_000)


def test_nothing_is_due_until_somebody_asks(harness: SchedulerHarness) -> None:
    asked = Asked(harness.scheduler)
    assert asked.questions.due_us is None
    asked.questions.add(WhereAsked("a", "n"))
    assert asked.questions.due_us == 0
    list(asked.questions.answer())
    assert asked.questions.due_us is None


def test_a_request_from_waiting_to_in_flight_to_nowhere(harness: SchedulerHarness) -> None:
    asked = Asked(harness.scheduler)
    harness.offer("a b c d", tenant="acme", lane="wide", expiration=500)
    answer = asked.ask("c")
    assert (answer.batcher, answer.in_flight) == ("b", ())
    (waiting,) = answer.waiting
    assert (waiting.tenant, waiting.lane, waiting.before) == ("acme", "wide", 2)
    harness.poll()
    answer = asked.ask("c")
    assert answer.waiting == ()
    (in_flight,) = answer.in_flight
    assert (in_flight.batch, in_flight.position, in_flight.size) == ("1", 2, 4)
    assert in_flight.deadline_us == 500 * MS
    harness.settle(1)
    answer = asked.ask("c")
    assert (answer.waiting, answer.in_flight, answer.refused) == ((), (), ())


def test_a_request_that_was_answered_in_flight_is_not_there(harness: SchedulerHarness) -> None:
    harness.offer("a b", expiration=500)
    harness.poll()
    (expired,) = [harness.scheduler.in_flight.batches["1"].expiring[0]]
    harness.scheduler.in_flight.answered([expired])
    assert Asked(harness.scheduler).ask("a").in_flight == ()


def test_a_request_of_a_sequence_in_flight() -> None:
    scheduler = Scheduler(ModelSettings(max_batch_size=8), 1, kind=ModelKind.STATEFUL)
    for number, name in enumerate(("s", "t"), 1):
        part = SequencePart(name, True, False, None, SequencePart.place_of(f"{number}-0", 0))
        scheduler.offer(run(f"of-{name}", entry_id=f"{number}-0", sequence=part), 0)
    assert [one.sequence for one in Asked(scheduler).ask("of-t").waiting] == ["t"]
    (decision,) = scheduler.poll(0)
    scheduler.in_flight.launch("1", decision, 0)  # type: ignore[arg-type]
    (in_flight,) = Asked(scheduler).ask("of-t").in_flight
    assert (in_flight.position, in_flight.size) == (1, 2)


def test_equal_ids_of_different_producers_are_found_up_to_a_limit(harness: SchedulerHarness) -> None:
    for number in range(2 * FOUND_MAX):
        harness.offer("same", reply_to=f"reader-{number}")
    answer = Asked(harness.scheduler).ask("same")
    assert len({one.reply_to for one in answer.waiting}) == FOUND_MAX


def test_the_search_is_in_pieces_and_only_if_the_id_waits(harness: SchedulerHarness) -> None:
    for number in range(3 * PIECE_RUNS):
        harness.scheduler.offer(run(f"r{number}", entry_id=f"{number + 1}-0"), 0)
    asked = Asked(harness.scheduler)
    asked.questions.add(WhereAsked("unknown", "n"))
    assert list(asked.questions.answer()) == []
    asked.questions.add(WhereAsked(f"r{3 * PIECE_RUNS - 1}", "n"))
    assert len(list(asked.questions.answer())) >= 3 + BEFORE_PARTS_MAX // BEFORE_PARTS_OF_PIECE
    assert asked.store.written["n"].waiting


def test_many_questions_together_take_little_longer_than_one(harness: SchedulerHarness) -> None:
    """What goes before a request is counted while there is time; all else is told of each."""
    harness.offer("a b c d e f")
    asked = Asked(harness.scheduler)
    asked.clock.step_us = COUNT_US_MAX * 3 // 5
    for name in "bcdef":
        asked.questions.add(WhereAsked(name, name))
    list(asked.questions.answer())
    assert [asked.store.written[name].waiting[0].before for name in "bcdef"] == [1, None, None, None, None]


def test_the_search_ends_as_soon_as_all_copies_are_found(harness: SchedulerHarness) -> None:
    """Given two requests of different producers with one ID, a piece apart, and two pieces behind them."""
    for number in range(4 * PIECE_RUNS):
        name = "same" if number in (1, PIECE_RUNS + 1) else f"r{number}"
        harness.scheduler.offer(run(name, entry_id=f"{number + 1}-0", reply_to=f"reader-{number % 2}"), 0)
    asked = Asked(harness.scheduler)
    pieces = list(asked.questions._search({"same"}))
    assert len(pieces) == 2
    asked.questions.add(WhereAsked("same", "n"))
    list(asked.questions.answer())
    assert len(asked.store.written["n"].waiting) == 2


def test_the_next_search_waits_for_a_multiple_of_the_time_that_this_one_took(
    harness: SchedulerHarness,
) -> None:
    asked = Asked(harness.scheduler)
    asked.clock.step_us = 1 * MS
    before_us = asked.clock.at_us
    asked.ask("a")
    took_us = asked.clock.at_us - before_us - 1 * MS
    asked.clock.step_us = 0
    asked.questions.add(WhereAsked("a", "n"))
    assert asked.questions.due_us == asked.clock.at_us + PAUSE_RATIO * took_us
    list(asked.questions.answer())
    assert not asked.store.written
    asked.clock.at_us += PAUSE_RATIO * took_us
    list(asked.questions.answer())
    assert asked.store.written


def test_after_a_search_that_took_very_long_the_next_one_waits_for_half_a_second(
    harness: SchedulerHarness,
) -> None:
    asked = Asked(harness.scheduler)
    asked.clock.step_us = 1000 * MS
    asked.ask("a")
    asked.questions.add(WhereAsked("a", "n"))
    assert asked.questions.due_us == asked.clock.at_us + PAUSE_US_MAX


def test_what_is_not_valid_and_what_is_too_much_get_no_answer(harness: SchedulerHarness) -> None:
    asked = Asked(harness.scheduler)
    for name, answer in (("a b", "n"), ("a", "n/m"), ("", "n"), ("a", "")):
        asked.questions.add(WhereAsked(name, answer))
    assert asked.questions.due_us is None
    for number in range(QUESTIONS_MAX + 5):
        asked.questions.add(WhereAsked("a", f"n{number}"))
    list(asked.questions.answer())
    assert len(asked.store.written) == QUESTIONS_MAX


def test_a_full_redis_ends_nothing(harness: SchedulerHarness) -> None:
    asked = Asked(harness.scheduler)
    asked.store.is_full = True
    asked.questions.add(WhereAsked("a", "n"))
    list(asked.questions.answer())
    asked.store.is_full = False
    assert asked.ask("a").batcher == "b"
