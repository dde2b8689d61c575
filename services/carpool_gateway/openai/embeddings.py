"""Vectors of a model -> answers of OpenAI's embeddings. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from carpool.errors import InternalError
from carpool.wire.bodies import decode_result
from carpool.wire.tensors import Array
from carpool_gateway.openai.pieces import checked_count

_LITTLE_FP32: Final = np.dtype("<f4")


class Embedded(NamedTuple):
    """The vector of an input, FP32; and the tokens of that, if the model tells them."""

    vector: Array
    prompt_tokens: int | None


def read_embedding(content_type: str, body: bytes) -> Embedded:
    """What a model returned for an input: a vector, or a map with `embedding` and perhaps `prompt_tokens`.
    Raises InternalError."""
    value = decode_result(content_type, body)
    tokens = None
    if isinstance(value, dict):
        if value.get("prompt_tokens") is not None:
            tokens = checked_count("prompt_tokens", value["prompt_tokens"])
        value = value.get("embedding")
    return Embedded(_vector_of(value), tokens)


def _vector_of(value: Any) -> Array:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of several lengths
        array = np.empty(0, object)
    if array.ndim != 1 or array.dtype.kind not in "fiu" or not array.size:
        raise InternalError(
            "the model's result is no vector: a model that speaks embeddings returns an array of one "
            'dimension, a list of numbers, or {"embedding": one of these}'
        )
    with np.errstate(over="ignore"):
        vector = array.astype(_LITTLE_FP32)
    if not np.isfinite(vector).all():
        raise InternalError("the model's vector has a number that is not finite in FP32")
    return vector


def document(embedded: Sequence[Embedded], *, model: str, is_base64: bool) -> bytes:
    """The answer with the vectors of all inputs, in order, as JSON."""
    counts = [one.prompt_tokens for one in embedded]
    known = [count for count in counts if count is not None]
    total, is_known = sum(known), len(known) == len(counts)
    data = [
        {"object": "embedding", "index": index, "embedding": _written(one.vector, is_base64=is_base64)}
        for index, one in enumerate(embedded)
    ]
    usage = {"prompt_tokens": total, "total_tokens": total} if is_known else None
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _written(vector: Array, *, is_base64: bool) -> Any:
    return base64.b64encode(vector.tobytes()).decode() if is_base64 else vector.tolist()
