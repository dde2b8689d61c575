"""`carpool top`: how each model fares and why its batches leave, live."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.settings import ProducerSettings, read_settings
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory
from carpool.wire.report import BatcherReport
from carpool_cli.screen import Screen, Window
from carpool_cli.top_page import HEAD, Figures, ModelLook, figures, page

EVERY_S: Final = 1.0
APART_S: Final = 1.5  # between the two looks of --once: batchers speak about once a second
LOOKS: Final = 6  # rates are of as many seconds, less one

Look = Mapping[str, ModelLook]


class TopSettings(ProducerSettings):
    """Show how each model fares, and why its batches leave; every second, until Ctrl-C.

    waiting     requests that wait; where no batcher is active, entries of the stream
    oldest      how long the first of them has waited
    in flight   batches dispatched and not settled, and the requests in them
    processes   model processes alive
    requests/s  dispatched, in the last 5 seconds
    fill        how full those batches were, of what max_batch_size or max_batch_cost allows
    p50, p99    from a request's arrival until its batch was settled, in the last 10 to 20 seconds
    left        why batches left: full, preferred, efficient, deadline, delay, idle
    l(n)        how long a batch of n takes, as learned
    refused     requests that got no result, since this batcher began; and lately
                (early: could not have been done in time; waiting, in_flight: where it was when it expired)
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    model: str = Field("", description="show this model alone")
    once: bool = Field(False, description="show one page, of a second and a half, and end")
    as_json: bool = Field(False, description="an object for each look, on a line, for a program")


class TopError(Exception):
    """There is nothing to show, and why."""


def main(argv: Sequence[str]) -> int:
    """Show until Ctrl-C, or once. 1 if Redis cannot be asked, or knows no such model."""
    settings = read_settings(TopSettings, argv, "carpool top")
    directory = Directory(Link(settings.redis_url, name=f"carpool-top-{os.getpid()}"), settings.prefix)
    try:
        _run(settings, lambda: look(directory, settings.model))
    except KeyboardInterrupt:
        return 0  # the usual way to end it
    except (UnavailableError, CommandError, TopError) as error:
        print(f"carpool top: {error}", file=sys.stderr)
        return 1
    finally:
        directory.close()
    return 0


def _run(settings: TopSettings, look_now: Callable[[], Look]) -> None:
    where, screen = without_password(settings.redis_url), Screen()

    def say(shown: Sequence[Figures], lost: str) -> None:
        if settings.as_json:
            screen.say(as_json(shown, lost))
        else:
            screen.say("\n".join([*page(where, shown, screen.columns, lost=lost), ""]))

    first = look_now()
    if settings.once:
        time.sleep(APART_S)
        say(compare(first, look_now()), "")
    elif settings.as_json or not screen.live:
        follow(first, look_now, say)
    else:
        with Window(screen) as window:
            follow(
                first,
                look_now,
                lambda shown, lost: window.draw(page(where, shown, *window.size, lost), HEAD),
            )


def follow(first: Look, look_now: Callable[[], Look], show: Callable[[list[Figures], str], None]) -> None:
    """Show what is, every second, for ever; while Redis is away, what was, and what Redis is missed for."""
    looks, lost = deque([first], LOOKS), ""
    while True:
        show(compare(looks[0], looks[-1]), lost)
        time.sleep(EVERY_S)
        try:
            looks.append(look_now())
            lost = ""
        except UnavailableError as error:
            lost = str(error)


def look(directory: Directory, only: str) -> Look:
    """Every registered model, or one, as it is now. Raises TopError if that one is not there."""
    models = directory.models()
    if only and only not in models:
        there = f"there are {', '.join(models)}" if models else "none is; `carpool up square` serves one"
        raise TopError(f"no model {only!r:.140} is registered; {there}")
    return {model: _look_at(directory, model) for model in ([only] if only else models)}


def _look_at(directory: Directory, model: str) -> ModelLook:
    overview = directory.overview(model)
    status = None if overview.report is None else BatcherReport.decode(overview.report)
    oldest_s = None
    if overview.waiting_entries and not (overview.batcher and status):
        oldest_s = _oldest_s(directory, model, overview.at_us)
    return ModelLook(
        overview.waiting_entries,
        oldest_s,
        overview.batches_in_flight,
        overview.model_processes,
        overview.batcher,
        status,
    )


def _oldest_s(directory: Directory, model: str, now_us: int) -> float | None:
    """From the stream, where no batcher says it; None to whom may not look there."""
    try:
        arrival_us = directory.oldest_arrival_us(model)
    except CommandError:
        return None
    return None if arrival_us is None else max(0, now_us - arrival_us) / 1e6


def compare(before: Look, now: Look) -> list[Figures]:
    """Each model of the later look, by what the earlier one tells."""
    return [figures(model, before.get(model), one) for model, one in now.items()]


def as_json(shown: Sequence[Figures], lost: str = "") -> str:
    """One look, on a line; or why there is none."""
    if lost:
        return json.dumps({"error": lost})
    return json.dumps({"models": [one.as_json() for one in shown]})
