"""Custom policies are loaded or refused, and settings take effect or are rejected because of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog

from carpool.model_settings import ModelSettings
from carpool.plugins import UnusableError
from carpool.store.directory import ModelSnapshot
from carpool_batcher.core.policies.custom import CustomPolicy
from carpool_batcher.custom_policies import load_policies
from carpool_batcher.effective_settings import EffectiveSettings

POLICIES = """
class Good:
    def include(self, batch, request):
        return True
class Raising(Good):
    def __init__(self):
        raise LookupError("no table")
class Exiting(Good):
    def __init__(self):
        raise SystemExit(3)
class Needy(Good):
    def __init__(self, table):
        pass
class Without:
    pass
def choose(batch, request):
    return True
good = Good()
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A file of policies, as it is written in `--policies`."""
    path = tmp_path / "policies_of_a_user.py"
    path.write_text(POLICIES)
    return str(path)


def test_usable_policies_are_loaded_by_name(module: str) -> None:
    name = f"{module}:Good"
    assert list(load_policies([name])) == [name]
    assert load_policies([]) == {}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "policies_of_a_user.py has no 'Nothing'"),
        ("Without", "Without' has no method 'include': write include(self, batch, request)"),
        ("choose", "choose' is a function: name a class with a method include(self, batch, request)"),
        ("good", "good' is an object of the type Good: name a class with"),
        (
            "Raising",
            "cannot be created: its constructor, which gets no arguments, raised LookupError: no table",
        ),
        ("Exiting", "raised SystemExit: 3"),
        ("Needy", "which gets no arguments, raised TypeError"),
    ],
)
def test_policy_that_cannot_be_used_is_refused(module: str, name: str, message: str) -> None:
    with pytest.raises(UnusableError) as refused:
        load_policies([f"{module}:Good", f"{module}:{name}"])
    assert str(refused.value).startswith("--policies: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class P(:", "cannot be imported: SyntaxError: "),
        ("import nothing_of_this_name", "cannot be imported: ModuleNotFoundError: No module named 'nothing"),
        ("raise SystemExit(2)", "cannot be imported: SystemExit: 2"),
    ],
)
def test_policy_of_a_module_that_cannot_be_imported_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    (tmp_path / "broken_policies.py").write_text(text)
    with pytest.raises(UnusableError) as refused:
        load_policies([f"{tmp_path / 'broken_policies.py'}:P"])
    assert message in str(refused.value)
    with pytest.raises(UnusableError, match=r"^--policies: file .*nowhere\.py' does not exist"):
        load_policies([f"{tmp_path / 'nowhere.py'}:P"])


# --- settings ----------------------------------------------------------------------------------------------


class Fickle:
    """A policy whose constructor raises if `fails`; `created` counts the instances."""

    fails = False
    created = 0

    def __init__(self) -> None:
        if Fickle.fails:
            raise RuntimeError("not today")
        Fickle.created += 1

    def include(self, _batch: object, _request: object) -> bool:
        return True


NAME = "mine.py:Fickle"


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> EffectiveSettings:
    monkeypatch.setattr(Fickle, "fails", False)
    monkeypatch.setattr(Fickle, "created", 0)
    return EffectiveSettings({NAME: Fickle}, structlog.get_logger())


def snapshot(registered: dict[str, str] | None = None, **config: str) -> ModelSnapshot:
    return ModelSnapshot(0, 0, 0, [], {"max_batch_size": "16", **(registered or {})}, config)


def test_policy_is_created_once_for_each_time_that_it_is_selected(settings: EffectiveSettings) -> None:
    first = settings.read(snapshot(policy=NAME), None)
    policy = settings.custom_policy
    assert (first.policy, type(policy), Fickle.created) == (NAME, CustomPolicy, 1)
    other = settings.read(snapshot(policy=NAME, max_batch_size="4"), first)
    assert (other.max_batch_size, settings.custom_policy, Fickle.created) == (4, policy, 1)
    assert settings.read(snapshot(), other).policy == "eager"
    assert settings.custom_policy is None
    settings.read(snapshot(policy=NAME), other)
    assert Fickle.created == 2


def test_batcher_that_takes_over_again_creates_the_policy_anew(settings: EffectiveSettings) -> None:
    settings.read(snapshot(policy=NAME), None)
    settings.read(snapshot(policy=NAME), None)
    assert Fickle.created == 2


def test_settings_whose_policy_cannot_be_created_are_rejected_as_a_whole(settings: EffectiveSettings) -> None:
    current = settings.read(snapshot(), None)
    Fickle.fails = True
    assert settings.read(snapshot(policy=NAME, max_batch_size="4"), current) is current
    assert settings.rejected_settings == (
        f"policy: {NAME!r} cannot be created: its constructor, which gets no arguments, raised "
        "RuntimeError: not today"
    )
    assert settings.custom_policy is None


def test_present_policy_stays_while_other_settings_are_rejected(settings: EffectiveSettings) -> None:
    current = settings.read(snapshot(policy=NAME), None)
    policy = settings.custom_policy
    assert settings.read(snapshot(policy="mine.py:Other"), current) is current
    assert settings.rejected_settings == "policy: 'mine.py:Other' is not one of this batcher's --policies"
    assert settings.custom_policy is policy is not None


def test_rejected_settings_are_tried_again_after_a_while(
    settings: EffectiveSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    current = settings.read(snapshot(), None)
    Fickle.fails = True
    settings.read(snapshot(policy=NAME), current)
    Fickle.fails = False
    assert settings.read(snapshot(policy=NAME), current) is current, "not yet"
    monkeypatch.setattr(settings, "_retry_at_s", 0.0)
    assert settings.read(snapshot(policy=NAME), current).policy == NAME
    assert settings.rejected_settings == ""


@pytest.mark.parametrize(
    ("registered", "config", "in_force"),
    [
        ({}, {"policy": "mine.py:Other"}, ("eager", 16)),
        ({"policy": "mine.py:Other"}, {"max_batch_size": "4"}, ("eager", 16)),
        ({"policy": "mine.py:Other", "max_queue_size": "0"}, {}, ("eager", ModelSettings().max_batch_size)),
        ({"policy": NAME}, {"policy": "mine.py:Other"}, (NAME, 16)),
    ],
)
def test_batcher_that_takes_over_falls_back(
    settings: EffectiveSettings, registered: dict[str, str], config: Any, in_force: tuple[str, int]
) -> None:
    found = settings.read(snapshot(registered, **config), None)
    assert (found.policy, found.max_batch_size) == in_force
    assert (settings.custom_policy is not None) == (found.policy == NAME)
    assert settings.rejected_settings


def test_more_slots_than_a_bound_model_declares_are_rejected(settings: EffectiveSettings) -> None:
    bound = {"bound": "true"}
    assert settings.read(snapshot(bound, max_batch_size="4"), None).max_batch_size == 4
    assert settings.read(snapshot(bound, max_batch_size="17"), None).max_batch_size == 16
    assert settings.rejected_settings == "max_batch_size: 17 is more than the 16 slots of a process"
    assert settings.read(snapshot(max_batch_size="17"), None).max_batch_size == 17


def test_override_does_not_change_of_which_kind_a_model_is(settings: EffectiveSettings) -> None:
    assert settings.read(snapshot(stepping="true", max_queue_delay_ms="5"), None).max_queue_delay_ms == 5
    assert not settings.rejected_settings
    stepping = snapshot({"stepping": "true"}, stepping="false", max_queue_delay_ms="5")
    assert settings.read(stepping, None).max_queue_delay_ms == 0
    assert settings.rejected_settings.startswith("max_queue_delay_ms: a stepping model forms no batches")
