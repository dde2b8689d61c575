"""Redis's clock, as this process extrapolates it. No host's wall clock decides anything.

Why: docs/decisions/0003.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

DRIFT_MAX: Final = 1e-4  # by how much one second of this host and one of Redis's may differ


class RedisClock:
    """Redis's time in microseconds since the epoch, extrapolated by this host's monotonic clock.

    A reply to TIME tells that Redis's clock showed this time at some moment between sending and receiving. If
    it had been shown at receiving, the extrapolated clock is never ahead, and no request expires early; but
    it is behind by as long as the reply took, which on a busy host may be milliseconds. So a reply that took
    longer than an earlier one does not set the clock back, unless the clock must be ahead: then Redis's clock
    was set back, or another server answers. (Marzullo's algorithm for one source: intervals are intersected.)
    """

    def __init__(self) -> None:
        self._offset_us = 0.0
        self._set_us: float | None = None

    def set(self, reply: Sequence[bytes], sent_ns: int, received_ns: int) -> None:
        """Follow a reply to TIME that was asked for and received at these monotonic times."""
        redis_us = int(reply[0]) * 1_000_000 + int(reply[1])
        received_us = received_ns / 1000
        behind_us = redis_us - received_us
        if self._set_us is not None:
            kept_us = self._offset_us - DRIFT_MAX * (received_us - self._set_us)
            # TIME is cut to whole microseconds: its clock showed less than one more.
            if behind_us < kept_us <= redis_us + 1 - sent_ns / 1000:
                behind_us = kept_us
        self._offset_us, self._set_us = behind_us, received_us

    @property
    def ahead_us(self) -> int:
        """Redis's time less that of this host's monotonic clock, which all processes of the host share."""
        return int(self._offset_us)

    @property
    def wall_ahead_us(self) -> int:
        """What this host's wall clock (`time.time`) shows, less Redis's time."""
        return time.time_ns() // 1000 - self.now_us()

    def now_us(self) -> int:
        """Microseconds since the epoch on Redis's clock."""
        return int(time.monotonic_ns() / 1000 + self._offset_us)
