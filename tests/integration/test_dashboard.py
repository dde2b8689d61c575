"""The dashboard and the alerts, evaluated by a real Prometheus that scrapes a real stack."""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgpack
import pytest

from carpool.keys import Keys
from carpool.lifecycle import command_that_dies_with_parent
from carpool_batcher.meter import BatcherMetrics
from carpool_console.meter import ConsoleMetrics
from carpool_gateway.limits import Limits
from carpool_gateway.meter import GatewayMetrics
from carpool_gateway.server import Server
from carpool_worker.meter import WorkerMetrics
from support.http import call
from support.models.stepping import SLOTS
from support.redis_client import redis_at
from support.stack import Service, Stack, wait_for
from support.waiting import wait_until

OPS: Final = Path(__file__).parents[2] / "ops"
DASHBOARD: Final = OPS / "grafana" / "dashboards" / "carpool.json"
ALERTS: Final = OPS / "prometheus" / "alerts.yml"
MODEL: Final = "Plotted"
WRITER: Final = "Chain"  # a stepping model
FOLDING: Final = "Folding"  # a stateful one
CHUNKS: Final = 10  # of each stream
STEP_S: Final = 0.02
SCRAPE: Final = "200ms"
HTTP: Final = ("--http-port", "0")
LEASE: Final = ("--lease-ms", "6000")

Json = dict[str, Any]


def tool(name: str) -> str:
    """The path of `prometheus` or `promtool`. If missing, skip, or fail if CARPOOL_REQUIRED lists it."""
    path = shutil.which(name)
    if path is None:
        missing = (
            f"{name} is not on PATH; on Debian and Ubuntu: apt-get install --no-install-recommends prometheus"
        )
        if "prometheus" in os.environ.get("CARPOOL_REQUIRED", "").replace(",", " ").split():
            pytest.fail(missing)
        pytest.skip(missing)
    return path


def queries(of_row: str | None = None) -> dict[str, str]:
    """The queries of the dashboard, or of one row, by the title and legend of their panels."""
    found: dict[str, str] = {}
    row = ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        if of_row in (None, row):
            for target in panel.get("targets", []):
                found[f"{panel['title']}: {target['legendFormat']}"] = target["expr"]
    return found


# --- without Prometheus ------------------------------------------------------------------------------------


def test_dashboard_is_up_to_date() -> None:
    expected = runpy.run_path(str(OPS / "grafana" / "make_dashboard.py"))["text"]()
    assert DASHBOARD.read_text() == expected, "run ops/grafana/make_dashboard.py"


def test_each_panel_has_a_description_and_its_own_place() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource", "model"]
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        position = panel["gridPos"]
        left, top, width, height = (position[key] for key in ("x", "y", "w", "h"))
        own = {(left + x, top + y) for x in range(width) for y in range(height)}
        assert left + width <= 24 and not own & cells, panel["title"]
        cells |= own
        if panel["type"] != "row":
            assert len(panel["description"]) > 40, panel["title"]
            assert panel["datasource"]["uid"] == "${datasource}"


def _gateway_metrics() -> GatewayMetrics:
    """Those of a gateway that listens."""
    metrics = GatewayMetrics()
    metrics.server = Server(None, Limits(), "")  # type: ignore[arg-type]  # which serves nothing
    return metrics


def test_dashboard_and_alerts_use_existing_metrics() -> None:
    """The dashboard also shows each of Carpool's metrics, but for information, what few models have, and the
    console's."""
    families = [
        family
        for metrics in (BatcherMetrics(), WorkerMetrics(MODEL), _gateway_metrics(), ConsoleMetrics())
        for family in metrics.registry.collect()
        if family.name.startswith("carpool_")
    ]
    suffixes = {
        "counter": ["_total"],
        "histogram": ["_bucket", "_sum", "_count"],
        "info": ["_info"],
        "gauge": [""],
    }
    exported = {family.name + suffix: family.name for family in families for suffix in suffixes[family.type]}
    shown = set(re.findall(r"carpool_\w+", " ".join(queries().values())))
    assert shown <= exported.keys()
    assert set(re.findall(r"carpool_\w+", ALERTS.read_text())) <= exported.keys()
    hidden = {family.name for family in families} - {exported[name] for name in shown}
    shown_by_models = {"carpool_dead_letters_dropped", "carpool_model", "carpool_version_requests"}
    of_few_models = {"carpool_model_cost", "carpool_decode_wait_seconds"}
    of_traces = {"carpool_spans_dropped", "carpool_spans_exported"}
    of_the_console = {"carpool_console_requests", "carpool_console_seconds"}
    assert hidden == {"carpool_build", *of_few_models, *of_traces, *of_the_console, *shown_by_models}


