"""service-streamer: a queue between the threads of a program and worker processes that it starts.

As its documents advise (https://github.com/ShannonAI/service-streamer): `Streamer(predict, batch_size,
max_latency, worker_num)`, called as `streamer.predict([body])` from the threads of a web server; many
requests at once are a list of `submit` and a list of `result`. Client, batcher and worker are one process
tree on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence

from service_streamer import Streamer

from grid.load import ThreadedClient
from grid.models import MODELS, Array
from grid.setup import Setup

TIMEOUT_S = 60


class StreamerClient(ThreadedClient):
    """Calls the Streamer."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def call(self, body: Array) -> Array:
        """One request."""
        result: Array = self._streamer.predict([body])[0]
        return result

    def call_rows(self, bodies: Sequence[Array]) -> list[Array]:
        """All requests, then all results."""
        sent = [self._streamer.submit([body]) for body in bodies]
        return [future.result(TIMEOUT_S)[0] for future in sent]

    async def close(self) -> None:
        """Stop its worker process."""
        self._streamer.destroy_workers()


async def connect(setup: Setup) -> StreamerClient:
    """Start the worker process."""
    streamer = Streamer(
        MODELS[setup.model].predict, setup.batch_size, max_latency=setup.wait_ms / 1e3, worker_num=1
    )
    return StreamerClient(streamer)
