"""Logs: JSON lines on standard error, or readable lines if that is a terminal.

Bodies are never logged, nor are texts of exceptions that may quote one (`carpool.shown`). On a terminal,
control characters are escaped.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from typing import Any

import structlog

from carpool.shown import printable, printable_lines


def configure_logs(level: str, service: str, **always: str) -> None:
    """Set up structlog for this process. `service` and what `always` names are added to every line."""
    is_terminal = sys.stderr.isatty()

    def add_service(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> dict[str, Any]:
        return {"service": service, **always, **event}

    structlog.configure(
        processors=[
            add_service,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(
                fmt="%H:%M:%S.%f" if is_terminal else "iso", utc=not is_terminal
            ),
            # The console's own traceback would show the values of local variables, and so request bodies.
            structlog.processors.format_exc_info,
            *([_escape] if is_terminal else []),
            structlog.dev.ConsoleRenderer(pad_event_to=24, exception_formatter=structlog.dev.plain_traceback)
            if is_terminal
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


def _escape(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape what a terminal would obey. Other values than texts are shown by their `repr`, which does so."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable_lines(value) if name == "exception" else printable(value)
    return event
