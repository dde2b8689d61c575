"""The policy `deferred` in the scheduler: late dispatch, early refusal, l(n) per lane, and trials."""

from __future__ import annotations

from typing import Any

import pytest

from carpool.messages.results import Refusal
from carpool.model_settings import ModelSettings
from carpool_batcher.core.dispatching import LANES_UPDATED_MAX, Dispatcher
from carpool_batcher.core.policies.deferred import ArrivalRate
from carpool_batcher.core.scheduler import Dispatch
from carpool_batcher.core.waiting.lane import Lane
from support.scheduler_harness import MS, SchedulerHarness, names_of, settle


@pytest.fixture
def _crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many requests arrive that it costs nothing to wait for one more."""
    monkeypatch.setattr(ArrivalRate, "gap_us", 0.0)


crowded = pytest.mark.usefixtures("_crowded")

# --- late dispatch and early refusal ---------------------------------------------------------------------


@crowded
def test_batch_is_dispatched_as_late_as_its_deadlines_allow() -> None:
    harness = SchedulerHarness(max_batch_size=100, policy="deferred").learn()
    harness.offer("a", expiration=50)
    assert harness.wake_at_ms() == pytest.approx(50 - 12, abs=0.01)  # when two would still be in time
    harness.offer("b", at=20, expiration=50)
    assert harness.wake_at_ms() == pytest.approx(50 - 13, abs=0.01)
    assert harness.poll(30) == []
    assert harness.poll(37.1) == ["deadline: a b"]


def test_request_that_cannot_be_in_time_is_refused_before_execution() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=8, policy="deferred").learn()
    harness.offer("hopeless", expiration=19)
    harness.offer("a", expiration=25)
    harness.scheduler.model_processes = 1
    (refused, dispatched) = harness.scheduler.poll(13 * MS)
    assert isinstance(refused, Refusal)
    assert (refused.correlation_ids, refused.status, refused.reason) == (
        ["hopeless"],
        "DEADLINE_EXCEEDED",
        "early",
    )
    assert refused.detail == "refused early: the 6 ms before its deadline are not enough to execute it"
    assert isinstance(dispatched, Dispatch)
    assert names_of(dispatched.runs) == "a"


def test_more_hopeless_requests_than_one_plan_covers_are_all_refused() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=2, policy="deferred").learn()
    harness.offer(" ".join(f"h{number}" for number in range(30)), expiration=19)
    harness.scheduler.model_processes = 1
    refused = " ".join(harness.poll(13)).replace("DEADLINE_EXCEEDED: ", "")
    assert refused == " ".join(f"h{number}" for number in range(30))


@pytest.mark.parametrize(("waiting", "first"), [(15, "full: head"), (16, "DEADLINE_EXCEEDED: head")])
def test_batches_of_all_processes_are_planned(waiting: int, first: str) -> None:
    """A batch of one takes 11 ms and one of two 12 ms; a plan looks at each of the first 8 requests only."""
    harness = SchedulerHarness(processes=0, max_batch_size=2, policy="deferred").learn()
    harness.offer("head", expiration=11.5)
    harness.offer(" ".join(f"r{number}" for number in range(1, waiting)), expiration=12)
    harness.scheduler.model_processes = 8
    assert harness.poll(0)[0] == first


def test_request_with_a_target_only_or_a_delayed_one_is_not_refused_early() -> None:
    harness = SchedulerHarness(processes=0, max_batch_size=8, policy="deferred", target_latency_ms=5).learn()
    harness.offer("target")
    harness.scheduler.model_processes = 1
    assert harness.poll(13) == ["deadline: target"]
    harness = SchedulerHarness(processes=0, max_batch_size=8, policy="deferred", expiration_action="delay")
    harness.learn()
    harness.offer("served", expiration=19)
    harness.scheduler.model_processes = 1
    assert harness.poll(13) == ["deadline: served"]
    assert harness.poll(30) == []


def busy_harness(names: str, **fields: Any) -> SchedulerHarness:
    """A batch is executed until 15 ms, these requests wait, and the round trip is 2 ms; l(n) = 10 + n ms."""
    harness = SchedulerHarness(max_batch_size=3, policy="deferred").learn()
    for _ in range(64):
        harness.scheduler.learned._transit.observe_round_trip(3, 2 * MS, 0, 0)
    harness.offer("x y z", expiration=1000)
    assert harness.poll() == ["full: x y z"]
    harness.offer(names, at=1, **fields)
    return harness


def test_full_batch_is_dispatched_before_others_would_be() -> None:
    harness = busy_harness("a b c", expiration=1000)
    assert harness.wake_at_ms() == 11  # two round trips before its process is free
    assert harness.poll(10.9) == []
    assert harness.poll(11) == ["full: a b c"]


def test_two_full_batches_are_ahead_of_a_process_if_they_are_short() -> None:
    harness = busy_harness("a b c", expiration=1000)
    assert harness.poll(11) == ["full: a b c"]
    harness.offer("d e f", at=11, expiration=1000)
    # That is the second one ahead: the process is free for it at 15 + 13
    assert harness.wake_at_ms() == 15 + 13 - 4
    for _ in range(64):
        harness.scheduler.learned._transit.observe_round_trip(3, 9 * MS, 0, 0)
    assert harness.poll(11) == ["full: d e f"]  # now round trips take 9 ms
    harness.offer("g h i", at=11, expiration=1000)
    assert harness.poll(14) == []  # never a third one


@crowded
def test_urgent_batch_that_is_not_full_is_dispatched_one_round_trip_before() -> None:
    harness = busy_harness("a b", expiration=26.5)
    assert harness.wake_at_ms() == 13
    assert harness.poll(12.9) == []
    assert harness.poll(13) == ["deadline: a b"]


@crowded
def test_full_batch_of_which_a_part_would_be_late_is_planned_when_its_process_is_free() -> None:
    # As if dispatched at 13, it arrives at 28, and two of them at 27; the first one should at 26.5
    harness = busy_harness("a", expiration=25.5)
    harness.offer("b c", at=1, expiration=28)
    assert harness.poll(11) == []
    assert harness.wake_at_ms() == 13
    assert harness.poll(13) == ["DEADLINE_EXCEEDED: a"]
    assert harness.poll(14) == ["deadline: b c"]  # when three would still be in time


@crowded
def test_lane_of_which_a_part_would_be_late_is_not_overtaken() -> None:
    harness = busy_harness("a", expiration=25.5)
    harness.offer("b c", at=1, expiration=28)
    harness.offer("x y z", at=2, expiration=1000, lane="other")
    assert harness.poll(11) == []
    assert harness.poll(12.9) == []
    assert harness.poll(13) == ["DEADLINE_EXCEEDED: a", "full: x y z"]


def test_full_batch_behind_a_hopeless_request_is_dispatched_early() -> None:
    harness = busy_harness("a", expiration=20)
    harness.offer("b c d", at=1, expiration=100)
    assert harness.poll(11) == ["DEADLINE_EXCEEDED: a", "full: b c d"]


@crowded
def test_after_a_batch_that_was_put_off_the_next_one_may_be_early() -> None:
    harness = busy_harness("a", expiration=25.5)
    harness.offer("b c", at=1, expiration=28)
    assert harness.poll(11) == []
    assert harness.poll(13) == ["DEADLINE_EXCEEDED: a"]
    harness.offer("d", at=13, expiration=100)
    assert harness.poll(13) == ["full: b c d"]
    settle(harness.scheduler, "1", 13 * MS, 15 * MS)
    harness.offer("e f g", at=15, expiration=1000)
    assert harness.poll(16) == []
    executed_ms = 15 + 13  # until then, and with the round trip
    assert harness.wake_at_ms() == executed_ms - 4


# --- while it pays to wait -------------------------------------------------------------------------------


def polled_each_ms(harness: SchedulerHarness, gap: int, until: int, **fields: Any) -> list[str]:
    """What is decided while a request arrives every `gap` ms."""
    decided: list[str] = []
    for at in range(until):
        if at % gap == 0:
            harness.offer(f"r{at}", at=at, expiration=1000, **fields)
        decided += harness.poll(at)
    return decided


def test_batch_waits_for_more_while_that_raises_throughput() -> None:
    # Given l(n) = 10 + n ms and a request every 4 ms
    harness = SchedulerHarness(policy="deferred", max_batch_size=100).learn()
    # Then it pays to wait for the third one (2 in 12 ms, or 3 in 13 + 4), but not for a fourth (4 in 14 + 4)
    assert polled_each_ms(harness, 4, 10) == ["efficient: r0 r4 r8"]
    # But if they arrive every millisecond, there are ten
    harness = SchedulerHarness(policy="deferred", max_batch_size=100).learn()
    (decided,) = polled_each_ms(harness, 1, 15)
    assert len(decided.split()) - 1 in (9, 10, 11)


def test_the_more_processes_are_idle_the_sooner_a_batch_is_dispatched() -> None:
    sizes = []
    for processes in (1, 2, 5):
        harness = SchedulerHarness(policy="deferred", max_batch_size=100, processes=processes).learn()
        sizes.append(len(polled_each_ms(harness, 1, 15)[0].split()) - 1)
    assert sizes[0] > sizes[1] > sizes[2]


# --- lanes -----------------------------------------------------------------------------------------------


def harness_with_fast_and_slow_lane(processes: int = 1, **settings: Any) -> SchedulerHarness:
    """l(n) is 10 + n ms in one lane, and ten times as much in the other."""
    harness = SchedulerHarness(processes=processes, policy="deferred", **settings)
    harness.learn(lane="fast")
    return harness.learn(intercept=100, slope=10, lane="slow")


@crowded
def test_each_lane_is_dispatched_as_late_as_its_own_latency_allows() -> None:
    harness = harness_with_fast_and_slow_lane(processes=2, max_batch_size=100)
    harness.offer("f", expiration=500, lane="fast")
    assert harness.wake_at_ms() == pytest.approx(500 - 12, abs=0.01)
    harness.offer("s", expiration=500, lane="slow")
    assert harness.wake_at_ms() == pytest.approx(500 - 120, abs=0.01)
    assert harness.poll(380.1) == ["deadline: s"]
    assert harness.poll(488.1) == ["deadline: f"]


def test_request_is_not_refused_for_the_latency_of_another_lane() -> None:
    harness = harness_with_fast_and_slow_lane(processes=0, max_batch_size=8)
    harness.offer("f", expiration=20, lane="fast")
    harness.offer("s", expiration=100, lane="slow")
    harness.scheduler.model_processes = 2
    assert harness.poll(8) == ["deadline: f", "DEADLINE_EXCEEDED: s"]


@crowded
def test_whether_a_batch_is_efficient_depends_on_its_lane() -> None:
    harness = SchedulerHarness(policy="deferred", max_batch_size=8).learn(intercept=0, slope=10, lane="alike")
    harness.learn(intercept=100, slope=0, lane="together")
    harness.offer("a", expiration=900, lane="alike")
    harness.offer("b", expiration=900, lane="together")
    assert harness.poll(1) == ["efficient: a"]


def test_process_becomes_free_by_the_latency_of_the_lane_it_executes() -> None:
    harness = harness_with_fast_and_slow_lane()
    harness.scheduler.settings = ModelSettings()
    harness.offer("f", lane="fast")
    assert harness.poll() == ["idle: f"]
    harness.offer("s", lane="slow")
    assert harness.wake_at_ms() == pytest.approx(11, abs=0.01)
    assert harness.poll(11.1) == ["idle: s"]
    harness.settle(1, at=11)
    harness.offer("g", lane="fast")
    assert harness.wake_at_ms() == pytest.approx(11.1 + 110, abs=0.01)  # it arrived when that one had ended


def test_each_lane_is_urgent_by_its_own_turnaround() -> None:
    harness = harness_with_fast_and_slow_lane(processes=0)
    harness.scheduler.settings = ModelSettings(max_queue_delay_ms=1000)
    harness.offer("f", expiration=500, lane="fast")
    assert harness.wake_at_ms() == pytest.approx(500 - 1.5 * 21 - 2, abs=5)
    harness.offer("s", expiration=500, lane="slow")
    assert harness.wake_at_ms() == pytest.approx(500 - 1.5 * 210 - 2, abs=20)


def test_new_lane_uses_the_latency_of_all_lanes() -> None:
    harness = SchedulerHarness(policy="deferred", max_batch_size=100).learn()
    harness.offer("new", expiration=50, lane="new")
    assert harness.wake_at_ms() == pytest.approx(50 - 12, abs=0.01)


# --- trials ----------------------------------------------------------------------------------------------


@crowded
def test_trials_teach_the_latency_of_a_lane_that_seems_too_slow() -> None:
    harness = SchedulerHarness(policy="deferred", max_batch_size=2)
    for _ in range(2):
        harness.learn(intercept=100, slope=10, lane="slow")
    for number in range(4):
        # Given that all lanes together seem too slow for these, a batch is dispatched as a trial
        harness.offer(f"a{number} b{number}", at=40 * number, expiration=20, lane="fast")
        assert harness.poll(40 * number) == [f"full: a{number} b{number}"]
        # But only one at a time, ...
        harness.offer(f"c{number}", at=40 * number, expiration=20, lane="fast")
        harness.scheduler.model_processes = 2
        assert harness.poll(40 * number) == [f"DEADLINE_EXCEEDED: c{number}"]
        harness.scheduler.model_processes = 1
        # ... and the next one only after a pause
        settle(harness.scheduler, str(number + 1), 5 * MS, (40 * number + 5) * MS)
        if number < 3:
            harness.offer(f"d{number}", at=40 * number + 29, expiration=20, lane="fast")
            assert harness.poll(40 * number + 29) == [f"DEADLINE_EXCEEDED: d{number}"]
    # Then the latency of the lane itself is known
    harness.offer("e", at=126, expiration=20, lane="fast")
    assert harness.poll(146 - 6) == []
    assert harness.poll(146 - 5) == ["deadline: e"]


def test_no_trial_soon_after_the_latency_of_the_lane_was_observed() -> None:
    harness = SchedulerHarness(policy="deferred", max_batch_size=8).learn(intercept=100)
    harness.offer("a", at=99, expiration=50)
    assert harness.poll(99) == ["DEADLINE_EXCEEDED: a"]
    harness.offer("b", at=100, expiration=50)
    assert harness.poll(100) == ["deadline: b"]


@crowded
def test_two_trials_show_that_ways_are_short_again() -> None:
    """Given a transit that was long for a moment, expect not all to be refused but a trial now and then."""
    harness = SchedulerHarness(policy="deferred", max_batch_size=8).learn()
    for _ in range(64):
        harness.scheduler.learned._transit.observe_round_trip(1, 30 * MS, 0, 0)
    harness.offer("a", at=99, expiration=20)
    assert harness.poll(99) == ["DEADLINE_EXCEEDED: a"]
    for number, at in enumerate((100, 220), start=1):
        harness.offer(f"trial{number}", at=at, expiration=20)
        assert harness.poll(at) == [f"deadline: trial{number}"]
        settle(harness.scheduler, str(number), 11 * MS, (at + 12) * MS)  # its round trip took 1 ms
    harness.offer("b", at=233, expiration=20)
    assert harness.poll(239) == []
    assert harness.poll(240) == ["deadline: b"]


# --- many lanes --------------------------------------------------------------------------------------------


def test_what_was_learned_is_applied_to_few_of_many_lanes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise each batch that settles would cost time in proportion to all waiting lanes."""
    harness = SchedulerHarness(max_batch_size=8, policy="deferred").learn()
    for number in range(1000):
        harness.offer("a", expiration=60_000, lane=f"lane-{number}")
    harness.wake_at_ms()
    claimed: list[str] = []
    claim = Dispatcher._claim

    def counted(self: Dispatcher, lane: Lane, now_us: int) -> Any:
        claimed.append(lane.name)
        return claim(self, lane, now_us)

    monkeypatch.setattr(Dispatcher, "_claim", counted)
    for number in range(100):  # each is a batch that settles
        claimed.clear()
        harness.learn(until=number)
        harness.wake_at_ms()
        assert 0 < len(claimed) <= 4 * (LANES_UPDATED_MAX + 1)  # `learn` settles four


@crowded
def test_every_lane_follows_what_was_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = SchedulerHarness(max_batch_size=8, policy="deferred").learn(intercept=10, slope=0)
    for number in range(100):
        harness.offer("a", expiration=1000 + number, lane=f"lane-{number}")
    assert harness.wake_at_ms() == pytest.approx(1000 - 10, abs=0.1)
    for _ in range(1 + 100 // LANES_UPDATED_MAX):  # now it is ten times slower
        harness.learn(intercept=100, slope=0)
    assert harness.wake_at_ms() == pytest.approx(1000 - 100, abs=0.1)
    assert harness.poll(899) == []
    assert harness.poll(900.1) == ["deadline: a"]


@crowded
def test_no_batch_is_dispatched_too_early_by_a_claim_that_is_not_updated_yet() -> None:
    harness = SchedulerHarness(max_batch_size=8, policy="deferred").learn(intercept=400, slope=0)
    for number in range(1000):
        harness.offer("a", expiration=1000 + number, lane=f"lane-{number}")
    harness.wake_at_ms()
    harness.learn(intercept=10, slope=0)
    harness.learn(intercept=10, slope=0)
    assert harness.poll(620) == []
    assert harness.poll(992) == ["deadline: a"]
