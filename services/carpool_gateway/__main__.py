"""`carpool gateway`: reads settings, builds the service, waits for a signal."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from typing import Final

import structlog

from carpool.address import without_password
from carpool.health_server import serve_health
from carpool.lifecycle import collect_garbage_rarely, keep_freed_memory, stop_on_signals
from carpool.logs import configure_logs
from carpool.process_names import new_process_name
from carpool.settings import GatewaySettings, read_settings
from carpool.shown import complain
from carpool.span_export import SpanExport, start_span_export

try:
    import httptools as _httptools  # noqa: F401
    import websockets as _websockets  # noqa: F401
except ModuleNotFoundError:
    complain("carpool gateway: a package is missing; install Carpool with it: pip install 'PATH[gateway]'")
    raise SystemExit(2) from None

from carpool_gateway.meter import GatewayMetrics
from carpool_gateway.service import GatewayService

try:
    import resource
except ModuleNotFoundError:  # there is none for Windows
    resource = None  # type: ignore[assignment]
try:
    import uvloop
except ModuleNotFoundError:  # there is none for Windows
    uvloop = None  # type: ignore[assignment]


OTHER_FILES: Final = 256  # connections to Redis, logs and libraries


def _allow_connections(number: int) -> None:
    """Raise the limit of open files to what these connections need. Many systems begin with 1,024."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns 1 if the service cannot start."""
    settings = read_settings(GatewaySettings, argv, "carpool gateway")
    keep_freed_memory()
    configure_logs(settings.log_level, "gateway")
    _allow_connections(settings.connections_max)
    stop = stop_on_signals()
    log, name, metrics = structlog.get_logger(), new_process_name(), GatewayMetrics()
    export: SpanExport | None = None
    try:
        export = start_span_export(settings, metrics, "carpool-gateway")
        service = GatewayService(settings, metrics, name)
        serve_health(settings, metrics, service)
        (uvloop or asyncio).run(_serve(service, settings, name, stop))
    except (OSError, ValueError) as error:
        log.error("gateway cannot start", reason=str(error))
        return 1
    if export is not None:
        export.stop()
    log.info("gateway stopped", gateway=name)
    return 0


async def _serve(
    service: GatewayService, settings: GatewaySettings, name: str, stop: threading.Event
) -> None:
    port = await service.start()
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    redis = without_password(settings.redis_url)
    also = {} if service.grpc_port is None else {"grpc": f"{host}:{service.grpc_port}"}
    structlog.get_logger().info(
        "gateway started", gateway=name, url=f"http://{host}:{port}", **also, redis=redis
    )
    collect_garbage_rarely()
    await asyncio.to_thread(stop.wait)
    if not await service.stop():
        structlog.get_logger().warning("requests without an answer were withdrawn")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
