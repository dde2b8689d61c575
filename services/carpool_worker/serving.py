"""A worker process of one model, from its start until it has drained."""

from __future__ import annotations

import os
from collections.abc import Callable

import structlog

from carpool.health_server import serve_health
from carpool.keys import Keys
from carpool.lifecycle import collect_garbage_rarely, stop_on_signals
from carpool.logs import configure_logs
from carpool.settings import WorkerSettings
from carpool.span_export import SpanExport, start_span_export
from carpool_worker.meter import WorkerMetrics
from carpool_worker.process_handle import ModelLoadError
from carpool_worker.served_model import ServedModel
from carpool_worker.worker import Worker


def serve(
    settings: WorkerSettings,
    model: ServedModel,
    *,
    on_serving: Callable[[], None] = lambda: None,
    on_failure: Callable[[str], None] = lambda reason: None,
    on_drain: Callable[[bool], None] = lambda is_drained: None,
) -> int:
    """Serve a model until SIGTERM or SIGINT, then drain. Returns the status to exit with.

    It calls `on_serving` once the model takes batches, or `on_failure` with the reason if it cannot be
    served; then `on_drain` whenever an operator drains the worker, or undoes that.
    """
    stop = stop_on_signals()
    os.environ["CARPOOL_SERVED_MODEL"] = model.name
    configure_logs(settings.log_level, "worker", model=model.name)
    log = structlog.get_logger()
    export: SpanExport | None = None
    try:
        metrics = WorkerMetrics(model.name)
        export = start_span_export(settings, metrics, "carpool-worker")
        os.environ["CARPOOL_MODEL_SPANS"] = "" if export is None else "1"  # for the model processes
        if export is not None:
            metrics.make_spans(export.record)
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
        on_failure(str(error))
        return 1
    except (ValueError, OSError) as error:
        log.error("worker cannot start", location=model.spec, reason=str(error))
        on_failure(str(error))
        return 1
    if not stop.is_set():  # else it may have been stopped before it was loaded
        on_serving()
    collect_garbage_rarely()
    was_drained = False
    while not stop.wait(0.5):
        worker.summarize_if_due()
        if worker.is_drained is not was_drained:
            was_drained = worker.is_drained
            on_drain(was_drained)
        if worker.failed.is_set():
            return 1  # what is in hand is redelivered when the lease runs out
    is_clean = worker.drain(settings.drain_s)
    if export is not None:
        export.stop()
    return 0 if is_clean else 1
