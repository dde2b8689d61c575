"""Fields of a request that look like misspelt ones of the protocol, and the sentence that its result has.

Only requests with fields that Carpool does not define are looked at, and each name only once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import lru_cache
from itertools import islice
from typing import Final

from carpool.wire.request_fields import (
    COLUMN_FIELDS,
    PASSED_ON_FIELDS,
    PRODUCER_FIELDS,
    STORED_BODY_FIELDS,
)

NAMES_LOOKED_AT_MAX: Final = 8  # of a request
_NAME_CHARS_MAX: Final = 40
_LENGTHS_DIFFER_MAX: Final = 2
_SIMILARITY_MIN: Final = 0.86  # a letter that is wrong, missing or transposed is above this


def _normalised(name: str) -> str:
    """A name without its style: correlation_id, correlationId and Correlation-ID become equal."""
    return name.replace("_", "").replace("-", "").lower()


_KNOWN: Final = {
    _normalised(name): name
    for name in sorted(PRODUCER_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS | PASSED_ON_FIELDS)
}


def warnings_of(names: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each of these names that is not one of the protocol's, but looks like one."""
    hints = (
        f"{name!r} is not a field that Carpool knows: did you mean {meant!r}?"
        for name in islice(names, NAMES_LOOKED_AT_MAX)
        if name not in PASSED_ON_FIELDS and (meant := meant_field(name))
    )
    return tuple(hints)


@lru_cache(maxsize=1024)
def meant_field(name: str) -> str:
    """The field of the protocol that was probably meant by another name; empty if there is none."""
    if len(name) > _NAME_CHARS_MAX:
        return ""
    written = _normalised(name)
    similar = [
        known
        for known in _KNOWN
        if known[:1] == written[:1] and abs(len(known) - len(written)) <= _LENGTHS_DIFFER_MAX
    ]
    closest = difflib.get_close_matches(written, similar, n=1, cutoff=_SIMILARITY_MIN)
    return _KNOWN[closest[0]] if closest else ""
