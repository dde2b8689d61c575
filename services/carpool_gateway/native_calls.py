"""Carpool's own HTTP interface: which handler a request of it has, by what its headers ask for."""

from __future__ import annotations

import json
from functools import partial

from carpool.client.producer import Producer
from carpool_gateway.answers import JSON_HEADER, HttpError
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.inference import Inference
from carpool_gateway.kept import IDEMPOTENCY, KeptRequests, is_later
from carpool_gateway.native.options import wants_stream
from carpool_gateway.streaming import Streaming


class NativeCalls:
    """Accepts the requests of `/carpool/v1`. Raises HttpError and CarpoolErrors."""

    def __init__(
        self, *, producer: Producer, inference: Inference, streaming: Streaming, kept: KeptRequests
    ) -> None:
        self._producer = producer
        self._inference = inference
        self._streaming = streaming
        self._kept = kept

    def infer(self, exchange: Exchange, key: Key) -> Handler:
        """One request: its result, a stream of chunks, or where the result will be."""
        later, is_once = is_later(exchange), IDEMPOTENCY in exchange.headers
        asked = self._inference.accept(exchange, key, is_later=later, is_kept=later or is_once)
        if wants_stream(exchange.headers):
            _check_not_kept(is_kept=later or is_once)
            exchange.route = "stream"
            return partial(self._streaming.infer, asked, key)
        return partial((self._kept if later or is_once else self._inference).infer, asked, key)

    def infer_many(self, exchange: Exchange, key: Key) -> Handler:
        """A request for each line of the body."""
        _check_not_kept(is_kept=is_later(exchange) or IDEMPOTENCY in exchange.headers)
        asked = self._inference.accept(exchange, key)
        return partial(self._inference.infer_many, asked, key)

    def kept_result(self, exchange: Exchange, key: Key) -> Handler:
        """The result of a request that was sent before."""
        return partial(self._kept.get, key)

    def withdraw(self, exchange: Exchange, key: Key) -> Handler:
        """Withdraw a request that was sent before."""
        return partial(self._kept.withdraw, key)

    def models(self, exchange: Exchange, key: Key) -> Handler:
        """The names of the models that the key may use."""
        return partial(self._answer_models, key)

    async def _answer_models(self, key: Key, exchange: Exchange) -> None:
        names = [name for name in await self._producer.models() if key.is_for(name)]
        exchange.respond(200, JSON_HEADER, json.dumps({"models": names}).encode() + b"\n")


def _check_not_kept(*, is_kept: bool) -> None:
    if is_kept:
        raise HttpError(400, "Idempotency-Key and Prefer: respond-async are for a single result")