# --- alerts, with synthetic series -------------------------------------------------------------------------

# For each alert: series that make it fire, and similar ones that do not. The notation is promtool's, with one
# value per minute.
EVALUATED_LATER: Final = {"CarpoolPaused": "70m"}
CASES: Final[dict[str, tuple[dict[str, str], dict[str, str]]]] = {
    "CarpoolNoActiveBatcher": (
        {'carpool_batcher_active{model="m"}': "0x9", 'carpool_batches_in_hand{model="m"}': "0x9"},
        {'carpool_batcher_active{model="m",instance="a"}': "0x9", 'carpool_batcher_active{model="m"}': "1x9"},
    ),
    "CarpoolNothingDispatched": (
        {
            'carpool_waiting_requests{model="m"}': "3x9",
            'carpool_in_flight_batches{model="m"}': "0x9",
            'carpool_model_processes{model="m"}': "1x9",
            'carpool_batches_total{model="m",reason="full"}': "7x9",
        },
        {
            'carpool_waiting_requests{model="m"}': "3x9",
            'carpool_in_flight_batches{model="m"}': "1x9",  # all processes are busy with long batches
            'carpool_model_processes{model="m"}': "1x9",
            'carpool_batches_total{model="m",reason="full"}': "7x9",
        },
    ),
    "CarpoolPaused": (
        {'carpool_paused{model="m"}': "1x80"},
        {'carpool_paused{model="m"}': "1x9 0x70"},
    ),
    "CarpoolOldestRequestTooOld": (
        {'carpool_oldest_request_seconds{model="m"}': "10+60x9"},
        {'carpool_oldest_request_seconds{model="m"}': "29x9"},
    ),
    "CarpoolNoModelProcess": (
        {'carpool_model_processes{model="m"}': "0x9"},
        {'carpool_model_processes{model="m"}': "1x9"},
    ),
    "CarpoolDeadLetters": (
        {'carpool_dead_letters_total{model="m"}': "0x4 1x5"},
        {'carpool_dead_letters_total{model="m"}': "4x9"},
    ),
    "CarpoolFencedCommits": (
        {'carpool_fenced_commits_total{model="m"}': "0x4 1x5"},
        {'carpool_fenced_commits_total{model="m"}': "4x9"},
    ),
    "CarpoolLeaseLate": (
        {
            'carpool_lease_lateness_seconds_bucket{model="m",instance="i",le="1.0"}': "0+90x9",
            'carpool_lease_lateness_seconds_bucket{model="m",instance="i",le="2.5"}': "0+100x9",
            'carpool_lease_lateness_seconds_bucket{model="m",instance="i",le="+Inf"}': "0+100x9",
        },
        {
            'carpool_lease_lateness_seconds_bucket{model="m",instance="i",le="0.5"}': "0+100x9",
            'carpool_lease_lateness_seconds_bucket{model="m",instance="i",le="1.0"}': "0+100x9",
            'carpool_lease_lateness_seconds_bucket{model="m",instance="i",le="+Inf"}': "0+100x9",
        },
    ),
    "CarpoolErrors": (
        {
            'carpool_requests_total{model="m",status="OK",reason=""}': "0+90x9",
            'carpool_requests_total{model="m",status="INTERNAL",reason="model"}': "0+10x9",
        },
        {
            'carpool_requests_total{model="m",status="OK",reason=""}': "0+90x9",
            'carpool_requests_total{model="m",status="INVALID_ARGUMENT",reason="input"}': "0+90x9",
        },
    ),
    "CarpoolGatewayErrors": (
        {
            'carpool_gateway_requests_total{instance="i",route="infer",code="200"}': "0+90x9",
            'carpool_gateway_requests_total{instance="i",route="infer",code="504"}': "0+10x9",
        },
        {
            'carpool_gateway_requests_total{instance="i",route="infer",code="200"}': "0+90x9",
            'carpool_gateway_requests_total{instance="i",route="infer",code="429"}': "0+90x9",
            'carpool_gateway_requests_total{instance="i",route="infer",code="501"}': "0+90x9",
        },
    ),
}  # fmt: skip


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, check=False, capture_output=True, text=True)


