"""Values of any type survive, or are refused with a sentence that says what to do: runs docs/values.md."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from carpool.client.encoding import BodyEncoder, bodies_to_send
from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.wire import tensors, values
from carpool.wire.bodies import decode_body, decode_result, encode_body, encode_result_body
from carpool.wire.tensors import Array, StateSpec, datatype_of, from_bytes, is_bfloat16, to_bytes
from carpool_worker.model_process import frames

DOCUMENT: Final = Path(__file__).parents[2] / "docs" / "values.md"
ROW: Final = re.compile(r"^\| (`.+) \|$", re.MULTILINE)


class Level(IntEnum):
    HIGH = 2


class Name(StrEnum):
    ACME = "acme"


class Color(Enum):
    RED = 1


class Pair(NamedTuple):
    left: int
    right: int


@dataclass
class Point:
    x: int
    y: int


class Item(BaseModel):
    n: int


class tensor:  # noqa: N801 (as in torch)
    """As a torch tensor on the CPU: no Sequence, but it has `__array__`."""

    def __init__(self, data: Any, requires_grad: bool = False, dtype: str = "torch.float32") -> None:
        self.data, self.requires_grad, self.dtype = data, requires_grad, dtype

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        if self.requires_grad:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad.")
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.array(self.data, dtype)

    def float(self) -> tensor:
        return tensor(np.array(self.data, "f4"), self.requires_grad)

    def __len__(self) -> int:
        return len(self.data)


class Series:
    """As of pandas or polars, which are not installed here: known by its methods."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.shape: tuple[int, ...] = np.array(data, object).shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.array(self.data, dtype)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def to_numpy(self) -> Array:
        return np.array(self.data)

    def tolist(self) -> list[Any]:
        return list(self.data)


class DataFrame(Series):
    pass


class Timestamp(datetime):
    """As of pandas: it has a method of a Series."""

    def to_numpy(self) -> Any:
        return np.datetime64(self)


class NaTType(Timestamp):
    pass


BFLOAT16: Final = np.dtype("V2")  # stands for the dtype of ml_dtypes, which is not installed here


def bfloat16(data: Any) -> Array:
    return np.frombuffer(to_bytes(np.array(data, "f4"), "BF16"), BFLOAT16)


@pytest.fixture(autouse=True)
def bfloat16_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensors, values):
        monkeypatch.setattr(module, "is_bfloat16", lambda dtype: dtype == BFLOAT16)


NAMES: Final[dict[str, Any]] = {
    value.__name__: value
    for value in (
        *(defaultdict, Decimal, UUID, Path, datetime, timedelta),
        *(Level, Name, Color, Pair, Point, Item, tensor, Series, DataFrame, Timestamp, NaTType, bfloat16),
    )
} | {"np": np, "StringDType": np.dtypes.StringDType}


def rows() -> Iterator[tuple[str, list[str]]]:
    """Of each row of the table the expression of its value, and what comes of it in each way."""
    for row in ROW.findall(DOCUMENT.read_text(encoding="utf-8")):
        value, *outcomes = row.split(" | ")
        assert len(outcomes) == len(WAYS), row
        for index, outcome in enumerate(outcomes):
            if outcome == "←":
                outcomes[index] = outcomes[index - 1]
        yield value.split("`")[1], outcomes


def sent(value: Any, content_type: str) -> Any:
    """A value within a body, as the model gets it."""
    _, head, rest = BodyEncoder().encode({"v": value}, content_type)
    body = decode_body(content_type, head + rest)
    return frames.unpack_values(frames.pack_values(body))["v"]


def returned(value: Any, content_type: str) -> Any:
    """A value within a result, as the producer gets it."""
    result = frames.unpack_values(frames.pack_values({"v": value}))
    return decode_result(content_type, encode_body(content_type, result))["v"]


WAYS: Final = ((sent, MSGPACK), (sent, JSON), (returned, MSGPACK), (returned, JSON))


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return (
            type(got) is np.ndarray
            and (got.dtype, got.shape) == (expected.dtype, expected.shape)
            and got.tobytes() == np.asarray(expected).tobytes()
        )
    return type(got) is type(expected) and bool(got == expected)


