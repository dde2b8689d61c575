"""Readers of streams while a test causes faults, and a checker that keeps what they read, outside Redis.

    checker = StreamChecker()
    with StreamLoad(stack, "Chain", checker) as load:
        load.wait_for_more(10)          # requests that ended
        ...
    assert checker.faults() == {}

The output of each request is known (`support.models.stepping`). So it can be told whether a chunk was lost,
doubled or changed, whichever worker sent it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self

import msgpack
from redis import Redis

from carpool import AsyncClient
from carpool.errors import CarpoolError
from carpool.keys import Keys
from support.models.stepping import text_of
from support.stack import Stack, envelope
from support.waiting import EVENTUALLY_S, wait_until
from support.wire import envelopes

TIMEOUT_S: Final = EVENTUALLY_S

Body = dict[str, Any]
Envelope = Mapping[str, Any]


class StreamChecker:
    """The history: what was asked for, and the envelopes of each request in the order in which they came."""

    def __init__(self) -> None:
        self.bodies: dict[str, Body] = {}
        self.streamed: dict[str, bool] = {}
        self.envelopes: defaultdict[str, list[Envelope]] = defaultdict(list)

    def sent(self, correlation_id: str, body: Body, *, is_streamed: bool = True) -> None:
        """A request is about to be sent."""
        self.bodies[correlation_id] = body
        self.streamed[correlation_id] = is_streamed

    def read(self, correlation_id: str, found: Envelope) -> None:
        """A reader found this under the request's ID."""
        self.envelopes[correlation_id].append(found)

    def has_ended(self, correlation_id: str) -> bool:
        """Whether a final envelope was read."""
        return any(found["final"] for found in self.envelopes[correlation_id])

    def statuses(self) -> Counter[str]:
        """How the requests ended."""
        return Counter(
            found["status"] for of_one in self.envelopes.values() for found in of_one if found["final"]
        )

    def chunks(self, correlation_id: str) -> list[Envelope]:
        """The chunks of a request."""
        return [found for found in self.envelopes[correlation_id] if not found["final"]]

    def final(self, correlation_id: str) -> Envelope:
        """Its final envelope."""
        (final,) = (found for found in self.envelopes[correlation_id] if found["final"])
        return final

    def faults(self) -> dict[str, list[str]]:
        """The IDs of requests by fault, with what is wrong; empty if all is as it should be."""
        faults: defaultdict[str, list[str]] = defaultdict(list)
        for correlation_id in self.bodies:
            for fault in self._faults_of(correlation_id):
                faults[fault].append(correlation_id)
        for correlation_id in self.envelopes.keys() - self.bodies.keys():
            faults["never sent"].append(correlation_id)
        return dict(faults)

    def _faults_of(self, correlation_id: str) -> list[str]:
        found, body = self.envelopes[correlation_id], self.bodies[correlation_id]
        chunks = self.chunks(correlation_id)
        finals = [each for each in found if each["final"]]
        faults: list[str] = []
        if len(finals) != 1:
            return ["two finals" if finals else "lost"]
        (final,) = finals
        if not found[-1]["final"]:
            faults.append("chunk after the end")
        if [each["index"] for each in chunks] != list(range(len(chunks))):
            faults.append("indexes")
        if chunks and not self.streamed[correlation_id]:
            faults.append("chunks of a request that wants none")
        text = "".join(each["body"] for each in chunks)
        expected = text_of(correlation_id, body["length"], body.get("seed"))
        if not expected.startswith(text) or any(each["status"] != "OK" for each in chunks):
            faults.append("other chunks")
        if final["status"] == "OK":
            if (final["body"] or "") != expected:  # null without any chunk
                faults.append("other output")
            if self.streamed[correlation_id] and (text != expected or final["index"] != len(chunks)):
                faults.append("chunks are not the output")
        return faults


