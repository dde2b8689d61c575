"""Sequences of a bound model in the production scheduler under random events, with processes that come, drain
and die.

The promises are those of `test_sequences_machine`. What is new is where a request goes: each process has its
states inside, and fails an assertion when a request comes for a sequence that it does not have, or a start
for which it has no slot (`support.bound_harness`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from carpool.messages.batches import Dispatch
from carpool.messages.sequences import SequenceChange
from simulation.test_sequences_machine import IDLE_MS, Observed, SequencesMachine, part_of
from support.bound_harness import BoundHarness

PROCESSES_MAX = 3


class ObservedBound(BoundHarness):
    """A harness that also notes which processes the batcher knows, and which of them to drain."""

    def __init__(self, *names: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.known = set(self.processes)
        self.known_to_drain: set[str] = set()
        self.lost: set[str] = set()  # requests that a process had served or was to serve when it died
        self.idle_after: dict[str, list[str]] = {}

    def changed(self, change: SequenceChange) -> None:
        Observed.changed(self, change)  # type: ignore[arg-type]

    def compare(self) -> None:
        super().compare()
        self.known, self.known_to_drain = set(self.processes), set(self.draining)

    def take_over(
        self,
        at: float = 0,
        reading: Iterable[str] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        self.known, self.known_to_drain = set(self.processes), set(self.draining)
        super().take_over(at, reading, meanwhile)

    def die(self, name: str) -> None:
        """A process ends, and the states in it are lost."""
        self.lost |= {request for request, process in self.served_by.items() if process == name}
        for batch_id, process in self.process_of.items():
            if process == name:
                self.lost.update(map(self.name_of, self.in_flight[batch_id]))
        self.leave(name)

    def dispatched(self, batch_id: str, dispatch: Dispatch) -> None:
        super().dispatched(batch_id, dispatch)
        assert dispatch.process in self.known, "it is gone"
        if dispatch.process not in self.processes:
            self.lost.update(map(self.name_of, dispatch.runs))
        if dispatch.process in self.known_to_drain:
            assert not any(part_of(run).starts for run in dispatch.runs), "it drains"


class BoundMachine(SequencesMachine):
    """One batcher after another, and the processes of a bound model."""

    harness: ObservedBound  # type: ignore[assignment]

    @initialize(
        slots=st.sampled_from((1, 2, 8)),
        processes=st.sampled_from((1, 2)),
        queue_size=st.sampled_from((3, 100, 100)),
        action=st.sampled_from(("reject", "reject", "delay")),
    )
    def begin(self, slots: int, processes: int, queue_size: int, action: str) -> None:
        self.number_of_processes = 0
        self.harness = ObservedBound(
            *[self.new_name() for _ in range(processes)],
            slots=slots,
            max_sequence_idle_ms=IDLE_MS,
            max_queue_size=queue_size,
            expiration_action=action,
        )

    def new_name(self) -> str:
        self.number_of_processes += 1
        return f"p{self.number_of_processes}"

    # --- processes -----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.harness.processes) < PROCESSES_MAX)
    @rule(polls=st.booleans())
    def join(self, polls: bool) -> None:
        self.harness.join(self.new_name())
        self.harness.compare()
        self.turn(polls)

    @precondition(lambda self: self.harness.processes)
    @rule(data=st.data(), is_noticed=st.booleans(), polls=st.booleans())
    def die(self, data: st.DataObject, is_noticed: bool, polls: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.harness.processes)))
        self.harness.die(name)
        if is_noticed:
            self.harness.compare()
        self.turn(polls)

    @precondition(lambda self: self.harness.processes.keys() - self.harness.draining)
    @rule(data=st.data(), polls=st.booleans())
    def drain(self, data: st.DataObject, polls: bool) -> None:
        names = sorted(self.harness.processes.keys() - self.harness.draining)
        self.harness.drain(data.draw(st.sampled_from(names)))
        self.harness.compare()
        self.turn(polls)

    @precondition(lambda self: any(map(self.has_drained, self.harness.draining)))
    @rule(data=st.data(), polls=st.booleans())
    def leave(self, data: st.DataObject, polls: bool) -> None:
        names = sorted(filter(self.has_drained, self.harness.draining))
        self.harness.leave(data.draw(st.sampled_from(names)))
        self.harness.compare()
        self.turn(polls)

    def has_drained(self, name: str) -> bool:
        process = self.harness.processes[name]
        return not (process.states or process.inbox)

    # --- checks --------------------------------------------------------------------------------------------

    def check_space(self) -> None:
        self.harness.read_inboxes()

    def has_failed_before(self, name: str) -> bool:
        return super().has_failed_before(name) or not self.harness.lost.isdisjoint(self.earlier(name))

    def is_full(self) -> bool:
        """Whether no process that begins sequences has a free slot."""
        self.harness.read_inboxes()
        beginning = [
            process for name, process in self.harness.processes.items() if name not in self.harness.draining
        ]
        return all(len(process.states) >= process.slots for process in beginning)

    def check_end(self) -> None:
        """Processes have no states of sequences that ended."""
        assert all(map(self.has_drained, self.harness.processes))

    def serve_all(self) -> None:
        self.harness.compare()
        super().serve_all()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.join(self.new_name())
        super().teardown()


BoundMachine.TestCase.settings = SequencesMachine.TestCase.settings
TestBoundSequences = BoundMachine.TestCase
