"""Bodies: values there and back in every content type, and limits that hold before anything is built."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import InternalError, InvalidArgumentError
from carpool.messages import CONTENT_TYPES, JSON, MSGPACK, RAW
from carpool.wire.bodies import MAX_CONTAINERS, MAX_DEPTH, MAX_JSON_ITEMS, decode_body, encode_body

fast = settings(deadline=None)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # all but halves of surrogate pairs
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
scalars = st.none() | st.booleans() | numbers | texts


def nested(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
        max_leaves=12,
    )


arrays = st.sampled_from(
    [np.array(1.5, "f4"), np.arange(6, dtype="<i2").reshape(2, 3), np.zeros((0, 2), "?")]
)


def equal(one: Any, other: Any) -> bool:
    """Equal in value and in type, arrays included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    return bool(one == other)


def refusal_of(content_type: str, body: bytes) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_body(content_type, body)
    return caught.value.detail


def deep(content_type: str, depth: int) -> bytes:
    return b"[" * depth + b"]" * depth if content_type == JSON else b"\x91" * (depth - 1) + b"\x90"


@contextmanager
def at_most(*, seconds: float, megabytes: float) -> Iterator[None]:
    """What is done here takes little time and memory. The seconds are many times what they need to be."""
    tracemalloc.start()
    started_s = time.process_time()
    try:
        yield
        assert time.process_time() - started_s < seconds
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


# --- there and back ----------------------------------------------------------------------------------------


@fast
@given(nested(scalars))
def test_a_value_is_the_same_after_a_trip_in_json(value: Any) -> None:
    assert equal(decode_body(JSON, encode_body(JSON, value)), value)


@fast
@given(nested(scalars | st.binary(max_size=8) | st.floats(allow_nan=False)))
def test_a_value_is_the_same_after_a_trip_in_msgpack(value: Any) -> None:
    assert equal(decode_body(MSGPACK, encode_body(MSGPACK, value)), value)


@fast
@given(nested(scalars | arrays), st.sampled_from([JSON, MSGPACK]))
def test_arrays_anywhere_in_a_value_are_the_same_after_a_trip(value: Any, content_type: str) -> None:
    assert equal(decode_body(content_type, encode_body(content_type, value)), value)


@fast
@given(st.binary())
def test_bytes_are_the_same_after_a_trip(value: bytes) -> None:
    assert encode_body(RAW, value) == decode_body(RAW, value) == value
    assert encode_body(RAW, bytearray(value)) == encode_body(RAW, memoryview(value)) == value


def test_octet_stream_takes_text_and_arrays_as_their_bytes() -> None:
    assert encode_body(RAW, "ä") == "ä".encode()
    assert encode_body(RAW, np.array([1, 2], "<i2")) == b"\1\0\2\0"


def test_json_is_compact_and_utf8() -> None:
    assert encode_body(JSON, {"ö": [1, 2.5, None]}) == '{"ö":[1,2.5,null]}'.encode()


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("scalar", "value"),
    [(np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True), (np.str_("ä"), "ä"), ((1, 2), [1, 2])],
)
def test_scalars_of_numpy_and_tuples_are_plain_on_the_wire(
    content_type: str, scalar: Any, value: Any
) -> None:
    assert equal(decode_body(content_type, encode_body(content_type, scalar)), value)
    assert equal(decode_body(content_type, encode_body(content_type, [scalar])), [value])


# --- what cannot be written --------------------------------------------------------------------------------

CIRCLE: list[Any] = []
CIRCLE.append(CIRCLE)
SELDOM = [
    object(),
    {1, 2},
    1j,
    np.zeros(2, "c8"),
    np.zeros(2, "O"),
    CIRCLE,
    np.longdouble(1),
    "\ud800",
    ["\ud800"],
]


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("value", SELDOM)
def test_what_cannot_be_written_is_an_internal_error(content_type: str, value: Any) -> None:
    with pytest.raises(InternalError, match=f"^INTERNAL: the value cannot be written as {content_type}: "):
        encode_body(content_type, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], b"bytes", {"a": [b""]}, {(1, 2): 3}])
