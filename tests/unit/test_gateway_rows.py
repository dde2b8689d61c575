"""The rows of a request of the Open Inference Protocol, and how it is answered."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

import pytest

from carpool_gateway import open_inference
from carpool_gateway.answers import HttpError
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.oip.prepared import Preparer
from carpool_gateway.oip.responses import RowResult
from support.oip import identity, tensor, written


class Recording:
    """A connection that keeps what is written, and why the gateway failed."""

    is_draining = False

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.failures: list[tuple[str, str]] = []

    def write_answer(self, exchange: Exchange, headers: bytes, body: bytes) -> None:
        self.answers.append(exchange.code)

    def failure(self, error: Exception, request_id: str) -> HttpError:
        self.failures.append((type(error).__name__, request_id))
        return HttpError(500, "the gateway failed")


@pytest.mark.parametrize("size", [1, 200_000])  # on the event loop, and on the other thread
def test_a_mistake_in_a_response_is_logged_and_answered(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    connection = Recording()

    async def answered() -> None:
        owner = open_inference.OpenInference(
            producer=cast(Any, None),
            catalog=cast(Any, None),
            limits=Limits(),
            default_timeout_s=1.0,
            server_name="carpool",
        )
        exchange = Exchange(cast(Any, connection))
        exchange.request_id = "mine"
        prepared, bodies = Preparer().prepare(identity("FP32"), written(tensor([1.5])), None)
        rows = open_inference._Rows(exchange, prepared, len(bodies), owner)
        rows.put(0, RowResult("OK", "application/msgpack", bytes(size)))
        while not connection.answers:
            await asyncio.sleep(0)

    monkeypatch.setattr(open_inference, "_response_of", partial(_raise, KeyError("a body")))
    asyncio.run(answered())
    assert (connection.answers, connection.failures) == ([500], [("KeyError", "mine")])


def _raise(error: Exception, *_: Any) -> None:
    raise error
