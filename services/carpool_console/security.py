"""What holds for each answer: headers, a time in which it must be sent, and counting. Errors end here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from carpool.shown import name_of, trace_of

REQUEST_S_MAX: Final = 60.0  # from the head of a request until the last byte of its answer is sent
MISTAKE: Final = "This page failed; the log of the console says why."
# Nothing inline, nothing of others: what a producer wrote could not be executed even if it was not escaped.
_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
# With `no-referrer`, browsers would send `Origin: null` with forms.
_HEADERS: Final = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
)
_NOT_KEPT: Final = (b"cache-control", b"no-store")


class Guard:
    """Wraps the application. Whatever happens in it, the client gets an answer, or the connection ends.

    `count` is called with the scope of each request, the status of its answer, and the time that it took.
    """

    def __init__(self, app: ASGIApp, count: Callable[[Scope, int, int], None] = lambda *_: None) -> None:
        self._app = app
        self._count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        answer = _Answer(send)
        began_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(REQUEST_S_MAX):
                await self._app(scope, receive, answer.send)
        except TimeoutError:
            await answer.fail(408, "The request took too long.")
        except Exception as error:
            structlog.get_logger().error(
                "page failed", path=scope["path"], reason=name_of(error), exception=trace_of(error)
            )
            await answer.fail(500, MISTAKE)
        finally:
            self._count(scope, answer.status, (time.monotonic_ns() - began_ns) // 1000)


class _Answer:
    """Adds headers to an answer, and knows its status. That is 499 until it has begun: the client is gone."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False
        self.status = 499

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._has_begun = True
            self.status = message["status"]
            headers = [*message.get("headers", ()), *_HEADERS]
            if not any(name == _NOT_KEPT[0] for name, _ in headers):
                headers.append(_NOT_KEPT)
            message = {**message, "headers": headers}
        await self._send(message)

    async def fail(self, status: int, text: str) -> None:
        """Answer with an error; if another answer has begun, the server ends the connection."""
        if self._has_begun:
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": text.encode()})
