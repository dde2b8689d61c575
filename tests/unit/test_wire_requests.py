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
from carpool.messages.requests import (
    CONTENT_TYPES,
    JSON,
    RAW,
    Entry,
    Run,
    SequencePart,
    SequencesEnd,
    Withdrawal,
)
from carpool.messages.results import Refusal, Result
from carpool.model_settings import ModelSettings
from carpool.rows import Rows, StoredBody
from carpool.tickets import TicketRange, Tickets
from carpool.wire.request_fields import (
    MAX_COST,
    MAX_EXTRA_BYTES,
    MAX_FIELDS,
    MAX_LANE_CHARS,
    MAX_NAMES,
    MAX_NAMES_BYTES,
    MAX_PACKED_BYTES,
    MAX_REQUESTS_PER_ENTRY,
)
from carpool.wire.requests import (
    RUN_REQUESTS_MAX,
    Decoded,
    arrival_of,
    decode_entry,
    encode_runs,
    refuse_oversized,
    tickets_of,
)
from carpool.wire.results import encode_result, encode_results
from support.wire import (
    ARRIVAL_US,
    DEFAULTS,
    ENTRY_ID,
    Single,
    decode,
    decode_packed,
    flat_of,
    one_by_one,
    singles,
)
from support.wire_strategies import request_maps, texts

fast = settings(deadline=None)
thorough = settings(deadline=None, max_examples=150)

# Not imported from the code under test: a field that it forgets must fail here.
CARPOOL_FIELDS = [
    *("body", "content_type", "correlation_id", "reply_to", "expiration", "priority", "lane", "cost"),
    *("sequence_id", "sequence_start", "sequence_end", "sequence_index", "sequence_place", "end_sequences"),
    *("requests", "arrival", "withdraw", "reply_columns"),
]
NOT_REQUESTS = (b"withdraw", b"end_sequences")
NOT_ALIKE = (*NOT_REQUESTS, b"requests", b"tickets")
# Names that Carpool knows only where there is no body.
COLUMN_NAMES = ["correlation_ids", "row_head", "rows", "bodies", "body_key", "body_bytes"]


def only(decoded: tuple[Entry, list[Decoded]]) -> Any:
    """The one request or refusal that an entry was decoded to."""
    (item,) = one_by_one(decoded[1])
    return item


# --- any bytes ---------------------------------------------------------------------------------------------

