"""When a process is retired because all that it executes fails."""

from __future__ import annotations

from collections.abc import Sequence

from carpool.errors import INTERNAL, INVALID_ARGUMENT, UNAVAILABLE
from carpool_worker.execution import Example
from carpool_worker.model_process.frames import FrameHeader, OutcomeHeader
from carpool_worker.retirement import (
    BATCHES_MIN,
    EXAMPLE_S_MAX,
    FAILING_S_MIN,
    PAUSE_S_MAX,
    PAUSE_S_MIN,
    LastSuccess,
    Retirement,
)

EXAMPLE = Example(FrameHeader(0, 1), b"", ("id", "", {}), 1, None)
STEP_S = FAILING_S_MIN / 2


class Process:
    """A process whose batches succeed or fail, one every `STEP_S`, and the example with `example_status`."""

    def __init__(self, of_worker: LastSuccess | None = None, example_status: str | None = INTERNAL) -> None:
        self.retirement = Retirement()
        self.example_status = example_status
        self.examples = 0  # that it executed
        if of_worker is not None:
            self.retirement.last_success = of_worker
        self.now_s = 100.0
        self.number = 0

    def execute(
        self, statuses: Sequence[str | None] = (None,), *, batch: str = "", executed: int = 0
    ) -> bool:
        """Execute a frame with the statuses of its failures, None for a success; and the example if it is
        due. Whether to retire then."""
        self.now_s += STEP_S
        self.number += 1
        failures = {at: (status, "") for at, status in enumerate(statuses) if status is not None}
        outcome = OutcomeHeader(0, len(statuses), self.number, 1, failures, executed_together=executed)
        self.retirement.observe_outcome(outcome, batch or f"{self.number}-0", self.now_s)
        if None in statuses and self.retirement.last_success.wants_example(self.now_s):
            self.retirement.last_success.take_example(EXAMPLE, self.now_s)
        example = self.retirement.due_example
        if example is None:
            return False
        self.examples += 1
        self.retirement.example_sent(example)
        assert self.retirement.due_example is None
        of_example = {} if self.example_status is None else {0: (self.example_status, "")}
        return self.retirement.observe_example(of_example, self.now_s)

    def fail(self, times: int, **more: object) -> list[bool]:
        return [self.execute([INTERNAL], **more) for _ in range(times)]  # type: ignore[arg-type]

    def replace(self) -> None:
        self.retirement.retired(self.now_s)
        self.retirement.process_started()


def test_a_process_that_succeeded_and_fails_from_then_on_is_retired() -> None:
    process = Process()
    assert not process.execute()
    assert process.fail(BATCHES_MIN) == [False] * (BATCHES_MIN - 1) + [True]
    assert process.retirement.failed_batches == BATCHES_MIN


def test_the_one_that_replaces_it_is_not_retired_in_its_turn() -> None:
    process = Process()
    process.execute()
    process.fail(BATCHES_MIN)
    process.replace()
    process.now_s += 10 * PAUSE_S_MAX
    assert not any(process.fail(10 * BATCHES_MIN))


def test_a_process_that_never_succeeded_is_retired_if_another_one_succeeds_meanwhile() -> None:
    of_worker = LastSuccess()
    broken, other = Process(of_worker), Process(of_worker)
    other.execute()  # before
    assert not any(broken.fail(2 * BATCHES_MIN))
    other.now_s = broken.now_s
    other.execute()
    assert broken.fail(1) == [True]


def test_one_success_is_enough_to_stay() -> None:
    process = Process()
    process.execute()
    for statuses in ([None], [INTERNAL, None], [INTERNAL, None, INVALID_ARGUMENT]):
        process.fail(BATCHES_MIN - 1)
        assert not process.execute(statuses)
    assert not any(process.fail(BATCHES_MIN - 1))


def test_a_model_that_returns_exceptions_is_not_broken() -> None:
    process = Process()
    process.execute()
    assert not any(process.execute([INTERNAL, INTERNAL], executed=2) for _ in range(10 * BATCHES_MIN))


