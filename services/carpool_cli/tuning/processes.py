"""How many model processes a rate needs, by simulation. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool_cli.screen import count
from carpool_cli.tuning.search import LATENCY_QUANTILE, Candidate, Figures, Goal

PROCESSES_MAX: Final = 1000  # that are simulated
PLENTY_RATIO: Final = 2.0  # to the processes that would be busy if each request were executed alone


class ProcessesNeeded(NamedTuple):
    """The smallest number of model processes that keeps a latency at a rate, and the figures with it.

    If no number does, `is_enough` is false, and `number` is one with which a process is nearly always idle.
    `one_less`: the figures with one less; None if that is no process, or fewer than this rate needs.
    """

    number: int
    figures: Figures
    one_less: Figures | None = None

    @property
    def is_enough(self) -> bool:
        """Whether this number keeps the latency."""
        return _keeps_latency(self.figures)


def processes_needed(goal: Goal, tried: Sequence[Candidate], rate: float) -> ProcessesNeeded | None:
    """How many model processes keep the latency at this rate with one of these candidates, the first if
    possible. None if it takes more than PROCESSES_MAX.

    Numbers at which the processes would be busy nearly all the time are not tried (`Goal.ceiling_per_s`): a
    trace is too short to show that queues grow.
    """
    figures: dict[int, Figures] = {}

    def is_enough(number: int) -> bool:
        if number not in figures:
            figures[number] = _best(goal.with_processes(number), tried, rate)
        return _keeps_latency(figures[number])

    max_size = max(candidate.settings.max_batch_size for candidate in tried)
    lone_s = (goal.world.execution_us(1) + goal.world.round_trip_us(1)) / 1e6
    enough = max(1, math.ceil(rate / goal.with_processes(1).ceiling_per_s(max_size)))
    if enough > PROCESSES_MAX:
        return None
    too_few = enough - 1
    if not is_enough(enough):
        plenty = max(enough, math.ceil(PLENTY_RATIO * rate * lone_s)) + 1
        too_few, enough = enough, min(plenty, PROCESSES_MAX)
        if not is_enough(enough):
            return ProcessesNeeded(enough, figures[enough]) if enough == plenty else None
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if is_enough(middle) else (middle, enough)
    return ProcessesNeeded(enough, figures[enough], figures.get(enough - 1))


def _best(goal: Goal, tried: Sequence[Candidate], rate: float) -> Figures:
    """The first candidate that keeps the latency, else the one that comes nearest."""
    best: Figures | None = None
    for candidate in tried:
        share = 0.0 if best is None else best.within
        figures = goal.simulate_until_missed(candidate, rate, share=share, latency_ms=goal.latency_ms)
        if figures is not None and (best is None or figures.within > best.within):
            best = figures
        if best is not None and _keeps_latency(best):
            break
    assert best is not None
    return best


def _keeps_latency(figures: Figures) -> bool:
    return figures.within >= LATENCY_QUANTILE


def describe(needed: ProcessesNeeded | None, rate: float, latency_ms: float, running: int) -> list[str]:
    """How many model processes a rate needs, as lines of text."""
    asked, within = f"{rate:,.0f} requests/s", f"within {latency_ms:g} ms"
    if needed is None:
        return [f"{asked} need more than {PROCESSES_MAX:,} model processes."]
    if not needed.is_enough:
        return [
            f"No number of model processes answers 99% of {asked} {within}: with {needed.number:,}, it is "
            f"{needed.figures.within:.1%}, and more change nothing."
        ]
    share, now = f"{needed.figures.within:.1%} {within}", f"{count(running, 'runs', 'run')} now."
    if needed.number == 1:
        lines = [f"One model process is enough for {asked}: it answers {share}. {now}"]
    else:
        fewer = "fewer cannot execute that many"
        if needed.one_less is not None:
            fewer = f"with one less, it is {needed.one_less.within:.1%}"
        lines = [
            f"{asked} need {needed.number:,} model processes, which answer {share}; {fewer}. {now}",
            "Each is assumed to have a core or a device of its own, and as many threads as now.",
        ]
    if needed.number > running:
        lines.append("To have more, start workers, or start them with more --replicas.")
    if needed.figures.is_guess:
        guessed = f"{needed.figures.guessed:.0%}"
        lines.append(f"This is a guess, because l(n) is one for {guessed} of the simulated batches.")
    return lines
