"""The calls that load and unload models, and the index of what there is."""

from __future__ import annotations

from typing import Any

from carpool.errors import InvalidArgumentError, UnimplementedError
from carpool.keys import MODEL_NAME
from carpool_gateway.credentials import LOAD
from carpool_gateway.model_control import ModelControl
from carpool_gateway.oip import control, documents
from carpool_gateway.routes import no_such_name
from carpool_gateway.rpc.calls import Call
from carpool_gateway.rpc.messages import INFERENCE
from carpool_gateway.rpc.responses import decoded, document


class ControlCalls:
    """Answers calls. All raise HttpError and CarpoolErrors."""

    def __init__(self, models: ModelControl) -> None:
        self._models = models

    async def index(self, call: Call, message: bytes) -> bytes:
        """The states of all models that the key is for."""
        request = decoded("RepositoryIndexRequest", message)
        key = call.authorize()
        _check_repository(request.repository_name)
        index = documents.repository_index(await self._models.index(key), ready_only=request.ready)
        return document("RepositoryIndexResponse", index, wrapped_in="models")

    async def load(self, call: Call, message: bytes) -> bytes:
        """Load a model, or another version of it. The answer comes when it serves."""
        request = self._authorized(call, decoded("RepositoryModelLoadRequest", message))
        offered = await self._models.offered(request.model_name)
        wanted = control.read_load(_parameters(request), request.model_name, None, offered)
        await self._models.load(request.model_name, wanted, call.key)
        return bytes(INFERENCE["RepositoryModelLoadResponse"]().SerializeToString())

    async def unload(self, call: Call, message: bytes) -> bytes:
        """Unload a model. The answer comes when it has answered the requests that it had."""
        request = self._authorized(call, decoded("RepositoryModelUnloadRequest", message))
        control.check_unload_parameters(_parameters(request))
        await self._models.unload(request.model_name, None, call.key)
        return bytes(INFERENCE["RepositoryModelUnloadResponse"]().SerializeToString())

    def _authorized(self, call: Call, request: Any) -> Any:
        call.authorize(request.model_name, LOAD)
        self._models.check_enabled()
        _check_repository(request.repository_name)
        if not MODEL_NAME.fullmatch(request.model_name):
            raise InvalidArgumentError(no_such_name(request.model_name))
        return request


def _check_repository(name: str) -> None:
    if name:
        raise UnimplementedError(documents.NO_REPOSITORY_NAMES)


def _parameters(request: Any) -> dict[str, Any]:
    """The parameters of a request as values of JSON; None for one without a value."""
    found: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        kind = parameter.WhichOneof("choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found
