"""Carpool: the models for its worker, and clients.

Batcher and worker are started as in docs/operating.md. The producer is one `AsyncClient`, which is what
README shows. The client `packed` sends the rows of an array with `infer_many`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from carpool.client.aio import AsyncClient
from carpool.wire.tensors import TensorSpec
from grid.models import MODELS, Array
from grid.setup import Setup

_ROWS_PER_IN_FLIGHT: Final = 32


class _Served:
    """A model of `models.py` for Carpool, which passes a batch as one array."""

    name: ClassVar[str]
    max_queue_size = 200_000  # more than any workload sends at once

    def __init__(self) -> None:
        model = MODELS[self.name]
        self.max_batch_size = Setup.from_environment().batch_size
        self.inputs = (TensorSpec("x", model.datatype, model.shape),)
        self.outputs = (TensorSpec("y", model.datatype, model.result_shape),)

    def predict(self, batch: Array) -> Array:
        """(n, *shape) -> (n, *result_shape)."""
        results: Sequence[Array] = MODELS[self.name].predict(batch)  # type: ignore[arg-type]  # rows are arrays
        return np.stack(results)


class Noop(_Served):
    """Returns the batch itself, as the models of the other systems do."""

    name = "noop"

    def predict(self, batch: Array) -> Array:
        """(n, 128) -> the same."""
        return batch


class Sleeper(Noop):
    """Sleeps, and returns the batch."""

    name = "sleeper"

    def predict(self, batch: Array) -> Array:
        """(n, 128) -> the same."""
        MODELS[self.name].predict(batch)  # type: ignore[arg-type]
        return batch


class Image(_Served):
    """8 bytes of each image."""

    name = "image"


class Picture(_Served):
    """The same of smaller images."""

    name = "picture"


class Square(_Served):
    """Squares."""

    name = "square"


class CarpoolClient:
    """One AsyncClient; a call is `infer`, with nothing in between."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        self._client = client
        self.call = partial(client.infer, model)

    async def close(self) -> None:
        """Disconnect."""
        await self._client.close()


class PackedClient(CarpoolClient):
    """As above, but a call sends an array of requests."""

    def __init__(self, client: AsyncClient, model: str) -> None:
        super().__init__(client, model)
        self._in_flight = 1
        self._infer_many = partial(client.infer_many, model)

    def rows_per_call(self, in_flight: int) -> int:
        """Many more than may be in flight, which `infer_many` keeps to."""
        self._in_flight = in_flight
        return in_flight * _ROWS_PER_IN_FLIGHT

    def body_of(self, body: Array, rows: int) -> Array:
        """An array of `rows` requests with this body."""
        return np.tile(body, (rows, *[1] * body.ndim))

    async def call_rows(self, rows: Array) -> Any:
        """Send each row as a request."""
        return await self._infer_many(rows, in_flight=self._in_flight)


async def connect(setup: Setup) -> CarpoolClient:
    """The client that the setup names."""
    client = AsyncClient(setup.redis_url)
    await client.connect()
    return (PackedClient if setup.client == "packed" else CarpoolClient)(client, setup.model)