def test_the_table_has_rows() -> None:
    assert len(list(rows())) > 50


@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of numpy.matrix
@pytest.mark.parametrize(("expression", "outcomes"), list(rows()))
def test_a_value_survives_or_is_refused_as_the_table_says(expression: str, outcomes: list[str]) -> None:
    value = eval(expression, NAMES.copy())  # noqa: S307 (of our own document)
    for (carry, content_type), outcome in zip(WAYS, outcomes, strict=True):
        if not outcome.startswith("refused: "):
            expected = value if outcome == "=" else eval(outcome.strip("`"), NAMES.copy())  # noqa: S307
            got = carry(value, content_type)
            assert same(got, expected), (carry, content_type, got)
            continue
        with pytest.raises((CarpoolError, TypeError, ValueError, OverflowError)) as caught:
            carry(value, content_type)
        assert outcome.removeprefix("refused: ") in str(caught.value), (carry, content_type)


def test_a_number_or_text_is_the_same_alone_and_among_many() -> None:
    """Given an element of an array, and the array as the bodies of many requests, expect a model that
    declares nothing to get the same."""
    encoder = BodyEncoder()
    for array in (np.arange(3.0), np.arange(3, dtype="u8"), np.array([True]), np.array([0.1], "f4"),
                  np.array([0.5], "f2"), np.array(["a"]), np.array([b"a\xff"])):  # fmt: skip
        head = encoder.head_of_rows(array, {})
        for element in array:
            content_type, *parts = encoder.encode(element, None)
            alone = decode_body(content_type, b"".join(parts))
            among = (
                b"".join(parts)
                if head is None
                else head.encoded + to_bytes(np.asarray(element), head.datatype)
            )
            assert same(decode_body(content_type, among), alone) and same(alone, element.item())


def test_a_memoryview_that_is_not_contiguous_is_named() -> None:
    view = memoryview(b"abcdef")[::2]
    assert encode_body(RAW, view) == b"ace"
    with pytest.raises(CarpoolError, match="a memoryview in it is not contiguous: send bytes"):
        encode_body(MSGPACK, [view])
    with pytest.raises(ValueError, match="a memoryview in it is not contiguous: send bytes"):
        frames.pack_values([view])


def test_bfloat16_of_torch_that_cannot_be_converted_says_how() -> None:
    with pytest.raises(
        CarpoolError, match=r"requires grad.*value\.detach\(\)\.cpu\(\)\.float\(\)\.numpy\(\)"
    ):
        encode_body(MSGPACK, tensor([1.5], requires_grad=True, dtype="torch.bfloat16"))


def test_a_state_may_be_bfloat16_of_torch() -> None:
    spec = StateSpec("s", "BF16", (-1, 2), initial=tensor([0.5, 1.0], dtype="torch.bfloat16"))
    rows = spec.join(tensor([[1.5, 2.0]], dtype="torch.bfloat16"), 1)
    assert spec.split(rows).tolist() == [[1.5, 2.0]]
    assert spec.row(spec.initial) == to_bytes(np.array([0.5, 1.0]), "BF16")


@pytest.mark.parametrize("mask", [[(False, True)], [(False, False)]])
def test_a_masked_structured_array_is_refused_by_its_names(mask: Any) -> None:
    array: Any = np.ma.array([(1, 2.0)], mask=mask, dtype=[("a", int), ("b", float)])
    with pytest.raises(CarpoolError, match="send a dict with an array for each of its names"):
        encode_body(MSGPACK, array)


def test_texts_in_too_many_lists_are_refused() -> None:
    """Given texts whose shape puts each of them in 31 lists, alone and in many tensors, expect none."""
    tensor = {"datatype": "BYTES", "shape": [5000, *[1] * 31], "data": [""] * 5000}
    few = {**tensor, "shape": [50, *[1] * 31], "data": [""] * 50}
    for content_type in (JSON, MSGPACK):
        decode_body(content_type, encode_body(content_type, few))
        for value in (tensor, [few] * 100):
            body = encode_body(content_type, value)
            with pytest.raises(InvalidArgumentError, match="shape: texts in more than 100000 lists"):
                decode_body(content_type, body)
            with pytest.raises(CarpoolError, match="shape: texts in more than 100000 lists"):
                encode_result_body(content_type, value)


