"""Entries of the request stream: any bytes are decoded or refused, and everything has a limit.

The golden vectors (tests/contract) say what single entries mean, case by case.
"""

from __future__ import annotations

import re
import time
import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from carpool.errors import INVALID_ARGUMENT, UNIMPLEMENTED
from carpool.keys import CORRELATION_ID
from carpool.messages import CONTENT_TYPES, JSON, Entry, Refusal, Request, Result, Withdrawal
from carpool.model_settings import ModelSettings
from carpool.wire.request_fields import MAX_COST, MAX_EXTRA_BYTES, MAX_FIELDS, MAX_LANE_CHARS
from carpool.wire.requests import (
    MAX_PACKED_BYTES,
    MAX_REQUESTS_PER_ENTRY,
    MAX_WITHDRAW_BYTES,
    Decoded,
    arrival_of,
    decode_entry,
    encode_requests,
)
from carpool.wire.results import encode_result, encode_results
from support.wire import (
    ARRIVAL_US,
    DEFAULTS,
    ENTRY_ID,
    decode,
    decode_packed,
    request_maps,
    texts,
)

fast = settings(deadline=None)
thorough = settings(deadline=None, max_examples=300)

# Not imported from the code under test: a field that it forgets must fail here.
CARPOOL_FIELDS = [
    *("body", "content_type", "correlation_id", "reply_to", "expiration", "priority", "lane", "cost"),
    *("sequence_id", "sequence_start", "sequence_end", "requests", "arrival", "withdraw"),
]


def only(decoded: tuple[Entry, list[Decoded]]) -> Any:
    """The one item that an entry was decoded to."""
    _, (item,) = decoded
    return item


def properties(request: Request) -> tuple[Any, ...]:
    """Everything about a request except its entry."""
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


# --- any bytes ---------------------------------------------------------------------------------------------

