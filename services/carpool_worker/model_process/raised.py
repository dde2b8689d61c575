"""What a model raises: its traceback in the log, and its name for whoever watches the model.

A name is the exception's class and the line that raised it, such as `KeyError at model.py:14`. It tells
nothing of a request, as the exception's text may, so it is shown to operators who may not see bodies. For the
same reason the log has the traceback without texts, except at the level debug.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog

from carpool import shown
from carpool.errors import CarpoolError, Unhealthy
from carpool_worker.model_process.failures import Observe
from carpool_worker.model_process.frames import OutcomeHeader
from carpool_worker.model_process.model import LoadedModel
from carpool_worker.model_process.step_frames import Step

TRACE_INTERVAL_S: Final = 10.0  # between two tracebacks of one name
NAMES_MAX: Final = 100  # of which it is known when they were logged
_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep
Message = TypeVar("Message", OutcomeHeader, Step)
Model = TypeVar("Model", bound=LoadedModel)


class RaisedLog:
    """Follows what one model raises: logs it, and remembers the name of the last one."""

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._logged_at_s: dict[str, float] = {}  # by name
        self._left_out: dict[str, int] = {}  # how many of a name were not logged since
        self._last = ""
        self._log = structlog.get_logger()

    def observe(self, error: BaseException) -> None:
        """The model raised this. What it raises on purpose, with a status, is not logged."""
        if isinstance(error, CarpoolError | Unhealthy):
            return
        name, now_s = name_of(error), self._now_s()
        self._last = name
        if now_s - self._logged_at_s.get(name, -TRACE_INTERVAL_S) < TRACE_INTERVAL_S:
            self._left_out[name] = self._left_out.get(name, 0) + 1
            return
        if len(self._logged_at_s) >= NAMES_MAX:
            self._logged_at_s.clear()
            self._left_out.clear()
        self._logged_at_s[name] = now_s
        left_out = self._left_out.pop(name, 0)
        more = {"left_out": left_out} if left_out else {}
        trace = whole_trace_of(error) if self._log.is_enabled_for(logging.DEBUG) else trace_of(error)
        self._log.error("model raised", error=name, **more, exception=trace)

    def named(self, message: Message) -> Message:
        """An outcome or a Step, with the name of what was raised since the last one."""
        if not self._last:
            return message
        last, self._last = self._last, ""
        return message._replace(error=last)


def followed(model: Model, observe: Observe, *, of_validate: Observe | None = None) -> Model:
    """The model, with `observe` called for whatever it raises while it executes a batch. What `validate`
    raises is usually about a body: that is for `of_validate`, if it is given."""
    validate = model.validate
    if validate is not None and of_validate is not None:
        validate = _followed(validate, of_validate)
    return dataclasses.replace(model, run=_followed(model.run, observe), validate=validate)


def _followed(hook: Callable[..., Any], observe: Observe) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        try:
            return hook(*arguments)
        except BaseException as error:
            observe(error)
            raise

    return call


def _is_of_model(place: traceback.FrameSummary) -> bool:
    return not place.filename.startswith(_PACKAGE)


# The class, and where the model raised it; the traceback without texts. Neither has lines of this package.
name_of: Final = partial(shown.name_of, keep=_is_of_model)
trace_of: Final = partial(shown.trace_of, keep=_is_of_model)


def whole_trace_of(error: BaseException) -> str:
    """The traceback with the text, which may quote a body: for the author of a model, who asked for it."""
    described = traceback.TracebackException.from_exception(error)
    described.stack = traceback.StackSummary.from_list([at for at in described.stack if _is_of_model(at)])
    return "".join(described.format())
