"""Any entry of the request stream is answered, valid requests are executed meanwhile, and no process dies."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import msgpack
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from carpool.keys import CORRELATION_ID, Keys
from support.stack import Stack, envelope, fixed_keys
from support.waiting import wait_until

EXAMPLES: Final = 60  # of about ten entries, for each model
STATUSES: Final = {
    "OK", "INVALID_ARGUMENT", "UNIMPLEMENTED", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "INTERNAL",
}  # fmt: skip
ANSWER_S: Final = 10.0


class Named(NamedTuple):
    """A placeholder for a valid name, which is used once. `kind` is part of the name."""

    kind: str


class Repeated(NamedTuple):
    """A placeholder for a large value, which would slow Hypothesis down."""

    piece: Any
    times: int


class Joined(NamedTuple):
    """A placeholder for names with a space between two."""

    names: list[Any]


class Encoded(NamedTuple):
    """A placeholder for the bytes of a body."""

    content_type: str
    value: Any


OWN_ID: Final = Named("id")
OWN_REPLIES: Final = Named("replies")
NUMBERS: Final = itertools.count()


# --- what producers might send -----------------------------------------------------------------------------

odd_bytes = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=20).map(str.encode),
    st.sampled_from(
        [
            b"", b"\xff\xfe", b"\x00", b"1e999", b"NaN", b"-Infinity", b'"\\ud800"', b'"\xc3\x28"', b"\xc1",
            b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81\x91\x01\x02",
            b"\xd6\xff\x00\x00\x00\x00", b"\xc7\x04\x05abcd", Repeated(b"x", 9_000_000), Repeated(b"1", 400),
            Repeated(b"[", 5000), Repeated(b'{"a":', 3000), Repeated(b"\x91", 3000), Repeated(b"\x81", 3000),
        ]
    ),
)  # fmt: skip
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)
sizes = st.one_of(st.integers(-2, 130), st.sampled_from([0, 2**31, 2**62, 2**64, 10**30]), values)
tensors = st.fixed_dictionaries(
    {
        "datatype": st.sampled_from(["FP32", "BF16", "FP16", "INT8", "UINT64", "BOOL", "BYTES", "fp32"])
        | values,
        "shape": st.lists(sizes, max_size=4) | st.just([128]) | st.just([0] * 40) | values,
        "data": st.one_of(
            st.just(Repeated([0.5], 128)),
            st.just(Repeated(["x" * 500], 500)),
            st.lists(values, max_size=5),
            st.lists(st.integers(-(2**70), 2**70), max_size=5),
            values,
        ),
    }
)
binary_tensors = st.fixed_dictionaries(
    {
        "datatype": st.sampled_from(["FP32", "BF16", "INT64", "BYTES", "BOOL"]) | values,
        "shape": st.lists(st.integers(0, 2**63), max_size=3) | st.just([128]) | values,
        "data": st.binary(max_size=16) | st.just(Repeated(b"\0", 512)) | st.just(b"") | values,
    }
)
bodies = st.one_of(
    odd_bytes,
    st.one_of(values, tensors, st.lists(tensors, max_size=2)).map(lambda value: Encoded("json", value)),
    st.one_of(values, binary_tensors, st.dictionaries(st.text(max_size=4), binary_tensors, max_size=2)).map(
        lambda value: Encoded("msgpack", value)
    ),
)
integers = st.one_of(
    st.integers(-2, 12).map(lambda number: b"%d" % number),
    st.sampled_from(
        [b"", b" 5", b"1_0", b"0x5", b"1e3", b"9" * 30, b"\xff", "٣".encode(), b"-0", b"5.0", b"2000"]
    ),
)
names = st.one_of(
    st.just(b"x" * 129), st.just(b""), st.just(b"no spaces"), st.just(b"\xff\xff"), st.just("ä".encode()),
    st.just(b"new\nline"), st.just(b"{brace}"),
)  # fmt: skip
properties: dict[str, st.SearchStrategy[Any]] = {
    "content_type": st.sampled_from(
        [
            b"application/json",
            b"application/msgpack",
            b"application/octet-stream",
            b"text/plain",
            b"",
            b"\xff",
        ]
    ),
    "expiration": integers,
    "priority": integers,
    "lane": st.sampled_from([b"", b"a", b"x" * 129, b"\xff", "ü".encode() * 60, b"a\x00b"]),
    "cost": integers,
    "arrival": st.sampled_from([b"", b"0", b"-5", b"99999999999999999", b"9" * 15, b"soon", b"\xff"]),
    "sequence_id": st.just(b"s"),
    "traceparent": st.binary(max_size=20),
    "tenant": st.just(Repeated(b"x", 70_000)) | st.binary(max_size=5),
}
# A request of which only the body is malformed reaches a worker.
one_body = st.fixed_dictionaries(
    {"body": bodies},
    optional={
        "content_type": st.sampled_from(
            [b"application/json", b"application/msgpack", b"application/octet-stream"]
        ),
        "correlation_id": st.just(OWN_ID),
        "reply_to": st.just(OWN_REPLIES),
    },
)
one_request = st.fixed_dictionaries(
    {},
    optional={
        "body": bodies,
        "correlation_id": st.just(OWN_ID) | names,
        "reply_to": st.just(OWN_REPLIES) | names,
        **properties,
    },
)
# In a packed entry, a field may have any msgpack type.
packed_request = st.one_of(
    st.fixed_dictionaries(
        {"correlation_id": st.one_of(st.just(OWN_ID), names, values)},
        optional={"body": bodies | values, **{name: valid | values for name, valid in properties.items()}},
    ),
    st.fixed_dictionaries({"correlation_id": st.just(OWN_ID), "body": bodies}),
    st.fixed_dictionaries({"correlation_id": st.just(OWN_ID), "body": values}),
    values,
    st.dictionaries(st.text(max_size=5), values, max_size=3),
)
# Columns, of which the IDs or the rows may be malformed, and sometimes neither.
column_ids = st.one_of(
    st.lists(st.just(OWN_ID), min_size=1, max_size=4).map(Joined),
    st.lists(st.just(OWN_ID) | st.sampled_from(["", "a/b", "ä", "x" * 129]), min_size=1, max_size=4).map(
        Joined
    ),
)
rows = st.sampled_from([b"", b"7", b"77", b"777", b"7777", b"[1][2]", b"12", Repeated(b"x", 9_000_000)])
one_columns = st.fixed_dictionaries(
    {"correlation_ids": column_ids | names},
    optional={
        "rows": rows,
        "row_head": st.sampled_from([b"", b"[1,", b"-", Repeated(b" ", 9_000_000)]),
        "bodies": odd_bytes,
        "correlation_id": st.just(OWN_ID),
        "reply_to": st.just(OWN_REPLIES),
        **properties,
    },
)
packed_columns = st.fixed_dictionaries(
    {"correlation_ids": column_ids | values},
    optional={
        "rows": rows | values,
        "row_head": st.sampled_from([b"", b"-"]) | values,
        "bodies": st.lists(bodies | values, max_size=4) | values,
        "priority": integers | values,
    },
)
packed_bodies = st.fixed_dictionaries(
    {"requests": st.lists(packed_request | packed_columns, max_size=8)},
    optional={"content_type": st.just(b"application/msgpack"), "reply_to": st.just(OWN_REPLIES)},
)
packed_entry = st.fixed_dictionaries(
    {"requests": st.lists(packed_request, max_size=5) | odd_bytes | st.just(Repeated([{}], 5000)) | values},
    optional={"correlation_id": st.just(OWN_ID) | names, "body": bodies, **properties},
)


# --- sending, and the answers expected ---------------------------------------------------------------------


class Expected(NamedTuple):
    """Where an answer must be: on this ID's own list, or with this ID on this reply stream."""

    correlation_id: str
    reply_to: str | None


