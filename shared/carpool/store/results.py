"""How results reach their producers: on lists of their own, or many in one entry of a reply stream.

Batchers and workers both write results: a worker by `commit` and `answer_ahead`, a batcher by `refuse` and
`answer_ahead`.

Why: docs/decisions/0007.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Self

from carpool.errors import OK
from carpool.keys import Keys, batch_stream
from carpool.messages.batches import Batch, BatchedRequest, tickets_of_each
from carpool.messages.results import Result, ResultColumns, RunResults, state_of
from carpool.messages.sequences import SequenceChange
from carpool.messages.settled import NOT_EXECUTED, Executed
from carpool.rows import Rows
from carpool.store.arguments import Group, ScriptKeys, change_args, group_list_args
from carpool.store.connection import Argument, Link, Script
from carpool.tickets import TicketRange
from carpool.wire.results import (
    encode_alike,
    encode_array_head,
    encode_columns,
    encode_columns_map,
    encode_envelope,
    encode_result,
    encode_results,
    split_envelope,
)

ENTRY_BYTES: Final = 16 * 1024 * 1024
WITHHELD_BYTES: Final = 1024 * 1024  # in one part; one script delivers about 8 MiB of them
WITHHELD_RESULTS: Final = 1000  # in one part
PROGRESS_TTL_MS: Final = 24 * 3600 * 1000
# The files that every script that delivers results needs.
DELIVER_IN_ORDER: Final = ("arguments", "record", "deliver", "ordering/tickets", "ordering/order")

_ANSWER: Final = Script("answer", after=("ownership", *DELIVER_IN_ORDER, "sequence", "statistics"))
RELEASE: Final = Script("ordering/release", after=DELIVER_IN_ORDER)


class Address(NamedTuple):
    """Where a result goes: to the stream `reply_to` or its own list; withheld in order if it has a ticket."""

    reply_to: str | None
    ticket: TicketRange | None

    @classmethod
    def of(cls, request: BatchedRequest) -> Self:
        """Where a request's result goes."""
        return cls(request.reply_to, request.ticket)


class SettledError(Exception):
    """The batch has been settled: each of its requests has its result."""


def addresses_of(batch: Batch) -> list[Address]:
    """Where the result of each request of a batch goes, by position."""
    addresses: list[Address] = []
    for run in batch.runs:
        if run.tickets is None:
            addresses += [Address(run.reply_to, None)] * len(run.correlation_ids)
        else:
            addresses += [Address(run.reply_to, ticket) for ticket in tickets_of_each(run)]
    return addresses


class AlikeResults(NamedTuple):
    """One result for several requests. Each gets it with its own correlation ID; none has a ticket."""

    reply_to: str | None
    correlation_ids: Sequence[str]
    result: Result


class Answer(NamedTuple):
    """One request's result ahead of its batch's commit; `position` is its place in the batch.

    `change`: what it does to the request's sequence, if it is a part of one. `total_us`: the time since the
    request's arrival, for the model's statistics.
    """

    position: int
    address: Address
    result: Result
    change: SequenceChange | None = None
    total_us: int = 0


class Start(NamedTuple):
    """A request of a batch is executed next, alone. `number`: how often it was started then, this start
    included. So a start that is recorded twice, because a reply was lost, counts once."""

    position: int
    number: int


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
    starting: Start | None,
    result_ttl_ms: int,
    executed: Executed = NOT_EXECUTED,
) -> set[int]:
    """Write results of some requests of a batch ahead of its commit, each once. A batcher has no `owner`.

    `executed`: how these were executed, for the model's statistics.
    Returns the positions that were written: the others had been answered. Raises FencedError if `owner` does
    not own the batch any more, and, without an owner, SettledError.
    """
    stream = batch_stream(keys, batch_id)
    script_keys = ScriptKeys(stream, keys.progress(batch_id), keys.order, keys.tickets, keys.statistics)
    args: list[Argument] = ["batcher", batch_id, "", ""] if owner is None else ["worker", batch_id, *owner]
    args += [result_ttl_ms, PROGRESS_TTL_MS, *(starting or ("", ""))]
    args += [executed.input_us, executed.compute_us, executed.output_us]
    args += group_list_args(
        (
            position,
            *group,
            "1" if result.status == OK else "",
            total_us,
            result.queue_us,
            *change_args(keys, script_keys, () if change is None else (change,)),
        )
        for position, address, result, change, total_us in answers
        for group in result_groups(keys, script_keys, [(address, result)])
    )
    outcome, *positions = link.run(_ANSWER, script_keys.keys, args)
    if outcome == b"FENCED":
        raise FencedError(batch_id)
    if outcome == b"SETTLED":
        raise SettledError(batch_id)
    return set(positions)


