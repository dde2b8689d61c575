"""A producer that sends requests continuously while a test causes faults, and records them in a checker."""

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
from carpool.messages.requests import JSON, MSGPACK, RAW
from support.checker import Checker, Report
from support.stack import Stack, envelope
from support.waiting import EVENTUALLY_S, wait_until

INTERVAL_S: Final = 0.01
ENTRIES_PER_INTERVAL: Final = 3
PACKED_REQUESTS: Final = 5

Fields = dict[str, Any]


class Load:
    """Sends requests in every form that a producer may use, from a thread, until the end of the block.

    It uses plain XADD without retries, so that it knows exactly which requests were accepted.
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
        self._thread.join(EVENTUALLY_S)
        self._redis.close()
        assert not self._thread.is_alive()

    def wait_for_more(self, count: int, timeout_s: float = 20.0) -> None:
        """Wait until `count` more requests are accepted."""
        target = self.accepted + count
        wait_until(
            lambda: self.accepted >= target,
            description=f"{count} more requests are accepted",
            timeout_s=timeout_s,
        )

    def _run(self) -> None:
        entries_to_send = entries(self._name)
        while not self._stop.wait(INTERVAL_S):
            sent = list(itertools.islice(entries_to_send, ENTRIES_PER_INTERVAL))
            pipeline = self._redis.pipeline(transaction=False)
            for fields, payloads in sent:
                for correlation_id, payload in payloads.items():
                    self._checker.attempt(correlation_id, payload)
                pipeline.xadd(self._keys.requests, fields)
            try:
                replies = pipeline.execute(raise_on_error=False)
            except RedisError:
                continue  # it is not known whether they were accepted
            for (_, payloads), reply in zip(sent, replies, strict=True):
                refused = isinstance(reply, ResponseError)
                for correlation_id in payloads:
                    if refused:
                        self._checker.refuse(correlation_id)
                    elif not isinstance(reply, Exception):
                        self._checker.accept(correlation_id)
                        self.accepted += 1


def entries(name: str) -> Iterator[tuple[Fields, dict[str, str]]]:
    """An endless sequence of entries, each with the payloads of its requests by correlation ID."""
    shapes: tuple[tuple[str, int, Fields], ...] = (
        (JSON, 1, {}),
        (MSGPACK, PACKED_REQUESTS, {"reply_to": f"{name}-many"}),
        (RAW, 1, {"reply_to": f"{name}-raw", "priority": 7}),
        (MSGPACK, 1, {"lane": "night"}),
        (JSON, PACKED_REQUESTS, {}),
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


def final_report(stack: Stack, model: str, checker: Checker, timeout_s: float = 20.0) -> Report:
    """The checker's report once the model is idle. Fails if that takes longer than `timeout_s`."""
    try:
        stack.wait_until_idle(model, timeout_s)
    finally:
        collect(stack, model, checker)
        report = checker.report()
        print(f"{model}: {report}")
    return report


def collect(stack: Stack, model: str, checker: Checker, reply_to: str = "*") -> None:
    """Record all envelopes of the model that are in Redis. Must be called only once.

    `reply_to` is a pattern of reply streams: it must exclude that of an AsyncClient, which trims its stream.
    """
    keys = Keys(model)
    lists, streams = keys.result(""), keys.replies("")
    names = list(stack.redis.scan_iter(match=f"{lists}*", count=1000))
    pipeline = stack.redis.pipeline(transaction=False)
    for key in names:
        pipeline.lrange(key, 0, -1)
    for key, values in zip(names, pipeline.execute(), strict=True):
        for data in values:
            checker.envelope(key.decode().removeprefix(lists), decoded(envelope(data)))
    for key in stack.redis.scan_iter(match=f"{streams}{reply_to}", count=1000):
        for reply in stack.replies(model, key.decode().removeprefix(streams)):
            checker.envelope(reply["correlation_id"], decoded(reply))


def decoded(envelope: Mapping[str, Any]) -> dict[str, Any]:
    """The envelope with its body decoded."""
    body = envelope.get("body")
    if isinstance(body, bytes):
        if envelope["content_type"] == MSGPACK:
            body = msgpack.unpackb(body)
        elif envelope["content_type"] == JSON:
            body = json.loads(body)
        else:
            body = body.decode()
    return {**envelope, "body": body}
