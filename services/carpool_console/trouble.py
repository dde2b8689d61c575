"""What is wrong with a model, in words, and which model is worst. Pure.

A row of the overview has a state, and the troubles that explain it, the worst first. Rows are sorted by
severity, then by how long requests wait: how many wait says little, because a fast model is soon through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

from carpool.figures import Figures
from carpool_console.formats import duration, plural
from carpool_console.history import Minute, Point

OLD_S: Final = 10.0  # a request that has waited for so long ...
OLD_RATIO: Final = 20.0  # ... and so many times the usual latency is worth a look
TAKEOVERS_MIN: Final = 3  # batchers that take over so often in a minute fail, or cannot keep their lease
ALL_FAIL_SHARE: Final = 0.95  # of the requests that were dispatched: if so many failed, all do
RECENT_S: Final = 3600.0  # a dead letter that is newer
LEVELS: Final = ("fine", "notice", "hurts", "broken")


class Severity(IntEnum):
    """FINE: nothing. NOTICE: intended, or past. HURTS: some requests fail or are late. BROKEN: all do."""

    FINE = 0
    NOTICE = 1
    HURTS = 2
    BROKEN = 3

    @property
    def level(self) -> str:
        """Its name in templates."""
        return LEVELS[self]


class Trouble(NamedTuple):
    """One thing that is wrong. `sentence`: what, and what to do if that is not plain."""

    severity: Severity
    sentence: str


class Facts(NamedTuple):
    """All that is known of a model at one time. `error`: why it could not be read."""

    figures: Figures
    minute: Minute = Minute()
    in_per_s: float | None = None
    draining: int = 0  # model processes that take no more batches
    dead_newest_s: float | None = None  # age of the newest dead letter
    points: Sequence[Point] = ()
    error: str = ""


class Row(NamedTuple):
    """A model in the overview."""

    facts: Facts
    state: str
    troubles: Sequence[Trouble]

    @property
    def model(self) -> str:
        return self.facts.figures.model

    @property
    def figures(self) -> Figures:
        return self.facts.figures

    @property
    def severity(self) -> Severity:
        """That of the worst trouble."""
        return max((trouble.severity for trouble in self.troubles), default=Severity.FINE)


def row_of(facts: Facts) -> Row:
    """The state of a model, and what is wrong with it."""
    troubles = sorted(_troubles(facts), key=lambda one: -one.severity)
    return Row(facts, state_of(facts), troubles)


def sorted_rows(rows: Sequence[Row]) -> list[Row]:
    """The worst first; among equals the one whose oldest request has waited longest."""
    return sorted(rows, key=lambda row: (-row.severity, -(row.figures.oldest_s or 0.0), row.model))


def state_of(facts: Facts) -> str:
    """In a word or two: what the model does."""
    figures = facts.figures
    if facts.error:
        return "unreadable"
    if figures.paused is not None:
        return "paused"
    if not figures.batcher and figures.model_processes:
        return "no batcher"
    if not figures.model_processes:
        return "loading" if figures.loading else "no worker"
    if facts.draining >= figures.model_processes:
        return "draining"
    return "serving" if _some_succeed(facts) else "failing"


def _troubles(facts: Facts) -> list[Trouble]:
    if facts.error:
        return [Trouble(Severity.BROKEN, f"cannot be read: {facts.error}")]
    return [*_of_processes(facts), *_of_requests(facts), *_of_the_past(facts)]


def _of_processes(facts: Facts) -> list[Trouble]:
    """Missing batchers and model processes, which hurts as soon as requests wait, and processes that died."""
    figures, found = facts.figures, list[Trouble]()
    if figures.paused is not None:
        found.append(Trouble(Severity.NOTICE, figures.paused.describe()))
    missing = Severity.BROKEN if figures.waiting or figures.batches_in_flight else Severity.NOTICE
    if not figures.batcher and figures.model_processes:
        found.append(
            Trouble(Severity.BROKEN, "no batcher is active: nothing is dispatched; start `carpool batcher`")
        )
    if not figures.model_processes:
        if figures.loading:
            found.append(Trouble(Severity.NOTICE, "a worker is loading the model"))
        else:
            waiting = (
                f"{plural(figures.waiting, 'request')} wait for one" if figures.waiting else "none waits"
            )
            found.append(Trouble(missing, f"no worker runs; {waiting}"))
    elif facts.draining >= figures.model_processes:
        found.append(Trouble(missing, "all its processes drain, and take no more batches"))
    if figures.process_deaths:
        times = f"{plural(figures.process_deaths, 'time')} in the last minute"
        late = "what they had is executed again; the log of their worker says why"
        found.append(Trouble(Severity.HURTS, f"its model processes died {times}: {late}"))
    if facts.minute.takeovers >= TAKEOVERS_MIN:
        times = f"{facts.minute.takeovers:,} times in the last minute"
        found.append(Trouble(Severity.HURTS, f"a batcher began anew {times}: its log says why"))
    if figures.rejected_settings:
        found.append(Trouble(Severity.HURTS, f"its settings are rejected: {figures.rejected_settings}"))
    return found


def _of_requests(facts: Facts) -> list[Trouble]:
    """What the last minute was like for requests."""
    figures, minute, found = facts.figures, facts.minute, list[Trouble]()
    in_minute = "in the last minute"
    if minute.failed:
        nothing_works = not _some_succeed(facts)
        severity = Severity.BROKEN if nothing_works else Severity.HURTS
        error = f": {figures.last_error}" if figures.last_error else ""
        found.append(
            Trouble(severity, f"{plural(sum(minute.failed.values()), 'request')} failed {in_minute}{error}")
        )
    if refused := minute.refused_otherwise:
        total = plural(sum(refused.values()), "request")
        found.append(Trouble(Severity.HURTS, f"{total} refused {in_minute}: {_causes(refused)}"))
    if minute.missed:
        total = plural(sum(minute.missed.values()), "deadline")
        found.append(Trouble(Severity.HURTS, f"{total} missed {in_minute}: {_causes(minute.missed)}"))
    if figures.paused is None and is_old(figures):
        found.append(Trouble(Severity.HURTS, f"a request has waited for {duration(figures.oldest_s)}"))
    return found


def _some_succeed(facts: Facts) -> bool:
    """Whether fewer requests failed in the last minute than were dispatched, apart from some in flight."""
    failed = sum(facts.minute.failed.values())
    return not failed or failed < ALL_FAIL_SHARE * facts.minute.dispatched


def is_old(figures: Figures) -> bool:
    """Whether the oldest request has waited for long, also compared with what is usual for the model."""
    oldest_s = figures.oldest_s or 0.0
    return oldest_s > OLD_S and oldest_s * 1000 > OLD_RATIO * (figures.p50_ms or 0.0)


def _of_the_past(facts: Facts) -> list[Trouble]:
    dead, newest_s = facts.figures.dead, facts.dead_newest_s
    if not dead:
        return []
    is_recent = newest_s is not None and newest_s < RECENT_S
    newest = f", the newest {duration(newest_s)} ago" if newest_s is not None else ""
    severity = Severity.HURTS if is_recent else Severity.NOTICE
    return [Trouble(severity, f"{plural(dead, 'dead letter')}{newest}")]


def _causes(counts: Mapping[str, int]) -> str:
    """Such as `120 RESOURCE_EXHAUSTED/queue_full, 3 early`."""
    largest = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{number:,} {name.replace('_', ' ')}" for name, number in largest[:3]]
    return ", ".join(shown) + (", ..." if len(largest) > len(shown) else "")


def summary_of(rows: Sequence[Row]) -> str:
    """All models in a sentence, which changes only when something happens: screen readers announce it."""
    if not rows:
        return "No model is registered; `carpool up square` serves one."
    counts = {level: sum(row.severity is level for row in rows) for level in Severity}
    parts = [
        f"{plural(counts[Severity.BROKEN], 'model')} broken" if counts[Severity.BROKEN] else "",
        f"{plural(counts[Severity.HURTS], 'model')} in trouble" if counts[Severity.HURTS] else "",
    ]
    told = ", ".join(filter(None, parts))
    return f"{told}, of {len(rows):,}." if told else f"{plural(len(rows), 'model')}, none in trouble."
