"""One request of a stepping model in a worker's hands: what was emitted, written and read of it. Pure.

    model process ──Advance──▶ emitted ──StepWrite──▶ chunks in Redis ──▶ its reader

Chunks are written one by one while the reader keeps up. Those for a slow one wait here, and are merged into
one when it has read enough. A reader that reads nothing at all is given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from carpool.errors import CANCELLED, OK, InternalError
from carpool.messages import BatchedRun, Chunk, Result
from carpool.store.steps import KeptChunk, StepReply, StepWrite
from carpool.wire.bodies import encode_body
from carpool_worker.codec import RESULT_BYTES_MAX
from carpool_worker.execution import Execution
from carpool_worker.model_process import frames
from carpool_worker.model_process.chunks import concatenated
from carpool_worker.model_process.step_frames import Advance

WRITTEN_TOGETHER_MAX: Final = 64  # chunks of a request in one script; further ones are merged


class Reader:
    """How much of a streamed request is unread, and since when nothing of it was read."""

    def __init__(self, now_s: float) -> None:
        self.unread = 0
        self._read = 0  # chunks that were read from a list
        self._read_at_s = now_s

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
        if was_read:
            self._read_at_s = now_s

    def idle_s(self, now_s: float) -> float:
        """For how long nothing was read, although there was something to read."""
        return now_s - self._read_at_s


class StepExecution:
    """See the module. `key` is its number in the model process; `written` counts its chunks in Redis.

    `kept` are the chunks that another process wrote, until they are sent to the next one. `result` is its
    final result, once it ended.
    """

    def __init__(self, execution: Execution, key: int, now_s: float) -> None:
        self.execution = execution
        self.key = key
        self.kept = execution.chunks
        self.written = len(execution.chunks)
        self.first_us = execution.first_us
        self.is_sent = False  # the model process has it
        self.result: Result | None = None
        self.reader = Reader(now_s)
        self.chunk_us: int | None = None  # when its last chunk was written
        self._emitted: list[bytes] = []  # chunks that are not written, oldest first
        self._writing = 0  # how many of these are in the script under way
        self._sent_us = 0
        if 0 in execution.results:  # it could not be decoded, expired, or is a dead letter
            self.result = execution.results[0]

    @property
    def run(self) -> BatchedRun:
        """What its batch has."""
        return self.execution.batch.runs[0]

    @property
    def is_streamed(self) -> bool:
        """Whether its producer wants chunks."""
        return self.execution.batch.stream

    @property
    def emitted_bytes(self) -> int:
        """The bytes of the chunks that are not written."""
        return sum(map(len, self._emitted))

    # --- the model process ---------------------------------------------------------------------------------

    def sent(self, now_us: int) -> None:
        """It was sent to the model process."""
        self.is_sent = True
        self.kept = ()
        self._sent_us = now_us

    def begin_again(self, key: int, kept: Sequence[bytes]) -> None:
        """Another process is to go on from what was written, the chunks `kept`."""
        self.key, self.kept, self.written = key, kept, len(kept)
        self.is_sent = False
        self._emitted = []

    def take(self, advance: Advance, size: int, now_us: int) -> None:
        """What a step did for it and `size - 1` others."""
        if advance.chunk and self.is_streamed:
            self._emitted.append(advance.chunk)
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

    def give_up_idle_reader(self, idle_ms_max: int, now_s: float) -> bool:
        """End it if nothing of it was read for that long. Whether it was ended."""
        if self.result is not None or not self.is_streamed:
            return False
        if self.reader.idle_s(now_s) * 1000 <= idle_ms_max:
            return False
        self.end(
            CANCELLED, f"cancelled: nothing of the stream was read for {idle_ms_max} ms (reader_idle_ms)"
        )
        return True

    def _succeed(self, output: bytes, size: int) -> None:
        run = self.run
        try:
            (value,) = frames.unpack_values(output)
            body = _encode(run.content_type, value)
        except InternalError as error:
            self.end(error.status, error.detail)
            return
        self.result = Result(
            run.correlation_ids[0],
            OK,
            run.content_type,
            body,
            None,
            size,
            self.execution.queue_us(run),
            self.execution.compute_us,
        )

    # --- Redis ---------------------------------------------------------------------------------------------

    def has_news(self, stream_buffer: int) -> bool:
        """Whether there is something to write."""
        return self.result is not None or (bool(self._emitted) and self.reader.unread < stream_buffer)

    def next_write(self, stream_buffer: int, now_us: int, *, only_final: bool = False) -> StepWrite:
        """What is to be written. `only_final`: no chunks, unless it ended."""
        self._writing = 0
        execution = self.execution
        is_writable = self.result is not None or not (only_final or self.reader.unread >= stream_buffer)
        chunks: list[KeptChunk] = []
        if is_writable and self._emitted:
            try:
                chunks = self._chunks(is_behind=self.reader.unread >= stream_buffer)
            except InternalError as error:  # what was emitted cannot be written in this content type
                self._emitted = []
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
        )

    def _chunks(self, *, is_behind: bool) -> list[KeptChunk]:
        """The emitted chunks; as one if the reader is behind, or they are many."""
        if is_behind or len(self._emitted) > WRITTEN_TOGETHER_MAX:
            return [self._chunk(0, [value for kept in self._emitted for value in frames.unpack_values(kept)])]
        return [self._chunk(at, frames.unpack_values(kept), kept) for at, kept in enumerate(self._emitted)]

    def _chunk(self, offset: int, values: list[Any], kept: bytes | None = None) -> KeptChunk:
        run = self.run
        value = values[0] if len(values) == 1 else concatenated(values)
        is_list = value is None and len(values) > 1
        body = _encode(run.content_type, values if is_list else value)
        index, merged = self.written + offset, len(values)
        chunk = Chunk(run.correlation_ids[0], run.content_type, body, index, merged, is_list)
        return KeptChunk(chunk, frames.pack_values(values) if kept is None else kept)

    def _final(self, chunks: int, first_us: int | None) -> Result | None:
        if self.result is None or self.result.status != OK or not self.is_streamed:
            return self.result
        first_us = self.first_us if first_us is None else first_us
        return self.result._replace(index=self.written + chunks, first_us=first_us)

    def wrote(self, write: StepWrite, reply: StepReply, stream_buffer: int, now_s: float) -> None:
        """A write was carried out."""
        del self._emitted[: self._writing]
        self._writing = 0
        self.written += len(write.chunks)
        if write.first_us is not None:
            self.first_us = write.first_us
        is_list = self.run.reply_to is None
        self.reader.observe(reply, self.written, is_list=is_list, stream_buffer=stream_buffer, now_s=now_s)


def _encode(content_type: str, value: Any) -> bytes:
    """A value in the content type of its request. Raises InternalError."""
    body = encode_body(content_type, value)
    if len(body) > RESULT_BYTES_MAX:
        raise InternalError(f"the result has {len(body)} bytes; the limit is {RESULT_BYTES_MAX}")
    return body
