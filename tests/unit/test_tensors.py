"""Tensors: checks of headers, bytes and lists <-> arrays, the rounding of BF16, and cached heads.

The golden vectors (tests/contract) say what the bytes of single tensors are.
"""

from __future__ import annotations

import math
import struct
import tracemalloc
from fractions import Fraction
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from carpool.errors import InvalidArgumentError
from carpool.messages.requests import JSON, MSGPACK
from carpool.wire.bodies import decode_body, encode_body
from carpool.wire.tensors import (
    DATATYPES,
    MAX_DIMENSIONS,
    MAX_ITEMS,
    WIDTHS,
    Array,
    HeadMemo,
    TensorSpec,
    array_of,
    check_header,
    check_length,
    datatype_of,
    decode_tensor,
    from_bytes,
    in_datatype,
    is_tensor,
    tensor_head,
    tensor_json,
    tensor_map,
    to_bytes,
)

fast = settings(deadline=None)

DTYPES = {
    "BOOL": "?", "UINT8": "u1", "UINT16": "<u2", "UINT32": "<u4", "UINT64": "<u8", "INT8": "i1",
    "INT16": "<i2", "INT32": "<i4", "INT64": "<i8", "FP16": "<f2", "FP32": "<f4", "FP64": "<f8",
}  # fmt: skip
FLOATS = ("FP16", "BF16", "FP32", "FP64")

shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


def arrays(datatype: str) -> st.SearchStrategy[Array]:
    """Arrays of any small shape, with any numbers of their type."""
    return hnp.arrays(DTYPES[datatype], shapes)


def as_tensor(datatype: Any, shape: Any, data: Any) -> dict[str, Any]:
    return {"datatype": datatype, "shape": shape, "data": data}


def rejected_field(call: Any, *arguments: Any) -> str:
    """The field that an InvalidArgumentError's detail begins with."""
    with pytest.raises(InvalidArgumentError) as caught:
        call(*arguments)
    return caught.value.detail.partition(": ")[0]


