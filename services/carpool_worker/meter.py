"""The metrics of a worker, labelled with the one model that it serves."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from carpool.errors import (
    ABORTED,
    CANCELLED,
    DEADLINE_EXCEEDED,
    INTERNAL,
    INVALID_ARGUMENT,
    NOT_FOUND,
    OK,
    PERMISSION_DENIED,
    RESOURCE_EXHAUSTED,
    UNAVAILABLE,
    UNIMPLEMENTED,
)
from carpool.prometheus import Counter, Gauge, Info
from carpool.service_metrics import DURATIONS_US, BucketCounts, CommonMetrics, Histogram, counter_value
from carpool.store.dead_letters import DEAD_LETTER_LIMITS
from carpool.store.steps import StepWrite
from carpool.tracing import Record
from carpool_worker.execution import Execution, ResultCounts
from carpool_worker.own_metrics import OwnMetrics
from carpool_worker.spans import WorkerSpans

# The reason label by status. Exported from zero: Prometheus's rate() misses the first value of a new series.
_REASONS: Final = {
    OK: "",
    DEADLINE_EXCEEDED: "at_worker",
    INVALID_ARGUMENT: "input",
    ABORTED: "dead_letter",
    INTERNAL: "model",
}
REPLACED_REASONS: Final = ("requests", "memory")
_RECENT_S: Final = 60.0
_RECENT_DEATHS_MAX: Final = 1000  # that are counted
# Statuses that only a model returns. All others that it makes up are counted together as "other".
_MODEL_STATUSES: Final = frozenset(
    (RESOURCE_EXHAUSTED, CANCELLED, PERMISSION_DENIED, UNAVAILABLE, UNIMPLEMENTED, NOT_FOUND)
)


class StepCounts(NamedTuple):
    """What a stepping model did since its worker started."""

    steps: int
    step_us: int  # of all steps together
    chunks: int


class MemoryGauges(NamedTuple):
    """These tell each scrape how much memory a model process takes (bytes); 0 if there is none, or what is
    unknown."""

    resident: Callable[[], int]
    on_gpus: Callable[[], int]


class WorkerMetrics(CommonMetrics):
    """The metric families of a worker process.

    Measured cost: 5 µs for a committed batch, and 0.3 µs for each run in it.
    """

    def __init__(self, model: str) -> None:
        super().__init__()
        self._model = model
        self._version = Info(
            "carpool_model",
            "Version that the model declares, empty if it declares none",
            ("model",),
            registry=self.registry,
        ).labels(model)
        self.set_version("")
        self._request = self._histogram(
            "carpool_request_seconds", "Time from a request's arrival to the commit of its result"
        )
        self._input = self._histogram(
            "carpool_compute_input_seconds", "Time to decode a batch's bodies for the model"
        )
        self._decode_wait = self._histogram(
            "carpool_decode_wait_seconds",
            "Time that a model process waits until a batch is decoded, of a model with `decode`",
        )
        self._infer = self._histogram(
            "carpool_compute_infer_seconds", "Time that the model takes for a batch"
        )
        self._output = self._histogram(
            "carpool_compute_output_seconds", "Time to encode a batch's results and commit them"
        )
        self._lateness = self.lease_lateness.of(model)
        self._answered = {
            status: self.answered.labels(model, status, reason) for status, reason in _REASONS.items()
        }
        self._executions = self._counter(
            "carpool_executions",
            "Executions by the model: usually one for a batch, more if it is executed in parts",
        )
        self._cost = self._counter(
            "carpool_model_cost", "Cost of the requests that the model executed, as it tells it"
        )
        self._redelivered = self._counter("carpool_redeliveries", "Batches reclaimed from another worker")
        self._fenced = self._counter(
            "carpool_fenced_commits",
            "Commits that were refused because another worker had reclaimed the batch",
        )
        self._dead = self._counter("carpool_dead_letters", "Requests given up and kept as dead letters")
        dropped = Counter(
            "carpool_dead_letters_dropped",
            "Dead letters that were dropped, by the setting that they were over",
            ("model", "setting"),
            registry=self.registry,
        )
        self._dropped = {name: dropped.labels(model, name) for name in DEAD_LETTER_LIMITS}
        self._states = self._counter(
            "carpool_state_bytes", "Bytes of states of sequences that were written with results"
        )
        self._deaths = self._counter(
            "carpool_model_process_deaths", "Model processes that died or were retired"
        )
        self._died_s: deque[float] = deque(maxlen=_RECENT_DEATHS_MAX)
        self._steps = self._counter("carpool_steps", "Steps that a stepping model took")
        self._step = self._histogram("carpool_step_seconds", "Time that a step takes")
        self._chunks = self._counter("carpool_chunks", "Values that a stepping model emitted for streams")
        self._first = self._histogram(
            "carpool_first_chunk_seconds", "Time from a streamed request's arrival to its first chunk"
        )
        self._gap = self._histogram("carpool_chunk_gap_seconds", "Time between two chunks of a request")
        self._slots = self._gauge("carpool_slots_in_use", "Slots in use, of a stepping or bound model")
        self._slots_in_all = self._gauge("carpool_slots", "Slots of a stepping or bound model; 0 of others")
        self._replaced = Counter(
            "carpool_model_processes_replaced",
            "Model processes that worked, and were replaced, by the limit that they had reached",
            ("model", "reason"),
            registry=self.registry,
        )
        for reason in REPLACED_REASONS:
            self._replaced.labels(model, reason)
        self._memory = self._gauge_of_replicas(
            "carpool_model_process_memory_bytes", "Resident memory of a model process and its children"
        )
        self._gpu_memory = self._gauge_of_replicas(
            "carpool_model_process_gpu_memory_bytes",
            "Memory of GPUs that a model process takes; 0 where the driver does not tell",
        )
        self.spans: WorkerSpans | None = None  # if spans are exported
        self.own = OwnMetrics(model)
        self.registry.register(self.own)
        self.in_hand = self._gauge(
            "carpool_batches_in_hand", "Batches that this worker has fetched and not committed"
        )

    def make_spans(self, record: Record) -> None:
        """From now on requests have spans, if their traces are recorded."""
        self.spans = WorkerSpans(
            self._model,
            record,
            self._request.exemplify,
            self._infer.exemplify,
            partial(self.spans_dropped, "queue_full"),
        )

    def set_version(self, version: str) -> None:
        """The model declares this version."""
        self._version.info({"version": version})

    def _histogram(self, name: str, documentation: str) -> BucketCounts:
        return Histogram(name, documentation, DURATIONS_US, 1e-6, self.registry).of(self._model)

    def _counter(self, name: str, documentation: str) -> Counter:
        counter: Counter = Counter(name, documentation, ("model",), registry=self.registry).labels(
            self._model
        )
        return counter

    def _gauge_of_replicas(self, name: str, documentation: str) -> Gauge:
        return Gauge(name, documentation, ("model", "replica"), registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        gauge: Gauge = Gauge(name, documentation, ("model",), registry=self.registry).labels(self._model)
        return gauge

    def committed(self, execution: Execution, counts: ResultCounts, output_us: int, now_us: int) -> None:
        """A batch was committed; encoding and committing its results took `output_us`."""
        self.ended(execution, counts, now_us)
        self._output.observe_equal(output_us, 1)
        self._executions.inc(execution.frames_executed)
        if execution.decode_us:
            self._decode_wait.observe_equal(execution.decode_waited_us, 1)
        if execution.cost:
            self._cost.inc(execution.cost)

    def ended(self, execution: Execution, counts: ResultCounts, now_us: int) -> None:
        """The requests of a batch have their results: what is counted of a stepping model too."""
        for status, count in counts.statuses.items():
            self._counter_of(status).inc(count)
        alone_us = [max(0, now_us - run.arrival_us) for run, number in counts.by_run if number == 1]
        self._request.observe(alone_us)
        for run, number in counts.by_run:
            if number > 1:
                self._request.observe_equal(max(0, now_us - run.arrival_us), number)
        self._input.observe_equal(execution.input_us, 1)
        self._infer.observe_equal(execution.compute_us, 1)
        if execution.states:
            self._states.inc(execution.written_state_bytes)
        if execution.dead_letters:
            self._dead.inc(len(execution.dead_letters))

    def dead_letters_dropped(self, dropped: Mapping[str, int]) -> None:
        """Dead letters were dropped: how many, by the setting that they were over."""
        for name, number in dropped.items():
            self._dropped[name].inc(number)

    def _counter_of(self, status: str) -> Counter:
        """How many results of this status there were."""
        counter = self._answered.get(status)
        if counter is None:
            label = status if status in _MODEL_STATUSES else "other"
            counter = self.answered.labels(self._model, label, "model")
        return counter

    def stepped(self, step_us: int) -> None:
        """A stepping model took a step."""
        self._steps.inc()
        self._step.observe_equal(step_us, 1)

    def step_counts(self) -> StepCounts:
        """What was counted of steps. Takes microseconds."""
        return StepCounts(counter_value(self._steps), self._step.sum, counter_value(self._chunks))

    def watch_slots(self, in_use: Callable[[], int], in_all: Callable[[], int]) -> None:
        """These tell each scrape how many slots are in use, and how many there are."""
        self._slots.set_function(in_use)
        self._slots_in_all.set_function(in_all)

    def chunks_written(self, written: Iterable[tuple[StepWrite, int | None]], now_us: int) -> None:
        """What there was of requests was written, in one script. With each write comes when the chunk before
        it was written (us), if there was one."""
        chunks, first_us, gaps_us = 0, [], []
        for write, before_us in written:
            if not write.chunks:
                continue
            for chunk, _ in write.chunks:
                chunks += chunk.merged
            if write.first_us is not None:
                first_us.append(write.first_us)
            elif before_us is not None:
                gaps_us.append(max(0, now_us - before_us))
        if chunks:
            self._chunks.inc(chunks)
            self._first.observe(first_us)
            self._gap.observe(gaps_us)

    def redelivered(self) -> None:
        """A batch was reclaimed from another worker."""
        self._redelivered.inc()

    def fenced(self) -> None:
        """A commit was refused: another worker had reclaimed the batch."""
        self._fenced.inc()

    def process_died(self) -> None:
        """A model process died, or was retired."""
        self._deaths.inc()
        self._died_s.append(time.monotonic())

    @property
    def recent_deaths(self) -> int:
        """How many did in the last minute."""
        since_s = time.monotonic() - _RECENT_S
        return sum(died_s > since_s for died_s in list(self._died_s))  # a copy: other threads append

    def process_replaced(self, reason: str) -> None:
        """A model process that worked was replaced."""
        self._replaced.labels(self._model, reason).inc()

    def watch_memory(self, gauges: Sequence[MemoryGauges]) -> None:
        """Of the process of each replica, in their order."""
        for number, (resident, on_gpus) in enumerate(gauges):
            self._memory.labels(self._model, str(number)).set_function(resident)
            self._gpu_memory.labels(self._model, str(number)).set_function(on_gpus)

    def beat(self, late_us: int) -> None:
        """The leases were renewed, `late_us` later than planned."""
        self._lateness.observe([max(0, late_us)])
