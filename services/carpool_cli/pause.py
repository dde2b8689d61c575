"""`carpool pause MODEL`: nothing of a model is dispatched, until `carpool resume`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.keys import Keys, models_key
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.operations import Operations
from carpool_cli.models import describe_unregistered
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain


class PauseSettings(ConnectionSettings):
    """Pause a model: nothing more is dispatched, and what is in flight finishes.

    Requests are accepted, and wait. Their timeouts hold: those that pass are answered DEADLINE_EXCEEDED. With
    --refuse requests that come from now on are answered UNAVAILABLE at once; those that wait, and those that
    continue a sequence, go on waiting. It holds within a second, until `carpool resume`, whatever restarts.
    Again with other flags changes how it is paused.
    """

    model: CliPositionalArg[str] = Field(description="the model's name")
    refuse: bool = Field(
        False, description="refuse requests that come from now on, instead of letting them wait"
    )
    reason: str = Field("", description="why, for producers and other operators")


def main(argv: Sequence[str]) -> int:
    """Pause it, and say how it is paused. Returns 1 if it is unknown, or Redis fails; 2 for a bad reason."""
    settings = read_settings(PauseSettings, argv, "carpool pause")
    try:
        keys = Keys(settings.model, settings.prefix)
    except ValueError as error:
        return _fail(str(error))
    link = Link(settings.redis_url, name=f"carpool-pause-{os.getpid()}", key=keys.paused)
    try:
        paused = Operations(link, settings.prefix, this_operator()).pause(
            settings.model, refuses=settings.refuse, reason=settings.reason
        )
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    except ValueError as error:
        if str(error).startswith("reason:"):
            return _fail(str(error), 2)
        return _fail(describe_unregistered(settings.model, _models(link, settings.prefix)))
    finally:
        link.close()
    print(printable_lines(f"{settings.model} is {paused.describe()}"))
    return 0


def _models(link: Link, prefix: str) -> list[str]:
    key = models_key(prefix)
    return sorted(name.decode() for name in link.call_at(key, "SMEMBERS", key))


def _fail(error: str, status: int = 1) -> int:
    complain(f"carpool pause: {error}")
    return status
