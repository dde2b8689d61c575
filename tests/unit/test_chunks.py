"""Emitted values, joined."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from carpool_worker.model_process.frames import pack_values, unpack_values
from carpool_worker.model_process.stepping.chunks import join


def texts(data: list[str], *shape: int) -> dict[str, Any]:
    """An array of texts, as it is packed."""
    return {"datatype": "BYTES", "shape": list(shape), "data": data}


@pytest.mark.parametrize(
    ("values", "joined"),
    [
        ([], None),
        (["Once", "", " upon"], "Once upon"),
        ([b"\x00", b"\xff"], b"\x00\xff"),
        ([[1, 2], [], [[3]]], [1, 2, [3]]),
        ([(1,), [2]], [1, 2]),
        ([3, 2, 1], [3, 2, 1]),
        ([7], [7]),
        ([None], [None]),
        (["a", b"a"], ["a", b"a"]),
        (["a", ["a"]], ["a", ["a"]]),
        ([{"a": 1}, {"a": 2}], [{"a": 1}, {"a": 2}]),
        ([texts(["a"], 1), texts(["b", "c"], 2)], texts(["a", "b", "c"], 3)),
        ([texts(["a"], 1, 1), texts(["b", "c"], 1, 2)], [texts(["a"], 1, 1), texts(["b", "c"], 1, 2)]),
        ([texts(["a"]), texts(["b"])], [texts(["a"]), texts(["b"])]),
        ([texts(["a"], 2), texts(["b"], 1)], [texts(["a"], 2), texts(["b"], 1)]),
    ],
)
def test_joined(values: list[Any], joined: Any) -> None:
    result = join(values)
    assert (result, type(result)) == (joined, type(joined))


def test_arrays_of_one_layout_are_joined_along_their_first_axis() -> None:
    parts = [np.ones((rows, 3), np.float16) for rows in (1, 0, 2)]
    joined = join(parts)
    assert (joined.shape, joined.dtype) == ((3, 3), np.float16)


@pytest.mark.parametrize(
    "values",
    [
        [np.zeros((1, 2)), np.zeros((1, 3))],
        [np.zeros(2), np.zeros(2, np.float32)],
        [np.zeros((1, 2)), np.zeros(2)],
        [np.float64(1) * np.ones(()), np.ones(())],
        [np.ones(()), np.ones(2)],
        [np.ones(2), np.ones(())],
        [np.ones(2), [1, 1]],
    ],
)
def test_arrays_of_different_layouts_are_a_list(values: list[Any]) -> None:
    joined = join(values)
    assert isinstance(joined, list)
    assert all(part is value for part, value in zip(joined, values, strict=True))


parts = st.one_of(
    st.lists(st.text()),
    st.lists(st.binary()),
    st.lists(st.lists(st.integers(0, 9))),
    st.lists(st.integers(0, 9)),
)


@given(parts, st.integers(0, 9))
def test_joining_what_was_joined_in_part_gives_the_same(values: list[Any], cut: int) -> None:
    halves = [join(half) for half in (values[:cut], values[cut:]) if half]
    assert join(halves) == join(values)


@given(parts)
def test_joined_values_can_be_sent(values: list[Any]) -> None:
    assert unpack_values(pack_values([join(values)])) == [join(values)]
