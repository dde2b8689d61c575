"""`carpool config MODEL [KEY ... | KEY=VALUE ...]`: show a model's settings as configured, or override some.

What overrides are, and what a batcher says of them: `carpool.store.overrides`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode, SettingsConfigDict

from carpool.errors import UnavailableError
from carpool.keys import Keys
from carpool.model_settings import ModelSettings
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_json
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory, ProcessMemory
from carpool.store.overrides import (
    ConfigError,
    ConfiguredSetting,
    configure,
    describe_policy,
    setting_name,
    shorten,
    verdict,
)
from carpool_cli.models import describe_workers, read_differing
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table, size


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
        effective, before = configure(directory, settings.model, changes, actor=this_operator())
        policy = effective["policy"].value
        workers = describe_workers(
            settings.model, read_differing(link, Keys(settings.model, settings.prefix))
        )
        sample = directory.sample(settings.model)
        report = verdict(directory, settings.model, policy) if changes else sample.active_report
    except ConfigError as error:
        complain(f"carpool config: {error}")
        return 2
    except (UnavailableError, CommandError) as error:
        complain(f"carpool config: {explain(error)}")
        return 1
    finally:
        directory.close()
    doubts = ModelSettings.from_mapping({name: of.value for name, of in effective.items()}).doubts()
    memory = describe_memory(effective["max_process_memory"].value, sample.memory)
    paused = "" if sample.paused is None else f"{settings.model} is {sample.paused.describe()}"
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


def describe_memory(limit: str, processes: Sequence[ProcessMemory]) -> str:
    """Why `max_process_memory` may have no effect: all processes of the model take more. Else empty."""
    resident = [process.resident for process in processes if process.resident]
    if limit == "none" or not resident or min(resident) < int(limit):
        return ""
    return (
        f"max_process_memory: each process of this model takes {size(min(resident))} or more. If it takes "
        f"{size(int(limit))} as soon as the model is loaded, the setting has no effect"
    )


def asked_for(arguments: Sequence[str]) -> list[str]:
    """The settings that are to be shown, where each argument is a name; else nothing. Raises ConfigError."""
    if any("=" in argument for argument in arguments):
        return []
    return [setting_name(argument) for argument in arguments]


def show(effective: Mapping[str, ConfiguredSetting], screen: Screen) -> None:
    """Write the table of all settings; without their meanings if the terminal is too narrow for them."""
    rows = [("setting", "value", "from", "meaning")]
    for name, of in effective.items():
        if of.has_effect:
            rows.append((name, shorten(of.value), of.source, of.meaning))
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
        (name, shorten(effective[name].value), effective[name].source, was) for name, was in before.items()
    ]
    screen.print_table(build_table(rows))
