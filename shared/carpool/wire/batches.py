"""Batches, settled batches and dead letters <-> the fields of stream entries.

Only batchers and workers write these, so a malformed one is a bug, and decoding it raises.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgpack

from carpool.keys import batch_id_of
from carpool.messages.batches import Batch, BatchedRun, Dispatch
from carpool.messages.requests import PRIORITY_DEFAULT, SequencePart
from carpool.messages.results import DeadLetter, KeptDeadLetter
from carpool.messages.settled import (
    BatchSettled,
    Executed,
    ExecutedOf,
    Failures,
    ModelProcessesChanged,
    SettledEvent,
    Streamed,
    WhereAsked,
)
from carpool.model_settings import ModelSettings
from carpool.rows import Bodies, Body, Rows, StoredBody
from carpool.tickets import TicketRange, Tickets

_FIELDS_OF_USUAL_RUN: Final = 11  # one with other fields than these has priority and cost behind them
FIELDS_ADDED: Final = 3  # to a dead letter: reason, attempts and entry_id


def encode_batch(dispatch: Dispatch) -> bytes:
    """The `runs` field of a batch: a msgpack array with an array for each run.

    Its elements: entry ID, correlation IDs (separated by spaces), content type, `reply_to`, arrival and
    deadline (us), bodies or nil, rows (head, bytes of a row, data) or nil, fields for the model,
    `reply_columns`, and what makes it a part of a sequence (the fields of SequencePart) or nil. Then priority
    and cost, unless both have their defaults.
    """
    undated = dispatch.undated
    runs: list[tuple[Any, ...]] = [
        (
            run.entry.id,
            " ".join(run.correlation_ids),
            run.content_type,
            run.reply_to,
            run.arrival_us,
            None if run in undated else run.deadline_us,
            *_bodies_and_rows(run.bodies),
            run.extra,
            run.reply_columns,
            run.sequence,
        )
        for run in dispatch.runs
    ]
    for at, run in enumerate(dispatch.runs):
        if run.cost != 1 or run.priority != PRIORITY_DEFAULT:
            runs[at] += run.priority, run.cost
    return bytes(msgpack.packb(runs))


def encode_tickets(dispatch: Dispatch) -> bytes | None:
    """The `tickets` field of a batch; None if no request has one.

    A msgpack array with nil or an array for each run: its entry ID, then each range of tickets (ID of the
    entry in which they arrived, first position, number). A field of its own, because `release.lua` reads it.
    """
    if all(run.tickets is None for run in dispatch.runs):
        return None
    tickets = [run.tickets and (run.entry.id, *run.tickets.ranges) for run in dispatch.runs]
    return bytes(msgpack.packb(tickets))


def _bodies_and_rows(bodies: Bodies) -> tuple[list[Body] | None, tuple[Any, ...] | None]:
    if isinstance(bodies, Rows):
        return None, (bodies.head, bodies.width, bodies.data)
    return bodies, None


def decode_batch(entry_id: bytes, flat: Sequence[bytes], epoch: int) -> Batch:
    """A batch entry as Redis returns it, without the requests of the entries that its `gone` field names.

    Those entries were missing when the batch was dispatched: see `dispatch.lua`.
    """
    raw = dict(zip(flat[::2], flat[1::2], strict=True))
    fields_of_runs = msgpack.unpackb(raw[b"runs"])
    if b"tickets" in raw:
        tickets = map(_decode_tickets, msgpack.unpackb(raw[b"tickets"]))
        runs = [_decode_run(fields, of_run) for fields, of_run in zip(fields_of_runs, tickets, strict=True)]
    else:
        runs = [_decode_run(fields, None) for fields in fields_of_runs]
    gone = raw.get(b"gone")
    if gone:
        entry_ids = frozenset(gone.decode().split())
        runs = [run for run in runs if run.entry_id not in entry_ids]
    settings = raw.get(b"settings", b"")
    of_model = _settings_of_batch(settings)
    version = raw[b"version"].decode() if b"version" in raw else ""
    batch = Batch(
        batch_id_of(entry_id.decode(), version) if version else entry_id.decode(),
        epoch,
        runs,
        raw.get(b"reason", b"").decode(),
        int(raw.get(b"dispatched_us", b"0")),
        raw.get(b"lane", b"").decode(),
        int(raw.get(b"result_ttl_ms", 60_000)),
        int(raw.get(b"expected_us", b"0")),
        raw.get(b"stream") == b"1",
        int(raw.get(b"cost", b"1")),
        settings.decode() if b"stream" in raw else "",
        raw.get(b"process", b"").decode(),
        of_model.max_execution_ms,
        of_model.max_result_bytes,
        max_batch_cost=of_model.max_batch_cost,
        max_requests_per_process=of_model.max_requests_per_process,
        max_process_memory=of_model.max_process_memory,
    )
    if version:
        batch.version, batch.is_asked = version, b"asked" in raw
    elif b"redelivered" in raw:
        batch.redelivered = int(raw[b"redelivered"])
    if b"answered" in raw:
        batch.answered = _positions_in_lists(batch, frozenset(raw[b"answered"].decode().split()))
    return batch


@lru_cache(maxsize=16)
def _settings_of_batch(text: bytes) -> ModelSettings:
    """Read once: batches of a model have the same text until its settings change."""
    return ModelSettings.of_batch(text)


def _positions_in_lists(batch: Batch, correlation_ids: frozenset[str]) -> frozenset[int]:
    """The positions of those of these requests whose results are in lists."""
    in_lists = [
        enumerate(run.correlation_ids, start)
        for start, run in zip(batch.first_positions, batch.runs, strict=True)
        if run.reply_to is None
    ]
    return frozenset([position for ids in in_lists for position, name in ids if name in correlation_ids])


def _decode_run(fields: Sequence[Any], tickets: Tickets | None) -> BatchedRun:
    if len(fields) == _FIELDS_OF_USUAL_RUN:
        priority, cost = PRIORITY_DEFAULT, 1
    else:
        *fields, priority, cost = fields
    entry_id, ids, content_type, reply_to, arrival_us, deadline_us, bodies, rows, extra, columns, part = (
        fields
    )
    decoded: Bodies
    if rows is not None:
        head, width, data = rows
        decoded = Rows(head, data, width)
    else:
        decoded = bodies or []
        if list in map(type, decoded):  # the usual case costs no step of Python for each
            decoded = [StoredBody(*body) if type(body) is list else body for body in decoded]
    return BatchedRun(
        entry_id, ids.split(" "), decoded, content_type, reply_to, arrival_us, deadline_us,
        extra, columns, tickets, None if part is None else SequencePart(*part), priority, cost,
    )  # fmt: skip


def _decode_tickets(fields: Sequence[Any] | None) -> Tickets | None:
    if fields is None:
        return None
    _, *ranges = fields
    return Tickets(tuple([TicketRange(*of_range) for of_range in ranges]))


def decode_settled(flat: Sequence[bytes]) -> SettledEvent:
    """An entry of the `settled` stream. One without a batch asks where a request is, or means that a model
    process joined or left, or that settings were overridden."""
    raw = dict(zip(flat[::2], flat[1::2], strict=True))
    worker = raw.get(b"worker", b"").decode()
    if b"batch" not in raw:
        if b"where" in raw and b"answer" in raw:
            return WhereAsked(
                raw[b"where"].decode("utf-8", "replace"), raw[b"answer"].decode("utf-8", "replace")
            )
        return ModelProcessesChanged(worker)
    size, streamed = raw.get(b"size", b"0"), raw.get(b"streamed")
    return BatchSettled(
        raw[b"batch"].decode(),
        worker,
        int(size),
        int(raw.get(b"compute_us", b"0")),
        int(raw.get(b"settled_us", b"0")),
        int(raw.get(b"executed", b"0")),
        int(raw.get(b"waited_us", b"0")),
        Streamed(*map(int, streamed.split())) if streamed else None,
        tuple(raw.get(b"broken", b"").decode().split()),
        int(raw.get(b"overhead_us", b"0")),
        _decode_failures(raw) if b"failed" in raw else None,
        _decode_producers(raw[b"producers"]) if b"producers" in raw else (),
        int(raw.get(b"cost", b"0")),
    )


def settled_fields(executed: Executed) -> list[str | bytes]:
    """The fields that a settled entry has if requests failed, which and of which producers; and what those
    that were executed cost, if the model tells that."""
    flat: list[str | bytes] = [*failures_fields(executed.failures)]
    if executed.of_producers:
        flat += ["producers", bytes(msgpack.packb(executed.of_producers))]
    if executed.cost:
        flat += ["cost", str(executed.cost)]
    return flat


def _decode_producers(packed: bytes) -> list[ExecutedOf]:
    return [
        ExecutedOf((tenant, reply_to), requests, executed)
        for (tenant, reply_to), requests, executed in msgpack.unpackb(packed)
    ]


def failures_fields(failures: Failures) -> list[str]:
    """The fields of a settled entry that say what failed; none if nothing did."""
    if not failures.statuses:
        return []
    failed = " ".join([f"{status}={number}" for status, number in failures.statuses.items()])
    return ["failed", failed, *(["error", failures.error] if failures.error else [])]


def _decode_failures(raw: Mapping[bytes, bytes]) -> Failures:
    pairs = [pair.rpartition("=") for pair in raw[b"failed"].decode("utf-8", "replace").split()]
    statuses = {status: int(number) for status, _, number in pairs}
    return Failures(statuses, raw.get(b"error", b"").decode("utf-8", "replace"))


def encode_streamed(streamed: Streamed | None) -> str:
    """The `streamed` field of a settled entry: its numbers, separated by spaces. Empty if nothing was."""
    return "" if streamed is None else " ".join(str(number) for number in streamed if number is not None)


def encode_dead_letter(letter: DeadLetter) -> list[str | bytes | int]:
    """The fields of a dead letter: those of the request but lane, priority, cost and expiration, then the
    reason and the attempts.

    A client that keeps the last of two fields with the same name reads Carpool's own.
    """
    request = letter.request
    flat: list[str | bytes | int] = ["correlation_id", request.correlation_id]
    flat += ["content_type", request.content_type, *_body_fields(request.body)]
    if request.reply_to is not None:
        flat += ["reply_to", request.reply_to]
    if request.sequence is not None:
        flat += _sequence_fields(request.sequence)
    if request.version:
        flat += ["version", request.version]
    for name, value in (request.extra or {}).items():
        flat += [name, value]
    return [*flat, "reason", letter.reason, "attempts", letter.attempts, "entry_id", request.entry_id]


def decode_dead_letter(entry_id: bytes, flat: Sequence[bytes]) -> KeptDeadLetter:
    """A dead letter as Redis returns it. The fields that Carpool added are the last ones."""
    *_, reason, _, attempts, _, _ = flat
    names = [name.decode("utf-8", "replace") for name in flat[: -2 * FIELDS_ADDED : 2]]
    fields = dict(zip(names, flat[1 : -2 * FIELDS_ADDED : 2], strict=True))
    return KeptDeadLetter(entry_id.decode(), fields, reason.decode("utf-8", "replace"), int(attempts))


def _sequence_fields(part: SequencePart) -> list[str | bytes | int]:
    flat: list[str | bytes | int] = ["sequence_id", part.sequence_id]
    flat += ["sequence_start", 1] if part.starts else []
    flat += ["sequence_end", 1] if part.ends else []
    return flat if part.index is None else [*flat, "sequence_index", part.index]


def _body_fields(body: Body) -> list[str | bytes | int]:
    if isinstance(body, StoredBody):
        return ["body_key", body.name, "body_bytes", body.size_bytes]
    return ["body", body]
