"""How long Redis keeps others waiting while it is busy."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from redis import Redis


class Pings:
    """Inside the block another connection sends one PING after another. `slowest_s`: the longest wait."""

    def __init__(self, url: str) -> None:
        self.slowest_s = 0.0
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
            sent_s = time.monotonic()
            self._redis.ping()
            self.slowest_s = max(self.slowest_s, time.monotonic() - sent_s)
            self._stopping.wait(0.001)
