"""Models that tell what a body costs: the length of a text. Their results say what was executed together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from carpool.errors import NotFoundError


def cost(body: Any) -> Any:
    """Of "raise" and "refuse" it raises, and of "wrong" it is none."""
    if body == "raise":
        raise KeyError("no such word")
    if body == "refuse":
        raise NotFoundError("there is none")
    return "much" if body == "wrong" else len(body)


class Texts:
    """The texts that one call got."""

    max_batch_size = 64
    max_batch_cost = 100
    max_queue_delay_ms = 10_000  # so that a test decides what is dispatched together
    preferred_batch_sizes: tuple[int, ...] = (4, 6)

    def cost(self, body: str) -> Any:
        return cost(body)

    def predict(self, batch: list[str]) -> list[dict[str, list[int]]]:
        return [{"together": [len(text) for text in batch]}] * len(batch)


class Learned(Texts):
    preferred_batch_sizes = (4,)


class Prompts:
    """Each text is begun, and ends with its first step: the costs of those that were begun together."""

    max_batch_size = 8
    max_prefill_cost = 100

    def cost(self, body: str) -> Any:
        return cost(body)

    def begin(self, requests: Sequence[Any]) -> None:
        together = [request.cost for request in requests]
        for request in requests:
            request.state = together

    def step(self, requests: Sequence[Any]) -> None:
        for request in requests:
            request.finish(request.state)
