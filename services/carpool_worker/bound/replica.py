"""A replica of a bound model: its model process, which has the states of sequences, and what is sent to it.

    inbox ──batches──▶ prepare ──frames──▶ model process ──outcome──▶ results ──commit──▶ Redis
          ──ends──────EndSequences─▶

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

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from carpool.errors import ABORTED, OK
from carpool.process_names import name_of_life
from carpool.store.bound import BoundStore
from carpool.store.results import FencedError
from carpool.wire.inbox import SequenceEnded
from carpool_worker.batch_replica import BatchReplica
from carpool_worker.bound.inbox import BatchLost, Inbox, Item
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import EXAMPLE_SEQUENCE, Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.frames import EndSequences, Failure
from carpool_worker.process_handle import ProcessHandle

LOST: Final = "sequence_id: its model process ended; begin it again with sequence_start"


class BoundReplica(BatchReplica[Item]):
    """A batch replica that sends all at once, ends sequences, and begins another life when states are
    lost. It joins when its process is ready, in each of its lives: `member` has not joined, and cannot be
    revived. `slots`: how many sequences the model process takes. `join`: registers the model, and joins
    under this name."""

    _source: Inbox

    def __init__(
        self,
        member: Member,
        process: ProcessHandle,
        codec: Codec,
        source: Inbox,
        committer: Committer,
        metrics: WorkerMetrics,
        *,
        store: BoundStore,
        slots: int,
        join: Callable[[str], None],
    ) -> None:
        super().__init__(member, process, codec, source, committer, store.clock, metrics)
        self._first_name = member.name
        self._life = 1
        self._store = store
        self._slots = slots
        self._join_as = join
        self._sequences: set[str] = set()  # that have a slot, or were sent to get one
        self._is_marked = False  # as draining
        self._is_quiet = False  # nothing has come since

    # --- the loop ------------------------------------------------------------------------------------------

    def _do_due(self) -> bool:
        if self.member.is_over and self._first_unfinished() is None:
            self._end_life()
        self._commit_finished()
        self._send_example_if_due()
        self._mark_if_due()
        if not self.member.is_joined and self.process.ready and not self._draining:
            self._join()
        if self._draining and self._has_drained():
            self._drained.set()
            return False
        if self.member.is_joined and not self.member.is_over and not self._source.waiting:
            return not self._fetch()
        return True

    def _is_idle(self) -> bool:
        """No other process can go on with its sequences."""
        return False

    def _send_example_if_due(self) -> None:
        example = self.retirement.due_example
        if example is not None and self.process.ready and self._first_unfinished() is None:
            self._send_example(example)

    def _add_fetched(self, items: Sequence[Item]) -> None:
        self._is_quiet = self._is_marked and not items
        for item in items:
            if self.member.is_over:  # what is in the inbox is answered when this life ends
                return
            if isinstance(item, SequenceEnded):
                self._end([item.sequence_id])
            elif isinstance(item, BatchLost):
                self.member.is_over = True
            else:
                self.add_batch(item)

    def _prepare(self, execution: Execution) -> None:
        """Decode a batch and send it to the model process."""
        if execution.is_suspect:  # it was reclaimed
            self._abort(execution)
            return
        self._codec.prepare(execution, self._clock.now_us(), self._clock.wall_ahead_us)
        sequences = [run.sequence for run in execution.batch.runs]
        self._sequences.update(one.sequence_id for one in sequences if one is not None and one.starts)
        for frame in execution.frames:
            self.process.send(frame.header, *frame.payload)
        execution.frames_sent = len(execution.frames)

    # --- the model process ---------------------------------------------------------------------------------

    def _observe_example(self, failures: Mapping[int, Failure]) -> None:
        self.process.send_message(EndSequences([EXAMPLE_SEQUENCE]).message())
        super()._observe_example(failures)

    def _suspect(self, cause: str) -> dict[str, Any]:
        """Nothing is executed again."""
        return {"sequences": len(self._sequences), **self._shown()}

    def _let_go_of_process(self) -> None:
        for execution in self._executions:
            self._abort(execution)
        self._sequences.clear()
        self.member.is_over = True

    def _end(self, sequence_ids: Sequence[str]) -> None:
        """Free the slots of these sequences."""
        if sequence_ids:
            self._sequences.difference_update(sequence_ids)
            self.process.send_message(EndSequences(sequence_ids).message())

    # --- committing ----------------------------------------------------------------------------------------

    def _abort(self, execution: Execution) -> None:
        """Answer what has no result: its model process ended."""
        execution.frames.clear()
        execution.frames_sent = 0
        for position in _unanswered(execution):
            execution.fail(position, ABORTED, LOST)

    def _commit_finished(self) -> None:
        for execution in self._executions:
            if not execution.is_finished:
                continue
            try:
                self._commit(execution)
            except FencedError:
                self._discard(execution)
                self.member.is_over |= self._is_own(execution)
            else:
                self._remove(execution)

    def _commit(self, execution: Execution) -> None:
        """Commit, with the name of this process as the state of each sequence that goes on."""
        state = self.name.encode()
        for group in execution.run_results:
            execution.states |= dict.fromkeys(group.positions, state)
        self._committer.commit(execution)
        if not self._is_own(execution):
            return
        succeeded = {position for group in execution.run_results for position in group.positions}
        succeeded |= {position for position, result in execution.results.items() if result.status == OK}
        parts = enumerate(run.sequence for run in execution.batch.runs)  # each run is one request
        self._end(
            [
                part.sequence_id
                for position, part in parts
                if part is not None and (part.ends or position not in succeeded)  # it failed, or was answered
            ]
        )

    def _is_own(self, execution: Execution) -> bool:
        """Whether it was dispatched to this process, and not reclaimed: its sequences are here."""
        return execution.batch.process == self.name

    # --- lives ---------------------------------------------------------------------------------------------

    def _join(self) -> None:
        self._join_as(self.name)
        self.member.is_joined = True

    def _end_life(self) -> None:
        """Leave: the batcher then aborts the sequences. May be repeated after it raised.

        It leaves before the results are written. Else a producer that begins its sequence again as soon as it
        has one would be sent to this life.
        """
        self._source.stop()
        self._end(sorted(self._sequences))
        self.member.is_joined = False
        self._store.leave(self.name)
        self._commit_finished()
        while pending := self._source.pending():
            for execution in pending:
                self._abort(execution)
            self._executions = tuple(pending)
            self._commit_finished()
        self._store.leave(self.name)  # its consumer, which had batches, is deleted
        self._log.warning("sequences lost, joining again under another name", replica=self.name)
        self._life += 1
        self.member.name = name_of_life(self._first_name, self._life)
        self._source.start_over()
        self.member.is_over = self._is_marked = False

    # --- draining ------------------------------------------------------------------------------------------

    def _mark_if_due(self) -> None:
        """Tell the batcher that an operator drains it, or does no more. Its sequences go on meanwhile."""
        is_due = self._is_marked != self._is_set_aside and not self._draining
        if is_due and self.member.is_joined and not self.member.is_over:
            if self._is_set_aside:
                self._store.drain(self.name)
            else:
                self._store.undrain(self.name)
            self._is_marked = self._is_set_aside

    @property
    def marks_its_drain(self) -> bool:
        return True

    def _has_drained(self) -> bool:
        """Whether nothing is left here: no other process could go on with its sequences.

        The batcher learns that it is to start no more, and what it had dispatched before still comes.
        """
        if self._executions or self.member.is_over:
            return False
        if not self.member.is_joined:
            return True
        if not self._is_marked:
            self._store.drain(self.name)
            self._is_marked = True
            self._source.stop()
        return self._is_quiet and not self._sequences

    @property
    def may_leave(self) -> bool:
        """Not before its sequences have ended."""
        return self._drained.is_set()

    # --- for other threads ---------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def slots_in_use(self) -> int:
        return len(self._sequences)


def _unanswered(execution: Execution) -> list[int]:
    """The positions that have no result yet."""
    done = {position for group in execution.run_results for position in group.positions}
    return [at for at in execution.unanswered if at not in done and at not in execution.results]
