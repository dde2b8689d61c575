"""prometheus-client, for all of Carpool: imported without the variables that a web program sets for itself.

With these, it would write what a service measures into the web program's folder, among the web program's own
metrics, and fail if there is no such folder. It looks at them when it is imported, and later, too.
"""

from __future__ import annotations

import os
from typing import Final

OF_WEB_PROGRAMS: Final = {
    name: os.environ.pop(name)
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir")
    if name in os.environ
}
"""What was removed from this process's environment; for processes whose code is the user's."""

from prometheus_client import (  # noqa: E402
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import (  # noqa: E402
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder  # noqa: E402
from prometheus_client.registry import Collector  # noqa: E402
from prometheus_client.samples import Exemplar  # noqa: E402
from prometheus_client.utils import floatToGoString  # noqa: E402

__all__ = [
    "OF_WEB_PROGRAMS",
    "Collector",
    "CollectorRegistry",
    "Counter",
    "CounterMetricFamily",
    "Exemplar",
    "GCCollector",
    "Gauge",
    "GaugeMetricFamily",
    "HistogramMetricFamily",
    "Info",
    "Metric",
    "PlatformCollector",
    "ProcessCollector",
    "choose_encoder",
    "disable_created_metrics",
    "floatToGoString",
]
