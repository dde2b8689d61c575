"""Faults of gateways under load: a selection of those of `make chaos`, and what its judge finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.chaos.client import ANSWERED, BROKEN, GIVEN_UP, SENT, SILENT
from support.chaos.clients import HttpReport, judge
from support.chaos.gateway_faults import GATEWAY_FAULTS
from support.chaos.main import carry_out_with_gateways
from support.chaos.report import gateway_progress, with_gateways
from support.front_ends import FRONT_ENDS
from support.models.hashing import digest

pytestmark = pytest.mark.chaos

SELECTED = (
    "a gateway stands still for 5 s",
    "a gateway is cut off from Redis for 5 s",
    "a gateway is killed, behind a proxy that sends requests again",
)


@pytest.mark.parametrize("name", SELECTED)
def test_each_request_has_one_result(name: str, tmp_path: Path) -> None:
    fault = GATEWAY_FAULTS[name]
    fault = fault._replace(has_readers=fault.resends)  # in one of them, because they need two more workers
    outcome = carry_out_with_gateways(fault, tmp_path, seed=1, times=1)
    assert outcome.is_faultless(executes_once=True), gateway_progress(name, outcome, 1)
    assert outcome.of_clients.results > 0
    assert outcome.of_producers.report.ok > 0
    row = with_gateways({name: [outcome]}, "1 to 1", "# First\n\n## Behind gateways\n\nold\n")
    assert (row.startswith("# First\n\n## Behind gateways\n"), "\nold\n" in row) == (True, False)
    assert outcome.of_readers.keys() == (FRONT_ENDS.keys() if fault.has_readers else set())
    assert all(f"| {name} | {of.texts:,} |" in row for name, of in outcome.of_readers.items())


RIGHT = {"what": ANSWERED, "code": 200, "correlation_id": "i", "results": [digest("i", "http-a")]}
WRONG = {**RIGHT, "results": [digest("j", "http-a")]}
REFUSED = {"what": ANSWERED, "code": 503, "correlation_id": "", "results": []}
FAILED = {**REFUSED, "code": 500}


def judged(form: str, *calls: dict[str, Any], executions: tuple[str, ...] = ("i",)) -> HttpReport:
    """The report on one request, of which these became of the calls, and which was executed as these."""
    sent = {"name": "a", "what": SENT, "form": form, "payloads": ["http-a"]}
    return judge([sent, *({"name": "a", **call} for call in calls)], {"http-a": list(executions)})


@pytest.mark.parametrize(
    ("form", "calls", "executions", "wrong"),
    [
        ("keyed", [RIGHT], ("i",), set()),
        ("keyed", [REFUSED, {"what": BROKEN}, {"what": SILENT}, RIGHT, RIGHT], ("i",), set()),
        ("keyed", [RIGHT], ("i", "i"), {"repeated"}),
        ("keyed", [RIGHT, {**RIGHT, "correlation_id": "k"}], ("i",), {"different"}),
        ("keyed", [WRONG], ("i",), {"misrouted"}),
        ("keyed", [REFUSED, {"what": GIVEN_UP}], ("i",), {"lost"}),
        ("keyed", [], ("i",), {"lost"}),
        ("keyed", [FAILED, RIGHT], ("i",), {"failed"}),
        ("plain", [RIGHT], ("i", "i"), set()),
        ("plain", [{"what": BROKEN}], (), set()),
        ("plain", [{"what": SILENT}], ("i",), {"lost"}),
        ("plain", [RIGHT], (), {"misrouted"}),
        ("lines", [{**RIGHT, "results": [None]}], (), set()),
        ("lines", [{**RIGHT, "results": []}], ("i",), {"misrouted"}),
    ],
)
def test_what_is_wrong_is_found(
    form: str, calls: list[dict[str, Any]], executions: tuple[str, ...], wrong: set[str]
) -> None:
    report = judged(form, *calls, executions=executions)
    kinds = {"lost", "misrouted", "different", "repeated", "failed"}
    assert {kind for kind in kinds if getattr(report, kind)} == wrong
    assert report.is_faultless(executes_once=False) is not bool(wrong - {"repeated"})
