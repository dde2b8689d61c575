"""Tells that a worker loads its model: clients then wait for it, and `carpool models` shows it."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.store.connection import CommandError, Link

BEATS_PER_LEASE: Final = 3


class LoadingNotice:
    """For a `with` block in which the model is loaded and registered.

    It is a courtesy: without Redis, or with an ACL file that is older than this, nothing is told.
    """

    def __init__(self, link: Link, keys: Keys, worker: str, lease_ms: int) -> None:
        self._link = link
        self._key = keys.loading
        self._worker = worker
        self._lease_ms = lease_ms
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="loading", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._link.close()

    def _tell(self) -> None:
        while True:
            with suppress(UnavailableError, CommandError):
                self._link.call_many(
                    ("HSET", self._key, "worker", self._worker), ("PEXPIRE", self._key, self._lease_ms)
                )
            if self._ended.wait(self._lease_ms / 1000 / BEATS_PER_LEASE):
                break
        with suppress(UnavailableError, CommandError):
            self._link.call("DEL", self._key)  # another worker that loads it tells so again
