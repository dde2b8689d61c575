"""The statistics of a model, from the hash in which `statistics.lua` counts.

Scripts count each result with its batch, so that all processes read the same numbers, and none is lost or
counted twice when one dies.

Why: docs/decisions/0093.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Final, NamedTuple, Self


class Durations(NamedTuple):
    """How often something was done, and how long that took together."""

    number: int = 0
    total_us: int = 0


class BatchStatistics(NamedTuple):
    """Batches in which `size` requests succeeded. Above 128 it is the upper end of a range,
    which begins above half of it.

    `requests`: all of these requests, whose times from arrival to result, and in the queue, are added up; and
    so are those of the batches before, in and after the model. `last_us`: when the last one was settled.
    """

    size: int
    batches: int
    requests: int
    total_us: int
    queue_us: int
    input_us: int
    infer_us: int
    output_us: int
    last_us: int

    def weighted_us(self, batches_us: int) -> int:
        """A time of these batches, counted for each of their requests."""
        return batches_us * self.requests // self.batches if self.batches else 0


_NUMBERS: Final = struct.Struct(f"<{len(BatchStatistics._fields) - 1}d")
_SIZE: Final = re.compile(r"batches:([1-9][0-9]{0,8})")


class ModelStatistics(NamedTuple):
    """What became of the requests of a model. `fail`: from arrival to an error. `first_chunks`,
    `later_chunks`: of streams that ended, from arrival to the first chunk, and from there to the last one."""

    fail: Durations = Durations()
    batches: Sequence[BatchStatistics] = ()
    first_chunks: Durations = Durations()
    later_chunks: Durations = Durations()

    @classmethod
    def of(cls, fields: Mapping[str, bytes]) -> Self:
        """From the fields of the hash. What is missing there, or cannot be read, is 0."""

        def number(field: str) -> int:
            value = fields.get(field, b"")
            return int(value) if value.isdigit() else 0

        streams = number("streams")
        return cls(
            Durations(number("fail"), number("fail_us")),
            sorted(filter(None, (_of_size(field, value) for field, value in fields.items()))),
            Durations(streams, number("first_us")),
            Durations(max(0, number("chunks") - streams), number("later_us")),
        )

    @property
    def success(self) -> Durations:
        """The requests that succeeded: from arrival to result."""
        return Durations(self.requests, sum(of_size.total_us for of_size in self.batches))

    @property
    def queue(self) -> Durations:
        """Their time in the queue."""
        return Durations(self.requests, sum(of_size.queue_us for of_size in self.batches))

    @property
    def requests(self) -> int:
        """How many succeeded."""
        return sum(of_size.requests for of_size in self.batches)

    @property
    def executions(self) -> int:
        """Batches in which a request succeeded."""
        return sum(of_size.batches for of_size in self.batches)

    @property
    def last_us(self) -> int:
        """When the last request succeeded, since 1970; 0 if none did."""
        return max((of_size.last_us for of_size in self.batches), default=0)


def _of_size(field: str, value: bytes) -> BatchStatistics | None:
    """The batches that a field counts; None if it is no such field."""
    size = _SIZE.fullmatch(field)
    if size is None or len(value) != _NUMBERS.size:
        return None
    numbers = _NUMBERS.unpack(value)
    return BatchStatistics(int(size[1]), *map(int, numbers)) if all(map(isfinite, numbers)) else None
