"""Models of a repository of Triton's in their process: what they import, get and may return."""

from __future__ import annotations

import asyncio
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from carpool.errors import InternalError, UnimplementedError
from carpool.plugins import UnusableError
from carpool_worker.model_process.loaded import LoadedModel, RequestInfo
from carpool_worker.model_process.model import LoadError, SteppingModel, load_configured
from carpool_worker.models.triton import backend_utils
from carpool_worker.repository.repository import Repository
from support import tiny_onnx
from support.tiny_onnx import Node, Value

TENSORS = """
    input { name: "x" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
"""
PYTHON = f'backend: "python" max_batch_size: 4 {TENSORS}'
HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n"
X = np.array([[1, 2], [3, 4]], np.float32)

Load = Callable[..., Any]


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    """What a model process has imported is gone with it."""
    before = dict(sys.modules)
    yield
    for name in sys.modules.keys() - before.keys():
        if name in ("model", "triton_python_backend_utils"):
            del sys.modules[name]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes an entry, and loads it as a model process does."""

    def load(
        config: str,
        content: str | bytes,
        files: Mapping[str, bytes] | None = None,
        parameters: Mapping[str, str] | None = None,
    ) -> Any:
        folder = tmp_path / "m"
        (folder / "1").mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        if isinstance(content, bytes):
            (folder / "1" / "model.onnx").write_bytes(content)
        else:
            (folder / "1" / "model.py").write_text(HEAD + textwrap.dedent(content))
        for name, data in (files or {}).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        served = Repository(tmp_path).served_model("m", None, parameters or {})
        return load_configured(served.location, "cpu", served.configuration)

    return load


def run(model: LoadedModel, batch: Any, *infos: RequestInfo) -> Any:
    rows = len(next(iter(batch.values())) if isinstance(batch, dict) else batch)
    return model.run(batch, infos or [RequestInfo(f"id-{row}", "", {}) for row in range(rows)])


def returning(expression: str, setup: str = "") -> str:
    """A model whose `execute` returns this for `requests`, and sees `x`, the array of a request `r`."""
    return f"""
        class TritonPythonModel:
            def execute(self, requests):
                y = lambda r, n=1: pb_utils.InferenceResponse([pb_utils.Tensor("y", n * x(r))])
                x = lambda r: pb_utils.get_input_tensor_by_name(r, "x").as_numpy()
                {setup}
                return {expression}
    """


# --- what a model returns -----------------------------------------------------------------------------------


def test_responses_belong_to_requests_by_their_order(load: Load) -> None:
    model = load(PYTHON, returning("[y(r, n) for n, r in enumerate(requests)]"))
    np.testing.assert_array_equal(run(model, X), [[0, 0], [3, 4]])


def test_an_error_of_a_response_fails_its_request_alone(load: Load) -> None:
    error = "pb_utils.InferenceResponse(error=pb_utils.TritonError('no', pb_utils.TritonError.UNSUPPORTED))"
    model = load(PYTHON, returning(f"[{error}, y(requests[1])]"))
    failed, good = run(model, X)
    assert isinstance(failed, UnimplementedError) and failed.detail == "no"
    np.testing.assert_array_equal(good, [3, 4])


@pytest.mark.parametrize(
    ("expression", "setup", "sentence"),
    [
        ("[]", "", "the model returned 0, and must return 2 responses"),
        ("7", "", "the model returned a int, and must return 2 responses"),
        (
            "[y(r) for r in requests[:1]] * 1 + [None]",
            "",
            "the model returned a NoneType in place of an InferenceResponse",
        ),
        ("None", "", "the model returned nothing, and did not ask for a response sender of each request"),
        (
            "None",
            "[r.get_response_sender().send(flags=1) for r in requests]",
            "the model sent 0 responses to a request, and must send one; others need "
            "model_transaction_policy { decoupled: true }",
        ),
    ],
)
def test_there_must_be_a_response_to_each_request(
    load: Load, expression: str, setup: str, sentence: str
) -> None:
    model = load(PYTHON, returning(expression, setup))
    with pytest.raises(InternalError) as caught:
        run(model, X)
    assert caught.value.detail == sentence


@pytest.mark.parametrize(
    ("tensors", "sentence"),
    [
        ("", "the model's response has the outputs none, and the configuration y"),
        ("pb_utils.Tensor('z', x(r))", "the model's response has the outputs z, and the configuration y"),
        ("pb_utils.Tensor('y', x(r)[0])", "output 'y' has the shape [2], and must begin with 1, the batch"),
    ],
)
def test_a_response_has_the_declared_outputs(load: Load, tensors: str, sentence: str) -> None:
    model = load(PYTHON, returning(f"[pb_utils.InferenceResponse([{tensors}]) for r in requests]"))
    results = run(model, X)
    assert [one.detail for one in results] == [sentence] * 2


def test_a_response_may_be_sent_by_a_sender(load: Load) -> None:
    flag = "pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL"
    setup = f"[r.get_response_sender().send(y(r, 5), {flag}) for r in requests]"
    model = load(PYTHON, returning("None", setup))
    np.testing.assert_array_equal(run(model, X), 5 * X)


def test_an_async_model_executes_several_batches(load: Load) -> None:
    source = returning("[y(r, 2) for r in requests]").replace("def execute", "async def execute")
    model = load(PYTHON, source)
    assert model.is_async
    np.testing.assert_array_equal(asyncio.run(run(model, X)), 2 * X)


# --- what a model gets --------------------------------------------------------------------------------------


def test_a_request_tells_what_is_known_of_it(load: Load) -> None:
    source = """
        import json
        class TritonPythonModel:
            def execute(self, requests):
                return [self.response(r) for r in requests]
            def response(self, r):
                (x,) = r.inputs()
                known = [r.request_id(), r.correlation_id(), r.flags(), r.timeout() > 10**6, r.is_cancelled()]
                known += [json.loads(r.parameters()), r.requested_output_names(), x.name(), x.shape()]
                known += [x.triton_dtype(), x.is_cpu(), pb_utils.triton_to_numpy_type(11) is np.float32]
                text = np.array([json.dumps(known).encode()], object)
                return pb_utils.InferenceResponse([pb_utils.Tensor("y", text)])
    """
    config = 'backend: "python" input { name: "x" data_type: TYPE_FP32 dims: 2 } ' + (
        'output { name: "y" data_type: TYPE_STRING dims: 1 }'
    )
    model = load(config, source)
    info = RequestInfo("a", "", {"color": b"red"}, "42", sequence_start=True, deadline_s=1e11)
    (known,) = run(model, X[:1], info)
    assert known[0] == (b'["a", 42, 1, true, false, {"color": "red"}, ["y"], "x", [2], 11, true, true]')


def test_the_configuration_is_completed_by_the_model(load: Load) -> None:
    source = """
        class TritonPythonModel:
            @staticmethod
            def auto_complete_config(config):
                config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [2]})
                config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [2]})
                config.set_max_batch_size(16)
                config.set_dynamic_batching()
                return config
            def execute(self, requests):
                tensors = [pb_utils.Tensor("y", r.inputs()[0].as_numpy()) for r in requests]
                return [pb_utils.InferenceResponse([tensor]) for tensor in tensors]
    """
    model = load("", source)
    assert model.settings.max_batch_size == 16
    np.testing.assert_array_equal(run(model, X), X)


def test_tensors_are_exchanged_with_other_frameworks(load: Load) -> None:
    expression = (
        "[pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack('y', pb_utils.Tensor('x', 2 * "
        "x(r)).to_dlpack())]), pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack('y', 3 * "
        "x(requests[1]))])]"
    ).replace("x(r)", "x(requests[0])")
    model = load(PYTHON, returning(expression))
    np.testing.assert_array_equal(run(model, X), [[2, 4], [9, 12]])


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (
            "pb_utils.MetricFamily",
            "triton_python_backend_utils.MetricFamily has no counterpart: use `from carpool import metrics`, "
            "as docs/models.md says",
        ),
        (
            "pb_utils.anything",
            "triton_python_backend_utils.anything has no counterpart: docs/repository.md lists what there is",
        ),
        (
            "pb_utils.InferenceRequest(model_name='o', inputs=[], requested_output_names=[], flags=1)",
            "InferenceRequest: flags has no counterpart in a call of another model; leave it out",
        ),
        (
            "requests[0].set_release_flags(1)",
            "InferenceRequest.set_release_flags has no counterpart: write a decoupled model, or one that "
            "steps (docs/models.md)",
        ),
    ],
)
def test_what_is_not_there_says_what_to_do(load: Load, use: str, sentence: str) -> None:
    model = load(PYTHON, returning(f"[{use}]"))
    with pytest.raises(AttributeError) as caught:
        run(model, X)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (
            "",
            "b cannot be given: m takes those of its config.pbtxt, which has none; add them there with their "
            'defaults, as in parameters { key: "a" value { string_value: "b" } }',
        ),
        (
            'parameters { key: "a" value { string_value: "1" } }',
            "there is no parameter 'b' (--param). m takes a: str = '1'",
        ),
    ],
)
def test_parameters_are_those_of_the_configuration(load: Load, config: str, sentence: str) -> None:
    with pytest.raises(UnusableError) as caught:
        load(PYTHON + config, returning("[]"), parameters={"b": "2"})
    assert str(caught.value) == sentence


def test_the_module_is_known_only_where_such_a_model_is(load: Load) -> None:
    assert "triton_python_backend_utils" not in sys.modules
    load(PYTHON, returning("[y(r) for r in requests]"))
    assert sys.modules["triton_python_backend_utils"] is backend_utils


def test_calls_are_made_within_execute_and_have_one_response() -> None:
    request = backend_utils.InferenceRequest(model_name="m", inputs=[], requested_output_names=[])
    with pytest.raises(AttributeError, match="exec has no counterpart here: it is called in `execute`"):
        request.exec()
    with pytest.raises(AttributeError, match="without it, all responses come as one"):
        request.exec(decoupled=True)


# --- loading ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "source", "sentence"),
    [
        (
            'backend: "python"',
            returning("[]"),
            "input: there is none; declare all inputs there, or in auto_complete_config of TritonPythonModel",
        ),
        (PYTHON, "class Other: ...", "has no 'TritonPythonModel'"),
        (
            PYTHON + 'model_warmup { name: "w" inputs { key: "z" value { zero_data: true } } }',
            returning("[]"),
            "model_warmup w: input x: is missing; declare it",
        ),
    ],
)
def test_what_cannot_be_loaded(load: Load, config: str, source: str, sentence: str) -> None:
    with pytest.raises(UnusableError) as caught:
        load(config, source)
    assert str(caught.value).endswith(sentence)


def test_a_warmup_that_fails_keeps_the_model_from_serving(load: Load) -> None:
    warmup = (
        'model_warmup { name: "w" batch_size: 1 inputs { key: "x" value { data_type: TYPE_FP32 dims: 2 '
        'input_data_file: "row" } } }'
    )
    error = "pb_utils.InferenceResponse(error=pb_utils.TritonError(str(x(requests[0]).tolist())))"
    with pytest.raises(LoadError, match=r"\[\[1\.0, 2\.0\]\]"):
        load(PYTHON + warmup, returning(f"[{error}]"), {"warmup/row": X[0].tobytes()})


def test_a_decoupled_model_may_be_async(load: Load) -> None:
    source = """
        import asyncio
        class TritonPythonModel:
            async def execute(self, requests):
                await asyncio.gather(*[self.respond(r) for r in requests])
            async def respond(self, r):
                sender, x = r.get_response_sender(), r.inputs()[0].as_numpy()
                for n in (1, 2):
                    sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", n * x)]))
                    await asyncio.sleep(0)
                sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    """
    model = load(PYTHON + "model_transaction_policy { decoupled: true }", source)
    assert isinstance(model, SteppingModel) and model.unload is not None
    emitted: list[Any] = []

    class Request:
        body, state, has_ended, info = X[0], None, False, RequestInfo("a", "", {})

        def emit(self, value: Any) -> None:
            emitted.append(value.tolist())

        def finish(self) -> None:
            self.has_ended = True

        def fail(self, error: BaseException | str) -> None:
            raise AssertionError(error)

    request = Request()
    model.begin([request])
    while not request.has_ended:
        model.step([request])
    assert emitted == [[1, 2], [2, 4]]
    model.unload()


# --- ONNX files ---------------------------------------------------------------------------------------------


def identity(shape: list[int | str]) -> bytes:
    return tiny_onnx.model([Value("x", shape)], [Value("y", shape)], [Node("Identity", ["x"], ["y"])])


def test_shapes_of_clients_are_those_of_the_graph_reshaped(load: Load) -> None:
    config = """
        platform: "onnxruntime_onnx" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] reshape { shape: [ 2, 2 ] } }
        output { name: "y" data_type: TYPE_FP32 dims: [ 1, 4 ] reshape { shape: [ 2, 2 ] }
                 label_filename: "l" }
    """
    model = load(config, identity(["n", 2, 2]), {"l": b"a\nb\nc\nd\n"})
    assert [spec.shape for spec in (*model.inputs, *model.outputs)] == [(4,), (1, 4)]
    assert model.outputs[0].labels == ("a", "b", "c", "d")
    batch = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(run(model, batch), batch.reshape(3, 1, 4))


def test_a_graph_without_batches_has_a_batch_of_one(load: Load) -> None:
    config = f'backend: "onnxruntime" {TENSORS.replace("[ 2 ]", "[ 1, 2 ]")}'
    model = load(config, identity([1, 2]))
    assert (model.inputs[0].shape, model.settings.max_batch_size) == ((2,), 1)
    np.testing.assert_array_equal(run(model, X[:1]), X[:1])


def test_a_graph_with_states_is_reshaped_too(load: Load) -> None:
    graph = tiny_onnx.model(
        [Value("x", ["n", 2]), Value("s", ["n", 2])],
        [Value("y", ["n", 2]), Value("t", ["n", 2])],
        [Node("Add", ["x", "s"], ["y"]), Node("Identity", ["y"], ["t"])],
    )
    config = """
        backend: "onnxruntime" max_batch_size: 4
        input { name: "x" data_type: TYPE_FP32 dims: [ 1, 2 ] reshape { shape: [ 2 ] } }
        output { name: "y" data_type: TYPE_FP32 dims: [ 2 ] }
        sequence_batching {
          state { input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 2 ] }
        }
    """
    model = load(config, graph)
    assert (model.inputs[0].shape, model.states[0].shape) == ((1, 2), (-1, 2))
    outputs, states = model.run(X[:, np.newaxis], [], {"s": np.ones((2, 2), np.float32)})
    np.testing.assert_array_equal(outputs, X + 1)
    np.testing.assert_array_equal(states["s"], X + 1)


def test_a_configuration_without_tensors_is_that_of_the_graph(load: Load) -> None:
    model = load('backend: "onnxruntime"', identity([1, 2]))
    assert (model.inputs[0].shape, model.settings.max_batch_size) == ((2,), 1)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        (
            "TYPE_FP32 dims: [ 2 ]",
            "TYPE_FP64 dims: [ 2 ]",
            "input x: data_type: FP64 is FP32 in the graph; write that",
        ),
        (
            "dims: [ 2 ]",
            "dims: [ 3 ]",
            "input x: dims: [3] are [2] in the graph, without the batch; write those",
        ),
        ('name: "x"', 'name: "z"', "input: the graph has x, which is missing; declare it"),
        ('name: "y"', 'name: "z"', "/m/config.pbtxt: outputs: the file has no output 'z'; it has y"),
    ],
)
def test_a_graph_must_be_as_it_is_declared(load: Load, old: str, new: str, sentence: str) -> None:
    with pytest.raises((UnusableError, LoadError)) as caught:
        load(f'backend: "onnxruntime" max_batch_size: 4 {TENSORS.replace(old, new, 1)}', identity(["n", 2]))
    assert sentence in str(caught.value)
