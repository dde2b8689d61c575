"""What nodes share in Redis: which models are wanted, which node has which seat, and what each reports.

A *generation* is what one load made of a model: a version, parameters and a number of replicas. Each of its
replicas is a *seat*, which a node claims for one model process. All of it is pure: commands are built here,
and their replies read, for callers that block and for those that do not.

    snapshot_commands() --> replies --> decode_snapshot() --> outcome_of(), shortage_of()

The records, and what each state of a seat means, are explained in `store/lua/nodes/generations.lua`.

Why: docs/decisions/0111.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple, Self

from carpool.keys import MODEL_NAME, NodesKeys

REPLICAS_MAX: Final = 256
OUTCOMES_KEPT: Final = 1000
Command = tuple[str, ...]


class SeatState(StrEnum):
    """What the process of a seat does. YIELDED: nobody is to claim it, because its generation leaves."""

    LOADING = "LOADING"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    YIELDED = "YIELDED"


class OutcomeState(StrEnum):
    """What became of a generation.

    WAITING: no node has room for it. LOADING: not all its seats serve, or what it replaces is not gone yet.
    SERVING: they do. FAILED: it cannot be loaded. GONE: it is not wanted any more, or never was.
    """

    WAITING = "WAITING"
    LOADING = "LOADING"
    SERVING = "SERVING"
    FAILED = "FAILED"
    GONE = "GONE"


class Outcome(NamedTuple):
    """What became of a generation, and why, in a sentence for people."""

    state: OutcomeState
    reason: str


class SeatName(NamedTuple):
    """A seat of a generation; `number` counts from 0."""

    generation: int
    number: int

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The inverse of `str`; None if it is no name of a seat."""
        generation, _, number = text.partition("/")
        return cls(int(generation), int(number)) if generation.isdecimal() and number.isdecimal() else None

    def __str__(self) -> str:
        return f"{self.generation}/{self.number}"


class Seat(NamedTuple):
    """Who has a seat. `node` is empty if it is YIELDED and given up."""

    name: SeatName
    state: SeatState
    node: str


class Wanted(NamedTuple):
    """A generation of a model that is wanted.

    `share`: per cent of the traffic; None: all that no share is for. `entry`: its name in repositories.
    `is_settled`: all of it served once. `is_leaving`: another generation replaces it, or it failed.
    `settings`: of the model, in place of those that it declares, as text.
    """

    model: str
    generation: int
    version: str
    parameters: dict[str, str]
    replicas: int
    share: int | None
    entry: str
    is_settled: bool = False
    is_leaving: bool = False
    settings: dict[str, str] = {}  # noqa: RUF012 (never changed)

    @property
    def seats(self) -> list[SeatName]:
        """All its seats."""
        return [SeatName(self.generation, number) for number in range(self.replicas)]

    @property
    def title(self) -> str:
        """For people: `echo version 2`."""
        return f"{self.model} version {self.version}"


class NodeReport(NamedTuple):
    """A living node.

    `room`: how many model processes it runs at most. `entries`: the versions of each entry of its repository,
    ascending. `reasons`: by the title of what it could not load, why. `seats`: those that it has; so many are
    `used`. `serves`: by the name of a seat the model and the version of its process. `replicas`: how many its
    entries declare, where that is not 1. `drained`: the names of seats whose workers an operator drains.
    """

    name: str
    room: int
    entries: dict[str, list[str]]
    reasons: dict[str, str]
    seats: list[Seat] = []  # noqa: RUF012 (never changed)
    serves: dict[str, tuple[str, str]] = {}  # noqa: RUF012
    replicas: dict[str, int] = {}  # noqa: RUF012
    drained: list[str] = []  # noqa: RUF012

    @property
    def used(self) -> int:
        """The model processes that it runs, or is about to."""
        return len(self.seats)

    @property
    def free(self) -> int:
        """The model processes that it could run besides."""
        return max(0, self.room - self.used)

    def has(self, wanted: Wanted) -> bool:
        """Whether its repository has what is wanted."""
        return wanted.version in self.entries.get(wanted.entry, ())

    def encode(self) -> str:
        """What it publishes, as JSON. Its seats are elsewhere."""
        published = ("room", "entries", "reasons", "serves", "replicas", "drained")
        fields = {name: getattr(self, name) for name in published}
        return json.dumps(fields, separators=(",", ":"), sort_keys=True)


