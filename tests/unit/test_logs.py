"""Log lines: what is on them, and what must never be."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from typing import Protocol

import pytest
import structlog

from carpool.logs import configure_logs


class FakeStderr(io.StringIO):
    """Standard error that is, or is not, a terminal."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


class SetUp(Protocol):
    """Configures logs with a minimum level."""

    def __call__(self, level: str, *, is_terminal: bool) -> FakeStderr: ...


@pytest.fixture
def set_up_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[SetUp]:
    """Configure logs as a service does; returns what it writes to standard error."""

    def set_up(level: str, *, is_terminal: bool) -> FakeStderr:
        fake = FakeStderr(is_terminal=is_terminal)
        monkeypatch.setattr(sys, "stderr", fake)
        configure_logs(level, "worker")
        return fake

    yield set_up
    structlog.reset_defaults()


def log_exception() -> None:
    body = "secret of " + "a producer"  # a local variable; the source lines below do not contain its value
    try:
        raise ValueError(f"body of {len(body)} characters")
    except ValueError:
        structlog.get_logger().exception("model failed", model="square")


@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "file"])
def test_traceback_shows_no_local_variables(set_up_logs: SetUp, is_terminal: bool) -> None:
    stderr = set_up_logs("info", is_terminal=is_terminal)
    log_exception()
    assert "body of 20 characters" in stderr.getvalue()
    assert "secret of a producer" not in stderr.getvalue()


def test_line_in_a_file_is_json_with_the_service(set_up_logs: SetUp) -> None:
    stderr = set_up_logs("info", is_terminal=False)
    log_exception()
    (line,) = stderr.getvalue().splitlines()
    event = json.loads(line)
    assert (event["service"], event["level"], event["event"]) == ("worker", "error", "model failed")
    assert "ValueError: body of 20 characters" in event["exception"]


def test_events_below_the_minimum_level_are_not_logged(set_up_logs: SetUp) -> None:
    stderr = set_up_logs("warning", is_terminal=False)
    structlog.get_logger().info("batches")
    structlog.get_logger().warning("lease lost")
    assert [json.loads(line)["event"] for line in stderr.getvalue().splitlines()] == ["lease lost"]


def test_a_terminal_obeys_nothing_in_a_line(set_up_logs: SetUp) -> None:
    """But for the colours of the log itself."""
    stderr = set_up_logs("info", is_terminal=True)
    evil = "\x1b]52;c;cm0=\x07\x1b[2J\x9b\u202e\r\n"
    try:
        raise ValueError(evil)
    except ValueError:
        structlog.get_logger().exception(evil, tenant=evil, names=[evil], of={evil: evil})
    written = re.sub(r"\x1b\[[0-9;]*m", "", stderr.getvalue())
    assert written.count("x1b]52") == 6
    assert not [letter for letter in written if letter != "\n" and not letter.isprintable()]
    first, *_ = written.splitlines()
    assert "of={" in first  # the ends of lines in it do not begin another
