"""Tells that a worker loads its model: clients then wait for it, and `carpool models` shows it."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from carpool.errors import UnavailableError
from carpool.keys import Keys, loading_key
from carpool.store.connection import CommandError, Link
from carpool_worker.member import BEATS_PER_LEASE

LISTED_MS: Final = 3_600_000  # the names of models that were loaded last are forgotten then


class LoadingNotice:
    """For a `with` block in which the model is loaded and registered.

    It is a courtesy: without Redis, or if Redis refuses it, nothing is told.
    """

    def __init__(self, link: Link, keys: Keys, worker: str, lease_ms: int) -> None:
        self._link = link
        self._keys = keys
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
            key = self._keys.loading
            with suppress(UnavailableError, CommandError):
                self._link.call_many(("HSET", key, "worker", self._worker), ("PEXPIRE", key, self._lease_ms))
                self._list()
            if self._ended.wait(self._lease_ms / 1000 / BEATS_PER_LEASE):
                break
        with suppress(UnavailableError, CommandError):
            self._link.call("DEL", self._keys.loading)  # another worker that loads it tells so again
            names = loading_key(self._keys.prefix)
            self._link.call_at(names, "SREM", names, self._keys.model)

    def _list(self) -> None:
        names = loading_key(self._keys.prefix)
        self._link.call_at(names, "SADD", names, self._keys.model)
        self._link.call_at(names, "PEXPIRE", names, max(self._lease_ms, LISTED_MS))
