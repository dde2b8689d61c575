"""How a registered model executes requests. Apart from `registration`, because a batcher has no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from carpool.model_settings import ModelKind

_KINDS: Final = (ModelKind.STEPPING, ModelKind.STATEFUL, ModelKind.BOUND)  # each with a field of its name


def kind_fields(kind: ModelKind) -> dict[str, str]:
    """The fields of a registration that say it."""
    return {str(name): str(kind is name).lower() for name in _KINDS}


def kind_of(registration: Mapping[str, str]) -> ModelKind:
    """How a registered model executes requests."""
    return next((kind for kind in _KINDS if registration.get(kind) == "true"), ModelKind.PLAIN)
