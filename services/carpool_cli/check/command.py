"""`carpool check MODEL BODY...`: try a model out in this process. With `--repository`: see `repository`.

The model is loaded, and executes each body alone and all of them in batches, as a worker would have it do.
Results that depend on the batch are the commonest mistake in a model, and the hardest one to see once it is
served. Streams of a stepping model are cut, and resumed from their first chunks.

That needs no Redis. Only what the model asks of other models is sent to one.
"""

from __future__ import annotations

import signal
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Final, Self

from pydantic import Field, model_validator
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from carpool.errors import OK, UNAVAILABLE, CarpoolError, Unhealthy
from carpool.messages.requests import JSON
from carpool.messages.results import Result
from carpool.plugins import UnusableError
from carpool.settings import Devices, ModelSource, Texts, read_settings
from carpool.shown import complain
from carpool.wire.bodies import encode_body
from carpool.wire.content_types import ACCEPT, is_value
from carpool_cli.check import speaking
from carpool_cli.check.bodies import Bodies, read_bodies
from carpool_cli.check.comparing import are_same, value_of
from carpool_cli.check.memory import Memory, Needed
from carpool_cli.check.repository import check_repository
from carpool_cli.check.resuming import resume_all, sentences
from carpool_cli.infer import BodySettings
from carpool_cli.screen import Screen, build_table, clip, count, duration
from carpool_worker.dry_run import UNFINISHED, DryRun, Tried
from carpool_worker.model_process.model import LoadedModel, LoadError, SteppingModel, load_configured
from carpool_worker.served_models import ServedModel, served_models

TIMED_S: Final = 0.5  # for which each batch size is repeated
TIMED_RUNS_MAX: Final = 200
SHOWN_CHARS: Final = 200
SHOWN_MEMORY_BYTES: Final = 8 << 20  # less is not worth a line, and may be what libraries load
_ASKS_OTHERS: Final = (
    "{} asks other models, and `carpool check` sends that to Redis: to CARPOOL_REDIS_URL, or else to\n"
    "redis://127.0.0.1:6379/0. Serve those models there with `carpool up`; or try them all together without\n"
    "Redis, in a program with carpool.testing.LocalClient."
)
_HEADINGS: Final = ("batch", "time", "of a request", "requests/s", "steps")

Sizes = Mapping[int, list[Tried]]  # batches with all bodies, by their size


class CheckSettings(ModelSource, BodySettings):
    """Load a model in this process, and execute each BODY alone, and all in batches. Needs no Redis, unless
    the model asks other models: that is sent to the Redis of CARPOOL_REDIS_URL.

    BODY is JSON; text that is not JSON is a JSON string. @FILE is the contents of a file; of a FILE.jsonl
    each line is a body of its own, and of a folder, @FOLDER, each file. - is standard input. Exits with 1 if
    a request fails, if a result depends on the batch that it is executed in, or if a stream that is cut goes
    on in another way.

    With --repository DIR in place of MODEL and BODY, tell all that is wrong with the models of a folder, and
    load each version of them.
    """

    model_config = SettingsConfigDict(cli_parse_none_str="\0null")

    model: CliPositionalArg[str] = Field(
        "",
        description="module:Name, path/file.py:Name, hf:FOLDER, st:FOLDER, onnx:FILE, a ready-made model, "
        "FILE.toml:NAME or repository:DIR/NAME, as for `carpool up`",
    )
    body: CliPositionalArg[Texts] = Field(
        [], description="JSON, text, @FILE, @FILE.jsonl, @FOLDER or -; one or several"
    )
    device: Devices = "auto"
    repository: Path | None = Field(None, description="a folder of models, all of which are checked")

    @model_validator(mode="after")
    def _check_what(self) -> Self:
        if self.repository is None and not (self.model and self.body):
            raise ValueError("MODEL and BODY are required, or --repository DIR")
        if self.repository is not None and self.model:
            raise ValueError("--repository checks all models of a folder: leave MODEL and BODY out")
        return self

    @property
    def extra(self) -> dict[str, bytes]:
        """The fields that a request with BODY has for the model. Raises InvalidArgumentError."""
        named = self.fields | ({ACCEPT: self.result_type} if self.accept else {})
        return {name: value.encode() for name, value in named.items()}


def main(argv: Sequence[str]) -> int:
    """Print what was found. Returns 1 if anything is wrong with the model."""
    settings = read_settings(CheckSettings, argv, "carpool check")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else Ctrl-C is an exception in the model
    screen = Screen(sys.stdout)
    try:
        if settings.repository is not None:
            return check_repository(screen, settings.repository, settings.given("device"))
        model = _one_model(settings)
        bodies = read_bodies(settings.body, settings.body_type, settings.extra)
    except OSError as error:
        return _failed(f"BODY: cannot read {error.filename}: {error.strerror}")
    except (CarpoolError, ValueError) as error:
        return _failed(str(error))
    try:
        return _check(screen, model.name, _load(screen, model), bodies)
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


def _check(screen: Screen, name: str, model: LoadedModel | SteppingModel, bodies: Bodies) -> int:
    try:
        dry_run = DryRun(model, name)
    except ValueError as error:
        raise _NotCheckedError(f"cannot be tried out: {error}; serve it with `carpool up`") from None
    with closing(dry_run):
        return _try_out(screen, name, dry_run, bodies, model)


