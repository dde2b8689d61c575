"""How long a model process executes, in virtual time."""

from __future__ import annotations

from carpool_worker.execution_watch import ExecutionWatch


def test_an_execution_is_over_after_its_limit() -> None:
    watch = ExecutionWatch()
    watch.follow("a", 500, 100.0)
    assert watch.left_s(100.25) == 0.25
    assert not watch.is_over(100.5)
    assert watch.is_over(100.51)
    assert watch.left_s(101.0) == 0


def test_each_execution_has_all_of_the_time() -> None:
    watch = ExecutionWatch()
    watch.follow("a", 500, 100.0)
    watch.follow("a", 500, 100.4)  # still the same
    watch.follow("b", 500, 100.6)
    assert not watch.is_over(101.0)
    assert watch.is_over(101.2)


def test_an_idle_process_has_no_limit() -> None:
    watch = ExecutionWatch()
    watch.follow("a", 500, 100.0)
    watch.follow(None, None, 100.4)
    assert not watch.is_over(1e6)
    assert not watch.is_to_report(1e6)
    assert watch.left_s(1e6) == float("inf")


def test_an_execution_without_a_limit_is_reported_after_10_20_40_seconds() -> None:
    watch = ExecutionWatch()
    watch.follow("a", None, 0.0)
    assert watch.left_s(1e6) == float("inf")
    assert [second for second in range(100) if watch.is_to_report(second)] == [10, 20, 40, 80]
    watch.follow("b", None, 100.0)
    assert [second for second in range(100, 125) if watch.is_to_report(second)] == [110, 120]
    assert not watch.is_over(1e6)
