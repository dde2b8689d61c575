"""Keeps the model registered: what this worker declares, together with what the others do.

Workers of several versions of a model may live side by side, as in a rolling update. What is registered then
suits all of them, and when some are gone, those that are left (`carpool.store.declarations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from carpool.store.connection import CommandError
from carpool.store.declarations import Declared, Living
from carpool.store.worker import WorkerStore
from carpool.wire.registration import (
    OPTIONAL_FIELDS,
    Registration,
    combined,
    describe_differing,
    describe_versions,
    differing,
    versions_of,
)

BATCH_SIZE: Final = "max_batch_size"


class Registrar:
    """For all loops of a worker: `register` is for any thread, `follow` for that of the heartbeat.

    `batch_size_max`: how many requests this worker's model takes at a time: as many as it declares, or more
    if an operator says so, as of the last heartbeat. `is_drained`: whether an operator drains this worker.
    """

    def __init__(self, worker: str, declared: Registration) -> None:
        self._worker = worker
        self._declared = declared
        self._declared_size = int(declared[BATCH_SIZE])
        self.batch_size_max = self._declared_size
        self.is_drained = False
        self._followed: Living | None = None  # whose declarations are in what is registered; None: unknown
        self._differing: dict[str, set[str]] = {}  # fields and their values, as logged last
        self._versions = set(versions_of([declared]))  # of the model, of living workers, as logged last
        self._refused = ""  # why Redis refused to follow, as logged last
        self._log = structlog.get_logger()

    def register(self, store: WorkerStore) -> None:
        """Register the model, with what this worker declares in it. Raises CommandError."""
        self._followed = None
        store.register(combined(self._declared, self._others_when_registering(store)))

    def follow(self, store: WorkerStore) -> None:
        """If workers came or went since the last time, register what suits those that live now. What Redis
        refuses is tried again the next time: the leases of this worker must not depend on it."""
        try:
            override, self.is_drained = store.orders(BATCH_SIZE, self._worker)
            self.batch_size_max = max(self._declared_size, int(override) if override.isdecimal() else 0)
            living = store.declarations.living()
            if living != self._followed:
                self._follow(store, living)
            self._refused = ""
        except CommandError as error:
            self._warn(error, store.keys.model)

    def _warn(self, error: CommandError, model: str) -> None:
        """Log why Redis refuses to follow, once."""
        if str(error) != self._refused:
            self._refused = str(error)
            event = "settings of other workers are not followed, retrying"
            self._log.warning(event, model=model, reason=self._refused)

    def _follow(self, store: WorkerStore, living: Living) -> None:
        if self._worker not in living.workers:  # the key was removed; or it has not joined yet
            store.declarations.write(self._worker, self._declared)
        found, registered = store.declarations.read(), store.declarations.registered()
        if not registered:  # Redis was emptied: the heartbeat registers the model
            return
        others = self._others(found, registered)
        fields = combined(self._declared, others, registered)
        undeclared = any(name in registered and name not in fields for name in OPTIONAL_FIELDS)
        if undeclared or any(registered.get(name) != text for name, text in fields.items()):
            store.register(fields)
            store.tell_batcher(self._worker)
        if found.gone:
            store.declarations.remove(*found.gone)
        self._tell([self._declared, *others], store.keys.model)
        self._tell_versions([self._declared, *others], store.keys.model)
        self._followed = found.living

    def _others(self, found: Declared, registered: Registration) -> list[Registration]:
        """What the other living workers declare. What is registered is declared by those that do not say."""
        others = [declared for worker, declared in found.by_worker.items() if worker != self._worker]
        return [*others, registered] if found.living.undeclared and registered else others

    def _tell(self, declared: Sequence[Registration], model: str) -> None:
        """Log how the workers' declarations differ, if that has changed; not how many declare which."""
        found = differing(declared)
        values = {name: set(texts) for name, texts in found.items()}
        if values == self._differing:
            return
        self._differing = values
        if found:
            self._log.warning(
                "workers declare different settings, the tightest apply",
                model=model,
                differing=describe_differing(found),
            )
        else:
            self._log.info("workers declare the same settings again", model=model)

    def _tell_versions(self, declared: Sequence[Registration], model: str) -> None:
        """Log which versions of the model living workers have, if that has changed."""
        found = versions_of(declared)
        if set(found) != self._versions:
            self._versions = set(found)
            self._log.info("versions of the model changed", model=model, versions=describe_versions(found))

    def _others_when_registering(self, store: WorkerStore) -> list[Registration]:
        """Declare, and return what the others do; none if a user wrote the key."""
        declarations = store.declarations
        try:
            declarations.write(self._worker, self._declared)
            return self._others(declarations.read(), declarations.registered())
        except CommandError as error:
            if error.code != "WRONGTYPE":
                raise
            self._warn(error, store.keys.model)
            return []
