"""The parameters of a model: the keyword-only arguments of its `load`, or else of its `__init__`.

    class Classifier:
        def load(self, device, *, weights: Path, threads: int = 4): ...

They are checked against their types before any code of the class runs. pydantic, which does that, is imported
only for a model that has some. A function, and an object that is created in its module, can only have those
of `load`.

Why: docs/decisions/0095.
"""

from __future__ import annotations

import difflib
import inspect
import json
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, NamedTuple, Union

from carpool.plugins import UnusableError
from carpool_worker.model_process.configuration import HIDDEN, TRITON, Parameter

SHOWN_CHARS_MAX: Final = 200  # of a value
_NONE: Final = ("", "none", "null")
_LISTS: Final = (list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """The checked parameters of a model. `shown`: all as text, those by default as well, and secrets hidden.
    `secrets`: texts that nothing may show."""

    of_init: Mapping[str, Any] = field(default_factory=dict)
    of_load: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, str] = field(default_factory=dict)
    secrets: Sequence[str] = ()


class _Declared(NamedTuple):
    """A parameter that a model declares. `adapter`: pydantic's, for its type."""

    name: str
    type: Any
    default: Any
    adapter: Any

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def is_secret(self) -> bool:
        return _has_secret(self.type)

    def __str__(self) -> str:
        """As in a signature, with the default, such as `threads: int = 4`."""
        declared = f"{self.name}: {_type_name(self.type)}"
        if self.is_required:
            return declared
        is_hidden = self.is_secret and self.default is not None
        return f"{declared} = {HIDDEN if is_hidden else _shown_default(self.default)}"


def read_parameters(model: Any, location: str, given: Mapping[str, Parameter], given_in: str = "") -> Values:
    """Check what a model is given against what it declares. `given_in`: the table of a TOML file that has
    parameters of this model, for errors.

    Raises UnusableError, which says all that is wrong, and what the model takes.
    """
    function, declared = _declaration(model)
    if not declared:
        if given:
            raise UnusableError(f"{', '.join(sorted(given))} cannot be given: {_why_none(model, location)}")
        return Values()
    values: dict[str, Any] = {}
    problems = [*_unknown(given, declared), *_missing(given, declared, given_in)]
    for name in declared.keys() & given.keys():
        try:
            values[name] = _value(declared[name], given[name])
        except ValueError as error:
            problems.append(_problem(declared[name], given[name], error))
    if problems:
        takes = ", ".join(map(str, declared.values()))
        raise UnusableError(f"{'; '.join(problems)}. {own_name(model)} takes {takes}")
    in_order = {name: values[name] for name in declared if name in values}
    return Values(
        of_init=in_order if function == "__init__" else {},
        of_load=in_order if function == "load" else {},
        shown={name: _shown(one, values, given) for name, one in declared.items()},
        secrets=[
            str(parameter.value)
            for name, parameter in given.items()
            if parameter.is_secret or declared[name].is_secret
        ],
    )


# --- what a model declares ---------------------------------------------------------------------------------


def _declaration(model: Any) -> tuple[str, dict[str, _Declared]]:
    """The name of the method that has the parameters, and these by name."""
    functions = {"load": getattr(model, "load", None), "__init__": model.__init__}
    for name, function in functions.items():
        if function is None or (name == "__init__" and not inspect.isclass(model)):
            continue
        if keywords := _keywords(function):
            return name, dict(_declared(name, function, keywords))
    return "load", {}


