"""The heads of sequences: whose turn it is, who begins when there is space, and which idle ones end."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

from carpool.messages.requests import Run, SequencePart
from carpool.messages.results import Refusal
from carpool.messages.sequences import SequenceChange, SlotFreed
from carpool_batcher.core.sequences.followers import Followers
from carpool_batcher.core.sequences.known import Break, KnownSequences
from carpool_batcher.core.sequences.processes import Space, WaitingStarts
from carpool_batcher.core.sequences.sequence import (
    PROCESS_GONE,
    OneSequence,
    Segment,
    aborted,
    did_not_arrive,
    never_begun,
    part_of,
    place_of,
)

ADVANCED_AT_ONCE: Final = 256  # sequences, in a piece
BROKEN_MIN: Final = 1000  # broken sequences that are remembered in any case

_FIRST_PLACE: Final = "0"  # before each place


class Decided(NamedTuple):
    """Requests that become heads, followers that are refused, what changes in Redis besides, and what model
    processes are told."""

    heads: list[Run]
    refusals: list[Refusal]
    changes: list[SequenceChange]
    freed: list[SlotFreed]


class Heads:
    """Chooses the heads of the sequences that changed, as far as there is space. `begun`: how many sequences
    are begun, and neither ended nor broken."""

    def __init__(self, records: KnownSequences, followers: Followers, space: Space) -> None:
        self.begun = 0
        self._known = records
        self._followers = followers
        self._space = space
        self._idle = _IdleSequences()
        self._to_start = WaitingStarts()
        self._heads: list[Run] = []
        self._freed: list[SlotFreed] = []

    @property
    def waiting_to_start(self) -> int:
        """The number of sequences whose start waits for space."""
        return len(self._to_start)

    # --- what is recorded ----------------------------------------------------------------------------------

    def load(self, sequence: OneSequence, changed_us: int) -> None:
        """A previous batcher kept a sequence, and changed it at this time. Oldest first."""
        self._idle.add(sequence, changed_us, waits=False, has_state=sequence.has_state)

    def take_over(self, sequence: OneSequence) -> None:
        """All is known of a sequence that a previous batcher kept, or had in flight."""
        self._recount(sequence)
        self._known.changed[sequence] = None

    def withdraw_start(self, sequence: OneSequence) -> None:
        """The start of a sequence, if it waits for space, does not any more."""
        self._to_start.discard(sequence)

    def leave_process(self, sequence: OneSequence) -> None:
        """A sequence leaves its model process: it is broken, unless that has not got its start yet."""
        head, in_flight = sequence.head, sequence.in_flight
        if head is not None:
            sequence.head = None
            sequence.current.add(head)
            self._followers.add(head, sequence.current)
        if in_flight is not None and not in_flight.has_failed:
            in_flight.has_failed = True
            event = Break(in_flight.part, in_flight.correlation_id, PROCESS_GONE, False)
            self._known.break_segment(sequence, in_flight.segment, event)
        elif in_flight is None and sequence.has_state and sequence.current.start is None:
            part = SequencePart(sequence.sequence_id, False, False, None, _FIRST_PLACE)
            self._known.break_segment(sequence, sequence.current, Break(part, "", PROCESS_GONE, False))
        sequence.has_state = False
        self._leave(sequence)
        self._known.changed[sequence] = None

    # --- decisions -----------------------------------------------------------------------------------------

    def wake_at_us(self, idle_us: int) -> int | None:
        """As `Sequences.wake_at_us`."""
        if self._known.has_news or self._followers.has_refusals or self._heads or self._freed:
            return 0
        oldest_us = self._idle.oldest_us()
        return None if oldest_us is None else oldest_us + idle_us

    def decide(self, now_us: int, idle_us: int) -> Iterator[Decided]:
        """As `Sequences.decide`."""
        yield from self._follow_events(now_us)
        ended = 0
        for ended, _ in enumerate(self._end_long_idle(now_us, idle_us), 1):
            if not ended % ADVANCED_AT_ONCE:
                yield self._pop_decided()
        if ended:
            yield from self._follow_events(now_us)
        for _ in self._known.mark_breaks():
            yield self._pop_decided()
        yield self._pop_decided()

    def _pop_decided(self) -> Decided:
        heads, self._heads = self._heads, []
        freed, self._freed = self._freed, []
        return Decided(heads, self._followers.pop_refusals(), self._known.pop_changes(), freed)

    def _follow_events(self, now_us: int) -> Iterator[Decided]:
        for _ in self._followers.refuse_broken():
            yield self._pop_decided()
        changed, self._known.changed = self._known.changed, {}
        for number, sequence in enumerate(changed, 1):
            self._advance(sequence, now_us)
            if not number % ADVANCED_AT_ONCE:
                yield self._pop_decided()
        self._begin_waiting(now_us)
        for _ in self._followers.refuse_doomed():
            yield self._pop_decided()

    def _advance(self, sequence: OneSequence, now_us: int) -> None:
        """Choose the head of a sequence, and forget one of which nothing is left."""
        if not sequence.is_busy:
            self._choose_head(sequence)
        self._recount(sequence)
        waits = sequence.current.has_rest
        if sequence.is_busy or sequence.waits_for_space:
            self._idle.discard(sequence)
        elif sequence.is_recorded or waits or sequence.current.broken:
            self._idle.add(sequence, now_us, waits=waits, has_state=sequence.has_state)
        else:
            self._idle.discard(sequence)
            del self._known.by_id[sequence.sequence_id]

    def _recount(self, sequence: OneSequence) -> None:
        occupies_space = sequence.is_busy or sequence.can_go_on
        self.begun += occupies_space - sequence.occupies_space
        sequence.occupies_space = occupies_space
        if not occupies_space:
            self._leave(sequence)

    def _leave(self, sequence: OneSequence) -> None:
        freed = self._space.leave(sequence)
        if freed is not None:
            self._freed.append(freed)

    def _choose_head(self, sequence: OneSequence) -> None:
        """Find the request whose turn it is, and refuse those that will never have one."""
        while True:
            segment = sequence.current
            if segment.start is not None:
                self._begin(sequence, segment.start)
                return
            run = segment.turn_of(sequence.next_index) if sequence.has_state else None
            if run is not None:
                self._promote(sequence, run)
                return
            is_last = len(sequence.segments) == 1
            self._refuse_unservable(segment, has_state=sequence.has_state, is_last=is_last)
            if segment.broken:
                sequence.has_state = False
            if is_last or segment.has_rest:
                return
            sequence.segments.popleft()

    def _refuse_unservable(self, segment: Segment, *, has_state: bool, is_last: bool) -> None:
        """None of these requests has its turn. Only those stay that wait for an index or a start."""
        if segment.broken:
            self._followers.doom(segment.pop_rest(), partial(aborted, reason=segment.broken))
        elif not has_state:
            runs = segment.pop_unnumbered() if is_last else segment.pop_rest()
            self._followers.doom(runs, never_begun)

    def _begin(self, sequence: OneSequence, start: Run) -> None:
        """It is the turn of a start: it becomes the head if there is space."""
        if not self._space.is_occupied_by(sequence):
            self._leave(sequence)
            sequence.has_state = False
            if not (self._to_start.is_first(place_of(start)) and self._space.is_free(self.begun)):
                self._to_start.add(sequence, place_of(start))
                return
        self._to_start.discard(sequence)
        self._space.occupy(sequence)
        self._promote(sequence, start)

    def _begin_waiting(self, now_us: int) -> None:
        """Sequences that wait to start begin, as far as there is space."""
        while self._to_start and self._space.is_free(self.begun):
            sequence = self._to_start.pop()
            if sequence is not None:
                self._advance(sequence, now_us)

    def _promote(self, sequence: OneSequence, run: Run) -> None:
        sequence.current.remove(run)
        self._followers.pop(run)
        sequence.head = run
        self._heads.append(run)

    # --- idle sequences ------------------------------------------------------------------------------------

    def _end_long_idle(self, now_us: int, idle_us: int) -> Iterator[None]:
        """End the sequences that have been idle for `idle_us`, and the oldest broken ones if there are too
        many of them; one at a time."""
        for sequence, waits in self._idle.pop_until(now_us - idle_us):
            if waits:
                self._refuse_stuck(sequence, idle_us)
            else:
                self._end_idle(sequence)
            yield
        for sequence in self._idle.pop_broken(max(self._space.begun_max, BROKEN_MIN)):
            self._end_idle(sequence)
            yield

    def _refuse_stuck(self, sequence: OneSequence, idle_us: int) -> None:
        """Its requests wait for an index that did not come, or for a start."""
        segment = sequence.current
        if sequence.has_state:
            first = min(segment.rest(), key=place_of)
            reason = did_not_arrive(sequence.next_index, idle_us // 1000)
            event = Break(part_of(first), first.correlation_ids[0], reason, False)
            self._known.break_segment(sequence, segment, event)
            sequence.has_state = False
        refusal_of = partial(aborted, reason=segment.broken) if segment.broken else never_begun
        self._followers.doom(segment.pop_rest(), refusal_of)
        self._known.changed[sequence] = None

    def _end_idle(self, sequence: OneSequence) -> None:
        self.begun -= sequence.occupies_space
        self._leave(sequence)
        self._known.end_idle(sequence)


class _IdleSequences:
    """Sequences of which no request is in a lane or in flight: since when each is idle, the oldest first, and
    whether requests of it wait. Those that are only remembered because they are broken are known apart."""

    def __init__(self) -> None:
        self._since: dict[OneSequence, tuple[int, bool]] = {}
        self._broken: dict[OneSequence, None] = {}

    def add(self, sequence: OneSequence, now_us: int, *, waits: bool, has_state: bool) -> None:
        """A sequence is idle. If it was so before, that counts, unless requests waited and do not any more,
        or the other way round. Times must not decrease from call to call."""
        since = self._since.get(sequence)
        if since is None or since[1] is not waits:
            self._since.pop(sequence, None)
            self._since[sequence] = now_us, waits
        if waits or has_state:
            self._broken.pop(sequence, None)
        else:
            self._broken.setdefault(sequence)

    def discard(self, sequence: OneSequence) -> None:
        """A sequence is not idle, or it is forgotten."""
        self._since.pop(sequence, None)
        self._broken.pop(sequence, None)

    def oldest_us(self) -> int | None:
        """Since when the first one is idle; None if there is none."""
        return next(iter(self._since.values()))[0] if self._since else None

    def pop_until(self, until_us: int) -> Iterator[tuple[OneSequence, bool]]:
        """Remove and return those that are idle since then or longer, and whether requests of them wait."""
        while self._since:
            sequence, (since_us, waits) = next(iter(self._since.items()))
            if since_us > until_us:
                break
            self.discard(sequence)
            yield sequence, waits

    def pop_broken(self, limit: int) -> Iterator[OneSequence]:
        """Remove and return the oldest broken ones, so that at most `limit` of these are left."""
        while len(self._broken) > limit:
            sequence = next(iter(self._broken))
            self.discard(sequence)
            yield sequence
