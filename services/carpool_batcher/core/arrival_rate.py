"""How often requests arrive: the mean gap between recent arrivals, weighted exponentially."""

from __future__ import annotations

import math


class ArrivalRate:
    """The arrivals of the recent past. It is told their total from time to time, O(1) each time."""

    def __init__(self) -> None:
        self._observed: tuple[int, int] | None = None  # arrivals so far, and when (us)
        # Arrivals, and the time in which they arrived, weighted by their age: of a pause, at most the memory.
        self._recent = 0.0
        self._recent_us = 0.0

    def observe(self, arrived: int, now_us: int, memory_us: float) -> None:
        """By `now_us`, `arrived` requests had arrived. What is `memory_us` older counts e times less."""
        if self._observed is not None:
            arrived_before, observed_us = self._observed
            weight = math.exp(min(0, observed_us - now_us) / memory_us) if memory_us else 0.0
            self._recent *= weight
            self._recent_us = self._recent_us * weight + memory_us * (1 - weight)
            self._recent += arrived - arrived_before
        self._observed = arrived, now_us

    @property
    def gap_us(self) -> float:
        """The mean time from one arrival to the next; 0 while unknown."""
        return self._recent_us / self._recent if self._recent else 0.0
