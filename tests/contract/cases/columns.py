"""Entries with several requests as columns, and stored bodies."""

from __future__ import annotations

from typing import Any

from contract.cases.entries import ARRIVAL_MS, ENTRY_ID, entry, refusal, request, stored
from contract.cases.notation import MSGPACK, RAW, Case, pack, times


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