class StreamLoad:
    """Sends requests continuously, and reads their streams, from three threads, until the end of the block.

    One reads lists, with a BLPOP for all of them; one a reply stream; and one uses `AsyncClient`. Each keeps
    `concurrency` requests open. At the end of the block those that are open are read to their end.
    """

    def __init__(
        self,
        stack: Stack,
        model: str,
        checker: StreamChecker,
        *,
        concurrency: int = 4,
        length_max: int = 30,
        step_s: float = 0.004,
        withdraws: bool = False,
    ) -> None:
        """`withdraws`: requests are withdrawn while they are read, at random."""
        self._stack = stack
        self._model = model
        self._keys = Keys(model)
        self._checker = checker
        self._concurrency = concurrency
        self._length_max = length_max
        self._step_s = step_s
        self._withdraws = withdraws
        self._stop = threading.Event()
        self._numbers = itertools.count()
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=run.__name__)
            for run in (self._read_lists, self._read_replies, self._read_with_client)
        ]
        self.errors: list[BaseException] = []
        self.ended = 0

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_for_more(self._concurrency)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * TIMEOUT_S)
            assert not thread.is_alive()
        if error is None:
            assert not self.errors, self.errors
            self._read_leftovers()

    def wait_for_more(self, count: int) -> None:
        """Wait until `count` more requests have ended."""
        target = self.ended + count
        wait_until(
            lambda: self.ended >= target or self.errors,
            description=f"{count} more requests end",
            timeout_s=TIMEOUT_S,
        )
        assert not self.errors, self.errors

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:  # shown by the test
            self.errors.append(error)

    def _next(self) -> tuple[str, Body]:
        number = next(self._numbers)
        length = random.randint(1, self._length_max)
        return f"r{number}", {"length": length, "seed": number, "step_s": self._step_s}

    def _redis(self) -> Any:
        return Redis.from_url(self._stack.url, protocol=2, socket_timeout=TIMEOUT_S)

    def _read(self, correlation_id: str, found: Envelope, redis: Any) -> None:
        self._checker.read(correlation_id, found)
        if found["final"]:
            self.ended += 1
        elif self._withdraws and random.random() < 0.1:
            redis.xadd(self._keys.requests, {"withdraw": correlation_id})

    def _read_lists(self) -> None:
        """Every fifth request wants no chunks."""
        redis, open_ids = self._redis(), set[str]()
        while open_ids or not self._stop.is_set():
            while len(open_ids) < self._concurrency and not self._stop.is_set():
                name, body = self._next()
                is_streamed = body["seed"] % 5 > 0
                self._checker.sent(name, body, is_streamed=is_streamed)
                fields = {"correlation_id": name, "body": json.dumps(body), "stream": int(is_streamed)}
                redis.xadd(self._keys.requests, fields)
                open_ids.add(name)
            names = {self._keys.result(name).encode(): name for name in open_ids}
            popped = redis.blpop([*names], TIMEOUT_S)
            assert popped is not None, f"nothing was written of {sorted(open_ids)}"
            key, data = popped
            self._read(names[key], envelope(data), redis)
            if self._checker.has_ended(names[key]):
                open_ids.discard(names[key])
        redis.close()

    def _read_replies(self) -> None:
        redis, open_ids, last_id = self._redis(), set[str](), b"0"
        replies = self._keys.replies("load")
        while open_ids or not self._stop.is_set():
            while len(open_ids) < self._concurrency and not self._stop.is_set():
                name, body = self._next()
                self._checker.sent(name, body)
                fields = {"correlation_id": name, "body": msgpack.packb(body), "stream": 1}
                fields |= {"content_type": "application/msgpack", "reply_to": "load"}
                redis.xadd(self._keys.requests, fields)
                open_ids.add(name)
            found = redis.xread({replies: last_id}, block=int(TIMEOUT_S * 1000))
            assert found, f"nothing was written of {sorted(open_ids)}"
            for entry_id, fields in found[0][1]:
                last_id = entry_id
                for each in envelopes(fields):
                    name = each["correlation_id"]
                    self._read(name, _decoded(each), redis)
                    if each["final"]:
                        open_ids.discard(name)
            redis.xtrim(replies, minid=_after(last_id), approximate=False)
        redis.close()

    def _read_with_client(self) -> None:
        asyncio.run(self._stream_all())

    async def _stream_all(self) -> None:
        async with AsyncClient(self._stack.url, timeout=TIMEOUT_S) as client:
            await client.infer(self._model, {"length": 0})  # it looks the model up
            await asyncio.gather(*(self._stream_each(client) for _ in range(self._concurrency)))

    async def _stream_each(self, client: AsyncClient) -> None:
        while not self._stop.is_set():
            _, body = self._next()
            stream = client.stream(self._model, body)
            name = stream.correlation_id
            assert name is not None
            self._checker.sent(name, body)
            final: Envelope
            index = 0
            try:
                async for value in stream:
                    self._checker.read(name, {"final": False, "status": "OK", "index": index, "body": value})
                    index += 1
                assert stream.reply is not None
                final = {"final": True, "status": "OK", "index": index, "body": stream.reply.value}
            except CarpoolError as error:
                final = {"final": True, "status": error.status, "detail": error.detail}
            self._checker.read(name, final)
            self.ended += 1

    def _read_leftovers(self) -> None:
        """What was written after the end of a request."""
        redis = self._redis()
        for name in self._checker.bodies:
            for data in redis.lrange(self._keys.result(name), 0, -1):
                self._checker.read(name, envelope(data))
        for _, fields in redis.xrange(self._keys.replies("load")):
            for each in envelopes(fields):
                self._checker.read(each["correlation_id"], _decoded(each))
        redis.close()


def _decoded(found: Envelope) -> Envelope:
    """An envelope of a reply stream, whose body is msgpack."""
    return {**found, "body": msgpack.unpackb(found["body"])} if "body" in found else found


def _after(entry_id: bytes) -> str:
    milliseconds, number = entry_id.decode().split("-")
    return f"{milliseconds}-{int(number) + 1}"
