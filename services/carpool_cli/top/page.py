"""The page of `carpool top`: a table of models, one of stepping models, then details of each.

Pure: figures in, a renderable out.

The page fits itself into the console that draws it. A narrow one gets fewer columns of the table, a low one
fewer lines; in a pipe or a file it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from carpool.figures import Figures, Memory, Requests, SequenceFigures, Stepping
from carpool.shown import printable
from carpool.wire.detail import ModelDetail
from carpool_cli.models import describe_version
from carpool_cli.screen import build_table, clip, count, duration, size
from carpool_cli.top.detail import detail_parts

NAME_COLUMNS: Final = 28  # of a model's name in the table of a terminal; the details show all of it
_DETAIL_COLUMNS: Final = 110  # where details wrap in a pipe or a file
_UNLIMITED_COLUMNS: Final = 100_000

_HEADINGS: Final = (
    "model", "waiting", "oldest", "in flight", "processes", "requests/s", "fill", "p50", "p99",
)  # fmt: skip
_STEPPING_HEADINGS: Final = (
    "stepping model", "waiting", "oldest", "slots", "prefetched", "processes", "requests/s", "chunks/s",
    "first p50", "first p99", "gap p50", "gap p99",
)  # fmt: skip
# The columns to be dropped where a table is too wide, the first one first.
_DISPENSABLE: Final = ("p50", "fill", "in flight", "processes", "oldest", "p99")
_STEPPING_DISPENSABLE: Final = (
    "processes", "prefetched", "first p50", "gap p50", "oldest", "requests/s", "gap p99", "first p99",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Page:
    """The page as a rich renderable. `error`: why Redis does not answer now, if it does not. `warning`: what
    is wrong with its configuration. `detail`: of the only model, if that is to be shown; None while no
    batcher publishes it."""

    url: str
    models: Sequence[Figures]
    error: str = ""
    warning: str = ""
    detail: ModelDetail | None = None
    has_detail: bool = False  # one model is shown, with its detail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(
            Group(*self._parts(console, options)), options.update(height=None), pad=False
        )
        height = options.height
        if height is not None and len(lines) > height:
            hidden = _line(f"... {len(lines) - height + 1} more lines; --model NAME shows one model alone")
            lines[max(0, height - 1) :] = console.render_lines(hidden, options.update(height=None), pad=False)
            del lines[height:]
        for line in lines:
            yield from line
            yield Segment.line()

    def _parts(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        yield _line(f"carpool top  {self.url}  {count(len(self.models), 'model')}")
        yield _line(
            f"Redis does not answer, so these figures are old. Reason: {self.error}" if self.error else ""
        )
        if self.warning:
            yield Text(f"{printable(self.warning)}\n")
        if not self.models:
            yield _line("no model is registered; `carpool up square` serves one")
            return
        yield from self._tables(console, options)
        for model in self.models:
            yield ""
            yield _line(model.model)
            yield _details(model, options)
        if self.has_detail:
            yield from detail_parts(self.detail)

    def _tables(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        is_terminal = options.is_terminal
        name_columns = min(NAME_COLUMNS, options.max_width // 3) if is_terminal else _UNLIMITED_COLUMNS
        rows = [_row(model, name_columns) for model in self.models if model.stepping is None]
        if rows:
            yield _table([_HEADINGS, *rows], _DISPENSABLE, console, options)
        stepping = [_stepping_row(*each, name_columns) for each in _stepping_models(self.models)]
        if rows and stepping:
            yield ""
        if stepping:
            yield _table([_STEPPING_HEADINGS, *stepping], _STEPPING_DISPENSABLE, console, options)


def _stepping_models(models: Sequence[Figures]) -> Iterator[tuple[Figures, Stepping]]:
    for model in models:
        if model.stepping is not None:
            yield model, model.stepping


def _line(text: str) -> Text:
    return Text(printable(text), no_wrap=True, overflow="ellipsis")


# --- the table ---------------------------------------------------------------------------------------------


def _table(
    rows: Sequence[tuple[str, ...]], dispensable: Sequence[str], console: Console, options: ConsoleOptions
) -> Table:
    """All columns that fit. The first row has the headings."""
    columns = dict(zip(rows[0], zip(*rows, strict=True), strict=True))
    for name in ("", *dispensable):
        columns.pop(name, None)
        table = build_table(list(zip(*columns.values(), strict=True)))
        unlimited = options.update(width=_UNLIMITED_COLUMNS)
        if Measurement.get(console, unlimited, table).maximum <= options.max_width:
            break
    return table


def _row(model: Figures, name_columns: int) -> tuple[str, ...]:
    """The cells below `_HEADINGS`."""
    in_flight = f"{model.batches_in_flight:,}"
    if model.requests_in_flight is not None:
        in_flight += f" ({model.requests_in_flight:,})"
    return (
        clip(model.model, name_columns),
        f"{model.waiting:,}",
        _age(model.oldest_s),
        in_flight,
        _processes(model),
        _rate(model.requests_per_s) if model.batcher else "no batcher",
        "-" if model.fill is None else f"{model.fill:.0%}",
        _time(model.p50_ms),
        _time(model.p99_ms),
    )


def _stepping_row(model: Figures, stepping: Stepping, name_columns: int) -> tuple[str, ...]:
    """The cells below `_STEPPING_HEADINGS`."""
    return (
        clip(model.model, name_columns),
        f"{model.waiting:,}",
        _age(model.oldest_s),
        f"{stepping.slots_in_use:,} of {stepping.slots:,}",
        f"{stepping.prefetched:,}",
        _processes(model),
        _rate(model.requests_per_s),
        _rate(stepping.chunks_per_s),
        _time(stepping.first_chunk_p50_ms),
        _time(stepping.first_chunk_p99_ms),
        _time(stepping.chunk_gap_p50_ms),
        _time(stepping.chunk_gap_p99_ms),
    )


def _processes(model: Figures) -> str:
    alive = f"{model.model_processes:,}" if model.model_processes else ""
    return ", ".join(filter(None, [alive, "loading" if model.loading else ""])) or "none"


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _time(time_ms: float | None) -> str:
    return "-" if time_ms is None else duration(time_ms / 1000)


# --- the details -------------------------------------------------------------------------------------------


def _details(model: Figures, options: ConsoleOptions) -> Table:
    """What is missing, what was done, what was learned, and which requests failed."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    columns = options.max_width if options.is_terminal else min(options.max_width, _DETAIL_COLUMNS)
    grid.width = columns
    for label, parts in _labelled(model):
        grid.add_row(f"  {label}", Columns([Text(printable(part)) for part in parts], padding=(0, 2, 0, 0)))
    return grid


