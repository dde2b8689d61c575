"""WebSocket (RFC 6455) on a connection that was upgraded: frames in, messages out, and the other way round.

The library `websockets` reads and writes frames; it does no I/O. Here are the limits that a server needs:

- A message has at most `Limits.body_bytes`, and what has come of it is counted with the bodies that are held.
- While the client reads too slowly, nothing is read from it either, so that it cannot ask for more.
- A ping is sent when nothing was received for `Limits.ping_s`. Without a sign of life for as long again, the
  connection is lost. A close that is not answered within LINGER_S is, too.

What a client does wrong is said in the close: 1002 malformed frames, 1007 a text that is not UTF-8, 1009 a
message that is too large, 1013 the gateway holds too much.

Why: docs/decisions/0106.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha1
from typing import Final, Protocol

from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import SERVER, State
from websockets.protocol import Protocol as FrameProtocol

from carpool_gateway.answers import HttpError
from carpool_gateway.exchange import Exchange, Wire
from carpool_gateway.limits import Limits

SUBPROTOCOL: Final = b"carpool"
LINGER_S: Final = 2.0
_REASON_BYTES_MAX: Final = 123
_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of the protocol
_KEY_BYTES: Final = 16
_VERSION: Final = b"13"
_LOG: Final = logging.getLogger(
    "carpool.gateway.websocket"
)  # of the library, which is silent unless at debug


class Conversation(Protocol):
    """The application protocol of a WebSocket: it gets messages, and sends its own."""

    @property
    def in_flight(self) -> int: ...
    def on_message(self, message: bytes, *, is_text: bool) -> None: ...
    def on_drain(self) -> None: ...  # end soon
    def on_lost(self) -> None: ...  # nobody reads any more


class WebSocket:
    """An Upgraded, which passes messages to a conversation. `conversation` is made with this."""

    def __init__(self, wire: Wire, limits: Limits, converse: Callable[[WebSocket], Conversation]) -> None:
        self.wire = wire
        self._limits = limits
        self._frames = FrameProtocol(SERVER, state=State.OPEN, max_size=limits.body_bytes, logger=_LOG)
        self._parts: list[bytes] = []  # of a message of which not all has come
        self._parts_bytes = 0
        self._is_text = False
        self._held_bytes = 0  # which are counted
        self._is_pinged = False  # and has not answered
        self._is_closing = False
        self._is_held = False  # the conversation has enough to do
        self._conversation = converse(self)
        wire.set_deadline(limits.ping_s)

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return self._conversation.in_flight

    # --- called by the conversation ------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether messages can be sent. Not if a malformed frame is behind the message that is read."""
        return not self._is_closing and self._frames.state is State.OPEN

    def send(self, message: bytes, *, is_text: bool = True) -> None:
        """Send a message. Does nothing once the connection is being closed."""
        if not self.is_open:
            return
        if is_text:
            self._frames.send_text(message)
        else:
            self._frames.send_binary(message)
        self._flush()

    def hold_reading(self) -> None:
        """Read nothing more, until `resume_reading`."""
        self._is_held = True
        self.wire.pause_reading()

    def resume_reading(self) -> None:
        """Read on, if the client reads, too."""
        self._is_held = False
        if self.wire.is_read:
            self.wire.resume_reading()

    def close(self, code: int, reason: str) -> None:
        """Close the connection. `reason`: for people; what is too long is cut."""
        if not self.is_open:
            return
        self._is_closing = True
        cut = reason.encode()[:_REASON_BYTES_MAX].decode("utf-8", "ignore")
        self._frames.send_close(code, cut)
        self._flush()
        self.wire.resume_reading()  # for the client's answer
        self.wire.set_deadline(LINGER_S)

    # --- called by the connection --------------------------------------------------------------------------

    def on_data(self, data: bytes) -> None:
        """Read frames."""
        self._is_pinged = False
        self._frames.receive_data(data)
        for frame in self._frames.events_received():
            assert isinstance(frame, Frame)
            if not self._is_closing:
                self._on_frame(frame)
        self._count_held()
        if self._frames.state is not State.OPEN and not self._is_closing:  # the client closes, or was wrong
            self._is_closing = True
            self._conversation.on_lost()
            self.wire.set_deadline(LINGER_S)
        self._flush()
        if not (self._is_closing or self.wire.is_read):
            self.wire.pause_reading()

    def on_read(self) -> None:
        """The client has read enough."""
        if not self._is_held:
            self.wire.resume_reading()

    def on_deadline(self) -> None:
        """Nothing has come for a while, or not what was waited for."""
        if self._is_closing or self._is_pinged:
            self.wire.abort()
            return
        self._is_pinged = True
        self._frames.send_ping(b"")
        self._flush()
        self.wire.set_deadline(self._limits.ping_s)

    def on_drain(self) -> None:
        """The server stops."""
        self._conversation.on_drain()

    def on_lost(self) -> None:
        """The connection has ended."""
        self._is_closing = True
        self._parts.clear()
        self.wire.memory.release(self._held_bytes)
        self._held_bytes = 0
        self._conversation.on_lost()

    def _on_frame(self, frame: Frame) -> None:
        if frame.opcode in (Opcode.TEXT, Opcode.BINARY):
            self._is_text = frame.opcode is Opcode.TEXT
        elif frame.opcode is not Opcode.CONT:
            return  # the library has answered it
        data = bytes(frame.data)
        if not frame.fin:
            self._parts.append(data)
            self._parts_bytes += len(data)
            return
        if self._parts:
            data = b"".join([*self._parts, data])
            self._parts, self._parts_bytes = [], 0
        if self._is_text and not _is_utf8(data):
            self._fail(CloseCode.INVALID_DATA, "a text message must be UTF-8")
            return
        self._conversation.on_message(data, is_text=self._is_text)

    def _fail(self, code: int, reason: str) -> None:
        self.close(code, reason)
        self._conversation.on_lost()

    def _count_held(self) -> None:
        """Count what has come of messages that are not complete."""
        held_bytes = len(self._frames.reader.buffer) + self._parts_bytes
        more_bytes, memory = held_bytes - self._held_bytes, self.wire.memory
        if more_bytes > 0:
            try:
                memory.take(more_bytes)
            except HttpError as error:
                self._fail(CloseCode.TRY_AGAIN_LATER, error.detail)
                return
        elif more_bytes < 0:
            memory.release(-more_bytes)
        self._held_bytes = held_bytes

    def _flush(self) -> None:
        parts = self._frames.data_to_send()
        if not parts:
            return
        ends = parts[-1] == b""  # as the library says that nothing follows
        self.wire.write_raw(parts[:-1] if ends else parts)
        if ends:
            self.wire.leave()


