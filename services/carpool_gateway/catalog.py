"""The registered models, as the gateway knows them: what they declare, and whether they can be used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import structlog

from carpool.client.lookup import ModelLookup
from carpool.errors import CarpoolError, InternalError, NotFoundError
from carpool.keys import Keys
from carpool.shown import trace_of
from carpool.wire.orders import REFUSE
from carpool.wire.statistics import ModelStatistics
from carpool_gateway.oip.documents import LOADING, READY, UNAVAILABLE, IndexEntry, unknown_model
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.redis_calls import RedisCalls

AGE_S_MAX: Final = 1.0  # of what is known of a model
_MODELS_MAX: Final = 10_000
_MODELS_READ: Final = 16  # at a time: other clients need connections to Redis, too
_Read = TypeVar("_Read")


class Catalog:
    """What was read of each model lately.

    A model that is used is read again before what is known of it is too old, and once for all requests that
    want it: otherwise those of a thousand connections would wait for that together, each with commands of its
    own.
    """

    def __init__(self, calls: RedisCalls, prefix: str) -> None:
        self._calls = calls
        self._lookup = ModelLookup(self._call, prefix)
        self._prefix = prefix
        self._known: dict[str, tuple[float, OfferedModel]] = {}
        self._reads: dict[str, asyncio.Task[OfferedModel]] = {}  # under way
        self._log = structlog.get_logger()

    async def _call(self, *command: str) -> Any:
        return await self._calls.call(command[1], command)  # which is the key

    def known(self, name: str) -> OfferedModel | None:
        """A model, if it was read lately."""
        found = self._known.get(name)
        if found is None:
            return None
        read_at_s, model = found
        age_s = time.monotonic() - read_at_s
        if age_s > AGE_S_MAX:
            return None
        if age_s > AGE_S_MAX / 2:
            self._read(name)
        return model

    async def model(self, name: str) -> OfferedModel:
        """A model with its settings and an operator's overrides. Raises NotFoundError if no worker has
        registered it, and other CarpoolErrors."""
        model = self.known(name)
        if model is None:
            model = await asyncio.shield(self._read(name))
        return model

    def forget(self, name: str) -> None:
        """A model may have changed: read it again before it is used."""
        self._known.pop(name, None)

    def _read(self, name: str) -> asyncio.Task[OfferedModel]:
        """Begin to read a model, unless that is under way."""
        reading = self._reads.get(name)
        if reading is None:
            reading = self._reads[name] = asyncio.ensure_future(self._read_now(name))
            reading.add_done_callback(partial(self._on_read, name))
        return reading

    def _on_read(self, name: str, reading: asyncio.Task[OfferedModel]) -> None:
        del self._reads[name]
        error = None if reading.cancelled() else reading.exception()
        if error is not None and not isinstance(error, CarpoolError):
            self._log.error("model cannot be read", model=name, exception=trace_of(error))

    async def _read_now(self, name: str) -> OfferedModel:
        keys = Keys(name, self._prefix)
        registration = _texts(await self._call("HGETALL", keys.registration))
        if not registration:
            self._known.pop(name, None)
            raise unknown_model(name)
        overrides = _texts(await self._call("HGETALL", keys.overrides))
        try:
            model = OfferedModel.of(name, registration, overrides)
        except ValueError as error:
            raise InternalError(f"model {name!r}: {error}") from None
        before = self._known.get(name)
        if before is not None and before[1] == model:
            model = before[1]  # what is kept for a model holds as long as it is the same object
        if len(self._known) >= _MODELS_MAX:
            self._known.clear()
        self._known[name] = (time.monotonic(), model)
        return model

    async def is_ready(self, name: str) -> bool:
        """Whether a registered model has a process, and is not paused so that requests are refused. Raises as
        `model` does."""
        await self.model(name)
        keys = Keys(name, self._prefix)
        return await self._lookup.has_process(keys) and not await self._refuses(keys)

    async def _refuses(self, keys: Keys) -> bool:
        """Whether an operator has paused a model so that its requests are refused."""
        return bool(await self._call("HGET", keys.paused, "mode") == REFUSE.encode())

    async def statistics(self, name: str) -> ModelStatistics:
        """What became of the requests of a registered model, as all gateways tell it. Raises as `model`
        does."""
        await self.model(name)
        key = Keys(name, self._prefix).statistics
        flat = await self._call("HGETALL", key)
        names = [name.decode("utf-8", "replace") for name in flat[::2]]
        return ModelStatistics.of(dict(zip(names, flat[1::2], strict=True)))

    async def all_statistics(self, names: Sequence[str]) -> dict[str, ModelStatistics]:
        """The same of these models, without those of which nothing is known any more. Raises
        CarpoolErrors."""
        return dict(await _of_each(names, self._statistics_if_registered))

    async def _statistics_if_registered(self, name: str) -> tuple[str, ModelStatistics] | None:
        try:
            return name, await self.statistics(name)
        except (NotFoundError, InternalError):  # it was removed meanwhile, or what it declares cannot be read
            return None

    async def versions(self, names: Iterable[str]) -> dict[str, str]:
        """The version that the workers of each of these models declared last; those that are still
        registered. Raises CarpoolErrors."""
        found = {}
        for name in names:
            with suppress(NotFoundError, InternalError):
                found[name] = (await self.model(name)).version
        return found

    async def index(self, names: Sequence[str]) -> list[IndexEntry]:
        """The states of these models, without those that are not registered any more. Raises
        CarpoolErrors."""
        return await _of_each(names, self._index_entry)

    async def _index_entry(self, name: str) -> IndexEntry | None:
        try:
            version, is_ready = (await self.model(name)).version, await self.is_ready(name)
        except NotFoundError:
            return None
        except InternalError as error:  # what is registered cannot be read
            return IndexEntry(name, UNAVAILABLE, error.detail)
        if is_ready:
            return IndexEntry(name, READY, version=version)
        keys = Keys(name, self._prefix)
        if await self._refuses(keys):
            return IndexEntry(name, UNAVAILABLE, "an operator has paused it", version)
        if await self._lookup.is_loading(keys):
            return IndexEntry(name, LOADING, "a worker is loading it", version)
        return IndexEntry(name, UNAVAILABLE, "no worker serves it now", version)


async def _of_each(
    names: Sequence[str], read: Callable[[str], Coroutine[Any, Any, _Read | None]]
) -> list[_Read]:
    """What is read of each model, in order; without those of which nothing is."""
    found: list[_Read] = []
    for start in range(0, len(names), _MODELS_READ):
        together = await asyncio.gather(*map(read, names[start : start + _MODELS_READ]))
        found += [of_model for of_model in together if of_model is not None]
    return found


def _texts(flat: list[bytes]) -> dict[str, str]:
    """The fields of a hash."""
    texts = [part.decode("utf-8", "replace") for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