def same(left: Array, right: Array) -> bool:
    """Same type, shape and bits."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


# --- TensorSpec --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("datatype", sorted(DATATYPES))
def test_every_datatype_can_be_declared(datatype: str) -> None:
    assert TensorSpec("x", datatype, (2, -1)).datatype == datatype


@pytest.mark.parametrize(("datatype", "shape"), [("FP8", (1,)), ("fp32", ()), ("", ()), ("FP32", (1, -2))])
def test_invalid_declaration_is_an_error_that_names_the_tensor(datatype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="tensor 'x': "):
        TensorSpec("x", datatype, shape)


@pytest.mark.parametrize(
    ("declared", "shape", "admitted"),
    [
        ((), (), True),
        ((), (1,), False),
        ((2, 3), (2, 3), True),
        ((2, 3), (3, 2), False),
        ((2, 3), (2,), False),
        ((2, 3), (2, 3, 1), False),
        ((-1, 3), (0, 3), True),
        ((-1, 3), (9, 3), True),
        ((-1, 3), (9, 4), False),
        ((-1,), (), False),
    ],
)
def test_declared_shape_admits(declared: tuple[int, ...], shape: tuple[int, ...], admitted: bool) -> None:
    assert TensorSpec("x", "FP32", declared).admits(shape) is admitted


@pytest.mark.parametrize(
    ("datatype", "shape", "fixed_bytes"),
    [
        ("FP32", (2, 3), 24),
        ("FP64", (), 8),
        ("BF16", (5, 0), 0),
        ("INT8", (-1, 2), None),
        ("BYTES", (2,), None),
    ],
)
def test_fixed_shape_has_a_fixed_length(
    datatype: str, shape: tuple[int, ...], fixed_bytes: int | None
) -> None:
    assert TensorSpec("x", datatype, shape).fixed_bytes == fixed_bytes


def test_declared_shape_may_be_any_sequence_of_integers() -> None:
    assert TensorSpec("x", "FP32", [np.int64(2), 3]) == TensorSpec("x", "FP32", (2, 3))  # type: ignore[arg-type]


# --- headers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [None, 7, [], {}, {"datatype": 1, "shape": 2}, {"data": 1, "shape": 2, "a": 3}]
)
def test_other_values_are_not_tensors(value: Any) -> None:
    assert not is_tensor(value)


def test_map_with_exactly_the_three_fields_is_a_tensor() -> None:
    assert is_tensor(as_tensor(None, None, None))
    assert not is_tensor(as_tensor(None, None, None) | {"more": 1})


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
likely_datatypes = st.sampled_from(sorted(DATATYPES)) | json_values
likely_shapes = st.lists(st.integers(0, 4) | st.integers(), max_size=4) | json_values


@settings(deadline=None, max_examples=250)
@given(likely_datatypes, likely_shapes, json_values | st.lists(st.integers() | st.floats(), max_size=9))
@example("FP32", [0, 2**62, 2**62], b"")
@example("FP64", [2**64 - 1] * 32, b"")
@example("UINT8", [-1], b"")
@example("INT8", [1], [10**400])
@example("FP16", [1], [10**400])
def test_any_tensor_is_decoded_or_rejected(datatype: Any, shape: Any, data: Any) -> None:
    try:
        decoded = decode_tensor(as_tensor(datatype, shape, data), "body.x")
    except InvalidArgumentError as error:
        assert error.detail.partition(": ")[0] in ("body.x.datatype", "body.x.shape", "body.x.data")
    else:
        assert list(decoded.shape) == shape
        if datatype == "BYTES":
            assert decoded.ravel().tolist() == data


def test_header_gives_datatype_and_shape() -> None:
    assert check_header(as_tensor("BF16", [2, 0], b"")) == ("BF16", (2, 0))


def test_number_of_dimensions_is_limited() -> None:
    assert check_header(as_tensor("INT8", [1] * MAX_DIMENSIONS, b""))[1] == (1,) * MAX_DIMENSIONS
    assert rejected_field(check_header, as_tensor("INT8", [1] * (MAX_DIMENSIONS + 1), b"")) == "body.shape"


def test_sizes_of_an_empty_tensor_are_limited() -> None:
    # Given: no data, but a shape that numpy cannot express
    assert decode_tensor(as_tensor("INT8", [0, MAX_ITEMS], b"")).shape == (0, MAX_ITEMS)
    assert rejected_field(decode_tensor, as_tensor("INT8", [0, MAX_ITEMS + 1], b"")) == "body.shape"


@pytest.mark.parametrize("datatype", sorted(WIDTHS))
def test_length_of_the_data_must_match_the_shape(datatype: str) -> None:
    width = WIDTHS[datatype]
    check_length(datatype, (2, 3), 6 * width)
    for wrong in (6 * width - 1, 6 * width + 1, 0):
        assert rejected_field(check_length, datatype, (2, 3), wrong, "body.x") == "body.x.data"


def test_claimed_size_is_not_allocated() -> None:
    # Given: four bytes with a shape of a terabyte
    tracemalloc.start()
    try:
        assert rejected_field(decode_tensor, as_tensor("INT8", [1 << 40], b"1234")) == "body.data"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- bytes -------------------------------------------------------------------------------------------------


@fast
@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_array_survives_a_round_trip_as_bytes(data: st.DataObject, datatype: str) -> None:
    array = data.draw(arrays(datatype))
    sent = to_bytes(array, datatype)
    assert len(sent) == array.size * WIDTHS[datatype]
    assert same(from_bytes(datatype, array.shape, sent), array)


@fast
@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_array_survives_a_round_trip_in_msgpack(data: st.DataObject, datatype: str) -> None:
    array = data.draw(arrays(datatype))
    assert same(decode_body(MSGPACK, encode_body(MSGPACK, array), declared=True), array)


@fast
@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_array_survives_a_round_trip_in_json(data: st.DataObject, datatype: str) -> None:
    finite = hnp.from_dtype(np.dtype(DTYPES[datatype]), allow_nan=False, allow_infinity=False)
    array = data.draw(hnp.arrays(DTYPES[datatype], shapes, elements=finite))
    assert same(decode_body(JSON, encode_body(JSON, array), declared=True), array)


def test_bytes_are_little_endian_and_row_major_for_any_memory_layout() -> None:
    rows = np.array([[1, 2, 3], [4, 5, 6]], ">i4")
    wanted = struct.pack("<6i", 1, 2, 3, 4, 5, 6)
    for array in (
        rows,
        np.asfortranarray(rows),
        np.ascontiguousarray(rows.T).T,
        np.repeat(rows, 2, 1)[:, ::2],
    ):
        assert to_bytes(array, datatype_of(array)) == wanted


def test_bytes_are_not_copied() -> None:
    data = struct.pack("<2f", 1, 2)
    array = from_bytes("FP32", (2,), data)
    assert np.shares_memory(array, np.frombuffer(data, "u1"))
    assert not array.flags.writeable


@pytest.mark.parametrize("dtype", ["c8", "O", "datetime64[s]", [("a", "i4")], "V3"])
def test_arrays_of_other_dtypes_are_rejected(dtype: Any) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        datatype_of(np.zeros(2, dtype))


@pytest.mark.parametrize("array", [np.array(["ä", "bcd"]), np.array(["ä", "bcd"], object)])
def test_array_of_strings_has_datatype_bytes(array: Array) -> None:
    texts = ["ä", "bcd"]
    assert tensor_map(array) == tensor_json(array) == as_tensor("BYTES", [2], texts)
    assert all(type(text) is str for text in tensor_map(array)["data"])


# --- exact conversion --------------------------------------------------------------------------------------

SIGNIFICANT_BITS = {"FP16": 11, "BF16": 8, "FP32": 24, "FP64": 53}
LARGEST = {"FP16": 65504, "BF16": 0xFF << 120, "FP32": 0xFFFFFF << 104, "FP64": 2**1024 - 2**971}


def is_held(number: Any, datatype: str) -> bool:
    """Whether a datatype holds a number of an array, by Python's integers and fractions."""
    if datatype == "BOOL":
        return number in (0, 1)
    if datatype not in FLOATS:
        limits = np.iinfo(DTYPES[datatype])
        return math.isfinite(number) and number == int(number) and limits.min <= number <= limits.max
    if isinstance(number, int):
        odd = abs(number)
        while odd and odd % 2 == 0:
            odd //= 2
        return odd.bit_length() <= SIGNIFICANT_BITS[datatype] and abs(number) <= LARGEST[datatype]
    ulp = Fraction(LARGEST[datatype]) / (2 ** SIGNIFICANT_BITS[datatype] - 1)
    return not math.isfinite(number) or abs(Fraction(number)) < LARGEST[datatype] + ulp / 2


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(sorted(DTYPES)), st.sampled_from(sorted({*DTYPES, "BF16"})), st.data())
def test_a_number_survives_a_conversion_or_is_named(source: str, datatype: str, data: st.DataObject) -> None:
    edges = [float(2**bits) for bits in (7, 8, 15, 16, 31, 32, 63, 64)] + [2.5, 65519.0, 65520.0, 3.4e38]
    integers = [sign * (2**bits + step) for bits in range(65) for step in (-1, 0, 1) for sign in (1, -1)]
    dtype = np.dtype(DTYPES[source])
    elements = hnp.from_dtype(dtype)
    if dtype.kind == "f":
        elements |= st.sampled_from([edge for edge in edges if edge <= float(np.finfo(dtype).max)]).map(
            dtype.type
        )
    elif dtype.kind != "b":
        limits = np.iinfo(dtype)
        elements |= st.sampled_from([number for number in integers if limits.min <= number <= limits.max])
    array = data.draw(hnp.arrays(dtype, shapes, elements=elements))
    converted, lost = in_datatype(array, datatype)
    assert converted.shape == array.shape
    where = np.zeros(array.shape, bool) if lost is None else lost
    assert lost is None or lost.any()
    expected = [not is_held(number, datatype) for number in array.ravel().tolist()]
    assert where.ravel().tolist() == expected
    for number, held in zip(array[~where], converted[~where], strict=True):
        if datatype not in FLOATS or np.issubdtype(type(number), np.integer):
            assert held.item() == number.item()
        elif datatype == "BF16" and np.isfinite(number):
            assert abs(held.item() - number.item()) <= abs(number.item()) / 2**8 + 2.0**-133
        else:
            dtype = np.dtype(DTYPES.get(datatype, "<f4"))
            assert np.array_equal(held, number.astype(dtype), equal_nan=datatype in FLOATS)


