"""The report that an active batcher publishes once a second, for `carpool top` and `carpool config`.

Counters begin when the batcher takes the lease: a rate is the difference of two reports of the same batcher.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError


class Gauges(NamedTuple):
    """A model as its active batcher sees it now.

    `oldest_s`: the age of the request that has waited longest; 0 if none waits.
    `held`: results withheld until earlier ones are delivered (`preserve_ordering`).
    """

    waiting: int
    waiting_bytes: int
    oldest_s: float
    batches_in_flight: int
    requests_in_flight: int
    model_processes: int
    held: int = 0


@dataclass(frozen=True, slots=True)
class BatcherReport:
    """What is published. Counters are since `began_us`; times are Redis's."""

    batcher: str
    began_us: int
    at_us: int
    gauges: Gauges
    batches: dict[str, int]  # dispatched, by reason
    requests: int  # in those batches
    fill_percent: int  # the sum of how full those batches were
    refused: dict[str, int]  # requests answered without a result, by "STATUS/reason"
    learned: tuple[float, float, int] | None  # of l(n): intercept and slope in µs; the only size seen, or 0
    quantiles_us: tuple[int, int] | None  # p50 and p99 of the last 10 to 20 s
    unheeded: str = ""  # why the settings in Redis are not followed, where they are not
    policies: tuple[str, ...] = ()  # custom policies that this batcher has loaded

    def encode(self) -> str:
        """As JSON."""
        return json.dumps({**asdict(self), "gauges": self.gauges._asdict()}, separators=(",", ":"))

    @staticmethod
    def decode(report: bytes) -> BatcherReport | None:
        """What `encode` made; None if it is not understood, as from another version."""
        try:
            return TypeAdapter(BatcherReport).validate_json(report)
        except ValidationError:
            return None
