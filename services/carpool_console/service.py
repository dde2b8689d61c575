"""The console service: the reader, the server, and how they start and stop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from carpool.settings import ConsoleSettings
from carpool.shown import trace_of
from carpool.store.connection import CommandError, LinkError
from carpool_console.app import make_app
from carpool_console.console import Console
from carpool_console.meter import ConsoleMetrics
from carpool_console.reader import SharedReader
from carpool_console.server import Server
from carpool_console.users import Users

SILENCE_MAX_S: Final = 60.0  # of the reader, whose longest wait for Redis is a few seconds


class ConsoleService:
    """Serves the operators' page. `unhealthy`, `unready` and `warnings` may be called on any thread."""

    def __init__(self, settings: ConsoleSettings, users: Users, metrics: ConsoleMetrics, name: str) -> None:
        self._settings = settings
        self._metrics = metrics
        self._log = structlog.get_logger()
        self._reader = SharedReader(
            settings.redis_url, settings.prefix, f"carpool-console-{name}", self._reading_failed
        )
        self._console = Console(settings, users, self._reader, f"carpool-console-{name}")
        self._server = Server(make_app(self._console, metrics))

    def start(self, on_end: Callable[[], Any]) -> int:
        """Listen; also without Redis. Returns the port. `on_end` is called if the server ends by itself.
        Raises OSError."""
        self._reader.start()
        return self._server.start(self._settings.host, self._settings.port, on_end)

    def stop(self) -> bool:
        """Answer what was asked, and end. Returns False if the server had ended by itself."""
        self._server.stop()
        self._reader.stop()
        self._console.close()
        return not self._server.has_failed

    def _reading_failed(self, error: Exception) -> None:
        self._metrics.error(error)
        if isinstance(error, (LinkError, CommandError)):
            self._log.warning("Redis cannot be read", reason=str(error))
        else:
            self._log.error("reading failed", exception=trace_of(error))

    # --- health --------------------------------------------------------------------------------------------

    def unhealthy(self) -> Sequence[str]:
        """Whether a thread has ended or stands still."""
        problems = [] if self._server.is_alive else ["the server of HTTP has ended"]
        if (silent_s := self._reader.silent_s) > SILENCE_MAX_S:
            problems.append(f"the reader has stood still for {silent_s:.0f} s")
        return problems

    def unready(self) -> Sequence[str]:
        """Draining. Without Redis the page is needed most: it says what is wrong."""
        return ["draining"] if self._server.is_draining else []

    def warnings(self) -> Sequence[str]:
        """Redis is away; a file of users that cannot be read, or that others may read."""
        users = self._console.users
        others = f"{users.path} may be read by others: chmod 600" if users.is_read_by_others else ""
        away = f"Redis cannot be read: {self._reader.error}" if self._reader.error else ""
        return [*filter(None, [away, users.problem, others])]
