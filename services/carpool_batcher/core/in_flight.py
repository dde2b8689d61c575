"""What becomes of batches that were decided on: dispatched or not, and in flight settled or lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from carpool.messages.batches import Dispatch
from carpool.messages.requests import Run
from carpool.messages.results import Refusal
from carpool.messages.settled import BatchSettled
from carpool.model_settings import ModelKind
from carpool_batcher.core.applied_settings import AppliedSettings
from carpool_batcher.core.capacity import Capacity
from carpool_batcher.core.deadlines import Deadlines
from carpool_batcher.core.decisions import Cancel, copy_refusal
from carpool_batcher.core.in_flight_batch import InFlightBatch
from carpool_batcher.core.learned.doubtful_producers import executable_size
from carpool_batcher.core.learned.learned import Learned
from carpool_batcher.core.sequences.processes import Processes
from carpool_batcher.core.sequences.sequences import Sequences
from carpool_batcher.core.waiting.copies_index import IdsInFlight, Separated
from carpool_batcher.core.waiting.queue import Queue


class BatchesInFlight:
    """The batches in flight of one model. Report to it what happens to them.

    `batches`: by ID, in the order in which they were dispatched. `ids`: their requests, except of sequences,
    which know their copies themselves.
    """

    def __init__(
        self,
        applied: AppliedSettings,
        queue: Queue,
        deadlines: Deadlines,
        capacity: Capacity,
        learned: Learned,
        sequences: Sequences,
        processes: Processes,
    ) -> None:
        self.batches: Mapping[str, InFlightBatch] = capacity.in_flight
        self.ids = IdsInFlight()
        self._applied = applied
        self._queue = queue
        self._deadlines = deadlines
        self._capacity = capacity
        self._learned = learned
        self._sequences = sequences
        self._processes = processes
        self._cancellable = RequestsInFlight()

    def launch(self, batch_id: str, dispatch: Dispatch, now_us: int) -> None:
        """A Dispatch was carried out, with these of its runs. Their bodies are released: they are in Redis,
        in the batch. To be called by DecidedDispatches, except where no request is sent twice."""
        if self._queue.bodies.are_popped:
            self._queue.bodies.launch(batch_id, dispatch.runs)
        batch = self._take(dispatch, now_us)
        self._capacity.launch(batch_id, batch)
        self._watch(batch_id, batch, dispatch.runs)

    def unreserve(self, process: str = "", version: str = "") -> None:
        """The oldest Dispatch of which nothing was reported, to this process and version, was not carried
        out. To be called as `launch` is."""
        self._capacity.unreserve(version)
        self._leave_process(process)

    def adopt(self, batch_id: str, dispatch: Dispatch, dispatched_us: int) -> None:
        """A batch is in flight that a previous batcher dispatched."""
        self._queue.bodies.launch(batch_id, dispatch.runs)
        batch = self._take(dispatch, dispatched_us)
        self._capacity.adopt_earlier(batch_id, batch)
        self._watch(batch_id, batch, dispatch.runs)
        for run in dispatch.runs:
            if run.sequence is not None and self._applied.has_sequences:  # not one of the model before
                self._sequences.adopt(run, dispatch.process)
        if dispatch.process:
            self._processes.begin_batch(dispatch.process)

    def settle(self, event: BatchSettled) -> None:
        """A batch was committed. One that is not in flight is ignored."""
        for run in self._runs_of_sequences(event.batch_id):
            assert run.sequence is not None
            self._sequences.settle(run, is_broken=run.sequence.sequence_id in event.broken)
        batch = self._end(event.batch_id)
        if batch is not None:
            self._learned.observe(batch, event)
            self._capacity.end(event.batch_id, event.settled_us)

    def forget(self, batch_id: str, now_us: int) -> None:
        """A batch is no longer in Redis, and it is unknown how long it took."""
        for run in self._runs_of_sequences(batch_id):
            self._sequences.lose(run)
        if self._end(batch_id) is not None:
            self._capacity.end(batch_id, now_us)

    def answered(self, runs: Iterable[Run]) -> None:
        """These requests were answered while they are in flight, and not OK."""
        for run in runs:
            if run.sequence is not None:
                self._sequences.fail(run)
            else:
                self.ids.answered((run,))

    def find(self, correlation_id: str) -> Iterator[tuple[str, int]]:
        """The requests in flight with this correlation ID that were not answered: the batch of each, and its
        position there. O(addresses), and O(requests in flight) if nobody asked for one since they were
        dispatched, or if the model has sequences."""
        if not self._applied.has_sequences:
            yield from self.ids.find(correlation_id)
            return
        for batch_id, batch in self.batches.items():
            names = [name for run in batch.runs for name in run.correlation_ids]
            if correlation_id in names:
                yield batch_id, names.index(correlation_id)

    def withdraw(self, correlation_ids: Iterable[str]) -> list[Cancel]:
        """Of a model whose requests end also in flight: the answers to those of these that are."""
        cancelled = self._cancellable.cancel(correlation_ids)
        self.ids.answered(cancel.run for cancel in cancelled)
        return cancelled

    def _take(self, dispatch: Dispatch, dispatched_us: int) -> InFlightBatch:
        """What is kept of a batch in flight. Its bodies are released."""
        expiring: dict[int, Run] = {}
        arrivals: list[tuple[int, int]] = []
        size = 0
        for run in dispatch.runs:
            if run.deadline_us is not None and dispatch.deadline_us(run) is not None:
                expiring[size] = run
            count = len(run.correlation_ids)
            arrivals.append((run.arrival_us, count))
            size += count
            run.bodies = []
        kind = self._applied.kind
        is_kept = kind is not ModelKind.PLAIN or self._applied.cancels_in_flight or dispatch.is_asked
        runs: Sequence[Run] = dispatch.runs if is_kept else ()
        cost = 0
        if kind is ModelKind.STEPPING and self._applied.has_batch_cost:
            cost = sum([run.cost * len(run) for run in runs])
        batch = InFlightBatch(
            dispatched_us, size, dispatch.lane, expiring, arrivals, runs, cost, dispatch.process,
            reason=dispatch.reason,
        )  # fmt: skip
        if dispatch.version:
            batch = batch._replace(version=dispatch.version, is_asked=dispatch.is_asked)
        if not self._learned.producers:
            return batch
        return batch._replace(
            doubtful=size - executable_size(dispatch.runs),
            producers=self._learned.producers.remembered(dispatch.runs),
        )

    def _watch(self, batch_id: str, batch: InFlightBatch, runs: Sequence[Run]) -> None:
        self._deadlines.watch_batch(batch_id, batch.expiring)
        if not self._applied.has_sequences:
            self.ids.launch(batch_id, runs)
        if self._applied.cancels_in_flight:
            self._cancellable.add(batch_id, batch.runs)

    def _runs_of_sequences(self, batch_id: str) -> list[Run]:
        if not self._applied.has_sequences:
            return []
        batch = self.batches.get(batch_id)
        return [] if batch is None else [run for run in batch.runs if run.sequence is not None]

    def _end(self, batch_id: str) -> InFlightBatch | None:
        self.ids.end(batch_id)
        self._queue.bodies.end(batch_id)
        batch = self.batches.get(batch_id)
        if batch is not None:
            self._cancellable.remove(batch_id, batch.runs)
            self._leave_process(batch.process)
        return batch

    def _leave_process(self, process: str) -> None:
        if process:
            self._processes.end_batch(process)
            self._queue.look_again(process)


class RequestsInFlight:
    """The requests in flight that can be cancelled, by correlation ID."""

    def __init__(self) -> None:
        # By batch: the position of the request, its run, and its index in that.
        self._by_id: dict[str, dict[str, tuple[int, Run, int]]] = {}

    def add(self, batch_id: str, runs: Sequence[Run]) -> None:
        """A batch is in flight."""
        position = 0
        for run in runs:
            for index, name in enumerate(run.correlation_ids):
                self._by_id.setdefault(name, {})[batch_id] = (position, run, index)
                position += 1

    def remove(self, batch_id: str, runs: Iterable[Run]) -> None:
        """A batch is not in flight any more, or was never added."""
        for name in [name for run in runs for name in run.correlation_ids]:
            batches = self._by_id.get(name)
            if batches is not None:
                batches.pop(batch_id, None)
                if not batches:
                    del self._by_id[name]

    def cancel(self, correlation_ids: Iterable[str]) -> list[Cancel]:
        """The answers to those with these IDs. Each is cancelled once. O(IDs)."""
        return [
            Cancel(batch_id, position, run if len(run) == 1 else run.one(index))
            for name in correlation_ids
            for batch_id, (position, run, index) in self._by_id.pop(name, {}).items()
        ]


class DecidedDispatches:
    """What becomes of the Dispatches of one `poll`. Report each of `dispatches`, in this order, as `launched`
    or `gone`; then `finish`.

    `dispatches`: those to carry out. A request that is in two of them was taken out of the later one, and one
    of which nothing is left is not among them.
    """

    def __init__(
        self,
        decided: Separated,
        decided_us: int,
        in_flight: BatchesInFlight,
        queue: Queue,
        offer: Callable[[Run, int], list[Refusal]],
    ) -> None:
        self.dispatches, self._copies = decided
        self._decided_us = decided_us
        self._in_flight = in_flight
        self._queue = queue
        self._offer = offer
        self._launched: list[Run] = []
        if self._copies:
            for empty in [dispatch for dispatch in self.dispatches if not dispatch.runs]:
                self.gone(empty)
            self.dispatches = [dispatch for dispatch in self.dispatches if dispatch.runs]

    def launched(self, batch_id: str, dispatch: Dispatch) -> None:
        """The next one is in flight, in this batch and with these of its runs; the bodies of these are
        released."""
        self._in_flight.launch(batch_id, dispatch, self._decided_us)
        self._launched += dispatch.runs

    def gone(self, dispatch: Dispatch) -> None:
        """The next one was not carried out: none of its runs was still in Redis."""
        self._in_flight.unreserve(dispatch.process, dispatch.version)

    def finish(self) -> list[Refusal]:
        """All were reported. Returns the Refusals of what repeats a request in flight since: of the copies
        that wait, and of those that were taken out. Copies of a request that was gone wait again. Almost
        always O(1)."""
        refusals = self._queue.take_copies(self._launched) if self._queue.ids.repeated else []
        if not self._copies:
            return refusals
        in_flight = {(run.reply_to, name) for run in self._launched for name in run.correlation_ids}
        for run in self._copies:
            names = enumerate(run.correlation_ids)
            again = [at for at, name in names if (run.reply_to, name) in in_flight]
            if len(again) == len(run):
                refusals.append(copy_refusal(run))
                continue
            if again:
                refusals.append(copy_refusal(run.take(again)))
            refusals += self._offer(run, self._decided_us)
        return refusals
