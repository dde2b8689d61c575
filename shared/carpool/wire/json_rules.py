"""What every JSON text here must keep to, beside JSON itself: all that read it read the same value.

A name is in a map once, a number is within FP64, a whole number has as many digits as Python reads, and a
text can be written as UTF-8.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from typing import Any, Final

MAX_DEPTH: Final = 64
TOO_MANY_DIGITS: Final = f"a whole number has more than {sys.get_int_max_str_digits()} digits"
LONE_SURROGATE: Final = "has a text with a lone surrogate, which UTF-8 cannot encode"
_ENCODER: Final = json.JSONEncoder(ensure_ascii=False)
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


class UnclearError(ValueError):
    """What is written can be read, but not everybody would read the same value."""


def with_unique_names(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map, whose names must differ: of two values with one name, nobody knows which is meant. Raises
    UnclearError."""
    named = dict(pairs)
    if len(named) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise UnclearError(f"the name {twice!r:.60} is in a map more than once")
    return named


def finite(digits: str) -> float:
    """A number that FP64 can hold. Raises UnclearError."""
    number = float(digits)
    if math.isinf(number):
        raise UnclearError(f"the number {digits:.40} is outside the range of FP64")
    return number


def has_lone_surrogate(text: bytes, value: Any) -> bool:
    """Whether the value of a JSON text has a text that UTF-8 cannot encode. Only an escape can write one.
    Raises RecursionError, also for a value that was decoded without one."""
    if b"\\" not in text or _SURROGATE.search(text) is None:
        return False
    try:
        _ENCODER.encode(value).encode()
    except UnicodeEncodeError:
        return True
    return False
