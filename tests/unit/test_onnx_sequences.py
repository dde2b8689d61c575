"""ONNX files with states, constants and control inputs: what is declared, and what the graph then gets."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.errors import InvalidArgumentError
from carpool.messages.batches import BatchedRun
from carpool.wire.bodies import decode_body
from carpool.wire.tensors import Array, StateSpec, TensorSpec
from carpool_worker.model_process.model import RequestInfo, adapt
from carpool_worker.models.onnx import OnnxModel
from support import tiny_onnx
from support.executions import codec_of_model, finish_with_states, prepared, run_of_sequence
from support.tiny_onnx import Node, Value

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("onnx_in_one_thread")

STATES = '[[states]]\ninput = "sum"\noutput = "next"\n'
CONTROLS = """
[controls]
START = { input = "start" }
CORRID = { input = "id" }
"""


def accumulator(metadata: Mapping[str, str] | None = None, **shapes: Sequence[Any]) -> bytes:
    """A graph that adds each request's `x` to its sequence's `sum`, and tells what it was told."""
    return tiny_onnx.model(
        [
            Value("x", ["N", 2]),
            Value("sum", shapes.get("sum", ["N", 2])),
            Value("start", shapes.get("start", ["N", 1])),
            Value("id", ["N"], tiny_onnx.INT64),
        ],
        [
            Value("total", ["N", 2]),
            Value("next", shapes.get("next", ["N", 2])),
            Value("started", shapes.get("start", ["N", 1])),
            Value("of", ["N"], tiny_onnx.INT64),
        ],
        [
            Node("Add", ["x", "sum"], ["total"]),
            Node("Identity", ["total"], ["next"]),
            Node("Identity", ["start"], ["started"]),
            Node("Identity", ["id"], ["of"]),
        ],
        metadata,
    )


def loaded(
    folder: Path, content: bytes, toml: str | None = None, declared: Mapping[str, Any] | None = None
) -> OnnxModel:
    path = folder / "tiny.onnx"
    path.write_bytes(content)
    if toml is not None:
        path.with_suffix(".toml").write_text(toml)
    model = OnnxModel(path, declared)
    model.load("cpu")
    return model


def request(sequence_id: str, *, start: bool = False, end: bool = False) -> RequestInfo:
    return RequestInfo("c", "", {}, sequence_id=sequence_id, sequence_start=start, sequence_end=end)


# --- states ------------------------------------------------------------------------------------------------


def test_states_are_inputs_of_the_next_request(tmp_path: Path) -> None:
    model = loaded(tmp_path, accumulator(), STATES + "initial = 100" + CONTROLS)
    assert model.states == (StateSpec("sum", "FP32", (-1, 2), output="next"),)
    assert [spec.name for spec in model.outputs] == ["total", "started", "of"]
    assert model.inputs == (TensorSpec("x", "FP32", (2,)),)

    kept: dict[str, Array] = {}
    totals = {"7": np.full(2, 100, np.float32), "8": np.full(2, 100, np.float32)}
    numbers = np.random.default_rng(3)
    for ids in (["7"], ["8", "7"], ["7", "8"], ["8"]):
        infos = [request(name, start=name not in kept) for name in ids]
        start = np.frombuffer(model.states[0].row(model.states[0].initial), np.float32)
        states = np.stack([kept.get(name, start) for name in ids])
        batch = numbers.integers(0, 9, (len(ids), 2)).astype(np.float32)
        outputs, new = model.predict(batch, {"sum": states}, infos)
        for row, name in enumerate(ids):
            totals[name] = totals[name] + batch[row]
            kept[name] = new["sum"][row]
            np.testing.assert_array_equal(outputs["total"][row], totals[name])
            np.testing.assert_array_equal(kept[name], totals[name])
        assert outputs["of"].tolist() == [int(name) for name in ids]
        assert outputs["started"].ravel().tolist() == [float(info.sequence_start) for info in infos]


@pytest.mark.parametrize("axis", ["", "axis = 0\n"])
def test_states_of_one_sequence_at_a_time(tmp_path: Path, axis: str) -> None:
    """A graph whose batch is fixed at 1, in its request, its control and its state."""
    content = tiny_onnx.model(
        [Value("x", [1, 2]), Value("sum", [1, 2]), Value("start", [1, 1])],
        [Value("total", [1, 2]), Value("next", [1, 2]), Value("started", [1, 1])],
        [
            Node("Add", ["x", "sum"], ["total"]),
            Node("Identity", ["total"], ["next"]),
            Node("Identity", ["start"], ["started"]),
        ],
    )
    toml = f"max_batch_size = 1\n{STATES}{axis}[controls]\nSTART = {{ input = 'start' }}\n"
    model = loaded(tmp_path, content, toml)
    assert model.states == (StateSpec("sum", "FP32", (-1, 2), output="next"),)
    row = np.array([[1, 2]], np.float32)
    outputs, new = model.predict(row, {"sum": row}, [request("7", start=True)])
    assert outputs["total"].tolist() == new["sum"].tolist() == [[2, 4]]
    assert outputs["started"].tolist() == [[1]]


def transposed(sum_shape: Sequence[Any] = (2, "N"), next_shape: Sequence[Any] = (2, "N")) -> bytes:
    """A graph that adds, with the batch in the second dimension of its state."""
    return tiny_onnx.model(
        [Value("x", ["N", 2]), Value("sum", sum_shape)],
        [Value("total", ["N", 2]), Value("next", next_shape)],
        [
            Node("Transpose", ["sum"], ["rows"]),
            Node("Add", ["x", "rows"], ["total"]),
            Node("Transpose", ["total"], ["next"]),
        ],
    )


@pytest.mark.parametrize(
    ("sum_shape", "declared"),
    [
        ((2, "N"), ""),
        ((2, None), "axis = 1"),
        (("size", "N"), "shape = [2, -1]"),
        ((None, None), "shape = [2, -1]"),
        ((2, "N"), "initial = [5, 6]"),
    ],
)
def test_batch_dimension_of_a_state_may_be_any(
    tmp_path: Path, sum_shape: Sequence[Any], declared: str
) -> None:
    model = loaded(tmp_path, transposed(sum_shape, (None, None)), STATES + declared)
    (state,) = model.states
    assert (state.shape, state.axis) == ((2, -1), 1)
    initial = [5.0, 6.0] if "initial" in declared else [0.0, 0.0]
    assert np.frombuffer(state.row(state.initial), np.float32).tolist() == initial
    rows = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    outputs, new = model.predict(rows, {"sum": np.array([[10, 20, 30], [0, 0, 0]], np.float32)})
    assert outputs.tolist() == [[11, 2], [23, 4], [35, 6]]
    assert new["sum"].tolist() == [[11, 23, 35], [2, 4, 6]]


def test_state_of_bfloat16_is_float32_outside(tmp_path: Path) -> None:
    values = [Value(name, ["N"], tiny_onnx.BFLOAT16) for name in ("x", "sum", "y", "next")]
    nodes = [Node("Identity", ["sum"], ["y"]), Node("Identity", ["x"], ["next"])]
    model = loaded(tmp_path, tiny_onnx.model(values[:2], values[2:], nodes), STATES)
    outputs, new = model.predict(np.array([1.5, 2.5], np.float32), {"sum": np.array([-3, 0.25], np.float32)})
    assert outputs.tolist() == [-3, 0.25]
    assert new["sum"].tolist() == [1.5, 2.5]


def test_state_of_another_shape_is_an_error(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [Value("x", ["N", 2]), Value("sum", ["N", 2])],
        [Value("y", ["N", 2]), Value("next", [None, None])],
        [Node("Identity", ["x"], ["y"]), Node("Concat", ["sum", "x"], ["next"], {"axis": 0})],
    )
    model = loaded(tmp_path, graph, STATES)
    with pytest.raises(RuntimeError, match=r"output 'next' has shape \[2, 2\] .* must have \[1, 2\]"):
        model.predict(np.zeros((1, 2), np.float32), {"sum": np.zeros((1, 2), np.float32)})


def test_wrong_states_are_an_error(tmp_path: Path) -> None:
    model = loaded(tmp_path, transposed(), STATES)
    with pytest.raises(ValueError, match="takes the states sum, but got none"):
        model.predict(np.zeros((1, 2), np.float32), {})


@pytest.mark.parametrize(
    ("content", "toml", "parameters"),
    [
        (accumulator(), "", ["batch"]),
        (transposed(), STATES, ["batch", "states"]),
        (accumulator(), STATES + CONTROLS, ["batch", "states", "requests"]),
    ],
    ids=range(3),
)
def test_predict_takes_only_what_is_declared(
    tmp_path: Path, content: bytes, toml: str, parameters: list[str]
) -> None:
    """What `requests` has would be sent to the model process with every batch."""
    model = loaded(tmp_path, content, toml)
    assert [*inspect.signature(model.predict).parameters] == parameters


# --- control inputs ----------------------------------------------------------------------------------------


def controlled(kind: int, shape: Sequence[Any]) -> bytes:
    """A graph whose results are its controls."""
    names = ("start", "end", "ready")
    return tiny_onnx.model(
        [
            Value("x", ["N"]),
            Value("sum", ["N"]),
            *(Value(name, shape, kind) for name in names),
        ],
        [Value("next", ["N"]), *(Value(f"{name}-seen", shape, kind) for name in names)],
        [
            Node("Add", ["x", "sum"], ["next"]),
            *(Node("Identity", [name], [f"{name}-seen"]) for name in names),
        ],
    )


@pytest.mark.parametrize(
    ("kind", "false_true", "seen"),
    [
        (tiny_onnx.FLOAT, None, [0.0, 1.0]),
        (tiny_onnx.FLOAT, "[-1, 0.5]", [-1.0, 0.5]),
        (tiny_onnx.INT32, "[0, 1]", [0, 1]),
        (tiny_onnx.INT64, "[1, 0]", [1, 0]),
        (tiny_onnx.BOOL, None, [False, True]),
        (tiny_onnx.BOOL, "[true, false]", [True, False]),
    ],
)
@pytest.mark.parametrize("shape", [["N"], ["N", 1], [None, None]])
def test_controls_say_where_in_its_sequence_a_request_is(
    tmp_path: Path, kind: int, false_true: str | None, seen: list[Any], shape: Sequence[Any]
) -> None:
    pair = f", false_true = {false_true}" if false_true else ""
    lines = [f'{name.upper()} = {{ input = "{name}"{pair} }}' for name in ("start", "end", "ready")]
    model = loaded(tmp_path, controlled(kind, shape), "\n".join([STATES, "[controls]", *lines]))
    infos = [request("a", start=True), request("b", end=True), request("c", start=True, end=True)]
    zeros = np.zeros(3, np.float32)
    outputs, _ = model.predict(zeros, {"sum": zeros}, infos)
    false, true = seen
    assert outputs["start-seen"].shape == (3,) if len(shape) == 1 else (3, 1)
    assert outputs["start-seen"].ravel().tolist() == [true, false, true]
    assert outputs["end-seen"].ravel().tolist() == [false, true, true]
    assert outputs["ready-seen"].ravel().tolist() == [true] * 3


def identified(kind: int) -> bytes:
    """A graph whose result is the ID."""
    return tiny_onnx.model(
        [Value("x", ["N"]), Value("sum", ["N"]), Value("id", ["N", 1], kind)],
        [Value("next", ["N"]), Value("of", ["N", 1], kind)],
        [Node("Add", ["x", "sum"], ["next"]), Node("Identity", ["id"], ["of"])],
    )


CORRID = STATES + '[controls]\nCORRID = { input = "id" }'


def ids_seen(model: OnnxModel, ids: Sequence[str]) -> list[Any]:
    zeros = np.zeros(len(ids), np.float32)
    outputs, _ = model.predict(zeros, {"sum": zeros}, [request(name) for name in ids])
    return list(outputs.ravel().tolist())


def test_sequence_ids_are_texts_or_numbers(tmp_path: Path) -> None:
    texts = loaded(tmp_path, identified(tiny_onnx.STRING), CORRID)
    assert ids_seen(texts, ["mic7", "ünï"]) == ["mic7", "ünï"]
    for kind, ids in (
        (tiny_onnx.UINT64, [0, 2**64 - 1]),
        (tiny_onnx.INT64, [-(2**63), 2**63 - 1]),
        (tiny_onnx.INT32, [-(2**31), 2**31 - 1]),
    ):
        model = loaded(tmp_path, identified(kind), CORRID)
        assert ids_seen(model, [str(number) for number in ids]) == ids


@pytest.mark.parametrize("name", ["mic7", "", "-1", "1.0", "01", "²", "+1", " 1", str(2**64), "9" * 400])
def test_sequence_id_that_is_no_number_fails_where_one_is_needed(tmp_path: Path, name: str) -> None:
    model = loaded(tmp_path, identified(tiny_onnx.UINT64), CORRID)
    with pytest.raises(InvalidArgumentError, match=r"sequence_id: .* is not a whole number of 0 to 18446744"):
        ids_seen(model, ["1", name])


# --- constants ---------------------------------------------------------------------------------------------


def scaled(shape: Sequence[Any] | None, kind: int = tiny_onnx.FLOAT) -> bytes:
    """A graph that multiplies by a constant."""
    return tiny_onnx.model(
        [Value("x", ["N", 2], kind), Value("by", shape, kind)],
        [Value("y", ["N", 2], kind)],
        [Node("Mul", ["x", "by"], ["y"])],
    )


@pytest.mark.parametrize(
    ("shape", "value", "factors"),
    [
        ([], "3", [3, 3]),
        ([1], "3", [3, 3]),
        ([2], "[3, 4]", [3, 4]),
        ([2], "3", [3, 3]),
        (["N", 1], "3", [3, 3]),
        (["N", 2], "[3, 4]", [3, 4]),
        ([1, "size"], "[[3, 4]]", [3, 4]),
        (["rows", 2], "[[3, 4]]", [3, 4]),
    ],
)
@pytest.mark.parametrize("kind", [tiny_onnx.FLOAT, tiny_onnx.INT64, tiny_onnx.BFLOAT16])
def test_constants_are_the_same_for_every_request(
    tmp_path: Path, shape: Sequence[Any], value: str, factors: list[int], kind: int
) -> None:
    if kind == tiny_onnx.BFLOAT16:
        model = loaded(tmp_path, constant_identity(shape), f"[constants]\nby = {value}")
        assert np.asarray(model.predict(np.zeros((3, 2), np.float32))).tolist() == [[0, 0]] * 3
        return
    model = loaded(tmp_path, scaled(shape, kind), f"[constants]\nby = {value}")
    assert [spec.name for spec in model.inputs] == ["x"] and not model.states
    for rows in (1, 3):
        batch = np.arange(2 * rows).reshape(rows, 2).astype(np.int64 if kind == tiny_onnx.INT64 else "f4")
        np.testing.assert_array_equal(model.predict(batch), batch * factors)


def constant_identity(shape: Sequence[Any]) -> bytes:
    """A graph with a BF16 input and constant, whose result is the input: onnxruntime multiplies no BF16."""
    kind = tiny_onnx.BFLOAT16
    return tiny_onnx.model(
        [Value("x", ["N", 2], kind), Value("by", shape, kind)],
        [Value("y", ["N", 2], kind)],
        [Node("Identity", ["x"], ["y"]), Node("Identity", ["by"], ["unused"])],
    )


def test_text_and_truth_are_constants_too(tmp_path: Path) -> None:
    for kind, value in ((tiny_onnx.STRING, '"en"'), (tiny_onnx.BOOL, "true")):
        graph = tiny_onnx.model(
            [Value("x", ["N"]), Value("by", ["N"], kind)],
            [Value("y", ["N"]), Value("same", ["N"], kind)],
            [Node("Identity", ["x"], ["y"]), Node("Identity", ["by"], ["same"])],
        )
        model = loaded(tmp_path, graph, f"[constants]\nby = {value}")
        assert model.predict(np.zeros(2, np.float32))["same"].tolist() == [json.loads(value)] * 2


# --- where it is declared ----------------------------------------------------------------------------------


def test_metadata_toml_and_code_declare_the_same(tmp_path: Path) -> None:
    values = {
        "states": [{"input": "sum", "output": "next", "initial": 1}],
        "controls": {"START": {"input": "start"}, "CORRID": {"input": "id"}},
        "max_batch_size": 7,
    }
    metadata = {f"carpool.{key}": json.dumps(value) for key, value in values.items()}
    models = []
    for folder, content, toml, declared in (
        ("metadata", accumulator({**metadata, "author": "A. N. Other"}), None, None),
        ("toml", accumulator(), "max_batch_size = 7\n" + STATES + "initial = 1\n" + CONTROLS, None),
        ("code", accumulator(), None, values),
    ):
        (tmp_path / folder).mkdir()
        models.append(loaded(tmp_path / folder, content, toml, declared))
    assert {model.max_batch_size for model in models} == {7}
    for model in models:
        assert model.states == models[0].states and model.states[0].initial == 1
        ones = np.ones((1, 2), np.float32)
        outputs, _ = model.predict(ones, {"sum": ones}, [request("5", start=True)])
        assert {name: array.tolist() for name, array in outputs.items()} == {
            "total": [[2, 2]],
            "started": [[1]],
            "of": [5],
        }


def test_toml_replaces_metadata_and_code_replaces_both_key_by_key(tmp_path: Path) -> None:
    content = accumulator(
        {
            "carpool.max_batch_size": "2",
            "carpool.states": '[{"input": "sum", "output": "next", "initial": 2}]',
            "carpool.controls": '{"START": {"input": "start"}, "CORRID": {"input": "id"}}',
        }
    )
    declared = {"states": [{"input": "sum", "output": "next", "initial": 4}]}
    for toml, given, size, initial in (
        (None, None, 2, 2),
        ("max_batch_size = 3", None, 3, 2),
        ("max_batch_size = 3\n" + STATES + "initial = 3", None, 3, 3),
        ("max_batch_size = 3\n" + STATES + "initial = 3", declared, 3, 4),
    ):
        model = loaded(tmp_path, content, toml, given)
        assert (model.max_batch_size, model.states[0].initial) == (size, initial)


# --- in a model process ------------------------------------------------------------------------------------


def served(model: Any, *runs: BatchedRun, states: dict[int, bytes]) -> dict[str, tuple[Any, Any]]:
    """By sequence: the result, or the error's detail, and what is kept of the sequence."""
    codec, adapted = codec_of_model(model)
    found = finish_with_states(codec, adapted, prepared(codec, *runs, states=states))
    return {
        sequence_id: (
            result.detail if result.body is None else decode_body(result.content_type, result.body),
            change.content,
        )
        for sequence_id, (result, change) in found.items()
    }


