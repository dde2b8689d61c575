"""From the settings of `carpool worker --repository DIR` to a node, until a signal."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from carpool.backoff import Backoff
from carpool.descriptor_wait import wait_until_ready
from carpool.errors import UnavailableError
from carpool.health_server import serve_health
from carpool.keys import NodesKeys
from carpool.lifecycle import Loop, collect_garbage_rarely, stop_on_signals
from carpool.process_names import new_process_name
from carpool.service_metrics import CommonMetrics
from carpool.settings import RedisSettings, WorkerSettings
from carpool.store.connection import CommandError, Link
from carpool.store.link_errors import reason_of
from carpool.store.seats import SeatStore
from carpool.wire.nodes import Wanted
from carpool_worker.devices import devices, usable_cpus, with_threads
from carpool_worker.node.node import Node
from carpool_worker.node.seat_process import Order, WorkerProcess
from carpool_worker.repository.declared_replicas import DeclaredReplicas
from carpool_worker.repository.repository import Repository

LEASE_MS: Final = 3000
TURN_S: Final = 0.5
NEXT_TURN_S: Final = 0.05  # after one that changed something
SILENT_S_MAX: Final = 30.0  # of the loop of turns, which then hangs
_LINK_TIMEOUT_S: Final = 1.5  # well below the lease
_SCAN_S: Final = 1.0  # between two looks at the repository ...
_SCAN_SHARE: Final = 100  # ... or so many times as long as one takes
# Our own settings put these into the URL. A child that also found them in its environment would reject both.
_IN_THE_URL: Final = tuple(
    f"CARPOOL_{name.upper()}" for name in RedisSettings.model_fields if name != "redis_url"
)
_OF_A_SEAT: Final = (
    "redis_url", "prefix", "log_level", "http_host", "lease_ms", "drain_s", "load_s_max", "finish_streams",
    "otlp_endpoint",
)  # fmt: skip


def run_node(settings: WorkerSettings, folder: Path) -> int:
    """Serve what is wanted until SIGTERM or SIGINT, then drain. Returns 1 if it cannot start, or if not
    everything was committed in time."""
    stop, log = stop_on_signals(), structlog.get_logger()
    try:
        service = _Service(settings, Repository(folder.resolve()))
        serve_health(settings, service.metrics, service)
    except (ValueError, OSError) as error:
        log.error("worker cannot start", location=str(folder), reason=str(error))
        return 1
    service.start()
    collect_garbage_rarely()
    while not stop.is_set():
        service.run_once()
    return 0 if service.stop() else 1


class _Service:
    """A node with what it needs, and its health."""

    def __init__(self, settings: WorkerSettings, repository: Repository) -> None:
        """Raises ValueError."""
        self.metrics = CommonMetrics()
        self._settings = settings
        self._repository = repository
        self._devices = devices(settings.device, "auto")
        has_gpus = any(device != "cpu" for device in self._devices)
        self._room = settings.room or (len(self._devices) if has_gpus else usable_cpus())
        self._environment = {
            **with_threads(os.environ, self._room),
            **dict.fromkeys(_IN_THE_URL, ""),
        }
        self._environment.pop("CARPOOL_HTTP_PORT", None)
        self.name = new_process_name()
        self._link = Link(
            settings.redis_url,
            name=f"{self.name}:node",
            timeout_s=_LINK_TIMEOUT_S,
            key=NodesKeys(settings.prefix).wanted,
        )
        self._store = SeatStore(self._link, self.name, LEASE_MS, settings.prefix)
        self._declared = DeclaredReplicas(repository)
        self._entries = self._read_entries()
        self._node = Node(
            self._store,
            self.name,
            self._room,
            lambda: (self._entries, self._declared.by_entry),
            self._start,
            drain_s=settings.drain_s,
        )
        self._scan = Loop("repository", self._scan_once, self._report)
        self._log = structlog.get_logger()
        self._backoff = Backoff()
        self._failing = ""
        self._turned_at_s = time.monotonic()

    def start(self) -> None:
        """Begin to look at the repository."""
        self._scan.start()
        self._log.info(
            "node started",
            node=self.name,
            repository=str(self._repository.folder),
            room=self._room,
            entries=len(self._entries),
        )

    def run_once(self) -> None:
        """A turn, and the wait until something happens or the next one is due."""
        wait_s = TURN_S
        try:
            if self._node.turn():
                wait_s = NEXT_TURN_S
            self._backoff.reset()
            self._failing = ""
        except (UnavailableError, CommandError) as error:
            self.metrics.error(error)
            reason = reason_of(error, "worker")
            if reason != self._failing:
                self._log.warning("node cannot reach Redis, models go on", reason=reason)
            self._failing = reason
            wait_s = self._backoff.next_s()
        self._turned_at_s = time.monotonic()
        descriptors = [
            process.descriptor
            for process in self._node.processes
            if isinstance(process, WorkerProcess) and process.descriptor >= 0
        ]
        wait_until_ready(descriptors, [], wait_s)

    def stop(self) -> bool:
        """Give the seats back at once, and drain. Whether all ended in time."""
        self._scan.stop()
        with suppress(UnavailableError, CommandError):  # then its lease runs out
            self._store.leave()
        is_clean = self._node.stop()
        self._link.close()
        self._log.info("node stopped", node=self.name, clean=is_clean)
        return is_clean

    # --- the repository ------------------------------------------------------------------------------------

    def _scan_once(self) -> None:
        """In a thread of its own: a file system that hangs must not cost the lease."""
        began_s = time.monotonic()
        self._entries = self._read_entries()
        time.sleep(max(_SCAN_S, _SCAN_SHARE * (time.monotonic() - began_s)))

    def _read_entries(self) -> Mapping[str, list[str]]:
        found = self._repository.listing()
        self._declared.read(found)
        return found

    def _report(self, error: Exception) -> None:
        self._log.warning("repository cannot be read, retrying", reason=str(error))

    # --- processes -----------------------------------------------------------------------------------------

    def _start(self, wanted: Wanted, slot: int) -> WorkerProcess:
        of_worker = {name: getattr(self._settings, name) for name in _OF_A_SEAT}
        of_worker["http_port"] = self._settings.http_port and self._settings.http_port + 1 + slot
        order = Order(
            repository=str(self._repository.folder),
            entry=wanted.entry,
            version=wanted.version,
            parameters=wanted.parameters,
            model=wanted.model,
            device=self._devices[slot % len(self._devices)],
            turn=slot,
            settings=of_worker,
            model_settings=wanted.settings,
        )
        return WorkerProcess(order, self._environment)

    # --- health --------------------------------------------------------------------------------------------

    def unhealthy(self) -> list[str]:
        """What only a restart can repair."""
        silent_s = time.monotonic() - self._turned_at_s
        return [f"the node has been hanging for {silent_s:.0f} s"] if silent_s > SILENT_S_MAX else []

    def unready(self) -> list[str]:
        """Why nothing can be loaded now."""
        return [self._failing] if self._failing else []

    def warnings(self) -> list[str]:
        """None: what cannot be loaded is in `carpool nodes`."""
        return []
