"""What a producer saw of each request, and the figures of that. Pure. Times are seconds after the start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, NamedTuple

from host import Figures

from stepping.workloads import Ask, Window

PERCENTS: Final = (50, 95, 99)


@dataclass(slots=True)
class Heard:
    """A request: what handing it over took, and for each token when it was there and when it was read."""

    ask: Ask
    submit_s: float = 0.0
    emitted_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    def read(self, value: int | Sequence[int], now_s: float, start_s: float) -> None:
        """A chunk was read: the time (ns) of a token, or those of several. `now_s` is after the start."""
        for emitted_ns in [value] if isinstance(value, int) else value:
            self.emitted_s.append(emitted_ns / 1e9 - start_s)
            self.read_s.append(now_s)


class Sent(NamedTuple):
    """All requests of a run, or of one burst, which ended at `ended_s`. `window`: None if all count.
    `cpu_us`: the CPU time of each process, from the start to the end of the window.
    """

    heard: Sequence[Heard]
    window: Window | None
    ended_s: float
    cpu_us: Mapping[str, float]

    @property
    def warm_s(self) -> float:
        """From when tokens count."""
        return 0.0 if self.window is None else self.window.warm_s

    @property
    def span_s(self) -> float:
        """Until when they do."""
        return self.ended_s if self.window is None else self.window.span_s

    def first_token_s(self) -> Iterator[float]:
        """Each request's time to first token. One that got none counts with the time that it waited."""
        for heard in self.heard:
            if heard.ask.due_s >= self.warm_s:
                yield (heard.read_s[0] if heard.read_s else self.ended_s) - heard.ask.due_s

    def gaps_s(self, *, is_read: bool) -> Iterator[float]:
        """Times between two tokens of a request, when they are read, or else emitted."""
        for heard in self.heard:
            times_s = heard.read_s if is_read else heard.emitted_s
            yield from (after - before for before, after in pairwise(times_s) if before >= self.warm_s)

    def ways_s(self) -> Iterator[float]:
        """Times from emitting to reading."""
        for heard in self.heard:
            for read_s, emitted_s in zip(heard.read_s, heard.emitted_s, strict=True):
                if emitted_s >= self.warm_s:
                    yield read_s - emitted_s

    def tokens(self, from_s: float) -> int:
        """How many tokens were read until `span_s`."""
        return sum(from_s <= read_s <= self.span_s for heard in self.heard for read_s in heard.read_s)


def figures(of: Sequence[Sent]) -> Figures:
    """The figures of several bursts, or of one run. Times are in ms. `gap`: between two tokens of a request,
    when they are read; `step`: when they are emitted; `way`: from one to the other. CPU time is of a token.
    """
    times_ms = {
        "ttft": [1e3 * first_s for sent in of for first_s in sent.first_token_s()],
        "gap": [1e3 * gap_s for sent in of for gap_s in sent.gaps_s(is_read=True)],
        "step": [1e3 * gap_s for sent in of for gap_s in sent.gaps_s(is_read=False)],
        "way": [1e3 * way_s for sent in of for way_s in sent.ways_s()],
    }
    submits_s = [heard.submit_s for sent in of for heard in sent.heard]
    tokens = max(1, sum(sent.tokens(0.0) for sent in of))
    return {
        "submit_ms": 1e3 * sum(submits_s) / len(submits_s),
        **{
            f"{name}_p{percent}_ms": percentile(values, percent)
            for name, values in times_ms.items()
            for percent in PERCENTS
        },
        "tokens_per_s": sum(sent.tokens(sent.warm_s) for sent in of)
        / sum(sent.span_s - sent.warm_s for sent in of),
        "cpu_us": {role: sum(sent.cpu_us[role] for sent in of) / tokens for role in of[0].cpu_us},
    }


def percentile(values: Sequence[float], percent: int) -> float:
    """NaN of no values."""
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else float("nan")
