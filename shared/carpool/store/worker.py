"""What a worker does in Redis: register, take batches and keep them, write results."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

from carpool.clock import RedisClock
from carpool.errors import OK
from carpool.keys import WORKERS_GROUP, Keys, batch_id_of, batch_stream, batch_streams, models_key
from carpool.messages.batches import Batch
from carpool.messages.results import DeadLetter, Result, RunResults
from carpool.messages.sequences import SequenceChange
from carpool.messages.settled import NOT_EXECUTED, Executed
from carpool.model_settings import DEAD_LETTERS_MAX
from carpool.process_names import worker_of
from carpool.rows import NO_STORED_BODY, Body, StoredBody
from carpool.store.arguments import ScriptKeys, change_args, group_list_args, list_args
from carpool.store.connection import Argument, Command, CommandError, Link, Script
from carpool.store.dead_letters import DeadLetters
from carpool.store.declarations import Declarations
from carpool.store.directory import SETTLED_ENTRIES_MAX, ProcessMemory, alive, no_errors
from carpool.store.results import (
    DELIVER_IN_ORDER,
    Address,
    Answer,
    FencedError,
    Owner,
    Start,
    answer_ahead,
    release,
    result_groups,
)
from carpool.wire.batches import decode_batch, encode_dead_letter, settled_fields
from carpool.wire.registration import OPTIONAL_FIELDS, VERSION

_COMMIT: Final = Script("commit", after=("ownership", *DELIVER_IN_ORDER, "sequence", "statistics"))
_DRAIN: Final = Script("drain")
_UNDRAIN: Final = Script("undrain")
_RENEW: Final = Script("renew", after=("ownership",))
_RECLAIM: Final = Script("reclaim")
_JOIN: Final = Script("join")
_LEAVE: Final = Script("leave")


class Progress(NamedTuple):
    """What is known of a batch in flight: positions that were answered already, and how often each was
    started alone. Of a request of a stepping model also its chunks, oldest first, and the time from its
    arrival to the first one."""

    answered: frozenset[int]
    started: Mapping[int, int]
    chunks: Sequence[bytes] = ()
    first_us: int | None = None

    @classmethod
    def read(cls, flat: Sequence[bytes]) -> Self:
        """From the hash, as Redis returns it: field, value, field, value."""
        answered: set[int] = set()
        started: dict[int, int] = {}
        chunks: dict[int, bytes] = {}
        first_us: int | None = None
        for field, value in zip(flat[::2], flat[1::2], strict=True):
            kind, _, number = field.decode().partition(":")
            if kind == "answered":
                answered.add(int(number))
            elif kind == "started":
                started[int(number)] = int(value)
            elif kind == "chunk":
                chunks[int(number)] = value
            elif kind == "first_us":
                first_us = int(value)
        return cls(frozenset(answered), started, [chunks[at] for at in sorted(chunks)], first_us)


def _answered_positions(fields: Sequence[bytes]) -> set[int]:
    """Of the names of a hash's fields: the positions that were answered."""
    return {int(name.removeprefix(b"answered:")) for name in fields if name.startswith(b"answered:")}


class Reclaimed(NamedTuple):
    """A batch taken over, and what its last worker did."""

    batch: Batch
    progress: Progress


class Loaded(NamedTuple):
    """What was loaded for a batch, by position: what is wrong with stored bodies that could not be; and the
    states of sequences, without those of which Redis has none."""

    failures: Mapping[int, str]
    states: dict[int, bytes]


class Renewal(NamedTuple):
    """What a renewal found: whether the model is still registered, whether the process's lease had not run
    out before, how many model processes of all workers are live, and the IDs of lost batches."""

    is_registered: bool
    had_lease: bool
    model_processes: int
    lost: set[str]


class Orders(NamedTuple):
    """What an operator says: the override of a setting, as text, empty without one; and whether this worker
    is to drain."""

    override: str
    is_drained: bool


