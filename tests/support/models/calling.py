"""Models that call others, on behalf of their requests, and models to be called."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from carpool import AsyncRequestClient, InvalidArgumentError, RequestClient


class Ask:
    """Asks the model that the body names, as {"model": ..., "body": ...}; or each of a list of them."""

    async def predict(self, batch: list[Any], clients: list[AsyncRequestClient]) -> list[Any]:
        return await asyncio.gather(*map(self.one, batch, clients), return_exceptions=True)

    async def one(self, body: Any, client: AsyncRequestClient) -> Any:
        if "bodies" in body:
            return await client.infer_many(body["model"], body["bodies"])
        return await client.infer(body["model"], body["body"], **body.get("options", {}))


class AskRaising(Ask):
    """The same, but raises the first error."""

    async def predict(self, batch: list[Any], clients: list[AsyncRequestClient]) -> list[Any]:
        return await asyncio.gather(*map(self.one, batch, clients))


class AskPlain:
    """The same, and waits with its process."""

    def predict(self, batch: list[Any], clients: list[RequestClient]) -> list[Any]:
        results: list[Any] = []
        for body, client in zip(batch, clients, strict=True):
            if "bodies" in body:
                results.append(client.infer_many(body["model"], body["bodies"]))
            else:
                results.append(client.infer(body["model"], body["body"]))
        return results


class Picky:
    """Doubles numbers, and refuses what is no number."""

    def predict(self, batch: list[Any]) -> list[Any]:
        return [2 * body if isinstance(body, int) else InvalidArgumentError("not a number") for body in batch]


class Seen:
    """Tells what a request has beside its body."""

    def predict(self, batch: list[Any], requests: list[Any]) -> list[Any]:
        return [
            {"id": one.correlation_id, **{name: value.decode() for name, value in one.fields.items()}}
            for one in requests
        ]


class Hold:
    """Appends each body to the first file that it names, and waits until the second one exists."""

    max_batch_size = 1

    def predict(self, batch: list[Any]) -> list[Any]:
        for name, log, gate in batch:
            with Path(log).open("a", encoding="utf-8") as file:
                file.write(f"{name}\n")
            while not Path(gate).exists():
                time.sleep(0.01)
        return batch


class Meet:
    """Returns when as many requests as a body says are executed at a time, each in a batch of its own, or a
    file exists."""

    max_batch_size = 1
    max_concurrent_batches = 4

    def __init__(self) -> None:
        self.here = 0

    async def predict(self, batch: list[Any]) -> list[Any]:
        ((count, path),) = batch
        self.here += 1
        Path(f"{path}.{self.here}").touch()
        while self.here < count and not Path(path).exists():
            await asyncio.sleep(0.01)
        return [self.here]
