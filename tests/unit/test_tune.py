"""The search for settings, on models whose l(n) is known; and the measurement of a model."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from carpool.client.aio import AsyncClient, Reply
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.learned.curve import Curve
from carpool_cli.tuning import calibrate as calibration
from carpool_cli.tuning import search
from carpool_cli.tuning.arrivals import Arrival, bursty
from carpool_cli.tuning.calibrate import (
    LONE_REQUESTS,
    Measured,
    bursts,
    calibrate,
    deviation,
    doubts,
    measured,
)
from carpool_cli.tuning.curve import Line
from carpool_cli.tuning.live import LiveModel
from carpool_cli.tuning.observed import ObservedSizes, observed_sizes
from carpool_cli.tuning.plot import draw
from carpool_cli.tuning.processes import ProcessesNeeded, describe, processes_needed
from carpool_cli.tuning.search import (
    RATE_PRECISION,
    RATE_TOLERANCE,
    Candidate,
    Figures,
    Goal,
    LargerBatches,
    candidates,
    changed_settings,
    larger_batches,
    rank_by_latency,
    rank_by_rate,
    recommend,
)
from carpool_cli.tuning.simulator import Requirement, Simulation, SimulationResult, World, normal
from carpool_cli.tuning.tune import curve_rows, notes

PRESENT = ModelSettings(max_batch_size=32)
FLAT = World(intercept_us=5000, slope_us=50)
STEEP = World(intercept_us=2000, slope_us=1000)


@pytest.fixture(autouse=True)
def short_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter than in production, and long enough to tell good settings from bad ones."""
    monkeypatch.setattr(search, "TRACE_REQUESTS_MIN", 400)
    monkeypatch.setattr(search, "TRACE_REQUESTS_MAX", 400)


@pytest.mark.parametrize(("world", "latency_ms"), [(FLAT, 20.0), (STEEP, 20.0)])
def test_search_finds_the_rate_that_exhaustive_search_finds(
    monkeypatch: pytest.MonkeyPatch, world: World, latency_ms: float
) -> None:
    # In shorter traces, the share within the latency does not fall from each rate to the next.
    monkeypatch.setattr(search, "TRACE_REQUESTS_MIN", 800)
    monkeypatch.setattr(search, "TRACE_REQUESTS_MAX", 800)
    goal = Goal(world, latency_ms)
    tried = list(candidates(PRESENT, 32, latency_ms))[::5]
    found = rank_by_rate(goal, tried, 32)[0]
    ceiling = goal.ceiling_per_s(32)
    falling = (ceiling * step / 12 for step in range(12, 0, -1))
    highest = next(rate for rate in falling if any(goal.is_met(candidate, rate) for candidate in tried))
    assert found.rate >= highest * (1 - RATE_TOLERANCE - RATE_PRECISION)
    assert goal.is_met(found.candidate, found.rate)


def test_best_at_a_rate_is_the_best_of_all_candidates() -> None:
    goal = Goal(FLAT, 20.0)
    tried = list(candidates(PRESENT, 32, 20.0))
    found = rank_by_latency(goal, tried, 2000.0)
    every = [goal.simulate(candidate, 2000.0) for candidate in tried]
    assert round(found[0].within, 3) == max(round(figures.within, 3) for figures in every)
    equals = [figures.p99_ms for figures in every if round(figures.within, 3) == round(found[0].within, 3)]
    assert found[0].p99_ms == min(equals)
    assert {figures.candidate.kind for figures in found} == {candidate.kind for candidate in tried}


@pytest.mark.parametrize(
    (
        "goal",
        "in_order",
        "rates",
    ),  # at which nearly all requests are within the latency, and at which few are
    [
        (Goal(FLAT, 20.0), False, (4000.0, 9000.0)),
        (Goal(STEEP._replace(spread=normal(0.5)), 20.0, traffic=bursty), True, (1500.0,)),
    ],
)
def test_simulations_that_end_early_change_no_result(
    monkeypatch: pytest.MonkeyPatch, goal: Goal, in_order: bool, rates: Sequence[float]
) -> None:
    monkeypatch.setattr(search, "TRACE_REQUESTS_MIN", 200)
    present = replace(PRESENT, preserve_ordering=in_order, max_queue_size=100)
    tried = list(candidates(present, 32, goal.latency_ms))[::4]
    complete: list[bool] = []

    def found() -> list[object]:
        return [
            rank_by_rate(goal, tried[:3], 32),
            *(rank_by_latency(goal, tried, rate) for rate in rates),
            processes_needed(goal, tried[:3], rates[-1]),
        ]

    def run(simulation: Simulation, arrivals: list[Arrival]) -> SimulationResult:
        result = run_to_end_or_miss(simulation, arrivals)
        complete.append(result.is_complete)
        return result

    run_to_end_or_miss = Simulation.run
    monkeypatch.setattr(Simulation, "run", run)
    early = found()
    assert complete.count(False) > len(complete) / 5
    complete.clear()
    monkeypatch.setattr(Requirement, "is_missed", lambda *_: False)
    assert early == found()
    assert all(complete)