class Snapshot(NamedTuple):
    """What is wanted, the seats that somebody has, and the living nodes."""

    wanted: list[Wanted]
    seats: dict[SeatName, Seat]
    nodes: list[NodeReport]

    def lives(self, node: str) -> bool:
        """Whether this node's lease has not run out."""
        return any(one.name == node for one in self.nodes)

    def held(self, name: SeatName) -> Seat | None:
        """Who has a seat, if that is a living node."""
        seat = self.seats.get(name)
        return seat if seat is not None and self.lives(seat.node) else None

    def shown_state(self, node: NodeReport, seat: Seat) -> SeatState:
        """What the process of a seat of this node does, for people: one whose generation leaves, or whose
        worker an operator drains, takes nothing more."""
        ends = seat.state is SeatState.YIELDED or self.generation(seat.name.generation) is None
        is_drained = seat.state is SeatState.SERVING and str(seat.name) in node.drained
        return SeatState.DRAINING if ends or is_drained else seat.state

    def serving(self, wanted: Wanted) -> int:
        """How many seats of a generation serve."""
        held = map(self.held, wanted.seats)
        return sum(seat is not None and seat.state is SeatState.SERVING for seat in held)

    def declared_replicas(self, entry: str) -> int:
        """How many model processes an entry declares: the most that a node has read."""
        declared = [node.replicas.get(entry, 1) for node in self.nodes if entry in node.entries]
        return min(max(declared, default=1), REPLICAS_MAX)

    def trial(self, model: str) -> Wanted | None:
        """The generation of a model that has a share of the traffic, if there is one."""
        return next((one for one in self.wanted if one.model == model and one.share is not None), None)

    def generation(self, number: int) -> Wanted | None:
        """The generation of this number, if it is wanted."""
        return next((wanted for wanted in self.wanted if wanted.generation == number), None)


# --- reading -----------------------------------------------------------------------------------------------


def snapshot_commands(keys: NodesKeys) -> list[Command]:
    """The commands whose replies `decode_snapshot` reads."""
    return [
        ("TIME",),
        ("HGETALL", keys.wanted),
        ("HGETALL", keys.seats),
        ("ZRANGE", keys.leases, "0", "-1", "WITHSCORES"),
        ("HGETALL", keys.reports),
    ]


def decode_snapshot(replies: Sequence[Any]) -> Snapshot:
    """Replies to `snapshot_commands`. What is malformed, because a user wrote it, is left out."""
    time, wanted, seats, leases, reports = replies
    now_ms = int(time[0]) * 1000 + int(time[1]) // 1000
    seats_of = _decode_seats(_texts(seats))
    living = [name for name, until_ms in _texts(leases).items() if float(until_ms) > now_ms]
    texts = _texts(reports)
    nodes = [_decode_report(name, texts.get(name, ""), seats_of) for name in sorted(living)]
    found = [one for model, text in sorted(_texts(wanted).items()) for one in _decode_wanted(model, text)]
    return Snapshot(found, seats_of, nodes)


def _texts(pairs: Sequence[bytes]) -> dict[str, str]:
    texts = [part.decode("utf-8", "replace") for part in pairs]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _decode_seats(texts: Mapping[str, str]) -> dict[SeatName, Seat]:
    found = {}
    for field, text in texts.items():
        name = SeatName.parse(field)
        state, _, node = text.partition(" ")
        if name is not None and state in SeatState.__members__:
            found[name] = Seat(name, SeatState(state), node)
    return found


