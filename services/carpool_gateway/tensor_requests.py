"""Requests of tensors: rows out, the results of all of them back.

Each row of a request's batch is a request of the model, and all rows share a packed entry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, TypeVar

from carpool.client.entries import Channel, Encoded
from carpool.client.options import RequestOptions, read_options
from carpool.client.producer import Producer
from carpool.client.sinks import Envelope, Sink
from carpool.errors import OK, CarpoolError, InvalidArgumentError, NotFoundError
from carpool.messages.results import ResultColumns
from carpool.rows import Rows
from carpool_gateway.catalog import Catalog
from carpool_gateway.credentials import Key, now_s
from carpool_gateway.joint_requests import JointRequests, Target
from carpool_gateway.limits import Limits
from carpool_gateway.oip import documents
from carpool_gateway.oip.errors import ProtocolError
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.oip.plans import Plan
from carpool_gateway.oip.prepared import Prepared
from carpool_gateway.oip.requests import InferRequest
from carpool_gateway.oip.responses import RowResult

LARGE_JSON_BYTES: Final = 64 * 1024  # decoding takes 0.4 ms
LARGE_TEXTS_BYTES: Final = 256 * 1024  # of BYTES in binary data: with 4 bytes each, decoding takes 9 ms
_LARGE_COMPRESSED_BYTES: Final = 16 * 1024  # takes 0.2 ms
_ENTRY_ROWS_MIN: Final = 8  # of a request; fewer share an entry with those of other requests
_T = TypeVar("_T")

Answer = Callable[[Sequence[RowResult]], None]
"""Takes the results of all rows, or only the one that failed."""
SentRows = JointRequests[RowResult]
_Target = Target[RowResult]


class Asked(NamedTuple):
    """Who asks, and for what beside the tensors."""

    key: Key
    options: RequestOptions


class TensorRequests:
    """Sends the rows of requests. `default_timeout_s`: of requests that name none."""

    def __init__(
        self, *, producer: Producer, catalog: Catalog, limits: Limits, default_timeout_s: float
    ) -> None:
        self.producer = producer
        self._catalog = catalog
        self.limits = limits
        self._default_timeout_s = default_timeout_s
        self._sink = _RowSink()
        self._pool = ThreadPoolExecutor(1, "large-tensors")

    def used_lately(self, name: str, version: str | None = None) -> tuple[OfferedModel, Channel] | None:
        """A model and its channel, if nothing has to be looked up. Raises NotFoundError, for the version."""
        model, channel = self._catalog.known(name), self.producer.channels.get(name)
        if model is None or channel is None:
            return None
        return (model.of_version(version) if version else model), channel

    async def find(self, name: str, version: str | None = None) -> tuple[OfferedModel, Channel]:
        """A model and its channel. Raises CarpoolErrors."""
        return await self.model(name, version), await self.channel(name)

    async def model(self, name: str, version: str | None = None) -> OfferedModel:
        """A registered model. `version`: the one that is asked for; None: any. Raises CarpoolErrors."""
        return (await self._catalog.model(name)).of_version(version)

    async def channel(self, name: str) -> Channel:
        """The channel of a model. Raises CarpoolErrors."""
        channel = self.producer.channels.get(name)
        if channel is not None:
            return channel
        try:
            return await self.producer.open_channel(name, self._default_timeout_s)
        except NotFoundError:
            raise documents.unknown_model(name) from None

    async def compute(self, work: Callable[[], _T]) -> _T:
        """The result of what takes long, from another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def admit(
        self,
        asked: Asked,
        request: InferRequest,
        rows: int,
        accept: str,
        fields_of_model: Mapping[str, Any],
        version: str = "",
    ) -> tuple[float, Any]:
        """Count a request against its key. Returns the timeout and the fields of each row: parameters of the
        request, then headers. `accept`: the content type that is wanted of results. `version`: of the model,
        that is asked for. Raises HttpError and InvalidArgumentError."""
        asked.key.count(rows or 1, now_s())
        options: dict[str, Any] = dict(asked.options)
        if request.timeout_us is not None:
            options["timeout"] = request.timeout_us / 1e6
        if request.priority is not None:
            options["priority"] = request.priority
        if request.sequence_id:
            options["sequence_id"] = request.sequence_id
            options["sequence_start"], options["sequence_end"] = request.sequence_start, request.sequence_end
        if accept:
            options["accept"] = accept
        if version:
            options["version"] = version
        if fields_of_model:
            options["fields"] = {**options.get("fields", {}), **fields_of_model}
        if "correlation_id" in options:
            raise InvalidArgumentError("Carpool-Correlation-Id: each row is a request, with an ID of its own")
        timeout_s, fields = read_options(options, self._default_timeout_s)  # type: ignore[arg-type]
        if timeout_s is None or timeout_s > self.limits.timeout_s:
            raise ProtocolError(f"timeout: at most {self.limits.timeout_s * 1e6:.0f} microseconds")
        return timeout_s, fields

    def send(
        self,
        asked: Asked,
        channel: Channel,
        prepared: Prepared,
        bodies: Rows | list[bytes],
        answer: Answer,
    ) -> SentRows:
        """Send the rows. `answer` is called once, unless they are withdrawn before; at once if there is none.
        Raises HttpError and CarpoolErrors, and then has sent nothing."""
        count, planned = len(bodies), prepared.plan
        version = prepared.model.asked
        timeout_s, fields = self.admit(
            asked, prepared.request, count, planned.accept, planned.fields, version
        )
        rows = SentRows(self.producer.packer, count, answer, "row")
        try:
            self._add(channel, prepared.plan.content_type, bodies, fields, timeout_s, rows)
        except BaseException:
            rows.withdraw()
            raise
        if not rows.targets:
            rows.finish()
        return rows

    def _add(
        self,
        channel: Channel,
        content_type: str,
        bodies: Rows | list[bytes],
        fields: Mapping[str, Any],
        timeout_s: float,
        rows: SentRows,
    ) -> None:
        """Add each row to an entry."""
        packer = self.producer.packer
        if not isinstance(bodies, Rows):
            for element, target in zip(bodies, rows.targets, strict=True):
                body = (content_type, b"", element)
                rows.names.append(packer.add(channel, body, fields, timeout_s, self._sink, target))
            return
        head, data, width = bodies.head, bodies.data, bodies.width
        count = len(rows.targets)
        if count < _ENTRY_ROWS_MIN:
            for at, target in enumerate(rows.targets):
                body = (content_type, head, bytes(data[at * width : (at + 1) * width]))
                rows.names.append(packer.add(channel, body, fields, timeout_s, self._sink, target))
            return
        step = channel.rows_max(len(head) + width)
        for start in range(0, count, step):
            targets = rows.targets[start : start + step]
            part = bytes(data[start * width : (start + len(targets)) * width])
            encoded = Encoded(content_type, head, part)
            rows.names += packer.add_rows(channel, encoded, fields, timeout_s, self._sink, targets)


