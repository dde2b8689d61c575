"""When a child that died is started again, and which plans make no sense."""

from __future__ import annotations

import pytest

from carpool_cli.local import supervisor
from carpool_cli.local.embedded import EmbeddedRedisError
from carpool_cli.local.supervisor import Keeper, Plan, Supervisor, preferred_port


class FakeChild:
    """Runs until it is told that it died; may refuse to start."""

    name = "child"

    def __init__(self) -> None:
        self.starts = 0
        self.how: str | None = None
        self.refuses = False

    def start(self) -> None:
        if self.refuses:
            raise EmbeddedRedisError("the port is taken")
        self.starts += 1
        self.how = None

    def how_it_ended(self) -> str | None:
        return self.how


def pauses(
    keeper: Keeper, child: FakeChild, now_s: float, deaths: int, *, life_s: float = 0.0
) -> list[float]:
    """How long each of so many starts was waited for, by a child that dies `life_s` after each."""
    waited = []
    for _ in range(deaths):
        now_s += life_s
        child.how = "SIGKILL"
        died_s, starts = now_s, child.starts
        keeper.run_once(now_s)
        while child.starts == starts:
            now_s += 0.01
            keeper.run_once(now_s)
        waited.append(round(now_s - died_s, 1))
    return waited


def test_a_child_that_runs_is_left_alone() -> None:
    child = FakeChild()
    keeper = Keeper(child, 0.0)
    for second in range(100):
        keeper.run_once(float(second))
    assert child.starts == 0


def test_pauses_double_up_to_five_seconds() -> None:
    child = FakeChild()
    waited = pauses(Keeper(child, 0.0), child, 1.0, 8)
    assert waited == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0], abs=0.02)


def test_ten_seconds_of_life_are_forgiving() -> None:
    child = FakeChild()
    keeper = Keeper(child, 0.0)
    pauses(keeper, child, 1.0, 5)
    assert pauses(keeper, child, 100.0, 2, life_s=10.5) == pytest.approx([0.1, 0.1], abs=0.02)


def test_a_start_that_fails_is_tried_again_ever_later() -> None:
    child = FakeChild()
    keeper = Keeper(child, 0.0)
    child.how, child.refuses = "it died", True
    tries = [step / 100 for step in range(1000)]
    for now_s in tries[:300]:
        keeper.run_once(now_s)
    assert child.starts == 0
    child.refuses = False
    for now_s in tries[300:]:
        keeper.run_once(now_s)
    assert child.starts == 1


def test_two_models_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two models are named square; write NAME="):
        Supervisor(Plan(["square", "square"]))
    Supervisor(Plan(["square", "cube=square"]))


def test_a_model_without_a_usable_name_is_refused() -> None:
    with pytest.raises(ValueError, match="NAME="):
        Supervisor(Plan(["my models.py:%"]))


def test_redis_own_port_is_taken_only_if_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "is_free", lambda port: port == 6379)
    assert preferred_port() == 6379
    monkeypatch.setattr(supervisor, "is_free", lambda port: False)
    assert preferred_port() is None
