"""The name of every key.

All keys of one model share the hash tag `{MODEL}`. So Redis Cluster keeps them on one node, and one script
may use several of them. What nodes share has a hash tag of its own, which is no valid name of a model.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import Final

MODEL_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
CORRELATION_ID_CHARS_MAX: Final = 128
CORRELATION_ID_LETTERS: Final = string.ascii_letters + string.digits + "._:-"
MODEL_VERSION_CHARS_MAX: Final = 128
MODEL_VERSION: Final = re.compile(rf"[A-Za-z0-9._:+-]{{1,{MODEL_VERSION_CHARS_MAX}}}")
CORRELATION_ID: Final = re.compile(f"[{CORRELATION_ID_LETTERS}]{{1,{CORRELATION_ID_CHARS_MAX}}}")
WORKERS_GROUP: Final = "workers"
DEFAULT_PREFIX: Final = "carpool"


# Behind the entry ID in the ID of a batch that is in the stream of a version: entry IDs of two streams may be
# equal. It cannot be in the name of a version.
_OF_VERSION: Final = "@"


def models_key(prefix: str = DEFAULT_PREFIX) -> str:
    """The set of registered models' names."""
    return f"{prefix}:models"


def loading_key(prefix: str = DEFAULT_PREFIX) -> str:
    """The set, which expires, of the names of models that workers are loading, or were lately."""
    return f"{prefix}:loading"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one model. `model` must match MODEL_NAME."""

    model: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        if not MODEL_NAME.fullmatch(self.model):
            raise ValueError(
                f"model name {self.model!r}: must have 1 to 128 characters: letters, digits, '.', '_', '-', "
                "starting with a letter or digit"
            )

    def _of(self, name: str) -> str:
        return f"{self.prefix}:{{{self.model}}}:{name}"

    @property
    def of_model(self) -> str:
        """What the name of every key of this model begins with."""
        return self._of("")

    @property
    def requests(self) -> str:
        """Stream: the waiting requests. XLEN is the depth of the queue."""
        return self._of("requests")

    @property
    def batches(self) -> str:
        """Stream with the consumer group `workers`: the batches in flight."""
        return self._of("batches")

    def batches_of(self, version: str) -> str:
        """Stream with the consumer group `workers`: the batches in flight that are for one version."""
        return self._of(f"batches:{version}")

    @property
    def versions(self) -> str:
        """Set: the versions that have such a stream."""
        return self._of("versions")

    @property
    def shares(self) -> str:
        """Hash: by version the share of the requests that ask for none, in per cent, which operators give it
        (`wire.traffic`)."""
        return self._of("shares")

    @property
    def settled(self) -> str:
        """Stream, trimmed: an entry for each settled batch, and one of size 0 when a model process joins or
        leaves, or when settings are overridden."""
        return self._of("settled")

    @property
    def dead(self) -> str:
        """Stream: dead letters."""
        return self._of("dead")

    @property
    def dead_dropped(self) -> str:
        """Hash: how many dead letters were dropped, by the bound that they were over (`trim_dead.lua`)."""
        return self._of("dead_dropped")

    @property
    def statistics(self) -> str:
        """Hash: what became of the model's requests, in counters (`statistics.lua`)."""
        return self._of("stats")

    @property
    def registration(self) -> str:
        """Hash: what the workers registered (`carpool:{MODEL}:model`)."""
        return self._of("model")

    @property
    def declared(self) -> str:
        """Hash that expires: by the name of a worker what it declares, as JSON, of which the registration is
        made."""
        return self._of("declared")

    @property
    def loading(self) -> str:
        """Hash that expires: `worker`, the name of one that is loading the model."""
        return self._of("loading")

    def memory(self, worker: str) -> str:
        """Hash that expires: by the number of a model process of this worker, what it takes of memory, and of
        GPUs, in bytes."""
        return self._of(f"memory:{worker}")

    @property
    def overrides(self) -> str:
        """Hash: an operator's overrides of registered settings."""
        return self._of("config")

    @property
    def workers(self) -> str:
        """Sorted set: the names of replicas, not of workers, scored by the time (ms, Redis's clock) at which
        their leases end."""
        return self._of("workers")

    @property
    def batcher(self) -> str:
        """String that expires: the lease of the one active batcher."""
        return self._of("batcher")

    @property
    def report(self) -> str:
        """String that expires: the active batcher's report, JSON (`carpool:{MODEL}:status`)."""
        return self._of("status")

    @property
    def watched(self) -> str:
        """String that expires: somebody looks at this model, so its batcher publishes its detail."""
        return self._of("watched")

    @property
    def detail(self) -> str:
        """String that expires: what the active batcher tells beside its report, JSON (`wire.detail`)."""
        return self._of("detail")

    def answer(self, name: str) -> str:
        """String that expires: a batcher's answer to a question, which named it (`wire.whereabouts`)."""
        return self._of(f"answer:{name}")

    @property
    def order(self) -> str:
        """List: entries whose requests have tickets (`preserve_ordering`), until all of these are done."""
        return self._of("order")

    @property
    def tickets(self) -> str:
        """Hash: for ranges of these tickets where their requests were put back, or the withheld results."""
        return self._of("tickets")

    def result(self, correlation_id: str) -> str:
        """List that expires: the result of one request that named no `reply_to`."""
        return self._of(f"result:{correlation_id}")

    def replies(self, name: str) -> str:
        """Stream that expires: the results of all requests that named `reply_to NAME`."""
        return self._of(f"replies:{name}")

    def kept(self, name: str) -> str:
        """String that expires: the record of a request whose result is read by ID (`record.lua`)."""
        return self._of(f"kept:{name}")

    def body(self, name: str) -> str:
        """String that expires: a large body, which a request names in its field `body_key`."""
        return self._of(f"body:{name}")

    @property
    def sequences(self) -> str:
        """Sorted set: the IDs of the sequences that are kept, scored by the time (ms, Redis's clock) of their
        last change."""
        return self._of("sequences")

    def sequence(self, sequence_id: str) -> str:
        """Hash that expires: `state` and `next`, the number of requests that have succeeded, of a sequence,
        with the correlation IDs of the `first` and the `last` one; or why it is `broken`, and from which
        place (`broken_at`), and the first such place (`failed_at`), if that is another. Of a bound model the
        `state` is the name of the process that has it. See `sequence.lua`."""
        return self._of(f"sequence:{sequence_id}")

    def inbox(self, process: str) -> str:
        """Stream that expires: the messages to one process of a model that binds sequences (`wire.inbox`)."""
        return self._of(f"inbox:{process}")

    @property
    def draining(self) -> str:
        """Set that expires: the processes that take no more batches, and those of such a model that begin no
        more sequences; they leave then."""
        return self._of("draining")

    @property
    def drained(self) -> str:
        """Hash: by the name of a worker that an operator drains, who does, and since when, as JSON
        (`wire.orders`)."""
        return self._of("drained")

    @property
    def paused(self) -> str:
        """Hash: of a model that an operator has paused, how, why, who, and since when (`wire.orders`)."""
        return self._of("paused")

    @property
    def audit(self) -> str:
        """Stream, trimmed: what operators did to the model (`wire.audit`)."""
        return self._of("audit")

    def progress(self, batch_id: str) -> str:
        """Hash that expires: which requests of a batch in flight were answered ahead of its commit, and how
        often each was started alone (see `answer.lua`); the chunks of a stepping model (see `step.lua`)."""
        return self._of(f"progress:{batch_id}")


