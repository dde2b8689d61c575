"""Bytes in parts: large ones are sent from where they are, together with others, without joining them."""

from __future__ import annotations

from collections import deque
from typing import Final

Buffer = bytes | bytearray | memoryview

PARTS_MAX: Final = 1024  # in one system call: IOV_MAX


def drop_sent(parts: deque[Buffer], sent_bytes: int) -> None:
    """Remove the first `sent_bytes` bytes, which may end in the middle of a part, and empty parts."""
    while parts and sent_bytes >= len(parts[0]):
        sent_bytes -= len(parts.popleft())
    if sent_bytes:
        parts[0] = memoryview(parts[0])[sent_bytes:]
