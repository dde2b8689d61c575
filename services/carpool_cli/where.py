"""`carpool where`: where a request is, and why it is not dispatched yet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.keys import CORRELATION_ID, Keys
from carpool.settings import ConnectionSettings, Seconds, read_settings
from carpool.shown import complain, printable, printable_json
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.directory import Directory
from carpool.store.whereabouts import ANSWER_S, find_in_each
from carpool.wire.whereabouts import Whereabouts
from carpool_cli.models import describe_unregistered
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, count

NOT_FOUND_STATUS: Final = 3


class WhereSettings(ConnectionSettings):
    """Say where a request is: waiting, and why; in flight, and where; answered; or given up.

    REQUEST is a correlation ID, with the name of its model before it, if that is known: MODEL ID, or
    MODEL/ID, as `carpool infer MODEL BODY --enqueue` printed it. Without a model, all of them are asked. The
    exit status is 3 if the request was not found.
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    request: CliPositionalArg[list[str]] = Field(description="MODEL ID, MODEL/ID, or ID")
    timeout: Seconds = Field(ANSWER_S, gt=0, description="seconds to wait for the answer of a batcher")
    as_json: bool = Field(False, description="print JSON: an array with a map for each model")


def main(argv: Sequence[str]) -> int:
    """Say where it is. Returns 1 if Redis fails or the model is unknown, 2 if the arguments are wrong."""
    settings = read_settings(WhereSettings, argv, "carpool where")
    model, correlation_id = _named(settings.request)
    if not CORRELATION_ID.fullmatch(correlation_id):
        return _fail(
            "a request is named by MODEL ID, MODEL/ID or ID; an ID has 1 to 128 of A-Z a-z 0-9 . _ : -", 2
        )
    link = Link(settings.redis_url, name=f"carpool-where-{os.getpid()}")
    try:
        models = Directory(link, settings.prefix).models()
        if model and model not in models:
            return _fail(describe_unregistered(model, models))
        chosen = [model] if model else models
        keys = [Keys(name, settings.prefix) for name in chosen]
        found = find_in_each(link, keys, correlation_id, timeout_s=settings.timeout)
    except (LinkError, CommandError) as error:
        return _fail(explain(error))
    finally:
        link.close()
    if not model:
        found = [one for one in found if one.state != "unknown"] or found
    return _show(settings, correlation_id, found)


def _named(words: Sequence[str]) -> tuple[str, str]:
    """The model, if it is named, and the correlation ID; '' if these are not two words at most."""
    if len(words) == 1:
        model, _, correlation_id = words[0].rpartition("/")
        return model, correlation_id
    return (words[0], words[1]) if len(words) == 2 else ("", "")


def _fail(error: str, status: int = 1) -> int:
    complain(f"carpool where: {error}")
    return status


def _show(settings: WhereSettings, correlation_id: str, found: Sequence[Whereabouts]) -> int:
    is_found = any(one.state != "unknown" for one in found)
    if settings.as_json:
        print(printable_json([one.as_json() for one in found]))
    elif not found:
        Screen().print("no model is registered")
    elif is_found or len(found) == 1:
        Screen().print("\n\n".join(["\n".join(map(printable, one.lines())) for one in found]))
    else:
        _show_unknown(correlation_id, found)
    return 0 if is_found else NOT_FOUND_STATUS


def _show_unknown(correlation_id: str, found: Sequence[Whereabouts]) -> None:
    """None of several models has it."""
    screen = Screen()
    screen.print(f"{correlation_id}: unknown to each of {count(len(found), 'model')}")
    readings = dict.fromkeys([reading for one in found for reading in one.readings()])
    screen.print(f"one of these is true: {'; '.join(readings)}")
    for one in found:
        for text in one.not_seen:
            screen.print(f"{one.model}: {printable(text)}")
