"""The console over real HTTP: sign-in, forms, roles, proxies, headers; pages, with Redis and without it."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NamedTuple, cast

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

import carpool_console.app
import carpool_console.reader
import carpool_console.server
from carpool.keys import DEFAULT_PREFIX, Keys, models_key
from carpool.settings import ConsoleSettings, read_settings
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool.store.operations import Operations
from carpool.wire.audit import Actor
from carpool.wire.report import BatcherReport, Gauges
from carpool_cli.local.embedded import free_port
from carpool_console.access import done, form_of, session_of
from carpool_console.access import operator as operator_only
from carpool_console.app import make_app
from carpool_console.console import Console
from carpool_console.meter import ROUTES
from carpool_console.pages import PAGES as PAGES_OF_CONSOLE
from carpool_console.pages import nodes
from carpool_console.reader import INTERVAL_S, SharedReader
from carpool_console.reading import ModelsReader, Reading
from carpool_console.security import Guard
from carpool_console.server import HEAD_BYTES_MAX, Server
from carpool_console.sessions import ATTEMPTS_FREE
from carpool_console.users import Role, User, Users, hash_of
from conftest import SERVERS
from support.cluster import RedisCluster
from support.command import carpool
from support.console import Browser, printed_password
from support.http import Answer, Connection, call
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

PAGES: Final = ("/", "/models/Echo", "/workers", "/nodes")
ATTACK: Final = "<script>alert(1)</script>"
LARGE: Final = b"x" * 32 * 1024 * 1024  # more than the buffers of two sockets
POST: Final = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\n"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With a model, a worker without a batcher, and hostile names."""
    with Stack(tmp_path_factory.mktemp("console")) as stack:
        stack.serve("plain.py:Echo")
        yield stack


