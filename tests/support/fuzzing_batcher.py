"""Fuzzing the decisions of a batcher: hostile entries of all kinds, in virtual time.

Nothing may raise, no step may take more calls of functions than its bound, and nothing that is remembered may
grow beyond what is configured. Entries are made at random, and not by Hypothesis, which makes far fewer.

    python -m support.fuzzing_batcher --entries 10000000 --seed 1
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

import msgpack

from carpool.model_settings import ModelKind, ModelSettings
from carpool_batcher.core.sequences.heads import BROKEN_MIN
from support.any_fields import COMMON, OF_SEQUENCES, SETTINGS, VALUES, Batcher, as_flat

ENTRIES_PER_SEED: Final = 2000
COUNTED_EVERY: Final = 20  # counting calls makes a step five times as slow
CALLS_MIN: Final = 20_000  # of a step, for what waits already: no queue here is longer than WAITING_MAX
CALLS_PER_REQUEST: Final = 600  # of those in the entry
WAITING_MAX: Final = 40
LARGE_ENTRY: Final = 400  # requests
_NAMES: Final = tuple(VALUES)
_BODIES: Final[tuple[dict[str, str], ...]] = (
    {"body": "1"},
    {"body": "12345"},
    {"body_key": "k", "body_bytes": "3"},
    {},
)
_COMMANDS: Final = ({"withdraw": "a b"}, {"withdraw": "c"}, {"withdraw": ","}, {"end_sequences": "s"})


class Entries:
    """Entries at random, as their fields."""

    def __init__(self, choice: random.Random) -> None:
        self._choice = choice

    def next(self) -> tuple[dict[str, Any], int]:
        """An entry, and how many requests it has at most."""
        kind = self._choice.random()
        if kind < 0.04:
            return dict(self._choice.choice(_COMMANDS)), 2
        if kind < 0.3:
            size = LARGE_ENTRY if self._choice.random() < 0.02 else self._choice.randint(1, 5)
            fields = self._fields() if self._choice.random() < 0.3 else {}
            alike = self._request() if self._choice.random() < 0.5 else None
            requests = [{**(alike or self._request()), **self._id(at)} for at in range(size)]
            return fields | {"requests": msgpack.packb(requests)}, size
        return self._request(), 10

    def _id(self, at: int) -> dict[str, Any]:
        return {"correlation_id": f"{at}"} if self._choice.random() < 0.9 else {}

    def _request(self) -> dict[str, Any]:
        return self._fields() | self._choice.choice(_BODIES)

    def _fields(self) -> dict[str, Any]:
        """Mostly fields that make a valid request; seldom any."""
        known = self._choice.choice((COMMON, (*COMMON, "cost", "stream"), (*COMMON, *OF_SEQUENCES), _NAMES))
        names = self._choice.sample(known, self._choice.randint(0, min(5, len(known))))
        return {name: self._choice.choice(VALUES[name]) for name in names}


def _settings(choice: random.Random) -> ModelSettings:
    names = choice.sample(tuple(SETTINGS), choice.randint(0, 4))
    chosen = {name: choice.choice(SETTINGS[name]) for name in names}
    return ModelSettings(**{"max_queue_size": WAITING_MAX, **chosen})


def _calls_of(act: Callable[[], object]) -> int:
    """How many functions it calls."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(None)
    return calls


def _assert_bounded(batcher: Batcher) -> None:
    """What a batcher remembers is bounded by what waits, what is in flight, and its settings."""
    scheduler, sequences = batcher.scheduler, batcher.scheduler.sequences
    served = scheduler.queue.count + len(scheduler.in_flight.batches)
    assert len(scheduler._deadlines._timers) <= 4 * served + 1001
    begun_max = max(batcher.settings.max_candidate_sequences, BROKEN_MIN)
    assert len(sequences) <= served + 2 * begun_max
    assert len(sequences._heads._to_start._heap) <= 2 * served + 101
    segments_max = 2 * max(served, WAITING_MAX) + 18  # empty ones stay until as many more arrive as waited
    assert all(len(one.segments) <= segments_max for one in sequences._known.by_id.values())
    assert len(scheduler._withdrawals.arrived_later) <= served + 100


def fuzz(entries: int, seed: int, report: Callable[[str], None] = print) -> None:
    """Send that many entries to batchers of all kinds. The seed that is reported last replays a failure."""
    done, started_s = 0, time.monotonic()
    for at in itertools.count(seed):
        if done >= entries:
            return
        if not (at - seed) % 50:
            report(f"seed {at}: {done:,} entries in {time.monotonic() - started_s:.0f} s")
        try:
            done += _fuzz_one(at, min(ENTRIES_PER_SEED, entries - done))
        except BaseException as error:
            error.add_note(f"--seed {at} --entries {ENTRIES_PER_SEED}")
            raise


def _fuzz_one(seed: int, entries: int) -> int:
    choice = random.Random(seed)
    made = Entries(choice)
    batcher = Batcher(_settings(choice), choice.choice(list(ModelKind)))
    for number in range(entries):
        fields, size = made.next()
        flat = as_flat(fields)

        def step(flat: list[bytes] = flat) -> None:
            batcher.send(flat)
            batcher.turn()

        if number % COUNTED_EVERY and size < LARGE_ENTRY:
            step()
        else:
            calls = _calls_of(step)
            assert calls < CALLS_MIN + CALLS_PER_REQUEST * size, f"{calls} calls for {size} requests"
        _do_something_else(batcher, choice)
        if not number % 100:
            _assert_bounded(batcher)
    batcher.end()
    return entries


def _do_something_else(batcher: Batcher, choice: random.Random) -> None:
    """Now and then time passes, batches settle, entries are deleted, or another batcher takes over."""
    kind = choice.random()
    if kind < 0.3:
        batcher.pass_by(choice.choice((0, 1, 10, 26)))
    elif kind < 0.5:
        batcher.settle()
    elif kind < 0.51:
        batcher.take_over()
    elif kind < 0.53:
        batcher.delete(choice.randint(0, 3))


def main() -> int:
    """Fuzz, as the arguments say."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--entries", type=int, default=10_000_000)
    parser.add_argument(
        "--seed", type=int, default=1, help=f"the first one; each is for {ENTRIES_PER_SEED:,}"
    )
    arguments = parser.parse_args()
    fuzz(arguments.entries, arguments.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
