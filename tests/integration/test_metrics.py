"""The metrics and probes of the services agree with what happened: counters, gauges, readiness, health."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from carpool.keys import Keys
from carpool_cli.__main__ import main
from support.models.metered import LOAD_GATE
from support.stack import Service, Stack
from support.status import get
from support.waiting import EVENTUALLY_S, Stopwatch, ample_ms, wait_until

MODEL: Final = "Metered"
SPEC: Final = "metered.py:Metered"
HTTP: Final = ("--http-port", "0")
WORKER: Final = (*HTTP, "--lease-ms", "600")
GAUGES: Final = (
    "carpool_waiting_requests",
    "carpool_waiting_bytes",
    "carpool_oldest_request_seconds",
    "carpool_in_flight_batches",
    "carpool_in_flight_requests",
)

Page = list[Sample]


def scrape(service: Service) -> Page:
    status, body = get(service, "/metrics")
    assert status == 200
    return [sample for family in text_string_to_metric_families(body) for sample in family.samples]


def total(pages: Iterable[Page], name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """Sum a metric over processes by these labels, as `sum by (...)` does; without values of zero."""
    found: Counter[tuple[str, ...]] = Counter()
    for page in pages:
        for sample in page:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += round(sample.value)
    return +found


def sum_of(pages: Iterable[Page], name: str) -> int:
    """Sum a metric over processes and all labels."""
    return total(pages, name)[()]


def gauge(page: Page, name: str, model: str = MODEL) -> float | None:
    """The value of a gauge; None if it is not exported."""
    return next((s.value for s in page if (s.name, s.labels.get("model")) == (name, model)), None)


class Producer:
    """Sends requests, receives results, and counts them: by status, and as the metrics should count them."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.received: Counter[str] = Counter()
        self.expected: Counter[tuple[str, str]] = Counter()

    def send(self, body: object, **fields: str | int) -> str:
        return self._stack.send(MODEL, body=json.dumps(body), **fields)

    def pack(self, *bodies: object) -> list[str]:
        """Send several requests in one entry; return their correlation IDs."""
        names = [f"{sum(self.expected.values())}.{at}" for at in range(len(bodies))]
        self._stack.send_packed(
            MODEL,
            [
                {"correlation_id": name, "body": json.dumps(body)}
                for name, body in zip(names, bodies, strict=True)
            ],
        )
        return names

    def receive(self, status: str, reason: str, *names: str) -> None:
        """Expect this status for each of these requests, and that it is counted with this reason."""
        for name in names:
            result = self._stack.result(MODEL, name)
            assert result["status"] == status, result
            self.received[status] += 1
            self.expected[status, reason] += 1

    def infer(self, status: str, reason: str, body: object, **fields: str | int) -> None:
        self.receive(status, reason, self.send(body, **fields))


def send_good_and_invalid(producer: Producer) -> None:
    """Good requests, and requests that the batcher, the worker or the model finds invalid."""
    for _ in range(4):
        producer.receive("OK", "", *[producer.send(number) for number in range(10)])
    producer.receive("OK", "", *producer.pack(*range(16)))  # two full batches
    for fields in ({"priority": 10}, {"content_type": "plain"}):
        producer.infer("INVALID_ARGUMENT", "input", 1, **fields)
    producer.infer("UNIMPLEMENTED", "input", 1, sequence_id=3)
    producer.infer("INVALID_ARGUMENT", "cost", 1, cost=1001)
    producer.infer("INVALID_ARGUMENT", "input", {}, content_type="application/msgpack")
    producer.infer("INVALID_ARGUMENT", "input", "refuse")
    producer.infer("INTERNAL", "model", "raise")


def fill_queue(stack: Stack, producer: Producer, gate: Path) -> None:
    """While the worker waits at a gate: expirations, withdrawals, and more requests than the queue holds."""
    stopwatch = Stopwatch()
    producer.infer("OK", "", 0)
    executing = producer.send({"gate": str(gate)}, expiration=ample_ms(stopwatch, 1000))
    wait_until(lambda: stack.pending(MODEL) == 1, description="the worker waits at the gate")
    ahead = producer.pack(*range(8))  # a full batch ahead of the worker: now nothing else is dispatched
    wait_until(lambda: stack.redis.xlen(Keys(MODEL).batches) == 2, description="a second batch is in flight")
    expiring = [producer.send(number, expiration=50) for number in range(3)]
    producer.receive("DEADLINE_EXCEEDED", "waiting", *expiring)
    withdrawn = producer.pack(1, 2, 3)
    stack.send(MODEL, withdraw=" ".join(withdrawn))
    producer.receive("CANCELLED", "withdrawn", *withdrawn)
    producer.receive("DEADLINE_EXCEEDED", "in_flight", executing)
    many = producer.pack(*range(29))  # the queue holds 16
    producer.receive("RESOURCE_EXHAUSTED", "queue_size", *many[16:])
    gate.touch()
    producer.receive("OK", "", *ahead, *many[:16])


