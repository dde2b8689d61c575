"""Checks the answers to requests of sequences against what they must be. Pure: its history is not in Redis.

A producer records each request, in the order of the request stream, with `sent`; a reader each envelope, in
the order in which it came. `faults` then goes through each sequence as a single process would that serves it
alone: what it answers is known (`support.models.keeping`), so one request that was lost, doubled, reordered
or served with another state shows in all that follow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from carpool.errors import ABORTED, INVALID_ARGUMENT, OK
from support.models.keeping import INITIAL, answer_of, digest_after

Envelope = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentRequest:
    """A request of a sequence. `may_end`: how it may end by itself, beside OK; this breaks its sequence.

    `index`: all requests of a sequence have one, or none has. It is None for an `idle` sequence, which is
    no request: the sequence had ended before what follows, because nothing came.
    """

    correlation_id: str
    sequence_id: str
    text: str = ""
    starts: bool = False
    ends: bool = False
    index: int | None = None
    may_end: Collection[str] = ()
    is_idle: bool = False


class SequenceChecker:
    """The history: what was sent, and what was answered. It may be looked at while other threads record."""

    def __init__(self) -> None:
        self.requests: dict[str, SentRequest] = {}
        self.answers: defaultdict[str, list[Envelope]] = defaultdict(list)
        self._sequences: defaultdict[str, list[SentRequest]] = defaultdict(list)
        self._read: list[str] = []  # correlation IDs, in the order of the answers
        self._beside: set[str] = set()  # sequences that had two requests in flight
        self.most_in_flight = 0

    def sent(self, request: SentRequest) -> None:
        """This request is about to be sent, after all that were recorded before."""
        self.requests[request.correlation_id] = request
        self._sequences[request.sequence_id].append(request)

    def idle(self, sequence_id: str) -> None:
        """The sequence was ended, because nothing came."""
        self._sequences[sequence_id].append(SentRequest("", sequence_id, is_idle=True))

    def read(self, correlation_id: str, found: Envelope, *, is_in_order: bool = True) -> None:
        """A reader found this under the request's ID. `is_in_order`: after all that it read before."""
        self.answers[correlation_id].append(found)
        if is_in_order:
            self._read.append(correlation_id)

    def in_flight(self, sequence_ids: Iterable[str]) -> None:
        """Requests of these sequences were in flight at one moment."""
        counts = Counter(sequence_ids)
        self.most_in_flight = max(self.most_in_flight, counts.total())
        self._beside.update(name for name, count in counts.items() if count > 1)

    def unanswered(self) -> list[str]:
        """The correlation IDs of requests without an answer."""
        return [name for name in list(self.requests) if name not in self.answers]

    def statuses(self) -> Counter[str]:
        """How the requests ended."""
        return Counter(found["status"] for of_one in list(self.answers.values()) for found in of_one)

    def faults(self) -> dict[str, list[str]]:
        """The IDs of requests, or of sequences, by what is wrong; empty if all is as it should be."""
        faults: defaultdict[str, list[str]] = defaultdict(list)
        for requests in list(self._sequences.values()):
            for correlation_id, fault in self._faults_of(requests):
                faults[fault].append(correlation_id)
        for correlation_id, fault in self._order_faults():
            faults[fault].append(correlation_id)
        faults_of_nobody = sorted(set(self.answers) - self.requests.keys())
        if faults_of_nobody:
            faults["never sent"] = faults_of_nobody
        if self._beside:
            faults["two in flight"] = sorted(self._beside)
        return dict(faults)

    def story(self) -> str:
        """For a person: how the requests ended of each sequence that has a fault."""
        names = {name for of_fault in self.faults().values() for name in of_fault}
        sequence_ids = {self.requests[name].sequence_id if name in self.requests else name for name in names}
        lines: list[str] = []
        for sequence_id in sorted(sequence_ids):
            for request in self._sequences[sequence_id]:
                mark = "start" if request.starts else "end" if request.ends else ""
                answers = [
                    f"{found['status']} {found.get('body') or found.get('detail') or ''}"
                    for found in self.answers.get(request.correlation_id, [])
                ]
                lines.append(f"{request.correlation_id} {mark} {request.may_end}: {' | '.join(answers)}")
        return "\n".join(lines)

    def _faults_of(self, requests: list[SentRequest]) -> Iterator[tuple[str, str]]:
        """Follow one sequence, in the order in which its requests are to be processed."""
        if all(request.index is not None for request in requests):
            requests = sorted(requests, key=lambda request: request.index or 0)
        digest, count, refused_with = INITIAL, 0, INVALID_ARGUMENT  # '' while the sequence goes on
        for request in requests:
            if request.is_idle:
                refused_with = INVALID_ARGUMENT
                continue
            answers = self.answers.get(request.correlation_id, [])
            if len(answers) != 1:
                yield request.correlation_id, "answered twice" if answers else "lost"
                if not answers:
                    continue
            status, body = answers[0]["status"], answers[0].get("body")
            if request.starts:
                digest, count, refused_with = INITIAL, 0, ""
            if refused_with:
                if status != refused_with and (status == OK or status not in request.may_end):
                    yield request.correlation_id, f"{status}, not {refused_with}"
                continue
            digest, count = digest_after(request.sequence_id, digest, request.text), count + 1
            if status == OK:
                if body != answer_of(count, digest):
                    yield request.correlation_id, "wrong answer"
                refused_with = INVALID_ARGUMENT if request.ends else ""
            else:
                if status not in request.may_end:
                    yield request.correlation_id, f"{status}, but nothing was broken"
                refused_with = ABORTED

    def _order_faults(self) -> Iterator[tuple[str, str]]:
        """Of each sequence, what was OK must have been answered in its order."""
        ranks: dict[str, int] = {}
        for requests in list(self._sequences.values()):
            for at, request in enumerate(requests):
                ranks[request.correlation_id] = at if request.index is None else request.index
        latest: dict[str, int] = {}
        for correlation_id in list(self._read):
            if correlation_id not in ranks or self.answers[correlation_id][0]["status"] != OK:
                continue
            request, rank = self.requests[correlation_id], ranks[correlation_id]
            if rank < latest.get(request.sequence_id, 0):
                yield correlation_id, "out of order"
            latest[request.sequence_id] = rank
