"""Readers of streams at the front ends of a gateway, and what they have seen, for the model `Told`.

    with Readers([gateway.url, other.url], rpc, FRONT_ENDS) as readers:
        readers.wait_for_more(8)        # of each front end
        ...
    assert readers.faults() == []

A reader reads one text after another, at each gateway in turn. What it has seen of a text must be the
beginning of what the model writes, whatever happens: to the end, or until an error, or until the connection
ends.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import grpc

from carpool.messages.requests import JSON
from support.http import Connection, request
from support.models.stepping import text_of
from support.rpc import Rpc, infer_request, outputs_of
from support.waiting import EVENTUALLY_S, wait_until
from support.websocket import CLOSE, NotOpenedError, Socket

MODEL: Final = "Told"
SPEC: Final = "stepping.py:Told"
COMPLETE, FAILED, REFUSED, BROKEN = "complete", "failed", "refused", "broken"
_PAUSE_S: Final = 0.02  # after a text that did not end well


class FailedError(Exception):
    """The server said that the text does not go on."""


class RefusedError(Exception):
    """The server answered with an error before the text began. `code`: of HTTP."""

    def __init__(self, code: int, body: bytes) -> None:
        super().__init__(f"{code}: {body.decode(errors='replace'):.200}")
        self.code = code


# Reads the chunks of a text. Raises FailedError, RefusedError, and OSError for a connection that broke.
FrontEnd = Callable[[str, str, int], Iterator[str]]


def _events(url: str, path: str, body: Mapping[str, Any], **headers: str) -> Iterator[tuple[str, str]]:
    """The names and the data of the events of an answer, each of which is a part of it."""
    with Connection(url) as connection:
        sent = json.dumps(body).encode()
        connection.send(request("POST", path, sent, Content_Type="application/json", **headers))
        answer = connection.answer(has_body=False)
        if answer.code != 200:
            raise RefusedError(answer.code, connection.body(answer.headers))
        while event := connection.part().decode():
            fields = dict(line.split(": ", 1) for line in event.splitlines() if ": " in line)
            if "data" in fields:  # else it is a comment
                yield fields.get("event", "message"), fields["data"]


def native(url: str, prompt: str, count: int) -> Iterator[str]:
    """Server-sent events of Carpool's own interface."""
    path, body = f"/carpool/v1/models/{MODEL}/infer", {"prompt": prompt, "max_tokens": count}
    for name, data in _events(url, path, body, Accept="text/event-stream"):
        if name == "result":
            return
        if name == "error":
            raise FailedError(data)
        yield json.loads(data)
    raise ConnectionError("the events have no end")


def completions(url: str, prompt: str, count: int) -> Iterator[str]:
    """OpenAI's API: texts after a prompt."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": count, "stream": True}
    return (choice["text"] for choice in _choices(url, "/v1/completions", body))


def chat(url: str, prompt: str, count: int) -> Iterator[str]:
    """OpenAI's API: answers to messages."""
    messages = [{"role": "user", "content": prompt}]
    body = {"model": MODEL, "messages": messages, "max_completion_tokens": count, "stream": True}
    return (choice["delta"].get("content", "") for choice in _choices(url, "/v1/chat/completions", body))


