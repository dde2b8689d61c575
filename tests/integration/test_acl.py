"""Access control on real servers: each role can do what it is for, and nothing else."""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock

import msgpack
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, BusyLoadingError, NoPermissionError, ResponseError

from carpool import AsyncClient, Client
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    UnavailableError,
)
from carpool.keys import Keys, NodesKeys
from carpool.store import batcher, bound, dead_letters, results, steps, upkeep, worker
from carpool.store.connection import Script
from carpool.wire.nodes import NodeReport
from carpool_cli import acl
from carpool_cli.__main__ import main
from carpool_cli.roles import ROLES, patterns, rules
from conftest import SERVERS, name_of
from support.command import Done, carpool, clean_environment
from support.configured import NO_PERSISTENCE, ConfiguredRedis, major
from support.console import Browser as ConsoleBrowser
from support.console import printed_password
from support.http import call
from support.models.bound import digest
from support.models.stateful import folded
from support.redis_client import redis_at
from support.repository import make_repository, start_node
from support.stack import RESULT_S, Stack, envelope
from support.status import get
from support.waiting import EVENTUALLY_S, wait_until

MODELS: Final = (
    *("square", "plain.py:Echo", "plain.py:Single", "faulty.py:Faulty", "stateful.py:Folding"),
    "calling.py:Ask",
)
CALLS: Final = ("--calls", "square")  # what models may call
TESTER: Final = "password-of-the-tester"  # its user may do everything

# Servers, and for which Redis the rules are written.
CASES: Final = [(server, rules) for server in SERVERS for rules in ("6", "7") if major(server) >= int(rules)]


@dataclass
class Secured:
    """A stack in which every service and client signs in with its role."""

    stack: Stack
    address: str  # host and port
    secrets: Path
    users: Path
    rules: str

    def password_file(self, role: str) -> str:
        return str(self.secrets / role / "password")

    def password(self, role: str) -> str:
        return Path(self.password_file(role)).read_text()

    def url(self, role: str) -> str:
        return f"redis://{role}:{self.password(role)}@{self.address}/0"

    def environment(self, role: str) -> dict[str, str]:
        return {
            "CARPOOL_REDIS_URL": f"redis://{self.address}/0",
            "CARPOOL_REDIS_USER": role,
            "CARPOOL_REDIS_PASSWORD_FILE": self.password_file(role),
        }

    def signed_in(self, role: str) -> Any:
        return Redis.from_url(self.url(role), protocol=2, driver_info=None, socket_timeout=30)

    def denied(self) -> set[tuple[str, str]]:
        """Which roles were denied which commands or keys since the log was reset."""
        log = self.stack.redis.acl_log()
        return {
            (event["username"], event["object"]) for event in log if event["reason"] in ("command", "key")
        }


@pytest.fixture(
    scope="module", params=CASES, ids=[f"{name_of(server)}-rules-{rules}" for server, rules in CASES]
)
def secured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    binary, rules = request.param
    home = tmp_path_factory.mktemp("secured")
    secrets, users = home / "secrets", home / "acl" / "users.acl"
    command = ["--secrets", str(secrets), "--output", str(users), "--redis", rules, *CALLS]
    assert acl.main(command) == 0
    with users.open("a") as file:
        file.write(f"user tester on >{TESTER} ~* &* +@all\n")
    options = (*NO_PERSISTENCE, "--aclfile", str(users))
    url = f"redis://tester:{TESTER}@127.0.0.1:{{port}}/0"
    server = ConfiguredRedis(home / "redis", *options, binary=binary, url=url)
    environment: dict[str, dict[str, str]] = {}
    with Stack(home / "logs", server=server, environment=environment) as stack:
        secured = Secured(stack, f"127.0.0.1:{server.port}", secrets, users, rules)
        environment |= {
            role: secured.environment(role) for role in ("batcher", "worker", "gateway", "console")
        }
        environment["worker"]["CARPOOL_MODEL_REDIS_URL"] = secured.url("model")
        stack.serve(*MODELS)
        yield secured


@pytest.fixture
def no_denials(secured: Secured) -> Iterator[Secured]:
    """For a test in which no role may be denied anything."""
    secured.stack.redis.acl_log_reset()
    yield secured
    assert secured.denied() == set()


@pytest.fixture
def producer(secured: Secured) -> Iterator[Any]:
    client = secured.signed_in("producer")
    yield client
    client.close()


@pytest.fixture
def admin(secured: Secured) -> Iterator[Any]:
    client = secured.signed_in("admin")
    yield client
    client.close()


@pytest.fixture
def unique(request: pytest.FixtureRequest) -> str:
    """A name that no other test uses."""
    return f"t{abs(hash(request.node.nodeid)):x}"


def block_worker(secured: Secured, gate: Path) -> str:
    """Occupy the model's one worker until the gate opens: requests that are sent now wait."""
    for _ in range(2):
        secured.stack.send("Single", body=json.dumps({"gate": str(gate)}))
    keys, redis = Keys("Single"), secured.stack.redis
    # Not the batches alone: one of an earlier test may be in flight still
    wait_until(
        lambda: redis.xlen(keys.batches) == 2 and not redis.xlen(keys.requests),
        description="the worker is occupied",
    )
    return "Single"


def result(client: Any, model: str, correlation_id: str) -> dict[str, Any]:
    found = client.blpop([Keys(model).result(correlation_id)], RESULT_S)
    assert found is not None, f"no result for {correlation_id}"
    return envelope(found[1])


# --- What roles can do


def test_connections_sign_in_with_their_roles(secured: Secured) -> None:
    with Client(secured.url("producer"), timeout=15) as client:
        assert client.infer("square", 2) == 4
        connections = secured.stack.redis.client_list()
    seen = {(client["name"].rpartition(":")[2], client["user"]) for client in connections}
    expected = {
        "moves": "batcher",
        "reads": "batcher",
        "fetch": "worker",
        "commit": "worker",
        "w": "producer",
    }
    of_models = {("w", "model")}  # a model that calls others, if it was called before
    assert {(name, user) for name, user in seen - of_models if name in expected} == set(expected.items())


async def test_async_client_uses_two_models(no_denials: Secured) -> None:
    async with AsyncClient(no_denials.url("producer"), timeout=15) as client:
        assert set(await client.models()) >= {"square", "Echo", "Single", "Faulty"}
        assert [output async for output in client.map("square", range(200))] == [n * n for n in range(200)]
        assert await client.infer("Echo", "results of each model are on a stream of its own") is not None
        assert await client.infer("square", 3) == 9


def test_client_gets_results_and_errors(no_denials: Secured) -> None:
    with Client(no_denials.url("producer"), timeout=15) as client:
        assert client.infer("square", 12) == 144
        with pytest.raises(InvalidArgumentError):
            client.infer("square", "not a number")


async def test_model_calls_only_those_that_it_may(secured: Secured) -> None:
    """Given a user that may send to one model, expect that its models call that one, and no other."""
    async with AsyncClient(secured.url("producer")) as client:
        assert await client.infer("Ask", {"model": "square", "body": 7}) == 49
        with pytest.raises(InternalError, match="Ask -> Echo: Redis rejected HGET"):
            await client.infer("Ask", {"model": "Echo", "body": 7})


def test_gateway_infers_streams_and_keeps_results(no_denials: Secured) -> None:
    gateway = no_denials.stack.gateway()
    path = "/carpool/v1/models/Echo/infer"
    for body in (b"7", b'"' + b"x" * 20_000 + b'"'):
        assert call(gateway.url, "POST", path, body).body == body
        assert call(gateway.url, "POST", path, body, Idempotency_Key=f"of-{len(body)}").body == body
    assert call(gateway.url, "POST", f"{path}_many", b"1\n2").body == b'{"result":1}\n{"result":2}\n'
    assert call(gateway.url, "POST", path, b"7", Accept="text/event-stream").body.startswith(b"data: 7")
    later = call(gateway.url, "POST", path, b"7", Prefer="respond-async").headers["location"]
    assert call(gateway.url, "GET", later, Prefer="wait=30").body == b"7"
    assert call(gateway.url, "DELETE", later).code == 204
    assert call(gateway.url, "POST", "/carpool/v1/models/nobody/infer", b"7").code == 404
    assert "Echo" in call(gateway.url, "GET", "/carpool/v1/models").json["models"]
    assert call(gateway.url, "GET", "/carpool/v1/scale/Echo").json["wanted"] >= 1
    gateway.terminate()


