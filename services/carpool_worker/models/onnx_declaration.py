"""What is declared about an ONNX file beside its graph: states, constants, controls, padding, settings.

A file whose inputs all come from requests needs no declaration. Others have a TOML file of the same name
beside them, for example `vad.toml` for `vad.onnx`:

    max_batch_size = 64             # or any other setting
    outputs = ["label", "scores"]   # those that are the result; by default all but those of states

    [[states]]                      # an output that is an input of the sequence's next request
    input = "state"
    output = "stateN"
    axis = 1                        # where the batch is; by default the only dimension that varies
    initial = 0.0                   # of a sequence: a number, or one row as nested lists; default 0

    [constants]                     # inputs that are the same for every request
    sr = 16000

    [controls]                      # inputs that say where in its sequence a request is
    START = { input = "start", false_true = [0, 1] }
    CORRID = { input = "corrid" }

    [padding.ids]                   # an input whose varying size is padded, so that all sizes share a batch
    buckets = [64, 128]             # to one of these; several such dimensions: { 0 = [64], 1 = [80] }
    pad = 0                         # with this number
    lengths = "lengths"             # an input of the graph that gets the true sizes

    [cut]                           # outputs that are cut back to the true sizes of an input
    logits = "ids"

`shape = [2, -1, 128]`, with -1 for the batch, replaces `axis` where the graph leaves other sizes open. The
same keys may be in the file's metadata, with values in JSON: `carpool.states`, `carpool.constants`, and so
on. What code declares replaces what the TOML file declares, and that replaces the metadata, each key as a
whole.

Why: docs/decisions/0058.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from carpool.model_settings import ModelSettings
from carpool.plugins import UnusableError
from carpool.text_files import read_text

VERSION: Final = "version"
METADATA_PREFIX: Final = "carpool."


class ControlKind(StrEnum):
    """What a control input says, in Triton's words."""

    START = "START"  # whether the request is the first of its sequence
    READY = "READY"  # whether the row holds a request: always
    END = "END"  # whether the request is the last of its sequence
    CORRID = "CORRID"  # which sequence: its ID


@dataclass(frozen=True, slots=True)
class State:
    """A pair of an input and an output. `where` begins every error, here and below: the file and the key."""

    input: str
    output: str
    where: str
    axis: int | None = None
    shape: tuple[int, ...] | None = None
    initial: Any = None


@dataclass(frozen=True, slots=True)
class Constant:
    """An input with its value: a number, a text, or nested lists of them."""

    input: str
    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Control:
    """An input for one kind of control. `false_true`: its two values; None for the usual ones, or an ID."""

    kind: ControlKind
    input: str
    where: str
    false_true: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """An input that is padded. All but `input` and `where` are as in a TensorSpec."""

    input: str
    buckets: Any
    where: str
    pad: Any = 0
    lengths: str = ""


@dataclass(frozen=True, slots=True)
class Cut:
    """An output that is cut back to the true sizes of an input."""

    output: str
    input: str
    where: str


