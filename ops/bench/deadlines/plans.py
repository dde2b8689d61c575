"""Which runs to do on the real system, and in which order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Final, NamedTuple

from deadlines.bounds import u1_per_s
from deadlines.flood import FLOODS
from deadlines.points import ARRIVALS, DEADLINES_MS, LINE, SLOW_SQUARE, SMALL_SQUARE, STEPS, Point, world_of

LEARNING_S: Final = 6.0  # of a run, which count for nothing: the batcher learns l(b)
COUNTED_REQUESTS_MAX: Final = 20_000  # of a run: bound and virtual time of more take minutes
SEED: Final = 7
NO_FLOOD: Final = "none"
# By name: the model for one worker, and the one for several.
REAL_MODELS: Final = {"line": (LINE, LINE), "square": (SMALL_SQUARE, SLOW_SQUARE), "steps": (STEPS, STEPS)}
FLOODED_POINTS: Final = tuple(Point(LINE.name, 1, 50, "Poisson", load) for load in (0.6, 0.9))


class Plan(NamedTuple):
    """A run to do. `flood`: a name in FLOODS; NO_FLOOD for a run to compare floods with, else empty."""

    point: Point
    policy: str
    flood: str = ""

    @property
    def description(self) -> str:
        """The plan as text."""
        beside = f", flood: {self.flood}" * bool(self.flood)
        return f"{self.point.description}, {self.policy}{beside}"

    def due_us(self, seconds: float) -> list[int]:
        """When to send requests: those of the learning, and then those that count, for at most `seconds`."""
        point = self.point
        rate = point.load * u1_per_s(world_of(point), 1000 * point.deadline_ms, point.max_batch_size)
        number = int(rate * LEARNING_S) + min(int(rate * seconds), COUNTED_REQUESTS_MAX)
        return [arrival.at_us for arrival in ARRIVALS[point.arrivals](rate, number, SEED)]


class Choice(NamedTuple):
    """Which runs to do: keys of REAL_MODELS and of ARRIVALS, floods, and `rounds` of each."""

    models: Sequence[str] = tuple(REAL_MODELS)
    workers: Sequence[int] = (1, 2, 4)
    deadlines: Sequence[int] = DEADLINES_MS
    arrivals: Sequence[str] = tuple(ARRIVALS)
    loads: Sequence[float] = (0.6, 0.9, 1.2, 1.5)
    policies: Sequence[str] = ("deferred", "eager")
    floods: Sequence[str] = tuple(FLOODS)
    seconds: float = 12.0
    rounds: int = 1

    def plans(self, done: Sequence[Plan]) -> list[Plan]:
        """The runs to do, but for those that are done: policies, or floods, take turns at each point.

        Where one of them lacks a run, all of them have it again.
        """
        counts = Counter(done)
        plans: list[Plan] = []
        for turn in self._turns():
            rounds = self.rounds - min(self.rounds, *(counts[plan] for plan in turn))
            for number in range(rounds):
                plans += turn if number % 2 == 0 else turn[::-1]
        return plans

    def _turns(self) -> Iterator[list[Plan]]:
        """What takes turns: the plans of a point."""
        of_point = product(self.models, self.workers, self.deadlines, self.arrivals, self.loads)
        for model, workers, deadline_ms, arrivals, load in of_point:
            point = Point(REAL_MODELS[model][workers > 1].name, workers, deadline_ms, arrivals, load)
            yield [Plan(point, policy) for policy in self.policies]
        for point in FLOODED_POINTS if self.floods else ():
            yield [Plan(point, "deferred", name) for name in (NO_FLOOD, *self.floods)]
