"""Producers on whose requests the model often raises: these are executed apart from those of others.

If the model raises, its frame is halved until the failing requests are alone, and all requests of the frame
are late. One producer's failing requests, one in each batch, would so delay those of all others. Apart, they
delay each other.

Why: docs/decisions/0027.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from carpool.messages.batches import BatchedRun
from carpool.producer_ratios import ProducerRatios

APART_RATIO_MIN: Final = 0.5  # of a producer's recent frames, these raised: halving costs more than a frame


class RaisingProducers:
    """How often the model recently raised on requests of each producer. Not for two threads."""

    def __init__(self) -> None:
        self._ratios = ProducerRatios()

    def __len__(self) -> int:
        """Of how many producers something is remembered."""
        return len(self._ratios)

    def is_apart(self, run: BatchedRun) -> bool:
        """Whether requests of this run's producer are to be executed apart."""
        return self._ratios.of(run.producer) >= APART_RATIO_MIN

    def observe(self, runs: Collection[BatchedRun], raised: Collection[BatchedRun]) -> None:
        """A frame of requests of these runs was executed; the model raised on requests of some of them."""
        blamed = {run.producer for run in raised}
        for producer in {run.producer for run in runs}:
            self._ratios.observe(producer, 1.0 if producer in blamed else 0.0)
