"""Faults that are planted in production code, to show that a test would find them.

A *plant* is a function that patches production code. `Faults` is a table of them, for one state machine or
property: beside each plant stands how many examples it takes to find it (`found`), or the test that shows it
(`shown_by`). A test module makes two tests of each: `Fault.must_be_found` and `Fault.must_notice_renames`.

**What counts as found.** Only an AssertionError whose innermost frame is in `tests/` and not in the plant: an
`assert` of the machine, or of its harness, model or checker. A KeyError or an AttributeError shows no more
than that the plant, or the machine, is out of date; an `assert` of production code shows nothing of the
machine. The frame decides, and not an exception of the machine's own, because examples count by the same
rule, and machines are tests, too, which say `assert`. Where one exception follows another, as in the
`teardown` of a machine that failed before, the first one decides. `Fault.must_notice_renames` proves for each
plant that it is not found by an exception of its own.

**How it is searched for.** In searches of SEARCH_EXAMPLES examples each, seeded with the numbers from
`first_seed` on: of the measurements described below, the one that found the fault soonest began with that. A
long search finds less in the same time: Hypothesis makes the first tenth of its examples small. What is tried
depends on the seeds, on Hypothesis, and on what the machine draws. It does not depend on how many examples
are allowed, nor on the source text of the machine (as the seed of `derandomize` does), nor on the version of
Python, nor on the constants of all modules that happen to be imported, which Hypothesis would try as well.
Only where the code under test goes through a set, or waits for Redis, two runs may differ.

**How many examples are allowed.** MARGIN times as many as are recorded beside the plant. Recorded is the most
that were needed in MEASUREMENTS measurements, each with other seeds. So the margin is one over bad luck, too:
after an edit that makes the machine draw otherwise, a test tries other examples, perhaps many more, and the
margin is as it was. What uses it up is a machine that finds the fault more seldom. Then its test fails, and
says that it is to be measured again, if that is intended:

    cd tests && ../.venv/bin/python -m support.planting [--write] [PLANT ...]
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import itertools
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final, NamedTuple, NoReturn, Protocol, TypeVar
from unittest import mock

import pytest
import structlog
from hypothesis import HealthCheck, Phase, seed
from hypothesis import settings as hypothesis_settings
from hypothesis.errors import HypothesisException, StopTest
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import RuleBasedStateMachine, get_state_machine_test

TESTS: Final = Path(__file__).resolve().parents[1]
MODULES: Final = ("simulation/test_*.py", "integration/test_step_replica.py")  # with tables, for the command
COMMAND: Final = "cd tests && ../.venv/bin/python -m support.planting"
SEARCH_EXAMPLES: Final = 20
MARGIN: Final = 3
ALLOWED_MIN: Final = 30
MEASUREMENTS: Final = 20
MEASURED_MAX: Final = 3000  # examples; also the number of seeds for each measurement

_SETTINGS: Final = hypothesis_settings(
    max_examples=SEARCH_EXAMPLES,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Patch(Protocol):
    """The part of pytest's MonkeyPatch that plants use."""

    def setattr(self, target: object, name: str, value: object, /) -> None: ...


Plant = Callable[[Patch], None]
Search = Callable[[], Any]  # returns a test of Hypothesis
Around = Callable[[], AbstractContextManager[None]]
AnyPlant = TypeVar("AnyPlant", bound=Plant)


def of_machine(machine: type[RuleBasedStateMachine], *, steps: int) -> Search:
    """The examples are runs of this machine."""
    settings = hypothesis_settings(_SETTINGS, stateful_step_count=steps)
    return cache(lambda: get_state_machine_test(machine, settings=settings))


def of_property(given: Callable[[Any], Any], check: Callable[..., None]) -> Search:
    """The examples are arguments, as `given` says, of this function."""
    return cache(lambda: _SETTINGS(given(check)))


