"""The metrics that a model makes for itself, as its worker exports them: those of all its processes together.

Counters and histograms are sums, over the processes that have ended, too. A gauge is that of each replica.

Names and labels are limited here once more: a process may have been replaced often, and each has had others.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from carpool.metrics import METRICS_MAX, SERIES_MAX, Description
from carpool.prometheus import (
    Collector,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    floatToGoString,
)
from carpool_worker.model_process.frames import Measured


class OwnMetrics(Collector):
    """Takes what model processes measure, from any thread."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._lock = threading.Lock()
        self._series: dict[Description, dict[tuple[str, ...], list[float]]] = {}
        self._count = 0

    def take(self, replica: int, measured: Measured) -> None:
        """The process of this replica has measured something."""
        description = Description(*measured[:5])
        of_replica = (str(replica),) if description.kind == "gauge" else ()
        with self._lock:
            by_labels = self._of(description)
            for values, numbers in measured.series:
                key = (*of_replica, *values)
                known = by_labels.get(key)
                if known is not None and not of_replica:
                    by_labels[key] = [total + more for total, more in zip(known, numbers, strict=True)]
                elif known is not None or self._count < 2 * SERIES_MAX:
                    self._count += known is None
                    by_labels[key] = list(numbers)

    def _of(self, description: Description) -> dict[tuple[str, ...], list[float]]:
        """The series of a metric. One that was declared otherwise before, by another version of the model,
        begins anew; and so does the oldest one, if there are too many."""
        found = self._series.get(description)
        if found is None:
            names = [known for known in self._series if known.name == description.name]
            if not names and len(self._series) >= METRICS_MAX:
                names = [next(iter(self._series))]
            for known in names:
                self._count -= len(self._series.pop(known))
            found = self._series[description] = {}
        return found

    def collect(self) -> Iterable[Metric]:
        """Called by prometheus-client for each scrape."""
        with self._lock:
            return [self._family(description, dict(found)) for description, found in self._series.items()]

    def _family(self, description: Description, found: dict[tuple[str, ...], list[float]]) -> Metric:
        name, kind, text, labels, buckets = description
        if kind == "histogram":
            histogram = HistogramMetricFamily(name, text, labels=("model", *labels))
            edges = [*map(floatToGoString, buckets), "+Inf"]
            for values, (*counts, total) in found.items():
                below, cumulative = 0.0, []
                for edge, count in zip(edges, counts, strict=True):
                    below += count
                    cumulative.append((edge, below))
                histogram.add_metric((self._model, *values), cumulative, total)
            return histogram
        if kind == "gauge":
            gauge = GaugeMetricFamily(name, text, labels=("model", "replica", *labels))
            for values, (value,) in found.items():
                gauge.add_metric((self._model, *values), value)
            return gauge
        counter = CounterMetricFamily(name, text, labels=("model", *labels))
        for values, (value,) in found.items():
            counter.add_metric((self._model, *values), value)
        return counter
