"""Sequences: what results change in them, and what Redis keeps."""

from __future__ import annotations

from typing import Literal, NamedTuple

from carpool.messages.requests import SequencePart

SequenceOutcome = Literal["kept", "ended", "broken"]


class SequenceChange(NamedTuple):
    """What the result of a request does to its sequence. The script that writes the result carries it out.

    `outcome`: with an OK result, the sequence is kept with a new state, or has ended, if this was its last
    request. With any other result it is broken: later requests are ABORTED, until one starts it anew.
    `content`: the state of a sequence that is kept; why one is broken.
    """

    part: SequencePart
    correlation_id: str
    outcome: SequenceOutcome
    content: bytes | str = b""


class SlotFreed(NamedTuple):
    """A sequence of a bound model has no slot any more, and its process may not know."""

    process: str
    sequence_id: str


class KeptSequence(NamedTuple):
    """What Redis keeps of a sequence, without its state. `process`: of a bound model, the one that has it.

    `next_index`: how many of its requests succeeded; None if it has no state. `first_id` and `last_id`: the
    correlation IDs of the first and the last of these. `broken` says why requests later than `broken_at` are
    not served; empty if they are. `failed_at`: the first place at which it was broken, if that is another;
    what stands between the two is served from the next start on.
    """

    sequence_id: str
    changed_us: int
    next_index: int | None
    first_id: str = ""
    last_id: str = ""
    broken: str = ""
    broken_at: str = ""
    failed_at: str = ""
    process: str = ""
