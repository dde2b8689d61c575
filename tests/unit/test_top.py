"""`carpool top` from made-up samples: the figures between two of them, and the page at any size."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import carpool.figures
from carpool.errors import UnavailableError
from carpool.figures import (
    Figures,
    RecentFigures,
    Requests,
    Sample,
    SequenceFigures,
    Stepping,
    compare,
    figures,
)
from carpool.store.directory import ModelSample, ProcessMemory
from carpool.wire.report import BatcherReport, Gauges, SequencesReport, SteppingReport
from carpool_cli.screen import plain_lines
from carpool_cli.top import command
from carpool_cli.top.command import as_json, follow
from carpool_cli.top.page import Page

SECOND_US = 1_000_000
BEGAN_US = 100 * SECOND_US
IDLE = Gauges(0, 0, 0.0, 0, 0, 2)
BUSY = Gauges(1204, 99, 0.0352, 2, 128, 1)


def report(at_s: float, full: int = 0, idle: int = 0, refused: int = 0, missed: int = 0) -> BatcherReport:
    """A report `at_s` seconds after the batcher became active. Full batches have 64 requests, others 16."""
    return BatcherReport(
        "me",
        BEGAN_US,
        BEGAN_US + int(at_s * SECOND_US),
        BUSY,
        {reason: number for reason, number in (("full", full), ("idle", idle)) if number},
        64 * full + 16 * idle,
        100 * full + 25 * idle,
        {"RESOURCE_EXHAUSTED/queue_size": refused, "CANCELLED/withdrawn": 3} if refused else {},
        ((1, 5180), (32, 6760)),
        (12_000, 31_000),
        missed={"dispatched_late": missed, "waiting": 2} if missed else {},
    )


def sample(of_batcher: BatcherReport | None, *, batcher: bool = True, processes: int = 1) -> ModelSample:
    return ModelSample(17, 3.2, 4, processes, batcher, of_batcher)


def drawn(models: Sequence[Figures], columns: int, rows: int | None = None, error: str = "") -> list[str]:
    """The lines of the page on a terminal of this size; without `rows` it is as high as the page."""
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    options = console.options.update(width=columns, height=rows)
    lines = console.render_lines(Page("redis", models, error), options, pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]


# --- figures -----------------------------------------------------------------------------------------------


def test_rates_and_shares_cover_the_time_between_two_samples() -> None:
    before = report(10, full=100, idle=100, refused=10, missed=4)
    now = report(14, full=130, idle=110, refused=30, missed=5)
    found = figures("square", sample(before), sample(now))
    assert found.over_s == 4.0
    assert found.requests_per_s == (30 * 64 + 10 * 16) / 4
    assert found.batches_per_s == 10.0
    assert list(found.reasons.items()) == [("full", 0.75), ("idle", 0.25)]
    assert found.fill == pytest.approx((30 * 1.0 + 10 * 0.25) / 40)
    assert found.refused == {
        "RESOURCE_EXHAUSTED/queue_size": Requests(30, 5.0),
        "CANCELLED/withdrawn": Requests(3, 0.0),
    }
    assert found.missed == {"dispatched_late": Requests(5, 0.25), "waiting": Requests(2, 0.0)}
    assert (found.batches, found.requests, found.active_s) == ({"full": 130, "idle": 110}, 10_080, 14.0)
    assert (found.p50_ms, found.p99_ms) == (12.0, 31.0)
    assert found.learned == {1: 5.18, 32: 6.76}


def test_gauges_come_from_the_batchers_report() -> None:
    busy = figures("square", None, sample(report(1)))
    assert (busy.waiting, busy.oldest_s) == (1204, 0.0352)
    assert (busy.batches_in_flight, busy.requests_in_flight, busy.model_processes) == (2, 128, 1)
    idle = figures("square", None, sample(replace(report(1), gauges=IDLE)))
    assert (idle.waiting, idle.oldest_s) == (0, None)


@pytest.mark.parametrize(
    "before",
    [
        None,
        sample(None),
        sample(replace(report(3, full=900), batcher="another")),
        sample(replace(report(3, full=900), began_us=BEGAN_US - SECOND_US)),
        sample(report(8, full=80)),
    ],
    ids=["first sample", "no report", "another batcher", "restarted batcher", "same report"],
)
def test_without_an_earlier_report_of_this_batcher_rates_cover_all_its_time(
    before: ModelSample | None,
) -> None:
    found = figures("square", before, sample(report(8, full=80)))
    assert (found.over_s, found.batches_per_s, found.reasons) == (8.0, 10.0, {"full": 1.0})


def test_no_time_and_no_batches_give_unknown_figures() -> None:
    started = figures("square", None, sample(report(0)))
    assert (started.over_s, started.requests_per_s, started.fill, started.reasons) == (0.0, None, None, {})
    quiet = figures("square", sample(report(5, full=3)), sample(report(9, full=3)))
    assert (quiet.requests_per_s, quiet.fill, quiet.reasons) == (0.0, None, {})
    nothing = figures("square", None, sample(replace(report(0), learned=(), quantiles_us=None)))
    assert (nothing.p50_ms, nothing.p99_ms, nothing.learned) == (None, None, {})
    assert len(drawn([started, quiet, nothing], 100)) > 10


@pytest.mark.parametrize("last_report", [None, report(8, full=80)], ids=["no report", "an old report"])
def test_without_a_batcher_figures_come_from_the_streams(last_report: BatcherReport | None) -> None:
    found = figures("square", None, sample(last_report, batcher=False))
    assert found == Figures("square", False, 1, 17, 3.2, 4)


def test_new_model_is_compared_with_nothing() -> None:
    earlier: Sample = {"old": sample(report(1)), "removed": sample(report(1))}
    found = compare(earlier, {"old": sample(report(3, full=2)), "new": sample(report(3, full=3))})
    assert [(model.model, model.over_s, model.batches_per_s) for model in found] == [
        ("old", 2.0, 1.0),
        ("new", 3.0, 1.0),
    ]


def test_json_is_one_line_with_all_figures() -> None:
    models = [
        figures("square", None, sample(report(8, full=80, refused=2, missed=4))),
        figures("other", None, sample(None)),
    ]
    line = as_json(models)
    square, other = json.loads(line)["models"]
    assert "\n" not in line
    assert square["refused"]["RESOURCE_EXHAUSTED/queue_size"] == {"total": 2, "per_s": 0.25}
    assert square["missed"] == {
        "dispatched_late": {"total": 4, "per_s": 0.5},
        "waiting": {"total": 2, "per_s": 0.25},
    }
    assert square["learned"] == {"1": 5.18, "32": 6.76}
    assert (other["learned"], other["requests_per_s"], other["waiting"]) == ({}, None, 17)
    assert json.loads(as_json(models, "no answer")) == {"error": "no answer"}


def test_json_keys_are_stable() -> None:
    (model,) = json.loads(as_json([figures("square", None, sample(report(1)))]))["models"]
    assert list(model) == [
        *("model", "batcher", "model_processes", "waiting", "oldest_s", "batches_in_flight"),
        *("requests_in_flight", "withheld", "over_s", "requests_per_s", "batches_per_s", "fill", "reasons"),
        *("p50_ms", "p99_ms", "learned", "refused", "batches", "requests", "active_s", "rejected_settings"),
        *("policy", "missed", "stepping", "sequences", "failed", "last_error", "last_error_s", "dead"),
        *("loading", "memory", "versions", "paused", "wanted", "process_deaths"),
    ]


def test_memory_of_processes_is_shown() -> None:
    told = [ProcessMemory(3 << 29, 1 << 30), ProcessMemory(1 << 29, 0)]
    several = figures("square", None, sample(report(1), processes=2)._replace(memory=told))
    assert several.memory == (3 << 29, 2 << 30, 1 << 30)
    alone = figures("square", None, sample(report(1))._replace(memory=[ProcessMemory(61_000_000, 0)]))
    unknown = figures("square", None, sample(report(1))._replace(memory=[ProcessMemory(0, 0)]))
    shown = [" ".join(line.split()) for line in plain_lines(Page("redis", [several, alone, unknown]))]
    told_lines = [line for line in shown if line.startswith("memory ")]
    assert told_lines == [
        "memory 1.5 GiB in the largest process 2 GiB in all 1 GiB of GPUs",
        "memory 58.2 MiB",
    ]


def stepping_report(at_s: float, requests: int, chunks: int, in_flight: int = 9) -> BatcherReport:
    """A report on a stepping model with 8 slots."""
    gauges = Gauges(3, 99, 0.173, in_flight, in_flight, 1)
    stepping = SteppingReport(8, chunks, (346_000, 1_100_000), (21_800, 38_700))
    return replace(
        report(at_s, full=requests),
        gauges=gauges,
        requests=requests,
        fill_percent=0,
        learned=(),
        stepping=stepping,
    )


def test_figures_of_a_stepping_model_are_those_of_its_slots_and_chunks() -> None:
    before, now = sample(stepping_report(10, 50, 2000)), sample(stepping_report(14, 90, 4000))
    found = figures("Chain", before, now)
    assert (found.requests_per_s, found.fill) == (10.0, None)
    assert found.stepping == Stepping(8, 8, 1, 4000, 500.0, 346.0, 1100.0, 21.8, 38.7)
    few = figures("Chain", before, sample(stepping_report(14, 90, 4000, in_flight=5))).stepping
    assert few is not None
    assert (few.slots_in_use, few.prefetched) == (5, 0)
    first = figures("Chain", None, now).stepping
    assert first is not None
    assert first.chunks_per_s == 4000 / 14
    quiet = SteppingReport(8, 2000, None, None)
    (as_dict,) = json.loads(as_json([figures("Chain", before, sample(replace(report(12), stepping=quiet)))]))[
        "models"
    ]
    assert as_dict["stepping"] == {
        "slots": 8,
        "slots_in_use": 8,
        "prefetched": 120,
        "chunks": 2000,
        "chunks_per_s": 0.0,
        "first_chunk_p50_ms": None,
        "first_chunk_p99_ms": None,
        "chunk_gap_p50_ms": None,
        "chunk_gap_p99_ms": None,
    }


def stateful_report(at_s: float, *numbers: int) -> BatcherReport:
    """A report on a stateful model."""
    return replace(report(at_s), sequences=SequencesReport(*numbers))


def test_sequences_of_a_stateful_model_are_counted() -> None:
    before, now = sample(stateful_report(10, 100, 0, 170, 60, 10)), stateful_report(14, 1204, 3, 210, 61, 10)
    found = figures("Vad", before, sample(now))
    assert found.sequences == SequenceFigures(
        1204, 3, Requests(210, 10.0), Requests(61, 0.25), Requests(10, 0.0)
    )
    first = figures("Vad", None, sample(now)).sequences
    assert first is not None
    assert first.started == Requests(210, 15.0)
    (as_dict,) = json.loads(as_json([found]))["models"]
    assert as_dict["sequences"] == {
        "kept": 1204,
        "waiting_to_start": 3,
        "started": {"total": 210, "per_s": 10.0},
        "ended": {"total": 61, "per_s": 0.25},
        "broken": {"total": 10, "per_s": 0.0},
        "slots": None,
    }
    assert drawn([found], 100)[-1] == (
        "  sequences         1,204 kept  3 wait to start  210 started (10/s)  61 ended (0.25/s)  10 broken"
    )
    none_waits = figures("Vad", None, sample(stateful_report(14, 100, 0, 170, 60, 10)))
    assert "  100 kept  170 started (12/s)" in drawn([none_waits], 100)[-1]
    bound = figures("Recogniser", None, sample(stateful_report(14, 5, 0, 170, 60, 10, 8)))
    assert "  5 kept  8 slots  170 started (12/s)" in drawn([bound], 100)[-1]


# --- pages -------------------------------------------------------------------------------------------------


def two_models() -> list[Figures]:
    return [
        figures(
            "square",
            sample(report(10, full=100)),
            sample(report(14, full=130, idle=10, refused=30, missed=12)),
        ),
        figures("lonely", None, sample(None, batcher=False, processes=0)),
    ]


WHOLE_PAGE = [
    "carpool top  redis  2 models",
    "",
    "model   waiting   oldest  in flight  processes  requests/s  fill    p50    p99",
    "square    1,204  35.2 ms    2 (128)          1         520   81%  12 ms  31 ms",
    "lonely       17    3.2 s          4       none  no batcher     -      -      -",
    "",
    "square",
    "  dispatch reasons  full 75%  idle 25%  of 10 batches/s",
    "  latency model     l(1) = 5.18 ms  l(32) = 6.76 ms",
    "  refused requests  30 RESOURCE_EXHAUSTED/queue_size (7.5/s)  3 CANCELLED/withdrawn (0.75/s)",
    "  missed deadlines  12 dispatched late (3/s)  2 waiting (0.5/s)",
    "",
    "lonely",
    "  batcher  none is active: nothing is dispatched until `carpool batcher` runs",
    "  workers  no model process is alive: start a worker with `carpool worker`",
]


def test_page_on_a_terminal() -> None:
    assert drawn(two_models(), 100) == WHOLE_PAGE


def test_stepping_models_have_a_table_of_their_own() -> None:
    chain = figures("Chain", sample(stepping_report(10, 50, 2000)), sample(stepping_report(14, 90, 4000)))
    square, _ = two_models()
    lines = drawn([square, chain], 140)
    assert [line.split("  ")[0] for line in lines[2:7]] == ["model", "square", "", "stepping model", "Chain"]
    assert lines[5:] == [
        "stepping model  waiting  oldest   slots  prefetched  processes  requests/s  chunks/s"
        "  first p50  first p99  gap p50  gap p99",
        "Chain                 3  173 ms  8 of 8           1          1          10       500"
        "     346 ms      1.1 s  21.8 ms  38.7 ms",
        "",
        *WHOLE_PAGE[6:11],
        "",
        "Chain",
        "  chunks         4,000 since this batcher became active",
        "  whole outputs  p50 12 ms  p99 31 ms",
    ]
    assert drawn([chain], 140)[2:4] == lines[5:7], "without any other model there is one table"
    narrow = drawn([chain], 80)
    assert narrow[2].split() == [
        "stepping",
        "model",
        "waiting",
        "slots",
        *("requests/s", "chunks/s"),
        *FIRST_AND_GAP,
    ]
    quiet = replace(stepping_report(14, 9, 7), stepping=SteppingReport(8, 7, None, None), quantiles_us=None)
    assert drawn([figures("Chain", None, sample(quiet))], 140)[-1:] == [
        "  chunks  7 since this batcher became active; no stream ended in the last 10 to 20 s"
    ]


FIRST_AND_GAP = ("first", "p99", "gap", "p99")


def test_page_in_a_pipe_is_plain_text() -> None:
    assert plain_lines(Page("redis", two_models())) == WHOLE_PAGE


def test_page_names_what_is_unusual() -> None:
    one_size = figures("a", None, sample(replace(report(5), learned=((64, 5000),))))
    no_report = figures("b", None, sample(None))
    lines = drawn([one_size, no_report], 100)
    assert "  latency model     l(64) = 5 ms; no other batch size was seen" in lines
    assert "  dispatch reasons  no batch in 5.0 s" in lines
    assert "  batcher  one is active, but its report is missing or of another version" in lines
    assert not any("withheld" in line for line in lines)
    withheld = figures("a", None, sample(replace(report(5), gauges=BUSY._replace(withheld=1))))
    assert "  withheld results  1, until the results before them are delivered" in drawn([withheld], 100)
    rejected = figures("a", None, sample(replace(report(5), rejected_settings="policy: unknown")))
    assert "  settings          rejected: policy: unknown" in drawn([rejected], 100)
    assert "`carpool up square` serves one" in drawn([], 100)[2]


def test_page_names_the_policy_in_force() -> None:
    obeyed = replace(report(5), policy="deferred")
    rejected = replace(obeyed, rejected_settings="policy: unknown")
    assert "  policy            deferred" in drawn([figures("a", None, sample(obeyed))], 100)
    lines = drawn([figures("a", None, sample(rejected))], 100)
    assert "  policy            deferred, not that of the settings" in lines


def test_last_figures_stay_while_redis_does_not_answer() -> None:
    models = [figures("a", None, sample(report(5)))]
    title, note, *rest = drawn(models, 100, error="no answer")
    assert note == "Redis does not answer, so these figures are old. Reason: no answer"
    assert [title, "", *rest] == drawn(models, 100)


def test_long_details_wrap_between_their_parts() -> None:
    refused = {f"STATUS/reason_{number}": Requests(number, 0.0) for number in range(3)}
    model = figures("a", None, sample(report(5)))._replace(refused=refused)
    assert drawn([model], 60)[-2:] == [
        "  refused requests  0 STATUS/reason_0  1 STATUS/reason_1",
        "                    2 STATUS/reason_2",
    ]


def test_text_in_brackets_is_no_markup() -> None:
    model = figures("[bold]a[/bold]", None, sample(replace(report(5), rejected_settings="[red]policy[/red]")))
    for lines in (drawn([model], 100), plain_lines(Page("redis", [model]))):
        assert "[bold]a[/bold]" in lines
        assert "  settings          rejected: [red]policy[/red]" in lines


def test_narrow_terminal_has_fewer_columns_and_each_is_whole() -> None:
    models = [figures("square", sample(report(10)), sample(report(14, full=130)))]
    headings = [drawn(models, columns)[2].split("  ") for columns in (79, 70, 56, 45, 30)]
    assert [[name.strip() for name in heading if name] for heading in headings] == [
        ["model", "waiting", "oldest", "in flight", "processes", "requests/s", "fill", "p50", "p99"],
        ["model", "waiting", "oldest", "in flight", "processes", "requests/s", "p99"],
        ["model", "waiting", "oldest", "processes", "requests/s", "p99"],
        ["model", "waiting", "oldest", "requests/s", "p99"],
        ["model", "waiting", "requests/s"],
    ]


def test_long_name_is_cut_in_the_table_of_a_terminal_only() -> None:
    name = "a" * 128
    model = figures(name, None, sample(report(5)))
    lines = drawn([model], 140)
    assert lines[3].startswith("a" * 27 + "…  ")
    assert name in lines
    assert plain_lines(Page("redis", [model]))[3].startswith(f"{name}  ")


def test_low_terminal_counts_the_lines_that_do_not_fit() -> None:
    models = [figures(f"m{number}", None, sample(report(5))) for number in range(10)]
    whole = drawn(models, 100)
    low = drawn(models, 100, 14)
    assert low[:13] == whole[:13]
    assert low[13] == f"... {len(whole) - 13} more lines; --model NAME shows one model alone"
    assert drawn(models, 100, len(whole)) == whole


NUMBERS = st.integers(0, 10**12)


@settings(deadline=None)
@given(
    columns=st.integers(1, 200),
    rows=st.integers(0, 60),
    models=st.lists(st.text("ab", min_size=1, max_size=128), max_size=5, unique=True),
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    batcher=st.booleans(),
)
def test_no_page_is_larger_than_its_terminal(
    columns: int, rows: int, models: list[str], numbers: tuple[int, int, int], batcher: bool
) -> None:
    full, idle, refused = numbers
    before, now = sample(report(1)), sample(report(2, full, idle, refused), batcher=batcher)
    stepping = sample(stepping_report(2, full, idle, refused), batcher=batcher)
    pages = [figures(model, before, stepping if "b" in model else now) for model in models]
    lines = drawn(pages, columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines), default=0) <= columns


# --- following ---------------------------------------------------------------------------------------------


def test_following_continues_through_an_outage_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given samples of which two fail, expect the last figures meanwhile, and then new ones."""
    monkeypatch.setattr(command, "INTERVAL_S", 0.0)
    away = UnavailableError("no answer")
    coming: list[Sample | BaseException] = [
        sample_at(2),
        sample_at(3),
        away,
        away,
        sample_at(6),
        KeyboardInterrupt(),
    ]
    shown: list[tuple[str, float | None]] = []

    def sample_now() -> Sample:
        following = coming.pop(0)
        if isinstance(following, BaseException):
            raise following
        return following

    with pytest.raises(KeyboardInterrupt):
        follow(sample_at(1), sample_now, lambda models, error: shown.append((error, models[0].over_s)))
    assert shown == [("", 1.0), ("", 1.0), ("", 2.0), (str(away), 2.0), (str(away), 2.0), ("", 5.0)]