def _is_utf8(data: bytes) -> bool:
    if data.isascii():
        return True
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- the handshake -----------------------------------------------------------------------------------------


def accept(exchange: Exchange, origins: Sequence[str]) -> bytes:
    """The headers that answer the request for a WebSocket. `origins`: of pages that may ask for one, beside
    those of this server. Raises HttpError if it is none, or its page may not."""
    headers = exchange.headers
    if exchange.method != "GET" or not exchange.takes_parts:
        raise HttpError(400, "a WebSocket is asked for with GET, in HTTP/1.1")
    if b"websocket" not in _tokens(headers.get(b"upgrade", b"")):
        raise HttpError(
            426, "this is a WebSocket: send Upgrade: websocket", headers=b"upgrade: websocket\r\n"
        )
    if b"upgrade" not in _tokens(headers.get(b"connection", b"")):
        raise HttpError(400, "the header Connection must have upgrade")
    if headers.get(b"sec-websocket-version") != _VERSION:
        raise HttpError(426, "the only Sec-WebSocket-Version is 13", headers=b"sec-websocket-version: 13\r\n")
    key = headers.get(b"sec-websocket-key", b"")
    try:
        is_key = len(base64.b64decode(key, validate=True)) == _KEY_BYTES
    except binascii.Error:
        is_key = False
    if not is_key:
        raise HttpError(400, "the header Sec-WebSocket-Key must be 16 bytes in base64")
    _check_origin(headers, origins)
    accepted = base64.b64encode(sha1(key + _GUID, usedforsecurity=False).digest())
    answer = b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-accept: %b\r\n" % accepted
    offered = headers.get(b"sec-websocket-protocol")
    if offered is not None and SUBPROTOCOL in _tokens(
        offered
    ):  # beside it may be an API key, which is not told
        answer += b"sec-websocket-protocol: %b\r\n" % SUBPROTOCOL
    return answer


def _check_origin(headers: Mapping[bytes, bytes], origins: Sequence[str]) -> None:
    """Refuse a page of another site: browsers let it open a WebSocket to any server. Raises HttpError."""
    given = headers.get(b"origin")
    if given is None:  # it is no page
        return
    origin, host = given.decode("latin-1").lower(), headers.get(b"host", b"").decode("latin-1").lower()
    scheme, _, place = origin.partition("://")
    default_port = {"http": ":80", "https": ":443"}.get(scheme, "")
    if place and place.removesuffix(default_port) == host.removesuffix(default_port):
        return
    if origin not in origins:
        raise HttpError(403, f"pages of {origin:.80} may not open a WebSocket here: see --origins")


def _tokens(value: bytes) -> list[bytes]:
    return [token.strip().lower() for token in value.split(b",")]
