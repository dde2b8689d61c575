"""The fields of sequences: decoding, places, and putting back."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from carpool.errors import INVALID_ARGUMENT
from carpool.messages.requests import Run, SequencePart, SequencesEnd
from carpool.messages.results import Refusal
from carpool.wire.requests import encode_runs
from support.wire import ENTRY_ID, decode

HERE = [SequencePart.place_of(ENTRY_ID, position) for position in range(5)]


def parts(decoded: list[Any]) -> list[SequencePart | None]:
    return [item.sequence if isinstance(item, Run) else item.breaks for item in decoded]


def test_a_request_of_a_sequence() -> None:
    fields = {"body": "7", "sequence_id": "mic7", "sequence_start": "1", "sequence_index": "0"}
    _, (run,) = decode(fields)
    assert isinstance(run, Run)
    assert run.sequence == SequencePart("mic7", True, False, 0, HERE[0])
    assert not run.extra


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"sequence_start": "1"}, "sequence_id: missing"),
        ({"sequence_index": "3"}, "sequence_id: missing"),
        ({"sequence_id": "a b"}, "sequence_id: must have"),
        ({"sequence_id": "a", "sequence_start": "2"}, "sequence_start: must be"),
        ({"sequence_id": "a", "sequence_end": "x"}, "sequence_end: must be"),
        ({"sequence_id": "a", "sequence_index": "-1"}, "sequence_index: must be"),
        ({"sequence_id": "a", "sequence_index": "0"}, "sequence_index: must be 0 with sequence_start"),
        ({"sequence_id": "a", "sequence_index": "1", "sequence_start": "1"}, "sequence_index: must be 0"),
    ],
)
def test_invalid_fields(fields: dict[str, str], detail: str) -> None:
    _, (refusal,) = decode({"body": "7", **fields})
    assert isinstance(refusal, Refusal)
    assert (refusal.status, refusal.detail.startswith(detail)) == (INVALID_ARGUMENT, True)
    assert refusal.breaks is None


def test_an_invalid_request_of_a_sequence_breaks_it() -> None:
    _, (refusal,) = decode({"body": "7", "sequence_id": "a", "priority": "99"})
    assert isinstance(refusal, Refusal)
    assert refusal.breaks == SequencePart("a", False, False, None, HERE[0])


def test_each_request_is_a_run_of_its_own_in_its_place() -> None:
    elements = [
        {"correlation_id": "p", "body": b"1"},
        {"correlation_id": "a", "body": b"1", "sequence_id": "s", "sequence_start": 1},
        {"correlation_id": "b", "body": b"1", "sequence_id": "s"},
        {"correlation_id": "no spaces", "body": b"1", "sequence_id": "s"},
        {"correlation_id": "c", "body": b"1", "sequence_id": "s"},
    ]
    entry, decoded = decode({"requests": msgpack.packb(elements)})
    places = [part and part.place for part in parts(decoded)]
    assert places == [None, *HERE[1:]]
    assert [run.correlation_ids for run in entry.runs] == [["p"], ["a"], ["b"], ["c"]]


def test_columns_are_divided() -> None:
    entry, decoded = decode({"correlation_ids": "a b c", "rows": "123", "sequence_id": "s"})
    assert [part and part.place for part in parts(decoded)] == HERE[:3]
    assert [run.bodies[0] for run in entry.runs] == [b"1", b"2", b"3"]


def test_a_request_put_back_keeps_its_place() -> None:
    earlier = SequencePart.place_of("5-1", 3)
    _, (run,) = decode({"body": "7", "sequence_id": "a", "sequence_index": "2", "sequence_end": "1"})
    assert isinstance(run, Run)
    assert run.sequence is not None
    run.sequence = run.sequence._replace(place=earlier)
    put_back = {"requests": encode_runs([run]), "arrival": "5"}
    _, (again,) = decode(put_back)
    assert isinstance(again, Run)
    assert again.sequence == run.sequence
    # Expect: a producer's entry has no such field, and none is later than where it stands
    _, (forged,) = decode({"requests": put_back["requests"]})
    assert parts([forged])[0] == run.sequence._replace(place=HERE[0])
    run.sequence = run.sequence._replace(place=SequencePart.place_of("9999999999999-0", 0))
    _, (late,) = decode({"requests": encode_runs([run]), "arrival": "5"})
    assert parts([late])[0] == run.sequence._replace(place=HERE[0])


def test_sequences_are_ended() -> None:
    entry, (end,) = decode({"end_sequences": "mic7 mic8 a/b mic7"})
    assert end == SequencesEnd(entry, ["mic7", "mic8"], HERE[0])
    assert entry.runs == []
