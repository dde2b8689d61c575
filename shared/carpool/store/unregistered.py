"""What Redis has of models that nobody registered. Only a look at the names of all keys finds it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

from carpool.keys import MODEL_NAME
from carpool.store.connection import Argument, CommandError, Link

_SCANNED: Final = 1000  # keys that one SCAN looks at
LOOK_S_MAX: Final = 1.0
_IN_BRACES: Final = re.compile(r"\{(.*)\}")


class Unserved(NamedTuple):
    """A request stream that no batcher reads. `model`: the name in its key. `has_braces`: whether that is in
    braces, as it must be."""

    key: str
    model: str
    has_braces: bool


class Unregistered(NamedTuple):
    """Models that workers are loading for the first time, and request streams that no batcher reads."""

    loading: list[str]
    unserved: list[Unserved]


def find_unregistered(link: Link, prefix: str, registered: list[str]) -> Unregistered:
    """Look for up to a second. Nothing is found by a user who may not see the names of all keys."""
    loading: list[str] = []
    unserved: list[Unserved] = []
    for key in sorted(_names(link, prefix)):
        name, _, kind = key.removeprefix(f"{prefix}:").rpartition(":")
        braces = _IN_BRACES.fullmatch(name)
        model = braces[1] if braces else name
        if model in registered and braces:
            continue
        if kind == "loading" and braces:
            loading.append(model)
        elif kind == "requests" and MODEL_NAME.fullmatch(model):
            unserved.append(Unserved(key, model, bool(braces)))
    unserved = [stream for stream in unserved if not (stream.has_braces and stream.model in loading)]
    return Unregistered(loading, unserved)


def _names(link: Link, prefix: str) -> Iterator[str]:
    """The names of keys of the kinds that are looked for."""
    pattern = re.sub(r"([*?\[\]\\])", r"\\\1", prefix)
    end_s, cursor = time.monotonic() + LOOK_S_MAX, b"0"
    found: set[bytes] = set()
    while True:
        scan: tuple[Argument, ...] = ("SCAN", cursor, "MATCH", f"{pattern}:*[gs]", "COUNT", _SCANNED)
        try:
            cursor, page = link.call(*scan)
        except CommandError:
            break
        found.update(key for key in page if key.endswith((b":requests", b":loading")))
        if cursor == b"0" or time.monotonic() > end_s:
            break
    return (key.decode("utf-8", "replace") for key in found)
