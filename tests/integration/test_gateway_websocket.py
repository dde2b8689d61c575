"""WebSockets through the gateway, with real workers: frames, requests side by side, limits, ends."""

from __future__ import annotations

import json
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from carpool_gateway.websocket import LINGER_S
from support.http import Connection, call
from support.models.stepping import text_of
from support.oip import with_binary
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until
from support.websocket import BINARY, CLOSE, CONT, PING, PONG, TEXT, Socket, frame, handshake

ECHO: Final = "/carpool/v1/models/Echo/stream"
COUNTER: Final = "/v2/models/Counter/stream"
CHAIN: Final = "/carpool/v1/models/Chain/stream"
BODY_BYTES_MAX: Final = 1024 * 1024


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(
            "plain.py:Echo", "plain.py:Rows", "plain.py:Noop", "triton.py:Counter", "stepping.py:Chain"
        )
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway("--body-bytes-max", str(BODY_BYTES_MAX))


def count(numbers: int, request_id: str = "1", **parameters: Any) -> dict[str, Any]:
    tensor = {"name": "count", "datatype": "INT32", "shape": [1, 1], "data": [numbers]}
    return {"id": request_id, "inputs": [tensor], "parameters": parameters}


# --- requests and responses --------------------------------------------------------------------------------


def test_values_and_their_ends(gateway: Service) -> None:
    with Socket(gateway.url, ECHO, Sec_WebSocket_Protocol="carpool") as socket:
        assert socket.opened.headers["sec-websocket-protocol"] == "carpool"
        for at, value in enumerate((7, "caf\u00e9", {"a": [1, None]}, [], 2**63, "x" * 100_000)):
            socket.send({"id": str(at), "body": value})
            chunk, end = socket.until_end(str(at))
            assert chunk == {"id": str(at), "chunk": value}
            assert end["end"]["responses"] == 1
            assert end["end"]["queue_us"] >= 0
        socket.raw(frame(CLOSE, struct.pack(">H", 1000)))
        assert socket.frame() == (CLOSE, struct.pack(">H", 1000))
        assert socket.rest() == b""


def test_responses_are_those_of_infer(gateway: Service) -> None:
    with Socket(gateway.url, COUNTER) as socket:
        socket.send(count(30))
        *responses, end = socket.until_end()
        assert [one["outputs"][0]["data"] for one in responses] == [[number] for number in range(30)]
        assert responses[3]["model_name"] == "Counter"
        assert end["end"]["responses"] == 30


def test_requests_are_side_by_side(gateway: Service, gate: Path) -> None:
    with Socket(gateway.url, CHAIN) as socket:
        socket.send({"id": "slow", "body": {"length": 2, "gate": str(gate)}})
        socket.send({"id": "quick", "body": {"length": 3, "seed": 1}})
        *chunks, end = socket.until_end("quick")
        assert {one["id"] for one in chunks} == {"quick"}
        text = "".join(one["chunk"] for one in chunks)
        assert text == text_of(end["end"]["correlation_id"], 3, 1)
        socket.send({"id": "slow", "body": 1})
        assert "request without an end" in socket.json()["error"]
        gate.touch()
        assert "end" in socket.until_end("slow")[-1]


def test_tensors_in_binary_messages(gateway: Service) -> None:
    rows = np.random.default_rng(7).random((3, 128), np.float32)
    body, length = with_binary(
        ("numbers", "FP32", rows.shape, rows.tobytes()), id="1", parameters={"binary_data_output": True}
    )
    with Socket(gateway.url, "/v2/models/Noop/versions/1/stream") as socket:
        socket.send(struct.pack(">I", int(length)) + body)
        opcode, message = socket.message()
        assert opcode == BINARY
        (size,) = struct.unpack_from(">I", message)
        document, data = json.loads(message[4 : 4 + size]), message[4 + size :]
        assert (document["id"], document["outputs"][0]["shape"]) == ("1", [3, 128])
        assert data == rows.tobytes()
        assert socket.json()["end"] == {"responses": 1}
        for wrong in (b"", b"\0\0", struct.pack(">I", 100) + b"{}", struct.pack(">I", 1) + b"{}"):
            socket.send(wrong)
            assert socket.json()["status"] == "INVALID_ARGUMENT"


