"""The gateway with real workers: results, options, errors, many bodies, streams, kept results, and clients
that go away."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from carpool.keys import Keys
from support.http import Answer, Connection, call, request
from support.models.stepping import text_of
from support.stack import Service, Stack, fixed_keys
from support.waiting import Stopwatch, wait_until

PNG = b"\x89PNG..."
PATIENT = {"Carpool_Timeout_Ms": "200000"}  # of requests that are not to expire, however busy this machine is
MODELS = (
    "plain.py:Echo",
    "plain.py:label",
    "plain.py:image",
    "plain.py:Noting",
    "plain.py:Few",
    "faulty.py:Faulty",
    "stepping.py:Chain",
    "stepping.py:countdown",
    "keeping.py:Keeping",
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(*MODELS)
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway()


def infer(gateway: Service, model: str, body: bytes | str, **headers: str) -> Answer:
    data = body.encode() if isinstance(body, str) else body
    return call(gateway.url, "POST", f"/carpool/v1/models/{model}/infer", data, **headers)


def send(connections: ExitStack, gateway: Service, path: str, body: bytes) -> Connection:
    """Send a patient request on a connection of its own, which is closed with `connections`.

    It is sent as soon as it is connected: the gateway closes a connection that brings no request for long.
    """
    connection = connections.enter_context(Connection(gateway.url))
    connection.send(request("POST", path, body, **PATIENT))
    return connection


def curl(*arguments: str) -> bytes:
    program = shutil.which("curl")
    if program is None:
        pytest.skip("curl is missing: install the package curl")
    command = [program, "-sS", "--max-time", "45", *arguments]
    return subprocess.run(command, check=True, capture_output=True).stdout


# --- results -----------------------------------------------------------------------------------------------


def test_a_picture_in_and_a_label_out_with_curl(gateway: Service, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(PNG * 100_000)
    url = f"{gateway.url}/carpool/v1/models/label/infer"
    got = curl("--data-binary", f"@{picture}", "-H", "Content-Type: image/png", url)
    assert json.loads(got) == {"bytes": 700_000}
    got = curl("-d", '"cat"', "-H", "Accept: image/png", f"{gateway.url}/carpool/v1/models/image/infer")
    assert got == b"\x89PNG cat"
    assert curl("-d", "[1, 2.5]", f"{gateway.url}/carpool/v1/models/Echo/infer") == b"[1,2.5]"


@pytest.mark.parametrize("size", [0, 1, 16_383, 16_384, 1_000_000])
def test_results_are_the_bytes_of_the_model(gateway: Service, size: int) -> None:
    body = os.urandom(size)
    answer = infer(gateway, "Echo", body, Content_Type="application/octet-stream")
    assert (answer.code, answer.body) == (200, body)
    assert answer.headers["content-type"] == "application/octet-stream"


def test_figures_are_in_headers(gateway: Service) -> None:
    answer = infer(gateway, "Echo", "7", Carpool_Correlation_Id="order-17", X_Request_Id="mine")
    assert answer.headers["carpool-correlation-id"] == "order-17"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["carpool-batch-size"]) >= 1
    assert int(answer.headers["carpool-queue-us"]) >= 0
    assert int(answer.headers["carpool-compute-us"]) > 0


def test_options_reach_the_model(gateway: Service) -> None:
    answer = infer(
        gateway,
        "Echo",
        '"about"',
        Carpool_Lane="left",
        Carpool_Priority="9",
        Carpool_Cost="2",
        Carpool_Tenant="acme",
        Carpool_Timeout_Ms="20000",
        Carpool_Field_Colour="blue",
        Traceparent="00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        Carpool_Correlation_Id="about-1",
    )
    assert answer.code == 200, answer
    name, lane, fields = answer.json
    assert (name, lane) == ("about-1", "left")
    assert fields == {
        "tenant": "acme",
        "colour": "blue",
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    }


def test_compressed_bodies(gateway: Service) -> None:
    body = json.dumps(["x" * 100_000]).encode()
    assert infer(gateway, "Echo", gzip.compress(body), Content_Encoding="gzip").json == ["x" * 100_000]
    answer = infer(gateway, "Echo", body, Content_Encoding="br")
    assert (answer.code, answer.headers["accept-encoding"]) == (415, "gzip, deflate")


def test_sequences_share_their_state(gateway: Service) -> None:
    answers = [
        infer(
            gateway,
            "Keeping",
            json.dumps({"text": text}),
            Carpool_Sequence_Id="mic-7",
            Carpool_Sequence_Start="true" if text == "a" else "false",
        ).json
        for text in "abc"
    ]
    assert [answer.partition(":")[0] for answer in answers] == ["1", "2", "3"]


# --- errors ------------------------------------------------------------------------------------------------


def test_the_time_in_which_a_model_is_loaded_is_a_part_of_timeout_and_delay(
    gateway: Service, shared: Stack
) -> None:
    keys, asked = Keys("Loading"), {"Carpool_Timeout_Ms": "60000", "Carpool_Not_Before_Ms": "50000"}
    shared.redis.hset(keys.loading, "worker", "w")
    with Connection(gateway.url) as connection:
        waited = Stopwatch()
        connection.send(request("POST", "/carpool/v1/models/Loading/infer", b"1", **asked))
        wait_until(lambda: waited.elapsed_s > 0.5, description="it waits for the model")
        shared.redis.hset(keys.registration, mapping=shared.redis.hgetall(Keys("Echo").registration))
        wait_until(lambda: shared.redis.xlen(keys.requests), description="it is sent")
        ((_, fields),) = shared.redis.xrange(keys.requests)
    sent = {name: int(fields[name]) for name in (b"expiration", b"not_before")}
    assert sent[b"not_before"] < 50_000
    assert 9_999 <= sent[b"expiration"] - sent[b"not_before"] <= 10_001
    wait_until(lambda: shared.redis.xlen(keys.requests) == 2, description="it is withdrawn")
    shared.redis.delete(keys.loading, keys.registration, keys.requests)


def test_errors_have_statuses(gateway: Service) -> None:
    for answer, code, status in (
        (infer(gateway, "Faulty", '"refuse"'), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Faulty", '"raise"'), 500, "INTERNAL"),
        (infer(gateway, "Faulty", '"kill"'), 409, "ABORTED"),
        (infer(gateway, "Echo", "no JSON"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Content_Type="nonsense"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Carpool_Priority="10"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Carpool_Priority="high"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Carpool_Prioritty="1"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Carpool_Timeout_Ms="300001"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Carpool_Correlation_Id="a b"), 400, "INVALID_ARGUMENT"),
        (infer(gateway, "Echo", "1", Carpool_Sequence_Id="s"), 501, "UNIMPLEMENTED"),
        (infer(gateway, "nobody", "1"), 404, "NOT_FOUND"),
        (infer(gateway, "..%2f..", "1"), 404, "NOT_FOUND"),
        (call(gateway.url, "GET", "/carpool/v1/models/Echo/infer"), 405, "UNIMPLEMENTED"),
        (call(gateway.url, "GET", "/"), 404, "NOT_FOUND"),
    ):
        assert (answer.code, answer.json["status"]) == (code, status), answer
        assert answer.json["error"]
        assert answer.headers["content-type"] == "application/json"
    assert (
        infer(gateway, "Faulty", '"raise"', Carpool_Correlation_Id="bad-1").json["correlation_id"] == "bad-1"
    )


def test_methods_of_a_path(gateway: Service) -> None:
    path = "/carpool/v1/models/Echo/infer"
    assert call(gateway.url, "PUT", path).headers["allow"] == "POST"
    options = call(gateway.url, "OPTIONS", path)
    assert (options.code, options.headers["allow"]) == (204, "POST, OPTIONS")
    with Connection(gateway.url) as connection:
        head = connection.request("HEAD", "/healthz")
        assert (head.code, head.headers["content-length"], head.body) == (200, "3", b"")
        assert connection.request("GET", "/healthz").body == b"ok\n"


def test_a_full_queue_is_429_and_a_late_result_504(gateway: Service, shared: Stack, gate: Path) -> None:
    body = json.dumps({"gate": str(gate)}).encode()
    path = "/carpool/v1/models/Few/infer"
    with ExitStack() as open_connections:
        running = send(open_connections, gateway, path, body)
        wait_until(lambda: in_flight(shared, "Few") == 1, description="it is executed")
        late = infer(gateway, "Few", body, Carpool_Timeout_Ms="500")
        assert (late.code, late.json["status"]) == (504, "DEADLINE_EXCEEDED")
        full = []

        def is_full() -> bool:
            answer = infer(gateway, "Few", body, Carpool_Timeout_Ms="300")
            full.append(answer)
            return answer.code == 429

        # One is ahead and two wait, and what was late may be in flight
        holding = [send(open_connections, gateway, path, body) for _ in range(4)]
        wait_until(is_full, description="the queue is full")
        assert full[-1].headers["retry-after"] == "1"
        assert full[-1].json["status"] == "RESOURCE_EXHAUSTED"
        for one in holding:
            one.close()
        gate.touch()
        assert running.answer().code == 200


# --- many bodies -------------------------------------------------------------------------------------------


def test_lines_are_answered_in_order(gateway: Service) -> None:
    lines = [json.dumps({"number": at, "text": "é\n" * (at % 7)}) for at in range(5000)]
    answer = call(
        gateway.url, "POST", "/carpool/v1/models/Echo/infer_many", "\n".join(lines).encode() + b"\n"
    )
    assert answer.headers["content-type"] == "application/x-ndjson"
    results = [json.loads(line) for line in answer.body.splitlines()]
    assert results == [{"result": json.loads(line)} for line in lines]


def test_a_line_that_fails_fails_alone(gateway: Service) -> None:
    body = b'1\n"raise"\nnonsense\n"refuse"\n2'
    answer = call(gateway.url, "POST", "/carpool/v1/models/Faulty/infer_many", body)
    got = [json.loads(line) for line in answer.body.splitlines()]
    assert [line.get("status", line.get("result")) for line in got] == [
        1, "INTERNAL", "INVALID_ARGUMENT", "INVALID_ARGUMENT", 2,
    ]  # fmt: skip
    empty = call(gateway.url, "POST", "/carpool/v1/models/Faulty/infer_many", b"1\n\n2")
    assert (empty.code, "line 2 is empty" in empty.json["error"]) == (400, True)


def test_bytes_in_lines_are_base64(gateway: Service) -> None:
    answer = call(gateway.url, "POST", "/carpool/v1/models/image/infer_many", b'"a"\n"b"', Accept="image/png")
    assert json.loads(answer.body.splitlines()[0]) == {
        "result_base64": "iVBORyBh",
        "content_type": "image/png",
    }


# --- streams -----------------------------------------------------------------------------------------------


def events_of(body: bytes) -> list[tuple[str, Any]]:
    """Names and data of events."""
    found = []
    for block in body.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


def test_chunks_are_events(gateway: Service) -> None:
    answer = infer(
        gateway, "Chain", '{"length": 5}', Accept="text/event-stream", Carpool_Correlation_Id="chain-1"
    )
    assert answer.headers["content-type"] == "text/event-stream"
    *chunks, (last, figures) = events_of(answer.body)
    assert "".join(chunk for _, chunk in chunks) == text_of("chain-1", 5)
    assert last == "result"
    assert figures["correlation_id"] == "chain-1"
    assert figures["chunks"] == len(chunks)


def test_events_come_as_they_are_made(gateway: Service, gate: Path) -> None:
    body = json.dumps({"length": 3, "step_s": 0.05}).encode()
    with Connection(gateway.url) as connection:
        connection.send(request("POST", "/carpool/v1/models/Chain/infer", body, Accept="text/event-stream"))
        assert connection.answer(has_body=False).code == 200
        parts = list(iter(connection.part, b""))
    assert len(parts) == 4, "three chunks and the end, each written by itself"


def test_streams_that_fail(gateway: Service) -> None:
    answer = infer(gateway, "Chain", '{"length": 5, "raises_at": 2}', Accept="text/event-stream")
    names = [name for name, _ in events_of(answer.body)]
    assert (names[0], names[-1]) == ("message", "error")
    assert infer(gateway, "Faulty", '"raise"', Accept="text/event-stream").code == 500
    assert events_of(infer(gateway, "Echo", "7", Accept="text/event-stream").body)[0] == ("message", 7)


def test_a_reader_that_leaves_stops_the_stream(gateway: Service, shared: Stack, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    shared.serve("stepping.py:endless")
    body = json.dumps({"text": "more ", "closed": str(closed)}).encode()
    connection = Connection(gateway.url)
    connection.send(request("POST", "/carpool/v1/models/endless/infer", body, Accept="text/event-stream"))
    connection.until(b"data: ")
    connection.close()
    # Sooner than a stream ends that nobody reads (`reader_idle_ms`).
    wait_until(closed.exists, description="the model has stopped", timeout_s=8)
    shared.wait_until_idle("endless")


# --- clients that go away ----------------------------------------------------------------------------------


def notes_of(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def test_what_waits_is_withdrawn_when_its_client_goes(
    gateway: Service, shared: Stack, tmp_path: Path, gate: Path
) -> None:
    notes = tmp_path / "notes"
    path = "/carpool/v1/models/Noting/infer"

    def body(name: str, **more: str) -> bytes:
        return json.dumps({"name": name, "notes": str(notes), **more}).encode()

    with ExitStack() as open_connections:
        first = send(open_connections, gateway, path, body("first", gate=str(gate)))
        wait_until(lambda: notes_of(notes) == ["first"], description="the first is executed")
        before = answered(gateway, "infer", 499)
        leaving = [send(open_connections, gateway, path, body(f"gone-{at}")) for at in range(20)]
        staying = send(open_connections, gateway, path, body("stays"))
        wait_until(lambda: waiting(shared, "Noting") == 20, description="they wait, but one that is ahead")
        for at, connection in enumerate(leaving):
            (connection.close if at % 2 else connection.reset)()
        many = b"\n".join(body(f"line-{at}") for at in range(50))
        lines = send(open_connections, gateway, "/carpool/v1/models/Noting/infer_many", many)
        wait_until(
            lambda: answered(gateway, "infer", 499) == before + 20, description="the gateway has seen them go"
        )
        wait_until(lambda: 50 <= waiting(shared, "Noting") <= 52, description="only the lines wait")
        lines.close()
        wait_until(lambda: waiting(shared, "Noting") <= 1, description="they are withdrawn, too")
        gate.touch()
        assert staying.answer().code == first.answer().code == 200
    shared.wait_until_idle("Noting")
    assert set(notes_of(notes)) >= {"first", "stays"}
    assert len(notes_of(notes)) <= 3, "a worker has fetched one ahead; the others were not executed"


@pytest.mark.parametrize("seed", range(3))
def test_clients_that_go_at_any_moment_leave_nothing(gateway: Service, shared: Stack, seed: int) -> None:
    """Given clients that send a part of a request, or all of it, and go some time later, expect that nothing
    of them is left in the gateway and in Redis, and that others are served."""
    random, before = Random(seed), shared.keys_without_ttl()
    host, port = gateway.url.removeprefix("http://").split(":")

    async def visit(number: int) -> None:
        calls = {
            "infer": {},
            "infer_many": {},
            "stream": {"Accept": "text/event-stream"},
            "kept": {"Idempotency_Key": f"{seed}-{number}"},
            "compressed": {"Content_Encoding": "gzip"},
        }
        call_name, headers = random.choice(list(calls.items()))
        path = f"/carpool/v1/models/Echo/{'infer_many' if call_name == 'infer_many' else 'infer'}"
        body = b"\n".join([b'"%d"' % number] * random.choice((1, 50)))
        if call_name == "compressed":  # random letters, so that it is decompressed in a thread
            body = gzip.compress(json.dumps(random.randbytes(20_000).hex()).encode())
        data = request("POST", path, body, **headers)
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data[: random.choice((random.randrange(len(data)), len(data)))])
        await writer.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(random.choice((1, 10_000))), random.random() * 0.03)
        writer.transport.abort() if random.random() < 0.5 else writer.close()

    async def visit_together() -> None:
        for start in range(0, 400, 40):
            await asyncio.gather(*map(visit, range(start, start + 40)))

    asyncio.run(visit_together())
    wait_until(
        lambda: (
            (figure(gateway, "carpool_gateway_body_bytes"), figure(gateway, "carpool_gateway_connections"))
            == (0, 1)
        ),
        description="the gateway has forgotten them",
    )
    shared.wait_until_idle("Echo")
    assert shared.keys_without_ttl() <= before | fixed_keys("Echo")
    assert infer(gateway, "Echo", "7").body == b"7"


def figure(gateway: Service, name: str) -> int:
    """A metric without labels."""
    text = call(gateway.url, "GET", "/metrics").body.decode()
    return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith(f"{name} "))


def waiting(shared: Stack, model: str) -> int:
    """Requests that wait, according to the report of the batcher."""
    return gauge(shared, model, "waiting")


def in_flight(shared: Stack, model: str) -> int:
    """Batches in flight, according to the report of the batcher."""
    return gauge(shared, model, "batches_in_flight")


def gauge(shared: Stack, model: str, name: str) -> int:
    report = json.loads(shared.redis.get(Keys(model).report) or b"{}")
    return int(report["gauges"][name]) if report else 0


def answered(gateway: Service, route: str, code: int) -> int:
    """How often the gateway gave such an answer."""
    text = call(gateway.url, "GET", "/metrics").body.decode()
    for line in text.splitlines():
        if line.startswith(f'carpool_gateway_requests_total{{code="{code}",route="{route}"}}'):
            return int(float(line.split()[-1]))
    return 0
