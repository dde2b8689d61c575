"""Where a client connects to."""

from __future__ import annotations

import os

from carpool.errors import InvalidArgumentError
from carpool.keys import DEFAULT_PREFIX
from carpool.redis_url import checked_url


def connection(url: str | None, prefix: str | None) -> tuple[str, str]:
    """The address of Redis, with user name, password and TLS files, and the prefix of all keys.

    A URL that is given is all there is to say, so that credentials go to no other server than theirs. Without
    one, all settings are read as services and commands read them: from CARPOOL_* variables, then `.env`, then
    defaults. Raises InvalidArgumentError, which names what is wrong.
    """
    if not url:
        return _from_settings(prefix)
    try:
        checked_url(url)
    except ValueError as error:
        raise InvalidArgumentError(f"url: {error}") from None
    return url, prefix or os.environ.get("CARPOOL_PREFIX") or DEFAULT_PREFIX


def _from_settings(prefix: str | None) -> tuple[str, str]:
    # Imported here, because its import takes 80 ms, half as long as that of a client.
    from carpool.settings import ConnectionSettings, read_environment  # noqa: PLC0415

    try:
        settings = read_environment(ConnectionSettings)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return settings.redis_url, prefix or settings.prefix
