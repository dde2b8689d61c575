"""`carpool tune MODEL`: measures a live model, tries settings in the simulator, and prints the best ones."""

from __future__ import annotations

import asyncio
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.client.aio import AsyncClient
from carpool.model_settings import POLICIES
from carpool.settings import Milliseconds, read_settings
from carpool_cli.infer import RequestSettings, read_body
from carpool_cli.screen import Progress, Screen, count, table
from carpool_cli.tuning.arrivals import traffic
from carpool_cli.tuning.calibrate import (
    ROUND_TRIP_DEFAULT,
    Measured,
    bursts,
    calibrate,
    deviation,
    doubts,
    measured,
)
from carpool_cli.tuning.live import LiveModel, UnavailableModelError, connected, read_live_model, run_command
from carpool_cli.tuning.observed import ObservedSizes, observed_sizes
from carpool_cli.tuning.processes import describe, processes_needed
from carpool_cli.tuning.search import (
    P99_TOLERANCE,
    RATE_TOLERANCE,
    Candidate,
    Figures,
    Goal,
    candidates,
    changed_settings,
    larger_batches,
    rank_by_latency,
    rank_by_rate,
    recommend,
)
from carpool_cli.tuning.simulator import World

PLOTTED_RATES: Final = 12
PLOTTED_RATE_RATIO: Final = 1.15  # of the plot to the rate of the advice
PLOTTED_OVERLOAD_RATIO: Final = 1.6  # the same where requests expire, and goodput is plotted
ROBUST_KINDS: Final = ("eager", "deferred")  # tried with more processes, beside what is best with the present
CURVE_COLUMNS_MAX: Final = 12  # sizes in the table of l(n)


class TuneSettings(RequestSettings):
    """Find the settings with which a model serves the most requests within a given latency.

    It measures how long a batch of n takes by sending BODY in bursts, one burst after the other; without BODY
    it uses the batches of the model that were settled last. Then it tries settings in the simulator, and
    prints the best ones and the command that applies them. It changes no settings. BODY is as for `carpool
    infer`: JSON, text, @FILE or -. With --rate it also says how many model processes that rate needs.

    l(n) is a guess at sizes that were not observed. What rests on such a guess is marked.

      carpool tune square 7 --latency-ms 20
      carpool tune square 7 --latency-ms 20 --rate 3000
    """

    model_config = SettingsConfigDict(cli_parse_none_str="\0")

    model: CliPositionalArg[str] = Field(description="the model's name; `carpool models` lists them")
    body: CliPositionalArg[str] = Field("", description="the body of a typical request")
    latency_ms: Milliseconds = Field(
        gt=0, le=3_600_000, description="latency that 99% of the requests may take at most"
    )
    rate: float | None = Field(
        None, gt=0, description="expected requests/s (default: find the highest possible rate)"
    )
    arrivals: str = Field(
        "poisson", description="poisson, bursty, diurnal, or a FILE, as for `carpool simulate`"
    )
    rounds: int = Field(5, ge=1, le=100, description="number of bursts of each size")
    plot: str = Field(
        "tune.png", description="file for the plot of p99 latency and goodput by rate; empty for none"
    )


def main(argv: Sequence[str]) -> int:
    """Measure, search and print, and return the exit status: see `run_command`."""
    settings = read_settings(TuneSettings, argv, "carpool tune")
    return run_command("tune", lambda: _tune(settings, Screen()))


