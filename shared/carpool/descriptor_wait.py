"""Waiting for several descriptors at once, exact to the microsecond where the system permits."""

from __future__ import annotations

import select
from collections.abc import Sequence
from typing import Final

_SELECT_DESCRIPTORS: Final = 1024  # FD_SETSIZE: select() takes only lower ones


def wait_until_ready(
    readers: Sequence[int], writers: Sequence[int], timeout_s: float
) -> tuple[list[int], list[int]]:
    """Those of these descriptors that can be read, and those that can be written, without waiting.

    Waits for the first one up to `timeout_s`, which may be negative. A descriptor whose connection was closed
    counts as ready.
    """
    timeout_s = max(0.0, timeout_s)
    descriptors = (*readers, *writers)
    if max(descriptors, default=0) < _SELECT_DESCRIPTORS:  # poll rounds up to milliseconds
        readable, writable, _ = select.select(readers, writers, (), timeout_s)
        return readable, writable
    poller = select.poll()
    for descriptor in set(descriptors):
        read, write = select.POLLIN * (descriptor in readers), select.POLLOUT * (descriptor in writers)
        poller.register(descriptor, read | write)
    failed = select.POLLERR | select.POLLHUP | select.POLLNVAL
    events = poller.poll(timeout_s * 1000)
    return (
        [at for at, event in events if at in readers and event & (select.POLLIN | failed)],
        [at for at, event in events if at in writers and event & (select.POLLOUT | failed)],
    )
