"""The producer on the real system: an AsyncClient that sends requests when due, and reads streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from itertools import groupby

from service_processes import CpuMeter

from carpool.client.aio import AsyncClient
from carpool.client.streams import AsyncStream
from stepping.heard import Heard, Sent
from stepping.workloads import Ask, Window


async def send(
    client: AsyncClient, model: str, asks: Sequence[Ask], window: Window | None, meter: CpuMeter
) -> Sent:
    """Send until all are answered, or until the window is over; what is then left is withdrawn."""
    sending = _Sending(client, model, asks)
    async with asyncio.TaskGroup() as readers:
        sender = readers.create_task(sending.send_all(readers))
        if window is not None:
            await sending.sleep_until(window.span_s)
            meter.stop()
            while sending.without_token and sending.now_s() < window.until_s:
                await asyncio.sleep(0.01)
            sender.cancel()
            for reader in sending.readers:
                reader.cancel()  # which withdraws its request
    return Sent(sending.heard, window, sending.now_s(), meter.stop())


class _Sending:
    """A run: its requests, and the tasks that read them."""

    def __init__(self, client: AsyncClient, model: str, asks: Sequence[Ask]) -> None:
        self._client, self._model = client, model
        self.heard = [Heard(ask) for ask in asks]
        self.without_token = len(asks)
        self.readers: list[asyncio.Task[None]] = []
        self._start_s = time.monotonic()

    def now_s(self) -> float:
        """Since the start."""
        return time.monotonic() - self._start_s

    async def sleep_until(self, at_s: float) -> None:
        """Sleep until a time after the start."""
        while (wait_s := at_s - self.now_s()) > 0:
            await asyncio.sleep(wait_s)

    async def send_all(self, readers: asyncio.TaskGroup) -> None:
        """Send each request when it is due, together with those that are due at the same time."""
        for due_s, group in groupby(self.heard, lambda heard: heard.ask.due_s):
            await self.sleep_until(due_s)
            together = list(group)
            started_s = time.perf_counter()
            streams = [self._client.stream(self._model, heard.ask.body, timeout=None) for heard in together]
            await asyncio.sleep(0)  # the client writes what was sent in one iteration of the event loop
            submit_s = (time.perf_counter() - started_s) / len(together)
            for heard, stream in zip(together, streams, strict=True):
                heard.submit_s = submit_s
                self.readers.append(readers.create_task(self._read(heard, stream)))

    async def _read(self, heard: Heard, stream: AsyncStream) -> None:
        async for chunk in stream:
            self.without_token -= not heard.read_s
            heard.read(chunk, self.now_s(), self._start_s)
