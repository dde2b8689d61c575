"""What was read of a model, and how its requests come to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from typing import Final, NamedTuple

from carpool.clock import RedisClock
from carpool.messages.requests import Entry, Run, SequencesEnd, Withdrawal
from carpool.messages.results import Refusal
from carpool.store.reader import Arrived, OversizedEntry, RawEntry, Subscription
from carpool.wire.requests import Decoded, arrival_of, decode_in_pieces, refuse_oversized
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.entries import EntryTable, UnreadEntries

PIECE_DECODED: Final = 256  # runs and refusals of an entry, or decisions: after more, a piece ends
TURN_DECODED_MAX: Final = 4096  # likewise, of several entries; what else was read waits for the next turn


class Admitted(NamedTuple):
    """What became of entries that were read, up to `last_id`. `refusals`: of their requests. `ended`: of
    those whose sequences they end by force. `emptied`: entries that do nothing else."""

    entries: list[Entry]
    refusals: list[Refusal]
    ended: list[Refusal]
    emptied: list[Entry]
    last_id: bytes


class Backlog:
    """What was read of a model, and is not decided about yet. While there is any, no more is read."""

    def __init__(
        self,
        scheduler: Scheduler,
        subscription: Subscription,
        entries: EntryTable,
        unread: UnreadEntries,
        clock: RedisClock,
    ) -> None:
        self.requests: deque[RawEntry] = deque()
        self._settled: list[RawEntry] = []
        self._oversized: list[OversizedEntry] = []
        self._scheduler = scheduler
        self._subscription = subscription
        self._entries = entries
        self._unread = unread
        self._clock = clock

    def __bool__(self) -> bool:
        return bool(self.requests or self._settled or self._oversized)

    def add(self, arrived: Arrived) -> None:
        """These entries were read."""
        self.requests += arrived.requests
        self._settled += arrived.settled
        self._oversized += arrived.oversized
        for entries in (arrived.requests, arrived.settled):
            if entries:
                self._clock.reached(arrival_of(entries[-1][0].decode()))
        if arrived.requests:
            self._subscription.takes_requests = False  # until a turn has decided about these

    def take_settled(self) -> list[RawEntry]:
        """The entries of the stream `settled`."""
        settled, self._settled = self._settled, []
        return settled

    def admit(self, now_us: int) -> Generator[None, None, Admitted]:
        """Offer requests to the scheduler, in pieces: those of about TURN_DECODED_MAX runs."""
        scheduler, entries = self._scheduler, self._entries
        fresh: list[Entry] = []
        refusals: list[Refusal] = []
        ended: list[Refusal] = []
        emptied: list[Entry] = []
        decoded_now, entry_id = 0, b""
        while self.requests and decoded_now < TURN_DECODED_MAX:
            entry_id = self.requests[0][0]
            found = yield from self._decode_next(now_us)
            yield
            if found is None:
                continue
            entry, decoded = found
            decoded_now += len(decoded)
            if len(decoded) > PIECE_DECODED:
                now_us = self._clock.now_us()  # time has passed
            entries[entry.id] = entry
            fresh.append(entry)
            match decoded:
                case [Withdrawal() as withdrawal]:
                    scheduler.withdraw(withdrawal)
                case [SequencesEnd() as end]:
                    ended += scheduler.end_sequences(end.sequence_ids, end.place)
                    emptied.append(entry)
                case _:
                    refusals += yield from self._offer(decoded, now_us)
            if len(decoded) > PIECE_DECODED:
                yield
        return Admitted(fresh, refusals, ended, emptied, entry_id)

    def refuse_oversized(self, now_us: int) -> Generator[None, None, list[Refusal]]:
        """The refusals of entries that are too large to be read."""
        oversized, self._oversized = self._oversized, []
        refusals: list[Refusal] = []
        for entry_id, flat, field, size_bytes in oversized:
            entry, decoded = refuse_oversized(entry_id, flat, field, size_bytes, now_us)
            self._entries[entry.id] = entry
            refusals += yield from self._offer(decoded, now_us)
            yield from self.become_read(entry_id)
        return refusals

    def become_read(self, entry_id: bytes) -> Iterator[None]:
        """The entries up to this one were read, and what they claim was verified. Once these are all that
        waited when this batcher took over, what was left unread is read from now on. In pieces."""
        if self._unread.become_read(entry_id):
            yield from self._scheduler.sequences.complete_in_pieces()
            if self._unread.resumes_after is not None:
                self._subscription.requests.rewind(self._unread.resumes_after)
                self.requests.clear()

    def _decode_next(self, now_us: int) -> Generator[None, None, tuple[Entry, list[Decoded]] | None]:
        """Take the next entry, and decode it. None if it is known, or left for later."""
        entries, unread, scheduler = self._entries, self._unread, self._scheduler
        entry_id, flat = self.requests.popleft()
        is_known = unread.resumes_after is not None and entry_id.decode() in entries  # it is read again
        if is_known or entries.was_put_back(entry_id) or unread.leaves(entry_id, flat):
            return None
        entry, decoded = yield from decode_in_pieces(
            entry_id, flat, scheduler.settings, now_us, unread.waited
        )
        flat.clear()  # they may be large, and what is needed of them was copied
        if unread.leaves_decoded(decoded, scheduler.settings.max_queue_size - scheduler.queue.count):
            return None
        return entry, decoded

    def _offer(self, decoded: Sequence[Decoded], now_us: int) -> Generator[None, None, list[Refusal]]:
        """Offer the runs of one entry to the scheduler, in pieces. Returns the refusals."""
        refusals: list[Refusal] = []
        for number, item in enumerate(decoded, 1):
            if type(item) is Run:
                refusals += self._scheduler.offer(item, now_us)
            elif type(item) is Refusal:
                refusals += self._scheduler.refuse_malformed(item)
            if not number % PIECE_DECODED:
                yield
        return refusals
