"""Starts a system for a workload, has its orders carried out, and stops it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from host import CpuTime, Figures, is_disturbed, turns, usable

from carpool.lifecycle import command_that_dies_with_parent
from grid.catalog import System
from grid.environments import BUILD, HERE, Environments, UnavailableError, wrk
from grid.redis_server import RedisServer, free_port
from grid.setup import Setup
from grid.workloads import Workload

ANSWER_S_MAX: Final = 120.0
STOP_S_MAX: Final = 2.0
OVERLOADED: Final = 0.05  # the share of requests that were answered in time


class FailedError(Exception):
    """A system could not be measured. The message is the reason, in one line."""


@dataclass
class Results:
    """What was measured: for each (workload, system, cell) the figures of each round; and what was left
    out.

    Figures during which the host withheld CPU time from this machine say nothing (`is_disturbed`). They count
    only in cells that have no others.
    """

    rounds: dict[tuple[str, str, str], list[Figures]] = field(default_factory=dict)
    left_out: dict[tuple[str, str], str] = field(default_factory=dict)
    undisturbed: Counter[tuple[str, str]] = field(default_factory=Counter)  # rounds of (workload, system)

    def add(self, workload: str, system: str, cell: str, figures: Figures) -> None:
        """Add the figures of one round."""
        self.rounds.setdefault((workload, system, cell), []).append(figures)

    def cell(self, workload: str, system: str, cell: str) -> Sequence[Figures]:
        """The figures of a cell by round; none if it was not measured."""
        return usable(self.rounds.get((workload, system, cell), []))


def run_grid(
    systems: Sequence[System],
    workloads: Sequence[Workload],
    environments: Environments,
    rounds: int,
    on_progress: Callable[[str], None],
) -> Results:
    """Measure everything, in turns: see `host.turns`."""
    results = Results()
    started_s = time.monotonic()

    def is_done(pair: tuple[Workload, System]) -> bool:
        workload, system = pair
        key = (workload.name, system.name)
        is_part = system.runs(workload) or workload.name in system.left_out
        wanted = 1 if workload.once else rounds
        return not is_part or key in results.left_out or results.undisturbed[key] >= wanted

    pairs = [(workload, system) for workload in workloads for system in systems]
    for number, (workload, system) in turns(pairs, rounds, is_done):
        _measure(system, workload, environments, number, results)
        of = f"of {rounds}" if number < rounds else "repeats"
        where = f"{time.monotonic() - started_s:4.0f} s  round {number + 1} {of}  "
        outcome = _progress(results, workload, system)
        on_progress(f"{where}{workload.name:12} {system.name:32} {outcome}")
    return results


def _measure(
    system: System, workload: Workload, environments: Environments, number: int, results: Results
) -> None:
    """One system under one workload. A reason why it cannot be measured is a result too."""
    key = (workload.name, system.name)
    if workload.name in system.left_out:
        results.left_out[key] = system.left_out[workload.name]
    if not system.runs(workload) or key in results.left_out:
        return
    disturbed = False
    try:
        with started(system, workload, environments) as running:
            for cell, order in workload.orders.items():
                if cell in system.cells_left_out:
                    continue
                figures = running.order({**order, "seed": number})
                results.add(workload.name, system.name, cell, figures)
                disturbed = disturbed or is_disturbed(figures)
                if figures.get("within", 1.0) < OVERLOADED:
                    break  # a higher rate would only find the backlog of this one
        results.undisturbed[key] += not disturbed
    except (FailedError, UnavailableError) as error:
        results.left_out[key] = str(error)


def _progress(results: Results, workload: Workload, system: System) -> str:
    """What the latest round of a system showed, in short."""
    if reason := results.left_out.get((workload.name, system.name)):
        return f"left out: {reason}"
    parts = []
    for cell in workload.orders:
        if of_rounds := results.rounds.get((workload.name, system.name, cell)):
            latest = of_rounds[-1]
            if workload.orders[cell]["load"] == "poisson":
                parts.append(f"{cell}: {latest['p50_ms']:.1f} ms")
            elif "seconds" in latest:
                parts.append(f"{cell}: {latest['seconds']:.3f} s")
            else:
                parts.append(f"{cell}: {latest['per_second']:,.0f}/s")
            if is_disturbed(latest):
                parts[-1] += " (disturbed)"
    return ", ".join(parts)


class Running:
    """A system that serves, and its producer process."""

    def __init__(
        self,
        system: System,
        producer: subprocess.Popen[str],
        pids: Mapping[str, int],
        redis: RedisServer | None,
    ) -> None:
        self.pids, self.redis = pids, redis
        self._system, self._producer = system, producer

    @property
    def producer_pid(self) -> int:
        return self._producer.pid

    def order(self, order: Mapping[str, Any]) -> Figures:
        """Have an order carried out. Raises FailedError. `stolen`: see `host`."""
        assert self._producer.stdin is not None
        message = {**order, "pids": self.pids, "child_roles": self._system.child_roles}
        cpu = CpuTime()
        with contextlib.suppress(BrokenPipeError):
            self._producer.stdin.write(json.dumps(message) + "\n")
            self._producer.stdin.flush()
        return {**self.answer(), "stolen": cpu.shares().stolen}

    def answer(self) -> Figures:
        """The producer's next answer. Raises FailedError."""
        assert self._producer.stdout is not None
        if not select.select([self._producer.stdout], [], [], ANSWER_S_MAX)[0]:
            raise FailedError(f"no answer within {ANSWER_S_MAX:.0f} s")
        line = self._producer.stdout.readline()
        if not line:
            raise FailedError("its producer process ended without an answer")
        answer: Figures = json.loads(line)
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer


