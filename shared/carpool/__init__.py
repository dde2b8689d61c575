"""Carpool: dynamic batching for models, over Redis streams. Producers need only `Client` or `AsyncClient`.

A model needs the errors, which `carpool.errors` describes, and the specifications of its tensors and states.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from carpool import errors
from carpool.errors import (
    AbortedError,
    CancelledRequestError,
    CarpoolError,
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    Unhealthy,
    UnimplementedError,
    UnknownOutcomeError,
)

if TYPE_CHECKING:
    from carpool.client import AsyncClient, AsyncRequestClient, Client, Reply, RequestClient
    from carpool.stop_texts import StopTexts
    from carpool.wire.tensors import StateSpec, TensorSpec

__all__ = [
    "AbortedError",
    "AsyncClient",
    "AsyncRequestClient",
    "CancelledRequestError",
    "CarpoolError",
    "Client",
    "DeadlineExceededError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "PermissionDeniedError",
    "Reply",
    "RequestClient",
    "ResourceExhaustedError",
    "StateSpec",
    "StopTexts",
    "TensorSpec",
    "UnavailableError",
    "Unhealthy",
    "UnimplementedError",
    "UnknownOutcomeError",
    "errors",
]

# Imported on first use: a model process must not pay for a Redis client that it never needs.
_MODULES: Final = {
    "AsyncClient": "carpool.client",
    "AsyncRequestClient": "carpool.client",
    "Client": "carpool.client",
    "Reply": "carpool.client",
    "RequestClient": "carpool.client",
    "StateSpec": "carpool.wire.tensors",
    "StopTexts": "carpool.stop_texts",
    "TensorSpec": "carpool.wire.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'carpool' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
