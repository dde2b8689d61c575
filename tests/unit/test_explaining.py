"""Why a waiting request is not dispatched yet: the sentence for each state, and when that ends."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.messages.requests import Run, SequencePart
from carpool.model_settings import ModelKind, ModelSettings
from carpool.wire.traffic import Division
from carpool_batcher.core.explaining import Why, explain
from carpool_batcher.core.pause import Pause
from carpool_batcher.core.scheduler import BEFORE_PARTS_MAX, BEFORE_PARTS_OF_PIECE, Scheduler
from support.scheduler_harness import MS, SchedulerHarness, run, settle


def offered(harness: SchedulerHarness, names: str, at: float = 0, **fields: Any) -> Run:
    """A run that waits."""
    one = run(names, at, **fields)
    assert not harness.offer_runs([one], at)
    return one


def why(harness: SchedulerHarness, one: Run, at: float = 0) -> Why:
    return explain(harness.scheduler, one, int(at * MS))


def test_no_process() -> None:
    harness = SchedulerHarness(processes=0)
    one = offered(harness, "a")
    assert why(harness, one) == ("no model process takes batches: none lives, or all drain", None)


def test_a_paused_model() -> None:
    harness = SchedulerHarness()
    one = offered(harness, "a")
    harness.scheduler.pause = Pause("a new index is copied")
    assert why(harness, one) == ("its model is paused by an operator: a new index is copied", None)


def test_busy_processes_and_until_when() -> None:
    """It is dispatched ahead of the process shortly before that is free."""
    harness = SchedulerHarness(max_batch_size=8).learn(intercept=100, slope=0)
    harness.offer("a")
    assert harness.poll() == ["idle: a"]
    one = offered(harness, "b", 10)
    assert harness.poll(10) == []
    sentence, until_us = why(harness, one, 10)
    assert sentence == "all 1 model processes are busy"
    assert until_us == harness.scheduler.wake_at_us()


def test_busy_processes_of_which_nothing_is_known() -> None:
    harness = SchedulerHarness(max_batch_size=8)
    harness.offer("a")
    harness.poll()
    one = offered(harness, "b", 10)
    harness.poll(10)
    assert why(harness, one, 10) == ("all 1 model processes are busy", None)


def test_a_lane_that_waits_for_more_requests() -> None:
    harness = SchedulerHarness(max_batch_size=8, max_queue_delay_ms=50)
    one = offered(harness, "a", 5)
    assert harness.poll(5) == []
    assert why(harness, one, 5) == ("its lane waits for more requests (max_queue_delay_ms)", 55 * MS)


def test_the_policy_deferred_waits_until_the_deadline_requires_a_batch() -> None:
    harness = SchedulerHarness(max_batch_size=8, policy="deferred").learn(intercept=10, slope=1)
    one = offered(harness, "a", 0, expiration=1000)
    assert harness.poll(0) == []
    sentence, until_us = why(harness, one, 0)
    assert sentence == "its lane waits for more requests (the policy deferred)"
    assert until_us is not None
    assert 900 * MS < until_us < 1000 * MS


def test_delayed() -> None:
    harness = SchedulerHarness()
    one = run("a", 500, not_before_ms=500)
    assert not harness.offer_runs([one], 0)
    assert why(harness, one) == ("its producer delayed it (not_before)", 500 * MS)


@pytest.mark.parametrize(
    ("lane", "priority", "sentence"),
    [
        ("fast", 8, "lane 'fast' comes first: it has requests of priority 8"),
        ("older", 4, "lane 'older' comes first: its tenant's turn is earlier, or its requests are older"),
    ],
)
def test_another_lane_comes_first(lane: str, priority: int, sentence: str) -> None:
    harness = SchedulerHarness(max_batch_size=8)
    harness.offer("a")
    harness.poll()
    offered(harness, "b", 1, lane=lane, priority=priority)
    one = offered(harness, "c", 2, lane="mine")
    harness.poll(2)
    assert why(harness, one, 2).sentence == f"all 1 model processes are busy, and {sentence}"


def test_a_deadline_that_has_passed_is_told() -> None:
    harness = SchedulerHarness(processes=0, expiration_action="delay")
    one = offered(harness, "a", 0, expiration=10)
    harness.poll(20)
    harness.scheduler.model_processes = 1
    assert why(harness, one, 20).sentence.startswith("its deadline has passed, so it is served behind all")


def test_versions() -> None:
    scheduler = Scheduler(ModelSettings())
    scheduler.set_processes(["1a"], (), {"1a": "1"}, 0)
    asked, shared = run("a", version="2"), run("b", entry_id="2-0")
    scheduler.offer(asked, 0)
    assert explain(scheduler, asked, 0).sentence.startswith("no worker has version 2, for which it asks")
    scheduler.divide(Division({"2": 100}, {"1": 1, "2": 1}), 0)
    scheduler.offer(shared, 0)
    assert explain(scheduler, shared, 0).sentence == (
        "no worker has version 2, whose share of the traffic it belongs to"
    )


def of_sequence(name: str, number: int, *, starts: bool = False) -> Run:
    part = SequencePart("s", starts, False, None, SequencePart.place_of(f"{number}-0", 0))
    return run(name, entry_id=f"{number}-0", sequence=part)


def test_behind_a_request_of_its_sequence() -> None:
    scheduler = Scheduler(ModelSettings(max_batch_size=8), 1, kind=ModelKind.STATEFUL)
    scheduler.offer(of_sequence("first", 1, starts=True), 0)
    (decision,) = scheduler.poll(0)
    scheduler.in_flight.launch("1", decision, 0)  # type: ignore[arg-type]
    second = of_sequence("second", 2)
    scheduler.offer(second, 0)
    scheduler.poll(0)
    assert explain(scheduler, second, 0) == ("it waits for an earlier request of its sequence, first", None)


def test_while_a_batcher_takes_over() -> None:
    scheduler = Scheduler(ModelSettings(), 1, kind=ModelKind.STATEFUL)
    scheduler.sequences.load([])
    one = of_sequence("first", 1, starts=True)
    scheduler.offer(one, 0)
    assert "has not read all that waits yet" in explain(scheduler, one, 0).sentence


def test_a_bound_model_whose_process_is_busy() -> None:
    scheduler = Scheduler(ModelSettings(max_batch_size=8), kind=ModelKind.BOUND)
    scheduler.set_processes(["w/0"], (), {}, 0)
    scheduler.offer(of_sequence("first", 1, starts=True), 0)
    (decision,) = scheduler.poll(0)
    scheduler.in_flight.launch("1", decision, 0)  # type: ignore[arg-type]
    other = run(
        "other",
        entry_id="2-0",
        sequence=SequencePart("t", True, False, None, SequencePart.place_of("2-0", 0)),
    )
    scheduler.offer(other, 0)
    scheduler.poll(0)
    assert explain(scheduler, other, 0).sentence == (
        "model process w/0, which has its sequence, executes another batch"
    )


def test_what_is_told_changes_no_decision() -> None:
    """Of two equal schedulers one is asked about each request all the time."""
    silent, asked = (SchedulerHarness(max_batch_size=4, policy="deferred").learn() for _ in range(2))
    for at in range(0, 200, 5):
        runs = []
        for harness in (silent, asked):
            one = run(
                f"r{at} s{at}", at, f"{at + 1}-0", lane=f"l{at % 3}", tenant=f"t{at % 2}", expiration=300
            )
            harness.offer_runs([one], at)
            runs.append(one)
        if runs[1].waits_in is not None:
            why(asked, runs[1], at)
        assert silent.poll(at) == asked.poll(at)
        if at % 20 == 0:
            for harness in (silent, asked):
                for batch_id in list(harness.scheduler.in_flight.batches):
                    settle(harness.scheduler, batch_id, 10 * MS, at * MS)


# --- what goes before -------------------------------------------------------------------------------------


def before(harness: SchedulerHarness, one: Run, index: int = 0) -> tuple[int, bool] | None:
    """How many requests go before, and whether these are all; in pieces that are bounded."""
    pieces, number = harness.scheduler.requests_before(one, index), 0
    try:
        while True:
            next(pieces)
            number += 1
    except StopIteration as end:
        assert number <= BEFORE_PARTS_MAX // BEFORE_PARTS_OF_PIECE
        found: tuple[int, bool] | None = end.value
        return found


def test_what_is_served_before_is_counted() -> None:
    """Higher priorities first, then tenants in turns, then arrival."""
    harness = SchedulerHarness(processes=0)
    first = offered(harness, "a b c", 0, tenant="t")
    other = offered(harness, "d e", 1, tenant="u")
    urgent = offered(harness, "f", 2, priority=9)
    assert before(harness, urgent) == (0, True)
    assert before(harness, first) == (1, True)
    assert before(harness, other) == (2, True)
    assert before(harness, first, 2) == (5, True)


def test_what_is_far_behind_is_counted_in_part() -> None:
    harness = SchedulerHarness(processes=0, max_queue_size=100_000)
    for at in range(BEFORE_PARTS_MAX + 10):
        last = offered(harness, f"r{at}", 0, entry_id=f"{at + 1}-0")
    assert before(harness, last) == (BEFORE_PARTS_MAX, False)


def test_before_a_delayed_request_nothing_goes() -> None:
    harness = SchedulerHarness()
    one = run("a", 500, not_before_ms=500)
    harness.offer_runs([one], 0)
    assert before(harness, one) is None
