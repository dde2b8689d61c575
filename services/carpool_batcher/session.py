"""What a batcher does for one model while it holds the lease: decide about what was read, and act.

A session never waits: `service` reads for all models, and gives each its turn. A turn is done in pieces,
between which other models have theirs: one producer may send more than can be decided at once.

The request stream in Redis is the set of waiting requests; the session only has a copy of it. After any error
(a broken connection, a lost lease) it is dropped, and the next one reads the stream from the beginning.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Final, cast

from carpool.clock import RedisClock
from carpool.errors import DEADLINE_EXCEEDED, NOT_FOUND
from carpool.messages.batches import Batch, BatchedRun, Dispatch, DispatchReason, tickets_of_each
from carpool.messages.requests import Entry, Run
from carpool.messages.results import UNANSWERED, Refusal, Result
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.messages.settled import BatchSettled, WhereAsked
from carpool.model_settings import ModelKind
from carpool.process_names import worker_of
from carpool.rows import only_stored
from carpool.store.batcher import BatcherStore, EntryChanges
from carpool.store.connection import CommandError
from carpool.store.directory import ModelSnapshot
from carpool.store.reader import Arrived, StreamReader
from carpool.store.results import Address, Answer
from carpool.wire.batches import decode_settled
from carpool.wire.content_types import answer_type
from carpool.wire.field_hints import warnings_of
from carpool.wire.traffic import Division
from carpool_batcher.accounting import Accounting
from carpool_batcher.backlog import PIECE_DECODED, Backlog
from carpool_batcher.core.deadlines import NO_WORKER
from carpool_batcher.core.decisions import EXPIRED, WITHDRAWN, Abandon
from carpool_batcher.core.pause import Pause
from carpool_batcher.core.scheduler import Decision, Expire, Scheduler, earlier
from carpool_batcher.core.sequences.sequence import did_not_succeed
from carpool_batcher.detail import Detail
from carpool_batcher.effective_settings import EffectiveSettings
from carpool_batcher.entries import (
    EntryTable,
    LowestUnread,
    MissingBatches,
    MissingEntries,
    UnreadEntries,
    bodies_waiting_since,
)
from carpool_batcher.meter import Meter, sequences_report
from carpool_batcher.ordering import ResultOrder
from carpool_batcher.process_versions import ProcessVersions, in_hand_of_draining
from carpool_batcher.questions import Questions
from carpool_batcher.refusals import EarlyRefusals, divide

REPORT_INTERVAL_US: Final = 1_000_000
REPORT_RETRY_US: Final = 60_000_000  # after Redis refused it, as when its memory is full
IDLE_AFTER_US: Final = 3_000_000  # without anything to do
BODIES_RENEWED_US: Final = 60_000_000  # how often stored bodies are renewed
BODIES_FIRST_RENEWED_US: Final = 2_000_000  # after the lease was taken: the stream is read first
BODY_AGE_US: Final = 3_600_000_000  # of those that are renewed: a small part of the time that they are kept
READ_AHEAD_US: Final = 1000  # requests are awaited again so long before a process can take a batch
READ_INTERVAL_US_MAX: Final = 5000  # until then they are read so often: some may have to be refused


class ModelKindChangedError(Exception):
    """What was read must be read again: whether requests need a sequence depends on the kind of the model."""


class VersionLeftError(Exception):
    """Batches in flight are for a version whose workers are all gone. The next session gives them to
    others."""


class Session:
    """One model in the hands of the batcher that holds its lease.

    `wake_at_us`: when it needs a turn although nothing arrives; None: never. `reads_at_us`: until when it
    needs no turn for requests that arrive. `needs_snapshot`: whether it should be compared with Redis at
    once. `report_at_us`: when its next report is due. `subscription`: what is read for it.
    """

    def __init__(
        self,
        store: BatcherStore,
        clock: RedisClock,
        settings: EffectiveSettings,
        meter: Meter,
        log: Any,
        snapshot: ModelSnapshot,
        reader: StreamReader,
    ) -> None:
        """Take over from the batcher before: know what is in flight, and subscribe to the rest."""
        self._store = store
        self._clock = clock
        self._settings = settings
        self._meter = meter
        self._log = log
        self._reader = reader
        settled_after = store.last_settled_id()
        store.versions = snapshot.versions
        self._versions = ProcessVersions(store)
        self.scheduler = _scheduler(settings, snapshot)
        self._use_settings()
        self._follow_pause(snapshot)
        self._follow_processes(snapshot)
        self._order = ResultOrder(store, self.scheduler, snapshot.waiting_entries)
        self._adopt_what_is_in_flight()
        last_id = store.last_waiting_id()
        if last_id is None:
            self.scheduler.sequences.complete()
        self.entries = EntryTable()
        self.unread = UnreadEntries(last_id)
        self._lowest_unread = LowestUnread()
        self._missing_batches = MissingBatches()
        self._missing_entries = MissingEntries()
        self._early = EarlyRefusals()
        self._accounting = Accounting(meter, log, self.scheduler)
        self._accounting.versions = self._versions.read(snapshot)
        self._questions = Questions(
            store, self.scheduler, self._accounting.recent, clock, log, self._is_reading
        )
        self._detail: Detail | None = None  # only while somebody looks
        now_us = self._accounting.recent.began_us = clock.now_us()
        meter.activated(now_us)
        self.wake_at_us: int | None = now_us
        self.reads_at_us = 0
        self.needs_snapshot = True
        self.report_at_us = 0
        self._last_event_us = now_us
        self._turned_us = 0  # when the last turn was
        self._read_us = 0  # when it was last told what had arrived
        self._waiting_entries = snapshot.waiting_entries  # in Redis, at the last look
        self._renew_bodies_at_us = now_us + BODIES_FIRST_RENEWED_US
        self.subscription = reader.subscribe(store.keys, settled_after)
        self.backlog = Backlog(self.scheduler, self.subscription, self.entries, self.unread, clock)

    def _adopt_what_is_in_flight(self) -> None:
        """Know the batches in flight, and the sequences that are kept, if the model has any. Until all
        requests were read that wait now, none of a sequence is dispatched: one that was put back stands later
        than its place."""
        store, scheduler = self._store, self.scheduler
        in_flight = [_as_in_flight(batch) for batch in store.batches_in_flight()]
        if store.versions:
            in_flight = list(self._reassigned(in_flight))
        if scheduler.kind.has_sequences:  # after the batches: what these kept is known then
            is_bound = scheduler.kind is ModelKind.BOUND
            scheduler.sequences.load(store.kept_sequences(with_processes=is_bound))
        for batch_id, dispatch, dispatched_us in in_flight:
            scheduler.in_flight.adopt(batch_id, dispatch, dispatched_us)
            self._order.launched(batch_id, dispatch.runs)
        scheduler.set_in_hand(self._in_hand, self._clock.now_us())
        scheduler.adopted(self._clock.now_us())
        living = scheduler.versions.processes
        for version in [version for version in store.versions if living and version not in living]:
            store.forget_version(version)

    def _reassigned(self, in_flight: Iterable[_InFlight]) -> Iterator[_InFlight]:
        """These batches. One for a version whose workers are all gone is given to those of any version,
        unless its requests ask for that version."""
        living = self.scheduler.versions.processes
        for batch_id, dispatch, dispatched_us in in_flight:
            version = dispatch.version
            if (
                not version
                or version in living
                or not living
                or dispatch.is_asked
                or batch_id in self._in_hand
            ):
                yield batch_id, dispatch, dispatched_us
                continue
            new_id = self._store.reassign(batch_id)
            if new_id is not None:
                self._log.info("batch given to other versions", batch=batch_id, version=version, new=new_id)
                yield new_id, dispatch._replace(version=""), dispatched_us

    def end(self) -> None:
        """Drop everything that was read: Redis has it all."""
        self._reader.end(self.subscription)
        self._accounting.end()

    # --- one turn ------------------------------------------------------------------------------------------

    def receive(self, arrived: Arrived) -> None:
        """These entries were read: it needs a turn."""
        self.backlog.add(arrived)

    def turn(self) -> Generator[None]:
        """Decide about what was read and what is due, and act. In pieces: each takes some ms at most, and
        between them only `receive` and `end` may be called. After `end` it must not go on."""
        now_us = self._clock.now_us()
        refusals: list[Refusal] = []
        emptied: list[Entry] = []
        has_arrived = bool(self.backlog)
        if has_arrived:
            self._last_event_us = now_us
            self._settle(now_us)
            if self.backlog.requests:
                refusals, emptied = yield from self._admit()
                now_us = self._clock.now_us()
            refusals += yield from self.backlog.refuse_oversized(now_us)
        elif self.wake_at_us is not None and self.wake_at_us > self._turned_us:
            self._meter.woken(now_us - self.wake_at_us)
        self._turned_us = now_us
        self._carry_out_withdrawals(refusals, emptied, now_us)
        decisions = yield from self.scheduler.poll_in_pieces(now_us)
        if len(decisions) > PIECE_DECODED:
            yield
        yield from self._apply(decisions, refusals, emptied, now_us)
        self._accounting.count_settled()
        if self._questions.due_us is not None:
            yield from self._questions.answer()
        if has_arrived:
            self._read_us = now_us
        self._plan_next_turn()

    def _plan_next_turn(self) -> None:
        """When it needs a turn, and for what."""
        scheduler, subscription = self.scheduler, self.subscription
        self.wake_at_us = earlier(scheduler.wake_at_us(), self._early.due_us)
        self.wake_at_us = earlier(self.wake_at_us, self._questions.due_us)
        # While nothing waits, no decision depends on a batch that settles.
        subscription.awaits_settled = scheduler.queue.count > 0
        subscription.takes_requests = not self.backlog.requests
        self.reads_at_us = 0
        if subscription.awaits_settled and not subscription.has_more and not self.backlog:
            earliest_us = scheduler.earliest_dispatch_us() - READ_AHEAD_US
            self.reads_at_us = min(earliest_us, self._read_us + READ_INTERVAL_US_MAX)

    def is_due(self, now_us: int) -> bool:
        """Whether it needs a turn now."""
        return bool(self.backlog) or (self.wake_at_us is not None and self.wake_at_us <= now_us)

    def is_idle(self) -> bool:
        """Whether nothing is to be done for the model, and has not been for a while."""
        if self._has_known_requests() or self.scheduler.sequences:
            return False
        if self._early.due_us is not None or self._questions.due_us is not None or self.backlog:
            return False
        return self._clock.now_us() - self._last_event_us > IDLE_AFTER_US

    def _is_reading(self) -> bool:
        """Whether requests may wait in Redis that were not read: it took over just now, or many arrive."""
        return self.unread.are_any or bool(self.backlog.requests) or self.subscription.has_more

    def has_requests(self) -> bool:
        """Whether requests wait or are in flight, or results are withheld, as far as it knows."""
        return self._has_known_requests() or self._waiting_entries > 0

    def _has_known_requests(self) -> bool:
        scheduler = self.scheduler
        return bool(scheduler.queue.count or scheduler.queue.withheld or scheduler.in_flight.batches)

    def _settle(self, now_us: int) -> None:
        """Count the capacity of batches that settled as free, and learn from them."""
        scheduler, is_awaited = self.scheduler, self.subscription.awaits_settled
        for _, flat in self.backlog.take_settled():
            event = decode_settled(flat)
            if type(event) is WhereAsked:
                self._questions.add(event)
                continue
            if type(event) is not BatchSettled:
                self.needs_snapshot = True  # it counts the model processes, and has the settings
                continue
            batch = scheduler.in_flight.batches.get(event.batch_id)
            if batch is None:
                continue
            settled_us = min(max(event.settled_us, batch.dispatched_us), now_us)
            if settled_us != event.settled_us:  # this process's copy of Redis's clock is a little off
                event = event._replace(settled_us=settled_us)
            if is_awaited:
                scheduler.learned.observe_delivery(now_us - settled_us)
            self._accounting.settled(event, batch)
            scheduler.in_flight.settle(event)
            if scheduler.kind is ModelKind.STEPPING and event.compute_us:
                scheduler.wanted.observe_duration(event.compute_us)
            if event.executed and (event.cost or scheduler.learned.costs):
                scheduler.observe_cost(batch.lane, event.executed, event.cost)

    def _admit(self) -> Generator[None, None, tuple[list[Refusal], list[Entry]]]:
        """Offer requests of the backlog to the scheduler. Returns the refusals, and entries to remove."""
        now_us = self._clock.now_us()
        self._order.before_admission()
        admitted = yield from self.backlog.admit(now_us)
        if self._detail is not None:
            self._detail.arrived(admitted.entries, now_us)
        refusals = admitted.refusals
        # Others were left unread on purpose, or may have been.
        awaited = [entry for entry in admitted.entries if entry.arrival_us >= self.reads_at_us]
        if awaited:
            self._meter.read(awaited, now_us)
        self._order.verify(admitted.entries)
        yield from self.backlog.become_read(admitted.last_id)
        if self.scheduler.settings.preserve_ordering:
            # A request that is refused on arrival gets no ticket, so that its result need not wait. Refuse it
            # first: should this batcher end before it did, the next one would decide anew who gets one.
            runs = [run for entry in admitted.entries for run in entry.runs]
            if refusals:
                yield from self._refuse(refusals)
                refusals = []
            self._order.issue(runs)
        # The rest of an entry may have been put back in others by then.
        return refusals + [refusal.where_it_is() for refusal in admitted.ended], admitted.emptied

    def _carry_out_withdrawals(self, refusals: list[Refusal], emptied: list[Entry], now_us: int) -> None:
        """Withdraw what is in flight, and add to `refusals` what waits. The entry of a withdrawal is removed
        when that is answered: if this batcher ends before, the next one reads it."""
        withdrawn = self.scheduler.carry_out_withdrawals(now_us)
        for batch_id, first, run in withdrawn.cancelled:  # their worker learns of it soon
            answers = list(_answers(first, run, now_us, *WITHDRAWN))
            self._accounting.cancelled(self._answer_in_flight(batch_id, answers, [run]))
        refusals += withdrawn.refusals
        emptied += withdrawn.entries

    # --- acting --------------------------------------------------------------------------------------------

    def _apply(
        self,
        decisions: Sequence[Decision],
        refusals: list[Refusal],
        emptied: Sequence[Entry],
        now_us: int,
    ) -> Generator[None]:
        dispatches = [decision for decision in decisions if type(decision) is Dispatch]
        refusals += [decision for decision in decisions if type(decision) is Refusal]
        refusals = self._early.postpone(refusals, now_us)
        is_reading = self.scheduler.sequences.is_reading
        refusals, emptied = self.unread.hold_back(refusals, emptied, is_reading=is_reading)
        changes = [decision for decision in decisions if type(decision) is SequenceChange]
        freed = [decision for decision in decisions if type(decision) is SlotFreed]
        if refusals or emptied or changes or freed:
            yield from self._refuse(refusals, emptied, changes, freed)
        if dispatches:
            yield from self._dispatch(dispatches, now_us)
        expired = [decision for decision in decisions if type(decision) is Expire]
        if expired:
            self._expire(expired)
        for decision in decisions:
            if type(decision) is Abandon:
                self._abandon(decision, now_us)

    def _refuse(
        self,
        refusals: Sequence[Refusal],
        emptied: Sequence[Entry] = (),
        changes_of_sequences: Sequence[SequenceChange] = (),
        freed: Sequence[SlotFreed] = (),
    ) -> Generator[None]:
        """Answer requests that are not dispatched, in two pieces for each script that is needed."""
        scheduler = self.scheduler
        self._order.admit_if_any()
        ttl_ms = scheduler.settings.result_ttl_ms
        custom, has_raised = scheduler.custom_policy, False
        for part in divide(refusals, emptied, changes_of_sequences, freed):
            if part is None:
                yield
                continue
            prepared = self._store.prepare_refusal(
                part.refusals, part.emptied, ttl_ms, part.changes, part.freed, scheduler.is_body_in_use
            )
            yield
            changes = self._store.refuse(prepared)
            self._entries_changed(changes)
            missing = set(changes.missing)
            answered = [
                refusal
                for refusal in part.refusals
                if refusal.entry not in missing and refusal.status != UNANSWERED
            ]
            yield
            if answered:
                self._refused(answered)
                has_raised |= custom is not None and any(one.reason == "policy" for one in answered)
        if custom is not None and has_raised:
            policy = scheduler.settings.policy
            self._log.error("policy raised an exception", policy=policy, reason=f"{custom.raised:.1000}")

    def _refused(self, answered: Sequence[Refusal]) -> None:
        """Requests were answered with errors: count them."""
        now_us = self._clock.now_us()
        self._accounting.refused(answered, now_us)
        if self._meter.spans is not None:
            self._meter.spans.refused(answered, now_us)

    def _dispatch(self, dispatches: Sequence[Dispatch], decided_us: int) -> Generator[None]:
        scheduler = self.scheduler
        remaining = scheduler.carry_out(dispatches, decided_us)
        spans = self._meter.spans
        dispatched_us = 0 if spans is None else self._clock.now_us()  # workers take batches from now on
        batches, changes, tickets = self._store.dispatch(
            remaining.dispatches,
            scheduler.settings.result_ttl_ms,
            self._order.take_arrivals(),
            self._settings_of_batches,
            scheduler.settings.max_result_ttl_ms,
        )
        self._entries_changed(changes)
        dispatched: list[Dispatch] = []
        for decided, batch in zip(remaining.dispatches, batches, strict=True):
            if batch is None:
                remaining.gone(decided)
            else:
                remaining.launched(batch.batch_id, batch.dispatch)
                self._order.launched(batch.batch_id, batch.dispatch.runs)
                dispatched.append(batch.dispatch)
        self._order.dispatched(tickets)
        self._accounting.dispatched(dispatched, self._clock.now_us())
        if spans is not None:
            in_flight = [(batch.batch_id, batch.dispatch) for batch in batches if batch is not None]
            spans.dispatched(in_flight, dispatched_us)
        copies = remaining.finish()
        if copies:
            yield from self._refuse(copies)

    def _entries_changed(self, changes: EntryChanges) -> None:
        """A script changed entries in Redis."""
        self.scheduler.forget(self.entries.update_from(changes))

    def _expire(self, expired: Iterable[Expire]) -> None:
        by_batch: dict[str, list[tuple[int, Run]]] = {}
        for batch_id, first, run in expired:
            by_batch.setdefault(batch_id, []).append((first, run))
        is_stepping, now_us = self.scheduler.kind is ModelKind.STEPPING, self._clock.now_us()
        status, detail = _EXPIRED_WHILE_STEPPING if is_stepping else EXPIRED
        if not self.scheduler.model_processes:
            detail += NO_WORKER
        for batch_id, runs in by_batch.items():
            answers = [
                answer for first, run in runs for answer in _answers(first, run, now_us, status, detail)
            ]
            answered = self._answer_in_flight(batch_id, answers, [run for _, run in runs])
            self._accounting.expired(batch_id, runs, answered)
            self.scheduler.in_flight.answered(run for first, run in runs if first in (answered or ()))

    def _abandon(self, abandoned: Abandon, now_us: int) -> None:
        """Answer all requests of a batch that no worker will execute, and remove it."""
        batch_id, runs, detail = abandoned
        firsts = accumulate(map(len, runs[:-1]), initial=0)
        answers = [
            answer
            for first, run in zip(firsts, runs, strict=True)
            for answer in _answers(first, run, now_us, NOT_FOUND, detail)
        ]
        answered = self._answer_in_flight(batch_id, answers, runs)
        if answered is None:
            return  # it settled
        self._accounting.abandoned(answered)
        self.scheduler.in_flight.answered(runs)
        self._store.abandon(batch_id)
        self.scheduler.in_flight.forget(batch_id, now_us)

    def _answer_in_flight(
        self, batch_id: str, answers: Sequence[Answer], runs: Sequence[Run]
    ) -> set[int] | None:
        """Answer these runs of a batch in flight. Returns the positions that were answered now.

        None if the batch settled, which is read later: see `store.reader`.
        """
        answered = self._store.answer_in_flight(batch_id, answers, self.scheduler.settings.result_ttl_ms)
        spans = self._meter.spans
        if spans is not None and answered:
            now_us, batch = self._clock.now_us(), self.scheduler.in_flight.batches.get(batch_id)
            dispatched_us = now_us if batch is None else batch.dispatched_us
            spans.answered_in_flight(batch_id, runs, answers[0].result.status, dispatched_us, now_us)
        return answered

    # --- a few times a second ------------------------------------------------------------------------------

    def compare(self, snapshot: ModelSnapshot) -> None:
        """Compare with Redis: the workers, the settings, and what is missing there. A turn must follow."""
        scheduler, entries, now_us = self.scheduler, self.entries, self._clock.now_us()
        self.needs_snapshot = False
        kind = ModelKind.of(snapshot.registration)
        if scheduler.kind is not kind:  # another model under this name
            if kind.has_sequences or scheduler.kind.has_sequences:
                raise ModelKindChangedError("another kind of model has this name now")
            scheduler.kind = kind
            self._use_settings()
        self.wake_at_us = now_us
        before = scheduler.model_processes
        self._store.versions = snapshot.versions
        self._follow_pause(snapshot)
        self._follow_processes(snapshot)
        self._accounting.versions = {**self._accounting.versions, **self._versions.read(snapshot)}
        if any(not scheduler.in_flight.batches[name].is_asked for name in scheduler.orphans()):
            raise VersionLeftError
        if scheduler.model_processes > before:
            self.reads_at_us = 0  # another one can take a batch: first read what was left unread
        self._update_settings(snapshot)
        settled_read = self.subscription.settled.after
        self._missing_batches.forget(self._store, scheduler, snapshot.batches_in_flight, settled_read, now_us)
        self._waiting_entries = waiting = snapshot.waiting_entries
        self._missing_entries.forget(self._store, scheduler, entries, waiting)
        known = len(entries) + len(self.backlog.requests)
        self._lowest_unread.verify(self._store, waiting, known, self.subscription.requests.after, now_us)
        if waiting <= len(entries):
            scheduler.sequences.complete()  # the last unread one may have been removed
        self._order.refresh(snapshot, entries)
        self._renew_bodies(now_us)
        self._observe_demand(snapshot, now_us)
        if snapshot.watched is not (self._detail is not None):
            self._detail = Detail(now_us) if snapshot.watched else None
            self._accounting.recent.watch(is_watched=snapshot.watched)
        self._accounting.compared(snapshot.model_processes, now_us)

    def _follow_processes(self, snapshot: ModelSnapshot) -> None:
        """The model processes that live, with their versions; and how versions share the traffic."""
        scheduler, now_us = self.scheduler, self._clock.now_us()
        is_bound = scheduler.kind is ModelKind.BOUND
        self._in_hand = () if is_bound else in_hand_of_draining(self._store, snapshot)
        scheduler.set_in_hand(self._in_hand, now_us)
        versions = self._versions.read(snapshot)
        scheduler.set_processes(snapshot.model_processes, snapshot.draining, versions, now_us)
        scheduler.divide(Division(snapshot.shares, scheduler.versions.processes), now_us)

    def _follow_pause(self, snapshot: ModelSnapshot) -> None:
        """Whether an operator has paused the model, and whether what arrives is refused."""
        self._store.sees_pauses = snapshot.denied is None
        paused, pause = snapshot.paused, None
        if paused is not None:
            pause = Pause(paused.reason, paused.refuses_from_ms * 1000 if paused.refuses else None)
        if pause == self.scheduler.pause:
            return
        self.scheduler.pause = pause
        self.reads_at_us = 0  # first read what was left unread
        if paused is None:
            self._log.info("model resumed")
        else:
            self._log.info("model paused", who=paused.who, reason=paused.reason, refuses=paused.refuses)

    def _observe_demand(self, snapshot: ModelSnapshot, now_us: int) -> None:
        """How many workers are wanted, for the report and the metrics."""
        serving = [process for process in snapshot.model_processes if process not in snapshot.draining]
        self.scheduler.observe_demand(
            now_us,
            len(serving),
            len(set(map(worker_of, serving))),
            self._accounting.missed_deadlines,
            is_reading=self.scheduler.sequences.is_reading,
        )

    def _renew_bodies(self, now_us: int) -> None:
        """Now and then: stored bodies must not expire while their requests wait."""
        if now_us >= self._renew_bodies_at_us:
            self._renew_bodies_at_us = now_us + BODIES_RENEWED_US
            self._store.renew_bodies(bodies_waiting_since(self.entries, now_us - BODY_AGE_US))

    def _update_settings(self, snapshot: ModelSnapshot) -> None:
        scheduler = self.scheduler
        settings = self._settings.read(snapshot, scheduler.settings)
        if settings == scheduler.settings:
            return
        if settings.policy != scheduler.settings.policy:
            scheduler.custom_policy = self._settings.custom_policy
        before, scheduler.settings = scheduler.settings, settings
        self._use_settings()
        self._log.info("settings changed", **before.changes_to(settings))

    def _use_settings(self) -> None:
        """The scheduler has these settings, and this kind of model, from now on: so have batches."""
        scheduler = self.scheduler
        self._store.kind = scheduler.kind
        self._settings_of_batches = scheduler.settings.for_workers(scheduler.kind)

    def report(self) -> str:
        """The report for observers, to be published now."""
        now_us = self._clock.now_us()
        self.report_at_us = now_us + REPORT_INTERVAL_US
        scheduler = self.scheduler
        if scheduler.kind is ModelKind.STEPPING:
            self._meter.chunks_written(self._store.chunks_written(list(scheduler.in_flight.batches)))
        return self._meter.report(
            self._store.name,
            scheduler,
            now_us,
            rejected_settings=self._settings.rejected_settings,
            policies=self._settings.policies,
        ).encode()

    @property
    def is_detail_due(self) -> bool:
        """Whether its detail is to be published now: somebody looks."""
        return self._detail is not None and self._detail.due_us <= self._clock.now_us()

    def detail(self) -> str:
        """The detail, to be published now. Only if it is due."""
        assert self._detail is not None
        sequences = sequences_report(self.scheduler)
        recent = self._accounting.recent
        return self._detail.make(
            self._store.name, self.scheduler, recent, sequences, self._clock.now_us
        ).encode()

    def detail_refused(self, error: CommandError) -> None:
        """Redis did not accept the detail. The model is served all the same."""
        if self._detail is not None:
            self._detail.due_us = self._clock.now_us() + REPORT_RETRY_US
        self._log.warning("detail not published", reason=str(error))

    def report_refused(self, error: CommandError) -> None:
        """Redis did not accept the report. The model is served all the same."""
        self.report_at_us = self._clock.now_us() + REPORT_RETRY_US
        self._log.warning("report for carpool top not published", reason=str(error))


def _scheduler(settings: EffectiveSettings, snapshot: ModelSnapshot) -> Scheduler:
    """A new scheduler for the model of this snapshot."""
    scheduler = Scheduler(settings.read(snapshot, None), kind=ModelKind.of(snapshot.registration))
    scheduler.custom_policy = settings.custom_policy
    return scheduler


# Status and detail of requests that are answered in flight, beside those of `core.decisions`.
_EXPIRED_WHILE_STEPPING: Final = (DEADLINE_EXCEEDED, "expired: its output was not complete by its deadline")


def _answers(first: int, run: Run, now_us: int, status: str, detail: str) -> Iterator[Answer]:
    """The answers to a run in flight, whose first request is at position `first`."""
    of_each = zip(run.correlation_ids, tickets_of_each(run), strict=True)
    content_type, total_us = answer_type(run.content_type, run.extra), max(0, now_us - run.arrival_us)
    for position, (correlation_id, ticket) in enumerate(of_each, first):
        warnings = warnings_of(run.extra, run.content_type)
        result = Result(correlation_id, status, content_type, detail=detail, warnings=warnings)
        part, change = run.sequence, None
        if part is not None:
            change = SequenceChange(part, correlation_id, "broken", did_not_succeed(correlation_id))
        yield Answer(position, Address(run.reply_to, ticket), result, change, total_us)


_InFlight = tuple[str, Dispatch, int]


def _as_in_flight(batch: Batch) -> _InFlight:
    """The ID of a batch, its dispatch, and when that was; without its bodies, which are large."""
    runs = [_as_run(run, batch) for run in batch.runs]
    reason = cast(DispatchReason, batch.reason)
    dispatch = Dispatch(
        runs, reason, batch.lane, process=batch.process, version=batch.version, is_asked=batch.is_asked
    )
    return batch.id, dispatch, batch.dispatched_us


def _as_run(batched: BatchedRun, batch: Batch) -> Run:
    """A run in flight as it was dispatched; of its bodies only the names of stored ones are needed."""
    tenant, _ = batched.producer
    return Run(
        Entry(batched.entry_id, batched.arrival_us),
        batched.correlation_ids,
        only_stored(batched.bodies),
        batched.content_type,
        batched.reply_to,
        batched.arrival_us,
        batched.deadline_us,
        batched.priority,
        batch.lane,
        max(batched.cost, batch.cost),  # one of them, as the kind of the model is
        batched.extra,
        tenant,
        batched.reply_columns,
        batched.tickets,
        batch.stream,
        batched.sequence,
        version=batch.version if batch.is_asked else "",
    )
