"""What nodes share in Redis, for the event loop of the gateway: see `carpool.store.nodes`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from carpool.errors import InvalidArgumentError
from carpool.keys import Keys, NodesKeys
from carpool.store.connection import Script
from carpool.store.directory import CHANGE
from carpool.store.nodes import FAIL, LOAD, UNLOAD, load_keys, unload_keys
from carpool.store.traffic import change_shares
from carpool.wire.audit import Actor
from carpool.wire.nodes import (
    Outcome,
    Snapshot,
    Wanted,
    decode_load,
    decode_snapshot,
    load_arguments,
    outcome_command,
    outcome_of,
    snapshot_commands,
)
from carpool.wire.traffic import read_shares_command
from carpool_gateway.redis_calls import RedisCalls


class NodeCalls:
    """What is wanted of nodes, and what they tell. All of it raises CarpoolErrors, and may be repeated."""

    def __init__(self, calls: RedisCalls, prefix: str) -> None:
        self._calls = calls
        self._prefix = prefix
        self._keys = NodesKeys(prefix)

    async def snapshot(self) -> Snapshot:
        """What is wanted, the seats, and the living nodes."""
        commands = snapshot_commands(self._keys)
        return decode_snapshot(await self._calls.call_many(self._keys.wanted, commands))

    async def outcomes(self, models: Mapping[int, str]) -> tuple[Snapshot, dict[int, Outcome]]:
        """The same, and what became of these generations of models."""
        commands = snapshot_commands(self._keys)
        asked = [outcome_command(self._keys, generation) for generation in models]
        replies = await self._calls.call_many(self._keys.wanted, [*commands, *asked])
        snapshot = decode_snapshot(replies[: len(commands)])
        of_models = zip(models.items(), replies[len(commands) :], strict=True)
        return snapshot, {
            number: outcome_of(snapshot, reply, model, number) for (number, model), reply in of_models
        }

    async def load(
        self,
        model: str,
        entry: str,
        version: str,
        parameters: Mapping[str, str],
        replicas: int | None,
        share: int | None = None,
        settings: Mapping[str, str] | None = None,
        *,
        actor: Actor,
        declared_replicas: int = 1,
    ) -> int:
        """A version of an entry is wanted under the name of a model. `declared_replicas`: by the entry.
        Returns the generation."""
        try:
            arguments = load_arguments(
                model,
                entry,
                version,
                parameters,
                replicas,
                share,
                settings,
                declared_replicas=declared_replicas,
            )
            reply = await self._run(LOAD, load_keys(self._keys), [*arguments, *actor.arguments])
            return decode_load(reply)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from None

    async def set_replicas(self, wanted: Wanted, replicas: int, *, actor: Actor) -> int:
        """So many replicas of what is wanted are wanted. Returns the generation."""
        one, shared = wanted, (wanted.share, wanted.settings)
        return await self.load(
            one.model, one.entry, one.version, one.parameters, replicas, *shared, actor=actor
        )

    async def unload(self, model: str, version: str | None, *, actor: Actor) -> None:
        """A model, or this version of it, is wanted no more."""
        await self._run(UNLOAD, unload_keys(self._keys), [model, version or "", *actor.arguments])

    async def end_shares(self, model: str, *, actor: Actor) -> None:
        """No version of a model has a share of its traffic any more."""
        keys = Keys(model, self._prefix)
        if await self._calls.call(keys.shares, read_shares_command(keys)):
            script_keys, arguments = change_shares(keys, {}, actor=actor)
            await self._run(CHANGE, script_keys, [str(argument) for argument in arguments])

    async def fail(self, model: str, generation: int, reason: str) -> None:
        """A generation that has not served in full is wanted no more; what it was to replace stays."""
        keys = self._keys
        await self._run(FAIL, [keys.wanted, keys.seats, keys.outcomes], [model, str(generation), reason])

    async def _run(self, script: Script, keys: Sequence[str], arguments: Sequence[str]) -> Any:
        # By its source: it runs rarely, and Redis may have forgotten its hash.
        command = ("EVAL", script.source, str(len(keys)), *keys, *arguments)
        return await self._calls.call(keys[0], command)
