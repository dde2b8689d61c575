"""Which handler a request of Carpool's own interface has, by what its headers ask for."""

from __future__ import annotations

import json
from functools import partial

from carpool.client.producer import Producer
from carpool_gateway.answers import JSON_HEADER, HttpError
from carpool_gateway.credentials import Key
from carpool_gateway.exchange import Exchange, Handler
from carpool_gateway.native.infer import Inference
from carpool_gateway.native.kept import IDEMPOTENCY, KeptRequests
from carpool_gateway.native.scale import Scaling
from carpool_gateway.native.streaming import Streaming
from carpool_gateway.options import wants_async, wants_stream


class NativeHandlers:
    """The handlers of `/carpool/v1`. What finds one raises HttpError and CarpoolErrors. `scaling`: tells how
    many workers models need."""

    def __init__(
        self,
        *,
        producer: Producer,
        inference: Inference,
        streaming: Streaming,
        kept: KeptRequests,
        scaling: Scaling,
    ) -> None:
        self._producer = producer
        self._inference = inference
        self._streaming = streaming
        self._kept = kept
        self.scaling = scaling

    def handler_for_infer(self, exchange: Exchange, key: Key) -> Handler:
        """Of one request: its answer is its result, a stream of chunks, or where the result will be."""
        headers = exchange.headers
        is_async = wants_async(headers)
        is_kept = is_async or IDEMPOTENCY in headers
        asked = self._inference.read_headers(exchange, key, is_async=is_async, is_kept=is_kept)
        if wants_stream(headers):
            _check_not_kept(is_kept=is_kept)
            exchange.route = "stream"
            return partial(self._streaming.infer, asked, key)
        return partial((self._kept if is_kept else self._inference).infer, asked, key)

    def handler_for_infer_many(self, exchange: Exchange, key: Key) -> Handler:
        """Of a request for each line of the body."""
        _check_not_kept(is_kept=wants_async(exchange.headers) or IDEMPOTENCY in exchange.headers)
        asked = self._inference.read_headers(exchange, key)
        return partial(self._inference.infer_many, asked, key)

    def handler_for_result(self, exchange: Exchange, key: Key) -> Handler:
        """Of the result of a request that was sent before."""
        return partial(self._kept.get, key)

    def handler_for_withdrawal(self, exchange: Exchange, key: Key) -> Handler:
        """Of the withdrawal of a request that was sent before."""
        return partial(self._kept.withdraw, key)

    def handler_for_models(self, exchange: Exchange, key: Key) -> Handler:
        """Of the names of the models that the key may use."""
        return partial(self._answer_models, key)

    async def _answer_models(self, key: Key, exchange: Exchange) -> None:
        names = [name for name in await self._producer.models() if key.is_for(name)]
        exchange.respond(200, JSON_HEADER, json.dumps({"models": names}).encode() + b"\n")


def _check_not_kept(*, is_kept: bool) -> None:
    if is_kept:
        raise HttpError(400, "Idempotency-Key and Prefer: respond-async are for a single result")
