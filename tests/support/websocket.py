"""A client of WebSocket for tests, which can also send what no library would.

with Socket(gateway.url, "/carpool/v1/models/Echo/stream") as socket:
    socket.send({"id": "1", "body": 7})
    assert socket.json() == {"id": "1", "chunk": 7}
"""

from __future__ import annotations

import base64
import json
import os
import struct
from typing import Any, Final

from support.http import Answer, Connection

CONT: Final = 0
TEXT: Final = 1
BINARY: Final = 2
CLOSE: Final = 8
PING: Final = 9
PONG: Final = 10


def frame(
    opcode: int, payload: bytes, *, fin: bool = True, mask: bytes | None = b"\x01\x02\x03\x04", rsv: int = 0
) -> bytes:
    """A frame. Without `mask` it is as a server sends it."""
    size, masked = len(payload), 0x80 if mask is not None else 0
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    if size < 126:
        head += bytes([masked | size])
    elif size < 1 << 16:
        head += bytes([masked | 126]) + struct.pack(">H", size)
    else:
        head += bytes([masked | 127]) + struct.pack(">Q", size)
    if mask is None:
        return head + payload
    key = (mask * (size // 4 + 1))[:size]
    masked_payload = int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")
    return head + mask + masked_payload.to_bytes(size, "little")


def handshake(path: str, **headers: str) -> bytes:
    """The request for a WebSocket. `headers`: underscores stand for hyphens; an empty one is left out."""
    given = {
        "Host": "127.0.0.1",
        "Upgrade": "websocket",
        "Connection": "keep-alive, Upgrade",
        "Sec_WebSocket_Version": "13",
        "Sec_WebSocket_Key": base64.b64encode(os.urandom(16)).decode(),
        **headers,
    }
    lines = [f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items() if value]
    return f"GET {path} HTTP/1.1\r\n{''.join(lines)}\r\n".encode()


class NotOpenedError(AssertionError):
    """The server answered a handshake with this, and opened no WebSocket."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer)
        self.answer = answer


class Socket(Connection):
    """A WebSocket that is open. Raises NotOpenedError."""

    def __init__(self, url: str, path: str, **headers: str) -> None:
        super().__init__(url)
        try:
            super().send(handshake(path, **headers))
            self.opened: Answer = self.answer(has_body=False)
            if self.opened.code != 101:
                raise NotOpenedError(self.opened)
        except BaseException:
            self.close()
            raise

    def send(self, message: Any) -> None:
        """Send a message: bytes as they are, anything else as JSON in a text."""
        if isinstance(message, bytes):
            super().send(frame(BINARY, message))
        else:
            super().send(frame(TEXT, json.dumps(message).encode()))

    def raw(self, data: bytes) -> None:
        """Send bytes."""
        super().send(data)

    def frame(self) -> tuple[int, bytes]:
        """The next frame: its opcode and what is in it. A server's are whole messages, and not masked."""
        first, second = self._take(2)
        assert first & 0x80
        assert not second & 0x80
        size = second
        if size == 126:
            (size,) = struct.unpack(">H", self._take(2))
        elif size == 127:
            (size,) = struct.unpack(">Q", self._take(8))
        return first & 0x0F, self._take(size)

    def message(self) -> tuple[int, bytes]:
        """The next message; pings are answered."""
        while True:
            opcode, payload = self.frame()
            if opcode != PING:
                return opcode, payload
            self.raw(frame(PONG, payload))

    def json(self) -> Any:
        """The next message, which is a text."""
        opcode, payload = self.message()
        assert opcode == TEXT, (opcode, payload)
        return json.loads(payload)

    def until_end(self, request_id: str = "1") -> list[Any]:
        """All messages up to the end of a request, or its error; that is the last one."""
        messages = [self.json()]
        while messages[-1]["id"] != request_id or not messages[-1].keys() & {"end", "error"}:
            messages.append(self.json())
        return messages

    def closed(self) -> tuple[int, str]:
        """The code and the reason of the close that is next; then the connection has ended."""
        opcode, payload = self.message()
        assert opcode == CLOSE, (opcode, payload)
        self.raw(frame(CLOSE, payload))
        assert self.rest() == b""
        return struct.unpack(">H", payload[:2])[0], payload[2:].decode()