def _decode_report(name: str, text: str, seats: Mapping[SeatName, Seat]) -> NodeReport:
    own = sorted(seat for seat in seats.values() if seat.node == name)
    try:
        fields = json.loads(text)
        entries = {str(entry): list(map(str, versions)) for entry, versions in fields["entries"].items()}
        reasons = {str(title): str(reason) for title, reason in fields["reasons"].items()}
        serves = {
            str(seat): (str(model), str(version)) for seat, (model, version) in fields["serves"].items()
        }
        replicas = {str(entry): int(number) for entry, number in fields["replicas"].items()}
        drained = list(map(str, fields.get("drained", ())))  # nodes of older versions do not tell it
        return NodeReport(name, int(fields["room"]), entries, reasons, own, serves, replicas, drained)
    except (ValueError, TypeError, KeyError, AttributeError):  # it has not reported, or a user wrote it
        return NodeReport(name, 0, {}, {}, own)


def _decode_wanted(model: str, text: str) -> list[Wanted]:
    try:
        return [
            Wanted(
                model=model,
                generation=int(fields["generation"]),
                version=str(fields["version"]),
                parameters={str(key): str(value) for key, value in json.loads(fields["parameters"]).items()},
                replicas=min(int(fields["replicas"]), REPLICAS_MAX),
                share=None if fields.get("share") is None else int(fields["share"]),
                entry=str(fields["entry"]),
                is_settled=bool(fields.get("settled")),
                is_leaving=bool(fields.get("leaving")),
                settings={str(key): str(value) for key, value in _map(fields.get("settings")).items()},
            )
            for fields in json.loads(text)
        ]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []


def _map(text: str | None) -> Any:
    return json.loads(text or "{}")


# --- loading -----------------------------------------------------------------------------------------------


def load_arguments(
    model: str,
    entry: str,
    version: str,
    parameters: Mapping[str, str],
    replicas: int | None,
    share: int | None,
    settings: Mapping[str, str] | None = None,
    *,
    declared_replicas: int = 1,
) -> list[str]:
    """ARGV of `nodes/load.lua`. `declared_replicas`: by the entry. Raises ValueError, which names the
    argument that is wrong."""
    if not MODEL_NAME.fullmatch(model):
        raise ValueError(f"{model!r:.80} is no valid name of a model")
    if replicas is not None and not 1 <= replicas <= REPLICAS_MAX:
        raise ValueError(f"replicas is {replicas}: must be from 1 to {REPLICAS_MAX}")
    if share is not None and not 1 <= share <= 99:
        raise ValueError(f"share is {share}: must be from 1 to 99 per cent")
    shown = ["" if number is None else str(number) for number in (replicas, share)]
    rest = [str(OUTCOMES_KEPT), _same(settings or {}), str(declared_replicas)]
    return [model, entry, version, _same(parameters), *shown, *rest]


def _same(texts: Mapping[str, str]) -> str:
    """As JSON, which is the same text for equal maps."""
    return json.dumps(dict(texts), sort_keys=True, separators=(",", ":"))


def decode_load(reply: Any) -> int:
    """The generation that `nodes/load.lua` returns. Raises ValueError, which says why there is none."""
    if isinstance(reply, bytes):
        raise ValueError(reply.decode("utf-8", "replace"))
    return int(reply)


def choose_version(snapshot: Snapshot, entry: str, version: str | None) -> str:
    """The version to load: this one, or the newest that a living node has. Raises ValueError, a sentence."""
    if not snapshot.nodes:
        if version is not None:
            return version  # the first node that has it loads it
        raise ValueError(f"no node runs, so the newest version is not known; {START_A_NODE}, or name one")
    known = {name: None for node in snapshot.nodes for name in node.entries}
    versions = [one for node in snapshot.nodes for one in node.entries.get(entry, ())]
    if entry not in known:
        listed = ", ".join(sorted(known)) or "none"
        raise ValueError(f"no node has the entry {entry!r:.80} in its repository; there are: {listed}")
    if version is None:
        return max(versions, key=_by_number)
    if version not in versions:
        listed = ", ".join(sorted(set(versions), key=_by_number))
        raise ValueError(f"{entry} has no version {version!r:.80}; there are: {listed}")
    return version


def _by_number(version: str) -> tuple[int, str]:
    return (int(version) if version.isdecimal() else -1, version)


START_A_NODE: Final = "start one with `carpool worker --repository DIR`"

# --- outcomes ----------------------------------------------------------------------------------------------


