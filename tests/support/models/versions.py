"""Versions of a model, which answer with the version and the body."""

from __future__ import annotations

import time
from typing import Any, Final

HELD_S: Final = 60.0


class V1:
    """It does not return from a batch with the body "hold"."""

    version = "1"
    max_batch_size = 4

    def predict(self, batch: list[Any]) -> list[str]:
        if "hold" in batch:
            time.sleep(HELD_S)
        time.sleep(0.002)
        return [f"{self.version}:{body}" for body in batch]


class V2(V1):
    max_batch_size = 64

    def load(self, _device: str) -> None:
        self.version = "2"  # known only once it is loaded

    def predict(self, batch: list[Any]) -> list[str]:
        time.sleep(0.002)
        return [f"{self.version}:{body}" for body in batch]


class V3(V1):
    """It alone holds what says so."""

    version = "3"

    def predict(self, batch: list[Any]) -> list[str]:
        if "hold 3" in batch:
            time.sleep(HELD_S)
        time.sleep(0.002)
        return [f"{self.version}:{body}" for body in batch]
