"""celery-batches on Celery with Redis as broker and result backend.

As its documents advise (https://celery-batches.readthedocs.io): a task with `base=Batches, flush_every,
flush_interval`, `worker_prefetch_multiplier = 0` so that a batch can fill, and results returned with
`app.backend.mark_as_done`. Messages are JSON, Celery's default, and bodies text in base64. The client calls
`delay(...).get()` from threads, since Celery has no client for asyncio; many requests at once are a list of
`delay` and a list of `get`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from celery import Celery
from celery.result import ResultSet
from celery_batches import Batches

from grid.load import ThreadedClient
from grid.models import MODELS, Array
from grid.setup import Setup

SETUP = Setup.from_environment()
MODEL = MODELS[SETUP.model]
TIMEOUT_S = 60

app = Celery("bench", broker=SETUP.redis_url, backend=SETUP.redis_url)
app.conf.update(worker_prefetch_multiplier=0, result_expires=600)


@app.task(base=Batches, flush_every=SETUP.batch_size, flush_interval=SETUP.wait_ms / 1e3, name="predict")
def predict(requests: Sequence[Any]) -> None:
    """A batch: each request has one argument."""
    results = MODEL.predict([MODEL.decode_body(base64.b64decode(request.args[0])) for request in requests])
    for request, result in zip(requests, results, strict=True):
        app.backend.mark_as_done(request.id, base64.b64encode(result.tobytes()).decode(), request=request)


class CeleryClient(ThreadedClient):
    """Each thread has a connection for its results."""

    def call(self, body: Array) -> Array:
        """Send a task and wait for its result."""
        return _decode(predict.delay(_encode(body)).get(timeout=TIMEOUT_S))

    def call_rows(self, bodies: Sequence[Array]) -> list[Array]:
        """Send all tasks, then wait for all results."""
        sent = ResultSet([predict.delay(_encode(body)) for body in bodies])
        return [_decode(text) for text in sent.join_native(timeout=TIMEOUT_S)]

    async def close(self) -> None:
        """Disconnect."""
        app.close()


def _encode(body: Array) -> str:
    return base64.b64encode(body.tobytes()).decode()


def _decode(text: str) -> Array:
    return MODEL.decode_result(base64.b64decode(text))


async def connect(_: Setup) -> CeleryClient:
    """A client."""
    return CeleryClient()
