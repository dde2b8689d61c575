"""The two connections of a producer: a pipelined writer and a reader, and how they are restored.

    send() -> outbox -> writer: XADD of each entry
                        reader: XREAD of this producer's reply streams -> on_results

All results of a batch arrive in one entry. When one connection is lost, both are opened anew. Entries for
which Redis has not replied are sent again with the same correlation IDs; a second result for one of them is
ignored. Reading resumes after the last entry read, so results written in the meantime are found. A connection
that proves useless, because the server is a replica, say, is lost again at once: the pauses between such
connections grow all the same.

Requests of many callers are written together. What cannot be encoded fails alone.

With a `durability`, each write of requests ends with a command that makes Redis confirm it, and the next
requests are written when it has. Those that it does not confirm fail, and nobody knows what becomes of them.

A server that has started again, or another one after a failover, may lack writes that its predecessor had
accepted. Then all entries without a result are sent again, and reply streams are read from their starts.

Why: docs/decisions/0065.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from carpool.backoff import with_jitter
from carpool.client.durability import Durability
from carpool.client.entries import (
    MAX_WITHDRAWN_IDS,
    Channel,
    OutgoingEntry,
    SequencesEnded,
    withdraw_command,
)
from carpool.client.reply_reads import READ_BLOCK_MS, ReplyReads, on_trimmed
from carpool.errors import (
    CarpoolError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
    UnconfirmedError,
    UnimplementedError,
)
from carpool.store.async_link import AsyncLink, encoded
from carpool.store.connection import Argument, Command, CommandError, LinkError

SILENCE_MAX_S: Final = 10.0  # several times READ_BLOCK_MS, after which Redis replies even without results
SILENCE_CHECK_S: Final = 1.0
TRIM_ENTRIES: Final = 32
OUTBOX_CHECKED_MIN: Final = 256  # entries
OUTBOX_BYTES_MAX: Final = 256 * 1024 * 1024  # of bodies that wait until there is a connection
OUTBOX_REQUESTS_MAX: Final = 1_000_000
CONGESTION_PAUSE_S: Final = 0.001
STABLE_S: Final = 1.0  # a connection that lasted as long was no useless one
_RECONNECT_PAUSES_S: Final = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


class _Transaction:
    """An entry that is sent in a transaction, and Redis's replies to its commands, from MULTI to EXEC."""

    __slots__ = ("_replies_left", "entry", "error")

    def __init__(self, entry: OutgoingEntry, commands: int) -> None:
        self.entry = entry
        self.error: CommandError | None = None  # the first; that of EXEC only says that there was one
        self._replies_left = commands

    def on_reply(self, reply: Any) -> bool:
        """Take the next reply. Returns whether it is the last."""
        self._replies_left -= 1
        if self.error is None:
            results = reply if isinstance(reply, list) else (reply,)  # a list: those of EXEC
            self.error = next((result for result in results if isinstance(result, CommandError)), None)
        return not self._replies_left


class _Confirmation(NamedTuple):
    """The entries that Redis is to confirm."""

    entries: Sequence[OutgoingEntry]


class _Trimming(NamedTuple):
    """The channel of which Redis is to remove all entries up to this ID."""

    channel: Channel
    up_to: str


# What Redis's reply to a command concerns: an entry of requests, the confirmation of several, a caller of
# `call`, a channel that is trimmed, or nothing.
_Waiter = OutgoingEntry | _Transaction | _Confirmation | _Trimming | asyncio.Future[Any] | None


