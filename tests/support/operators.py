"""Who changes something in a test."""

from __future__ import annotations

from typing import Final

from carpool.wire.audit import Actor

TESTER: Final = Actor("tester@host", "command")
