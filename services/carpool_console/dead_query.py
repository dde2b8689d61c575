"""Filters of dead letters <-> the parameters of pages; and what a body looks like. No I/O.

Why: docs/decisions/0117.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlencode

from carpool.store.dead_pages import parse_id, show_id
from carpool.units import MILLISECONDS, number_in
from carpool_console.dead_index import Filter

TEXT_CHARS_MAX: Final = 200  # of a search
BODY_CHARS_MAX: Final = 64 * 1024  # of a body that is shown
HEX_BYTES_MAX: Final = 1024
_JSON_BYTES_MAX: Final = 256 * 1024  # of a body that is shown as indented JSON
_HEX_COLUMNS: Final = 16


class ShownBody(NamedTuple):
    """A body as a page shows it. `kind`: "JSON", "text", "bytes" or "gone". `is_cut`: the text is a part."""

    kind: str
    text: str
    size_bytes: int
    is_cut: bool


def parse_filter(parameters: Mapping[str, str]) -> Filter:
    """The filter that parameters of a page name: q, error, older, newer, until. Raises ValueError."""
    text = parameters.get("q", "").strip()
    if len(text) > TEXT_CHARS_MAX:
        raise ValueError(f"search: {len(text)} characters; at most {TEXT_CHARS_MAX} are looked for")
    until = parameters.get("until", "")
    return Filter(
        text=text,
        error=parameters.get("error", ""),
        older_ms=_age("older than", parameters.get("older", "")),
        newer_ms=_age("newer than", parameters.get("newer", "")),
        until=parse_id(until) if until else None,
    )


def _age(name: str, text: str) -> int | None:
    if not text.strip():
        return None
    value = number_in(MILLISECONDS, text)
    if value is None or value > 1e14:
        raise ValueError(f"{name}: {text!r:.40} is no time, such as 90s, 15min, 2h or 3d")
    return int(value)


def filter_parameters(which: Filter) -> dict[str, str]:
    """The parameters that name this filter; empty for all letters."""
    ages = {"older": which.older_ms, "newer": which.newer_ms}
    return {
        **({"q": which.text} if which.text else {}),
        **({"error": which.error} if which.error else {}),
        **{name: f"{age // 1000}s" for name, age in ages.items() if age is not None},
        **({"until": show_id(which.until)} if which.until else {}),
    }


def filter_query(which: Filter, **others: str | int) -> str:
    """The query of an address with this filter and other parameters, with "?" unless it is empty."""
    query = urlencode({**filter_parameters(which), **{name: str(value) for name, value in others.items()}})
    return f"?{query}" if query else ""


def show_body(body: bytes | None) -> ShownBody:
    """JSON is indented, other text is shown as it is, and of other bytes the first ones in hexadecimal."""
    if body is None:
        return ShownBody("gone", "", 0, False)
    kind = "text"
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return _hexadecimal(body)
    if "\0" in text:
        return _hexadecimal(body)
    if len(body) <= _JSON_BYTES_MAX:
        try:
            text, kind = json.dumps(json.loads(text), indent=2, ensure_ascii=False), "JSON"
        except (ValueError, RecursionError):  # it is not JSON, or nested too deeply
            kind = "text"
    return ShownBody(kind, text[:BODY_CHARS_MAX], len(body), len(text) > BODY_CHARS_MAX)


def _hexadecimal(body: bytes) -> ShownBody:
    head = body[:HEX_BYTES_MAX]
    lines = [
        f"{at:06x}  {head[at : at + _HEX_COLUMNS].hex(' '):<47}  {_ascii(head[at : at + _HEX_COLUMNS])}"
        for at in range(0, len(head), _HEX_COLUMNS)
    ]
    return ShownBody("bytes", "\n".join(lines), len(body), len(body) > len(head))


def _ascii(part: bytes) -> str:
    return "".join([chr(byte) if 32 <= byte < 127 else "." for byte in part])
