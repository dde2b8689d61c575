"""`carpool check MODEL BODY`: try a model out in this process, without Redis.

The model is loaded, and executes BODY alone and in batches, as a worker would have it do. Results that depend
on the batch are the commonest mistake in a model, and the hardest one to see once it is served.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle, islice
from math import isclose, isnan
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from pydantic import Field
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.errors import OK, CarpoolError, Unhealthy
from carpool.messages.requests import JSON, RAW
from carpool.messages.results import Result
from carpool.plugins import UnusableError
from carpool.settings import Devices, ModelSource, read_settings
from carpool.shown import complain
from carpool.text_files import read_text
from carpool.wire.bodies import decode_result, encode_body
from carpool.wire.content_types import ACCEPT, is_value
from carpool.wire.tensors import WIDTHS, from_bytes
from carpool_cli.infer import BodySettings, read_body
from carpool_cli.screen import Screen, build_table, clip, count, duration
from carpool_worker.dry_run import UNFINISHED, DryRun, Tried
from carpool_worker.model_process.model import LoadedModel, LoadError, SteppingModel, load_configured
from carpool_worker.served_models import ServedModel, served_models

TIMED_S: Final = 0.5  # for which each batch size is repeated
TIMED_RUNS_MAX: Final = 200
RELATIVE_MAX: Final = 1e-3  # by which numbers may differ: sums in another order are rounded otherwise
ABSOLUTE_MAX: Final = 1e-5
SHOWN_CHARS: Final = 200
_HEADINGS: Final = ("batch", "time", "of a request", "requests/s", "steps")
LINES_SUFFIX: Final = ".jsonl"

Sizes = Mapping[int, Tried]  # by the number of requests in a batch


class CheckSettings(ModelSource, BodySettings):
    """Load a model in this process, and execute BODY alone and in batches. Needs no Redis.

    BODY is JSON; text that is not JSON is a JSON string. @FILE is the contents of a file, and of a FILE.jsonl
    each line is a body of its own; - is standard input. Exits with 1 if a request fails, or if a result
    depends on the batch that it is executed in.
    """

    model_config = SettingsConfigDict(cli_parse_none_str="\0")

    model: CliPositionalArg[str] = Field(
        description="module:Name, path/file.py:Name, onnx:FILE, a ready-made model, or FILE.toml:NAME, as "
        "for `carpool up`"
    )
    body: CliPositionalArg[str] = Field(description="JSON, text, @FILE, @FILE.jsonl or -")
    device: Devices = "auto"

    @property
    def extra(self) -> dict[str, bytes]:
        """The fields that a request with BODY has for the model. Raises InvalidArgumentError."""
        named = self.fields | ({ACCEPT: self.result_type} if self.accept else {})
        return {name: value.encode() for name, value in named.items()}


def main(argv: Sequence[str]) -> int:
    """Print what was found. Returns 1 if anything is wrong with the model."""
    settings = read_settings(CheckSettings, argv, "carpool check")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C is an exception in the model
    try:
        model = _one_model(settings)
        requests = _requests(settings)
    except OSError as error:
        return _failed(f"BODY: cannot read {error.filename}: {error.strerror}")
    except (CarpoolError, ValueError) as error:
        return _failed(str(error))
    screen = Screen(sys.stdout)
    try:
        return _check(screen, _load(screen, model), requests)
    except _NotCheckedError as error:
        return _failed(str(error))
    except Unhealthy as error:
        return _failed(f"the model says that nothing works any more in its process: {error}")


def _one_model(settings: CheckSettings) -> ServedModel:
    """The model to try out. Raises ValueError."""
    models = served_models([settings.model], settings.options, replicas=1, device=settings.given("device"))
    if len(models) > 1:
        names = " or ".join(f"{settings.model}:{model.name}" for model in models)
        raise ValueError(f"{settings.model} has several models; name one: {names}")
    return models[0]


class _NotCheckedError(Exception):
    """The model cannot be tried out, for this reason."""


def _failed(error: str) -> int:
    complain(f"carpool check: {error}")
    return 1


class _Requests(NamedTuple):
    """Requests that differ only in their bodies."""

    bodies: list[bytes]
    content_type: str
    extra: Mapping[str, bytes]

    def alone(self) -> Iterator[_Requests]:
        """Each one by itself."""
        for body in self.bodies:
            yield self._replace(bodies=[body])

    def batch(self, size: int) -> _Requests:
        """So many, by turns."""
        return self._replace(bodies=list(islice(cycle(self.bodies), size)))


def _requests(settings: CheckSettings) -> _Requests:
    """What the settings name. Raises OSError, CarpoolError and ValueError."""
    content_type = settings.body_type
    bodies = [encode_body(content_type, body) for body in _bodies(settings.body, content_type)]
    return _Requests(bodies, content_type, settings.extra)


def _bodies(argument: str, content_type: str) -> list[Any]:
    """The bodies that BODY names. Raises OSError, CarpoolError and ValueError."""
    if not (argument.startswith("@") and argument.endswith(LINES_SUFFIX)) or content_type != JSON:
        return [read_body(argument, content_type)]
    lines = read_text(Path(argument[1:])).split("\n")  # JSON may have other ends of lines within a text
    bodies = [read_body(line) for line in lines if line.strip()]
    if not bodies:
        raise ValueError(f"BODY: {argument[1:]} has no lines")
    return bodies


def _load(screen: Screen, served: ServedModel) -> LoadedModel | SteppingModel:
    started_s = time.monotonic()
    name, device = served.name, served.devices[0]
    try:
        model = load_configured(served.location, device, served.configuration)
    except UnusableError as error:
        raise _NotCheckedError(str(error)) from None
    except LoadError as error:  # raised by the user's own code, so the traceback helps
        complain(error.trace.rstrip())
        raise _NotCheckedError(f"{name} cannot be loaded: {error}") from None
    loaded = f"{name}: loaded on {device} in {duration(time.monotonic() - started_s)}"
    inputs = ", ".join(f"{spec.name} {spec.datatype}{list(spec.shape)}" for spec in model.inputs)
    screen.print(f"{loaded}; {f'takes {inputs}' if inputs else 'declares no tensors'}")
    if model.parameters:
        screen.print(f"with {', '.join(f'{name}={text}' for name, text in model.parameters.items())}")
    for attribute, setting in model.misspelt.items():
        screen.print(f"{attribute} is not a setting and has no effect; did you mean {setting}?")
    return model


def _check(screen: Screen, model: LoadedModel | SteppingModel, requests: _Requests) -> int:
    try:
        dry_run = DryRun(model)
    except ValueError as error:
        raise _NotCheckedError(f"cannot be tried out: {error}; serve it with `carpool up`") from None
    alone = [dry_run.execute(*request).results[0] for request in requests.alone()]
    for number, result in enumerate(alone, 1):
        screen.print(f"body {number}: {_shown(result)}")
    sizes = sorted({1, 2, model.settings.max_batch_size})
    batches = {size: dry_run.execute(*requests.batch(size)) for size in sizes}
    good = [body for body, result in zip(requests.bodies, alone, strict=True) if not _is_failure(result)]
    if good:
        timed = [_timed(dry_run, requests._replace(bodies=good).batch(size)) for size in sizes]
        screen.print_table(build_table([_HEADINGS, *timed]))
    for trace in dry_run.traces:
        screen.print(trace.rstrip())
    return _conclude(screen, alone, batches, next((batch.datatype for batch in batches.values()), ""))


def _conclude(screen: Screen, alone: Sequence[Result], batches: Sizes, datatype: str) -> int:
    failed, different = sum(map(_is_failure, alone)), list(differences(alone, batches, datatype))
    for difference in different:
        screen.print(difference)
    sizes = ", ".join(map(str, batches))
    if different and any(map(_is_failure, chain(*[batch.results for batch in batches.values()]))):
        screen.print("Requests fail, or their results differ, depending on the batch that they are in.")
    elif different:
        screen.print(
            "Results depend on the batch: the model mixes its rows (by padding, by normalising over the "
            "batch, by their order), or is random."
        )
    elif failed < len(alone):
        screen.print(f"All results are the same in batches of {sizes}.")
    if failed:
        screen.print(f"{failed} of {count(len(alone), 'body', 'bodies')} failed.")
    return 1 if failed or different else 0


def _is_failure(result: Result) -> bool:
    return result.status not in (OK, UNFINISHED)


def _timed(dry_run: DryRun, batch: _Requests) -> list[str]:
    """A row of the table: the median time that one batch is in the model."""
    times_us: list[int] = []
    steps = 0
    end_s = time.monotonic() + TIMED_S
    while not times_us or (len(times_us) < TIMED_RUNS_MAX and time.monotonic() < end_s):
        executed = dry_run.execute(*batch)
        times_us.append(executed.compute_us)
        steps = executed.steps
    size, seconds = len(batch.bodies), max(1e-6, statistics.median(times_us) / 1e6)
    shown_steps = f"{steps:,}" if steps else "-"
    return [str(size), duration(seconds), duration(seconds / size), f"{size / seconds:,.0f}", shown_steps]


def differences(alone: Sequence[Result], batches: Sizes, datatype: str = "") -> Iterator[str]:
    """A sentence for each batch in which a request was answered in another way than alone. Requests take
    turns with the bodies of `alone`. `datatype`: of the numbers in octet-stream, if it is known."""
    for size, batch in batches.items():
        for number, (result, expected) in enumerate(zip(batch.results, cycle(alone), strict=False), 1):
            if not _are_same(result, expected, datatype):
                yield (
                    f"Request {number} of a batch of {size} is answered\n    {_shown(result)}\n"
                    f"and alone\n    {_shown(expected)}"
                )
                break


def _are_same(result: Result, expected: Result, datatype: str) -> bool:
    if OK not in (result.status, expected.status):
        return result.status == expected.status  # the words may name a place in the batch
    if result.status != expected.status or result.body is None or expected.body is None:
        return False
    if datatype in WIDTHS and result.content_type == expected.content_type == RAW:
        return are_close(*[from_bytes(datatype, (-1,), body) for body in (result.body, expected.body)])
    return are_close(_value(result), _value(expected))


def are_close(one: Any, other: Any) -> bool:
    """Whether two values are the same but for the rounding of numbers."""
    if isinstance(one, np.ndarray) is not isinstance(other, np.ndarray):
        return False
    if isinstance(one, bool) is not isinstance(other, bool):
        return False
    if isinstance(one, np.ndarray):
        if one.dtype != other.dtype:
            return False
        first, second = np.asarray(one), np.asarray(other)
        if first.shape != second.shape or first.dtype.kind not in "fc":
            return first.shape == second.shape and bool(np.array_equal(first, second))
        return bool(np.allclose(first, second, RELATIVE_MAX, ABSOLUTE_MAX, equal_nan=True))
    if isinstance(one, float) or isinstance(other, float):
        return _are_close_numbers(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(are_close(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(are_close, one, other))
    return bool(one == other)


def _are_close_numbers(one: Any, other: Any) -> bool:
    if not (isinstance(one, float | int) and isinstance(other, float | int)):
        return False
    return isclose(one, other, rel_tol=RELATIVE_MAX, abs_tol=ABSOLUTE_MAX) or (isnan(one) and isnan(other))


def _value(result: Result) -> Any:
    return decode_result(result.content_type, result.body or b"")


def _shown(result: Result) -> str:
    """A result, or an error, in one line."""
    if result.status != OK:
        return f"{result.status}: {result.detail}"
    if not is_value(result.content_type):
        return f"{len(result.body or b''):,} bytes of {result.content_type}"
    return clip(encode_body(JSON, _value(result)).decode(), SHOWN_CHARS)
