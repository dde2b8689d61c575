"""What `carpool top` shows, as a function of two looks: figures for a program, a page for a person. No I/O.

    two looks ──figures()──▶ Figures ──page()──▶ lines of a window

Rates and shares are of the time between the two, or since the batcher began, where the earlier look tells
nothing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from carpool.wire.report import BatcherReport
from carpool_cli.screen import clip, count, duration, table

HEAD: Final = 2  # the line of a page that heads the table
NAME_COLUMNS: Final = 28
_INDENT: Final = "  "
_LABEL_COLUMNS: Final = 9


class ModelLook(NamedTuple):
    """A model at one time: what its keys tell, and what its batcher says of itself, if there is one."""

    waiting_entries: int
    oldest_s: float | None
    batches_in_flight: int
    model_processes: int
    batcher: bool
    status: BatcherReport | None = None


class Refused(NamedTuple):
    """Requests answered without a result, for one reason: since the batcher began, and lately."""

    total: int
    per_s: float


class Learned(NamedTuple):
    """l(n), how long a batch of n takes; if only one size was seen, that is `only_size`."""

    intercept_ms: float
    slope_ms: float
    only_size: int | None


class Figures(NamedTuple):
    """A model, in numbers. None: nobody knows."""

    model: str
    batcher: bool
    model_processes: int
    waiting: int  # requests; entries where no batcher says how many are in them
    oldest_s: float | None
    batches_in_flight: int
    requests_in_flight: int | None = None
    held: int = 0  # results, for those before them
    over_s: float | None = None  # rates, fill and shares are of so long a time
    requests_per_s: float | None = None
    batches_per_s: float | None = None
    fill: float | None = None  # 0 to 1
    reasons: Mapping[str, float] = {}  # why batches left: the share of each
    p50_ms: float | None = None
    p99_ms: float | None = None
    learned: Learned | None = None
    refused: Mapping[str, Refused] = {}  # by STATUS/reason
    batches: Mapping[str, int] = {}  # by reason, since the batcher began
    requests: int | None = None  # dispatched since then
    active_s: float | None = None  # since when that is
    unheeded: str = ""  # why its settings are not followed

    def as_json(self) -> dict[str, Any]:
        """For `json.dumps`."""
        refused = {cause: one._asdict() for cause, one in self.refused.items()}
        learned = self.learned and self.learned._asdict()
        return {**self._asdict(), "refused": refused, "learned": learned}


# --- two looks -> figures ----------------------------------------------------------------------------------


def figures(model: str, before: ModelLook | None, now: ModelLook) -> Figures:
    """What there is to say of a model; `before` is an earlier look, the same one, or none."""
    seen = Figures(
        model, now.batcher, now.model_processes, now.waiting_entries, now.oldest_s, now.batches_in_flight
    )
    status = now.status if now.batcher else None
    if status is None:
        return seen
    start = _start(before.status if before is not None else None, status)
    over_s = (status.at_us - start.at_us) / 1e6
    left = _largest_first(_gained(start.batches, status.batches))
    batches = sum(left.values())
    gauges, quantiles_us, learned = status.gauges, status.quantiles_us or (None, None), status.learned
    return seen._replace(
        model_processes=gauges.model_processes,
        waiting=gauges.waiting,
        oldest_s=gauges.oldest_s if gauges.waiting else None,
        batches_in_flight=gauges.batches_in_flight,
        requests_in_flight=gauges.requests_in_flight,
        held=gauges.held,
        over_s=over_s,
        requests_per_s=_per_s(status.requests - start.requests, over_s),
        batches_per_s=_per_s(batches, over_s),
        fill=(status.fill_percent - start.fill_percent) / batches / 100 if batches else None,
        reasons={reason: number / batches for reason, number in left.items()},
        p50_ms=_ms(quantiles_us[0]),
        p99_ms=_ms(quantiles_us[1]),
        learned=learned and Learned(learned[0] / 1000, learned[1] / 1000, learned[2] or None),
        refused={
            cause: Refused(total, _per_s(total - start.refused.get(cause, 0), over_s) or 0.0)
            for cause, total in _largest_first(status.refused).items()
        },
        batches=status.batches,
        requests=status.requests,
        active_s=(status.at_us - status.began_us) / 1e6,
        unheeded=status.unheeded,
    )


def _start(before: BatcherReport | None, now: BatcherReport) -> BatcherReport:
    """From where to count: what this batcher said before, or that it had done nothing when it began."""
    same = before is not None and (before.batcher, before.began_us) == (now.batcher, now.began_us)
    if before is not None and same and before.at_us < now.at_us:
        return before
    return BatcherReport(now.batcher, now.began_us, now.began_us, now.gauges, {}, 0, 0, {}, None, None)


def _gained(before: Mapping[str, int], now: Mapping[str, int]) -> dict[str, int]:
    return {name: more for name, total in now.items() if (more := total - before.get(name, 0))}


def _largest_first(numbers: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(numbers.items(), key=lambda one: (-one[1], one[0])))


def _per_s(number: int, over_s: float) -> float | None:
    return number / over_s if over_s > 0 else None


def _ms(quantile_us: int | None) -> float | None:
    return None if quantile_us is None else quantile_us / 1000


# --- figures -> page ---------------------------------------------------------------------------------------

_COLUMNS: Final = (
    "model", "waiting", "oldest", "in flight", "processes", "requests/s", "fill", "p50", "p99",
)  # fmt: skip
_DISPENSABLE: Final = ("p50", "fill", "in flight", "processes", "oldest", "p99")  # where it is narrow


def page(
    where: str, shown: Sequence[Figures], columns: int, rows: int = sys.maxsize, lost: str = ""
) -> list[str]:
    """Lines for a window of so many columns and rows: a table of all, then why for each, as there is room.

    `lost` is why Redis cannot be asked any more, where that is so.
    """
    title = f"carpool top  {where}  {count(len(shown), 'model')}"
    note = f"Redis is away, this is how it was: {lost}" if lost else ""
    if not shown:
        lines = [title, note, "no model is registered; `carpool up square` serves one"]
    else:
        details = chain.from_iterable(_details(one, columns) for one in shown)
        lines = [title, note, *_table(shown, columns), *details]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], f"... {len(lines) - rows + 1} lines more: --model NAME shows one alone"]
    return [clip(line, columns) for line in lines][: max(rows, 0)]


def _table(shown: Sequence[Figures], columns: int) -> list[str]:
    cells = [_COLUMNS, *(_row(one, columns) for one in shown)]
    by_name = dict(zip(_COLUMNS, zip(*cells, strict=True), strict=True))
    for name in ("", *_DISPENSABLE):
        by_name.pop(name, None)
        lines = table(list(zip(*by_name.values(), strict=True)))
        if max(map(len, lines)) <= columns:
            break
    return lines


def _row(one: Figures, columns: int) -> tuple[str, ...]:
    in_flight = f"{one.batches_in_flight:,}"
    if one.requests_in_flight is not None:
        in_flight += f" ({one.requests_in_flight:,})"
    return (
        clip(one.model, min(NAME_COLUMNS, columns // 3)),
        f"{one.waiting:,}",
        "-" if one.oldest_s is None else duration(one.oldest_s),
        in_flight,
        f"{one.model_processes:,}" if one.model_processes else "none",
        _rate(one.requests_per_s) if one.batcher else "no batcher",
        "-" if one.fill is None else f"{one.fill:.0%}",
        "-" if one.p50_ms is None else duration(one.p50_ms / 1000),
        "-" if one.p99_ms is None else duration(one.p99_ms / 1000),
    )


def _details(one: Figures, columns: int) -> Iterator[str]:
    """Why, line by line: what is missing, why batches left, what is known of the model, who was refused."""
    yield from ("", one.model)
    if not one.batcher:
        yield from _flow("batcher", ["none is active: nothing leaves until `carpool batcher` runs"], columns)
    elif one.over_s is None:
        yield from _flow("batcher", ["one is active, and says nothing that is understood here"], columns)
    if not one.model_processes:
        yield from _flow("workers", ["none: no model process lives, `carpool worker` starts one"], columns)
    if one.unheeded:
        yield from _flow("settings", [f"not followed: {one.unheeded}"], columns)
    if one.over_s is not None:
        yield from _flow("left", _why(one), columns)
    if one.held:
        yield from _flow("held", [f"{count(one.held, 'result')}, until those before them are done"], columns)
    if one.learned is not None:
        yield from _flow("l(n)", [_line(one.learned)], columns)
    if one.refused:
        yield from _flow("refused", [_said(cause, many) for cause, many in one.refused.items()], columns)


def _why(one: Figures) -> list[str]:
    if not one.reasons:
        return [f"no batch in {duration(one.over_s or 0)}"]
    shares = [f"{reason} {share:.0%}" for reason, share in one.reasons.items()]
    return [*shares[:-1], f"{shares[-1]} of {_rate(one.batches_per_s)} batches/s"]


def _line(learned: Learned) -> str:
    intercept = duration(learned.intercept_ms / 1000)
    if learned.only_size is not None:
        return f"{intercept} for n = {learned.only_size}, the only size there was"
    return f"{intercept} + {duration(learned.slope_ms / 1000)} n"


def _said(cause: str, many: Refused) -> str:
    lately = f" ({_rate(many.per_s)}/s)" if many.per_s else ""
    return f"{many.total:,} {cause}{lately}"


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.2g}"


def _flow(label: str, parts: Sequence[str], columns: int) -> Iterator[str]:
    """`label  part, part, ...` in as many lines as it takes, each part whole."""
    line = f"{_INDENT}{label.ljust(_LABEL_COLUMNS)}"
    begun = False
    for part in parts:
        if begun and len(line) + 2 + len(part) + 1 > columns:
            yield f"{line},"
            line, begun = " " * (len(_INDENT) + _LABEL_COLUMNS), False
        line += f", {part}" if begun else part
        begun = True
    yield line
