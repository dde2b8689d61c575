"""Entries with one request."""

from __future__ import annotations

from typing import Any

from contract.cases.entries import ARRIVAL_MS, entry, refusal, request
from contract.cases.notation import MSGPACK, RAW, Case, pack, times


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
            "a trace, which is passed on whatever it is",
            *("body", "7", "traceparent", f"00-{'4b' * 16}-{'0a' * 8}-01", "tracestate", "vendor=7,other=x"),
            becomes=[
                request(
                    fields={
                        "traceparent": f"00-{'4b' * 16}-{'0a' * 8}-01",
                        "tracestate": "vendor=7,other=x",
                    }
                )
            ],
        ),
        entry(
            "a trace that is invalid",
            *("body", "7", "traceparent", f"ff-{'0' * 32}-x", "tracestate", b"\xff"),
            becomes=[request(fields={"traceparent": f"ff-{'0' * 32}-x", "tracestate": {"hex": "ff"}})],
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
        entry("a version", "body", "7", "version", "2025-03.b+1", becomes=[request(version="2025-03.b+1")]),
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

    versions = [
        case(f"no version: {text!r}", "version", "body", "7", "version", text) for text in ("", "a b", "1@2")
    ]
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
        *versions,
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
