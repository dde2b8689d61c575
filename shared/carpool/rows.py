"""The bodies of several requests or results: rows with a common head, or a list.

A large body may be stored under a key of its own: then only its name and size are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

# How long a stored body is kept after the deadline of its request, which may be served late (see
# `expiration_action`); and without a deadline. Batchers renew it while the request waits.
BODY_TTL_MS: Final = 24 * 3600 * 1000
NO_STORED_BODY: Final = "body_key: there is no body under this key; it expired, or was never stored"
LARGE_BODY_BYTES: Final = 16 * 1024  # a body of so many bytes is stored


class StoredBody(NamedTuple):
    """A large body that its producer stored under a key of its own, `Keys.body(name)`.

    `size_bytes` is what the producer says; workers verify it.
    """

    name: str
    size_bytes: int


Body = bytes | StoredBody


@dataclass(slots=True)
class Rows:
    """Bodies of equal length with a common head: body `i` is `head` and the i-th `width` bytes of `data`.

    `head` may be empty, `width` may not be 0, and `data` is a whole number of rows.
    """

    head: bytes
    data: bytes | memoryview
    width: int

    def __len__(self) -> int:
        return len(self.data) // self.width

    def __getitem__(self, index: int) -> bytes:
        start = index * self.width
        return b"".join((self.head, self.data[start : start + self.width]))

    def slice(self, start: int, stop: int) -> Rows:
        """The rows from `start` to before `stop`, not copied."""
        return Rows(self.head, memoryview(self.data)[start * self.width : stop * self.width], self.width)

    def copy(self, start: int, stop: int) -> Rows:
        """The same rows, copied."""
        view = memoryview(self.data)[start * self.width : stop * self.width]
        return Rows(self.head, bytes(view), self.width)

    def rest(self, start: int) -> Rows:
        """The rows from `start`; copied if a slice would keep more than twice its own bytes in memory."""
        rows = self.slice(start, len(self))
        view = rows.data
        assert isinstance(view, memoryview)
        if 2 * len(view) < len(memoryview(view.obj)):
            rows.data = bytes(view)
        return rows

    def select(self, indexes: Sequence[int]) -> Rows:
        """The rows at these indexes, copied."""
        view, width = memoryview(self.data), self.width
        return Rows(self.head, b"".join([view[at * width : (at + 1) * width] for at in indexes]), width)


Bodies = Rows | list[Body]


def only_stored(bodies: Bodies) -> Bodies:
    """Those of these bodies that are stored under keys of their own: names, and no contents."""
    return [] if isinstance(bodies, Rows) else [body for body in bodies if type(body) is StoredBody]


def stored_names(bodies: Bodies) -> list[str]:
    """The names of those of these bodies that are stored under keys of their own."""
    return [] if isinstance(bodies, Rows) else [body.name for body in bodies if type(body) is StoredBody]
