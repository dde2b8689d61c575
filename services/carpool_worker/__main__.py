"""`carpool worker MODEL`: reads settings, starts the worker, waits for a signal, drains.

`carpool worker --repository DIR` is a node, which starts and stops worker processes as is wanted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import structlog

from carpool.lifecycle import keep_freed_memory
from carpool.logs import configure_logs
from carpool.settings import WorkerSettings, read_settings
from carpool_worker.each_model import run_each
from carpool_worker.node.main import run_node
from carpool_worker.served_models import served_models
from carpool_worker.serving import serve


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
    if settings.repository is not None:
        return run_node(settings, settings.repository)
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
        return serve(settings, models[0])

    def serve_one(number: int) -> int:
        if settings.http_port:  # two processes cannot listen on one port
            settings.http_port += number
        return serve(settings, models[number])

    return run_each([model.name for model in models], serve_one)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