def test_gateway_loads_and_unloads_models(no_denials: Secured) -> None:
    """There is no node: what it would publish is written here, and the load waits for it in vain."""
    redis, keys = no_denials.stack.redis, NodesKeys()
    redis.zadd(keys.leases, {"node": "inf"})
    redis.hset(keys.reports, "node", NodeReport("node", 1, {"entry": ["1"]}, {}).encode())
    flags = ("--redis-user", "control", "--redis-password-file", no_denials.password_file("control"))
    gateway = no_denials.stack.gateway("--model-control", "--load-timeout-s", "0.1", *flags)
    path = "/v2/repository/models/entry"
    assert call(gateway.url, "POST", f"{path}/load").code == 504  # it goes on
    states = {row["name"]: row["state"] for row in call(gateway.url, "POST", "/v2/repository/index").json}
    assert states.items() >= {"Echo": "READY", "entry": "LOADING"}.items()
    redis.hset(Keys("entry").shares, "1", 100)
    assert call(gateway.url, "POST", f"{path}/unload").code == 200
    assert not redis.exists(Keys("entry").shares)
    redis.hset(keys.reports, "node", NodeReport("node", 0, {"entry": ["1"]}, {}).encode())
    assert call(gateway.url, "POST", f"{path}/load").code == 503  # there is no room, so it is taken back
    assert not redis.exists(keys.wanted)
    gateway.kill()
    redis.delete(keys.leases, keys.reports, keys.outcomes, keys.generation, Keys("entry").settled)


def test_requests_are_enqueued_and_read_by_id(no_denials: Secured, gate: Path, unique: str) -> None:
    """Small and large ones, one that expires, and one that is cancelled."""
    url, stack = no_denials.url("producer"), no_denials.stack
    stack.redis.script_flush()
    with Client(url, timeout=15) as client:
        for body in (7, "x" * 20_000):
            request_id = client.enqueue("Echo", body, result_ttl=60)
            assert client.result(request_id) == body
            assert client.status(request_id) == "done"
        shown = run(no_denials, "admin", "result", client.enqueue("Echo", "for an operator"))
        assert (shown.stdout, shown.stderr) == ('"for an operator"\n', "")
        assert client.enqueue("Echo", 1, correlation_id=unique) == client.enqueue(
            "Echo", 1, correlation_id=unique
        )
        model = block_worker(no_denials, gate)
        waiting, expiring = client.enqueue(model, 1), client.enqueue(model, 1, timeout=0.2)
        assert client.status(waiting) == "waiting"
        client.cancel(waiting)
        for request_id, kind in ((waiting, CancelledRequestError), (expiring, DeadlineExceededError)):
            with pytest.raises(kind):
                client.result(request_id)
            assert client.status(request_id) == "failed"
        gate.touch()
    stack.wait_until_idle(model)


def test_producer_may_not_do_more_with_records_than_it_needs(
    secured: Secured, producer: Any, unique: str
) -> None:
    """It may write those of its own requests, and neither results nor settings."""
    with Client(secured.url("producer"), timeout=15) as client:
        request_id = client.enqueue("Echo", 1, correlation_id=unique)
        assert client.result(request_id) == 1
    keys = Keys("Echo")
    if secured.rules == "7":  # with the others every command of a role works on each of its keys
        with pytest.raises(NoPermissionError):
            producer.xadd(keys.replies(unique), {"results": "forged"})
    with pytest.raises(NoPermissionError):
        producer.hset(keys.registration, "max_batch_size", 1)
    with pytest.raises(NoPermissionError):
        producer.delete(keys.replies(unique))


SCRIPTS: Final = {
    script.name: script
    for module in (batcher, bound, dead_letters, results, steps, upkeep, worker)
    for script in vars(module).values()
    if isinstance(script, Script)
}


def test_producer_runs_no_script_but_the_one_that_enqueues(
    secured: Secured, producer: Any, unique: str
) -> None:
    """Neither one of its own, which may not end, nor one of a service, with arguments that keep it busy."""
    for command in (("EVAL", "while true do end", "0"), ("SCRIPT", "LOAD", "return 1"), ("SCRIPT", "FLUSH")):
        with pytest.raises(NoPermissionError):
            producer.execute_command(*command)
    redis, keys = secured.stack.redis, Keys("Echo")
    own = [keys.requests, keys.kept(unique), keys.replies(unique), keys.body(unique)]
    assert {"dispatch", "refuse", "commit", "step", "lease", "admit"} <= SCRIPTS.keys()
    for script in SCRIPTS.values():
        assert redis.script_load(script.source) == script.sha
        for given in ([], own):
            with pytest.raises(ResponseError, match=r"can't run|permission"):
                producer.evalsha(script.sha, len(given), *given, "", "", "1e18", "a" * 1000)
    assert redis.exists(*own[1:]) == 0


def test_producer_with_a_plain_redis_client(no_denials: Secured, producer: Any, unique: str) -> None:
    keys = Keys("Echo")
    assert producer.execute_command("SISMEMBER", "carpool:models", "Echo") == 1
    assert producer.hmget(keys.registration, "max_batch_size")[0] == b"16"

    producer.xadd(keys.requests, {"body": "1", "correlation_id": unique})
    moved = producer.execute_command("BLMOVE", keys.result(unique), keys.result(unique), "LEFT", "LEFT", "5")
    assert envelope(moved) == result(producer, "Echo", unique)

    producer.xadd(keys.requests, {"body": "2", "reply_to": unique})
    ((_, ((entry_id, fields),)),) = producer.xread({keys.replies(unique): "0"}, block=5000)
    assert [reply["status"] for reply in msgpack.unpackb(fields[b"results"])] == ["OK"]
    after = f"{entry_id.decode()}1"
    assert producer.execute_command("XTRIM", keys.replies(unique), "MINID", after) == 1


async def test_large_bodies(no_denials: Secured, gate: Path) -> None:
    """Served, and refused while they wait: no body is left, so each role could do its part."""
    stack, image = no_denials.stack, b"x" * 200_000
    async with AsyncClient(no_denials.url("producer"), timeout=15) as client:
        assert await client.infer("Echo", image) == image
        model = block_worker(no_denials, gate)
        with pytest.raises(DeadlineExceededError):
            await client.infer(model, image, timeout=0.3)
        gate.touch()
        stack.wait_until_idle(model)
    wait_until(
        lambda: not list(stack.redis.scan_iter(match="carpool:*:body:*")), description="no body is left"
    )


def test_withdrawal_refusal_and_expiry(no_denials: Secured, producer: Any, gate: Path, unique: str) -> None:
    model = block_worker(no_denials, gate)
    requests = Keys(model).requests
    kept = producer.xadd(requests, {"body": "1"})
    deleted = producer.xadd(requests, {"body": "1"})
    names = [f"{unique}-{ending}" for ending in ("withdrawn", "expired", "packed", "refused")]
    producer.xadd(requests, {"body": "1", "correlation_id": names[0]})
    producer.xadd(requests, {"body": "1", "correlation_id": names[1], "expiration": 1})
    packed = [{"correlation_id": name, "body": "1"} for name in (names[2], f"{unique}-stays")]
    producer.xadd(requests, {"requests": msgpack.packb(packed)})
    producer.xadd(requests, {"body": "1", "correlation_id": names[3], "priority": 11})
    assert producer.xdel(requests, deleted) == 1
    producer.xadd(requests, {"withdraw": f"{names[0]} {names[2]}"})

    statuses = [result(producer, model, name)["status"] for name in names]
    assert statuses == ["CANCELLED", "DEADLINE_EXCEEDED", "CANCELLED", "INVALID_ARGUMENT"]
    gate.touch()
    assert result(producer, model, kept.decode())["status"] == "OK"
    assert result(producer, model, f"{unique}-stays")["status"] == "OK"


