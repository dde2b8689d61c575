"""What counts as found when a fault is planted, and for how long it is searched for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, rule

from carpool.messages.requests import Entry, Run
from carpool_batcher.core.sequences.sequence import part_of
from support import planting
from support.planting import Fault, Faults, Measured, NotFoundError, Patch, must_show, of_machine

PRODUCTION: Final = SimpleNamespace(value=lambda: 0)


class Machine(RuleBasedStateMachine):
    """It finds another value than 0, but only together with the number 7."""

    has_failed = False

    @rule(number=st.integers(0, 9))
    def look(self, number: int) -> None:
        self.has_failed = True
        value = PRODUCTION.value()
        assert number != 7 or value == 0
        self.has_failed = False

    def teardown(self) -> None:
        assert not self.has_failed, "what is left behind"


class Lax(RuleBasedStateMachine):
    """It takes any exception for a fault."""

    @rule()
    def look(self) -> None:
        has_raised = False
        try:
            PRODUCTION.value()
        except Exception:
            has_raised = True
        assert not has_raised


def fault(
    plant: planting.Plant, *, examples: int = 10, machine: type[RuleBasedStateMachine] = Machine
) -> Fault:
    table = Faults(of_machine(machine, steps=2))
    table.found(examples=examples)(plant)
    (added,) = table
    return added


def change(patch: Patch) -> None:
    patch.setattr(PRODUCTION, "value", lambda: 1)


def change_nothing(patch: Patch) -> None:
    patch.setattr(PRODUCTION, "value", lambda: 0)


def patch_what_is_gone(patch: Patch) -> None:
    patch.setattr(PRODUCTION, "other", lambda: 0)


def call_what_is_gone(patch: Patch) -> None:
    patch.setattr(PRODUCTION, "value", lambda: 1 + PRODUCTION.other())


def assert_itself(patch: Patch) -> None:
    def value() -> int:
        raise AssertionError("of the plant")

    patch.setattr(PRODUCTION, "value", value)


def fail_in_production(patch: Patch) -> None:
    patch.setattr(PRODUCTION, "value", lambda: part_of(Run(Entry("1-0", 0), ["a"], [b""], arrival_us=0)))


def test_an_assertion_of_the_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    fault(change).must_be_found(monkeypatch)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (change_nothing, NotFoundError),
        (patch_what_is_gone, AttributeError),
        (call_what_is_gone, AttributeError),
        (assert_itself, AssertionError),
        (fail_in_production, AssertionError),
    ],
)
def test_nothing_else_counts(
    plant: planting.Plant, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if the machine then fails in `teardown`, by an assertion."""
    with pytest.raises(kind):
        fault(plant).must_be_found(monkeypatch)


def test_renames_are_noticed_by_a_machine_that_asserts(monkeypatch: pytest.MonkeyPatch) -> None:
    fault(change).must_notice_renames(monkeypatch)


def test_a_machine_that_takes_any_exception_for_a_fault_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        fault(change, machine=Lax).must_notice_renames(monkeypatch)


def test_examples_that_are_tried_do_not_depend_on_how_many_are_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planted = fault(change)
    planted.plant(monkeypatch)
    tried, failure = planted.search_for(1000)
    assert tried > 1
    assert planting.counts(failure) if failure else False
    assert planted.search_for(tried)[0] == tried
    assert planted.search_for(tried - 1) == (tried - 1, None)


def test_what_is_not_found_says_how_to_measure_again(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = fault(change_nothing, examples=11)
    with pytest.raises(NotFoundError, match=r"in 33 examples; 11 are recorded.*--write change_nothing$"):
        planted.must_be_found(monkeypatch)


def test_nothing_that_fails_is_no_fault() -> None:
    with pytest.raises(NotFoundError), must_show():
        pass


def test_what_is_measured_is_recorded(tmp_path: Path) -> None:
    path = tmp_path / "faults.py"
    path.write_text("@FAULTS.found(examples=1)\ndef a(patch):\n\n@FAULTS.found(examples=2)\ndef b(patch):\n")
    plant: Any = SimpleNamespace(__name__="b", __code__=SimpleNamespace(co_filename=str(path)))
    for needed in (5, 34):
        planting.record(Fault(plant), Measured([1, needed], first_seed=3000))
    first, second = path.read_text().split("\n\n")
    assert first == "@FAULTS.found(examples=1)\ndef a(patch):"
    assert second == "@FAULTS.found(examples=34, first_seed=3000)\ndef b(patch):\n"


def test_all_seeds_find_a_fault_that_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planting, "MEASUREMENTS", 3)
    planted = fault(change)
    needed, first_seed = planting.measure(planted)
    assert len(needed) == 3
    assert needed == sorted(needed)
    planted.plant(monkeypatch)
    assert planted.search_for(1000, first_seed)[0] == needed[0]