# --- BF16 --------------------------------------------------------------------------------------------------

bits_of_fp32 = st.integers(0, (1 << 32) - 1)


def fp32(bits: int) -> float:
    return float(struct.unpack(">f", struct.pack(">I", bits))[0])


def nearest_bf16(bits: int) -> int:
    """With exact fractions: the nearer of the two BF16 around an FP32, or the even one of two as near."""
    sign, size = bits & (1 << 31), bits & ((1 << 31) - 1)
    if size >= 0x7F7F8000:  # halfway from the largest BF16 to the next, or beyond
        return (sign | 0x7F800000) >> 16
    below, above = size >> 16, (size >> 16) + 1
    down = Fraction(fp32(size)) - Fraction(fp32(below << 16))
    up = Fraction(fp32(above << 16) if above < 0x7F80 else 2.0**128) - Fraction(fp32(size))
    nearer = below if down < up or (down == up and below % 2 == 0) else above
    return (sign >> 16) | nearer


@settings(deadline=None, max_examples=250)
@given(
    bits_of_fp32
    | st.builds(lambda half, low: half << 16 | low, st.integers(0, 0xFFFF), st.integers(0x7FFE, 0x8002))
)
@example(0x7F7F7FFF)
@example(0x7F7F8000)
@example(0xFF7FFFFF)
def test_bf16_is_rounded_to_nearest_ties_to_even(bits: int) -> None:
    array = np.array([bits], "<u4").view("<f4")
    if nearest_bf16(bits) & 0x7FFF == 0x7F80 and math.isfinite(fp32(bits)):  # it would be infinite
        with pytest.raises(ValueError, match="a number is outside BF16's range"):
            to_bytes(array, "BF16")
        return
    (half,) = struct.unpack("<H", to_bytes(array, "BF16"))
    if math.isnan(fp32(bits)):
        assert math.isnan(fp32(half << 16))
    else:
        assert half == nearest_bf16(bits)


