"""Executions for tests: a codec, requests, and the model process's own code, without Redis and processes."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

from carpool.messages.batches import Batch, BatchedRequest, BatchedRun
from carpool.messages.requests import JSON, SequencePart
from carpool.messages.results import Result
from carpool.messages.sequences import SequenceChange
from carpool.parts import Buffer
from carpool.wire.bodies import encode_body
from carpool.wire.tensors import TensorSpec
from carpool_worker.codec import Codec
from carpool_worker.execution import Execution, Frame
from carpool_worker.model_process import frames
from carpool_worker.model_process.frame_loop import FrameLoop
from carpool_worker.model_process.frames import LoadFailed, MessageReader, OutcomeHeader, Ready
from carpool_worker.model_process.loaded import description_of
from carpool_worker.model_process.model import LoadedModel, adapt
from carpool_worker.model_process.raised import RaisedLog

NOW_US: Final = 10_000_000


def receive_load_result(reader: MessageReader) -> Ready | LoadFailed:
    """Wait for the first message of a model process. Raises ProcessGoneError."""
    return frames.read_load_result(reader.receive()[0])


def codec_of_model(model: Any) -> tuple[Codec, LoadedModel]:
    """A loaded model, and the codec of its worker, from what the model process sends over a real socket."""
    loaded = adapt(model, "cpu")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send_load_result(theirs, description_of(loaded))
        ready = receive_load_result(MessageReader(ours))
    assert isinstance(ready, Ready)
    return Codec(ready), loaded


def codec_of(*inputs: TensorSpec, outputs: Sequence[TensorSpec] = (), wants_requests: bool = False) -> Codec:
    """A codec for a model with these declarations, sent by the model process over a real socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send_load_result(theirs, Ready({}, inputs, tuple(outputs), wants_requests, {}))
        ready = receive_load_result(MessageReader(ours))
    assert isinstance(ready, Ready)
    return Codec(ready)


def request_of(
    body: Any, content_type: str = JSON, deadline_us: int | None = None, extra: dict[str, bytes] | None = None
) -> BatchedRequest:
    """A request with this body, encoded unless it is bytes."""
    encoded = body if isinstance(body, bytes) else encode_body(content_type, body)
    arrival_us = NOW_US - 5000
    return BatchedRequest(
        "1-0", f"r{body!r:.20}", content_type, None, arrival_us, deadline_us, encoded, extra
    )


def run_of_one(request: BatchedRequest) -> BatchedRun:
    return BatchedRun(
        request.entry_id,
        [request.correlation_id],
        [request.body],
        request.content_type,
        request.reply_to,
        request.arrival_us,
        request.deadline_us,
        request.extra,
    )


def run_of_sequence(
    sequence_id: str, body: Any, *, starts: bool = False, ends: bool = False, content_type: str = JSON
) -> BatchedRun:
    """A request of a sequence, with the correlation ID `r:` and the sequence's."""
    place = SequencePart.place_of("1-0", 0)
    request = request_of(body, content_type)._replace(correlation_id=f"r:{sequence_id}")
    return run_of_one(request)._replace(sequence=SequencePart(sequence_id, starts, ends, None, place))


def execution_of(*requests: BatchedRequest | BatchedRun, epoch: int = 1, **more: Any) -> Execution:
    runs = [run_of_one(request) if isinstance(request, BatchedRequest) else request for request in requests]
    return Execution(Batch("7-0", epoch, runs, "full", NOW_US - 2000, "lane"), **more)


def prepared(codec: Codec, *requests: BatchedRequest | BatchedRun, **more: Any) -> Execution:
    execution = execution_of(*requests, **more)
    codec.prepare(execution, NOW_US)
    return execution


def positions(execution: Execution) -> list[list[int]]:
    """What is still to be executed: requests that are decoded one at a time, and then frames."""
    alone = [[position] for position in execution.undecoded]
    return alone + [list(frame.positions) for frame in execution.frames]


def executed(codec: Codec, frame: Frame, predict: Callable[..., Any]) -> tuple[OutcomeHeader, Buffer]:
    """The outcome of a frame, from the model process's own code over a real socket."""
    model = LoadedModel(
        predict if codec.wants_requests else lambda batch, _: predict(batch),
        wants_requests=codec.wants_requests,
        inputs=codec.inputs,
        outputs=codec.outputs,
    )
    return executed_by(model, frame)


class _SentOnce(FrameLoop):
    """The loop, without a worker that sends a frame again while it is executed: it has the payload itself."""

    sent: Buffer = b""

    def _again(self, _number: int) -> Buffer:
        return self.sent


def executed_by(model: LoadedModel, frame: Frame) -> tuple[OutcomeHeader, Buffer]:
    """The outcome of a frame by a loaded model, from the model process's own code over a real socket."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frames.send_message(ours, frame.header, *frame.payload)
        loop = _SentOnce(theirs, model, RaisedLog(lambda _: None))
        loop.sent = bytearray().join(frame.payload)
        loop.run_once()
        header, payload = MessageReader(ours).receive()
        return OutcomeHeader(*header), payload


def finish(codec: Codec, execution: Execution, predict: Callable[..., Any]) -> list[Result]:
    """Execute everything. Returns every request's result, in order, and none in columns any more."""
    while not execution.is_finished:
        if execution.undecoded and not codec.prepare_next(execution, NOW_US):
            continue
        codec.give_results(execution, execution.frames[0], *executed(codec, execution.frames[0], predict))
        del execution.frames[0]
    execution.separate()
    assert execution.results.keys() == set(range(len(execution.batch.requests)))
    return [execution.results[position] for position in sorted(execution.results)]


def finish_with_states(
    codec: Codec, model: LoadedModel, execution: Execution
) -> dict[str, tuple[Result, SequenceChange]]:
    """Execute all frames. Returns the result of each sequence's request, and what it does to the sequence."""
    while execution.frames:
        codec.give_results(execution, execution.frames[0], *executed_by(model, execution.frames[0]))
        del execution.frames[0]
    execution.separate()
    changes = {change.correlation_id: change for change in execution.changes()}
    return {
        changes[result.correlation_id].part.sequence_id: (result, changes[result.correlation_id])
        for result in execution.results.values()
    }


def echo(batch: Any) -> Any:
    return batch
