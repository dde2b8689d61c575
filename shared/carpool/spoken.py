"""What a model says of OpenAI's API: which of its interfaces it speaks, and which parameters it understands.

    class Writer:
        speaks = "completions"                  # or "chat", "embeddings", or a tuple of these
        understands = ("frequency_penalty",)    # optional: parameters that reach it beside the usual ones

Why: docs/decisions/0107.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self

COMPLETIONS: Final = "completions"
CHAT: Final = "chat"
EMBEDDINGS: Final = "embeddings"
INTERFACES: Final = (COMPLETIONS, CHAT, EMBEDDINGS)
SPEAKS: Final = "speaks"
UNDERSTANDS: Final = "understands"

# Parameters with a meaning of their own in the gateway, which therefore no model can declare.
USUAL_PARAMETERS: Final = frozenset({
    "best_of", "dimensions", "encoding_format", "input", "max_completion_tokens", "max_tokens", "messages",
    "model", "n", "prompt", "seed", "stop", "stream", "stream_options", "temperature", "top_p", "user",
})  # fmt: skip
_PARAMETER: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)


class Spoken(NamedTuple):
    """What one model declares. `speaks`: some of INTERFACES, in that order; none if it speaks none of them.
    `understands`: names of further parameters, sorted."""

    speaks: tuple[str, ...] = ()
    understands: tuple[str, ...] = ()

    @classmethod
    def declared(cls, speaks: Any, understands: Any) -> Self:
        """From a model's attributes, None for one that it does not have. Raises ValueError, which begins
        with the name of the attribute."""
        interfaces = _names(SPEAKS, speaks, f"one of {', '.join(INTERFACES)}, or a tuple of these")
        for name in interfaces:
            if name not in INTERFACES:
                raise ValueError(f"'{SPEAKS}' has {name!r:.60}; there are {', '.join(INTERFACES)}")
        parameters = _names(UNDERSTANDS, understands, "the name of a parameter, or a tuple of names")
        if parameters and not interfaces:
            raise ValueError(f"'{UNDERSTANDS}' has no meaning without '{SPEAKS}'")
        for name in parameters:
            if not _PARAMETER.fullmatch(name):
                raise ValueError(f"'{UNDERSTANDS}' has {name!r:.60}, which is no name of a parameter")
            if name in USUAL_PARAMETERS:
                raise ValueError(
                    f"'{UNDERSTANDS}' has {name!r}, which means the same for all models: leave it out"
                )
        return cls(tuple(name for name in INTERFACES if name in interfaces), tuple(sorted({*parameters})))

    @property
    def fields(self) -> dict[str, str]:
        """The fields of a registration that say it; none for what is empty."""
        return {name: json.dumps(names) for name, names in self._asdict().items() if names}

    @classmethod
    def of(cls, registration: Mapping[str, str]) -> Self:
        """What a registered model declares; nothing where that is malformed."""
        return cls(*(_texts(registration.get(name)) for name in (SPEAKS, UNDERSTANDS)))


NOT_SPOKEN: Final = Spoken()


def _names(attribute: str, value: Any, expected: str) -> tuple[str, ...]:
    if value is None:
        return ()
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, tuple | list) or not names or not all(isinstance(one, str) for one in names):
        raise ValueError(f"'{attribute}' is {value!r:.80}: it must be {expected}")
    return tuple(names)


def _texts(written: str | None) -> tuple[str, ...]:
    if written is None:
        return ()
    try:
        found = json.loads(written)
    except (ValueError, RecursionError):
        return ()
    is_list = isinstance(found, list) and all(isinstance(one, str) for one in found)
    return tuple(found) if is_list else ()
