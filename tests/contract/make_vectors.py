"""Writes the golden vectors in `vectors/`: .venv/bin/python tests/contract/make_vectors.py

Nothing here calls Carpool. Bytes are made with msgpack, struct and json, and their meaning is written by
hand: any change of Carpool's behaviour fails a test.
"""

from __future__ import annotations

import json
import struct
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgpack

VECTORS: Final = Path(__file__).parent / "vectors"
FROZEN: Final = VECTORS / "frozen.sha256"

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
RAW: Final = "application/octet-stream"

ENTRY_ID: Final = "1700000000123-4"
ARRIVAL_MS: Final = 1700000000123

Case = dict[str, Any]
Bytes = Any  # bytes in the notation of the vectors: see `as_vector`


def as_vector(data: bytes) -> Bytes:
    """Bytes in the notation of the vectors: text if they are printable UTF-8, else {"hex": ...}."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = ""
    return text if text.isprintable() and text.encode() == data else as_hex(data)


def as_hex(data: bytes) -> Bytes:
    return {"hex": data.hex()}


def times(data: bytes, count: int) -> Bytes:
    return {"hex": data.hex(), "times": count}


def pack(value: Any) -> bytes:
    return bytes(msgpack.packb(value))


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


# --- requests ----------------------------------------------------------------------------------------------


def fields_of(flat: tuple[Any, ...]) -> list[list[Bytes]]:
    """Field, value, field, value -> pairs, in the notation of the vectors."""
    parts = [
        part if isinstance(part, dict | list) else as_vector(part if type(part) is bytes else part.encode())
        for part in flat
    ]
    return [list(pair) for pair in zip(parts[::2], parts[1::2], strict=True)]


def entry(name: str, *flat: Any, settings: Case | None = None, becomes: list[Case]) -> Case:
    """One entry of a request stream, and what it is decoded to."""
    case = {"name": name, "id": ENTRY_ID, "fields": fields_of(flat), "becomes": becomes}
    return case | ({"settings": settings} if settings else {})


def request(correlation_id: str = ENTRY_ID, body: Bytes = "7", **others: Any) -> Case:
    """A decoded request; every property not given has its default."""
    understood = {
        "correlation_id": correlation_id,
        "body": body,
        "content_type": JSON,
        "reply_to": None,
        "arrival_ms": ARRIVAL_MS,
        "deadline_ms": None,
        "priority": 4,
        "lane": "",
        "cost": 1,
        "reply_columns": False,
        "stream": False,
        "fields": {},
    }
    assert others.keys() <= {*understood, "sequence", "not_before_ms"}
    return {"request": understood | others}


def stored(correlation_id: str, key: str, size_bytes: int, **others: Any) -> Case:
    """A decoded request whose body its producer stored under a key of its own."""
    understood = request(correlation_id, **others)["request"]
    del understood["body"]
    return {"request": understood | {"stored_body": [key, size_bytes]}}


def refusal(field: str, correlation_id: str = ENTRY_ID, **others: Any) -> Case:
    """A refusal. `content_type` decides the encoding of its envelope."""
    answer = {
        "status": "INVALID_ARGUMENT",
        "field": field,
        "correlation_id": correlation_id,
        "reply_to": None,
        "content_type": JSON,
    }
    assert others.keys() <= answer.keys()
    return {"refusal": answer | others}


def understood_requests() -> list[Case]:
    return [
        entry("only a body", "body", "7", becomes=[request()]),
        entry(
            "every property",
            *("correlation_id", "order:17", "reply_to", "shop-1", "content_type", MSGPACK, "priority", "9"),
            *("expiration", "250", "lane", "größe-2", "cost", "12", "body", b"\x93\x01\x02\x03"),
            becomes=[
                request(
                    "order:17",
                    {"hex": "93010203"},
                    reply_to="shop-1",
                    content_type=MSGPACK,
                    priority=9,
                    deadline_ms=ARRIVAL_MS + 250,
                    lane="größe-2",
                    cost=12,
                )
            ],
        ),
        entry(
            "fields that Carpool does not know travel with the request",
            *("body", "7", "tenant", "blue", "seal", b"\x00\xff", "traceparent", "00-0af7-b7ad-01"),
            becomes=[
                request(fields={"tenant": "blue", "seal": {"hex": "00ff"}, "traceparent": "00-0af7-b7ad-01"})
            ],
        ),
        entry(
            "a body of arbitrary bytes",
            *("content_type", RAW, "body", b"\x00\xff\xfe"),
            becomes=[request(body={"hex": "00fffe"}, content_type=RAW)],
        ),
        *[
            entry(f"JSON, written {written}", "content_type", written, "body", "7", becomes=[request()])
            for written in ("Application/JSON", 'application/json; charset="UTF-8"', "application/json;q=1")
        ],
        entry(
            "text of any charset is bytes",
            *("content_type", "text/plain; charset=latin-1", "body", b"\xe9"),
            becomes=[request(body={"hex": "e9"}, content_type="text/plain; charset=latin-1")],
        ),
        entry("an empty body", "body", "", becomes=[request(body="")]),
        entry("chunks are wanted", "body", "7", "stream", "1", becomes=[request(stream=True)]),
        entry("no chunks are wanted", "body", "7", "stream", "0", becomes=[request()]),
        entry(
            "a repeated field: the last value applies",
            *("body", "6", "priority", "1", "body", "7", "priority", "2"),
            becomes=[request(priority=2)],
        ),
        entry("the lowest priority", "body", "7", "priority", "0", becomes=[request(priority=0)]),
        entry("cost 0", "body", "7", "cost", "0", becomes=[request(cost=0)]),
        entry("the highest cost", "body", "7", "cost", str(2**40), becomes=[request(cost=2**40)]),
        entry(
            "the longest correlation ID, of every character allowed",
            *("body", "7", "correlation_id", "aZ09._:-" * 16),
            becomes=[request("aZ09._:-" * 16)],
        ),
        entry(
            "the longest lane is counted in characters",
            *("body", "7", "lane", "ö" * 128),
            becomes=[request(lane="ö" * 128)],
        ),
    ]


def expirations() -> list[Case]:
    def case(name: str, deadline_ms: int | None, *flat: str, **settings: int) -> Case:
        return entry(name, "body", "7", *flat, settings=settings, becomes=[request(deadline_ms=deadline_ms)])

    return [
        case("no expiration", None),
        case("the shortest expiration", ARRIVAL_MS + 1, "expiration", "1"),
        case("the model's default", ARRIVAL_MS + 500, default_expiration_ms=500),
        case(
            "the request's expiration overrides the default",
            ARRIVAL_MS + 900,
            *("expiration", "900"),
            default_expiration_ms=500,
        ),
        case(
            "an expiration above max_expiration_ms is capped",
            ARRIVAL_MS + 1000,
            *("expiration", str(2**53)),
            max_expiration_ms=1000,
        ),
    ]


def delays() -> list[Case]:
    """Requests that are put off. They arrive at the end of that time, but expire as all others."""

    def case(name: str, delay_ms: int, *flat: str, deadline_ms: int | None = None) -> Case:
        delayed = request(arrival_ms=ARRIVAL_MS + delay_ms, deadline_ms=deadline_ms, not_before_ms=delay_ms)
        return entry(name, "body", "7", "not_before", str(delay_ms), *flat, becomes=[delayed])

    def refused(name: str, delay: str, *flat: str, **settings: int | bool) -> Case:
        fields = ("body", "7", "not_before", delay, *flat)
        return entry(name, *fields, settings=settings, becomes=[refusal("not_before")])

    put_back = request("a", arrival_ms=ARRIVAL_MS - 500, deadline_ms=ARRIVAL_MS + 1000, not_before_ms=1500)
    again = pack([{"correlation_id": "a", "body": b"7", "not_before": 1500, "expiration": 3000}])
    return [
        case("a delay", 60_000),
        case("the shortest delay", 1),
        case("the longest delay", 24 * 3600 * 1000),
        case(
            "a delay that ends before the request expires",
            250,
            "expiration",
            "251",
            deadline_ms=ARRIVAL_MS + 251,
        ),
        entry("no delay", "body", "7", "not_before", "0", becomes=[request()]),
        entry(
            "a delayed request that was put back",
            *("requests", again, "arrival", str(ARRIVAL_MS - 2000)),
            becomes=[put_back],
        ),
        *(refused(f"not_before {delay!r}", delay) for delay in ("-1", "", "1.5", "soon", str(2**53 + 1))),
        refused("a delay above max_expiration_ms", "1001", max_expiration_ms=1000),
        refused("a delay that ends as the request expires", "250", "expiration", "250"),
        refused("a delay that ends after the model's expiration", "250", default_expiration_ms=100),
        refused("a delay where results come in order", "250", preserve_ordering=True),
        refused("a delay in a sequence", "250", "sequence_id", "mic7", "sequence_start", "1"),
    ]


def refused_requests() -> list[Case]:
    def case(name: str, field: str, *flat: Any, settings: Case | None = None, **answer: Any) -> Case:
        return entry(name, *flat, settings=settings, becomes=[refusal(field, **answer)])

    no_numbers: dict[str, list[str | bytes]] = {
        "priority": ["10", "-1", "", "4.0", "+4", " 4", "4\n", "1_0", "high", "४", b"\xff"],
        "cost": ["-1", str(2**40 + 1), "9" * 30, "NaN"],
        "expiration": ["0", "-5", str(2**53 + 1), "1e3", "soon"],
        "stream": ["2", "-1", "", "true"],
    }
    numbers = [
        case(f"{field} {value!r}", field, "body", "7", field, value)
        for field, values in no_numbers.items()
        for value in values
    ]
    names = [
        case(f"{field} {what}", field, "body", "7", field, value)
        for field in ("correlation_id", "reply_to")
        for what, value in {
            "is empty": "",
            "is too long": "a" * 129,
            "has a space": "a b",
            "has a slash": "a/b",
            "has a letter beyond ASCII": "ä",
            "ends with a line feed": "a\n",
            "is not UTF-8": b"\xff",
        }.items()
    ]
    return [
        case("no body", "body", "priority", "1"),
        case("a body over the model's limit", "body", "body", "123456789", settings={"max_body_bytes": 8}),
        case("what is no content type", "content_type", "body", "7", "content_type", "text"),
        case(
            "JSON of a charset",
            "content_type",
            "body",
            "7",
            "content_type",
            "application/json; charset=latin-1",
        ),
        case(
            "JSON of a charset is accepted",
            "accept",
            "body",
            "7",
            "accept",
            "application/json; charset=utf-16",
        ),
        case("a content type that is to be accepted, and is none", "accept", "body", "7", "accept", "json"),
        case("a content type that is not UTF-8", "content_type", "body", "7", "content_type", b"\xff"),
        case("a lane that is too long", "lane", "body", "7", "lane", "ö" * 129),
        case("a lane that is not UTF-8", "lane", "body", "7", "lane", b"\xff"),
        *numbers,
        *names,
        case(
            "a refusal goes to the request's reply_to if that is valid",
            "priority",
            *(
                "body",
                "7",
                "priority",
                "x",
                "correlation_id",
                "c1",
                "reply_to",
                "r1",
                "content_type",
                MSGPACK,
            ),
            correlation_id="c1",
            reply_to="r1",
            content_type=MSGPACK,
        ),
        case(
            "an unknown field, for a model that refuses these",
            "prioritty",
            *("body", "7", "tenant", "a", "prioritty", "9"),
            settings={"unknown_fields": "refuse"},
        ),
        case(
            "a refusal of an octet-stream request has a msgpack envelope",
            "body",
            *("content_type", RAW, "correlation_id", "c1"),
            correlation_id="c1",
            content_type=RAW,
        ),
        *_limits_of_unknown_fields(),
    ]


def sequences() -> list[Case]:
    """Requests of sequences, and entries that end sequences."""

    def part(index: int | None = None, *, start: bool = False, end: bool = False) -> Case:
        return {"sequence_id": "mic7", "start": start, "end": end, "index": index}

    def case(name: str, *flat: Any, **expected: Any) -> Case:
        fields = ("body", "7", "sequence_id", "mic7", *flat)
        return entry(name, *fields, becomes=[request(sequence=part(**expected))])

    def refused(name: str, *flat: Any, field: str) -> Case:
        return entry(name, "body", "7", *flat, becomes=[refusal(field)])

    def ended(name: str, value: Bytes, *sequence_ids: str) -> Case:
        return entry(name, "end_sequences", value, becomes=[{"end_sequences": list(sequence_ids)}])

    one, two = ({"correlation_id": name, "body": b"7"} for name in "ab")
    start, end = {"sequence_start": 1}, {"sequence_end": "1", "sequence_index": 1}
    return [
        case("neither the first nor the last request"),
        case("the first request", "sequence_start", "1", start=True),
        case("the last request", "sequence_end", "1", end=True),
        case("the only request", "sequence_start", "1", "sequence_end", "1", start=True, end=True),
        case("neither, said so", "sequence_start", "0", "sequence_end", "0"),
        case("the first one, numbered", "sequence_start", "1", "sequence_index", "0", start=True, index=0),
        case("a request with an index", "sequence_index", "12", index=12),
        case("the largest index", "sequence_index", str(2**53), index=2**53),
        entry(
            "requests of an entry, with a field that they share",
            *("sequence_id", "mic7", "requests", pack([one | start, two | end])),
            becomes=[
                request("a", sequence=part(start=True)),
                request("b", sequence=part(index=1, end=True)),
            ],
        ),
        entry(
            "columns",
            *("sequence_id", "mic7", "correlation_ids", "a b", "rows", "12"),
            becomes=[request("a", "1", sequence=part()), request("b", "2", sequence=part())],
        ),
        entry(
            "requests of several sequences, and of none",
            "requests",
            pack([one | {"sequence_id": "mic7"}, two]),
            becomes=[request("a", sequence=part()), request("b")],
        ),
        *(
            refused(f"{field} without sequence_id", field, "1", field="sequence_id")
            for field in ("sequence_start", "sequence_end", "sequence_index")
        ),
        *(
            refused(f"sequence_id {what}", "sequence_id", value, field="sequence_id")
            for what, value in {"is empty": "", "has a space": "a b", "is too long": "a" * 129}.items()
        ),
        *(
            refused(f"{field} {value!r}", "sequence_id", "mic7", field, value, field=field)
            for field in ("sequence_start", "sequence_end")
            for value in ("2", "-1", "", "true")
        ),
        *(
            refused(f"sequence_index {value!r}", "sequence_id", "mic7", *flag, "sequence_index", value,
                    field="sequence_index")
            for value, *flag in (
                ("-1",), ("",), ("1.0",), (str(2**53 + 1),), ("0",), ("1", "sequence_start", "1"),
            )
        ),
        ended("one sequence is ended", "mic7", "mic7"),
        ended("several sequences are ended, each once", "mic7 mic8 mic7", "mic7", "mic8"),
        ended("what is no name is left out", "a/b  mic7 ", "mic7"),
        ended("no sequence is ended", ""),
    ]  # fmt: skip


def _limits_of_unknown_fields() -> list[Case]:
    def numbered(count: int) -> list[str]:
        return [part for number in range(count) for part in (f"f{number}", "")]

    return [
        entry(
            "the maximum number of unknown fields",
            *("body", "7", *numbered(64)),
            becomes=[request(fields={f"f{number}": "" for number in range(64)})],
        ),
        entry("more unknown fields than allowed", "body", "7", *numbered(65), becomes=[refusal("fields")]),
        entry(
            "unknown fields of the maximum total size, names included",
            *("body", "7", "x", times(b"\0", 65535)),
            becomes=[request(fields={"x": times(b"\0", 65535)})],
        ),
        entry(
            "unknown fields one byte over the maximum size",
            *("body", "7", "x", times(b"\0", 65536)),
            becomes=[refusal("fields")],
        ),
    ]


def withdrawals() -> list[Case]:
    return [
        entry("withdrawal of one request", "withdraw", "a-1", becomes=[{"withdrawal": ["a-1"]}]),
        entry(
            "withdrawal of several requests",
            "withdraw",
            "b a-1 c:2",
            becomes=[{"withdrawal": ["a-1", "b", "c:2"]}],
        ),
        entry("an empty withdrawal", "withdraw", "", becomes=[{"withdrawal": []}]),
        entry("a withdrawal with commas", "withdraw", "a,b", becomes=[refusal("withdraw")]),
        entry(
            "a withdrawal of names that no request can have",
            *("withdraw", b"a \xff b"),
            becomes=[{"withdrawal": ["a", "b", "\N{REPLACEMENT CHARACTER}"]}],
        ),
    ]


# --- several requests in one entry -------------------------------------------------------------------------


def packed_requests() -> list[Case]:
    def packed(correlation_id: str, **others: Any) -> Case:
        return {"correlation_id": correlation_id, "body": b"7", **others}

    def case(name: str, becomes: list[Case], *maps: Any, shared: tuple[str, ...] = ()) -> Case:
        return entry(name, "requests", pack(list(maps)), *shared, becomes=becomes)

    later = str(ARRIVAL_MS + 1)
    return [
        case("two requests", [request("a"), request("b")], packed("a"), packed("b")),
        case("one request", [request("a")], packed("a")),
        case("a body as text", [request("a", "ä7")], {"correlation_id": "a", "body": "ä7"}),
        case(
            "a stream beside another request, in an entry of streams",
            [request("a", stream=True), request("b")],
            *(packed("a"), packed("b", stream=0)),
            shared=("stream", "1"),
        ),
        case(
            "shared fields apply to each request that does not set its own",
            [
                request(
                    "a", reply_to="r", priority=7, deadline_ms=ARRIVAL_MS + 50, fields={"tenant": "blue"}
                ),
                request("b", reply_to="s", priority=1, deadline_ms=ARRIVAL_MS + 50, fields={"tenant": "red"}),
            ],
            *(packed("a"), packed("b", priority=1, reply_to="s", tenant="red")),
            shared=("reply_to", "r", "priority", "7", "expiration", "50", "tenant", "blue"),
        ),
        case(
            "numbers as numbers or as text",
            [request("a", priority=9, cost=3), request("b", priority=9, cost=3)],
            *(packed("a", priority=9, cost=3), packed("b", priority="9", cost="3")),
        ),
        case(
            "unknown fields may be bytes, text or numbers",
            [request("a", fields={"bin": {"hex": "00ff"}, "text": "ä", "int": "-7", "float": "1.5"})],
            packed("a", bin=b"\x00\xff", text="ä", int=-7, float=1.5),
        ),
        case(
            "a kept arrival time",
            [request("a", arrival_ms=ARRIVAL_MS - 400, deadline_ms=ARRIVAL_MS - 350)],
            packed("a", expiration=50),
            shared=("arrival", str(ARRIVAL_MS - 400)),
        ),
        case(
            "an arrival later than the entry itself is capped",
            [request("a")],
            packed("a"),
            shared=("arrival", later),
        ),
        case("an arrival that is not a number", [request("a")], packed("a"), shared=("arrival", "noon")),
        case("an arrival below 0", [request("a")], packed("a"), shared=("arrival", "-1")),
    ]


def refused_in_packed() -> list[Case]:
    """Packed entries of which one request is refused and the other accepted."""

    def case(name: str, refused: Case, bad: Any, *shared: str, **of_all: Any) -> Case:
        good = request("good", **of_all)
        maps = [bad, {"correlation_id": "good", "body": b"7"}]
        return entry(name, "requests", pack(maps), *shared, becomes=[refused, good])

    def wrong(field: str, value: Any) -> Case:
        refused = refusal(field, "bad" if field != "correlation_id" else ENTRY_ID)
        return case(
            f"{field} is {value!r}", refused, {"correlation_id": "bad", "body": b"7"} | {field: value}
        )

    return [
        case("no correlation ID", refusal("correlation_id"), {"body": b"7"}),
        case("no body", refusal("body", "bad"), {"correlation_id": "bad"}),
        case("a number instead of a map", refusal("requests"), 7),
        case("an extension instead of a map", refusal("requests"), msgpack.ExtType(5, b"")),
        *(wrong("body", value) for value in (None, 7, [7], {"body_key": "k", "body_bytes": 5})),
        *(wrong("correlation_id", value) for value in (7, None, "a b", "")),
        *(wrong("priority", value) for value in (10, -1, 4.0, True, None, [4])),
        *(wrong("cost", value) for value in (2**63, -1)),
        *(wrong("tenant", value) for value in (None, True, [1], {"a": 1})),
        case(
            "its refusal goes to the entry's reply_to",
            refusal("lane", "bad", reply_to="r", content_type=MSGPACK),
            *({"correlation_id": "bad", "body": b"7", "lane": 1}, "reply_to", "r", "content_type", MSGPACK),
            reply_to="r",
            content_type=MSGPACK,
        ),
    ]


def refused_packs() -> list[Case]:
    """Packed entries that cannot be unpacked: one refusal for all requests, at the entry's ID."""

    def case(name: str, packed: Any) -> Case:
        return entry(name, "requests", packed, becomes=[refusal("requests")])

    one = {"correlation_id": "a", "body": b"7"}
    many = pack({"correlation_id": "a", "body": b""})
    return [
        case("empty", b""),
        case("not msgpack", b"\xc1"),
        case("a map", pack(one)),
        case("nil", pack(None)),
        case("an empty array", pack([])),
        case("truncated", pack([one])[:-1]),
        case("trailing bytes", pack([one]) + b"\0"),
        case("a map key that is not text", pack([one | {7: b""}])),
        case("a text that is not UTF-8", b"\x91\x81\xa4body\xa1\xff"),
        case("nested extremely deep", times(b"\x91", 5000)),
        case("more requests than allowed", [{"hex": "dc1001"}, times(many, 4097)]),
        case("an array with a declared length beyond its bytes", b"\xdd\xff\xff\xff\xff"),
        case("a string with a declared length beyond its bytes", b"\x91\x81\xa4body\xdb\xff\xff\xff\xff"),
    ]


