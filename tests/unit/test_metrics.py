"""What is measured, how it is counted, where it is served, and that the document says the same."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from carpool.errors import CarpoolError
from carpool.messages import RAW, Batch, BatchedRequest, Result
from carpool.metrics import (
    CONNECTIONS,
    DURATIONS_US,
    PERCENTS,
    REDIS_ERROR_KINDS,
    Bins,
    CommonMetrics,
    Histogram,
    StatusServer,
)
from carpool.store.connection import CommandError, LinkError
from carpool_batcher.meter import BatcherMetrics, Meter
from carpool_worker.execution import Execution
from carpool_worker.meter import WorkerMetrics
from support.waiting import wait_until

DOCUMENT: Final = Path(__file__).parents[2] / "ops" / "prometheus" / "README.md"
MODEL: Final = "square"

Sample = tuple[str, frozenset[tuple[str, str]]]


def samples(registry: CollectorRegistry) -> dict[Sample, float]:
    """Every sample of a registry, by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


# --- counting ----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    bounds=st.sampled_from([(DURATIONS_US, 1_000_000), (PERCENTS, 100)]),
    values=st.lists(st.sampled_from([*DURATIONS_US, *PERCENTS, 0]) | st.integers(0, 400_000_000)),
    cuts=st.lists(st.integers(0, 20), max_size=4),
)
def test_a_histogram_shows_what_prometheus_clients_own_would(
    bounds: tuple[Sequence[int], int], values: list[int], cuts: list[int]
) -> None:
    """Given any values, on a bound or not, in any parts, expect the same samples under the same names."""
    edges, per_unit = bounds
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    bins = Histogram("h", "The help", edges, 1 / per_unit, ours).of(MODEL)
    own = prometheus_client.Histogram(
        "h", "The help", ["model"], buckets=[edge / per_unit for edge in edges], registry=theirs
    ).labels(MODEL)

    starts = sorted({0, *cuts})
    for start, end in zip(starts, [*starts[1:], len(values)], strict=True):
        bins.observe(values[start:end])
    for value in values:
        own.observe(value / per_unit)

    expected = {key: value for key, value in samples(theirs).items() if key[0] != "h_created"}
    assert samples(ours) == pytest.approx(expected)


def test_no_value_is_lost_between_threads() -> None:
    bins = Bins((10, 20))

    def observe() -> None:
        for _ in range(2000):
            bins.observe([5, 15, 25])

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bins.snapshot() == ([8000, 8000, 8000], 8000 * 45)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (LinkError("gone"), "link"),
        (CommandError("OOM", "OOM command not allowed"), "OOM"),
        (CommandError("NOPERM", "NOPERM no"), "NOPERM"),
        (CommandError("ERR", "ERR unknown command"), "ERR"),
        (CommandError("x9f1", "a module's own"), "other"),
        (RuntimeError("not Redis"), None),
    ],
)
def test_redis_errors_are_counted_by_kind(error: Exception, kind: str | None) -> None:
    metrics = CommonMetrics()
    metrics.error(error)
    counted = {
        dict(labels)["kind"]: value
        for (name, labels), value in samples(metrics.registry).items()
        if name == "carpool_redis_errors_total"
    }
    assert counted == ({"link": 0.0} | ({kind: 1.0} if kind else {}))
    assert kind is None or kind in REDIS_ERROR_KINDS


def test_a_models_own_statuses_are_not_counted_one_by_one() -> None:
    """Given a model that makes up a status for each request, expect no more labels than are documented."""
    metrics = WorkerMetrics(MODEL)
    job = job_of("OK", "NOT_FOUND", "MINE_1", "MINE_2", "ABORTED")
    metrics.committed(job, output_us=5, now_us=2_000)
    counted = {
        (dict(labels)["status"], dict(labels)["reason"]): value
        for (name, labels), value in samples(metrics.registry).items()
        if name == "carpool_requests_total" and value
    }
    assert counted == {
        ("OK", ""): 1,
        ("NOT_FOUND", "model"): 1,
        ("other", "model"): 2,
        ("ABORTED", "dead_letter"): 1,
    }


def job_of(*statuses: str) -> Execution:
    """A job whose requests have these results."""
    requests = [
        BatchedRequest("1-1", str(at), RAW, None, 1_000, None, b"", None) for at in range(len(statuses))
    ]
    job = Execution(Batch("1-1", 1, requests, "full", 1_500, ""))
    job.results = {at: Result(str(at), status, RAW) for at, status in enumerate(statuses)}
    return job


# --- the document ------------------------------------------------------------------------------------------


def documented() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """The tables of the document: type, and values by label ({} where any may come), by name."""
    families: dict[str, tuple[str, dict[str, set[str]]]] = {}
    values = documented_values()
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        name = re.fullmatch(r"`(carpool_\w+)`", cells[0])
        if name:
            labels = re.findall(r"`(\w+)`", cells[2])
            families[name[1]] = cells[1], {label: values.get((name[1], label), set()) for label in labels}
    return families


