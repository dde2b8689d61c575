"""Services for streams. A test drives the first: it reads requests, and writes chunks and results when told.

    service = StreamingService(url, "Writer")
    (request,) = service.take()
    service.write(chunk(request, 0, b'"Once"'), final(request, b'"Once"', index=1))

    with Storyteller(url, "writer", ["Once", " upon"]):
        ...                                             # requests for lists are answered with these chunks

They read and write what PROTOCOL.md describes, with none of the library's code for the wire.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

import msgpack
from redis import Redis

from carpool.keys import Keys
from support.echo import Echo, read_entry
from support.redis_client import redis_at
from support.waiting import wait_until

JSON: Final = "application/json"
_BLOCK_MS: Final = 20

Envelope = dict[str, Any]


def chunk(request: Echo, index: int, body: bytes, merged: int = 1) -> Envelope:
    """The envelope of a chunk; `merged` is the number of emitted values in it."""
    envelope: Envelope = {"correlation_id": request.correlation_id, "status": "OK"}
    envelope |= {"content_type": request.content_type, "body": body, "final": False, "index": index}
    return envelope | ({"chunks": merged} if merged > 1 else {})


def final(request: Echo, body: bytes, *, index: int | None = None, first_us: int | None = None) -> Envelope:
    """The envelope of the whole output; without `index`, that of a model that does not step."""
    envelope = {"correlation_id": request.correlation_id, "status": "OK", **_SERVED, "final": True}
    envelope |= {"content_type": request.content_type, "body": body}
    of_stream = {"index": index, "first_us": first_us}
    return envelope | {name: value for name, value in of_stream.items() if value is not None}


def failure(request: Echo, status: str, detail: str) -> Envelope:
    """The envelope of an error."""
    common = {"correlation_id": request.correlation_id, "final": True, **_SERVED}
    return {**common, "status": status, "detail": detail}


_SERVED: Final = {"batch_size": 1, "queue_us": 5, "compute_us": 70}


class StreamingService:
    """Registers a model, and reads its request stream when asked to. Used by one thread at a time."""

    def __init__(self, url: str, model: str) -> None:
        self._redis: Any = Redis.from_url(url, protocol=2, socket_timeout=30)
        self.keys = Keys(model)
        self._last_id = b"0"
        self._requests: list[Echo] = []  # read and not taken
        self.withdrawn: list[str] = []
        self.ended: list[list[str]] = []  # the sequences of each entry that ends some
        self._redis.hset(self.keys.registration, "max_batch_size", 64)
        self._redis.sadd("carpool:models", model)

    def take(self, count: int = 1) -> list[Echo]:
        """Wait for the next requests, and return them in the order of the request stream."""
        wait_until(lambda: len(self.read()) >= count, description=f"{count} requests were sent")
        taken, self._requests = self._requests[:count], self._requests[count:]
        return taken

    def wait_for_withdrawal(self, correlation_id: str) -> None:
        """Wait until an entry withdraws this request."""
        wait_until(
            lambda: self.read() is not None and correlation_id in self.withdrawn,
            description=f"{correlation_id} is withdrawn",
        )

    def wait_for_end(self) -> list[str]:
        """Wait for the next entry that ends sequences; return their IDs."""
        wait_until(lambda: self.read() is not None and self.ended, description="a sequence is ended by force")
        return self.ended.pop(0)

    def read(self) -> list[Echo]:
        """Read what was added to the request stream; return the requests that were not taken."""
        for entry_id, fields in self._redis.xrange(self.keys.requests, b"(" + self._last_id):
            self._last_id = entry_id
            if b"withdraw" in fields:
                self.withdrawn += fields[b"withdraw"].decode().split(" ")
            elif b"end_sequences" in fields:
                assert list(fields) == [b"end_sequences"]
                self.ended.append(fields[b"end_sequences"].decode().split(" "))
            else:
                self._requests += read_entry(fields, self._stored)
        return self._requests

    def _stored(self, name: str) -> bytes:
        body: bytes = self._redis.get(self.keys.body(name))
        return body

    def stored_bodies(self) -> list[bytes]:
        """The keys of the large bodies in Redis."""
        keys: list[bytes] = self._redis.keys(self.keys.body("*"))
        return keys

    def unread(self, request: Echo) -> int:
        """The number of entries in the reply stream of the request."""
        size: int = self._redis.xlen(self.keys.replies(request.reply_to))
        return size

    def write(self, request: Echo, *envelopes: Envelope) -> None:
        """One entry on the reply stream of the request."""
        self._redis.xadd(self.keys.replies(request.reply_to), {"results": msgpack.packb(envelopes)})

    def write_rows(self, request: Echo, body: bytes) -> None:
        """An entry with the result of the request in columns."""
        columns = {"correlation_ids": request.correlation_id, "status": "OK", "final": True, **_SERVED}
        columns |= {"content_type": request.content_type, "row_head": b"", "rows": body}
        self._redis.xadd(self.keys.replies(request.reply_to), {"columns": msgpack.packb([columns])})

    def disconnect(self, *roles: str) -> None:
        """Close connections of the client: "w" is its writer, "r" its reader."""
        for connection in self._redis.client_list():
            if connection["name"].rpartition(":")[2] in roles:
                self._redis.client_kill_filter(_id=connection["id"])

    def close(self) -> None:
        self._redis.delete(self.keys.requests, self.keys.registration, *self.stored_bodies())
        self._redis.close()


class Storyteller(threading.Thread):
    """Answers every request for a list with the same texts: as chunks if it wants them, then as a whole.

    JSON only. With `error`, its status and detail come instead of the whole.
    """

    def __init__(
        self, url: str, model: str, texts: Sequence[str], *, error: tuple[str, str] | None = None
    ) -> None:
        super().__init__(name=f"storyteller {model}")
        self._redis = redis_at(url, protocol=2)
        self._keys = Keys(model)
        self._texts = texts
        self._error = error
        self._ending = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self.join()
        self._redis.delete(self._keys.requests)
        self._redis.close()

    def run(self) -> None:
        last_id = b"0"
        while not self._ending.is_set():
            found = self._redis.xread({self._keys.requests: last_id}, block=_BLOCK_MS)
            for entry_id, fields in found[0][1] if found else ():
                last_id = entry_id
                self._answer(entry_id.decode(), fields)

    def _answer(self, correlation_id: str, fields: dict[bytes, bytes]) -> None:
        request = Echo(correlation_id, fields[b"body"], JSON, "")
        texts = self._texts if fields.get(b"stream") == b"1" else ()
        envelopes = [chunk(request, index, _json(text)) for index, text in enumerate(texts)]
        if self._error is None:
            envelopes.append(final(request, _json("".join(self._texts)), index=len(texts), first_us=400))
        else:
            envelopes.append(failure(request, *self._error))
        for envelope in envelopes:
            body = {"body": json.loads(envelope["body"])} if "body" in envelope else {}
            self._redis.rpush(self._keys.result(correlation_id), _json(envelope | body))


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