@fast
@given(hnp.arrays("<u2", shapes))
def test_bf16_survives_a_round_trip_as_fp32(halves: Array) -> None:
    array = from_bytes("BF16", halves.shape, halves.tobytes())
    assert array.dtype == np.float32
    assert array.shape == halves.shape
    again = np.frombuffer(to_bytes(array, "BF16"), "<u2").reshape(halves.shape)
    assert np.array_equal(again[~np.isnan(array)], halves[~np.isnan(array)])
    assert np.isnan(from_bytes("BF16", halves.shape, again.tobytes())[np.isnan(array)]).all()


# --- rounded once ------------------------------------------------------------------------------------------

# FP64 near the middle between two numbers of fewer bits, on either side of it by less than FP32 can tell.
near_middles = st.builds(
    lambda odd, exponent, off, sign: sign * (odd * 2.0**exponent) * (1 + off * 2.0**-52),
    st.integers(2**7, 2**12 - 1).map(lambda n: 2 * n + 1)
    | st.integers(2**24, 2**25).map(lambda n: 2 * n + 1),
    st.integers(-170, 130),
    st.integers(-3, 3),
    st.sampled_from([1, -1]),
)


def nearest(number: Fraction, datatype: str) -> Fraction:
    """The number of a datatype that is nearest, or the even one of two: with exact fractions."""
    bits, smallest = SIGNIFICANT_BITS[datatype], {"FP16": -24, "BF16": -133, "FP32": -149}[datatype]
    size = abs(number)
    exponent = smallest
    while size >= Fraction(2) ** (exponent + bits):
        exponent += 1
    ulp = Fraction(2) ** exponent
    return round(size / ulp) * ulp * (-1 if number < 0 else 1)  # `round` gives the even one


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(["FP16", "BF16", "FP32"]),
    near_middles | st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**70), 2**70),
)
@example("BF16", 1 + 2**-8 + 2**-30)
@example("BF16", 1 + 3 * 2**-8 - 2**-30)
@example("FP32", 2**60 + 2**36 + 1)
def test_a_number_is_rounded_once(datatype: str, number: float) -> None:
    expected = nearest(Fraction(number), datatype)
    if abs(expected) > LARGEST[datatype]:
        assert rejected_field(array_of, [number], datatype) == "body.data"
        return
    assert Fraction(array_of([number], datatype).item()) == expected
    if isinstance(number, float):
        for array in (np.array(number), np.array([number]), np.array([number], np.longdouble)):
            converted, lost = in_datatype(array, datatype)
            assert lost is None and Fraction(converted.item()) == expected


