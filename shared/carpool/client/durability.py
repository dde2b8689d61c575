"""What a producer asks of Redis before a request counts as accepted: the setting `durability` of a client.

Why: docs/decisions/0074.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple, Self

from carpool.errors import InvalidArgumentError
from carpool.store.connection import Command, CommandError

CONFIRM_MS: Final = 5000  # how long Redis waits for replicas, or for the disk
_REPLICAS: Final = re.compile(r"replicas=([1-9][0-9]{0,2})")


class Durability(NamedTuple):
    """`command` asks Redis to confirm all that this connection wrote before it; None: nothing is asked."""

    text: str
    command: Command | None
    replicas: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From the setting: none, replicas=N or fsync. Raises InvalidArgumentError."""
        if text == "none":
            return cls(text, None)
        if text == "fsync":
            return cls(text, ("WAITAOF", 1, 0, CONFIRM_MS))
        match = _REPLICAS.fullmatch(text)
        if match is None:
            raise InvalidArgumentError(
                f"durability: {text!r:.40} is not none, fsync or replicas=N with N from 1 to 999"
            )
        return cls(text, ("WAIT", match[1], CONFIRM_MS), int(match[1]))

    @property
    def probe(self) -> Command | None:
        """A command that fails if the server or this user cannot confirm anything; it waits for nothing."""
        if self.command is None:
            return None
        return ("WAIT", 0, 1) if self.replicas else ("WAITAOF", 1, 0, 1)

    def missing(self, reply: Any) -> str:
        """What is missing by Redis's reply to the command; empty if what was asked for is confirmed."""
        if isinstance(reply, CommandError):
            return f"Redis cannot confirm durability {self.text}: {reply}{self._remedy(reply)}"
        if self.replicas and reply < self.replicas:
            return f"{reply} of {self.replicas} replicas confirmed the request within {CONFIRM_MS / 1000:g} s"
        if not self.replicas and not reply[0]:
            return f"the request was not on the disk of Redis within {CONFIRM_MS / 1000:g} s"
        return ""

    def _remedy(self, reply: CommandError) -> str:
        if self.replicas or reply.code == "NOPERM":
            return ""
        return "; it needs Redis 7.2 or Valkey, with appendonly yes"
