"""What is measured, how it is counted, and that the document lists the same."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, cast

import prometheus_client
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from carpool.errors import INTERNAL, CarpoolError
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import RAW
from carpool.messages.results import Chunk, Result
from carpool.messages.settled import BatchSettled, Failures
from carpool.service_metrics import (
    DURATIONS_US,
    PERCENTS,
    REDIS_ERROR_KINDS,
    BucketCounts,
    CommonMetrics,
    Histogram,
)
from carpool.store.connection import CommandError, LinkError
from carpool.store.steps import KeptChunk, StepWrite
from carpool.wire.report import SequencesReport
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.meter import BatcherMetrics, Meter, SequenceMeter
from carpool_console.meter import ROUTES as CONSOLE_ROUTES
from carpool_console.meter import ConsoleMetrics
from carpool_gateway.limits import Limits
from carpool_gateway.meter import ROUTES, GatewayMetrics
from carpool_gateway.server import App, Server
from carpool_worker.execution import Execution
from carpool_worker.meter import MemoryGauges, StepCounts, WorkerMetrics
from support.executions import execution_of as execution_with_states
from support.executions import run_of_sequence

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
def test_histogram_equals_prometheus_clients_own(
    bounds: tuple[Sequence[int], int], values: list[int], cuts: list[int]
) -> None:
    """Given any values, counted in any groups, expect the same samples under the same names."""
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


def test_concurrent_observations_are_all_counted() -> None:
    bins = BucketCounts((10, 20))

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
        (CommandError("x9f1", "an error of a module"), "other"),
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


def test_statuses_invented_by_a_model_share_one_label() -> None:
    """Given a model that invents a status for each request, expect only the documented labels."""
    metrics = WorkerMetrics(MODEL)
    execution = execution_of("OK", "NOT_FOUND", "MINE_1", "MINE_2", "ABORTED")
    metrics.committed(execution, execution.counts(), output_us=5, now_us=2_000)
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


def test_chunks_of_one_script_are_counted_together() -> None:
    """Given three requests with a first chunk, later ones of which some are merged, and none."""
    metrics = WorkerMetrics(MODEL)
    writes = [
        (StepWrite(BATCH, 0, [kept(1)], first_us=9_000), None),
        (StepWrite(BATCH, 4, [kept(1), kept(3)]), 40_000),
        (StepWrite(BATCH, 0), None),
    ]
    metrics.chunks_written(writes, 60_000)
    metrics.stepped(7_000)
    metrics.ended(execution_of("OK"), execution_of("OK").counts(), now_us=2_000)
    metrics.watch_slots(lambda: 3, lambda: 8)
    found = {name: value for (name, _), value in samples(metrics.registry).items()}
    assert metrics.step_counts() == StepCounts(1, 7_000, 5)
    assert (found["carpool_chunks_total"], found["carpool_slots_in_use"], found["carpool_slots"]) == (5, 3, 8)
    assert (found["carpool_first_chunk_seconds_count"], found["carpool_first_chunk_seconds_sum"]) == (
        1,
        0.009,
    )
    assert (found["carpool_chunk_gap_seconds_count"], found["carpool_chunk_gap_seconds_sum"]) == (1, 0.02)
    assert (found["carpool_request_seconds_count"], found["carpool_compute_output_seconds_count"]) == (1, 0)
    assert found["carpool_executions_total"] == 0


def test_states_that_are_written_are_counted_and_no_others() -> None:
    """Given states loaded for requests that failed, or that end their sequence, expect them not counted."""
    runs = [run_of_sequence(name, 1, ends=name == "c") for name in "abcd"]
    execution = execution_with_states(*runs, states={at: bytes(10**at) for at in range(4)})
    execution.fail(0, INTERNAL, "")
    for position in (1, 2, 3):
        run = execution.batch.runs[position]
        execution.succeed(run, position, [position], [b"1"])
    execution.drop([3])
    metrics = WorkerMetrics("m")
    metrics.committed(execution, execution.counts(), 0, 2_000)
    (family,) = [one for one in metrics.registry.collect() if one.name == "carpool_state_bytes"]
    assert [sample.value for sample in family.samples if sample.name.endswith("_total")] == [10]


def kept(merged: int) -> KeptChunk:
    return KeptChunk(Chunk("a", RAW, b"", 0, merged), b"")


BATCH: Final = Batch(
    "1-1", 1, [BatchedRun("1-1", ["a"], [b""], RAW, None, 1_000, None, None)], "full", 1_500, ""
)


def execution_of(*statuses: str) -> Execution:
    """An execution whose requests have these results."""
    names = [str(at) for at in range(len(statuses))]
    run = BatchedRun("1-1", names, [b""] * len(names), RAW, None, 1_000, None, None)
    execution = Execution(Batch("1-1", 1, [run], "full", 1_500, ""))
    execution.results = {at: Result(str(at), status, RAW) for at, status in enumerate(statuses)}
    return execution


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
    """From items such as "- `carpool_batches_total` `reason`: `full`, `delay`"; the empty value is `""`."""
    found: dict[tuple[str, str], set[str]] = {}
    for line in DOCUMENT.read_text().replace("\n  ", " ").splitlines():
        head = re.match(r"- `(carpool_\w+)` `(\w+)`: ", line)
        if head:
            listed = re.findall(r"`([^`]*)`", line[head.end() :].partition(" (")[0])
            found[head[1], head[2]] = {value.strip('"') for value in listed}
    return found


def exported() -> dict[str, tuple[str, dict[str, set[str]]]]:
    """The same from the code: one model, every gauge, each status of a model, each kind of error."""
    batcher, worker, gateway = BatcherMetrics(), WorkerMetrics(MODEL), GatewayMetrics()
    gateway.server = Server(cast(App, None), Limits(), "")
    for route in ROUTES:
        gateway.count_answer(route, 200, 1)
    console = ConsoleMetrics()
    for route in CONSOLE_ROUTES:
        console.count_answer(route, 200, 1)
    meter = Meter(batcher, MODEL)
    settled = BatchSettled("b", "w/0", 2, 1, 1, 2, failures=Failures({INTERNAL: 1}, ""))
    meter.versions.settled("2", settled, InFlightBatch(0, 2, "", {}))
    SequenceMeter(batcher.sequences, MODEL).export(SequencesReport(1, 1, 1, 1, 1))
    for gauge in (*batcher.gauges, batcher.wanted, batcher.paused):
        gauge.labels(MODEL)
    worker.watch_memory([MemoryGauges(lambda: 1, lambda: 0)])
    statuses = [kind.status for kind in every_error(CarpoolError)]
    execution = execution_of(*statuses, "MINE")
    worker.committed(execution, execution.counts(), output_us=0, now_us=0)
    for kind in REDIS_ERROR_KINDS:
        worker.error(LinkError("") if kind == "link" else CommandError(kind, ""))
    families: dict[str, tuple[str, dict[str, set[str]]]] = {}
    for metrics in (batcher, worker, gateway, console):
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
                    if label not in ("model", "version", "code", "replica"):
                        several.add(value)
    return families


def every_error(kind: type[CarpoolError]) -> Iterator[type[CarpoolError]]:
    for one in kind.__subclasses__():
        if one.__module__ == "carpool.errors":
            yield one
            yield from every_error(one)


def test_document_lists_exactly_what_the_code_exports() -> None:
    """Names, types, labels, and each label's values: nothing more and nothing less."""
    assert documented() == exported()
