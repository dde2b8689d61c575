"""Templates and the style sheet: whatever a producer wrote is text, and nothing is inline."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest

from carpool.figures import Figures
from carpool.settings import ConsoleSettings, read_settings
from carpool.store.directory import ProcessMemory
from carpool.store.workers import HeldBatch, ProcessState, WorkerState
from carpool.wire.detail import BatchDetail, ErrorDetail, LaneDetail, ModelDetail, TenantDetail
from carpool.wire.nodes import NodeReport, Seat, SeatName, SeatState, Snapshot, Wanted
from carpool.wire.orders import DrainOrder
from carpool_console.app import STATIC
from carpool_console.console import TEMPLATES, Console
from carpool_console.pages import model, nodes
from carpool_console.reader import Overview, SharedReader
from carpool_console.reading import ModelDetails
from carpool_console.trouble import Facts, row_of
from carpool_console.users import Users

ATTACK: Final = "\"'><script>alert(1)</script>\x1b[2J\u202e"
SHOWN: Final = "&lt;script&gt;alert(1)&lt;/script&gt;\\x1b[2J\\u202e"


@pytest.fixture
def console(tmp_path: Path) -> Console:
    settings = read_settings(ConsoleSettings, [], "test")
    reader = SharedReader(settings.redis_url, "carpool", "test", lambda _: None)
    return Console(settings, Users(tmp_path / "users.toml"), reader, "test")


def shared(title: str) -> dict[str, Any]:
    """What `render` gives to each template."""
    user = {"name": "ann", "role": "viewer"}
    return {
        "title": title, "path": "/", "user": user, "is_of_proxy": False, "can_act": False, "csrf": "token",
        "messages": [],
    }  # fmt: skip


def check(html: str) -> None:
    """Nothing of ATTACK acts, and what it has besides letters is seen."""
    assert "<script>alert" not in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert SHOWN in html


def test_all_that_a_producer_names_is_text(console: Console) -> None:
    lane = LaneDetail(ATTACK, ATTACK, 3, 1.0, 1, 2, (1000, 2000), None)
    batch = BatchDetail("1-0", ATTACK, 3, 0.5, ATTACK, "", ATTACK, 1, 2, 3, 4, 5, {ATTACK: 3}, ATTACK)
    error = ErrorDetail("model", ATTACK, ATTACK, ATTACK, 3, ATTACK, 1, ATTACK)
    tenant = TenantDetail(ATTACK * 9, 3, 1.0, 3, 1.0)  # long enough to be cut
    detail = ModelDetail(
        ATTACK, 2, 1, 1, 1, lanes=(lane,), tenants=(tenant,), batches=(batch,), errors=(error,)
    )
    details = ModelDetails(detail, {"parameters": "{}"}, {}, {})
    process = ProcessState(ATTACK, True, True, 9, 1, [HeldBatch("1-0", 2)], ProcessMemory(1024, 0), ATTACK)
    worker = WorkerState("m", ATTACK, 3_000, ATTACK, [process], DrainOrder(ATTACK, 0), since_ms=0)
    html = console.html("model.html", {**shared(ATTACK), **model_context(details, [worker])})
    check(html)
    assert html.count(SHOWN) >= 14
    assert '<details class="long">' in html


def model_context(details: ModelDetails, workers: list[WorkerState]) -> dict[str, Any]:
    of = row_of(Facts(Figures("m", True, 1, 3, 1.0, 1, rejected_settings=ATTACK)))
    overview = Overview([of], None, 1.0, 5_000_000, error=ATTACK)
    return {
        "overview": overview,
        "row": of,
        "facts": model._facts(of),
        "details": details,
        "detail": details.detail,
        "batches": details.detail.batches if details.detail is not None else (),
        "workers": workers,
        "curves": model._curves(of, 1.0),
        "latency": model._latency(of.figures, details.detail),
        "learned": [],
        "reasons": {},
        "ends": [(ATTACK, ATTACK, [model.Count(ATTACK, ATTACK, 1, 2)])],
        "lately": "Last minute",
        "versions": [],
        "parameters": {ATTACK: ATTACK},
    }


def test_what_nodes_report_is_text(console: Console) -> None:
    seat = Seat(SeatName(1, 0), SeatState.SERVING, ATTACK)
    node = NodeReport(ATTACK, 4, {}, {ATTACK: ATTACK}, [seat], {"1/0": (ATTACK, ATTACK)})
    wanted = Wanted("m", 2, ATTACK, {}, 3, 10, ATTACK)
    snapshot = Snapshot([wanted], {seat.name: seat}, [node])
    context = {
        "overview": SharedReader("redis://127.0.0.1:1/0", "carpool", "test", lambda _: None)._view.overview,
        "problem": ATTACK,
        "is_read": True,
        "nodes": nodes.nodes_of(snapshot),
        "wanted": nodes.wanted_of(snapshot),
    }
    check(console.html("nodes.html", {**shared("Nodes"), **context}))


def test_a_value_of_a_field_is_kept_as_it_is(console: Console) -> None:
    context = {**shared("Sign in"), "user": None, "problem": "", "next": "/", "name": ATTACK}
    html = console.html("sign_in.html", context)
    assert "<script>alert" not in html
    assert "\x1b[2J" in html  # a form would else send back something else


@pytest.mark.parametrize("template", sorted(TEMPLATES.glob("*.html")), ids=lambda path: path.name)
def test_templates_have_nothing_inline_and_nothing_safe(template: Path) -> None:
    text = template.read_text("utf-8")
    assert not re.search(r"\bstyle\s*=|<style|javascript:|\son[a-z]+\s*=", text)
    assert not re.search(r"<script(?! src=\"/static/)", text)
    assert not re.search(r"\|\s*safe\b|autoescape|Markup", text)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_contrast_of_texts(theme: int) -> None:
    """4.5 to 1 on every background."""
    css = (STATIC / "console.css").read_text("utf-8")
    block = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[theme]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", block))
    for name in ("text", "quiet", "link", "fine", "hurts", "broken"):
        for back in ("back", "raised", "broken-back", "hurts-back"):
            light, dark = sorted((luminance(colours[name]), luminance(colours[back])), reverse=True)
            ratio = (light + 0.05) / (dark + 0.05)
            assert ratio >= 4.5, f"{name} on {back}: {ratio:.2f}"
