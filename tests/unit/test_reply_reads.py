"""Reply streams are read however large their results are, and wherever their IDs begin."""

from __future__ import annotations

from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.client.entries import Channel
from carpool.client.reply_reads import (
    FROM_THE_START,
    READ_BYTES,
    READ_ENTRIES,
    TWICE_AFTER,
    ReplyReads,
    on_trimmed,
)
from carpool.keys import Keys

BLOCK_MS: Final = 2000


class Streams:
    """Redis with reply streams; it closes the connection at a reply of more than `limit_bytes`."""

    def __init__(self, limit_bytes: int, sizes: list[list[int]]) -> None:
        self.limit_bytes = limit_bytes
        self.entries = {
            f"s{number}".encode(): [(b"%d-0" % (at + 1), size) for at, size in enumerate(of_stream)]
            for number, of_stream in enumerate(sizes)
        }
        self.commands: list[tuple[Any, ...]] = []

    def reply(self, command: Any) -> list[Any] | None:
        """The reply to an XREAD, with the sizes in place of the values; None: the connection is closed."""
        self.commands.append(command)
        at = command.index("STREAMS") + 1
        names, ids = command[at : at + (len(command) - at) // 2], command[at + (len(command) - at) // 2 :]
        found: list[Any] = []
        for name, last_id in zip(names, ids, strict=True):
            after = int(last_id.partition("-")[0])
            unread = self.entries[name][after : after + command[2]]
            found += [[name, [(entry_id, [Sized(size)]) for entry_id, size in unread]]] if unread else []
        size_bytes = sum(len(flat[0]) for _, entries in found for _, flat in entries)
        return found if size_bytes <= self.limit_bytes else None


class Sized:
    """A value of which only the size matters."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size


def reads_of(streams: Streams) -> ReplyReads:
    reads = ReplyReads()
    reads.channels += [Channel(Keys("m"), name, 64) for name in streams.entries]
    return reads


def read_all(reads: ReplyReads, streams: Streams) -> int:
    """Read until an XREAD that waits finds nothing. Returns how often the connection was lost."""
    losses = 0
    while True:
        command = reads.next_command(BLOCK_MS)
        reply = streams.reply(command)
        if reply is None:
            losses += 1
            reads.on_lost()
        elif not reads.on_reply(reply) and "BLOCK" in command:
            return losses


def assert_all_read(reads: ReplyReads, streams: Streams) -> None:
    for channel in reads.channels:
        entries = streams.entries[channel.replies]
        assert channel.last_id == (entries[-1][0].decode() if entries else FROM_THE_START)
        assert channel.untrimmed_entries == len(entries)


MIB: Final = 1 << 20


@given(
    st.lists(st.lists(st.sampled_from([100, MIB // 10, MIB, 2 * MIB, 16 * MIB]), max_size=150), max_size=5),
    st.sampled_from([16 * MIB, 20 * MIB, 200 * MIB]),
)
def test_everything_is_read_if_redis_can_send_each_entry(sizes: list[list[int]], limit_bytes: int) -> None:
    """Expect progress in each few XREADs, and a few losses for each result that is much larger."""
    sizes = sizes or [[]]
    streams = Streams(limit_bytes, sizes)
    reads = reads_of(streams)
    losses = read_all(reads, streams)
    assert_all_read(reads, streams)
    entries = sum(map(len, sizes))
    assert losses <= 3 * (1 + sum(size > MIB for of_stream in sizes for size in of_stream))
    assert len(streams.commands) <= 2 + losses + (entries + 1) * (len(sizes) + 1)


def test_small_results_are_read_many_at_a_time() -> None:
    streams = Streams(READ_BYTES, [[1000] * 6400])
    reads = reads_of(streams)
    assert read_all(reads, streams) == 0
    assert_all_read(reads, streams)
    assert len(streams.commands) < 110
    assert streams.commands[-1][2] == READ_ENTRIES


def test_large_results_are_read_by_their_size() -> None:
    streams = Streams(READ_BYTES + 2 * MIB, [[2 * MIB] * 64])
    reads = reads_of(streams)
    assert read_all(reads, streams) == 1, "their size was unknown"
    assert streams.commands[-1][2] <= READ_BYTES // (2 * MIB)


def test_where_redis_sends_little_at_once_that_is_learned() -> None:
    """Expect a loss for each attempt to read more, and few attempts."""
    streams = Streams(2 * MIB, [[1000] * 64 + [1_500_000] * 1000])
    reads = reads_of(streams)
    assert read_all(reads, streams) <= 2 + 1000 // TWICE_AFTER
    assert_all_read(reads, streams)


def test_after_losses_for_other_reasons_as_much_is_read_as_before() -> None:
    streams = Streams(READ_BYTES, [[100] * 2000, [100] * 2000])
    reads = reads_of(streams)
    for _ in range(20):
        reads.next_command(BLOCK_MS)
        reads.on_lost()
    assert reads.next_command(BLOCK_MS)[2] == 1
    assert read_all(reads, streams) == 0
    assert streams.commands[-1][2] == READ_ENTRIES
    assert len(streams.commands) < 110


@pytest.mark.parametrize("read_meanwhile", [False, True])
def test_what_is_left_after_all_was_removed_is_unread(read_meanwhile: bool) -> None:
    """Given a trimmed stream, expect it to be read from the start, unless it was read meanwhile."""
    streams = Streams(READ_BYTES, [[100, 100]])
    reads = reads_of(streams)
    (channel,) = reads.channels
    read_all(reads, streams)
    up_to = channel.last_id
    if read_meanwhile:
        streams.entries[b"s0"].append((b"3-0", 100))
        read_all(reads, streams)
    on_trimmed(channel, up_to)
    assert channel.last_id == ("3-0" if read_meanwhile else FROM_THE_START)


def test_another_server_is_read_from_the_start_and_trimmed_only_as_it_is_read() -> None:
    reads = ReplyReads()
    channel = Channel(Keys("m"), b"s0", 64, last_id="900-0", untrimmed_entries=5, has_chunks=True)
    reads.channels.append(channel)
    reads.on_another_server()
    assert (channel.last_id, channel.untrimmed_entries, channel.has_chunks) == (FROM_THE_START, 0, False)