# --- columns -----------------------------------------------------------------------------------------------


def columns() -> list[Case]:
    """Entries that carry several requests as columns, with rows."""
    shared = {"reply_to": "r", "priority": 7, "deadline_ms": ARRIVAL_MS + 50, "reply_columns": True}
    own = {"correlation_ids": "a b", "row_head": "h", "rows": "78"}
    longest = "aZ09._:-" * 16
    return [
        entry("rows", "correlation_ids", "a b", "rows", "78", becomes=[request("a"), request("b", "8")]),
        entry(
            "rows of bytes",
            *("correlation_ids", "a b", "rows", b"\x00\xff\xfe\x01", "content_type", RAW),
            becomes=[
                request("a", {"hex": "00ff"}, content_type=RAW),
                request("b", {"hex": "fe01"}, content_type=RAW),
            ],
        ),
        entry(
            "rows with a common head",
            *("correlation_ids", "a b c", "row_head", "[1,", "rows", "2]3]4]"),
            becomes=[request("a", "[1,2]"), request("b", "[1,3]"), request("c", "[1,4]")],
        ),
        entry(
            "an empty head",
            *("correlation_ids", "a b", "row_head", "", "rows", "78"),
            becomes=[request("a"), request("b", "8")],
        ),
        entry("one row", "correlation_ids", "a", "rows", "[7]", becomes=[request("a", "[7]")]),
        entry(
            "other fields apply to every row",
            *("correlation_ids", "a b", "rows", "78", "reply_to", "r", "priority", "7", "expiration", "50"),
            *("reply_columns", "1", "tenant", "blue", "seal", b"\x00\xff"),
            becomes=[
                request(name, body, **shared, fields={"tenant": "blue", "seal": {"hex": "00ff"}})
                for name, body in (("a", "7"), ("b", "8"))
            ],
        ),
        entry(
            "the same correlation ID twice",
            *("correlation_ids", "a a", "rows", "78"),
            becomes=[request("a"), request("a", "8")],
        ),
        entry(
            "a correlation_id beside columns is ignored",
            *("correlation_ids", "a b", "correlation_id", "c", "rows", "78"),
            becomes=[request("a"), request("b", "8")],
        ),
        entry(
            "the longest correlation IDs",
            *("correlation_ids", f"{longest} {longest}", "rows", "78"),
            becomes=[request(longest), request(longest, "8")],
        ),
        entry(
            "beside a body, the names of columns are fields that Carpool does not know",
            *("body", "7", *(part for pair in own.items() for part in pair), "bodies", "x"),
            becomes=[request(fields=own | {"bodies": "x"})],
        ),
        entry(
            "beside a body_key too",
            *("body_key", "k", "body_bytes", "5", *(part for pair in own.items() for part in pair)),
            becomes=[stored(ENTRY_ID, "k", 5, fields=own)],
        ),
        entry(
            "results as columns, of one request",
            "body",
            "7",
            "reply_columns",
            "1",
            becomes=[request(reply_columns=True)],
        ),
        entry("results not as columns", "body", "7", "reply_columns", "0", becomes=[request()]),
    ]


