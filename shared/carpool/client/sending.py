"""Values and options -> requests that are added to a Packer. It is the half of `AsyncClient` that sends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from carpool.client.encoding import BodyEncoder, TensorHead
from carpool.client.entries import Channel, Encoded
from carpool.client.options import NO_FIELDS, RequestOptions, check_no_sequence, read_options
from carpool.client.packing import Packer
from carpool.client.producer import ServedChannels
from carpool.client.sequences import SequenceProgress
from carpool.client.sinks import Gathering, Sink, Window
from carpool.client.spans import begin
from carpool.client.streams import StreamSink, StreamTarget
from carpool.errors import CancelledRequestError, InvalidArgumentError
from carpool.messages.requests import MSGPACK
from carpool.wire.tensors import Array, to_bytes


class Sender:
    """Sends soon, with other requests of this turn of the event loop. `timeout_s`: of requests without their
    own."""

    def __init__(
        self,
        packer: Packer,
        channels: Mapping[str, Channel] | ServedChannels,
        encoder: BodyEncoder,
        streams: StreamSink,
        timeout_s: float | None,
    ) -> None:
        self._packer = packer
        self._channels = channels
        self._encoder = encoder
        self._streams = streams
        self._timeout_s = timeout_s

    def add(self, channel: Channel, body: Any, options: RequestOptions, sink: Sink, target: Any) -> str:
        """Send a request soon; return its correlation ID. Its result goes to the target in the sink. Raises
        InvalidArgumentError."""
        if not options:
            encoded = self._encoder.encode(body, None)
            return self._packer.add(channel, encoded, NO_FIELDS, self._timeout_s, sink, target)
        timeout_s, fields = read_options(options, self._timeout_s)
        encoded, own_id = (
            self._encoder.encode(body, options.get("content_type")),
            options.get("correlation_id"),
        )
        return self._packer.add(channel, encoded, fields, timeout_s, sink, target, own_id)

    def add_traced(
        self, channel: Channel, body: Any, options: RequestOptions, sink: Sink, future: Any
    ) -> str:
        """As `add`, for a future; with a span of its own, if the caller's trace is recorded."""
        sent = begin(channel.keys.model, options)
        if sent is None:
            return self.add(channel, body, options, sink, future)
        try:
            correlation_id = self.add(channel, body, sent.options, sink, future)
        except BaseException as error:
            sent.fail(error)
            raise
        sent.follow(future, correlation_id)
        return correlation_id

    def add_or_fail(
        self, channel: Channel, body: Any, options: RequestOptions, sink: Gathering | Window
    ) -> None:
        """As `add`, but a body that cannot be sent fails in its turn."""
        (target,) = sink.reserve(1)
        try:
            self.add(channel, body, options, sink, target)
        except InvalidArgumentError as error:
            sink.fail(target, error)

    async def send_rows(
        self,
        channel: Channel,
        array: Array,
        head: TensorHead,
        options: RequestOptions,
        gathering: Gathering,
        in_flight: int,
    ) -> None:
        """Send the rows of an array, in entries of as many requests as the entries of other requests have."""
        timeout_s, fields = read_options(options, self._timeout_s)
        step = min(in_flight, channel.rows_max(array.nbytes // len(array)))
        for start in range(0, len(array), step):
            await gathering.wait(in_flight - step)
            rows = array[start : start + step]
            encoded = Encoded(MSGPACK, head.encoded, to_bytes(rows, head.datatype))
            targets = gathering.reserve(len(rows))
            self._packer.add_rows(channel, encoded, fields, timeout_s, gathering, targets)

    def start_stream(
        self, channel: Channel, target: StreamTarget, body: Any, options: RequestOptions
    ) -> None:
        """Send the request of a stream. What cannot be sent is an error of the stream."""
        if target.ended:  # closed by its reader meanwhile
            return
        try:
            check_no_sequence(options, "stream")
            target.correlation_id = self.add(channel, body, options, self._streams, target)
        except Exception as error:
            target.fail(error)

    def add_to_sequence(
        self,
        progress: SequenceProgress,
        body: Any,
        options: RequestOptions,
        end: bool,
        sink: Sink,
        target: Any,
    ) -> Callable[[Any], None]:
        """Add the next request of a sequence. Returns what is to be called once the target is done."""
        options = progress.next_options(options, end=end)
        correlation_id = self.add(self._channels[progress.model], body, options, sink, target)
        index = progress.on_sent(end=end)

        def on_done(done: asyncio.Future[Any] | Future[Any]) -> None:
            if done.cancelled():
                self._packer.withdraw(correlation_id, done)
                progress.on_done(index, CancelledRequestError("by its caller"), end=end)
            else:
                progress.on_done(index, done.exception(), end=end)

        return on_done
