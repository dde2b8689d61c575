"""Contexts of traces, spans on their way, and their export: what is read, what is dropped, and that nobody
waits."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import msgpack
import pytest
from opentelemetry import trace as api
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from carpool import span_export
from carpool.service_metrics import CommonMetrics
from carpool.settings import BatcherSettings, GatewaySettings, read_settings
from carpool.span_export import EXPORTED_TOGETHER, SpanExport, start_span_export
from carpool.tracing import (
    INTERNAL,
    Context,
    Event,
    Link,
    Span,
    is_chosen,
    new_trace,
    read_context,
    sampled_context,
)
from carpool_worker.model_process.spans import SPANS, WAITING_MAX, SpanBuffer, executed_in_span
from support.waiting import EVENTUALLY_S, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID: Final = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("value", "is_sampled"),
    [
        (VALID, True),
        (VALID.encode(), True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"cc-{TRACE}-{PARENT}-01-of-a-later-version", True),
    ],
)
def test_contexts_that_are_read(value: Any, is_sampled: bool) -> None:
    assert read_context(value, "a=1") == (
        Context(bytes.fromhex(TRACE), bytes.fromhex(PARENT), "a=1"),
        is_sampled,
    )


@pytest.mark.parametrize(
    "value",
    [
        "",
        None,
        7,
        "\N{SNOWMAN}",
        b"\xff\xff",
        VALID.upper(),
        f"{VALID} ",
        f"{VALID}-more",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{PARENT}-1",
        f"00-{TRACE[1:]}-{PARENT}-01",
        f"00-{TRACE}-{PARENT}",
    ],
)
def test_contexts_that_are_ignored(value: Any) -> None:
    """Given an invalid value, expect none, whatever the state is."""
    assert read_context(value, "a=1") is None
    assert sampled_context({"traceparent": value, "tracestate": "a=1"}) is None


def test_context_of_fields() -> None:
    assert sampled_context(None) is None and sampled_context({"tenant": b"a"}) is None
    found = sampled_context({"traceparent": VALID.encode(), "tracestate": b"a=1,b=2"})
    assert found is not None and found.state == "a=1,b=2"
    assert found.child().trace_id == found.trace_id and found.child().span_id != found.span_id
    assert sampled_context(found.fields) == found
    assert sampled_context({"traceparent": VALID, "tracestate": "a@b=1, ,c=d e"}) is not None
    long = ",".join([f"k{number}=1" for number in range(33)])
    for state in (
        b"\n",
        b"\xff",
        "a=" + "x" * 511,
        "a",
        "A=1",
        "a=1,=",
        "a==",
        long,
        7,
        None,
    ):  # dropped, and nothing else
        assert sampled_context({"traceparent": VALID, "tracestate": state}) == found._replace(state="")


def test_ratio() -> None:
    assert not is_chosen(0.0)
    assert all(is_chosen(1.0) for _ in range(100))
    assert 300 < sum(is_chosen(0.5) for _ in range(1000)) < 700


def span(links: int = 0, name: str = "s") -> Span:
    context = new_trace()
    attributes: dict[str, str | int | float | bool] = {"a": 1, "b": "two", "c": 0.5, "d": True}
    others = [Link(new_trace(), {"n": number}) for number in range(links)]
    events = [Event("e", 1500, {"x": 1})]
    return Span(name, INTERNAL, context, context.child(), 1000, 2000, attributes, others, events, "INTERNAL")


def test_a_span_between_processes() -> None:
    """Given a span, expect the same after it was packed; and an error for fields that are not those of
    one."""
    given = span(links=3)
    fields = msgpack.unpackb(msgpack.packb(given.to_fields()))
    assert Span.of_fields(fields) == given
    moved = given.moved(-500)
    assert (moved.start_us, moved.end_us, moved.events[0].at_us) == (500, 1500, 1000)
    for at, wrong in ((0, 7), (2, [b"", b"x" * 8, ""]), (4, "1"), (6, {"a": [1]}), (7, [[1]])):
        with pytest.raises((ValueError, TypeError)):
            Span.of_fields([*fields[:at], wrong, *fields[at + 1 :]])


async def test_executions_at_the_same_time_have_spans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given two frames of an async model, one of which is traced, expect that only the span of that one is
    current in it, and only there; the model's own are its children."""
    provider = TracerProvider(sampler=ParentBased(root=ALWAYS_OFF), shutdown_on_exit=False)
    monkeypatch.setattr(api, "_TRACER_PROVIDER", provider)
    monkeypatch.setenv("CARPOOL_SERVED_MODEL", "m")
    batch, both = new_trace(), asyncio.Barrier(2)

    async def predict() -> Any:
        await both.wait()
        with api.get_tracer("t").start_as_current_span("own") as own:
            await both.wait()
            return own

    SPANS.take()
    traced, other = await asyncio.gather(
        executed_in_span(batch.headers, 3, predict()), executed_in_span((), 1, predict())
    )

    ((predicted,), _) = SPANS.take()
    assert (predicted.name, predicted.parent, predicted.attributes["carpool.requests"]) == (
        "predict m",
        batch,
        3,
    )
    assert traced.is_recording() is False and traced.parent.span_id.to_bytes(8) == predicted.context.span_id
    assert traced.get_span_context().trace_id.to_bytes(16) == batch.trace_id
    assert not other.is_recording() and not other.get_span_context().trace_flags.sampled
    assert not api.get_current_span().get_span_context().is_valid


