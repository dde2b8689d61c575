"""Redis behind TLS, a password, a socket: how one gets in, and what is said to whoever does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from carpool import AsyncClient, Client
from carpool.errors import UnavailableError
from carpool.store.connection import AsyncLink, Link, LinkError
from carpool_cli.local import paste
from conftest import SERVERS, name_of
from support.configured import NO_PERSISTENCE, ConfiguredRedis
from support.stack import START_S, Stack
from support.waiting import wait_until

OPENSSL: Final = shutil.which("openssl")
PASSWORD: Final = "odd:@/?#%&+ ünd"  # noqa: S105 (all that a URL minds)


def speaks_tls(server: Path) -> bool:
    """Whether it was built with TLS: it says which directive it does not know, or goes on to the next."""
    words = [str(server), "--port", "0", "--tls-port", "0", "--no-such-directive", "x"]
    said = subprocess.run(words, capture_output=True, text=True, check=False)
    return "no-such-directive" in said.stdout + said.stderr


@pytest.fixture(scope="module", params=SERVERS, ids=name_of)
def tls_server(request: pytest.FixtureRequest) -> Path:
    binary: Path = request.param
    if OPENSSL is None:
        pytest.skip("no openssl on PATH to make certificates with")
    if not speaks_tls(binary):
        pytest.skip(f"{binary} is built without TLS")
    return binary


class Certificates:
    """An authority, a server's certificate of it, a client's, and another authority that nobody asked."""

    def __init__(self, home: Path) -> None:
        self._home = home
        for name in ("authority", "impostor"):
            self._authority(name)
        self._signed("server", "DNS:localhost,IP:127.0.0.1")
        self._signed("elsewhere", "DNS:elsewhere.example")
        self._signed("client", "DNS:client")

    def certificate(self, name: str) -> str:
        return str(self._home / f"{name}.crt")

    def key(self, name: str) -> str:
        return str(self._home / f"{name}.key")

    def of_server(self, name: str = "server", *, clients: str = "no") -> list[str]:
        """Options for a redis-server."""
        files = ["--tls-cert-file", self.certificate(name), "--tls-key-file", self.key(name)]
        return [*files, "--tls-ca-cert-file", self.certificate("authority"), "--tls-auth-clients", clients]

    def _authority(self, name: str) -> None:
        self._openssl("req", "-x509", *self._new(name), "-days", "2", "-out", self.certificate(name))

    def _signed(self, name: str, names: str) -> None:
        request, extensions = self._home / f"{name}.csr", self._home / f"{name}.ext"
        extensions.write_text(f"subjectAltName={names}\n")
        self._openssl("req", *self._new(name), "-out", str(request))
        by = ["-CA", self.certificate("authority"), "-CAkey", self.key("authority"), "-CAcreateserial"]
        what = ["-in", str(request), "-extfile", str(extensions), "-out", self.certificate(name)]
        self._openssl("x509", "-req", "-days", "2", *by, *what)

    def _new(self, name: str) -> list[str]:
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        return [*curve, "-subj", f"/CN={name}", "-keyout", self.key(name)]

    @staticmethod
    def _openssl(*words: str) -> None:
        assert OPENSSL is not None
        subprocess.run([OPENSSL, *words], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tls_server: Path, tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def trusting(authority: str) -> str:
    return f"rediss://localhost:{{port}}/0?ssl_ca_certs={authority}"


@pytest.fixture(scope="module")
def stack(
    tls_server: Path, certificates: Certificates, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """Services that find everything in their environment, as a container's do: host, CA, user, password."""
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
    with Stack(home / "logs", server=server, environment=environment) as one:
        one.redis.acl_setuser(
            "server", enabled=True, passwords=[f"+{PASSWORD}"], commands=["+@all"], keys=["*"]
        )
        access = {
            "CARPOOL_REDIS_URL": f"rediss://localhost:{server.port}/0",
            "CARPOOL_REDIS_CA_FILE": certificates.certificate("authority"),
            "CARPOOL_REDIS_USER": "server",
            "CARPOOL_REDIS_PASSWORD_FILE": str(home / "password"),
        }
        environment |= {"batcher": access, "worker": access, "producer": access}
        one.serve("square", "plain.py:Echo")
        yield one


# --- The whole trip


