"""The rules by which requests become batches. Time is an argument, and nothing here does I/O.

1. A batch is dispatched when a worker can take it: when a model process is idle, or just before a busy one
   becomes free (`core.capacity`). A full batch cannot grow by waiting: it is dispatched at once, up to one
   ahead of each busy process, or, under the policy `deferred`, a little earlier than others if it is in time
   as a whole; then two may be ahead of a process, if they are short. All others wait in the queue, where
   batches still grow, priorities still count and deadlines can still be met.
2. A batch is ready for one of these reasons, the first that applies:
     full      it reached `max_batch_size`, `max_batch_cost` or MAX_BATCH_BYTES, or has as many requests as
               usually cost `max_batch_cost`, where the model tells costs (`learned.request_costs`)
     preferred it reached one of `preferred_batch_sizes`: the largest that can be filled is dispatched
     deadline  a request in its lane would miss its deadline by waiting longer
     efficient (`deferred` only) to wait for more requests would not raise throughput (`policies.plan`)
     delay     its oldest request has waited `max_queue_delay_ms`, if that is not 0
     idle      `max_queue_delay_ms` is 0, so it does not wait for more requests; while batches have several
               requests, dispatches are spaced evenly (`core.capacity`)
   Under the policy `deferred` the reason idle does not apply. A batch is dispatched as late as its deadlines
   allow (`policies.plan`), and requests that cannot meet their deadlines are refused before execution. This
   needs l(n), and a deadline in the lane or `target_latency_ms`; without them all reasons apply, idle too.
   No time is planned for requests that the model is not expected to execute (`learned.doubtful_producers`).
3. Of the lanes with a ready batch, the one with the highest priority comes first, then the one of the tenant
   whose turn is next (`waiting.fairness`), then the one with its oldest request. While it has to wait until a
   process is free, full batches may be dispatched before it, as many as there are processes. Within a batch:
   higher priority first, then tenants in fair turns, then arrival. A batch has requests of one lane only, and
   requests of other lanes do not close it.
4. A request whose deadline passes is answered at that moment, whether it waits or is in flight. Not so if its
   `expiration_action` is delay: then it moves behind all others if it still waits, and no longer causes a
   dispatch for its deadline; in flight it has no deadline.
5. A request that would exceed `max_queue_size` (of the model or of its priority) or `max_queue_bytes` is
   refused on arrival: always the newest, never one that waits. A withheld result counts as a waiting request.
   A request whose cost alone exceeds `max_batch_cost` is refused on arrival, too. Of each limit delayed
   requests (rule 10) take only a share. A request that was sent again is never refused while another copy of
   it waits or is in flight: it is removed without an answer. Later copies give way to other requests.
6. The unit is the run: requests of one entry that differ only in correlation ID and body. Every rule has the
   outcome that it would have for each request by itself. A run is cut where a batch ends, where another
   tenant's turn begins, and where some of its requests are withdrawn or refused.
7. Of a stepping model each request is a batch by itself, which is always full. A process takes as many at a
   time as it has slots (`max_batch_size`), one more for every eight, and as `max_batch_cost` allows. One that
   is withdrawn in flight is answered there, as it is of a model that executes several batches at a time.
8. Requests of a sequence are served one at a time, in order (`core.sequences`). Of each sequence at most one
   waiting request takes part in rules 1 to 3; all of them in the others.
9. Of a bound model each sequence stays with one process (`sequences.processes`). A batch has requests of the
   sequences of one process, and is dispatched when that has no other.
10. A request that its producer put off (`not_before`) waits outside of its lane until then
   (`waiting.delayed`). It counts against the limits of rule 5, and can be withdrawn; to all other rules it
   arrives at that time.
11. A request that asks for a version is in a lane of that version, and so is each other one while versions
   have shares of the traffic (`Queue.division`). Then each batch is for the processes of one version
   (`version_capacity`), and rules 1 to 3 hold for each version by itself. A batch that any may execute goes
   to the version with the least in flight. `versions` says when a version has been missing for too long.
12. While an operator has paused the model there is no capacity: nothing is dispatched, and nothing is refused
   early. All other rules hold, and what is in flight goes on. If the pause says so, requests that arrived
   since are refused on arrival, unless they continue a sequence (`pause`).

A request is in exactly one state: ARCHITECTURE.md, "The path of a request", shows which there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from carpool.errors import INVALID_ARGUMENT, NOT_FOUND, UNAVAILABLE, UNIMPLEMENTED
from carpool.messages.batches import Dispatch, DispatchReason
from carpool.messages.requests import Entry, Run, Withdrawal
from carpool.messages.results import Refusal
from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.applied_settings import NO_LIMIT, AppliedSettings
from carpool_batcher.core.capacity import BoundCapacity, Capacity
from carpool_batcher.core.copies import Copies, unanswered
from carpool_batcher.core.deadlines import Deadlines
from carpool_batcher.core.decisions import Abandon, Cancel, Decision, Expire, refusal
from carpool_batcher.core.dispatchers import Dispatchers
from carpool_batcher.core.dispatching import Outlook
from carpool_batcher.core.in_flight import BatchesInFlight, DecidedDispatches
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.pause import Pause
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.core.sequences.processes import Processes
from carpool_batcher.core.sequences.sequence import ended_by_force
from carpool_batcher.core.sequences.sequences import Sequences
from carpool_batcher.core.version_capacity import ModelCapacity
from carpool_batcher.core.versions import Versions
from carpool_batcher.core.waiting.lane import NEVER_US, Lane
from carpool_batcher.core.waiting.queue import Division, Queue
from carpool_batcher.core.waiting.withdrawals import PendingWithdrawals, Withdrawn
from carpool_batcher.core.wanted_workers import Bounds, Demand, Owed, Service, Wanted, WantedWorkers

NO_VERSIONS: Final[Mapping[str, str]] = MappingProxyType({})
BEFORE_PARTS_MAX: Final = 5000  # up to 2 us each, with many tenants
BEFORE_PARTS_OF_PIECE: Final = 512
USUAL_SIZE_CHANGE_RATIO: Final = 1 / 8  # by which it must differ to be applied: all lanes are looked at then

__all__ = ["Abandon", "Cancel", "Decision", "Dispatch", "DispatchReason", "Expire", "Scheduler"]


class Scheduler:
    """The batching of one model. Report events to it; `poll` returns what to do, `wake_at_us` when to poll.

    What becomes of Dispatches is reported to what `carry_out` returns, and of batches in flight to
    `in_flight`. `queue` has the waiting requests: its totals are for all to read, and of it others set
    `withheld` only.
    It alone holds the settings; the parts below it have what they need of them as AppliedSettings.
    """

    def __init__(
        self, settings: ModelSettings, model_processes: int = 0, kind: ModelKind = ModelKind.PLAIN
    ) -> None:
        self._custom_policy: CustomPolicy | None = None
        is_bound = kind is ModelKind.BOUND
        self._model_processes = model_processes
        self.learned = Learned()
        self.capacity: Capacity = (BoundCapacity if is_bound else ModelCapacity)(
            self.learned, model_processes
        )
        self.versions = Versions()
        self._has_asked = False  # requests ask for versions: from then on each batch is for one
        self.processes = Processes()  # of a bound model
        self.sequences = Sequences(self.processes if is_bound else None)
        self._applied = AppliedSettings(settings, kind)
        self.queue = Queue(self._applied, self.sequences)
        self._deadlines = Deadlines(self._applied, self.queue, self.capacity, self.learned)
        self._dispatchers = Dispatchers(
            self._applied, self.queue, self.capacity, self.learned, self.processes
        )
        self._in_hand: set[str] = set()  # batches that processes have that drain
        self._missing_in_flight: set[str] = set()  # batches that ask for versions without processes
        self._withdrawals = PendingWithdrawals()
        self.in_flight = BatchesInFlight(
            self._applied,
            self.queue,
            self._deadlines,
            self.capacity,
            self.learned,
            self.sequences,
            self.processes,
        )
        self._copies = Copies(self.queue, self.in_flight.ids, self._withdrawals)
        self._cancelled: list[Cancel] = []
        self._polled_us = 0
        self.wanted = WantedWorkers()
        self._apply(settings, kind)

    # --- events --------------------------------------------------------------------------------------------

    @property
    def settings(self) -> ModelSettings:
        """The model's settings. They may change at any time, and apply to requests that already wait."""
        return self._settings

    @settings.setter
    def settings(self, settings: ModelSettings) -> None:
        had_delay = self._applied.has_queue_delay
        self._apply(settings, self.kind)
        if self._applied.has_queue_delay and not had_delay:
            self._deadlines.watch_all_again()

    @property
    def custom_policy(self) -> CustomPolicy | None:
        """The user's policy by which batches are formed; None: the built-in one that the settings name."""
        return self._custom_policy

    @custom_policy.setter
    def custom_policy(self, policy: CustomPolicy | None) -> None:
        self._custom_policy = policy
        self._dispatchers.settings_changed(policy)

    @property
    def pause(self) -> Pause | None:
        """An operator's pause of the model; None without one. It may change at any time."""
        return self._applied.pause

    @pause.setter
    def pause(self, pause: Pause | None) -> None:
        self._applied.pause = pause

    @property
    def kind(self) -> ModelKind:
        """How the model executes requests. It may change, but not to or from a kind with sequences."""
        return self._applied.kind

    @kind.setter
    def kind(self, kind: ModelKind) -> None:
        self._apply(self._settings, kind)

    def _apply(self, settings: ModelSettings, kind: ModelKind) -> None:
        """These are the settings and the kind from now on."""
        self._settings = settings
        is_stepping = kind is ModelKind.STEPPING
        self._applied.usual_size = self.learned.costs.usual_size(settings.max_batch_cost) or NO_LIMIT
        self._applied.update(settings, kind)
        self._dispatchers.settings_changed(self._custom_policy)
        self.sequences.space.begun_max = settings.max_candidate_sequences
        self.processes.slots_each = settings.max_batch_size
        self.sequences.idle_us = settings.max_sequence_idle_ms * 1000
        slots = settings.max_batch_size if is_stepping else None
        self.capacity.set_slots(slots, settings.max_batch_cost)
        self._resize()

    def _resize(self) -> None:
        """A process that executes several batches at a time counts as several."""
        each = self._settings.concurrent_batches(self.kind)
        self.capacity.resize(self._model_processes * each)
        if self._has_asked or self.queue.division is not None:
            self._arrange_dispatchers()

    def observe_cost(self, lane: str, requests: int, cost: int) -> None:
        """The model told what this number of requests of a batch, at least one, cost together."""
        self.learned.costs.observe(lane, requests, cost)
        usual = self.learned.costs.usual_size(self._settings.max_batch_cost) or NO_LIMIT
        before, size_max = self._applied.usual_size, self._settings.max_batch_size
        if abs(min(usual, size_max) - min(before, size_max)) > USUAL_SIZE_CHANGE_RATIO * min(
            before, size_max
        ):
            self._apply(self._settings, self.kind)

    @property
    def model_processes(self) -> int:
        """The number of live model processes."""
        return self._model_processes

    @model_processes.setter
    def model_processes(self, processes: int) -> None:
        self._model_processes = processes
        self._resize()

    def set_processes(
        self,
        live: Sequence[str],
        draining: Collection[str] = (),
        versions: Mapping[str, str] = NO_VERSIONS,
        now_us: int = 0,
    ) -> None:
        """These model processes are alive. Those that drain take no more batches; those of a bound model
        begin no more sequences. `versions`: by process, that of its model, if it names one."""
        if self.kind is not ModelKind.BOUND and draining:
            live = [process for process in live if process not in draining]
        self.model_processes = len(live)
        of_each = Counter([versions.get(process, "") for process in live])
        self.versions.known_us = now_us
        if of_each != self.versions.processes:
            self.versions.set_processes(of_each, now_us)
            self._versions_changed(now_us)
        if self.kind is ModelKind.BOUND:
            self.processes.set_live(live, draining)
            for head in self.sequences.heads_to_move():
                self.queue.leave_lane(head)
            self.sequences.leave_processes()

    def divide(self, division: Division | None, now_us: int) -> None:
        """From now on this says which version is to execute the requests that ask for none."""
        if self.kind is ModelKind.BOUND:
            return  # its sequences stay with their processes
        before, self.queue.division = self.queue.division, division or None
        if self.queue.division != before:
            moved = self.queue.divide_again()
            self._versions_changed(now_us)
            self._deadlines.watch_again(moved)

    def adopted(self, now_us: int) -> None:
        """All batches in flight that a previous batcher dispatched are known."""
        self._has_asked = any(batch.is_asked for batch in self.in_flight.batches.values())
        self._versions_changed(now_us)

    def set_in_hand(self, batch_ids: Iterable[str], now_us: int) -> None:
        """Processes that drain have these batches in hand, and no others: they occupy no other process."""
        in_hand = {name for name in batch_ids if name in self.in_flight.batches}
        if in_hand != self._in_hand:
            self._in_hand = in_hand
            self._versions_changed(now_us)

    def orphans(self) -> Iterator[str]:
        """The batches in flight that are for a version that has no process any more, while others have, and
        that no process which drains has in hand."""
        living = self.versions.processes
        for batch_id, batch in self.in_flight.batches.items():
            if batch.version and living and batch.version not in living and batch_id not in self._in_hand:
                yield batch_id

    def _set_apart(self) -> list[str]:
        """No process that takes batches will have those that are in hand of others, or orphans. Returns the
        latter."""
        orphans = list(self.orphans())
        self.capacity.set_apart({*orphans, *self._in_hand})
        return orphans

    def _versions_changed(self, now_us: int) -> None:
        """Other versions have processes, or shares, or others have batches in hand while they drain."""
        orphans = self._set_apart()
        self._missing_in_flight = {name for name in orphans if self.in_flight.batches[name].is_asked}
        self.versions.miss(self._asked_versions(), now_us)
        self._arrange_dispatchers()

    def _arrange_dispatchers(self) -> None:
        each = self._settings.concurrent_batches(self.kind)
        processes = {version: number * each for version, number in self.versions.processes.items()}
        self._dispatchers.serve(processes, are_used=self._has_asked or self.queue.division is not None)

    def _asked_versions(self) -> set[str]:
        """The versions for which requests ask that wait in lanes, or that no process will take in flight."""
        waiting = self.queue.asked_lanes.keys()
        if not self._missing_in_flight:
            return set(waiting)
        in_flight = self.in_flight.batches
        self._missing_in_flight &= in_flight.keys()
        return waiting | {in_flight[name].version for name in self._missing_in_flight}

    def offer(self, run: Run, now_us: int) -> list[Refusal]:
        """A run arrived: admit it. Returns the Refusals of those of its requests that were not admitted.

        They are no longer in the run, except where all of it is refused: then it is the run of a Refusal.
        """
        if run.version:
            self._has_asked = self._has_asked or self._begin_asking()
        elif self.queue.division and len(run.correlation_ids) > 1:
            parts = self.queue.divide(run, in_order=self._settings.preserve_ordering)
            if len(parts) > 1:
                return [refused for part in parts for refused in self.offer(part, now_us)]
        if self._withdrawals.arrived_later:
            self._withdrawals.arrive(run)
        if run.sequence is not None or self._applied.has_sequences:
            refused = self._refusal_of_sequence(run)
            if refused is not None:
                return [refused] if self._applied.has_sequences else list(self._copies.answer_once(refused))
        if self._applied.pause is not None and self._applied.pause.refuses(run):
            return self._refuse_paused(run, self._applied.pause)
        if self.learned.producers:
            run.is_doubtful = self.learned.producers.is_doubtful(run.producer)
        refusals = self.queue.admit(run, now_us, self._copies.is_copy)
        if run.deadline_us is not None and not any(refused.run is run for refused in refusals):
            self._deadlines.watch(run, run.deadline_us, now_us)
            self.wanted.budget_us = run.deadline_us - run.arrival_us
        if refusals and run.sequence is not None:
            self.sequences.refuse_arrival(run.sequence, run.correlation_ids[0])
        return refusals

    def _refuse_paused(self, run: Run, pause: Pause) -> list[Refusal]:
        """A run arrived while its model is paused, and is to be refused."""
        refused = refusal(run, UNAVAILABLE, "paused", pause.detail)
        if run.sequence is None:
            return list(self._copies.answer_once(refused))
        self.sequences.refuse_arrival(run.sequence, run.correlation_ids[0])
        return [refused]

    def refuse_malformed(self, refused: Refusal) -> Iterable[Refusal]:
        """A request arrived that could not be decoded, or columns of several. Returns its Refusals: without
        an answer for those that were sent again, and wait or are in flight. A limit of the model that they
        exceed now may have been a higher one before."""
        if not self._applied.has_sequences:
            return self._copies.answer_once(refused)
        part = refused.breaks
        if part is not None and self.sequences.is_copy(part, refused.correlation_ids[0]):
            return (unanswered(refused, refused.correlation_ids),)
        if part is not None:
            self.sequences.refuse_arrival(part, refused.correlation_ids[0])
        return (refused,)

    def is_body_in_use(self, name: str) -> bool:
        """Whether a request that waits or is in flight has this stored body."""
        return name in self.queue.bodies

    def _refusal_of_sequence(self, run: Run) -> Refusal | None:
        """Why a request cannot wait, because of the sequence that it is part of, or is not part of."""
        if not self._applied.has_sequences:
            detail = "sequence_id: this model keeps no states of sequences"
            return refusal(run, UNIMPLEMENTED, "input", detail)
        if run.sequence is None:
            detail = "sequence_id: missing; this model keeps a state for each sequence of requests"
            return refusal(run, INVALID_ARGUMENT, "input", detail)
        if run.version and self.kind is ModelKind.BOUND:
            detail = (
                "version: a model whose processes keep the states of sequences executes them in any version"
            )
            return refusal(run, UNIMPLEMENTED, "input", detail)
        return self.sequences.judge(run)

    def end_sequences(self, sequence_ids: Collection[str], place: str) -> list[Refusal]:
        """An entry at this place ends these sequences by force. Returns the answers to requests in lanes."""
        heads = self.sequences.end(sequence_ids, place)
        for head in heads:
            self.queue.remove(head)
        return [ended_by_force(head) for head in heads]

    def withdraw(self, withdrawal: Withdrawal) -> None:
        """A producer withdraws requests. `carry_out_withdrawals` says which of them are found, and when."""
        self._withdrawals.add(withdrawal)
        self._cancelled += self.in_flight.withdraw(withdrawal.correlation_ids)

    def carry_out_withdrawals(self, now_us: int) -> Withdrawn:
        """What becomes of withdrawals now: a Refusal for each run that waits; of a model whose requests end
        in flight (`cancels_in_flight`), those too. O(1) if no look is due, else O(all waiting)."""
        waiting = self.queue.count
        due_us = self._withdrawals.due_us(waiting)
        refusals: Sequence[Refusal] = ()
        entries: Sequence[Entry] = ()
        if due_us is not None and due_us <= now_us:
            arrived_later, entries = self._withdrawals.pop_all(waiting, now_us)
            refusals = self.queue.withdraw(arrived_later)
            # Some may have been dispatched since. Of two with one ID the wrong one might be answered.
            named = [name for name, later in arrived_later.items() if not later]
            self._cancelled += self.in_flight.withdraw(named)
        cancelled, self._cancelled = self._cancelled, []
        return Withdrawn(refusals, cancelled, entries)

    def forget(self, runs: Iterable[Run]) -> None:
        """Runs are no longer in Redis: removed by XDEL, or dispatched by another batcher. Those that do not
        wait are ignored."""
        lost = list(runs)
        self.queue.forget(lost)
        for run in lost:
            if run.sequence is not None:
                self.sequences.lose(run)  # it was to be dispatched

    def carry_out(self, dispatches: Sequence[Dispatch], decided_us: int) -> DecidedDispatches:
        """All Dispatches of the last `poll`, which was at `decided_us`, are to be carried out. Returns which
        remain, and is told what becomes of them."""
        separated = self._copies.separate(dispatches)
        return DecidedDispatches(separated, decided_us, self.in_flight, self.queue, self.offer)

    # --- state ---------------------------------------------------------------------------------------------

    def oldest_arrival_us(self) -> int | None:
        """When the oldest waiting request arrived; None if none waits. One that expired counts only if all in
        its lane did."""
        return self._dispatchers.oldest_arrival_us(self._polled_us)

    def outlook(self, lane: Lane, now_us: int) -> Outlook | None:
        """What the next batch of a lane waits for; None: for a process of its version."""
        return self._dispatchers.outlook(lane, now_us)

    def requests_before(self, run: Run, index: int) -> Generator[None, None, tuple[int, bool] | None]:
        """How many requests of its lane go before the one at this index of a waiting run, and whether that is
        all of them: at most BEFORE_PARTS_MAX parts of runs are counted. None if it is in no lane. In pieces,
        between which nothing may change."""
        lane, before = run.waits_in, 0
        if type(lane) is not Lane:
            return None
        for number, part in enumerate(lane.in_order(self._applied.shares), 1):
            if part.run is run and part.start <= index < part.start + part.size:
                return before + index - part.start, True
            before += part.size
            if number >= BEFORE_PARTS_MAX:
                break
            if not number % BEFORE_PARTS_OF_PIECE:
                yield
        return before, False

    # --- how many workers are wanted ---------------------------------------------------------------------

    def observe_demand(
        self,
        now_us: int,
        processes: int,
        workers: int,
        missed: int,
        *,
        is_reading: bool = False,
    ) -> Wanted:
        """How many workers are wanted (`core.wanted_workers`); to be called a few times a second. `processes`
        of so many `workers` take batches, and so many requests have `missed` their deadlines so far."""
        queue, kind, oldest_us = self.queue, self.kind, self.oldest_arrival_us()
        lanes = [lane.count for lane in queue.lanes.values() if lane.count]
        kept = self.sequences.census() if kind is ModelKind.BOUND else None
        demand = Demand(
            now_us,
            processes,
            workers,
            queue.arrived_executable,
            sum(lanes) if kind.has_sequences else queue.undelayed,
            0 if oldest_us is None else max(0, now_us - oldest_us),
            len(lanes),
            len(self.in_flight.batches),
            missed,
            0 if kept is None else kept.kept + kept.waiting_to_start,
            is_reading,
            self._applied.pause is not None,
        )
        return self.wanted.observe(demand, self._service(), self._owed(now_us), self._bounds())

    def _service(self) -> Service:
        settings, learned, kind = self._settings, self.learned, self.kind
        if kind is ModelKind.STEPPING:
            return Service(settings.max_batch_size, 1, self.wanted.duration)
        size, batches = self._applied.batch.size, settings.concurrent_batches(kind)
        slots = settings.max_batch_size if kind is ModelKind.BOUND else 0
        return Service(batches, size, learned.times, learned.transit_us[1], slots)

    def _owed(self, now_us: int) -> Owed:
        applied, budget_us = self._applied, self.wanted.budget(now_us)
        times_us = [one for one in (budget_us, applied.target_us) if one is not None]
        settled_us = min(times_us, default=None)
        if settled_us is not None and applied.policy != "eager":
            return Owed(None, settled_us)
        return Owed(max(self._settings.scale_wait_ms * 1000, applied.queue_delay_us), settled_us)

    def _bounds(self) -> Bounds:
        settings = self._settings
        return Bounds(
            settings.min_workers,
            settings.max_workers,
            settings.scale_down_ms * 1000,
            settings.scale_idle_ms * 1000,
        )

    # --- decisions -----------------------------------------------------------------------------------------

    def poll(self, now_us: int) -> list[Decision]:
        """All decisions due by now. What becomes of the Dispatches must be reported: see `carry_out`."""
        pieces = self.poll_in_pieces(now_us)
        while True:
            try:
                next(pieces)
            except StopIteration as end:
                decisions: list[Decision] = end.value
                return decisions

    def poll_in_pieces(self, now_us: int) -> Generator[None, None, list[Decision]]:
        """As `poll`. Between the pieces nothing else may be called."""
        self._polled_us = now_us
        self.queue.bodies.begin_poll()
        if self.queue.delayed.requests:
            self._release(now_us)
        decisions: list[Decision] = []
        if self._deadlines.has_due(now_us):
            decisions = yield from self._deadlines.run_due(now_us)
            if self._deadlines.has_due(now_us):
                return decisions  # very many have expired: first all of these, so that none is dispatched
        if self._has_asked:
            decisions += self._refuse_missing(now_us)
        is_paused = self._applied.pause is not None
        if not self._applied.has_sequences:
            if not is_paused:
                decisions += self._dispatchers.dispatch(now_us)
            return self._copies.answered_once(decisions) if decisions else decisions
        yield from self._decide_sequences(decisions, now_us)
        if is_paused:
            return decisions
        decisions += self._dispatchers.dispatch(now_us)
        yield from self._decide_sequences(decisions, now_us)  # requests may have been refused
        return decisions

    def _begin_asking(self) -> bool:
        """The first request asks for a version."""
        self._has_asked = True
        self._arrange_dispatchers()
        return True

    def _refuse_missing(self, now_us: int) -> Iterator[Decision]:
        """Requests are refused whose versions have been without a process for too long."""
        asked = self._asked_versions()
        self.versions.miss(asked, now_us)
        for version in self.versions.refused(asked, now_us):
            detail = self.versions.describe_missing(version)
            for run in self.queue.remove_asked(version, self.versions.known_us):
                yield refusal(run, NOT_FOUND, "version", detail)
            for batch_id, batch in self.in_flight.batches.items():
                if batch.version == version and batch_id in self._missing_in_flight:
                    yield Abandon(batch_id, batch.runs, detail)

    def _release(self, now_us: int) -> None:
        """Let delayed runs take part from now on, if their time has come."""
        for run in self.queue.release(now_us):
            if run.deadline_us is not None:
                self._deadlines.watch(run, run.deadline_us, now_us)

    def _decide_sequences(self, decisions: list[Decision], now_us: int) -> Iterator[None]:
        """Append what follows for sequences, in pieces."""
        for number, decided in enumerate(self.sequences.decide(now_us)):
            if number:
                yield
            self.queue.apply(decided)
            self._deadlines.watch_again(decided.heads)
            decisions += decided.refusals
            decisions += decided.changes
            decisions += decided.freed

    def wake_at_us(self) -> int | None:
        """When something could next be decided by time alone, as of the last `poll`; None: never."""
        wake_us = self._deadlines.wake_at_us()
        if self._applied.pause is None:
            wake_us = earlier(wake_us, self._dispatchers.wake_at_us(self._polled_us))
        if self._has_asked:
            wake_us = earlier(wake_us, self.versions.refused_from_us(self._asked_versions(), self._polled_us))
        if self.queue.delayed.requests:
            wake_us = earlier(wake_us, self.queue.delayed.wake_at_us())
        withdrawals_us = self._withdrawals.due_us(self.queue.count)
        if withdrawals_us is not None:
            wake_us = earlier(wake_us, withdrawals_us)
        return earlier(wake_us, self.sequences.wake_at_us()) if self._applied.has_sequences else wake_us

    def earliest_dispatch_us(self) -> int:
        """Before this no batch needs to be dispatched, whatever arrives, as of the last `poll`. NEVER_US: not
        before one settles, or the model is resumed."""
        if self._applied.pause is not None:
            return NEVER_US
        return self._dispatchers.earliest_dispatch_us(self._polled_us)


def earlier(at_us: int | None, other_us: int | None) -> int | None:
    """The earlier of two times; None is never."""
    if at_us is None or other_us is None:
        return other_us if at_us is None else at_us
    return min(at_us, other_us)
