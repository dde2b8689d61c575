"""The batcher's moves, and what it reads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.messages import Batch, Entry, Refusal, Request, Result, Settled
from carpool.store.connection import Argument, Link, Script
from carpool.store.directory import Census, take_census
from carpool.store.results import (
    IN_ORDER,
    RESULT_ARGS,
    Address,
    Answer,
    Keyring,
    answer,
    release,
    result_args,
)
from carpool.wire.batches import decode_batch, decode_settled, encode_batch
from carpool.wire.requests import encode_requests, slots_of

_ADMIT: Final = Script("ordering/admit")
_DISPATCH: Final = Script("dispatch", after=("ordering/move", "put_back"))
_REFUSE: Final = Script("refuse", after=(*IN_ORDER, "put_back"))
_LEASE: Final = Script("lease")
_MISSING: Final = Script("missing")
_STATUS: Final = Script("status")

RawEntry = tuple[bytes, list[bytes]]


class Departure(NamedTuple):
    """Requests that leave together, and why."""

    requests: Sequence[Request]
    reason: str
    lane: str


class Departed(NamedTuple):
    """What became of a departure: its batch's ID (None: nobody was left), and who rides."""

    batch_id: str | None
    requests: Sequence[Request]


class BatcherStore:
    """One connection to one model. Not for two threads: each loop has a store of its own."""

    def __init__(self, link: Link, keys: Keys, clock: RedisClock | None = None) -> None:
        self._link = link
        self.keys = keys
        self.clock = clock or RedisClock()

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    def hold_lease(self, name: str, lease_ms: int) -> bool:
        """Become or stay the model's one active batcher; `lease_ms` 0 steps down."""
        return bool(self._link.run(_LEASE, [self.keys.batcher], [name, lease_ms]))

    def census(self) -> Census:
        """Look at the model, and at the clock."""
        return take_census(self._link, self.keys, self.clock)

    def publish_status(self, status: str, ttl_ms: int) -> None:
        """Say how this batcher fares, for whoever watches, until `ttl_ms` pass or it is said anew."""
        self._link.run(_STATUS, [self.keys.status], [status, ttl_ms])

    def last_settled_id(self) -> str:
        """Where to read `settled` from, to hear only what is committed from now on."""
        last = self._link.call("XREVRANGE", self.keys.settled, "+", "-", "COUNT", 1)
        return last[0][0].decode() if last else "0-0"

    def batches_in_flight(self) -> list[Batch]:
        """Every batch that is dispatched and not settled."""
        return [
            decode_batch(entry_id, flat, 0)
            for entry_id, flat in self._link.call("XRANGE", self.keys.batches, "-", "+")
        ]

    def missing(self, stream: str, entry_ids: Sequence[str]) -> set[str]:
        """Which of these entries are no longer in the stream."""
        return {entry_id.decode() for entry_id in self._link.run(_MISSING, [stream], list(entry_ids))}

    def admit(self, entries: Sequence[Entry]) -> int:
        """The requests of these entries, which have slots, take them in the order of results.

        Returns how many slots are taken: by who waits or is in flight, and by results that are held.
        """
        args: list[Argument] = [len(entries)]
        for entry in entries:
            slots = [request.slot for request in entry.requests if request.slot is not None]
            args += [entry.id, len(slots), *slots]
        return int(self._link.run(_ADMIT, [self.keys.order, self.keys.held], args))

    def release(self, entries: Container[str] = (), batches: Container[str] = ()) -> None:
        """Deliver what is held and need not be, also where a slot before it was given up without a word.

        `entries` and `batches` are known to be there: to look would cost Redis their bytes.
        """
        first = release(self._link, self.keys)
        known = batches if first.startswith("b") else entries
        if first and first[1:] not in known:
            release(self._link, self.keys, free_lost=True)

    def dispatch(
        self, departures: Sequence[Departure], result_ttl_ms: int
    ) -> tuple[list[Departed], list[Entry]]:
        """Turn waiting requests into batches. Entries of which only some requests leave get a new ID.

        Returns what became of each departure, and the entries that were gone: nobody in them rides.
        """
        leaving: dict[Entry, int] = {}
        for departure in departures:
            for request in departure.requests:
                leaving[request.entry] = leaving.get(request.entry, 0) + 1
        entries = {entry: index for index, entry in enumerate(leaving, 1)}
        staying = self._staying(departures, leaving)
        args: list[Argument] = [len(entries), *(entry.id for entry in entries), len(staying)]
        for entry, rest in staying.items():
            args += [entries[entry], *_put_back_args(entry, rest)]
        args.append(len(departures))
        for departure in departures:
            args += self._departure_args(departure, entries, result_ttl_ms)
        gone, new_ids, batch_ids = self._link.run(
            _DISPATCH, [self.keys.requests, self.keys.batches, self.keys.held], args
        )

        gone_ids = {entry_id.decode() for entry_id in gone}
        departed = [
            Departed(
                batch_id.decode() or None,
                [r for r in departure.requests if r.entry.id not in gone_ids]
                if gone_ids
                else departure.requests,
            )
            for batch_id, departure in zip(batch_ids, departures, strict=True)
        ]
        vanished = [entry for entry in entries if entry.id in gone_ids]
        _leave(entries.keys() - set(vanished), dict(zip(staying, new_ids, strict=True)), staying)
        return departed, vanished

    @staticmethod
    def _staying(departures: Sequence[Departure], leaving: Mapping[Entry, int]) -> dict[Entry, list[Request]]:
        """Who stays behind, in the entries of which only some leave."""
        partly = [entry for entry, number in leaving.items() if number < len(entry.requests)]
        if not partly:
            return {}
        gone = {request for departure in departures for request in departure.requests}
        return {entry: [request for request in entry.requests if request not in gone] for entry in partly}

    def _departure_args(
        self, departure: Departure, entries: Mapping[Entry, int], result_ttl_ms: int
    ) -> list[Argument]:
        indexes = dict.fromkeys(entries[request.entry] for request in departure.requests)
        fields: list[Argument] = ["requests", encode_batch(departure.requests)]
        fields += ["size", len(departure.requests), "reason", departure.reason]
        fields += ["dispatched_us", self.clock.now_us(), "result_ttl_ms", result_ttl_ms]
        if departure.lane:
            fields += ["lane", departure.lane]
        slots: list[Argument] = []
        for request in departure.requests:
            if request.slot is not None:
                slots += [entries[request.entry], request.slot]
        return [len(indexes), *indexes, len(fields), *fields, len(slots) // 2, *slots]

    def refuse(
        self, refusals: Sequence[Refusal], emptied: Sequence[Entry], result_ttl_ms: int
    ) -> list[Entry]:
        """Answer requests that are not dispatched, and remove the entries in `emptied` without an answer.

        Returns the entries that were gone: nobody in them was answered.
        """
        by_entry: dict[Entry, list[Refusal]] = {entry: [] for entry in emptied}
        for refusal in refusals:
            by_entry.setdefault(refusal.entry, []).append(refusal)
        keyring = Keyring(self.keys.requests, self.keys.order, self.keys.held)
        args: list[Argument] = [result_ttl_ms, len(by_entry)]
        staying: dict[Entry, list[Request]] = {}
        for entry, of_entry in by_entry.items():
            leaving = {refusal.request for refusal in of_entry}
            staying[entry] = rest = [request for request in entry.requests if request not in leaving]
            results = result_args(self.keys, keyring, map(_refused, of_entry))
            args += [entry.id, *_put_back_args(entry, rest), len(results) // RESULT_ARGS, *results]
        new_ids = dict(zip(by_entry, self._link.run(_REFUSE, keyring.keys, args), strict=True))
        vanished = [entry for entry, new_id in new_ids.items() if new_id is None]
        _leave(by_entry.keys() - set(vanished), new_ids, staying)
        return vanished

    def expire_in_flight(self, batch_id: str, answers: Sequence[Answer], result_ttl_ms: int) -> int:
        """Answer requests whose deadline passed while their batch is wherever it is.

        Returns how many were answered: none of a batch that has been settled meanwhile.
        """
        return len(answer(self._link, self.keys, "", batch_id, 0, answers, None, result_ttl_ms))


class Tail:
    """Follows a model's requests and settled batches: asks, and hears later, so a timer can come between."""

    def __init__(self, link: Link, keys: Keys, settled_after: str) -> None:
        self._link = link
        self._keys = keys
        self._requests_after = "0-0"
        self._settled_after = settled_after
        self._asked = False

    def ask(self, count: int, block_ms: int) -> None:
        """Have Redis answer when there is something new. Does nothing while an answer is awaited."""
        if self._asked:
            return
        keys = self._keys
        self._link.send(
            "XREAD", "COUNT", count, "BLOCK", block_ms, "STREAMS",
            keys.requests, keys.settled, self._requests_after, self._settled_after,
        )  # fmt: skip
        self._asked = True

    def hear(self, timeout_s: float) -> tuple[list[RawEntry], list[Settled]]:
        """What is new, or nothing when `timeout_s` passes or Redis had nothing to say."""
        if not self._link.readable(timeout_s):
            return [], []
        reply = self._link.receive()
        self._asked = False
        arrived: list[RawEntry] = []
        settled: list[Settled] = []
        for stream, entries in reply or ():
            if not entries:  # it was emptied between our being told and our reading
                continue
            if stream == self._keys.settled.encode():
                settled = [decode_settled(flat) for _, flat in entries]
                self._settled_after = entries[-1][0].decode()
            else:
                arrived = entries
                self._requests_after = entries[-1][0].decode()
        return arrived, settled

    def close(self) -> None:
        """Hang up."""
        self._link.close()


def _put_back_args(entry: Entry, staying: Sequence[Request]) -> list[Argument]:
    """Payload, arrival (ms) and slots of those who stay; '' for the payload if nobody does."""
    payload = encode_requests(staying) if staying else b""
    return [payload, entry.arrival_us // 1000, slots_of(staying)]


def _leave(
    entries: Iterable[Entry], new_ids: Mapping[Entry, bytes | None], staying: Mapping[Entry, list[Request]]
) -> None:
    """Requests left these entries; those that stay are under a new ID."""
    for entry in entries:
        entry.requests = staying.get(entry, [])
        if entry.requests:
            entry.id = (new_ids[entry] or b"").decode()


def _refused(refusal: Refusal) -> tuple[Address, Result]:
    slot = None if refusal.request is None else refusal.request.slot
    result = Result(refusal.correlation_id, refusal.status, refusal.content_type, detail=refusal.detail)
    return Address(refusal.reply_to, slot), result
