"""The batcher of one model: what was read -> decide -> dispatch, refuse or answer ahead.

It never waits: `service` reads for all models, keeps their leases, and gives each its turn. A turn is done in
pieces, between which other models have theirs: one producer may send more than can be decided at once.

The request stream in Redis is the set of waiting requests; the batcher only has a copy of it. After any error
(a broken connection, a lost lease) the copy is dropped, and the stream is read again from the beginning.

Any number of batchers may run for a model. A lease lets one of them form batches, because several would each
form smaller ones. Safety does not depend on it: a request is dispatched at most once anyway.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import structlog

from carpool.clock import RedisClock
from carpool.errors import CANCELLED, DEADLINE_EXCEEDED
from carpool.keys import Keys
from carpool.messages.batches import Batch, BatchedRun, Dispatch, tickets_of_each
from carpool.messages.requests import Entry, Run, SequencesEnd, Withdrawal
from carpool.messages.results import UNANSWERED, Refusal, Result
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelKind
from carpool.rows import only_stored
from carpool.store.batcher import BatcherStore, EntryChanges
from carpool.store.connection import CommandError, Link
from carpool.store.directory import ModelSnapshot
from carpool.store.reader import Arrived, OversizedEntry, RawEntry, StreamReader, Subscription
from carpool.store.results import Address, Answer
from carpool.wire.batches import decode_settled
from carpool.wire.content_types import answer_type
from carpool.wire.field_hints import warnings_of
from carpool.wire.requests import Decoded, decode_in_pieces, refuse_oversized
from carpool_batcher.answer_log import AnswerLog
from carpool_batcher.core.in_flight import InFlightBatch
from carpool_batcher.core.missed import Cause, MissedDeadlines, causes_of_refusals
from carpool_batcher.core.scheduler import Cancel, Decision, Expire, Scheduler, earlier
from carpool_batcher.core.sequences.sequence import did_not_succeed
from carpool_batcher.effective_settings import EffectiveSettings
from carpool_batcher.entries import (
    EntryTable,
    LowestUnread,
    MissingBatches,
    MissingEntries,
    UnreadEntries,
    bodies_waiting_since,
)
from carpool_batcher.meter import Meter
from carpool_batcher.ordering import ResultOrder
from carpool_batcher.policies import Policies
from carpool_batcher.refusals import EarlyRefusals, divide

REPORT_INTERVAL_US: Final = 1_000_000
REPORT_RETRY_US: Final = 60_000_000  # after Redis refused it, as when its memory is full
IDLE_AFTER_US: Final = 3_000_000  # without anything to do
BODIES_RENEWED_US: Final = 60_000_000  # how often stored bodies are renewed
BODIES_FIRST_RENEWED_US: Final = 2_000_000  # after the lease was taken: the stream is read first
BODY_AGE_US: Final = 3_600_000_000  # of those that are renewed: a small part of the time that they are kept
READ_AHEAD_US: Final = 1000  # requests are awaited again so long before a process can take a batch
READ_INTERVAL_US_MAX: Final = 5000  # until then they are read so often: some may have to be refused
PIECE_DECODED: Final = 256  # runs and refusals of an entry, or decisions: after more, a piece ends
TURN_DECODED_MAX: Final = 4096  # likewise, of several entries; what else was read waits for the next turn
CLOCK_LAG_US: Final = 10_000  # how far this process's clock may be behind Redis's, which stamps arrivals


class ModelKindChangedError(Exception):
    """What was read must be read again: whether requests need a sequence depends on the kind of the model."""


class Backlog:
    """What was read, and is not decided about yet. While there is any, no more requests are read."""

    def __init__(self) -> None:
        self.requests: deque[RawEntry] = deque()
        self.settled: list[RawEntry] = []
        self.oversized: list[OversizedEntry] = []

    def __bool__(self) -> bool:
        return bool(self.requests or self.settled or self.oversized)

    def add(self, arrived: Arrived) -> None:
        """These entries were read."""
        self.requests += arrived.requests
        self.settled += arrived.settled
        self.oversized += arrived.oversized

    def take_settled(self) -> list[RawEntry]:
        """The batches that settled."""
        settled, self.settled = self.settled, []
        return settled

    def take_oversized(self) -> list[OversizedEntry]:
        """The entries that are too large to be read."""
        oversized, self.oversized = self.oversized, []
        return oversized


class LeaseSession(NamedTuple):
    """What a batcher has only while it holds the lease."""

    scheduler: Scheduler
    reader: StreamReader
    subscription: Subscription
    backlog: Backlog
    entries: EntryTable
    order: ResultOrder
    missed: MissedDeadlines
    missing_batches: MissingBatches
    missing_entries: MissingEntries
    unread: UnreadEntries
    lowest_unread: LowestUnread
    early: EarlyRefusals


class Settled(NamedTuple):
    """A batch that settled: what its worker tells, what was in flight, and when that was."""

    event: BatchSettled
    batch: InFlightBatch
    settled_us: int


class ModelBatcher:
    """Serves one model, or stands by while another batcher does. `link` and `clock` are those of all models.

    `wake_at_us`: when it needs a turn although nothing arrives; None: never. `reads_at_us`: until when it
    needs no turn for requests that arrive. `needs_snapshot`: whether it should compare with Redis at once.
    `report_at_us`: when its next report is due.
    """

    def __init__(
        self, link: Link, keys: Keys, name: str, clock: RedisClock, meter: Meter, policies: Policies
    ) -> None:
        self.keys = keys
        self.wake_at_us: int | None = None
        self.reads_at_us = 0
        self.needs_snapshot = False
        self.report_at_us = 0
        self._name = name
        self._clock = clock
        self._meter = meter
        self._policies = policies
        self._store = BatcherStore(link, keys, clock)
        self._store.name = name
        self._session: LeaseSession | None = None
        self._last_event_us = 0
        self._turned_us = 0  # when the last turn was
        self._read_us = 0  # when it was last told what had arrived
        self._waiting_entries = 0  # in Redis, at the last look
        self._renew_bodies_at_us = 0
        self._log = structlog.get_logger().bind(model=keys.model)
        self._answer_log = AnswerLog(self._log)
        self._settings = EffectiveSettings(policies, self._log)

    # --- the lease -----------------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether this batcher serves the model, because it holds the lease."""
        return self._session is not None

    @property
    def subscription(self) -> Subscription:
        """What is read for it while it is active."""
        assert self._session is not None
        return self._session.subscription

    def begin(self, snapshot: ModelSnapshot, reader: StreamReader) -> None:
        """It holds the lease: serve the model."""
        settings = self._settings.read(snapshot, None)
        self._waiting_entries = snapshot.waiting_entries
        settled_after = self._store.last_settled_id()
        scheduler = Scheduler(settings, kind=ModelKind.of(snapshot.registration))
        scheduler.follow_processes(snapshot.model_processes, snapshot.draining)
        scheduler.custom_policy = self._settings.custom_policy
        order = ResultOrder(self._store, scheduler, snapshot.waiting_entries)
        in_flight = [_as_in_flight(batch) for batch in self._store.batches_in_flight()]
        self._load_sequences(scheduler)  # after the batches: what these kept is known then
        last_id = self._store.last_waiting_id()
        if last_id is None:
            scheduler.sequences.complete()
        for batch_id, dispatch, dispatched_us in in_flight:
            scheduler.adopt(batch_id, dispatch, dispatched_us)
            order.launched(batch_id, dispatch.runs)
        now_us = self._clock.now_us()
        self._renew_bodies_at_us = now_us + BODIES_FIRST_RENEWED_US
        self._meter.activated(now_us)
        self._log.info(
            "batcher active",
            batcher=self._name,
            workers=len(snapshot.model_processes),
            entries=snapshot.waiting_entries,
        )
        subscription = reader.subscribe(self.keys, settled_after)
        self._session = LeaseSession(
            scheduler,
            reader,
            subscription,
            Backlog(),
            EntryTable(),
            order,
            MissedDeadlines(scheduler.learned, scheduler.in_flight()),
            MissingBatches(),
            MissingEntries(),
            UnreadEntries(last_id),
            LowestUnread(),
            EarlyRefusals(),
        )
        self._last_event_us = self.wake_at_us = now_us
        self.needs_snapshot = True

    def _load_sequences(self, scheduler: Scheduler) -> None:
        """Know the sequences that are kept, if the model has any. Until all requests were read that wait now,
        none of a sequence is dispatched: one that was put back stands later than its place."""
        self._store.has_sequences = scheduler.kind.has_sequences
        if self._store.has_sequences:
            is_bound = scheduler.kind is ModelKind.BOUND
            scheduler.sequences.load(self._store.kept_sequences(with_processes=is_bound))

    def log_lost_lease(self) -> None:
        """Another batcher has the lease, or may take it."""
        self._log.info("batcher no longer active, lease lost", batcher=self._name)

    def end(self) -> None:
        """Drop everything that was read: Redis has it all. May be called repeatedly."""
        if self._session is None:
            return
        self._session.reader.end(self._session.subscription)
        self._session = None
        self._answer_log.summarize()
        self._meter.deactivated()
        self.wake_at_us = None
        self.reads_at_us = 0
        self.needs_snapshot = False
        self.report_at_us = 0

    # --- one turn ------------------------------------------------------------------------------------------

    def receive(self, arrived: Arrived) -> None:
        """These entries were read: it needs a turn."""
        assert self._session is not None
        self._session.backlog.add(arrived)
        if arrived.requests:
            self._session.subscription.takes_requests = False  # until a turn has decided about these

    @property
    def has_backlog(self) -> bool:
        """Whether something was read that is not decided about yet."""
        return self._session is not None and bool(self._session.backlog)

    def turn(self) -> Generator[None]:
        """Decide about what was read and what is due, and act. In pieces: each takes some ms at most, and
        between them only `receive` and `end` may be called. After `end` it must not go on."""
        assert self._session is not None
        session, now_us = self._session, self._clock.now_us()
        scheduler = session.scheduler
        refusals: list[Refusal] = []
        emptied: list[Entry] = []
        settled: list[Settled] = []
        has_arrived = bool(session.backlog)
        if has_arrived:
            self._last_event_us = now_us
            settled = self._settle(session, session.backlog.take_settled(), now_us)
            if session.backlog.requests:
                refusals, emptied = yield from self._admit(session)
                now_us = self._clock.now_us()
            if session.backlog.oversized:
                oversized = session.backlog.take_oversized()
                refusals += yield from self._refuse_oversized(session, oversized, now_us)
        elif self.wake_at_us is not None and self.wake_at_us > self._turned_us:
            self._meter.woken(now_us - self.wake_at_us)
        self._turned_us = now_us
        self._carry_out_withdrawals(session, refusals, emptied, now_us)
        decisions = yield from scheduler.poll_in_pieces(now_us)
        if len(decisions) > PIECE_DECODED:
            yield
        yield from self._apply(session, decisions, refusals, emptied, now_us)
        self._count(settled)  # nobody waits for that
        self.wake_at_us = earlier(scheduler.wake_at_us(), session.early.due_us)
        # While nothing waits, no decision depends on a batch that settles.
        subscription = session.subscription
        subscription.awaits_settled = scheduler.waiting > 0
        subscription.takes_requests = not session.backlog.requests
        self.reads_at_us = 0
        if has_arrived:
            self._read_us = now_us
        if subscription.awaits_settled and not subscription.has_more and not session.backlog:
            earliest_us = scheduler.earliest_dispatch_us() - READ_AHEAD_US
            self.reads_at_us = min(earliest_us, self._read_us + READ_INTERVAL_US_MAX)

    def is_due(self, now_us: int) -> bool:
        """Whether it needs a turn now."""
        return self.has_backlog or (self.wake_at_us is not None and self.wake_at_us <= now_us)

    def is_idle(self) -> bool:
        """Whether nothing is to be done for the model, and has not been for a while."""
        assert self._session is not None
        scheduler = self._session.scheduler
        if scheduler.waiting or scheduler.withheld or scheduler.in_flight() or scheduler.sequences:
            return False
        if self._session.early.due_us is not None or self._session.backlog:
            return False
        return self._clock.now_us() - self._last_event_us > IDLE_AFTER_US

    def has_requests(self) -> bool:
        """Whether requests wait or are in flight, or results are withheld, as far as it knows."""
        if self._session is None:
            return False
        scheduler = self._session.scheduler
        known = scheduler.waiting or scheduler.withheld or scheduler.in_flight()
        return bool(known or self._waiting_entries)

    def _settle(self, session: LeaseSession, arrived: Sequence[RawEntry], now_us: int) -> list[Settled]:
        """Count the capacity of batches that settled as free, and learn from them. Returns them."""
        scheduler, is_awaited = session.scheduler, session.subscription.awaits_settled
        settled: list[Settled] = []
        for _, flat in arrived:
            event = decode_settled(flat)
            if type(event) is BatchSettled:
                batch = scheduler.in_flight().get(event.batch_id)
                if batch is not None:
                    settled_us = min(max(event.settled_us, batch.dispatched_us), now_us)
                    settled.append(Settled(event, batch, settled_us))
                    if is_awaited:
                        scheduler.learned.observe_delivery(now_us - settled_us)
                    self._count_missed(session.missed.settled(event, batch, settled_us))
                    scheduler.settle(
                        event.batch_id,
                        event.compute_us + event.overhead_us,
                        settled_us,
                        event.executed,
                        event.waited_us,
                        event.broken,
                        event.of_producers,
                    )
            else:
                self.needs_snapshot = True  # it counts the model processes, and has the settings
        return settled

    def _count(self, settled: Iterable[Settled]) -> None:
        for event, batch, settled_us in settled:
            self._meter.settled(batch, settled_us)
            if event.failures is not None:
                self._meter.failed(event.failures, settled_us)
            if event.streamed is not None:
                self._meter.stream_ended(event.streamed, settled_us)

    def _admit(self, session: LeaseSession) -> Generator[None, None, tuple[list[Refusal], list[Entry]]]:
        """Offer requests of the backlog to the scheduler. Returns the refusals, and entries without
        requests."""
        scheduler, entries, order = session.scheduler, session.entries, session.order
        backlog = session.backlog.requests
        now_us = self._clock.now_us()
        refusals: list[Refusal] = []
        ended: list[Refusal] = []
        emptied: list[Entry] = []
        order.before_admission()
        fresh: list[Entry] = []
        decoded_now = 0
        while backlog and decoded_now < TURN_DECODED_MAX:
            entry_id = backlog[0][0]
            found = yield from self._decode_next(session, now_us)
            yield
            if found is None:
                continue
            entry, decoded = found
            decoded_now += len(decoded)
            if len(decoded) > PIECE_DECODED:
                now_us = self._clock.now_us()  # time has passed
            entries[entry.id] = entry
            fresh.append(entry)
            match decoded:
                case [Withdrawal() as withdrawal]:
                    scheduler.withdraw(withdrawal)
                case [SequencesEnd() as end]:
                    ended += scheduler.end_sequences(end.sequence_ids, end.place)
                    emptied.append(entry)
                case _:
                    refusals += yield from _offer(scheduler, decoded, now_us)
            if len(decoded) > PIECE_DECODED:
                yield
        # Others were left unread on purpose, or may have been
        awaited = [entry for entry in fresh if entry.arrival_us >= self.reads_at_us]
        if awaited:
            self._meter.read(awaited, now_us)
        order.verify(fresh)
        if session.unread.become_read(entry_id):
            yield from self._complete_takeover(session)
        if scheduler.settings.preserve_ordering:
            # A request that is refused on arrival gets no ticket, so that its result need not wait. Refuse it
            # first: should this batcher end before it did, the next one would decide anew who gets one.
            runs = [run for entry in fresh for run in entry.runs]
            if refusals:
                yield from self._refuse(session, refusals, ())
                refusals = []
            order.admit(runs)
        # The rest of an entry may have been put back in others by then.
        return refusals + [refusal.where_it_is() for refusal in ended], emptied

    def _complete_takeover(self, session: LeaseSession) -> Iterator[None]:
        """All that waited when this batcher took over was read. What was left then is read from now on."""
        yield from session.scheduler.sequences.complete_in_pieces()
        if session.unread.resumes_after is not None:
            session.subscription.requests.rewind(session.unread.resumes_after)
            session.backlog.requests.clear()

    def _decode_next(
        self, session: LeaseSession, now_us: int
    ) -> Generator[None, None, tuple[Entry, list[Decoded]] | None]:
        """Take the next entry out of the backlog, and decode it. None if it is known, or left for later."""
        entries, unread, scheduler = session.entries, session.unread, session.scheduler
        entry_id, flat = session.backlog.requests.popleft()
        is_known = unread.resumes_after is not None and entry_id.decode() in entries  # it is read again
        if is_known or entries.was_put_back(entry_id) or unread.leaves(entry_id, flat):
            return None
        entry, decoded = yield from decode_in_pieces(
            entry_id, flat, scheduler.settings, now_us + CLOCK_LAG_US, unread.waited
        )
        flat.clear()  # they may be large, and what is needed of them was copied
        if unread.leaves_decoded(decoded, scheduler.settings.max_queue_size - scheduler.waiting):
            return None
        return entry, decoded

    def _carry_out_withdrawals(
        self, session: LeaseSession, refusals: list[Refusal], emptied: list[Entry], now_us: int
    ) -> None:
        """Withdraw what is in flight, and add to `refusals` what waits. The entry of a withdrawal is removed
        when that is answered: if this batcher ends before, the next one reads it."""
        withdrawn = session.scheduler.carry_out_withdrawals(now_us)
        if withdrawn.cancelled:
            self._cancel(session, withdrawn.cancelled)
        refusals += withdrawn.refusals
        emptied += withdrawn.entries

    def _refuse_oversized(
        self, session: LeaseSession, oversized: Sequence[OversizedEntry], now_us: int
    ) -> Generator[None, None, list[Refusal]]:
        """The refusals of entries that are too large to be read."""
        refusals: list[Refusal] = []
        for entry_id, flat, field, size_bytes in oversized:
            entry, decoded = refuse_oversized(entry_id, flat, field, size_bytes, now_us + CLOCK_LAG_US)
            session.entries[entry.id] = entry
            refusals += yield from _offer(session.scheduler, decoded, now_us)
            if session.unread.become_read(entry_id):
                yield from self._complete_takeover(session)
        return refusals

    # --- acting --------------------------------------------------------------------------------------------

    def _apply(
        self,
        session: LeaseSession,
        decisions: Sequence[Decision],
        refusals: list[Refusal],
        emptied: Sequence[Entry],
        now_us: int,
    ) -> Generator[None]:
        dispatches = [decision for decision in decisions if type(decision) is Dispatch]
        refusals += [decision for decision in decisions if type(decision) is Refusal]
        refusals = session.early.postpone(refusals, now_us)
        is_reading = session.scheduler.sequences.is_reading
        refusals, emptied = session.unread.postpone(refusals, emptied, is_reading=is_reading)
        changes = [decision for decision in decisions if type(decision) is SequenceChange]
        freed = [decision for decision in decisions if type(decision) is SlotFreed]
        if refusals or emptied or changes or freed:
            yield from self._refuse(session, refusals, emptied, changes, freed)
        if dispatches:
            yield from self._dispatch(session, dispatches, now_us)
        expired = [decision for decision in decisions if type(decision) is Expire]
        if expired:
            self._expire(session, expired)

    def _refuse(
        self,
        session: LeaseSession,
        refusals: Sequence[Refusal],
        emptied: Sequence[Entry],
        changes_of_sequences: Sequence[SequenceChange] = (),
        freed: Sequence[SlotFreed] = (),
    ) -> Generator[None]:
        """Answer requests that are not dispatched, in as many pieces as scripts are needed."""
        scheduler = session.scheduler
        session.order.enter_if_any()
        ttl_ms = scheduler.settings.result_ttl_ms
        answered: list[Refusal] = []
        for part in divide(refusals, emptied, changes_of_sequences, freed):
            if part is None:
                yield
                continue
            changes = self._store.refuse(
                part.refusals, part.emptied, ttl_ms, part.changes, part.freed, scheduler.is_body_in_use
            )
            self._follow(session, changes)
            missing = set(changes.missing)
            answered += [
                refusal
                for refusal in part.refusals
                if refusal.entry not in missing and refusal.status != UNANSWERED
            ]
            yield
        if answered:
            self._meter.refused(answered)
            numbers: Counter[str] = Counter()
            for refusal in answered:
                numbers[refusal.status] += len(refusal.correlation_ids)
            self._answer_log.refused(numbers)
            self._count_missed(causes_of_refusals(answered))
        custom = scheduler.custom_policy
        if custom is not None and any(refusal.reason == "policy" for refusal in answered):
            policy = scheduler.settings.policy
            self._log.error("policy raised an exception", policy=policy, reason=f"{custom.raised:.1000}")

    def _dispatch(
        self, session: LeaseSession, dispatches: Sequence[Dispatch], decided_us: int
    ) -> Generator[None]:
        scheduler = session.scheduler
        dispatches, copies = scheduler.separate(dispatches)
        for empty in [dispatch for dispatch in dispatches if not dispatch.runs]:
            scheduler.cancel(empty.process)
        dispatches = [dispatch for dispatch in dispatches if dispatch.runs]
        batches, changes, tickets = self._store.dispatch(
            dispatches,
            scheduler.settings.result_ttl_ms,
            session.order.take_arrivals(),
            scheduler.step_settings,
            scheduler.settings.max_execution_ms,
            scheduler.settings.max_result_bytes,
        )
        self._follow(session, changes)
        dispatched: list[Dispatch] = []
        for decided, batch in zip(dispatches, batches, strict=True):
            if batch is None:
                scheduler.cancel(decided.process)
            else:
                scheduler.launch(batch.batch_id, batch.dispatch, decided_us)
                session.order.launched(batch.batch_id, batch.dispatch.runs)
                dispatched.append(batch.dispatch)
        session.order.dispatched(tickets)
        self._meter.dispatched(dispatched, scheduler, self._clock.now_us())
        runs = [run for dispatch in dispatched for run in dispatch.runs]
        duplicates = scheduler.take_duplicates(runs, copies, decided_us)
        if duplicates:
            yield from self._refuse(session, duplicates, ())

    def _follow(self, session: LeaseSession, changes: EntryChanges) -> None:
        """A script changed entries in Redis."""
        session.scheduler.forget(session.entries.update_from(changes))

    def _expire(self, session: LeaseSession, expired: Sequence[Expire]) -> None:
        by_batch: dict[str, list[tuple[int, Run]]] = {}
        for batch_id, first, run in expired:
            by_batch.setdefault(batch_id, []).append((first, run))
        is_stepping = session.scheduler.kind is ModelKind.STEPPING
        expired_while = _EXPIRED_WHILE_STEPPING if is_stepping else _EXPIRED
        for batch_id, runs in by_batch.items():
            answers = [answer for first, run in runs for answer in _answers(first, run, *expired_while)]
            answered = self._answer_in_flight(session, batch_id, answers, DEADLINE_EXCEEDED)
            session.missed.expired(batch_id, runs, answered)
            session.scheduler.answered_in_flight(run for first, run in runs if first in (answered or ()))

    def _cancel(self, session: LeaseSession, cancelled: Iterable[Cancel]) -> None:
        """Answer requests that were withdrawn in flight. Their worker learns of it with its next step."""
        for batch_id, first, run in cancelled:
            self._answer_in_flight(session, batch_id, list(_answers(first, run, *_WITHDRAWN)), CANCELLED)

    def _answer_in_flight(
        self, session: LeaseSession, batch_id: str, answers: Sequence[Answer], status: str
    ) -> set[int] | None:
        """Answer requests of a batch in flight. Returns the positions that were answered now.

        None if the batch settled, which is read later: see `store.reader`.
        """
        ttl_ms = session.scheduler.settings.result_ttl_ms
        answered = self._store.answer_in_flight(batch_id, answers, ttl_ms)
        if answered:
            self._answer_log.answered_in_flight(status, len(answered))
            self._meter.answered_in_flight(status, len(answered))
        return answered

    def _count_missed(self, causes: Mapping[Cause, int]) -> None:
        if causes:
            self._meter.missed(causes)
            self._answer_log.missed(causes)

    # --- a few times a second ------------------------------------------------------------------------------

    def compare(self, snapshot: ModelSnapshot) -> None:
        """Compare with Redis: the workers, the settings, and what is missing there. A turn must follow."""
        assert self._session is not None
        session, now_us = self._session, self._clock.now_us()
        scheduler, entries = session.scheduler, session.entries
        self.needs_snapshot = False
        kind = ModelKind.of(snapshot.registration)
        if scheduler.kind is not kind:  # another model under this name
            if kind.has_sequences or scheduler.kind.has_sequences:
                raise ModelKindChangedError("another kind of model has this name now")
            scheduler.kind = kind
        self.wake_at_us = now_us
        before = scheduler.model_processes
        scheduler.follow_processes(snapshot.model_processes, snapshot.draining)
        if scheduler.model_processes > before:
            self.reads_at_us = 0  # another one can take a batch: first read what was left unread
        self._update_settings(scheduler, snapshot)
        settled_read = session.subscription.settled.after
        session.missing_batches.forget(
            self._store, scheduler, snapshot.batches_in_flight, settled_read, now_us
        )
        self._waiting_entries = waiting = snapshot.waiting_entries
        session.missing_entries.forget(self._store, scheduler, entries, waiting)
        cursor = session.subscription.requests.after
        known = len(entries) + len(session.backlog.requests)
        session.lowest_unread.verify(self._store, waiting, known, cursor, now_us)
        if waiting <= len(entries):
            scheduler.sequences.complete()  # the last unread one may have been removed
        session.missed.forget_missing(snapshot.model_processes)
        session.order.refresh(snapshot, entries)
        self._renew_bodies(entries, now_us)
        self._meter.update_gauges(scheduler, now_us)
        self._answer_log.summarize_if_due()

    def _renew_bodies(self, entries: EntryTable, now_us: int) -> None:
        """Now and then: stored bodies must not expire while their requests wait."""
        if now_us >= self._renew_bodies_at_us:
            self._renew_bodies_at_us = now_us + BODIES_RENEWED_US
            self._store.renew_bodies(bodies_waiting_since(entries, now_us - BODY_AGE_US))

    def _update_settings(self, scheduler: Scheduler, snapshot: ModelSnapshot) -> None:
        settings = self._settings.read(snapshot, scheduler.settings)
        if settings == scheduler.settings:
            return
        if settings.policy != scheduler.settings.policy:
            scheduler.custom_policy = self._settings.custom_policy
        before, scheduler.settings = scheduler.settings, settings
        self._log.info("settings changed", **before.changes_to(settings))

    def report(self) -> str:
        """The report for observers, to be published now."""
        assert self._session is not None
        now_us = self._clock.now_us()
        self.report_at_us = now_us + REPORT_INTERVAL_US
        scheduler = self._session.scheduler
        if scheduler.kind is ModelKind.STEPPING:
            self._meter.chunks_written(self._store.chunks_written(list(scheduler.in_flight())))
        return self._meter.report(
            self._name,
            scheduler,
            now_us,
            rejected_settings=self._settings.rejected_settings,
            policies=tuple(self._policies),
        ).encode()

    def report_refused(self, error: CommandError) -> None:
        """Redis did not accept the report. The model is served all the same."""
        self.report_at_us = self._clock.now_us() + REPORT_RETRY_US
        self._log.warning("report for carpool top not published", reason=str(error))


