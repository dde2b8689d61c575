"""The demo's texts: one is shown as it is written, while others are written beside it.

The same texts are then written in batches, each to the end of its longest text: what a model does that makes
its whole output in one call.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

from carpool.client.aio import AsyncClient
from carpool_cli.demo.measure import percentile
from carpool_cli.demo.writer import Writer
from carpool_cli.screen import Screen, duration, table

WRITER: Final = "writer"
WHOLE_TEXTS: Final = "whole-texts"
MODELS: Final = (WRITER, f"{WHOLE_TEXTS}=carpool_cli.demo.whole_texts:WholeTexts")
TEXTS: Final = 50  # beside the one that is shown
SHOWN_PROMPT: Final = "Return the"
SHOWN_LENGTH: Final = 240
LENGTH_MEAN: Final = 90
LENGTH_MAX: Final = 400
PROMPTS: Final = ("Return the", "Raise", "A list of", "If the file", "The class", "Create a new", "This")


class Written(NamedTuple):
    """A text, and when its parts came, in seconds since it was asked for. `output` is the final result."""

    text: str
    at_s: Sequence[float]
    output: str


class Writing(NamedTuple):
    """All texts of one way of writing, and how long they took together."""

    texts: Sequence[Written]
    duration_s: float

    @property
    def characters_per_second(self) -> float:
        """Over all texts."""
        return sum(len(written.text) for written in self.texts) / self.duration_s


def orders() -> list[dict[str, Any]]:
    """The bodies: the one that is shown, and others, most of them short, some long. Always the same."""
    numbers = random.Random(1)  # noqa: S311 (a load, not a secret)
    shown = {"prompt": SHOWN_PROMPT, "length": SHOWN_LENGTH, "seed": 0}
    others = [
        {
            "prompt": numbers.choice(PROMPTS),
            "length": min(LENGTH_MAX, 1 + int(numbers.expovariate(1 / LENGTH_MEAN))),
            "seed": seed,
        }
        for seed in range(1, TEXTS + 1)
    ]
    return [shown, *others]


async def write_in_steps(
    client: AsyncClient, bodies: Sequence[dict[str, Any]], show: Callable[[str], None]
) -> Writing:
    """Ask for all texts as streams. `show` gets each chunk of the first one."""
    started_s = time.perf_counter()
    shows = [show, *[lambda _: None] * (len(bodies) - 1)]
    reads = [_read(client, body, shown) for body, shown in zip(bodies, shows, strict=True)]
    texts = await asyncio.gather(*reads)
    return Writing(texts, time.perf_counter() - started_s)


async def _read(client: AsyncClient, body: dict[str, Any], show: Callable[[str], None]) -> Written:
    started_s = time.perf_counter()
    text, at_s = "", []
    async with client.stream(WRITER, body) as stream:
        async for chunk in stream:
            at_s.append(time.perf_counter() - started_s)
            text += chunk
            show(chunk)
        assert stream.reply is not None
        return Written(text, at_s, stream.reply.value)


async def write_whole(client: AsyncClient, bodies: Sequence[dict[str, Any]]) -> Writing:
    """Ask for the same texts from the model that writes them in batches."""
    started_s = time.perf_counter()

    async def ask(body: dict[str, Any]) -> Written:
        text = await client.infer(WHOLE_TEXTS, body)
        return Written(text, [time.perf_counter() - started_s], text)

    texts = await asyncio.gather(*map(ask, bodies))
    return Writing(texts, time.perf_counter() - started_s)


def show_writing(in_steps: Writing, whole: Writing, screen: Screen) -> None:
    """Print both ways of writing beside each other."""
    gaps_s = [after - before for written in in_steps.texts for before, after in pairwise(written.at_s)]
    rows = [
        ("", "first character", "p99", "whole text", "p99", "characters/s"),
        _row("in steps, sent as they are written", in_steps),
        _row("in batches, each to its longest text", whole),
    ]
    for line in table(rows):
        screen.print(f"  {line}")
    gaps = f"{duration(percentile(gaps_s, 50))}, p99 {duration(percentile(gaps_s, 99))}"
    screen.print(f"\n  Times are medians, and p99. In steps, between two characters of a text: {gaps}.")
    slots, texts = Writer.max_batch_size, len(in_steps.texts)
    waiting = f"{texts - slots} of {texts} texts wait for one of the {slots} slots at first"
    screen.print(f"  {waiting}. In batches, nothing can be read")
    screen.print("  before the longest text of a batch is complete.")


def _row(name: str, writing: Writing) -> tuple[str, ...]:
    firsts = [written.at_s[0] for written in writing.texts if written.at_s]
    lasts = [written.at_s[-1] for written in writing.texts if written.at_s]
    return (
        name,
        *(duration(percentile(times, percent)) for times in (firsts, lasts) for percent in (50, 99)),
        f"{writing.characters_per_second:,.0f}",
    )
