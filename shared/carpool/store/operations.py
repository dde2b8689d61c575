"""What an operator does to a model that is served: pause and resume it, and drain one of its workers.

All of it is in Redis, so it holds for every batcher and worker, after any restart. Each change is one script,
which writes the audit, too, and says what was really done.

Why: docs/decisions/0114.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from carpool.keys import DEFAULT_PREFIX, Keys
from carpool.store.connection import Link, Script
from carpool.store.directory import SETTLED_ENTRIES_MAX, texts
from carpool.wire.audit import Actor
from carpool.wire.orders import (
    REFUSE,
    WAIT,
    DrainOrder,
    Paused,
    check_reason,
    read_drain_order,
    read_paused,
)

_AUDIT: Final = ("operator/audit",)
_PAUSE: Final = Script("operator/pause", after=_AUDIT)
_RESUME: Final = Script("operator/resume", after=_AUDIT)
_DRAIN: Final = Script("operator/drain_worker", after=_AUDIT)
_UNDRAIN: Final = Script("operator/undrain_worker", after=_AUDIT)


class Drained(NamedTuple):
    """A worker drains. `processes`: how many it has. `others`: how many processes of other workers serve the
    model, that do not drain. `is_new`: it did not drain before."""

    order: DrainOrder
    processes: int
    others: int
    is_new: bool


class Operations:
    """What this actor does. All of it raises LinkError and CommandError.

    `link`: to the node of a cluster that has the model.
    """

    def __init__(self, link: Link, prefix: str, actor: Actor) -> None:
        self._link = link
        self._prefix = prefix or DEFAULT_PREFIX
        self._actor = actor

    def pause(self, model: str, *, refuses: bool, reason: str) -> Paused:
        """Nothing of a model is dispatched until it is resumed; with `refuses`, what arrives from now on is
        refused. Returns how it is paused now. Raises ValueError if it is not registered."""
        keys = Keys(model, self._prefix)
        mode = REFUSE if refuses else WAIT
        flat = self._link.run(
            _PAUSE,
            [keys.paused, keys.settled, keys.audit, keys.registration],
            [mode, check_reason(reason), SETTLED_ENTRIES_MAX, *self._actor.arguments],
        )
        paused = read_paused(texts(flat or ()))
        if paused is None:
            raise ValueError(f"model {model!r:.140} is not registered")
        return paused

    def resume(self, model: str) -> Paused | None:
        """Dispatch again. Returns how the model was paused; None if it was not."""
        keys = Keys(model, self._prefix)
        flat = self._link.run(
            _RESUME,
            [keys.paused, keys.settled, keys.audit],
            [SETTLED_ENTRIES_MAX, *self._actor.arguments],
        )
        return read_paused(texts(flat))

    def paused(self, model: str) -> Paused | None:
        """How a model is paused; None if it is not."""
        return read_paused(texts(self._link.call("HGETALL", Keys(model, self._prefix).paused)))

    def drain(self, model: str, worker: str) -> Drained:
        """A worker takes no more batches, finishes what it has, and stays. It learns of it at its next
        heartbeat. Raises ValueError if no such worker lives."""
        keys = Keys(model, self._prefix)
        processes, others, order, is_new = self._link.run(
            _DRAIN,
            [keys.drained, keys.workers, keys.draining, keys.audit],
            [worker, *self._actor.arguments],
        )
        if not processes:
            raise ValueError(f"no worker {worker!r:.140} of {model} lives")
        return Drained(read_drain_order(order.decode("utf-8", "replace")), processes, others, bool(is_new))

    def undrain(self, model: str, worker: str) -> DrainOrder | None:
        """A worker takes batches again. Returns how it was drained; None if it was not."""
        keys = Keys(model, self._prefix)
        order = self._link.run(_UNDRAIN, [keys.drained, keys.audit], [worker, *self._actor.arguments])
        return None if order is None else read_drain_order(order.decode("utf-8", "replace"))
