"""Entries of a request stream, and what they are decoded to."""

from __future__ import annotations

from typing import Any, Final

from contract.cases.notation import JSON, Bytes, Case, fields_of

ENTRY_ID: Final = "1700000000123-4"
ARRIVAL_MS: Final = 1700000000123


def entry(name: str, *flat: Any, settings: Case | None = None, becomes: list[Case]) -> Case:
    """One entry of a request stream, and what it is decoded to."""
    case = {"name": name, "id": ENTRY_ID, "fields": fields_of(flat), "becomes": becomes}
    return case | ({"settings": settings} if settings else {})


def request(correlation_id: str = ENTRY_ID, body: Bytes = "7", **others: Any) -> Case:
    """A decoded request; every property not given has its default."""
    understood = {
        "correlation_id": correlation_id,
        "body": body,
        "content_type": JSON,
        "reply_to": None,
        "arrival_ms": ARRIVAL_MS,
        "deadline_ms": None,
        "priority": 4,
        "lane": "",
        "cost": 1,
        "reply_columns": False,
        "stream": False,
        "fields": {},
    }
    assert others.keys() <= {*understood, "sequence", "not_before_ms", "version"}
    return {"request": understood | others}


def stored(correlation_id: str, key: str, size_bytes: int, **others: Any) -> Case:
    """A decoded request whose body its producer stored under a key of its own."""
    understood = request(correlation_id, **others)["request"]
    del understood["body"]
    return {"request": understood | {"stored_body": [key, size_bytes]}}


def refusal(field: str, correlation_id: str = ENTRY_ID, **others: Any) -> Case:
    """A refusal. `content_type` decides the encoding of its envelope."""
    answer = {
        "status": "INVALID_ARGUMENT",
        "field": field,
        "correlation_id": correlation_id,
        "reply_to": None,
        "content_type": JSON,
    }
    assert others.keys() <= answer.keys()
    return {"refusal": answer | others}
