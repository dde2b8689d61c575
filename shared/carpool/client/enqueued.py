"""Requests that are enqueued, and whose results any process reads by their IDs.

An ID is MODEL/CORRELATION_ID. Redis keeps an enqueued request: a record of it, and its result
(`carpool.store.kept`). So the processes that sent and executed it may end. Cancelling a call withdraws
nothing.

Why: docs/decisions/0101.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from carpool.client.encoding import BodyEncoder
from carpool.client.entries import withdraw_command
from carpool.client.options import (
    RequestOptions,
    check_correlation_id,
    expiration_ms,
    read_options,
    result_ttl_ms,
)
from carpool.client.packing import STRING_BYTES_MAX
from carpool.client.producer import Producer
from carpool.client.reading import ResultReader
from carpool.client.sinks import Envelope
from carpool.errors import (
    CarpoolError,
    InternalError,
    InvalidArgumentError,
    NoResultError,
    NotFoundError,
    UnavailableError,
    UnconfirmedError,
)
from carpool.keys import CORRELATION_ID, MODEL_NAME, Keys
from carpool.model_settings import ModelSettings
from carpool.store.kept import (
    KEEP,
    TIMEOUT_S,
    RequestStatus,
    envelope_of,
    fingerprint_of,
    keep_arguments,
    kept_result,
    owner_of_tenant,
    owner_prefix,
    presence,
    read_command,
    status_in_envelope,
    status_in_record,
)

FIRST_CHECK_S: Final = 0.02  # without a result for so long, check that the request exists
CHECK_S: Final = 2.0  # and again, while its result is awaited
PAUSE_S_MIN: Final = 0.001
PAUSE_S_MAX: Final = 0.1
PAUSE_RATIO: Final = 0.25  # of the time since the last caller began to wait
TOGETHER_MAX: Final = 64  # results in one reply
_TTL_MS: Final = ModelSettings().result_ttl_ms  # of a result that its model decides: its own may differ


class RequestId(NamedTuple):
    """MODEL/CORRELATION_ID, in its parts."""

    model: str
    correlation_id: str

    @classmethod
    def parse(cls, text: str) -> RequestId:
        """Raises InvalidArgumentError."""
        model, _, correlation_id = text.partition("/") if isinstance(text, str) else ("", "", "")
        if not (MODEL_NAME.fullmatch(model) and CORRELATION_ID.fullmatch(correlation_id)):
            raise InvalidArgumentError(
                f"ID: {text!r:.280} must be MODEL/CORRELATION_ID, as `enqueue` returns it"
            )
        return cls(model, correlation_id)

    def __str__(self) -> str:
        return f"{self.model}/{self.correlation_id}"


class EnqueuedRequests:
    """Adds such requests, reads their results and statuses, and withdraws them."""

    def __init__(self, producer: Producer, encoder: BodyEncoder, reader: ResultReader) -> None:
        self._producer = producer
        self._encoder = encoder
        self._reader = reader
        self._awaited: dict[str, _AwaitedResults] = {}  # by model
        self._registered: set[str] = set()  # models

    async def enqueue(self, model: str, body: Any, options: RequestOptions) -> str:
        """Add a request, unless it was added before; return its ID once Redis has accepted it."""
        rest: RequestOptions = {**options}
        ttl_ms = result_ttl_ms(rest.pop("result_ttl", None))
        timeout_s, fields = read_options(rest, TIMEOUT_S)
        if timeout_s is None:
            raise InvalidArgumentError(
                "timeout: a request that is enqueued needs one, because Redis keeps its ID for it"
            )
        content_type, head, tail = self._encoder.encode(body, options.get("content_type"))
        data = head + tail
        if len(data) > STRING_BYTES_MAX:
            raise InvalidArgumentError(f"body: {len(data)} bytes; at most {STRING_BYTES_MAX} are allowed")
        correlation_id = options.get("correlation_id")
        if correlation_id is None:
            correlation_id = _new_id(fields.get("tenant"))
        else:
            check_correlation_id(correlation_id, ())
        await self._check_registered(model)
        keys, timeout_ms = Keys(model, self._producer.prefix), expiration_ms(timeout_s)
        fingerprint = fingerprint_of(content_type, fields, data)
        script_keys, args = keep_arguments(
            keys,
            correlation_id,
            fingerprint,
            timeout_ms + (ttl_ms or _TTL_MS),
            {**fields, "content_type": content_type, "expiration": timeout_ms},
            data,
            result_ttl_ms=ttl_ms,
            again_after_result=True,
        )
        earlier = await self._keep(script_keys, args, correlation_id)
        if earlier is not None and earlier != fingerprint:
            raise InvalidArgumentError(
                f"correlation_id: another request was enqueued as {correlation_id!r}: its body or options "
                "differ",
                correlation_id=correlation_id,
            )
        return str(RequestId(model, correlation_id))

    async def _check_registered(self, model: str) -> None:
        if model not in self._registered:
            await self._producer.check_registered(model)
            self._registered.add(model)

    async def _keep(self, keys: list[str], args: list[Any], correlation_id: str) -> bytes | None:
        """Run the script, and have Redis confirm it as the durability demands. Raises UnconfirmedError."""
        durability, transport = self._producer.durability, self._producer.packer.transport
        losses = transport.losses
        earlier: bytes | None = await self._producer.run(KEEP, keys, args)
        if durability.command is not None:
            missing = durability.missing(await self._producer.call(*durability.command, key=keys[0]))
            if transport.losses != losses:  # that confirms what was sent over another connection
                missing = missing or "the connection was lost before Redis confirmed the request"
            if missing:
                raise UnconfirmedError(missing, correlation_id=correlation_id)
        return earlier

    async def result(self, text: str, timeout_s: float | None) -> Any:
        """The result, once it is there. `timeout_s`: 0 if it must be there; None: without a limit. Raises the
        CarpoolError of its status, NotFoundError and NoResultError."""
        one = RequestId.parse(text)
        keys = Keys(one.model, self._producer.prefix)
        envelope = await self._read(keys, one.correlation_id)
        loop, check_s = asyncio.get_running_loop(), FIRST_CHECK_S
        end_s = math.inf if timeout_s is None else loop.time() + timeout_s
        while envelope is None:
            left_s = end_s - loop.time()
            if left_s > 0:
                envelope = await self._of_model(keys).wait(one.correlation_id, min(left_s, check_s))
                check_s = CHECK_S
            if envelope is not None:
                break
            await self._check_there(keys, one)
            if left_s <= 0:
                raise NoResultError(
                    f"no result within {timeout_s:g} s: the request is {await self.status(text)}",
                    correlation_id=one.correlation_id,
                )
        return self._reader.value(envelope)

    async def _read(self, keys: Keys, correlation_id: str) -> Envelope | None:
        reply = await self._producer.call(*read_command(keys, [correlation_id]), key=keys.requests)
        return kept_result(reply, correlation_id)

    def _of_model(self, keys: Keys) -> _AwaitedResults:
        awaited = self._awaited.get(keys.model)
        if awaited is None:
            awaited = self._awaited[keys.model] = _AwaitedResults(self._producer, keys)
        return awaited

    async def _check_there(self, keys: Keys, one: RequestId) -> None:
        """Raise NotFoundError unless the request has a result, or will have one."""
        found = await presence(lambda command: self._producer.call(*command), keys, one.correlation_id)
        if found == "there":
            return
        if found == "expired":
            detail = f"the request {one} has had its result, which is kept no longer: see `result_ttl`"
        else:
            detail = f"there is no request {one}: it was never enqueued, or its result has expired long ago"
        raise NotFoundError(detail, correlation_id=one.correlation_id)

    async def status(self, text: str) -> RequestStatus:
        """What became of a request. Two or three commands, which take no body and almost never a result."""
        one = RequestId.parse(text)
        keys = Keys(one.model, self._producer.prefix)
        record, is_there = await asyncio.gather(
            self._producer.call("GET", keys.kept(one.correlation_id)),
            self._producer.call("EXISTS", keys.replies(one.correlation_id)),
        )
        if not is_there:
            return "unknown"
        if record is not None:
            return status_in_record(record)
        envelope = await self._read(keys, one.correlation_id)  # it was answered later than its timeout
        return "unknown" if envelope is None else status_in_envelope(envelope)

    async def withdraw(self, text: str) -> None:
        """If the request waits, it is not executed. Raises NotFoundError."""
        one = RequestId.parse(text)
        keys = Keys(one.model, self._producer.prefix)
        await self._check_there(keys, one)
        await self._producer.call(*withdraw_command(keys, [one.correlation_id]))


def _new_id(tenant: Any) -> str:
    """A correlation ID that cannot be guessed. For a tenant, one that gateways show to the tenant."""
    owner = tenant.decode("utf-8", "replace") if isinstance(tenant, bytes) else tenant
    return (owner_prefix(owner_of_tenant(owner)) if owner else "") + secrets.token_hex(16)


class _AwaitedResults:
    """The results of one model that are awaited: all are asked for, again and again, until they come.

    The pause grows with the time since the last caller began to wait, so a new caller is answered soon.
    """

    def __init__(self, producer: Producer, keys: Keys) -> None:
        self._producer = producer
        self._keys = keys
        self._futures: dict[str, list[asyncio.Future[Envelope]]] = {}  # by correlation ID
        self._asking: asyncio.Task[None] | None = None
        self._sleeper: asyncio.Future[None] | None = None
        self._since_s = 0.0  # when the last caller began to wait
        self._together = TOGETHER_MAX

    async def wait(self, correlation_id: str, timeout_s: float) -> Envelope | None:
        """The result of this ID, as soon as it is there; None if it is not there in time."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Envelope] = loop.create_future()
        self._futures.setdefault(correlation_id, []).append(future)
        self._since_s = loop.time()
        if self._asking is None:
            self._asking = loop.create_task(self._ask())
        elif self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
            return None
        finally:
            self._remove(correlation_id, future)

    def _remove(self, correlation_id: str, future: asyncio.Future[Envelope]) -> None:
        futures = self._futures.get(correlation_id, [])
        if future in futures:
            futures.remove(future)
            if not futures:
                del self._futures[correlation_id]

    async def _ask(self) -> None:
        """Ask while a result is awaited."""
        try:
            while self._futures:
                await self._pause()
                try:
                    await self._ask_once()
                except UnavailableError as error:  # each caller has a limit of its own
                    if self._producer.packer.is_closed:
                        self._fail(error)
                except CarpoolError as error:
                    self._fail(error)
        finally:
            self._asking = None

    async def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        while True:
            pause_s = min(PAUSE_S_MAX, max(PAUSE_S_MIN, PAUSE_RATIO * (started_s - self._since_s)))
            left_s = started_s + pause_s - loop.time()
            if left_s <= 0:
                return
            self._sleeper = loop.create_future()
            timer = loop.call_later(left_s, _wake, self._sleeper)
            try:
                await self._sleeper
            finally:
                timer.cancel()

    async def _ask_once(self) -> None:
        ids = list(self._futures)
        transport, start_chars = self._producer.packer.transport, len(self._keys.replies(""))
        for start in range(0, len(ids), self._together):
            losses = transport.losses
            command = read_command(self._keys, ids[start : start + self._together])
            reply = await self._producer.call(*command, key=self._keys.requests)
            if transport.losses != losses:  # perhaps because the reply was too large for Redis
                self._together = 1
            for stream, entries in reply or ():
                self._resolve(stream.decode()[start_chars:], entries)

    def _resolve(self, correlation_id: str, entries: list[Any]) -> None:
        futures = self._futures.pop(correlation_id, ())
        try:
            envelope = envelope_of(entries, correlation_id)
        except InternalError as error:
            _fail_all(futures, error)
            return
        for future in futures:
            if not future.done():
                future.set_result(envelope)

    def _fail(self, error: CarpoolError) -> None:
        all_futures, self._futures = self._futures, {}
        for futures in all_futures.values():
            _fail_all(futures, error)


def _fail_all(futures: Sequence[asyncio.Future[Envelope]], error: CarpoolError) -> None:
    for future in futures:
        if not future.done():
            future.set_exception(error)


def _wake(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)
