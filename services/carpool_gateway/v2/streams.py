"""Requests of tensors, and their responses as they are made: for all protocols that can send several.

    async with await streams.send(asked, model, request, memory) as responses:
        async for outputs in responses:     # one response: the outputs that are wanted, as `encode_response`
            ...                             # of oip.responses takes them
    responses.reply                         # how it was served

A model that steps makes a response of each value that it emits, of a request of one row. Any other model
makes one response, of any number of rows. What fails is raised, before the first response or after it. If the
block is left before the end, or its task is cancelled, the request is withdrawn.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self, TypeVar

from carpool.client.entries import Channel, Encoded
from carpool.client.envelopes import EnvelopeSink
from carpool.client.packing import Packer
from carpool.client.sinks import Reply
from carpool.messages.requests import JSON
from carpool.messages.results import Chunk, Result
from carpool.model_settings import ModelKind
from carpool_gateway.chunks import Chunks
from carpool_gateway.limits import BodyMemory
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import Plan, plan
from carpool_gateway.oip.requests import InferRequest
from carpool_gateway.oip.responses import OutputTensor, RowResult, join_results, responses_of_chunk
from carpool_gateway.tensor_requests import LARGE_JSON_BYTES, Asked, TensorRequests

Outputs = Sequence[OutputTensor]
_T = TypeVar("_T")


class TensorStreams:
    """Sends requests of tensors, and of single values, whose responses come one by one."""

    def __init__(self, requests: TensorRequests) -> None:
        self._requests = requests
        self.find = requests.model
        self.compute = requests.compute

    async def send(
        self,
        asked: Asked,
        model: OfferedModel,
        request: InferRequest,
        memory: BodyMemory,
        *,
        is_joined: bool = False,
    ) -> Responses:
        """Send a request. `memory`: where what its client reads slowly is counted. `is_joined`: there is to
        be one response, in which a model that steps has put all that it emitted end to end. Raises HttpError
        and CarpoolErrors."""
        planned = plan(model, request)
        rows = len(planned.bodies)
        if model.kind is ModelKind.STEPPING and rows != 1:
            raise ProtocolError(
                f"the model {model.name!r} steps, so a request has one row, and this one has {rows}"
            )
        timeout_s, fields = self._requests.admit(
            asked, request, rows, planned.accept, planned.fields, model.asked
        )
        channel = await self._requests.channel(model.name)
        bodies = [Encoded(planned.content_type, b"", planned.bodies[at]) for at in range(rows)]
        if rows != 1 or is_joined:
            return _Gathered(
                model, planned, self._requests.producer.packer, channel, bodies, fields, timeout_s
            )
        return _Streamed(model, planned, self._chunks(channel, bodies[0], fields, timeout_s, memory))

    async def send_value(
        self,
        asked: Asked,
        name: str,
        body: bytes,
        request: InferRequest,
        memory: BodyMemory,
        version: str | None = None,
    ) -> Chunks:
        """Send the JSON of a value to a model, or to a version of it, with the parameters of `request`.
        Raises HttpError and CarpoolErrors."""
        of_version = (await self.find(name, version)).asked if version else ""
        timeout_s, fields = self._requests.admit(asked, request, 1, "", request.parameters, of_version)
        channel = await self._requests.channel(name)
        return self._chunks(channel, Encoded(JSON, b"", body), fields, timeout_s, memory)

    def _chunks(
        self, channel: Channel, body: Encoded, fields: Mapping[str, Any], timeout_s: float, memory: BodyMemory
    ) -> Chunks:
        return Chunks(
            self._requests.producer,
            channel,
            body,
            fields,
            timeout_s,
            memory=memory,
            unread_bytes_max=self._requests.limits.unread_bytes,
        )


class Responses:
    """The responses to one request, as an async iterator of their outputs. To be used with `async with`.

    `reply`: how the request was served, once the last response of a stream was taken; else None.
    """

    reply: Reply | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Outputs:
        """The outputs of the next response. Raises CarpoolErrors."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take no more. Withdraws what has no result."""
        raise NotImplementedError


class _Streamed(Responses):
    """Of one row: a response for each value in its chunks, or for its result."""

    def __init__(self, model: OfferedModel, planned: Plan, chunks: Chunks) -> None:
        self._model = model
        self._plan = planned
        self._chunks = chunks
        self._ready: deque[Outputs] = deque()

    async def __anext__(self) -> Outputs:
        while not self._ready:
            try:
                item = await self._chunks.__anext__()
            except StopAsyncIteration:
                self.reply = self._chunks.reply
                raise
            if isinstance(item, Chunk):
                self._ready += responses_of_chunk(self._model, self._plan, item)
            else:
                self._ready.append(join_results(self._model, self._plan, [_row_result(item)]))
        return self._ready.popleft()

    def close(self) -> None:
        self._chunks.close()


class _Gathered(Responses):
    """One response, of the results of all rows."""

    def __init__(
        self,
        model: OfferedModel,
        planned: Plan,
        packer: Packer,
        channel: Channel,
        bodies: Sequence[Encoded],
        fields: Mapping[str, Any],
        timeout_s: float,
    ) -> None:
        self._model = model
        self._plan = planned
        self._packer = packer
        self._is_taken = False
        self._sent: list[tuple[str, asyncio.Future[Result]]] = []
        try:
            for body in bodies:
                future: asyncio.Future[Result] = packer.loop.create_future()
                name = packer.add(channel, body, fields, timeout_s, _SINK, future)
                self._sent.append((name, future))
        except BaseException:
            self.close()
            raise

    async def __anext__(self) -> Outputs:
        if self._is_taken:
            raise StopAsyncIteration
        self._is_taken = True
        results = await asyncio.gather(*[future for _, future in self._sent])
        return join_results(self._model, self._plan, [_row_result(result) for result in results])

    def close(self) -> None:
        for name, future in self._sent:
            if not future.done() or future.cancelled():
                self._packer.withdraw(name, future)


_SINK: Final = EnvelopeSink()
_LARGE_ELEMENTS: Final = 4096  # of BYTES


def is_large_json(outputs: Outputs) -> bool:
    """Whether it takes long to write these in JSON."""
    return any(
        len(output.data) > (_LARGE_ELEMENTS if isinstance(output.data, list) else LARGE_JSON_BYTES)
        for output in outputs
        if not output.binary
    )


def _row_result(result: Result) -> RowResult:
    return RowResult(result.status, result.content_type, result.body or b"", result.detail or "")
