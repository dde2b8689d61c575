"""How results get to their producers: on lists of their own, or many in one entry of a reply stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, Self

from carpool.keys import Keys
from carpool.messages import BatchedRequest, Request, Result
from carpool.store.connection import Argument, Link, Script
from carpool.wire.results import encode_envelope, encode_result, encode_results

ENTRY_BYTES: Final = 16 * 1024 * 1024
PROGRESS_TTL_MS: Final = 24 * 3600 * 1000
RESULT_ARGS: Final = 4
IN_ORDER: Final = ("deliver", "ordering/move", "ordering/order")  # what scripts need that deliver results

_ANSWER: Final = Script("answer", after=IN_ORDER)
_RELEASE: Final = Script("ordering/release", after=IN_ORDER)


class Address(NamedTuple):
    """Where a result goes: to the stream `reply_to` or its own list; withheld in order if it has a ticket."""

    reply_to: str | None
    ticket: str | None

    @classmethod
    def of(cls, request: Request | BatchedRequest) -> Self:
        """Where a request's result goes."""
        return cls(request.reply_to, request.ticket)


class Answer(NamedTuple):
    """One request's result ahead of its batch's commit; `position` is its place in the batch."""

    position: int
    address: Address
    result: Result


class FencedError(Exception):
    """The batch belongs to another worker now: its lease ran out here. What was computed is dropped."""


class ScriptKeys:
    """KEYS of a script, each once, with its index as Lua counts."""

    def __init__(self, *keys: str) -> None:
        self.keys = list(keys)
        self._index: dict[str, int] = {}

    def index(self, key: str) -> int:
        """The index of `key`, which is added if it is new."""
        at = self._index.get(key)
        if at is None:
            self.keys.append(key)
            at = self._index[key] = len(self.keys)
        return at


def answer(
    link: Link,
    keys: Keys,
    consumer: str,
    batch_id: str,
    epoch: int,
    answers: Sequence[Answer],
    starting: int | None,
    result_ttl_ms: int,
) -> set[int]:
    """Write results of some requests of a batch ahead of its commit, each once.

    Returns the positions that were written: the others had been answered. Raises FencedError.
    """
    script_keys = ScriptKeys(keys.batches, keys.progress(batch_id), keys.order, keys.held)
    args: list[Argument] = [consumer, batch_id, epoch, result_ttl_ms, PROGRESS_TTL_MS]
    args += ["" if starting is None else starting, len(answers)]
    for position, address, result in answers:
        args += [position, *result_args(keys, script_keys, [(address, result)])]
    answered = link.run(_ANSWER, script_keys.keys, args)
    if answered == b"FENCED":
        raise FencedError(batch_id)
    return set() if answered == b"SETTLED" else set(answered)


def release(link: Link, keys: Keys, *, free_lost: bool = False) -> str:
    """Deliver all withheld results whose turn it is. With `free_lost` also free the tickets of requests that
    were withdrawn by XDEL, or whose batch was deleted by hand.

    Returns where the request is whose turn it is: 'w' and its entry, 'b' and its batch, '' if there is none.
    """
    where = [keys.requests, keys.batches] if free_lost else []
    while (first := link.run(_RELEASE, [keys.order, keys.held, *where], [])) == 1:
        pass
    return str(first.decode())


def result_args(
    keys: Keys, script_keys: ScriptKeys, results: Iterable[tuple[Address, Result]]
) -> list[Argument]:
    """Key index, kind, ticket and payload of each list; of each reply stream once for all its results.

    RESULT_ARGS for each. A result with a ticket is sent alone, as an envelope: order.lua packs what it can.
    """
    args: list[Argument] = []
    by_stream: dict[str, list[Result]] = {}
    for (reply_to, ticket), result in results:
        if reply_to is None:
            key = script_keys.index(keys.result(result.correlation_id))
            args += [key, "list", ticket or "", encode_result(result)]
        elif ticket is not None:
            args += [script_keys.index(keys.replies(reply_to)), "stream", ticket, encode_envelope(result)]
        else:
            of_stream = by_stream.get(reply_to)
            if of_stream is None:
                by_stream[reply_to] = [result]
            else:
                of_stream.append(result)
    for reply_to, of_stream in by_stream.items():
        key = script_keys.index(keys.replies(reply_to))
        for some in _of_moderate_size(of_stream):
            args += [key, "stream", "", encode_results(some)]
    return args


def _of_moderate_size(results: list[Result]) -> Iterable[list[Result]]:
    """Results for entries of about ENTRY_BYTES: Redis takes no more than 512 MiB in one string."""
    some: list[Result] = []
    size_bytes = 0
    for result in results:
        if some and size_bytes > ENTRY_BYTES:
            yield some
            some, size_bytes = [], 0
        some.append(result)
        size_bytes += len(result.body or b"")
    if some:
        yield some