def outcome_command(keys: NodesKeys, generation: int) -> Command:
    """To be sent after the commands of a snapshot: what is wanted no more then has an outcome."""
    return ("HGET", keys.outcomes, str(generation))


def outcome_of(snapshot: Snapshot, reply: bytes | None, model: str, generation: int) -> Outcome:
    """What became of a generation of a model. `reply`: to `outcome_command`."""
    if reply is not None:
        state, _, reason = reply.decode("utf-8", "replace").partition(" ")
        is_known = state in (OutcomeState.FAILED, OutcomeState.GONE)
        return Outcome(OutcomeState(state) if is_known else OutcomeState.GONE, reason)
    wanted = snapshot.generation(generation)
    if wanted is None or wanted.model != model:
        return Outcome(OutcomeState.GONE, f"there is no generation {generation} of {model}")
    serving = snapshot.serving(wanted)
    progress = f"{serving} of {wanted.replicas} processes of {wanted.title} serve"
    if serving == wanted.replicas:
        is_complete = wanted.is_settled and not _is_anything_ending(snapshot, wanted)
        is_done = wanted.is_leaving or (is_complete and not _replaces_another(snapshot, wanted))
        if is_done:
            return Outcome(OutcomeState.SERVING, progress)
        return Outcome(OutcomeState.LOADING, f"{progress}, other processes finish what they have")
    if lacking := shortage_of(snapshot, wanted):
        return Outcome(OutcomeState.WAITING, lacking)
    reasons = [reason for node in snapshot.nodes for reason in _reasons(node, wanted)]
    return Outcome(OutcomeState.LOADING, "; ".join([progress, *reasons]))


def _is_anything_ending(snapshot: Snapshot, wanted: Wanted) -> bool:
    """Whether a process of the model that is not wanted any more has not ended. It may get a batch even after
    it was told to drain, because its last fetch waits in Redis."""
    return any(
        node.serves.get(str(seat.name), ("", ""))[0] == wanted.model
        and snapshot.generation(seat.name.generation) is None
        for node in snapshot.nodes
        for seat in node.seats
    )


def _replaces_another(snapshot: Snapshot, wanted: Wanted) -> bool:
    """Whether another generation of the model is not gone yet, whose place it takes."""
    if wanted.share is not None or wanted.is_leaving:
        return False
    return any(other.model == wanted.model and other.is_leaving for other in snapshot.wanted)


def _reasons(node: NodeReport, wanted: Wanted) -> Iterable[str]:
    if reason := node.reasons.get(wanted.title):
        yield f"{node.name}: {reason}"


def shortage_of(snapshot: Snapshot, wanted: Wanted) -> str:
    """What lacks for a generation, and where; empty if there is room for it.

    Processes that drain, and those of the generations that it replaces, make room.
    """
    missing = [name for name in wanted.seats if snapshot.held(name) is None]
    if not missing:
        return ""
    if not snapshot.nodes:
        return f"no node runs; {START_A_NODE}"
    having = [node for node in snapshot.nodes if node.has(wanted)]
    if not having:
        return f"no node has {wanted.title} in its repository"
    free = {node.name: node.room - _taken(snapshot, node, wanted) for node in having}
    if len(missing) <= sum(max(0, number) for number in free.values()):
        return ""
    if wanted.replicas == 1 and _replaces_another(snapshot, wanted):
        return ""  # one more than there is room for, until the other is gone
    places = [f"node {node.name} has {max(0, free[node.name])} of {node.room} free" for node in having]
    processes = "process" if len(missing) == 1 else "processes"
    return f"{wanted.model} needs {len(missing)} {processes}; {', '.join(places)}"


def _taken(snapshot: Snapshot, node: NodeReport, wanted: Wanted) -> int:
    """The seats of a node that stay taken: neither given up, nor of what `wanted` replaces."""
    by_generation = {one.generation: one for one in snapshot.wanted}

    def stays(seat: Seat) -> bool:
        of = by_generation.get(seat.name.generation)
        if of is None or seat.name.number >= of.replicas or seat.state is SeatState.YIELDED:
            return False
        return not (of.model == wanted.model and of.is_leaving and wanted.share is None)

    return sum(map(stays, node.seats))
