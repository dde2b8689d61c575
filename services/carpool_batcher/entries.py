"""The batcher's copy of the request stream: the entries it has read. And finding what is missing in Redis.

Why: docs/decisions/0047.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from carpool.messages.requests import Entry, Run
from carpool.messages.results import Refusal
from carpool.rows import only_stored, stored_names
from carpool.store.batcher import ENTRIES_LOOKED_UP, BatcherStore, EntryChanges
from carpool.store.reader import id_order
from carpool.wire.requests import Decoded, was_perhaps_put_back
from carpool_batcher.core.scheduler import Scheduler

HELD_BACK_MAX: Final = 4096  # refusals that a batcher that takes over holds back, about
UNREAD_US: Final = 3_000_000  # for so long entries may wait without that any is read
SETTLED_UNREAD_US: Final = 1_000_000  # for so long the `settled` entry of a batch may be unread


class EntryTable(dict[str, Entry]):
    """Every entry of the request stream that has been read and not removed, by its current ID.

    Once an entry is in here, only this class changes its `id`; see `messages.Entry`.

    What this batcher puts back has a new ID, and is read later, as every entry. It is known by then, or was
    dispatched meanwhile: it must not be offered again. So these IDs are remembered until they were read.
    """

    def __init__(self) -> None:
        super().__init__()
        self._put_back_ids: deque[bytes] = deque()  # in ascending order, as Redis assigns them

    def was_put_back(self, entry_id: bytes) -> bool:
        """Whether this batcher put this entry back. Entries are asked for in their order, each once."""
        put_back = self._put_back_ids
        if not put_back:
            return False
        order = id_order(entry_id)
        while put_back and id_order(put_back[0]) < order:
            put_back.popleft()
        if put_back and put_back[0] == entry_id:
            put_back.popleft()
            return True
        return False

    def update_from(self, changes: EntryChanges) -> list[Run]:
        """Follow what a script did in Redis. Returns the runs whose entries are missing there.

        The bodies of runs that were answered or dispatched are released: timers may know such runs for long.
        """
        missing: list[Run] = []
        for entry in changes.removed:
            _release_bodies(self._remove(entry))
        for entry in changes.missing:
            missing += self._remove(entry)
        for entry, parts in changes.put_back:
            before = self._remove(entry)
            (entry.id, entry.runs), *others = parts
            self._add_put_back(entry)
            for new_id, runs in others:
                divided = Entry(new_id, entry.arrival_us, runs)
                for run in runs:
                    run.entry = divided
                self._add_put_back(divided)
            kept = {run for _, runs in parts for run in runs}
            _release_bodies([run for run in before if run not in kept])
        return missing

    def _add_put_back(self, entry: Entry) -> None:
        self[entry.id] = entry
        self._put_back_ids.append(entry.id.encode())

    def _remove(self, entry: Entry) -> list[Run]:
        self.pop(entry.id, None)
        runs, entry.runs = entry.runs, []
        return runs


def _release_bodies(runs: Iterable[Run]) -> None:
    """Of stored bodies the names are kept: those of requests in flight must not be deleted."""
    for run in runs:
        run.bodies = only_stored(run.bodies)


class UnreadEntries:
    """Whether entries that waited when this batcher took over are still unread. `last_id`: the last of
    them.

    Until they are read, refusals are held back, and anybody can cause very many. With more than
    HELD_BACK_MAX, the entries that follow are left for later, except those that were put back: only their
    requests stand earlier than they do. When the last one was seen, reading begins again after
    `resumes_after`.
    """

    def __init__(self, last_id: bytes | None) -> None:
        self.resumes_after: bytes | None = None  # the last entry before those that were left
        self._last_id = last_id
        self._held_back = 0  # requests
        self._seen = b"0-0"
        self._refusals: list[Refusal] = []
        self._emptied: list[Entry] = []

    @property
    def are_any(self) -> bool:
        """Whether some that waited when this batcher took over were not read."""
        return self._last_id is not None

    def leaves(self, entry_id: bytes, flat: Sequence[bytes]) -> bool:
        """Whether this entry, which was read, is left for later."""
        if self._last_id is None:
            return False
        before, self._seen = self._seen, entry_id
        if self._held_back > HELD_BACK_MAX and self.resumes_after is None:
            self.resumes_after = before
        return self.resumes_after is not None and not was_perhaps_put_back(flat)

    def leaves_decoded(self, decoded: Sequence[Decoded], space: int) -> bool:
        """Whether an entry that says that it was put back is left for later, because it was not: not all of
        its requests are valid, or wait within the limits. `space`: how many more may."""
        if self._last_id is None or self.resumes_after is None:
            return False
        runs = [item for item in decoded if type(item) is Run]
        return len(runs) < len(decoded) or sum(map(len, runs)) > space

    def waited(self, entry_id: bytes) -> bool:
        """Whether this entry waited when this batcher took over. Of the entries that it does not know, only
        these can have been put back by another batcher that held the lease."""
        return self._last_id is not None and id_order(entry_id) <= id_order(self._last_id)

    def hold_back(
        self, refusals: Sequence[Refusal], emptied: Sequence[Entry], *, is_reading: bool
    ) -> tuple[list[Refusal], list[Entry]]:
        """Postpone these while the sequences are `is_reading`. Returns what is to be written.

        What a refusal breaks is written with it, and that is decided when all was read. Were it written
        earlier, and this batcher then killed, the next one would go on with the sequence.
        """
        self._refusals += refusals
        self._emptied += emptied
        if is_reading:
            self._held_back += len(emptied) + sum([len(refusal.correlation_ids) for refusal in refusals])
            return [], []
        held_back = self._refusals, self._emptied
        self._refusals, self._emptied = [], []
        return held_back

    def become_read(self, entry_id: bytes) -> bool:
        """The entries up to this one were read. Whether they are the last of those that were unread."""
        if self._last_id is None or id_order(entry_id) < id_order(self._last_id):
            return False
        self._last_id = None
        return True


class IdsSetBackError(Exception):
    """Entries wait with IDs below those that were read. What was read must be read again from the start."""


class LowestUnread:
    """Notices entries that would never be read, because their IDs are below the last one that was.

    An ID is above all before it, unless someone deletes the stream, as is done when the largest possible ID
    was used, or sets its IDs back (XSETID).
    """

    def __init__(self) -> None:
        self._cursor = b""
        self._since_us = 0  # since when that many were read, and more wait

    def verify(
        self, store: BatcherStore, waiting_entries: int, known_entries: int, cursor: bytes, now_us: int
    ) -> None:
        """`waiting_entries` is how many there are in Redis, `cursor` the ID of the last one that was read.

        Only if some wait for UNREAD_US and none is read, the last one is looked up. Raises IdsSetBackError.
        """
        if waiting_entries <= known_entries or cursor != self._cursor:
            self._cursor, self._since_us = cursor, now_us
            return
        if now_us - self._since_us < UNREAD_US:
            return
        self._since_us = now_us
        last_id = store.last_waiting_id()
        if last_id is not None and id_order(last_id) <= id_order(cursor):
            raise IdsSetBackError(
                f"the IDs of {store.keys.requests} were set back from {cursor.decode()} to {last_id.decode()}"
            )


def bodies_waiting_since(entries: EntryTable, arrival_us: int) -> list[str]:
    """The names of the stored bodies of requests that wait, and arrived before this time."""
    return [
        name
        for entry in entries.values()
        if entry.arrival_us < arrival_us
        for run in entry.runs
        for name in stored_names(run.bodies)
    ]


class MissingEntries:
    """Entries that were withdrawn by XDEL, or taken by another batcher.

    To look an entry up, Redis copies its bodies. So only a few are looked up at a time, all of them in turn.
    """

    def __init__(self) -> None:
        self._to_look_up: deque[str] = deque()

    def forget(
        self, store: BatcherStore, scheduler: Scheduler, entries: EntryTable, waiting_entries: int
    ) -> None:
        """Look up the next entries, and forget the requests of those that are missing.

        `waiting_entries` is how many there are in Redis. Only if that is too few, entries are looked up.
        """
        if waiting_entries >= len(entries):
            return
        if not self._to_look_up:
            self._to_look_up.extend(entries)
        known = self._next_known(entries)
        if not known:
            return
        looked_up = store.look_up(store.keys.requests, known)
        self._to_look_up.extendleft(reversed(known[looked_up.number :]))
        for entry_id in looked_up.missing:
            scheduler.forget(entries.pop(entry_id).runs)

    def _next_known(self, entries: EntryTable) -> list[str]:
        known: list[str] = []
        while self._to_look_up and len(known) < ENTRIES_LOOKED_UP:
            entry_id = self._to_look_up.popleft()
            if entry_id in entries:
                known.append(entry_id)
        return known


class _Missing(NamedTuple):
    """A batch that was found to be missing. `settled_id`: the last entry of `settled` at that time."""

    since_us: int
    settled_id: bytes


class MissingBatches:
    """Batches in flight that are no longer in Redis: deleted by hand, or committed without notice.

    One that was just committed is missing, too, until its `settled` entry is read. This batcher may have
    stood still since, so only that `settled` was read up to there shows that there is none.
    """

    def __init__(self) -> None:
        self._missing: dict[str, _Missing] = {}  # by batch, when it was first found to be missing

    def forget(
        self,
        store: BatcherStore,
        scheduler: Scheduler,
        batches_in_flight: int,
        settled_read: bytes,
        now_us: int,
    ) -> None:
        """Return the capacity of those that have been missing for SETTLED_UNREAD_US.

        `batches_in_flight` is how many the common stream has. If that is too few, the batches are looked up.
        `settled_read`: the ID of the last entry of `settled` that was read.
        """
        if store.versions:
            batches_in_flight += store.number_in_flight()
        if batches_in_flight >= len(scheduler.in_flight.batches):
            self._missing.clear()
            return
        old = [
            batch_id
            for batch_id, batch in scheduler.in_flight.batches.items()
            if batch.dispatched_us < now_us - SETTLED_UNREAD_US
        ]
        missing = store.missing_batches(old)
        if missing - self._missing.keys():
            found = _Missing(now_us, store.last_settled_id())  # after the look: its entry is not later
            self._missing |= dict.fromkeys(missing - self._missing.keys(), found)
        self._missing = {batch_id: self._missing[batch_id] for batch_id in missing}
        for batch_id, (since_us, settled_id) in self._missing.items():
            is_read = id_order(settled_read) >= id_order(settled_id)
            if is_read and since_us <= now_us - SETTLED_UNREAD_US:
                scheduler.in_flight.forget(batch_id, now_us)
