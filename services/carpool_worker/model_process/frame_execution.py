"""Executes one frame with a model: from its header and payload to the message with its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from carpool.errors import INTERNAL, RESOURCE_EXHAUSTED
from carpool.parts import Buffer
from carpool_worker.model_process import frames
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.calls import FrameCalls
from carpool_worker.model_process.executor import (
    Items,
    Outcome,
    decode_items,
    execute_async,
    never_late,
    run_now,
)
from carpool_worker.model_process.failures import Observe, WrongOutputError, failure_of, not_observed
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader
from carpool_worker.model_process.loaded import LoadedModel, RequestInfo
from carpool_worker.model_process.outputs import rows_of
from carpool_worker.model_process.padding import TrueSizes, cut_rows
from carpool_worker.model_process.spans import executed_in_span, executing
from carpool_worker.model_process.states import States

# Failures, layouts, payload, and why a result is too large, if one is.
_Encoded = tuple[dict[int, frames.Failure], list[frames.Layout], bytes, str]


def execute_frame(
    model: LoadedModel,
    frame: FrameHeader,
    payload: Buffer,
    again: Callable[[], Buffer],
    observe: Observe = not_observed,
    calls: FrameCalls | None = None,
) -> tuple[OutcomeHeader, list[Buffer]]:
    """As `execute_frame_async`, of a model that is not async."""
    return run_now(execute_frame_async(model, frame, payload, again, observe, calls))


async def execute_frame_async(
    model: LoadedModel,
    frame: FrameHeader,
    payload: Buffer,
    again: Callable[[], Buffer],
    observe: Observe = not_observed,
    calls: FrameCalls | None = None,
) -> tuple[OutcomeHeader, list[Buffer]]:
    """The header of the outcome and its payload, in parts. `observe` is told what the model raises. `calls`:
    of a model that calls others. Raises Unhealthy.

    The model gets the payload's memory, and may write into it: `again` brings the payload as it was sent.
    """
    states = None
    states_bytes = frame.size * len(model.initial_state)
    if model.states:
        payload, rows = frames.divide_payload(payload, states_bytes)
        states = States(model.states, rows, frame.size)
    items = decode_items(
        frame, payload, lambda: frames.divide_payload(again(), states_bytes)[0], model.inputs
    )
    started_ns = time.perf_counter_ns()
    outcome = await execution_of(model, frame, items, states, observe, calls)
    header, data = outcome_of(model, frame, outcome, _us_since(started_ns))
    return header, [data] if states is None else [data, states.without(header.failures)]


def execution_of(
    model: LoadedModel,
    frame: FrameHeader,
    items: Items,
    states: States | None,
    observe: Observe,
    calls: FrameCalls | None = None,
) -> Coroutine[Any, Any, Outcome]:
    """The execution of a frame's items: to be awaited, or given to `run_now`. As `execute_frame_async`."""
    running = execute_async(
        model,
        items,
        frame.requests,
        states,
        lateness(frame),
        late_ones(frame),
        observe,
        frame.cost_max,
        frame.costs,
        calls,
    )
    return executed_in_span(frame.trace, frame.size, running) if frame.trace else running


def execute_bound_frame(
    executor: BoundExecutor, frame: FrameHeader, payload: Buffer
) -> tuple[OutcomeHeader, list[Buffer]]:
    """The same of a model that binds sequences. No request is too late for it, and none is executed again."""
    items, requests = decode_items(frame, payload), [RequestInfo(*request) for request in frame.requests]
    with executing(frame.trace, frame.size):
        outcome, took_us = timed(partial(executor.execute, items, requests))
    header, data = outcome_of(executor.model, frame, outcome, took_us)
    return header, [data]


def timed(run: Callable[[], Outcome]) -> tuple[Outcome, int]:
    """What `run` returns, and how long that takes (us)."""
    started_ns = time.perf_counter_ns()
    outcome = run()
    return outcome, _us_since(started_ns)


def _us_since(started_ns: int) -> int:
    return (time.perf_counter_ns() - started_ns) // 1000


