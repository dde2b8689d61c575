"""Which errors are the same: sentences that differ only in numbers and IDs.

Why: docs/decisions/0115.
"""

from __future__ import annotations

import re
from typing import Final

TEXT_CHARS_MAX: Final = 200  # of a group
_ID_CHARS_MIN: Final = 8  # shorter words with digits keep their letters: float32, gpu0
# A place in a program, whose line tells which error it is; or a word.
_WORD: Final = re.compile(r"[\w.-]*\w\.py:\d+|[A-Za-z0-9_-]+")
_NUMBERS: Final = re.compile(r"\d+")
_JOINED: Final = re.compile(r"#(?:[.,:/-]#)+")  # 1.5, 1,000, 12:30 and 17-0 are one number each
_HEX: Final = re.compile(r"(?:0[xX])?[0-9a-fA-F-]+")


def group_of(text: str) -> str:
    """The group of an error: its text, shortened, with `#` for each number and for each ID. Whoever shows it
    escapes it. O(TEXT_CHARS_MAX)."""
    shortened = text[: 2 * TEXT_CHARS_MAX]
    return _JOINED.sub("#", _WORD.sub(_without_numbers, shortened))[:TEXT_CHARS_MAX]


def _without_numbers(found: re.Match[str]) -> str:
    word = found[0]
    if ".py:" in word:
        return word
    numbers = len(_NUMBERS.findall(word))
    if len(word) >= _ID_CHARS_MIN and numbers and (numbers > 1 or _HEX.fullmatch(word)):
        return "#"
    return _NUMBERS.sub("#", word)
