"""HTTP/1.1: the connections of clients, on asyncio's protocols and the parser httptools.

    bytes ─▶ parser ─▶ headers: App.on_headers ─▶ body, within limits ─▶ handler ─▶ answer ─▶ next request

- Every wait has a deadline on the clock, which no byte moves: for headers, for the body, between requests,
  for the client to read. They are checked together, four times a second, so a request pays nothing for them.
- `App.on_headers` gets a request when its headers are complete. What it refuses is refused before its body is
  read or asked for (`Expect: 100-continue`). A small body is read and dropped: the connection is used again.
- Requests of one connection are handled one after the other, and each once the client has read enough of the
  answers before. Those that it sends ahead are parsed and wait; there are not many, because nothing more is
  read meanwhile. What of an answer the client has not read counts as a body that is held.
- A request may be upgraded to another protocol, which is then given what comes, the deadlines and the drain.
- A client that closes the connection has gone: `Exchange.on_gone` tells the handler. One that closes only
  its half of it, as `nc -N` does, is answered. TCP tells the two apart only once something is written, so an
  interim response is, or among events a comment: a closed connection refuses it.
- After an answer that ends the connection before all was read, what still comes is read and dropped for a
  moment. Otherwise TCP would reset the connection, and the client might lose the answer.

Why: docs/decisions/0090, docs/decisions/0094, docs/decisions/0099.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from email.utils import formatdate
from math import inf
from typing import Any, Final, Protocol, cast

import structlog

from carpool.shown import trace_of
from carpool_gateway.answers import RETRY_AFTER, STATUS_LINES, HttpError
from carpool_gateway.exchange import Exchange, Upgraded, Wire
from carpool_gateway.limits import BodyMemory, Limits
from carpool_gateway.request_reader import BODY, ENDED, HEAD, IDLE, RequestReader

SWEEP_S: Final = 0.25  # how often deadlines are looked at
LINGER_S: Final = 2.0  # for a client to take the last answer
DRAIN_IDLE_S: Final = 1.0  # for connections between two requests, when the server drains
ACCEPT_S: Final = 0.05  # for handshakes under way to end, before the server accepts no more
AHEAD_MAX: Final = 8  # requests that were sent ahead, until nothing more is read
JOINED_BYTES_MAX: Final = 64 * 1024  # an answer up to this size is written in one piece

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_PART: Final = b"0\r\n\r\n"


class App(Protocol):
    """What the server serves."""

    def on_headers(self, exchange: Exchange) -> None:
        """The headers are complete: set the handler and the route, or raise HttpError."""

    def on_done(self, exchange: Exchange) -> None:
        """The answer was written, or the client has gone (`is_gone`)."""


class Server:
    """The listening sockets, all connections, and what they share. Used on the event loop's thread."""

    def __init__(self, app: App, limits: Limits, name: str) -> None:
        self.app = app
        self.limits = limits
        self.memory = BodyMemory(limits.memory_bytes)
        self.connections: set[Connection] = set()
        self.date = b""
        self.is_draining = False
        self.log = structlog.get_logger()
        self._name = name
        self._requests = 0
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None

    async def listen(self, host: str, port: int) -> int:
        """Begin to accept connections. Returns the port. Raises OSError."""
        self.loop = asyncio.get_running_loop()
        self._listener = await self.loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        self._sweep()
        return int(self._listener.sockets[0].getsockname()[1])

    def next_request_id(self) -> str:
        """The ID of a request whose client names none."""
        self._requests += 1
        return f"{self._name}-{self._requests}"

    @property
    def in_flight(self) -> int:
        """Requests whose headers are complete and that are not answered."""
        return sum(connection.in_flight for connection in self.connections)

    async def drain(self, timeout_s: float) -> bool:
        """Answer what has begun, end all connections, and accept no more. Returns whether all was answered.

        Answers end their connections from now on. A connection between two requests may have one on its way,
        and so may one that is not accepted yet: they have DRAIN_IDLE_S. No connection is reset that a client
        has opened by then.
        """
        self.is_draining = True
        deadline_s = self.loop.time() + DRAIN_IDLE_S
        for connection in self.connections:
            connection.on_drain(deadline_s)
        await asyncio.sleep(min(DRAIN_IDLE_S, timeout_s))
        assert self._listener is not None
        try:
            for listening in self._listener.sockets:
                _ignore_handshakes(listening.fileno())
        except OSError as error:  # not every sandbox has filters of sockets
            self.log.warning("connections that are opened now may be reset", reason=str(error))
        await asyncio.sleep(min(ACCEPT_S, timeout_s))
        self._listener.close()
        if self.connections:
            self._emptied = self.loop.create_future()  # before, others could come after the last one
            await asyncio.wait([self._emptied], timeout=timeout_s)
        all_answered = not self.in_flight
        for connection in list(self.connections):
            connection.abort()
        if self._sweeper is not None:
            self._sweeper.cancel()
        return all_answered

    def forget(self, connection: Connection) -> None:
        """A connection has ended."""
        self.connections.discard(connection)
        if not self.connections and self._emptied is not None and not self._emptied.done():
            self._emptied.set_result(None)

    def failure(self, error: BaseException, request_id: str) -> HttpError:
        """Log a mistake of the gateway's own, without its text, which may quote a body."""
        self.log.error("request failed", request=request_id, exception=trace_of(error))
        return HttpError(500, "the gateway failed; its log says more")

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()
        now_s = self.loop.time()
        for connection in [one for one in self.connections if one.deadline_s <= now_s]:
            connection.on_deadline()