# --- several bodies, and one -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bodies", "advice"),
    [
        ("one", "a str is one body: use infer"),
        (b"one", "a bytes is one body: use infer"),
        (bytearray(b"one"), "a bytearray is one body"),
        (memoryview(b"one"), "a memoryview is one body"),
        ({"a": 1, "b": 2}, "a dict is one body"),
        (7, "an int is one body"),
        (None, "a NoneType is one body"),
        ({1, 2}, "a set has no order"),
        (frozenset({1}), "a frozenset has no order"),
        (DataFrame([[1, 2]]), 'value.to_dict("records") or value.to_numpy()'),
        (np.ma.masked_array([1, 2], [False, True]), "1 of its elements are masked"),
    ],
)
def test_one_body_is_not_many(bodies: Any, advice: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        bodies_to_send(bodies, "map")
    assert advice.replace("an int", "a int") in str(caught.value)


def test_many_bodies_may_be_of_any_kind_with_an_order() -> None:
    for bodies in ([1], (1,), range(1, 2), {1: 2}.keys(), iter([1]), Series([1])):
        assert list(bodies_to_send(bodies, "map")) == [1]
    assert bodies_to_send(tensor([[1, 2]]), "map").tolist() == [[1, 2]]
    assert bodies_to_send(np.ma.masked_array([1, 2], [False, False]), "map").tolist() == [1, 2]
    assert list(bodies_to_send(np.array(["a", "b"], object), "map")) == ["a", "b"]


# --- a body is taken at the call ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "change"),
    [
        (np.zeros(4), lambda body: body.fill(1)),
        (np.zeros(50_000), lambda body: body.fill(1)),
        (bytearray(b"ab"), lambda body: body.reverse()),
        ({"a": [1]}, lambda body: body["a"].append(2)),
        ([1], lambda body: body.append(2)),
    ],
)
def test_what_is_done_to_a_body_after_the_call_changes_nothing(body: Any, change: Any) -> None:
    encoder, fields = BodyEncoder(), {"user": "a"}
    expected = b"".join(BodyEncoder().encode(body, None)[1:])
    taken, options = encoder.snapshot(body, {"fields": fields})
    again, _ = encoder.snapshot(taken, options)  # as when its model is looked up
    change(body)
    fields["user"] = "b"
    assert b"".join(encoder.encode(again, None)[1:]) == expected
    assert options["fields"] == {"user": "a"}


def test_each_body_of_an_iterator_is_taken_as_it_comes() -> None:
    def reused() -> Iterator[Array]:
        buffer = np.zeros(2)
        for number in range(3):
            buffer[:] = number
            yield buffer

    encoder = BodyEncoder()
    taken = encoder.snapshot_each(reused(), {})
    assert [decode_body(MSGPACK, b"".join(encoder.encode(body, None)[1:]))[0] for body in taken] == [0, 1, 2]


def test_a_body_that_cannot_be_sent_fails_when_it_is_sent() -> None:
    taken, _ = BodyEncoder().snapshot({1, 2}, {})
    with pytest.raises(InvalidArgumentError, match="its type is set: it has no order"):
        BodyEncoder().encode(taken, None)


@pytest.mark.parametrize("body", [None, True, 7, 0.5, "text", b"bytes"])
def test_what_nobody_can_change_is_not_encoded_early(body: Any) -> None:
    assert BodyEncoder().snapshot(body, {})[0] is body


# --- bfloat16 of other libraries ---------------------------------------------------------------------------


def test_dtype_of_jax_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert is_bfloat16(SimpleNamespace(kind="V", itemsize=2, name="bfloat16"))  # type: ignore[arg-type]
    assert not is_bfloat16(SimpleNamespace(kind="V", itemsize=1, name="float8_e4m3"))  # type: ignore[arg-type]
    assert not is_bfloat16(BFLOAT16)
    with pytest.raises(ValueError, match="cannot be sent"):
        datatype_of(np.zeros(2, "V1"))  # as float8 and int4 are


