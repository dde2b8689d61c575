"""`carpool config MODEL [KEY=VALUE ...]`: a model's settings, who said each, and another value for some."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, NamedTuple

from pydantic import BeforeValidator, Field
from pydantic_settings import CliPositionalArg, NoDecode, SettingsConfigDict

from carpool.errors import UnavailableError
from carpool.model_settings import POLICIES, ModelSettings
from carpool.settings import ProducerSettings, read_settings
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory
from carpool.wire.report import BatcherReport
from carpool_cli.screen import Screen, table

LONGEST_SHOWN: Final = 60


def _split(joined: object) -> object:
    """KEY=VALUEs, which arrive here with a comma between them, and perhaps in their values."""
    return re.split(r",(?=[\w-]+=)", joined) if isinstance(joined, str) else joined


# Of settings that take them from the command line.
Changes = Annotated[list[str], NoDecode, BeforeValidator(_split)]


class ConfigSettings(ProducerSettings):
    """Show a model's settings, or change some while it runs; batchers follow within a second.

    KEY=VALUE says another value, which holds whatever the model's workers register, until KEY= takes it back.
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    model: CliPositionalArg[str] = Field(description="the model's name")
    change: CliPositionalArg[Changes] = Field(
        [], description="KEY=VALUE, as many as you like; KEY= takes it back"
    )
    as_json: bool = Field(False, description="an object of objects, for a program")


class Line(NamedTuple):
    """A setting as it holds now. `source`: default, model, or operator."""

    value: str
    source: str
    meaning: str


class Configured(NamedTuple):
    """All settings as they hold now; and of those that were to change, what held before and who said so."""

    lines: dict[str, Line]
    before: dict[str, str]


class ConfigError(Exception):
    """What was asked for cannot be done, and why."""


def main(argv: Sequence[str]) -> int:
    """Change what is to be changed and show that, or else all there is.

    1 if Redis cannot be asked, 2 if a change makes no sense.
    """
    settings = read_settings(ConfigSettings, argv, "carpool config")
    link = Link(settings.redis_url, name=f"carpool-config-{os.getpid()}")
    directory = Directory(link, settings.prefix)
    try:
        lines, before = configure(directory, settings.model, settings.change)
        status = None if settings.change else _status(directory, settings.model)
    except ConfigError as error:
        print(f"carpool config: {error}", file=sys.stderr)
        return 2
    except (UnavailableError, CommandError) as error:
        print(f"carpool config: {error}", file=sys.stderr)
        return 1
    finally:
        directory.close()
    if settings.as_json:
        print(json.dumps({name: line._asdict() for name, line in lines.items()}))
        return 0
    screen = Screen()
    if settings.change:
        show_changes(lines, before, screen)
        screen.say(f"\n`carpool config {settings.model}` shows all settings.")
    else:
        show(lines, screen)
    if status is not None and status.unheeded:
        screen.say(f"\nThe batcher does not follow these: {status.unheeded}")
    return 0


def configure(directory: Directory, model: str, changes: Sequence[str]) -> Configured:
    """Make these changes, all or none, and return the settings as they are then. Raises ConfigError."""
    known = directory.models()
    if model not in known:
        there = f"there are {', '.join(known)}" if known else "none is; `carpool up square` serves one"
        raise ConfigError(f"no model {model!r:.140} is registered; {there}")
    registered, said = directory.config(model)
    values, back = parse(changes)
    wanted = {name: value for name, value in {**said, **values}.items() if name not in back}
    try:
        holds = ModelSettings.from_mapping({**registered, **wanted})
        if "preferred_batch_sizes" in values:
            holds.check_sizes()
    except ValueError as error:
        raise ConfigError(f"{error}; nothing was changed") from None
    if "policy" in values and holds.policy not in POLICIES:
        _check_policy(_status(directory, model), holds.policy)
    if values or back:
        directory.configure(model, values, back)
    before = {name: _before(registered, said, name) for name in (*values, *back)}
    return Configured(resolve(registered, wanted), before)


def _before(registered: Mapping[str, str], said: Mapping[str, str], name: str) -> str:
    """What held for a setting, and who said so; an operator's word that made no sense is shown as it is."""
    own = {name: said[name]} if name in said else {}
    try:
        line = resolve(registered, own)[name]
    except ValueError:
        return f"{_short(said[name])} (operator)"
    return f"{_short(line.value)} ({line.source})"


def _status(directory: Directory, model: str) -> BatcherReport | None:
    """What the active batcher says of itself, if there is one."""
    said = directory.overview(model).report
    return None if said is None else BatcherReport.decode(said)


def _check_policy(status: BatcherReport | None, policy: str) -> None:
    """A policy that the active batcher does not know would leave all settings as they were."""
    if status is not None and policy not in status.policies:
        raise ConfigError(
            f"policy: {policy!r:.140} is none of the active batcher's --policies, which are "
            f"{', '.join(status.policies) or 'none'}; nothing was changed"
        )


def parse(changes: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """New values, and settings to take back. Raises ConfigError."""
    values: dict[str, str] = {}
    back: list[str] = []
    for change in changes:
        name, equals, value = change.partition("=")
        name = name.strip().replace("-", "_")
        if name not in ModelSettings.names():
            meant = difflib.get_close_matches(name, ModelSettings.names(), n=1)
            says = f"did you mean {meant[0]}?" if meant else f"there are {', '.join(ModelSettings.names())}"
            raise ConfigError(f"no setting {name!r:.80}; {says}")
        if not equals:
            raise ConfigError(f"{name}: say what it is to be, as in {name}=VALUE, or {name}= to take it back")
        if value:
            values[name] = value
        else:
            back.append(name)
    return values, back


def resolve(registered: Mapping[str, str], said: Mapping[str, str]) -> dict[str, Line]:
    """Each setting as it holds: an operator's word goes before the model's, that before the default."""
    holds = ModelSettings.from_mapping({**registered, **said}).as_text()
    models, defaults = ModelSettings.from_mapping(registered).as_text(), ModelSettings().as_text()

    def source(name: str) -> str:
        if name in said:
            return "operator"
        return "model" if models[name] != defaults[name] else "default"

    meanings = ModelSettings.meanings()
    return {name: Line(value, source(name), meanings[name]) for name, value in holds.items()}


def show(lines: Mapping[str, Line], screen: Screen) -> None:
    """The table."""
    rows = [("setting", "value", "from")]
    rows += [(name, _short(line.value), line.source) for name, line in lines.items()]
    meanings = ["meaning", *(line.meaning for line in lines.values())]
    head, *rest = (f"{text}  {meaning}" for text, meaning in zip(table(rows), meanings, strict=True))
    screen.say(screen.bold(head))
    for text in rest:
        screen.say(text)


def show_changes(lines: Mapping[str, Line], before: Mapping[str, str], screen: Screen) -> None:
    """Of the settings that were to change: what they are, and what they were."""
    rows = [("setting", "value", "from", "before")]
    rows += [(name, _short(lines[name].value), lines[name].source, was) for name, was in before.items()]
    head, *rest = table(rows)
    screen.say(screen.bold(head))
    for text in rest:
        screen.say(text)


def _short(value: str) -> str:
    if not value:
        return "-"
    return value if len(value) <= LONGEST_SHOWN else value[: LONGEST_SHOWN - 3] + "..."