class WorkerStore:
    """A worker's connection to one model. Not for two threads: each loop has a store of its own."""

    def __init__(self, link: Link, keys: Keys, clock: RedisClock | None = None) -> None:
        self._link = link
        self.keys = keys
        self.clock = clock or RedisClock()
        self._batches = keys.batches
        self._last_commit_keys = (keys.dead, keys.order, keys.tickets, keys.statistics)
        self.version = ""

    @property
    def version(self) -> str:
        """The version of the worker's model: it takes the batches of any version, and those of this one."""
        return self._version

    @version.setter
    def version(self, version: str) -> None:
        self._version = version
        self._streams = batch_streams(self.keys, version)
        self._fetched = (*self._streams, *[">"] * len(self._streams))

    @property
    def declarations(self) -> Declarations:
        """What the workers of the model declare."""
        return Declarations(self._link, self.keys)

    def register(self, registration: Mapping[str, Argument]) -> None:
        """Write the registration of the model; only workers do.

        What a model of this name declared before, and this one does not, is removed.
        """
        fields = [part for pair in registration.items() for part in pair]
        undeclared = [name for name in OPTIONAL_FIELDS if name not in registration]
        if undeclared:
            self._link.call("HDEL", self.keys.registration, *undeclared)
        replies = self._link.call_many(
            ("HSET", self.keys.registration, *fields),
            *[("XGROUP", "CREATE", stream, WORKERS_GROUP, "0", "MKSTREAM") for stream in self._streams],
            *([("SADD", self.keys.versions, self._version)] if self._version else ()),
        )
        no_errors([reply for reply in replies if getattr(reply, "code", "") != "BUSYGROUP"])
        names = models_key(self.keys.prefix)
        self._link.call_at(names, "SADD", names, self.keys.model)

    def tell_batcher(self, worker: str) -> None:
        """Have the batcher look at the model now: what is registered has changed."""
        self._link.call(
            "XADD", self.keys.settled, "MAXLEN", "~", SETTLED_ENTRIES_MAX, "*", "worker", worker, "size", 0
        )

    def orders(self, setting: str, worker: str) -> Orders:
        """What an operator says of a setting, and of this worker, in one round trip. Raises CommandError."""
        override, drained = self._link.call_many(
            ("HGET", self.keys.overrides, setting), ("HGET", self.keys.drained, worker)
        )
        no_errors([override])
        text = "" if override is None else str(override.decode("utf-8", "replace"))
        return Orders(text, type(drained) is bytes)  # an error: rules of another version for this role

    def forget_order(self, worker: str) -> None:
        """This worker ends: an operator need not drain it any more."""
        self._link.call("HDEL", self.keys.drained, worker)

    def join(self, consumer: str, lease_ms: int) -> None:
        """A model process is ready for batches."""
        keys = [self.keys.workers, self.keys.settled, *self._streams]
        self._link.run(_JOIN, keys, [consumer, lease_ms, SETTLED_ENTRIES_MAX])

    def leave(self, consumer: str) -> None:
        """A model process takes no more batches."""
        keys = [self.keys.workers, self.keys.settled, *self._streams]
        self._link.run(_LEAVE, keys, [consumer, SETTLED_ENTRIES_MAX])

    def drain(self, consumer: str) -> int:
        """A model process takes no more batches, or of a bound model begins no more sequences; it leaves when
        it has finished what it has. Returns how many others live and do not drain."""
        keys = [self.keys.draining, self.keys.settled, self.keys.workers]
        return int(self._link.run(_DRAIN, keys, [consumer, SETTLED_ENTRIES_MAX]))

    def others_take_its_version(self, worker: str) -> bool:
        """Whether processes of other workers take the batches that are for the version of this one."""
        declared = self.declarations.read().by_worker
        time_reply, scores, draining = no_errors(
            self._link.call_many(
                ("TIME",),
                ("ZRANGE", self.keys.workers, 0, -1, "WITHSCORES"),
                ("SMEMBERS", self.keys.draining),
            )
        )
        now_ms = int(time_reply[0]) * 1000 + int(time_reply[1]) // 1000
        taking = set(alive(scores, now_ms)).difference(name.decode() for name in draining)
        others = set(map(worker_of, taking)) - {worker}
        return any(declared.get(other, {}).get(VERSION, "") == self._version for other in others)

    def undrain(self, consumer: str) -> None:
        """A model process that drained takes batches again, or of a bound model begins sequences."""
        keys = [self.keys.draining, self.keys.settled]
        self._link.run(_UNDRAIN, keys, [consumer, SETTLED_ENTRIES_MAX])

    def start_fetch(self, consumer: str, block_ms: int | None, count: int = 1) -> None:
        """Ask for the next batches, at most `count` of any version and as many of the worker's own, for which
        Redis waits up to `block_ms`; None: not at all. Until `finish_fetch`, nothing else may be called."""
        block: list[Argument] = [] if block_ms is None else ["BLOCK", block_ms]
        self._link.send(
            "XREADGROUP", "GROUP", WORKERS_GROUP, consumer, "COUNT", count, *block,
            "STREAMS", *self._fetched,
        )  # fmt: skip
        self._link.expect_reply((block_ms or 0) / 1000)

    def finish_fetch(self) -> list[Batch]:
        """The batches that were asked for, empty if there was none; waits until `descriptor` is readable.

        Raises CommandError with the code NOGROUP if Redis was emptied: register again.
        """
        reply = self._link.receive()
        return [
            decode_batch(entry_id, flat, epoch=1) for _, entries in reply or () for entry_id, flat in entries
        ]

    @property
    def descriptor(self) -> int | None:
        """The socket to wait on for what was asked for; None if there is nothing to wait for."""
        return self._link.descriptor

    def check_overdue(self) -> None:
        """Close the connection if what was asked for is not answered in time. Raises LinkError then."""
        self._link.check_overdue()

    def reclaim(self, consumer: str, lease_ms: int) -> Reclaimed | None:
        """Take over a batch whose owner's lease ran out, if there is one."""
        keys = [self.keys.progress(""), *self._streams]
        reply = self._link.run(_RECLAIM, keys, [consumer, lease_ms, batch_id_of("", self._version)])
        if reply is None:
            return None
        entry_id, flat, epoch, progress = reply
        return Reclaimed(decode_batch(entry_id, flat, epoch), Progress.read(progress))

    def load(self, batch: Batch, answered: Container[int] = ()) -> Loaded:
        """Load what a batch does not have with it, in one round trip: stored bodies, into its runs, and the
        states of sequences, except for those that start, and those that a process has. Not for `answered`
        positions.

        Bodies that cannot be loaded stay as they are.
        """
        stored: list[tuple[int, list[Body], int, StoredBody]] = []
        sequences: list[tuple[int, str]] = []
        position = 0
        for run in batch.runs:
            if type(run.bodies) is list:
                stored += [
                    (position + at, run.bodies, at, body)
                    for at, body in enumerate(run.bodies)
                    if type(body) is StoredBody
                ]
            is_kept = run.sequence is not None and not run.sequence.starts and not batch.process
            if run.sequence is not None and is_kept and position not in answered:
                sequences.append((position, run.sequence.sequence_id))
            position += len(run.correlation_ids)
        if not stored and not sequences:
            return Loaded({}, {})
        batch.body_names = [body.name for *_, body in stored]
        needed = [item for item in stored if item[0] not in answered]
        # No more than a byte over what was declared: what a key has is up to its producer.
        commands: list[tuple[Command, int]] = [
            (("GETRANGE", self.keys.body(body.name), 0, body.size_bytes), body.size_bytes)
            for *_, body in needed
        ]
        commands += [(("HGET", self.keys.sequence(name), "state"), 0) for _, name in sequences]
        replies = self._link.call_strings(commands)
        for reply in replies:
            if isinstance(reply, CommandError) and reply.code != "WRONGTYPE":
                raise reply
        failures: dict[int, str] = {}
        for (position, bodies, at, body), reply in zip(needed, replies[: len(needed)], strict=True):
            if isinstance(reply, CommandError):
                failures[position] = "body_key: the key is not a string"
            elif len(reply) != body.size_bytes:
                failures[position] = _wrong_length(len(reply), body)
            else:
                bodies[at] = reply
        states = zip(sequences, replies[len(needed) :], strict=True)
        return Loaded(failures, {position: state for (position, _), state in states if type(state) is bytes})

    def answered(self, batches: Sequence[Batch]) -> list[set[int]]:
        """The positions in each of these batches in flight that were answered ahead, by anybody."""
        commands: list[Command] = [("HKEYS", self.keys.progress(batch.id)) for batch in batches]
        replies = self._link.call_many(*commands)
        for reply in replies:
            if isinstance(reply, CommandError):
                raise reply
        return [_answered_positions(names) for names in replies]

    def renew(
        self, consumer: str, lease_ms: int, batches: Iterable[tuple[str, int]], *, revive: bool = True
    ) -> Renewal:
        """Extend the lease of a model process and of the batches (ID, epoch) that it has in hand. `revive`:
        its lease also if that had run out."""
        args: list[Argument] = [consumer, lease_ms, "1" if revive else ""]
        for batch_id, epoch in batches:
            args += [batch_id, epoch]
        keys = [self.keys.workers, self.keys.batches, self.keys.registration, *self._streams[1:]]
        registered, had_lease, live, *lost = self._link.run(_RENEW, keys, args)
        return Renewal(bool(registered), bool(had_lease), live, {batch_id.decode() for batch_id in lost})

    def tell_memory(
        self, worker: str, processes: Sequence[ProcessMemory], ttl_ms: int, about: str = ""
    ) -> None:
        """Tell what the model processes of this worker take, and what else is to be known `about` it
        (`wire.orders`). It is forgotten after `ttl_ms`."""
        key = self.keys.memory(worker)
        told: list[Argument] = ["about", about] if about else []
        for number, (resident, on_gpus) in enumerate(processes):
            told += [number, f"{resident} {on_gpus}"]
        no_errors(self._link.call_many(("HSET", key, *told), ("PEXPIRE", key, ttl_ms)))

    def trim_dead_letters(self) -> dict[str, int]:
        """Drop the dead letters over the model's settings. Returns how many, by setting."""
        return DeadLetters(self._link, self.keys).trim()

    def read_clock(self) -> None:
        """Set the clock from Redis's."""
        sent_ns = time.monotonic_ns()
        self.clock.set(self._link.call("TIME"), sent_ns, time.monotonic_ns())

    def answer(
        self,
        consumer: str,
        batch: Batch,
        answers: Sequence[Answer],
        starting: Start | None,
        executed: Executed = NOT_EXECUTED,
    ) -> set[int]:
        """Write results ahead of the commit, and record which request is executed next, alone.

        `executed`: how these requests were executed.

        Returns the positions that were written: the others had been answered. Raises FencedError.
        """
        owner = Owner(consumer, batch.epoch)
        ttl_ms = batch.result_ttl_ms
        return answer_ahead(self._link, self.keys, owner, batch.id, answers, starting, ttl_ms, executed)

    def commit(
        self,
        consumer: str,
        batch: Batch,
        results: Mapping[int, tuple[Address, Result]],
        dead: Sequence[DeadLetter],
        executed: Executed,
        run_results: Sequence[RunResults] = (),
        changes: Sequence[SequenceChange] = (),
    ) -> set[int]:
        """Commit a batch, all or nothing.

        `results` of single requests by position, each with its address, and `run_results` those of requests
        of one run. All other positions were answered ahead. `changes`: what all of these results do to
        sequences.

        Returns the positions that must be left out, too, because they had been answered ahead after all: then
        nothing was written, and the caller commits again. Raises FencedError.
        """
        keys = self.keys
        stream = batch_stream(keys, batch.id) if batch.version else self._batches
        script_keys = ScriptKeys(stream, keys.settled, keys.progress(batch.id), *self._last_commit_keys)
        left_out: set[int] = set()
        if len(results) + sum([len(of_run.positions) for of_run in run_results]) < batch.size:
            left_out = set(range(batch.size)) - results.keys()
            left_out = left_out.difference(*(of_run.positions for of_run in run_results))
        body_keys = [script_keys.index(keys.body(name)) for name in batch.body_names]
        args: list[Argument] = [
            consumer, batch.id, batch.epoch, batch.result_ttl_ms, batch.size, executed.compute_us,
            executed.requests, executed.waited_us, executed.overhead_us,
            SETTLED_ENTRIES_MAX, DEAD_LETTERS_MAX,
            " ".join([change.part.sequence_id for change in changes if change.outcome == "broken"]),
            *_counted(batch, results, run_results, self.clock.now_us()),
            executed.input_us, executed.compute_us - executed.counted_us, executed.output_us,
            len(left_out), *left_out, *list_args(settled_fields(executed)),
            len(body_keys), *body_keys,
        ]  # fmt: skip
        args += group_list_args(result_groups(keys, script_keys, results.values(), run_results))
        args += group_list_args([list_args(encode_dead_letter(letter)) for letter in dead])
        args += change_args(keys, script_keys, changes)
        outcome, *positions = self._link.run(_COMMIT, script_keys.keys, args)
        if outcome == b"FENCED":
            raise FencedError(batch.id)
        if outcome == b"SETTLED_MORE":
            release(self._link, keys)
        return set(positions)


def _counted(
    batch: Batch,
    results: Mapping[int, tuple[Address, Result]],
    run_results: Sequence[RunResults],
    now_us: int,
) -> tuple[int, int, int, int, int]:
    """What the model's statistics count of these results: how many are OK, their time from arrival, and that
    in the queue; how many are errors, and their time from arrival (us, added up)."""
    succeeded = success_us = queue_us = failed = fail_us = 0
    for of_run in run_results:
        number = len(of_run.positions)
        succeeded += number
        success_us += number * max(0, now_us - of_run.run.arrival_us)
        queue_us += number * of_run.queue_us
    for position, (_, result) in results.items():
        total_us = max(0, now_us - batch.run_of(position).arrival_us)
        if result.status == OK:
            succeeded += 1
            success_us += total_us
            queue_us += result.queue_us
        else:
            failed += 1
            fail_us += total_us
    return succeeded, success_us, queue_us, failed, fail_us


def _wrong_length(found_bytes: int, body: StoredBody) -> str:
    if not found_bytes:
        return NO_STORED_BODY
    found = f"{found_bytes}" if found_bytes < body.size_bytes else "more"
    return f"body_key: {found} bytes, but body_bytes is {body.size_bytes}"
