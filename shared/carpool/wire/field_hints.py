"""Fields and content types of a request that look misspelt, and the sentences that its result has about them.

Only requests with fields that Carpool does not define, or whose body is not decoded, are looked at, and each
name only once. Producers choose the names, so to look at one must cost little: 3 us; difflib takes 15. Two
names are similar if they are equal once a letter of each is left out: one that is wrong, missing, too much
or transposed.

Why: docs/decisions/0070.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Final

from carpool.messages.requests import CONTENT_TYPES
from carpool.wire.content_types import ACCEPT, accepted
from carpool.wire.request_fields import (
    COLUMN_FIELDS,
    PASSED_ON_FIELDS,
    PRODUCER_FIELDS,
    STORED_BODY_FIELDS,
)

NAMES_LOOKED_AT_MAX: Final = 8  # of a request
_NAME_CHARS_MAX: Final = 40
_SIMILAR_CHARS_MIN: Final = 5  # shorter names with a letter that is missing or too much are not similar, and
_WRONG_CHARS_MIN: Final = 8  # shorter ones with one that is wrong or transposed
_KIND_SIMILARITY_MIN: Final = 0.86  # a letter that is wrong, missing or transposed is above this
_SUBTYPE_SIMILARITY_MIN: Final = 0.75  # "messagepack" is above this, and "ld+json" below


def _normalised(name: str) -> str:
    """A name without its style: correlation_id, correlationId and Correlation-ID become equal."""
    return name.replace("_", "").replace("-", "").lower()


_KNOWN: Final = {
    _normalised(name): name
    for name in sorted(PRODUCER_FIELDS | COLUMN_FIELDS | STORED_BODY_FIELDS | PASSED_ON_FIELDS)
}
# Names that other queues and RPC systems have for a field.
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("deadline", "deadlinems", "timeout", "timeoutms", "ttl", "ttlms", "expires"), "expiration"
    ),
    **dict.fromkeys(("sequenceidx", "sequenceno", "sequencenumber", "sequencenr"), "sequence_index"),
}
# These are looked for only where there is no body: a model may have fields of these names.
_BODY_ELSEWHERE: Final = frozenset(
    ("payload", "data", "input", "inputs", "message", "value", "content", "params", "args")
)
_KINDS: Final = ("application", "text")
_SUBTYPES: Final = {known.partition("/")[2]: known for known in CONTENT_TYPES}


def warnings_of(extra: Mapping[str, bytes] | None, content_type: str) -> tuple[str, ...]:
    """The warnings about a request with these fields for its model."""
    if not extra:
        return () if content_type in CONTENT_TYPES else tuple(_type_hints("content_type", content_type))
    return (
        *field_warnings(extra),
        *_type_hints("content_type", content_type),
        *_type_hints(ACCEPT, accepted(extra)),
    )


def field_warnings(names: Iterable[str]) -> tuple[str, ...]:
    """A sentence for each of these names that is not one of the protocol's, but looks like one."""
    hints = (
        f"{name!r} is not a field that Carpool knows: did you mean {meant!r}?"
        for name in islice(names, NAMES_LOOKED_AT_MAX)
        if name not in PASSED_ON_FIELDS and (meant := meant_field(name)) not in ("", name)
    )
    return tuple(hints)


def _type_hints(field: str, content_type: str) -> Iterator[str]:
    """A sentence, if this is no type whose bodies are decoded, but looks like one."""
    if content_type not in CONTENT_TYPES and (meant := meant_type(content_type)):
        yield f"{field} {content_type!r} means plain bytes to Carpool: did you mean {meant!r}?"


@lru_cache(maxsize=1024)
def meant_field(name: str) -> str:
    """The field of the protocol that was probably meant by another name; empty if there is none."""
    if len(name) > _NAME_CHARS_MAX:
        return ""
    written = _normalised(name)
    if written in _ELSEWHERE:
        return _ELSEWHERE[written]
    if written in _KNOWN:
        return _KNOWN[written]
    for shorter in (written, *_shorter(written)):
        for known in _SHORTER.get(shorter, ()):
            longer = max(len(known), len(written))
            is_wrong = len(known) == len(written)
            if known[0] == written[0] and longer >= (_WRONG_CHARS_MIN if is_wrong else _SIMILAR_CHARS_MIN):
                return _KNOWN[known]
    return ""


def _shorter(name: str) -> Iterator[str]:
    """The name without each of its letters in turn."""
    return (name[:at] + name[at + 1 :] for at in range(len(name)))


def _by_shorter(names: Iterable[str]) -> dict[str, list[str]]:
    """These names by themselves, and by what they are without a letter."""
    by_shorter: dict[str, list[str]] = {}
    for name in names:
        for shorter in dict.fromkeys((name, *_shorter(name))):
            by_shorter.setdefault(shorter, []).append(name)
    return by_shorter


_SHORTER: Final = _by_shorter(_KNOWN)
_BODY_SHORTER: Final = frozenset(_by_shorter(["body"]))


def meant_body(names: Iterable[str]) -> str:
    """Which of the names of a request without a body was probably meant to be it; empty if none."""
    written = {_normalised(name): name for name in islice(names, NAMES_LOOKED_AT_MAX)}
    closest = [name for name in written if not _BODY_SHORTER.isdisjoint((name, *_shorter(name)))]
    return next((written[name] for name in [*closest, *sorted(_BODY_ELSEWHERE & written.keys())]), "")


@lru_cache(maxsize=256)
def meant_type(content_type: str) -> str:
    """The content type that was probably meant by another one; empty if there is none."""
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    name = subtype.removeprefix("x-").removeprefix("vnd.")
    if not difflib.get_close_matches(kind, _KINDS, n=1, cutoff=_KIND_SIMILARITY_MIN):
        return ""
    for known, meant in _SUBTYPES.items():
        is_longer = name.startswith(known) and name != known  # jsonl and json-seq are types of their own
        similarity = difflib.SequenceMatcher(None, name, known).ratio()
        if similarity >= _SUBTYPE_SIMILARITY_MIN and not is_longer:
            return meant
    return ""
