"""Encoded requests -> entries: those of one iteration of the event loop share entries, and are sent after it.

What is done for each request is little: it gets a correlation ID and a target for its result, and is added to
an entry. All else, timeouts among it, is done for an entry.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count, islice
from typing import Any, Final
from weakref import WeakMethod

from carpool.client.absences import Absences
from carpool.client.awaited import AwaitedRequests
from carpool.client.cluster import ClusterTransport
from carpool.client.durability import Durability
from carpool.client.entries import (
    MAX_ENDED_SEQUENCES,
    Channel,
    Encoded,
    OutgoingEntry,
    OutgoingRun,
    SequencesEnded,
)
from carpool.client.options import check_correlation_id
from carpool.client.sinks import Sink
from carpool.client.streams import StreamTarget
from carpool.client.timeouts import Timeouts
from carpool.client.transport import Transport
from carpool.cluster import is_cluster
from carpool.errors import (
    CarpoolError,
    DeadlineExceededError,
    InvalidArgumentError,
    NoResultError,
    UnavailableError,
    UnconfirmedError,
)
from carpool.rows import LARGE_BODY_BYTES

WRITTEN_TOGETHER_MIN: Final = 64  # requests in full entries that are sent before the others
# Of a body. At a larger string, a Redis as ops/redis configures it closes the connection, each time anew.
STRING_BYTES_MAX: Final = 256 * 1024 * 1024


class Packer:
    """The requests of one producer, from `add` until each has its result or an error, or is withdrawn.

    A request is bytes here: neither its body nor its result is decoded. Its result goes to its target in its
    sink; what a target is, the sink knows. Used on the event loop's thread, after `open`.

    `first_key`: of a cluster, the key with whose node it connects first.
    `timed_out`: how many requests failed because no result came within their timeout.
    `is_inherited`: it was connected before a fork, so it is the parent process's.
    """

    def __init__(self, url: str, first_key: str, durability: Durability) -> None:
        self.timed_out = 0
        self.is_closed = self.is_inherited = False
        self.name = ""  # of the reply streams, and of what is sent: see `open`
        self._numbers = count()
        self._in_full = 0  # requests in those of `_collected` that are full
        # Entries to be sent after this iteration of the event loop, and those that take more requests.
        self._collected: list[OutgoingEntry | SequencesEnded] = []
        self._open: dict[tuple[Channel, str, float | None, Sink], OutgoingEntry] = {}
        # What the event loop has does not keep this.
        self.awaited = AwaitedRequests(weakly(self.withdraw))
        self._timeouts = Timeouts(weakly(self._on_timeout))
        self.transport = self._new_transport(url, first_key, durability)
        self._absences = Absences(self.transport.call_again)

    def _new_transport(
        self, url: str, first_key: str, durability: Durability
    ) -> Transport | ClusterTransport:
        on_results, on_rejected = self.awaited.on_results, self.awaited.fail
        parts = (url, on_results, on_rejected, weakly(self._on_unconfirmed))
        unanswered = self.awaited.entries_as_sent
        if not is_cluster(url):
            return Transport(*parts, unanswered, durability)
        return ClusterTransport(
            first_key,
            lambda key, unanswered_there: Transport(*parts, unanswered_there, durability, key),
            unanswered,
        )

    # --- from opening to closing ---------------------------------------------------------------------------

    def open(self) -> asyncio.Future[None]:
        """Connect, in this event loop. The future raises LinkError, and UnimplementedError."""
        self.loop = asyncio.get_running_loop()
        # Not before: each process that is forked from one with this producer needs a name of its own.
        self.name = f"py-{secrets.token_hex(8)}"
        return asyncio.ensure_future(self.transport.open(self.name))

    async def close(self) -> None:
        """Disconnect. Requests without a result fail, but are not withdrawn."""
        self.is_closed = True
        self.transport.send([entry for entry in self._collected if isinstance(entry, SequencesEnded)])
        await self.transport.close()
        self.fail_all("the client was closed before there was a result")

    def abandon(self) -> None:
        """As `close`, without waiting. Nobody has it any more, so nothing has to fail."""
        self.is_closed = True
        self.transport.abandon()
        self._timeouts.close()

    def disown(self) -> None:
        """This is the child of a fork, and the connections are its parent's: use them no more."""
        self.is_closed = self.is_inherited = True
        self.transport.disown()

    def fail_all(self, why: str) -> None:
        """Fail all requests without a result."""
        self.awaited.fail_all(why)
        self._timeouts.close()

    def check_open(self) -> None:
        """Raise UnavailableError if this is closed, and RuntimeError if it is a parent process's."""
        if self.is_inherited:
            raise RuntimeError(
                "this client was connected before a fork, so it is the parent process's: make a client in "
                "each process, or use it first after the fork"
            )
        if self.is_closed:
            raise UnavailableError("this client is closed")

    def check_loop(self) -> None:
        """Raise RuntimeError in another event loop than that of the connections. Done for each entry."""
        if asyncio.get_running_loop() is not self.loop:
            raise RuntimeError(
                "this AsyncClient is connected in another event loop (each asyncio.run has its own): make a "
                "client in each event loop, or use Client, which any number of threads may share"
            )

    @property
    def is_idle(self) -> bool:
        """Whether no request is to be sent, or has no result."""
        return not self.awaited and not self._collected

    # --- requests ------------------------------------------------------------------------------------------

    def add(
        self,
        channel: Channel,
        body: Encoded | tuple[str, bytes, bytes],
        fields: Mapping[str, Any],
        timeout_s: float | None,
        sink: Sink,
        target: Any,
        correlation_id: str | None = None,
    ) -> str:
        """Add a request; return its correlation ID. Raises InvalidArgumentError and UnavailableError.

        `fields`, `timeout_s`: as `options.read_options` returns them. `correlation_id`: the caller's own.
        """
        if self.is_closed:
            self.check_open()
        if self.transport.is_full:
            raise self.transport.full_error()
        name = f"{self.name}-{next(self._numbers)}"
        if correlation_id is None:
            correlation_id = name
        else:
            check_correlation_id(correlation_id, self.awaited.entries)
        content_type, head, rest = body
        is_large = len(rest) >= LARGE_BODY_BYTES
        if is_large and len(head) + len(rest) > STRING_BYTES_MAX:
            raise InvalidArgumentError(
                f"body: {len(rest)} bytes; at most {STRING_BYTES_MAX} are allowed: put it into object "
                "storage, and send its name"
            )
        key = (channel, content_type, timeout_s, sink)
        entry = self._open.get(key)
        if entry is None:
            self.check_loop()
            entry = self._open[key] = OutgoingEntry(channel, content_type, timeout_s, sink)
            self._collect(entry)
        if not is_large:
            has_room = entry.add(correlation_id, target, fields, head, rest)
        else:  # the name is this request's own, also if it has the correlation ID of another
            has_room = entry.add_stored(correlation_id, target, fields, head + rest, name)
        self.awaited.entries[correlation_id] = entry
        if not has_room:
            del self._open[key]
            self._on_full(len(entry.awaited))
        return correlation_id

    def add_rows(
        self,
        channel: Channel,
        rows: Encoded,
        fields: Mapping[str, Any],
        timeout_s: float | None,
        sink: Sink,
        targets: Sequence[Any],
    ) -> list[str]:
        """Add an entry of requests whose bodies have a common head and equal length: the rest of `rows` has
        these end to end. At most `channel.rows_max`. Returns their correlation IDs. Raises UnavailableError.
        """
        self.check_open()
        self.check_loop()
        if self.transport.is_full:
            raise self.transport.full_error()
        ids = [f"{self.name}-{number}" for number in islice(self._numbers, len(targets))]
        entry = OutgoingEntry(channel, rows.content_type, timeout_s, sink)
        entry.add_run(OutgoingRun(fields, rows.head, ids, [rows.rest]), targets)
        self.awaited.entries.update(dict.fromkeys(ids, entry))
        self._collect(entry)
        self._on_full(len(ids))
        return ids

    def end_sequence(self, channel: Channel, sequence_id: str) -> None:
        """End a sequence by force. In the request stream this stands after the requests added before, and
        before all others. Sequences that end in one iteration of the event loop, with no request in between,
        share an entry.
        """
        if self.is_closed:
            return
        last = self._collected[-1] if self._collected else None
        if (
            not isinstance(last, SequencesEnded)
            or last.channel is not channel
            or len(last.sequence_ids) >= MAX_ENDED_SEQUENCES
        ):
            last = SequencesEnded(channel)
            self._open.clear()
            self._collect(last)
        last.sequence_ids.append(sequence_id)

    def _collect(self, entry: OutgoingEntry | SequencesEnded) -> None:
        """Send an entry after everything that is ready in this iteration of the event loop has run."""
        if not self._collected:
            self.loop.call_soon(self.send_collected)
        self._collected.append(entry)

    def _on_full(self, requests: int) -> None:
        """An entry of this many requests is full. Send what is collected if that is worth a write of its own:
        then batches are under way while other requests are encoded."""
        self._in_full += requests
        if self._in_full >= WRITTEN_TOGETHER_MIN:
            self.send_collected()

    def send_collected(self) -> None:
        """Send what was added, now."""
        entries, self._collected = self._collected, []
        self._in_full = 0
        self._open.clear()
        if not self.is_closed:
            for entry in entries:
                if type(entry) is OutgoingEntry:
                    self._timeouts.start(entry, self.loop)
            self.transport.send(entries)

    # --- withdrawals, timeouts and lost connections --------------------------------------------------------

    def withdraw(self, correlation_id: str, target: Any) -> None:
        """Nobody wants the result of a request any more, if it has this target. If it waits, it will not be
        executed."""
        entry = self.awaited.remove(correlation_id, target)
        if entry is not None and entry.sent:
            self.transport.withdraw(entry.channel, [correlation_id])
        self.transport.drop_unawaited()

    def close_stream(self, target: StreamTarget) -> None:
        """The reader of a stream wants no more: withdraw its request."""
        target.close()
        if target.correlation_id is not None:
            self.withdraw(target.correlation_id, target)

    def withdraw_all(self, sink: Sink) -> None:
        """Withdraw all requests without a result whose results go to this sink."""
        for entry, correlation_ids in self.awaited.remove_all(sink):
            if entry.sent:
                self.transport.withdraw(entry.channel, correlation_ids)

    def _on_timeout(self, entry: OutgoingEntry) -> None:
        if entry.sent and self.transport.connection_error is None:
            self._absences.tell(entry.channel, partial(self._fail_late, entry))
        else:
            self._fail_late(entry, self.connection_cause())

    def _fail_late(self, entry: OutgoingEntry, cause: str) -> None:
        """No result came in time. `cause`: the end of the sentence that says so."""
        self.timed_out += len(entry.awaited)
        kind: type[CarpoolError] = NoResultError if entry.sent else DeadlineExceededError
        self.awaited.fail(entry, kind(f"no result within {entry.timeout_s:g} s{cause}"))
        self.transport.drop_unawaited()

    def connection_cause(self) -> str:
        """Why there is no connection, for the end of a sentence; empty if there is one."""
        error = self.transport.connection_error
        return f" ({error.detail})" if error else ""

    def _on_unconfirmed(self, entry: OutgoingEntry) -> None:
        """An entry that Redis may have accepted is to be sent again: see to what must not be executed twice.

        Requests of a sequence fail that have no index. Streams begin anew under other correlation IDs, as
        readers would get chunks of both executions.
        """
        for correlation_id in entry.sent_at_most_once():
            target = entry.awaited[correlation_id]
            self.awaited.remove(correlation_id, target)
            entry.sink.fail(target, _unconfirmed(correlation_id))
        if not entry.sink.takes_chunks:
            return
        unheard = [name for name, target in entry.awaited.items() if not target.index]  # others were accepted
        names: dict[str, str] = {}
        for correlation_id in unheard:
            target = entry.awaited[correlation_id]
            if correlation_id.startswith(f"{self.name}-"):
                target.correlation_id = names[correlation_id] = f"{self.name}-{next(self._numbers)}"
            else:
                self.awaited.remove(correlation_id, target)
                target.fail(_unconfirmed(correlation_id))
        self.awaited.rename(entry, names)
        self.transport.withdraw(entry.channel, unheard)


def _unconfirmed(correlation_id: str) -> UnconfirmedError:
    return UnconfirmedError(
        "the connection was lost before Redis confirmed the request", correlation_id=correlation_id
    )


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that does not keep its object. Once that is gone, a call does nothing."""
    reference = WeakMethod(method)

    def call(*arguments: Any) -> Any:
        found = reference()
        return None if found is None else found(*arguments)

    return call