def _choices(url: str, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
    """The choices in the events of OpenAI's API."""
    for _, data in _events(url, path, body):
        if data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise FailedError(data)
        yield event["choices"][0]
    raise ConnectionError("the events have no end")


def generate(url: str, prompt: str, count: int) -> Iterator[str]:
    """Triton's extension `generate`. The end is that of the answer."""
    body = {"text_input": prompt, "max_tokens": count}
    for _, data in _events(url, f"/v2/models/{MODEL}/generate_stream", body):
        event = json.loads(data)
        if "error" in event:
            raise FailedError(data)
        yield event["text_output"]


def websocket(url: str, prompt: str, count: int) -> Iterator[str]:
    """Messages of a WebSocket."""
    try:
        opened = Socket(url, f"/carpool/v1/models/{MODEL}/stream")
    except NotOpenedError as error:
        raise RefusedError(error.answer.code, error.answer.body) from None
    with opened as socket:
        socket.send({"id": "1", "body": {"prompt": prompt, "max_tokens": count}})
        while True:
            opcode, payload = socket.message()
            if opcode == CLOSE:
                raise ConnectionError(f"closed: {payload!r}")
            message = json.loads(payload)
            if "error" in message:
                raise FailedError(payload)
            if "end" in message:
                return
            yield message["chunk"]


def grpc_stream(target: str, prompt: str, count: int) -> Iterator[str]:
    """ModelStreamInfer of gRPC."""
    body = json.dumps({"prompt": prompt, "max_tokens": count}).encode()
    asked = infer_request(MODEL, ("body", [[body]]))
    asked.inputs[0].parameters["content_type"].string_param = JSON
    try:
        with Rpc(target) as rpc:
            for response in rpc.stream([asked]):
                if response.error_message:
                    raise FailedError(response.error_message)
                for rows in outputs_of(response.infer_response).values():
                    yield from map(bytes.decode, rows)
    except grpc.RpcError as error:
        raise ConnectionError(str(error)) from None


FRONT_ENDS: Final[Mapping[str, FrontEnd]] = {
    "native": native,
    "completions": completions,
    "chat": chat,
    "generate": generate,
    "websocket": websocket,
    "grpc": grpc_stream,
}


class Seen(NamedTuple):
    """What a reader has seen of a text, and how it ended. `began_s`, `ended_s`: on the monotonic clock.
    `code`: of HTTP, of one that was refused."""

    front_end: str
    url: str
    prompt: str
    length: int
    text: str
    end: str
    why: str = ""
    began_s: float = 0.0
    ended_s: float = 0.0
    code: int = 0

    @property
    def is_right(self) -> bool:
        """Whether it is the beginning of the text, or all of it if it is complete."""
        expected = text_of("", self.length, self.prompt)
        return self.text == expected if self.end == COMPLETE else expected.startswith(self.text)


class Readers:
    """A thread for each front end, which reads one text after another. `seen`: what has ended.

    `urls`: of gateways. `rpc`: the addresses of the same gateways for gRPC, by URL.
    """

    def __init__(
        self,
        urls: Sequence[str],
        rpc: Mapping[str, str],
        front_ends: Mapping[str, FrontEnd],
        length_max: int = 60,
    ) -> None:
        self.urls = list(urls)
        self._rpc = rpc
        self.seen: list[Seen] = []
        self.open: Counter[str] = Counter()  # texts that are being read and have begun, by URL
        self._length_max = length_max
        self._numbers = itertools.count()
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=item, name=item[0]) for item in front_ends.items()
        ]
        self._front_ends = front_ends

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._join()
        assert error is not None or not self._errors, self._errors

    def end(self) -> None:
        """Begin no more texts; return when all have ended. May be called repeatedly."""
        self._join()
        assert not self._errors, self._errors

    def _join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * EVENTUALLY_S)
            assert not thread.is_alive(), f"{thread.name} reads on"

    def wait_for_more(self, count: int, end: str = COMPLETE) -> None:
        """Wait until each front end has read `count` more texts that ended in this way."""
        before = self._ended(end)

        def have_ended() -> bool:
            assert not self._errors, self._errors
            ended = self._ended(end)
            return all(ended[name] >= before[name] + count for name in self._front_ends)

        wait_until(have_ended, description=f"each front end has read {count} more texts: {end}")

    def wait_until_open(self, url: str | None = None) -> None:
        """Wait until a text is read that has begun, of this gateway or of any."""
        wait_until(
            lambda: self.open[url] if url is not None else self.open.total(),
            description="a text is read",
        )

    def ends(self) -> Counter[str]:
        """How many texts ended in which way."""
        return Counter(one.end for one in self.seen)

    def faults(self) -> list[Seen]:
        """What is not the beginning of a text, or not all of it although the reader was told so."""
        return [one for one in self.seen if not one.is_right]

    def _ended(self, end: str) -> Counter[str]:
        return Counter(one.front_end for one in self.seen if one.end == end)

    def _run(self, name: str, front_end: FrontEnd) -> None:
        try:
            while not self._stop.is_set():
                seen = self._read(name, front_end)
                self.seen.append(seen)
                if seen.end != COMPLETE:
                    self._stop.wait(_PAUSE_S)
        except BaseException as error:  # shown by the test
            self._errors.append(error)

    def _read(self, name: str, front_end: FrontEnd) -> Seen:
        number = next(self._numbers)
        url = self.urls[number % len(self.urls)]
        prompt, count = f"{name} {number}", random.randint(5, self._length_max)
        text, end, why, code, began_s = "", COMPLETE, "", 0, time.monotonic()
        try:
            for chunk in front_end(self._rpc[url] if name == "grpc" else url, prompt, count):
                if chunk and not text:
                    self.open[url] += 1
                text += chunk
        except FailedError as error:
            end, why = FAILED, str(error)
        except RefusedError as error:
            end, why, code = REFUSED, str(error), error.code
        except OSError as error:
            end, why = BROKEN, repr(error)
        if text:
            self.open[url] -= 1
        return Seen(name, url, prompt, count, text, end, why, began_s, time.monotonic(), code)