def refused_columns() -> list[Case]:
    def case(name: str, field: str, *flat: Any, ids: str = "a b", settings: Case | None = None) -> Case:
        """Columns of which each request is refused for the same reason."""
        becomes = [refusal(field, correlation_id) for correlation_id in ids.split()]
        return entry(name, "correlation_ids", ids, *flat, settings=settings, becomes=becomes)

    def unreadable(name: str, ids: Any, **answer: Any) -> Case:
        """Columns whose IDs cannot be read: one answer for all."""
        return entry(
            name, "correlation_ids", ids, "rows", "78", becomes=[refusal("correlation_ids", **answer)]
        )

    at_entry = refusal("correlation_id")
    return [
        case("rows of unequal length", "rows", "rows", "789"),
        case("fewer bytes than rows", "rows", "rows", "7", ids="a b c"),
        case("empty rows", "rows", "rows", ""),
        case("no rows", "rows", "priority", "1"),
        case("only a head", "rows", "row_head", "7"),
        case("rows and bodies", "rows", "rows", "78", "bodies", "78"),
        case("bodies that are not an array", "bodies", "bodies", "78"),
        case("an invalid field", "priority", "rows", "78", "priority", "10"),
        case("an invalid reply_columns", "reply_columns", "rows", "78", "reply_columns", "2"),
        case(
            "a head and a row over the model's limit together",
            *("body", "row_head", "1234", "rows", "5566"),
            settings={"max_body_bytes": 5},
        ),
        case(
            "64 MiB and 64 bytes with the head of each row",
            *("rows", "row_head", times(b"\0", 1 << 20), "rows", times(b"7", 64)),
            ids=" ".join(f"n{number}" for number in range(64)),
        ),
        entry(
            "64 MiB with the head of each row",
            *(
                "correlation_ids",
                "a b c d e f g h",
                "row_head",
                times(b"\0", (8 << 20) - 1),
                "rows",
                "12345678",
            ),
            becomes=[
                request(name, [times(b"\0", (8 << 20) - 1), str(number)])
                for number, name in enumerate("abcdefgh", 1)
            ],
        ),
        entry(
            "a refusal goes to the columns' reply_to",
            *("correlation_ids", "a b", "rows", "789", "reply_to", "r", "content_type", MSGPACK),
            becomes=[refusal("rows", name, reply_to="r", content_type=MSGPACK) for name in "ab"],
        ),
        entry(
            "invalid correlation IDs beside valid ones",
            *("correlation_ids", "a/b c ä d", "rows", "1234"),
            becomes=[at_entry, request("c", "2"), at_entry, request("d", "4")],
        ),
        entry("no correlation IDs", "correlation_ids", "", "rows", "7", becomes=[at_entry]),
        entry(
            "two spaces: an empty correlation ID between them",
            *("correlation_ids", "a  b", "rows", "123"),
            becomes=[request("a", "1"), at_entry, request("b", "3")],
        ),
        entry(
            "spaces at both ends",
            *("correlation_ids", " a ", "rows", "123"),
            becomes=[at_entry, request("a", "2"), at_entry],
        ),
        entry(
            "a line feed between correlation IDs",
            *("correlation_ids", "a\nb", "rows", "1"),
            becomes=[at_entry],
        ),
        entry(
            "a correlation ID that is too long",
            *("correlation_ids", "a " + "b" * 129, "rows", "12"),
            becomes=[request("a", "1"), at_entry],
        ),
        entry(
            "invalid rows and an invalid correlation ID",
            *("correlation_ids", "a b/c", "rows", "1"),
            becomes=[refusal("rows", "a"), refusal("rows")],
        ),
        unreadable("correlation IDs that are not UTF-8", b"a \xff"),
        unreadable("more correlation IDs than allowed", [times(b"a ", 4096), "a"]),
        entry(
            "unreadable correlation IDs are answered at a valid correlation_id",
            *("correlation_ids", b"a \xff", "rows", "78", "correlation_id", "c", "reply_to", "r"),
            becomes=[refusal("correlation_ids", "c", reply_to="r")],
        ),
    ]


