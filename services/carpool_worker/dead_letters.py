"""Keeping the dead letters of a model within its settings: after each one, and once a minute as they age.

Why: docs/decisions/0073.
"""

from __future__ import annotations

from typing import Final

import structlog

from carpool.errors import UnavailableError
from carpool.store.connection import CommandError
from carpool.store.worker import WorkerStore
from carpool_worker.meter import WorkerMetrics

INTERVAL_S: Final = 60.0


def trim_dead_letters(store: WorkerStore, metrics: WorkerMetrics) -> None:
    """Drop those over the model's settings; count and log them. If that fails, it is done a minute later."""
    log = structlog.get_logger()
    try:
        dropped = store.trim_dead_letters()
    except (UnavailableError, CommandError) as error:
        log.warning("dead letters are not trimmed", model=store.keys.model, reason=str(error))
        return
    if dropped:
        metrics.dead_letters_dropped(dropped)
        log.warning("dead letters dropped", model=store.keys.model, **dropped)
