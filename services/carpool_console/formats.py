"""Figures as people read them: short, and of one width as far as possible."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

UNKNOWN: Final = "–"
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


def number(value: float | None) -> str:
    """Such as `12,345`."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def utc(at_ms: float) -> str:
    """A time for people, such as `2026-11-27 14:00:05 UTC`; of one that no calendar has, the number."""
    return _formatted(at_ms, "%Y-%m-%d %H:%M:%S UTC")


def iso(at_ms: float) -> str:
    """The same time for programs."""
    return _formatted(at_ms, "%Y-%m-%dT%H:%M:%SZ")


def _formatted(at_ms: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(at_ms // 1000, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return str(at_ms)


def rate(per_s: float | None) -> str:
    """Of events a second: whole above 10, with two digits below."""
    if per_s is None:
        return UNKNOWN
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.2g}"


def percent(share: float | None) -> str:
    """Such as `83%`."""
    return UNKNOWN if share is None else f"{share:.0%}"


def duration(seconds: float | None) -> str:
    """Such as `0.4 ms`, `12 ms`, `1.2 s`, `3 min`, `4.1 h` or `2.0 d`."""
    if seconds is None:
        return UNKNOWN
    if seconds < 1:
        milliseconds = seconds * 1000
        return f"{milliseconds:.1f} ms" if 0 < milliseconds < 10 else f"{milliseconds:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    if seconds < 172_800:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86_400:.1f} d"


def milliseconds(value: float | None) -> str:
    """A duration that is given in milliseconds."""
    return duration(None if value is None else value / 1000)


def size(number_of_bytes: float | None) -> str:
    """Such as `1.5 GiB`."""
    if number_of_bytes is None:
        return UNKNOWN
    value, at = float(number_of_bytes), 0
    while value >= 1024 and at < len(_UNITS) - 1:
        value, at = value / 1024, at + 1
    return f"{value:.0f} {_UNITS[at]}" if value >= 100 or not at else f"{value:.1f} {_UNITS[at]}"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Such as `1 model` or `1,200 requests`. `nouns`: the plural, if it is not that with an s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"
