"""A batcher that dies between two scripts of a turn: the next one serves no sequence with a gap."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice
from typing import Any, Final
from unittest import mock

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.messages.sequences import SequenceChange
from carpool_batcher import refusals
from carpool_batcher.core.sequences.sequences import Sequences
from carpool_batcher.refusals import Part, divide
from support.planting import Fault, Faults, Patch, of_property
from support.sequence_harness import MS, SequenceHarness

EXPIRATION_MS: Final = 20

Request = tuple[str, bool, bool, bool]  # sequence; whether it starts it, expires, and is withdrawn


class DividedTurns(SequenceHarness):
    """A harness whose refusals are answered by the turn, part by part, as the batcher writes them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._refused: list[Refusal] = []
        self._is_writing = False

    def _answer(self, refused: Refusal) -> None:
        if self._is_writing:
            super()._answer(refused)
        else:
            self._refused.append(refused)

    def poll(self, at: float = 0) -> list[list[str]]:
        self._is_writing = True
        for refused in self._refused:
            self._answer(refused)
        self._refused = []
        batches = super().poll(at)
        self._is_writing = False
        return batches

    def turn_and_die(self, parts_max: int, at: float) -> None:
        """A turn of which only the first parts are written."""
        now_us = int(at * MS)
        decisions = self.scheduler.poll(now_us)
        refused = self._refused + [one for one in decisions if isinstance(one, Refusal)]
        changes = [one for one in decisions if isinstance(one, SequenceChange)]
        for part in islice(filter(None, divide(refused, (), changes, ())), parts_max):
            self._write(part, now_us)
        self._refused = []

    def _write(self, part: Part, now_us: int) -> None:
        self._is_writing = True
        for refused in part.refusals:
            self._answer(refused)
        for change in part.changes:
            self.store.change(change, now_us)
        self._is_writing = False


@mock.patch.object(refusals, "PART_KEYS", 1)
def play(requests: list[Request], serves: int, parts_max: int) -> None:
    """Serve some of the requests, then die in a turn that refuses others, and let another batcher go on."""
    harness = DividedTurns(max_candidate_sequences=2, max_batch_size=1)
    names = []
    for number, (sequence_id, starts, expires, _) in enumerate(requests):
        names.append(f"{sequence_id}{number}")
        harness.send(names[-1], start=starts, expiration=EXPIRATION_MS if expires else None)
    for _ in range(serves):
        harness.poll()
        harness.settle()
    waiting = [name for name, (*_, is_withdrawn) in zip(names, requests, strict=True) if is_withdrawn]
    harness.withdraw(*[name for name in waiting if name in harness.waiting])
    harness.turn_and_die(parts_max, EXPIRATION_MS + 1)
    harness.take_over(EXPIRATION_MS + 1)
    harness.run(EXPIRATION_MS + 1)
    for name, made in harness.ok.items():
        assert made == (*earlier(harness, names, name), name)


def earlier(harness: SequenceHarness, names: list[str], name: str) -> list[str]:
    """The requests of its sequence from the last start up to before this one."""
    of_sequence = [other for other in names[: names.index(name)] if other[0] == name[0]]
    starts = [at for at, other in enumerate(of_sequence) if _part(harness.runs[other]).starts]
    if _part(harness.runs[name]).starts:
        return []
    return of_sequence[starts[-1] :] if starts else of_sequence


def _part(run: Run) -> Any:
    assert run.sequence is not None
    return run.sequence


requests_of_two = st.lists(
    st.tuples(
        st.sampled_from("aab"),
        st.sampled_from((False, False, True)),
        st.sampled_from((False, False, True)),
        st.sampled_from((False, False, True)),
    ),
    min_size=3,
    max_size=10,
)
dying = given(requests=requests_of_two, serves=st.integers(0, 3), parts_max=st.integers(0, 6))


@hypothesis_settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@dying
def test_no_sequence_is_served_with_a_gap(requests: list[Request], serves: int, parts_max: int) -> None:
    play(requests, serves, parts_max)


# --- planted faults ----------------------------------------------------------------------------------------

FAULTS: Final = Faults(of_property(dying, play))


@FAULTS.found(examples=87, first_seed=57000)
def write_changes_last(patch: Patch) -> None:
    def part_of(together: Any, by_sequence: Any) -> Generator[None, None, Part]:
        return Part(_refusals(together))
        yield

    patch.setattr(refusals, "_part_of", part_of)


@FAULTS.found(examples=299, first_seed=3000)
def write_in_another_order(patch: Patch) -> None:
    """What stands last comes first."""

    def packed(by_entry: Iterable[Any]) -> Any:
        *others, last = by_entry
        return original([last, *others])

    original = refusals._packed
    patch.setattr(refusals, "_packed", packed)


@FAULTS.found(examples=172, first_seed=42000)
def know_only_the_last_break(patch: Patch) -> None:
    original = Sequences.decide

    def decide(self: Sequences, now_us: int) -> Any:
        for decided in original(self, now_us):
            yield decided._replace(changes=refusals.without_earlier_breaks(decided.changes))

    patch.setattr(Sequences, "decide", decide)


def _refusals(together: Any) -> list[Refusal]:
    return [refusal for of_entry in together for refusal in of_entry.refusals]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_be_found(monkeypatch)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_renamed_code_is_not_taken_for_a_fault(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault.must_notice_renames(monkeypatch)
