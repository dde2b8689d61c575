"""gRPC through the gateway, with real workers and real channels."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from carpool.keys import Keys
from carpool_gateway.rpc.messages import CONTENTS, HEALTH, INFERENCE, REFLECTIONS
from carpool_gateway.rpc.streams import REQUESTS_MAX
from support.http import Connection, call
from support.rpc import Rpc, ids_and_errors, infer_request, outputs_of
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

TRITON: Final = ("Sum", "Identity", "Strings", "Labelled", "Starting")
OTHERS: Final = (
    *(f"plain.py:{name}" for name in ("Noop", "Noting", "Echo")),
    *("timed.py:Sleeper", "faulty.py:Faulty", "repeating.py:Repeat"),
)
LIMIT_BYTES: Final = 1024 * 1024


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(*(f"triton.py:{name}" for name in TRITON), *OTHERS)
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway("--grpc-port", "0", "--body-bytes-max", str(LIMIT_BYTES))


@pytest.fixture(scope="module")
def rpc(gateway: Service) -> Iterator[Rpc]:
    with Rpc(gateway) as client:
        yield client


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    """A file that does not exist yet; it does in the end, so that no model waits for it."""
    path = tmp_path / "gate"
    yield path
    path.touch()


def bodies(*values: Any) -> tuple[str, list[list[bytes]]]:
    """The input of a model that declares none: JSON as its bodies."""
    return "body", [[json.dumps(value).encode()] for value in values]


def json_request(model: str, *values: Any, **more: Any) -> Any:
    request = infer_request(model, bodies(*values), **more)
    request.inputs[0].parameters["content_type"].string_param = "application/json"
    return request


def failure(error: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[str, str]:
    """The name of the status, and the details."""
    return error.value.code().name, error.value.details()


def metric(gateway: Service, name: str) -> float:
    lines = call(gateway.url, "GET", "/metrics").body.decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def assert_forgotten(gateway: Service, shared: Stack, *models: str) -> None:
    """Nothing is left of any client: in the memory of the gateway, and in Redis."""
    wait_until(
        lambda: metric(gateway, "carpool_gateway_body_bytes") == 0,
        description="the gateway holds nothing of its clients",
    )
    for model in models:
        shared.wait_until_idle(model)


# --- documents ---------------------------------------------------------------------------------------------


def test_documents_are_those_of_http(rpc: Rpc, gateway: Service) -> None:
    assert (rpc.call("ServerLive").live, rpc.call("ServerReady").ready) == (True, True)
    assert rpc.call("ServerMetadata").name == "carpool"
    assert "binary_tensor_data" in rpc.call("ServerMetadata").extensions
    metadata = rpc.call("ModelMetadata", name="Sum", version="1")
    assert [(one.name, one.datatype, list(one.shape)) for one in metadata.inputs] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    config = rpc.call("ModelConfig", name="Sum").config
    assert (config.max_batch_size, config.input[0].data_type, list(config.input[0].dims)) == (8, 8, [16])
    assert config.dynamic_batching.priority_levels == 10
    assert rpc.call("ModelConfig", name="Starting").config.HasField("sequence_batching")
    assert [rpc.call("ModelReady", name=name).ready for name in ("Sum", "NONE", "../")] == [
        True,
        False,
        False,
    ]
    index = {one.name: one.state for one in rpc.call("RepositoryIndex", ready=True).models}
    assert index.items() >= dict.fromkeys(TRITON, "READY").items()
    for name in ("NONE", "../", ""):
        with pytest.raises(grpc.RpcError) as error:
            rpc.call("ModelMetadata", name=name)
        assert failure(error) == ("NOT_FOUND", f"Request for unknown model: '{name}' is not found")
    with pytest.raises(grpc.RpcError) as error:
        rpc.call("ModelConfig", name="Sum", version="7")
    assert failure(error)[0] == "NOT_FOUND"


def test_statistics_are_those_of_http(rpc: Rpc, gateway: Service) -> None:
    array = np.ones((3, 4), np.float32)
    rpc.infer("Identity", ("INPUT0", array))
    (found,) = rpc.call("ModelStatistics", name="Identity").model_stats
    (over_http,) = call(gateway.url, "GET", "/v2/models/Identity/stats").json["model_stats"]
    assert found.inference_count == over_http["inference_count"] >= 3
    assert found.inference_stats.success.ns == over_http["inference_stats"]["success"]["ns"] > 0
    assert len(found.batch_stats) == len(over_http["batch_stats"])
    assert "Sum" in {one.name for one in rpc.call("ModelStatistics").model_stats}


@pytest.mark.parametrize(
    "method", ["RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryRegister", "TraceSetting"]
)
def test_what_is_not_offered_is_said_to_be(rpc: Rpc, method: str) -> None:
    refused = rpc.channel.unary_unary(f"/{INFERENCE.service}/{method}")
    with pytest.raises(grpc.RpcError) as error:
        refused(b"", timeout=EVENTUALLY_S)
    status, details = failure(error)
    assert status == "UNIMPLEMENTED"
    assert details.startswith("the gateway ")


def test_standard_health(rpc: Rpc) -> None:
    assert {rpc.check(service) for service in ("", INFERENCE.service)} == {"SERVING"}
    with pytest.raises(grpc.RpcError) as error:
        rpc.check("another")
    assert failure(error)[0] == "NOT_FOUND"


def test_tools_can_ask_what_there_is(rpc: Rpc) -> None:
    for own in REFLECTIONS:
        asked = rpc.channel.stream_stream(
            f"/{own.service}/ServerReflectionInfo",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=own["ServerReflectionResponse"].FromString,
        )
        names = (
            {"list_services": "*"},
            {"file_containing_symbol": INFERENCE.service},
            {"file_by_filename": "x"},
        )
        questions = [own["ServerReflectionRequest"](**name) for name in names]
        services, file, nothing = asked(iter(questions), timeout=EVENTUALLY_S)
        listed = {one.name for one in services.list_services_response.service}
        assert listed == {INFERENCE.service, HEALTH.service, *(one.service for one in REFLECTIONS)}
        (described,) = file.file_descriptor_response.file_descriptor_proto
        assert FileDescriptorProto.FromString(described) == INFERENCE.file
        assert nothing.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]


# --- infer -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64, 1024])
def test_rows_come_back_as_they_went(rpc: Rpc, gateway: Service, shared: Stack, rows: int) -> None:
    array = np.random.default_rng(rows).random((rows, 128), np.float32)
    for _ in range(3):  # the second time it is prepared already
        (found,) = rpc.infer("Noop", ("numbers", array), id="42").values()
        assert np.array_equal(found, array)
    assert_forgotten(gateway, shared, "Noop")  # also of large answers
    response = rpc.method("ModelInfer")(
        infer_request("Noop", ("numbers", array), id="42"), timeout=EVENTUALLY_S
    )
    assert (response.id, response.model_name, response.model_version) == ("42", "Noop", "1")


def test_several_outputs_texts_and_classes(rpc: Rpc) -> None:
    first, second = np.arange(16, dtype=np.int32)[None], np.ones((1, 16), np.int32)
    found = rpc.infer("Sum", ("INPUT1", second), ("INPUT0", first))
    assert found["OUTPUT0"].tolist() == (first + second).tolist()
    assert found["OUTPUT1"].tolist() == (first - second).tolist()
    request = infer_request("Sum", ("INPUT0", first), ("INPUT1", second))
    request.outputs.add(name="OUTPUT1")
    assert list(outputs_of(rpc.method("ModelInfer")(request, timeout=EVENTUALLY_S))) == ["OUTPUT1"]
    texts = [[b"\xff\0", b""], ["\u4e2d".encode(), b"a"]]
    assert rpc.infer("Strings", ("INPUT0", texts))["OUTPUT0"] == [text for row in texts for text in row]
    request = infer_request("Labelled", ("scores", np.array([[0.5, 3, 1]], np.float32)))
    request.outputs.add(name="scores").parameters["classification"].int64_param = 2
    classes = outputs_of(rpc.method("ModelInfer")(request, timeout=EVENTUALLY_S))
    assert classes == {"scores": [b"3.000000:1:dog", b"1.000000:2:bird"]}


def test_contents_in_and_out(rpc: Rpc) -> None:
    request = INFERENCE["ModelInferRequest"](model_name="Sum")
    for name in ("INPUT0", "INPUT1"):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        tensor.contents.int_contents.extend(range(16))
    request.parameters["binary_data_output"].bool_param = False
    response = rpc.method("ModelInfer")(request, timeout=EVENTUALLY_S)
    assert not response.raw_output_contents
    assert [list(getattr(output.contents, CONTENTS["INT32"])) for output in response.outputs] == [
        list(range(0, 32, 2)),
        [0] * 16,
    ]


def test_bodies_of_a_model_that_declares_nothing(rpc: Rpc) -> None:
    response = rpc.method("ModelInfer")(json_request("Echo", {"a": 1}, "text"), timeout=EVENTUALLY_S)
    assert outputs_of(response) == {"result": [b'{"a":1}', b"text"]}
    about = json_request("Echo", "about", parameters={"priority": 1, "language": "de", "x": 0.5})
    (found,) = outputs_of(rpc.method("ModelInfer")(about, timeout=EVENTUALLY_S))["result"]
    assert json.loads(found)[2] == {"language": "de", "x": "0.5"}
    about = json_request("Echo", "about")
    metadata = (("carpool-field-language", "de"), ("carpool-tenant", "acme"))
    (found,) = outputs_of(rpc.method("ModelInfer")(about, timeout=EVENTUALLY_S, metadata=metadata))["result"]
    assert json.loads(found)[2] == {"language": "de", "tenant": "acme"}


@pytest.mark.parametrize(
    ("request_", "status", "why"),
    [
        (infer_request("NONE"), "NOT_FOUND", "'NONE' is not found"),
        (infer_request("Noop", model_version="9"), "NOT_FOUND", "version 9 is not found"),
        (infer_request("Noop"), "INVALID_ARGUMENT", "expected 1 inputs but got 0 inputs"),
        (
            infer_request("Noop", ("numbers", np.ones((1, 3), np.float32))),
            "INVALID_ARGUMENT",
            "shape is [1, 3]",
        ),
        (
            infer_request("Noop", ("numbers", np.ones((1, 128), np.float32)), parameters={"timeout": -1}),
            "INVALID_ARGUMENT",
            "parameter timeout: -1",
        ),
        (json_request("Faulty", "raise"), "INTERNAL", ""),
        (
            infer_request("Noop", ("numbers", np.ones((4096, 128), np.float32))),
            "RESOURCE_EXHAUSTED",
            "larger than max",
        ),
    ],
    ids=["model", "version", "inputs", "shape", "parameter", "raises", "too-large"],
)
def test_errors_have_a_status_and_a_sentence(rpc: Rpc, request_: Any, status: str, why: str) -> None:
    with pytest.raises(grpc.RpcError) as error:
        rpc.method("ModelInfer")(request_, timeout=EVENTUALLY_S)
    found, details = failure(error)
    assert found == status
    assert why in details
    assert details


def test_bytes_that_are_no_message_are_refused(rpc: Rpc) -> None:
    for method in ("ModelInfer", "ModelMetadata"):
        with pytest.raises(grpc.RpcError) as error:
            rpc.channel.unary_unary(f"/{INFERENCE.service}/{method}")(b"\x0a\xff", timeout=EVENTUALLY_S)
        assert failure(error)[0] == "INVALID_ARGUMENT"


def test_a_call_has_an_id_that_its_client_may_give(rpc: Rpc, gateway: Service) -> None:
    request = infer_request("Identity", ("INPUT0", np.ones((1, 2), np.float32)))
    before = metric(gateway, 'carpool_gateway_requests_total{code="200",route="grpc_infer"}')
    _, first = rpc.method("ModelInfer").with_call(request, timeout=EVENTUALLY_S)
    assert dict(first.trailing_metadata())["x-request-id"]
    metadata = (("x-request-id", "mine-7"),)
    _, second = rpc.method("ModelInfer").with_call(request, timeout=EVENTUALLY_S, metadata=metadata)
    assert dict(second.trailing_metadata())["x-request-id"] == "mine-7"
    wait_until(
        lambda: any(event["request"] == "mine-7" for event in gateway.events("answered")),
        description="the call is logged",
    )
    assert metric(gateway, 'carpool_gateway_requests_total{code="200",route="grpc_infer"}') >= before + 2


def test_compressed_messages(gateway: Service) -> None:
    array = np.ones((64, 128), np.float32)
    with Rpc(gateway, **{"grpc.default_compression_algorithm": grpc.Compression.Gzip.value}) as client:
        assert np.array_equal(client.infer("Noop", ("numbers", array))["numbers"], array)


# --- deadlines, cancellations, disconnects -----------------------------------------------------------------


def noting(notes: Path, name: str, **more: str) -> Any:
    return json_request("Noting", {"name": name, "notes": str(notes), **more})


@pytest.mark.parametrize("how", ["deadline", "cancel", "disconnect", "stream"])
def test_what_waits_is_withdrawn_when_nobody_wants_it(
    rpc: Rpc, gateway: Service, shared: Stack, tmp_path: Path, how: str
) -> None:
    """Given a model that is busy, expect that a request whose client is gone is never executed."""
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    wait_until(lambda: not waiting(shared, "Noting"), description="the report is not of the test before")
    holding = rpc.method("ModelInfer").future(noting(notes, "first", gate=str(gate)), timeout=EVENTUALLY_S)
    wait_until(notes.exists, description="the model is busy")
    with Rpc(gateway) as other:
        infer, requests = other.method("ModelInfer"), [noting(notes, f"{how}{at}") for at in range(20)]
        if how == "stream":
            calls = [other.stream(requests)]
        else:
            timeout = 1.0 if how == "deadline" else EVENTUALLY_S
            calls = [infer.future(request, timeout=timeout) for request in requests]
        if how == "deadline":
            assert {failure_of(one)[0] for one in calls} == {"DEADLINE_EXCEEDED"}
        else:  # one batch is ahead
            wait_until(lambda: waiting(shared, "Noting") >= 19, description="they wait")
            for one in calls if how != "disconnect" else ():
                one.cancel()
    wait_until(lambda: not shared.redis.xlen(Keys("Noting").requests), description="they are withdrawn")
    gate.touch()
    assert holding.result(EVENTUALLY_S).model_name == "Noting"
    assert_forgotten(gateway, shared, "Noting")
    assert len(notes.read_text().split()) <= 2


def failure_of(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as error:
        call.result(EVENTUALLY_S)
    return failure(error)


def waiting(shared: Stack, model: str) -> int:
    """Requests that wait, according to the report of the batcher."""
    report = json.loads(shared.redis.get(Keys(model).report) or b"{}")
    return int(report["gauges"]["waiting"]) if report else 0


def test_a_timeout_of_the_request_is_told_by_the_server(rpc: Rpc) -> None:
    request = json_request("Sleeper", 0.6, parameters={"timeout": 200_000})
    with pytest.raises(grpc.RpcError) as error:
        rpc.method("ModelInfer")(request, timeout=EVENTUALLY_S)
    assert failure(error)[0] == "DEADLINE_EXCEEDED"
    with pytest.raises(grpc.RpcError) as error:
        rpc.method("ModelInfer")(json_request("Sleeper", 0, parameters={"timeout": 10**12}), timeout=5)
    assert failure(error) == ("INVALID_ARGUMENT", "timeout: at most 300000000 microseconds")
    assert rpc.infer(
        "Identity", ("INPUT0", np.ones((1, 1), np.float32)), timeout=3000
    )  # more than the maximum


# --- streams -----------------------------------------------------------------------------------------------


def test_responses_on_a_stream_have_the_order_of_requests(rpc: Rpc) -> None:
    """Given requests of three models, some of which fail, expect each answer under its ID, in order."""
    array = np.ones((2, 2), np.float32)
    requests = [
        json_request("Sleeper", 0.2, id="slow"),
        infer_request("Identity", ("INPUT0", array), id="quick"),
        infer_request("NONE", id="unknown"),
        json_request("Faulty", "raise", id="raises"),
        infer_request("Identity", ("INPUT0", array), id="last"),
    ]
    answers = list(rpc.stream(requests))
    assert [answer.infer_response.id for answer in answers] == ["slow", "quick", "unknown", "raises", "last"]
    assert [bool(answer.error_message) for answer in answers] == [False, False, True, True, False]
    assert "'NONE' is not found" in answers[2].error_message
    assert np.array_equal(outputs_of(answers[4].infer_response)["OUTPUT0"], array)
    assert all(answers[at].infer_response.parameters["triton_final_response"].bool_param for at in (0, 1, 4))


def test_sequences_on_a_stream(rpc: Rpc) -> None:
    requests = []
    for at in range(4):
        for sequence, number in ((1001, 10), ("a-text", 20)):
            parameters = {"sequence_id": sequence, "sequence_start": at == 0, "sequence_end": at == 3}
            tensor = ("INPUT", np.array([[number + at]], np.int32))
            requests.append(infer_request("Starting", tensor, id=str(sequence), parameters=parameters))
    found: dict[str, list[int]] = {}
    for answer in rpc.stream(requests):
        assert not answer.error_message
        number = outputs_of(answer.infer_response)["OUTPUT"].item()
        found.setdefault(answer.infer_response.id, []).append(number)
    assert found == {"1001": [11, 11, 12, 13], "a-text": [21, 21, 22, 23]}


def test_a_stream_ends_with_an_error_if_its_client_asks_for_that(rpc: Rpc) -> None:
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    requests.put(infer_request("NONE", id="1"))
    answers = rpc.stream(iter(requests.get, None), metadata=(("triton_grpc_error", "true"),))
    with pytest.raises(grpc.RpcError) as error:
        next(answers)
    assert failure(error)[0] == "NOT_FOUND"
    requests.put(None)


def test_more_requests_than_a_stream_has_open(rpc: Rpc, gateway: Service, shared: Stack) -> None:
    array, count = np.ones((1, 1), np.float32), REQUESTS_MAX + 200
    requests = (infer_request("Identity", ("INPUT0", array * at), id=str(at)) for at in range(count))
    answers = rpc.stream(requests)
    assert ids_and_errors(answers) == [(str(at), "") for at in range(count)]
    assert_forgotten(gateway, shared, "Identity")


# --- models that step --------------------------------------------------------------------------------------


def repeating(count: int, **more: Any) -> Any:
    numbers = np.arange(100, 100 + count, dtype=np.int32)[None]
    delays, wait = np.zeros((1, count), np.uint32), np.zeros((1, 1), np.uint32)
    return infer_request("Repeat", ("IN", numbers), ("DELAY", delays), ("WAIT", wait), **more)


def numbers_of(answers: list[Any]) -> list[tuple[str, int, int]]:
    """The IDs and outputs of responses."""
    found = []
    for answer in answers:
        assert not answer.error_message
        outputs = outputs_of(answer.infer_response)
        found.append((answer.infer_response.id, outputs["OUT"].item(), outputs["IDX"].item()))
    return found


def is_final(answer: Any) -> bool:
    return bool(answer.infer_response.parameters["triton_final_response"].bool_param)


def test_responses_of_a_model_that_steps_come_as_it_makes_them(rpc: Rpc, gate: Path) -> None:
    request = repeating(4, id="a", parameters={"GATE": str(gate), "triton_enable_empty_final_response": True})
    answers = rpc.stream([request])
    first = next(answers)
    assert not gate.exists()
    gate.touch()
    *rest, last = answers
    assert numbers_of([first, *rest]) == [("a", 100 + at, at) for at in range(4)]
    assert [is_final(answer) for answer in (first, *rest, last)] == [False] * 4 + [True]
    assert (last.infer_response.id, list(last.infer_response.outputs)) == ("a", [])


def test_streams_of_several_requests_on_one_stream(rpc: Rpc, gate: Path) -> None:
    """Given a request that waits, expect that others are answered, and no end that nobody asked for."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    answers = rpc.stream(iter(requests.get, None))
    requests.put(repeating(3, id="slow", parameters={"GATE": str(gate)}))
    assert next(answers).infer_response.id == "slow"
    requests.put(repeating(2, id="quick"))
    requests.put(infer_request("Identity", ("INPUT0", np.ones((1, 1), np.float32)), id="plain"))
    requests.put(repeating(0, id="empty", parameters={"triton_enable_empty_final_response": True}))
    assert sorted(next(answers).infer_response.id for _ in range(4)) == ["empty", "plain", "quick", "quick"]
    gate.touch()
    requests.put(None)
    assert numbers_of(list(answers)) == [("slow", 101, 1), ("slow", 102, 2)]