def test_some_values_have_no_place_in_json(value: Any) -> None:
    with pytest.raises(InternalError):
        encode_body(JSON, value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_msgpack_has_whole_numbers_of_64_bits(value: int) -> None:
    assert decode_body(JSON, encode_body(JSON, value)) == value
    with pytest.raises(InternalError):
        encode_body(MSGPACK, value)


@pytest.mark.parametrize("value", [7, None, [b""], "\ud800"])
def test_octet_stream_takes_nothing_else(value: Any) -> None:
    with pytest.raises(InternalError):
        encode_body(RAW, value)


# --- what cannot be read -----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=500)
@given(st.sampled_from(CONTENT_TYPES), st.binary(max_size=60))
@example(MSGPACK, b"\xc7\x03\xffabc")  # a timestamp of a length that none has
@example(MSGPACK, b"\x81\x90\x01")  # a list as a name
@example(MSGPACK, b"\xdf\xff\xff\xff\xff")
@example(JSON, b'"\xed\xa0\x80"')  # half a surrogate pair, as nobody may write it
def test_any_bytes_are_a_value_or_refused(content_type: str, body: bytes) -> None:
    try:
        decode_body(content_type, body)
    except InvalidArgumentError as error:
        assert error.detail.startswith("body")
        assert ": " in error.detail


@settings(deadline=None, max_examples=500)
@given(
    nested(
        scalars
        | st.sampled_from(["FP32", "INT8"])
        | st.builds(
            lambda datatype, shape, data: {"datatype": datatype, "shape": shape, "data": data},
            scalars | st.just("FP32"),
            scalars | st.lists(st.integers(0, 3), max_size=3),
            scalars | st.lists(scalars, max_size=4),
        )
    ),
    st.sampled_from([JSON, MSGPACK]),
)
def test_any_value_with_tensors_in_it_is_read_or_refused(value: Any, content_type: str) -> None:
    try:
        decode_body(content_type, encode_body(content_type, value))
    except InvalidArgumentError as error:
        assert error.detail.partition(": ")[0].rpartition(".")[2] in ("datatype", "shape", "data")


@pytest.mark.parametrize("body", [b"NaN", b"[1,Infinity]", b'{"a":-Infinity}'])
def test_json_has_no_number_that_is_none(body: bytes) -> None:
    assert refusal_of(JSON, body).startswith("body: not JSON (")


def test_json_numbers_may_be_large_but_not_endless() -> None:
    assert decode_body(JSON, b"9" * 4000) == int("9" * 4000)
    assert refusal_of(JSON, b"9" * 1_000_000).startswith("body: not JSON (")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
def test_json_is_utf8(encoding: str) -> None:
    assert refusal_of(JSON, '["ä"]'.encode(encoding)).startswith("body: not ")


@pytest.mark.parametrize(
    "extension", [msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), msgpack.ExtType(127, b"")]
)
def test_msgpack_extensions_are_refused_wherever_they_are(extension: Any) -> None:
    for field, value in {
        "body": extension,
        "body[1]": [1, extension],
        "body.a": {"a": extension},
        "body.a[0][0]": {"a": [[extension]]},
    }.items():
        assert refusal_of(MSGPACK, msgpack.packb(value)).partition(": ")[0] == field


def test_a_refusal_says_where_and_keeps_it_short() -> None:
    wrong = {"datatype": "X", "shape": [], "data": []}
    body = json.dumps({"rows": [0, {"a" * 1000: wrong}]}).encode()
    field, _, _ = refusal_of(JSON, body).partition(": ")
    assert field == f"body.rows[1].{'a' * 40}.datatype"


def test_names_may_be_bytes_in_msgpack() -> None:
    assert decode_body(MSGPACK, msgpack.packb({b"\xff": 1})) == {b"\xff": 1}
    wrong = {"datatype": "X", "shape": [], "data": []}
    assert refusal_of(MSGPACK, msgpack.packb({b"\xff": wrong})).partition(": ")[0] == "body.b'\\xff'.datatype"


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_depth_has_a_limit(content_type: str) -> None:
    decode_body(content_type, deep(content_type, MAX_DEPTH))
    assert (
        refusal_of(content_type, deep(content_type, MAX_DEPTH + 1)) == f"body: nested deeper than {MAX_DEPTH}"
    )


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("depth", [1_000, 100_000, 5_000_000])
def test_no_depth_is_costly(content_type: str, depth: int) -> None:
    body = deep(content_type, depth)
    with at_most(seconds=5, megabytes=20):
        refusal_of(content_type, body)


