"""`carpool tune MODEL`: measures a live model, tries settings in the simulator, says which are best."""

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
from carpool.settings import ProducerSettings, read_settings
from carpool_cli.infer import read_body
from carpool_cli.screen import Progress, Screen, count, table
from carpool_cli.tuning.arrivals import traffic
from carpool_cli.tuning.calibrate import TRIP, Measured, bursts, calibrate, doubts, give_or_take, measured
from carpool_cli.tuning.curve import furthest_off
from carpool_cli.tuning.live import Live, NotServedError, exit_status, linked, look
from carpool_cli.tuning.search import (
    KNOWN,
    Candidate,
    Figures,
    Goal,
    candidates,
    changes,
    larger,
    most_in_time,
    most_requests,
    recommended,
)
from carpool_cli.tuning.simulator import World

PLOTTED: Final = 12  # rates
OFF: Final = 0.15  # of a batch's time, is how far a line may be off before it is told
COLUMNS: Final = 12  # of sizes


class TuneSettings(ProducerSettings):
    """Find the settings with which a model serves the most requests within a latency.

    Sends bursts of BODY to the model, one at a time, to learn how long a batch of n takes; without BODY, what
    the model served of late tells. Then tries settings in the simulator, prints the best, and the command
    that applies them. It changes nothing. BODY is as for `carpool infer`: JSON, text, @FILE or -.

      carpool tune square 7 --latency-ms 20
      carpool tune square 7 --latency-ms 20 --rate 3000
    """

    model_config = SettingsConfigDict(cli_parse_none_str="\0")

    model: CliPositionalArg[str] = Field(description="the model's name; `carpool models` lists them")
    body: CliPositionalArg[str] = Field("", description="a request like those that will come")
    latency_ms: float = Field(gt=0, le=3_600_000, description="what 99 of 100 requests are to take at most")
    rate: float | None = Field(
        None, gt=0, description="requests/s that will come (default: find the most that can)"
    )
    arrivals: str = Field("poisson", description="poisson, bursty, or a FILE, as for `carpool simulate`")
    raw: bool = Field(False, description="send the body as it is, as bytes")
    rounds: int = Field(5, ge=1, le=100, description="how often each size of burst is sent")
    plot: str = Field("tune.png", description="where to draw p99 over rate")


def main(argv: Sequence[str]) -> int:
    """Measure, search, say. 1 if the model cannot be asked, 2 if what was asked for makes no sense."""
    settings = read_settings(TuneSettings, argv, "carpool tune")
    return exit_status("tune", lambda: _tune(settings, Screen()))


def _tune(settings: TuneSettings, screen: Screen) -> None:
    arrives = traffic(settings.arrivals)
    with linked(settings, "tune") as link:
        live = look(link, settings.prefix, settings.model)
    if not live.processes:
        raise NotServedError(f"no process serves {settings.model} at present")
    max_size = max(live.registered.max_batch_size, live.settings.max_batch_size)
    found_out = _measure(settings, live, screen)
    world = found_out.world(live.processes)
    _show_measured(live, found_out, world, max_size, screen)
    goal = Goal(world, settings.latency_ms, arrives)
    alone_ms = (world.takes_us(1) + world.trip_us(1)) / 1000
    if alone_ms > settings.latency_ms:
        raise NotServedError(
            f"a request alone takes {alone_ms:.3g} ms: no settings can bring 99 of 100 under "
            f"{settings.latency_ms:g}"
        )
    tried = list(candidates(live.settings, max_size, settings.latency_ms))
    progress = Progress(Screen(sys.stderr), len(tried))
    if settings.rate is None:
        found = most_requests(goal, tried, max_size, progress.step)
    else:
        found = most_in_time(goal, tried, settings.rate, progress.step)
    progress.end()
    best = recommended(found, live.settings, at_one_rate=settings.rate is not None)
    _show(settings, live, found, best, screen)
    _show_larger(settings, goal, found_out, best, max_size, screen)
    if settings.plot:
        _plot(settings, goal, found_out, live, best, max_size, screen)


# --- measuring -----------------------------------------------------------------------------------------


