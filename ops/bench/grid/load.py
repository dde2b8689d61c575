"""The load generators: every system is driven by these loops, in the producer process.

A client has one method, `call`: a body in, a result out. It is a coroutine function, or it blocks; a client
that blocks is called from as many threads as requests are in flight. Optional are `call_rows`, which sends
several requests in one call, `burst`, which sends a list of them, and `closed_loop`, for a client that is a
program in C and has a loop of its own.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

from grid.models import Array

WITHIN_MS: Final = 50.0
WARM_UP_S: Final = 0.25
GRACE_S: Final = 2.0
THREADS_MAX: Final = 1024  # of clients that block

_pools: Final[dict[int, ThreadPoolExecutor]] = {}  # by the number of threads


class Client(Protocol):
    """What a file in `systems/` provides."""

    call: Callable[[Array], Any]

    async def close(self) -> None: ...


@runtime_checkable
class ClientOfRows(Client, Protocol):
    """A client that can also send several requests in one call."""

    def rows_per_call(self, in_flight: int) -> int: ...

    def body_of(self, body: Array, rows: int) -> Any: ...

    def call_rows(self, bodies: Any) -> Any: ...


class ThreadedClient:
    """The base of a client that blocks, and of which many threads would cost too much.

    With more requests in flight, each of at most `threads_max` threads sends several.
    """

    threads_max = 64

    def rows_per_call(self, in_flight: int) -> int:
        """What each of the threads sends."""
        return max(1, in_flight // self.threads_max)

    def body_of(self, body: Array, rows: int) -> list[Array]:
        """Several requests with this body."""
        return [body] * rows

    def call_rows(self, bodies: Sequence[Array]) -> list[Array]:
        """Send all requests, then wait for all results."""
        raise NotImplementedError

    async def burst(self, bodies: Sequence[Array]) -> list[Array]:
        """The same, from the event loop."""
        return await asyncio.to_thread(self.call_rows, bodies)


class Sent(NamedTuple):
    """What a load generator saw."""

    requests: int  # that were answered
    seconds: float
    latencies_ms: Sequence[float]  # of all requests, or none where their measurement would cost too much
    refused: int = 0  # calls that were answered with a status of an error
    broken: int = 0  # calls without an answer: their connection broke, or it came too late


async def closed_loop(client: Client, body: Array, in_flight: int, seconds: float) -> Sent:
    """Keep this number of requests in flight. Latencies are measured for a lone request."""
    own = getattr(client, "closed_loop", None)
    if own is not None:
        sent: Sent = await own(body, in_flight, seconds)
        return sent
    if not inspect.iscoroutinefunction(client.call):
        return await asyncio.to_thread(_closed_loop_of_threads, client, body, in_flight, seconds)
    call: Callable[[Any], Any] = client.call
    rows = 1
    if isinstance(client, ClientOfRows):
        rows = client.rows_per_call(in_flight)
        call, body = client.call_rows, client.body_of(body, rows)
    latencies_ms: list[float] = []
    done, end_s = 0, time.perf_counter() + seconds

    async def one_after_another() -> None:
        nonlocal done
        while time.perf_counter() < end_s:
            await call(body)
            done += 1

    async def one_alone() -> None:
        nonlocal done
        while (started_s := time.perf_counter()) < end_s:
            await call(body)
            latencies_ms.append((time.perf_counter() - started_s) * 1e3)
            done += 1

    started_s = time.perf_counter()
    if in_flight == 1:
        await one_alone()
    else:
        await asyncio.gather(*[one_after_another() for _ in range(max(1, in_flight // rows))])
    return Sent(done * rows, time.perf_counter() - started_s, latencies_ms)


def _closed_loop_of_threads(client: Client, body: Array, in_flight: int, seconds: float) -> Sent:
    """The same for a client that blocks. Every thread calls at least once, and is kept for the next loop."""
    call: Callable[[Any], Any] = client.call
    rows = 1
    threads = min(in_flight, getattr(client, "threads_max", in_flight))
    if isinstance(client, ClientOfRows) and threads < in_flight:
        rows = client.rows_per_call(in_flight)
        call, body = client.call_rows, client.body_of(body, rows)
    counts, latencies_ms = [0] * threads, []
    barrier = threading.Barrier(threads + 1)
    end_s = 0.0

    def one_after_another(number: int) -> None:
        barrier.wait()
        while True:
            started_s = time.perf_counter()
            call(body)
            counts[number] += rows
            if in_flight == 1:
                latencies_ms.append((time.perf_counter() - started_s) * 1e3)
            if time.perf_counter() > end_s:
                return

    pool = _pools.setdefault(threads, ThreadPoolExecutor(threads))
    loops = [pool.submit(one_after_another, number) for number in range(threads)]
    started_s = time.perf_counter()
    end_s = started_s + seconds
    barrier.wait()
    for loop in loops:
        loop.result()
    return Sent(sum(counts), time.perf_counter() - started_s, latencies_ms)


async def poisson(client: Client, body: Array, per_second: float, seconds: float, seed: int) -> Sent:
    """Requests that arrive at random, whether or not earlier ones have been answered.

    An event loop wakes up to a millisecond late, and then sends all that are due. A latency is counted from
    the time at which the request was due, so that a client that falls behind does not look fast. A request
    that has no result GRACE_S after the last was sent counts with the latency that it has then.
    """
    arrivals = random.Random(seed)  # noqa: S311
    latencies_ms: list[float] = []
    unanswered: set[asyncio.Task[None]] = set()
    call = awaitable_call(client, THREADS_MAX // 4)
    started_s = due_s = time.perf_counter()

    async def ask(due_s: float) -> None:
        try:
            await call(body)
        finally:
            latencies_ms.append((time.perf_counter() - due_s) * 1e3)

    with no_garbage_collection():
        while (due_s := due_s + arrivals.expovariate(per_second)) < started_s + seconds:
            while (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            task = asyncio.create_task(ask(due_s))
            unanswered.add(task)
            task.add_done_callback(unanswered.discard)
        if unanswered:
            await asyncio.wait(set(unanswered), timeout=GRACE_S)
    seconds = time.perf_counter() - started_s
    late = list(unanswered)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    return Sent(len(latencies_ms), seconds, latencies_ms)


async def burst(
    client: Client,
    bodies: Sequence[Array],
    limit_s: float,
    check: Callable[[Array, Array], None] | None = None,
) -> Sent:
    """All requests at once; until all are answered, or for `limit_s`. `check` gets each body and its
    result."""
    own = getattr(client, "burst", None)
    started_s = time.perf_counter()
    if own is not None:
        results = await own(bodies)
        seconds = time.perf_counter() - started_s
        for body, result in zip(bodies, results, strict=True):
            if check:
                check(body, result)
        return Sent(len(bodies), seconds, ())
    call, numbers = awaitable_call(client, THREADS_MAX), iter(range(len(bodies)))
    answers: dict[int, Any] = {}

    async def one_after_another() -> None:
        for number in numbers:
            answers[number] = await call(bodies[number])

    async def one(number: int) -> None:
        answers[number] = await call(bodies[number])

    limit = getattr(client, "in_flight_max", None)
    sending = map(one, numbers) if limit is None else (one_after_another() for _ in range(limit))
    done, unfinished = await asyncio.wait([asyncio.ensure_future(each) for each in sending], timeout=limit_s)
    seconds = time.perf_counter() - started_s
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
    for task in done:
        task.result()  # raises what a request raised
    for number, result in answers.items():
        if check:
            check(bodies[number], result)
    return Sent(len(answers), seconds, ())


def awaitable_call(client: Client, threads_max: int) -> Callable[[Array], Awaitable[Any]]:
    """`client.call` as a coroutine function."""
    if inspect.iscoroutinefunction(client.call):
        return client.call
    loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(threads_max)
    return lambda body: loop.run_in_executor(pool, client.call, body)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A collection would pause the load generator for 20 ms."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least one value."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]
