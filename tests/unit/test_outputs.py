"""What a model returns is counted and matched, never guessed; what it declares is kept."""

from __future__ import annotations

import collections
import json
import random
import types
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import INTERNAL, OK, NotFoundError
from carpool.messages.requests import JSON, MSGPACK, RAW
from carpool.wire.bodies import decode_result, encode_body
from carpool.wire.tensors import StateSpec, TensorSpec, to_bfloat16
from carpool_worker.dry_run import DryRun
from carpool_worker.model_process.model import LoadedModel, RequestInfo, SteppingModel, adapt, load_model
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
        DryRun(model).execute([encode_body(content_type, body) for body in bodies], content_type).results
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


class Extension:
    """Like an array of pandas whose dtype is Int64, with its missing value."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.array([np.nan if value is None else value for value in self._values], np.float64)

    def to_numpy(self) -> Any:
        raise NotImplementedError

    def tolist(self) -> list[Any]:
        return [Missing() if value is None else value for value in self._values]


class Missing:
    pass


Missing.__name__ = "NAType"


@pytest.mark.parametrize("form", [lambda array: array, lambda array: {"y": array}])
@pytest.mark.parametrize("outputs", [(), (TensorSpec("y", "INT64", ()),)])
def test_column_of_pandas_is_a_list(form: Callable[[Any], Any], outputs: Sequence[TensorSpec]) -> None:
    """A mate whose value is missing changes nothing, and has an error that names what it is."""
    numbers = [2**53 + 1, None, 3]

    def predict(batch: list[int]) -> Any:
        return form(Extension([numbers[body] for body in batch]))

    first, missing, last = answers(predict, [0, 1, 2], outputs)
    assert [int(first), int(last)] == [2**53 + 1, 3]
    assert "NAType" in str(missing) or "64 bits" in str(missing)
    assert plain(answers(predict, [0], outputs)) == plain([first])


def test_column_of_pandas_with_names_beside_it() -> None:
    first, missing = answers(lambda batch: {"y": Extension([2**53 + 1, None]), "n": batch}, [0, 1])
    assert first == {"y": 2**53 + 1, "n": 0} and "NAType" in str(missing)


@pytest.mark.parametrize("names", [["label"], ["label", "score"]])
@pytest.mark.parametrize("as_column", [list, lambda values: np.array(values, object)])
def test_exception_in_a_column_fails_its_request_alone(
    names: list[str], as_column: Callable[[Any], Any]
) -> None:
    def predict(batch: list[int]) -> dict[str, Any]:
        labels = [NotFoundError(f"no {body}") if body < 0 else "good" for body in batch]
        return (
            {"label": as_column(labels), "score": np.abs(batch)}
            if len(names) > 1
            else {"label": as_column(labels)}
        )

    first, missing = answers(predict, [7, -2])
    assert first == ("good" if len(names) == 1 else {"label": "good", "score": 7})
    assert missing.args == ("NOT_FOUND", "no -2")


@pytest.mark.parametrize("returned", [np.mean, lambda batch: np.array([batch]).squeeze()])
def test_single_value_says_what_to_return(returned: Callable[[Any], Any]) -> None:
    for form in (returned, lambda batch: {"y": returned(batch)}):
        (answer,) = answers(form, [1.5])
        assert "a single value" in str(answer) and "without dimensions" in str(answer)
        assert "squeeze(axis=1)" in str(answer)


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
    first, second = answers(lambda batch: rows[batch], [0, 1])
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


@pytest.mark.parametrize(
    ("datatype", "integer"), [("FP32", 2**24 + 1), ("FP64", 2**53 + 1), ("FP16", 2049), ("BF16", 257)]
)
@pytest.mark.parametrize(
    "form", [list, lambda row: [row[0], np.float32(row[1])], lambda row: np.array(row, object)]
)
def test_integer_beside_a_float_is_as_one_beside_an_integer(
    datatype: str, integer: int, form: Callable[[Any], Any]
) -> None:
    specs = [TensorSpec("y", datatype, (2,))]
    for mate in (1, 0.5, True):
        (answer,) = answers(lambda batch, mate=mate: [form([integer, mate])], [0], specs)  # type: ignore[misc]
        assert f"in output 'y' is not {datatype}" in str(answer) or "which is" in str(answer)
        (answer,) = answers(lambda batch, mate=mate: [form([integer - 1, mate])], [0], specs)  # type: ignore[misc]
        assert answer.tolist() == [integer - 1, mate]
    (answer,) = answers(lambda batch: [form([float(integer), 0.5])], [0], specs)
    assert answer.tolist()[1] == 0.5  # a float is rounded


@pytest.mark.parametrize("dtype", ["S2", object])
def test_bytes_in_a_declared_output_of_texts_are_texts_in_utf_8(dtype: Any) -> None:
    """Given bytes of texts, and some that are none, expect only their row to fail."""
    spec, good, bad = TensorSpec("y", "BYTES", (2,), text=True), [b"a", "é".encode()], [b"a", b"\xff"]
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


@pytest.mark.parametrize("dtype", ["S2", object])
def test_bytes_in_a_declared_output_stay_bytes(dtype: Any) -> None:
    spec, rows = TensorSpec("y", "BYTES", (2,)), [[b"a", b"\xff"], [b"", "é".encode()]]
    for returned in (rows, np.array(rows, dtype), [np.array(row, dtype) for row in rows]):
        assert answers(always(returned), [0, 1], [spec], MSGPACK) == rows


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
    results = DryRun(model).execute([b'{"text": "a"}', b'{"text": "b"}'], JSON).results
    assert [result.body for result in results] == [b'"a"', b'"b"']


@pytest.mark.parametrize(
    "change",
    [lambda fields: fields.pop("language"), lambda fields: fields.update(language=b"xx"), dict.clear],
)
def test_halves_get_the_fields_that_were_sent(change: Callable[[Any], Any]) -> None:
    class Fields:
        def predict(self, batch: list[Any], requests: Sequence[RequestInfo]) -> list[str]:
            languages = [info.fields["language"].decode() for info in requests]
            for info in requests:
                change(info.fields)
            if "bad" in batch:
                raise ValueError("bad")
            return languages

    class Steps:
        max_batch_cost = 10

        def begin(self, requests: Any) -> None:
            for request in requests:
                request.state = request.fields["language"].decode()
                change(request.fields)
                request.lane, request.correlation_id, request.cost = "x", "x", 1000
            if "bad" in [request.body for request in requests]:
                raise ValueError("bad")

        def step(self, requests: Any) -> None:
            for request in requests:
                request.finish(request.state)

    bodies = [encode_body(JSON, body) for body in ("a", "b", "bad", "c")]
    for model in (Fields, Steps):
        results = DryRun(load_model(model, "cpu")).execute(bodies, JSON, {"language": b"de"}).results
        assert [result.body for result in results] == [b'"de"', b'"de"', None, b'"de"']


def test_states_are_never_infinite() -> None:
    class Growing:
        states = (StateSpec("s", "FP32", (-1,)),)

        def predict(self, batch: Any, states: Any) -> Any:
            return batch, {"s": np.array(batch, np.float64)}

    good, bad = DryRun(adapt(Growing, "cpu")).execute([b"1", b"1e39"], JSON).results
    assert good.status == OK
    assert bad.status == INTERNAL and "outside FP32's range" in str(bad.detail)


# --- what clients can read ---------------------------------------------------------------------------------


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else 1


UNREADABLE: Final[list[tuple[Any, str]]] = [  # some are made when they are needed, because they are large
    (deep(70), "nested deeper than 64"),
    (msgpack.Timestamp(1, 0), "msgpack extension types"),
    ([{"x": msgpack.ExtType(5, b"x")}], "msgpack extension types"),
    ({"datatype": "image", "shape": "round", "data": 1}, "datatype"),
    (lambda: [[] for _ in range(100_001)], "more than 100000 arrays and maps"),
]


@pytest.mark.parametrize(("value", "error"), UNREADABLE)
def test_result_that_no_client_can_read_is_an_error_of_the_model(value: Any, error: str) -> None:
    made = value() if callable(value) else value
    first, second = answers(lambda batch: [made, "good"], [0, 1])
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


# --- BF16 -------------------------------------------------------------------------------------------------


BF16_ROWS: Final = np.array([[1.5, -2.0], [3.25, 1e30]], np.float32)
BF16_SPEC: Final = TensorSpec("y", "BF16", (-1,))
TEXT_SPEC: Final = TensorSpec("t", "BYTES", ())


@pytest.mark.parametrize("content_type", [JSON, MSGPACK])
@pytest.mark.parametrize(
    ("returned", "outputs", "first"),
    [
        (lambda _: BF16_ROWS, [BF16_SPEC], [1.5, -2.0]),
        (lambda _: list(BF16_ROWS), [BF16_SPEC], [1.5, -2.0]),
        (lambda _: BF16_ROWS.tolist(), [BF16_SPEC], [1.5, -2.0]),
        (lambda _: [[1.5], [3.25, 2]], [BF16_SPEC], [1.5]),
        (lambda _: {"y": BF16_ROWS, "n": [1, 2]}, [BF16_SPEC, TensorSpec("n", "INT64", ())], [1.5, -2.0]),
        (lambda _: {"y": BF16_ROWS, "t": ["a", "b"]}, [BF16_SPEC, TEXT_SPEC], [1.5, -2.0]),
        (lambda _: [{"y": [1.5], "t": "a"}, {"y": [1, 2], "t": "b"}], [BF16_SPEC, TEXT_SPEC], [1.5]),
        (lambda batch: to_bfloat16(BF16_ROWS[: len(batch)]), [], [1.5, -2.0]),
        (lambda _: [{"y": row} for row in to_bfloat16(BF16_ROWS)], [BF16_SPEC], [1.5, -2.0]),
    ],
)
def test_bf16_is_sent_in_whatever_form_it_is_returned(
    returned: Callable[[Any], Any], outputs: list[TensorSpec], first: list[float], content_type: str
) -> None:
    model = LoadedModel(lambda batch, _: returned(batch), outputs=tuple(outputs))
    bodies = [encode_body(content_type, body) for body in ("a", "b")]
    for result in DryRun(model).execute(bodies, content_type).results[:1]:
        assert result.status == OK and result.body is not None
        body = json.loads(result.body) if content_type == JSON else msgpack.unpackb(result.body)
        tensor = body["y"] if len(outputs) > 1 else body
        assert (tensor["datatype"], tensor["shape"]) == ("BF16", [len(first)])
        decoded = decode_result(content_type, result.body)
        decoded = decoded["y"] if len(outputs) > 1 else decoded
        assert (decoded.dtype, decoded.tolist()) == (np.float32, first)


@pytest.mark.parametrize("rows", [[[1.5, 2.0], [3.0, 4.0]], [[1.5, 2.0], [3.0]]])
def test_bf16_in_octet_stream_has_two_bytes_whatever_shapes_others_have(rows: list[list[float]]) -> None:
    model = LoadedModel(
        lambda batch, _: [rows[int(at)] for (at,) in batch],
        inputs=(TensorSpec("x", "FP32", (1,)),),
        outputs=(BF16_SPEC,),
    )
    bodies = [np.float32(at).tobytes() for at in range(2)]
    results = DryRun(model).execute(bodies, RAW).results
    assert [len(result.body or b"") for result in results] == [2 * len(row) for row in rows]


def test_number_of_bf16_is_a_number() -> None:
    outputs = [TensorSpec("y", "BF16", ()), TEXT_SPEC]
    assert answers(lambda _: {"y": [1.5, 2], "t": ["a", "b"]}, [1, 2], outputs) == [
        {"y": 1.5, "t": "a"},
        {"y": 2.0, "t": "b"},
    ]


# --- a dict with one name, which is a body -----------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 5])
def test_body_that_is_the_name_of_the_only_output_gets_its_value(count: int) -> None:
    """Whether a dict has rows or columns cannot be seen, if all bodies are its only name. Alone it can."""
    calls: list[int] = []

    def predict(batch: list[str]) -> dict[str, Any]:
        calls.append(len(batch))
        return {"score": [len(text) for text in batch]}

    assert answers(predict, ["score"] * count) == [5] * count
    assert calls == {1: [1], 2: [2, 1, 1], 5: [5, 2, 1, 1, 3, 1, 2, 1, 1]}[count]
    assert answers(predict, ["score", "other"]) == [5, 5]


@pytest.mark.parametrize("row", [[0.5], [0.5, 0.25], [0.5, 0.25, 0.125]])
def test_row_that_is_keyed_by_its_body_is_no_column(row: list[float]) -> None:
    """Requests of one body in a batch: also where the row has as many numbers as there are requests."""
    for answer in answers(lambda batch: dict.fromkeys(batch, row), ["cat"] * 2):
        assert isinstance(answer, AssertionError) and answer.args[0] == INTERNAL


def test_outputs_that_are_all_bodies_of_a_batch_are_an_error_that_says_what_to_declare() -> None:
    for answer in answers(lambda batch: {"a": [1] * len(batch), "b": [2] * len(batch)}, ["a", "b"]):
        assert isinstance(answer, AssertionError)
        assert "declare them with outputs" in answer.args[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_dict_with_a_key_for_each_request_is_refused(count: int) -> None:
    """By correlation ID or row number, also for one request, and where a row has as many values."""

    class Keyed:
        def predict(self, batch: list[Any], requests: Sequence[RequestInfo]) -> Any:
            ids = [info.correlation_id for info in requests]
            names = (
                ids[:1] if batch[0] == "first" else ids if batch[0] == "ids" else map(str, range(len(batch)))
            )
            return {name: [0.5] * len(batch) for name in names}

    model = adapt(Keyed, "cpu")
    for kind in ("ids", "first", "rows"):
        bodies = [encode_body(JSON, kind)] * count
        for result in DryRun(model).execute(bodies, JSON).results:
            assert result.status == INTERNAL and "a key for each request" in (result.detail or "")


# --- as many outputs as requests ---------------------------------------------------------------------------


class Tree:
    """Like a classifier of scikit-learn with several outputs: `form` of an array for each of them."""

    def __init__(self, outputs: int, form: Callable[[Any], Any]) -> None:
        self._outputs, self._form = outputs, form
        self.calls: list[int] = []

    def __call__(self, batch: list[Any]) -> Any:
        self.calls.append(len(batch))
        return self._form([[[body, output] for body in batch] for output in range(self._outputs)])


def in_arrays(rows: Any) -> list[Any]:
    return [np.array(row) for row in rows]


@pytest.mark.parametrize("form", [list, in_arrays, np.array])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_as_many_outputs_as_requests_are_never_taken_for_these(
    count: int, form: Callable[[Any], Any]
) -> None:
    for answer in answers(Tree(count, form), list(range(count))):
        assert isinstance(answer, AssertionError) and f"returned {count} results for" in answer.args[1]


@pytest.mark.parametrize("form", [list, in_arrays, np.array])
def test_rows_with_as_many_values_as_requests_cost_one_more_look(form: Callable[[Any], Any]) -> None:
    calls: list[int] = []

    def predict(batch: list[int]) -> Any:
        calls.append(len(batch))
        return form([[body, 7] for body in batch])

    model = LoadedModel(lambda batch, _: predict(batch))
    for _ in range(2):
        bodies = [encode_body(JSON, body) for body in (1, 2)]
        results = DryRun(model).execute(bodies, JSON).results
        assert [np.ravel(decode_result(JSON, result.body or b"")).tolist() for result in results] == [
            [1, 7],
            [2, 7],
        ]
    assert calls == [2, 1, 1, 2]  # then it is known


# --- arrays that a model uses again ------------------------------------------------------------------------


@pytest.mark.parametrize("outputs", [(), (TensorSpec("y", "FP32", (2,)),)])
def test_array_that_a_model_fills_at_each_call_keeps_the_results_of_halves(
    outputs: tuple[TensorSpec, ...],
) -> None:
    filled = np.zeros((4, 2), np.float32)

    def predict(batch: list[int]) -> Any:
        filled[: len(batch)] = np.array(batch)[:, np.newaxis]
        if 3 in batch:
            raise ValueError("bad body")
        return filled[: len(batch)]

    *good, bad = answers(predict, [0, 1, 2, 3], outputs)
    assert [row.tolist() for row in good] == [[0, 0], [1, 1], [2, 2]]
    assert isinstance(bad, AssertionError)


def test_dict_that_a_model_returns_at_each_call_keeps_the_results_of_halves() -> None:
    result: dict[str, Any] = {}

    def predict(batch: list[int]) -> list[Any]:
        if len(batch) > 1:
            raise ValueError("one at a time")
        result["n"] = object() if batch == [2] else batch[0]
        return [result]

    first, second, bad, last = answers(predict, [0, 1, 2, 3])
    assert (first, second, last) == ({"n": 0}, {"n": 1}, {"n": 3})
    assert "its type is object" in bad.args[1]
