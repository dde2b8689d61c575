"""How long to pause before something that failed is tried again."""

from __future__ import annotations

import random
from typing import Final


def with_jitter(pause_s: float) -> float:
    """From half of a pause up to all of it, at random."""
    return random.uniform(0.5, 1.0) * pause_s  # noqa: S311 (not for cryptography)


class Backoff:
    """How long to pause after errors: it doubles with each error in a row, from 50 ms to 2 s.

    So an unreachable Redis causes neither a flood of connections nor of log lines. Each pause is shortened at
    random, by up to a half: else all that lost Redis together would come back together.
    """

    _PAUSE_MIN_S: Final = 0.05
    _PAUSE_MAX_S: Final = 2.0

    def __init__(self) -> None:
        self._pause_s = 0.0

    def next_s(self) -> float:
        """The pause after one more error."""
        self._pause_s = min(max(2 * self._pause_s, self._PAUSE_MIN_S), self._PAUSE_MAX_S)
        return with_jitter(self._pause_s)

    def reset(self) -> None:
        """There was no error."""
        self._pause_s = 0.0
