"""What people may be shown of what others sent: texts without control characters, exceptions without texts.

A producer chooses names, fields and bodies, and a terminal obeys some characters: they move the cursor, set
the title, fill the clipboard, or reverse the order of what follows. So they are escaped where people read.

An exception may quote what it is about: `float('4111 1111')` says so. In logs and in what a service shows of
itself, its class and where it was raised take the place of its text.
"""

from __future__ import annotations

import json
import sys
import traceback
import unicodedata
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

_OBEYED: Final = frozenset(
    ("Cc", "Cf", "Cs", "Zl", "Zp")
)  # Unicode's categories of characters that are not drawn
CAUSES_MAX: Final = 8  # of an exception, that are shown
TEXT_CHARS_MAX: Final = 16_000  # of a traceback in the log
_DIRECT: Final = "\nThe above exception was the direct cause of the following exception:\n\n"
_DURING: Final = "\nDuring handling of the above exception, another exception occurred:\n\n"

Keep = Callable[[traceback.FrameSummary], bool]


def printable(text: str) -> str:
    """A text of others on one line: what a terminal would obey is escaped, ends of lines as well."""
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def printable_lines(text: str) -> str:
    """The same, but for ends of lines and tabs: for a text of several lines, of which a part is of others."""
    if text.isprintable():
        return text
    return "".join([letter if letter in "\n\t" else _escaped(letter) for letter in text])


def _escaped(letter: str) -> str:
    if letter.isprintable() or unicodedata.category(letter) not in _OBEYED:
        return letter
    return letter.encode("unicode_escape", "surrogatepass").decode()


def shortened(text: str, chars_max: int = TEXT_CHARS_MAX) -> str:
    """A text for the log; of a long one, the middle is left out: a traceback ends with what was raised."""
    if len(text) <= chars_max:
        return text
    head = chars_max // 4
    left_out = len(text) - chars_max
    return f"{text[:head]}[... {left_out} characters left out ...]{text[head + left_out :]}"


def printable_json(value: Any) -> str:
    """A value as JSON in ASCII that has no control characters."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def complain(text: str) -> None:
    """Write an error of a command to standard error."""
    print(printable_lines(text), file=sys.stderr)


def name_of(error: BaseException, keep: Keep = lambda _: True) -> str:
    """The exception's class and where it was raised, such as `KeyError at model.py:14`. `keep`: which places
    count."""
    kind, places = type(error).__name__, _stack_of(error, keep)
    if not places:
        return kind
    return f"{kind} at {Path(places[-1].filename).name}:{places[-1].lineno}"


def trace_of(error: BaseException, keep: Keep = lambda _: True) -> str:
    """The traceback, without the texts of the exception and of those that it was raised from or during."""
    parts: list[str] = []
    for cause, joint in islice(_with_causes(error), CAUSES_MAX):
        stack = _stack_of(cause, keep)
        head = "Traceback (most recent call last):\n" if stack else ""
        parts.append(f"{head}{''.join(stack.format())}{_qualified(cause)}\n{joint}")
    return "".join(reversed(parts))


def _with_causes(error: BaseException | None) -> Iterator[tuple[BaseException, str]]:
    """An exception, what it was raised from or during, and so on; each with the sentence that joins it
    to the one before, which is empty for the first."""
    joint = ""
    while error is not None:
        yield error, joint
        cause, context = error.__cause__, error.__context__
        is_direct = cause is not None or error.__suppress_context__
        error, joint = (cause, _DIRECT) if is_direct else (context, _DURING)


def _qualified(error: BaseException) -> str:
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ in ("builtins", "__main__")
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _stack_of(error: BaseException, keep: Keep) -> traceback.StackSummary:
    frames = traceback.extract_tb(error.__traceback__)
    return traceback.StackSummary.from_list([frame for frame in frames if keep(frame)])
