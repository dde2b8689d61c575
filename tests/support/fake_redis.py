"""A server that speaks Redis's protocol and replies what a test wants, in place of one that cannot be had."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any, Final, Self

OK: Final = b"+OK\r\n"
UNKNOWN: Final = b"-ERR unknown command\r\n"
FORBIDDEN: Final = b"-NOPERM this user has no permissions to run this command\r\n"


def bulk(*texts: str) -> bytes:
    """A list of strings."""
    parts = (f"${len(text.encode())}\r\n{text}\r\n" for text in texts)
    return f"*{len(texts)}\r\n{''.join(parts)}".encode()


def text(content: str) -> bytes:
    """A string."""
    return bulk(content).removeprefix(b"*1\r\n")


class FakeRedis:
    """Listens on a free port of `host`. `reply` returns the bytes that answer a command, which is a list of
    texts; `commands` has all that were received."""

    def __init__(self, reply: Callable[[list[str]], bytes], host: str = "127.0.0.1") -> None:
        self.commands: list[list[str]] = []

        class Handler(socketserver.StreamRequestHandler):
            def handle(handler) -> None:  # noqa: N805 (`self` is the server)
                while head := handler.rfile.readline():
                    command = [
                        handler.rfile.read(int(handler.rfile.readline()[1:]) + 2)[:-2].decode()
                        for _ in range(int(head[1:]))
                    ]
                    self.commands.append(command)
                    handler.wfile.write(reply(command))

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

        self._server = Server((host, 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
