"""The printed parts of the demo's measurements: answers, figures and dispatch reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final, NamedTuple

from carpool.client.aio import Reply
from carpool.messages.batches import DispatchReason
from carpool_cli.demo.measure import SendingRun, TimedRequest, percentile
from carpool_cli.screen import Screen, clip, duration, table

ANSWERS_SHOWN: Final = 3
_NAME_COLUMNS: Final = 28

REASON_MEANINGS: Final[dict[DispatchReason, str]] = {
    "full": "the batch reached max_batch_size or max_batch_cost",
    "preferred": "the batch reached one of preferred_batch_sizes",
    "deadline": "a request would have missed its deadline by waiting longer",
    "efficient": "waiting for more requests would not raise throughput",
    "delay": "the oldest request had waited for max_queue_delay_ms",
    "idle": "a model process was free, or about to be",
}
"""Why a batch was dispatched."""


class Measured(NamedTuple):
    """The runs of the same queries, and what dispatched the batches of the first."""

    in_flight: int
    concurrent: SendingRun
    sequential: SendingRun
    direct_s: Sequence[float]  # durations of direct calls of the model, one query each
    reasons: Counter[str]


def show_answers(requests: Sequence[TimedRequest], screen: Screen) -> None:
    """Print the best passages for each query."""
    for request in requests:
        screen.print(f"\n  {request.body}")
        for answer in request.outcome.value[:ANSWERS_SHOWN] if isinstance(request.outcome, Reply) else ():
            name = clip(answer["name"], _NAME_COLUMNS)
            line = f"    {answer['score']:.2f}  {name:{_NAME_COLUMNS}}  {answer['text']}"
            screen.print(clip(line, screen.columns))


def show_figures(measured: Measured, screen: Screen) -> None:
    """Print throughput and latency of the runs, and the dispatch reasons."""
    screen.title("Throughput and latency, from sending a request to receiving its result")
    direct_per_second = len(measured.direct_s) / sum(measured.direct_s)
    rows = [
        ("", "requests/s", "mean batch", "p50", "p99"),
        _run_row(f"{measured.in_flight} in flight", measured.concurrent),
        _run_row("one at a time", measured.sequential),
        (
            "the model called directly, one at a time",
            f"{direct_per_second:,.0f}",
            "1.0",
            duration(percentile(measured.direct_s, 50)),
            duration(percentile(measured.direct_s, 99)),
        ),
    ]
    for line in table(rows):
        screen.print(f"  {line}")
    over_sequential, over_direct = (
        measured.concurrent.per_second / other
        for other in (measured.sequential.per_second, direct_per_second)
    )
    screen.print(
        f"\n  With {measured.in_flight} in flight, the throughput is {over_sequential:.1f} times that of one "
        f"request at a time,\n  and {over_direct:.1f} times that of direct calls. Why the batches were "
        "dispatched:"
    )
    for reason, batches in measured.reasons.most_common():
        screen.print(f"    {batches:5,}  {reason:9}  {_meaning(reason)}".rstrip())


def _run_row(name: str, run: SendingRun) -> tuple[str, ...]:
    latencies = duration(run.percentile_s(50)), duration(run.percentile_s(99))
    return (name, f"{run.per_second:,.0f}", f"{run.mean_batch:.1f}", *latencies)


def _meaning(reason: str) -> str:
    """What a reason in a worker's log means; nothing for one that this version does not have."""
    return next((meaning for known, meaning in REASON_MEANINGS.items() if known == reason), "")
