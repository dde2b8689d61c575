"""What a model is loaded with beside its object: its parameters, and settings in place of its own.

A worker sends it to each of its model processes as the first message. It is not on their command lines,
which all users of a machine can read, and a process that takes the place of another one gets the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from carpool.parts import Buffer

HIDDEN: Final = "***"
SECRET_CHARS_MIN: Final = 4  # of a text that is hidden within others: shorter ones are in many words
CONFIGURATION: Final = "configuration"  # the header of the message
# What the location of a file begins with that is nothing without what its repository declares.
TRITON: Final = "triton:"


class Parameter(NamedTuple):
    """A parameter as it is given, before it is checked: a text, or a value from a TOML file.

    `source`: where it is given, for errors. `folder`: where a relative path starts. `is_secret`: it is from a
    file of its own, and is never shown. `within`: the folder that no path may leave; empty for any path.
    """

    value: Any
    source: str
    folder: str
    is_secret: bool = False
    within: str = ""

    def __repr__(self) -> str:
        value = HIDDEN if self.is_secret else repr(self.value)
        return f"Parameter({value}, {self.source!r}, {self.folder!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one model is loaded with.

    `settings`: as text, by name. `folder`: where modules are found; None for the working directory.
    `parameters_in`: the table of a TOML file in which parameters may be given, for errors; empty for none.
    `settings_from`: what gives each of the settings, `--set`, `file` or `load`. `version`: in place of what
    the model declares; empty for none. `declared`: what a repository says of a file that is nothing without
    it.
    """

    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None
    parameters_in: str = ""
    settings_from: Mapping[str, str] = field(default_factory=dict)
    version: str = ""
    declared: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """The payload of the message: JSON. Dates and times in parameters become text."""
        folder = None if self.folder is None else str(self.folder)
        fields = [
            self.parameters, self.settings, folder, self.parameters_in, self.settings_from, self.version,
            self.declared,
        ]  # fmt: skip
        return json.dumps(fields, default=_text_of_time).encode()

    @classmethod
    def decode(cls, payload: Buffer) -> Self:
        """The inverse of `encode`."""
        parameters, settings, folder, parameters_in, settings_from, version, declared = json.loads(
            bytes(payload)
        )
        return cls(
            parameters={name: Parameter(*given) for name, given in parameters.items()},
            settings=settings,
            folder=None if folder is None else Path(folder),
            parameters_in=parameters_in,
            settings_from=settings_from,
            version=version,
            declared=declared,
        )


def _text_of_time(value: Any) -> str:
    return str(value.isoformat())


def without(secrets: Iterable[str], text: str) -> str:
    """A text in which these secrets are hidden, the longest first."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= SECRET_CHARS_MIN:
            text = text.replace(secret, HIDDEN)
    return text
