"""A producer of interleaved sequences while a test causes faults, a reader of their answers, and a watcher.

    checker = SequenceChecker()
    with SequenceLoad(stack, "Keeping", checker) as load:
        load.wait_for_more(10)          # requests that were answered
        ...
    assert checker.faults() == {}

Sequences differ: some begin anew in the middle, some have a request after their end, some have an index and
come in the wrong order, and in part twice. With `fails`, some of their requests raise, expire or are
withdrawn.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

import msgpack
from redis import Redis, ResponseError

from carpool.errors import CANCELLED, DEADLINE_EXCEEDED, INTERNAL, INVALID_ARGUMENT
from carpool.keys import Keys
from carpool.wire.batches import decode_batch
from support.load import decoded
from support.sequence_checker import SentRequest, SequenceChecker
from support.stack import Stack
from support.waiting import EVENTUALLY_S, wait_until
from support.wire import envelopes

ANSWERED_S: Final = EVENTUALLY_S
INTERVAL_S: Final = 0.004
OPEN_SEQUENCES: Final = 20
UNANSWERED_MAX: Final = 80
SLEEP_S: Final = 0.003

Fields = dict[str, Any]


class Planned(NamedTuple):
    """A request that is yet to be sent: what is expected of it, and its fields. `times`: of sending it."""

    request: SentRequest
    fields: Fields
    withdraws: bool = False
    times: int = 1


class SequenceLoad:
    """See the module. It uses plain XADD, in transactions, so that it knows exactly what was accepted."""

    def __init__(
        self,
        stack: Stack,
        model: str,
        checker: SequenceChecker,
        *,
        name: str = "load",
        fails: bool = False,
        answered_s: float = ANSWERED_S,
    ) -> None:
        """`answered_s`: how long to wait at the end for answers that are missing."""
        self._answered_s = answered_s
        self._url, self._keys, self._checker = stack.url, Keys(model), checker
        self._name, self._fails = name, fails
        self._open: list[list[Planned]] = []  # what is left of each sequence
        self._stop, self._drained = threading.Event(), threading.Event()
        self._sent = 0
        self._threads = [
            threading.Thread(target=self._run, args=(run,), name=run.__name__)
            for run in (self._send, self._read, self._watch)
        ]
        self.errors: list[BaseException] = []
        self.answered = 0
        self.refused = 0  # times that Redis took nothing
        self.unaccepted: frozenset[str] = frozenset()  # what it is to take next

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        self.wait_for_more(UNANSWERED_MAX // 2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send what is left of the open sequences, and wait for all answers."""
        self._stop.set()
        if error is not None:
            self._drained.set()
        for thread in self._threads:
            thread.join(2 * ANSWERED_S)
            assert not thread.is_alive()
        if error is None:
            assert not self.errors, self.errors

    def wait_for_more(self, count: int) -> None:
        """Wait until `count` more requests are answered."""
        target = self.answered + count
        wait_until(
            lambda: self.answered >= target or self.errors,
            description=f"{count} more requests of sequences are answered",
            timeout_s=ANSWERED_S,
        )
        assert not self.errors, self.errors

    def accepted_unanswered(self) -> list[str]:
        """Requests that must be answered without any other one: those with an index may wait for one."""
        names = [name for name in self._checker.unanswered() if name not in self.unaccepted]
        return [name for name in names if self._checker.requests[name].index is None]

    def _run(self, target: Callable[[Any], None]) -> None:
        redis = Redis.from_url(self._url, protocol=2, socket_timeout=30)
        try:
            target(redis)
        except BaseException as error:  # shown by the test
            self.errors.append(error)
            self._drained.set()
        finally:
            redis.close()

    # --- sending -------------------------------------------------------------------------------------------

    def _send(self, redis: Any) -> None:
        plans = planned_sequences(self._name, fails=self._fails)
        while self._open or not self._stop.is_set():
            while len(self._open) < OPEN_SEQUENCES and not self._stop.is_set():
                self._open.append(next(plans))
            if self._sent - self.answered < UNANSWERED_MAX:
                self._send_some(redis)
                self._open = [rest for rest in self._open if rest]
            if self._drained.wait(INTERVAL_S):
                return
        with contextlib.suppress(AssertionError):  # the checker says which are lost
            wait_until(
                lambda: not self._checker.unanswered(),
                description=f"all of {self._sent} requests are answered",
                timeout_s=self._answered_s,
            )
        self._drained.set()

    def _send_some(self, redis: Any) -> None:
        """Send what comes next in a few of the sequences: one by one, or in one entry."""
        chosen = random.sample(self._open, min(4, len(self._open)))
        runs = [[rest.pop(0) for _ in range(min(len(rest), random.randint(1, 3)))] for rest in chosen]
        planned = [one for run in runs for one in run]
        if random.random() < 0.5:  # of one sequence in its order, and others between
            planned = [one for several in itertools.zip_longest(*runs) for one in several if one is not None]
        self.unaccepted = frozenset(one.request.correlation_id for one in planned)
        for one in planned:
            self._checker.sent(one.request)
        self._sent += len(planned)
        elements = [one.fields for one in planned for _ in range(one.times)]
        entries: list[Fields] = elements
        if random.random() < 0.5:
            entries = [{"requests": msgpack.packb(elements)}]
        entries = [{**entry, "reply_to": self._name} for entry in entries]
        if withdrawn := [one.request.correlation_id for one in planned if one.withdraws]:
            entries.append({"withdraw": " ".join(withdrawn)})
        while not self._is_accepted(redis, entries):
            self.refused += 1
            if self._drained.wait(INTERVAL_S):
                return
        self.unaccepted = frozenset()

    def _is_accepted(self, redis: Any, entries: list[Fields]) -> bool:
        pipeline = redis.pipeline(transaction=True)
        for entry in entries:
            pipeline.xadd(self._keys.requests, entry)
        try:
            pipeline.execute()
        except ResponseError as error:
            if "maxmemory" not in str(error):
                raise
            return False
        return True

    # --- reading and watching ------------------------------------------------------------------------------

    def _read(self, redis: Any) -> None:
        last_id: bytes | str = "0"
        while True:
            is_last = self._drained.is_set()
            found = redis.xread({self._keys.replies(self._name): last_id}, block=None if is_last else 50)
            for entry_id, fields in found[0][1] if found else ():
                last_id = entry_id
                for each in envelopes(fields):
                    self._checker.read(each["correlation_id"], decoded(each))
                    self.answered += 1
            if is_last:
                return

    def _watch(self, redis: Any) -> None:
        """Look at which sequences are in flight."""
        while not self._drained.wait(INTERVAL_S):
            self._checker.in_flight(sequences_in_flight(redis, self._keys))


