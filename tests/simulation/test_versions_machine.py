"""Versions behind one queue, in virtual time, under random events: who asks is served by whom it asks for.

The reference knows of each request only what it asks for, and of each batch which requests it has. Execution
times are never learned here, so that capacity follows from numbers of batches alone.
"""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Entry, Run
from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool.rows import Rows
from carpool.wire.traffic import Division
from carpool_batcher.core.decisions import Abandon
from carpool_batcher.core.scheduler import Decision, Scheduler
from carpool_batcher.core.versions import VERSION_AWAITED_US
from support.scheduler_harness import settle

VERSIONS = ("1", "2", "3")
START_US = 1_000_000_000
IN_FLIGHT_MAX = 2  # batches for each process: one that is executed, and one ahead

processes = st.dictionaries(st.sampled_from(("", *VERSIONS)), st.integers(1, 2), max_size=3)
shares = st.one_of(
    st.just({}),
    st.dictionaries(st.sampled_from(VERSIONS), st.sampled_from((0, 30, 50)), min_size=1, max_size=2),
    st.builds(lambda version: {version: 100}, st.sampled_from(VERSIONS)),
)
numbers = st.integers(0, 1000)


class VersionsMachine(RuleBasedStateMachine):
    """`waiting`: the version that each waiting request asks for, '' if none. `in_flight`: of each batch its
    version, whether that is asked for, and its requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now_us = START_US
        self.number = 0
        self.waiting: dict[str, str] = {}
        self.arrived_us: dict[str, int] = {}
        self.known_us = START_US  # when the batcher looked which processes there are
        self.in_flight: dict[str, tuple[str, bool, list[str]]] = {}
        self.processes: dict[str, int] = {}
        self.shares: dict[str, int] = {}
        self.missing_since_us: dict[str, int] = {}
        self.has_asked = False
        self.answered: set[str] = set()

    @initialize(size=st.sampled_from((1, 3, 100)), ordered=st.booleans(), living=processes)
    def begin(self, size: int, ordered: bool, living: dict[str, int]) -> None:
        self.settings = ModelSettings(max_batch_size=size, preserve_ordering=ordered)
        self.scheduler = Scheduler(self.settings)
        self.processes_change(living)

    # --- events --------------------------------------------------------------------------------------------

    @rule(asks=st.sampled_from(("", "", *VERSIONS)), count=st.integers(1, 6), lane=st.sampled_from(("", "l")))
    def offer(self, asks: str, count: int, lane: str) -> None:
        self.number += 1
        names = [f"r{self.number}.{at}" for at in range(count)]
        entry = Entry(f"{self.number}-0", self.now_us)
        run = Run(entry, names, Rows(b"", b"x" * count, 1), arrival_us=self.now_us, lane=lane, version=asks)
        entry.runs.append(run)
        self.waiting |= dict.fromkeys(names, asks)
        self.arrived_us |= dict.fromkeys(names, self.now_us)
        self.has_asked = self.has_asked or bool(asks)
        assert self.scheduler.offer(run, self.now_us) == []
        parts = [name for part in entry.runs for name in part.correlation_ids]
        assert parts == names if self.settings.preserve_ordering else sorted(parts) == names
        self.poll()

    @rule(living=processes)
    def processes_change(self, living: dict[str, int]) -> None:
        """Workers come and go. Batches for a version that has none any more go to others, in a new session,
        unless they are asked for."""
        if living and not self.processes:
            self.missing_since_us = dict.fromkeys(self.missing_since_us, self.now_us)
        self.processes = living
        self._tell()
        if any(not self.in_flight[name][1] for name in self.scheduler.orphans()):
            self.take_over()
        self.poll()

    @rule(given=shares)
    def shares_change(self, given: dict[str, int]) -> None:
        self.shares = given
        self._tell()
        self.poll()

    @rule(choice=numbers)
    @precondition(lambda self: self.in_flight)
    def settle(self, choice: int) -> None:
        batch_id = list(self.in_flight)[choice % len(self.in_flight)]
        self.answered.update(self.in_flight.pop(batch_id)[2])
        settle(self.scheduler, batch_id, 0, self.now_us)
        self.poll()

    @rule(passes_us=st.sampled_from((1, 1_000_000, 3_000_000, VERSION_AWAITED_US)))
    def time_passes(self, passes_us: int) -> None:
        end_us = self.now_us + passes_us
        for _ in range(100):
            wake_us = self.scheduler.wake_at_us()
            if wake_us is None or wake_us > end_us:
                break
            self.now_us = max(self.now_us, wake_us)
            self.poll()
        else:
            raise AssertionError("wake-up without effect")
        self.now_us = end_us
        self._tell()
        self.poll()

    @rule()
    def take_over(self) -> None:
        """Another batcher, or another session, which reads everything."""
        living = {version for version, number in self.processes.items() if number}
        waiting, self.waiting = self.waiting, {}
        self.scheduler = Scheduler(self.settings)
        self._tell()
        in_flight, self.in_flight = self.in_flight, {}
        self.has_asked = any(asked for _, asked, _ in in_flight.values())
        for batch_id, (version, is_asked, names) in in_flight.items():
            is_orphan = version and living and version not in living and not is_asked
            new_id, of_version = (f"{batch_id}'", "") if is_orphan else (batch_id, version)
            self.in_flight[new_id] = of_version, is_asked, names
            run = Run(Entry("0-0", START_US), list(names), [])
            dispatch = Dispatch([run], "idle", "", version=of_version, is_asked=is_asked)
            self.scheduler.in_flight.adopt(new_id, dispatch, START_US)
        self.scheduler.adopted(self.now_us)
        # A batcher does not know since when another one missed a version.
        self.missing_since_us.clear()
        for name, asks in waiting.items():
            self.number += 1
            entry = Entry(f"{self.number}-0", self.arrived_us[name])
            entry.runs.append(run := Run(entry, [name], [b"x"], arrival_us=START_US, version=asks))
            self.waiting[name] = asks
            self.has_asked = self.has_asked or bool(asks)
            self.scheduler.offer(run, self.now_us)
        self.poll()

    def _tell(self) -> None:
        names = [f"{version}/{at}" for version, number in self.processes.items() for at in range(number)]
        versions = {name: name.partition("/")[0] for name in names}
        self.known_us = self.now_us
        self.scheduler.set_processes(names, (), versions, self.now_us)
        self.scheduler.divide(Division(self.shares, self.processes), self.now_us)

    # --- polls ---------------------------------------------------------------------------------------------

    def poll(self) -> None:
        self._miss()
        decisions = self.scheduler.poll(self.now_us)
        self._check_refusals(decisions)
        for decision in decisions:
            if isinstance(decision, Dispatch):
                self._check_dispatch(decision)
                self._launch(decision)
        self._check_that_nobody_is_idle()
        wake_us = self.scheduler.wake_at_us()
        missed = [asks for asks in self._asked() if self._is_missed(asks) and not self._is_overdue(asks)]
        due_us = [self._refused_from_us(asks) for asks in missed]
        assert not due_us or (wake_us is not None and wake_us <= min(due_us))

    def _launch(self, dispatch: Dispatch) -> None:
        self.number += 1
        names = [name for run in dispatch.runs for name in run.correlation_ids]
        batch_id = f"b{self.number}"
        self.scheduler.in_flight.launch(batch_id, dispatch, self.now_us)
        for name in names:
            del self.waiting[name]
        self.in_flight[batch_id] = dispatch.version, dispatch.is_asked, names

    def _check_dispatch(self, dispatch: Dispatch) -> None:
        version, living = dispatch.version, {one for one, number in self.processes.items() if number}
        asked = {self.waiting[name] for run in dispatch.runs for name in run.correlation_ids}
        assert asked == ({version} if dispatch.is_asked else {""}), "no other request is in the batch"
        assert not version or version in living
        division = Division(self.shares, living)
        if not dispatch.is_asked and division:
            wanted = {division.version_of(name) for run in dispatch.runs for name in run.correlation_ids}
            assert wanted == {version}
        if self._are_told_apart():
            assert version or "" in living, "it is for the processes of one version"
            assert self._taken(version) < IN_FLIGHT_MAX * self.processes[version]
        elif not dispatch.is_asked and not division:
            assert not version
        assert sum(self.processes.values()) > 0

    def _check_refusals(self, decisions: list[Decision]) -> None:
        """Those are refused, and no others, whose version was missing for long enough."""
        expected = {
            name
            for name, asks in self.waiting.items()
            if self._is_missed(asks) and self._is_overdue(asks) and self.arrived_us[name] <= self.known_us
        }
        refused = [one for one in decisions if isinstance(one, Refusal)]
        assert {one.status for one in refused} <= {"NOT_FOUND"}
        assert {name for one in refused for name in one.correlation_ids} == expected
        for name in expected:
            del self.waiting[name]
        self.answered |= expected
        abandoned = {one.batch_id for one in decisions if isinstance(one, Abandon)}
        assert abandoned == {
            batch_id
            for batch_id, (version, is_asked, _) in self.in_flight.items()
            if is_asked and self._is_missed(version) and self._is_overdue(version)
        }
        for batch_id in abandoned:
            self.answered.update(self.in_flight.pop(batch_id)[2])
            self.scheduler.in_flight.forget(batch_id, self.now_us)

    def _check_that_nobody_is_idle(self) -> None:
        """No request waits that an idle process could take."""
        division = Division(self.shares, self.processes)
        apart = self._are_told_apart()
        idle = {version for version in self.processes if self._is_idle(version)}
        for name, asks in self.waiting.items():
            wanted = asks or (division.version_of(name) if division else "")
            if apart:
                assert wanted not in idle if wanted else not idle
            elif not wanted or wanted in self.processes:
                taken = sum(not self._is_apart(version) for version, _, _ in self.in_flight.values())
                assert taken >= sum(self.processes.values())

    # --- the reference -------------------------------------------------------------------------------------

    def _are_told_apart(self) -> bool:
        division = Division(self.shares, self.processes)
        return len(self.processes) > 1 and (self.has_asked or bool(division))

    def _taken(self, version: str) -> int:
        """At least how many batches the processes of a version have: those that are for it alone."""
        return sum(version == of_batch != "" for of_batch, _, _ in self.in_flight.values())

    def _is_idle(self, version: str) -> bool:
        """Whether a version surely has an idle process, whoever took what any may take."""
        return all(of_batch and of_batch != version for of_batch, _, _ in self.in_flight.values())

    def _is_apart(self, version: str) -> bool:
        return bool(version) and version not in self.processes

    def _asked(self) -> set[str]:
        in_flight = {version for version, is_asked, _ in self.in_flight.values() if is_asked}
        return {asks for asks in self.waiting.values() if asks} | in_flight

    def _miss(self) -> None:
        for version in self.missing_since_us.keys() & self.processes.keys():
            del self.missing_since_us[version]
        for version in self._asked() - self.processes.keys() - self.missing_since_us.keys():
            self.missing_since_us[version] = self.now_us

    def _is_missed(self, version: str) -> bool:
        return bool(self.processes) and version in self.missing_since_us

    def _refused_from_us(self, version: str) -> int:
        return self.missing_since_us[version] + VERSION_AWAITED_US

    def _is_overdue(self, version: str) -> bool:
        return self._refused_from_us(version) <= self.now_us

    # --- invariants ----------------------------------------------------------------------------------------

    @invariant()
    def each_request_is_in_one_place(self) -> None:
        waiting = [run for lane in self.scheduler.queue.lanes.values() for run in lane]
        names = [name for run in waiting for name in run.correlation_ids]
        assert len(names) == len(set(names)) and set(names) == self.waiting.keys()
        assert self.scheduler.queue.count == len(names)
        assert list(self.scheduler.in_flight.batches) == list(self.in_flight)
        in_flight = {name for _, _, names in self.in_flight.values() for name in names}
        assert not in_flight & self.waiting.keys() and not self.answered & self.waiting.keys()

    @invariant()
    def memory_is_bounded(self) -> None:
        queue = self.scheduler.queue
        assert len(queue.lanes) <= 1 + len(self.waiting)
        assert all(queue.lanes[name].count for names in queue.asked_lanes.values() for name in names)

    def teardown(self) -> None:
        """Once every version has a process, all are served."""
        if not hasattr(self, "scheduler"):
            return
        self.processes_change(dict.fromkeys(VERSIONS, 1))
        for _ in range(10 + 4 * self.number):
            while self.in_flight:
                self.settle(0)
            if not self.waiting:
                return
            self.poll()
        raise AssertionError(f"{len(self.waiting)} wait for ever")


TestVersions = VersionsMachine.TestCase
TestVersions.settings = hypothesis_settings(max_examples=80, stateful_step_count=30, deadline=None)
