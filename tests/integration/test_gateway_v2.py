"""The Open Inference Protocol through the gateway, with real workers: what oip's own tests cannot see."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import MagicMock

import msgspec
import numpy as np
import pytest

from carpool.keys import Keys
from carpool_gateway.app import routes_of
from carpool_gateway.openapi import ANY, CONTENTS
from carpool_gateway.routes import Router
from carpool_gateway.schemas import Error, OpenAIError
from support.fuzzing_gateway import fuzz
from support.http import Answer, Connection, call, request
from support.models.plain import GATE_S
from support.oip import with_binary
from support.stack import Service, Stack
from support.waiting import wait_until

NOOP: Final = "/v2/models/Noop/infer"
ROUTER: Final = Router(routes_of(*[cast(Any, MagicMock())] * 4))
SERVED_MEANWHILE_MIN: Final = 40  # requests; a dozen come between the pieces of the large one


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(
            "plain.py:Noop", "plain.py:Rows", "plain.py:Echo", "plain.py:Noting", "faulty.py:Faulty", "square"
        )
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway()


def rows_of(count: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(count).random((count, 128), np.float32)


def infer(gateway: Service, model: str, document: dict[str, Any], **headers: str) -> Answer:
    return call(gateway.url, "POST", f"/v2/models/{model}/infer", json.dumps(document).encode(), **headers)


def bodies(*elements: str, **more: Any) -> dict[str, Any]:
    """A request for a model that declares nothing, with JSON as its bodies."""
    tensor = {"name": "body", "datatype": "BYTES", "shape": [len(elements), 1], "data": list(elements)}
    return {"inputs": [{**tensor, "parameters": {"content_type": "application/json"}}], **more}


def test_the_server_has_the_name_that_some_clients_look_for(shared: Stack) -> None:
    named = shared.gateway("--server-name", "triton")
    assert call(named.url, "GET", "/v2").json["name"] == "triton"
    assert named.terminate() == 0


def test_documents(gateway: Service) -> None:
    for path in ("/v2", "/v2/"):
        document = call(gateway.url, "GET", path).json
        assert document["name"] == "carpool"
        assert "binary_tensor_data" in document["extensions"]
    for which in ("live", "ready"):
        assert call(gateway.url, "GET", f"/v2/health/{which}").json == {"live": True, "ready": True}
    for path in ("/v2/models/Noop", "/v2/models/Noop/versions/1"):
        tensor = {"name": "numbers", "datatype": "FP32", "shape": [-1, 128]}
        document = call(gateway.url, "GET", path).json
        assert (document["inputs"], document["outputs"]) == ([tensor], [tensor])
    assert call(gateway.url, "GET", "/v2/models/Noop/config").json["max_batch_size"] == 64
    assert call(gateway.url, "GET", "/v2/models/Noop/ready").json == {"name": "Noop", "ready": True}
    assert call(gateway.url, "GET", "/v2/models/Noop/versions/1/ready").code == 200
    for path in ("/v2/models/NONE", "/v2/models/NONE/ready", "/v2/models/NONE/config"):
        answer = call(gateway.url, "GET", path)
        assert (answer.code, answer.json["error"]) == (404, "Request for unknown model: 'NONE' is not found")
    assert infer(gateway, "NONE", bodies("1")).code == 404
    assert call(gateway.url, "GET", "/v2/models/Noop/versions/2").code == 404
    assert call(gateway.url, "GET", "/v2/models/Noop/nothing").code == 404
    assert call(gateway.url, "GET", NOOP).headers["allow"] == "POST"
    assert call(gateway.url, "POST", "/v2/health/live").code == 405


@pytest.mark.parametrize("count", [1, 2, 7, 8, 64, 1024])
def test_binary_rows_come_back_as_they_went(gateway: Service, count: int) -> None:
    rows = rows_of(count)
    body, length = with_binary(
        ("numbers", "FP32", rows.shape, rows.tobytes()), id="42", parameters={"binary_data_output": True}
    )
    answer = call(gateway.url, "POST", NOOP, body, Inference_Header_Content_Length=length.decode())
    assert answer.code == 200, answer
    assert answer.headers["content-type"] == "application/octet-stream"
    size = int(answer.headers["inference-header-content-length"])
    document, data = json.loads(answer.body[:size]), answer.body[size:]
    assert document["id"] == "42"
    assert document["model_name"] == "Noop"
    (output,) = document["outputs"]
    assert output["shape"] == [count, 128]
    assert output["parameters"]["binary_data_size"] == len(data)
    assert data == rows.tobytes()


def test_json_rows_with_any_content_type(gateway: Service) -> None:
    rows = rows_of(3)
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [3, 128], "data": rows.tolist()}
    for headers in (
        {},
        {"Content_Type": "application/json"},
        {"Content_Type": "application/x-www-form-urlencoded"},
    ):
        answer = infer(gateway, "Noop", {"inputs": [tensor]}, **headers)
        assert answer.headers["content-type"] == "application/json"
        assert "inference-header-content-length" not in answer.headers
        (output,) = answer.json["outputs"]
        assert np.array_equal(np.array(output["data"], np.float32), rows.reshape(-1))
    body = gzip.compress(json.dumps({"inputs": [tensor]}).encode())
    assert call(gateway.url, "POST", NOOP, body, Content_Encoding="gzip").code == 200


def test_responses_are_compressed_for_those_who_accept_it(gateway: Service) -> None:
    rows = np.ones((64, 128), np.float32)
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [64, 128], "data": rows.tolist()}
    plain = infer(gateway, "Noop", {"inputs": [tensor]})
    assert "content-encoding" not in plain.headers
    assert plain.headers["vary"] == "accept-encoding"
    for accepted, coding, decompress in (
        ("gzip, deflate", "gzip", gzip.decompress),
        ("deflate", "deflate", zlib.decompress),
        ("gzip;q=0", None, bytes),
    ):
        answer = infer(gateway, "Noop", {"inputs": [tensor]}, Accept_Encoding=accepted)
        assert answer.headers.get("content-encoding") == coding
        assert decompress(answer.body) == plain.body
    body, length = with_binary(
        ("numbers", "FP32", rows.shape, rows.tobytes()), parameters={"binary_data_output": True}
    )
    headers = {"Inference_Header_Content_Length": length.decode()}
    answer = call(gateway.url, "POST", NOOP, body, **headers, Accept_Encoding="gzip")
    size = int(answer.headers["inference-header-content-length"])  # of what is compressed
    assert gzip.decompress(answer.body)[size:] == rows.tobytes()
    noise = np.random.default_rng(1).bytes(rows.nbytes - 512)  # compressed, it would be no shorter
    body, length = with_binary(
        ("numbers", "FP32", rows.shape, bytes(512) + noise), parameters={"binary_data_output": True}
    )
    headers = {"Inference_Header_Content_Length": length.decode()}
    answer = call(gateway.url, "POST", NOOP, body, **headers, Accept_Encoding="gzip")
    assert "content-encoding" not in answer.headers
    small = {**tensor, "shape": [1, 128], "data": [0] * 128}
    assert "vary" not in infer(gateway, "Noop", {"inputs": [small]}, Accept_Encoding="gzip").headers


def test_large_json_does_not_hold_up_others(gateway: Service) -> None:
    """Half a million numbers, of which one needs the slowest way, are read for half a second."""
    count = 499_968
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [count // 128, 128], "data": [0.25] * count}
    body = json.dumps({"inputs": [{**tensor, "data": [*tensor["data"][1:], float("nan")]}]}).encode()
    infer(gateway, "Noop", {"inputs": []})  # from now on the gateway knows the model

    def served_meanwhile() -> int:
        """How many small requests are served while the large one is: few if this process is held up."""
        served = 0
        with Connection(gateway.url) as large, Connection(gateway.url) as small:
            large.send(request("POST", NOOP, body))
            while not large.is_readable:
                assert small.request("GET", "/v2/health/live").code == 200
                served += 1
            assert large.answer().code == 400
        return served

    wait_until(lambda: served_meanwhile() > SERVED_MEANWHILE_MIN, description="many are served meanwhile")


def test_models_without_tensors(gateway: Service) -> None:
    answer = infer(gateway, "square", bodies("7", "8"))
    assert [output["data"] for output in answer.json["outputs"]] == [["49", "64"]]


def test_parameters_reach_the_model(gateway: Service) -> None:
    document = bodies('"about"', parameters={"colour": "blue", "priority": 1, "timeout": 20_000_000})
    answer = infer(gateway, "Echo", document, Carpool_Tenant="acme")
    assert answer.code == 200, answer
    _, _, fields = json.loads(answer.json["outputs"][0]["data"][0])
    assert fields["colour"] == "blue"
    assert fields["tenant"] == "acme"


@pytest.mark.parametrize(
    ("document", "code"),
    [
        ({}, 400),
        ({"inputs": []}, 400),
        ({"inputs": [{"name": "numbers", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}, 400),
        ({"inputs": [{"name": "numbers", "datatype": "INT32", "shape": [1, 128], "data": [1] * 128}]}, 400),
        ({"inputs": [{"name": "numbers", "datatype": "FP32", "shape": [2000, 128], "data": []}]}, 400),
    ],
)
def test_what_does_not_suit_the_model_is_refused(gateway: Service, document: Any, code: int) -> None:
    answer = infer(gateway, "Noop", document)
    assert (answer.code, answer.headers["content-type"]) == (code, "application/json")
    assert answer.json["error"]


def test_a_row_that_fails_is_the_answer(gateway: Service) -> None:
    answer = infer(gateway, "Faulty", bodies("1", '"raise"', "2"))
    assert (answer.code, answer.json["status"]) == (500, "INTERNAL")
    assert answer.json["error"].startswith("row 1: ")
    assert infer(gateway, "Faulty", bodies("1", "2")).code == 200


def test_a_timeout_is_in_microseconds(gateway: Service, shared: Stack, tmp_path: Path, gate: Path) -> None:
    notes = tmp_path / "notes"
    body = json.dumps({"name": "a", "notes": str(notes), "gate": str(gate)})
    with Connection(gateway.url) as connection:
        connection.send(request("POST", "/v2/models/Noting/infer", json.dumps(bodies(body)).encode()))
        wait_until(notes.exists, description="it is executed")
        answer = infer(gateway, "Noting", bodies(body, parameters={"timeout": 200_000}))
        assert (answer.code, answer.json["status"]) == (504, "DEADLINE_EXCEEDED")
        gate.touch()
        assert connection.answer().code == 200
    shared.wait_until_idle("Noting")


def test_rows_are_withdrawn_when_their_client_goes(
    gateway: Service, shared: Stack, tmp_path: Path, gate: Path
) -> None:
    notes = tmp_path / "notes"

    def row(name: str, **more: str) -> str:
        return json.dumps({"name": name, "notes": str(notes), **more})

    first = Connection(gateway.url)
    names = [row("first", gate=str(gate)), *(row(f"row-{at}") for at in range(100))]
    document = bodies(*names, parameters={"timeout": 200_000_000})  # or they would expire meanwhile
    first.send(request("POST", "/v2/models/Noting/infer", json.dumps(document).encode()))
    wait_until(notes.exists, description="the first row is executed")

    def waiting() -> int:  # as the batcher reports twice a second
        report = json.loads(shared.redis.get(Keys("Noting").report) or b"{}")
        return int(report["gauges"]["waiting"]) if report else 0

    wait_until(lambda: waiting() >= 90, description="the others wait")
    first.close()
    wait_until(lambda: waiting() == 0, description="the others are withdrawn", timeout_s=GATE_S / 2)
    gate.touch()
    shared.wait_until_idle("Noting")
    assert len(notes.read_text().split()) <= 3


def test_settings_that_an_operator_overrides_are_shown(gateway: Service, shared: Stack) -> None:
    shared.configure("Rows", max_batch_size="16")
    wait_until(
        lambda: call(gateway.url, "GET", "/v2/models/Rows/config").json["max_batch_size"] == 16,
        description="the gateway shows it",
    )


# --- statistics, the repository, and what describes all of this ---------------------------------------------


def statistics(gateway: Service, model: str) -> dict[str, Any]:
    (found,) = call(gateway.url, "GET", f"/v2/models/{model}/stats").json["model_stats"]
    assert (found["name"], found["version"]) == (model, "1")
    return dict(found)


def test_statistics_count_rows(gateway: Service, shared: Stack) -> None:
    before = statistics(gateway, "Faulty")
    assert infer(gateway, "Faulty", bodies("1", "2", "3")).code == 200
    assert infer(gateway, "Faulty", bodies('"raise"')).code == 500
    after = statistics(gateway, "Faulty")
    requests = after["inference_stats"]
    gained = {name: requests[name]["count"] - before["inference_stats"][name]["count"] for name in requests}
    assert gained == {
        "success": 3, "fail": 1, "queue": 3, "compute_input": 3, "compute_infer": 3, "compute_output": 3,
        "cache_hit": 0, "cache_miss": 0,
    }  # fmt: skip
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["last_inference"] >= before["last_inference"]
    assert requests["success"]["ns"] >= requests["queue"]["ns"] + requests["compute_infer"]["ns"]
    other = shared.gateway()
    assert statistics(other, "Faulty") == after
    assert call(other.url, "GET", "/v2/models/Faulty/versions/1/stats").json["model_stats"] == [after]
    everything = call(other.url, "GET", "/v2/models/stats").json["model_stats"]
    assert {of_model["name"] for of_model in everything} == set(shared.models())
    assert after in everything
    other.kill()


def test_statistics_of_no_model(gateway: Service) -> None:
    assert call(gateway.url, "GET", "/v2/models/NONE/stats").code == 404
    assert call(gateway.url, "GET", "/v2/models/Noop/versions/2/stats").code == 404
    assert call(gateway.url, "POST", "/v2/models/stats").headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("body", [b"", b"{}", b'{"ready":true}', b'{"ready":false}'])
def test_index_of_the_repository(gateway: Service, shared: Stack, body: bytes) -> None:
    found = call(gateway.url, "POST", "/v2/repository/index", body).json
    expected = {"version": "1", "state": "READY", "reason": ""}
    assert sorted(found, key=lambda entry: str(entry["name"])) == [
        {"name": name, **expected} for name in sorted(shared.models())
    ]


def test_index_has_models_that_nobody_serves(gateway: Service, shared: Stack) -> None:
    shared.redis.sadd("carpool:models", "Gone", "Coming", "Forgotten")
    for name in ("Gone", "Coming"):
        shared.redis.hset(Keys(name).registration, "model", name)
    shared.redis.hset(Keys("Coming").loading, "worker", "w")
    try:
        found = call(gateway.url, "POST", "/v2/repository/index").json
        ready = call(gateway.url, "POST", "/v2/repository/index", b'{"ready":true}').json
    finally:
        shared.redis.srem("carpool:models", "Gone", "Coming", "Forgotten")
        shared.redis.delete(Keys("Gone").registration, Keys("Coming").registration, Keys("Coming").loading)
    states = {entry["name"]: (entry["state"], bool(entry["reason"])) for entry in found}
    assert states["Gone"] == ("UNAVAILABLE", True)
    assert states["Coming"] == ("LOADING", True)
    assert "Forgotten" not in states
    assert {entry["name"] for entry in ready} == set(states) - {"Gone", "Coming"}


@pytest.mark.parametrize("body", [b"[]", b'{"ready":1}', b"{", b'"ready"'])
def test_index_refuses_what_is_no_request(gateway: Service, body: bytes) -> None:
    answer = call(gateway.url, "POST", "/v2/repository/index", body)
    assert (answer.code, answer.json["status"]) == (400, "INVALID_ARGUMENT")


def test_answers_are_as_the_openapi_document_says(gateway: Service) -> None:
    document = call(gateway.url, "GET", "/openapi.json").json
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 128], "data": [0.0] * 128}
    sent = {
        "/v2/models/{model}/infer": json.dumps({"inputs": [tensor]}).encode(),
        "/v2/models/{model}/versions/{version}/infer": json.dumps({"inputs": [tensor], "id": "7"}).encode(),
        "/v2/repository/index": b"{}",
    }
    for path, operations in document["paths"].items():
        for method in operations:
            place = path.format(model="Noop", version="1", id="none", repository="any")
            answer = call(gateway.url, method.upper(), place, sent.get(path, b""))
            content = CONTENTS[method.upper(), _name_of(path)]
            error = OpenAIError if path.startswith("/v1/") else Error
            media = content.responses.get(answer.code, {"application/json": error})
            kind = answer.headers.get("content-type", "").partition(";")[0]
            assert not media or kind in media or ANY in media, (path, answer)
            if media.get(kind) is not None:
                decoded = msgspec.json.decode(answer.body, type=media[kind])
                assert_same(answer.json, msgspec.to_builtins(decoded))
            if path in sent:
                assert answer.code == 200, answer


def _name_of(path: str) -> str:
    place = ROUTER.find(path.format(model="Noop", version="1", id="none", repository="any"))
    return next(iter(place.routes.values())).name


def assert_same(document: Any, decoded: Any) -> None:
    """The type has all that the document has; what it has besides was left out of that."""
    if isinstance(document, dict):
        for name, value in document.items():
            assert name in decoded, name
            assert_same(value, decoded[name])
        assert not any(value for name, value in decoded.items() if name not in document)
    elif isinstance(document, list):
        assert len(document) == len(decoded)
        for one, other in zip(document, decoded, strict=True):
            assert_same(one, other)
    else:
        assert document == decoded


def test_hostile_requests_are_answered(gateway: Service, shared: Stack) -> None:
    """As `make fuzz` does for hours. A line about a failure names the request."""
    codes = fuzz(shared, gateway, 1000, seed=7)
    assert codes[200] > 50
    assert codes[400] > 300
