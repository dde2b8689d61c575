"""Refusals of requests that can no longer be in time, until they are answered together.

To answer one costs as much as to dispatch a batch. A system that is nearly overloaded refuses many requests
early, each at another moment. Answered one by one they would take the CPU time of those that could be in
time, which would then be late, and be refused too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from carpool.messages import Refusal

HELD_US: Final = 2000  # a producer learns of it so much later, and still before the deadline or soon after
HELD_MAX: Final = 64  # then they are answered at once


class EarlyRefusals:
    """`due_us`: when those that are held are to be answered; None if there are none."""

    def __init__(self) -> None:
        self.due_us: int | None = None
        self._held: list[Refusal] = []

    def hold(self, refusals: Iterable[Refusal], now_us: int) -> list[Refusal]:
        """Hold the early ones of these refusals. Returns those to answer now."""
        answered: list[Refusal] = []
        for refusal in refusals:
            # With a request of a sequence more is recorded than its answer, and at the same moment.
            is_held = refusal.reason == "early" and refusal.run is not None and refusal.run.sequence is None
            (self._held if is_held else answered).append(refusal)
        if not self._held:
            return answered
        if self.due_us is None:
            self.due_us = now_us + HELD_US
        if now_us < self.due_us and len(self._held) < HELD_MAX:
            return answered
        held, self._held, self.due_us = self._held, [], None
        # Meanwhile the rest of an entry may have been put back in others.
        return answered + [refusal.where_it_is() for refusal in held]