def test_delay_that_exceeds_the_latency_is_removed() -> None:
    present = replace(PRESENT, max_queue_delay_ms=40)
    found = rank_by_latency(Goal(FLAT, 20.0), list(candidates(present, 32, 20.0)), 200.0)
    best = recommend(found, present, at_one_rate=True)
    assert best.within > 0.99
    assert "max_queue_delay_ms" in changed_settings(best.candidate.settings, present)
    present_figures = next(figures for figures in found if figures.candidate.kind == "present")
    assert present_figures.within < best.within


def test_latency_that_cannot_be_kept_has_rate_zero() -> None:
    (found,) = rank_by_rate(Goal(FLAT, 5.0), [Candidate("eager", PRESENT)], 32)
    assert (found.rate, found.p99_ms) == (0.0, math.inf)


def test_quantile_counts_all_requests() -> None:
    expiring = replace(PRESENT, default_expiration_ms=6)
    found = Goal(FLAT, 6.0).simulate(Candidate("", expiring), 2000.0)
    assert found.within < 0.5
    assert found.p50_ms == found.p99_ms == math.inf


def test_fewest_changes_are_recommended_among_equals() -> None:
    def figures(rate: float, **changed: object) -> Figures:
        return Figures(Candidate("", ModelSettings(**changed)), rate, 1.0, 1.0, 1.0, 1.0)  # type: ignore[arg-type]

    present = ModelSettings()
    two_changes = figures(1000, policy="deferred", target_latency_ms=5)
    one_change = figures(990, max_queue_delay_ms=2)
    assert recommend([two_changes, one_change, figures(900)], present, at_one_rate=False) is one_change
    assert recommend([two_changes, figures(900)], present, at_one_rate=False) is two_changes


CHANGED = Figures(Candidate("delay", ModelSettings(max_queue_delay_ms=20)), 3000, 1.0, 5.0, 10.0, 8.0)
PRESENT_FIGURES = CHANGED._replace(candidate=Candidate("present", ModelSettings()))


@pytest.mark.parametrize(
    ("best", "present", "is_changed"),
    [
        ({}, {"p99_ms": 10.3}, False),  # within the error of p99
        ({}, {"p99_ms": 10.6}, True),
        ({}, {"within": 0.992}, False),
        ({}, {"within": 0.985, "p99_ms": 10.1}, True),  # close, but the latency is not kept
        ({"within": 0.615, "p99_ms": 80.0}, {"within": 0.605, "p99_ms": 95.0}, False),
        ({"within": 0.615, "p99_ms": math.inf}, {"within": 0.6, "p99_ms": math.inf}, True),
    ],
)
def test_settings_are_changed_only_for_more_than_noise(
    best: dict[str, float], present: dict[str, float], is_changed: bool
) -> None:
    first, last = CHANGED._replace(**best), PRESENT_FIGURES._replace(**present)  # type: ignore[arg-type]
    found = recommend([first, last], last.candidate.settings, at_one_rate=True)
    assert found is (first if is_changed else last)


@pytest.mark.parametrize(
    ("world", "mean_batch", "observed_size_max", "latency_ms", "gain"),
    [
        (FLAT, 30.0, 32, 20.0, 2 * 6600 / 8200 - 1),
        (FLAT, 15.0, 32, 20.0, None),  # batches are not full
        (FLAT, 30.0, 20, 20.0, None),  # batches near the largest size were not measured
        (FLAT, 30.0, 32, 8.5, None),  # l(64) is 8.2 ms, without the round trip
        (World(intercept_us=100, slope_us=1000), 32.0, 32, 100.0, None),  # no gain
    ],
)
def test_larger_batches_are_suggested_where_they_promise_a_gain(
    world: World, mean_batch: float, observed_size_max: int, latency_ms: float, gain: float | None
) -> None:
    found = larger_batches(
        Goal(world, latency_ms), PRESENT_FIGURES._replace(mean_batch=mean_batch), 32, observed_size_max
    )
    assert found == (None if gain is None else LargerBatches(64, gain))