@pytest.fixture(scope="module")
def console(shared: Stack) -> Service:
    return shared.console("--http-port", "0", "--trusted-proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def cookies(console: Service) -> dict[str, str]:
    """Of a user who has signed in."""
    browser = Browser(console)
    assert browser.sign_in(*printed_password(console)).code == 303
    return browser.cookies


@pytest.fixture
def operator(console: Service, cookies: dict[str, str]) -> Browser:
    """A browser whose user has signed in."""
    browser = Browser(console)
    browser.cookies.update(cookies)
    return browser


def shown(browser: Browser, path: str, text: str) -> str:
    """The page at this path once it has this text: before, a busy Redis may not have been read."""
    return wait_until(
        lambda: page if text in (page := browser.get(path).body.decode()) else "",
        description=f"{path} has {text!r}",
    )


# --- sign-in -----------------------------------------------------------------------------------------------


def test_nothing_is_shown_without_signing_in(console: Service) -> None:
    stranger = Browser(console)
    for page in PAGES:
        answer = stranger.get(f"{page}?q=1")
        assert (answer.code, answer.body) == (303, b"")
        assert answer.headers["location"] == f"/sign-in?next={page.replace('/', '%2F')}%3Fq%3D1"
        assert stranger.get(page, x_carpool_live="1").code == 401
    assert stranger.get("/sign-in").code == 200
    assert stranger.post("/sign-out", {}).code == 401
    answer = stranger.get("/static/console.css")
    assert (answer.code, answer.headers["content-type"]) == (200, "text/css; charset=utf-8")


def test_the_first_password_is_printed_once_and_kept_as_a_hash(console: Service, shared: Stack) -> None:
    name, password = printed_password(console)
    file = shared.home / "users.toml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert password not in file.read_text()
    logged = [line for line in console.log.read_text().splitlines() if line.startswith("{")]
    assert logged
    assert password not in "".join(logged)
    again = shared.console()
    assert "password" not in again.log.read_text()
    assert Browser(again).sign_in(name, password).code == 303
    assert again.terminate() == 0


def test_a_session_is_a_cookie_that_scripts_and_other_sites_do_not_get(console: Service) -> None:
    browser = Browser(console)
    answer = browser.sign_in(*printed_password(console))
    assert answer.headers["location"] == "/"
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert re.fullmatch(r"carpool_console_\d+=[\w-]{43}", name)
    assert set(attributes) == {"HttpOnly", "Max-Age=43200", "Path=/", "SameSite=strict"}
    behind_tls = Browser(console, {"x-forwarded-proto": "https"})
    behind_tls.origin = console.url.replace("http:", "https:")
    answer = behind_tls.sign_in(*printed_password(console))
    assert answer.headers["set-cookie"].startswith("__Host-")
    assert "Secure" in answer.headers["set-cookie"]
    assert behind_tls.get("/").code == 200
    behind_tls.headers.clear()  # the cookie of TLS is none without it
    assert behind_tls.get("/").code == 303


def test_signing_out_ends_the_session(console: Service) -> None:
    browser = Browser(console)
    browser.sign_in(*printed_password(console))
    cookies = dict(browser.cookies)
    answer = browser.post("/sign-out", {"csrf": browser.csrf()})
    assert (answer.code, answer.headers["location"]) == (303, "/sign-in")
    assert browser.cookies == {}
    browser.cookies = cookies
    assert browser.get("/").code == 303


def test_attempts_that_fail_are_slowed_down_by_address(console: Service) -> None:
    name, password = printed_password(console)
    attacker = Browser(console, {"x-forwarded-for": "192.0.2.66"})

    def attack() -> Answer | None:
        """The answer to the right password, unless this machine stood still until it was allowed again."""
        for _ in range(ATTEMPTS_FREE):
            answer = attacker.sign_in(name, "wrong")
            assert answer.code == 401
            assert b"The name or the password is wrong" in answer.body
        answer = attacker.sign_in(name, password)
        return None if answer.code == 303 else answer

    answer = wait_until(attack, description="it is asked again at once")
    assert answer is not None
    assert answer.code == 429
    assert b"Too many attempts failed" in answer.body
    assert Browser(console, {"x-forwarded-for": "192.0.2.67"}).sign_in(name, password).code == 303
    assert Browser(console).sign_in("nobody", password).code == 401
    logged = {event["address"] for event in console.events("sign-in failed")}
    assert "192.0.2.66" in logged


def test_users_are_added_and_removed_while_the_console_runs(console: Service, shared: Stack) -> None:
    file = str(shared.home / "users.toml")
    added = carpool(None, "console", "--users", file, "--add-user", "ann", "--role", "viewer")
    assert added.returncode == 0, added.stderr
    browser = Browser(console)
    assert browser.sign_in("ann", added.stdout.split()[-1]).code == 303
    assert b"ann, viewer" in browser.get("/").body
    promoted = carpool(None, "console", "--users", file, "--add-user", "ann", "--role", "operator")
    assert "new password" in promoted.stdout
    assert browser.get("/").code == 303, "the session with the old password has ended"
    assert browser.sign_in("ann", promoted.stdout.split()[-1]).code == 303
    removed = carpool(None, "console", "--users", file, "--remove-user", "ann")
    assert removed.returncode == 0, removed.stderr
    assert browser.get("/").code == 303
    assert carpool(None, "console", "--users", file, "--remove-user", "ann").returncode == 1


# --- forms and headers -------------------------------------------------------------------------------------


def test_forms_of_other_sites_and_sessions_do_nothing(operator: Browser) -> None:
    csrf = operator.csrf()
    right = {"csrf": csrf}
    assert operator.post("/sign-out", right, origin="http://evil.example").code == 403
    assert operator.post("/sign-out", right, origin="null").code == 403
    assert operator.post("/sign-out", right, origin="").code == 403
    assert operator.post("/sign-out", {"csrf": csrf[:-1]}).code == 403
    assert operator.post("/sign-out", {}).code == 403
    assert operator.post("/sign-out", right, content_type="application/json").code == 415
    assert operator.post("/sign-out", {**right, "x": "y" * 300_000}).code == 413
    assert operator.post("/sign-out", {f"x{at}": "" for at in range(6000)} | right).code == 400
    assert operator.get("/sign-out").code == 405
    assert operator.get("/").code == 200, "still signed in"


def test_each_answer_has_the_headers(operator: Browser, console: Service) -> None:
    asked = ["/", "/models/none", "/static/live.js", "/static/none", "/none", "/sign-in", "/sign-out"]
    answers = [*map(operator.get, asked), Browser(console).get("/"), Browser(console).get("/sign-in")]
    assert sorted({answer.code for answer in answers}) == [200, 303, 404, 405]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert {"default-src 'none'", "frame-ancestors 'none'", "script-src 'self'"} <= set(
            policy.split("; ")
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        is_file = answer.code == 200 and "javascript" in answer.headers["content-type"]
        assert answer.headers["cache-control"].endswith("immutable" if is_file else "no-store")
        assert "server" not in answer.headers


def test_a_proxy_signs_users_in_and_nobody_else_does(shared: Stack) -> None:
    trusting = shared.console("--trusted-proxy", "127.0.0.1", "--trusted-header", "X-Remote-User")
    ann = Browser(trusting, {"x-remote-user": "ann@example.org"})
    page = ann.get("/").body
    assert b"ann@example.org, viewer" in page
    assert b"Sign out" not in page  # the proxy would sign in again
    operator_by_name = Browser(trusting, {"x-remote-user": "operator"})
    assert b"operator, operator" in operator_by_name.get("/").body
    operator_by_name.headers.clear()
    assert operator_by_name.get("/").code == 303, "not even for a user of the file"
    operator_by_name.headers["x-remote-user"] = "bob"
    assert b"bob, viewer" in operator_by_name.get("/").body, "the cookie of another user does not count"
    ann.headers.clear()
    assert ann.get("/").code == 303, "without the proxy's word the cookie does not count"
    assert trusting.terminate() == 0
    distant = shared.console("--trusted-proxy", "192.0.2.1", "--trusted-header", "X-Remote-User")
    assert Browser(distant, {"x-remote-user": "ann"}).get("/").code == 303
    assert distant.terminate() == 0


# --- pages -------------------------------------------------------------------------------------------------


def test_pages_show_a_model_its_worker_and_what_fails(operator: Browser, shared: Stack) -> None:
    entry_id = shared.send("Echo", body="1")
    assert shared.result("Echo", entry_id)["status"] == "OK"
    worker = shared.served_by("Echo").wait_for("worker ready")["worker"]
    found = shown(operator, "/", '<a href="/models/Echo">Echo</a>')
    assert re.search(r'<span class="state \w+">serving</span>', found)
    page = shown(operator, "/models/Echo", f"{worker}/0")
    assert "<h1>Echo</h1>" in page
    assert "Latency" in page
    shown(operator, "/workers", f"{worker}/0")
    shown(operator, "/nodes", "No node runs")
    assert operator.get("/models/Other").code == 404
    assert "Echo" not in operator.get("/?q=zzz").body.decode().partition('id="models"')[2]


def test_hostile_names_are_text(operator: Browser, shared: Stack) -> None:
    shared.redis.sadd("carpool:models", "Hostile", ATTACK, "a{b}")
    keys = Keys("Hostile")
    shared.redis.hset(
        keys.registration, mapping={"max_batch_size": ATTACK, "parameters": f'{{"p": "{ATTACK}"}}'}
    )
    shared.redis.zadd(keys.workers, {f"{ATTACK}-1-abc/0": 9e15})
    shared.redis.xadd(keys.dead, {"reason": ATTACK, "correlation_id": ATTACK})
    shared.redis.hset(keys.declared, f"{ATTACK}-1-abc", "[[")
    absurd = BatcherReport("b", 0, 10**400, Gauges(1, 1, 1.0, 1, 1, 1), {}, 0, 0, {}, (), None)
    shared.redis.sadd("carpool:models", "Absurd")
    shared.redis.set(Keys("Absurd").report, absurd.encode())
    shared.redis.set(Keys("Absurd").batcher, "b")
    try:
        wait_until(lambda: b"Hostile" in operator.get("/").body, description="the model is listed")
        pages = [
            shown(operator, "/", "its report makes no sense"),
            *(shown(operator, path, "&lt;script&gt;alert(1)") for path in ("/models/Hostile", "/workers")),
        ]
    finally:
        shared.redis.srem("carpool:models", "Hostile", "Absurd", ATTACK, "a{b}")
    assert "its report makes no sense" in pages[0]
    assert all(ATTACK not in page for page in pages)
    assert all("&lt;script&gt;alert(1)&lt;/script&gt;" in page for page in pages[1:])
    assert "1 dead letter, the newest" in pages[1]


def test_what_operators_ordered_is_shown(operator: Browser, shared: Stack) -> None:
    worker = shared.served_by("Echo").wait_for("worker ready")["worker"]
    link = Link(shared.url, name="test")
    orders = Operations(link, "carpool", Actor("ann@host", "command"))

    orders.pause("Echo", refuses=False, reason="<disk>")
    shown(operator, "/", "by ann@host: &lt;disk&gt;")
    orders.drain("Echo", worker)
    shown(operator, "/workers", "drained since ")
    shown(operator, "/models/Echo", "drained since ")
    orders.undrain("Echo", worker)
    orders.resume("Echo")
    shown(operator, "/", ">serving</span>")
    link.close()


def test_many_who_look_cost_redis_what_one_costs(shared: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[float] = []
    read = ModelsReader.read

    def counted(models: ModelsReader) -> Reading:
        rounds.append(time.monotonic())
        return read(models)

    monkeypatch.setattr(ModelsReader, "read", counted)
    reader = SharedReader(shared.url, "carpool", "test", lambda _: None)
    reader.start()
    try:
        assert rounds == [], "nobody looks"
        looking = [threading.Thread(target=reader.look, kwargs={"workers": True}) for _ in range(20)]
        for thread in looking:
            thread.start()
        for thread in looking:
            thread.join()
        view = wait_until(
            lambda: view if (view := reader.look(workers=True)).workers.get("Echo") else None,
            description="all is read",
        )
        assert view is not None
        assert view.overview.row("Echo") is not None
        assert [len(worker.processes) for worker in view.workers["Echo"]] == [1]
    finally:
        reader.stop()
    assert len(rounds) <= 2 + (rounds[-1] - rounds[0]) / INTERVAL_S


def test_a_model_whose_processes_die_does_not_look_as_if_all_were_well(tmp_path: Path) -> None:
    """Given a request that ends its process, expect that the pages and `carpool top` say so, also to those
    who look later."""
    with Stack(tmp_path) as stack:
        stack.batcher()
        model = stack.serve("faulty.py:Faulty")
        assert stack.result(model, stack.send(model, body='"kill"'))["status"] == "ABORTED"
        deaths = len(stack.events("model process died"))
        directory = Directory(Link(stack.url, name="test"), DEFAULT_PREFIX)

        def is_told() -> bool:
            sample = directory.sample(model)
            return sample.process_deaths == deaths and bool(sample.report and sample.report.failed)

        wait_until(is_told, description="worker and batcher have told")
        directory.close()
        console = stack.console()
        browser = Browser(console)
        browser.sign_in(*printed_password(console))
        died = f"died {deaths} times in the last minute"
        for page in ("/", f"/models/{model}", "/workers"):
            shown(browser, page, died)
        assert re.search(f"model processes +{died}", carpool(stack.url, "top", "--once").stdout)


def test_models_of_a_cluster_are_read_from_their_nodes() -> None:
    with RedisCluster(SERVERS[0]) as cluster:
        names = [f"model-{number}" for number in range(8)]
        for name in names:
            keys = Keys(name)
            cluster.primary_of(models_key()).redis.sadd(models_key(), name)
            cluster.primary_of(keys.requests).redis.xadd(keys.requests, {"body": "1"})
        assert len({cluster.primary_of(Keys(name).requests).port for name in names}) > 1
        reader = SharedReader(cluster.url, "carpool", "test", lambda _: None)
        reader.start()
        try:
            overview = reader.look(names[0], workers=True, nodes=True).overview
            assert [(row.model, row.figures.waiting) for row in overview.rows] == [(one, 1) for one in names]
            cluster.move(Keys(names[3]).requests)
            cluster.primary_of(Keys(names[3]).requests).redis.xadd(Keys(names[3]).requests, {"body": "2"})
            wait_until(
                lambda: (row := reader.overview().row(names[3])) is not None and row.figures.waiting == 2,
                description="the model is read from the node that has it now",
            )
            assert reader.error == ""
        finally:
            reader.stop()


def test_redis_away_is_said_with_the_last_figures_and_it_comes_back(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        stack.redis.sadd("carpool:models", "Echo")
        browser = Browser(stack.console("--http-port", "0"))
        console = stack.services[-1]
        assert browser.sign_in(*printed_password(console)).code == 303
        assert "Redis does not answer" not in shown(browser, "/", '<a href="/models/Echo">')
        os.kill(stack.server.pid, signal.SIGSTOP)
        try:
            page = wait_until(
                lambda: found if b"Redis does not answer" in (found := browser.get("/").body) else b"",
                description="the page says that Redis is away",
            )
            assert re.search(rb"These figures are [0-9.]+ (ms|s|min) old", page)
            assert b'<a href="/models/Echo">' in page
            ready = call(console.status_url, "GET", "/readyz")
            assert (ready.code, b"warning: Redis cannot be read: " in ready.body) == (200, True)
        finally:
            os.kill(stack.server.pid, signal.SIGCONT)
        wait_until(lambda: b"Redis does not answer" not in browser.get("/").body, description="Redis is back")
        assert console.terminate() == 0


def test_answers_are_counted_by_route_and_status(console: Service, operator: Browser) -> None:
    """Each route has a name, and none of them is what a client wrote."""
    of_one = 'carpool_console_requests_total{code="%d",route="%s"}'
    asked = {
        (200, "/models/{model}"): "/models/Echo",
        (404, "none"): "/no-such-page",
        (404, "/models/{model}"): "/models/x",
    }
    before = counted(console)
    for path in asked.values():
        operator.get(path)
    after = wait_until(
        lambda: found if sum((found := counted(console)).values()) >= sum(before.values()) + 6 else {},
        description="all is counted",
    )
    for code, route in asked:
        name = of_one % (code, route)
        assert after[name] == before[name] + 1, name
    name = 'carpool_console_seconds_count{route="/models/{model}"}'
    assert after[name] == before[name] + 2
    assert not any("Echo" in line or "no-such-page" in line for line in after)
    known = {route.path for page in PAGES_OF_CONSOLE for route in page.routes(cast(Console, None))}
    assert {*known, *("/sign-in", "/sign-out", "/static/{name}", "none")} == set(ROUTES)


def counted(console: Service) -> Counter[str]:
    """The lines of /metrics that count answers, and what they count."""
    text = call(console.status_url, "GET", "/metrics").body.decode()
    found = re.findall(r"^(carpool_console_(?:requests_total|seconds_count).*) (\S+)$", text, re.MULTILINE)
    return Counter({line: round(float(number)) for line, number in found})


def test_a_console_that_never_saw_redis_says_so(tmp_path: Path) -> None:
    with Stack(tmp_path) as stack:
        console = stack.console("--redis-url", f"redis://127.0.0.1:{free_port()}/0")
        browser = Browser(console)
        assert browser.sign_in(*printed_password(console)).code == 303
        page = wait_until(
            lambda: found if b"Redis does not answer" in (found := browser.get("/").body) else b"",
            description="the page says that Redis is away",
        )
        assert b"Nothing has been read yet" in page
        assert browser.get("/models/Echo").code == 503
        with Connection(console.url) as idle:  # a connection that is kept open does not hold up the end
            idle.request("GET", "/sign-in")
            assert console.terminate() == 0


# --- roles -------------------------------------------------------------------------------------------------


class InProcess(NamedTuple):
    """A console in this process, with an action. `done`: by whom it was carried out."""

    url: str
    console: Console
    done: list[str]


@pytest.fixture
def acting(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[InProcess]:
    flags = [
        "--redis-url",
        "redis://127.0.0.1:1/0",
        *(["--read-only"] if request.param == "read-only" else []),
    ]
    settings = read_settings(ConsoleSettings, flags, "test")
    users = Users(tmp_path / "users.toml")
    for name, role in (("ann", "operator"), ("bob", "viewer")):
        users.put(User(name, cast(Role, role), hash_of("secret")))
    monkeypatch.setattr(carpool_console.reader, "FRESH_WAIT_S", 0.01)  # nothing will be read
    acted: list[str] = []

    @operator_only
    def act(request: Request) -> Response:
        acted.append(session_of(request).user.name)
        return done(request, f"{form_of(request).get('what')} is done", to="/sign-in?next=//evil.example")

    monkeypatch.setattr(
        carpool_console.app,
        "PAGES",
        [SimpleNamespace(routes=lambda _: [Route("/act", act, methods=["POST"])]), nodes],
    )
    console = Console(settings, users, SharedReader(settings.redis_url, "x", "x", lambda _: None), "x")
    server = Server(make_app(console))
    port = server.start("127.0.0.1", 0, lambda: None)
    yield InProcess(f"http://127.0.0.1:{port}", console, acted)
    server.stop()


@pytest.mark.parametrize("acting", ["read-write"], indirect=True)
def test_only_operators_act_and_are_told_once_what_was_done(acting: InProcess) -> None:
    ann, bob = Browser(acting), Browser(acting)
    assert ann.sign_in("ann", "secret").code == bob.sign_in("bob", "secret").code == 303
    csrf = {browser: browser.csrf("/nodes") for browser in (ann, bob)}
    refused = bob.post("/act", {"csrf": csrf[bob], "what": "it"})
    assert refused.code == 403
    assert b"Only operators may do this, and you are a viewer. Nothing was changed." in refused.body
    assert ann.post("/act", {"csrf": csrf[bob], "what": "it"}).code == 403
    assert Browser(acting).post("/act", {"csrf": csrf[ann], "what": "it"}).code == 401
    assert acting.done == []
    assert ann.post("/act", {"csrf": csrf[ann], "what": "<it>"}).code == 303
    assert acting.done == ["ann"]
    assert b"is done" not in ann.get("/nodes", x_carpool_live="1").body, "nobody reads it there"
    assert b"&lt;it&gt; is done" in ann.get("/nodes").body
    assert b"is done" not in ann.get("/nodes").body


@pytest.mark.parametrize("acting", ["read-only"], indirect=True)
def test_nobody_acts_if_the_console_is_read_only(acting: InProcess) -> None:
    ann = Browser(acting)
    ann.sign_in("ann", "secret")
    refused = ann.post("/act", {"csrf": ann.csrf("/nodes")})
    assert refused.code == 403
    assert b"this console is read-only" in refused.body
    assert acting.done == []


# --- the server --------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a server with pages that fail, whose limits are longer than any test takes."""
    monkeypatch.setattr(carpool_console.server, "HEAD_S_MAX", EVENTUALLY_S)
    monkeypatch.setattr(carpool_console.server, "UNREAD_S_MAX", EVENTUALLY_S)
    with started_server() as url:
        yield url


@contextmanager
def started_server(on_head: Callable[[], None] = lambda: None) -> Iterator[str]:
    """`on_head` is called when the head of a POST has come."""

    def failing(_: Request) -> Response:
        raise RuntimeError("secret")

    async def echo(request: Request) -> Response:
        on_head()
        return PlainTextResponse(await request.body())

    started = Server(
        Guard(
            Starlette(
                routes=[
                    Route("/failing", failing),
                    Route("/large", lambda _: PlainTextResponse(LARGE)),
                    Route("/", echo, methods=["POST"]),
                ]
            )
        )
    )
    port = started.start("127.0.0.1", 0, lambda: None)
    yield f"http://127.0.0.1:{port}"
    started.stop()
    assert not started.is_alive


def test_clients_that_only_connect_keep_nobody_out(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given all connections that there may be, of which one has a request that is not complete, when further
    clients connect, expect that each is answered, and takes the place of the one that was quiet longest."""
    monkeypatch.setattr(carpool_console.server, "CONNECTIONS_MAX", 4)
    with ExitStack() as opened:

        def connect(sends: bytes = b"") -> Connection:
            connection = opened.enter_context(Connection(server))
            connection.send(sends)
            return connection

        served = connect(POST + b"x")
        assert served.answer().body == b"x"
        served.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nx")
        quiet = connect()
        for _ in range(8):
            assert connect(POST + b"x").answer().body == b"x"
        wait_until(lambda: quiet.is_closed, description="the first that was quiet is ended")
        served.send(b"y")
        assert served.answer().body == b"xy"


def test_clients_that_send_no_whole_head_are_ended(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for whole, begin in ((b"", b""), (b"", b"GET / HT"), (POST + b"x", b"GET /")):
        monkeypatch.setattr(carpool_console.server, "HEAD_S_MAX", EVENTUALLY_S if whole else 0.2)
        with Connection(server) as connection:
            connection.send(whole)
            if whole:
                assert connection.answer().body == b"x"
                monkeypatch.setattr(carpool_console.server, "HEAD_S_MAX", 0.2)
            connection.send(begin)
            wait_until(lambda: connection.is_closed, description="the server ends the connection")


def test_a_body_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carpool_console.server, "HEAD_S_MAX", 0.2)
    heads = 0

    def on_head() -> None:
        nonlocal heads
        heads += 1

    def has_head(connection: Connection) -> bool:
        with suppress(ConnectionError):
            connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nx")
            wait_until(lambda: heads or connection.is_closed, description="the server has the head")
        return heads > 0

    with started_server(on_head) as url:
        connection = Connection(url)
        while not has_head(connection):  # it came too late, as if it had not been sent
            connection.close()
            connection = Connection(url)
        with connection:
            with pytest.raises(TimeoutError):
                connection.socket.settimeout(0.5)
                connection.socket.recv(1)
            connection.socket.settimeout(None)
            connection.send(b"y")
            assert connection.answer().body == b"xy"


@pytest.mark.parametrize("header", ["connection: close", "connection: keep-alive"])
def test_clients_that_read_nothing_are_ended(
    server: str, monkeypatch: pytest.MonkeyPatch, header: str
) -> None:
    monkeypatch.setattr(carpool_console.server, "UNREAD_S_MAX", 0.2)
    with Connection(server) as connection:
        connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.send(2 * f"GET /large HTTP/1.1\r\nhost: x\r\n{header}\r\n\r\n".encode())
        connection.socket.recv(1)
        client, server_port = connection.socket.getsockname(), connection.socket.getpeername()[1]
        wait_until(lambda: not is_held(server_port, client[1]), description="the server ends the connection")


def is_held(local: int, remote: int) -> bool:
    """Whether a process has the socket with these ports; the kernel keeps it until what was sent is read."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if [int(fields[at].rpartition(":")[2], 16) for at in (1, 2)] == [local, remote]:
            return fields[9] != "0"
    return False


def test_large_heads_and_mistakes_of_pages_are_answered(server: str) -> None:
    answer = call(server, "GET", "/failing")
    assert answer.code == 500
    assert b"secret" not in answer.body
    assert answer.headers["cache-control"] == "no-store"
    with Connection(server) as connection:
        connection.send(b"GET / HTTP/1.1\r\nx: " + b"y" * 2 * HEAD_BYTES_MAX)
        assert connection.answer().code == 400


def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="cannot listen on"):
        Server(Guard(Starlette())).start("127.0.0.1", taken.getsockname()[1], lambda: None)