def test_a_stream_goes_on_after_its_process_was_killed(rpc: Rpc) -> None:
    answers = list(rpc.stream([repeating(6, id="k", parameters={"KILLS_AT": "3"})]))
    assert numbers_of(answers) == [("k", 100 + at, at) for at in range(6)]


@pytest.mark.parametrize("how", ["cancel", "disconnect"])
def test_a_stream_that_nobody_reads_is_withdrawn(
    gateway: Service, shared: Stack, gate: Path, how: str
) -> None:
    with Rpc(gateway) as other:
        answers = other.stream([repeating(3, parameters={"GATE": str(gate)})])
        next(answers)
        if how == "cancel":
            answers.cancel()
    shared.wait_until_idle("Repeat")  # the gate was never opened
    assert_forgotten(gateway, shared, "Repeat")


def test_a_client_that_does_not_read_is_bounded(shared: Stack) -> None:
    """Given more responses than are kept for a client, expect a prefix of them, and then an error."""
    flags = ("--body-bytes-max", "100000", "--memory-bytes-max", "100000")
    gateway = shared.gateway("--grpc-port", "0", *flags)
    with Rpc(gateway, **{"grpc.http2.bdp_probe": 0, "grpc.http2.lookahead_bytes": 65_536}) as other:
        stream = other.stream([repeating(5000, id="a", parameters={"BURST": 50})])
        first = next(stream)
        shared.wait_until_idle("Repeat")
        answers: list[Any] = [first, *stream]
        last = answers.pop()
    assert numbers_of(answers) == [("a", 100 + at, at) for at in range(len(answers))]
    assert "the stream is read too slowly" in last.error_message
    assert_forgotten(gateway, shared, "Repeat")


