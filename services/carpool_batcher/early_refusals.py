"""Refusals of requests that can no longer be in time, until they are answered together.

To answer one costs as much as to dispatch a batch. A system that is nearly overloaded refuses many requests
early, each at another moment. Answered one by one they would take the CPU time of those that could be in
time, which would then be late, and be refused too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from carpool.messages import Refusal

POSTPONED_US: Final = 2000  # a producer learns of it still before the deadline, or soon after
POSTPONED_MAX: Final = 64  # then they are answered at once


class EarlyRefusals:
    """`due_us`: when those that are postponed are to be answered; None if there are none."""

    def __init__(self) -> None:
        self.due_us: int | None = None
        self._postponed: list[Refusal] = []

    def postpone(self, refusals: Iterable[Refusal], now_us: int) -> list[Refusal]:
        """Postpone the early ones of these refusals. Returns those to answer now."""
        answered: list[Refusal] = []
        for refusal in refusals:
            # With a request of a sequence more is recorded than its answer, and at the same moment.
            run = refusal.run
            is_postponed = refusal.reason == "early" and run is not None and run.sequence is None
            (self._postponed if is_postponed else answered).append(refusal)
        if not self._postponed:
            return answered
        if self.due_us is None:
            self.due_us = now_us + POSTPONED_US
        if now_us < self.due_us and len(self._postponed) < POSTPONED_MAX:
            return answered
        postponed, self._postponed, self.due_us = self._postponed, [], None
        # Meanwhile the rest of an entry may have been put back in others.
        return answered + [refusal.where_it_is() for refusal in postponed]