def _measure(settings: TuneSettings, live: Live, screen: Screen) -> Measured:
    """What the model shows, or has shown of late where there is nothing to send. Raises NotServedError."""
    if not settings.body:
        if not live.seen:
            raise NotServedError(
                f"{settings.model} has settled no batch of late: say a BODY to send, as in `carpool tune "
                f"{settings.model} 7 --latency-ms {settings.latency_ms:g}`"
            )
        return measured(live.seen)
    body = read_body(settings.body, raw=settings.raw)
    sizes = bursts(live.settings.max_batch_size, settings.rounds)
    screen.print(
        f"sending {sum(sizes) + 1:,} requests to {settings.model}, at most {max(sizes):,} at a time; "
        "Ctrl-C stops"
    )
    progress = Progress(Screen(sys.stderr), len(sizes))
    found_out = asyncio.run(_send(settings, live, body, sizes, progress))
    progress.end()
    return found_out


async def _send(
    settings: TuneSettings, live: Live, body: Any, sizes: Sequence[int], progress: Progress
) -> Measured:
    holds_back = bool(live.settings.max_queue_delay_ms) or live.settings.policy != "eager"
    async with AsyncClient(settings.redis_url, prefix=settings.prefix) as client:
        return await calibrate(client, settings.model, body, sizes, holds_back=holds_back, step=progress.step)


# --- saying --------------------------------------------------------------------------------------------


def _show_measured(live: Live, found_out: Measured, world: World, max_size: int, screen: Screen) -> None:
    screen.title("Measured")
    for line in curve_rows(found_out):
        screen.print(f"  {line}")
    trip = f"{(world.out_us + world.back_us) / 1000:.3g} + {world.trip_slope_us / 1000:.3g} n ms"
    if found_out.trip is TRIP:
        trip = f"was not measured: {trip} is a guess"
    else:
        trip = f"takes {trip}, give or take {give_or_take(world.trip_spread):.1%}"
    screen.print(f"  give or take {give_or_take(world.spread):.1%}; its trip {trip}")
    screen.print(f"  {count(world.processes, 'process', 'processes')}")
    for note in notes(live, found_out, max_size):
        screen.print(f"  {note}")
    reasons = doubts(found_out)
    if reasons:
        _warn(reasons, screen)


