"""A batcher in virtual time, and whatever fields producers may write under any settings.

Entries are decoded, offered, dispatched, refused and put back as a batcher does, and read again by the next
one. No Redis: `Batcher.stream` is the request stream.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Final

import hypothesis.strategies as st
import msgpack

from carpool.messages.requests import Entry, Run, SequencesEnd, Withdrawal
from carpool.messages.results import UNANSWERED, Refusal
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.requests import decode_entry, encode_runs, tickets_of
from carpool_batcher.core.scheduler import Dispatch, Expire, Scheduler
from support.scheduler_harness import MS, settle

START_MS: Final = 1_700_000_000_000
PROCESSES: Final = ("p1", "p2")
POLLS_MAX: Final = 5000

Request = tuple[str | None, str]  # where its result goes, and its correlation ID


class Batcher:
    """A batcher without Redis. `stream` has the entries by ID, as Redis would have them."""

    def __init__(self, model_settings: ModelSettings, kind: ModelKind) -> None:
        self.settings, self.kind = model_settings, kind
        self.now_us = START_MS * MS
        self.stream: dict[str, list[bytes]] = {}
        self.numbers = count(1)
        self.in_flight: dict[str, list[Request]] = {}  # by batch; those without an answer
        self.begin()

    def begin(self) -> None:
        self.scheduler = Scheduler(self.settings, kind=self.kind)
        self.scheduler.set_processes(PROCESSES)
        self.table: dict[str, Entry] = {}

    def new_id(self) -> str:
        return f"{self.now_us // MS}-{next(self.numbers)}"

    # --- what happens --------------------------------------------------------------------------------------

    def send(self, flat: Sequence[bytes]) -> None:
        entry_id = self.new_id()
        self.stream[entry_id] = list(flat)
        self.remove(self.read(entry_id, waited=False))

    def read(self, entry_id: str, *, waited: bool) -> list[Refusal]:
        entry, decoded = decode_entry(
            entry_id.encode(), self.stream[entry_id], self.settings, self.now_us, lambda _: waited
        )
        self.table[entry.id] = entry
        refusals: list[Refusal] = []
        for item in decoded:
            if isinstance(item, Run):
                refusals += self.checked(self.scheduler.offer(item, self.now_us), item)
            elif isinstance(item, Refusal):
                refusals += self.checked(list(self.scheduler.refuse_malformed(item)))
            elif isinstance(item, Withdrawal):
                self.scheduler.withdraw(item)
            elif isinstance(item, SequencesEnd):
                refusals += self.scheduler.end_sequences(item.sequence_ids, item.place)
                self.empty(entry)
        return refusals

    def take_over(self) -> None:
        """The next batcher reads everything. What was accepted is not refused."""
        self.settle()
        self.begin()
        if self.kind.has_sequences:
            self.scheduler.sequences.load([])
        refusals = [refused for entry_id in list(self.stream) for refused in self.read(entry_id, waited=True)]
        self.scheduler.sequences.complete()
        if not self.kind.has_sequences:  # whose states are gone here
            assert {refused.status for refused in refusals} <= {UNANSWERED}
        self.remove(refusals)

    def delete(self, number: int) -> None:
        """A producer deletes an entry, and the batcher finds out."""
        if self.stream:
            entry_id = list(self.stream)[number % len(self.stream)]
            del self.stream[entry_id]
            entry = self.table.pop(entry_id)
            runs, entry.runs = entry.runs, []
            self.scheduler.forget(runs)

    def settle(self) -> None:
        for batch_id in list(self.scheduler.in_flight.batches):
            settle(self.scheduler, batch_id, 1000, self.now_us)
            del self.in_flight[batch_id]

    def pass_by(self, milliseconds: int) -> None:
        self.now_us += milliseconds * MS
        self.turn()

    def turn(self) -> None:
        withdrawn = self.scheduler.carry_out_withdrawals(self.now_us)
        self.remove(withdrawn.refusals)
        for batch_id, _, run in withdrawn.cancelled:
            self.answer_in_flight(batch_id, run)
        for entry in withdrawn.entries:
            if entry.id in self.stream:  # else its producer deleted it meanwhile
                self.empty(entry)
        decisions = self.scheduler.poll(self.now_us)
        expired = [one for one in decisions if isinstance(one, Expire)]
        for one in expired:
            self.answer_in_flight(one.batch_id, one.run)
            self.scheduler.in_flight.answered([one.run])
        dispatches = [one for one in decisions if isinstance(one, Dispatch)]
        to_be_dispatched = [run for dispatch in dispatches for run in dispatch.runs]
        refusals = [one for one in decisions if isinstance(one, Refusal)]
        self.remove(self.checked(refusals, *to_be_dispatched, *[one.run for one in expired]))
        self.dispatch(dispatches)

    def dispatch(self, decided: Sequence[Dispatch]) -> None:
        remaining = self.scheduler.carry_out(decided, self.now_us)
        self.take_out([run for dispatch in remaining.dispatches for run in dispatch.runs])
        for dispatch in remaining.dispatches:
            batch_id = f"{next(self.numbers)}"
            remaining.launched(batch_id, dispatch)
            self.in_flight[batch_id] = [request for run in dispatch.runs for request in requests_of(run)]
            self.launched(batch_id, dispatch)
        self.remove(self.checked(remaining.finish()))

    def launched(self, batch_id: str, dispatch: Dispatch) -> None:
        """This batch is in flight now."""

    def answer_in_flight(self, batch_id: str, run: Run) -> None:
        answered = requests_of(run)
        self.in_flight[batch_id] = [one for one in self.in_flight[batch_id] if one not in answered]

    # --- the stream ----------------------------------------------------------------------------------------

    def remove(self, refusals: Sequence[Refusal]) -> None:
        refused = [one for one in refusals if one.run is not None]
        self.take_out([one.run for one in refused if one.run is not None])
        for one in refusals:
            if one.run is None and one.entry.id in self.table:
                self.put_back(one.entry)

    def take_out(self, runs: Iterable[Run]) -> None:
        """These are not in the stream any more. What is left of their entries is put back."""
        entries: dict[Entry, None] = {}
        for run in runs:
            run.entry.runs.remove(run)
            entries[run.entry] = None
        for entry in entries:
            self.put_back(entry)

    def put_back(self, entry: Entry) -> None:
        self.empty(entry)
        if entry.runs:
            entry.id = self.new_id()
            self.table[entry.id] = entry
            arrival = b"%d" % (entry.arrival_us // 1000)
            self.stream[entry.id] = [b"arrival", arrival, b"requests", encode_runs(entry.runs)]
            self.stream[entry.id] += [b"tickets", tickets_of(entry.runs).encode()]

    def empty(self, entry: Entry) -> None:
        del self.table[entry.id], self.stream[entry.id]

    # --- what must hold ------------------------------------------------------------------------------------

    def checked(self, refusals: Sequence[Refusal], *others: Run) -> Sequence[Refusal]:
        """These refusals, after `_check`."""
        if not self.kind.has_sequences:
            with uncounted():
                self._check(refusals, others)
        return refusals

    def _check(self, refusals: Sequence[Refusal], others: Sequence[Run]) -> None:
        """A request is removed without an answer only if another copy of it will have one, and refused with
        one only if no other copy waits. `others`: runs that are to be dispatched, and those that were
        answered in flight by the same turn."""
        known = {request for requests in self.in_flight.values() for request in requests}
        known.update(request for run in self.scheduler.queue.runs() for request in requests_of(run))
        known.update(request for run in others for request in requests_of(run))
        answered = [(one.reply_to, name) for one in refusals if one.status for name in one.correlation_ids]
        silent = [(one.reply_to, name) for one in refusals if not one.status for name in one.correlation_ids]
        assert len(set(answered)) == len(answered)
        assert set(silent) <= known | set(answered)
        withdrawn = self.scheduler._withdrawals.arrived_later
        waiting = {request for run in self.scheduler.queue.runs() for request in requests_of(run)}
        of_arrivals = {one for one in answered if one[1] not in withdrawn}
        assert not of_arrivals & waiting

    def end(self) -> None:
        """Let everything be served."""
        for _ in range(POLLS_MAX):
            self.settle()
            self.turn()
            wake_us = self.scheduler.wake_at_us()
            if wake_us is None and not self.scheduler.in_flight.batches:
                break
            if wake_us is not None:
                self.now_us = max(self.now_us, wake_us)
        queue = self.scheduler.queue
        assert not self.scheduler.in_flight.batches and not self.in_flight
        assert (self.scheduler.queue.count, self.scheduler.queue.bytes) == (0, 0)
        assert list(queue.runs()) == [] and not any(queue._count_by_priority)
        assert list(queue.lanes) == [""] and not queue.ids.repeated and not any(queue.ids._ids.values())
        assert (queue.delayed.requests, queue.delayed.bytes) == (0, 0)
        assert not any(queue.delayed._by_priority)
        bodies, ids = queue.bodies, self.scheduler.in_flight.ids
        assert not (bodies.waiting or bodies._in_flight or bodies._by_batch)
        assert not (ids._named or ids._indexed or ids._batches)
        assert not self.stream and not self.table


@contextmanager
def uncounted() -> Iterator[None]:
    """What is done here does not count as work of the batcher."""
    counting = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        sys.setprofile(counting)


def requests_of(run: Run) -> list[Request]:
    return [(run.reply_to, name) for name in run.correlation_ids]


# --- what producers send -----------------------------------------------------------------------------------

_PLACE: Final = "00000000000000000001-00000000000000000000:00000"
VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "correlation_id": ("a", "b", "c", "d", "/", ""),
    "reply_to": ("me", "me", "/"),
    "content_type": ("application/json", "application/msgpack", "text/x", "\xff"),
    "accept": ("image/png",),
    "reply_columns": ("1", "2"),
    "stream": ("1", "0"),
    "expiration": ("1", "20", "30", "6000", "9007199254740992", "0"),
    "not_before": ("0", "1", "25", "5000", "86399999", "86400000", "9007199254740992"),
    "priority": ("0", "4", "9", "10"),
    "lane": ("", "x", "y"),
    "cost": ("0", "1", "3", "1099511627776", "1099511627777"),
    "tenant": ("gold", "silver", "/"),
    "traceparent": ("t",),
    "own": ("1",),
    "rows": ("12", "1", ""),
    "row_head": ("h",),
    "correlation_ids": ("a b", "a a", "c", "a /", "a b c d e f g h i j"),
    "body_key": ("k", "l", "/"),
    "body_bytes": ("1", "16", "x"),
    "arrival": ("0", "1", str(START_MS - 5000), str(START_MS + 10), "99999999999999999999", "9" * 5000, "x"),
    "tickets": ("1-1:0+1", "1-1:0+1 2-1:3+1", f"{START_MS}-1:0+2", "x"),
    "sequence_id": ("s", "t", "/"),
    "sequence_start": ("0", "1"),
    "sequence_end": ("0", "1"),
    "sequence_index": ("0", "1", "2"),
    "sequence_place": (_PLACE, "x"),
}
COMMON: Final = (
    "correlation_id",
    "reply_to",
    "expiration",
    "not_before",
    "priority",
    "lane",
    "tenant",
    "arrival",
)
OF_SEQUENCES: Final = ("sequence_id", "sequence_start", "sequence_end", "sequence_index")


def fields_of(names: Iterable[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(VALUES[name]) for name in names})


any_fields = st.one_of(
    fields_of(COMMON),
    fields_of((*COMMON, "cost", "stream")),
    fields_of((*COMMON, *OF_SEQUENCES)),
    fields_of(VALUES),
)
bodies = st.sampled_from([{"body": "1"}, {"body": "12345"}, {"body_key": "k", "body_bytes": "3"}, {}])
single = st.builds(lambda fields, body: fields | body, any_fields, bodies)
columns = st.builds(
    lambda fields, names, body: fields | {"correlation_ids": names} | body,
    any_fields,
    st.sampled_from(VALUES["correlation_ids"]),
    st.sampled_from([{"rows": "12"}, {"rows": "1234567890"}, {"rows": "1"}]),
)
# Most combinations of any fields are malformed, or have no effect: these are neither.
timed = st.fixed_dictionaries(
    {
        "body": st.just("1"),
        "correlation_id": st.sampled_from("ab"),
        "not_before": st.sampled_from(("25", "5000")),
    },
    optional={
        "arrival": st.sampled_from(("1", str(START_MS - 5000), str(START_MS))),
        "expiration": st.sampled_from(("30", "5010", "6000")),
        "lane": st.just("x"),
        "priority": st.sampled_from("09"),
    },
)
sent_again = st.fixed_dictionaries(
    {"body": st.sampled_from(("1", "12345")), "correlation_id": st.sampled_from("abc")},
    optional={"expiration": st.sampled_from(("10", "30")), "cost": st.sampled_from("13")},
)
elements = st.one_of(single, timed, sent_again, columns)
packed = st.builds(
    lambda shared, requests: shared | {"requests": msgpack.packb(requests)},
    any_fields,
    st.lists(elements, min_size=1, max_size=4),
)
commands = st.sampled_from(
    [{"withdraw": "a b"}, {"withdraw": "c"}, {"withdraw": ","}, {"end_sequences": "s"}]
)


def as_flat(fields: dict[str, Any]) -> list[bytes]:
    pairs = [(name.encode(), value) for name, value in fields.items()]
    return [
        part
        for name, value in pairs
        for part in (name, value if isinstance(value, bytes) else value.encode())
    ]


entries = st.one_of(single, timed, sent_again, columns, packed, commands).map(as_flat)
steps = st.one_of(
    st.tuples(st.just(Batcher.send), entries),
    st.tuples(st.just(Batcher.send), entries),
    st.tuples(st.just(Batcher.send), entries),
    st.tuples(st.just(Batcher.send), entries),
    st.tuples(st.just(Batcher.pass_by), st.sampled_from((0, 1, 10, 26, 6000))),
    st.tuples(st.just(Batcher.settle)),
    st.tuples(st.just(Batcher.take_over)),
    st.tuples(st.just(Batcher.delete), st.integers(0, 3)),
)
SETTINGS: Final[dict[str, tuple[Any, ...]]] = {
    "max_batch_size": (1, 2, 8),
    "max_batch_cost": (1, 4),
    "max_queue_size": (1, 3, 4, 6),
    "max_queue_bytes": (1, 12),
    "max_delayed_share": (0, 0.3, 1),
    "max_body_bytes": (3,),
    "max_queue_delay_ms": (5, 50),
    "preferred_batch_sizes": ((2,),),
    "default_expiration_ms": (10, 30),
    "max_expiration_ms": (20, 6000),
    "allow_expiration_override": (False,),
    "expiration_action": ("delay",),
    "priority_policies": (
        {0: {"max_queue_size": 1}},
        {9: {"max_queue_size": 2, "expiration_action": "delay"}},
    ),
    "preserve_ordering": (True,),
    "tenant_weights": ({"gold": 4},),
    "policy": ("deferred",),
    "target_latency_ms": (5, 50),
    "unknown_fields": ("refuse",),
    "max_candidate_sequences": (1,),
}
# A few at a time: with all of them, hardly anything would ever wait.
one_setting = st.sampled_from([(name, value) for name, values in SETTINGS.items() for value in values])
of_often = st.sampled_from([("expiration_action", "delay"), ("max_queue_size", 4)])
any_settings = st.lists(st.one_of(one_setting, of_often), max_size=4).map(dict)
