"""Which server Redis is, from its own words, and whether it can do what Carpool needs. No I/O.

Scripts and stores use what Redis has since 6.2: XAUTOCLAIM's siblings in XPENDING (IDLE), exclusive ranges of
XRANGE, XTRIM MINID. An older server takes requests, and never gives a result.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

REDIS_VERSION_MIN: Final = (6, 2)
NEEDED: Final = "Carpool needs Redis 6.2 or newer, or Valkey"


class ServerVersion(NamedTuple):
    """The name of a server as it is in sentences, and its version, as in 7.0.15."""

    name: str
    version: str

    @property
    def too_old(self) -> bool:
        """Whether Carpool cannot use it. False also if that cannot be told: other servers count otherwise."""
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        if self.name != "Redis" or numbers is None:
            return False
        return (int(numbers[1]), int(numbers[2])) < REDIS_VERSION_MIN

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def of_hello(reply: Any) -> ServerVersion | None:
    """From the reply to HELLO, in RESP2; None if that does not tell, as from a server older than 6.0."""
    if not isinstance(reply, list):
        return None
    fields = dict(zip(reply[::2], reply[1::2], strict=False))
    name, version = fields.get(b"server"), fields.get(b"version")
    if not isinstance(name, bytes) or not isinstance(version, bytes):
        return None
    return ServerVersion(name.decode(errors="replace").capitalize(), version.decode(errors="replace"))


def of_info(reply: Any) -> ServerVersion | None:
    """From the reply to INFO; None if that does not tell."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    for name in ("Valkey", "Redis"):  # Valkey names both: as which Redis it behaves, too
        if found := re.search(rf"^{name.lower()}_version:(\S+)", text, re.MULTILINE):
            return ServerVersion(name, found[1])
    return None


def of_binary(text: str) -> ServerVersion | None:
    """From what `redis-server --version` prints; None if that does not tell."""
    found = re.match(r"(Redis|Valkey) server v=(\S+)", text)
    return None if found is None else ServerVersion(found[1], found[2])
