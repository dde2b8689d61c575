"""How long a model process has been executing the same thing, and what follows. Time is an argument.

Why: docs/decisions/0064.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import Enum
from typing import Final

REPORT_S: Final = 10.0  # a longer execution is reported, and again whenever it has taken twice as long


class Due(Enum):
    """What an execution that takes long makes necessary now."""

    NOTHING = "nothing"
    REPORT = "a person should know of it"
    END = "it has taken longer than its limit"


class ExecutionWatch:
    """Watches one model process: tell it often what that executes. `over_at_s`: when this reaches its limit;
    infinity without one, or if it executes nothing."""

    def __init__(self) -> None:
        self._executed: Hashable = None
        self._since_s = 0.0
        self._report_s = REPORT_S
        self.over_at_s = float("inf")

    def observe(self, executed: Hashable, limit_ms: int | None, now_s: float) -> Due:
        """The process executes this; None: nothing. As long as it is the same, its time runs."""
        if executed != self._executed:
            self._executed, self._since_s, self._report_s = executed, now_s, REPORT_S
        if executed is None or limit_ms is None:
            self.over_at_s = float("inf")
        else:
            self.over_at_s = self._since_s + limit_ms / 1000
            if now_s > self.over_at_s:
                return Due.END
        if executed is None or now_s - self._since_s < self._report_s:
            return Due.NOTHING
        self._report_s *= 2
        return Due.REPORT

    def passed_s(self, now_s: float) -> float:
        """How long it has been executing what was observed last."""
        return now_s - self._since_s
