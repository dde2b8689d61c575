"""A configuration of Triton's as a dict: the one that Python models get, every field with a value. Pure.

As Triton's JSON has it: names as in the file, enums as texts, and fields of numbers, texts, enums, lists and
maps that are not given with their defaults. Messages that are not given are absent.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from carpool_worker.triton.schema import ALTERNATIVES, CONFIG, ENUMS, MESSAGES, Declared
from carpool_worker.triton.text_format import Field, Scalar, parse

Config = dict[str, Any]

_DEFAULTS: Final[dict[str, Any]] = {"string": "", "bool": False, "int": 0, "float": 0.0}
_FLAGS: Final = {
    "true": True,
    "True": True,
    "t": True,
    "1": True,
    "false": False,
    "False": False,
    "f": False,
    "0": False,
}
_LIST_SHOWN_MAX: Final = 12
INTEGER_MAX: Final = (1 << 64) - 1


def read_config(text: str, where: str) -> Config:
    """The configuration of a text. `where`: the file, for errors.

    Raises ValueError, which names the line and what is expected, for text that is none, and for fields that
    Triton does not have. What they mean is not looked at.
    """
    return _message(parse(text, where), _Place(where, CONFIG, ""))


def empty_config() -> Config:
    """That of a model without a file."""
    return read_config("", "")


class _Place(NamedTuple):
    """Where a message is. `path`: its name, with a dot behind it; empty for the configuration itself."""

    where: str
    message: str
    path: str

    def error(self, line: int, problem: str) -> ValueError:
        return ValueError(f"{self.where}, line {line}: {problem}")


def _message(fields: Sequence[Field], place: _Place) -> Config:
    declared = MESSAGES[place.message]
    found: Config = {name: _default(one) for name, one in declared.items() if _has_default(one)}
    given: dict[str, int] = {}
    for name, value, line in fields:
        if name not in declared:
            raise place.error(line, f"{place.path}{name}: unknown field; {_hint(name, list(declared))}")
        one = declared[name]
        if name in given and not (one.is_repeated or one.is_map):
            raise place.error(line, f"{place.path}{name}: is given in line {given[name]} already; remove one")
        given[name] = line
        _add(found, Field(name, value, line), one, place)
    for names in ALTERNATIVES.get(place.message, ()):
        chosen = [name for name in given if name in names]
        if len(chosen) > 1:
            problem = f"{place.path}{chosen[1]}: {chosen[0]} is given as well; remove one of them"
            raise place.error(given[chosen[1]], problem)
    return found


def _add(found: Config, field: Field, declared: Declared, place: _Place) -> None:
    if declared.is_map:
        key, value = _map_entry(field, declared, place)
        found[field.name][key] = value
        return
    value = _value(field, declared.type, place)
    if declared.is_repeated:
        found[field.name].append(value)
    else:
        found[field.name] = value


def _map_entry(field: Field, declared: Declared, place: _Place) -> tuple[str, Any]:
    """A pair of a map, which is written as `{ key: ..., value: ... }`."""
    parts = {part.name: part for part in field.value if isinstance(part, Field)}
    if isinstance(field.value, Scalar) or parts.keys() - {"key", "value"}:
        raise place.error(field.line, f"{place.path}{field.name}: expected {{ key: ... value: ... }}")
    key_kind: str = "int" if declared.has_number_keys else "string"
    key = _value(parts["key"], key_kind, place) if "key" in parts else _DEFAULTS[key_kind]
    inner = place._replace(path=f"{place.path}{field.name}.")
    default = Field("value", () if declared.type in MESSAGES else Scalar("text", ""), field.line)
    return str(key), _value(parts.get("value", default)._replace(name=str(key)), declared.type, inner)


def _value(field: Field, kind: str, place: _Place) -> Any:
    name, value, line = field
    if kind == "any":
        return True
    is_message = kind in MESSAGES
    if isinstance(value, Scalar):
        if is_message:
            raise place.error(line, f"{place.path}{name}: expected {{ ... }}, found {value.text!r:.60}")
        try:
            return _scalar(value, kind)
        except ValueError as error:
            raise place.error(line, f"{place.path}{name}: {error}, found {value.text!r:.60}") from None
    if not is_message:
        raise place.error(line, f"{place.path}{name}: expected {_expected(kind)}, found {{ ... }}")
    return _message(value, _Place(place.where, kind, f"{place.path}{name}."))


def _scalar(value: Scalar, kind: str) -> Any:
    """The value of a field of this type. Raises ValueError, which says what is expected."""
    expected = f"expected {_expected(kind)}"
    if kind in ENUMS:
        names = ENUMS[kind]
        if value.kind == "number" and value.text.isdigit() and int(value.text) < len(names):
            return names[int(value.text)]
        if value.kind != "word" or value.text not in names:
            raise ValueError(f"expected {_expected(kind)}")
        return value.text
    if kind == "string" and value.kind == "text":
        return value.text
    if kind == "bool" and value.kind != "text" and value.text in _FLAGS:
        return _FLAGS[value.text]
    try:
        if kind == "int" and value.kind == "number":
            number = int(value.text, 16 if "x" in value.text.lower() else 10)
            if abs(number) <= INTEGER_MAX:
                return number
        if kind == "float" and value.kind != "text":
            return float(value.text.rstrip("fF") if value.kind == "number" else value.text)
    except ValueError:
        pass
    raise ValueError(expected)


def _expected(kind: str) -> str:
    if kind in ENUMS:
        return f"one of {', '.join(ENUMS[kind])}"
    return {
        "string": "a text in quotes",
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
    }[kind]


def _has_default(declared: Declared) -> bool:
    is_scalar = declared.type in _DEFAULTS or declared.type in ENUMS
    return declared.is_repeated or declared.is_map or (is_scalar and not declared.is_optional)


def _default(declared: Declared) -> Any:
    if declared.is_repeated:
        return []
    if declared.is_map:
        return {}
    return ENUMS[declared.type][0] if declared.type in ENUMS else _DEFAULTS[declared.type]


def _hint(name: str, known: list[str]) -> str:
    similar = difflib.get_close_matches(name, known, n=1)
    if similar:
        return f"did you mean {similar[0]}?"
    more = ", ..." if len(known) > _LIST_SHOWN_MAX else ""
    return f"there are {', '.join(known[:_LIST_SHOWN_MAX])}{more}"
