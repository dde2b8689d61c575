"""The detail of one model on the page of `carpool top`: lanes, tenants, priorities, latest batches, errors.

Pure: what a batcher tells in, renderables out. Names that producers chose are escaped where cells are made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from rich.console import RenderableType
from rich.text import Text

from carpool.shown import printable
from carpool.wire.detail import (
    BatchDetail,
    ErrorDetail,
    LaneDetail,
    ModelDetail,
    PriorityDetail,
    TenantDetail,
)
from carpool_cli.screen import build_table, clip, count, duration

NAME_COLUMNS: Final = 32  # of a lane or a tenant
TEXT_COLUMNS: Final = 60  # of an error
BATCHES_SHOWN: Final = 12

_LANES: Final = (
    "lane", "waiting", "oldest", "batches", "requests", "p50", "p99", "execution p50", "p99 ",
)  # fmt: skip
_TENANTS: Final = ("tenant", "waiting", "oldest", "arrived", "share")
_PRIORITIES: Final = ("priority", "waiting", "oldest")
_BATCHES: Final = (
    "batch", "settled", "reason", "size", "fill", "wait", "execution", "lane", "process", "failed",
)  # fmt: skip
_ERRORS: Final = ("error", "status", "requests", "last", "text")


def detail_parts(detail: ModelDetail | None) -> Iterator[RenderableType]:
    """The tables of a detail; None: none is published."""
    if detail is None:
        yield ""
        yield Text("  no detail yet: a batcher of this version publishes it within a few seconds")
        return
    for heading, rows in _tables(detail):
        if len(rows) > 1:
            yield ""
            if heading:
                yield Text(printable(heading))
            yield build_table(rows)
    if detail.is_partial:
        yield ""
        yield Text("  not everything was looked at: there are very many lanes, tenants or requests")


def _tables(detail: ModelDetail) -> Iterator[tuple[str, Sequence[Sequence[str]]]]:
    """A line above each table, and its rows, the first of which has the headings."""
    over = duration(detail.over_us / 1e6)
    lanes = f"  {count(detail.lanes_number, 'lane')} with waiting requests; batches of the last {over}"
    yield lanes, [_LANES, *map(_lane, detail.lanes)]
    tenants = (
        f"  {count(detail.tenants_number, 'tenant')}; {detail.arrived:,} requests arrived in the last "
        f"{duration(detail.arrivals_over_us / 1e6)}"
    )
    yield tenants, [_TENANTS, *map(_tenant, detail.tenants)]
    yield "", [_PRIORITIES, *map(_priority, detail.priorities)]
    batches = [_batch(batch, detail.at_us) for batch in detail.batches[:BATCHES_SHOWN]]
    yield "  latest batches", [_BATCHES, *batches]
    yield (
        "  errors since the batcher became active",
        [
            _ERRORS,
            *[_error(error, detail.at_us) for error in detail.errors],
        ],
    )
    slots = [(one.process, f"{one.sequences:,} of {one.slots:,}", "busy" if one.is_busy else "")
             for one in detail.processes]  # fmt: skip
    yield "", [("process", "slots taken", ""), *slots]


def _lane(lane: LaneDetail) -> tuple[str, ...]:
    name = clip(lane.lane or "(default)", NAME_COLUMNS) + (f" v{lane.version}" if lane.version else "")
    latency, execution = lane.latency_us or (None, None), lane.execution_us or (None, None)
    times = [_time(time_us) for time_us in (*latency, *execution)]
    return (name, f"{lane.waiting:,}", _age(lane.oldest_s), f"{lane.batches:,}", f"{lane.requests:,}", *times)


def _tenant(tenant: TenantDetail) -> tuple[str, ...]:
    name = clip(tenant.tenant or "(none)", NAME_COLUMNS)
    return name, f"{tenant.waiting:,}", _age(tenant.oldest_s), f"{tenant.arrived:,}", f"{tenant.share:.0%}"


def _priority(of: PriorityDetail) -> tuple[str, ...]:
    return f"{of.priority}", f"{of.waiting:,}", _age(of.oldest_s)


def _batch(batch: BatchDetail, now_us: int) -> tuple[str, ...]:
    return (
        batch.batch,
        f"{duration(max(0, now_us - batch.settled_us) / 1e6)} ago",
        batch.reason or "-",
        f"{batch.size:,}",
        f"{batch.fill:.0%}",
        _time(batch.wait_us),
        _time(batch.execution_us or None),
        clip(batch.lane or "(default)", NAME_COLUMNS),
        batch.worker,
        _failed(batch.statuses),
    )


def _failed(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{number:,} {status}" for status, number in statuses.items()) or "-"


def _error(error: ErrorDetail, now_us: int) -> tuple[str, ...]:
    return (
        error.reason or error.source,
        error.status,
        f"{error.number:,}",
        f"{duration(max(0, now_us - error.last_us) / 1e6)} ago",
        clip(error.text, TEXT_COLUMNS) or "-",
    )


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _time(time_us: int | None) -> str:
    return "-" if time_us is None else duration(time_us / 1e6)
