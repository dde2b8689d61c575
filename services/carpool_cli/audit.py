"""`carpool audit`: what operators did to a model, or to nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.keys import Keys, NodesKeys
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable, printable_json
from carpool.store.audit import recent_actions
from carpool.store.connection import CommandError, Link, LinkError
from carpool.wire.audit import Action
from carpool.wire.orders import time_of
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, build_table

_HEADINGS = ("when", "who", "by", "action", "details")


class AuditSettings(ConnectionSettings):
    """Show what operators did, the newest first: settings, shares, pauses, drains, dead letters.

    Without MODEL, what was loaded, unloaded and removed, of all models. About the last 1,000 actions of each
    are kept. `carpool forget` removes those of its model.
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    model: CliPositionalArg[str] = Field("", description="the model's name")
    count: int = Field(50, ge=1, le=10_000, description="how many actions, at most")
    before: str = Field("", description="only those before the one with this ID, as --json shows it")
    as_json: bool = Field(False, description="print a JSON array instead of a table")


def main(argv: Sequence[str]) -> int:
    """Print them. Returns 1 if Redis does not answer, or a name or ID is wrong."""
    settings = read_settings(AuditSettings, argv, "carpool audit")
    try:
        keys = Keys(settings.model, settings.prefix) if settings.model else NodesKeys(settings.prefix)
    except ValueError as error:
        return _fail(str(error))
    link = Link(settings.redis_url, name=f"carpool-audit-{os.getpid()}", key=keys.audit)
    try:
        actions = recent_actions(link, keys, settings.count, settings.before or None)
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()
    if settings.as_json:
        print(printable_json([action._asdict() for action in actions]))
    elif actions:
        Screen().print_table(build_table([_HEADINGS, *map(_row, actions)], has_prose=True))
    else:
        what = "nothing was done to it" if settings.model else "nothing was loaded, unloaded or removed"
        more = "" if settings.model else "; `carpool audit MODEL` shows what was done to a model"
        Screen().print(f"{what}, as far as is kept{more}")
    return 0


def _row(action: Action) -> tuple[str, ...]:
    details = ", ".join(f"{name}: {text}" for name, text in sorted(action.details.items()))
    texts = (action.who, action.via, action.action, details)
    return time_of(action.at_ms), *map(printable, texts)


def _fail(error: str) -> int:
    complain(f"carpool audit: {error}")
    return 1