def test_the_age_of_connections_is_bounded(shared: Stack) -> None:
    gateway = shared.gateway("--grpc-port", "0", "--grpc-connection-s-max", "0.5")
    with Connection(f"http://{gateway.wait_for('gateway started')['grpc']}") as connection:
        connection.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # settings
        connection.until(b"max_age")


def test_model_infer_on_a_model_that_steps(rpc: Rpc) -> None:
    one = outputs_of(rpc.method("ModelInfer")(repeating(1), timeout=EVENTUALLY_S))
    assert (one["OUT"].item(), one["IDX"].item()) == (100, 0)
    with pytest.raises(grpc.RpcError) as error:
        rpc.method("ModelInfer")(repeating(2), timeout=EVENTUALLY_S)
    assert failure(error)[0] == "UNIMPLEMENTED"
    assert rpc.call("ModelConfig", name="Repeat").config.model_transaction_policy.decoupled


# --- limits, keys, stopping --------------------------------------------------------------------------------


def test_bodies_in_memory_and_calls_have_limits(shared: Stack, tmp_path: Path) -> None:
    gate, notes = tmp_path / "gate", tmp_path / "notes"
    flags = ("--body-bytes-max", "2000", "--memory-bytes-max", "3000", "--connections-max", "3")
    with Rpc(shared.gateway("--grpc-port", "0", *flags)) as client:
        infer = client.method("ModelInfer")
        held = infer.future(noting(notes, "x" * 1500, gate=str(gate)), timeout=EVENTUALLY_S)
        wait_until(notes.exists, description="the gateway holds a body")
        with pytest.raises(grpc.RpcError) as error:
            infer(noting(notes, "y" * 1700), timeout=EVENTUALLY_S)
        status, details = failure(error)
        assert (status, "the gateway holds bodies of" in details) == ("UNAVAILABLE", True)
        others = [infer.future(noting(notes, str(at)), timeout=EVENTUALLY_S) for at in range(4)]
        refused = [failure_of(one) for one in others[2:]]
        assert refused == [("UNAVAILABLE", "too many calls at a time: try again")] * 2
        gate.touch()
        for one in (held, *others[:2]):
            assert one.result(EVENTUALLY_S)