# --- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A plant, and what finds it: a search, in `examples` examples as recorded; or the test `example`.

    `first_seed`: that of the search. `around`: what it needs meanwhile.
    """

    plant: Plant
    search: Search | None = None
    examples: int = 0
    first_seed: int = 0
    around: Around = nullcontext
    example: Callable[[], None] | None = None

    def __str__(self) -> str:
        return self.plant.__name__

    def must_be_found(self, patch: Patch) -> None:
        """Fails unless an assertion of the machine, or of the example, fails."""
        self.plant(patch)
        with must_show(self.plant):
            self._look()

    def must_notice_renames(self, patch: Patch) -> None:
        """Fails if this counts as found although the plant is out of date and raises an AttributeError; or if
        what it patches is not called at all."""
        self.plant(Renaming(patch))
        with must_notice_renames():
            self._look()

    def _look(self) -> None:
        if self.example is not None:
            self.example()
            return
        allowed = max(ALLOWED_MIN, MARGIN * self.examples)
        _, failure = self.search_for(allowed, self.first_seed)
        if failure is None:
            raise NotFoundError(
                f"{self} was not found in {allowed} examples; {self.examples} are recorded. If the machine, "
                f"or what it runs, was changed so that this is right, measure again: {COMMAND} --write {self}"
            )
        raise failure

    def search_for(self, examples_max: int, first_seed: int = 0) -> tuple[int, BaseException | None]:
        """Try up to this many examples. Returns how many were tried, and how the last one failed."""
        assert self.search is not None
        test, examples = self.search(), _Examples(examples_max)
        counted = examples.counted(test.hypothesis.inner_test)
        with (
            self.around(),
            mock.patch.object(test.hypothesis, "inner_test", counted),
            mock.patch.object(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None),
            suppress(_Over),
        ):
            for number in itertools.count(first_seed):
                seed(number)(test)()
        return examples.tried, examples.failure


class Faults(list[Fault]):
    """The faults that one search is to find. `around`: what it needs meanwhile."""

    def __init__(self, search: Search, around: Around = nullcontext) -> None:
        super().__init__()
        self._search = search
        self._around = around

    def found(self, *, examples: int, first_seed: int = 0) -> Callable[[AnyPlant], AnyPlant]:
        """The search finds this plant. `examples`: how many that takes with any seed, as measured."""

        def add(plant: AnyPlant) -> AnyPlant:
            self.append(Fault(plant, self._search, examples, first_seed, self._around))
            return plant

        return add

    def shown_by(self, example: Callable[[], None]) -> Callable[[AnyPlant], AnyPlant]:
        """The search finds this plant seldom. A test shows it."""

        def add(plant: AnyPlant) -> AnyPlant:
            self.append(Fault(plant, example=example))
            return plant

        return add


class _Examples:
    """Counts the examples of a search, and ends it when one fails."""

    def __init__(self, tried_max: int) -> None:
        self._tried_max = tried_max
        self.tried = 0
        self.failure: BaseException | None = None

    def counted(self, try_example: Callable[..., None]) -> Callable[..., None]:
        @wraps(try_example)
        def try_one(*arguments: Any, **named: Any) -> None:
            if self.tried == self._tried_max:
                raise _Over
            self.tried += 1
            try:
                try_example(*arguments, **named)
            except Exception as error:
                first = first_of(error)
                if isinstance(first, StopTest | HypothesisException):  # Hypothesis gave up this example
                    raise
                self.failure = first
            if self.failure is not None:
                raise _Over

        return try_one


class _Over(KeyboardInterrupt):
    """Ends a search. After any other exception Hypothesis repeats the example, or finds fault with it."""


# --- what counts -------------------------------------------------------------------------------------------


class NotFoundError(Exception):
    """Nothing failed, although a fault was planted."""


@contextmanager
def must_show(plant: Plant | None = None) -> Iterator[None]:
    """What is done here must fail, by an assertion of the test. Other exceptions are raised, with a note."""
    try:
        yield
    except NotFoundError:
        raise
    except Exception as error:
        first = first_of(error)
        if counts(first, plant):
            return
        first.add_note(
            "This is no assertion of the test, so no fault was found: see tests/support/planting.py"
        )
        raise first from None
    raise NotFoundError("nothing failed, although a fault was planted")


def counts(error: BaseException, plant: Plant | None = None) -> bool:
    """Whether it is an assertion of a test, and not of production code or of the plant."""
    if not isinstance(error, AssertionError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = walk_tb(error.__traceback__)
    code = frame.f_code
    is_of_plant = plant is not None and code.co_qualname.startswith(f"{plant.__qualname__}.")
    return TESTS in Path(code.co_filename).parents and not is_of_plant


def first_of(error: BaseException) -> BaseException:
    """The one that was raised first. Others were raised while it was handled, or in a `finally`."""
    while error.__context__ is not None:
        error = error.__context__
    return error


# --- renames -----------------------------------------------------------------------------------------------

_RENAMED: Final = "renamed, to show that this is not taken for a fault"


class Renaming:
    """Whatever a plant patches raises an AttributeError when it is used, as if the plant were out of date."""

    def __init__(self, patch: Patch) -> None:
        self._patch = patch

    def setattr(self, target: object, name: str, value: object, /) -> None:
        """Patch this attribute."""
        original = inspect.getattr_static(target, name)
        renamed: object = _Renamed()
        if isinstance(original, property):
            renamed = property(_raise_renamed)
        elif callable(original) or isinstance(original, staticmethod | classmethod):
            renamed = _raise_renamed
        self._patch.setattr(target, name, renamed)


@contextmanager
def must_notice_renames() -> Iterator[None]:
    """What is done here must fail because of `Renaming`, and that must not count as found."""
    with pytest.raises(AttributeError, match=_RENAMED), must_show():
        yield


class _Renamed:
    """In place of an object."""

    def __getattr__(self, name: str) -> NoReturn:
        _raise_renamed()


def _raise_renamed(*_: Any, **__: Any) -> NoReturn:
    raise AttributeError(_RENAMED)


# --- the command -------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """How many examples it takes to find a fault, with different seeds, sorted; and the first of the seeds
    with which it is found soonest."""

    examples: list[int]
    first_seed: int


def measure(fault: Fault) -> Measured:
    """Search for a fault with different seeds."""
    found: list[tuple[int, int]] = []
    for number in range(MEASUREMENTS):
        first_seed = MEASURED_MAX * number
        with pytest.MonkeyPatch.context() as patch, must_show(fault.plant):
            fault.plant(patch)
            tried, failure = fault.search_for(MEASURED_MAX, first_seed)
            found.append((tried, first_seed))
            if failure is None:
                raise NotFoundError(f"{fault} was not found in {tried} examples")
            raise failure
    found.sort()
    return Measured([tried for tried, _ in found], found[0][1])


def record(fault: Fault, measured: Measured) -> None:
    """Write beside the plant what was measured."""
    path, name = Path(fault.plant.__code__.co_filename), fault.plant.__name__
    pattern = rf"(?<=\.found\()examples=\d+(, first_seed=\d+)?(?=\)\ndef {name}\()"
    recorded = f"examples={measured.examples[-1]}, first_seed={measured.first_seed}"
    source, count = re.subn(pattern, recorded, path.read_text())
    assert count == 1, f"{path}: no number beside {name}"
    path.write_text(source)


def searched_faults() -> Iterator[Fault]:
    """Those of all tables."""
    for pattern in MODULES:
        for path in sorted(TESTS.glob(pattern)):
            module = importlib.import_module(f"{path.parent.name}.{path.stem}")
            tables = [table for table in vars(module).values() if isinstance(table, Faults)]
            yield from (fault for table in tables for fault in table if fault.search is not None)


def main() -> int:
    """Measure, as the arguments say."""
    parser = argparse.ArgumentParser(
        prog="python -m support.planting", description="Measure how many examples it takes to find faults."
    )
    parser.add_argument("plants", nargs="*", metavar="PLANT", help="default: all")
    parser.add_argument("--write", action="store_true", help="record what was measured beside the plants")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    faults = list(searched_faults())
    if unknown := set(arguments.plants) - set(map(str, faults)):
        parser.error(f"no search is to find {', '.join(sorted(unknown))}")
    for fault in faults:
        if arguments.plants and str(fault) not in arguments.plants:
            continue
        measured = measure(fault)
        needed = measured.examples
        print(f"{needed[-1]:5} (recorded: {fault.examples:5})  {fault}: {needed}", flush=True)
        if arguments.write:
            record(fault, measured)
    return 0


if __name__ == "__main__":
    sys.exit(importlib.import_module("support.planting").main())  # the one that the tables import
