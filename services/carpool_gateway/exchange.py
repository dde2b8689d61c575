"""A request of HTTP and its answer, as handlers see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Final, Protocol

from carpool_gateway.answers import HttpError, answer_of, error_answer
from carpool_gateway.limits import BodyMemory
from carpool_gateway.spans import CallTrace

_NO_PARAMETERS: Final[Mapping[str, str]] = {}


class Connection(Protocol):
    """What an exchange needs of its connection: see `server.Connection`."""

    memory: BodyMemory

    @property
    def is_draining(self) -> bool: ...
    def write_answer(self, exchange: Exchange, headers: bytes, body: bytes) -> None: ...
    def write_head(self, exchange: Exchange, headers: bytes) -> None: ...
    async def write_part(self, exchange: Exchange, part: bytes) -> None: ...
    def write_part_if_read(self, exchange: Exchange, part: bytes) -> None: ...
    def write_end(self, exchange: Exchange) -> None: ...
    def upgrade(self, exchange: Exchange, headers: bytes, make: Callable[[Wire], Upgraded]) -> None: ...
    def abort(self) -> None: ...
    def failure(self, error: BaseException, request_id: str) -> HttpError: ...


class Upgraded(Protocol):
    """What reads and writes a connection after an exchange was upgraded to another protocol."""

    @property
    def in_flight(self) -> int: ...  # requests without an answer
    def on_data(self, data: bytes) -> None: ...
    def on_read(self) -> None: ...  # the client has read enough, after it was too slow
    def on_deadline(self) -> None: ...  # that of `Wire.set_deadline`
    def on_drain(self) -> None: ...  # the server stops: end soon
    def on_lost(self) -> None: ...  # the connection has ended; `is_gone` of its requests is theirs to set


class Wire(Protocol):
    """What such a protocol has of its connection: see `server.Connection`."""

    memory: BodyMemory

    @property
    def is_draining(self) -> bool: ...
    @property
    def is_read(self) -> bool: ...  # the client is not too slow
    async def until_read(self) -> None: ...  # wait for that
    def write_raw(self, parts: Sequence[bytes]) -> None: ...
    def set_deadline(self, seconds: float) -> None: ...  # from now on; one that passed is not repeated
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def leave(self) -> None: ...  # nothing more is written; end the connection so that all is read
    def abort(self) -> None: ...
    def next_request_id(self) -> str: ...
    def done(self, exchange: Exchange) -> None: ...  # count and log a request of the protocol
    def failure(self, error: BaseException, request_id: str) -> HttpError: ...


# Handles an exchange whose body is complete: at once, or in a task.
Handler = Callable[["Exchange"], Coroutine[Any, Any, None] | None]


class Exchange:
    """One request, from its headers until it is answered, or its client has gone.

    `headers`: names in small letters; of a header that came several times, all values with commas.
    `body`: complete when the handler is called. `body_bytes`: what of it is held in memory.
    `on_gone`: called once if the client goes away before the answer is written; then it is None. What it
    belongs to often leads back here, and such a cycle would be left to the garbage collector, which holds up
    all requests.
    `route`: the name of its route, for metrics. `parameters`: what is in the path for the names of its route.
    `answer_to_error`: an error's headers and body, as the clients of its interface read them.
    """

    # What is not set is found in the class: a request sets few of these.
    method = path = query = request_id = key_name = model = ""
    route = "none"
    parameters: Mapping[str, str] = _NO_PARAMETERS
    body = b""
    body_bytes = 0
    code = 0  # of the answer; 0: there is none yet
    handler: Handler | None = None
    error: HttpError | None = None  # it is answered with this, and has no handler
    takes_parts = True  # the client understands an answer in parts
    is_last = False  # the connection ends with its answer
    is_gone = False
    trace: CallTrace | None = None  # if it is recorded
    is_chunked = False  # the answer is written in parts
    empty_part = b""  # a part that means nothing to the client, if there is such a one
    on_gone: Callable[[Exchange], None] | None = None
    answer_to_error: Callable[[HttpError], tuple[bytes, bytes]] = staticmethod(error_answer)

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.started_s = time.monotonic()  # finer than the clock of the event loop
        self.headers: dict[bytes, bytes] = {}

    def take(self, size: int) -> None:
        """Count bytes of the body that are held in memory. Raises HttpError if the gateway holds too many, or
        if the client has gone: nothing would release them."""
        if self.is_gone:
            raise HttpError(499, "the client has gone")
        self.connection.memory.take(size)
        self.body_bytes += size

    def cancel_when_gone(self) -> None:
        """From now on, the current task is cancelled if the client goes away. Raises CancelledError if it has
        gone."""
        if self.is_gone:
            raise asyncio.CancelledError
        task = asyncio.current_task()
        assert task is not None
        self.on_gone = partial(_cancel, task)

    def drop_body(self) -> None:
        """The body is needed no more."""
        if self.body_bytes:
            self.connection.memory.release(self.body_bytes)
            self.body_bytes = 0
            self.body = b""

    def header(self, name: bytes) -> str:
        """A header's value; empty if there is none."""
        return self.headers.get(name, b"").decode("latin-1")

    def respond(self, code: int, headers: bytes, body: bytes) -> None:
        """Answer. `headers`: lines with their ends, without those that all answers have. Does nothing if the
        client has gone."""
        if not (self.is_gone or self.code):
            self.code, self.on_gone = code, None
            self.connection.write_answer(self, headers, body)

    def upgrade(self, headers: bytes, make: Callable[[Wire], Upgraded]) -> None:
        """Answer that the connection now speaks another protocol, and hand it over to what `make` returns."""
        if not (self.is_gone or self.code):
            self.code, self.on_gone = 101, None
            self.connection.upgrade(self, headers, make)

    def fail(self, error: HttpError) -> None:
        """Answer with an error. If a part of the answer was written, the connection ends instead."""
        if self.is_chunked:
            self.connection.abort()
        else:
            self.respond(error.code, *self.answer_to_error(error))

    def fail_with(self, error: Exception) -> None:
        """Answer with the error that an exception means. One that is neither HttpError nor CarpoolError is a
        mistake of the gateway's own: it is logged."""
        self.fail(answer_of(error, partial(self.connection.failure, request_id=self.request_id)))

    def begin(self, code: int, headers: bytes) -> None:
        """Begin an answer that is written in parts."""
        if not self.is_gone:
            self.code, self.is_chunked = code, True
            self.connection.write_head(self, headers)

    async def write(self, part: bytes) -> None:
        """Write a part that is not empty; wait while the client reads too slowly."""
        if not self.is_gone:
            await self.connection.write_part(self, part)

    def write_if_read(self, part: bytes) -> None:
        """Write a part that is not empty, unless the client reads too slowly."""
        if not self.is_gone:
            self.connection.write_part_if_read(self, part)

    def end(self) -> None:
        """The last part was written."""
        if not self.is_gone:
            self.on_gone = None
            self.connection.write_end(self)


def _cancel(task: asyncio.Task[Any], _: Exchange) -> None:
    task.cancel()
