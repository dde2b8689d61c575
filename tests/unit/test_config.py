"""`carpool config` without Redis: parsed changes, and effective settings with their sources."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pytest

from carpool.model_settings import ModelKind, ModelSettings
from carpool.settings import read_settings
from carpool.store import overrides
from carpool.store.directory import ModelSample, ProcessMemory
from carpool.store.overrides import (
    SHOWN_CHARS_MAX,
    ConfigError,
    ConfiguredSetting,
    describe_policy,
    parse,
    resolve,
    verdict,
)
from carpool.wire.audit import Actor
from carpool.wire.registration import encode_settings_from
from carpool.wire.report import BatcherReport, Gauges
from carpool_cli.config import ConfigSettings, describe_memory, show, show_changes
from carpool_cli.screen import Screen

configure = partial(overrides.configure, actor=Actor("ann@host", "command"))


class FakeDirectory:
    """The part of `Directory` that `configure` uses."""

    def __init__(self, registered: dict[str, str], overrides: dict[str, str]) -> None:
        self.registered = registered
        self.overrides = overrides
        self.configured: list[Any] = []

    def models(self) -> list[str]:
        return ["m"]

    def settings(self, model: str) -> tuple[dict[str, str], dict[str, str]]:
        return self.registered, self.overrides

    def configure(self, model: str, values: dict[str, str], removed: Sequence[str], *, actor: Actor) -> None:
        self.configured.append((model, values, list(removed)))


def test_parse_separates_overrides_and_removals() -> None:
    assert parse([]) == ({}, [])
    assert parse(["max_batch_size=8", "max-queue-size=5", "policy="]) == (
        {"max_batch_size": "8", "max_queue_size": "5"},
        ["policy"],
    )
    assert parse(["tenant_weights=gold:4,silver:2"]) == ({"tenant_weights": "gold:4,silver:2"}, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("max_batchsize=8", "no setting 'max_batchsize'; did you mean max_batch_size?"),
        ("colour=blue", "no setting 'colour'; settings: max_batch_size, "),
        ("=8", "no setting ''; settings: "),
        (
            "max_batch_size",
            "max_batch_size: write max_batch_size=VALUE to override it, or max_batch_size= to remove",
        ),
    ],
)
def test_parse_rejects_a_malformed_change(change: str, message: str) -> None:
    with pytest.raises(ConfigError) as rejected:
        parse(["max_queue_size=5", change])
    assert str(rejected.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], []),
        (["max_batch_size=8"], ["max_batch_size=8"]),
        (["max_batch_size=8", "policy="], ["max_batch_size=8", "policy="]),
        (["max_batch_size", "policy"], ["max_batch_size", "policy"]),
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
def test_commas_within_a_value_do_not_split_it(arguments: list[str], changes: list[str]) -> None:
    settings = read_settings(ConfigSettings, ["square", *arguments], "carpool config")
    assert (settings.model, settings.change) == ("square", changes)


REGISTERED: Final = {**ModelSettings(max_batch_size=16, max_queue_size=50).as_text(), "inputs": "[]"}


def test_override_precedes_the_models_value_which_precedes_the_default() -> None:
    effective = resolve(REGISTERED, {"max_batch_size": "4", "result_ttl_ms": "9000"})
    assert list(effective) == ModelSettings.names()
    found = {name: (setting.value, setting.source) for name, setting in effective.items()}
    assert found["max_batch_size"] == ("4", "operator")
    assert found["max_queue_size"] == ("50", "model")
    assert found["result_ttl_ms"] == ("9000", "operator")
    assert found["max_batch_cost"] == ("none", "default")
    assert all(setting.meaning for setting in effective.values())


def test_what_gives_a_setting_in_place_of_the_model_is_told() -> None:
    """Expect the source also where the value is that of the model or the default."""
    given = {"max_batch_size": "--set", "max_queue_size": "file", "policy": "file"}
    registered = {**REGISTERED, **encode_settings_from(given)}
    effective = resolve(registered, {"policy": "deferred"})
    found = {name: effective[name].source for name in (*given, "result_ttl_ms")}
    assert found == {**given, "policy": "operator", "result_ttl_ms": "default"}
    for malformed in ("{", "[]", "7"):
        assert resolve({**REGISTERED, "settings_from": malformed}, {})["max_batch_size"].source == "model"


@pytest.mark.parametrize(
    ("limit", "resident", "warns"),
    [
        ("none", [1 << 30], False),
        (str(1 << 20), [], False),
        (str(1 << 20), [0], False),  # the worker cannot tell
        (str(1 << 20), [1 << 21, 1 << 22], True),
        (str(1 << 22), [1 << 21, 1 << 23], False),  # one has grown, as others may
    ],
)
def test_less_memory_than_all_processes_take_is_warned_of(
    limit: str, resident: list[int], warns: bool
) -> None:
    told = describe_memory(limit, [ProcessMemory(one, 0) for one in resident])
    assert told.startswith("max_process_memory: each process of this model takes 2") is warns
    assert bool(told) is warns


def test_override_is_shown_in_its_normal_form() -> None:
    assert resolve({}, {"preferred_batch_sizes": "16 4,8"})["preferred_batch_sizes"].value == "4,8,16"


def test_changes_are_all_made_or_none() -> None:
    directory: Any = FakeDirectory(REGISTERED, {"policy": "deferred"})
    effective, before = configure(directory, "m", ["max_batch_size=2", "policy="])
    assert directory.configured == [("m", {"max_batch_size": "2"}, ["policy"])]
    assert effective["max_batch_size"][:2] == ("2", "operator")
    assert effective["policy"][:2] == ("eager", "default")
    assert list(effective) == ModelSettings.names()
    assert before == {"max_batch_size": "16 (model)", "policy": "deferred (operator)"}
    with pytest.raises(
        ConfigError, match="max_queue_size is '0': must be a whole number of at least 1; nothing was changed"
    ):
        configure(directory, "m", ["max_batch_size=3", "max_queue_size=0"])
    assert len(directory.configured) == 1


def test_override_is_written_without_units() -> None:
    directory: Any = FakeDirectory(REGISTERED, {})
    configure(directory, "m", ["max_queue_bytes=1GiB", "result_ttl_ms=5min", 'tenant_weights={"a": 2}'])
    written = {"max_queue_bytes": str(1 << 30), "result_ttl_ms": "300000", "tenant_weights": "a:2"}
    assert directory.configured == [("m", written, [])]


PREFERRING: Final = ModelSettings(max_batch_size=16, preferred_batch_sizes=(4, 16)).as_text()


def test_preferred_size_above_the_largest_batch_is_rejected() -> None:
    directory: Any = FakeDirectory(PREFERRING, {})
    message = (
        "preferred_batch_sizes: 32 can never be filled, because max_batch_size is 16; nothing was changed"
    )
    with pytest.raises(ConfigError, match=f"^{message}$"):
        configure(directory, "m", ["preferred_batch_sizes=8,32"])
    with pytest.raises(ConfigError, match="because max_batch_size is 8; nothing"):
        configure(directory, "m", ["preferred_batch_sizes=8,16", "max_batch_size=8"])
    assert not directory.configured
    assert configure(directory, "m", ["preferred_batch_sizes=32", "max_batch_size=32"]).before


def test_batch_size_can_be_lowered_below_a_preferred_size_of_the_model() -> None:
    directory: Any = FakeDirectory(PREFERRING, {})
    effective, _ = configure(directory, "m", ["max_batch_size=8"])
    assert effective["max_batch_size"][:2] == ("8", "operator")
    assert effective["preferred_batch_sizes"][:2] == ("4,16", "model")
    # Then other settings can still be changed.
    directory.overrides = {"max_batch_size": "8"}
    assert configure(directory, "m", ["max_queue_size=5"]).settings["max_queue_size"].source == "operator"


def test_without_changes_nothing_is_written() -> None:
    directory: Any = FakeDirectory(REGISTERED, {})
    assert configure(directory, "m", []).before == {}
    assert directory.configured == []


def test_invalid_override_can_be_removed() -> None:
    directory: Any = FakeDirectory(REGISTERED, {"max_batch_size": "many"})
    effective, before = configure(directory, "m", ["max_batch_size="])
    assert effective["max_batch_size"][:2] == ("16", "model")
    assert before == {"max_batch_size": "many (operator)"}


STEPPING: Final = {**ModelSettings(max_batch_size=16).as_text(), "stepping": "true"}
BOUND: Final = {**ModelSettings(max_batch_size=16).as_text(), "bound": "true"}


@pytest.mark.parametrize(
    "change",
    [
        *("policy=deferred", "policy=mine.py:Balanced", "target_latency_ms=5", "max_queue_delay_ms=2"),
        *("preferred_batch_sizes=4", "preserve_ordering=true"),
    ],
)
def test_setting_without_a_meaning_for_a_stepping_model_is_rejected(change: str) -> None:
    directory: Any = FakeDirectory(STEPPING, {})
    name = change.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{name}: .*stepping model.*; nothing was changed$"):
        configure(directory, "m", ["max_batch_size=8", change])
    assert not directory.configured


def test_more_slots_than_a_bound_model_declares_are_rejected() -> None:
    directory: Any = FakeDirectory(BOUND, {})
    with pytest.raises(ConfigError, match="more than the 16 slots of a process; nothing"):
        configure(directory, "m", ["max_batch_size=17"])
    assert configure(directory, "m", ["max_batch_size=8"]).settings["max_batch_size"].value == "8"


@pytest.mark.parametrize("change", ["max_prefill_cost=5", "stream_buffer=10", "reader_idle_ms=100"])
def test_setting_of_stepping_models_is_rejected_for_others(change: str) -> None:
    directory: Any = FakeDirectory(REGISTERED, {})
    name = change.partition("=")[0]
    sentence = f"^{name}: it has an effect only on stepping models, and m is not one; nothing was changed$"
    with pytest.raises(ConfigError, match=sentence):
        configure(directory, "m", [change])
    assert not directory.configured
    directory = FakeDirectory(STEPPING, {})
    assert configure(directory, "m", [change]).settings[name].source == "operator"


def test_override_without_a_meaning_can_be_removed() -> None:
    """Given an override from when the model did not step."""
    directory: Any = FakeDirectory(STEPPING, {"policy": "deferred"})
    with pytest.raises(ConfigError, match=r"^policy: "):
        configure(directory, "m", ["max_batch_size=8"])
    assert configure(directory, "m", []).settings["policy"].value == "deferred"
    assert configure(directory, "m", ["policy="]).before == {"policy": "deferred (operator)"}


def test_settings_without_an_effect_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    for registered, other in ((STEPPING, "policy"), (REGISTERED, "stream_buffer")):
        effective = resolve(registered, {})
        names = [name for name, of in effective.items() if not of.has_effect]
        assert names == [
            name for name in effective if name in ModelSettings.names_without_effect(ModelKind.of(registered))
        ]
        show(effective, Screen())
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(other)]
        assert line.split(maxsplit=3) == [other, "-", "-", "no effect on this model"]
    assert "slots" in resolve(STEPPING, {})["max_batch_size"].meaning
    assert "slots" in resolve(BOUND, {})["max_batch_size"].meaning
    assert "slots" not in resolve(REGISTERED, {})["max_batch_size"].meaning


def test_unknown_model_is_rejected() -> None:
    directory: Any = FakeDirectory({}, {})
    with pytest.raises(ConfigError, match="model 'other' is not registered; registered models: m"):
        configure(directory, "other", ["max_batch_size=1"])
    assert directory.configured == []


def test_long_value_is_shortened_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show(
        {
            "tenant_weights": ConfiguredSetting("x" * 500, "operator", "shares"),
            "policy": ConfiguredSetting("", "model", "which"),
        },
        Screen(),
    )
    printed = capsys.readouterr().out
    assert "x" * (SHOWN_CHARS_MAX - 3) + "..." in printed
    assert "x" * (SHOWN_CHARS_MAX - 2) not in printed
    assert any(line.split() == ["policy", "-", "model", "which"] for line in printed.splitlines())


def test_narrow_terminal_has_no_meanings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    printed = []
    for columns in ("60", "100"):
        monkeypatch.setenv("COLUMNS", columns)
        terminal = Terminal()
        show(resolve(REGISTERED, {}), Screen(terminal))
        printed.append(terminal.getvalue())
        assert max(map(len, printed[-1].splitlines())) <= int(columns)
    assert ["meaning" in text for text in printed] == [False, True]


def test_changes_are_shown_with_their_previous_values(capsys: pytest.CaptureFixture[str]) -> None:
    directory: Any = FakeDirectory(REGISTERED, {})
    show_changes(*configure(directory, "m", ["tenant_weights=gold:4", "max_batch_size=2"]), Screen())
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["setting", "value", "from", "before"],
        ["tenant_weights", "gold:4", "operator", "-", "(default)"],
        ["max_batch_size", "2", "operator", "16", "(model)"],
    ]


class DirectoryWithBatcher(FakeDirectory):
    """Has a batcher with a custom policy, active or just ended."""

    batcher = True

    def sample(self, model: str) -> ModelSample:
        gauges = Gauges(0, 0, 0.0, 0, 0, 1)
        report = BatcherReport("me", 1, 2, gauges, {}, 0, 0, {}, (), None, policies=("mine.py:Balanced",))
        return ModelSample(0, None, 0, 1, self.batcher, report, at_us=2)


def test_policy_that_the_batcher_has_not_loaded_is_rejected() -> None:
    directory: Any = DirectoryWithBatcher({}, {})
    with pytest.raises(ConfigError, match=r"not one of the active batcher's --policies \(mine.py:Bal"):
        configure(directory, "m", ["policy=mine.py:Other"])
    assert not directory.configured
    assert configure(directory, "m", ["policy=mine.py:Balanced"]).settings["policy"].source == "operator"


def test_report_of_a_batcher_that_is_not_active_any_more_rejects_nothing() -> None:
    directory: Any = DirectoryWithBatcher({}, {})
    directory.batcher = False
    assert configure(directory, "m", ["policy=mine.py:Other"]).settings["policy"].source == "operator"


REPORT: Final = BatcherReport(
    "me",
    1,
    2,
    Gauges(0, 0, 0.0, 0, 0, 1),
    {},
    0,
    0,
    {},
    (),
    None,
    policy="eager",
    rejected_settings="policy: why",
)


@pytest.mark.parametrize(
    ("policy", "report", "note"),
    [
        ("eager", None, ""),
        ("mine.py:Other", None, "No active batcher reports that the policy mine.py:Other is in force."),
        ("mine.py:Other", None, "start `carpool batcher --policies mine.py:Other`"),
        ("mine.py:Other", REPORT, "serves with others, under the policy eager: policy: why"),
        ("mine.py:Other", replace(REPORT, rejected_settings=""), ""),
    ],
)
def test_policy_that_is_not_in_force_is_noted(policy: str, report: BatcherReport | None, note: str) -> None:
    found = describe_policy(policy, report)
    assert note in found
    assert bool(found) == bool(note)


class ReportingDirectory(FakeDirectory):
    """Has these reports, one after another; the last one stays. Its time is 10 us."""

    def __init__(self, *reports: BatcherReport | None) -> None:
        super().__init__({}, {})
        self.reports = list(reports)

    def sample(self, model: str) -> ModelSample:
        report = self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        return ModelSample(0, None, 0, 1, report is not None, report, at_us=10)


BEFORE: Final = replace(REPORT, at_us=9, rejected_settings="")
REJECTED: Final = replace(REPORT, at_us=11)
IN_FORCE: Final = replace(REPORT, at_us=11, policy="mine.py:Other", rejected_settings="")


@pytest.mark.parametrize(
    ("policy", "reports", "expected"),
    [
        ("eager", [BEFORE], BEFORE),  # nothing can be wrong with it
        ("mine.py:Other", [None], None),
        ("mine.py:Other", [BEFORE, BEFORE, REJECTED], REJECTED),
        ("mine.py:Other", [replace(REJECTED, at_us=9), IN_FORCE], IN_FORCE),
        ("mine.py:Other", [BEFORE, replace(BEFORE, at_us=12), IN_FORCE], IN_FORCE),
        ("eager", [replace(REJECTED, at_us=9), replace(BEFORE, at_us=12)], replace(BEFORE, at_us=12)),
        ("mine.py:Other", [BEFORE, None], None),  # the batcher ended
        ("mine.py:Other", [BEFORE], None),  # it does not report in time
    ],
)
def test_batcher_has_a_verdict_on_a_change(
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    reports: list[BatcherReport | None],
    expected: BatcherReport | None,
) -> None:
    monkeypatch.setattr(overrides, "_POLL_S", 0.0)
    monkeypatch.setattr(overrides, "VERDICT_S_MAX", 0.2)
    directory: Any = ReportingDirectory(*reports)
    assert verdict(directory, "m", policy) == expected
