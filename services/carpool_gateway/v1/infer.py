"""Requests of OpenAI's API: prompts in, what a model writes out; inputs in, vectors out.

Each prompt or input is a request of the model, and all of a call share a packed entry. A call has no task, if
it wants no stream and its model was used lately. If the client goes away, all its requests are withdrawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

from carpool.client.entries import Channel
from carpool.client.options import RequestOptions, read_options, result_ttl_ms
from carpool.client.producer import Producer
from carpool.client.sinks import Envelope, Sink
from carpool.errors import INVALID_ARGUMENT, OK, CarpoolError, InvalidArgumentError, NotFoundError
from carpool.messages.requests import JSON, MSGPACK
from carpool.spoken import EMBEDDINGS
from carpool_gateway.answers import JSON_HEADER, failure, http_error_of
from carpool_gateway.catalog import Catalog
from carpool_gateway.content_encoding import decompress
from carpool_gateway.credentials import INFER, Key, now_s
from carpool_gateway.exchange import Exchange
from carpool_gateway.joint_requests import JointRequests, Target
from carpool_gateway.limits import Limits
from carpool_gateway.native import infer as native
from carpool_gateway.native.kept import KeptRequests, check_no_id
from carpool_gateway.oip.models import OfferedModel
from carpool_gateway.openai import answers, embeddings
from carpool_gateway.openai.errors import RequestError, after_acceptance, unknown_model
from carpool_gateway.openai.pieces import Written
from carpool_gateway.openai.requests import Asked, Document, model_of, read_document, read_request
from carpool_gateway.v1.streaming import Streams

_LARGE_JSON_BYTES: Final = 64 * 1024  # token IDs take 0.5 ms to decode and to check
_LARGE_VECTOR_BYTES: Final = 64 * 1024  # as text they take 5 ms
_TOKENS_HINT: Final = (
    "; the client sent token IDs: let it send text (check_embedding_ctx_length=False of LangChain's "
    "OpenAIEmbeddings)"
)


class Caller(NamedTuple):
    """Who asks, through which interface, and for what in headers. `is_kept`: with an Idempotency-Key."""

    interface: str
    key: Key
    options: RequestOptions
    is_kept: bool


class OpenAIInference:
    """Answers exchanges. `default_timeout_s`: of embeddings that name none. What writes text has as long as
    a request may have: it ends by itself, and clients of this API wait."""

    def __init__(
        self,
        *,
        producer: Producer,
        catalog: Catalog,
        kept: KeptRequests,
        limits: Limits,
        default_timeout_s: float,
    ) -> None:
        self._producer = producer
        self._catalog = catalog
        self._kept = kept
        self._limits = limits
        self._default_timeout_s = default_timeout_s
        self._sink = _AnswerSink()
        self._streams = Streams(producer, limits)
        self._tasks: set[asyncio.Task[None]] = set()

    def infer(self, caller: Caller, exchange: Exchange) -> Coroutine[Any, Any, None] | None:
        """Send the prompts; answer with what comes of them. Raises HttpError and CarpoolErrors."""
        body = exchange.body
        if len(body) > _LARGE_JSON_BYTES or b"content-encoding" in exchange.headers:
            return self._read_large(caller, exchange)
        return self._infer(caller, exchange, read_document(body))

    async def _read_large(self, caller: Caller, exchange: Exchange) -> None:
        await decompress(exchange, self._limits)
        document = await asyncio.to_thread(read_document, exchange.body)
        if not exchange.is_gone and (rest := self._infer(caller, exchange, document)) is not None:
            await rest

    def _infer(
        self, caller: Caller, exchange: Exchange, document: Document
    ) -> Coroutine[Any, Any, None] | None:
        name = model_of(document)
        exchange.model = name
        caller.key.check(INFER, name)
        model, channel = self._catalog.known(name), self._producer.channels.get(name)
        if model is None or channel is None:
            return self._look_up(caller, exchange, document)
        return self._send(caller, exchange, document, model, channel)

    async def _look_up(self, caller: Caller, exchange: Exchange, document: Document) -> None:
        name = exchange.model
        try:
            model = await self._catalog.model(name)
            channel = self._producer.channels.get(name)
            if channel is None:
                channel = await self._producer.open_channel(name, self._default_timeout_s)
        except NotFoundError:
            raise unknown_model(name) from None
        if (
            not exchange.is_gone
            and (rest := self._send(caller, exchange, document, model, channel)) is not None
        ):
            await rest

    def _send(
        self, caller: Caller, exchange: Exchange, document: Document, model: OfferedModel, channel: Channel
    ) -> Coroutine[Any, Any, None] | None:
        read = partial(read_request, caller.interface, document, model.spoken, exchange.model)
        if len(exchange.body) > _LARGE_JSON_BYTES:
            return self._send_large(caller, exchange, read, channel)
        return self._send_asked(caller, exchange, read(), channel)

    async def _send_large(
        self, caller: Caller, exchange: Exchange, read: Callable[[], Asked], channel: Channel
    ) -> None:
        asked = await asyncio.to_thread(read)
        if not exchange.is_gone and (rest := self._send_asked(caller, exchange, asked, channel)) is not None:
            await rest

    def _send_asked(
        self, caller: Caller, exchange: Exchange, asked: Asked, channel: Channel
    ) -> Coroutine[Any, Any, None] | None:
        timeout_s, fields, ttl_ms = self._options(caller, len(asked.bodies))
        own_id = caller.options.get("correlation_id")
        caller.key.count(len(asked.bodies), now_s())
        respond = self._responder(caller, exchange.model, asked)
        if caller.is_kept:
            kept = native.Asked(exchange.model, caller.options, JSON, timeout_s, fields, own_id, ttl_ms)
            return self._infer_once(kept, caller.key, exchange, asked, respond)
        if asked.is_stream:
            exchange.route = "v1_stream"
            return self._streams.answer(exchange, caller.interface, asked, channel, fields, timeout_s, own_id)
        joint = JointRequests(
            self._producer.packer, len(asked.bodies), partial(_finish, exchange, respond), "prompt"
        )
        try:
            for body, target in zip(asked.bodies, joint.targets, strict=True):
                joint.names.append(
                    self._producer.packer.add(
                        channel, (JSON, b"", body), fields, timeout_s, self._sink, target, own_id
                    )
                )
        except BaseException:
            joint.withdraw()
            raise
        exchange.on_gone = joint.withdraw
        return None

    def _options(self, caller: Caller, requests: int) -> tuple[float, Mapping[str, Any], int | None]:
        """The timeout and the fields of each request, and how long a kept result is kept."""
        options: dict[str, Any] = dict(caller.options)
        is_embedding = caller.interface == EMBEDDINGS
        if is_embedding:
            options["accept"] = MSGPACK  # vectors are bytes there
        if requests > 1 and "correlation_id" in options:
            raise InvalidArgumentError(
                "Carpool-Correlation-Id: each prompt is a request, with an ID of its own"
            )
        if "result_ttl" in options and not caller.is_kept:
            raise InvalidArgumentError("Carpool-Result-Ttl-Ms: only with Idempotency-Key")
        ttl_ms = result_ttl_ms(options.pop("result_ttl", None))
        longest_s = self._limits.timeout_s
        default_s = self._default_timeout_s if is_embedding else longest_s
        timeout_s, fields = read_options(options, default_s)  # type: ignore[arg-type]
        if timeout_s is None or timeout_s > longest_s:
            raise InvalidArgumentError(f"Carpool-Timeout-Ms: at most {longest_s * 1000:.0f}")
        return timeout_s, fields, ttl_ms

    async def _infer_once(
        self, kept: native.Asked, key: Key, exchange: Exchange, asked: Asked, respond: _Responder
    ) -> None:
        """Answer a request with an Idempotency-Key."""
        if asked.is_stream or len(asked.bodies) > 1:
            raise RequestError("Idempotency-Key: is for one prompt or input, without a stream", None)
        check_no_id(kept)
        try:
            envelope = await self._kept.result_of(kept, key, exchange, asked.bodies[0])
        except CarpoolError as error:
            raise http_error_of(error) from None
        assert envelope is not None, "nobody asked for a result that comes later"
        respond(exchange, [envelope])

    def _responder(self, caller: Caller, model: str, asked: Asked) -> _Responder:
        if caller.interface == EMBEDDINGS:
            return partial(self._respond_with_vectors, model, asked)
        return partial(_respond_with_texts, caller.interface, model, asked.extras)

    def _respond_with_vectors(
        self, model: str, asked: Asked, exchange: Exchange, envelopes: Sequence[Envelope]
    ) -> None:
        for envelope in envelopes:
            _check_ok(envelope, _TOKENS_HINT if asked.has_tokens else "")
        make = partial(_vectors_document, model, asked, envelopes)
        if sum([len(envelope["body"]) for envelope in envelopes]) <= _LARGE_VECTOR_BYTES:
            exchange.respond(200, JSON_HEADER, make())
            return
        task = asyncio.ensure_future(_respond_later(exchange, make))
        self._tasks.add(task)  # the event loop has only a weak reference
        task.add_done_callback(self._tasks.discard)


_Responder = Callable[[Exchange, Sequence[Envelope]], None]
"""Answers with the results of all prompts, of any status."""


_Outcome = Envelope | CarpoolError
_Target = Target[_Outcome]


def _finish(exchange: Exchange, respond: _Responder, outcomes: Sequence[_Outcome]) -> None:
    """Answer with what became of the prompts."""
    try:
        if isinstance(outcomes[0], CarpoolError):
            raise outcomes[0]
        respond(exchange, cast(Sequence[Envelope], outcomes))
    except CarpoolError as error:
        exchange.fail(after_acceptance(http_error_of(error)))
    except Exception as error:
        exchange.fail_with(error)


def _respond_with_texts(
    interface: str, model: str, extras: Sequence[str], exchange: Exchange, envelopes: Sequence[Envelope]
) -> None:
    choices: list[answers.Choice] = []
    for envelope in envelopes:
        _check_ok(envelope)
        written = Written(extras)
        text = written.add(envelope["content_type"], envelope["body"])
        choices.append(answers.Choice(text, written))
    body = answers.document(
        interface,
        choices,
        correlation_id=envelopes[0]["correlation_id"],
        model=model,
        created_s=int(time.time()),
    )
    exchange.respond(200, JSON_HEADER, body)


async def _respond_later(exchange: Exchange, make: Callable[[], bytes]) -> None:
    try:
        body = await asyncio.to_thread(make)
    except CarpoolError as error:
        exchange.fail(after_acceptance(http_error_of(error)))
    except Exception as error:
        exchange.fail_with(error)
    else:
        exchange.respond(200, JSON_HEADER, body)


def _vectors_document(model: str, asked: Asked, envelopes: Sequence[Envelope]) -> bytes:
    embedded = [
        embeddings.read_embedding(envelope["content_type"], envelope["body"]) for envelope in envelopes
    ]
    return embeddings.document(embedded, model=model, is_base64=asked.is_base64)


def _check_ok(envelope: Envelope, hint: str = "") -> None:
    """Raise HttpError unless this is a result."""
    status = envelope["status"]
    if status != OK:
        detail = envelope["detail"] + (hint if status == INVALID_ARGUMENT else "")
        raise after_acceptance(failure(status, detail, envelope["correlation_id"]))


class _AnswerSink(Sink):
    """Gives each prompt its result."""

    def put(self, target: _Target, envelope: Envelope) -> None:
        """Take a result of any status."""
        joint, at = target
        if envelope["status"] == OK:
            joint.put(at, envelope)
        else:
            joint.fail(at, {**envelope, "detail": joint.told(at, envelope["detail"])})

    def fail(self, target: _Target, error: CarpoolError) -> None:
        """Take an error."""
        joint, at = target
        joint.fail(at, error)
