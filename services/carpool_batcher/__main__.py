"""`carpool batcher`: wiring only."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Sequence

import structlog

from carpool.lifecycle import Loop, collect_garbage_rarely, stop_on_signals
from carpool.link import without_password
from carpool.logs import configure_logs
from carpool.settings import BatcherSettings, read_settings
from carpool_batcher.service import DISCOVER_EVERY_S, BatcherService


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT."""
    settings = read_settings(BatcherSettings, argv, "carpool batcher")
    configure_logs(settings.log_level, "batcher")
    stop = stop_on_signals()
    log = structlog.get_logger()
    name = f"{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}"
    service = BatcherService(settings.redis_url, settings.prefix, name)

    def look() -> None:
        service.run_once()
        stop.wait(DISCOVER_EVERY_S)

    def report(error: Exception) -> None:
        log.warning("cannot look for models", reason=str(error), kind=type(error).__name__)

    discovery = Loop("discovery", look, report)
    log.info("batcher started", batcher=name, redis=without_password(settings.redis_url))
    discovery.start()
    collect_garbage_rarely()
    stop.wait()
    discovery.stop()
    discovery.join(5.0)
    service.stop()
    log.info("batcher left", batcher=name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
