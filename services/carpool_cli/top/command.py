"""`carpool top`: load, latency and dispatch reasons of each model, live."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.figures import INTERVAL_S, Figures, RecentFigures, Sample, compare, take_sample
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_json
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory
from carpool.store.eviction import eviction_warning
from carpool_cli.models import describe_unregistered
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, full_screen, plain_lines
from carpool_cli.top.page import Page

ONCE_INTERVAL_S: Final = 1.5  # between the two samples of --once: batchers report about once a second


class TopSettings(ConnectionSettings):
    """Show the load and latency of each model, and why its batches are dispatched; updated every second.

    waiting     requests waiting; if no batcher is active, entries of the request stream
    oldest      age of the request that has waited longest
    in flight   batches dispatched and not settled, and the requests in them
    processes   model processes; one that was killed counts until its lease runs out; loading: a worker loads
                the model
    requests/s  requests dispatched, over the last 5 seconds
    fill        mean fill of those batches, relative to max_batch_size or max_batch_cost
    p50, p99    time from arrival until the batch was settled, over the last 10 to 20 seconds

    Of a stepping model, each of whose requests is alone in its batch:
    slots       requests in flight that have a slot, of all slots (processes x max_batch_size)
    prefetched  requests in flight that get a slot as soon as one is free
    chunks/s    written for readers, over the last 5 seconds; those of requests that are not streamed count
                when these end
    first       time from arrival to the first chunk, of streams that ended in the last 10 to 20 seconds
    gap         mean time between two chunks of a stream, of the same streams
    whole outputs: time from arrival until the request was settled, streamed or not

    Of a model with sequences:
    sequences: kept (begun, and neither ended nor broken); the slots of a model that binds them to its
                processes (processes x max_batch_size); those that wait to start, because
                max_candidate_sequences are kept or no slot is free; and how many started, ended (with their
                last request, by end_sequences, or idle) and broke (a request failed, or the process with
                their state ended)

    policy: the one in force; another than that of the settings if the batcher rejects them
    dispatch reasons: full, preferred (reached one of preferred_batch_sizes), deadline (a request would have
                expired), efficient (waiting would not raise throughput), delay (max_queue_delay_ms
                had passed), idle (a model process was free)
    withheld results: finished, but kept back by preserve_ordering until earlier ones are delivered
    memory: resident memory of the model processes, and what they take of GPUs, where workers can tell
    latency model: l(n), the learned execution time of a batch of n requests
    refused requests: answered with an error by this batcher since it became active, and the rate now
                (early: could not have met the deadline; waiting, in_flight: where the request expired or,
                of a stepping model, was withdrawn)
    failed requests: answered with an error by a worker since the batcher became active, by status, and the
                rate now; last error: what the model raised, and where. The log of its worker has the
                traceback
    dead letters: requests given up because their model process or worker died repeatedly: see
                `carpool dead list`
    missed deadlines: why, as the batcher knows when the batch has settled
                early: refused, because it was not expected to be in time
                waiting: its deadline passed before it was dispatched
                dispatched late: less than l(n) was left when its batch could begin
                computed long: the model took longer than was left
                delivered late: executed in time, but its transit to the worker and back took too long
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    model: str = Field("", description="show only this model")
    once: bool = Field(False, description="show one page, measured over a second or so, and exit")
    as_json: bool = Field(False, description="print a JSON object per sample, one on each line")


class TopError(Exception):
    """There is nothing to show; the message says why."""


def main(argv: Sequence[str]) -> int:
    """Show the page until Ctrl-C, or once. Returns 1 if Redis does not answer or the model is unknown."""
    settings = read_settings(TopSettings, argv, "carpool top")
    link = Link(settings.redis_url, name=f"carpool-top-{os.getpid()}")
    directory = Directory(link, settings.prefix)
    try:
        warning = eviction_warning(link)
        if warning and settings.as_json:
            complain(f"carpool top: {warning}")
        _run(settings, warning, lambda: sample_shown(directory, settings.model))
    except KeyboardInterrupt:
        return 0  # the usual way to end it
    except (UnavailableError, CommandError, TopError) as error:
        complain(f"carpool top: {explain(error)}")
        return 1
    finally:
        directory.close()
    return 0


def _run(settings: TopSettings, warning: str, sample_now: Callable[[], Sample]) -> None:
    url, screen = without_password(settings.redis_url), Screen()

    def print_page(models: Sequence[Figures], error: str) -> None:
        if settings.as_json:
            print(as_json(models, error), flush=True)
        elif screen.live:
            screen.console.print(Page(url, models, error, warning), "")
        else:
            screen.print("\n".join([*plain_lines(Page(url, models, error, warning)), ""]))

    first = sample_now()
    if settings.once:
        time.sleep(ONCE_INTERVAL_S)
        print_page(compare(first, sample_now()), "")
    elif settings.as_json or not screen.live:
        follow(first, sample_now, print_page)
    else:
        with full_screen(screen) as draw:
            follow(first, sample_now, lambda models, error: draw(Page(url, models, error, warning)))


def follow(
    first: Sample, sample_now: Callable[[], Sample], show: Callable[[list[Figures], str], None]
) -> None:
    """Sample and show every second, forever. While Redis does not answer, show the last figures and why."""
    recent = RecentFigures(sample_now, first)
    while True:
        show(recent.figures, recent.error)
        time.sleep(INTERVAL_S)
        recent.update()


def sample_shown(directory: Directory, only_model: str) -> Sample:
    """The models that are shown. Raises TopError if only one is, and nobody has registered it."""
    sample = take_sample(directory, only_model)
    if only_model and not sample:
        raise TopError(describe_unregistered(only_model, directory.models()))
    return sample


def as_json(models: Sequence[Figures], error: str = "") -> str:
    """One sample, or the error that prevented it, on one line."""
    if error:
        return printable_json({"error": error})
    return printable_json({"models": [model.as_json() for model in models]})
