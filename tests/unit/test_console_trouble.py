"""What is wrong with a model, in words, and which is worst; counts of the last minute; curves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from carpool.figures import Figures
from carpool.store.directory import ModelSample
from carpool.wire.orders import Paused
from carpool.wire.report import BatcherReport, Gauges
from carpool_console.charts import latency_curve, spark
from carpool_console.formats import duration, number, percent, plural, rate, size
from carpool_console.history import GAP_S, POINT_S, Minute, ModelHistory, thinned
from carpool_console.trouble import Facts, Row, Severity, row_of, sorted_rows, summary_of

SERVING = Figures("square", True, 2, 0, None, 0, over_s=5.0, requests_per_s=10.0, p50_ms=5.0, p99_ms=9.0)
PAUSED = Paused(False, "disk is full", "ann@host", 1_000)


def row(minute: Minute | None = None, *, facts: Facts | None = None, **changed: object) -> Row:
    figures = SERVING._replace(**changed)  # type: ignore[arg-type]
    return row_of((facts or Facts(figures))._replace(figures=figures, minute=minute or Minute(60.0)))


@pytest.mark.parametrize(
    ("found", "state", "severity", "sentence"),
    [
        (row(), "serving", Severity.FINE, ""),
        (row(batcher=False), "no batcher", Severity.BROKEN, "no batcher is active"),
        (row(model_processes=0), "no worker", Severity.NOTICE, "no worker runs; none waits"),
        (row(model_processes=0, waiting=3), "no worker", Severity.BROKEN, "3 requests wait for one"),
        (row(model_processes=0, loading=True, waiting=3), "loading", Severity.NOTICE, "a worker is loading"),
        (row(facts=Facts(SERVING, draining=2)), "draining", Severity.NOTICE, "all its processes drain"),
        (row(facts=Facts(SERVING, draining=2), waiting=1), "draining", Severity.BROKEN, "all its processes"),
        (row(facts=Facts(SERVING, draining=1)), "serving", Severity.FINE, ""),
        (row(paused=PAUSED, waiting=9, oldest_s=300.0), "paused", Severity.NOTICE, "ann@host: disk is full"),
        (row(paused=PAUSED._replace(refuses=True)), "paused", Severity.NOTICE, "refuses requests"),
        (row(paused=PAUSED, batcher=False), "paused", Severity.BROKEN, "no batcher is active"),
        (row(facts=Facts(SERVING, error="NOPERM x")), "unreadable", Severity.BROKEN, "NOPERM x"),
        (row(rejected_settings="no such policy"), "serving", Severity.HURTS, "no such policy"),
        (row(Minute(60.0, failed={"INTERNAL": 3}, dispatched=9)), "serving", Severity.HURTS, "3 requests"),
        (
            row(Minute(60.0, failed={"INTERNAL": 600}, dispatched=600), last_error="KeyError at m.py:3"),
            "failing", Severity.BROKEN, "600 requests failed in the last minute: KeyError at m.py:3",
        ),
        (
            row(Minute(60.0, refused={"RESOURCE_EXHAUSTED/queue_size": 12})),
            "serving", Severity.HURTS, "12 requests refused in the last minute: 12 RESOURCE EXHAUSTED/queue",
        ),
        (row(Minute(60.0, takeovers=1)), "serving", Severity.FINE, ""),
        (row(Minute(60.0, takeovers=9)), "serving", Severity.HURTS, "began anew 9 times in the last minute"),
        (row(process_deaths=7), "serving", Severity.HURTS, "its model processes died 7 times in the last"),
        (row(Minute(60.0, missed={"early": 1})), "serving", Severity.HURTS, "1 deadline missed"),
        (
            row(Minute(60.0, missed={"waiting": 9}, refused={"DEADLINE_EXCEEDED/waiting": 9})),
            "serving", Severity.HURTS, "9 deadlines missed in the last minute: 9 waiting",
        ),
        (row(waiting=9, oldest_s=30.0), "serving", Severity.HURTS, "a request has waited for 30 s"),
        (row(waiting=9, oldest_s=30.0, p50_ms=9000.0), "serving", Severity.FINE, ""),  # usual for this model
        (row(waiting=900_000, oldest_s=2.0), "serving", Severity.FINE, ""),  # many, and soon through
        (row(dead=4), "serving", Severity.NOTICE, "4 dead letters"),
        (
            row(facts=Facts(SERVING, dead_newest_s=60.0), dead=1),
            "serving", Severity.HURTS, "1 dead letter, the newest 60 s ago",
        ),
    ],
)  # fmt: skip
def test_states_and_troubles(found: Row, state: str, severity: Severity, sentence: str) -> None:
    assert (found.state, found.severity) == (state, severity)
    assert sentence in (found.troubles[0].sentence if found.troubles else "")
    assert bool(found.troubles) is bool(sentence)


def test_the_worst_comes_first_and_depth_does_not_count() -> None:
    deep = row(model="deep", waiting=900_000, oldest_s=2.0)
    old = row(model="old", waiting=2, oldest_s=300.0)
    older = row(model="older", waiting=1, oldest_s=400.0)
    broken = row(model="broken", batcher=False)
    fine = row(model="a")
    found = sorted_rows([deep, fine, old, broken, older])
    assert [one.model for one in found] == ["broken", "older", "old", "deep", "a"]


def test_the_summary_changes_only_when_something_happens() -> None:
    assert summary_of([]).startswith("No model")
    assert summary_of([row()]) == "1 model, none in trouble."
    two = [row(), row(waiting=9, oldest_s=30.0)]
    assert summary_of(two) == "1 model in trouble, of 2."
    assert summary_of([row(), row(waiting=10, oldest_s=31.0)]) == summary_of(two)
    assert summary_of([*two, row(batcher=False)]) == "1 model broken, 1 model in trouble, of 3."


# --- history -----------------------------------------------------------------------------------------------

REPORT = BatcherReport("me", 0, 1_000_000, Gauges(0, 0, 0.0, 0, 0, 1), {}, 0, 0, {}, (), (5000, 9000))


def test_a_request_whose_deadline_passed_counts_once() -> None:
    refused = {"DEADLINE_EXCEEDED/waiting": 9, "RESOURCE_EXHAUSTED/queue_size": 2}
    minute = Minute(60.0, missed={"waiting": 9}, refused=refused)
    assert minute.refused_otherwise == {"RESOURCE_EXHAUSTED/queue_size": 2}


def sample(at_s: float, *, requests: int = 0, waiting: int = 0, missed: int = 0, refused: int = 0,
           batcher: str = "me", dead: int = 0) -> ModelSample:  # fmt: skip
    report = replace(
        REPORT,
        batcher=batcher,
        at_us=int(at_s * 1e6),
        gauges=REPORT.gauges._replace(waiting=waiting),
        batches={"full": requests},
        requests=requests,
        missed={"early": missed},
        refused={"RESOURCE_EXHAUSTED/queue_size": refused, "DEADLINE_EXCEEDED/in_flight": 2 * refused},
    )
    return ModelSample(0, None, 0, 1, True, report, dead)


def test_rates_in_and_out_and_the_last_minute() -> None:
    history = ModelHistory("square")
    for at_s in range(1, 121):  # 10 a second arrive, 8 are dispatched, 1 waits longer, 1 is refused
        history.add(
            at_s,
            sample(at_s, requests=8 * at_s, waiting=at_s, missed=2 * at_s, refused=at_s, dead=at_s // 100),
        )
    assert history.in_per_s == pytest.approx(10)
    assert history.figures.requests_per_s == pytest.approx(8)
    minute = history.minute
    assert 54 <= minute.over_s <= 66
    assert minute.missed == {"early": pytest.approx(2 * minute.over_s)}
    assert minute.refused["RESOURCE_EXHAUSTED/queue_size"] == pytest.approx(minute.over_s)
    assert minute.dead == 1
    assert minute.dispatched == pytest.approx(8 * minute.over_s)
    assert len(history.points) == pytest.approx(120 / POINT_S, abs=1)
    assert history.points[-1].in_per_s == pytest.approx(10)


def test_a_model_whose_processes_drain_is_not_without_workers() -> None:
    history = ModelHistory("square")
    now = sample(1, waiting=3)
    for taking, draining, state in ((0, 2, "draining"), (1, 1, "serving")):
        gauges = REPORT.gauges._replace(
            waiting=3, model_processes=taking
        )  # the batcher does not count the rest
        report = replace(REPORT, at_us=1_000_000, gauges=gauges)
        history.add(1, now._replace(model_processes=2, report=report))
        assert row_of(Facts(history.figures, draining=draining)).state == state


def test_nothing_is_said_of_a_minute_that_was_not_seen() -> None:
    history = ModelHistory("square")
    history.add(1, sample(5000, requests=9, missed=100))
    assert history.minute == Minute()
    assert history.in_per_s is None
    history.add(2, sample(5001, requests=9, missed=101))
    assert history.minute.missed == {"early": 1}
    history.add(3, sample(5002, requests=9, missed=7, batcher="another"))  # it may have counted for hours
    assert history.minute.missed == {}
    assert history.minute.takeovers == 1
    assert history.in_per_s is None


def test_a_curve_is_interrupted_where_nobody_looked() -> None:
    history = ModelHistory("square")
    times = [0, 5, 10, 100, 105, 110]
    for at_s in times:
        history.add(at_s, sample(at_s + 1, waiting=at_s))
    assert GAP_S < 90
    values = [float(point.waiting) for point in history.points]
    assert values == [float(at_s) for at_s in times]
    curve = spark(list(history.points), 110, values, "waiting")
    assert len(curve.lines) == 2
    assert curve.lines[1].split()[-1] == f"{curve.width},1.0"  # now, and the largest value
    assert spark([], 110, [], "nothing").lines == []
    assert (
        spark(list(history.points)[:2], 10, [0.0, 0.0], "zeros").lines[0].endswith(f",{curve.height - 1:.1f}")
    )
    assert thinned(list(range(10)), 3) == [1, 5, 9]  # type: ignore[arg-type, comparison-overlap]


def test_the_latency_curve_has_round_ticks_and_a_band() -> None:
    curve = latency_curve([(1, 0.005, 0.006), (32, 0.012, 0.02), (64, 0.018, 0.031)], duration)
    assert curve is not None
    assert [text for _, text in curve.y_ticks] == ["0 ms", "10 ms", "20 ms", "30 ms", "40 ms"]
    assert [text for _, text in curve.x_ticks] == ["0", "16", "32", "48", "64"]
    assert len(curve.line.split()) == 3
    assert len(curve.band.split()) == 6
    assert curve.dots[-1][0] == f"{curve.right:.1f}"
    assert latency_curve([], duration) is None
    assert latency_curve([(1, 0.0, 0.0)], duration) is not None
    assert latency_curve([(1, 0.3, 0.3)], duration) is not None


# --- formats -----------------------------------------------------------------------------------------------


def test_figures_are_short() -> None:
    assert [duration(value) for value in (None, 0, 0.0004, 0.012, 1.25, 75, 600, 9000, 200_000)] == [
        "–", "0 ms", "0.4 ms", "12 ms", "1.2 s", "75 s", "10 min", "2.5 h", "2.3 d",
    ]  # fmt: skip
    assert [size(value) for value in (None, 0, 1000, 1536, 2**30, 300 * 2**20)] == [
        "–", "0 B", "1000 B", "1.5 KiB", "1.0 GiB", "300 MiB",
    ]  # fmt: skip
    assert [rate(value) for value in (None, 0, 0.123, 3, 1234.5)] == ["–", "0", "0.12", "3", "1,234"]
    assert (number(12345), number(None), percent(0.834), percent(None)) == ("12,345", "–", "83%", "–")
    assert (plural(1, "model"), plural(1200, "model"), plural(2, "batch", "batches")) == (
        "1 model", "1,200 models", "2 batches",
    )  # fmt: skip
