"""What every service measures. prometheus-client counts and renders; `health_server` serves it.

Durations and sizes are counted here, in integers and a batch at a time: prometheus-client's `observe` costs
0.8 µs a request, this costs 0.1. ops/prometheus/README.md documents every metric.

Why: docs/decisions/0030.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import Final, NamedTuple

from carpool.prometheus import (
    Collector,
    CollectorRegistry,
    Counter,
    Exemplar,
    GCCollector,
    HistogramMetricFamily,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    floatToGoString,
)
from carpool.store.connection import CommandError, LinkError
from carpool.tracing import Context, Record

VERSION: Final = version("carpool")  # read once: it takes 1 ms
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


Bucket = tuple[str, float] | tuple[str, float, Exemplar]  # its upper bound, what is below that, an example


class Sampled(NamedTuple):
    """A value of a request whose trace is recorded, for the bucket that it fell into."""

    value: int
    trace: Context
    at_s: float

    def exemplar(self, unit: float) -> Exemplar:
        """As prometheus-client renders it, where the format is OpenMetrics."""
        return Exemplar(self.trace.logged, self.value * unit, self.at_s)


class BucketCounts:
    """How many integers fell into each bucket of a histogram, and of each the last one with a trace, if there
    is any. Safe for any number of threads."""

    def __init__(self, bounds: Sequence[int]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0
        self._lock = threading.Lock()
        self.sampled: dict[int, Sampled] = {}  # by the number of the bucket; replaced, never changed

    def exemplify(self, value: int, trace: Context) -> None:
        """This value, which is counted elsewhere, is one of a request with this trace."""
        self.sampled[bisect_left(self._bounds, value)] = Sampled(value, trace, time.time())

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
            buckets = cumulative(edges, counts, model_counts.sampled, self._unit)
            family.add_metric((model,), buckets, total * self._unit)
        return [family]


def cumulative(
    edges: Sequence[str], counts: Sequence[int], sampled: Mapping[int, Sampled], unit: float
) -> list[Bucket]:
    """The buckets of a histogram, as prometheus-client takes them."""
    below, buckets = 0, list[Bucket]()
    for at, (edge, count) in enumerate(zip(edges, counts, strict=True)):
        below += count
        one = sampled.get(at)
        buckets.append((edge, float(below)) if one is None else (edge, float(below), one.exemplar(unit)))
    return buckets


def counter_value(counter: Counter) -> int:
    """What was counted, of one set of labels. Takes microseconds: prometheus-client renders it for that."""
    (family,) = counter.collect()
    return int(family.samples[0].value)


class CommonMetrics:
    """What batchers and workers both measure. One instance per process.

    `record_spans`: exports spans of requests whose traces are recorded; None if no collector is set.
    """

    record_spans: Record | None = None

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each counter, unused
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        build = Info("carpool_build", "Version of Carpool", registry=registry)
        build.info({"version": VERSION})
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
        self._spans_dropped = Counter(
            "carpool_spans_dropped",
            "Spans that were not exported, by reason: the queue was full, or the collector did not take them",
            ("reason",),
            registry=registry,
        )
        for reason in ("queue_full", "not_taken"):
            self._spans_dropped.labels(reason)
        self._spans_exported = Counter(
            "carpool_spans_exported", "Spans that the collector took", registry=registry
        )

    def spans_dropped(self, reason: str, number: int) -> None:
        """Spans were not exported: see `span_export`."""
        self._spans_dropped.labels(reason).inc(number)

    def spans_exported(self, number: int) -> None:
        """The collector took that many spans."""
        self._spans_exported.inc(number)

    def error(self, error: BaseException) -> None:
        """An iteration of a loop failed. Counted if Redis was the cause."""
        if isinstance(error, LinkError):
            self._redis_errors.labels("link").inc()
        elif isinstance(error, CommandError):
            self._redis_errors.labels(error.code if error.code in REDIS_ERROR_KINDS else "other").inc()
