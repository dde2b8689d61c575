"""A registered model as this protocol offers it: its inputs and outputs, and how it takes requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from carpool.errors import NotFoundError
from carpool.model_settings import ModelKind, ModelSettings
from carpool.spoken import NOT_SPOKEN, Spoken
from carpool.wire.registration import VERSIONS, decode_inputs, decode_outputs
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
    versions: Sequence[str] = ()  # those that living workers name
    asked: str = ""  # the version that a request asks for, which `version` is then
    _of_versions: dict[str, Self] = field(default_factory=dict, compare=False, repr=False)

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
        versions = registration.get(VERSIONS, "").split()
        return cls(name, inputs or [BODY], outputs or [RESULT], kind, settings, version, spoken, versions)

    def of_version(self, version: str | None) -> Self:
        """The model for requests that ask for this version; None, or empty: for those that ask for none. The
        same object each time. Raises NotFoundError if no worker names it."""
        if not version:
            return self
        found = self._of_versions.get(version)
        if found is None:
            if version not in (self.versions or (self.version,)):
                raise unknown_version(self.name, version, self.versions or (self.version,))
            asked = version if self.versions else ""  # else no worker says which one it has
            found = self._of_versions[version] = replace(self, version=version, asked=asked, _of_versions={})
        return found

    @property
    def declares_inputs(self) -> bool:
        """Whether its inputs are its own."""
        return self.inputs[0] is not BODY

    @property
    def declares_outputs(self) -> bool:
        """Whether its outputs are its own."""
        return self.outputs[0] is not RESULT


def unknown_version(name: str, version: str, versions: Sequence[str]) -> NotFoundError:
    """The error for a version that no worker of a model has, in words for which clients look."""
    has = f"version {versions[0]}" if len(versions) == 1 else f"versions {', '.join(versions)}"
    return NotFoundError(f"Request for unknown model: '{name}' version {version} is not found; it has {has}")


def shown_shape(spec: TensorSpec) -> list[int]:
    """The shape of a tensor with the batch, whose size varies, first."""
    return [-1, *spec.shape]


def shown(specs: Sequence[TensorSpec]) -> str:
    """Tensors for an error's text, such as `x FP32 [-1, 3], y BYTES [-1, 1]`."""
    return ", ".join(f"{spec.name} {spec.datatype} {shown_shape(spec)}" for spec in specs)