def send_to_gate(stack: Stack, producer: Producer, gate: Path) -> list[str]:
    """Send a batch that waits at a gate; return its correlation IDs."""
    names = producer.pack({"gate": str(gate)}, 1, 2)
    wait_until(lambda: stack.pending(MODEL) == 1, description="a worker waits at the gate")
    return names


def test_counters_are_what_producers_received(stack: Stack, tmp_path: Path) -> None:
    """Given requests that end in every way, and workers killed and frozen, expect exact sums."""
    batcher = stack.batcher(*HTTP)
    first = stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    producer = Producer(stack)

    def assert_counts(*pages: Page) -> list[Page]:
        """Check the sums, and return all pages. A request is counted after its result is written."""
        found: list[Page] = []

        def is_complete() -> bool:
            found[:] = [*pages, *(scrape(service) for service in stack.services if service.alive)]
            return sum(total(found, "carpool_requests_total").values()) >= sum(producer.received.values())

        wait_until(is_complete, description="all received results are counted")
        assert total(found, "carpool_requests_total", "status", "reason") == producer.expected
        by_status = total(found, "carpool_requests_total", "status")
        assert {status: count for (status,), count in by_status.items()} == producer.received
        return found

    send_good_and_invalid(producer)
    fill_queue(stack, producer, tmp_path / "first")
    producer.infer("ABORTED", "dead_letter", "die")

    names = send_to_gate(stack, producer, tmp_path / "second")  # its worker is killed next
    first_page = assert_counts()[1]
    second = stack.worker(SPEC, *WORKER)
    first.kill()
    (tmp_path / "second").touch()
    producer.receive("OK", "", *names)

    names = send_to_gate(stack, producer, tmp_path / "third")  # its worker is frozen next
    third = stack.worker(SPEC, *WORKER)
    second.freeze()
    third.wait_for("batch reclaimed")
    (tmp_path / "third").touch()
    producer.receive("OK", "", *names)
    second.thaw()
    second.wait_for("commit discarded, another worker has the batch")

    pages = assert_counts(first_page)
    assert sum_of(pages, "carpool_redeliveries_total") == 2
    assert sum_of(pages, "carpool_fenced_commits_total") == 1
    assert sum_of(pages, "carpool_dead_letters_total") == stack.redis.xlen(Keys(MODEL).dead) == 1
    assert sum_of(pages, "carpool_model_process_deaths_total") == 2
    settled = [fields for _, fields in stack.redis.xrange(Keys(MODEL).settled) if b"batch" in fields]
    assert sum_of(pages, "carpool_batches_total") == len(settled)
    assert total(pages, "carpool_batches_total", "reason").keys() == {("full",), ("idle",)}
    dispatched = sum(int(fields[b"size"]) for fields in settled)
    assert (
        sum_of(pages, "carpool_batch_requests_sum")
        == sum_of(pages, "carpool_queue_seconds_count")
        == dispatched
    )
    assert sum_of(pages, "carpool_batch_fill_ratio_count") == len(settled)
    by_worker = sum_of([first_page, scrape(second), scrape(third)], "carpool_requests_total")
    assert sum_of(pages, "carpool_request_seconds_count") == by_worker
    assert_idle_gauges(stack, batcher, second, third)


def test_request_that_expires_while_executed_alone_is_counted_once(stack: Stack, tmp_path: Path) -> None:
    """Given a batch that is executed one by one after a death, and its first request expires meanwhile.

    The batcher answers that request, and the worker, which has the result a moment later, does not count it.
    """
    batcher = stack.batcher(*HTTP)
    first = stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    expiring = {
        "correlation_id": "expiring",
        "body": json.dumps({"gate": str(tmp_path / "gate")}),
        "expiration": 3000,
    }
    stack.send_packed(MODEL, [expiring, {"correlation_id": "other", "body": "1"}])
    wait_until(lambda: stack.pending(MODEL) == 1, description="the first worker waits at the gate")
    second = stack.worker(SPEC, *WORKER)
    first.kill()
    producer = Producer(stack)
    producer.receive("DEADLINE_EXCEEDED", "in_flight", "expiring")
    second.wait_for("batch reclaimed")
    (tmp_path / "gate").touch()
    producer.receive("OK", "", "other")
    second.wait_for("batch")

    def counted() -> Counter[tuple[str, ...]]:
        return total([scrape(batcher), scrape(second)], "carpool_requests_total", "status", "reason")

    wait_until(lambda: counted().total() >= 2, description="both are counted")
    assert counted() == producer.expected


def assert_idle_gauges(stack: Stack, batcher: Service, *workers: Service) -> None:
    """Gauges return to zero, and count the model processes and the active batcher."""
    stack.wait_until_idle(MODEL)

    def values() -> list[float | None]:
        page = scrape(batcher)
        return [gauge(page, name) for name in (*GAUGES, "carpool_model_processes", "carpool_batcher_active")]

    wait_until(
        lambda: values() == [*[0] * len(GAUGES), len(workers), 1], description="the gauges show an idle model"
    )
    for worker in workers:
        wait_until(
            lambda: gauge(scrape(worker), "carpool_batches_in_hand") == 0,  # noqa: B023
            description="no batch in hand",
        )


