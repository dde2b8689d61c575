"""Outputs of ONNX files: which have the batch first, which are the result, maps, and wrong declarations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing

from carpool.wire.bodies import decode_body
from carpool.wire.tensors import TensorSpec
from carpool_worker.models.onnx import OnnxModel
from support import tiny_onnx
from support.executions import codec_of_model, finish, prepared, request_of
from support.tiny_onnx import BOOL, INT64, ML, STRING, Node, Value

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("onnx_in_one_thread")

X = Value("x", ["N", 3])
Y = Value("y", ["N", 3])
ROWS = np.array([[1, 2, 3], [-4, 5, 0.5]], np.float32)
SCALAR = Node("ReduceSum", ["x"], ["total"], {"keepdims": 0})
SAME = Node("Identity", ["x"], ["y"])
# The shape of x in a form that onnxruntime does not look through: what has it, has no known sizes.
HIDDEN_SHAPE = (
    Node("Shape", ["x"], ["sizes"]),
    Node("Cast", ["sizes"], ["floats"], {"to": tiny_onnx.FLOAT}),
    Node("Cast", ["floats"], ["hidden"], {"to": INT64}),
)
HIDDEN_RANK = (
    *HIDDEN_SHAPE,
    Node("Cast", ["hidden"], ["all"], {"to": BOOL}),
    Node("Compress", ["hidden", "all"], ["unknown"]),
)


def integers(name: str, *values: int) -> Node:
    return Node("Constant", [], [name], {"value_ints": values})


def graph(outputs: Sequence[Value], *nodes: Node, x: Value = X) -> bytes:
    return tiny_onnx.model([x], outputs, nodes)


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


def error_of(folder: Path, content: bytes, toml: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        loaded(folder, content, toml)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def logged(folder: Path, content: bytes, level: str = "warning", toml: str | None = None) -> list[str]:
    with structlog.testing.capture_logs() as logs:
        loaded(folder, content, toml)
    return [entry["event"] for entry in logs if entry["log_level"] == level]


# --- which have the batch first ----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [["M", None], [None, None], None, [3, None]])
@pytest.mark.parametrize("x", [["N", 3], ["N", "T"], [None, None]])
def test_transposed_output_is_refused_whatever_is_declared(
    tmp_path: Path, x: list[int | str | None], shape: list[int | str | None] | None
) -> None:
    """With three requests it has three rows, so that each would get a third of all the others'."""
    if shape == [3, None] and x != ["N", 3]:
        shape = [None, None]
    node = Node("Transpose", ["x"], ["y"])
    error = error_of(tmp_path, graph([Value("y", shape)], node, x=Value("x", x)))
    assert f"output 'y' has shape [{3 if 3 in x else 5}, 4] for a batch of 4" in error
    assert "export the model with a row for each request there" in error
    assert "outputs =" not in error  # because nothing would be left
    assert "max_batch_size" not in error  # because it is wrong for a single request, too


def test_outputs_of_which_one_has_not_the_batch_first_may_be_served_without_it(tmp_path: Path) -> None:
    content = graph([Y, Value("total", [])], SAME, SCALAR)
    error = error_of(tmp_path, content)
    assert "output 'total' has shape [] for a batch of 4, so its first dimension is not the batch" in error
    assert f'leave it out with outputs = ["y"] in {tmp_path / "tiny.toml"}' in error
    model = loaded(tmp_path, content, 'outputs = ["y"]')
    assert model.outputs == (TensorSpec("y", "FP32", (3,)),)
    np.testing.assert_array_equal(model.predict(ROWS), ROWS)


def reversed_rows(kind: int) -> bytes:
    minus_all = integers("end", -(2**62))
    nodes = [integers("start", -1), minus_all, integers("axis", 0), integers("step", -1)]
    slices = Node("Slice", ["x", "start", "end", "axis", "step"], ["y"])
    return graph([Value("y", ["N", 3], kind)], *nodes, slices, x=Value("x", ["N", 3], kind))


@pytest.mark.parametrize("kind", [tiny_onnx.FLOAT, INT64, STRING, BOOL])
@pytest.mark.parametrize("batch_max", [2, 3, 4, 32])
def test_rows_in_another_order_are_refused(tmp_path: Path, kind: int, batch_max: int) -> None:
    error = error_of(tmp_path, reversed_rows(kind), f"max_batch_size = {batch_max}")
    assert "output 'y' has rows that belong to other requests of the batch" in error


def test_order_does_not_matter_for_one_request_at_a_time(tmp_path: Path) -> None:
    assert logged(tmp_path, reversed_rows(INT64), toml="max_batch_size = 1") == []