def test_each_alert_fires_only_for_its_cause(tmp_path: Path) -> None:
    promtool = tool("promtool")
    checked = run(promtool, "check", "rules", str(ALERTS))
    assert checked.returncode == 0, checked.stderr
    assert set(re.findall(r"alert: (\w+)", ALERTS.read_text())) == CASES.keys()

    tests = []
    for alert, cases in CASES.items():
        for fires, series in zip((True, False), cases, strict=True):
            expression = f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})'
            tests.append(
                {
                    "name": f"{alert}, {'fires' if fires else 'does not fire'}",
                    "interval": "1m",
                    "input_series": [{"series": name, "values": values} for name, values in series.items()],
                    "promql_expr_test": [
                        {
                            "expr": expression,
                            "eval_time": EVALUATED_LATER.get(alert, "9m"),
                            "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
                        }
                    ],
                }
            )
    cases_file = tmp_path / "cases.yml"  # JSON is YAML
    cases_file.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": tests}))
    tested = run(promtool, "test", "rules", str(cases_file))
    assert tested.returncode == 0, tested.stdout + tested.stderr


# --- with Prometheus ---------------------------------------------------------------------------------------


def metrics_url(service: Service) -> str:
    """Where its metrics are; a gateway serves them beside everything else."""
    return service.url if service.name.startswith("gateway") else service.status_url


class Prometheus:
    """A Prometheus server with our alerts, on a free port, which scrapes services several times a second."""

    def __init__(self, home: Path, services: list[Service]) -> None:
        targets = [metrics_url(service).removeprefix("http://") for service in services]
        config = {
            "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": "500ms"},
            "rule_files": [str(ALERTS)],
            "scrape_configs": [{"job_name": "carpool", "static_configs": [{"targets": targets}]}],
        }
        (home / "prometheus.yml").write_text(json.dumps(config))
        self._log = (home / "prometheus.log").open("wb")
        argv = [
            tool("prometheus"),
            f"--config.file={home / 'prometheus.yml'}",
            f"--storage.tsdb.path={home / 'tsdb'}",
            "--web.listen-address=127.0.0.1:0",
        ]
        self._process = subprocess.Popen(
            command_that_dies_with_parent(argv), stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
        )
        self._url = f"http://127.0.0.1:{wait_for(self._port, description='Prometheus listens')}"

    def _port(self) -> int | None:
        """The port on which the process listens, once it does: its log shows only the configured 0."""
        sockets = set()
        for descriptor in Path(f"/proc/{self._process.pid}/fd").iterdir():
            try:
                sockets.add(str(descriptor.readlink()))
            except OSError:  # closed in the meantime
                continue
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            (
                _,
                local,
                _,
                state,
                *_,
            ) = line.split()
            if state == "0A" and f"socket:[{line.split()[9]}]" in sockets:
                return int(local.partition(":")[2], 16)
        return None

    def ready(self) -> bool:
        """Whether the server answers queries."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10):  # noqa: S310 (http, as built here)
                return True
        except urllib.error.HTTPError as error:
            error.close()
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """The data of a reply of the HTTP API. An invalid query raises AssertionError."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:  # noqa: S310 (http, as built here)
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> dict[tuple[str, ...], float]:
        """The result of an instant query: values by the values of their labels."""
        series = self.get("query", query=expression)["result"]
        return {tuple(each["metric"].values()): float(each["value"][1]) for each in series}

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


@contextmanager
def running_prometheus(home: Path, services: list[Service]) -> Iterator[Prometheus]:
    """A server that has scraped all services, stopped at the end of the block."""
    home.mkdir()
    prometheus = Prometheus(home, services)
    try:
        wait_until(
            lambda: prometheus.ready() and prometheus.query("sum(up)") == {(): len(services)},
            description="all services are scraped",
        )
        yield prometheus
    finally:
        prometheus.stop()


