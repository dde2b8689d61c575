"""Reads what is new in the request and settled streams of all models, over two connections.

A blocking XREAD costs Redis and its caller time for each stream in it. So one connection reads the few busy
models, and another waits for the idle ones. A model is moved between them with `set_busy`, which may happen
while the XREADs of both wait in Redis with the models as they were. Two rules keep every entry from being
lost, or read twice:

- A model that was moved is still read by its previous connection until an XREAD of the other one includes
  it. So there is no moment at which nobody reads it.
- Meanwhile both may return the same entries. Each stream has one cursor, and entries up to it are dropped.
  As each reply has all entries after the ID that its XREAD named, what remains has no gap.

A subscription that ended, and a later one to the same model, are different: a reply belongs to that for which
its XREAD was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool.keys import Keys
from carpool.store.connection import Argument, CommandError, Link, readable_links

RawEntry = tuple[bytes, list[bytes]]  # ID, and field, value, field, value, ...

ENTRIES_MAX: Final = 256  # of a stream in one reply
READ_BYTES: Final = 32 * 1024 * 1024  # in one reply, about
ENTRY_BYTES_UNKNOWN: Final = READ_BYTES // 8  # until the first entry was read
BUSY_BLOCK_MS: Final = 100  # how long a model that became busy is also waited for with the idle ones, at most
IDLE_BLOCK_MS: Final = 1000


class Subscription:
    """The streams of one model, and how far they have been read."""

    __slots__ = ("_home", "entry_bytes", "requests", "settled")

    def __init__(self, keys: Keys, settled_after: bytes) -> None:
        self.requests = Stream(self, keys.requests, b"0-0")
        self.settled = Stream(self, keys.settled, settled_after)
        self.entry_bytes = ENTRY_BYTES_UNKNOWN  # of a request entry, on average in the latest reply
        self._home: _Watch | None = None  # None: ended


class Stream:
    """One stream of a subscription. `after` is its cursor: the ID of the last entry that was read."""

    __slots__ = ("after", "name", "subscription")

    def __init__(self, subscription: Subscription, name: str, after: bytes) -> None:
        self.subscription = subscription
        self.name = name
        self.after = after

    def unread(self, entries: list[RawEntry], asked_after: bytes) -> list[RawEntry]:
        """Those of these entries that were not read yet, and moves the cursor. XREAD named `asked_after`."""
        if asked_after is not self.after:  # the other connection has read of this stream since
            last_read = id_order(self.after)
            entries = [entry for entry in entries if id_order(entry[0]) > last_read]
        if entries:
            self.after = entries[-1][0]
        return entries


class Arrived(NamedTuple):
    """New entries of a model, of either stream."""

    requests: list[RawEntry]
    settled: list[RawEntry]


class ReadResult(NamedTuple):
    """What was read, and which models cannot be read, by subscription."""

    arrived: dict[Subscription, Arrived]
    failed: dict[Subscription, CommandError]


class StreamReader:
    """Reads the streams of many models. Not for two threads. After a LinkError, close it and make another."""

    def __init__(
        self, url: str, name: str, *, busy_block_ms: int = BUSY_BLOCK_MS, idle_block_ms: int = IDLE_BLOCK_MS
    ) -> None:
        self._busy = _Watch(Link(url, name=f"{name}:reads"), busy_block_ms, ENTRIES_MAX)
        # One entry is enough to learn that a model is busy, and a reply with many would be large.
        self._idle = _Watch(Link(url, name=f"{name}:idle"), idle_block_ms, 1)
        self._busy.other, self._idle.other = self._idle, self._busy

    def subscribe(self, keys: Keys, settled_after: bytes) -> Subscription:
        """Read a model: its request stream from the start, `settled` after this ID.

        It begins as busy, with the next XREAD over the busy models: after BUSY_BLOCK_MS at most.
        """
        subscription = Subscription(keys, settled_after)
        self._busy.adopt(subscription)
        return subscription

    def end(self, subscription: Subscription) -> None:
        """Read this model no more. What arrives for it is dropped. May be called repeatedly."""
        subscription._home = None
        self._busy.remove(subscription)
        self._idle.remove(subscription)

    def set_busy(self, subscription: Subscription, busy: bool) -> None:
        """Read this model together with the busy ones, or else with the idle ones."""
        home = self._busy if busy else self._idle
        if subscription._home is not home:
            home.adopt(subscription)

    def read(self, timeout_s: float) -> ReadResult:
        """Wait for new entries of any model up to `timeout_s`. A model that failed is not read any more."""
        self._busy.start()
        self._idle.start()
        result = ReadResult({}, {})
        watches = [watch for watch in (self._busy, self._idle) if watch.is_waiting]
        ready = readable_links([watch.link for watch in watches], timeout_s)
        for watch in watches:
            if watch.link in ready:
                watch.finish(result)
        for subscription in result.failed:
            self.end(subscription)
        return result

    def close(self) -> None:
        """Close both connections. Not to be used again."""
        self._busy.link.close()
        self._idle.link.close()


class _Watch:
    """One connection: a blocking XREAD over its members, sent again when it has returned."""

    other: _Watch

    def __init__(self, link: Link, block_ms: int, count_max: int) -> None:
        self.link = link
        self.is_waiting = False  # an XREAD was sent, and its reply is due
        self._block_ms = block_ms
        self._count_max = count_max
        self._members: dict[Subscription, None] = {}  # to be in the next XREAD
        self._leaving: dict[Subscription, None] = {}  # members whose home is the other watch
        self._changed = False  # the members are not those of the latest XREAD
        # Of the latest XREAD:
        self._subscriptions: frozenset[Subscription] = frozenset()
        self._streams: list[Stream] = []
        self._names: list[str] = []
        self._indexes: dict[bytes, int] = {}  # of streams, by name
        self._afters: list[bytes] = []
        self._unexplained_errors = 0  # in a row

    # --- members -------------------------------------------------------------------------------------------

    def adopt(self, subscription: Subscription) -> None:
        """Become the home of a subscription; the other watch keeps it until this one reads it."""
        subscription._home = self
        self._changed = self._changed or subscription not in self._members
        self._members[subscription] = None
        self._leaving.pop(subscription, None)
        if subscription in self.other._members:
            self.other._leaving[subscription] = None

    def remove(self, subscription: Subscription) -> None:
        """Read it no more from the next XREAD on."""
        self._leaving.pop(subscription, None)
        if subscription in self._members:
            del self._members[subscription]
            self._changed = True

    def _covers(self, subscription: Subscription) -> bool:
        """Whether the latest XREAD reads this subscription. The next one will, if this is its home."""
        return subscription in self._subscriptions

    # --- one XREAD -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Send an XREAD, unless one waits or there is nothing to read."""
        if self.is_waiting:
            return
        for subscription in [leaving for leaving in self._leaving if self.other._covers(leaving)]:
            self.remove(subscription)
        if self._changed:
            self._set_streams()
        if not self._streams:
            return
        self._afters = [stream.after for stream in self._streams]
        self.link.send(
            "XREAD", "COUNT", self._count(), "BLOCK", self._block_ms, "STREAMS", *self._names, *self._afters
        )
        self.is_waiting = True

    def _set_streams(self) -> None:
        self._changed = False
        self._subscriptions = frozenset(self._members)
        self._streams = [stream for member in self._members for stream in (member.requests, member.settled)]
        self._names = [stream.name for stream in self._streams]
        self._indexes = {name.encode(): index for index, name in enumerate(self._names)}

    def _count(self) -> int:
        """How many entries of each stream to read, so that a reply has about READ_BYTES at most."""
        bytes_of_one_each = sum([member.entry_bytes for member in self._members])
        return max(1, min(self._count_max, READ_BYTES // bytes_of_one_each))

    def finish(self, result: ReadResult) -> None:
        """Receive the reply to the XREAD, and add it to the result."""
        self.is_waiting = False
        try:
            reply = self.link.receive()
        except CommandError as error:
            self._find_cause(error, result)
            return
        self._unexplained_errors = 0
        for name, entries in reply or ():
            if entries:  # else Redis woke us for entries that were deleted before it read them
                index = self._indexes[name]
                self._add(self._streams[index], entries, self._afters[index], result)

    def _add(self, stream: Stream, entries: list[RawEntry], asked_after: bytes, result: ReadResult) -> None:
        subscription = stream.subscription
        if subscription._home is None:
            return
        unread = stream.unread(entries, asked_after)
        if not unread:
            return
        arrived = result.arrived.get(subscription)
        if arrived is None:
            arrived = result.arrived[subscription] = Arrived([], [])
        if stream is subscription.settled:
            arrived.settled.extend(unread)
        else:
            arrived.requests.extend(unread)
            subscription.entry_bytes = _mean_bytes(unread)

    def _find_cause(self, error: CommandError, result: ReadResult) -> None:
        """Redis rejected the whole XREAD. Find the models it is because of: a key with another type, say.

        If there is none, the cause may have gone, or someone ended the wait (CLIENT UNBLOCK): read again.
        """
        members = list(self._subscriptions)
        probes: list[Sequence[Argument]] = [
            ("XREAD", "COUNT", 1, "STREAMS", member.requests.name, member.settled.name, "$", "$")
            for member in members
        ]
        for member, reply in zip(members, self.link.call_many(*probes), strict=True):
            if isinstance(reply, CommandError) and member._home is not None:
                result.failed[member] = reply
        self._unexplained_errors = 0 if result.failed else self._unexplained_errors + 1
        if self._unexplained_errors > 1:
            raise error


def id_order(entry_id: bytes) -> tuple[int, int]:
    """What orders IDs of stream entries."""
    ms, _, number = entry_id.partition(b"-")
    return int(ms), int(number)


def _mean_bytes(entries: Sequence[RawEntry]) -> int:
    return sum([len(value) for _, flat in entries for value in flat]) // len(entries) + 1
