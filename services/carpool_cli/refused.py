"""What a command says when Redis does not do what it asks."""

from __future__ import annotations

from typing import Final

from carpool.errors import PERMISSION_DENIED, PermissionDeniedError
from carpool.store.connection import CommandError, LinkError, SignInError, UnsupportedServerError

_ROLES: Final = """
    The user with which this command signed in to Redis may not do this. `infer` and `result` need the role
    producer or admin, `infer --enqueue` needs producer, and all other commands that read or change a stack
    need admin. Set CARPOOL_REDIS_USER and CARPOOL_REDIS_PASSWORD_FILE to that role's; with Docker Compose,
    use the service tools for a producer, and operator for an admin:
    docker compose run --rm operator COMMAND. If the user has the role, its rules may be those of an older
    version: run `carpool acl`, then ACL LOAD in Redis."""


def explain(error: Exception) -> str:
    """The error, and what to do about it."""
    if isinstance(error, CommandError) and error.code == "NOPERM":
        return f"{PERMISSION_DENIED}: {error}{_ROLES}"
    if isinstance(error, PermissionDeniedError):
        return f"{error}{_ROLES}"
    if isinstance(error, LinkError) and not isinstance(error, SignInError | UnsupportedServerError):
        return (
            f"{error}\n    if no Redis runs there, start one with `carpool up MODEL`, or name another with "
            "--redis-url (CARPOOL_REDIS_URL)"
        )
    return str(error)