def _keywords(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        arguments = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some C functions have no signature
        return []
    return [argument for argument in arguments if argument.kind is argument.KEYWORD_ONLY]


def _declared(
    function_name: str, function: Callable[..., Any], keywords: Sequence[inspect.Parameter]
) -> Iterator[tuple[str, _Declared]]:
    """One whose type nothing can be read for is no parameter if it has a default."""
    for keyword in keywords:
        try:
            kind = _type_of(keyword, function)
            adapter, why = _adapter(kind), f"no value can be read for the type {_type_name(kind)}"
        except (NameError, AttributeError, SyntaxError, TypeError) as error:
            kind, adapter, why = (
                None,
                None,
                f"its type {keyword.annotation!r:.80} is not known there, {error}",
            )
        if adapter is not None:
            yield keyword.name, _Declared(keyword.name, kind, keyword.default, adapter)
        elif keyword.default is keyword.empty:
            raise UnusableError(
                f"the argument {keyword.name!r} of {function_name!r} cannot be a parameter: {why}; use str, "
                "int, float, bool, Path, an Enum, a Literal, or a list of these, or give it a default"
            )


def _type_of(keyword: inspect.Parameter, function: Callable[..., Any]) -> Any:
    """The type of an argument. An annotation that is a text is evaluated where the function was defined."""
    if keyword.annotation is keyword.empty:
        return _type_of_default(keyword.default)

    def annotated() -> None: ...

    annotated.__annotations__ = {keyword.name: keyword.annotation}
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(annotated, names, include_extras=True)[keyword.name]


def _type_of_default(default: Any) -> Any:
    """The type of an argument without an annotation."""
    return type(default) if isinstance(default, bool | int | float | Path) else str


def _adapter(kind: Any) -> Any:
    """pydantic's adapter for a type; None for one that it does not know."""
    from pydantic import PydanticUserError, TypeAdapter  # noqa: PLC0415 (only for models with parameters)

    try:
        return TypeAdapter(kind)
    except PydanticUserError:
        return None


def _why_none(model: Any, location: str) -> str:
    """Why a model has no parameters, and what to do."""
    name = own_name(model)
    if location.startswith(TRITON):
        return (
            f"{name} takes those of its config.pbtxt, which has none; add them there with their defaults, as "
            'in parameters { key: "a" value { string_value: "b" } }'
        )
    if location.startswith("onnx:"):
        return (
            "an ONNX file takes no parameters; its constants are declared in the TOML file beside it, and "
            "settings may be given with --set"
        )
    if inspect.isroutine(model):
        return (
            f"{name} is a function, which takes no parameters: write a class, whose "
            "`load(self, device, *, weights: Path)` declares them after the `*`"
        )
    return (
        f"{name} takes no parameters: they are the arguments after a `*` of its `load`, as in "
        "`load(self, device, *, weights: Path)`"
    )


# --- values ------------------------------------------------------------------------------------------------


def _unknown(given: Mapping[str, Parameter], declared: Mapping[str, _Declared]) -> Iterator[str]:
    for name in given:
        if name not in declared:
            similar = difflib.get_close_matches(name, declared, n=1)
            hint = f", did you mean {similar[0]}?" if similar else ""
            yield f"there is no parameter {name!r:.80} ({given[name].source}){hint}"


def _missing(
    given: Mapping[str, Parameter], declared: Mapping[str, _Declared], given_in: str
) -> Iterator[str]:
    place = f"{given_in}, or " if given_in else ""
    for name, one in declared.items():
        if one.is_required and name not in given:
            yield f"the parameter {name} is missing ({place}--param {name}=VALUE)"


def _value(declared: _Declared, given: Parameter) -> Any:
    """The value for the model. A text is read as it is, or else as JSON, or for a list at its commas.

    Raises ValueError, such as pydantic's ValidationError.
    """
    value, adapter = given.value, declared.adapter
    if isinstance(value, str) and value.lower() in _NONE and _has(NoneType, declared.type):
        return None
    readers: list[Callable[[Any], Any]] = [lambda text: text]
    if isinstance(value, str):
        readers.append(json.loads)
        if any(_has(kind, declared.type) for kind in _LISTS):
            readers.append(lambda text: [part.strip() for part in text.split(",")])
    first: ValueError | None = None
    for read in readers:
        try:
            found = adapter.validate_python(read(value))
        except ValueError as error:  # pydantic's, and that of JSON
            first = error if first is None or len(readers) > 2 else first
        else:
            return _located(found, given)
    assert first is not None
    raise first


def _located(value: Any, given: Parameter) -> Any:
    """A value in which relative paths start at the folder of the parameter. Raises ValueError for one that
    leads out of the folder that it must be in."""
    if isinstance(value, Path):
        path = Path(given.folder) / value
        if given.within and not path.resolve().is_relative_to(Path(given.within).resolve()):
            raise ValueError(f"must be a path in {given.within}")
        return path
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(_located(one, given) for one in value)
    if isinstance(value, dict):
        return {_located(key, given): _located(one, given) for key, one in value.items()}
    return value


def _problem(declared: _Declared, given: Parameter, error: ValueError) -> str:
    name = f"the parameter {declared.name}"
    if given.is_secret or declared.is_secret:  # what pydantic says may quote it
        return f"{name} ({given.source}) must be of the type {_type_name(declared.type)}"
    found: list[Any] = getattr(error, "errors", list)()
    message = str(found[0]["msg"]) if found else str(error)
    message = message.removeprefix("Value error, ").replace("Input should", "must", 1)
    message = message.partition(", unable to")[0]  # after it, what it is: a text
    return f"{name} ({given.source}) is {given.value!r:.80}: {message}"


# --- for people --------------------------------------------------------------------------------------------


def _shown(declared: _Declared, values: Mapping[str, Any], given: Mapping[str, Parameter]) -> str:
    """The value of a parameter for people."""
    value = values.get(declared.name, declared.default)
    is_secret = declared.is_secret or (declared.name in given and given[declared.name].is_secret)
    if value is None:
        return "none"
    if is_secret:
        return HIDDEN
    try:
        plain = declared.adapter.dump_python(value, mode="json", warnings=False)
    except ValueError:  # a default of another type
        plain = str(value)
    text = plain if isinstance(plain, str) else json.dumps(plain)
    return text if len(text) <= SHOWN_CHARS_MAX else f"{text[:SHOWN_CHARS_MAX]}..."


def _shown_default(default: Any) -> str:
    if isinstance(default, Enum):
        default = default.value
    return f"{str(default) if isinstance(default, Path) else default!r:.60}"


def arguments_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters in the signature of a function of the model; none of one that has no signature."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions
        return {}


def own_name(model: Any) -> str:
    """The name of a function or a class, or of the class of an object."""
    return str(getattr(model, "__name__", type(model).__name__))


def _type_name(kind: Any) -> str:
    """A type as one writes it, without the names of modules; the values of an Enum or a Literal."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is Literal:
        return " | ".join(map(repr, arguments))
    if origin in (Union, UnionType):
        return " | ".join(map(_type_name, arguments))
    if origin is not None:
        return f"{_type_name(origin)}[{', '.join(map(_type_name, arguments))}]"
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return " | ".join(repr(member.value) for member in kind)
    return "None" if kind is NoneType else str(getattr(kind, "__name__", kind))


def _has(part: Any, kind: Any) -> bool:
    """Whether a type is another one, or one of its alternatives."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return _has(part, typing.get_args(kind)[0])
    if origin in (Union, UnionType):
        return any(_has(part, one) for one in typing.get_args(kind))
    return (origin or kind) is part


def _has_secret(kind: Any) -> bool:
    """Whether a type has pydantic's SecretStr or another secret of it in it."""
    is_pydantic = str(getattr(kind, "__module__", "")).startswith("pydantic")
    if is_pydantic and str(getattr(kind, "__name__", "")).startswith("Secret"):
        return True
    return any(map(_has_secret, typing.get_args(kind)))
