"""What a model returns is counted and matched, never guessed; what it declares is kept."""

from __future__ import annotations

import collections
import random
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import INTERNAL, OK
from carpool.messages import JSON, MSGPACK
from carpool.wire.bodies import decode_result, encode_body
from carpool.wire.tensors import StateSpec, TensorSpec
from carpool_worker.model_process.model import LoadedModel, SteppingModel, adapt, load_model
from carpool_worker.rehearsal import Rehearsal
from support import fuzzing_models

Pair: Any = collections.namedtuple("Pair", "a b")
masked_array: Any = np.ma.masked_array


def answers(
    predict: Callable[[Any], Any],
    bodies: Sequence[Any],
    outputs: Sequence[TensorSpec] = (),
    content_type: str = MSGPACK,
    **declared: Any,
) -> list[Any]:
    """What requests in one batch get: values, and the details of errors as exceptions."""
    model = LoadedModel(lambda batch, _: predict(batch), outputs=tuple(outputs), **declared)
    results = (
        Rehearsal(model).execute([encode_body(content_type, body) for body in bodies], content_type).results
    )
    return [
        decode_result(result.content_type, result.body or b"") if result.status == OK
        else AssertionError(result.status, result.detail)
        for result in results
    ]  # fmt: skip


def always(returned: Any) -> Callable[[Any], Any]:
    """A model that returns this."""
    return lambda batch: returned


def plain(value: Any) -> Any:
    """A value with its arrays as lists, and its types named."""
    if isinstance(value, np.ndarray):
        return ("tensor", str(value.dtype), value.shape, value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else (type(value), repr(value))


# --- counted and matched -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        (42, "unknown"), (True, 2), (1, 2.5), (2**63, -1), (0.5, None), (b"a\0", "b"), ([1], 2), ("a\0", "b"),
        ({"a": 1}, 2), (2**53 + 1, 0.5), ([1, 2], [1]), ([1, 2], [3, 4]), ([0.5, None], [1, 2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_value_in_a_list_of_an_output_is_kept(values: tuple[Any, Any], content_type: str) -> None:
    if content_type == JSON and bytes in map(type, values):
        return
    for names in (["y"], ["y", "z"]):

        def predict(batch: list[int], names: list[str] = names) -> Any:
            return {name: [values[body] for body in batch] for name in names}

        together = answers(predict, [0, 1], content_type=content_type)
        alone = [answers(predict, [body], content_type=content_type)[0] for body in (0, 1)]
        expected = list(values) if len(names) == 1 else [{"y": value, "z": value} for value in values]
        assert plain(together) == plain(alone) == plain(expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (collections.deque, [1, 2]),
        (collections.UserList, [1, 2]),
        (lambda batch: range(5, 7), [5, 6]),
        (np.array, [1, 2]),
        (masked_array, [1, 2]),
        (lambda batch: types.MappingProxyType({"y": batch}), [1, 2]),
        (lambda batch: [Pair(body, 0) for body in batch], [[1, 0], [2, 0]]),
    ],
)
def test_what_may_be_returned(returned: Callable[[Any], Any], expected: list[Any]) -> None:
    assert answers(returned, [1, 2]) == expected


class Frame:
    """Like a DataFrame."""

    columns = ("n", "p")
    to_numpy = None

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.array([[2.0**53, 0.5]] * 2)


class TorchBFloat16:
    """Like a torch tensor of bfloat16, of which numpy has none."""

    dtype = "torch.bfloat16"

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def float(self) -> Any:
        return np.array([[1.5], [2.5]], np.float32)


@pytest.mark.parametrize("outputs", [(), (TensorSpec("y", "BF16", (1,)),)])
def test_bfloat16_of_torch_is_float32(outputs: Sequence[TensorSpec]) -> None:
    for returned in (TorchBFloat16(), {"y": TorchBFloat16()}):
        got = answers(always(returned), [0, 1], outputs)
        assert [plain(value) for value in got] == [("tensor", "float32", (1,), [n]) for n in (1.5, 2.5)]


class Series:
    """Like a Series of integers of which one is missing."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.array(self._values, np.float64)

    def to_list(self) -> list[Any]:
        return self._values


def test_series_is_a_list() -> None:
    """As an array of pandas, [1, None] are floats, and [1] is an integer."""
    assert plain(answers(lambda batch: Series([1, None]), [0, 1])) == plain([1, None])
    (first, _) = answers(lambda batch: {"y": Series([1, None]), "z": batch}, [0, 1])
    assert plain(first) == plain({"y": 1, "z": 0})


class Gradient:
    """Like a tensor that requires a gradient."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("call detach() first")


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (lambda batch: (1, 2), "returned a tuple for 2 requests, not a list: return a list with one result"),
        (lambda batch: Pair(1, 2), "returned a Pair for 2 requests"),
        (lambda batch: bytearray(b"ok"), "returned a bytearray"),
        (lambda batch: memoryview(b"ok"), "returned a memoryview"),
        (lambda batch: collections.UserString("ok"), "returned a UserString"),
        (lambda batch: {1: 1, 2: 2}.values(), "returned a dict_values"),
        (lambda batch: map(float, batch), "returned a map"),
        (lambda batch: {0: [0.1, 0.9], 1: [0.2, 0.8]}, "keys 0, 1, which are no names of outputs"),
        (lambda batch: {"0": [0.1, 0.9], "1": [0.2, 0.8]}, "a key for each request, '0', '1'"),
        (lambda batch: {"a": [0.1, 0.9], "b": [0.2, 0.8]}, "a key for each request, 'a', 'b'"),
        (lambda batch: {"size": (640, 480)}, "returned a tuple in output 'size', not a list"),
        (lambda batch: {"y": {"z": batch}}, "returned a dict in output 'y'"),
        (lambda batch: {"y": "ok"}, "returned a str in output 'y'"),
        (lambda batch: Frame(), 'returned a Frame, whose columns have names: return .to_dict("records")'),
        (lambda batch: [Frame(), Frame()], "its type is Frame"),
        (lambda batch: Gradient(), "returned a Gradient that cannot be converted: call detach() first"),
        (lambda batch: np.array(["2026-01-01", "2026-01-02"], "M8[s]"), "datetime64[s] cannot be sent"),
        (lambda batch: np.zeros(2, "i4,f4"), "cannot be sent"),
        (
            lambda batch: masked_array([1, 2], [1, 1]),
            "a masked array, and masked values cannot be sent",
        ),
        (lambda batch: {"t": masked_array([1, 2], [1, 1]), "n": batch}, "a masked array in output 't'"),
        (lambda batch: [{"x": masked_array([1, 2], [1, 0])}] * 2, "a masked array cannot be sent"),
        (lambda batch: [np.ma.masked] * 2, "a masked array cannot be sent"),
    ],
)
def test_what_may_not_be_returned_says_what_it_is(returned: Callable[[Any], Any], error: str) -> None:
    for answer in answers(returned, ["a", "b"]):
        assert isinstance(answer, AssertionError)
        status, detail = answer.args
        assert status == INTERNAL and error in detail, detail


