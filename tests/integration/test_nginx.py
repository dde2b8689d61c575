"""ops/nginx: a real nginx before two gateways, and one before the operators' page."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import pytest

from carpool.lifecycle import command_that_dies_with_parent
from support.http import Connection, call, request
from support.models.stepping import text_of
from support.pem import CERTIFICATE, KEY
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until
from support.websocket import Socket, handshake

CONFIGURATION: Final = Path(__file__).parents[2] / "ops/nginx/carpool.conf"
OF_CONSOLE: Final = CONFIGURATION.with_name("console.conf")
ECHO: Final = "/carpool/v1/models/Echo/infer"
CHAIN: Final = "/carpool/v1/models/Chain/infer"
MAIN: Final = """\
{user}daemon off; worker_processes 1; pid {home}/nginx.pid; error_log {home}/error.log info;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
  include {home}/carpool.conf;
}}
"""
LOAD_CLIENTS: Final = 4


def tool() -> str:
    """The path of nginx. If missing, skip, or fail if CARPOOL_REQUIRED lists it."""
    path = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        missing = (
            "nginx is missing; on Debian and Ubuntu: apt-get install --no-install-recommends nginx-light"
        )
        if "nginx" in os.environ.get("CARPOOL_REQUIRED", "").replace(",", " ").split():
            pytest.fail(missing)
        pytest.skip(missing)
    return path


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    tool()
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo", "stepping.py:Chain")
        yield stack


@pytest.fixture(scope="module")
def gateways(shared: Stack) -> list[Service]:
    return [shared.gateway() for _ in range(2)]


@pytest.fixture(scope="module")
def nginx(gateways: list[Service], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an nginx with the configuration, whose addresses are those of the test."""
    home = tmp_path_factory.mktemp("nginx")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    text = CONFIGURATION.read_text().replace("127.0.0.1:8080", address)
    for at, gateway in enumerate(gateways):
        text = text.replace(f"127.0.0.1:{8000 + at}", gateway.url.removeprefix("http://"))
    with running(home, text, address):
        yield f"http://{address}"


@contextmanager
def running(home: Path, text: str, address: str) -> Iterator[None]:
    """An nginx with this configuration, which listens at this address."""
    # As root, it would run as a user that may not write here.
    user = "user root; " if os.getuid() == 0 else ""
    (home / "carpool.conf").write_text(text)
    (home / "nginx.conf").write_text(MAIN.format(home=home, user=user))
    command = [tool(), "-c", str(home / "nginx.conf"), "-e", str(home / "error.log")]
    process = subprocess.Popen(command_that_dies_with_parent(command), cwd=home)
    try:
        wait_until(lambda: _listens(address), description="nginx listens")
        yield
    finally:
        process.terminate()
        process.wait(10)


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def test_requests_pass_unchanged(nginx: str) -> None:
    body = os.urandom(5_000_000)
    answer = call(nginx, "POST", ECHO, body, Content_Type="application/octet-stream", X_Request_Id="mine")
    assert (answer.code, answer.body, answer.headers["x-request-id"]) == (200, body, "mine")
    with_key = call(nginx, "POST", ECHO, b"7", Idempotency_Key="pass", Carpool_Lane="left")
    assert (with_key.code, with_key.body) == (200, b"7")
    assert with_key.headers["x-request-id"], "nginx gives one to a request that has none"
    refused = call(nginx, "POST", ECHO, b"{")
    assert (refused.code, refused.json["status"]) == (400, "INVALID_ARGUMENT")
    assert call(nginx, "GET", "/metrics").code == 404


def test_websockets_pass_and_pages_of_this_site_may_open_them(nginx: str) -> None:
    site = nginx.removeprefix("http://")
    with Socket(nginx, "/carpool/v1/models/Chain/stream", Host=site, Origin=nginx) as socket:
        socket.send({"id": "1", "body": {"length": 3, "step_s": 0.02}})
        *chunks, end = socket.until_end()
        assert "".join(one["chunk"] for one in chunks) == text_of(end["end"]["correlation_id"], 3)
    with Connection(nginx) as connection:
        connection.send(
            handshake("/carpool/v1/models/Chain/stream", Host=site, Origin="https://else.example")
        )
        assert connection.answer(has_body=False).code == 403


def test_events_are_not_held_back(nginx: str) -> None:
    """Given a stream that lasts longer than the test, expect its first chunk."""

    def begin(connection: Connection, **body: float) -> None:
        headers = {"Accept": "text/event-stream"}
        connection.send(request("POST", CHAIN, json.dumps(body).encode(), **headers))
        assert connection.answer(has_body=False).code == 200

    with Connection(nginx) as connection:
        begin(connection, length=3)
        events = b"".join(iter(connection.part, b"")).split(b"\n\n")
    assert [event.partition(b":")[0] for event in events] == [b"data", b"data", b"data", b"event", b""]
    with Connection(nginx) as connection:
        begin(connection, length=1_000_000, step_s=0.5)
        assert connection.part().startswith(b"data:")


