"""The ONNX model: a real file compared with magika's own results, and tiny files for all else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog.testing

from carpool.plugins import UnusableError
from carpool.wire.tensors import Array, TensorSpec
from carpool_worker.model_process.configuration import Configuration, Parameter
from carpool_worker.model_process.model import load_configured
from carpool_worker.models.onnx import OnnxModel, model_name
from carpool_worker.models.onnx_signature import DATATYPES
from support import magika_oracle, tiny_onnx
from support.tiny_onnx import Node, Value

pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.usefixtures("onnx_in_one_thread")

COMPLEX = (tiny_onnx.COMPLEX64, tiny_onnx.COMPLEX128)
SENDABLE = sorted({*range(tiny_onnx.FLOAT, tiny_onnx.BFLOAT16 + 1)} - {*COMPLEX})
X = Value("x", ["N", 3])
ROWS = np.array([[1, 2, 3], [-4, 5, 0.5]], np.float32)


def write(folder: Path, content: bytes, name: str = "tiny.onnx") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def loaded(folder: Path, content: bytes) -> OnnxModel:
    model = OnnxModel(write(folder, content))
    model.load("cpu")
    return model


def load_error(folder: Path, content: bytes, kind: type[Exception] = ValueError) -> str:
    """The error of `load` for this file. It contains the file's name, and the model stays unloaded."""
    model = OnnxModel(write(folder, content))
    with pytest.raises(kind) as caught:
        model.load("cpu")
    assert str(model.path) in str(caught.value)
    with pytest.raises(RuntimeError, match="not loaded"):
        model.predict(ROWS)
    return str(caught.value)


# --- the file-type model of the magika wheel ---------------------------------------------------------------


@pytest.fixture(scope="module")
def filetype() -> OnnxModel:
    model = OnnxModel(magika_oracle.model_path())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # beside other tests, several threads wait for each other
        model.load("cpu")
    return model


@pytest.fixture(scope="module")
def contents() -> list[bytes]:
    real = [path.read_bytes() for path in magika_oracle.sample_files()]
    return [*real, *magika_oracle.generated_files().values()]


@pytest.fixture(scope="module")
def singles(filetype: OnnxModel, contents: list[bytes]) -> Array:
    """The scores of each content in a batch of its own."""
    return scores_of(filetype, contents, batch_size=1)


def scores_of(model: OnnxModel, contents: Sequence[bytes], batch_size: int) -> Array:
    rows = np.stack([magika_oracle.features(content) for content in contents])
    return np.concatenate(
        [np.asarray(model.predict(rows[at : at + batch_size])) for at in range(0, len(rows), batch_size)]
    )


def assert_same(scores: Array, expected: Sequence[tuple[str, float]]) -> None:
    got = [magika_oracle.label_of(row) for row in scores]
    assert [label for label, _ in got] == [label for label, _ in expected]
    np.testing.assert_allclose(
        [score for _, score in got], [score for _, score in expected], rtol=0, atol=1e-4
    )


def test_real_models_name_and_tensors_are_read_from_its_file(filetype: OnnxModel) -> None:
    assert filetype.name == magika_oracle.model_path().parent.name
    assert filetype.inputs == (TensorSpec("bytes", "INT32", (2048,)),)
    (scores,) = filetype.outputs
    assert (scores.name, scores.datatype) == ("target_label", "FP32")
    assert scores.shape[0] > 100


def test_real_model_classifies_single_contents_like_magika(singles: Array, contents: list[bytes]) -> None:
    expected = [magika_oracle.answer(content) for content in contents]
    assert len(expected) >= 50 and len({label for label, _ in expected}) >= 15, "the sample is too uniform"
    assert_same(singles, expected)


def test_real_model_classifies_a_batch_like_magika(filetype: OnnxModel) -> None:
    paths = magika_oracle.sample_files()
    scores = scores_of(filetype, [path.read_bytes() for path in paths], batch_size=len(paths))
    assert_same(scores, magika_oracle.answers(paths))