def test_worker_serves_a_file_with_states_and_controls(tmp_path: Path) -> None:
    """Given a request whose ID is no number among others, expect that it alone fails."""
    model = loaded(tmp_path, accumulator(), STATES + "initial = 100" + CONTROLS)
    state = np.array([10, 20], np.float32).tobytes()
    found = served(
        model,
        run_of_sequence("7", [1.0, 2.0], starts=True),
        run_of_sequence("mic7", [1.0, 2.0]),
        run_of_sequence("8", [3.0, 4.0]),
        states={1: state, 2: state},
    )
    detail, _ = found.pop("mic7")
    assert detail.startswith("sequence_id: 'mic7' is not a whole number")
    for sequence_id, total, started in (("7", [101, 102], 1), ("8", [13, 24], 0)):
        result, new_state = found[sequence_id]
        assert {name: np.ravel(value).tolist() for name, value in result.items()} == {
            "total": total,
            "started": [started],
            "of": [int(sequence_id)],
        }
        assert np.frombuffer(new_state, np.float32).tolist() == total


def test_any_setting_may_be_declared(tmp_path: Path) -> None:
    content = accumulator({"carpool.max_sequence_idle_ms": "500", "carpool.preferred_batch_sizes": "[4, 8]"})
    model = loaded(tmp_path, content, "max_sequence_idle_ms = 700\n" + STATES + CONTROLS)
    settings = adapt(model, "cpu").settings
    assert (settings.max_sequence_idle_ms, settings.preferred_batch_sizes) == (700, (4, 8))
    assert settings.max_batch_size == OnnxModel.max_batch_size


