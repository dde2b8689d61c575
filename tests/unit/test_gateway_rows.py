"""The rows of a request of the Open Inference Protocol, and how it is answered."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from carpool_gateway.answers import HttpError
from carpool_gateway.credentials import ANYBODY
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.oip.prepared import Preparer
from carpool_gateway.oip.responses import RowResult
from carpool_gateway.tensor_requests import Asked, SentRows, TensorRequests
from carpool_gateway.v2 import infer
from support.oip import identity, packed, tensor, written


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
        owner = a_gateway()
        exchange = Exchange(cast(Any, connection))
        exchange.request_id = "mine"
        prepared, bodies = Preparer().prepare(identity("FP32"), written(tensor([1.5])), None)
        answer = partial(owner._respond, exchange, prepared)
        rows = SentRows(cast(Any, None), len(bodies), answer, "row")
        rows.put(0, RowResult("OK", "application/msgpack", bytes(size)))
        while not connection.answers:
            await asyncio.sleep(0)

    monkeypatch.setattr(infer, "_response_of", partial(_raise, KeyError("a body")))
    asyncio.run(answered())
    assert (connection.answers, connection.failures) == ([500], [("KeyError", "mine")])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ends", ["answered", "failed", "gone"])
def test_nothing_of_a_request_is_left_to_the_garbage_collector(rows: int, ends: str) -> None:
    """Given requests that ended, expect that they are freed at once: the collector runs rarely, and then
    holds up all others."""
    sent = list[Any]()
    owner = a_gateway(SimpleNamespace(packer=Sent(sent)))
    exchange = Exchange(cast(Any, Recording()))
    body = written({"name": "x", "datatype": "FP32", "shape": [rows, 1], "data": [1.5] * rows})
    prepared, bodies = Preparer().prepare(identity("FP32"), body, None)
    asked = Asked(ANYBODY, {})
    owner._send(asked, exchange, cast(Any, None), prepared, bodies)
    results = [packed(np.array([1.5], np.float32))] * rows
    if ends == "failed":
        results[0] = RowResult("INTERNAL", detail="no")
    if ends == "gone":
        assert exchange.on_gone is not None
        exchange.on_gone(exchange)
        exchange.is_gone, exchange.on_gone = True, None
    for (of_request, at), result in zip(sent, results, strict=True):
        of_request.put(at, result)
    freed = [weakref.ref(exchange), weakref.ref(sent[0][0])]
    gc.disable()
    try:
        del exchange, of_request
        sent.clear()
        assert [one() for one in freed] == [None, None]
    finally:
        gc.enable()


class Sent:
    """A packer that keeps the targets of what is added."""

    def __init__(self, targets: list[Any]) -> None:
        self._targets = targets

    def add(self, channel: Any, body: Any, fields: Any, timeout_s: float, sink: Any, target: Any) -> str:
        self._targets.append(target)
        return f"id-{len(self._targets)}"

    def withdraw(self, correlation_id: str, target: Any) -> None:
        assert target in self._targets


def a_gateway(producer: Any = None) -> infer.TensorInference:
    limits = Limits()
    requests = TensorRequests(
        producer=producer, catalog=cast(Any, None), limits=limits, default_timeout_s=1.0
    )
    return infer.TensorInference(requests, limits)


def _raise(error: Exception, *_: Any) -> None:
    raise error