def release(link: Link, keys: Keys, *, free_lost: Sequence[str] = ()) -> FirstTicket | None:
    """Deliver the withheld results that have no unfinished ticket before them.

    With `free_lost`, all streams of requests and batches, also free the tickets of requests that were
    withdrawn by XDEL, or whose batch was deleted by hand. Returns the ticket that is first in the order
    afterwards, None if none is left.
    """
    while True:
        outcome, *first = link.run(RELEASE, [keys.order, keys.tickets, *free_lost], [])
        if outcome == b"EMPTY":
            return None
        if outcome == b"FIRST":
            tickets, entry_id, position, waiting_in = first
            return FirstTicket(tickets, entry_id.decode(), position, waiting_in.decode())


def result_groups(
    keys: Keys,
    script_keys: ScriptKeys,
    results: Iterable[tuple[Address, Result]],
    run_results: Iterable[RunResults] = (),
) -> Iterator[Group]:
    """The elements of a script's list of results: key index, kind, ranges of tickets and payload of each.

    Results for one reply stream share a group, and columns for it share another. `order.lua` divides the
    payload of those with tickets, if not all of them may be delivered yet.
    """
    unordered: dict[str | None, list[Result]] = {}  # by `reply_to`
    in_order: dict[str, list[tuple[TicketRange, Result]]] = {}
    columns: list[RunResults] = []
    addressed = list(results)
    for of_run in run_results:
        if of_run.are_columns:
            columns.append(of_run)
        elif of_run.tickets is None:
            unordered.setdefault(of_run.run.reply_to, []).extend(of_run.results())
        else:
            addresses = [Address(of_run.run.reply_to, ticket) for ticket in of_run.tickets.singles()]
            addressed += zip(addresses, of_run.results(), strict=True)
    for (reply_to, ticket), result in addressed:
        if ticket is None:
            unordered.setdefault(reply_to, []).append(result)
        elif reply_to is None:
            key, payload = script_keys.index(keys.result(result.correlation_id)), encode_result(result)
            yield key, "list", f"{ticket}={len(payload)}", payload
        else:
            in_order.setdefault(reply_to, []).append((ticket, result))
    yield from _unordered_groups(keys, script_keys, unordered)
    for stream, with_tickets in in_order.items():
        key = script_keys.index(keys.replies(stream))
        kind = _kind_of(stream, [result for _, result in with_tickets])
        for ranges, payload in _ordered_payloads(_successive(with_tickets)):
            yield key, kind, ranges, payload
    yield from _columns_groups(keys, script_keys, columns)


def alike_groups(
    keys: Keys, script_keys: ScriptKeys, alike: Iterable[AlikeResults]
) -> tuple[list[Group], list[Group]]:
    """Elements of a script's list of results, as `result_groups`, for reply streams; and of its list of alike
    results for lists of their own: the script itself writes the envelope of each, in about 3 us."""
    in_lists: list[Group] = []
    elements: dict[str, list[bytes]] = {}  # by reply stream
    named: set[str] = set()  # those that have the name of a request
    for reply_to, correlation_ids, result in alike:
        if reply_to is None:
            before_id = keys.result("")
            first = script_keys.append_all([before_id + name for name in correlation_ids])
            is_msgpack, head, tail = split_envelope(result, as_element=False)
            kind = "msgpack" if is_msgpack else "json"
            in_lists.append((first, len(correlation_ids), len(before_id.encode()), kind, head, tail))
        else:
            of_stream = elements.setdefault(reply_to, [])
            of_stream += encode_alike(result, correlation_ids)
            if reply_to == correlation_ids[0]:
                named.add(reply_to)
    streams: list[Group] = []
    for reply_to, of_stream in elements.items():
        payload = b"".join([encode_array_head(len(of_stream)), *of_stream])
        kind = "failed" if reply_to in named and len(of_stream) == 1 else "stream"
        streams.append((script_keys.index(keys.replies(reply_to)), kind, "", payload))
    return streams, in_lists


