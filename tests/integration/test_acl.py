"""The locks, on real servers: each role can do what it is there for, and cannot do what it is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, ResponseError

from carpool import AsyncClient, Client
from carpool.errors import AbortedError, DeadlineExceededError, InvalidArgumentError
from carpool.keys import Keys
from carpool_cli import acl
from carpool_cli.roles import ROLES
from conftest import SERVERS, name_of
from support.configured import NO_PERSISTENCE, ConfiguredRedis, major
from support.stack import RESULT_S, Stack, envelope
from support.waiting import wait_until

MODELS: Final = ("square", "plain.py:Echo", "plain.py:Single", "faulty.py:Faulty")
TESTER: Final = "in-the-place-of-an-operator"  # who looks on, and may do everything


LOCKS: Final = [(server, rules) for server in SERVERS for rules in ("6", "7") if major(server) >= int(rules)]


@dataclass
class Locked:
    """A stack where everybody signs in as who they are."""

    stack: Stack
    place: str  # host and port
    secrets: Path
    users: Path
    rules: str

    def password(self, role: str) -> str:
        return (self.secrets / role / "password").read_text()

    def url(self, role: str) -> str:
        return f"redis://{role}:{self.password(role)}@{self.place}/0"

    def environment(self, role: str) -> dict[str, str]:
        return {
            "CARPOOL_REDIS_URL": f"redis://{self.place}/0",
            "CARPOOL_REDIS_USER": role,
            "CARPOOL_REDIS_PASSWORD_FILE": str(self.secrets / role / "password"),
        }

    def signed_in(self, role: str) -> Any:
        return Redis.from_url(self.url(role), protocol=2, driver_info=None, socket_timeout=30)

    def denied(self) -> set[tuple[str, str]]:
        """Who was refused which command or key since the log was reset."""
        log = self.stack.redis.acl_log()
        return {(one["username"], one["object"]) for one in log if one["reason"] in ("command", "key")}


@pytest.fixture(
    scope="module", params=LOCKS, ids=[f"{name_of(server)}-rules-{rules}" for server, rules in LOCKS]
)
def locked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    binary, rules = request.param
    home = tmp_path_factory.mktemp("locked")
    secrets, users = home / "secrets", home / "acl" / "users.acl"
    assert acl.main(["--secrets", str(secrets), "--output", str(users), "--redis", rules]) == 0
    with users.open("a") as file:
        file.write(f"user tester on >{TESTER} ~* &* +@all\n")
    options = (*NO_PERSISTENCE, "--aclfile", str(users))
    url = f"redis://tester:{TESTER}@127.0.0.1:{{port}}/0"
    server = ConfiguredRedis(home / "redis", *options, binary=binary, url=url)
    environment: dict[str, dict[str, str]] = {}
    with Stack(home / "logs", server=server, environment=environment) as stack:
        one = Locked(stack, f"127.0.0.1:{server.port}", secrets, users, rules)
        environment |= {role: one.environment(role) for role in ("batcher", "worker")}
        stack.serve(*MODELS)
        yield one


@pytest.fixture
def trip(locked: Locked) -> Iterator[Locked]:
    """For a test in which nobody is to be refused anything."""
    locked.stack.redis.acl_log_reset()
    yield locked
    assert locked.denied() == set()


@pytest.fixture
def producer(locked: Locked) -> Iterator[Any]:
    client = locked.signed_in("producer")
    yield client
    client.close()


@pytest.fixture
def admin(locked: Locked) -> Iterator[Any]:
    client = locked.signed_in("admin")
    yield client
    client.close()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "gate"
    yield path
    path.touch()


@pytest.fixture
def here(request: pytest.FixtureRequest) -> str:
    return f"t{abs(hash(request.node.nodeid)):x}"


def hold_up(locked: Locked, gate: Path) -> str:
    """Give the model's one worker all that it takes at once; what is sent from now on waits."""
    for _ in range(2):
        locked.stack.send("Single", body=json.dumps({"gate": str(gate)}))
    batches = Keys("Single").batches
    wait_until(lambda: locked.stack.redis.xlen(batches) == 2, description="the worker is held up")
    return "Single"


