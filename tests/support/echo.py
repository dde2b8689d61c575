"""A service that answers requests with their own bodies: for tests of the Python client without a batcher.

    with EchoService(url, "Echo", seed=1) as service:
        ...                                             # requests to the model Echo
    assert service.entries                              # what was read from the request stream

It decodes entries and writes results as PROTOCOL.md describes them, with none of the library's code for the
wire. Results come as columns and one by one, in parts of random length, in random order, of several entries.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from types import TracebackType
from typing import Any, Final, Self

import msgpack

from carpool.keys import Keys
from support.redis_client import redis_at

_BLOCK_MS: Final = 20


@dataclass
class Echo:
    """A request as the service read it. `head` is the part of its body that its columns have once."""

    correlation_id: str
    body: bytes
    content_type: str
    reply_to: str
    fields: dict[str, Any] = field(default_factory=dict)
    head: bytes = b""


class EchoService(threading.Thread):
    """Reads the request stream of a model, and answers.

    `fault` damages the answers, to show that a test notices. `refuse` returns the detail of an error for
    some bodies, and None for others. While `paused` is set, requests are read and not answered.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        seed: int = 0,
        max_batch_size: int = 64,
        refuse: Callable[[bytes], str | None] = lambda _: None,
        fault: str | None = None,
    ) -> None:
        super().__init__(name=f"echo {model}")
        self._redis = redis_at(url, protocol=2)
        self._keys = Keys(model)
        self._random = random.Random(seed)
        self._refuse = refuse
        self._fault = fault
        self._ending = threading.Event()
        self.paused = threading.Event()
        self.entries: list[dict[bytes, bytes]] = []  # all that were read
        self.withdrawn: set[str] = set()
        self.answered = 0
        self.error: Exception | None = None
        self._redis.hset(self._keys.registration, "max_batch_size", max_batch_size)
        self._redis.sadd("carpool:models", model)

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
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # reported by the test's thread
            self.error = error

    def _serve(self) -> None:
        last_id, waiting = b"0", []
        while not self._ending.is_set():
            found = self._redis.xread({self._keys.requests: last_id}, block=_BLOCK_MS)
            for entry_id, fields in found[0][1] if found else ():
                last_id = entry_id
                self.entries.append(fields)
                if b"withdraw" in fields:
                    self.withdrawn |= set(fields[b"withdraw"].decode().split(" "))
                else:
                    waiting += read_entry(fields, self._stored)
            if waiting and not self.paused.is_set():
                self._answer([echo for echo in waiting if echo.correlation_id not in self.withdrawn])
                waiting = []

    def _stored(self, name: str) -> bytes:
        body: bytes = self._redis.get(self._keys.body(name))
        return body

    def _answer(self, echoes: list[Echo]) -> None:
        """Answer with entries for each reply stream, each of a few parts, in random order."""
        self.answered += len(echoes)
        self._random.shuffle(echoes)
        # Equal heads come together, so that columns have results of several entries.
        echoes.sort(key=lambda echo: (echo.reply_to, echo.content_type, echo.head, len(echo.body)))
        for reply_to, group in groupby(echoes, key=lambda echo: echo.reply_to):
            parts = list(self._parts(list(group)))
            self._random.shuffle(parts)
            while parts:
                count = self._random.randint(1, 4)
                self._write(reply_to, parts[:count])
                del parts[:count]

    def _parts(self, echoes: list[Echo]) -> Any:
        """Requests whose results may be columns of one element."""
        start = 0
        while start < len(echoes):
            first, stop = echoes[start], start + 1
            length = self._random.choice((1, 2, 7, 64, 300))
            while stop < min(len(echoes), start + length) and _similar(first, echoes[stop]):
                stop += 1
            yield echoes[start:stop]
            start = stop

    def _write(self, reply_to: str, parts: list[list[Echo]]) -> None:
        columns: list[dict[str, Any]] = []
        results: list[dict[str, Any]] = []
        for part in parts:
            good = [echo for echo in part if self._refuse(echo.body) is None]
            as_columns = good and len(good[0].body) > len(good[0].head) and self._random.random() < 0.7
            if as_columns:
                columns.append(self._columns(good))
            results += [self._result(echo) for echo in part if not as_columns or echo not in good]
        fields: dict[str, bytes] = {}
        if columns:
            fields["columns"] = msgpack.packb(columns)
        if results:
            fields["results"] = msgpack.packb(results)
        self._redis.xadd(self._keys.replies(reply_to), fields)

    def _columns(self, echoes: list[Echo]) -> dict[str, Any]:
        head = echoes[0].head
        ids = [echo.correlation_id for echo in echoes]
        rows = [echo.body[len(head) :] for echo in echoes]
        if self._fault == "rows in another order":
            rows.reverse()
        if self._fault == "one row for all":
            rows = [rows[0]] * len(rows)
        return {
            "correlation_ids": " ".join(ids),
            "status": "OK",
            "content_type": echoes[0].content_type,
            "row_head": head,
            "rows": b"".join(rows),
            "final": True,
            "batch_size": len(echoes),
            "queue_us": 1,
            "compute_us": 2,
        }

    def _result(self, echo: Echo) -> dict[str, Any]:
        common = {"correlation_id": echo.correlation_id, "final": True}
        common |= {"batch_size": 1, "queue_us": 1, "compute_us": 2}
        detail = self._refuse(echo.body)
        if detail is not None:
            return {**common, "status": "INVALID_ARGUMENT", "detail": detail}
        return {**common, "status": "OK", "content_type": echo.content_type, "body": echo.body}


def _similar(one: Echo, other: Echo) -> bool:
    return (one.content_type, one.head, len(one.body)) == (other.content_type, other.head, len(other.body))


def _unknown(name: str) -> bytes:
    return b""


def read_entry(fields: dict[bytes, bytes], stored: Callable[[str], bytes] = _unknown) -> list[Echo]:
    """The requests of an entry. `stored` returns a large body by its name; without it, these are empty."""
    shared: dict[str, Any] = {name.decode(): value for name, value in fields.items()}
    packed = shared.pop("requests", None)
    elements = [shared] if packed is None else [{**shared, **own} for own in msgpack.unpackb(packed)]
    return [echo for element in elements for echo in _read_element(element, stored)]


def _read_element(element: dict[str, Any], stored: Callable[[str], bytes]) -> list[Echo]:
    content_type, reply_to = _text(element.pop("content_type")), _text(element.pop("reply_to"))
    head = element.pop("row_head", b"")
    if "correlation_ids" not in element:
        ids = [_text(element.pop("correlation_id"))]
        bodies = [element.pop("body") if "body" in element else _stored_body(element, stored)]
    else:
        ids = _text(element.pop("correlation_ids")).split(" ")
        rows, bodies = element.pop("rows", None), element.pop("bodies", [])
        bodies = [body if type(body) is bytes else _stored_body(body, stored) for body in bodies]
        if rows is not None:
            width, rest = divmod(len(rows), len(ids))
            assert width, "a row has at least one byte"
            assert rest == 0, "rows are equally long"
            bodies = [head + rows[at : at + width] for at in range(0, len(rows), width)]
    own = {name: _text(value) for name, value in element.items()}
    assert own.pop("reply_columns") == "1"
    return [
        Echo(correlation_id, body, content_type, reply_to, own, head)
        for correlation_id, body in zip(ids, bodies, strict=True)
    ]


def _stored_body(element: dict[str, Any], stored: Callable[[str], bytes]) -> bytes:
    name, size_bytes = _text(element.pop("body_key")), int(element.pop("body_bytes"))
    body = stored(name)
    assert stored is _unknown or len(body) == size_bytes
    return body


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
