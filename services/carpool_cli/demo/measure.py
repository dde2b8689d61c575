"""Measurements of the demo: timed requests, dispatch reasons from a worker's log, and compared answers."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from carpool.client.aio import AsyncClient, Reply
from carpool.errors import CarpoolError

SCORE_TOLERANCE: Final = 1e-3  # scores are float32 sums in any order, rounded to four decimals


class TimedRequest(NamedTuple):
    """A request, its outcome, and the time from sending it to the outcome."""

    body: Any
    outcome: Reply | CarpoolError
    latency_s: float


class SendingRun(NamedTuple):
    """The requests of one call of `send_all`, in the order of their bodies."""

    requests: list[TimedRequest]
    duration_s: float

    @property
    def per_second(self) -> float:
        return len(self.requests) / self.duration_s if self.duration_s else 0.0

    @property
    def mean_batch(self) -> float:
        """The mean size of the batches. Each of the n requests of a batch counts as 1/n of it."""
        outcomes = [request.outcome for request in self.requests]
        sizes = [outcome.batch_size for outcome in outcomes if isinstance(outcome, Reply)]
        return len(sizes) / sum(1 / size for size in sizes) if sizes else 0.0

    def percentile_s(self, percent: int) -> float:
        """A percentile of the latencies."""
        return percentile([request.latency_s for request in self.requests], percent)


async def send_all(
    client: AsyncClient,
    model: str,
    bodies: Sequence[Any],
    in_flight: int,
    *,
    within_s: float = float("inf"),
    step: Callable[[], None] = lambda: None,
) -> SendingRun:
    """Send each body as a request of its own, `in_flight` at a time. After `within_s` no more are sent."""
    numbers = iter(range(len(bodies)))
    requests: dict[int, TimedRequest] = {}
    started_s = time.perf_counter()

    async def send_one_after_another() -> None:
        for number in numbers:
            requests[number] = await _send(client, model, bodies[number])
            step()
            if time.perf_counter() - started_s > within_s:
                return

    await asyncio.gather(*[send_one_after_another() for _ in range(min(in_flight, len(bodies)))])
    return SendingRun([requests[number] for number in sorted(requests)], time.perf_counter() - started_s)


async def _send(client: AsyncClient, model: str, body: Any) -> TimedRequest:
    started_s = time.perf_counter()
    outcome: Reply | CarpoolError
    try:
        outcome = await client.request(model, body)
    except CarpoolError as error:
        outcome = error
    return TimedRequest(body, outcome, time.perf_counter() - started_s)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of the values that `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


class WorkerLog:
    """A worker's log of JSON lines, which has a summary of the committed batches for each second."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._skipped_bytes = 0

    def skip(self) -> None:
        """Ignore everything logged so far."""
        self._skipped_bytes = self._path.stat().st_size

    async def reasons(self, requests: int, within_s: float = 3.0) -> Counter[str]:
        """Count the batches since `skip` by dispatch reason.

        Waits up to `within_s` until the batches have this many requests: a worker logs its
        batches up to a second after their results are written.
        """
        until_s = time.monotonic() + within_s
        while True:
            summaries = [line for line in self._lines() if line.get("event") == "batches"]
            if sum(line["requests"] for line in summaries) >= requests or time.monotonic() > until_s:
                return sum((Counter(line["reasons"]) for line in summaries), Counter())
            await asyncio.sleep(0.02)

    def last_error(self) -> str | None:
        """The reason given by the last error line."""
        errors = (line["reason"] for line in reversed(self._lines()) if line.get("level") == "error")
        return next(errors, None)

    def _lines(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as log:
            log.seek(self._skipped_bytes)
            return [_parse_line(raw) for raw in log]


def _parse_line(raw: bytes) -> dict[str, Any]:
    """A log line; an empty dict if it is not JSON, as in a traceback, or not complete yet."""
    try:
        line = json.loads(raw)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def same_answer(got: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two answers of docsearch agree: the same scores in order, and the same passages.

    Passages of equal score may swap places. Those with the lowest score may also swap with a passage that is
    not in the answer because of the same score.
    """
    if len({_passage(answer) for answer in got}) != len(expected) or len(got) != len(expected):
        return False
    pairs = zip(got, expected, strict=True)
    if any(abs(answer["score"] - other["score"]) > SCORE_TOLERANCE for answer, other in pairs):
        return False
    scores = {_passage(answer): answer["score"] for answer in expected}
    lowest = min(scores.values(), default=0.0)
    return all(
        abs(scores.get(_passage(answer), lowest) - answer["score"]) <= SCORE_TOLERANCE for answer in got
    )


def _passage(answer: Mapping[str, Any]) -> tuple[Any, Any]:
    return answer["name"], answer["text"]
