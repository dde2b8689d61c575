"""What every service measures. prometheus-client counts and renders; `health_server` serves it.

Durations and sizes are counted here, in integers and a batch at a time: prometheus-client's `observe` costs
0.8 µs a request, this costs 0.1. ops/prometheus/README.md documents every metric.

Why: docs/decisions/0030.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Final

from carpool.prometheus import (
    Collector,
    CollectorRegistry,
    Counter,
    GCCollector,
    HistogramMetricFamily,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    floatToGoString,
)
from carpool.store.connection import CommandError, LinkError

# From a request that does not wait to a model that takes minutes; about three bounds for each factor of ten.
DURATIONS_US: Final = (
    100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000,
    1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000, 300_000_000,
)  # fmt: skip
SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PERCENTS: Final = (10, 25, 50, 75, 90, 99, 100)
# Scripts and modules may return error codes of their own, so a label for each code would be unbounded.
REDIS_ERROR_KINDS: Final = frozenset(
    ("link", "OOM", "NOPERM", "NOAUTH", "WRONGPASS", "READONLY", "LOADING", "BUSY", "MASTERDOWN", "MISCONF",
     "NOREPLICAS", "WRONGTYPE", "NOGROUP", "CLUSTERDOWN", "MOVED", "CROSSSLOT", "ERR", "other")
)  # fmt: skip


class BucketCounts:
    """How many integers fell into each bucket of a histogram. Safe for any number of threads."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0
        self._lock = threading.Lock()

    def observe(self, values: Sequence[int]) -> None:
        """Count these values, in the unit of the bounds. A value equal to a bound is below it. O(values)."""
        bounds, counts = self._bounds, self._counts
        with self._lock:
            for value in values:
                counts[bisect_left(bounds, value)] += 1
            self._sum += sum(values)

    def observe_equal(self, value: int, number: int) -> None:
        """Count `number` values that are equal. O(log bounds)."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += number
            self._sum += number * value

    def snapshot(self) -> tuple[list[int], int]:
        """The count of each bucket, the last one above all bounds; and the sum of all values."""
        with self._lock:
            return list(self._counts), self._sum

    @property
    def sum(self) -> int:
        """The sum of all values."""
        return self._sum


class Histogram(Collector):
    """A Prometheus histogram of integers, one per model.

    `unit` converts a value for display: microseconds are shown as seconds with the unit 1e-6.
    """

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[int], unit: float, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._unit = unit
        self._counts: dict[str, BucketCounts] = {}
        registry.register(self)

    def of(self, model: str) -> BucketCounts:
        """The counts of one model."""
        return self._counts.setdefault(model, BucketCounts(self._bounds))

    def forget(self, model: str) -> None:
        """Export nothing of this model any more."""
        self._counts.pop(model, None)

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Called by prometheus-client for each scrape. Its buckets are cumulative."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=("model",))
        bounds = [float(f"{bound * self._unit:.6g}") for bound in self._bounds]  # 0.0001, not 9.999...e-05
        edges = [*map(floatToGoString, bounds), "+Inf"]
        for model, model_counts in list(self._counts.items()):
            counts, total = model_counts.snapshot()
            below, buckets = 0, []
            for edge, count in zip(edges, counts, strict=True):
                below += count
                buckets.append((edge, float(below)))
            family.add_metric((model,), buckets, total * self._unit)
        return [family]


def counter_value(counter: Counter) -> int:
    """What was counted, of one set of labels. Takes microseconds: prometheus-client renders it for that."""
    (family,) = counter.collect()
    return int(family.samples[0].value)


class CommonMetrics:
    """What batchers and workers both measure. One instance per process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, unused
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("carpool_build", "Version of Carpool", registry=registry)
        build.info({"version": version("carpool")})
        self.answered = Counter(
            "carpool_requests",
            "Requests whose final result this process wrote, by status and, for an error, by reason",
            ("model", "status", "reason"),
            registry=registry,
        )
        self.lease_lateness = Histogram(
            "carpool_lease_lateness_seconds",
            "How much later than planned a lease was renewed",
            DURATIONS_US,
            1e-6,
            registry,
        )
        self._redis_errors = Counter(
            "carpool_redis_errors",
            "Failures caused by Redis, by kind: link (cannot connect, or connection lost), or Redis's "
            "error code",
            ("kind",),
            registry=registry,
        )
        self._redis_errors.labels("link")

    def error(self, error: BaseException) -> None:
        """An iteration of a loop failed. Counted if Redis was the cause."""
        if isinstance(error, LinkError):
            self._redis_errors.labels("link").inc()
        elif isinstance(error, CommandError):
            self._redis_errors.labels(error.code if error.code in REDIS_ERROR_KINDS else "other").inc()
