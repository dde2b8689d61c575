"""A repository as Triton has it, served as it is: each kind of model by a worker, with producers."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from carpool import AsyncClient, Client, InternalError, InvalidArgumentError, NotFoundError
from support import tiny_onnx
from support.http import call
from support.stack import Stack
from support.tiny_onnx import Node, Value

pytestmark = pytest.mark.filterwarnings("error")

TIMEOUT_S = 60.0

ADD = """
    name: "add"
    platform: "onnxruntime_onnx"
    max_batch_size: 16
    input [ { name: "a" data_type: TYPE_FP32 dims: [ 2 ] }, { name: "b" data_type: TYPE_FP32 dims: [ 2 ] } ]
    output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
    instance_group [ { count: 1 kind: KIND_CPU } ]
"""

TOTAL = """
    backend: "onnxruntime"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: 1 }
    output { name: "y" data_type: TYPE_FP32 dims: 1 }
    sequence_batching {
      max_sequence_idle_microseconds: 60000000
      oldest { max_candidate_sequences: 4 }
      state {
        input_name: "total" output_name: "new_total" data_type: TYPE_FP32 dims: [ 1 ]
        initial_state { name: "ten" data_type: TYPE_FP32 dims: [ 1 ] data_file: "ten" }
      }
    }
    instance_group { kind: KIND_CPU }
"""

SCALE = """
    backend: "python"
    max_batch_size: 8
    input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] },
            { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
             { name: "SEEN" data_type: TYPE_STRING dims: [ 1 ] } ]
    dynamic_batching { preferred_batch_size: [ 4 ] max_queue_delay_microseconds: 5000000 }
    parameters { key: "factor" value { string_value: "2" } }
    model_warmup { name: "zeros" batch_size: 2
      inputs { key: "TEXT" value { data_type: TYPE_STRING dims: 1 zero_data: true } }
      inputs { key: "X" value { data_type: TYPE_FP32 dims: 3 zero_data: true } } }
    instance_group { kind: KIND_CPU }
"""

SCALE_PY = """
    import json
    import numpy as np
    import triton_python_backend_utils as pb_utils
    from helper import shout

    class TritonPythonModel:
        def initialize(self, args):
            config = json.loads(args["model_config"])
            self.factor = float(config["parameters"]["factor"]["string_value"])
            output = pb_utils.get_output_config_by_name(config, "Y")
            self.dtype = pb_utils.triton_string_to_numpy(output["data_type"])
            self.name = f"{args['model_name']} {args['model_version']} {args['model_instance_kind']}"
            self.warm = 0

        def execute(self, requests):
            responses = []
            for request in requests:
                text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()
                x = pb_utils.get_input_tensor_by_name(request, "X")
                if request.request_id().startswith("warmup"):
                    self.warm += 1
                elif text[0, 0] == b"absent":
                    error = pb_utils.TritonError("not here", pb_utils.TritonError.NOT_FOUND)
                    responses.append(pb_utils.InferenceResponse(error=error))
                    continue
                elif text[0, 0] == b"raise":
                    raise pb_utils.TritonModelException("raised")
                seen = f"{shout(text[0, 0].decode())} {len(requests)} {self.warm} {self.name}"
                y = pb_utils.Tensor("Y", (x.as_numpy() * self.factor).astype(self.dtype))
                seen = pb_utils.Tensor("SEEN", np.array([[seen.encode()]], object))
                responses.append(pb_utils.InferenceResponse(output_tensors=[seen, y]))
            return responses
