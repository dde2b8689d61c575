"""How fast batches go: of a model, and of each of its lanes, where sequences of one may be ten times longer.

A lane goes by what was learned of its own batches, and before there are enough of them by the model's. If it
is faster than that, it is in a trap: everybody is given up, nothing is computed, nothing is learned. So it is
where the first batch of all was slow because the model was cold. Hence trials: where nobody could be met, and
nothing was heard of the lane of late, a batch leaves all the same, for a small share of the time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from carpool_batcher.core.latency import LatencyModel

LANES: Final = 64  # names come from producers: those heard of last are remembered
ENOUGH: Final = 4  # batches of a lane, before it goes by them
BELIEVED_US: Final = 100_000  # so long after it was last seen to hold
PAUSE: Final = 5.0  # times what a trial took, before the next


class LaneLatency:
    """Of one lane, or of all: l(n), and how long a batch takes from dispatch to settled, of late."""

    def __init__(self) -> None:
        self.latency = LatencyModel()
        self.ride_us = 0.0
        self.computed = 0  # batches
        self.heard_us = 0  # when the last one settled

    def observe(self, size: int, took_us: int, compute_us: int, now_us: int) -> None:
        """A batch settled; `compute_us` 0: it is gone without having been computed."""
        self.ride_us = max(took_us, 0.9 * self.ride_us + 0.1 * took_us)
        if compute_us:
            self.latency.observe(size, compute_us)
            self.computed += 1
            self.heard_us = now_us


class LaneLatencies:
    """The model's, and its lanes'. O(1) for each batch that settles."""

    def __init__(self) -> None:
        self.model = LaneLatency()
        self._lanes: OrderedDict[str, LaneLatency] = OrderedDict()  # who was heard of last is last
        self._tried: str | None = None  # the lane of a trial of which nothing is heard yet
        self._pause_since_us = 0  # the last trial began, or was heard of
        self._pause_us = 0  # before the next one, of whichever lane

    def of(self, lane: str) -> LaneLatency:
        """What a lane goes by: its own, once that is known, or the model's."""
        own = self._lanes.get(lane)
        return self.model if own is None or own.computed < ENOUGH else own

    def observe(self, lane: str, size: int, took_us: int, compute_us: int, now_us: int) -> None:
        """A batch of a lane settled: see `LaneLatency.observe`."""
        own = self._lanes.pop(lane, None) or LaneLatency()
        self._lanes[lane] = own
        if len(self._lanes) > LANES:
            self._lanes.popitem(last=False)
        for pace in (self.model, own):
            pace.observe(size, took_us, compute_us, now_us)
        if lane == self._tried:
            self._tried = None
            self._pause_since_us, self._pause_us = now_us, int(PAUSE * compute_us)

    def begin_trial(self, lane: str, now_us: int) -> bool:
        """Whether a batch of a lane that has none in flight is to find out if its pace is still true."""
        pace = self.of(lane)
        believed = pace is not self.model and 0 <= now_us - pace.heard_us < BELIEVED_US
        if believed or 0 <= now_us - self._pause_since_us < self._pause_us:
            return False
        self._tried = lane
        # Until it is heard of, which may be never: as if it took as long as is believed.
        self._pause_since_us, self._pause_us = now_us, int(PAUSE * pace.latency.of(1))
        return True
