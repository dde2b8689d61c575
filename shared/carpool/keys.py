"""The name of every key. All keys of one model share the hash tag `{MODEL}`: one script may touch them all,
and Redis Cluster keeps them on one node."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CORRELATION_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
WORKERS_GROUP: Final = "workers"
DEFAULT_PREFIX: Final = "carpool"


def models_key(prefix: str = DEFAULT_PREFIX) -> str:
    """The set of registered models' names."""
    return f"{prefix}:models"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one model. `model` must match MODEL_NAME."""

    model: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not MODEL_NAME.fullmatch(self.model):
            raise ValueError(
                f"model name {self.model!r}: must be 1 to 128 of letters, digits, '.', '_', '-', "
                "starting with a letter or digit"
            )

    def _of(self, what: str) -> str:
        return f"{self.prefix}:{{{self.model}}}:{what}"

    @property
    def requests(self) -> str:
        """Stream: the requests that wait. XLEN is the queue's depth."""
        return self._of("requests")

    @property
    def batches(self) -> str:
        """Stream with the group `workers`: batches in flight. XLEN is what is in flight."""
        return self._of("batches")

    @property
    def settled(self) -> str:
        """Stream, trimmed: an entry for each committed batch, one of size 0 for a worker that is ready."""
        return self._of("settled")

    @property
    def dead(self) -> str:
        """Stream: dead letters."""
        return self._of("dead")

    @property
    def registration(self) -> str:
        """Hash: what the workers registered (`carpool:{MODEL}:model`)."""
        return self._of("model")

    @property
    def config(self) -> str:
        """Hash: settings that an operator put in the place of the registered ones."""
        return self._of("config")

    @property
    def workers(self) -> str:
        """Sorted set: live model processes, scored by the time (ms, Redis's clock) their lease ends."""
        return self._of("workers")

    @property
    def batcher(self) -> str:
        """String that expires: the lease of the one active batcher."""
        return self._of("batcher")

    @property
    def status(self) -> str:
        """String that expires: what the active batcher says of itself, JSON, about once a second."""
        return self._of("status")

    @property
    def order(self) -> str:
        """List: the slots of requests whose results are to come in order, until they did."""
        return self._of("order")

    @property
    def held(self) -> str:
        """Hash: for each slot where its request is, or its result, held until those before it are done."""
        return self._of("held")

    def result(self, correlation_id: str) -> str:
        """List that expires: one request's result, when it named no `reply_to`."""
        return self._of(f"result:{correlation_id}")

    def replies(self, name: str) -> str:
        """Stream that expires: results of all requests that named `reply_to NAME`."""
        return self._of(f"replies:{name}")

    def progress(self, batch_id: str) -> str:
        """Hash that expires: which requests of a batch in flight were answered ahead of its commit, and how
        often each was started alone after a redelivery."""
        return self._of(f"progress:{batch_id}")
