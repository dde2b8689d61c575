"""Where is a request? The active batcher is asked, and Redis is looked at, both in bounded steps.

A request moves forward while one looks: it waits, is in flight, and is answered. The looks are in this order,
so a request that moves is seen by a later one; if none sees it, all are repeated once, and again while the
batcher has not read all that waits. Waiting requests are known to the batcher only: of their stream at most
one entry is read, which has the ID of the request. Batches in flight are read only while no batcher is
active; capacity bounds them. Dead letters are read page by page; the settings of the model bound these.

Why: docs/decisions/0115.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final

from carpool.keys import CORRELATION_ID, WORKERS_GROUP, Keys, batch_stream, entry_of_batch
from carpool.messages.requests import PRIORITY_DEFAULT
from carpool.store.batcher import BatcherStore
from carpool.store.connection import Command, CommandError, Link
from carpool.store.directory import SETTLED_ENTRIES_MAX, no_errors
from carpool.store.kept import status_in_record
from carpool.wire.batches import decode_dead_letter
from carpool.wire.requests import arrival_of
from carpool.wire.whereabouts import (
    FOUND_MAX,
    BatcherAnswer,
    FoundLetter,
    FoundResult,
    InFlight,
    Waiting,
    Whereabouts,
    question_fields,
)

ANSWER_S: Final = 3.0  # a batcher is awaited
_LOOK_INTERVAL_S: Final = 0.005  # for its answer; doubled up to
_LOOK_INTERVAL_S_MAX: Final = 0.08
_READING_INTERVAL_S: Final = 0.2  # until a batcher that is still reading is asked again
LETTERS_LOOKED_AT_MAX: Final = 20_000
BATCHES_LOOKED_AT_MAX: Final = 1000  # while no batcher is active
_PAGE: Final = 16  # dead letters read at a time: each has the body of its request
_ENTRY_ID: Final = re.compile(r"\d{1,20}-\d{1,20}")


def find(
    link: Link, keys: Keys, correlation_id: str, *, timeout_s: float = ANSWER_S, with_dead: bool = True
) -> Whereabouts:
    """Where the requests of a model with this correlation ID are.

    `timeout_s`: for how long the batcher is awaited. `with_dead`: whether dead letters are looked at.
    Raises ValueError if the ID is not valid, LinkError and CommandError.
    """
    return find_in_each(link, [keys], correlation_id, timeout_s=timeout_s, with_dead=with_dead)[0]


def find_in_each(
    link: Link,
    models: Sequence[Keys],
    correlation_id: str,
    *,
    timeout_s: float = ANSWER_S,
    with_dead: bool = True,
) -> list[Whereabouts]:
    """As `find`, in each of these models, whose batchers are asked at the same time."""
    if not CORRELATION_ID.fullmatch(correlation_id):
        raise ValueError("correlation ID: must have 1 to 128 of A-Z a-z 0-9 . _ : -")
    found = _look(link, models, correlation_id, timeout_s, with_dead=with_dead)
    if any(one.state != "unknown" for one in found):
        return found
    again = [keys for keys, one in zip(models, found, strict=True) if one.batcher != "silent"]
    ends_s = time.monotonic() + timeout_s
    while again:
        second = {
            one.model: one for one in _look(link, again, correlation_id, timeout_s, with_dead=with_dead)
        }
        found = [second.get(one.model, one) for one in found]
        if time.monotonic() > ends_s or any(one.state != "unknown" for one in found):
            break
        again = [keys for keys in again if second[keys.model].is_reading]
        if again:
            time.sleep(_READING_INTERVAL_S)
    return found


def _look(
    link: Link, models: Sequence[Keys], correlation_id: str, timeout_s: float, *, with_dead: bool
) -> list[Whereabouts]:
    seconds, micros = link.call("TIME")
    at_us = int(seconds) * 1_000_000 + int(micros)
    asked = _ask(link, models, correlation_id)
    ends_s = time.monotonic() + timeout_s
    looks: list[Whereabouts] = []
    for keys in models:
        found = Whereabouts(keys.model, correlation_id, at_us, "none" if keys not in asked else "silent")
        if keys not in asked:
            found = _look_without_batcher(link, keys, found)
        elif not asked[keys]:
            text = "Redis is full, so its batcher cannot be asked whether the request waits or is in flight"
            found = replace(found, not_seen=[text])
        else:
            answer = _await_answer(link, keys.answer(asked[keys]), ends_s)
            found = _with_answer(link, keys, found, answer, timeout_s)
        looks.append(_with_what_is_kept(link, keys, found, with_dead=with_dead))
    return looks


def _with_what_is_kept(link: Link, keys: Keys, found: Whereabouts, *, with_dead: bool) -> Whereabouts:
    """Results and dead letters, unless the request waits or is in flight."""
    if found.waiting or found.in_flight:
        return found
    found = replace(found, results=_results(link, keys, found))
    if not with_dead:
        return found
    letters, are_all = _letters(link, keys, found.correlation_id)
    if are_all:
        return replace(found, dead=letters)
    text = f"only the newest {LETTERS_LOOKED_AT_MAX:,} dead letters were looked at"
    return replace(found, dead=letters, not_seen=[*found.not_seen, text])


# --- the batcher -------------------------------------------------------------------------------------------


def _ask(link: Link, models: Sequence[Keys], correlation_id: str) -> dict[Keys, str]:
    """Ask the active batchers of these models. Returns the names of the answers; '' where Redis is full. A
    model without a batcher is left out."""
    leases = no_errors(link.call_many(*[("EXISTS", keys.batcher) for keys in models]))
    names = {keys: uuid.uuid4().hex for keys, lease in zip(models, leases, strict=True) if lease}
    questions: list[Command] = []
    for keys, name in names.items():
        fields = question_fields(correlation_id, name)
        questions.append(("XADD", keys.settled, "MAXLEN", "~", SETTLED_ENTRIES_MAX, "*", *fields))
    for keys, reply in zip(list(names), link.call_many(*questions), strict=True):
        if isinstance(reply, CommandError):
            if reply.code != "OOM":
                raise reply
            names[keys] = ""
    return names


def _with_answer(
    link: Link, keys: Keys, found: Whereabouts, answer: BatcherAnswer | None, timeout_s: float
) -> Whereabouts:
    """What the batcher answered, completed with what Redis knows of batches in flight."""
    if answer is None:
        text = (
            f"its batcher did not answer within {timeout_s:g} s: it hangs, is very busy, or is of an older "
            "version; so it is not known whether the request waits or is in flight"
        )
        return replace(found, batcher="silent", not_seen=[text])
    in_flight = _in_flight(link, keys, answer.in_flight)
    not_seen: list[str] = []
    waiting: Sequence[Waiting] = answer.waiting
    is_reading = answer.is_reading and not (waiting or in_flight)
    if is_reading:
        waiting = _unread(link, keys, found.correlation_id, "its batcher has not read it yet")
        not_seen = ["its batcher has not read all requests that wait: it took over just now, or many arrive"]
    return replace(
        found,
        at_us=max(found.at_us, answer.at_us),
        batcher="answered",
        waiting=waiting,
        in_flight=in_flight,
        refused=answer.refused,
        not_seen=not_seen,
        withheld=answer.withheld,
        is_reading=is_reading,
    )


def _unread(link: Link, keys: Keys, correlation_id: str, why: str) -> list[Waiting]:
    """The request that waits, if its ID is that of its entry: then it is known without a batcher."""
    if not _ENTRY_ID.fullmatch(correlation_id):
        return []
    if not link.call("XRANGE", keys.requests, correlation_id, correlation_id, "COUNT", 1):
        return []
    return [Waiting("", "", PRIORITY_DEFAULT, arrival_of(correlation_id), None, why)]


def _await_answer(link: Link, key: str, ends_s: float) -> BatcherAnswer | None:
    """The answer, as soon as it is there; None if it is not by `ends_s`."""
    interval_s = _LOOK_INTERVAL_S
    while True:
        answer = link.call("GET", key)
        if answer is not None:
            return BatcherAnswer.decode(answer)
        if time.monotonic() > ends_s:
            return None
        time.sleep(interval_s)
        interval_s = min(2 * interval_s, _LOOK_INTERVAL_S_MAX)


def _look_without_batcher(link: Link, keys: Keys, found: Whereabouts) -> Whereabouts:
    """Nobody knows what waits. A request whose ID is that of its entry can be looked up all the same."""
    batches = islice(_batches_with(link, keys, found.correlation_id), FOUND_MAX)
    in_flight = _in_flight(link, keys, list(batches))
    text = (
        "no batcher is active: nothing is dispatched until `carpool batcher` runs, and of the requests that "
        "wait only those without a correlation ID of their own are found"
    )
    waiting: list[Waiting] = []
    if not in_flight:
        why = "no batcher is active, so nothing is dispatched"
        waiting = _unread(link, keys, found.correlation_id, why)
    if waiting:
        text = "no batcher is active, so its lane, tenant and priority are not known"
    return replace(found, waiting=waiting, in_flight=in_flight, not_seen=[text])


def _batches_with(link: Link, keys: Keys, correlation_id: str) -> Iterator[InFlight]:
    store = BatcherStore(link, keys)
    store.versions = sorted(name.decode() for name in link.call("SMEMBERS", keys.versions))
    for batch in islice(store.batches_in_flight(), BATCHES_LOOKED_AT_MAX):
        for first, run in zip(batch.first_positions, batch.runs, strict=True):
            if correlation_id in run.correlation_ids:
                position = first + run.correlation_ids.index(correlation_id)
                yield InFlight(
                    batch.id, position, batch.size, batch.dispatched_us, batch.lane, batch.version,
                    run.deadline_us,
                )  # fmt: skip


def _in_flight(link: Link, keys: Keys, found: Iterable[InFlight]) -> list[InFlight]:
    """Those that are in flight still, with what Redis knows of them."""
    completed = [_completed(link, keys, one) for one in found]
    return [one for one in completed if one is not None]


def _completed(link: Link, keys: Keys, one: InFlight) -> InFlight | None:
    """What Redis knows of a batch in flight: who has it, and how far it is. None: its request was answered
    meanwhile."""
    stream, entry = batch_stream(keys, one.batch), entry_of_batch(one.batch)
    names = (f"answered:{one.position}", f"started:{one.position}", "chunks")
    commands: Sequence[Command] = (
        ("XPENDING", stream, WORKERS_GROUP, entry, entry, 1),
        ("XINFO", "GROUPS", stream),
        ("HMGET", keys.progress(one.batch), *names),
    )
    pending, groups, progress = link.call_many(*commands)
    answered, starts, chunks = (None, None, None) if isinstance(progress, CommandError) else progress
    if answered is not None:
        return None
    counted = one._replace(starts=_number(starts) or 0, chunks=_number(chunks))
    if isinstance(pending, CommandError) or not pending:  # as long as no worker has read the stream, no group
        return None if _was_fetched(groups, entry) else counted
    _, process, idle_ms, deliveries = pending[0]
    return counted._replace(process=process.decode(), renewed_ms=idle_ms, deliveries=deliveries)


def _was_fetched(groups: Any, entry: str) -> bool:
    """Whether the workers have fetched this entry, and so have settled it, if none has it."""
    if isinstance(groups, CommandError):
        return False
    for flat in groups:
        of_group = dict(zip(flat[::2], flat[1::2], strict=True))
        if of_group.get(b"name") == WORKERS_GROUP.encode():
            return _id_order(entry) <= _id_order(of_group[b"last-delivered-id"].decode())
    return False


def _id_order(entry_id: str) -> tuple[int, int]:
    ms, _, number = entry_id.partition("-")
    return int(ms), int(number or 0)


def _number(text: bytes | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


# --- results and dead letters ------------------------------------------------------------------------------


def _results(link: Link, keys: Keys, found: Whereabouts) -> list[FoundResult]:
    """Results under keys that have this ID in their names."""
    result, replies = keys.result(found.correlation_id), keys.replies(found.correlation_id)
    commands: Sequence[Command] = (
        ("EXISTS", result),
        ("PTTL", result),
        ("GET", keys.kept(found.correlation_id)),
        ("PTTL", replies),
    )
    is_listed, list_ms, record, kept_ms = link.call_many(*commands)
    no_errors([is_listed, list_ms, kept_ms])
    results = [FoundResult("list", "", _until_us(found, list_ms))] if is_listed else []
    if isinstance(record, bytes):
        status = status_in_record(record)
        if status in ("done", "failed", "dead") and kept_ms != _NO_KEY:
            results.append(FoundResult("kept", status, _until_us(found, kept_ms)))
    return results


_NO_KEY: Final = -2  # from PTTL


def _until_us(found: Whereabouts, ttl_ms: int) -> int | None:
    return found.at_us + ttl_ms * 1000 if ttl_ms >= 0 else None


def _letters(link: Link, keys: Keys, correlation_id: str) -> tuple[list[FoundLetter], bool]:
    """The dead letters of this request, the newest first; and whether all were looked at."""
    letters: list[FoundLetter] = []
    before, looked_at = "+", 0
    while looked_at < LETTERS_LOOKED_AT_MAX and len(letters) < FOUND_MAX:
        page = link.call("XREVRANGE", keys.dead, before, "-", "COUNT", _PAGE)
        for entry_id, flat in page:
            letter = decode_dead_letter(entry_id, flat)
            if letter.correlation_id == correlation_id:
                letters.append(FoundLetter(letter.id, letter.reason, letter.attempts, letter.at_ms * 1000))
        if len(page) < _PAGE:
            return letters, True
        looked_at += len(page)
        before = f"({page[-1][0].decode()}"
    return letters, False
