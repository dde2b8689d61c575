"""Batches, settled batches and dead letters <-> the fields of stream entries.

Only batchers and workers write these, so a malformed one is a bug, and decoding it raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack

from carpool.messages import (
    Batch,
    BatchedRequest,
    BatchSettled,
    DeadLetter,
    Dispatch,
    ModelProcessesChanged,
    SettledEvent,
)


def encode_batch(dispatch: Dispatch) -> bytes:
    """The `requests` field of a batch: a msgpack array of BatchedRequest tuples.

    A request without a ticket is a tuple one element shorter.
    """
    undated = dispatch.undated  # looked at here, because a call of `deadline_us` costs each request 0.1 µs
    tuples: list[tuple[Any, ...]] = [
        (
            request.entry.id,
            request.correlation_id,
            request.content_type,
            request.reply_to,
            request.arrival_us,
            None if undated and request in undated else request.deadline_us,
            request.body,
            request.extra,
        )
        for request in dispatch.requests
    ]
    for position, request in enumerate(dispatch.requests):
        if request.ticket is not None:
            tuples[position] += (request.ticket,)
    return bytes(msgpack.packb(tuples))


def decode_batch(entry_id: bytes, flat: Sequence[bytes], epoch: int) -> Batch:
    """A batch entry as Redis returns it, without the requests of the entries that its `gone` field names.

    Those entries were missing when the batch was dispatched: see `dispatch.lua`.
    """
    raw = dict(zip(flat[::2], flat[1::2], strict=True))
    requests = [BatchedRequest(*fields) for fields in msgpack.unpackb(raw[b"requests"])]
    gone = raw.get(b"gone")
    if gone:
        entry_ids = frozenset(gone.decode().split())
        requests = [request for request in requests if request.entry_id not in entry_ids]
    return Batch(
        entry_id.decode(),
        epoch,
        requests,
        raw.get(b"reason", b"").decode(),
        int(raw.get(b"dispatched_us", b"0")),
        raw.get(b"lane", b"").decode(),
        int(raw.get(b"result_ttl_ms", 60_000)),
    )


def decode_settled(flat: Sequence[bytes]) -> SettledEvent:
    """An entry of the `settled` stream. One without a batch means that a model process joined or left."""
    raw = dict(zip(flat[::2], flat[1::2], strict=True))
    worker = raw.get(b"worker", b"").decode()
    if b"batch" not in raw:
        return ModelProcessesChanged(worker)
    return BatchSettled(
        raw[b"batch"].decode(), worker, int(raw.get(b"size", b"0")), int(raw.get(b"compute_us", b"0"))
    )


def encode_dead_letter(letter: DeadLetter) -> list[str | bytes | int]:
    """The fields of a dead letter: those of the request but lane, priority, cost and expiration, then the
    reason and the attempts.

    A client that keeps the last of two fields with the same name reads Carpool's own.
    """
    request = letter.request
    flat: list[str | bytes | int] = ["correlation_id", request.correlation_id]
    flat += ["content_type", request.content_type, "body", request.body]
    if request.reply_to is not None:
        flat += ["reply_to", request.reply_to]
    for name, value in (request.extra or {}).items():
        flat += [name, value]
    return [*flat, "reason", letter.reason, "attempts", letter.attempts, "entry_id", request.entry_id]
