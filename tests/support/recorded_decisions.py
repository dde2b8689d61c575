"""What a batcher decides about recorded traffic, in virtual time: does a change of its code change that?

Traffic is made at random from a seed, decoded, offered, and executed by simulated model processes. Every
decision is one line with its time. Nothing else depends on the code under test, so two revisions that decide
alike write the same lines:

    cd tests && python -m support.recorded_decisions --against HEAD~3    # prints where they differ first
    cd tests && python -m support.recorded_decisions --write FOLDER      # a file for each scenario
    cd tests && python -m support.recorded_decisions --renew             # what a test compares with

A revision is checked out into a folder of its own, and writes with its own copy of this module. What this
module uses of the core may be renamed; the lines must stay as they are. `recorded_decisions.sha256` has a
digest of what is decided in the first COMPARED_S of each scenario: the test fails if one is another.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgpack

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.messages.settled import BatchSettled, ExecutedOf
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.in_flight import DecidedDispatches
from carpool_batcher.core.scheduler import Decision, Dispatch, Expire, Scheduler
from support.any_fields import START_MS, Batcher, as_flat
from support.scheduler_harness import MS

ROOT: Final = Path(__file__).resolve().parents[2]
START_US: Final = START_MS * MS
TRANSIT_US: Final = 300  # of a batch to its worker, and of the news that it settled
PAUSE_US: Final = 40_000_000  # after the last arrival, in which all must be served
DIGESTS: Final = Path(__file__).with_suffix(".sha256")
COMPARED_S: Final = 2.1  # with changes of settings, and with a batcher that takes over

Fields = dict[str, Any]
Traffic = Callable[[random.Random], Iterator[tuple[int, Fields]]]  # times in us from the start, and entries
Choice = random.Random


# --- scenarios ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """Traffic for a model. `changes`: settings that replace others at a time in ms; `processes`: how many
    there are from a time in ms on. A batch of n requests takes `base_ms` and `each_ms` for each. Of a tenant
    whose name begins with "bad" the model executes nothing. `lost`: the share of batches that vanish."""

    traffic: Traffic
    kind: ModelKind = ModelKind.PLAIN
    settings: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    processes: Mapping[int, int] = field(default_factory=lambda: {0: 2})
    takeovers: Sequence[int] = ()
    base_ms: float = 4
    each_ms: float = 0.5
    lost: float = 0


def poisson(rate: float, seconds: float, entry_of: Callable[[Choice, int], Fields]) -> Traffic:
    """Entries in no rhythm, `rate` of them in a second."""

    def traffic(choice: Choice) -> Iterator[tuple[int, Fields]]:
        at_us = 0.0
        for number in itertools.count():
            at_us += choice.expovariate(rate) * 1e6
            if at_us > seconds * 1e6:
                return
            yield int(at_us), entry_of(choice, number)

    return traffic


def bursts(every_ms: int, size: int, seconds: float, entry_of: Callable[[Choice, int], Fields]) -> Traffic:
    """Many entries in the same moment, again and again."""

    def traffic(choice: Choice) -> Iterator[tuple[int, Fields]]:
        numbers = itertools.count()
        for at_ms in range(0, int(seconds * 1000), every_ms):
            for _ in range(choice.randint(1, 2 * size)):
                yield at_ms * MS + choice.randint(0, 900), entry_of(choice, next(numbers))

    return traffic


def both(*parts: Traffic) -> Traffic:
    """The entries of all of them."""

    def traffic(choice: Choice) -> Iterator[tuple[int, Fields]]:
        yield from heapq.merge(*[list(part(choice)) for part in parts], key=lambda item: item[0])

    return traffic


def plain(choice: Choice, number: int) -> Fields:
    return {"correlation_id": f"r{number}", "body": "1"}


def of_all_kinds(choice: Choice, number: int) -> Fields:
    """With priorities, lanes, tenants, costs, deadlines and delays."""
    options: list[Fields] = [
        {"priority": str(choice.randint(0, 9))},
        {"lane": choice.choice(("x", "y", "z"))},
        {"tenant": choice.choice(("gold", "silver", "tin"))},
        {"cost": str(choice.randint(1, 5))},
        {"expiration": str(choice.choice((20, 60, 200)))},
        {"not_before": str(choice.choice((5, 40, 300)))},
        {"reply_to": choice.choice(("me", "you"))},
    ]
    fields = plain(choice, number)
    for option in options:
        if choice.random() < 0.35:
            fields |= option
    return fields


def with_deadline(choice: Choice, number: int) -> Fields:
    return plain(choice, number) | {
        "expiration": str(choice.choice((40, 80, 160))),
        "lane": choice.choice("ab"),
    }


def packed(choice: Choice, number: int) -> Fields:
    """Several requests in one entry."""
    requests = [of_all_kinds(choice, number * 100 + at) for at in range(choice.randint(1, 30))]
    for request in requests:
        request.pop("reply_to", None)
    return {"requests": msgpack.packb(requests)}


def again(choice: Choice, number: int) -> Fields:
    """Some are sent again while they wait or are in flight."""
    known = max(0, number - choice.choice((0, 0, 1, 3, 10)))
    return {"correlation_id": f"r{known}", "body": "1", "reply_to": "me"}


def withdrawing(choice: Choice, number: int) -> Fields:
    """Some are withdrawn, soon or later."""
    if choice.random() < 0.3:
        return {"withdraw": " ".join(f"r{max(0, number - back)}" for back in choice.sample(range(1, 40), 5))}
    return plain(choice, number) | {"stream": str(number % 2)}


def flooding(choice: Choice, number: int) -> Fields:
    """One producer sends what the model does not execute."""
    tenant = choice.choice(("bad", "bad", "bad", "bad", "good", "fine"))
    return plain(choice, number) | {"tenant": tenant, "expiration": "120"}


def malformed(choice: Choice, number: int) -> Fields:
    if choice.random() < 0.5:
        return plain(choice, number)
    return plain(choice, number) | choice.choice(({"priority": "11"}, {"cost": "x"}, {"expiration": "0"}))


def of_sequences(choice: Choice, number: int) -> Fields:
    """Requests of many sequences, in order, with indexes or without; some are broken, begun anew or ended."""
    name = choice.randint(0, 30)
    step = number // 31
    fields = plain(choice, number) | {"sequence_id": f"s{name}"}
    kind = choice.random()
    if step == 0 or kind < 0.15:
        fields["sequence_start"] = "1"
    elif kind < 0.2:
        fields["sequence_end"] = "1"
    elif kind < 0.3:
        fields["sequence_index"] = str(choice.randint(1, 4))
    elif kind < 0.33:
        fields["expiration"] = "5"
    elif kind < 0.35:
        fields["priority"] = "x"
    elif kind < 0.36:
        return {"end_sequences": f"s{name} s{choice.randint(0, 30)}"}
    elif kind < 0.38:
        return {"withdraw": f"r{max(0, number - choice.randint(1, 60))}"}
    return fields


def streamed(choice: Choice, number: int) -> Fields:
    return plain(choice, number) | {"stream": "1", "cost": str(choice.randint(1, 4))}


DEFERRED: Final = {"policy": "deferred", "target_latency_ms": 60}
SCENARIOS: Final[dict[str, Scenario]] = {
    "poisson": Scenario(poisson(900, 8, plain), settings={"max_batch_size": 16}),
    "poisson with a delay": Scenario(
        poisson(900, 8, plain), settings={"max_queue_delay_ms": 20, "preferred_batch_sizes": (4, 8)}
    ),
    "all options": Scenario(
        poisson(700, 10, of_all_kinds),
        settings={"max_batch_cost": 20, "tenant_weights": {"gold": 4}, "expiration_action": "delay"},
    ),
    "bursts": Scenario(
        bursts(100, 60, 8, of_all_kinds), settings={"max_queue_size": 60, "max_batch_size": 8}
    ),
    "packed": Scenario(poisson(60, 8, packed), settings={"max_queue_size": 300, "max_queue_delay_ms": 5}),
    "deferred": Scenario(poisson(1500, 8, with_deadline), settings={"policy": "deferred"}, base_ms=8),
    "deferred with a target": Scenario(
        both(poisson(600, 8, plain), bursts(500, 100, 8, with_deadline)), settings=DEFERRED
    ),
    "deferred over capacity": Scenario(
        bursts(50, 120, 6, with_deadline), settings=DEFERRED | {"max_batch_size": 16}, base_ms=10
    ),
    "slow in the middle": Scenario(
        both(poisson(500, 9, with_deadline)),
        settings=DEFERRED,
        processes={0: 3, 3000: 1, 5000: 4, 7000: 2},
    ),
    "floods": Scenario(poisson(1500, 8, flooding), settings={"max_queue_size": 400}),
    "floods, deferred": Scenario(poisson(1200, 8, flooding), settings=DEFERRED | {"max_queue_size": 400}),
    "sent again": Scenario(poisson(1500, 6, again), settings={"max_queue_size": 50}, base_ms=15),
    "withdrawals": Scenario(poisson(1500, 6, withdrawing), base_ms=15),
    "malformed": Scenario(poisson(900, 6, malformed), settings={"max_queue_size": 20}),
    "overrides": Scenario(
        poisson(900, 10, of_all_kinds),
        changes={
            1000: {"max_batch_size": 4},
            2500: {"max_queue_delay_ms": 30},
            4000: DEFERRED,
            6000: {"policy": "deferred", "max_batch_size": 64},
            8000: {"expiration_action": "delay", "default_expiration_ms": 20},
        },
    ),
    "takeovers and lost batches": Scenario(poisson(900, 8, of_all_kinds), takeovers=(2000, 5000), lost=0.02),
    "stepping": Scenario(
        poisson(200, 8, streamed),
        ModelKind.STEPPING,
        settings={"max_batch_size": 16, "max_batch_cost": 40},
        base_ms=120,
    ),
    "stepping, withdrawals": Scenario(
        poisson(200, 8, withdrawing), ModelKind.STEPPING, settings={"max_batch_size": 8}, base_ms=150
    ),
    "sequences": Scenario(
        poisson(400, 10, of_sequences),
        ModelKind.STATEFUL,
        settings={"max_candidate_sequences": 12, "max_sequence_idle_ms": 400},
    ),
    "sequences, lost": Scenario(
        poisson(400, 10, of_sequences),
        ModelKind.STATEFUL,
        settings={"max_sequence_idle_ms": 1000},
        takeovers=(4000,),
        lost=0.05,
    ),
    "bound": Scenario(
        poisson(300, 10, of_sequences),
        ModelKind.BOUND,
        settings={"max_batch_size": 8, "max_sequence_idle_ms": 500},
        processes={0: 2, 4000: 1, 6000: 3},
    ),
}


# --- the simulation ----------------------------------------------------------------------------------------


class Recorded(Batcher):
    """A batcher whose decisions are written down. `lines`: one for each, in order."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.lines: list[str] = []
        self._scenario = scenario
        self._choice = random.Random(seed)
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = ["p1", "p2"]
        self._free_us: dict[str, int] = {}
        super().__init__(ModelSettings(**scenario.settings), scenario.kind)

    def begin(self) -> None:
        self.scheduler: Scheduler = Noting(self.settings, self.kind, self._note)
        self.scheduler.set_processes(self._names)
        self.table = {}

    def _note(self, text: str) -> None:
        self.lines.append(f"{self.now_us - START_US} {text}")

    def play(self) -> list[str]:
        """Let all of the scenario happen. Returns the lines."""
        end_us = self._begin()
        while self._step(end_us):
            self.turn()
        assert not self.scheduler.queue.count and not self.scheduler.in_flight.batches
        return self.lines

    def play_first(self, seconds: float) -> list[str]:
        """Let the first part of the scenario happen. Returns the lines."""
        self._begin()
        while self._step(int(seconds * 1e6)):
            self.turn()
        return self.lines

    def _begin(self) -> int:
        """Plan what happens. Returns when all is over, from the start."""
        scenario = self._scenario
        for at_us, fields in scenario.traffic(self._choice):
            flat = as_flat(fields)
            self._at(at_us, lambda flat=flat: self.send(flat))  # type: ignore[misc]
        for at_ms, settings in scenario.changes.items():
            self._at(at_ms * MS, lambda settings=settings: self._change(settings))  # type: ignore[misc]
        for at_ms, number in scenario.processes.items():
            self._at(at_ms * MS, lambda number=number: self._resize(number))  # type: ignore[misc]
        for at_ms in scenario.takeovers:
            self._at(at_ms * MS, self.take_over)
        return max(at_us for at_us, *_ in self._events) + PAUSE_US

    def _at(self, at_us: int, act: Callable[[], None]) -> None:
        """At this time from the start."""
        heapq.heappush(self._events, (START_US + at_us, next(self._order), act))

    def _step(self, end_us: int) -> bool:
        """Go to the next time at which something happens, and let it. False if that is after the end."""
        wake_us = self.scheduler.wake_at_us()
        event_us = self._events[0][0] if self._events else None
        times = [at_us for at_us in (wake_us, event_us) if at_us is not None]
        if not times or min(times) > START_US + end_us:
            return False
        self.now_us = max(self.now_us, min(times))
        while self._events and self._events[0][0] <= self.now_us:
            heapq.heappop(self._events)[2]()
        return True

    def _change(self, settings: Mapping[str, Any]) -> None:
        self.settings = self.scheduler.settings = ModelSettings(**{**self._scenario.settings, **settings})
        self._note("settings changed")

    def _resize(self, number: int) -> None:
        self._names = [f"p{at}" for at in range(1, number + 1)]
        self.scheduler.set_processes(self._names)
        self._note(f"{number} processes")

    # --- workers -------------------------------------------------------------------------------------------

    def launched(self, batch_id: str, dispatch: Dispatch) -> None:
        self.scheduler.learned.observe_delivery(TRANSIT_US + self._choice.randint(0, 200))
        if self._choice.random() < self._scenario.lost:
            self._at(self.now_us - START_US + 50_000, lambda: self._lose(batch_id))
            return
        if self.kind is ModelKind.STEPPING:
            begun_us, waited_us = self.now_us + TRANSIT_US, 0
        else:
            process = dispatch.process or min(self._names, key=lambda name: self._free_us.get(name, 0))
            arrived_us = self.now_us + TRANSIT_US
            begun_us = max(arrived_us, self._free_us.get(process, 0))
            waited_us = begun_us - arrived_us
        executed, failing = _executed(dispatch.runs)
        compute_us = int(MS * (self._scenario.base_ms + self._scenario.each_ms * executed))
        compute_us = compute_us * self._choice.randint(95, 130) // 100
        settled_us = begun_us + compute_us
        if self.kind is not ModelKind.STEPPING:
            self._free_us[process] = settled_us
        broken = [
            run.sequence.sequence_id
            for run in dispatch.runs
            if run.sequence is not None and self._choice.random() < 0.04
        ]

        size = sum(len(run) for run in dispatch.runs)
        event = BatchSettled(
            batch_id, "", size, compute_us if executed else 0, settled_us, executed, waited_us,
            broken=broken, of_producers=failing,
        )  # fmt: skip

        def settle() -> None:
            if batch_id in self.in_flight and batch_id in self.scheduler.in_flight.batches:
                del self.in_flight[batch_id]
                self.scheduler.in_flight.settle(event)

        self._at(settled_us - START_US + TRANSIT_US, settle)

    def _lose(self, batch_id: str) -> None:
        if batch_id in self.in_flight and batch_id in self.scheduler.in_flight.batches:
            del self.in_flight[batch_id]
            self._note(f"lost {batch_id}")
            self.scheduler.in_flight.forget(batch_id, self.now_us)

    def checked(self, refusals: Sequence[Refusal], *others: Run) -> Sequence[Refusal]:
        return refusals  # that is for other tests