def test_changed_settings_are_valid_for_config() -> None:
    present = ModelSettings(preferred_batch_sizes=(4, 8), default_expiration_ms=9, max_batch_size=16)
    changed = changed_settings(ModelSettings(max_batch_size=8, policy="deferred"), present)
    assert changed == {
        "max_batch_size": "8", "preferred_batch_sizes": "none", "default_expiration_ms": "none",
        "policy": "deferred",
    }  # fmt: skip
    assert ModelSettings.from_mapping({**present.as_text(), **changed}) == ModelSettings(
        max_batch_size=8, policy="deferred"
    )


def test_candidates_respect_the_largest_batch_size() -> None:
    for max_size in (1, 2, 32):
        tried = list(candidates(ModelSettings(max_batch_size=max_size), max_size, 10.0))
        assert {candidate.settings.max_batch_size for candidate in tried} <= set(range(1, max_size + 1))
        assert max(candidate.settings.max_batch_size for candidate in tried) == max_size


def test_bursts_have_every_power_of_two_and_one_more_and_start_with_one() -> None:
    assert sorted(bursts(20, 2)) == sorted(2 * [1, 2, 3, 4, 5, 8, 9, 16, 17, 20] + LONE_REQUESTS * [1])
    assert sorted(bursts(1, 3)) == (3 + LONE_REQUESTS) * [1]
    assert bursts(64, 5) != sorted(bursts(64, 5))
    assert {bursts(64, rounds)[0] for rounds in range(1, 20)} == {1}