def test_rates_cover_the_last_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "INTERVAL_S", 0.0)
    coming = iter(range(2, 10))
    shown: list[float | None] = []
    with pytest.raises(StopIteration):
        follow(
            sample_at(1), lambda: sample_at(next(coming)), lambda models, _: shown.append(models[0].over_s)
        )
    assert shown == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0]


async def test_figures_are_updated_without_blocking_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample that does not come for a while holds up its own thread only, and an outage does not end it."""
    monkeypatch.setattr(carpool.figures, "INTERVAL_S", 0.0)
    answers = threading.Event()
    coming: list[Sample | UnavailableError] = [UnavailableError("away"), sample_at(3), sample_at(7)]

    def sample_now() -> Sample:
        assert answers.wait(30)
        following = coming.pop(0)
        if isinstance(following, UnavailableError):
            raise following
        return following

    recent = RecentFigures(sample_now)
    following = asyncio.ensure_future(recent.follow())
    await asyncio.sleep(0.01)
    assert (recent.figures, recent.error) == ([], "")
    answers.set()
    with pytest.raises(IndexError):  # nothing more comes
        await following
    assert [(model.over_s, model.batches_per_s) for model in recent.figures] == [(4.0, 1.0)]
    assert recent.error == ""


def sample_at(at_s: int) -> Sample:
    return {"m": sample(report(at_s, full=at_s))}


def test_failures_are_shown() -> None:
    before, now = (
        report(1),
        replace(
            report(5),
            failed={"INTERNAL": 5000},
            last_error=("KeyError at model.py:3", BEGAN_US + 2 * SECOND_US),
        ),
    )
    page = drawn([figures("square", sample(before), sample(now)._replace(dead=2))], 100)
    assert "  failed requests   5,000 INTERNAL (1,250/s)" in page
    assert "  last error        KeyError at model.py:3, 3.0 s ago" in page
    assert "  dead letters      2; `carpool dead list` shows them" in page