def _executed(runs: Iterable[Run]) -> tuple[int, list[ExecutedOf]]:
    """How many of these requests the model executes, and of whom not all."""
    numbers: Counter[tuple[str, str]] = Counter()
    for run in runs:
        numbers[run.producer] += len(run)
    failing = [
        ExecutedOf(producer, number, 0)
        for producer, number in numbers.items()
        if producer[0].startswith("bad")
    ]
    return numbers.total() - sum(one.requests for one in failing), failing


class Noting(Scheduler):
    """A scheduler that tells what it decides."""

    def __init__(self, settings: ModelSettings, kind: ModelKind, note: Callable[[str], None]) -> None:
        super().__init__(settings, kind=kind)
        self._note = note

    def poll(self, now_us: int) -> list[Decision]:
        decisions = super().poll(now_us)
        for decision in decisions:
            self._note(text_of(decision))
        return decisions

    def offer(self, run: Run, now_us: int) -> list[Refusal]:
        return self._all(super().offer(run, now_us))

    def carry_out(self, dispatches: Sequence[Dispatch], decided_us: int) -> DecidedDispatches:
        remaining = super().carry_out(dispatches, decided_us)
        finish = remaining.finish
        remaining.finish = lambda: self._all(finish())  # type: ignore[method-assign]
        return remaining

    def end_sequences(self, sequence_ids: Any, place: str) -> list[Refusal]:
        return self._all(super().end_sequences(sequence_ids, place))

    def carry_out_withdrawals(self, now_us: int) -> Any:
        withdrawn = super().carry_out_withdrawals(now_us)
        self._all(withdrawn.refusals)
        for batch_id, first, run in sorted(withdrawn.cancelled, key=lambda one: one.batch_id):  # of a set
            self._note(f"cancel {batch_id} {first} {_names(run)}")
        return withdrawn

    def _all(self, refusals: Iterable[Refusal]) -> list[Refusal]:
        noted = list(refusals)
        for refused in noted:
            self._note(text_of(refused))
        return noted


