"""The server of HTTP: uvicorn on a thread of its own, with limits for connections and slow clients."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import structlog
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from carpool.address import bracketed
from carpool.shown import name_of, trace_of

CONNECTIONS_MAX: Final = 256
HEAD_BYTES_MAX: Final = 16_384  # of a request
HEAD_S_MAX: Final = 10.0  # from a connection, or the first byte of a further request, to the end of its head
IDLE_S_MAX: Final = 15  # between two requests of a connection
UNREAD_S_MAX: Final = 60.0  # in which a client reads something of what is sent, and the rest before the end
DRAIN_S: Final = 5
_BACKLOG: Final = 128


class _Transport(asyncio.Transport):
    """A connection that, once it is closed, ends in time, whether or not its client reads what was sent:
    otherwise clients that read nothing would hold all connections that there may be."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop

    def close(self) -> None:
        if not self._transport.is_closing():
            self._loop.call_later(UNREAD_S_MAX, self._transport.abort)
        self._transport.close()

    def __getattribute__(self, name: str) -> Any:
        own = ("close", "_transport", "_loop")
        return object.__getattribute__(self, name) if name in own else getattr(self._transport, name)


class _Protocol(H11Protocol):
    """Ends a connection that sends no whole head of a request in time, or reads nothing of what is sent;
    uvicorn alone waits for ever. When there are as many as there may be, a new one takes the place of the one
    that has been without a request for longest: clients that only connect keep no operator out. It is not a
    limit for each address, because behind a proxy all have one."""

    _quiet_since_s = 0.0  # without a request
    _ends: asyncio.TimerHandle | None = None
    _aborts: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Transport(transport, self.loop))
        self._quiet_since_s = self.loop.time()
        if len(self.connections) >= CONNECTIONS_MAX:
            self._make_room()
        self._expect_head()

    def _make_room(self) -> None:
        others = (one for one in self.connections if isinstance(one, _Protocol) and one is not self)
        quiet = [one for one in others if one.is_quiet and not one.transport.is_closing()]
        if quiet:
            min(quiet, key=lambda one: one._quiet_since_s).transport.abort()

    @property
    def is_quiet(self) -> bool:
        """Whether it has no request that is not answered."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        self._quiet_since_s = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        requests_before = self.cycle
        super().data_received(data)
        if self.cycle is not requests_before or not self.is_quiet:
            self._expect_nothing()
        elif self._ends is None:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        self._is_read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._aborts = self.loop.call_later(UNREAD_S_MAX, self.transport.abort)

    def resume_writing(self) -> None:
        self._is_read()
        super().resume_writing()

    def _is_read(self) -> None:
        if self._aborts is not None:
            self._aborts.cancel()
            self._aborts = None

    def _expect_head(self) -> None:
        self._ends = self.loop.call_later(HEAD_S_MAX, self.transport.close)

    def _expect_nothing(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
            self._ends = None


class Server:
    """Serves an application until it is stopped. `has_failed`: it ended by itself."""

    def __init__(self, app: ASGIApp) -> None:
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # mistakes of clients
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=CONNECTIONS_MAX,
                h11_max_incomplete_event_size=HEAD_BYTES_MAX,
                timeout_keep_alive=IDLE_S_MAX,
                timeout_graceful_shutdown=DRAIN_S,
                backlog=_BACKLOG,
            )
        )
        self._socket: socket.socket | None = None
        self._on_end: Callable[[], Any] = lambda: None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self.has_failed = False

    def start(self, host: str, port: int, on_end: Callable[[], Any]) -> int:
        """Listen, and serve on a thread. `on_end` is called if that ends by itself. Returns the port. Raises
        OSError, which names the address."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise OSError(f"cannot listen on {bracketed(host)}:{port}: {error.strerror}") from error
        # asyncio does so for sockets that it makes: else small pages wait 40 ms for the client's kernel.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted ones inherit it
        self._on_end = on_end
        self._thread.start()
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Accept nothing more, answer what was asked, and end. Returns when that is done, or time is up."""
        self._server.should_exit = True
        self._thread.join(2 * DRAIN_S)

    @property
    def is_draining(self) -> bool:
        return self._server.should_exit

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        assert self._socket is not None
        try:
            # uvicorn handles signals only on the main thread: here the process does.
            asyncio.run(self._server.serve(sockets=[self._socket]))
        except BaseException as error:
            structlog.get_logger().error(
                "server of HTTP failed", reason=name_of(error), exception=trace_of(error)
            )
        if not self._server.should_exit:
            self.has_failed = True
            self._on_end()