async def test_an_asyncio_producer_over_tls(stack: Stack) -> None:
    async with AsyncClient(stack.url, timeout=15) as client:
        assert [one async for one in client.map("square", range(500))] == [n * n for n in range(500)]


async def test_bodies_that_take_many_records_of_tls(stack: Stack) -> None:
    """A record holds 16 KiB at most: what arrives together is not what is read together."""
    bodies = [bytes([number]) * (200_000 + number) for number in range(24)]
    async with AsyncClient(stack.url, timeout=30) as client:
        assert [one async for one in client.map("Echo", bodies)] == bodies


def test_a_producer_with_threads_finds_its_results_after_the_connection_broke(stack: Stack) -> None:
    with Client(stack.url, timeout=15) as client:
        assert client.infer("square", 2) == 4
        for one in stack.redis.client_list():
            if one["name"].startswith("py-"):
                stack.redis.client_kill_filter(_id=one["id"])
        assert client.infer("square", 3) == 9


def test_the_services_sign_in_by_name_and_no_log_shows_the_password(stack: Stack) -> None:
    with Client(stack.url, timeout=15) as client:
        client.infer("square", 1)
    users = {one["name"].rpartition(":")[2]: one["user"] for one in stack.redis.client_list()}
    assert {users[name] for name in ("moves", "reads", "directory", "fetch", "commit")} == {"server"}
    for service in stack.services:
        assert "odd:" not in service.log.read_text()
        assert b"odd:" not in Path(f"/proc/{service.pid}/cmdline").read_bytes()


def test_the_command_line_over_tls(stack: Stack) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "carpool_cli", "infer", "square", "9"],
        env={**clean_environment(), **stack.environment["producer"]},
        cwd=stack.home,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("81\n", "", 0)


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("CARPOOL_")}


# --- A link


def test_what_tls_has_decrypted_already_counts_as_readable(stack: Stack) -> None:
    """One read takes less than a record holds: the rest is in no socket, and poll would wait for ever."""
    link = Link(stack.url, name="link")
    link.call("PING")
    sock = link._connection._sock
    link.send("ECHO", b"x" * 8000)
    assert link.readable(5.0)
    assert sock.recv(1) == b"$"  # the kernel's part is empty now
    assert sock.pending() > 0
    assert link.readable(0.0)
    link.close()


def test_not_readable_while_there_is_nothing(stack: Stack) -> None:
    link = Link(stack.url, name="link")
    link.call("PING")
    assert not link.readable(0.0)
    assert not link.readable(0.05)  # nor for the tickets that TLS 1.3 sends after the handshake
    link.close()


# --- Who does not get in


@pytest.fixture
def elsewhere(tls_server: Path, certificates: Certificates, tmp_path: Path) -> Iterator[ConfiguredRedis]:
    """A server that can prove it is somebody else."""
    options = (*NO_PERSISTENCE, *certificates.of_server("elsewhere"))
    with ConfiguredRedis(tmp_path / "redis", *options, binary=tls_server, tls=True) as server:
        yield server


async def refusal(url: str) -> str:
    """What both kinds of connections say who do not get in; the same."""
    link = Link(url, name="link", timeout_s=1.0)
    with pytest.raises(LinkError) as blocking:
        link.call("PING")
    another = AsyncLink(url, name="link", on_reply=lambda _: None, on_lost=lambda _: None)
    with pytest.raises(LinkError) as pipelined:
        await another.connect()
    assert str(blocking.value).rpartition(";")[2] == str(pipelined.value).rpartition(";")[2]
    return str(blocking.value)


async def test_an_authority_that_is_not_trusted(stack: Stack, certificates: Certificates) -> None:
    for url in (
        trusting(certificates.certificate("impostor")).format(port=stack.server.port),
        f"rediss://localhost:{stack.server.port}/0",
    ):
        said = await refusal(url)
        assert "certificate verify failed" in said
        assert "CARPOOL_REDIS_CA_FILE" in said


async def test_a_host_that_is_not_who_it_should_be(
    elsewhere: ConfiguredRedis, certificates: Certificates
) -> None:
    for host in ("localhost", "127.0.0.1"):
        url = f"rediss://{host}:{elsewhere.port}/0?ssl_ca_certs={certificates.certificate('authority')}"
        said = await refusal(url)
        assert f"not valid for '{host}'" in said
        assert "a name that is in its certificate" in said