def new_name(name: Named) -> str:
    return f"own-{name.kind}-{next(NUMBERS)}"


def fill_in(value: Any) -> Any:
    """A value with its placeholders replaced."""
    if isinstance(value, Named):
        return new_name(value)
    if isinstance(value, Repeated):
        return value.piece * value.times
    if isinstance(value, Joined):
        return " ".join(fill_in(value.names))
    if isinstance(value, Encoded):
        return (
            json.dumps(fill_in(value.value)).encode()
            if value.content_type == "json"
            else packed(fill_in(value.value))
        )
    if isinstance(value, dict):
        return {key: fill_in(item) for key, item in value.items()}
    return [fill_in(item) for item in value] if isinstance(value, list) else value


def packed(value: Any) -> bytes:
    """The value as msgpack; as JSON, which is then malformed, if msgpack cannot hold it."""
    try:
        return bytes(msgpack.packb(value))
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(value, default=str).encode()


def send(stack: Stack, model: str, raw: dict[str, Any], used: set[str]) -> list[Expected]:
    """XADD a generated entry. Returns where its answers must be.

    None is sent that has an ID of the `used` ones, which are those of earlier entries: it could be taken for
    the same request, sent again, which has one result."""
    fields: dict[str, Any] = fill_in(raw) or {"nothing": b"at all"}
    requests = fields.get("requests")
    if "requests" in fields and not isinstance(requests, bytes):
        fields["requests"] = packed(requests)
    own = {answer.correlation_id for answer in answers_to(fields, requests, entry_id="")} - {""}
    if own & used:
        return []
    used |= own
    return answers_to(fields, requests, stack.send(model, **fields))


