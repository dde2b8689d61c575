"""`carpool top`: load, latency and dispatch reasons of each model, live."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.figures import INTERVAL_S, Figures, RecentFigures, Sample, compare, take_sample
from carpool.keys import Keys
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_json
from carpool.store.connection import CommandError, Link, LinkError
from carpool.store.detail import read_detail, watch
from carpool.store.directory import Directory
from carpool.store.eviction import eviction_warning
from carpool.wire.detail import ModelDetail
from carpool_cli.models import describe_unregistered
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, full_screen, plain_lines
from carpool_cli.top.page import Page

DETAIL_S: Final = 5.0  # with --once: a batcher looks at an idle model every three seconds
DETAIL_INTERVAL_S: Final = 0.05
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

    The detail of a model, `carpool top MODEL`, is published by its batcher while it is shown:
    lanes: what waits in each, and of its batches that settled in the last minute p50 and p99 of the time from
                arrival to settled, and of the execution
    tenants: what waits of each, and how many of its requests arrived in the last minute
    latest batches: wait: from the arrival of its first request to its dispatch
    errors: grouped by what is the same but for numbers and IDs
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    detail_of: CliPositionalArg[str] = Field(
        "", description="a model, which is shown alone, and with its detail"
    )
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
        if settings.detail_of:
            settings.model = settings.detail_of
        look = _Look(link, Keys(settings.detail_of, settings.prefix)) if settings.detail_of else None
        _run(settings, warning, lambda: sample_shown(directory, settings.model), look)
    except KeyboardInterrupt:
        return 0  # the usual way to end it
    except (UnavailableError, CommandError, TopError) as error:
        complain(f"carpool top: {explain(error)}")
        return 1
    finally:
        directory.close()
    return 0


class _Look:
    """Looks at the detail of a model: each look asks its batcher to publish it for a while longer."""

    def __init__(self, link: Link, keys: Keys) -> None:
        self._link = link
        self._keys = keys

    def detail(self) -> ModelDetail | None:
        """The detail; None while none is published, or Redis does not answer."""
        try:
            watch(self._link, self._keys)
            return read_detail(self._link, self._keys)
        except LinkError:
            return None

    def wait(self) -> None:
        """Wait until there is one, for DETAIL_S at most."""
        ends_s = time.monotonic() + DETAIL_S
        while self.detail() is None and time.monotonic() < ends_s:
            time.sleep(DETAIL_INTERVAL_S)


def _run(settings: TopSettings, warning: str, sample_now: Callable[[], Sample], look: _Look | None) -> None:
    url, screen = without_password(settings.redis_url), Screen()

    def page(models: Sequence[Figures], error: str) -> Page:
        detail = None if look is None else look.detail()
        return Page(url, models, error, warning, detail, has_detail=look is not None)

    def print_page(models: Sequence[Figures], error: str) -> None:
        if settings.as_json:
            print(as_json(models, error, None if look is None else look.detail()), flush=True)
        elif screen.live:
            screen.console.print(page(models, error), "")
        else:
            screen.print("\n".join([*plain_lines(page(models, error)), ""]))

    first = sample_now()
    if settings.once:
        if look is not None:
            look.wait()
        time.sleep(ONCE_INTERVAL_S)
        print_page(compare(first, sample_now()), "")
    elif settings.as_json or not screen.live:
        follow(first, sample_now, print_page)
    else:
        with full_screen(screen) as draw:
            follow(first, sample_now, lambda models, error: draw(page(models, error)))


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


def as_json(models: Sequence[Figures], error: str = "", detail: ModelDetail | None = None) -> str:
    """One sample, or the error that prevented it, on one line; and the detail of the model, if there is."""
    if error:
        return printable_json({"error": error})
    told = {} if detail is None else {"detail": json.loads(detail.encode())}
    return printable_json({"models": [model.as_json() for model in models], **told})
