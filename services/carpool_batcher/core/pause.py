"""What the core knows of a pause: rule 12 at the top of `core.scheduler`.

Why: docs/decisions/0114.
"""

from __future__ import annotations

from typing import NamedTuple

from carpool.messages.requests import Run


class Pause(NamedTuple):
    """An operator has paused the model. `reason`: for producers, may be empty. `refuses_from_us`: what
    arrives from this time on is refused; None: it waits, too."""

    reason: str = ""
    refuses_from_us: int | None = None

    def refuses(self, run: Run) -> bool:
        """Whether a run is refused that was read. What arrived before waits, whichever batcher reads it. So
        does what continues a sequence: its state would be lost."""
        if self.refuses_from_us is None or (run.sequence is not None and not run.sequence.starts):
            return False
        return run.arrival_us - run.not_before_ms * 1000 >= self.refuses_from_us

    @property
    def detail(self) -> str:
        """What a producer is told."""
        return f"its model is paused by an operator{f': {self.reason}' if self.reason else ''}"
