"""The blocking producer: `Client`, for programs without an event loop. It runs an `AsyncClient` on a thread.

with Client("redis://127.0.0.1:6379/0") as client:
    print(client.infer("square", 7))                 # 49
    future = client.submit("square", 8)              # a concurrent.futures.Future
    for result in client.map("square", range(1000)): # in order, at most 1,024 in flight
        ...
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from carpool.client.aio import DEFAULT_TIMEOUT_S, IN_FLIGHT, AsyncClient, Reply, RequestOptions
from carpool.errors import UnavailableError

__all__ = ["AsyncClient", "Client", "Reply"]

T = TypeVar("T")


class Client:
    """`AsyncClient` on a thread of its own. Any number of threads may share one Client."""

    def __init__(
        self,
        url: str | None = None,
        *,
        prefix: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
    ) -> None:
        self._client = AsyncClient(url, prefix=prefix, timeout=timeout)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="carpool client", daemon=True)
        self._thread.start()
        self._closed = False

    def __enter__(self) -> Self:
        try:
            self.connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def connect(self) -> None:
        """Connect now, not with the first request. Raises UnavailableError if Redis cannot be reached."""
        self._start(self._client.connect()).result()

    def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the model's result; options and errors as for AsyncClient.infer."""
        return self._wait(self.submit(model, body, **options))

    def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, but also return how the request was executed."""
        return self._wait(self._start(self._client.request(model, body, **options)))

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Future[Any]:
        """As `infer`, but return a future at once. Cancelling it withdraws the request."""
        return self._start(self._client.infer(model, body, **options))

    def map(
        self,
        model: str,
        bodies: Iterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Any]:
        """Send a request for each of `bodies`, and yield the results in the same order.

        `bodies` may be endless: at most `in_flight` requests have no result at any time. An error is raised
        in its turn, or yielded with `return_exceptions`. Closing the iterator withdraws what still waits.
        """
        if in_flight < 1:
            raise ValueError(f"in_flight is {in_flight}: must be 1 or more")
        window: deque[Future[Any]] = deque()
        try:
            for body in bodies:
                window.append(self.submit(model, body, **options))
                while len(window) >= in_flight or (window and window[0].done()):
                    yield self._outcome(window.popleft(), return_exceptions)
            while window:
                yield self._outcome(window.popleft(), return_exceptions)
        finally:
            for future in window:
                future.cancel()

    def models(self) -> list[str]:
        """Names of the registered models."""
        return self._wait(self._start(self._client.models()))

    def close(self) -> None:
        """Disconnect. Requests without a result fail with UnavailableError."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise UnavailableError("this client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _close(self) -> None:
        """Close the client, and let every call in other threads end before the event loop stops."""
        await self._client.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(others, timeout=1.0) if others else None
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    @staticmethod
    def _wait(future: Future[T]) -> T:
        try:
            return future.result()
        except BaseException:  # such as Ctrl-C while waiting: the result is no longer wanted
            future.cancel()
            raise

    def _outcome(self, future: Future[Any], return_exceptions: bool) -> Any:
        if not return_exceptions:
            return self._wait(future)
        error = future.exception()
        return future.result() if error is None else error
