"""`carpool config MODEL [KEY ... | KEY=VALUE ...]`: show a model's settings as configured, or override some.

The active batcher may reject them; then its report says so (rules: `carpool_batcher.effective_settings`).
"""

from __future__ import annotations

import difflib
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode, SettingsConfigDict

from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.model_settings import POLICIES, ModelKind, ModelSettings
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_json
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory, ModelOverview, ProcessMemory
from carpool.wire.registration import decode_settings_from
from carpool.wire.report import BatcherReport
from carpool_cli.models import describe_unregistered, describe_workers, read_differing
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table, size

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


def _split(joined: object) -> object:
    """Split KEY=VALUEs at the commas between them, but not at commas within a value.

    pydantic-settings joins positional arguments with commas before they arrive here.
    """
    if not isinstance(joined, str):
        return joined
    return re.split(r",(?=[\w-]+=)" if "=" in joined else ",", joined)


Changes = Annotated[list[str], NoDecode, BeforeValidator(_split)]
"""KEY=VALUE arguments of a command line."""


class ConfigSettings(ConnectionSettings):
    """Show a model's settings, or change some while it is served. Batchers apply a change within a second.

    KEY=VALUE overrides the value that the model's workers register, until KEY= removes the override.

    A setting that has no effect on a model of this kind is refused, and the error says why.
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    model: CliPositionalArg[str] = Field(description="the model's name; `carpool models` lists them")
    change: CliPositionalArg[Changes] = Field(
        [],
        description="any number of KEY=VALUE to override a setting, or KEY= to remove the override; or of "
        "KEY to show these alone",
    )
    as_json: bool = Field(False, description="print a JSON object instead of a table")


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


def main(argv: Sequence[str]) -> int:
    """Make the changes and show them, or show all settings.

    Returns 1 if Redis does not answer, 2 if a change is rejected, here or by the active batcher.
    """
    settings = read_settings(ConfigSettings, argv, "carpool config")
    link = Link(settings.redis_url, name=f"carpool-config-{os.getpid()}")
    directory = Directory(link, settings.prefix)
    try:
        asked = asked_for(settings.change)
        changes = [] if asked else settings.change
        effective, before = configure(directory, settings.model, changes)
        policy = effective["policy"].value
        workers = describe_workers(
            settings.model, read_differing(link, Keys(settings.model, settings.prefix))
        )
        overview = directory.overview(settings.model)
        report = verdict(directory, settings.model, policy) if changes else _read_report(overview)
    except ConfigError as error:
        complain(f"carpool config: {error}")
        return 2
    except (UnavailableError, CommandError) as error:
        complain(f"carpool config: {explain(error)}")
        return 1
    finally:
        directory.close()
    doubts = ModelSettings.from_mapping({name: of.value for name, of in effective.items()}).doubts()
    memory = describe_memory(effective["max_process_memory"].value, overview.memory)
    paused = "" if overview.paused is None else f"{settings.model} is {overview.paused.describe()}"
    notes = [note for note in (paused, *doubts, memory, workers, describe_policy(policy, report)) if note]
    status = 2 if changes and report is not None and report.rejected_settings else 0
    if asked:
        effective = {name: effective[name] for name in asked}
    if settings.as_json:
        print(printable_json({name: setting._asdict() for name, setting in effective.items()}))
        for line in notes:
            complain(f"carpool config: {line}")
        return status
    screen = Screen()
    if changes:
        show_changes(effective, before, screen)
        screen.print(f"\n`carpool config {settings.model}` shows all settings.")
    else:
        show(effective, screen)
    for line in notes:
        screen.print(f"\n{line}")
    return status


def configure(directory: Directory, model: str, changes: Sequence[str]) -> Configured:
    """Make all of these changes or none, and return the settings that result. Raises ConfigError."""
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
        _check_policy(_read_report(directory.overview(model)), effective.policy)
    if values or removed:  # as text that any version reads, without units
        as_text = effective.as_text()
        given = {name: as_text[name] for name in values}
        directory.configure(model, given, removed, actor=this_operator())
    before = {name: _describe(registered, overrides, name) for name in (*values, *removed)}
    return Configured(resolve(registered, wanted), before)


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
        return f"{_shorten(overrides[name])} (operator)"
    return f"{_shorten(setting.value)} ({setting.source})"


def _read_report(overview: ModelOverview) -> BatcherReport | None:
    """The report of the active batcher, if there is one. A report outlives its batcher by seconds."""
    if not overview.batcher or overview.report is None:
        return None
    return BatcherReport.decode(overview.report)


def verdict(directory: Directory, model: str, policy: str) -> BatcherReport | None:
    """What the active batcher reports after a change, where it may reject the settings: under a custom
    `policy`, and where it rejected the previous settings. None if no batcher reports in time."""
    overview = directory.overview(model)
    report, changed_us = _read_report(overview), overview.at_us
    if report is None or (policy in POLICIES and not report.rejected_settings):
        return report
    until_s = time.monotonic() + VERDICT_S_MAX
    while report is not None and time.monotonic() < until_s:
        if report.at_us > changed_us and (report.rejected_settings or report.policy == policy):
            return report
        time.sleep(_POLL_S)
        report = _read_report(directory.overview(model))
    return None


def _check_policy(report: BatcherReport | None, policy: str) -> None:
    """Reject a policy that the active batcher has not loaded: it would reject all settings because of it."""
    if report is not None and policy not in report.policies:
        raise ConfigError(
            f"policy: {policy!r:.140} is not one of the active batcher's --policies "
            f"({', '.join(report.policies) or 'it has none'}); nothing was changed. Start every batcher with "
            "it first"
        )


def describe_memory(limit: str, processes: Sequence[ProcessMemory]) -> str:
    """Why `max_process_memory` may have no effect: all processes of the model take more. Else empty."""
    resident = [process.resident for process in processes if process.resident]
    if limit == "none" or not resident or min(resident) < int(limit):
        return ""
    return (
        f"max_process_memory: each process of this model takes {size(min(resident))} or more. If it takes "
        f"{size(int(limit))} as soon as the model is loaded, the setting has no effect"
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


def asked_for(arguments: Sequence[str]) -> list[str]:
    """The settings that are to be shown, where each argument is a name; else nothing. Raises ConfigError."""
    if any("=" in argument for argument in arguments):
        return []
    return [_setting_name(argument) for argument in arguments]


def _setting_name(text: str) -> str:
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
        name = _setting_name(name)
        if not equals:
            raise ConfigError(f"{name}: write {name}=VALUE to override it, or {name}= to remove the override")
        if value:
            values[name] = value
        else:
            removed.append(name)
    return values, removed


def resolve(registered: Mapping[str, str], overrides: Mapping[str, str]) -> dict[str, ConfiguredSetting]:
    """The effective settings: an operator's override, else what a worker was given, else the model's value,
    else the default."""
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


def show(effective: Mapping[str, ConfiguredSetting], screen: Screen) -> None:
    """Write the table of all settings; without their meanings if the terminal is too narrow for them."""
    rows = [("setting", "value", "from", "meaning")]
    for name, of in effective.items():
        if of.has_effect:
            rows.append((name, _shorten(of.value), of.source, of.meaning))
        else:
            rows.append((name, "-", "-", "no effect on this model"))
    table = build_table(rows, has_prose=True)
    screen.print_table(table if screen.fits(table) else build_table([row[:-1] for row in rows]))


def show_changes(
    effective: Mapping[str, ConfiguredSetting], before: Mapping[str, str], screen: Screen
) -> None:
    """Write the table of the settings that were changed, with their previous values."""
    rows = [("setting", "value", "from", "before")]
    rows += [
        (name, _shorten(effective[name].value), effective[name].source, was) for name, was in before.items()
    ]
    screen.print_table(build_table(rows))


def _shorten(value: str) -> str:
    if not value:
        return "-"
    return value if len(value) <= SHOWN_CHARS_MAX else value[: SHOWN_CHARS_MAX - 3] + "..."