@pytest.mark.parametrize(
    "node",
    [
        Node("Softmax", ["x"], ["y"], {"axis": 0}),
        Node("CumSum", ["x", "axis"], ["y"]),
    ],
    ids=lambda node: node.op,
)
def test_results_that_depend_on_the_batch_are_told(tmp_path: Path, node: Node) -> None:
    content = graph([Y], Node("Constant", [], ["axis"], {"value_int": 0}), node)
    assert logged(tmp_path, content) == ["results depend on the other requests in the batch"]


def test_chance_is_not_taken_for_dependence_on_the_batch(tmp_path: Path) -> None:
    assert logged(tmp_path, graph([Y], Node("RandomNormalLike", ["x"], ["y"]))) == []


def test_trying_out_is_logged_at_debug(tmp_path: Path) -> None:
    assert logged(tmp_path, graph([Y], SAME), "debug") == ["tried out which outputs have the batch first"]
    assert logged(tmp_path, graph([Y], SAME)) == []


def test_output_of_a_model_with_states_and_controls_is_tried_out_too(tmp_path: Path) -> None:
    content = tiny_onnx.model(
        [X, Value("sum", ["N", 3]), Value("id", ["N"], INT64)],
        [Value("y", ["M", None]), Value("next", ["N", 3]), Value("of", ["N"], INT64)],
        [
            Node("Add", ["x", "sum"], ["next"]),
            Node("Transpose", ["next"], ["y"]),
            Node("Identity", ["id"], ["of"]),
        ],
    )
    toml = '[[states]]\ninput = "sum"\noutput = "next"\n[controls]\nCORRID = { input = "id" }'
    assert "output 'y' has shape [3, 4] for a batch of 4" in error_of(tmp_path, content, toml)


def test_texts_are_tried_out(tmp_path: Path) -> None:
    x, node = Value("x", ["N", 3], STRING), Node("Transpose", ["x"], ["y"])
    assert "output 'y' has shape [3, 4]" in error_of(
        tmp_path, graph([Value("y", ["M", None], STRING)], node, x=x)
    )


def picky(output: Value, *nodes: Node) -> bytes:
    """A graph that takes only zeros: they are indexes into a table with one element."""
    table = (integers("table", 7), Node("Gather", ["table", "x"], ["found"]))
    return graph([output], *table, *nodes, x=Value("x", ["N", 3], INT64))


def test_graph_that_raises_for_what_is_tried_is_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = loaded(tmp_path, picky(Value("y", ["N", 3], INT64), Node("Identity", ["found"], ["y"])))
    assert model.outputs == (TensorSpec("y", "INT64", (-1,)),)  # what was not seen may be otherwise
    assert np.asarray(model.predict(np.zeros((2, 3), np.int64))).tolist() == [[7] * 3] * 2
    assert capfd.readouterr().err == ""


def test_output_that_is_not_tried_out_is_counted_for_each_batch(tmp_path: Path) -> None:
    model = loaded(
        tmp_path, picky(Value("y", ["M", 3], INT64), Node("Concat", ["found"] * 2, ["y"], {"axis": 0}))
    )
    with pytest.raises(RuntimeError, match=r"output 'y' has shape \[4, 3\] for a batch of 2; its first dim"):
        model.predict(np.zeros((2, 3), np.int64))


def test_scalar_that_cannot_be_tried_out_is_refused(tmp_path: Path) -> None:
    content = picky(Value("y", [], INT64), Node("ReduceSum", ["found"], ["y"], {"keepdims": 0}))
    error = error_of(tmp_path, content)
    assert "output 'y' is a scalar or has no declared shape, and could not be tried out" in error


def test_integers_are_tried_out_with_ones_if_others_are_out_of_range(tmp_path: Path) -> None:
    content = graph(
        [Value("y", ["M", None], INT64)],
        integers("table", 7, 8),
        Node("Gather", ["table", "x"], ["found"]),
        Node("Transpose", ["found"], ["y"]),
        x=Value("x", ["N", 3], INT64),
    )
    assert "output 'y' has shape [3, 4] for a batch of 4" in error_of(tmp_path, content)


def test_images_are_tried_out_with_a_size_that_can_be_halved(tmp_path: Path) -> None:
    """A convolution with a kernel of 9 takes no images of 5 x 5."""
    pool = Node("MaxPool", ["x"], ["small"], {"kernel_shape": [9, 9]})
    content = graph(
        [Value("y", [None] * 4)], pool, Node("Transpose", ["small"], ["y"]), x=Value("x", ["N", 2, "h", "w"])
    )
    assert "output 'y' has shape [88, 88, 2, 4] for a batch of 4" in error_of(tmp_path, content)


