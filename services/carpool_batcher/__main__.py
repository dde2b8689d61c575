"""`carpool batcher`: reads settings, builds the service, waits for a signal."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import structlog

from carpool.address import without_password
from carpool.cluster import is_cluster
from carpool.health_server import serve_health
from carpool.lifecycle import collect_garbage_rarely, keep_freed_memory, stop_on_signals
from carpool.logs import configure_logs
from carpool.process_names import new_process_name
from carpool.settings import BatcherSettings, read_settings
from carpool.span_export import start_span_export
from carpool_batcher.cluster import ClusterBatcher
from carpool_batcher.custom_policies import load_policies
from carpool_batcher.meter import BatcherMetrics
from carpool_batcher.service import BatcherService


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns 1 if the service cannot start."""
    settings = read_settings(BatcherSettings, argv, "carpool batcher")
    keep_freed_memory()
    configure_logs(settings.log_level, "batcher")
    stop = stop_on_signals()
    log = structlog.get_logger()
    name = new_process_name()
    metrics = BatcherMetrics()
    try:
        policies = load_policies(settings.policies)
        export = start_span_export(settings, metrics, "carpool-batcher")
        kind = ClusterBatcher if is_cluster(settings.redis_url) else BatcherService
        service = kind(settings.redis_url, settings.prefix, name, metrics, policies)
        serve_health(settings, metrics, service)
    except (OSError, ValueError) as error:
        log.error("batcher cannot start", reason=str(error))
        return 1
    loaded = {"policies": ", ".join(policies)} if policies else {}
    log.info("batcher started", batcher=name, redis=without_password(settings.redis_url), **loaded)
    service.start()
    collect_garbage_rarely()
    stop.wait()
    service.stop()
    if export is not None:
        export.stop()
    log.info("batcher stopped", batcher=name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
