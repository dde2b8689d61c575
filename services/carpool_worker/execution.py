"""An execution: one batch that a worker has fetched or reclaimed, until it is committed or lost.

Its requests are addressed by their positions in the batch. Every position that had no result when
this worker took the batch gets one here; then the execution can be committed. Results of requests of one run
that all succeeded are kept together; whatever concerns a single one of them separates these first.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from carpool.errors import ABORTED, DEADLINE_EXCEEDED, INTERNAL, OK
from carpool.messages.batches import Batch, BatchedRun
from carpool.messages.requests import Producer
from carpool.messages.results import GIVEN_UP, DeadLetter, Result, RunResults
from carpool.messages.sequences import SequenceChange
from carpool.messages.settled import ExecutedOf
from carpool.parts import Buffer
from carpool.rows import Rows
from carpool.tracing import Context, Event
from carpool.wire.content_types import answer_type
from carpool.wire.field_hints import warnings_of
from carpool_worker.model_process.frames import DEATHS_MAX, FrameHeader, RequestFields

EXPIRED: Final = "expired: its deadline passed before a worker had decoded it"
EXAMPLE_SEQUENCE: Final = "(example)"  # no sequence of a producer: names of these have no brackets
PRODUCERS_TOLD_MAX: Final = 16  # of a batch: those with the most requests that were not executed


class Frame(NamedTuple):
    """Requests of an execution that are sent to the model process together.

    Normally the whole batch. Where declared tensors vary in shape, one frame for each shape; in a suspect
    execution (one of its requests may have killed a process or a worker), one for each request, built when it
    is its turn. `positions` ascend. The payload is in parts, so that large bodies are not copied.
    `is_apart`: the model is expected to raise on it (`codec`).
    """

    positions: Sequence[int]
    header: FrameHeader
    payload: Sequence[Buffer]
    is_apart: bool = False


class Example(NamedTuple):
    """A request that succeeded, to be executed again when it is in doubt whether a model process works.

    Its frame has it alone. Of a model of sequences, it starts and ends one of its own, `EXAMPLE_SEQUENCE`.
    """

    header: FrameHeader
    payload: bytes
    request: RequestFields
    cost: int
    max_execution_ms: int | None


class ResultCounts(NamedTuple):
    """How many results an execution has: of each status, and of runs. A run may occur more than once."""

    statuses: Mapping[str, int]
    by_run: Sequence[tuple[BatchedRun, int]]


class TracedRun(NamedTuple):
    """A run whose trace is recorded: its number in the batch, the span of its producer, and its own span."""

    number: int
    parent: Context
    context: Context


@dataclass(slots=True, eq=False)
class BatchTrace:
    """The spans of a batch in hand, of which requests have traces that are recorded (`spans`).

    `batch`: its own span, whose `parent` is None if it begins a trace. `taken_us`: when it was taken, by
    Redis's clock. `events`: of a stream, and how many chunks it had.
    """

    runs: Sequence[TracedRun]
    batch: Context
    parent: Context | None
    taken_us: int
    events: list[Event] = field(default_factory=list)
    chunks: int = 0


@dataclass(slots=True, eq=False)
class Execution:
    """A batch, its frames that are not executed yet, and the results so far."""

    batch: Batch
    answered_before: frozenset[int] = frozenset()  # positions that had a result when this worker took it
    deaths: dict[int, int] = field(default_factory=dict)  # processes that died while executing this position
    start_counts: dict[int, int] = field(default_factory=dict)  # of each position, as in Redis
    undecoded: deque[int] = field(default_factory=deque)  # of a suspect: positions that have no frame yet
    cause_of_death: str = ""  # of the last process
    frames: list[Frame] = field(default_factory=list)
    frames_sent: int = 0  # how many of these, from the first, were sent to the model process
    results: dict[int, Result] = field(default_factory=dict)  # single results, by position
    run_results: list[RunResults] = field(default_factory=list)  # the results of other positions
    answered_ahead: set[int] = field(
        default_factory=set
    )  # positions whose result is written, before the commit
    dead_letters: list[DeadLetter] = field(default_factory=list)
    given_up: set[int] = field(default_factory=set)  # the positions of their requests
    ready_us: int = 0  # when it was decoded, by Redis's clock
    waited_us: int = 0  # time in which it waited for the model process, undecoded or decoded
    input_us: int = 0  # time spent decoding
    decode_us: int = 0  # how long the model process took to decode, after the frame had come (`decoding`)
    decode_waited_us: int = 0  # for how much of that the model waited
    compute_us: int = 0  # time spent in the model, over all frames
    counted_us: int = 0  # what of it was counted with results that were answered ahead
    executed_ns: int = 0  # when the last outcome came, by the monotonic clock; 0: none did
    overhead_us: int = 0  # for which these frames occupied the process beside that
    frames_executed: int = 0  # or parts of them, by cost or by shape
    cost: int = 0  # of all requests that were executed, as the model tells it
    executed: int = 0  # requests that the model executed, in frames whose execution was a normal one
    is_normal: bool = True  # whether that is so for all frames but those that are apart
    unexecuted: list[int] = field(default_factory=list)  # positions, as `ExecutedOf` counts them
    version: str = ""  # of the model, set when it is decoded
    error: str = ""  # what failed last: the name of what the model raised, or what is wrong with a result
    chunks: Sequence[bytes] = ()  # of a streamed request: those that its last worker wrote
    first_us: int | None = None  # the time from its arrival to the first of these
    # The states of the sequences, by position: those that were loaded, and after the execution the new ones.
    states: dict[int, bytes] = field(default_factory=dict)
    sizes: dict[int, dict[str, list[int]]] = field(default_factory=dict)  # true ones of padded inputs
    trace: BatchTrace | None = None  # if one of its requests has a trace that is recorded

    @property
    def logged_trace(self) -> dict[str, str]:
        """What a line of the log about it shows of its trace; nothing if it has none."""
        return {} if self.trace is None else self.trace.batch.logged

    @property
    def is_suspect(self) -> bool:
        """Whether the batch was reclaimed, or a model process died while executing it.

        One of its requests may be the cause, so from then on they are decoded and executed one at a time.
        """
        return self.batch.epoch > 1 or bool(self.deaths) or self.batch.redelivered > 0

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to be executed."""
        return not (self.frames or self.undecoded)

    def is_given_up(self, position: int) -> bool:
        """Whether this request is not tried again, because it ended DEATHS_MAX processes."""
        return self.deaths.get(position, 0) >= DEATHS_MAX

    def start_at(self, now_us: int) -> None:
        """The model process is free for this batch now, by Redis's clock."""
        self.waited_us += max(0, now_us - self.ready_us)

    @property
    def output_us(self) -> int:
        """The time since the last outcome came; 0 if none did."""
        return (time.monotonic_ns() - self.executed_ns) // 1000 if self.executed_ns else 0

    @property
    def executed_together(self) -> int:
        """How many requests one normal execution by the model served in `compute_us`; 0 if the execution of
        this batch was not a normal one."""
        return self.executed if self.is_normal and not self.is_suspect else 0

    def executed_by_producer(self) -> list[ExecutedOf]:
        """The producers of whose requests not all were executed."""
        if not self.unexecuted:
            return []
        unexecuted = Counter([self.locate(position)[0].producer for position in self.unexecuted])
        requests: Counter[Producer] = Counter()
        for run in self.batch.runs:
            requests[run.producer] += len(run.correlation_ids)
        return [
            ExecutedOf(producer, requests[producer], requests[producer] - number)
            for producer, number in unexecuted.most_common(PRODUCERS_TOLD_MAX)
        ]

    @property
    def unanswered(self) -> Sequence[int]:
        """The positions that need a result from this execution."""
        positions = range(self.batch.size)
        if not self.answered_before:
            return positions
        return [position for position in positions if position not in self.answered_before]

    def locate(self, position: int) -> tuple[BatchedRun, int]:
        """The run of the request at this position, and the request's index in it. O(log runs)."""
        first_positions = self.batch.first_positions
        number = bisect_right(first_positions, position) - 1
        return self.batch.runs[number], position - first_positions[number]

    def split(self, frame: Frame, cause: str = "") -> None:
        """The model process died on this frame: each of its requests is to be decoded again, by itself."""
        self.cause_of_death = cause
        for position in frame.positions:
            self.deaths[position] = self.deaths.get(position, 0) + 1
        self.frames = [other for other in self.frames if other is not frame]
        self.undecoded.extendleft(reversed(frame.positions))

    def change(self, position: int) -> SequenceChange | None:
        """What the result of this request does to its sequence; None if it is not a part of one."""
        run, _ = self.locate(position)
        part = run.sequence
        if part is None:
            return None
        (correlation_id,) = run.correlation_ids
        result = self.results.get(position)
        if result is not None and result.status != OK:
            return SequenceChange(part, correlation_id, "broken", _why_broken(correlation_id, result.status))
        if part.ends:
            return SequenceChange(part, correlation_id, "ended")
        return SequenceChange(part, correlation_id, "kept", self.states[position])

    def changes(self) -> list[SequenceChange]:
        """What the results that are to be committed do to sequences."""
        if not any(run.sequence is not None for run in self.batch.runs):
            return []
        positions = [position for position in self.results if position not in self.answered_ahead]
        for group in self.run_results:
            positions += group.positions
        changes = [self.change(position) for position in positions]
        return [change for change in changes if change is not None]

    # --- results -------------------------------------------------------------------------------------------

    @property
    def not_answered(self) -> set[int]:
        """Positions whose single results may be written ahead of the commit. Those that were given up are not
        among them: should this worker die before the commit, another one must write their dead letters."""
        return self.results.keys() - self.answered_ahead - self.given_up

    def dead_letter(self, position: int, reason: str = "") -> None:
        """Give up a request: keep it as a dead letter, and answer its producer ABORTED. `reason`: if no model
        process or worker died of it."""
        deaths = self.deaths.get(position, DEATHS_MAX if reason else 0)
        if not reason:
            reason = f"its model process or worker died {deaths} times while executing it"
            if self.cause_of_death:
                reason += f"; the last time: {self.cause_of_death}"
        self.dead_letters.append(DeadLetter(self.batch.requests[position], reason, deaths))
        self.given_up.add(position)
        self.fail(position, ABORTED, f"{GIVEN_UP}: {reason}")

    def fail_frame(self, frame: Frame, detail: str) -> None:
        """Fail every request of a frame whose outcome cannot be used."""
        for position in frame.positions:
            self.fail(position, INTERNAL, detail)

    def fail(self, position: int, status: str, detail: str) -> None:
        """Give a request an error result."""
        run, index = self.locate(position)
        self.results[position] = Result(
            run.correlation_ids[index],
            status,
            answer_type(run.content_type, run.extra),
            None,
            detail,
            self.batch.size,
            self.queue_us(run),
            self.compute_us,
            warnings=warnings_of(run.extra, run.content_type),
            version=self.version,
        )

    def expire(self, position: int) -> None:
        """Answer a request whose deadline passed before it was executed: it was served in no batch."""
        self.fail(position, DEADLINE_EXCEEDED, EXPIRED)
        self.results[position] = self.results[position]._replace(batch_size=0)

    def succeed(
        self,
        run: BatchedRun,
        start: int,
        positions: Sequence[int],
        bodies: Rows | list[bytes],
        content_type: str = "",
    ) -> None:
        """Give requests of this run, whose first position is `start`, their results. `content_type`: if it is
        not the run's."""
        ids, tickets = run.correlation_ids, run.tickets
        if len(positions) < len(ids):
            indexes = [position - start for position in positions]
            ids = [ids[at] for at in indexes]
            tickets = None if tickets is None else tickets.select(indexes)
        served = (self.batch.size, self.queue_us(run), self.compute_us)
        warnings = warnings_of(run.extra, run.content_type)
        self.run_results.append(
            RunResults(run, positions, ids, bodies, tickets, *served, warnings, content_type, self.version)
        )

    def queue_us(self, run: BatchedRun) -> int:
        """How long the requests of this run waited until a model process could take them."""
        return max(0, self.batch.dispatched_us - run.arrival_us) + self.waited_us

    @property
    def result_bytes(self) -> int:
        """The bytes of all results and new states together, without the common heads of rows."""
        size_bytes = sum(map(len, self.states.values()))
        size_bytes += sum([len(result.body or b"") for result in self.results.values()])
        for group in self.run_results:
            bodies = group.bodies
            size_bytes += len(bodies.data) if isinstance(bodies, Rows) else sum(map(len, bodies))
        return size_bytes

    def separate(self, positions: frozenset[int] | None = None) -> None:
        """Replace results of runs by single ones: those that have any of these positions, or all."""
        whole: list[RunResults] = []
        for group in self.run_results:
            if positions is None or not positions.isdisjoint(group.positions):
                self.results.update(zip(group.positions, group.results(), strict=True))
            else:
                whole.append(group)
        self.run_results = whole

    @property
    def written_state_bytes(self) -> int:
        """The bytes of all states that are kept, of an execution that is committed."""
        changes = [self.change(position) for position in self.states]
        return sum([len(change.content) for change in changes if change and change.outcome == "kept"])

    def drop(self, positions: Iterable[int]) -> None:
        """Forget the results of these positions, which were answered elsewhere meanwhile."""
        dropped = frozenset(positions)
        self.separate(dropped)
        for position in dropped:
            self.results.pop(position, None)
            self.states.pop(position, None)
            self.answered_ahead.discard(position)

    def counts(self) -> ResultCounts:
        """Count the results."""
        statuses: dict[str, int] = {}
        by_run = [(group.run, len(group.positions)) for group in self.run_results]
        if by_run:
            statuses[OK] = sum([number for _, number in by_run])
        if self.results:
            for result in self.results.values():
                statuses[result.status] = statuses.get(result.status, 0) + 1
            by_number = Counter(
                [bisect_right(self.batch.first_positions, position) - 1 for position in self.results]
            )
            by_run += [(self.batch.runs[at], number) for at, number in by_number.items()]
        return ResultCounts(statuses, by_run)

    def failed(self) -> dict[str, int]:
        """How many results are errors, by status."""
        if not self.results:
            return {}
        return dict(Counter([result.status for result in self.results.values() if result.status != OK]))


def _why_broken(correlation_id: str, status: str) -> str:
    return f"its request {correlation_id} ended with {status}"
