"""What the BODY arguments name: values, files, files of lines, folders, standard input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from carpool.messages.requests import JSON
from carpool.text_files import read_text
from carpool.wire.bodies import encode_body
from carpool_cli.infer import read_body

LINES_SUFFIX: Final = ".jsonl"


class Bodies(NamedTuple):
    """Requests that differ only in their bodies. `names`: of the files that these are from, or empty."""

    encoded: list[bytes]
    names: list[str]
    content_type: str
    extra: Mapping[str, bytes]

    def label(self, index: int) -> str:
        """What a body is called in what is printed."""
        name = self.names[index]
        return f"body {index + 1} ({name})" if name else f"body {index + 1}"

    def batches(self, size: int) -> Iterator[list[bytes]]:
        """Batches of this size with all bodies, in order; the last one is filled from the first ones."""
        turns = cycle(self.encoded)
        for _ in range(-(-len(self.encoded) // size)):
            yield list(islice(turns, size))

    def only(self, indexes: Sequence[int]) -> Bodies:
        """Some of them."""
        return self._replace(
            encoded=[self.encoded[index] for index in indexes], names=[self.names[index] for index in indexes]
        )


def read_bodies(arguments: Sequence[str], content_type: str, extra: Mapping[str, bytes]) -> Bodies:
    """All that the arguments name. Raises OSError, CarpoolError and ValueError."""
    named = [body for argument in arguments for body in _bodies(argument, content_type)]
    are_named = len(named) > 1
    return Bodies(
        [encode_body(content_type, value) for _, value in named],
        [name if are_named else "" for name, _ in named],
        content_type,
        extra,
    )


def _bodies(argument: str, content_type: str) -> Iterator[tuple[str, Any]]:
    """The bodies of an argument, with the name of the file that each is from."""
    path = Path(argument[1:])
    if not argument.startswith("@"):
        yield "", read_body(argument, content_type)
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
        if not files:
            raise ValueError(f"BODY: the folder {path} has no files")
        for file in files:
            yield from _bodies(f"@{file}", content_type)
    elif path.suffix == LINES_SUFFIX and content_type == JSON:
        lines = read_text(path).split("\n")  # JSON may have other ends of lines within a text
        bodies = [read_body(line) for line in lines if line.strip()]
        if not bodies:
            raise ValueError(f"BODY: {path} has no lines")
        for body in bodies:
            yield "", body
    else:
        yield str(path), read_body(argument, content_type)
