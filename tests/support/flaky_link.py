"""A connection that fails when a test wants it to."""

from __future__ import annotations

from typing import Any

from carpool.store.connection import Link, LinkError


class FlakyLink(Link):
    """A connection of which one of the next calls can be made to fail."""

    fails_in: int | None = None  # calls
    is_carried_out = False  # the call that fails: only its reply is lost

    def send(self, *command: Any) -> None:
        self._count()
        super().send(*command)

    def send_many(self, commands: Any) -> None:
        self._count()
        super().send_many(commands)

    def receive(self, expected_bytes: int = 0) -> Any:
        reply = super().receive(expected_bytes)
        if self.fails_in == -1:
            self._fail()
        return reply

    def _count(self) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0 and not self.is_carried_out:
                self._fail()

    def _fail(self) -> None:
        self.fails_in = None
        self.close()
        raise LinkError("planted")