"""

REPEAT = """
    backend: "python"
    max_batch_size: 0
    model_transaction_policy { decoupled: True }
    input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] },
            { name: "WAIT" data_type: TYPE_BOOL dims: [ 1 ] optional: true } ]
    output [ { name: "OUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
    instance_group [ { kind: KIND_CPU } ]
"""

SAY = """
    max_batch_size: 0
    model_transaction_policy { decoupled: true }
    input { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }
    instance_group { kind: KIND_CPU }
"""

SAY_PY = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            (request,) = requests
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()
            sender = request.get_response_sender()
            for word in text[0].split():
                output = pb_utils.Tensor("text_output", np.array([word], object))
                sender.send(pb_utils.InferenceResponse([output]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

CHAIN = """
    backend: "python"
    max_batch_size: 4
    input { name: "WORD" data_type: TYPE_STRING dims: [ 1 ] }
    output { name: "SUM" data_type: TYPE_FP32 dims: [ 2 ] }
    output { name: "SAID" data_type: TYPE_STRING dims: [ 1 ] }
    instance_group { kind: KIND_CPU }
"""

CHAIN_PY = """
    import asyncio
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        async def execute(self, requests):
            return await asyncio.gather(*map(self.response, requests))

        async def response(self, request):
            word = pb_utils.get_input_tensor_by_name(request, "WORD").as_numpy()
            size = len(word[0, 0])
            rows = [pb_utils.Tensor(name, np.full((2, size), size, np.float32)) for name in ("a", "b")]
            add = pb_utils.InferenceRequest(model_name="add", requested_output_names=["y"], inputs=rows)
            text = pb_utils.Tensor("text_input", word[0])
            say = pb_utils.InferenceRequest(
                model_name=b"say", requested_output_names=["text_output"], inputs=[text]
            )
            added, said = await asyncio.gather(add.async_exec(), say.async_exec())
            if added.has_error():
                code, message = added.error().code(), added.error().message()
                return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
            sums = pb_utils.get_output_tensor_by_name(added, "y").as_numpy()
            assert sums.shape == (2, 2)
            said = pb_utils.get_output_tensor_by_name(said, "text_output").as_numpy()
            said = pb_utils.Tensor("SAID", said.reshape(1, 1))
            return pb_utils.InferenceResponse([pb_utils.Tensor("SUM", sums[1:]), said])
"""

CALL_PY = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [self.response(request) for request in requests]

        def response(self, request):
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            call = pb_utils.InferenceRequest(
                model_name="add",
                requested_output_names=["y"],
                inputs=[pb_utils.Tensor("a", x), pb_utils.Tensor("b", x)],
                timeout=30_000_000,
            )
            response = call.exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            return pb_utils.InferenceResponse(response.output_tensors())
"""

CALL = """
    backend: "python"
    max_batch_size: 8
    input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
    output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
    instance_group { kind: KIND_CPU }
"""

REPEAT_PY = """
    import threading
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                numbers = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
                if -1 in numbers:
                    raise ValueError("no negative numbers")
                arguments = (request.get_response_sender(), numbers)
                threading.Thread(target=self.respond, args=arguments, daemon=True).start()

        def respond(self, sender, numbers):
            for number in numbers:
                if number == 404:
                    error = pb_utils.TritonError("no such number", pb_utils.TritonError.NOT_FOUND)
                    sender.send(pb_utils.InferenceResponse(error=error))
                out = pb_utils.Tensor("OUT", np.array([number], np.int32))
                sender.send(pb_utils.InferenceResponse([out]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""

COUNT = """
    backend: "python"
    max_batch_size: 4
    input { name: "X" data_type: TYPE_INT32 dims: [ 1 ] reshape { shape: [ ] } }
    output { name: "N" data_type: TYPE_INT64 dims: [ 2 ] }
    sequence_batching {
      max_sequence_idle_microseconds: 60000000
      direct { }
      control_input [
        { name: "START" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } },
        { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
      ]
    }
    instance_group { kind: KIND_CPU }
"""

COUNT_PY = """
    import numpy as np
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            self.sums = {}

        def execute(self, requests):
            return [self.response(request) for request in requests]

        def response(self, request):
            x, start, number = (tensor.as_numpy() for tensor in request.inputs())
            assert (x.shape, start.shape, number.shape) == ((1,), (1, 1), (1, 1))
            if start[0, 0] == 1.0:
                self.sums[request.correlation_id()] = 0
            self.sums[request.correlation_id()] += int(x[0])
            result = np.array([[self.sums[request.correlation_id()], number[0, 0]]], np.int64)
            return pb_utils.InferenceResponse([pb_utils.Tensor("N", result)])
"""


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


def write_repository(folder: Path) -> None:
    add = tiny_onnx.model(
        [Value("a", ["n", 2]), Value("b", ["n", 2])], [Value("y", ["n", 2])], [Node("Add", ["a", "b"], ["y"])]
    )
    total = tiny_onnx.model(
        [Value("x", ["n", 1]), Value("total", ["n", 1])],
        [Value("y", ["n", 1]), Value("new_total", ["n", 1])],
        [Node("Add", ["x", "total"], ["y"]), Node("Identity", ["y"], ["new_total"])],
    )
    models: list[tuple[str, str, str, str | bytes]] = [
        ("add", ADD, "model.onnx", add),
        ("total", TOTAL, "model.onnx", total),
        ("scale", SCALE, "model.py", SCALE_PY),
        ("repeat", REPEAT, "model.py", REPEAT_PY),
        ("count", COUNT, "model.py", COUNT_PY),
        ("say", SAY, "model.py", SAY_PY),
        ("chain", CHAIN, "model.py", CHAIN_PY),
        ("call", CALL, "model.py", CALL_PY),
    ]
    for name, config, file, content in models:
        write(folder / name / "config.pbtxt", config)
        write(folder / name / "3" / "unused", "")
        if isinstance(content, bytes):
            (folder / name / "3" / file).write_bytes(content)
        else:
            write(folder / name / "3" / file, content)
    write(folder / "add" / "labels.txt", "left\nright\n")
    write(folder / "scale" / "3" / "helper.py", "def shout(text):\n    return text.upper()\n")
    (folder / "total" / "initial_state").mkdir()
    (folder / "total" / "initial_state" / "ten").write_bytes(np.array([10], np.float32).tobytes())


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("repository")
    write_repository(folder)
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.batcher()
        names = ["add", "total", "scale", "repeat", "count", "say", "chain", "call"]
        for name in names:
            options = ["--param", "factor=3"] if name == "scale" else []
            stack.worker(f"repository:{folder}/{name}", *options, ready=False)
        for name in names:
            stack.wait_for_model(name)
        yield stack


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, timeout=TIMEOUT_S) as client:
        yield client


def test_an_onnx_file(client: Client) -> None:
    a = np.arange(20, dtype=np.float32).reshape(10, 2)
    results = client.infer_many("add", [{"a": row, "b": row} for row in a])
    np.testing.assert_array_equal(np.stack(list(results)), 2 * a)


def test_the_states_of_an_onnx_file_begin_with_those_of_a_file(client: Client) -> None:
    with client.sequence("total") as one, client.sequence("total") as other:
        assert [one.infer([x]).tolist() for x in (1.0, 2.0)] == [[11.0], [13.0]]
        assert other.infer([5.0]).tolist() == [15.0]
        assert one.infer([1.0]).tolist() == [14.0]


def test_a_python_model_gets_batches_and_its_parameters(client: Client) -> None:
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    texts = ["a", "b", "absent", "d"]
    bodies = [{"TEXT": [text], "X": row} for text, row in zip(texts, x, strict=True)]
    results = client.infer_many("scale", bodies, return_exceptions=True)
    one, two, absent, four = list(results)
    assert isinstance(absent, NotFoundError) and absent.detail == "not here"
    np.testing.assert_array_equal([one["Y"], two["Y"], four["Y"]], 3 * x[[0, 1, 3]])
    assert [result["SEEN"] for result in (one, two, four)] == [
        [f"{letter} 4 2 scale 3 CPU".encode()] for letter in "ABD"
    ]


def test_a_request_on_which_a_python_model_raises_fails_alone(client: Client) -> None:
    bodies = [{"TEXT": [text], "X": np.array([1], np.float32)} for text in ("a", "raise", "c", "d")]
    results = list(client.infer_many("scale", bodies, return_exceptions=True))
    assert isinstance(results[1], InternalError) and "raised" in results[1].detail
    assert [result["Y"].tolist() for at, result in enumerate(results) if at != 1] == [[3.0]] * 3


def test_a_decoupled_model_sends_any_number_of_responses(client: Client) -> None:
    chunks = list(client.stream("repeat", {"IN": np.array([3, 1, 2], np.int32)}))
    assert np.concatenate(chunks).tolist() == [3, 1, 2]
    assert list(client.stream("repeat", {"IN": np.array([], np.int32), "WAIT": np.array([True])})) == []
    assert client.infer("repeat", {"IN": np.array([7, 8], np.int32)}).tolist() == [7, 8]


def test_what_a_decoupled_model_raises_or_answers_fails_that_request(client: Client) -> None:
    chunks = client.stream("repeat", {"IN": np.array([5, 404], np.int32)})
    assert next(chunks).tolist() == [5]
    with pytest.raises(NotFoundError, match="no such number"):
        next(chunks)
    with pytest.raises(InternalError, match="no negative numbers"):
        client.infer("repeat", {"IN": np.array([-1], np.int32)})
    assert client.infer("repeat", {"IN": np.array([9], np.int32)}).tolist() == [9]


def test_requests_of_a_sequence_reach_the_object_that_has_its_state(client: Client) -> None:
    with (
        client.sequence("count", sequence_id="17") as one,
        client.sequence("count", sequence_id="4") as other,
    ):
        assert [one.infer([x]).tolist() for x in (1, 2)] == [[1, 17], [3, 17]]
        assert other.infer([5]).tolist() == [5, 4]
        assert one.infer([4]).tolist() == [7, 17]
    wrong = pytest.raises(InvalidArgumentError, match="must be a number that UINT64 holds")
    with client.sequence("count", sequence_id="words") as named, wrong:
        named.infer([1])


def test_texts_of_a_decoupled_model_are_responses_over_http(stack: Stack, client: Client) -> None:
    assert list(client.stream("say", "a b")) in (["a", "b"], ["ab"])
    path, body = "/v2/models/say/generate_stream", b'{"text_input": "once upon a time"}'
    answer = call(stack.gateway().url, "POST", path, body)
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line]
    assert "".join(event["text_output"] for event in events) == "onceuponatime"


def test_a_model_calls_others(client: Client) -> None:
    result = client.infer("chain", ["ab"])
    assert (result["SUM"].tolist(), result["SAID"]) == ([4, 4], [b"ab"])
    with pytest.raises(InvalidArgumentError, match=r"chain -> add: body\.a\.shape: \[3\]"):
        client.infer("chain", ["abc"])


def test_a_call_that_fails_concerns_its_request_alone(client: Client) -> None:
    bodies = [np.ones(size, np.float32) for size in (2, 3, 2)]
    one, wrong, three = client.infer_many("call", bodies, return_exceptions=True)
    assert one.tolist() == three.tolist() == [2, 2]
    assert isinstance(wrong, InternalError) and "call -> add: body.a.shape: [3]" in wrong.detail


async def test_many_streams_at_a_time(stack: Stack) -> None:
    async with AsyncClient(stack.url, timeout=TIMEOUT_S) as client:
        numbers = {at: np.arange(at, dtype=np.int32) for at in range(1, 9)}
        streams = {at: client.stream("repeat", {"IN": body}) for at, body in numbers.items()}
        for at, stream in streams.items():
            assert np.concatenate([chunk async for chunk in stream]).tolist() == list(range(at))