@dataclass(frozen=True, slots=True)
class Outputs:
    """The outputs that are the result, in this order."""

    names: tuple[str, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Declaration:
    """All that is declared about a file. The names are not compared with the graph's yet. `outputs`: None for
    all that are not of states."""

    states: tuple[State, ...] = ()
    constants: tuple[Constant, ...] = ()
    controls: tuple[Control, ...] = ()
    padding: tuple[Padding, ...] = ()
    cut: tuple[Cut, ...] = ()
    outputs: Outputs | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[State | Constant | Control, ...]:
        """All that declare an input."""
        return (*self.states, *self.constants, *self.controls)


def toml_path(path: Path) -> Path:
    """Where the TOML file for an ONNX file is."""
    return path.with_suffix(".toml")


def read_declaration(
    path: Path,
    metadata: Mapping[str, str],
    declared: Mapping[str, Any] | None = None,
    declared_in: str = "",
) -> Declaration:
    """The declaration of an ONNX file with this metadata; `declared` has the same keys, from code, or from
    `declared_in`, a file.

    Raises ValueError, which names the file, the key and what is valid.
    """
    values: dict[str, tuple[Any, str]] = {}
    for prefix, source in (
        (f"{path}: metadata {METADATA_PREFIX}", _read_metadata(path, metadata)),
        (f"{toml_path(path)}: ", _read_toml(toml_path(path))),
        (f"{declared_in or f'{path}: declared in code'}: ", declared or {}),
    ):
        for key, value in source.items():
            if key not in _READERS and key not in (*ModelSettings.names(), VERSION):
                raise ValueError(f"{prefix}{key}: unknown key; valid are {', '.join(_READERS)} and settings")
            values[key] = value, prefix
    settings = {key: _read_setting(key, *values.pop(key)) for key in values.keys() - _READERS.keys()}
    parts = {key: _READERS[key](value, f"{prefix}{key}") for key, (value, prefix) in values.items()}
    return Declaration(settings=settings, **parts)


def _read_metadata(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name, text in metadata.items():
        if not name.startswith(METADATA_PREFIX):
            continue
        try:
            values[name.removeprefix(METADATA_PREFIX)] = json.loads(text)
        except ValueError:
            raise ValueError(f"{path}: metadata {name}: {text!r:.80} is not JSON") from None
    return values


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UnusableError(str(error)) from None
    try:
        return tomllib.loads(text)
    except ValueError as error:
        raise UnusableError(f"{path} is not a TOML file: {error}") from None
    except RecursionError:
        raise UnusableError(f"{path} is not a TOML file: it is nested too deeply") from None


# --- keys --------------------------------------------------------------------------------------------------


def _read_setting(name: str, value: Any, prefix: str) -> Any:
    if name == VERSION:
        return value  # checked as that of any model
    try:
        return getattr(ModelSettings.from_mapping({name: value}), name)
    except ValueError as error:
        raise ValueError(f"{prefix}{error}") from None


def _read_states(value: Any, where: str) -> tuple[State, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: {value!r:.80} must be a list of tables: write [[states]]")
    return tuple(_read_state(table, f"{where}[{number}]") for number, table in enumerate(value))


def _read_state(table: Any, where: str) -> State:
    _check_table(table, ("input", "output", "axis", "shape", "initial"), where)
    axis, shape = table.get("axis"), table.get("shape")
    if axis is not None and shape is not None:
        raise ValueError(f"{where}: has both axis and shape; the -1 in shape is the axis, so leave out axis")
    if axis is not None and (type(axis) is not int or axis < 0):
        raise ValueError(f"{where}.axis: {axis!r:.80} must be a whole number of at least 0")
    if shape is not None and not _is_state_shape(shape):
        raise ValueError(
            f"{where}.shape: {shape!r:.80} must be a list of sizes, -1 for the batch, such as [2, -1, 128]"
        )
    return State(
        input=_read_name(table, "input", where),
        output=_read_name(table, "output", where),
        where=where,
        axis=axis,
        shape=None if shape is None else tuple(shape),
        initial=table.get("initial"),
    )


def _is_state_shape(shape: Any) -> bool:
    return (
        isinstance(shape, list | tuple)
        and all(type(size) is int and (size > 0 or size == -1) for size in shape)
        and list(shape).count(-1) == 1
    )


def _read_constants(value: Any, where: str) -> tuple[Constant, ...]:
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{where}: {value!r:.80} must be a table of inputs with their values, such as sr = 16000"
        )
    return tuple(Constant(name, constant, f"{where}.{name}") for name, constant in value.items())


def _read_controls(value: Any, where: str) -> tuple[Control, ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f'{where}: {value!r:.80} must be a table, such as START = {{ input = "start" }}')
    _check_keys(value, [*ControlKind], f"{where}.")
    return tuple(_read_control(ControlKind(kind), table, f"{where}.{kind}") for kind, table in value.items())


def _read_control(kind: ControlKind, table: Any, where: str) -> Control:
    _check_table(table, ("input",) if kind is ControlKind.CORRID else ("input", "false_true"), where)
    pair = table.get("false_true")
    if pair is not None and not (isinstance(pair, list | tuple) and len(pair) == 2 and pair[0] != pair[1]):
        raise ValueError(
            f"{where}.false_true: {pair!r:.80} must be the values for false and for true, such as [0, 1]"
        )
    return Control(
        kind, _read_name(table, "input", where), where, None if pair is None else (pair[0], pair[1])
    )


def _read_padding(value: Any, where: str) -> tuple[Padding, ...]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r:.80} must be tables by input: write [padding.INPUT]")
    return tuple(_read_padded(name, table, f"{where}.{name}") for name, table in value.items())


def _read_padded(name: str, table: Any, where: str) -> Padding:
    _check_table(table, ("buckets", "pad", "lengths"), where)
    buckets = table.get("buckets")
    if not buckets:
        raise ValueError(f"{where}.buckets: is missing; it must be a list of sizes, such as [64, 128]")
    if isinstance(buckets, Mapping):
        try:
            buckets = {int(axis): sizes for axis, sizes in buckets.items()}
        except ValueError:
            raise ValueError(f"{where}.buckets: its keys must be axes, such as {{ 0 = [64, 128] }}") from None
    lengths = _read_name(table, "lengths", where) if "lengths" in table else ""
    return Padding(name, buckets, where, table.get("pad", 0), lengths)


def _read_cut(value: Any, where: str) -> tuple[Cut, ...]:
    if not (isinstance(value, Mapping) and all(isinstance(name, str) for name in value.values())):
        raise ValueError(f'{where}: {value!r:.80} must be a table of outputs with inputs, such as y = "x"')
    return tuple(Cut(output, name, f"{where}.{output}") for output, name in value.items())


def _read_outputs(value: Any, where: str) -> Outputs:
    if not (isinstance(value, list | tuple) and value and all(isinstance(name, str) for name in value)):
        raise ValueError(f'{where}: {value!r:.80} must be a list of names of outputs, such as ["label"]')
    if len(set(value)) < len(value):
        raise ValueError(f"{where}: {value!r:.80} has a name twice; write each once")
    return Outputs(tuple(value), where)


def _read_name(table: Mapping[str, Any], key: str, where: str) -> str:
    name = table.get(key)
    if not isinstance(name, str):
        problem = "is missing" if name is None else f"{name!r:.80} is not a text"
        kind = "input" if key == "lengths" else key
        raise ValueError(f"{where}.{key}: {problem}; it must be the name of an {kind} of the file")
    return name


def _check_table(value: Any, known: Collection[str], where: str) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: {value!r:.80} must be a table with the keys {', '.join(known)}")
    _check_keys(value, known, f"{where}.")


def _check_keys(value: Mapping[str, Any], known: Collection[str], prefix: str) -> None:
    for key in value:
        if key not in known:
            raise ValueError(f"{prefix}{key}: unknown key; valid are {', '.join(known)}")


_READERS: Final[dict[str, Callable[[Any, str], Any]]] = {
    "states": _read_states,
    "constants": _read_constants,
    "controls": _read_controls,
    "padding": _read_padding,
    "cut": _read_cut,
    "outputs": _read_outputs,
}
