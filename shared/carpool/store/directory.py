"""For services and commands: which models are registered, and their state.

All of it only reads, except `Directory.configure`, which writes an operator's overrides (`carpool config`),
and CHANGE, by which operators change a hash of a model.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys, loading_key, models_key
from carpool.process_names import worker_of
from carpool.store.connection import Argument, CommandError, Link, Script
from carpool.wire.audit import Actor
from carpool.wire.orders import Paused, read_paused
from carpool.wire.requests import arrival_of
from carpool.wire.traffic import read_shares

SETTLED_ENTRIES_MAX: Final = 10_000
CHANGE: Final = Script("operator/change", after=("operator/audit",))


class ModelSnapshot(NamedTuple):
    """The state of a model in Redis. A batcher takes one a few times a second."""

    waiting_entries: int
    batches_in_flight: int
    entries_in_order: int  # entries with tickets that are not done (`preserve_ordering`)
    model_processes: list[str]  # whose lease runs
    registration: dict[str, str]
    overrides: dict[str, str]  # an operator's
    draining: Sequence[str] = ()  # model processes that take no more batches, or begin no more sequences
    versions: Sequence[str] = ()  # of the model, that have batch streams of their own
    shares: Mapping[str, int] = MappingProxyType({})  # of the traffic, by version, in per cent
    watched: bool = False  # somebody looks at the model (`store.detail`)
    paused: Paused | None = None  # by an operator
    denied: CommandError | None = None  # rules of an older version for this role: it cannot see the last two


class ProcessMemory(NamedTuple):
    """What a model process takes, in bytes: resident memory, and memory of GPUs. 0: unknown, or none."""

    resident: int
    on_gpus: int


class ModelOverview(NamedTuple):
    """The state of a model in counts, without the content of requests; `report` is its batcher's, encoded."""

    at_us: int
    waiting_entries: int
    batches_in_flight: int
    model_processes: int
    batcher: bool
    report: bytes | None
    dead: int
    loading: bool = False  # a worker loads it
    memory: Sequence[ProcessMemory] = ()  # of its processes, as far as their workers tell
    paused: Paused | None = None  # by an operator


