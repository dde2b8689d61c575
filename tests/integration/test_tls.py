"""Redis with TLS, a password or a socket: connections that work, and the errors of those that do not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool import AsyncClient, Client
from carpool.cluster import SLOTS
from carpool.errors import UnavailableError
from carpool.store.async_link import AsyncLink
from carpool.store.connection import Link, LinkError
from carpool_cli.local import paste
from conftest import SERVERS, name_of
from support.cluster import free_port_of_node
from support.command import carpool, clean_environment
from support.configured import NO_PERSISTENCE, ConfiguredRedis
from support.forking import ForkedProcess, ForkServer
from support.sentinel import Sentinel
from support.stack import START_S, Stack
from support.waiting import EVENTUALLY_S, wait_until

OPENSSL: Final = shutil.which("openssl")
PASSWORD: Final = "odd:@/?#%&+ ünd"  # noqa: S105 (with all characters that are special in a URL)


def supports_tls(server: Path) -> bool:
    """Whether the server was built with TLS: then it ends because it lacks a certificate."""
    command = [str(server), "--port", "0", "--tls-port", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return "Failed to configure TLS" in done.stdout + done.stderr


@pytest.fixture(scope="module", params=SERVERS, ids=name_of)
def tls_server(request: pytest.FixtureRequest) -> Path:
    binary: Path = request.param
    if OPENSSL is None:
        pytest.skip("openssl is not on PATH; it makes the certificates")
    if not supports_tls(binary):
        pytest.skip(f"{binary} is built without TLS")
    return binary


class Certificates:
    """An authority, certificates that it signed for two servers and a client, and an untrusted authority."""

    def __init__(self, home: Path) -> None:
        self._home = home
        for name in ("authority", "untrusted"):
            self._authority(name)
        self._signed("server", "DNS:localhost,IP:127.0.0.1")
        self._signed("elsewhere", "DNS:elsewhere.example")
        self._signed("client", "DNS:client")

    def certificate(self, name: str) -> str:
        return str(self._home / f"{name}.crt")

    def key(self, name: str) -> str:
        return str(self._home / f"{name}.key")

    def of_server(self, name: str = "server", *, clients: str = "no") -> list[str]:
        """Options for redis-server."""
        files = ["--tls-cert-file", self.certificate(name), "--tls-key-file", self.key(name)]
        return [*files, "--tls-ca-cert-file", self.certificate("authority"), "--tls-auth-clients", clients]

    def _authority(self, name: str) -> None:
        self._openssl("req", "-x509", *self._new(name), "-days", "2", "-out", self.certificate(name))

    def _signed(self, name: str, names: str) -> None:
        request, extensions = self._home / f"{name}.csr", self._home / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        self._openssl("req", *self._new(name), "-out", str(request))
        issuer = ["-CA", self.certificate("authority"), "-CAkey", self.key("authority"), "-CAcreateserial"]
        files = ["-in", str(request), "-extfile", str(extensions), "-out", self.certificate(name)]
        self._openssl("x509", "-req", "-days", "2", *issuer, *files)

    def _new(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return [*curve, "-subj", f"/CN={name}", "-keyout", self.key(name)]

    @staticmethod
    def _openssl(*arguments: str) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tls_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def trusting(authority: str) -> str:
    """A URL, without the port, that trusts this authority."""
    return f"rediss://localhost:{{port}}/0?ssl_ca_certs={authority}"


@pytest.fixture(scope="module")
def stack(
    tls_server: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """A stack whose services are configured by variables, as in a container: host, CA, user, password."""
    home = tmp_path_factory.mktemp("tls")
    (home / "password").write_text(f"{PASSWORD}\n")
    server = ConfiguredRedis(
        home / "redis",
        *NO_PERSISTENCE,
        *certificates.of_server(),
        binary=tls_server,
        url=trusting(certificates.certificate("authority")),
        tls=True,
    )
    environment: dict[str, dict[str, str]] = {}
    with Stack(home / "logs", server=server, environment=environment) as stack:
        stack.redis.acl_setuser(
            "server", enabled=True, passwords=[f"+{PASSWORD}"], commands=["+@all"], keys=["*"]
        )
        access = {
            "CARPOOL_REDIS_URL": f"rediss://localhost:{server.port}/0",
            "CARPOOL_REDIS_CA_FILE": certificates.certificate("authority"),
            "CARPOOL_REDIS_USER": "server",
            "CARPOOL_REDIS_PASSWORD_FILE": str(home / "password"),
        }
        environment |= {"batcher": access, "worker": access, "producer": access}
        stack.serve("square", "plain.py:Echo")
        yield stack


# --- end to end


async def test_async_client_over_tls(stack: Stack) -> None:
    async with AsyncClient(stack.url, timeout=EVENTUALLY_S) as client:
        assert [result async for result in client.map("square", range(500))] == [n * n for n in range(500)]


async def test_bodies_larger_than_a_tls_record(stack: Stack) -> None:
    """A record holds at most 16 KiB, so that a reply takes many reads."""
    bodies = [bytes([number]) * (200_000 + number) for number in range(24)]
    async with AsyncClient(stack.url, timeout=EVENTUALLY_S) as client:
        assert [result async for result in client.map("Echo", bodies)] == bodies


def test_client_gets_results_after_its_connection_was_closed(stack: Stack) -> None:
    with Client(stack.url, timeout=EVENTUALLY_S) as client:
        assert client.infer("square", 2) == 4
        for connection in stack.redis.client_list():
            if connection["name"].startswith("py-"):
                stack.redis.client_kill_filter(_id=connection["id"])
        assert client.infer("square", 3) == 9


def test_services_authenticate_as_their_user_and_never_log_the_password(stack: Stack) -> None:
    with Client(stack.url, timeout=EVENTUALLY_S) as client:
        client.infer("square", 1)
    users = {
        connection["name"].rpartition(":")[2]: connection["user"] for connection in stack.redis.client_list()
    }
    assert {users[name] for name in ("moves", "reads", "fetch", "commit")} == {"server"}
    for service in stack.services:
        assert "odd:" not in service.log.read_text()
        assert b"odd:" not in Path(f"/proc/{service.pid}/cmdline").read_bytes()


def test_command_line_over_tls(stack: Stack) -> None:
    variables = stack.environment["producer"]
    done = carpool(None, "infer", "square", "9", environment=variables, folder=stack.home)
    assert (done.stdout, done.stderr, done.returncode) == ("81\n", "", 0)


# --- Sentinel and Cluster


async def test_sentinel_over_tls(
    stack: Stack, tls_server: Path, certificates: Certificates, tmp_path: Path
) -> None:
    """Given a sentinel that speaks TLS only, expect it to lead both kinds of links to the server."""
    authority = certificates.certificate("authority")
    options = certificates.of_server()
    sentinel = Sentinel(tls_server, tmp_path, stack.server.port, tls=options, authority=authority)
    url = f"rediss{sentinel.url.removeprefix('redis')}?ssl_ca_certs={authority}"
    try:
        wait_until(sentinel.answers, description="the sentinel answers")
        async with AsyncClient(url, timeout=EVENTUALLY_S) as client:
            assert await client.infer("square", 6) == 36
        link = Link(url, name="link")
        assert link.call("PING") == b"PONG"
        link.close()
        assert "certificate verify failed" in await connection_error(url.partition("?")[0])
    finally:
        sentinel.stop()


async def test_cluster_over_tls(tls_server: Path, certificates: Certificates, tmp_path: Path) -> None:
    """Given a cluster of one node that speaks TLS only, expect services and clients to use it."""
    authority = certificates.certificate("authority")
    options = (*NO_PERSISTENCE, *certificates.of_server(), "--cluster-enabled", "yes", "--tls-cluster", "yes")
    trusted = trusting(authority)
    server = ConfiguredRedis(
        tmp_path / "redis", *options, binary=tls_server, url=trusted, tls=True, port=free_port_of_node()
    )
    url = f"rediss+cluster://127.0.0.1:{server.port}?ssl_ca_certs={authority}"
    environment = {role: {"CARPOOL_REDIS_URL": url} for role in ("batcher", "worker")}
    with Stack(tmp_path / "stack", server=server, environment=environment) as stack:
        stack.redis.execute_command("CLUSTER", "ADDSLOTS", *range(SLOTS))
        wait_until(
            lambda: b"cluster_state:ok" in stack.redis.execute_command("CLUSTER", "INFO"),
            description="the cluster is formed",
        )
        stack.serve("square")
        async with AsyncClient(url, timeout=EVENTUALLY_S) as client:
            assert await client.infer("square", 6) == 36


# --- a link


def test_decrypted_bytes_count_as_readable(stack: Stack) -> None:
    """A read may take less than a record: the rest is not in the socket, and poll would wait forever."""
    link = Link(stack.url, name="link")
    link.call("PING")
    sock = link._connection._sock
    link.send("ECHO", b"x" * 8000)
    assert link.readable(5.0)
    assert sock.recv(1) == b"$"  # now the kernel's buffer is empty
    assert sock.pending() > 0
    assert link.readable(0.0)
    link.close()


def test_link_without_data_is_not_readable(stack: Stack) -> None:
    link = Link(stack.url, name="link")
    link.call("PING")
    assert not link.readable(0.0)
    assert not link.readable(0.05)  # the session tickets of TLS 1.3 do not count
    link.close()


# --- rejected connections


@pytest.fixture
def elsewhere(tls_server: Path, certificates: Certificates, tmp_path: Path) -> Iterator[ConfiguredRedis]:
    """A server with a valid certificate for another host name."""
    options = (*NO_PERSISTENCE, *certificates.of_server("elsewhere"))
    with ConfiguredRedis(tmp_path / "redis", *options, binary=tls_server, tls=True) as server:
        yield server


async def connection_error(url: str, timeout_s: float = EVENTUALLY_S) -> str:
    """The error with which both kinds of links fail to connect; it must be the same."""
    link = Link(url, name="link", timeout_s=timeout_s)
    with pytest.raises(LinkError) as error:
        link.call("PING")
    async_link = AsyncLink(url, name="link", on_reply=lambda _: None, on_lost=lambda _: None)
    with pytest.raises(LinkError) as async_error:
        await async_link.connect()
    assert str(error.value).rpartition(";")[2] == str(async_error.value).rpartition(";")[2]
    return str(error.value)


async def test_untrusted_authority_is_rejected(stack: Stack, certificates: Certificates) -> None:
    for url in (
        trusting(certificates.certificate("untrusted")).format(port=stack.server.port),
        f"rediss://localhost:{stack.server.port}/0",
    ):
        error = await connection_error(url)
        assert "certificate verify failed" in error
        assert "CARPOOL_REDIS_CA_FILE" in error


def test_certificate_is_not_checked_if_the_url_says_so(elsewhere: ConfiguredRedis) -> None:
    url = f"rediss://127.0.0.1:{elsewhere.port}/0?ssl_cert_reqs=none"
    link = Link(url, name="link")
    assert link.call("PING") == b"PONG"
    link.close()
    with Client(url):
        pass


async def test_certificate_is_checked_if_the_url_says_so(elsewhere: ConfiguredRedis) -> None:
    for required in ("required", "optional"):
        url = f"rediss://127.0.0.1:{elsewhere.port}/0?ssl_cert_reqs={required}"
        assert "certificate verify failed" in await connection_error(url)


async def test_wrong_host_name_is_rejected(elsewhere: ConfiguredRedis, certificates: Certificates) -> None:
    for host in ("localhost", "127.0.0.1"):
        url = f"rediss://{host}:{elsewhere.port}/0?ssl_ca_certs={certificates.certificate('authority')}"
        error = await connection_error(url)
        assert f"not valid for '{host}'" in error
        assert "a host name that is in its certificate" in error


async def test_plain_and_tls_mismatch_is_reported(stack: Stack, tls_server: Path, tmp_path: Path) -> None:
    assert "URL must begin with rediss://" in await connection_error(
        f"redis://localhost:{stack.server.port}/0"
    )
    with ConfiguredRedis(tmp_path / "redis", *NO_PERSISTENCE, binary=tls_server) as plain:
        silent = f"rediss://localhost:{plain.port}/0"  # it answers nothing: no time is too short
        assert "URL must begin with redis://" in await connection_error(silent, timeout_s=1.0)


async def test_server_that_requires_a_client_certificate(
    tls_server: Path, certificates: Certificates, tmp_path: Path
) -> None:
    options = (*NO_PERSISTENCE, *certificates.of_server(clients="yes"))
    with ConfiguredRedis(tmp_path / "redis", *options, binary=tls_server, tls=True) as server:
        url = trusting(certificates.certificate("authority")).format(port=server.port)
        assert "CARPOOL_REDIS_CERT_FILE" in await connection_error(url)
        client = (
            f"&ssl_certfile={certificates.certificate('client')}&ssl_keyfile={certificates.key('client')}"
        )
        link = Link(url + client, name="link")
        assert link.call("PING") == b"PONG"
        link.close()


async def test_missing_or_wrong_password_is_reported(server: Path, tmp_path: Path) -> None:
    options = (*NO_PERSISTENCE, "--requirepass", "x" * 16)
    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as locked:
        assert "CARPOOL_REDIS_PASSWORD_FILE" in await connection_error(locked.url)
        error = await connection_error(f"redis://:not-for-a-log@127.0.0.1:{locked.port}/0")
        assert "not-for-a-log" not in error
        with pytest.raises(UnavailableError, match="CARPOOL_REDIS_PASSWORD_FILE"):
            async with AsyncClient(locked.url):
                pass


# --- ops/redis/tls.conf, and the lines that `carpool up` prints


def test_tls_conf_extends_redis_conf(tls_server: Path, certificates: Certificates, tmp_path: Path) -> None:
    """As in a container, except for the paths: only TLS connections are accepted."""
    folder = Path(__file__).parents[2] / "ops" / "redis"
    users = tmp_path / "users.acl"
    users.write_text(f"user tester on >{'x' * 16} ~* &* +@all\n")
    conf = (folder / "tls.conf").read_text()
    for file, name in (("server.crt", "server"), ("ca.crt", "authority")):
        assert f"/etc/carpool/tls/{file}" in conf
        conf = conf.replace(f"/etc/carpool/tls/{file}", certificates.certificate(name))
    conf = conf.replace("/etc/carpool/tls/server.key", certificates.key("server"))
    (tmp_path / "tls.conf").write_text(conf)
    options = (str(folder / "redis.conf"), "--aclfile", str(users), "--include", str(tmp_path / "tls.conf"))
    url = trusting(certificates.certificate("authority")).replace("rediss://", f"rediss://tester:{'x' * 16}@")
    with ConfiguredRedis(tmp_path / "redis", *options, binary=tls_server, url=url, tls=True) as server:
        link = Link(server.url, name="link")
        assert link.call("CONFIG", "GET", "port") == [b"port", b"0"]
        assert link.call("CONFIG", "GET", "tls-protocols") == [b"tls-protocols", b"TLSv1.2 TLSv1.3"]
        assert link.call("CONFIG", "GET", "tls-auth-clients") == [b"tls-auth-clients", b"no"]
        assert link.call("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
        link.close()


def test_pasted_lines_work(stack: Stack) -> None:
    """`redis-cli` gets the authority in another way than Carpool does."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not on PATH")
    for line in paste.lines(stack.url, "square")[:2]:
        done = subprocess.run(
            ["/bin/sh", "-c", line],
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert "49" in done.stdout, f"{line}\n{done.stdout}{done.stderr}"


# --- `carpool up` with a running Redis: a socket, and a password


def test_up_with_a_socket_never_shows_the_password(server: Path, tmp_path: Path) -> None:
    secret = "s3cret/:@"  # noqa: S105
    (tmp_path / "password").write_text(secret)
    options = (*NO_PERSISTENCE, "--requirepass", secret)
    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as locked:
        out, err = tmp_path / "out", tmp_path / "err"
        arguments = ["up", "square", "--redis-url", f"unix://{locked.socket}"]
        environment = {**clean_environment(), "CARPOOL_REDIS_PASSWORD_FILE": str(tmp_path / "password")}
        up: ForkedProcess | subprocess.Popen[bytes]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            # Command lines are those of new interpreters, and the same on each server.
            if server == SERVERS[0]:
                command = [sys.executable, "-m", "carpool_cli", *arguments]
                up = subprocess.Popen(command, env=environment, cwd=tmp_path, stdout=stdout, stderr=stderr)
            else:
                forks = ForkServer.of_this_process()
                up = forks.start("carpool_cli", arguments, tmp_path, environment, stdout, stderr)
        try:
            wait_until(
                lambda: "Press Ctrl-C to stop everything." in out.read_text() or up.poll() is not None,
                description="the model is served",
                timeout_s=2 * START_S,
            )
            assert up.poll() is None, err.read_text()
            children = [pid for pid in descendants(up.pid) if pid != up.pid]
            assert len(children) >= 3
            for pid in (up.pid, *children):
                assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        finally:
            up.terminate()
            assert up.wait(EVENTUALLY_S) == 0
    for text in (out.read_text(), err.read_text()):
        assert "s3cret" not in text


def descendants(pid: int) -> list[int]:
    """This process and all its descendants."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(descendant for child in children for descendant in descendants(int(child)))]
