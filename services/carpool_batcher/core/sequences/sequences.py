"""All sequences of a model: their heads, how many are kept at a time, and when idle ones end.

1. Of each sequence at most one request is in a lane (its *head*) or in flight. Its other waiting requests are
   *followers*. When the request in flight was answered OK, the next one becomes the head.
2. A request that ends in any other way breaks its sequence: those that stand after it, up to the next
   start, are answered ABORTED. Those that stand before it are still served.
3. A start needs space (`sequences.space`). If there is none it waits, in the order of arrival. A start of a
   sequence that is begun has its space: earlier requests finish, then it begins anew.
4. A sequence without a request in a lane or in flight is *idle*. After `idle_us` it is ended; if requests
   wait for an index, or for a start, these are refused. Of broken ones for which nothing waits, no more are
   remembered than may be begun at a time, or BROKEN_MIN: anybody can break any number of names.
5. A request that was sent twice, as its index shows, is dropped if it has the same correlation ID.
6. A batcher that takes over knows what Redis keeps, and what is in flight. It reads all waiting requests
   before there is any head: one that was put back stands later in the request stream than its place says.
7. If the process that has the state of a sequence is gone, the sequence is broken. A start that did not reach
   a process that is gone, or that drains, goes to another one.

Events are recorded, and `decide` says what follows from them: so it sees all that arrived together.

Why: docs/decisions/0057.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple

from carpool.messages.requests import Run, SequencePart
from carpool.messages.results import Refusal
from carpool.messages.sequences import KeptSequence, SequenceChange, SlotFreed
from carpool_batcher.core.sequences.idle_sequences import IdleSequences
from carpool_batcher.core.sequences.sequence import (
    ENDED_BY_FORCE,
    FAILED_BEFORE,
    PROCESS_GONE,
    InFlight,
    Segment,
    Sequence,
    aborted,
    did_not_arrive,
    did_not_succeed,
    ended_by_force,
    never_begun,
    part_of,
    place_of,
    processed_already,
    sent_twice,
)
from carpool_batcher.core.sequences.space import Space, WaitingStarts, lane_of_process

REFUSED_AT_ONCE: Final = 256  # requests, or sequences that are looked at, in a piece
SOUGHT_AT_ONCE: Final = 4096  # waiting requests, in a piece
REPLAYED_AT_ONCE: Final = 256  # events, in a piece
BROKEN_MIN: Final = 1000  # broken sequences that are remembered in any case

_FIRST_PLACE: Final = "0"  # before each place
_LAST_PLACE: Final = "9"  # after each place, also where the locale of Redis orders other characters


class Decided(NamedTuple):
    """Requests that become heads, followers that are refused, what changes in Redis besides, and what model
    processes are told."""

    heads: list[Run]
    refusals: list[Refusal]
    changes: list[SequenceChange]
    freed: list[SlotFreed]

    @classmethod
    def nothing(cls) -> Decided:
        """Nothing was decided yet."""
        return cls([], [], [], [])


class SequenceCensus(NamedTuple):
    """`kept`: begun, and neither ended nor broken. The last three are counters."""

    kept: int
    waiting_to_start: int
    started: int
    ended: int
    broken: int


class _Break(NamedTuple):
    """A request of a sequence did not succeed, for this reason."""

    part: SequencePart
    correlation_id: str
    reason: str
    is_recorded: bool  # in Redis


class _End(NamedTuple):
    """Sequences are ended by force, by an entry at this place."""

    sequence_ids: Collection[str]
    place: str


class Followers:
    """Requests that wait and are not in a lane, each with its segment; None: not read completely yet."""

    def __init__(self) -> None:
        self._segments: dict[Run, Segment | None] = {}

    def __iter__(self) -> Iterator[Run]:
        return iter(self._segments)

    def __contains__(self, run: Run) -> bool:
        return run.waits_in is self

    def add(self, run: Run, segment: Segment | None) -> None:
        """A request is one from now on."""
        run.waits_in = self
        self._segments[run] = segment

    def pop(self, run: Run) -> Segment | None:
        """A request is none any more. Returns its segment."""
        run.waits_in = None
        return self._segments.pop(run)

    def segment_of(self, run: Run) -> Segment | None:
        """The segment of a follower, if that is known."""
        return self._segments.get(run)


class Sequences:
    """The sequences of one model."""

    def __init__(self, space: Space | None = None) -> None:
        self.space = Space() if space is None else space
        self.idle_us = 0
        self.followers = Followers()
        self._by_id: dict[str, Sequence] = {}
        self._changed: dict[Sequence, None] = {}  # since the last `decide`
        self._breaks: dict[Segment, str] = {}  # after these places requests are aborted
        self._marks: dict[Sequence, list[SequenceChange]] = {}  # breaks that Redis does not know of
        self._idle = IdleSequences()
        self._to_start = WaitingStarts()
        self._decided = Decided.nothing()
        # Followers that are to be refused, and how. Their segment has ended, or they are in none any more.
        self._doomed: deque[tuple[Iterable[Run], Callable[[Run], Refusal]]] = deque()
        self._unread: list[tuple[str, Run | _Break | _End]] | None = None  # while a batcher takes over
        self._loaded: dict[str, KeptSequence] = {}
        self._restarts: dict[str, str] = {}  # the places of starts that were in flight then, by sequence
        self._begun = self._started = self._ended = self._broken = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def census(self) -> SequenceCensus:
        """For the report."""
        return SequenceCensus(self._begun, len(self._to_start), self._started, self._ended, self._broken)

    # --- taking over ---------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether this batcher took over, and has not read all requests that waited. Until then it is unknown
        what follows from events."""
        return self._unread is not None

    def load(self, kept: Iterable[KeptSequence]) -> None:
        """Redis has these sequences. Until `complete` no request becomes a head."""
        self._unread = []
        for one in sorted(kept, key=lambda one: one.changed_us):
            sequence = self._by_id[one.sequence_id] = Sequence(one.sequence_id)
            sequence.is_recorded = True
            if one.next_index is not None:
                sequence.has_state, sequence.next_index = True, one.next_index
                sequence.first_id, sequence.last_id = one.first_id, one.last_id
                self.space.restore(sequence, one.process)
            if one.failed_at:
                self._unread.append((one.failed_at, _break_known(one, one.failed_at, FAILED_BEFORE)))
            if one.broken:
                sequence.broken_at = one.broken_at
                self._unread.append((one.broken_at, _break_known(one, one.broken_at, one.broken)))
            self._loaded[one.sequence_id] = one
            self._idle.add(sequence, one.changed_us, waits=False, has_state=sequence.has_state)

    def adopt(self, run: Run, process: str = "") -> None:
        """This request is in flight, dispatched by a previous batcher to this process, if it is of a bound
        model. Its result may be in Redis already."""
        part, correlation_id = part_of(run), run.correlation_ids[0]
        sequence, loaded = self._sequence(part.sequence_id), self._loaded.get(part.sequence_id)
        in_flight = sequence.in_flight = InFlight(part, correlation_id, sequence.current)
        if part.starts:
            self._restarts[part.sequence_id] = part.place
        self.space.restore(sequence, process)
        in_flight.is_counted = sequence.has_state and not part.starts and sequence.last_id == correlation_id
        is_broken = loaded is not None and part.place in (loaded.broken_at, loaded.failed_at)
        is_without_state = not (part.starts or part.ends or sequence.has_state)
        in_flight.has_failed = is_broken or is_without_state
        if in_flight.has_failed:
            sequence.has_state, sequence.current.broken = False, did_not_succeed(correlation_id)
            sequence.is_recorded = True  # with its result, at the latest

    def complete(self) -> None:
        """All requests that waited when this batcher took over were read. May be called repeatedly."""
        for _ in self.complete_in_pieces():
            pass

    def complete_in_pieces(self) -> Iterator[None]:
        """As `complete`. Between the pieces nothing else may be called."""
        if self._unread is None:
            return
        unread, self._unread = sorted(self._unread, key=lambda item: item[0]), None
        for number, (_, event) in enumerate(unread, 1):
            if not number % REPLAYED_AT_ONCE:
                yield
            if type(event) is _Break:
                self._replay_break(event)
            elif type(event) is _End:
                self.end(event.sequence_ids, event.place)
            elif type(event) is Run and event in self.followers:
                self.followers.pop(event)
                self._replay_arrival(event)
        self._loaded.clear()
        self._restarts.clear()
        self.leave_processes()
        for sequence in self._by_id.values():
            self._recount(sequence)
            self._changed[sequence] = None

    def _replay_arrival(self, run: Run) -> None:
        refused = self.judge(run)
        if refused is None:
            self.add(run)
        else:
            self._decided.refusals.append(refused)

    def _replay_break(self, event: _Break) -> None:
        part = event.part
        is_begun_anew = part.place < self._restarts.get(part.sequence_id, "")
        if not is_begun_anew:
            self._break_last_segment(event)

    # --- arrivals ------------------------------------------------------------------------------------------

    def judge(self, run: Run) -> Refusal | None:
        """A request arrived: why it cannot wait; None if it may. Nothing is changed."""
        if self._unread is not None:
            return None
        part = part_of(run)
        sequence = self._by_id.get(part.sequence_id)
        if sequence is None:
            return None if part.starts or part.index is not None else never_begun(run)
        segment = sequence.segments[-1]
        if segment.broken and not part.starts:
            return aborted(run, segment.broken)
        known_id = sequence.known_id(part)
        if known_id == run.correlation_ids[0]:
            return sent_twice(run)
        if known_id is not None and not part.starts:
            return processed_already(run, sequence.served_of_last_segment())
        if part.starts or part.index is not None or sequence.is_begun:
            return None
        return never_begun(run)

    def is_sent_again(self, part: SequencePart, correlation_id: str) -> bool:
        """Whether a request that cannot be decoded is a copy of one that was decoded, as its index shows."""
        sequence = None if self._unread is not None else self._by_id.get(part.sequence_id)
        return sequence is not None and sequence.known_id(part) == correlation_id

    def add(self, run: Run) -> None:
        """A request waits."""
        if self._unread is not None:
            self._unread.append((place_of(run), run))
            self.followers.add(run, None)
            return
        sequence = self._sequence(part_of(run).sequence_id)
        segment = sequence.add(run)
        self.followers.add(run, segment)
        if segment.start is run:
            self._breaks.pop(segment, None)  # of an earlier start that had this segment
        self._changed[sequence] = None

    def refuse_arrival(self, part: SequencePart, correlation_id: str) -> None:
        """A request was refused when it arrived: over a limit, or invalid. O(1)."""
        event = _Break(part, correlation_id, did_not_succeed(correlation_id), False)
        if self._unread is not None:
            self._unread.append((part.place, event))
        else:
            self._break_last_segment(event)

    def _break_last_segment(self, event: _Break) -> None:
        """A request that stands after all others was refused. After a start nothing is served."""
        part = event.part
        if part.starts:
            self._sequence(part.sequence_id).open_segment()
        sequence = self._by_id.get(part.sequence_id)
        if sequence is not None:
            self._break(sequence, sequence.segments[-1], event)

    def end(self, sequence_ids: Collection[str], place: str) -> list[Run]:
        """An entry at this place ends sequences by force. Returns their heads, which the caller removes and
        refuses."""
        if self._unread is not None:
            self._unread.append((place, _End(sequence_ids, place)))
            return []
        known = [self._by_id[name] for name in sequence_ids if name in self._by_id]
        return [head for sequence in known if (head := self._end_by_force(sequence, place)) is not None]

    def _end_by_force(self, sequence: Sequence, place: str) -> Run | None:
        for segment in sequence.segments:
            segment.has_ended = True
            self._doomed.append((segment.all(), ended_by_force))
        self._to_start.discard(sequence)
        sequence.segments.clear()
        sequence.segments.append(Segment(broken=ENDED_BY_FORCE))
        head, sequence.head, sequence.has_state = sequence.head, None, False
        if sequence.in_flight is not None:
            sequence.in_flight.has_failed = True
        part = SequencePart(sequence.sequence_id, False, True, None, place)
        self._marks.pop(sequence, None)
        self._decided.changes.append(SequenceChange(part, "", "ended"))
        self._decided.changes.append(SequenceChange(part, "", "broken", ENDED_BY_FORCE))
        sequence.is_recorded, sequence.broken_at = True, place
        self._ended += 1
        self._changed[sequence] = None
        return head

    # --- what becomes of waiting requests ------------------------------------------------------------------

    def removed(self, run: Run) -> None:
        """A waiting request, a head or a follower, does not wait any more, and was not dispatched."""
        part, correlation_id = part_of(run), run.correlation_ids[0]
        event = _Break(part, correlation_id, did_not_succeed(correlation_id), False)
        if run in self.followers:
            segment = self.followers.pop(run)
            if segment is None:
                assert self._unread is not None
                self._unread.append((part.place, event))
                return
            if segment.has_ended:
                segment.remove(run)
                return
            sequence = self._by_id[part.sequence_id]
            if run is sequence.current.start:
                self._to_start.discard(sequence)
            segment.remove(run)
            self._break(sequence, segment, event)
            return
        known = self._by_id.get(part.sequence_id)
        if known is not None and known.head is run:
            known.head, known.has_state = None, False
            self._break(known, known.current, event)

    def dispatch(self, run: Run) -> None:
        """A head is dispatched."""
        part = part_of(run)
        sequence = self._by_id[part.sequence_id]
        sequence.head, sequence.is_in_process = None, True
        sequence.in_flight = InFlight(part, run.correlation_ids[0], sequence.current)

    # --- in flight -----------------------------------------------------------------------------------------

    def settle(self, run: Run, *, is_broken: bool) -> None:
        """The batch of this request settled. `is_broken`: it was not answered OK."""
        sequence = self._with_in_flight(run)
        if sequence is None or sequence.in_flight is None:
            return
        if is_broken:
            self.fail(run)
        in_flight, sequence.in_flight = sequence.in_flight, None
        self._changed[sequence] = None
        if in_flight.has_failed:
            return
        part = in_flight.part
        self._started += part.starts
        self._ended += part.ends
        sequence.has_state = not part.ends
        sequence.is_in_process = sequence.has_state
        sequence.is_recorded = sequence.has_state or sequence.broken_at > part.place
        if part.starts or part.ends:
            sequence.next_index = int(not part.ends)
        elif not in_flight.is_counted:
            sequence.next_index += 1
        sequence.last_id = in_flight.correlation_id
        if part.starts:
            sequence.first_id = in_flight.correlation_id

    def fail(self, run: Run) -> None:
        """This request in flight was answered, and not OK. Redis knows of it."""
        self._fail(run, is_recorded=True)

    def lose(self, run: Run) -> None:
        """This request was to be dispatched, or is in flight, and is not in Redis any more."""
        sequence = self._fail(run, is_recorded=False)
        if sequence is not None:
            sequence.in_flight = None

    def _fail(self, run: Run, *, is_recorded: bool) -> Sequence | None:
        sequence = self._with_in_flight(run)
        if sequence is None or sequence.in_flight is None:
            return None
        in_flight = sequence.in_flight
        if not in_flight.has_failed:
            in_flight.has_failed, sequence.has_state = True, False
            reason = did_not_succeed(in_flight.correlation_id)
            event = _Break(in_flight.part, in_flight.correlation_id, reason, is_recorded)
            self._break(sequence, in_flight.segment, event)
        self._changed[sequence] = None
        return sequence

    def _with_in_flight(self, run: Run) -> Sequence | None:
        part = part_of(run)
        sequence = self._by_id.get(part.sequence_id)
        if sequence is None or sequence.in_flight is None or sequence.in_flight.part.place != part.place:
            return None
        return sequence

    # --- decisions -----------------------------------------------------------------------------------------

    def wake_at_us(self) -> int | None:
        """When `decide` could next decide something; 0: at once; None: not before something happens."""
        if self._unread is not None:
            return None
        if self._changed or self._doomed or any(self._decided):
            return 0
        oldest_us = self._idle.oldest_us()
        return None if oldest_us is None else oldest_us + self.idle_us

    def decide(self, now_us: int) -> Iterator[Decided]:
        """What follows from all that happened, and from the time: in parts of few requests, between which
        nothing may be called that changes something."""
        if self._unread is not None:
            return
        yield from self._follow_events(now_us)
        if self._end_long_idle(now_us):
            yield from self._follow_events(now_us)
        for marks in self._marks.values():
            self._decided.changes.extend(sorted(marks, key=lambda mark: mark.part.place))
        self._marks.clear()
        yield self._pop_decided()

    def _pop_decided(self) -> Decided:
        decided, self._decided = self._decided, Decided.nothing()
        return decided

    def _follow_events(self, now_us: int) -> Iterator[Decided]:
        for segment, place in self._breaks.items():
            yield from self._refuse_after(segment, place)
        self._breaks.clear()
        changed, self._changed = self._changed, {}
        for number, sequence in enumerate(changed, 1):
            self._advance(sequence, now_us)
            if not number % REFUSED_AT_ONCE:
                yield self._pop_decided()
        self._begin_waiting(now_us)
        yield from self._refuse_doomed()

    def _refuse_after(self, segment: Segment, place: str) -> Iterator[Decided]:
        """Refuse what stands after this place, at which the segment broke."""
        later: list[Run] = []
        for number, run in enumerate(segment.rest(), 1):
            if place_of(run) > place:
                later.append(run)
            if not number % SOUGHT_AT_ONCE:
                yield Decided.nothing()
        for number, run in enumerate(sorted(later, key=place_of), 1):
            self._refuse(segment, run, aborted(run, segment.broken))
            if not number % REFUSED_AT_ONCE:
                yield self._pop_decided()

    def _refuse_doomed(self) -> Iterator[Decided]:
        refusals = self._decided.refusals
        while self._doomed:
            runs, refusal_of = self._doomed.popleft()
            for run in runs:
                if run in self.followers:  # else it expired, or was withdrawn
                    self.followers.pop(run)
                    refusals.append(refusal_of(run))
                    if len(refusals) >= REFUSED_AT_ONCE:
                        yield self._pop_decided()
                        refusals = self._decided.refusals

    def _advance(self, sequence: Sequence, now_us: int) -> None:
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
            del self._by_id[sequence.sequence_id]

    def _recount(self, sequence: Sequence) -> None:
        occupies_space = sequence.is_busy or sequence.can_go_on
        self._begun += occupies_space - sequence.occupies_space
        sequence.occupies_space = occupies_space
        if not occupies_space:
            self._leave(sequence)

    def _choose_head(self, sequence: Sequence) -> None:
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
            self._doomed.append((segment.pop_rest(), partial(_aborted, segment.broken)))
        elif not has_state:
            runs = segment.pop_unnumbered() if is_last else segment.pop_rest()
            self._doomed.append((runs, never_begun))

    def _begin(self, sequence: Sequence, start: Run) -> None:
        """It is the turn of a start: it becomes the head if there is space."""
        if not self.space.is_occupied_by(sequence):
            self._leave(sequence)
            sequence.has_state = False
            if not (self._to_start.is_first(place_of(start)) and self.space.is_free(self._begun)):
                self._to_start.add(sequence, place_of(start))
                return
        self._to_start.discard(sequence)
        self.space.occupy(sequence)
        self._promote(sequence, start)

    def _begin_waiting(self, now_us: int) -> None:
        """Sequences that wait to start begin, as far as there is space."""
        while self._to_start and self.space.is_free(self._begun):
            sequence = self._to_start.pop()
            if sequence is not None:
                self._advance(sequence, now_us)

    def _promote(self, sequence: Sequence, run: Run) -> None:
        sequence.current.remove(run)
        self.followers.pop(run)
        sequence.head = run
        self._decided.heads.append(run)

    def awaited(self, run: Run) -> str:
        """What a follower waits for, to tell its producer; '' if it is unknown, or if this is a head."""
        if self.followers.segment_of(run) is None:
            return ""
        sequence = self._by_id[part_of(run).sequence_id]
        if sequence.waits_for_space:
            return self.space.awaited()
        if sequence.is_busy:
            return "an earlier request of its sequence"
        if sequence.has_state:
            return f"the request of its sequence with the index {sequence.next_index}"
        return "the start of its sequence"

    # --- model processes -----------------------------------------------------------------------------------

    def lane_name(self, run: Run) -> str:
        """The name, in the queue, of the lane of a head."""
        sequence = self._by_id.get(part_of(run).sequence_id)
        return run.lane if sequence is None else lane_of_process(sequence.process, run.lane)

    def process_of(self, run: Run) -> str:
        """Of a bound model, the process to which a head goes; '' if it is any."""
        return self._by_id[part_of(run).sequence_id].process

    def heads_to_move(self) -> list[Run]:
        """The heads that `leave_processes` makes followers again, for the caller to take out of their
        lanes."""
        if self._unread is not None:
            return []
        leaving = filter(self.space.must_leave, self._by_id.values())
        return [sequence.head for sequence in leaving if sequence.head is not None]

    def leave_processes(self) -> None:
        """Sequences leave model processes that are gone, which breaks them, or that drain."""
        if self._unread is None:
            for sequence in self._by_id.values():
                if self.space.must_leave(sequence):
                    self._leave_process(sequence)

    def _leave_process(self, sequence: Sequence) -> None:
        head, in_flight = sequence.head, sequence.in_flight
        if head is not None:
            sequence.head = None
            sequence.current.add(head)
            self.followers.add(head, sequence.current)
        if in_flight is not None and not in_flight.has_failed:
            in_flight.has_failed = True
            event = _Break(in_flight.part, in_flight.correlation_id, PROCESS_GONE, False)
            self._break(sequence, in_flight.segment, event)
        elif in_flight is None and sequence.has_state and sequence.current.start is None:
            part = SequencePart(sequence.sequence_id, False, False, None, _FIRST_PLACE)
            self._break(sequence, sequence.current, _Break(part, "", PROCESS_GONE, False))
        sequence.has_state = False
        self._leave(sequence)
        self._changed[sequence] = None

    def _leave(self, sequence: Sequence) -> None:
        freed = self.space.leave(sequence)
        if freed is not None:
            self._decided.freed.append(freed)

    # --- idle sequences ------------------------------------------------------------------------------------

    def _end_long_idle(self, now_us: int) -> bool:
        """End the sequences that have been idle for `idle_us`, and the oldest broken ones if there are too
        many of them. Whether there were any."""
        ended = False
        for sequence, waits in self._idle.pop_until(now_us - self.idle_us):
            ended = True
            if waits:
                self._refuse_stuck(sequence)
            else:
                self._end_idle(sequence)
        for sequence in self._idle.pop_broken(max(self.space.begun_max, BROKEN_MIN)):
            ended = True
            self._end_idle(sequence)
        return ended

    def _refuse_stuck(self, sequence: Sequence) -> None:
        """Its requests wait for an index that did not come, or for a start."""
        segment = sequence.current
        if sequence.has_state:
            first = min(segment.rest(), key=place_of)
            reason = did_not_arrive(sequence.next_index, self.idle_us // 1000)
            event = _Break(part_of(first), first.correlation_ids[0], reason, False)
            self._break(sequence, segment, event)
            sequence.has_state = False
        refusal_of = partial(_aborted, segment.broken) if segment.broken else never_begun
        self._doomed.append((segment.pop_rest(), refusal_of))
        self._changed[sequence] = None

    def _end_idle(self, sequence: Sequence) -> None:
        self._begun -= sequence.occupies_space
        self._leave(sequence)
        self._ended += sequence.has_state
        del self._by_id[sequence.sequence_id]
        self._marks.pop(sequence, None)
        if sequence.is_recorded:
            part = SequencePart(sequence.sequence_id, False, True, None, _LAST_PLACE)
            self._decided.changes.append(SequenceChange(part, "", "ended"))

    # --- records -------------------------------------------------------------------------------------------

    def _sequence(self, sequence_id: str) -> Sequence:
        sequence = self._by_id.get(sequence_id)
        if sequence is None:
            sequence = self._by_id[sequence_id] = Sequence(sequence_id)
        return sequence

    def _refuse(self, segment: Segment, run: Run, refused: Refusal) -> None:
        segment.remove(run)
        self.followers.pop(run)
        self._decided.refusals.append(refused)

    def _break(self, sequence: Sequence, segment: Segment, event: _Break) -> None:
        """What stands after this request in its segment is not served. A request that came before its start,
        in the wrong order, is only missing: that start, and what follows it, stand after the break."""
        self._changed[sequence] = None
        if event.part.place < sequence.start_place(segment):
            return
        self._broken += not segment.broken
        segment.broken = event.reason
        self._breaks[segment] = min(event.part.place, self._breaks.get(segment, event.part.place))
        sequence.broken_at = max(sequence.broken_at, event.part.place)
        sequence.is_recorded = True
        if event.is_recorded:
            return
        mark = SequenceChange(event.part, event.correlation_id, "broken", event.reason)
        self._marks.setdefault(sequence, []).append(mark)


def _aborted(reason: str, run: Run) -> Refusal:
    return aborted(run, reason)


def _break_known(kept: KeptSequence, place: str, reason: str) -> _Break:
    """A break of which Redis knows."""
    return _Break(SequencePart(kept.sequence_id, False, False, None, place), "", reason, True)
