"""Carpool: dynamic batching for models, over Redis streams. Producers need only `Client` or `AsyncClient`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from carpool.client import AsyncClient, Client, Reply
    from carpool.errors import CarpoolError, Unhealthy, UnknownOutcomeError
    from carpool.wire.tensors import StateSpec, TensorSpec

__all__ = [
    "AsyncClient",
    "CarpoolError",
    "Client",
    "Reply",
    "StateSpec",
    "TensorSpec",
    "Unhealthy",
    "UnknownOutcomeError",
]

# Imported on first use: a model process must not pay for a Redis client that it never needs.
_MODULES: Final = {
    "AsyncClient": "carpool.client",
    "Client": "carpool.client",
    "Reply": "carpool.client",
    "CarpoolError": "carpool.errors",
    "Unhealthy": "carpool.errors",
    "UnknownOutcomeError": "carpool.errors",
    "StateSpec": "carpool.wire.tensors",
    "TensorSpec": "carpool.wire.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'carpool' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
