"""Requests that are enqueued: any process reads their results by ID, whatever was killed meanwhile."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from carpool import AsyncClient, Client
from carpool.client.enqueued import RequestId
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    InternalError,
    InvalidArgumentError,
    NoResultError,
    NotFoundError,
    UnavailableError,
)
from carpool.keys import Keys
from support.command import carpool
from support.http import call
from support.models.stepping import text_of
from support.stack import Stack
from support.waiting import wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve(
            "plain.py:Echo",
            "plain.py:Noting",
            "faulty.py:Faulty",
            "numbering.py:Numbering",
            "stepping.py:Chain",
        )
        yield stack


@pytest.fixture
def client(shared: Stack) -> Iterator[Client]:
    with Client(shared.url, timeout=30) as client:
        yield client


def replies_of(request_id: str) -> str:
    one = RequestId.parse(request_id)
    return Keys(one.model).replies(one.correlation_id)


def expire_result(stack: Stack, request_id: str) -> None:
    """As if it had been kept as long as it is."""
    assert stack.redis.pexpire(replies_of(request_id), 1)
    wait_until(lambda: not stack.redis.exists(replies_of(request_id)), description="the result expires")


# --- results ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"a": [1, 2.5, None]},
        b"\x00\xff",
        {"pixels": np.arange(12, dtype=np.float32).reshape(3, 4)},
        "x" * 100_000,
    ],
    ids=["json", "bytes", "array", "stored"],
)
def test_any_process_reads_the_result_and_again(shared: Stack, client: Client, body: Any) -> None:
    request_id = client.enqueue("Echo", body)
    for _ in range(2):
        with Client(shared.url) as other:
            result = other.result(request_id, 30)
        if isinstance(body, dict) and "pixels" in body:
            np.testing.assert_array_equal(result["pixels"], body["pixels"])
        else:
            assert result == body
    assert client.status(request_id) == "done"


async def test_many_wait_for_many(shared: Stack, tmp_path: Path, gate: Path) -> None:
    """Given two programs that wait for the same 200 results before the first one can be there."""
    async with AsyncClient(shared.url) as sender, AsyncClient(shared.url) as reader:
        bodies = [{"gate": str(gate), "n": n} for n in range(200)]
        ids = await asyncio.gather(*[sender.enqueue("Echo", body) for body in bodies])
        waits = [asyncio.create_task(one.result(name, 60)) for one in (sender, reader) for name in ids]
        assert await reader.status(ids[0]) in ("waiting", "in flight")
        gate.touch()
        assert await asyncio.gather(*waits) == bodies * 2


def test_an_error_is_a_result(client: Client) -> None:
    request_id = client.enqueue("Faulty", "raise")
    for _ in range(2):
        with pytest.raises(InternalError, match="spoilt"):
            client.result(request_id, 30)
    assert client.status(request_id) == "failed"


def test_the_result_of_a_stepping_model_is_its_whole_output(client: Client) -> None:
    request_id = client.enqueue("Chain", {"length": 5, "seed": 1}, correlation_id="chain")
    for _ in range(2):
        assert client.result(request_id, 30) == text_of("chain", 5, 1)
    assert client.status(request_id) == "done"


def test_a_result_that_is_not_there_in_time(client: Client, tmp_path: Path, gate: Path) -> None:
    request_id = client.enqueue("Echo", {"gate": str(gate)})
    with pytest.raises(NoResultError, match=r"no result within 0 s: the request is (waiting|in flight)"):
        client.result(request_id, 0)
    with pytest.raises(NoResultError, match=r"no result within 0\.05 s"):
        client.result(request_id, 0.05)
    gate.touch()
    assert client.result(request_id, 30) == {"gate": str(gate)}


@pytest.mark.parametrize("request_id", ["Echo/never", "nobody/never"])
def test_an_unknown_id(client: Client, request_id: str) -> None:
    assert client.status(request_id) == "unknown"
    for call_with in (client.result, client.cancel):
        with pytest.raises(NotFoundError, match=f"there is no request {request_id}"):
            call_with(request_id)


# --- states ----------------------------------------------------------------------------------------------


def test_states_of_requests(client: Client, shared: Stack, tmp_path: Path, gate: Path) -> None:
    """Given a model that executes one request at a time, and one more in flight to it."""
    notes = tmp_path / "notes"
    names = ["first", "second", "third", "cancelled"]
    bodies = [{"name": name, "notes": str(notes), "gate": str(gate)} for name in names]
    first, second, third, cancelled = [client.enqueue("Noting", body) for body in bodies]
    wait_until(lambda: client.status(second) == "in flight", description="a second one is in flight")
    assert [client.status(one) for one in (first, third, cancelled)] == ["in flight", "waiting", "waiting"]
    client.cancel(cancelled)
    with pytest.raises(CancelledRequestError):
        client.result(cancelled, 30)
    assert client.status(cancelled) == "failed"
    client.cancel(first)  # too late
    gate.touch()
    assert [client.result(one, 30) for one in (first, second, third)] == names[:3]
    assert [client.status(one) for one in (first, second, third)] == ["done"] * 3
    assert notes.read_text().split() == names[:3]


def test_a_request_that_was_given_up_is_dead_until_it_is_sent_again(client: Client, shared: Stack) -> None:
    request_id = client.enqueue("Faulty", "kill")
    with pytest.raises(AbortedError, match="given up"):
        client.result(request_id, 60)
    assert client.status(request_id) == "dead"
    keys = Keys("Faulty")
    ((letter_id, _),) = shared.redis.xrange(keys.dead)
    carpool(shared.url, "dead", "replay", "Faulty", letter_id.decode(), check=True)
    with pytest.raises(AbortedError, match="given up"):
        client.result(request_id, 60)
    assert client.status(request_id) == "dead"
    assert shared.redis.xlen(replies_of(request_id)) == 1
    assert [key for key, _ in shared.redis.xrange(keys.dead)] != [letter_id], "it was executed again"


def test_the_record_says_what_the_protocol_says(client: Client, shared: Stack) -> None:
    """It is what programs in other languages read."""
    request_id = client.enqueue("Echo", 1, correlation_id="recorded", result_ttl=90)
    client.result(request_id, 30)
    record = shared.redis.get(Keys("Echo").kept("recorded"))
    assert record.split()[1:] == [b"done", b"90000"]


# --- once ------------------------------------------------------------------------------------------------


async def test_what_is_enqueued_twice_is_executed_once_however_fast_it_is(shared: Stack) -> None:
    """Given 200 requests of a model that takes microseconds: half of them are sent twice at once, and all of
    them again when the first copy waits, is in flight or is done."""
    async with AsyncClient(shared.url) as client:
        before = await client.infer("Numbering", 0)
        names = [f"fast-{at}" for at in range(200)]
        together = [
            client.enqueue("Numbering", 1, correlation_id=name) for name in names[:100] for _ in range(2)
        ]
        await asyncio.gather(*together)
        ids = [await client.enqueue("Numbering", 1, correlation_id=name) for name in names]
        results = await asyncio.gather(*[client.result(request_id) for request_id in ids])
        again = await asyncio.gather(*[client.enqueue("Numbering", 1, correlation_id=name) for name in names])
        assert again == ids == [f"Numbering/{name}" for name in names]
        assert await asyncio.gather(*[client.result(request_id) for request_id in ids]) == results
        assert await client.infer("Numbering", 0) == before + len(names) + 1
        assert sorted(results) == list(range(before + 1, before + len(names) + 1))


def test_another_request_under_the_same_id_is_refused(client: Client) -> None:
    request_id = client.enqueue("Echo", 1, correlation_id="taken")
    for body, options in ((2, {}), (1, {"priority": 9})):
        with pytest.raises(
            InvalidArgumentError, match="correlation_id: another request was enqueued as 'taken'"
        ):
            client.enqueue("Echo", body, correlation_id="taken", **options)  # type: ignore[arg-type]
    again: Any = {"timeout": 5, "result_ttl": 5, "not_before": 1, "fields": {"traceparent": "00-1-2-01"}}
    assert client.enqueue("Echo", 1, correlation_id="taken", **again) == request_id
    assert client.result(request_id, 30) == 1


@pytest.mark.parametrize("fields", [{"a": "b"}, {"results": b"\x92\x80\x80"}, {"results": b"\x91\x80"}])
def test_a_malformed_result_is_an_error_of_its_own_request(shared: Stack, fields: dict[str, Any]) -> None:
    """Whether it is there when it is asked for, or comes while it is waited for."""

    async def main() -> list[Any]:
        async with AsyncClient(shared.url) as client:
            name = "x".join(map(str, [*fields, *map(len, fields.values())]))
            good = await client.enqueue("Echo", 1, timeout=30)
            bad = await client.enqueue("Echo", 2, timeout=3600, not_before=600, correlation_id=name)
            waiting = asyncio.create_task(client.result(bad, timeout=30))
            assert await client.result(good, timeout=30) == 1
            shared.redis.xadd(replies_of(bad), fields)
            found = await asyncio.gather(waiting, return_exceptions=True)
            return [*found, *await asyncio.gather(client.result(bad), return_exceptions=True)]

    for error in asyncio.run(main()):
        assert isinstance(error, InternalError)
        assert "its result is malformed: " in error.detail


def test_it_is_executed_again_once_its_result_is_kept_no_longer(client: Client, shared: Stack) -> None:
    request_id = client.enqueue("Numbering", 0, correlation_id="nightly")
    first = client.result(request_id, 30)
    expire_result(shared, request_id)
    assert client.status(request_id) == "unknown"
    with pytest.raises(NotFoundError, match="has had its result, which is kept no longer"):
        client.result(request_id, 30)
    assert client.enqueue("Numbering", 0, correlation_id="nightly") == request_id
    assert client.result(request_id, 30) > first


@pytest.mark.parametrize(
    ("asked", "kept_ms"), [(None, 60_000), (20, 20_000), (7200, 7_200_000), (30 * 86_400, 7 * 86_400_000)]
)
def test_how_long_a_result_is_kept(client: Client, shared: Stack, asked: float | None, kept_ms: int) -> None:
    """As long as was asked for, or the model's setting says; at most as long as another one allows."""
    timeout_s = 5
    request_id = client.enqueue("Echo", 1, result_ttl=asked, timeout=timeout_s)
    assert client.result(request_id, 30) == 1
    one = RequestId.parse(request_id)
    lives_ms = shared.redis.pttl(replies_of(request_id))
    known_ms = shared.redis.pttl(Keys(one.model).kept(one.correlation_id))
    assert lives_ms <= kept_ms and (lives_ms > kept_ms - 30_000 or lives_ms == -2)
    assert lives_ms <= known_ms <= (asked or 60) * 1000 + timeout_s * 1000 or lives_ms == -2


