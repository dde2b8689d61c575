"""Content types of bodies.

Bodies of JSON and MSGPACK are values. Those of all other types are bytes, which reach the model unchanged.
Texts that Carpool reads and writes are UTF-8, so a JSON of another charset is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from carpool.errors import InvalidArgumentError
from carpool.messages.requests import CONTENT_TYPES, JSON, MSGPACK

ACCEPT: Final = "accept"  # the field of a request that names the content type of its result
_CHARS_MAX: Final = 127
_NAME: Final = r"[A-Za-z0-9!#$&^_.+-]+"
_MEDIA_TYPE: Final = re.compile(rf"{_NAME}/{_NAME}( *; *[^;\x00-\x1f\x7f]+)*")
_CHARSET: Final = re.compile(r"; *charset *= *\"?([^\"; ]*)", re.IGNORECASE)
_UTF_8: Final = frozenset({"utf-8", "utf8"})


@lru_cache(maxsize=256)
def canonical(content_type: str) -> str:
    """A content type in its usual form: one of CONTENT_TYPES without parameters, any other one unchanged.
    Empty if it is none, or JSON of another charset than UTF-8. Waiting requests share the string."""
    if len(content_type) > _CHARS_MAX or not _MEDIA_TYPE.fullmatch(content_type):
        return ""
    essence = _essence(content_type)
    for known in CONTENT_TYPES:
        if essence == known:
            return "" if known == JSON and other_charset(content_type) else known
    return content_type


def _essence(content_type: str) -> str:
    """The type without its parameters, in small letters."""
    return content_type.partition(";")[0].strip().lower()


def other_charset(content_type: str) -> str:
    """The charset that a content type names, if it is another than UTF-8; else empty."""
    named = (charset for charset in _CHARSET.findall(content_type) if charset.lower() not in _UTF_8)
    return next(named, "")


def checked(field: str, content_type: str) -> str:
    """The canonical form of what is in this field. Raises InvalidArgumentError if it cannot be used."""
    if usual := canonical(content_type):
        return usual
    charset = other_charset(content_type) if _essence(content_type) == JSON else ""
    if charset:
        raise InvalidArgumentError(
            f"{field}: {content_type!r:.60} names charset {charset:.40}, but JSON is UTF-8"
        )
    raise InvalidArgumentError(
        f"{field}: {content_type!r:.60} is no content type, such as {JSON} or image/png"
    )


def answer_type(content_type: str, extra: Mapping[str, bytes] | None) -> str:
    """The content type of an answer without a result: whether it is JSON decides the form of its envelope."""
    return accepted(extra) or content_type


def is_value(content_type: str) -> bool:
    """Whether bodies of this type are decoded; else they are bytes."""
    return content_type in (JSON, MSGPACK)


def accepted(extra: Mapping[str, bytes] | None) -> str:
    """The content type that a request wants of its result, from its fields for the model; empty: none."""
    if extra is None or ACCEPT not in extra:
        return ""
    return canonical(extra[ACCEPT].decode("ascii", "replace"))
