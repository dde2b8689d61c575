"""Requests whose results are read later by ID: `Prefer: respond-async` and `Idempotency-Key`.

`Prefer: respond-async` is answered at once, with the path under which the result will be. `Idempotency-Key`
identifies a request, so that sending it again does not execute it again, whatever died meanwhile. Both are
alike in Redis: see `carpool.store.kept`. Neither is withdrawn when a client goes away.

A wait for such a result takes a connection to Redis for a second at a time, of at most CONNECTIONS_MAX.

Why: docs/decisions/0092.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any, Final

from carpool.client.entries import withdraw_command
from carpool.client.options import expiration_ms
from carpool.client.producer import Producer
from carpool.client.sinks import Envelope
from carpool.errors import DeadlineExceededError, InvalidArgumentError
from carpool.keys import CORRELATION_ID, Keys
from carpool.store.kept import (
    fingerprint_of,
    keep_arguments,
    keep_command,
    kept_result,
    owner_of_tenant,
    owner_prefix,
    presence,
    read_command,
)
from carpool_gateway.answers import JSON_HEADER, RETRY_AFTER, HttpError
from carpool_gateway.catalog import Catalog
from carpool_gateway.content_encoding import decompress
from carpool_gateway.credentials import ANYBODY, Key, now_s
from carpool_gateway.exchange import Exchange
from carpool_gateway.limits import Limits
from carpool_gateway.native.infer import Asked, answer
from carpool_gateway.options import preferences, wants_async
from carpool_gateway.redis_calls import REPLY_S_MAX, RedisCalls

_BLOCK_MS: Final = 1000
IDEMPOTENCY: Final = b"idempotency-key"


class KeptRequests:
    """Adds such requests, reads their results, and withdraws them."""

    def __init__(self, producer: Producer, catalog: Catalog, calls: RedisCalls, limits: Limits) -> None:
        self._producer = producer
        self._catalog = catalog
        self._calls = calls
        self._limits = limits

    async def infer(self, asked: Asked, key: Key, exchange: Exchange) -> None:
        """Add the request, unless it was added before; answer with its result, or with where that will be."""
        check_no_id(asked)
        key.count(1, now_s())
        await decompress(exchange, self._limits)
        if exchange.is_gone:
            return  # and its body with it
        envelope = await self.result_of(asked, key, exchange, exchange.body)
        if envelope is not None:
            answer(exchange, envelope)

    async def result_of(self, asked: Asked, key: Key, exchange: Exchange, body: bytes) -> Envelope | None:
        """Add a request with this body, unless it was added before. Returns its result; None, if where that
        will be is the answer, which then is given. Raises HttpError and CarpoolErrors."""
        keys, correlation_id = Keys(asked.model, self._producer.prefix), _correlation_id_of(exchange, key)
        fields = {
            **asked.fields,
            "content_type": asked.content_type,
            "expiration": expiration_ms(asked.timeout_s),
        }
        fingerprint = fingerprint_of(asked.content_type, asked.fields, body)
        model = await self._catalog.model(asked.model)
        known_ms = expiration_ms(asked.timeout_s) + (asked.result_ttl_ms or model.settings.result_ttl_ms)
        ttl_ms = asked.result_ttl_ms
        arguments = keep_arguments(
            keys, correlation_id, fingerprint, known_ms, fields, body, result_ttl_ms=ttl_ms
        )
        earlier = await self._calls.call(keys.requests, keep_command(*arguments))
        exchange.drop_body()  # Redis has the body
        if earlier is not None and earlier != fingerprint:
            raise HttpError(422, "Idempotency-Key: another request was sent with this key")
        if earlier is not None:
            await self._check_there(keys, correlation_id)
        if wants_async(exchange.headers):
            _answer_accepted(exchange, keys.model, correlation_id)
            return None
        envelope = await self._wait(keys, correlation_id, asked.timeout_s)
        if envelope is None:
            raise DeadlineExceededError(
                f"no result within {asked.timeout_s:g} s", correlation_id=correlation_id
            )
        return envelope

    # --- by ID ---------------------------------------------------------------------------------------------

    async def get(self, key: Key, exchange: Exchange) -> None:
        """Answer with the result, if it comes within `Prefer: wait`; else with where it will be."""
        keys, correlation_id = self._named(key, exchange)
        wait_s = min(_wait_s(exchange), self._limits.timeout_s)
        await self._check_there(keys, correlation_id)
        envelope = await self._wait(keys, correlation_id, wait_s, lambda: exchange.connection.is_draining)
        if envelope is not None:
            answer(exchange, envelope)
        else:
            _answer_accepted(exchange, keys.model, correlation_id)

    async def withdraw(self, key: Key, exchange: Exchange) -> None:
        """Withdraw the request. If it waits, or its model steps or executes several batches at a time, its
        result is soon CANCELLED; else nothing happens."""
        keys, correlation_id = self._named(key, exchange)
        await self._check_there(keys, correlation_id)
        await self._calls.call(keys.requests, withdraw_command(keys, [correlation_id]))
        exchange.respond(204, b"", b"")

    def _named(self, key: Key, exchange: Exchange) -> tuple[Keys, str]:
        correlation_id = exchange.parameters["id"]
        if not CORRELATION_ID.fullmatch(correlation_id) or not (
            key is ANYBODY or correlation_id.startswith(_owner(key))
        ):
            raise _unknown()
        return Keys(exchange.model, self._producer.prefix), correlation_id

    async def _check_there(self, keys: Keys, correlation_id: str) -> None:
        """Raise HttpError unless the request has a result, or will have one: 410 if it had one, else 404."""
        found = await presence(partial(self._calls.call, keys.requests), keys, correlation_id)
        if found == "unknown":
            raise _unknown()
        if found == "expired":
            raise HttpError(
                410,
                "the request has had its result, which is kept no longer: see Carpool-Result-Ttl-Ms",
                correlation_id=correlation_id,
            )

    async def _wait(
        self,
        keys: Keys,
        correlation_id: str,
        timeout_s: float,
        is_in_vain: Callable[[], bool] = lambda: False,
    ) -> dict[str, Any] | None:
        """The envelope of the result, as soon as it is there; None if it is not there in time, or if the
        wait has become vain meanwhile."""
        end_s = time.monotonic() + timeout_s
        while True:
            left_ms = round((end_s - time.monotonic()) * 1000)
            block_ms = max(0, min(left_ms, _BLOCK_MS))
            reply = await self._calls.call(
                keys.requests, read_command(keys, [correlation_id], block_ms), block_ms / 1000 + REPLY_S_MAX
            )
            envelope = kept_result(reply, correlation_id)
            if envelope is not None or left_ms <= _BLOCK_MS or is_in_vain():
                return envelope


def check_no_id(asked: Asked) -> None:
    """Raise InvalidArgumentError if the request has an ID of its client's own."""
    if asked.correlation_id is not None:
        raise InvalidArgumentError(
            "Carpool-Correlation-Id: not with Prefer: respond-async or Idempotency-Key; these choose it"
        )