class Transport:
    """Sends entries of requests and receives results.

    `on_results` is called with the fields of each entry of a reply stream: field, value, field, value. It
    returns whether there were chunks in it.
    `on_rejected` is called with each entry that Redis did not accept, and `on_unconfirmed` with each that it
    may have accepted before a connection was lost, and that is sent again. `unanswered` returns all entries
    of which a request has no result. `key`: of a cluster, the node is used that has this key.
    """

    def __init__(
        self,
        url: str,
        on_results: Callable[[Sequence[bytes]], bool],
        on_rejected: Callable[[OutgoingEntry, CarpoolError], None],
        on_unconfirmed: Callable[[OutgoingEntry], None],
        unanswered: Callable[[], Iterable[OutgoingEntry]],
        durability: Durability,
        key: str = "",
    ) -> None:
        self._url = url
        self._durability = durability
        self._is_confirming = False  # Redis has not replied to the last command that confirms entries
        self._key = key
        self._on_results = on_results
        self._on_rejected = on_rejected
        self._on_unconfirmed = on_unconfirmed
        self._unanswered = unanswered
        self._server_run: str | None = None  # of the last connection
        self._reads = ReplyReads()
        self._outbox: list[OutgoingEntry | SequencesEnded] = []  # to be written with the next flush
        self._commands: list[tuple[Command, asyncio.Future[Any] | None]] = []
        self._waiters: deque[_Waiter] = deque()  # one for each command without a reply, oldest first
        self._reconnecting: asyncio.Future[None] | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._unanswered_since_s: float | None = None  # since when the writer has had unanswered commands
        self._unsent_bytes = 0  # of the writer, when that was checked last
        self._outbox_checked_at = OUTBOX_CHECKED_MIN  # entries
        self._outbox_requests = self._outbox_bytes = 0  # while there is no connection
        self.is_full = False  # there is no connection, and no more requests are accepted
        self._flush_scheduled = False
        self._connected = False
        self._connected_at_s = 0.0
        self._has_accepted = False  # Redis has accepted an entry over this connection
        self._reconnections = 0  # in a row, without a connection that was of use
        self._closed = False
        self.connection_error: LinkError | None = None  # why there is no connection; None while there is one
        self.losses = 0  # how often a connection was lost, and entries were perhaps sent twice

    # --- used by AsyncClient -------------------------------------------------------------------------------

    async def open(self, name: str) -> None:
        """Connect, with reply streams of this name. Raises LinkError, and UnimplementedError if Redis cannot
        give the durability."""
        self._name = name
        self._loop = asyncio.get_running_loop()
        await self._connect()
        self._check_silence()
        if self._durability.probe is not None:
            reply = await self.call_again(*self._durability.probe)
            if isinstance(reply, CommandError):
                await self.close()
                detail = self._durability.missing(reply)
                raise (PermissionDeniedError if reply.code == "NOPERM" else UnimplementedError)(detail)

    async def close(self) -> None:
        """Disconnect, and fail the calls that have no reply. What was withdrawn before this is sent."""
        if self._flush_scheduled:
            await asyncio.sleep(0)  # the flush is earlier in the next iteration
        was_connected = self._connected
        self._disconnect()
        if was_connected:
            await asyncio.sleep(0)  # the sockets are closed in the next iteration of the event loop
        self._fail_calls("the client was closed before Redis replied")

    def _fail_calls(self, why: str) -> None:
        calls = [waiter for waiter in self._waiters if isinstance(waiter, asyncio.Future)]
        for call in [*calls, *(call for _, call in self._commands)]:
            if call is not None and not call.done():
                call.set_exception(UnavailableError(why))

    def abandon(self) -> None:
        """As `close`, without waiting: nobody has the client any more."""
        if self._flush_scheduled:
            self._loop.call_soon(self._disconnect)
        else:
            self._disconnect()

    def disown(self) -> None:
        """As `abandon`, in the child of a fork: the connections are its parent's, which keeps them."""
        if self._connected:
            self._writer.disown()
            self._reader.disown()
        self._disconnect()
        self._fail_calls("this process was forked before Redis replied")

    def _disconnect(self) -> None:
        self._closed = True
        for scheduled in (self._silence_timer, self._reconnecting):
            if scheduled is not None:
                scheduled.cancel()
        if self._connected:
            self._connected = False
            self._writer.close()
            self._reader.close()

    def add_channel(self, channel: Channel) -> None:
        """Read this channel's results from now on."""
        self._reads.channels.append(channel)
        if not self._connected:
            return
        if not self._reads.is_under_way:
            self._read_results()
        elif self._reader.identity is not None:  # end the XREAD under way, which lacks the new stream
            self._enqueue_command(("CLIENT", "UNBLOCK", self._reader.identity), None)

    def send(self, entries: Iterable[OutgoingEntry | SequencesEnded]) -> None:
        """Send entries: at once, if there is a connection that keeps up."""
        before = len(self._outbox)
        self._outbox += entries
        if not self._connected:
            self._count(self._outbox[before:])
        elif not self._flush_scheduled:
            self._flush()

    def _count(self, entries: Iterable[OutgoingEntry | SequencesEnded]) -> None:
        """Count entries that are to wait for a connection."""
        self._outbox_requests += sum([entry.size for entry in entries])
        self._outbox_bytes += sum([entry.size_bytes for entry in entries])
        self.is_full = self._outbox_bytes > OUTBOX_BYTES_MAX or self._outbox_requests > OUTBOX_REQUESTS_MAX

    def full_error(self) -> UnavailableError:
        """Why no more requests are accepted."""
        return UnavailableError(
            f"no connection to Redis ({self.connection_error}), and {self._outbox_requests} requests of "
            f"{self._outbox_bytes} bytes already wait to be sent: try again later"
        )

    def drop_unawaited(self) -> None:
        """Requests timed out or were cancelled: while there is no connection, entries that nobody awaits do
        not pile up. O(1) for each entry on average."""
        if self.is_full or len(self._outbox) >= self._outbox_checked_at:
            self._outbox = [entry for entry in self._outbox if entry.is_wanted]
            self._outbox_checked_at = 2 * len(self._outbox) + OUTBOX_CHECKED_MIN
            self._outbox_requests = self._outbox_bytes = 0
            self._count(() if self._connected else self._outbox)

    def withdraw(self, channel: Channel, correlation_ids: Iterable[str]) -> None:
        """Withdraw requests that were sent: their results are no longer wanted."""
        if not self._closed:
            channel.withdrawn_ids += correlation_ids
            self._schedule_flush()

    def call(self, *command: Argument) -> asyncio.Future[Any]:
        """Send any other command. Its reply may be a CommandError."""
        future = self._loop.create_future()
        self._enqueue_command(command, future)
        return future

    async def call_again(self, *command: Argument, key: str = "") -> Any:
        """As `call`, for a command that may be repeated: again and again, if a connection is lost meanwhile.
        `key`: see ClusterTransport. Raises UnavailableError if the client is closed."""
        while True:
            try:
                return await self.call(*command)
            except LinkError:
                continue  # it is sent once there is a connection again

    # --- connections ---------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        lost = self._on_connection_lost
        url, name, key = self._url, self._name, self._key
        writer = AsyncLink(url, name=f"{name}:w", on_reply=self._on_reply, on_lost=lost, key=key)
        reader = AsyncLink(url, name=f"{name}:r", on_reply=self._on_read, on_lost=lost, key=key)
        await writer.connect()
        try:
            await reader.connect()
        except BaseException:  # also if this is cancelled
            writer.close()
            raise
        if self._closed:
            writer.close()
            reader.close()
            raise LinkError("the client was closed before it was connected")
        self._writer, self._reader = writer, reader
        self._connected, self._has_accepted = True, False
        self._connected_at_s = self._loop.time()
        self.connection_error = None
        self._outbox_requests = self._outbox_bytes = 0
        self.is_full = False
        self._unanswered_since_s = None
        self._is_confirming = False
        self._follow_server(writer.server_run)
        self._read_results()
        self._schedule_flush()

    def _follow_server(self, server_run: str | None) -> None:
        """If this is another server than before, or another run of it: send again what has no result, and
        read reply streams from their starts, because its clock may be behind."""
        before, self._server_run = self._server_run, server_run
        if server_run is None or before != server_run:
            self._reads.on_another_server()
        if before is None or server_run is None or before == server_run:
            return
        unsent = set(self._outbox)
        self._send_again([entry for entry in self._unanswered() if entry.sent and entry not in unsent])

    def _send_again(self, entries: Sequence[OutgoingEntry]) -> None:
        """Send these before all others, whether Redis has accepted them or not."""
        for entry in entries:
            self._on_unconfirmed(entry)
        self._outbox[:0] = entries

    def _on_connection_lost(self, error: LinkError) -> None:
        """Close the other connection too, send again what may not have arrived, and reconnect."""
        if not self._connected:
            return
        self._connected = False
        self.losses += 1
        self.connection_error = error
        self._reads.on_lost()
        if self._loop.time() - self._connected_at_s > STABLE_S:
            self._reconnections = 0
        self._writer.close()
        self._reader.close()
        waiters, self._waiters = self._waiters, deque()
        self._send_again(list(dict.fromkeys(entry for waiter in waiters for entry in _entries_of(waiter))))
        for waiter in waiters:
            if isinstance(waiter, asyncio.Future) and not waiter.done():
                waiter.set_exception(error)
        if not self._closed:
            self._reconnecting = asyncio.ensure_future(self._reconnect())

    async def _reconnect(self) -> None:
        while True:
            pause_s = _RECONNECT_PAUSES_S[min(self._reconnections, len(_RECONNECT_PAUSES_S) - 1)]
            self._reconnections += 1
            await asyncio.sleep(with_jitter(pause_s))
            try:
                await self._connect()
            except LinkError as error:
                self.connection_error = error
            else:
                return

    def _check_silence(self) -> None:
        """Once a second: give up the connections if one has been silent for too long; trim what was read."""
        self._silence_timer = self._loop.call_later(SILENCE_CHECK_S, self._check_silence)
        if not self._connected:
            return
        if self._is_silent(self._loop.time()):
            self._on_connection_lost(
                LinkError(f"Redis sent nothing for {SILENCE_MAX_S:g} s, so the connection was closed")
            )
        elif not self._is_confirming and any(channel.untrimmed_entries for channel in self._reads.channels):
            self._writer.write(self._parts_to_write(trim=True))

    def _is_silent(self, now_s: float) -> bool:
        """Whether a reply has been due for too long. A connection may be dead without being closed."""
        unsent_bytes = self._writer.unsent_bytes
        if not self._waiters:
            self._unanswered_since_s = None
        elif self._unanswered_since_s is None or unsent_bytes < self._unsent_bytes:  # a slow one may go on
            self._unanswered_since_s = now_s
        self._unsent_bytes = unsent_bytes
        if self._reads.is_under_way and now_s - self._reader.heard_s > SILENCE_MAX_S:
            return True
        since_s = self._unanswered_since_s
        return since_s is not None and now_s - max(since_s, self._writer.heard_s) > SILENCE_MAX_S

    # --- writing -------------------------------------------------------------------------------------------

    def _enqueue_command(self, command: Command, call: asyncio.Future[Any] | None) -> None:
        self._commands.append((command, call))
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        """Flush after everything that is ready in this iteration of the event loop has run."""
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if not self._connected or self._is_confirming:
            return
        if self._writer.congested:
            self._flush_scheduled = True
            self._loop.call_later(CONGESTION_PAUSE_S, self._flush)
            return
        parts = self._parts_to_write()
        if parts:
            self._writer.write(parts)

    def _parts_to_write(self, *, trim: bool = False) -> list[bytes]:
        """Everything to be written now, encoded. Appends a waiter for each command, in the same order."""
        parts: list[bytes] = []
        written = self._encode_outbox(parts)
        if written and self._durability.command is not None:
            parts += encoded([self._durability.command])
            self._waiters.append(_Confirmation(written))
            self._is_confirming = True
        commands, self._commands = self._commands, []
        for command, call in commands:
            try:
                parts += encoded([command])
            except Exception as error:
                if call is not None and not call.done():
                    call.set_exception(_not_encodable(f"the arguments of {command[0]!r}", error))
            else:
                self._waiters.append(call)
        for channel in self._reads.channels:
            if channel.untrimmed_entries >= TRIM_ENTRIES or channel.has_chunks or trim:
                parts += encoded([_trim(channel)])
                self._waiters.append(_Trimming(channel, channel.last_id))
            while channel.withdrawn_ids:
                parts += encoded([_withdraw(channel)])
                self._waiters.append(None)
        return parts

    def _encode_outbox(self, parts: list[bytes]) -> list[OutgoingEntry]:
        """Add what is in the outbox to the parts. Returns the entries of requests among it.

        An entry that cannot be encoded fails alone: it would fail each time, and those that are written with
        it belong to others.
        """
        written: list[OutgoingEntry] = []
        unencodable: list[tuple[OutgoingEntry, InvalidArgumentError]] = []
        outbox, self._outbox = self._outbox, []
        for entry in outbox:
            try:
                commands = entry.commands(self._name)
                entry_parts = encoded(commands)
            except Exception as error:
                if isinstance(entry, OutgoingEntry):
                    unencodable.append((entry, _not_encodable("the request", error)))
                continue
            if commands:
                entry.sent = True
                parts += entry_parts
                self._waiters.append(_waiter(entry, len(commands)))
                if isinstance(entry, OutgoingEntry):
                    written.append(entry)
        for failed, why in unencodable:
            self._on_rejected(failed, why)
        return written

    def _on_reply(self, reply: Any) -> None:
        """Redis's reply to the oldest command without one."""
        waiter = self._waiters[0]
        if isinstance(waiter, _Transaction):
            if not waiter.on_reply(reply):
                return
            reply, waiter = waiter.error, waiter.entry
        self._waiters.popleft()
        if isinstance(waiter, OutgoingEntry):
            if isinstance(reply, CommandError):
                self._on_rejected(waiter, failure("Redis did not accept the request", reply))
            else:
                self._has_accepted = True
        elif isinstance(waiter, _Confirmation):
            if missing := self._durability.missing(reply):
                for entry in waiter.entries:
                    self._on_rejected(entry, UnconfirmedError(missing))
            self._is_confirming = False
            self._schedule_flush()
        elif isinstance(waiter, _Trimming):
            if not isinstance(reply, CommandError):
                on_trimmed(*waiter)
        elif waiter is not None and not waiter.done():
            waiter.set_result(reply)

    # --- reading -------------------------------------------------------------------------------------------

    def _read_results(self) -> None:
        """Ask Redis for the next results of every channel; it replies as soon as there are any."""
        if self._reads.channels and self._connected:
            self._reader.write(encoded([self._reads.next_command(READ_BLOCK_MS)]))

    def _on_read(self, reply: Any) -> None:
        """The reply to XREAD; None if no results arrived within READ_BLOCK_MS."""
        if isinstance(reply, CommandError):
            if reply.code == "NOPERM":  # another connection will not help
                error = failure("the results cannot be read, whatever became of the request", reply)
                for entry in self._unanswered():
                    self._on_rejected(entry, error)
            self._on_connection_lost(LinkError(f"cannot read the reply stream: {reply}"))
            return
        read = self._reads.on_reply(reply)
        if read and self._has_accepted:
            self._reconnections = 0
        for channel, entries in read:
            for _, flat in entries:
                if self._on_results(flat):
                    channel.has_chunks = True
            if channel.has_chunks:  # at once: to a worker, what is in the stream is unread
                self._schedule_flush()
        # Not at once: the callers that have just got their results come first.
        self._loop.call_soon(self._read_results)


