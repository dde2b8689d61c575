"""Spans of what clients send, with OpenTelemetry as an application sets it up."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

from carpool import AsyncClient, Client
from carpool.errors import InternalError, InvalidArgumentError
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo", "plain.py:Rows", "counting.py:Counting", "stepping.py:Chain")
        yield stack


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """What the application's provider exports. It begins no trace by itself but within a span that it
    records."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(1.0))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter


def sends(exporter: InMemorySpanExporter, number: int) -> list[ReadableSpan]:
    """So many spans of requests; a span ends a moment after its result is there."""

    def found() -> list[ReadableSpan]:
        return [span for span in exporter.get_finished_spans() if span.name.startswith("send ")]

    wait_until(lambda: len(found()) >= number, description=f"{number} spans")
    assert len(found()) == number
    return found()


def header_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


async def test_requests_of_an_async_client(shared: Stack, exported: InMemorySpanExporter) -> None:
    """Given a current span, expect one of each request in its trace, whose context the model gets."""
    async with AsyncClient(shared.url, timeout=EVENTUALLY_S) as client:
        with trace.get_tracer("app").start_as_current_span("handler") as handler:
            first = await client.infer("Echo", "about")  # looks the model up
            second = await client.infer("Echo", "about", tenant="a")
            third = await client.submit("Echo", "about")
    spans = sends(exported, 3)
    assert [about[2]["traceparent"] for about in (first, second, third)] == [
        header_of(span) for span in spans
    ]
    assert second[2]["tenant"] == "a"
    for span, about in zip(spans, (first, second, third), strict=True):
        assert span.parent is not None and span.parent.span_id == handler.get_span_context().span_id
        assert span.kind is trace.SpanKind.PRODUCER and span.status.is_unset
        assert span.attributes is not None
        assert span.attributes["messaging.destination.name"] == "Echo"
        assert span.attributes["messaging.message.conversation_id"] == about[0] or about is first


async def test_what_is_not_recorded(shared: Stack, exported: InMemorySpanExporter) -> None:
    """Given a trace that is not recorded, or that the caller names, expect no span, and only the latter's
    field."""
    named = f"00-{'a' * 32}-{'b' * 16}-01"
    unsampled = trace.NonRecordingSpan(
        trace.SpanContext(7, 9, is_remote=True, trace_flags=trace.TraceFlags(0))
    )
    async with AsyncClient(shared.url, timeout=EVENTUALLY_S) as client:
        with trace.use_span(unsampled):
            assert (await client.infer("Echo", "about"))[2] == {}
        about = await client.infer("Echo", "about", fields={"traceparent": named})
        assert about[2] == {"traceparent": named}
    assert not exported.get_finished_spans()


async def test_many_requests_have_one_span(shared: Stack, exported: InMemorySpanExporter) -> None:
    """Given calls that send many, expect a span for each call, and columns as without a trace."""
    async with AsyncClient(shared.url, timeout=EVENTUALLY_S) as client:
        rows = np.arange(8, dtype=np.float32).reshape(4, 2)
        assert np.array_equal(await client.infer_many("Rows", rows), rows)
        abouts = await client.infer_many("Echo", ["about"] * 3)
        mapped = [about async for about in client.map("Echo", ["about"] * 3)]
    _, many, by_map = sends(exported, 3)
    assert {about[2]["traceparent"] for about in abouts} == {header_of(many)}
    assert {about[2]["traceparent"] for about in mapped} == {header_of(by_map)}


async def test_failures(shared: Stack, exported: InMemorySpanExporter) -> None:
    """Given requests that fail, expect their statuses, and no texts."""
    async with AsyncClient(shared.url, timeout=EVENTUALLY_S) as client:
        with pytest.raises(InternalError):
            await client.infer("Counting", "raise")
        with pytest.raises(InvalidArgumentError):
            await client.infer("Counting", "x", priority=12)
        stream = client.stream("Chain", {"length": 2, "raises_at": 1})
        with pytest.raises(InternalError):
            async for _ in stream:
                pass
        chunks = [chunk async for chunk in client.stream("Chain", {"length": 2})]
    assert len(chunks) == 2
    spans = sends(exported, 4)
    statuses = [(span.attributes or {}).get("error.type") for span in spans]
    assert statuses == ["INTERNAL", "INVALID_ARGUMENT", "INTERNAL", None]
    assert not any(span.status.description or span.events for span in spans)


def test_each_thread_of_a_client_has_its_own_trace(shared: Stack, exported: InMemorySpanExporter) -> None:
    """Given threads that share a Client, each within a span, expect that no request gets the trace of
    another."""
    seen: dict[str, list[str]] = {}
    with Client(shared.url, timeout=EVENTUALLY_S) as client:

        def work(name: str) -> None:
            with trace.get_tracer("app").start_as_current_span(name) as span:
                futures = [client.submit("Echo", "about") for _ in range(20)]
                abouts = [future.result() for future in futures]
                abouts += client.infer_many("Echo", ["about"] * 2)
                abouts += client.map("Echo", ["about"] * 2)
                abouts.append(client.request("Echo", "about").value)
            traces = {about[2]["traceparent"].split("-")[1] for about in abouts}
            seen[f"{span.get_span_context().trace_id:032x}"] = list(traces)

        threads = [threading.Thread(target=work, args=(str(number),)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        outside = client.infer("Echo", "about")
    assert {trace_id: [trace_id] for trace_id in seen} == seen and len(seen) == 4
    assert outside[2]["traceparent"].split("-")[1] not in seen
    sends(exported, 4 * (20 + 1 + 1 + 1) + 1)
