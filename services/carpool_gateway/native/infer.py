"""Requests for whose results a connection waits: a body in, a body out; and many bodies in one call.

A request of one body has no task: its exchange is the target of the result, and is answered by the callback
that reads results. Likewise a client that goes away withdraws its request.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Final, NamedTuple

from carpool.client.entries import Channel, Encoded
from carpool.client.envelopes import EnvelopeSink
from carpool.client.options import RequestOptions, left_of, read_options, result_ttl_ms
from carpool.client.producer import Producer
from carpool.client.sinks import Envelope, Sink
from carpool.errors import OK, CarpoolError, InvalidArgumentError, NotFoundError
from carpool.messages.requests import JSON
from carpool.messages.results import Result, ResultColumns
from carpool.store.kept import TIMEOUT_S
from carpool_gateway.answers import failure, http_error_of
from carpool_gateway.content_encoding import check_encoding, decompress
from carpool_gateway.credentials import Key, now_s
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.native.results import (
    error_line,
    figure_headers,
    further_headers,
    id_header,
    lines_of,
    result_line,
)
from carpool_gateway.options import content_type_of, options_of

_LINES_HEADER: Final = b"content-type: application/x-ndjson\r\n"


def answer(exchange: Exchange, envelope: Envelope) -> None:
    """Answer with a result of any status."""
    name, status = envelope["correlation_id"], envelope["status"]
    if status != OK:
        exchange.fail(failure(status, envelope["detail"], name))
        return
    headers = id_header(name) + figure_headers(
        envelope["content_type"], envelope["batch_size"], envelope["queue_us"], envelope["compute_us"]
    )
    if "first_us" in envelope or "warnings" in envelope or "version" in envelope:
        warnings = envelope.get("warnings") or ()
        headers += further_headers(envelope.get("first_us"), warnings, envelope.get("version", ""))
    exchange.respond(200, headers, envelope["body"])


class Asked(NamedTuple):
    """What the headers of a request ask for."""

    model: str
    options: RequestOptions  # of which `timeout_s` and `fields` are made
    content_type: str
    timeout_s: float
    fields: Mapping[str, Any]
    correlation_id: str | None
    result_ttl_ms: int | None = None  # how long the result is kept; None: as long as the model's


class ExchangeSink(Sink):
    """Answers an exchange with each result."""

    def put(self, target: Exchange, envelope: Envelope) -> None:
        """Answer with a result of any status."""
        answer(target, envelope)

    def put_columns(self, targets: Sequence[Exchange], columns: ResultColumns) -> None:
        """Answer each with its result."""
        ids, content_type, rows, batch_size, queue_us, compute_us, version = columns
        common = figure_headers(content_type, batch_size, queue_us, compute_us)
        common += further_headers(None, (), version)
        for at, target in enumerate(targets):
            target.respond(200, id_header(ids[at]) + common, rows[at])

    def fail(self, target: Exchange, error: CarpoolError) -> None:
        """Answer with an error."""
        target.fail(http_error_of(error))


class Inference:
    """Sends requests of exchanges. `default_timeout_s`: of those that name none."""

    def __init__(self, producer: Producer, limits: Limits, default_timeout_s: float) -> None:
        self._producer = producer
        self._limits = limits
        self._default_timeout_s = default_timeout_s
        self._answers, self._results = ExchangeSink(), EnvelopeSink()

    def read_headers(
        self, exchange: Exchange, key: Key, *, is_async: bool = False, is_kept: bool = False
    ) -> Asked:
        """What is asked for, before the body is read. `is_async`: nobody waits for the result meanwhile;
        `is_kept`: it is kept, to be read by ID. Raises HttpError and CarpoolError."""
        check_encoding(exchange)
        headers = exchange.headers
        options = options_of(headers)
        key.set_tenant(options)
        if (version := exchange.parameters.get("version")) is not None:
            options["version"] = version
        default_s = TIMEOUT_S if is_async else self._default_timeout_s
        if not is_kept and "result_ttl" in options:
            raise InvalidArgumentError(
                "Carpool-Result-Ttl-Ms: only with Prefer: respond-async or Idempotency-Key; other results "
                "are for the client that waits"
            )
        ttl_ms = result_ttl_ms(options.pop("result_ttl", None))
        timeout_s, fields = read_options(options, default_s)
        if timeout_s is None or (timeout_s > self._limits.timeout_s and not is_async):
            raise InvalidArgumentError(
                f"Carpool-Timeout-Ms: at most {self._limits.timeout_s * 1000:.0f}; for longer, send "
                "Prefer: respond-async"
            )
        content_type = content_type_of(headers.get(b"content-type"))
        own_id = options.get("correlation_id")
        return Asked(exchange.model, options, content_type, timeout_s, fields, own_id, ttl_ms)

    # --- one request ---------------------------------------------------------------------------------------

    def infer(self, asked: Asked, key: Key, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Send the body; the result is the answer. Raises HttpError and CarpoolErrors."""
        key.count(1, now_s())
        channel = self._producer.channels.get(asked.model)
        if channel is None or b"content-encoding" in exchange.headers:
            return self._prepare(asked, exchange)
        self._send(asked, exchange, channel)
        return None

    async def _prepare(self, asked: Asked, exchange: Exchange) -> None:
        """Decompress the body, and look the model up; then send."""
        await decompress(exchange, self._limits)
        channel, asked = await find(self._producer, asked)
        if not exchange.is_gone:
            self._send(asked, exchange, channel)

    def _send(self, asked: Asked, exchange: Exchange, channel: Channel) -> None:
        _, _, content_type, timeout_s, fields, own_id, _ = asked
        packer, body = self._producer.packer, (content_type, b"", exchange.body)
        name = packer.add(channel, body, fields, timeout_s, self._answers, exchange, own_id)
        exchange.on_gone = partial(packer.withdraw, name)

    # --- many requests -------------------------------------------------------------------------------------

    async def infer_many(self, asked: Asked, key: Key, exchange: Exchange) -> None:
        """Send each line of the body; answer with a line for each, in the same order, as they come.

        At most `limits.rows` of them have no result. A request that fails has a line that says so.
        """
        if asked.correlation_id is not None:
            raise InvalidArgumentError(
                "Carpool-Correlation-Id: each line is a request, with an ID of its own"
            )
        await decompress(exchange, self._limits)
        lines = lines_of(exchange.body)
        key.count(len(lines), now_s())
        channel, asked = await find(self._producer, asked)
        exchange.cancel_when_gone()
        packer = self._producer.packer
        rest, sent = iter(lines), deque[_Sent]()
        exchange.begin(200, _LINES_HEADER)
        try:
            while True:
                for line in islice(rest, self._limits.rows - len(sent)):
                    sent.append(self._send_line(asked, channel, line))
                if not sent:
                    break
                with suppress(CarpoolError):
                    await sent[0].future
                ready: list[bytes] = []
                while sent and sent[0].future.done():
                    ready.append(_line_of(sent.popleft()))
                await exchange.write(b"".join(ready))
            exchange.end()
        finally:
            for name, future in sent:
                packer.withdraw(name, future)

    def _send_line(self, asked: Asked, channel: Channel, line: bytes) -> _Sent:
        packer = self._producer.packer
        future: asyncio.Future[Result] = packer.loop.create_future()
        try:
            body = Encoded(JSON, b"", line)
            name = packer.add(channel, body, asked.fields, asked.timeout_s, self._results, future)
            return _Sent(name, future)
        except CarpoolError as error:
            future.set_exception(error)
            return _Sent("", future)


class _Sent(NamedTuple):
    """A request of several, and its result."""

    correlation_id: str
    future: asyncio.Future[Result]


async def find(producer: Producer, asked: Asked) -> tuple[Channel, Asked]:
    """The channel of the model, and what is asked for then: if a worker is loading the model, with what is
    left of the timeout and of the delay. Raises CarpoolErrors."""
    channel = producer.channels.get(asked.model)
    if channel is not None:
        return channel, asked
    try:
        channel, waited_s = await producer.find_channel(asked.model, asked.timeout_s)
    except NotFoundError:  # whose text names all models
        raise NotFoundError(f"no worker has registered a model {asked.model!r}") from None
    if waited_s:
        timeout_s, fields = read_options(left_of(asked.options, asked.timeout_s, waited_s), asked.timeout_s)
        assert timeout_s is not None
        asked = asked._replace(timeout_s=timeout_s, fields=fields)
    return channel, asked


def _line_of(sent: _Sent) -> bytes:
    error = sent.future.exception()
    if error is None:
        return result_line(sent.future.result())
    assert isinstance(error, CarpoolError)
    return error_line(http_error_of(error))
