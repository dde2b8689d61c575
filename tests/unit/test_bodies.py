"""Bodies: round trips in every content type, rejected bodies, and limits that hold before memory is taken."""

from __future__ import annotations

import json
import math
import re
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.client.encoding import BodyEncoder
from carpool.client.options import optional_fields
from carpool.errors import InternalError, InvalidArgumentError
from carpool.messages.requests import CONTENT_TYPES, JSON, MSGPACK, RAW
from carpool.wire.bodies import (
    MAX_CONTAINERS,
    MAX_JSON_ITEMS,
    decode_body,
    decode_result,
    encode_body,
    result_type,
)
from carpool.wire.content_types import is_value
from carpool.wire.json_rules import MAX_DEPTH
from carpool.wire.request_fields import read_content_type, read_extra_fields

fast = settings(deadline=None)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # without lone surrogates
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


def equal(left: Any, right: Any) -> bool:
    """Equal in value and in type, arrays included."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(equal(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    return bool(left == right)


def error_of(content_type: str, body: bytes) -> str:
    with pytest.raises(InvalidArgumentError) as caught:
        decode_body(content_type, body)
    return caught.value.detail


def nested_arrays(content_type: str, depth: int) -> bytes:
    return b"[" * depth + b"]" * depth if content_type == JSON else b"\x91" * (depth - 1) + b"\x90"


@contextmanager
def at_most(*, seconds: float, megabytes: float) -> Iterator[None]:
    """Limit processor time and memory. The time allowed is many times what is needed."""
    tracemalloc.start()
    started_s = time.process_time()
    try:
        yield
        assert time.process_time() - started_s < seconds
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


# --- round trips -------------------------------------------------------------------------------------------


@fast
@given(nested(scalars))
def test_value_survives_a_round_trip_in_json(value: Any) -> None:
    assert equal(decode_body(JSON, encode_body(JSON, value)), value)


@fast
@given(nested(scalars | st.binary(max_size=8) | st.floats(allow_nan=False)))
def test_value_survives_a_round_trip_in_msgpack(value: Any) -> None:
    assert equal(decode_body(MSGPACK, encode_body(MSGPACK, value)), value)


@fast
@given(nested(scalars | arrays), st.sampled_from([JSON, MSGPACK]))
def test_arrays_within_a_value_survive_a_round_trip(value: Any, content_type: str) -> None:
    assert equal(decode_body(content_type, encode_body(content_type, value), declared=True), value)


@fast
@given(st.binary())
def test_bytes_survive_a_round_trip(value: bytes) -> None:
    assert encode_body(RAW, value) == decode_body(RAW, value) == value
    assert encode_body(RAW, bytearray(value)) == encode_body(RAW, memoryview(value)) == value


def test_octet_stream_encodes_text_and_arrays_as_their_bytes() -> None:
    assert encode_body(RAW, "ä") == "ä".encode()
    for dtype in ("<i2", ">i2"):
        assert encode_body(RAW, np.array([1, 2], dtype)) == b"\1\0\2\0"


@pytest.mark.parametrize("content_type", [RAW, "image/png", "text/plain", "Application/Octet-Stream"])
@pytest.mark.parametrize(
    "array",
    [
        np.array([1.0, 2.0]),
        np.array([1, 2], "i1"),
        np.zeros((2, 2), "u1"),
        np.array(7, "u1"),
        np.array([True]),
        np.array(["a", "é"]),
        np.array(["a"], object),
        np.array(["2026-01-02"], "M8[D]"),
        np.array([1j]),
        np.zeros(1, [("a", "i8")]),
    ],
    ids=lambda array: f"{array.dtype}{list(array.shape)}",
)
def test_an_array_for_bytes_of_a_request_consists_of_bytes(array: Any, content_type: str) -> None:
    """All others have a datatype and a shape, which the model would not hear of."""
    with pytest.raises(InvalidArgumentError, match=r"^INVALID_ARGUMENT: body: .* an array of (dtype|texts) "):
        BodyEncoder().encode(array, content_type)
    _, head, rest = BodyEncoder().encode(np.array([1, 255], "u1"), content_type)
    assert head + rest == b"\1\xff"


@pytest.mark.parametrize("value", [np.array(["a"]), np.array(["a"], object)])
def test_texts_are_no_bytes_of_a_result(value: Any) -> None:
    assert result_type(RAW, "", value, has_tensors=True) == JSON
    with pytest.raises(InvalidArgumentError, match=r"accept: .* is bytes, but .* ndarray"):
        result_type(JSON, RAW, value)


SPELT: Final = [
    (JSON, JSON),
    ("Application/JSON", JSON),
    ("application/json; charset=utf-8", JSON),
    ('application/json ;q=1; Charset="UTF8"', JSON),
    ("APPLICATION/MSGPACK; charset=latin-1", MSGPACK),
    ("Application/Octet-Stream; x=y", RAW),
    ("text/plain; charset=latin-1", "text/plain; charset=latin-1"),
]


@pytest.mark.parametrize(("spelt", "usual"), SPELT)
def test_producers_encode_as_services_decode(spelt: str, usual: str) -> None:
    assert read_content_type({"content_type": spelt}) == usual
    for value in ("7", "null", np.array([49, 50], "u1"), {"a": 1}) if is_value(usual) else (b"7",):
        for body in (value, BodyEncoder().snapshot(value, {"content_type": spelt})[0]):
            content_type, head, rest = BodyEncoder().encode(body, spelt)
            assert (content_type, equal(decode_body(content_type, head + rest), value)) == (usual, True)
    head_of_rows = BodyEncoder().head_of_rows(np.zeros((2, 3)), {"content_type": spelt})
    assert (head_of_rows is not None) is (usual == MSGPACK)


@pytest.mark.parametrize(
    "spelt", ["application/json; charset=latin-1", 'Application/JSON; a=b; CHARSET = "UTF-16"']
)
def test_charsets_of_json_are_refused_by_name(spelt: str) -> None:
    reads: list[Callable[[], object]] = [
        lambda: read_content_type({"content_type": spelt}),
        lambda: read_extra_fields({"accept": spelt}),
        lambda: optional_fields({"content_type": spelt}, None),
        lambda: optional_fields({"accept": spelt}, None),
    ]
    for read in reads:
        with pytest.raises(InvalidArgumentError, match=r"names charset (latin-1|UTF-16), but JSON is UTF-8"):
            read()


def test_texts_are_written_as_utf_8_only() -> None:
    latin = "text/plain; charset=Latin-1"
    assert BodyEncoder().encode(b"\xe9", latin) == (latin, b"", b"\xe9")
    assert result_type(JSON, latin, b"\xe9") == latin
    with pytest.raises(InvalidArgumentError, match=r"text is written as UTF-8: .*encode\('Latin-1'\)"):
        BodyEncoder().encode("é", latin)
    with pytest.raises(InvalidArgumentError, match=r"accept: .* names charset Latin-1"):
        result_type(JSON, latin, "é")


def test_json_is_compact_and_utf8() -> None:
    assert encode_body(JSON, {"ö": [1, 2.5, None]}) == '{"ö":[1,2.5,null]}'.encode()


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("scalar", "value"),
    [(np.float32(0.5), 0.5), (np.int64(7), 7), (np.bool_(True), True), (np.str_("ä"), "ä"), ((1, 2), [1, 2])],
)
def test_numpy_scalars_and_tuples_become_plain_values(content_type: str, scalar: Any, value: Any) -> None:
    assert equal(decode_body(content_type, encode_body(content_type, scalar)), value)
    assert equal(decode_body(content_type, encode_body(content_type, [scalar])), [value])


# --- values that cannot be encoded -------------------------------------------------------------------------

CYCLE: list[Any] = []
CYCLE.append(CYCLE)
NOT_ENCODABLE = [
    object(),
    {1, 2},
    1j,
    np.zeros(2, "c8"),
    np.zeros(2, "O"),
    CYCLE,
    np.longdouble(1),
    "\ud800",
    ["\ud800"],
]


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("value", NOT_ENCODABLE)
def test_value_that_cannot_be_encoded_is_an_internal_error(content_type: str, value: Any) -> None:
    with pytest.raises(InternalError, match=f"^INTERNAL: the value cannot be written as {content_type}: "):
        encode_body(content_type, value)


@pytest.mark.parametrize("value", [math.nan, math.inf, [-math.inf], b"bytes", {"a": [b""]}, {(1, 2): 3}])
def test_json_cannot_hold_nan_infinity_or_bytes(value: Any) -> None:
    with pytest.raises(InternalError):
        encode_body(JSON, value)


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_integers_beyond_64_bits_fit_in_json_only(value: int) -> None:
    assert decode_body(JSON, encode_body(JSON, value)) == value
    with pytest.raises(InternalError):
        encode_body(MSGPACK, value)


@pytest.mark.parametrize("value", [7, None, [b""], "\ud800"])
def test_octet_stream_rejects_other_values(value: Any) -> None:
    with pytest.raises(InternalError):
        encode_body(RAW, value)


# --- bodies that cannot be decoded -------------------------------------------------------------------------


@settings(deadline=None, max_examples=250)
@given(st.sampled_from(CONTENT_TYPES), st.binary(max_size=60))
@example(MSGPACK, b"\xc7\x03\xffabc")  # a timestamp of an invalid length
@example(MSGPACK, b"\x81\x90\x01")  # a list as a key
@example(MSGPACK, b"\xdf\xff\xff\xff\xff")
@example(JSON, b'"\xed\xa0\x80"')  # a lone surrogate, which is not valid UTF-8
def test_any_bytes_are_decoded_or_rejected(content_type: str, body: bytes) -> None:
    try:
        decode_body(content_type, body)
    except InvalidArgumentError as error:
        assert error.detail.startswith("body")
        assert ": " in error.detail


@settings(deadline=None, max_examples=250)
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
def test_any_value_with_tensors_is_decoded_or_rejected(value: Any, content_type: str) -> None:
    try:
        decode_body(content_type, encode_body(content_type, value))
    except InvalidArgumentError as error:
        # The names before may be any text, also one with a colon.
        assert re.match(r"body.*\.(datatype|shape|data): ", error.detail, re.DOTALL)


@pytest.mark.parametrize("body", [b"NaN", b"[1,Infinity]", b'{"a":-Infinity}'])
def test_json_constants_for_nan_and_infinity_are_rejected(body: bytes) -> None:
    assert error_of(JSON, body).startswith("body: not JSON (")


def test_digits_of_a_json_number_are_limited() -> None:
    assert decode_body(JSON, b"9" * 4000) == int("9" * 4000)
    refused = "body: a whole number has more than 4300 digits: send it as a text"
    assert error_of(JSON, b"9" * 1_000_000) == refused
    assert error_of(JSON, b'{"a": [' + b"9" * 5000 + b"]}") == refused
    with pytest.raises(InternalError, match="has more than 4300 digits: send it as a text"):
        encode_body(JSON, 10**5000)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "latin-1"])
def test_json_must_be_utf8(encoding: str) -> None:
    assert error_of(JSON, '["ä"]'.encode(encoding)).startswith("body: not ")


@pytest.mark.parametrize(
    "extension", [msgpack.ExtType(5, b"x"), msgpack.Timestamp(1), msgpack.ExtType(127, b"")]
)
def test_msgpack_extensions_are_rejected_at_any_depth(extension: Any) -> None:
    for field, value in {
        "body": extension,
        "body[1]": [1, extension],
        "body.a": {"a": extension},
        "body.a[0][0]": {"a": [[extension]]},
    }.items():
        assert error_of(MSGPACK, msgpack.packb(value)).partition(": ")[0] == field


def test_error_names_the_path_and_cuts_long_keys() -> None:
    wrong = {"datatype": "X", "shape": [], "data": []}
    body = json.dumps({"rows": [0, {"a" * 1000: wrong}]}).encode()
    field, _, _ = error_of(JSON, body).partition(": ")
    assert field == f"body.rows[1].{'a' * 40}.datatype"


def test_msgpack_keys_may_be_bytes() -> None:
    assert decode_body(MSGPACK, msgpack.packb({b"\xff": 1})) == {b"\xff": 1}
    wrong = {"datatype": "X", "shape": [], "data": []}
    assert error_of(MSGPACK, msgpack.packb({b"\xff": wrong})).partition(": ")[0] == "body.b'\\xff'.datatype"


def test_names_in_maps_of_results_may_be_numbers() -> None:
    """A model returned them. Those that a producer chose could collide in a dict."""
    labels = {1: "cat", 2: {3: [4.5]}, -(2**63): None}
    assert decode_result(MSGPACK, msgpack.packb(labels)) == labels
    assert error_of(MSGPACK, msgpack.packb(labels)) == "body: a name in a map is an int; send text or bytes"
    wrong = {1: {"datatype": "X", "shape": [], "data": []}}
    with pytest.raises(InvalidArgumentError, match=r"^INVALID_ARGUMENT: body\[1\]\.datatype"):
        decode_result(MSGPACK, msgpack.packb(wrong))
    with pytest.raises(InvalidArgumentError, match=r"body\.None\.datatype"):
        decode_result(MSGPACK, msgpack.packb({None: wrong[1]}))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x93\x01\xc1\x02", "byte 2 is c1 hex, with which no value begins"),
        (b"\x93\x01\x02", "unexpected end"),
        (b"", "unexpected end"),
        (b"\x93\x01\x02\x03\x04", "a value ends after 4 of 5 bytes"),
        (
            b'{"a": 1}',
            "a value ends after 1 of 8 bytes: is it JSON? Then content_type must be application/json",
        ),
    ],
)
def test_error_names_the_byte_that_is_no_msgpack(body: bytes, reason: str) -> None:
    assert error_of(MSGPACK, body) == f"body: not msgpack ({reason})"


def test_error_names_the_byte_that_is_no_utf8() -> None:
    body = b'"\xff"'
    assert (
        error_of(JSON, body) == "body: not UTF-8 (byte 1 is ff hex); msgpack needs a content_type of its own"
    )


# --- limits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_depth_is_limited(content_type: str) -> None:
    decode_body(content_type, nested_arrays(content_type, MAX_DEPTH))
    assert (
        error_of(content_type, nested_arrays(content_type, MAX_DEPTH + 1))
        == f"body: nested deeper than {MAX_DEPTH}"
    )


def test_text_that_is_escaped_may_be_nested_as_deep_as_python_reads_it() -> None:
    # Where Python does not read it depends on how deep the stack is here: less than 300.
    limit = sys.getrecursionlimit()
    for depth in (*range(MAX_DEPTH + 1, limit - 300, 20), *range(limit - 300, limit + 1)):
        body = b"[" * depth + b'"\\ud83d\\ude00"' + b"]" * depth
        assert error_of(JSON, body) == f"body: nested deeper than {MAX_DEPTH}"


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize("depth", [1_000, 100_000, 5_000_000])
def test_rejecting_any_depth_is_cheap(content_type: str, depth: int) -> None:
    body = nested_arrays(content_type, depth)
    with at_most(seconds=5, megabytes=20):
        error_of(content_type, body)


def test_depth_limit_counts_maps() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = {"a": value}
    body = msgpack.packb(value)
    assert decode_body(MSGPACK, body) == value
    assert error_of(MSGPACK, b"\x81\xa1a" + body) == f"body: nested deeper than {MAX_DEPTH}"


def test_json_items_are_limited() -> None:
    items = MAX_JSON_ITEMS - 1  # the list itself counts too
    decode_body(JSON, b"[0" + b",0" * items + b"]")
    assert error_of(JSON, b"[0" + b",0" * (items + 1) + b"]").startswith("body: more than ")


@pytest.mark.parametrize("inner", [b"[],", b"{},", b'{"":[]},', b",,,"])
def test_rejecting_too_many_json_items_is_cheap(inner: bytes) -> None:
    body = b"[" + inner * (12_000_000 // len(inner)) + b"0]"
    with at_most(seconds=5, megabytes=20):
        assert error_of(JSON, body).startswith("body: more than ")


def test_msgpack_containers_are_limited() -> None:
    inside = MAX_CONTAINERS - 1
    decode_body(MSGPACK, b"\xdd" + inside.to_bytes(4, "big") + b"\x90" * inside)
    body = b"\xdd" + (inside + 1).to_bytes(4, "big") + b"\x90" * (inside + 1)
    assert error_of(MSGPACK, body) == f"body: more than {MAX_CONTAINERS} arrays and maps"


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\x91\x90", b"\x81\xa0\x80"])
def test_rejecting_too_many_msgpack_containers_is_cheap(inner: bytes) -> None:
    count = 8_000_000 // len(inner)
    body = b"\xdd" + count.to_bytes(4, "big") + inner * count
    with at_most(seconds=5, megabytes=120):  # 64 MB of them for the list itself
        assert error_of(MSGPACK, body).startswith("body: more than ")


@pytest.mark.parametrize("head", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
def test_claimed_length_is_not_allocated(head: bytes) -> None:
    with at_most(seconds=5, megabytes=1):
        assert error_of(MSGPACK, head + b"\xff\xff\xff\xff").startswith("body: not msgpack (")


def test_long_key_is_not_copied_for_each_value_below_it() -> None:
    # Given: a key of 400 KB above 5,000 lists, which would be 2 GB if each had a copy
    value: Any = {"a" * 400_000: {str(number): [[]] for number in range(5000)}}
    with at_most(seconds=5, megabytes=50):
        decode_body(MSGPACK, msgpack.packb(value))


# --- senders with one type of string -----------------------------------------------------------------------


def test_tensor_whose_keys_are_bin_is_decoded() -> None:
    """Perl's msgpack writes every string as bin, keys included."""
    tensor = {b"datatype": b"INT16", b"shape": [3], b"data": b"\x01\x00\x02\x00\x03\x00"}
    decoded = decode_body(MSGPACK, msgpack.packb({"x": tensor}))
    np.testing.assert_array_equal(decoded["x"], np.array([1, 2, 3], np.int16))


@pytest.mark.parametrize("name", ["datatype", "shape", "data"])
def test_error_in_tensor_whose_keys_are_bin_names_the_field(name: str) -> None:
    tensor = {b"datatype": b"INT16", b"shape": [3], b"data": b"\x01\x00\x02\x00\x03\x00"}
    with pytest.raises(InvalidArgumentError) as caught:
        decode_body(MSGPACK, msgpack.packb({**tensor, name.encode(): b"\xff"}))
    assert caught.value.detail.startswith(f"body.{name}:")


def test_error_for_bytes_sent_as_str_mentions_bin() -> None:
    """PHP's msgpack has no bin."""
    with pytest.raises(InvalidArgumentError, match="msgpack's bin"):
        decode_body(MSGPACK, b"\xa1\xff")