def _labelled(model: Figures) -> Iterator[tuple[str, Sequence[str]]]:
    if model.paused is not None:
        yield "paused", [model.paused.describe()]
    if model.model_processes or not model.loading:
        yield from _missing(model)
    else:  # no batcher serves a model before a worker has registered it
        yield "workers", ["one is loading the model: requests wait until it has"]
    if model.rejected_settings:
        yield "settings", [f"rejected: {model.rejected_settings}"]
    if model.stepping is None:
        yield from _of_batches(model)
    else:
        yield from _of_steps(model, model.stepping)
    if model.sequences is not None:
        yield "sequences", _sequences(model.sequences)
    if model.memory is not None:
        yield "memory", _memory(model.memory)
    if model.wanted is not None:
        yield "wanted", [f"{count(model.wanted.workers, 'worker')} ({model.wanted.reason})"]
    if model.refused:
        yield "refused requests", [_requests(reason, number) for reason, number in model.refused.items()]
    if model.failed:
        yield "failed requests", [_requests(status, number) for status, number in model.failed.items()]
    if model.last_error_s is not None:
        yield "last error", [f"{model.last_error}, {duration(model.last_error_s)} ago"]
    yield from _further(model)


def _further(model: Figures) -> Iterator[tuple[str, Sequence[str]]]:
    """Versions side by side, dead letters, and deadlines."""
    if len(model.versions) > 1:
        yield "versions", [f"{one}: {describe_version(of)}" for one, of in sorted(model.versions.items())]
    if model.dead:
        yield "dead letters", [f"{model.dead:,}; `carpool dead list` shows them"]
    if model.missed:
        causes = model.missed.items()
        yield "missed deadlines", [_requests(cause.replace("_", " "), number) for cause, number in causes]


