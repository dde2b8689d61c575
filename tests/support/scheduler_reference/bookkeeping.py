"""Where each request is, by the reference, and what the batcher and its scripts do with it in Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from unittest import mock

from hypothesis.stateful import RuleBasedStateMachine

from carpool.messages.requests import Entry, Run
from carpool.messages.results import Refusal
from carpool.rows import Bodies, Rows, StoredBody
from carpool_batcher.core import applied_settings
from carpool_batcher.core.pause import Pause
from carpool_batcher.core.scheduler import Decision, Dispatch, Scheduler
from carpool_batcher.core.waiting.lane_index import Claim, Gate
from carpool_batcher.core.waiting.withdrawals import PAUSE_US
from support.scheduler_reference.drawn import MAX_BATCH_BYTES, START_US, Item, Traits, names_of


class Bookkeeping(RuleBasedStateMachine):
    """The reference is `waiting`, `in_flight` and `answered`: where each admitted request is.

    Of those that wait, `delayed` have expired and are served all the same. `waiting` maps to the order of
    arrival.
    """

    scheduler: Scheduler
    custom: bool  # whether it has a custom policy
    paused: Pause | None = None

    def __init__(self) -> None:
        super().__init__()
        self.limit = mock.patch.object(applied_settings, "MAX_BATCH_BYTES", MAX_BATCH_BYTES)
        self.limit.start()
        self.now_us = START_US
        self.items: dict[tuple[Entry, str], Item] = {}
        self.redis: dict[str, set[str]] = {}  # the correlation IDs in each entry
        self.table: dict[str, Entry] = {}  # the entries as the batcher has them
        self.copies: list[tuple[str, list[tuple[Traits, list[str]]]]] = []  # of entries that were changed
        self.carried_out: set[str] = set()  # each ID only once
        self.waiting: dict[Item, int] = {}
        self.undated: set[Item] = set()  # in flight, without a deadline there
        self.delayed: set[Item] = set()
        self.leads: dict[tuple[int, str, str], float] = {}  # see _check_fairness
        self.served: dict[tuple[int, str], float] = {}
        self.held_off: set[tuple[int, str]] = set()  # tenants that could not be served since they were
        self.overtaken = 0  # batches dispatched since a lane that came first had to wait for a process
        self.withdrawals: list[Entry] = []  # those that were not carried out
        self.withdrawn: set[Item] = set()  # by these, of those that waited then
        self.look_due_us = 0
        self.in_flight: dict[str, list[Item]] = {}
        self.answered: set[Item] = set()
        self.polled = False  # no event since the last poll, and no time passed
        self.closed_until_us = 0  # by the last poll; 0 if more happened since than arrivals
        self.in_poll = False  # a poll is being checked, or its check failed
        self.looks = 0  # of the dispatcher at the lanes, in this poll
        self.overtaken_max = 0  # what the dispatcher itself counted at these: it starts anew within a poll
        self.number = 0
        self.turnaround_us_max = 0
        self.processes_max = 0
        self.waiting_max = 0

    def _count_looks(self) -> None:
        """A poll ends; and what the dispatcher decides by is known."""

        def first(gates: Sequence[Gate], now_us: int) -> Claim | None:
            self.looks += 1
            assert self.looks <= 100 + 4 * self.number, "the dispatcher looks at the lanes for ever"
            self.overtaken_max = max(self.overtaken_max, self.scheduler._dispatchers.of_any._overtaken)
            return original(gates, now_us)

        index = self.scheduler._dispatchers.of_any._index
        original = index.first
        index.first = first  # type: ignore[method-assign]

    # --- requests -----------------------------------------------------------------------------------------

    def _names(self, fields: Traits) -> list[str]:
        self.number += len(fields.sizes_bytes)
        return [f"r{self.number - at}" for at in range(len(fields.sizes_bytes))]

    def _entry(self, runs: list[tuple[Traits, list[str]]], entry_id: str | None = None) -> Entry:
        self.number += 1
        entry = Entry(entry_id or f"{self.number}-0", self.now_us)
        # What is read again has another address: `test_any_fields.py` is about requests sent again.
        reply_to = None if entry_id is None else f"{self.number}"
        entry.runs = [self._run(entry, fields, names, reply_to) for fields, names in runs]
        self.copies.append((entry.id, runs))
        return entry

    def _run(
        self, entry: Entry, fields: Traits, names: list[str] | None = None, reply_to: str | None = None
    ) -> Run:
        names = self._names(fields) if names is None else names
        arrival_us = self.now_us - fields.ago_us
        sizes = fields.sizes_bytes
        bodies: Bodies = [StoredBody("x", size) if size == 15 else b"x" * size for size in sizes]
        if fields.rows:
            bodies = Rows(b"x" * sizes[0], b"y" * len(sizes), 1)
            sizes = [1 + sizes[0]] * len(sizes)
        run = Run(
            entry,
            names,
            bodies,
            reply_to=reply_to,
            arrival_us=arrival_us,
            deadline_us=None if fields.expiration_us is None else arrival_us + fields.expiration_us,
            priority=fields.priority,
            lane=fields.lane,
            tenant=fields.tenant,
            cost=fields.cost,
            extra={"": b"x" * fields.extra_bytes} if fields.extra_bytes else None,
        )
        for name, size in zip(names, sizes, strict=True):
            self.items[entry, name] = Item(
                entry, name, size + fields.extra_bytes, arrival_us, run.deadline_us, run.priority, run.lane,
                run.tenant, run.cost,
            )  # fmt: skip
        return run

    def _items_of(self, runs: Iterable[Run]) -> list[Item]:
        return [self.items[run.entry, name] for run in runs for name in run.correlation_ids]

    def _items_of_refusals(self, refusals: list[Refusal]) -> list[Item]:
        for refusal in refusals:
            assert refusal.run is not None and refusal.run.entry is refusal.entry
            assert refusal.run.correlation_ids == list(refusal.correlation_ids)
        return self._items_of(refusal.run for refusal in refusals if refusal.run is not None)

    def _rank_of(self, request: Item) -> int:
        return -1 if request in self.delayed else request.priority

    def _advance(self, now_us: int) -> None:
        self.polled = self.polled and now_us == self.now_us
        self.now_us = now_us

    # --- arrivals, and what is refused --------------------------------------------------------------------

    def _offer(self, entry: Entry) -> None:
        self.table[entry.id] = entry
        refusals: list[Refusal] = []
        for run in list(entry.runs):
            expected = {name: self._admit(self.items[entry, name]) for name in run.correlation_ids}
            refused = self.scheduler.offer(run, self.now_us)
            for item in self._items_of([run]):
                item.is_doubtful = run.is_doubtful
            listed = {name: one.status for one in refused for name in one.correlation_ids}
            assert listed == {name: status for name, status in expected.items() if status is not None}
            assert sum(len(one.correlation_ids) for one in refused) == len(listed)
            refusals += refused
            self.answered.update(self.items[entry, name] for name in listed)
        self._carry_out_refusals(refusals)
        self.polled = False

    def _admit(self, item: Item) -> str | None:
        """The status of a request that is not admitted."""
        settings = self.scheduler.settings
        if settings.max_batch_cost is not None and item.cost > settings.max_batch_cost:
            return "INVALID_ARGUMENT"
        waiting_bytes = sum(r.bytes for r in self.waiting) + item.bytes
        if (
            len(self.waiting) >= settings.max_queue_size
            or waiting_bytes > settings.max_queue_bytes
            or self._is_priority_full(item.priority)
        ):
            return "RESOURCE_EXHAUSTED"
        self.number += 1
        self.waiting[item] = self.number
        return None

    def _is_priority_full(self, priority: int) -> bool:
        policy = self.scheduler.settings.priority_policies.get(priority)
        same = [r for r in self.waiting if r.priority == priority]
        return policy is not None and policy.max_queue_size is not None and len(same) >= policy.max_queue_size

    def _remove(self, removed: Iterable[Item]) -> None:
        for item in removed:
            assert item in self.waiting
            del self.waiting[item]
            self.delayed.discard(item)
            self.answered.add(item)
        self._forget_leads()

    def _remove_refused(self, refusals: list[Refusal], *, expected: set[Item]) -> None:
        listed = self._items_of_refusals(refusals)
        assert len(listed) == len(set(listed)) and set(listed) == expected
        self._remove(listed)

    def _delay(self, delayed: set[Item], decisions: Sequence[Decision]) -> None:
        """These requests expired, and are behind all others. Their order among each other is not checked."""
        self.delayed |= delayed
        runs: list[Run] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                runs += decision.runs
            elif isinstance(decision, Refusal) and decision.run is not None:
                runs.append(decision.run)
        runs += [run for lane in self.scheduler.queue.lanes.values() for run in lane]
        for request in self._items_of(runs):
            if request in delayed:
                self.number += 1
                self.waiting[request] = self.number

    def _forget_leads(self, of: set[tuple[int, str]] | None = None) -> None:
        """Forget the leads of these; by default, of the tenants without waiting requests."""
        waiting = {(self._rank_of(r), r.tenant) for r in self.waiting}
        kept = waiting - (of or set())
        self.leads = {
            (rank, one, other): lead
            for (rank, one, other), lead in self.leads.items()
            if {(rank, one), (rank, other)} <= kept
        }
        self.held_off &= waiting

    # --- what the batcher and the scripts do --------------------------------------------------------------

    def _carry_out_withdrawals(self) -> None:
        """As in each turn of a batcher. What arrived after its withdrawal still waits."""
        waiting = len(self.waiting)
        refusals, cancelled, entries = self.scheduler.carry_out_withdrawals(self.now_us)
        assert not cancelled
        if not entries:
            assert not refusals
            assert not self.withdrawals or self.now_us < self.look_due_us
            return
        assert entries == self.withdrawals
        assert [refusal.status for refusal in refusals] == ["CANCELLED"] * len(refusals)
        self._remove_refused(list(refusals), expected={r for r in self.withdrawn if r in self.waiting})
        self._carry_out_refusals(list(refusals))
        self.withdrawals, self.look_due_us = [], self.now_us + PAUSE_US * waiting
        self.withdrawn.clear()

    def _carry_out_refusals(self, refusals: list[Refusal]) -> None:
        self._carry_out([refusal.run for refusal in refusals if refusal.run is not None])

    def _carry_out(self, decided: list[Run]) -> list[Run]:
        """Remove decided runs from their entries in Redis, and put back the others under another ID. Returns
        those of the decided runs that were still there."""
        carried_out: list[Run] = []
        for entry in dict.fromkeys(run.entry for run in decided):
            of_entry = [run for run in decided if run.entry is entry]
            if entry.id not in self.redis:
                self._forget(entry)
                continue
            names = names_of(of_entry)
            assert set(names) <= self.redis[entry.id] and not self.carried_out & set(names)
            self.carried_out.update(names)
            carried_out += of_entry
            put_back = [run for run in entry.runs if run not in of_entry]
            assert sorted([*names, *names_of(put_back)]) == sorted(self.redis.pop(entry.id))
            del self.table[entry.id]
            entry.runs = put_back
            if put_back:
                self.number += 1
                entry.id = f"{self.number}-1"
                self.redis[entry.id] = set(names_of(put_back))
                self.table[entry.id] = entry
        return [run for run in decided if run in carried_out]

    def _forget(self, entry: Entry) -> None:
        """The batcher learns that an entry is not in Redis any more."""
        self.table.pop(entry.id, None)
        self.scheduler.forget(entry.runs)
        waiting = {run for lane in self.scheduler.queue.lanes.values() for run in lane}
        assert waiting.isdisjoint(entry.runs)
        self._remove([r for r in self._items_of(entry.runs) if r in self.waiting])
        entry.runs = []
