"""Messages <-> fields and bytes: nothing is lost, nothing raises, and everything has a limit.

What single entries mean, case by case, is the matter of the golden vectors (tests/contract).
"""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import INVALID_ARGUMENT, OK, UNIMPLEMENTED, InvalidArgumentError
from carpool.keys import CORRELATION_ID
from carpool.messages import (
    CONTENT_TYPES,
    JSON,
    MSGPACK,
    RAW,
    BatchedRequest,
    BatchSettled,
    DeadLetter,
    Dispatch,
    Entry,
    Refusal,
    Request,
    Result,
    Withdrawal,
    WorkersChanged,
)
from carpool.model_settings import ModelSettings
from carpool.wire.batches import decode_batch, decode_settled, encode_batch, encode_dead_letter
from carpool.wire.requests import (
    MAX_COST,
    MAX_EXTRA_BYTES,
    MAX_FIELDS,
    MAX_LANE_CHARS,
    MAX_PACKED_BYTES,
    MAX_REQUESTS_PER_ENTRY,
    MAX_WITHDRAW_BYTES,
    Decoded,
    arrival_of,
    decode_entry,
    encode_requests,
)
from carpool.wire.results import MAX_DETAIL_CHARS, decode_results, encode_result, encode_results

fast = settings(deadline=None)
thorough = settings(deadline=None, max_examples=300)

DEFAULTS = ModelSettings()
KNOWN = [
    *("body", "content_type", "correlation_id", "reply_to", "expiration", "priority", "lane", "cost"),
    *("sequence_id", "sequence_start", "sequence_end", "requests", "arrival", "withdraw"),
]
ID = "1700000000123-4"
ARRIVAL_US = 1700000000123_000


def flat_of(fields: dict[str, Any]) -> list[bytes]:
    return [part if type(part) is bytes else str(part).encode() for pair in fields.items() for part in pair]


def decode(fields: dict[str, Any], model: ModelSettings = DEFAULTS) -> tuple[Entry, list[Decoded]]:
    return decode_entry(ID.encode(), flat_of(fields), model)


def decode_packed(maps: Any, beside: dict[str, Any] | None = None) -> tuple[Entry, list[Decoded]]:
    return decode({"requests": msgpack.packb(maps)} | (beside or {}))


def one(decoded: tuple[Entry, list[Decoded]]) -> Any:
    """The only thing that an entry became."""
    _, (only,) = decoded
    return only


def told(request: Request) -> tuple[Any, ...]:
    """Everything that a request says, but for the entry that it came in."""
    return (
        request.correlation_id,
        request.body,
        request.content_type,
        request.reply_to,
        request.arrival_us,
        request.deadline_us,
        request.priority,
        request.lane,
        request.tenant,
        request.cost,
        dict(request.extra or {}),
    )


# --- any bytes at all --------------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)  # all but halves of surrogate pairs
known_names = st.sampled_from([name.encode() for name in KNOWN])
likely_values = st.sampled_from(
    [b"", b"7", b"-1", b"9" * 20, b"9" * 5000, b"\xff", b"a b", b"application/json", b"\xd9\xa3", b"1_0"]
)
values = likely_values | st.binary(max_size=20)
packed_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    texts,
    st.binary(max_size=5),
    st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=4)),
)
packed_values = packed_scalars | st.lists(packed_scalars, max_size=3)
packed_maps = st.dictionaries(st.sampled_from(KNOWN) | st.text("ab", max_size=3), packed_values, max_size=6)
packs = st.lists(packed_maps | packed_values, max_size=6).map(msgpack.packb) | st.binary(max_size=20)
flats = st.lists(
    st.tuples(known_names, values)
    | st.tuples(st.just(b"requests"), packs)
    | st.tuples(st.binary(max_size=5), st.binary(max_size=5)),
    max_size=8,
).map(lambda pairs: [part for pair in pairs for part in pair])
models = st.sampled_from([DEFAULTS, ModelSettings(max_body_bytes=3, default_expiration_ms=5)])


