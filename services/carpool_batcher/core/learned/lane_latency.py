"""Latency models per lane: requests of one lane, such as long texts, may take ten times longer than others.

A lane uses the model of all lanes until enough of its own batches were executed. If the lane is faster than
that model says, the policy `deferred` could be trapped: it refuses all requests of the lane, since none seems
to be in time, so that nothing is executed and nothing is learned. The same holds where the very first batch
was slow because the model was cold. Therefore there are trials: if no request of a lane can be in time, and
nothing was learned of the lane recently, one batch is dispatched all the same. Trials take a small share of
the time.

Several batches in a row of a slow lane are no change of the model's speed. So what is known of all lanes
follows a change only where it is one for the lane, too.

Why: docs/decisions/0014.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Final

from carpool_batcher.core.learned.executed_share import ExecutedShares, ExecutionTimes, ExpectedTimes
from carpool_batcher.core.learned.latency import LatencyModel

LANES_MAX: Final = 64  # producers choose the names: the lanes that settled last are kept
LANE_BATCHES_MIN: Final = 4  # executed batches of a lane, before it uses its own model
LANE_MODEL_TRUST_US: Final = 100_000  # no trial sooner than this after the lane's last executed batch
TRIAL_PAUSE_RATIO: Final = 5.0  # the pause after a trial, in execution times of that trial


class LaneLatency:
    """What is learned of one lane, or of all: l(n), and the turnaround, from dispatch to settled."""

    def __init__(self) -> None:
        self.latency = LatencyModel()
        self._shares = ExecutedShares()
        self.turnaround_us = 0.0  # rises at once, falls slowly
        self.executed_batches = 0
        self.last_executed_us = 0

    @property
    def times(self) -> ExecutionTimes:
        """How long a batch of a size is expected to take, if as much of it is refused as of the latest."""
        return ExpectedTimes(self.latency, self._shares) if self._shares else self.latency

    def observe_share(self, size: int, executed: int) -> None:
        """Of a batch of `size` the model executed so many requests, at least one."""
        self._shares.observe(size, executed)

    def observe(
        self,
        size: int,
        turnaround_us: int,
        execution_us: int | None,
        now_us: int,
        *,
        is_usual: bool = False,
    ) -> bool:
        """A batch settled, of which `size` requests were executed; `execution_us` is None if nothing can be
        learned from its execution. Returns whether that says nothing of a change of speed; `is_usual`: it
        does not."""
        self.turnaround_us = max(turnaround_us, 0.9 * self.turnaround_us + 0.1 * turnaround_us)
        if execution_us is None:
            return True
        self.executed_batches += 1
        self.last_executed_us = now_us
        return not self.latency.observe(size, execution_us, is_usual=is_usual)


class LaneLatencies:
    """What is learned of all lanes together and of each lane. O(1) for each batch that settles.

    While only one lane has settled, what is known of all lanes and of that one is the same, and kept once.
    """

    def __init__(self) -> None:
        self.all_lanes = LaneLatency()
        self._only_lane: str | None = None  # while only this lane has settled
        self._lanes: OrderedDict[str, LaneLatency] = OrderedDict()  # the lane that settled last is last
        self._trial_lane: str | None = None  # of a trial in flight
        self._trial_us = 0  # when the last trial was dispatched, or settled
        self._trial_pause_us = 0  # the minimum time from then to the next trial, of any lane

    def of(self, lane: str) -> LaneLatency:
        """What applies to a lane: its own, once enough is known, or else that of all lanes."""
        return self._own(lane) or self.all_lanes

    def _own(self, lane: str) -> LaneLatency | None:
        """What is known of a lane, if it is enough."""
        own = self.all_lanes if lane == self._only_lane else self._lanes.get(lane)
        return None if own is None or own.executed_batches < LANE_BATCHES_MIN else own

    def observe(
        self, lane: str, size: int, turnaround_us: int, execution_us: int | None, now_us: int
    ) -> None:
        """A batch of a lane settled: see `LaneLatency.observe`."""
        if self._only_lane is None and not self._lanes:
            self._only_lane = lane
        is_usual = False
        if lane != self._only_lane:
            is_usual = self._observe_own(lane, size, turnaround_us, execution_us, now_us)
        self.all_lanes.observe(size, turnaround_us, execution_us, now_us, is_usual=is_usual)
        if lane == self._trial_lane:
            self._trial_lane = None
            # A batch that failed took time too, or a flood of them would be a trial each.
            took_us = turnaround_us if execution_us is None else execution_us
            self._trial_us, self._trial_pause_us = now_us, int(TRIAL_PAUSE_RATIO * took_us)

    def observe_share(self, lane: str, size: int, executed: int) -> None:
        """After `observe`: of a batch of `size` the model executed so many requests, at least one."""
        self.all_lanes.observe_share(size, executed)
        if lane != self._only_lane:
            self._lanes[lane].observe_share(size, executed)

    def _observe_own(
        self, lane: str, size: int, turnaround_us: int, execution_us: int | None, now_us: int
    ) -> bool:
        """Keep each lane by itself, from the second lane on. Returns whether this batch says nothing of a
        change of speed."""
        if self._only_lane is not None:
            self._lanes[self._only_lane] = copy.deepcopy(self.all_lanes)
            self._only_lane = None
        own = self._lanes.pop(lane, None) or LaneLatency()
        self._lanes[lane] = own
        if len(self._lanes) > LANES_MAX:
            self._lanes.popitem(last=False)
        return own.observe(size, turnaround_us, execution_us, now_us)

    def begin_trial(self, lane: str, now_us: int) -> bool:
        """Whether to dispatch a batch as a trial. The lane must have none in flight."""
        own = self._own(lane)
        is_trusted = own is not None and 0 <= now_us - own.last_executed_us < LANE_MODEL_TRUST_US
        if is_trusted or 0 <= now_us - self._trial_us < self._trial_pause_us:
            return False
        self._trial_lane = lane
        # The trial may never settle: pause as if it took as long as expected.
        self._trial_us, self._trial_pause_us = now_us, int(TRIAL_PAUSE_RATIO * self.of(lane).latency.of(1))
        return True
