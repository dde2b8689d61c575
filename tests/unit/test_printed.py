"""What a model prints, logs and is warned of is in the log of its worker before the process can crash."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

START = """
import logging, os, sys, warnings
from carpool.logs import configure_logs
from carpool_worker.model_process.printed import show_output
configure_logs("info", "model", model="cats")
show_output()
"""


def output_of(code: str, **variables: str) -> tuple[int, list[str]]:
    """The exit status of a model process that runs this, and the lines of its log."""
    done = subprocess.run(
        [sys.executable, "-c", START + code],
        env=os.environ | {"PYTHONUNBUFFERED": ""} | variables,  # it would hide a buffer
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    return done.returncode, done.stderr.decode().splitlines()


def logged(line: str) -> dict[str, Any]:
    entry: dict[str, Any] = json.loads(line)
    del entry["timestamp"]
    return entry


def test_lines_are_in_their_order_and_before_a_crash() -> None:
    code = "print('one'); print('two', file=sys.stderr); print('three'); os.write(1, b'four\\n'); os._exit(9)"
    assert output_of(code) == (9, ["one", "two", "three", "four"])


def test_what_c_prints_is_in_order_and_before_a_crash() -> None:
    code = "import ctypes\nprint('one')\nctypes.CDLL(None).printf(b'two\\n')\nprint('three')\nos._exit(9)"
    assert output_of(code) == (9, ["one", "two", "three"])


def test_a_text_that_the_encoding_lacks_is_escaped_and_no_error_of_the_model() -> None:
    printed = ["\\ud800", "\\u2265"]
    assert output_of("print('\\ud800')\nprint('\\u2265')", PYTHONIOENCODING="ascii") == (0, printed)


def test_a_crash_in_c_leaves_its_stack() -> None:
    status, lines = output_of("import ctypes\nprint('before')\nctypes.string_at(0)")
    assert (status, lines[0]) == (-signal.SIGSEGV, "before")
    assert "Segmentation fault" in lines[1] and any("string_at" in line for line in lines)


def test_records_of_logging_and_warnings_are_lines_of_the_log() -> None:
    status, lines = output_of(
        "log = logging.getLogger('my.model')\n"
        "log.debug('not shown')\n"
        "log.info('loaded %d', 7)\n"
        "warnings.warn('slow path')\n"
        "try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('odd')\n"
    )
    assert status == 0
    info, warning, error = map(logged, lines)
    common = {"service": "model", "model": "cats"}
    assert info == {**common, "level": "info", "event": "loaded 7", "logger": "my.model"}
    assert warning.pop("place").startswith("<string>:")
    assert warning == {**common, "level": "warning", "event": "slow path", "category": "UserWarning"}
    assert error.pop("exception").endswith("ZeroDivisionError: division by zero")
    assert error == {**common, "level": "error", "event": "odd", "logger": "my.model"}


def test_a_record_that_cannot_be_written_does_not_disturb_the_model() -> None:
    status, lines = output_of("logging.getLogger('x').warning('%d', 'text')\nprint('goes on')")
    assert status == 0
    assert lines[-1] == "goes on" and any("Logging error" in line for line in lines)


def test_a_model_may_configure_logging_itself() -> None:
    configured = "logging.basicConfig(level=logging.DEBUG, format='%(message)s')"
    assert output_of(f"{configured}\nlogging.getLogger('x').debug('mine')") == (0, ["mine"])
