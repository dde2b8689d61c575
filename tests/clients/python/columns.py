"""A producer of columns in Python, with the packages redis and msgpack. REDIS_URL is the address of Redis.

A hundred vectors of two float32 in one entry, and their squares: a line of JSON for each.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgpack
from redis import Redis

COUNT = 100
redis = Redis.from_url(os.environ["REDIS_URL"], socket_timeout=15)  # longer than it waits below
mailbox = f"python-{uuid4()}"


def results(fields: dict[bytes, bytes]) -> Iterator[tuple[str, str, bytes]]:
    """Correlation ID, status, and body or detail of each result in an entry of a reply stream."""
    for result in msgpack.unpackb(fields.get(b"results", b"\x90")):
        yield result["correlation_id"], result["status"], result.get("body", result.get("detail"))
    for columns in msgpack.unpackb(fields.get(b"columns", b"\x90")):
        ids, rows = columns["correlation_ids"].split(" "), columns["rows"]
        width = len(rows) // len(ids)
        for at, correlation_id in enumerate(ids):
            row = rows[at * width : (at + 1) * width]
            yield correlation_id, columns["status"], columns["row_head"] + row


request: dict[Any, Any] = {
    "content_type": "application/octet-stream",
    "reply_to": mailbox,
    "reply_columns": 1,
    "correlation_ids": " ".join(f"{mailbox}:{n}" for n in range(COUNT)),
    "rows": b"".join(struct.pack("<2f", n, n + 0.5) for n in range(COUNT)),
}
redis.xadd("carpool:{vectors}:requests", request)

last: Any = "0"
answers = 0
while answers < COUNT:
    streams: Any = redis.xread({f"carpool:{{vectors}}:replies:{mailbox}": last}, count=64, block=10_000)
    for last, fields in streams[0][1]:  # noqa: B007  the last ID is where the next read continues
        for correlation_id, status, body in results(fields):
            number = int(correlation_id.rpartition(":")[2])
            vector = struct.unpack("<2f", body) if status == "OK" else body
            print(json.dumps({"number": number, "status": status, "vector": vector}))
            answers += 1
