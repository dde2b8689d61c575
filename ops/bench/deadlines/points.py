"""The models and the points at which goodput is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from carpool_batcher.core.learned.curve import Curve
from carpool_cli.tuning.arrivals import Traffic, bursty, poisson
from carpool_cli.tuning.simulator import World

DEADLINES_MS: Final = (15, 50)
# Short phases, so that a trace has several bursts.
ARRIVALS: Final[dict[str, Traffic]] = {"Poisson": poisson, "bursty": partial(bursty, phase_s=0.1)}


class Model(NamedTuple):
    """A model, and what it takes for a batch of b. `name` is l(b) in ms as text."""

    name: str
    l_us: Callable[[int], float]
    max_batch_size: int = 256

    @property
    def curve(self) -> Curve:
        """l(b) at each size."""
        sizes = range(1, self.max_batch_size + 1)
        return Curve(sizes, [self.l_us(size) for size in sizes])


def linear(intercept_us: float, slope_us: float) -> Model:
    """A model whose l(b) is a line."""
    name = f"{intercept_us / 1000:g} + {slope_us / 1000:g} b"
    return Model(name, lambda size: intercept_us + slope_us * size)


def padded(size: int) -> int:
    """The size to which a model pads a batch: 8, 16 or 32."""
    return next(size_padded for size_padded in (8, 16, 32) if size <= size_padded)


def square_us(size: int) -> float:
    """A logarithm, as of the model `square` with what surrounds it."""
    return 100 + 1000 * math.log(size + 1)


FLAT_LINE: Final = linear(5000, 50)
LINE: Final = linear(2000, 1000)
SQUARE: Final = Model("0.1 + log(b + 1)", square_us, 64)
# For the real system: with larger batches it is so efficient that producers and services use all CPUs.
SMALL_SQUARE: Final = Model("0.1 + log(b + 1), b up to 8", square_us, 8)
# Four processes would execute 14,000 requests/s of that, and two CPUs have nothing left for the producer.
SLOW_SQUARE: Final = Model("0.3 + 3 log(b + 1), b up to 8", lambda size: 3 * square_us(size), 8)
STEPS: Final = Model("4 + 0.25 b, b padded to 8, 16, 32", lambda size: 4000 + 250 * padded(size), 32)
MODELS: Final = {model.name: model for model in (FLAT_LINE, LINE, SQUARE, SMALL_SQUARE, SLOW_SQUARE, STEPS)}


class Point(NamedTuple):
    """A point of the grid. `model` is a name in MODELS; a load of 1 is the highest rate of the bound U1."""

    model: str
    workers: int
    deadline_ms: int
    arrivals: str
    load: float

    @property
    def description(self) -> str:
        """The point as text."""
        workers = f"{self.workers} worker{'s' * (self.workers > 1)}"
        return f"{self.model} ms, {workers}, {self.deadline_ms} ms, {self.arrivals}, load {self.load:g}"

    @property
    def max_batch_size(self) -> int:
        """That of the model."""
        return MODELS[self.model].max_batch_size

    @property
    def bound_name(self) -> str:
        """The bound that goodput is a share of."""
        return "U3" if self.workers == 1 else "U1"


def world_of(point: Point) -> World:
    """The simulated environment of the scheduler."""
    return World(point.workers, curve=MODELS[point.model].curve)
