"""A replica of a bound model: its model process, which has the states of sequences, and what is sent to it.

    inbox ──batches──▶ prepare ──frames──▶ model process ──outcome──▶ results ──commit──▶ Redis
          ──ends─────────────────End─────▶

A batcher dispatches each batch to one process, which takes it from its inbox and sends it on at once: all in
order, so that a slot is free before another sequence starts in it. Sequences that ended by a result, and not
by a message, are ended in the model process when that result is committed.

Nothing is executed again. When the model process dies, or the lease runs out, the states are lost: what is in
hand is ABORTED, and so are the sequences, by the batcher, as soon as this process has left. It joins again
under another name, because one of the same name would be believed to have them. A batch that was reclaimed
from another process is answered ABORTED, too.

When the worker drains, its sequences are finished: no other process can go on with them.

Why: docs/decisions/0063.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Final

from carpool.errors import ABORTED, OK
from carpool.process_names import name_of_life
from carpool.shown import trace_of
from carpool.store.bound import BoundStore
from carpool.store.results import FencedError
from carpool.store.worker import WorkerStore
from carpool.wire.inbox import SequenceEnded
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import EXAMPLE_SEQUENCE, Execution
from carpool_worker.inbox import BatchLost, Inbox, Item
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.bound_frames import End
from carpool_worker.model_process.frames import ProcessGoneError
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.replica_loop import WAIT_S, ReplicaLoop, shown_as_example, shown_of_frame

LOST: Final = "sequence_id: its model process ended; begin it again with sequence_start"


class BoundReplica(ReplicaLoop[Item]):
    """See the module. `slots`: how many sequences the model process takes."""

    _fetcher: Inbox

    def __init__(
        self,
        consumer: str,
        process: ProcessHandle,
        codec: Codec,
        inbox: Inbox,
        store: BoundStore,
        committer: Committer,
        slots: int,
        lease_ms: int,
        register: Callable[[WorkerStore], None],
        metrics: WorkerMetrics,
    ) -> None:
        super().__init__(consumer, process, codec, inbox, metrics)
        self.is_member = False  # it joins when its process is ready, in each of its lives
        self.can_be_revived = False
        self._name = consumer
        self._life = 1
        self._store = store
        self._committer = committer
        self._clock = store.clock
        self._slots = slots
        self._lease_ms = lease_ms
        self._register = register
        self._executions: tuple[Execution, ...] = ()  # oldest first; replaced, never changed
        self._sequences: set[str] = set()  # that have a slot, or were sent to get one
        self._is_over = False  # this life: the states in the model process are lost, or believed to be
        self._is_marked = False  # as draining
        self._is_quiet = False  # nothing has come since

    # --- the loop ------------------------------------------------------------------------------------------

    def _do_due(self) -> bool:
        if self._is_over and self._first_unfinished() is None:
            self._end_life()
        self._commit_finished()
        self._send_example_if_due()
        if not self.is_member and self.process.ready and not self._draining:
            self._join()
        if self._draining and self._has_drained():
            self._drained.set()
            return False
        if self.is_member and not self._is_over and not self._fetcher.waiting:
            return not self._fetch()
        return True

    def _send_example_if_due(self) -> None:
        example = self.retirement.due_example
        if example is not None and self.process.ready and self._first_unfinished() is None:
            self._send_example(example)

    def _executing(self) -> tuple[Hashable, int | None]:
        example = self.retirement.tried
        if example is not None:
            return "example", example.max_execution_ms
        execution = self._first_unfinished()
        if execution is None:
            return None, None
        return (execution.batch.id, len(execution.frames)), execution.batch.max_execution_ms

    def _timeout_s(self) -> float:
        return WAIT_S

    def _fetch(self) -> bool:
        """Ask for messages. Whether a batch was taken at once, from a dead process."""
        reclaimed = self._fetcher.start()
        if reclaimed is None:
            return False
        self._abort(reclaimed)
        self._executions = (*self._executions, reclaimed)
        return True

    def _take_fetched(self, fetched: Sequence[Item]) -> None:
        self._is_quiet = self._is_marked and not fetched
        for item in fetched:
            if self._is_over:  # what is in the inbox is answered when this life ends
                return
            if isinstance(item, SequenceEnded):
                self._end([item.sequence_id])
            elif isinstance(item, BatchLost):
                self._is_over = True
            else:
                self._take(item)

    def _take(self, execution: Execution) -> None:
        """Decode a batch and send it to the model process."""
        is_next = self._first_unfinished() is None
        self._executions = (*self._executions, execution)  # renewed from now on: decoding may take long
        started_ns = time.monotonic_ns()
        self._codec.prepare(execution, self._clock.now_us())
        execution.input_us = (time.monotonic_ns() - started_ns) // 1000
        execution.ready_us = self._clock.now_us()
        if is_next:
            execution.start_at(execution.ready_us)
        parts = [run.sequence for run in execution.batch.runs]
        self._sequences.update(part.sequence_id for part in parts if part is not None and part.starts)
        for frame in execution.frames:
            self.process.send(frame.header, *frame.payload)

    def _first_unfinished(self) -> Execution | None:
        """The execution that the model process executes; None if there is none."""
        return next((execution for execution in self._executions if execution.frames), None)

    # --- the model process ---------------------------------------------------------------------------------

    def _receive(self) -> None:
        """Receive an outcome, or that a new model process is ready, or that the process died."""
        try:
            if not self.process.ready:
                if self.process.receive_ready() is not None:
                    self._log.info("model process replaced", worker=self.consumer, pid=self.process.pid)
                return
            received = self.process.receive()
        except ProcessGoneError:
            if not self._closing:  # else this worker closed the connection
                self._replace_process()
            return
        if received is None:
            return
        header, payload = received
        if self.retirement.tried is not None:
            self._log_raised({}, shown_as_example)
            self.process.send_message(End([EXAMPLE_SEQUENCE]).message())
            self._observe_example({} if header.executed else header.failures)  # it may return exceptions
            return
        execution = self._first_unfinished()
        assert execution is not None  # the process handle compares the numbers of frames and outcomes
        frame = execution.frames[0]
        try:
            if self.process.raised:
                self._log_raised(header.errors, partial(shown_of_frame, execution, frame))
            self._codec.take_outcome(execution, frame, header, payload)
        except Exception as error:  # an unforeseen case: the outcome is not sent again
            self._log.error(
                "results of the model process unreadable",
                worker=self.consumer,
                **shown_of_frame(execution, frame),
                exception=trace_of(error),
            )
            execution.fail_frame(frame, f"the model's results cannot be read: {error}")
        del execution.frames[0]
        following = self._first_unfinished()
        if not execution.frames and following is not None:
            following.start_at(self._clock.now_us())
        self._observe_outcome(header, execution, frame)

    def _replace_process(self) -> None:
        """The model process died, and the states with it: start another."""
        cause = self.process.exit_cause()
        self._metrics.process_died()
        executed = self._first_unfinished()
        shown = partial(shown_of_frame, executed, executed.frames[0]) if executed is not None else dict
        self._log_raised({}, shown)
        self._log.error(
            "model process died",
            worker=self.consumer,
            how=cause,
            sequences=len(self._sequences),
            **shown(),
        )
        self._let_go_of_process()
        self.process.hang_up()

    def _let_go_of_process(self) -> None:
        for execution in self._executions:
            self._abort(execution)
        self._sequences.clear()
        self._is_over = True

    def _end(self, sequence_ids: Sequence[str]) -> None:
        """Free the slots of these sequences."""
        if sequence_ids:
            self._sequences.difference_update(sequence_ids)
            self.process.send_message(End(sequence_ids).message())

    # --- committing ----------------------------------------------------------------------------------------

    def _abort(self, execution: Execution) -> None:
        """Answer what has no result: its model process ended."""
        execution.frames.clear()
        for position in _unanswered(execution):
            execution.fail(position, ABORTED, LOST)

    def _commit_finished(self) -> None:
        for execution in self._executions:
            if execution.frames:
                continue
            try:
                self._commit(execution)
            except FencedError:  # another worker has the batch
                self._committer.discard(execution)
                self._is_over |= self._is_own(execution)
            self._executions = tuple([held for held in self._executions if held is not execution])

    def _commit(self, execution: Execution) -> None:
        """Commit, with the name of this process as the state of each sequence that goes on."""
        state = self.consumer.encode()
        for of_run in execution.run_results:
            execution.states |= dict.fromkeys(of_run.positions, state)
        self._committer.commit(execution)
        if not self._is_own(execution):
            return
        kept = {position for of_run in execution.run_results for position in of_run.positions}
        kept |= {position for position, result in execution.results.items() if result.status == OK}
        parts = enumerate(run.sequence for run in execution.batch.runs)  # each run is one request
        self._end(
            [
                part.sequence_id
                for position, part in parts
                if part is not None and (part.ends or position not in kept)  # it failed, or was answered
            ]
        )

    def _is_own(self, execution: Execution) -> bool:
        """Whether it was dispatched to this process, and not reclaimed: its sequences are here."""
        return execution.batch.process == self.consumer

    # --- lives ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._register(self._store)  # Redis may have been emptied
        self._store.join(self.consumer, self._lease_ms)
        self.is_member = True

    def _end_life(self) -> None:
        """Leave: the batcher then aborts the sequences. May be repeated after it raised.

        It leaves before the results are written. Else a producer that begins its sequence again as soon as it
        has one would be sent to this life.
        """
        self._fetcher.stop()
        self._end(sorted(self._sequences))
        self.is_member = False
        self._store.leave(self.consumer)
        self._commit_finished()
        while pending := self._fetcher.pending():
            for execution in pending:
                self._abort(execution)
            self._executions = tuple(pending)
            self._commit_finished()
        self._store.leave(self.consumer)  # its consumer, which had batches, is deleted
        self._log.warning("sequences lost, joining again under another name", worker=self.consumer)
        self._life += 1
        self.consumer = self._committer.consumer = name_of_life(self._name, self._life)
        self._fetcher.begin_life(self.consumer)
        self._is_over = self._is_marked = False

    # --- draining ------------------------------------------------------------------------------------------

    def _has_drained(self) -> bool:
        """Whether nothing is left here: no other process could go on with its sequences.

        The batcher learns that it is to start no more, and what it had dispatched before still comes.
        """
        if self._executions or self._is_over:
            return False
        if not self.is_member:
            return True
        if not self._is_marked:
            self._store.drain(self.consumer)
            self._is_marked = True
            self._fetcher.stop()
        return self._is_quiet and not self._sequences

    @property
    def may_leave(self) -> bool:
        """Not before its sequences have ended."""
        return self._drained.is_set()

    # --- for other threads ---------------------------------------------------------------------------------

    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""
        return [(execution.batch.id, execution.batch.epoch) for execution in self._executions]

    def on_lease_lost(self, consumer: str) -> None:
        """The batcher aborts the sequences."""
        if consumer == self.consumer:
            self._is_over = True

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def slots_in_use(self) -> int:
        return len(self._sequences)


def _unanswered(execution: Execution) -> list[int]:
    """The positions that have no result yet."""
    done = {position for of_run in execution.run_results for position in of_run.positions}
    return [at for at in execution.unanswered if at not in done and at not in execution.results]
