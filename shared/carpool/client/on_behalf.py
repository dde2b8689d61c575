"""Clients with which a model calls others on behalf of the requests that it executes.

    class Pipeline:
        async def predict(self, images, clients):                # a client for each request of the batch
            return await asyncio.gather(*map(self.one, images, clients), return_exceptions=True)

        async def one(self, image, client):
            boxes = await client.infer("detector", image)
            return await client.infer_many("classifier", [crop(image, box) for box in boxes])

What a client sends inherits from its request: tenant, priority, `traceparent`, and what is left of its
deadline, less 5% (at most 0.1 s), so that an error can come back. Its correlation ID is derived from the
request's and from what is asked: a request that is executed again, because a process died, asks under the
same IDs.

Each request has the names of the models that wait for it (`called_by`). So a model that would wait for itself
is found out: all its processes could wait for each other.

Why: docs/decisions/0100.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from hashlib import blake2b
from typing import Any, Final, NamedTuple, Protocol, Unpack

from carpool.client.aio import AsyncClient
from carpool.client.encoding import BodyEncoder, bodies_to_send
from carpool.client.entries import Encoded
from carpool.client.options import RequestOptions, checked_timeout_s
from carpool.client.sync import Client
from carpool.errors import (
    INTERNAL,
    NOT_FOUND,
    PERMISSION_DENIED,
    UNAVAILABLE,
    CancelledRequestError,
    CarpoolError,
    DeadlineExceededError,
    UnimplementedError,
)
from carpool.messages.requests import PRIORITY_DEFAULT
from carpool.tracing import TRACEPARENT, TRACESTATE
from carpool.wire.request_fields import CALLED_BY

DEPTH_MAX: Final = 8  # models that may wait for one request
ID_CHARS_MAX: Final = 100  # of a request's correlation ID, to be part of others
WITHDRAWN_MAX: Final = 1000  # requests that are remembered
_DIGEST_BYTES: Final = 12
# The share of the time left that an asked model does not get: its error, which names that model, must come
# back before the batcher answers the request itself, because the batcher cannot say why it is late.
RETURN_SHARE: Final = 0.05
RETURN_S_MAX: Final = 0.1
_CALL_ENDED: Final = "the client was for one call of `predict`, which has ended"
# Options that do not change the result.
_NOT_ASKED: Final = frozenset({"timeout", "retries", "not_before", "correlation_id"})

# A model that is missing, or may not be called, is not the fault of the producer.
_STATUS_FOR_PRODUCER: Final[Mapping[str, str]] = {NOT_FOUND: UNAVAILABLE, PERMISSION_DENIED: INTERNAL}


class Origin(NamedTuple):
    """A request that a model executes. `place`: in the batch. `deadline_s`: by time.monotonic(); None: it has
    none. `fields`: those that Carpool passes on to the model."""

    correlation_id: str
    place: int = 0
    deadline_s: float | None = None
    priority: int = PRIORITY_DEFAULT
    fields: Mapping[str, bytes] = {}


class Sender(Protocol):
    """What sends requests: an AsyncClient, or a Client."""

    @property
    def submit(self) -> Callable[..., Any]:
        """With model, body and options it returns the future of the result; to cancel that withdraws the
        request."""


class Origins:
    """Makes the clients of one process, which share its connections."""

    def __init__(
        self, model: str, *, is_async: bool, url: str | None = None, sender: Sender | None = None
    ) -> None:
        """`model`: the one that calls. `url`: as for AsyncClient, whose errors are raised. `sender`: what is
        used in place of a client of its own."""
        self.model = model
        self.encoder = BodyEncoder()
        self.in_use: set[str] = set()  # correlation IDs
        self.withdrawn: deque[str] = deque(maxlen=WITHDRAWN_MAX)  # those of the latest that were withdrawn
        self._is_async = is_async
        self._async_client = AsyncClient(url) if is_async and sender is None else None
        self._client = None if is_async or sender is not None else Client(url)
        self._sender: Sender | None = sender or self._async_client or self._client

    def client_for(self, origin: Origin) -> AsyncRequestClient | RequestClient:
        """A client for a request."""
        assert self._sender is not None
        return (AsyncRequestClient if self._is_async else RequestClient)(self, origin, self._sender)

    async def close(self) -> None:
        """Disconnect."""
        if self._async_client is not None:
            await self._async_client.close()

    def close_now(self) -> None:
        """Disconnect, where no event loop runs."""
        if self._client is not None:
            self._client.close()


class _Asked(NamedTuple):
    """A request as it is to be sent."""

    model: str
    body: Encoded
    options: RequestOptions
    correlation_id: str


class _OnBehalf:
    """What both clients have in common: all but waiting. `client` has their connection; its futures are of
    asyncio, or of threads."""

    def __init__(self, origins: Origins, origin: Origin, client: Sender) -> None:
        self._origins = origins
        self._origin = origin
        self._client = client
        self._in_flight: set[Any] = set()  # futures
        self._asked: Counter[bytes] = Counter()  # how often the same was asked
        self._why_over = ""  # why nothing is asked any more

    @property
    def correlation_id(self) -> str:
        """That of the request for which this client is."""
        return self._origin.correlation_id

    @property
    def seconds_left(self) -> float | None:
        """Until its deadline, 0 if that has passed; None if it has none."""
        deadline_s = self._origin.deadline_s
        return None if deadline_s is None else max(0.0, deadline_s - time.monotonic())

    def _prepare(self, model: str, body: Any, options: RequestOptions) -> _Asked:
        """A request with all that it inherits. Raises CarpoolErrors that say which model was called."""
        try:
            self._check_callable(model)
            encoded = Encoded(*self._origins.encoder.encode(body, options.get("content_type")))
            inherited = self._inherited(options)
        except CarpoolError as error:
            raise self._of_stage(model, error) from None
        correlation_id = options.get("correlation_id") or self._id_of(model, encoded, options)
        # Two requests with one ID are executed here, and ask the same. Or one is executed again, and withdrew
        # this before: the answer to the withdrawal may come late, and would be taken for the result.
        if correlation_id in self._origins.in_use or correlation_id in self._origins.withdrawn:
            correlation_id = f"{correlation_id[:ID_CHARS_MAX]}.{secrets.token_hex(4)}"
        self._origins.in_use.add(correlation_id)
        inherited["correlation_id"] = correlation_id
        return _Asked(model, encoded, inherited, correlation_id)

    def _check_callable(self, model: str) -> None:
        if self._why_over:
            raise CancelledRequestError(self._why_over, correlation_id=self.correlation_id)
        waiting = self._waiting_models()
        if model in waiting:
            raise UnimplementedError(
                "a model cannot call one that waits for it, because all their processes could wait for "
                "each other"
            )
        if len(waiting) > DEPTH_MAX:
            raise UnimplementedError(f"at most {DEPTH_MAX} models may wait for one request")

    def _waiting_models(self) -> list[str]:
        """The models that wait, the outermost first, this one last."""
        outer = self._origin.fields.get(CALLED_BY, b"").decode("utf-8", "replace").split()
        return [*outer, self._origins.model]

    def _inherited(self, options: RequestOptions) -> RequestOptions:
        """The options of a request with what it inherits. Raises DeadlineExceededError."""
        inherited: RequestOptions = {**options}
        left_s = self.seconds_left
        if left_s is not None:
            if not left_s:
                raise DeadlineExceededError("the deadline had passed before it was asked")
            left_s -= min(RETURN_SHARE * left_s, RETURN_S_MAX)
            asked_s = checked_timeout_s(options["timeout"]) if "timeout" in options else None
            inherited["timeout"] = left_s if asked_s is None else min(asked_s, left_s)
        own, given = self._origin.fields, options.get("fields") or {}
        if "tenant" not in given and (tenant := own.get("tenant")) is not None:
            inherited.setdefault("tenant", tenant.decode("utf-8", "replace"))
        inherited.setdefault("priority", self._origin.priority)
        trace = {name: own[name] for name in (TRACEPARENT, TRACESTATE) if name in own}
        if TRACEPARENT in given:
            trace = {}
        inherited["fields"] = {**trace, **given, CALLED_BY: " ".join(self._waiting_models())}
        return inherited

    def _id_of(self, model: str, body: Encoded, options: RequestOptions) -> str:
        """The same for the same model, body and options, asked for the n-th time on behalf of this
        request."""
        digest = blake2b(digest_size=_DIGEST_BYTES)
        for part in (model, body.content_type, *_shown_options(options)):
            digest.update(f"{part}\0".encode("utf-8", "replace"))
        digest.update(body.head)
        digest.update(body.rest)
        key = digest.digest()
        self._asked[key] += 1
        if self._asked[key] > 1:
            digest.update(str(self._asked[key]).encode())
        origin = self.correlation_id
        if len(origin) > ID_CHARS_MAX:
            origin = blake2b(origin.encode(), digest_size=_DIGEST_BYTES).hexdigest()
        return f"{origin}.{digest.hexdigest()}"

    def _of_stage(self, model: str, error: CarpoolError) -> CarpoolError:
        """An error that says which models it came through, and which request of the batch it concerns."""
        detail = error.detail if error.detail.startswith(f"{model} -> ") else f"{model}: {error.detail}"
        found = type(error)(f"{self._origins.model} -> {detail}", correlation_id=error.correlation_id)
        found.status = _STATUS_FOR_PRODUCER.get(error.status, error.status)
        found.request_index = self._origin.place
        return found

    def _over_error(self, asked: _Asked) -> CarpoolError:
        error = CancelledRequestError(self._why_over, correlation_id=asked.correlation_id)
        return self._of_stage(asked.model, error)

    def _send(self, asked: _Asked) -> Any:
        """The future of the result."""
        try:
            future = self._client.submit(asked.model, asked.body, **asked.options)
        except Exception as error:
            self._origins.in_use.discard(asked.correlation_id)
            if isinstance(error, CarpoolError):
                raise self._of_stage(asked.model, error) from None
            raise
        self._in_flight.add(future)
        return future

    def _send_all(
        self, model: str, bodies: Iterable[Any], options: RequestOptions, sent: list[tuple[_Asked, Any]]
    ) -> None:
        """Send one for each body. Adds each with its future to `sent`, at once: a later one may fail."""
        for body in bodies_to_send(bodies, "infer_many"):
            asked = self._prepare(model, body, options)
            sent.append((asked, self._send(asked)))

    def _withdraw(self, sent: Iterable[tuple[_Asked, Any]]) -> None:
        """Those of these that have no result are withdrawn."""
        for asked, future in sent:
            future.cancel()
            self._forget(asked, future)

    def _forget(self, asked: _Asked, future: Any) -> None:
        self._in_flight.discard(future)
        if future.cancelled():
            self._origins.withdrawn.append(asked.correlation_id)
        self._origins.in_use.discard(asked.correlation_id)

    def cancel(self) -> None:
        """Nobody waits for the request: withdraw what it asked."""
        self._why_over = "the request that asked it was withdrawn, or is answered"
        self._cancel_all()

    def _cancel_all(self) -> list[Any]:
        """Cancel the futures that are in flight; return them."""
        left = list(self._in_flight)
        for future in left:
            future.cancel()
        return left


class AsyncRequestClient(_OnBehalf):
    """Calls other models on behalf of one request, for a model with an async `predict`. For that call
    only."""

    async def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """Ask another model, and return its result; options as for AsyncClient.infer. `timeout` is at most
        what is left of the deadline, less 5% (at most 0.1 s) for an error to come back. Raises CarpoolErrors
        whose details name the models that they came through."""
        asked = self._prepare(model, body, options)
        return await self._result(asked, self._send(asked))

    async def infer_many(
        self,
        model: str,
        bodies: Iterable[Any],
        *,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[Any]:
        """Ask another model about each of these, all together; return the results in this order. The first
        error is raised, and the other requests are withdrawn; with `return_exceptions` each is in its
        place."""
        sent: list[tuple[_Asked, Any]] = []
        results: list[Any] = []
        try:
            self._send_all(model, bodies, options, sent)
            for one in sent:
                try:
                    results.append(await self._result(*one))
                except CarpoolError as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
        finally:
            self._withdraw(sent)
        return results

    async def _result(self, asked: _Asked, future: asyncio.Future[Any]) -> Any:
        try:
            return await future
        except CarpoolError as error:
            raise self._of_stage(asked.model, error) from None
        except asyncio.CancelledError:
            if self._why_over:
                raise self._over_error(asked) from None
            raise
        finally:
            self._forget(asked, future)

    async def end(self) -> None:
        """The call of the model has ended."""
        self._why_over = self._why_over or _CALL_ENDED
        left = self._cancel_all()
        if left:
            await asyncio.gather(*left, return_exceptions=True)


class RequestClient(_OnBehalf):
    """Calls other models on behalf of one request, for a model with a plain `predict`, which waits meanwhile.
    For that call only."""

    def infer(self, model: str, body: Any, **options: Unpack[RequestOptions]) -> Any:
        """As AsyncRequestClient.infer."""
        asked = self._prepare(model, body, options)
        return self._result(asked, self._send(asked))

    def infer_many(
        self,
        model: str,
        bodies: Iterable[Any],
        *,
        return_exceptions: bool = False,
        **options: Unpack[RequestOptions],
    ) -> list[Any]:
        """As AsyncRequestClient.infer_many."""
        sent: list[tuple[_Asked, Any]] = []
        results: list[Any] = []
        try:
            self._send_all(model, bodies, options, sent)
            for one in sent:
                try:
                    results.append(self._result(*one))
                except CarpoolError as error:
                    if not return_exceptions:
                        raise
                    results.append(error)
        finally:
            self._withdraw(sent)
        return results

    def _result(self, asked: _Asked, future: Future[Any]) -> Any:
        try:
            return future.result()
        except CarpoolError as error:
            raise self._of_stage(asked.model, error) from None
        except CancelledError:
            raise self._over_error(asked) from None
        finally:
            self._forget(asked, future)

    async def end(self) -> None:
        """The call of the model has ended. Does not wait."""
        self._why_over = self._why_over or _CALL_ENDED
        self._cancel_all()


def _shown_options(options: RequestOptions) -> list[str]:
    """The options that may change a result, in an order that is always the same."""
    return [f"{name}={value!r}" for name, value in sorted(options.items()) if name not in _NOT_ASKED]
