"""The gateway as a process: keys, health, metrics, logs, draining, being killed, and how it is started."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any

import pytest

from carpool.keys import Keys
from carpool_gateway.answers import HttpError
from carpool_gateway.credentials import Key, KeyRing, is_loopback, read_keys
from carpool_gateway.server import DRAIN_IDLE_S
from support.http import Answer, Connection, call, request
from support.stack import Service, Stack, fixed_keys, frozen
from support.waiting import EVENTUALLY_S, wait_until

ECHO = "/carpool/v1/models/Echo/infer"
SINGLE = "/carpool/v1/models/Single/infer"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo", "plain.py:Single", "plain.py:label", "hashing.py:Hashing")
        yield stack


def key_text(name: str, secret: str, **more: Any) -> str:
    lines = [f'name = "{name}"', f'sha256 = "{sha256(secret.encode()).hexdigest()}"']
    lines += [f"{field} = {json.dumps(value)}" for field, value in more.items()]
    return "\n".join(["[[keys]]", *lines, ""])


def replace(file: Path, text: str) -> None:
    """Give a file another text, at once: who reads it meanwhile finds the one or the other."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.replace(file)


def wait_until_ready(gateway: Service) -> None:
    wait_until(lambda: call(gateway.url, "GET", "/readyz").code == 200, description="the gateway is ready")


# --- keys --------------------------------------------------------------------------------------------------


def test_keys_say_who_may_do_what(shared: Stack, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(
        key_text("web", "secret-web", tenant="acme", models=["Echo", "S*"])
        + key_text("ops", "secret-ops", scopes=["metrics"])
        + key_text("slow", "secret-slow", rate=1)
    )
    gateway = shared.gateway("--keys", str(file))

    def code(path: str, method: str = "POST", **headers: str) -> tuple[int, Any]:
        answer = call(gateway.url, method, path, b'"about"', **headers)
        return answer.code, answer.json if answer.headers["content-type"] == "application/json" else None

    web = {"Authorization": "Bearer secret-web"}
    assert call(gateway.url, "GET", "/healthz").code == 200
    assert call(gateway.url, "POST", ECHO, b"1").headers["www-authenticate"] == "Bearer"
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic secret-web"},
        {"X_Api_Key": ""},
    ):
        assert code(ECHO, **headers)[0] == 401
    status, (_, _, fields) = code(ECHO, **web)
    assert (status, fields) == (200, {"tenant": "acme"})
    assert code(ECHO, X_Api_Key="secret-web")[0] == 200
    assert code(ECHO, **web, Carpool_Tenant="acme")[0] == 200
    assert code(ECHO, **web, Carpool_Tenant="other")[0] == 403
    assert code("/carpool/v1/models/label/infer", **web)[0] == 403
    assert code("/carpool/v1/models/Slate/infer", **web) == (
        404, {"error": "no worker has registered a model 'Slate'", "status": "NOT_FOUND"},
    )  # fmt: skip
    assert code("/metrics", "GET", **web)[0] == 403
    assert code("/carpool/v1/scale/Echo", "GET", **web)[0] == 403
    status, scale = code("/carpool/v1/scale/Echo", "GET", X_Api_Key="secret-ops")
    assert (status, "wanted" in scale) == (200, True)  # how many are wanted depends on tests before
    assert code("/metrics", "GET", X_Api_Key="secret-ops")[0] == 200
    assert code(ECHO, X_Api_Key="secret-ops")[0] == 403
    assert call(gateway.url, "GET", "/carpool/v1/models", X_Api_Key="secret-web").json == {
        "models": ["Echo", "Single"]
    }
    assert [code(ECHO, X_Api_Key="secret-slow")[0] for _ in range(2)] == [200, 200]
    wait_until(
        lambda: code(ECHO, X_Api_Key="secret-slow")[0] == 429, description="it asks more than once a second"
    )
    later = call(gateway.url, "POST", ECHO, b"1", Prefer="respond-async", X_Api_Key="secret-web").headers[
        "location"
    ]
    assert call(gateway.url, "GET", later, Prefer="wait=30", X_Api_Key="secret-web").code == 200
    assert call(gateway.url, "GET", later, X_Api_Key="secret-slow").code == 404, (
        "it belongs to another tenant"
    )
    assert call(gateway.url, "GET", later).code == 401

    replace(file, key_text("web", "secret-new"))
    gateway.wait_for("keys read again")
    assert code(ECHO, **web)[0] == 401
    assert code(ECHO, X_Api_Key="secret-new")[0] == 200
    replace(file, "[[keys")
    gateway.wait_for("keys cannot be read; those before hold")
    assert code(ECHO, X_Api_Key="secret-new")[0] == 200
    assert b"warning" in call(gateway.url, "GET", "/readyz").body
    assert "secret" not in gateway.log.read_text()
    gateway.kill()