def _missing(model: Figures) -> Iterator[tuple[str, Sequence[str]]]:
    """A missing batcher, missing model processes, and how often processes died."""
    if not model.batcher:
        yield "batcher", ["none is active: nothing is dispatched until `carpool batcher` runs"]
    elif model.over_s is None:
        yield "batcher", ["one is active, but its report is missing or of another version"]
    if not model.model_processes:
        yield "workers", ["no model process is alive: start a worker with `carpool worker`"]
    if model.process_deaths:
        times = count(model.process_deaths, "time")
        yield "model processes", [f"died {times} in the last minute; the log of their worker says why"]


def _of_batches(model: Figures) -> Iterator[tuple[str, Sequence[str]]]:
    if model.policy:
        remark = ", not that of the settings" if model.rejected_settings else ""
        yield "policy", [f"{model.policy}{remark}"]
    if model.over_s is not None:
        yield "dispatch reasons", _reasons(model)
    if model.withheld:
        yield "withheld results", [f"{model.withheld:,}, until the results before them are delivered"]
    if model.learned:
        yield "latency model", _latency_model(model.learned)


def _of_steps(model: Figures, stepping: Stepping) -> Iterator[tuple[str, Sequence[str]]]:
    chunks = f"{stepping.chunks:,} since this batcher became active"
    is_recent = stepping.first_chunk_p50_ms is not None
    yield "chunks", [chunks if is_recent else f"{chunks}; no stream ended in the last 10 to 20 s"]
    if model.p50_ms is not None:
        yield "whole outputs", [f"p50 {_time(model.p50_ms)}", f"p99 {_time(model.p99_ms)}"]


def _memory(memory: Memory) -> list[str]:
    shown = [size(memory.total)]
    if memory.largest < memory.total:  # of several processes
        shown = [f"{size(memory.largest)} in the largest process", f"{size(memory.total)} in all"]
    return [*shown, *([f"{size(memory.on_gpus)} of GPUs"] if memory.on_gpus else [])]


def _sequences(sequences: SequenceFigures) -> list[str]:
    return [
        f"{sequences.kept:,} kept",
        *([f"{sequences.slots:,} slots"] if sequences.slots is not None else []),
        *([f"{sequences.waiting_to_start:,} wait to start"] if sequences.waiting_to_start else []),
        _requests("started", sequences.started),
        _requests("ended", sequences.ended),
        _requests("broken", sequences.broken),
    ]


def _reasons(model: Figures) -> list[str]:
    if not model.reasons:
        return [f"no batch in {duration(model.over_s or 0)}"]
    shares = [f"{reason} {share:.0%}" for reason, share in model.reasons.items()]
    return [*shares, f"of {_rate(model.batches_per_s)} batches/s"]


def _latency_model(learned_ms: Mapping[int, float]) -> list[str]:
    times = [f"l({size}) = {duration(time_ms / 1000)}" for size, time_ms in learned_ms.items()]
    return times if len(times) > 1 else [f"{times[0]}; no other batch size was seen"]


def _requests(reason: str, requests: Requests) -> str:
    rate = f" ({_rate(requests.per_s)}/s)" if requests.per_s else ""
    return f"{requests.total:,} {reason}{rate}"


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.2g}"
