"""Goodput on the real system: which runs are done, in which order, and what the tables say of them."""

from __future__ import annotations

from pathlib import Path

import host
import pytest
from deadlines import real_document
from deadlines.load import CAUSES, Sent, cause_named_by
from deadlines.plans import FLOODED_POINTS, LEARNING_S, NO_FLOOD, Choice, Plan
from deadlines.points import LINE, SMALL_SQUARE, STEPS, Point
from deadlines.runs import Run, evaluate, read_runs, typical
from host import CpuShares, CpuTime

from carpool.errors import DeadlineExceededError
from carpool.wire.report import BatcherReport, Gauges

POINT = Point(LINE.name, 1, 50, "Poisson", 0.9)
DEFERRED, EAGER = Plan(POINT, "deferred"), Plan(POINT, "eager")
ONE_POINT = Choice(["line"], [1], [50], ["Poisson"], [0.9], floods=[])


def run_of(plan: Plan, good: int = 90, stolen: float = 0.0, busy: float = 0.5, late_ms: float = 1.0) -> Run:
    missed = dict.fromkeys(CAUSES, 0) | {"given up": 100 - good}
    return Run(plan, 10.0, 100, 100, 95, good, missed, (1000, 2500), (600, 100), 88, late_ms, stolen, busy)


def test_policies_take_turns_in_alternating_order() -> None:
    plans = ONE_POINT._replace(rounds=3).plans([])
    assert plans == [DEFERRED, EAGER, EAGER, DEFERRED, DEFERRED, EAGER]


def test_what_is_done_is_not_repeated() -> None:
    choice = ONE_POINT._replace(rounds=2)
    assert choice.plans([DEFERRED, EAGER]) == [DEFERRED, EAGER]
    assert choice.plans([DEFERRED, DEFERRED, EAGER]) == [DEFERRED, EAGER]
    assert choice.plans([DEFERRED, EAGER] * 2) == []


def test_by_default_all_points_and_floods_are_measured() -> None:
    plans = Choice().plans([])
    points = {plan.point for plan in plans if not plan.flood}
    assert len(points) == 3 * 3 * 2 * 2 * 4
    assert len(plans) == 2 * len(points) + 4 * len(FLOODED_POINTS)
    floods = [plan.flood for plan in plans if plan.point == FLOODED_POINTS[0] and plan.flood]
    assert floods == [NO_FLOOD, "refused", "bursts", "raising"]


def test_runs_of_efficient_models_are_shorter() -> None:
    assert len(DEFERRED.due_us(12.0)) == pytest.approx((LEARNING_S + 12.0) * 863, rel=0.01)
    fast = Plan(Point(SMALL_SQUARE.name, 4, 50, "Poisson", 1.5), "eager")
    learning_us = int(LEARNING_S * 1e6)
    assert sum(at_us >= learning_us for at_us in fast.due_us(12.0)) == pytest.approx(20_000, rel=0.1)


def test_a_file_keeps_runs(tmp_path: Path) -> None:
    runs = [run_of(DEFERRED), run_of(Plan(POINT, "deferred", "refused"), stolen=0.2)]
    file = tmp_path / "runs"
    assert read_runs(file) == []
    file.write_text("".join(run.to_json() + "\n" for run in runs))
    assert read_runs(file) == runs


def told(*transit_us: int, learned: tuple[tuple[int, int], ...] = ()) -> BatcherReport:
    nothing = Gauges(0, 0, 0.0, 0, 0, 1)
    return BatcherReport(
        "b", 0, 0, nothing, {}, 0, 0, {}, learned, None, transit_us=(transit_us[0], transit_us[1])
    )


def test_only_requests_after_the_learning_count() -> None:
    learning = [Sent(number * 1000, "waiting") for number in range(int(LEARNING_S * 1000))]
    counted = [Sent(int(LEARNING_S * 1e6) + number * 2000, None, 300) for number in range(500)]
    late = [Sent(sent.at_us + 1_000_000, "delivered", 300) for sent in counted]
    run = evaluate(DEFERRED, [*learning, *counted, *late], [told(1000, 3000)], CpuShares(0.01, 0.5))
    assert (run.sent, run.good, run.missed["delivered"], run.missed["waiting"]) == (1000, 500, 500, 0)
    assert run.bound == 1000  # 500 requests/s of a model for 870
    assert 950 <= run.virtual <= 1000
    assert 900 <= run.predicted <= 1000
    slow = evaluate(DEFERRED, [*learning, *counted, *late], [told(30_000, 60_000)], CpuShares(0.01, 0.5))
    assert slow.predicted < 600
    heavy = evaluate(
        DEFERRED,
        [*learning, *counted, *late],
        [told(1000, 3000, learned=((1, 20_000), (64, 640_000)))],
        CpuShares(0.01, 0.5),
    )
    assert heavy.predicted < 300
    assert run.late_ms == 0.3
    assert run.seconds == pytest.approx(2.0, abs=0.01)