def result(client: Any, model: str, correlation_id: str) -> dict[str, Any]:
    found = client.blpop([Keys(model).result(correlation_id)], RESULT_S)
    assert found is not None, f"no result for {correlation_id}"
    return envelope(found[1])


# --- What works


def test_everybody_is_who_they_are(locked: Locked) -> None:
    with Client(locked.url("producer"), timeout=15) as client:
        assert client.infer("square", 2) == 4
        connections = locked.stack.redis.client_list()
    seen = {(one["name"].rpartition(":")[2], one["user"]) for one in connections}
    of = {"moves": "batcher", "reads": "batcher", "fetch": "worker", "commit": "worker", "w": "producer"}
    assert {(name, user) for name, user in seen if name in of} == set(of.items())


async def test_an_asyncio_producer_asks_two_models(trip: Locked) -> None:
    async with AsyncClient(trip.url("producer"), timeout=15) as client:
        assert set(await client.models()) >= {"square", "Echo", "Single", "Faulty"}
        assert [one async for one in client.map("square", range(200))] == [n * n for n in range(200)]
        assert await client.infer("Echo", "and another, whose results come on another stream") is not None
        assert await client.infer("square", 3) == 9


def test_a_producer_with_threads_and_its_errors(trip: Locked) -> None:
    with Client(trip.url("producer"), timeout=15) as client:
        assert client.infer("square", 12) == 144
        with pytest.raises(InvalidArgumentError):
            client.infer("square", "not a number")


def test_a_producer_that_knows_only_redis(trip: Locked, producer: Any, here: str) -> None:
    keys = Keys("Echo")
    assert producer.execute_command("SISMEMBER", "carpool:models", "Echo") == 1
    assert producer.hmget(keys.registration, "max_batch_size")[0] == b"16"

    producer.xadd(keys.requests, {"body": "1", "correlation_id": here})
    left = producer.execute_command("BLMOVE", keys.result(here), keys.result(here), "LEFT", "LEFT", "5")
    assert envelope(left) == result(producer, "Echo", here)

    producer.xadd(keys.requests, {"body": "2", "reply_to": here})
    ((_, ((entry_id, fields),)),) = producer.xread({keys.replies(here): "0"}, block=5000)
    assert [one["status"] for one in msgpack.unpackb(fields[b"results"])] == ["OK"]
    after = f"{entry_id.decode()}1"
    assert producer.execute_command("XTRIM", keys.replies(here), "MINID", after) == 1


def test_withdrawal_refusal_and_expiry(trip: Locked, producer: Any, gate: Path, here: str) -> None:
    model = hold_up(trip, gate)
    requests = Keys(model).requests
    kept = producer.xadd(requests, {"body": "1"})
    deleted = producer.xadd(requests, {"body": "1"})
    names = [f"{here}-{what}" for what in ("withdrawn", "expired", "packed", "refused")]
    producer.xadd(requests, {"body": "1", "correlation_id": names[0]})
    producer.xadd(requests, {"body": "1", "correlation_id": names[1], "expiration": 1})
    packed = [{"correlation_id": name, "body": "1"} for name in (names[2], f"{here}-stays")]
    producer.xadd(requests, {"requests": msgpack.packb(packed)})
    producer.xadd(requests, {"body": "1", "correlation_id": names[3], "priority": 11})
    assert producer.xdel(requests, deleted) == 1
    producer.xadd(requests, {"withdraw": f"{names[0]} {names[2]}"})

    statuses = [result(producer, model, name)["status"] for name in names]
    assert statuses == ["CANCELLED", "DEADLINE_EXCEEDED", "CANCELLED", "INVALID_ARGUMENT"]
    gate.touch()
    assert result(producer, model, kept.decode())["status"] == "OK"
    assert result(producer, model, f"{here}-stays")["status"] == "OK"


