"""What the worker of a model that binds sequences sends beside the frames of `frames`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from carpool_worker.model_process.frames import FrameHeader

_END: Final = "end"


class End(NamedTuple):
    """Worker to process: these sequences have ended, however that was: their slots are free.

    The process never ends one by itself, because only the worker knows which results were written. Those
    that it does not know are ignored. There is no outcome.
    """

    sequence_ids: Sequence[str]

    def message(self) -> tuple[Any, ...]:
        """The header of the message, which has no payload."""
        return (_END, *self)


def read_worker_message(fields: Sequence[Any]) -> FrameHeader | End:
    """The message of which these are the header's fields."""
    return End(*fields[1:]) if fields[0] == _END else FrameHeader(*fields)
