"""What operators see of a stepping model on a real stack: top, models, metrics, logs, and what is refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from carpool.client.sync import Client
from carpool.keys import Keys
from carpool.wire.report import BatcherReport, SteppingReport
from support.command import carpool
from support.models.stepping import SLOTS
from support.stack import Service, Stack
from support.waiting import EVENTUALLY_S, wait_until

MODEL: Final = "Chain"
KEYS: Final = Keys(MODEL)
CHUNKS: Final = 6
STEP_S: Final = 0.02
TIMEOUT_S: Final = EVENTUALLY_S


class Served(Stack):
    """A stack with a batcher and a worker of the model."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.of_batcher = self.batcher("--http-port", "0")
        self.of_worker = self.worker(f"stepping.py:{MODEL}", "--http-port", "0")
        self.wait_for_model(MODEL)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def of_steps(stack: Stack) -> SteppingReport:
    """What the batcher reports of the stepping model now."""
    report = BatcherReport.decode(stack.redis.get(KEYS.report) or b"")
    return SteppingReport(0, 0, None, None) if report is None or report.stepping is None else report.stepping


def sums(service: Service) -> dict[str, float]:
    """The metrics of a service, without their labels."""
    connection = http.client.HTTPConnection(service.status_url.removeprefix("http://"), timeout=10)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" not in sample.labels:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_top_models_and_metrics_show_slots_and_chunks(served: Served, gate: Path) -> None:
    """Given more streams than slots, which wait at a gate and then end, and one that is withdrawn."""
    assert "carpool_slots_in_use" in sums(served.of_worker)
    chunks_before = chunks_of_worker(served)
    body = {"length": CHUNKS, "step_s": STEP_S, "gate": str(gate)}
    names = [served.send(MODEL, body=json.dumps(body), stream=1) for _ in range(SLOTS + 2)]
    wait_until(
        lambda: (
            (sums(served.of_worker)["carpool_slots_in_use"], served.redis.xlen(KEYS.batches))
            == (SLOTS, SLOTS + 1)
        ),
        description="all slots are in use, and one request is prefetched",
        timeout_s=TIMEOUT_S,
    )
    wait_until(lambda: top(served)["waiting"] == 1, description="the report is recent", timeout_s=TIMEOUT_S)
    shown = top(served)
    assert (shown["stepping"]["slots"], shown["stepping"]["slots_in_use"]) == (SLOTS, SLOTS)
    assert (shown["stepping"]["prefetched"], shown["fill"]) == (1, None)
    assert f"{SLOTS} of {SLOTS}" in carpool(served.url, "models").stdout

    gate.touch()
    for name in names:
        wait_for_final(served, name)
    with Client(served.url, timeout=TIMEOUT_S) as client:
        stream = client.stream(MODEL, {"length": 10_000, "step_s": STEP_S})
        ended = CHUNKS * len(names)
        while of_steps(served).chunks <= ended:  # it counts while it is generated
            next(stream)
        stream.close()
    wait_until(
        lambda: not sums(served.of_worker)["carpool_slots_in_use"] and not served.redis.xlen(KEYS.batches),
        description="the last one has ended: it writes nothing more",
        timeout_s=TIMEOUT_S,
    )
    wait_until(
        lambda: of_steps(served).chunks == chunks_of_worker(served) - chunks_before,
        description="the last one settled, and all chunks are counted",
        timeout_s=TIMEOUT_S,
    )

    found, (one,) = of_steps(served), json.loads(carpool(served.url, "models", "--json").stdout)
    assert one["stepping"] == {
        **found._asdict(),
        "first_us": as_list(found.first_us),
        "gap_us": as_list(found.gap_us),
    }
    assert found.gap_us is not None and found.first_us is not None
    ended_us = found.first_us[0] + (CHUNKS - 1) * found.gap_us[0]  # the first chunk may be written late
    assert ended_us >= CHUNKS * STEP_S * 1e6 * 0.95, "each step takes so long"
    assert found.first_us[0] >= STEP_S * 1e6 * 0.95
    worker, batcher = sums(served.of_worker), sums(served.of_batcher)
    # The worker counts a chunk when it is written; the batcher counts those of a stream when it has settled.
    assert worker["carpool_chunks_total"] - chunks_before == found.chunks
    assert worker["carpool_slots_in_use"] == 0, "also after the last request was withdrawn"
    assert worker["carpool_first_chunk_seconds_count"] == len(names) + 1
    assert worker["carpool_request_seconds_count"] == len(names)
    assert worker["carpool_compute_output_seconds_count"] == worker["carpool_executions_total"] == 0
    assert batcher["carpool_batch_requests_count"] == batcher["carpool_batch_fill_ratio_count"] == 0
    assert batcher["carpool_batches_total"] == len(names) + 1
    assert_logged(served, len(names), found.chunks)


def chunks_of_worker(served: Served) -> int:
    """How many chunks were written."""
    return int(sums(served.of_worker)["carpool_chunks_total"])


def top(stack: Stack) -> dict[str, Any]:
    (shown,) = json.loads(carpool(stack.url, "top", "--once", "--json").stdout)["models"]
    assert isinstance(shown, dict)
    return shown


def wait_for_final(stack: Stack, correlation_id: str) -> None:
    """Read chunks until the final envelope."""
    while not stack.result(MODEL, correlation_id)["final"]:
        pass


def as_list(quantiles_us: tuple[int, int] | None) -> list[int] | None:
    return None if quantiles_us is None else list(quantiles_us)


def assert_logged(stack: Stack, ended: int, chunks: int) -> None:
    """The summaries of the worker have everything, once it was idle for a second."""

    def total(name: str) -> int:
        return sum(int(line[name]) for line in stack.events("steps"))

    wait_until(
        lambda: total("chunks") == chunks, description="summaries have all chunks", timeout_s=TIMEOUT_S
    )
    assert sum(line["ended"].get("OK", 0) for line in stack.events("steps")) == ended
    assert total("expired_or_withdrawn") == 1
    assert max(line["slots_in_use"] for line in stack.events("steps")) == SLOTS
    assert stack.events("batches") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("config", MODEL, "policy=deferred"),
            "carpool config: policy: a stepping model takes a request as soon",
        ),
        (
            ("config", MODEL, "max_queue_delay_ms=3"),
            "carpool config: max_queue_delay_ms: a stepping model forms no",
        ),
        (
            ("tune", MODEL, "7", "--latency-ms", "30"),
            "carpool tune: Chain is a stepping model, which forms no",
        ),
        (
            ("simulate", "--model", MODEL),
            "carpool simulate: Chain is a stepping model, which forms no batches",
        ),
    ],
)
def test_what_is_for_batches_is_refused(served: Served, arguments: tuple[str, ...], message: str) -> None:
    done = carpool(served.url, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message)


def test_slots_follow_an_override(served: Served) -> None:
    assert carpool(served.url, "config", MODEL, "max_batch_size=3", "reader_idle_ms=9000").returncode == 0
    wait_until(lambda: of_steps(served).slots == 3, description="there are 3 slots", timeout_s=TIMEOUT_S)
    assert carpool(served.url, "config", MODEL, "max_batch_size=", "reader_idle_ms=").returncode == 0
    wait_until(lambda: of_steps(served).slots == SLOTS, description="all slots are back", timeout_s=TIMEOUT_S)