def test_bfloat16_is_bf16_in_bodies_rows_and_states() -> None:
    array = bfloat16([1.5, -2.0, 0.1, 3.0]).reshape(2, 2)
    content_type, head, rest = BodyEncoder().encode(array.T, None)
    body = head + rest
    assert b"BF16" in body
    assert (
        decode_body(content_type, body).tolist()
        == decode_body(MSGPACK, encode_body(MSGPACK, array)).T.tolist()
    )
    head_of_rows = BodyEncoder().head_of_rows(array, {})
    assert head_of_rows is not None
    assert head_of_rows.datatype == "BF16"
    assert to_bytes(array, "BF16") == array.tobytes()
    parts, data = frames.stack({"": array}, {})
    assert parts == [("", "BF16", (2,))]
    expected = from_bytes("BF16", (2, 2), array.tobytes())
    assert same(frames.unstack(parts, 2, data)[""], expected)
    for datatype in ("BF16", "FP32", "FP64"):
        spec = StateSpec("s", datatype, (-1, 2))
        assert spec.split(spec.join(array, 2)).tolist() == expected.tolist()


# --- octet-stream ------------------------------------------------------------------------------------------


def test_bytes_of_an_array_are_little_endian_and_never_pointers() -> None:
    assert encode_body(RAW, np.array([1], ">i4")) == b"\1\0\0\0"
    for array in (np.array(["a"], object), np.ma.masked_array([1], [True])):
        with pytest.raises(CarpoolError):
            encode_body(RAW, array)


# --- numbers and names that are unclear --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"1e400", "the number 1e400 is outside the range of FP64"),
        (b"[1, -1E+400]", "the number -1E+400 is outside"),
        (b"2" * 309 + b".0", "is outside the range of FP64"),
        (b"0." + b"0" * 10 + b"1e0000320", "the number"),
        (b"1" * 250 + b"e99", "is outside the range of FP64"),
        (b'{"datatype": "FP64", "shape": [1], "data": [1e400]}', "the number 1e400"),
        (b'{"datatype": "BF16", "shape": [1], "data": [3.4e38]}', "a number is outside BF16's range"),
        (b'{"a": 1, "b": 2, "a": 3}', "the name 'a' is in a map more than once"),
        (b'[{"x": {"a": 1, "\\u0061": 1}}]', "the name 'a' is in a map more than once"),
        (b'{"datatype": "FP32", "shape": [1], "data": [1], "data": [2]}', "the name 'data'"),
        (b'"\\ud800"', "a lone surrogate"),
        (b'{"\\uDFFF": 1}', "a lone surrogate"),
    ],
)
def test_json_that_is_unclear_is_rejected(body: bytes, reason: str) -> None:
    for decode in (decode_body, decode_result):
        with pytest.raises(InvalidArgumentError) as caught:
            decode(JSON, body)
        assert reason in caught.value.detail


def test_json_that_only_looks_unclear_is_decoded() -> None:
    assert decode_body(JSON, b'["1e400", 1e308, -1e-400, "\\ud83d\\ude00", "\\\\ud800"]') == [
        "1e400", 1e308, -0.0, "\U0001f600", "\\ud800",
    ]  # fmt: skip
    assert decode_body(JSON, b"0." + b"1" * 400) == float("0." + "1" * 400)


@given(st.floats() | st.integers(-(10**400), 10**400).map(lambda number: f"{number}.0"), st.integers(0, 420))
def test_no_number_of_json_becomes_infinite(number: Any, exponent: int) -> None:
    text = f"[{str(number).partition('e')[0]}e{exponent}]"
    try:
        (value,) = decode_body(JSON, text.encode())
    except InvalidArgumentError:
        return
    assert np.isfinite(value)


def test_names_of_msgpack_must_differ() -> None:
    body = b"\x82\xa1a\x01\xa1a\x02"
    for decode in (decode_body, decode_result):
        with pytest.raises(InvalidArgumentError, match="the name 'a' is in a map more than once"):
            decode(MSGPACK, body)
