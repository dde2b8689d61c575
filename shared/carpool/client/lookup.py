"""How a client finds a model: whether it is registered, is being loaded, and has a live model process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from math import inf
from typing import Any, Final

from carpool.errors import CarpoolError, DeadlineExceededError, NotFoundError, UnavailableError
from carpool.keys import Keys, models_key

POLL_S: Final = 0.1
_NOBODY: Final = "no worker has registered it"
_LOADING: Final = "a worker is loading it"
_NO_PROCESS: Final = "it is registered, but no worker serves it now"


class ModelLookup:
    """`call` sends a command to Redis, and raises CarpoolErrors."""

    def __init__(self, call: Callable[..., Awaitable[Any]], prefix: str) -> None:
        self._call = call
        self._prefix = prefix

    async def models(self) -> list[str]:
        """Names of the registered models."""
        names = await self._call("SMEMBERS", models_key(self._prefix))
        return sorted(name.decode() for name in names)

    async def batch_size(self, model: str, timeout_s: float | None) -> int:
        """The registered `max_batch_size`, once the model is registered.

        Waits for that while a worker loads the model. Raises NotFoundError if none does,
        DeadlineExceededError, and TimeoutError if Redis did not reply at all in this time.
        """
        keys = self._keys(model)
        size: bytes | None = None

        async def look() -> str:
            nonlocal size
            size = await self._call("HGET", keys.registration, "max_batch_size")
            return _LOADING if size is None and await self.is_loading(keys) else ""

        if missing := await _wait_while(look, timeout_s):
            raise DeadlineExceededError(f"model {model!r}: {missing}, for {timeout_s:g} s or longer")
        if size is not None:
            return int(size) if size.isdigit() else 1
        names = ", ".join(await self.models()) or "none"
        raise NotFoundError(f"no worker has registered a model {model!r}; registered: {names}")

    async def wait_ready(self, model: str, timeout_s: float | None) -> None:
        """Wait until a model process can execute requests. Raises DeadlineExceededError, which says why, and
        TimeoutError if Redis did not reply at all in this time."""
        keys = self._keys(model)
        if missing := await _wait_while(lambda: self._missing(keys), timeout_s):
            raise DeadlineExceededError(f"model {model!r} is not ready after {timeout_s:g} s: {missing}")

    async def check_served(self, model: str) -> None:
        """Raise UnavailableError, which says why, unless a model process is alive."""
        keys = self._keys(model)
        if not await count_alive(self._call, keys):
            why = _LOADING if await self.is_loading(keys) else _NO_PROCESS
            raise UnavailableError(f"model {model!r}: {why}")

    async def _missing(self, keys: Keys) -> str:
        """What a model lacks to be ready; empty if nothing."""
        is_registered = await self._call("HGET", keys.registration, "max_batch_size") is not None
        if is_registered and await self.has_process(keys):
            return ""
        if await self.is_loading(keys):
            return _LOADING
        return _NO_PROCESS if is_registered else _NOBODY

    async def has_process(self, keys: Keys) -> bool:
        """Whether a model has a process. One that was killed counts, until another worker has noticed."""
        return bool(await self._call("ZCARD", keys.workers))

    async def is_loading(self, keys: Keys) -> bool:
        """Whether a worker loads a model."""
        return bool(await self._call("EXISTS", keys.loading))

    def _keys(self, model: str) -> Keys:
        try:
            return Keys(model, self._prefix)
        except ValueError as error:
            raise NotFoundError(str(error)) from None


async def count_alive(call: Callable[..., Awaitable[Any]], keys: Keys) -> int:
    """How many model processes have a lease, by Redis's clock."""
    now_s, us = await call("TIME")
    now_ms = int(now_s) * 1000 + int(us) // 1000
    return int(await call("ZCOUNT", keys.workers, str(now_ms), "+inf"))


async def _wait_while(look: Callable[[], Awaitable[str]], timeout_s: float | None) -> str:
    """Look until nothing is missing. Returns '' then, or what was missing when the time was over.

    If Redis does not reply in time to a later look, that is what the look before found. Raises TimeoutError
    if it does not reply to the first one.
    """
    missing = ""
    end_s = inf if timeout_s is None else time.monotonic() + timeout_s
    try:
        async with asyncio.timeout(None if timeout_s is None else timeout_s + POLL_S):
            while missing := await look():
                if time.monotonic() >= end_s:
                    break
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        if isinstance(error, CarpoolError) or not missing:
            raise
    return missing
