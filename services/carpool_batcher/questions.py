"""Questions where a request is, and the answers: what a batcher knows of it.

Whether an ID is known costs next to nothing. Where a waiting request stands takes a search through what
waits, in pieces, for all questions together, until it is found. Then it is counted what goes before each,
which takes as long for every one: once that took a while, the others are told the rest. After that, the
next search waits for a multiple of the time that this one took, so that questions delay no request by much.

Why: docs/decisions/0115.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from itertools import islice
from typing import Any, Final

from carpool.clock import RedisClock
from carpool.keys import CORRELATION_ID
from carpool.messages.requests import Run
from carpool.messages.settled import WhereAsked
from carpool.store.batcher import BatcherStore
from carpool.store.connection import CommandError
from carpool.wire.whereabouts import ANSWER_TTL_MS, FOUND_MAX, BatcherAnswer, InFlight, Waiting
from carpool_batcher.core.explaining import explain
from carpool_batcher.core.scheduler import Scheduler
from carpool_batcher.recent import Recent

QUESTIONS_MAX: Final = 64  # that are not answered yet; those that come then are never answered
PIECE_RUNS: Final = 2048  # a millisecond or two
PAUSE_RATIO: Final = 10  # of the pause after a search to the time that it took; but at most
COUNT_US_MAX: Final = 50_000  # in which it is counted what goes before requests that are asked for together
PAUSE_US_MAX: Final = 500_000  # so long: on a busy machine a search takes long, and little of a processor

_Found = dict[str, list[tuple[Run, int]]]  # by correlation ID, runs and the index of the request in each


class Questions:
    """Those about one model. `due_us`: when they are to be answered; None: there are none."""

    def __init__(
        self,
        store: BatcherStore,
        scheduler: Scheduler,
        recent: Recent,
        clock: RedisClock,
        log: Any,
        is_reading: Callable[[], bool],
    ) -> None:
        """`is_reading`: whether requests may wait that the batcher has not read yet."""
        self._store = store
        self._scheduler = scheduler
        self._recent = recent
        self._clock = clock
        self._log = log
        self._is_reading = is_reading
        self._asked: list[WhereAsked] = []
        self._not_before_us = 0

    def add(self, question: WhereAsked) -> None:
        """Somebody asks. Names that are not valid, or too many questions, get no answer."""
        is_valid = CORRELATION_ID.fullmatch(question.correlation_id) and CORRELATION_ID.fullmatch(
            question.answer
        )
        if is_valid and len(self._asked) < QUESTIONS_MAX:
            self._asked.append(question)

    @property
    def due_us(self) -> int | None:
        return self._not_before_us if self._asked else None

    def answer(self) -> Generator[None]:
        """Answer those that are due, in pieces. Between them nothing may change."""
        began_us = self._clock.now_us()
        if not self._asked or began_us < self._not_before_us:
            return
        asked, self._asked = self._asked, []
        found = yield from self._search({question.correlation_id for question in asked})
        count_until_us = self._clock.now_us() + COUNT_US_MAX
        for question in asked:
            yield from self._publish(question, found.get(question.correlation_id, ()), count_until_us)
        ended_us = self._clock.now_us()
        self._not_before_us = ended_us + min(PAUSE_US_MAX, PAUSE_RATIO * (ended_us - began_us))

    def _search(self, names: set[str]) -> Generator[None, None, _Found]:
        """The waiting requests with these IDs. O(1) if none waits; else O(all that wait), until all that are
        known to wait have been found."""
        queue, found = self._scheduler.queue, _Found()
        left: float = math.inf  # of sequences it is not known which IDs wait
        if not self._scheduler.kind.has_sequences:
            left = sum(map(queue.ids.count_of_name, names))
        if not left:
            return found
        runs, has_none = queue.runs(), names.isdisjoint
        while left > 0 and (piece := list(islice(runs, PIECE_RUNS))):
            for run in [run for run in piece if not has_none(run.correlation_ids)]:
                for index, name in enumerate(run.correlation_ids):
                    if name in names:
                        left -= 1
                        if len(of_name := found.setdefault(name, [])) < FOUND_MAX:
                            of_name.append((run, index))
            yield
        return found

    def _publish(
        self, question: WhereAsked, found: Sequence[tuple[Run, int]], count_until_us: int
    ) -> Generator[None]:
        name, scheduler = question.correlation_id, self._scheduler
        waiting: list[Waiting] = []
        for run, index in found:
            before = None
            if self._clock.now_us() < count_until_us:
                before = yield from scheduler.requests_before(run, index)
            waiting.append(self._waiting(run, before))
        answer = BatcherAnswer(
            self._store.name,
            self._clock.now_us(),
            tuple(waiting),
            tuple([self._in_flight(*one) for one in scheduler.in_flight.find(name)][:FOUND_MAX]),
            self._recent.find_refused(name),
            is_reading=self._is_reading(),
            withheld=scheduler.queue.withheld,
        )
        try:
            self._store.publish_answer(question.answer, answer.encode(), ANSWER_TTL_MS)
        except CommandError as error:  # its rules in Redis are those of an older version, say
            self._log.warning("question not answered", reason=str(error))

    def _waiting(self, run: Run, before: tuple[int, bool] | None) -> Waiting:
        why = explain(self._scheduler, run, self._clock.now_us())
        return Waiting(
            run.lane,
            run.tenant,
            run.priority,
            run.arrival_us,
            run.deadline_us,
            why.sentence,
            why.until_us,
            None if before is None else before[0],
            before_is_least=before is not None and not before[1],
            version=run.version,
            sequence="" if run.sequence is None else run.sequence.sequence_id,
            reply_to=run.reply_to or "",
        )

    def _in_flight(self, batch_id: str, position: int) -> InFlight:
        batch = self._scheduler.in_flight.batches[batch_id]
        deadlines = [
            run.deadline_us for first, run in batch.expiring.items() if first <= position < first + len(run)
        ]
        deadline_us = deadlines[0] if deadlines else None
        return InFlight(
            batch_id, position, batch.size, batch.dispatched_us, batch.lane, batch.version, deadline_us
        )
