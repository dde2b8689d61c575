"""Producers in Python: `AsyncClient`, and `Client` for programs without an event loop.

sync          Client: AsyncClient on a thread of its own
aio           AsyncClient
options       the options of requests
encoding      values -> bodies
awaited       requests without a result
transport     the two connections to Redis, and how they are restored
entries       requests on their way to Redis, in entries
timeouts      timers of entries
reading       results -> values
sinks         where values go: to futures, to a window in order, or to one array
streams       where chunks go: to an iterator for each request
sequences     requests to a model that keeps a state between them
"""

from carpool.client.aio import AsyncClient
from carpool.client.sequences import AsyncSequence, BlockingSequence
from carpool.client.sinks import Reply
from carpool.client.streams import AsyncStream, Stream
from carpool.client.sync import Client

__all__ = [
    "AsyncClient",
    "AsyncSequence",
    "AsyncStream",
    "BlockingSequence",
    "Client",
    "Reply",
    "Stream",
]
