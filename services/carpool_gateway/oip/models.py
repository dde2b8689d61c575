"""A registered model as this protocol offers it: its inputs and outputs, and how it takes requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Self

from carpool.model_settings import ModelKind, ModelSettings
from carpool.spoken import NOT_SPOKEN, Spoken
from carpool.wire.registration import decode_inputs, decode_outputs
from carpool.wire.tensors import TensorSpec

VERSION: Final = "1"  # of a model that declares none
BODY: Final = TensorSpec("body", "BYTES", (1,))
RESULT: Final = TensorSpec("result", "BYTES", (1,))


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model. Shapes of tensors are those of one request, without the batch.

    A model that declares no inputs is offered with BODY, whose elements are the bodies of its requests; one
    that declares no outputs with RESULT, whose elements are their results.
    """

    name: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    kind: ModelKind
    settings: ModelSettings
    version: str = VERSION
    spoken: Spoken = NOT_SPOKEN  # what it says of OpenAI's API

    @classmethod
    def of(
        cls, name: str, registration: Mapping[str, str], overrides: Mapping[str, str] | None = None
    ) -> Self:
        """A model from what is registered of it, and an operator's overrides. Raises ValueError if its
        tensors cannot be read."""
        settings = ModelSettings.from_readable({**registration, **(overrides or {})})
        inputs, outputs = decode_inputs(registration), decode_outputs(registration)
        kind, version = ModelKind.of(registration), registration.get("version", VERSION)
        spoken = Spoken.of(registration)
        return cls(name, inputs or [BODY], outputs or [RESULT], kind, settings, version, spoken)

    @property
    def declares_inputs(self) -> bool:
        """Whether its inputs are its own."""
        return self.inputs[0] is not BODY

    @property
    def declares_outputs(self) -> bool:
        """Whether its outputs are its own."""
        return self.outputs[0] is not RESULT


def shown_shape(spec: TensorSpec) -> list[int]:
    """The shape of a tensor with the batch, whose size varies, first."""
    return [-1, *spec.shape]


def shown(specs: Sequence[TensorSpec]) -> str:
    """Tensors for an error's text, such as `x FP32 [-1, 3], y BYTES [-1, 1]`."""
    return ", ".join(f"{spec.name} {spec.datatype} {shown_shape(spec)}" for spec in specs)
