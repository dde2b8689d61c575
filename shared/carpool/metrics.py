"""A model's own metrics: counters, gauges and histograms, which its worker exports on `/metrics`.

from carpool import metrics

TOKENS = metrics.counter("tokens", "Tokens that were read", "language")
CACHE = metrics.gauge("cache_entries", "Entries in the cache")
SCORE = metrics.histogram("score", "Scores of results", buckets=(0.1, 0.5, 0.9))

class Model:
    def predict(self, batch):
        TOKENS.inc(len(batch), language="en")
        CACHE.set(17)
        SCORE.observe(0.7)

Each is exported under its own name, with the label `model`; a counter's ends with `_total`, and a gauge has
the label `replica`, too. Values travel to the worker a few times a second. A worker keeps what was counted
when it replaces a process. Any thread may use them; a call takes about a microsecond.

Names and labels are limited: 100 metrics, and 1,000 combinations of the values of labels, for a process. What
is counted with further combinations has `other` as the value of each label.
"""

from __future__ import annotations

import logging
import re
import threading
from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite
from typing import Final, Literal, NamedTuple

METRICS_MAX: Final = 100
SERIES_MAX: Final = 1000  # of all metrics together
LABELS_MAX: Final = 8  # of one metric
VALUE_CHARS_MAX: Final = 100  # of a label; what is longer is cut
BUCKETS_MAX: Final = 50
OTHER: Final = "other"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_]{0,79}")
_PREFIXES_OF_OTHERS: Final = ("carpool_", "process_", "python_")
_SUFFIXES_OF_PARTS: Final = ("_total", "_bucket", "_sum", "_count", "_created", "_info")
_LABELS_OF_OTHERS: Final = ("model", "replica", "le", "quantile")
_LOG: Final = logging.getLogger("carpool.metrics")

Kind = Literal["counter", "gauge", "histogram"]
LabelValues = tuple[str, ...]


class Description(NamedTuple):
    """What a metric is, beside its values. `buckets`: upper bounds, of a histogram."""

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...] = ()


class Change(NamedTuple):
    """What has changed of a metric since the last time.

    `series`: by the values of the labels. Of a counter the increase; of a gauge the value; of a histogram the
    increases of the buckets, the last one above all bounds, and of the sum.
    """

    description: Description
    series: list[tuple[LabelValues, Sequence[float]]]


class _Metric:
    """One metric. All changes are made under the lock of the registry."""

    def __init__(self, registry: Registry, description: Description) -> None:
        self._registry = registry
        self._description = description
        self._totals: dict[LabelValues, list[float]] = {}
        self._changes: dict[LabelValues, list[float]] = {}

    def value(self, **labels: object) -> float:
        """What was counted, or set, with these values of the labels; of a histogram how many were observed.
        For tests."""
        with self._registry.lock:
            total = self._totals.get(self._values_of(labels), [0.0])
            return sum(total[:-1]) if self._description.kind == "histogram" else total[0]

    def take_change(self) -> Change | None:
        """What has changed since this was called last. To be called under the lock."""
        if not self._changes:
            return None
        changed, self._changes = self._changes, {}
        return Change(self._description, [*changed.items()])

    def _values_of(self, labels: dict[str, object]) -> LabelValues:
        """The values of the labels, in their order. Raises ValueError for other labels."""
        names = self._description.labels
        if labels.keys() != {*names}:
            wanted = ", ".join(names) or "none"
            given = ", ".join(sorted(labels)) or "none"
            raise ValueError(f"metric {self._description.name}: its labels are {wanted}; given are {given}")
        return tuple([str(labels[name])[:VALUE_CHARS_MAX] for name in names])

    def _series(self, labels: dict[str, object], width: int) -> tuple[list[float], list[float]]:
        """The totals and the changes of what has these labels. To be called under the lock."""
        values = self._values_of(labels)
        total = self._totals.get(values)
        if total is None:
            values = self._registry.admit(self._description, values)
            total = self._totals.setdefault(values, [0.0] * width)
        changed = self._changes.get(values)
        if changed is None:
            changed = self._changes[values] = [0.0] * width
        self._registry.has_news = True
        return total, changed


class Counter(_Metric):
    """Counts what happens. See `counter`."""

    def inc(self, amount: float = 1, **labels: object) -> None:
        """Count so many more. Raises ValueError for less than 0, and for other labels than its own."""
        if not (isfinite(amount) and amount >= 0):
            raise ValueError(f"metric {self._description.name}: a counter cannot be changed by {amount!r}")
        with self._registry.lock:
            for numbers in self._series(labels, 1):
                numbers[0] += amount


class Gauge(_Metric):
    """Has a value that goes up and down. See `gauge`."""

    def set(self, value: float, **labels: object) -> None:
        """Replace the value. Raises ValueError for other labels than its own."""
        with self._registry.lock:
            for numbers in self._series(labels, 1):
                numbers[0] = float(value)

    def inc(self, amount: float = 1, **labels: object) -> None:
        """Add to the value; to take from it, add less than 0."""
        with self._registry.lock:
            total, changed = self._series(labels, 1)
            total[0] += amount
            changed[0] = total[0]


