"""What the demo measures: requests timed, batches counted by the reason they left, answers compared."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from carpool.client.aio import AsyncClient, Reply
from carpool.errors import CarpoolError

TOLERANCE = 1e-3  # of a score: sums of float32 in another order, rounded to four decimals


class Asked(NamedTuple):
    """One request and what came of it."""

    body: Any
    came: Reply | CarpoolError
    took_s: float


class Run(NamedTuple):
    """Requests asked together, in their order, and how long all of them took."""

    asked: list[Asked]
    took_s: float

    @property
    def per_second(self) -> float:
        return len(self.asked) / self.took_s if self.took_s else 0.0

    @property
    def mean_batch(self) -> float:
        """The mean size of the batches these requests rode in: one that n shared counts n times 1/n."""
        sizes = [one.came.batch_size for one in self.asked if isinstance(one.came, Reply)]
        return len(sizes) / sum(1 / size for size in sizes) if sizes else 0.0

    def percentile_s(self, percent: int) -> float:
        """What `percent` of the requests took, at the most."""
        return percentile([one.took_s for one in self.asked], percent)


async def ask(
    client: AsyncClient,
    model: str,
    bodies: Sequence[Any],
    in_flight: int,
    *,
    within_s: float = float("inf"),
    step: Callable[[], None] = lambda: None,
) -> Run:
    """Send each body as a request of its own, `in_flight` at a time; after `within_s` no more are sent."""
    numbers = iter(range(len(bodies)))
    asked: dict[int, Asked] = {}
    started_s = time.perf_counter()

    async def one_after_another() -> None:
        for number in numbers:
            asked[number] = await _ask_one(client, model, bodies[number])
            step()
            if time.perf_counter() - started_s > within_s:
                return

    await asyncio.gather(*[one_after_another() for _ in range(min(in_flight, len(bodies)))])
    return Run([asked[number] for number in sorted(asked)], time.perf_counter() - started_s)


async def _ask_one(client: AsyncClient, model: str, body: Any) -> Asked:
    started_s = time.perf_counter()
    came: Reply | CarpoolError
    try:
        came = await client.request(model, body)
    except CarpoolError as error:
        came = error
    return Asked(body, came, time.perf_counter() - started_s)


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


class WorkerLog:
    """A worker's log, in JSON lines: one for each batch, with its size and the reason it left."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._skipped_bytes = 0

    def skip(self) -> None:
        """What was logged so far is of no interest."""
        self._skipped_bytes = self._path.stat().st_size

    async def reasons(self, requests: int, within_s: float = 2.0) -> Counter[str]:
        """Why batches left since `skip`; waits until as many requests are accounted for.

        (A batch's line is written after its results are.)
        """
        until_s = time.monotonic() + within_s
        while True:
            batches = [line for line in self._lines() if line.get("event") == "batch"]
            if sum(line["size"] for line in batches) >= requests or time.monotonic() > until_s:
                return Counter(line["reason"] for line in batches)
            await asyncio.sleep(0.02)

    def last_error(self) -> str | None:
        """The reason on the last line that tells of an error."""
        return next(
            (line["reason"] for line in reversed(self._lines()) if line.get("level") == "error"), None
        )

    def _lines(self) -> list[dict[str, Any]]:
        with self._path.open("rb") as log:
            log.seek(self._skipped_bytes)
            return [_line(raw) for raw in log]


def _line(raw: bytes) -> dict[str, Any]:
    """A line of JSON; nothing where it is something else: a traceback, or half a line."""
    try:
        line = json.loads(raw)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def same_answer(got: Sequence[Mapping[str, Any]], expected: Sequence[Mapping[str, Any]]) -> bool:
    """Whether two answers of docsearch agree: the same scores in order, and the same passages.

    Passages of equal score may change places, the last ones also with one that just missed the answer.
    """
    if len({_passage(one) for one in got}) != len(expected) or len(got) != len(expected):
        return False
    if any(abs(one["score"] - other["score"]) > TOLERANCE for one, other in zip(got, expected, strict=True)):
        return False
    scores = {_passage(one): one["score"] for one in expected}
    lowest = min(scores.values(), default=0.0)
    return all(abs(scores.get(_passage(one), lowest) - one["score"]) <= TOLERANCE for one in got)


def _passage(answer: Mapping[str, Any]) -> tuple[Any, Any]:
    return answer["name"], answer["text"]
