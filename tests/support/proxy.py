"""A TCP proxy before Redis: a network that falls silent, is slow, is cut, or leads to another server."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Final, Self

_HOST: Final = "127.0.0.1"
_READ_BYTES: Final = 65536


class Direction(Enum):
    """Which way data travels."""

    REQUESTS = "to the server"
    REPLIES = "to the client"


class _Way:
    """One direction of a connection."""

    def __init__(self, source: socket.socket, target: socket.socket, latency_s: Callable[[], float]) -> None:
        self.may_carry = threading.Event()
        self.may_carry.set()
        self._source, self._target, self._latency_s = source, target, latency_s
        self._on_the_way: SimpleQueue[tuple[float, bytes]] = SimpleQueue()  # when it arrives; empty: the end
        self.cuts_next = threading.Event()

    def start(self, close: Callable[[], None]) -> None:
        threading.Thread(target=self._take, daemon=True).start()
        threading.Thread(target=self._deliver, args=(close,), daemon=True).start()

    def _take(self) -> None:
        data = b"more"
        while data:
            try:
                data = self._source.recv(_READ_BYTES)
            except OSError:
                data = b""
            self._on_the_way.put((time.monotonic() + self._latency_s(), data))

    def _deliver(self, close: Callable[[], None]) -> None:
        with contextlib.suppress(OSError):
            while True:
                arrives_s, data = self._on_the_way.get()
                if not data:
                    break
                time.sleep(max(0.0, arrives_s - time.monotonic()))
                self.may_carry.wait()
                if self.cuts_next.is_set():
                    self._target.sendall(data[: len(data) // 2])
                    break
                self._target.sendall(data)
        close()


class _Connection:
    """One connection of a client, and the one to the server that belongs to it."""

    def __init__(self, client: socket.socket, server: socket.socket, latency_s: Callable[[], float]) -> None:
        self._ends = (client, server)
        self.address = "{}:{}".format(*server.getsockname())  # as the server knows it
        self.ways = {
            Direction.REQUESTS: _Way(client, server, latency_s),
            Direction.REPLIES: _Way(server, client, latency_s),
        }
        for way in self.ways.values():
            way.start(self.close)

    def close(self) -> None:
        for way in self.ways.values():
            way.may_carry.set()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """Listens on `url` for the time of a `with` block. `port`: the server to which new connections lead.
    `latency_s`: how long data travels each way, from and to."""

    def __init__(self, port: int, seed: int = 0) -> None:
        self.port = port
        self.latency_s = (0.0, 0.0)
        self._random = random.Random(seed)
        self._held: set[Direction] = set()
        self._connections: list[_Connection] = []
        self._lock = threading.Lock()  # a new connection is held too, if others are
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
                    with self._lock:
                        self._add(_Connection(client, server, self._next_latency_s))

    def _add(self, connection: _Connection) -> None:
        for direction in self._held:
            connection.ways[direction].may_carry.clear()
        self._connections.append(connection)

    def _next_latency_s(self) -> float:
        return self._random.uniform(*self.latency_s)

    def silence(self, redis: Any, is_meant: Callable[[str], bool]) -> int:
        """Until `resume`, connections with such a name carry nothing, though they stay open. Returns how
        many."""
        names: dict[str, str] = {client["addr"]: client["name"] for client in redis.client_list()}
        meant = [at for at in self._connections if is_meant(names.get(at.address, ""))]
        for connection in meant:
            for way in connection.ways.values():
                way.may_carry.clear()
        return len(meant)

    @contextlib.contextmanager
    def hold(self, *directions: Direction) -> Iterator[None]:
        """Inside the block nothing is carried these ways, on no connection; then all that was held back."""
        with self._lock:
            self._held = set(directions)
            connections = list(self._connections)
        for connection in connections:
            for direction in directions:
                connection.ways[direction].may_carry.clear()
        try:
            yield
        finally:
            self.resume()

    def resume(self) -> None:
        """All connections carry everything again, and what was held back."""
        with self._lock:
            self._held = set()
            for connection in self._connections:
                for way in connection.ways.values():
                    way.may_carry.set()

    def cut(self) -> None:
        """Close each connection that is open now in the middle of the next reply that it carries."""
        for connection in self._connections:
            connection.ways[Direction.REPLIES].cuts_next.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()
