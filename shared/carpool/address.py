"""Addresses of Redis: how logs and errors show them, and in URLs that name several servers."""

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


def with_port(address: str, default_port: int, error: str) -> str:
    """HOST:PORT of HOST or HOST:PORT; an IPv6 address is in brackets. Raises ValueError with this error."""
    host, colon, port = address.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = address, str(default_port)
    if not host or not port.isdigit():
        raise ValueError(error)
    return f"{host}:{port}"


def bracketed(host: str) -> str:
    """A host as it is in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host
