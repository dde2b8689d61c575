"""User-defined batching policies."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.messages import Request


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
