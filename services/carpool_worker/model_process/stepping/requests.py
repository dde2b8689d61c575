"""What a stepping model gets: requests that it generates step by step. And generator functions as models.

    class Writer:
        max_batch_size = 32                   # slots: requests that are generated together
        def begin(self, requests): ...        # those that have just got a slot; `r.state` is the model's own
        def step(self, requests): ...         # all that have a slot: r.emit(value), r.finish()
        def end(self, request): ...           # optional: once for each begun request, however it ended
        continues = True                      # False: it cannot go on from `r.chunks`

`begin` and `step` may emit, finish and fail. `end` is called for every request that `begin` was called with,
also if `begin` raised: `state` is then what `begin` had set, or None.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgpack
import numpy as np

from carpool.errors import INTERNAL, AbortedError
from carpool.model_settings import RESULT_BYTES_DEFAULT
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.failures import Observe, WrongOutputError, failure_of, not_observed
from carpool_worker.model_process.frames import Failure, pack_values, places_in, too_large, unpack_values
from carpool_worker.model_process.loaded import RequestInfo
from carpool_worker.model_process.outputs import declared_row
from carpool_worker.model_process.stepping.chunks import text_array

_PLAIN_TYPES: Final = frozenset({str, bytes, int, float, bool, type(None)})
_PLAIN_PACKER: Final = msgpack.Packer()
_UNSENDABLE: Final = "the model's result cannot be sent"
_JOINED: Final = object()


class ResultLimit:
    """How many bytes the output of each request of a process may have, packed; it may change at any time."""

    __slots__ = ("bytes_max",)

    def __init__(self, bytes_max: int = RESULT_BYTES_DEFAULT) -> None:
        self.bytes_max = bytes_max


class StepRequest:
    """A request that is being generated. `begin` and `step` call its methods, in the thread that called them.

    `body`: as it was sent, and so again if the request is begun anew, whatever the model did to it. `cost`,
    `lane` and `fields` are the producer's, and so again, too. `info`: all that is known of the request.
    `state`: the model's own, None before each `begin`.

    An error in the use of these methods fails this request alone. None of them raises, except that `fail`
    passes on what says that the process cannot go on. Once the request has ended, for example because its
    producer withdrew it, they have no effect. `outputs`: those that the model declares, which each value that
    it emits has.
    """

    __slots__ = (
        "_chunks_bytes",
        "_chunks_count",
        "_failure",
        "_info",
        "_is_finished",
        "_limit",
        "_observe",
        "_output",
        "_outputs",
        "_overhead_bytes",
        "_packed",
        "body",
        "correlation_id",
        "cost",
        "emitted",
        "fields",
        "is_too_large",
        "lane",
        "state",
    )

    def __init__(
        self,
        correlation_id: str,
        lane: str,
        fields: Mapping[str, bytes],
        body: Any,
        cost: int = 1,
        observe: Observe = not_observed,
        limit: ResultLimit | None = None,
        info: RequestInfo | None = None,
        outputs: Sequence[TensorSpec] = (),
    ) -> None:
        self._info = info or RequestInfo(correlation_id, lane, fields, cost=cost)
        self._observe = observe
        self._limit = limit or ResultLimit()
        self._outputs = outputs
        self.correlation_id = correlation_id
        self.lane = lane
        self.fields = fields
        self.body = body
        self.cost = cost
        self.state: Any = None
        self.emitted = 0  # values, those in `chunks` included
        self.is_too_large = False  # it failed because of the limit
        self._packed = bytearray()  # all emitted values, packed one after the other
        self._overhead_bytes = 0  # of the chunks in Redis, beside the values
        self._chunks_count = self._chunks_bytes = 0  # how many of them `begin` was called with
        self._is_finished = False
        self._output: bytes | None = None  # packed; None: the emitted values, joined
        self._failure: Failure | None = None

    @property
    def info(self) -> RequestInfo:
        """What the request has beside its body, as other models are told it."""
        return self._info._replace(fields=self.fields)

    @property
    def tenant(self) -> str:
        """See RequestInfo, as of all of these."""
        return self._info.tenant

    @property
    def content_type(self) -> str:
        """Of the body."""
        return self._info.content_type

    @property
    def accept(self) -> str:
        """The content type that the producer wants; empty if it names none."""
        return self._info.accept

    @property
    def priority(self) -> int:
        """From 0 to 9, higher first."""
        return self._info.priority

    @property
    def arrival_s(self) -> float:
        """When it arrived: seconds since 1970 by `time.time`."""
        return self._info.arrival_s

    @property
    def deadline_s(self) -> float | None:
        """Until when its producer waits: seconds since 1970 by `time.time`; None: without end."""
        return self._info.deadline_s

    @property
    def time_left_s(self) -> float | None:
        """Seconds until its deadline, as of now, at least 0; None if it has none."""
        return self._info.time_left_s

    @property
    def delivery_count(self) -> int:
        """1 unless it may have been begun before, because a worker or a model process died."""
        return self._info.delivery_count

    @property
    def chunks(self) -> list[Any]:
        """The values that the request emitted before it was begun, oldest first: its reader may have them.

        Empty, except if the process that generated it died, or if the model raised. Decoded at each call.
        """
        values = unpack_values(self._packed_chunks())
        if len(self._outputs) > 1:
            return [{name: text_array(array) for name, array in value.items()} for value in values]
        return [text_array(value) for value in values]

    @property
    def has_ended(self) -> bool:
        """Whether it is finished or failed."""
        return self._is_finished or self._failure is not None

    def emit(self, value: Any) -> None:
        """Send a chunk: a value as in a result. With more than `max_result_bytes` in all, it fails."""
        if self._is_finished or self._failure is not None:
            self._fail(INTERNAL, "the model emitted a value after it had finished the request")
            return
        try:
            packed = self._pack(value)
            if len(self._packed) + len(packed) + self._overhead_bytes > self._limit.bytes_max:
                self._fail_as_too_large()
                return
            self._packed += packed
        except WrongOutputError as error:
            self._fail(INTERNAL, str(error))
        except Exception as error:  # a model's arrays may be of any class and raise anything
            self._fail(INTERNAL, f"{_UNSENDABLE}: {error}")
        else:
            self.emitted += 1

    def finish(self, output: Any = _JOINED) -> None:
        """End the request. Its output is `output`, or else the emitted values, joined."""
        if self._is_finished or self._failure is not None:
            self._fail(INTERNAL, "the model finished the request twice")
            return
        self._is_finished = True
        if output is not _JOINED:
            try:
                self._output = _pack(output)
            except Exception as error:
                self._fail(INTERNAL, f"{_UNSENDABLE}: {error}")
            else:
                if len(self._output) > self._limit.bytes_max:
                    self._output = None
                    self._fail_as_too_large()

    def fail(self, error: BaseException | str) -> None:
        """End the request with an error: an exception, as if the model had raised it, or a sentence."""
        if isinstance(error, BaseException):
            self._observed(error)
            self._fail(*failure_of(error, INTERNAL))
        else:
            self._fail(INTERNAL, str(error))

    def _observed(self, error: BaseException) -> None:
        """The model failed it with this."""
        self._observe(error, ())

    def _fail(self, status: str, detail: str) -> None:
        """Only the first failure counts."""
        if self._failure is None:
            self._failure = status, detail

    def _fail_as_too_large(self) -> None:
        self.is_too_large = True
        self._fail(*too_large(self._limit.bytes_max))

    def _pack(self, value: Any) -> bytes:
        """A value as it is sent. Raises WrongOutputError if it is not as it is declared, and others."""
        return _pack(declared_row(self._outputs, value) if self._outputs else value)

    def _packed_chunks(self) -> bytes:
        """`chunks` as a packed list."""
        return list_header(self._chunks_count) + self._packed[: self._chunks_bytes]


def list_header(count: int) -> bytes:
    """What precedes `count` packed values in a packed list."""
    return bytes(_PLAIN_PACKER.pack_array_header(count))


def _pack(value: Any) -> bytes:
    """A value that certainly can be unpacked. Raises if it cannot be packed, or not be unpacked."""
    if type(value) in _PLAIN_TYPES:
        try:
            return _PLAIN_PACKER.pack(value)  # type: ignore[no-any-return]
        except (OverflowError, ValueError):
            return pack_values(value)  # which says why
    packed = pack_values(value)
    if type(value) is not np.ndarray:
        unpack_values(packed)  # a map with a tuple as a key can be packed, but not unpacked
    return packed


class GeneratorModel:
    """A generator function as a stepping model: each request has a generator, which a step advances once.

    A request that is continued is generated anew; the values that were sent are skipped. That happens in
    `begin`, so that the next step is the first one that was not taken.
    """

    continues = True

    def __init__(self, generate: Callable[..., Iterator[Any]]) -> None:
        """`generate` takes a body; and a RequestInfo, if it has a parameter `request` behind that."""
        self._generate = generate
        self._wants_request = "request" in [*inspect.signature(generate).parameters][1:]

    def begin(self, requests: Sequence[StepRequest]) -> None:
        """Create the generators."""
        for request in requests:
            try:
                named = {"request": request.info} if self._wants_request else {}
                request.state = self._generate(request.body, **named)
                _skip(request.state, request)
            except BaseException as error:  # a library's panic, SystemExit: none may end this process
                request.fail(error)

    def step(self, requests: Sequence[StepRequest]) -> None:
        """Emit the next value of each request."""
        for request in requests:
            try:
                value = next(request.state)
            except StopIteration as stop:
                if stop.value is None:
                    request.finish()
                else:
                    request.finish(stop.value)
            except BaseException as error:
                request.fail(error)
            else:
                request.emit(value)

    def end(self, request: StepRequest) -> None:
        """Close the generator: its `finally` blocks are executed."""
        if request.state is not None:
            request.state.close()


def _skip(generator: Iterator[Any], request: StepRequest) -> None:
    """Skip the values that were sent. Raises AbortedError if the generator does not yield the same ones."""
    sent = request._packed_chunks()
    for index, place in enumerate(places_in(sent)):
        try:
            is_same = request._pack(next(generator)) == sent[place]
        except StopIteration:
            is_same = False
        if not is_same:
            raise AbortedError(
                f"the model was run again, and chunk {index} is not as it was sent: send the request again"
            )