# --- over HTTP -------------------------------------------------------------------------------------------

KEYS_FILE = """
[[keys]]
name = "web"
sha256 = "{acme}"
tenant = "acme"
[[keys]]
name = "other"
sha256 = "{other}"
tenant = "other"
"""


def test_a_client_reads_what_was_sent_over_http_and_the_other_way_round(
    client: Client, shared: Stack
) -> None:
    gateway = shared.gateway()
    path = "/carpool/v1/models/Echo/infer"
    accepted = call(gateway.url, "POST", path, b"7", Prefer="respond-async", Carpool_Result_Ttl_Ms="90000")
    request_id = f"Echo/{accepted.json['correlation_id']}"
    assert client.result(request_id, 30) == 7
    assert client.status(request_id) == "done"
    assert 80_000 < shared.redis.pttl(replies_of(request_id)) <= 90_000
    for options in ({}, {"correlation_id": "order-17"}):
        model, name = client.enqueue("Echo", {"n": 8}, accept="application/json", **options).split("/")  # type: ignore[arg-type]
        answer = call(gateway.url, "GET", f"/carpool/v1/models/{model}/requests/{name}", Prefer="wait=30")
        assert (answer.code, answer.json) == (200, {"n": 8})
    refused = call(gateway.url, "POST", path, b"7", Carpool_Result_Ttl_Ms="90000")
    assert (refused.code, "only with Prefer" in refused.json["error"]) == (400, True)
    gateway.kill()


