"""The address of Redis: whether it can be one, and how logs and error messages show it."""

from __future__ import annotations

from urllib.parse import urlsplit

from carpool.sentinel import Sentinels


def checked_url(url: str) -> str:
    """The URL, if Redis may have it. Raises ValueError, whose message says what is wrong."""
    if Sentinels.of(url):
        return url
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            "must begin with redis://, rediss://, unix:// or redis+sentinel://, as in redis://127.0.0.1:6379/0"
        )
    try:
        _ = urlsplit(url).port
    except ValueError:  # not shown: it may quote part of a password that contains a slash
        raise ValueError(
            "the port after the host must be a number, as in redis://127.0.0.1:6379/0; a password with "
            "special characters must be percent-encoded, or be in a file (CARPOOL_REDIS_PASSWORD_FILE)"
        ) from None
    return url


def without_password(url: str) -> str:
    """The URL without credentials, and without its query, where redis-py accepts a password too."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    credentials, _, host = rest.rpartition("@")
    if "?" in credentials:  # a ? in a password, or an @ in the query: the end of the password is unknown
        host = "..."
    return f"{scheme}{separator}{host.partition('?')[0]}"
