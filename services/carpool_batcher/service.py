"""The batcher service: one ModelBatcher, on a thread of its own, for every registered model."""

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
DISCOVERY_AGE_MAX_S: Final = 5.0  # reconnecting takes less
LOOP_SILENCE_MAX_S: Final = 30.0  # an iteration blocks for 1 s, and Redis's timeout is 5 s


class BatcherService:
    """Runs a loop for each registered model. `run_once` finds new models; no list is configured. A model that
    is no longer registered keeps its loop until this process ends."""

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
        self._discovery = Loop("discovery", self._discover, self._report_discovery_error)
        self._batchers: dict[str, ModelBatcher] = {}
        self._loops: dict[str, Loop] = {}
        self._invalid_names: set[str] = set()
        self._discovered_s = float("-inf")  # when discovery succeeded last
        self._stopping = Event()
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Start discovery, which starts a loop for each model it finds."""
        self._discovery.start()

    def run_once(self) -> None:
        """Start serving the models that are new."""
        for model in self._directory.models():
            if model not in self._loops and model not in self._invalid_names:
                self._start_model(model)
        self._discovered_s = time.monotonic()

    def _discover(self) -> None:
        self.run_once()
        self._stopping.wait(DISCOVER_EVERY_S)

    def _start_model(self, model: str) -> None:
        try:
            keys = Keys(model, self._prefix)
        except ValueError as error:
            self._invalid_names.add(model)
            self._log.error("registered model ignored", reason=str(error))
            return
        batcher = ModelBatcher(self._url, keys, self._name, Meter(self._metrics, model), self._policies)
        loop = Loop(f"batcher {model}", batcher.run_once, self._error_reporter(model))
        self._batchers[model], self._loops[model] = batcher, loop
        loop.start()

    def _report_discovery_error(self, error: Exception) -> None:
        self._metrics.error(error)
        self._log.warning("model discovery failed, retrying", reason=str(error), kind=type(error).__name__)

    def _error_reporter(self, model: str) -> Callable[[Exception], None]:
        def report(error: Exception) -> None:
            self._metrics.error(error)
            self._log.warning(
                "batcher failed, starting over", model=model, reason=str(error), kind=type(error).__name__
            )

        return report

    # --- health --------------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """What only a restart would mend: a loop that ended or hangs."""
        return [
            f"{loop.name}: "
            f"{f'has been hanging for {loop.silent_s:.0f} s' if loop.alive else 'its thread ended'}"
            for loop in self._all_loops()
            if not loop.alive or loop.silent_s > LOOP_SILENCE_MAX_S
        ]

    def unready(self) -> list[str]:
        """Why no model is batched now.

        A batcher on standby is ready to take over. One that fails for some models still serves the others.
        """
        if self._stopping.is_set():
            return ["stopping"]
        loops = list(self._loops.values())
        failing = [f"{loop.name}: {loop.failing}" for loop in loops if loop.failing]
        if loops and len(failing) == len(loops):
            return failing
        if time.monotonic() - self._discovered_s < DISCOVERY_AGE_MAX_S:
            return []
        why = self._discovery.failing
        return [f"{self._discovery.name}: {why}" if why else "starting"]

    def _all_loops(self) -> list[Loop]:
        return [self._discovery, *list(self._loops.values())]

    # --- stopping ------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop all loops, and release the leases."""
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
