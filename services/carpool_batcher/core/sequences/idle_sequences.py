"""The sequences that are idle: none of their requests is in a lane or in flight."""

from __future__ import annotations

from collections.abc import Iterator

from carpool_batcher.core.sequences.sequence import Sequence


class IdleSequences:
    """Since when each of them is idle, the oldest first, and whether requests of it wait. Those that are
    only remembered because they are broken are known apart."""

    def __init__(self) -> None:
        self._since: dict[Sequence, tuple[int, bool]] = {}
        self._broken: dict[Sequence, None] = {}

    def add(self, sequence: Sequence, now_us: int, *, waits: bool, has_state: bool) -> None:
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

    def discard(self, sequence: Sequence) -> None:
        """A sequence is not idle, or it is forgotten."""
        self._since.pop(sequence, None)
        self._broken.pop(sequence, None)

    def oldest_us(self) -> int | None:
        """Since when the first one is idle; None if there is none."""
        return next(iter(self._since.values()))[0] if self._since else None

    def pop_until(self, until_us: int) -> Iterator[tuple[Sequence, bool]]:
        """Remove and return those that are idle since then or longer, and whether requests of them wait."""
        while self._since:
            sequence, (since_us, waits) = next(iter(self._since.items()))
            if since_us > until_us:
                break
            self.discard(sequence)
            yield sequence, waits

    def pop_broken(self, limit: int) -> Iterator[Sequence]:
        """Remove and return the oldest broken ones, so that at most `limit` of these are left."""
        while len(self._broken) > limit:
            sequence = next(iter(self._broken))
            self.discard(sequence)
            yield sequence