def test_depth_counts_maps_too() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = {"a": value}
    body = msgpack.packb(value)
    assert decode_body(MSGPACK, body) == value
    assert refusal_of(MSGPACK, b"\x81\xa1a" + body) == f"body: nested deeper than {MAX_DEPTH}"


def test_json_has_a_number_of_items() -> None:
    items = MAX_JSON_ITEMS - 1  # the list itself counts too
    decode_body(JSON, b"[0" + b",0" * items + b"]")
    assert refusal_of(JSON, b"[0" + b",0" * (items + 1) + b"]").startswith("body: more than ")


@pytest.mark.parametrize("inner", [b"[],", b"{},", b'{"":[]},', b",,,"])
def test_no_number_of_items_in_json_is_costly(inner: bytes) -> None:
    body = b"[" + inner * (12_000_000 // len(inner)) + b"0]"
    with at_most(seconds=5, megabytes=20):
        assert refusal_of(JSON, body).startswith("body: more than ")


def test_msgpack_has_a_number_of_containers() -> None:
    inside = MAX_CONTAINERS - 1
    decode_body(MSGPACK, b"\xdd" + inside.to_bytes(4, "big") + b"\x90" * inside)
    body = b"\xdd" + (inside + 1).to_bytes(4, "big") + b"\x90" * (inside + 1)
    assert refusal_of(MSGPACK, body) == f"body: more than {MAX_CONTAINERS} arrays and maps"


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\x91\x90", b"\x81\xa0\x80"])
def test_no_number_of_containers_in_msgpack_is_costly(inner: bytes) -> None:
    count = 8_000_000 // len(inner)
    body = b"\xdd" + count.to_bytes(4, "big") + inner * count
    with at_most(seconds=5, megabytes=120):  # 64 MB of them for the list's own places
        assert refusal_of(MSGPACK, body).startswith("body: more than ")


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
def test_a_claimed_length_is_not_allocated(head: bytes) -> None:
    with at_most(seconds=5, megabytes=1):
        assert refusal_of(MSGPACK, head + b"\xff\xff\xff\xff").startswith("body: not msgpack (")


def test_a_long_name_above_many_values_is_not_copied_for_each() -> None:
    # Given: 400 KB of name over 20,000 lists, 8 GB of names if each had its own
    value: Any = {"a" * 400_000: {str(number): [[]] for number in range(20_000)}}
    with at_most(seconds=5, megabytes=50):
        decode_body(MSGPACK, msgpack.packb(value))


# --- languages with one kind of string ---------------------------------------------------------------------


def test_a_tensor_whose_names_are_bin_is_a_tensor() -> None:
    """Perl's msgpack writes every string as bin, names too."""
    tensor = {b"datatype": b"INT16", b"shape": [3], b"data": b"\x01\x00\x02\x00\x03\x00"}
    decoded = decode_body(MSGPACK, msgpack.packb({"x": tensor}))
    np.testing.assert_array_equal(decoded["x"], np.array([1, 2, 3], np.int16))


@pytest.mark.parametrize("name", ["datatype", "shape", "data"])
def test_what_is_wrong_with_one_is_named_all_the_same(name: str) -> None:
    tensor = {b"datatype": b"INT16", b"shape": [3], b"data": b"\x01\x00\x02\x00\x03\x00"}
    with pytest.raises(InvalidArgumentError) as caught:
        decode_body(MSGPACK, msgpack.packb({**tensor, name.encode(): b"\xff"}))
    assert caught.value.detail.startswith(f"body.{name}:")


def test_bytes_sent_as_text_are_told_where_they_belong() -> None:
    """PHP's msgpack has no bin."""
    with pytest.raises(InvalidArgumentError, match="msgpack's bin"):
        decode_body(MSGPACK, b"\xa1\xff")