class Histogram(_Metric):
    """Counts values by their size. See `histogram`."""

    def observe(self, value: float, **labels: object) -> None:
        """Count a value. Raises ValueError for one that is no number, and for other labels than its own."""
        if not isfinite(value):
            raise ValueError(f"metric {self._description.name}: {value!r} cannot be counted")
        bounds = self._description.buckets
        at = bisect_left(bounds, value)
        with self._registry.lock:
            for numbers in self._series(labels, len(bounds) + 2):
                numbers[at] += 1
                numbers[-1] += value


class Registry:
    """The metrics of one process, by name. `has_news`: something has changed since `take_changes`."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.has_news = False
        self._metrics: dict[str, _Metric] = {}
        self._descriptions: dict[str, Description] = {}
        self._series = 0
        self._warned: set[str] = set()

    def metric(self, description: Description, kind: type[_Metric]) -> _Metric:
        """The metric of this description, made once. Raises ValueError, which says what is wrong with it."""
        _check(description)
        with self.lock:
            known = self._descriptions.get(description.name)
            if known is not None and known != description:
                raise ValueError(
                    f"metric {description.name}: was made before as a {known.kind} with other labels, "
                    "buckets or another description; choose another name"
                )
            if known is None:
                if len(self._metrics) >= METRICS_MAX:
                    raise ValueError(
                        f"metric {description.name}: a model may have {METRICS_MAX} metrics; use labels for "
                        "what differs"
                    )
                self._descriptions[description.name] = description
                self._metrics[description.name] = kind(self, description)
            return self._metrics[description.name]

    def admit(self, description: Description, values: LabelValues) -> LabelValues:
        """The values of labels under which something new is counted: these, or `other` above the limit."""
        if self._series < SERIES_MAX or not values:
            self._series += 1
            return values
        if description.name not in self._warned:
            self._warned.add(description.name)
            _LOG.warning(
                "metric %s: the labels of a model may have %d combinations of values; what has others is "
                "counted as %r",
                description.name,
                SERIES_MAX,
                OTHER,
            )
        return (OTHER,) * len(values)

    def take_changes(self) -> list[Change]:
        """What has changed since this was called last."""
        with self.lock:
            self.has_news = False
            changes = [metric.take_change() for metric in self._metrics.values()]
        return [change for change in changes if change is not None]


def _check(description: Description) -> None:
    name, labels, buckets = description.name, description.labels, description.buckets
    if not (isinstance(name, str) and _NAME.fullmatch(name)):
        raise ValueError(
            f"metric {name!r:.100}: its name must have 1 to 80 letters, digits and '_', and begin with a "
            "letter"
        )
    if name.startswith(_PREFIXES_OF_OTHERS) or name.endswith(_SUFFIXES_OF_PARTS):
        raise ValueError(
            f"metric {name}: its name must not begin with {', '.join(_PREFIXES_OF_OTHERS)}, which others "
            f"have, or end with {', '.join(_SUFFIXES_OF_PARTS)}, which are added to names"
        )
    if not isinstance(description.documentation, str) or not description.documentation:
        raise ValueError(f"metric {name}: needs a text that says what it counts")
    for label in labels:
        is_name = isinstance(label, str) and _NAME.fullmatch(label)
        if not is_name or label in _LABELS_OF_OTHERS or label.startswith("__"):
            raise ValueError(
                f"metric {name}: {label!r:.100} cannot be a label: it must have letters, digits and '_', "
                f"begin with a letter, and be none of {', '.join(_LABELS_OF_OTHERS)}"
            )
    if len(set(labels)) != len(labels) or len(labels) > LABELS_MAX:
        raise ValueError(f"metric {name}: may have up to {LABELS_MAX} labels, each once")
    if len(buckets) > BUCKETS_MAX or any(not isfinite(bound) for bound in buckets):
        raise ValueError(
            f"metric {name}: may have up to {BUCKETS_MAX} buckets, whose bounds must be finite numbers"
        )
    if list(buckets) != sorted(set(buckets)):
        raise ValueError(f"metric {name}: its buckets {buckets!r:.100} must ascend")


REGISTRY: Final = Registry()


def counter(name: str, documentation: str, *labels: str) -> Counter:
    """A counter, which only goes up: `inc(amount, label=value)`. Exported as `name_total`.

    Made once: the same call returns the same one. Raises ValueError for a name or label that cannot be used.
    """
    made = REGISTRY.metric(Description(name, "counter", documentation, labels), Counter)
    assert isinstance(made, Counter)
    return made


def gauge(name: str, documentation: str, *labels: str) -> Gauge:
    """A value that goes up and down: `set(value, label=value)` or `inc(amount, ...)`. As `counter`."""
    made = REGISTRY.metric(Description(name, "gauge", documentation, labels), Gauge)
    assert isinstance(made, Gauge)
    return made


def histogram(name: str, documentation: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
    """Values by their size: `observe(value, label=value)`. `buckets`: their upper bounds, ascending; without
    them those of seconds, from 1 ms to 10 s. As `counter`."""
    bounds = tuple(float(bound) for bound in buckets)
    made = REGISTRY.metric(Description(name, "histogram", documentation, labels, bounds), Histogram)
    assert isinstance(made, Histogram)
    return made
