"""A request in a stepping model's process: what the model sees of it, and what it sends to the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from carpool.errors import ABORTED, INTERNAL
from carpool.wire.tensors import TensorSpec
from carpool_worker.model_process.failures import Observe, not_observed
from carpool_worker.model_process.frames import Failure, pack_values, unpack_results
from carpool_worker.model_process.loaded import RequestInfo
from carpool_worker.model_process.stepping.chunks import join
from carpool_worker.model_process.stepping.frames import Admit, Advance
from carpool_worker.model_process.stepping.requests import ResultLimit, StepRequest, list_header

CHUNK_OVERHEAD_BYTES: Final = 128  # of Redis's memory for a field with a chunk; measured: 85 to 93
_LIST_OF_ONE = list_header(1)


class Generation(StepRequest):
    """One for each request that was admitted, until it has ended.

    The emitted values are kept once, packed: as long as the request may be begun anew, and until they are
    joined to its output.
    """

    __slots__ = (
        "_admitted", "_body_again", "_emitted_before", "_is_streamed", "_sent_bytes", "_sent_count",
        "_silent_steps", "cost_failure", "is_begun", "key",
    )  # fmt: skip

    def __init__(
        self,
        admit: Admit,
        body: Any,
        observe: Observe = not_observed,
        limit: ResultLimit | None = None,
        outputs: Sequence[TensorSpec] = (),
    ) -> None:
        info = RequestInfo(*admit.request)
        super().__init__(
            info.correlation_id, info.lane, info.fields, body, admit.cost, observe, limit, info, outputs
        )
        self._admitted = (*info[:3], admit.cost)
        self.fields = dict(self.fields)
        self.key = admit.key
        self.cost_failure: Failure | None = None  # why its cost is not known
        self._body_again: Callable[[], Any] | None = None
        self.is_begun = False  # `end` is to be called for it
        self._is_streamed = admit.is_streamed
        if admit.chunks:
            self.emitted = _strip_headers(admit.chunks, self._packed)
            self._overhead_bytes = len(admit.chunks) * CHUNK_OVERHEAD_BYTES
        self._sent_count = self._chunks_count = self.emitted
        self._sent_bytes = self._chunks_bytes = len(self._packed)
        self._emitted_before = self.emitted  # before the last step that `count_silent_steps` heard of
        self._silent_steps = 0

    def set_cost(self, cost: int) -> None:
        """It has another cost than its producer sent."""
        self.cost = cost
        self._admitted = (*self._admitted[:3], cost)
        self._info = self._info._replace(cost=cost)

    def keep_body(self, again: Callable[[], Any]) -> None:
        """The model may change the body: `again` has it as it was sent."""
        self._body_again = again

    def renew_body(self) -> None:
        """The body is what was sent, whatever the model did to it."""
        if self._body_again is not None:
            self.body = self._body_again()

    @property
    def was_sent(self) -> bool:
        """Whether its reader may have seen a chunk."""
        return self._is_streamed and self._sent_count > 0

    def pop_advance(self) -> Advance | None:
        """What is to be sent now; None if nothing is."""
        count = self.emitted - self._sent_count if self._is_streamed else 0
        has_ended = self._is_finished or self._failure is not None
        if not (count or has_ended):
            return None
        chunk = b""
        if count:
            header = _LIST_OF_ONE if count == 1 else list_header(count)
            chunk = header + self._packed[self._sent_bytes :]
            self._sent_count, self._sent_bytes = self.emitted, len(self._packed)
            self._overhead_bytes += CHUNK_OVERHEAD_BYTES
            self._emitted_before, self._silent_steps = self.emitted, 0
        if not has_ended:
            return Advance(self.key, chunk, self.emitted)
        output = self._final_output() if self._failure is None else None
        return Advance(self.key, chunk, self.emitted, output, self._failure)

    def count_silent_steps(self) -> int:
        """It took a step, after which there was nothing to send: how many such steps it has taken in a row in
        which it emitted nothing."""
        self._silent_steps = self._silent_steps + 1 if self.emitted == self._emitted_before else 0
        self._emitted_before = self.emitted
        return self._silent_steps

    def reject(self, failure: Failure) -> None:
        """End it with this failure, unless it has ended."""
        if not self.has_ended:
            self._failure = failure

    def abort(self) -> None:
        """End it: its model cannot continue what its reader has seen."""
        self.reject((ABORTED, "the model cannot continue what it had begun to send: send the request again"))

    def restart(self, *, continues: bool) -> None:
        """Prepare it to be begun anew, as it was sent, with all that it emitted as its chunks.

        A model that cannot continue begins at the start, and what was not sent is forgotten. If something was
        sent, the request is aborted.
        """
        self.state = None
        self.correlation_id, self.lane, fields, self.cost = self._admitted
        self.fields = dict(fields)
        self.renew_body()
        if continues:
            self._chunks_count, self._chunks_bytes = self.emitted, len(self._packed)
        elif self.was_sent:
            self.abort()
        else:
            self.emitted = 0
            self._packed.clear()

    def _observed(self, error: BaseException) -> None:
        self._observe(error, (self.key,))

    def _final_output(self) -> bytes | None:
        """The output as a packed list of one value. If that cannot be made, the request fails."""
        if self._output is not None:
            return _LIST_OF_ONE + self._output
        try:
            values = unpack_results(list_header(self.emitted) + self._packed)
            return pack_values([join(values)])
        except Exception as error:  # for example too little memory
            self._failure = INTERNAL, f"the chunks cannot be joined: {error}"
            return None


def _strip_headers(chunks: Sequence[bytes], packed: bytearray) -> int:
    """Append the values of packed lists to `packed`, one after the other. Returns their number."""
    count = 0
    unpacker = msgpack.Unpacker(max_buffer_size=0)
    for chunk in chunks:
        unpacker.feed(chunk)
        start = unpacker.tell()
        values = unpacker.read_array_header()
        packed += chunk[unpacker.tell() - start :]
        for _ in range(values):
            unpacker.skip()
        count += values
    return count
