"""Versions are replaced under load while nodes die: `make chaos CHAOS="--nodes --seed 7"`.

Three nodes with room for two processes each serve two replicas of a model, and three producers send. Versions
are loaded one after the other, every third of which cannot be loaded; during some a node is killed, and
another takes its place. Each load has a label of its own, with which its processes answer.

- failed: requests that ended with an error, or had the answer of another one; lost: without any answer.
- stale: sent after a load had ended, and answered by a version that was not the one that serves since then.
- wrong: loads that ended in another way than they should.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from support.chaos.node_producer import Record
from support.command import carpool
from support.forking import ForkedProcess, ForkServer
from support.repository import load, make_repository, start_node
from support.stack import Stack

REPLACEMENTS: Final = 50
DEATHS: Final = 10
RATE: Final = 1000
PRODUCERS: Final = 3
NODES: Final = 3
ROOM: Final = 2
REPLICAS: Final = 2
FAILS_EVERY: Final = 3
VERSIONS: Final = 3
LOAD_S_MAX: Final = 60.0
END_S_MAX: Final = 120.0
TESTS: Final = Path(__file__).parents[2]
PRODUCER: Final = "support.chaos.node_producer"


class Served(NamedTuple):
    """From when on what is sent is answered by a version, by the label of its load."""

    since_s: float
    label: str


class NodesOutcome(NamedTuple):
    """What became of all requests, which were sent for so many `seconds`, and of all loads. `load_s`: of each
    that should not fail; `median_s` and `worst_s`: from a request to its answer."""

    requests: int
    failed: Sequence[str]
    lost: int
    stale: Sequence[str]
    wrong: Sequence[str]
    deaths: int
    seconds: float
    load_s: Sequence[float]
    median_s: float
    worst_s: float
    left_over: Sequence[str]

    @property
    def is_kept(self) -> bool:
        return not (self.failed or self.lost or self.stale or self.wrong or self.left_over)


class Nodes:
    """Nodes, one of which can be killed soon, while something else goes on; then another takes its place."""

    def __init__(self, stack: Stack, repository: Path, seed: int) -> None:
        self._stack, self._repository = stack, repository
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._replace_one)
        self._nodes = [start_node(stack, repository, ROOM) for _ in range(NODES)]
        self.deaths = 0

    def kill_soon(self) -> None:
        """Within a second. `wait` before the next time."""
        self._thread = threading.Thread(target=self._replace_one)
        self._thread.start()

    def wait(self) -> None:
        """Wait until a node that was to be killed is replaced."""
        if self._thread.ident is not None:
            self._thread.join(END_S_MAX)
            assert not self._thread.is_alive()

    def _replace_one(self) -> None:
        time.sleep(self._random.uniform(0.0, 1.0))
        at = self._random.randrange(NODES)
        self._nodes[at].kill()
        self._nodes[at] = start_node(self._stack, self._repository, ROOM)
        self.deaths += 1


class Producers:
    """Three producers as processes."""

    def __init__(self, url: str, home: Path, rate: int) -> None:
        self._files = [home / f"producer-{number}.json" for number in range(PRODUCERS)]
        server = ForkServer.of_this_process()
        self._processes: list[ForkedProcess] = []
        for number, file in enumerate(self._files):
            arguments = [url, f"p{number}", str(file), str(rate // PRODUCERS)]
            with (home / f"producer-{number}.log").open("wb") as log:
                self._processes.append(server.start(PRODUCER, arguments, TESTS, os.environ, log, log))

    def end(self) -> list[Record]:
        """Let them finish; returns what they recorded."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(END_S_MAX)
        return [Record(*record) for file in self._files for record in json.loads(file.read_text())]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()


