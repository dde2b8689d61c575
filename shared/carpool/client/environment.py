"""Where a client connects to."""

from __future__ import annotations

import os

from carpool.errors import InvalidArgumentError, PermissionDeniedError
from carpool.keys import DEFAULT_PREFIX
from carpool.tls_files import check_tls_files


def connection(url: str | None, prefix: str | None) -> tuple[str, str]:
    """The address of Redis, with user name, password and TLS files, and the prefix of all keys.

    A URL that is given is all there is to say, so that credentials go to no other server than theirs. Without
    one, all settings are read as services and commands read them: from CARPOOL_* variables, then `.env`, then
    defaults. In a model process there is only what its worker gives to it. Raises InvalidArgumentError, which
    names what is wrong, and PermissionDeniedError.
    """
    if not url and "CARPOOL_MODEL_PROCESS" in os.environ:
        url = _of_model_process()
    elif not url:
        return _from_settings(prefix)
    try:
        check_tls_files(url)
    except ValueError as error:
        raise InvalidArgumentError(f"url: {error}") from None
    return url, prefix or os.environ.get("CARPOOL_PREFIX") or DEFAULT_PREFIX


def _of_model_process() -> str:
    if url := os.environ.get("CARPOOL_REDIS_URL"):
        return url
    raise PermissionDeniedError(
        "a model does not get the credentials of its worker; for a model that sends requests, start the "
        "worker with CARPOOL_MODEL_REDIS_URL (--model-redis-url), the address of Redis with a user of the "
        "role producer, or give the client a URL"
    )


def _from_settings(prefix: str | None) -> tuple[str, str]:
    # Imported here, because its import takes 80 ms, half as long as that of a client.
    from carpool.settings import ConnectionSettings, read_environment  # noqa: PLC0415

    try:
        settings = read_environment(ConnectionSettings)
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from None
    return settings.redis_url, prefix or settings.prefix