def test_a_deadline_that_passes_in_flight(trip: Locked, gate: Path) -> None:
    """Answered by the batcher ahead of the commit, which is told to leave it out."""
    with Client(trip.url("producer")) as client:
        with pytest.raises(DeadlineExceededError):
            client.infer("Echo", {"gate": str(gate)}, timeout=0.3)
        gate.touch()
        assert client.infer("Echo", 1, timeout=15) == 1


def test_redis_forgot_its_scripts(trip: Locked) -> None:
    with Client(trip.url("producer"), timeout=15) as client:
        for _ in range(2):
            trip.stack.redis.script_flush()
            assert client.infer("square", 5) == 25


def test_a_worker_dies_and_another_takes_over(trip: Locked, gate: Path) -> None:
    """Reclaim, a request executed alone, the old consumer swept out; then one that leaves of its own."""
    spec, lease = "hashing.py:Hashing", ("--lease-ms", "1500")  # time enough to send while it still counts
    first = trip.stack.worker(spec, *lease)
    trip.stack.wait_for_model("Hashing")
    with Client(trip.url("producer"), timeout=30) as client:
        first.freeze()
        wait_until(lambda: trip.stack.live_workers("Hashing") == [], description="its lease ran out")
        first.thaw()
        wait_until(lambda: trip.stack.live_workers("Hashing") != [], description="it lives again")
        first.freeze()
        futures = [client.submit("Hashing", f"{number}") for number in range(8)]
        wait_until(
            lambda: trip.stack.redis.xlen(Keys("Hashing").batches) > 0, description="a batch is under way"
        )
        first.kill()
        second = trip.stack.worker(spec, *lease)
        assert len({future.result(30) for future in futures}) == 8
        trip.stack.wait_until_idle("Hashing")
        wait_until(
            lambda: len(trip.stack.live_workers("Hashing")) == 1, description="only the second is left"
        )
        trip.stack.worker(spec, *lease)
    assert second.terminate() == 0


def test_who_kills_the_process_becomes_a_dead_letter_that_an_admin_sends_again(
    trip: Locked, admin: Any
) -> None:
    keys = Keys("Faulty")
    with Client(trip.url("producer"), timeout=30) as client, pytest.raises(AbortedError):
        client.infer("Faulty", "kill")
    ((letter_id, letter),) = admin.xrange(keys.dead)
    assert letter[b"reason"]

    again = {"body": '"cured"', "correlation_id": f"again-{letter[b'correlation_id'].decode()}"}
    admin.xadd(keys.requests, again)
    assert result(admin, "Faulty", again["correlation_id"])["status"] == "OK"
    assert admin.xdel(keys.dead, letter_id) == 1


def test_a_batcher_hands_over_to_another(trip: Locked) -> None:
    second = trip.stack.batcher()
    trip.stack.active_batcher("square").terminate()
    wait_until(lambda: trip.stack.active_batcher("square") is second, description="the second one is active")
    with Client(trip.url("producer"), timeout=15) as client:
        assert client.infer("square", 6) == 36


def test_the_command_line_signs_in_by_files_and_shows_no_password(trip: Locked) -> None:
    """`carpool infer` as a producer, `carpool models` as an admin; and what services log and are called."""
    answer = carpool(trip, "producer", "infer", "square", "9")
    assert (answer.stdout, answer.stderr, answer.returncode) == ("81\n", "", 0)
    shown = carpool(trip, "admin", "models", "--json")
    assert {one["model"] for one in json.loads(shown.stdout)} >= {"square", "Echo"}

    for role in ("admin", "metrics"):
        page = carpool(trip, role, "top", "--once")
        assert "no batcher" not in page.stdout
        assert re.search(r"^square +0 +- +0 \(0\) +1 ", page.stdout, re.MULTILINE), page.stdout + page.stderr

    for role in ROLES:
        password = trip.password(role)
        for service in trip.stack.services:
            assert password not in service.log.read_text()
            if service.alive:
                assert password.encode() not in Path(f"/proc/{service.pid}/cmdline").read_bytes()