field_names = st.sampled_from([name.encode() for name in CARPOOL_FIELDS])
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
packed_maps = st.dictionaries(
    st.sampled_from(CARPOOL_FIELDS) | st.text("ab", max_size=3), packed_values, max_size=6
)
packs = st.lists(packed_maps | packed_values, max_size=6).map(msgpack.packb) | st.binary(max_size=20)
flats = st.lists(
    st.tuples(field_names, values)
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
def test_any_entry_becomes_requests_refusals_or_a_withdrawal(flat: list[bytes], model: ModelSettings) -> None:
    entry, decoded = decode_entry(ENTRY_ID.encode(), flat, model)
    # Expect: at least one item, and exactly the requests are waiting
    assert decoded
    assert entry.requests == [item for item in decoded if type(item) is Request]
    for item in decoded:
        assert item.entry is entry
        if isinstance(item, Request):
            assert_is_valid(item, model)
        elif isinstance(item, Refusal):
            assert_can_be_sent(item)
        else:
            assert isinstance(item, Withdrawal)
            assert decoded == [item]


def assert_is_valid(request: Request, model: ModelSettings) -> None:
    assert CORRELATION_ID.fullmatch(request.correlation_id)
    assert request.reply_to is None or CORRELATION_ID.fullmatch(request.reply_to)
    assert type(request.body) is bytes
    assert len(request.body) <= model.max_body_bytes
    assert request.content_type in CONTENT_TYPES
    assert 0 <= request.priority <= 9
    assert 0 <= request.cost <= MAX_COST
    assert request.arrival_us <= ARRIVAL_US
    assert request.deadline_us is None or request.deadline_us > request.arrival_us
    assert not set(request.extra or {}) & set(CARPOOL_FIELDS)


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
def test_each_packed_request_becomes_a_request_or_a_refusal(maps: list[Any], flat: list[bytes]) -> None:
    # Given: a packed entry with any other fields
    shared = [
        part for pair in zip(flat[::2], flat[1::2], strict=True) if pair[0] != b"withdraw" for part in pair
    ]
    _, decoded = decode_entry(ENTRY_ID.encode(), [*shared, b"requests", msgpack.packb(maps)], DEFAULTS)
    # Expect: one item for each, in their order
    assert len(decoded) == len(maps)
    for item, sent in zip(decoded, maps, strict=True):
        if isinstance(item, Request):
            assert item.correlation_id == sent["correlation_id"] or type(sent["correlation_id"]) is bytes


@thorough
@given(flats)
def test_template_gives_the_same_request_as_full_decoding(flat: list[bytes]) -> None:
    """A packed request with only an ID and a body is copied from a template; one more field prevents that."""
    plain = {"correlation_id": "a", "body": b"7"}
    pairs = zip(flat[::2], flat[1::2], strict=True)
    shared = [part for pair in pairs if pair[0] not in (b"withdraw", b"requests") for part in pair]
    # Given: the same request twice, the second with one more field
    packed = msgpack.packb([plain, plain | {"x": b""}])
    _, (copied, decoded) = decode_entry(ENTRY_ID.encode(), [*shared, b"requests", packed], DEFAULTS)
    # Expect: they differ in that field only
    if isinstance(copied, Request):
        assert isinstance(decoded, Request)
        assert properties(decoded) == (*properties(copied)[:-1], dict(copied.extra or {}) | {"x": b""})
    else:
        assert isinstance(copied, Refusal)
        assert isinstance(decoded, Refusal)
        assert copied[1:] == decoded[1:]


# --- round trips -------------------------------------------------------------------------------------------


@fast
@given(
    request_maps,
    st.dictionaries(
        texts.filter(lambda name: name not in (*CARPOOL_FIELDS, "tenant")), st.binary(max_size=5), max_size=5
    ),
)
def test_request_has_what_its_producer_sent(sent: dict[str, Any], extra: dict[str, bytes]) -> None:
    request = only(decode(sent | extra))
    # The model can read the tenant too, as any field that is not only for Carpool
    tenant = {"tenant": sent["tenant"].encode()} if "tenant" in sent else {}
    asked_ms = min(sent["expiration"], DEFAULTS.max_expiration_ms) if "expiration" in sent else None
    assert properties(request) == (
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
        extra | tenant,
    )


@fast
@given(st.lists(request_maps, min_size=1, max_size=5), models.filter(lambda model: model.max_body_bytes > 20))
def test_requests_put_back_are_unchanged(sent: list[dict[str, Any]], model: ModelSettings) -> None:
    # Given: requests of one entry, put back later under a new entry ID
    entry, _ = decode({"requests": msgpack.packb(sent)}, model)
    put_back = [b"requests", encode_requests(entry.requests), b"arrival", str(ARRIVAL_US // 1000).encode()]
    # Expect: only their entry has changed, and putting them back again writes the same bytes
    again, _ = decode_entry(b"1700000099999-0", put_back, model)
    assert list(map(properties, again.requests)) == list(map(properties, entry.requests))
    assert again.id == "1700000099999-0"
    assert encode_requests(again.requests) == encode_requests(entry.requests)


def test_requests_with_the_most_fields_allowed_are_put_back() -> None:
    # Given: as many unknown fields as allowed, some of them shared
    own = {f"own{number}": b"x" for number in range(MAX_FIELDS - 4)}
    shared = {f"shared{number}": b"y" for number in range(4)} | {
        "lane": "l",
        "reply_to": "r",
        "expiration": 9,
    }
    maps = [{"correlation_id": name, "body": b"7", **own} for name in "ab"]
    entry, _ = decode_packed(maps, shared)
    assert len(entry.requests) == 2
    # Expect
    again, _ = decode({"requests": encode_requests(entry.requests), "arrival": ARRIVAL_US // 1000})
    assert list(map(properties, again.requests)) == list(map(properties, entry.requests))


def test_deadline_is_kept_when_the_models_settings_change() -> None:
    entry, _ = decode({"body": "7"}, ModelSettings(default_expiration_ms=500))
    again = only(
        decode({"requests": encode_requests(entry.requests)}, ModelSettings(default_expiration_ms=900))
    )
    assert again.deadline_us == ARRIVAL_US + 500_000


def test_arrival_is_the_millisecond_of_the_entry_id() -> None:
    assert arrival_of(ENTRY_ID) == ARRIVAL_US


# --- withdrawals -------------------------------------------------------------------------------------------


def test_withdrawal_names_requests() -> None:
    entry, (withdrawal,) = decode({"withdraw": "a  b\na"})
    assert withdrawal == Withdrawal(entry, frozenset("ab"))
    assert entry.requests == []


def test_long_withdrawal_is_cut_between_names() -> None:
    # Given: names of 8 bytes and a space each, so that the limit falls within a name
    sent = [f"{number:08}" for number in range(MAX_WITHDRAW_BYTES // 9 + 100)]
    withdrawal = only(decode({"withdraw": " ".join(sent)}))
    assert withdrawal.correlation_ids < set(sent)
    assert len(withdrawal.correlation_ids) == MAX_WITHDRAW_BYTES // 9
    assert only(decode({"withdraw": b"a" * (MAX_WITHDRAW_BYTES + 1)})).correlation_ids == frozenset()


# --- limits ------------------------------------------------------------------------------------------------


def test_body_size_is_limited_by_the_model() -> None:
    model = ModelSettings(max_body_bytes=3)
    packed = {"requests": msgpack.packb([{"correlation_id": "a", "body": b"1234"}])}
    assert only(decode({"body": "123"}, model)).body == b"123"
    for fields in ({"body": "1234"}, packed):
        assert only(decode(fields, model)).detail == "body: 4 bytes; this model takes at most 3"


def test_body_sent_as_text_is_measured_in_bytes() -> None:
    model = ModelSettings(max_body_bytes=3)
    packed = {"requests": msgpack.packb([{"correlation_id": "a", "body": "ää"}])}
    assert only(decode(packed, model)).detail == "body: 4 bytes; this model takes at most 3"


def test_lane_length_is_limited() -> None:
    assert only(decode({"body": "", "lane": "ä" * MAX_LANE_CHARS})).lane == "ä" * MAX_LANE_CHARS
    assert only(decode({"body": "", "lane": "ä" * (MAX_LANE_CHARS + 1)})).detail.startswith(
        "lane: 129 characters"
    )


def test_requests_per_entry_are_limited() -> None:
    def decode_many(count: int) -> list[Decoded]:
        return decode_packed([{"correlation_id": "a", "body": b""}] * count)[1]

    assert len(decode_many(MAX_REQUESTS_PER_ENTRY)) == MAX_REQUESTS_PER_ENTRY
    (refusal,) = decode_many(MAX_REQUESTS_PER_ENTRY + 1)
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("requests: ")


def test_unknown_fields_are_limited_together_with_their_names() -> None:
    half = MAX_EXTRA_BYTES // 2
    assert len(only(decode({"body": "", "n" * half: "v" * half})).extra) == 1
    assert only(decode({"body": "", "n" * half: "v" * (half + 1)})).detail.startswith("fields: ")


def test_entry_put_back_may_be_larger_than_the_one_sent() -> None:
    # Given: the largest entry allowed, and the entry that puts its requests back
    body = bytes(8 * 1024 * 1024)
    overhead_bytes = (
        len(msgpack.packb([{"correlation_id": str(number), "body": b""} for number in range(8)])) + 8 * 4
    )
    maps = [{"correlation_id": str(number), "body": body} for number in range(8)]
    maps[0]["body"] = body[overhead_bytes:]
    packed = msgpack.packb(maps)
    assert MAX_PACKED_BYTES - 100 < len(packed) <= MAX_PACKED_BYTES
    entry, _ = decode({"requests": packed})
    put_back = encode_requests(entry.requests)
    assert len(put_back) > MAX_PACKED_BYTES
    # Expect: all requests are accepted, before and after
    assert len(entry.requests) == 8
    assert len(decode({"requests": put_back, "arrival": 1})[0].requests) == 8
    assert only(decode({"requests": put_back})).detail.startswith("requests: ")


def test_shared_fields_count_once_for_each_request() -> None:
    # Given: a small entry that would take 200 MB if its requests were put back, each with the shared fields
    maps = [{"correlation_id": "a", "body": b""}] * MAX_REQUESTS_PER_ENTRY
    entry, (refusal,) = decode_packed(maps, {"tenant": "x" * 50_000})
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("requests: ")
    assert entry.requests == []


def test_entry_over_the_limit_is_not_unpacked() -> None:
    refusal = only(decode({"requests": b"\xc1" * (MAX_PACKED_BYTES + 1)}))
    assert (
        refusal.detail
        == f"requests: {MAX_PACKED_BYTES + 1} bytes in all; at most {MAX_PACKED_BYTES} are allowed"
    )


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\x91\x90", b"\x81\xa0\x80"])
def test_nested_containers_are_refused_before_they_take_memory(inner: bytes) -> None:
    # Given: 8 MB of nested arrays or maps, which would become 500 MB of Python objects
    array = b"\xdc\x0f\xff" + inner * 4095
    packed = b"\xdc\x07\xd0" + array * 2000
    tracemalloc.start()
    started_s = time.process_time()
    try:
        refusal = only(decode({"requests": packed}))
        assert time.process_time() - started_s < 5
        assert tracemalloc.get_traced_memory()[1] < 2 * len(packed)
    finally:
        tracemalloc.stop()
    assert refusal.detail.startswith("requests: ")
