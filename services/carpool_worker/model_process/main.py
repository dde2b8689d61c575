"""The model process: receive a frame, execute it, send the outcome. It speaks to nobody but its worker.

The model has this process to itself: it may hold the GIL, sleep in C, leak or crash, and the worker goes on
fetching, renewing and committing beside it.
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
from typing import Any

from carpool.errors import INTERNAL
from carpool.lifecycle import die_with_parent
from carpool.logs import configure_logs
from carpool.plugins import UnusableError
from carpool_worker.model_process import frames
from carpool_worker.model_process.executor import Items, ListItems, Outcome, StackedItems, execute
from carpool_worker.model_process.loader import find_model
from carpool_worker.model_process.model import LoadedModel, RequestInfo, adapt


def main(argv: Sequence[str]) -> int:
    """Serve a model to the worker that started us. `argv`: its pid, our socket, the model, the device."""
    parent, descriptor, where, device = argv
    die_with_parent(int(parent))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's to act on: it drains first
    sock = socket.socket(fileno=int(descriptor))
    # The socket is this process's alone. What a model forks must not answer in its place, nor keep the worker
    # from hearing that it died.
    sock.set_inheritable(False)
    os.register_at_fork(after_in_child=sock.close)
    os.dup2(2, 1)  # what a model prints belongs with the logs
    configure_logs(os.environ.get("CARPOOL_LOG_LEVEL", "info"), "model")  # for a model that logs by structlog
    try:
        model = adapt(find_model(where), device)
    except UnusableError as error:
        frames.send_frame(sock, {"failed": str(error), "traceback": ""})
        return 1
    except BaseException as error:  # out of the user's own code: it helps to see where
        frames.send_frame(
            sock, {"failed": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        )
        return 1
    frames.send_frame(sock, {"ready": _registration(model)})
    reader = frames.FrameReader(sock)
    with contextlib.suppress(frames.ProcessGoneError):
        while True:
            _serve(reader, sock, model)
    if model.unload is not None:
        model.unload()
    return 0


def _registration(model: LoadedModel) -> dict[str, Any]:
    settings = model.settings
    return {
        "settings": settings.as_text(),
        "inputs": [(spec.name, spec.datatype, spec.shape) for spec in model.inputs],
        "outputs": [(spec.name, spec.datatype, spec.shape) for spec in model.outputs],
        "wants_requests": model.wants_requests,
        "misspelt": dict(model.misspelt),
    }


def _serve(reader: frames.FrameReader, sock: socket.socket, model: LoadedModel) -> None:
    header, payload = reader.receive()
    parts = header.get("parts")
    items: Items
    if parts is None:
        items = ListItems(frames.unpack_values(payload))
    else:
        items = StackedItems(frames.unstack(parts, header["count"], payload))
    requests = [RequestInfo(*info) for info in header.get("requests", ())]
    started_ns = time.perf_counter_ns()
    outcome = execute(model, items, requests)
    compute_us = (time.perf_counter_ns() - started_ns) // 1000
    head, data = _encode(model, outcome, len(items))
    head |= {"compute_us": compute_us, **{name: header.get(name) for name in ("number", "count", "first")}}
    frames.send_frame(sock, head, data)


def _encode(model: LoadedModel, outcome: Outcome, count: int) -> tuple[frames.Header, bytes]:
    """An outcome as a frame; a result that cannot be sent fails its own request."""
    failures, results = outcome
    if isinstance(results, dict):
        try:
            parts, data = frames.stack(results, {spec.name: spec.datatype for spec in model.outputs})
            return {"failures": failures, "parts": parts}, data
        except Exception as error:  # whatever a model's arrays do when they are looked at
            return {
                "failures": dict.fromkeys(range(count), (INTERNAL, str(error))) | failures
            }, frames.pack_values([])
    try:
        return {"failures": failures}, frames.pack_values(results)
    except Exception:
        return _encode_singly(outcome, count)


def _encode_singly(outcome: Outcome, count: int) -> tuple[frames.Header, bytes]:
    failures, good = dict(outcome.failures), []
    positions = [position for position in range(count) if position not in failures]
    for position, result in zip(positions, outcome.results, strict=True):
        try:
            frames.pack_values(result)
            good.append(result)
        except Exception as error:
            failures[position] = (INTERNAL, f"the model's result cannot be sent: {error}")
    return {"failures": failures}, frames.pack_values(good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
