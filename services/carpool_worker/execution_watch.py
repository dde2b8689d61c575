"""How long a model process has been executing the same thing, and what follows. Time is an argument."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

REPORT_S: Final = 10.0  # a longer execution is reported, and again whenever it has taken twice as long


class ExecutionWatch:
    """Watches one model process. `follow` it often; then `is_over` and `is_to_report` say what is due."""

    def __init__(self) -> None:
        self._executed: Hashable = None
        self._since_s = 0.0
        self._limit_s = float("inf")
        self._report_s = REPORT_S

    def follow(self, executed: Hashable, limit_ms: int | None, now_s: float) -> None:
        """The process executes this; None: nothing. As long as it is the same, its time runs."""
        if executed != self._executed:
            self._executed, self._since_s, self._report_s = executed, now_s, REPORT_S
        self._limit_s = float("inf") if limit_ms is None else limit_ms / 1000

    def passed_s(self, now_s: float) -> float:
        """How long it has been executing; 0 if it executes nothing."""
        return 0.0 if self._executed is None else now_s - self._since_s

    def is_over(self, now_s: float) -> bool:
        """Whether it has taken longer than the limit."""
        return self.passed_s(now_s) > self._limit_s

    def is_to_report(self, now_s: float) -> bool:
        """Whether it has taken so long that a person should know. True once for each time."""
        if self.passed_s(now_s) < self._report_s:
            return False
        self._report_s *= 2
        return True

    def left_s(self, now_s: float) -> float:
        """How long until the limit; infinity without one."""
        return float("inf") if self._executed is None else max(0.0, self._since_s + self._limit_s - now_s)