def test_deadline_that_passes_in_flight(no_denials: Secured, gate: Path) -> None:
    """The batcher answers ahead of the commit, which must leave the request out."""
    with Client(no_denials.url("producer")) as client:
        with pytest.raises(DeadlineExceededError):
            client.infer("Echo", {"gate": str(gate)}, timeout=0.3)
        gate.touch()
        assert client.infer("Echo", 1, timeout=15) == 1


def test_sequences_are_kept_broken_ended_and_taken_over(no_denials: Secured) -> None:
    stack, keys = no_denials.stack, Keys("Folding")
    with Client(no_denials.url("producer"), timeout=15) as client:
        with client.sequence("Folding") as kept:
            assert kept.infer(1) == folded([1])[0]
            with client.sequence("Folding") as broken, pytest.raises(InternalError):
                broken.infer("raise")
            stack.active_batcher("Folding").terminate()
            stack.batcher()
            stack.wait_for_model("Folding")
            assert [kept.infer(2), kept.infer(3)] == folded([1, 2, 3])[1:]
        with pytest.raises(AbortedError, match="end_sequences"):
            client.infer("Folding", 4, sequence_id=kept.sequence_id)
    stack.configure("Folding", max_sequence_idle_ms="100")
    wait_until(lambda: not stack.redis.exists(keys.sequences), description="idle sequences are deleted")
    stack.configure("Folding", max_sequence_idle_ms="60000")


def test_sequences_that_are_bound_to_a_process(no_denials: Secured) -> None:
    """Its worker puts the batches that a batcher dispatched into its pending list."""
    worker = no_denials.stack.worker("bound.py:Hearing")
    no_denials.stack.wait_for_model("Hearing")
    with (
        Client(no_denials.url("producer"), timeout=15) as client,
        client.sequence("Hearing", sequence_id="mic") as sequence,
    ):
        answers = [sequence.infer(body)[0] for body in "ab"]
    assert answers == [digest("mic", "a"), digest("mic", "ab")]
    worker.terminate()


def test_versions_share_the_traffic_and_one_of_them_is_gone(no_denials: Secured) -> None:
    """What only its share gave to it is given to the other one; what asks for it is refused."""
    stack, lease = no_denials.stack, ("--lease-ms", "60000")
    stack.worker("clf=versions.py:V1", *lease)
    other = stack.worker("clf=versions.py:V3", *lease)
    stack.wait_for_model("clf", workers=2)
    keys = Keys("clf")
    with Client(no_denials.url("producer"), timeout=EVENTUALLY_S) as client:
        assert "100%  version 3" in run(no_denials, "admin", "share", "clf", "3=100%").stdout
        wait_until(lambda: client.infer("clf", 1) == "3:1", description="version 3 has all traffic")
        held = client.submit("clf", "hold 3")
        asks = client.submit("clf", 2, version="3")
        wait_until(lambda: stack.redis.xlen(keys.batches_of("3")) == 2, description="both are in its stream")
        other.kill()
        stack.expire_lease("clf", other)
        assert held.result(EVENTUALLY_S) == "1:hold 3"
        with pytest.raises(NotFoundError, match="no worker has version '3'"):
            asks.result(EVENTUALLY_S)
        assert client.infer("clf", 3) == "1:3"
    assert "any worker takes" in run(no_denials, "admin", "share", "clf", "--none").stdout


def test_scripts_are_loaded_again_after_redis_lost_them(no_denials: Secured) -> None:
    with Client(no_denials.url("producer"), timeout=15) as client:
        for _ in range(2):
            no_denials.stack.redis.script_flush()
            assert client.infer("square", 5) == 25


def test_worker_takes_over_from_one_that_died(no_denials: Secured, gate: Path) -> None:
    """It reclaims the batch, executes requests alone and deletes the old consumer; then a worker drains."""
    spec, lease = "hashing.py:Hashing", ("--lease-ms", "6000")
    first = no_denials.stack.worker(spec, *lease)
    no_denials.stack.wait_for_model("Hashing")
    with Client(no_denials.url("producer"), timeout=30) as client:
        first.freeze()
        futures = [client.submit("Hashing", f"{number}") for number in range(8)]
        wait_until(
            lambda: no_denials.stack.redis.xlen(Keys("Hashing").batches) > 0,
            description="a batch is in flight",
        )
        first.kill()
        no_denials.stack.expire_lease("Hashing", first)
        second = no_denials.stack.worker(spec, *lease)
        assert len({future.result(EVENTUALLY_S) for future in futures}) == 8
        no_denials.stack.wait_until_idle("Hashing")
        wait_until(
            lambda: len(no_denials.stack.live_workers("Hashing")) == 1, description="only the second is left"
        )
        no_denials.stack.worker(spec, *lease)
    assert second.terminate() == 0


def test_admin_resubmits_a_dead_letter(no_denials: Secured, admin: Any) -> None:
    keys = Keys("Faulty")
    with Client(no_denials.url("producer"), timeout=30) as client, pytest.raises(AbortedError):
        client.infer("Faulty", "kill")
    ((letter_id, letter),) = admin.xrange(keys.dead)
    assert letter[b"reason"]

    again = {"body": '"cured"', "correlation_id": f"again-{letter[b'correlation_id'].decode()}"}
    admin.xadd(keys.requests, again)
    assert result(admin, "Faulty", again["correlation_id"])["status"] == "OK"
    assert admin.xdel(keys.dead, letter_id) == 1


def test_admin_replays_a_dead_letter(no_denials: Secured, admin: Any) -> None:
    """With `carpool dead`: it is given up again, so the dead letter is another one."""
    keys = Keys("Faulty")
    with Client(no_denials.url("producer"), timeout=30) as client, pytest.raises(AbortedError):
        client.infer("Faulty", "kill")
    ((letter_id, _),) = admin.xrange(keys.dead)
    url = no_denials.url("admin")
    assert letter_id.decode() in carpool(url, "dead", "list", check=True).stdout
    carpool(url, "dead", "replay", "Faulty", letter_id.decode(), check=True)
    wait_until(
        lambda: [key for key, _ in admin.xrange(keys.dead)] not in ([], [letter_id]),
        description="it is given up again",
    )
    carpool(url, "dead", "drop", "Faulty", "--all", check=True)
    assert admin.xlen(keys.dead) == 0


def test_batcher_hands_over_to_another(no_denials: Secured) -> None:
    first = no_denials.stack.active_batcher("square")
    second = no_denials.stack.batcher()
    first.terminate()
    wait_until(
        lambda: no_denials.stack.active_batcher("square") is second, description="the second one is active"
    )
    with Client(no_denials.url("producer"), timeout=15) as client:
        assert client.infer("square", 6) == 36


def test_command_line_signs_in_with_password_files_and_shows_no_password(no_denials: Secured) -> None:
    """Neither do logs and command lines of services."""
    answer = run(no_denials, "producer", "infer", "square", "9")
    assert (answer.stdout, answer.stderr, answer.returncode) == ("81\n", "", 0)
    shown = run(no_denials, "admin", "models", "--json")
    assert {row["model"] for row in json.loads(shown.stdout)} >= {"square", "Echo"}

    for role in ("admin", "metrics"):
        page = run(no_denials, role, "top", "--once")
        assert "no batcher" not in page.stdout
        assert re.search(r"^square +0 +- +0 \(0\) +1 ", page.stdout, re.MULTILINE), page.stdout + page.stderr

    for role in ROLES:
        password = no_denials.password(role)
        for service in no_denials.stack.services:
            assert password not in service.log.read_text()
            if service.alive:
                assert password.encode() not in Path(f"/proc/{service.pid}/cmdline").read_bytes()


def test_admin_overrides_settings(no_denials: Secured) -> None:
    key = Keys("square").overrides
    changed = run(no_denials, "admin", "config", "square", "max_queue_size=77", "--json")
    assert changed.returncode == 0, changed.stderr
    assert json.loads(changed.stdout)["max_queue_size"]["value"] == "77"
    assert no_denials.stack.redis.hgetall(key) == {b"max_queue_size": b"77"}

    def size_in_force() -> str | None:
        changes = no_denials.stack.events("settings changed")
        sizes = [change["max_queue_size"] for change in changes if "max_queue_size" in change]
        return sizes[-1] if sizes else None

    wait_until(lambda: size_in_force() == "77", description="the batcher, which may read it, follows")
    assert run(no_denials, "admin", "config", "square", "max_queue_size=").returncode == 0
    assert not no_denials.stack.redis.exists(key)
    wait_until(lambda: size_in_force() != "77", description="the batcher has read that it was undone")


