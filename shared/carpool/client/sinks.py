"""Where results go: to a future for each request, to a window of them in order, or to one array.

Each request has a target, which its sink gets with the result: a future, or the request's number. A sink gets
results as they came, in envelopes or in columns, and decodes them with a ResultReader.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

import numpy as np

from carpool.client.reading import ResultReader
from carpool.errors import CarpoolError
from carpool.messages.results import ResultColumns
from carpool.wire.tensors import Array

_LOG: Final = logging.getLogger("carpool.client")
COLUMN_KEPT_BYTES_MAX: Final = 256 * 1024

Envelope = dict[str, Any]  # of a result or a chunk, checked by `wire.results.check_envelope`


class Reply(NamedTuple):
    """A result, with the size and the times of the batch it was in.

    `value`: what the model returned for this request; an array of numpy if it returned a tensor.
    `correlation_id`: that of the request.
    `batch_size`: requests that were dispatched together, this one included.
    `queue_us`: microseconds from its arrival in Redis until a model process took its batch.
    `compute_us`: microseconds that the model took for the batch; of a stream, for all of its steps.
    `first_us`: of a stream, microseconds from arrival to the first chunk; None if there was none.
    `version`: that of the model, as it declares it; empty if it declares none.
    """

    value: Any
    correlation_id: str
    batch_size: int
    queue_us: int
    compute_us: int
    first_us: int | None = None
    version: str = ""


class Sink:
    """Takes the results of requests. Each has one, in an envelope or in columns, or an error instead."""

    takes_chunks = False  # its requests are sent as streams

    def put(self, target: Any, envelope: Envelope) -> None:
        """Take a result of any status."""
        raise NotImplementedError

    def put_columns(self, targets: Sequence[Any], columns: ResultColumns) -> None:
        """Take the results of several requests, all OK, in the order of their targets."""
        for target, result in zip(targets, columns.results(), strict=True):
            self.put(target, result._asdict())

    def put_chunk(self, target: Any, envelope: Envelope) -> None:
        """Take a chunk, if it takes chunks. Raises CarpoolError if it is unusable: then the request fails."""
        raise NotImplementedError

    def fail(self, target: Any, error: CarpoolError) -> None:
        """Take an error instead of a result."""
        raise NotImplementedError


class DecodingSink(Sink):
    """Takes values. A result that is not OK, or that cannot be decoded, is an error."""

    def __init__(self, reader: ResultReader) -> None:
        self._reader = reader

    def put(self, target: Any, envelope: Envelope) -> None:
        """Decode a result."""
        try:
            value = self._reader.value(envelope)
        except CarpoolError as error:
            self.fail(target, error)
        else:
            self.put_value(target, value, envelope)

    def put_columns(self, targets: Sequence[Any], columns: ResultColumns) -> None:
        """Decode results: all at once, if they are the rows of an array."""
        try:
            array = self._reader.array(columns)
        except CarpoolError:
            array = None  # each result fails by itself
        if array is None:
            super().put_columns(targets, columns)
        else:
            self.put_rows(targets, array, columns)

    def put_value(self, target: Any, value: Any, envelope: Envelope) -> None:
        """Take the value of this envelope."""
        raise NotImplementedError

    def put_rows(self, targets: Sequence[Any], array: Array, columns: ResultColumns) -> None:
        """Take the values of these columns, which are the rows of an array."""
        raise NotImplementedError


def rows_of(array: Array) -> list[Array]:
    """The rows of an array, as views that keep at most COLUMN_KEPT_BYTES_MAX alive, or one row.

    A program may keep a few results of many, and a view keeps the whole array: a larger one is divided. Rows
    may be written to, as the result of a request that was alone may: the bytes that were received are copied.
    """
    if array.nbytes <= COLUMN_KEPT_BYTES_MAX or len(array) == 1:
        return _views(array if array.flags.writeable else array.copy())
    step = max(1, COLUMN_KEPT_BYTES_MAX * len(array) // array.nbytes)
    rows: list[Array] = []
    for start in range(0, len(array), step):
        rows += _views(array[start : start + step].copy())
    return rows


def _views(array: Array) -> list[Array]:
    return list(array) if array.ndim > 1 else [array[at, ...] for at in range(len(array))]


class FutureSink(DecodingSink):
    """A future for each request, which gets the value."""

    def put_value(self, target: asyncio.Future[Any], value: Any, envelope: Envelope) -> None:
        """Resolve the future, unless it was cancelled."""
        if not target.done():
            target.set_result(value)

    def put_rows(self, targets: Sequence[asyncio.Future[Any]], array: Array, columns: ResultColumns) -> None:
        """Resolve each future with its row."""
        for target, row in zip(targets, rows_of(array), strict=True):
            if not target.done():
                target.set_result(row)

    def fail(self, target: asyncio.Future[Any], error: CarpoolError) -> None:
        """Set the exception of the future, unless it was cancelled."""
        if not target.done():
            target.set_exception(error)


class ThreadFutureSink(DecodingSink):
    """A `concurrent.futures.Future` for each request, which gets the value."""

    def put_value(self, target: Future[Any], value: Any, envelope: Envelope) -> None:
        """Resolve the future, unless it was cancelled."""
        resolve_future(target, value)

    def put_rows(self, targets: Sequence[Future[Any]], array: Array, columns: ResultColumns) -> None:
        """Resolve each future with its row."""
        for target, row in zip(targets, rows_of(array), strict=True):
            resolve_future(target, row)

    def fail(self, target: Future[Any], error: Exception) -> None:
        """Set the exception of the future, unless it was cancelled."""
        fail_future(target, error)


def resolve_future(future: Future[Any], value: Any) -> None:
    """Set the result of a future, unless it was cancelled."""
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(value)
    except BaseException:
        _on_callback_error()


def fail_future(future: Future[Any], error: BaseException) -> None:
    """Set the exception of a future, unless it is done."""
    try:
        if not future.done() and future.set_running_or_notify_cancel():
            future.set_exception(error)
    except BaseException:
        _on_callback_error()


def _on_callback_error() -> None:
    """A callback of a future raised what `concurrent.futures` lets through, such as SystemExit. It must not
    end the thread on which it ran: the results of all others come there."""
    _LOG.exception("a callback of a future raised")


class ReplySink(FutureSink):
    """A future for each request, which gets a Reply."""

    def put_value(self, target: asyncio.Future[Any], value: Any, envelope: Envelope) -> None:
        """Resolve the future, unless it was cancelled."""
        if not target.done():
            target.set_result(reply_of(value, envelope))

    def put_rows(self, targets: Sequence[asyncio.Future[Any]], array: Array, columns: ResultColumns) -> None:
        """Resolve each future with its row."""
        for target, reply in zip(targets, replies_of(array, columns), strict=True):
            if not target.done():
                target.set_result(reply)


def reply_of(value: Any, envelope: Envelope) -> Reply:
    """The Reply of an envelope that has this value."""
    return Reply(
        value,
        envelope["correlation_id"],
        envelope["batch_size"],
        envelope["queue_us"],
        envelope["compute_us"],
        envelope.get("first_us"),
        envelope.get("version", ""),
    )


def replies_of(array: Array, columns: ResultColumns) -> list[Reply]:
    """The Replies of columns whose values are the rows of an array."""
    served = (columns.batch_size, columns.queue_us, columns.compute_us, None, columns.version)
    rows = zip(columns.correlation_ids, rows_of(array), strict=True)
    return [Reply(row, correlation_id, *served) for correlation_id, row in rows]


class _Numbered(DecodingSink):
    """Numbers requests from 0, and wakes one waiter when something that it waits for has changed."""

    def __init__(self, reader: ResultReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader)
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None
        self.sent = 0

    def reserve(self, count: int) -> range:
        """The numbers of the next `count` requests."""
        self.sent += count
        return range(self.sent - count, self.sent)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Window(_Numbered):
    """Results that one reader takes in the order of their requests, one by one."""

    def __init__(self, reader: ResultReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop)
        self._results: dict[int, Any] = {}  # those not taken, by number
        self._taken = 0

    def __len__(self) -> int:
        """Requests whose result was not taken."""
        return self.sent - self._taken

    @property
    def ready(self) -> bool:
        """Whether the next result is here."""
        return self._taken in self._results

    async def take(self) -> Any:
        """The next result. A CarpoolError is returned, too."""
        while self._taken not in self._results:
            await self._wait()
        self._taken += 1
        return self._results.pop(self._taken - 1)

    def put_value(self, target: int, value: Any, envelope: Envelope) -> None:
        """Keep a value until it is taken."""
        self._keep(target, value)

    def put_rows(self, targets: Sequence[int], array: Array, columns: ResultColumns) -> None:
        """Keep the values until they are taken."""
        self._results.update(zip(targets, rows_of(array), strict=True))
        if self._taken in self._results:
            self._wake()

    def fail(self, target: int, error: CarpoolError) -> None:
        """Keep an error until it is taken."""
        self._keep(target, error)

    def _keep(self, target: int, result: Any) -> None:
        self._results[target] = result
        if target == self._taken:
            self._wake()


class Gathering(_Numbered):
    """All results of `infer_many`: the rows of one array as long as all have one layout, else a list."""

    def __init__(
        self, reader: ResultReader, loop: asyncio.AbstractEventLoop, *, size: int | None, keep_errors: bool
    ) -> None:
        """`size`: the number of requests, if an array is wanted. `keep_errors`: they are results, too."""
        super().__init__(reader, loop)
        self._size = size
        self._keep_errors = keep_errors
        self._array: Array | None = None
        self._others: dict[int, Any] = {}  # the results that are not in the array, by number
        self._settled = 0
        self._wanted = 0  # the number of results for which the caller waits
        self._error: CarpoolError | None = None

    @property
    def in_flight(self) -> int:
        """Requests without a result."""
        return self.sent - self._settled

    async def wait(self, in_flight_max: int) -> None:
        """Wait until at most `in_flight_max` requests have no result. Raises the first error."""
        self._wanted = self.sent - in_flight_max
        while self._error is None and self._settled < self._wanted:
            await self._wait()
        if self._error is not None:
            raise self._error

    def results(self) -> Array | list[Any]:
        """The results, once there are all."""
        array, others = self._array, self._others
        if array is None:
            return [others[number] for number in range(self.sent)]
        if not others:
            return array
        return [others[number] if number in others else array[number, ...] for number in range(self.sent)]

    def put_value(self, target: int, value: Any, envelope: Envelope) -> None:
        """Keep a value; an array as a row."""
        if type(value) is np.ndarray:
            self._keep_rows([target], value[np.newaxis])
        else:
            self._others[target] = value
            self._settle(1)

    def put_rows(self, targets: Sequence[int], array: Array, columns: ResultColumns) -> None:
        """Copy the rows into the array."""
        self._keep_rows(targets, array)

    def _keep_rows(self, targets: Sequence[int], array: Array) -> None:
        if self._size is not None and self._array is None:
            self._array = np.empty((self._size, *array.shape[1:]), array.dtype)
        ours = self._array
        if ours is not None and ours.dtype == array.dtype and ours.shape[1:] == array.shape[1:]:
            ours[targets] = array
        else:
            self._others.update(zip(targets, rows_of(array), strict=True))
        self._settle(len(targets))

    def fail(self, target: int, error: CarpoolError) -> None:
        """Keep an error, or raise it to the caller."""
        if self._keep_errors:
            self._others[target] = error
            self._settle(1)
        elif self._error is None:
            self._error = error
            self._wake()

    def _settle(self, count: int) -> None:
        self._settled += count
        if self._settled >= self._wanted:
            self._wake()
