"""Executes one frame with a model: from its header and payload to the message with its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable

from carpool.errors import INTERNAL, RESOURCE_EXHAUSTED
from carpool.parts import Buffer
from carpool_worker.model_process import frames
from carpool_worker.model_process.bound_executor import BoundExecutor
from carpool_worker.model_process.calls import FrameCalls
from carpool_worker.model_process.executor import Outcome, decode_items, execute_async, never_late, run_now
from carpool_worker.model_process.failures import Observe, not_observed
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader
from carpool_worker.model_process.loaded import LoadedModel, RequestInfo
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
    """The header of the outcome and its payload, in pieces. `observe` is told what the model raises. `calls`:
    of a model that calls others. Raises Unhealthy.

    The model gets the payload's memory, and may write into it: `again` brings the payload as it was sent.
    """
    states = None
    states_bytes = frame.size * len(model.initial_state)
    if model.states:
        payload, rows = frames.divide_payload(payload, states_bytes)
        states = States(model.states, rows, frame.size)
    items = decode_items(frame, payload, lambda: frames.divide_payload(again(), states_bytes)[0])
    is_late = _lateness(frame)
    late = [index for index in range(frame.size) if is_late(index)] if _is_one_late(frame) else ()
    started_ns = time.perf_counter_ns()
    outcome = await execute_async(
        model,
        items,
        frame.requests,
        states,
        is_late,
        late,
        observe,
        frame.cost_max,
        frame.costs,
        calls,
    )
    header, data = _encoded(model, frame, outcome, started_ns)
    return header, [data] if states is None else [data, states.without(header.failures)]


def execute_bound_frame(
    executor: BoundExecutor, frame: FrameHeader, payload: Buffer
) -> tuple[OutcomeHeader, list[Buffer]]:
    """The same of a model that binds sequences. No request is too late for it, and none is executed again."""
    items, requests = decode_items(frame, payload), [RequestInfo(*request) for request in frame.requests]
    started_ns = time.perf_counter_ns()
    header, data = _encoded(executor.model, frame, executor.execute(items, requests), started_ns)
    return header, [data]


def _encoded(
    model: LoadedModel, frame: FrameHeader, outcome: Outcome, started_ns: int
) -> tuple[OutcomeHeader, bytes]:
    """The header and the payload of an outcome that has just come. A result that cannot be sent, or is too
    large, fails its own request."""
    compute_us = (time.perf_counter_ns() - started_ns) // 1000
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


def _is_one_late(frame: FrameHeader) -> bool:
    """Whether the deadline of a request has passed while the frame waited for the one before it."""
    earliest_us = min([us for _, us in frame.deadlines if us is not None], default=None)
    return earliest_us is not None and earliest_us <= _redis_now_us(frame)


def _redis_now_us(frame: FrameHeader) -> int:
    return time.monotonic_ns() // 1000 + frame.redis_ahead_us


def _lateness(frame: FrameHeader) -> Callable[[int], bool]:
    """Whether the deadline of the request with an index has passed."""
    if not frame.deadlines:
        return never_late
    deadlines_us: list[int | None] = []  # of each request; most frames are executed without them

    def is_late(index: int) -> bool:
        if not deadlines_us:
            deadlines_us.extend([deadline_us for size, deadline_us in frame.deadlines for _ in range(size)])
        deadline_us = deadlines_us[index]
        return deadline_us is not None and deadline_us <= _redis_now_us(frame)

    return is_late
