"""An HTTP client for tests, which can also say what no library would send.

with Connection(gateway.url) as connection:
    connection.send(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert connection.answer().code == 200
    assert connection.request("POST", "/carpool/v1/models/Echo/infer", b"7").body == b"7"
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from support.waiting import EVENTUALLY_S


class Answer(NamedTuple):
    """`headers`: names in small letters."""

    code: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Connection:
    """One connection to a server. What reads raises ConnectionError if it ends too early."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        assert address.hostname is not None
        assert address.port is not None
        self.socket = socket.create_connection((address.hostname, address.port), timeout=EVENTUALLY_S)
        try:
            is_alone = self.socket.getsockname() == self.socket.getpeername()
        except OSError:  # it was reset already
            self.socket.close()
            raise
        if is_alone:  # nobody listens, and the kernel chose this port
            self.socket.close()
            raise ConnectionRefusedError(f"nothing listens on {url}")
        self._buffer = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Go away: what is in flight has no reader any more."""
        self.socket.close()

    def reset(self) -> None:
        """Go away with a reset, as a process does that is killed with data unread."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Send a request and return its answer. `headers`: underscores stand for hyphens."""
        self.send(request(method, path, body, **headers))
        return self.answer(has_body=method != "HEAD")

    def answer(self, *, has_body: bool = True) -> Answer:
        """Read an answer; of an interim one only the head."""
        head, _, self._buffer = self.until(b"\r\n\r\n").partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        code = int(first.split(" ")[1])
        if not has_body or code in (100, 204):
            return Answer(code, headers, b"")
        return Answer(code, headers, self.body(headers))

    def body(self, headers: Mapping[str, str]) -> bytes:
        """The body of an answer whose head was read, which has these headers."""
        if headers.get("transfer-encoding") == "chunked":
            return b"".join(iter(self.part, b""))
        if "content-length" in headers:
            return self._take(int(headers["content-length"]))
        return self.rest()

    def part(self) -> bytes:
        """The next part of a body that is written in parts; empty at the end."""
        size, _, self._buffer = self.until(b"\r\n").partition(b"\r\n")
        part = self._take(int(size, 16))
        assert self._take(2) == b"\r\n"
        return part

    def rest(self) -> bytes:
        """All until the server closes the connection."""
        while data := self._receive():
            self._buffer += data
        rest, self._buffer = self._buffer, b""
        return rest

    @property
    def is_readable(self) -> bool:
        """Whether something has come that was not read, or the server has closed the connection."""
        return bool(self._buffer or select.select([self.socket], [], [], 0)[0])

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed the connection, and nothing is left to read."""
        readable, _, _ = select.select([self.socket], [], [], 0)
        try:
            return bool(readable) and not self._buffer and not self.socket.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:  # what was sent came after the end
            return True

    def until(self, end: bytes) -> bytes:
        """All that was received and not returned, as soon as this is in it."""
        while end not in self._buffer:
            data = self._receive()
            if not data:
                raise ConnectionError(f"the connection was closed after {self._buffer!r:.200}")
            self._buffer += data
        return self._buffer

    def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            data = self._receive()
            if not data:
                raise ConnectionError(f"the connection was closed after {len(self._buffer)} of {size} bytes")
            self._buffer += data
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        return taken

    def _receive(self) -> bytes:
        try:
            return self.socket.recv(1 << 20)
        except ConnectionResetError:
            return b""


def request(method: str, path: str, body: bytes = b"", **headers: str) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    if (body or method == "POST") and not {"Transfer_Encoding", "Content_Length"} & headers.keys():
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def call(url: str, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
    """A request on a connection of its own."""
    with Connection(url) as connection:
        return connection.request(method, path, body, **headers)