def test_spans_of_a_model_are_bounded() -> None:
    buffer = SpanBuffer()
    for _ in range(WAITING_MAX + 3):
        buffer.add(span())
    taken, dropped = buffer.take()
    assert (len(taken), dropped, buffer.has_news) == (WAITING_MAX, 3, False)
    assert buffer.take() == ([], 0)


class Sink:
    """A collector that answers once it is `open`; with `fails`, that it took nothing."""

    def __init__(self, *, is_open: bool = True, fails: bool = False) -> None:
        self.open = threading.Event()
        self.taken: list[Span] = []
        self.sizes: list[int] = []
        self._fails = fails
        self.is_asked = threading.Event()
        if is_open:
            self.open.set()

    def send(self, spans: Sequence[Span]) -> bool:
        self.is_asked.set()
        self.open.wait()
        self.sizes.append(sum(1 + len(one.links) for one in spans))
        if self._fails:
            raise OSError
        self.taken += spans
        return True

    def close(self) -> None:
        self.open.set()


class Counts:
    """What an export told."""

    def __init__(self) -> None:
        self.exported = 0
        self.dropped: dict[str, int] = {}

    def on_exported(self, number: int) -> None:
        self.exported += number

    def on_dropped(self, reason: str, number: int) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + number


def started(sink: Sink, queue_max: int = 100) -> tuple[SpanExport, Counts]:
    counts = Counts()
    export = SpanExport(lambda: sink, counts.on_exported, counts.on_dropped, queue_max=queue_max)
    export.start()
    return export, counts


def test_what_is_left_is_exported_at_the_end() -> None:
    sink = Sink()
    export, counts = started(sink)
    spans = [span(name=str(number)) for number in range(10)]
    export.record(spans)
    export.stop()
    assert sink.taken == spans and (counts.exported, counts.dropped) == (10, {})


def test_requests_to_a_collector_are_bounded() -> None:
    """Given more than fits into one request, expect several; a span with many links is not divided."""
    sink = Sink()
    export, counts = started(sink, queue_max=10 * EXPORTED_TOGETHER)
    export.record([span() for _ in range(EXPORTED_TOGETHER + 1)])
    export.record([span(links=2 * EXPORTED_TOGETHER), span()])
    export.stop()
    assert counts.exported == EXPORTED_TOGETHER + 3
    assert max(sink.sizes) <= 3 * EXPORTED_TOGETHER + 1 and len(sink.sizes) >= 3


def test_a_slow_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one that does not answer, expect that nobody waits, that what is too much is dropped and counted
    with its links, and that the end is bounded."""
    monkeypatch.setattr(span_export, "STOP_S", 0.1)
    sink = Sink(is_open=False)
    export, counts = started(sink, queue_max=20)
    export.record([span()] * 2)
    sink.is_asked.wait(EVENTUALLY_S)
    for _ in range(5):
        export.record([span(links=4)])
    assert counts.dropped == {"queue_full": 1}
    began_s = time.monotonic()
    export.stop()
    assert time.monotonic() - began_s < EVENTUALLY_S
    wait_until(
        lambda: counts.exported or counts.dropped.get("not_taken"), description="the thread has gone on"
    )
    export.record([span()])
    assert counts.dropped["queue_full"] == 2


def test_a_collector_that_fails() -> None:
    """Given one that takes nothing, expect each span to be counted as dropped."""
    export, counts = started(Sink(fails=True))
    export.record([span()] * 3)
    export.stop()
    assert (counts.exported, counts.dropped) == (0, {"not_taken": 3})


# --- settings ----------------------------------------------------------------------------------------------


def test_without_a_collector_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given no address, or OpenTelemetry's variable that disables it, expect no export and no thread."""
    threads, metrics = threading.active_count(), CommonMetrics()
    assert start_span_export(read_settings(BatcherSettings, [], "batcher"), metrics, "b") is None
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    settings = read_settings(BatcherSettings, ["--otlp-endpoint", "http://127.0.0.1:4318"], "batcher")
    assert start_span_export(settings, metrics, "b") is None
    assert metrics.record_spans is None and threading.active_count() == threads


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    monkeypatch.delitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", raising=False)
    settings = read_settings(BatcherSettings, ["--otlp-endpoint", "http://127.0.0.1:4318"], "batcher")
    with pytest.raises(ValueError, match=r"--otlp-endpoint: the package .* is missing; .*'PATH\[otel\]'"):
        start_span_export(settings, CommonMetrics(), "batcher")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--otlp-endpoint", "jaeger:4318"], "must be an address of HTTP"),
        (["--trace-ratio", "1.5", "--otlp-endpoint", "http://h:1"], "--trace-ratio"),
        (["--trace-ratio", "0.5"], "need a collector: give its address with --otlp-endpoint"),
    ],
)
def test_settings_that_are_wrong(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_settings(GatewaySettings, flags, "carpool gateway")
    assert error in capsys.readouterr().err
