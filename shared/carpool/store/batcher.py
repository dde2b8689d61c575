"""The batcher's moves, and what it reads."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from carpool.clock import RedisClock
from carpool.keys import Keys
from carpool.messages import Batch, BatchSettled, Dispatch, Entry, Refusal, Request, Result, WorkersChanged
from carpool.store.connection import Argument, Link, Script
from carpool.store.directory import ModelSnapshot, take_snapshot
from carpool.store.results import (
    IN_ORDER,
    RESULT_ARGS,
    Address,
    Answer,
    ScriptKeys,
    answer,
    release,
    result_args,
)
from carpool.wire.batches import decode_batch, decode_settled, encode_batch
from carpool.wire.requests import encode_requests, tickets_of

_ADMIT: Final = Script("ordering/admit")
_DISPATCH: Final = Script("dispatch", after=("ordering/move", "put_back"))
_REFUSE: Final = Script("refuse", after=(*IN_ORDER, "put_back"))
_LEASE: Final = Script("lease")
_MISSING: Final = Script("missing")
_STATUS: Final = Script("status")

RawEntry = tuple[bytes, list[bytes]]


class Dispatched(NamedTuple):
    """A batch that is in flight now: its ID, and its dispatch with the requests that still waited."""

    batch_id: str
    dispatch: Dispatch


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

    def snapshot(self) -> ModelSnapshot:
        """Look at the model, and at the clock."""
        return take_snapshot(self._link, self.keys, self.clock)

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
        """The requests of these entries, which have tickets, take them in the order of results.

        Returns how many tickets are taken: by who waits or is in flight, and by results that are held.
        """
        args: list[Argument] = [len(entries)]
        for entry in entries:
            tickets = [request.ticket for request in entry.requests if request.ticket is not None]
            args += [entry.id, len(tickets), *tickets]
        return int(self._link.run(_ADMIT, [self.keys.order, self.keys.held], args))

    def release(self, entries: Container[str] = (), batches: Container[str] = ()) -> None:
        """Deliver what is held and need not be, also where a ticket before it was given up without a word.

        `entries` and `batches` are known to be there: to look would cost Redis their bytes.
        """
        first = release(self._link, self.keys)
        known = batches if first.startswith("b") else entries
        if first and first[1:] not in known:
            release(self._link, self.keys, free_lost=True)

    def dispatch(
        self, dispatches: Sequence[Dispatch], result_ttl_ms: int
    ) -> tuple[list[Dispatched | None], list[Entry]]:
        """Turn waiting requests into batches. Entries of which only some requests leave get a new ID.

        Returns for each dispatch its batch, None where none of its requests still waited; and the entries
        that were gone.
        """
        leaving: dict[Entry, int] = {}
        for dispatch in dispatches:
            for request in dispatch.requests:
                leaving[request.entry] = leaving.get(request.entry, 0) + 1
        entries = {entry: index for index, entry in enumerate(leaving, 1)}
        staying = self._staying(dispatches, leaving)
        args: list[Argument] = [len(entries), *(entry.id for entry in entries), len(staying)]
        for entry, rest in staying.items():
            args += [entries[entry], *_put_back_args(entry, rest)]
        args.append(len(dispatches))
        for dispatch in dispatches:
            args += self._dispatch_args(dispatch, entries, result_ttl_ms)
        gone, new_ids, batch_ids = self._link.run(
            _DISPATCH, [self.keys.requests, self.keys.batches, self.keys.held], args
        )

        gone_ids = {entry_id.decode() for entry_id in gone}
        dispatched = [
            Dispatched(batch_id.decode(), _without(dispatch, gone_ids)) if batch_id else None
            for batch_id, dispatch in zip(batch_ids, dispatches, strict=True)
        ]
        vanished = [entry for entry in entries if entry.id in gone_ids]
        _leave(entries.keys() - set(vanished), dict(zip(staying, new_ids, strict=True)), staying)
        return dispatched, vanished

    @staticmethod
    def _staying(dispatches: Sequence[Dispatch], leaving: Mapping[Entry, int]) -> dict[Entry, list[Request]]:
        """Who stays behind, in the entries of which only some leave."""
        partly = [entry for entry, number in leaving.items() if number < len(entry.requests)]
        if not partly:
            return {}
        gone = {request for dispatch in dispatches for request in dispatch.requests}
        return {entry: [request for request in entry.requests if request not in gone] for entry in partly}

    def _dispatch_args(
        self, dispatch: Dispatch, entries: Mapping[Entry, int], result_ttl_ms: int
    ) -> list[Argument]:
        indexes = dict.fromkeys(entries[request.entry] for request in dispatch.requests)
        fields: list[Argument] = ["requests", encode_batch(dispatch)]
        fields += ["size", len(dispatch.requests), "reason", dispatch.reason]
        fields += ["dispatched_us", self.clock.now_us(), "result_ttl_ms", result_ttl_ms]
        if dispatch.lane:
            fields += ["lane", dispatch.lane]
        tickets: list[Argument] = []
        for request in dispatch.requests:
            if request.ticket is not None:
                tickets += [entries[request.entry], request.ticket]
        return [len(indexes), *indexes, len(fields), *fields, len(tickets) // 2, *tickets]

    def refuse(
        self, refusals: Sequence[Refusal], emptied: Sequence[Entry], result_ttl_ms: int
    ) -> list[Entry]:
        """Answer requests that are not dispatched, and remove the entries in `emptied` without an answer.

        Returns the entries that were gone: nobody in them was answered.
        """
        by_entry: dict[Entry, list[Refusal]] = {entry: [] for entry in emptied}
        for refusal in refusals:
            by_entry.setdefault(refusal.entry, []).append(refusal)
        script_keys = ScriptKeys(self.keys.requests, self.keys.order, self.keys.held)
        args: list[Argument] = [result_ttl_ms, len(by_entry)]
        staying: dict[Entry, list[Request]] = {}
        for entry, of_entry in by_entry.items():
            leaving = {refusal.request for refusal in of_entry}
            staying[entry] = rest = [request for request in entry.requests if request not in leaving]
            results = result_args(self.keys, script_keys, map(_refused, of_entry))
            args += [entry.id, *_put_back_args(entry, rest), len(results) // RESULT_ARGS, *results]
        new_ids = dict(zip(by_entry, self._link.run(_REFUSE, script_keys.keys, args), strict=True))
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

    def hear(self, timeout_s: float) -> tuple[list[RawEntry], list[BatchSettled | WorkersChanged]]:
        """What is new, or nothing when `timeout_s` passes or Redis had nothing to say."""
        if not self._link.readable(timeout_s):
            return [], []
        reply = self._link.receive()
        self._asked = False
        arrived: list[RawEntry] = []
        settled: list[BatchSettled | WorkersChanged] = []
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


def _without(dispatch: Dispatch, gone: Container[str]) -> Dispatch:
    if not gone:
        return dispatch
    return dispatch._replace(requests=[one for one in dispatch.requests if one.entry.id not in gone])


def _put_back_args(entry: Entry, staying: Sequence[Request]) -> list[Argument]:
    """Payload, arrival (ms) and tickets of those who stay; '' for the payload if nobody does."""
    payload = encode_requests(staying) if staying else b""
    return [payload, entry.arrival_us // 1000, tickets_of(staying)]


def _leave(
    entries: Iterable[Entry], new_ids: Mapping[Entry, bytes | None], staying: Mapping[Entry, list[Request]]
) -> None:
    """Requests left these entries; those that stay are under a new ID."""
    for entry in entries:
        entry.requests = staying.get(entry, [])
        if entry.requests:
            entry.id = (new_ids[entry] or b"").decode()


def _refused(refusal: Refusal) -> tuple[Address, Result]:
    ticket = None if refusal.request is None else refusal.request.ticket
    result = Result(refusal.correlation_id, refusal.status, refusal.content_type, detail=refusal.detail)
    return Address(refusal.reply_to, ticket), result
