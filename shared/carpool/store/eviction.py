"""Whether Redis may discard what it has accepted, because of its configuration.

Why: docs/decisions/0069.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from carpool.store.connection import CommandError, Link

_HARMLESS: Final = "noeviction"


def eviction_warning(link: Link) -> str:
    """What is wrong with Redis's `maxmemory-policy`, and what to do; empty if nothing is, or it is unknown.

    It is unknown to a user who may not call `INFO`. `CONFIG GET` is not used: it shows passwords, and managed
    services forbid it. Raises LinkError.
    """
    try:
        reply = link.call("INFO", "memory")
    except CommandError:
        return ""
    return warning_of(_fields(reply.decode("utf-8", "replace")))


def warning_of(memory: Mapping[str, str]) -> str:
    """The same, from the fields of `INFO memory`."""
    policy = memory.get("maxmemory_policy", _HARMLESS)
    if policy == _HARMLESS or memory.get("maxmemory", "0") == "0":  # without a limit nothing is discarded
        return ""
    return (
        "Redis discards accepted requests and results when its memory is full: its maxmemory-policy is "
        f"{policy}; set it to {_HARMLESS}"
    )


def _fields(reply: str) -> dict[str, str]:
    """What `INFO` returned, by name."""
    return dict(line.split(":", 1) for line in reply.splitlines() if ":" in line)