def test_what_is_wrong_is_told_and_the_connection_goes_on(gateway: Service) -> None:
    with Socket(gateway.url, COUNTER) as socket:
        for message, status in (
            ([], "INVALID_ARGUMENT"),
            ({"id": 7}, "INVALID_ARGUMENT"),
            ({"id": "1"}, "INVALID_ARGUMENT"),
            ({"id": "1", "inputs": []}, "INVALID_ARGUMENT"),
            ({**count(1), "parameters": {"a": []}}, "INVALID_ARGUMENT"),
            (count(1, timeout=10**15), "INVALID_ARGUMENT"),
        ):
            socket.send(message)
            error = socket.json()
            assert error["status"] == status, error
            assert error["error"]
        socket.raw(frame(TEXT, b'{"id": "2", '))
        assert "not JSON" in socket.json()["error"]
        socket.send(count(1, "3"))
        assert "end" in socket.until_end("3")[-1]
    with Socket(gateway.url, "/v2/models/NONE/stream") as socket:
        socket.send({"id": "1", "body": 7})
        assert socket.json()["status"] == "NOT_FOUND"
    with Socket(gateway.url, CHAIN) as socket:
        socket.send({"id": "1", "body": {"length": 5, "raises_at": 2}})
        *chunks, error = socket.until_end()
        assert chunks
        assert error["status"] == "INTERNAL"


def test_a_request_is_withdrawn_by_its_id(gateway: Service, shared: Stack, gate: Path) -> None:
    with Socket(gateway.url, CHAIN) as socket:
        socket.send({"id": "1", "body": {"length": 5, "gate": str(gate)}})
        socket.send({"cancel": "none"})
        socket.send({"cancel": "1"})
        assert socket.json()["status"] == "CANCELLED"
        shared.wait_until_idle("Chain")  # the gate is still closed
        both = frame(TEXT, json.dumps({"id": "1", "body": {"length": 5, "gate": str(gate)}}).encode())
        socket.raw(both + frame(TEXT, b'{"cancel": "1"}'))  # before it was even begun
        assert socket.json()["status"] == "CANCELLED"
        shared.wait_until_idle("Chain")


def test_a_client_that_goes_withdraws_its_requests(gateway: Service, shared: Stack, gate: Path) -> None:
    for way in ("close", "reset"):
        socket = Socket(gateway.url, CHAIN)
        for at in range(5):
            socket.send({"id": str(at), "body": {"length": 5, "gate": str(gate)}})
        wait_until(lambda: shared.redis.xlen("carpool:{Chain}:batches") == 5, description="they are executed")
        getattr(socket, way)()
        shared.wait_until_idle("Chain")  # the gate is still closed


def test_a_window_bounds_the_requests(gateway: Service, gate: Path) -> None:
    with Socket(gateway.url, CHAIN) as socket:
        for at in range(70):
            socket.send({"id": str(at), "body": {"length": 1, "gate": str(gate)}})
        refused = [socket.json() for _ in range(6)]
        assert {one["status"] for one in refused} == {"RESOURCE_EXHAUSTED"}
        assert {one["id"] for one in refused} == {str(at) for at in range(64, 70)}
        gate.touch()
        ended = {one["id"] for one in [socket.json() for _ in range(128)] if "end" in one}
        assert ended == {str(at) for at in range(64)}


def test_a_stream_goes_on_after_its_process_was_killed(gateway: Service) -> None:
    with Socket(gateway.url, COUNTER) as socket:
        socket.send(count(20, KILLS_AT=7))
        *responses, end = socket.until_end()
        assert [one["outputs"][0]["data"] for one in responses] == [[number] for number in range(20)]
        assert end["end"]["responses"] == 20


# --- frames ------------------------------------------------------------------------------------------------