def batch_id_of(entry_id: str, version: str) -> str:
    """The ID of a batch: that of its entry, and the version whose stream that is in, if it is in one."""
    return f"{entry_id}{_OF_VERSION}{version}" if version else entry_id


def batch_stream(keys: Keys, batch_id: str) -> str:
    """The stream that a batch is in."""
    _, _, version = batch_id.partition(_OF_VERSION)
    return keys.batches_of(version) if version else keys.batches


def batch_streams(keys: Keys, version: str) -> list[str]:
    """The streams that a worker reads: the common one, and that of its version, if it names one."""
    return [keys.batches, keys.batches_of(version)] if version else [keys.batches]


def entry_of_batch(batch_id: str) -> str:
    """The ID of the entry that a batch is."""
    return batch_id.partition(_OF_VERSION)[0]


@dataclass(frozen=True, slots=True)
class NodesKeys:
    """The keys that all nodes share: which models are wanted, and which node has which seat."""

    prefix: str = DEFAULT_PREFIX

    def _of(self, name: str) -> str:
        return f"{self.prefix}:{{.nodes}}:{name}"

    @property
    def wanted(self) -> str:
        """Hash: by the name of a model its generations that are wanted, as JSON (`nodes/generations.lua`)."""
        return self._of("wanted")

    @property
    def seats(self) -> str:
        """Hash: by the name of a seat its state and its node, such as `SERVING NODE`."""
        return self._of("seats")

    @property
    def leases(self) -> str:
        """Sorted set: the names of nodes, by the time (ms, Redis's clock) at which their leases end."""
        return self._of("leases")

    @property
    def reports(self) -> str:
        """Hash: by the name of a node its room, its entries and what it could not load, as JSON."""
        return self._of("reports")

    @property
    def generation(self) -> str:
        """String: the number of the newest generation."""
        return self._of("generation")

    @property
    def outcomes(self) -> str:
        """Hash: by the number of a generation that is wanted no more, FAILED or GONE, and why."""
        return self._of("outcomes")

    @property
    def audit(self) -> str:
        """Stream: what operators loaded, unloaded and removed, trimmed (`wire.audit`)."""
        return self._of("audit")