class MixedLoad:
    """Sends requests that end in every way, at a constant rate, and counts them; and streams, not counted.

    On a busy machine it waits for the batcher, so that the queue is full only after a packed entry.
    """

    requests_per_interval = 12
    interval_s = 0.05

    def __init__(self, stack: Stack, gateway: Service) -> None:
        self._keys = Keys(MODEL)
        self._gateway_url = gateway.url
        self._redis = redis_at(stack.url, protocol=2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mixed")
        self.sent: list[tuple[float, int]] = []  # time, and number of requests sent by then

    def __enter__(self) -> MixedLoad:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)
        self._redis.close()

    def _run(self) -> None:
        sent = 0
        while not self._stop.wait(self.interval_s):
            if self._redis.xlen(self._keys.requests) > 2 * self.requests_per_interval:
                continue
            interval = len(self.sent)
            pipeline = self._redis.pipeline(transaction=False)
            for fields in self._requests(interval):
                pipeline.xadd(self._keys.requests, {"reply_to": "mixed", **fields})
            stream = {"stream": 1, "body": json.dumps({"length": CHUNKS, "step_s": STEP_S})}
            pipeline.xadd(Keys(WRITER).requests, stream)
            for body, number in (("1", 0), ('"raise"', 1)):  # one that ends, and one that breaks
                only = {"sequence_id": f"{interval}.{number}", "sequence_start": 1, "sequence_end": 1}
                pipeline.xadd(Keys(FOLDING).requests, {"body": body, "reply_to": "folded", **only})
            pipeline.execute()
            for path in ("/carpool/v1/models", "/nothing"):
                call(self._gateway_url, "GET", path)
            sent += self.requests_per_interval + (PACKED_REQUESTS if interval % 10 == 0 else 0)
            self.sent.append((time.monotonic(), sent))

    def _requests(self, interval: int) -> Iterator[Json]:
        """The requests of an interval. In every tenth, a packed entry also exceeds the queue size."""
        for number in range(self.requests_per_interval - 6):
            yield {"body": str(number)}
        yield {"body": "1", "priority": 10}
        yield {"body": "{", "lane": "odd"}
        yield {"body": '"refuse"'}
        yield {"body": '"raise"'}
        yield {"body": "1", "cost": 1001}
        yield {"body": "1", "expiration": 2}
        if interval % 10 == 0:
            packed = [{"correlation_id": f"{interval}.{at}", "body": b"1"} for at in range(PACKED_REQUESTS)]
            yield {"requests": msgpack.packb(packed)}

    def per_second(self, over_s: float) -> float:
        """The rate in the last `over_s` seconds."""
        sent = list(self.sent)
        until_s, latest = sent[-1]
        since_s, before = next(sample for sample in sent if sample[0] >= until_s - over_s)
        return (latest - before) / (until_s - since_s)


PACKED_REQUESTS: Final = 40
WINDOW_S: Final = 5
SHOWN_S: Final = 180.0  # a few windows, on a quiet machine; below the limit of a test

Panels = dict[str, dict[tuple[str, ...], float]]  # by title: the value of each series, by its labels


