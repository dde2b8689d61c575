"""All sequences of a model: their heads, how many are kept at a time, and when idle ones end.

1. Of each sequence at most one request is in a lane (its *head*) or in flight. Its other waiting requests are
   *followers*. When the request in flight was answered OK, the next one becomes the head.
2. A request that ends in any other way breaks its sequence: those that stand after it, up to the next
   start, are answered ABORTED. Those that stand before it are still served.
3. A start needs space (`sequences.processes`). If there is none it waits, in the order of arrival. A start of
   a sequence that is begun has its space: earlier requests finish, then it begins anew.
4. A sequence without a request in a lane or in flight is *idle*. After `idle_us` it is ended; if requests
   wait for an index, or for a start, these are refused. Of broken ones for which nothing waits, no more are
   remembered than may be begun at a time, or BROKEN_MIN: anybody can break any number of names.
5. A request that was sent twice, as its index shows, is dropped if it has the same correlation ID.
6. A batcher that takes over knows what Redis keeps, and what is in flight. It reads all waiting requests
   before there is any head: one that was put back stands later in the request stream than its place says.
7. If the process that has the state of a sequence is gone, the sequence is broken. A start that did not reach
   a process that is gone, or that drains, goes to another one.

Events are recorded, and `decide` says what follows from them: so it sees all that arrived together. Events of
a takeover (`sequences.takeover`) are replayed at its end. What changed, and what Redis is told of it, is in
`sequences.known`; requests that are to be refused are in `sequences.followers`; `sequences.heads` decides.

Why: docs/decisions/0057.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final, NamedTuple

from carpool.messages.requests import Run, SequencePart
from carpool.messages.results import Refusal
from carpool.messages.sequences import KeptSequence
from carpool_batcher.core.sequences.followers import Followers
from carpool_batcher.core.sequences.heads import Decided, Heads
from carpool_batcher.core.sequences.known import Break, KnownSequences
from carpool_batcher.core.sequences.processes import Processes, Space, lane_of_process
from carpool_batcher.core.sequences.sequence import (
    OneSequence,
    aborted,
    never_begun,
    part_of,
    place_of,
    processed_already,
    sent_twice,
)
from carpool_batcher.core.sequences.takeover import ForcedEnd, Takeover

REPLAYED_AT_ONCE: Final = 256  # events, or sequences, in a piece


class SequenceCensus(NamedTuple):
    """`kept`: begun, and neither ended nor broken. The last three are counters."""

    kept: int
    waiting_to_start: int
    started: int
    ended: int
    broken: int


class Sequences:
    """The sequences of one model."""

    def __init__(self, space: Space | None = None) -> None:
        self.space = Space() if space is None else space
        self.idle_us = 0
        self.followers = Followers()
        self._known = KnownSequences(self.followers)
        self._heads = Heads(self._known, self.followers, self.space)
        self._takeover: Takeover | None = None

    def __len__(self) -> int:
        return len(self._known.by_id)

    def census(self) -> SequenceCensus:
        """For the report."""
        heads, records = self._heads, self._known
        return SequenceCensus(
            heads.begun, heads.waiting_to_start, records.started, records.ended, records.broken
        )

    # --- taking over ---------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether this batcher took over, and has not read all requests that waited. Until then it is unknown
        what follows from events."""
        return self._takeover is not None

    def load(self, kept: Iterable[KeptSequence]) -> None:
        """Redis has these sequences. Until `complete` no request becomes a head."""
        oldest_first = sorted(kept, key=lambda one: one.changed_us)
        self._takeover = Takeover(oldest_first)
        for one in oldest_first:
            sequence = self._known.get_or_add(one.sequence_id)
            sequence.load(one)
            if sequence.has_state:
                self.space.restore(sequence, one.process)
            self._heads.load(sequence, one.changed_us)

    def adopt(self, run: Run, process: str = "") -> None:
        """This request is in flight, dispatched by a previous batcher to this process, if it is of a bound
        model. Its result may be in Redis already."""
        part = part_of(run)
        sequence = self._known.get_or_add(part.sequence_id)
        is_broken = self._takeover is not None and self._takeover.adopt(part)
        self.space.restore(sequence, process)
        sequence.adopt(part, run.correlation_ids[0], is_broken=is_broken)

    def complete(self) -> None:
        """All requests that waited when this batcher took over were read. May be called repeatedly."""
        for _ in self.complete_in_pieces():
            pass

    def complete_in_pieces(self) -> Iterator[None]:
        """As `complete`. Between the pieces nothing else may be called."""
        takeover, self._takeover = self._takeover, None
        if takeover is None:
            return
        yield from takeover.sort()
        for number, event in enumerate(takeover.in_order(), 1):
            self._replay(event)
            if not number % REPLAYED_AT_ONCE:
                yield
        self.leave_processes()
        for number, sequence in enumerate(self._known.by_id.values(), 1):
            self._heads.take_over(sequence)
            if not number % REPLAYED_AT_ONCE:
                yield

    def _replay(self, event: Run | Break | ForcedEnd) -> None:
        if type(event) is Break:
            self._break_last_segment(event)
        elif type(event) is ForcedEnd:
            self.end(event.sequence_ids, event.place)
        elif type(event) is Run and event in self.followers:
            refused = self.judge(event)
            if refused is None:
                self.followers.pop(event)
                self.add(event)
            else:
                self.followers.refuse(event, refused)

    # --- arrivals ------------------------------------------------------------------------------------------

    def judge(self, run: Run) -> Refusal | None:
        """A request arrived: why it cannot wait; None if it may. Nothing is changed."""
        if self._takeover is not None:
            return None
        part = part_of(run)
        sequence = self._known.by_id.get(part.sequence_id)
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

    def is_copy(self, part: SequencePart, correlation_id: str) -> bool:
        """Whether a request that cannot be decoded is a copy of one that was decoded, as its index shows."""
        sequence = None if self._takeover is not None else self._known.by_id.get(part.sequence_id)
        return sequence is not None and sequence.known_id(part) == correlation_id

    def add(self, run: Run) -> None:
        """A request waits."""
        if self._takeover is not None:
            self._takeover.record(place_of(run), run)
            self.followers.add(run, None)
            return
        sequence = self._known.get_or_add(part_of(run).sequence_id)
        segment = sequence.add(run)
        self.followers.add(run, segment)
        if segment.start is run:
            self.followers.spare(segment)
        self._known.changed[sequence] = None

    def refuse_arrival(self, part: SequencePart, correlation_id: str) -> None:
        """A request was refused when it arrived: over a limit, or invalid. O(1)."""
        event = Break.by(part, correlation_id)
        if self._takeover is not None:
            self._takeover.record(part.place, event)
        else:
            self._break_last_segment(event)

    def _break_last_segment(self, event: Break) -> None:
        """A request that stands after all others was refused. After a start nothing is served."""
        part = event.part
        if part.starts:
            self._known.get_or_add(part.sequence_id).open_segment()
        sequence = self._known.by_id.get(part.sequence_id)
        if sequence is not None:
            self._known.break_segment(sequence, sequence.segments[-1], event)

    def end(self, sequence_ids: Collection[str], place: str) -> list[Run]:
        """An entry at this place ends sequences by force. Returns their heads, which the caller removes and
        refuses."""
        if self._takeover is not None:
            self._takeover.record(place, ForcedEnd(sequence_ids, place))
            return []
        heads: list[Run] = []
        for sequence in [self._known.by_id[name] for name in sequence_ids if name in self._known.by_id]:
            self._heads.withdraw_start(sequence)
            head = self._known.end_by_force(sequence, place)
            if head is not None:
                heads.append(head)
        return heads

    # --- what becomes of waiting requests ------------------------------------------------------------------

    def removed(self, run: Run) -> None:
        """A waiting request, a head or a follower, does not wait any more, and was not dispatched."""
        part = part_of(run)
        event = Break.by(part, run.correlation_ids[0])
        sequence = self._known.by_id.get(part.sequence_id)
        if run in self.followers:
            segment = self.followers.pop(run)
            if segment is None:
                assert self._takeover is not None
                self._takeover.record(part.place, event)
            elif segment.has_ended:
                segment.remove(run)
            else:
                assert sequence is not None
                if run is sequence.current.start:
                    self._heads.withdraw_start(sequence)
                segment.remove(run)
                self._known.break_segment(sequence, segment, event)
        elif sequence is not None and sequence.head is run:
            sequence.head, sequence.has_state = None, False
            self._known.break_segment(sequence, sequence.current, event)

    def dispatch(self, run: Run) -> None:
        """A head is dispatched."""
        self._known.by_id[part_of(run).sequence_id].dispatch(run)

    # --- in flight -----------------------------------------------------------------------------------------

    def settle(self, run: Run, *, is_broken: bool) -> None:
        """The batch of this request settled. `is_broken`: it was not answered OK."""
        if is_broken:
            self.fail(run)
        sequence = self._with_in_flight(run)
        if sequence is not None:
            self._known.settle(sequence)

    def fail(self, run: Run) -> None:
        """This request in flight was answered, and not OK. Redis knows of it."""
        self._fail(run, is_recorded=True)

    def lose(self, run: Run) -> None:
        """This request was to be dispatched, or is in flight, and is not in Redis any more."""
        sequence = self._fail(run, is_recorded=False)
        if sequence is not None:
            sequence.in_flight = None

    def _fail(self, run: Run, *, is_recorded: bool) -> OneSequence | None:
        sequence = self._with_in_flight(run)
        if sequence is None or sequence.in_flight is None:
            return None
        in_flight = sequence.in_flight
        if not in_flight.has_failed:
            in_flight.has_failed, sequence.has_state = True, False
            event = Break.by(in_flight.part, in_flight.correlation_id, is_recorded=is_recorded)
            self._known.break_segment(sequence, in_flight.segment, event)
        self._known.changed[sequence] = None
        return sequence

    def _with_in_flight(self, run: Run) -> OneSequence | None:
        part = part_of(run)
        sequence = self._known.by_id.get(part.sequence_id)
        if sequence is None or sequence.in_flight is None or sequence.in_flight.part.place != part.place:
            return None
        return sequence

    # --- decisions -----------------------------------------------------------------------------------------

    def wake_at_us(self) -> int | None:
        """When `decide` could next decide something; 0: at once; None: not before something happens."""
        return None if self._takeover is not None else self._heads.wake_at_us(self.idle_us)

    def decide(self, now_us: int) -> Iterator[Decided]:
        """What follows from all that happened, and from the time: in parts of few requests, between which
        nothing may be called that changes something."""
        if self._takeover is None:
            yield from self._heads.decide(now_us, self.idle_us)

    def awaited(self, run: Run) -> str:
        """What a follower waits for, to tell its producer; '' if it is unknown, or if this is a head."""
        if self.followers.segment_of(run) is None:
            return ""
        sequence = self._known.by_id[part_of(run).sequence_id]
        if sequence.waits_for_space:
            return self.space.awaited()
        if sequence.is_busy:
            return "an earlier request of its sequence"
        if sequence.has_state:
            return f"the request of its sequence with the index {sequence.next_index}"
        return "the start of its sequence"

    def blocker(self, run: Run) -> str:
        """The correlation ID of the request of its sequence that a follower waits for, which is in a lane or
        in flight; '' if there is none."""
        sequence = self._known.by_id.get(part_of(run).sequence_id)
        if sequence is None or sequence.head is run:
            return ""
        if sequence.in_flight is not None:
            return sequence.in_flight.correlation_id
        return "" if sequence.head is None else sequence.head.correlation_ids[0]

    # --- model processes -----------------------------------------------------------------------------------

    @property
    def are_bound(self) -> bool:
        """Whether each stays with one model process."""
        return isinstance(self.space, Processes)

    def lane_name(self, run: Run) -> str:
        """The name, in the queue, of the lane of a head."""
        sequence = self._known.by_id.get(part_of(run).sequence_id)
        return run.lane if sequence is None else lane_of_process(sequence.process, run.lane)

    def process_of(self, run: Run) -> str:
        """Of a bound model, the process to which a head goes; '' if it is any."""
        return self._known.by_id[part_of(run).sequence_id].process

    def heads_to_move(self) -> list[Run]:
        """The heads that `leave_processes` makes followers again, for the caller to take out of their
        lanes."""
        if self._takeover is not None:
            return []
        leaving = filter(self.space.must_leave, self._known.by_id.values())
        return [sequence.head for sequence in leaving if sequence.head is not None]

    def leave_processes(self) -> None:
        """Sequences leave model processes that are gone, which breaks them, or that drain."""
        if self._takeover is None:
            for sequence in self._known.by_id.values():
                if self.space.must_leave(sequence):
                    self._heads.leave_process(sequence)
