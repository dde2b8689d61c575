"""A TCP proxy before Redis: its connections can fall silent, and new ones can lead to another server."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

_HOST: Final = "127.0.0.1"
_READ_BYTES: Final = 65536


class _Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.ends = (client, server)
        self.address = "{}:{}".format(*server.getsockname())  # as the server knows it
        self.may_carry = threading.Event()
        self.may_carry.set()
        for source, target in (self.ends, self.ends[::-1]):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_READ_BYTES):
                self.may_carry.wait()
                target.sendall(data)
        self.close()

    def close(self) -> None:
        self.may_carry.set()
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on `url` for the time of a `with` block. `port`: the server to which new connections lead."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._connections: list[_Connection] = []
        self._listener = socket.create_server((_HOST, 0))
        self.url = f"redis://{_HOST}:{self._listener.getsockname()[1]}/0"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection((_HOST, self.port))
                except OSError:
                    client.close()
                else:
                    self._connections.append(_Connection(client, server))

    def silence(self, redis: Any, is_meant: Callable[[str], bool]) -> int:
        """From now on connections with such a name carry nothing, though they stay open. Returns how many."""
        names: dict[str, str] = {client["addr"]: client["name"] for client in redis.client_list()}
        meant = [at for at in self._connections if is_meant(names.get(at.address, ""))]
        for connection in meant:
            connection.may_carry.clear()
        return len(meant)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()
