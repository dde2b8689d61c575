"""The statistics of a model, from the hash in which `statistics.lua` counts.

Scripts count each result with its batch, so that all processes read the same numbers, and none is lost or
counted twice when one dies.

Why: docs/decisions/0093.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

SIZES_COUNTED_MAX = 128  # batches of more requests are counted by the next power of two


class Durations(NamedTuple):
    """How often something was done, and how long that took together."""

    number: int = 0
    total_us: int = 0


class BatchStatistics(NamedTuple):
    """Batches in which `size` requests succeeded, or, if that is above SIZES_COUNTED_MAX, at most so many and
    more than half as many. `requests`: those of all of these batches. The times of batches are added up:
    before, in and after the model."""

    size: int
    batches: int
    requests: int
    input_us: int
    infer_us: int
    output_us: int

    def weighted_us(self, batches_us: int) -> int:
        """A time of these batches, counted for each of their requests."""
        return batches_us * self.requests // self.batches if self.batches else 0


class ModelStatistics(NamedTuple):
    """What became of the requests of a model. `success` and `fail`: from arrival to the result. `queue`: the
    time of those that succeeded in the queue. `last_us`: when the last one succeeded, since 1970, or 0.
    `first_chunks`, `later_chunks`: of streams that ended, from arrival to the first chunk, and from there to
    the last one."""

    success: Durations = Durations()
    fail: Durations = Durations()
    queue: Durations = Durations()
    last_us: int = 0
    batches: Sequence[BatchStatistics] = ()
    first_chunks: Durations = Durations()
    later_chunks: Durations = Durations()

    @classmethod
    def of(cls, fields: Mapping[str, str]) -> Self:
        """From the fields of the hash. What is missing, or no number, is 0."""

        def number(field: str) -> int:
            text = fields.get(field, "")
            return int(text) if text.isascii() and text.isdigit() else 0

        succeeded, streams = number("success"), number("streams")
        sizes = sorted(
            int(size) for kind, _, size in (field.partition(":") for field in fields)
            if kind == "batches" and size.isascii() and size.isdigit()
        )  # fmt: skip
        return cls(
            Durations(succeeded, number("success_us")),
            Durations(number("fail"), number("fail_us")),
            Durations(succeeded, number("queue_us")),
            number("last_us"),
            [
                BatchStatistics(
                    size,
                    batches := number(f"batches:{size}"),
                    number(f"requests:{size}") if size > SIZES_COUNTED_MAX else size * batches,
                    number(f"input_us:{size}"),
                    number(f"infer_us:{size}"),
                    number(f"output_us:{size}"),
                )
                for size in sizes
            ],
            Durations(streams, number("first_us")),
            Durations(max(0, number("chunks") - streams), number("later_us")),
        )

    @property
    def executions(self) -> int:
        """Batches in which a request succeeded."""
        return sum(of_size.batches for of_size in self.batches)
