"""Producers in Python: `AsyncClient`, and `Client` for programs without an event loop.

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
    """`AsyncClient` on a thread of its own; may be shared by any number of threads."""

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
        self._begin(self._client.connect()).result()

    def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """The model's result for `body`; options and errors as AsyncClient.infer's."""
        return self._wait(self.submit(model, body, **options))

    def request(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Reply:
        """As `infer`, and how the request was served."""
        return self._wait(self._begin(self._client.request(model, body, **options)))

    def submit(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Future[Any]:
        """`infer` as a future, begun at once. Cancelling the future withdraws the request."""
        return self._begin(self._client.infer(model, body, **options))

    def map(
        self,
        model: str,
        bodies: Iterable[Any],
        *,
        in_flight: int = IN_FLIGHT,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Any]:
        """Results in the order of `bodies`, however many, with at most `in_flight` at a time.

        An error is raised in its place, or yielded with `return_exceptions`. Leaving withdraws the rest.
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
        return self._wait(self._begin(self._client.models()))

    def close(self) -> None:
        """Hang up. What has no result yet fails with UnavailableError."""
        if not self._closed:
            self._closed = True
            asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    # --- inside --------------------------------------------------------------------------------------------

    def _begin(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        if self._closed:
            coroutine.close()
            raise UnavailableError("this client is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _close(self) -> None:
        """Whoever still waits is told, before the loop stops under them."""
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
        except BaseException:  # Ctrl-C while waiting, for one: nobody wants the result any more
            future.cancel()
            raise

    def _outcome(self, future: Future[Any], return_exceptions: bool) -> Any:
        if not return_exceptions:
            return self._wait(future)
        error = future.exception()
        return future.result() if error is None else error