def test_real_model_classifies_generated_files(filetype: OnnxModel) -> None:
    generated = magika_oracle.generated_files()
    scores = scores_of(filetype, list(generated.values()), batch_size=len(generated))
    assert [magika_oracle.label_of(row)[0] for row in scores] == list(generated)


def test_batch_gives_the_same_scores_as_single_items(
    filetype: OnnxModel, contents: list[bytes], singles: Array
) -> None:
    for start, end in pairwise([0, 2, 9, 41, len(contents)]):  # each content is in a batch of one size
        batched, alone = scores_of(filetype, contents[start:end], end - start), singles[start:end]
        np.testing.assert_allclose(batched, alone, rtol=0, atol=magika_oracle.SCORE_TOLERANCE)
        assert (batched.argmax(axis=1) == alone.argmax(axis=1)).all()


def test_scores_do_not_depend_on_the_other_items_of_the_batch(
    filetype: OnnxModel, contents: list[bytes]
) -> None:
    contents = contents[:32]
    scores = scores_of(filetype, contents, batch_size=16)
    # When: each half of a batch is with a half of the other one
    with_others = scores_of(filetype, [*contents[8:], *contents[:8]], batch_size=16)
    np.testing.assert_allclose(scores, np.roll(with_others, 8, axis=0), rtol=0, atol=1e-5)


# --- tensors -----------------------------------------------------------------------------------------------


def test_file_is_not_opened_before_load(tmp_path: Path) -> None:
    model = OnnxModel(str(tmp_path / "later.onnx"))
    assert (model.name, model.inputs, model.outputs, model.max_batch_size) == ("later", (), (), 32)


def test_single_input_and_output_are_arrays(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny_onnx.identity(X))
    assert model.inputs == (TensorSpec("x", "FP32", (3,)),)
    assert model.outputs == (TensorSpec("y", "FP32", (3,)),)
    np.testing.assert_array_equal(model.predict(ROWS), ROWS)
    np.testing.assert_array_equal(model.predict({"x": ROWS}), ROWS)


def test_several_inputs_and_outputs_are_dicts_by_name(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [Value("a", ["N", 3]), Value("b", ["M", 3])],
        [Value("sum", ["N", 3]), Value("product", [None, 3])],
        [Node("Add", ["a", "b"], ["sum"]), Node("Mul", ["a", "b"], ["product"])],
    )
    model = loaded(tmp_path, graph)
    assert [spec.name for spec in (*model.inputs, *model.outputs)] == ["a", "b", "sum", "product"]
    answer = model.predict({"b": ROWS + 1, "a": ROWS})
    assert isinstance(answer, dict)
    np.testing.assert_array_equal(answer["sum"], ROWS + ROWS + 1)
    np.testing.assert_array_equal(answer["product"], ROWS * (ROWS + 1))
    with pytest.raises(ValueError, match="takes the inputs a, b, but got a"):
        model.predict(ROWS)


def test_varying_dimensions_are_minus_one(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny_onnx.identity(Value("x", ["N", "length", 2, None])))
    assert model.inputs[0].shape == model.outputs[0].shape == (-1, 2, -1)
    for length in (1, 5):
        rows = np.ones((4, length, 2, 3), np.float32)
        np.testing.assert_array_equal(model.predict(rows), rows)


@pytest.mark.parametrize("kind", SENDABLE)
def test_every_sendable_type_is_preserved(tmp_path: Path, kind: int) -> None:
    model = loaded(tmp_path, tiny_onnx.identity(Value("x", ["N", 2], kind)))
    datatype = model.inputs[0].datatype
    others = {"FP16": "f2", "FP32": "f4", "FP64": "f8", "BF16": "f4", "BYTES": "str"}
    rows = np.array([[0, 1], [1, 100]]).astype(others.get(datatype, datatype.lower()))
    answer = model.predict(rows)
    assert isinstance(answer, np.ndarray) and answer.dtype.kind == rows.dtype.kind
    np.testing.assert_array_equal(answer, rows)


