"""Results that are kept: `Prefer: respond-async`, and `Idempotency-Key`, whatever is killed meanwhile."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import ResponseError

from carpool.keys import Keys
from carpool.store.kept import keep_arguments, keep_command
from support.http import Answer, Connection, call, request
from support.stack import Service, Stack
from support.waiting import wait_until

NOTING = "/carpool/v1/models/Noting/infer"
ECHO = "/carpool/v1/models/Echo/infer"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo", "plain.py:Noting", "faulty.py:Faulty")
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway()


def note(path: Path, name: str, gate: Path | None = None) -> bytes:
    body = {"name": name, "notes": str(path)}
    return json.dumps(body if gate is None else {**body, "gate": str(gate)}).encode()


def notes_of(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


# --- answered later ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 100_000])
def test_a_result_is_read_later_and_again(gateway: Service, size: int) -> None:
    body = secrets.token_bytes(size)
    accepted = call(
        gateway.url, "POST", ECHO, body, Prefer="respond-async", Content_Type="application/octet-stream"
    )
    assert accepted.code == 202
    path = accepted.headers["location"]
    assert accepted.json["location"] == path
    for _ in range(2):
        answer = call(gateway.url, "GET", path, Prefer="wait=30")
        assert (answer.code, answer.body) == (200, body)
        assert answer.headers["carpool-correlation-id"] == accepted.json["correlation_id"]
    assert call(gateway.url, "HEAD", path).code == 200


def test_get_waits_as_long_as_it_is_asked(gateway: Service, tmp_path: Path, gate: Path) -> None:
    notes = tmp_path / "notes"
    path = call(gateway.url, "POST", NOTING, note(notes, "a", gate), Prefer="respond-async").headers[
        "location"
    ]
    answer = call(gateway.url, "GET", path)
    assert (answer.code, answer.headers["location"], answer.headers["retry-after"]) == (202, path, "1")
    with Connection(gateway.url) as connection:
        connection.send(request("GET", path, Prefer="wait=40"))
        wait_until(lambda: notes_of(notes) == ["a"], description="it is executed")
        gate.touch()
        assert connection.answer().json == "a"


def test_a_wait_ends_when_the_gateway_drains(shared: Stack, tmp_path: Path, gate: Path) -> None:
    notes, leaving = tmp_path / "notes", shared.gateway()
    path = call(leaving.url, "POST", NOTING, note(notes, "a", gate), Prefer="respond-async").headers[
        "location"
    ]
    with Connection(leaving.url) as connection:
        connection.send(request("GET", path, Prefer="wait=300"))
        wait_until(lambda: notes_of(notes) == ["a"], description="it is executed")
        assert leaving.terminate() == 0
        assert connection.answer().code == 202
    gate.touch()
    other = shared.gateway()
    assert call(other.url, "GET", path, Prefer="wait=30").json == "a"
    other.kill()


def test_delete_withdraws_what_waits(gateway: Service, shared: Stack, tmp_path: Path, gate: Path) -> None:
    notes = tmp_path / "notes"
    later = {"Prefer": "respond-async"}
    first = call(gateway.url, "POST", NOTING, note(notes, "first", gate), **later).headers["location"]
    others = [
        call(gateway.url, "POST", NOTING, note(notes, f"other-{at}"), **later).headers["location"]
        for at in range(3)
    ]
    wait_until(lambda: notes_of(notes) == ["first"], description="the first is executed")
    assert call(gateway.url, "DELETE", others[-1]).code == 204
    answer = call(gateway.url, "GET", others[-1], Prefer="wait=30")
    assert (answer.code, answer.json["status"]) == (499, "CANCELLED")
    gate.touch()
    assert call(gateway.url, "GET", first, Prefer="wait=30").code == 200
    shared.wait_until_idle("Noting")
    assert "other-2" not in notes_of(notes)


def test_errors_are_results_too(gateway: Service) -> None:
    path = call(
        gateway.url, "POST", "/carpool/v1/models/Faulty/infer", b'"raise"', Prefer="respond-async"
    ).headers["location"]
    answer = call(gateway.url, "GET", path, Prefer="wait=30")
    assert (answer.code, answer.json["status"]) == (500, "INTERNAL")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_unknown_names_are_404(gateway: Service, method: str) -> None:
    known = call(gateway.url, "POST", ECHO, b"1", Prefer="respond-async").headers["location"]
    head, _, name = known.rpartition("/")
    for path in (f"{head}/{name[:-1]}x", f"{head}/none", f"{head}/%2e%2e", f"{head}/" + "x" * 200):
        assert call(gateway.url, method, path).code == 404


def test_a_request_that_nobody_waits_for_expires_too(gateway: Service, tmp_path: Path, gate: Path) -> None:
    notes = tmp_path / "notes"
    call(gateway.url, "POST", NOTING, note(notes, "first", gate), Prefer="respond-async")
    wait_until(lambda: notes_of(notes) == ["first"], description="the first is executed")
    path = call(
        gateway.url, "POST", NOTING, note(notes, "late"), Prefer="respond-async", Carpool_Timeout_Ms="200"
    ).headers["location"]
    answer = call(gateway.url, "GET", path, Prefer="wait=30")
    assert (answer.code, answer.json["status"]) == (504, "DEADLINE_EXCEEDED")


@pytest.mark.parametrize("sent", [{"Prefer": "respond-async"}, {"Idempotency_Key": "expired"}])
def test_a_result_that_is_kept_no_longer_is_410(
    gateway: Service, shared: Stack, tmp_path: Path, sent: dict[str, str]
) -> None:
    notes, keys = tmp_path / "notes", Keys("Noting")
    answer = call(gateway.url, "POST", NOTING, note(notes, "a"), **sent)
    name = answer.headers["carpool-correlation-id"]
    path = f"/carpool/v1/models/Noting/requests/{name}"
    assert call(gateway.url, "GET", path, Prefer="wait=30").json == "a"
    assert shared.redis.pexpire(keys.replies(name), 1)  # as if `result_ttl_ms` were over
    wait_until(lambda: not shared.redis.exists(keys.replies(name)), description="the result expires")
    gone = [call(gateway.url, method, path, Prefer="wait=30") for method in ("GET", "DELETE")]
    if "Idempotency_Key" in sent:
        gone.append(call(gateway.url, "POST", NOTING, note(notes, "a"), **sent))
    for answer in gone:
        assert (answer.code, answer.json["status"], answer.json["correlation_id"]) == (410, "NOT_FOUND", name)
    assert notes_of(notes) == ["a"]
    assert shared.redis.delete(keys.kept(name))
    assert call(gateway.url, "GET", path, Prefer="wait=30").code == 404


# --- exactly once ------------------------------------------------------------------------------------------


def test_a_request_that_is_sent_again_is_executed_once(gateway: Service, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    answers = [call(gateway.url, "POST", NOTING, note(notes, "a"), Idempotency_Key="k1") for _ in range(3)]
    assert {(answer.code, answer.body) for answer in answers} == {(200, b'"a"')}
    assert len({answer.headers["carpool-correlation-id"] for answer in answers}) == 1
    assert notes_of(notes) == ["a"]
    other = call(gateway.url, "POST", NOTING, note(notes, "b"), Idempotency_Key="k1")
    assert (other.code, other.json["status"]) == (422, "INVALID_ARGUMENT")
    assert call(gateway.url, "POST", NOTING, note(notes, "b"), Idempotency_Key="k2").code == 200


def test_what_changes_from_call_to_call_makes_no_other_request(gateway: Service, tmp_path: Path) -> None:
    """What is left of a delay, and the span of a client that is traced."""
    notes = tmp_path / "notes"
    for delay_ms, span in (("80", "1"), ("40", "2"), ("0", "3")):
        headers = {"Carpool_Not_Before_Ms": delay_ms, "Traceparent": f"00-{'a' * 32}-{span * 16}-01"}
        answer = call(gateway.url, "POST", NOTING, note(notes, "a"), Idempotency_Key="traced", **headers)
        assert (answer.code, answer.body) == (200, b'"a"')
    assert notes_of(notes) == ["a"]


def test_many_send_it_at_once(gateway: Service, shared: Stack, tmp_path: Path, gate: Path) -> None:
    notes = tmp_path / "notes"
    second = shared.gateway()
    body = note(notes, "a", gate)
    connections = [Connection((gateway, second)[at % 2].url) for at in range(100)]
    for connection in connections:
        connection.send(request("POST", NOTING, body, Idempotency_Key="many"))
    wait_until(lambda: notes_of(notes) == ["a"], description="it is executed")
    gate.touch()
    assert {connection.answer().body for connection in connections} == {b'"a"'}
    assert notes_of(notes) == ["a"]
    for connection in connections:
        connection.close()
    second.kill()


@pytest.mark.parametrize("size", [0, 50_000])
def test_a_killed_gateway_loses_nothing_and_repeats_nothing(
    shared: Stack, tmp_path: Path, gate: Path, size: int
) -> None:
    notes = tmp_path / "notes"
    body = json.dumps({"name": "a", "notes": str(notes), "gate": str(gate), "more": "x" * size}).encode()
    killed = shared.gateway()
    with Connection(killed.url) as connection:
        connection.send(request("POST", NOTING, body, Idempotency_Key=f"order-{size}"))
        wait_until(lambda: notes_of(notes) == ["a"], description="it is executed")
        killed.kill()
        assert connection.rest() == b""
    again = shared.gateway()
    with Connection(again.url) as connection:
        connection.send(request("POST", NOTING, body, Idempotency_Key=f"order-{size}"))
        gate.touch()
        answer = connection.answer()
    assert (answer.code, answer.body) == (200, b'"a"')
    third: Answer = call(again.url, "POST", NOTING, body, Idempotency_Key=f"order-{size}")
    assert (third.code, third.body) == (200, b'"a"')
    shared.wait_until_idle("Noting")
    assert notes_of(notes) == ["a"]
    again.kill()


def test_a_client_that_goes_withdraws_nothing_that_it_may_send_again(
    gateway: Service, shared: Stack, tmp_path: Path, gate: Path
) -> None:
    notes = tmp_path / "notes"
    with Connection(gateway.url) as connection:
        connection.send(request("POST", NOTING, note(notes, "a", gate)))
        wait_until(lambda: notes_of(notes) == ["a"], description="the first is executed")
        with Connection(gateway.url) as leaving:
            leaving.send(request("POST", NOTING, note(notes, "b"), Idempotency_Key="left"))
            keys = Keys("Noting")
            wait_until(lambda: list(shared.redis.scan_iter(keys.kept("*"))), description="it is added")
        gate.touch()
        connection.answer()
    assert call(gateway.url, "POST", NOTING, note(notes, "b"), Idempotency_Key="left").body == b'"b"'
    assert notes_of(notes) == ["a", "b"]


def test_keys_of_redis_expire(gateway: Service, shared: Stack) -> None:
    answer = call(gateway.url, "POST", ECHO, b'"' + b"x" * 20_000 + b'"', Idempotency_Key="ttl")
    assert answer.code == 200
    keys = Keys("Echo")
    name = answer.headers["carpool-correlation-id"]
    for key in (keys.kept(name), keys.replies(name)):
        assert 0 < shared.redis.pttl(key) <= 30_000 + 60_000
    assert not shared.redis.exists(keys.body(name))


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        ("infer_many", {"Idempotency_Key": "x"}),
        ("infer_many", {"Prefer": "respond-async"}),
        ("infer", {"Idempotency_Key": "x", "Accept": "text/event-stream"}),
        ("infer", {"Idempotency_Key": "x", "Carpool_Correlation_Id": "y"}),
        ("infer", {"Idempotency_Key": "x" * 300}),
        ("infer", {"Idempotency_Key": ""}),
    ],
)
def test_what_cannot_be_kept_is_refused(gateway: Service, path: str, headers: dict[str, Any]) -> None:
    answer = call(gateway.url, "POST", f"/carpool/v1/models/Echo/{path}", b"1", **headers)
    assert answer.code == 400, answer


def test_a_model_that_nobody_registered(gateway: Service) -> None:
    for headers in ({}, {"Carpool_Result_Ttl_Ms": "1000"}):
        answer = call(
            gateway.url, "POST", "/carpool/v1/models/None/infer", b"1", Prefer="respond-async", **headers
        )
        assert (answer.code, answer.json["status"]) == (404, "NOT_FOUND")


def test_redis_that_starts_again_is_waited_for(tmp_path: Path, gate: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.serve("plain.py:Noting")
        gateway = stack.gateway()
        notes = tmp_path / "notes"
        with Connection(gateway.url) as connection:
            connection.send(request("POST", NOTING, note(notes, "a", gate), Idempotency_Key="r"))
            wait_until(lambda: notes_of(notes) == ["a"], description="it is executed")
            stack.server.restart()
            gate.touch()
            assert connection.answer().body == b'"a"'


def test_a_request_whose_client_went_at_once_has_its_body(shared: Stack) -> None:
    """Given a gateway that gets a request and the end of its connection together, and asks Redis for the
    settings of the model in between, expect that the request is executed with its own body."""
    gateway = shared.gateway()
    bodies = {f"gone-{at}": b'"body of %d"' % at for at in range(5)}
    url = gateway.url
    gateway.freeze()
    for key, body in bodies.items():
        with Connection(url) as connection:
            connection.send(request("POST", ECHO, body, Idempotency_Key=key))
    gateway.thaw()

    def answers() -> int:
        """Of these requests; those whose client was seen to be gone have the code 499."""
        counted = re.findall(rb'code="[0-9]+",route="infer"} ([0-9]+)', call(url, "GET", "/metrics").body)
        return sum(map(int, counted))

    wait_until(lambda: answers() == len(bodies), description="the gateway is done with them")
    for key, body in bodies.items():
        answer = call(url, "POST", ECHO, body, Idempotency_Key=key)
        assert (answer.code, answer.body) == (200, body)


def test_nothing_is_written_of_a_request_whose_stream_cannot_be_made(shared: Stack) -> None:
    """Given a key of another type in its place. Else the request would be known, and never executed."""
    keys, name = Keys("Echo"), "taken"
    shared.redis.set(keys.replies(name), "text", px=60_000)
    waiting = shared.redis.xlen(keys.requests)
    arguments = keep_arguments(keys, name, b"fingerprint", 1000, {}, b"1")
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        shared.redis.execute_command(*keep_command(*arguments))
    assert not shared.redis.exists(keys.kept(name))
    assert shared.redis.xlen(keys.requests) == waiting
