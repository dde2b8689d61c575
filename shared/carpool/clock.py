"""Redis's clock, as this process extrapolates it. No host's wall clock decides anything."""

from __future__ import annotations

import time
from collections.abc import Sequence


class RedisClock:
    """Redis's time in microseconds since the epoch, extrapolated by this host's monotonic clock."""

    def __init__(self) -> None:
        self._offset_us = 0

    def set(self, reply: Sequence[bytes], received_ns: int) -> None:
        """Follow a reply to TIME that was received at this monotonic time.

        The reply was on its way meanwhile, so this clock is behind Redis's by that much. It is never ahead:
        no request expires early.
        """
        redis_us = int(reply[0]) * 1_000_000 + int(reply[1])
        self._offset_us = redis_us - received_ns // 1000

    def now_us(self) -> int:
        """Microseconds since the epoch on Redis's clock."""
        return time.monotonic_ns() // 1000 + self._offset_us
