"""The production Scheduler of a bound model in virtual time, and model processes with slots and inboxes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run, SequencePart
from carpool.messages.sequences import KeptSequence, SequenceChange, SlotFreed
from carpool.model_settings import ModelKind
from carpool_batcher.core.scheduler import Scheduler
from support.scheduler_harness import settle
from support.sequence_harness import MS, SequenceHarness


class BoundProcess:
    """A model process. Its states are inside: each is the correlation IDs of the requests that made it."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.states: dict[str, tuple[str, ...]] = {}
        self.inbox: list[str | list[Run]] = []  # the IDs of sequences that ended, and batches
        self.ended: list[str] = []

    def read(self) -> list[Run] | None:
        """Take what the inbox has up to its first batch, and that batch."""
        while self.inbox:
            message = self.inbox.pop(0)
            if not isinstance(message, str):
                return message
            self.end(message)
        return None

    def end(self, sequence_id: str) -> None:
        if self.states.pop(sequence_id, None) is not None:
            self.ended.append(sequence_id)

    def execute(self, run: Run, *, fails: bool) -> tuple[str, ...] | None:
        """The state that a request made; None if it failed. It must have a slot, or get one."""
        part = part_of(run)
        if part.starts:
            self.end(part.sequence_id)
            assert len(self.states) < self.slots, "there is no free slot"
            self.states[part.sequence_id] = ()
        assert part.sequence_id in self.states, "the sequence is not in this process"
        if fails:
            self.end(part.sequence_id)
            return None
        made = (*self.states[part.sequence_id], run.correlation_ids[0])
        self.states[part.sequence_id] = made
        if part.ends:
            self.end(part.sequence_id)
        return made


class BoundHarness(SequenceHarness):
    """A scheduler of a bound model, and its processes. A process that is gone has lost its states; the
    scheduler learns of it in `compare`. Batches of processes that are gone wait until they are reclaimed."""

    def __init__(self, *names: str, slots: int = 2, **settings: Any) -> None:
        self.slots = slots
        self.processes = {name: BoundProcess(slots) for name in names or ("p", "q")}
        self.draining: set[str] = set()
        self.process_of: dict[str, str] = {}  # by batch
        self.kept_by: dict[str, str] = {}  # as in Redis, by sequence
        self.served_by: dict[str, str] = {}  # by request
        super().__init__(max_batch_size=slots, **settings)

    def _new_scheduler(self) -> Scheduler:
        scheduler = Scheduler(self.settings, kind=ModelKind.BOUND)
        scheduler.set_processes(list(self.processes), self.draining)
        return scheduler

    # --- the batcher ---------------------------------------------------------------------------------------

    def compare(self) -> None:
        """The batcher has a snapshot of the processes."""
        self.scheduler.set_processes(list(self.processes), self.draining)

    def dispatched(self, batch_id: str, dispatch: Dispatch) -> None:
        assert dispatch.process not in self.process_of.values(), "two batches of one process are in flight"
        self.process_of[batch_id] = dispatch.process
        if dispatch.process in self.processes:
            self.processes[dispatch.process].inbox.append(dispatch.runs)

    def freed(self, freed: SlotFreed) -> None:
        if freed.process in self.processes:
            self.processes[freed.process].inbox.append(freed.sequence_id)

    # --- processes -----------------------------------------------------------------------------------------

    def join(self, name: str) -> None:
        self.processes[name] = BoundProcess(self.slots)

    def drain(self, name: str) -> None:
        self.draining.add(name)

    def leave(self, name: str) -> None:
        """A process ends, with what is in its slots."""
        del self.processes[name]
        self.draining.discard(name)

    def settle_batch(self, batch_id: str, failing: Iterable[str] = (), at: float = 0) -> None:
        """Its process executes a batch; if that is gone, another one answers its requests."""
        now_us, name = int(at * MS), self.process_of.pop(batch_id)
        runs, process = self.in_flight.pop(batch_id), self.processes.get(name)
        made: dict[Run, tuple[str, ...] | None] = dict.fromkeys(runs)
        if process is not None:
            assert process.read() is runs
            made = {run: process.execute(run, fails=part_of(run).sequence_id in failing) for run in runs}
        broken: list[str] = []
        for run, state in made.items():
            part, correlation_id, is_answered = part_of(run), run.correlation_ids[0], self._has_failed(run)
            if state is None or is_answered:
                broken.append(part.sequence_id)
            if is_answered:
                continue
            if state is None:
                self.failed.add(self.name_of(run))
                self.store.change(SequenceChange(part, correlation_id, "broken", "it failed"), now_us)
                continue
            self.ok[self.name_of(run)] = state
            self.kept_by[part.sequence_id] = self.served_by[self.name_of(run)] = name
            outcome = SequenceChange(part, correlation_id, "ended" if part.ends else "kept", name)
            self.store.change(outcome, now_us)
        settle(self.scheduler, batch_id, 0, now_us, broken=broken)

    def _has_failed(self, run: Run) -> bool:
        return self.name_of(run) in self.failed

    def lose_batch(self, batch_id: str, at: float = 0) -> None:
        """A batch in flight is deleted by hand, before its process reads it."""
        runs, process = self.in_flight[batch_id], self.processes.get(self.process_of.pop(batch_id))
        if process is not None:
            process.inbox = [message for message in process.inbox if message is not runs]
        super().lose_batch(batch_id, at)

    def read_inboxes(self) -> None:
        """Processes without a batch read what the batcher told them."""
        for name, process in self.processes.items():
            if name not in self.process_of.values():
                assert process.read() is None

    # --- taking over ---------------------------------------------------------------------------------------

    def load(self) -> list[KeptSequence]:
        return [one._replace(process=self.kept_by.get(one.sequence_id, "")) for one in self.store.load()]

    def adopt(self, at: float) -> None:
        for batch_id, runs in self.in_flight.items():
            dispatch = Dispatch(runs, "idle", "", process=self.process_of[batch_id])
            self.scheduler.in_flight.adopt(batch_id, dispatch, int(at * MS))


def part_of(run: Run) -> SequencePart:
    assert run.sequence is not None
    return run.sequence
