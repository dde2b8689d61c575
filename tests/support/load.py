"""A producer that goes on and on while a test breaks things, and tells the checker what it does."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any, Final, Self

import msgpack
from redis import Redis, RedisError, ResponseError
from redis.backoff import NoBackoff
from redis.retry import Retry

from carpool.keys import Keys
from carpool.messages import JSON, MSGPACK, RAW
from support.checker import Checker, Report
from support.stack import Stack, envelope
from support.waiting import wait_until

TURN_S: Final = 0.01
ENTRIES_PER_TURN: Final = 3
PACKED: Final = 5

Fields = dict[str, Any]


class Load:
    """Sends requests in every way a producer may, on a thread of its own, for as long as the block lasts.

    Plain XADD, without retries: what was accepted is known exactly.
    """

    def __init__(self, stack: Stack, model: str, checker: Checker, name: str = "load") -> None:
        self._stack = stack
        self._keys = Keys(model)
        self._checker = checker
        self._name = name
        self._redis: Any = Redis.from_url(
            stack.url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=5
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name)
        self.accepted = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self.wait_for_more(50)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(30)
        self._redis.close()
        assert not self._thread.is_alive()

    def wait_for_more(self, count: int, timeout_s: float = 20.0) -> None:
        """Wait until as many further requests were accepted."""
        target = self.accepted + count
        wait_until(
            lambda: self.accepted >= target,
            description=f"{count} more requests are accepted",
            timeout_s=timeout_s,
        )

    def _run(self) -> None:
        turns = entries(self._name)
        while not self._stop.wait(TURN_S):
            turn = list(itertools.islice(turns, ENTRIES_PER_TURN))
            pipeline = self._redis.pipeline(transaction=False)
            for fields, payloads in turn:
                for correlation_id, payload in payloads.items():
                    self._checker.attempt(correlation_id, payload)
                pipeline.xadd(self._keys.requests, fields)
            try:
                replies = pipeline.execute(raise_on_error=False)
            except RedisError:
                continue  # whether they were accepted is not known
            for (_, payloads), reply in zip(turn, replies, strict=True):
                refused = isinstance(reply, ResponseError)
                for correlation_id in payloads:
                    if refused:
                        self._checker.refuse(correlation_id)
                    elif not isinstance(reply, Exception):
                        self._checker.accept(correlation_id)
                        self.accepted += 1


def entries(name: str) -> Iterator[tuple[Fields, dict[str, str]]]:
    """Entries without end, each with the payloads of its requests by correlation ID."""
    shapes: tuple[tuple[str, int, Fields], ...] = (
        (JSON, 1, {}),
        (MSGPACK, PACKED, {"reply_to": f"{name}-many"}),
        (RAW, 1, {"reply_to": f"{name}-raw", "priority": 7}),
        (MSGPACK, 1, {"lane": "night"}),
        (JSON, PACKED, {}),
        (JSON, 1, {"expiration": 60_000, "reply_to": f"{name}-json"}),
    )
    for number in itertools.count():
        content_type, size, shared = shapes[number % len(shapes)]
        payloads = {f"{name}-{number}.{part}": f"payload {number}.{part}" for part in range(size)}
        requests = [
            {"correlation_id": correlation_id, "body": encode(content_type, payload)}
            for correlation_id, payload in payloads.items()
        ]
        own: Fields = requests[0] if size == 1 else {"requests": msgpack.packb(requests)}
        yield {"content_type": content_type, **shared, **own}, payloads


def encode(content_type: str, payload: str) -> bytes:
    if content_type == RAW:
        return payload.encode()
    return json.dumps(payload).encode() if content_type == JSON else bytes(msgpack.packb(payload))


def settled(stack: Stack, model: str, checker: Checker, timeout_s: float = 20.0) -> Report:
    """The verdict, once nothing waits or is in flight any more. Fails if that takes over `timeout_s`."""
    try:
        stack.wait_until_idle(model, timeout_s)
    finally:
        collect(stack, model, checker)
        report = checker.report()
        print(f"{model}: {report}")
    return report


def collect(stack: Stack, model: str, checker: Checker, reply_to: str = "*") -> None:
    """Tell the checker every envelope that is in Redis, whomever it is for. To be called once.

    `reply_to` is a pattern of names: an AsyncClient trims its own stream, now or later.
    """
    keys = Keys(model)
    lists, streams = keys.result(""), keys.replies("")
    names = list(stack.redis.scan_iter(match=f"{lists}*", count=1000))
    pipeline = stack.redis.pipeline(transaction=False)
    for key in names:
        pipeline.lrange(key, 0, -1)
    for key, found in zip(names, pipeline.execute(), strict=True):
        for data in found:
            checker.envelope(key.decode().removeprefix(lists), decoded(envelope(data)))
    for key in stack.redis.scan_iter(match=f"{streams}{reply_to}", count=1000):
        for one in stack.replies(model, key.decode().removeprefix(streams)):
            checker.envelope(one["correlation_id"], decoded(one))


def decoded(one: Mapping[str, Any]) -> dict[str, Any]:
    """An envelope whose body is a value, whatever it travelled as."""
    body = one.get("body")
    if isinstance(body, bytes):
        if one["content_type"] == MSGPACK:
            body = msgpack.unpackb(body)
        elif one["content_type"] == JSON:
            body = json.loads(body)
        else:
            body = body.decode()
    return {**one, "body": body}
