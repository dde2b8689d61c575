"""What is checked of each decision of a poll, and what carrying it out does to the reference."""

from __future__ import annotations

from carpool.messages.results import Refusal
from carpool_batcher.core.policies.deferred import PLANNED_BATCHES_MAX
from carpool_batcher.core.scheduler import Dispatch
from carpool_batcher.core.waiting.lane import NEVER_US
from support.scheduler_reference.drawn import CUSTOM_SIZE, LANES, Item, raises
from support.scheduler_reference.turns import TurnChecks


class DecisionChecks(TurnChecks):
    """Checks dispatches and refusals against the rules at the top of `core/scheduler.py`."""

    # --- dispatches ----------------------------------------------------------------------------------------

    def _check_dispatch(self, dispatch: Dispatch, reserved: int) -> None:
        lane, settings = dispatch.lane, self.scheduler.settings
        taken = len(self.in_flight) + reserved
        batch = self._items_of(dispatch.runs)
        assert not self._past_deadline(set(batch) - set(self._items_of(dispatch.undated)))
        # A request that is served even after its deadline has none in flight.
        for run in dispatch.runs:
            for r in self._items_of([run]):
                deadline_us = self._strict_deadline_us(r)
                assert dispatch.deadline_us(run) == (None if deadline_us == NEVER_US else deadline_us)
        self._check_requests(dispatch, taken)
        # The reason is the first that applies.
        queue = self._in_lane(lane)
        lead_us_max = 1.5 * self.turnaround_us_max + 2000
        deadlines_us = [r.deadline_us or NEVER_US for r in queue]
        is_urgent = any(deadline_us <= self.now_us + lead_us_max for deadline_us in deadlines_us)
        if self._is_full(lane):
            assert dispatch.reason == "full"
        elif self._preferred_size(lane):
            assert dispatch.reason == "preferred"
        elif dispatch.reason == "efficient":
            assert self._is_deferred(lane)
        elif dispatch.reason == "deadline":
            assert is_urgent or (self._is_deferred(lane) and self.now_us >= self._latest_start_us(lane))
        else:
            assert dispatch.reason == ("delay" if settings.max_queue_delay_ms else "idle")
            assert dispatch.reason == "delay" or not self._is_deferred(lane)
            is_overtaken = self.overtaken_max >= self.scheduler.model_processes
            assert self.now_us >= (self._delay_ends_us(lane) if is_overtaken else self._ready_at_us(lane))
        # A process is idle or about to become free; a full batch may be one ahead of any process.
        assert self._has_capacity(lane, taken, is_early=True)
        # No other lane that could be dispatched now comes first. For turns between tenants see below.
        for other in LANES:
            if other != lane and self._can_dispatch(other, taken, is_early=True):
                assert self._claim(lane)[0] <= self._claim(other)[0]
                if self._has_one_tenant(self._claim(lane)[0]):
                    assert self._claim(lane) <= self._claim(other)
        self._check_overtaking(lane, taken)
        self._check_fairness(batch, lane, taken)

    def _check_requests(self, dispatch: Dispatch, taken: int) -> None:
        """From the front of one lane, rank by rank and each tenant in order; as many as fit."""
        batch, settings = self._items_of(dispatch.runs), self.scheduler.settings
        assert (
            batch
            and len(batch) == dispatch.size
            and set(batch) <= self.waiting.keys()
            and len(set(batch)) == len(batch)
        )
        ranks = [self._rank_of(r) for r in batch]
        assert ranks == sorted(ranks, reverse=True)
        rest = [r for r in self._in_lane(dispatch.lane) if r not in batch]
        assert all(self._rank_of(r) <= ranks[-1] for r in rest)
        for rank, tenant in {(self._rank_of(r), r.tenant) for r in batch}:
            of_tenant = [r for r in batch if (self._rank_of(r), r.tenant) == (rank, tenant)]
            queue = [r for r in self._in_lane(dispatch.lane) if r.tenant == tenant]
            assert of_tenant == [r for r in queue if self._rank_of(r) == rank][: len(of_tenant)]
        is_preferred = dispatch.reason == "preferred"
        size = self._preferred_size(dispatch.lane) if is_preferred else settings.max_batch_size
        if self.custom:
            size = min(settings.max_batch_size, CUSTOM_SIZE)
            assert not any(raises(r.name) for r in batch)
        assert len(batch) <= size and (len(batch) == 1 or not self._over(batch))
        if self._is_deferred(dispatch.lane) and not self.custom:
            assert self._is_in_time(batch, taken) or self._is_trial(dispatch.lane, size, taken)
        elif rest and len(batch) < size:
            first = {r.tenant: r for r in reversed(rest) if self._rank_of(r) == self._rank_of(rest[0])}
            assert any(self._over([*batch, r]) for r in first.values())

    def _is_in_time(self, batch: list[Item], taken: int) -> bool:
        """Whether all of a batch are in time with a long transit; or as usual, if not all that wait can be in
        time as one batch with a long transit."""
        lane, starts_us = batch[0].lane, self._starts_us(taken)
        planned = [r for r in batch if not r.is_doubtful]
        possible = [r for r in self._planned(lane) if self._is_possible(r, starts_us)]
        transit = self.scheduler.learned.transit_by_size
        transit_us = (
            transit.at_most_us if possible and self._is_one_batch(possible, starts_us) else transit.usual_us
        )
        arrives_us = starts_us + self._takes_us(lane, len(planned), transit_us)
        return all(arrives_us <= self._strict_deadline_us(r) for r in planned)

    def _is_trial(self, lane: str, size: int, taken: int) -> bool:
        """None that a plan considers can be in time, so that without a trial nothing would be learned."""
        queue, starts_us = self._planned(lane), self._starts_us(taken)
        impossible = sum(not self._is_possible(r, starts_us) for r in queue)
        if len(self._in_lane(lane)) - len(queue) > PLANNED_BATCHES_MAX * size:
            return True  # a plan does not consider what is behind so many others
        none_in_time = impossible >= min(len(queue), PLANNED_BATCHES_MAX * size)
        return none_in_time and all(batch[0].lane != lane for batch in self.in_flight.values())

    def _check_overtaking(self, lane: str, taken: int) -> None:
        """Of full batches, not more than one for each process overtake one that comes first, but waits."""
        if taken < self.scheduler.model_processes or not self._is_full(lane):
            self.overtaken = 0
            return
        rank = self._claim(lane)[0]
        waits = [one for one in LANES if self._in_lane(one) and not self._is_full(one)]
        if any(self._claim(one)[0] < rank and self._delay_ends_us(one) <= self.now_us for one in waits):
            self.overtaken += 1
            if self.scheduler.settings.policy == "eager":
                processes = max(self.processes_max, self.scheduler.model_processes)
                assert self.overtaken <= processes, "full batches overtake for ever"

    def _check_that_no_batch_was_missed(self, reserved: int) -> None:
        taken = len(self.in_flight) + reserved
        missed = [lane for lane in LANES if self._can_dispatch(lane, taken)]
        if missed and taken >= self.scheduler.model_processes:
            # Others have overtaken a lane that comes first, and waits for a process: now these wait, too.
            assert self.scheduler._dispatchers.of_any._overtaken >= self.scheduler.model_processes
            waits = [one for one in LANES if self._in_lane(one) and one not in missed]
            assert any(self._claim(one)[0] <= self._claim(lane)[0] for one in waits for lane in missed)
        else:
            assert not missed
        if taken < self.scheduler.model_processes and self.scheduler.settings.max_queue_delay_ms:
            last_us = self.now_us + 2000
            in_time = self.waiting.keys() - self.delayed
            assert all(r.deadline_us is None or r.deadline_us > last_us for r in in_time)

    def _apply(self, dispatches: list[Dispatch], fate: int | None) -> None:
        """One script dispatches all batches."""
        if dispatches and fate is not None:
            entries = list(dict.fromkeys(run.entry for run in dispatches[0].runs))
            for entry in entries[: 1 + fate % len(entries)]:
                self.redis.pop(entry.id, None)
        decided = [run for dispatch in dispatches for run in dispatch.runs]
        carried_out = self._carry_out(decided)
        self.answered.update(self._items_of(run for run in decided if run not in carried_out))
        for dispatch in dispatches:
            runs = [run for run in dispatch.runs if run in carried_out]
            if not runs:
                self.scheduler.in_flight.unreserve()
                continue
            self.number += 1
            batch_id = f"batch {self.number}"
            self.in_flight[batch_id] = batch = self._items_of(runs)
            assert len({r.name for r in batch}) == len(batch)
            self.undated.update(self._items_of(dispatch.undated))
            self.scheduler.in_flight.launch(batch_id, dispatch._replace(runs=runs), self.now_us)
            planned = self.scheduler.in_flight.batches[batch_id].executable
            # All of them if no producer is remembered any more
            assert planned in (sum(not r.is_doubtful for r in batch), len(batch))

    # --- refusals ------------------------------------------------------------------------------------------

    def _check_early(self, refusals: list[Refusal], taken: int) -> None:
        """A refused request cannot be in time, or not all of its lane can, as one batch dispatched now."""
        starts_us = self._starts_us(taken)
        refused = self._items_of_refusals(refusals)
        assert self._policy == "deferred" or not refused
        assert {refusal.reason for refusal in refusals} <= {"early"}
        assert all(self._strict_deadline_us(r) < NEVER_US and not r.is_doubtful for r in refused)
        possible = [r for r in refused if self._is_possible(r, starts_us)]
        for lane in {r.lane for r in possible}:
            others = [r for r in self._planned(lane) if self._is_possible(r, starts_us)]
            assert not self._is_one_batch(others, starts_us)
            assert len([r for r in possible if r.lane == lane]) < len(others), "no other request gains by it"
        self._remove_refused(refusals, expected=self.waiting.keys() & set(refused))

    def _check_failed(self, refusals: list[Refusal]) -> None:
        """The custom policy raised for these."""
        assert {(refusal.status, refusal.reason) for refusal in refusals} <= {("INTERNAL", "policy")}
        failed = self._items_of_refusals(refusals)
        assert all(raises(r.name) for r in failed)
        self._remove_refused(refusals, expected=self.waiting.keys() & set(failed))

    def _check_that_delayed_requests_wait(self) -> None:
        assert self.delayed <= self.waiting.keys()
        assert not self.delayed & self.answered
