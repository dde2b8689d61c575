"""Why a service cannot do its work, if the user with which it signed in to Redis may not."""

from __future__ import annotations

import re
from typing import Final

from carpool.shown import name_of
from carpool.store.connection import CommandError

_ARGUMENTS: Final = re.compile(
    r",? with args beginning with.*", re.DOTALL
)  # of a command that Redis does not know


def reason_of(error: BaseException, role: str) -> str:
    """The error as a service logs it; of a missing permission also which `role` it needs.

    Its text only if Redis or the system wrote it: any other may quote a body.
    """
    if isinstance(error, CommandError) and error.code == "NOPERM":
        return (
            f"{error}: a {role} needs the role {role} (CARPOOL_REDIS_USER, CARPOOL_REDIS_PASSWORD_FILE), "
            "with the rules that this version's `carpool acl` writes"
        )
    if isinstance(error, CommandError):
        return _ARGUMENTS.sub("", str(error))
    return (str(error) if isinstance(error, OSError) else "") or name_of(error)
