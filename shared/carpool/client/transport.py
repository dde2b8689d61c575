"""One producer's way to Redis and back: a pipelined writer, a reader, and their reconnection.

    outbox --flush--> writer: XADD, several requests in one entry
                      reader: XREAD of this producer's own reply streams --> on_envelope

Everything put out in one turn of the event loop shares entries, and results of a whole batch come back in
one. When a connection is lost both are opened again: entries whose acceptance is not known are sent again
(under the same correlation IDs: who gets a second result drops it), and reading goes on where it stopped, so
results that were written meanwhile are found.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final

import msgpack

from carpool.errors import CarpoolError, ResourceExhaustedError, UnavailableError
from carpool.keys import Keys
from carpool.store.connection import AsyncLink, Command, CommandError, LinkError
from carpool.wire.results import decode_results

MAX_ENTRY_BYTES: Final = 1024 * 1024
MAX_ENTRY_REQUESTS: Final = 256
MAX_WITHDRAWN: Final = 5000  # in one entry, of which at most 1 MiB is read
BLOCK_MS: Final = 2000
SILENCE_S: Final = 10.0
TRIM_ENTRIES: Final = 32
CONGESTED_S: Final = 0.001
_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True, eq=False)
class Channel:
    """One model, as this producer uses it: where its requests go and its results come from."""

    keys: Keys
    replies: bytes
    entry_requests: int
    last_id: str = "0-0"
    untrimmed: int = 0  # entries that were read, and still take up Redis's memory
    withdrawn: list[str] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Pending:
    """One request that has no result yet. `raw` are its own fields; the next two are its entry's."""

    channel: Channel
    future: asyncio.Future[Any]
    raw: dict[str, Any]
    content_type: str
    expiration_ms: int | None
    sent: bool = False


