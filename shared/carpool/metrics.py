"""What every service measures, and the page that shows it: /metrics, /healthz and /readyz.

prometheus-client counts and renders. Durations and sizes are counted here, in integers and a batch at a time:
its `observe` would cost each request 0.8 µs, this costs 0.1. ops/prometheus/README.md documents every name.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any, Final, Protocol

import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from carpool.settings import CommonSettings
from carpool.store.connection import CommandError, LinkError

# From a batch that waited for nobody to a model that takes minutes; about three for each factor of ten.
DURATIONS_US: Final = (
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000, 300_000_000,
)  # fmt: skip
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
CONNECTIONS: Final = 16  # to the page, at once
PERCENTS: Final = (10, 25, 50, 75, 90, 99, 100)
# Redis's error codes are not bounded: scripts and modules make their own.
REDIS_ERROR_KINDS: Final = frozenset(
    ("link", "OOM", "NOPERM", "NOAUTH", "WRONGPASS", "READONLY", "LOADING", "BUSY", "MASTERDOWN", "MISCONF",
     "NOREPLICAS", "WRONGTYPE", "NOGROUP", "CLUSTERDOWN", "MOVED", "CROSSSLOT", "ERR", "other")
)  # fmt: skip


class Bins:
    """How many values fell between the bounds, for one set of labels. For any number of threads."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0
        self._lock = threading.Lock()

    def observe(self, values: Sequence[int]) -> None:
        """Count these values, in the unit of the bounds; a value on a bound is below it. O(values)."""
        bounds, counts = self._bounds, self._counts
        with self._lock:
            for value in values:
                counts[bisect_left(bounds, value)] += 1
            self._sum += sum(values)

    def snapshot(self) -> tuple[list[int], int]:
        """The counts between the bounds, the last one beyond them all; and the sum of all values."""
        with self._lock:
            return list(self._counts), self._sum


class Histogram(Collector):
    """A histogram of integers, shown in `unit`: microseconds as seconds have the unit 1e-6."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[int], unit: float, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._unit = unit
        self._bins: dict[str, Bins] = {}
        registry.register(self)

    def of(self, model: str) -> Bins:
        """What is counted for one model."""
        return self._bins.setdefault(model, Bins(self._bounds))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """As prometheus-client asks for it: each bucket holds what is below it."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=("model",))
        bounds = [float(f"{bound * self._unit:.6g}") for bound in self._bounds]  # 0.0001, not 9.999...e-05
        edges = [*map(floatToGoString, bounds), "+Inf"]
        for model, bins in list(self._bins.items()):
            counts, total = bins.snapshot()
            below, buckets = 0, []
            for edge, count in zip(edges, counts, strict=True):
                below += count
                buckets.append((edge, float(below)))
            family.add_metric((model,), buckets, total * self._unit)
        return [family]


class CommonMetrics:
    """What batcher and worker measure alike. One for each process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # when a counter began is nothing to plot
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("carpool_build", "Which Carpool this is", registry=registry)
        build.info({"version": version("carpool")})
        self.answered = Counter(
            "carpool_requests",
            "Requests given their final result here, by its status and, where it is an error, the reason",
            ("model", "status", "reason"),
            registry=registry,
        )
        self.lease_lateness = Histogram(
            "carpool_lease_lateness_seconds",
            "How much later than planned a lease was renewed",
            DURATIONS_US,
            1e-6,
            registry,
        )
        self._redis_errors = Counter(
            "carpool_redis_errors",
            "Turns of a loop that Redis made fail: link (not reached, or lost), or the code of its error",
            ("kind",),
            registry=registry,
        )
        self._redis_errors.labels("link")

    def error(self, error: BaseException) -> None:
        """A loop's turn failed; counted if it was Redis."""
        if isinstance(error, LinkError):
            self._redis_errors.labels("link").inc()
        elif isinstance(error, CommandError):
            self._redis_errors.labels(error.code if error.code in REDIS_ERROR_KINDS else "other").inc()


class Watched(Protocol):
    """A service that can say how it is. Either says nothing when all is well."""

    def unhealthy(self) -> Sequence[str]:
        """What only a restart would mend."""

    def unready(self) -> Sequence[str]:
        """Why no work is done now."""


class _Page(BaseHTTPRequestHandler):
    server: _Server
    server_version = "Carpool"
    sys_version = ""
    timeout = 10  # a client that says nothing holds a thread no longer

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
            self._answer(status, "\n".join([*(problems or ["ok"]), ""]).encode(), _TEXT)
        else:
            self._answer(HTTPStatus.NOT_FOUND, b"there are /metrics, /healthz and /readyz\n", _TEXT)

    def _answer(self, status: HTTPStatus, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """A line for each scrape would bury the others."""


_TEXT: Final = "text/plain; charset=utf-8"


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry, service: Watched) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.registry = registry
        self.probes = {"/healthz": service.unhealthy, "/readyz": service.unready}
        self._open: dict[Any, None] = {}  # connections, oldest first
        super().__init__((host, port), _Page)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Each connection has a thread. Where there are too many, the oldest has had its time."""
        self._open[request] = None
        if len(self._open) > CONNECTIONS:
            with contextlib.suppress(OSError):  # it may be done by now
                next(iter(self._open)).shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up, as a prober may, is nothing to print a traceback for."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class StatusServer:
    """Serves /metrics, /healthz and /readyz over HTTP from threads of its own.

    Raises OSError naming the address where the port is taken.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, service: Watched) -> None:
        try:
            self._server = _Server(host, port, registry, service)
        except OSError as error:
            raise OSError(f"cannot serve {_address(host, port)}: {error.strerror}") from error
        self.url = _address(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="status", daemon=True)

    def start(self) -> None:
        """Begin to answer, at `url`."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more. Once, after `start`."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_status(settings: CommonSettings, metrics: CommonMetrics, service: Watched) -> None:
    """Serve a service's status, if a port is set, until the process ends. Raises OSError."""
    if settings.http_port is None:
        return
    server = StatusServer(settings.http_host, settings.http_port, metrics.registry, service)
    server.start()
    structlog.get_logger().info("status served", url=f"{server.url}/metrics")


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