def test_admin_sends_requests(no_denials: Secured) -> None:
    with Client(no_denials.url("admin"), timeout=15) as client:
        assert client.infer("square", 7) == 49
        image = b"x" * 200_000
        assert client.infer("Echo", image) == image
    answer = run(no_denials, "admin", "infer", "square", "9")
    assert (answer.stdout, answer.stderr, answer.returncode) == ("81\n", "", 0)
    # No settings are computed for what cannot be kept: here only what it reads and sends matters
    tuned = run(no_denials, "admin", "tune", "Single", "7", "--latency-ms=0.01", "--rounds=1", "--plot=")
    assert "sending" in tuned.stdout
    assert tuned.returncode == 2, tuned.stderr
    assert "no settings can keep" in tuned.stderr


def test_clients_sign_in_with_the_settings_of_commands(
    no_denials: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without a URL; one that is given a URL sends these credentials nowhere."""
    for name, value in no_denials.environment("producer").items():
        monkeypatch.setenv(name, value)
    with Client(timeout=15) as client:
        assert client.infer("square", 7) == 49
    with (
        pytest.raises(UnavailableError, match=r"Authentication required.*reads no settings"),
        Client(f"redis://{no_denials.address}/0"),
    ):
        pass
    monkeypatch.setenv("CARPOOL_REDIS_PASSWORD_FILE", str(no_denials.secrets / "missing"))
    with pytest.raises(InvalidArgumentError, match=r"CARPOOL_REDIS_PASSWORD_FILE\) is .*cannot be read"):
        Client()


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"admin", "console"}))
def test_only_an_admin_overrides_settings(secured: Secured, role: str) -> None:
    if role in ("batcher", "worker", "control") and secured.rules == "6":
        pytest.skip("with these rules it may use HSET, which it needs for other hashes, on all of its keys")
    refused = run(secured, role, "config", "square", "max_queue_size=1")
    assert refused.returncode == 1
    assert "permissions" in refused.stderr
    with secured.signed_in(role) as client, pytest.raises(NoPermissionError):
        client.hset(Keys("square").overrides, "max_queue_size", 1)
    assert not secured.stack.redis.exists(Keys("square").overrides)


def test_command_line_reports_missing_permissions(secured: Secured) -> None:
    refused = run(secured, "producer", "models")
    assert refused.returncode == 1
    assert "PERMISSION_DENIED: NOPERM" in refused.stderr
    assert "operator" in refused.stderr
    kept = run(secured, "producer", "forget", "square")
    assert kept.returncode == 1
    assert "PERMISSION_DENIED: NOPERM" in kept.stderr and "operator" in kept.stderr
    unsent = run(secured, "metrics", "infer", "square", "9")
    assert unsent.returncode == 1
    assert "PERMISSION_DENIED: " in unsent.stderr
    for command in (("infer", "square", "9"), ("models",)):
        unknown = run(secured, "producer", *command, CARPOOL_REDIS_USER="nobody")
        assert unknown.returncode == 1
        assert "the user name or the password is wrong" in unknown.stderr
        assert "carpool up" not in unknown.stderr
    assert secured.password("producer") not in refused.stderr + unknown.stderr


def test_request_that_the_role_may_not_send_is_denied(secured: Secured) -> None:
    with Client(secured.url("worker"), timeout=15) as client, pytest.raises(PermissionDeniedError):
        client.infer("square", 7)


def test_service_with_the_role_of_a_producer_says_so(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = secured.stack
    with monkeypatch.context() as patch:
        patch.setattr(stack, "environment", {"worker": secured.environment("producer")})
        worker = stack.worker("plain.py:Few", ready=False)
    event = worker.wait_for("cannot register with Redis, retrying")
    assert "NOPERM" in event["reason"]
    assert "a worker needs the role worker" in event["reason"]
    assert worker.terminate() == 0
    with monkeypatch.context() as patch:
        patch.setattr(stack, "environment", {"batcher": secured.environment("producer")})
        batcher = stack.batcher("--http-port", "0", ready=False)
    assert "a batcher needs the role batcher" in batcher.wait_for("batcher failed, starting over")["reason"]
    wait_until(
        lambda: "a batcher needs the role batcher" in get(batcher, "/readyz")[1],
        description="the probe says so, too",
    )
    assert batcher.terminate() == 0
    assert "Traceback" not in worker.log.read_text() + batcher.log.read_text()


def test_batcher_serves_with_rules_of_before_models_could_be_paused(
    secured: Secured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It warns once, in its log and in its probe."""
    stack, redis, keys = secured.stack, secured.stack.redis, Keys("m", "old")
    granted = rules("batcher", "old").split()
    older = [token for token in granted if not token.endswith((":paused", ":watched"))]
    assert len(older) == len(granted) - 2
    redis.execute_command("ACL", "SETUSER", "old", "on", ">password-of-old", *older)
    (tmp_path / "password").write_text("password-of-old")
    redis.hset(keys.registration, "max_batch_size", 1)
    redis.zadd(keys.workers, {"w/0": 1e15})
    redis.sadd("old:models", "m")
    variables = {**secured.environment("batcher"), "CARPOOL_REDIS_USER": "old", "CARPOOL_PREFIX": "old"}
    variables["CARPOOL_REDIS_PASSWORD_FILE"] = str(tmp_path / "password")
    with monkeypatch.context() as patch:
        patch.setattr(stack, "environment", {"batcher": variables})
        batcher = stack.batcher("--http-port", "0")
    redis.xadd(keys.requests, {"body": "1"})
    wait_until(lambda: redis.xlen(keys.batches) == 1, description="a batch is dispatched")
    wait_until(lambda: redis.exists(keys.report), description="snapshots were taken later, too")
    status, text = get(batcher, "/readyz")
    assert (status, "warning: NOPERM" in text, "`carpool acl`" in text) == (200, True, True), text
    assert batcher.terminate() == 0
    log = batcher.log.read_text()
    assert log.count("models cannot be paused or watched") == 1
    assert "batcher failed" not in log
    redis.acl_deluser("old")


def run(secured: Secured, role: str, *arguments: str, **more: str) -> Done:
    """A command that signs in with the password file of this role. It runs in this process: here only what
    Redis lets it do matters."""
    variables = {**clean_environment(), **secured.environment(role), **more}
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", newline="") for _ in range(2))
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        contextlib.chdir(secured.secrets),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            status = main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    for written in (output, errors):
        written.seek(0)
    return Done(status, output.read().encode(), errors.read().encode())


def test_metrics_role_counts(no_denials: Secured) -> None:
    metrics, keys = no_denials.signed_in("metrics"), Keys("square")
    assert metrics.ping() is True
    assert b"square" in metrics.smembers("carpool:models")
    for key in (keys.requests, keys.batches, keys.settled, keys.dead):
        assert metrics.xlen(key) >= 0
    assert len(metrics.zrange(keys.workers, 0, -1)) == 1
    assert metrics.xpending(keys.batches, "workers")["pending"] == 0
    assert metrics.execute_command("XINFO", "GROUPS", keys.batches)
    assert isinstance(metrics.execute_command("XINFO", "CONSUMERS", keys.batches, "workers"), list)
    assert "used_memory" in metrics.info()
    metrics.close()


def test_admin_loads_a_model_on_a_node_replaces_and_unloads_it(no_denials: Secured, tmp_path: Path) -> None:
    repository = make_repository(tmp_path, entries=("repeat",), versions=2)
    node = start_node(no_denials.stack, repository, 1)
    for version in ("1", "2"):
        assert run(no_denials, "admin", "load", "repeat", "--version", version).returncode == 0
        assert run(no_denials, "producer", "infer", "repeat", '"a"').stdout == f'"{version}:a"\n'
    failed = run(no_denials, "admin", "load", "repeat", "--version", "1", "--param", "reason=why")
    assert failed.returncode == 1 and "why" in failed.stderr
    assert "repeat" in run(no_denials, "admin", "nodes").stdout
    assert run(no_denials, "admin", "unload", "repeat").returncode == 0
    assert node.terminate() == 0


# Where another operator takes a dead letter just before this one does.
RARE: Final = {("dead", "unwatch")}
# Of the connection, of a cluster, and for running scripts, whose commands their heads grant.
OF_CONNECTIONS: Final = {"ping", "client", "cluster", "eval", "evalsha", "echo"}


def test_console_shows_and_does_all_with_its_role_and_needs_each_of_its_rights(
    no_denials: Secured, unique: str
) -> None:
    """Given one that signs in with its role, expect that all pages and actions work, and that it uses each
    command that it may, on each key."""
    stack = no_denials.stack
    keys = Keys("Faulty")
    with Watched(stack) as watched:
        console = stack.console()
        operator = ConsoleBrowser(console)
        assert operator.sign_in(*printed_password(console)).code == 303
        look_and_act(stack, operator, unique, watched.notice)
        assert console.terminate() == 0
    direct = {
        (key, name.partition("|")[0])
        for grant in ROLES["console"] if " in lua" not in grant.why
        for key in grant.keys.split() for name in grant.commands.split()
    }  # fmt: skip
    of_keys = {name: re.compile(fnmatch.translate(key)) for name, key in patterns().items()}
    used = {
        (name, command)
        for command, arguments in watched.commands
        for name, pattern in of_keys.items()
        if any(map(pattern.match, arguments))
    }
    without_keys = {command for command, _ in watched.commands}
    known = OF_CONNECTIONS | (without_keys & {"multi", "exec"})
    unused = {(key, command) for key, command in direct - used - RARE if command not in known}
    assert not unused, f"the role may {sorted(unused)}, which the console does not need"
    assert not stack.redis.exists(keys.overrides, keys.paused, keys.drained)


class Watched:
    """What consoles send to a stack's Redis, while the block runs."""

    def __init__(self, stack: Stack) -> None:
        self._redis = stack.redis
        self._lines: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._began = threading.Event()
        self._addresses: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._began.wait(EVENTUALLY_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._redis.echo("the end")
        self._thread.join(EVENTUALLY_S)

    def _read(self) -> None:
        with self._redis.monitor() as monitor:
            self._began.set()
            for line in monitor.listen():
                if line["command"] == "ECHO the end":
                    return
                self._lines.append(line)

    def notice(self) -> None:
        """Remember which connections are those of consoles: the commands that name them are not seen."""
        for client in self._redis.client_list():
            if client["name"].startswith("carpool-console-"):
                self._addresses.add(client["addr"])

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command, in small letters, and its arguments."""
        sent = [
            line["command"]
            for line in self._lines
            if f"{line['client_address']}:{line['client_port']}" in self._addresses
        ]
        return [(words[0].lower(), words[1:]) for words in (text.split(" ") for text in sent)]


def look_and_act(stack: Stack, operator: ConsoleBrowser, unique: str, notice: Callable[[], None]) -> None:
    """All pages and actions of the console. `notice` is called after each."""
    redis, keys = stack.redis, Keys("Faulty")

    def look(path: str) -> str:
        answer = operator.get(path)
        notice()
        assert answer.code in (200, 303), f"{path}: {answer.body.decode()}"
        assert "NOPERM" not in answer.body.decode()
        return answer.body.decode()

    def act(path: str, *more: tuple[str, str], **fields: str) -> None:
        answer = operator.post(
            path, [*more, *fields.items(), ("csrf", operator.csrf()), ("confirmed", "yes")]
        )
        notice()
        assert answer.code == 303, f"{path}: {answer.body.decode()}"

    letters = [
        redis.xadd(keys.dead, {"correlation_id": f"{unique}-{at}", "content_type": "application/json",
                               "body": "1", **({"reply_to": f"{unique}-{at}"} if at == 0 else {}),
                               "reason": "it died", "attempts": "2", "entry_id": "1-1"}).decode()
        for at in range(3)
    ]  # fmt: skip
    for path in ("/", "/models/Faulty", "/workers", "/nodes", "/dead", "/models/Faulty/dead", "/audit",
                 "/load", "/models/Faulty/dead/errors", f"/models/Faulty/dead/{letters[0]}?body=1", "/jobs",
                 "/models/Faulty/settings", "/models/Faulty/control", "/models/Faulty"):  # fmt: skip
        look(path)
    act("/models/Faulty/dead/act", ("action", "replay"), ("id", letters[0]), ("id", letters[1]))
    act("/models/Faulty/dead/act", ("action", "replay"), ("id", letters[0]))  # it is gone
    act("/models/Faulty/dead/act", ("action", "drop"), ("id", letters[2]))
    assert stack.result("Faulty", f"{unique}-1")["status"] == "OK"
    act("/models/Faulty/settings", name="max_queue_size", value="77")
    act("/models/Faulty/settings", name="max_queue_size", remove="yes")
    act("/models/Faulty/pause", reason="why")
    act("/models/Faulty/resume")
    (worker,) = {name.partition("/")[0] for name in stack.live_workers("Faulty")}
    act("/models/Faulty/drain", worker=worker)
    act("/models/Faulty/undrain", worker=worker)
    act("/models/Faulty/share", action="none")
    find_requests(stack, look, act, unique)
    use_nodes(stack, look, act)


Look = Callable[[str], str]


def find_requests(stack: Stack, look: Look, act: Callable[..., None], unique: str) -> None:
    """Where they are: waiting, in flight, answered, unknown; and while there is no batcher."""
    gate = stack.home / f"{unique}-gate"
    single = Keys(block_worker_at(stack, gate))
    stack.send("Single", body="1", correlation_id=f"{unique}-waits")
    assert "waiting" in look(f"/find?model=Single&id={unique}-waits")
    assert stack.redis.xlen(single.batches)
    assert "in flight" in look(f"/find?model=Single&id={gate.name}")
    act("/models/Single/withdraw", id=f"{unique}-waits")
    gate.touch()
    look(f"/find?model=Faulty&id={unique}-1")
    look(f"/find?id={unique}-nowhere")
    look("/find?model=nobody&id=1-1")  # no batcher knows this model


def use_nodes(stack: Stack, look: Look, act: Callable[..., None]) -> None:
    """There is no node: what it would publish is written here."""
    redis, nodes = stack.redis, NodesKeys()
    redis.zadd(nodes.leases, {"node": "inf"})
    redis.hset(nodes.reports, "node", NodeReport("node", 1, {"entry": ["1"]}, {}).encode())
    act("/load", entry="entry")
    act("/load/unload", model="entry")
    look("/nodes")
    redis.delete(nodes.leases, nodes.reports, nodes.outcomes, nodes.generation, nodes.audit, nodes.wanted)


def block_worker_at(stack: Stack, gate: Path) -> str:
    """Two requests in flight, which wait for the gate; the first one has its name."""
    for name in (gate.name, f"{gate.name}-ahead"):
        stack.send("Single", body=json.dumps({"gate": str(gate)}), correlation_id=name)
    wait_until(lambda: stack.redis.xlen(Keys("Single").batches) == 2, description="both are in flight")
    return "Single"


@pytest.mark.parametrize("role", ["producer", "metrics", "batcher"])
def test_only_an_admin_loads_models(secured: Secured, role: str) -> None:
    for command in (["load", "repeat"], ["unload", "repeat"], ["nodes"]):
        refused = run(secured, role, *command)
        assert refused.returncode == 1 and "admin" in refused.stderr


def test_admin_asks_where_a_request_is_and_sees_the_detail(
    no_denials: Secured, gate: Path, unique: str
) -> None:
    model = block_worker(no_denials, gate)
    no_denials.stack.send(model, body="1", correlation_id=unique)
    batch, _ = no_denials.stack.redis.xrange(Keys(model).batches)[0]
    for asked, state in ((unique, "waiting"), ("unknown", "unknown")):
        shown = run(no_denials, "admin", "where", model, asked, "--json").stdout
        assert json.loads(shown)[0]["state"] == state
    in_flight = no_denials.stack.redis.xrange(Keys(model).batches)
    assert (batch, len(in_flight)) == (in_flight[0][0], 2)
    page = run(no_denials, "admin", "top", model, "--once").stdout
    assert "1 lane with waiting requests" in page, page
    gate.touch()
    assert no_denials.stack.result(model, unique)["status"] == "OK"


@pytest.mark.parametrize("role", ["producer", "metrics"])
def test_only_an_admin_asks_where_a_request_is(secured: Secured, role: str) -> None:
    refused = run(secured, role, "where", "square", "a")
    assert refused.returncode == 1 and "admin" in refused.stderr


def test_admin_forgets_a_model(no_denials: Secured) -> None:
    redis, keys = no_denials.stack.redis, Keys("unserved")
    redis.sadd("carpool:models", keys.model)
    for key in (keys.registration, keys.sequence("s"), keys.body("b"), keys.progress("1-1")):
        redis.hset(key, "a", "b")
    redis.zadd(keys.sequences, {"s": 1})
    done = run(no_denials, "admin", "forget", keys.model)
    assert done.returncode == 0, done.stderr
    assert "5 keys: body, model, progress, sequence, sequences" in done.stdout
    assert "is not removed" in run(no_denials, "admin", "forget", "square").stderr


def test_admin_operates_redis_and_rotates_passwords(no_denials: Secured, admin: Any) -> None:
    """The old password is valid until the next run of `carpool acl`."""
    for command_line in (
        "CONFIG GET maxmemory", "INFO", "SLOWLOG GET 1", "LATENCY LATEST", "MEMORY STATS", "CLIENT LIST",
        "ACL LOG 1", "ACL WHOAMI", "DBSIZE", "LASTSAVE", "DEL carpool:{gone}:model",
        "SREM carpool:models gone",
    ):  # fmt: skip
        admin.execute_command(*command_line.split())
    old = no_denials.password("metrics")
    command = [
        "--secrets",
        str(no_denials.secrets),
        "--output",
        str(no_denials.users),
        "--redis",
        no_denials.rules,
        *CALLS,
    ]
    tester = no_denials.users.read_text().splitlines(keepends=True)[-1]

    def rewrite(*flags: str) -> None:
        assert acl.main([*command, *flags]) == 0
        with no_denials.users.open("a") as file:
            file.write(tester)
        with no_denials.signed_in("admin") as again:  # ACL LOAD closes all connections
            again.execute_command("ACL", "LOAD")

    rewrite("--rotate", "metrics")
    assert no_denials.password("metrics") != old
    for password in (old, no_denials.password("metrics")):
        assert signs_in(f"redis://metrics:{password}@{no_denials.address}/0")
    rewrite()
    assert signs_in(no_denials.url("metrics"))
    assert not signs_in(f"redis://metrics:{old}@{no_denials.address}/0")


def signs_in(url: str) -> bool:
    with redis_at(url, protocol=2, driver_info=None) as client:
        try:
            return bool(client.ping())
        except AuthenticationError:
            return False


# --- What roles cannot do: on a model that does not exist, so that a command that is allowed does no harm

R, B, M, W = "carpool:{m}:requests", "carpool:{m}:batches", "carpool:{m}:model", "workers"
C = "carpool:{m}:config"
S, D, L = "carpool:{m}:settled", "carpool:{m}:dead", "carpool:{m}:batcher"
P, A, Z = "carpool:{m}:progress:1-1", "carpool:{m}:result:x", "carpool:{m}:workers"
Y, T, G = "carpool:{m}:replies:x", "carpool:{m}:status", "carpool:{m}:body:x"
Q, K = "carpool:{m}:sequence:x", "carpool:{m}:sequences"

FORBIDDEN_TO_ALL: Final = [
    "FLUSHALL", "FLUSHDB", "KEYS *", "CONFIG SET maxmemory 1", "CONFIG REWRITE",
    "SHUTDOWN NOSAVE", "MODULE LIST", "REPLICAOF NO ONE", "SAVE", "MONITOR", "SCRIPT FLUSH",
    "SCRIPT KILL", "ACL SETUSER producer nopass", "ACL SETUSER default on nopass ~* +@all",
    "ACL GETUSER worker", "ACL SAVE", "ACL DELUSER worker", "SUBSCRIBE x", "PUBLISH x y", "SELECT 1",
    "SWAPDB 0 1", "CLIENT PAUSE 10", "GET another", "SET another x", "XADD another * a b",
    "XADD carpool:x:requests * body 1", "XADD other:{m}:requests * body 1", "DEL other:{m}:model",
    "MIGRATE h 1 k 0 1", "FAILOVER", "EVAL return(1) 1 another", "RESTORE k 0 x", f"RENAME {R} x",
    f"EXPIRE {R} 1", f"DUMP {R}", "SORT another",
]  # fmt: skip
READS_REQUESTS: Final = [f"XRANGE {R} - +", f"XREVRANGE {R} + -", f"XINFO STREAM {R}"]
WRITES_MODEL: Final = [f"HSET {M} max_batch_size 1", f"HDEL {M} max_batch_size", "SADD carpool:models x"]

FORBIDDEN: Final = {
    "producer": [
        *READS_REQUESTS, *WRITES_MODEL, "SREM carpool:models m", f"DEL {R}", f"DEL {A}", f"UNLINK {R}",
        f"XADD {B} * a b", f"XADD {S} * a b", f"XADD {D} * a b", f"XREAD STREAMS {B} 0", f"XRANGE {B} - +",
        f"XREAD STREAMS {D} 0", f"XTRIM {B} MAXLEN 0", f"XTRIM {D} MAXLEN 0", f"XDEL {B} 1-1",
        f"XDEL {D} 1-1", f"XACK {B} {W} 1-1", f"XREADGROUP GROUP {W} me STREAMS {B} >",
        f"XGROUP DESTROY {B} {W}", f"XPENDING {B} {W}", f"SET {L} me", f"GET {L}",
        f"ZADD {Z} 1 me", f"ZREM {Z} x", f"HGETALL {P}", f"HSET {P} answered:0 1", f"RPUSH {A} forged",
        f"LRANGE {A} 0 -1", "ECHO x", "INFO", f"EVAL return(1) 1 {B}", "SCRIPT LOAD x", "CONFIG GET *",
        "ACL LIST", "ACL WHOAMI", "ACL LOAD", "CLIENT LIST", "CLIENT KILL ID 1", "SLOWLOG GET",
        f"GET {T}", f"SET {T} x", f"GETRANGE {G} 0 1", f"UNLINK {G}", "SET carpool:x:body:x 1",
        f"HGET {Q} state", f"HSET {Q} state x", f"DEL {Q}", f"ZRANGE {K} 0 -1", f"ZREM {K} x",
        "SCAN 0", "XAUTOCLAIM x y z 0 0", f"BLMOVE {A} another LEFT LEFT 1",
        "BLPOP another 1",
    ],
    "gateway": [
        *READS_REQUESTS, *WRITES_MODEL, "SREM carpool:models m", f"DEL {R}", f"DEL {A}", f"BLPOP {A} 1",
        f"XADD {B} * a b", f"XADD {S} * a b", f"XADD {D} * a b", f"XREAD STREAMS {B} 0", f"XRANGE {B} - +",
        f"XREAD STREAMS {D} 0", f"XTRIM {B} MAXLEN 0", f"XDEL {B} 1-1", f"XDEL {D} 1-1",
        f"XACK {B} {W} 1-1", f"XREADGROUP GROUP {W} me STREAMS {B} >", f"SET {L} me", f"GET {L}",
        f"ZADD {Z} 1 me", f"HGETALL {P}", f"HSET {C} max_batch_size 1", f"RPUSH {A} forged", "ECHO x", "INFO",
        "SCRIPT LOAD x", "CONFIG GET *", "ACL LIST",
        "ACL WHOAMI", "CLIENT LIST", "CLIENT KILL ID 1", f"GETRANGE {G} 0 1",
        f"UNLINK {G}", f"HGET {Q} state", f"HSET {Q} state x", f"DEL {Q}", f"ZREM {K} x", "SCAN 0",
        f"EVAL return(1) 1 {B}",
    ],
    "control": [
        *READS_REQUESTS, "SREM carpool:models m", f"DEL {R}", f"DEL {A}", f"BLPOP {A} 1",
        f"XADD {B} * a b", f"XADD {D} * a b", f"XREAD STREAMS {B} 0", f"XRANGE {B} - +",
        f"XREAD STREAMS {D} 0", f"XTRIM {B} MAXLEN 0", f"XDEL {B} 1-1", f"XDEL {D} 1-1",
        f"XACK {B} {W} 1-1", f"XREADGROUP GROUP {W} me STREAMS {B} >", f"SET {L} me", f"GET {L}",
        f"ZADD {Z} 1 me", f"HGETALL {P}", f"RPUSH {A} forged", "INFO",
        "SCRIPT LOAD x", "CONFIG GET *", "ACL LIST",
        "ACL WHOAMI", "CLIENT LIST", "CLIENT KILL ID 1", f"GETRANGE {G} 0 1",
        f"UNLINK {G}", f"HGET {Q} state", f"DEL {Q}", f"ZREM {K} x", "SCAN 0",
        f"EVAL return(1) 1 {B}",
    ],
    "batcher": [
        "SADD carpool:models x", f"XADD {D} * a b", f"XREAD STREAMS {D} 0",
        f"XGROUP DESTROY {B} {W}", f"XCLAIM {B} {W} me 0 1-1", f"ZREMRANGEBYRANK {Z} 0 1",
        f"XREADGROUP GROUP {W} me STREAMS {B} >", f"XGROUP CREATE {B} me 0", f"XAUTOCLAIM {B} {W} me 0 0",
        f"XGROUP CREATECONSUMER {B} {W} me", f"XGROUP SETID {B} {W} 0",
        f"XRANGE {D} - +", f"BLPOP {A} 1", f"LRANGE {A} 0 -1", f"XTRIM {R} MAXLEN 0",
        "CONFIG GET *", "ACL LOAD", "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT UNBLOCK 1", f"DEL {D}",
        f"GETRANGE {G} 0 1", "MULTI", "SCAN 0",
    ],
    "worker": [
        *READS_REQUESTS, f"XADD {R} * body 1", f"XDEL {R} 1-1", f"XREAD STREAMS {R} 0", f"XLEN {R}",
        f"XTRIM {R} MAXLEN 0", f"DEL {R}", f"SET {L} me", f"DEL {L}",
        f"XGROUP DESTROY {B} {W}", f"BLPOP {A} 1", "CONFIG GET *", "ACL LOAD",
        "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT UNBLOCK 1", f"GET {T}", f"SET {T} x",
        "MULTI", "SCAN 0",
    ],
    "metrics": [
        *READS_REQUESTS, *WRITES_MODEL, f"XREAD STREAMS {R} 0", f"XRANGE {B} - +", f"XINFO STREAM {B}",
        f"XRANGE {D} - +", f"XREAD STREAMS {D} 0", f"XADD {R} * body 1", f"XDEL {R} 1-1", f"DEL {R}",
        f"BLPOP {A} 1", f"XREAD STREAMS {Y} 0", f"HGETALL {P}", f"XACK {B} {W} 1-1",
        f"XCLAIM {B} {W} me 0 1-1", f"SET {T} x", f"SET {L} me", "EVAL return(1) 0", "CONFIG GET *",
        "ACL LOAD", "ACL LIST", "CLIENT LIST", "SLOWLOG GET", "CLIENT KILL ID 1", "MULTI", "SCAN 0",
        f"HMGET {Q} state", f"HGET {Q} state", f"ZREM {K} x",
    ],
    "console": [
        f"XREAD STREAMS {R} 0", f"XREADGROUP GROUP {W} me STREAMS {B} >", f"XACK {B} {W} 1-1",
        f"ZADD {Z} 1 me", f"RPUSH {A} forged", f"BLPOP {A} 1", f"XREAD STREAMS {Y} 0", f"GETRANGE {G} 0 1",
        f"SET {G} x", f"HGET {Q} state", f"DEL {Q}", "SADD carpool:models x", "SREM carpool:models m",
        "SCAN 0", "CONFIG GET *", "ACL LOAD", "ACL LIST", "CLIENT LIST", "CLIENT KILL ID 1", "SLOWLOG GET",
        "SCRIPT LOAD x", "ZADD carpool:{.nodes}:leases 1 me",
    ],
    "admin": [
        f"XACK {B} {W} 1-1", f"XREADGROUP GROUP {W} me STREAMS {B} >",
        f"ZADD {Z} 1 me", f"RPUSH {A} forged", "ZADD carpool:{.nodes}:leases 1 me",
        "SADD carpool:models x", "ACL LIST", f"XGROUP DESTROY {B} {W}",
        f"GETRANGE {G} 0 1",
    ],
}  # fmt: skip

# Only with rules for Redis 7. In those for Redis 6 the role has each of these commands and these keys.
FORBIDDEN_BY_SELECTORS: Final = {
    "producer": [
        f"XREAD STREAMS {R} 0", f"XTRIM {R} MAXLEN 0", f"XADD {Y} * results x", f"XDEL {Y} 1-1",
        f"XADD {A} * a b", f"BLPOP {R} 1", f"SET {R} x", f"SET {A} x", f"GET {G}", f"XGROUP CREATE {R} g 0",
        f"XGROUP CREATE {A} g 0", f"PEXPIRE {R} 1", f"PEXPIRE {G} 1", f"EVAL return(1) 1 {M}", f"SET {M} x",
    ],
    "gateway": [
        f"XREAD STREAMS {R} 0", f"XTRIM {R} MAXLEN 0", f"XADD {Y} * results x", f"XDEL {Y} 1-1",
        f"GET {G}", f"SET {R} x", f"GET {R}", f"XRANGE {Y} - +", f"EVAL return(1) 1 {M}", f"SET {T} x",
    ],
    "control": [
        f"XREAD STREAMS {R} 0", f"XTRIM {R} MAXLEN 0", f"XADD {Y} * results x", f"XDEL {Y} 1-1",
        f"GET {G}", f"SET {R} x", f"GET {R}", f"XRANGE {Y} - +", f"EVAL return(1) 1 {M}", f"SET {T} x",
        f"HSET {C} max_batch_size 1", f"HSET {M} max_batch_size 1", f"HDEL {M} max_batch_size",
        "ZADD carpool:{.nodes}:leases 1 n", "HSET carpool:{.nodes}:reports n x",
    ],
    "batcher": [
        f"DEL {R}", f"SET {R} x", f"XDEL {B} 1-1", f"XADD {S} * a b", f"GET {A}", f"XREAD STREAMS {B} 0",
        f"XACK {B} {W} 1-1", f"DEL {M}", f"DEL {Z}", f"HDEL {M} max_batch_size", f"HDEL {R} x", f"DEL {B}",
        f"GET {T}", f"LPOP {A}", f"HGET {M} max_batch_size", f"UNLINK {R}", f"SET {G} x", f"PEXPIRE {R} 1",
        f"ZADD {Z} 1 me", f"ZREM {Z} x", f"HGET {Q} state", f"HGETALL {Q}", f"HSET {M} max_batch_size 1",
        "SREM carpool:models m",
    ],
    "worker": [f"XADD {B} * a b", f"DEL {B}", f"DEL {M}", f"XDEL {S} 1-1", f"HGETALL {M}", f"SADD {B} x",
        f"LPOP {A}", f"UNLINK {B}", f"GETRANGE {A} 0 1", f"HGETALL {Q}", f"ZRANGE {K} 0 -1",
        f"XRANGE {D} - +", "SMEMBERS carpool:models", "SREM carpool:models m", f"XREAD STREAMS {Y} 0",
        f"XTRIM {B} MAXLEN 0", f"HSET {C} max_batch_size 1", f"HGETALL {C}", f"SET {G} x", f"SET {M} x",
    ],
    "metrics": [f"HGETALL {R}", f"EXISTS {R}", f"GET {L}"],
    "console": [
        f"XREVRANGE {R} + -", f"XDEL {R} 1-1", f"DEL {R}", f"XTRIM {R} MAXLEN 0", f"XADD {B} * a b",
        f"XDEL {B} 1-1", f"XADD {D} * a b", f"DEL {D}", f"SET {L} me", f"GET {L}", f"SET {T} x",
        f"XADD {Y} * results x", f"XRANGE {Y} - +", f"HGETALL {P}", f"GET {A}", f"DEL {M}",
        f"HSET {M} max_batch_size 1", f"HDEL {M} max_batch_size", "XADD carpool:{.nodes}:wanted * a b",
    ],
    "admin": [
        f"XTRIM {R} MAXLEN 0", f"XADD {B} * a b", f"XADD {D} * a b", f"DEL {L}", f"HGETALL {R}",
        f"XREAD STREAMS {R} 0", f"HSET {Q} state x", f"HGETALL {Q}", f"HMGET {Q} state",
        f"HGET {Q} state", f"SET {L} me", f"SET {T} x", f"HSET {P} answered:0 1",
        f"HGETALL {P}",
    ],
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_role_cannot_do_more(secured: Secured, role: str) -> None:
    forbidden = [*FORBIDDEN_TO_ALL, *FORBIDDEN[role]]
    if secured.rules == "7":
        forbidden += FORBIDDEN_BY_SELECTORS[role]
    assert not_refused(secured, role, *forbidden) == []


def not_refused(secured: Secured, role: str, *commands: str) -> list[str]:
    """Those of these commands that Redis does not deny (NOPERM). They are sent together on one connection: a
    denied command does not change it."""
    with secured.signed_in(role) as client:
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command.split())
        replies = pipeline.execute(raise_on_error=False)
    return [
        command
        for command, reply in zip(commands, replies, strict=True)
        if not isinstance(reply, NoPermissionError)
    ]


def refused(secured: Secured, role: str, command: str) -> bool:
    """Whether Redis denies the command (NOPERM)."""
    return not not_refused(secured, role, command)


def test_signing_in_needs_a_user_and_a_password(secured: Secured) -> None:
    for credentials in ("", "default:x@", "producer:x@", "nobody:x@"):
        assert not signs_in(f"redis://{credentials}{secured.address}/0")


# --- What a producer can do all the same: ops/redis/README.md says so, and must be right


def test_producer_can_take_a_result_of_another_if_it_knows_the_id(
    secured: Secured, producer: Any, unique: str
) -> None:
    with secured.signed_in("producer") as another:
        another.xadd(Keys("square").requests, {"body": "7", "correlation_id": unique})
        assert result(producer, "square", unique)["body"] == 49


def test_producer_can_name_and_overwrite_the_large_body_of_another(
    secured: Secured, producer: Any, unique: str
) -> None:
    keys = Keys("square")
    with secured.signed_in("producer") as another:
        another.set(keys.body(unique), "7", px=60_000)
    for body, square in (("7", 49), ("8", 64)):
        producer.set(keys.body(unique), body, px=60_000)
        entry_id = producer.xadd(keys.requests, {"body_key": unique, "body_bytes": 1})
        assert result(producer, "square", entry_id.decode())["body"] == square
    assert not secured.stack.redis.exists(keys.body(unique))


def test_producer_can_have_a_result_written_to_the_reply_stream_of_another(
    secured: Secured, producer: Any, unique: str
) -> None:
    keys = Keys("square")
    producer.xadd(keys.requests, {"body": "7", "correlation_id": "forged", "reply_to": unique})
    with secured.signed_in("producer") as another:
        ((_, ((_, fields),)),) = another.xread({keys.replies(unique): "0"}, block=5000)
    assert msgpack.unpackb(fields[b"results"])[0]["correlation_id"] == "forged"


def test_producer_can_withdraw_a_request_of_another_if_it_knows_the_id(
    secured: Secured, producer: Any, gate: Path, unique: str
) -> None:
    requests = Keys(block_worker(secured, gate)).requests
    with secured.signed_in("producer") as another:
        another.xadd(requests, {"body": "1", "correlation_id": unique})
        producer.xadd(requests, {"withdraw": unique})
        assert result(another, "Single", unique)["status"] == "CANCELLED"
        assert producer.xdel(requests, another.xadd(requests, {"body": "1"})) == 1


def test_producer_can_use_up_the_ids_of_a_stream_and_an_admin_resets_them(producer: Any, admin: Any) -> None:
    key = Keys("exhausted").requests
    last = producer.xadd(key, {"body": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
    with pytest.raises(ResponseError):
        producer.xadd(key, {"body": "1"})
    admin.xdel(key, last)
    assert admin.delete(key) == 1
    assert producer.xadd(key, {"body": "1"})
    assert admin.delete(key) == 1


def test_producer_can_fill_memory_with_requests_for_an_unserved_model(producer: Any, admin: Any) -> None:
    key = Keys("not-served").requests
    for _ in range(32):
        producer.xadd(key, {"body": bytes(1024 * 1024)})
    assert admin.xlen(key) == 32
    assert admin.delete(key) == 1


def test_producer_can_unblock_other_clients_which_do_not_lose_anything(
    secured: Secured, producer: Any
) -> None:
    def unblock() -> int:
        """How many connections of services it was that waited."""
        names = {client["id"]: client["name"] for client in secured.stack.redis.client_list()}
        waiting = (":reads", ":settled", ":fetch")
        may_wait = [number for number, name in names.items() if name.endswith(waiting)]
        return sum(producer.execute_command("CLIENT", "UNBLOCK", number, "ERROR") for number in may_wait)

    with Client(secured.url("producer"), timeout=15) as client:
        wait_until(unblock, description="a batcher or worker was unblocked")
        assert client.infer("square", 8) == 64


def test_producer_can_read_and_trim_requests_with_rules_for_redis_6_only(
    secured: Secured, producer: Any, gate: Path
) -> None:
    requests = Keys(block_worker(secured, gate)).requests
    with secured.signed_in("producer") as another:
        another.xadd(requests, {"body": '"a secret"'})
    if secured.rules == "7":
        assert refused(secured, "producer", f"XREAD STREAMS {requests} 0")
        assert refused(secured, "producer", f"XTRIM {requests} MAXLEN 0")
    else:
        ((_, ((_, fields),)),) = producer.xread({requests: "0"})
        assert fields[b"body"] == b'"a secret"'
        assert producer.xtrim(requests, maxlen=0) == 1


def test_effects_of_scripts_survive_a_restart(server: Path, tmp_path: Path) -> None:
    """Redis replays its append-only file as the default user. A script is in it as MULTI ... EXEC, and
    EXEC checks the permissions of that user: if it had none, all effects of scripts would be lost."""
    secrets, users = tmp_path / "secrets", tmp_path / "users.acl"
    rules = "7" if major(server) >= 7 else "6"
    assert acl.main(["--secrets", str(secrets), "--output", str(users), "--redis", rules]) == 0
    keys = Keys("m")
    options = ("--appendonly", "yes", "--save", "", "--aclfile", str(users))

    def signed_in(redis: ConfiguredRedis, role: str) -> Any:
        password = (secrets / role / "password").read_text()
        return redis_at(f"redis://{role}:{password}@127.0.0.1:{redis.port}/0", protocol=2)

    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as redis:
        entry = signed_in(redis, "producer").xadd(keys.requests, {"body": "7"})
        script = "redis.call('XDEL', KEYS[1], ARGV[1]) return redis.call('XADD', KEYS[2], '*', 'a', 'b')"
        signed_in(redis, "batcher").eval(script, 2, keys.requests, keys.batches, entry)
    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as redis:
        metrics = signed_in(redis, "metrics")
        wait_until(lambda: has_loaded(metrics), description="Redis has replayed its file")
        assert (metrics.xlen(keys.requests), metrics.xlen(keys.batches)) == (0, 1)
        with pytest.raises((AuthenticationError, ResponseError)):
            Redis(port=redis.port, protocol=2).set("a", "b")


def has_loaded(client: Any) -> bool:
    try:
        return bool(client.ping())
    except BusyLoadingError:
        return False