def test_an_integer_beside_nan_is_rounded_once() -> None:
    assert array_of([2**60 + 2**36 + 1, float("nan")], "FP32")[0] == 2**60 + 2**37


def test_longdouble_is_rounded_once() -> None:
    number = np.longdouble(1) + np.longdouble(2) ** -11 + np.longdouble(2) ** -62
    if number == 1 + 2**-11:
        pytest.skip("longdouble is float64 here")
    for datatype, step in (("FP16", 2**-10), ("BF16", 0.0)):
        assert in_datatype(np.array([number]), datatype)[0].item() == 1 + step


# --- lists -------------------------------------------------------------------------------------------------

INTEGERS = sorted(datatype for datatype in DTYPES if "INT" in datatype)


@pytest.mark.parametrize("datatype", INTEGERS)
def test_integer_out_of_range_is_rejected(datatype: str) -> None:
    limits = np.iinfo(DTYPES[datatype])
    both = [int(limits.min), int(limits.max), 1]
    assert array_of(both, datatype).tolist() == both
    for outside in (int(limits.min) - 1, int(limits.max) + 1, 1 << 70):
        assert rejected_field(array_of, [1, outside], datatype, "body.x") == "body.x.data"


def test_large_integer_next_to_a_small_one_is_exact() -> None:
    # Given: numbers for which numpy, left to itself, would choose float64
    assert array_of([2**64 - 1, 1], "UINT64").tolist() == [2**64 - 1, 1]


@pytest.mark.parametrize(
    ("datatype", "largest", "outside"),
    [
        ("FP16", 65504.0, 65520.0),
        ("BF16", 3e38, 3.5e38),
        ("FP32", 3.4e38, 3.5e38),
        ("FP64", 1.7e308, 10**309),
    ],
)
def test_float_out_of_range_is_rejected(datatype: str, largest: float, outside: float) -> None:
    assert np.isfinite(array_of([largest, -largest], datatype)).all()
    for sign in (1, -1):
        assert rejected_field(array_of, [1, sign * outside], datatype) == "body.data"


@pytest.mark.parametrize("datatype", FLOATS)
def test_infinity_and_nan_are_kept(datatype: str) -> None:
    sent = [math.inf, -math.inf, 1]
    assert array_of(sent, datatype).tolist() == sent
    assert np.isnan(array_of([math.nan], datatype)).all()


@pytest.mark.parametrize("datatype", sorted(WIDTHS))
@pytest.mark.parametrize("data", [["1"], [None], [b"1"], [{}], "1", None, {}, [[1], ["1"]], [1j]])
def test_element_that_is_not_a_number_is_rejected(datatype: str, data: Any) -> None:
    assert rejected_field(array_of, data, datatype, "body.x") == "body.x.data"


@pytest.mark.parametrize("datatype", sorted(WIDTHS))
def test_booleans_and_numbers_are_not_interchangeable(datatype: str) -> None:
    valid, invalid = ([True, False], [1, 0]) if datatype == "BOOL" else ([1, 0], [1, True])
    assert array_of(valid, datatype).tolist() == valid
    assert rejected_field(array_of, invalid, datatype) == "body.data"


@pytest.mark.parametrize("datatype", sorted(WIDTHS))
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1, 0, 1)])
def test_empty_list_is_valid_for_any_datatype(datatype: str, shape: tuple[int, ...]) -> None:
    assert array_of([], datatype, shape=shape).shape == shape


def test_list_may_be_flat_or_nested_to_the_shape() -> None:
    nested = [[1, 2, 3], [4, 5, 6]]
    assert array_of([1, 2, 3, 4, 5, 6], "INT8", shape=(2, 3)).tolist() == nested
    assert array_of(nested, "INT8", shape=(2, 3)).tolist() == nested
    for data in (
        [[1, 2], [3, 4], [5, 6]],
        [[[1, 2, 3], [4, 5, 6]]],
        [[1, 2, 3, 4, 5, 6]],
        [1, 2, 3],
        [nested],
    ):
        assert rejected_field(lambda data: array_of(data, "INT8", shape=(2, 3)), data) == "body.data"


@pytest.mark.parametrize("data", [[[1], [1, 2]], [1, [2]], [[1], 2], [[1], []]])
def test_rows_of_unequal_length_are_rejected(data: list[Any]) -> None:
    assert rejected_field(array_of, data, "FP32") == "body.data"


