"""What tests of an application import: `LocalClient` and `LocalAsyncClient`.

with LocalClient({"shout": shout}) as client:
    assert client.infer("shout", "hello") == "HELLO"

They are made of parts of the batcher and of the worker, which nothing here may import: so they are found by
name, when they are first used.

Why: docs/decisions/0102.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from carpool_testing.clients import LocalAsyncClient, LocalClient

__all__ = ["LocalAsyncClient", "LocalClient"]

_CLIENTS: Final = "carpool_testing.clients"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'carpool.testing' has no attribute {name!r}")
    return getattr(importlib.import_module(_CLIENTS), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
