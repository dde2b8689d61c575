"""`carpool simulate` without Redis."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from carpool.settings import read_settings
from carpool.wire.report import BatcherReport, Gauges
from carpool_batcher.core.learned.curve import Curve
from carpool_cli.screen import Screen
from carpool_cli.tuning.observed import ObservedSizes
from carpool_cli.tuning.simulate import (
    RecordingProgress,
    SimulateSettings,
    execution,
    guesses,
    main,
    round_trip,
)
from carpool_cli.tuning.simulator import SimulationResult, World

SHORT = ("--requests", "400")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No CARPOOL_ variables in the environment, and no `.env` in the working directory."""
    for name in [name for name in os.environ if name.startswith("CARPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert main([*SHORT, *arguments, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_table_shows_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--rate", "100", "--intercept-ms", "2", "--slope-ms", "0.5"]) == 0
    printed = capsys.readouterr()
    head, *rows = printed.out.splitlines()
    assert head == "policy eager, batches of up to 32, 1 process, execution of n takes 2 + 0.5 n ms"
    values = {name: value for name, _, value in (row.strip().rpartition("  ") for row in rows)}
    figures = {name.strip(): value for name, value in values.items()}
    assert figures["requests"] == "400"
    # The rate of the random trace is near the requested 100, and each request was answered at once.
    assert figures["requests/s offered"] == figures["requests/s served"] == "96"
    assert figures["goodput"] == "100.00%"
    assert figures["dispatched: idle"] == "100.0%"
    assert not any(name.startswith("within") for name in figures)
    assert printed.err == ""


MEASURED = World(curve=Curve([1.0, 2.0], [5000.0, 7000.0]))  # 2 ms more for each further request


@pytest.mark.parametrize(
    ("observed", "max_size", "text"),
    [
        (ObservedSizes(1, 32, 9), 32, "measured l(1) = 5 ms, l(32) = 67 ms"),
        (ObservedSizes(1, 3, 9), 32, "measured l(1) = 5 ms, l(3) = 9 ms, guessed l(32) = 67 ms"),
        (ObservedSizes(8, 8, 9), 32, "measured l(8) = 19 ms, guessed l(1) = 5 ms, l(32) = 67 ms"),
        (ObservedSizes(1, 64, 9), 32, "measured l(1) = 5 ms, l(32) = 67 ms"),
        (ObservedSizes(64, 64, 9), 32, "measured l(64) = 131 ms, guessed l(1) = 5 ms, l(32) = 67 ms"),
    ],
)
def test_time_of_a_size_that_was_not_observed_is_called_a_guess(
    observed: ObservedSizes, max_size: int, text: str
) -> None:
    assert execution(MEASURED, max_size, observed) == text


def settings_of(*arguments: str) -> SimulateSettings:
    return read_settings(SimulateSettings, arguments, "carpool simulate")


def test_result_that_rests_on_guesses_says_so() -> None:
    result = SimulationResult(batch_sizes=[1] * 25 + [32] * 75)
    settings = settings_of("--model", "square", "--trip-ms", "1")
    (warning,) = guesses(settings, result, ObservedSizes(1, 3, 40))
    assert warning.startswith("WARNING: 75% of the simulated batches have sizes that were not observed")
    assert "Only 40 batches of 1 to 3 were observed; `carpool tune square BODY" in warning
    assert list(guesses(settings, result, ObservedSizes(1, 32, 40))) == []


def test_where_the_round_trip_is_from_is_said() -> None:
    plain, given = settings_of("--model", "square"), settings_of("--model", "square", "--trip-ms", "3")
    report = BatcherReport(
        "b",
        0,
        0,
        Gauges(0, 0, 0.0, 0, 0, 1),
        {},
        0,
        0,
        {},
        (),
        None,
        transit_us=(800, 1200),
        delays_us=(600, 90),
    )
    assert round_trip(plain, None).startswith(
        "The round trip of n requests is not known, but assumed to be 1 + 0.02 n ms: see --trip-ms"
    )
    assert round_trip(given, None) == "The round trip of n requests is given as 3 + 0.02 n ms."
    assert round_trip(plain, report) == (
        "The round trip is as its batcher saw it: 0.8 ms for half of the latest batches, up to 1.2 ms for "
        "nine of ten; it read requests 0.6 ms after their arrival."
    )


