"""The model process: load a model, and serve it: in `stepping.loop` if it steps, in `async_loop` if it
is async, else in `frame_loop`.

A worker starts it as `python -m carpool_worker.model_process.main`. It talks only to its worker. The model
has this process to itself: it may hold the GIL, sleep in C, leak or crash while the worker goes on fetching,
renewing and committing.

Why: docs/decisions/0025.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import secrets
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final, NoReturn

from carpool.errors import CarpoolError, Unhealthy
from carpool.lifecycle import die_with_parent, keep_freed_memory
from carpool.logs import configure_logs
from carpool.plugins import UnusableError
from carpool.shown import shortened
from carpool_worker.model_process import frames
from carpool_worker.model_process.async_loop import AsyncFrameLoop
from carpool_worker.model_process.calls import Calls
from carpool_worker.model_process.configuration import Configuration
from carpool_worker.model_process.frame_loop import FrameLoop
from carpool_worker.model_process.frames import LoadFailed, Raised
from carpool_worker.model_process.loaded import LoadedModel, description_of
from carpool_worker.model_process.model import LoadError, SteppingModel, load_configured
from carpool_worker.model_process.printed import show_output
from carpool_worker.model_process.raised import RaisedLog
from carpool_worker.model_process.stepping.loop import StepLoop

EXIT_UNHEALTHY: Final = 70
REASON_CHARS_MAX: Final = 1000  # of why it is unhealthy, which producers get as well
DESCRIPTORS_MAX: Final = 4096  # that of the socket is below: the kernel keeps a table up to the highest


def main(argv: Sequence[str]) -> int:
    """Serve a model to the worker that started this process.

    `argv`: the worker's PID, the descriptor of this process's socket, the model, the device, and the name of
    the replica.
    """
    parent, descriptor, location, device, worker = argv
    die_with_parent(int(parent))
    keep_freed_memory()
    _leave_signals_to_the_worker()
    sock = _set_apart(int(descriptor))
    name = os.environ.get("CARPOOL_SERVED_MODEL", location)
    configure_logs(os.environ.get("CARPOOL_LOG_LEVEL", "info"), "model", model=name, worker=worker)
    show_output()
    try:
        _, payload = frames.MessageReader(sock).receive()  # the next message is for a model that is loaded
        model = load_configured(location, device, Configuration.decode(payload))
        calls = _calls_of(model, name)
    except UnusableError as error:
        frames.send_load_result(sock, LoadFailed(str(error), trace=""))
        return 1
    except LoadError as error:
        frames.send_load_result(sock, LoadFailed(str(error), shortened(error.trace)))
        return 1
    except frames.ProcessGoneError:  # the worker ended
        return 1
    frames.send_load_result(sock, description_of(model))
    raised = RaisedLog(partial(_tell, sock))
    try:
        if isinstance(model, SteppingModel):
            StepLoop(sock, model, raised).run()
        elif model.is_async:
            AsyncFrameLoop(sock, model, raised, calls).run()
        else:
            FrameLoop(sock, model, raised, calls).run()
    except Unhealthy as error:
        _end_unhealthy(sock, raised, error)
    if model.unload is not None:
        model.unload()
    return 0


def _calls_of(model: LoadedModel | SteppingModel, name: str) -> Calls | None:
    """What a model needs that calls others. Raises UnusableError where it has no address of Redis for
    that."""
    if isinstance(model, SteppingModel) or not model.wants_clients:
        return None
    try:
        return Calls(name, is_async=model.is_async)
    except CarpoolError as error:
        raise UnusableError(f"the model's 'predict' has a parameter `clients`: {error.detail}") from None


def _set_apart(descriptor: int) -> socket.socket:
    """The socket to the worker under another descriptor, that the model is not likely to write to.

    A program that writes to a descriptor which it does not own, or closes one twice, means a low one: the
    kernel gives out the lowest. This one is not known to it beforehand.

    Processes that the model starts must not inherit the socket: they could write to it, and while they hold
    it open, the end of this process does not end the connection.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = DESCRIPTORS_MAX if soft == resource.RLIM_INFINITY else min(soft, DESCRIPTORS_MAX)
    lowest = limit // 2 + secrets.randbelow(max(1, limit // 4))
    sock = socket.socket(fileno=fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, lowest))
    os.close(descriptor)
    os.register_at_fork(after_in_child=sock.close)
    return sock


def _tell(sock: socket.socket, raised: Raised) -> None:
    with contextlib.suppress(frames.ProcessGoneError):  # sending the outcome fails as well
        frames.send_message(sock, raised.message())


def _end_unhealthy(sock: socket.socket, raised: RaisedLog, error: Unhealthy) -> NoReturn:
    """Tell the worker why this process ends, and end it.

    At once: with a broken accelerator, to unload the model or to let its libraries clean up fails or hangs.
    """
    raised.observe_end(error)
    with contextlib.suppress(frames.ProcessGoneError):
        frames.send_message(sock, frames.Ending(shortened(str(error), REASON_CHARS_MAX)).message())
    sys.stderr.flush()
    os._exit(EXIT_UNHEALTHY)


def _leave_signals_to_the_worker() -> None:
    """Ctrl-C, a closed terminal, and systemd's SIGTERM reach all processes of a group: the worker drains
    first, then ends this process. Processes that the model starts can still be terminated."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that are executed inherit
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