def test_rate_is_a_bucket_of_two_seconds() -> None:
    key = Key("k", b"", rate=10)
    for _ in range(20):
        key.count(1, 100.0)
    with pytest.raises(HttpError, match="10 requests a second") as caught:
        key.count(1, 100.0)
    assert (caught.value.code, caught.value.headers) == (429, b"retry-after: 1\r\n")
    key.count(1, 100.11)
    key.count(1000, 200.0)  # more than fit at any time: let through, and paid for
    with pytest.raises(HttpError):
        key.count(1, 250.0)
    key.count(1, 300.0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must have tables"),
        ("keys = 1", "must have tables"),
        ("other = 1\n" + key_text("a", "b"), "must have tables"),
        ("[[keys]]\nsha256 = 'x'", "key 1: name"),
        ("[[keys]]\nname = 'a'\nsha256 = 'x'", "key 'a': sha256"),
        (key_text("a", "x") + key_text("a", "y"), "two keys are named 'a'"),
        (key_text("a", "x") + key_text("b", "x"), "the same sha256"),
        (key_text("a", "x", scopes=["all"]), "no scope 'all'"),
        (key_text("a", "x", scopes="infer"), "scopes must be a list"),
        (key_text("a", "x", rate=0), "rate"),
        (key_text("a", "x", rate=True), "rate"),
        (key_text("a", "x", tenant="a b"), "tenant"),
        (key_text("a", "x", model="m"), "'model' is not known"),
    ],
)
def test_what_is_wrong_in_a_file_of_keys_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_keys(text)


def test_pages_of_other_sites_may_not_use_a_gateway_without_keys() -> None:
    ring = KeyRing(None)
    ring.find({b"origin": b"http://localhost:3000"})
    ring.find({})
    for origin in (b"https://evil.example", b"null", b"http://localhost.evil.example"):
        with pytest.raises(HttpError, match="another site"):
            ring.find({b"origin": origin})


def test_addresses_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.com", "")))  # noqa: S104


# --- what it is started with -------------------------------------------------------------------------------


def test_without_keys_it_listens_on_this_machine_only(shared: Stack) -> None:
    refused = shared.gateway("--host", "0.0.0.0", ready=False)  # noqa: S104
    assert "without --keys" in refused.wait_for("gateway cannot start")["reason"]
    assert refused.process.wait(EVENTUALLY_S) == 1
    wanted = shared.gateway("--host", "0.0.0.0", "--anonymous")  # noqa: S104
    port = wanted.url.rpartition(":")[2]
    assert call(f"http://127.0.0.1:{port}", "POST", ECHO, b"7").body == b"7"
    taken = shared.gateway("--port", port, ready=False)
    assert "address already in use" in taken.wait_for("gateway cannot start")["reason"]
    wanted.kill()


# --- health, metrics, logs ---------------------------------------------------------------------------------


def test_it_serves_before_redis_can_be_reached_and_after(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.serve("plain.py:Echo")
        gateway = stack.gateway()
        assert call(gateway.url, "POST", ECHO, b"7").body == b"7"
        assert call(gateway.url, "GET", "/readyz").body == b"ok\n"
        pid = stack.server.pid
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: call(gateway.url, "GET", "/readyz").code == 503, description="it is not ready")
        assert call(gateway.url, "GET", "/healthz").code == 200
        late = stack.gateway("--request-timeout-s", "1")
        assert call(late.url, "GET", "/readyz").code == 503
        answer = call(late.url, "POST", ECHO, b"7")
        assert (answer.code, answer.json["status"]) == (503, "UNAVAILABLE")
        stack.server.restart()
        wait_until_ready(gateway)
        wait_until_ready(late)
        wait_until(lambda: call(late.url, "POST", ECHO, b"7").body == b"7", description="it serves")


def test_metrics_and_the_other_port(shared: Stack) -> None:
    gateway = shared.gateway("--http-port", "0")
    for body in (b"1", b"nonsense"):
        call(gateway.url, "POST", ECHO, body)
    for url in (gateway.url, gateway.status_url):
        text = call(url, "GET", "/metrics").body.decode()
        assert 'carpool_gateway_requests_total{code="200",route="infer"} 1.0' in text
        assert 'carpool_gateway_requests_total{code="400",route="infer"} 1.0' in text
        assert 'carpool_gateway_seconds_count{route="infer"} 2.0' in text
        assert "carpool_gateway_body_bytes 0.0" in text
    assert call(gateway.status_url, "GET", "/readyz").body == b"ok\n"
    gateway.kill()


def test_requests_are_logged_without_their_bodies(shared: Stack) -> None:
    gateway = shared.gateway("--access-log", "--log-level", "info")
    call(gateway.url, "POST", ECHO, b'"a secret body"', X_Request_Id="mine")
    event = gateway.wait_for("answered")
    assert event["level"] == "info"
    assert {name: event[name] for name in ("method", "path", "code", "request", "model")} == {
        "method": "POST", "path": ECHO, "code": 200, "request": "mine", "model": "Echo",
    }  # fmt: skip
    assert event["took_ms"] > 0
    assert "secret" not in gateway.log.read_text()
    gateway.kill()


