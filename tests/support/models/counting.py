"""A model that answers each request with the number of requests that were executed together."""

from __future__ import annotations


class Counting:
    """Refuses "refuse", and raises on a batch that has "raise"."""

    max_batch_size = 16

    def validate(self, body: str) -> None:
        if body == "refuse":
            raise ValueError("refused")

    def predict(self, batch: list[str]) -> list[int]:
        if "raise" in batch:
            raise RuntimeError("raised")
        return [len(batch)] * len(batch)
