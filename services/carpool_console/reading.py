"""What the console reads of Redis: fixed numbers of commands a model, each of which is bounded.

No command depends on how many requests wait, or on how many dead letters there are, and no body is kept. Of
all models three round trips take what pages show, and one more each what is read only where somebody looks
at it: the workers, or the details of a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.keys import MODEL_NAME, Keys, loading_key, models_key
from carpool.store.connection import Command, CommandError
from carpool.store.detail import WATCHED_MS
from carpool.store.directory import (
    ModelSample,
    What,
    further_commands,
    names,
    read_sample,
    sample_commands,
    texts,
)
from carpool.store.eviction import warning_of
from carpool.store.workers import Members, WorkerState, commands_for, read_states
from carpool.wire.detail import ModelDetail
from carpool.wire.traffic import read_shares
from carpool_console.links import Links

MODELS_MAX: Final = 1000  # that are read
DEAD_AGAIN_S: Final = 30.0  # after which the newest dead letter is asked for again


class RedisState(NamedTuple):
    """Memory of Redis. `limit_bytes` is 0 without a limit. `warning`: that it discards what it accepted."""

    used_bytes: int
    limit_bytes: int
    warning: str

    @property
    def share(self) -> float | None:
        """Of the limit that is used."""
        return self.used_bytes / self.limit_bytes if self.limit_bytes else None


UNREAD: Final = ModelSample(0, None, 0, 0, False)
_NOBODY: Final = Members(0, {}, frozenset(), ())


class ModelReading(NamedTuple):
    """A model as Redis has it. `members`: whose leases run. `error`: why it could not be read."""

    sample: ModelSample
    members: Members = _NOBODY
    dead_newest_ms: int | None = None  # when the newest dead letter was written
    error: str = ""


class Reading(NamedTuple):
    """All models at one time, on Redis's clock. `left_out`: models that were not read, because there are too
    many. `redis`: None if that may not be read."""

    at_us: int
    models: Mapping[str, ModelReading]
    redis: RedisState | None
    left_out: int = 0


class ModelsReader:
    """Reads all models. It remembers when the newest dead letters were written. Raises LinkError."""

    def __init__(self, links: Links, prefix: str) -> None:
        self._links = links
        self._prefix = prefix
        self._dead: dict[
            str, tuple[int, int, int]
        ] = {}  # by model: how many, the newest (ms), asked when (us)

    def read(self) -> Reading:
        """All models as they are now."""
        key = models_key(self._prefix)
        at, registered, loading, memory = self._links.call_all(
            [
                (key, ("TIME",)),
                (key, ("SMEMBERS", key)),
                (loading_key(self._prefix), ("SMEMBERS", loading_key(self._prefix))),
                (key, ("INFO", "memory")),
            ]
        )
        at_us = int(_raised(at)[0]) * 1_000_000 + int(at[1])
        known = _model_names(_raised(registered))
        new = sorted(set(_model_names(loading)).difference(known))
        chosen = sorted([*known, *new])[:MODELS_MAX]
        models = self._read_models(chosen, at_us)
        for name in new:
            if name in models and not models[name].sample.loading:
                del models[name]  # its worker has gone
        return Reading(at_us, models, _redis_state(memory), len(known) + len(new) - len(chosen))

    def _read_models(self, chosen: Sequence[str], at_us: int) -> dict[str, ModelReading]:
        asked = {keys: _commands(keys) for keys in (Keys(name, self._prefix) for name in chosen)}
        first = self._links.ask(asked)
        models: dict[str, ModelReading] = {}
        further: dict[Keys, dict[What, Command]] = {}
        for keys, replies in first.items():
            try:
                further[keys] = further_commands(keys, replies, at_us)
            except CommandError as error:
                models[keys.model] = ModelReading(UNREAD, error=str(error))
                continue
            if self._is_dead_unknown(keys.model, replies["dead"], at_us):
                further[keys][_NEWEST] = ("XREVRANGE", keys.dead, "+", "-", "COUNT", 1)
        for keys, more in self._links.ask(further).items():
            self._note_dead(keys.model, first[keys]["dead"], more.pop(_NEWEST, ()), at_us)
            _, newest_ms, _ = self._dead.get(keys.model, (0, None, 0))
            models[keys.model] = ModelReading(
                read_sample(first[keys], more, at_us), _living(first[keys], at_us // 1000), newest_ms
            )
        return models

    def _note_dead(self, name: str, dead: int, newest: Any, at_us: int) -> None:
        if newest and not isinstance(newest, CommandError):
            self._dead[name] = (dead, int(bytes(newest[0][0]).partition(b"-")[0]), at_us)

    def _is_dead_unknown(self, name: str, dead: int, at_us: int) -> bool:
        if not dead:
            self._dead.pop(name, None)
            return False
        known = self._dead.get(name)
        return known is None or known[0] != dead or at_us - known[2] > DEAD_AGAIN_S * 1e6


_NEWEST: Final[What] = ("newest", "")


def _commands(keys: Keys) -> dict[str, Command]:
    """What is read of each model first, by what it tells."""
    return {**sample_commands(keys), "draining": ("SMEMBERS", keys.draining)}


def _living(first: Mapping[str, Any], at_ms: int) -> Members:
    """Whose leases run. Without permission to read who drains, nobody does."""
    members = Members.of(at_ms, first["workers"], _or_empty(first["draining"]), _or_empty(first["versions"]))
    leases = {process: end_ms for process, end_ms in members.leases.items() if end_ms > at_ms}
    return members._replace(leases=leases, draining=members.draining & leases.keys())


def _redis_state(reply: Any) -> RedisState | None:
    if isinstance(reply, CommandError):
        return None
    lines = reply.decode("utf-8", "replace").splitlines()
    memory = dict(line.split(":", 1) for line in lines if ":" in line)
    return RedisState(int(memory.get("used_memory", 0)), int(memory.get("maxmemory", 0)), warning_of(memory))


def _raised(reply: Any) -> Any:
    if isinstance(reply, CommandError):
        raise reply
    return reply


def _model_names(reply: Any) -> list[str]:
    return list(filter(MODEL_NAME.fullmatch, names(_or_empty(reply))))


def _or_empty(reply: Any) -> Any:
    """The members or fields that Redis returned; none if they cannot be read."""
    return () if isinstance(reply, CommandError) else reply


# --- where somebody looks ----------------------------------------------------------------------------------


class ModelDetails(NamedTuple):
    """A model that somebody looks at. `detail` is None if its batcher does not tell; `problem`: why that may
    be, if Redis refuses to ask."""

    detail: ModelDetail | None
    registration: Mapping[str, str]
    overrides: Mapping[str, str]
    shares: Mapping[str, int]
    problem: str = ""


def read_workers(
    links: Links, prefix: str, models: Mapping[str, ModelReading]
) -> dict[str, list[WorkerState]]:
    """The living workers of these models. Raises LinkError."""
    members = {Keys(name, prefix): read.members for name, read in models.items() if read.members.leases}
    asked = {keys: commands_for(keys, of_model) for keys, of_model in members.items()}
    replies = links.ask(asked, cuts=False)
    return {keys.model: read_states(keys.model, members[keys], of) for keys, of in replies.items()}


def read_details(links: Links, prefix: str, models: Sequence[str]) -> dict[str, ModelDetails]:
    """The details of these models, which their batchers tell while they are asked. Raises LinkError."""
    asked: dict[Keys, dict[str, Command]] = {
        keys: {
            "watched": ("SET", keys.watched, 1, "PX", WATCHED_MS),
            "detail": ("GET", keys.detail),
            "registration": ("HGETALL", keys.registration),
            "overrides": ("HGETALL", keys.overrides),
            "shares": ("HGETALL", keys.shares),
        }
        for keys in (Keys(model, prefix) for model in models)
    }
    return {keys.model: _details(replies) for keys, replies in links.ask(asked, cuts=False).items()}


def _details(replies: Mapping[str, Any]) -> ModelDetails:
    detail = replies["detail"]
    return ModelDetails(
        ModelDetail.decode(detail) if isinstance(detail, bytes) else None,
        texts(_or_empty(replies["registration"])),
        texts(_or_empty(replies["overrides"])),
        read_shares(texts(_or_empty(replies["shares"]))),
        "; ".join(
            str(error) for name in ("watched", "detail") if isinstance(error := replies[name], CommandError)
        ),
    )
