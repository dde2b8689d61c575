"""Whether a worker serves a model, asked when requests to it have timed out: their errors say so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from carpool.client.entries import Channel
from carpool.client.lookup import count_alive
from carpool.errors import CarpoolError

ANSWER_S_MAX: Final = 0.1  # how long errors wait for the answer
KNOWN_S: Final = 1.0  # how long it holds

Then = Callable[[str], None]


class Absences:
    """`call` sends a command to Redis, and returns the reply, which may be an error. Used on the event loop's
    thread."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self._call = call
        self._known: dict[Channel, tuple[float, str]] = {}  # until when, and the sentence
        self._waiting: dict[Channel, list[Then]] = {}
        self._asking: set[asyncio.Task[None]] = set()

    def tell(self, channel: Channel, then: Then) -> None:
        """Call `then`, at once or a moment later, with what an error of this model should say: a part of a
        sentence, or nothing if a worker serves it, or if that cannot be found out."""
        until_s, text = self._known.get(channel, (0.0, ""))
        if until_s > time.monotonic():
            then(text)
        elif channel in self._waiting:
            self._waiting[channel].append(then)
        else:
            self._waiting[channel] = [then]
            asking = asyncio.ensure_future(self._ask(channel))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def _ask(self, channel: Channel) -> None:
        text = ""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                is_served = await count_alive(self._call, channel.keys) > 0
        except (TimeoutError, TypeError, ValueError, CarpoolError):
            pass  # not known: an error in place of a reply is no number
        else:
            text = "" if is_served else f"; no worker serves {channel.keys.model!r} now"
            self._known[channel] = (time.monotonic() + KNOWN_S, text)
        finally:
            for then in self._waiting.pop(channel, ()):
                then(text)
