"""Removing a model that is no longer served: everything that Redis has of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys, NodesKeys, models_key
from carpool.store.connection import Argument, Link
from carpool.store.directory import in_streams_of_versions, no_errors, take_snapshot
from carpool.wire.audit import Actor, append_command

_SCANNED: Final = 1000  # keys of Redis that one SCAN looks at
_DELETED: Final = 500  # keys in one DEL
# Left to expire: results, which a producer may still read, and what an active batcher has, or is asked.
_RESULTS: Final = ("result", "replies")
_OF_BATCHER: Final = ("batcher", "status", "watched", "detail", "answer")


class Use(NamedTuple):
    """What still uses a model."""

    model_processes: list[str]
    waiting_entries: int
    batches_in_flight: int

    @property
    def is_unused(self) -> bool:
        """Whether nothing does."""
        return not any(self)


class Removed(NamedTuple):
    """What was removed of a model.

    `keys`: how many keys of each kind, such as `config` or `sequence`. `entries`: how many waiting entries,
    batches in flight and dead letters were in the streams. `unread`: how many keys with results are left, and
    expire.
    """

    was_registered: bool
    keys: Mapping[str, int]
    entries: Mapping[str, int]
    unread: int


class Removal:
    """Of one model, by this actor. All methods raise LinkError and CommandError.

    The audit of the model is removed with it. That it was removed stands in the audit of the nodes, which may
    be on another node of a cluster, and is written when all is done.
    """

    def __init__(self, link: Link, keys: Keys, actor: Actor) -> None:
        self._link = link
        self._keys = keys
        self._actor = actor

    def use(self) -> Use:
        """What uses the model now."""
        snapshot = take_snapshot(self._link, self._keys, RedisClock())
        in_flight = snapshot.batches_in_flight
        in_flight += in_streams_of_versions(self._link, self._keys, snapshot.versions)
        return Use(snapshot.model_processes, snapshot.waiting_entries, in_flight)

    def remove_if_unused(self) -> Removed | Use:
        """Remove the model, unless something uses it: then only say what does.

        Nobody can begin to use it between the look and the removal: the keys that would tell are watched.
        """
        keys = self._keys
        while True:
            self._link.call("WATCH", keys.requests, keys.batches, keys.workers)
            use = self.use()
            if not use.is_unused:
                self._link.call("UNWATCH")
                return use
            removed = self._remove_fixed()
            if removed is not None:
                return self._remove_others(removed)

    def remove(self) -> Removed:
        """Remove the model, whatever uses it."""
        removed = self._remove_fixed()
        assert removed is not None  # nothing is watched
        return self._remove_others(removed)

    def _remove_fixed(self) -> Removed | None:
        """Delete the keys that each model has one of. None: a key that is watched has changed."""
        keys = self._keys
        streams = {"requests": keys.requests, "batches": keys.batches, "dead": keys.dead}
        fixed = {
            **streams, "model": keys.registration, "config": keys.overrides, "settled": keys.settled,
            "workers": keys.workers, "dead_dropped": keys.dead_dropped, "stats": keys.statistics,
        }  # fmt: skip
        commands: list[tuple[Argument, ...]] = [("XLEN", key) for key in streams.values()]
        commands += [("DEL", key) for key in fixed.values()]
        *_, executed = no_errors(self._link.call_many(("MULTI",), *commands, ("EXEC",)))
        if executed is None:
            return None
        replies: list[Any] = no_errors(executed)
        lengths, deleted = replies[: len(streams)], replies[len(streams) :]
        return Removed(
            was_registered=False,
            keys={name: 1 for name, count in zip(fixed, deleted, strict=True) if count},
            entries={name: length for name, length in zip(streams, lengths, strict=True) if length},
            unread=0,
        )

    def _remove_others(self, removed: Removed) -> Removed:
        """Take the model from the set of models, which may be on another node, and delete its other keys."""
        was_registered = self._link.call("SREM", models_key(self._keys.prefix), self._keys.model)
        counts, unread = Counter(removed.keys), 0
        to_delete: list[bytes] = []
        for key in self._scan():
            kind = key.decode("utf-8", "replace").partition("}:")[2].partition(":")[0]
            if kind in _RESULTS:
                unread += 1
            elif kind not in _OF_BATCHER:
                counts[kind] += 1
                to_delete.append(key)
        for start in range(0, len(to_delete), _DELETED):
            self._link.call("DEL", *to_delete[start : start + _DELETED])
        removed = removed._replace(was_registered=bool(was_registered), keys=dict(counts), unread=unread)
        if removed.was_registered or removed.keys:
            self._tell(removed)
        return removed

    def _tell(self, removed: Removed) -> None:
        """Write to the audit what was removed."""
        audit = NodesKeys(self._keys.prefix).audit
        entries = {name: str(number) for name, number in removed.entries.items()}
        details = {"model": self._keys.model, "keys": str(sum(removed.keys.values())), **entries}
        self._link.call_at(audit, *append_command(audit, self._actor, "forget", details))

    def _scan(self) -> set[bytes]:
        """All keys of the model. O(keys of Redis)."""
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", self._keys.of_model)
        found: set[bytes] = set()
        cursor: Argument = "0"
        while True:
            cursor, page = self._link.call("SCAN", cursor, "MATCH", f"{pattern}*", "COUNT", _SCANNED)
            found.update(page)
            if cursor == b"0":
                return found
