"""The calls beside those that infer: health, and what the server and its models are. The messages are made of
the documents of HTTP."""

from __future__ import annotations

from typing import Any

from carpool.client.producer import Producer
from carpool.errors import NotFoundError
from carpool.keys import MODEL_NAME
from carpool_gateway.catalog import Catalog
from carpool_gateway.credentials import Key
from carpool_gateway.oip import documents
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.probes import Health
from carpool_gateway.rpc.calls import Call
from carpool_gateway.rpc.messages import INFERENCE
from carpool_gateway.rpc.responses import decoded, document


class Documents:
    """Answers calls. All raise HttpError and CarpoolErrors. `server_metadata`: as HTTP answers it."""

    def __init__(
        self, *, producer: Producer, catalog: Catalog, health: Health, server_metadata: bytes
    ) -> None:
        self._producer = producer
        self._catalog = catalog
        self._health = health
        self._server_metadata = document("ServerMetadataResponse", server_metadata)

    async def server_live(self, call: Call, message: bytes) -> bytes:
        """Whether the process works."""
        return _encoded("ServerLiveResponse", live=not self._health.unhealthy())

    async def server_ready(self, call: Call, message: bytes) -> bytes:
        """Whether it can serve."""
        return _encoded("ServerReadyResponse", ready=not self._health.unready())

    async def server_metadata(self, call: Call, message: bytes) -> bytes:
        """What the server is."""
        return self._server_metadata

    async def model_ready(self, call: Call, message: bytes) -> bytes:
        """Whether a model can be used; also of one that there is not, as Triton answers it."""
        try:
            model = await self._model(call, decoded("ModelReadyRequest", message))
            ready = await self._catalog.is_ready(model.name)
        except NotFoundError:
            ready = False
        return _encoded("ModelReadyResponse", ready=ready)

    async def model_metadata(self, call: Call, message: bytes) -> bytes:
        """The inputs and outputs of a model."""
        model = await self._model(call, decoded("ModelMetadataRequest", message))
        return document("ModelMetadataResponse", documents.model_metadata(model))

    async def model_config(self, call: Call, message: bytes) -> bytes:
        """The settings of a model."""
        model = await self._model(call, decoded("ModelConfigRequest", message))
        return document("ModelConfigResponse", documents.model_config(model), wrapped_in="config")

    async def model_statistics(self, call: Call, message: bytes) -> bytes:
        """What became of the requests of a model, or of all that the key is for."""
        request = decoded("ModelStatisticsRequest", message)
        if request.name:
            model = await self._model(call, request)
            found = {model.name: await self._catalog.statistics(model.name)}
            versions = {model.name: model.asked or model.version}
        else:
            found = dict(await self._catalog.all_statistics(await self._names(call.authorize())))
            versions = await self._catalog.versions(found)
        return document("ModelStatisticsResponse", documents.model_statistics(found, versions))

    async def _names(self, key: Key) -> list[str]:
        return [name for name in await self._producer.models() if key.is_for(name)]

    async def _model(self, call: Call, request: Any) -> OfferedModel:
        call.authorize(request.name)
        if not MODEL_NAME.fullmatch(request.name):
            raise documents.unknown_model(request.name)
        return (await self._catalog.model(request.name)).of_version(request.version)


def _encoded(name: str, **fields: Any) -> bytes:
    return bytes(INFERENCE[name](**fields).SerializeToString())
