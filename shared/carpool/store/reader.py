"""Reads what is new in the request and settled streams of all models, over three connections.

That a batch settled matters to a model only while requests wait, or when the next one arrives. So an XREAD
waits for all request streams, and for the settled streams of those models only that await them. A second
XREAD over the other settled streams, which does not wait, follows in the same write: Redis runs it when the
first one returns, and sends both replies together. So a request arrives with all that settled before it, and
a batch that settles does not wake the batcher just when producers and workers need the processor.

While no process can take a batch, to read each request when it arrives would wake the batcher for nothing.
Then a third connection waits for batches that settle, and what has arrived is read when one did, or when it
is time (`StreamReader.read`). An XREAD over request streams that waits in Redis already cannot be
interrupted, and so a request still ends that one.

A blocking XREAD costs Redis and its caller time for each stream in it. So one connection reads the few busy
models, and another waits for the idle ones. A model is moved between them with `set_busy`, which may happen
while the XREADs of both wait in Redis with the models as they were. Two rules keep every entry from being
lost, or read twice:

- A model that was moved is still read by its previous connection until an XREAD of the other one includes
  it. So there is no moment at which nobody reads it.
- Several connections may return the same entries. Each stream has one cursor, and entries up to it are
  dropped. As each reply has all entries after the ID that its XREAD named, what remains has no gap.

Producers may send entries of any size, up to Redis's 512 MiB for a string, and Redis does not tell the size
of an entry without sending it. So a reply is bounded in four ways:

- By the mean size of the latest entries it is known how many to ask for.
- If it is much larger all the same, the connection is closed, and few entries are asked for.
- After a connection was lost while a reply was due, half of the bytes are asked for: Redis may have closed it
  because of its own limits (`maxmemory-clients`, `client-output-buffer-limit`), and never tells.
- A reply with few entries, which may be large, is parsed so that no more is kept than one valid entry may
  have. What does not fit is read again later, and an entry that alone is larger is not kept at all.

A subscription that ended, and a later one to the same model, are different: a reply belongs to that for which
its XREAD was sent.

Why: docs/decisions/0046.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any, Final, NamedTuple

from carpool.keys import Keys
from carpool.store.connection import Argument, CommandError, Link, LinkError, readable_links
from carpool.store.redis_socket import ReplyTooLargeError
from carpool.store.truncated_replies import LARGE_BYTES, Omitted
from carpool.wire.request_fields import MAX_PACKED_BYTES

RawEntry = tuple[bytes, list[bytes]]  # ID, and field, value, field, value, ...

ENTRIES_MAX: Final = 256  # of a stream in one reply
READ_BYTES: Final = 32 * 1024 * 1024  # in one reply, about
ENTRY_BYTES_UNKNOWN: Final = READ_BYTES // 8  # until the first entry was read
SURPRISE_BYTES: Final = 2 * READ_BYTES  # a reply of this size is not received
FEW_ENTRIES: Final = 16  # if fewer are asked for, because of their size, what is kept of the reply is limited
# The most that a valid entry may have: one that was put back, and its other fields.
ENTRY_BYTES_MAX: Final = 2 * MAX_PACKED_BYTES + 2 * 1024 * 1024
SMALLER_AT_ONCE: Final = 4  # by this factor: a large entry may stand behind many small ones
FIELD_CHARS_SHOWN: Final = 60  # of the name of a field that is too large
READ_BYTES_MIN: Final = 1 << 20  # in one reply, after any number of lost connections
FULL_REPLIES: Final = 64  # as many as were asked for, until twice as many bytes are asked for again
ENTRY_SIZES_KEPT: Final = 1000  # of models that are not read any more
BUSY_BLOCK_MS: Final = 100  # how long a model that became busy is also waited for with the idle ones, at most
IDLE_BLOCK_MS: Final = 1000


class ReadSizes:
    """How much to ask Redis for, as learned. It outlives readers: a new one must not ask for what cost the
    last one its connection. `read_bytes`: in one reply, about."""

    def __init__(self) -> None:
        self.read_bytes = READ_BYTES
        self._full_replies = 0
        self._entry_bytes: dict[str, int] = {}  # by request stream

    def connection_lost(self) -> None:
        """A connection was lost while a reply was due."""
        self.read_bytes = max(READ_BYTES_MIN, self.read_bytes // 2)
        self._full_replies = 0

    def full_reply(self) -> None:
        """As many entries were received as were asked for."""
        if self.read_bytes < READ_BYTES:
            self._full_replies += 1
            if self._full_replies >= FULL_REPLIES:
                self.read_bytes, self._full_replies = 2 * self.read_bytes, 0

    def keep(self, stream: str, entry_bytes: int) -> None:
        """The latest entries of this stream, which is not read any more, have this mean size."""
        self._entry_bytes[stream] = entry_bytes
        if len(self._entry_bytes) > ENTRY_SIZES_KEPT:
            del self._entry_bytes[next(iter(self._entry_bytes))]

    def take(self, stream: str) -> int:
        """The mean size that was kept; ENTRY_BYTES_UNKNOWN if none was."""
        return self._entry_bytes.pop(stream, ENTRY_BYTES_UNKNOWN)


class Subscription:
    """The streams of one model, and how far they have been read.

    `awaits_settled`: whether a batch that settles ends a wait, from the next XREAD over busy models on.
    Otherwise it is read together with the next request, or after BUSY_BLOCK_MS. `has_more`: whether Redis may
    have more requests, because the latest reply had as many as were asked for. `takes_requests`: whether
    requests are to be read; if not, the next XREADs leave them in Redis, and do not wait. `home`: the watch
    that is to read it; None: it ended.
    """

    __slots__ = (
        "awaits_settled",
        "entry_bytes",
        "has_more",
        "home",
        "requests",
        "settled",
        "takes_requests",
    )

    def __init__(self, keys: Keys, settled_after: bytes, entry_bytes: int = ENTRY_BYTES_UNKNOWN) -> None:
        self.requests = StreamCursor(self, keys.requests, b"0-0")
        self.settled = StreamCursor(self, keys.settled, settled_after)
        self.awaits_settled = False
        self.has_more = False
        self.takes_requests = True
        self.entry_bytes = entry_bytes  # of a request entry, on average in the latest replies
        self.home: _Watch | None = None


class StreamCursor:
    """One stream of a subscription. `after` is its cursor: the ID of the last entry that was read."""

    __slots__ = ("after", "name", "subscription")

    def __init__(self, subscription: Subscription, name: str, after: bytes) -> None:
        self.subscription = subscription
        self.name = name
        self.after = after

    def unread(self, entries: list[RawEntry], asked_after: bytes) -> list[RawEntry]:
        """Those of these entries that were not read yet, and moves the cursor. XREAD named `asked_after`."""
        if asked_after is not self.after:  # another connection has read of this stream since
            last_read = id_order(self.after)
            if (
                id_order(asked_after) > last_read
            ):  # it was rewound since, and what is between would be missing
                return []
            entries = [entry for entry in entries if id_order(entry[0]) > last_read]
        if entries:
            self.after = entries[-1][0]
        return entries

    def rewind(self, after: bytes) -> None:
        """Read again what comes after this ID."""
        self.after = after


class OversizedEntry(NamedTuple):
    """An entry of the request stream of more than ENTRY_BYTES_MAX: its small fields, the name of the largest
    one, and the size of them all."""

    entry_id: bytes
    flat: list[bytes]
    field: bytes
    size_bytes: int


class Arrived(NamedTuple):
    """New entries of a model, of either stream."""

    requests: list[RawEntry]
    settled: list[RawEntry]
    oversized: list[OversizedEntry]


class ReadResult(NamedTuple):
    """What was read, and which models cannot be read, by subscription."""

    arrived: dict[Subscription, Arrived]
    failed: dict[Subscription, CommandError]


class StreamReader:
    """Reads the streams of many models. Not for two threads. After a LinkError, close it and make another."""

    def __init__(
        self,
        url: str,
        name: str,
        *,
        key: str = "",
        sizes: ReadSizes | None = None,
        busy_block_ms: int = BUSY_BLOCK_MS,
        idle_block_ms: int = IDLE_BLOCK_MS,
    ) -> None:
        """`key`: of a cluster, any key of the models, which all have one hash slot. `sizes`: what readers
        before this one have learned."""
        self._sizes = sizes or ReadSizes()
        busy = Link(url, name=f"{name}:reads", reply_bytes_max=SURPRISE_BYTES, key=key)
        idle = Link(url, name=f"{name}:idle", reply_bytes_max=SURPRISE_BYTES, key=key)
        settled = Link(url, name=f"{name}:settled", reply_bytes_max=SURPRISE_BYTES, key=key)
        self._busy = _Watch(busy, self._sizes, busy_block_ms, ENTRIES_MAX)
        # One entry is enough to learn that a model is busy, and a reply with many would be large.
        self._idle = _Watch(idle, self._sizes, idle_block_ms, 1, awaits_all_settled=True)
        self._busy.other, self._idle.other = self._idle, self._busy
        self._settled = _SettledWatch(settled, self._sizes, busy_block_ms, ENTRIES_MAX)
        self._settled.members = self._busy.members  # shared: each busy subscription belongs to both
        self._may_be_unread = False  # requests of busy models, although they are in Redis

    def subscribe(self, keys: Keys, settled_after: bytes) -> Subscription:
        """Read a model: its request stream from the start, `settled` after this ID.

        It begins as busy, with the next XREAD over the busy models: after BUSY_BLOCK_MS at most.
        """
        subscription = Subscription(keys, settled_after, self._sizes.take(keys.requests))
        self._busy.adopt(subscription)
        return subscription

    def end(self, subscription: Subscription) -> None:
        """Read this model no more. What arrives for it is dropped. May be called repeatedly."""
        if subscription.home is not None:
            self._sizes.keep(subscription.requests.name, subscription.entry_bytes)
        subscription.home = None
        self._busy.remove(subscription)
        self._idle.remove(subscription)

    def set_busy(self, subscription: Subscription, busy: bool) -> None:
        """Read this model together with the busy ones, or else with the idle ones."""
        home = self._busy if busy else self._idle
        if subscription.home is not home:
            home.adopt(subscription)

    def read(self, timeout_s: float, *, awaits_requests: bool = True) -> ReadResult:
        """Wait for new entries of any model up to `timeout_s`. A model that failed is not read any more.

        Without `awaits_requests`, a request of a busy model does not end the wait, unless an XREAD over it
        waits from before; a batch that settles does, and then all is read that has arrived. It is read at
        once when requests are awaited again. Raises LinkError, also if Redis does not answer although the
        time of an XREAD is over.
        """
        result = ReadResult({}, {})
        if not awaits_requests:
            self._settled.start()
        if awaits_requests or not self._settled.covers_all:
            self._read_unread(result)
            if not result.arrived:
                self._busy.start(blocks=self._busy.all_take_requests())
        else:
            self._may_be_unread = True
        self._idle.start()
        watches = [watch for watch in (self._busy, self._idle, self._settled) if watch.is_waiting]
        ready = readable_links([watch.link for watch in watches], 0.0 if result.arrived else timeout_s)
        for watch in watches:
            if watch.link in ready:
                watch.finish(result)
            else:
                watch.link.check_overdue()
        if any(arrived.settled for arrived in result.arrived.values()):
            self._read_unread(result)
        for subscription in result.failed:
            self.end(subscription)
        return result

    def _read_unread(self, result: ReadResult) -> None:
        """Read what arrived while requests were not awaited, without waiting for more."""
        if self._may_be_unread and not self._busy.is_waiting:
            self._busy.start(blocks=False)
            self._busy.finish(result)
        self._may_be_unread = False

    def close(self) -> None:
        """Close all connections. Not to be used again."""
        for watch in (self._busy, self._idle, self._settled):
            watch.link.close()


class _Xread:
    """An XREAD over some streams."""

    def __init__(self, streams: list[StreamCursor]) -> None:
        self.streams = streams
        self._names = [stream.name for stream in streams]
        self._by_name = {stream.name.encode(): index for index, stream in enumerate(streams)}
        self._afters: list[bytes] = []

    def command(self, *options: Argument) -> tuple[Argument, ...]:
        """The command, for what comes after the cursors as they are now."""
        self._afters = [stream.after for stream in self.streams]
        return ("XREAD", *options, "STREAMS", *self._names, *self._afters)

    def stream(self, name: bytes) -> StreamCursor:
        """The stream with this name."""
        return self.streams[self._by_name[name]]

    def forget_more(self) -> None:
        """The latest command was answered, so no subscription `has_more` unless the reply says so."""
        for stream in self.streams:
            subscription = stream.subscription
            if subscription.has_more and stream is subscription.requests:
                subscription.has_more = False

    def unread(
        self, reply: Sequence[tuple[bytes, list[RawEntry]]]
    ) -> list[tuple[StreamCursor, list[RawEntry]]]:
        """What a reply to the latest command has that was not read yet."""
        found = []
        for name, entries in reply:
            index = self._by_name[name]
            stream = self.streams[index]
            # Without entries, Redis woke us for some that were deleted before it read them
            if entries and stream.subscription.home is not None:
                unread = stream.unread(entries, self._afters[index])
                if unread:
                    found.append((stream, unread))
        return found


_Covered = tuple[Subscription, bool, bool]  # whether its requests are read, and whether it awaits `settled`


class _Watch:
    """One connection: a blocking XREAD over its members, and one that follows. They are sent again when both
    have returned. `members` are those of the next XREADs."""

    other: _Watch

    def __init__(
        self,
        link: Link,
        sizes: ReadSizes,
        block_ms: int,
        count_max: int,
        *,
        awaits_all_settled: bool = False,
    ) -> None:
        self.link = link
        self._sizes = sizes
        self.is_waiting = False  # XREADs were sent, and their replies are due
        self._block_ms = block_ms
        self._count_max = count_max
        self.members: dict[Subscription, None] = {}
        self._awaits_all_settled = awaits_all_settled
        self._leaving: dict[Subscription, None] = {}  # members whose home is the other watch
        # Of the latest XREADs:
        self._covered: list[_Covered] = []
        self._count = 0  # of the entries of a stream that were asked for
        self._subscriptions: frozenset[Subscription] = frozenset()
        self._xreads: list[_Xread] = []  # the first one waits
        self._has_large = False  # what is kept of the replies is limited
        self._unexplained_errors = 0  # in a row

    # --- members -------------------------------------------------------------------------------------------

    def adopt(self, subscription: Subscription) -> None:
        """Become the home of a subscription; the other watch keeps it until this one reads it."""
        subscription.home = self
        self.members[subscription] = None
        self._leaving.pop(subscription, None)
        self.other.give_up(subscription)

    def give_up(self, subscription: Subscription) -> None:
        """The other watch is its home now: keep it until that one reads it."""
        if subscription in self.members:
            self._leaving[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        """Read it no more from the next XREAD on."""
        self._leaving.pop(subscription, None)
        self.members.pop(subscription, None)

    def covers(self, subscription: Subscription) -> bool:
        """Whether the latest XREAD reads this subscription. The next one will, if this is its home."""
        return subscription in self._subscriptions

    @property
    def covers_all(self) -> bool:
        """Whether the latest XREAD reads all members: none was added while it waits."""
        return self.is_waiting and self.members.keys() <= self._subscriptions

    # --- two XREADs ----------------------------------------------------------------------------------------

    def start(self, *, blocks: bool = True) -> None:
        """Send the XREADs, unless they wait or there is nothing to read. If none `blocks`, Redis answers at
        once."""
        if self.is_waiting:
            return
        for subscription in [leaving for leaving in self._leaving if self.other.covers(leaving)]:
            self.remove(subscription)
        awaits_all = self._awaits_all_settled
        covered = [
            (member, member.takes_requests, awaits_all or member.awaits_settled) for member in self.members
        ]
        if covered != self._covered:
            self._cover(covered)
        if self._xreads:
            few = self._entries_of_read_bytes()
            self._has_large = few < FEW_ENTRIES
            self._count = count = max(1, min(self._count_max, few))
            first, *others = self._xreads
            block = ("BLOCK", self._block_ms) if blocks else ()
            commands = [first.command("COUNT", count, *block)]
            commands += [other.command("COUNT", count) for other in others]
            self.link.send_many(commands)
            self.link.expect_reply(self._block_ms / 1000)
            self.is_waiting = True

    def all_take_requests(self) -> bool:
        """Whether requests of all members are to be read. Else what the caller has read is to be done first:
        it must not be kept waiting."""
        return all(member.takes_requests for member in self.members)

    def _cover(self, covered: list[_Covered]) -> None:
        self._covered = covered
        self._subscriptions = frozenset(self.members)
        self._xreads = [_Xread(streams) for streams in self._streams(covered) if streams]

    def _streams(self, covered: list[_Covered]) -> Sequence[list[StreamCursor]]:
        """The streams to wait for, and those to read with them."""
        awaited: list[StreamCursor] = []
        others: list[StreamCursor] = []
        for member, takes_requests, awaits_settled in covered:
            if takes_requests:
                awaited.append(member.requests)
            (awaited if awaits_settled else others).append(member.settled)
        return awaited, others

    def _entries_of_read_bytes(self) -> int:
        """How many entries of each stream have `read_bytes` together, by the mean of the latest."""
        return self._sizes.read_bytes // sum([member.entry_bytes for member in self.members])

    def finish(self, result: ReadResult) -> None:
        """Receive the replies, and add them to the result."""
        self.is_waiting = False
        rejected: CommandError | None = None
        for xread, reply in zip(self._xreads, self._receive(), strict=False):
            if isinstance(reply, CommandError):
                rejected = reply
                continue
            xread.forget_more()  # a stream without entries is not in the reply
            if reply:
                for name, entries in reply:
                    stream = xread.stream(name)
                    if stream is stream.subscription.requests:
                        stream.subscription.has_more = is_full = len(entries) >= self._count
                        if is_full:
                            self._sizes.full_reply()
                for stream, entries in xread.unread(
                    self._that_fit(xread, reply) if self._has_large else reply
                ):
                    if self._has_large and any(map(_size_if_oversized, entries)):
                        _add_some_oversized(result, stream, entries)
                    else:
                        _add(result, stream, entries)
        if rejected is None:
            self._unexplained_errors = 0
        else:
            self._find_cause(rejected, result)

    def _receive(self) -> list[Any]:
        """The replies; none if they are too large: then fewer entries are asked for again."""
        try:
            if self._has_large:
                return self.link.receive_truncated(len(self._xreads), ENTRY_BYTES_MAX)
            return self.link.receive_many(len(self._xreads))
        except LinkError:
            self._sizes.connection_lost()
            raise
        except ReplyTooLargeError:
            for member in self._subscriptions:
                member.entry_bytes = READ_BYTES
            return []

    def _that_fit(
        self, xread: _Xread, reply: Sequence[tuple[bytes, list[RawEntry]]]
    ) -> list[tuple[bytes, list[RawEntry]]]:
        """The entries of a reply up to the first, in each stream, that was not kept only because of others.

        The streams of which none was kept come first in the next reply.
        """
        fitting = [(name, list(takewhile(_is_kept_or_oversized, entries))) for name, entries in reply]
        for (name, kept), (_, entries) in zip(fitting, reply, strict=True):
            subscription = xread.stream(name).subscription
            if entries and not kept and subscription in self.members:
                others = dict(self.members)
                self.members.clear()  # in place: another watch may have the same members
                self.members.update({subscription: None, **others})
        return fitting

    def _find_cause(self, error: CommandError, result: ReadResult) -> None:
        """Redis rejected a whole XREAD. Find the models it is because of: a key with another type, say.

        If there is none, the cause may have gone: read again, once.
        """
        members = list(self._subscriptions)
        probes: list[Sequence[Argument]] = [
            ("XREAD", "COUNT", 1, "STREAMS", member.requests.name, member.settled.name, "$", "$")
            for member in members
        ]
        for member, reply in zip(members, self.link.call_many(*probes), strict=True):
            if isinstance(reply, CommandError) and member.home is not None:
                result.failed[member] = reply
        self._unexplained_errors = 0 if result.failed else self._unexplained_errors + 1
        if self._unexplained_errors > 1:
            raise error


class _SettledWatch(_Watch):
    """One connection: a blocking XREAD over the settled streams of the members of another watch."""

    def _streams(self, covered: list[_Covered]) -> Sequence[list[StreamCursor]]:
        return ([member.settled for member, _, _ in covered],)


def _add(result: ReadResult, stream: StreamCursor, entries: list[RawEntry]) -> None:
    subscription = stream.subscription
    arrived = result.arrived.get(subscription)
    if arrived is None:
        arrived = result.arrived[subscription] = Arrived([], [], [])
    if stream is subscription.settled:
        arrived.settled.extend(entries)
    elif entries:
        arrived.requests.extend(entries)
        subscription.entry_bytes = max(mean_bytes(entries), subscription.entry_bytes // SMALLER_AT_ONCE)


def _is_kept_or_oversized(entry: RawEntry) -> bool:
    _, flat = entry
    return _are_kept(flat) or _size_if_oversized(entry) > 0


def _are_kept(values: Sequence[bytes | Omitted]) -> bool:
    return not any(isinstance(value, Omitted) for value in values)


def _size_if_oversized(entry: RawEntry) -> int:
    """The bytes of an entry that no valid one has; else 0."""
    _, flat = entry
    size_bytes = sum(map(_size_of, flat))
    return size_bytes if size_bytes > ENTRY_BYTES_MAX else 0


def _size_of(value: bytes | Omitted) -> int:
    return value.size_bytes if type(value) is Omitted else len(value)


def _add_some_oversized(result: ReadResult, stream: StreamCursor, entries: list[RawEntry]) -> None:
    """As `_add`. The oversized entries of a request stream are set apart; `settled` has none of Carpool's."""
    _add(result, stream, [entry for entry in entries if not _size_if_oversized(entry)])
    subscription = stream.subscription
    if stream is subscription.requests:
        oversized = [_oversized(entry) for entry in entries if _size_if_oversized(entry)]
        result.arrived[subscription].oversized.extend(oversized)
        subscription.entry_bytes = READ_BYTES


def _oversized(entry: RawEntry) -> OversizedEntry:
    entry_id, flat = entry
    pairs: list[tuple[Any, Any]] = list(zip(flat[::2], flat[1::2], strict=True))
    field, _ = max(pairs, key=lambda pair: _size_of(pair[1]))
    small = [part for pair in pairs if max(map(_size_of, pair)) < LARGE_BYTES for part in pair]
    name = b"" if type(field) is Omitted else field[:FIELD_CHARS_SHOWN]
    return OversizedEntry(entry_id, small, name, _size_if_oversized(entry))


def id_order(entry_id: bytes) -> tuple[int, int]:
    """What orders IDs of stream entries."""
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number)


def mean_bytes(entries: Sequence[RawEntry]) -> int:
    """The mean size of these entries, their fields and values; more than 0."""
    return sum([len(value) for _, flat in entries for value in flat]) // len(entries) + 1
