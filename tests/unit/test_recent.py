"""What a batcher remembers of requests that it refused, and of errors: bounded, and the latest."""

from __future__ import annotations

from carpool.errors import CANCELLED, RESOURCE_EXHAUSTED
from carpool.messages.settled import Failures
from carpool_batcher.core.decisions import refusal
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.recent import ERRORS_MAX, REFUSED_MAX, Recent
from support.scheduler_harness import run, settled


def refuse(recent: Recent, names: str, at_us: int, detail: str = "it was withdrawn") -> None:
    recent.refused([refusal(run(names), CANCELLED, "withdrawn", detail)], at_us)


def fail(recent: Recent, error: str, at_us: int, **statuses: int) -> None:
    event = settled("5-0", 4, 5, at_us, failures=Failures(statuses, error))
    recent.settled(event, InFlightBatch(0, 4, "", {}, [(0, 4)]))


def test_refused_requests_are_found_by_their_ids() -> None:
    recent = Recent()
    refuse(recent, "a b", 5)
    refuse(recent, "b", 9, "again")
    assert [one.at_us for one in recent.find_refused("a")] == [5]
    assert [(one.at_us, one.detail) for one in recent.find_refused("b")] == [
        (5, "it was withdrawn"),
        (9, "again"),
    ]
    assert recent.find_refused("c") == ()


def test_the_oldest_are_forgotten() -> None:
    recent = Recent()
    for at in range(2 * REFUSED_MAX):
        refuse(recent, f"r{at}", at)
    assert not recent.find_refused(f"r{REFUSED_MAX - 1}")
    assert recent.find_refused(f"r{REFUSED_MAX}")
    assert recent.find_refused(f"r{2 * REFUSED_MAX - 1}")


def test_a_refusal_of_more_than_are_kept_is_counted_and_not_kept() -> None:
    recent = Recent()
    refuse(recent, "kept", 1)
    refuse(recent, " ".join(f"r{at}" for at in range(REFUSED_MAX + 1)), 2)
    assert recent.find_refused("kept")
    assert not recent.find_refused("r0")
    assert recent.errors()[0].number == REFUSED_MAX + 2


def test_errors_are_grouped_and_the_latest_comes_first() -> None:
    recent = Recent()
    fail(recent, "KeyError at model.py:14", 10, INTERNAL=3)
    fail(recent, "KeyError at model.py:14", 30, INTERNAL=1)
    fail(recent, "KeyError at model.py:15", 20, INTERNAL=1)
    fail(recent, "", 40, DEADLINE_EXCEEDED=2)
    full = refusal(run("a b"), RESOURCE_EXHAUSTED, "queue_size", "the queue is full: 16 requests wait")
    recent.refused([full], 50)
    recent.refused([full._replace(detail="the queue is full: 17 requests wait")], 60)
    assert [(one.source, one.status, one.text, one.number, one.last_us) for one in recent.errors()] == [
        ("batcher", "RESOURCE_EXHAUSTED", "the queue is full: # requests wait", 4, 60),
        ("model", "DEADLINE_EXCEEDED", "", 2, 40),
        ("model", "INTERNAL", "KeyError at model.py:14", 4, 30),
        ("model", "INTERNAL", "KeyError at model.py:15", 1, 20),
    ]
    assert recent.errors()[0].last == "the queue is full: 17 requests wait"
    assert (recent.errors()[0].last_id, recent.errors()[2].last_id) == ("a", "5-0")


def test_kinds_of_errors_are_bounded() -> None:
    recent = Recent()
    for at in range(3 * ERRORS_MAX):
        fail(recent, f"{'x' * at} at model.py:{at}", at, INTERNAL=1)
        fail(recent, "one that comes again", at, INTERNAL=1)
    errors = recent.errors()
    assert len(errors) == ERRORS_MAX
    assert max(errors, key=lambda one: one.number).number == 3 * ERRORS_MAX