# --- wrong declarations ------------------------------------------------------------------------------------


def error_of(folder: Path, content: bytes, toml: str | None, declared: Any = None) -> str:
    with pytest.raises(ValueError) as caught:
        loaded(folder, content, toml, declared)
    return str(caught.value)


START = '[controls]\nSTART = { input = "start" '


@pytest.mark.parametrize(
    ("toml", "error"),
    [
        ("states = 5", "states: 5 must be a list of tables: write [[states]]"),
        ("states = [1]", "states[0]: 1 must be a table with the keys input, output, axis, shape, initial"),
        ("constants = 5", "constants: 5 must be a table of inputs with their values, such as sr = 16000"),
        ("controls = 5", 'controls: 5 must be a table, such as START = { input = "start" }'),
        (
            "state = []",
            "state: unknown key; valid are states, constants, controls, padding, cut, outputs and settings",
        ),
        ("max_batch_size = 0", "max_batch_size is 0: must be a whole number of at least 1"),
        ("max_batch_size = true", "max_batch_size is True: must be a whole number of at least 1"),
        ("policy = 'never'", "policy is 'never': must be eager, deferred"),
        ('[[states]]\ninput = "sum"', "states[0].output: is missing; it must be the name of an output"),
        ('[[states]]\ninput = 5\noutput = "next"', "states[0].input: 5 is not a text; it must be the name"),
        (STATES + "axes = 1", "states[0].axes: unknown key; valid are input, output, axis, shape, initial"),
        (STATES + "axis = -1", "states[0].axis: -1 must be a whole number of at least 0"),
        (STATES + "axis = 1", "states[0].axis: 1 is not a dimension that varies: input 'sum' has the shape"),
        (STATES + "shape = [-1, -1]", "states[0].shape: [-1, -1] must be a list of sizes, -1 for the batch"),
        (STATES + "shape = [2, 2]", "states[0].shape: [2, 2] must be a list of sizes, -1 for the batch"),
        (
            STATES + "shape = [-1, 3]",
            "states[0].shape: [-1, 3] does not fit: input 'sum' has the shape [N, 2]",
        ),
        (STATES + "shape = [2, -1]\naxis = 1", "states[0]: has both axis and shape"),
        (STATES + "initial = [1, 2, 3]", "states[0].initial: "),
        (STATES + 'initial = "zero"', "states[0].initial: "),
        (STATES + "initial = [[1], [2, 3]]", "states[0].initial: "),
        (
            '[[states]]\ninput = "sun"\noutput = "next"',
            "states[0]: the file has no input 'sun'; it has x, sum",
        ),
        (
            '[[states]]\ninput = "sum"\noutput = "y"',
            "states[0]: the file has no output 'y'; it has total, next",
        ),
        ('[[states]]\ninput = "sum"\noutput = "of"', "output 'of' is of type tensor(int64), but input 'sum'"),
        (
            '[[states]]\ninput = "x"\noutput = "started"',
            "output 'started' has the shape [N, 1], but input 'x'",
        ),
        (STATES + STATES, "states[1]: output 'next' is declared by "),
        (STATES + "[constants]\nsum = 5", "constants.sum: input 'sum' is declared by "),
        (
            STATES + "[constants]\nsr = 5",
            "constants.sr: the file has no input 'sr'; it has x, sum, start, id",
        ),
        (STATES + '[constants]\nstart = "a"', "constants.start: 'a' is not FP32: it has an element that is"),
        (STATES + "[constants]\nid = 0.5", "constants.id: 0.5 is not INT64: it has an element that is"),
        (
            STATES + "[constants]\nid = [[1], [2]]",
            "constants.id: has the shape [2, 1]; it must be [?]",
        ),
        (STATES + "[controls]\nSTOP = {}", "controls.STOP: unknown key; valid are START, READY, END, CORRID"),
        (STATES + "[controls]\nEND = 5", "controls.END: 5 must be a table with the keys input, false_true"),
        (STATES + "[controls]\nEND = {}", "controls.END.input: is missing; it must be the name of an input"),
        (
            STATES + START + ", false_true = 1 }",
            "controls.START.false_true: 1 must be the values for false and",
        ),
        (STATES + START + ", false_true = [1, 1] }", "controls.START.false_true: [1, 1] must be the values"),
        (STATES + START + ", false_true = [0, 'a'] }", "controls.START.false_true: [0, 'a'] is not FP32"),
        (
            STATES + START + ", fp32_false_true = [0, 1] }",
            "fp32_false_true: unknown key; valid are input, fal",
        ),
        (STATES + '[controls]\nCORRID = { input = "start" }', "an ID must be one of INT32, INT64, UINT32"),
        (
            STATES + '[controls]\nCORRID = { input = "id", false_true = [0, 1] }',
            "controls.CORRID.false_true: unk",
        ),
        (
            STATES + '[controls]\nSTART = { input = "x" }',
            "input 'x' has the shape [N, 2]; a control must have",
        ),
        (START + "}", "controls.START: control inputs are for sequences, but no states are declared"),
        ("[[states]\n", "tiny.toml is not a TOML file: "),
    ],
)
def test_wrong_declaration_is_an_error_that_names_the_file_and_the_key(
    tmp_path: Path, toml: str, error: str
) -> None:
    found = error_of(tmp_path, accumulator(), toml)
    assert found.startswith(str(tmp_path / "tiny.toml"))
    assert error in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("carpool.states", "[", "metadata carpool.states: '[' is not JSON"),
        ("carpool.states", "5", "metadata carpool.states: 5 must be a list of tables"),
        ("carpool.state", "[]", "metadata carpool.state: unknown key; valid are states, constants, controls"),
        (
            "carpool.controls",
            '{"END": {"input": "stop"}}',
            "carpool.controls.END: the file has no input 'stop'",
        ),
    ],
)
def test_wrong_metadata_is_an_error(tmp_path: Path, name: str, text: str, error: str) -> None:
    found = error_of(tmp_path, accumulator({name: text}), None)
    assert found.startswith(str(tmp_path / "tiny.onnx"))
    assert error in found


