"""Logs: JSON lines on standard error, readable where that is a terminal. Never a request's payload."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


def configure_logs(level: str = "info", service: str | None = None) -> None:
    """Set up structlog for this process; `service` is on every line."""
    readable = sys.stderr.isatty()
    renderer: Any = (
        structlog.dev.ConsoleRenderer(pad_event_to=24) if readable else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f" if readable else "iso", utc=not readable),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.clear_contextvars()
    if service is not None:
        structlog.configure(
            **{
                **structlog.get_config(),
                "processors": [_stamp(service), *structlog.get_config()["processors"]],
            }
        )


def _stamp(service: str) -> Any:
    def stamp(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        event["service"] = service
        return event

    return stamp