def answers_to(fields: dict[str, Any], requests: Any, entry_id: str) -> list[Expected]:
    """Where the answers to an entry must be. `requests`: those of its field, before they were packed."""
    reply_to = fields["reply_to"] if isinstance(fields.get("reply_to"), str) else None
    shared = fields["correlation_id"] if isinstance(fields.get("correlation_id"), str) else entry_id
    if "requests" not in fields:
        return [Expected(name, reply_to) for name in ids_of(fields, shared, entry_id) or [shared]]
    if not isinstance(requests, list) or not readable(fields["requests"]):
        return [Expected(shared, reply_to)]
    return [
        Expected(name, reply_to)
        for request in requests
        for name in ids_of(request, shared, entry_id) or [id_of(request, shared, entry_id)]
    ]


def ids_of(raw: Any, shared: str, entry_id: str) -> list[str]:
    """The IDs under which columns are answered: each valid one, else the entry's. None if not columns."""
    if not isinstance(raw, dict) or "correlation_ids" not in raw or "body" in raw:
        return []
    ids = raw["correlation_ids"]
    try:
        ids = ids.decode() if isinstance(ids, bytes) else ids
    except UnicodeDecodeError:
        return [shared]
    if not isinstance(ids, str):
        return [shared]
    return [name if CORRELATION_ID.fullmatch(name) else entry_id for name in ids.split(" ")]


def readable(packed: bytes) -> bool:
    """Whether a packed entry is an array of a valid size."""
    try:
        return 0 < len(msgpack.unpackb(packed)) <= 4096
    except Exception:
        return False


def id_of(request: Any, shared: str, entry_id: str) -> str:
    """The ID under which a packed request is answered: its own if that is valid, else the entry's."""
    if not isinstance(request, dict) or "correlation_id" not in request:
        return shared
    name = request["correlation_id"]
    return name if isinstance(name, str) and CORRELATION_ID.fullmatch(name) else entry_id


def answers(stack: Stack, model: str, expected: list[Expected]) -> list[dict[str, Any]]:
    """Wait for every answer: as many envelopes on each list and each reply stream as are expected."""
    keys = Keys(model)
    found: list[dict[str, Any]] = []
    for answer in expected:
        if answer.reply_to is None:
            data = stack.redis.blpop([keys.result(answer.correlation_id)], ANSWER_S)
            assert data is not None, f"no answer for {answer.correlation_id}"
            found.append(envelope(data[1]))
            assert found[-1]["correlation_id"] == answer.correlation_id
    for name in {answer.reply_to for answer in expected if answer.reply_to}:
        ids = [answer.correlation_id for answer in expected if answer.reply_to == name]
        found += replies(stack, model, name, ids)
    return found