def sequences_in_flight(redis: Any, keys: Keys) -> list[str]:
    """The ID of the sequence of each request in flight, all at one moment."""
    link: Any = redis
    batches = link.xrange(keys.batches)
    flats = [(entry_id, [part for pair in fields.items() for part in pair]) for entry_id, fields in batches]
    runs = [run for entry_id, flat in flats for run in decode_batch(entry_id, flat, 0).runs]
    return [run.sequence.sequence_id for run in runs if run.sequence is not None]


# --- what is sent ------------------------------------------------------------------------------------------


def planned_sequences(name: str, *, fails: bool) -> Iterator[list[Planned]]:
    """Sequences without end, each as the requests that are to be sent of it, in this order."""
    forms = (_plain, _begun_anew, _ended_before_the_last, _indexed)
    for number in itertools.count():
        plan = _Plan(f"{name}{number}")
        if fails and number % 3:
            _failing(plan)
        else:
            forms[number % len(forms)](plan)
        yield plan.planned


class _Plan:
    """The requests of one sequence."""

    def __init__(self, sequence_id: str) -> None:
        self.sequence_id = sequence_id
        self.planned: list[Planned] = []

    def add(
        self,
        *,
        starts: bool = False,
        ends: bool = False,
        index: int | None = None,
        may_end: str = "",
        withdraws: bool = False,
        times: int = 1,
        more: Fields | None = None,
        **body: Any,
    ) -> None:
        correlation_id = f"{self.sequence_id}.{len(self.planned)}"
        body = {"text": correlation_id, "sleep_s": SLEEP_S, **body}
        fields = {
            "correlation_id": correlation_id,
            "sequence_id": self.sequence_id,
            "body": json.dumps(body).encode(),
            **({"sequence_start": 1} if starts else {}),
            **({"sequence_end": 1} if ends else {}),
            **({} if index is None else {"sequence_index": index}),
            **(more or {}),
        }
        request = SentRequest(
            correlation_id,
            self.sequence_id,
            body["text"],
            starts,
            ends,
            index,
            [may_end] if may_end else (),
        )
        self.planned.append(Planned(request, fields, withdraws, times))


def _plain(plan: _Plan) -> None:
    last = random.randint(0, 9)
    for at in range(last + 1):
        plan.add(starts=at == 0, ends=at == last)


def _begun_anew(plan: _Plan) -> None:
    """Twice with the state of before, and once after it had ended."""
    for ends in (False, False, True, True):
        plan.add(starts=True)
        for _ in range(random.randint(0, 2)):
            plan.add()
        if ends:
            plan.add(ends=True)


def _ended_before_the_last(plan: _Plan) -> None:
    plan.add(starts=True)
    for _ in range(random.randint(0, 3)):
        plan.add()
    plan.add(ends=True)
    for _ in range(2):
        plan.add()


def _indexed(plan: _Plan) -> None:
    """In the wrong order, and some twice."""
    last = random.randint(2, 9)
    for at in range(last + 1):
        plan.add(starts=at == 0, ends=at == last, index=at, times=1 + (at % 3 == 1 and at < last))
    for at in range(0, last, 2):
        plan.planned[at : at + 2] = reversed(plan.planned[at : at + 2])


def _failing(plan: _Plan) -> None:
    """Twice, given three requests of which the last may fail, in one of these ways, expect that what follows
    is aborted, until it begins anew."""
    for _ in range(2):
        plan.add(starts=True)
        plan.add()
        way = random.choice(("raises", "expires", "is withdrawn", "is invalid"))
        if way == "raises":
            plan.add(may_end=INTERNAL, raises=True)
        elif way == "expires":
            plan.add(may_end=DEADLINE_EXCEEDED, more={"expiration": random.randint(1, 40)})
        elif way == "is withdrawn":
            plan.add(may_end=CANCELLED, withdraws=True)
        else:
            plan.add(may_end=INVALID_ARGUMENT, more={"priority": 11})
        for _ in range(random.randint(0, 3)):
            plan.add()
    plan.add(starts=True)
    plan.add(ends=True)
