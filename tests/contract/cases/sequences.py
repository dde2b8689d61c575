"""Requests of sequences, and entries that end sequences."""

from __future__ import annotations

from typing import Any

from contract.cases.entries import entry, refusal, request
from contract.cases.notation import Bytes, Case, pack


def sequences() -> list[Case]:
    """Requests of sequences, and entries that end sequences."""

    def part(index: int | None = None, *, start: bool = False, end: bool = False) -> Case:
        return {"sequence_id": "mic7", "start": start, "end": end, "index": index}

    def case(name: str, *flat: Any, **expected: Any) -> Case:
        fields = ("body", "7", "sequence_id", "mic7", *flat)
        return entry(name, *fields, becomes=[request(sequence=part(**expected))])

    def refused(name: str, *flat: Any, field: str) -> Case:
        return entry(name, "body", "7", *flat, becomes=[refusal(field)])

    def ended(name: str, value: Bytes, *sequence_ids: str) -> Case:
        return entry(name, "end_sequences", value, becomes=[{"end_sequences": list(sequence_ids)}])

    one, two = ({"correlation_id": name, "body": b"7"} for name in "ab")
    start, end = {"sequence_start": 1}, {"sequence_end": "1", "sequence_index": 1}
    return [
        case("neither the first nor the last request"),
        case("the first request", "sequence_start", "1", start=True),
        case("the last request", "sequence_end", "1", end=True),
        case("the only request", "sequence_start", "1", "sequence_end", "1", start=True, end=True),
        case("neither, said so", "sequence_start", "0", "sequence_end", "0"),
        case("the first one, numbered", "sequence_start", "1", "sequence_index", "0", start=True, index=0),
        case("a request with an index", "sequence_index", "12", index=12),
        case("the largest index", "sequence_index", str(2**53), index=2**53),
        entry(
            "requests of an entry, with a field that they share",
            *("sequence_id", "mic7", "requests", pack([one | start, two | end])),
            becomes=[
                request("a", sequence=part(start=True)),
                request("b", sequence=part(index=1, end=True)),
            ],
        ),
        entry(
            "columns",
            *("sequence_id", "mic7", "correlation_ids", "a b", "rows", "12"),
            becomes=[request("a", "1", sequence=part()), request("b", "2", sequence=part())],
        ),
        entry(
            "requests of several sequences, and of none",
            "requests",
            pack([one | {"sequence_id": "mic7"}, two]),
            becomes=[request("a", sequence=part()), request("b")],
        ),
        *(
            refused(f"{field} without sequence_id", field, "1", field="sequence_id")
            for field in ("sequence_start", "sequence_end", "sequence_index")
        ),
        *(
            refused(f"sequence_id {what}", "sequence_id", value, field="sequence_id")
            for what, value in {"is empty": "", "has a space": "a b", "is too long": "a" * 129}.items()
        ),
        *(
            refused(f"{field} {value!r}", "sequence_id", "mic7", field, value, field=field)
            for field in ("sequence_start", "sequence_end")
            for value in ("2", "-1", "", "true")
        ),
        *(
            refused(f"sequence_index {value!r}", "sequence_id", "mic7", *flag, "sequence_index", value,
                    field="sequence_index")
            for value, *flag in (
                ("-1",), ("",), ("1.0",), (str(2**53 + 1),), ("0",), ("1", "sequence_start", "1"),
            )
        ),
        ended("one sequence is ended", "mic7", "mic7"),
        ended("several sequences are ended, each once", "mic7 mic8 mic7", "mic7", "mic8"),
        ended("what is no name is left out", "a/b  mic7 ", "mic7"),
        ended("no sequence is ended", ""),
    ]  # fmt: skip
