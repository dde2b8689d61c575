"""Calls of gRPC: what is checked, counted and logged of each, as of a request of HTTP, and how it fails.

The task that handles a call is cancelled when its client cancels the call, when its deadline has come, and
when the connection has broken. So a handler that is cancelled withdraws what it has sent.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final

import grpc

from carpool.client.options import RequestOptions
from carpool.errors import GRPC_CODE
from carpool_gateway.access_log import GONE, AccessLog
from carpool_gateway.answers import RETRY_AFTER, HttpError, answer_of
from carpool_gateway.credentials import INFER, Key, KeyRing
from carpool_gateway.limits import BodyMemory, Limits
from carpool_gateway.options import given_request_id, options_of
from carpool_gateway.spans import CallTrace

_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
_STATUSES: Final = {
    **{status: _CODES[code] for status, code in GRPC_CODE.items()},
    "UNAUTHENTICATED": grpc.StatusCode.UNAUTHENTICATED,
}
LARGE_ANSWER_BYTES: Final = 64 * 1024
_TIMEOUT_STEPS: Final = 16  # between a timeout and one that is twice as long


class Call:
    """One call, or one request of a stream. `headers`: its metadata, as headers of HTTP. `route`: in metrics.
    `key`: what its caller may do, once that is known."""

    method = "gRPC"
    model = key_name = ""
    key: Key
    trace: CallTrace | None = None  # if it is recorded

    def __init__(self, calls: Calls, path: str, route: str, context: Any) -> None:
        self.calls = calls
        self.path = path
        self.route = route
        self.context = context
        self.started_s = time.monotonic()
        self.headers = _headers_of(context.invocation_metadata())
        self.request_id = calls.request_id_for(self.headers)
        self.held_bytes = 0

    def of_request(self, route: str) -> Call:
        """A request of this stream."""
        request = copy.copy(self)
        request.route, request.started_s, request.held_bytes = route, time.monotonic(), 0
        request.trace = None  # the stream has a span
        return request

    def authorize(self, model: str = "", scope: str = INFER) -> Key:
        """Find the key that the call presents, with this scope, for this model. Raises HttpError."""
        key = self.key = self.calls.keys.find(self.headers)
        self.key_name, self.model = key.name, model
        key.check(scope, model)
        return key

    def options(self) -> RequestOptions:
        """The options in the metadata, with the tenant of the key, and the deadline as the timeout. Raises
        HttpError and CarpoolErrors."""
        options = options_of(self.headers, reads_accept=False)
        self.key.set_tenant(options)
        left_s = self.context.time_remaining()
        if left_s is not None:
            timeout_s = min(rounded_up_s(left_s), self.calls.limits.timeout_s)
            options["timeout"] = min(timeout_s, options.get("timeout") or math.inf)
        return options

    def take(self, size: int) -> None:
        """Count bytes of a message that are held in memory until the end. Raises HttpError."""
        self.calls.memory.take(size)
        self.held_bytes += size

    def end(self, code: int) -> None:
        """It was answered with this code of HTTP, or GONE."""
        self.calls.memory.release(self.held_bytes)
        self.held_bytes = 0
        self.calls.access_log.add(self, code)


class Calls:
    """What all calls share. `new_request_id`: for a call whose client names none. `of_mistake`: see
    `Server.failure`."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        access_log: AccessLog,
        memory: BodyMemory,
        limits: Limits,
        new_request_id: Callable[[], str],
        of_mistake: Callable[..., HttpError],
    ) -> None:
        self.keys = keys
        self.access_log = access_log
        self.memory = memory
        self.limits = limits
        self.in_flight = 0
        self._new_request_id = new_request_id
        self._of_mistake = of_mistake

    def unary(self, path: str, route: str, work: Callable[[Call, bytes], Coroutine[Any, Any, bytes]]) -> Any:
        """The handler of a call with one message, whose answer is what `work` returns."""

        async def handle(message: bytes, context: Any) -> bytes:
            answer: bytes = await self._run(path, route, context, message, work)
            return answer

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(self, path: str, route: str, work: Callable[[Call], Coroutine[Any, Any, None]]) -> Any:
        """The handler of a call in which `work` reads and writes messages."""

        async def handle(_: Any, context: Any) -> None:
            await self._run(path, route, context, b"", lambda call, _: work(call))

        return grpc.stream_stream_rpc_method_handler(handle)

    async def _run(
        self,
        path: str,
        route: str,
        context: Any,
        message: bytes,
        work: Callable[[Call, bytes], Coroutine[Any, Any, Any]],
    ) -> Any:
        call, code = Call(self, path, route, context), GONE
        if (spans := self.access_log.spans) is not None:
            call.trace = spans.begin(route, call.headers)
        self.in_flight += 1
        try:
            context.set_trailing_metadata((("x-request-id", call.request_id),))
            if self.in_flight > self.limits.connections:
                raise HttpError(503, "too many calls at a time: try again", headers=RETRY_AFTER)
            call.take(len(message))
            answer = await work(call, message)
            if answer is not None and len(answer) > LARGE_ANSWER_BYTES:
                self._hold_while_sent(context, len(answer))
            code = 200
        except Exception as error:
            failure = self.failure(error, call.request_id)
            code = failure.code
            await context.abort(status_of(failure), failure.detail)
        else:
            return answer
        finally:
            self.in_flight -= 1
            call.end(code)

    def _hold_while_sent(self, context: Any, size: int) -> None:
        """Count a large answer, which a client may read slowly, until its call has ended."""
        self.memory.hold(size)
        context.add_done_callback(lambda _: self.memory.release(size))

    def failure(self, error: Exception, request_id: str) -> HttpError:
        """What an exception is to a client. A mistake of the gateway's own is logged."""
        return answer_of(error, partial(self._of_mistake, request_id=request_id))

    def request_id_for(self, headers: Mapping[bytes, bytes]) -> str:
        """The ID that a client gives to its call, or a new one."""
        return given_request_id(headers) or self._new_request_id()


def status_of(error: HttpError) -> Any:
    """The status code of gRPC for an error."""
    return _STATUSES.get(error.status, grpc.StatusCode.INTERNAL)


def rounded_up_s(timeout_s: float) -> float:
    """A timeout that is up to a sixteenth longer. There are few such: requests with equal ones share entries,
    and no two calls have the same time left. The call itself ends at its deadline."""
    if timeout_s <= 0:
        return 1e-3
    mantissa, exponent = math.frexp(timeout_s)
    return math.ldexp(math.ceil(mantissa * 2 * _TIMEOUT_STEPS) / (2 * _TIMEOUT_STEPS), exponent)


def _headers_of(metadata: Any) -> dict[bytes, bytes]:
    """Metadata as headers: of a name that came several times, all values with commas."""
    headers: dict[bytes, bytes] = {}
    for name, value in metadata or ():
        encoded = name.encode("latin-1")
        data = value if isinstance(value, bytes) else value.encode("utf-8")
        headers[encoded] = headers[encoded] + b", " + data if encoded in headers else data
    return headers