@pytest.mark.parametrize("known", [False, True])
def test_graph_that_takes_one_request_at_a_time_is_told(tmp_path: Path, known: bool) -> None:
    """`known`: onnxruntime sees it before it executes the graph."""
    shape = Node("Min", ["one"] if known else ["one", "hidden"], ["shape"])
    reshape = Node("Reshape", ["x", "one" if known else "shape"], ["y"])
    content = graph([Y], integers("one", 1, 3), *HIDDEN_SHAPE, shape, reshape)
    if known:
        error = error_of(tmp_path, content)
        assert "output 'y' has 1 as its first dimension" in error and "could not be tried out (" in error
        assert error.endswith(
            f"execute each request alone with max_batch_size = 1 in {tmp_path / 'tiny.toml'}"
        )
        assert logged(tmp_path, content, toml="max_batch_size = 1") == []
        return
    assert logged(tmp_path, content) == ["each request is executed alone"]
    assert logged(tmp_path, content, toml="max_batch_size = 1") == []


# --- what is declared, and what comes ----------------------------------------------------------------------


def results(model: OnnxModel, *bodies: Any) -> list[Any]:
    """The results of these requests in one batch, as a producer of JSON reads them."""
    codec, _ = codec_of_model(model)
    found = finish(codec, prepared(codec, *map(request_of, bodies)), model.predict)
    return [
        result.detail if result.body is None else decode_body(result.content_type, result.body)
        for result in found
    ]


@pytest.mark.parametrize("shape", [["N", 3], ["N", 7], [1, 3], [1, "M"], [5, 7], ["M", None]])
def test_declared_sizes_that_are_wrong_do_not_matter(tmp_path: Path, shape: list[int | str | None]) -> None:
    content = graph([Value("y", shape)], *HIDDEN_SHAPE, Node("Reshape", ["x", "hidden"], ["y"]))
    model = loaded(tmp_path, content)
    assert model.outputs == (TensorSpec("y", "FP32", (3 if 3 in shape else -1,)),)
    for count in (1, 2, 5, 7):
        rows = np.arange(count * 3, dtype=np.float32).reshape(-1, 3)
        assert [np.asarray(found).tolist() for found in results(model, *rows.tolist())] == rows.tolist()


@pytest.mark.parametrize("shape", [None, ["N"], ["N", 3, 1]])
def test_declared_number_of_dimensions_that_is_wrong_does_not_matter(
    tmp_path: Path, shape: list[int | str | None] | None
) -> None:
    content = graph([Value("y", shape)], *HIDDEN_RANK, Node("Reshape", ["x", "unknown"], ["y"]))
    model = loaded(tmp_path, content)
    assert model.outputs == (TensorSpec("y", "FP32", (-1,)),)
    assert [np.asarray(found).tolist() for found in results(model, *ROWS.tolist())] == ROWS.tolist()


# The numbers above the mean of their column: as many rows as there are.
COUNTED = (
    Node("Identity", ["x"], ["same"]),
    Node("Cast", ["same"], ["is"], {"to": BOOL}),
    Node("NonZero", ["is"], ["places"]),
    Node("Transpose", ["places"], ["y"]),
)


def test_number_of_rows_that_depends_on_the_numbers_is_refused(tmp_path: Path) -> None:
    """Made-up requests have one number that is not 0 each: as many rows as requests, by chance."""
    x, outputs = Value("x", ["N", 1]), [Value("y", ["K", 2], INT64)]
    content = graph(outputs, *COUNTED, x=x)
    error = error_of(tmp_path, content)
    assert "output 'y' has K as its first dimension" in error and "NonZero" in error
    assert 'outputs = ["y"]' in error and "max_batch_size = 1" in error
    assert loaded(tmp_path, content, 'outputs = ["y"]').outputs
    assert loaded(tmp_path, content, "max_batch_size = 1").outputs
    assert loaded(tmp_path, graph([Value("y", ["N", 2], INT64)], *COUNTED, x=x), "").outputs


# --- which are the result ----------------------------------------------------------------------------------


def test_outputs_are_chosen_in_the_order_of_their_names(tmp_path: Path) -> None:
    outputs = [Value(name, ["N", 3]) for name in ("a", "b", "c")]
    content = graph(
        outputs, *(Node(op, ["x"], [name]) for op, name in (("Neg", "a"), ("Abs", "b"), ("Relu", "c")))
    )
    assert [spec.name for spec in loaded(tmp_path, content).outputs] == ["a", "b", "c"]
    model = loaded(tmp_path, content, declared={"outputs": ["c", "a"]})
    assert [spec.name for spec in model.outputs] == ["c", "a"]
    answer = model.predict(ROWS)
    assert isinstance(answer, dict) and list(answer) == ["c", "a"]
    np.testing.assert_array_equal(answer["a"], -ROWS)


