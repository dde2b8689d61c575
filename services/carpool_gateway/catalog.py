"""The registered models, as the gateway knows them: what they declare, and whether they can be used."""

from __future__ import annotations

import time
from typing import Final

from carpool.errors import InternalError
from carpool.keys import Keys
from carpool_gateway.links import Links
from carpool_gateway.oip.documents import unknown_model
from carpool_gateway.oip.models import OfferedModel

AGE_S_MAX: Final = 1.0  # of what is known of a model
_MODELS_MAX: Final = 10_000


class Catalog:
    """What was read of each model lately."""

    def __init__(self, links: Links, prefix: str) -> None:
        self._links = links
        self._prefix = prefix
        self._known: dict[str, tuple[float, OfferedModel]] = {}

    def known(self, name: str) -> OfferedModel | None:
        """A model, if it was read lately."""
        found = self._known.get(name)
        return found[1] if found is not None and found[0] > time.monotonic() - AGE_S_MAX else None

    async def model(self, name: str) -> OfferedModel:
        """A model with its settings and an operator's overrides. Raises NotFoundError if no worker has
        registered it, and other CarpoolErrors."""
        model = self.known(name)
        if model is not None:
            return model
        keys = Keys(name, self._prefix)
        registration = _texts(await self._links.call(keys.registration, ("HGETALL", keys.registration)))
        if not registration:
            self._known.pop(name, None)
            raise unknown_model(name)
        overrides = _texts(await self._links.call(keys.overrides, ("HGETALL", keys.overrides)))
        try:
            model = OfferedModel.of(name, registration, overrides)
        except ValueError as error:
            raise InternalError(f"model {name!r}: {error}") from None
        if len(self._known) >= _MODELS_MAX:
            self._known.clear()
        self._known[name] = (time.monotonic(), model)
        return model

    async def is_ready(self, name: str) -> bool:
        """Whether a registered model has a process. Raises as `model` does."""
        await self.model(name)
        keys = Keys(name, self._prefix)
        return bool(await self._links.call(keys.workers, ("ZCARD", keys.workers)))


def _texts(flat: list[bytes]) -> dict[str, str]:
    """The fields of a hash."""
    texts = [part.decode("utf-8", "replace") for part in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
