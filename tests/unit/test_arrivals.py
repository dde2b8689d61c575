"""Traces of arrivals: their rates, their variation, and recorded traces."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from carpool_cli.tuning.arrivals import (
    Arrival,
    Recorded,
    TraceError,
    Traffic,
    bursty,
    poisson,
    read_trace,
    recorded,
    traffic,
    write_trace,
)


def gaps_us(arrivals: Traffic, per_s: float, number: int = 40_000) -> list[int]:
    times = [arrival.at_us for arrival in arrivals(per_s, number, 1)]
    return [later - earlier for earlier, later in pairwise(times)]


@pytest.mark.parametrize(("arrivals", "variation"), [(poisson, 1.0), (bursty, 1.61)])
def test_gaps_have_the_expected_mean_and_variation(arrivals: Traffic, variation: float) -> None:
    gaps = gaps_us(arrivals, 2000)
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(500, rel=0.2 if arrivals is bursty else 0.03)
    # Bursty: a sixth of the gaps is 3 times the mean, the others 0.6: sqrt(2 (9 / 6 + 0.36 * 5 / 6) - 1).
    assert deviation / mean == pytest.approx(variation, rel=0.1)


def test_busy_phase_has_the_requested_ratio_to_the_quiet_phase() -> None:
    times_us = [arrival.at_us for arrival in bursty(1000, 60_000, 3, ratio=9.0, phase_s=1.0)]
    per_tenth = [0] * (times_us[-1] // 100_000 + 1)
    for at_us in times_us:
        per_tenth[at_us // 100_000] += 1
    ordered = sorted(per_tenth)
    quiet, busy = ordered[len(ordered) // 6], ordered[-len(ordered) // 6]
    assert busy / quiet == pytest.approx(9.0, rel=0.35)


@pytest.mark.parametrize("arrivals", [poisson, bursty])
def test_same_seed_gives_same_trace(arrivals: Traffic) -> None:
    assert list(arrivals(100, 50, 7)) == list(arrivals(100, 50, 7)) != list(arrivals(100, 50, 8))
    assert all(arrival.expiration_us == 9 for arrival in arrivals(100, 5, 7, 9))


def test_written_trace_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    write_trace(path, [5_000_000, 4_000_000, 4_000_125], "a title")
    assert path.read_text() == "# a title\n0.000000\n0.000125\n1.000000\n"
    assert read_trace(path) == [0, 125, 1_000_000]
    path.write_text("\n1700000000.5\n # a comment\n1700000000.25\n")
    assert read_trace(path) == [0, 250_000]


@pytest.mark.parametrize(
    ("text", "message"),
    [("1\nsoon\n", "line 2: 'soon' must be a number"), ("nan\n", "line 1"), ("# \n\n", "no arrivals")],
)
def test_invalid_trace_is_reported(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "trace.txt").write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(tmp_path / "trace.txt")


def test_traffic_is_a_name_or_a_file(tmp_path: Path) -> None:
    assert traffic("poisson") is poisson
    assert traffic("bursty") is bursty
    with pytest.raises(TraceError, match="poisson, bursty, diurnal, or a readable file"):
        traffic(str(tmp_path / "missing"))


def test_recorded_traffic_is_stretched_to_another_rate() -> None:
    traffic_of = Recorded([1000, 2000, 5000, 7000])
    assert traffic_of.per_s == pytest.approx(500)  # 4 in 6 ms, and the gap that would follow
    at_recorded_rate = [arrival.at_us for arrival in traffic_of(500, 6)]
    assert at_recorded_rate == [0, 1000, 4000, 6000, 8000, 9000]
    assert [arrival.at_us for arrival in traffic_of(1000, 6)] == [at // 2 for at in at_recorded_rate]
    assert list(recorded([3, 4], 5)) == [Arrival(3, 5), Arrival(4, 5)]
    assert len(list(Recorded([7])(10, 3))) == 3
