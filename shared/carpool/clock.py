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

    A reply to TIME tells that Redis's clock showed this time at some moment between sending and receiving, so
    there is an earliest and a latest time that it can show now. The extrapolated clock shows the earliest: it
    is never ahead, and no request expires early; but it is behind by as long as the reply took, which on a
    busy host may be milliseconds. So each reply only narrows what is known from earlier ones. If it
    contradicts them, Redis's clock was set, or another server answers, and the reply alone counts.
    (Marzullo's algorithm for one source: intervals are intersected.)

    Other times that this process sees, such as those in IDs, also say how late it is at least. With
    `reached`, nothing that was seen is in the future.
    """

    def __init__(self) -> None:
        self._offset_us = 0.0  # the earliest time that Redis's clock can show, less this host's monotonic one
        self._latest_offset_us = 0.0
        self._set_us: float | None = None

    def set(self, reply: Sequence[bytes], sent_ns: int, received_ns: int) -> None:
        """Follow a reply to TIME that was asked for and received at these monotonic times."""
        redis_us = int(reply[0]) * 1_000_000 + int(reply[1])
        received_us = received_ns / 1000
        # TIME is cut to whole microseconds: its clock showed less than one more.
        earliest_us, latest_us = redis_us - received_us, redis_us + 1 - sent_ns / 1000
        if self._set_us is not None:
            drift_us = DRIFT_MAX * (received_us - self._set_us)
            known_us, known_latest_us = self._offset_us - drift_us, self._latest_offset_us + drift_us
            if known_us <= latest_us and earliest_us <= known_latest_us:
                earliest_us, latest_us = max(earliest_us, known_us), min(latest_us, known_latest_us)
        self._offset_us, self._latest_offset_us, self._set_us = earliest_us, latest_us, received_us

    def reached(self, redis_us: int) -> None:
        """Redis's clock showed this time before now: it is in an ID that Redis made, or in what another
        process made when its clock showed it.

        A time that cannot be true is ignored: a producer may choose an ID in the future, and the IDs that
        Redis makes go on from there.
        """
        if self._set_us is None:
            return
        now_us = time.monotonic_ns() / 1000
        offset_us = redis_us - now_us
        if self._offset_us < offset_us <= self._latest_offset_us + DRIFT_MAX * (now_us - self._set_us):
            self._offset_us = offset_us

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
