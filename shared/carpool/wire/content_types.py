"""Content types of bodies.

Bodies of JSON and MSGPACK are values. Those of all other types are bytes, which reach the model unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from carpool.messages import CONTENT_TYPES, JSON, MSGPACK

ACCEPT: Final = "accept"  # the field of a request that names the content type of its result
_CHARS_MAX: Final = 127
_NAME: Final = r"[A-Za-z0-9!#$&^_.+-]+"
_MEDIA_TYPE: Final = re.compile(rf"{_NAME}/{_NAME}( *; *[^;\x00-\x1f\x7f]+)*")


@lru_cache(maxsize=256)
def canonical(content_type: str) -> str:
    """A content type in its usual form: one of CONTENT_TYPES without parameters, any other one unchanged.
    Empty if it is none. Waiting requests share the string."""
    if len(content_type) > _CHARS_MAX or not _MEDIA_TYPE.fullmatch(content_type):
        return ""
    essence = content_type.partition(";")[0].strip().lower()
    for known in CONTENT_TYPES:
        if essence == known:
            return known
    return content_type


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
