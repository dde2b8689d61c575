"""Questions where a request is, their answers, and what they say to a person."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages.settled import ModelProcessesChanged, WhereAsked
from carpool.wire.batches import decode_settled
from carpool.wire.whereabouts import (
    BatcherAnswer,
    FoundLetter,
    FoundResult,
    InFlight,
    Refused,
    Waiting,
    Whereabouts,
    question_fields,
)

counts = st.integers(0, 1 << 53)
maybe = st.none() | counts
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
waiting = st.builds(
    Waiting, texts, texts, st.integers(0, 9), counts, maybe, texts, maybe, maybe, st.booleans(), texts, texts,
    texts,
)  # fmt: skip
in_flight = st.builds(
    InFlight, texts, counts, counts, counts, texts, texts, maybe, texts, counts, counts, counts, maybe
)
answers = st.builds(
    BatcherAnswer,
    texts,
    counts,
    st.lists(waiting, max_size=2).map(tuple),
    st.lists(in_flight, max_size=2).map(tuple),
    st.lists(st.builds(Refused, counts, texts, texts, texts), max_size=2).map(tuple),
    st.booleans(),
    counts,
)
WAITING = Waiting("de", "acme", 4, 1_000_000, 9_000_000, "all 2 model processes are busy", before=7)
IN_FLIGHT = InFlight("5-0", 0, 8, 1_000_000, process="w/0", renewed_ms=40, deliveries=1)
LETTER = FoundLetter("6-0", "it died", 2, 1_000_000)
RESULT = FoundResult("list", "", 50_000_000)
WITHDRAWN = Refused(3_000_000, "CANCELLED", "withdrawn", "it was withdrawn")


@settings(deadline=None)
@given(answers)
def test_answer_is_decoded_as_it_was_encoded(answer: BatcherAnswer) -> None:
    assert BatcherAnswer.decode(answer.encode().encode()) == answer


@pytest.mark.parametrize("text", [b"", b"{}", b'{"batcher": "b"}', b'["b", "x"]'])
def test_answers_that_are_not_understood_are_none(text: bytes) -> None:
    assert BatcherAnswer.decode(text) is None


def test_a_question_is_read_as_it_was_asked() -> None:
    flat = [str(part).encode() for part in question_fields("order-17", "a1")]
    assert decode_settled(flat) == WhereAsked("order-17", "a1")


def test_an_entry_with_half_a_question_is_none() -> None:
    assert decode_settled([b"where", b"order-17", b"size", b"0"]) == ModelProcessesChanged("")


def whereabouts(batcher: str = "answered", **found: object) -> Whereabouts:
    return Whereabouts("square", "a", 10_000_000, batcher, **found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("found", "state"),
    [
        (whereabouts(waiting=[WAITING], in_flight=[IN_FLIGHT]), "waiting"),
        (whereabouts(in_flight=[IN_FLIGHT]), "in flight"),
        (whereabouts(in_flight=[IN_FLIGHT._replace(chunks=3)]), "streaming"),
        (whereabouts(dead=[LETTER], results=[RESULT]), "dead"),
        (whereabouts(results=[RESULT], refused=[WITHDRAWN]), "answered"),
        (whereabouts(refused=[WITHDRAWN]), "withdrawn"),
        (whereabouts(refused=[WITHDRAWN._replace(reason="queue_size")]), "refused"),
        (whereabouts(), "unknown"),
    ],
)
def test_state(found: Whereabouts, state: str) -> None:
    assert found.state == state
    assert json.loads(json.dumps(found.as_json()))["state"] == state
    assert bool(found.readings()) == (state == "unknown")


def test_waiting_in_words() -> None:
    assert whereabouts(waiting=[WAITING]).lines() == [
        "a of square: waiting",
        "waits in lane 'de', tenant 'acme', priority 4; it arrived 9.0 s ago",
        "requests that go before it in this lane: 7",
        "why: all 2 model processes are busy",
        "deadline: 1.0 s ago",
    ]


def test_in_flight_in_words() -> None:
    suspect = IN_FLIGHT._replace(deliveries=3, starts=1, chunks=5)
    assert whereabouts(in_flight=[suspect]).lines() == [
        "a of square: streaming",
        "dispatched 9.0 s ago in batch 5-0, with 8 in it",
        "at model process w/0, which renewed its lease of it 40 ms ago",
        "suspect: fetched 3 times, because processes or workers that had it ended; started alone 1 times",
        "chunks written so far: 5",
    ]


def test_a_result_may_be_withheld() -> None:
    assert not any("withheld" in reading for reading in whereabouts().readings())
    assert any("withheld" in reading for reading in whereabouts(withheld=3).readings())


def test_a_batcher_that_is_still_reading_may_not_know_a_request() -> None:
    found = whereabouts(is_reading=True)
    assert found.lines()[0] == "a of square: not found yet, its batcher is still reading what waits"
    assert (found.state, found.as_json()["is_reading"]) == ("unknown", True)
    assert "it waits, and its batcher has not read it yet" in found.readings()
    assert whereabouts(waiting=[WAITING], is_reading=True).lines()[0] == "a of square: waiting"


def test_without_a_batcher_a_request_may_wait() -> None:
    assert "it waits" in whereabouts("none").readings()
    assert "it waits" not in whereabouts().readings()
