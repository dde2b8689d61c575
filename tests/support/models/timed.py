"""Models whose execution time is set by their requests."""

from __future__ import annotations

import time


class Sleeper:
    """Sleeps for the number of seconds in the body, one request at a time."""

    max_batch_size = 1

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(sum(batch))
        return batch


class SlowBatches:
    """Takes half a second for a batch of any size."""

    max_batch_size = 16
    seconds = 0.5

    def predict(self, batch: list[object]) -> list[object]:
        time.sleep(self.seconds)
        return batch


class GilHolder:
    """Holds the GIL for the number of seconds in the body: the switch interval is a minute."""

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
    """Sleeps for the largest number in the batch, in seconds; results keep the order of arrival."""

    max_batch_size = 4
    preserve_ordering = True

    def predict(self, batch: list[float]) -> list[float]:
        time.sleep(max(batch))
        return batch