def test_every_sendable_type_has_a_datatype(tmp_path: Path) -> None:
    models = [loaded(tmp_path, tiny_onnx.identity(Value("x", ["N"], kind))) for kind in SENDABLE]
    assert {model.inputs[0].datatype for model in models} == set(DATATYPES.values())


def test_bfloat16_is_float32_outside_and_rounds_to_even(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [Value("x", ["N", 2], tiny_onnx.BFLOAT16), Value("ids", ["N"], tiny_onnx.INT64)],
        [Value("y", ["N", 2], tiny_onnx.BFLOAT16), Value("same", ["N"], tiny_onnx.INT64)],
        [Node("Identity", ["x"], ["y"]), Node("Identity", ["ids"], ["same"])],
    )
    model = loaded(tmp_path, graph)
    rows = np.array([[1 + 2**-8, 1 + 3 * 2**-8], [-2.5, np.inf]], np.float32)
    answer = model.predict({"x": rows, "ids": np.array([7, -8])[::-1]})
    assert isinstance(answer, dict)
    np.testing.assert_array_equal(answer["y"], np.array([[1, 1 + 2**-6], [-2.5, np.inf]], np.float32))
    assert answer["same"].tolist() == [-8, 7]


def test_strings_are_returned_as_numpy_strings(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny_onnx.identity(Value("x", ["N", 2], tiny_onnx.STRING)))
    assert model.inputs == (TensorSpec("x", "BYTES", (2,), text=True),)
    for dtype in (object, np.str_):
        answer = model.predict(np.array([["", "ünï"], ["c", "a longer one"]], dtype))
        assert isinstance(answer, np.ndarray) and answer.dtype.kind == "U"
        assert answer.tolist() == [["", "ünï"], ["c", "a longer one"]]


def test_unaligned_and_non_contiguous_arrays_are_accepted(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny_onnx.identity(X))
    unaligned = np.frombuffer(b"!" + ROWS.tobytes(), np.float32, offset=1).reshape(ROWS.shape)
    for rows in (unaligned, ROWS[::-1], np.asfortranarray(ROWS)):
        np.testing.assert_array_equal(model.predict(rows), rows)


def test_dynamic_quantization_logs_a_warning_because_results_depend_on_the_batch(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [X],
        [Value("y", ["N", 3])],
        [
            Node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            Node("DequantizeLinear", ["q", "scale", "zero"], ["y"]),
        ],
    )
    with structlog.testing.capture_logs() as logs:
        model = loaded(tmp_path, graph)
    events = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert events == ["results depend on the other requests in the batch"]
    rows = np.array([[0.1, 0.2, 0.3], [0, 500, 1000]], np.float32)
    together, alone = np.asarray(model.predict(rows)), np.asarray(model.predict(rows[:1]))
    assert not np.allclose(together[:1], alone)


# --- files that load rejects -------------------------------------------------------------------------------


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    for path in (tmp_path / "none.onnx", tmp_path):
        with pytest.raises(ValueError, match="does not exist") as caught:
            OnnxModel(path).load("cpu")
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"garbage\n", b"\x00" * 64, tiny_onnx.identity(X)[:-20]])
def test_file_that_is_not_onnx_is_rejected(tmp_path: Path, content: bytes) -> None:
    assert "is not an ONNX file, or is incomplete" in load_error(tmp_path, content)


def test_unknown_operator_is_rejected(tmp_path: Path) -> None:
    graph = tiny_onnx.model([X], [Value("y", ["N", 3])], [Node("NoSuchOperator", ["x"], ["y"])])
    assert "NoSuchOperator" in load_error(tmp_path, graph, RuntimeError)


def test_missing_onnxruntime_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "pip install 'PATH[onnx]'" in load_error(tmp_path, tiny_onnx.identity(X), RuntimeError)