def _tune(settings: TuneSettings, screen: Screen) -> None:
    arrivals = traffic(settings.arrivals)
    with connected(settings, "tune") as link:
        live = read_live_model(link, settings.prefix, settings.model)
    if live.paused and settings.body:
        raise UnavailableModelError(f"{settings.model} is {live.paused}; `carpool resume` ends that")
    if not live.processes:
        raise UnavailableModelError(f"no model process of {settings.model} is running")
    max_size = max(live.registered.max_batch_size, live.settings.max_batch_size)
    measurement = _measure(settings, live, screen)
    world = measurement.world(live.processes)
    observed = observed_sizes(measurement.observed)
    _show_measured(live, measurement, world, max_size, screen)
    goal = Goal(world, settings.latency_ms, arrivals, observed=observed)
    lone_ms = (world.execution_us(1) + world.round_trip_us(1)) / 1000
    if lone_ms > settings.latency_ms:
        raise UnavailableModelError(
            f"a lone request already takes {lone_ms:.3g} ms, so no settings can keep 99% of the requests "
            "within "
            f"{settings.latency_ms:g} ms"
        )
    tried = list(candidates(live.settings, max_size, settings.latency_ms))
    progress = Progress(Screen(sys.stderr), len(tried), "simulations")
    if settings.rate is None:
        ranked = rank_by_rate(goal, tried, max_size, progress.step)
    else:
        ranked = rank_by_latency(goal, tried, settings.rate, progress.step)
    progress.end()
    best = recommend(ranked, live.settings, at_one_rate=settings.rate is not None)
    _show_ranking(settings, live, ranked, best, observed, screen)
    _show_advice(settings, live, best, screen)
    _show_processes(settings, goal, live, ranked, best, screen)
    _show_larger_batches(settings, goal, measurement, best, max_size, screen)
    if settings.plot:
        _plot(settings, goal, measurement, live, best, max_size, screen)


# --- measuring ---------------------------------------------------------------------------------------------


def _measure(settings: TuneSettings, live: LiveModel, screen: Screen) -> Measured:
    """Measure with bursts, or with recently settled batches without BODY. Raises UnavailableModelError."""
    if not settings.body:
        if not live.observed:
            hint = (
                "use some of its sequences first"
                if live.kind.has_sequences
                else "pass a BODY to send, as in `carpool tune "
                f"{settings.model} 7 --latency-ms {settings.latency_ms:g}`"
            )
            raise UnavailableModelError(f"{settings.model} has no recently settled batches: {hint}")
        return measured(live.observed)
    if live.kind.has_sequences:
        raise UnavailableModelError(
            f"{settings.model} keeps a state for each sequence, and BODY would be sent outside of any: omit "
            "it, to use the batches that were settled last"
        )
    body = read_body(settings.body, settings.body_type)
    sizes = bursts(live.settings.max_batch_size, settings.rounds)
    screen.print(
        f"sending {sum(sizes) + 1:,} requests to {settings.model}, at most {max(sizes):,} at a time; "
        "Ctrl-C stops"
    )
    progress = Progress(Screen(sys.stderr), len(sizes), "batch sizes")
    measurement = asyncio.run(_send_bursts(settings, live, body, sizes, progress))
    progress.end()
    return measurement


async def _send_bursts(
    settings: TuneSettings, live: LiveModel, body: Any, sizes: Sequence[int], progress: Progress
) -> Measured:
    delays = bool(live.settings.max_queue_delay_ms) or live.settings.policy != "eager"
    async with AsyncClient(settings.redis_url, prefix=settings.prefix) as client:
        return await calibrate(
            client,
            settings.model,
            body,
            sizes,
            options=settings.body_options,
            delays=delays,
            on_progress=progress.step,
        )


# --- printing the measurement ------------------------------------------------------------------------------


def _show_measured(
    live: LiveModel, measurement: Measured, world: World, max_size: int, screen: Screen
) -> None:
    screen.title("Measured")
    for line in curve_rows(measurement, world, max_size):
        screen.print(f"  {line}")
    screen.print(f"  standard deviation of l(n): {deviation(world.spread):.1%}")
    line = f"{(world.out_us + world.back_us) / 1000:.3g} + {world.round_trip_slope_us / 1000:.3g} n ms"
    if measurement.round_trip is ROUND_TRIP_DEFAULT:
        screen.print(f"  round trip through Redis: not measured, assumed {line}")
    else:
        varies = f"{deviation(world.round_trip_spread):.1%}"
        screen.print(f"  round trip through Redis: {line}, standard deviation {varies}")
    screen.print(f"  {count(world.processes, 'model process', 'model processes')}")
    for note in notes(live, measurement, max_size):
        screen.print(f"  {note}")
    reasons = doubts(measurement)
    if reasons:
        _warn(reasons, screen)