def test_target_latency_is_reported_apart_from_late_requests(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rate", "4000", "--noise", "0.5", "policy=deferred")
    assert simulated(capsys, *arguments)["within_target"] is None
    found = simulated(capsys, *arguments, "target_latency_ms=20")
    assert 0.1 < found["within_target"] < 1  # type: ignore[operator]
    assert (found["late"], found["goodput"]) == (0, 1)  # the requests have no expiration
    main([*SHORT, *arguments, "target_latency_ms=20"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "within" in line]
    assert row.split() == ["within", "20", "ms", f"{found['within_target']:.2%}"]


@pytest.mark.parametrize("arrivals", ["poisson", "bursty"])
def test_below_capacity_served_rate_is_offered_rate(
    arrivals: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(capsys, "--rate", "250", "--requests", "2000", "--arrivals", arrivals)
    assert found["goodput"] == 1
    assert found["served_per_s"] == pytest.approx(found["offered_per_s"], rel=0.01)


def test_recording_reports_progress_every_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    progress = RecordingProgress(Screen(sys.stderr), "square", 12)
    for tenth in range(120):
        progress.update(tenth / 10, 7 * tenth)
    progress.end()
    assert capsys.readouterr().err.splitlines() == [
        "recording the arrivals of square for 12 s",
        "  5 of 12 s, 350 arrivals",
        "  10 of 12 s, 700 arrivals",
    ]


def test_settings_and_flags_take_effect(capsys: pytest.CaptureFixture[str]) -> None:
    plain = simulated(capsys, "--rate", "4000")
    delayed = simulated(capsys, "--rate", "4000", "max_queue_delay_ms=20", "max-batch-size=64")
    assert delayed["mean_batch"] > plain["mean_batch"]  # type: ignore[operator]
    assert delayed["reasons"] != plain["reasons"]
    fast = simulated(capsys, "--rate", "4000", "--workers", "4", "--slope-ms", "0", "--trip-ms", "0")
    assert fast["p99_ms"] < plain["p99_ms"]  # type: ignore[operator]
    distant = simulated(capsys, "--rate", "4000", "--trip-slope-ms", "0.1")
    assert distant["p50_ms"] > plain["p50_ms"]  # type: ignore[operator]
    noisy = simulated(capsys, "--rate", "4000", "--trip-noise", "0.5")
    assert noisy["p99_ms"] > plain["p99_ms"]  # type: ignore[operator]
    expired = simulated(capsys, "--rate", "4000", "--expiration-ms", "5")
    assert expired["late"] == 400 and expired["goodput"] == 0  # l(1) alone is 5.05 ms
    expired_by_default = simulated(capsys, "--rate", "4000", "default_expiration_ms=5")
    assert expired_by_default["late"] == 400


def test_given_times_are_no_guess(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, "--rate", "4000")
    assert (found["observed"], found["guessed_batches"]) == (None, None)


def test_preserve_ordering_withholds_results(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--rate", "4000", "--workers", "3", "--noise", "0.4")
    unordered, ordered = (
        simulated(capsys, *arguments, f"preserve_ordering={order}") for order in ("false", "true")
    )
    assert ordered["p50_ms"] > unordered["p50_ms"]  # type: ignore[operator]
    assert ordered["mean_batch"] == unordered["mean_batch"]


def test_same_seed_gives_same_result(capsys: pytest.CaptureFixture[str]) -> None:
    first = simulated(capsys, "--noise", "0.2", "--arrivals", "bursty")
    assert first == simulated(capsys, "--noise", "0.2", "--arrivals", "bursty", "--seed", "0")
    assert first != simulated(capsys, "--noise", "0.2", "--arrivals", "bursty", "--seed", "1")


def test_recorded_trace_is_replayed_once_at_recorded_rate(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "trace.txt").write_text("\n".join(str(at / 50) for at in range(101)))
    assert main(["--arrivals", "trace.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["offered_per_s"]) == (101, 50)
    assert found["p99_ms"] == pytest.approx(5.05 + 1.02)  # each in a batch of one


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arrivals", "nowhere"], "poisson, bursty, diurnal, or a readable file"),
        (["max_batch_size=0"], "must be a whole number of at least 1"),
        (["preferred_batch_sizes=8,64"], "64 can never be filled, because max_batch_size is 32"),
        (["policy=mine:Mine"], "cannot be simulated"),
        (["polcy=eager"], "did you mean policy?"),
        (["policy"], "policy=VALUE"),
        (["--record", "trace.txt"], "--record needs --model"),
    ],
)
def test_invalid_arguments_are_reported(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
