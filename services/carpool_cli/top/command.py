"""`carpool top`: load, latency and dispatch reasons of each model, live."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from carpool.address import without_password
from carpool.errors import UnavailableError
from carpool.settings import ConnectionSettings, read_settings
from carpool.shown import complain, printable_json
from carpool.store.connection import CommandError, Link
from carpool.store.directory import Directory
from carpool.store.eviction import eviction_warning
from carpool.wire.report import BatcherReport
from carpool_cli.models import describe_unregistered
from carpool_cli.refused import explain
from carpool_cli.screen import Screen, full_screen, plain_lines
from carpool_cli.top.figures import Figures, ModelSample, figures
from carpool_cli.top.page import Page

INTERVAL_S: Final = 1.0
ONCE_INTERVAL_S: Final = 1.5  # between the two samples of --once: batchers report about once a second
SAMPLES_MAX: Final = 6  # rates cover the time from the oldest of them to the newest: 5 s

Sample = Mapping[str, ModelSample]
"""Every model at one time, by name."""


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
        _run(settings, warning, lambda: take_sample(directory, settings.model))
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
    samples, error = deque([first], SAMPLES_MAX), ""
    while True:
        show(compare(samples[0], samples[-1]), error)
        time.sleep(INTERVAL_S)
        try:
            samples.append(sample_now())
            error = ""
        except UnavailableError as unavailable:
            error = str(unavailable)


def take_sample(directory: Directory, only_model: str) -> Sample:
    """Every model that is registered or loaded for the first time, or only one, as it is now. Raises TopError
    if that one is neither."""
    models = directory.models()
    if not only_model:
        shown = sorted([*models, *directory.loading(models)])
    elif only_model in models or directory.is_loading(only_model):
        shown = [only_model]
    else:
        raise TopError(describe_unregistered(only_model, models))
    return {model: _sample_model(directory, model) for model in shown}


def _sample_model(directory: Directory, model: str) -> ModelSample:
    overview = directory.overview(model)
    report = None if overview.report is None else BatcherReport.decode(overview.report)
    oldest_s = None
    if overview.waiting_entries and not (overview.batcher and report):
        oldest_s = _oldest_s(directory, model, overview.at_us)
    return ModelSample(
        overview.waiting_entries,
        oldest_s,
        overview.batches_in_flight,
        overview.model_processes,
        overview.batcher,
        report,
        overview.dead,
        overview.loading,
    )


def _oldest_s(directory: Directory, model: str, now_us: int) -> float | None:
    """The age of the stream's first entry, if no batcher reports it; None if the ACL forbids reading it."""
    try:
        arrival_us = directory.oldest_arrival_us(model)
    except CommandError:
        return None
    return None if arrival_us is None else max(0, now_us - arrival_us) / 1e6


def compare(before: Sample, now: Sample) -> list[Figures]:
    """The figures of each model of the later sample, compared with the earlier one."""
    return [figures(model, before.get(model), sample) for model, sample in now.items()]


def as_json(models: Sequence[Figures], error: str = "") -> str:
    """One sample, or the error that prevented it, on one line."""
    if error:
        return printable_json({"error": error})
    return printable_json({"models": [model.as_json() for model in models]})
