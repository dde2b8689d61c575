"""How many chunks of streams were written since a batcher became active."""

from __future__ import annotations

from collections.abc import Mapping


class ChunkCount:
    """Counts a stream while it is in flight, as often as Redis is asked, and exactly when it ends."""

    def __init__(self) -> None:
        self._of_ended = 0
        self._in_flight: int | None = None  # None: not known yet
        self._shown = 0

    def stream_ended(self, chunks: int) -> None:
        """A stream with this many chunks ended. The next `written` does not have it."""
        self._of_ended += chunks

    def written(self, chunks: Mapping[str, int]) -> None:
        """How many chunks of the streams in flight are written, by batch. Those of the first call were
        written in the time of a previous batcher."""
        in_flight = sum(chunks.values())
        if self._in_flight is None:
            self._of_ended -= in_flight
        self._in_flight = in_flight

    def total(self) -> int:
        """All of them. It never falls: a stream that was just committed is in neither sum, and one that was
        lost never will be."""
        self._shown = max(self._shown, self._of_ended + (self._in_flight or 0))
        return self._shown