def packed_columns() -> list[Case]:
    """Elements of `requests` that are columns themselves."""

    def case(name: str, becomes: list[Case], *elements: Any, shared: tuple[Any, ...] = ()) -> Case:
        return entry(name, "requests", pack(list(elements)), *shared, becomes=becomes)

    ab = {"correlation_ids": "a b"}
    single = {"correlation_id": "s", "body": b"9"}
    many = {"correlation_ids": " ".join("a" for _ in range(4096)), "rows": b"7" * 4096}
    return [
        case("packed rows", [request("a"), request("b", "8")], ab | {"rows": b"78"}),
        case(
            "packed rows with a head",
            [request("a", "h7"), request("b", "h8")],
            ab | {"row_head": b"h", "rows": b"78"},
        ),
        case("bodies", [request("a", "77"), request("b", "")], ab | {"bodies": [b"77", b""]}),
        case("bodies as text", [request("a", "ä"), request("b", "7")], ab | {"bodies": ["ä", b"7"]}),
        case(
            "correlation IDs as bytes",
            [request("a"), request("b", "8")],
            {"correlation_ids": b"a b", "rows": b"78"},
        ),
        case(
            "columns among single requests",
            [request("s", "9"), request("a"), request("b", "8"), request("s", "9"), request("c", "6")],
            *(single, ab | {"rows": b"78"}, single, {"correlation_ids": "c", "bodies": [b"6"]}),
        ),
        case(
            "fields of the entry apply to columns that do not set their own",
            [
                *(request(name, body, reply_to="r", priority=7) for name, body in (("a", "7"), ("b", "8"))),
                request("c", "6", reply_to="s", priority=1, cost=3, fields={"x": "-7"}),
            ],
            ab | {"rows": b"78"},
            {"correlation_ids": "c", "rows": b"6", "reply_to": "s", "priority": 1, "cost": 3, "x": -7},
            shared=("reply_to", "r", "priority", "7"),
        ),
        case(
            "a shared head",
            [request("a", "h7"), request("b", "h8"), request("c", "i6")],
            *(ab | {"rows": b"78"}, {"correlation_ids": "c", "row_head": b"i", "rows": b"6"}),
            shared=("row_head", "h"),
        ),
        case(
            "beside single requests, the names of columns are fields that Carpool does not know",
            [request("s", "9", fields={"rows": "78", "correlation_ids": "a b"})],
            single | {"rows": b"78"},
            shared=("correlation_ids", "a b"),
        ),
        case(
            "a kept arrival time of columns",
            [request(name, arrival_ms=ARRIVAL_MS - 400, deadline_ms=ARRIVAL_MS - 350) for name in "ab"],
            ab | {"rows": b"77", "expiration": 50},
            shared=("arrival", str(ARRIVAL_MS - 400)),
        ),
        case(
            "an invalid body beside a valid one",
            [refusal("body", "a"), request("b", "7")],
            ab | {"bodies": [7, b"7"]},
        ),
        case(
            "an invalid correlation ID in bodies",
            [request("a", "1"), refusal("correlation_id"), request("c", "3")],
            {"correlation_ids": "a b/c c", "bodies": [b"1", b"2", b"3"]},
        ),
        *(
            case(name, [refusal(field, "a"), refusal(field, "b"), request("s", "9")], ab | bad, single)
            for name, field, bad in (
                ("packed rows of unequal length", "rows", {"rows": b"789"}),
                ("packed rows as text", "rows", {"rows": "78"}),
                ("a head as text", "rows", {"row_head": "h", "rows": b"78"}),
                ("fewer bodies than correlation IDs", "bodies", {"bodies": [b"7"]}),
                ("more bodies than correlation IDs", "bodies", {"bodies": [b"7"] * 3}),
                ("bodies that are bytes", "bodies", {"bodies": b"78"}),
                ("packed rows and bodies", "rows", {"rows": b"78", "bodies": [b"7", b"8"]}),
                ("neither rows nor bodies", "rows", {}),
                ("a cost that is true", "cost", {"rows": b"78", "cost": True}),
            )
        ),
        *(
            case(
                name,
                [refusal("correlation_ids"), request("s", "9")],
                {"correlation_ids": bad, "rows": b"7"},
                single,
            )
            for name, bad in (("a number as correlation IDs", 7), ("an array of correlation IDs", ["a"]))
        ),
        case("more requests than allowed, in columns", [refusal("requests")], many, single),
        case(
            "more than 64 MiB in all, with the head of each row",
            [refusal("requests")],
            *[{"correlation_ids": " ".join("a" * 99), "rows": bytes(99)} for _ in range(40)],
            shared=("row_head", times(b"h", 17_000)),
        ),
        case(
            "values that are equal in some languages only are not the same",
            [
                request("a", priority=1, fields={"x": "1"}),
                request("b", priority=1, fields={"x": "1.0"}),
                refusal("priority", "c"),
                request("d", priority=1, fields={"x": "1"}),
            ],
            {"correlation_id": "a", "body": b"7", "priority": 1, "x": 1},
            {"correlation_id": "b", "body": b"7", "priority": 1, "x": 1.0},
            {"correlation_id": "c", "body": b"7", "priority": True, "x": 1},
            {"correlation_id": "d", "body": b"7", "priority": 1, "x": 1},
        ),
    ]


