"""ModelInfer: one request of tensors, one response or one error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from carpool.client.entries import Channel
from carpool.keys import MODEL_NAME
from carpool.rows import Rows
from carpool_gateway.oip import documents
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.prepared import Prepared
from carpool_gateway.oip.responses import RowResult
from carpool_gateway.rpc.calls import Call
from carpool_gateway.rpc.requests import MessagePreparer, SplitRequest, split
from carpool_gateway.rpc.responses import with_id
from carpool_gateway.tensor_requests import Answer, Asked, SentRows, TensorRequests, takes_long

_T = TypeVar("_T")


class Sendable(NamedTuple):
    """A request that is ready to be sent."""

    asked: Asked
    channel: Channel
    prepared: Prepared
    bodies: Rows | list[bytes]
    id: bytes

    def encode(self, results: Sequence[RowResult]) -> bytes:
        """The message of the response with these results. Raises CarpoolErrors."""
        return with_id(self.prepared.respond(results), self.id)

    def takes_long(self, results: Sequence[RowResult]) -> bool:
        """Whether `encode` does."""
        return takes_long(self.prepared.plan, results, "")


class MessageInference:
    """Sends the requests of messages."""

    def __init__(self, requests: TensorRequests) -> None:
        self._requests = requests
        self._preparer = MessagePreparer()

    async def infer(self, call: Call, message: bytes) -> bytes:
        """The message of the response. Raises HttpError and CarpoolErrors."""
        request = split(message)
        model, channel = await self.find(call, request)
        sendable = await self.prepare(call, request, model, channel)
        future: asyncio.Future[Sequence[RowResult]] = asyncio.get_running_loop().create_future()
        rows = self.send(sendable, partial(_resolve, future))
        try:
            results = await future
        except asyncio.CancelledError:
            rows.withdraw()
            raise
        if sendable.takes_long(results):
            return await self.compute(partial(sendable.encode, results))
        return sendable.encode(results)

    async def find(self, call: Call, request: SplitRequest) -> tuple[OfferedModel, Channel]:
        """The model of a request that the caller may use, and its channel. Raises HttpError and
        CarpoolErrors."""
        name = request.model_name
        call.authorize(name)
        found = self._requests.used_lately(name, request.model_version)
        if found is None:
            if not MODEL_NAME.fullmatch(name):
                raise documents.unknown_model(name)
            found = await self._requests.find(name, request.model_version)
        return found

    async def prepare(
        self, call: Call, request: SplitRequest, model: OfferedModel, channel: Channel
    ) -> Sendable:
        """A request to be sent. Raises HttpError and CarpoolErrors."""
        read = partial(self._preparer.prepare, model, request)
        prepared, bodies = await self.compute(read) if request.is_large else read()
        return Sendable(Asked(call.key, call.options()), channel, prepared, bodies, request.id)

    def send(self, sendable: Sendable, answer: Answer) -> SentRows:
        """Send the rows of a request: see `TensorRequests.send`."""
        asked, channel, prepared, bodies, _ = sendable
        return self._requests.send(asked, channel, prepared, bodies, answer)

    async def compute(self, work: Callable[[], _T]) -> _T:
        """The result of what takes long, from another thread."""
        return await self._requests.compute(work)


def _resolve(future: asyncio.Future[Sequence[RowResult]], results: Sequence[RowResult]) -> None:
    if not future.done():
        future.set_result(results)
