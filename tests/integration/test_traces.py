"""Spans of real processes, as a collector gets them with OTLP over HTTP."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.keys import Keys
from carpool_cli.local.embedded import EmbeddedRedis
from support.http import call
from support.otlp import Collector, SeenSpan
from support.proxy import Proxy
from support.rpc import Rpc, infer_request
from support.stack import Service, Stack, wait_for
from support.waiting import EVENTUALLY_S, wait_until

INTERNAL, CLIENT, PRODUCER, CONSUMER = 1, 3, 4, 5  # as OTLP numbers them
REDIS_MS: Final = 1_000_000  # ns: an arrival is known to the millisecond
LATE_S: Final = 0.02
BODY: Final = "s3cret-of-a-body"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("traces"), environment=collector.environment()) as stack:
        stack.batcher("--http-port", "0")
        stack.serve("traced.py:Traced", "counting.py:Counting", "plain.py:Echo", "stateful.py:Folding")
        yield stack


@pytest.fixture(scope="module")
def gateway(shared: Stack) -> Service:
    return shared.gateway("--access-log", "--grpc-port", "0")


class Parent:
    """A span of a client, which is sampled unless `flags` say otherwise."""

    def __init__(self, flags: str = "01") -> None:
        self.trace_id, self.span_id = os.urandom(16).hex(), os.urandom(8).hex()
        self.header = f"00-{self.trace_id}-{self.span_id}-{flags}"


def post(gateway: Service, model: str, body: Any, **headers: str) -> Any:
    path = f"/carpool/v1/models/{model}/infer"
    return json.loads(call(gateway.url, "POST", path, json.dumps(body).encode(), **headers).body)


def metrics_of(service: Service, accept: str = "text/plain") -> str:
    return call(service.status_url, "GET", "/metrics", Accept=accept).body.decode()


def the(collector: Collector, name: str, trace_id: str) -> SeenSpan:
    """The only span of this name in a trace."""
    (span,) = collector.wait_for(name, 1, lambda span: span.trace_id == trace_id)
    return span


def test_a_request_over_http(shared: Stack, gateway: Service, collector: Collector) -> None:
    """Given a client's sampled trace, expect all spans of its request in it: each with its parent, in its
    time, with the trace's state, and without the body. The access log names the trace."""
    parent = Parent()

    answer = post(gateway, "Traced", BODY, traceparent=parent.header, tracestate="vendor=7")

    assert answer == BODY.upper()
    spans = {
        name: the(collector, name, parent.trace_id)
        for name in (
            "send Traced",
            "queue Traced",
            "process Traced",
            "batch Traced",
            "predict Traced",
            "tokenize",
        )
    }
    send, queue, process, batch, predict, own = spans.values()
    assert send.parent_id == parent.span_id
    assert queue.parent_id == process.parent_id == send.span_id
    assert (batch.parent_id, predict.parent_id, own.parent_id) == (
        process.span_id, batch.span_id, predict.span_id,
    )  # fmt: skip
    assert [span.kind for span in spans.values()] == [
        PRODUCER,
        INTERNAL,
        CONSUMER,
        CONSUMER,
        INTERNAL,
        INTERNAL,
    ]
    assert send.service == "carpool-gateway" and queue.service == "carpool-batcher"
    assert {span.service for span in (process, batch, predict, own)} == {"carpool-worker"}
    assert [link.to for link in batch.links] == [send.ids]
    assert [link.to for link in process.links] == [batch.ids]
    assert batch.links[0].attributes == {"messaging.message.conversation_id": process.conversation}
    assert queue.conversation == process.conversation != ""
    assert own.attributes == {"rows": 1}

    assert (
        send.start_ns - REDIS_MS <= process.start_ns <= send.end_ns
    )  # its worker may learn last that it ended
    inside = [(queue, send), (predict, batch), (own, predict)]
    for inner, outer in inside:
        assert outer.start_ns - REDIS_MS <= inner.start_ns <= inner.end_ns <= outer.end_ns + REDIS_MS, (
            inner.name
        )
    assert queue.end_ns <= process.start_ns == batch.start_ns
    assert {span.state for span in spans.values()} == {"vendor=7"}
    assert {span.schema_url for span in spans.values()} == {"https://opentelemetry.io/schemas/1.44.0"}
    assert not any(span.is_error or span.message for span in spans.values())
    for secret in (BODY, BODY.upper()):
        assert secret.encode() not in collector.bodies
    (line,) = wait_for(  # it is written after the span has ended
        lambda: [line for line in gateway.events("answered") if line.get("trace_id") == parent.trace_id],
        description="the call is logged",
    )
    assert line["span_id"] == send.span_id
    batches = [line for line in shared.served_by("Traced").events("batch") if "trace_id" in line]
    assert (parent.trace_id, batch.span_id) in {(line["trace_id"], line["span_id"]) for line in batches}


