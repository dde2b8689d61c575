"""Which handler a request of the Open Inference Protocol has, and those of its documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from carpool.client.producer import Producer
from carpool.service_metrics import VERSION
from carpool_gateway.answers import JSON_HEADER, RETRY_AFTER, HttpError
from carpool_gateway.catalog import Catalog
from carpool_gateway.content_encoding import check_encoding
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.limits import Limits
from carpool_gateway.oip import documents
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.options import options_of
from carpool_gateway.tensor_requests import Asked
from carpool_gateway.v2.control import ControlHandlers
from carpool_gateway.v2.generate import Generating
from carpool_gateway.v2.infer import TensorInference
from carpool_gateway.v2.sockets import OutputRequests, Requests
from carpool_gateway.v2.streams import TensorStreams
from carpool_gateway.websocket import WebSocket, accept


class OpenInferenceHandlers:
    """The handlers of `/v2`. What finds one raises HttpError and CarpoolErrors. `metadata`: of the server.
    `control`: those that load and unload models."""

    def __init__(
        self,
        *,
        producer: Producer,
        catalog: Catalog,
        inference: TensorInference,
        generating: Generating,
        streams: TensorStreams,
        control: ControlHandlers,
        limits: Limits,
        server_name: str,
        origins: Sequence[str] = (),
    ) -> None:
        self._producer = producer
        self._catalog = catalog
        self._inference = inference
        self._generating = generating
        self._streams = streams
        self._origins = origins
        self._limits = limits
        self.control = control
        self.metadata = documents.server_metadata(server_name, VERSION, controls_models=control.is_enabled)

    def handler_for_infer(self, exchange: Exchange, key: Key) -> Handler:
        """Of a request of tensors."""
        return partial(self._inference.infer, _asked(exchange, key))

    def handler_for_generate(self, exchange: Exchange, key: Key) -> Handler:
        """Of a request in plain JSON, with one response."""
        return partial(self._generating.generate, _asked(exchange, key))

    def handler_for_generate_stream(self, exchange: Exchange, key: Key) -> Handler:
        """Of a request in plain JSON, with any number of responses."""
        return partial(self._generating.generate_stream, _asked(exchange, key))

    def handler_for_stream(self, exchange: Exchange, key: Key) -> Handler:
        """Of a WebSocket for requests to a model."""
        return self._socket_handler(exchange, key, Requests)

    def handler_for_outputs(self, exchange: Exchange, key: Key) -> Handler:
        """Of a WebSocket as AMD's inference server has it."""
        return self._socket_handler(exchange, key, OutputRequests)

    def _socket_handler(
        self, exchange: Exchange, key: Key, kind: type[Requests] | type[OutputRequests]
    ) -> Handler:
        headers, asked = accept(exchange, self._origins), _asked(exchange, key)
        streams, limits = self._streams, self._limits

        def upgrade(exchange: Exchange) -> None:
            if exchange.connection.is_draining:
                raise HttpError(503, "the gateway stops: connect to another one", headers=RETRY_AFTER)
            exchange.upgrade(
                headers,
                lambda wire: WebSocket(
                    wire, limits, lambda socket: kind(socket, exchange, asked, streams, limits)
                ),
            )

        return upgrade

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
        return model.of_version(exchange.parameters.get("version"))

    # --- statistics ----------------------------------------------------------------------------------------

    async def model_statistics(self, exchange: Exchange) -> None:
        """What became of the requests of a model."""
        model = await self._model(exchange)
        found = {model.name: await self._catalog.statistics(model.name)}
        versions = {model.name: model.asked or model.version}
        exchange.respond(200, JSON_HEADER, documents.model_statistics(found, versions))

    def handler_for_all_statistics(self, exchange: Exchange, key: Key) -> Handler:
        """Of the same of all models that the key is for."""
        return partial(self._answer_all_statistics, key)

    async def _answer_all_statistics(self, key: Key, exchange: Exchange) -> None:
        found = await self._catalog.all_statistics(await self._names(key))
        versions = await self._catalog.versions(found)
        exchange.respond(200, JSON_HEADER, documents.model_statistics(found, versions))

    async def _names(self, key: Key) -> list[str]:
        return [name for name in await self._producer.models() if key.is_for(name)]


def _asked(exchange: Exchange, key: Key) -> Asked:
    """Who asks for tensors, and for what in headers. Raises HttpError and CarpoolErrors."""
    check_encoding(exchange)
    # Some clients send headers of their own names; these have the meaning that they have everywhere.
    options = options_of(exchange.headers, reads_accept=False)
    key.set_tenant(options)
    return Asked(key, options)
