"""The model process: load a model, and serve it: in `stepping.loop` if it steps, in `decoding.loop` if it
decodes or encodes beside its batches, in `async_loop` if it is async, else in `frame_loop`.

A worker starts it as `python -m carpool_worker.model_process.main`. It talks only to its worker. The model
has this process to itself: it may hold the GIL, sleep in C, leak or crash while the worker goes on fetching,
renewing and committing.

Why: docs/decisions/0025.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NoReturn

from carpool.errors import CarpoolError, Unhealthy
from carpool.lifecycle import die_with_parent, keep_freed_memory
from carpool.logs import configure_logs
from carpool.plugins import UnusableError
from carpool.shown import shortened
from carpool_worker.model_process import frames
from carpool_worker.model_process.apart import leave_signals_to_the_worker, set_apart
from carpool_worker.model_process.async_loop import AsyncFrameLoop
from carpool_worker.model_process.calls import Calls
from carpool_worker.model_process.configuration import Configuration
from carpool_worker.model_process.decoding.callers import Caller, ProcessCaller, ThreadCaller
from carpool_worker.model_process.decoding.loop import DecodingLoop
from carpool_worker.model_process.decoding.pool import Pool
from carpool_worker.model_process.decoding.process import DecoderLoadError
from carpool_worker.model_process.frame_loop import FrameLoop
from carpool_worker.model_process.frames import LoadFailed, Measured, MessageSender, Raised
from carpool_worker.model_process.loaded import Beside, LoadedModel, description_of
from carpool_worker.model_process.model import LoadError, SteppingModel, load_configured
from carpool_worker.model_process.printed import show_output
from carpool_worker.model_process.raised import RaisedLog
from carpool_worker.model_process.spans import record_spans_of_model
from carpool_worker.model_process.stepping.loop import StepLoop

EXIT_UNHEALTHY: Final = 70
REASON_CHARS_MAX: Final = 1000  # of why it is unhealthy, which producers get as well


def main(argv: Sequence[str]) -> int:
    """Serve a model to the worker that started this process.

    `argv`: the worker's PID, the descriptor of this process's socket, the model, the device, and the name of
    the replica.
    """
    parent, descriptor, location, device, replica = argv
    die_with_parent(int(parent))
    keep_freed_memory()
    leave_signals_to_the_worker()
    sock = set_apart(int(descriptor))
    sender = MessageSender(sock)
    name = os.environ.get("CARPOOL_SERVED_MODEL", location)
    configure_logs(os.environ.get("CARPOOL_LOG_LEVEL", "info"), "model", model=name, replica=replica)
    show_output()
    pool = None
    try:
        _, payload = frames.MessageReader(sock).receive()  # the next message is for a model that is loaded
        model = load_configured(location, device, Configuration.decode(payload))
        calls = _calls_of(model, name)
        if isinstance(model, LoadedModel) and model.beside is not None:
            new_process = partial(ProcessCaller, location, replica, bytes(payload), partial(_tell, sender))
            pool = _started_pool(model.beside, new_process)
    except DecoderLoadError as error:
        reason = f"the model cannot be loaded in a decoder process: {error}"
        frames.send_load_result(sock, LoadFailed(reason, error.trace))
        return 1
    except UnusableError as error:
        frames.send_load_result(sock, LoadFailed(str(error), trace=""))
        return 1
    except LoadError as error:
        frames.send_load_result(sock, LoadFailed(str(error), shortened(error.trace)))
        return 1
    except frames.ProcessGoneError:  # the worker ended
        return 1
    record_spans_of_model()
    frames.send_load_result(sock, description_of(model))
    raised = RaisedLog(partial(_tell, sender))
    try:
        if isinstance(model, SteppingModel):
            StepLoop(sock, model, raised).run()
        elif pool is not None:
            DecodingLoop(sock, sender, model, raised, pool).run()
        elif model.is_async:
            AsyncFrameLoop(sock, model, raised, calls).run()
        else:
            FrameLoop(sock, model, raised, calls).run()
    except Unhealthy as error:
        _end_unhealthy(sender, raised, error)
    if model.unload is not None:
        model.unload()
    return 0


def _started_pool(beside: Beside, new_process: Callable[[], Caller]) -> Pool:
    """What decodes and encodes for a model. Raises DecoderLoadError."""
    pool = Pool(beside.workers, new_process if beside.in_processes else partial(ThreadCaller, beside))
    pool.start()
    return pool


def _calls_of(model: LoadedModel | SteppingModel, name: str) -> Calls | None:
    """What a model needs that calls others. Raises UnusableError where it has no address of Redis for
    that."""
    if isinstance(model, SteppingModel) or not model.wants_clients:
        return None
    try:
        return Calls(name, is_async=model.is_async)
    except CarpoolError as error:
        raise UnusableError(f"the model's 'predict' has a parameter `clients`: {error.detail}") from None


def _tell(sender: MessageSender, told: Raised | Measured) -> None:
    with contextlib.suppress(frames.ProcessGoneError):  # sending the outcome fails as well
        sender.send(told.message())


def _end_unhealthy(sender: MessageSender, raised: RaisedLog, error: Unhealthy) -> NoReturn:
    """Tell the worker why this process ends, and end it.

    At once: with a broken accelerator, to unload the model or to let its libraries clean up fails or hangs.
    """
    raised.observe_end(error)
    with contextlib.suppress(frames.ProcessGoneError):
        sender.send(frames.Ending(shortened(str(error), REASON_CHARS_MAX)).message())
    sys.stderr.flush()
    os._exit(EXIT_UNHEALTHY)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
