"""When batches are dispatched, for which reason, to which processes, and with which requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.model_settings import ModelKind, ModelSettings, PriorityPolicy
from carpool_batcher.core.applied_settings import MAX_BATCH_BYTES
from support.scheduler_harness import SchedulerHarness, run

# --- reasons ---------------------------------------------------------------------------------------------


def test_nothing_is_dispatched_from_an_empty_queue() -> None:
    harness = SchedulerHarness()
    assert harness.poll(5) == []
    assert harness.wake_at_ms() is None


def test_idle_process_gets_all_waiting_requests() -> None:
    harness = SchedulerHarness(max_batch_size=4)
    harness.offer("a")
    harness.offer("b")
    assert harness.poll() == ["idle: a b"]


def test_process_that_executes_several_batches_at_a_time_gets_as_many() -> None:
    harness = SchedulerHarness(max_batch_size=1, max_concurrent_batches=3)
    harness.offer("a b c d e f g h")
    assert harness.poll() == [f"full: {name}" for name in "abcdef"]  # three, and one ahead of each
    assert harness.scheduler.model_processes == 1
    harness.scheduler.settings = ModelSettings(max_batch_size=1)
    assert harness.scheduler.capacity.processes == 1


def test_batch_is_dispatched_when_the_queue_delay_of_its_oldest_request_ends() -> None:
    harness = SchedulerHarness(max_batch_size=4, max_queue_delay_ms=2.5)
    harness.offer("a", at=10)
    harness.offer("b", at=11)
    # The delay counts from the first arrival.
    assert harness.wake_at_ms() == 12.5
    assert harness.poll(12.499) == []
    assert harness.poll(12.5) == ["delay: a b"]


def test_full_batch_does_not_wait_for_the_queue_delay() -> None:
    harness = SchedulerHarness(max_batch_size=2, max_queue_delay_ms=1000)
    harness.offer("a b c")
    assert harness.poll() == ["full: a b"]


def test_batch_is_full_by_cost() -> None:
    harness = SchedulerHarness(max_batch_cost=10, max_queue_delay_ms=1000)
    harness.offer("a", cost=4)
    harness.offer("b", cost=5)
    assert harness.poll() == []
    harness.offer("c", cost=1)
    assert harness.poll() == ["full: a b c"]


def test_request_over_the_cost_limit_is_not_overtaken_by_a_cheaper_one() -> None:
    harness = SchedulerHarness(processes=2, max_batch_cost=10)
    harness.offer("a", cost=6)
    harness.offer("b", cost=6)
    harness.offer("c", cost=3)
    # c would still fit into the batch of a, but it would overtake b.
    assert harness.poll() == ["full: a", "idle: b c"]


def test_batch_is_full_by_bytes() -> None:
    half = bytes(MAX_BATCH_BYTES // 2)
    harness = SchedulerHarness(processes=2, max_queue_bytes=4 * MAX_BATCH_BYTES, max_queue_delay_ms=1000)
    harness.offer("a b", body=half)
    harness.offer("c")
    assert harness.poll() == ["full: a b"]


def test_fields_for_the_model_count_as_bytes() -> None:
    extra = {"image": bytes(MAX_BATCH_BYTES // 2)}
    harness = SchedulerHarness(processes=3, max_queue_bytes=2 * MAX_BATCH_BYTES)
    assert harness.offer("a b c", extra=extra) == []
    assert [one.correlation_ids for one in harness.offer("d", extra=extra)] == [["d"]]
    assert harness.poll() == ["full: a", "full: b", "idle: c"]
    assert harness.scheduler.queue.bytes == 0


def test_largest_preferred_size_that_can_be_filled_is_dispatched() -> None:
    harness = SchedulerHarness(3, max_batch_size=8, preferred_batch_sizes=(2, 4), max_queue_delay_ms=10)
    harness.offer("a")
    assert harness.poll() == []
    harness.offer("b c d e f g")
    assert harness.poll() == ["preferred: a b c d", "preferred: e f"]
    # After the queue delay any size is dispatched.
    assert harness.wake_at_ms() == 10
    assert harness.poll(10) == ["delay: g"]


def test_preferred_size_over_the_maximum_is_never_reached() -> None:
    harness = SchedulerHarness(3, max_batch_size=2, preferred_batch_sizes=(4,), max_queue_delay_ms=10)
    harness.offer("a b c d e")
    assert harness.poll() == ["full: a b", "full: c d"]
    assert harness.poll(10) == ["delay: e"]


def test_batch_of_preferred_size_waits_until_a_process_becomes_free() -> None:
    harness = SchedulerHarness(preferred_batch_sizes=(2,), max_queue_delay_ms=1000).learn(slope=0)
    harness.offer("a b")
    assert harness.poll() == ["preferred: a b"]
    harness.offer("c d")
    assert harness.poll(1) == []
    assert harness.wake_at_ms() == 10  # before the queue delay of c ends
    assert harness.poll(10) == ["preferred: c d"]


# --- capacity --------------------------------------------------------------------------------------------


def test_nothing_is_dispatched_without_model_processes() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=1)
    harness.offer("a")
    assert harness.poll(100) == []
    assert harness.wake_at_ms() is None  # a new process is an event, not a time
    harness.scheduler.model_processes = 1
    assert harness.poll(100) == ["full: a"]


def test_busy_process_gets_no_batch_that_can_grow_before_it_settles() -> None:
    harness = SchedulerHarness(max_batch_size=4)
    harness.offer("a")
    assert harness.poll() == ["idle: a"]
    harness.offer("b")
    harness.offer("c")
    assert harness.poll(50) == []
    assert harness.wake_at_ms() is None
    harness.settle(1)
    assert harness.poll(51) == ["idle: b c"]


def test_busy_process_gets_one_full_batch_ahead_and_never_two() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    harness.offer("a b c d e f")
    assert harness.poll() == ["full: a b", "full: c d"]
    harness.settle(1)
    assert harness.poll() == ["full: e f"]


def test_busy_process_gets_its_next_batch_just_before_it_becomes_free() -> None:
    harness = SchedulerHarness().learn()
    harness.offer("a b c d")
    assert harness.poll() == ["idle: a b c d"]
    harness.offer("e", at=1)
    assert harness.wake_at_ms() == pytest.approx(14, abs=0.01)
    assert harness.poll(13.9) == []
    harness.offer("f", at=13.9)
    assert harness.poll(14.1) == ["idle: e f"]


def test_full_batch_is_dispatched_before_a_lane_of_higher_priority_that_has_to_wait() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    harness.offer("a")
    assert harness.poll() == ["idle: a"]
    # Given a busy process, a lane of high priority without a full batch, and a full batch of another lane
    harness.offer("b", lane="urgent", priority=9)
    harness.offer("c d")
    assert harness.poll() == ["full: c d"]


def test_capacity_is_per_model_process() -> None:
    harness = SchedulerHarness(processes=2, max_batch_size=8)
    harness.offer("a")
    assert harness.poll() == ["idle: a"]
    harness.offer("b")
    assert harness.poll() == ["idle: b"]
    harness.offer("c")
    assert harness.poll() == []


# --- order -----------------------------------------------------------------------------------------------


def test_requests_are_dispatched_first_in_first_out() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    for at, name in enumerate("abc"):
        harness.offer(name, at=at)
    assert harness.poll(3) == ["full: a b"]


def test_higher_priority_is_dispatched_first_then_earlier_arrival() -> None:
    harness = SchedulerHarness(max_batch_size=4)
    harness.offer("low", priority=0)
    harness.offer("a")
    harness.offer("high", priority=9)
    harness.offer("b")
    harness.offer("c")
    assert harness.poll() == ["full: high a b c"]


def test_requests_put_back_keep_their_arrival() -> None:
    harness = SchedulerHarness(max_batch_size=8, max_queue_delay_ms=10)
    harness.offer("b c", at=20)
    harness.offer("d", at=21)
    assert harness.wake_at_ms() == 30
    # When the rest of a partly dispatched entry comes back under a later ID
    harness.offer_runs([run("a1 a2", at=19, entry_id="9-0")], at=22)
    # Then its requests keep their delay and their place
    assert harness.wake_at_ms() == 29
    assert harness.poll(29) == ["delay: a1 a2 b c d"]


def test_batch_has_requests_of_one_lane() -> None:
    harness = SchedulerHarness(processes=3, max_batch_size=8)
    harness.offer("a", lane="cats")
    harness.offer("b")
    harness.offer("c", lane="cats")
    assert harness.poll() == ["idle: b", "idle: a c"]


def test_alternating_lanes_do_not_close_each_others_batches() -> None:
    harness = SchedulerHarness(processes=2, max_batch_size=3, max_queue_delay_ms=1000)
    for at in range(3):
        harness.offer(f"a{at}", at=at, lane="a")
        harness.offer(f"b{at}", at=at, lane="b")
    assert harness.poll(3) == ["full: a0 a1 a2", "full: b0 b1 b2"]


def test_lanes_are_served_by_priority_then_by_oldest_request() -> None:
    harness = SchedulerHarness(max_batch_size=8)
    harness.offer("new", at=2, lane="new")
    harness.offer("old", at=1, lane="old")
    harness.offer("urgent", at=3, lane="urgent", priority=5)
    order = []
    for batch in range(1, 4):
        order += harness.poll(3)
        harness.settle(batch, at=3)
    assert order == ["idle: urgent", "idle: old", "idle: new"]


@pytest.mark.parametrize("lanes", [1, 2000])
def test_many_lanes_are_served_in_order_of_arrival(lanes: int) -> None:
    harness = SchedulerHarness(processes=1, max_batch_size=1)
    for number in range(2000):
        harness.offer(str(number), at=number, lane=str(number % lanes))
    order = []
    for batch in range(1, 51):
        order += harness.poll(2000)
        harness.settle(batch, at=2000)
    assert order == [f"full: {number}" for number in range(len(order))]


# --- batches of one request --------------------------------------------------------------------------------


def stepping_harness(slots: int, **settings: Any) -> SchedulerHarness:
    """One process of a stepping model: it takes `slots` requests and an eighth more, or at least one more."""
    harness = SchedulerHarness(max_batch_size=slots, **settings)
    harness.scheduler.kind = ModelKind.STEPPING
    return harness


@pytest.mark.parametrize("rows", [False, True])
def test_each_request_of_a_run_is_a_batch_as_far_as_there_is_capacity(*, rows: bool) -> None:
    harness = stepping_harness(slots=2)
    arrived = run("a b c d", rows=rows)
    harness.offer_runs([arrived], at=0)
    assert harness.poll() == ["full: a", "full: b", "full: c"]
    assert [one.correlation_ids for one in arrived.entry.runs] == [["d"]]
    harness.settle(1)
    assert harness.poll() == ["full: d"]


def test_run_does_not_overtake_what_arrived_before_it_in_another_lane() -> None:
    harness = stepping_harness(slots=8)
    harness.offer("a b", at=0, lane="one")
    harness.offer("c", at=1, lane="other")
    harness.offer("d", at=2, lane="one")
    assert harness.poll(3) == ["full: a", "full: b", "full: c", "full: d"]


def test_last_request_may_exceed_the_limit_on_the_cost_of_slots() -> None:
    harness = stepping_harness(slots=8, max_batch_cost=10)
    harness.offer("a b c d e f", cost=3)
    assert harness.poll() == ["full: a", "full: b", "full: c", "full: d"]


def test_requests_that_expired_are_served_singly_too_and_have_no_deadline_in_flight() -> None:
    harness = stepping_harness(slots=2, priority_policies={4: PriorityPolicy(expiration_action="delay")})
    harness.scheduler.model_processes = 0
    harness.offer("a b", expiration=1)
    assert harness.poll(2) == []
    harness.scheduler.model_processes = 1
    assert harness.poll(3) == ["full: a", "full: b"]
    assert not any(batch.expiring for batch in harness.scheduler.in_flight.batches.values())


ENTRIES: Final = st.lists(
    st.fixed_dictionaries(
        {
            "size": st.integers(1, 5),
            "at": st.integers(0, 3),
            "lane": st.sampled_from(("", "l")),
            "tenant": st.sampled_from(("", "t", "u")),
            "priority": st.sampled_from((4, 5)),
            "cost": st.integers(0, 4),
        }
    ),
    max_size=8,
)


@given(ENTRIES, st.integers(1, 9), st.sampled_from((None, 6)))
def test_requests_of_a_run_are_dispatched_as_if_each_were_a_run(
    entries: Sequence[Mapping[str, Any]], slots: int, cost_max: int | None
) -> None:
    together, singly = (stepping_harness(slots, max_batch_cost=cost_max) for _ in range(2))
    for number, entry in enumerate(entries):
        fields = {name: value for name, value in entry.items() if name != "size"}
        names = [f"{number}.{at}" for at in range(entry["size"])]
        together.offer(" ".join(names), **fields)
        for name in names:
            singly.offer(name, **fields)
    for settled in range(1, 1 + sum(entry["size"] for entry in entries)):
        assert together.poll(9) == singly.poll(9)
        for harness in (together, singly):
            harness.settle(settled, 9)
    assert not together.scheduler.queue.count


# --- when to look for requests -----------------------------------------------------------------------------


def test_requests_are_of_no_use_until_a_process_can_take_a_batch() -> None:
    """An execution of one takes 11 ms, and a round trip no time."""
    harness = SchedulerHarness(max_batch_size=8).learn()
    assert harness.earliest_dispatch_ms() == 0
    harness.offer("a", at=5)
    assert harness.poll(5) == ["idle: a"]
    assert harness.earliest_dispatch_ms() == 5 + 11
    harness.offer("b c", at=6)
    assert harness.poll(6) == []
    assert harness.earliest_dispatch_ms() == 5 + 11
    # Then one is dispatched ahead, and after that nothing until the first batch settles
    assert harness.poll(16) == ["idle: b c"]
    assert harness.earliest_dispatch_ms() is None


def test_batch_that_takes_longer_than_expected_must_settle_first() -> None:
    harness = SchedulerHarness(max_batch_size=8).learn()
    harness.offer("a")
    harness.poll()
    harness.poll(16)
    assert harness.earliest_dispatch_ms() == 11
    harness.poll(50)
    assert harness.earliest_dispatch_ms() is None


def test_batch_that_may_soon_be_full_may_be_dispatched_at_any_time() -> None:
    """With half of a batch there may be all of it with the next request. Not so under `deferred`, where a
    full batch is not dispatched at once."""
    harness = SchedulerHarness(max_batch_size=8).learn()
    harness.offer("a")
    harness.poll()
    harness.offer("b c d", at=1)
    harness.poll(1)
    assert harness.earliest_dispatch_ms() == 11
    harness.offer("e", at=1)
    harness.poll(1)
    assert harness.earliest_dispatch_ms() == 1
    harness.scheduler.settings = ModelSettings(max_batch_size=8, policy="deferred")
    assert harness.earliest_dispatch_ms() == 11


@pytest.mark.parametrize("settings", [{"max_batch_cost": 100}, {"max_batch_size": 1}])
def test_any_request_may_make_a_batch_full(settings: dict[str, int]) -> None:
    harness = SchedulerHarness(**settings).learn()
    harness.offer("a")
    harness.poll()
    assert harness.earliest_dispatch_ms() == 0


def test_while_execution_times_are_unknown_a_batch_may_be_dispatched_at_any_time() -> None:
    harness = SchedulerHarness(max_batch_size=8)
    harness.offer("a")
    harness.poll()
    assert harness.earliest_dispatch_ms() == 0


def test_without_processes_nothing_can_be_dispatched() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=8)
    harness.offer("a")
    harness.poll()
    assert harness.earliest_dispatch_ms() is None


def test_request_that_takes_steps_waits_for_a_slot() -> None:
    harness = SchedulerHarness(max_batch_size=2)
    harness.scheduler.kind = ModelKind.STEPPING
    harness.offer("a b")
    assert harness.poll() == ["full: a", "full: b"]
    assert harness.earliest_dispatch_ms() == 0
    harness.offer("c d")
    assert harness.poll() == ["full: c"]
    assert harness.earliest_dispatch_ms() is None