async def test_plain_where_tls_is_spoken_and_tls_where_it_is_not(
    stack: Stack, tls_server: Path, tmp_path: Path
) -> None:
    assert "begins with rediss://" in await refusal(f"redis://localhost:{stack.server.port}/0")
    with ConfiguredRedis(tmp_path / "redis", *NO_PERSISTENCE, binary=tls_server) as plain:
        assert "begins with redis://" in await refusal(f"rediss://localhost:{plain.port}/0")


async def test_a_server_that_wants_to_see_our_certificate(
    tls_server: Path, certificates: Certificates, tmp_path: Path
) -> None:
    options = (*NO_PERSISTENCE, *certificates.of_server(clients="yes"))
    with ConfiguredRedis(tmp_path / "redis", *options, binary=tls_server, tls=True) as server:
        url = trusting(certificates.certificate("authority")).format(port=server.port)
        assert "CARPOOL_REDIS_CERT_FILE" in await refusal(url)
        ours = f"&ssl_certfile={certificates.certificate('client')}&ssl_keyfile={certificates.key('client')}"
        link = Link(url + ours, name="link")
        assert link.call("PING") == b"PONG"
        link.close()


async def test_a_password_that_is_missing_or_wrong(server: Path, tmp_path: Path) -> None:
    options = (*NO_PERSISTENCE, "--requirepass", "x" * 16)
    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as locked:
        assert "CARPOOL_REDIS_PASSWORD_FILE" in await refusal(locked.url)
        wrong = await refusal(f"redis://:not-for-a-log@127.0.0.1:{locked.port}/0")
        assert "not-for-a-log" not in wrong
        with pytest.raises(UnavailableError, match="CARPOOL_REDIS_PASSWORD_FILE"):
            async with AsyncClient(locked.url):
                pass


# --- The configuration, and what `carpool up` says to paste


def test_the_configuration_of_tls_on_top_of_the_other(
    tls_server: Path, certificates: Certificates, tmp_path: Path
) -> None:
    """As in a container, but for where the files are: TLS alone, and nobody gets in without it."""
    folder = Path(__file__).parents[2] / "ops" / "redis"
    users = tmp_path / "users.acl"
    users.write_text(f"user tester on >{'x' * 16} ~* &* +@all\n")
    conf = (folder / "tls.conf").read_text()
    for ours, theirs in (("server.crt", "server"), ("ca.crt", "authority")):
        assert f"/etc/carpool/tls/{ours}" in conf
        conf = conf.replace(f"/etc/carpool/tls/{ours}", certificates.certificate(theirs))
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


def test_what_is_pasted_works(stack: Stack) -> None:
    """`redis-cli` finds the authority; it is told in another way than Carpool is."""
    if shutil.which("redis-cli") is None:
        pytest.skip("no redis-cli on PATH")
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


# --- `carpool up` at a Redis that runs already: by its socket, with a password


def test_up_at_a_socket_with_a_password_that_nobody_shows(server: Path, tmp_path: Path) -> None:
    secret = "s3cret/:@"  # noqa: S105
    (tmp_path / "password").write_text(secret)
    options = (*NO_PERSISTENCE, "--requirepass", secret)
    with ConfiguredRedis(tmp_path / "redis", *options, binary=server) as locked:
        out, err = tmp_path / "out", tmp_path / "err"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            up = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "carpool_cli",
                    "up",
                    "square",
                    "--redis-url",
                    f"unix://{locked.socket}",
                ],
                env={**clean_environment(), "CARPOOL_REDIS_PASSWORD_FILE": str(tmp_path / "password")},
                cwd=tmp_path,
                stdout=stdout,
                stderr=stderr,
            )
        try:
            wait_until(
                lambda: "Ctrl-C stops" in out.read_text() or up.poll() is not None,
                description="the model is served",
                timeout_s=2 * START_S,
            )
            assert up.poll() is None, err.read_text()
            started = [pid for pid in descendants(up.pid) if pid != up.pid]
            assert len(started) >= 3
            for pid in (up.pid, *started):
                assert secret.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
        finally:
            up.terminate()
            assert up.wait(30) == 0
    for text in (out.read_text(), err.read_text()):
        assert "s3cret" not in text


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in descendants(int(child)))]
