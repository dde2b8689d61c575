"""Redis's address as text."""

from __future__ import annotations


def without_password(url: str) -> str:
    """The URL as it may be logged. redis-py takes a password in the query too, so that is left out."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    who, _, place = rest.rpartition("@")
    if "?" in who:  # a ? in a password, or an @ in a query: where the password ends is anyone's guess
        place = "..."
    return f"{scheme}{separator}{place.partition('?')[0]}"
