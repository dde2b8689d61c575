"""One request of a stepping model in a worker's hands: what was emitted, written and read of it. Pure.

    model process ──Advance──▶ emitted ──StepWrite──▶ chunks in Redis ──▶ its reader

Chunks are written one by one while the reader keeps up. Those for a slow one wait here, and are merged into
one when it has read enough. A reader that reads nothing at all is given up. A request whose chunks have more
than `max_result_bytes` in all fails: usually in the model process, which counts them packed, and here if they
are larger in the content type of the request.

Why: docs/decisions/0054 and docs/decisions/0080.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from carpool.errors import CANCELLED, OK, CarpoolError, ResourceExhaustedError
from carpool.messages.results import Chunk, Result
from carpool.messages.settled import Streamed
from carpool.model_settings import RESULT_BYTES_DEFAULT
from carpool.store.steps import KeptChunk, StepReply, StepWrite
from carpool.wire.bodies import encode_result_body, result_type
from carpool.wire.content_types import accepted
from carpool.wire.field_hints import warnings_of
from carpool_worker.execution import Execution
from carpool_worker.model_process import frames
from carpool_worker.model_process.stepping.chunks import concatenated
from carpool_worker.model_process.stepping.frames import Advance

WRITTEN_TOGETHER_MAX: Final = 64  # chunks of a request in one script; further ones are merged
UNSEEN_S_MAX: Final = 1.0  # between two looks at a reader's list: what counts of a longer time without one
STEPS_ALONE_DOUBLINGS_MAX: Final = 16
CONTINUED_DEATHS_MAX: Final = 4  # up to which one that goes on from its chunks takes a single step alone
RENEWAL_US: Final = 3600 * 1_000_000  # how often what is kept in Redis, for a day, gets a later expiration


class Reader:
    """How much of a streamed request is unread, and for how long nothing of it was read.

    `idle_s`: for how long it was seen that there was something to read, and nothing was read. While Redis
    cannot be reached, a reader cannot read either, so the time between two looks counts only in part.
    """

    def __init__(self, now_s: float) -> None:
        self.unread = 0
        self.idle_s = 0.0
        self._read = 0  # chunks that were read from a list
        self._seen_at_s = now_s

    def observe(
        self, reply: StepReply, written: int, *, is_list: bool, stream_buffer: int, now_s: float
    ) -> None:
        """Follow a reply, after which `written` chunks are written.

        Reading a list removes chunks. Of a reply stream, which others write to, it is only known how much was
        not removed: so it counts as unread while it has `stream_buffer` entries, and as read when it shrinks.
        """
        before, self.unread = self.unread, reply.unread
        if is_list:
            was_read = reply.unread == 0 or written - reply.unread != self._read
            self._read = written - reply.unread
        else:
            was_read = reply.unread < max(before, stream_buffer)
        unseen_s, self._seen_at_s = now_s - self._seen_at_s, now_s
        self.idle_s = 0.0 if was_read else self.idle_s + min(unseen_s, UNSEEN_S_MAX)


class StepExecution:
    """One request in hand of a stepping model: what it emitted, and what of that is written.

    `key` is its number in the model process; `written` counts its chunks in Redis. `previous_chunks` are
    those of other processes, until they are sent to the next one. `result` is its final result, once it
    ended. `is_answered`: a batcher answered it before this worker took it, so it only has to be removed.
    `deaths_together`: how often its process or worker died while it was generated.
    """

    def __init__(
        self,
        execution: Execution,
        key: int,
        now_s: float,
        result_bytes_max: int = RESULT_BYTES_DEFAULT,
        *,
        has_tensors: bool = False,
    ) -> None:
        """`has_tensors`: the model declares tensors."""
        self.execution = execution
        self.result_bytes_max = result_bytes_max  # the model's setting, which may change
        self.run = execution.batch.runs[0]
        self._wanted = accepted(self.run.extra)  # the content type of its chunks and its output
        self._has_tensors = has_tensors
        self.is_streamed = execution.batch.stream  # its producer wants chunks
        self.key = key
        self.held_since_s = now_s
        self.previous_chunks = execution.chunks
        self.written = len(execution.chunks)
        self.first_us = execution.first_us
        self.is_sent = False  # the model process has it, and has not reported its end
        self.is_answered = 0 in execution.answered_before
        self.result: Result | None = None
        self.emitted_bytes = 0  # of the chunks that are not written
        self.deaths_together = execution.batch.epoch - 1 + execution.batch.redelivered
        self.has_passed = False  # it took its steps alone, which is to be recorded in Redis
        self._steps_alone = 0  # that are left
        self.reader = Reader(now_s)
        self.chunk_us: int | None = None  # when its last chunk was written
        self._emitted: list[bytes] = []  # chunks that are not written, oldest first
        self._emitted_total = 0  # by all processes that had it
        self._writing = 0  # how many of these are in the script under way
        self._written_bytes = sum(map(len, execution.chunks))  # of all its chunks in Redis
        self._writing_bytes = 0  # of those in the script under way
        self._renew_us = 0  # when what is kept of it in Redis is to be given a later expiration
        self._sent_us = 0
        if 0 in execution.results:  # it could not be decoded, expired, or is a dead letter
            self.result = execution.results[0]

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is to be generated."""
        return self.is_answered or self.result is not None

    @property
    def is_waiting(self) -> bool:
        """Whether the model process is to generate it, and does not have it."""
        return not (self.is_sent or self.has_ended)

    # --- suspects ------------------------------------------------------------------------------------------

    def suspect(self, *, was_alone: bool) -> None:
        """Its process died. Of several deaths only those count in which it was alone, and one other."""
        deaths = self.execution.deaths
        if was_alone:
            deaths[0] = deaths.get(0, 0) + 1
        else:
            deaths[0] = max(deaths.get(0, 0), 1)
            self.deaths_together += 1

    @property
    def next_start(self) -> int:
        """The number of its next start alone, since it has survived one."""
        return self.execution.start_counts.get(0, 0) + 1

    def begin_alone(self) -> int:
        """It is to take steps alone, which Redis knows. Returns how many.

        One is enough if it goes on from its chunks: then it is at once where its process died. If it begins
        anew, that may be many steps later, so their number is doubled with each death. One that goes on may
        also kill its process some steps after each beginning; but most likely others do, and the longer it is
        alone, the likelier it is blamed for a death by chance. So for it doubling begins late.
        """
        self.execution.start_counts[0] = self.next_start
        self.has_passed = False
        doublings = max(0, self.deaths_together - (CONTINUED_DEATHS_MAX if self.previous_chunks else 1))
        self._steps_alone = 1 << min(doublings, STEPS_ALONE_DOUBLINGS_MAX)
        return self._steps_alone

    def stepped_alone(self) -> bool:
        """It took a step alone. Whether that was the last one: then it was not the cause."""
        self._steps_alone -= 1
        if self._steps_alone and self.result is None:
            return False
        self.execution.deaths.pop(0, None)
        self.execution.start_counts.pop(0, None)
        self.has_passed = True
        return True

    # --- the model process ---------------------------------------------------------------------------------

    def sent(self, now_us: int) -> None:
        """It was sent to the model process."""
        self.is_sent = True
        self.previous_chunks = ()
        self._sent_us = now_us

    def begin_again(self, key: int, chunks: Sequence[bytes]) -> None:
        """Another process is to go on from these chunks, which were written."""
        self.key, self.previous_chunks, self.written = key, chunks, len(chunks)
        self._written_bytes = sum(map(len, chunks))
        self.is_sent = False
        self._renew_us = 0
        self._forget_emitted()
        if self.result is not None and self.result.status == OK:  # it counts chunks that Redis has lost
            self.result = None

    def apply(self, advance: Advance, size: int, now_us: int) -> None:
        """What a step did for it and `size - 1` others."""
        if advance.has_ended:
            self.is_sent = False
        if self.result is not None:  # it was given up meanwhile
            return
        if advance.chunk and self.is_streamed:
            self._emitted.append(advance.chunk)
            self.emitted_bytes += len(advance.chunk)
            self._emitted_total = advance.emitted
        self.execution.compute_us = max(0, now_us - self._sent_us)
        if advance.failure is not None:
            status, detail = advance.failure
            self.end(status, detail)
        elif advance.output is not None:
            self._succeed(advance.output, size)

    def end(self, status: str, detail: str) -> None:
        """It ended with an error."""
        self.execution.fail(0, status, detail)
        self.result = self.execution.results[0]

    def give_up_idle_reader(self, idle_ms_max: int) -> None:
        """End it if nothing of it was read for that long."""
        if self.result is None and self.is_streamed and self.reader.idle_s * 1000 > idle_ms_max:
            self.end(
                CANCELLED,
                f"cancelled: nothing of the stream was read for {idle_ms_max} ms (reader_idle_ms)",
            )

    def _forget_emitted(self) -> None:
        self._emitted, self.emitted_bytes = [], 0

    def _succeed(self, output: bytes, size: int) -> None:
        run = self.run
        try:
            (value,) = frames.unpack_results(output)
            content_type = self._type_of(value)
            body = encode_result_body(content_type, value)
            if len(body) > self.result_bytes_max:
                raise self._too_large()
        except CarpoolError as error:
            self.end(error.status, error.detail)
            return
        self.result = Result(
            run.correlation_ids[0],
            OK,
            content_type,
            body,
            None,
            size,
            self.execution.queue_us(run),
            self.execution.compute_us,
            warnings=warnings_of(run.extra, run.content_type),
            version=self.execution.version,
        )

    # --- Redis ---------------------------------------------------------------------------------------------

    def has_news(self, stream_buffer: int) -> bool:
        """Whether there is something to write."""
        return self.has_ended or (bool(self._emitted) and self.reader.unread < stream_buffer)

    def next_write(self, stream_buffer: int, now_us: int, *, only_final: bool = False) -> StepWrite:
        """What is to be written. `only_final`: no chunks, unless it ended."""
        self._writing = self._writing_bytes = 0
        execution = self.execution
        is_writable = self.result is not None or not (only_final or self.reader.unread >= stream_buffer)
        chunks: list[KeptChunk] = []
        if is_writable and self._emitted:
            try:
                chunks = self._chunks(is_behind=self.reader.unread >= stream_buffer)
                for chunk, _ in chunks:
                    self._writing_bytes += len(chunk.body)
                if self._written_bytes + self._writing_bytes > self.result_bytes_max:
                    raise self._too_large()
            except CarpoolError as error:  # what was emitted cannot be written in this content type
                chunks, self._writing_bytes = [], 0
                self._forget_emitted()
                self.end(error.status, error.detail)
            self._writing = len(self._emitted)
        first_us = None
        if chunks and self.first_us is None:
            first_us = max(0, now_us - self.run.arrival_us)
        return StepWrite(
            execution.batch,
            self.written,
            chunks,
            first_us,
            self._final(len(chunks), first_us),
            execution.compute_us,
            execution.waited_us,
            execution.dead_letters[0] if execution.dead_letters else None,
            self.has_passed,
            self._streamed(first_us, now_us if chunks else self.chunk_us) if self.result else None,
            bool(chunks) and now_us >= self._renew_us,
            execution.error,
        )

    def _chunks(self, *, is_behind: bool) -> list[KeptChunk]:
        """The emitted chunks; as one if the reader is behind, or they are many."""
        if is_behind or len(self._emitted) > WRITTEN_TOGETHER_MAX:
            values = [value for chunk in self._emitted for value in frames.unpack_results(chunk)]
            return [self._chunk(0, values)]
        return [self._chunk(at, frames.unpack_results(one), one) for at, one in enumerate(self._emitted)]

    def _chunk(self, offset: int, values: list[Any], packed: bytes | None = None) -> KeptChunk:
        run = self.run
        value = values[0] if len(values) == 1 else concatenated(values)
        is_list = value is None and len(values) > 1
        content_type = self._type_of(values if is_list else value)
        body = encode_result_body(content_type, values if is_list else value)
        index, merged = self.written + offset, len(values)
        chunk = Chunk(run.correlation_ids[0], content_type, body, index, merged, is_list)
        return KeptChunk(chunk, frames.pack_values(values) if packed is None else packed)

    def _type_of(self, value: Any) -> str:
        return result_type(self.run.content_type, self._wanted, value, has_tensors=self._has_tensors)

    def _too_large(self) -> ResourceExhaustedError:
        """Its result, or all of its chunks together, are over the limit."""
        self.execution.error = frames.too_large(self.result_bytes_max)[1]
        return ResourceExhaustedError(self.execution.error)

    def _streamed(self, first_us: int | None, last_us: int | None) -> Streamed | None:
        """What was streamed, if the first chunk came `first_us` after its arrival, or is written."""
        first_us = self.first_us if first_us is None else first_us
        if first_us is None or last_us is None:
            return None
        since_first_us = last_us - self.run.arrival_us - first_us
        return Streamed(self._emitted_total, first_us, max(0, since_first_us))

    def _final(self, chunks: int, first_us: int | None) -> Result | None:
        if self.result is None or self.result.status != OK or not self.is_streamed:
            return self.result
        first_us = self.first_us if first_us is None else first_us
        return self.result._replace(index=self.written + chunks, first_us=first_us)

    def wrote(
        self, write: StepWrite, reply: StepReply, stream_buffer: int, now_s: float, now_us: int
    ) -> None:
        """A write was carried out."""
        if write.chunks:
            self.chunk_us = now_us
        if write.is_renewed:
            self._renew_us = now_us + RENEWAL_US
        del self._emitted[: self._writing]
        self.emitted_bytes = sum(map(len, self._emitted))
        self._writing = 0
        self._written_bytes += self._writing_bytes
        self._writing_bytes = 0
        self.has_passed = self.is_answered = False
        self.written += len(write.chunks)
        if write.first_us is not None:
            self.first_us = write.first_us
        is_list = self.run.reply_to is None
        self.reader.observe(reply, self.written, is_list=is_list, stream_buffer=stream_buffer, now_s=now_s)
