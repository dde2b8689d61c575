"""The chunks of a request, from the producer to a client that may read slowly.

The results of all requests of a model come on one reply stream, which is read whatever single clients do. So
what a slow client has not read is held here. It is counted with the bodies that are held, and a client for
which more than `Limits.unread_bytes` are held, or for which anything more comes while the gateway holds too
much, gets no more: its request is withdrawn, and after the chunks that are held comes an error.

Why: docs/decisions/0106.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from carpool.client.entries import Channel, Encoded
from carpool.client.envelopes import EnvelopeStreamSink
from carpool.client.producer import Producer
from carpool.client.sinks import Reply
from carpool.client.streams import AsyncStream, StreamTarget
from carpool.errors import ResourceExhaustedError
from carpool.messages.results import Chunk, Result
from carpool_gateway.limits import BodyMemory

CHUNK_OVERHEAD_BYTES: Final = 256  # of a chunk that is held, beside its body


class _Target(StreamTarget):
    """Counts what its reader has not taken."""

    __slots__ = ("_bytes_max", "_memory", "unread_bytes")

    def __init__(self, memory: BodyMemory, bytes_max: int) -> None:
        super().__init__(asyncio.Queue())
        self.unread_bytes = 0
        self._memory = memory
        self._bytes_max = bytes_max

    def put_chunk(self, index: int, values: Sequence[Any]) -> None:
        """As there. Raises ResourceExhaustedError, which ends the request, if its reader is too slow."""
        if self.ended or index < self.index:
            return
        super().put_chunk(index, values)
        before, size = self.unread_bytes, sum([_bytes_of(value) for value in values])
        self.unread_bytes += size
        self._memory.hold(size)
        # A single chunk may have any size; it is not the reader's fault.
        if before and (self.unread_bytes > self._bytes_max or self._memory.is_full):
            raise ResourceExhaustedError(
                f"the stream is read too slowly: {self.unread_bytes} bytes of it are unread, so it was ended",
                correlation_id=self.correlation_id,
            )

    def taken(self, item: Any) -> None:
        """The reader has taken this."""
        size = min(_bytes_of(item), self.unread_bytes)
        self.unread_bytes -= size
        self._memory.release(size)

    def release(self) -> None:
        """Nothing is read any more."""
        self._memory.release(self.unread_bytes)
        self.unread_bytes = 0


def _bytes_of(item: Any) -> int:
    return len(item.body or b"") + CHUNK_OVERHEAD_BYTES


class Chunks:
    """The chunks of one request, as an async iterator: each Chunk, or the Result of a model that does not
    step. Raises CarpoolErrors.

    To be used with `async with`. If that is left before the end, the request is withdrawn.
    """

    def __init__(
        self,
        producer: Producer,
        channel: Channel,
        body: Encoded,
        fields: Mapping[str, Any],
        timeout_s: float | None,
        *,
        memory: BodyMemory,
        unread_bytes_max: int,
        correlation_id: str | None = None,
    ) -> None:
        """Send the request. Raises InvalidArgumentError and UnavailableError."""
        packer = producer.packer
        self._target = _Target(memory, unread_bytes_max)
        self._target.correlation_id = packer.add(
            channel, body, fields, timeout_s, _SINK, self._target, correlation_id
        )
        self._withdraw = packer.close_stream
        self._stream = AsyncStream(self._target, packer.close_stream, packer.loop)
        self.count = 0  # chunks that were taken
        self.values = 0  # what is in them: as many as the model emitted

    @property
    def reply(self) -> Reply | None:
        """How the request was served, once the last chunk was taken; None before, and after an error."""
        return self._stream.reply

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk | Result:
        item: Chunk | Result = await self._stream.__anext__()
        self._target.taken(item)
        self.count += 1
        self.values += item.merged if type(item) is Chunk else 1
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more. Withdraws the request if it has no result."""
        if not self._target.ended:
            self._withdraw(self._target)
        self._target.release()


_SINK: Final = EnvelopeStreamSink()