class Pipeline:
    """See the module. `on_envelope` gets every result, `on_refused` every request that Redis did not take."""

    def __init__(
        self,
        url: str,
        name: str,
        on_envelope: Callable[[dict[str, Any]], None],
        on_refused: Callable[[Pending, CarpoolError], None],
    ) -> None:
        self._url = url
        self._name = name
        self._on_envelope = on_envelope
        self._on_refused = on_refused
        self._channels: list[Channel] = []
        self._outbox: dict[tuple[Channel, str, int | None], list[Pending]] = {}
        self._commands: list[tuple[Command, asyncio.Future[Any] | None]] = []
        self._unanswered: deque[list[Pending] | asyncio.Future[Any] | None] = deque()
        self._reading: dict[bytes, Channel] = {}
        self._reconnecting: asyncio.Future[None] | None = None
        self._watching: asyncio.TimerHandle | None = None
        self._heard_at_s = 0.0
        self._flushing = False
        self._connected = False
        self._closed = False
        self.trouble: LinkError | None = None  # why there is no connection, while there is none

    # --- what a client does with it ------------------------------------------------------------------------

    async def open(self) -> None:
        """Connect. Raises LinkError."""
        self._loop = asyncio.get_running_loop()
        await self._connect()
        self._watch()

    async def close(self) -> None:
        """Hang up."""
        self._closed = True
        for waiting in (self._watching, self._reconnecting):
            if waiting is not None:
                waiting.cancel()
        if self._connected:
            self._connected = False
            self._writer.close()
            self._reader.close()
            await asyncio.sleep(0)  # the transports close in the next turn
        asked = [about for about in self._unanswered if isinstance(about, asyncio.Future)]
        for about in [*asked, *(about for _, about in self._commands)]:
            if about is not None and not about.done():
                about.set_exception(UnavailableError("the client was closed before Redis answered"))

    def follow(self, channel: Channel) -> None:
        """Read this channel's results from now on."""
        self._channels.append(channel)
        if not self._connected:
            return
        if not self._reading:
            self._read_on()
        elif self._reader.identity is not None:  # it is blocked on the others: have it look up
            self._say(("CLIENT", "UNBLOCK", self._reader.identity), None)

    def put(self, pending: Pending) -> None:
        """Send a request, together with all others of this turn of the event loop."""
        group = (pending.channel, pending.content_type, pending.expiration_ms)
        waiting = self._outbox.get(group)
        if waiting is None:
            self._outbox[group] = [pending]
        else:
            waiting.append(pending)
        if not self._flushing:
            self._flush_soon()

    def withdraw(self, pending: Pending) -> None:
        """Nobody wants this result any more: tell the batcher, if it may have heard of the request."""
        if pending.sent and not self._closed:
            pending.channel.withdrawn.append(pending.raw["correlation_id"])
            self._flush_soon()

    def ask(self, *command: str) -> asyncio.Future[Any]:
        """A command beside the requests, and its reply, which may be a CommandError."""
        future = self._loop.create_future()
        self._say(command, future)
        return future

    # --- connections ---------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        writer = AsyncLink(self._url, name=f"{self._name}:w", on_reply=self._hear, on_lost=self._lost)
        reader = AsyncLink(self._url, name=f"{self._name}:r", on_reply=self._take, on_lost=self._lost)
        await writer.connect()
        try:
            await reader.connect()
        except LinkError:
            writer.close()
            raise
        self._writer, self._reader = writer, reader
        self._connected = True
        self.trouble = None
        self._heard_at_s = self._loop.time()
        self._reading = {}
        self._read_on()
        self._flush_soon()

    def _lost(self, error: LinkError) -> None:
        """One connection is gone: close the other too, and open both anew."""
        if not self._connected:
            return
        self._connected = False
        self.trouble = error
        self._writer.close()
        self._reader.close()
        unanswered, self._unanswered = self._unanswered, deque()
        for about in unanswered:  # it may or may not have arrived
            if isinstance(about, list):
                for pending in about:
                    if not pending.future.done():
                        self.put(pending)
            elif about is not None and not about.done():
                about.set_exception(error)
        if not self._closed:
            self._reconnecting = asyncio.ensure_future(self._connect_again())

    async def _connect_again(self) -> None:
        for attempt in count():
            await asyncio.sleep(_PAUSES_S[min(attempt, len(_PAUSES_S) - 1)])
            try:
                await self._connect()
            except LinkError as error:
                self.trouble = error
            else:
                return

    def _watch(self) -> None:
        """Once a second: a connection over which nothing comes, though it should, is lost."""
        self._watching = self._loop.call_later(1.0, self._watch)
        if not self._connected:
            return
        if self._reading and self._loop.time() - self._heard_at_s > SILENCE_S:
            self._lost(LinkError(f"Redis was silent for {SILENCE_S:g} s"))
        elif any(channel.untrimmed for channel in self._channels):
            self._writer.write(self._collect(trim=True))

    # --- the writer ----------------------------------------------------------------------------------------

    def _say(self, command: Command, about: asyncio.Future[Any] | None) -> None:
        self._commands.append((command, about))
        self._flush_soon()

    def _flush_soon(self) -> None:
        """Flush after all that is ready in this turn of the event loop."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if not self._connected:
            return
        if self._writer.congested:
            self._flushing = True
            self._loop.call_later(CONGESTED_S, self._flush)
            return
        commands = self._collect()
        if commands:
            self._writer.write(commands)

    def _collect(self, *, trim: bool = False) -> list[Command]:
        """Everything there is to say, as commands; who awaits their replies is noted in the same order."""
        commands: list[Command] = []
        outbox, self._outbox = self._outbox, {}
        for (channel, content_type, expiration_ms), waiting in outbox.items():
            for some in _split(waiting, channel.entry_requests):
                commands.append(self._entry(channel, content_type, expiration_ms, some))
                self._unanswered.append(some)
        for command, about in self._commands:
            commands.append(command)
            self._unanswered.append(about)
        self._commands.clear()
        for channel in self._channels:
            if channel.untrimmed >= TRIM_ENTRIES or trim:
                milliseconds, _, number = channel.last_id.partition("-")
                first_kept = f"{milliseconds}-{int(number) + 1}"
                commands.append(("XTRIM", channel.replies, "MINID", first_kept))
                self._unanswered.append(None)
                channel.untrimmed = 0
            while channel.withdrawn:
                names, channel.withdrawn = (
                    channel.withdrawn[:MAX_WITHDRAWN],
                    channel.withdrawn[MAX_WITHDRAWN:],
                )
                commands.append(("XADD", channel.keys.requests, "*", "withdraw", " ".join(names)))
                self._unanswered.append(None)
        return commands

    def _entry(
        self, channel: Channel, content_type: str, expiration_ms: int | None, some: list[Pending]
    ) -> Command:
        """One XADD for some requests that share content type and expiration."""
        for pending in some:
            pending.sent = True
        shared: list[Any] = ["content_type", content_type, "reply_to", self._name]
        if expiration_ms is not None:
            shared += ["expiration", expiration_ms]
        if len(some) == 1:
            own = [part for pair in some[0].raw.items() for part in pair]
            return ("XADD", channel.keys.requests, "*", *shared, *own)
        packed = msgpack.packb([pending.raw for pending in some])
        return ("XADD", channel.keys.requests, "*", *shared, "requests", packed)

    def _hear(self, reply: Any) -> None:
        """Redis's answer to the oldest command that has none."""
        about = self._unanswered.popleft()
        if isinstance(about, list):
            if isinstance(reply, CommandError):
                for pending in about:
                    self._on_refused(pending, _not_accepted(reply))
        elif about is not None and not about.done():
            about.set_result(reply)

    # --- the reader ----------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Have Redis answer when there are results of any channel."""
        if self._channels and self._connected:
            self._reading = {channel.replies: channel for channel in self._channels}
            after = [channel.last_id for channel in self._channels]
            self._reader.write([("XREAD", "COUNT", 64, "BLOCK", BLOCK_MS, "STREAMS", *self._reading, *after)])

    def _take(self, reply: Any) -> None:
        """Results came, or none did for a while: then the reply is None."""
        self._heard_at_s = self._loop.time()
        if isinstance(reply, CommandError):
            self._lost(LinkError(f"the reply stream cannot be read: {reply}"))
            return
        taken: list[dict[str, Any]] = []
        for stream, entries in reply or ():
            channel = self._reading[stream]
            for _, flat in entries:
                taken += decode_results(flat[flat.index(b"results") + 1])
            channel.last_id = entries[-1][0].decode()
            channel.untrimmed += len(entries)
        for envelope in taken:
            self._on_envelope(envelope)
        self._loop.call_soon(self._read_on)  # after those who got their results: they wait, Redis keeps


def _split(waiting: list[Pending], limit: int) -> Iterable[list[Pending]]:
    """Entries of at most `limit` requests and about MAX_ENTRY_BYTES each; who was cancelled is left out."""
    some: list[Pending] = []
    size_bytes = 0
    for pending in waiting:
        if pending.future.done():
            continue
        if len(some) == limit or size_bytes > MAX_ENTRY_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(pending)
        size_bytes += len(pending.raw["body"])
    if some:
        yield some


def _not_accepted(reply: CommandError) -> CarpoolError:
    if reply.code == "OOM":
        return ResourceExhaustedError(f"Redis is out of memory: {reply}")
    return UnavailableError(f"Redis did not accept the request: {reply}")