class Load:
    """Threads that send requests through nginx one after another, until `stop`; with keys if `has_keys`."""

    def __init__(self, nginx: str, *, has_keys: bool, clients: int = LOAD_CLIENTS) -> None:
        self.wrong: list[str] = []
        self._nginx, self._has_keys = nginx, has_keys
        self._stopping = threading.Event()
        self._answers = [0] * clients
        self._threads = [threading.Thread(target=self._run, args=(client,)) for client in range(clients)]
        for thread in self._threads:
            thread.start()

    def _run(self, client: int) -> None:
        while not self._stopping.is_set():
            self._use_connection(client)

    def _use_connection(self, client: int) -> None:
        """Send requests on one connection; nginx ends it after a thousand."""
        is_last = False
        with Connection(self._nginx) as connection:
            while not (is_last or self._stopping.is_set()):
                name = f"{client}-{self._answers[client]}"
                headers = {"Idempotency_Key": name} if self._has_keys else {}
                answer = connection.request("POST", ECHO, json.dumps(name).encode(), **headers)
                if (answer.code, answer.body.decode()) != (200, json.dumps(name)):
                    self.wrong.append(f"{name}: {answer.code} {answer.body!r:.200}")
                self._answers[client] += 1
                is_last = answer.headers.get("connection") == "close"

    def wait_for_more(self, number: int) -> None:
        """Wait until each client has this number of further answers, or one is wrong."""
        targets = [answers + number for answers in self._answers]
        wait_until(
            lambda: self.wrong or all(map(int.__ge__, self._answers, targets)),
            description="all clients have more results",
        )

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(45)


def test_a_killed_gateway_fails_no_request_that_has_a_key(
    nginx: str, gateways: list[Service], shared: Stack
) -> None:
    """Given clients that send requests with keys, one after another, expect that each has its result, though
    a gateway is killed, and another one serves at its address later."""
    load = Load(nginx, has_keys=True)
    try:
        victim, other = gateways
        load.wait_for_more(10)
        wait_until_used(other, load)
        victim.kill()
        load.wait_for_more(10)
        gateways[0] = shared.gateway("--port", victim.url.rpartition(":")[2])
        load.wait_for_more(10)
    finally:
        load.stop()
    assert not load.wrong


def test_gateways_are_replaced_without_a_failed_request(
    nginx: str, gateways: list[Service], shared: Stack
) -> None:
    """Given clients that send requests without keys, and both gateways terminated and started again, one
    after the other, expect that each request has its result."""
    load = Load(nginx, has_keys=False)
    try:
        for at in (0, 1):
            load.wait_for_more(50)
            assert gateways[at].terminate() == 0
            gateways[at] = shared.gateway("--port", gateways[at].url.rpartition(":")[2])
            wait_until_used(gateways[at], load)
        load.wait_for_more(50)
    finally:
        load.stop()
    assert not load.wrong


def wait_until_used(gateway: Service, load: Load) -> None:
    """Wait until nginx gives requests to this gateway, or an answer is wrong. It gives none for 5 s after two
    connections failed, and be it those to a gateway that had its address before."""
    before = _answers_of(gateway)
    wait_until(lambda: load.wrong or _answers_of(gateway) > before, description="nginx uses the gateway")


def _answers_of(gateway: Service) -> int:
    """How many requests for results a gateway has answered."""
    lines = call(gateway.url, "GET", "/metrics").body.decode().splitlines()
    counts = [
        line for line in lines if line.startswith('carpool_gateway_requests_total{code="200",route="infer"}')
    ]
    return int(float(counts[0].rpartition(" ")[2])) if counts else 0


def test_nginx_signs_people_in_at_the_operators_page(shared: Stack, tmp_path: Path) -> None:
    """The one that nginx names has the role of the file of users, others that of the flag. A header that a
    client sends means nothing, with nginx and without. Cookies are for TLS only, and forms are accepted."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    header = ("--trusted-header", "X-Remote-User")
    console = shared.console("--trusted-proxy", "127.0.0.1", *header)
    text = OF_CONSOLE.read_text().replace("/etc/nginx/", f"{tmp_path}/").replace("127.0.0.1:8443", address)
    text = text.replace("127.0.0.1:8800", console.url.removeprefix("http://"))
    (tmp_path / "console.crt").write_text(CERTIFICATE)
    (tmp_path / "console.key").write_text(KEY)
    (tmp_path / "console.passwords").write_text("operator:{PLAIN}one\nvic:{PLAIN}two\n")
    trusting = ssl.create_default_context(cadata=CERTIFICATE)
    trusting.check_hostname = False
    opener = urllib.request.build_opener(
        urllib.request.HTTPCookieProcessor(), urllib.request.HTTPSHandler(context=trusting)
    )

    def ask(path: str, who: str, form: dict[str, str] | None = None) -> str:
        headers = {"Authorization": f"Basic {b64encode(who.encode()).decode()}", "X-Remote-User": "operator"}
        headers |= {"Origin": f"https://{address}"} if form is not None else {}
        data = None if form is None else urlencode(form).encode()
        request = urllib.request.Request(f"https://{address}{path}", data, headers)
        with opener.open(request, timeout=EVENTUALLY_S) as answer:
            seen.append(answer.headers.get("Set-Cookie") or "")
            page: bytes = answer.read()
        return page.decode()

    seen: list[str] = []
    with running(tmp_path, text, address):
        page = ask("/models/Echo/settings/max_queue_size", "operator:one")
        assert "operator, operator" in page
        assert seen[0].startswith("__Host-") and "Secure" in seen[0]
        csrf = re.search(r'name="csrf" value="([^"]+)"', page)
        assert csrf is not None
        form = {"csrf": csrf[1], "name": "max_queue_size", "value": "78"}
        assert "max_queue_size is 78" in ask("/models/Echo/settings", "operator:one", form)
        assert "vic, viewer" in ask("/", "vic:two")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask("/", "nobody:three")
    untrusting = shared.console("--trusted-proxy", "192.0.2.1", *header)
    answer = call(untrusting.url, "GET", "/", X_Remote_User="operator")
    assert (answer.code, answer.headers["location"]) == (303, "/sign-in?next=%2F")
