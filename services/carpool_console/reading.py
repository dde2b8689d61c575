"""What the console reads of Redis: fixed numbers of commands a model, each of which is bounded.

No command depends on how many requests wait, or on how many dead letters there are, and no body is kept. Two
round trips take what a page shows of all models, and a third what only some have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool.figures import ModelSample
from carpool.keys import MODEL_NAME, Keys, loading_key, models_key
from carpool.store.connection import Argument, Command, CommandError
from carpool.store.directory import alive, texts
from carpool.store.eviction import warning_of
from carpool.wire.orders import read_paused
from carpool.wire.report import BatcherReport
from carpool.wire.requests import arrival_of
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


class ModelReading(NamedTuple):
    """A model as Redis has it. `error`: why it could not be read."""

    sample: ModelSample
    processes: Sequence[str] = ()  # alive
    draining: Sequence[str] = ()
    versions: Sequence[str] = ()
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
        names = list(filter(MODEL_NAME.fullmatch, _names(_raised(registered))))
        known = set(names)
        new = [one for one in _names(loading) if one not in known and MODEL_NAME.fullmatch(one)]
        chosen = sorted([*names, *new])[:MODELS_MAX]
        models = self._read_models(chosen, at_us)
        for name in new:
            if name in models and not models[name].sample.loading:
                del models[name]  # its worker has gone
        return Reading(at_us, models, _redis_state(memory), len(names) + len(new) - len(chosen))

    def _read_models(self, names: Sequence[str], at_us: int) -> dict[str, ModelReading]:
        commands = {name: _commands(Keys(name, self._prefix)) for name in names}
        flat = [(Keys(name, self._prefix).requests, one) for name in names for one in commands[name].values()]
        replies = iter(self._links.call_all(flat))
        read = {name: {what: next(replies) for what in commands[name]} for name in names}
        more = self._read_more(read, at_us)
        return {name: _decoded(read[name], more[name], at_us) for name in names}

    def _read_more(self, read: Mapping[str, Mapping[str, Any]], at_us: int) -> dict[str, dict[str, Any]]:
        """What only some models have: batches of versions, an oldest request that no batcher reports, dead
        letters."""
        wanted: list[tuple[str, str, Command]] = []
        for name, replies in read.items():
            keys = Keys(name, self._prefix)
            wanted += [
                (name, "batches", ("XLEN", keys.batches_of(one))) for one in _names(replies["versions"])
            ]
            if _number(replies["requests"]) and not (replies["batcher"] == 1 and replies["report"]):
                wanted.append((name, "oldest", ("XRANGE", keys.requests, "-", "+", "COUNT", 1)))
            if self._is_dead_unknown(name, _number(replies["dead"]), at_us):
                wanted.append((name, "newest", ("XREVRANGE", keys.dead, "+", "-", "COUNT", 1)))
        found: dict[str, dict[str, Any]] = {name: {"batches": 0} for name in read}
        calls = [(Keys(name, self._prefix).requests, command) for name, _, command in wanted]
        for (name, what, _), reply in zip(wanted, self._links.call_all(calls) if calls else (), strict=True):
            if what == "batches":
                found[name][what] += _number(reply)
            elif what == "oldest":
                found[name][what] = _arrival_us(reply)
            elif reply and not isinstance(reply, CommandError):
                newest_ms = int(bytes(reply[0][0]).partition(b"-")[0])
                self._dead[name] = (_number(read[name]["dead"]), newest_ms, at_us)
        for name in read:
            if name in self._dead and _number(read[name]["dead"]):
                found[name]["dead_newest_ms"] = self._dead[name][1]
        return found

    def _is_dead_unknown(self, name: str, dead: int, at_us: int) -> bool:
        if not dead:
            self._dead.pop(name, None)
            return False
        known = self._dead.get(name)
        return known is None or known[0] != dead or at_us - known[2] > DEAD_AGAIN_S * 1e6


def _commands(keys: Keys) -> dict[str, Command]:
    """What is read of each model, by name. Each is answered in constant time, or by a few processes."""
    return {
        "requests": ("XLEN", keys.requests),
        "batches": ("XLEN", keys.batches),
        "workers": ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
        "draining": ("SMEMBERS", keys.draining),
        "batcher": ("EXISTS", keys.batcher),
        "report": ("GET", keys.report),
        "dead": ("XLEN", keys.dead),
        "loading": ("EXISTS", keys.loading),
        "versions": ("SMEMBERS", keys.versions),
        "paused": ("HGETALL", keys.paused),
    }


# Without permission for these, or where a user wrote the key, a model is shown all the same.
_OPTIONAL: Final[Mapping[str, Any]] = {
    "draining": (),
    "versions": (),
    "loading": 0,
    "report": None,
    "paused": (),
}


def _decoded(read: Mapping[str, Any], more: Mapping[str, Any], at_us: int) -> ModelReading:
    replies = dict(read)
    for name, reply in read.items():
        if isinstance(reply, CommandError):
            if name not in _OPTIONAL:
                return ModelReading(ModelSample(0, None, 0, 0, False), error=str(reply))
            replies[name] = _OPTIONAL[name]
    processes = alive(replies["workers"], at_us // 1000)
    report = BatcherReport.decode(bytes(replies["report"])) if replies["report"] else None
    oldest_us = more.get("oldest")
    sample = ModelSample(
        waiting_entries=replies["requests"],
        oldest_s=None if oldest_us is None else max(0, at_us - oldest_us) / 1e6,
        batches_in_flight=replies["batches"] + more["batches"],
        model_processes=len(processes),
        batcher=bool(replies["batcher"]),
        report=report,
        dead=replies["dead"],
        loading=bool(replies["loading"]),
        paused=read_paused(_texts(replies["paused"])),
    )
    draining = [name for name in _names(replies["draining"]) if name in processes]
    return ModelReading(
        sample, processes, draining, sorted(_names(replies["versions"])), more.get("dead_newest_ms")
    )


def _arrival_us(reply: Any) -> int | None:
    """When the request of the only entry in this reply arrived."""
    if isinstance(reply, CommandError) or not reply:
        return None
    entry_id, fields = reply[0]
    arrival = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"arrival", b"")
    is_number = isinstance(arrival, bytes) and arrival.isdigit()
    return int(arrival) * 1000 if is_number else arrival_of(entry_id.decode())


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


def _names(reply: Iterable[Argument] | CommandError) -> list[str]:
    """Names in a set; none if it cannot be read."""
    if isinstance(reply, CommandError):
        return []
    return [name for one in reply if isinstance(one, bytes) and (name := one.decode("utf-8", "replace"))]


def _texts(flat: Sequence[Any]) -> dict[str, str]:
    """A hash whose values are short; what is not was left out."""
    return texts([text if isinstance(text, bytes) else b"" for text in flat])


def _number(reply: Any) -> int:
    return reply if isinstance(reply, int) else 0