def curve_rows(found_out: Measured) -> list[str]:
    """l(n) at the sizes that were seen, and not where it was guessed."""
    seen = [size for size, _ in found_out.seen]
    points = [point for point in found_out.curve if min(seen) <= point[0] <= max(seen)]
    points = points[:: -max(1, -(-len(points) // COLUMNS))][::-1]  # the largest in any case
    return table(
        [
            ("a batch of n =", *(f"{size:.0f}" for size, _ in points)),
            ("is computed in l(n), ms", *(f"{took_us / 1000:.3g}" for _, took_us in points)),
        ]
    )


def notes(live: Live, found_out: Measured, max_size: int) -> Iterator[str]:
    """What whoever reads the advice should know of how it was come by."""
    seen = [size for size, _ in found_out.seen]
    if min(seen) > 1 or max(seen) < KNOWN * max_size:
        sizes = " to ".join(map(str, sorted({min(seen), max(seen)})))
        yield f"(only batches of {sizes} were seen: other sizes are a guess)"
    line = found_out.line
    size, off = furthest_off(line, found_out.curve, min(max_size, max(seen)))
    if abs(off) > OFF and not line.known_to:
        law = f"{line.intercept_us / 1000:.3g} + {line.slope_us / 1000:.3g} n ms"
        yield (
            f"The batcher learns a line, {law}, which is {abs(off):.0%} too {'high' if off > 0 else 'low'} "
            f"at n = {size}: `deferred`,"
        )
        yield "and batches that leave just in time for a process, go by it."
    if live.settings.policy not in POLICIES:
        yield f"(the policy {live.settings.policy} is simulated as if it were eager)"


def _warn(reasons: Sequence[str], screen: Screen) -> None:
    """What was measured is a machine that has no time, or a Redis that is far away, and less the model."""
    screen.print("\n  WARNING: the advice below is doubtful.", style="bold")
    for reason in reasons:
        screen.print(f"  {reason}")
    screen.print(
        "  Redis, the batcher, each worker and each model process need a core whenever they wake up. See\n"
        "  with `uptime` and `top` who else wants the cores: stop that, or have more cores. A Redis that is\n"
        "  far away belongs nearer. Then measure again, with a larger --rounds."
    )


def _show(
    settings: TuneSettings, live: Live, found: Sequence[Figures], best: Figures, screen: Screen
) -> None:
    within = f"{settings.latency_ms:g} ms"
    if settings.rate is None:
        screen.title(f"The most requests/s of which 99% take {within} at most, simulated")
    else:
        screen.title(f"At {settings.rate:,.0f} requests/s, simulated")
    rows = [("", "requests/s", f"within {within}", "p50 ms", "p99 ms", "mean batch", "settings")]
    for one in found:
        changed = changes(one.candidate.settings, live.settings)
        words = " ".join(f"{name}={value}" for name, value in changed.items())
        mark = "*" if one is best else " "
        rows.append(
            (
                f"{mark} {one.candidate.kind}", f"{one.rate:,.0f}", f"{one.within:.1%}", _ms(one.p50_ms),
                _ms(one.p99_ms), f"{one.mean_batch:.1f}", words,
            )
        )  # fmt: skip
    words_of = [row[-1] for row in rows]
    for line, words in zip(table([row[:-1] for row in rows]), words_of, strict=True):
        screen.print(f"  {line}  {words}".rstrip())
    screen.print(
        "  * what changes least, of those that are as good as the first, give or take 2% (of p99 5%)"
    )
    changed = changes(best.candidate.settings, live.settings)
    if not best.rate or not best.within:
        screen.print(
            f"\nNo settings keep {within}: a lone request takes too long, or more processes are needed."
        )
    elif not changed:
        screen.print("\nThe present settings are as good as any of these.")
    else:
        pairs = " ".join(shlex.quote(f"{name}={value}") for name, value in changed.items())
        if "default_expiration_ms" in changed:
            screen.print(f"\nRequests that cannot be answered within {within} would be refused. To apply it:")
        else:
            screen.print("\nTo apply it:")
        screen.print(f"  carpool config {shlex.quote(settings.model)} {pairs}")


def _show_larger(
    settings: TuneSettings, goal: Goal, found_out: Measured, best: Figures, max_size: int, screen: Screen
) -> None:
    """Where batches larger than the largest promise more: a suggestion, of which nothing was measured."""
    promised = larger(goal, best, max_size, max(size for size, _ in found_out.seen))
    if promised is not None:
        screen.print(
            f"\nThe largest batch still pays: if l(n) goes on as it does, batches of {promised.size:,} would "
            f"serve {promised.gain:.0%} more\nrequests/s than those of {max_size:,}. That was not measured: "
            "try it if the model can take so many, and tune again:"
        )
        screen.print(f"  carpool config {shlex.quote(settings.model)} max_batch_size={promised.size}")


def _ms(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "-"


def _plot(
    settings: TuneSettings,
    goal: Goal,
    found_out: Measured,
    live: Live,
    best: Figures,
    max_size: int,
    screen: Screen,
) -> None:
    from carpool_cli.tuning.plot import plot  # noqa: PLC0415 (it is not always wanted)

    top = 1.15 * max(best.rate, settings.rate or 0.0, 1.0)
    rates = [top * (step + 1) / PLOTTED for step in range(PLOTTED)]
    shown = {"present settings": Candidate("as it is", live.settings)}
    if best.candidate.settings != live.settings:
        shown[f"best: {best.candidate.kind}"] = best.candidate
    try:
        import matplotlib as _  # noqa: F401, PLC0415

        curves = {label: [goal.try_at(one, rate) for rate in rates] for label, one in shown.items()}
        path = Path(settings.plot)
        plot(path, settings.model, settings.latency_ms, curves, found_out, max_size)
    except ImportError:
        screen.print("\nThere is no plot: it needs matplotlib (pip install 'carpool[plot]').")
    else:
        screen.print(f"\nThe plot is in {path}.")
