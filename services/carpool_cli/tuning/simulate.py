"""`carpool simulate`: how settings would perform, in virtual time, with the production scheduler.

With --record it simulates nothing, but records when requests of a live model arrive.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.keys import Keys
from carpool.model_settings import POLICIES, ModelSettings
from carpool.settings import ConnectionSettings, Milliseconds, read_settings
from carpool.shown import printable_json
from carpool.store.overrides import ConfigError, parse
from carpool.wire.report import BatcherReport
from carpool_batcher.core.learned.curve import Curve
from carpool_batcher.core.scheduler import Scheduler
from carpool_cli.config import Changes
from carpool_cli.screen import Progress, ProgressBar, Screen, build_table, count, table
from carpool_cli.tuning.arrivals import Recorded, Traffic, traffic, write_trace
from carpool_cli.tuning.calibrate import ROUND_TRIP_DEFAULT, measured
from carpool_cli.tuning.curve import line_through
from carpool_cli.tuning.fleet import (
    POLL_US,
    Fleet,
    FleetResult,
    FleetSimulation,
    depth,
    figures_of,
    fixed,
    pending,
    wanted,
)
from carpool_cli.tuning.live import UnavailableModelError, connected, read_live_model, record, run_command
from carpool_cli.tuning.observed import GUESSED_SHARE_MIN, ObservedSizes, observed_sizes
from carpool_cli.tuning.simulator import (
    Simulation,
    SimulationResult,
    World,
    has_transit,
    normal,
    with_transit,
)

INTERCEPT_MS, SLOPE_MS = 5.0, 0.05  # without --model
ROUND_TRIP_MS, ROUND_TRIP_SLOPE_MS = (
    ROUND_TRIP_DEFAULT.intercept_us / 1000,
    ROUND_TRIP_DEFAULT.slope_us / 1000,
)
RATE = 1000.0
PROGRESS_LINE_S: Final = 5.0  # between two lines of progress in a pipe or a file


class SimulateSettings(ConnectionSettings):
    """Try settings in virtual time, with the real scheduler and with simulated requests and model processes.

    Executing a batch of n requests takes intercept + slope * n; its round trip through Redis takes trip +
    trip-slope * n. `carpool tune` measures all four. With --model, the execution time, the settings, the
    number of processes and, as its batcher has learned it, the round trip are those of a live model, to which
    nothing is sent. KEY=VALUE overrides a setting, as in `carpool config`.

    goodput: the share of all requests that were answered OK within their deadline. late: requests that missed
    their deadline, or were refused because they could not meet it; a request without expiration is never
    late. refused: all other refusals, such as at a full queue. p50 and p99 are latencies of the requests
    answered in time.

    --scale compares fleets of workers that are scaled as Kubernetes does: by the workers that batchers want
    (docs/scaling.md), by the length of the queue for a target of 5 and of a batch, by batches in flight, and
    not at all. Each request counts that was late or refused, and each second of a worker, also while it
    starts. min_workers=, max_workers= and scale_...= are settings of the model.

      carpool simulate --rate 4000 --expiration-ms 50 policy=deferred max_batch_size=256
      carpool simulate --record trace.txt --model square --seconds 60
      carpool simulate --arrivals trace.txt --model square max_queue_delay_ms=5
      carpool simulate --scale --arrivals diurnal --rate 60 --expiration-ms 1000 --intercept-ms 100
    """

    model_config = SettingsConfigDict(cli_shortcuts={"as-json": "json"})

    change: CliPositionalArg[Changes] = Field(
        [], description="KEY=VALUE, any number of them; `carpool config MODEL` lists the keys"
    )
    rate: float | None = Field(None, gt=0, description="requests/s (default: 1000, or the recorded rate)")
    arrivals: str = Field(
        "poisson", description="poisson, bursty, diurnal, or a FILE with a time in seconds on each line"
    )
    period_s: float | None = Field(
        None, gt=0, description="mean duration of a phase (bursty, default: 0.5), or a day (diurnal: 3600)"
    )
    requests: int | None = Field(
        None, ge=1, le=100_000_000, description="number of requests (default: 100000, or as recorded)"
    )
    workers: int | None = Field(None, ge=1, le=100_000, description="model processes (default: 1)")
    intercept_ms: Milliseconds | None = Field(
        None, ge=0, description=f"execution time l(n) at n = 0 (default: {INTERCEPT_MS:g})"
    )
    slope_ms: Milliseconds | None = Field(
        None, ge=0, description=f"what each request of a batch adds to l(n) (default: {SLOPE_MS:g})"
    )
    trip_ms: Milliseconds = Field(
        ROUND_TRIP_MS, ge=0, description="round trip of a batch through Redis at n = 0"
    )
    trip_slope_ms: Milliseconds = Field(
        ROUND_TRIP_SLOPE_MS, ge=0, description="what each request of a batch adds to the round trip"
    )
    noise: float = Field(0.0, ge=0, le=1, description="relative standard deviation of the execution time")
    trip_noise: float = Field(0.0, ge=0, le=1, description="relative standard deviation of the round trip")
    expiration_ms: Milliseconds | None = Field(
        None, gt=0, description="expiration of requests (default: the model's)"
    )
    seed: int = Field(0, description="seed of the random numbers")
    model: str | None = Field(None, description="simulate this live model")
    record: Path | None = Field(
        None, description="simulate nothing; record when requests for --model arrive, in this file"
    )
    seconds: float = Field(10.0, gt=0, le=86_400, description="duration of the recording")
    as_json: bool = Field(False, description="print one JSON object")
    scale: bool = Field(False, description="compare fleets of workers that are started and stopped")
    start_s: float = Field(30.0, ge=0, le=86_400, description="with --scale: how long a worker starts")
    poll_s: float = Field(
        POLL_US / 1e6, ge=0.1, le=3600, description="with --scale: how often an autoscaler looks"
    )

    @property
    def has_trip(self) -> bool:
        """Whether anything about the round trip was given."""
        return not {"trip_ms", "trip_slope_ms", "trip_noise"}.isdisjoint(self.model_fields_set)


def main(argv: Sequence[str]) -> int:
    """Simulate or record, and return the exit status: see `run_command`."""
    settings = read_settings(SimulateSettings, argv, "carpool simulate")
    path = settings.record
    return run_command("simulate", lambda: _simulate(settings) if path is None else _record(settings, path))


# --- recording ---------------------------------------------------------------------------------------------


def _record(settings: SimulateSettings, path: Path) -> None:
    if settings.model is None:
        raise ConfigError("--record needs --model, the model whose arrivals are recorded")
    with connected(settings, "simulate") as link:
        read_live_model(link, settings.prefix, settings.model)
        progress = RecordingProgress(Screen(sys.stderr), settings.model, settings.seconds)
        keys = Keys(settings.model, settings.prefix)
        recording = record(link, keys, settings.seconds, progress.update)
        progress.end()
    if not recording.times_us:
        raise UnavailableModelError(
            f"no request for {settings.model} was dispatched within {settings.seconds:g} s, so nothing was "
            "written"
        )
    write_trace(
        path, recording.times_us, f"arrivals of requests for {settings.model}, in seconds after the first"
    )
    print(f"wrote {count(len(recording.times_us), 'arrival')} to {path}")
    if recording.missed:
        print(
            f"carpool simulate: {recording.missed:,} batches are not in the recording: they were deleted "
            "before they could be read",
            file=sys.stderr,
        )


class RecordingProgress:
    """The progress of a recording: a bar on a terminal, elsewhere a line every few seconds."""

    def __init__(self, screen: Screen, model: str, seconds: float) -> None:
        self._screen = screen
        self._bar = ProgressBar(screen, seconds)
        self._seconds = seconds
        self._next_line_s = PROGRESS_LINE_S
        screen.print(f"recording the arrivals of {model} for {seconds:g} s")

    def update(self, passed_s: float, arrivals: int) -> None:
        """Show the number of arrivals so far."""
        if not self._screen.live and passed_s < self._next_line_s:
            return
        text = f"{passed_s:.0f} of {self._seconds:g} s, {count(arrivals, 'arrival')}"
        if self._screen.live:
            self._bar.draw(passed_s, text)
        else:
            self._screen.print(f"  {text}")
            self._next_line_s = PROGRESS_LINE_S * (passed_s // PROGRESS_LINE_S + 1)

    def end(self) -> None:
        """Remove the bar."""
        self._bar.remove()


# --- simulating --------------------------------------------------------------------------------------------


def _simulate(settings: SimulateSettings) -> None:
    model, world, observed, report = _subject(settings)
    arrivals = traffic(settings.arrivals, settings.period_s)
    rate, requests = settings.rate or RATE, settings.requests or 100_000
    if isinstance(arrivals, Recorded):
        rate, requests = settings.rate or arrivals.per_s, settings.requests or len(arrivals)
    expiration_us = _expiration_us(settings, model)
    if settings.scale:
        load = _Load(arrivals, rate, requests, expiration_us)
        _compare_fleets(settings, model, world, load)
        return
    progress = Progress(Screen(sys.stderr), requests, "requests")
    scheduler = Scheduler(model, world.processes)
    simulation = Simulation(scheduler, world, settings.seed, progress.step, in_order=model.preserve_ordering)
    result = simulation.run(arrivals(rate, requests, settings.seed, expiration_us))
    progress.end()
    if settings.as_json:
        print(printable_json(figures(result, model, observed)))
        return
    screen = Screen()
    show(result, model, world, observed, screen)
    if settings.model is not None:
        for line in guesses(settings, result, observed):
            screen.print(f"\n  {line}")
        screen.print(f"\n  {round_trip(settings, report)}")


class _Load(NamedTuple):
    """The requests of each fleet, which are the same ones."""

    arrivals: Traffic
    per_s: float
    requests: int
    expiration_us: int | None


_FLEET_HEADINGS: Final = (
    "workers", "mean", "most", "worker-seconds", "missed", "p50", "p99", "changes up", "down",
)  # fmt: skip


def _compare_fleets(settings: SimulateSettings, model: ModelSettings, world: World, load: _Load) -> None:
    """Simulate each fleet; the fixed ones have as many workers as the one that is scaled by `wanted` had on
    average, and at most."""
    scaled = [wanted(), depth(5), depth(model.max_batch_size), pending(5), pending(1)]
    progress = Progress(Screen(sys.stderr), (len(scaled) + 2) * load.requests, "requests")

    def simulated(fleet: Fleet) -> FleetResult:
        simulation = FleetSimulation(
            fleet,
            model,
            world,
            start_us=int(settings.start_s * 1e6),
            poll_us=int(settings.poll_s * 1e6),
            seed=settings.seed,
            on_progress=progress.step,
        )
        return simulation.run_fleet(
            load.arrivals(load.per_s, load.requests, settings.seed, load.expiration_us)
        )

    outcomes = [(fleet, simulated(fleet)) for fleet in scaled]
    ours = outcomes[0][1]
    numbers = sorted({max(1, round(ours.workers_mean)), ours.workers_max})
    outcomes += [(fleet, simulated(fleet)) for fleet in map(fixed, numbers)]
    progress.end()
    found = [figures_of(fleet, outcome) for fleet, outcome in outcomes]
    if settings.as_json:
        print(printable_json({"fleets": found}))
        return
    screen = Screen()
    duration_s = ours.result.arrivals_us / 1e6
    screen.print(
        f"{load.requests:,} requests in {duration_s:,.0f} s, a worker starts in {settings.start_s:g} s",
        style="bold",
    )
    screen.console.print(build_table([_FLEET_HEADINGS, *map(_fleet_row, found)]))


def _fleet_row(found: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        found["fleet"],
        f"{found['workers_mean']:.1f}",
        f"{found['workers_max']:,}",
        f"{found['worker_s']:,}",
        f"{found['missed']:.2%}",
        f"{found['p50_ms']:,.0f} ms",
        f"{found['p99_ms']:,.0f} ms",
        f"{found['ups']:,}",
        f"{found['downs']:,}",
    )


class _Subject(NamedTuple):
    """What is simulated. `observed`: the sizes at which l(n) was observed; None if it was given. `report`:
    the one that the round trip is from; None if there is none, or it was given."""

    model: ModelSettings
    world: World
    observed: ObservedSizes | None
    report: BatcherReport | None


def _subject(settings: SimulateSettings) -> _Subject:
    """Flags and KEY=VALUE override what a live model has."""
    overrides, removed = parse(settings.change)
    present: dict[str, str] = {}
    processes, intercept_ms, slope_ms = 1, INTERCEPT_MS, SLOPE_MS
    curve: Curve | None = None
    observed: ObservedSizes | None = None
    report: BatcherReport | None = None
    is_given = settings.intercept_ms is not None and settings.slope_ms is not None
    if settings.model is not None:
        with connected(settings, "simulate") as link:
            live = read_live_model(link, settings.prefix, settings.model)
        present, processes, report = live.settings.as_text(), max(1, live.processes), live.report
        if live.observed and not is_given:
            observed = observed_sizes(live.observed)
            measurement = measured(live.observed)
            line = line_through(measurement.curve)
            intercept_ms, slope_ms = line.intercept_us / 1000, line.slope_us / 1000
            curve = measurement.curve if settings.intercept_ms is settings.slope_ms is None else None
        elif not is_given:
            raise UnavailableModelError(
                f"{settings.model} has no recently settled batches, so its execution time is not known: pass "
                "--intercept-ms and --slope-ms"
            )
    try:
        kept = {name: value for name, value in present.items() if name not in removed}
        model = ModelSettings.from_mapping({**kept, **overrides})
        if "preferred_batch_sizes" in overrides:
            model.check_sizes()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if model.policy not in POLICIES:
        raise ConfigError(f"policy: {model.policy!r:.80} cannot be simulated; {' and '.join(POLICIES)} can")
    round_trip_us = int(settings.trip_ms * 1000)
    world = World(
        settings.workers or processes,
        1000 * (intercept_ms if settings.intercept_ms is None else settings.intercept_ms),
        1000 * (slope_ms if settings.slope_ms is None else settings.slope_ms),
        round_trip_us // 2,
        round_trip_us - round_trip_us // 2,
        1000 * settings.trip_slope_ms,
        normal(settings.noise),
        normal(settings.trip_noise),
        curve=curve,
    )
    if settings.has_trip or not has_transit(report):
        return _Subject(model, world, observed, None)
    return _Subject(model, with_transit(world, report), observed, report)


def _expiration_us(settings: SimulateSettings, model: ModelSettings) -> int | None:
    expiration_ms = settings.expiration_ms or model.default_expiration_ms
    return None if expiration_ms is None else int(1000 * expiration_ms)


# --- printing ----------------------------------------------------------------------------------------------


def figures(result: SimulationResult, model: ModelSettings, observed: ObservedSizes | None) -> dict[str, Any]:
    """The result as a JSON object. The last two are null unless l(n) was observed."""
    target_ms = model.target_latency_ms
    return {
        "requests": result.requests,
        "offered_per_s": round(result.offered_per_s, 3),
        "served_per_s": round(result.served_per_s, 3),
        "goodput": round(result.good / max(1, result.requests), 6),
        "late": result.late,
        "refused": result.refused,
        "within_target": None if target_ms is None else round(result.share_within(target_ms), 6),
        "p50_ms": result.latency_ms(0.5),
        "p99_ms": result.latency_ms(0.99),
        "mean_batch": round(result.mean_batch, 3),
        "batches": len(result.batch_sizes),
        "reasons": result.reasons,
        "observed": observed and observed._asdict(),
        "guessed_batches": observed and round(observed.guessed_share(result.batch_sizes), 6),
    }


def show(
    result: SimulationResult,
    model: ModelSettings,
    world: World,
    observed: ObservedSizes | None,
    screen: Screen,
) -> None:
    """Print the result as a table."""
    processes = count(world.processes, "process", "processes")
    size = model.max_batch_size
    screen.print(
        f"policy {model.policy}, batches of up to {size}, {processes}, {execution(world, size, observed)}",
        style="bold",
    )
    found = figures(result, model, observed)
    batches = max(1, len(result.batch_sizes))
    reasons = sorted(result.reasons.items(), key=lambda reason_and_batches: -reason_and_batches[1])
    rows = [
        ("requests", f"{result.requests:,}"),
        ("requests/s offered", f"{result.offered_per_s:,.0f}"),
        ("requests/s served", f"{result.served_per_s:,.0f}"),
        ("goodput", f"{found['goodput']:.2%}"),
        ("late", f"{result.late:,}"),
        ("refused", f"{result.refused:,}"),
        ("p50", f"{found['p50_ms']:.2f} ms"),
        ("p99", f"{found['p99_ms']:.2f} ms"),
        ("mean batch", f"{result.mean_batch:.1f}"),
        *((f"dispatched: {reason}", f"{number / batches:.1%}") for reason, number in reasons),
    ]
    if model.target_latency_ms is not None:
        rows.insert(6, (f"within {model.target_latency_ms:g} ms", f"{found['within_target']:.2%}"))
    for line in table(rows):
        screen.print(f"  {line}")


def execution(world: World, max_size: int, observed: ObservedSizes | None) -> str:
    """l(n) as text: the line that was given, or the times of a model, of which some are a guess."""
    if observed is None or world.curve is None:
        return f"execution of n takes {world.intercept_us / 1000:.4g} + {world.slope_us / 1000:.4g} n ms"
    ends = (observed.smallest, min(observed.largest, max_size))
    measured_ms, guessed_ms = (
        ", ".join(f"l({size}) = {world.execution_us(size) / 1000:.3g} ms" for size in sorted(sizes))
        for sizes in (
            set(filter(observed.covers, ends)),
            {size for size in (1, max_size) if not observed.covers(size)},
        )
    )
    parts = [measured_ms and f"measured {measured_ms}", guessed_ms and f"guessed {guessed_ms}"]
    return ", ".join(filter(None, parts))


def guesses(
    settings: SimulateSettings, result: SimulationResult, observed: ObservedSizes | None
) -> Iterator[str]:
    """What was not measured of a live model, and how to measure it."""
    if observed is not None:
        share = observed.guessed_share(result.batch_sizes)
        if share >= GUESSED_SHARE_MIN:
            yield (
                f"WARNING: {share:.0%} of the simulated batches have sizes that were not observed, so these "
                f"figures are a guess.\n  Only {observed} were observed; `carpool tune {settings.model} BODY "
                "--latency-ms MS` measures all sizes."
            )


def round_trip(settings: SimulateSettings, report: BatcherReport | None) -> str:
    """Where the round trip of a live model is from."""
    if report is not None:
        usual_ms, at_most_ms, in_ms = (us / 1000 for us in (*report.transit_us, report.delays_us[0]))
        return (
            f"The round trip is as its batcher saw it: {usual_ms:.1f} ms for half of the latest batches, up "
            f"to {at_most_ms:.1f} ms for nine of ten; it read requests {in_ms:.1f} ms after their arrival."
        )
    origin = "given as" if settings.has_trip else "not known, but assumed to be"
    hint = "" if settings.has_trip else ": see --trip-ms and --trip-slope-ms"
    line = f"{settings.trip_ms:g} + {settings.trip_slope_ms:g} n ms"
    return f"The round trip of n requests is {origin} {line}{hint}."
