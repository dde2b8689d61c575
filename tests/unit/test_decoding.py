"""What decoders exchange with their model process, and what a model declares of them."""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import array_shapes, arrays

from carpool.plugins import UnusableError
from carpool.wire.bodies import decode_result
from carpool.wire.tensors import TensorSpec
from carpool_worker.dry_run import DryRun
from carpool_worker.model_process.decoding import exchange
from carpool_worker.model_process.decoding.exchange import SharedMemory, read, write
from carpool_worker.model_process.model import LoadedModel, load_model

NUMBERS = st.sampled_from(["?", "u1", "<i2", ">i4", "<i8", "<f2", "<f4", ">f8"])
ARRAYS = NUMBERS.flatmap(lambda kind: arrays(kind, array_shapes(min_dims=0, min_side=0, max_side=5)))
ELEMENTS = arrays(object, array_shapes(min_side=0, max_side=3), elements=st.text() | st.binary())
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text()
    | st.binary()
    | ARRAYS
    | ELEMENTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and one.dtype == object:
        return one.shape == other.shape and same(one.ravel().tolist(), other.ravel().tolist())
    if isinstance(one, np.ndarray):
        is_same = one.dtype == other.dtype.newbyteorder("=") or one.dtype.newbyteorder("<") == other.dtype
        return bool(is_same and one.shape == other.shape and np.array_equal(one, other, equal_nan=True))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


@given(st.lists(VALUES, max_size=3))
def test_values_are_read_as_they_were_written(values: list[Any]) -> None:
    """One after the other, by two sides that map the same memory."""
    ours = SharedMemory.create()
    theirs = SharedMemory(os.dup(ours.descriptor))
    for value in values:
        written = write(ours, value)
        assert same(value, read(theirs, written, copy=True))
    ours.close()
    theirs.close()


def test_memory_that_was_needed_once_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "KEPT_BYTES_MAX", 1024 * 1024)
    ours = SharedMemory.create()
    theirs = SharedMemory(os.dup(ours.descriptor))
    large, small = np.arange(1_000_000), np.arange(5)
    kept = read(theirs, write(ours, large), copy=True)
    ours.trim()
    assert os.fstat(ours.descriptor).st_size == 1024 * 1024
    assert np.array_equal(read(theirs, write(ours, small), copy=True), small)
    assert np.array_equal(kept, large)
    ours.close()
    theirs.close()


class Squares:
    """A model that decodes and encodes, for `carpool check`, which has no pool."""

    max_batch_size = 4
    decode_in = "processes"
    decode_workers = 3
    loaded = 0

    def load_decoder(self) -> None:
        self.loaded += 1

    def decode(self, body: Any) -> Any:
        if body == 13:
            raise ValueError("unlucky")
        return np.full(2, body)

    def predict(self, batch: list[Any]) -> list[Any]:
        assert self.loaded == 1
        for array in batch:
            np.square(array, out=array)
        return batch

    def encode(self, result: Any) -> Any:
        return {"square": int(result[0])}


def test_a_model_that_decodes_can_be_tried_out() -> None:
    model = load_model(Squares, "cpu")
    assert isinstance(model, LoadedModel)
    dry_run = DryRun(model)
    results = dry_run.execute([b"3", b"13", b"4"], "application/json").results
    assert [result.body for result in results] == [b'{"square":9}', None, b'{"square":16}']
    assert results[1].detail == "the model rejected this body: unlucky"
    assert any("unlucky" in trace for trace in dry_run.traces)


class Weighed:
    """Tells costs, of bodies that are decoded to arrays of several shapes."""

    max_batch_size = 8
    max_batch_cost = 7
    decode_in = "threads"
    decoded = (TensorSpec("letters", "UINT8", (-1,), buckets=[2, 4], lengths="lengths"),)
    outputs = (TensorSpec("letters", "UINT8", (-1,), cut="letters"),)

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def cost(self, body: str) -> int:
        if body == "?":
            raise KeyError("no cost")
        return len(body)

    def decode(self, body: str, request: Any) -> Any:
        assert request.cost == len(body)
        return np.frombuffer(body.encode(), np.uint8)

    def predict(self, batch: Any, requests: Any) -> Any:
        self.calls.append(batch["lengths"].tolist())
        assert [request.cost for request in requests] == self.calls[-1]
        return batch["letters"]


def test_what_one_call_can_take_of_decoded_bodies_is_divided_by_their_costs() -> None:
    model = Weighed()
    dry_run = DryRun(load_model(model, "cpu"))
    bodies = ["a", "bcd", "ef", "ghij", "?", "klm", "no", "p"]
    results = dry_run.execute([f'"{body}"'.encode() for body in bodies], "application/json").results
    assert model.calls == [[1, 2, 2, 1], [3, 4], [3]]
    for body, result in zip(bodies, results, strict=True):
        if body == "?":
            assert (result.status, result.detail) == (
                "INTERNAL",
                "the model failed on this request: KeyError: 'no cost'",
            )
        else:
            assert decode_result(result.content_type, result.body or b"").tolist() == [*body.encode()]
    assert any("no cost" in trace for trace in dry_run.traces)


def test_methods_of_these_names_are_the_models_own_unless_it_says_where_they_are_called() -> None:
    model = type("Codec", (), {"decode": lambda self, x: x, "predict": lambda self, batch: batch})
    loaded = load_model(model, "cpu")
    assert isinstance(loaded, LoadedModel) and loaded.beside is None


async def is_awaited(_model: Any, batch: list[Any]) -> list[Any]:
    return batch


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"decode_in": "process"}, "'decode_in' must be 'threads' or 'processes', not 'process'"),
        ({"decode_workers": 0}, "'decode_workers' must be a number from 1 to 256, not 0"),
        ({"decode_workers": 1, "decode": None}, "but no method 'decode' or 'encode'"),
        ({"decoded": [TensorSpec("x", "INT8", (2,))]}, "but neither 'decode_in' nor 'decode_workers'"),
        (
            {"decode_in": "threads", "decoded": [TensorSpec("x", "BYTES", (2,))]},
            "tensor 'x' of 'decoded' is of BYTES: it must be numeric",
        ),
        (
            {"decode_in": "threads", "encode": id, "outputs": [TensorSpec("x", "INT8", (2,))]},
            "the model has 'encode' and 'outputs'",
        ),
        (
            {"decode_in": "threads", "inputs": [TensorSpec("x", "INT8", (-1,), buckets=[2])]},
            "input 'x' has buckets, but 'decode' gets it as it was sent",
        ),
        (
            {"decode_in": "threads", "binds_sequences": True},
            "the model has 'decode_in' or 'decode_workers' and 'binds_sequences'",
        ),
        (
            {"decode_in": "threads", "predict": is_awaited},
            "the model has 'decode_in' or 'decode_workers', and its 'predict' is a coroutine function",
        ),
        (
            {"decode_workers": 2, "predict": lambda self, batch, clients: batch},
            "and its 'predict' has a parameter `clients`: such a model decodes and encodes within 'predict'",
        ),
    ],
)
def test_wrong_declarations_are_errors(declared: dict[str, Any], message: str) -> None:
    own = {"decode": lambda self, body: body, "predict": lambda self, batch: batch}
    with pytest.raises(UnusableError) as error:
        load_model(type("Model", (), {**own, **declared}), "cpu")
    assert message in str(error.value)