@pytest.mark.parametrize(
    ("toml", "error"),
    [
        ('outputs = ["z"]', "tiny.toml: outputs: the file has no output 'z'; it has y, next"),
        ('outputs = ["y", "next"]', "tiny.toml: outputs: output 'next' is the new state of "),
        ('outputs = ["y", "y"]', "tiny.toml: outputs: ['y', 'y'] has a name twice"),
        ("outputs = []", "tiny.toml: outputs: [] must be a list of names of outputs, such as"),
        ('outputs = "y"', "tiny.toml: outputs: 'y' must be a list of names of outputs, such as"),
        ("outputs = [1]", "tiny.toml: outputs: [1] must be a list of names of outputs, such as"),
    ],
)
def test_wrong_choice_of_outputs_is_an_error(tmp_path: Path, toml: str, error: str) -> None:
    content = tiny_onnx.model(
        [X, Value("sum", ["N", 3])],
        [Y, Value("next", ["N", 3])],
        [Node("Add", ["x", "sum"], ["next"]), SAME],
    )
    assert error in error_of(tmp_path, content, toml + '\n[[states]]\ninput = "sum"\noutput = "next"')


def test_output_of_a_type_that_cannot_be_sent_may_be_left_out(tmp_path: Path) -> None:
    content = graph(
        [Y, Value("all", ["N", 3], sequence=True)], SAME, Node("SequenceConstruct", ["x"], ["all"])
    )
    assert "write outputs = [...] with the names of the others in" in error_of(tmp_path, content)
    np.testing.assert_array_equal(loaded(tmp_path, content, 'outputs = ["y"]').predict(ROWS), ROWS)


# --- maps --------------------------------------------------------------------------------------------------


def classifier(labels: Sequence[int] | Sequence[str]) -> bytes:
    """What skl2onnx makes of a classifier by default: a label, and a map from all labels to probabilities."""
    is_text = isinstance(labels[0], str)
    attributes = {"classlabels_strings" if is_text else "classlabels_int64s": labels}
    return graph(
        [Value("label", ["N"], INT64), Value("scores", [], keys=STRING if is_text else INT64)],
        Node("ArgMax", ["x"], ["label"], {"axis": 1, "keepdims": 0}),
        Node("ZipMap", ["x"], ["scores"], attributes, ML),
    )


@pytest.mark.parametrize("labels", [[0, 1, 2], ["ant", "bee", "cat"]])
def test_maps_are_results(tmp_path: Path, labels: list[int] | list[str]) -> None:
    model = loaded(tmp_path, classifier(labels))
    assert model.outputs == ()
    expected = [dict(zip(labels, row.tolist(), strict=True)) for row in ROWS]
    assert model.predict(ROWS) == [{"label": 2, "scores": expected[0]}, {"label": 1, "scores": expected[1]}]
    of_json = [{str(label): value for label, value in scores.items()} for scores in expected]
    assert results(model, *ROWS.tolist()) == [
        {"label": 2, "scores": of_json[0]},
        {"label": 1, "scores": of_json[1]},
    ]
    assert results(model, ROWS[0].tolist()) == [{"label": 2, "scores": of_json[0]}]


def test_maps_may_be_the_whole_result_or_no_part_of_it(tmp_path: Path) -> None:
    only_maps = loaded(tmp_path, classifier([3, 4, 5]), 'outputs = ["scores"]')
    assert only_maps.predict(ROWS)[0] == {3: 1.0, 4: 2.0, 5: 3.0}
    assert results(only_maps, ROWS[0].tolist()) == [{"3": 1.0, "4": 2.0, "5": 3.0}]
    only_labels = loaded(tmp_path, classifier([3, 4, 5]), 'outputs = ["label"]')
    assert only_labels.outputs == (TensorSpec("label", "INT64", ()),)
    assert np.asarray(only_labels.predict(ROWS)).tolist() == [2, 1]


def test_maps_that_are_not_one_for_each_request_are_refused(tmp_path: Path) -> None:
    content = graph(
        [Y, Value("scores", [], keys=INT64)],
        SAME,
        Node("Concat", ["x", "x"], ["twice"], {"axis": 0}),
        Node("ZipMap", ["twice"], ["scores"], {"classlabels_int64s": [0, 1, 2]}, ML),
    )
    error = error_of(tmp_path, content)
    assert "output 'scores' has 8 maps for a batch of 4" in error and 'with outputs = ["y"] in' in error
