"""The clock of Redis: behind by as little as its replies allow, and never ahead."""

from __future__ import annotations

import time
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.clock import DRIFT_MAX, RedisClock

EPOCH_US: Final = 1_700_000_000_000_000
# TIME and the clock are cut to whole microseconds, and a float of this size has quarters.
ROUNDING_US: Final = 3


class Host:
    """This host's monotonic time, and that of Redis, which runs faster by `drift`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> None:
        self.clock = RedisClock()
        self.set_back_us = 0.0
        self._drift = drift
        self._now_us = 1e9
        monkeypatch.setattr(time, "monotonic_ns", lambda: int(self._now_us * 1000))

    @property
    def redis_us(self) -> float:
        return EPOCH_US + self._now_us * (1 + self._drift) - self.set_back_us

    def wait(self, us: float) -> None:
        self._now_us += us

    def ask(self, there_us: float, back_us: float) -> None:
        """TIME, with these times on the way."""
        sent_ns = time.monotonic_ns()
        self.wait(there_us)
        at_us = int(self.redis_us)
        self.wait(back_us)
        reply = [b"%d" % (at_us // 1_000_000), b"%d" % (at_us % 1_000_000)]
        self.clock.set(reply, sent_ns, time.monotonic_ns())

    @property
    def behind_us(self) -> float:
        return self.redis_us - self.clock.now_us()


def test_reply_that_took_long_does_not_set_the_clock_back(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.ask(30, 50)
    assert host.behind_us == pytest.approx(50, abs=ROUNDING_US)
    host.wait(100_000)
    host.ask(30, 9_000)
    assert host.behind_us == pytest.approx(50 + 0.109 * 100, abs=ROUNDING_US)
    host.ask(10, 20)
    assert host.behind_us == pytest.approx(20, abs=ROUNDING_US)


def test_redis_whose_clock_was_set_back_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.ask(30, 50)
    host.set_back_us = 5_000_000
    host.ask(30, 70)
    assert host.behind_us == pytest.approx(70, abs=ROUNDING_US)


ways = st.floats(0, 20_000)


@given(
    drift=st.floats(-DRIFT_MAX, DRIFT_MAX),
    asked=st.lists(st.tuples(ways, ways, st.floats(0, 1_000_000)), min_size=1, max_size=30),
)
def test_clock_is_never_ahead_and_behind_by_the_best_reply_at_most(
    drift: float, asked: list[tuple[float, float, float]]
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        host = Host(monkeypatch, drift)
        best_us = float("inf")
        for there_us, back_us, pause_us in asked:
            host.ask(there_us, back_us)
            passed_us = there_us + back_us
            # Redis's own time goes on by `back_us` and its drift while the reply is on the way.
            best_us = min(back_us * (1 + DRIFT_MAX), best_us + 2 * DRIFT_MAX * passed_us)
            assert -ROUNDING_US <= host.behind_us <= best_us + ROUNDING_US
            host.wait(pause_us)
            best_us += 2 * DRIFT_MAX * pause_us
