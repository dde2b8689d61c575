"""An execution: one batch that a worker has fetched or reclaimed, until it is committed or lost.

Its requests are addressed by their positions in the batch. Every position that had no result when
this worker took the batch gets one here; then the execution can be committed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from carpool.errors import ABORTED, INTERNAL
from carpool.messages import Batch, DeadLetter, Result
from carpool_worker.model_process.frames import FrameHeader

DEATHS_MAX: Final = 2  # a request is dead-lettered after this many processes died while executing it


class Frame(NamedTuple):
    """Requests of an execution that are sent to the model process together.

    Normally the whole batch. Where declared tensors vary in shape, one frame for each shape; in a suspect
    execution (one of its requests may have killed a process), one for each request.
    """

    positions: list[int]
    header: FrameHeader
    payload: bytes


class FrameBuilder(Protocol):
    """What decodes requests into frames: the codec."""

    def build_frames(self, execution: Execution, positions: Sequence[int], now_us: int) -> list[Frame]:
        """Frames of the requests at these positions; those that cannot be executed get a result instead."""


@dataclass(slots=True, eq=False)
class Execution:
    """A batch, its frames that are not executed yet, and the results so far."""

    batch: Batch
    answered: frozenset[int] = frozenset()  # positions that had a result before this worker took the batch
    deaths: dict[int, int] = field(default_factory=dict)  # processes that died while executing this position
    frames: list[Frame] = field(default_factory=list)
    sent: bool = False  # every frame is in the model process's pipe, or being written to it
    results: dict[int, Result] = field(default_factory=dict)
    answered_ahead: set[int] = field(
        default_factory=set
    )  # positions whose result is written, before the commit
    dead_letters: list[DeadLetter] = field(default_factory=list)
    input_us: int = 0  # time spent decoding
    compute_us: int = 0  # time spent in the model, over all frames
    frames_executed: int = 0

    @property
    def is_suspect(self) -> bool:
        """Whether the batch was reclaimed, or a model process died while executing it.

        One of its requests may be the cause, so from then on they are executed one at a time.
        """
        return self.batch.epoch > 1 or bool(self.deaths)

    @property
    def unanswered(self) -> Sequence[int]:
        """The positions that need a result from this execution."""
        positions = range(len(self.batch.requests))
        if not self.answered:
            return positions
        return [position for position in positions if position not in self.answered]

    def split(self, frame: Frame, builder: FrameBuilder, now_us: int) -> None:
        """The model process died on this frame: replace it by a frame for each of its requests."""
        for position in frame.positions:
            self.deaths[position] = self.deaths.get(position, 0) + 1
        others = [other for other in self.frames if other is not frame]
        self.frames = builder.build_frames(self, frame.positions, now_us) + others

    def dead_letter(self, position: int) -> None:
        """Give up a request: keep it as a dead letter, and answer its producer ABORTED."""
        deaths = self.deaths.get(position, 0)
        reason = f"its model process or worker died {deaths} times while executing it"
        self.dead_letters.append(DeadLetter(self.batch.requests[position], reason, deaths))
        self.fail(position, ABORTED, f"given up, and kept as a dead letter: {reason}")

    def fail_frame(self, frame: Frame, detail: str) -> None:
        """Fail every request of a frame whose outcome cannot be used."""
        for position in frame.positions:
            self.fail(position, INTERNAL, detail)

    def fail(self, position: int, status: str, detail: str) -> None:
        """Give a request an error result."""
        request = self.batch.requests[position]
        self.results[position] = Result(
            request.correlation_id,
            status,
            request.content_type,
            detail=detail,
            batch_size=len(self.batch.requests),
            queue_us=max(0, self.batch.dispatched_us - request.arrival_us),
            compute_us=self.compute_us,
        )