class Connection(asyncio.Protocol):
    """One client. asyncio calls what is here first, then the parser, then the exchange."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.memory = server.memory
        self._limits = server.limits
        self._reader = RequestReader(self, server.limits)
        self._transport: asyncio.Transport
        self._current: Exchange | None = None  # which is handled
        self._ahead: deque[Exchange] = deque()
        self._is_reading_paused = False
        self._is_advancing = False
        self._is_half_closed = False  # the client sends nothing more
        self._answer_deadline_s = inf  # while an answer is made
        self._writable: asyncio.Future[None] | None = None  # set while the client reads too slowly
        self._unread_bytes = 0  # of answers, then
        self._tasks: set[asyncio.Task[None]] = set()
        self._upgraded: Upgraded | None = None
        self._is_leaving = False  # the last answer was written
        self.deadline_s = inf

    @property
    def in_flight(self) -> int:
        """Requests whose headers are complete and that are not answered."""
        if self._upgraded is not None:
            return self._upgraded.in_flight
        return len(self._ahead) + (self._current is not None) + (self._reader.phase is BODY)

    @property
    def _is_free(self) -> bool:
        """Whether no request is handled, and the client has read the answers."""
        return self._current is None and self._writable is None

    @property
    def is_draining(self) -> bool:
        """Whether the server drains."""
        return self.server.is_draining

    # --- called by asyncio ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.set_write_buffer_limits(high=JOINED_BYTES_MAX, low=0)
        server = self.server
        server.connections.add(self)
        self.deadline_s = server.loop.time() + (DRAIN_IDLE_S if server.is_draining else self._limits.head_s)
        if len(server.connections) > self._limits.connections:
            self._end_with(HttpError(503, "too many connections: try again", headers=RETRY_AFTER))

    def data_received(self, data: bytes) -> None:
        if self._upgraded is not None:
            self.on_rest(data)
            return
        try:
            self._reader.feed(data)
        except HttpError as error:
            self._end_with(error)
        except Exception as error:
            incoming = self._reader.incoming
            self._end_with(self.failure(error, incoming.request_id if incoming is not None else ""))

    def eof_received(self) -> bool:
        """Returns whether asyncio is to keep the transport open: there are answers to write."""
        if self._upgraded is not None:
            return False
        if self._reader.phase is not ENDED:
            self._reader.phase = ENDED
            if self._reader.incoming is not None:
                return False  # its rest will not come
        last = self._ahead[-1] if self._ahead else self._current
        if last is None:
            return False
        self._is_half_closed = last.is_last = True
        self._answer_deadline_s = self.server.loop.time()  # look whether all is closed
        if self._writable is None:
            self.deadline_s = self._answer_deadline_s
        if self._current is not None:
            self._probe(self._current)
        return True

    def _probe(self, current: Exchange) -> None:
        """Write something that means nothing: a closed connection refuses it."""
        if current.is_chunked:
            if current.empty_part:
                self.write_part_if_read(current, current.empty_part)
        elif current.takes_parts:  # HTTP/1.0 has no interim response
            self._transport.write(_CONTINUE)

    def connection_lost(self, exc: Exception | None) -> None:
        self.deadline_s = inf
        self.server.forget(self)
        if self._upgraded is not None:
            self._lose_upgraded(self._upgraded)
        waiting = (self._current, *self._ahead, self._reader.stop())
        unanswered = [exchange for exchange in waiting if exchange is not None]
        self._current = None
        self._ahead.clear()
        self.resume_writing()
        for exchange in unanswered:
            exchange.is_gone = True
            if exchange.on_gone is not None:
                exchange.on_gone(exchange)
                exchange.on_gone = None
            exchange.drop_body()
            self.server.app.on_done(exchange)

    def pause_writing(self) -> None:
        self._writable = self.server.loop.create_future()
        self.deadline_s = self.server.loop.time() + self._limits.write_s
        self._unread_bytes = self._transport.get_write_buffer_size()
        self.memory.hold(self._unread_bytes)

    def resume_writing(self) -> None:
        if self._writable is None:
            return
        writable, self._writable = self._writable, None
        writable.set_result(None)
        self.memory.release(self._unread_bytes)
        if self._upgraded is not None and not self._is_leaving:
            self.deadline_s = self._answer_deadline_s
            self._upgraded.on_read()
        elif self._current is not None:
            self.deadline_s = self._answer_deadline_s
        elif self._ahead:
            self._advance_soon()
        elif self._reader.phase is ENDED:
            self.deadline_s = self.server.loop.time() + LINGER_S
        else:
            self._set_idle_deadline()

    # --- another protocol ----------------------------------------------------------------------------------

    def upgrade(self, exchange: Exchange, headers: bytes, make: Callable[[Wire], Upgraded]) -> None:
        """Answer with 101, and hand the connection over. The exchange is done when the connection ends."""
        exchange.is_last = False  # another header says what becomes of the connection
        self._transport.write(self._head(exchange, headers, ends=False))
        self._current = exchange
        self._upgraded = make(self)

    def on_rest(self, rest: bytes) -> None:
        """Something has come that is not HTTP."""
        if self._upgraded is None or self._is_leaving:
            return
        try:
            self._upgraded.on_data(rest)
        except Exception as error:
            self.failure(error, "" if self._current is None else self._current.request_id)
            self.abort()

    def _lose_upgraded(self, upgraded: Upgraded) -> None:
        exchange, self._current, self._is_leaving = self._current, None, True
        self.resume_writing()
        upgraded.on_lost()
        if exchange is not None:
            self.server.app.on_done(exchange)

    @property
    def is_read(self) -> bool:
        """Whether the client has read enough."""
        return self._writable is None

    async def until_read(self) -> None:
        """Wait until the client has read enough, or has gone."""
        while self._writable is not None:
            await asyncio.shield(self._writable)

    def write_raw(self, parts: Sequence[bytes]) -> None:
        """Write what another protocol says."""
        if not (self._transport.is_closing() or self._is_leaving):
            self._transport.writelines(parts)

    def set_deadline(self, seconds: float) -> None:
        """When to call `on_deadline`. While the client reads too slowly, its own deadline holds."""
        self._answer_deadline_s = self.server.loop.time() + seconds
        if self._writable is None:
            self.deadline_s = self._answer_deadline_s

    def pause_reading(self) -> None:
        """Read nothing more from the client."""
        if not (self._is_reading_paused or self._transport.is_closing()):
            self._is_reading_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read on."""
        if self._is_reading_paused and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()

    def leave(self) -> None:
        """End the connection, so that the client can read what was written."""
        if not self._is_leaving:
            self._is_leaving = True
            self._end()

    def next_request_id(self) -> str:
        """An ID for a request of another protocol."""
        return self.server.next_request_id()

    def done(self, exchange: Exchange) -> None:
        """Count and log such a request."""
        exchange.drop_body()
        self.server.app.on_done(exchange)

    # --- called by the reader of requests ------------------------------------------------------------------

    def on_begin(self) -> None:
        """The first byte of a request has come."""
        if self._is_free:
            self.deadline_s = self.server.loop.time() + self._limits.head_s

    def on_head(self, exchange: Exchange) -> None:
        """The headers of a request are complete. Raises HttpError if it is refused."""
        if self._is_free:
            self.deadline_s = self.server.loop.time() + self._limits.body_s
        if not exchange.request_id:
            exchange.request_id = self.server.next_request_id()
        self.server.app.on_headers(exchange)

    def ask_for_body(self) -> None:
        """Send what a client waits for before it sends a body."""
        if self._current is None:  # else it would be taken for an answer to the request that is handled
            self._transport.write(_CONTINUE)

    # --- handling ------------------------------------------------------------------------------------------

    def on_request(self, exchange: Exchange) -> None:
        """A request is complete. Handle it, once those before it are answered."""
        if self._current is not None or self._writable is not None:
            self._ahead.append(exchange)
            if len(self._ahead) >= AHEAD_MAX and not self._is_reading_paused:
                self._is_reading_paused = True
                self._transport.pause_reading()
            return
        self._current = exchange
        self.deadline_s = self._answer_deadline_s
        if exchange.error is not None:
            exchange.fail(exchange.error)
            return
        handler = exchange.handler
        assert handler is not None
        try:
            coroutine = handler(exchange)
        except Exception as error:
            exchange.fail_with(error)
            return
        if coroutine is not None:
            task = self.server.loop.create_task(self._run(exchange, coroutine))
            self._tasks.add(task)  # the event loop has only a weak reference
            task.add_done_callback(self._tasks.discard)

    async def _run(self, exchange: Exchange, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except Exception as error:
            exchange.fail_with(error)

    def failure(self, error: BaseException, request_id: str) -> HttpError:
        """The answer to a request at which the gateway failed; see Server.failure."""
        return self.server.failure(error, request_id)

    def _on_answered(self, exchange: Exchange) -> None:
        """The answer was given to the transport: go on with the next request."""
        exchange.drop_body()
        self._current = None
        self.server.app.on_done(exchange)
        if exchange.is_last:
            self._end()
            return
        if self._writable is None:
            if self._ahead:
                self._advance_soon()
            else:
                self._set_idle_deadline()

    def _advance_soon(self) -> None:
        """Handle what was sent ahead: not at once, because handlers that answer at once would call each
        other."""
        if not self._is_advancing:
            self._is_advancing = True
            self.server.loop.call_soon(self._advance)

    def _advance(self) -> None:
        self._is_advancing = False
        while self._ahead and self._is_free:
            self.on_request(self._ahead.popleft())
        if self._is_reading_paused and len(self._ahead) < AHEAD_MAX and not self._transport.is_closing():
            self._is_reading_paused = False
            self._transport.resume_reading()

    def _set_idle_deadline(self) -> None:
        """Between requests, or while one is read of which the beginning has come during the last one."""
        limits, now_s = self._limits, self.server.loop.time()
        if self._reader.phase is IDLE:
            self.deadline_s = now_s + (DRAIN_IDLE_S if self.server.is_draining else limits.idle_s)
        else:
            self.deadline_s = now_s + (limits.head_s if self._reader.phase is HEAD else limits.body_s)

    # --- writing -------------------------------------------------------------------------------------------

    def write_answer(self, exchange: Exchange, headers: bytes, body: bytes) -> None:
        """Write a whole answer."""
        length = b"" if exchange.code == 204 else b"content-length: %d\r\n" % len(body)
        head = self._head(exchange, headers + length)
        if exchange.method == "HEAD" or not body:
            self._transport.write(head)
        elif len(body) <= JOINED_BYTES_MAX:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        self._on_answered(exchange)

    def write_head(self, exchange: Exchange, headers: bytes) -> None:
        """Begin an answer of unknown length."""
        if not exchange.takes_parts:
            exchange.is_last = True
        else:
            headers += b"transfer-encoding: chunked\r\n"
        self._transport.write(self._head(exchange, headers))

    async def write_part(self, exchange: Exchange, part: bytes) -> None:
        """Write a part of such an answer, once the client has read enough."""
        while self._writable is not None:
            await asyncio.shield(self._writable)
        self._write_part(exchange, part)

    def write_part_if_read(self, exchange: Exchange, part: bytes) -> None:
        """Write a part of such an answer, if the client has read enough."""
        if self._writable is None:
            self._write_part(exchange, part)

    def _write_part(self, exchange: Exchange, part: bytes) -> None:
        if exchange.is_gone:
            return
        if not exchange.takes_parts:
            self._transport.write(part)
        elif len(part) <= JOINED_BYTES_MAX:
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
        else:
            self._transport.writelines((b"%x\r\n" % len(part), part, b"\r\n"))

    def write_end(self, exchange: Exchange) -> None:
        """End such an answer."""
        if exchange.takes_parts:
            self._transport.write(_LAST_PART)
        self._on_answered(exchange)

    def _head(self, exchange: Exchange, headers: bytes, *, ends: bool = True) -> bytes:
        if self.server.is_draining and ends:
            exchange.is_last = True
        ending = b"connection: close\r\n\r\n" if exchange.is_last else b"\r\n"
        request_id = exchange.request_id.encode("ascii")
        return b"%bserver: carpool\r\n%bx-request-id: %b\r\n%b%b" % (
            STATUS_LINES[exchange.code],
            self.server.date,
            request_id,
            headers,
            ending,
        )

    # --- ending --------------------------------------------------------------------------------------------

    def _end_with(self, error: HttpError) -> None:
        """Answer the incoming request with an error, after those before it, and end the connection."""
        exchange = self._reader.stop() or Exchange(self)
        exchange.is_last, exchange.error = True, error
        exchange.request_id = exchange.request_id or self.server.next_request_id()
        self.on_request(exchange)

    def _end(self) -> None:
        """The last answer was written. Take leave so that the client can read it."""
        self._reader.phase = ENDED  # an exchange of which not all has come is given up with the connection
        is_unsent = self._transport.get_write_buffer_size() > 0
        self.deadline_s = self.server.loop.time() + (self._limits.write_s if is_unsent else LINGER_S)
        if self._is_half_closed:
            self._transport.close()
            self.deadline_s = self.server.loop.time() + self._limits.write_s
        if self._transport.is_closing():
            return
        if self._is_reading_paused:
            self._is_reading_paused = False
            self._transport.resume_reading()  # to see that the client closes
        try:
            self._transport.write_eof()
        except OSError:  # the client has closed all meanwhile, and asyncio has not told yet
            self.abort()

    def on_drain(self, deadline_s: float) -> None:
        """The server drains: wait for no further request but one that may be on its way."""
        if self._upgraded is not None:
            self._upgraded.on_drain()
        elif self._reader.phase is IDLE and self._is_free:
            self.deadline_s = min(self.deadline_s, deadline_s)

    def on_deadline(self) -> None:
        """What was waited for did not come in time; or see whether a half-closed connection is closed."""
        if self._is_half_closed and self._current is not None and self._writable is None:
            if _is_closed(self._transport):
                self.abort()
        elif self._writable is not None or self._is_leaving:
            self.abort()
        elif self._upgraded is not None:
            self.deadline_s = self._answer_deadline_s = inf
            self._upgraded.on_deadline()
        elif self._reader.phase is ENDED:
            self.abort()
        elif self._reader.phase is IDLE:
            self._transport.close()
            self.deadline_s = inf
        else:
            part = "headers" if self._reader.phase is HEAD else "body"
            seconds = self._limits.head_s if self._reader.phase is HEAD else self._limits.body_s
            self._end_with(HttpError(408, f"the {part} did not come within {seconds:g} s"))

    def abort(self) -> None:
        """End the connection at once."""
        self.deadline_s = inf
        self._transport.abort()


def _ignore_handshakes(listening: int) -> None:
    """Let Linux drop the first packets of connections to this socket.

    Those that nobody has accepted are reset when a listening socket is closed, also if their client has sent
    a request already: then it cannot tell whether that is executed. A client whose first packet is dropped
    sends it again after a second, and is refused.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(b"".join([struct.pack("HBBI", *step) for step in _NO_SYN]))
    with socket.socket(fileno=os.dup(listening)) as of_listener:
        pointer = struct.pack("HP", len(_NO_SYN), ctypes.addressof(program))
        of_listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer)


_SO_ATTACH_FILTER: Final = 26
# A filter in BPF, which sees a packet from its TCP header on. It drops those with SYN and without ACK.
_NO_SYN: Final = (
    (0x30, 0, 0, 13),  # load the byte with the flags
    (0x54, 0, 0, 0x12),  # keep ACK and SYN
    (0x15, 0, 1, 0x02),  # unless only SYN is left, go one further
    (0x06, 0, 0, 0),  # drop it
    (0x06, 0, 0, 0xFFFFFFFF),  # take all of it
)


def _is_closed(transport: asyncio.Transport) -> bool:
    """Whether the client of a connection that is read no more has closed it: asyncio does not tell."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))  # an error, or both halves are closed
