"""Executes one frame with a model: from its header and payload to the message with its outcome."""

from __future__ import annotations

import time
from collections.abc import Callable

from carpool.parts import Buffer
from carpool_worker.model_process import frames
from carpool_worker.model_process.executor import decode_items, execute, never_late
from carpool_worker.model_process.failures import Observe, not_observed
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader
from carpool_worker.model_process.model import LoadedModel
from carpool_worker.model_process.outcomes import encode_outcome
from carpool_worker.model_process.states import States


def execute_frame(
    model: LoadedModel,
    frame: FrameHeader,
    payload: Buffer,
    again: Callable[[], Buffer],
    observe: Observe = not_observed,
) -> tuple[OutcomeHeader, list[Buffer]]:
    """The header of the outcome and its payload, in pieces. `observe` is told what the model raises. Raises
    Unhealthy.

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
    outcome = execute(model, items, frame.requests, states, is_late, late, observe)
    compute_us = (time.perf_counter_ns() - started_ns) // 1000
    header, data = encode_outcome(model, frame, outcome, compute_us)
    return header, [data] if states is None else [data, states.without(header.failures)]


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
