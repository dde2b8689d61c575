"""Batches, settled entries and dead letters: what a worker reads is what a batcher wrote, and the reverse."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages import (
    RAW,
    BatchedRequest,
    BatchSettled,
    DeadLetter,
    Dispatch,
    ModelProcessesChanged,
    Request,
)
from carpool.wire.batches import decode_batch, decode_settled, encode_batch, encode_dead_letter
from carpool.wire.requests import decode_entry
from support.wire import DEFAULTS, decode_packed, flat_of, request_maps

fast = settings(deadline=None)


def batched(request: Request, deadline_us: int | None) -> BatchedRequest:
    return BatchedRequest(
        request.entry.id,
        request.correlation_id,
        request.content_type,
        request.reply_to,
        request.arrival_us,
        deadline_us,
        request.body,
        request.extra,
        request.ticket,
    )


@fast
@given(
    st.lists(request_maps, max_size=5),
    st.text("lane", max_size=4),
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.lists(st.none() | st.just("1700000000000-0:3"), min_size=5, max_size=5),
)
def test_batch_is_read_as_it_was_written(
    sent: list[dict[str, Any]], lane: str, epoch: int, undated: list[bool], tickets: list[str | None]
) -> None:
    # Given: requests with and without tickets, of which some have no deadline once in flight
    requests = decode_packed(sent or [{}])[0].requests
    for request, ticket in zip(requests, tickets, strict=False):
        request.ticket = ticket
    without_deadline = [request for request, out in zip(requests, undated, strict=False) if out]
    dispatch = Dispatch(requests, "full", "", frozenset(without_deadline))
    # When
    flat = [b"requests", encode_batch(dispatch), b"reason", b"full", b"dispatched_us", b"17"]
    batch = decode_batch(b"9-1", [*flat, b"lane", lane.encode()], epoch)
    # Expect
    assert (batch.id, batch.epoch, batch.reason, batch.dispatched_us) == ("9-1", epoch, "full", 17)
    assert batch.lane == lane
    assert batch.requests == [
        batched(request, None if request in without_deadline else request.deadline_us) for request in requests
    ]


def test_batch_without_the_optional_fields_has_defaults() -> None:
    batch = decode_batch(b"9-0", [b"requests", b"\x90"], 1)
    assert (batch.reason, batch.dispatched_us, batch.lane, batch.result_ttl_ms) == ("", 0, "", 60_000)


def test_batch_leaves_out_entries_that_were_no_longer_in_redis() -> None:
    entries = [decode_entry(f"{number}-0".encode(), [b"body", b""], DEFAULTS)[0] for number in (1, 11, 2)]
    requests = [request for entry in entries for request in entry.requests]
    packed = encode_batch(Dispatch(requests, "full", ""))
    batch = decode_batch(b"9-0", [b"requests", packed, b"gone", b"11-0 2-0"], 1)
    assert [request.entry_id for request in batch.requests] == ["1-0"]


def test_malformed_batch_raises() -> None:
    for packed in (b"", b"\xc1", b"\x91\x91\x01"):
        with pytest.raises((ValueError, TypeError)):
            decode_batch(b"9-0", [b"requests", packed], 1)


def test_settled_entry_is_a_batch_or_a_change_of_workers() -> None:
    flat = flat_of({"batch": "9-0", "worker": "w/0", "size": 3, "compute_us": 17})
    assert decode_settled(flat) == BatchSettled("9-0", "w/0", 3, 17)
    assert decode_settled(flat_of({"worker": "w/0", "size": 0})) == ModelProcessesChanged("w/0")


def test_dead_letter_is_the_request_with_reason_and_attempts() -> None:
    request = BatchedRequest("1-0", "a", RAW, "r", 1000, None, b"\xff", {"tenant": b"blue", "reason": b"own"})
    flat = encode_dead_letter(DeadLetter(request, "it died", 2))
    # Expect: a reader that keeps the last of two fields with the same name has Carpool's
    assert dict(zip(flat[::2], flat[1::2], strict=True)) == {
        "correlation_id": "a",
        "content_type": RAW,
        "body": b"\xff",
        "reply_to": "r",
        "tenant": b"blue",
        "reason": "it died",
        "attempts": 2,
        "entry_id": "1-0",
    }
