"""`carpool config` without Redis: what was asked for, and who said what holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pytest

from carpool.model_settings import ModelSettings
from carpool.settings import read_settings
from carpool.store.directory import ModelOverview
from carpool.wire.report import BatcherReport, Gauges
from carpool_cli.config import (
    LONGEST_SHOWN,
    ConfigError,
    ConfigSettings,
    Line,
    configure,
    parse,
    resolve,
    show,
    show_changes,
)
from carpool_cli.screen import Screen


class Directory:
    """What `configure` asks of Redis."""

    def __init__(self, registered: dict[str, str], said: dict[str, str]) -> None:
        self.registered = registered
        self.said = said
        self.asked_for: list[Any] = []

    def models(self) -> list[str]:
        return ["m"]

    def config(self, model: str) -> tuple[dict[str, str], dict[str, str]]:
        return self.registered, self.said

    def configure(self, model: str, values: dict[str, str], back: Sequence[str]) -> None:
        self.asked_for.append((model, values, list(back)))


def test_values_and_what_is_taken_back() -> None:
    assert parse([]) == ({}, [])
    assert parse(["max_batch_size=8", "max-queue-size=5", "policy="]) == (
        {"max_batch_size": "8", "max_queue_size": "5"},
        ["policy"],
    )
    assert parse(["tenant_weights=gold:4,silver:2"]) == ({"tenant_weights": "gold:4,silver:2"}, [])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("max_batchsize=8", "no setting 'max_batchsize'; did you mean max_batch_size?"),
        ("colour=blue", "no setting 'colour'; there are max_batch_size, "),
        ("=8", "no setting ''; there are "),
        (
            "max_batch_size",
            "max_batch_size: say what it is to be, as in max_batch_size=VALUE, or max_batch_size=",
        ),
    ],
)
def test_what_is_no_change_is_told_what_would_be(change: str, says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(["max_queue_size=5", change])
    assert str(refused.value).startswith(says)


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ([], []),
        (["max_batch_size=8"], ["max_batch_size=8"]),
        (["max_batch_size=8", "policy="], ["max_batch_size=8", "policy="]),
        (
            ["tenant_weights=gold:4,silver:2", "preferred_batch_sizes=4,8", "max_queue_size=9"],
            ["tenant_weights=gold:4,silver:2", "preferred_batch_sizes=4,8", "max_queue_size=9"],
        ),
        (
            ['priority_policies={"0": {"max_queue_size": 5, "expiration_action": "delay"}}'],
            ['priority_policies={"0": {"max_queue_size": 5, "expiration_action": "delay"}}'],
        ),
    ],
)
def test_commas_in_a_value_are_its_own(words: list[str], changes: list[str]) -> None:
    settings = read_settings(ConfigSettings, ["square", *words], "carpool config")
    assert (settings.model, settings.change) == ("square", changes)


REGISTERED: Final = {**ModelSettings(max_batch_size=16, max_queue_size=50).as_text(), "inputs": "[]"}


def test_an_operators_word_goes_before_the_models_and_that_before_the_default() -> None:
    lines = resolve(REGISTERED, {"max_batch_size": "4", "result_ttl_ms": "9000"})
    assert list(lines) == ModelSettings.names()
    told = {name: (line.value, line.source) for name, line in lines.items()}
    assert told["max_batch_size"] == ("4", "operator")
    assert told["max_queue_size"] == ("50", "model")
    assert told["result_ttl_ms"] == ("9000", "operator")
    assert told["max_batch_cost"] == ("none", "default")
    assert all(line.meaning for line in lines.values())


def test_what_an_operator_says_is_shown_as_it_is_understood() -> None:
    assert resolve({}, {"preferred_batch_sizes": "16 4,8"})["preferred_batch_sizes"].value == "4,8,16"


def test_changes_are_made_all_or_none() -> None:
    directory: Any = Directory(REGISTERED, {"policy": "deferred"})
    lines, before = configure(directory, "m", ["max_batch_size=2", "policy="])
    assert directory.asked_for == [("m", {"max_batch_size": "2"}, ["policy"])]
    assert lines["max_batch_size"][:2] == ("2", "operator")
    assert lines["policy"][:2] == ("eager", "default")
    assert list(lines) == ModelSettings.names()
    assert before == {"max_batch_size": "16 (model)", "policy": "deferred (operator)"}
    with pytest.raises(
        ConfigError, match="max_queue_size: '0' must be a whole number, 1 or more; nothing was changed"
    ):
        configure(directory, "m", ["max_batch_size=3", "max_queue_size=0"])
    assert len(directory.asked_for) == 1


PREFERRING: Final = ModelSettings(max_batch_size=16, preferred_batch_sizes=(4, 16)).as_text()


def test_a_preferred_size_that_no_batch_can_have_is_refused() -> None:
    directory: Any = Directory(PREFERRING, {})
    says = "preferred_batch_sizes: 32 can never be filled, because max_batch_size is 16; nothing was changed"
    with pytest.raises(ConfigError, match=f"^{says}$"):
        configure(directory, "m", ["preferred_batch_sizes=8,32"])
    with pytest.raises(ConfigError, match="because max_batch_size is 8; nothing"):
        configure(directory, "m", ["preferred_batch_sizes=8,16", "max_batch_size=8"])
    assert not directory.asked_for
    assert configure(directory, "m", ["preferred_batch_sizes=32", "max_batch_size=32"]).before


def test_batches_can_be_made_smaller_than_a_size_the_model_prefers() -> None:
    directory: Any = Directory(PREFERRING, {})
    lines, _ = configure(directory, "m", ["max_batch_size=8"])
    assert lines["max_batch_size"][:2] == ("8", "operator")
    assert lines["preferred_batch_sizes"][:2] == ("4,16", "model")
    # And from then on all else can be changed
    directory.said = {"max_batch_size": "8"}
    assert configure(directory, "m", ["max_queue_size=5"]).lines["max_queue_size"].source == "operator"


def test_looking_changes_nothing() -> None:
    directory: Any = Directory(REGISTERED, {})
    assert configure(directory, "m", []).before == {}
    assert directory.asked_for == []


def test_a_wrong_word_of_before_can_be_taken_back() -> None:
    directory: Any = Directory(REGISTERED, {"max_batch_size": "many"})
    lines, before = configure(directory, "m", ["max_batch_size="])
    assert lines["max_batch_size"][:2] == ("16", "model")
    assert before == {"max_batch_size": "many (operator)"}


def test_a_model_that_is_not_there() -> None:
    directory: Any = Directory({}, {})
    with pytest.raises(ConfigError, match="no model 'other' is registered; there are m"):
        configure(directory, "other", ["max_batch_size=1"])
    assert directory.asked_for == []


def test_a_page_is_narrow_whatever_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        {"tenant_weights": Line("x" * 500, "operator", "shares"), "policy": Line("", "model", "which")},
        Screen(),
    )
    said = capsys.readouterr().out
    assert "x" * (LONGEST_SHOWN - 3) + "..." in said
    assert "x" * (LONGEST_SHOWN - 2) not in said
    assert any(line.split() == ["policy", "-", "model", "which"] for line in said.splitlines())


def test_after_a_change_only_what_changed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    directory: Any = Directory(REGISTERED, {})
    show_changes(*configure(directory, "m", ["tenant_weights=gold:4", "max_batch_size=2"]), Screen())
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["setting", "value", "from", "before"],
        ["tenant_weights", "gold:4", "operator", "-", "(default)"],
        ["max_batch_size", "2", "operator", "16", "(model)"],
    ]


class Served(Directory):
    """With an active batcher that knows a policy of a user's own."""

    def overview(self, model: str) -> ModelOverview:
        gauges = Gauges(0, 0, 0.0, 0, 0, 1)
        status = BatcherReport("me", 1, 2, gauges, {}, 0, 0, {}, None, None, policies=("mine.py:Balanced",))
        return ModelOverview(2, 0, 0, 1, True, status.encode().encode())


def test_a_policy_that_the_batcher_does_not_know_is_refused() -> None:
    directory: Any = Served({}, {})
    with pytest.raises(ConfigError, match=r"none of the active batcher's --policies, which are mine.py:Bal"):
        configure(directory, "m", ["policy=mine.py:Other"])
    assert not directory.asked_for
    assert configure(directory, "m", ["policy=mine.py:Balanced"]).lines["policy"].source == "operator"
