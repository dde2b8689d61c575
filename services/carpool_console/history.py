"""The last ten minutes of a model, as far as somebody looked: figures, counts of the last minute, curves.

Pure: samples in, figures out. What is kept of a model is bounded, a few tens of kilobytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from carpool.errors import DEADLINE_EXCEEDED
from carpool.figures import SAMPLES_MAX, Figures, Requests, figures
from carpool.store.directory import ModelSample

POINTS_MAX: Final = 120
POINT_S: Final = 5.0  # between two points of a curve
GAP_S: Final = 3 * POINT_S  # after which a curve is interrupted
MINUTE_S: Final = 60.0
_MARKS_MAX: Final = 13
_TAKEOVERS_MAX: Final = 100
_IN_FLIGHT: Final = "/in_flight"  # the end of a reason for which requests end after they were dispatched


class Point(NamedTuple):
    """A model at one time, for curves; `at_s` is monotonic."""

    at_s: float
    waiting: int
    oldest_s: float
    in_per_s: float
    out_per_s: float
    p99_ms: float | None


class Minute(NamedTuple):
    """What happened in the last minute, or in as much of it as was seen: requests by cause."""

    over_s: float = 0.0
    missed: Mapping[str, int] = {}
    refused: Mapping[str, int] = {}
    failed: Mapping[str, int] = {}
    dispatched: int = 0
    dead: int = 0  # more dead letters than there were
    takeovers: int = 0  # how often a batcher became active

    @property
    def refused_otherwise(self) -> Mapping[str, int]:
        """Those that were refused for another reason than their deadline: these count as missed."""
        return {
            cause: number for cause, number in self.refused.items() if not cause.startswith(DEADLINE_EXCEEDED)
        }


class ModelHistory:
    """Samples of one model, newest last."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._samples: deque[tuple[float, ModelSample]] = deque(maxlen=SAMPLES_MAX)
        self._marks: deque[tuple[float, ModelSample]] = deque(maxlen=_MARKS_MAX)  # a few seconds apart
        self._takeovers_s: deque[float] = deque(maxlen=_TAKEOVERS_MAX)
        self.points: deque[Point] = deque(maxlen=POINTS_MAX)

    def add(self, at_s: float, sample: ModelSample) -> None:
        """Take a sample, at this monotonic time."""
        if (
            self._samples and at_s - self._samples[-1][0] > GAP_S
        ):  # nobody looked: rates would be of that time
            self._samples.clear()
            self._marks.clear()
        if self._samples and _has_taken_over(self._samples[-1][1], sample):
            self._takeovers_s.append(at_s)
        self._samples.append((at_s, sample))
        if not self._marks or at_s - self._marks[-1][0] >= POINT_S:
            self._marks.append((at_s, sample))
        if not self.points or at_s - self.points[-1].at_s >= POINT_S:
            now = self.figures
            self.points.append(
                Point(
                    at_s, now.waiting, now.oldest_s or 0.0, self.in_per_s or 0.0, now.requests_per_s or 0.0,
                    now.p99_ms,
                )
            )  # fmt: skip

    @property
    def figures(self) -> Figures:
        """The newest figures; rates over about five seconds. Processes that drain count, too: the batcher
        counts only those that take batches."""
        now = self._samples[-1][1]
        found = figures(self._model, self._samples[0][1], now)
        return found._replace(model_processes=now.model_processes)

    @property
    def in_per_s(self) -> float | None:
        """Requests that arrived, a second: those that are no longer waiting, and those that wait besides."""
        (began_s, before), (ended_s, now) = self._samples[0], self._samples[-1]
        if before.report is None or now.report is None or ended_s <= began_s:
            return None
        if _has_taken_over(before, now):
            return None
        left = now.report.requests - before.report.requests
        left += _refused_waiting(now.report.refused) - _refused_waiting(before.report.refused)
        more = now.report.gauges.waiting - before.report.gauges.waiting
        over_s = (now.report.at_us - before.report.at_us) / 1e6
        return max(0.0, (left + more) / over_s) if over_s > 0 else None

    @property
    def minute(self) -> Minute:
        """Counts of the last minute. Empty where the batcher took over meanwhile and counts from 0."""
        at_s, now = self._samples[-1]
        before = next(sample for taken_s, sample in self._marks if at_s - taken_s <= MINUTE_S)
        compared = figures(self._model, before, now)
        over_s = compared.over_s or 0.0
        dead = max(0, now.dead - before.dead)
        takeovers = sum(at_s - taken_s <= MINUTE_S for taken_s in self._takeovers_s)
        if before is now or over_s > MINUTE_S + GAP_S:  # since the batcher took over, perhaps hours ago
            return Minute(dead=dead, takeovers=takeovers)
        return Minute(
            over_s,
            missed=_counted(compared.missed, over_s),
            refused=_counted(compared.refused, over_s),
            failed=_counted(compared.failed, over_s),
            dispatched=round((compared.requests_per_s or 0.0) * over_s),
            dead=dead,
            takeovers=takeovers,
        )


def _has_taken_over(before: ModelSample, now: ModelSample) -> bool:
    """Whether another batcher is active than before, or the same one began anew."""
    if before.report is None or now.report is None:
        return False
    return (before.report.batcher, before.report.began_us) != (now.report.batcher, now.report.began_us)


def _refused_waiting(refused: Mapping[str, int]) -> int:
    return sum(number for reason, number in refused.items() if not reason.endswith(_IN_FLIGHT))


def _counted(requests: Mapping[str, Requests], over_s: float) -> dict[str, int]:
    counts = {name: round(one.per_s * over_s) for name, one in requests.items()}
    return {name: number for name, number in counts.items() if number}


def thinned(points: Sequence[Point], points_max: int) -> Sequence[Point]:
    """At most so many points, evenly spread, with the last one."""
    step = max(1, -(-len(points) // points_max))
    return points[::-1][::step][::-1]