def test_the_prediction_is_of_the_median_of_reports() -> None:
    slow = told(30_000, 60_000, learned=((1, 20_000), (64, 640_000)))
    quick = [told(1000, 3000, learned=((2, 4000), (64, 66_000))), told(1200, 2000, learned=((1, 3000),))]
    one = typical([slow, *quick])
    assert one.transit_us == (1200, 3000)
    assert one.delays_us == (0, 0)
    assert dict(one.learned)[1] == 4000  # as the smallest size that was observed
    assert dict(one.learned)[2] == 4000
    assert typical([told(1000, 3000)]).learned == ()


def test_runs_on_a_machine_without_cpu_time_are_marked_and_count_only_if_there_are_no_others() -> None:
    stolen, valid = run_of(DEFERRED, good=10, stolen=0.06), run_of(DEFERRED, good=80)
    assert real_document.cells([stolen, valid])[DEFERRED].real == 0.8
    cell = real_document.cells([stolen])[DEFERRED]
    assert (cell.real, cell.is_valid) == (0.1, False)
    assert not run_of(DEFERRED, busy=0.95).is_valid
    assert not run_of(DEFERRED, late_ms=6.0).is_valid
    lines = list(real_document.body([stolen, run_of(EAGER, good=40)]))
    assert "were sent within 10 s" in lines[0]
    assert "Of 2 cells 1 say something" in lines[1]
    (row,) = [line for line in lines if "U3" in line]
    assert "**10.0%** †" in row
    assert "**40.0%** |" in row
    assert lines[-3].startswith("† The host withheld more than 5%")


def test_the_worst_figures_of_deferred_are_named() -> None:
    short = Plan(POINT._replace(deadline_ms=15), "deferred")
    bursty = Plan(POINT._replace(arrivals="bursty"), "deferred")
    runs = [run_of(DEFERRED), run_of(short, 60), run_of(EAGER, 92), run_of(bursty, 94)]
    lines = "\n".join(real_document.body(runs))
    of_poisson, of_bursty = f"({LINE.name} ms, Poisson, 0.9)", f"({LINE.name} ms, bursty, 0.9)"
    assert f"| 15 ms | 1 | 60.0% {of_poisson} | 35.0 | 35.0 {of_poisson} | 28.0 {of_poisson} |" in lines
    assert f"| 50 ms | 1 | 90.0% {of_poisson} | 3.0 | 5.0 {of_poisson} | 6.0 {of_bursty} |" in lines
    assert f"Against `eager`: -2.0 points at worst ({POINT.description})." in lines
    assert f"| {LINE.name} | 1 | 15 ms | Poisson | 0.9 | deferred | 40.0% |" in lines


def test_rows_are_in_the_order_of_models_workers_and_loads() -> None:
    points = [
        POINT._replace(model=STEPS.name),
        POINT._replace(workers=4),
        POINT._replace(arrivals="bursty"),
        POINT._replace(load=1.2),
        POINT,
    ]
    runs = [run_of(Plan(point, policy)) for point in points for policy in ("eager", "deferred")]
    rows = list(real_document.cells(runs))
    assert [plan.point for plan in rows[::2]] == [POINT, POINT._replace(load=1.2), *points[2::-1]]
    assert [plan.policy for plan in rows[:2]] == ["deferred", "eager"]


def test_floods_are_compared_with_runs_without_one() -> None:
    alone = Plan(FLOODED_POINTS[0], "deferred", NO_FLOOD)
    raising = alone._replace(flood="raising")
    lines = "\n".join(real_document.body([run_of(alone, 95), run_of(raising, 92), run_of(raising, 93)]))
    assert "| 0.6 | none | **95.0%** |  | 5.0% |" in lines
    assert "| 0.6 | `predict` raises, 100/s, one at a time | **92.5%** | -2.5 | 7.5% |" in lines


def test_a_cause_that_is_not_known_is_an_error() -> None:
    late = DeadlineExceededError("expired: its deadline passed before a worker had decoded it")
    assert cause_named_by(late) == "in flight"
    with pytest.raises(RuntimeError, match="unknown cause: for no reason"):
        cause_named_by(DeadlineExceededError("for no reason"))


def test_shares_of_cpu_time(monkeypatch: pytest.MonkeyPatch) -> None:
    #       user nice system idle iowait irq softirq steal
    times = [[100, 0, 0, 100, 0, 0, 0, 50], [130, 5, 5, 140, 10, 5, 5, 60]]
    monkeypatch.setattr(host, "_ticks", lambda: times.pop(0))
    assert CpuTime().shares() == pytest.approx((10 / 110, 50 / 110))
