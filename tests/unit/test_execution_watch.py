"""How long a model process executes, in virtual time."""

from __future__ import annotations

from carpool_worker.execution_watch import Due, ExecutionWatch

NEVER_S = float("inf")


def test_an_execution_is_over_after_its_limit() -> None:
    watch = ExecutionWatch()
    assert watch.observe("a", 500, 100.0) is Due.NOTHING
    assert watch.over_at_s == 100.5
    assert watch.observe("a", 500, 100.5) is Due.NOTHING
    assert watch.observe("a", 500, 100.51) is Due.END


def test_each_execution_has_all_of_the_time() -> None:
    watch = ExecutionWatch()
    for executed, now_s in (("a", 100.0), ("a", 100.4), ("b", 100.6), ("b", 101.0)):
        assert watch.observe(executed, 500, now_s) is Due.NOTHING
    assert watch.observe("b", 500, 101.2) is Due.END


def test_an_idle_process_has_no_limit() -> None:
    watch = ExecutionWatch()
    watch.observe("a", 500, 100.0)
    assert watch.observe(None, None, 100.4) is Due.NOTHING
    assert watch.over_at_s == NEVER_S
    assert watch.observe(None, None, 1e6) is Due.NOTHING


def test_an_execution_without_a_limit_is_reported_after_10_20_40_seconds() -> None:
    watch = ExecutionWatch()
    found = [watch.observe("a", None, second) for second in range(100)]
    assert [second for second, due in enumerate(found) if due is Due.REPORT] == [10, 20, 40, 80]
    assert watch.over_at_s == NEVER_S
    assert watch.passed_s(80.0) == 80.0
    found = [watch.observe("b", None, second) for second in range(100, 125)]
    assert [second for second, due in enumerate(found, 100) if due is Due.REPORT] == [110, 120]