def test_an_admin_says_how_a_model_is_to_be_batched(trip: Locked) -> None:
    key = Keys("square").config
    changed = carpool(trip, "admin", "config", "square", "max_queue_size=77", "--json")
    assert changed.returncode == 0, changed.stderr
    assert json.loads(changed.stdout)["max_queue_size"]["value"] == "77"
    assert trip.stack.redis.hgetall(key) == {b"max_queue_size": b"77"}

    def followed() -> bool:
        return any(event["max_queue_size"] == "77" for event in trip.stack.events("settings changed"))

    wait_until(followed, description="the batcher, who may read it, follows")
    assert carpool(trip, "admin", "config", "square", "max_queue_size=").returncode == 0
    assert not trip.stack.redis.exists(key)


@pytest.mark.parametrize("role", sorted(set(ROLES) - {"admin"}))
def test_nobody_else_says_how_a_model_is_to_be_batched(locked: Locked, role: str) -> None:
    refused = carpool(locked, role, "config", "square", "max_queue_size=1")
    assert refused.returncode == 1
    assert "permissions" in refused.stderr
    with locked.signed_in(role) as client, pytest.raises(NoPermissionError):
        client.hset(Keys("square").config, "max_queue_size", 1)
    assert not locked.stack.redis.exists(Keys("square").config)


def test_who_may_not_is_told_by_the_command_line(locked: Locked) -> None:
    refused = carpool(locked, "producer", "models")
    assert refused.returncode == 1
    assert "permissions" in refused.stderr
    unknown = carpool(locked, "producer", "infer", "square", "9", CARPOOL_REDIS_USER="nobody")
    assert unknown.returncode == 1
    assert "invalid username-password pair" in unknown.stderr
    assert locked.password("producer") not in refused.stderr + unknown.stderr


