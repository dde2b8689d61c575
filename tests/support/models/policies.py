"""Batching policies of a user's own."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.messages import Request


class Pairs:
    """Two ride together at most; who says `raise` is raised at."""

    def initialise(self) -> list[Request]:
        return []

    def include(self, batch: list[Request], request: Request) -> bool:
        if request.extra and "raise" in request.extra:
            raise RuntimeError("told to")
        batch.append(request)
        return len(batch) <= 2

    def finalise(self, batch: list[Request], requests: Sequence[Request]) -> None:
        assert batch[: len(requests)] == list(requests)
