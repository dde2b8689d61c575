"""When a child process is restarted, and which plans are rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from carpool_cli.local import supervisor
from carpool_cli.local.embedded import EmbeddedRedisError
from carpool_cli.local.supervisor import ConsoleService, Restarter, StackPlan, Supervisor, preferred_port


class FakeChild:
    """Runs until `reason` is set; fails to start while `fails_to_start` is set."""

    name = "child"

    def __init__(self) -> None:
        self.starts = 0
        self.reason: str | None = None
        self.fails_to_start = False

    def start(self) -> None:
        if self.fails_to_start:
            raise EmbeddedRedisError("the port is taken")
        self.starts += 1
        self.reason = None

    def exit_reason(self) -> str | None:
        return self.reason


def restart_delays(
    restarter: Restarter, child: FakeChild, now_s: float, deaths: int, *, life_s: float = 0.0
) -> list[float]:
    """The delay before each restart of a child that dies `deaths` times, `life_s` after each start."""
    delays = []
    for _ in range(deaths):
        now_s += life_s
        child.reason = "SIGKILL"
        died_s, starts = now_s, child.starts
        restarter.run_once(now_s)
        while child.starts == starts:
            now_s += 0.01
            restarter.run_once(now_s)
        delays.append(round(now_s - died_s, 1))
    return delays


def test_running_child_is_not_restarted() -> None:
    child = FakeChild()
    restarter = Restarter(child, 0.0)
    for second in range(100):
        restarter.run_once(float(second))
    assert child.starts == 0


def test_restart_delays_double_up_to_five_seconds() -> None:
    child = FakeChild()
    delays = restart_delays(Restarter(child, 0.0), child, 1.0, 8)
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.02)


def test_restart_delay_is_reset_after_ten_seconds_of_running() -> None:
    child = FakeChild()
    restarter = Restarter(child, 0.0)
    restart_delays(restarter, child, 1.0, 5)
    assert restart_delays(restarter, child, 100.0, 2, life_s=10.5) == pytest.approx([0.1, 0.1], abs=0.02)


def test_failed_start_is_retried() -> None:
    child = FakeChild()
    restarter = Restarter(child, 0.0)
    child.reason, child.fails_to_start = "it died", True
    times_s = [step / 100 for step in range(1000)]
    for now_s in times_s[:300]:
        restarter.run_once(now_s)
    assert child.starts == 0
    child.fails_to_start = False
    for now_s in times_s[300:]:
        restarter.run_once(now_s)
    assert child.starts == 1


def test_two_models_of_one_name_are_rejected() -> None:
    with pytest.raises(ValueError, match="two models are named square; write NAME=MODEL"):
        Supervisor(StackPlan(["square", "square"]))
    Supervisor(StackPlan(["square", "cube=square"]))


def test_model_without_a_usable_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="NAME="):
        Supervisor(StackPlan(["my models.py:%"]))


def test_preferred_port_is_6379_only_if_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "is_free", lambda port: port == 6379)
    assert preferred_port() == 6379
    monkeypatch.setattr(supervisor, "is_free", lambda port: False)
    assert preferred_port() is None


def test_the_password_of_the_operators_page_is_told_once(tmp_path: Path) -> None:
    """Given a file of users that a first start has made, expect that the next one names that file."""
    users = tmp_path / "users.toml"
    first, second = (ConsoleService(0, users, StackPlan(["square"]), {}) for _ in range(2))
    assert f"sign in as operator with {first.password}" in first.told
    assert (second.password, f"users: {users}" in second.told) == ("", True)
    assert first.password not in users.read_text()
