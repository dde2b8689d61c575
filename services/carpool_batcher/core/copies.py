"""Requests that were sent again while another copy waits or is in flight: all copies get one answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from carpool.messages.batches import Dispatch
from carpool.messages.results import UNANSWERED, Refusal
from carpool_batcher.core.decisions import Decision, copy_refusal
from carpool_batcher.core.waiting.copies_index import IdsInFlight, Separated, separate
from carpool_batcher.core.waiting.queue import Queue
from carpool_batcher.core.waiting.withdrawals import PendingWithdrawals

_Known = dict[str | None, set[str]]  # correlation IDs by address


class Copies:
    """Says which requests were sent again, and keeps them from a second answer. Not those of sequences,
    which know their copies themselves."""

    def __init__(self, queue: Queue, in_flight: IdsInFlight, withdrawals: PendingWithdrawals) -> None:
        self._queue = queue
        self._in_flight = in_flight
        self._withdrawals = withdrawals

    def is_copy(self, request: tuple[str | None, str]) -> bool:
        """Whether another copy of a request, by address and correlation ID, waits or is in flight. What is
        being withdrawn does not count: its producer may send a new request under the same ID."""
        if self._withdrawals.arrived_later and request[1] in self._withdrawals.arrived_later:
            return False
        return request in self._queue.ids or request in self._in_flight

    def answered_once(self, decisions: list[Decision]) -> list[Decision]:
        """These decisions, without the answers to requests of which another copy waits, is to be dispatched
        or is in flight: its answer is theirs."""
        if Refusal not in map(type, decisions):
            return decisions
        known: _Known = {}
        if self._queue.ids.is_repeated_popped:  # else no copy of a refused request is to be dispatched
            for run in [run for one in decisions if type(one) is Dispatch for run in one.runs]:
                known.setdefault(run.reply_to, set()).update(run.correlation_ids)
        decided: list[Decision] = []
        for one in decisions:
            if type(one) is Refusal:
                decided += self.answer_once(one, known)
            else:
                decided.append(one)
        return decided

    def answer_once(self, refused: Refusal, known: _Known | None = None) -> Iterable[Refusal]:
        """A Refusal of requests that do not wait, divided by whether they get this answer. They do not if
        they are `known`, to which they are added, or were sent again."""
        reply_to = refused.reply_to
        known_names = set() if known is None else known.setdefault(reply_to, set())
        stand_in = refused.entry.id if refused.run is None else ""  # of each request with an invalid ID
        different = set(refused.correlation_ids)
        if (
            len(different) == len(refused.correlation_ids)
            and stand_in not in different
            and known_names.isdisjoint(different)
            and self._queue.ids.are_new(reply_to, different)
            and self._in_flight.are_new(reply_to, different)
        ):
            known_names |= different
            return (refused,)
        again: list[int] = []
        for at, name in enumerate(refused.correlation_ids):
            if name == stand_in:
                continue
            if name in known_names or self.is_copy((reply_to, name)):
                again.append(at)
            known_names.add(name)
        if not again:
            return (refused,)
        names, run = refused.correlation_ids, refused.run
        if len(again) == len(names):
            return (unanswered(refused, names),)
        if run is not None:
            copies = run.take(again)
            return copy_refusal(copies), refused._replace(correlation_ids=run.correlation_ids)
        removed = frozenset(again)
        others = [name for at, name in enumerate(names) if at not in removed]
        return unanswered(refused, [names[at] for at in again]), refused._replace(correlation_ids=others)

    def separate(self, dispatches: Sequence[Dispatch]) -> Separated:
        """These dispatches, without requests that are in one of them already. Almost always O(1)."""
        if not self._queue.ids.is_repeated_popped:
            return Separated(dispatches, ())
        self._queue.ids.is_repeated_popped = False
        return separate(dispatches)


def unanswered(refused: Refusal, names: Sequence[str]) -> Refusal:
    """A Refusal of these of its requests, which get no answer and break no sequence."""
    return refused._replace(
        correlation_ids=names, status=UNANSWERED, reason="duplicate", detail="", breaks=None
    )
