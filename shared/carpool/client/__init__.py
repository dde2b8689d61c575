"""Producers in Python: `AsyncClient`, and `Client` for programs without an event loop.

on_behalf     clients of models that call others, one for each request that they execute
sync          Client: AsyncClient on a thread of its own
loop_thread   the thread of Client: its event loop, and waits that end
aio           AsyncClient: values and options -> encoded requests
sending       values and options -> requests in `packing`: the half of AsyncClient that sends
producer      connections and models, for AsyncClient and front ends of other protocols
packing       encoded requests -> entries, until each has a result
options       the options of requests
encoding      values -> bodies
entries       requests on their way to Redis, in entries
awaited       requests without a result
sinks         where values go: to futures, to a window in order, or to one array
envelopes     sinks of front ends: results and chunks with the bytes of their bodies
streams       where chunks go: to an iterator for each request
spans         traces of what is sent, if the program has set up OpenTelemetry
enqueued      requests whose results any process reads by their IDs
sequences     requests to a model that keeps a state between them
reading       results -> values, for sinks
retries       requests are sent again that ended with a status which may pass
durability    what Redis is asked for before a request counts as accepted
lookup        whether a model is registered, is being loaded, and can be used
timeouts      timers of entries
absences      whether a worker serves a model of which requests timed out
reply_reads   what to ask of the reply streams next
transport     the two connections to Redis, and how they are restored
cluster       a transport for each hash slot that has models
"""

from carpool.client.aio import AsyncClient
from carpool.client.on_behalf import AsyncRequestClient, RequestClient
from carpool.client.options import RequestOptions
from carpool.client.sequences import AsyncSequence, BlockingSequence
from carpool.client.sinks import Reply
from carpool.client.streams import AsyncStream, Stream
from carpool.client.sync import Client

__all__ = [
    "AsyncClient",
    "AsyncRequestClient",
    "AsyncSequence",
    "AsyncStream",
    "BlockingSequence",
    "Client",
    "Reply",
    "RequestClient",
    "RequestOptions",
    "Stream",
]