def replies(stack: Stack, model: str, name: str, ids: list[str]) -> list[dict[str, Any]]:
    """Wait until exactly these requests are answered on a reply stream."""
    wait_until(
        lambda: len(stack.replies(model, name)) >= len(ids), description=f"{len(ids)} answers are on {name}"
    )
    found = stack.replies(model, name)
    assert Counter(answer["correlation_id"] for answer in found) == Counter(ids)
    return found


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(tmp_path_factory.mktemp("stack")) as stack:
        stack.serve("plain.py:Echo", "plain.py:Noop")
        yield stack


def send_valid(stack: Stack, model: str) -> list[Expected]:
    """Send two valid requests."""
    names = [new_name(OWN_ID) for _ in range(2)]
    body = json.dumps([0.5] * 128)
    stack.send(model, correlation_id=names[0], body=body)
    stack.send_packed(model, [{"correlation_id": names[1], "body": body.encode()}])
    return [Expected(name, None) for name in names]


@pytest.mark.parametrize("model", ["Echo", "Noop"])
def test_malformed_requests_are_answered_and_valid_ones_executed(stack: Stack, model: str) -> None:
    statuses: Counter[str] = Counter()
    used: set[str] = set()

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        phases=(
            Phase.explicit,
            Phase.reuse,
            Phase.generate,
        ),  # without shrinking, which would wait for each lost answer again
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(one_body | one_request | one_columns | packed_bodies | packed_entry, min_size=6, max_size=14)
    )
    def send_all(entries: list[dict[str, Any]]) -> None:
        expected: list[Expected] = []
        valid: list[Expected] = []
        for number, raw in enumerate(entries):
            expected += send(stack, model, raw, used)
            if number % 5 == 0:
                valid += send_valid(stack, model)
        for answer in answers(stack, model, expected):
            assert answer["status"] in STATUSES, answer
            assert answer["final"] is True
            assert answer["status"] == "OK" or answer["detail"], answer
            statuses[answer["status"]] += 1
        for answer in answers(stack, model, valid):
            assert answer["status"] == "OK", answer
            statuses["valid"] += 1

    send_all()

    print(f"{model}: {dict(statuses)}")
    assert statuses["INVALID_ARGUMENT"] > 400
    assert statuses["valid"] > 180

    def invalid(event: str) -> int:
        return sum(line.get("INVALID_ARGUMENT", 0) for line in stack.events(event))

    wait_until(
        lambda: min(invalid("requests refused"), invalid("batch")) > 60,
        description="the batcher and the worker have both refused some",
    )
    stack.wait_until_idle(model)
    assert stack.keys_without_ttl() <= fixed_keys("Echo") | fixed_keys("Noop")
    for service in stack.services:
        assert service.alive
        loud = [event for event in service.events() if event["level"] not in ("info", "debug")]
        assert [event for event in loud if event["event"] != "model raised"] == []


def test_reply_keys_of_another_type_affect_only_their_producer(stack: Stack) -> None:
    """Result keys that a producer created with another type do not delay other results of the batch."""
    model, keys = "Echo", Keys("Echo")
    stack.redis.set(keys.result("spoilt"), "a string", px=60_000)
    stack.redis.set(keys.replies("spoilt"), "a string", px=60_000)

    stack.send_packed(
        model,
        [
            {"correlation_id": "spoilt", "body": b"1"},
            {"correlation_id": "unread", "body": b"2", "reply_to": "spoilt"},
            {"correlation_id": "fine", "body": b"3"},
            {"correlation_id": "spoilt", "body": b"{"},
        ],
    )

    assert stack.result(model, "fine")["body"] == 3
    stack.wait_until_idle(model)
    assert stack.redis.get(keys.result("spoilt")) == b"a string"


def test_bodies_and_fields_are_not_logged(stack: Stack) -> None:
    text = "confidential"
    for body in (json.dumps(text), text, "[" + text):
        entry_id = stack.send("Echo", body=body, tenant=text)
        stack.result("Echo", entry_id)
    stack.wait_until_idle("Echo")
    for service in stack.services:
        assert text not in service.log.read_text()
