"""From the outcome of a frame to what is sent to the worker."""

from __future__ import annotations

from carpool.errors import INTERNAL, RESOURCE_EXHAUSTED
from carpool_worker.model_process import frames
from carpool_worker.model_process.executor import Outcome
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader
from carpool_worker.model_process.model import LoadedModel

# Failures, parts, payload, and why a result is too large, if one is.
_Encoded = tuple[dict[int, frames.Failure], list[frames.Part], bytes, str]


def encode_outcome(
    model: LoadedModel, frame: FrameHeader, outcome: Outcome, compute_us: int
) -> tuple[OutcomeHeader, bytes]:
    """The header and the payload of a frame's outcome. A result that cannot be sent, or is too
    large, fails its own request."""
    failures, parts, data, error = _encode(model, outcome, frame.size, frame.result_bytes_max)
    header = OutcomeHeader(
        frame.first,
        frame.size,
        frame.number,
        compute_us,
        failures,
        parts,
        outcome.executed,
        outcome.raised,
        {error: ()} if error else {},
        refused=outcome.refused,
    )
    return header, data


def _encode(model: LoadedModel, outcome: Outcome, count: int, bytes_max: int) -> _Encoded:
    failures, results = outcome.failures, outcome.results
    if isinstance(results, dict):
        try:
            parts, data = frames.stack(results, model.output_datatypes)
        except Exception as error:  # a model's arrays may be of any class and raise anything
            return _all_fail((INTERNAL, str(error)), failures, count)
        if len(data) > bytes_max * (count - len(failures)):  # all are equally large
            return _all_fail(frames.too_large(bytes_max), failures, count)
        return failures, parts, data, ""
    try:
        data = frames.pack_values(results)
    except Exception:
        return _encode_each(outcome, count, bytes_max)
    return (failures, [], data, "") if len(data) <= bytes_max else _encode_each(outcome, count, bytes_max)


def _all_fail(failure: frames.Failure, failures: dict[int, frames.Failure], count: int) -> _Encoded:
    status, detail = failure
    error = detail if status == RESOURCE_EXHAUSTED else ""
    return dict.fromkeys(range(count), failure) | failures, [], frames.pack_values([]), error


def _encode_each(outcome: Outcome, count: int, bytes_max: int) -> _Encoded:
    """Encode each result alone, to find out which of them cannot be sent, or are too large."""
    failures, sendable = dict(outcome.failures), []
    too_large, error = frames.too_large(bytes_max), ""
    indexes = [index for index in range(count) if index not in failures]
    for index, result in zip(indexes, outcome.results, strict=True):
        try:
            size_bytes = len(frames.pack_values(result))
        except Exception as unsendable:
            failures[index] = (INTERNAL, f"the model's result cannot be sent: {unsendable}")
            continue
        if size_bytes > bytes_max:
            failures[index] = too_large
            error = too_large[1]
        else:
            sendable.append(result)
    return failures, [], frames.pack_values(sendable), error
