"""Batches, settled entries and dead letters: what a worker reads is what a batcher wrote, and the reverse."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.messages.batches import Batch, BatchedRequest, Dispatch
from carpool.messages.requests import PRIORITY_DEFAULT, RAW, Entry, Run, SequencePart
from carpool.messages.results import DeadLetter
from carpool.messages.settled import (
    BatchSettled,
    Executed,
    ExecutedOf,
    Failures,
    ModelProcessesChanged,
    Streamed,
)
from carpool.model_settings import ModelKind, ModelSettings
from carpool.rows import Rows, StoredBody
from carpool.tickets import Tickets
from carpool.wire.batches import (
    decode_batch,
    decode_settled,
    encode_batch,
    encode_dead_letter,
    encode_streamed,
    encode_tickets,
    settled_fields,
)
from carpool.wire.requests import decode_entry
from support.wire import DEFAULTS, decode, decode_packed, flat_of, singles
from support.wire_strategies import request_maps

fast = settings(deadline=None)


def batched(run: Run, dispatch: Dispatch) -> list[BatchedRequest]:
    return [
        BatchedRequest(
            run.entry.id,
            request.correlation_id,
            request.content_type,
            request.reply_to,
            request.arrival_us,
            dispatch.deadline_us(run),
            request.body,
            request.extra or None,
            request.ticket,
        )
        for request in singles([run])
    ]


def columns_of(sent: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """Each request twice: as rows, as a list of bodies, or with its body stored elsewhere."""
    return [
        {name: value for name, value in raw.items() if name not in ("correlation_id", "body")}
        | {"correlation_ids": f"{raw['correlation_id']} b"}
        | {
            "rows": {"row_head": raw["body"], "rows": b"1122"},
            "bodies": {"bodies": [raw["body"], b""]},
            "stored": {"bodies": [{"body_key": "k", "body_bytes": 7}, raw["body"]]},
        }[form]
        for raw in sent
    ]


@fast
@given(
    st.lists(request_maps, min_size=1, max_size=5),
    st.sampled_from(["single", "rows", "bodies", "stored"]),
    st.text("lane", max_size=4),
    st.integers(1, 9),
    st.lists(st.booleans(), min_size=5, max_size=5),
    st.booleans(),
    st.booleans(),
)
def test_batch_is_read_as_it_was_written(
    sent: list[dict[str, Any]],
    form: str,
    lane: str,
    epoch: int,
    undated: list[bool],
    has_tickets: bool,
    is_cut: bool,
) -> None:
    # Given: runs with and without tickets, of which some have no deadline once in flight and some are divided
    runs = decode_packed(sent if form == "single" else columns_of(sent, form))[0].runs
    for run in runs:
        run.tickets = Tickets.of("1700000000000-0", 7, len(run)) if has_tickets else None
    if is_cut and len(runs[0]) > 1:
        runs[0].cut(1)
    dispatch = Dispatch(
        runs, "full", "", frozenset(run for run, out in zip(runs, undated, strict=False) if out)
    )
    # When
    flat = [b"runs", encode_batch(dispatch), b"reason", b"full", b"dispatched_us", b"17"]
    tickets = encode_tickets(dispatch)
    flat += [] if tickets is None else [b"tickets", tickets]
    batch = decode_batch(b"9-1", [*flat, b"lane", lane.encode()], epoch)
    # Expect
    assert (batch.id, batch.epoch, batch.reason, batch.dispatched_us) == ("9-1", epoch, "full", 17)
    assert batch.lane == lane
    assert batch.size == dispatch.size
    assert batch.requests == [request for run in runs for request in batched(run, dispatch)]
    assert [run.reply_columns for run in batch.runs] == [run.reply_columns for run in runs]


def test_rows_stay_rows_and_stored_bodies_stay_stored() -> None:
    entry, _ = decode({"correlation_ids": "a b", "row_head": "h", "rows": "1234", "reply_columns": 1})
    stored, _ = decode({"body_key": "k", "body_bytes": 7})
    batch = decode_batch(b"9-0", [b"runs", encode_batch(Dispatch(entry.runs + stored.runs, "full", ""))], 1)
    assert [run.bodies for run in batch.runs] == [Rows(b"h", b"1234", 2), [StoredBody("k", 7)]]
    assert [run.correlation_ids for run in batch.runs] == [["a", "b"], [stored.id]]


def test_priority_and_cost_are_in_a_run_unless_they_are_the_defaults() -> None:
    usual, urgent, free = (Run(Entry("1-0", 0), [name], [b"1"]) for name in "abc")
    urgent.priority, free.cost = 9, 0
    packed = encode_batch(Dispatch([usual, urgent, free], "full", ""))
    runs = decode_batch(b"9-0", [b"runs", packed], 1).runs
    assert [(run.priority, run.cost) for run in runs] == [(4, 1), (9, 1), (4, 0)]
    assert [len(fields) for fields in msgpack.unpackb(packed)] == [11, 13, 13]


def test_settled_entry_has_the_cost_that_the_model_told() -> None:
    assert settled_fields(Executed(cost=0)) == []
    flat = [b"batch", b"9-0", *(str(part).encode() for part in settled_fields(Executed(cost=70)))]
    event = decode_settled(flat)
    assert isinstance(event, BatchSettled) and event.cost == 70


def test_batch_without_the_optional_fields_has_defaults() -> None:
    batch = decode_batch(b"9-0", [b"runs", b"\x90"], 1)
    assert (batch.reason, batch.dispatched_us, batch.lane, batch.result_ttl_ms) == ("", 0, "", 60_000)


def test_batch_has_the_limit_of_results_that_it_names_or_the_default() -> None:
    (default,) = {
        decode_batch(b"9-0", [b"runs", b"\x90"], 1).max_result_bytes,
        Batch("9-0", 1, [], "full", 0, "").max_result_bytes,
        ModelSettings().max_result_bytes,
    }
    assert default == 64 << 20
    named = ModelSettings(max_result_bytes=5).for_workers(ModelKind.PLAIN).encode()
    assert decode_batch(b"9-0", [b"runs", b"\x90", b"settings", named], 1).max_result_bytes == 5


@pytest.mark.parametrize("priority", [0, PRIORITY_DEFAULT, 9])
def test_batch_has_the_priority_of_each_run(priority: int) -> None:
    """Given the default, expect that nothing is written: workers of other versions read the batch, too."""
    runs = [Run(Entry("1-0", 0), ["a"], [b"1"], priority=priority), Run(Entry("2-0", 0), ["b"], [b"2"])]
    encoded = encode_batch(Dispatch(runs, "full", ""))
    batch = decode_batch(b"9-0", [b"runs", encoded], 1)
    assert [run.priority for run in batch.runs] == [priority, PRIORITY_DEFAULT]
    lengths = list(map(len, msgpack.unpackb(encoded)))
    assert lengths == [11 + 2 * (priority != PRIORITY_DEFAULT), 11]  # with the cost


def test_batch_of_a_stepping_model_has_all_settings_for_its_worker() -> None:
    text = ModelSettings(max_batch_size=7, max_execution_ms=9).for_workers(ModelKind.STEPPING)
    flat = [b"runs", b"\x90", b"settings", text.encode()]
    batch = decode_batch(b"9-0", [*flat, b"stream", b"0", b"cost", b"1"], 1)
    assert (batch.settings, batch.max_execution_ms) == (text, 9)
    assert decode_batch(b"9-0", flat, 1).settings == ""  # a model that does not step had this name


def test_batch_leaves_out_entries_that_were_no_longer_in_redis() -> None:
    entries = [decode_entry(f"{number}-0".encode(), [b"body", b""], DEFAULTS)[0] for number in (1, 11, 2)]
    runs = [run for entry in entries for run in entry.runs]
    packed = encode_batch(Dispatch(runs, "full", ""))
    batch = decode_batch(b"9-0", [b"runs", packed, b"gone", b"11-0 2-0"], 1)
    assert [request.entry_id for request in batch.requests] == ["1-0"]


def test_malformed_batch_raises() -> None:
    for packed in (b"", b"\xc1", b"\x91\x91\x01"):
        with pytest.raises((ValueError, TypeError)):
            decode_batch(b"9-0", [b"runs", packed], 1)


def test_settled_entry_is_a_batch_or_a_change_of_workers() -> None:
    fields = {
        "batch": "9-0",
        "worker": "w/0",
        "size": 3,
        "compute_us": 17,
        "settled_us": 1_700_000_000_000_123,
    }
    for executed in (0, 2, 3):
        settled = decode_settled(flat_of({**fields, "executed": executed}))
        assert settled == BatchSettled("9-0", "w/0", 3, 17, 1_700_000_000_000_123, executed)
    assert decode_settled(flat_of({**fields, "executed": 3, "waited_us": 5})) == BatchSettled(
        "9-0", "w/0", 3, 17, 1_700_000_000_000_123, 3, 5
    )
    assert decode_settled(flat_of({"worker": "w/0", "size": 0})) == ModelProcessesChanged("w/0")


def test_settled_entry_tells_of_whose_requests_not_all_were_executed() -> None:
    of_producers = [ExecutedOf(("tenant", ""), 2, 0), ExecutedOf(("", "stream"), 3, 2)]
    executed = Executed(17, 2, failures=Failures({"INVALID_ARGUMENT": 3}), of_producers=of_producers)
    flat = [part.encode() if isinstance(part, str) else part for part in settled_fields(executed)]
    settled = decode_settled([b"batch", b"9-0", *flat])
    assert isinstance(settled, BatchSettled)
    assert settled.of_producers == of_producers
    assert settled.failures == executed.failures
    assert settled_fields(Executed(17, 2)) == []


@pytest.mark.parametrize("streamed", [None, Streamed(5, 4000, 800), Streamed(1, 0, 0), Streamed(5, 4000)])
def test_settled_entry_tells_what_was_streamed(streamed: Streamed | None) -> None:
    fields = {"batch": "9-0", "size": 1, "streamed": encode_streamed(streamed)}
    settled = decode_settled(flat_of(fields))
    assert isinstance(settled, BatchSettled)
    assert settled.streamed == streamed


def test_mean_gap_is_that_between_chunks() -> None:
    assert Streamed(5, 4000, 800).gap_us == 200
    assert Streamed(1, 4000, 0).gap_us is None
    assert Streamed(5, 4000).gap_us is None, "the time of the last chunk is not known"


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


def test_run_of_a_sequence_is_read_as_it_was_written() -> None:
    place = SequencePart.place_of("1700000000000-3", 2)
    parts = [
        None,
        SequencePart("mic7", True, False, None, place),
        SequencePart("mic8", False, True, 0, place),
    ]
    runs = [Run(Entry("1-0", 1000), [f"r{at}"], [b"7"], sequence=part) for at, part in enumerate(parts)]
    batch = decode_batch(b"9-0", [b"runs", encode_batch(Dispatch(runs, "full", ""))], 1)
    assert [run.sequence for run in batch.runs] == parts
    assert [request.sequence for request in batch.requests] == parts


def test_settled_entry_names_the_sequences_that_were_broken() -> None:
    fields = {"batch": "9-0", "size": 2}
    settled = [decode_settled(flat_of(fields | broken)) for broken in ({}, {"broken": "mic7 mic8"})]
    assert [getattr(one, "broken", None) for one in settled] == [(), ("mic7", "mic8")]


def test_dead_letter_of_a_sequence_has_its_fields() -> None:
    part = SequencePart("mic7", True, True, 0, "")
    for of_request, expected in (
        (part, {"sequence_id": "mic7", "sequence_start": 1, "sequence_end": 1, "sequence_index": 0}),
        (part._replace(starts=False, ends=False, index=None), {"sequence_id": "mic7"}),
    ):
        request = BatchedRequest("1-0", "a", RAW, None, 1000, None, b"", None, sequence=of_request)
        flat = encode_dead_letter(DeadLetter(request, "it died", 2))
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        assert {name: value for name, value in fields.items() if str(name).startswith("seq")} == expected


def test_dead_letter_with_a_stored_body_names_it() -> None:
    request = BatchedRequest("1-0", "a", RAW, None, 1000, None, StoredBody("k", 7), None)
    flat = encode_dead_letter(DeadLetter(request, "it died", 2))
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert (fields["body_key"], fields["body_bytes"]) == ("k", 7)
    assert "body" not in fields
