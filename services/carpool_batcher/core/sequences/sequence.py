"""One sequence: which of its requests waits, in which order they are served, and which cannot be.

Its waiting requests are in *segments*: one for the requests that belong to the state that is kept, and one
for each waiting start, with what stands after it. Within a segment a request with an index has its turn when
all before it were served; one without is served in the order of the request stream. Nothing here knows of
lanes, time or other sequences: that is `sequences.heads`.

A sequence is in one of these states when `sequences.heads` has looked at it after its last change:

    state              head  in_flight  waits_for_space  has_state  its current segment
    in a lane          set   -          -                any        any
    in flight          -     set        -                any        any
    waiting for space  -     -          set              -          has its start
    kept               -     -          -                set        is whole, without the next request
    broken             -     -          -                -          is broken, and empty
    not begun          -     -          -                -          is whole, without a start

A start leads to a lane, or to waiting for space. An OK result leads to the lane again if the next request
waits, else to kept, or, if it was the last request, to not begun. Any other one leads to broken once those
are served that stand before it; so does what is removed, or missing for too long. A later start begins anew.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final

from carpool.errors import ABORTED, CANCELLED, INVALID_ARGUMENT
from carpool.messages.requests import Run, SequencePart
from carpool.messages.results import Refusal
from carpool.messages.sequences import KeptSequence
from carpool_batcher.core.decisions import copy_refusal, refusal

SEGMENTS_MIN: Final = 16  # of a sequence: with fewer it is not looked which are empty


class Segment:
    """The requests from one start to before the next, as far as they wait.

    `broken`: why those that come later are not served; empty if they are. `has_ended`: its sequence was ended
    by force, and none of its requests is served.
    """

    __slots__ = ("_by_index", "_in_order", "broken", "has_ended", "start")

    def __init__(self, start: Run | None = None, broken: str = "") -> None:
        self.start = start
        self.broken = broken
        self.has_ended = False
        self._by_index: dict[int, Run] = {}
        self._in_order: OrderedDict[Run, None] = OrderedDict()  # those without an index

    def __iter__(self) -> Iterator[Run]:
        """All of its waiting requests, in no certain order."""
        if self.start is not None:
            yield self.start
        yield from self.rest()

    def rest(self) -> Iterator[Run]:
        """Those after the start."""
        yield from self._in_order
        yield from self._by_index.values()

    @property
    def has_rest(self) -> bool:
        """Whether requests other than the start wait."""
        return bool(self._in_order or self._by_index)

    @property
    def is_empty(self) -> bool:
        """Whether none of its requests waits."""
        return self.start is None and not self.has_rest

    @property
    def has_unnumbered(self) -> bool:
        """Whether requests without an index wait."""
        return bool(self._in_order)

    def add(self, run: Run) -> None:
        """A request waits that stands after all of those without an index."""
        part = part_of(run)
        if part.starts:
            self.start = run
        elif part.index is None:
            self._in_order[run] = None
        else:
            self._by_index[part.index] = run

    def remove(self, run: Run) -> None:
        """A request waits no more."""
        part = part_of(run)
        if run is self.start:
            self.start = None
        elif part.index is None:
            del self._in_order[run]
        else:
            del self._by_index[part.index]

    def all(self) -> list[Run]:
        """All of its waiting requests. O(n), and much faster than one by one."""
        start = [] if self.start is None else [self.start]
        return [*start, *self._in_order, *self._by_index.values()]

    def pop_rest(self) -> Iterable[Run]:
        """Take out those after the start. O(1)."""
        in_order = self.pop_unnumbered()
        by_index, self._by_index = self._by_index, {}
        return chain(in_order, by_index.values())

    def pop_unnumbered(self) -> Iterable[Run]:
        """Take out those after the start without an index. O(1)."""
        in_order, self._in_order = self._in_order, OrderedDict()
        return in_order

    def with_index(self, index: int) -> Run | None:
        """The waiting request that has this index."""
        return self._by_index.get(index)

    def turn_of(self, next_index: int) -> Run | None:
        """The request that is served next, if `next_index` requests were served; None if it is missing."""
        indexed = self._by_index.get(next_index)
        unindexed = next(iter(self._in_order), None)
        if indexed is None or unindexed is None:
            return unindexed if indexed is None else indexed
        return min(indexed, unindexed, key=place_of)


class InFlight:
    """The request of a sequence that is in flight. `has_failed`: it has another answer than OK."""

    __slots__ = ("correlation_id", "has_failed", "part", "segment")

    def __init__(self, part: SequencePart, correlation_id: str, segment: Segment) -> None:
        self.part = part
        self.correlation_id = correlation_id
        self.segment = segment
        self.has_failed = False


class OneSequence:
    """A sequence that is kept, is broken, or has requests.

    Segments of which nothing is left are dropped when there are many: else one sequence whose starts all end
    without a result would have ever more.

    `has_state`: the next request can go on with its state. `next_index`: how many requests succeeded since it
    was started; `first_id` and `last_id` the correlation IDs of the first and the last of them. `head`: the
    request that is in a lane; `in_flight`: the one that is in flight. At most one of the two is set.

    `is_recorded`: Redis knows of it. `broken_at`: the last place at which it was broken. `occupies_space`: it
    is begun, and neither ended nor broken. `waits_for_space`: its start waits until there is space
    (`sequences.processes`). Of a bound model, `process`: where it has a slot; `is_in_process`: that process
    knows of it, because a request was dispatched.
    """

    __slots__ = (
        "_segments_max",
        "broken_at",
        "first_id",
        "has_state",
        "head",
        "in_flight",
        "is_in_process",
        "is_recorded",
        "last_id",
        "next_index",
        "occupies_space",
        "process",
        "segments",
        "sequence_id",
        "waits_for_space",
    )

    def __init__(self, sequence_id: str) -> None:
        self.sequence_id = sequence_id
        self.segments: deque[Segment] = deque([Segment()])
        self.has_state = False
        self.next_index = 0
        self.first_id = ""
        self.last_id = ""
        self.head: Run | None = None
        self.in_flight: InFlight | None = None
        self.is_recorded = False
        self.broken_at = ""
        self.occupies_space = False
        self.waits_for_space = False
        self.process = ""
        self.is_in_process = False
        self._segments_max = SEGMENTS_MIN

    def load(self, kept: KeptSequence) -> None:
        """Redis has it."""
        self.is_recorded = True
        if kept.next_index is not None:
            self.has_state, self.next_index = True, kept.next_index
            self.first_id, self.last_id = kept.first_id, kept.last_id
        if kept.broken:
            self.broken_at = kept.broken_at

    def adopt(self, part: SequencePart, correlation_id: str, *, is_broken: bool) -> None:
        """A previous batcher dispatched this request. `is_broken`: Redis has broken the sequence because of
        it. So it is, too, if the request goes on with a state that there is not."""
        in_flight = self.in_flight = InFlight(part, correlation_id, self.current)
        if self.has_state and not part.starts and self.last_id == correlation_id:
            self.next_index, self.last_id = (
                self.next_index - 1,
                "",
            )  # Redis has counted it; `settle` will, too
        in_flight.has_failed = is_broken or not (part.starts or part.ends or self.has_state)
        if in_flight.has_failed:
            self.has_state, self.current.broken = False, did_not_succeed(correlation_id)
            self.is_recorded = True  # with its result, at the latest

    def dispatch(self, run: Run) -> None:
        """Its head, this one, is dispatched."""
        self.head, self.is_in_process = None, True
        self.in_flight = InFlight(part_of(run), run.correlation_ids[0], self.current)

    def settle(self) -> SequencePart | None:
        """The request in flight was answered. Returns its part if it was answered OK."""
        in_flight, self.in_flight = self.in_flight, None
        if in_flight is None or in_flight.has_failed:
            return None
        part = in_flight.part
        self.has_state = self.is_in_process = not part.ends
        self.is_recorded = self.has_state or self.broken_at > part.place
        self.next_index = int(not part.ends) if part.starts or part.ends else self.next_index + 1
        self.last_id = in_flight.correlation_id
        if part.starts:
            self.first_id = in_flight.correlation_id
        return part

    def end_by_force(self, place: str) -> Run | None:
        """An entry at this place ends it: none of its requests is served. Returns its head, which is none any
        more."""
        for segment in self.segments:
            segment.has_ended = True
        self.segments.clear()
        self.segments.append(Segment(broken=ENDED_BY_FORCE))
        head, self.head, self.has_state = self.head, None, False
        if self.in_flight is not None:
            self.in_flight.has_failed = True
        self.is_recorded, self.broken_at = True, place
        return head

    @property
    def current(self) -> Segment:
        """The segment whose requests are served."""
        return self.segments[0]

    @property
    def is_busy(self) -> bool:
        """Whether a request of it is in a lane or in flight."""
        return self.head is not None or self.in_flight is not None

    @property
    def can_go_on(self) -> bool:
        """Whether a request can be served with its state, now or later. If it is broken, those that stand
        before the break are still served."""
        current = self.current
        return self.has_state and not (current.broken and current.turn_of(self.next_index) is None)

    @property
    def is_begun(self) -> bool:
        """Whether requests other than a start can be served now or later."""
        return self.has_state or self.is_busy or any(segment.start is not None for segment in self.segments)

    def add(self, run: Run) -> Segment:
        """A request arrived, and waits. Returns its segment."""
        if part_of(run).starts:
            self.open_segment()
        segment = self.segments[-1]
        segment.add(run)
        return segment

    def open_segment(self, broken: str = "") -> None:
        """A start arrived. What came before it in the wrong order, with an index, belongs to it."""
        last = self.segments[-1]
        if len(self.segments) > 1 and last.is_empty:
            last.broken = broken  # an earlier start has ended, and nothing that stands after it waits
        elif self.is_begun or last.broken or last.has_unnumbered:
            self.segments.append(Segment(broken=broken))
            if len(self.segments) > self._segments_max:
                self._drop_empty_segments()
        else:
            last.broken = broken

    def _drop_empty_segments(self) -> None:
        """Drop those between the first and the last one of which nothing is left. O(1) amortised."""
        first, *between, last = self.segments
        self.segments = deque([first, *(segment for segment in between if not segment.is_empty), last])
        self._segments_max = max(SEGMENTS_MIN, 2 * len(self.segments))

    def known_id(self, part: SequencePart) -> str | None:
        """The correlation ID of the request that came before with the same index; '' if it is not known any
        more, None if there was none."""
        segment, index = self.segments[-1], part.index
        if index is None:
            return None
        if part.starts:
            return self._known_start_id()
        waiting = segment.with_index(index)
        if waiting is not None:
            return waiting.correlation_ids[0]
        if len(self.segments) > 1 or segment.start is not None:
            return None
        served = self.next_index
        current = self._current_part()
        if current is not None:
            served = 0 if current[0].starts else served
            if index == served:
                return current[1]
        elif not self.has_state:
            return None
        if index >= served:
            return None
        return self.last_id if index == served - 1 else ""

    def _known_start_id(self) -> str | None:
        """The correlation ID of the last start; None if it had no index."""
        start = self.segments[-1].start
        if start is not None:
            return start.correlation_ids[0] if part_of(start).index == 0 else None
        if len(self.segments) > 1:
            return None
        current = self._current_part()
        if current is not None and current[0].starts:
            return current[1] if current[0].index == 0 else None
        return self.first_id if self.has_state else None

    def _current_part(self) -> tuple[SequencePart, str] | None:
        if self.in_flight is not None:
            return self.in_flight.part, self.in_flight.correlation_id
        if self.head is not None:
            return part_of(self.head), self.head.correlation_ids[0]
        return None

    def start_place(self, segment: Segment) -> str:
        """Where the start of a segment stands, as long as it has no result; '' after that."""
        if segment.start is not None:
            return place_of(segment.start)
        current = self._current_part() if segment is self.current else None
        return current[0].place if current is not None and current[0].starts else ""

    def served_of_last_segment(self) -> int:
        """The index that is missing next, for a sentence to a producer."""
        current = self._current_part()
        if current is None:
            return self.next_index
        return 1 if current[0].starts else self.next_index + 1


def part_of(run: Run) -> SequencePart:
    """What makes a run a part of a sequence; it must be one."""
    assert run.sequence is not None
    return run.sequence


def place_of(run: Run) -> str:
    """Where a run of a sequence stands in the request stream."""
    return part_of(run).place


# --- why requests of a sequence are refused ----------------------------------------------------------------

# Why a sequence is broken.
ENDED_BY_FORCE: Final = "it was ended (end_sequences)"
PROCESS_GONE: Final = "its model process ended"
FAILED_BEFORE: Final = "an earlier request of it did not succeed"


def did_not_succeed(correlation_id: str) -> str:
    """Why a sequence is broken: because of this request."""
    return f"its request {correlation_id} did not succeed"


def did_not_arrive(index: int, within_ms: int) -> str:
    """Why a sequence is broken: its other requests waited for one with this index."""
    return f"its request with the index {index} did not arrive within {within_ms} ms"


def aborted(run: Run, reason: str) -> Refusal:
    """Its sequence is broken."""
    detail = f"sequence {part_of(run).sequence_id}: {reason}; begin it again with sequence_start"
    return _refusal(run, ABORTED, detail)


def never_begun(run: Run) -> Refusal:
    """There is no state for it."""
    name = part_of(run).sequence_id
    detail = f"sequence_id: {name} was never begun, or has ended: begin it with sequence_start"
    return _refusal(run, INVALID_ARGUMENT, detail)


def processed_already(run: Run, next_index: int) -> Refusal:
    """Another request had its index."""
    detail = f"sequence_index: {part_of(run).index} was sent before; the next to be processed is {next_index}"
    return _refusal(run, INVALID_ARGUMENT, detail)


def sent_twice(run: Run) -> Refusal:
    """It has come before, with the same correlation ID: it is removed without an answer."""
    return copy_refusal(run)


def ended_by_force(run: Run) -> Refusal:
    """It waited when its sequence was ended by force."""
    return _refusal(run, CANCELLED, f"sequence {part_of(run).sequence_id}: {ENDED_BY_FORCE}")


def _refusal(run: Run, status: str, detail: str) -> Refusal:
    return refusal(run, status, "sequence", detail)