def carpool(locked: Locked, role: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}
    return subprocess.run(
        [sys.executable, "-m", "carpool_cli", *words],
        env={**environment, **locked.environment(role), **more},
        cwd=locked.secrets,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_metrics_counts(trip: Locked) -> None:
    metrics, keys = trip.signed_in("metrics"), Keys("square")
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


def test_an_admin_operates(trip: Locked, admin: Any) -> None:
    """And takes a password that was rotated into force, and out of it again."""
    for words in (
        "CONFIG GET maxmemory", "INFO", "SLOWLOG GET 1", "LATENCY LATEST", "MEMORY STATS", "CLIENT LIST",
        "ACL LOG 1", "ACL WHOAMI", "DBSIZE", "LASTSAVE", "DEL carpool:{gone}:model",
        "SREM carpool:models gone",
    ):  # fmt: skip
        admin.execute_command(*words.split())
    old = trip.password("metrics")
    command = ["--secrets", str(trip.secrets), "--output", str(trip.users), "--redis", trip.rules]
    tester = trip.users.read_text().splitlines(keepends=True)[-1]

    def rewrite(*flags: str) -> None:
        assert acl.main([*command, *flags]) == 0
        with trip.users.open("a") as file:
            file.write(tester)
        with trip.signed_in("admin") as again:  # ACL LOAD hangs up on everybody
            again.execute_command("ACL", "LOAD")

    rewrite("--rotate", "metrics")
    assert trip.password("metrics") != old
    for password in (old, trip.password("metrics")):
        assert signs_in(f"redis://metrics:{password}@{trip.place}/0")
    rewrite()
    assert signs_in(trip.url("metrics"))
    assert not signs_in(f"redis://metrics:{old}@{trip.place}/0")


def signs_in(url: str) -> bool:
    with Redis.from_url(url, protocol=2, driver_info=None) as client:
        try:
            return bool(client.ping())
        except AuthenticationError:
            return False


# --- What does not: tried on a model that is not there, so that what is allowed after all breaks nothing

R, B, M, W = "carpool:{m}:requests", "carpool:{m}:batches", "carpool:{m}:model", "workers"
S, D, L = "carpool:{m}:settled", "carpool:{m}:dead", "carpool:{m}:batcher"
P, A, Z = "carpool:{m}:progress:1-1", "carpool:{m}:result:x", "carpool:{m}:workers"
Y, T = "carpool:{m}:replies:x", "carpool:{m}:status"

NOBODY_MAY: Final = [
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

MAY_NOT: Final = {
    "producer": [
        *READS_REQUESTS, *WRITES_MODEL, "SREM carpool:models m", f"DEL {R}", f"DEL {A}", f"UNLINK {R}",
        f"XADD {B} * a b", f"XADD {S} * a b", f"XADD {D} * a b", f"XREAD STREAMS {B} 0", f"XRANGE {B} - +",
        f"XREAD STREAMS {D} 0", f"XTRIM {B} MAXLEN 0", f"XTRIM {D} MAXLEN 0", f"XDEL {B} 1-1",
        f"XDEL {D} 1-1", f"XACK {B} {W} 1-1", f"XREADGROUP GROUP {W} me STREAMS {B} >",
        f"XGROUP DESTROY {B} {W}", f"XGROUP CREATE {R} g 0", f"XPENDING {B} {W}", f"SET {L} me", f"GET {L}",
        f"ZADD {Z} 1 me", f"ZREM {Z} x", f"HGETALL {P}", f"HSET {P} answered:0 1", f"RPUSH {A} forged",
        f"LRANGE {A} 0 -1", "TIME", "INFO", "EVAL return(1) 0",
        "EVALSHA 0000000000000000000000000000000000000000 0", "SCRIPT LOAD x", "CONFIG GET *", "ACL LIST",
        "ACL WHOAMI", "ACL LOAD", "CLIENT LIST", "CLIENT KILL ID 1", "SLOWLOG GET", f"XSETID {R} 1-1",
        f"GET {T}", f"SET {T} x", "MULTI",
        "SCAN 0", "XAUTOCLAIM x y z 0 0", f"BLMOVE {A} another LEFT LEFT 1",
        "BLPOP another 1",
    ],
    "batcher": [
        f"HSET {M} max_batch_size 1", "SADD carpool:models x", "SREM carpool:models m", f"XADD {D} * a b",
        f"XREADGROUP GROUP {W} me STREAMS {B} >", f"XACK {B} {W} 1-1", f"XREAD STREAMS {D} 0",
        f"XGROUP DESTROY {B} {W}", f"XCLAIM {B} {W} me 0 1-1", f"ZADD {Z} 1 me", f"ZREM {Z} x",
        f"XRANGE {D} - +", f"BLPOP {A} 1", f"LRANGE {A} 0 -1", f"XTRIM {R} MAXLEN 0", "INFO",
        "CONFIG GET *", "ACL LOAD", "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT UNBLOCK 1", f"DEL {D}",
        "MULTI", "SCAN 0",
    ],
    "worker": [
        *READS_REQUESTS, f"XADD {R} * body 1", f"XDEL {R} 1-1", f"XREAD STREAMS {R} 0", f"XLEN {R}",
        f"XTRIM {R} MAXLEN 0", f"DEL {R}", f"SET {L} me", f"DEL {L}", f"XRANGE {B} - +", f"XRANGE {D} - +",
        f"XGROUP DESTROY {B} {W}", f"XTRIM {B} MAXLEN 0", f"BLPOP {A} 1", f"XREAD STREAMS {Y} 0",
        "SREM carpool:models m", "SMEMBERS carpool:models", "INFO", "CONFIG GET *", "ACL LOAD",
        "CLIENT LIST", "CLIENT KILL ID 1", "CLIENT UNBLOCK 1", f"GET {T}", f"SET {T} x", "MULTI", "SCAN 0",
    ],
    "metrics": [
        *READS_REQUESTS, *WRITES_MODEL, f"XREAD STREAMS {R} 0", f"XRANGE {B} - +", f"XINFO STREAM {B}",
        f"XRANGE {D} - +", f"XREAD STREAMS {D} 0", f"XADD {R} * body 1", f"XDEL {R} 1-1", f"DEL {R}",
        f"BLPOP {A} 1", f"XREAD STREAMS {Y} 0", f"HGETALL {P}", f"XACK {B} {W} 1-1",
        f"XCLAIM {B} {W} me 0 1-1", f"SET {T} x", f"SET {L} me", "EVAL return(1) 0", "CONFIG GET *",
        "ACL LOAD", "ACL LIST", "CLIENT LIST", "SLOWLOG GET", "CLIENT KILL ID 1", "MULTI", "SCAN 0",
    ],
    "admin": [
        f"XACK {B} {W} 1-1", f"XREADGROUP GROUP {W} me STREAMS {B} >", f"SET {L} me",
        f"ZADD {Z} 1 me", f"HSET {P} answered:0 1", f"RPUSH {A} forged",
        f"HGETALL {P}", "EVAL return(1) 0", "SADD carpool:models x", "ACL LIST", f"XGROUP DESTROY {B} {W}",
        "CLIENT UNBLOCK 1", f"SET {T} x",
    ],
}  # fmt: skip

# By rules of Redis 7 alone. By those of Redis 6 each of these is a command that the role has, on a key that
# it has.
MAY_NOT_WITH_SELECTORS: Final = {
    "producer": [
        f"XREAD STREAMS {R} 0", f"XTRIM {R} MAXLEN 0", f"XADD {Y} * results x", f"XDEL {Y} 1-1",
        f"XADD {A} * a b", f"BLPOP {R} 1",
    ],
    "batcher": [
        f"DEL {R}", f"SET {R} x", f"XDEL {B} 1-1", f"XADD {S} * a b", f"GET {A}", f"XREAD STREAMS {B} 0",
        f"DEL {M}", f"DEL {Z}", f"HDEL {M} max_batch_size", f"HDEL {R} x", f"DEL {B}",
        f"GET {T}", f"LPOP {A}", f"HGET {M} max_batch_size",
    ],
    "worker": [f"XADD {B} * a b", f"DEL {B}", f"DEL {M}", f"XDEL {S} 1-1", f"HGETALL {M}", f"SADD {B} x",
        f"LPOP {A}",
    ],
    "metrics": [f"HGETALL {R}", f"EXISTS {R}", f"GET {L}"],
    "admin": [
        f"XTRIM {R} MAXLEN 0", f"XADD {B} * a b", f"XADD {D} * a b", f"DEL {L}", f"HGETALL {R}",
        f"XREAD STREAMS {Y} 0",
    ],
}  # fmt: skip


@pytest.mark.parametrize("role", ROLES)
def test_what_a_role_may_not_do(locked: Locked, role: str) -> None:
    forbidden = [*NOBODY_MAY, *MAY_NOT[role]]
    if locked.rules == "7":
        forbidden += MAY_NOT_WITH_SELECTORS[role]
    allowed = [words for words in forbidden if not refused(locked, role, words)]
    assert allowed == []


def refused(locked: Locked, role: str, words: str) -> bool:
    """Whether Redis says NOPERM to it, and nothing else."""
    with locked.signed_in(role) as client:
        try:
            client.execute_command(*words.split())
        except NoPermissionError:
            return True
        except ResponseError:
            return False
    return False


def test_nobody_gets_in_without_a_name_and_a_password(locked: Locked) -> None:
    for who in ("", "default:x@", "producer:x@", "nobody:x@"):
        assert not signs_in(f"redis://{who}{locked.place}/0")


# --- What a producer can do all the same: it is said in ops/redis/README.md, and so it is to be true


def test_a_producer_can_take_anothers_result_if_it_knows_its_id(
    locked: Locked, producer: Any, here: str
) -> None:
    with locked.signed_in("producer") as another:
        another.xadd(Keys("square").requests, {"body": "7", "correlation_id": here})
        assert result(producer, "square", here)["body"] == 49


def test_a_producer_can_have_a_result_put_on_anothers_reply_stream(
    locked: Locked, producer: Any, here: str
) -> None:
    keys = Keys("square")
    producer.xadd(keys.requests, {"body": "7", "correlation_id": "forged", "reply_to": here})
    with locked.signed_in("producer") as another:
        ((_, ((_, fields),)),) = another.xread({keys.replies(here): "0"}, block=5000)
    assert msgpack.unpackb(fields[b"results"])[0]["correlation_id"] == "forged"


def test_a_producer_can_withdraw_anothers_request_if_it_knows_its_id(
    locked: Locked, producer: Any, gate: Path, here: str
) -> None:
    requests = Keys(hold_up(locked, gate)).requests
    with locked.signed_in("producer") as another:
        another.xadd(requests, {"body": "1", "correlation_id": here})
        producer.xadd(requests, {"withdraw": here})
        assert result(another, "Single", here)["status"] == "CANCELLED"
        assert producer.xdel(requests, another.xadd(requests, {"body": "1"})) == 1


def test_a_producer_can_use_up_a_streams_ids_and_an_admin_gives_them_back(producer: Any, admin: Any) -> None:
    key = Keys("exhausted").requests
    last = producer.xadd(key, {"body": "1"}, id=f"{2**64 - 1}-{2**64 - 1}")
    with pytest.raises(ResponseError):
        producer.xadd(key, {"body": "1"})
    admin.xdel(key, last)
    admin.execute_command("XSETID", key, "0-1")
    assert producer.xadd(key, {"body": "1"})
    assert admin.delete(key) == 1


def test_a_producer_can_fill_memory_where_no_batcher_looks(producer: Any, admin: Any) -> None:
    key = Keys("nobody-serves-this").requests
    for _ in range(32):
        producer.xadd(key, {"body": bytes(1024 * 1024)})
    assert admin.xlen(key) == 32
    assert admin.delete(key) == 1


def test_a_producer_can_wake_others_which_disturbs_and_loses_nothing(locked: Locked, producer: Any) -> None:
    names = {one["id"]: one["name"] for one in locked.stack.redis.client_list()}
    blocked = [number for number, name in names.items() if name.endswith((":reads", ":fetch"))]
    with Client(locked.url("producer"), timeout=15) as client:
        woken = sum(producer.execute_command("CLIENT", "UNBLOCK", number, "ERROR") for number in blocked)
        assert woken > 0
        assert client.infer("square", 8) == 64


def test_by_rules_of_redis_6_a_producer_can_read_and_drop_what_waits(
    locked: Locked, producer: Any, gate: Path
) -> None:
    requests = Keys(hold_up(locked, gate)).requests
    with locked.signed_in("producer") as another:
        another.xadd(requests, {"body": '"a secret"'})
    if locked.rules == "7":
        assert refused(locked, "producer", f"XREAD STREAMS {requests} 0")
        assert refused(locked, "producer", f"XTRIM {requests} MAXLEN 0")
    else:
        ((_, ((_, fields),)),) = producer.xread({requests: "0"})
        assert fields[b"body"] == b'"a secret"'
        assert producer.xtrim(requests, maxlen=0) == 1


def test_what_scripts_did_is_still_done_after_a_restart(server: Path, tmp_path: Path) -> None:
    """Redis replays its file as the default user, and EXEC, which scripts are written down as, asks what that
    user may: where it may nothing, all moves of batches are undone."""
    secrets, users = tmp_path / "secrets", tmp_path / "users.acl"
    rules = "7" if major(server) >= 7 else "6"
    assert acl.main(["--secrets", str(secrets), "--output", str(users), "--redis", rules]) == 0
    keys = Keys("m")
    options = ("--appendonly", "yes", "--save", "", "--aclfile", str(users))

    def signed_in(redis: ConfiguredRedis, role: str) -> Any:
        password = (secrets / role / "password").read_text()
        return Redis.from_url(f"redis://{role}:{password}@127.0.0.1:{redis.port}/0", protocol=2)

    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as redis:
        entry = signed_in(redis, "producer").xadd(keys.requests, {"body": "7"})
        script = "redis.call('XDEL', KEYS[1], ARGV[1]) return redis.call('XADD', KEYS[2], '*', 'a', 'b')"
        signed_in(redis, "batcher").eval(script, 2, keys.requests, keys.batches, entry)
    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as redis:
        metrics = signed_in(redis, "metrics")
        assert (metrics.xlen(keys.requests), metrics.xlen(keys.batches)) == (0, 1)
        with pytest.raises((AuthenticationError, ResponseError)):
            Redis(port=redis.port, protocol=2).set("a", "b")