class Directory:
    """All registered models, for services and commands that serve or show them."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

    def models(self) -> list[str]:
        """Names of the registered models, sorted."""
        return sorted(name.decode() for name in self._link.call("SMEMBERS", models_key(self._prefix)))

    def overview(self, model: str) -> ModelOverview:
        """The state of a model, in one round trip."""
        keys = Keys(model, self._prefix)
        replies = self._link.call_many(
            ("TIME",),
            ("XLEN", keys.requests),
            ("XLEN", keys.batches),
            ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
            ("EXISTS", keys.batcher),
            ("GET", keys.report),
            ("XLEN", keys.dead),
            ("EXISTS", keys.loading),
            ("SMEMBERS", keys.versions),
            ("HGETALL", keys.paused),
        )
        *replies, versions, paused = replies
        time_reply, waiting, in_flight, workers, batcher, report, dead, loading = no_errors(replies)
        if not isinstance(versions, CommandError):  # rules of another version for this role
            in_flight += in_streams_of_versions(self._link, keys, [one.decode() for one in versions])
        at_us = int(time_reply[0]) * 1_000_000 + int(time_reply[1])
        names = alive(workers, at_us // 1000)
        memory = self._memory(keys, names) if names else ()
        is_read = not isinstance(paused, CommandError)
        return ModelOverview(
            at_us, waiting, in_flight, len(names), bool(batcher), report, dead, bool(loading), memory,
            read_paused(texts(paused)) if is_read else None,
        )  # fmt: skip

    def _memory(self, keys: Keys, processes: Sequence[str]) -> Sequence[ProcessMemory]:
        """What the workers of these processes tell; nothing if that may not be read."""
        workers = dict.fromkeys(map(worker_of, processes))
        try:
            told = no_errors(self._link.call_many(*[("HGETALL", keys.memory(worker)) for worker in workers]))
            return [one for flat in told for one in read_memory(texts(flat)).values()]
        except (CommandError, ValueError):  # permissions, or a value, of another version
            return ()

    def loading(self, registered: Sequence[str]) -> list[str]:
        """Models that workers load for the first time, sorted."""
        names = self._link.call("SMEMBERS", loading_key(self._prefix))
        unregistered = sorted({name.decode() for name in names}.difference(registered))
        return [model for model in unregistered if self.is_loading(model)]

    def is_loading(self, model: str) -> bool:
        """Whether a worker loads this model."""
        return bool(self._link.call("EXISTS", Keys(model, self._prefix).loading))

    def settings(self, model: str) -> tuple[dict[str, str], dict[str, str]]:
        """The settings that a model's workers registered, and the operator's overrides."""
        keys = Keys(model, self._prefix)
        replies = self._link.call_many(("HGETALL", keys.registration), ("HGETALL", keys.overrides))
        registration, overrides = map(texts, no_errors(replies))
        return registration, overrides

    def configure(
        self, model: str, values: Mapping[str, str], removed: Sequence[str], *, actor: Actor
    ) -> None:
        """Override registered settings by `values`, and remove the overrides of the settings in `removed`.

        The batcher learns of it from `settled`, and `actor` stands in the audit.
        """
        keys = Keys(model, self._prefix)
        changed = " ".join((*values, *removed))
        args = change_arguments(changed, actor, "config", values, removed)
        self._link.run(CHANGE, [keys.overrides, keys.settled, keys.audit], args)

    def oldest_arrival_us(self, model: str) -> int | None:
        """When the oldest waiting request of a model arrived."""
        oldest = self._link.call("XRANGE", Keys(model, self._prefix).requests, "-", "+", "COUNT", 1)
        if not oldest:
            return None
        arrival_ms = dict(zip(oldest[0][1][::2], oldest[0][1][1::2], strict=True)).get(b"arrival", b"")
        return int(arrival_ms) * 1000 if arrival_ms.isdigit() else arrival_of(oldest[0][0].decode())

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


def change_arguments(
    told: str,
    actor: Actor,
    action: str,
    values: Mapping[str, str],
    removed: Sequence[str] = (),
    *,
    removes_others: bool = False,
) -> list[Argument]:
    """The arguments of CHANGE, whose keys are the hash, `settled` and the audit. `told`: in `settled`."""
    set_to = [part for pair in values.items() for part in pair]
    others = "1" if removes_others else ""
    return [
        told, SETTLED_ENTRIES_MAX, *actor.arguments, action, others, len(removed), *removed, *set_to,
    ]  # fmt: skip


def read_memory(told: Mapping[str, str]) -> dict[int, ProcessMemory]:
    """What a worker tells its processes take, by their numbers. Raises ValueError."""
    pairs = {int(number): text.split() for number, text in told.items() if number != "about"}
    return {
        number: ProcessMemory(int(resident), int(on_gpus)) for number, (resident, on_gpus) in pairs.items()
    }


def in_streams_of_versions(link: Link, keys: Keys, versions: Sequence[str]) -> int:
    """How many batches are in flight in the streams of these versions."""
    return sum(no_errors(link.call_many(*[("XLEN", keys.batches_of(version)) for version in versions])))


def take_snapshot(link: Link, keys: Keys, clock: RedisClock) -> ModelSnapshot:
    """The state of a model. Also sets the clock. Raises CommandError."""
    sent_ns = time.monotonic_ns()
    commands = snapshot_commands(keys)
    time_reply, *replies = link.call_many(("TIME",), *commands.values())
    clock.set(no_errors([time_reply])[0], sent_ns, time.monotonic_ns())
    snapshot = read_snapshot(dict(zip(commands, replies, strict=True)), clock.now_us() // 1000)
    if isinstance(snapshot, CommandError):
        raise snapshot
    return snapshot


def snapshot_commands(keys: Keys) -> dict[str, tuple[Argument, ...]]:
    """The commands whose replies are a snapshot, each by what it reads."""
    return {
        "order": ("LLEN", keys.order),
        "requests": ("XLEN", keys.requests),
        "batches": ("XLEN", keys.batches),
        "workers": ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
        "registration": ("HGETALL", keys.registration),
        "overrides": ("HGETALL", keys.overrides),
        "draining": ("SMEMBERS", keys.draining),
        "versions": ("SMEMBERS", keys.versions),
        "shares": ("HGETALL", keys.shares),
        "watched": ("EXISTS", keys.watched),
        "paused": ("HGETALL", keys.paused),
    }


# Where a user made one of these keys another type: results are not in order (lua/ordering/README.md), no
# process drains, versions share the traffic as they come, and nothing is paused.
_OF_WRONG_TYPE: Final[Mapping[str, Any]] = {
    "order": 0, "draining": (), "versions": (), "shares": (), "watched": 0, "paused": (),
}  # fmt: skip


def read_snapshot(replies: Mapping[str, Any], now_ms: int) -> ModelSnapshot | CommandError:
    """The state of a model from the replies to `snapshot_commands`; the first error among them."""
    read = dict(replies)
    denied: CommandError | None = None
    for name, reply in replies.items():
        if isinstance(reply, CommandError):
            if name in ("watched", "paused") and reply.code == "NOPERM":  # rules of an older version
                read[name], denied = (), reply
                continue
            if name not in _OF_WRONG_TYPE or reply.code != "WRONGTYPE":
                return reply
            read[name] = _OF_WRONG_TYPE[name]
    return ModelSnapshot(
        waiting_entries=read["requests"],
        batches_in_flight=read["batches"],
        entries_in_order=read["order"],
        model_processes=alive(read["workers"], now_ms),
        registration=texts(read["registration"]),
        overrides=texts(read["overrides"]),
        draining=[process.decode() for process in read["draining"]],
        versions=sorted([version.decode() for version in read["versions"]]),
        shares=read_shares(texts(read["shares"])) if read["shares"] else {},
        watched=bool(read["watched"]),
        paused=read_paused(texts(read["paused"])) if read["paused"] else None,
        denied=denied,
    )


def no_errors(replies: list[Any]) -> list[Any]:
    """These replies. Raises the first CommandError among them."""
    for reply in replies:
        if isinstance(reply, CommandError):
            raise reply
    return replies


def alive(workers: Sequence[bytes], now_ms: int) -> list[str]:
    """The model processes whose lease runs; `workers` is member, score, member, score, ..."""
    return [
        member.decode()
        for member, lease_end_ms in zip(workers[::2], workers[1::2], strict=True)
        if float(lease_end_ms) > now_ms
    ]


def texts(flat: Sequence[bytes]) -> dict[str, str]:
    """A hash that Redis returned, as text."""
    texts = [text.decode("utf-8", "replace") for text in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