def curve_rows(measurement: Measured, world: World, max_size: int) -> list[str]:
    """l(n) as a table, at observed sizes; where 1 or `max_size` is none, there too, marked as a guess."""
    observed = observed_sizes(measurement.observed)
    points = list(zip(measurement.curve.sizes, measurement.curve.times_us, strict=True))
    points = points[:: -max(1, -(-len(points) // CURVE_COLUMNS_MAX))][::-1]  # always with the largest size
    columns = [(f"{size:.0f}", f"{time_us / 1000:.3g}") for size, time_us in points]
    for position, size in ((0, 1), (len(columns) + 1, max_size)):
        if not observed.covers(size):
            columns.insert(position, (f"{size}?", f"{world.execution_us(size) / 1000:.3g}?"))
    sizes, times_ms = zip(*columns, strict=True)
    return table([("batch size n", *sizes), ("execution time l(n), ms", *times_ms)])


def notes(live: LiveModel, measurement: Measured, max_size: int) -> Iterator[str]:
    """Limitations of the measurement that matter for the advice."""
    observed = observed_sizes(measurement.observed)
    if not (observed.covers(1) and observed.covers(max_size)):
        yield f"? a guess: only {observed} were observed, and l(n) of all other sizes is extrapolated"
    if live.settings.policy not in POLICIES:
        yield f"(the policy {live.settings.policy} is simulated as eager)"


def _warn(reasons: Sequence[str], screen: Screen) -> None:
    """Warn that the times show a busy machine or a slow connection to Redis rather than the model."""
    screen.print("\n  WARNING: the advice below is unreliable.", style="bold")
    for reason in reasons:
        screen.print(f"  {reason}")
    screen.print(
        "  Redis, the batcher, each worker and each model process need an idle core when they have work.\n"
        "  Use `uptime` and `top` to find out what else uses the cores; stop it, or use more cores. If the\n"
        "  network to Redis is slow, move Redis closer. Then measure again, with more --rounds."
    )


# --- printing the advice -----------------------------------------------------------------------------------


def _show_ranking(
    settings: TuneSettings,
    live: LiveModel,
    ranked: Sequence[Figures],
    best: Figures,
    observed: ObservedSizes,
    screen: Screen,
) -> None:
    within = f"{settings.latency_ms:g} ms"
    if settings.rate is None:
        screen.title(f"Simulated: the highest rate at which 99% of the requests take at most {within}")
    else:
        screen.title(f"Simulated at {settings.rate:,.0f} requests/s")
    rows = [
        (
            "",
            "requests/s",
            f"within {within}",
            "p50 ms",
            "p99 ms",
            "mean batch",
            "guessed",
            "changed settings",
        )
    ]
    for figures in ranked:
        changes = changed_settings(figures.candidate.settings, live.settings)
        mark = "*" if figures is best else " "
        rows.append(
            (
                f"{mark} {figures.candidate.kind}", f"{figures.rate:,.0f}", f"{figures.within:.1%}",
                _ms(figures.p50_ms), _ms(figures.p99_ms), f"{figures.mean_batch:.1f}",
                f"{figures.guessed:.0%}",
                " ".join(f"{name}={value}" for name, value in changes.items()),
            )
        )  # fmt: skip
    changes_of_rows = [row[-1] for row in rows]
    for line, text in zip(table([row[:-1] for row in rows]), changes_of_rows, strict=True):
        screen.print(f"  {line}  {text}".rstrip())
    screen.print(
        "  * recommended: of the rows about as good as the first (at most "
        f"{RATE_TOLERANCE:.0%} worse; p99: {P99_TOLERANCE:.0%}), the one that changes the fewest settings"
    )
    if any(figures.is_guess for figures in ranked):
        screen.print(
            f"  guessed: the share of the simulated batches whose l(n) is a guess, as only {observed} were "
            "observed"
        )


def _show_advice(settings: TuneSettings, live: LiveModel, best: Figures, screen: Screen) -> None:
    """Print the command that applies the best settings, or why there is none."""
    within = f"{settings.latency_ms:g} ms"
    changes = changed_settings(best.candidate.settings, live.settings)
    if not best.rate or not best.within:
        screen.print(
            f"\nNo settings keep 99% of the requests within {within}: a lone request takes too long, or "
            "there are too few model processes."
        )
    elif not changes:
        screen.print("\nKeep the present settings: none of the others is much better.")
    else:
        pairs = " ".join(shlex.quote(f"{name}={value}") for name, value in changes.items())
        if "default_expiration_ms" in changes:
            screen.print(
                f"\nThese settings refuse requests that cannot be answered within {within}. To apply them:"
            )
        else:
            screen.print("\nTo apply the recommended settings:")
        screen.print(f"  carpool config {shlex.quote(settings.model)} {pairs}")
    if best.is_guess:
        screen.print(f"This is a guess, because l(n) is one for {best.guessed:.0%} of the simulated batches.")


def _show_processes(
    settings: TuneSettings,
    goal: Goal,
    live: LiveModel,
    ranked: Sequence[Figures],
    best: Figures,
    screen: Screen,
) -> None:
    """Print how many model processes the rate needs, if one is given."""
    if settings.rate is None:
        return
    others = [
        figures.candidate
        for figures in ranked
        if figures is not best and figures.candidate.kind in ROBUST_KINDS
    ]
    needed = processes_needed(goal, [best.candidate, *others], settings.rate)
    screen.print()
    for line in describe(needed, settings.rate, settings.latency_ms, live.processes):
        screen.print(line)
    if needed is not None and needed.figures.candidate is not best.candidate:
        changes = changed_settings(needed.figures.candidate.settings, live.settings)
        pairs = " ".join(shlex.quote(f"{name}={value}") for name, value in changes.items())
        command = f"carpool config {shlex.quote(settings.model)} {pairs}" if pairs else "the present ones"
        screen.print(f"This is with other settings than those above: {command}")


def _show_larger_batches(
    settings: TuneSettings, goal: Goal, measurement: Measured, best: Figures, max_size: int, screen: Screen
) -> None:
    """Suggest larger batches where l(n), extrapolated, promises a gain."""
    larger = larger_batches(goal, best, max_size, max(size for size, _ in measurement.observed))
    if larger is not None:
        screen.print(
            f"\nLarger batches may help: if l(n) continues as measured, batches of {larger.size:,} would "
            f"serve {larger.gain:.0%} more\nrequests/s than batches of {max_size:,}. This was not measured: "
            "if the model can execute batches of that size,\ntry it and tune again:"
        )
        screen.print(f"  carpool config {shlex.quote(settings.model)} max_batch_size={larger.size}")


def _ms(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"


def _plot(
    settings: TuneSettings,
    goal: Goal,
    measurement: Measured,
    live: LiveModel,
    best: Figures,
    max_size: int,
    screen: Screen,
) -> None:
    from carpool_cli.tuning.plot import plot  # noqa: PLC0415 (only needed with --plot)

    shown = {"present settings": Candidate("present", live.settings)}
    if best.candidate.settings != live.settings:
        shown[f"recommended: {best.candidate.kind}"] = best.candidate
    expires = any(candidate.settings.default_expiration_ms is not None for candidate in shown.values())
    top = max(best.rate, settings.rate or 0.0, 1.0)
    top *= PLOTTED_OVERLOAD_RATIO if expires else PLOTTED_RATE_RATIO
    rates = [top * (step + 1) / PLOTTED_RATES for step in range(PLOTTED_RATES)]
    try:
        import matplotlib as _  # noqa: F401, PLC0415

        curves = {
            label: [goal.simulate(candidate, rate) for rate in rates] for label, candidate in shown.items()
        }
        path = Path(settings.plot)
        plot(path, settings.model, settings.latency_ms, curves, measurement, max_size)
    except ImportError:
        screen.print("\nNo plot was drawn: it needs matplotlib (pip install matplotlib).")
    else:
        screen.print(f"\nThe plot is in {path}.")