class _RowSink(Sink):
    """Gives each row its result."""

    def put(self, target: _Target, envelope: Envelope) -> None:
        """Take a result of any status."""
        rows, at = target
        status = envelope["status"]
        if status == OK:
            version = envelope.get("version", "")
            rows.put(at, RowResult(status, envelope["content_type"], envelope["body"], version=version))
        else:
            rows.fail(at, RowResult(status, detail=rows.told(at, envelope["detail"])))

    def put_columns(self, targets: Sequence[_Target], columns: ResultColumns) -> None:
        """Take results that are alike."""
        content_type, bodies, version = columns.content_type, columns.rows, columns.version
        for number, (rows, at) in enumerate(targets):
            rows.put(at, RowResult(OK, content_type, bodies[number], "", version))

    def fail(self, target: _Target, error: CarpoolError) -> None:
        """Take an error."""
        rows, at = target
        rows.fail(at, RowResult(error.status, detail=rows.told(at, error.detail)))


def takes_long(planned: Plan, results: Sequence[RowResult], coding: str) -> bool:
    """Whether a response of these results takes long to make. `coding`: how it is compressed, if at all."""
    size = sum([len(result.body) for result in results])
    if size <= _LARGE_COMPRESSED_BYTES:
        return False
    if coding:
        return True
    if all(output.binary and not output.classes for output in planned.outputs):
        return size > LARGE_TEXTS_BYTES and any(output.spec.datatype == "BYTES" for output in planned.outputs)
    return size > LARGE_JSON_BYTES
