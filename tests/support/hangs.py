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
    """Watches each phase of each test. The time allowed is the setting `timeout` and `GRACE_S`."""

    def __init__(self, config: pytest.Config, grace_s: float = GRACE_S) -> None:
        self._limit_s = float(config.getini("timeout")) + grace_s
        self._stderr = os.dup(2)  # before pytest redirects it to see what tests write

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> Generator[None, None, None]:
        yield from self._watched()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None, None, None]:
        yield from self._watched()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        yield from self._watched()

    def pytest_unconfigure(self) -> None:
        os.close(self._stderr)

    def _watched(self) -> Generator[None, None, None]:
        faulthandler.dump_traceback_later(self._limit_s, exit=True, file=self._stderr)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
