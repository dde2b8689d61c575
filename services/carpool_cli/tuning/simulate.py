"""`carpool simulate`: what settings would come to, in virtual time, with the production scheduler."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.keys import Keys
from carpool.model_settings import POLICIES, ModelSettings
from carpool.settings import ProducerSettings, read_settings
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.config import Changes, ConfigError, parse
from carpool_cli.screen import Progress, ProgressBar, Screen, count, table
from carpool_cli.tuning.arrivals import Recorded, traffic, write_trace
from carpool_cli.tuning.calibrate import TRIP, measured
from carpool_cli.tuning.curve import Curve
from carpool_cli.tuning.live import NotServedError, exit_status, linked, look, record
from carpool_cli.tuning.simulator import Outcome, Simulation, World, normal

INTERCEPT_MS, SLOPE_MS = 5.0, 0.05  # where no model says otherwise
TRIP_MS, TRIP_SLOPE_MS = TRIP.intercept_us / 1000, TRIP.slope_us / 1000
RATE = 1000.0
TELL_S: Final = 5.0  # in a pipe or a file, a line in so many seconds


class SimulateSettings(ProducerSettings):
    """Try settings in virtual time: the production scheduler, made-up requests and model processes.

    A batch of n is computed in intercept + slope n, and on its way for trip + trip slope n; `carpool tune`
    measures all four. With --model the first two, the settings and the number of processes are those of a
    model that is being served; nothing is sent to it. KEY=VALUE says another setting, as in `carpool config`.

    goodput: the share of all requests that were answered, and before their deadline. late: those that passed
    it; a request that does not expire is never late, however long it takes. refused: those that found the
    queue full, or could not have been in time. p50 and p99 are of those answered in time.

      carpool simulate --rate 4000 --expiration-ms 50 policy=deferred max_batch_size=256
      carpool simulate --record trace.txt --model square --seconds 60
      carpool simulate --arrivals trace.txt --model square max_queue_delay_ms=5
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    change: CliPositionalArg[Changes] = Field(
        [], description="KEY=VALUE, as many as you like; `carpool config MODEL` lists them"
    )
    rate: float | None = Field(None, gt=0, description="requests/s (default: 1000, or as they were recorded)")
    arrivals: str = Field("poisson", description="poisson, bursty, or a FILE with a time in seconds a line")
    requests: int | None = Field(
        None, ge=1, le=100_000_000, description="how many (default: 100000, or as many as were recorded)"
    )
    workers: int | None = Field(None, ge=1, le=100_000, description="model processes (default: 1)")
    intercept_ms: float | None = Field(None, ge=0, description=f"l(0) (default: {INTERCEPT_MS:g})")
    slope_ms: float | None = Field(None, ge=0, description=f"l(n + 1) - l(n) (default: {SLOPE_MS:g})")
    trip_ms: float = Field(TRIP_MS, ge=0, description="the way to the model and back, of a batch of none")
    trip_slope_ms: float = Field(TRIP_SLOPE_MS, ge=0, description="what each request of a batch adds to it")
    noise: float = Field(0.0, ge=0, le=1, description="how much a batch's time varies, as a share of it")
    trip_noise: float = Field(0.0, ge=0, le=1, description="how much its trip varies, as a share of it")
    expiration_ms: float | None = Field(None, gt=0, description="when requests expire (default: the model's)")
    seed: int = Field(0, description="of what is chance")
    model: str | None = Field(None, description="a model that is being served, instead of a made-up one")
    record: Path | None = Field(None, description="write --model's arrivals into this file, and do no more")
    seconds: float = Field(10.0, gt=0, le=86_400, description="how long to record")
    as_json: bool = Field(False, description="an object, for a program")


def main(argv: Sequence[str]) -> int:
    """Simulate, or record. 1 if Redis cannot be asked, 2 if what was asked for makes no sense."""
    settings = read_settings(SimulateSettings, argv, "carpool simulate")
    path = settings.record
    return exit_status("simulate", lambda: _simulate(settings) if path is None else _record(settings, path))


def _record(settings: SimulateSettings, path: Path) -> None:
    if settings.model is None:
        raise ConfigError("--record: say with --model whose arrivals")
    with linked(settings, "simulate") as link:
        look(link, settings.prefix, settings.model)
        watch = Watch(Screen(sys.stderr), settings.model, settings.seconds)
        recording = record(link, Keys(settings.model, settings.prefix), settings.seconds, watch.step)
        watch.end()
    if not recording.times_us:
        raise NotServedError(f"nothing arrived at {settings.model} within {settings.seconds:g} s")
    write_trace(path, recording.times_us, f"requests of {settings.model}, in seconds from the first")
    print(f"{count(len(recording.times_us), 'arrival')} in {path}")
    if recording.missed:
        print(f"carpool simulate: {recording.missed:,} batches went by unseen", file=sys.stderr)


