"""Sending requests again that ended with a status which may pass.

Why: docs/decisions/0072.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from typing import Any, Final

from carpool.backoff import with_jitter
from carpool.client.options import RequestOptions, check_retries, checked_timeout_s, left_of
from carpool.errors import CarpoolError, InternalError, ResourceExhaustedError, UnavailableError

PAUSE_S_MIN: Final = 0.1
PAUSE_S_MAX: Final = 10.0
# The queue is full, Redis cannot be reached, the model raised. All other statuses would come again.
_MAY_PASS: Final = (ResourceExhaustedError, UnavailableError, InternalError)


async def with_retries(
    send: Callable[[RequestOptions], Awaitable[Any]],
    options: RequestOptions,
    default_timeout_s: float | None,
    is_closed: Callable[[], bool],
) -> Any:
    """What `send` returns, which is called again after each error that may pass, `retries` times at most.

    The pause doubles from PAUSE_S_MIN to PAUSE_S_MAX, and is shortened at random by up to a half. The timeout
    is for all calls and pauses together: the last error is raised where the next pause would not end in time.
    So is `not_before`.
    """
    others: RequestOptions = {**options}
    retries = check_retries(others.pop("retries"))
    timeout_s = checked_timeout_s(options.get("timeout", default_timeout_s))
    started_s = time.monotonic()
    until_s = None if timeout_s is None else started_s + timeout_s
    for attempt in range(retries + 1):
        left = left_of(others, timeout_s, time.monotonic() - started_s) if attempt else others
        try:
            return await send(left)
        except _MAY_PASS:
            pause_s = with_jitter(min(PAUSE_S_MIN * 2**attempt, PAUSE_S_MAX))
            if attempt == retries or is_closed() or _ends_before(until_s, pause_s):
                raise
            await asyncio.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


async def each_with_retries(
    submit: Callable[[Any], asyncio.Future[Any]], bodies: AsyncIterable[Any], in_flight: int
) -> AsyncGenerator[Any, None]:
    """What becomes of each of `bodies`, in their order: what its future returns, or its CarpoolError.

    At most `in_flight` futures are not done at any time. Closing the iterator cancels them.
    """
    window: deque[asyncio.Future[Any]] = deque()
    try:
        async for body in bodies:
            window.append(submit(body))
            while len(window) >= in_flight or (window and window[0].done()):
                yield await _outcome(window.popleft())
        while window:
            yield await _outcome(window.popleft())
    finally:
        for future in window:
            future.cancel()


async def _outcome(future: asyncio.Future[Any]) -> Any:
    try:
        return await future
    except CarpoolError as error:
        return error


def _ends_before(until_s: float | None, pause_s: float) -> bool:
    return until_s is not None and time.monotonic() + pause_s >= until_s