def test_gauges_show_waiting_requests_and_batches_in_flight(stack: Stack, tmp_path: Path) -> None:
    """Given one batch at a gate and three waiting requests, expect their number, bytes and age."""
    batcher = stack.batcher(*HTTP)
    worker = stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    producer = Producer(stack)
    names = send_to_gate(stack, producer, tmp_path / "gate")
    names += [producer.send("x" * 100) for _ in range(3)]

    def shown() -> list[float | None]:
        page = scrape(batcher)
        return [gauge(page, name) for name in GAUGES if name != "carpool_oldest_request_seconds"]

    wait_until(
        lambda: shown() == [3, 3 * 102, 1, 3],
        description="the gauges show waiting requests and the batch in flight",
    )
    wait_until(lambda: gauge(scrape(worker), "carpool_batches_in_hand") == 1, description="one batch in hand")
    oldest_s = gauge(scrape(batcher), "carpool_oldest_request_seconds") or 0.0
    wait_until(
        lambda: (gauge(scrape(batcher), "carpool_oldest_request_seconds") or 0.0) > oldest_s + 0.2,
        description="the age of the oldest request grows",
    )
    (tmp_path / "gate").touch()
    producer.receive("OK", "", *names)
    assert_idle_gauges(stack, batcher, worker)


def test_only_the_active_batcher_exports_gauges(stack: Stack) -> None:
    """Given two batchers, one exports the gauges; when it is killed, the other does."""
    batchers = [stack.batcher(*HTTP) for _ in range(2)]
    stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)

    def shown(batcher: Service) -> tuple[float | None, int]:
        """The gauge `carpool_batcher_active`, and the number of other gauges exported."""
        page = scrape(batcher)
        gauges = [gauge(page, name) for name in (*GAUGES, "carpool_model_processes")]
        return gauge(page, "carpool_batcher_active"), sum(value is not None for value in gauges)

    wait_until(
        lambda: {shown(batcher) for batcher in batchers} == {(0, 0), (1, 6)},
        description="one of them exports the gauges",
    )
    active = stack.active_batcher(MODEL)
    (standby,) = [batcher for batcher in batchers if batcher is not active]
    assert get(standby, "/readyz") == (200, "ok"), "a standby batcher is ready to take over"
    active.kill()
    wait_until(lambda: shown(standby) == (1, 6), description="the other has taken over")


def test_probes_report_each_state(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, ready, without Redis, ready again, draining: `readyz` gives the reason; `healthz` stays OK."""
    monkeypatch.setenv(LOAD_GATE, str(tmp_path / "loaded"))
    batcher = stack.batcher(*HTTP)
    worker = stack.worker(SPEC, *WORKER, ready=False)
    assert get(worker, "/readyz") == (503, "the model is loading")
    assert get(worker, "/healthz") == (200, "ok")
    (tmp_path / "loaded").touch()
    services = (batcher, worker)
    wait_until_ready(*services)

    stack.wait_for_model(MODEL)
    os.kill(stack.server.pid, signal.SIGTERM)
    for service in services:
        wait_until(
            lambda: get(service, "/readyz")[0] == 503,  # noqa: B023
            description="the service has noticed that Redis is down",
        )
        reason = get(service, "/readyz")[1]
        assert str(stack.server.port) in reason, reason
        assert get(service, "/healthz") == (200, "ok")
        assert health(service) == 1
        assert sum_of([scrape(service)], "carpool_redis_errors_total") > 0
    assert gauge(scrape(batcher), "carpool_waiting_requests") is None, (
        "without Redis the gauges may be outdated"
    )
    stack.server.restart()
    wait_until_ready(*services)
    assert [health(service) for service in services] == [0, 0], [
        get(service, "/readyz") for service in services
    ]

    names = send_to_gate(stack, Producer(stack), tmp_path / "gate")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: get(worker, "/readyz") == (503, "draining"), description="the worker drains")
    assert get(worker, "/healthz") == (200, "ok")
    (tmp_path / "gate").touch()
    assert [stack.result(MODEL, name)["status"] for name in names] == ["OK"] * 3
    assert worker.process.wait(EVENTUALLY_S) == 0
    assert get(batcher, "/readyz") == (200, "ok")


def wait_until_ready(*services: Service) -> None:
    for service in services:
        wait_until(
            lambda: get(service, "/readyz") == (200, "ok"),  # noqa: B023
            description=f"{service.name} is ready",
        )
        assert get(service, "/healthz") == (200, "ok")


def health(service: Service) -> int:
    """The exit status of `carpool health`."""
    return main(["health", "--http-port", service.status_url.rpartition(":")[2]])


def test_port_in_use_ends_the_service(stack: Stack) -> None:
    """Given a batcher's port, when a worker is started with it, expect an error and exit status 1."""
    port = stack.batcher(*HTTP).status_url.rpartition(":")[2]
    worker = stack.worker(SPEC, "--http-port", port, ready=False)
    assert worker.process.wait(EVENTUALLY_S) == 1
    (event,) = worker.events("worker cannot start")
    assert event["reason"] == f"cannot listen on http://127.0.0.1:{port}: Address already in use"