def test_a_request_over_grpc(shared: Stack, gateway: Service, collector: Collector) -> None:
    """Given a trace in the metadata, expect the gateway's span in it, and the worker's."""
    parent = Parent()
    with Rpc(gateway) as rpc:
        request = infer_request("Traced", ("body", [[b'"over grpc"']]))
        request.inputs[0].parameters["content_type"].string_param = "application/json"
        metadata = [("traceparent", parent.header), ("tracestate", "vendor=8")]
        rpc.method("ModelInfer")(request, timeout=EVENTUALLY_S, metadata=metadata)

    send = the(collector, "send Traced", parent.trace_id)
    assert (send.parent_id, send.attributes["carpool.route"]) == (parent.span_id, "grpc_infer")
    process = the(collector, "process Traced", parent.trace_id)
    assert (process.parent_id, process.state) == (send.span_id, "vendor=8")


def test_a_batch_links_to_1024_requests(shared: Stack, collector: Collector) -> None:
    """Given as many traces in one batch, expect one span of it in a trace of its own with a link to each, and
    a span of each request in its own trace, with a link to the batch."""
    parents = {f"many-{number}": Parent() for number in range(1024)}
    requests = [
        {"correlation_id": name, "body": b'"x"', "traceparent": parent.header}
        for name, parent in parents.items()
    ]

    shared.send_packed("Traced", requests, reply_to="many")
    shared.replies("Traced", "many")

    (batch,) = collector.wait_for("batch Traced", 1, lambda span: len(span.links) > 1)
    assert batch.attributes["messaging.batch.message_count"] == 1024
    assert batch.parent_id == ""
    assert not {parent.trace_id for parent in parents.values()} & {batch.trace_id}
    found = {link.attributes["messaging.message.conversation_id"]: link.to for link in batch.links}
    assert found == {name: (parent.trace_id, parent.span_id) for name, parent in parents.items()}
    processes = collector.wait_for("process Traced", 1024, lambda span: span.conversation in parents)
    assert len(processes) == 1024
    for process in processes:
        parent = parents[process.conversation]
        assert (process.trace_id, process.parent_id) == (parent.trace_id, parent.span_id)
        assert [link.to for link in process.links] == [batch.ids]


def test_traces_that_are_not_sampled_or_invalid(
    shared: Stack, gateway: Service, collector: Collector
) -> None:
    """Given such values, expect results as without them, the value for the model, and no spans."""
    parent = Parent("00")
    invalid = [
        "",
        "x",
        f"ff-{'a' * 32}-{'b' * 16}-01",
        f"00-{'0' * 32}-{'b' * 16}-01",
        f"00-{'a' * 32}-{'b' * 16}-1",
    ]
    before = {span.trace_id for span in collector.spans}
    for value in [parent.header, *invalid]:
        name = shared.send("Echo", body='"about"', traceparent=value)
        assert shared.result("Echo", name)["body"][2] == {"traceparent": value}
    assert post(gateway, "Echo", 1, traceparent="nonsense") == 1
    last = Parent()
    shared.send("Echo", body="1", traceparent=last.header)

    the(collector, "process Echo", last.trace_id)
    the(collector, "queue Echo", last.trace_id)
    assert {span.trace_id for span in collector.spans} - before == {last.trace_id}


