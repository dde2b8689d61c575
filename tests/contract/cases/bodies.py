"""Bodies as values."""

from __future__ import annotations

from typing import Any

import msgpack

from contract.cases.notation import JSON, MSGPACK, Case, as_hex, as_vector, compact, pack, times


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
