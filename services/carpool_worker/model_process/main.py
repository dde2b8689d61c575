"""The model process: receive a frame, execute it, send the outcome.

`step_loop` does it for stepping models, and `bound_loop` for those that bind sequences.

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
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from carpool.errors import Unhealthy
from carpool.lifecycle import die_with_parent, keep_freed_memory
from carpool.logs import configure_logs
from carpool.model_settings import ModelKind
from carpool.plugins import UnusableError
from carpool_worker.model_process import frames
from carpool_worker.model_process.bound_loop import BoundLoop
from carpool_worker.model_process.executor import decode_items, execute, never_late
from carpool_worker.model_process.frames import FrameHeader, LoadFailed, Ready
from carpool_worker.model_process.loader import find_model
from carpool_worker.model_process.model import BoundModel, LoadedModel, RequestInfo, SteppingModel, load_model
from carpool_worker.model_process.outcomes import encode_outcome
from carpool_worker.model_process.states import States
from carpool_worker.model_process.step_loop import StepLoop

EXIT_UNHEALTHY: Final = 70


def main(argv: Sequence[str]) -> int:
    """Serve a model to the worker that started this process.

    `argv`: the worker's PID, the descriptor of this process's socket, the model, the device.
    """
    parent, descriptor, location, device = argv
    die_with_parent(int(parent))
    keep_freed_memory()
    _leave_signals_to_the_worker()
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
    try:
        _serve(sock, model)
    except Unhealthy as error:
        _end_unhealthy(sock, error)
    if model.unload is not None:
        model.unload()
    return 0


def _serve(sock: socket.socket, model: LoadedModel | SteppingModel) -> None:
    """Serve until the worker closes the connection. Raises Unhealthy."""
    if isinstance(model, SteppingModel):
        StepLoop(sock, model).run()
    elif isinstance(model, BoundModel):
        BoundLoop(sock, model).run()
    else:
        _execute_all(sock, model)


def _end_unhealthy(sock: socket.socket, error: Unhealthy) -> NoReturn:
    """Tell the worker why this process ends, and end it.

    At once: with a broken accelerator, to unload the model or to let its libraries clean up fails or hangs.
    """
    traceback.print_exception(error)
    with contextlib.suppress(frames.ProcessGoneError):
        frames.send_message(sock, frames.Ending(str(error)).message())
    sys.stderr.flush()
    os._exit(EXIT_UNHEALTHY)


def _leave_signals_to_the_worker() -> None:
    """Ctrl-C, and systemd's SIGTERM, reach all processes of a group: the worker drains first, then ends this
    process. Processes that the model starts can still be terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: None)  # not SIG_IGN, which programs that are executed inherit
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _ready(model: LoadedModel | SteppingModel) -> Ready:
    return Ready(
        model.settings.as_text(),
        model.inputs,
        model.outputs,
        isinstance(model, SteppingModel | BoundModel) or model.wants_requests,
        dict(model.misspelt),
        _kind_of(model),
        b"" if isinstance(model, SteppingModel) else model.initial_state,
    )


def _kind_of(model: LoadedModel | SteppingModel) -> ModelKind:
    if isinstance(model, SteppingModel):
        return ModelKind.STEPPING
    if isinstance(model, BoundModel):
        return ModelKind.BOUND
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
    items, requests = decode_items(frame, payload), [RequestInfo(*info) for info in frame.requests]
    started_ns = time.perf_counter_ns()
    outcome = execute(model, items, requests, states, _lateness(frame))
    compute_us = (time.perf_counter_ns() - started_ns) // 1000
    header, data = encode_outcome(model, frame, outcome, compute_us)
    if states is None:
        frames.send_message(sock, header, data)
    else:
        frames.send_message(sock, header, data, states.without(header.failures))


def _lateness(frame: FrameHeader) -> Callable[[int], bool]:
    """Whether the deadline of the request with an index has passed."""
    if not frame.deadlines_us:
        return never_late

    def is_late(index: int) -> bool:
        deadline_us = frame.deadlines_us[index]
        return deadline_us is not None and deadline_us <= time.monotonic_ns() // 1000 + frame.redis_ahead_us

    return is_late


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
