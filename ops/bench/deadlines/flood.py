"""A flood: bodies that are refused, or on which the model raises, from a producer in a process of its own."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from typing import Final, NamedTuple

from carpool.client.aio import AsyncClient
from carpool.errors import CarpoolError
from deadlines.stack import MODEL

START_S: Final = 30.0


class Flood(NamedTuple):
    """`bodies` together, at each interval. They have no deadline. `name` says how they end."""

    name: str
    body: str
    bodies: int
    interval_s: float

    @property
    def description(self) -> str:
        """The flood as text."""
        together = f"{self.bodies} together" if self.bodies > 1 else "one at a time"
        return f"{self.name}, {self.bodies / self.interval_s:,.0f}/s, {together}"


FLOODS: Final = {
    "refused": Flood("`validate` raises", "refuse", 10, 0.01),
    "bursts": Flood("`predict` raises", "raise", 100, 1.0),
    "raising": Flood("`predict` raises", "raise", 1, 0.01),
}


@contextmanager
def flood(url: str, flood: Flood) -> Iterator[None]:
    """Send a flood during a `with` block. Raises RuntimeError if none of its bodies failed meanwhile."""
    context = multiprocessing.get_context("spawn")
    started, failed = context.Event(), context.Value("l", 0)
    process = context.Process(target=_send, args=(url, flood, started, failed), daemon=True)
    process.start()
    try:
        if not started.wait(START_S):
            raise RuntimeError("the flood did not start")
        yield
    finally:
        process.terminate()
        process.join()
    if not failed.value:
        raise RuntimeError("no body of the flood failed")


def _send(url: str, flood: Flood, started: Event, failed: Synchronized[int]) -> None:
    asyncio.run(_send_until_terminated(url, flood, started, failed))


async def _send_until_terminated(url: str, flood: Flood, started: Event, failed: Synchronized[int]) -> None:
    async with AsyncClient(url, timeout=None) as client, asyncio.TaskGroup() as unanswered:

        async def burst() -> None:
            results = await client.infer_many(MODEL, [flood.body] * flood.bodies, return_exceptions=True)
            failed.value += sum(isinstance(result, CarpoolError) for result in results)

        await client.models()
        started.set()
        while True:
            unanswered.create_task(burst())
            await asyncio.sleep(flood.interval_s)