def _waiter(entry: OutgoingEntry | SequencesEnded, commands: int) -> _Waiter:
    """What Redis's replies to the commands of an entry concern. One that ends sequences is not sent again: a
    sequence of the same name may have begun after it."""
    if isinstance(entry, SequencesEnded):
        return None
    return entry if commands == 1 else _Transaction(entry, commands)


def _entries_of(waiter: _Waiter) -> Sequence[OutgoingEntry]:
    """The entries that Redis has not confirmed, if it does not reply to this."""
    if isinstance(waiter, _Confirmation):
        return waiter.entries
    if isinstance(waiter, _Transaction):
        return (waiter.entry,)
    return (waiter,) if isinstance(waiter, OutgoingEntry) else ()


def _trim(channel: Channel) -> Command:
    """An XTRIM of the entries that were read."""
    channel.untrimmed_entries = 0
    channel.has_chunks = False
    milliseconds, _, number = channel.last_id.partition("-")
    return ("XTRIM", channel.replies, "MINID", f"{milliseconds}-{int(number) + 1}")


def _withdraw(channel: Channel) -> Command:
    """An XADD that withdraws the first requests of the channel's list, and removes them from it."""
    ids = channel.withdrawn_ids[:MAX_WITHDRAWN_IDS]
    channel.withdrawn_ids = channel.withdrawn_ids[MAX_WITHDRAWN_IDS:]
    return withdraw_command(channel.keys, ids)


def _not_encodable(what: str, error: Exception) -> InvalidArgumentError:
    return InvalidArgumentError(f"{what} cannot be encoded: {error}")


def failure(what: str, reply: CommandError) -> CarpoolError:
    """The error for what Redis did not do: `what`, a sentence without its end."""
    if reply.code == "OOM":
        return ResourceExhaustedError(f"Redis is out of memory: {reply}")
    kind = PermissionDeniedError if reply.code == "NOPERM" else UnavailableError
    return kind(f"{what}: {reply}")
