"""From the outcome of a frame to what is sent to the worker."""

from __future__ import annotations

from carpool.errors import INTERNAL
from carpool_worker.model_process import frames
from carpool_worker.model_process.executor import Outcome
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader
from carpool_worker.model_process.model import LoadedModel

_Encoded = tuple[dict[int, frames.Failure], list[frames.Part], bytes]  # failures, parts, payload


def encode_outcome(
    model: LoadedModel, frame: FrameHeader, outcome: Outcome, compute_us: int
) -> tuple[OutcomeHeader, bytes]:
    """The header and the payload of a frame's outcome. A result that cannot be sent fails its own request."""
    failures, parts, data = _encode(model, outcome, frame.size)
    header = OutcomeHeader(
        frame.first,
        frame.size,
        frame.number,
        compute_us,
        failures,
        parts,
        outcome.executed,
        outcome.raised,
        refused=outcome.refused,
    )
    return header, data


def _encode(model: LoadedModel, outcome: Outcome, count: int) -> _Encoded:
    failures, results = outcome.failures, outcome.results
    if isinstance(results, dict):
        try:
            parts, data = frames.stack(results, model.output_datatypes)
        except Exception as error:  # a model's arrays may be of any class and raise anything
            return dict.fromkeys(range(count), (INTERNAL, str(error))) | failures, [], frames.pack_values([])
        return failures, parts, data
    try:
        return failures, [], frames.pack_values(results)
    except Exception:
        return _encode_each(outcome, count)


def _encode_each(outcome: Outcome, count: int) -> _Encoded:
    """Encode each result alone, to find out which of them cannot be sent."""
    failures, sendable = dict(outcome.failures), []
    indexes = [index for index in range(count) if index not in failures]
    for index, result in zip(indexes, outcome.results, strict=True):
        try:
            frames.pack_values(result)
            sendable.append(result)
        except Exception as error:
            failures[index] = (INTERNAL, f"the model's result cannot be sent: {error}")
    return failures, [], frames.pack_values(sendable)
