"""Transport without Redis: what cannot be encoded fails alone, and useless connections are opened ever more
rarely."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

import hiredis
import msgpack
import pytest

from carpool.client import transport
from carpool.client.durability import Durability
from carpool.client.entries import Channel, OutgoingEntry, SequencesEnded
from carpool.client.options import NO_FIELDS
from carpool.client.reading import ResultReader
from carpool.client.sinks import FutureSink
from carpool.client.transport import Transport, failure
from carpool.errors import CarpoolError, InvalidArgumentError, ResourceExhaustedError
from carpool.keys import Keys
from carpool.messages.requests import JSON
from carpool.store.link_errors import LINK_ERROR_CODES, LinkError, command_error

UNENCODABLE: Final[dict[str, Any]] = {
    "a lone surrogate": {"lane": "\ud800"},
    "more than 64 bits": {"cost": 2**70},
    "more digits than Python writes": {"cost": 10**5000},
    "less than 64 bits": {"cost": -(2**64)},
    "a name that is no text": {frozenset(): "x"},
    "an object": {"a": object()},
}


class FakeLink:
    """In place of an AsyncLink: keeps the commands that are written. Its server may refuse each of them."""

    links: list[FakeLink]
    refuses_with: LinkError | None = None

    def __init__(self, url: str, *, name: str, on_reply: Any, on_lost: Callable[[LinkError], None], key: str):
        self.is_writer = name.endswith(":w")
        self.on_reply, self._on_lost = on_reply, on_lost
        self.identity, self.server_run = 7, "run"
        self.congested, self.unsent_bytes, self.heard_s = False, 0, 0.0
        self.is_closed = False
        self.commands: list[list[bytes]] = []
        self._reader = hiredis.Reader()
        self.links.append(self)

    async def connect(self) -> None:
        self.heard_s = asyncio.get_running_loop().time()

    def write(self, parts: Sequence[bytes]) -> None:
        for part in parts:
            self._reader.feed(part)
        while (command := self._reader.gets()) is not False:
            self.commands.append(command)
        if self.refuses_with is not None and self.is_writer:
            asyncio.get_running_loop().call_soon(self._lose)

    def _lose(self) -> None:
        if not self.is_closed:
            self.close()
            assert self.refuses_with is not None
            self._on_lost(self.refuses_with)

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[FakeLink]:
    """All connections that were opened, two at a time."""
    made: list[FakeLink] = []
    monkeypatch.setattr(FakeLink, "links", made, raising=False)
    monkeypatch.setattr(transport, "AsyncLink", FakeLink)
    return made


class Producer:
    """A Transport, and what becomes of its entries."""

    def __init__(self) -> None:
        self.rejected: dict[OutgoingEntry, CarpoolError] = {}
        self.channel = Channel(Keys("m"), b"replies", 64)
        self.transport = Transport(
            "redis://nowhere",
            lambda flat: False,
            self.rejected.__setitem__,
            lambda entry: None,
            lambda: (),
            Durability.parse("none"),
        )

    def entry(self, *fields: dict[Any, Any], body: bytes = b"7") -> OutgoingEntry:
        """An entry with a request for each of these fields."""
        entry = OutgoingEntry(self.channel, JSON, 5.0, FutureSink(ResultReader()))
        for number, of_request in enumerate(fields or [NO_FIELDS]):
            entry.add(f"id-{number}", asyncio.get_running_loop().create_future(), of_request, b"", body)
        return entry


@pytest.fixture
async def producer(links: list[FakeLink]) -> Producer:
    made = Producer()
    await made.transport.open("me")
    return made


def ids_of(command: list[bytes]) -> list[Any]:
    """The correlation IDs of an XADD."""
    fields: dict[Any, Any] = dict(zip(command[3::2], command[4::2], strict=True))
    packed = fields.get(b"requests")
    found = [fields] if packed is None else msgpack.unpackb(packed)
    return [one.get("correlation_id", one.get(b"correlation_id")) for one in found]


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("fields", UNENCODABLE.values(), ids=list(UNENCODABLE))
async def test_an_entry_that_cannot_be_encoded_fails_alone(
    producer: Producer, links: list[FakeLink], fields: dict[Any, Any], shared: bool, stored: bool
) -> None:
    """Expect its requests to fail, all others to be written, and each reply to go to its own waiter."""
    bad = producer.entry(fields, {"lane": "a"}) if shared else producer.entry(fields)
    if stored:
        bad.add_stored("large", asyncio.get_running_loop().create_future(), NO_FIELDS, bytes(20_000), "large")
    before, after = producer.entry(), producer.entry({"lane": "a"}, {"lane": "b"})
    writer = links[0]
    producer.transport.send([before, bad, after])
    call = producer.transport.call("HGET", "model", "max_batch_size")
    await asyncio.sleep(0)

    assert {entry: type(error) for entry, error in producer.rejected.items()} == {bad: InvalidArgumentError}
    assert not bad.sent
    assert [command[0] for command in writer.commands] == [b"XADD", b"XADD", b"HGET"]
    assert [len(ids_of(command)) for command in writer.commands[:2]] == [1, 2]
    writer.on_reply(b"1-0")
    writer.on_reply(command_error("OOM command not allowed"))
    writer.on_reply(b"64")
    assert await call == b"64"
    assert {entry: type(error) for entry, error in producer.rejected.items()} == {
        bad: InvalidArgumentError,
        after: ResourceExhaustedError,
    }
    producer.transport.send([producer.entry()])
    assert len(writer.commands) == 4
    await producer.transport.close()


async def test_alone_it_leaves_nothing_behind(producer: Producer, links: list[FakeLink]) -> None:
    ended = SequencesEnded(producer.channel)
    ended.sequence_ids.append("\ud800")
    for fields in UNENCODABLE.values():
        producer.transport.send([producer.entry(fields), ended])
    assert len(producer.rejected) == len(UNENCODABLE)
    assert all("cannot be encoded" in error.detail for error in producer.rejected.values())
    assert (links[0].commands, producer.transport._outbox, len(producer.transport._waiters)) == ([], [], 0)
    await producer.transport.close()


async def test_command_that_cannot_be_encoded_fails_alone(producer: Producer, links: list[FakeLink]) -> None:
    first, bad, last = (producer.transport.call("HGET", key, "f") for key in ("a", "\ud800", "b"))
    await asyncio.sleep(0)
    with pytest.raises(InvalidArgumentError, match="arguments of 'HGET' cannot be encoded"):
        await bad
    for reply in (b"1", b"2"):
        links[0].on_reply(reply)
    assert (await first, await last) == (b"1", b"2")
    await producer.transport.close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Those before each reconnection, none of which is waited for."""
    passed: list[float] = []

    def pass_by(pause_s: float) -> float:
        passed.append(pause_s)
        return 0.0

    monkeypatch.setattr(transport, "with_jitter", pass_by)
    return passed