def key_text(name: str, secret: str, **more: Any) -> str:
    lines = [f'name = "{name}"', f'sha256 = "{sha256(secret.encode()).hexdigest()}"']
    lines += [f"{field} = {json.dumps(value)}" for field, value in more.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def test_keys_say_who_may_do_what(shared: Stack, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        key_text("web", "secret-web", tenant="acme", models=["Echo", "Slee*"])
        + key_text("ops", "secret-ops", scopes=["metrics"])
        + key_text("slow", "secret-slow", rate=1)
    )
    gateway = shared.gateway("--grpc-port", "0", "--keys", str(file))
    web, ops, slow = ((("x-api-key", f"secret-{name}"),) for name in ("web", "ops", "slow"))

    def status(model: str, metadata: Any) -> str:
        try:
            client.method("ModelInfer")(json_request(model, "about"), timeout=EVENTUALLY_S, metadata=metadata)
        except grpc.RpcError as error:
            assert error.details()
            return str(error.code().name)
        return "OK"

    with Rpc(gateway) as client:
        assert client.call("ServerLive").live
        assert client.check() == "SERVING"
        for metadata in ((), (("authorization", "Bearer wrong"),), (*web, *web)):
            assert status("Echo", metadata) == "UNAUTHENTICATED"
        answer = client.method("ModelInfer")(
            json_request("Echo", "about"),
            metadata=(("authorization", "Bearer secret-web"),),
            timeout=EVENTUALLY_S,
        )
        assert json.loads(outputs_of(answer)["result"][0])[2] == {"tenant": "acme"}
        assert status("Echo", (*web, ("carpool-tenant", "other"))) == "PERMISSION_DENIED"
        assert status("Noop", web) == status("Echo", ops) == "PERMISSION_DENIED"
        assert [one.name for one in client.call("RepositoryIndex", metadata=web).models] == [
            "Echo",
            "Sleeper",
        ]
        assert [one.name for one in client.call("ModelStatistics", metadata=web).model_stats] == [
            "Echo",
            "Sleeper",
        ]
        with pytest.raises(grpc.RpcError) as error:
            client.call("ModelConfig", name="Noop", metadata=web)
        assert failure(error)[0] == "PERMISSION_DENIED"
        wait_until(
            lambda: status("Echo", slow) == "RESOURCE_EXHAUSTED",
            description="it asks more than once a second",
        )
        with pytest.raises(grpc.RpcError) as error:
            list(client.stream([json_request("Echo", 1)]))
        assert failure(error)[0] == "UNAUTHENTICATED"
        (answered,) = client.stream([json_request("Noop", 1, id="1")], metadata=web)
        assert "is not for the model Noop" in answered.error_message
    assert "secret" not in gateway.log.read_text()
    gateway.kill()


def test_a_worker_that_is_killed_fails_no_call(rpc: Rpc, shared: Stack) -> None:
    worker = shared.worker("timed.py:SlowBatches", "--lease-ms", "600")
    shared.wait_for_model("SlowBatches")
    calls = [
        rpc.method("ModelInfer").future(json_request("SlowBatches", at), timeout=EVENTUALLY_S)
        for at in range(20)
    ]
    wait_until(lambda: shared.pending("SlowBatches") > 0, description="a batch is executed")
    worker.kill()
    shared.worker("timed.py:SlowBatches", "--lease-ms", "600")
    assert [outputs_of(one.result(EVENTUALLY_S))["result"] for one in calls] == [
        [str(at).encode()] for at in range(20)
    ]


def test_a_port_that_is_taken_is_an_error(shared: Stack, gateway: Service) -> None:
    port = gateway.wait_for("gateway started")["grpc"].rpartition(":")[2]
    second = shared.gateway("--grpc-port", port, ready=False)
    assert "gRPC cannot listen on" in second.wait_for("gateway cannot start")["reason"]
    assert second.process.wait(EVENTUALLY_S) == 1


def test_a_gateway_that_stops_fails_no_call_that_has_begun(shared: Stack, gate: Path, tmp_path: Path) -> None:
    """Given calls, streams and a watch that are under way at SIGTERM, expect that all are answered."""
    gateway, notes, keys = shared.gateway("--grpc-port", "0"), tmp_path / "notes", Keys("Noting")
    shared.wait_until_idle("Noting")
    with Rpc(gateway) as client:
        health = client.channel.unary_stream(
            f"/{HEALTH.service}/Watch", response_deserializer=HEALTH["HealthCheckResponse"].FromString
        )(b"", timeout=EVENTUALLY_S)
        assert next(health).status == 1
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        stream = client.stream(iter(requests.get, None))
        requests.put(json_request("Sleeper", 0, id="first"))
        assert next(stream).infer_response.id == "first"
        last = {"name": "last", "notes": str(notes), "gate": str(gate)}
        requests.put(json_request("Noting", last, id="last"))
        wait_until(notes.exists, description="it is executed")
        whole = client.stream([repeating(2, id="whole", parameters={"GATE": str(tmp_path / "whole")})])
        assert next(whole).infer_response.id == "whole"
        held = [
            client.method("ModelInfer").future(noting(notes, "held"), timeout=EVENTUALLY_S) for _ in range(2)
        ]
        wait_until(
            lambda: (shared.redis.xlen(keys.batches), shared.redis.xlen(keys.requests)) == (2, 1),
            description="one is dispatched ahead, and one waits",
        )
        ended = threading.Thread(target=gateway.terminate)
        ended.start()
        assert [answer.status for answer in health] == [2]
        gate.touch()
        assert next(stream).infer_response.id == "last"
        assert [outputs_of(one.result(EVENTUALLY_S))["result"] for one in held] == [[b"held"]] * 2
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert failure(error) == ("UNAVAILABLE", "the gateway stops: open another stream")
        (tmp_path / "whole").touch()
        assert numbers_of(list(whole)) == [("whole", 101, 1)], "its client had sent all, so it ends well"
        requests.put(None)
        ended.join()
    assert gateway.process.returncode == 0
