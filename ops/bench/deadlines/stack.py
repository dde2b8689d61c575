"""Redis, a batcher and a worker that sleeps as long as a model takes, for the time of a `with` block."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from service_processes import start, stop

from carpool.client.aio import AsyncClient
from carpool.errors import NotFoundError
from carpool_cli.local.embedded import EmbeddedRedis

MODEL: Final = "modelled"
_FILE: Final = Path(__file__).parents[1] / "modelled.py"
_ATTEMPTS: Final = 400


@contextmanager
def stack(model: str, workers: int) -> Iterator[str]:
    """The URL of a Redis whose MODEL is this one, with a model process for each of `workers`.

    The services use Redis's Unix socket, as those of `carpool up` do.
    """
    worker = ["carpool_worker", f"{MODEL}={_FILE}:Modelled"]
    with EmbeddedRedis() as server, tempfile.TemporaryFile() as log:
        services = [
            start(server.services_url, log, "carpool_batcher", CARPOOL_LOG_LEVEL="warning"),
            start(
                server.services_url, log, *worker, CARPOOL_LOG_LEVEL="warning", CARPOOL_REPLICAS=str(workers),
                CARPOOL_BENCH_MODEL=model,
            ),
        ]  # fmt: skip
        try:
            yield server.url
        finally:
            stop(services)


async def until_served(client: AsyncClient) -> None:
    """Wait until a worker serves the model."""
    for _ in range(_ATTEMPTS):
        try:
            await client.infer(MODEL, 1)
        except NotFoundError:
            await asyncio.sleep(0.05)
        else:
            return
    raise SystemExit("no worker became ready")