def test_messages_may_be_divided(gateway: Service) -> None:
    text = json.dumps({"id": "1", "body": "caf\u00e9 " * 50}, ensure_ascii=False).encode()
    with Socket(gateway.url, ECHO) as socket:
        parts = [text[at : at + 7] for at in range(0, len(text), 7)]  # also within a character
        for at, part in enumerate(parts):
            socket.raw(frame(PING, b"%d" % at))
            assert socket.frame() == (PONG, b"%d" % at)
            socket.raw(frame(CONT if at else TEXT, part, fin=at == len(parts) - 1))
        assert socket.json()["chunk"] == "caf\u00e9 " * 50
        whole = frame(TEXT, b'{"id": "2", "body": 7}')
        for byte in whole:
            socket.raw(bytes([byte]))
        assert socket.until_end("2")[-2]["chunk"] == 7


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (frame(TEXT, b"{}", mask=None), 1002),
        (frame(TEXT, b"{}", rsv=4), 1002),
        (frame(3, b""), 1002),
        (frame(PING, b"x" * 126), 1002),
        (frame(PING, b"", fin=False), 1002),
        (frame(CONT, b"{}"), 1002),
        (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
        (frame(CLOSE, b"\x03"), 1002),
        (frame(TEXT, b'"\xff"'), 1007),
        (frame(TEXT, b'"\xc3', fin=False) + frame(CONT, b'"'), 1007),
        (frame(BINARY, b"x" * BODY_BYTES_MAX), None),
        (frame(BINARY, bytes(BODY_BYTES_MAX + 1))[:100], 1009),
        (
            b"".join(
                frame(BINARY if at == 0 else CONT, bytes(BODY_BYTES_MAX // 4), fin=False) for at in range(5)
            ),
            1009,
        ),
    ],
)
def test_what_is_malformed_closes_the_connection(gateway: Service, data: bytes, code: int | None) -> None:
    with Socket(gateway.url, ECHO) as socket:
        socket.raw(data)
        if code is None:  # a message that is as large as may be, and says nothing
            assert socket.json()["status"] == "INVALID_ARGUMENT"
            return
        found, reason = socket.closed()
        assert found == code
        assert code != 1009 or str(BODY_BYTES_MAX) in reason
    assert call(gateway.url, "GET", "/healthz").code == 200


# --- the handshake -----------------------------------------------------------------------------------------


def opened(url: str, path: str = ECHO, **headers: str) -> int:
    with Connection(url) as connection:
        connection.send(handshake(path, **headers))
        return connection.answer(has_body=False).code


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Upgrade": ""}, 426),
        ({"Upgrade": "h2c"}, 426),
        ({"Connection": "close"}, 400),
        ({"Sec_WebSocket_Version": "8"}, 426),
        ({"Sec_WebSocket_Key": ""}, 400),
        ({"Sec_WebSocket_Key": "abc"}, 400),
        ({"Origin": "http://127.0.0.1:9999"}, 403),
        ({"Origin": "http://127.0.0.1"}, 101),
        ({"Origin": "http://127.0.0.1:80"}, 101),
        ({"Origin": "https://else.example"}, 403),
        ({"Origin": "null"}, 403),
    ],
)
def test_handshakes(gateway: Service, headers: dict[str, str], code: int) -> None:
    assert opened(gateway.url, **headers) == code


@pytest.mark.parametrize(("before", "after"), [(b"GET", b"HEAD"), (b"HTTP/1.1", b"HTTP/1.0")])
def test_other_requests_are_no_handshakes(gateway: Service, before: bytes, after: bytes) -> None:
    with Connection(gateway.url) as connection:
        connection.send(handshake(ECHO).replace(before, after, 1))
        assert connection.answer(has_body=False).code == 400


def test_keys_and_origins(shared: Stack, tmp_path: Path) -> None:
    from hashlib import sha256

    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[keys]]\nname = "web"\nsha256 = "{sha256(b"secret").hexdigest()}"\nmodels = ["Echo"]\n'
    )
    gateway = shared.gateway("--keys", str(keys), "--origins", "https://app.example")
    url = gateway.url
    assert opened(url) == 401
    assert opened(url, Authorization="Bearer secret") == 101
    assert opened(url, CHAIN, Authorization="Bearer secret") == 403
    assert opened(url, Sec_WebSocket_Protocol="carpool, carpool.key.wrong") == 401
    assert opened(url, Sec_WebSocket_Protocol="carpool.key.secret", Origin="https://else.example") == 403
    with Socket(
        url, ECHO, Sec_WebSocket_Protocol="carpool, carpool.key.secret", Origin="https://app.example"
    ) as socket:
        assert socket.opened.headers["sec-websocket-protocol"] == "carpool"
        socket.send({"id": "1", "body": 7})
        assert socket.until_end()[0]["chunk"] == 7
    assert gateway.terminate() == 0


# --- readers and ends --------------------------------------------------------------------------------------


def held_bytes(gateway: Service) -> int:
    text = call(gateway.url, "GET", "/metrics").body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith("carpool_gateway_body_bytes ")]
    return int(float(line.split()[1]))