def documented_values() -> dict[tuple[str, str], set[str]]:
    """From lines such as "- `carpool_batches_total` `reason`: `full`, `delay`"; the empty value is `""`."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in DOCUMENT.read_text().splitlines():
        head = re.match(r"- `(carpool_\w+)` `(\w+)`: ", line)
        if head:
            listed = re.findall(r"`([^`]*)`", line[head.end() :].partition(" (")[0])
            found[head[1], head[2]] = {value.strip('"') for value in listed}
    return found


def exported() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """The same of the code: with one model, every gauge, each status a model may say, each kind of error."""
    batcher, worker = BatcherMetrics(), WorkerMetrics(MODEL)
    Meter(batcher, MODEL)
    for gauge in batcher.gauges:
        gauge.labels(MODEL)
    statuses = [kind.status for kind in every_error(CarpoolError)]
    worker.committed(job_of(*statuses, "MINE"), output_us=0, now_us=0)
    for kind in REDIS_ERROR_KINDS:
        worker.error(LinkError("") if kind == "link" else CommandError(kind, ""))
    families: dict[str, tuple[str, dict[str, set[str]]]] = {}
    for metrics in (batcher, worker):
        for family in metrics.registry.collect():
            if not family.name.startswith("carpool_"):
                continue  # Python's own
            name = {"counter": f"{family.name}_total", "info": f"{family.name}_info"}.get(
                family.type, family.name
            )
            labels = families.setdefault(name, (family.type, {}))[1]
            for sample in family.samples:
                for label, value in sample.labels.items():
                    if label == "le":
                        continue
                    several = labels.setdefault(label, set())
                    if label not in ("model", "version"):
                        several.add(value)
    return families


def every_error(kind: type[CarpoolError]) -> Iterator[type[CarpoolError]]:
    for one in kind.__subclasses__():
        if one.__module__ == "carpool.errors":
            yield one
            yield from every_error(one)


def test_the_document_lists_what_the_code_exports() -> None:
    """Names, types, labels, and each label's values: nothing more and nothing less."""
    assert documented() == exported()


# --- serving -----------------------------------------------------------------------------------------------


class Patient:
    """A service that is as it is told to be."""

    def __init__(self) -> None:
        self.dying: list[str] = []
        self.waiting: list[str] = []

    def unhealthy(self) -> list[str]:
        return self.dying

    def unready(self) -> list[str]:
        return self.waiting


@contextmanager
def serving(service: Patient, host: str = "127.0.0.1") -> Iterator[StatusServer]:
    metrics = CommonMetrics()
    metrics.lease_lateness.of(MODEL).observe([5, 2_000_000])
    server = StatusServer(host, 0, metrics.registry, service)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def get(url: str, path: str, **headers: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    assert int(response.headers["Content-Length"]) == len(body.encode())
    return response.status, response.headers["Content-Type"], body


def test_probes_say_what_is_wrong() -> None:
    patient = Patient()
    with serving(patient) as server:
        plain = "text/plain; charset=utf-8"
        assert get(server.url, "/healthz") == get(server.url, "/readyz") == (200, plain, "ok\n")
        patient.waiting = ["the model is loading", "Redis is away"]
        assert get(server.url, "/readyz") == (503, plain, "the model is loading\nRedis is away\n")
        assert get(server.url, "/healthz?verbose") == (200, plain, "ok\n")
        patient.dying = ["heartbeat: ended"]
        assert get(server.url, "/healthz") == (503, plain, "heartbeat: ended\n")
        status, content_type, body = get(server.url, "/")
        assert (status, content_type) == (404, plain)
        assert "/metrics" in body


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("", "text/plain; version=0.0.4", parse_text),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4", parse_text),
        (
            "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text; version=1.0.0",
            parse_openmetrics,
        ),
    ],
)
def test_metrics_come_in_the_format_that_is_asked_for(
    accept: str, content_type: str, parse: Callable[[str], Iterator[Any]]
) -> None:
    with serving(Patient()) as server:
        status, got_type, body = get(server.url, "/metrics", Accept=accept)
    assert status == 200
    assert got_type.startswith(content_type)
    families = {family.name: family for family in parse(body)}
    late = {
        sample.labels.get("le"): sample.value for sample in families["carpool_lease_lateness_seconds"].samples
    }
    assert (late["0.0001"], late["1.0"], late["+Inf"]) == (1, 1, 2)
    assert ("# EOF" in body) == ("openmetrics" in content_type)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot serve http://127.0.0.1:{port}: Address already in use"):
            StatusServer("127.0.0.1", port, CollectorRegistry(), Patient())


def test_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(Patient(), "::1") as server:
        assert re.fullmatch(r"http://\[::1\]:\d+", server.url)
        assert get(server.url, "/readyz")[0] == 200
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match=rf"cannot serve http://\[::1\]:{port}: "):
            StatusServer("::1", port, CollectorRegistry(), Patient())


def test_who_hangs_up_half_way_leaves_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    """Given a prober that resets its connection, expect nothing in a log whose lines are JSON."""
    with serving(Patient()) as server:
        host, port = server.url.removeprefix("http://").split(":")
        before = threading.active_count()
        with socket.create_connection((host, int(port))) as prober:
            prober.sendall(b"GET /read")
            wait_until(lambda: threading.active_count() > before, description="a thread reads the request")
            prober.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: threading.active_count() == before, description="the thread has ended")
        assert get(server.url, "/readyz")[0] == 200
    assert capfd.readouterr().err == ""


def test_head_is_answered_without_a_body() -> None:
    with serving(Patient()) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=5)
        connection.request("HEAD", "/readyz")
        response = connection.getresponse()
        assert (response.status, response.read()) == (200, b"")
        connection.close()


def test_clients_that_say_nothing_keep_nobody_out() -> None:
    """Each holds a thread: where there are too many, the one that came first loses its own."""
    with serving(Patient()) as server, ExitStack() as stack:
        host, port = server.url.removeprefix("http://").split(":")
        threads = threading.active_count()
        silent = [
            stack.enter_context(socket.create_connection((host, int(port)), timeout=5))
            for _ in range(3 * CONNECTIONS)
        ]
        assert get(server.url, "/readyz")[0] == 200
        assert silent[0].recv(1) == b""
        wait_until(
            lambda: threading.active_count() <= threads + CONNECTIONS, description="threads of the first end"
        )
