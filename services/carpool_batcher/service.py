"""The batcher service: a ModelBatcher for every registered model, found within a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Final

import structlog

from carpool.keys import Keys
from carpool.lifecycle import Loop
from carpool.store.connection import Link
from carpool.store.directory import Directory
from carpool_batcher.batcher import ModelBatcher
from carpool_batcher.effective_settings import Policies
from carpool_batcher.meter import BatcherMetrics, Meter

DISCOVER_EVERY_S: Final = 0.5
UNSEEN_S: Final = 5.0  # a connection that is made anew takes less
STUCK_S: Final = 30.0  # no turn takes so long: Redis's timeout is 5 s, and a model's loop blocks for 1 s


class BatcherService:
    """Runs a loop for each model. `run_once` looks for new models; nothing else needs to be configured."""

    def __init__(
        self,
        url: str,
        prefix: str,
        name: str,
        metrics: BatcherMetrics,
        policies: Policies,
    ) -> None:
        self._url = url
        self._prefix = prefix
        self._name = name
        self._metrics = metrics
        self._policies = policies
        self._directory = Directory(Link(url, name=f"{name}:directory"), prefix)
        self._discovery = Loop("discovery", self._look, self._cannot_look)
        self._batchers: dict[str, ModelBatcher] = {}
        self._loops: dict[str, Loop] = {}
        self._not_models: set[str] = set()
        self._looked_s = float("-inf")  # when the models were looked for last, with success
        self._stopping = Event()
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Look for models from now on."""
        self._discovery.start()

    def run_once(self) -> None:
        """Start serving the models that are new."""
        for model in self._directory.models():
            if model not in self._loops and model not in self._not_models:
                self._start(model)
        self._looked_s = time.monotonic()

    def _look(self) -> None:
        self.run_once()
        self._stopping.wait(DISCOVER_EVERY_S)

    def _start(self, model: str) -> None:
        try:
            keys = Keys(model, self._prefix)
        except ValueError as error:
            self._not_models.add(model)
            self._log.error("not a model", reason=str(error))
            return
        batcher = ModelBatcher(self._url, keys, self._name, Meter(self._metrics, model), self._policies)
        loop = Loop(f"batcher {model}", batcher.run_once, self._starts_over(model))
        self._batchers[model], self._loops[model] = batcher, loop
        loop.start()

    def _cannot_look(self, error: Exception) -> None:
        self._metrics.error(error)
        self._log.warning("cannot look for models", reason=str(error), kind=type(error).__name__)

    def _starts_over(self, model: str) -> Callable[[Exception], None]:
        def report(error: Exception) -> None:
            self._metrics.error(error)
            self._log.warning(
                "batcher starts over", model=model, reason=str(error), kind=type(error).__name__
            )

        return report

    # --- how it is -----------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """What only a restart would mend: a loop that ended, or hangs."""
        return [
            f"{loop.name}: {f'hangs for {loop.silent_s:.0f} s' if loop.alive else 'ended'}"
            for loop in self._all_loops()
            if not loop.alive or loop.silent_s > STUCK_S
        ]

    def unready(self) -> list[str]:
        """Why nothing is batched now. A batcher that stands by is ready to take over, and one of whose models
        some fail serves the others."""
        if self._stopping.is_set():
            return ["stopping"]
        loops = list(self._loops.values())
        failing = [f"{loop.name}: {loop.failing}" for loop in loops if loop.failing]
        if loops and len(failing) == len(loops):
            return failing
        if time.monotonic() - self._looked_s < UNSEEN_S:
            return []
        why = self._discovery.failing
        return [f"{self._discovery.name}: {why}" if why else "starting"]

    def _all_loops(self) -> list[Loop]:
        return [self._discovery, *list(self._loops.values())]

    # --- the end -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all loops, and give the leases back."""
        self._stopping.set()
        self._discovery.stop()
        self._discovery.join(5.0)
        for loop in self._loops.values():
            loop.stop()
        for batcher in self._batchers.values():
            batcher.stop()
        for model, loop in self._loops.items():
            if loop.join(5.0):
                self._batchers[model].close()
        self._directory.close()