def test_every_panel_shows_correct_values(stack: Stack, tmp_path: Path) -> None:
    """Given a stack under load, with refusals, model process deaths, a reclaimed batch, a fenced commit."""
    tool("prometheus")
    batcher = stack.batcher(*HTTP)
    workers = [stack.worker("metered.py:Plotted", *HTTP, *LEASE, ready=False) for _ in range(2)]
    writer = stack.worker(f"stepping.py:{WRITER}", *HTTP, ready=False)
    stack.wait_for_model(MODEL, workers=2)
    folding = stack.worker(f"stateful.py:{FOLDING}", *HTTP, ready=False)
    gateway = stack.gateway()
    stack.wait_for_model(WRITER)
    stack.wait_for_model(FOLDING)
    of_sequences = queries("Do sequences go on?")
    of_streams = queries("Do streams flow?")
    with running_prometheus(
        tmp_path / "prometheus", [batcher, *workers, writer, folding, gateway]
    ) as prometheus:
        reclaim(stack, workers, tmp_path / "gate")
        stack.send(MODEL, body='"die"', reply_to="mixed")
        with MixedLoad(stack, gateway) as load:
            wait_until(
                lambda: len(load.sent) * load.interval_s > WINDOW_S + 2,
                description="the load has lasted longer than the window",
            )

            def panel(title: str, window: str = f"{WINDOW_S}s") -> dict[tuple[str, ...], float]:
                model = WRITER if title in of_streams else FOLDING if title in of_sequences else MODEL
                expression = queries()[title].replace("$model", model).replace("$__rate_interval", window)
                return prometheus.query(expression)

            def panels() -> Panels | None:
                """All of them; None if one has no series or no finite value."""
                found = {title: panel(title) for title in queries()}
                is_whole = all(any(map(math.isfinite, of.values())) for of in found.values())
                return found if is_whole else None

            for title in ("Dead letters", "Model process deaths", "Redeliveries", "Fenced commits"):
                wait_until(
                    lambda: sum(panel(f"{title}: {{{{model}}}}", "1h").values()) > 0,  # noqa: B023
                    description=f"{title} are shown",
                )
            wait_until_correct(panels, load)
        assert_alerts(prometheus)


def wait_until_correct(panels: Callable[[], Panels | None], load: MixedLoad) -> None:
    """Wait until the panels show the load. On a busy machine its rate varies within the window."""
    wrong: list[AssertionError] = []

    def are_correct() -> bool:
        found, rate = panels(), load.per_second(WINDOW_S)
        if found is None:
            return False
        try:
            assert_correct(found, rate)
            assert_streams_correct(found, rate)
            assert_sequences_correct(found, rate)
            assert_gateway_correct(found, rate)
        except AssertionError as error:
            wrong.append(error)
            return False
        return True

    try:
        wait_until(are_correct, description="the panels show the load", timeout_s=SHOWN_S)
    except AssertionError as late:
        raise (wrong or [late])[-1] from None


def reclaim(stack: Stack, workers: list[Service], gate: Path) -> None:
    """Freeze a worker that executes a batch until another has reclaimed and committed the batch."""
    entry_id = stack.send(MODEL, body=json.dumps({"gate": str(gate)}))
    wait_until(lambda: stack.pending(MODEL) == 1, description="one worker waits at the gate")
    (owner,) = stack.redis.xpending_range(Keys(MODEL).batches, "workers", "-", "+", 1)
    (frozen,) = [worker for worker in workers if f"-{worker.pid}-" in owner["consumer"].decode()]
    (other,) = [worker for worker in workers if worker is not frozen]
    frozen.freeze()
    stack.expire_lease(MODEL, frozen)
    other.wait_for("batch reclaimed")
    gate.touch()
    assert stack.result(MODEL, entry_id)["status"] == "OK"
    frozen.thaw()
    frozen.wait_for("commit discarded, another worker has the batch")


def assert_sequences_correct(shown: dict[str, dict[tuple[str, ...], float]], sent_per_second: float) -> None:
    """In each interval two sequences start, one of which ends and one breaks."""
    intervals_per_second = sent_per_second / (MixedLoad.requests_per_interval + PACKED_REQUESTS / 10)
    changes = shown["Changes of sequences: {{change}} {{model}}"]
    assert {name for of in changes for name in of if name != FOLDING} == {"started", "ended", "broken"}
    for change in ("ended", "broken"):
        (per_second,) = (rate for of, rate in changes.items() if change in of)
        assert per_second == pytest.approx(intervals_per_second, rel=0.4)
    assert min(shown["Sequences: kept {{model}}"].values()) >= 0


