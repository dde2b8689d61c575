"""The batcher of one model: read -> decide -> dispatch, refuse or answer ahead; on one thread.

The request stream in Redis is the set of waiting requests; the batcher only has a copy of it. After any error
(a broken connection, a lost lease) the copy is dropped, and the stream is read again from the beginning.

Any number of batchers may run for a model. A lease lets one of them form batches, because several would each
form smaller ones. Safety does not depend on it: a request is dispatched at most once anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from threading import Event
from typing import Final, NamedTuple

import structlog

from carpool.clock import RedisClock
from carpool.errors import DEADLINE_EXCEEDED
from carpool.keys import Keys
from carpool.messages import (
    BatchedRequest,
    BatchSettled,
    Dispatch,
    Entry,
    Refusal,
    Request,
    Result,
    SettledEvent,
    Withdrawal,
)
from carpool.store.batcher import BatcherStore, RawEntry, StreamReader
from carpool.store.connection import CommandError, Link
from carpool.store.directory import ModelSnapshot
from carpool.store.results import Address, Answer
from carpool.wire.requests import Decoded, decode_entry
from carpool_batcher.answer_log import AnswerLog
from carpool_batcher.core.scheduler import Decision, Expire, Scheduler
from carpool_batcher.effective_settings import EffectiveSettings, Policies
from carpool_batcher.entries import EntryTable, forget_missing_batches, forget_missing_entries
from carpool_batcher.meter import Meter
from carpool_batcher.ordering import ResultOrder, issue_ticket

LEASE_MS: Final = 2000
SNAPSHOT_INTERVAL_US: Final = 250_000
REPORT_INTERVAL_US: Final = 1_000_000
REPORT_RETRY_US: Final = 60_000_000  # after Redis refused it: an ACL file older than reports forbids it
REPORT_TTL_MS: Final = 5000
READ_ENTRIES_MAX: Final = 256
READ_ENTRIES_FIRST: Final = 8  # until the size of entries is known
READ_BYTES: Final = 32 * 1024 * 1024
BLOCK_MS: Final = 1000
CLOCK_LAG_US: Final = 10_000  # how far this process's clock may be behind Redis's, which stamps arrivals


class LeaseSession(NamedTuple):
    """What a batcher has only while it holds the lease."""

    scheduler: Scheduler
    reader: StreamReader
    entries: EntryTable
    order: ResultOrder


class ModelBatcher:
    """Serves one model, or stands by while another batcher does. `run_once` is one turn of the loop."""

    def __init__(self, url: str, keys: Keys, name: str, meter: Meter, policies: Policies) -> None:
        self._url = url
        self._keys = keys
        self._name = name
        self._meter = meter
        self._policies = policies
        self._clock = RedisClock()
        self._store = BatcherStore(Link(url, name=f"{name}:moves"), keys, self._clock)
        self._session: LeaseSession | None = None
        self._snapshot_at_us = 0  # when the next one is due; 0: now
        self._report_at_us = 0
        self._read_entries = READ_ENTRIES_FIRST
        self._log = structlog.get_logger().bind(model=keys.model)
        self._answer_log = AnswerLog(self._log)
        self._settings = EffectiveSettings(policies, self._log)
        self._stopping = Event()

    @property
    def active(self) -> bool:
        """Whether this batcher holds the model's lease."""
        return self._session is not None

    def run_once(self) -> None:
        """One turn: wait for something to happen, decide, act. After an error the next turn starts anew."""
        try:
            if self._session is None:
                self._stand_by()
            else:
                self._serve(self._session)
        except BaseException:
            self._end_session()
            raise

    def stop(self) -> None:
        """Wake up a batcher that stands by."""
        self._stopping.set()

    def close(self) -> None:
        """Give the lease back, so that another batcher takes over at once."""
        try:
            if self._session is not None:
                self._store.hold_lease(self._name, 0)
        finally:
            self._end_session()

    # --- the lease -----------------------------------------------------------------------------------------

    def _stand_by(self) -> None:
        if self._store.hold_lease(self._name, LEASE_MS):
            self._session = self._begin_session()
        else:
            self._stopping.wait(SNAPSHOT_INTERVAL_US / 1e6)

    def _begin_session(self) -> LeaseSession:
        snapshot = self._store.snapshot()
        settings = self._settings.read(snapshot, None)
        link = Link(self._url, name=f"{self._name}:reads")
        reader = StreamReader(link, self._keys, self._store.last_settled_id())
        scheduler = Scheduler(settings, len(snapshot.model_processes))
        scheduler.custom_policy = self._settings.create_policy(settings)
        for batch in self._store.batches_in_flight():
            requests = [_as_request(request) for request in batch.requests]
            scheduler.adopt(batch.id, Dispatch(requests, "idle", batch.lane), batch.dispatched_us)
        self._meter.activated(self._clock.now_us())
        self._log.info(
            "batcher active",
            batcher=self._name,
            workers=len(snapshot.model_processes),
            entries=snapshot.waiting_entries,
        )
        order = ResultOrder(self._store, scheduler, snapshot.waiting_entries)
        return LeaseSession(scheduler, reader, EntryTable(), order)

    def _end_session(self) -> None:
        """Drop everything that was read: Redis has it all."""
        if self._session is not None:
            self._session.reader.close()
            self._session = None
        self._store.close()
        self._answer_log.summarize()
        self._meter.deactivated()
        self._read_entries = READ_ENTRIES_FIRST
        self._snapshot_at_us = self._report_at_us = 0

    # --- one turn ------------------------------------------------------------------------------------------

    def _serve(self, session: LeaseSession) -> None:
        scheduler, reader = session.scheduler, session.reader
        if self._clock.now_us() >= self._snapshot_at_us:
            if not self._store.hold_lease(self._name, LEASE_MS):
                self._log.info("batcher no longer active, lease lost", batcher=self._name)
                self._end_session()
                return
            self._take_snapshot(session)
        reader.start_read(self._read_entries, BLOCK_MS)
        wake_at_us = min(scheduler.wake_at_us() or self._snapshot_at_us, self._snapshot_at_us)
        arrived, settled = reader.finish_read((wake_at_us - self._clock.now_us()) / 1e6)

        now_us = self._clock.now_us()
        self._settle(scheduler, settled, now_us)
        refusals, emptied = self._admit(session, arrived, now_us)
        decisions = scheduler.poll(now_us)
        self._apply(session, decisions, refusals, emptied, now_us)

    def _settle(self, scheduler: Scheduler, settled: Sequence[SettledEvent], now_us: int) -> None:
        for event in settled:
            if type(event) is BatchSettled:
                batch = scheduler.in_flight().get(event.batch_id)
                if batch is not None:
                    self._meter.settled(batch, now_us)
                scheduler.settle(event.batch_id, event.compute_us, now_us)
            else:
                self._snapshot_at_us = 0  # take a snapshot now, which counts model processes

    def _admit(
        self, session: LeaseSession, arrived: Sequence[RawEntry], now_us: int
    ) -> tuple[list[Refusal], list[Entry]]:
        """Offer arrived requests to the scheduler. Returns the refusals, and entries without requests."""
        scheduler, _, entries, order = session
        refusals: list[Refusal] = []
        emptied: list[Entry] = []
        order.before_admission()
        for entry_id, flat in arrived:
            if entry_id.decode() in entries:
                continue  # put back by this batcher
            entry, decoded = decode_entry(entry_id, flat, scheduler.settings, now_us + CLOCK_LAG_US)
            entries[entry.id] = entry
            match decoded:
                case [Withdrawal() as withdrawal]:
                    refusals += scheduler.withdraw(withdrawal.correlation_ids)
                    emptied.append(entry)
                case _:
                    refusals += _offer(scheduler, decoded, now_us)
        if arrived:
            self._limit_read(arrived)
            order.admit([entries[entry_id.decode()] for entry_id, _ in arrived])
        return refusals, emptied

    def _limit_read(self, arrived: Sequence[RawEntry]) -> None:
        """Read fewer entries at a time if they are large, so that a reply has about READ_BYTES at most."""
        read_bytes = sum(len(value) for _, flat in arrived for value in flat)
        bytes_per_entry = read_bytes // len(arrived) + 1
        self._read_entries = max(1, min(READ_ENTRIES_MAX, READ_BYTES // bytes_per_entry))

    # --- acting --------------------------------------------------------------------------------------------

    def _apply(
        self,
        session: LeaseSession,
        decisions: Sequence[Decision],
        refusals: list[Refusal],
        emptied: Sequence[Entry],
        now_us: int,
    ) -> None:
        dispatches = [decision for decision in decisions if type(decision) is Dispatch]
        refusals += [decision for decision in decisions if type(decision) is Refusal]
        if refusals or emptied:
            self._refuse(session, refusals, emptied)
        if dispatches:
            self._dispatch(session, dispatches, now_us)
        expired = [decision for decision in decisions if type(decision) is Expire]
        if expired:
            self._expire(session.scheduler, expired)

    def _refuse(self, session: LeaseSession, refusals: Sequence[Refusal], emptied: Sequence[Entry]) -> None:
        scheduler = session.scheduler
        changes = self._store.refuse(refusals, emptied, scheduler.settings.result_ttl_ms)
        scheduler.forget(session.entries.update_from(changes))
        missing = set(changes.missing)
        answered = [refusal for refusal in refusals if refusal.entry not in missing]
        if answered:
            self._meter.refused(answered)
            self._answer_log.refused(Counter(refusal.status for refusal in answered))
        custom = scheduler.custom_policy
        if custom is not None and any(refusal.reason == "policy" for refusal in answered):
            policy = scheduler.settings.policy
            self._log.error("policy raised an exception", policy=policy, reason=f"{custom.raised:.1000}")

    def _dispatch(self, session: LeaseSession, dispatches: Sequence[Dispatch], decided_us: int) -> None:
        scheduler = session.scheduler
        batches, changes = self._store.dispatch(dispatches, scheduler.settings.result_ttl_ms)
        scheduler.forget(session.entries.update_from(changes))
        dispatched: list[Dispatch] = []
        for batch in batches:
            if batch is None:
                scheduler.cancel()
            else:
                scheduler.launch(batch.batch_id, batch.dispatch, decided_us)
                dispatched.append(batch.dispatch)
        self._meter.dispatched(dispatched, scheduler, self._clock.now_us())

    def _expire(self, scheduler: Scheduler, expired: Sequence[Expire]) -> None:
        by_batch: dict[str, list[Answer]] = {}
        answered = 0
        for batch_id, position, request in expired:
            detail = "expired: it was dispatched, but not executed by its deadline"
            result = Result(request.correlation_id, DEADLINE_EXCEEDED, request.content_type, detail=detail)
            by_batch.setdefault(batch_id, []).append(Answer(position, Address.of(request), result))
        for batch_id, answers in by_batch.items():
            answered += self._store.expire_in_flight(batch_id, answers, scheduler.settings.result_ttl_ms)
        self._meter.expired_in_flight(answered)
        self._answer_log.expired_in_flight(answered, len(by_batch))

    # --- a few times a second ------------------------------------------------------------------------------

    def _take_snapshot(self, session: LeaseSession) -> None:
        """Compare with Redis: the clock, the workers, the settings, and what is missing there."""
        scheduler, _, entries, order = session
        snapshot = self._store.snapshot()
        if self._snapshot_at_us:
            self._meter.renewed(self._clock.now_us() - self._snapshot_at_us)
        scheduler.model_processes = len(snapshot.model_processes)
        self._update_settings(scheduler, snapshot)
        now_us = self._clock.now_us()
        self._snapshot_at_us = now_us + SNAPSHOT_INTERVAL_US
        forget_missing_batches(self._store, scheduler, snapshot.batches_in_flight, now_us)
        forget_missing_entries(self._store, scheduler, entries, snapshot.waiting_entries)
        order.refresh(snapshot, entries)
        self._meter.update_gauges(scheduler, now_us)
        self._answer_log.summarize_if_due()
        if now_us >= self._report_at_us:
            self._publish_report(scheduler, now_us)

    def _update_settings(self, scheduler: Scheduler, snapshot: ModelSnapshot) -> None:
        settings = self._settings.read(snapshot, scheduler.settings)
        if settings == scheduler.settings:
            return
        if settings.policy != scheduler.settings.policy:
            scheduler.custom_policy = self._settings.create_policy(settings)
        scheduler.settings = settings
        self._log.info("settings changed", **{**snapshot.registration, **snapshot.config})

    def _publish_report(self, scheduler: Scheduler, now_us: int) -> None:
        """Publish the report for observers. The model is served all the same if Redis does not allow it."""
        self._report_at_us = now_us + REPORT_INTERVAL_US
        report = self._meter.report(
            self._name,
            scheduler,
            now_us,
            rejected_settings=self._settings.rejected_settings,
            policies=tuple(self._policies),
        )
        try:
            self._store.publish_report(report.encode(), REPORT_TTL_MS)
        except CommandError as error:
            self._report_at_us = now_us + REPORT_RETRY_US
            self._log.warning("report for carpool top not published", reason=str(error))


def _offer(scheduler: Scheduler, decoded: Sequence[Decoded], now_us: int) -> list[Refusal]:
    """Offer the requests of one entry to the scheduler. Returns the refusals.

    With `preserve_ordering` all others get tickets. A request that is refused on arrival gets none, so that
    its result need not wait for earlier ones.
    """
    preserve_ordering = scheduler.settings.preserve_ordering
    refusals: list[Refusal] = []
    for position, item in enumerate(decoded):
        if type(item) is Request:
            refused = scheduler.offer(item, now_us)
            if refused is not None:
                refusals.append(refused)
            elif preserve_ordering:
                issue_ticket(item, position)
        elif type(item) is Refusal:
            refusals.append(item)
    return refusals


def _as_request(batched: BatchedRequest) -> Request:
    """A request in flight as the scheduler knows it; its body is not needed any more."""
    return Request(
        Entry(batched.entry_id, batched.arrival_us),
        batched.correlation_id,
        b"",
        batched.content_type,
        batched.reply_to,
        batched.arrival_us,
        batched.deadline_us,
        ticket=batched.ticket,
    )