field_names = st.sampled_from([name.encode() for name in [*CARPOOL_FIELDS, *COLUMN_NAMES]])
likely_values = st.sampled_from(
    [
        b"",
        b"7",
        b"1",
        b"-1",
        b"a b",
        b"9" * 20,
        b"9" * 5000,
        b"\xff",
        b"a b",
        b"application/json",
        b"\xd9\xa3",
        b"1_0",
    ]
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
stored = st.dictionaries(st.sampled_from(["body_key", "body_bytes", "x"]), packed_scalars, max_size=3)
packed_values = packed_scalars | st.lists(packed_scalars | stored, max_size=3)
packed_maps = st.dictionaries(
    st.sampled_from([*CARPOOL_FIELDS, *COLUMN_NAMES]) | st.text("ab", max_size=3), packed_values, max_size=6
)
# Columns of which usually something is wrong
packed_columns = st.fixed_dictionaries(
    {"correlation_ids": st.sampled_from(["a", "a b", "a  b", "a b/c d", b"a b", " ", "\xff", 7])},
    optional={
        "rows": st.sampled_from([b"", b"7", b"78", b"789", "78"]) | packed_values,
        "row_head": st.sampled_from([b"", b"h", "h"]) | packed_values,
        "bodies": st.lists(st.binary(max_size=4) | stored | packed_scalars, max_size=3) | packed_values,
        "body_key": packed_values,
        "priority": st.sampled_from([1, "9", 10, True]),
        "reply_columns": st.sampled_from([0, 1, 2]),
        "reply_to": st.just("r"),
    },
)
packs = st.lists(packed_maps | packed_values | packed_columns, max_size=6).map(msgpack.packb) | st.binary(
    max_size=20
)
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
    assert entry.runs == [item for item in decoded if type(item) is Run]
    for item in decoded:
        assert item.entry is entry
        if isinstance(item, Run):
            assert len(item.correlation_ids) == len(item.bodies) > 0
            for request in singles([item]):
                assert_is_valid(request, model)
        elif isinstance(item, Refusal):
            assert_can_be_sent(item)
        else:
            assert isinstance(item, Withdrawal | SequencesEnd)
            assert decoded == [item]


def assert_is_valid(request: Single, model: ModelSettings) -> None:
    assert CORRELATION_ID.fullmatch(request.correlation_id)
    assert request.reply_to is None or CORRELATION_ID.fullmatch(request.reply_to)
    if isinstance(request.body, StoredBody):
        assert CORRELATION_ID.fullmatch(request.body.name)
        assert 0 <= request.body.size_bytes <= model.max_body_bytes
    else:
        assert type(request.body) is bytes
        assert len(request.body) <= model.max_body_bytes
    assert request.content_type in CONTENT_TYPES
    assert 0 <= request.priority <= 9
    assert 0 <= request.cost <= MAX_COST
    assert request.arrival_us <= ARRIVAL_US
    assert request.deadline_us is None or request.deadline_us > request.arrival_us
    assert not set(request.extra) & set(CARPOOL_FIELDS)


def assert_can_be_sent(refusal: Refusal) -> None:
    assert refusal.correlation_ids
    assert all(map(CORRELATION_ID.fullmatch, refusal.correlation_ids))
    assert refusal.reply_to is None or CORRELATION_ID.fullmatch(refusal.reply_to)
    assert refusal.status in (INVALID_ARGUMENT, UNIMPLEMENTED)
    assert re.match(r"[\w']", refusal.detail)
    assert ": " in refusal.detail
    result = Result(refusal.correlation_ids[0], refusal.status, refusal.content_type, detail=refusal.detail)
    assert encode_result(result)
    assert encode_results([result])


def is_not_columns(sent: Any) -> bool:
    return type(sent) is not dict or "correlation_ids" not in sent


@thorough
@given(st.lists((packed_maps | packed_values).filter(is_not_columns), min_size=1, max_size=6), flats)
def test_each_packed_request_becomes_a_request_or_a_refusal(maps: list[Any], flat: list[bytes]) -> None:
    # Given: a packed entry with any other fields
    shared = [
        part
        for pair in zip(flat[::2], flat[1::2], strict=True)
        if pair[0] not in NOT_REQUESTS
        for part in pair
    ]
    _, decoded = decode_entry(ENTRY_ID.encode(), [*shared, b"requests", msgpack.packb(maps)], DEFAULTS)
    # Expect: one item for each, in their order
    items = one_by_one(decoded)
    assert len(items) == len(maps)
    for item, sent in zip(items, maps, strict=True):
        if isinstance(item, Single):
            assert item.correlation_id == sent["correlation_id"] or type(sent["correlation_id"]) is bytes


@thorough
@given(flats, st.lists(packed_maps | packed_values, max_size=2))
@example([b"content_type", b"", b"body_key", b"7"], [])  # refused; the body is not under the key
def test_a_request_means_the_same_in_a_run_and_alone(flat: list[bytes], others: list[Any]) -> None:
    """Requests that differ only in ID and body are decoded once for all of them."""
    pairs = zip(flat[::2], flat[1::2], strict=True)
    shared = [part for pair in pairs if pair[0] not in NOT_ALIKE for part in pair]
    same = [{"correlation_id": name, "body": body} for name, body in (("a", b"7"), ("b", b""), ("c", b"78"))]
    maps = [
        *same,
        *others,
        {"correlation_id": "a/b", "body": b"7"},
        same[0],
        {"correlation_id": "d", "body": 7},
    ]
    # Given: the requests in one entry, and each in an entry of its own
    together = decode_entry(ENTRY_ID.encode(), [*shared, b"requests", msgpack.packb(maps)], DEFAULTS)[1]
    apart = [
        item
        for sent in maps
        for item in decode_entry(ENTRY_ID.encode(), [*shared, b"requests", msgpack.packb([sent])], DEFAULTS)[
            1
        ]
    ]
    # Expect
    assert list(map(described, one_by_one(together))) == list(map(described, one_by_one(apart)))


def described(item: Single | Refusal | Withdrawal | SequencesEnd) -> Any:
    """Everything about an item but its entry, and where it stands in it."""
    if isinstance(item, Single):
        return item._replace(sequence=item.sequence and item.sequence._replace(place=""))
    return item._replace(breaks=None)[1:] if isinstance(item, Refusal) else item


LATIN_1 = ("gr\xf6\xdfe".encode("latin-1"), "gr\xfc\xdfe".encode("latin-1"))  # alike, once they are decoded


def test_names_of_fields_that_are_no_text_are_refused() -> None:
    """Given fields of an entry whose names are in Latin-1, expect its requests to be refused by their IDs."""
    own = [b"correlation_id", b"a", b"body", b"1"]
    packed = [b"requests", msgpack.packb([{"correlation_id": name, "body": b"1"} for name in "ab"])]
    columns = [b"correlation_ids", b"a b", b"rows", b"12"]
    for fields, ids in ((own, ["a"]), (packed, ["a", "b"]), (columns, ["a", "b"])):
        flat = [*fields, LATIN_1[0], b"L", LATIN_1[1], b"M"]
        refused: Any = decode_entry(ENTRY_ID.encode(), flat, DEFAULTS)[1]
        assert [name for item in refused for name in item.correlation_ids] == ids
        for item in refused:
            assert item.status == INVALID_ARGUMENT
            assert item.detail == r"b'gr\xf6\xdfe': the name of a field must be text, in UTF-8"


@pytest.mark.parametrize("name", [b"priority", b"lang", b"\xff"])
def test_names_in_a_packed_request_that_are_bytes_are_refused_alone(name: bytes) -> None:
    maps: list[Any] = [{"correlation_id": key, "body": b"1"} for key in "abc"]
    packed = msgpack.packb([maps[0], {**maps[1], name: 9}, maps[2]])
    decoded: Any = decode_entry(ENTRY_ID.encode(), [b"requests", packed], DEFAULTS)[1]
    first, second, third = decoded
    assert (first.correlation_ids, third.correlation_ids) == (["a"], ["c"])
    assert isinstance(second, Refusal) and second.correlation_ids == ["b"]
    assert second.detail == f"{name!r}: the name of a field must be text, in UTF-8"


def test_entry_of_names_that_are_no_text_still_withdraws() -> None:
    (item,) = decode_entry(ENTRY_ID.encode(), [b"withdraw", b"a", b"\xff", b""], DEFAULTS)[1]
    assert isinstance(item, Withdrawal) and item.correlation_ids == {"a"}


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
    assert request == Single(
        sent["correlation_id"],
        sent["body"],
        sent.get("content_type", JSON),
        sent.get("reply_to"),
        ARRIVAL_US,
        None if asked_ms is None else ARRIVAL_US + asked_ms * 1000,
        sent.get("priority", 4),
        sent.get("lane", ""),
        sent.get("cost", 1),
        extra | tenant,
        sent.get("tenant", ""),
        sent.get("reply_columns", 0) == 1,
        sent.get("stream", 0) == 1,
        None,
    )


short_names = st.text("ab1.:", min_size=1, max_size=3)  # those of a regular expression take Hypothesis long
own_names = st.dictionaries(st.sampled_from(COLUMN_NAMES), st.binary(max_size=3), max_size=2)
stored_bodies = st.fixed_dictionaries({"body_key": short_names, "body_bytes": st.integers(0, 20)})
column_maps = st.integers(1, 4).flatmap(
    lambda count: st.builds(
        lambda ids, bodies, attributes: {**attributes, "correlation_ids": " ".join(ids), **bodies},
        st.lists(short_names, min_size=count, max_size=count),
        st.one_of(
            st.builds(
                lambda head, rows: {"row_head": head, "rows": b"".join(rows)},
                st.binary(max_size=3),
                st.lists(st.binary(min_size=2, max_size=2), min_size=count, max_size=count),
            ),
            st.builds(
                lambda bodies: {"bodies": bodies},
                st.lists(st.binary(max_size=5) | stored_bodies, min_size=count, max_size=count),
            ),
        ),
        request_maps.map(
            lambda sent: {
                name: value for name, value in sent.items() if name not in ("correlation_id", "body")
            }
        ),
    )
)
# Whatever a producer may send that is valid. Requests with a body may have fields of their own with any name.
valid_elements = st.one_of(
    st.builds(lambda sent, own: sent | own, request_maps, own_names),
    column_maps,
    st.builds(
        lambda sent, body: {name: value for name, value in sent.items() if name != "body"} | body,
        request_maps,
        stored_bodies,
    ),
)
ticket_ranges = st.integers(0, 4095).map(lambda position: TicketRange("1700000000000-0", position, 1))


@fast
@given(
    st.lists(valid_elements, min_size=1, max_size=5),
    own_names,
    models.filter(lambda model: model.max_body_bytes > 20),
    st.data(),
)
def test_requests_put_back_are_unchanged(
    sent: list[dict[str, Any]], shared: dict[str, Any], model: ModelSettings, data: st.DataObject
) -> None:
    # Given: requests of one entry, perhaps with tickets, of which some were dispatched or refused
    if any("correlation_ids" in raw and "body" not in raw for raw in sent):
        shared = {}
    entry, decoded = decode({"requests": msgpack.packb(sent)} | shared, model)
    assert all(type(item) is Run for item in decoded)
    if data.draw(st.booleans(), "with tickets"):
        for run in entry.runs:
            run.tickets = Tickets.join(
                data.draw(st.lists(ticket_ranges, min_size=len(run), max_size=len(run)))
            )
    for run in list(entry.runs):
        if len(run) > 1:
            indexes = range(len(run))
            taken = data.draw(st.sets(st.sampled_from(indexes), min_size=1, max_size=len(run) - 1))
            if data.draw(st.booleans()):
                run.take(sorted(taken))
            else:
                run.cut(len(taken))
    remaining = data.draw(st.lists(st.sampled_from(entry.runs), min_size=1, unique=True))
    # When: the rest is put back later, under a new entry ID
    put_back = [b"requests", encode_runs(remaining), b"arrival", str(ARRIVAL_US // 1000).encode()]
    tickets = tickets_of(remaining)
    again, _ = decode_entry(
        b"1700000099999-0", [*put_back, *([b"tickets", tickets.encode()] if tickets else [])], model
    )
    # Expect: only their entry has changed, and putting them back again means the same
    assert singles(again.runs) == singles(remaining)
    assert again.id == "1700000099999-0"
    twice, _ = decode_entry(b"1700000099999-0", [b"requests", encode_runs(again.runs), *put_back[2:]], model)
    assert [request._replace(ticket=None) for request in singles(remaining)] == singles(twice.runs)


def test_requests_with_the_most_fields_allowed_are_put_back() -> None:
    # Given: as many unknown fields as allowed, some of them shared
    own = {f"own{number}": b"x" for number in range(MAX_FIELDS - 4)}
    shared = {f"shared{number}": b"y" for number in range(4)} | {
        "lane": "l",
        "version": "2",
        "reply_to": "r",
        "expiration": 9,
        "reply_columns": 1,
    }
    maps = [{"correlation_id": name, "body": b"7", **own} for name in "ab"]
    entry, _ = decode_packed(maps, shared)
    assert len(singles(entry.runs)) == 2
    # Expect
    again, _ = decode({"requests": encode_runs(entry.runs), "arrival": ARRIVAL_US // 1000})
    assert singles(again.runs) == singles(entry.runs)


def test_deadline_is_kept_when_the_models_settings_change() -> None:
    entry, _ = decode({"body": "7"}, ModelSettings(default_expiration_ms=500))
    again = only(decode({"requests": encode_runs(entry.runs)}, ModelSettings(default_expiration_ms=900)))
    assert again.deadline_us == ARRIVAL_US + 500_000


def test_requests_keep_their_tickets_beside_others_that_are_refused_when_read_again() -> None:
    """The model's limit became lower meanwhile."""
    runs = [
        {"correlation_ids": "a b c", "bodies": [b"1", b"22222", b"3"]},
        {"correlation_ids": "d e", "rows": b"4444455555"},
        {"correlation_id": "f", "body": b"6"},
    ]
    fields = {"requests": msgpack.packb(runs), "arrival": 1, "tickets": "1-0:0+4 2-0:7+2"}
    _, decoded = decode(fields, ModelSettings(max_body_bytes=4))
    items = one_by_one(decoded)
    assert [isinstance(item, Refusal) for item in items] == [False, True, False, True, True, False]
    kept = [item.ticket for item in items if isinstance(item, Single)]
    assert kept == [("1-0", 0, 1), ("1-0", 2, 1), ("2-0", 8, 1)]


@pytest.mark.parametrize(
    "tickets",
    ["1-0:0+1", "1-0:0+3", "1-0:0+1 x", "1-0:0+1 1-0:1+1x", "\xff 1-0:1+1", "1-0:0+2 1-0:2+0"],
)
def test_malformed_tickets_are_ignored(tickets: str) -> None:
    runs = [{"correlation_ids": "a b", "rows": b"12"}]
    entry, _ = decode({"requests": msgpack.packb(runs), "arrival": 1, "tickets": tickets})
    assert [request.ticket for request in singles(entry.runs)] == [None, None]


def test_arrival_is_the_millisecond_of_the_entry_id() -> None:
    assert arrival_of(ENTRY_ID) == ARRIVAL_US


# --- withdrawals -------------------------------------------------------------------------------------------


def test_withdrawal_names_requests() -> None:
    entry, (withdrawal,) = decode({"withdraw": "a  b\na"})
    assert withdrawal == Withdrawal(entry, frozenset("ab"))
    assert entry.runs == []


def test_long_withdrawal_is_cut_between_names() -> None:
    # Given: names of 98 bytes and a space each, so that the limit falls within a name
    sent = [f"{number:098}" for number in range(MAX_NAMES_BYTES // 99 + 100)]
    withdrawal = only(decode({"withdraw": " ".join(sent)}))
    assert withdrawal.correlation_ids < set(sent)
    assert len(withdrawal.correlation_ids) == MAX_NAMES_BYTES // 99
    assert only(decode({"withdraw": b"a" * (MAX_NAMES_BYTES + 1)})).correlation_ids == frozenset()


def test_of_more_names_than_are_allowed_the_first_ones_are_withdrawn() -> None:
    sent = [str(number) for number in range(MAX_NAMES + 1)]
    assert only(decode({"withdraw": " ".join(sent)})).correlation_ids == frozenset(sent[:-1])


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

    assert len(one_by_one(decode_many(MAX_REQUESTS_PER_ENTRY))) == MAX_REQUESTS_PER_ENTRY
    (refusal,) = decode_many(MAX_REQUESTS_PER_ENTRY + 1)
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("requests: ")


def test_unknown_fields_are_limited_together_with_their_names() -> None:
    half = MAX_EXTRA_BYTES // 2
    assert len(only(decode({"body": "", "n" * half: "v" * half})).extra) == 1
    assert only(decode({"body": "", "n" * half: "v" * (half + 1)})).detail.startswith("fields: ")


def test_entry_put_back_may_be_larger_than_the_one_sent() -> None:
    # Given: the largest entry allowed, of requests that share no run, and the entry that puts them back
    body = bytes(8 * 1024 * 1024)
    empty = [{"correlation_id": str(number), "body": b"", "priority": number} for number in range(8)]
    overhead_bytes = len(msgpack.packb(empty)) + 8 * 4
    maps = [raw | {"body": body} for raw in empty]
    maps[0]["body"] = body[overhead_bytes:]
    packed = msgpack.packb(maps)
    assert MAX_PACKED_BYTES - 100 < len(packed) <= MAX_PACKED_BYTES
    entry, _ = decode({"requests": packed})
    put_back = encode_runs(entry.runs)
    assert len(put_back) > MAX_PACKED_BYTES
    # Expect: all requests are accepted, before and after
    assert len(singles(entry.runs)) == 8
    assert len(singles(decode({"requests": put_back, "arrival": 1})[0].runs)) == 8
    assert only(decode({"requests": put_back})).detail.startswith("requests: ")


def test_shared_fields_count_once_for_each_request() -> None:
    # Given: a small entry that would take 200 MB if its requests were put back, each with the shared fields
    maps = [{"correlation_id": "a", "body": b""}] * MAX_REQUESTS_PER_ENTRY
    entry, (refusal,) = decode_packed(maps, {"tenant": "x" * 50_000})
    assert isinstance(refusal, Refusal)
    assert refusal.detail.startswith("requests: ")
    assert entry.runs == []


def test_entry_over_the_limit_is_not_unpacked() -> None:
    refusal = only(decode({"requests": b"\xc1" * (MAX_PACKED_BYTES + 1)}))
    assert (
        refusal.detail
        == f"requests: {MAX_PACKED_BYTES + 1} bytes in all; at most {MAX_PACKED_BYTES} are allowed"
    )


@pytest.mark.parametrize(
    ("packed", "detail"),
    [
        (b'[{"body": 7}]', "not a msgpack array of maps; is it JSON?"),
        (b'{"body": 7}', "not a msgpack array of maps; is it JSON?"),
        (b"\xc1", "not a msgpack array of maps"),
        (
            msgpack.packb([{"body": b"7"}] * (MAX_REQUESTS_PER_ENTRY + 1)),
            f"an array in it is longer than the {MAX_REQUESTS_PER_ENTRY} requests of an entry",
        ),
    ],
)
def test_packed_entry_that_is_none_says_what_it_is(packed: bytes, detail: str) -> None:
    assert only(decode({"requests": packed})).detail == f"requests: {detail}"


@pytest.mark.parametrize("inner", [b"\x90", b"\x80", b"\x91\x90", b"\x81\xa0\x80"])
@pytest.mark.parametrize(
    "head", [b"", b"\x91\x82\xafcorrelation_ids\xa1a\xa6bodies"], ids=["array", "bodies"]
)
def test_nested_containers_are_refused_before_they_take_memory(inner: bytes, head: bytes) -> None:
    # Given: 8 MB of nested arrays or maps, which would become 500 MB of Python objects
    array = b"\xdc\x0f\xff" + inner * 4095
    packed = head + b"\xdc\x07\xd0" + array * 2000
    refusal = decode_in_little_memory({"requests": packed}, 2 * len(packed))
    assert refusal.detail.startswith("requests: ")


def decode_in_little_memory(fields: dict[str, Any], bytes_max: int) -> Any:
    """The one item of an entry, which must be decoded fast and with this much memory."""
    flat = flat_of(fields)
    tracemalloc.start()
    started_s = time.process_time()
    try:
        item = only(decode_entry(ENTRY_ID.encode(), flat, DEFAULTS))
        assert time.process_time() - started_s < 5
        assert tracemalloc.get_traced_memory()[1] < bytes_max
    finally:
        tracemalloc.stop()
    return item


# --- runs --------------------------------------------------------------------------------------------------


def lengths(decoded: tuple[Entry, list[Decoded]]) -> list[int]:
    """How many requests each item has."""
    return [len(item) if isinstance(item, Run) else 0 for item in decoded[1]]


def test_consecutive_requests_that_differ_only_in_id_and_body_are_one_run() -> None:
    def packed(**others: Any) -> dict[str, Any]:
        return {"correlation_id": "a", "body": b"7", **others}

    maps = [packed(), packed(), packed(lane="x"), packed(lane="x"), packed(lane="y"), packed(), packed()]
    assert lengths(decode_packed(maps)) == [2, 2, 1, 2]
    # An invalid one divides a run
    assert lengths(decode_packed([packed(), packed(), packed(body=7), packed(), packed()])) == [2, 0, 2]
    columns = {"correlation_ids": "a b c/d e", "rows": b"1234"}
    assert lengths(decode_packed([packed(), columns, packed()])) == [1, 2, 0, 1, 1]
    assert lengths(decode(columns | {"correlation_ids": "a b c d"})) == [4]


def test_values_that_are_only_equal_in_python_do_not_share_a_run() -> None:
    values: list[Any] = [1, 1.0, "1", b"1", 0.0, -0.0]
    maps = [{"correlation_id": "a", "body": b"", "x": value} for value in values]
    entry, _ = decode_packed(maps)
    assert [request.extra["x"] for request in singles(entry.runs)] == [
        b"1",
        b"1.0",
        b"1",
        b"1",
        b"0.0",
        b"-0.0",
    ]
    entry, decoded = decode_packed(
        [{"correlation_id": "a", "body": b"", "cost": cost} for cost in (1, True, 1)]
    )
    assert lengths((entry, decoded)) == [1, 0, 1]


@pytest.mark.parametrize(("max_batch_size", "longest"), [(1, RUN_REQUESTS_MAX), (64, 64), (100, 100)])
def test_runs_longer_than_a_batch_are_divided(max_batch_size: int, longest: int) -> None:
    model = ModelSettings(max_batch_size=max_batch_size)
    ids = [f"n{number}" for number in range(2 * longest + 5)]
    rows = b"".join(b"%03d" % number for number in range(len(ids)))
    maps = [{"correlation_id": name, "body": b"%03d" % number} for number, name in enumerate(ids)]
    for fields in ({"correlation_ids": " ".join(ids), "rows": rows}, {"requests": msgpack.packb(maps)}):
        entry, decoded = decode(fields, model)
        assert lengths((entry, decoded)) == [longest, longest, 5]
        assert entry.runs == decoded
        assert [(request.correlation_id, request.body) for request in singles(entry.runs)] == [
            (name, b"%03d" % number) for number, name in enumerate(ids)
        ]


def test_tickets_are_divided_with_their_runs() -> None:
    count = 2 * RUN_REQUESTS_MAX
    columns = {"correlation_ids": " ".join(["a"] * count), "rows": bytes(count)}
    fields = {"requests": msgpack.packb([columns]), "arrival": 1, "tickets": f"1-0:0+{count}"}
    entry, decoded = decode(fields, ModelSettings(max_batch_size=RUN_REQUESTS_MAX))
    assert lengths((entry, decoded)) == [RUN_REQUESTS_MAX, RUN_REQUESTS_MAX]
    assert [request.ticket for request in singles(entry.runs)] == [("1-0", at, 1) for at in range(count)]


def test_a_part_of_a_long_run_does_not_keep_the_other_rows_in_memory() -> None:
    """Its producer may withdraw all the others."""
    row = bytes(8000)
    fields = {
        "correlation_ids": " ".join(["a"] * MAX_REQUESTS_PER_ENTRY),
        "rows": row * MAX_REQUESTS_PER_ENTRY,
    }
    _, decoded = decode(fields, ModelSettings(max_batch_size=RUN_REQUESTS_MAX))
    first, last = decoded[0], decoded[-1]
    for part in (first, last):
        assert isinstance(part, Run) and isinstance(part.bodies, Rows)
        data = part.bodies.data
        held_bytes = len(data) if isinstance(data, bytes) else len(memoryview(data.obj))
        assert held_bytes <= 2 * RUN_REQUESTS_MAX * len(row)


# --- columns -----------------------------------------------------------------------------------------------

column_ids = st.sampled_from(["a", "b", "c:1", "", "a/b", "ä", "x" * 129])


@thorough
@given(
    st.lists(st.tuples(column_ids, st.binary(min_size=2, max_size=2)), min_size=1, max_size=6),
    st.binary(max_size=3),
    request_maps,
    st.dictionaries(st.sampled_from(["tenant", "x", "priority", "lane"]), st.sampled_from([b"1", b"77"])),
    st.sampled_from([4, 1000]),
)
def test_columns_mean_the_same_as_a_list_of_maps(
    sent: list[tuple[str, bytes]], head: bytes, attributes: dict[str, Any], shared: dict[str, Any], limit: int
) -> None:
    model = ModelSettings(max_body_bytes=limit)
    del attributes["correlation_id"], attributes["body"]
    maps = [{"correlation_id": name, "body": head + row, **attributes} for name, row in sent]
    as_maps = decode({"requests": msgpack.packb(maps)} | shared, model)[1]
    expected = list(map(described, one_by_one(as_maps)))
    # Given: the same requests as rows and as bodies, in an element and (as rows) in the entry itself
    ids = {"correlation_ids": " ".join(name for name, _ in sent)}
    rows = {"row_head": head, "rows": b"".join(row for _, row in sent)}
    elements = [ids | rows | attributes, ids | {"bodies": [head + row for _, row in sent]} | attributes]
    entries = [{"requests": msgpack.packb([element])} | shared for element in elements]
    entries.append(shared | attributes | ids | rows)
    # Expect: the same requests and refusals. Where all fail for one reason, that is the first that was found.
    for fields in entries:
        decoded = one_by_one(decode(fields, model)[1])
        if any(isinstance(item, Single) for item in decoded):
            assert list(map(described, decoded)) == expected
        else:
            assert [(item[0], item[1:4]) for item in map(described, decoded)] == [
                (item[0], item[1:4]) for item in expected
            ]


def test_head_of_every_row_counts() -> None:
    """The entry is small, and its requests would take 4 GB."""
    head = bytes(1 << 20)
    ids = " ".join(["a"] * MAX_REQUESTS_PER_ENTRY)
    rows = b"7" * MAX_REQUESTS_PER_ENTRY
    for spoilt in (ids, ids[:-1] + "/"):
        refusal = decode_columns_in_little_memory({"correlation_ids": spoilt, "row_head": head, "rows": rows})
        assert refusal.detail.startswith("rows: ")
    # Also the heads of many small columns, here of invalid requests
    parts = [
        {"correlation_ids": " ".join(["/"] * 32), "row_head": head, "rows": b"7" * 32} for _ in range(10)
    ]
    refusal = decode_in_little_memory({"requests": msgpack.packb(parts)}, 3 * 10 * len(head))
    assert refusal.detail.startswith("requests: ")


def decode_columns_in_little_memory(fields: dict[str, Any]) -> Refusal:
    """The one refusal of all requests of columns."""
    tracemalloc.start()
    try:
        _, (refusal,) = decode(fields)
        assert tracemalloc.get_traced_memory()[1] < 8 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert isinstance(refusal, Refusal)
    return refusal


@pytest.mark.parametrize("packed", [False, True])
def test_spaces_are_counted_before_they_are_split(packed: bool) -> None:
    columns = {"correlation_ids": " " * (16 * 1024 * 1024), "rows": b"7"}
    fields = {"requests": msgpack.packb([columns])} if packed else columns
    refusal = decode_in_little_memory(fields, 3 * 16 * 1024 * 1024)
    assert re.match("requests: |correlation_ids: ", refusal.detail)


def test_oversized_entry_is_refused_by_its_small_fields() -> None:
    fields = {"correlation_id": "big", "reply_to": "near", "content_type": RAW, "sequence_id": "s"}
    entry, (refused,) = refuse_oversized(ENTRY_ID.encode(), flat_of(fields), b"body", 500_000_000)
    assert isinstance(refused, Refusal)
    assert (refused.entry, entry.runs, refused.status) == (entry, [], INVALID_ARGUMENT)
    assert (refused.correlation_ids, refused.reply_to, refused.content_type) == (["big"], "near", RAW)
    assert refused.detail == f"body: the entry has 500000000 bytes; at most {MAX_PACKED_BYTES} are allowed"
    assert refused.breaks is not None
    assert (refused.breaks.sequence_id, refused.breaks.place) == ("s", SequencePart.place_of(ENTRY_ID, 0))
    _, (of_entry,) = refuse_oversized(ENTRY_ID.encode(), [], b"requests", 200_000_000)
    assert isinstance(of_entry, Refusal)
    assert of_entry.correlation_ids == [ENTRY_ID]


def test_refused_columns_name_at_most_one_stored_body_for_each_id() -> None:
    bodies = [{"body_key": f"b{at}", "body_bytes": 1} for at in range(1000)]
    columns = [{"correlation_ids": "x y", "bodies": bodies}] * 20
    _, refused = decode_packed(columns)
    assert [item.body_names for item in refused if isinstance(item, Refusal)] == [["b0", "b1"]] * 20


def test_fields_of_columns_are_not_repeated_without_limit() -> None:
    """Each second request is refused, and each other one would carry all fields if it were put back."""
    ids = " ".join(["a", "/"] * (MAX_REQUESTS_PER_ENTRY // 2))
    fields = {"correlation_ids": ids, "rows": b"7" * MAX_REQUESTS_PER_ENTRY}
    assert only_refusal(fields | {"x": "x" * 50_000}).detail.startswith("fields: ")
    entry, _ = decode(fields | {"x": "x" * 10_000})
    assert len(entry.runs) == MAX_REQUESTS_PER_ENTRY // 2
    # Where all are valid, they are one run
    entry, _ = decode(fields | {"x": "x" * 50_000, "correlation_ids": ids.replace("/", "b")})
    assert len(singles(entry.runs)) == MAX_REQUESTS_PER_ENTRY


def only_refusal(fields: dict[str, Any]) -> Refusal:
    """The refusal that answers all requests of columns."""
    _, (refusal,) = decode(fields)
    assert isinstance(refusal, Refusal)
    assert len(refusal.correlation_ids) == MAX_REQUESTS_PER_ENTRY
    return refusal