def test_what_is_read_slowly_is_counted_and_bounded(shared: Stack) -> None:
    gateway = shared.gateway("--memory-bytes-max", str(2 * BODY_BYTES_MAX), "--body-bytes-max", "65536")
    shared.serve("stepping.py:endless")
    before = shared.last_batch_id("endless")
    with Socket(gateway.url, "/carpool/v1/models/endless/stream") as socket:
        socket.send({"id": "1", "body": {"text": "x" * 10_000}})
        wait_until(lambda: shared.last_batch_id("endless") != before, description="it is dispatched")
        shared.wait_until_idle("endless")  # it was withdrawn
        assert held_bytes(gateway) < 4 * BODY_BYTES_MAX
        error = socket.until_end()[-1]
        assert (error["status"], "too slowly" in error["error"]) == ("RESOURCE_EXHAUSTED", True)
        socket.send({"id": "2", "body": {"text": "a", "count": 2}})
        assert "end" in socket.until_end("2")[-1]
    wait_until(lambda: held_bytes(gateway) == 0, description="nothing is held")
    assert gateway.terminate() == 0


def test_a_gateway_that_stops_ends_what_runs(shared: Stack, gate: Path) -> None:
    gateway = shared.gateway()
    with Socket(gateway.url, CHAIN) as idle, Socket(gateway.url, CHAIN) as socket:
        socket.send({"id": "1", "body": {"length": 3, "gate": str(gate)}})
        wait_until(lambda: shared.redis.xlen("carpool:{Chain}:batches") == 1, description="it is executed")
        gateway.signal(signal.SIGTERM)
        assert idle.closed()[0] == 1001
        socket.send({"id": "2", "body": {"length": 1}})
        assert socket.json()["status"] == "UNAVAILABLE"
        gate.touch()
        *chunks, end = socket.until_end()
        assert "".join(one["chunk"] for one in chunks) == text_of(end["end"]["correlation_id"], 3)
        assert socket.closed()[0] == 1001
    assert gateway.process.wait(EVENTUALLY_S) == 0


def test_clients_that_do_not_answer_a_close_are_cut_off(gateway: Service) -> None:
    with Socket(gateway.url, ECHO) as socket:
        socket.raw(frame(TEXT, b'"\xff"'))
        assert socket.frame()[0] == CLOSE
        assert socket.rest() == b""
    assert LINGER_S < EVENTUALLY_S


def test_requests_are_counted(gateway: Service) -> None:
    def counted() -> int:
        text = call(gateway.url, "GET", "/metrics").body.decode()
        name = 'carpool_gateway_requests_total{code="200",route="websocket_request"}'
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(name))

    before = counted()
    with Socket(gateway.url, ECHO) as socket:
        for at in range(3):
            socket.send({"id": str(at), "body": at})
            socket.until_end(str(at))
    assert counted() == before + 3


def test_sockets_of_many_threads(gateway: Service) -> None:
    failures: list[BaseException] = []

    def use(number: int) -> None:
        try:
            with Socket(gateway.url, ECHO) as socket:
                for at in range(20):
                    socket.send({"id": str(at), "body": [number, at]})
                found: dict[str, Any] = {}
                while len(found) < 20:
                    message = socket.json()
                    if "chunk" in message:
                        found[message["id"]] = message["chunk"]
                assert found == {str(at): [number, at] for at in range(20)}
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- as AMD's inference server has it ----------------------------------------------------------------------


def test_first_outputs_of_any_model(gateway: Service) -> None:
    rows = np.arange(128, dtype=np.float32)
    tensor = {"name": "numbers", "datatype": "FP32", "shape": [1, 128], "data": rows.tolist()}
    with Socket(gateway.url, "/models/infer") as socket:
        socket.send({"model": "Noop", "inputs": [tensor]})
        assert socket.message() == (BINARY, rows.tobytes())
        body = {"name": "body", "datatype": "BYTES", "shape": [1, 1], "data": ["a text"]}
        socket.send({"model": "Echo", "inputs": [body]})
        assert socket.message() == (TEXT, b"a text")
        socket.send({"model": "Echo", "inputs": [{**body, "data": ["x" * 100_000]}]})
        assert socket.message() == (TEXT, b"x" * 100_000)
        socket.send({"model": "Noop", "inputs": []})
        opcode, message = socket.message()
        assert opcode == TEXT
        assert b"expected 1 inputs but got 0" in message
        socket.send({"inputs": []})
        assert socket.closed()[0] == 1007