def test_a_gateway_with_keys_shows_a_request_to_its_tenant_only(
    client: Client, shared: Stack, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    digests = {name: sha256(name.encode()).hexdigest() for name in ("acme", "other")}
    keys.write_text(KEYS_FILE.format(**digests))
    gateway = shared.gateway("--keys", str(keys))
    codes = {}
    for options in ({"tenant": "acme"}, {}, {"tenant": "acme", "correlation_id": "guessed"}):
        _, name = client.enqueue("Echo", 1, **options).split("/")  # type: ignore[arg-type]
        path = f"/carpool/v1/models/Echo/requests/{name}"
        codes[*options] = [
            call(gateway.url, "GET", path, Prefer="wait=30", X_API_Key=key).code for key in digests
        ]
    assert codes == {("tenant",): [200, 404], (): [404, 404], ("tenant", "correlation_id"): [404, 404]}
    gateway.kill()


# --- the command -----------------------------------------------------------------------------------------


def test_from_a_shell(shared: Stack, tmp_path: Path, gate: Path) -> None:
    def run(*arguments: str) -> tuple[int, str, str]:
        done = carpool(shared.url, *arguments)
        return done.returncode, done.stdout, done.stderr

    status, printed, _ = run(
        "infer", "Echo", '{"a": 1}', "--enqueue", "--correlation-id", "s1", "--result-ttl", "5min"
    )
    assert (status, printed) == (0, "Echo/s1\n")
    for _ in range(2):
        assert run("result", "Echo/s1") == (0, '{"a":1}\n', "")
    assert run("result", "Echo/s1", "--status") == (0, "done\n", "")
    waiting = run("infer", "Echo", f'{{"gate": "{gate}"}}', "--enqueue")[1].strip()
    status, _, complaint = run("result", waiting, "--timeout", "0")
    assert (status, "no result within 0 s" in complaint) == (1, True)
    wait_until(lambda: run("result", waiting, "--status")[1] == "in flight\n", description="it is executed")
    status, printed, _ = run("result", waiting, "--cancel")
    assert (
        status,
        printed.startswith(
            f"{waiting} was in flight: asked to withdraw it; a batch that is being executed ends only if"
        ),
    ) == (0, True)
    gate.touch()
    last = run("infer", "Echo", "2", "--enqueue", "--not-before", "60")[1].strip()
    status, printed, _ = run("result", last, "--cancel")
    assert (status, printed.startswith(f"{last} was waiting: asked to withdraw it; its")) == (0, True)
    status, _, complaint = run("result", last)
    assert (status, "CANCELLED" in complaint) == (1, True)
    assert run("result", last, "--status") == (0, "failed\n", "")
    assert run("result", last, "--cancel")[1].startswith(f"{last} was failed: it has ended")
    assert run("result", "Echo/none", "--status") == (0, "unknown\n", "")
    for arguments, part in (
        (("result", "Echo/none"), "NOT_FOUND: there is no request Echo/none"),
        (("result", "nonsense"), "must be MODEL/CORRELATION_ID"),
        (("result", "Echo/s1", "--status", "--cancel"), "only one of them"),
        (("infer", "Echo", "1", "--enqueue", "--stream"), "the result of --enqueue is the whole output"),
        (("infer", "Echo", "1", "--result-ttl", "5"), "only with --enqueue"),
    ):
        status, printed, complaint = run(*arguments)
        assert (status, printed) == (1, "") and part in complaint, complaint


# --- whatever is killed ----------------------------------------------------------------------------------

ENQUEUE = dedent("""
    import os, sys
    from carpool import Client
    client = Client(sys.argv[1])
    for n in range(20):
        print(client.enqueue("Hashing", f"body {n}", correlation_id=f"job-{n}", result_ttl=600), flush=True)
    os.kill(os.getpid(), 9)
""")
READ = dedent("""
    import json, sys
    from carpool import Client
    with Client(sys.argv[1]) as client:
        print(json.dumps([client.result(request_id, 60) for request_id in sys.argv[2:]]))
""")


@pytest.mark.parametrize("is_executed", [True, False], ids=["executed before", "executed after"])
def test_everything_is_killed_between_enqueue_and_result(tmp_path: Path, is_executed: bool) -> None:
    """The program that enqueues, the batcher, the worker, the gateway and Redis."""
    with Stack(tmp_path / "stack") as stack:
        stack.serve("hashing.py:Hashing")
        gateway = stack.gateway()
        if not is_executed:
            stack.served_by("Hashing").freeze()
        sender = subprocess.run(
            [sys.executable, "-c", ENQUEUE, stack.url], capture_output=True, check=False, text=True
        )
        assert sender.returncode == -9, sender.stderr
        ids = sender.stdout.split()
        assert ids == [f"Hashing/job-{n}" for n in range(20)]
        if is_executed:
            stack.wait_until_idle("Hashing")
        for service in stack.services:
            service.kill()
        stack.server.restart()
        readers = [
            subprocess.Popen([sys.executable, "-c", READ, stack.url, *ids], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        stack.serve("hashing.py:Hashing")
        results = [reader.communicate(timeout=120)[0] for reader in readers]
        assert results[0] == results[1] and len(set(json.loads(results[0]))) == 20
        assert [reader.returncode for reader in readers] == [0, 0]
        gateway = stack.gateway()
        for n in (0, 19):
            answer = call(gateway.url, "GET", f"/carpool/v1/models/Hashing/requests/job-{n}")
            assert answer.code == 200
        with Client(stack.url) as client:
            assert client.enqueue("Hashing", "body 0", correlation_id="job-0") == ids[0]
            assert {client.status(request_id) for request_id in ids} == {"done"}


def test_services_are_killed_while_it_is_executed(tmp_path: Path, gate: Path) -> None:
    """It is executed again by the next worker: its state stays in flight meanwhile."""
    with Stack(tmp_path / "stack") as stack:
        stack.serve("plain.py:Echo")
        with Client(stack.url) as client:
            request_id = client.enqueue("Echo", {"gate": str(gate)})
            wait_until(lambda: client.status(request_id) == "in flight", description="it is in flight")
            for service in stack.services:
                service.kill()
            assert client.status(request_id) == "in flight"
            gate.touch()
            stack.serve("plain.py:Echo")
            assert client.result(request_id, 60) == {"gate": str(gate)}


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"timeout": None}, "timeout: a request that is enqueued needs one"),
        ({"result_ttl": 0}, "result_ttl: 0 must be a number of seconds"),
        ({"result_ttl": "5"}, "result_ttl: '5' must be a number"),
        ({"retries": 1}, "retries"),
        ({"correlation_id": "a b"}, "correlation_id"),
    ],
)
def test_what_cannot_be_enqueued(client: Client, options: dict[str, Any], part: str) -> None:
    with pytest.raises(InvalidArgumentError, match=part):
        client.enqueue("Echo", 1, **options)
    with pytest.raises(InvalidArgumentError, match="result_ttl: is an option of enqueue"):
        client.infer("Echo", 1, result_ttl=5)


def test_a_model_that_nobody_registered(client: Client) -> None:
    with pytest.raises(NotFoundError, match="no worker has registered a model 'nobody'"):
        client.enqueue("nobody", 1)


def test_a_script_that_redis_lost_is_waited_for(tmp_path: Path) -> None:
    """A batcher loads it again; without one the error says so."""
    with Stack(tmp_path / "stack") as stack:
        stack.serve("plain.py:Echo")
        with Client(stack.url, timeout=30) as client:
            stack.redis.script_flush()
            assert client.result(client.enqueue("Echo", 1), 30) == 1
        stack.active_batcher("Echo").kill()
        stack.redis.script_flush()

        def complaint() -> str:
            with pytest.raises(UnavailableError) as raised, Client(stack.url, timeout=0.5) as client:
                client.enqueue("Echo", 1)
            return str(raised.value)

        wait_until(
            lambda: "no batcher has loaded the script keep" in complaint(),  # else Redis was not in time
            description="the error says that the script is missing",
        )
