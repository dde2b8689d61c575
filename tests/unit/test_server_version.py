"""A server that is too old is refused at the first connection, by whoever connects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from threading import Event

import pytest

from carpool import AsyncClient, Client, UnavailableError
from carpool.store.connection import Link, UnsupportedServerError
from carpool.store.server_version import ServerVersion, of_binary, of_hello, of_info
from carpool_batcher.meter import BatcherMetrics
from carpool_batcher.service import BatcherService
from carpool_cli.local.supervisor import StackPlan, Supervisor
from support.command import carpool
from support.fake_redis import FORBIDDEN, OK, UNKNOWN, FakeRedis, bulk, text

TOO_OLD = r"this is Redis {}, which is too old; Carpool needs Redis 6\.2 or newer, or Valkey"


def server(*, hello: bytes, info: bytes) -> Callable[[list[str]], bytes]:
    """Replies of a server that answers HELLO and INFO so."""

    def reply(command: list[str]) -> bytes:
        replies = {"HELLO": hello, "INFO": info, "PING": b"+PONG\r\n", "CLIENT ID": b":7\r\n"}
        return replies.get(" ".join(command[:2]), replies.get(command[0], OK))

    return reply


def redis_hello(version: str, name: str = "redis") -> bytes:
    fields = bulk("server", name, "version", version, "mode", "standalone")
    return b"*8" + fields[2:] + text("proto") + b":2\r\n"


def redis_info(version: str, more: str = "") -> bytes:
    return text(f"# Server\r\nredis_version:{version}\r\n{more}run_id:abc\r\n")


REDIS_5 = server(hello=UNKNOWN, info=redis_info("5.0.7"))
REDIS_6_0 = server(hello=redis_hello("6.0.16"), info=redis_info("6.0.16"))
REDIS_6_0_WITHOUT_INFO = server(hello=redis_hello("6.0.16"), info=FORBIDDEN)
REDIS_6_2 = server(hello=redis_hello("6.2.0"), info=redis_info("6.2.0"))
REDIS_10 = server(hello=redis_hello("10.0.1"), info=redis_info("10.0.1"))
VALKEY = server(
    hello=redis_hello("9.0.0", "valkey"),
    info=redis_info("7.2.4", "server_name:valkey\r\nvalkey_version:9.0.0\r\n"),
)
VALKEY_AS_REDIS_6 = server(
    hello=redis_hello("1.0.0", "valkey"), info=redis_info("6.0", "valkey_version:1.0\r\n")
)
SILENT = server(hello=FORBIDDEN, info=FORBIDDEN)
PROXY = server(hello=OK, info=OK)


def connect_link(url: str) -> None:
    link = Link(url, name="test")
    try:
        assert link.call("PING") == b"PONG"
    finally:
        link.close()


def connect_client(url: str) -> None:
    with Client(url):
        pass


def connect_async_client(url: str) -> None:
    async def connect() -> None:
        async with AsyncClient(url):
            pass

    asyncio.run(connect())


CONNECTORS = (connect_link, connect_client, connect_async_client)


@pytest.mark.parametrize("connect", CONNECTORS)
@pytest.mark.parametrize(
    ("reply", "version"),
    [(REDIS_5, "5.0.7"), (REDIS_6_0, "6.0.16"), (REDIS_6_0_WITHOUT_INFO, "6.0.16")],
    ids=["5", "6.0", "6.0-without-info"],
)
def test_redis_older_than_6_2_is_refused(
    connect: Callable[[str], None], reply: Callable[[list[str]], bytes], version: str
) -> None:
    with FakeRedis(reply) as fake, pytest.raises(UnsupportedServerError, match=TOO_OLD.format(version)):
        connect(f"redis://:s3cret@127.0.0.1:{fake.port}/0")


@pytest.mark.parametrize("connect", CONNECTORS)
@pytest.mark.parametrize(
    "reply",
    [REDIS_6_2, REDIS_10, VALKEY, VALKEY_AS_REDIS_6, SILENT, PROXY],
    ids=["6.2", "10", "valkey", "valkey-as-redis-6", "silent", "proxy"],
)
def test_other_servers_are_used(connect: Callable[[str], None], reply: Callable[[list[str]], bytes]) -> None:
    with FakeRedis(reply) as fake:
        connect(f"redis://127.0.0.1:{fake.port}/0")


def test_connection_is_opened_again_after_the_server_was_upgraded() -> None:
    upgraded = Event()

    def reply(command: list[str]) -> bytes:
        return REDIS_6_2(command) if upgraded.is_set() else REDIS_5(command)

    with FakeRedis(reply) as fake:
        link = Link(f"redis://127.0.0.1:{fake.port}/0", name="test")
        with pytest.raises(UnsupportedServerError):
            link.call("PING")
        upgraded.set()
        assert link.call("PING") == b"PONG"
        link.close()


def test_version_of_a_sentinel_does_not_matter() -> None:
    with FakeRedis(REDIS_6_2) as primary:
        address = bulk("127.0.0.1", str(primary.port))
        with FakeRedis(lambda command: address if command[0] == "SENTINEL" else OK) as sentinel:
            connect_link(f"redis+sentinel://127.0.0.1:{sentinel.port}/main?password=s3cret")
    assert ["HELLO"] in primary.commands and ["AUTH", "s3cret"] in primary.commands
    assert [command[0] for command in sentinel.commands] == ["CLIENT", "SENTINEL"]


@pytest.mark.parametrize(
    "command",
    [("models",), ("top", "--once"), ("config", "square"), ("dead", "list"), ("infer", "square", "7")],
    ids=" ".join,
)
def test_commands_say_it_in_one_line(command: tuple[str, ...]) -> None:
    with FakeRedis(REDIS_5) as fake:
        done = carpool(f"redis://127.0.0.1:{fake.port}/0", *command)
    assert done.returncode == 1
    assert "this is Redis 5.0.7, which is too old" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_up_starts_no_service() -> None:
    with FakeRedis(REDIS_5) as fake:
        supervisor = Supervisor(StackPlan(["square"], redis_url=f"redis://127.0.0.1:{fake.port}/0"))
        with pytest.raises(UnsupportedServerError):
            supervisor.start()
        assert supervisor.workers == []
        supervisor.stop()
        done = carpool(f"redis://127.0.0.1:{fake.port}/0", "up", "square")
    assert done.returncode == 1
    assert "5.0.7, which is too old" in done.stderr and "start that Redis" not in done.stderr


def test_batcher_begins_nothing_and_says_why() -> None:
    with FakeRedis(REDIS_5) as fake:
        service = BatcherService(f"redis://127.0.0.1:{fake.port}/0", "carpool", "b", BatcherMetrics(), {})
        with pytest.raises(UnavailableError, match=TOO_OLD.format("5.0.7")):
            service.run_once()
        assert not [command for command in fake.commands if command[0] not in ("CLIENT", "HELLO", "INFO")]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ([b"server", b"redis", b"version", b"7.0.15", b"proto", 2], ServerVersion("Redis", "7.0.15")),
        ([b"server", b"valkey", b"version", b"9.0.0"], ServerVersion("Valkey", "9.0.0")),
        ([b"server", b"redis"], None),
        ([b"server"], None),
        ([1, 2, b"version", 3], None),
        ([], None),
        (b"OK", None),
        (None, None),
    ],
)
def test_hello_names_the_server(reply: object, expected: ServerVersion | None) -> None:
    assert of_hello(reply) == expected


def test_info_names_the_server() -> None:
    assert of_info(b"# Server\r\nredis_version:7.0.15\r\n") == ServerVersion("Redis", "7.0.15")
    assert of_info(b"redis_version:7.2.4\r\nvalkey_version:9.0.0\r\n") == ServerVersion("Valkey", "9.0.0")
    assert of_info(b"x:redis_version:1\r\n") is of_info(b"OK") is of_info(None) is of_info(7) is None


def test_binary_names_the_server() -> None:
    assert of_binary("Redis server v=5.0.6 sha=0:0") == ServerVersion("Redis", "5.0.6")
    assert of_binary("Valkey server v=9.0.0 sha=0:0") == ServerVersion("Valkey", "9.0.0")
    assert of_binary("") is None


@pytest.mark.parametrize(
    ("version", "too_old"),
    [
        ("2.8.4", True),
        ("6.0.20", True),
        ("6.1.240", True),
        ("6.2.0", False),
        ("6.10", False),
        ("10.0", False),
    ],
)
def test_versions_are_compared_as_numbers(version: str, too_old: bool) -> None:
    assert ServerVersion("Redis", version).too_old is too_old
    assert not ServerVersion("Valkey", version).too_old
    assert not ServerVersion("Redis", f"v{version}").too_old


def test_ipv6_is_connected_to() -> None:
    try:
        fake = FakeRedis(REDIS_6_2, "::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    with fake:
        for connect in CONNECTORS:
            connect(f"redis://[::1]:{fake.port}/0")
