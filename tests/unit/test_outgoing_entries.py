"""Entries that a producer sends, later than it was to or again: with what is left of timeouts and delays."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from carpool.client import entries
from carpool.client.entries import Channel, OutgoingEntry
from carpool.client.reading import ResultReader
from carpool.client.sinks import FutureSink
from carpool.keys import Keys
from carpool.messages.requests import JSON


class Clock:
    """A clock that a test sets. It has the name of the function that is replaced."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    replaced = Clock()
    monkeypatch.setattr(entries, "time", replaced)
    return replaced


def entry_of(clock: Clock, timeout_s: float | None, *requests: dict[str, Any]) -> OutgoingEntry:
    """An entry whose timeout begins now, with a request for each of these maps of options."""
    entry = OutgoingEntry(Channel(Keys("m"), b"replies", 100), JSON, timeout_s, FutureSink(ResultReader()))
    for number, fields in enumerate(requests):
        entry.add(f"r{number}", None, fields, b"", b"1")
    entry.started_s = clock.now_s
    return entry


def sent(entry: OutgoingEntry) -> dict[Any, Any]:
    ((_, _, _, *flat),) = entry.commands("me")
    return dict(zip(flat[::2], flat[1::2], strict=True))


def test_entry_that_is_sent_at_once_has_all_of_its_timeout(clock: Clock) -> None:
    entry = entry_of(clock, 7, {"not_before": 4000})
    clock.now_s += 0.0009
    assert (sent(entry)["expiration"], sent(entry)["not_before"]) == (7000, 4000)


def test_entry_that_is_sent_later_has_what_is_left(clock: Clock) -> None:
    """As without a connection, or to another server: the timeout is the producer's, whatever happens."""
    entry = entry_of(clock, 7, {"not_before": 4000, "lane": "a"})
    clock.now_s += 2.5
    fields = sent(entry)
    assert (fields["expiration"], fields["not_before"], fields["lane"]) == (4500, 1500, "a")
    clock.now_s += 2
    fields = sent(entry)
    assert fields["expiration"] == 2500 and "not_before" not in fields and fields["lane"] == "a"
    clock.now_s += 2.4999
    assert sent(entry)["expiration"] == 1
    clock.now_s += 1  # it expires at once: its producer does not wait any more
    assert sent(entry)["expiration"] == 1


def test_each_request_of_an_entry_has_its_own_delay(clock: Clock) -> None:
    entry = entry_of(clock, None, {"not_before": 4000}, {"not_before": 1000}, {}, {"not_before": "9000"})
    clock.now_s += 1
    fields = sent(entry)
    elements = msgpack.unpackb(fields["requests"])
    assert [element.get("not_before") for element in elements] == [3000, None, None, "9000"]
    assert "expiration" not in fields


def test_timeout_that_has_not_begun_is_sent_as_it_is(clock: Clock) -> None:
    entry = entry_of(clock, 7, {})
    entry.started_s = None
    assert sent(entry)["expiration"] == 7000