def test_batch_dimension_fixed_at_one_is_rejected(tmp_path: Path) -> None:
    error = load_error(tmp_path, tiny_onnx.identity(Value("image", [1, 3])))
    assert "cannot be batched" in error and "'image' is fixed at 1" in error
    assert f"execute each request alone with max_batch_size = 1 in {tmp_path}" in error


def test_settings_from_outside_replace_those_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "tiny.onnx"
    path.write_bytes(tiny_onnx.identity(Value("image", [1, 3])))
    path.with_suffix(".toml").write_text("max_batch_size = 8\nresult_ttl_ms = 5000\n")
    model = load_configured(f"onnx:{path}", "cpu", Configuration(settings={"max_batch_size": "1"}))
    assert (model.settings.max_batch_size, model.settings.result_ttl_ms) == (1, 5000)
    with pytest.raises(UnusableError, match="sr cannot be given: an ONNX file takes no parameters"):
        load_configured(f"onnx:{path}", "cpu", Configuration(parameters={"sr": Parameter("1", "", "")}))


@pytest.mark.parametrize("first", [1, "N", None])
def test_batch_dimension_fixed_at_one_is_served_one_request_at_a_time(
    tmp_path: Path, first: int | str | None
) -> None:
    graph = tiny_onnx.model(
        [Value("image", [1, 3]), Value("other", [first, 3])],
        [Value("y", [1, 3])],
        [Node("Add", ["image", "other"], ["y"])],
        {"carpool.max_batch_size": "1"},
    )
    model = loaded(tmp_path, graph)
    assert model.max_batch_size == 1
    assert [spec.shape for spec in (*model.inputs, *model.outputs)] == [(3,)] * 3
    row = np.array([[1, 2, 3]], np.float32)
    np.testing.assert_array_equal(model.predict({"image": row, "other": row}), row * 2)


def test_batch_dimension_fixed_at_another_size_is_rejected_for_one_request_at_a_time(tmp_path: Path) -> None:
    graph = tiny_onnx.identity(Value("x", [8, 3]), {"carpool.max_batch_size": "1"})
    assert "input 'x' is fixed at 8" in load_error(tmp_path, graph)


def test_batch_dimension_of_fixed_size_is_rejected(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [Value("free", ["N", 3]), Value("fixed", [8, 3])],
        [Value("y", ["N", 3])],
        [Node("Add", ["free", "fixed"], ["y"])],
    )
    assert "input 'fixed' is fixed at 8" in load_error(tmp_path, graph)


@pytest.mark.parametrize("shape", [[], None])
def test_input_without_a_batch_dimension_is_rejected(tmp_path: Path, shape: list[int] | None) -> None:
    assert "input 'x' is a scalar or has no declared shape" in load_error(
        tmp_path, tiny_onnx.identity(Value("x", shape))
    )


def test_file_without_inputs_is_rejected(tmp_path: Path) -> None:
    y = Value("y", [], tiny_onnx.INT64)
    graph = tiny_onnx.model([], [y], [Node("Constant", [], ["y"], {"value_int": 1})])
    assert "has no inputs" in load_error(tmp_path, graph)


@pytest.mark.parametrize("kind", COMPLEX)
def test_complex_numbers_are_rejected(tmp_path: Path, kind: int) -> None:
    assert "complex" in load_error(tmp_path, tiny_onnx.identity(Value("x", ["N", 2], kind)), RuntimeError)


def test_sequence_output_is_rejected(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [X], [Value("all", ["N", 3], sequence=True)], [Node("SequenceConstruct", ["x"], ["all"])]
    )
    assert "output 'all' is of type seq(tensor(float))" in load_error(tmp_path, graph)


@pytest.mark.parametrize("keep", [0, 1])
def test_single_output_for_the_whole_batch_is_rejected(tmp_path: Path, keep: int) -> None:
    sum_ = Node("ReduceSum", ["x"], ["total"], {"keepdims": keep})
    error = load_error(tmp_path, tiny_onnx.model([X], [Value("total", [1, 1] if keep else [])], [sum_]))
    assert "output 'total'" in error


