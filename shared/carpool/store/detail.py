"""The detail of a model: asking its batcher to publish it, and reading it."""

from __future__ import annotations

from typing import Final

from carpool.keys import Keys
from carpool.store.connection import Link
from carpool.wire.detail import ModelDetail

WATCHED_MS: Final = 10_000  # for how long one look counts
DETAIL_TTL_MS: Final = 5000


def watch(link: Link, keys: Keys) -> None:
    """Somebody looks at this model, for WATCHED_MS: its active batcher publishes its detail. It notices
    that within a quarter of a second, or, of an idle model, within three seconds. O(1)."""
    link.call("SET", keys.watched, 1, "PX", WATCHED_MS)


def read_detail(link: Link, keys: Keys) -> ModelDetail | None:
    """The detail of a model; None if none is published, or it is that of another version. O(64 KiB)."""
    detail = link.call("GET", keys.detail)
    return None if detail is None else ModelDetail.decode(detail)
