"""What a worker registers about its model: a Redis hash of settings and tensor declarations.

Settings are text, as `ModelSettings.as_text` writes them. `stepping` is `true` for a stepping model,
`stateful` for one whose states of sequences are in Redis, and `bound` for one that has them in its processes
(`wire.kinds`). The fields `inputs` and `outputs` are JSON lists of declared tensors, named as in the Open
Inference Protocol.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from carpool.model_settings import ModelKind
from carpool.wire.kinds import kind_fields
from carpool.wire.tensors import TensorSpec

OPTIONAL_FIELDS: Final = ("inputs", "outputs")

_SPEC_FIELDS: Final = ("name", "datatype", "shape")


def encode_registration(
    settings: Mapping[str, str],
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    kind: ModelKind = ModelKind.PLAIN,
) -> dict[str, str]:
    """The fields of the hash. A model that declares no inputs has no field `inputs`; likewise for outputs."""
    fields = {**settings, **kind_fields(kind)}
    for name, specs in zip(OPTIONAL_FIELDS, (inputs, outputs), strict=True):
        if specs:
            fields[name] = json.dumps(
                [{field: getattr(spec, field) for field in _SPEC_FIELDS} for spec in specs]
            )
    return fields


def decode_inputs(registration: Mapping[str, str]) -> list[TensorSpec]:
    """The tensors that a registered model declares as inputs. Raises ValueError if malformed."""
    try:
        return [TensorSpec(**spec) for spec in json.loads(registration.get("inputs", "[]"))]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"registered inputs are not a list of tensors: {error}") from None
