"""What to ask of a producer's reply streams next: which streams, after which IDs, how much. No I/O.

Redis sends a whole reply, and closes connections whose replies are too large for it
(`client-output-buffer-limit`, `maxmemory-clients`). It does not tell the size of an entry without sending it.
So as many entries are asked for as READ_BYTES allow by the size of the latest ones. After a connection was
lost, these may have been larger than was known, and Redis may allow less: so far fewer entries are asked for,
and in the long run half of the bytes. Where one entry of each stream may be too much, streams are read in
turn.

A cursor is the ID of the last entry that was read. IDs come from the clock of the server: they can begin
anew, and lower, where a stream does, on a server whose clock is behind. Two rules keep what is unread from
being behind a cursor: it is reset once everything up to it has been removed, and on another server.

Why: docs/decisions/0078.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from carpool.client.entries import Channel
from carpool.store.connection import Command
from carpool.store.reader import SMALLER_AT_ONCE, RawEntry, mean_bytes

READ_BLOCK_MS: Final = 2000
READ_ENTRIES: Final = 64  # of a stream in one reply, at most
READ_BYTES: Final = 8 * 1024 * 1024  # in one reply, about, at most
READ_BYTES_MIN: Final = 64 * 1024  # after many losses
ENTRY_BYTES_UNKNOWN: Final = READ_BYTES // 8  # until the first entry was read
FEWER_AFTER_LOSS: Final = 8  # entries, by this factor
TWICE_AFTER: Final = 64  # replies that had all that was asked for: then more is tried again
FROM_THE_START: Final = "0-0"


class ReplyReads:
    """The XREADs of one connection, one after the other, over the reply streams of `channels`."""

    def __init__(self) -> None:
        self.channels: list[Channel] = []
        self._asked: dict[bytes, Channel] = {}  # those of the XREAD under way
        self._entry_bytes = ENTRY_BYTES_UNKNOWN  # on average, in the latest replies
        self._read_bytes = READ_BYTES  # in one reply, about
        self._full_replies = 0  # since that was changed
        self._count = READ_ENTRIES
        self._at = 0  # in a round over the channels: the one to be read next
        self._round_found = False  # whether this round has found anything

    @property
    def is_under_way(self) -> bool:
        """Whether an XREAD was sent over this connection."""
        return bool(self._asked)

    def next_command(self, block_ms: int) -> Command:
        """The next XREAD. Over all streams it waits for `block_ms`; over some of them it does not wait."""
        together = max(1, self._read_bytes // self._entry_bytes)  # streams, of one entry each
        channels = self._next_in_round(together) if together < len(self.channels) else self.channels
        options: tuple[Any, ...] = ()
        if not channels or channels is self.channels:
            channels, options = self.channels, ("BLOCK", block_ms)
        self._count = max(1, min(READ_ENTRIES, together // len(channels)))
        self._asked = {channel.replies: channel for channel in channels}
        last_ids = [channel.last_id for channel in channels]
        return ("XREAD", "COUNT", self._count, *options, "STREAMS", *self._asked, *last_ids)

    def _next_in_round(self, size: int) -> list[Channel]:
        """The channels to be read next without waiting; none after a round that has found nothing."""
        if self._at >= len(self.channels):
            self._at = 0
            found, self._round_found = self._round_found, False
            if not found:
                return []
        group = self.channels[self._at : self._at + size]
        self._at += size
        return group

    def on_reply(
        self, reply: Sequence[tuple[bytes, list[RawEntry]]] | None
    ) -> list[tuple[Channel, list[RawEntry]]]:
        """The entries of a reply, by channel. Moves the cursors, and learns how large entries are."""
        read = [(self._asked[stream], entries) for stream, entries in reply or () if entries]
        for channel, entries in read:
            channel.last_id = entries[-1][0].decode()
            channel.untrimmed_entries += len(entries)
            self._entry_bytes = max(mean_bytes(entries), self._entry_bytes // SMALLER_AT_ONCE)
            self._round_found = True
        if read and self._read_bytes < READ_BYTES and len(read[0][1]) == self._count < READ_ENTRIES:
            self._full_replies += 1
            if self._full_replies >= TWICE_AFTER:
                self._read_bytes, self._full_replies = min(READ_BYTES, 2 * self._read_bytes), 0
        return read

    def on_lost(self) -> None:
        """The connection was lost, perhaps because the reply was too large: ask for far less."""
        if self._asked:
            at_once = max(1, self._count * len(self._asked) // FEWER_AFTER_LOSS)  # entries
            self._read_bytes, self._full_replies = max(READ_BYTES_MIN, self._read_bytes // 2), 0
            self._entry_bytes = max(self._entry_bytes, self._read_bytes // at_once)
            self._asked = {}

    def on_another_server(self) -> None:
        """Read each stream from its start. What was read before is read again, as far as it is there."""
        for channel in self.channels:
            channel.last_id = FROM_THE_START
            channel.untrimmed_entries = 0  # to be removed once it is read again, not before
            channel.has_chunks = False


def on_trimmed(channel: Channel, up_to: str) -> None:
    """Redis has removed all entries up to this ID: whatever is in the stream now is unread."""
    if channel.last_id == up_to:
        channel.last_id = FROM_THE_START
