"""Versions in the core: which processes a batch is for, and what becomes of requests whose version is
gone."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from carpool.messages.batches import Dispatch
from carpool.messages.requests import SequencePart
from carpool.messages.results import Refusal
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.traffic import Division
from carpool_batcher.core.decisions import Abandon
from carpool_batcher.core.scheduler import Decision, Scheduler
from carpool_batcher.core.versions import MISSED_MAX, VERSION_AWAITED_US
from support.scheduler_harness import MS, run, settle

AWAITED = VERSION_AWAITED_US // MS


class Served:
    """A scheduler whose processes have versions. `poll` launches what is dispatched."""

    def __init__(self, kind: ModelKind = ModelKind.PLAIN, **settings: Any) -> None:
        self.scheduler = Scheduler(ModelSettings(**settings), kind=kind)
        self.numbers = iter(range(1, 1_000_000))
        self.live: list[str] = []

    def processes(self, *versions: str, at: float = 0, draining: tuple[str, ...] = ()) -> None:
        """Processes of these versions are alive: `2a` is one of version 2."""
        of_each = {process: process.rstrip("abc").removeprefix("-") for process in versions}
        self.scheduler.set_processes(versions, draining, of_each, int(at * MS))

    def share(self, at: float = 0, **shares: int) -> None:
        """`v2=10`: ten per cent for version 2."""
        of_versions = {name.removeprefix("v"): share for name, share in shares.items()}
        self.scheduler.divide(Division(of_versions, self.scheduler.versions.processes), int(at * MS))

    def offer(self, names: str, at: float = 0, **fields: Any) -> list[Refusal]:
        return self.scheduler.offer(run(names, at, f"{next(self.numbers)}-0", **fields), int(at * MS))

    def poll(self, at: float = 0) -> list[Decision]:
        decisions = self.scheduler.poll(int(at * MS))
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self.scheduler.in_flight.launch(f"b{next(self.numbers)}", decision, int(at * MS))
        return decisions

    def dispatched(self, at: float = 0) -> list[tuple[str, str]]:
        """The batches of a poll: the version that each is for, marked if it is asked for, and its
        requests."""
        return [
            (f"{one.version}{'!' * one.is_asked}", " ".join(n for r in one.runs for n in r.correlation_ids))
            for one in self.poll(at)
            if isinstance(one, Dispatch)
        ]

    def settle_all(self, at: float = 0) -> None:
        for batch_id in list(self.scheduler.in_flight.batches):
            settle(self.scheduler, batch_id, 0, int(at * MS))


def test_without_versions_a_batch_is_for_any_process() -> None:
    served = Served()
    served.processes("1a", "2a")
    served.offer("x")
    served.offer("y", lane="l")
    assert served.dispatched() == [("", "x"), ("", "y")]


def test_a_version_that_is_asked_for_has_batches_and_processes_of_its_own() -> None:
    served = Served(max_batch_size=2)
    served.processes("1a", "2a")
    for number in range(5):
        served.offer(f"one{number}", version="1")
    served.offer("two", at=1, version="2")
    served.offer("any", at=2)
    assert served.dispatched(at=2) == [("1!", "one0 one1"), ("1!", "one2 one3"), ("2!", "two")]
    assert served.dispatched(at=2) == []  # `any` waits until a process is free
    served.settle_all(at=3)
    assert sorted(served.dispatched(at=3)) == [("1!", "one4"), ("2", "any")]


def test_a_busy_version_does_not_keep_another_one_idle() -> None:
    """Four batches in flight, all for version 1, and two processes: that of version 2 is idle."""
    served = Served(max_batch_size=1)
    served.processes("1a", "2a")
    for number in range(4):
        served.offer(f"one{number}", version="1")
    assert len(served.dispatched()) == 2
    served.offer("any")
    assert served.dispatched() == [("2", "any")]


def test_the_first_of_versions_that_any_may_execute_is_the_one_with_the_least_in_flight() -> None:
    served = Served(max_batch_size=1)
    served.processes("1a", "2a", "2b", "2c")
    served.offer("asked", version="1")
    served.dispatched()
    for number in range(7):
        served.offer(f"any{number}")
    assert Counter(version for version, _ in served.dispatched()) == {"2": 6, "1": 1}


def test_an_older_request_for_any_version_comes_before_a_later_one_that_asks() -> None:
    served = Served()
    served.processes("1a", "2a")
    for version in "12":
        served.offer(f"holds {version}", version=version)
    assert len(served.dispatched()) == 2
    served.offer("any", at=1)
    served.offer("asks", at=2, version="1")
    settle(served.scheduler, next(iter(served.scheduler.in_flight.batches)), 0, 3 * MS)
    assert served.dispatched(at=3) == [("1", "any")]


def test_only_the_version_that_lives_serves_what_asks_for_it_beside_the_rest() -> None:
    served = Served()
    served.processes("1a", "1b")
    served.offer("asks", version="1")
    served.offer("any")
    assert sorted(served.dispatched()) == [("", "any"), ("1!", "asks")]


def test_shares_divide_requests_and_a_sequence_of_ids_goes_to_the_same_version() -> None:
    served = Served(max_batch_size=1000, max_queue_size=100_000)
    served.processes("1a", "2a")
    served.share(v2=20)
    names = [f"n{number}" for number in range(500)]
    served.offer(" ".join(names), rows=True)
    first = {name: version for version, batch in served.dispatched() for name in batch.split()}
    served.settle_all()
    for name in names:
        served.offer(name)
    again = {name: version for version, batch in served.dispatched() for name in batch.split()}
    assert first == again and first.keys() == set(names)
    assert 60 < Counter(first.values())["2"] < 140


def test_under_preserve_ordering_a_divided_run_keeps_its_order() -> None:
    served = Served(preserve_ordering=True)
    served.processes("1a", "2a")
    served.share(v2=50)
    one = run(" ".join(f"n{number}" for number in range(40)), rows=True)
    served.scheduler.offer(one, 0)
    names = [name for part in one.entry.runs for name in part.correlation_ids]
    assert names == [f"n{number}" for number in range(40)] and len(one.entry.runs) > 2


def test_promotion_moves_what_waits() -> None:
    served = Served(max_batch_size=1)
    served.processes("1a", "2a")
    served.share(v2=0)
    for number in range(9):
        served.offer(f"n{number}", expiration=10_000)
    assert [version for version, _ in served.dispatched()] == ["1", "1"]
    served.share(v2=100)
    assert [version for version, _ in served.dispatched()] == ["2", "2"]
    served.share()
    served.settle_all()
    assert [version for version, _ in served.dispatched()] == ["", "", "", ""]
    served.settle_all()
    assert len(served.dispatched()) == 1
    assert served.scheduler.queue.count == 0 and list(served.scheduler.queue.lanes) == [""]


def test_what_a_share_has_goes_to_others_when_its_version_is_gone() -> None:
    served = Served()
    served.processes("1a", "2a")
    served.share(v2=100)
    served.offer("a b")
    served.processes("1a")
    served.share(v2=100)
    assert served.dispatched() == [("1", "a b")]


def test_a_version_that_nobody_has_is_refused_after_a_while_and_then_at_once() -> None:
    served = Served()
    served.processes("1a", "3a")
    served.offer("x", version="2")
    assert served.poll() == []
    assert served.scheduler.wake_at_us() == VERSION_AWAITED_US
    assert served.poll(at=AWAITED - 1) == []
    (refused,) = served.poll(at=AWAITED)
    assert isinstance(refused, Refusal)
    assert (refused.status, refused.reason) == ("NOT_FOUND", "version")
    assert "no worker has version '2'" in refused.detail and "have workers: 1, 3" in refused.detail
    assert served.scheduler.wake_at_us() is None
    served.offer("y", at=AWAITED + 1, version="2")
    assert served.poll(at=AWAITED + 1) == []  # a process may have come
    served.processes("1a", "3a", at=AWAITED + 1)
    assert [type(one) for one in served.poll(at=AWAITED + 1)] == [Refusal]
    served.processes("1a", "2a", at=AWAITED + 2)
    served.offer("z", at=AWAITED + 3, version="2")
    assert served.dispatched(at=AWAITED + 3) == [("2!", "z")]


def test_more_versions_than_are_awaited_are_refused_at_once_and_none_is_forgotten() -> None:
    served = Served(max_queue_size=10 * MISSED_MAX)
    served.processes("1a")
    names = [f"r{number}" for number in range(MISSED_MAX + 50)]
    for at, name in enumerate(names):
        served.offer(name, version=f"v{at}")
    early = refused_names(served.poll())
    assert len(early) == 50
    assert sorted(early + refused_names(served.poll(at=AWAITED))) == sorted(names)
    served.offer("late", at=3 * AWAITED, version="new")
    served.processes("1a", at=3 * AWAITED)
    assert refused_names(served.poll(at=3 * AWAITED)) == []  # the others are forgotten, so it is awaited
    assert refused_names(served.poll(at=4 * AWAITED)) == ["late"]


def refused_names(decisions: list[Decision]) -> list[str]:
    return [name for one in decisions if isinstance(one, Refusal) for name in one.correlation_ids]


def test_without_any_process_requests_wait_whatever_they_ask_for() -> None:
    served = Served()
    served.processes("1a")
    served.processes(at=1)
    served.offer("x", at=1, version="2")
    assert served.poll(at=10 * AWAITED) == []
    served.processes("1a", at=10 * AWAITED)  # version 2 may come within a moment, too
    assert served.poll(at=10 * AWAITED) == []
    served.processes("1a", "2a", at=10 * AWAITED + 1)
    assert served.dispatched(at=10 * AWAITED + 1) == [("2!", "x")]


def test_batches_in_flight_for_a_version_that_is_gone_occupy_no_other_and_are_abandoned() -> None:
    served = Served(max_batch_size=1)
    served.processes("1a", "2a")
    served.offer("x", version="2")
    served.offer("y", version="2")
    assert len(served.dispatched()) == 2
    served.processes("1a", at=1)
    served.offer("z", at=1)
    assert served.dispatched(at=1) == [("", "z")]
    abandoned = [one for one in served.poll(at=AWAITED + 1) if isinstance(one, Abandon)]
    assert [one.runs[0].correlation_ids for one in abandoned] == [["x"], ["y"]]
    for one in abandoned:
        served.scheduler.in_flight.forget(one.batch_id, AWAITED + 1)
    assert served.poll(at=AWAITED + 2) == [] and served.scheduler.wake_at_us() is None


def test_a_batch_in_the_hands_of_a_draining_process_is_not_abandoned() -> None:
    served = Served()
    served.processes("1a", "2a")
    served.offer("x", version="2")
    served.poll()
    served.scheduler.set_in_hand(list(served.scheduler.in_flight.batches), 0)
    served.processes("1a", "2a", at=1, draining=("2a",))
    assert served.poll(at=2 * AWAITED) == [] and served.scheduler.wake_at_us() is None
    served.scheduler.set_in_hand([], 2 * VERSION_AWAITED_US)  # it was killed
    assert served.poll(at=2 * AWAITED) == []
    assert [type(one) for one in served.poll(at=3 * AWAITED)] == [Abandon]


def test_a_draining_process_takes_nothing_and_what_it_has_occupies_no_other() -> None:
    served = Served(max_batch_size=1)
    served.processes("-a")
    served.offer("held")
    assert len(served.dispatched()) == 1
    served.scheduler.set_in_hand(list(served.scheduler.in_flight.batches), 0)
    served.processes("-a", draining=("-a",))
    served.offer("waits")
    assert served.dispatched() == [] and served.scheduler.model_processes == 0
    served.processes("-a", "-b", draining=("-a",))
    served.offer("next")
    assert served.dispatched() == [("", "waits"), ("", "next")]  # one executing, one ahead


def test_a_request_with_several_names_of_a_stepping_model_has_slots_of_its_version() -> None:
    served = Served(ModelKind.STEPPING, max_batch_size=2)
    served.processes("1a", "2a")
    for number in range(6):
        served.offer(f"n{number}", version="2")
    taken = len(served.dispatched())
    assert 2 <= taken <= 3
    served.offer("other", version="1")
    assert served.dispatched() == [("1!", "other")]


def test_each_request_of_a_sequence_goes_to_the_version_of_the_sequence() -> None:
    served = Served(ModelKind.STATEFUL)
    served.processes("1a", "2a")
    served.share(v2=50)
    served.scheduler.sequences.complete()
    division = Division({"2": 50}, ["1", "2"])
    for sequence in [f"s{number}" for number in range(20)]:
        for at, name in enumerate(("first", "second", "third")):
            part = SequencePart(sequence, at == 0, at == 2, None, SequencePart.place_of(f"{at + 1}-0", 0))
            served.offer(f"{sequence}-{name}", sequence=part)
    found: dict[str, list[str]] = {}
    while batches := served.dispatched():
        for version, names in batches:
            for name in names.split():
                found.setdefault(name.partition("-")[0], []).append(version)
        served.settle_all()
    assert found == {sequence: [division.version_of(sequence)] * 3 for sequence in found}
    assert len(found) == 20 and {versions[0] for versions in found.values()} == {"1", "2"}


@pytest.mark.parametrize("kind", [ModelKind.BOUND])
def test_a_bound_model_has_one_version_at_a_time(kind: ModelKind) -> None:
    served = Served(kind)
    served.processes("1a")
    (refused,) = served.scheduler.offer(sequence_start("s", version="1"), 0)
    assert refused.status == "UNIMPLEMENTED" and refused.detail.startswith("version: ")


def sequence_start(name: str, **fields: Any) -> Any:
    return run("x", sequence=SequencePart(name, True, False, None, SequencePart.place_of("1-0", 0)), **fields)
