"""How results reach their producers: on lists of their own, or many in one entry of a reply stream.

Batchers and workers both write results: a worker by `commit` and `answer_ahead`, a batcher by `refuse` and
`answer_ahead`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Self

from carpool.keys import Keys
from carpool.messages import (
    Batch,
    BatchedRequest,
    Result,
    ResultColumns,
    RunColumns,
    TicketRange,
    tickets_of_each,
)
from carpool.store.arguments import Group, ScriptKeys, group_list_args
from carpool.store.connection import Argument, Link, Script
from carpool.wire.results import (
    encode_columns,
    encode_columns_map,
    encode_envelope,
    encode_result,
    encode_results,
)

ENTRY_BYTES: Final = 16 * 1024 * 1024
WITHHELD_BYTES: Final = 1024 * 1024  # together; one script delivers about 8 MiB of them
PROGRESS_TTL_MS: Final = 24 * 3600 * 1000
# The files that every script that delivers results needs.
DELIVER_IN_ORDER: Final = ("arguments", "deliver", "ordering/tickets", "ordering/order")

_ANSWER: Final = Script("answer", after=("ownership", *DELIVER_IN_ORDER))
_RELEASE: Final = Script("ordering/release", after=DELIVER_IN_ORDER)


class Address(NamedTuple):
    """Where a result goes: to the stream `reply_to` or its own list; withheld in order if it has a ticket."""

    reply_to: str | None
    ticket: TicketRange | None

    @classmethod
    def of(cls, request: BatchedRequest) -> Self:
        """Where a request's result goes."""
        return cls(request.reply_to, request.ticket)


def addresses_of(batch: Batch) -> list[Address]:
    """Where the result of each request of a batch goes, by position."""
    addresses: list[Address] = []
    for run in batch.runs:
        if run.tickets is None:
            addresses += [Address(run.reply_to, None)] * len(run.correlation_ids)
        else:
            addresses += [Address(run.reply_to, ticket) for ticket in tickets_of_each(run)]
    return addresses


class Answer(NamedTuple):
    """One request's result ahead of its batch's commit; `position` is its place in the batch."""

    position: int
    address: Address
    result: Result


class Owner(NamedTuple):
    """A worker's claim to a batch: the consumer that took it, and the epoch at which it did."""

    consumer: str
    epoch: int


class FirstTicket(NamedTuple):
    """The first ticket in the order of results: its request is in flight, or waits in the entry `waiting_in`.

    `tickets` is the number of all: of requests that wait or are in flight, and of withheld results.
    """

    tickets: int
    entry_id: str
    position: int
    waiting_in: str


class FencedError(Exception):
    """The batch belongs to another worker now: the lease of this one ran out. Its results are dropped."""


def answer_ahead(
    link: Link,
    keys: Keys,
    owner: Owner | None,
    batch_id: str,
    answers: Sequence[Answer],
    starting: int | None,
    result_ttl_ms: int,
) -> set[int]:
    """Write results of some requests of a batch ahead of its commit, each once. A batcher has no `owner`.

    Returns the positions that were written: the others had been answered, or the batch has been settled.
    Raises FencedError if `owner` does not own the batch any more.
    """
    script_keys = ScriptKeys(keys.batches, keys.progress(batch_id), keys.order, keys.held)
    args: list[Argument] = ["batcher", batch_id, "", ""] if owner is None else ["worker", batch_id, *owner]
    args += [result_ttl_ms, PROGRESS_TTL_MS, "" if starting is None else starting]
    args += group_list_args(
        (position, *group)
        for position, address, result in answers
        for group in result_groups(keys, script_keys, [(address, result)])
    )
    outcome, *positions = link.run(_ANSWER, script_keys.keys, args)
    if outcome == b"FENCED":
        raise FencedError(batch_id)
    return set(positions)


