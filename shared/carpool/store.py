"""The moves of batcher and worker, one method each, over one connection to one model's keys.

Each move is one script on one hash slot and takes effect wholly or not at all. Each is idempotent, because a
lost reply (LinkError) leaves the caller only one thing to do: say it again, or look.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from carpool import envelopes, wire
from carpool.clock import RedisClock
from carpool.keys import WORKERS_GROUP, Keys, models_key
from carpool.link import Argument, CommandError, Link, Script
from carpool.messages import Batch, DeadLetter, Entry, Refusal, Request, Result, Settled

SETTLED_LENGTH: Final = 10_000
DEAD_LENGTH: Final = 10_000
ENTRY_BYTES: Final = 16 * 1024 * 1024
PROGRESS_TTL_MS: Final = 24 * 3600 * 1000

_DISPATCH: Final = Script("dispatch")
_REFUSE: Final = Script("refuse")
_ANSWER: Final = Script("answer")
_COMMIT: Final = Script("commit")
_RENEW: Final = Script("renew")
_RECLAIM: Final = Script("reclaim")
_JOIN: Final = Script("join")
_LEAVE: Final = Script("leave")
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


class Census(NamedTuple):
    """What Redis says of a model, looked at every half second or so."""

    waiting_entries: int
    batches_in_flight: int
    workers: list[str]
    registration: dict[str, str]
    config: dict[str, str]  # what an operator said instead


class Glance(NamedTuple):
    """A model as whoever may count sees it; `status` is what its batcher says of itself, undecoded."""

    at_us: int
    waiting_entries: int
    batches_in_flight: int
    model_processes: int
    batcher: bool
    status: bytes | None


class Reclaimed(NamedTuple):
    """A batch taken over: who was answered already, and how often each was started alone."""

    batch: Batch
    answered: frozenset[int]
    started: Mapping[int, int]


class Answer(NamedTuple):
    """One request's result ahead of its batch's commit; `position` is its place in the batch."""

    position: int
    reply_to: str | None
    result: Result


class FencedError(Exception):
    """The batch belongs to another worker now: its lease ran out here. What was computed is dropped."""


class Keyring:
    """KEYS of a script, each once, with its index as Lua counts."""

    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)
        self._index: dict[str, int] = {}

    def index(self, key: str) -> int:
        """The index of `key`, which is added if it is new."""
        at = self._index.get(key)
        if at is None:
            self.keys.append(key)
            at = self._index[key] = len(self.keys)
        return at


class Store:
    """One connection to one model. Not for two threads: each loop has a store of its own."""

    def __init__(self, link: Link, keys: Keys, clock: RedisClock | None = None) -> None:
        self._link = link
        self.keys = keys
        self.clock = clock or RedisClock()

    def close(self) -> None:
        """Hang up."""
        self._link.close()

    # --- the batcher's moves -------------------------------------------------------------------------------

    def hold_lease(self, name: str, lease_ms: int) -> bool:
        """Become or stay the model's one active batcher; `lease_ms` 0 steps down."""
        return bool(self._link.run(_LEASE, [self.keys.batcher], [name, lease_ms]))

    def census(self) -> Census:
        """Look at the model, and at the clock."""
        keys = self.keys
        time_reply, waiting, in_flight, workers, *hashes = _no_errors(
            self._link.call_many(
                ("TIME",),
                ("XLEN", keys.requests),
                ("XLEN", keys.batches),
                ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
                ("HGETALL", keys.registration),
                ("HGETALL", keys.config),
            )
        )
        self.clock.set(time_reply, time.monotonic_ns())
        alive = _alive(workers, self.clock.now_us() // 1000)
        return Census(waiting, in_flight, alive, *map(_texts, hashes))

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
            wire.decode_batch(entry_id, flat, 0)
            for entry_id, flat in self._link.call("XRANGE", self.keys.batches, "-", "+")
        ]

    def missing(self, stream: str, entry_ids: Sequence[str]) -> set[str]:
        """Which of these entries are no longer in the stream."""
        return {entry_id.decode() for entry_id in self._link.run(_MISSING, [stream], list(entry_ids))}

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
            args += [entries[entry], entry.arrival_us // 1000, wire.encode_requests(rest)]
        args.append(len(departures))
        for departure in departures:
            args += self._departure_args(departure, entries, result_ttl_ms)
        gone, new_ids, batch_ids = self._link.run(_DISPATCH, [self.keys.requests, self.keys.batches], args)

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
        fields: list[Argument] = ["requests", wire.encode_batch(departure.requests)]
        fields += ["size", len(departure.requests), "reason", departure.reason]
        fields += ["dispatched_us", self.clock.now_us(), "result_ttl_ms", result_ttl_ms]
        if departure.lane:
            fields += ["lane", departure.lane]
        return [len(indexes), *indexes, len(fields), *fields]

    def refuse(
        self, refusals: Sequence[Refusal], emptied: Sequence[Entry], result_ttl_ms: int
    ) -> list[Entry]:
        """Answer requests that are not dispatched, and remove the entries in `emptied` without an answer.

        Returns the entries that were gone: nobody in them was answered.
        """
        by_entry: dict[Entry, list[Refusal]] = {entry: [] for entry in emptied}
        for refusal in refusals:
            by_entry.setdefault(refusal.entry, []).append(refusal)
        keyring = Keyring(self.keys.requests)
        args: list[Argument] = [result_ttl_ms, len(by_entry)]
        staying: dict[Entry, list[Request]] = {}
        for entry, of_entry in by_entry.items():
            leaving = {refusal.request for refusal in of_entry}
            staying[entry] = rest = [request for request in entry.requests if request not in leaving]
            results = self._result_args(keyring, map(_refused, of_entry))
            payload = wire.encode_requests(rest) if rest else b""
            args += [entry.id, payload, entry.arrival_us // 1000, len(results) // 3, *results]
        new_ids = dict(zip(by_entry, self._link.run(_REFUSE, keyring.keys, args), strict=True))
        vanished = [entry for entry, new_id in new_ids.items() if new_id is None]
        _leave(by_entry.keys() - set(vanished), new_ids, staying)
        return vanished

    def expire_in_flight(self, batch_id: str, answers: Sequence[Answer], result_ttl_ms: int) -> int:
        """Answer requests whose deadline passed while their batch is wherever it is.

        Returns how many were answered: none of a batch that has been settled meanwhile.
        """
        return len(self._answer("", batch_id, 0, answers, None, result_ttl_ms))

    # --- the worker's moves --------------------------------------------------------------------------------

    def register(self, registration: Mapping[str, Argument]) -> None:
        """Say what the model is. Nobody else writes it down."""
        flat = [part for pair in registration.items() for part in pair]
        replies = self._link.call_many(
            ("HSET", self.keys.registration, *flat),
            ("SADD", models_key(self.keys.prefix), self.keys.model),
            ("XGROUP", "CREATE", self.keys.batches, WORKERS_GROUP, "0", "MKSTREAM"),
        )
        _no_errors([reply for reply in replies if getattr(reply, "code", "") != "BUSYGROUP"])

    def join(self, consumer: str, lease_ms: int) -> None:
        """A model process is ready for batches."""
        keys = [self.keys.workers, self.keys.batches, self.keys.settled]
        self._link.run(_JOIN, keys, [consumer, lease_ms, SETTLED_LENGTH])

    def leave(self, consumer: str) -> None:
        """A model process takes no more batches."""
        keys = [self.keys.workers, self.keys.batches, self.keys.settled]
        self._link.run(_LEAVE, keys, [consumer, SETTLED_LENGTH])

    def fetch(self, consumer: str, block_ms: int | None) -> Batch | None:
        """The next batch; waits up to `block_ms`, None not at all. CommandError NOGROUP: register again."""
        block: tuple[Argument, ...] = () if block_ms is None else ("BLOCK", block_ms)
        self._link.send(
            "XREADGROUP",
            "GROUP",
            WORKERS_GROUP,
            consumer,
            "COUNT",
            1,
            *block,
            "STREAMS",
            self.keys.batches,
            ">",
        )
        reply = self._link.receive()
        if not reply or not reply[0][1]:
            return None
        entry_id, flat = reply[0][1][0]
        return wire.decode_batch(entry_id, flat, epoch=1)

    def reclaim(self, consumer: str, lease_ms: int) -> Reclaimed | None:
        """Take over a batch whose owner's lease ran out, if there is one."""
        reply = self._link.run(_RECLAIM, [self.keys.batches, self.keys.progress("")], [consumer, lease_ms])
        if reply is None:
            return None
        entry_id, flat, epoch, progress = reply
        answered, started = set(), {}
        for field, value in zip(progress[::2], progress[1::2], strict=True):
            kind, _, position = field.decode().partition(":")
            if kind == "answered":
                answered.add(int(position))
            else:
                started[int(position)] = int(value)
        return Reclaimed(wire.decode_batch(entry_id, flat, epoch), frozenset(answered), started)

    def renew(self, consumer: str, lease_ms: int, held: Iterable[tuple[str, int]]) -> tuple[bool, set[str]]:
        """Extend the lease of a model process and of the batches (ID, epoch) it holds.

        Returns whether the model is still registered, and the IDs of batches that were lost.
        """
        args: list[Argument] = [consumer, lease_ms]
        for batch_id, epoch in held:
            args += [batch_id, epoch]
        keys = [self.keys.workers, self.keys.batches, self.keys.registration]
        registered, *lost = self._link.run(_RENEW, keys, args)
        return bool(registered), {batch_id.decode() for batch_id in lost}

    def look_at_clock(self) -> None:
        """Set the clock by Redis's."""
        self.clock.set(self._link.call("TIME"), time.monotonic_ns())

    def answer(
        self,
        consumer: str,
        batch: Batch,
        answers: Sequence[Answer],
        starting: int | None,
    ) -> set[int]:
        """Write results ahead of the commit, and note which request is started next, alone.

        Returns the positions that were written: the others had been answered. Raises FencedError.
        """
        return self._answer(consumer, batch.id, batch.epoch, answers, starting, batch.result_ttl_ms)

    def _answer(
        self,
        consumer: str,
        batch_id: str,
        epoch: int,
        answers: Sequence[Answer],
        starting: int | None,
        result_ttl_ms: int,
    ) -> set[int]:
        keyring = Keyring(self.keys.batches, self.keys.progress(batch_id))
        args: list[Argument] = [consumer, batch_id, epoch, result_ttl_ms, PROGRESS_TTL_MS]
        args += ["" if starting is None else starting, len(answers)]
        for position, reply_to, result in answers:
            args += [position, *self._result_args(keyring, [(reply_to, result)])]
        answered = self._link.run(_ANSWER, keyring.keys, args)
        if answered == b"FENCED":
            raise FencedError(batch_id)
        return set() if answered == b"SETTLED" else set(answered)

    def commit(
        self,
        consumer: str,
        batch: Batch,
        results: Mapping[int, tuple[str | None, Result]],
        dead: Sequence[DeadLetter],
        compute_us: int,
    ) -> set[int]:
        """Settle a batch. `results` by position, each with its `reply_to`; those left out were answered.

        Returns the positions of which nothing was written, because they were answered meanwhile. Raises
        FencedError.
        """
        left_out = set(range(len(batch.requests))) - results.keys()
        meanwhile: set[int] = set()
        while True:
            answered = self._commit(consumer, batch, results, left_out | meanwhile, dead, compute_us)
            if not answered:
                return meanwhile
            meanwhile |= answered

    def _commit(
        self,
        consumer: str,
        batch: Batch,
        results: Mapping[int, tuple[str | None, Result]],
        left_out: set[int],
        dead: Sequence[DeadLetter],
        compute_us: int,
    ) -> set[int]:
        keys = self.keys
        keyring = Keyring(keys.batches, keys.settled, keys.progress(batch.id), keys.dead)
        if left_out:
            results = {position: one for position, one in results.items() if position not in left_out}
        settled: list[Argument] = ["batch", batch.id, "worker", consumer, "size", len(batch.requests)]
        settled += ["compute_us", compute_us]
        delivered = self._result_args(keyring, results.values())
        args: list[Argument] = [consumer, batch.id, batch.epoch, batch.result_ttl_ms]
        args += [SETTLED_LENGTH, DEAD_LENGTH]
        args += [len(left_out), *left_out, len(settled), *settled, len(delivered) // 3, *delivered, len(dead)]
        for letter in dead:
            fields = wire.encode_dead_letter(letter)
            args += [len(fields), *fields]
        reply = self._link.run(_COMMIT, keyring.keys, args)
        if reply == b"FENCED":
            raise FencedError(batch.id)
        return set() if reply == b"OK" else set(reply)

    def _result_args(self, keyring: Keyring, results: Iterable[tuple[str | None, Result]]) -> list[Argument]:
        """Key index, kind and payload of each list; of each reply stream once for all its results."""
        args: list[Argument] = []
        by_stream: dict[str, list[Result]] = {}
        for reply_to, result in results:
            if reply_to is None:
                key = keyring.index(self.keys.result(result.correlation_id))
                args += [key, "list", envelopes.encode_result(result)]
            else:
                of_stream = by_stream.get(reply_to)
                if of_stream is None:
                    by_stream[reply_to] = [result]
                else:
                    of_stream.append(result)
        for reply_to, of_stream in by_stream.items():
            key = keyring.index(self.keys.replies(reply_to))
            for some in _of_moderate_size(of_stream):
                args += [key, "stream", envelopes.encode_results(some)]
        return args


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
                settled = [wire.decode_settled(flat) for _, flat in entries]
                self._settled_after = entries[-1][0].decode()
            else:
                arrived = entries
                self._requests_after = entries[-1][0].decode()
        return arrived, settled

    def close(self) -> None:
        """Hang up."""
        self._link.close()


class Directory:
    """The registered models, for those who serve or show them all."""

    def __init__(self, link: Link, prefix: str) -> None:
        self._link = link
        self._prefix = prefix

    def models(self) -> list[str]:
        """Names of the registered models, sorted."""
        return sorted(name.decode() for name in self._link.call("SMEMBERS", models_key(self._prefix)))

    def glance(self, model: str) -> Glance:
        """A model as it is now, in one trip."""
        keys = Keys(model, self._prefix)
        time_reply, waiting, in_flight, workers, batcher, status = _no_errors(
            self._link.call_many(
                ("TIME",),
                ("XLEN", keys.requests),
                ("XLEN", keys.batches),
                ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
                ("EXISTS", keys.batcher),
                ("GET", keys.status),
            )
        )
        at_us = int(time_reply[0]) * 1_000_000 + int(time_reply[1])
        return Glance(at_us, waiting, in_flight, len(_alive(workers, at_us // 1000)), bool(batcher), status)

    def config(self, model: str) -> tuple[dict[str, str], dict[str, str]]:
        """What a model's workers registered, and what an operator said instead."""
        keys = Keys(model, self._prefix)
        replies = self._link.call_many(("HGETALL", keys.registration), ("HGETALL", keys.config))
        registration, config = map(_texts, _no_errors(replies))
        return registration, config

    def configure(self, model: str, values: Mapping[str, str], back: Sequence[str]) -> None:
        """An operator says `values` instead of what is registered, and takes back the settings in `back`."""
        key = Keys(model, self._prefix).config
        commands: list[tuple[Argument, ...]] = [("MULTI",)]
        if values:
            commands.append(("HSET", key, *(part for pair in values.items() for part in pair)))
        if back:
            commands.append(("HDEL", key, *back))
        _no_errors(self._link.call_many(*commands, ("EXEC",)))

    def oldest_arrival_us(self, model: str) -> int | None:
        """When the oldest waiting request of a model arrived."""
        oldest = self._link.call("XRANGE", Keys(model, self._prefix).requests, "-", "+", "COUNT", 1)
        if not oldest:
            return None
        arrival_ms = dict(zip(oldest[0][1][::2], oldest[0][1][1::2], strict=True)).get(b"arrival", b"")
        return int(arrival_ms) * 1000 if arrival_ms.isdigit() else wire.arrival_of(oldest[0][0].decode())

    def close(self) -> None:
        """Hang up."""
        self._link.close()


def _leave(
    entries: Iterable[Entry], new_ids: Mapping[Entry, bytes | None], staying: Mapping[Entry, list[Request]]
) -> None:
    """Requests left these entries; those that stay are under a new ID."""
    for entry in entries:
        entry.requests = staying.get(entry, [])
        if entry.requests:
            entry.id = (new_ids[entry] or b"").decode()


def _of_moderate_size(results: list[Result]) -> Iterable[list[Result]]:
    """Results for entries of about ENTRY_BYTES: Redis takes no more than 512 MiB in one string."""
    some: list[Result] = []
    size_bytes = 0
    for result in results:
        if some and size_bytes > ENTRY_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(result)
        size_bytes += len(result.body or b"")
    if some:
        yield some


def _refused(refusal: Refusal) -> tuple[str | None, Result]:
    result = Result(refusal.correlation_id, refusal.status, refusal.content_type, detail=refusal.detail)
    return refusal.reply_to, result


def _alive(workers: Sequence[bytes], now_ms: int) -> list[str]:
    """Of members and scores in turn, the model processes whose lease runs."""
    return [
        member.decode()
        for member, lease_end_ms in zip(workers[::2], workers[1::2], strict=True)
        if float(lease_end_ms) > now_ms
    ]


def _texts(flat: Sequence[bytes]) -> dict[str, str]:
    texts = [text.decode("utf-8", "replace") for text in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def _no_errors(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, CommandError):
            raise reply
    return replies