def test_bodies_that_are_refused_say_nothing() -> None:
    process = Process()
    process.execute()
    for status in (INVALID_ARGUMENT, UNAVAILABLE):
        assert not any(process.execute([status]) for _ in range(10 * BATCHES_MIN))
    process.fail(BATCHES_MIN - 1)
    assert not process.execute([INVALID_ARGUMENT])
    assert process.execute([INVALID_ARGUMENT, INTERNAL])  # the one that was not refused failed


def test_bad_bodies_of_any_number_of_names_retire_nothing() -> None:
    """Whoever sends them: the process executes what it has executed before."""
    process = Process(example_status=None)
    process.execute()
    assert not any(process.fail(10 * BATCHES_MIN))
    assert process.examples == 10  # each time, failures have to come together anew


def test_an_example_that_is_refused_says_nothing() -> None:
    process = Process(example_status=INVALID_ARGUMENT)
    process.execute()
    assert not any(process.fail(10 * BATCHES_MIN))
    assert process.examples == 10


def test_without_an_example_nothing_is_retired() -> None:
    """Every request that succeeded was too large to be kept."""
    process = Process()
    process.execute()
    process.retirement.last_success.example = None
    assert not any(process.fail(10 * BATCHES_MIN))
    process.retirement.last_success.example = EXAMPLE
    assert process.fail(1) == [True]


def test_a_success_beside_the_example_counts() -> None:
    """Of a stepping model, which steps both."""
    process = Process()
    process.execute()
    process.fail(BATCHES_MIN - 1)
    process.now_s += STEP_S
    process.retirement.observe_failure((INTERNAL, ""), "another", process.now_s)
    assert process.retirement.due_example is EXAMPLE
    process.retirement.example_sent(EXAMPLE)
    process.retirement.succeeded(process.now_s)
    assert not process.retirement.observe_example({0: (INTERNAL, "")}, process.now_s)


def test_an_example_is_replaced_seldom() -> None:
    of_worker = LastSuccess()
    assert of_worker.wants_example(0.0)
    of_worker.take_example(None, 0.0)
    assert of_worker.wants_example(0.0)
    of_worker.take_example(EXAMPLE, 0.0)
    assert not of_worker.wants_example(EXAMPLE_S_MAX - 1)
    assert of_worker.wants_example(EXAMPLE_S_MAX)


def test_frames_of_one_batch_count_once() -> None:
    process = Process()
    process.execute()
    assert not any(process.fail(10 * BATCHES_MIN, batch="7-0"))


def test_failures_at_once_may_pass() -> None:
    process = Process()
    process.execute()
    for _ in range(10 * BATCHES_MIN):
        assert not process.execute([INTERNAL])
        process.now_s -= STEP_S
    process.now_s += FAILING_S_MIN
    assert process.execute([INTERNAL])


def test_the_pause_between_retirements_doubles_and_is_short_again_later() -> None:
    process = Process()

    def pause_s() -> float:
        """From one retirement to the next of a process that succeeds now and then."""
        began_s = process.now_s
        for _ in range(10_000):
            process.execute()
            if any(process.fail(BATCHES_MIN)):
                process.replace()
                return process.now_s - began_s
        raise AssertionError("it is not retired")

    pause_s()
    pauses_s = [pause_s() for _ in range(9)]
    expected_s = PAUSE_S_MIN
    for passed_s in pauses_s:
        assert expected_s <= passed_s < expected_s + 2 * (BATCHES_MIN + 2) * STEP_S
        expected_s = min(2 * expected_s, PAUSE_S_MAX)
    assert expected_s == PAUSE_S_MAX
    process.now_s += 2 * PAUSE_S_MAX
    pause_s()
    assert pause_s() < PAUSE_S_MIN + 2 * (BATCHES_MIN + 2) * STEP_S
