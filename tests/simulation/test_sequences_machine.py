"""Sequences in the production scheduler under random events, judged by what producers were promised.

The reference knows all requests that were ever sent, in the order of the request stream, and how each ended.
It has no heads, followers or segments: it looks at every request each time. The state of a sequence is the
list of requests that made it, so each result shows which requests came before it.
"""

from __future__ import annotations

from random import Random
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from carpool.errors import ABORTED, CANCELLED, DEADLINE_EXCEEDED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED
from carpool.messages.requests import Run, SequencePart
from carpool.messages.results import UNANSWERED
from carpool.messages.sequences import SequenceChange
from carpool_batcher.core.sequences.sequence import OneSequence
from support.sequence_harness import SequenceHarness

IDLE_MS = 50
IN_ORDER = ("a", "b", "c")  # these count no requests
COUNTED = ("x", "y")  # requests of these have an index, and arrive in any order
COUNT_MAX = 5


class Observed(SequenceHarness):
    """A harness that notes which sequences the batcher ended because they were idle, and when."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.idle_after: dict[str, list[str]] = {}  # the last place of the sequence at that time

    def changed(self, change: SequenceChange) -> None:
        part = change.part
        if change.outcome == "ended" and part.place == "9":
            present = [*self.waiting.values(), *(run for runs in self.in_flight.values() for run in runs)]
            assert part.sequence_id not in [part_of(run).sequence_id for run in present], "it is not idle"
            places = [part_of(run).place for run in self.runs.values() if is_of(run, part.sequence_id)]
            self.idle_after.setdefault(part.sequence_id, []).append(max(places))


def check_state(sequence: OneSequence) -> None:
    """A sequence is in one of the states of the table in `sequences.sequence`."""
    current = sequence.current
    if sequence.is_busy:
        assert (sequence.head is None) is not (sequence.in_flight is None)
        assert not sequence.waits_for_space
    elif sequence.waits_for_space:
        assert current.start is not None
        assert not sequence.has_state
    elif sequence.has_state:
        assert not current.broken
        assert current.start is None
        assert current.turn_of(sequence.next_index) is None
    elif current.broken:
        assert current.is_empty
    else:
        assert current.start is None


def part_of(run: Run) -> SequencePart:
    assert run.sequence is not None
    return run.sequence


def is_of(run: Run, sequence_id: str) -> bool:
    return part_of(run).sequence_id == sequence_id


class SequencesMachine(RuleBasedStateMachine):
    """One batcher after another, and the worker."""

    def __init__(self) -> None:
        super().__init__()
        self.at = 0.0
        self.number = 0
        self.ended_at: dict[str, list[str]] = {}  # by force, by sequence: the places

    @initialize(
        space=st.sampled_from((1, 2, 100)),
        queue_size=st.sampled_from((3, 100, 100)),
        batch_size=st.sampled_from((1, 2, 8)),
        processes=st.sampled_from((1, 4)),
        action=st.sampled_from(("reject", "reject", "delay")),
    )
    def begin(self, space: int, queue_size: int, batch_size: int, processes: int, action: str) -> None:
        self.space = space
        self.harness = Observed(
            model_processes=processes,
            max_batch_size=batch_size,
            max_candidate_sequences=space,
            max_sequence_idle_ms=IDLE_MS,
            max_queue_size=queue_size,
            expiration_action=action,
        )

    # --- events --------------------------------------------------------------------------------------------

    @rule(
        name=st.sampled_from(IN_ORDER),
        starts=st.sampled_from((False, False, True)),
        ends=st.sampled_from((False, False, False, True)),
        expiration=st.sampled_from((None, None, None, 1, 20)),
        priority=st.sampled_from((4, 4, 9)),
        lane=st.sampled_from(("", "", "other")),
        polls=st.booleans(),
    )
    def send(self, name: str, polls: bool, starts: bool, ends: bool, **fields: Any) -> None:
        self.number += 1
        self.harness.send(f"{name}{self.number}", self.at, start=starts, end=ends, **fields)
        self.turn(polls)

    @rule(
        name=st.sampled_from(COUNTED),
        index=st.integers(0, COUNT_MAX),
        ends=st.booleans(),
        polls=st.booleans(),
    )
    def send_counted(self, name: str, index: int, ends: bool, polls: bool) -> None:
        self.number += 1
        ends = ends and index == COUNT_MAX
        self.harness.send(f"{name}{self.number}", self.at, start=index == 0, end=ends, index=index)
        self.turn(polls)

    @rule(
        name=st.sampled_from(COUNTED),
        count=st.integers(2, COUNT_MAX),
        random=st.randoms(use_true_random=False),
    )
    def send_shuffled(self, name: str, count: int, random: Random) -> None:
        for index in random.sample(range(count), count):
            self.send_counted(name, index, False, random.random() < 0.3)

    @precondition(lambda self: self.counted())
    @rule(data=st.data(), polls=st.booleans())
    def send_again(self, data: st.DataObject, polls: bool) -> None:
        """A request that was sent before is sent again, with its correlation ID."""
        run = self.harness.runs[data.draw(st.sampled_from(self.counted()))]
        part = part_of(run)
        self.number += 1
        self.harness.send(
            f"{part.sequence_id}{self.number}",
            self.at,
            start=part.starts,
            end=part.ends,
            index=part.index,
            correlation_id=run.correlation_ids[0],
        )
        self.turn(polls)

    def counted(self) -> list[str]:
        return [name for name in self.harness.runs if name[0] in COUNTED]

    @precondition(lambda self: self.harness.waiting)
    @rule(data=st.data(), polls=st.booleans())
    def withdraw(self, data: st.DataObject, polls: bool) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.harness.waiting)), min_size=1, max_size=3))
        self.harness.withdraw(*[self.harness.runs[name].correlation_ids[0] for name in names])
        self.turn(polls)

    @precondition(lambda self: self.harness.waiting)
    @rule(data=st.data(), polls=st.booleans())
    def delete(self, data: st.DataObject, polls: bool) -> None:
        self.turn(True)
        if self.harness.waiting:
            name = data.draw(st.sampled_from(sorted(self.harness.waiting)))
            self.harness.failed.add(name)
            self.harness.delete(name)
        self.turn(polls)

    @rule(
        names=st.lists(st.sampled_from((*IN_ORDER, *COUNTED)), unique=True, min_size=1), polls=st.booleans()
    )
    def end_sequences(self, names: list[str], polls: bool) -> None:
        place = self.harness.end_sequences(*names)
        for name in names:
            self.ended_at.setdefault(name, []).append(place)
        self.turn(polls)

    @precondition(lambda self: self.harness.in_flight)
    @rule(data=st.data(), fails=st.sampled_from((False, False, False, True)), polls=st.booleans())
    def settle(self, data: st.DataObject, fails: bool, polls: bool) -> None:
        batch_id = data.draw(st.sampled_from(list(self.harness.in_flight)))
        failing = [part_of(run).sequence_id for run in self.harness.in_flight[batch_id][:1] if fails]
        self.harness.settle_batch(batch_id, failing, self.at)
        self.turn(polls)

    @precondition(lambda self: self.harness.in_flight)
    @rule(data=st.data())
    def lose_batch(self, data: st.DataObject) -> None:
        self.harness.lose_batch(data.draw(st.sampled_from(list(self.harness.in_flight))), self.at)
        self.turn(True)

    @rule(after_ms=st.sampled_from((0, 1, 20, IDLE_MS, 2 * IDLE_MS)))
    def wait(self, after_ms: float) -> None:
        self.at += after_ms
        self.turn(True)

    @rule(random=st.randoms(use_true_random=False))
    def take_over(self, random: Random) -> None:
        """Another batcher reads what waits: what was put back comes later than its place."""
        self.turn(True)
        self.turn(True)
        names = list(self.harness.waiting)
        later = [name for name in names if random.random() < 0.3]
        reading = [name for name in names if name not in later] + later
        self.harness.take_over(self.at, reading, lambda: self.happen_while_reading(random))
        self.turn(True)

    def happen_while_reading(self, random: Random) -> None:
        """Batches settle, and requests expire, are withdrawn or ended by force, before the batcher knows all
        requests that wait."""
        if self.harness.in_flight and random.random() < 0.2:
            batch_id = random.choice(list(self.harness.in_flight))
            first = part_of(self.harness.in_flight[batch_id][0])
            failing = [first.sequence_id] if random.random() < 0.3 else []
            self.harness.settle_batch(batch_id, failing, self.at)
        if random.random() < 0.1:
            self.at += 1
        if self.harness.waiting and random.random() < 0.1:
            name = random.choice(list(self.harness.waiting))
            self.harness.withdraw(self.harness.runs[name].correlation_ids[0])
        if random.random() < 0.05:
            name = random.choice((*IN_ORDER, *COUNTED))
            self.ended_at.setdefault(name, []).append(self.harness.end_sequences(name))
        self.harness.poll(self.at)

    @rule()
    def serve_all(self) -> None:
        """Nothing that could be served waits, once all batches have settled."""
        self.turn(True)
        for _ in range(4 * len(self.harness.runs) + 4):
            if not self.harness.in_flight:
                break
            self.harness.settle(at=self.at)
            self.turn(True)
        self.turn(True)
        for name in self.harness.waiting:
            assert self.is_full() or name[0] in COUNTED, f"{name} is forgotten"

    def is_full(self) -> bool:
        """Whether there is no space: then starts wait, and what stands behind them."""
        return self.harness.scheduler.sequences.census().kept >= self.space

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        for _ in range(len(self.harness.runs) + 4):
            self.serve_all()
            if not len(self.harness.scheduler.sequences):
                break
            self.at += 2 * IDLE_MS
            self.turn(True)
        assert not self.harness.waiting
        assert not self.harness.store.kept
        assert not len(self.harness.scheduler.sequences)
        assert self.harness.scheduler.queue.count == self.harness.scheduler.queue.bytes == 0
        self.check_end()

    def check_end(self) -> None:
        """Nothing is left."""

    # --- checks --------------------------------------------------------------------------------------------

    def turn(self, polls: bool) -> None:
        self.check_that_nothing_is_forgotten()
        if polls:
            for _ in range(2):
                self.harness.poll(self.at)
            assert self.harness.scheduler.queue.count == len(self.harness.waiting)
            self.check_that_nothing_is_forgotten()
            self.check_that_failures_break()
            self.check_space()
        self.check_one_at_a_time()
        for name in list(self.harness.ok.keys() - self.checked):
            self.checked.add(name)
            self.check_success(name)
        for name in list(self.harness.answers.keys() - self.checked):
            self.checked.add(name)
            self.check_refusal(name, self.harness.answers[name])

    def check_that_nothing_is_forgotten(self) -> None:
        """Each waiting request is of a sequence that is known, each head waits, and each follower is where it
        has its turn."""
        sequences, waiting = self.harness.scheduler.sequences, set(self.harness.waiting.values())
        assert {part_of(run).sequence_id for run in waiting} <= sequences._known.by_id.keys()
        assert {one.head for one in sequences._known.by_id.values() if one.head is not None} <= waiting
        for run, segment in sequences.followers._segments.items():
            assert segment is not None
            assert run in segment
        for sequence in set(sequences._known.by_id.values()) - sequences._known.changed.keys():
            check_state(sequence)

    def check_that_failures_break(self) -> None:
        """Redis knows at once that a sequence is broken, when a request that stands after its state was
        refused."""
        for sequence_id in IN_ORDER:
            stored = self.harness.store.kept.get(sequence_id)
            if stored is None or stored.next_index is None or stored.broken:
                continue
            begun_at = part_of(self.harness.runs[stored.first_id]).place
            refused = [
                name
                for name in self.harness.answers
                if name[0] == sequence_id and part_of(self.harness.runs[name]).place > begun_at
            ]
            assert not refused, f"{refused} were refused, and {sequence_id} is not broken"

    def check_space(self) -> None:
        assert len(self.begun()) <= self.space

    def begun(self) -> set[str]:
        """The sequences that are kept and not broken, or have a request in flight."""
        in_flight = {part_of(run).sequence_id for runs in self.harness.in_flight.values() for run in runs}
        stored = self.harness.store.kept.items()
        return in_flight | {name for name, one in stored if one.next_index is not None and not one.broken}

    @property
    def checked(self) -> set[str]:
        known: set[str] = self.__dict__.setdefault("_checked", set())
        return known

    def check_one_at_a_time(self) -> None:
        names = [part_of(run).sequence_id for runs in self.harness.in_flight.values() for run in runs]
        assert len(names) == len(set(names)), "two requests of one sequence are in flight"

    def earlier(self, name: str) -> list[str]:
        """The requests of its sequence from the last start up to before this one; all, if there is none."""
        part = part_of(self.harness.runs[name])
        before = [
            other
            for other, run in self.harness.runs.items()
            if is_of(run, part.sequence_id)
            and part_of(run).place < part.place
            and self.harness.answers.get(other) != UNANSWERED
        ]
        if part.starts:
            return []
        starts = [at for at, other in enumerate(before) if part_of(self.harness.runs[other]).starts]
        return before[starts[-1] :] if starts else before

    def check_success(self, name: str) -> None:
        """OK means that every earlier request of the sequence was OK, in order."""
        run, made = self.harness.runs[name], self.harness.ok[name]
        part = part_of(run)
        if part.index is not None:
            of_made = [self.index_of(part.sequence_id, correlation_id) for correlation_id in made]
            assert of_made == list(range(part.index + 1)), f"{name} was served with {made}"
            return
        expected = (*self.earlier(name), name)
        assert made == expected, f"{name} was served after {made}, and not {expected}"
        assert part_of(self.harness.runs[made[0]]).starts

    def index_of(self, sequence_id: str, correlation_id: str) -> int | None:
        return next(
            part_of(run).index
            for run in self.harness.runs.values()
            if is_of(run, sequence_id) and run.correlation_ids[0] == correlation_id
        )

    def check_refusal(self, name: str, status: str) -> None:
        part = part_of(self.harness.runs[name])
        known = (ABORTED, INVALID_ARGUMENT, CANCELLED, DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNANSWERED)
        assert status in known
        if status == UNANSWERED:
            assert part.index is not None
        if part.starts:
            assert status not in (ABORTED, INVALID_ARGUMENT), f"{name} starts, and was refused: {status}"
        elif part.index is None and status == ABORTED:
            # If its sequence is over, a later failure may be given as the reason.
            failed = self.has_failed_before(name) or self.is_over(name)
            assert failed, f"{name} was aborted, and nothing had failed"
        elif part.index is None and status == INVALID_ARGUMENT:
            assert self.is_over(name), f"{name} was refused, and its sequence had been begun"

    def has_failed_before(self, name: str) -> bool:
        earlier = self.earlier(name)
        return any(other in self.harness.failed or other in self.harness.answers for other in earlier) or any(
            place < part_of(self.harness.runs[name]).place for place in self.ended_at.get(name[0], ())
        )

    def is_over(self, name: str) -> bool:
        earlier = self.earlier(name)
        if not any(part_of(self.harness.runs[other]).starts for other in earlier):
            return True
        if any(part_of(self.harness.runs[other]).ends and other in self.harness.ok for other in earlier):
            return True
        first = part_of(self.harness.runs[earlier[0]]).place
        return any(place >= first for place in self.harness.idle_after.get(name[0], ()))


SequencesMachine.TestCase.settings = hypothesis_settings(
    max_examples=150,
    stateful_step_count=40,
    report_multiple_bugs=False,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


TestSequences = SequencesMachine.TestCase
