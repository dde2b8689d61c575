"""What a model prints and logs, and what Python says of it: in the log of its worker, at once.

A line that was printed before a crash is the best hint at its cause, so nothing is kept in a buffer. What a
model logs with `logging`, and warnings, become lines of the log as all others are, with the model's name.

Why: docs/decisions/0088.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import logging
import os
import sys
import warnings
from typing import Final, TextIO

import structlog

from carpool.shown import shortened

_IOLBF: Final = 1  # line-buffered, in the stdio.h of glibc, musl and the BSDs


def show_output() -> None:
    """Let all of it go to standard error. Call it once, before the model is imported."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a text that its encoding lacks is no error of the model
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    os.dup2(2, 1)  # afterwards: a stream does not expect that its file is another one
    _print_lines_of_c()
    faulthandler.enable()  # the stack of a crash in C
    # Not a handler of the root logger: with one, `logging.basicConfig` in a model would do nothing.
    logging.lastResort = _ToLog(logging.INFO)
    logging.getLogger().setLevel(logging.INFO)
    warnings.showwarning = _log_warning


def _print_lines_of_c() -> None:
    """What C prints with `printf` is written line by line, too. Nothing is done where that is unknown."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _IOLBF, 0)


class _ToLog(logging.Handler):
    """Records of `logging` for which the model has no handler."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record."""
        try:
            more = {"logger": record.name}
            if record.exc_info:
                more["exception"] = shortened(logging.Formatter().formatException(record.exc_info))
            structlog.get_logger().log(record.levelno, record.getMessage(), **more)
        except Exception:  # such as a record whose arguments do not fit its text
            self.handleError(record)


def _log_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    structlog.get_logger().warning(str(message), category=category.__name__, place=f"{filename}:{lineno}")
