"""User-defined batching policies, and a model that declares one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from carpool.messages.requests import Request


class Pairs:
    """At most two requests in a batch; raises for a request with the field `raise`."""

    def initialise(self) -> list[Request]:
        return []

    def include(self, batch: list[Request], request: Request) -> bool:
        if request.extra and "raise" in request.extra:
            raise RuntimeError("raise was requested")
        batch.append(request)
        return len(batch) <= 2

    def finalise(self, batch: list[Request], requests: Sequence[Request]) -> None:
        assert batch[: len(requests)] == list(requests)


class Fickle:
    """Has a constructor that raises while the file exists which the environment names."""

    def __init__(self) -> None:
        if Path(os.environ["FICKLE_FILE"]).exists():
            raise RuntimeError("the file exists")

    def include(self, batch: object, request: Request) -> bool:
        return True


class Declaring:
    """A model that declares a policy."""

    policy = "policies.py:Pairs"

    def predict(self, batch: list[object]) -> list[object]:
        return batch
