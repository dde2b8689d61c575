"""Padding: what is padded and cut back is what it was, and what cannot be is an error that says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra.numpy import arrays

from carpool.errors import InvalidArgumentError
from carpool.messages.requests import MSGPACK
from carpool.plugins import UnusableError
from carpool.wire.bodies import decode_body
from carpool.wire.padding import pad_array, pad_bytes, padded_shape, true_sizes
from carpool.wire.registration import decode_inputs, encode_registration
from carpool.wire.tensors import WIDTHS, Array, TensorSpec, from_bytes, to_bytes
from carpool_worker.model_process.model import adapt
from carpool_worker.model_process.padding import Cut, cut_row, cut_rows
from support.executions import codec_of_model, executed_by, prepared, request_of

IDS = TensorSpec("ids", "INT64", (-1,), pad=-1, buckets=[8, 4, 16], lengths="lengths")
SIZES_MAX = 6


@st.composite
def padded_tensors(draw: st.DrawFn) -> tuple[TensorSpec, Array]:
    """A declaration with one to three dimensions, some of which are padded, and a tensor of it."""
    shape = tuple(draw(st.lists(st.integers(0, SIZES_MAX), min_size=1, max_size=3)))
    axes = draw(st.lists(st.sampled_from(range(len(shape))), min_size=1, unique=True))
    sizes = st.lists(st.integers(SIZES_MAX, 12), min_size=1, max_size=3)
    small = st.lists(st.integers(1, 12), max_size=2)
    buckets = {axis: [*draw(small), *draw(sizes)] for axis in axes}
    datatype = draw(st.sampled_from(sorted(WIDTHS)))
    pad = draw(st.sampled_from([0, 1]))
    varying = tuple(-1 if axis in axes else size for axis, size in enumerate(shape))
    spec = TensorSpec("x", datatype, varying, pad=pad, buckets=buckets)
    dtype = from_bytes(datatype, (0,), b"").dtype
    numbers = draw(arrays(np.uint8, shape, elements=st.integers(0, 1)))
    return spec, numbers.astype(dtype)


@given(padded_tensors())
def test_what_is_padded_and_cut_back_is_what_it_was(of: tuple[TensorSpec, Array]) -> None:
    spec, array = of
    bucket, sizes = padded_shape(spec, array.shape), true_sizes(spec, array.shape)
    sent = pad_bytes(spec, array.shape, bucket, to_bytes(array, spec.datatype))
    padded = from_bytes(spec.datatype, bucket, sent)
    assert np.array_equal(cut_row(padded, spec, sizes), array)
    target = np.empty(bucket, array.dtype)
    pad_array(spec, array, target)
    assert np.array_equal(target, padded), "both ways of padding are the same"
    outside = np.ones(bucket, bool)
    outside[tuple(map(slice, array.shape))] = False
    assert (padded[outside] == spec.pad).all()
    for axis, buckets in spec.buckets:
        assert bucket[axis] == min(size for size in buckets if size >= array.shape[axis])


@given(padded_tensors(), st.integers(0, 3))
def test_results_are_cut_back_to_the_sizes_of_their_input(of: tuple[TensorSpec, Array], fixed: int) -> None:
    """Also if other dimensions of the output are fixed, and the output is one of several."""
    spec, array = of
    output = np.zeros((fixed, *padded_shape(spec, array.shape)))
    rows: list[Any] = [output, {"y": output, "z": 1}]
    cut = Cut("y", tuple(axis + 1 for axis, _ in spec.buckets), spec)
    cut_rows([cut], rows, {"x": [(), true_sizes(spec, array.shape), true_sizes(spec, array.shape)]}, [1, 2])
    assert rows[0].shape == rows[1]["y"].shape == (fixed, *array.shape)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"buckets": [4, 0]}, "buckets: [4, 0] must be a list of sizes of at least 1"),
        ({"buckets": {1: [4]}}, "buckets: 1 is no axis of a dimension that varies (-1); valid is 0"),
        ({"buckets": 4}, "buckets: 4 must be a list of sizes"),
        (
            {"buckets": [4], "shape": (-1, -1)},
            "buckets [4] are a list, but 2 dimensions of shape [-1, -1] vary",
        ),
        ({"buckets": [4], "pad": 0.5}, "pad 0.5 is no INT64"),
        ({"buckets": [4], "pad": "x"}, "pad 'x' must be a number"),
        ({"buckets": [4], "datatype": "BYTES"}, "tensors of BYTES are not padded"),
        ({"pad": 3}, "'pad' has no effect without buckets"),
        ({"lengths": "n"}, "'lengths' names the true sizes of what is padded, but it has no buckets"),
        ({"buckets": [4], "lengths": "x"}, "'lengths' must be another name than its own"),
        ({"cut": "x", "shape": (3,)}, "'cut' is for dimensions that vary (-1), and it has none"),
    ],
)
def test_wrong_declarations_of_a_tensor_are_errors(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match="tensor 'x'") as error:
        TensorSpec(**{"name": "x", "datatype": "INT64", "shape": (-1,), **declared})
    assert message in str(error.value)


class Doubles:
    """Two padded inputs, of which one has two such dimensions."""

    inputs = (IDS, TensorSpec("image", "UINT8", (-1, -1, 3), buckets={0: [4, 8], 1: [8]}))
    outputs = (
        TensorSpec("ids", "INT64", (-1,), cut="ids"),
        TensorSpec("image", "UINT8", (3, -1, -1), cut="image"),
    )

    def predict(self, batch: dict[str, Array]) -> dict[str, Array]:
        assert batch.keys() == {"ids", "lengths", "image"}
        assert batch["lengths"].tolist() == [(row != -1).sum() for row in batch["ids"]]
        return {"ids": 2 * batch["ids"], "image": batch["image"].transpose(0, 3, 1, 2)}


def served(model: Any, bodies: Sequence[Any]) -> tuple[list[int], list[Any]]:
    """The sizes of the frames, and what each request is answered."""
    codec, loaded = codec_of_model(model)
    execution = prepared(codec, *[request_of(body, MSGPACK) for body in bodies])
    sizes = [len(frame.positions) for frame in execution.frames]
    while not execution.is_finished:
        frame = execution.frames[0]
        codec.give_results(execution, frame, *executed_by(loaded, frame))
        del execution.frames[0]
    execution.separate()
    results = [execution.results[position] for position in range(len(bodies))]
    return sizes, [
        decode_body(result.content_type, result.body) if result.body else f"{result.status}: {result.detail}"
        for result in results
    ]


def test_requests_of_one_bucket_are_executed_together_and_cut_back() -> None:
    random = np.random.default_rng(1)
    bodies = [
        {"ids": np.arange(n), "image": random.integers(0, 255, (1 + n % 4, n % 8, 3), np.uint8)}
        for n in range(17)
    ]
    sizes, results = served(Doubles, bodies)
    assert sorted(sizes) == [4, 5, 8], "a frame for each bucket of ids; images have one"
    for body, result in zip(bodies, results, strict=True):
        assert result["ids"].tolist() == (2 * body["ids"]).tolist()
        assert np.array_equal(result["image"], body["image"].transpose(2, 0, 1))


def test_what_is_larger_than_the_largest_bucket_is_refused_alone() -> None:
    image = np.zeros((1, 1, 3), np.uint8)
    bodies = [{"ids": np.arange(17), "image": image}, {"ids": np.arange(2), "image": image}]
    _, (refused, result) = served(Doubles, bodies)
    assert refused == (
        "INVALID_ARGUMENT: body.ids.shape: dimension 0 has the size 17, but this model takes at most 16, its "
        "largest bucket"
    )
    assert result["ids"].tolist() == [0, 2]


class Shortens:
    inputs = (IDS,)
    outputs = (TensorSpec("y", "INT64", (-1,), cut="ids"),)

    def predict(self, batch: dict[str, Array]) -> Array:
        return batch["ids"][:, 1:]


def test_an_output_that_has_not_the_padded_size_is_an_error_that_says_so() -> None:
    _, results = served(Shortens, [[1, 2], [1, 2, 3]])
    assert set(results) == {
        "INTERNAL: the model returned the size 3 in dimension 0 of output 'y', but 'ids' was padded to 4: it "
        "cannot be cut back"
    }


def test_halves_of_a_batch_that_raises_have_their_own_lengths() -> None:
    class Raises:
        inputs = (IDS,)
        outputs = (TensorSpec("y", "INT64", (-1,), cut="ids"),)

        def predict(self, batch: dict[str, Array]) -> Array:
            assert batch["lengths"].tolist() == [(row != -1).sum() for row in batch["ids"]]
            batch["lengths"][:] = 0  # what it changes has no effect
            if (batch["ids"] == 13).any():
                raise ValueError("unlucky")
            return batch["ids"]

    _, results = served(Raises, [[1], [1, 2, 3], [13], [1, 2]])
    assert [result if isinstance(result, str) else result.tolist() for result in results] == [
        [1],
        [1, 2, 3],
        "INTERNAL: the model failed on this request: unlucky",
        [1, 2],
    ]


def test_a_registration_has_what_producers_know_and_no_more() -> None:
    registered = encode_registration({}, [IDS], [])
    assert decode_inputs(registered) == [TensorSpec("ids", "INT64", (-1,))]


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (
            {"outputs": [TensorSpec("y", "INT64", (-1,), cut="idz")]},
            "cut names 'idz', which is no tensor with buckets",
        ),
        (
            {"outputs": [TensorSpec("y", "INT64", (-1, -1), cut="ids")]},
            "2 of its dimensions vary, but 1 of 'ids'",
        ),
        (
            {"outputs": [TensorSpec("y", "INT64", (-1,), buckets=[4])]},
            "output 'y' has buckets, which are for inputs",
        ),
        ({"inputs": [IDS, TensorSpec("lengths", "INT64", ())]}, "lengths names 'lengths', which is an input"),
        ({"inputs": [TensorSpec("x", "INT64", (-1,), cut="ids")]}, "input 'x' has cut, which is for outputs"),
    ],
)
def test_wrong_declarations_of_a_model_are_errors(declared: dict[str, Any], message: str) -> None:
    model = type("Model", (), {"inputs": (IDS,), "predict": lambda self, batch: batch, **declared})
    with pytest.raises(UnusableError) as error:
        adapt(model, "cpu")
    assert message in str(error.value)


def test_a_size_is_refused_with_the_largest_bucket() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 16, its largest bucket"):
        padded_shape(IDS, (17,))
