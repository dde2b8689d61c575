"""Which models of repositories are wanted, as operators and gateways write it.

Why: docs/decisions/0111.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from carpool.keys import DEFAULT_PREFIX, NodesKeys
from carpool.store.connection import Link, Script
from carpool.store.directory import no_errors
from carpool.wire.audit import Actor
from carpool.wire.nodes import (
    NodeReport,
    Outcome,
    Snapshot,
    Wanted,
    choose_version,
    decode_load,
    decode_snapshot,
    load_arguments,
    outcome_command,
    outcome_of,
    snapshot_commands,
)

_RECORDS: Final = ("nodes/generations",)
LOAD: Final = Script("nodes/load", after=("operator/audit", *_RECORDS))
UNLOAD: Final = Script("nodes/unload", after=("operator/audit", *_RECORDS))
FAIL: Final = Script("nodes/fail", after=_RECORDS)


def load_keys(keys: NodesKeys) -> list[str]:
    """The keys of LOAD."""
    return [keys.wanted, keys.seats, keys.outcomes, keys.generation, keys.audit]


def unload_keys(keys: NodesKeys) -> list[str]:
    """The keys of UNLOAD."""
    return [keys.wanted, keys.seats, keys.outcomes, keys.audit]


class NodeStore:
    """The nodes of one prefix. `link` must lead to the node of a cluster that has `NodesKeys.wanted`.

    All of it raises LinkError and CommandError.
    """

    def __init__(self, link: Link, prefix: str = DEFAULT_PREFIX) -> None:
        self._link = link
        self._keys = NodesKeys(prefix)

    def load(
        self,
        model: str,
        version: str | None,
        parameters: Mapping[str, str],
        replicas: int | None,
        share: int | None,
        *,
        actor: Actor,
        entry: str | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> int:
        """A version of a model is wanted; returns its generation, which `outcome` follows.

        `version`: None for the newest. `replicas`: None for as many as before, or as the entry declares, or 1
        for a version with a share. `share`: per cent of the traffic; None for all of it, in place of the
        other versions. `entry`: its name in repositories, if that is another one. `settings`: of the model,
        in place of its own. `actor`: for the audit. The same again is the same generation. Raises ValueError,
        a sentence.
        """
        entry = entry or model
        snapshot = self.snapshot()
        chosen, declared = choose_version(snapshot, entry, version), snapshot.declared_replicas(entry)
        args = load_arguments(
            model, entry, chosen, parameters, replicas, share, settings, declared_replicas=declared
        )
        reply = self._link.run(LOAD, load_keys(self._keys), [*args, *actor.arguments])
        return decode_load(reply)

    def unload(self, model: str, version: str | None = None, *, actor: Actor) -> int:
        """A model, or one version of it, is wanted no more. Returns how many generations were."""
        args = [model, version or "", *actor.arguments]
        return int(self._link.run(UNLOAD, unload_keys(self._keys), args))

    def fail(self, model: str, generation: int, reason: str) -> bool:
        """A generation cannot be loaded, or is not waited for any longer; what served before it stays.

        False, and nothing changes, if it served in full before, or is not wanted.
        """
        keys = self._keys
        args = [model, str(generation), reason]
        return bool(self._link.run(FAIL, [keys.wanted, keys.seats, keys.outcomes], args))

    def snapshot(self) -> Snapshot:
        """What is wanted, the seats, and the living nodes."""
        return decode_snapshot(no_errors(self._link.call_many(*snapshot_commands(self._keys))))

    def wanted(self) -> list[Wanted]:
        """All generations that are wanted."""
        return self.snapshot().wanted

    def nodes(self) -> list[NodeReport]:
        """The living nodes."""
        return self.snapshot().nodes

    def outcome(self, model: str, generation: int) -> Outcome:
        """What became of a generation."""
        commands = [*snapshot_commands(self._keys), outcome_command(self._keys, generation)]
        *replies, outcome = no_errors(self._link.call_many(*commands))
        return outcome_of(decode_snapshot(replies), outcome, model, generation)