def stored_bodies() -> list[Case]:
    """Requests whose body is stored under a key of its own."""

    def refused(name: str, field: str, *flat: Any, settings: Case | None = None) -> Case:
        return entry(name, *flat, settings=settings, becomes=[refusal(field)])

    body = {"body_key": "k", "body_bytes": 5}
    return [
        entry(
            "a stored body",
            *("correlation_id", "a", "body_key", "p:1", "body_bytes", "20000", "content_type", RAW),
            becomes=[stored("a", "p:1", 20000, content_type=RAW)],
        ),
        entry("an empty stored body", "body_key", "k", "body_bytes", "0", becomes=[stored(ENTRY_ID, "k", 0)]),
        entry(
            "a stored body of the model's maximum",
            *("body_key", "k", "body_bytes", "5"),
            settings={"max_body_bytes": 5},
            becomes=[stored(ENTRY_ID, "k", 5)],
        ),
        entry(
            "beside a body, body_key and body_bytes are fields that Carpool does not know",
            *("body", "7", "body_key", "not a name", "body_bytes", "many"),
            becomes=[request(fields={"body_key": "not a name", "body_bytes": "many"})],
        ),
        entry(
            "packed stored bodies",
            *("requests", pack([{"correlation_id": "a", **body}, {"correlation_id": "b", "body": b"7"}])),
            becomes=[stored("a", "k", 5), request("b")],
        ),
        entry(
            "stored bodies in columns",
            *("requests", pack([{"correlation_ids": "a b c", "bodies": [body, b"7", body]}])),
            becomes=[stored("a", "k", 5), request("b"), stored("c", "k", 5)],
        ),
        entry(
            "invalid stored bodies in columns",
            *(
                "requests",
                pack([{"correlation_ids": "a b c", "bodies": [{}, {"x": b""}, {"body_key": "k"}]}]),
            ),
            becomes=[refusal("body", "a"), refusal("body", "b"), refusal("body_bytes", "c")],
        ),
        refused("no body_bytes", "body_bytes", "body_key", "k"),
        refused("no body_key", "body", "body_bytes", "5"),
        refused("a body_bytes that is not a number", "body_bytes", "body_key", "k", "body_bytes", "5.0"),
        refused("a body_key with a slash", "body_key", "body_key", "k/l", "body_bytes", "5"),
        refused("an empty body_key", "body_key", "body_key", "", "body_bytes", "5"),
        refused(
            "a stored body over the model's limit",
            *("body", "body_key", "k", "body_bytes", "9"),
            settings={"max_body_bytes": 8},
        ),
    ]


# --- results -----------------------------------------------------------------------------------------------


def success(correlation_id: str, content_type: str, body: bytes, **served: int | list[str]) -> Case:
    """A successful result: the fields of its envelope, with the body as bytes of its content type."""
    return {
        "correlation_id": correlation_id,
        "status": "OK",
        "content_type": content_type,
        "body": as_vector(body),
        **({"batch_size": 3, "queue_us": 1500, "compute_us": 70000} | served),
    }


def failure(correlation_id: str, content_type: str, status: str, detail: str, **served: int) -> Case:
    return {
        "correlation_id": correlation_id,
        "status": status,
        "content_type": content_type,
        "detail": detail,
        **({"batch_size": 0, "queue_us": 0, "compute_us": 0} | served),
    }


def envelope(result: Case, body: bytes | None, detail: str) -> Case:
    """The fields of an envelope, in the order in which Carpool writes them."""
    middle: Case = {"detail": detail}
    if result["status"] == "OK":
        middle = {"content_type": result["content_type"], "body": body}
    head = {name: result[name] for name in ("correlation_id", "status")}
    served = ("batch_size", "queue_us", "compute_us", "index", "first_us", "warnings")
    tail = {name: result[name] for name in served if name in result}
    return head | middle | {"final": True} | tail


def results() -> list[Case]:
    def json_case(name: str, result: Case, body: Any = None, detail: str = "") -> Case:
        return {"name": name, "result": result, "envelope": compact(envelope(result, body, detail))}

    def msgpack_case(name: str, result: Case, body: bytes | None = None, detail: str = "") -> Case:
        return {"name": name, "result": result, "envelope": as_vector(pack(envelope(result, body, detail)))}

    expired, twice = "expired: still waiting 5 ms after its arrival", "Ü" * 2000
    floats = pack([1.5, None])
    return [
        json_case("a number in JSON", success("a", JSON, b"49"), 49),
        json_case("a value in JSON", success("a", JSON, '{"ö":[1,null]}'.encode()), {"ö": [1, None]}),
        json_case(
            "a body that looks like an envelope",
            success("a", JSON, b'{"body":null,"final":false}'),
            {"body": None, "final": False},
        ),
        json_case("null in JSON", success("a", JSON, b"null")),
        msgpack_case("msgpack", success("a", MSGPACK, floats, queue_us=2**33), floats),
        msgpack_case("bytes", success("a", RAW, b"\x00\xff"), b"\x00\xff"),
        msgpack_case("empty", success("a", RAW, b""), b""),
        json_case("an error in JSON", failure("a", JSON, "DEADLINE_EXCEEDED", expired), detail=expired),
        msgpack_case("an error in msgpack", failure("a", MSGPACK, "INTERNAL", "ß"), detail="ß"),
        msgpack_case("an error for an octet-stream request", failure("a", RAW, "ABORTED", "no"), detail="no"),
        json_case("a long detail is cut", failure("a", JSON, "INTERNAL", twice), detail="Ü" * 1000),
        json_case("after 3 chunks, in JSON", success("a", JSON, b'"abc"', index=3, first_us=4120), "abc"),
        msgpack_case("after 3 chunks", success("a", RAW, b"abc", index=3, first_us=4120), b"abc"),
        json_case("a stream without chunks, in JSON", success("a", JSON, b"null", index=0)),
        msgpack_case("a stream without chunks", success("a", MSGPACK, b"\xc0", index=0), b"\xc0"),
        json_case("with a warning, in JSON", success("a", JSON, b"49", warnings=["misspelt"]), 49),
        msgpack_case("with a warning", success("a", RAW, b"", warnings=["misspelt"]), b""),
        json_case(
            "an error with warnings",
            failure("a", JSON, "INVALID_ARGUMENT", "no") | {"warnings": ["ß", "b"]},
            detail="no",
        ),
    ]


