"""`carpool resume MODEL`: a model that is paused is dispatched again."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import Field
from pydantic_settings import CliPositionalArg

from carpool.keys import Keys
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_lines
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.operations import Operations
from carpool_cli.operator_name import this_operator
from carpool_cli.refused import explain


class ResumeSettings(ConnectionSettings):
    """End the pause of a model: requests that waited are dispatched at once, as many as workers can take."""

    model: CliPositionalArg[str] = Field(description="the model's name")


def main(argv: Sequence[str]) -> int:
    """Resume it, and say how it was paused. Returns 1 if it was not paused, or Redis fails."""
    settings = read_settings(ResumeSettings, argv, "carpool resume")
    try:
        keys = Keys(settings.model, settings.prefix)
    except ValueError as error:
        return _fail(str(error))
    link = Link(settings.redis_url, name=f"carpool-resume-{os.getpid()}", key=keys.paused)
    try:
        was = Operations(link, settings.prefix, this_operator()).resume(settings.model)
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()
    if was is None:
        return _fail(f"{settings.model} is not paused")
    print(printable_lines(f"{settings.model} is resumed; it was {was.describe()}"))
    return 0


def _fail(error: str) -> int:
    complain(f"carpool resume: {error}")
    return 1
