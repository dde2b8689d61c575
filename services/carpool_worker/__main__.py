"""`carpool worker MODEL`: reads settings, starts the worker, waits for a signal, drains."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import structlog

from carpool.health import serve_health
from carpool.keys import Keys
from carpool.lifecycle import collect_garbage_rarely, keep_freed_memory, stop_on_signals
from carpool.logs import configure_logs
from carpool.settings import WorkerSettings, read_settings
from carpool_worker.devices import devices
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.loader import model_name
from carpool_worker.process_handle import ModelLoadError
from carpool_worker.worker import Worker


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, then drain.

    Returns 1 if the model cannot be loaded, at the start or again after its process died (then without
    draining), or if not everything was committed in time.
    """
    settings = read_settings(WorkerSettings, argv, "carpool worker")
    keep_freed_memory()
    configure_logs(settings.log_level, "worker")
    os.environ |= {  # for the model processes, which have no flags
        "CARPOOL_LOG_LEVEL": settings.log_level,
        "CARPOOL_PREFIX": settings.prefix,
        "CARPOOL_MODEL_REDIS_URL": settings.url_for_models,
    }
    stop = stop_on_signals()
    log = structlog.get_logger()
    try:
        name, location = model_name(settings.model)
        os.environ["CARPOOL_SERVED_MODEL"] = name
        configure_logs(settings.log_level, "worker", model=name)
        log = structlog.get_logger()
        keys = Keys(name, settings.prefix)
        metrics = WorkerMetrics(name)
        replica_devices = devices(settings.device, settings.replicas)
        worker = Worker(
            settings.redis_url,
            keys,
            location,
            replica_devices,
            settings.lease_ms,
            metrics,
            finish_streams=settings.finish_streams,
            load_s_max=settings.load_s_max,
        )
        serve_health(settings, metrics, worker)
        worker.start(stop)
    except ModelLoadError as error:
        trace = error.logged_trace()
        log.error("model cannot be loaded", location=settings.model, reason=str(error), **trace)
        return 1
    except (ValueError, OSError) as error:
        log.error("worker cannot start", location=settings.model, reason=str(error))
        return 1
    collect_garbage_rarely()
    while not stop.wait(0.5):
        worker.summarize_if_due()
        if worker.failed.is_set():
            return 1  # what is in hand is redelivered when the lease runs out
    return 0 if worker.drain(settings.drain_s) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