def test_wrong_declaration_in_code_is_an_error(tmp_path: Path) -> None:
    assert "declared in code: states[0].output: is missing" in error_of(
        tmp_path, accumulator(), None, {"states": [{"input": "sum"}]}
    )


@pytest.mark.parametrize(
    ("content", "toml", "error"),
    [
        (transposed((2, 2), (2, 2)), STATES, "in which nothing varies"),
        (transposed((None, None), (2, "N")), STATES, "in which several sizes vary; write shape = [...]"),
        (transposed((2, "N"), ("N", 2)), STATES, "the same, with the batch at the same place"),
        (scaled([]), None, "input 'by' is a scalar or has no declared shape"),
        (scaled([]), "[constants]\nby = 3\nx = 3", "has no inputs beside those that are declared"),
        (scaled([]), "[constants]\nby = [3]", "constants.by: has the shape [1]; it must be []"),
        (scaled([2, None]), "[constants]\nby = 3", "constants.by: has the shape []; it must be [2, ?]"),
    ],
    ids=range(7),
)
def test_graph_that_does_not_fit_is_an_error(
    tmp_path: Path, content: bytes, toml: str | None, error: str
) -> None:
    assert error in error_of(tmp_path, content, toml)


def test_scalar_input_without_a_declaration_says_where_to_declare_it(tmp_path: Path) -> None:
    assert f"or declare it under [constants] in {tmp_path / 'tiny.toml'}" in error_of(
        tmp_path, scaled([]), None
    )


def test_graph_whose_only_output_is_a_state_is_an_error(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [Value("x", ["N", 2]), Value("sum", ["N", 2])],
        [Value("next", ["N", 2])],
        [Node("Add", ["x", "sum"], ["next"])],
    )
    assert "has no outputs beside those of states" in error_of(tmp_path, graph, STATES)


def test_text_is_no_state(tmp_path: Path) -> None:
    kind = tiny_onnx.STRING
    graph = tiny_onnx.model(
        [Value("x", ["N"]), Value("sum", ["N"], kind)],
        [Value("y", ["N"]), Value("next", ["N"], kind)],
        [Node("Identity", ["x"], ["y"]), Node("Identity", ["sum"], ["next"])],
    )
    assert "of type tensor(string); a state must be numeric" in error_of(tmp_path, graph, STATES)
