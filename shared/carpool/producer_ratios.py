"""How much of what each producer sent lately was of some kind. Pure, and of bounded size."""

from __future__ import annotations

from collections.abc import KeysView
from typing import Final

from carpool.messages.requests import Producer

LATEST_WEIGHT: Final = 0.25  # of the latest observation in a ratio
FORGOTTEN_RATIO: Final = 0.05
PRODUCERS_MAX: Final = 1000


class ProducerRatios:
    """A ratio of 0 to 1 for each producer, in which older observations count less and less; 0 for others.

    Small ratios are forgotten, and over PRODUCERS_MAX those that were not observed for longest.
    """

    def __init__(self) -> None:
        self._ratios: dict[Producer, float] = {}  # the one that was observed last is last

    def __len__(self) -> int:
        """Of how many producers something is remembered."""
        return len(self._ratios)

    def of(self, producer: Producer) -> float:
        """The ratio of a producer."""
        return self._ratios.get(producer, 0.0)

    def remembered(self) -> KeysView[Producer]:
        """The producers of whom something is remembered."""
        return self._ratios.keys()

    def observe(self, producer: Producer, latest: float) -> None:
        """The ratio in what a producer sent last is this one."""
        before = self._ratios.pop(producer, 0.0)
        ratio = before + LATEST_WEIGHT * (latest - before)
        if ratio >= FORGOTTEN_RATIO:
            self._ratios[producer] = ratio
        if len(self._ratios) > PRODUCERS_MAX:
            del self._ratios[next(iter(self._ratios))]
