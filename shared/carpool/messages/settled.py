"""What batchers are told in the stream `settled`: by workers, by `carpool config` and by `carpool where`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from carpool.messages.requests import Producer


class Streamed(NamedTuple):
    """What was streamed of a request that ended: how many chunks, counted before any were merged; the time
    from its arrival to the first one; and from that to the last one, None if it expired or was withdrawn."""

    chunks: int
    first_us: int
    first_to_last_us: int | None = None

    @property
    def gap_us(self) -> int | None:
        """The mean time between two chunks, if that is known, and there were two."""
        if self.first_to_last_us is None or self.chunks < 2:
            return None
        return self.first_to_last_us // (self.chunks - 1)


class Failures(NamedTuple):
    """How many requests of a batch have an error as their result, by status; and what the model raised last,
    such as `KeyError at model.py:14`, which tells nothing of a request."""

    statuses: Mapping[str, int] = {}
    error: str = ""


class ExecutedOf(NamedTuple):
    """How many of a producer's requests in a batch the model executed: not those that `validate` refused,
    that could not be decoded, or on which the model raised."""

    producer: Producer
    requests: int
    executed: int


class Executed(NamedTuple):
    """How a batch was executed: see `BatchSettled`. `requests`: how many the model executed together.

    `input_us`: time to decode the bodies. `output_us`: time from the model's last outcome to the commit.
    `counted_us`: what of `compute_us` the model's statistics have already, with results answered ahead.
    `cost`: of the requests that were executed, as the model tells it; 0 if it tells none.
    """

    compute_us: int = 0
    requests: int = 0
    waited_us: int = 0
    overhead_us: int = 0
    failures: Failures = Failures()
    of_producers: Sequence[ExecutedOf] = ()
    input_us: int = 0
    output_us: int = 0
    counted_us: int = 0
    cost: int = 0


NOT_EXECUTED: Final = Executed()


class BatchSettled(NamedTuple):
    """A batch was committed at `settled_us`, by Redis's clock. `compute_us` is 0 if none of its requests was
    executed.

    `executed`: how many of its requests the model executed together in that time; 0 if its execution was not
    a normal one: none was valid, or the model raised, or they were executed one at a time.
    `waited_us`: how long it waited until a model process could take it.
    `streamed`: only of a streamed request, which is alone in its batch.
    `broken`: the IDs of sequences whose request in the batch did not succeed.
    `overhead_us`: for which it occupied its process beside `compute_us`; 0 if that was not measured.
    `failures`: what failed; None if nothing did.
    `of_producers`: those of whose requests in the batch not all were executed.
    `cost`: of those that were, as the model tells it; 0 if it tells none.
    """

    batch_id: str
    worker: str
    size: int
    compute_us: int
    settled_us: int
    executed: int
    waited_us: int = 0
    streamed: Streamed | None = None
    broken: Sequence[str] = ()
    overhead_us: int = 0
    failures: Failures | None = None
    of_producers: Sequence[ExecutedOf] = ()
    cost: int = 0

    @property
    def occupied_us(self) -> int:
        """For how long the batch occupied its model process; 0 if its execution was not a normal one."""
        return self.compute_us + self.overhead_us


class ModelProcessesChanged(NamedTuple):
    """A model process joined or left."""

    worker: str


class WhereAsked(NamedTuple):
    """Somebody asks where the requests with this correlation ID are. `answer`: the name of the answer."""

    correlation_id: str
    answer: str


SettledEvent = BatchSettled | ModelProcessesChanged | WhereAsked  # an entry of the stream `settled`
