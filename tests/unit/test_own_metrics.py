"""A model's own metrics: what they count, which are refused, and what a worker exports of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from carpool import metrics
from carpool.metrics import METRICS_MAX, OTHER, SERIES_MAX, Counter, Description, Gauge, Histogram, Registry
from carpool.prometheus import CollectorRegistry
from carpool_worker.model_process.frames import Measured
from carpool_worker.own_metrics import OwnMetrics


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A process of its own, as far as metrics know."""
    new = Registry()
    monkeypatch.setattr(metrics, "REGISTRY", new)
    return new


@pytest.fixture
def worker() -> OwnMetrics:
    return OwnMetrics("model")


def send(registry: Registry, worker: OwnMetrics, replica: int = 0) -> None:
    """What has changed, as it crosses the boundary."""
    for change in registry.take_changes():
        measured = Measured.read(msgpack.unpackb(msgpack.packb(Measured.of(change).message())))
        assert measured is not None
        worker.take(replica, measured)


def exported(worker: OwnMetrics) -> dict[str, float]:
    collected = CollectorRegistry()
    collected.register(worker)
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sample.labels.items()): sample.value
        for family in collected.collect()
        for sample in family.samples
    }


def test_counters_and_histograms_are_summed_over_processes(registry: Registry, worker: OwnMetrics) -> None:
    tokens = metrics.counter("tokens", "Tokens", "language")
    seconds = metrics.histogram("seconds", "Times", buckets=(1, 2))
    for replica in range(2):
        tokens.inc(3, language="en")
        seconds.observe(1)
        send(registry, worker, replica)
    tokens.inc(language="de")
    seconds.observe(5.5)
    send(registry, worker)
    send(registry, worker)  # nothing has changed
    assert exported(worker) == {
        "tokens_total model=model language=en": 6,
        "tokens_total model=model language=de": 1,
        "seconds_bucket model=model le=1.0": 2,
        "seconds_bucket model=model le=2.0": 2,
        "seconds_bucket model=model le=+Inf": 3,
        "seconds_count model=model": 3,
        "seconds_sum model=model": 7.5,
    }
    assert (tokens.value(language="en"), seconds.value()) == (6, 3)


def test_a_gauge_is_that_of_each_replica(registry: Registry, worker: OwnMetrics) -> None:
    entries = metrics.gauge("entries", "Entries")
    entries.set(5)
    send(registry, worker, 0)
    entries.inc(-2)
    send(registry, worker, 1)
    assert exported(worker) == {"entries model=model replica=0": 5, "entries model=model replica=1": 3}


def test_the_same_call_returns_the_same_metric() -> None:
    first = metrics.counter("a", "A", "x")
    assert metrics.counter("a", "A", "x") is first
    for other in (lambda: metrics.gauge("a", "A", "x"), lambda: metrics.counter("a", "A", "y")):
        with pytest.raises(ValueError, match="a: was made before as a counter"):
            other()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: metrics.counter("", "A"), "its name must have 1 to 80"),
        (lambda: metrics.counter("ä", "A"), "its name must have"),
        (lambda: metrics.counter("a" * 81, "A"), "its name must have"),
        (lambda: metrics.counter("carpool_x", "A"), "must not begin with carpool_"),
        (lambda: metrics.counter("x_total", "A"), "or end with _total"),
        (lambda: metrics.counter("x", ""), "needs a text"),
        (lambda: metrics.counter("x", "A", "model"), "'model' cannot be a label"),
        (lambda: metrics.counter("x", "A", "a-b"), "'a-b' cannot be a label"),
        (lambda: metrics.counter("x", "A", "a", "a"), "each once"),
        (lambda: metrics.histogram("x", "A", buckets=(2, 1)), "must ascend"),
        (lambda: metrics.histogram("x", "A", buckets=(1, float("inf"))), "must be finite numbers"),
        (lambda: metrics.counter("x", "A").inc(-1), "cannot be changed by -1"),
        (lambda: metrics.counter("x", "A", "a").inc(b=1), "its labels are a; given are b"),
        (lambda: metrics.histogram("x", "A").observe(float("nan")), "cannot be counted"),
    ],
)
def test_what_cannot_be_exported_is_refused(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=r"^metric ") as refused:
        make()
    assert said in str(refused.value)


def test_names_and_values_of_labels_are_limited(registry: Registry, worker: OwnMetrics) -> None:
    """Given a model that uses the IDs of requests as labels, in two lives, expect a limited page."""
    users = metrics.counter("users", "Users", "user")
    for number in range(SERIES_MAX + 500):
        users.inc(user=number)
    send(registry, worker)
    found = exported(worker)
    assert len(found) == SERIES_MAX + 1 and found[f"users_total model=model user={OTHER}"] == 500
    many = [("x" + str(number), [1.0]) for number in range(3 * SERIES_MAX)]
    description = Description("users", "counter", "Users", ("user",))
    worker.take(0, Measured(*description, [((value,), numbers) for value, numbers in many]))
    assert len(exported(worker)) == 2 * SERIES_MAX
    for number in range(METRICS_MAX - 1):
        metrics.counter(f"c{number}", "Another")
    with pytest.raises(ValueError, match=f"a model may have {METRICS_MAX} metrics"):
        metrics.counter("one_more", "Another")


def test_another_version_of_the_model_begins_anew(worker: OwnMetrics) -> None:
    worker.take(0, Measured("a", "counter", "A", (), (), [((), [5.0])]))
    worker.take(0, Measured("a", "gauge", "A", (), (), [((), [1.0])]))
    assert exported(worker) == {"a model=model replica=0": 1}


@pytest.mark.parametrize(
    "fields",
    [
        ("measured", "a", "sum", "A", [], [], []),
        ("measured", "a", "counter", "A", ["x"], [], [[[], [1.0]]]),
        ("measured", "a", "counter", "A", [], [], [[[], [1.0, 2.0]]]),
        ("measured", "a", "counter", "A", [], []),
    ],
)
def test_what_no_process_sends_is_refused(fields: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Measured.read(list(fields))
    assert Measured.read(["raised"]) is None


def test_threads_count_together(registry: Registry, worker: OwnMetrics) -> None:
    made: list[Counter | Gauge | Histogram] = []

    def count() -> None:
        mine = metrics.counter("together", "Counted", "x")
        made.append(mine)
        for number in range(2000):
            mine.inc(x=number % 3)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        send(registry, worker)
    send(registry, worker)
    assert sum(exported(worker).values()) == 8000 and len(set(map(id, made))) == 1
