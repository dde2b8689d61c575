"""The HTTP page of a service: /metrics, /healthz and /readyz."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from carpool.health_server import CONNECTIONS_MAX, HealthServer
from carpool.service_metrics import CommonMetrics
from support.waiting import wait_until

MODEL: Final = "square"


class FakeService:
    """A service whose health the test sets."""

    def __init__(self) -> None:
        self.health_problems: list[str] = []
        self.readiness_problems: list[str] = []
        self.to_mend: list[str] = []

    def unhealthy(self) -> list[str]:
        return self.health_problems

    def unready(self) -> list[str]:
        return self.readiness_problems

    def warnings(self) -> list[str]:
        return self.to_mend


@contextmanager
def serving(service: FakeService, host: str = "127.0.0.1") -> Iterator[HealthServer]:
    metrics = CommonMetrics()
    metrics.lease_lateness.of(MODEL).observe([5, 2_000_000])
    server = HealthServer(host, 0, metrics.registry, service)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(url: str, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    assert int(response.headers["Content-Length"]) == len(body.encode())
    return response.status, response.headers["Content-Type"], body


def test_a_ready_service_tells_what_should_be_mended() -> None:
    service = FakeService()
    service.to_mend = ["Redis is full"]
    with serving(service) as server:
        for path in ("/healthz", "/readyz"):
            status, _, body = get(server.url, path)
            assert (status, body) == (200, "ok\nwarning: Redis is full\n")
        service.readiness_problems = ["no Redis"]
        assert get(server.url, "/readyz")[2] == "no Redis\n"


def test_probes_list_what_is_wrong() -> None:
    service = FakeService()
    with serving(service) as server:
        plain = "text/plain; charset=utf-8"
        assert get(server.url, "/healthz") == get(server.url, "/readyz") == (200, plain, "ok\n")
        service.readiness_problems = ["the model is loading", "Redis is away"]
        assert get(server.url, "/readyz") == (503, plain, "the model is loading\nRedis is away\n")
        assert get(server.url, "/healthz?verbose") == (200, plain, "ok\n")
        service.health_problems = ["heartbeat: ended"]
        assert get(server.url, "/healthz") == (503, plain, "heartbeat: ended\n")
        status, content_type, body = get(server.url, "/")
        assert (status, content_type) == (404, plain)
        assert "/metrics" in body


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain; version=0.0.4", parse_text),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4", parse_text),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text; version=1.0.0",
            parse_openmetrics,
        ),
    ],
)
def test_metrics_are_served_in_the_requested_format(
    accept: str, content_type: str, parse: Callable[[str], Iterator[Any]]
) -> None:
    with serving(FakeService()) as server:
        status, got_type, body = get(server.url, "/metrics", Accept=accept)
    assert status == 200
    assert got_type.startswith(content_type)
    families = {family.name: family for family in parse(body)}
    late = {
        sample.labels.get("le"): sample.value for sample in families["carpool_lease_lateness_seconds"].samples
    }
    assert (late["0.0001"], late["1.0"], late["+Inf"]) == (1, 1, 2)
    assert ("# EOF" in body) == ("openmetrics" in content_type)


def test_error_names_the_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"listen on http://127.0.0.1:{port}: Address already in use"):
            HealthServer("127.0.0.1", port, CollectorRegistry(), FakeService())


def test_page_is_served_over_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(FakeService(), "::1") as server:
        assert re.fullmatch(r"http://\[::1\]:\d+", server.url)
        assert get(server.url, "/readyz")[0] == 200
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match=rf"cannot listen on http://\[::1\]:{port}: "):
            HealthServer("::1", port, CollectorRegistry(), FakeService())


def test_disconnecting_client_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Given a prober that resets its connection, expect nothing in a log whose lines are JSON."""
    with serving(FakeService()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        before = threading.active_count()
        with socket.create_connection((host, int(port))) as prober:
            prober.sendall(b"GET /read")
            wait_until(lambda: threading.active_count() > before, description="a thread reads the request")
            prober.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: threading.active_count() == before, description="the thread has ended")
        assert get(server.url, "/readyz")[0] == 200
    assert capfd.readouterr().err == ""


def test_head_request_gets_no_body() -> None:
    with serving(FakeService()) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=5)
        connection.request("HEAD", "/readyz")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        connection.close()


def test_silent_connections_do_not_block_others() -> None:
    """Each connection holds a thread: above the limit, the oldest connection is closed."""
    with serving(FakeService()) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        threads = threading.active_count()
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            for _ in range(3 * CONNECTIONS_MAX)
        ]
        assert get(server.url, "/readyz")[0] == 200
        assert silent[0].recv(1) == b""
        wait_until(
            lambda: threading.active_count() <= threads + CONNECTIONS_MAX,
            description="the oldest ones end",
        )
