"""The model process: receive a frame, execute it, send the outcome. `step_loop` does it for stepping models.

A worker starts it as `python -m carpool_worker.model_process.main`. It talks only to its worker. The model
has this process to itself: it may hold the GIL, sleep in C, leak or crash while the worker goes on fetching,
renewing and committing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from carpool.errors import INTERNAL
from carpool.lifecycle import die_with_parent, keep_freed_memory
from carpool.logs import configure_logs
from carpool.model_settings import ModelKind
from carpool.plugins import UnusableError
from carpool_worker.model_process import frames
from carpool_worker.model_process.executor import Items, ListItems, Outcome, StackedItems, execute
from carpool_worker.model_process.frames import FrameHeader, LoadFailed, OutcomeHeader, Ready
from carpool_worker.model_process.loader import find_model
from carpool_worker.model_process.model import LoadedModel, RequestInfo, SteppingModel, load_model
from carpool_worker.model_process.states import States
from carpool_worker.model_process.step_loop import StepLoop


def main(argv: Sequence[str]) -> int:
    """Serve a model to the worker that started this process.

    `argv`: the worker's PID, the descriptor of this process's socket, the model, the device.
    """
    parent, descriptor, location, device = argv
    die_with_parent(int(parent))
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the worker drains first, then ends this process
    sock = socket.socket(fileno=int(descriptor))
    # Processes that the model starts must not inherit the socket: they could write to it, and while they hold
    # it open, the worker does not notice that this process died.
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)
    os.dup2(2, 1)  # what a model prints goes to the logs
    configure_logs(os.environ.get("CARPOOL_LOG_LEVEL", "info"), "model")  # for models that log with structlog
    try:
        model = load_model(find_model(location), device)
    except UnusableError as error:
        frames.send_load_result(sock, LoadFailed(str(error), trace=""))
        return 1
    except BaseException as error:  # raised by the user's own code, so the traceback helps
        reason = f"{type(error).__name__}: {error}"
        frames.send_load_result(sock, LoadFailed(reason, traceback.format_exc()))
        return 1
    frames.send_load_result(sock, _ready(model))
    if isinstance(model, SteppingModel):
        StepLoop(sock, model).run()
    else:
        _execute_all(sock, model)
    if model.unload is not None:
        model.unload()
    return 0


def _ready(model: LoadedModel | SteppingModel) -> Ready:
    return Ready(
        model.settings.as_text(),
        model.inputs,
        model.outputs,
        isinstance(model, SteppingModel) or model.wants_requests,
        dict(model.misspelt),
        _kind_of(model),
        b"" if isinstance(model, SteppingModel) else model.initial_state,
    )


def _kind_of(model: LoadedModel | SteppingModel) -> ModelKind:
    if isinstance(model, SteppingModel):
        return ModelKind.STEPPING
    return ModelKind.STATEFUL if model.states else ModelKind.PLAIN


def _execute_all(sock: socket.socket, model: LoadedModel) -> None:
    reader = frames.MessageReader(sock)
    with contextlib.suppress(frames.ProcessGoneError):
        while True:
            _execute_next(reader, sock, model)


def _execute_next(reader: frames.MessageReader, sock: socket.socket, model: LoadedModel) -> None:
    fields, payload = reader.receive()
    frame = FrameHeader(*fields)
    states = None
    if model.states:
        payload, rows = frames.divide_payload(payload, frame.size * len(model.initial_state))
        states = States(model.states, rows, frame.size)
    items: Items
    if frame.parts:
        items = StackedItems(frames.unstack(frame.parts, frame.size, payload))
    else:
        items = ListItems(frames.unpack_values(payload))
    requests = [RequestInfo(*info) for info in frame.requests]
    started_ns = time.perf_counter_ns()
    outcome = execute(model, items, requests, states)
    compute_us = (time.perf_counter_ns() - started_ns) // 1000
    failures, parts, data = _encode(model, outcome, frame.size)
    header = OutcomeHeader(
        frame.first, frame.size, frame.number, compute_us, failures, parts, outcome.executed, outcome.raised
    )
    if states is None:
        frames.send_message(sock, header, data)
    else:
        frames.send_message(sock, header, data, states.without(failures))


Encoded = tuple[dict[int, frames.Failure], list[frames.Part], bytes]  # failures, parts, payload


def _encode(model: LoadedModel, outcome: Outcome, count: int) -> Encoded:
    """Encode an outcome; a result that cannot be sent fails its own request."""
    failures, results = outcome.failures, outcome.results
    if isinstance(results, dict):
        try:
            parts, data = frames.stack(results, model.output_datatypes)
        except Exception as error:  # a model's arrays may be of any class and raise anything
            return dict.fromkeys(range(count), (INTERNAL, str(error))) | failures, [], frames.pack_values([])
        return failures, parts, data
    try:
        return failures, [], frames.pack_values(results)
    except Exception:
        return _encode_each(outcome, count)


def _encode_each(outcome: Outcome, count: int) -> Encoded:
    """Encode each result alone, to find out which of them cannot be sent."""
    failures, sendable = dict(outcome.failures), []
    indexes = [index for index in range(count) if index not in failures]
    for index, result in zip(indexes, outcome.results, strict=True):
        try:
            frames.pack_values(result)
            sendable.append(result)
        except Exception as error:
            failures[index] = (INTERNAL, f"the model's result cannot be sent: {error}")
    return failures, [], frames.pack_values(sendable)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
