"""What the console measures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from carpool.prometheus import (
    Collector,
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
    floatToGoString,
)
from carpool.service_metrics import BucketCounts, CommonMetrics, cumulative

# Few, as each is a series of each route: from a page of a small installation to a search that gives up.
_DURATIONS_US: Final = (10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 5_000_000, 60_000_000)

NO_ROUTE: Final = "none"
ROUTES: Final = (
    "/", "/models/{model}", "/models/{model}/control", "/models/{model}/pause", "/models/{model}/resume",
    "/models/{model}/drain", "/models/{model}/undrain", "/models/{model}/share", "/models/{model}/settings",
    "/models/{model}/settings/undo", "/models/{model}/settings/{setting}", "/models/{model}/dead",
    "/models/{model}/dead/errors", "/models/{model}/dead/act", "/models/{model}/dead/{letter}",
    "/models/{model}/dead/{letter}/body", "/models/{model}/withdraw", "/dead", "/find", "/workers", "/nodes",
    "/load", "/load/promote", "/load/unload", "/jobs", "/jobs/{job}", "/jobs/{job}/stop", "/audit",
    "/sign-in", "/sign-out", "/static/{name}", NO_ROUTE,
)  # fmt: skip


class ConsoleMetrics(CommonMetrics):
    """The metrics of a console process. Routes are patterns: never what a client wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[tuple[str, int], int] = {}
        self._durations: dict[str, BucketCounts] = {}
        self.registry.register(_Collector(self))

    def count_answer(self, route: str, code: int, took_us: int) -> None:
        """Count an answer. On the thread of the server only. The code 499: the client went away."""
        self._answers[route, code] = self._answers.get((route, code), 0) + 1
        self._durations.setdefault(route, BucketCounts(_DURATIONS_US)).observe_equal(took_us, 1)

    def families(self) -> Iterable[Metric]:
        """What is exported."""
        answers = CounterMetricFamily(
            "carpool_console_requests",
            "Requests that were answered, by route and status code; 499: the client went away before",
            labels=("route", "code"),
        )
        for (route, code), number in list(self._answers.items()):
            answers.add_metric((route, str(code)), number)
        durations = HistogramMetricFamily(
            "carpool_console_seconds",
            "Time from the head of a request to the end of its answer",
            labels=("route",),
        )
        edges = [*map(floatToGoString, [bound / 1e6 for bound in _DURATIONS_US]), "+Inf"]
        for route, counts in list(self._durations.items()):
            buckets, total_us = counts.snapshot()
            durations.add_metric((route,), cumulative(edges, buckets, {}, 1e-6), total_us / 1e6)
        return (answers, durations)


class _Collector(Collector):
    def __init__(self, metrics: ConsoleMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()

    def describe(self) -> Iterable[Metric]:
        return ()
