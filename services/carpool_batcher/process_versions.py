"""Which version each model process of a model has, and which batches the processes have that drain."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from carpool.process_names import worker_of
from carpool.store.batcher import BatcherStore
from carpool.store.directory import ModelSnapshot

_NONE: Final[Mapping[str, str]] = {}


class ProcessVersions:
    """Looks up what workers declare, when others live than the last time. A model none of whose workers names
    a version costs nothing."""

    def __init__(self, store: BatcherStore) -> None:
        self._store = store
        self._declared: Mapping[str, str] = {}  # by worker; '' if it names no version
        self._workers: Collection[str] = ()

    def read(self, snapshot: ModelSnapshot) -> Mapping[str, str]:
        """By the name of each live process its version, '' if it names none; empty if none ever did."""
        if not snapshot.versions:
            return _NONE
        workers = set(map(worker_of, snapshot.model_processes))
        if workers != self._workers or not workers <= self._declared.keys():
            self._declared, self._workers = self._store.versions_of_workers(), workers
        found = {process: self._declared.get(worker_of(process), "") for process in snapshot.model_processes}
        # A worker of an older Carpool names its version, and does not read a stream of it.
        return {
            process: version if version in snapshot.versions else "" for process, version in found.items()
        }


def in_hand_of_draining(store: BatcherStore, snapshot: ModelSnapshot) -> Sequence[str]:
    """The batches that processes have in hand which drain and live, of a model that is not bound. To be asked
    for with each snapshot: the last process of a model fetches what is left."""
    draining = set(snapshot.draining).intersection(snapshot.model_processes) if snapshot.draining else ()
    return [batch_id for process in draining for batch_id in store.batches_of_process(process)]
