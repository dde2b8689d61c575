"""Which handler a request of OpenAI's API has, and those of the list of models."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec

from carpool.client.producer import Producer
from carpool.errors import InternalError, NotFoundError
from carpool_gateway.answers import JSON_HEADER
from carpool_gateway.catalog import Catalog
from carpool_gateway.content_encoding import check_encoding
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.native.kept import IDEMPOTENCY
from carpool_gateway.openai.answers import model_document
from carpool_gateway.openai.errors import RequestError, unknown_model
from carpool_gateway.options import options_of, wants_async
from carpool_gateway.v1.infer import Caller, OpenAIInference

_MODELS_READ: Final = 16  # at a time: other clients need connections to Redis, too


class OpenAIHandlers:
    """The handlers of `/v1`. What finds one raises HttpError and CarpoolErrors."""

    def __init__(self, *, producer: Producer, catalog: Catalog, inference: OpenAIInference) -> None:
        self._producer = producer
        self._catalog = catalog
        self._inference = inference
        self._created_s = int(time.time())

    def handler_for(self, interface: str) -> Callable[[Exchange, Key], Handler]:
        """Of the requests of an interface."""

        def find(exchange: Exchange, key: Key) -> Handler:
            check_encoding(exchange)
            headers = exchange.headers
            if wants_async(headers):
                raise RequestError("Prefer: respond-async is not possible here", None)
            options = options_of(headers, reads_accept=False)
            key.set_tenant(options)
            caller = Caller(interface, key, options, is_kept=IDEMPOTENCY in headers)
            return partial(self._inference.infer, caller)

        return find

    # --- the list of models --------------------------------------------------------------------------------

    def handler_for_models(self, exchange: Exchange, key: Key) -> Handler:
        """Of the models that the key is for, and that speak an interface of this API."""
        return partial(self._answer_models, key)

    async def _answer_models(self, key: Key, exchange: Exchange) -> None:
        names = [name for name in await self._producer.models() if key.is_for(name)]
        found: list[dict[str, Any]] = []
        for start in range(0, len(names), _MODELS_READ):
            together = await asyncio.gather(
                *map(self._document_if_it_speaks, names[start : start + _MODELS_READ])
            )
            found += [document for document in together if document is not None]
        exchange.respond(200, JSON_HEADER, msgspec.json.encode({"object": "list", "data": found}))

    async def _document_if_it_speaks(self, name: str) -> dict[str, Any] | None:
        try:
            spoken = (await self._catalog.model(name)).spoken
        except (NotFoundError, InternalError):  # it was removed meanwhile, or what it declares cannot be read
            return None
        return model_document(name, self._created_s, spoken.speaks) if spoken.speaks else None

    async def model(self, exchange: Exchange) -> None:
        """One of these. Raises HttpError."""
        document = await self._document_if_it_speaks(exchange.model)
        if document is None:
            raise unknown_model(exchange.model)
        exchange.respond(200, JSON_HEADER, msgspec.json.encode(document))