def test_output_with_another_first_dimension_is_rejected(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [Value("x", ["N", "time"])], [Value("y", ["time", "N"])], [Node("Transpose", ["x"], ["y"])]
    )
    assert "output 'y' has shape [5, 4] for a batch of 4" in load_error(tmp_path, graph)


def test_output_with_a_wrong_number_of_rows_is_an_error(tmp_path: Path) -> None:
    graph = tiny_onnx.model(
        [X], [Value("twice", ["M", 3])], [Node("Concat", ["x", "x"], ["twice"], {"axis": 0})]
    )
    assert "output 'twice' has shape [8, 3] for a batch of 4" in load_error(tmp_path, graph)


# --- settings ----------------------------------------------------------------------------------------------


def test_max_batch_size_is_read_from_the_files_metadata(tmp_path: Path) -> None:
    assert loaded(tmp_path, tiny_onnx.identity(X, {"carpool.max_batch_size": "7"})).max_batch_size == 7
    assert loaded(tmp_path, tiny_onnx.identity(X, {"author": "A. N. Other"})).max_batch_size == 32
    for invalid in ("0", "many", "-1", ""):
        error = load_error(tmp_path, tiny_onnx.identity(X, {"carpool.max_batch_size": invalid}))
        assert "carpool.max_batch_size" in error


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "CPU", ""])
def test_invalid_device_is_rejected(tmp_path: Path, device: str) -> None:
    with pytest.raises(ValueError, match="must be cpu or cuda:N"):
        OnnxModel(write(tmp_path, tiny_onnx.identity(X))).load(device)


def test_without_cuda_it_runs_on_the_cpu_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    model = OnnxModel(write(tmp_path, tiny_onnx.identity(X)))
    with structlog.testing.capture_logs() as logs:
        model.load("cuda:0")
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(entry["event"], entry["device"]) for entry in warnings] == [("running on the CPU", "cuda:0")]
    np.testing.assert_array_equal(model.predict(ROWS), ROWS)


def test_cuda_provider_gets_the_device_and_the_heuristic_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[Any] = []
    monkeypatch.setattr(
        "onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    session = sys.modules["onnxruntime"].InferenceSession

    def open_on_cpu(path: str, options: Any, providers: list[Any]) -> Any:
        requested.extend(providers)
        return session(path, options, providers=["CPUExecutionProvider"])

    monkeypatch.setattr("onnxruntime.InferenceSession", open_on_cpu)
    OnnxModel(write(tmp_path, tiny_onnx.identity(X))).load("cuda:3")
    options = {"device_id": 3, "cudnn_conv_algo_search": "HEURISTIC"}
    assert requested == [("CUDAExecutionProvider", options), "CPUExecutionProvider"]


@pytest.mark.parametrize(("variable", "threads"), [(None, 0), ("", 0), ("3", 3), ("2,4", 2), ("all", 0)])
def test_thread_count_is_read_from_omp_num_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None, threads: int
) -> None:
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    model = loaded(tmp_path, tiny_onnx.identity(X))
    assert model._session.get_session_options().intra_op_num_threads == threads


def test_model_can_be_loaded_again_after_unload(tmp_path: Path) -> None:
    model = loaded(tmp_path, tiny_onnx.identity(X))
    model.unload()
    with pytest.raises(RuntimeError, match="not loaded"):
        model.predict(ROWS)
    model.load("cpu")
    np.testing.assert_array_equal(model.predict(ROWS), ROWS)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("resnet50.onnx", "resnet50"),
        ("yolo v8 (small).onnx", "yolo-v8-small"),
        ("_private.onnx", "private"),
        ("é.onnx", "model"),
        ("x" * 200 + ".onnx", "x" * 128),
        ("bert/model.onnx", "bert"),
        ("bert/onnx/Model.onnx", "bert"),
        ("bert/2/model.onnx", "bert"),
        ("a folder/with spaces/model.onnx", "model"),
    ],
)
def test_model_name_of_a_file(path: str, name: str) -> None:
    assert model_name(Path(path)) == name