@contextlib.contextmanager
def started(system: System, workload: Workload, environments: Environments) -> Iterator[Running]:
    """The system, ready to serve; stopped after the block. Raises FailedError or UnavailableError."""
    programs = environments.get(system.environment)
    tools = str(wrk()) if system.client.startswith("wrk") else ""
    logs = BUILD / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((logs / f"{workload.name}-{system.key}.log").open("w"))
        redis = stack.enter_context(RedisServer()) if system.uses_redis else None
        setup = Setup(
            model=workload.model,
            batch_size=system.batch_size or workload.batch_size,
            wait_ms=system.wait_ms,
            redis_url="" if redis is None else redis.unix_url if system.unix_socket else redis.url,
            port=free_port(),
            client=system.client,
            uvloop=system.uvloop,
            tools=tools,
        )
        environment = _environment(programs, setup)
        services = {
            role: stack.enter_context(process(command, programs, environment, log, stdin=subprocess.DEVNULL))
            for role, command in system.services(setup).items()
        }
        producer = stack.enter_context(
            process(
                ["python", "-m", "grid.producer", f"grid.systems.{system.module}"], programs, environment, log
            )
        )
        pids = {role: service.pid for role, service in services.items()}
        running = Running(system, producer, {**({"redis": redis.pid} if redis else {}), **pids}, redis)
        try:
            running.answer()
        except FailedError as error:
            raise FailedError(f"{error} (log: {Path(log.name).relative_to(HERE.parents[2])})") from error
        yield running


def _environment(programs: Path, setup: Setup) -> dict[str, str]:
    paths = {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(HERE.parent)}
    carpool = {"CARPOOL_REDIS_URL": setup.redis_url} if setup.redis_url else {}
    return {**os.environ, **paths, **carpool, **setup.environment()}


@contextlib.contextmanager
def process(
    command: Sequence[str],
    programs: Path,
    environment: Mapping[str, str],
    log: IO[str],
    stdin: int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """A process in a group of its own; the whole group is ended after the block."""
    child = subprocess.Popen(
        command_that_dies_with_parent([str(programs / command[0]), *command[1:]]),
        env=environment,
        stdin=stdin,
        stdout=subprocess.PIPE if stdin == subprocess.PIPE else log,
        stderr=log,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        if child.stdin is not None:
            child.stdin.close()  # a producer then disconnects
        else:
            child.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S_MAX)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # what it left behind
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def progress_to_stderr(line: str) -> None:
    """One line for each system, workload and round."""
    print(line, file=sys.stderr, flush=True)
