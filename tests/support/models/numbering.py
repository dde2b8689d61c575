"""A model that counts the requests which it executes."""

from __future__ import annotations

from typing import Any


class Numbering:
    """A result is how many requests were executed before, and with, this one."""

    max_batch_size = 8

    def __init__(self) -> None:
        self._executed = 0

    def predict(self, batch: list[Any]) -> list[Any]:
        return [self._next(body) for body in batch]

    def _next(self, body: Any) -> Any:
        self._executed += 1
        return ValueError("as wanted") if body == "raise" else self._executed
