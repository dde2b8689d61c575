"""What the batcher learns of the time when it reads."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest

from carpool.clock import RedisClock
from carpool.store.reader import Arrived, RawEntry
from carpool_batcher.backlog import Backlog

REPLY_US: Final = 60_000_000  # what TIME took


@pytest.mark.parametrize("stream", ["requests", "settled"])
def test_what_was_read_is_not_in_the_future(stream: str) -> None:
    """Given a clock that is behind, because Redis's reply took long, expect it to have reached the latest
    entry that was read."""
    clock, nothing = RedisClock(), cast(Any, None)
    received_ns = time.monotonic_ns()
    clock.set([b"1700000000", b"0"], received_ns - REPLY_US * 1000, received_ns)
    backlog = Backlog(nothing, cast(Any, SimpleNamespace()), nothing, nothing, clock)
    first_ms, last_ms = (clock.now_us() // 1000 + later_ms for later_ms in (20_000, 40_000))
    entries: list[RawEntry] = [(b"%d-0" % first_ms, []), (b"%d-7" % last_ms, [])]

    is_settled = stream == "settled"
    backlog.add(Arrived([], entries, []) if is_settled else Arrived(entries, [], []))

    assert last_ms * 1000 - 1 <= clock.now_us() < last_ms * 1000 + REPLY_US // 10
