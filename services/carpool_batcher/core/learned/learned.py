"""All that is learned of a model from the batches that settled, and what that makes expect."""

from __future__ import annotations

from carpool.messages.settled import BatchSettled
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.doubtful_producers import DoubtfulProducers
from carpool_batcher.core.learned.executed_share import ExecutionTimes
from carpool_batcher.core.learned.lane_latency import LaneLatencies
from carpool_batcher.core.learned.latency import LatencyModel
from carpool_batcher.core.learned.request_costs import RequestCosts
from carpool_batcher.core.learned.transit import Transit, TransitBySize


class Learned:
    """How long batches take to execute and to deliver, and which producers send what is not executed.

    `batches`: from how many it was learned; what was forecast before may differ. `producers`: see
    `learned.doubtful_producers`. `costs`: see `learned.request_costs`.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.producers = DoubtfulProducers()
        self.costs = RequestCosts()
        self._lanes = LaneLatencies()
        self._transit = Transit()

    # --- learning ------------------------------------------------------------------------------------------

    def observe(self, batch: InFlightBatch, event: BatchSettled) -> None:
        """A batch settled. If its execution was not a normal one, nothing is learned from it but the
        turnaround, and who sent what was not executed."""
        self.batches += 1
        executed, execution_us, settled_us = event.executed, event.occupied_us, event.settled_us
        if event.of_producers or self.producers:
            # If the execution was not normal, it is unknown whether the others' requests would be executed.
            self.producers.observe(batch.producers if executed else (), event.of_producers)
        turnaround_us = settled_us - batch.dispatched_us
        is_normal = executed > 0 and execution_us > 0
        self._lanes.observe(
            batch.lane, executed, turnaround_us, execution_us if is_normal else None, settled_us
        )
        if is_normal:
            if batch.executable:
                self._lanes.observe_share(batch.lane, batch.executable, min(executed, batch.executable))
            round_trip_us = turnaround_us - execution_us - event.waited_us
            self._transit.observe_round_trip(batch.size, round_trip_us, batch.dispatched_us, settled_us)

    def observe_delivery(self, delivery_us: int) -> None:
        """The batcher learned of a batch this long after it settled."""
        self._transit.observe_delivery(delivery_us)

    def begin_trial(self, lane: str, now_us: int) -> bool:
        """Whether to dispatch a batch of a lane although none of its requests can be in time, to learn its
        latency (`learned.lane_latency`). The lane must have none in flight."""
        return self._lanes.begin_trial(lane, now_us)

    # --- execution -----------------------------------------------------------------------------------------

    @property
    def latency(self) -> LatencyModel:
        """l(n) over all lanes."""
        return self._lanes.all_lanes.latency

    @property
    def times(self) -> ExecutionTimes:
        """How long batches of any lane are expected to take."""
        return self._lanes.all_lanes.times

    def times_of(self, lane: str) -> ExecutionTimes:
        """How long batches of a lane are expected to take; those of all lanes while too little is known."""
        return self._lanes.of(lane).times

    def expected_us(self, lane: str, executable: int) -> int:
        """How long a batch of a lane is expected to take of which the model executes `executable`
        requests."""
        return self.times_of(lane).of(executable) if executable else 0

    def turnaround_us(self, lane: str) -> float:
        """How long a batch of a lane recently took from dispatch to settled."""
        return self._lanes.of(lane).turnaround_us

    @property
    def turnaround_all_us(self) -> float:
        """How long a batch of any lane recently took from dispatch to settled."""
        return self._lanes.all_lanes.turnaround_us

    # --- transit -------------------------------------------------------------------------------------------

    @property
    def round_trip_us(self) -> int:
        """The median time from dispatch to settled, less the execution."""
        return self._transit.round_trips.median_us

    @property
    def lead_us(self) -> int:
        """How long before a batch settles the next one is dispatched to its process."""
        return self._transit.round_trips.at_most_us

    @property
    def delivery_us(self) -> int:
        """The median time from when a batch settles until its producer has the result."""
        return self._transit.deliveries.median_us

    @property
    def transit_us(self) -> tuple[int, int]:
        """Round trip and delivery together, of batches of any size: what half of them do not exceed, and what
        nine of ten do not."""
        return self._transit.usual_us, self._transit.at_most_us

    @property
    def transit_by_size(self) -> TransitBySize:
        """Round trip and delivery together, by the magnitude of the size."""
        return self._transit.by_size
