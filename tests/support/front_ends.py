"""Readers of streams at the front ends of a gateway, and what they have seen, for the model `Told`.

    with Readers([gateway.url, other.url], FRONT_ENDS) as readers:
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
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from types import TracebackType
from typing import Any, Final, NamedTuple, Self
from urllib.parse import urlsplit

from support.models.stepping import text_of
from support.waiting import EVENTUALLY_S, wait_until

MODEL: Final = "Told"
COMPLETE, FAILED, REFUSED, BROKEN = "complete", "failed", "refused", "broken"


class FailedError(Exception):
    """The server said that the text does not go on."""


class RefusedError(Exception):
    """The server answered with an error before the text began."""


# Reads the chunks of a text. Raises FailedError, RefusedError, and for a connection that broke OSError or
# HTTPException.
FrontEnd = Callable[[str, str, int], Iterator[str]]


def _events(url: str, path: str, body: Mapping[str, Any], **headers: str) -> Iterator[tuple[str, str]]:
    """The names and the data of the events of an answer."""
    address = urlsplit(url)
    assert address.hostname is not None
    connection = HTTPConnection(address.hostname, address.port, timeout=EVENTUALLY_S)
    try:
        data = json.dumps(body)
        connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RefusedError(f"{answer.status}: {answer.read()!r}")
        name = "message"
        while line := answer.readline():
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                yield name, value
                name = "message"
    finally:
        connection.close()


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


FRONT_ENDS: Final[Mapping[str, FrontEnd]] = {"native": native}


class Seen(NamedTuple):
    """What a reader has seen of a text, and how it ended."""

    front_end: str
    url: str
    prompt: str
    length: int
    text: str
    end: str
    why: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is the beginning of the text, or all of it if it is complete."""
        expected = text_of("", self.length, self.prompt)
        return self.text == expected if self.end == COMPLETE else expected.startswith(self.text)


class Readers:
    """A thread for each front end, which reads one text after another. `seen`: what has ended."""

    def __init__(self, urls: Sequence[str], front_ends: Mapping[str, FrontEnd], length_max: int = 60) -> None:
        self.urls = list(urls)
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
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * EVENTUALLY_S)
            assert not thread.is_alive(), f"{thread.name} reads on"
        assert error is not None or not self._errors, self._errors

    def wait_for_more(self, count: int, end: str = COMPLETE) -> None:
        """Wait until each front end has read so many more texts that ended in this way."""
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
                self.seen.append(self._read(name, front_end))
        except BaseException as error:  # shown by the test
            self._errors.append(error)

    def _read(self, name: str, front_end: FrontEnd) -> Seen:
        number = next(self._numbers)
        url = self.urls[number % len(self.urls)]
        prompt, count = f"{name} {number}", random.randint(5, self._length_max)
        text, end, why = "", COMPLETE, ""
        try:
            for chunk in front_end(url, prompt, count):
                if not text:
                    self.open[url] += 1
                text += chunk
        except FailedError as error:
            end, why = FAILED, str(error)
        except RefusedError as error:
            end, why = REFUSED, str(error)
        except (OSError, HTTPException) as error:
            end, why = BROKEN, repr(error)
        if text:
            self.open[url] -= 1
        return Seen(name, url, prompt, count, text, end, why)
