"""`carpool top` from made-up looks: figures between two of them, and the page in windows of any size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.errors import UnavailableError
from carpool.wire.report import BatcherReport, Gauges
from carpool_cli import top
from carpool_cli.top import Look, as_json, compare, follow
from carpool_cli.top_page import Figures, ModelLook, Refused, figures, page

SECOND_US = 1_000_000
BEGAN_US = 100 * SECOND_US
IDLE = Gauges(0, 0, 0.0, 0, 0, 2)
BUSY = Gauges(1204, 99, 0.0352, 2, 128, 1)


def status(at_s: float, full: int = 0, idle: int = 0, refused: int = 0) -> BatcherReport:
    """What a batcher says so long after it began, whose full batches are of 64 requests and others of 16."""
    return BatcherReport(
        "me",
        BEGAN_US,
        BEGAN_US + int(at_s * SECOND_US),
        BUSY,
        {reason: number for reason, number in (("full", full), ("idle", idle)) if number},
        64 * full + 16 * idle,
        100 * full + 25 * idle,
        {"RESOURCE_EXHAUSTED/queue_size": refused, "CANCELLED/withdrawn": 3} if refused else {},
        (5130.0, 51.0, 0),
        (12_000, 31_000),
    )


def seen(said: BatcherReport | None, *, batcher: bool = True, processes: int = 1) -> ModelLook:
    return ModelLook(17, 3.2, 4, processes, batcher, said)


# --- figures -----------------------------------------------------------------------------------------------


def test_rates_and_shares_are_of_the_time_between_two_looks() -> None:
    before, now = status(10, full=100, idle=100, refused=10), status(14, full=130, idle=110, refused=30)
    found = figures("square", seen(before), seen(now))
    assert found.over_s == 4.0
    assert found.requests_per_s == (30 * 64 + 10 * 16) / 4
    assert found.batches_per_s == 10.0
    assert list(found.reasons.items()) == [("full", 0.75), ("idle", 0.25)]
    assert found.fill == pytest.approx((30 * 1.0 + 10 * 0.25) / 40)
    assert found.refused == {
        "RESOURCE_EXHAUSTED/queue_size": Refused(30, 5.0),
        "CANCELLED/withdrawn": Refused(3, 0.0),
    }
    assert (found.batches, found.requests, found.active_s) == ({"full": 130, "idle": 110}, 10_080, 14.0)
    assert (found.p50_ms, found.p99_ms) == (12.0, 31.0)
    assert found.learned == (5.13, 0.051, None)


def test_gauges_are_the_batchers() -> None:
    found = figures("square", None, seen(status(1)))
    assert (found.waiting, found.oldest_s) == (1204, 0.0352)
    assert (found.batches_in_flight, found.requests_in_flight, found.model_processes) == (2, 128, 1)
    rests = figures("square", None, seen(replace(status(1), gauges=IDLE)))
    assert (rests.waiting, rests.oldest_s) == (0, None)


@pytest.mark.parametrize(
    "before",
    [
        None,
        seen(None),
        seen(replace(status(3, full=900), batcher="another")),
        seen(replace(status(3, full=900), began_us=BEGAN_US - SECOND_US)),
        seen(status(8, full=80)),
    ],
    ids=["first look", "said nothing", "another batcher", "the same, anew", "nothing new was said"],
)
def test_without_an_earlier_word_of_this_batcher_rates_are_since_it_began(before: ModelLook | None) -> None:
    found = figures("square", before, seen(status(8, full=80)))
    assert (found.over_s, found.batches_per_s, found.reasons) == (8.0, 10.0, {"full": 1.0})


def test_no_time_and_no_batches_divide_nothing() -> None:
    began = figures("square", None, seen(status(0)))
    assert (began.over_s, began.requests_per_s, began.fill, began.reasons) == (0.0, None, None, {})
    quiet = figures("square", seen(status(5, full=3)), seen(status(9, full=3)))
    assert (quiet.requests_per_s, quiet.fill, quiet.reasons) == (0.0, None, {})
    nothing = figures("square", None, seen(replace(status(0), learned=None, quantiles_us=None)))
    assert (nothing.p50_ms, nothing.p99_ms, nothing.learned) == (None, None, None)
    assert len(page("redis", [began, quiet, nothing], 100)) > 10


@pytest.mark.parametrize("said", [None, status(8, full=80)], ids=["nothing", "a last word"])
def test_without_a_batcher_it_is_what_the_streams_tell(said: BatcherReport | None) -> None:
    found = figures("square", None, seen(said, batcher=False))
    assert found == Figures("square", False, 1, 17, 3.2, 4)


def test_a_model_that_is_new_is_compared_with_nothing() -> None:
    earlier: Look = {"old": seen(status(1)), "gone": seen(status(1))}
    found = compare(earlier, {"old": seen(status(3, full=2)), "new": seen(status(3, full=3))})
    assert [(one.model, one.over_s, one.batches_per_s) for one in found] == [
        ("old", 2.0, 1.0),
        ("new", 3.0, 1.0),
    ]


def test_json_is_a_line_that_holds_it_all() -> None:
    shown = [figures("square", None, seen(status(8, full=80, refused=2))), figures("other", None, seen(None))]
    line = as_json(shown)
    square, other = json.loads(line)["models"]
    assert "\n" not in line
    assert square["refused"]["RESOURCE_EXHAUSTED/queue_size"] == {"total": 2, "per_s": 0.25}
    assert square["learned"] == {"intercept_ms": 5.13, "slope_ms": 0.051, "only_size": None}
    assert (other["learned"], other["requests_per_s"], other["waiting"]) == (None, None, 17)
    assert json.loads(as_json(shown, "Redis is away")) == {"error": "Redis is away"}


# --- pages -------------------------------------------------------------------------------------------------


def test_a_page() -> None:
    shown = [
        figures("square", seen(status(10, full=100)), seen(status(14, full=130, idle=10, refused=30))),
        figures("lonely", None, seen(None, batcher=False, processes=0)),
    ]
    assert page("redis://h:1/0", shown, 100) == [
        "carpool top  redis://h:1/0  2 models",
        "",
        "model   waiting   oldest  in flight  processes  requests/s  fill    p50    p99",
        "square    1,204  35.2 ms    2 (128)          1         520   81%  12 ms  31 ms",
        "lonely       17    3.2 s          4       none  no batcher     -      -      -",
        "",
        "square",
        "  left     full 75%, idle 25% of 10 batches/s",
        "  l(n)     5.13 ms + 51 µs n",
        "  refused  30 RESOURCE_EXHAUSTED/queue_size (7.5/s), 3 CANCELLED/withdrawn (0.75/s)",
        "",
        "lonely",
        "  batcher  none is active: nothing leaves until `carpool batcher` runs",
        "  workers  none: no model process lives, `carpool worker` starts one",
    ]


def test_other_things_it_says() -> None:
    one_size = figures("a", None, seen(replace(status(5), learned=(5000.0, 0.0, 64))))
    silent = figures("b", None, seen(None))
    lines = page("redis", [one_size, silent], 100)
    assert "  l(n)     5 ms for n = 64, the only size there was" in lines
    assert "  left     no batch in 5.0 s" in lines
    assert "  batcher  one is active, and says nothing that is understood here" in lines
    assert not any("held" in line for line in lines)
    holds = figures("a", None, seen(replace(status(5), gauges=BUSY._replace(held=1))))
    assert "  held     1 result, until those before them are done" in page("redis", [holds], 100)
    lost = figures("a", None, seen(replace(status(5), unheeded="policy: whose?")))
    assert "  settings not followed: policy: whose?" in page("redis", [lost], 100)
    assert "`carpool up square` serves one" in page("redis", [], 100)[2]


def test_while_redis_is_away_the_last_page_stands() -> None:
    shown = [figures("a", None, seen(status(5)))]
    title, note, *rest = page("redis", shown, 100, lost="no answer")
    assert note == "Redis is away, this is how it was: no answer"
    assert [title, "", *rest] == page("redis", shown, 100)


def test_what_is_long_goes_on_in_the_next_line() -> None:
    refused = {f"STATUS/reason_{number}": Refused(number, 0.0) for number in range(3)}
    one = figures("a", None, seen(status(5)))._replace(refused=refused)
    assert page("redis", [one], 60)[-2:] == [
        "  refused  0 STATUS/reason_0, 1 STATUS/reason_1,",
        "           2 STATUS/reason_2",
    ]


def test_a_narrow_window_has_fewer_columns_each_of_them_whole() -> None:
    shown = [figures("square", seen(status(10)), seen(status(14, full=130)))]
    heads = [page("redis", shown, columns)[2].split("  ") for columns in (79, 70, 56, 45, 30)]
    named = [[name.strip() for name in head if name] for head in heads]
    assert named == [
        ["model", "waiting", "oldest", "in flight", "processes", "requests/s", "fill", "p50", "p99"],
        ["model", "waiting", "oldest", "in flight", "processes", "requests/s", "p99"],
        ["model", "waiting", "oldest", "processes", "requests/s", "p99"],
        ["model", "waiting", "oldest", "requests/s", "p99"],
        ["model", "waiting", "requests/s"],
    ]


def test_a_long_name_is_cut_in_the_table_and_told_below() -> None:
    name = "a" * 128
    lines = page("redis", [figures(name, None, seen(status(5)))], 140)
    assert lines[3].startswith("a" * 27 + "…  ")
    assert name in lines


def test_a_low_window_says_what_it_leaves_out() -> None:
    shown = [figures(f"m{number}", None, seen(status(5))) for number in range(10)]
    whole = page("redis", shown, 100)
    low = page("redis", shown, 100, 14)
    assert low[:13] == whole[:13]
    assert low[13] == f"... {len(whole) - 13} lines more: --model NAME shows one alone"
    assert page("redis", shown, 100, len(whole)) == whole


NUMBERS = st.integers(0, 10**12)


@settings(deadline=None)
@given(
    columns=st.integers(1, 200),
    rows=st.integers(0, 60),
    models=st.lists(st.text("ab", min_size=1, max_size=128), max_size=5, unique=True),
    numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS),
    batcher=st.booleans(),
)
def test_no_page_is_larger_than_its_window(
    columns: int, rows: int, models: list[str], numbers: tuple[int, int, int], batcher: bool
) -> None:
    full, idle, refused = numbers
    before, now = seen(status(1)), seen(status(2, full, idle, refused), batcher=batcher)
    lines = page("redis", [figures(model, before, now) for model in models], columns, rows)
    assert len(lines) <= rows
    assert max(map(len, lines), default=0) <= columns


# --- going on ----------------------------------------------------------------------------------------------


def test_it_goes_on_while_redis_is_away_and_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given looks of which two fail, expect what was seen last meanwhile, and then to go on from there."""
    monkeypatch.setattr(top, "EVERY_S", 0.0)
    away = UnavailableError("Redis is away")
    coming: list[Look | BaseException] = [
        one_look(2),
        one_look(3),
        away,
        away,
        one_look(6),
        KeyboardInterrupt(),
    ]
    shown: list[tuple[str, float | None]] = []

    def look_now() -> Look:
        one = coming.pop(0)
        if isinstance(one, BaseException):
            raise one
        return one

    with pytest.raises(KeyboardInterrupt):
        follow(one_look(1), look_now, lambda found, lost: shown.append((lost, found[0].over_s)))
    assert shown == [("", 1.0), ("", 1.0), ("", 2.0), (str(away), 2.0), (str(away), 2.0), ("", 5.0)]


def test_rates_are_of_the_last_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "EVERY_S", 0.0)
    coming = iter(range(2, 10))
    shown: list[float | None] = []
    with pytest.raises(StopIteration):
        follow(one_look(1), lambda: one_look(next(coming)), lambda found, _: shown.append(found[0].over_s))
    assert shown == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 5.0, 5.0]


def one_look(at_s: int) -> Look:
    return {"m": seen(status(at_s, full=at_s))}
