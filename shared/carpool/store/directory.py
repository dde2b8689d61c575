"""For services and commands: which models are registered, and their state.

All of it only reads, except `Directory.configure`, which writes an operator's overrides (`carpool config`),
and CHANGE, by which operators change a hash of a model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys, loading_key, models_key
from carpool.process_names import worker_of
from carpool.store.connection import Argument, Command, CommandError, Link, Script
from carpool.wire.audit import Actor
from carpool.wire.orders import Paused, read_about, read_paused
from carpool.wire.report import BatcherReport
from carpool.wire.requests import arrival_of
from carpool.wire.traffic import read_shares

SETTLED_ENTRIES_MAX: Final = 10_000
CHANGE: Final = Script("operator/change", after=("operator/audit",))
What = tuple[str, str]
"""What a command asks, and of which worker or version, if of one."""


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


class ModelSample(NamedTuple):
    """A model at one time, in counts: what its keys show, without the content of requests, and the report of
    its batcher if there is one."""

    waiting_entries: int
    oldest_s: float | None  # age of the first of them, where no batcher reports it
    batches_in_flight: int
    model_processes: int
    batcher: bool
    report: BatcherReport | None = None
    dead: int = 0  # dead letters
    loading: bool = False  # a worker loads it
    memory: Sequence[ProcessMemory] = ()  # of its processes, as far as their workers tell
    paused: Paused | None = None  # by an operator
    at_us: int = 0  # by Redis's clock
    process_deaths: int = 0  # in the last minute, as far as workers tell

    @property
    def active_report(self) -> BatcherReport | None:
        """The report of the active batcher, if there is one. A report outlives its batcher by seconds."""
        return self.report if self.batcher else None


class Directory:
    """All registered models, for services and commands that serve or show them."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

    def models(self) -> list[str]:
        """Names of the registered models, sorted."""
        return sorted(name.decode() for name in self._link.call("SMEMBERS", models_key(self._prefix)))

    def sample(self, model: str) -> ModelSample:
        """A model as it is now, in two round trips. Raises CommandError."""
        keys = Keys(model, self._prefix)
        commands = sample_commands(keys)
        time_reply, *replies = self._link.call_many(("TIME",), *commands.values())
        at_us = int(no_errors([time_reply])[0][0]) * 1_000_000 + int(time_reply[1])
        first = dict(zip(commands, replies, strict=True))
        further = further_commands(keys, first, at_us)
        more = self._link.call_many(*further.values())
        return read_sample(first, dict(zip(further, more, strict=True)), at_us)

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
        return _arrival_us(
            self._link.call("XRANGE", Keys(model, self._prefix).requests, "-", "+", "COUNT", 1)
        )

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
    """What a worker tells its processes take, by their numbers; nothing if it is of another version."""
    try:
        pairs = {int(number): text.split() for number, text in told.items() if number != "about"}
        return {
            number: ProcessMemory(int(resident), int(on_gpus))
            for number, (resident, on_gpus) in pairs.items()
        }
    except ValueError:
        return {}


def in_streams_of_versions(link: Link, keys: Keys, versions: Sequence[str]) -> int:
    """How many batches are in flight in the streams of these versions."""
    return sum(no_errors(link.call_many(*[("XLEN", keys.batches_of(version)) for version in versions])))


# --- a sample ----------------------------------------------------------------------------------------------


def sample_commands(keys: Keys) -> dict[str, Command]:
    """The commands whose replies begin a sample, each by what it reads. Each takes constant time, or reads a
    few names."""
    return {
        "requests": ("XLEN", keys.requests),
        "batches": ("XLEN", keys.batches),
        "workers": ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
        "batcher": ("EXISTS", keys.batcher),
        "report": ("GET", keys.report),
        "dead": ("XLEN", keys.dead),
        "loading": ("EXISTS", keys.loading),
        "versions": ("SMEMBERS", keys.versions),
        "paused": ("HGETALL", keys.paused),
    }


# What a sample does without: where the role has rules of another version, or a user wrote the key.
_OPTIONAL: Final[Mapping[str, Any]] = {"loading": 0, "versions": (), "paused": ()}


def further_commands(keys: Keys, first: Mapping[str, Any], at_us: int) -> dict[What, Command]:
    """The commands whose replies complete a sample: what workers and versions have, and the oldest request if
    no batcher reports it. `first`: the replies to `sample_commands`. Raises CommandError."""
    read = _permitted(first)
    commands: dict[What, Command] = {
        ("batches", version): ("XLEN", keys.batches_of(version)) for version in names(read["versions"])
    }
    for worker in dict.fromkeys(map(worker_of, alive(read["workers"], at_us // 1000))):
        commands["memory", worker] = ("HGETALL", keys.memory(worker))
    if read["requests"] and not (read["batcher"] and read["report"]):
        commands["oldest", ""] = ("XRANGE", keys.requests, "-", "+", "COUNT", 1)
    return commands


def read_sample(first: Mapping[str, Any], further: Mapping[What, Any], at_us: int) -> ModelSample:
    """The sample, from the replies to all of these commands. Raises CommandError."""
    read = _permitted(first)
    told = {what: reply for what, reply in further.items() if not isinstance(reply, CommandError)}
    of_workers = [texts(flat) for (what, _), flat in told.items() if what == "memory"]
    abouts = [read_about(of_worker.get("about", "")) for of_worker in of_workers]
    oldest_us = _arrival_us(told.get(("oldest", ""), ()))
    return ModelSample(
        waiting_entries=read["requests"],
        oldest_s=None if oldest_us is None else max(0, at_us - oldest_us) / 1e6,
        batches_in_flight=read["batches"] + sum(told[what] for what in told if what[0] == "batches"),
        model_processes=len(alive(read["workers"], at_us // 1000)),
        batcher=bool(read["batcher"]),
        report=BatcherReport.decode(read["report"]) if isinstance(read["report"], bytes) else None,
        dead=read["dead"],
        loading=bool(read["loading"]),
        memory=[process for of_worker in of_workers for process in read_memory(of_worker).values()],
        paused=read_paused(texts(read["paused"])),
        at_us=at_us,
        process_deaths=sum(about.deaths for about in abouts if about is not None),
    )


def _permitted(replies: Mapping[str, Any]) -> dict[str, Any]:
    """These replies, but for errors that a sample does without. Raises the first other CommandError."""
    read = dict(replies)
    for name, reply in replies.items():
        if isinstance(reply, CommandError):
            if name == "report" and reply.code == "WRONGTYPE":
                read[name] = None
            elif name in _OPTIONAL:
                read[name] = _OPTIONAL[name]
            else:
                raise reply
    return read


def _arrival_us(entries: Sequence[Any]) -> int | None:
    """When the request of the first of these entries arrived, if there is one."""
    if not entries:
        return None
    entry_id, fields = entries[0]
    arrival_ms = dict(zip(fields[::2], fields[1::2], strict=True)).get(b"arrival", b"")
    is_number = isinstance(arrival_ms, bytes) and arrival_ms.isdigit()
    return int(arrival_ms) * 1000 if is_number else arrival_of(entry_id.decode())


# --- a snapshot --------------------------------------------------------------------------------------------


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


def texts(flat: Sequence[Any]) -> dict[str, str]:
    """A hash that Redis returned, as text. A value that was not kept, because it is large, is empty."""
    texts = [text.decode("utf-8", "replace") if isinstance(text, bytes) else "" for text in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def names(members: Iterable[Any]) -> list[str]:
    """A set that Redis returned, as text, without what was not kept because it is large."""
    return [name for one in members if isinstance(one, bytes) and (name := one.decode("utf-8", "replace"))]
