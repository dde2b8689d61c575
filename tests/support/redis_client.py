"""redis-py for tests. Its own limit for any reply is 5 s, which a busy machine exceeds, and so does a command
that waits for an entry."""

from __future__ import annotations

from typing import Any, Final

from redis import Redis

from support.waiting import EVENTUALLY_S

_REPLY_S: Final = 2 * EVENTUALLY_S  # longer than any command of a test waits


def redis_at(url: str, **options: Any) -> Any:
    """A client of the server at this URL. Any: redis-py's types are too vague for results and arguments."""
    return Redis.from_url(url, **{"socket_timeout": _REPLY_S, **options})
