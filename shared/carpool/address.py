"""The address of Redis, for logs and error messages."""

from __future__ import annotations


def without_password(url: str) -> str:
    """The URL without credentials, and without its query, where redis-py accepts a password too."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    credentials, _, host = rest.rpartition("@")
    if "?" in credentials:  # a ? in a password, or an @ in the query: the end of the password is unknown
        host = "..."
    return f"{scheme}{separator}{host.partition('?')[0]}"
