"""What a model raises: its traceback for the log, and its name for operators.

A name is the exception's class and the line that raised it, such as `KeyError at model.py:14`. It tells
nothing of a request, as the exception's text may, so it is shown to operators who may not see bodies. For the
same reason the traceback is without texts, except at the level debug.

The worker logs it, because only the worker knows the batch. Which requests are concerned is known once the
frame is executed: if the model raises on several, they are executed again, until those are found.
"""

from __future__ import annotations

import copy
import logging
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Protocol, Self, TypeVar

import structlog

from carpool import shown
from carpool.errors import CarpoolError, Unhealthy
from carpool_worker.model_process.failures import BrokenDeviceError
from carpool_worker.model_process.frames import Raised

TRACE_INTERVAL_S: Final = 10.0  # between two tracebacks of one name
NAMES_MAX: Final = 100  # of which it is known when they were told
NAME_CHARS_MAX: Final = 200
TRACES_MAX: Final = 8  # for one outcome or Step
_PACKAGE: Final = str(Path(__file__).parents[1]) + os.sep


class _WithErrors(Protocol):
    """An outcome or a Step."""

    @property
    def errors(self) -> Mapping[str, Sequence[int]]: ...
    def _replace(self, *, errors: Mapping[str, Sequence[int]]) -> Self: ...


Message = TypeVar("Message", bound=_WithErrors)


class RaisedLog:
    """Follows what one model raises: tells the worker, and remembers the names for the next outcome."""

    def __init__(self, tell: Callable[[Raised], None], now_s: Callable[[], float] = time.monotonic) -> None:
        """`tell` sends it to the worker at once."""
        self._tell = tell
        self._now_s = now_s
        self._told_at_s: dict[str, float] = {}  # by name
        self._left_out: dict[str, int] = {}  # how many of a name were not told since
        self._told = 0  # since the last outcome or Step
        self._concerned: dict[str, list[int]] = {}  # since then: as in `OutcomeHeader.errors`
        self._alone: set[str] = set()  # names of these that were raised on a single request
        self._is_debug = structlog.get_logger().is_enabled_for(logging.DEBUG)

    def apart(self) -> RaisedLog:
        """One for a frame that is executed at the same time as others: what was told counts for all of
        them."""
        other = copy.copy(self)
        other._told, other._concerned, other._alone = 0, {}, set()
        return other

    @property
    def has_news(self) -> bool:
        """Whether the model raised something since the last outcome or Step."""
        return bool(self._concerned)

    def observe(self, error: BaseException, concerned: Sequence[int], *, of_body: bool = False) -> None:
        """The model raised this on these requests. What it raises on purpose, with a status, is no error.
        `of_body`: see Raised."""
        if isinstance(error, CarpoolError):
            return
        trace = whole_trace_of if self._is_debug else trace_of
        self.observe_named(name_of(error)[:NAME_CHARS_MAX], partial(trace, error), concerned, of_body=of_body)

    def observe_named(
        self, name: str, trace: Callable[[], str], concerned: Sequence[int], *, of_body: bool = False
    ) -> None:
        """The same of an error of which only this is known. `trace` makes its traceback."""
        self._remember(name, concerned)
        now_s = self._now_s()
        is_recent = now_s - self._told_at_s.get(name, -TRACE_INTERVAL_S) < TRACE_INTERVAL_S
        if is_recent or self._told >= TRACES_MAX:
            self._left_out[name] = self._left_out.get(name, 0) + 1
            return
        if len(self._told_at_s) >= NAMES_MAX:
            self._told_at_s.clear()
            self._left_out.clear()
        self._told_at_s[name] = now_s
        self._told += 1
        self._tell(Raised(name, shown.shortened(trace()), self._left_out.pop(name, 0), of_body))

    def observe_end(self, error: Unhealthy) -> None:
        """The process ends because of this."""
        cause = error.__cause__ if isinstance(error, BrokenDeviceError) else None
        self.observe(cause or error, ())

    def _remember(self, name: str, concerned: Sequence[int]) -> None:
        before = self._concerned.pop(name, None)  # it becomes the last one
        if len(concerned) != 1:
            self._concerned[name] = list(concerned) if before is None else before
        elif before is None or name not in self._alone:
            self._alone.add(name)
            self._concerned[name] = list(concerned)
        else:
            before += concerned
            self._concerned[name] = before

    def named(self, message: Message) -> Message:
        """An outcome or a Step, with what was raised since the last one."""
        if not self._concerned:
            return message
        return message._replace(errors={**message.errors, **self.take()})

    def take(self) -> dict[str, list[int]]:
        """What was raised since the last outcome or Step, for the next one."""
        concerned, self._concerned, self._told = self._concerned, {}, 0
        self._alone.clear()
        return concerned


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