def _kind_of(reply_to: str, results: Sequence[Result]) -> str:
    """The kind of these results for a reply stream, as `deliver.lua` has it: the state of the request, if it
    is one whose name the stream has."""
    is_named = len(results) == 1 and results[0].correlation_id == reply_to
    return state_of(results[0]) if is_named else "stream"


def _unordered_groups(
    keys: Keys, script_keys: ScriptKeys, by_reply_to: Mapping[str | None, list[Result]]
) -> Iterator[Group]:
    for reply_to, results in by_reply_to.items():
        if reply_to is None:
            for result in results:
                key = script_keys.index(keys.result(result.correlation_id))
                yield key, "list", "", encode_result(result)
        else:
            key = script_keys.index(keys.replies(reply_to))
            for chunk in _limited_chunks(results):
                yield key, _kind_of(reply_to, chunk), "", encode_results(chunk)


class _Part(NamedTuple):
    """What is withheld and delivered as one: elements of a payload, encoded, and their range of tickets."""

    tickets: TicketRange
    elements: int
    encoded: bytes


def _successive(results: Iterable[tuple[TicketRange, Result]]) -> Iterator[_Part]:
    """Results for one stream; successive ones with successive tickets as one part."""
    entry_id, first, size_bytes = "", 0, 0
    envelopes: list[bytes] = []
    for ticket, result in results:
        count = len(envelopes)
        follows = ticket.first == first + count and ticket.entry_id == entry_id
        if count and not (follows and size_bytes <= WITHHELD_BYTES and count < WITHHELD_RESULTS):
            yield _Part(TicketRange(entry_id, first, count), count, b"".join(envelopes))
            envelopes, size_bytes = [], 0
        if not envelopes:
            entry_id, first, _ = ticket
        envelope = encode_envelope(result)
        envelopes.append(envelope)
        size_bytes += len(envelope)
    if envelopes:
        yield _Part(TicketRange(entry_id, first, len(envelopes)), len(envelopes), b"".join(envelopes))


def _ordered_payloads(parts: Iterable[_Part]) -> Iterator[tuple[str, bytes]]:
    """Ranges with the bytes of each in the payload, as `take_result` reads them, and that payload."""
    chunk: list[_Part] = []
    size_bytes = 0
    for part in parts:
        if chunk and size_bytes > ENTRY_BYTES:
            yield _ordered_payload(chunk)
            chunk, size_bytes = [], 0
        chunk.append(part)
        size_bytes += len(part.encoded)
    if chunk:
        yield _ordered_payload(chunk)


def _ordered_payload(parts: Sequence[_Part]) -> tuple[str, bytes]:
    ranges = [f"{entry_id}:{first}+{size}={len(encoded)}" for (entry_id, first, size), _, encoded in parts]
    head = encode_array_head(sum(part.elements for part in parts))
    return " ".join(ranges), b"".join([head, *(part.encoded for part in parts)])


def _columns_groups(keys: Keys, script_keys: ScriptKeys, columns: Iterable[RunResults]) -> Iterator[Group]:
    by_stream: dict[str, list[ResultColumns]] = {}
    in_order: dict[str, list[_Part]] = {}
    for results in columns:
        run, _, ids, bodies, tickets = results[:5]
        assert run.reply_to is not None and isinstance(bodies, Rows)
        served = results.batch_size, results.queue_us, results.compute_us
        of_run = ResultColumns(ids, results.content_type, bodies, *served, results.version)
        if tickets is None:
            by_stream.setdefault(run.reply_to, []).append(of_run)
            continue
        parts, start = in_order.setdefault(run.reply_to, []), 0
        for of_range in tickets.ranges:
            stop = start + of_range.size
            part = of_run if len(tickets.ranges) == 1 else _slice(of_run, start, stop)
            parts.append(_Part(of_range, 1, encode_columns_map(part)))
            start = stop
    for reply_to, of_stream in by_stream.items():
        yield script_keys.index(keys.replies(reply_to)), "columns", "", encode_columns(of_stream)
    for reply_to, of_stream_parts in in_order.items():
        key = script_keys.index(keys.replies(reply_to))
        for ranges, payload in _ordered_payloads(of_stream_parts):
            yield key, "columns", ranges, payload


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