class Watch:
    """Says how far a recording is: a line at first and now and then, or a bar on a terminal."""

    def __init__(self, screen: Screen, model: str, seconds: float) -> None:
        self._screen = screen
        self._bar = ProgressBar(screen, seconds)
        self._seconds = seconds
        self._due_s = TELL_S
        screen.print(f"recording what arrives at {model} for {seconds:g} s")

    def step(self, passed_s: float, arrivals: int) -> None:
        """So many have arrived until now."""
        if not self._screen.live and passed_s < self._due_s:
            return
        text = f"{passed_s:.0f} of {self._seconds:g} s, {count(arrivals, 'arrival')}"
        if self._screen.live:
            self._bar.draw(passed_s, text)
        else:
            self._screen.print(f"  {text}")
            self._due_s = TELL_S * (passed_s // TELL_S + 1)

    def end(self) -> None:
        """Make room for what came of it."""
        self._bar.remove()


# --- simulating --------------------------------------------------------------------------------------------


def _simulate(settings: SimulateSettings) -> None:
    model, world = _around(settings)
    arrives = traffic(settings.arrivals)
    rate, requests = settings.rate or RATE, settings.requests or 100_000
    if isinstance(arrives, Recorded):
        rate, requests = settings.rate or arrives.per_s, settings.requests or len(arrives)
    errors = Screen(sys.stderr)
    progress = Progress(errors, requests)
    expiration_us = _expiration_us(settings, model)
    scheduler = Scheduler(model, world.processes)
    simulation = Simulation(scheduler, world, settings.seed, progress.step, in_order=model.preserve_ordering)
    outcome = simulation.run(arrives(rate, requests, settings.seed, expiration_us))
    progress.end()
    if settings.as_json:
        print(json.dumps(figures(outcome, model)))
    else:
        show(outcome, model, world, Screen())


def _around(settings: SimulateSettings) -> tuple[ModelSettings, World]:
    """Settings and world: a live model's, where one is named; what was said goes before."""
    values, back = parse(settings.change)
    declared: dict[str, str] = {}
    processes, intercept_ms, slope_ms = 1, INTERCEPT_MS, SLOPE_MS
    curve: Curve | None = None
    if settings.model is not None:
        with linked(settings, "simulate") as link:
            live = look(link, settings.prefix, settings.model)
        declared, processes = live.settings.as_text(), max(1, live.processes)
        if live.seen:
            found_out = measured(live.seen)
            intercept_ms, slope_ms = found_out.line.intercept_us / 1000, found_out.line.slope_us / 1000
            curve = found_out.curve if settings.intercept_ms is settings.slope_ms is None else None
        elif settings.intercept_ms is None or settings.slope_ms is None:
            raise NotServedError(
                f"{settings.model} has settled no batch of late, so nobody knows how long one takes: say "
                "--intercept-ms and --slope-ms"
            )
    try:
        kept = {name: value for name, value in declared.items() if name not in back}
        model = ModelSettings.from_mapping({**kept, **values})
        if "preferred_batch_sizes" in values:
            model.check_sizes()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if model.policy not in POLICIES:
        raise ConfigError(
            f"policy: {model.policy!r:.80} is not simulated; there are {' and '.join(POLICIES)}"
        )
    trip_us = int(settings.trip_ms * 1000)
    return model, World(
        settings.workers or processes,
        1000 * (intercept_ms if settings.intercept_ms is None else settings.intercept_ms),
        1000 * (slope_ms if settings.slope_ms is None else settings.slope_ms),
        trip_us // 2,
        trip_us - trip_us // 2,
        1000 * settings.trip_slope_ms,
        normal(settings.noise),
        normal(settings.trip_noise),
        curve=curve,
    )


def _expiration_us(settings: SimulateSettings, model: ModelSettings) -> int | None:
    expiration_ms = settings.expiration_ms or model.default_expiration_ms
    return None if expiration_ms is None else int(1000 * expiration_ms)


# --- what came of it ---------------------------------------------------------------------------------------


def figures(outcome: Outcome, model: ModelSettings) -> dict[str, Any]:
    """What came of a trace, for a program."""
    aims_ms = model.target_latency_ms
    return {
        "requests": outcome.requests,
        "offered_per_s": round(outcome.offered_per_s, 3),
        "served_per_s": round(outcome.served_per_s, 3),
        "goodput": round(outcome.good / max(1, outcome.requests), 6),
        "late": outcome.late,
        "refused": outcome.refused,
        "within_target": None if aims_ms is None else round(outcome.share_within(aims_ms), 6),
        "p50_ms": outcome.latency_ms(0.5),
        "p99_ms": outcome.latency_ms(0.99),
        "mean_batch": round(outcome.mean_batch, 3),
        "batches": len(outcome.sizes),
        "reasons": outcome.reasons,
    }


def show(outcome: Outcome, model: ModelSettings, world: World, screen: Screen) -> None:
    """The same for a person."""
    who = count(world.processes, "process", "processes")
    head = (
        f"{model.policy}, up to {model.max_batch_size} in a batch, {who}, {law(world, model.max_batch_size)}"
    )
    screen.print(head, style="bold")
    found = figures(outcome, model)
    batches = max(1, len(outcome.sizes))
    reasons = sorted(outcome.reasons.items(), key=lambda one: -one[1])
    rows = [
        ("requests", f"{outcome.requests:,}"),
        ("requests/s offered", f"{outcome.offered_per_s:,.0f}"),
        ("requests/s served", f"{outcome.served_per_s:,.0f}"),
        ("goodput", f"{found['goodput']:.2%}"),
        ("late", f"{outcome.late:,}"),
        ("refused", f"{outcome.refused:,}"),
        ("p50", f"{found['p50_ms']:.2f} ms"),
        ("p99", f"{found['p99_ms']:.2f} ms"),
        ("mean batch", f"{outcome.mean_batch:.1f}"),
        *((f"left: {reason}", f"{number / batches:.1%}") for reason, number in reasons),
    ]
    if model.target_latency_ms is not None:
        rows.insert(6, (f"within {model.target_latency_ms:g} ms", f"{found['within_target']:.2%}"))
    for line in table(rows):
        screen.print(f"  {line}")


def law(world: World, max_size: int) -> str:
    """l(n) in words."""
    if world.curve is None:
        return f"l(n) = {world.intercept_us / 1000:.4g} + {world.slope_us / 1000:.4g} n ms"
    sizes = sorted({1, max_size})
    times = ", ".join(f"l({size}) = {world.takes_us(size) / 1000:.3g} ms" for size in sizes)
    return f"as measured: {times}"
