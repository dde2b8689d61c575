"""How often requests arrive, of late: the mean gap between arrivals, weighted exponentially."""

from __future__ import annotations

import math


class ArrivalRate:
    """The arrivals of the recent past. Told of their total from time to time, O(1) each time."""

    def __init__(self) -> None:
        self._arrived = 0
        self._observed_us: int | None = None
        self._recent = 0.0  # arrivals, and the time in which they arrived, both weighted by their age
        self._recent_us = 0.0

    def observe(self, arrived: int, now_us: int, memory_us: float) -> None:
        """Of all requests so far, `arrived` had arrived by `now_us`. What is `memory_us` older counts e times
        less."""
        elapsed_us = 0 if self._observed_us is None else max(0, now_us - self._observed_us)
        if elapsed_us:
            weight = math.exp(-elapsed_us / memory_us) if memory_us else 0.0
            self._recent *= weight
            self._recent_us = self._recent_us * weight + elapsed_us
        self._recent += arrived - self._arrived
        self._arrived, self._observed_us = arrived, now_us

    @property
    def gap_us(self) -> float:
        """The mean time from one arrival to the next; 0 before time has passed."""
        return self._recent_us / self._recent if self._recent else 0.0
