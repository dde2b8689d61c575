"""The design of the articles "Service Batching from Scratch", with only the standard library.

A batcher in the process of the requests collects them in a buffer until it is full or a timeout is over.
Batches go through a queue to a worker process and come back in order through another. Names and waiting times
are the articles': their loops poll the queues every 1.5 and 1.8 ms, and a batch of up to 200 waits for up to
0.1 s.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
from typing import Any, Final

from grid.models import MODELS, Array
from grid.setup import Setup

_MAX_QUEUE_SIZE: Final = 32


def run_worker(model: str, q_in: mp.Queue[Any], q_out: mp.Queue[Any]) -> None:
    """The worker process: one batch after another."""
    transform = MODELS[model].predict
    q_out.put(None)  # ready
    while True:
        q_out.put(transform(q_in.get()))


class BatchedService:
    """The main process of the articles."""

    def __init__(self, model: str, max_batch_size: int, timeout_seconds: float) -> None:
        self.max_batch_size = max_batch_size
        self.timeout_seconds = timeout_seconds
        self._loop = asyncio.get_running_loop()
        self._batch: list[Array] = []
        self._batch_futures: list[asyncio.Future[Array]] = []
        self._submit_batch_timer: asyncio.TimerHandle | None = None
        self._q_batches: asyncio.Queue[Any] = asyncio.Queue(_MAX_QUEUE_SIZE)
        self._q_future_results: asyncio.Queue[Any] = asyncio.Queue()
        self._q_to_worker: mp.Queue[Any] = mp.Queue(_MAX_QUEUE_SIZE)
        self._q_from_worker: mp.Queue[Any] = mp.Queue(_MAX_QUEUE_SIZE)
        queues = (self._q_to_worker, self._q_from_worker)
        self._p_worker = mp.Process(target=run_worker, args=(model, *queues), daemon=True)
        self._p_worker.start()
        self._q_from_worker.get()
        self._tasks = [
            asyncio.create_task(self._run_preprocess()),
            asyncio.create_task(self._run_postprocess()),
        ]

    async def do_one(self, x: Array) -> Array:
        """A request: its result."""
        while len(self._batch) >= self.max_batch_size:
            await asyncio.sleep(self.timeout_seconds * 0.02)
        future = self._loop.create_future()
        self._batch.append(x)
        self._batch_futures.append(future)
        if len(self._batch) == self.max_batch_size:
            self._submit_batch()
        elif len(self._batch) == 1:
            self._submit_batch_timer = self._loop.call_later(self.timeout_seconds, self._submit_batch)
        result: Array = await future
        return result

    def _submit_batch(self) -> None:
        if self._submit_batch_timer is not None:
            self._submit_batch_timer.cancel()
            self._submit_batch_timer = None
        if self._q_batches.full():
            self._submit_batch_timer = self._loop.call_later(self.timeout_seconds * 0.1, self._submit_batch)
            return
        self._q_batches.put_nowait((self._batch, self._batch_futures))
        self._batch, self._batch_futures = [], []

    async def _run_preprocess(self) -> None:
        while True:
            x, futures = await self._q_batches.get()
            while self._q_to_worker.full():
                await asyncio.sleep(0.0015)
            self._q_to_worker.put(x)
            self._q_future_results.put_nowait(futures)

    async def _run_postprocess(self) -> None:
        while True:
            while self._q_from_worker.empty():
                await asyncio.sleep(0.0018)
            results = self._q_from_worker.get()
            await asyncio.sleep(0)
            for future, result in zip(self._q_future_results.get_nowait(), results, strict=True):
                if not future.done():
                    future.set_result(result)

    def stop(self) -> None:
        """Stop the worker process."""
        for task in self._tasks:
            task.cancel()
        self._p_worker.terminate()


class ArticlesClient:
    """A call is `do_one`."""

    def __init__(self, service: BatchedService) -> None:
        self._service = service
        self.call = service.do_one

    async def close(self) -> None:
        """Stop the service."""
        self._service.stop()


async def connect(setup: Setup) -> ArticlesClient:
    """Start the service. The setup's waiting time is the articles' timeout."""
    return ArticlesClient(BatchedService(setup.model, setup.batch_size, setup.wait_ms / 1e3))