def test_masked_row_fails_alone() -> None:
    rows = masked_array([[1, 2], [3, 4]], [[0, 0], [0, 1]])
    first, second = answers(lambda batch: rows, [0, 1])
    assert first.tolist() == [1, 2] and "masked" in str(second)


# --- declared is kept --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("datatype", "dtype", "bad", "good"),
    [
        ("UINT8", "i8", 257, 7), ("INT64", "f8", 2.75, 3), ("INT32", "f4", np.nan, 3),
        ("FP16", "f4", 1e5, 1.5), ("UINT32", "i8", -1, 0),
        ("BOOL", "f4", 2.5, 1), ("FP32", "f8", 1e39, 0.5), ("INT64", "u8", 2**63, 1),
        ("INT64", "f8", 2.0**63, 1), ("BF16", "f4", 3.4e38, 1.5), ("FP64", "i8", 2**53 + 1, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "form", [lambda array: array, list, lambda array: {"y": array}, lambda array: {"y": list(array)}]
)
def test_number_that_does_not_survive_fails_its_request_alone(
    datatype: str, dtype: str, bad: Any, good: Any, form: Callable[[Any], Any]
) -> None:
    calls: list[Any] = []

    def predict(batch: list[int]) -> Any:
        calls.append(batch)
        return form(np.array([[bad], [good]], dtype)[batch])

    first, second = answers(predict, [0, 1], [TensorSpec("y", datatype, (1,))])
    (alone,) = answers(predict, [1], [TensorSpec("y", datatype, (1,))])
    assert f"in output 'y', which is {datatype} of shape [1], as it is declared" in str(first)
    assert second.tolist() == [good] and plain(second) == plain(alone)
    assert len(calls) == 2  # nothing was executed again


@pytest.mark.parametrize(
    ("names", "returned", "error"),
    [
        (["y"], lambda rows: rows[:, None].repeat(3, 1), "an array of shape [3] for a request in output 'y'"),
        (["y"], lambda rows: rows, "an array of shape [] for a request in output 'y'"),
        (["y"], lambda rows: {"z": rows[:, None]}, "the outputs 'z', but declares 'y'"),
        (["y"], lambda rows: rows[:, None] * 1j, "complex64 in output 'y', which is declared as FP32"),
        (["y"], lambda rows: [["a"]] * 2, "in output 'y', which is declared as FP32"),
        (["y"], lambda rows: [[1.0, 2.0]] * 2, "an array of shape [2] for a request"),
        (["y"], lambda rows: [None] * 2, "a NoneType in output 'y'"),
        (["y"], lambda rows: [[masked_array([1.0], [1])]] * 2, "masked"),
        (["a", "b"], lambda rows: {"a": rows[:, None]}, "the outputs 'a', but declares 'a', 'b'"),
        (["a", "b"], lambda rows: rows[:, None], "one array, but declares the outputs 'a', 'b'"),
        (["a", "b"], lambda rows: [{"a": [1.0]}] * 2, "the outputs 'a', but declares"),
        (["a", "b"], lambda rows: [[1.0]] * 2, "a list as the result of a request"),
    ],
)
def test_output_that_is_not_as_declared(names: list[str], returned: Callable[[Any], Any], error: str) -> None:
    specs = [TensorSpec(name, "FP32", (1,)) for name in names]
    for answer in answers(lambda batch: returned(np.ones(2, np.float32)), [0, 1], specs):
        assert isinstance(answer, AssertionError) and error in str(answer)


@pytest.mark.parametrize("returned", [7, [7], np.array([7]), np.int64(7), {"y": [7]}, [7.0], [np.int8(7)]])
def test_value_in_a_list_becomes_what_is_declared(returned: Any) -> None:
    (answer,) = answers(lambda batch: [returned], [0], [TensorSpec("y", "UINT8", (1,))])
    assert plain(answer) == ("tensor", "uint8", (1,), [7])


def test_texts_of_a_declared_output() -> None:
    single, pair = TensorSpec("y", "BYTES", ()), TensorSpec("y", "BYTES", (2,))
    assert answers(lambda batch: ["a\0", 1], [0, 1], [single])[0] == "a\0"
    assert "a int in output 'y'" in str(answers(lambda batch: ["a\0", 1], [0, 1], [single])[1])
    assert answers(lambda batch: [["a\0", "b"]], [0], [pair]) == [["a\0", "b"]]


@pytest.mark.parametrize("dtype", ["S2", object])
def test_bytes_in_a_declared_output_of_texts_are_texts_in_utf_8(dtype: Any) -> None:
    """Given bytes of texts, and some that are none, expect only their row to fail."""
    spec, good, bad = TensorSpec("y", "BYTES", (2,)), [b"a", "é".encode()], [b"a", b"\xff"]
    wrong = (
        "the model's result in output 'y' is not BYTES of shape [2], as it is declared: the bytes "
        "b'\\xff' are no text in UTF-8"
    )
    for returned in (
        [good, bad],
        np.array([good, bad], dtype),
        [np.array(good, dtype), np.array(bad, dtype)],
    ):
        first, second = answers(always(returned), [0, 1], [spec])
        assert first == ["a", "é"]
        assert second.args == (INTERNAL, wrong)


@pytest.mark.parametrize("dtype", ["U1", object])
def test_texts_of_a_shape_without_elements_keep_it(dtype: Any) -> None:
    specs = [TensorSpec("y", "BYTES", (-1, 3))]
    for returned in (np.empty((1, 0, 3), dtype), [np.empty((0, 3), dtype)]):
        (answer,) = answers(always(returned), [0], specs)
        assert plain(answer) == ("tensor", "object", (0, 3), [])


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_texts_of_a_declared_output_have_its_shape(content_type: str) -> None:
    rows = [["a", "bc"], ["d", "e"]]
    specs = [TensorSpec("y", "BYTES", (2, 2))]
    for returned in ([rows], np.array([rows]), [np.array(rows, object)]):
        assert answers(always(returned), [0], specs, content_type) == [rows]


# --- what a model does to its batch ------------------------------------------------------------------------

X: Final = (TensorSpec("x", "FP32", (2,)),)


def spoil(body: Any) -> None:
    if isinstance(body, np.ndarray):
        body *= -1
    elif isinstance(body, dict):
        spoil(body.pop("x", None))
    elif isinstance(body, list):
        body.clear()


@pytest.mark.parametrize("bodies", [
    [np.array([number, 1], np.float32) for number in (1, 2, 3, 4)],
    [{"x": np.array([number, 1], np.float32)} for number in (1, 2, 3, 4)],
    [[number] for number in (1, 2, 3, 4)],
])  # fmt: skip
@pytest.mark.parametrize("inputs", [(), X])
@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
def test_halves_get_what_was_sent(
    bodies: list[Any], inputs: tuple[TensorSpec, ...], content_type: str
) -> None:
    """Given a model, and a `validate`, that write into their bodies, and one on which it raises, expect the
    others to be answered as if they were alone."""
    if inputs and type(bodies[0]) is list:
        return

    def number(body: Any) -> float:
        return float(np.ravel(body["x"] if isinstance(body, dict) else body)[0])

    def predict(batch: Any) -> list[float]:
        numbers = [number(body) for body in batch]
        for body in batch:
            spoil(body)
        if 3 in numbers:
            raise ValueError("not 3")
        return numbers

    for validate in (None, spoil):
        one, two, three, four = answers(
            predict, bodies, inputs=inputs, validate=validate, content_type=content_type
        )
        assert [one, two, four] == [1, 2, 4] and "not 3" in str(three)
        assert answers(predict, bodies[:1], inputs=inputs, validate=validate, content_type=content_type) == [
            1
        ]


def test_stepping_model_that_changes_its_bodies_begins_again_with_what_was_sent() -> None:
    class Writer:
        def validate(self, body: Any) -> None:
            body["seen"] = True

        def begin(self, requests: Any) -> None:
            for request in requests:
                request.state = request.body.pop("text")
                assert not request.body

        def step(self, requests: Any) -> None:
            if len(requests) > 1:
                raise ValueError("not together")
            requests[0].finish(requests[0].state)

    model = load_model(Writer, "cpu")
    assert isinstance(model, SteppingModel)
    results = Rehearsal(model).execute([b'{"text": "a"}', b'{"text": "b"}'], JSON).results
    assert [result.body for result in results] == [b'"a"', b'"b"']


def test_states_are_never_infinite() -> None:
    class Growing:
        states = (StateSpec("s", "FP32", (-1,)),)

        def predict(self, batch: Any, states: Any) -> Any:
            return batch, {"s": np.array(batch, np.float64)}

    good, bad = Rehearsal(adapt(Growing, "cpu")).execute([b"1", b"1e39"], JSON).results
    assert good.status == OK
    assert bad.status == INTERNAL and "outside FP32's range" in str(bad.detail)


# --- what clients can read ---------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


UNREADABLE: Final[list[tuple[Any, str]]] = [
    (deep(70), "nested deeper than 64"),
    (msgpack.Timestamp(1, 0), "msgpack extension types"),
    ([{"x": msgpack.ExtType(5, b"x")}], "msgpack extension types"),
    ({"datatype": "image", "shape": "round", "data": 1}, "datatype"),
    ([[] for _ in range(100_001)], "more than 100000 arrays and maps"),
]


@pytest.mark.parametrize(("value", "error"), UNREADABLE)
def test_result_that_no_client_can_read_is_an_error_of_the_model(value: Any, error: str) -> None:
    first, second = answers(lambda batch: [value, "good"], [0, 1])
    assert first.args[0] == INTERNAL and error in first.args[1]
    assert second == "good"


@pytest.mark.parametrize("value", [{1: "a", "1": "b"}, {True: 1, "true": 2}, [{"x": {None: 1, "null": 2}}]])
def test_names_are_not_lost_in_json(value: Any) -> None:
    (answer,) = answers(lambda batch: [value], [0], content_type=JSON)
    assert answer.args[0] == INTERNAL and "are the same text in JSON" in answer.args[1]
    assert answers(lambda batch: [value], [0]) == [value]


def test_arrays_of_a_result_may_be_written_to() -> None:
    for value in (np.ones(3, np.float32), {"x": np.ones(3)}):
        (answer,) = answers(lambda batch, value=value: [value], [0])  # type: ignore[misc]
        array = answer["x"] if isinstance(answer, dict) else answer
        array += 1
        assert array.tolist() == [2, 2, 2]


# --- models that return anything ---------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_ok_is_what_a_request_is_answered_alone(choice: random.Random) -> None:
    fuzzing_models.check(choice, batches=6)


def test_many_models() -> None:
    """A smoke test of what `make fuzz` does for a million batches."""
    fuzzing_models.fuzz(batches=2000, seed=random.randrange(1_000_000), report=lambda line: None)
