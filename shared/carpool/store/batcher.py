"""What a batcher does in Redis for one model: dispatch, refuse, answer ahead; and what it looks up.

With `preserve_ordering` also: put tickets into the order, and release withheld results.

Nothing here changes an Entry or a Request. `dispatch` and `refuse` return what happened to entries, and the
batcher updates its own table of them.

Why: docs/decisions/0020.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, filterfalse
from typing import Any, Final, NamedTuple

import msgpack

from carpool.clock import RedisClock
from carpool.keys import WORKERS_GROUP, Keys, batch_id_of, batch_stream, entry_of_batch
from carpool.messages.batches import Batch, Dispatch, tickets_of_each
from carpool.messages.requests import Entry, Run
from carpool.messages.results import UNANSWERED, Refusal, Result
from carpool.messages.sequences import KeptSequence, SequenceChange, SlotFreed
from carpool.model_settings import MAX_RESULT_TTL_MS, ModelKind
from carpool.rows import BODY_TTL_MS, stored_names
from carpool.store.arguments import Group, ScriptKeys, change_args, group_list_args, list_args
from carpool.store.connection import Argument, Command, CommandError, Link, Script
from carpool.store.directory import in_streams_of_versions, no_errors, texts
from carpool.store.reader import ENTRIES_MAX, mean_bytes
from carpool.store.results import (
    DELIVER_IN_ORDER,
    Address,
    AlikeResults,
    Answer,
    FirstTicket,
    SettledError,
    alike_groups,
    answer_ahead,
    release,
    result_groups,
)
from carpool.tickets import TicketRange
from carpool.wire.batches import decode_batch, encode_batch, encode_tickets
from carpool.wire.content_types import answer_type
from carpool.wire.field_hints import warnings_of
from carpool.wire.inbox import SequenceEnded, encode_ended
from carpool.wire.requests import encode_runs, tickets_of

_ADMIT: Final = Script("ordering/admit", after=(*DELIVER_IN_ORDER, "ordering/enter"))
_DISPATCH: Final = Script(
    "dispatch", after=(*DELIVER_IN_ORDER, "ordering/enter", "put_back", "inbox", "answered")
)
_REFUSE: Final = Script("refuse", after=(*DELIVER_IN_ORDER, "put_back", "sequence", "inbox", "statistics"))
_MISSING: Final = Script("missing")
_REASSIGN: Final = Script("reassign")
_ABANDON: Final = Script("abandon")
_FORGET_VERSION: Final = Script("forget_version")
_REPORT: Final = Script("report")

SOUGHT_KEYS_MAX: Final = 900  # of a dispatch; beyond these, what was sent again is executed again

PUT_BACK_ENTRIES_MAX: Final = 8  # in which the rest of one entry is put back
PUT_BACK_REQUESTS_MIN: Final = 16  # in each of them but the last; a run is never divided for this
RENEWALS_MAX: Final = 1000  # in one round trip
LOOKUPS_MAX: Final = 1000  # likewise
# In one script or command, because Redis serves nobody else meanwhile:
ANSWERS_MAX: Final = 1000
STATED_RANGES_MAX: Final = 1000  # except those of one entry
ENTRIES_LOOKED_UP: Final = 500  # about 10 us each,
BYTES_LOOKED_UP: Final = 1 << 20  # and about 2.5 ms for these
_VERSION: Final = "version"  # a field of what a worker declares: see `wire.registration`
_IN_HAND_MAX: Final = 100_000  # batches of one process that are looked up
_COMMON_STREAM: Final = 2  # index in KEYS of dispatch.lua
IN_FLIGHT_BYTES: Final = 2 << 20  # of batches in flight, about 1.5 ms; a single batch may have 64 MiB

_FIELDS_KEPT: Final = ("next", "first", "last", "broken", "broken_at", "failed_at")


class PutBack(NamedTuple):
    """An entry was replaced by others: for each its ID, and the runs that it holds and that still wait."""

    entry: Entry
    parts: list[tuple[str, list[Run]]]


class Admission(NamedTuple):
    """The number of tickets in the order: of requests that wait or are in flight, and of withheld results.

    `forged`: entries that state tickets which are not theirs. Their requests have none.
    """

    tickets: int
    forged: list[Entry]


class EntryChanges(NamedTuple):
    """What a script did to entries of the request stream; each of them is in one of these lists."""

    removed: list[Entry]  # with all of their requests
    put_back: list[PutBack]
    missing: list[Entry]  # no longer in the stream: none of their requests was dispatched or answered


class PreparedRefusal(NamedTuple):
    """What a script is given to refuse requests. `put_back`: of each entry, what is put back of it."""

    keys: list[str]
    args: list[Argument]
    put_back: dict[Entry, list[list[Run]]]


class LookedUp(NamedTuple):
    """How many entries were looked up, and which of these are no longer in their stream."""

    number: int
    missing: set[str]


class NotActiveError(Exception):
    """This batcher does not hold the lease any more, and must to do this. Nothing was written."""


class PausedError(Exception):
    """An operator has paused the model, so nothing was dispatched."""


class ProcessLeftError(Exception):
    """Nothing was dispatched, because no process would take it: those for which it was meant have left (one
    of a bound model, or all of a version), or all processes of the model drain."""


class Dispatched(NamedTuple):
    """A batch that is in flight now: its ID, and its dispatch with the requests that still waited."""

    batch_id: str
    dispatch: Dispatch


class DispatchReply(NamedTuple):
    """What became of dispatches, in their order: None where none of the requests still waited."""

    batches: list[Dispatched | None]
    entries: EntryChanges
    tickets: int | None  # in the order of results; None if none were put there


class BatcherStore:
    """A batcher's moves of one model. The models of a batcher share its connection and its clock."""

    def __init__(self, link: Link, keys: Keys, clock: RedisClock | None = None) -> None:
        self._link = link
        self.keys = keys
        self.clock = clock or RedisClock()
        self.name = ""  # of the batcher, which must hold the lease to refuse requests; if empty, it need not
        self.kind = ModelKind.PLAIN  # if it has sequences, it must hold the lease to dispatch them, too
        self.versions: Sequence[str] = ()  # that have batch streams of their own
        self.sees_pauses = True  # else its rules in Redis are older than pauses, and it may not look

    def last_settled_id(self) -> bytes:
        """The ID after which `settled` must be read to get only batches that are settled from now on."""
        last = self._link.call("XREVRANGE", self.keys.settled, "+", "-", "COUNT", 1)
        return bytes(last[0][0]) if last else b"0-0"

    @property
    def _batch_streams(self) -> list[str]:
        """All streams of batches: the common one first."""
        return [self.keys.batches, *map(self.keys.batches_of, self.versions)]

    def batches_in_flight(self) -> Iterator[Batch]:
        """Every batch that is dispatched and not settled, read IN_FLIGHT_BYTES at a time."""
        for stream in self._batch_streams:
            yield from self._batches_in(stream)

    def _batches_in(self, stream: str) -> Iterator[Batch]:
        after, count = b"0-0", 1
        while entries := self._link.call("XRANGE", stream, b"(" + after, "+", "COUNT", count):
            after = entries[-1][0]
            count = max(1, min(ENTRIES_MAX, IN_FLIGHT_BYTES // mean_bytes(entries)))
            for entry_id, flat in entries:
                yield decode_batch(entry_id, flat, 0)

    def kept_sequences(self, *, with_processes: bool = False) -> list[KeptSequence]:
        """Every sequence of which Redis keeps a state, or that it is broken. `with_processes`: of a bound
        model, which has the names of processes in place of states."""
        fields = (*_FIELDS_KEPT, "state") if with_processes else _FIELDS_KEPT
        flat = self._link.call("ZRANGE", self.keys.sequences, 0, -1, "WITHSCORES")
        scored = zip(flat[::2], flat[1::2], strict=True)
        changed_us = {name.decode(): int(float(at_ms)) * 1000 for name, at_ms in scored}
        kept: list[KeptSequence] = []
        known = list(changed_us)
        for start in range(0, len(known), LOOKUPS_MAX):
            names = known[start : start + LOOKUPS_MAX]
            commands = [("HMGET", self.keys.sequence(name), *fields) for name in names]
            for name, reply in zip(names, self._link.call_many(*commands), strict=True):
                if isinstance(reply, CommandError):  # a user made the key another type
                    kept.append(KeptSequence(name, changed_us[name], None))
                else:
                    kept.append(_kept_sequence(name, changed_us[name], dict(zip(fields, reply, strict=True))))
        return kept

    def chunks_written(self, batch_ids: Sequence[str]) -> dict[str, int]:
        """How many chunks of these streams in flight Redis has. Those without any are left out, and those of
        which it does not say."""
        written: dict[str, int] = {}
        for start in range(0, len(batch_ids), LOOKUPS_MAX):
            ids = batch_ids[start : start + LOOKUPS_MAX]
            commands = [("HGET", self.keys.progress(batch_id), "chunks") for batch_id in ids]
            for batch_id, reply in zip(ids, self._link.call_many(*commands), strict=True):
                if isinstance(reply, bytes) and reply.isdigit():  # a user may make the key anything
                    written[batch_id] = int(reply)
        return written

    def last_waiting_id(self) -> bytes | None:
        """The ID of the last entry of the request stream; None if it is empty."""
        last = self._link.call_truncated(0, "XREVRANGE", self.keys.requests, "+", "-", "COUNT", 1)
        return bytes(last[0][0]) if last else None

    def missing_batches(self, batch_ids: Iterable[str]) -> set[str]:
        """Which of these batches are no longer in their streams. O(their bytes)."""
        by_stream: dict[str, list[str]] = {}
        for batch_id in batch_ids:
            by_stream.setdefault(batch_stream(self.keys, batch_id), []).append(batch_id)
        missing: set[str] = set()
        for stream, ids in by_stream.items():
            gone = self.missing(stream, list(map(entry_of_batch, ids)))
            missing.update(batch_id for batch_id in ids if entry_of_batch(batch_id) in gone)
        return missing

    def number_in_flight(self) -> int:
        """How many batches are in the streams of versions."""
        return in_streams_of_versions(self._link, self.keys, self.versions)

    def versions_of_workers(self) -> dict[str, str]:
        """By the name of each worker the version that it declares, '' if none. Some of these may be gone."""
        found: dict[str, str] = {}
        for name, text in texts(self._link.call("HGETALL", self.keys.declared)).items():
            with suppress(ValueError):  # a user wrote the key
                found[name] = str(dict(json.loads(text)).get(_VERSION, ""))
        return found

    def reassign(self, batch_id: str) -> str | None:
        """Give a batch for a version to the workers of any version. Returns its new ID; None if it was
        settled meanwhile."""
        keys = self.keys
        script_keys = [batch_stream(keys, batch_id), keys.batches, keys.progress(batch_id), keys.progress("")]
        reply = self._link.run(_REASSIGN, script_keys, [entry_of_batch(batch_id)])
        return None if reply is None else str(reply.decode())

    def abandon(self, batch_id: str) -> None:
        """Remove a batch for a version, all of whose requests were answered."""
        script_keys = [batch_stream(self.keys, batch_id), self.keys.progress(batch_id)]
        self._link.run(_ABANDON, script_keys, [entry_of_batch(batch_id)])

    def forget_version(self, version: str) -> None:
        """A version has no workers any more: its stream is removed, if nothing is in it."""
        self._link.run(_FORGET_VERSION, [self.keys.batches_of(version), self.keys.versions], [version])

    def publish_answer(self, name: str, answer: str, ttl_ms: int) -> None:
        """Answer a question, under the name that it gave. The answer expires after `ttl_ms`."""
        self._link.run(_REPORT, [self.keys.answer(name)], [answer, ttl_ms])

    def batches_of_process(self, process: str) -> list[str]:
        """The IDs of the batches that a model process has in hand, of all streams."""
        look = ("-", "+", _IN_HAND_MAX, process)
        commands: list[Command] = [
            ("XPENDING", stream, WORKERS_GROUP, *look) for stream in self._batch_streams
        ]
        found: list[str] = []
        for version, reply in zip(("", *self.versions), self._link.call_many(*commands), strict=True):
            if isinstance(reply, CommandError):
                if reply.code != "NOGROUP":
                    raise reply
                continue
            found += [batch_id_of(entry_id.decode(), version) for entry_id, *_ in reply]
        return found

    def missing(self, stream: str, entry_ids: Sequence[str]) -> set[str]:
        """Which of these entries are no longer in the stream. O(their bytes)."""
        missing: set[str] = set()
        start = 0
        while start < len(entry_ids):
            looked_up = self.look_up(stream, entry_ids[start : start + ENTRIES_LOOKED_UP])
            missing |= looked_up.missing
            start += looked_up.number
        return missing

    def look_up(self, stream: str, entry_ids: Sequence[str]) -> LookedUp:
        """Which of the first of these entries are no longer in the stream. Redis copies those that are, so as
        many are looked up as have BYTES_LOOKED_UP together."""
        number, *missing = self._link.run(_MISSING, [stream], [BYTES_LOOKED_UP, *entry_ids])
        return LookedUp(number, {entry_id.decode() for entry_id in missing})

    def admit(self, arrivals: Sequence[TicketRange], put_back: Sequence[Entry] = ()) -> Admission:
        """Put the tickets of entries that arrived into the order of results.

        `put_back`: entries that say that they were. The tickets that these state are in it already: only
        verify that. Any producer may state thousands in each of its entries: so a script verifies about
        STATED_RANGES_MAX of them.
        """
        order, forged = [self.keys.order, self.keys.tickets], []
        tickets = 0
        for at, together in enumerate(_stated_together(put_back)):
            stated = [[entry.id, *list_args(list(map(str, ranges)))] for entry, ranges in together]
            args = [_arrivals_arg(() if at else arrivals), *group_list_args(stated)]
            tickets, *of_script = self._link.run(_ADMIT, order, args)
            forged += [together[index - 1][0] for index in of_script]
        return Admission(tickets, forged)

    def release(self, is_known: Callable[[FirstTicket], bool] = lambda first: False) -> int:
        """Deliver withheld results whose turn has come, and free tickets whose request was lost.

        `is_known`: whether the first ticket's request is known to wait or to be in flight. If so, it is not
        looked up, which would cost Redis the bytes of its entry, and of all batches in flight.

        Returns the number of tickets in the order.
        """
        first = release(self._link, self.keys)
        if first is not None and not is_known(first):
            first = release(self._link, self.keys, free_lost=[self.keys.requests, *self._batch_streams])
        return 0 if first is None else first.tickets

    def dispatch(
        self,
        dispatches: Sequence[Dispatch],
        result_ttl_ms: int,
        arrivals: Sequence[TicketRange] = (),
        settings: str = "",
        result_ttl_ms_max: int = MAX_RESULT_TTL_MS,
    ) -> DispatchReply:
        """Turn waiting requests into batches in flight. The rest of a partly dispatched entry is put back.

        One script, because batches share entries. It has a batch for each model process that can take one,
        and together they have at most what may wait, `max_queue_size` and `max_queue_bytes`.
        `arrivals`: tickets of entries that arrived, to be put into the order of results before that.
        `settings`: those that its worker needs (`ModelSettings.for_workers`). `result_ttl_ms_max`: how long a
        result is kept at most, for requests that have records.
        Raises NotActiveError, PausedError and ProcessLeftError.
        """
        decided = {run for dispatch in dispatches for run in dispatch.runs}
        indexes: dict[Entry, int] = {}
        for run in [run for dispatch in dispatches for run in dispatch.runs]:
            indexes.setdefault(run.entry, len(indexes) + 1)
        remaining = {entry: parts for entry in indexes if (parts := _parts_to_put_back(entry, decided))}
        put_back = [(indexes[entry], *_put_back_args(entry, parts)) for entry, parts in remaining.items()]
        keys = self.keys
        script_keys = ScriptKeys(keys.requests, keys.batches, keys.tickets, keys.order)
        script_keys.keys += [keys.workers, keys.draining, keys.batcher]
        only_active_as = self.name if self.kind.has_sequences else ""
        model_fields: list[Argument] = ["dispatched_us", self.clock.now_us(), "result_ttl_ms", result_ttl_ms]
        model_fields += ["settings", settings] if settings else []
        batches = [
            self._batch_element(dispatch, indexes, model_fields, script_keys, result_ttl_ms_max)
            for dispatch in dispatches
        ]
        paused = script_keys.index(keys.paused) if self.sees_pauses else 0
        args: list[Argument] = [_arrivals_arg(arrivals), only_active_as, paused]
        args += list_args([dispatch.process for dispatch in dispatches if dispatch.process])
        versions = sorted({dispatch.version for dispatch in dispatches if dispatch.version})
        args += [script_keys.index(keys.versions) if versions else 0, *list_args(versions)]
        args += list_args([entry.id for entry in indexes])
        args += group_list_args(put_back)
        args += (msgpack.packb(batches, use_bin_type=False), *map(encode_batch, dispatches))
        missing, new_ids, batch_ids, tickets = self._run_active(_DISPATCH, script_keys.keys, args)

        missing_ids = {entry_id.decode() for entry_id in missing}
        dispatched = [
            Dispatched(batch_id_of(batch_id.decode(), dispatch.version), _without(dispatch, missing_ids))
            if batch_id
            else None
            for batch_id, dispatch in zip(batch_ids, dispatches, strict=True)
        ]
        changes = _changes_of(indexes, remaining, new_ids, missing_ids)
        return DispatchReply(dispatched, changes, tickets if arrivals else None)

    def _batch_element(
        self,
        dispatch: Dispatch,
        indexes: Mapping[Entry, int],
        model_fields: Sequence[Argument],
        script_keys: ScriptKeys,
        result_ttl_ms_max: int,
    ) -> list[Any]:
        """A batch as `dispatch.lua` reads it, without its runs."""
        fields: list[Argument] = ["size", dispatch.size, "reason", dispatch.reason, *model_fields]
        if dispatch.expected_us:
            fields += ["expected_us", dispatch.expected_us]
        if self.kind is ModelKind.STEPPING:
            (run,) = dispatch.runs
            fields += ["cost", run.cost, "stream", int(run.stream)]
        if (tickets := encode_tickets(dispatch)) is not None:
            fields += ["tickets", tickets]
        if dispatch.lane:
            fields += ["lane", dispatch.lane]
        stream = _COMMON_STREAM
        if dispatch.version:
            fields += ["version", dispatch.version]
            fields += ["asked", 1] if dispatch.is_asked else []
            stream = script_keys.index(self.keys.batches_of(dispatch.version))
        process, inbox = dispatch.process, 0
        if process:
            fields += ["process", process]
            inbox = script_keys.index(self.keys.inbox(process))
        # A model that steps has chunks in these lists; sequences know what was sent again.
        is_plain = self.kind is ModelKind.PLAIN
        sought = list(self._perhaps_answered(dispatch, script_keys)) if is_plain else ()
        entries = list(dict.fromkeys([indexes[run.entry] for run in dispatch.runs]))
        records = [
            number
            for run in dispatch.runs
            if run.reply_to is not None and run.reply_to == run.correlation_ids[0]
            for number in (indexes[run.entry], script_keys.index(self.keys.kept(run.reply_to)))
        ]
        return [
            entries,
            fields,
            sought,
            process,
            inbox,
            stream,
            *([[result_ttl_ms_max, *records]] if records else ()),
        ]

    def _perhaps_answered(self, dispatch: Dispatch, script_keys: ScriptKeys) -> Iterator[int | str]:
        """The requests that may have been sent again, and have results: their producers chose their IDs, and
        the results are in lists. A reader of a reply stream knows what was in it; tickets must be used."""
        for run in dispatch.runs:
            is_in_list = run.reply_to is None and run.tickets is None
            if is_in_list and not run.correlation_ids[0].startswith(run.entry.id):
                for name in run.correlation_ids:
                    if len(script_keys.keys) < SOUGHT_KEYS_MAX:
                        yield script_keys.index(self.keys.result(name))
                        yield name

    def _run_active(self, script: Script, script_keys: list[str], args: list[Argument]) -> Any:
        reply = self._link.run(script, script_keys, args)
        if reply == b"NOT_ACTIVE":
            raise NotActiveError(self.keys.model)
        if reply == b"PAUSED":
            raise PausedError(self.keys.model)
        if reply == b"PROCESS_LEFT":
            raise ProcessLeftError(self.keys.model)
        return reply

    def prepare_refusal(
        self,
        refusals: Sequence[Refusal],
        emptied: Sequence[Entry],
        result_ttl_ms: int,
        changes_of_sequences: Sequence[SequenceChange] = (),
        freed: Sequence[SlotFreed] = (),
        is_body_in_use: Callable[[str], bool] = lambda name: False,
    ) -> PreparedRefusal:
        """Prepare to answer requests that are not dispatched, and to remove the entries in `emptied` without
        an answer. It is apart from `refuse`, because for thousands of requests each of them takes some ms.

        One script: the caller bounds what it gives. The rest of an entry is put back. `freed`: what processes
        of a bound model are told. `is_body_in_use`: whether another request has a stored body, which is not
        deleted then.
        """
        by_entry: dict[Entry, list[Refusal]] = {entry: [] for entry in emptied}
        for refusal in refusals:
            by_entry.setdefault(refusal.entry, []).append(refusal)
        script_keys = ScriptKeys(self.keys.requests, self.keys.order, self.keys.tickets, self.keys.statistics)
        if self.name:
            script_keys.keys.append(self.keys.batcher)
        put_back: dict[Entry, list[list[Run]]] = {}
        groups: list[Group] = []
        now_us = self.clock.now_us()
        for entry, of_entry in by_entry.items():
            refused = frozenset(refusal.run for refusal in of_entry)
            parts = put_back[entry] = _parts_to_put_back(entry, refused)
            answered = [refusal for refusal in of_entry if refusal.status != UNANSWERED]
            names = [name for name in _body_names(of_entry) if not is_body_in_use(name)]
            bodies = [script_keys.index(self.keys.body(name)) for name in names]
            result_args = [*_counted(answered, now_us), *self._result_args(answered, script_keys)]
            groups.append([entry.id, *_put_back_args(entry, parts), *result_args, *list_args(bodies)])
        args = [result_ttl_ms, self.name, *group_list_args(groups)]
        args += change_args(self.keys, script_keys, changes_of_sequences)
        args += group_list_args(
            [
                (script_keys.index(self.keys.inbox(process)), *encode_ended(SequenceEnded(sequence_id)))
                for process, sequence_id in freed
            ]
        )
        return PreparedRefusal(script_keys.keys, args, put_back)

    def refuse(self, prepared: PreparedRefusal) -> EntryChanges:
        """Run the script. Raises NotActiveError."""
        replies = self._run_active(_REFUSE, prepared.keys, prepared.args)
        changes = EntryChanges([], [], [])
        for (entry, parts), (done, *part_ids) in zip(prepared.put_back.items(), replies, strict=True):
            if done == b"PUT_BACK":
                changes.put_back.append(_put_back(entry, parts, part_ids))
            else:
                (changes.removed if done == b"REMOVED" else changes.missing).append(entry)
        return changes

    def _result_args(self, answered: Sequence[Refusal], script_keys: ScriptKeys) -> list[Argument]:
        """What `refuse.lua` reads of the results of an entry's requests: two lists."""
        in_order = chain.from_iterable(map(_results_in_order, filter(_is_in_order, answered)))
        alike = _alike_results(filterfalse(_is_in_order, answered))
        streams, in_lists = alike_groups(self.keys, script_keys, alike)
        result_args = group_list_args(chain(result_groups(self.keys, script_keys, in_order), streams))
        result_args += group_list_args(in_lists)
        return result_args

    def renew_bodies(self, names: Sequence[str]) -> None:
        """Let these stored bodies expire BODY_TTL_MS from now."""
        for start in range(0, len(names), RENEWALS_MAX):
            keys = map(self.keys.body, names[start : start + RENEWALS_MAX])
            no_errors(self._link.call_many(*[("PEXPIRE", key, BODY_TTL_MS) for key in keys]))

    def answer_in_flight(
        self, batch_id: str, answers: Sequence[Answer], result_ttl_ms: int
    ) -> set[int] | None:
        """Answer requests of a batch in flight whose deadline passed, or that were withdrawn.

        Returns the positions that were answered; None if the batch has been settled meanwhile. One script
        answers up to ANSWERS_MAX. If the batch settles between two, its commit answers the rest.
        """
        answered: set[int] | None = None
        for start in range(0, len(answers), ANSWERS_MAX):
            together = answers[start : start + ANSWERS_MAX]
            try:
                written = answer_ahead(self._link, self.keys, None, batch_id, together, None, result_ttl_ms)
            except SettledError:
                break
            answered = written if answered is None else answered | written
        return answered


def _kept_sequence(name: str, changed_us: int, fields: Mapping[str, bytes | None]) -> KeptSequence:
    texts = {field: (value or b"").decode("utf-8", "replace") for field, value in fields.items()}
    is_broken = bool(texts["broken"] and texts["broken_at"])
    return KeptSequence(
        name,
        changed_us,
        next_index=int(texts["next"]) if texts["next"] else None,
        first_id=texts["first"],
        last_id=texts["last"],
        broken=texts["broken"] if is_broken else "",
        broken_at=texts["broken_at"] if is_broken else "",
        failed_at=texts["failed_at"] if is_broken else "",
        process=texts.get("state", ""),
    )


_Stated = tuple[Entry, Sequence[TicketRange]]


def _stated_together(put_back: Sequence[Entry]) -> list[list[_Stated]]:
    """What each script verifies: entries, and the ranges that they state. At least one script."""
    scripts: list[list[_Stated]] = [[]]
    ranges = 0
    for entry in put_back:
        assert entry.stated_tickets is not None
        stated = entry.stated_tickets.ranges
        if scripts[-1] and ranges + len(stated) > STATED_RANGES_MAX:
            scripts.append([])
            ranges = 0
        scripts[-1].append((entry, stated))
        ranges += len(stated)
    return scripts


def _arrivals_arg(arrivals: Sequence[TicketRange]) -> str:
    return " ".join([f"{entry_id} {size}" for entry_id, _, size in arrivals])


def _without(dispatch: Dispatch, missing_ids: Container[str]) -> Dispatch:
    if not missing_ids:
        return dispatch
    return dispatch._replace(runs=[run for run in dispatch.runs if run.entry.id not in missing_ids])


def _parts_to_put_back(entry: Entry, decided: Container[Run | None]) -> list[list[Run]]:
    """The runs that remain of an entry, as the entries to put them back in.

    Each gets about an eighth of the requests. If all were in one entry, every small batch would write again
    the whole rest of a large entry, and the cost would grow with the square of its size. So a request is put
    back once for each level, and a few times in the last one.
    """
    remaining = [run for run in entry.runs if run not in decided]
    if not remaining:
        return []
    size = max(PUT_BACK_REQUESTS_MIN, -(-sum(map(len, remaining)) // PUT_BACK_ENTRIES_MAX))
    parts: list[list[Run]] = []
    space = 0
    for run in remaining:
        if space <= 0:
            parts.append([])
            space = size
        parts[-1].append(run)
        space -= len(run)
    return parts


def _put_back_args(entry: Entry, parts: Sequence[Sequence[Run]]) -> list[Argument]:
    """The arrival (ms), and the list of entries: payload and tickets of the requests to put back in each."""
    return [
        entry.arrival_us // 1000,
        *group_list_args([(encode_runs(runs), tickets_of(runs)) for runs in parts]),
    ]


def _changes_of(
    entries: Collection[Entry],
    remaining: Mapping[Entry, Sequence[list[Run]]],
    new_ids: Sequence[Sequence[bytes]],
    missing_ids: Container[str],
) -> EntryChanges:
    """What a dispatch did to these entries. `remaining`: what was to be put back; `new_ids`: in which
    entries it is; in none if its entry was missing."""
    return EntryChanges(
        removed=[entry for entry in entries if entry not in remaining and entry.id not in missing_ids],
        put_back=[
            _put_back(entry, parts, part_ids)
            for (entry, parts), part_ids in zip(remaining.items(), new_ids, strict=True)
            if part_ids
        ],
        missing=[entry for entry in entries if entry.id in missing_ids],
    )


def _put_back(entry: Entry, parts: Sequence[list[Run]], part_ids: Sequence[bytes]) -> PutBack:
    return PutBack(entry, [(part_id.decode(), runs) for part_id, runs in zip(part_ids, parts, strict=True)])


def _body_names(refusals: Iterable[Refusal]) -> list[str]:
    """The names of the stored bodies of these requests; not of copies, which may share them."""
    names: list[str] = []
    for refusal in refusals:
        if refusal.status != UNANSWERED:
            names += refusal.body_names if refusal.run is None else stored_names(refusal.run.bodies)
    return names


def _counted(refusals: Iterable[Refusal], now_us: int) -> tuple[int, int]:
    """How many requests are refused, and the time since their arrival (us), added up."""
    number = total_us = 0
    for refusal in refusals:
        arrival_us = refusal.entry.arrival_us if refusal.run is None else refusal.run.arrival_us
        number += len(refusal.correlation_ids)
        total_us += len(refusal.correlation_ids) * max(0, now_us - arrival_us)
    return number, total_us


def _is_in_order(refusal: Refusal) -> bool:
    return refusal.run is not None and refusal.run.tickets is not None


def _results_in_order(refusal: Refusal) -> Iterator[tuple[Address, Result]]:
    assert refusal.run is not None
    result = _result_of(refusal)
    for correlation_id, ticket in zip(refusal.correlation_ids, tickets_of_each(refusal.run), strict=True):
        yield Address(refusal.reply_to, ticket), result._replace(correlation_id=correlation_id)


def _alike_results(refusals: Iterable[Refusal]) -> list[AlikeResults]:
    """What the requests of refusals are answered, those with the same answer together."""
    names: dict[tuple[str | None, Result], list[str]] = {}
    for refusal in refusals:
        names.setdefault((refusal.reply_to, _result_of(refusal)), []).extend(refusal.correlation_ids)
    return [AlikeResults(reply_to, of_result, result) for (reply_to, result), of_result in names.items()]


def _result_of(refusal: Refusal) -> Result:
    """What a refused request is answered, without its correlation ID."""
    run = refusal.run
    warnings = refusal.warnings if run is None else warnings_of(run.extra, run.content_type)
    content_type = refusal.content_type if run is None else answer_type(run.content_type, run.extra)
    return Result("", refusal.status, content_type, detail=refusal.detail, warnings=tuple(warnings))
