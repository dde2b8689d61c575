"""The batcher of one model: read -> decide -> dispatch, on one thread.

The request stream itself is the set of waiting requests; what is kept here is a copy of it that can be lost.
After any doubt (a broken connection, a lost lease) the copy is thrown away and read again from the beginning.
Any number of batchers may run: a lease lets one of them form batches, so that batches are full. Safety does
not hang on the lease: a dispatch takes effect at most once, whoever sends it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Event
from typing import Any, Final, NamedTuple

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
    Withdrawal,
    WorkersChanged,
)
from carpool.model_settings import POLICIES, ModelSettings
from carpool.store.batcher import BatcherStore, RawEntry, Tail
from carpool.store.connection import CommandError, Link
from carpool.store.directory import ModelSnapshot
from carpool.store.results import Address, Answer
from carpool.wire.requests import Decoded, decode_entry, ticket_of
from carpool_batcher.core.custom import CustomPolicy
from carpool_batcher.core.scheduler import Decision, Expire, Scheduler
from carpool_batcher.meter import Meter

LEASE_MS: Final = 2000
SNAPSHOT_EVERY_US: Final = 250_000
STATUS_EVERY_US: Final = 1_000_000
STATUS_REFUSED_US: Final = 60_000_000  # by Redis: an ACL file of before there was a status
STATUS_TTL_MS: Final = 5000
READ_ENTRIES: Final = 256
READ_ENTRIES_FIRST: Final = 8  # until it is known how large they are
READ_BYTES: Final = 32 * 1024 * 1024
BLOCK_MS: Final = 1000
UNSEEN_AFTER_US: Final = 1_000_000
CLOCK_SLACK_US: Final = 10_000  # how far ahead of this clock an arrival may be: it is a little behind Redis's


Policies = Mapping[str, Callable[[], Any]]  # of users' own, by the name that a model says


class Active(NamedTuple):
    """What a batcher has only while it holds the lease."""

    scheduler: Scheduler
    tail: Tail
    entries: dict[str, Entry]  # every entry of the request stream that has been read, by its current ID


class ModelBatcher:
    """Serves one model, or stands by while another batcher does. `run_once` is one turn of the loop."""

    def __init__(self, url: str, keys: Keys, name: str, meter: Meter, policies: Policies) -> None:
        self._url = url
        self._keys = keys
        self._name = name
        self._meter = meter
        self._policies = policies
        self._nonsense = ""  # why the settings in Redis are not followed
        self._clock = RedisClock()
        self._store = BatcherStore(Link(url, name=f"{name}:moves"), keys, self._clock)
        self._active: Active | None = None
        self._snapshot_at_us = 0
        self._status_at_us = 0
        self._read_entries = READ_ENTRIES_FIRST
        self._unread = 0  # entries that waited when this batcher took over, and that it has still to read
        self._log = structlog.get_logger().bind(model=keys.model)
        self._stopping = Event()

    @property
    def active(self) -> bool:
        """Whether this batcher holds the model's lease."""
        return self._active is not None

    def run_once(self) -> None:
        """One turn: wait for something to happen, decide, act. On LinkError or anything else: start over."""
        try:
            if self._active is None:
                self._stand_by()
            else:
                self._serve(self._active)
        except BaseException:
            self._step_back()
            raise

    def stop(self) -> None:
        """Wake up a batcher that stands by; it takes no lease from now on."""
        self._stopping.set()

    def close(self) -> None:
        """Give the lease back, so that another batcher takes over at once."""
        try:
            if self._active is not None:
                self._store.hold_lease(self._name, 0)
        finally:
            self._step_back()

    # --- the lease -----------------------------------------------------------------------------------------

    def _stand_by(self) -> None:
        if not self._store.hold_lease(self._name, LEASE_MS):
            self._stopping.wait(SNAPSHOT_EVERY_US / 1e6)
            return
        snapshot = self._store.snapshot()
        settings = self._settings(snapshot, None)
        tail = Tail(Link(self._url, name=f"{self._name}:reads"), self._keys, self._store.last_settled_id())
        scheduler = Scheduler(settings, len(snapshot.workers))
        scheduler.custom_policy = self._custom(settings)
        for batch in self._store.batches_in_flight():
            requests = [_as_request(one) for one in batch.requests]
            scheduler.adopt(batch.id, Dispatch(requests, "idle", batch.lane), batch.dispatched_us)
        self._active = Active(scheduler, tail, {})
        self._unread = snapshot.waiting_entries
        self._meter.took_over(self._clock.now_us())
        self._log.info(
            "batcher active",
            batcher=self._name,
            workers=len(snapshot.workers),
            entries=snapshot.waiting_entries,
        )

    def _step_back(self) -> None:
        """Forget everything that was read: the streams know better."""
        if self._active is not None:
            self._active.tail.close()
            self._active = None
        self._store.close()
        self._meter.stood_by()
        self._read_entries = READ_ENTRIES_FIRST
        self._snapshot_at_us = self._status_at_us = 0

    # --- one turn ------------------------------------------------------------------------------------------

    def _serve(self, active: Active) -> None:
        scheduler, tail, _ = active
        now_us = self._clock.now_us()
        if now_us >= self._snapshot_at_us:
            if not self._store.hold_lease(self._name, LEASE_MS):
                self._log.info("lease lost", batcher=self._name)
                self._step_back()
                return
            self._take_snapshot(active)
        tail.ask(self._read_entries, BLOCK_MS)
        wake_at_us = min(scheduler.wake_at_us() or self._snapshot_at_us, self._snapshot_at_us)
        arrived, settled = tail.hear((wake_at_us - self._clock.now_us()) / 1e6)

        now_us = self._clock.now_us()
        self._settle(scheduler, settled, now_us)
        refusals, emptied = self._admit(active, arrived, now_us)
        decisions = scheduler.poll(now_us)
        self._carry_out(active, decisions, refusals, emptied, now_us)

    def _settle(
        self, scheduler: Scheduler, settled: Sequence[BatchSettled | WorkersChanged], now_us: int
    ) -> None:
        for one in settled:
            if type(one) is BatchSettled:
                batch = scheduler.in_flight().get(one.batch_id)
                if batch is not None:
                    self._meter.settled(batch, now_us)
                scheduler.settle(one.batch_id, one.compute_us, now_us)
            else:
                self._snapshot_at_us = 0

    def _admit(
        self, active: Active, arrived: Sequence[RawEntry], now_us: int
    ) -> tuple[list[Refusal], list[Entry]]:
        """Offer what arrived. Returns who is refused, and entries that only carried a word."""
        scheduler, _, entries = active
        refusals: list[Refusal] = []
        emptied: list[Entry] = []
        if (
            scheduler.withheld
            and 2 * (scheduler.waiting + scheduler.withheld) > scheduler.settings.max_queue_size
        ):
            self._hold(scheduler, self._store.admit(()))  # nobody is refused for what is out by now
        for entry_id, flat in arrived:
            if entry_id.decode() in entries:
                continue  # put back by this batcher's own dispatch
            entry, decoded = decode_entry(entry_id, flat, scheduler.settings, now_us + CLOCK_SLACK_US)
            entries[entry.id] = entry
            match decoded:
                case [Withdrawal() as word]:
                    refusals += scheduler.withdraw(word.correlation_ids)
                    emptied.append(entry)
                case _:
                    refusals += _offer(scheduler, decoded, now_us)
        if arrived:
            self._pace(arrived)
            self._unread = max(0, self._unread - len(arrived))
            if scheduler.settings.preserve_ordering:
                self._take_tickets(active, arrived)
        return refusals, emptied

    def _take_tickets(self, active: Active, arrived: Sequence[RawEntry]) -> None:
        """Who has a ticket takes it, in the order of arrival; what was put back has it, and keeps it."""
        entries = [active.entries[entry_id.decode()] for entry_id, _ in arrived]
        self._hold(active.scheduler, self._store.admit(entries))

    def _hold(self, scheduler: Scheduler, tickets: int) -> None:
        """Count the tickets that belong neither to waiting requests nor to those in flight: withheld results.

        While entries read by a previous batcher are still unread here, assume that no results are withheld.
        """
        riding = sum(one.size for one in scheduler.in_flight().values())
        scheduler.set_withheld(0 if self._unread else max(0, tickets - scheduler.waiting - riding))

    def _pace(self, arrived: Sequence[RawEntry]) -> None:
        """Ask for fewer entries at a time where they are large, so that one reply fits in memory."""
        read_bytes = sum(len(value) for _, flat in arrived for value in flat)
        per_entry = read_bytes // len(arrived) + 1
        self._read_entries = max(1, min(READ_ENTRIES, READ_BYTES // per_entry))

    # --- acting --------------------------------------------------------------------------------------------

    def _carry_out(
        self,
        active: Active,
        decisions: Sequence[Decision],
        refusals: list[Refusal],
        emptied: Sequence[Entry],
        now_us: int,
    ) -> None:
        dispatches = [one for one in decisions if type(one) is Dispatch]
        refusals += [one for one in decisions if type(one) is Refusal]
        if refusals or emptied:
            self._refuse(active, refusals, emptied)
        if dispatches:
            self._dispatch(active, dispatches, now_us)
        in_flight = [one for one in decisions if type(one) is Expire]
        if in_flight:
            self._expire(active.scheduler, in_flight)

    def _refuse(self, active: Active, refusals: Sequence[Refusal], emptied: Sequence[Entry]) -> None:
        ttl_ms = active.scheduler.settings.result_ttl_ms
        touched = {one.entry: one.entry.id for one in refusals} | {entry: entry.id for entry in emptied}
        vanished = self._store.refuse(refusals, emptied, ttl_ms)
        _rename(active, touched, vanished)
        gone = set(vanished)
        answered = [one for one in refusals if one.entry not in gone]
        if answered:
            self._meter.refused(answered)
            self._log.info("refused", **Counter(one.status for one in answered))
        custom = active.scheduler.custom_policy
        if custom is not None and any(one.reason == "policy" for one in answered):
            policy = active.scheduler.settings.policy
            self._log.error("policy raised", policy=policy, reason=f"{custom.raised:.1000}")

    def _dispatch(self, active: Active, dispatches: Sequence[Dispatch], decided_us: int) -> None:
        scheduler = active.scheduler
        touched = {request.entry: request.entry.id for one in dispatches for request in one.requests}
        dispatched, vanished = self._store.dispatch(dispatches, scheduler.settings.result_ttl_ms)
        _rename(active, touched, vanished)
        for one in dispatched:
            if one is None:
                scheduler.cancel()
            else:
                scheduler.launch(one.batch_id, one.dispatch, decided_us)
        batches = [one.dispatch for one in dispatched if one is not None]
        self._meter.dispatched(batches, scheduler, self._clock.now_us())

    def _expire(self, scheduler: Scheduler, in_flight: Sequence[Expire]) -> None:
        by_batch: dict[str, list[Answer]] = {}
        answered = 0
        for batch_id, position, request in in_flight:
            detail = "expired: its batch was dispatched, but not done by its deadline"
            result = Result(request.correlation_id, DEADLINE_EXCEEDED, request.content_type, detail=detail)
            by_batch.setdefault(batch_id, []).append(Answer(position, Address.of(request), result))
        for batch_id, answers in by_batch.items():
            answered += self._store.expire_in_flight(batch_id, answers, scheduler.settings.result_ttl_ms)
        self._meter.expired_in_flight(answered)
        self._log.info("expired in flight", requests=answered, batches=len(by_batch))

    # --- looking around ------------------------------------------------------------------------------------

    def _take_snapshot(self, active: Active) -> None:
        """Now and then: the clock, the workers, the settings, and what vanished without a word."""
        snapshot = self._store.snapshot()
        scheduler = active.scheduler
        if self._snapshot_at_us:
            self._meter.renewed(self._clock.now_us() - self._snapshot_at_us)
        scheduler.model_processes = len(snapshot.workers)
        settings = self._settings(snapshot, scheduler.settings)
        if settings != scheduler.settings:
            if settings.policy != scheduler.settings.policy:
                scheduler.custom_policy = self._custom(settings)
            scheduler.settings = settings
            self._log.info("settings changed", **{**snapshot.registration, **snapshot.config})
        now_us = self._clock.now_us()
        self._snapshot_at_us = now_us + SNAPSHOT_EVERY_US
        self._find_unseen(active, snapshot, now_us)
        if snapshot.waiting_entries <= len(active.entries):
            self._unread = 0  # some were withdrawn meanwhile
        self._hold(scheduler, snapshot.tickets)
        if snapshot.tickets:
            self._store.release(active.entries, scheduler.in_flight())
        self._meter.looked(scheduler, now_us)
        if now_us >= self._status_at_us:
            self._publish_status(scheduler, now_us)

    def _publish_status(self, scheduler: Scheduler, now_us: int) -> None:
        """For whoever watches. That it may not be said is no reason to batch nothing."""
        self._status_at_us = now_us + STATUS_EVERY_US
        try:
            report = self._meter.report(
                self._name,
                scheduler,
                now_us,
                rejected_settings=self._nonsense,
                policies=tuple(self._policies),
            )
            self._store.publish_status(report.encode(), STATUS_TTL_MS)
        except CommandError as error:
            self._status_at_us = now_us + STATUS_REFUSED_US
            self._log.warning("status not published", reason=str(error))

    def _settings(self, snapshot: ModelSnapshot, otherwise: ModelSettings | None) -> ModelSettings:
        """What is registered, and an operator's word before it; what makes no sense changes nothing.

        One who has just taken over has no settings to keep: it goes by what the model itself says, and
        eagerly where it does not know the model's policy.
        """
        try:
            settings = self._understood({**snapshot.registration, **snapshot.config})
        except ValueError as error:
            if str(error) != self._nonsense:  # once, and not a few times a second
                self._log.error("settings make no sense", reason=str(error))
            self._nonsense = str(error)
        else:
            self._nonsense = ""
            return settings
        if otherwise is not None:
            return otherwise
        for words in (snapshot.registration, {**snapshot.registration, "policy": POLICIES[0]}):
            with contextlib.suppress(ValueError):
                return self._understood(words)
        return ModelSettings()

    def _understood(self, words: Mapping[str, str]) -> ModelSettings:
        settings = ModelSettings.from_mapping(words)
        if settings.policy not in (*POLICIES, *self._policies):
            raise ValueError(f"policy: {settings.policy!r} is none of this batcher's --policies")
        return settings

    def _custom(self, settings: ModelSettings) -> CustomPolicy | None:
        """The policy of a user's own, made anew; one that cannot be made is the model's bad luck: eager."""
        if settings.policy in POLICIES:
            return None
        try:
            return CustomPolicy(self._policies[settings.policy]())
        except Exception as error:
            self._log.error("policy cannot be made", policy=settings.policy, reason=str(error))
            return None

    def _find_unseen(self, active: Active, snapshot: ModelSnapshot, now_us: int) -> None:
        """Room and queue must not leak: look up what should be there but, by the count, is not."""
        scheduler, _, entries = active
        if snapshot.batches_in_flight < len(scheduler.in_flight()):
            old = [
                batch_id
                for batch_id, riding in scheduler.in_flight().items()
                if riding.dispatched_us < now_us - UNSEEN_AFTER_US
            ]
            for batch_id in self._store.missing(self._keys.batches, old) if old else ():
                scheduler.forget_batch(batch_id, now_us)
        if snapshot.waiting_entries < len(entries):
            for entry_id in self._missing_entries(entries):
                entry = entries.pop(entry_id)
                scheduler.forget(entry.requests)

    def _missing_entries(self, entries: Iterable[str]) -> set[str]:
        known = list(entries)
        missing: set[str] = set()
        for start in range(0, len(known), 1000):
            missing |= self._store.missing(self._keys.requests, known[start : start + 1000])
        return missing


def _rename(active: Active, touched: dict[Entry, str], vanished: Sequence[Entry]) -> None:
    """Entries of which requests left are gone, or known by a new ID; in those that vanished nobody waits."""
    for entry in vanished:
        active.scheduler.forget(entry.requests)
        entry.requests = []
    for entry, old_id in touched.items():
        active.entries.pop(old_id, None)
        if entry.requests:
            active.entries[entry.id] = entry


def _offer(scheduler: Scheduler, decoded: Sequence[Decoded], now_us: int) -> list[Refusal]:
    """Offer an entry's requests. Returns the refusals. With `preserve_ordering` all others get tickets.

    A request refused on arrival gets none: its result does not wait for earlier ones.
    """
    in_order = scheduler.settings.preserve_ordering
    refusals: list[Refusal] = []
    for at, one in enumerate(decoded):
        if type(one) is Request:
            refused = scheduler.offer(one, now_us)
            if refused is not None:
                refusals.append(refused)
            elif in_order and one.ticket is None:
                one.ticket = ticket_of(one.entry.id, at)
        elif type(one) is Refusal:
            refusals.append(one)
    return refusals


def _as_request(one: BatchedRequest) -> Request:
    """A request in flight as the scheduler knows it."""
    return Request(
        Entry(one.entry_id, one.arrival_us),
        one.correlation_id,
        b"",
        one.content_type,
        one.reply_to,
        one.arrival_us,
        one.deadline_us,
        ticket=one.ticket,
    )
