"""How many workers a model needs, for autoscalers that ask over HTTP, such as KEDA's `metrics-api`.

The figure is the active batcher's, from Redis, so every gateway gives the same answer. If it is not known
the answer is an error: after one an autoscaler leaves workers as they are; a 0 would stop them.
"""

from __future__ import annotations

from typing import Final

import msgspec

from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.wire.report import BatcherReport
from carpool_gateway.answers import JSON_HEADER
from carpool_gateway.catalog import Catalog
from carpool_gateway.exchange import Exchange
from carpool_gateway.redis_calls import RedisCalls
from carpool_gateway.schemas import Scale

TIMEOUT_S: Final = 2.0  # KEDA gives up after 3


class Scaling:
    """Answers how many workers models need."""

    def __init__(self, calls: RedisCalls, catalog: Catalog, prefix: str) -> None:
        self._calls = calls
        self._catalog = catalog
        self._prefix = prefix

    async def answer(self, exchange: Exchange) -> None:
        """The document of a registered model. Raises CarpoolErrors: NotFoundError if it is none, and
        UnavailableError if no batcher tells."""
        model = exchange.model
        await self._catalog.model(model)
        key = Keys(model, self._prefix).report
        text = await self._calls.call(key, ("GET", key), TIMEOUT_S)
        report = None if text is None else BatcherReport.decode(text)
        if report is None or report.wanted is None:
            raise UnavailableError(
                f"no batcher tells how many workers the model {model!r} needs: none serves it, or one of "
                "another version does"
            )
        exchange.respond(200, JSON_HEADER, msgspec.json.encode(Scale(model, *report.wanted)))
