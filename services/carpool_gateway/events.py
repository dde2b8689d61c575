"""Server-sent events as the answer of an exchange.

The answer begins with the first event, so that what fails before has a status of its own. While nothing
happens for a while, a comment is written, because a proxy would end a connection on which nothing comes.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Final, Self

from carpool_gateway.answers import HttpError
from carpool_gateway.exchange import Exchange

EVENT_HEADERS: Final = b"cache-control: no-cache\r\nx-accel-buffering: no\r\n"
COMMENT_INTERVAL_S: Final = 15.0
_COMMENT: Final = b":\n\n"


class Events:
    """Writes events. To be used with `with`."""

    def __init__(self, exchange: Exchange, content_type: bytes) -> None:
        self._exchange = exchange
        self._content_type = content_type
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._written_s = 0.0
        self.has_begun = False

    async def write(self, event: bytes) -> None:
        """Write events, at once. Waits while the client reads too slowly."""
        self._begin()
        self._written_s = self._loop.time()
        await self._exchange.write(event)

    def end(self) -> None:
        """There are no more."""
        self._begin()
        self._exchange.end()

    async def fail(self, error: HttpError, event: bytes) -> None:
        """End with an error, which `event` tells. If it is the first event, the answer has its status."""
        self._begin(error.code, error.headers)
        await self._exchange.write(event)
        self._exchange.end()

    def _begin(self, code: int = 200, headers: bytes = b"") -> None:
        if not self.has_begun:
            self.has_begun = True
            content_type = b"content-type: %b\r\n" % self._content_type
            self._exchange.begin(code, content_type + EVENT_HEADERS + headers)
            self._exchange.empty_part = _COMMENT
            self._written_s = self._loop.time()
            self._timer = self._loop.call_later(COMMENT_INTERVAL_S, self._on_time)

    def _on_time(self) -> None:
        silent_s = self._loop.time() - self._written_s
        if silent_s >= COMMENT_INTERVAL_S:
            self._exchange.write_if_read(_COMMENT)
            self._written_s, silent_s = self._loop.time(), 0.0
        self._timer = self._loop.call_later(COMMENT_INTERVAL_S - silent_s, self._on_time)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