def test_depth_of_lists_is_limited_as_dimensions_are() -> None:
    deepest: Any = [1]
    for _ in range(MAX_DIMENSIONS - 1):
        deepest = [deepest]
    assert array_of(deepest, "INT8").shape == (1,) * MAX_DIMENSIONS
    for _ in range(2000):
        deepest = [deepest]
    assert rejected_field(array_of, deepest, "INT8") == "body.data"


def test_long_string_among_short_ones_takes_no_memory() -> None:
    # Given: strings of which numpy would make an array of 400 MB, each element as wide as the longest
    data = ["x" * 1_000_000, *[""] * 100]
    tracemalloc.start()
    try:
        assert rejected_field(decode_tensor, as_tensor("FP32", [101], data)) == "body.data"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- heads -------------------------------------------------------------------------------------------------


@fast
@given(st.data(), st.sampled_from(sorted(DTYPES)))
def test_head_and_data_are_the_complete_map(data: st.DataObject, datatype: str) -> None:
    array = data.draw(arrays(datatype))
    head = tensor_head(datatype, array.shape, array.nbytes)
    assert head + to_bytes(array, datatype) == msgpack.packb(tensor_map(array))


@pytest.mark.parametrize("data_bytes", [0, 255, 256, 65535, 65536])
def test_head_has_the_shortest_form_of_the_length(data_bytes: int) -> None:
    body = tensor_head("UINT8", [data_bytes], data_bytes) + bytes(data_bytes)
    assert body == msgpack.packb(as_tensor("UINT8", [data_bytes], bytes(data_bytes)))


def test_layout_is_recognised_by_its_head() -> None:
    # Given
    memo = HeadMemo()
    body, next_body = (msgpack.packb(tensor_map(np.full((2, 3), number, "<f4"))) for number in (1, 2))
    assert memo.data_of(body) is None
    # When
    memo.remember(body, "FP32", (2, 3), 24)
    # Expect
    assert memo.data_of(next_body) == struct.pack("<6f", *[2] * 6)
    assert (memo.datatype, memo.shape) == ("FP32", (2, 3))


def test_layout_written_in_another_form_is_not_remembered() -> None:
    # Given: the same tensor with its fields in another order, or with a longer form of the length
    data = struct.pack("<f", 1)
    in_another_order = msgpack.packb({"data": data, "shape": [1], "datatype": "FP32"})
    longer = tensor_head("FP32", [1], 4)[:-2] + b"\xc5\x00\x04" + data
    for body in (in_another_order, longer):
        assert decode_body(MSGPACK, body).tolist() == [1.0]
        memo = HeadMemo()
        memo.remember(body, "FP32", (1,), 4)
        assert memo.data_of(body) is None


def of_layout(datatype: str, shape: list[int]) -> st.SearchStrategy[bytes]:
    """Bodies of one layout, each with other numbers."""
    length = WIDTHS[datatype] * math.prod(shape)
    data = st.binary(min_size=length, max_size=length)
    return data.map(lambda data: bytes(msgpack.packb(as_tensor(datatype, shape, data))))


layouts = [("FP32", [1]), ("INT32", [1]), ("BF16", [2]), ("BF16", [1, 2]), ("INT8", [4]), ("INT8", [2, 2])]
good = st.sampled_from(layouts).flatmap(lambda layout: of_layout(*layout))
mangled = st.builds(
    lambda body, at, byte: body[: at % len(body)] + byte + body[at % len(body) + 1 :],
    good,
    st.integers(0, 60),
    st.binary(min_size=1, max_size=1),
)


@settings(deadline=None, max_examples=250)
@given(st.lists(good | mangled, min_size=2, max_size=12))
def test_no_body_is_taken_for_another_layout(bodies: list[bytes]) -> None:
    # Given: a memo, used as the worker and the client use it
    memo = HeadMemo()
    for body in bodies:
        data = memo.data_of(body)
        try:
            value = decode_body(MSGPACK, body)
        except InvalidArgumentError:
            value = None
        # Expect: data that the memo recognises is what decoding gives
        if data is not None:
            assert isinstance(value, np.ndarray)
            assert same(from_bytes(memo.datatype, memo.shape, data), value)
        if isinstance(value, np.ndarray):
            memo.remember(body, datatype_of(value), value.shape, value.nbytes)
