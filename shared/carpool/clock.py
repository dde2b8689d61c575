"""Redis's clock, reckoned by this process between two looks at it. No host's wall clock decides anything."""

from __future__ import annotations

import time
from collections.abc import Sequence


class RedisClock:
    """Redis's time in microseconds since the epoch, extrapolated by this host's monotonic clock."""

    def __init__(self) -> None:
        self._offset_us = 0

    def set(self, reply: Sequence[bytes], heard_ns: int) -> None:
        """Take over a reply to TIME, heard at this monotonic time. It was true a trip before: this clock is
        behind Redis's by that much and never ahead, so that nothing expires early."""
        redis_us = int(reply[0]) * 1_000_000 + int(reply[1])
        self._offset_us = redis_us - heard_ns // 1000

    def now_us(self) -> int:
        """Microseconds since the epoch on Redis's clock."""
        return time.monotonic_ns() // 1000 + self._offset_us