def _offer(
    scheduler: Scheduler, decoded: Sequence[Decoded], now_us: int
) -> Generator[None, None, list[Refusal]]:
    """Offer the runs of one entry to the scheduler, in pieces. Returns the refusals."""
    refusals: list[Refusal] = []
    for number, item in enumerate(decoded, 1):
        if type(item) is Run:
            refusals += scheduler.offer(item, now_us)
        elif type(item) is Refusal:
            refusals += scheduler.refuse_malformed(item)
        if not number % PIECE_DECODED:
            yield
    return refusals


# Status and detail of requests that are answered in flight.
_EXPIRED: Final = (DEADLINE_EXCEEDED, "expired: it was dispatched, but not executed by its deadline")
_EXPIRED_WHILE_STEPPING: Final = (DEADLINE_EXCEEDED, "expired: its output was not complete by its deadline")
_WITHDRAWN: Final = (CANCELLED, "withdrawn by its producer")


def _answers(first: int, run: Run, status: str, detail: str) -> Iterator[Answer]:
    """The answers to a run in flight, whose first request is at position `first`."""
    of_each = zip(run.correlation_ids, tickets_of_each(run), strict=True)
    content_type = answer_type(run.content_type, run.extra)
    for position, (correlation_id, ticket) in enumerate(of_each, first):
        warnings = warnings_of(run.extra, run.content_type)
        result = Result(correlation_id, status, content_type, detail=detail, warnings=warnings)
        part, change = run.sequence, None
        if part is not None:
            change = SequenceChange(part, correlation_id, "broken", did_not_succeed(correlation_id))
        yield Answer(position, Address(run.reply_to, ticket), result, change)


def _as_in_flight(batch: Batch) -> tuple[str, Dispatch, int]:
    """The ID of a batch, its dispatch, and when that was; without its bodies, which are large."""
    runs = [_as_run(run, batch.cost) for run in batch.runs]
    dispatch = Dispatch(runs, "idle", batch.lane, process=batch.process)
    return batch.id, dispatch, batch.dispatched_us


def _as_run(batched: BatchedRun, cost: int) -> Run:
    """A run in flight as the scheduler knows it; of its bodies only the names of stored ones are needed."""
    return Run(
        Entry(batched.entry_id, batched.arrival_us),
        batched.correlation_ids,
        only_stored(batched.bodies),
        batched.content_type,
        batched.reply_to,
        batched.arrival_us,
        batched.deadline_us,
        cost=cost,
        tickets=batched.tickets,
        sequence=batched.sequence,
    )
