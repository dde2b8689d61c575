"""What the services say of themselves over HTTP is what happened: counters, gauges, probes."""

from __future__ import annotations

import http.client
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
from support.waiting import wait_until

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


def ask(service: Service, path: str) -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection(service.status_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode().strip()
    finally:
        connection.close()


def scrape(service: Service) -> Page:
    status, body = ask(service, "/metrics")
    assert status == 200
    return [sample for family in text_string_to_metric_families(body) for sample in family.samples]


def total(pages: Iterable[Page], name: str, *labels: str) -> Counter[tuple[str, ...]]:
    """A metric summed over processes, by these labels, as `sum by (...)` does; without what is zero."""
    found: Counter[tuple[str, ...]] = Counter()
    for page in pages:
        for sample in page:
            if sample.name == name:
                found[tuple(sample.labels[label] for label in labels)] += round(sample.value)
    return +found


def one(pages: Iterable[Page], name: str) -> int:
    return total(pages, name)[()]


def has(page: Page, name: str, model: str = MODEL) -> float | None:
    """The value of a gauge; None if it is not there."""
    return next((one.value for one in page if (one.name, one.labels.get("model")) == (name, model)), None)


class Producer:
    """Sends, receives, and keeps the account: what it received, and what it expects to be counted for it."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self.received: Counter[str] = Counter()
        self.expected: Counter[tuple[str, str]] = Counter()

    def send(self, body: object, **fields: str | int) -> str:
        return self._stack.send(MODEL, body=json.dumps(body), **fields)

    def pack(self, *bodies: object) -> list[str]:
        """Several requests in one entry; their correlation IDs."""
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
        """Each of these gets this status, for that reason."""
        for name in names:
            got = self._stack.result(MODEL, name)
            assert got["status"] == status, got
            self.received[status] += 1
            self.expected[status, reason] += 1

    def infer(self, status: str, reason: str, body: object, **fields: str | int) -> None:
        self.receive(status, reason, self.send(body, **fields))


def serve(producer: Producer) -> None:
    """Good ones, and those that cannot be understood: by the batcher, by the worker, by the model."""
    for _ in range(4):
        producer.receive("OK", "", *[producer.send(number) for number in range(10)])
    producer.receive("OK", "", *producer.pack(*range(16)))  # which leave as two batches at once
    for fields in ({"priority": 10}, {"content_type": "text/plain"}):
        producer.infer("INVALID_ARGUMENT", "input", 1, **fields)
    producer.infer("UNIMPLEMENTED", "input", 1, sequence_id=3)
    producer.infer("INVALID_ARGUMENT", "cost", 1, cost=1001)
    producer.infer("INVALID_ARGUMENT", "input", {}, content_type="application/msgpack")
    producer.infer("INVALID_ARGUMENT", "input", "refuse")
    producer.infer("INTERNAL", "model", "raise")


def crowd(stack: Stack, producer: Producer, gate: Path) -> None:
    """While the worker waits at a gate: expirations, withdrawals, and more than may wait."""
    held = producer.send({"gate": str(gate)}, expiration=1000)
    wait_until(lambda: stack.pending(MODEL) == 1, description="the worker waits at the gate")
    ahead = producer.pack(*range(8))  # a full batch ahead of the worker: from now on nothing else leaves
    wait_until(lambda: stack.redis.xlen(Keys(MODEL).batches) == 2, description="a batch waits ahead")
    late = [producer.send(number, expiration=50) for number in range(3)]
    producer.receive("DEADLINE_EXCEEDED", "waiting", *late)
    regretted = producer.pack(1, 2, 3)
    stack.send(MODEL, withdraw=" ".join(regretted))
    producer.receive("CANCELLED", "withdrawn", *regretted)
    producer.receive("DEADLINE_EXCEEDED", "in_flight", held)
    many = producer.pack(*range(29))  # of which 16 may wait
    producer.receive("RESOURCE_EXHAUSTED", "queue_size", *many[16:])
    gate.touch()
    producer.receive("OK", "", *ahead, *many[:16])


def hold(stack: Stack, producer: Producer, gate: Path) -> list[str]:
    """A batch that waits at a gate; its correlation IDs."""
    names = producer.pack({"gate": str(gate)}, 1, 2)
    wait_until(lambda: stack.pending(MODEL) == 1, description="a worker waits at the gate")
    return names


def test_counters_are_what_producers_received(stack: Stack, tmp_path: Path) -> None:
    """Given all that can become of a request, and workers killed and frozen, the sums are exact."""
    batcher = stack.batcher(*HTTP)
    first = stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    producer = Producer(stack)

    def agree(*pages: Page) -> list[Page]:
        """All pages, once they have caught up: a request is counted after its result was written."""
        found: list[Page] = []

        def caught_up() -> bool:
            found[:] = [*pages, *(scrape(service) for service in stack.services if service.alive)]
            return sum(total(found, "carpool_requests_total").values()) >= sum(producer.received.values())

        wait_until(caught_up, description="all that was received is counted")
        assert total(found, "carpool_requests_total", "status", "reason") == producer.expected
        by_status = total(found, "carpool_requests_total", "status")
        assert {status: count for (status,), count in by_status.items()} == producer.received
        return found

    serve(producer)
    crowd(stack, producer, tmp_path / "first")
    producer.infer("ABORTED", "dead_letter", "die")

    names = hold(stack, producer, tmp_path / "second")  # and then its worker is killed
    of_first = agree()[1]
    second = stack.worker(SPEC, *WORKER)
    first.kill()
    (tmp_path / "second").touch()
    producer.receive("OK", "", *names)

    names = hold(stack, producer, tmp_path / "third")  # and then its worker stands still
    third = stack.worker(SPEC, *WORKER)
    second.freeze()
    third.wait_for("batch reclaimed")
    (tmp_path / "third").touch()
    producer.receive("OK", "", *names)
    second.thaw()
    second.wait_for("commit fenced")

    pages = agree(of_first)
    assert one(pages, "carpool_redeliveries_total") == 2
    assert one(pages, "carpool_fenced_commits_total") == 1
    assert one(pages, "carpool_dead_letters_total") == stack.redis.xlen(Keys(MODEL).dead) == 1
    assert one(pages, "carpool_model_process_deaths_total") == 2
    settled = [fields for _, fields in stack.redis.xrange(Keys(MODEL).settled) if b"batch" in fields]
    assert one(pages, "carpool_batches_total") == len(settled)
    assert total(pages, "carpool_batches_total", "reason").keys() == {("full",), ("idle",)}
    dispatched = sum(int(fields[b"size"]) for fields in settled)
    assert one(pages, "carpool_batch_requests_sum") == one(pages, "carpool_queue_seconds_count") == dispatched
    assert one(pages, "carpool_batch_fill_ratio_count") == len(settled)
    by_worker = one([of_first, scrape(second), scrape(third)], "carpool_requests_total")
    assert one(pages, "carpool_request_seconds_count") == by_worker
    at_rest(stack, batcher, second, third)


def test_who_expires_while_executed_alone_is_counted_once(stack: Stack, tmp_path: Path) -> None:
    """Given a batch that is executed one by one after a death, whose first request expires under way: the
    batcher answers it, and its worker, which has its result a moment later, does not count it again."""
    batcher = stack.batcher(*HTTP)
    first = stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    held = {
        "correlation_id": "held",
        "body": json.dumps({"gate": str(tmp_path / "gate")}),
        "expiration": 3000,
    }
    stack.send_packed(MODEL, [held, {"correlation_id": "other", "body": "1"}])
    wait_until(lambda: stack.pending(MODEL) == 1, description="the first waits at the gate")
    second = stack.worker(SPEC, *WORKER)
    first.kill()
    producer = Producer(stack)
    producer.receive("DEADLINE_EXCEEDED", "in_flight", "held")
    second.wait_for("batch reclaimed")
    (tmp_path / "gate").touch()
    producer.receive("OK", "", "other")
    second.wait_for("batch")
    pages = [scrape(batcher), scrape(second)]
    assert total(pages, "carpool_requests_total", "status", "reason") == producer.expected


def at_rest(stack: Stack, batcher: Service, *workers: Service) -> None:
    """Gauges come down to nothing, and count who is there."""
    stack.wait_until_idle(MODEL)

    def values() -> list[float | None]:
        page = scrape(batcher)
        return [has(page, name) for name in (*GAUGES, "carpool_model_processes", "carpool_batcher_active")]

    wait_until(
        lambda: values() == [*[0] * len(GAUGES), len(workers), 1], description="the gauges are at rest"
    )
    for worker in workers:
        wait_until(lambda: has(scrape(worker), "carpool_batches_in_hand") == 0, description="hands are empty")  # noqa: B023


def test_gauges_show_what_waits_and_rides(stack: Stack, tmp_path: Path) -> None:
    """Given one batch at a gate and three requests behind it, expect just that, with bytes and age."""
    batcher = stack.batcher(*HTTP)
    worker = stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    producer = Producer(stack)
    names = hold(stack, producer, tmp_path / "gate")
    names += [producer.send("x" * 100) for _ in range(3)]

    def seen() -> list[float | None]:
        page = scrape(batcher)
        return [has(page, name) for name in GAUGES if name != "carpool_oldest_request_seconds"]

    wait_until(lambda: seen() == [3, 3 * 102, 1, 3], description="what waits and what rides is shown")
    wait_until(lambda: has(scrape(worker), "carpool_batches_in_hand") == 1, description="one batch in hand")
    oldest_s = has(scrape(batcher), "carpool_oldest_request_seconds") or 0.0
    wait_until(
        lambda: (has(scrape(batcher), "carpool_oldest_request_seconds") or 0.0) > oldest_s + 0.2,
        description="the oldest one grows older",
    )
    (tmp_path / "gate").touch()
    producer.receive("OK", "", *names)
    at_rest(stack, batcher, worker)


def test_only_the_active_batcher_shows_what_waits(stack: Stack) -> None:
    """Given two batchers, one exports the gauges; when it is killed, the other does."""
    batchers = [stack.batcher(*HTTP) for _ in range(2)]
    stack.worker(SPEC, *WORKER)
    stack.wait_for_model(MODEL)
    active = stack.active_batcher(MODEL)
    (standby,) = [batcher for batcher in batchers if batcher is not active]

    def shown(batcher: Service) -> tuple[float | None, int]:
        """Whether it is active, and how many of the gauges are there."""
        page = scrape(batcher)
        gauges = [has(page, name) for name in (*GAUGES, "carpool_model_processes")]
        return has(page, "carpool_batcher_active"), sum(gauge is not None for gauge in gauges)

    wait_until(lambda: shown(active) == (1, 6), description="the active batcher exports the gauges")
    wait_until(lambda: shown(standby) == (0, 0), description="the other says that it stands by")
    assert ask(standby, "/readyz") == (200, "ok"), "it is ready to take over"
    active.kill()
    wait_until(lambda: shown(standby) == (1, 6), description="the other has taken over")


def test_probes(stack: Stack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading, ready, without Redis, ready again, draining: not ready for a reason, and never unhealthy."""
    monkeypatch.setenv(LOAD_GATE, str(tmp_path / "loaded"))
    batcher = stack.batcher(*HTTP)
    worker = stack.worker(SPEC, *WORKER, ready=False)
    assert ask(worker, "/readyz") == (503, "the model is loading")
    assert ask(worker, "/healthz") == (200, "ok")
    (tmp_path / "loaded").touch()
    services = (batcher, worker)
    ready(*services)

    stack.wait_for_model(MODEL)
    os.kill(stack.server.pid, signal.SIGTERM)
    for service in services:
        wait_until(lambda: ask(service, "/readyz")[0] == 503, description="Redis is missed")  # noqa: B023
        said = ask(service, "/readyz")[1]
        assert str(stack.server.port) in said, said
        assert ask(service, "/healthz") == (200, "ok")
        assert health(service) == 1
        assert one([scrape(service)], "carpool_redis_errors_total") > 0
    assert has(scrape(batcher), "carpool_waiting_requests") is None, "what it knew may be wrong by now"
    stack.server.restart()
    ready(*services)
    assert [health(one) for one in services] == [0, 0], [ask(one, "/readyz") for one in services]

    names = hold(stack, Producer(stack), tmp_path / "gate")
    worker.signal(signal.SIGTERM)
    wait_until(lambda: ask(worker, "/readyz") == (503, "draining"), description="the worker drains")
    assert ask(worker, "/healthz") == (200, "ok")
    (tmp_path / "gate").touch()
    assert [stack.result(MODEL, name)["status"] for name in names] == ["OK"] * 3
    assert worker.process.wait(15) == 0
    assert ask(batcher, "/readyz") == (200, "ok")


def ready(*services: Service) -> None:
    for service in services:
        wait_until(
            lambda: ask(service, "/readyz") == (200, "ok"),  # noqa: B023
            description=f"{service.name} is ready",
            timeout_s=20,
        )
        assert ask(service, "/healthz") == (200, "ok")


def health(service: Service) -> int:
    """The exit status of `carpool health`."""
    return main(["health", "--http-port", service.status_url.rpartition(":")[2]])


def test_a_port_that_is_taken_ends_the_service(stack: Stack) -> None:
    """Given a batcher's port, when a worker is told to take it, it says so and ends with 1."""
    port = stack.batcher(*HTTP).status_url.rpartition(":")[2]
    worker = stack.worker(SPEC, "--http-port", port, ready=False)
    assert worker.process.wait(20) == 1
    (said,) = worker.events("worker cannot start")
    assert said["reason"] == f"cannot serve http://127.0.0.1:{port}: Address already in use"