def carry_out(
    home: Path, seed: int, *, replacements: int = REPLACEMENTS, deaths: int = DEATHS, rate: int = RATE
) -> NodesOutcome:
    """One run."""
    chosen = random.Random(seed)
    repository = make_repository(home / "repository", versions=VERSIONS)
    with ExitStack() as opened:
        stack = opened.enter_context(Stack(home / "stack"))
        stack.batcher()
        nodes = Nodes(stack, repository, seed)
        with_death = set(chosen.sample(range(1, replacements + 1), min(deaths, replacements)))
        first = _load(stack, "0", "1", fails=False, flags=("--replicas", str(REPLICAS)))
        assert not first[0], first[0]
        served = [Served(time.monotonic(), "0")]
        producers = Producers(stack.url, home, rate)
        opened.callback(producers.kill)
        wrong: list[str] = []
        load_s: list[float] = []
        for number in range(1, replacements + 1):
            fails = number % FAILS_EVERY == 0
            if number in with_death:
                nodes.wait()
                nodes.kill_soon()
            version = str(chosen.randint(1, VERSIONS))
            problem, took_s = _load(stack, str(number), version, fails=fails)
            if problem:
                wrong.append(problem)
            if not fails:
                load_s.append(took_s)
                if not problem:
                    served.append(Served(time.monotonic(), str(number)))
            print(f"load {number} of {replacements}, {nodes.deaths} deaths", file=sys.stderr, flush=True)
        nodes.wait()
        records = producers.end()
        stack.wait_until_idle("echo", END_S_MAX)
        left_over = _left_over(stack)
    waits_s = [record.answered_s - record.sent_s for record in records]
    return NodesOutcome(
        requests=len(records),
        failed=[record.error for record in records if record.error],
        lost=sum(not (record.label or record.error) for record in records),
        stale=list(_stale(records, served)),
        wrong=wrong,
        deaths=nodes.deaths,
        seconds=max(record.sent_s for record in records) - min(record.sent_s for record in records),
        load_s=load_s,
        median_s=median(waits_s),
        worst_s=max(waits_s),
        left_over=left_over,
    )


def _load(
    stack: Stack, label: str, version: str, *, fails: bool, flags: Sequence[str] = ()
) -> tuple[str, float]:
    """Load a version. Returns what was not as it should be, and how long it took."""
    reason = ("--param", "reason=it is to fail") if fails else ()
    began_s = time.monotonic()
    done = load(
        stack, "echo", "--version", version, "--param", f"label=.{label}", *reason, *flags,
        "--timeout-s", str(LOAD_S_MAX), check=False,
    )  # fmt: skip
    took_s = time.monotonic() - began_s
    is_right = (done.returncode == 1 and "it is to fail" in done.stderr) if fails else done.returncode == 0
    return ("" if is_right else f"load {label}: exit {done.returncode}: {done.stderr}"), took_s


def _stale(records: Sequence[Record], served: Sequence[Served]) -> list[str]:
    """The requests that a version answered which had left before they were sent."""
    found = []
    until = {before.label: after.since_s for before, after in pairwise(served)}
    for record in records:
        label = record.label.partition(".")[2]
        if label and record.sent_s > until.get(label, float("inf")):
            found.append(f"{record.label} {record.sent_s - until[label]:.3f} s after it left")
    return found


def _left_over(stack: Stack) -> list[str]:
    """What should not be there once all is unloaded."""
    carpool(stack.url, "unload", "echo", check=True)
    seats = stack.redis.hgetall("carpool:{.nodes}:seats")
    found = [f"seat {name.decode()}: {value.decode()}" for name, value in seats.items()]
    found += [f"{stack.pending('echo')} pending batches"] if stack.pending("echo") else []
    return found + (["dead letters"] if stack.redis.exists("carpool:{echo}:dead") else [])


def summary(outcome: NodesOutcome, seed: int) -> str:
    """A run in a few lines."""
    lines = [
        f"seed {seed}: {outcome.requests:,} requests, {outcome.requests / outcome.seconds:,.0f}/s, "
        f"{len(outcome.failed)} failed, {outcome.lost} lost, "
        f"{len(outcome.stale)} stale; {outcome.deaths} nodes killed; loads: {len(outcome.wrong)} wrong, "
        f"median {median(outcome.load_s):.2f} s, worst {max(outcome.load_s):.2f} s; "
        f"answers: median {1000 * outcome.median_s:.1f} ms, worst {outcome.worst_s:.2f} s; "
        f"kept: {'yes' if outcome.is_kept else 'no'}"
    ]
    for problems in (outcome.failed, outcome.stale, outcome.wrong, outcome.left_over):
        lines += [f"    {problem}" for problem in list(problems)[:5]]
    return "\n".join(lines)
