"""Which handler a request of the Open Inference Protocol has, and those of its documents."""

from __future__ import annotations

from functools import partial
from importlib import metadata

from carpool.client.producer import Producer
from carpool_gateway.answers import JSON_HEADER, RETRY_AFTER, HttpError
from carpool_gateway.catalog import Catalog
from carpool_gateway.content_encoding import check_encoding, decompress
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.limits import Limits
from carpool_gateway.oip import documents
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.options import options_of
from carpool_gateway.tensor_requests import Asked
from carpool_gateway.v2.infer import TensorInference, check_version


class OpenInferenceHandlers:
    """The handlers of `/v2`. What finds one raises HttpError and CarpoolErrors. `metadata`: of the server."""

    def __init__(
        self,
        *,
        producer: Producer,
        catalog: Catalog,
        inference: TensorInference,
        limits: Limits,
        server_name: str,
    ) -> None:
        self._producer = producer
        self._catalog = catalog
        self._inference = inference
        self._limits = limits
        self.metadata = documents.server_metadata(server_name, metadata.version("carpool"))

    def handler_for_infer(self, exchange: Exchange, key: Key) -> Handler:
        """Of a request of tensors."""
        check_encoding(exchange)
        # Some clients send headers of their own names; these have the meaning that they have everywhere.
        options = options_of(exchange.headers, reads_accept=False)
        key.set_tenant(options)
        return partial(self._inference.infer, Asked(key, options))

    # --- documents -----------------------------------------------------------------------------------------

    def server_metadata(self, exchange: Exchange) -> None:
        """What the server is."""
        exchange.respond(200, JSON_HEADER, self.metadata)

    async def model_metadata(self, exchange: Exchange) -> None:
        """The inputs and outputs of a model."""
        model = await self._model(exchange)
        exchange.respond(200, JSON_HEADER, documents.model_metadata(model))

    async def model_config(self, exchange: Exchange) -> None:
        """The settings of a model."""
        model = await self._model(exchange)
        exchange.respond(200, JSON_HEADER, documents.model_config(model))

    async def model_ready(self, exchange: Exchange) -> None:
        """Whether a model can be used. Raises HttpError if it cannot."""
        await self._model(exchange)
        if not await self._catalog.is_ready(exchange.model):
            raise HttpError(503, f"no worker serves the model {exchange.model!r} now", headers=RETRY_AFTER)
        exchange.respond(200, JSON_HEADER, documents.model_ready(exchange.model))

    async def _model(self, exchange: Exchange) -> OfferedModel:
        model = await self._catalog.model(exchange.model)
        check_version(exchange, model)
        return model

    # --- statistics, and the repository --------------------------------------------------------------------

    async def model_statistics(self, exchange: Exchange) -> None:
        """What became of the requests of a model."""
        await self._model(exchange)
        found = {exchange.model: await self._catalog.statistics(exchange.model)}
        exchange.respond(200, JSON_HEADER, documents.model_statistics(found))

    def handler_for_all_statistics(self, exchange: Exchange, key: Key) -> Handler:
        """Of the same of all models that the key is for."""
        return partial(self._answer_all_statistics, key)

    async def _answer_all_statistics(self, key: Key, exchange: Exchange) -> None:
        found = await self._catalog.all_statistics(await self._names(key))
        exchange.respond(200, JSON_HEADER, documents.model_statistics(found))

    def handler_for_index(self, exchange: Exchange, key: Key) -> Handler:
        """Of the states of all models that the key is for. Raises HttpError."""
        check_encoding(exchange)
        return partial(self._answer_index, key)

    async def _answer_index(self, key: Key, exchange: Exchange) -> None:
        await decompress(exchange, self._limits)
        ready_only = documents.decode_index_request(exchange.body)
        entries = await self._catalog.index(await self._names(key))
        exchange.respond(200, JSON_HEADER, documents.repository_index(entries, ready_only=ready_only))

    async def _names(self, key: Key) -> list[str]:
        return [name for name in await self._producer.models() if key.is_for(name)]