@thorough
@given(flats, models)
@example([b"requests", b"\x91" * 5000], DEFAULTS)
@example([b"arrival", b"9" * 5000, b"body", b""], DEFAULTS)
@example([b"cost", b"9" * 5000, b"body", b""], DEFAULTS)
def test_any_entry_is_understood_or_answered(flat: list[bytes], model: ModelSettings) -> None:
    entry, decoded = decode_entry(ID.encode(), flat, model)
    # Expect: an answer, or a place in the queue, for everything in it, and only what has a place waits
    assert decoded
    assert entry.requests == [each for each in decoded if type(each) is Request]
    for each in decoded:
        assert each.entry is entry
        if isinstance(each, Request):
            assert_can_be_served(each, model)
        elif isinstance(each, Refusal):
            assert_can_be_sent(each)
        else:
            assert isinstance(each, Withdrawal)
            assert decoded == [each]


def assert_can_be_served(request: Request, model: ModelSettings) -> None:
    assert CORRELATION_ID.fullmatch(request.correlation_id)
    assert request.reply_to is None or CORRELATION_ID.fullmatch(request.reply_to)
    assert type(request.body) is bytes
    assert len(request.body) <= model.max_body_bytes
    assert request.content_type in CONTENT_TYPES
    assert 0 <= request.priority <= 9
    assert 0 <= request.cost <= MAX_COST
    assert request.arrival_us <= ARRIVAL_US
    assert request.deadline_us is None or request.deadline_us > request.arrival_us
    assert not set(request.extra or {}) & set(KNOWN)


def assert_can_be_sent(refusal: Refusal) -> None:
    assert CORRELATION_ID.fullmatch(refusal.correlation_id)
    assert refusal.reply_to is None or CORRELATION_ID.fullmatch(refusal.reply_to)
    assert refusal.status in (INVALID_ARGUMENT, UNIMPLEMENTED)
    assert re.match(r"[\w']", refusal.detail)
    assert ": " in refusal.detail
    result = Result(refusal.correlation_id, refusal.status, refusal.content_type, detail=refusal.detail)
    assert encode_result(result)
    assert encode_results([result])


@thorough
@given(st.lists(packed_maps | packed_values, min_size=1, max_size=6), flats)
def test_each_of_several_requests_is_understood_or_answered(maps: list[Any], flat: list[bytes]) -> None:
    # Given: whatever else the entry says, these are its requests
    beside = [
        part for pair in zip(flat[::2], flat[1::2], strict=True) if pair[0] != b"withdraw" for part in pair
    ]
    _, decoded = decode_entry(ID.encode(), [*beside, b"requests", msgpack.packb(maps)], DEFAULTS)
    # Expect: as many as there are, in their order
    assert len(decoded) == len(maps)
    for each, sent in zip(decoded, maps, strict=True):
        if isinstance(each, Request):
            assert each.correlation_id == sent["correlation_id"] or type(sent["correlation_id"]) is bytes


@thorough
@given(flats)
def test_a_request_of_body_and_id_alone_means_what_it_would_with_more(flat: list[bytes]) -> None:
    """The short way that most packed requests take leads where the long way does."""
    plain = {"correlation_id": "a", "body": b"7"}
    pairs = zip(flat[::2], flat[1::2], strict=True)
    beside = [part for pair in pairs if pair[0] not in (b"withdraw", b"requests") for part in pair]
    # Given: the same request twice, once with an unknown field more
    both = [plain, plain | {"x": b""}]
    _, (short, long) = decode_entry(ID.encode(), [*beside, b"requests", msgpack.packb(both)], DEFAULTS)
    # Expect
    if isinstance(short, Request):
        assert isinstance(long, Request)
        assert told(long) == (*told(short)[:-1], dict(short.extra or {}) | {"x": b""})
    else:
        assert isinstance(short, Refusal)
        assert isinstance(long, Refusal)
        assert short[1:] == long[1:]


# --- there and back ----------------------------------------------------------------------------------------

names = st.from_regex(CORRELATION_ID, fullmatch=True)
own_names = texts.filter(lambda name: name not in KNOWN)
requests = st.fixed_dictionaries(
    {"correlation_id": names, "body": st.binary(max_size=20)},
    optional={
        "content_type": st.sampled_from(CONTENT_TYPES),
        "reply_to": names,
        "expiration": st.integers(1, 10**9),
        "priority": st.integers(0, 9),
        "lane": texts,
        "cost": st.integers(0, 1 << 40),
        "tenant": names,
    },
)


