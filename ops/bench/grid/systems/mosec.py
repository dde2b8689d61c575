"""mosec: HTTP server in Rust, which batches for a worker process in Python.

As its documents advise: `append_worker(max_batch_size, max_wait_time)` enables dynamic batching
(https://mosecorg.github.io/mosec/reference/interface.html), and a worker overrides `deserialize` and
`serialize` for binary bodies, which saves the JSON of the default. The queue (`--capacity`) holds all
requests that the bench sends. Clients: aiohttp, and wrk, which is written in C.
"""

from __future__ import annotations

from mosec import Server, Worker

from grid.models import MODELS, Array
from grid.setup import Setup
from grid.systems.clients_http import connect_http

SETUP = Setup.from_environment()
MODEL = MODELS[SETUP.model]


class Served(Worker):
    """The model."""

    resp_mime_type = "application/octet-stream"

    def deserialize(self, data: bytes) -> Array:
        """Raw bytes -> an array."""
        return MODEL.decode_body(data)

    def forward(self, data: list[Array]) -> list[Array]:
        """A batch."""
        return MODEL.predict(data)

    def serialize(self, data: Array) -> bytes:
        """An array -> raw bytes."""
        return data.tobytes()


connect = connect_http

if __name__ == "__main__":
    server = Server()
    server.append_worker(
        Served, num=1, max_batch_size=SETUP.batch_size, max_wait_time=max(1, round(SETUP.wait_ms)), timeout=60
    )
    server.run()