async def until(predicate: Callable[[], object]) -> None:
    while not predicate():
        await asyncio.sleep(0)


@pytest.mark.parametrize("code", sorted(LINK_ERROR_CODES))
async def test_a_server_that_accepts_nothing_is_connected_to_ever_more_rarely(
    producer: Producer, links: list[FakeLink], pauses: list[float], monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    """Given a server that lets us connect and refuses what is written, expect pauses that grow to a second.

    Once it accepts requests again, expect the first one to be written, and pauses to begin anew.
    """
    monkeypatch.setattr(FakeLink, "refuses_with", LinkError(f"{code} not now"))
    waiting = producer.entry()
    producer.transport.add_channel(producer.channel)
    producer.transport.send([waiting])
    await until(lambda: len(pauses) >= 8)
    assert pauses[:8] == [*transport._RECONNECT_PAUSES_S, 1.0, 1.0]
    assert not producer.rejected, "it waits"

    monkeypatch.setattr(FakeLink, "refuses_with", None)
    opened = len(links)
    await until(lambda: any(link.is_writer and link.commands for link in links[opened:]))
    writer, reader = links[-2:]
    assert ids_of(writer.commands[0]) == [b"id-0"]
    writer.on_reply(b"1-0")
    reader.on_reply([[producer.channel.replies, [[b"1-0", [b"results", b""]]]]])
    pauses.clear()
    producer.transport._on_connection_lost(LinkError("closed"))
    await until(lambda: pauses)
    assert pauses == [transport._RECONNECT_PAUSES_S[0]]
    await producer.transport.close()


def test_codes_of_errors_are_those_of_their_causes() -> None:
    for text, code in {
        "BUSY Redis is busy running a script.": "BUSY",
        "EXECABORT Transaction discarded because of: READONLY You can't write against a read only replica.": (
            "READONLY"
        ),
        "EXECABORT Transaction discarded because of: OOM command not allowed": "OOM",
        "EXECABORT Transaction discarded because of previous errors.": "EXECABORT",
        "MISCONF Redis is configured to save RDB snapshots": "MISCONF",
    }.items():
        error = command_error(text)
        assert (error.code, str(error)) == (code, text)
        assert isinstance(failure("refused", error), ResourceExhaustedError) == (code == "OOM")
    assert {"BUSY", "READONLY", "LOADING", "MASTERDOWN", "TRYAGAIN", "CLUSTERDOWN"} <= LINK_ERROR_CODES
    assert LINK_ERROR_CODES.isdisjoint({"OOM", "MISCONF", "NOREPLICAS", "NOPERM"})
