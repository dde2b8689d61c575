"""Write dashboards/carpool.json, Carpool's Grafana dashboard, from the table of panels below.

    .venv/bin/python ops/grafana/make_dashboard.py

A test checks that the file is up to date, and runs every query in it against a real Prometheus.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

TARGET: Final = Path(__file__).parent / "dashboards" / "carpool.json"
COLUMNS: Final = 24  # Grafana's grid
PANEL_HEIGHT: Final = 8

Json = dict[str, Any]


class Panel(NamedTuple):
    """One panel. `advice` says what to do when it looks bad; `queries` maps legends to expressions.

    In an expression, {M} stands for the selected models and [T] for the interval that Grafana chooses.
    """

    title: str
    unit: str
    advice: str
    queries: dict[str, str]
    width: int = 8
    bad: float | None = None  # values from here on are shown in red
    bad_below: bool = False  # values up to `bad` are, instead
    stacked: bool = False
    bars: bool = False


def mean(metric: str, by: str = "by (model) ") -> str:
    return f"sum {by}(rate({metric}_sum{{M}}[T])) / sum {by}(rate({metric}_count{{M}}[T]))"


def quantile(share: float, metric: str) -> str:
    return f"histogram_quantile({share}, sum by (le, model) (rate({metric}_bucket{{M}}[T])))"


def quantiles(metric: str) -> dict[str, str]:
    """p50, p95 and p99."""
    return {f"p{share * 100:.0f} {{{{model}}}}": quantile(share, metric) for share in (0.5, 0.95, 0.99)}


def occurrences(metric: str) -> dict[str, str]:
    """How many times an event that should be rare occurred."""
    return {"{{model}}": f"sum by (model) (increase({metric}{{M}}[T]))"}


ROWS: Final[dict[str, list[Panel]]] = {
    "Is it healthy?": [
        Panel(
            "Batchers active",
            "short",
            "1 for each model. 0: nothing is batched; look at the batchers' /readyz and logs, and start one "
            "if there is none. 2 for a moment is a handover; 2 for longer: a batcher was paused, and has "
            "not noticed yet that it lost its lease.",
            {"{{model}}": "sum by (model) (carpool_batcher_active{M})"},
            width=6,
            bad=0,
            bad_below=True,
        ),
        Panel(
            "Model processes",
            "short",
            "The replicas of all workers. Fewer than you started: a worker stopped, or its lease ran out; "
            "look at the "
            "workers' /readyz and logs. 0: requests wait until a worker starts.",
            {"{{model}}": "sum by (model) (carpool_model_processes{M})"},
            width=6,
            bad=0,
            bad_below=True,
        ),
        Panel(
            "Oldest waiting request",
            "s",
            "Should be below the expiration that producers set. Growing: more requests arrive than the "
            "workers can serve; start workers, or allow larger batches (max_batch_size). Growing while "
            "workers are idle: look at the batcher's log.",
            {"{{model}}": "max by (model) (carpool_oldest_request_seconds{M})"},
            width=12,
            bad=10,
        ),
        Panel(
            "Error ratio",
            "percentunit",
            "Share of results that are neither OK nor withdrawn. The last row shows which, and why.",
            {
                "{{model}}": 'sum by (model) (rate(carpool_requests_total{M,status!~"OK|CANCELLED"}[T])) '
                "/ sum by (model) (rate(carpool_requests_total{M}[T]))"
            },
            bad=0.05,
        ),
        Panel(
            "Redis errors",
            "ops",
            "link: Redis or the network is down; nothing is lost, and work continues when it is back. OOM: "
            "give Redis memory, or lower max_queue_size or result_ttl_ms. NOPERM, NOAUTH: fix the ACL. "
            "Counted over all models.",
            {"{{kind}}": "sum by (kind) (rate(carpool_redis_errors_total[T]))"},
            bad=0.1,
        ),
        Panel(
            "Lease lateness, p99",
            "s",
            "How late leases are renewed. If this nears the length of the lease (2 s for a batcher; "
            "--lease-ms, "
            "5 s, for a worker), others take over and work is done twice: the machine is short of CPU or is "
            "paused, or Redis is slow. Add resources, or raise --lease-ms.",
            {"{{model}}": quantile(0.99, "carpool_lease_lateness_seconds")},
            bad=1,
        ),
        Panel(
            "Workers wanted",
            "short",
            "How many workers each model needs, as its batcher finds (docs/scaling.md); `carpool top` says "
            "why. Fewer run for long: the autoscaler does not follow, or max_workers is too low.",
            {"{{model}}": "max by (model) (carpool_wanted_workers{M})"},
        ),
    ],
    "Where is time spent?": [
        Panel(
            "Mean request duration by stage",
            "s",
            "Mostly infer: the model is the limit. Mostly queue: requests wait for a worker (start workers) "
            "or for a fuller batch (lower max_queue_delay_ms). Input or output: bodies are large, or not "
            "declared as tensors.",
            {
                part: mean(f"carpool_{metric}_seconds", by="")
                for part, metric in {
                    "queue": "queue",
                    "compute input": "compute_input",
                    "compute infer": "compute_infer",
                    "compute output": "compute_output",
                }.items()
            },
            width=12,
            stacked=True,
        ),
        Panel(
            "Request duration",
            "s",
            "From arrival to result. If p99 is far above p50, some requests wait one batch longer than "
            "others: "
            "compare with the queue time and with how full batches are.",
            quantiles("carpool_request_seconds"),
            width=12,
        ),
        Panel(
            "Queue",
            "s",
            "From arrival to dispatch. If it is above max_queue_delay_ms, the workers are busy: start "
            "more, or allow "
            "larger batches.",
            quantiles("carpool_queue_seconds"),
        ),
        Panel(
            "Compute infer",
            "s",
            "The model's work on a batch. If it is proportional to the batch size, larger batches gain "
            "nothing. If it grew without a change of load, look at the device: other work, heat, memory.",
            quantiles("carpool_compute_infer_seconds"),
        ),
        Panel(
            "Compute input and output, p95",
            "s",
            "Decoding bodies, and encoding and committing results. High input: declare the inputs as "
            "tensors, and send tensors instead of JSON. High output: results are large, or Redis is slow.",
            {
                "input {{model}}": quantile(0.95, "carpool_compute_input_seconds"),
                "output {{model}}": quantile(0.95, "carpool_compute_output_seconds"),
            },
        ),
    ],
    "Are batches full?": [
        Panel(
            "Fill ratio",
            "percentunit",
            "Share of max_batch_size or max_batch_cost that batches use. Low is fine while requests do not "
            "wait: there is spare capacity. Low while they wait: there are too many lanes, or "
            "max_queue_delay_ms is too short to fill a batch.",
            {"{{model}}": mean("carpool_batch_fill_ratio")},
        ),
        Panel(
            "Batch size",
            "short",
            "Requests in a batch. If the p95 is at max_batch_size and requests wait, try a larger "
            "max_batch_size.",
            {
                "mean {{model}}": mean("carpool_batch_requests"),
                "p95 {{model}}": quantile(0.95, "carpool_batch_requests"),
            },
        ),
        Panel(
            "Dispatch reasons",
            "ops",
            "Why batches were dispatched. full: the batch could not grow. preferred: it reached one of "
            "preferred_batch_sizes. idle: a model process was free. delay: max_queue_delay_ms had passed. "
            "efficient: waiting would gain little. deadline: waiting longer would have missed a deadline; "
            "if "
            "most are, producers set expirations that are too short, or there are too few workers.",
            {"{{reason}}": "sum by (reason) (rate(carpool_batches_total{M}[T]))"},
            stacked=True,
        ),
        Panel(
            "Requests and executions",
            "reqps",
            "The gap between the two is what batching gains. As many executions as requests means batches of "
            "one: there is little load, shapes or lanes differ, or requests are executed one at a time after "
            "a process died.",
            {
                "requests {{model}}": "sum by (model) (rate(carpool_request_seconds_count{M}[T]))",
                "executions {{model}}": "sum by (model) (rate(carpool_executions_total{M}[T]))",
            },
            width=6,
        ),
        Panel(
            "Waiting and in flight",
            "short",
            "Waiting near max_queue_size: further requests are refused; start workers. Delayed: those of "
            "them that wait for their time (not_before). Withheld: results that wait for earlier ones "
            "(preserve_ordering). Paused: an operator has paused the model, and nothing is dispatched.",
            {
                "waiting {{model}}": "sum by (model) (carpool_waiting_requests{M})",
                "delayed {{model}}": "sum by (model) (carpool_delayed_requests{M})",
                "in flight {{model}}": "sum by (model) (carpool_in_flight_requests{M})",
                "withheld {{model}}": "sum by (model) (carpool_withheld_results{M})",
                "paused {{model}}": "max by (model) (carpool_paused{M})",
            },
            width=6,
        ),
        Panel(
            "Waiting bytes",
            "bytes",
            "Size of the waiting requests, which the batcher copies to its memory. Near max_queue_bytes "
            "further "
            "requests are refused: "
            "start workers, or keep large bodies elsewhere and send their names.",
            {"{{model}}": "sum by (model) (carpool_waiting_bytes{M})"},
            width=6,
        ),
        Panel(
            "Batches in flight",
            "short",
            "Normally one or two for each model process. If fetched stays the same, a model hangs: look at "
            "its "
            "process. If batches are in flight and not fetched, look at the workers' /readyz.",
            {
                "in flight {{model}}": "sum by (model) (carpool_in_flight_batches{M})",
                "fetched {{model}}": "sum by (model) (carpool_batches_in_hand{M})",
            },
            width=6,
        ),
    ],
    "Do streams flow?": [  # of stepping models; others have no slots, steps or chunks
        Panel(
            "Slots",
            "short",
            "Requests that are generated now, and how many could be. All in use while requests wait: start "
            "workers, or allow more slots (max_batch_size) if steps stay short enough. Free slots while "
            "requests wait: max_batch_cost is the limit, or look at the batcher's log.",
            {
                "in use {{model}}": "sum by (model) (carpool_slots_in_use{M}) "
                "and sum by (model) (carpool_slots{M}) > 0",
                "all {{model}}": "sum by (model) (carpool_slots{M}) > 0",
            },
        ),
        Panel(
            "Time to first chunk",
            "s",
            "From a streamed request's arrival to its first chunk. If it is far above a step, requests wait "
            "for a slot (see Slots and Queue), or the model takes long to begin them.",
            quantiles("carpool_first_chunk_seconds"),
        ),
        Panel(
            "Time between chunks",
            "s",
            "Should be as long as a step, or the time between two steps if others begin there: then lower "
            "max_prefill_cost. Far longer: the model emits nothing in some steps, or readers are slow, and "
            "chunks are merged (stream_buffer).",
            quantiles("carpool_chunk_gap_seconds"),
        ),
        Panel(
            "Chunks",
            "ops",
            "Values that the model emits for streams, in each second. If it does not grow with the number of "
            "slots in use, steps take as much longer: more slots gain nothing.",
            {"{{model}}": "sum by (model) (rate(carpool_chunks_total{M}[T])) > 0"},
        ),
        Panel(
            "Steps",
            "ops",
            "How often the model steps. Chunks divided by steps is how many requests a step serves.",
            {"{{model}}": "sum by (model) (rate(carpool_steps_total{M}[T])) > 0"},
        ),
        Panel(
            "Step",
            "s",
            "The model's work on a step, without beginning requests. If it grew without more slots in use, "
            "requests are longer, or something else uses the device.",
            quantiles("carpool_step_seconds"),
        ),
    ],
    "Do sequences go on?": [  # of stateful models; others have none
        Panel(
            "Sequences",
            "short",
            "Those that have begun, and neither ended nor broken: Redis has a state for each. If they only "
            "grow, producers do not end them; idle ones are ended after max_sequence_idle_ms. Some wait to "
            "start: raise max_candidate_sequences if Redis has memory for their states.",
            {
                "kept {{model}}": "sum by (model) (carpool_kept_sequences{M})",
                "waiting to start {{model}}": "sum by (model) (carpool_sequences_waiting_to_start{M})",
            },
        ),
        Panel(
            "Changes of sequences",
            "ops",
            "How many sequences start, end and break in each second. A broken one is begun again by its "
            "producer: the panel Errors by reason shows what failed.",
            {"{{change}} {{model}}": "sum by (change, model) (rate(carpool_sequences_total{M}[T]))"},
        ),
        Panel(
            "States written",
            "Bps",
            "What workers write to Redis beside the results, in each second. Redis reads and writes a state "
            "for each request: if it is busy, declare smaller states.",
            {"{{model}}": "sum by (model) (rate(carpool_state_bytes_total{M}[T]))"},
        ),
    ],
    "What do HTTP clients get?": [
        Panel(
            "Answers by code",
            "reqps",
            "Of all gateways. 429: queues are full (start workers), or a key sends more than its rate. 499: "
            "the client went away before. 503: no Redis, or too many bodies in memory; see /readyz. 504: no "
            "result in time. 500: the model raised, or the gateway failed: its log says which.",
            {"{{code}}": "sum by (code) (rate(carpool_gateway_requests_total[T]))"},
            stacked=True,
        ),
        Panel(
            "Time to answer",
            "s",
            "From the first byte of a request to the end of its answer, so a slow client counts, too. "
            "Compare it with Request duration: the rest is spent in gateways. If that grows, they are short "
            "of CPU: start more.",
            {
                f"p{share * 100:.0f} {{{{route}}}}": f"histogram_quantile({share}, "
                "sum by (le, route) (rate(carpool_gateway_seconds_bucket[T])))"
                for share in (0.5, 0.99)
            },
        ),
        Panel(
            "Connections of clients",
            "short",
            "Of each gateway. At --connections-max further ones are answered with 503. One gateway far above "
            "the others: clients or the proxy before them do not spread their connections.",
            {"{{instance}}": "sum by (instance) (carpool_gateway_connections)"},
            width=4,
        ),
        Panel(
            "Bodies held",
            "bytes",
            "Bodies that are read, or whose requests have no result, in each gateway. At --memory-bytes-max "
            "further requests are answered with 503. Growing: results are late, or bodies are large.",
            {"{{instance}}": "sum by (instance) (carpool_gateway_body_bytes)"},
            width=4,
        ),
    ],
    "Which requests fail, and why?": [
        Panel(
            "Results by status",
            "reqps",
            "Should be mostly OK. The next panel shows the reasons of the others.",
            {"{{status}}": "sum by (status) (rate(carpool_requests_total{M}[T]))"},
            stacked=True,
        ),
        Panel(
            "Errors by reason",
            "reqps",
            "input, cost: a producer sends what the model does not accept; the result names the field. "
            "queue_size, queue_bytes: start workers. delayed: see max_delayed_share. waiting, in_flight, "
            "at_worker: where it expired; early: it could not meet its deadline; start workers, or allow "
            "more time. model, policy: it raised an exception; look at the result's detail. dead_letter: "
            "it killed its process. withdrawn: the producer withdrew it. sequence: its sequence was never "
            "begun, broke, or was ended.",
            {
                "{{status}} {{reason}}": "sum by (status, reason) "
                '(rate(carpool_requests_total{M,status!="OK"}[T]))'
            },
        ),
        Panel(
            "Missed deadlines by cause",
            "reqps",
            "early, waiting: more arrives than the workers can serve; start workers. dispatched_late: its "
            "batch could not begin in time; start workers, or try the policy deferred. computed_long: the "
            "model took longer than was learned, or than deadlines allow; look at the device, allow more "
            "time, or make batches smaller. delivered_late: the transit to the worker and back took too "
            "long; look at the CPU of Redis and of all processes, and for workers that ended.",
            {"{{cause}}": "sum by (cause) (rate(carpool_missed_deadlines_total{M}[T]))"},
            stacked=True,
        ),
        Panel(
            "Dead letters",
            "short",
            "Requests that repeatedly ended the model process. They are kept in the stream "
            "carpool:{MODEL}:dead, with the reason: try one on the model by hand.",
            occurrences("carpool_dead_letters_total"),
            width=6,
            bars=True,
        ),
        Panel(
            "Model process deaths",
            "short",
            "Processes that ended unexpectedly: a fault in native code, or out of memory. The worker's log "
            "says how. The batch was executed again, one request at a time.",
            occurrences("carpool_model_process_deaths_total"),
            width=6,
            bars=True,
        ),
        Panel(
            "Memory of model processes",
            "bytes",
            "Resident memory of the largest model process, and what it takes of GPUs. If it grows all the "
            "time, the model leaks: max_process_memory replaces its processes in time.",
            {
                "{{model}}": "max by (model) (carpool_model_process_memory_bytes{M})",
                "GPU {{model}}": "max by (model) (carpool_model_process_gpu_memory_bytes{M})",
            },
            width=6,
        ),
        Panel(
            "Model processes replaced",
            "short",
            "Processes that had reached max_requests_per_process or max_process_memory. If there are very "
            "many, the limit is too low: each of them loads the model.",
            occurrences("carpool_model_processes_replaced_total"),
            width=6,
            bars=True,
        ),
        Panel(
            "Redeliveries",
            "short",
            "Batches reclaimed from a worker that died or was paused. Expected when a machine stops; "
            "otherwise find out why workers end, and look at the panel Lease lateness.",
            occurrences("carpool_redeliveries_total"),
            width=6,
            bars=True,
        ),
        Panel(
            "Fenced commits",
            "short",
            "Discarded work: another worker had reclaimed the batch. No producer got a wrong or a second "
            "result. If it repeats, a worker is paused for longer than its lease: see the panel Lease "
            "lateness.",
            occurrences("carpool_fenced_commits_total"),
            width=6,
            bars=True,
        ),
    ],
}


def dashboard() -> Json:
    """The dashboard in the format of Grafana 10 and later."""
    panels: list[Json] = []
    y = 0
    for title, row in ROWS.items():
        panels.append(_row(len(panels) + 1, title, y))
        y += 1
        x = 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y = 0, y + PANEL_HEIGHT
            panels.append(_panel(len(panels) + 1, panel, x, y))
            x += panel.width
        y += PANEL_HEIGHT
    return {
        "uid": "carpool",
        "title": "Carpool",
        "description": "Is it healthy, where is time spent, are batches full, do streams flow, which fail?",
        "tags": ["carpool"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "timezone": "browser",
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "graphTooltip": 1,  # one cross-hair for all panels
        "templating": {"list": [_datasource(), _models()]},
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
    }


def _models() -> Json:
    query = "label_values(carpool_lease_lateness_seconds_count, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"qryType": 1, "query": query, "refId": "models"},  # 1: values of a label
        "refresh": 2,  # when the time range changes, because models are added and removed
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _row(number: int, title: str, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}


def _panel(number: int, panel: Panel, x: int, y: int) -> Json:
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.bad_below:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": (panel.bad or 0) + 1}]
    elif panel.bad is not None:
        steps.append({"color": "red", "value": panel.bad})
    stat = panel.bad_below
    custom: Json = {
        "drawStyle": "bars" if panel.bars else "line",
        "fillOpacity": 30 if panel.stacked or panel.bars else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
        "thresholdsStyle": {"mode": "off" if panel.bad is None else "dashed"},
    }
    return {
        "id": number,
        "type": "stat" if stat else "timeseries",
        "title": panel.title,
        "description": panel.advice,
        "datasource": DATASOURCE,
        "gridPos": {"x": x, "y": y, "w": panel.width, "h": PANEL_HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "thresholds": {"mode": "absolute", "steps": steps},
                "custom": {} if stat else custom,
            },
            "overrides": [],
        },
        "options": _as_number() if stat else _as_graph(),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": DATASOURCE,
                "expr": _with_variables(expression),
                "legendFormat": legend,
                "range": True,
            }
            for at, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _as_number() -> Json:
    return {
        "colorMode": "background",
        "graphMode": "none",
        "textMode": "value_and_name",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


def _as_graph() -> Json:
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _with_variables(expression: str) -> str:
    """Replace {M} and [T] by the dashboard's variables."""
    return expression.replace("{M", '{model=~"$model"').replace("[T]", "[$__rate_interval]")


def text() -> str:
    """The text of the file."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
