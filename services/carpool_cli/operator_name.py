"""Who runs a command that changes something: for the audit."""

from __future__ import annotations

import getpass
import os
import socket

from carpool.wire.audit import Actor


def this_operator() -> Actor:
    """The user on this host, such as `ann@host`. In a container a user may have only a number."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Actor(f"{user}@{socket.gethostname()}", "command")
