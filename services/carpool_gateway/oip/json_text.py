"""JSON as this protocol has it: bytes -> values, exact or refused.

Beside what JSON has, `NaN`, `Infinity` and `-Infinity` are numbers, because tensors have them. What not
everybody would read alike is refused: a name that is in a map twice, a number outside FP64, a text that UTF-8
cannot encode.

msgspec parses what is usual, many times faster, and reads integers of any size. It neither knows those three
numbers nor sees a name twice; so whatever it refuses, and what may have such a name, is parsed by the
standard library here.

Why: docs/decisions/0091.
"""

from __future__ import annotations

import json
from typing import Any, Final

from carpool.wire.json_rules import (
    LONE_SURROGATE,
    MAX_DEPTH,
    TOO_MANY_DIGITS,
    UnclearError,
    finite,
    has_lone_surrogate,
    with_unique_names,
)
from carpool_gateway.oip.errors import ProtocolError

_SCALARS: Final = frozenset({type(None), bool, int, float, str})


def parse(text: bytes) -> Any:
    """The value of a JSON text. Raises ProtocolError."""
    try:
        value = _DECODER.decode(text.decode())
    except UnicodeDecodeError as error:
        raise ProtocolError(
            f"the JSON is not UTF-8: byte {error.start} is {text[error.start]:02x} hex"
        ) from None
    except RecursionError:
        raise ProtocolError(_TOO_DEEP) from None
    except UnclearError as error:
        raise ProtocolError(str(error)) from None
    except json.JSONDecodeError as error:
        raise ProtocolError(_why_not(error)) from None
    except ValueError:  # of int(), for thousands of digits
        raise ProtocolError(TOO_MANY_DIGITS) from None
    _check_depth(value)
    if has_lone_surrogate(text, value):
        raise ProtocolError(f"the JSON {LONE_SURROGATE}")
    return value


def check_names(text: bytes, names: int, data: list[bytes]) -> None:
    """Raise ProtocolError if a name is twice in a map of this JSON text, in which msgspec has found `names`
    names.

    Each name has one colon, so `names` colons show that there are no others. Those in `data`, values which
    are found in the text and have no maps, are in strings. If there are more, the text is parsed again.
    """
    if text.count(b":") - sum([value.count(b":") for value in data]) != names:
        parse(text)


_DECODER: Final = json.JSONDecoder(object_pairs_hook=with_unique_names, parse_float=finite)
_TOO_DEEP: Final = f"the JSON is nested deeper than {MAX_DEPTH}"


def _why_not(error: json.JSONDecodeError) -> str:
    if error.doc.startswith("\ufeff"):
        return "the JSON begins with a byte order mark (ef bb bf hex): leave it out"
    if not error.doc.strip():
        return "the body is empty: send a JSON object"
    return f"not JSON ({error})"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [item for item in level if type(item) in (dict, list)]
        if not containers:
            return
        level = []
        for container in containers:
            items = container.values() if type(container) is dict else container
            if not _SCALARS.issuperset(map(type, items)):
                level += items
    raise ProtocolError(_TOO_DEEP)
