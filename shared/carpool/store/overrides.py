"""An operator's overrides of a model's settings: checked, written, and what the active batcher says of them.

A batcher may reject settings; then its report says so (rules: `carpool_batcher.effective_settings`).
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from carpool.model_settings import POLICIES, ModelKind, ModelSettings
from carpool.store.directory import Directory
from carpool.wire.audit import Actor
from carpool.wire.registration import decode_settings_from
from carpool.wire.report import BatcherReport

SHOWN_CHARS_MAX: Final = 60
VERDICT_S_MAX: Final = 3.0  # a batcher follows a change within a second, and reports once a second
_POLL_S: Final = 0.1
_MEANINGS_OF_KIND: Final[Mapping[ModelKind, Mapping[str, str]]] = {
    ModelKind.STEPPING: {
        "max_batch_size": "number of slots of a model process: requests that are generated together",
        "max_batch_cost": "largest sum of the costs of the requests that have a slot",
    },
    ModelKind.BOUND: {"max_batch_size": "number of slots of a model process: sequences that it has"},
}


class ConfiguredSetting(NamedTuple):
    """A setting as it is configured. `source`: default, model, file, --set, load, or operator.
    `has_effect`: on this model."""

    value: str
    source: str
    meaning: str
    has_effect: bool = True


class Configured(NamedTuple):
    """All effective settings; and for those that were changed, the previous value and its source."""

    settings: dict[str, ConfiguredSetting]
    before: dict[str, str]


class ConfigError(Exception):
    """A change is rejected; the message says why."""


def configure(directory: Directory, model: str, changes: Sequence[str], *, actor: Actor) -> Configured:
    """Make all of these changes or none, and return the settings that result. A change is NAME=VALUE, or
    NAME= to remove an override. Raises ConfigError."""
    models = directory.models()
    if model not in models:
        raise ConfigError(describe_unregistered(model, models))
    registered, overrides = directory.settings(model)
    values, removed = parse(changes)
    wanted = {name: value for name, value in {**overrides, **values}.items() if name not in removed}
    try:
        effective = ModelSettings.from_mapping({**registered, **wanted})
        if "preferred_batch_sizes" in values:
            effective.check_sizes()
        if values:
            _check_effect(effective, values, model, ModelKind.of(registered))
        if ModelKind.of(registered) is ModelKind.BOUND:
            effective.check_slots(ModelSettings.from_mapping(registered).max_batch_size)
    except ValueError as error:
        raise ConfigError(f"{error}; nothing was changed") from None
    if "policy" in values and effective.policy not in POLICIES:
        _check_policy(directory.sample(model).active_report, effective.policy)
    if values or removed:  # as text that any version reads, without units
        as_text = effective.as_text()
        given = {name: as_text[name] for name in values}
        directory.configure(model, given, removed, actor=actor)
    before = {name: _describe(registered, overrides, name) for name in (*values, *removed)}
    return Configured(resolve(registered, wanted), before)


def describe_unregistered(model: str, registered: Sequence[str]) -> str:
    """The error for a model that is not registered, with the models that are."""
    hint = f"registered models: {', '.join(registered)}" if registered else "`carpool up square` serves one"
    return f"model {model!r:.140} is not registered; {hint}"


def _check_effect(effective: ModelSettings, values: Mapping[str, str], model: str, kind: ModelKind) -> None:
    """Raise ValueError for a setting that has no meaning for this model."""
    effective.check_kind(kind)
    for name in values:
        only_kinds = ModelSettings.only_kinds(name)
        if only_kinds and kind not in only_kinds:
            kinds = " and ".join(only_kinds)
            raise ValueError(f"{name}: it has an effect only on {kinds} models, and {model} is not one")


def _describe(registered: Mapping[str, str], overrides: Mapping[str, str], name: str) -> str:
    """A setting's value and source. An override that is not valid is shown as it was written."""
    override = {name: overrides[name]} if name in overrides else {}
    try:
        setting = resolve(registered, override)[name]
    except ValueError:
        return f"{shorten(overrides[name])} (operator)"
    return f"{shorten(setting.value)} ({setting.source})"


