"""The handlers that load and unload models, and list them: Triton's, and those of AMD's inference server."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from carpool_gateway.answers import JSON_HEADER, HttpError
from carpool_gateway.content_encoding import check_encoding, decompress
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.limits import Limits
from carpool_gateway.model_control import ModelControl
from carpool_gateway.oip import control, documents

_TEXT_HEADER: Final = b"content-type: text/plain; charset=utf-8\r\n"
_Answer = Callable[[Key, Exchange], Coroutine[Any, Any, None]]


class ControlHandlers:
    """What finds a handler raises HttpError and CarpoolErrors."""

    def __init__(self, models: ModelControl, limits: Limits) -> None:
        self._models = models
        self._limits = limits

    @property
    def is_enabled(self) -> bool:
        """Whether models can be loaded and unloaded."""
        return self._models.is_enabled

    def handler_for_index(self, exchange: Exchange, key: Key) -> Handler:
        """Of the states of all models that the key is for."""
        return self._handler(exchange, key, self._answer_index)

    def handler_for_list(self, exchange: Exchange, key: Key) -> Handler:
        """Of the names of those that can be used."""
        return partial(self._answer_list, key)

    def handler_for_load(self, exchange: Exchange, key: Key) -> Handler:
        """Of a load, with Triton's parameters or AMD's."""
        self._models.check_enabled()
        return self._handler(exchange, key, self._answer_load)

    def handler_for_unload(self, exchange: Exchange, key: Key) -> Handler:
        """Of an unload."""
        self._models.check_enabled()
        return self._handler(exchange, key, self._answer_unload)

    def handler_for_worker_load(self, exchange: Exchange, key: Key) -> Handler:
        """Of AMD's load, whose answer is the name under which the model is served."""
        self._models.check_enabled()
        return self._handler(exchange, key, self._answer_worker_load)

    def handler_for_worker_unload(self, exchange: Exchange, key: Key) -> Handler:
        """Of AMD's unload, which takes one replica away."""
        self._models.check_enabled()
        return self._handler(exchange, key, self._answer_worker_unload)

    def _handler(self, exchange: Exchange, key: Key, answer: _Answer) -> Handler:
        if "repository" in exchange.parameters:
            raise HttpError(501, documents.NO_REPOSITORY_NAMES)
        check_encoding(exchange)
        return partial(self._read_and_answer, answer, key)

    async def _read_and_answer(self, answer: _Answer, key: Key, exchange: Exchange) -> None:
        await decompress(exchange, self._limits)
        await answer(key, exchange)

    async def _answer_index(self, key: Key, exchange: Exchange) -> None:
        ready_only = documents.decode_index_request(exchange.body)
        entries = await self._models.index(key)
        exchange.respond(200, JSON_HEADER, documents.repository_index(entries, ready_only=ready_only))

    async def _answer_list(self, key: Key, exchange: Exchange) -> None:
        names = documents.ready_names(await self._models.index(key))
        exchange.respond(200, JSON_HEADER, documents.model_list(names))

    async def _answer_load(self, key: Key, exchange: Exchange) -> None:
        name, version = exchange.model, exchange.parameters.get("version")
        offered = await self._models.offered(name)
        request = control.decode_load(exchange.body, name, version, offered)
        exchange.drop_body()
        await self._models.load(name, request, key)
        exchange.respond(200, b"", b"")

    async def _answer_unload(self, key: Key, exchange: Exchange) -> None:
        control.check_unload(exchange.body)
        await self._models.unload(exchange.model, exchange.parameters.get("version"), key)
        exchange.respond(200, b"", b"")

    async def _answer_worker_load(self, key: Key, exchange: Exchange) -> None:
        request = control.decode_flat(exchange.body, exchange.model)
        endpoint = await self._models.load_endpoint(exchange.model, request, key)
        exchange.respond(200, _TEXT_HEADER, endpoint.encode())

    async def _answer_worker_unload(self, key: Key, exchange: Exchange) -> None:
        control.check_unload(exchange.body)
        await self._models.unload_replica(exchange.model, key)
        exchange.respond(200, b"", b"")
