"""The mean gap between recent arrivals."""

from __future__ import annotations

import pytest

from carpool_batcher.core.policies.deferred import ArrivalRate


def test_gap_is_the_mean_time_between_arrivals_however_often_it_is_told() -> None:
    for step in (1, 4):
        rate = ArrivalRate()
        for at in range(0, 200_000, 50 * step):
            rate.observe(at // 50, at, 10_000)
        assert rate.gap_us == pytest.approx(50, rel=0.03)


def test_gap_follows_a_change_within_its_memory() -> None:
    rate = ArrivalRate()
    rate.observe(0, 0, 10_000)
    rate.observe(1000, 10_000, 10_000)
    for tenth in range(1, 61):  # ten times as rare
        rate.observe(1000 + 10 * tenth, 10_000 + 1000 * tenth, 10_000)
    assert 80 < rate.gap_us < 100


def test_gap_is_unknown_before_the_first_arrival_and_grows_while_nothing_arrives() -> None:
    rate = ArrivalRate()
    rate.observe(1_000_000, 1000, 10_000)  # when they arrived is unknown
    rate.observe(1_000_000, 1300, 10_000)
    assert rate.gap_us == 0
    rate.observe(1_000_003, 1600, 10_000)
    assert rate.gap_us == pytest.approx(200, rel=0.05)
    rate.observe(1_000_003, 90_000, 10_000)
    assert rate.gap_us > 10_000


def test_pause_of_any_length_is_forgotten_within_the_memory() -> None:
    rate = ArrivalRate()
    rate.observe(0, 0, 10_000)
    for at in range(20_000_000, 20_050_000, 50):
        rate.observe((at - 20_000_000) // 50, at, 10_000)
    assert rate.gap_us == pytest.approx(50, rel=0.02)


def test_clock_that_is_set_back_does_not_matter() -> None:
    rate = ArrivalRate()
    rate.observe(1, 1000, 10_000)
    rate.observe(11, 2000, 10_000)
    rate.observe(11, 500, 10_000)
    assert rate.gap_us == pytest.approx(100, rel=0.05)