class FakeClient:
    """A client of a model with known times, on a clock of its own.

    l(n) = 2000 + 100 n us, and the round trip takes 900 + 30 n us. Encoding takes 1000 us for each request,
    before the burst is sent. `limit` is the largest batch size.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 64) -> None:
        self._now_us = 0
        self._limit = limit
        self._sent: list[asyncio.Future[int]] = []
        monkeypatch.setattr("carpool_cli.tuning.calibrate.perf_counter_ns", lambda: 1000 * self._now_us)
        monkeypatch.setattr("carpool_cli.tuning.calibrate.monotonic", lambda: self._now_us / 1e6)

    async def infer(self, model: str, body: object) -> object:
        return (await self.request(model, body)).value

    async def request(self, model: str, body: object) -> Reply:
        self._now_us += 1000
        if not self._sent:
            asyncio.get_running_loop().call_soon(self._serve)
        future = asyncio.get_running_loop().create_future()
        self._sent.append(future)
        size = await future
        return Reply(body, "", size, 700, self.execution_us(size))

    @staticmethod
    def execution_us(size: int) -> int:
        return 2000 + 100 * size

    def _serve(self) -> None:
        while self._sent:
            batch, self._sent = self._sent[: self._limit], self._sent[self._limit :]
            self._now_us += 900 + 30 * len(batch) + self.execution_us(len(batch))
            for future in batch:
                future.set_result(len(batch))


def calibrated(client: FakeClient, sizes: list[int], *, delays: bool = False) -> Measured:
    steps: list[None] = []
    found = asyncio.run(
        calibrate(
            cast("AsyncClient", client), "m", 7, sizes, delays=delays, on_progress=lambda: steps.append(None)
        )
    )
    assert len(steps) <= len(sizes)
    return found


def test_calibration_measures_execution_and_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch), bursts(64, 2))
    assert found.round_trip[:2] == pytest.approx((1900, 30))
    for factors in (found.spread, found.round_trip_spread):
        assert factors == pytest.approx([1.0] * len(factors), abs=0.001)
    world = found.world(3)
    assert world.processes == 3
    assert world.execution_us(10) == pytest.approx(3000)
    assert world.round_trip_us(10) == pytest.approx(2200)


def test_split_burst_does_not_count_as_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch, limit=4), [1, 8, 2, 16, 4])
    assert found.round_trip[:2] == pytest.approx((1900, 30))


def test_queue_delay_is_not_part_of_the_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    found = calibrated(FakeClient(monkeypatch), [1, 2, 4], delays=True)
    assert found.round_trip[:2] == pytest.approx((1200, 30))


def test_slow_lone_requests_add_to_the_spread_and_not_to_the_round_trip() -> None:
    round_trips = [(1, 1000)] * 30 + [(1, 4000)] * 20 + [(8, 1140)] * 5
    found = measured([(1, 5000), (8, 5000)], round_trips)
    assert found.round_trip[:2] == pytest.approx((980, 20))
    assert set(found.round_trip_spread) == {1.0, 4.0}


def test_steps_are_simulated_as_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeClient, "execution_us", staticmethod(lambda size: 1000 * size.bit_length()))
    found = calibrated(FakeClient(monkeypatch), bursts(64, 3))
    world = found.world(1)
    assert [world.execution_us(size) for size in (1, 8, 64)] == [1000, 4000, 7000]
    assert set(found.spread) == {1.0}
    assert doubts(found) == []


def test_calibration_ends_after_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "CALIBRATION_S_MAX", 0.01)
    found = calibrated(FakeClient(monkeypatch), [1, 1, 64, 64, 64])
    assert found.observed == [(1, 2100)] * 2  # after 8 ms and after 12
    assert found.world(1).round_trip_us(64) == 1930  # bursts of one size show no slope


def test_unknown_round_trip_gets_the_default() -> None:
    found = measured([(1, 1000), (2, 1100)] * 10)
    assert found.world(1).round_trip_us(1) == calibration.ROUND_TRIP_DEFAULT.at(1)


def test_deviation_of_a_normal_spread_is_its_standard_deviation() -> None:
    assert deviation(normal(0.2)) == pytest.approx(0.2, rel=0.1)
    assert deviation((1.0,)) == 0.0


QUIET = Measured(
    [], Curve([1.0], [5050.0]), (1.0,) * 20, Line(1000.0, 20.0),
    (0.8,) * 5 + (1.0,) * 13 + (3.0,) * 2,
)  # fmt: skip
SLOW_TENTH = (1.0,) * 18 + (2.5,) * 2


@pytest.mark.parametrize(
    ("measurement", "parts"),
    [
        (QUIET._replace(round_trip_spread=(1.0,) * 20), []),
        (
            QUIET._replace(round_trip=Line(3500.0, 0.0)),
            ["round trip of a lone request takes 3.5 ms, its execution 5.05 ms", "round trip in ten"],
        ),
        (
            QUIET._replace(
                curve=Curve([1.0], [100_000.0]), round_trip=Line(3500.0, 0.0), round_trip_spread=(1.0,)
            ),
            [],
        ),
        (
            QUIET._replace(curve=Curve([1.0], [200.0]), round_trip_spread=(1.0,)),
            [],
        ),  # of a fast model the round trip is longer than the execution
        (QUIET, ["One round trip in ten took at least 3 times the median"]),
        (QUIET._replace(round_trip=Line(400.0, 0.0)), []),  # three times as long, but short
        (
            QUIET._replace(round_trip_spread=(1.0,), spread=SLOW_TENTH),
            ["One execution in ten took at least 2.5 times"],
        ),
    ],
)
def test_measurement_on_a_busy_machine_is_doubted(measurement: Measured, parts: list[str]) -> None:
    found = doubts(measurement)
    assert len(found) == len(parts)
    assert all(part in reason for part, reason in zip(parts, found, strict=True))


LIVE = LiveModel(ModelSettings(max_batch_size=64), ModelSettings(max_batch_size=64), ModelKind.PLAIN, 1, [])


@pytest.mark.parametrize(
    ("observed", "parts"),
    [
        ([(size, 5000 + 50 * size) for size in bursts(64, 3)], []),
        (
            [(size, 5000 + 50 * size) for size in bursts(16, 3)],
            [f"? a guess: only {len(bursts(16, 3))} batches of 1 to 16 were observed"],
        ),
        ([(8, 5000)] * 20, ["? a guess: only 20 batches of 8 were observed"]),
        ([(size, 1000 * size.bit_length()) for size in bursts(64, 3)], []),
    ],
)
def test_limitations_of_the_measurement_are_noted(observed: list[tuple[int, int]], parts: list[str]) -> None:
    found = list(notes(LIVE, measured(observed), 64))
    assert len(found) == len(parts)
    assert all(part in note for part, note in zip(parts, found, strict=True))


def test_table_of_the_curve_marks_guesses() -> None:
    measurement = measured([(8, 5000), (16, 6000)] * 4)
    world = World(curve=Curve([1.0, 8.0, 16.0], [4000.0, 5000.0, 6000.0]))
    sizes, times_ms = (row.split() for row in curve_rows(measurement, world, 32))
    assert sizes[-4:] == ["1?", "8", "16", "32?"]
    assert times_ms[-4:] == ["4?", "5", "6", "8?"]
    observed_alone = measured([(1, 4000), (16, 6000)] * 4)
    assert [row.split()[-2:] for row in curve_rows(observed_alone, world, 16)] == [["1", "16"], ["4", "6"]]


def test_table_of_the_curve_has_few_columns() -> None:
    many_sizes = measured([(size, 5000 + 50 * size) for size in range(1, 1001)])
    sizes, times_ms = (row.split() for row in curve_rows(many_sizes, many_sizes.world(1), 1000))
    assert len(times_ms) < 20
    assert int(sizes[-1]) > 900


# --- guesses -----------------------------------------------------------------------------------------------


def test_only_sizes_between_observed_ones_are_no_guess() -> None:
    observed = observed_sizes([(3, 100), (1, 90), (2, 95)])
    assert (observed, str(observed)) == (ObservedSizes(1, 3, 3), "3 batches of 1 to 3")
    assert [size for size in range(1, 9) if observed.covers(size)] == [1, 2, 3]
    assert observed.guessed_share([1, 2, 4, 32]) == 0.5
    assert observed.guessed_share([]) == 0.0
    one_size = observed_sizes([(8, 100)])
    assert str(one_size) == "1 batch of 8"
    assert [size for size in range(1, 12) if one_size.covers(size)] == [8]


def test_figures_say_how_many_batches_rest_on_a_guess() -> None:
    goal = Goal(STEEP, 50.0)
    known, guessed = (
        goal._replace(observed=observed).simulate(Candidate("", PRESENT), 800.0)
        for observed in (ObservedSizes(1, 32, 100), ObservedSizes(1, 3, 100))
    )
    assert known.mean_batch == guessed.mean_batch > 3
    assert (known.guessed, known.is_guess) == (0.0, False)
    assert 0.3 < guessed.guessed < 1 and guessed.is_guess
    assert goal.simulate(Candidate("", PRESENT), 800.0).guessed == 0.0, "a world that is given is no guess"


# --- model processes ---------------------------------------------------------------------------------------

EAGER = Candidate("eager", PRESENT)


@pytest.mark.parametrize(("rate", "latency_ms"), [(500.0, 20.0), (6000.0, 20.0), (12_000.0, 15.0)])
def test_needed_processes_are_the_fewest_that_keep_the_latency(rate: float, latency_ms: float) -> None:
    goal = Goal(FLAT, latency_ms)
    needed = processes_needed(goal, [EAGER], rate)
    assert needed is not None
    capacity_per_s = 32 / 6600e-6  # of one process
    meets = [
        goal.with_processes(number).simulate(EAGER, rate).within >= 0.99 and rate <= number * capacity_per_s
        for number in range(1, 12)
    ]
    assert needed.number == 1 + meets.index(True)
    assert needed.figures == goal.with_processes(needed.number).simulate(EAGER, rate)


def test_overloaded_processes_do_not_count_as_enough_because_the_trace_is_short() -> None:
    goal = Goal(FLAT, 60_000.0)  # in a trace of 400 requests no queue grows that long
    assert goal.simulate(EAGER, 10_000.0).within == 1.0
    needed = processes_needed(goal, [EAGER], 10_000.0)
    assert needed is not None and (needed.number, needed.one_less) == (3, None)


def test_candidate_that_needs_fewer_processes_is_preferred_to_the_first() -> None:
    slow = Candidate("slow", replace(PRESENT, max_batch_size=1))
    needed = processes_needed(Goal(FLAT, 20.0), [slow, EAGER], 1500.0)
    assert needed is not None and (needed.number, needed.figures.candidate) == (1, EAGER)
    same = processes_needed(Goal(FLAT, 20.0), [EAGER, slow], 1500.0)
    assert same is not None and same.figures.candidate is EAGER


def test_number_beyond_which_more_change_nothing_is_not_enough() -> None:
    goal = Goal(FLAT._replace(spread=(1.0,) * 4 + (3.0,)), 10.0)  # one batch in five takes too long
    found = processes_needed(goal, [EAGER], 1000.0)
    assert found is not None and not found.is_enough
    assert 0.7 < found.figures.within < 0.9
    assert found.number == math.ceil(2 * 1000 * 0.00565) + 1, (
        "twice those that lone requests need, and one more"
    )


def test_number_that_is_too_large_to_be_simulated_is_not_found() -> None:
    assert processes_needed(Goal(FLAT, 20.0), [EAGER], 1e8) is None


FEW = PRESENT_FIGURES._replace(within=0.912)
ENOUGH = PRESENT_FIGURES._replace(within=0.996)


@pytest.mark.parametrize(
    ("needed", "running", "lines"),
    [
        (None, 1, ["3,000 requests/s need more than 1,000 model processes."]),
        (
            ProcessesNeeded(7, FEW),
            1,
            [
                "No number of model processes answers 99% of 3,000 requests/s within 20 ms: with 7, it is "
                "91.2%, and more change nothing."
            ],
        ),
        (
            ProcessesNeeded(1, ENOUGH, None),
            2,
            ["One model process is enough for 3,000 requests/s: it answers 99.6% within 20 ms. 2 run now."],
        ),
        (
            ProcessesNeeded(4, ENOUGH, FEW),
            1,
            [
                "3,000 requests/s need 4 model processes, which answer 99.6% within 20 ms; with one less, it "
                "is 91.2%. 1 runs now.",
                "Each is assumed to have a core or a device of its own, and as many threads as now.",
                "To have more, start workers, or start them with more --replicas.",
            ],
        ),
        (
            ProcessesNeeded(4, ENOUGH._replace(guessed=0.5), None),
            4,
            [
                "3,000 requests/s need 4 model processes, which answer 99.6% within 20 ms; fewer cannot "
                "execute that many. 4 run now.",
                "Each is assumed to have a core or a device of its own, and as many threads as now.",
                "This is a guess, because l(n) is one for 50% of the simulated batches.",
            ],
        ),
    ],
)
def test_needed_processes_are_described(
    needed: ProcessesNeeded | None, running: int, lines: list[str]
) -> None:
    assert describe(needed, 3000.0, 20.0, running) == lines


# --- the plot ----------------------------------------------------------------------------------------------

MEASURED = measured([(size, 5000 + 50 * size) for size in bursts(32, 3)])


def drawn(*settings: ModelSettings, observed: ObservedSizes | None = None, max_size: int = 32) -> Any:
    """The panels of the plot of these settings, by title."""
    pytest.importorskip("matplotlib").use("agg")
    goal = Goal(MEASURED.world(1), 20.0, observed=observed)
    curves = {
        str(number): [goal.simulate(Candidate("", each), rate) for rate in (200.0, 4000.0, 8000.0)]
        for number, each in enumerate(settings)
    }
    figure = draw("m", 20.0, curves, MEASURED, max_size)
    from matplotlib import pyplot as plt

    plt.close(figure)
    return {axes.get_title().removeprefix("m: "): axes for axes in figure.axes}


def lines_of(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.get_lines()}


GOODPUT_TITLE = "simulated goodput by request rate"


def test_goodput_is_plotted_where_requests_expire() -> None:
    assert GOODPUT_TITLE not in drawn(PRESENT)
    expiring = replace(PRESENT, default_expiration_ms=20)
    panels = drawn(PRESENT, expiring)
    assert len(panels) == 3
    lines = lines_of(panels[GOODPUT_TITLE])
    rates, goodput = lines["1"].get_data()
    assert goodput[0] == pytest.approx(rates[0])  # all are in time
    assert 0.1 * rates[2] < goodput[2] < 0.8 * rates[2]
    assert list(lines["all requests"].get_ydata()) == [0, 8000]
    assert panels[GOODPUT_TITLE].get_ylabel() == "answered within 20 ms, requests/s"


def test_guesses_are_marked_on_the_plot() -> None:
    hollow = "a guess: sizes not observed"
    grey = f"a guess: only {len(MEASURED.observed)} batches of 1 to 32 were observed"
    for observed, max_size, marks in ((None, 32, []), (ObservedSizes(1, 8, 9), 64, [4000.0, 8000.0])):
        panels = drawn(PRESENT, observed=observed, max_size=max_size)
        by_rate, by_size = panels.values()
        found = lines_of(by_rate).get(hollow)
        assert (list(found.get_xdata()) if found else []) == marks
        labels = by_size.get_legend_handles_labels()[1]
        assert (grey in labels) == (max_size == 64)


def test_plot_without_any_p99_says_why() -> None:
    expiring = replace(PRESENT, default_expiration_ms=6)
    panel = next(iter(drawn(expiring).values()))
    (note,) = panel.texts
    assert note.get_text() == "none: over 1% of the requests are refused or expire"
    assert not list(drawn(PRESENT)["simulated p99 latency by request rate"].texts)
