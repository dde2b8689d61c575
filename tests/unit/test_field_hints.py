"""Fields that look like misspelt ones of the protocol."""

from __future__ import annotations

import pytest

from carpool.errors import INVALID_ARGUMENT
from carpool.messages.requests import CONTENT_TYPES, JSON, MSGPACK, RAW, Run, Withdrawal
from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool.wire.field_hints import NAMES_LOOKED_AT_MAX, field_warnings, meant_field, meant_type, warnings_of
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    COLUMN_FIELDS,
    PASSED_ON_FIELDS,
    STORED_BODY_FIELDS,
)
from carpool.wire.requests import decode_entry

REFUSING = ModelSettings(unknown_fields="refuse")


def decoded(settings: ModelSettings, **fields: str) -> object:
    flat = [part.encode() for pair in fields.items() for part in pair]
    _, (item,) = decode_entry(b"1-0", flat, settings)
    return item


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("prioritty", "priority"),
        ("Priority", "priority"),
        ("PRIORITY", "priority"),
        ("prioirty", "priority"),
        ("correlationId", "correlation_id"),
        ("correlation-id", "correlation_id"),
        ("expiraton", "expiration"),
        ("reply-to", "reply_to"),
        ("content-type", "content_type"),
        ("tennant", "tenant"),
        ("Withdraw", "withdraw"),
        ("rowhead", "row_head"),
        ("deadline", "expiration"),
        ("timeout_ms", "expiration"),
        ("ttl", "expiration"),
        ("sequence_idx", "sequence_index"),
    ],
)
def test_misspelt_field_is_recognised(written: str, meant: str) -> None:
    assert meant_field(written) == meant
    (warning,) = field_warnings([written])
    assert f"did you mean {meant!r}?" in warning


@pytest.mark.parametrize(
    "name",
    ["", "user", "lane_id", "cost_center", "stream_id", "batch", "p", "x" * 1000, "prio", "ü", "model"],
)
def test_other_field_is_not_taken_for_a_misspelt_one(name: str) -> None:
    assert meant_field(name) == ""


def test_fields_of_the_protocol_have_no_warning() -> None:
    known = PASSED_ON_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS
    for name in sorted(known):
        assert field_warnings([name]) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"correlation_ids": "x y z", "rows": "12131"},
        {"correlation_ids": "x y", "rows": "12", "priority": "99"},
        {"body_key": "x", "body_bytes": "many"},
        {"row_head": "1"},
        {"bodies": "1"},
    ],
)
def test_refused_request_with_fields_of_the_protocol_has_no_warning(fields: dict[str, str]) -> None:
    item = decoded(ModelSettings(), **fields)
    assert isinstance(item, Refusal) and item.warnings == ()


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        ({"bdy": "7"}, "; is it what you sent as 'bdy'?"),
        ({"Body": "7"}, "; is it what you sent as 'Body'?"),
        ({"payload": "4"}, "; is it what you sent as 'payload'?"),
        ({"colour": "red", "data": "4"}, "; is it what you sent as 'data'?"),
        ({"colour": "red"}, ""),
        ({"tenant": "gold"}, ""),
    ],
)
def test_missing_body_is_looked_for_under_other_names(fields: dict[str, str], hint: str) -> None:
    item = decoded(ModelSettings(), **fields)
    assert isinstance(item, Refusal) and item.detail == f"body: missing{hint}"


def test_only_some_names_are_looked_at() -> None:
    assert len(field_warnings([f"priorit{number}" for number in range(64)])) == NAMES_LOOKED_AT_MAX


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("application/jsn", JSON),
        ("aplication/json", JSON),
        ("text/json", JSON),
        ("application/x-json; charset=utf-8", JSON),
        ("application/x-msgpack", MSGPACK),
        ("application/vnd.msgpack", MSGPACK),
        ("application/messagepack", MSGPACK),
        ("application/octetstream", RAW),
    ],
)
def test_misspelt_content_type_is_recognised(written: str, meant: str) -> None:
    assert meant_type(written) == meant
    for extra, content_type, field in (
        (None, written, "content_type"),
        ({"user": b"x"}, written, "content_type"),
        ({"accept": written.encode()}, JSON, "accept"),
    ):
        (warning,) = warnings_of(extra, content_type)
        assert warning == f"{field} {written!r} means plain bytes to Carpool: did you mean {meant!r}?"


@pytest.mark.parametrize(
    "content_type",
    [
        "image/png",
        "text/plain",
        "application/jsonl",
        "application/json-seq",
        "application/ld+json",
        "audio/wav",
    ],
)
def test_other_content_type_is_not_taken_for_a_misspelt_one(content_type: str) -> None:
    assert warnings_of({"accept": content_type.encode()}, content_type) == ()


def test_content_types_that_are_known_have_no_warning() -> None:
    for content_type in CONTENT_TYPES:
        assert warnings_of({"accept": content_type.encode()}, content_type) == ()


def test_unknown_fields_are_passed_on_or_refused() -> None:
    fields = {"body": "7", "tenant": "a", "traceparent": "b", "priority": "5"}
    for settings in (ModelSettings(), REFUSING):
        item = decoded(settings, **fields)
        assert isinstance(item, Run) and item.extra == {"tenant": b"a", "traceparent": b"b"}
    assert isinstance(decoded(ModelSettings(), **fields, prioritty="9"), Run)
    for name, hint in (("prioritty", "did you mean 'priority'?"), ("user", "unknown_fields")):
        item = decoded(REFUSING, **fields, **{name: "9"})
        assert isinstance(item, Refusal) and item.status == INVALID_ARGUMENT
        assert item.detail.startswith(f"{name!r}: is not a field that Carpool knows; ")
        assert hint in item.detail


def test_refusal_has_the_warnings_of_its_request() -> None:
    item = decoded(ModelSettings(), body_="7")
    assert isinstance(item, Refusal) and item.detail == "body: missing; is it what you sent as 'body_'?"
    assert [warning for warning in item.warnings if "did you mean 'body'?" in warning]
    plain = decoded(ModelSettings(), priority="11", body="7")
    assert isinstance(plain, Refusal) and plain.warnings == ()


@pytest.mark.parametrize("names", ["t4,t5", "t4;t5 t6/t7", "<t4>"])
def test_withdrawal_without_a_correlation_id_is_refused(names: str) -> None:
    item = decoded(ModelSettings(), withdraw=names)
    assert isinstance(item, Refusal) and item.status == INVALID_ARGUMENT
    assert item.detail.startswith("withdraw: ") and "separated by spaces" in item.detail
    assert item.correlation_ids == ["1-0"]


@pytest.mark.parametrize("names", ["t4", "t4 t5", "t4,t5 t6", "", " "])
def test_other_withdrawals_are_carried_out(names: str) -> None:
    assert isinstance(decoded(ModelSettings(), withdraw=names), Withdrawal)


def test_every_field_is_known() -> None:
    assert all(meant_field(name) == name for name in CARPOOL_FIELDS - {"sequence_place", "arrival"})