def chunks() -> list[Case]:
    """Partial results: their envelopes on a list of their own, and as an element of `results`."""

    def case(name: str, content_type: str, index: int, body: bytes, value: Any, **merged: int) -> Case:
        chunk = {"correlation_id": "a", "content_type": content_type, "index": index}
        chunk |= {"merged": max(merged.values(), default=1), "is_list": "values" in merged}
        head = {"correlation_id": "a", "status": "OK", "content_type": content_type}
        tail = {"final": False, "index": index} | merged
        element = pack(head | {"body": body} | tail)
        on_list = compact(head | {"body": value} | tail) if content_type == JSON else as_vector(element)
        return {
            "name": name,
            "chunk": chunk | {"body": as_vector(body)},
            "envelope": on_list,
            "element": as_vector(element),
        }

    return [
        case("a text in JSON", JSON, 0, '" tïme"'.encode(), " tïme"),
        case("a value in JSON", JSON, 1, b'{"final":true}', {"final": True}),
        case("merged texts in JSON", JSON, 2, b'" upon a time"', " upon a time", chunks=3),
        case("numbers are a list in JSON", JSON, 2, b"[3,2,1]", [3, 2, 1], values=3),
        case("numbers are a list", MSGPACK, 2, pack([3, 2, 1]), None, values=3),
        case("msgpack", MSGPACK, 300, pack("Once"), None),
        case("merged bytes", RAW, 7, b"\x00\xff", None, chunks=2),
    ]


def replies() -> list[Case]:
    """Entries of a reply stream: one msgpack array of maps, for results of any content type."""
    several = [
        (success("a", JSON, b"49"), b"49", ""),
        (success("b", RAW, b"\xff"), b"\xff", ""),
        (failure("c", JSON, "CANCELLED", "withdrawn by its producer"), None, "withdrawn by its producer"),
    ]
    return [
        {
            "name": name,
            "results": [result for result, _, _ in some],
            "entry": as_vector(pack([envelope(*one) for one in some])),
        }
        for name, some in (("one result", several[:1]), ("several results", several))
    ]


def result_columns() -> list[Case]:
    """Entries of a reply stream whose results are columns: a msgpack array of maps."""

    def columns(ids: str, content_type: str, head: bytes, rows: bytes) -> Case:
        measured = {"batch_size": 3, "queue_us": 1500, "compute_us": 70000}
        own = {"content_type": content_type, "row_head": head, "rows": rows}
        return {"correlation_ids": ids, "status": "OK", **own, "final": True, **measured}

    def case(name: str, results: list[Case], *maps: Case) -> Case:
        written = [
            {
                "correlation_ids": fields["correlation_ids"].split(),
                "row_head": as_vector(fields["row_head"]),
                "rows": as_vector(fields["rows"]),
                **{name: fields[name] for name in ("content_type", "batch_size", "queue_us", "compute_us")},
            }
            for fields in maps
        ]
        return {"name": name, "columns": written, "results": results, "entry": as_vector(pack(list(maps)))}

    return [
        case(
            "two results in JSON",
            [success("a", JSON, b"49"), success("b", JSON, b"64")],
            columns("a b", JSON, b"", b"4964"),
        ),
        case(
            "results with a common head",
            [success("a", RAW, b"\0\1\2"), success("b", RAW, b"\0\1\3")],
            columns("a b", RAW, b"\0\1", b"\2\3"),
        ),
        case(
            "columns of two runs",
            [success("a", JSON, b"1"), success("b", MSGPACK, b"\7")],
            *(columns("a", JSON, b"", b"1"), columns("b", MSGPACK, b"", b"\7")),
        ),
    ]


# --- batches -----------------------------------------------------------------------------------------------


def batches() -> list[Case]:
    """Entries of the batch stream, which batchers write and workers read."""
    # Entry, IDs, content type, reply_to, arrival, deadline, bodies, rows, fields, reply_columns, sequence
    first = ["1-0", "a", JSON, None, 1000, None, [b"7"], None, None, False, None]
    second = ["2-0", "b c", RAW, "r", 2000, 9000, None, [b"\xff", 1, b"78"], {"tenant": b"blue"}, True, None]
    third = ["2-0", "d e", MSGPACK, "r", 2000, 9000, [b"\x07", ["k", 5]], None, None, False, None]
    mic7 = ["mic7", True, False, 0, "00000000000000000001-00000000000000000000:00000"]
    of_sequence = [*first[:-1], mic7]
    tickets = pack([None, ["2-0", ["1-0", 3, 1], ["1-0", 7, 1]], ["2-0", ["2-0", 0, 2]]])
    ticket = {"b": ["1-0", 3, 1], "c": ["1-0", 7, 1], "d": ["2-0", 0, 1], "e": ["2-0", 1, 1]}
    names = ("entry_id", "correlation_id", "content_type", "reply_to", "arrival_us", "deadline_us")

    def batched(run: list[Any]) -> list[Case]:
        entry_id, ids, *others, bodies, rows, extra, _, sequence = run
        if rows is not None:
            head, width, data = rows
            bodies = [head + data[at : at + width] for at in range(0, len(data), width)]
        fields = {name: as_vector(value) for name, value in (extra or {}).items()}
        return [
            dict(zip(names, [entry_id, correlation_id, *others], strict=True))
            | ({"body": as_vector(body)} if type(body) is bytes else {"stored_body": body})
            | {"fields": fields, "ticket": ticket.get(correlation_id)}
            | ({"sequence": sequence} if sequence else {})
            for correlation_id, body in zip(ids.split(), bodies, strict=True)
        ]

    def case(name: str, expected: list[list[Any]], *others: str) -> Case:
        runs = pack([of_sequence if of_sequence in expected else first, second, third])
        flat = ("runs", runs, "tickets", tickets, "size", "5", "reason", "full", *others)
        return {
            "name": name,
            "fields": fields_of((*flat, "dispatched_us", "5000")),
            "becomes": {
                "reason": "full",
                "dispatched_us": 5000,
                "lane": "small" if "lane" in others else "",
                "expected_us": 4200 if "expected_us" in others else 0,
                "max_execution_ms": 1500 if "settings" in others else None,
                "max_result_bytes": 5 if "settings" in others else 64 << 20,
                "requests": [request for run in expected for request in batched(run)],
                "reply_columns": [run[9] for run in expected],
            },
        }

    return [
        case("all requests of two entries", [first, second, third]),
        case("a batch of a lane", [first, second, third], "lane", "small"),
        case("a batch whose execution time is expected", [first, second, third], "expected_us", "4200"),
        case(
            "a batch of a model whose limits are not the defaults",
            [first, second, third],
            *("settings", '{"max_execution_ms": "1500", "max_result_bytes": "5", "unknown": "1"}'),
        ),
        case("a request of a sequence", [of_sequence, second, third]),
        case("an entry that was no longer in Redis is left out", [first], "gone", "2-0"),
        case("several such entries are left out", [], "gone", "2-0 1-0"),
    ]


def settled() -> list[Case]:
    """Entries of the settled stream, which workers write and batchers read."""

    def batch(name: str, *others: str | bytes, executed: int, **besides: Any) -> Case:
        flat = ("batch", "9-0", "worker", "w/0", "size", "5", "compute_us", "17", *others)
        numbers = {"size": 5, "compute_us": 17, "settled_us": 1_700_000_000_000_123, "executed": executed}
        return {
            "name": name,
            "fields": fields_of((*flat, "settled_us", "1700000000000123")),
            "becomes": {"batch_id": "9-0", "worker": "w/0", **numbers, **besides},
        }

    def change(name: str, *flat: str, worker: str) -> Case:
        return {"name": name, "fields": fields_of((*flat, "size", "0")), "becomes": {"worker": worker}}

    return [
        batch("all requests were executed together", "executed", "5", executed=5),
        batch("some were not executed", "executed", "3", executed=3),
        batch("they were executed one at a time", "executed", "0", executed=0),
        batch(
            "of one producer's requests none was executed, of another's some",
            *("failed", "INVALID_ARGUMENT=3", "executed", "2"),
            *("producers", pack([[["t", ""], 2, 0], [["", "s"], 3, 2]])),
            executed=2,
            failures={"INVALID_ARGUMENT": 3},
            of_producers=[[["t", ""], 2, 0], [["", "s"], 3, 2]],
        ),
        batch(
            "sequences were broken",
            *("executed", "5", "broken", "mic7 mic8"),
            executed=5,
            broken=["mic7", "mic8"],
        ),
        change("a model process joined or left", "worker", "w/0", worker="w/0"),
        change("settings were overridden", "config", "max_batch_size", worker=""),
    ]


