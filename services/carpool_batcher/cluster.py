"""The batcher of a cluster: a `BatcherService` for each hash slot that has models.

Redis Cluster runs a command on keys of one slot only, and an XREAD that waits occupies its connection. So
each slot with models has its own reader, and a thread that waits for it. A node that fails stops the models
of its slots, and no others. The names of all models are on one node, which is asked for them twice a second.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Final

import structlog

from carpool.cluster import slot_of
from carpool.keys import models_key
from carpool.lifecycle import Loop
from carpool.store.connection import Link
from carpool.store.link_errors import reason_of
from carpool_batcher.custom_policies import Policies
from carpool_batcher.meter import BatcherMetrics
from carpool_batcher.service import (
    DISCOVERY_AGE_MAX_S,
    LOOP_SILENCE_MAX_S,
    STOP_S_MAX,
    BatcherService,
    HashSlot,
)

DISCOVERY_INTERVAL_S: Final = 0.5


class ClusterBatcher:
    """Serves every registered model of a cluster. As BatcherService, from outside."""

    def __init__(self, url: str, prefix: str, name: str, metrics: BatcherMetrics, policies: Policies) -> None:
        self._url = url
        self._name = name
        self._prefix = prefix
        self._metrics = metrics
        self._policies = policies
        self._link = Link(url, name=f"{name}:models", key=models_key(prefix))
        self._services: dict[int, tuple[HashSlot, BatcherService]] = {}  # by slot
        self._discovered_s = float("-inf")
        self._stopping = Event()
        self._loop = Loop("models", self.run_once, self._report_error)
        self._log = structlog.get_logger()

    def start(self) -> None:
        """Start to look for models."""
        self._loop.start()

    def run_once(self) -> None:
        """Find the registered models, and serve those of each slot; then wait for the next time."""
        self._serve({name.decode() for name in self._link.call("SMEMBERS", models_key(self._prefix))})
        self._discovered_s = time.monotonic()
        self._stopping.wait(DISCOVERY_INTERVAL_S)

    def _serve(self, registered: set[str]) -> None:
        by_slot: dict[int, set[str]] = {}
        for name in registered:
            by_slot.setdefault(slot_of(f"{{{name}}}"), set()).add(name)
        for number, (slot, service) in list(self._services.items()):
            slot.models = by_slot.pop(number, set())
            if not slot.models and not service.serves_models:
                del self._services[number]
                service.stop()
        for number, names in by_slot.items():
            slot = HashSlot(f"{{{min(names)}}}", names)
            service = BatcherService(self._url, self._prefix, self._name, self._metrics, self._policies, slot)
            self._services[number] = slot, service
            service.start()

    def _report_error(self, error: Exception) -> None:
        self._metrics.error(error)
        self._log.warning(
            "model discovery failed, retrying", reason=reason_of(error, "batcher"), kind=type(error).__name__
        )

    def unhealthy(self) -> list[str]:
        """What only a restart would mend."""
        found = [reason for service in self._running() for reason in service.unhealthy()]
        if not self._loop.alive:
            found.append(f"{self._loop.name}: its thread ended")
        elif self._loop.silent_s > LOOP_SILENCE_MAX_S:
            found.append(f"{self._loop.name}: has been hanging for {self._loop.silent_s:.0f} s")
        return found

    def unready(self) -> list[str]:
        """Why no model is batched now. One that fails for some slots still serves the others."""
        if self._stopping.is_set():
            return ["stopping"]
        reasons = [service.unready() for service in self._running()]
        if reasons:
            return [reason for of_slot in reasons for reason in of_slot] if all(reasons) else []
        if time.monotonic() - self._discovered_s < DISCOVERY_AGE_MAX_S:
            return []
        error = self._loop.failing
        return [f"{self._loop.name}: {reason_of(error, 'batcher')}" if error else "starting"]

    def warnings(self) -> list[str]:
        """What a person should mend, although models are batched."""
        return list(dict.fromkeys(text for service in self._running() for text in service.warnings()))

    def _running(self) -> list[BatcherService]:
        return [service for _, service in self._services.copy().values()]

    def stop(self) -> None:
        """Stop all loops, and give the leases back, so that another batcher takes over at once."""
        self._stopping.set()
        self._loop.stop()
        self._loop.join(STOP_S_MAX)
        services = self._running()
        with ThreadPoolExecutor(max(1, len(services))) as pool:
            list(pool.map(BatcherService.stop, services))
        self._link.close()
