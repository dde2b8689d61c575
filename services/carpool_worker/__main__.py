"""`carpool worker MODEL`: reads settings, starts the worker, waits for a signal, drains."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import structlog

from carpool.health_server import serve_health
from carpool.keys import Keys
from carpool.lifecycle import collect_garbage_rarely, keep_freed_memory, stop_on_signals
from carpool.logs import configure_logs
from carpool.settings import WorkerSettings, read_settings
from carpool_worker.each_model import run_each
from carpool_worker.meter import WorkerMetrics
from carpool_worker.process_handle import ModelLoadError
from carpool_worker.served_models import ServedModel, served_models
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
    try:
        models = served_models(
            [settings.model],
            settings.options,
            replicas=settings.given("replicas"),
            device=settings.given("device"),
        )
    except (ValueError, OSError) as error:
        structlog.get_logger().error("worker cannot start", location=settings.model, reason=str(error))
        return 1
    if len(models) == 1:
        return _serve(settings, models[0])

    def serve(number: int) -> int:
        if settings.http_port:  # two processes cannot listen on one port
            settings.http_port += number
        return _serve(settings, models[number])

    return run_each([model.name for model in models], serve)


def _serve(settings: WorkerSettings, model: ServedModel) -> int:
    stop = stop_on_signals()
    os.environ["CARPOOL_SERVED_MODEL"] = model.name
    configure_logs(settings.log_level, "worker", model=model.name)
    log = structlog.get_logger()
    try:
        metrics = WorkerMetrics(model.name)
        worker = Worker(
            settings.redis_url,
            Keys(model.name, settings.prefix),
            model.location,
            model.devices,
            settings.lease_ms,
            metrics,
            configuration=model.configuration,
            finish_streams=settings.finish_streams,
            load_s_max=settings.load_s_max,
        )
        serve_health(settings, metrics, worker)
        worker.start(stop)
    except ModelLoadError as error:
        trace = error.logged_trace()
        log.error("model cannot be loaded", location=model.spec, reason=str(error), **trace)
        return 1
    except (ValueError, OSError) as error:
        log.error("worker cannot start", location=model.spec, reason=str(error))
        return 1
    collect_garbage_rarely()
    while not stop.wait(0.5):
        worker.summarize_if_due()
        if worker.failed.is_set():
            return 1  # what is in hand is redelivered when the lease runs out
    return 0 if worker.drain(settings.drain_s) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
