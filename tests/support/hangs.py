"""A pytest plugin that ends a process whose test hangs where nothing else can end it.

pytest-timeout ends most hanging tests: its signal interrupts the main thread, and the report has the stacks
of all threads. That does not help where the main thread does not return to the interpreter (in C code), or
where the test hangs again while it is torn down. Then, `GRACE_S` later, this plugin writes the stacks of all
threads to standard error and ends the process, from a thread that needs no interpreter. pytest-xdist reports
that test as failed, and another process runs the others.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Generator
from typing import Final

import pytest

GRACE_S: Final = 30.0  # for the report of pytest-timeout, with the logs of services, and for tearing down


class HangWatch:
    """Watches each test, from its set-up until it is torn down. The time allowed is the setting `timeout` and
    `GRACE_S`."""

    def __init__(self, config: pytest.Config, grace_s: float = GRACE_S) -> None:
        self._limit_s = float(config.getini("timeout")) + grace_s
        self._stderr = os.dup(2)  # before pytest redirects it to see what tests write

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        # Once a test, not in each of its phases: to start a thread and end it takes 60 us, and is a tenth of
        # the time of short tests where processors are busy.
        self._watch()
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_exception_interact(self, report: object) -> Generator[None, None, None]:
        yield  # pytest itself ends the watch here, because somebody could debug a failure
        if isinstance(report, pytest.TestReport):
            self._watch()

    def pytest_unconfigure(self) -> None:
        os.close(self._stderr)

    def _watch(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stderr)
