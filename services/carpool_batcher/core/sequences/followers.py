"""Followers: the requests of sequences that wait and are not in a lane, and which of them are refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool_batcher.core.sequences.sequence import Segment, aborted, place_of

REFUSED_AT_ONCE: Final = 256  # requests, in a piece
SOUGHT_AT_ONCE: Final = 4096  # waiting requests, in a piece


class Followers:
    """Requests that wait and are not in a lane, each with its segment; None: not read completely yet.

    What is to be refused is only recorded at first: there may be very many, and they may expire, or be
    withdrawn, before it is their turn. `refuse_broken` and `refuse_doomed` refuse them in pieces, after each
    of which the caller pops what was refused.
    """

    def __init__(self) -> None:
        self._segments: dict[Run, Segment | None] = {}
        self._breaks: dict[Segment, str] = {}  # after these places requests are aborted
        # Those that are to be refused, and how. Their segment has ended, or they are in none any more.
        self._doomed: deque[tuple[Iterable[Run], Callable[[Run], Refusal]]] = deque()
        self._refusals: list[Refusal] = []

    def __iter__(self) -> Iterator[Run]:
        return iter(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

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

    # --- refusing ------------------------------------------------------------------------------------------

    @property
    def has_refusals(self) -> bool:
        """Whether any are to be refused that are known without a look at a segment, or any were."""
        return bool(self._doomed or self._refusals)

    def pop_refusals(self) -> list[Refusal]:
        """What was refused since the last call."""
        refusals, self._refusals = self._refusals, []
        return refusals

    def refuse(self, run: Run, refused: Refusal) -> None:
        """A follower is refused, and is none any more."""
        self.pop(run)
        self._refusals.append(refused)

    def abort_after(self, segment: Segment, place: str) -> None:
        """Those in a segment that stand after this place are to be refused, because it broke there."""
        self._breaks[segment] = min(place, self._breaks.get(segment, place))

    def spare(self, segment: Segment) -> None:
        """A start opened a segment in which an earlier one had stood: none is aborted because of that."""
        self._breaks.pop(segment, None)

    def doom(self, runs: Iterable[Run], refusal_of: Callable[[Run], Refusal]) -> None:
        """These are to be refused, as far as they are followers then. They are out of their segment, or that
        has ended."""
        self._doomed.append((runs, refusal_of))

    def refuse_broken(self) -> Iterator[None]:
        """Refuse what stands after breaks, in pieces."""
        for segment, place in self._breaks.items():
            yield from self._refuse_after(segment, place)
        self._breaks.clear()

    def _refuse_after(self, segment: Segment, place: str) -> Iterator[None]:
        later: list[Run] = []
        for number, run in enumerate(segment.rest(), 1):
            if place_of(run) > place:
                later.append(run)
            if not number % SOUGHT_AT_ONCE:
                yield
        for number, run in enumerate(sorted(later, key=place_of), 1):
            segment.remove(run)
            self.refuse(run, aborted(run, segment.broken))
            if not number % REFUSED_AT_ONCE:
                yield

    def refuse_doomed(self) -> Iterator[None]:
        """Refuse those that `doom` named, in pieces."""
        while self._doomed:
            runs, refusal_of = self._doomed.popleft()
            for run in runs:
                if run in self:  # else it expired, or was withdrawn
                    self.refuse(run, refusal_of(run))
                    if len(self._refusals) >= REFUSED_AT_ONCE:
                        yield
