"""The HTTP server of a service: /metrics, /healthz and /readyz.

/healthz fails only for what a restart mends (a loop that ended or hangs). /readyz fails while the service
can do no work, and says why: loading, draining, no Redis. A batcher on standby is ready. If it is ready, what
a person should mend all the same follows on further lines.

Why: docs/decisions/0031.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final, Protocol

import structlog

from carpool.prometheus import CollectorRegistry, choose_encoder
from carpool.service_metrics import CommonMetrics
from carpool.settings import CommonSettings

CONNECTIONS_MAX: Final = 16
_TEXT: Final = "text/plain; charset=utf-8"
_STOPS_WITHIN_S: Final = 0.1  # how often the server looks whether it should stop


class Service(Protocol):
    """A service that reports its own health. All lists are empty when all is well."""

    def unhealthy(self) -> Sequence[str]:
        """What only a restart would mend."""

    def unready(self) -> Sequence[str]:
        """Why no work is done now."""

    def warnings(self) -> Sequence[str]:
        """What a person should mend, although work is done."""


class _Page(BaseHTTPRequestHandler):
    server: _Server
    server_version = "Carpool"
    sys_version = ""
    timeout = 10  # seconds: a client that sends nothing must not hold a thread for longer

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            self._answer(HTTPStatus.OK, encode(self.server.registry), content_type)
        elif path in self.server.probes:
            problems = self.server.probes[path]()
            status = HTTPStatus.SERVICE_UNAVAILABLE if problems else HTTPStatus.OK
            lines = problems or ["ok", *(f"warning: {warning}" for warning in self.server.warnings())]
            self._answer(status, "\n".join([*lines, ""]).encode(), _TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"not found; try /metrics, /healthz or /readyz\n", _TEXT)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing: a line for each scrape would hide the others."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # with the usual 5, a probe among many waits for seconds until it is tried again

    def __init__(self, host: str, port: int, registry: CollectorRegistry, service: Service) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        self.probes = {"/healthz": service.unhealthy, "/readyz": service.unready}
        self.warnings = service.warnings
        self._connections: dict[Any, None] = {}  # oldest first
        super().__init__((host, port), _Page)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Each connection takes a thread. Above CONNECTIONS_MAX the oldest connection is closed."""
        self._connections[request] = None
        if len(self._connections) > CONNECTIONS_MAX:
            oldest = next(iter(self._connections))
            self._connections.pop(oldest, None)  # at once: its thread ends later
            with contextlib.suppress(OSError):  # it may have ended by now
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print no traceback for a client that disconnected, as probes do."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class HealthServer:
    """Serves the page from threads of its own.

    Raises OSError, which names the address, if the port is taken.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, service: Service) -> None:
        try:
            self._server = _Server(host, port, registry, service)
        except OSError as error:
            raise OSError(f"cannot listen on {_address(host, port)}: {error.strerror}") from error
        self.url = _address(host, self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOPS_WITHIN_S,), name="health", daemon=True
        )

    def start(self) -> None:
        """Begin to answer, at `url`."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering. Call it once, after `start`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_health(settings: CommonSettings, metrics: CommonMetrics, service: Service) -> None:
    """Serve the page until the process ends, if a port is set. Raises OSError."""
    if settings.http_port is None:
        return
    server = HealthServer(settings.http_host, settings.http_port, metrics.registry, service)
    server.start()
    structlog.get_logger().info("serving metrics and health", url=f"{server.url}/metrics")


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
