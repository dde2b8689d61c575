"""What a worker registers of its model: a hash of settings as text, and tensors as JSON in OIP's terms."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from carpool.wire.tensors import TensorSpec

_FIELDS: Final = ("name", "datatype", "shape")


def encode_registration(
    settings: Mapping[str, str], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> dict[str, str]:
    """The fields of the hash. A model that declares no tensors has no `inputs` and `outputs`."""
    fields = dict(settings)
    for name, specs in (("inputs", inputs), ("outputs", outputs)):
        if specs:
            fields[name] = json.dumps([{field: getattr(spec, field) for field in _FIELDS} for spec in specs])
    return fields


def decode_inputs(registration: Mapping[str, str]) -> list[TensorSpec]:
    """The tensors that a registered model declares as its inputs."""
    return [TensorSpec(**spec) for spec in json.loads(registration.get("inputs", "[]"))]
