"""A replica of a stepping model: its model process, the requests in its hands, and the loop that moves them.

    Redis ──fetch──▶ prepare ──Admit──▶ model process ──Step──▶ chunks, results ──step.lua──▶ Redis

The model process steps by itself: it gets requests as soon as they are fetched, and gives them slots. So a
request is with this replica for as long as it is generated, and there are as many of them as there are slots,
and a few more. Each is alone in its batch, with a lease and an epoch of its own.

One thread waits for the reply to a fetch, for the model process and for the time, whichever is first. What
the process sent meanwhile is written in one script, which is waited for. Chunks that Redis does not take wait
here, up to a limit; then nothing more is received, so that the process waits as well.

When the model process dies, another one goes on from the chunks in Redis. Any of the requests may be the
cause, so each takes a step alone before they go on together; likewise those of a dead worker. Meanwhile
nothing else is sent to the process, so that no other request can be the cause of its next death. When this
worker stops, it hands its requests over to others.

Why: docs/decisions/0056.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any, Final

from carpool.errors import ABORTED, OK
from carpool.model_settings import ModelSettings, prefetched_slots
from carpool.store.connection import CommandError
from carpool.store.results import FencedError
from carpool.store.steps import StepStore, StepWrite
from carpool_worker.batch_sources import Fetcher
from carpool_worker.codec import Codec
from carpool_worker.committer import Committer
from carpool_worker.execution import Execution
from carpool_worker.member import Member
from carpool_worker.meter import WorkerMetrics
from carpool_worker.model_process.stepping.frames import Admit, Configure, Drop, Resume, Step
from carpool_worker.process_handle import ProcessHandle
from carpool_worker.replica_loop import WAIT_S, ReplicaLoop, shown_requests
from carpool_worker.spans import ANSWERED_AHEAD, FENCED, HANDED_OVER
from carpool_worker.stepping.execution import StepExecution
from carpool_worker.stepping.in_hand import InHand
from carpool_worker.stepping.log import StepLog
from carpool_worker.stepping.writer import StepWriter
from carpool_worker.succession import Limits

FETCH_BLOCK_MS: Final = 200  # batches of dead or stopped workers are looked for as often
WAITING_BYTES_MAX: Final = 16 * 1024 * 1024  # of chunks, while Redis is full
_REPLACED: Final = "it was dispatched to a model of this name that does not step: send it again"


class StepReplica(ReplicaLoop[Execution]):
    """A replica loop with requests in hand: admits them to the process, and writes what it emits."""

    _source: Fetcher

    def __init__(
        self,
        member: Member,
        process: ProcessHandle,
        codec: Codec,
        source: Fetcher,
        metrics: WorkerMetrics,
        *,
        store: StepStore,
        committer: Committer,
        settings: ModelSettings,
        log: StepLog,
        finishes: bool = False,
    ) -> None:
        """`finishes`: when it drains, it finishes its requests instead of handing them over."""
        super().__init__(member, process, codec, source, metrics)
        self._store = store
        self._committer = committer
        self._step_log = log
        self._finishes = finishes
        self._in_hand = InHand(settings, has_tensors=codec.has_tensors)
        declared = _limits(settings, settings.max_batch_size)
        self._sent_limits: Configure | None = declared  # what the process has
        self._lost: list[StepExecution] = []  # to begin again; how many chunks they have is to be read
        self._rejected: list[Execution] = []  # batches for another kind of model, to be committed
        self._suspects: list[StepExecution] = []  # that are still to take steps alone
        self._alone: StepExecution | None = None  # the one that does
        self._is_paused = False  # the process waits for a Resume
        self._example_key: int | None = None  # of the last example that the process got
        self._running = 0  # requests that have a slot, as its last Step says
        self._steps = 0  # how many Steps were received
        self._asked = 0  # how many requests the last fetch asked for
        self._may_be_more = False  # it got as many
        self._hands_over = False  # an operator drains it, and others serve the model
        self._writer = StepWriter(member, store, self._in_hand, metrics)

    # --- the loop ------------------------------------------------------------------------------------------

    def _do_due(self) -> bool:
        self._fetch_if_due()
        self._send_due()
        self._write_due()
        if self._draining and not self._source.waiting and not (self._finishes and self._in_hand):
            self._hand_over()
            self._drained.set()
            return False
        if self._hands_over and not self._source.waiting and self._in_hand:
            self._hand_over()
        return True

    def _is_receiving(self) -> bool:
        """What ends is written also while Redis is full, so it must still be received then."""
        if not self._writer.is_full:
            return True
        return sum([request.emitted_bytes for request in self._in_hand]) <= WAITING_BYTES_MAX

    def _add_fetched(self, items: Sequence[Execution]) -> None:
        self._may_be_more = len(items) == self._asked
        self._add_requests(items)

    def _executing(self) -> tuple[Hashable, int | None]:
        """A process that steps sends something now and then, unless it waits for this worker."""
        is_waiting = (self._is_paused and self._alone is None) or not self._is_receiving()
        has_example = self.retirement.tried is not None
        is_busy = has_example or any(request.is_sent and not request.has_ended for request in self._in_hand)
        if is_waiting or not is_busy:
            return None, None
        return (self._steps, self._alone and self._alone.key), self._in_hand.settings.max_execution_ms

    def _is_idle(self) -> bool:
        """Its slots have run out: a model need not be able to go on from chunks."""
        if self._example_key is not None or self._alone is not None or self.process.has_unsent:
            return False
        if self.succession.leaves_first:
            return not self._in_hand
        return not any(request.is_sent for request in self._in_hand)

    def _timeout_s(self) -> float:
        if not self._in_hand:
            return WAIT_S
        return min(WAIT_S, max(0.0, self._writer.due_at_s - time.monotonic()))

    # --- fetching ------------------------------------------------------------------------------------------

    def _fetch_if_due(self) -> None:
        slots = self.slots
        prefetched = prefetched_slots(slots)
        space = slots + prefetched - len(self._in_hand)
        is_held = self._source.waiting or self._takes_no_more or self.succession.stops_fetching
        if space > 0 and self.process.ready and not is_held:
            # Not more than a share, because other processes may have free slots, too.
            share = -(-space // self.member.model_processes) if self.member.model_processes else 0
            self._asked = min(space, max(prefetched, share))
            self._add_requests(self._source.start(self._asked, wait=not self._may_be_more))

    def _add_requests(self, executions: Sequence[Execution]) -> None:
        """Take requests that were fetched or reclaimed. Those that another process began go on from there."""
        for execution in executions:
            if execution.batch.size != 1 or execution.batch.runs[0].sequence is not None:
                self._reject(execution)
                continue
            request = self._in_hand.add(execution, time.monotonic())
            if execution.is_suspect:
                self._suspects.append(request)
        if executions:
            settings = self._in_hand.settings
            self.succession.limits = Limits(settings.max_requests_per_process, settings.max_process_memory)

    def _reject(self, execution: Execution) -> None:
        """Answer a batch of several requests, or of a sequence: it was dispatched when a model that does not
        step had this name. A replica of such a model can execute it; this one cannot."""
        self._log.warning(
            "batch rejected, it is for another model of this name",
            replica=self.name,
            batch=execution.batch.id,
            size=execution.batch.size,
        )
        for position in execution.unanswered:
            execution.fail(position, ABORTED, _REPLACED)
        self._rejected.append(execution)

    # --- the model process ---------------------------------------------------------------------------------

    def _send_due(self) -> None:
        """Send what was fetched. First suspects, one at a time, each when the one before took its steps."""
        self._begin_lost_again()
        if not self.process.ready or self.succession.holds_back:
            return
        limits = _limits(self._in_hand.settings, self.slots)
        if limits != self._sent_limits:
            self._sent_limits = limits
            self.process.send_message(limits.message())
        while self._suspects and self._alone is None:
            suspect = self._suspects[0]
            if self._in_hand.has(suspect) and suspect.is_waiting:
                self._begin_alone(suspect)
            del self._suspects[0]  # not before Redis knows that it is alone
        # There may be more requests, which the process, if it has none, should begin with these: a prefill of
        # one more takes little longer, and the next prefill comes after a step.
        are_more_coming = self._may_be_more and self._source.waiting
        is_gathering = are_more_coming and not any(request.is_sent for request in self._in_hand)
        if self._alone is not None or is_gathering:
            return
        for request in self._in_hand:
            if request.is_waiting:
                self._admit(request)
        if self._is_paused:
            self._is_paused = False
            self.process.put_message(Resume().message())
        self._put_example_if_due()
        self.process.flush()  # together, so that the process begins them together

    def _put_example_if_due(self) -> None:
        """Have the process begin what it should be able to. Its first chunk, being streamed, shows that."""
        example = self.retirement.due_example
        if example is None:
            return
        self.retirement.example_sent(example)
        self._example_key = self._in_hand.new_key()
        admit = Admit(self._example_key, example.header.layouts, example.request, example.cost, True)
        self.process.put_message(admit.message(), example.payload)

    def _admit(self, request: StepExecution, steps_alone: int = 0) -> None:
        execution, now_us = request.execution, self._store.clock.now_us()
        body = self._codec.body_of(execution, 0, now_us)
        if body is None:  # it cannot be decoded, has expired, or is a dead letter
            request.result = execution.results[0]
            self._alone = None if self._alone is request else self._alone
            return
        admit = Admit(
            request.key,
            body.layouts,
            self._codec.request_fields(execution, 0, self._store.clock.wall_ahead_us),
            execution.batch.cost,
            request.is_streamed,
            request.previous_chunks,
            steps_alone,
        )
        self.process.put_message(admit.message(), *body.payload)
        request.sent(now_us)

    def _begin_alone(self, request: StepExecution) -> None:
        """Should this worker die as well, the next one knows which request was alone."""
        try:
            self._store.record_start(self.name, request.execution.batch, request.next_start)
        except (FencedError, CommandError) as error:
            if isinstance(error, CommandError) and error.code != "NOGROUP":  # Redis was emptied
                raise
            self._drop_fenced([request])
            return
        self._alone, self._is_paused = request, True
        self._admit(request, request.begin_alone())
        self.process.flush()

    def _receive_message(self) -> None:
        received = self.process.receive_message(Step.read)
        if received is None:
            return
        step, _ = received
        now_us = self._store.clock.now_us()
        self._log_raised(step.errors)
        for advance in step.advances:
            request = self._in_hand.get(advance.key)
            if request is not None:
                request.apply(advance, step.size, now_us)
                self.succession.executed(advance.has_ended)
                if advance.failure is not None:
                    request.execution.error = step.error_of(advance.key)
                if request is self._alone and request.stepped_alone():
                    self._alone = None
        self._running = step.running
        self._steps += 1
        if step.has_stepped:
            self._metrics.stepped(step.step_us)
        self._observe_failures(step)

    def _observe_failures(self, step: Step) -> None:
        """Retire the process if nothing that it steps succeeds, not even the example."""
        now_s = time.monotonic()
        for advance in step.advances:
            request = self._in_hand.get(advance.key)
            has_succeeded = bool(advance.chunk) or advance.output is not None
            if advance.key == self._example_key:
                if has_succeeded or advance.failure is not None:
                    self._example_key = None
                    self.process.send_message(Drop([advance.key]).message())
                    self._observe_example({} if advance.failure is None else {0: advance.failure})
            elif has_succeeded:
                self.retirement.succeeded(now_s)
                if request is not None:
                    self._remember_example(request.execution, 0, now_s)
            elif advance.failure is not None and request is not None:
                self.retirement.observe_failure(advance.failure, request.execution.batch.id, now_s)

    def _suspect(self, cause: str) -> dict[str, Any]:
        suspects = self._in_hand.begun if self._alone is None else [self._alone]
        shown = self._shown([request.key for request in suspects])
        for request in suspects:
            request.suspect(was_alone=request is self._alone)
            request.execution.cause_of_death = cause
        self._suspects += [request for request in suspects if request not in self._suspects]
        return shown

    def _shown(self, indexes: Sequence[int] | None = None) -> dict[str, Any]:
        """Of those of these keys that are in hand, or of all that the process has."""
        requests = self._in_hand.begun
        if indexes is not None:
            found = map(self._in_hand.get, dict.fromkeys(indexes))
            requests = [request for request in found if request is not None]
        trace = requests[0].execution.logged_trace if len(requests) == 1 else {}
        shown = shown_requests([(one.execution.batch, one.run.correlation_ids[0]) for one in requests])
        return shown | trace

    def _let_go_of_process(self) -> None:
        suspects = {*self._suspects, self._alone}  # one that was alone has not taken its steps
        self._suspects = [request for request in self._in_hand if request in suspects]
        self._lost += self._in_hand.begun
        self._alone, self._is_paused = None, False
        self._running, self._example_key, self._sent_limits = 0, None, None
        for request in self._in_hand:
            request.is_sent = False

    def _begin_lost_again(self) -> None:
        """Have the model process begin these, from the chunks that are in Redis."""
        lost = list(filter(self._in_hand.has, self._lost))
        if lost:
            chunks = self._store.chunks([request.execution.batch.id for request in lost])
            for request, written in zip(lost, chunks, strict=True):
                self._in_hand.begin_again(request, written)
        self._lost = []

    # --- writing -------------------------------------------------------------------------------------------

    def _write_due(self) -> None:
        self._commit_rejected()
        for written in self._writer.write_due(self._in_hand.settings):
            for request, write in written.ended:
                self._ended(request, write)
            self._drop_fenced(written.fenced)
            self._spans_ended(written.answered, ANSWERED_AHEAD)
            self._forget(written.answered)
            self._step_log.dropped(written.answered)
            self._free_slots(written.mismatched)
            self._lost += written.mismatched

    def _commit_rejected(self) -> None:
        while self._rejected:
            try:
                self._committer.commit(self._rejected[0])
            except FencedError:
                self._committer.discard(self._rejected[0])
            del self._rejected[0]

    def _ended(self, request: StepExecution, write: StepWrite) -> None:
        execution, result = request.execution, request.result
        assert result is not None
        if result.status == OK:
            execution.results[0] = result
        self._metrics.ended(execution, execution.counts(), self._store.clock.now_us())
        self._step_log.ended(self.name, request, write)
        self._spans_ended([request])
        if write.dead_letter is not None:
            self._committer.trim_dead_letters()
        self._forget([request])

    def _drop_fenced(self, requests: Sequence[StepExecution]) -> None:
        """Let go of requests that another worker has."""
        for request in requests:
            batch = request.execution.batch
            self._metrics.fenced()
            self._log.warning(
                "request dropped, another worker has it",
                batch=batch.id,
                epoch=batch.epoch,
                **request.execution.logged_trace,
            )
        self._spans_ended(requests, FENCED)
        self._forget(requests)

    def _spans_ended(self, requests: Sequence[StepExecution], outcome: str = "") -> None:
        """Requests are over, or in other hands."""
        spans = self._metrics.spans
        if spans is not None:
            now_us = self._store.clock.now_us()
            for request in requests:
                spans.ended(request.execution, now_us, outcome, is_step=True)

    def _free_slots(self, requests: Sequence[StepExecution]) -> None:
        """Have the model process end those of these requests that it generates."""
        sent = [request for request in requests if request.is_sent]
        if sent and self.process.ready:
            self.process.send_message(Drop([request.key for request in sent]).message())
        for request in sent:
            request.is_sent = False
        if self._alone in requests:
            self._alone = None

    def _forget(self, requests: Sequence[StepExecution]) -> None:
        if requests:
            self._free_slots(requests)
            self._in_hand.remove(requests)

    # --- stopping ------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Give all requests up, so that other workers go on with them at once."""
        batches = [*self._in_hand.batches, *self._source.unloaded()]
        if batches:
            handed_over = self._store.hand_over(self.name, batches)
            self._log.info("requests handed over", replica=self.name, requests=handed_over)
        self._source.forget_unloaded()
        self._spans_ended([*self._in_hand], HANDED_OVER)
        self._forget([*self._in_hand])

    # --- for other threads ---------------------------------------------------------------------------------

    def hand_over_to_others(self) -> None:
        self._hands_over = not self._finishes

    def end_drain(self) -> None:
        self._hands_over = False
        super().end_drain()

    def batches(self) -> list[tuple[str, int]]:
        """ID and epoch of each batch in hand: what the heartbeat renews."""
        return self._in_hand.batches

    @property
    def slots(self) -> int:
        """How many requests may have a slot: no more than this worker's model takes, also if a batch was
        dispatched for others."""
        size_max = self._in_hand.settings.max_batch_size
        return min(size_max, self.batch_size_max or size_max)

    @property
    def slots_in_use(self) -> int:
        """How many requests have a slot. The model process does not tell when the last ones are dropped."""
        return min(self._running, len(self._in_hand))


def _limits(settings: ModelSettings, slots: int) -> Configure:
    return Configure(slots, settings.max_batch_cost, settings.max_prefill_cost, settings.max_result_bytes)
