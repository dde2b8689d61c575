"""Text files as people have them, also those that were written on Windows.

A file is UTF-8, unless a byte-order mark at its beginning says that it is UTF-16 or UTF-32. Notepad and
PowerShell write these marks, also in front of UTF-8. What else a file could be (Latin-1, UTF-16 without a
mark) cannot be known, so it is refused, by name.
"""

from __future__ import annotations

import codecs
from pathlib import Path
from typing import Final

UTF_8: Final = "utf-8-sig"  # skips a mark, if there is one
# The marks of UTF-16 are the beginning of those of UTF-32, or other bytes.
_MARKS: Final = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def encoding_of(data: bytes) -> str:
    """Python's name for the encoding of a text, of which these are at least the first four bytes."""
    return next((name for mark, name in _MARKS if data.startswith(mark)), UTF_8)


def has_mark(data: bytes) -> bool:
    """Whether a text begins with a byte-order mark, that of UTF-8 included."""
    return data.startswith(codecs.BOM_UTF8) or encoding_of(data) != UTF_8


def decoded(data: bytes, name: str) -> str:
    """The text, without a byte-order mark. `name`: what errors call it. Raises ValueError."""
    encoding = encoding_of(data)
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        if encoding != UTF_8:
            raise ValueError(f"{name} begins like {encoding.upper()} text, but is none") from None
        byte, line = error.object[error.start], error.object.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{name} is not UTF-8 text (byte 0x{byte:02x} in line {line}), perhaps Latin-1 or Windows-1252: "
            "save it as UTF-8"
        ) from None


def read_text(path: Path) -> str:
    """The text of a file, with lines that end with `\\n`. Raises OSError, and ValueError if it is no text."""
    text = decoded(path.read_bytes(), str(path))
    if "\0" in text:
        raise ValueError(f"{path} has zero bytes, as UTF-16 without a byte-order mark has: save it as UTF-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")
