"""Streams that are cut and resumed: does a stepping model go on from its first chunks as if nothing happened?

When a model process dies, another one begins its requests again, with the chunks that readers have seen. A
model that loses or repeats a part of its text there answers OK with a wrong result, and only after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from carpool.errors import OK
from carpool.messages.results import Result
from carpool_cli.check.bodies import Bodies
from carpool_worker.dry_run import DryRun

CUTS_MAX: Final = 8  # of a stream

Same = Callable[[Result, Result], bool]


class Resumed(NamedTuple):
    """A stream that went on in another way when it was resumed. `body`: the index of its body. `cut`: the
    number of chunks before the cut."""

    body: int
    cut: int
    chunks: int
    result: Result
    expected: Result


class Resuming(NamedTuple):
    """What was tried. `random`: bodies, by index, whose streams differ from one time to the next."""

    cuts: int
    wrong: list[Resumed]
    random: list[int]


def resume_all(dry_run: DryRun, bodies: Bodies, are_same: Same) -> Resuming:
    """Stream each body, cut the stream at several places, and resume it."""
    cuts, wrong, random = 0, [], []
    for index, body in enumerate(bodies.encoded):
        whole = dry_run.stream(body, bodies.content_type, bodies.extra)
        if whole.result.status != OK or len(whole.chunks) < 2:
            continue
        again = dry_run.stream(body, bodies.content_type, bodies.extra)
        if not are_same(again.result, whole.result):
            random.append(index)
            continue
        for cut in cuts_of(len(whole.chunks)):
            cuts += 1
            rest = dry_run.stream(body, bodies.content_type, bodies.extra, whole.chunks[:cut])
            if not are_same(rest.result, whole.result):
                wrong.append(Resumed(index, cut, len(whole.chunks), rest.result, whole.result))
                break
    return Resuming(cuts, wrong, random)


def cuts_of(chunks: int) -> list[int]:
    """Where a stream with this number of chunks is cut, as the numbers of chunks before the cuts: after the
    first, before the last, and between."""
    places = min(CUTS_MAX, chunks - 1)
    if places == 1:
        return [1]
    return [1 + number * (chunks - 2) // (places - 1) for number in range(places)]


def sentences(resuming: Resuming, bodies: Bodies, shown: Callable[[Result], str]) -> Iterator[str]:
    """What was found."""
    for one in resuming.wrong:
        yield (
            f"{bodies.label(one.body)}, resumed after {one.cut} of {one.chunks} chunks, is answered\n"
            f"    {shown(one.result)}\nand undisturbed\n    {shown(one.expected)}"
        )
    if resuming.wrong:
        yield (
            "The model does not go on from its chunks: `begin` gets them in request.chunks after a crash. "
            "If it cannot, declare `continues = False`."
        )
    elif resuming.cuts:
        yield f"Streams that are cut and resumed go on as before (tried {_times(resuming.cuts)})."
    if resuming.random:
        labels = _labels(bodies, resuming.random)
        yield f"Not tried whether streams are resumed rightly: the output for {labels} is random."


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _labels(bodies: Bodies, indexes: Sequence[int]) -> str:
    first = bodies.label(indexes[0])
    return first if len(indexes) == 1 else f"{first} and {len(indexes) - 1} more"
