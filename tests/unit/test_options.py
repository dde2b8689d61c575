"""Options of requests: what cannot be sent is refused where it is given, and names the option."""

from __future__ import annotations

import dataclasses
import enum
import os
from typing import Any, Final

import hiredis
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.client.options import (
    RequestOptions,
    check_correlation_id,
    check_retries,
    check_sequence_id,
    checked_timeout_s,
    left_of,
    optional_fields,
)
from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.messages.requests import Entry, Run
from carpool.model_settings import ModelSettings
from carpool.wire.request_fields import (
    CARPOOL_FIELDS,
    COLUMN_FIELDS,
    MAX_EXTRA_BYTES,
    STORED_BODY_FIELDS,
)
from carpool.wire.runs import decode_attributes

SURROGATE: Final = os.fsdecode(b"\xff.png")
NO_DELAYS: Final[list[Any]] = ["", False, [], -1, float("nan")]
ENDLESS: Final = 10**5000  # Python does not write it, and hiredis ends the process


class Level(enum.IntEnum):
    HIGH = 9


class Owner(str, enum.Enum):  # noqa: UP042 (a StrEnum prints what it holds)
    ACME = "acme"


class Text(str):
    def __str__(self) -> str:
        return "another"


def kind_of(value: object) -> str:
    """A value in the name of a test: not every one can be written."""
    return type(value).__name__ if not isinstance(value, str) else ascii(value)[1:-1][:20]


def fields_of(**options: Any) -> dict[str, Any]:
    given: Any = options
    return optional_fields(given, None)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *[({name: SURROGATE}, name) for name in ("lane", "tenant", "accept", "content_type")],
        *[({name: True}, name) for name in ("lane", "tenant", "accept", "content_type", "priority", "cost")],
        *[({name: 2**70}, name) for name in ("lane", "cost", "priority", "sequence_index")],
        *[({name: ENDLESS}, name) for name in ("lane", "cost", "priority", "sequence_index", "not_before")],
        ({"cost": -(2**63) - 1}, "cost"),
        ({"lane": ["a"]}, "lane"),
        ({"content_type": 7}, "content_type"),
        ({"content_type": f"image/png; name={SURROGATE}"}, "content_type"),
        ({"content_type": "x" * 200}, "content_type"),
        ({"accept": 7}, "accept"),
        *[({name: 5.0}, name) for name in ("priority", "cost", "sequence_index")],
        *[({name: "5"}, name) for name in ("priority", "cost", "sequence_index", "not_before")],
        *[({name: np.True_}, name) for name in ("priority", "lane", "tenant", "not_before")],
        ({"priority": 10}, "priority"),
        ({"cost": -1}, "cost"),
        ({"fields": {"cost": "5"}}, "cost"),
        *[({"not_before": value}, "not_before") for value in NO_DELAYS],
        ({"fields": {"when": np.datetime64("2026")}}, "when"),
        ({"fields": {"number": np.longdouble(1)}}, "number"),
        ({"not_before": True}, "not_before"),
        ({"fields": {"file": SURROGATE}}, "file"),
        ({"fields": {"priority": True}}, "priority"),
        ({"fields": {"nothing": None}}, "nothing"),
        ({"fields": {"number": 2**64}}, "number"),
        ({"fields": {"number": ENDLESS}}, "number"),
        ({"fields": {"list": [ENDLESS]}}, "list"),
        ({"fields": {SURROGATE: "x"}}, "fields"),
        ({"fields": {1: "x"}}, "fields"),
        ({"fields": {b"name": "x"}}, "fields"),
        ({"fields": {ENDLESS: "x"}}, "fields"),
        ({"fields": 7}, "fields"),
        ({"fields": {"large": bytes(MAX_EXTRA_BYTES)}}, "fields"),
        ({"lane": "x" * MAX_EXTRA_BYTES}, "fields"),
        ({"sequence_id": SURROGATE}, "sequence_id"),
        ({"sequence_id": Text("s")}, "sequence_id"),
        ({"sequence_id": "s", "sequence_start": 1}, "sequence_start"),
        ({"sequence_id": "s", "sequence_index": True}, "sequence_index"),
        ({"sequence_id": "s", "sequence_index": 2**53 + 1}, "sequence_index"),
    ],
    ids=kind_of,
)
def test_what_cannot_be_sent_is_refused_by_its_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        fields_of(**options)
    assert named in caught.value.detail.partition(" must ")[0]
    assert caught.value.detail.encode()


@pytest.mark.parametrize("value", [SURROGATE, Text("a"), True, 7, ENDLESS, None, "", "a" * 129], ids=kind_of)
def test_ids_are_plain_text(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="correlation_id"):
        check_correlation_id(value, {})
    with pytest.raises(InvalidArgumentError, match="sequence_id"):
        check_sequence_id(value)