def text_of(decision: Decision) -> str:
    """A decision as a line without its time."""
    if isinstance(decision, Dispatch):
        runs = " ".join(_names(run) for run in decision.runs)
        return f"dispatch {decision.reason} lane={decision.lane} process={decision.process}: {runs}"
    if isinstance(decision, Expire):
        return f"expire {decision.batch_id} {decision.position} {_names(decision.run)}"
    if isinstance(decision, SequenceChange):
        return f"change {decision.part.sequence_id} {decision.outcome} at {decision.part.place}"
    if isinstance(decision, SlotFreed):
        return f"freed {decision.process} {decision.sequence_id}"
    assert isinstance(decision, Refusal)
    names = " ".join(decision.correlation_ids)
    return f"refuse {decision.status or 'unanswered'} {decision.reason}: {names} ({decision.detail})"


def _names(run: Run) -> str:
    return " ".join(run.correlation_ids)


# --- the command -------------------------------------------------------------------------------------------


def write(folder: Path, names: Iterable[str], seed: int) -> None:
    """Write the lines of these scenarios into files there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        lines = Recorded(SCENARIOS[name], seed).play()
        folder.joinpath(_file(name)).write_text("\n".join(lines) + "\n")
        print(f"{name}: {len(lines):,} lines", file=sys.stderr, flush=True)


def digest_of(name: str) -> str:
    """A digest of what is decided in the first part of a scenario."""
    lines = Recorded(SCENARIOS[name], seed=1).play_first(COMPARED_S)
    return sha256("\n".join(lines).encode()).hexdigest()


def recorded_digests() -> dict[str, str]:
    """The digests that were recorded last, by scenario."""
    pairs = [line.split(" ", 1) for line in DIGESTS.read_text().splitlines()]
    return {name: digest for digest, name in pairs}


def _file(name: str) -> str:
    return name.replace(" ", "-").replace(",", "") + ".txt"


def compare(revision: str, names: Sequence[str], seed: int) -> int:
    """Print where this checkout decides otherwise than a revision. Returns in how many scenarios."""
    with tempfile.TemporaryDirectory() as home:
        other, before, after = Path(home, "checkout"), Path(home, "before"), Path(home, "after")
        _run(ROOT, "git", "worktree", "add", "--quiet", "--detach", str(other), revision)
        try:
            for root, folder in ((other, before), (ROOT, after)):
                command = (sys.executable, "-m", "support.recorded_decisions", "--write", str(folder))
                _run(root / "tests", *command, "--seed", str(seed), *names)
        finally:
            _run(ROOT, "git", "worktree", "remove", "--force", str(other))
        return sum(_differs(name, before, after) for name in names)


def _differs(name: str, before: Path, after: Path) -> bool:
    pairs = itertools.zip_longest(
        *(folder.joinpath(_file(name)).read_text().splitlines() for folder in (before, after)), fillvalue="-"
    )
    for number, (was, now) in enumerate(pairs, 1):
        if was != now:
            print(f"{name}, line {number}:\n  before: {was:.300}\n  now:    {now:.300}")
            return True
    return False


def _run(folder: Path, *command: str) -> None:
    paths = os.pathsep.join(str(folder.parent / name) for name in ("shared", "services", "tests"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": "0"}
    subprocess.run(command, cwd=folder, env=environment, check=True)


def main() -> int:
    """The command of the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", metavar="SCENARIO", help=f"all, or some of: {', '.join(SCENARIOS)}"
    )
    parser.add_argument("--seed", type=int, default=1)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--against", metavar="REVISION", help="compare with what that decides")
    where.add_argument("--write", type=Path, metavar="FOLDER")
    where.add_argument("--renew", action="store_true", help="record what this checkout decides")
    options = parser.parse_args()
    if options.renew:
        DIGESTS.write_text("".join(f"{digest_of(name)} {name}\n" for name in SCENARIOS))
        return 0
    names = options.names or list(SCENARIOS)
    if options.write is not None:
        write(options.write, names, options.seed)
        return 0
    differing = compare(options.against, names, options.seed)
    print(f"{len(names) - differing} of {len(names)} scenarios are decided alike")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
