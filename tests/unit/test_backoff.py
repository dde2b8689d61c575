"""Pauses after errors."""

from __future__ import annotations

from itertools import pairwise

import pytest

from carpool.backoff import Backoff


def test_pauses_double_up_to_a_limit_and_begin_anew_after_a_success() -> None:
    backoff = Backoff()
    longest_s = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    for _ in range(2):
        pauses_s = [backoff.next_s() for _ in longest_s]
        assert all(one / 2 <= pause_s <= one for pause_s, one in zip(pauses_s, longest_s, strict=True))
        backoff.reset()


def test_those_that_fail_together_do_not_come_back_together() -> None:
    pauses_s = sorted(Backoff().next_s() for _ in range(200))
    assert pauses_s[0] == pytest.approx(0.025, abs=0.002)
    assert pauses_s[-1] == pytest.approx(0.05, abs=0.002)
    assert max(later - earlier for earlier, later in pairwise(pauses_s)) < 0.005
