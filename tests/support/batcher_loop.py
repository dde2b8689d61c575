"""The production batcher whose loop the test runs, so that nothing happens but while the test waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.store.connection import Link
from carpool_batcher.meter import BatcherMetrics
from carpool_batcher.service import BatcherService
from support.waiting import wait_until

Value = TypeVar("Value")


class BatcherLoop:
    """A batcher, which runs when a test waits for something, and a connection to its Redis."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.link = Link(url, name="test")
        self.metrics = BatcherMetrics()
        self.service = self._new_service("batcher-under-test")

    def _new_service(self, name: str) -> BatcherService:
        return BatcherService(self.url, DEFAULT_PREFIX, name, self.metrics, {})

    def run_until(self, condition: Callable[[], Value], description: str) -> Value:
        """Run the loop until the condition holds. Returns what it returned."""

        def ran() -> Value:
            self.service.run_once()
            return condition()

        return wait_until(ran, description=description)

    def take_over(self, model: str = "m") -> None:
        """The batcher is killed, and its lease ends at once: another one takes over."""
        self.service._start_over()
        self.link.call("DEL", Keys(model).batcher)
        self.service = self._new_service("second")

    def session(self, model: str = "m") -> Any:
        """The batcher's session for a model; None while it has none."""
        served = self.service._models.get(model)
        return None if served is None else served._session

    def waiting(self, model: str = "m") -> int:
        """How many requests of a model the batcher knows to wait."""
        session = self.session(model)
        return 0 if session is None else session.scheduler.queue.count

    def close(self) -> None:
        self.service.stop()
        self.link.close()