def test_errors(shared: Stack, collector: Collector) -> None:
    """Given requests that fail at each place, expect the status there, and no text of an exception."""
    refused, raised, own, malformed = Parent(), Parent(), Parent(), Parent()
    shared.send("Counting", body='"refuse"', traceparent=refused.header)
    the(collector, "process Counting", refused.trace_id)  # so the next one is in a batch of its own
    shared.send("Counting", body='"raise"', traceparent=raised.header)
    shared.send("Traced", body=f'"raise {BODY}"', traceparent=own.header)
    shared.send("Counting", body='"x"', priority="12", traceparent=malformed.header)

    processes = [the(collector, f"process {model}", parent.trace_id) for model, parent in (
        ("Counting", refused), ("Counting", raised), ("Traced", own),
    )]  # fmt: skip
    assert [span.attributes["error.type"] for span in processes] == [
        "INVALID_ARGUMENT",
        "INTERNAL",
        "INTERNAL",
    ]
    assert all(span.is_error and not span.message for span in processes)
    assert the(collector, "batch Counting", raised.trace_id).attributes["error.type"] == "INTERNAL"
    tokenize = the(collector, "tokenize", own.trace_id)
    assert tokenize.is_error and not tokenize.message
    ((event, _, attributes),) = tokenize.events
    assert (event, attributes["exception.type"]) == ("exception", "RuntimeError")
    assert BODY.encode() not in collector.bodies
    queue = the(collector, "queue Counting", malformed.trace_id)
    assert (queue.attributes["error.type"], queue.parent_id) == ("INVALID_ARGUMENT", malformed.span_id)


def test_expired_and_withdrawn(shared: Stack, collector: Collector, tmp_path: Path) -> None:
    """Given a busy model, expect that a request which expires, or is withdrawn, while it waits has a span
    that says so; and likewise one that expires in flight, which its worker commits later."""
    gate, busy, expires, withdrawn = tmp_path / "gate", Parent(), Parent(), Parent()
    body = json.dumps({"gate": str(gate)})
    first = shared.send("Echo", body=body, traceparent=busy.header, expiration=3000)
    batches = Keys("Echo").batches
    wait_until(lambda: shared.redis.xlen(batches) == 1, description="the first one is in flight, alone")
    full = [{"correlation_id": f"full-{number}", "body": b"1"} for number in range(16)]
    shared.send_packed("Echo", full, reply_to="full")  # waits at the process
    wait_until(lambda: shared.redis.xlen(batches) == 2, description="two batches are in flight")
    name = shared.send("Echo", body="1", traceparent=expires.header, expiration=200)
    other = shared.send("Echo", body="2", traceparent=withdrawn.header)
    shared.send("Echo", withdraw=other)

    assert shared.result("Echo", name)["status"] == "DEADLINE_EXCEEDED"
    assert shared.result("Echo", other)["status"] == "CANCELLED"
    assert shared.result("Echo", first)["status"] == "DEADLINE_EXCEEDED"
    settle = the(collector, "settle Echo", busy.trace_id)
    assert (settle.kind, settle.attributes["error.type"]) == (CLIENT, "DEADLINE_EXCEEDED")
    assert the(collector, "queue Echo", expires.trace_id).attributes["error.type"] == "DEADLINE_EXCEEDED"
    assert the(collector, "queue Echo", withdrawn.trace_id).attributes["error.type"] == "CANCELLED"
    gate.touch()
    assert the(collector, "process Echo", busy.trace_id).end_ns > settle.end_ns


def test_sequences(shared: Stack, collector: Collector) -> None:
    """Given requests of a sequence, each with a trace, expect their spans one after the other."""
    parents = [Parent(), Parent()]
    for index, parent in enumerate(parents):
        shared.send(
            "Folding", body=str(index), traceparent=parent.header, sequence_id="s", sequence_index=index,
            sequence_start=int(not index), sequence_end=index,
        )  # fmt: skip

    first, second = (the(collector, "process Folding", parent.trace_id) for parent in parents)
    assert first.attributes["carpool.sequence.id"] == second.attributes["carpool.sequence.id"] == "s"
    assert first.end_ns <= second.end_ns and first.start_ns < second.start_ns


def test_streams(shared: Stack, collector: Collector) -> None:
    """Given a stream, expect a span with an event for each chunk, within its time and in order."""
    shared.serve("stepping.py:Chain")
    parent = Parent()
    name = shared.send("Chain", body='{"length": 5, "step_s": 0.01}', stream=1, traceparent=parent.header)

    span = the(collector, "process Chain", parent.trace_id)
    assert span.conversation == name and span.parent_id == parent.span_id
    assert sum(about["carpool.values"] for _, _, about in span.events) == 5
    times = [at_ns for event, at_ns, _ in span.events if event == "chunk"]
    assert times == sorted(times) and span.start_ns <= times[0] and times[-1] <= span.end_ns
    assert span.attributes["carpool.chunks"] == len(times)


