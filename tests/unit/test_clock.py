"""The clock of Redis: behind by as little as its replies allow, and never ahead."""

from __future__ import annotations

import time
from typing import Final

import pytest
from hypothesis import example, given
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

    def see_id(self, ago_us: float) -> None:
        """Learn of an ID that Redis made so long ago."""
        self.clock.reached(int((self.redis_us - ago_us) // 1000) * 1000)

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


def test_nothing_that_was_seen_is_in_the_future(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.ask(30, 17_000)
    host.wait(50_000)
    seen_us = int(host.redis_us - 400)
    host.clock.reached(seen_us)
    assert host.clock.now_us() == pytest.approx(seen_us, abs=ROUNDING_US)
    host.wait(1_000)
    assert host.behind_us == pytest.approx(400, abs=ROUNDING_US)
    host.clock.reached(seen_us)  # again, and later: that says nothing
    assert host.behind_us == pytest.approx(400, abs=ROUNDING_US)
    host.ask(30, 9_000)
    assert host.behind_us == pytest.approx(400 + 0.060 * 100, abs=2 + ROUNDING_US)


@pytest.mark.parametrize("ahead_us", [500, 60_000_000])
def test_id_in_the_future_is_ignored(monkeypatch: pytest.MonkeyPatch, ahead_us: int) -> None:
    host = Host(monkeypatch)
    host.ask(30, 50)
    host.clock.reached(int(host.redis_us) + ahead_us)
    assert host.behind_us == pytest.approx(50, abs=ROUNDING_US)


def test_clock_that_knows_no_time_learns_none_from_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.see_id(0)
    host.ask(30, 50)
    assert host.behind_us == pytest.approx(50, abs=ROUNDING_US)


def test_redis_whose_clock_was_set_forward_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.ask(30, 50)
    host.set_back_us = -5_000_000
    host.ask(9_000, 70)
    assert host.behind_us == pytest.approx(70, abs=ROUNDING_US)
    host.ask(9_000, 4_000)
    assert host.behind_us == pytest.approx(70 + 0.013 * 100, abs=ROUNDING_US)


ways = st.floats(0, 20_000)


@example(drift=-8.75e-05, asked=[(0.0, 997.0, 490535.0, 0.0), (0.0, 1003.0, 0.0, None)])
@given(
    drift=st.floats(-DRIFT_MAX, DRIFT_MAX),
    asked=st.lists(
        st.tuples(ways, ways, st.floats(0, 1_000_000), st.none() | st.floats(0, 30_000)),
        min_size=1,
        max_size=30,
    ),
)
def test_clock_is_never_ahead_and_behind_by_the_best_news_at_most(
    drift: float, asked: list[tuple[float, float, float, float | None]]
) -> None:
    """Given replies to TIME that take this long there and back, and after a pause perhaps an ID of this age,
    expect the clock to be behind by what the best of them allows."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        host = Host(monkeypatch, drift)
        best_us = float("inf")
        for there_us, back_us, pause_us, ago_us in asked:
            host.ask(there_us, back_us)
            passed_us = there_us + back_us
            # Redis's own time goes on by `back_us` and its drift while the reply is on the way.
            best_us = min(back_us * (1 + DRIFT_MAX), best_us + 2 * DRIFT_MAX * passed_us)
            assert -ROUNDING_US <= host.behind_us <= best_us + ROUNDING_US
            host.wait(pause_us)
            best_us += 2 * DRIFT_MAX * pause_us
            ahead_us = DRIFT_MAX * pause_us  # that Redis's clock runs slower is noticed when it is asked
            now_us = best_us
            if ago_us is not None:
                host.see_id(ago_us)
                now_us = min(best_us, ago_us + 1000)  # an ID has whole milliseconds
                best_us = min(best_us, now_us + 2 * DRIFT_MAX * pause_us)  # drift counts since the last reply
            assert -ROUNDING_US - ahead_us <= host.behind_us <= now_us + ROUNDING_US
