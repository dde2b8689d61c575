"""The requests that a client sends on a connection: the parser httptools calls what is here.

What is wrong with a request is found as early as possible: in its headers, before its body is asked for or
read, or as soon as more of the body has come than is allowed. No I/O.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from functools import lru_cache
from typing import Final, Protocol

import httptools

from carpool_gateway.answers import HttpError
from carpool_gateway.exchange import Connection, Exchange
from carpool_gateway.limits import Limits, too_large
from carpool_gateway.options import given_request_id

DROPPED_BYTES_MAX: Final = 64 * 1024  # of a refused request, if the connection is to be used again

_HOST: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")
_SINGLE: Final = frozenset(  # headers that make no sense twice
    (b"host", b"content-length", b"content-type", b"authorization", b"x-api-key", b"idempotency-key")
)


class Phase(Enum):
    """What comes next on a connection."""

    IDLE = auto()  # nothing of a request has come
    HEAD = auto()
    BODY = auto()
    ENDED = auto()  # nothing more is parsed


# Names of a module are found faster than members of an Enum; each request compares several.
IDLE, HEAD, BODY, ENDED = Phase


class Receiver(Connection, Protocol):
    """Who gets the requests: see `server.Connection`."""

    def on_begin(self) -> None:
        """The first byte of a request has come."""

    def on_head(self, exchange: Exchange) -> None:
        """Its headers are complete. Raises HttpError if it is refused."""

    def ask_for_body(self) -> None:
        """The client waits for a word before it sends the body."""

    def on_rest(self, rest: bytes) -> None:
        """What came together with a request that asked for another protocol, and after it."""

    def on_request(self, exchange: Exchange) -> None:
        """The request is complete. If `exchange.error` is set, that is the answer."""


class RequestReader:
    """Makes exchanges of bytes. `incoming`: the one of which not all has come."""

    def __init__(self, receiver: Receiver, limits: Limits) -> None:
        self.phase = IDLE
        self.incoming: Exchange | None = None
        self._receiver = receiver
        self._limits = limits
        self._parser = httptools.HttpRequestParser(self)
        self._parts: list[bytes] = []  # of the body
        self._chunks = 0  # likewise
        self._head_bytes = 0
        self._url = b""
        self._host: bytes | None = None  # of the last request; it is well formed

    def feed(self, data: bytes) -> None:
        """Parse what has come. Raises HttpError if the connection must end with that answer, and what the
        receiver raises."""
        if self.phase is ENDED:
            return
        if self.phase is HEAD or self.phase is IDLE:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self.phase = ENDED  # if no other protocol is spoken, what follows means nothing
            if rest := data[upgrade.args[0] :]:
                self._receiver.on_rest(rest)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise HttpError(400, f"malformed request: {str(error) or type(error).__name__}") from None
        if self.phase is HEAD and self._head_bytes > self._limits.head_bytes:
            raise self._head_too_large()

    def stop(self) -> Exchange | None:
        """Parse no more. Returns the exchange of which not all has come."""
        incoming, self.incoming = self.incoming, None
        self._parts.clear()
        self.phase = ENDED
        return incoming

    # --- called by the parser ------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.incoming = Exchange(self._receiver)
        self.phase = HEAD
        self._url = b""
        self._chunks = 0
        self._receiver.on_begin()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        exchange = self.incoming
        assert exchange is not None
        name, headers = name.lower(), exchange.headers
        if name in headers:
            if name in _SINGLE:
                raise HttpError(400, f"the header {name.decode('latin-1')} came twice")
            value = headers[name] + b", " + value
        headers[name] = value
        if len(headers) > self._limits.headers or len(value) > self._limits.head_bytes:
            raise self._head_too_large()

    def on_headers_complete(self) -> None:
        exchange = self.incoming
        assert exchange is not None
        self._head_bytes = 0
        self.phase = BODY
        self._read_head(exchange)
        try:
            self._receiver.on_head(exchange)
            self._check_announced_body(exchange)
        except HttpError as error:
            if not _can_drop_body(exchange):
                raise
            exchange.error = error.with_traceback(None)  # which leads to the exchange: a cycle
        else:
            if b"expect" in exchange.headers:
                self._receiver.ask_for_body()

    def _read_head(self, exchange: Exchange) -> None:
        """The request line, and headers that concern the connection. Raises HttpError."""
        parser, headers = self._parser, exchange.headers
        exchange.method = parser.get_method().decode("ascii")
        exchange.request_id = given_request_id(headers)
        version = parser.get_http_version()
        if version != "1.1" or not parser.should_keep_alive() or parser.should_upgrade():
            exchange.is_last = True
            exchange.takes_parts = version == "1.1"
            if version not in ("1.0", "1.1"):
                raise HttpError(505 if version != "0.9" else 400, "use HTTP/1.1")
        host = headers.get(b"host")
        if host != self._host or host is None:  # most clients send the same one each time
            if (host is None and version == "1.1") or (host is not None and not _HOST.fullmatch(host)):
                raise HttpError(400, "the header Host is missing, or malformed")
            self._host = host
        # The parser refuses a Content-Length beside it.
        coding = headers.get(b"transfer-encoding")
        if coding is not None and (coding.lower() != b"chunked" or version == "1.0"):
            raise HttpError(400, "the only Transfer-Encoding is chunked, in HTTP/1.1")
        expect = headers.get(b"expect")
        if expect is not None and expect.lower() != b"100-continue":
            raise HttpError(417, "the only Expect is 100-continue")
        exchange.path, exchange.query = _target_of(exchange.method, self._url)

    def _check_announced_body(self, exchange: Exchange) -> None:
        """Count a body of known length before anything of it is read. Raises HttpError."""
        announced = exchange.headers.get(b"content-length")
        if announced is None:
            return
        size = int(announced)  # the parser refuses what is no number
        if size > self._limits.body_bytes:
            raise too_large(self._limits.body_bytes)
        exchange.take(size)

    def on_chunk_header(self) -> None:
        # Chunks of a byte each would take fifty times the memory of the body, and as much time.
        self._chunks += 1
        if self._chunks > self._limits.chunks + 1:  # the last one is empty
            raise HttpError(
                400, f"the body has more than {self._limits.chunks} chunks: send fewer, larger ones"
            )

    def on_body(self, body: bytes) -> None:
        exchange = self.incoming
        assert exchange is not None
        if exchange.error is not None:
            return
        if b"transfer-encoding" in exchange.headers:
            if exchange.body_bytes + len(body) > self._limits.body_bytes:
                raise too_large(self._limits.body_bytes)
            exchange.take(len(body))
        self._parts.append(body)

    def on_message_complete(self) -> None:
        exchange = self.incoming
        assert exchange is not None
        self.incoming = None
        self.phase = ENDED if exchange.is_last else IDLE
        parts, self._parts = self._parts, []
        exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        self._receiver.on_request(exchange)

    def _head_too_large(self) -> HttpError:
        limits = self._limits
        return HttpError(431, f"at most {limits.headers} headers, of {limits.head_bytes} bytes in all")


def _can_drop_body(exchange: Exchange) -> bool:
    """Whether the connection can be used after an error: the body is short, and will come."""
    headers = exchange.headers
    if b"transfer-encoding" in headers or b"expect" in headers:
        return False
    length = headers.get(b"content-length", b"0")
    return length.isdigit() and int(length) <= DROPPED_BYTES_MAX


@lru_cache(maxsize=256)
def _target_of(method: str, target: bytes) -> tuple[str, str]:
    """The path and the query of a request's target. Raises HttpError."""
    if not target.isascii():
        raise HttpError(400, "the path must be ASCII, with other characters as %XX")
    text = target.decode("ascii")
    if text.startswith("/"):
        path, _, query = text.partition("?")
        return path, query
    if text == "*" or method == "CONNECT":
        return "*", ""
    try:
        parsed = httptools.parse_url(target)  # absolute
    except httptools.HttpParserInvalidURLError:
        raise HttpError(400, "the request's target is malformed") from None
    return (parsed.path or b"/").decode("ascii"), (parsed.query or b"").decode("ascii")