def _correlation_id_of(exchange: Exchange, key: Key) -> str:
    """The ID of a request: that of its Idempotency-Key, which means something only to its owner."""
    given = exchange.headers.get(IDEMPOTENCY)
    if given is None:
        return f"{_owner(key)}{secrets.token_hex(16)}"
    if not 0 < len(given) <= 255:
        raise HttpError(400, "Idempotency-Key: must have 1 to 255 characters")
    return f"{_owner(key)}{sha256(given).hexdigest()[:32]}"


def _owner(key: Key) -> str:
    """What the IDs of all requests begin with that belong to the holder of a key: to its tenant, if it has
    one."""
    return owner_prefix(owner_of_tenant(key.tenant) if key.tenant else f"key {key.name}")


def _wait_s(exchange: Exchange) -> float:
    """The seconds in `Prefer: wait=N`. Raises HttpError."""
    value = preferences(exchange.headers.get(b"prefer", b"")).get("wait", "0")
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise HttpError(400, "Prefer: wait must be a whole number of seconds")
    return float(value)


def _answer_accepted(exchange: Exchange, model: str, correlation_id: str) -> None:
    path = f"/carpool/v1/models/{model}/requests/{correlation_id}"
    headers = f"location: {path}\r\ncarpool-correlation-id: {correlation_id}\r\n".encode()
    body = f'{{"status":"ACCEPTED","correlation_id":"{correlation_id}","location":"{path}"}}\n'
    exchange.respond(202, JSON_HEADER + RETRY_AFTER + headers, body.encode())


def _unknown() -> HttpError:
    return HttpError(404, "there is no such request, or its ID is known no longer")
