"""What a batcher does regularly for all of its models, in one round trip: leases, snapshots, reports.

The models are in different hash slots, so each has a command or script of its own in the pipeline. An error
is one model's: a CommandError in its place.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from carpool.clock import RedisClock
from carpool.keys import Keys, models_key
from carpool.store.connection import CommandError, Link, Script
from carpool.store.directory import ModelSnapshot, read_snapshot, snapshot_commands
from carpool.store.eviction import eviction_warning

_LEASE: Final = Script("lease")
_REPORT: Final = Script("report")


class Upkeep:
    """Leases, snapshots and reports of many models, over one connection. `name` is this batcher's."""

    def __init__(self, link: Link, prefix: str, name: str, clock: RedisClock) -> None:
        self._link = link
        self._prefix = prefix
        self._name = name
        self._clock = clock

    def models(self) -> set[str]:
        """Names of the registered models."""
        return {name.decode() for name in self._link.call("SMEMBERS", models_key(self._prefix))}

    def set_clock(self) -> None:
        """Follow Redis's clock. A command by itself, because a clock is behind by the time of the reply."""
        sent_ns = time.monotonic_ns()
        self._clock.set(self._link.call("TIME"), sent_ns, time.monotonic_ns())

    def eviction_warning(self) -> str:
        """Why Redis may discard what it has accepted; empty if it does not, as far as is known."""
        return eviction_warning(self._link)

    def load_script(self, script: Script) -> CommandError | None:
        """Have Redis know a script that others run by its hash. Returns why it does not."""
        (reply,) = self._link.call_many(("SCRIPT", "LOAD", script.source))
        return reply if isinstance(reply, CommandError) else None

    def hold_leases(self, models: Sequence[Keys], lease_ms: int) -> list[bool | CommandError]:
        """Become or stay the one active batcher of these models; `lease_ms` 0 gives the leases back."""
        replies = self._link.run_many(_LEASE, [((keys.batcher,), (self._name, lease_ms)) for keys in models])
        return [reply if isinstance(reply, CommandError) else bool(reply) for reply in replies]

    def snapshots(self, models: Sequence[Keys]) -> list[ModelSnapshot | CommandError]:
        """The states of these models."""
        of_models = [snapshot_commands(keys) for keys in models]
        replies = iter(self._link.call_many(*[one for commands in of_models for one in commands.values()]))
        now_ms = self._clock.now_us() // 1000
        return [read_snapshot({name: next(replies) for name in of_model}, now_ms) for of_model in of_models]

    def publish_reports(self, reports: Sequence[tuple[Keys, str]], ttl_ms: int) -> list[CommandError | None]:
        """Publish these reports; they expire after `ttl_ms`."""
        return self._link.run_many(_REPORT, [((keys.report,), (report, ttl_ms)) for keys, report in reports])

    def publish_details(self, details: Sequence[tuple[Keys, str]], ttl_ms: int) -> list[CommandError | None]:
        """Publish the details of these models; they expire after `ttl_ms`."""
        return self._link.run_many(_REPORT, [((keys.detail,), (detail, ttl_ms)) for keys, detail in details])
