"""Carpool: requests share the ride. See README.md; a producer needs only `Client` or `AsyncClient`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from carpool.client import AsyncClient, Client, Reply
    from carpool.errors import CarpoolError
    from carpool.wire.tensors import TensorSpec

__all__ = ["AsyncClient", "CarpoolError", "Client", "Reply", "TensorSpec"]

# Found when first used: a model process must not pay for a Redis client that it never talks to.
_HOMES: Final = {
    "AsyncClient": "carpool.client",
    "Client": "carpool.client",
    "Reply": "carpool.client",
    "CarpoolError": "carpool.errors",
    "TensorSpec": "carpool.wire.tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'carpool' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