def release(link: Link, keys: Keys, *, free_lost: bool = False) -> FirstTicket | None:
    """Deliver the withheld results that have no unfinished ticket before them.

    With `free_lost` also free the tickets of requests that were withdrawn by XDEL, or whose batch was deleted
    by hand. Returns the ticket that is first in the order afterwards, None if none is left.
    """
    streams = [keys.requests, keys.batches] if free_lost else []
    while True:
        outcome, *first = link.run(_RELEASE, [keys.order, keys.held, *streams], [])
        if outcome == b"EMPTY":
            return None
        if outcome == b"FIRST":
            tickets, entry_id, position, waiting_in = first
            return FirstTicket(tickets, entry_id.decode(), position, waiting_in.decode())


def result_groups(
    keys: Keys,
    script_keys: ScriptKeys,
    results: Iterable[tuple[Address, Result]],
    columns: Iterable[RunColumns] = (),
) -> Iterator[Group]:
    """The elements of a script's list of results: key index, kind, range of tickets and payload of each.

    Results for one reply stream share a group, and columns for it share another. With tickets, successive
    ones share a group, whose payload is what `order.lua` puts into an array when it delivers them.
    """
    yield from _columns_groups(keys, script_keys, columns)
    by_stream: dict[str, list[Result]] = {}
    in_order: list[tuple[str, TicketRange, Result]] = []
    for (reply_to, ticket), result in results:
        if reply_to is None:
            key = script_keys.index(keys.result(result.correlation_id))
            yield key, "list", "" if ticket is None else str(ticket), encode_result(result)
        elif ticket is not None:
            in_order.append((reply_to, ticket, result))
        else:
            of_stream = by_stream.get(reply_to)
            if of_stream is None:
                by_stream[reply_to] = [result]
            else:
                of_stream.append(result)
    for reply_to, of_stream in by_stream.items():
        key = script_keys.index(keys.replies(reply_to))
        for chunk in _limited_chunks(of_stream):
            yield key, "stream", "", encode_results(chunk)
    for reply_to, tickets, successive in _successive(in_order):
        payload = b"".join(map(encode_envelope, successive))
        yield script_keys.index(keys.replies(reply_to)), "stream", str(tickets), payload


def _successive(
    in_order: Iterable[tuple[str, TicketRange, Result]],
) -> Iterator[tuple[str, TicketRange, list[Result]]]:
    """Successive results for one stream that have successive tickets, with their range of these."""
    stream, entry_id, first, size_bytes = "", "", 0, 0
    group: list[Result] = []
    for reply_to, ticket, result in in_order:
        follows = ticket.first == first + len(group) and ticket.entry_id == entry_id and reply_to == stream
        if group and not (follows and size_bytes <= WITHHELD_BYTES):
            yield stream, TicketRange(entry_id, first, len(group)), group
            group, size_bytes = [], 0
        if not group:
            stream, (entry_id, first, _) = reply_to, ticket
        group.append(result)
        size_bytes += len(result.body or b"")
    if group:
        yield stream, TicketRange(entry_id, first, len(group)), group


def _columns_groups(keys: Keys, script_keys: ScriptKeys, columns: Iterable[RunColumns]) -> Iterator[Group]:
    by_stream: dict[str, list[ResultColumns]] = {}
    for run, _, of_run, tickets in columns:
        assert run.reply_to is not None
        if tickets is None:
            by_stream.setdefault(run.reply_to, []).append(of_run)
            continue
        key, start = script_keys.index(keys.replies(run.reply_to)), 0
        for of_range in tickets.ranges:
            stop = start + of_range.size
            part = of_run if len(tickets.ranges) == 1 else _slice(of_run, start, stop)
            yield key, "columns", str(of_range), encode_columns_map(part)
            start = stop
    for reply_to, of_stream in by_stream.items():
        yield script_keys.index(keys.replies(reply_to)), "columns", "", encode_columns(of_stream)


def _slice(columns: ResultColumns, start: int, stop: int) -> ResultColumns:
    ids = columns.correlation_ids[start:stop]
    return columns._replace(correlation_ids=ids, rows=columns.rows.slice(start, stop))


def _limited_chunks(results: list[Result]) -> Iterable[list[Result]]:
    """Results for entries of about ENTRY_BYTES: Redis takes no more than 512 MiB in one string."""
    chunk: list[Result] = []
    size_bytes = 0
    for result in results:
        if chunk and size_bytes > ENTRY_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append(result)
        size_bytes += len(result.body or b"")
    if chunk:
        yield chunk
