"""Sinks for front ends of other protocols: results and chunks whose bodies are bytes, as they came.

An error in a future or a stream says why there is no result. It has a status, too: see `errors.HTTP_STATUS`.
"""

from __future__ import annotations

import asyncio

from carpool.client.sinks import Envelope, Sink, reply_of
from carpool.client.streams import StreamTarget
from carpool.errors import OK, CarpoolError, error_for
from carpool.messages.results import Chunk, Result


class EnvelopeSink(Sink):
    """A future for each request, which gets its Result, of whatever status."""

    def put(self, target: asyncio.Future[Result], envelope: Envelope) -> None:
        """Resolve the future, unless it was cancelled."""
        if not target.done():
            target.set_result(_result_of(envelope))

    def fail(self, target: asyncio.Future[Result], error: CarpoolError) -> None:
        """Set the exception of the future, unless it was cancelled."""
        if not target.done():
            target.set_exception(error)


class EnvelopeStreamSink(Sink):
    """A StreamTarget for each request: its queue gets each Chunk, and the Result as the value of a Reply. A
    model that does not step has no chunks: then the Result is in the queue, too."""

    takes_chunks = True

    def put(self, target: StreamTarget, envelope: Envelope) -> None:
        """Pass the final result on. One that is not OK is an error."""
        result = _result_of(envelope)
        if result.status == OK:
            target.put_output(reply_of(result, envelope), result.index)
        else:
            target.fail(error_for(result.status, result.detail or "", result.correlation_id))

    def put_chunk(self, target: StreamTarget, envelope: Envelope) -> None:
        """Pass a chunk on. Raises InternalError if some chunks before it are missing."""
        merged = envelope.get("values") or envelope.get("chunks", 1)
        correlation_id, content_type = envelope["correlation_id"], envelope["content_type"]
        body, index = envelope["body"], envelope["index"]
        chunk = Chunk(correlation_id, content_type, body, index, merged, "values" in envelope)
        target.put_chunk(index, (chunk,))

    def fail(self, target: StreamTarget, error: Exception) -> None:
        """Pass an error on."""
        target.fail(error)


def _result_of(envelope: Envelope) -> Result:
    return Result(**{name: envelope[name] for name in Result._fields if name in envelope})