def assert_correct(shown: dict[str, dict[tuple[str, ...], float]], sent_per_second: float) -> None:
    """Compare the values of the panels with the load, with a tolerance."""

    def value(title: str) -> float:
        (only,) = shown[title].values()
        return only

    near: Callable[[float], Any] = lambda expected: pytest.approx(expected, rel=0.3)  # noqa: E731
    assert value("Batchers active: {{model}}") == 1
    assert value("Model processes: {{model}}") == 2
    assert value("Workers wanted: {{model}}") >= 1
    assert 0 < value("Fill ratio: {{model}}") <= 1
    assert 1 <= value("Batch size: mean {{model}}") <= 8
    assert 0.005 <= value("Mean request duration by stage: compute infer") < 0.1
    assert value("Request duration: p50 {{model}}") <= value("Request duration: p99 {{model}}")
    by_status = shown["Results by status: {{status}}"]
    assert sum(by_status.values()) == near(sent_per_second)
    errors = shown["Errors by reason: {{status}} {{reason}}"]
    assert sum(errors.values()) == pytest.approx(sum(by_status.values()) - by_status[("OK",)], rel=0.1)
    intervals_per_second = sent_per_second / (MixedLoad.requests_per_interval + PACKED_REQUESTS / 10)
    assert errors[("input", "INVALID_ARGUMENT")] == near(3 * intervals_per_second)
    assert errors[("cost", "INVALID_ARGUMENT")] == near(intervals_per_second)
    assert errors[("model", "INTERNAL")] == near(intervals_per_second)
    assert errors[("queue_size", "RESOURCE_EXHAUSTED")] > 0
    assert value("Error ratio: {{model}}") == near(1 - by_status[("OK",)] / sum(by_status.values()))
    reasons = shown["Dispatch reasons: {{reason}}"]
    assert reasons[("full",)] > 0 and reasons[("delay",)] > 0
    requests, executions = (
        value(f"Requests and executions: {of} {{{{model}}}}") for of in ("requests", "executions")
    )
    assert requests > executions > 0


def assert_streams_correct(shown: dict[str, dict[tuple[str, ...], float]], sent_per_second: float) -> None:
    """Compare the panels of streams with the load, which has one in each interval, with a tolerance."""

    def value(title: str) -> float:
        (only,) = shown[f"{title}{{{{model}}}}"].values()
        return only

    streams_per_second = sent_per_second / (MixedLoad.requests_per_interval + PACKED_REQUESTS / 10)
    assert 0 <= value("Slots: in use ") <= value("Slots: all ") == SLOTS
    assert value("Chunks: ") == pytest.approx(CHUNKS * streams_per_second, rel=0.3)
    assert 0 < value("Steps: ") < 1.2 / STEP_S
    for title in ("Step", "Time between chunks", "Time to first chunk"):
        assert 0.01 <= value(f"{title}: p50 ") <= value(f"{title}: p99 ") < 5, title


def assert_gateway_correct(shown: dict[str, dict[tuple[str, ...], float]], sent_per_second: float) -> None:
    """In each interval one request is answered with 200 and one with 404."""
    intervals_per_second = sent_per_second / (MixedLoad.requests_per_interval + PACKED_REQUESTS / 10)
    codes = shown["Answers by code: {{code}}"]
    assert codes[("404",)] == pytest.approx(intervals_per_second, rel=0.4)
    assert codes[("200",)] >= codes[("404",)] * 0.9
    times_s = {name: shown[f"Time to answer: {name} {{{{route}}}}"][("models",)] for name in ("p50", "p99")}
    assert 0 < times_s["p50"] <= times_s["p99"] < 5
    assert set(shown["Bodies held: {{instance}}"].values()) == {0.0}
    assert min(shown["Connections of clients: {{instance}}"].values()) >= 1


def assert_alerts(prometheus: Prometheus) -> None:
    """Each alert is evaluated without an error, and those with a cause in this test fire."""
    wait_until(
        lambda: (
            {"CarpoolDeadLetters", "CarpoolFencedCommits"}
            <= {
                alert["labels"]["alertname"]
                for alert in prometheus.get("alerts")["alerts"]
                if alert["state"] == "firing"
            }
        ),
        description="the alerts fire",
    )
    (group,) = prometheus.get("rules")["groups"]
    assert {rule["name"]: rule["health"] for rule in group["rules"]} == dict.fromkeys(CASES, "ok")
    for rule in group["rules"]:
        prometheus.query(rule["query"])
        for alert in rule["alerts"]:
            summary = alert["annotations"]["summary"]
            assert any(model in summary for model in (MODEL, FOLDING, WRITER)), alert
            assert "<no value>" not in str(alert["annotations"])
            assert len(alert["annotations"]["description"]) > 40
