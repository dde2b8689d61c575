"""Entries with several requests."""

from __future__ import annotations

from typing import Any

import msgpack

from contract.cases.entries import ARRIVAL_MS, ENTRY_ID, entry, refusal, request
from contract.cases.notation import MSGPACK, Case, pack, times


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