@fast
@given(requests, st.dictionaries(own_names, st.binary(max_size=5), max_size=5))
def test_a_request_is_what_was_sent(sent: dict[str, Any], others: dict[str, bytes]) -> None:
    others.pop("tenant", None)
    request = one(decode(sent | others))
    # The model may read whose it is, as it may any field that is not Carpool's alone
    tenant = {"tenant": sent["tenant"].encode()} if "tenant" in sent else {}
    asked_ms = min(sent["expiration"], DEFAULTS.max_expiration_ms) if "expiration" in sent else None
    assert told(request) == (
        sent["correlation_id"],
        sent["body"],
        sent.get("content_type", JSON),
        sent.get("reply_to"),
        ARRIVAL_US,
        None if asked_ms is None else ARRIVAL_US + asked_ms * 1000,
        sent.get("priority", 4),
        sent.get("lane", ""),
        sent.get("tenant", ""),
        sent.get("cost", 1),
        others | tenant,
    )


@fast
@given(st.lists(requests, min_size=1, max_size=5), models.filter(lambda model: model.max_body_bytes > 20))
def test_requests_put_back_are_what_they_were(sent: list[dict[str, Any]], model: ModelSettings) -> None:
    # Given: requests that came in one entry, and go back under a new ID, later
    entry, _ = decode({"requests": msgpack.packb(sent)}, model)
    put_back = [b"requests", encode_requests(entry.requests), b"arrival", str(ARRIVAL_US // 1000).encode()]
    # Expect: nothing has changed but their entry, not even after a second time
    again, _ = decode_entry(b"1700000099999-0", put_back, model)
    assert [told(request) for request in again.requests] == [told(request) for request in entry.requests]
    assert again.id == "1700000099999-0"
    assert encode_requests(again.requests) == encode_requests(entry.requests)


def test_requests_with_all_fields_there_can_be_are_put_back() -> None:
    # Given: as many unknown fields as there may be, some of them beside all requests
    own = {f"own{number}": b"x" for number in range(MAX_FIELDS - 4)}
    beside = {f"beside{number}": b"y" for number in range(4)} | {
        "lane": "l",
        "reply_to": "r",
        "expiration": 9,
    }
    maps = [{"correlation_id": name, "body": b"7", **own} for name in "ab"]
    entry, _ = decode_packed(maps, beside)
    assert len(entry.requests) == 2
    # Expect
    again, _ = decode({"requests": encode_requests(entry.requests), "arrival": ARRIVAL_US // 1000})
    assert [told(request) for request in again.requests] == [told(request) for request in entry.requests]


def test_a_deadline_is_kept_when_the_models_settings_change() -> None:
    entry, _ = decode({"body": "7"}, ModelSettings(default_expiration_ms=500))
    again = one(
        decode({"requests": encode_requests(entry.requests)}, ModelSettings(default_expiration_ms=900))
    )
    assert again.deadline_us == ARRIVAL_US + 500_000


@fast
@given(st.lists(requests, max_size=5), st.text("lane", max_size=4), st.integers(1, 9))
def test_a_batch_is_the_same_after_a_trip(sent: list[dict[str, Any]], lane: str, epoch: int) -> None:
    entry = decode_packed(sent or [{}])[0]
    flat = [
        b"requests",
        encode_batch(Dispatch(entry.requests, "full", "")),
        b"reason",
        b"full",
        b"dispatched_us",
        b"17",
    ]
    batch = decode_batch(b"9-1", [*flat, b"lane", lane.encode()], epoch)
    assert (batch.id, batch.epoch, batch.reason, batch.dispatched_us) == ("9-1", epoch, "full", 17)
    assert batch.lane == lane
    assert [riding(request) for request in entry.requests] == batch.requests


def riding(request: Request) -> BatchedRequest:
    return BatchedRequest(
        request.entry.id,
        request.correlation_id,
        request.content_type,
        request.reply_to,
        request.arrival_us,
        request.deadline_us,
        request.body,
        request.extra,
    )


def test_a_batch_leaves_out_the_entries_that_were_gone() -> None:
    entries = [decode_entry(f"{number}-0".encode(), [b"body", b""], DEFAULTS)[0] for number in (1, 11, 2)]
    packed = encode_batch(Dispatch([one for entry in entries for one in entry.requests], "full", ""))
    batch = decode_batch(b"9-0", [b"requests", packed, b"gone", b"11-0 2-0"], 1)
    assert [request.entry_id for request in batch.requests] == ["1-0"]


def test_what_was_settled() -> None:
    flat = flat_of({"batch": "9-0", "worker": "w/0", "size": 3, "compute_us": 17})
    assert decode_settled(flat) == BatchSettled("9-0", "w/0", 3, 17)
    assert decode_settled(flat_of({"worker": "w/0", "size": 0})) == WorkersChanged("w/0")


def test_a_dead_letter_is_the_request_with_the_reason_and_the_attempts() -> None:
    request = BatchedRequest("1-0", "a", RAW, "r", 1000, None, b"\xff", {"tenant": b"blue", "reason": b"own"})
    flat = encode_dead_letter(DeadLetter(request, "it died", 2))
    # Expect: a reader that takes the last of two fields of one name reads Carpool's
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


# --- withdrawals -------------------------------------------------------------------------------------------


def test_a_withdrawal_names_requests() -> None:
    entry, (withdrawal,) = decode({"withdraw": "a  b\na"})
    assert withdrawal == Withdrawal(entry, frozenset("ab"))
    assert entry.requests == []


def test_a_long_withdrawal_is_cut_between_names() -> None:
    # Given: names of 9 bytes with their space, so that the limit cuts one in two
    many = [f"{number:08}" for number in range(MAX_WITHDRAW_BYTES // 9 + 100)]
    withdrawal = one(decode({"withdraw": " ".join(many)}))
    assert withdrawal.correlation_ids < set(many)
    assert len(withdrawal.correlation_ids) == MAX_WITHDRAW_BYTES // 9
    assert one(decode({"withdraw": b"a" * (MAX_WITHDRAW_BYTES + 1)})).correlation_ids == frozenset()


# --- limits ------------------------------------------------------------------------------------------------


def test_a_body_has_a_limit_of_the_models_own() -> None:
    model = ModelSettings(max_body_bytes=3)
    packed = {"requests": msgpack.packb([{"correlation_id": "a", "body": b"1234"}])}
    assert one(decode({"body": "123"}, model)).body == b"123"
    for fields in ({"body": "1234"}, packed):
        assert one(decode(fields, model)).detail == "body: 4 bytes; this model takes 3"


def test_a_text_for_a_body_is_measured_in_bytes() -> None:
    model = ModelSettings(max_body_bytes=3)
    packed = {"requests": msgpack.packb([{"correlation_id": "a", "body": "ää"}])}
    assert one(decode(packed, model)).detail == "body: 4 bytes; this model takes 3"


def test_a_lane_has_a_limit() -> None:
    assert one(decode({"body": "", "lane": "ä" * MAX_LANE_CHARS})).lane == "ä" * MAX_LANE_CHARS
    assert one(decode({"body": "", "lane": "ä" * (MAX_LANE_CHARS + 1)})).detail.startswith(
        "lane: 129 characters"
    )


def test_several_requests_have_a_limit() -> None:
    def decode_many(count: int) -> list[Decoded]:
        return decode_packed([{"correlation_id": "a", "body": b""}] * count)[1]

    assert len(decode_many(MAX_REQUESTS_PER_ENTRY)) == MAX_REQUESTS_PER_ENTRY
    (refusal,) = decode_many(MAX_REQUESTS_PER_ENTRY + 1)
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("requests: ")


def test_unknown_fields_are_measured_with_their_names() -> None:
    half = MAX_EXTRA_BYTES // 2
    assert len(one(decode({"body": "", "n" * half: "v" * half})).extra) == 1
    assert one(decode({"body": "", "n" * half: "v" * (half + 1)})).detail.startswith("fields: ")


def test_an_entry_has_a_limit_and_what_was_put_back_a_larger_one() -> None:
    # Given: requests that say the most that they may, and what they become when they are put back
    body = bytes(8 * 1024 * 1024)
    overhead = (
        len(msgpack.packb([{"correlation_id": str(number), "body": b""} for number in range(8)])) + 8 * 4
    )
    maps = [{"correlation_id": str(number), "body": body} for number in range(8)]
    maps[0]["body"] = body[overhead:]
    packed = msgpack.packb(maps)
    assert MAX_PACKED_BYTES - 100 < len(packed) <= MAX_PACKED_BYTES
    entry, _ = decode({"requests": packed})
    put_back = encode_requests(entry.requests)
    assert len(put_back) > MAX_PACKED_BYTES
    # Expect: they wait, before and after
    assert len(entry.requests) == 8
    assert len(decode({"requests": put_back, "arrival": 1})[0].requests) == 8
    assert one(decode({"requests": put_back})).detail.startswith("requests: ")


def test_fields_beside_many_requests_count_for_each() -> None:
    # Given: a small entry that would be 200 MB, were each of its requests put back with all that it says
    maps = [{"correlation_id": "a", "body": b""}] * MAX_REQUESTS_PER_ENTRY
    entry, (refusal,) = decode_packed(maps, {"tenant": "x" * 50_000})
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("requests: ")
    assert entry.requests == []


def test_a_large_entry_is_not_even_looked_into() -> None:
    refusal = one(decode({"requests": b"\xc1" * (MAX_PACKED_BYTES + 1)}))
    assert refusal.detail == f"requests: {MAX_PACKED_BYTES + 1} bytes in all; at most {MAX_PACKED_BYTES}"


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\x91\x90", b"\x81\xa0\x80"])
def test_nested_arrays_and_maps_take_no_memory(inner: bytes) -> None:
    # Given: 8 MB of arrays of arrays, or of maps, which would be half a gigabyte of objects
    several = b"\xdc\x0f\xff" + inner * 4095
    packed = b"\xdc\x07\xd0" + several * 2000
    tracemalloc.start()
    started_s = time.process_time()
    try:
        refusal = one(decode({"requests": packed}))
        assert time.process_time() - started_s < 5
        assert tracemalloc.get_traced_memory()[1] < 2 * len(packed)
    finally:
        tracemalloc.stop()
    assert refusal.detail.startswith("requests: ")


# --- results -----------------------------------------------------------------------------------------------

results = st.builds(
    Result,
    names,
    st.just(OK),
    st.sampled_from([MSGPACK, RAW]),
    st.binary(max_size=20),
    st.none(),
    *[st.integers(0, 2**40)] * 3,
)
failures = st.builds(
    Result,
    names,
    st.sampled_from([INVALID_ARGUMENT, "INTERNAL", "ABORTED"]),
    st.sampled_from(CONTENT_TYPES),
    st.none(),
    st.none() | st.text(st.characters(), max_size=20),  # halves of surrogate pairs too
    *[st.just(0)] * 3,
)


def served(result: Result) -> dict[str, Any]:
    """What an envelope must say."""
    body = {"content_type": result.content_type, "body": result.body}
    detail = {"detail": (result.detail or "").encode("utf-8", "replace").decode()}
    return {
        "correlation_id": result.correlation_id,
        "status": result.status,
        "final": True,
        **(body if result.status == OK else detail),
        **{name: getattr(result, name) for name in ("batch_size", "queue_us", "compute_us")},
    }


@fast
@given(results | failures.filter(lambda result: result.content_type != JSON))
def test_an_envelope_in_msgpack_says_it_all(result: Result) -> None:
    assert msgpack.unpackb(encode_result(result)) == served(result)


@fast
@given(st.lists(results | failures, max_size=5))
@example([Result("a", "INTERNAL", JSON, detail="\ud800")])
def test_reply_streams_are_in_msgpack_whatever_was_sent(several: list[Result]) -> None:
    assert decode_results(encode_results(several)) == [served(result) for result in several]


@fast
@given(
    failures.map(lambda result: result._replace(content_type=JSON))
    | st.builds(
        lambda result, value: result._replace(content_type=JSON, body=json.dumps(value).encode()),
        results,
        st.none() | st.integers() | st.text() | st.lists(st.integers()) | st.just({"body": None}),
    )
)
def test_an_envelope_in_json_says_it_all(result: Result) -> None:
    wanted = served(result)
    if result.body is not None:
        wanted["body"] = json.loads(result.body)
    assert json.loads(encode_result(result)) == wanted


def test_a_detail_is_a_sentence_and_not_a_book() -> None:
    for content_type in (JSON, MSGPACK):
        result = Result("a", "INTERNAL", content_type, detail="ä" * 5000)
        (envelope,) = decode_results(encode_results([result]))
        assert envelope["detail"] == "ä" * MAX_DETAIL_CHARS


@pytest.mark.parametrize("value", [{}, None, 7, "a"])
def test_results_are_an_array(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="results: "):
        decode_results(msgpack.packb(value))


def test_an_arrival_is_the_entrys_millisecond() -> None:
    assert arrival_of(ID) == ARRIVAL_US
