"""The fields that make requests parts of a sequence, and where these stand in the request stream.

Requests that share such fields may come as one run, so they are divided: each is a run of its own.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Final

from carpool.errors import CarpoolError, InvalidArgumentError
from carpool.keys import CORRELATION_ID
from carpool.messages.requests import Entry, Run, SequencePart, SequencesEnd, Withdrawal
from carpool.messages.results import Refusal
from carpool.wire.request_fields import (
    MAX_NAMES,
    MAX_NAMES_BYTES,
    SEQUENCE_FIELDS,
    Fields,
    read_integer,
    read_name,
)

MAX_INDEX: Final = 1 << 53
PIECE_ITEMS: Final = 512  # of an entry, each of which takes about 4 us

Decoded = Run | Refusal | Withdrawal | SequencesEnd  # what an entry has

_PLACE: Final = re.compile(r"[0-9]{20}-[0-9]{20}:[0-9]{5}")


def read_sequence(raw: Fields) -> SequencePart | None:
    """What makes a request a part of a sequence; None if it is none. `place` is what was put back, or ''."""
    if SEQUENCE_FIELDS.isdisjoint(raw):
        return None
    sequence_id = read_name(raw, "sequence_id", None)
    if sequence_id is None:
        raise InvalidArgumentError("sequence_id: missing; the other fields of sequences need it")
    starts = read_integer(raw, "sequence_start", 0, 0, 1) == 1
    ends = read_integer(raw, "sequence_end", 0, 0, 1) == 1
    index = read_integer(raw, "sequence_index", 0, 0, MAX_INDEX) if "sequence_index" in raw else None
    if index is not None and starts != (index == 0):
        raise InvalidArgumentError("sequence_index: must be 0 with sequence_start, and only there")
    return SequencePart(sequence_id, starts, ends, index, _read_place(raw))


def read_valid_sequence(raw: Fields) -> SequencePart | None:
    """As `read_sequence`, but returns None where the fields are invalid."""
    try:
        return read_sequence(raw)
    except CarpoolError:
        return None


def _read_place(raw: Fields) -> str:
    place = raw.get("sequence_place", "")
    return place if type(place) is str and _PLACE.fullmatch(place) else ""


def sequence_fields(part: SequencePart) -> Fields:
    """The fields of a request that is put back."""
    fields: Fields = {"sequence_id": part.sequence_id, "sequence_place": part.place}
    if part.starts:
        fields["sequence_start"] = 1
    if part.ends:
        fields["sequence_end"] = 1
    if part.index is not None:
        fields["sequence_index"] = part.index
    return fields


def read_end_sequences(entry: Entry, names: bytes) -> SequencesEnd:
    """The sequences that a producer ends by force. Names that are none are left out."""
    ids = dict.fromkeys(name for name in split_names(names) if CORRELATION_ID.fullmatch(name))
    return SequencesEnd(entry, list(ids), SequencePart.place_of(entry.id, 0))


def split_names(names: bytes) -> list[str]:
    """Names separated by spaces. Of too many the first ones."""
    if len(names) > MAX_NAMES_BYTES:  # drop the last name: what is left of it may be another name
        names = names[:MAX_NAMES_BYTES].rpartition(b" ")[0]
    return names.decode("ascii", "replace").split(maxsplit=MAX_NAMES)[:MAX_NAMES]


# --- places ------------------------------------------------------------------------------------------------


def has_sequences(decoded: Sequence[Decoded]) -> bool:
    """Whether one of these is part of a sequence."""
    for item in decoded:
        if type(item) is Run:
            if item.sequence is not None:
                return True
        elif type(item) is Refusal and item.breaks is not None:
            return True
    return False


def divide_sequences(
    decoded: Sequence[Decoded], *, were_put_back: bool
) -> Generator[None, None, list[Decoded]]:
    """Make each request of a sequence a run of its own, with its place. One that was put back keeps its
    place. In pieces of PIECE_ITEMS."""
    divided: list[Decoded] = []
    position = 0
    for number, item in enumerate(decoded, 1):
        position += place_in_sequence(item, position, divided, were_put_back=were_put_back)
        if not number % PIECE_ITEMS:
            yield
    return divided


def place_in_sequence(item: Decoded, position: int, divided: list[Decoded], *, were_put_back: bool) -> int:
    """Add a run or refusal, whose first request is at this position of its entry, to `divided`. Returns its
    number of requests."""
    if type(item) is Refusal:
        part = item.breaks and _placed(item.breaks, item.entry, position, were_put_back)
        divided.append(item._replace(breaks=part))
        return len(item.correlation_ids)
    if type(item) is not Run:
        divided.append(item)
        return 0
    if item.sequence is None:
        divided.append(item)
        return len(item)
    size = len(item)
    for at, run in enumerate(item.divide(1) if size > 1 else [item], position):
        run.sequence = _placed(item.sequence, item.entry, at, were_put_back)
        divided.append(run)
    return size


def _placed(part: SequencePart, entry: Entry, position: int, was_put_back: bool) -> SequencePart:
    here = SequencePart.place_of(entry.id, position)
    is_earlier = was_put_back and "" < part.place < here
    return part if is_earlier else part._replace(place=here)
