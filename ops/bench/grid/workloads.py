"""What is measured: the workloads, and the orders to the producer process that each consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class Workload:
    """One workload. A system is started once for it in each round, and then carries out its orders."""

    name: str
    title: str
    description: str
    model: str  # a name in `models.MODELS`
    batch_size: int
    orders: Mapping[str, Mapping[str, Any]]  # by cell
    once: bool = False  # only in the first round, because it takes long


IN_FLIGHT: Final = (1, 64, 1024)
RATES: Final = (500, 2000, 4000, 7000)
ARTICLE_BATCH_SIZE: Final = 200
LINEAR_BATCH_SIZE: Final = 256

_SECONDS: Final = 1.0  # of a measurement; wrk measures whole seconds
_RATE_SECONDS: Final = 2.0
_SQUARES: Final = 880
_BURST: Final = 100_000
_BURST_LIMIT_S: Final = 10.0

WORKLOADS: Final = {
    workload.name: workload
    for workload in (
        Workload(
            "overhead",
            "Overhead",
            "A model that does nothing, on float32[128], in batches of up to 64: all that is measured is "
            "the cost of the system. A number of requests is in flight at all times.",
            "noop",
            64,
            {
                str(in_flight): {"load": "closed", "in_flight": in_flight, "seconds": _SECONDS}
                for in_flight in IN_FLIGHT
            },
        ),
        Workload(
            "accelerator",
            "Like an accelerator",
            "A model that sleeps 5 ms + 0.05 ms for each request of a batch of up to 256, and uses no CPU. "
            "Requests arrive at random (Poisson). A latency is counted from the time at which the request "
            "was due.",
            "sleeper",
            LINEAR_BATCH_SIZE,
            {str(rate): {"load": "poisson", "per_second": rate, "seconds": _RATE_SECONDS} for rate in RATES},
        ),
        Workload(
            "images",
            "Images",
            "Bodies of 150,000 bytes and results of 8, 32 in flight, batches of up to 64.",
            "image",
            64,
            {"32": {"load": "closed", "in_flight": 32, "seconds": _SECONDS}},
        ),
        Workload(
            "squares",
            "The articles' 880 squares",
            "880 numbers to square, sent at once to a model that sleeps 1 ms * log(n + 1) for a batch of n, "
            "in batches of up to 200. Time until the last result, the median of up to five in each round; "
            "every result is checked.",
            "square",
            ARTICLE_BATCH_SIZE,
            {
                "880": {
                    "load": "burst",
                    "requests": _SQUARES,
                    "distinct": _SQUARES,
                    "repeat": 5,
                    "limit_s": _BURST_LIMIT_S,
                }
            },
        ),
        Workload(
            "burst",
            "100,000 requests at once",
            "100,000 requests of the first workload, sent at once: time until the last result, and the peak "
            f"of each process's resident memory. After {_BURST_LIMIT_S:g} s the number of answers is "
            "counted. HTTP clients and FastStream send at most 1,024 at a time.",
            "noop",
            64,
            {"100000": {"load": "burst", "requests": _BURST, "distinct": 100, "limit_s": _BURST_LIMIT_S}},
            once=True,
        ),
    )
}
