"""LitServe: FastAPI in one process, the model in another, which collects the batches.

As its documents advise: `max_batch_size` and `batch_timeout` for batching
(https://lightning.ai/docs/litserve/features/batching), and `fast_queue=True` (ZeroMQ) for throughput.
Requests are JSON, its default; a body is text in base64, as its documents send images, because a list of
numbers would cost more. `batch` and `unbatch` keep the batch as a list. There is one API
server for the one worker, which is its default.
"""

from __future__ import annotations

import base64
import json

import litserve as ls

from grid.models import MODELS, Array
from grid.setup import Setup
from grid.systems.client_wrk import WrkClient
from grid.systems.clients_http import AiohttpClient, http_client

SETUP = Setup.from_environment()
MODEL = MODELS[SETUP.model]


class Served(ls.LitAPI):
    """The model."""

    def setup(self, device: str) -> None:
        """There is nothing to load."""

    def decode_request(self, request: dict[str, str]) -> Array:
        """JSON -> an array."""
        return MODEL.decode_body(base64.b64decode(request["input"]))

    def batch(self, inputs: list[Array]) -> list[Array]:
        """The model takes a list."""
        return inputs

    def predict(self, batch: list[Array]) -> list[Array]:
        """A batch."""
        return MODEL.predict(batch)

    def unbatch(self, output: list[Array]) -> list[Array]:
        """The model returns a list."""
        return output

    def encode_response(self, output: Array) -> dict[str, str]:
        """An array -> JSON."""
        return {"output": base64.b64encode(output.tobytes()).decode()}


async def connect(setup: Setup) -> AiohttpClient | WrkClient:
    """The client that the setup names."""
    return await http_client(
        setup,
        "/predict",
        "application/json",
        lambda body: json.dumps({"input": base64.b64encode(body.tobytes()).decode()}).encode(),
        lambda data: MODEL.decode_result(base64.b64decode(json.loads(data)["output"])),
    )


if __name__ == "__main__":
    api = Served(max_batch_size=SETUP.batch_size, batch_timeout=SETUP.wait_ms / 1e3)
    server = ls.LitServer(api, accelerator="cpu", fast_queue=True, timeout=60)
    server.run(host="127.0.0.1", port=SETUP.port, generate_client_file=False, log_level="warning")