def _try_out(
    screen: Screen, name: str, dry_run: DryRun, bodies: Bodies, model: LoadedModel | SteppingModel
) -> int:
    memory, size_max = Memory(), model.settings.max_batch_size
    alone = [tried.results[0] for tried in _execute(dry_run, bodies, 1)]
    for index, result in enumerate(alone):
        screen.print(f"{bodies.label(index)}: {_shown(result)}")
    if dry_run.calls_others and any(result.status == UNAVAILABLE for result in alone):
        screen.print(_ASKS_OTHERS.format(name))
    sizes = sorted({1, 2, size_max})
    batches: dict[int, list[Tried]] = {}
    needed: dict[int, Needed] = {}
    for size in sizes:
        with memory.measured() as needed[size]:
            batches[size] = _execute(dry_run, bodies, size)
    good = bodies.only([index for index, result in enumerate(alone) if not _is_failure(result)])
    if good.encoded:
        screen.print_table(build_table([_HEADINGS, *[_timed(dry_run, good, size) for size in sizes]]))
        _print_memory(screen, needed)
    resumes = _print_resumed(screen, dry_run, good) if dry_run.continues else True
    spoken = [*speaking.sentences(model.spoken, bodies, alone)]
    for sentence in spoken:
        screen.print(sentence)
    for trace in dry_run.traces:
        screen.print(trace.rstrip())
    if dry_run.has_changed_inputs:
        screen.print(
            "The model writes into its input arrays. It may: a served model gets them for itself. Other "
            "callers of the class may still need theirs."
        )
    return 0 if _are_right(screen, bodies, alone, batches) and resumes and not spoken else 1


def _execute(dry_run: DryRun, bodies: Bodies, size: int) -> list[Tried]:
    """All bodies, in batches of this size."""
    return [dry_run.execute(batch, bodies.content_type, bodies.extra) for batch in bodies.batches(size)]


def _are_right(screen: Screen, bodies: Bodies, alone: Sequence[Result], batches: Sizes) -> bool:
    """Print what was found in the results, and return whether nothing is wrong."""
    failed = sum(map(_is_failure, alone))
    different = list(differences(bodies, alone, batches))
    for difference in different:
        screen.print(difference)
    sizes = ", ".join(map(str, batches))
    tried = chain.from_iterable(batches.values())
    if different and any(map(_is_failure, chain.from_iterable(batch.results for batch in tried))):
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
    return not (failed or different)


def differences(bodies: Bodies, alone: Sequence[Result], batches: Sizes) -> Iterator[str]:
    """A sentence for each size of batches in which a request was answered in another way than alone."""
    datatype = next((batch.datatype for batch in chain.from_iterable(batches.values())), "")
    for size, tried in batches.items():
        results = chain.from_iterable(batch.results for batch in tried)
        for number, result in enumerate(results):
            index = number % len(alone)
            if not are_same(result, alone[index], datatype):
                label = f" ({bodies.label(index)})" if len(alone) > 1 else ""
                yield (
                    f"Request {number % size + 1} of a batch of {size}{label} is answered\n"
                    f"    {_shown(result)}\nand alone\n    {_shown(alone[index])}"
                )
                break


def _is_failure(result: Result) -> bool:
    return result.status not in (OK, UNFINISHED)


def _timed(dry_run: DryRun, bodies: Bodies, size: int) -> list[str]:
    """A row of the table: the median time that one batch is in the model."""
    times_us: list[int] = []
    steps = 0
    end_s = time.monotonic() + TIMED_S
    batch = next(bodies.batches(size))
    while not times_us or (len(times_us) < TIMED_RUNS_MAX and time.monotonic() < end_s):
        executed = dry_run.execute(batch, bodies.content_type, bodies.extra)
        times_us.append(executed.compute_us)
        steps = executed.steps
    seconds = max(1e-6, statistics.median(times_us) / 1e6)
    shown_steps = f"{steps:,}" if steps else "-"
    return [str(size), duration(seconds), duration(seconds / size), f"{size / seconds:,.0f}", shown_steps]


def _print_memory(screen: Screen, needed: Mapping[int, Needed]) -> None:
    """What batches need at their peak, above what the loaded model has; nothing if that is little."""
    for name, sizes in {
        "memory": {size: one.host_bytes for size, one in needed.items()},
        "memory of the GPU": {size: one.gpu_bytes for size, one in needed.items()},
    }.items():
        known = {size: needed_bytes for size, needed_bytes in sizes.items() if needed_bytes is not None}
        if max(known.values(), default=0) >= SHOWN_MEMORY_BYTES:
            shown = ", ".join(f"{size}: {value / 2**20:,.1f} MiB" for size, value in known.items())
            screen.print(f"{name} that a batch needs beside the loaded model, by its size: {shown}")


def _print_resumed(screen: Screen, dry_run: DryRun, bodies: Bodies) -> bool:
    """Print whether streams that are cut go on rightly, and return whether none goes wrong."""
    resuming = resume_all(dry_run, bodies, are_same)
    for sentence in sentences(resuming, bodies, _shown):
        screen.print(sentence)
    return not resuming.wrong


def _shown(result: Result) -> str:
    """A result, or an error, in one line."""
    if result.status != OK:
        return f"{result.status}: {result.detail}"
    if not is_value(result.content_type):
        return f"{len(result.body or b''):,} bytes of {result.content_type}"
    return clip(encode_body(JSON, value_of(result)).decode(), SHOWN_CHARS)