def outcome_of(
    model: LoadedModel,
    frame: FrameHeader,
    outcome: Outcome,
    compute_us: int,
    sizes: TrueSizes | None = None,
) -> tuple[OutcomeHeader, bytes]:
    """The header and the payload of an outcome. A result that cannot be sent, or is too large, fails its own
    request. `sizes`: the true ones of what the model got padded; None: those of the frame."""
    if model.cuts:
        outcome = cut_back(model, outcome, frame.size, frame.sizes if sizes is None else sizes)
    failures, layouts, data, error = _encode(model, outcome, frame.size, frame.result_bytes_max)
    header = OutcomeHeader(
        frame.first,
        frame.size,
        frame.number,
        compute_us,
        failures,
        layouts,
        outcome.executed_together,
        outcome.raised,
        {error: ()} if error else {},
        refused=outcome.refused,
        cost=outcome.cost,
        parts=outcome.parts,
    )
    return header, data


def cut_back(model: LoadedModel, outcome: Outcome, count: int, sizes: TrueSizes) -> Outcome:
    """The outcome with results of the true sizes. If they cannot be cut back, all fail."""
    indexes = [index for index in range(count) if index not in outcome.failures]
    rows = rows_of(outcome.results)
    try:
        cut_rows(model.cuts, rows, sizes, indexes)
    except WrongOutputError as error:
        failures = dict.fromkeys(indexes, failure_of(error, INTERNAL))
        return outcome._replace(failures=outcome.failures | failures, results=[], executed_together=0)
    return outcome._replace(results=rows)


def _encode(model: LoadedModel, outcome: Outcome, count: int, bytes_max: int) -> _Encoded:
    failures, results = outcome.failures, outcome.results
    if isinstance(results, dict):
        try:
            layouts, data = frames.stack(results, model.output_datatypes)
        except Exception as error:  # a model's arrays may be of any class and raise anything
            return _all_fail((INTERNAL, str(error)), failures, count)
        if len(data) > bytes_max * (count - len(failures)):  # all are equally large
            return _all_fail(frames.too_large(bytes_max), failures, count)
        return failures, layouts, data, ""
    try:
        data = frames.pack_values(results)
    except Exception:
        return _encode_each(outcome, count, bytes_max)
    return (failures, [], data, "") if len(data) <= bytes_max else _encode_each(outcome, count, bytes_max)


def _all_fail(failure: frames.Failure, failures: dict[int, frames.Failure], count: int) -> _Encoded:
    status, detail = failure
    error = detail if status == RESOURCE_EXHAUSTED else ""
    return dict.fromkeys(range(count), failure) | failures, [], frames.pack_values([]), error


def _encode_each(outcome: Outcome, count: int, bytes_max: int) -> _Encoded:
    """Encode each result alone, to find out which of them cannot be sent, or are too large."""
    failures, sendable = dict(outcome.failures), []
    too_large, error = frames.too_large(bytes_max), ""
    indexes = [index for index in range(count) if index not in failures]
    for index, result in zip(indexes, outcome.results, strict=True):
        try:
            size_bytes = len(frames.pack_values(result))
        except Exception as unsendable:
            failures[index] = (INTERNAL, f"the model's result cannot be sent: {unsendable}")
            continue
        if size_bytes > bytes_max:
            failures[index] = too_large
            error = too_large[1]
        else:
            sendable.append(result)
    return failures, [], frames.pack_values(sendable), error


def late_ones(frame: FrameHeader) -> Sequence[int]:
    """The requests whose deadlines have passed by now, for example while the frame waited for another."""
    earliest_us = min([us for _, us in frame.deadlines if us is not None], default=None)
    if earliest_us is None or earliest_us > redis_now_us(frame):
        return ()
    is_late = lateness(frame)
    return [index for index in range(frame.size) if is_late(index)]


def deadlines_of(frame: FrameHeader) -> list[int | None]:
    """Of each request (us), by Redis's clock; empty if none has one."""
    return [deadline_us for size, deadline_us in frame.deadlines for _ in range(size)]


def redis_now_us(frame: FrameHeader) -> int:
    """Redis's clock."""
    return time.monotonic_ns() // 1000 + frame.redis_ahead_us


def lateness(frame: FrameHeader) -> Callable[[int], bool]:
    """Whether the deadline of the request with an index has passed."""
    if not frame.deadlines:
        return never_late
    deadlines_us: list[int | None] = []  # of each request; most frames are executed without them

    def is_late(index: int) -> bool:
        if not deadlines_us:
            deadlines_us.extend(deadlines_of(frame))
        deadline_us = deadlines_us[index]
        return deadline_us is not None and deadline_us <= redis_now_us(frame)

    return is_late
