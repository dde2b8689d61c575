"""The connections of a producer to a cluster: a `Transport` for each hash slot that has models.

Redis Cluster runs a command on keys of one slot only, and an XREAD that waits occupies its connection. So the
reply streams of each slot are read over a connection of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, Final

from carpool.backoff import with_jitter
from carpool.client.entries import Channel, OutgoingEntry, SequencesEnded
from carpool.client.transport import Transport
from carpool.cluster import slot_of
from carpool.errors import UnavailableError
from carpool.store.connection import Argument, CommandError, LinkError

_OPENING_PAUSE_S: Final = 0.2

# A Transport to the node that has a key. The other argument returns all entries of this Transport without a
# result.
NewTransport = Callable[[str, Callable[[], Iterable[OutgoingEntry]]], Transport]


class ClusterTransport:
    """As Transport, for all nodes of a cluster.

    `first_key`: the key with whose node `open` connects. Other connections are opened when they are needed.
    """

    def __init__(
        self,
        first_key: str,
        new_transport: NewTransport,
        unanswered: Callable[[], Iterable[OutgoingEntry]],
    ) -> None:
        self._first_key = first_key
        self._new_transport = new_transport
        self._unanswered = unanswered
        self._opening: dict[int, asyncio.Future[Transport]] = {}  # by slot; done, if it is open
        self._open: list[Transport] = []
        self._transports: dict[Channel, Transport] = {}
        self._opening_error: LinkError | None = None
        self._closed = False

    async def open(self, name: str) -> None:
        """Connect, with reply streams of this name. Raises LinkError."""
        self._name = name
        await self._transport_of(self._first_key)

    async def close(self) -> None:
        """As Transport.close."""
        self._closed = True
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        for transport in self._open:
            await transport.close()

    def abandon(self) -> None:
        """As Transport.abandon."""
        self._closed = True
        for opening in self._opening.values():
            opening.add_done_callback(_abandon_opened)

    def disown(self) -> None:
        """As Transport.disown."""
        self._closed = True
        for transport in self._open:
            transport.disown()

    async def _transport_of(self, key: str) -> Transport:
        slot = slot_of(key)
        opening = self._opening.get(slot)
        if opening is None:
            opening = self._opening[slot] = asyncio.ensure_future(self._open_transport(key))
        try:
            return await asyncio.shield(opening)
        except LinkError:
            if self._opening.get(slot) is opening:
                del self._opening[slot]  # the next call tries again
            raise

    async def _open_transport(self, key: str) -> Transport:
        transport = self._new_transport(
            key,
            lambda: [entry for entry in self._unanswered() if self._transports[entry.channel] is transport],
        )
        await transport.open(self._name)
        self._open.append(transport)
        return transport

    def add_channel(self, channel: Channel) -> None:
        """As Transport.add_channel. The channel's model was looked up: so its node is connected."""
        transport = self._opening[slot_of(channel.keys.requests)].result()
        self._transports[channel] = transport
        transport.add_channel(channel)

    def send(self, entries: Iterable[OutgoingEntry | SequencesEnded]) -> None:
        """As Transport.send."""
        divided: dict[Transport, list[OutgoingEntry | SequencesEnded]] = {}
        for entry in entries:
            divided.setdefault(self._transports[entry.channel], []).append(entry)
        for transport, entries_there in divided.items():
            transport.send(entries_there)

    def withdraw(self, channel: Channel, correlation_ids: Iterable[str]) -> None:
        """As Transport.withdraw."""
        self._transports[channel].withdraw(channel, correlation_ids)

    async def call_again(self, *command: Argument, key: str = "") -> Any:
        """As Transport.call_again, for a command with this `key`, or whose first argument is its key.

        One without arguments goes to all nodes that are connected; the reply is that of one, or an error.
        """
        if len(command) == 1:
            replies = await asyncio.gather(*[transport.call_again(*command) for transport in self._open])
            errors = [reply for reply in replies if isinstance(reply, CommandError)]
            return (errors or replies)[0]
        while not self._closed:
            try:
                transport = await self._transport_of(key or str(command[1]))
            except LinkError as error:
                self._opening_error = error
                await asyncio.sleep(with_jitter(_OPENING_PAUSE_S))
            else:
                self._opening_error = None
                return await transport.call_again(*command)
        raise UnavailableError("this client is closed")

    @property
    def is_full(self) -> bool:
        """Whether no more requests are accepted, because too many wait for any of the nodes."""
        return any(transport.is_full for transport in self._open)

    def full_error(self) -> UnavailableError:
        """Why no more requests are accepted."""
        return next(transport for transport in self._open if transport.is_full).full_error()

    def drop_unawaited(self) -> None:
        """As Transport.drop_unawaited."""
        for transport in self._open:
            transport.drop_unawaited()

    @property
    def connection_error(self) -> LinkError | None:
        """Why a connection is missing; None if none is."""
        errors = [transport.connection_error for transport in self._open]
        return next(filter(None, errors), self._opening_error)

    @property
    def losses(self) -> int:
        """How often any connection was lost."""
        return sum([transport.losses for transport in self._open])


def _abandon_opened(opening: asyncio.Future[Transport]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().abandon()
