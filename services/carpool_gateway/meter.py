"""What the gateway measures. It counts plain integers, as prometheus-client takes microseconds to count."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from carpool.prometheus import (
    Collector,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    floatToGoString,
)
from carpool.service_metrics import Bucket, BucketCounts, CommonMetrics, cumulative
from carpool.tracing import Context
from carpool_gateway.server import Server

_DURATIONS_US: Final = (
    1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000, 2_500_000, 5_000_000,
    10_000_000, 30_000_000, 60_000_000, 300_000_000,
)  # fmt: skip


ROUTES: Final = (
    "infer", "infer_many", "stream", "requests", "models", "scale", "v2_infer", "v2_generate",
    "v2_generate_stream", "v2_model", "v2_config", "v2_ready", "v2_stats", "v2_index", "v2_load",
    "v2_unload", "v2_worker_load", "v2_worker_unload", "v2_models", "v2", "v2_health", "v1_models",
    "v1_model", "v1_completions", "v1_chat", "v1_embeddings", "v1_stream", "websocket",
    "websocket_outputs", "websocket_request", "healthz", "readyz", "metrics", "openapi", "none",
    "grpc_infer", "grpc_stream", "grpc_stream_infer", "grpc_model", "grpc_load", "grpc_unload",
    "grpc_server", "grpc_none",
)  # fmt: skip


class GatewayMetrics(CommonMetrics):
    """The metrics of a gateway process. Routes and status codes are few: neither is what a client wrote."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[tuple[str, int], int] = {}
        self._durations: dict[str, BucketCounts] = {}
        self.server: Server | None = None
        self.registry.register(_Collector(self))

    def count_answer(self, route: str, code: int, took_us: int, trace: Context | None = None) -> None:
        """Count an answer; the code 499 is a client that went away. `trace`: if it is recorded."""
        key = (route, code)
        answers = self._answers
        if key in answers:
            answers[key] += 1
        else:
            answers[key] = 1
            self._durations.setdefault(route, BucketCounts(_DURATIONS_US))
        self._durations[route].observe_equal(took_us, 1)
        if trace is not None:
            self._durations[route].exemplify(took_us, trace)

    def families(self) -> Iterable[Metric]:
        """What is exported."""
        answers = CounterMetricFamily(
            "carpool_gateway_requests",
            "Requests that were answered, by route and status code of HTTP; 499: the client went away before",
            labels=("route", "code"),
        )
        for (route, code), number in list(self._answers.items()):
            answers.add_metric((route, str(code)), number)
        durations = HistogramMetricFamily(
            "carpool_gateway_seconds",
            "Time from the first byte of a request to the end of its answer",
            labels=("route",),
        )
        for route, counts in list(self._durations.items()):
            durations.add_metric((route,), *_histogram(counts))
        yield from (answers, durations)
        if self.server is not None:
            yield GaugeMetricFamily(
                "carpool_gateway_connections", "Connections of clients", value=len(self.server.connections)
            )
            yield GaugeMetricFamily(
                "carpool_gateway_body_bytes",
                "Bytes of bodies that are read, or whose requests have no result, and of answers read slowly",
                value=self.server.memory.held_bytes,
            )


class _Collector(Collector):
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.families()

    def describe(self) -> Iterable[Metric]:
        return ()


def _histogram(counts: BucketCounts) -> tuple[list[Bucket], float]:
    buckets, total_us = counts.snapshot()
    edges = [*map(floatToGoString, [bound / 1e6 for bound in _DURATIONS_US]), "+Inf"]
    return cumulative(edges, buckets, counts.sampled, 1e-6), total_us / 1e6