# --- tensors -----------------------------------------------------------------------------------------------

CODES: Final = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q", "INT8": "b", "INT16": "h",
    "INT32": "i", "INT64": "q", "FP16": "e", "FP32": "f", "FP64": "d",
}  # fmt: skip


def data_of(datatype: str, values: list[Any]) -> bytes:
    """Little-endian bytes. BF16 is the upper half of an FP32, whose lower half must be 0 here."""
    if datatype != "BF16":
        return struct.pack(f"<{len(values)}{CODES[datatype]}", *values)
    floats = [struct.pack("<f", value) for value in values]
    assert all(data[:2] == b"\0\0" for data in floats)
    return b"".join(data[2:] for data in floats)


def tensor(name: str, datatype: str, shape: list[int], values: list[Any], in_json: bool = True) -> Case:
    """One tensor in both content types."""
    data = data_of(datatype, values)
    packed = pack({"datatype": datatype, "shape": shape, "data": data})
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        "data": as_hex(data),
        "msgpack": as_hex(packed),
        "json": compact({"datatype": datatype, "shape": shape, "data": values}) if in_json else None,
    }


def tensors() -> list[Case]:
    floats = {
        "FP16": [0.5, -2.0, 65504.0, 2.0**-24, -0.0],
        "BF16": [0.5, -2.0, 3.3895313892515355e38, 2.0**-133, -0.0],
        "FP32": [0.5, -2.0, 3.4028234663852886e38, 2.0**-149, -0.0, 0.10000000149011612],
        "FP64": [0.5, -2.0, 1.7976931348623157e308, 5e-324, -0.0, 0.1],
    }
    bounds = {
        **{f"UINT{bits}": [0, 1, 2**bits - 1] for bits in (8, 16, 32, 64)},
        **{f"INT{bits}": [-(2 ** (bits - 1)), -1, 2 ** (bits - 1) - 1] for bits in (8, 16, 32, 64)},
    }
    listed = {"BOOL": [True, False, True], **bounds, **floats}
    special = [float("inf"), float("-inf"), float("nan")]
    return [
        *(tensor(f"{datatype}", datatype, [len(some)], some) for datatype, some in listed.items()),
        *(
            tensor(f"{datatype} with NaN and infinities", datatype, [3], special, in_json=False)
            for datatype in floats
        ),
        *(tensor(f"{datatype}, a scalar", datatype, [], some[:1]) for datatype, some in listed.items()),
        *(tensor(f"{datatype}, nothing", datatype, [0], []) for datatype in listed),
        tensor("two rows of three", "INT16", [2, 3], [1, 2, 3, 4, 5, 6]),
        tensor("empty rows", "FP32", [2, 0, 3], []),
        tensor("the maximum number of dimensions", "UINT8", [1] * 32, [7]),
        tensor("data of 255 bytes", "UINT8", [255], [0] * 255),
        tensor("data of 256 bytes", "UINT8", [256], [0] * 256),
        _large_tensor(),
    ]


def _large_tensor() -> Case:
    zeros = times(b"\0", 65536)
    head = pack({"datatype": "UINT8", "shape": [65536], "data": b""})[:-2] + b"\xc6\0\1\0\0"
    return {
        "name": "data of 65536 bytes",
        "datatype": "UINT8",
        "shape": [65536],
        "data": zeros,
        "msgpack": [as_vector(head), zeros],
        "json": None,
    }


def nested_tensors() -> list[Case]:
    """JSON whose `data` is nested as the shape is: the same tensor as the flat one."""
    rows = {"datatype": "INT16", "shape": [2, 3], "data": [[1, 2, 3], [4, 5, 6]]}
    empty = {"datatype": "FP32", "shape": [2, 0], "data": [[], []]}
    return [
        {"name": "rows", "json": compact(rows), "data": as_hex(data_of("INT16", [1, 2, 3, 4, 5, 6]))},
        {"name": "empty rows", "json": compact(empty), "data": as_hex(b"")},
    ]


def strings() -> list[Case]:
    """BYTES: a flat list of strings in both content types; decoded, lists nested as the shape is."""
    cases: dict[str, tuple[list[int], list[str], Any]] = {
        "texts": ([2], ["ä", ""], ["ä", ""]),
        "rows of texts": ([2, 1], ["a", "b"], [["a"], ["b"]]),
        "no texts": ([0], [], []),
        "a text": ([], ["a"], "a"),
    }
    return [
        {
            "name": name,
            "msgpack": as_hex(pack({"datatype": "BYTES", "shape": shape, "data": texts})),
            "json": compact({"datatype": "BYTES", "shape": shape, "data": texts}),
            "texts": nested,
        }
        for name, (shape, texts, nested) in cases.items()
    ]


def bf16_roundings() -> list[Case]:
    """FP32 rounded to BF16, to nearest with ties to even, computed with exact fractions."""

    def value(bits: int) -> Fraction:
        return Fraction(struct.unpack(">f", struct.pack(">I", bits))[0])

    def nearest(bits: int) -> int:
        below, above = bits >> 16, (bits >> 16) + 1
        to_below = abs(value(bits) - value(below << 16))
        to_above = abs(value(above << 16) - value(bits))
        if to_below == to_above:
            return below if below % 2 == 0 else above
        return below if to_below < to_above else above

    between = [0x3F800000, 0x3F807FFF, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F81FFFF, 0x00000001, 0x00008000]
    cases = {bits: nearest(bits) for sign in (0, 1 << 31) for bits in (sign | one for one in between)}
    infinite = {0x7F800000: 0x7F80, 0xFF800000: 0xFF80, 0x7F7F7FFF: 0x7F7F, 0xFF7F7FFF: 0xFF7F}
    return [{"fp32": f"{bits:08x}", "bf16": f"{half:04x}"} for bits, half in {**cases, **infinite}.items()]


# --- bodies ------------------------------------------------------------------------------------------------


def bodies() -> list[Case]:
    """Values in both content types."""
    values = [
        None,
        True,
        False,
        0,
        -1,
        2**53,
        1.5,
        "",
        "ä\n\0",
        [],
        {},
        [1, [2, {"a": [None]}]],
        {"": {"ö": 1}},
    ]
    return [
        {"value": value, "json": compact(value), "msgpack": as_hex(pack(value))}
        for value in values
    ]  # fmt: skip


def refused_bodies() -> list[Case]:
    def in_json(name: str, body: Any, field: str = "body") -> Case:
        body = body if isinstance(body, dict | list) else as_vector(body)
        return {"name": f"JSON: {name}", "content_type": JSON, "body": body, "field": field}

    def in_msgpack(name: str, body: Any, field: str = "body") -> Case:
        body = body if isinstance(body, dict | list) else as_vector(body)
        return {"name": f"msgpack: {name}", "content_type": MSGPACK, "body": body, "field": field}

    extension = msgpack.ExtType(5, b"x")
    stamp = b"\xd6\xff\0\0\0\1"
    return [
        in_json("empty", b""),
        in_json("not JSON", b"seven"),
        in_json("truncated", b"[1"),
        in_json("trailing bytes", b"1 2"),
        in_json("NaN", b"[NaN]"),
        in_json("Infinity", b"-Infinity"),
        in_json("not UTF-8", b'"\xff"'),
        in_json("UTF-16", "[1]".encode("utf-16")),
        in_json("a byte order mark", b"\xef\xbb\xbf1"),
        in_json("nested one level too deep", b"[" * 65 + b"]" * 65),
        in_json("nested extremely deep", times(b"[", 100_000)),
        in_json("too many items", [as_vector(b"[0"), times(b",0", 1_000_000), as_vector(b"]")]),
        in_json("a number with too many digits", times(b"9", 5000)),
        in_msgpack("empty", b""),
        in_msgpack("not msgpack", b"\xc1"),
        in_msgpack("truncated", b"\x92\x01"),
        in_msgpack("trailing bytes", b"\x01\x02"),
        in_msgpack("a text that is not UTF-8", b"\xa1\xff"),
        in_msgpack("nested one level too deep", b"\x91" * 65 + b"\x01"),
        in_msgpack("nested extremely deep", times(b"\x91", 100_000)),
        in_msgpack("too many arrays", [{"hex": "dd000186a0"}, times(b"\x90", 100_000)]),
        in_msgpack("a declared length beyond its bytes", b"\xdd\xff\xff\xff\xff"),
        in_msgpack("a map key that is a number", pack({7: 1})),
        in_msgpack("an extension", pack(extension)),
        in_msgpack("an extension in a list", pack([1, extension]), "body[1]"),
        in_msgpack("an extension in a map", pack({"a": extension}), "body.a"),
        in_msgpack("a timestamp in a list", b"\x91" + stamp, "body[0]"),
    ]


