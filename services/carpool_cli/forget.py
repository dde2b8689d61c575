"""`carpool forget`: remove a model that is no longer served."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.keys import Keys
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.directory import Directory
from carpool.store.removal import Removal, Removed, Use
from carpool_cli.models import describe_unregistered
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain
from carpool_cli.screen import count

_ENTRIES: Final = {
    "requests": ("waiting entry", "waiting entries"),
    "batches": ("batch in flight", "batches in flight"),
    "dead": ("dead letter", "dead letters"),
}


class ForgetSettings(ConnectionSettings):
    """Remove a model that is no longer served: its registration, overrides, dead letters and all other keys.

    Batchers drop what they have of it within seconds. Results that nobody has read yet are left to expire.
    Refuses while a worker serves the model, or requests of it wait or are in flight. With --force these
    requests are removed too, and are never answered; a worker that still runs registers the model again.
    """

    model: CliPositionalArg[str] = Field(description="the model's name")
    force: bool = Field(False, description="also while it is served, or requests wait: they get no answer")


def main(argv: Sequence[str]) -> int:
    """Remove the model, and say what was removed. Returns 1 if it is used or unknown, or if Redis fails."""
    settings = read_settings(ForgetSettings, argv, "carpool forget")
    link = Link(settings.redis_url, name=f"carpool-forget-{os.getpid()}")
    try:
        return _forget(settings, link)
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()


def _fail(error: str) -> int:
    complain(f"carpool forget: {error}")
    return 1


def _forget(settings: ForgetSettings, link: Link) -> int:
    models = Directory(link, settings.prefix).models()
    try:
        removal = Removal(link, Keys(settings.model, settings.prefix), this_operator())
    except ValueError:
        return _fail(describe_unregistered(settings.model, models))
    use = removal.use()
    removed = removal.remove() if settings.force else removal.remove_if_unused()
    if isinstance(removed, Use):
        return _fail(f"{settings.model} is not removed: {_describe_use(removed)}; --force removes it anyway")
    if not (removed.was_registered or removed.keys):
        return _fail(describe_unregistered(settings.model, models))
    print(printable_lines(f"{settings.model} is removed: {_describe(removed)}"))
    if use.model_processes:
        print(printable_lines(f"a worker still serves it, and will register it again: {_names(use)}"))
    return 0


def _describe_use(use: Use) -> str:
    reasons = [f"{_names(use)} serves it"] if use.model_processes else []
    for name, number in (("requests", use.waiting_entries), ("batches", use.batches_in_flight)):
        if number:
            reasons.append(f"it has {count(number, *_ENTRIES[name])}")
    return ", and ".join(reasons)


def _names(use: Use) -> str:
    first, *others = sorted(use.model_processes)
    return f"{first} (and {count(len(others), 'other')})" if others else first


def _describe(removed: Removed) -> str:
    parts = [count(number, *_ENTRIES[name]) for name, number in removed.entries.items()]
    if removed.keys:
        named = [
            name if number == 1 else f"{name} ({number:,})" for name, number in sorted(removed.keys.items())
        ]
        parts.append(f"{count(sum(removed.keys.values()), 'key')}: {', '.join(named)}")
    if removed.unread:
        parts.append(f"{count(removed.unread, 'key')} with unread results left to expire")
    return "; ".join(parts) or "it had no keys"