def test_exemplars(shared: Stack, collector: Collector) -> None:
    """Given a request with a trace, expect its ID at a bucket, where the format is OpenMetrics, and only
    there."""
    parent = Parent()
    shared.send("Traced", body='"x"', traceparent=parent.header)
    queue = the(collector, "queue Traced", parent.trace_id)
    (batcher,) = [service for service in shared.services if service.name.startswith("batcher")]

    exemplar = f'# {{span_id="{queue.span_id}",trace_id="{parent.trace_id}"}}'
    lines = [
        line for line in metrics_of(batcher, "application/openmetrics-text").splitlines() if exemplar in line
    ]
    assert [line.partition("{")[0] for line in lines] == ["carpool_queue_seconds_bucket"]
    assert parent.trace_id not in metrics_of(batcher)


def test_a_share_of_calls_is_recorded(shared: Stack, collector: Collector) -> None:
    """Given --trace-ratio 1, expect a trace that begins at the gateway; one that a client does not record
    stays so."""
    begins = shared.gateway("--trace-ratio", "1")
    unsampled = Parent("00")

    assert post(begins, "Traced", "begun") == "BEGUN"
    assert post(begins, "Traced", "no", traceparent=unsampled.header) == "NO"

    send = collector.wait_for("send Traced", 1, lambda span: span.parent_id == "")[0]
    assert the(collector, "process Traced", send.trace_id).parent_id == send.span_id
    assert not collector.of(unsampled.trace_id)


def test_a_killed_worker(tmp_path: Path) -> None:
    """Given a worker that is killed with a batch in hand, expect spans of the worker that executes it again,
    which say how often it was delivered; what the killed one had not exported is lost with it."""
    parent, gate = Parent(), tmp_path / "gate"
    with Collector() as collector, Stack(tmp_path / "stack", environment=collector.environment()) as stack:
        stack.batcher()
        flags = ("plain.py:Echo", "--lease-ms", "600")
        first = stack.worker(*flags)
        stack.wait_for_model("Echo")
        name = stack.send("Echo", body=json.dumps({"gate": str(gate)}), traceparent=parent.header)
        wait_until(lambda: stack.has_batch("Echo", first), description="the worker has it")
        first.kill()
        stack.worker(*flags)
        gate.touch()

        assert stack.result("Echo", name)["status"] == "OK"
        process = the(collector, "process Echo", parent.trace_id)
        assert process.attributes["carpool.deliveries"] == 2 and not process.is_error
        queue = the(collector, "queue Echo", parent.trace_id)
        assert queue.end_ns <= process.start_ns


def test_clock_that_is_behind(tmp_path: Path, collector: Collector) -> None:
    """Given a worker that got Redis's time late, as on a busy host, expect that no span of it begins before
    what it follows: the batch says how late it is."""
    parent, server, environment = Parent(), EmbeddedRedis(), collector.environment()
    with Proxy(server.port) as proxy:
        environment["worker"]["CARPOOL_REDIS_URL"] = proxy.url
        with Stack(tmp_path, server=server, environment=environment) as stack:
            proxy.latency_s = (LATE_S, LATE_S)
            stack.batcher()
            stack.worker(
                "plain.py:Echo", "--lease-ms", "60000"
            )  # it asks for the time three times in a lease
            stack.wait_for_model("Echo")
            assert stack.result("Echo", stack.send("Echo", body="0"))["status"] == "OK"
            proxy.latency_s = (0.0, 0.0)
            stack.send("Echo", body="1", traceparent=parent.header)
            queue, process, batch = (
                the(collector, f"{name} Echo", parent.trace_id) for name in ("queue", "process", "batch")
            )

    assert queue.end_ns <= process.start_ns == batch.start_ns


def test_no_collector(tmp_path: Path) -> None:
    """Given an address at which nobody listens, expect results as ever, drops that are counted, and processes
    that end soon."""
    variables = {"CARPOOL_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    environment = {"batcher": variables, "worker": variables}
    with Stack(tmp_path, environment=environment) as stack:
        stack.batcher()
        worker = stack.worker("plain.py:Echo", "--http-port", "0")
        stack.wait_for_model("Echo")
        name = stack.send("Echo", body="1", traceparent=Parent().header)

        assert stack.result("Echo", name)["body"] == 1
        dropped = 'carpool_spans_dropped_total{reason="not_taken"} 3.0'

        def counted() -> bool:
            return dropped in metrics_of(worker)

        wait_until(counted, description="three spans are dropped", timeout_s=2 * EVENTUALLY_S)
        assert [service.terminate() for service in stack.services] == [0, 0]