def refused_tensors() -> list[Case]:
    def case(name: str, field: str, datatype: Any, shape: Any, data: Any, where: str = "body") -> Case:
        value: Any = {"datatype": datatype, "shape": shape, "data": data}
        if where != "body":
            value = {"rows": [1, value]}
        content_type = MSGPACK if type(data) is bytes else JSON
        body = pack(value) if type(data) is bytes else compact(value).encode()
        return {
            "name": name, "content_type": content_type, "body": as_vector(body), "field": f"{where}.{field}"
        }  # fmt: skip

    four = b"\0" * 4
    outside = {"UINT8": [256], "INT8": [-129], "UINT64": [2**64], "INT64": [2**63], "INT16": [-(2**70)]}
    too_large = {"FP16": [65520], "FP32": [1e39], "BF16": [-1e39], "FP64": [10**400]}
    return [
        case("an unknown datatype", "datatype", "FP8", [1], b"\0"),
        case("a lower-case datatype", "datatype", "fp32", [1], four),
        case("a datatype that is not text", "datatype", 32, [1], four),
        case("a shape that is not a list", "shape", "FP32", 1, four),
        case("a size below 0", "shape", "FP32", [-1], four),
        case("a size that is not a whole number", "shape", "FP32", [1.0], four),
        case("a size that is true", "shape", "FP32", [True], four),
        case("33 dimensions", "shape", "FP32", [1] * 33, four),
        case("no data, with an impossibly large shape", "shape", "FP32", [0, 2**62], b""),
        case("too little data", "data", "FP32", [2], four),
        case("too much data", "data", "FP32", [], four + four),
        case("a shape larger than memory", "data", "FP64", [2**64 - 1] * 32, four),
        case("data that is text", "data", "FP32", [1], "AAAA"),
        case("too few numbers", "data", "FP32", [2], [1]),
        case("numbers nested in another shape", "data", "FP32", [2, 3], [[1, 2], [3, 4], [5, 6]]),
        case("rows of unequal length", "data", "FP32", [3], [[1, 2], [3]]),
        case("a number beside a row", "data", "FP32", [2], [1, [2]]),
        *(
            case(f"outside {kind}", "data", kind, [1], some)
            for kind, some in {**outside, **too_large}.items()
        ),
        case("a fraction among whole numbers", "data", "INT32", [2], [1, 1.5]),
        case("true among numbers", "data", "FP32", [2], [1.5, True]),
        case("numbers for BOOL", "data", "BOOL", [2], [0, 1]),
        case("texts for numbers", "data", "FP32", [1], ["1"]),
        case("null among numbers", "data", "FP32", [2], [1, None]),
        case("a number for BYTES", "data", "BYTES", [1], [1]),
        case("BYTES as bytes", "data", "BYTES", [1], b"a"),
        case("too few BYTES", "data", "BYTES", [2], ["a"]),
        case("a tensor within a value", "shape", "FP32", [-1], [1], where="body.rows[1]"),
    ]


# --- files -------------------------------------------------------------------------------------------------


# --- results by ID -----------------------------------------------------------------------------------------


def kept_arguments() -> list[Case]:
    """What the script `keep` is called with, and the request that it adds."""
    keys = ["carpool:{square}:requests", "carpool:{square}:kept:job-17", "carpool:{square}:replies:job-17"]
    named = ["correlation_id", "job-17", "reply_to", "job-17"]
    large = times(b"x", 16384)
    return [
        {
            "name": "a small body, kept as long as its model says",
            "request": {"id": "job-17", "fingerprint": "f1", "known_ms": 90000, "body": "12"},
            "keys": keys,
            "arguments": ["f1", "90000", "-", "", "86400000", "", *named, "body", "12"],
        },
        {
            "name": "a small body, added again once its result has expired",
            "request": {
                "id": "job-17",
                "fingerprint": "f1",
                "known_ms": 90000,
                "body": "12",
                "result_ttl_ms": 60000,
                "again": True,
            },
            "keys": keys,
            "arguments": ["f1", "90000", "60000", "1", "86400000", "", *named, "body", "12"],
        },
        {
            "name": "a large body",
            "request": {"id": "job-17", "fingerprint": "f1", "known_ms": 90000, "body": large},
            "keys": [*keys, "carpool:{square}:body:job-17"],
            "arguments": [
                *("f1", "90000", "-", "", "86400000", large, *named, "body_key", "job-17"),
                *("body_bytes", "16384"),
            ],
        },
    ]


def kept_records() -> list[Case]:
    """Records, and the state that each has."""
    states = [("waiting", "waiting"), ("in-flight", "in flight"), ("done", "done"), ("failed", "failed")]
    return [
        {"record": f"9f86d081884c7d65 {word} {ttl}", "state": state}
        for word, state in (*states, ("dead", "dead"))
        for ttl in ("-", "3600000")
    ]


def kept_ids() -> list[Case]:
    """IDs in their parts, and what is none."""
    longest = "x" * 128
    valid = [("square", "job-17"), ("a.b_c-1", "py:1.2_3-4"), (longest, longest)]
    invalid = ["", "square", "square/", "/job-17", "square/a/b", "square/a b", "-a/b", f"square/{longest}x"]
    return [
        *({"id": f"{model}/{name}", "model": model, "correlation_id": name} for model, name in valid),
        *({"id": text, "model": None, "correlation_id": None} for text in invalid),
    ]


def kept_owners() -> list[Case]:
    """What the IDs of a tenant's requests begin with."""
    return [
        {"tenant": tenant, "begins_with": f"{sha256(f'tenant {tenant}'.encode()).hexdigest()[:16]}-"}
        for tenant in ("acme", "größe")
    ]


def files() -> dict[str, dict[str, list[Case]]]:
    """Every file's lists of cases."""
    return {
        "requests.json": {
            "cases": [*understood_requests(), *expirations(), *delays(), *refused_requests(), *withdrawals()]
        },
        "packed.json": {"cases": [*packed_requests(), *refused_in_packed(), *refused_packs()]},
        "columns.json": {"cases": [*columns(), *refused_columns(), *packed_columns(), *stored_bodies()]},
        "sequences.json": {"cases": sequences()},
        "results.json": {
            "envelopes": results(),
            "chunks": chunks(),
            "replies": replies(),
            "columns": result_columns(),
        },
        "kept.json": {
            "arguments": kept_arguments(),
            "records": kept_records(),
            "ids": kept_ids(),
            "owners": kept_owners(),
        },
        "batches.json": {"batches": batches(), "settled": settled()},
        "tensors.json": {
            "tensors": tensors(),
            "nested": nested_tensors(),
            "strings": strings(),
            "bf16_roundings": bf16_roundings(),
            "refused": refused_tensors(),
        },
        "bodies.json": {"values": bodies(), "refused": refused_bodies()},
    }


def as_text(lists: dict[str, list[Case]]) -> str:
    """A file's text: JSON, a line for each case."""
    named = (
        f"{json.dumps(name)}: [\n"
        + ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
        + "\n]"
        for name, cases in lists.items()
    )
    return "{" + ",\n".join(named) + "}\n"


def digests() -> set[str]:
    """A line for each case: its file, and its SHA-256."""
    return {
        f"{file} {sha256(json.dumps(case, sort_keys=True).encode()).hexdigest()}"
        for file, lists in files().items()
        for cases in lists.values()
        for case in cases
    }


def frozen() -> set[str]:
    """The digests of all cases that have ever been written."""
    return set(FROZEN.read_text(encoding="utf-8").splitlines())


def main() -> None:
    for name, lists in files().items():
        (VECTORS / name).write_text(as_text(lists), encoding="utf-8")
    ever = sorted(frozen() | digests())  # only added to: what was written once stays true
    FROZEN.write_text("".join(f"{line}\n" for line in ever), encoding="utf-8")


if __name__ == "__main__":
    main()
