"""Wait for another process or thread, without sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Event
from typing import Final

_POLL_S: Final = 0.002


def wait_until(predicate: Callable[[], object], *, description: str, timeout_s: float = 30.0) -> None:
    """Return as soon as `predicate` holds. `description` completes "timed out waiting until ..."."""
    deadline = time.monotonic() + timeout_s
    pause = Event()
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"timed out after {timeout_s:g} s waiting until {description}")
        pause.wait(_POLL_S)