@pytest.mark.parametrize("value", [ENDLESS, -ENDLESS, True, "1", float("nan")], ids=kind_of)
def test_numbers_beside_the_fields_are_checked(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="timeout"):
        checked_timeout_s(value)
    with pytest.raises(InvalidArgumentError, match="retries"):
        check_retries(value)


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (Level.HIGH, 9),
        (np.int64(3), 3),
        (2**64 - 1, 2**64 - 1),
        (-(2**63), -(2**63)),
        (Owner.ACME, "acme"),
        (Text("x"), "x"),
        (np.str_("ü"), "ü"),
        (np.bytes_(b"\xff"), b"\xff"),
        (1.0, "1.0"),
        (np.float64(0.5), "0.5"),
        (np.float32(0.5), "0.5"),
        (np.float16(0.5), "0.5"),
        (float("nan"), "nan"),
        (True, 1),
        (np.False_, 0),
    ],
)
def test_members_of_enums_and_values_of_numpy_are_what_they_hold(value: Any, sent: Any) -> None:
    found = fields_of(fields={Text("k"): value})
    assert found == {"k": sent}
    assert (type(found["k"]), *map(type, found)) == (type(sent), str)


@pytest.mark.parametrize("name", ["lane", "tenant", "traceparent"])
@pytest.mark.parametrize("value", [7, np.int8(7), 0.5, np.float32(0.5), Owner.ACME])
def test_numbers_in_fields_of_text_are_their_digits(name: str, value: Any) -> None:
    """In a packed entry, a number would be refused."""
    text = value.value if isinstance(value, Owner) else str(value)
    options = {} if name == "traceparent" else {name: value}
    assert fields_of(**options) == dict.fromkeys(options, text)
    assert fields_of(fields={name: value}) == {name: text}


@pytest.mark.parametrize("five", [5, np.int64(5), np.uint8(5)])
def test_numbers_of_numpy_are_numbers(five: Any) -> None:
    options = {
        "priority": five,
        "cost": five,
        "sequence_id": "s",
        "sequence_index": five,
        "sequence_end": True,
    }
    found = fields_of(**options)
    assert found == {**options, "sequence_end": 1}
    assert {type(found[name]) for name in ("priority", "cost", "sequence_index")} == {int}
    assert check_retries(five) == 5
    seconds: Any
    for seconds in (five, np.float32(five), np.float64(five)):
        timeout_s = checked_timeout_s(seconds)
        assert (timeout_s, type(timeout_s) in (int, float)) == (5, True)
        assert fields_of(not_before=seconds) == {"not_before": 5000}
        assert left_of({"not_before": seconds}, None, 2)["not_before"] == 3
    assert fields_of(not_before=0) == fields_of(not_before=None) == {}
    endless: Any = np.float32("inf")
    assert checked_timeout_s(endless) is None


OWN_FIELDS: Final = CARPOOL_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS | {"tickets"}


@pytest.mark.parametrize("name", sorted(OWN_FIELDS - {"priority", "lane", "cost", "version"}))
def test_fields_with_which_an_entry_is_something_else_are_refused(name: str) -> None:
    for spelt in (name, Text(name)):
        with pytest.raises(InvalidArgumentError, match=rf"^INVALID_ARGUMENT: '?{name}'?: .*remove it from"):
            fields_of(fields={spelt: "1"})


def test_options_may_also_be_among_the_fields() -> None:
    fields = {
        "priority": 7,
        "lane": "a",
        "cost": 2,
        "tenant": "acme",
        "traceparent": "00",
        "accept": "image/png",
        "retries": "a field of this name",
    }
    assert fields_of(fields=fields) == fields
    assert fields_of(fields=fields, lane="b", cost=None)["lane"] == "b"


ANYTHING: Final = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.integers(-(2**66), 2**66),
        st.floats(),
        st.text(st.characters(exclude_categories=())),
        st.binary(),
        st.sampled_from([Level.HIGH, Owner.ACME, np.int8(1), np.float32(1), np.True_, SURROGATE]),
        st.just(5000).map(lambda digits: 10**digits),
    ),
    st.lists,
    max_leaves=3,
)
ANY_OPTIONS: Final = st.fixed_dictionaries(
    {},
    optional={
        "fields": st.dictionaries(st.text(st.characters(exclude_categories=())) | st.integers(), ANYTHING),
        **{name: ANYTHING for name in RequestOptions.__annotations__ if name not in ("fields", "retries")},
    },
)


@given(ANY_OPTIONS)
def test_whatever_is_accepted_can_be_sent(options: Any) -> None:
    """Alone and packed, and it means the same to a batcher. All else is one kind of error."""
    try:
        fields = optional_fields(options, None)
    except InvalidArgumentError as error:
        assert error.detail.encode()
        return
    alone = hiredis.pack_command(tuple(part for pair in fields.items() for part in pair))  # type: ignore[arg-type]
    reader = hiredis.Reader()
    reader.feed(alone)
    flat = reader.gets() or []
    unpacked = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
    packed = msgpack.unpackb(msgpack.packb(fields))
    assert outcome(unpacked) == outcome(packed)


ENTRY: Final = Entry("1-0", 0)


def outcome(fields: dict[str, Any]) -> Any:
    """What a batcher reads, and the model gets, or why the request is refused."""
    run = Run(ENTRY, ["a"], [b"7"])
    try:
        decode_attributes(run, fields, ModelSettings())
    except CarpoolError as error:
        return error.detail
    return {field.name: getattr(run, field.name) for field in dataclasses.fields(run)}
