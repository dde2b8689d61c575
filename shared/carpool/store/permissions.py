"""Why a service cannot do its work, if the user with which it signed in to Redis may not."""

from __future__ import annotations

from carpool.store.connection import CommandError


def reason_of(error: BaseException, role: str) -> str:
    """The error as a service logs it; of a missing permission also which `role` it needs."""
    if isinstance(error, CommandError) and error.code == "NOPERM":
        return (
            f"{error}: a {role} needs the role {role} (CARPOOL_REDIS_USER, CARPOOL_REDIS_PASSWORD_FILE), "
            "with the rules that this version's `carpool acl` writes"
        )
    return str(error) or type(error).__name__