# --- draining, and being killed ----------------------------------------------------------------------------


class Load:
    """Threads that send requests, each on a connection that it keeps as long as the gateway does, until
    `stop`. A request without its answer is a failed one, unless this process was held up before it sent that:
    a gateway that stops closes a connection on which nothing comes for DRAIN_IDLE_S."""

    def __init__(self, urls: Callable[[], str], threads: int = 8) -> None:
        self._urls = urls
        self._stop = threading.Event()
        self.answers: list[Answer] = []
        self.failed: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(at,)) for at in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, at: int) -> None:
        connection, number, sent_s = None, 0, inf
        while not self._stop.is_set():
            number += 1
            body = f'"{at}-{number}"'.encode()
            before_s, sent_s = sent_s, time.monotonic()
            try:
                connection = connection or Connection(self._urls())
                answer = connection.request("POST", ECHO, body)
            except (OSError, AssertionError) as error:
                if time.monotonic() - before_s < DRAIN_IDLE_S:
                    self.failed.append(f"{type(error).__name__}: {error}")
                if connection is not None:
                    connection.close()
                connection, sent_s = None, inf
                continue
            self.answers.append(answer)
            if answer.body != body:
                self.failed.append(str(answer))
            if answer.headers.get("connection") == "close":
                connection.close()
                connection, sent_s = None, inf
        if connection is not None:
            connection.close()

    def wait_for_more(self, answers: int) -> None:
        before = len(self.answers)
        wait_until(lambda: len(self.answers) >= before + answers, description="more requests are answered")

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_a_rolling_restart_fails_no_request(shared: Stack) -> None:
    gateways = [shared.gateway()]
    load = Load(lambda: gateways[-1].url)
    for _ in range(3):
        load.wait_for_more(200)
        gateways.append(shared.gateway())
        assert gateways[-2].terminate() == 0
    load.wait_for_more(200)
    load.stop()
    assert not load.failed
    assert all(not gateway.events("requests without an answer were withdrawn") for gateway in gateways)
    gateways[-1].kill()


def test_draining_waits_for_results_but_not_for_ever(shared: Stack, gate: Path) -> None:
    patient, hasty = shared.gateway(), shared.gateway("--drain-s", "0.2")
    with Connection(patient.url) as first, Connection(hasty.url) as second, Connection(patient.url) as idle:
        body = json.dumps({"gate": str(gate)}).encode()
        for one in (first, second):
            one.send(request("POST", SINGLE, body))
        assert idle.request("GET", "/readyz").code == 200
        wait_until(lambda: shared.redis.xlen(Keys("Single").batches) == 2, description="both are in flight")
        for one_of_both in (patient, hasty):
            one_of_both.signal(signal.SIGTERM)
        assert idle.rest() == second.rest() == b""
        assert hasty.process.wait(EVENTUALLY_S) == 0
        gate.touch()
        assert first.answer().json == json.loads(body)
    assert patient.process.wait(EVENTUALLY_S) == 0
    assert hasty.events("requests without an answer were withdrawn")
    shared.wait_until_idle("Single")


def test_a_killed_gateway_leaves_nothing_behind(shared: Stack, gate: Path) -> None:
    before = shared.keys_without_ttl()
    gateway = shared.gateway()
    connections = [Connection(gateway.url) for _ in range(50)]
    body = json.dumps({"gate": str(gate)}).encode()
    for at, connection in enumerate(connections):
        connection.send(request("POST", SINGLE, body, Carpool_Timeout_Ms="60000" if at % 2 else "2000"))
    keys = Keys("Single")
    wait_until(
        lambda: shared.redis.xlen(keys.batches) and shared.redis.xlen(keys.requests),
        description="one is executed, and others wait",
    )
    gateway.kill()
    gate.touch()
    shared.wait_until_idle("Single")
    assert shared.keys_without_ttl() <= before | fixed_keys("Single")
    other = shared.gateway()
    assert call(other.url, "POST", ECHO, b"7").body == b"7"
    other.kill()
    for connection in connections:
        connection.close()


def test_two_gateways_give_each_its_own_results(shared: Stack) -> None:
    gateways = [shared.gateway(), shared.gateway()]
    first, second = gateways
    loads = [Load(lambda: first.url, 4), Load(lambda: second.url, 4)]
    for load in loads:
        load.wait_for_more(500)
    for load in loads:
        load.stop()
        assert not load.failed, "each answer is that of its request"
    for gateway in gateways:
        gateway.kill()


def test_a_gateway_that_stood_still_goes_on(shared: Stack) -> None:
    gateway = shared.gateway()
    with Connection(gateway.url) as connection:
        assert connection.request("POST", ECHO, b"1").body == b"1"
        with frozen(gateway):
            connection.send(request("POST", ECHO, b"2"))
            time.sleep(0.1)
        assert connection.answer().body == b"2"
    gateway.kill()
