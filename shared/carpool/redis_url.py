"""Whether a text can be the URL of Redis."""

from __future__ import annotations

from urllib.parse import urlsplit

from carpool.cluster import Cluster
from carpool.sentinel import Sentinels


def checked_url(url: str) -> str:
    """The URL, if Redis may have it. Raises ValueError, whose message says what is wrong."""
    if Sentinels.of(url) or Cluster.of(url, ""):
        return url
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError(
            "must begin with redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://, as in "
            "redis://127.0.0.1:6379/0"
        )
    try:
        _ = urlsplit(url).port
    except ValueError:  # not shown: it may quote part of a password that contains a slash
        raise ValueError(
            "the port after the host must be a number, as in redis://127.0.0.1:6379/0; a password with "
            "special characters must be percent-encoded, or be in a file (CARPOOL_REDIS_PASSWORD_FILE)"
        ) from None
    return url
