"""Logs: JSON lines on standard error, readable where that is a terminal. Never a request's payload."""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog


def configure_logs(level: str, service: str) -> None:
    """Set up structlog for this process; `service` is on every line."""
    readable = sys.stderr.isatty()

    def name_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        return {"service": service, **event}

    structlog.configure(
        processors=[
            name_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if readable else "iso", utc=not readable),
            *([] if readable else [structlog.processors.format_exc_info]),  # the console shows it by itself
            structlog.dev.ConsoleRenderer(pad_event_to=24)
            if readable
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
