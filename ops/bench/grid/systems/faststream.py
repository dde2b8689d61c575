"""FastStream on Redis Streams: a broker library, with which batching is written by hand.

As its documents advise (https://faststream.ag2.ai/latest/redis/streams/batch/): a subscriber with
`StreamSub(batch=True, max_records=...)` in a consumer group takes what is in the stream, up to a full batch.
It has no requests and replies for batches, so the service publishes the results of a batch as one message for
each producer, on a channel that the requests name. Messages are JSON, and bodies text in base64.
"""

from __future__ import annotations

import asyncio
import base64
import os
from collections import defaultdict
from itertools import count
from typing import Any

from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub

from grid.models import MODELS, Array
from grid.setup import Setup

CONNECTIONS_MAX = 2048  # a publication that is under way has a connection of its own
SETUP = Setup.from_environment()
MODEL = MODELS[SETUP.model]


def service() -> FastStream:
    """The service."""
    broker = RedisBroker(SETUP.redis_url, logger=None, max_connections=CONNECTIONS_MAX)
    requests = StreamSub(
        "requests", group="workers", consumer="worker", batch=True, max_records=SETUP.batch_size
    )

    @broker.subscriber(stream=requests)
    async def serve(messages: list[dict[str, Any]]) -> None:
        results = MODEL.predict(
            [MODEL.decode_body(base64.b64decode(message["body"])) for message in messages]
        )
        replies: dict[str, list[tuple[int, str]]] = defaultdict(list)
        for message, result in zip(messages, results, strict=True):
            body = base64.b64encode(result.tobytes()).decode()
            replies[message["reply_to"]].append((message["id"], body))
        for channel, reply in replies.items():
            await broker.publish(reply, channel=channel)

    return FastStream(broker, logger=None)


class FastStreamClient:
    """Publishes each request to the stream; a subscriber to its channel resolves the futures."""

    in_flight_max = 1024

    def __init__(self) -> None:
        self._broker = RedisBroker(SETUP.redis_url, logger=None, max_connections=CONNECTIONS_MAX)
        self._channel = f"results-{os.getpid()}"
        self._numbers = count()
        self._awaited: dict[int, asyncio.Future[Array]] = {}

        @self._broker.subscriber(self._channel)
        async def receive(results: list[tuple[int, str]]) -> None:
            for number, body in results:
                future = self._awaited.pop(number)
                if not future.done():
                    future.set_result(MODEL.decode_result(base64.b64decode(body)))

    async def start(self) -> None:
        """Connect and subscribe."""
        await self._broker.start()

    async def call(self, body: Array) -> Array:
        """Publish a request and wait for its result."""
        number = next(self._numbers)
        future: asyncio.Future[Array] = asyncio.get_running_loop().create_future()
        self._awaited[number] = future
        text = base64.b64encode(body.tobytes()).decode()
        await self._broker.publish({"id": number, "reply_to": self._channel, "body": text}, stream="requests")
        return await future

    async def close(self) -> None:
        """Disconnect."""
        await self._broker.stop()


async def connect(_: Setup) -> FastStreamClient:
    """A client."""
    client = FastStreamClient()
    await client.start()
    return client


if __name__ == "__main__":
    asyncio.run(service().run())
