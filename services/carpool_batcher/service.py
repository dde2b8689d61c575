"""The batcher service: a ModelBatcher for every registered model, found within a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog

from carpool.keys import Keys
from carpool.lifecycle import Loop
from carpool.link import Link
from carpool.store import Directory
from carpool_batcher.batcher import ModelBatcher

DISCOVER_EVERY_S: Final = 0.5


class BatcherService:
    """Runs a loop for each model. `run_once` looks for new models; nothing else needs to be configured."""

    def __init__(self, url: str, prefix: str, name: str) -> None:
        self._url = url
        self._prefix = prefix
        self._name = name
        self._directory = Directory(Link(url, name=f"{name}:directory"), prefix)
        self._loops: dict[str, tuple[ModelBatcher, Loop]] = {}
        self._not_models: set[str] = set()
        self._log = structlog.get_logger()

    def run_once(self) -> None:
        """Start serving the models that are new."""
        for model in self._directory.models():
            if model not in self._loops and model not in self._not_models:
                self._start(model)

    def _start(self, model: str) -> None:
        try:
            keys = Keys(model, self._prefix)
        except ValueError as error:
            self._not_models.add(model)
            self._log.error("not a model", reason=str(error))
            return
        batcher = ModelBatcher(self._url, keys, self._name)
        loop = Loop(f"batcher {model}", batcher.run_once, self._report(model))
        self._loops[model] = (batcher, loop)
        loop.start()

    def _report(self, model: str) -> Callable[[Exception], None]:
        def report(error: Exception) -> None:
            self._log.warning(
                "batcher starts over", model=model, reason=str(error), kind=type(error).__name__
            )

        return report

    def stop(self) -> None:
        """Stop all loops, and give the leases back."""
        for batcher, loop in self._loops.values():
            loop.stop()
            batcher.stop()
        for batcher, loop in self._loops.values():
            if loop.join(5.0):
                batcher.close()
        self._directory.close()
