"""A decoder process from inside: it has the model, not loaded, and calls `decode` and `encode` of it.

A model process starts it as `python -m carpool_worker.model_process.decoding.child`, and talks to it over a
socket; values are in memory that both have. `load` is not called here, but `load_decoder`.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import structlog

from carpool.errors import INTERNAL, INVALID_ARGUMENT, CarpoolError, Unhealthy
from carpool.lifecycle import die_with_parent, keep_freed_memory
from carpool.logs import configure_logs
from carpool.plugins import UnusableError
from carpool.shown import shortened
from carpool_worker.model_process import frames
from carpool_worker.model_process.apart import leave_signals_to_the_worker, moved, set_apart
from carpool_worker.model_process.configuration import Configuration
from carpool_worker.model_process.creation import Given, LoadError, create, with_model
from carpool_worker.model_process.decoding.callers import called
from carpool_worker.model_process.decoding.declared import declared_beside, load_decoder
from carpool_worker.model_process.decoding.exchange import SharedMemory, read, write_returned
from carpool_worker.model_process.decoding.process import ENDING, LOAD_FAILED, RAISED, READY, RETURNED
from carpool_worker.model_process.failures import failure_of
from carpool_worker.model_process.frames import MessageReader, ProcessGoneError
from carpool_worker.model_process.loaded import Beside, RequestInfo
from carpool_worker.model_process.measured import MeasuredSender
from carpool_worker.model_process.printed import show_output
from carpool_worker.model_process.raised import NAME_CHARS_MAX, name_of, trace_of, whole_trace_of

STATUSES = {"decode": INVALID_ARGUMENT, "encode": INTERNAL}  # of what raises without one


def main(argv: Sequence[str]) -> int:
    """Serve the model process that started this one.

    `argv`: its PID, the descriptors of the socket and of the memory, the model, and the name of the replica.
    The first message has what the model is made with, as that to a model process.
    """
    parent, descriptor, memory, location, replica = argv
    die_with_parent(int(parent))
    keep_freed_memory()
    leave_signals_to_the_worker()
    sock = set_apart(int(descriptor))
    reader = frames.MessageReader(sock)
    name = os.environ.get("CARPOOL_SERVED_MODEL", location)
    configure_logs(os.environ.get("CARPOOL_LOG_LEVEL", "info"), "decoder", model=name, replica=replica)
    show_output()
    try:
        configuration = Configuration.decode(reader.receive()[1])
        beside = with_model(location, configuration, _beside_of)
        frames.send_message(sock, (READY,))
        _serve(sock, reader, beside, SharedMemory(moved(int(memory))))
    except UnusableError as error:
        frames.send_message(sock, (LOAD_FAILED, str(error), ""))
    except LoadError as error:
        frames.send_message(sock, (LOAD_FAILED, str(error), shortened(error.trace)))
    except ProcessGoneError:
        return 0
    return 1


def _beside_of(model: Any, given: Given) -> Beside:
    model = create(model, given)
    beside = declared_beside(model)
    if beside is None:
        raise UnusableError("the model declares neither 'decode_in' nor 'decode_workers' any more")
    load_decoder(model)
    return beside


def _serve(sock: socket.socket, reader: MessageReader, beside: Beside, memory: SharedMemory) -> None:
    """Until the model says that it is broken. Raises ProcessGoneError when the model process hangs up."""
    is_debug = structlog.get_logger().is_enabled_for(logging.DEBUG)
    measured = MeasuredSender(sock)
    while True:
        hook, written, request = reader.receive()[0]
        try:
            value = read(memory, written, copy=True)
            info = None if request is None else RequestInfo(*request)
            returned = write_returned(memory, hook, called(beside, hook, value, info))
            answer: tuple[Any, ...] = (RETURNED, returned)
        except BaseException as error:  # a library's panic, SystemExit: none may end this process
            try:
                failure = failure_of(error, STATUSES[hook])
            except Unhealthy as unhealthy:
                frames.send_message(sock, (ENDING, shortened(str(unhealthy))))
                return
            is_meant = isinstance(error, CarpoolError)
            trace = whole_trace_of if is_debug else trace_of
            shown = ("", "") if is_meant else (name_of(error)[:NAME_CHARS_MAX], shortened(trace(error)))
            answer = (RAISED, failure, *shown)
        measured.send_all()
        frames.send_message(sock, answer)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