def verdict(directory: Directory, model: str, policy: str) -> BatcherReport | None:
    """What the active batcher reports after a change, where it may reject the settings: under a custom
    `policy`, and where it rejected the previous settings. None if no batcher reports in time."""
    sample = directory.sample(model)
    report, changed_us = sample.active_report, sample.at_us
    if report is None or (policy in POLICIES and not report.rejected_settings):
        return report
    until_s = time.monotonic() + VERDICT_S_MAX
    while report is not None and time.monotonic() < until_s:
        if report.at_us > changed_us and (report.rejected_settings or report.policy == policy):
            return report
        time.sleep(_POLL_S)
        report = directory.sample(model).active_report
    return None


def _check_policy(report: BatcherReport | None, policy: str) -> None:
    """Reject a policy that the active batcher has not loaded: it would reject all settings because of it."""
    if report is not None and policy not in report.policies:
        raise ConfigError(
            f"policy: {policy!r:.140} is not one of the active batcher's --policies "
            f"({', '.join(report.policies) or 'it has none'}); nothing was changed. Start every batcher with "
            "it first"
        )


def describe_policy(policy: str, report: BatcherReport | None) -> str:
    """Why the configured settings are not in force, or may not be; empty if nothing speaks against it."""
    if report is None:
        if policy in POLICIES:
            return ""
        return (
            f"No active batcher reports that the policy {policy} is in force. If none runs, start `carpool "
            f"batcher --policies {policy}`."
        )
    if not report.rejected_settings:
        return ""
    return (
        f"The batcher rejects these settings and serves with others, under the policy {report.policy}: "
        f"{report.rejected_settings}"
    )


def setting_name(text: str) -> str:
    """The name of a setting as it was written. Raises ConfigError."""
    name = text.strip().replace("-", "_")
    if name not in ModelSettings.names():
        similar = difflib.get_close_matches(name, ModelSettings.names(), n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"settings: {', '.join(ModelSettings.names())}"
        raise ConfigError(f"no setting {name!r:.80}; {hint}")
    return name


def parse(changes: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The new overrides, and the names of those to remove. Raises ConfigError."""
    values: dict[str, str] = {}
    removed: list[str] = []
    for change in changes:
        name, equals, value = change.partition("=")
        name = setting_name(name)
        if not equals:
            raise ConfigError(f"{name}: write {name}=VALUE to override it, or {name}= to remove the override")
        if value:
            values[name] = value
        else:
            removed.append(name)
    return values, removed


def resolve(registered: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, ConfiguredSetting]:
    """The effective settings: an operator's override, else what a worker was given, else the model's value,
    else the default. Raises ValueError if they are not valid together."""
    effective = ModelSettings.from_mapping({**registered, **overrides}).as_text()
    of_workers = decode_settings_from(registered)
    of_model, defaults = ModelSettings.from_mapping(registered).as_text(), ModelSettings().as_text()

    def source(name: str) -> str:
        if name in overrides:
            return "operator"
        if name in of_workers:
            return of_workers[name]
        return "model" if of_model[name] != defaults[name] else "default"

    kind = ModelKind.of(registered)
    meanings = {**ModelSettings.meanings(), **_MEANINGS_OF_KIND.get(kind, {})}
    without_effect = ModelSettings.names_without_effect(kind)
    return {
        name: ConfiguredSetting(value, source(name), meanings[name], name not in without_effect)
        for name, value in effective.items()
    }


def shorten(value: str) -> str:
    """A value as tables show it."""
    if not value:
        return "-"
    return value if len(value) <= SHOWN_CHARS_MAX else value[: SHOWN_CHARS_MAX - 3] + "..."
