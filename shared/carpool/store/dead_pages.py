"""Dead letters without their bodies, read in pages: for indexes of many of them (`dead_page.lua`).

Why: docs/decisions/0117.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from carpool.keys import Keys
from carpool.store.connection import Link, Script

_DEAD_PAGE: Final = Script("dead_page")
LETTERS_MAX: Final = 500  # of a page: Redis is busy for about 1 ms
BYTES_MAX: Final = 1 << 20  # that Redis copies for a page

LetterId = tuple[int, int]
"""The ID of a dead letter: when it was given up (ms, Redis's clock), and a number. Ordered as the stream."""

OLDEST: Final[LetterId] = (0, 0)  # less than that of any letter
NEWEST: Final[LetterId] = (1 << 64, 0)  # greater than that of any letter


class Letter(NamedTuple):
    """A dead letter without its body. The texts of a producer are cut to 400 bytes.

    `body_bytes`: None if the body is gone. `attempts`: how often a process ended while executing it.
    """

    id: LetterId
    body_bytes: int | None
    correlation_id: str
    content_type: str
    reason: str
    attempts: int

    @property
    def name(self) -> str:
        """Its ID as Redis and people write it."""
        return show_id(self.id)


class Range(NamedTuple):
    """The IDs between two others, which do not belong to it."""

    after: LetterId
    before: LetterId


class Page(NamedTuple):
    """The newest letters of a range, the newest first.

    `length`, `oldest`, `newest`: of the whole stream; both IDs are None if it is empty. `is_all`: the range
    has no others. `now_ms`: when it was read, by Redis's clock.
    """

    now_ms: int
    length: int
    oldest: LetterId | None
    newest: LetterId | None
    is_all: bool
    letters: list[Letter]


def show_id(letter_id: LetterId) -> str:
    """Such as 1795246747119-0."""
    return f"{letter_id[0]}-{letter_id[1]}"


def parse_id(text: str) -> LetterId:
    """The ID that a text is. Raises ValueError."""
    milliseconds, hyphen, number = text.partition("-")
    is_id = hyphen and milliseconds.isdecimal() and number.isdecimal() and len(text) <= 41 and text.isascii()
    if not is_id or max(int(milliseconds), int(number)) >> 64:
        raise ValueError(f"{text!r:.80} is no ID of a dead letter, such as 1795246747119-0")
    return int(milliseconds), int(number)


def read_page(link: Link, keys: Keys, of: Range, letters_max: int = LETTERS_MAX) -> Page:
    """The newest letters of a range. Raises LinkError and CommandError."""
    newest = "+" if of.before == NEWEST else f"({show_id(of.before)}"
    oldest = "-" if of.after == OLDEST else f"({show_id(of.after)}"
    reply = link.run(_DEAD_PAGE, [keys.dead], [newest, oldest, letters_max, BYTES_MAX])
    now_s, length, first, last, is_all, *found = reply
    return Page(
        int(now_s) * 1000,
        length,
        parse_id(first.decode()) if first else None,
        parse_id(last.decode()) if last else None,
        bool(is_all),
        [_letter(raw) for raw in found],
    )


def _letter(raw: list[bytes | int]) -> Letter:
    letter_id, size, *texts = raw
    correlation_id, content_type, reason, attempts = [_text(text) for text in texts]
    return Letter(
        id=parse_id(_text(letter_id)),
        body_bytes=int(size) if int(size) >= 0 else None,
        correlation_id=correlation_id,
        content_type=content_type,
        reason=reason,
        attempts=int(attempts) if attempts.isascii() and attempts.isdecimal() and len(attempts) <= 9 else 0,
    )


def _text(raw: bytes | int) -> str:
    return raw.decode("utf-8", "replace") if isinstance(raw, bytes) else str(raw)
