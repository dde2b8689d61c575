"""`make chaos`: a short selection of its faults, and a planted one, which it must find."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from support.chaos.faults import FAULTS
from support.chaos.main import carry_out
from support.chaos.producer import ACCEPTED, SENT, unconfirmed
from support.chaos.report import document, is_kept, progress, quoted, table
from support.chaos.run import Outcome
from support.checker import Checker, Report

pytestmark = pytest.mark.chaos

SELECTED: Final = (
    "a worker stands still past its lease",
    "a model process is killed",
    "a new version of the model takes over",
    "a producer is killed, and sends again",
    "a producer at ten times the pace",
    "Redis is killed, appendfsync always",
    "the memory of Redis is full",
    "permissions are revoked for a second",
    "the disk of Redis is full",
    "the network carries no replies for 5 s",
    "connections are cut in the middle of a reply",
    "services are killed, and others have clocks that are an hour off",
)
MEMORY: Final = {"Redis": 10.0, "batcher": 50.0, "worker": 60.0}
FINE: Final = Report(5, 5, 5, 0, [], [], [], [], {"OK": 5})
LOST: Final = Report(5, 5, 4, 0, ["a"], [], [], [], {"OK": 4})
DUPLICATED: Final = Report(5, 5, 5, 0, [], ["a"], [], [], {"OK": 5})
COVERED, NOT_COVERED = "the active batcher is killed", "Redis is killed, appendfsync everysec"


@pytest.mark.parametrize("name", SELECTED)
def test_nothing_is_lost(name: str, tmp_path: Path) -> None:
    """How long it takes is for `make chaos` to say, on a machine that does nothing else."""
    outcome = carry_out(FAULTS[name], tmp_path, seed=1, times=1)
    assert outcome.is_faultless, progress(name, outcome, 1)
    assert outcome.report.ok > 0


@pytest.mark.parametrize(
    "name", ["the primary is killed, with Sentinel", "the primary is killed, in a cluster"]
)
def test_failover(name: str, tmp_path: Path) -> None:
    """The newest requests may be lost, because replication is asynchronous, and nothing else may go wrong."""
    outcome = carry_out(FAULTS[name], tmp_path, seed=1, times=1)
    report = outcome.report
    assert not (report.duplicated or report.misrouted or report.unexpected), progress(name, outcome, 1)
    assert len(report.lost) < report.accepted / 10, progress(name, outcome, 1)


def test_results_of_others_are_found(tmp_path: Path) -> None:
    name = "SCRIPT FLUSH"
    outcome = carry_out(FAULTS[name], tmp_path, seed=1, times=1, spec="Busy=hashing.py:Shuffled")
    assert outcome.report.misrouted
    assert any("results by ID" in found for found in outcome.left_over)
    assert not is_kept(name, outcome)


@pytest.mark.parametrize(
    ("name", "outcome", "kept"),
    [
        (COVERED, Outcome(FINE, [2.9], MEMORY, []), True),
        (COVERED, Outcome(FINE, [0.1, 3.1], MEMORY, []), False),
        (COVERED, Outcome(FINE, [0.1], MEMORY, ["pending batches"]), False),
        (COVERED, Outcome(LOST, [0.1], MEMORY, []), False),
        (NOT_COVERED, Outcome(LOST, [0.1], MEMORY, []), True),
        (NOT_COVERED, Outcome(DUPLICATED, [0.1], MEMORY, []), False),
    ],
)
def test_what_is_kept(name: str, outcome: Outcome, kept: bool) -> None:
    assert is_kept(name, outcome) is kept
    (_, _, row) = table({name: [outcome]})
    assert f"| {'yes' if kept else 'no'} |" in row
    assert row in document({name: [outcome]}, "1 to 1")


def test_readme_quotes_some_rows() -> None:
    text = "before\n\n| fault | runs |\n|---|---:|\n| old | 1 |\n\nafter\n"
    outcomes = {name: [Outcome(FINE, [0.1], MEMORY, [])] for name in FAULTS}
    before, *lines, after = quoted(outcomes, text).split("\n\n")
    assert (before, after, len(lines)) == ("before", "after\n", 1)
    assert "| the active batcher is killed | 1 | 5 | 0 | 0 | 0 | 0.10 s | 0.10 s |" in lines[0]
    assert "| old |" not in lines[0]
    with pytest.raises(ValueError, match="0 tables begin"):
        quoted(outcomes, "no table")


def test_producer_goes_on_with_what_was_not_confirmed(tmp_path: Path) -> None:
    records = [(0, SENT), (0, ACCEPTED), (1, SENT), (2, SENT), (1, SENT), (2, ACCEPTED)]
    lines = [json.dumps({"number": number, "what": what, "payloads": {}}) for number, what in records]
    path = tmp_path / "p.jsonl"
    assert unconfirmed(path) == (set(), 0)
    path.write_text("\n".join([*lines, lines[0][:9]]))
    assert unconfirmed(path) == ({1}, 3)


def test_what_was_accepted_twice_may_have_two_results() -> None:
    checker = Checker()
    for _ in range(2):
        checker.attempt("a", "x")
        checker.accept("a")
        checker.envelope("a", {"correlation_id": "a", "status": "CANCELLED", "final": True})
    assert not checker.report().duplicated
    checker.envelope("a", {"correlation_id": "a", "status": "CANCELLED", "final": True})
    assert checker.report().duplicated == ["a"]
