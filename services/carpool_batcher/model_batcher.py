"""A registered model: whether this batcher serves it or stands by, and how it fails.

Any number of batchers may run for a model. A lease lets one of them form batches, because several would each
form smaller ones. Safety does not depend on it: a request is dispatched at most once anyway.

Why: docs/decisions/0001 and docs/decisions/0082.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import structlog

from carpool.backoff import Backoff
from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Link
from carpool.store.directory import ModelSnapshot
from carpool.store.reader import StreamReader
from carpool_batcher.custom_policies import Policies
from carpool_batcher.effective_settings import EffectiveSettings
from carpool_batcher.meter import Meter
from carpool_batcher.session import Session


class ModelBatcher:
    """Serves one model, or stands by while another batcher does. `link` and `clock` are those of all models.

    `turn`: one that goes on later. `failing`: why its session ended; the next one begins at `retry_at_s`.
    """

    def __init__(
        self, link: Link, keys: Keys, name: str, clock: RedisClock, meter: Meter, policies: Policies
    ) -> None:
        self.keys = keys
        self.meter = meter
        self.turn: Iterator[None] | None = None
        self.failing: str | None = None
        self.retry_at_s = 0.0
        self._clock = clock
        self._store = BatcherStore(link, keys, clock)
        self._store.name = name
        self._session: Session | None = None
        self._log = structlog.get_logger().bind(model=keys.model)
        self._settings = EffectiveSettings(policies, self._log)
        self._backoff = Backoff()

    @property
    def active(self) -> bool:
        """Whether this batcher serves the model, because it holds the lease."""
        return self._session is not None

    @property
    def session(self) -> Session:
        """What it does for the model while it is active."""
        assert self._session is not None
        return self._session

    def begin(self, snapshot: ModelSnapshot, reader: StreamReader) -> None:
        """It holds the lease: serve the model."""
        self._session = Session(
            self._store, self._clock, self._settings, self.meter, self._log, snapshot, reader
        )
        self._log.info(
            "batcher active",
            batcher=self._store.name,
            workers=len(snapshot.model_processes),
            entries=snapshot.waiting_entries,
        )

    def log_lost_lease(self) -> None:
        """Another batcher has the lease, or may take it."""
        self._log.info("batcher no longer active, lease lost", batcher=self._store.name)

    def has_requests(self) -> bool:
        """Whether requests wait or are in flight, or results are withheld, as far as it knows."""
        return self._session is not None and self._session.has_requests()

    def end(self) -> None:
        """Stand by. May be called repeatedly."""
        self.turn = None
        if self._session is not None:
            self._session.end()
            self._session = None

    def fail(self, reason: str) -> None:
        """Its session failed, and is over. Another one may begin after a pause."""
        self.failing = reason
        self.retry_at_s = time.monotonic() + self._backoff.next_s()

    def recover(self) -> None:
        """It has not failed since its leases were looked at last."""
        self.failing = None
        self._backoff.reset()
