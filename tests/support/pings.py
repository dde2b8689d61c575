"""How long Redis keeps others waiting while it is busy, whatever else this machine does."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from redis import Redis


class Pings:
    """Inside the block another connection sends one PING after another. `slowest_s`: the most CPU time that
    the server with this process ID used while one of them waited."""

    def __init__(self, url: str, pid: int) -> None:
        self.slowest_s = 0.0
        self._clock = (~pid << 3) | 2  # of the CPU time of a process, as Linux numbers clocks
        self._redis = Redis.from_url(url, socket_timeout=60)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ping, daemon=True)

    def __enter__(self) -> Self:
        self._redis.ping()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        self._redis.close()

    def _ping(self) -> None:
        while not self._stopping.is_set():
            sent_s = time.clock_gettime(self._clock)
            self._redis.ping()
            self.slowest_s = max(self.slowest_s, time.clock_gettime(self._clock) - sent_s)
            self._stopping.wait(0.001)
