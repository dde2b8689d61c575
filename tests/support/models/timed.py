"""Models that take as long as their requests ask for."""

from __future__ import annotations

import time


class Sleeper:
    """Sleeps for as many seconds as the body says: one request at a time."""

    max_batch_size = 1

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(sum(batch))
        return batch


class SlowBatches:
    """Half a second a batch, whatever is in it."""

    max_batch_size = 16
    seconds = 0.5

    def predict(self, batch: list[object]) -> list[object]:
        time.sleep(self.seconds)
        return batch


class GilHolder:
    """Computes in pure Python for as many seconds as the body says, and lets no other thread of its process
    run: the interpreter is told to switch threads once a minute."""

    max_batch_size = 1

    def load(self, _device: str) -> None:
        import sys

        sys.setswitchinterval(60)

    def predict(self, batch: list[float]) -> list[float]:
        until_s = time.monotonic() + sum(batch)
        while time.monotonic() < until_s:
            pass
        return batch


class InOrder:
    """Sleeps for as long as the longest body says, and gives results in the order of arrival."""

    max_batch_size = 4
    preserve_ordering = True

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(max(batch))
        return batch
