"""The production Scheduler with sequences in virtual time, and a Redis that is a few dictionaries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Entry, Run, SequencePart, Withdrawal
from carpool.messages.results import Refusal
from carpool.messages.sequences import KeptSequence, SequenceChange, SequenceOutcome, SlotFreed
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.scheduler import Decision, Expire, Scheduler
from support.scheduler_harness import settle

MS = 1000


class StoredSequence:
    """The hash of a sequence."""

    def __init__(self) -> None:
        self.next_index: int | None = None
        self.first_id = ""
        self.last_id = ""
        self.broken = ""
        self.broken_at = ""
        self.failed_at = ""
        self.served: tuple[str, ...] = ()  # the state: the correlation IDs of all that made it


class SequenceStore:
    """What the scripts do to sequences: `sequence.lua` in Python."""

    def __init__(self) -> None:
        self.kept: dict[str, StoredSequence] = {}
        self.changed_us: dict[str, int] = {}

    def change(self, change: SequenceChange, now_us: int) -> None:
        part = change.part
        stored = self.kept.setdefault(part.sequence_id, StoredSequence())
        is_broken_later = stored.broken_at > part.place
        if change.outcome == "broken":
            first = min(filter(None, (stored.failed_at, stored.broken_at, part.place)))
            if not is_broken_later:
                stored.broken, stored.broken_at = str(change.content), part.place
            stored.failed_at = first if first != stored.broken_at else ""
        elif change.outcome == "kept" and not part.starts:
            stored.next_index, stored.last_id = (stored.next_index or 0) + 1, change.correlation_id
            stored.served += (change.correlation_id,)
        else:
            fresh = self.kept[part.sequence_id] = StoredSequence()
            if is_broken_later:
                fresh.broken, fresh.broken_at = stored.broken, stored.broken_at
                fresh.failed_at = stored.failed_at if stored.failed_at > part.place else ""
            if change.outcome == "kept":
                fresh.next_index, fresh.first_id = 1, change.correlation_id
                fresh.last_id = change.correlation_id
                fresh.served = (change.correlation_id,)
            elif not is_broken_later:
                del self.kept[part.sequence_id]
                self.changed_us.pop(part.sequence_id, None)
                return
        self.changed_us[part.sequence_id] = now_us

    def load(self) -> list[KeptSequence]:
        return [
            KeptSequence(
                name,
                self.changed_us[name],
                one.next_index,
                one.first_id,
                one.last_id,
                one.broken,
                one.broken_at,
                one.failed_at,
            )
            for name, one in self.kept.items()
        ]


class SequenceHarness:
    """A scheduler of a stateful model, to which a test sends requests, and whose decisions are carried out.

    `answers`: the status of every request that was answered, by its name; '' for one that was dropped.
    """

    def __init__(self, model_processes: int = 8, **settings: Any) -> None:
        settings = {"max_batch_size": 4, "max_sequence_idle_ms": 100, **settings}
        self.settings = ModelSettings(**settings)
        self.model_processes = model_processes
        self.store = SequenceStore()
        self.waiting: dict[str, Run] = {}  # in Redis, by name
        self.in_flight: dict[str, list[Run]] = {}  # likewise, by batch
        self.answers: dict[str, str] = {}
        self.details: dict[str, str] = {}
        self.runs: dict[str, Run] = {}  # all, by name
        self.ok: dict[str, tuple[str, ...]] = {}  # those answered OK, with what made their state
        self.failed: set[str] = set()  # those in flight that were answered otherwise, or lost
        self.ended_at: dict[str, str] = {}  # the last place at which a sequence was ended by force
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        self._looks_us = itertools.count(step=1_000_000)  # so far apart that none is put off
        self.scheduler = self._new_scheduler()

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.settings, self.model_processes, ModelKind.STATEFUL)

    # --- producers -----------------------------------------------------------------------------------------

    def send(self, name: str, at: float = 0, *, entry_id: str = "", **fields: Any) -> None:
        """A request arrives; `a0` is of the sequence `a`. Options: start, end, index, and those of a Run."""
        entry_id = entry_id or f"{next(self._ids)}-0"
        part = SequencePart(
            fields.pop("sequence", name[0]),
            fields.pop("start", False),
            fields.pop("end", False),
            fields.pop("index", None),
            SequencePart.place_of(entry_id, 0),
        )
        correlation_id = fields.pop("correlation_id", name)
        expiration = fields.pop("expiration", None)
        deadline_us = None if expiration is None else int((at + expiration) * MS)
        entry = Entry(entry_id, int(at * MS))
        run = Run(
            entry,
            [correlation_id],
            [b"body"],
            arrival_us=int(at * MS),
            deadline_us=deadline_us,
            sequence=part,
            **fields,
        )
        entry.runs.append(run)
        self.waiting[name] = self.runs[name] = run
        for refused in self.scheduler.offer(run, int(at * MS)):
            self._answer(refused)

    def withdraw(self, *names: str) -> None:
        self.scheduler.withdraw(Withdrawal(Entry(f"{next(self._ids)}-0", 0), frozenset(names)))
        for refused in self.scheduler.carry_out_withdrawals(next(self._looks_us)).refusals:
            self._answer(refused)

    def end_sequences(self, *sequence_ids: str) -> str:
        place = SequencePart.place_of(f"{next(self._ids)}-0", 0)
        self.ended_at |= dict.fromkeys(sequence_ids, place)
        for refused in self.scheduler.end_sequences(sequence_ids, place):
            self._answer(refused)
        return place

    def delete(self, name: str) -> None:
        """A request is removed by XDEL, which the batcher notices."""
        self.scheduler.forget([self.waiting.pop(name)])

    # --- the batcher ---------------------------------------------------------------------------------------

    def poll(self, at: float = 0) -> list[list[str]]:
        """Carry out all decisions. Returns the batches, each as the names of its requests, sorted."""
        now_us = int(at * MS)
        batches: list[list[str]] = []
        for decision in self._in_the_order_of_the_batcher(self.scheduler.poll(now_us)):
            if isinstance(decision, Dispatch):
                batch_id = str(next(self._numbers))
                self.scheduler.in_flight.launch(batch_id, decision, now_us)
                self.in_flight[batch_id] = decision.runs
                self.dispatched(batch_id, decision)
                batches.append(sorted(self._names(decision.runs)))
            elif isinstance(decision, SequenceChange):
                self.changed(decision)
                self.store.change(decision, now_us)
            elif isinstance(decision, Expire):
                self._expire(decision, now_us)
            elif isinstance(decision, SlotFreed):
                self.freed(decision)
            elif isinstance(decision, Refusal):
                self._answer(decision)
        return batches

    @staticmethod
    def _in_the_order_of_the_batcher(decisions: Iterable[Decision]) -> list[Decision]:
        """One script carries out all but those of the last two kinds; then there is one for each of these."""
        order = (Dispatch, Expire)
        return sorted(decisions, key=lambda one: (isinstance(one, order), isinstance(one, Expire)))

    def dispatched(self, batch_id: str, dispatch: Dispatch) -> None:
        """This batch is in flight."""

    def freed(self, freed: SlotFreed) -> None:
        """The batcher told a process that a sequence has no slot there."""

    def changed(self, change: SequenceChange) -> None:
        """The batcher decided to change what is stored of a sequence."""

    def name_of(self, run: Run) -> str:
        return next(name for name, known in self.runs.items() if known is run)

    def _names(self, runs: Iterable[Run]) -> list[str]:
        names = [name for name, run in self.waiting.items() if run in runs]
        for name in names:
            del self.waiting[name]
        return names

    def _answer(self, refused: Refusal) -> None:
        (name,) = [name for name, run in self.waiting.items() if run is refused.run]
        assert name not in self.answers
        del self.waiting[name]
        self.answers[name], self.details[name] = refused.status, refused.detail

    def _expire(self, expired: Expire, now_us: int) -> None:
        run = expired.run
        assert run.sequence is not None
        self.store.change(SequenceChange(run.sequence, run.correlation_ids[0], "broken", "late"), now_us)
        self.failed.add(self.name_of(run))
        self.scheduler.in_flight.answered([run])

    # --- workers -------------------------------------------------------------------------------------------

    def settle(self, *failing: str, at: float = 0) -> None:
        """Every batch in flight is committed; the sequences in `failing` fail."""
        for batch_id in list(self.in_flight):
            self.settle_batch(batch_id, failing, at)

    def settle_batch(self, batch_id: str, failing: Iterable[str] = (), at: float = 0) -> None:
        now_us = int(at * MS)
        broken: list[str] = []
        for run in self.in_flight.pop(batch_id):
            part, name = run.sequence, run.correlation_ids[0]
            assert part is not None
            stored = self.store.kept.get(part.sequence_id)
            if self.name_of(run) in self.failed:  # answered ahead
                broken.append(part.sequence_id)
            elif part.sequence_id in failing or not (part.starts or self._has_state(part)):
                broken.append(part.sequence_id)
                self.failed.add(self.name_of(run))
                self.store.change(SequenceChange(part, name, "broken", "it raised"), now_us)
            else:
                outcome: SequenceOutcome = "ended" if part.ends else "kept"
                before = () if part.starts or stored is None else stored.served
                self.ok[self.name_of(run)] = (*before, name)
                self.store.change(SequenceChange(part, name, outcome), now_us)
        settle(self.scheduler, batch_id, 0, now_us, broken=broken)

    def _has_state(self, part: SequencePart) -> bool:
        stored = self.store.kept.get(part.sequence_id)
        is_kept = stored is not None and stored.next_index is not None
        is_ended = self.ended_at.get(part.sequence_id, "") > part.place
        assert is_kept or is_ended, f"the state of {part.sequence_id} is lost"
        return is_kept

    def lose_batch(self, batch_id: str, at: float = 0) -> None:
        """A batch in flight is deleted by hand."""
        self.failed.update(map(self.name_of, self.in_flight.pop(batch_id)))
        self.scheduler.in_flight.forget(batch_id, int(at * MS))

    def run(self, at: float = 0) -> list[list[str]]:
        """Poll and settle until nothing more is dispatched. Returns all batches."""
        batches: list[list[str]] = []
        while dispatched := self.poll(at):
            batches += dispatched
            self.settle(at=at)
        return batches

    # --- taking over ---------------------------------------------------------------------------------------

    def load(self) -> list[KeptSequence]:
        """What Redis has of all sequences."""
        return self.store.load()

    def adopt(self, at: float) -> None:
        """The scheduler learns what is in flight."""
        for batch_id, runs in self.in_flight.items():
            self.scheduler.in_flight.adopt(batch_id, Dispatch(runs, "idle", ""), int(at * MS))

    def take_over(
        self,
        at: float = 0,
        reading: Iterable[str] | None = None,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Another batcher takes over, and reads the requests that wait in this order. `meanwhile`: what
        happens before each of them, and after the last one."""
        self.scheduler = self._new_scheduler()
        self.scheduler.sequences.load(self.load())
        self.adopt(at)
        for name in list(self.waiting if reading is None else reading):
            meanwhile()
            for refused in self.scheduler.offer(self.waiting[name], int(at * MS)):
                self._answer(refused)
        meanwhile()
        self.scheduler.sequences.complete()
